//! `{% generation %}` blocks: which bytes of a rendered conversation they enclose. Never tokenizes.
//!
//! The tags become those of a filter block, which marks what it encloses with two noncharacters of Unicode. They are
//! removed from the rendered text, and their places are kept.
use super::conversation::Rendered;
use minijinja::Environment;

/// Noncharacters: Unicode reserves them for such internal use, and no text to learn from contains them.
const OPEN: char = '\u{fdd0}';
const CLOSE: char = '\u{fdd1}';
const FILTER: &str = "generation__block";

/// Replaces the tags, keeping their whitespace controls: the surrounding whitespace is handled as for any block, and
/// line numbers stay the same. Also returns whether there are any.
pub(super) fn marked(text: &str) -> (String, bool) {
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut any, mut raw) = (text, false, false);
    while let Some(at) = ["{%", "{#", "{{"].iter().filter_map(|open| rest.find(open)).min() {
        let (before, tag) = rest.split_at(at + 2);
        out += before;
        if !before.ends_with('%') {
            // A comment or an expression, which is copied; but not where text is raw.
            let close = if before.ends_with('#') { "#}" } else { "}}" };
            let len = if raw { 0 } else { tag.find(close).map_or(tag.len(), |at| at + 2) };
            out += &tag[..len];
            rest = &tag[len..];
            continue;
        }
        let control = tag.len() - tag.trim_start_matches(['-', '+']).len();
        let inside = &tag[control..];
        let word = inside.trim_start();
        let space = inside.len() - word.len();
        let name = word.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        out += &tag[..control + space];
        raw = name == "raw" || raw && name != "endraw";
        match name {
            name if raw => out += name,
            "generation" => out.extend(["filter ", FILTER]),
            "endgeneration" => out += "endfilter",
            name => out += name,
        }
        any |= name == "generation" && !raw;
        rest = &word[name.len()..];
    }
    (out + rest, any)
}

pub(super) fn install(env: &mut Environment) {
    env.add_filter(FILTER, |text: &str| format!("{OPEN}{text}{CLOSE}"));
}

/// The text without the marks, and what was between them.
pub(super) fn unmarked(marked: &str) -> Result<Rendered, String> {
    let (mut text, mut spans) = (String::with_capacity(marked.len()), Vec::new());
    let (mut depth, mut start) = (0, 0);
    for c in marked.chars() {
        match c {
            OPEN => {
                start = if depth == 0 { text.len() } else { start };
                depth += 1;
            }
            CLOSE if depth == 0 => return Err(unbalanced()),
            CLOSE => {
                depth -= 1;
                // A block inside another adds nothing to it.
                spans.extend((depth == 0).then_some(start..text.len()));
            }
            c => text.push(c),
        }
    }
    match depth {
        0 => Ok(Rendered { text, generated: Some(spans) }),
        _ => Err(unbalanced()),
    }
}

fn unbalanced() -> String {
    format!(
        "holds U+{:04X} or U+{:04X}, or its chat template changes the text of a generation block: which tokens have a \
         loss is unknown",
        OPEN as u32, CLOSE as u32
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_keep_their_whitespace_controls() {
        let text = "{%- generation -%}a{% endgeneration +%}\n{% generations %}{{ x }}{%generation%}";
        let expected = format!(
            "{{%- filter {FILTER} -%}}a{{% endfilter +%}}\n{{% generations %}}{{{{ x }}}}{{%filter {FILTER}%}}"
        );
        assert_eq!(marked(text), (expected, true));
        for none in [
            "{# {% generation %} #}{{ '{% generation %}' }}",
            "{% raw %}{# {% generation %}{{ {% endgeneration %}{% endraw %}",
            "{{ x",
        ] {
            assert_eq!(marked(none), (none.into(), false));
        }
        assert!(marked("{#- a -#}{{ {'a': {}} }}{% raw %}{{{% endraw %}{% generation %}").1);
        assert_eq!(marked("{% if x %}generation{% endif %}"), ("{% if x %}generation{% endif %}".into(), false));
    }

    #[test]
    fn marks_are_removed_and_their_places_kept() {
        let made = unmarked(&format!("a{OPEN}b{OPEN}c{CLOSE}{CLOSE}d{OPEN}{CLOSE}")).unwrap();
        assert_eq!(made, Rendered { text: "abcd".into(), generated: Some(vec![1..3, 4..4]) });
        for wrong in [format!("{CLOSE}"), format!("{OPEN}a"), format!("{OPEN}{CLOSE}{CLOSE}")] {
            assert!(unmarked(&wrong).unwrap_err().contains("U+FDD0"));
        }
    }
}
