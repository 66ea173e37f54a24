//! The words of a byte-level pipeline: its splits by regular expressions and digits, one after another, without the
//! library's backtracking engine. Never changes a text.
use regex_automata::meta::{Cache, Regex};
use regex_automata::{Anchored, Input};
use serde_json::Value;
use std::ops::Range;

/// Splits of the pre-tokenizer of `ByteLevel` that GPT-2 uses.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Splits, each of the pieces that the one before it gives.
pub(super) struct Splitter {
    splits: Vec<PreSplit>,
}

enum PreSplit {
    /// Matches are words; so are the stretches between them, unless dropped.
    Pattern { regex: Regex, keeps_rest: bool },
    /// Numeric characters: each is a word, or each run of them is.
    Digits { each: bool },
}

/// What the regular expressions learn about texts.
#[derive(Default)]
pub(super) struct Learned {
    caches: Vec<Option<Cache>>,
}

impl Splitter {
    /// None unless this is a pre-tokenizer that makes characters of bytes, after splits that are known here.
    pub fn new(part: &Value) -> Option<Splitter> {
        let parts = match part["type"].as_str()? {
            "Sequence" => part["pretokenizers"].as_array()?.as_slice(),
            _ => std::slice::from_ref(part),
        };
        let (last, before) = parts.split_last()?;
        let mut splits: Vec<PreSplit> = before.iter().map(PreSplit::new).collect::<Option<_>>()?;
        if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
            return None;
        }
        if last["use_regex"] != false {
            splits.push(PreSplit::pattern(GPT2, true)?);
        }
        Some(Splitter { splits })
    }

    /// Calls `word` with the range of each word of `text`, in order, until it returns None. None if the text is one
    /// that the library must split.
    pub fn split(
        &self,
        memory: &mut Learned,
        text: &str,
        word: &mut dyn FnMut(Range<usize>) -> Option<()>,
    ) -> Option<()> {
        memory.caches.resize_with(self.splits.len(), || None);
        pieces(&self.splits, &mut memory.caches, 0, text, word)
    }
}

/// Splits a piece of the text that begins at `at`.
fn pieces(
    splits: &[PreSplit],
    caches: &mut [Option<Cache>],
    at: usize,
    text: &str,
    word: &mut dyn FnMut(Range<usize>) -> Option<()>,
) -> Option<()> {
    if text.is_empty() {
        return Some(());
    }
    let Some((split, splits)) = splits.split_first() else { return word(at..at + text.len()) };
    let (cache, caches) = caches.split_first_mut()?;
    let mut piece = |range: Range<usize>| pieces(splits, caches, at + range.start, &text[range], word);
    let mut from = 0;
    match split {
        PreSplit::Digits { each } => {
            let mut numeric = false;
            for (here, c) in text.char_indices() {
                if c.is_numeric() != numeric || numeric && *each {
                    piece(from..here)?;
                    from = here;
                }
                numeric = c.is_numeric();
            }
            piece(from..text.len())
        }
        PreSplit::Pattern { regex, keeps_rest } => {
            let cache = cache.get_or_insert_with(|| regex.create_cache());
            while let Some(found) = find(regex, cache, text, from) {
                if found.is_empty() {
                    return None;
                }
                if *keeps_rest {
                    piece(from..found.start)?;
                }
                piece(found.clone())?;
                from = found.end;
            }
            if *keeps_rest { piece(from..text.len()) } else { Some(()) }
        }
    }
}

/// The first match from `from` on.
fn find(regex: &Regex, cache: &mut Cache, text: &str, from: usize) -> Option<Range<usize>> {
    let input = Input::new(text).range(from..);
    // Most words begin where the one before them ends, and then one pass is enough.
    let (start, pattern, end) = match regex.search_half_with(cache, &input.clone().anchored(Anchored::Yes)) {
        Some(found) => (from, found.pattern(), found.offset()),
        None => regex.search_with(cache, &input).map(|found| (found.start(), found.pattern(), found.end()))?,
    };
    // The second pattern is white space, whose last character belongs to the word behind it.
    let last = text[start..end].char_indices().next_back().map_or(start, |(last, _)| start + last);
    let shared = pattern.as_usize() == 1 && end < text.len() && last > start;
    Some(start..if shared { last } else { end })
}

impl PreSplit {
    fn new(part: &Value) -> Option<PreSplit> {
        match part["type"].as_str()? {
            "Digits" => Some(PreSplit::Digits { each: part["individual_digits"].as_bool()? }),
            "Split" => {
                let pattern = match (&part["pattern"]["Regex"], &part["pattern"]["String"]) {
                    (Value::String(regex), Value::Null) => regex.clone(),
                    (Value::Null, Value::String(text)) => regex::escape(text),
                    _ => return None,
                };
                match (part["behavior"].as_str()?, part["invert"].as_bool()?) {
                    ("Isolated", _) => PreSplit::pattern(&pattern, true),
                    ("Removed", true) => PreSplit::pattern(&pattern, false),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// An automaton for `pattern`, whose only look-ahead may be the usual one for white space.
    fn pattern(pattern: &str, keeps_rest: bool) -> Option<PreSplit> {
        if is_possessive(pattern) {
            return None;
        }
        let shared = [r"|\s+(?!\S)|\s+", r"|\s+(?!\S)|\s"].iter().find_map(|end| pattern.strip_suffix(end));
        let patterns = match shared {
            Some(words) => vec![words, r"\s+"],
            None => vec![pattern],
        };
        Some(PreSplit::Pattern { regex: Regex::new_many(&patterns).ok()?, keeps_rest })
    }
}

/// Whether a repetition of `pattern` never gives back a character, as in `a*+`: here that repeats a repetition. Also
/// true for classes that begin with a bracket, which are not followed.
fn is_possessive(pattern: &str) -> bool {
    let (mut chars, mut classes, mut repeated) = (pattern.chars(), 0, false);
    while let Some(c) = chars.next() {
        let again = std::mem::take(&mut repeated);
        match c {
            '\\' => {
                let named = matches!(chars.next(), Some('p' | 'P' | 'x' | 'u' | 'U'));
                if named && chars.as_str().starts_with('{') {
                    chars.by_ref().find(|&c| c == '}');
                }
            }
            '[' if chars.as_str().starts_with(']') || chars.as_str().starts_with("^]") => return true,
            '[' => classes += 1,
            ']' if classes > 0 => classes -= 1,
            '+' if classes == 0 && again => return true,
            '*' | '+' | '?' | '}' => repeated = classes == 0,
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn possessive_repetitions_are_found() {
        for pattern in [r"a*+", r"\p{L}++|b", r"[ab]?+c", r"\d{1,3}+", r"[]a]+"] {
            assert!(is_possessive(pattern), "{pattern}");
        }
        for pattern in [r"\p{L}+", r"[()*+,]+", r"\++", r"a+b+", r"(?:ab)+", r"\x{20}+", r"[^\s\p{L}]+[\r\n]*"] {
            assert!(!is_possessive(pattern), "{pattern}");
        }
        assert!(Splitter::new(&serde_json::json!({"type": "Whitespace"})).is_none());
    }
}
