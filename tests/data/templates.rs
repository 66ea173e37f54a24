//! Chat templates compared with transformers: every template of golden/templates on every conversation of make.py.
use super::*;
use flatshard::data::ChatTemplate;
use minijinja::Value as Message;
use serde_json::Value;

fn source(name: &str) -> String {
    fs::read_to_string(tokens::golden("templates").join(format!("{name}.jinja"))).unwrap()
}

#[test]
fn conversations_are_rendered_as_by_transformers() {
    let golden: Value = serde_json::from_slice(&fs::read(tokens::golden("templates/golden.json")).unwrap()).unwrap();
    let special = (golden["bos"].as_str().unwrap(), golden["eos"].as_str().unwrap());
    let (mut rendered, mut refused) = (0, 0);
    for case in golden["cases"].as_array().unwrap() {
        let (name, chat) = (case["template"].as_str().unwrap(), case["chat"].as_str().unwrap());
        let template = ChatTemplate::new(&source(name), special).unwrap();
        let messages = golden["chats"][chat].as_array().unwrap();
        let messages: Vec<Message> = messages.iter().map(Message::from_serialize).collect();
        let text = template.render(&messages, case["prompt"].as_bool().unwrap());
        match case["text"].as_str() {
            Some(expected) => {
                assert_eq!(text.unwrap(), expected, "{name}, {chat}");
                rendered += 1;
            }
            None => {
                let fault = text.expect_err(&format!("{name}, {chat}: transformers refuses it ({})", case["error"]));
                assert!(fault.contains("line ") && fault.contains("of the chat template"), "{fault}");
                let said = case["error"].as_str().unwrap();
                assert!(fault.contains(said) || said.starts_with("can only concatenate"), "{fault}: {said}");
                refused += 1;
            }
        }
    }
    assert!(rendered >= 70 && refused >= 10, "{rendered} rendered, {refused} refused");
}

#[test]
fn values_print_as_in_python() {
    let table: Value = serde_json::from_slice(&fs::read(tokens::golden("values/table.json")).unwrap()).unwrap();
    let expressions: Vec<&str> = table["expressions"].as_array().unwrap().iter().map(|e| e.as_str().unwrap()).collect();
    let new = |source: &str| ChatTemplate::new(&format!("{{% set v = messages[0].w.v %}}{source}"), ("", ""));
    let mut wrong = Vec::new();
    let mut compare = |source: &str, value: &str, found: Result<String, String>, expected: &Value| {
        if found.as_deref().ok() != expected.as_str() {
            wrong.push(format!("{source} of {value}: {found:?}, in Python {expected}"));
        }
    };
    for source in table["alone"].as_array().unwrap() {
        let (source, expected) = (source[0].as_str().unwrap(), &source[1]);
        let found = new(source).and_then(|template| template.render(&[message_with(Value::Null)], false));
        compare(source, "nothing", found, expected);
    }
    let templates: Vec<ChatTemplate> = expressions.iter().map(|source| new(source).unwrap()).collect();
    let mut texts = 0;
    for row in table["rows"].as_array().unwrap() {
        let value = row["value"].as_str().unwrap();
        let message = message_with(serde_json::from_str(value).unwrap());
        for case in row["rendered"].as_array().unwrap() {
            let at = case[0].as_u64().unwrap() as usize;
            compare(expressions[at], value, templates[at].render(std::slice::from_ref(&message), false), &case[1]);
            texts += 1;
        }
    }
    assert!(texts > 4000 && wrong.is_empty(), "{texts} texts, {} differ:\n{}", wrong.len(), wrong.join("\n"));
}

fn message_with(value: Value) -> Message {
    Message::from_serialize(serde_json::json!({"role": "user", "w": {"v": value}}))
}

/// From Python 3.11: Jinja 3.1's filters and the methods of strings.
#[test]
fn numbers_round_and_texts_part_as_in_python() {
    for (source, expected) in [
        (
            "{{ 2.5 | round }} {{ 3.5 | round }} {{ 2.675 | round(2) }} {{ 7 | round }} {{ -2.5 | round }}",
            "2.0 4.0 2.67 7 -2.0",
        ),
        ("{{ 2.1 | round(0, 'ceil') }} {{ 2.19 | round(1, method='floor') }} {{ 1250 | round(-2) }}", "3.0 2.1 1200"),
        (
            "{{ 'a, b, c'.rsplit(', ', 1) }} {{ ' a b  c '.rsplit() }} {{ 'a b c'.rsplit(None, 1) }}",
            "['a, b', 'c'] ['a', 'b', 'c'] ['a b', 'c']",
        ),
        (
            "{{ 'a,b,c'.split(',', maxsplit=1) }} {{ 'a,b'.rsplit(sep=',') }} {{ ' a b '.split() }}",
            "['a', 'b,c'] ['a', 'b'] ['a', 'b']",
        ),
        (
            "{{ 'k=v=w'.partition('=') | list }} {{ 'k=v=w'.rpartition('=')[2] }} {{ 'kv'.partition('=')[1] }}",
            "['k', '=', 'v=w'] w ",
        ),
        ("{{ '<think>x'.removeprefix('<think>') }}{{ 'xy'.removesuffix('y') }}{{ 'x'.removeprefix('z') }}", "xxx"),
    ] {
        assert_eq!(
            ChatTemplate::new(source, ("", "")).unwrap().render(&[message_with(Value::Null)], false).unwrap(),
            expected,
            "{source}"
        );
    }
}

