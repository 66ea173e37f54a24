//! Chat templates against transformers: every template of golden/templates over every conversation of make.py.
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
fn a_template_that_fails_says_where() {
    let new = |text: &str| ChatTemplate::new(text, ("<s>", "</s>"));
    let fault = new("{% for m in messages %}\n{{ m.content }\n{% endfor %}").unwrap_err();
    assert!(fault.starts_with("line 2 of the chat template"), "{fault}");
    let template = new("a\n\n{{ raise_exception('no ' + messages[0].role) }}").unwrap();
    let message = |role: &str| Message::from_serialize(serde_json::json!({"role": role, "content": "x"}));
    assert_eq!(template.render(&[message("tool")], false).unwrap_err(), "line 3 of the chat template: no tool");
    let template = new("{{ messages[0].nothing.at_all }}").unwrap();
    assert!(template.render(&[message("user")], false).unwrap_err().starts_with("line 1 of"));
}

#[test]
fn the_date_is_todays() {
    let template =
        ChatTemplate::new("{{ strftime_now('%Y') }}|{{ strftime_now('%d %b') | length }}", ("", "")).unwrap();
    let text = template.render(&[], false).unwrap();
    let (year, length) = text.split_once('|').unwrap();
    assert!((2024..2100).contains(&year.parse::<u32>().unwrap()) && length == "6", "{text}");
}
