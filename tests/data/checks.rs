//! Jinja's tests, slices, predicates of texts, line ends and names of thoughts, as transformers has them: the table of
//! golden/checks.py.
use super::*;
use flatshard::data::ChatTemplate;
use minijinja::Value as Message;
use serde_json::{Value, json};

fn table() -> Value {
    serde_json::from_slice(&fs::read(tokens::golden("checks.json")).unwrap()).unwrap()
}

fn rendered(template: &ChatTemplate, messages: &Value) -> Option<String> {
    let messages: Vec<Message> = messages.as_array().unwrap().iter().map(Message::from_serialize).collect();
    template.render(&messages, false).ok()
}

#[test]
fn values_are_told_apart_and_cut_as_in_python() {
    let (table, mut wrong) = (table(), Vec::new());
    let sources: Vec<&str> = table["sources"].as_array().unwrap().iter().map(|s| s.as_str().unwrap()).collect();
    let new = |source: &&str| ChatTemplate::new(&format!("{{% set v = messages[0].w.v %}}{source}"), ("", "")).unwrap();
    let templates: Vec<ChatTemplate> = sources.iter().map(new).collect();
    for row in table["values"].as_array().unwrap() {
        let value: Value = serde_json::from_str(row[0].as_str().unwrap()).unwrap();
        let messages = json!([{"role": "user", "w": {"v": value}}]);
        for (i, template) in templates.iter().enumerate() {
            let (found, expected) = (rendered(template, &messages), row[1][i].as_str());
            if found.as_deref() != expected {
                wrong.push(format!("{} of {value}: {found:?}, in Python {expected:?}", sources[i]));
            }
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn constants_macros_and_ranges_are_those_of_jinja() {
    for case in table()["alone"].as_array().unwrap() {
        let source = case[0].as_str().unwrap();
        let found = ChatTemplate::new(source, ("", "")).unwrap();
        assert_eq!(rendered(&found, &json!([{"role": "user"}])).as_deref(), case[1].as_str(), "{source}");
    }
}

#[test]
fn thoughts_have_the_names_that_templates_read() {
    let table = table();
    let template = ChatTemplate::new(table["template"].as_str().unwrap(), ("", "")).unwrap();
    for case in table["thoughts"].as_array().unwrap() {
        assert_eq!(rendered(&template, &case[0]).as_deref(), case[1].as_str(), "{}", case[0]);
    }
    let reads = ChatTemplate::new("{{ messages[0].reasoning_content }}", ("", "")).unwrap();
    assert!(reads.mentions("thinking") && reads.mentions("reasoning") && !reads.mentions("content"));
}