/// Fields of messages that are null are left out, as by transformers 5.24; named tokens are variables.
#[test]
fn null_fields_are_absent_and_special_tokens_are_variables() {
    let source = "{% for m in messages %}[{{ m.role }}{{ m.content }}{{ m.tool_calls is defined }}{{ m.x.y }}]{% endfor %}{{ pad_token }}{{ bos_token }}";
    let tokens = [("pad_token".to_string(), "<pad>".to_string())];
    let template = ChatTemplate::new(source, ("<s>", "</s>")).unwrap().with_tokens(&tokens);
    let message = serde_json::json!({"role": "assistant", "content": null, "tool_calls": null, "x": {"y": null}});
    assert_eq!(template.render(&[Message::from_serialize(message)], false).unwrap(), "[assistantFalseNone]<pad><s>");
}

#[test]
fn a_failing_template_names_its_line() {
    let new = |text: &str| ChatTemplate::new(text, ("<s>", "</s>"));
    let fault = new("{% for m in messages %}\n{{ m.content }\n{% endfor %}").unwrap_err();
    assert!(fault.starts_with("line 2 of the chat template"), "{fault}");
    let template = new("a\n\n{{ raise_exception('no ' + messages[0].role) }}").unwrap();
    let message = |role: &str| Message::from_serialize(serde_json::json!({"role": role, "content": "x"}));
    assert_eq!(
        template.render(&[message("tool")], false).unwrap_err(),
        "is rejected by line 3 of the chat template: no tool"
    );
    let template = new("{{ messages[0].nothing.at_all }}").unwrap();
    assert!(
        template
            .render(&[message("user")], false)
            .unwrap_err()
            .starts_with("is rejected by line 1 of the chat template")
    );
}

#[test]
fn the_date_is_todays() {
    let template =
        ChatTemplate::new("{{ strftime_now('%Y') }}|{{ strftime_now('%d %b') | length }}", ("", "")).unwrap();
    let text = template.render(&[], false).unwrap();
    let (year, length) = text.split_once('|').unwrap();
    assert!((2024..2100).contains(&year.parse::<u32>().unwrap()) && length == "6", "{text}");
}

#[test]
fn hostile_templates_fail_quickly_with_a_reason() {
    let double = |start: &str, step: &str| {
        format!(
            "{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
        )
    };
    let text = "MiB of text";
    let cases = [
        (double("'ab'", "ns.x ~ ns.x"), text),
        (double("'ab'", "ns.x + ns.x"), text),
        (double("'ab'", "ns.x|replace('', ns.x)"), "MiB of text"),
        (double("'ab'", "[ns.x, ns.x]|join(ns.x)"), text),
        (double("'ab'", "'%s%s' | format(ns.x, ns.x)"), text),
        (double("'ab'", "'{}{}'.format(ns.x, ns.x)"), text),
        (double("'ab'", "'%s%s' % (ns.x, ns.x)"), text),
        (double("'ab'", "'{0}{0}'.format(ns.x)"), text),
        (double("'ab'", "'%(a)s%(a)s' | format(a=ns.x)"), text),
        (double("'\"ab\"'", "ns.x | tojson"), text),
        (double("\"'a'\\\\\"", "[ns.x] | string"), text),
        (double("\"'a'\\\\\"", "[ns.x] ~ ''"), text),
        (double("\"'a'\\\\\"", "'%r' % ns.x"), text),
        (double("'&'", "(ns.x | e | string).replace('&', '&&')"), text),
        (double("'ab'", "ns.x | indent(ns.x) ~ '\n' ~ ns.x"), text),
        ("{% set n = 1000000000000 %}{{ '%*d' % (n, 1) }}{{ '%*s' % (n, 1) }}".into(), text),
        ("{% set n = 1000000000000 %}{{ '{:>{w}}'.format('a', w=n) }}".into(), text),
        ("{% set n = 1000000000000 %}{{ '%.*f' % (n, 1.5) }}".into(), text),
        ("{{ '%99999999999999999999s' % messages }}".into(), text),
        ("{% set n = 9000000 %}{{ (messages * 100) | tojson(indent=' ' * n) }}".into(), text),
        (double("[1, 2]", "ns.x + ns.x") + "{{ ns.x | length }}", "1000000 parts"),
        (double("[1, 2]", "[ns.x, ns.x]") + "{{ ns.x }}", "1000000 parts"),
        (double("[1, 2]", "[ns.x, ns.x]") + "{{ ns.x == ns.x }}", "1000000 parts"),
        (double("[1, 2]", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x | tojson }}", "1000000 parts"),
        (double("[1, 2]", "ns.x[1:] + ns.x[:1] + ns.x"), "1000000 parts"),
        ("{% set x = 'ab' %}".to_string() + &"{% set x = x ~ x %}".repeat(60), text),
        ("{% set x = 'ab' %}".to_string() + &"{% set x %}{{ x }}{{ x }}{% endset %}".repeat(60), text),
        ("{% macro f(x, n) %}{{ f(x ~ x, n - 1) if n else '' }}{% endmacro %}{{ f('ab', 60) }}".into(), text),
        ("{{ 'a\nb' | indent(100000000000) }}".into(), "MiB of text"),
        ("{{ 'a\nb' | indent(width=100000000000) }}".into(), "MiB of text"),
        ("{{ messages | tojson(indent=1000000000) }}".into(), "MiB of text"),
        ("{{ '%1000000000d' | format(1) }}".into(), "MiB of text"),
        ("{{ '{:1000000000}'.format(1) }}".into(), "MiB of text"),
        ("{{ [1] | batch(1000000000, 0) | list }}".into(), "MiB of text"),
        ("{{ [1] | slice(1000000000) | list }}".into(), "MiB of text"),
        ("{% set n = 1000000000000 %}{{ ([1] * n) | length }}".into(), "1000000 parts"),
        ("{% set n = 1000000000000 %}{{ 2 in [1] * n }}".into(), "1000000 parts"),
        ("{% set n = 90000000 %}{{ 'a' * n }}".into(), text),
        ("{{ 'a' * 99999999 * 9 }}".into(), text),
        ("{{ ('a') * (9999 * 9999) }}".into(), text),
        ("{{ 'a'.center(1000000000000) }}{{ 'a' | center(9) }}".into(), text),
        ("{{ '\t'.expandtabs(1000000000000) }}".into(), text),
        ("{{ range(99999999999) }}".into(), "100000 items"),
        // An invalid token stays invalid, however often the text is parsed.
        ("a\n{{ a ; b }}".into(), "line 2 of the chat template"),
        ("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}".into(), "64 levels"),
        (
            "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}".into(),
            "64 levels",
        ),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}".into(), "instructions"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}".into(), "instructions"),
        ("{% for i in range(99999) %}".to_string() + &"x".repeat(99_999) + "{% endfor %}", "MiB of text"),
        ("{{ ".to_string() + &"a + ".repeat(99_999) + "a }}", "more than 2000 tokens"),
        ("{% block a %}{{ self.a() }}{% endblock %}".into(), "blocks"),
        ("{% include 'chat template' %}".into(), "other templates"),
        ("{{ raise_exception('no' ~ messages[0].content * 100) }}".into(), "nononono"),
    ];
    let message = |content: &str| Message::from_serialize(serde_json::json!({"role": "user", "content": content}));
    let refused = |(source, says): &(String, &str)| {
        let fault = ChatTemplate::new(source, ("", "")).and_then(|t| t.render(&[message("no")], false)).unwrap_err();
        let start: String = source.chars().take(100).collect();
        assert!(fault.contains(says) && fault.chars().count() < 400, "{start}: {fault}");
        assert!(fault.contains("of the chat template") || !fault.contains("is rejected by"), "{start}: {fault}");
    };
    crate::common::time::in_own_time(|| cases.iter().for_each(refused));
    let sum = format!("{{{{ {}1 }}}}", "1 - a + ".repeat(490)).replace('a', "(messages | length)");
    assert_eq!(
        ChatTemplate::new(&sum[..], ("", "")).unwrap_err(),
        "the chat template: an expression has more than 2000 tokens"
    );
    let sum = format!("{{{{ {}1 }}}}", "n + ".repeat(990)).replace('n', "1");
    assert_eq!(ChatTemplate::new(&sum, ("", "")).unwrap().render(&[message_with(Value::Null)], false).unwrap(), "991");
    // Within the limits nothing changes: a long conversation whose parts are copied, joined and multiplied.
    let long: Vec<Message> = (0..2000).map(|i| message(&format!("{i} ").repeat(100))).collect();
    let source = "{% set ns = namespace(n=0, all='') %}{% for m in messages[1:] %}{% set ns.n = ns.n + \
    m.content|length %}\
                  {{ ' ' * loop.index0 }}{{ m['content'].strip() }}{% endfor %}{{ ns.n }}";
    let text = ChatTemplate::new(source, ("", "")).unwrap().render(&long, false).unwrap();
    let letters: usize = (1..2000).map(|i| format!("{i} ").len() * 100).sum();
    assert!(text.ends_with(&letters.to_string()) && text.len() > letters, "{} {letters}", text.len());
}
