//! Fields of rows and messages: each is used as other trainers use it, or named; and which tokens have a loss.
use super::sft::{chatml, keys, make, open, recipe};
use super::*;
use flatshard::data::{ChatTemplate, Drop, InputLoss, LabelKeys, Outcome, PairKeys, Preferences, TokenizedRow};
use serde_json::{Value, json};

/// A template of one line per message, with tools before them.
pub const TOOLS: &str = "{% for t in tools or [] %}[tool {{ t.name }}]{% endfor %}{% for m in messages %}<|{{ m.role }}|>\
                     {{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
/// As thinking models: thoughts of answers before the last user message are left out.
pub const THINKING: &str = "{%- set ns = namespace(last=0) %}{%- for m in messages %}{% if m.role == 'user' %}\
    {% set ns.last = loop.index0 %}{% endif %}{% endfor %}{%- for m in messages %}{%- set text = m.content %}\
    {%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in text %}\
    {% set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}{{- '<|' + m.role + '|>' + text }}\
    {%- for c in (m.tool_calls or []) %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}{{- '<|end|>\n' }}\
    {%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";

pub fn format(template: &str) -> Format {
    let chat = ChatTemplate::new(template, ("<s>", "</s>")).unwrap();
    Format { chat: Some(Arc::new(chat)), apply_chat_template: true, ..Format::default() }
}
pub fn turns(template: &str) -> Format {
    Format { multiturn: true, ..format(template) }
}
pub fn say(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}
pub fn row(format: Format, row: &Value) -> (TokenizedRow, Outcome) {
    let mut out = TokenizedRow::default();
    let recipe = flatshard::data::Recipe { max_len: 100_000, ..recipe(format) };
    let outcome = recipe.row(row.as_object().unwrap(), &mut out).unwrap_or_else(|fault| panic!("{row}: {fault}"));
    (out, outcome)
}
/// The text, and its stretches with loss.
pub fn seen(format: Format, from: &Value) -> (String, Vec<String>) {
    let (row, outcome) = row(format, from);
    assert_eq!(outcome, Outcome::Kept, "{from}");
    let mut loss: Vec<Vec<u32>> = vec![vec![]];
    for (&id, &label) in row.ids.iter().zip(&row.labels) {
        match label {
            IGNORE => loss.push(vec![]),
            _ => loss.last_mut().unwrap().push(id),
        }
    }
    let loss = loss.iter().filter(|ids| !ids.is_empty()).map(|ids| Tokenizer::Bytes.decode(ids)).collect();
    (Tokenizer::Bytes.decode(&row.ids), loss)
}
pub fn dropped(format: Format, from: Value) -> Drop {
    match row(format, &from).1 {
        Outcome::Dropped(why) => why,
        other => panic!("{from}: {other:?}"),
    }
}

/// JSON text of messages is messages in every field, as tables hold them: next to text, too.
#[test]
fn messages_as_text_are_messages_in_every_field() {
    let (asked, answer) = (json!([say("system", "s"), say("user", "q")]), json!([say("assistant", "a")]));
    let (expected, loss) = ("<|system|>s<|end|>\n<|user|>q<|end|>\n<|assistant|>a<|end|>", ["a<|end|>"]);
    let plain = || Format { apply_chat_template: false, ..format(TOOLS) };
    let named = |format: Format| Format { input_key: Some("x".into()), output_key: Some("y".into()), ..format };
    let pairs = |prompt: &str, chosen: &str, rejected: &str| PairKeys {
        prompt: prompt.into(),
        chosen: chosen.into(),
        rejected: rejected.into(),
        ..PairKeys::default()
    };
    for text in [json!(answer.to_string()), json!("a")] {
        for format in [plain, || format(TOOLS)] {
            let row = json!({"x": asked.to_string(), "y": text, "z": "b", "label": 1});
            assert_eq!(seen(named(format()), &row), (expected.into(), loss.map(String::from).to_vec()));
            let labels = LabelKeys { prompt: "x".into(), completion: "y".into(), ..LabelKeys::default() };
            let judged = |rows: Preferences| Format { preferences: Some(rows), ..format() };
            let (made, _) = self::row(judged(Preferences::Labels(labels)), &row);
            assert!(Tokenizer::Bytes.decode(&made.ids).starts_with(expected));
            let (made, _) = self::row(judged(Preferences::Pairs(pairs("x", "y", "z"))), &row);
            assert_eq!(Tokenizer::Bytes.decode(&made.ids), format!("{expected}{}", expected.replace(">a<", ">b<")));
        }
    }
    // Brackets alone are text.
    let (text, _) = seen(named(plain()), &json!({"x": "[1] why?", "y": "[2]"}));
    assert!(text.starts_with("[1] why?[2]"), "{text}");
}

/// As TRL's `extract_prompt`: what two answers begin with is their prompt, as texts or as messages.
#[test]
fn a_prompt_is_what_two_answers_begin_with() {
    let judged = |format: Format| Format { preferences: Some(Preferences::Pairs(PairKeys::default())), ..format };
    let decoded = |made: &TokenizedRow| {
        let answers: Vec<u32> =
            made.ids.iter().zip(&made.labels).filter(|(_, label)| **label != IGNORE).map(|(id, _)| *id).collect();
        (Tokenizer::Bytes.decode(&made.ids), Tokenizer::Bytes.decode(&answers))
    };
    // Anthropic HH as it is published.
    let asked = "\n\nHuman: why?\n\nAssistant:";
    let hh = json!({"chosen": format!("{asked} because"), "rejected": format!("{asked} no")});
    let (text, answers) = decoded(&row(judged(Format::default()), &hh).0);
    assert!(text.starts_with(asked) && answers.starts_with(" because") && answers.contains(" no"), "{text} {answers}");
    // One of them begins with the other, and so with all of its answer.
    let hh = json!({"chosen": format!("{asked} no, never"), "rejected": format!("{asked} no")});
    let (text, answers) = decoded(&row(judged(Format::default()), &hh).0);
    assert!(text.starts_with(asked) && answers.starts_with(" no, never") && answers.ends_with(" no"), "{answers}");
    // Whole sequences of ids are scored: the first stands for a prompt.
    let keys = PairKeys { scored: true, ..PairKeys::default() };
    let scored = |format| Format { preferences: Some(Preferences::Pairs(keys.clone())), ..format };
    let (made, _) = row(scored(Format::default()), &json!({"chosen_ids": [5, 6, 7], "rejected_ids": [5, 8]}));
    assert_eq!((&made.ids[..5], &made.labels[..5]), (&[5, 6, 7, 5, 8][..], &[IGNORE, 6, 7, IGNORE, 8][..]));
    // Each may follow a prompt of its own.
    let talk = |asked: &str, answer: &str| json!([say("user", asked), say("assistant", answer)]);
    let (_, answers) =
        decoded(&row(scored(format(TOOLS)), &json!({"chosen": talk("p", "so"), "rejected": talk("q", "so")})).0);
    assert_eq!(answers.matches("so").count(), 2, "{answers}");
    let mut out = TokenizedRow::default();
    let none = json!({"chosen": "a", "rejected": "b"});
    let fault = recipe(judged(Format::default())).row(none.as_object().unwrap(), &mut out).unwrap_err();
    assert!(fault.contains("has no `prompt`") && fault.contains("Name it with `prompt_key`"), "{fault}");
    // Conversations that part before their last message.
    let [q, a, b] = [say("user", "q"), say("assistant", "a"), say("assistant", "b")];
    let pair = json!({"chosen": [q, a, say("user", "r"), a], "rejected": [q, b, say("user", "s"), b]});
    let turn = |role: &str, text: &str| format!("<|{role}|>{text}<|end|>\n");
    let (_, answers) = decoded(&row(judged(format(TOOLS)), &pair).0);
    let of = |answer: &str, next: &str| {
        format!("{answer}<|end|>\n{}{}", turn("user", next), turn("assistant", answer).trim_end())
    };
    assert_eq!(answers, format!("{}{}", of("a", "r"), of("b", "s")));
    // An answer of several messages, after a prompt.
    let pair = json!({"prompt": [q], "chosen": [a, say("tool", "t"), a], "rejected": [b]});
    let (_, answers) = decoded(&row(judged(format(TOOLS)), &pair).0);
    assert!(answers.starts_with(&format!("a<|end|>\n{}", turn("tool", "t"))), "{answers}");
}

/// A time in a message is in the way of a template that reads it, and of no other (WildChat has one in each).
#[test]
fn values_that_json_does_not_have_are_in_the_way_where_they_are_read() {
    let file = tokens::golden("parquet").join("types.parquet");
    let mut rows = Vec::new();
    let mut each = |_: String, row: flatshard::data::RowResult<flatshard::data::JsonRow>| {
        rows.push(Value::Object(row.unwrap()));
        Ok(())
    };
    flatshard::data::each_row(&[file], &Default::default(), &mut each).unwrap();
    let time = &rows[0]["timestamp_us"];
    assert!(time.is_object());
    let asked = json!({"role": "user", "content": "a", "at": time});
    let talk = json!({"messages": [asked, say("assistant", "b")]});
    assert_eq!(seen(format(TOOLS), &talk).0, "<|user|>a<|end|>\n<|assistant|>b<|end|>");
    assert_eq!(row(format(TOOLS), &talk).0.unread, ["`at` of messages (not in the chat template)"]);
    let reads = "{% for m in messages %}{{ m.at }}{{ m.content }}{% endfor %}";
    let mut out = TokenizedRow::default();
    let fault = recipe(format(reads)).row(talk.as_object().unwrap(), &mut out).unwrap_err();
    assert!(fault.contains("holds a timestamp"), "{fault}");
}

/// A row about pictures is not one of its text alone, unless there are none.
#[test]
fn conversations_with_pictures_are_refused() {
    let talk = json!([say("user", "<image>who?"), say("assistant", "a")]);
    for (key, value) in [("images", json!(["a.jpg"])), ("image", json!("a.jpg")), ("videos", json!([{"bytes": null}]))]
    {
        for mut from in [json!({ "messages": talk }), json!({"prompt": [talk[0]], "completion": [talk[1]]})] {
            from[key] = value.clone();
            let mut out = TokenizedRow::default();
            let fault = recipe(format(TOOLS)).row(from.as_object().unwrap(), &mut out).unwrap_err();
            assert!(fault.contains(&format!("has `{key}`, and only text is trained on")), "{fault}");
        }
    }
    for none in [json!([]), json!(null), json!("")] {
        assert_eq!(row(format(TOOLS), &json!({"messages": talk, "images": none})).1, Outcome::Kept);
    }
    // Next to a text it is another column.
    assert_eq!(row(Format::default(), &json!({"text": "a text", "image": "a.jpg"})).0.unread, ["`image`"]);
}

/// A field that is named holds the system prompt, in rows whose prompt and answer are named too.
#[test]
fn a_named_field_holds_the_system_prompt() {
    let of = |format: Format| Format { system_key: Some("rules".into()), ..format };
    let keyed = |format: Format| Format { input_key: Some("x".into()), output_key: Some("y".into()), ..format };
    let row = json!({"rules": "be brief", "x": "q", "y": "a", "system": "unused"});
    let expected = "<|system|>be brief<|end|>\n<|user|>q<|end|>\n<|assistant|>a<|end|>";
    assert_eq!(seen(of(keyed(format(TOOLS))), &row), (expected.into(), vec!["a<|end|>".into()]));
    let talk = json!({"rules": "be brief", "messages": [say("user", "q"), say("assistant", "a")]});
    assert_eq!(seen(of(format(TOOLS)), &talk).0, expected);
    assert!(self::row(of(format(TOOLS)), &talk).0.unread.is_empty());
    // A row without it has none; text without a template has no place for it.
    assert_eq!(seen(of(keyed(format(TOOLS))), &json!({"x": "q", "y": "a"})).0, expected.split_once('\n').unwrap().1);
    let plain = Format { chat: None, apply_chat_template: false, ..of(keyed(format(TOOLS))) };
    let mut out = TokenizedRow::default();
    let fault = recipe(plain).row(row.as_object().unwrap(), &mut out).unwrap_err();
    assert!(fault.contains("has a system, which text without a chat template cannot express"), "{fault}");
}

#[test]
fn tools_and_other_variables_reach_the_template() {
    let talk = json!([say("user", "warm?"), say("assistant", "yes")]);
    let tools = json!([{"name": "weather"}]);
    let expected = "[tool weather]<|user|>warm?<|end|>\n<|assistant|>yes<|end|>";
    for tools in [tools.clone(), json!(tools.to_string())] {
        let from = json!({"messages": talk, "tools": tools});
        assert_eq!(seen(format(TOOLS), &from), (expected.into(), vec!["yes<|end|>".into()]));
        assert_eq!(seen(turns(TOOLS), &from).1, ["yes<|end|>"]);
        let (text, _) =
            seen(Format { input_key: Some("talk".into()), ..format(TOOLS) }, &json!({"talk": talk, "tools": tools}));
        assert_eq!(text, expected);
    }
    for none in [json!(null), json!([]), json!(""), json!("null")] {
        let (text, _) = seen(format(TOOLS), &json!({"messages": talk, "tools": none}));
        assert_eq!(text, "<|user|>warm?<|end|>\n<|assistant|>yes<|end|>");
    }
    let kwargs = "{{ 'T' if thinking else 'F' }}{% for m in messages %}{{ m.content }}.{% endfor %}";
    let from = json!({"messages": talk, "chat_template_kwargs": {"thinking": true, "other": 1}});
    let (made, _) = row(format(kwargs), &from);
    assert_eq!(Tokenizer::Bytes.decode(&made.ids), "Twarm?.yes.");
    assert_eq!(made.unread, ["`other` of chat_template_kwargs (not in the chat template)"]);
    for (field, says) in [
        (json!({"tools": 3}), "a number as tools; a list is expected"),
        (json!({"tools": "weather"}), "text, but not JSON"),
        (json!({"documents": {}}), "an object as documents"),
        (json!({"chat_template_kwargs": {"messages": []}}), "`messages` in its chat_template_kwargs"),
    ] {
        let mut from = json!({ "messages": talk });
        from.as_object_mut().unwrap().extend(field.as_object().unwrap().clone());
        let fault = make(format(TOOLS), from).unwrap_err();
        assert!(fault.contains(says), "{fault}");
    }
}

#[test]
fn a_system_field_comes_first_in_every_shape() {
    let talk = [say("user", "a"), say("assistant", "b")];
    let expected = "<|system|>brief<|end|>\n<|user|>a<|end|>\n<|assistant|>b<|end|>";
    for from in [
        json!({"system": "brief", "messages": talk}),
        json!({"system": "brief", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
        json!({"system": "brief", "instruction": "a", "output": "b"}),
        json!({"system": "brief", "prompt": "a", "completion": "b"}),
        json!({"system": "brief", "prompt": [talk[0]], "completion": [talk[1]]}),
    ] {
        assert_eq!(seen(format(TOOLS), &from).0, expected, "{from}");
    }
    let own = [&[say("system", "own")], &talk[..]].concat();
    let (made, _) = row(format(TOOLS), &json!({"system": "brief", "messages": own}));
    assert_eq!(made.unread, ["`system` (the messages begin with another)"]);
}

#[test]
fn a_system_field_comes_first_in_judged_rows_and_is_never_dropped() {
    let pair = |fields: Value| {
        let mut row = json!({"chosen": "b", "rejected": "c", "system": "brief"});
        row.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        row
    };
    let pairs =
        |template: &str| Format { preferences: Some(Preferences::Pairs(PairKeys::default())), ..format(template) };
    let asked = json!([{"from": "human", "value": "a"}]);
    let said = |who: &str, text: &str| json!({"from": who, "value": text});
    for from in [
        pair(json!({"prompt": "a"})),
        pair(
            json!({"prompt": [say("user", "a")], "chosen": [say("assistant", "b")], "rejected": [say("assistant", "c")]}),
        ),
        pair(
            json!({"chosen": [say("user", "a"), say("assistant", "b")], "rejected": [say("user", "a"), say("assistant", "c")]}),
        ),
        // Prompts as LLaMA-Factory's rows have them.
        pair(json!({"conversations": asked, "chosen": said("gpt", "b"), "rejected": said("gpt", "c")})),
        pair(json!({"messages": [say("user", "a")]})),
        pair(json!({"instruction": "a", "input": ""})),
    ] {
        let (made, outcome) = row(pairs(TOOLS), &from);
        let first = "<|system|>brief<|end|>\n<|user|>a<|end|>\n<|assistant|>b<|end|>";
        assert!(Tokenizer::Bytes.decode(&made.ids).starts_with(first) && outcome == Outcome::Kept, "{from}");
        assert_eq!(made.unread, [""; 0], "{from}");
    }
    let labels = Format { preferences: Some(Preferences::Labels(LabelKeys::default())), ..format(TOOLS) };
    let from = json!({"system": "brief", "prompt": "a", "completion": "b", "label": true});
    assert!(Tokenizer::Bytes.decode(&row(labels, &from).0.ids).starts_with("<|system|>brief<|end|>"));
    // Text without a template has no place for one.
    let plain = || Format { apply_chat_template: false, ..format(TOOLS) };
    for (format, from) in [
        (plain(), json!({"system": "brief", "prompt": "a", "completion": "b"})),
        (Format { apply_chat_template: false, ..pairs(TOOLS) }, pair(json!({"prompt": "a"}))),
    ] {
        let fault = make(format, from).unwrap_err();
        assert!(fault.contains("has a system") && fault.contains("`apply_chat_template`"), "{fault}");
    }
    let fault = make(format(TOOLS), json!({"system": ["a"], "messages": [say("user", "a"), say("assistant", "b")]}));
    assert!(fault.unwrap_err().contains("a list as system"));
    let own = json!([say("developer", "own"), say("user", "a"), say("assistant", "b")]);
    let (made, _) = row(format(TOOLS), &json!({"system": "brief", "messages": own}));
    assert_eq!(made.unread, ["`system` (the messages begin with another)"]);
}

#[test]
fn json_text_is_read_where_a_column_holds_it() {
    let calls = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.name }}){% endfor %}{% endfor %}";
    let talk = json!([
        say("user", "a"), {"role": "assistant", "content": "", "tool_calls": json!([{"name": "f"}]).to_string()},
        {"role": "tool", "content": {"warm": true}}, say("assistant", "b"),
    ]);
    let expected = "<user>a<assistant>(f)<tool>{'warm': True}<assistant>b";
    for (key, format) in [
        ("messages", format(calls)),
        ("conversations", format(calls)),
        ("talk", Format { input_key: Some("talk".into()), ..format(calls) }),
    ] {
        let from = json!({ key: talk.to_string() });
        assert_eq!(seen(format, &from).0, expected, "{key}");
    }
    let one = json!([say("user", "a"), say("assistant", "b")]);
    let (text, _) = seen(format(TOOLS), &json!({"messages": one, "tools": [json!({"name": "f"}).to_string()]}));
    assert!(text.starts_with("[tool f]"), "{text}");
    let fault = make(format(TOOLS), json!({"messages": one, "tools": ["f"]})).unwrap_err();
    assert!(fault.contains("a string in its tools; an object is expected"), "{fault}");
    let fault = make(format(TOOLS), json!({"messages": "[{"})).unwrap_err();
    assert!(fault.contains("messages that are text, but not JSON"), "{fault}");
}

#[test]
fn rows_with_tools_have_the_template_for_tools() {
    let own = "{{ tools | length }}{% for m in messages %} {{ m.content }}{% endfor %}";
    let own = ChatTemplate::new(own, ("", "")).unwrap();
    let format = Format { tool_use: Some(Arc::new(own)), ..format(TOOLS) };
    let talk = json!([say("user", "a"), say("assistant", "b")]);
    for (tools, expected) in [
        (json!([{"name": "f"}]), "1 a b"),
        (json!([]), "0 a b"),
        (json!(null), "<|user|>a<|end|>\n<|assistant|>b<|end|>"),
    ] {
        let (made, _) = row(format.clone(), &json!({"messages": talk, "tools": tools}));
        assert_eq!(Tokenizer::Bytes.decode(&made.ids), expected, "{tools}");
    }
}

#[test]
fn completions_are_learned_after_their_prompts() {
    let plain = Format { chat: chatml(), ..Format::default() };
    let from = json!({"prompt": "1+1=", "completion": "2"});
    assert_eq!(seen(plain.clone(), &from), ("1+1=2".into(), vec!["2".into()]));
    let talk = json!({"prompt": [say("user", "a")], "completion": [say("assistant", "b")]});
    assert_eq!(seen(plain.clone(), &talk).1, ["b<|im_end|>"]);
    // All messages of a completion, as TRL learns them.
    let result = json!({"role": "tool", "content": "3"});
    let calls =
        json!({"prompt": [say("user", "a")], "completion": [say("assistant", "call"), result, say("assistant", "c")]});
    let all = "call<|end|>\n<|tool|>3<|end|>\n<|assistant|>c<|end|>";
    assert_eq!(seen(format(TOOLS), &calls).1, [all]);
    let written = json!({"prompt": calls["prompt"].to_string(), "completion": calls["completion"].to_string()});
    assert_eq!(
        seen(Format { chat: format(TOOLS).chat, ..Format::default() }, &written).1,
        [all],
        "JSON text, as in CSV files"
    );
    assert_eq!(dropped(plain.clone(), json!({"prompt": "q", "completion": " \n"})), Drop::NoAnswer);
    let (made, _) = row(plain, &json!({"prompt": "q", "completion": "c", "tools": [{"name": "f"}]}));
    assert_eq!(made.unread, ["`tools`"], "text has no place for it");
}

/// Numbers as they are written, and values that JSON does not have.
#[test]
fn numbers_print_as_they_are_written() {
    let print = "{% for m in messages %}{{ m.content }}{{ m.x | tojson if m.x is defined }}{{ m.x ~ '' if m.x is defined }}{% endfor %}";
    let made = |x: &str| {
        let line = format!(
            r#"{{"messages": [{{"role": "user", "content": "q", "x": {x}}}, {{"role": "assistant", "content": "a"}}]}}"#
        );
        let (mut out, recipe) =
            (TokenizedRow::default(), flatshard::data::Recipe { max_len: 1000, ..recipe(format(print)) });
        recipe.line(line.as_bytes(), &mut out).map(|_| Tokenizer::Bytes.decode(&out.ids))
    };
    for (x, text) in [
        ("[NaN, -Infinity, 1e999]", "q[NaN, -Infinity, Infinity][nan, -inf, inf]a"),
        ("123456789012345678901234567890", "q123456789012345678901234567890123456789012345678901234567890a"),
        ("[-0, -0.0, 18446744073709551616]", "q[0, -0.0, 18446744073709551616][0, -0.0, 18446744073709551616]a"),
    ] {
        assert_eq!(made(x).as_deref(), Ok(text), "{x}");
    }
    let digits = "9".repeat(60);
    assert_eq!(made(&digits).unwrap(), format!("q{digits}{digits}a"));
}

#[test]
fn masks_of_token_ids_take_losses_away() {
    let ids = [1, 40, 98, 52, 2];
    let labels = |extra: Value| {
        let mut from = json!({ "input_ids": ids });
        from.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        row(Format::default(), &from).0
    };
    for key in ["assistant_masks", "assistant_mask", "completion_mask", "response_mask", "loss_mask"] {
        assert_eq!(labels(json!({key: [0, 0, 0, 1, 1]})).labels, [IGNORE, IGNORE, IGNORE, 52, 2], "{key}");
        assert_eq!(labels(json!({key: [false, true, false, true, true]})).labels, [IGNORE, 40, IGNORE, 52, 2]);
        assert_eq!(
            labels(json!({key: [1, 1, 1, 1, 0], "labels": [-100, 40, 98, 52, 2]})).labels,
            [IGNORE, 40, 98, 52, IGNORE]
        );
        let fault = make(Format::default(), json!({"input_ids": ids, key: [1, 1]})).unwrap_err();
        assert!(fault.contains(&format!("2 {key} for 5 input_ids")), "{fault}");
        let fault = make(Format::default(), json!({"input_ids": ids, key: [0, 1, 2, 1, 1]})).unwrap_err();
        assert!(fault.contains(&format!("2 in its {key}, which must be 0 or 1")), "{fault}");
    }
    // What changes the loss in a way that a row does not say; and several samples in a row.
    for (key, value, says) in [
        ("mask", json!([true, true, true, false, false]), "name it loss_mask (0: no loss)"),
        ("prompt_mask", json!([1, 1, 1, 0, 0]), "name it loss_mask (0: no loss)"),
        ("seq_lengths", json!([2, 3]), "several samples, as its `seq_lengths` says"),
        ("seqlens", json!([2, 3]), "several samples, as its `seqlens` says"),
        ("sample_ids", json!([0, 0, 1, 1, 1]), "several samples, as its `sample_ids` says"),
        ("position_ids", json!([0, 1, 0, 1, 2]), "several samples, as its `position_ids` says"),
        ("segment_ids", json!([1, 1, 2, 2, 2]), "several samples, as its `segment_ids` says"),
        ("cu_seqlens", json!([0, 2, 5]), "several samples, as its `cu_seqlens` says"),
        ("loss_weights", json!([0, 0.5, 1, 1, 1]), "weigh them with 0 and 1 as loss_mask"),
        ("shift_labels", json!([40, 98, 52, 2, -100]), "write `labels`"),
    ] {
        let fault = make(Format::default(), json!({"input_ids": ids, key: value})).unwrap_err();
        assert!(fault.contains(says), "{fault}");
    }
    // What the row says has a loss, and all is asked for; padding has none anyway.
    let all = || Format { input_loss: InputLoss::All, ..Format::default() };
    for key in ["loss_mask", "assistant_masks"] {
        let fault = make(all(), json!({"input_ids": ids, key: [0, 1, 1, 1, 1]})).unwrap_err();
        assert!(fault.contains("`train_on_inputs` asks for all"), "{fault}");
    }
    let masked = json!({"input_ids": ids, "labels": [1, -100, 98, 52, 2]});
    assert!(make(all(), masked).unwrap_err().contains("`train_on_inputs` asks for all"));
    let padded = json!({"input_ids": ids, "labels": [1, 40, 98, 52, -100], "attention_mask": [1, 1, 1, 1, 0]});
    assert_eq!(row(all(), &padded).0.labels, [1, 40, 98, 52]);
    labels(json!({"special_tokens_mask": [1, 0, 0, 0, 1], "seq_lengths": [5], "position_ids": [0, 1, 2, 3, 4]}));
    labels(json!({"cu_seqlens": [0, 5], "segment_ids": [3, 3, 3, 3, 3], "loss_weights": [1, 1.0, 1, 1, 1]}));
    labels(json!({"attention_mask": [0, 0, 1, 1, 1], "position_ids": [1, 1, 0, 1, 2], "segment_ids": [0, 0, 1, 1, 1]}));
    let padded = labels(json!({"attention_mask": [0, 1, 1, 1, 0]}));
    assert_eq!((padded.ids, padded.labels), (vec![40, 98, 52], vec![40, 98, 52]));
}

#[test]
fn rows_without_a_token_to_learn_are_dropped_and_none_left_is_refused() {
    let ids = |labels: Value| json!({"input_ids": [1, 5, 6, 2], "labels": labels});
    let none = ids(json!([-100, -100, -100, -100]));
    assert_eq!(dropped(Format::default(), none.clone()), Drop::NoLoss);
    assert_eq!(
        dropped(Format::default(), ids(json!([1, -100, -100, -100]))),
        Drop::NoLoss,
        "nothing predicts the first"
    );
    assert_eq!(dropped(Format::default(), json!({"input_ids": [5]})), Drop::NoLoss);
    let empty = json!({"messages": [say("user", "a"), say("assistant", "")]});
    assert_eq!(dropped(format(TOOLS), empty.clone()), Drop::NoAnswer);
    assert_eq!(dropped(turns(TOOLS), empty), Drop::NoAnswer);
    for blank in [json!(" \n"), json!([{"type": "text", "text": ""}])] {
        let blank = json!({"messages": [say("user", "a"), {"role": "assistant", "content": blank}]});
        assert_eq!(dropped(format(TOOLS), blank), Drop::NoAnswer);
    }
    let files = Files::with("t.jsonl", [none.to_string(), none.to_string()].join("\n"));
    refused(open(&files, "t.jsonl", 16, Format::default()), &["none of its 2 rows", "no token has a loss: 2"]);
    files.put("t.jsonl", [none.to_string(), ids(json!([-100, 5, 6, 2])).to_string()].join("\n"));
    let data = open(&files, "t.jsonl", 16, Format::default()).unwrap();
    assert!(data.report().to_string().contains("1 row dropped (no token has a loss: 1)"), "{}", data.report());
}

#[test]
fn what_nothing_reads_is_named_with_its_rows() {
    let talk = [say("user", "a"), json!({"role": "assistant", "content": "b", "mood": "fine"})];
    let lines = [
        json!({"messages": talk, "source": "x", "tools": [{"name": "f"}]}),
        json!({"messages": talk, "source": null}),
        json!({"messages": talk, "source": "y", "score": 3}),
    ];
    let files = Files::with("t.jsonl", lines.map(|line| line.to_string()).join("\n"));
    let format = || Format { chat: chatml(), apply_chat_template: true, ..Format::default() };
    let expected = "; not read: `mood` of messages (not in the chat template) in 3 rows, `score` in 1 row, `source` in 2 \
                    rows, `tools` (not in the chat template) in 1 row";
    for built in [true, false] {
        let data = open(&files, "t.jsonl", 200, format()).unwrap();
        assert_eq!(data.report().built, built);
        assert!(data.report().to_string().ends_with(expected), "{}", data.report());
    }
    // Columns of Parquet files that are not read at all.
    let files = Files::with("p.parquet", fs::read(tokens::golden("parquet").join("prompts.parquet")).unwrap());
    let data = open(&files, "p.parquet", 200, keys("q", Some("a"))).unwrap();
    assert!(data.report().to_string().contains("not read: `blob` in 4 rows, `id` in 4 rows"), "{}", data.report());
}

/// The word `name` is in the template for tools and for what they return, which says nothing of a user's name.
#[test]
fn a_field_whose_name_the_template_has_for_others_is_named() {
    let template = "{% for t in tools or [] %}{{ t.name }}{% endfor %}{% for m in messages %}<{{ m.role }}\
                    {% if m.role == 'tool' %} {{ m.name }}{% endif %}>{{ m.content }}{% for c in m.tool_calls or [] %}\
                    [{{ c.name }}]{% endfor %}{% endfor %}";
    let ask = json!({"role": "user", "content": "a", "name": "alice"});
    let call = json!({"role": "assistant", "content": "b", "tool_calls": [{"name": "f"}]});
    let result = json!({"role": "tool", "content": "c", "name": "f"});
    let expected = ["`name` of user messages (not read by the chat template)"];
    let talk = json!([ask, call, result, say("assistant", "d")]);
    let (made, _) = row(format(template), &json!({ "messages": talk }));
    let earlier = "answers before the last one (--multiturn trains on them)";
    assert_eq!(made.unread, [earlier, expected[0]]);
    let from = json!({"prompt": [ask], "completion": [say("assistant", "d")]});
    assert_eq!(row(format(template), &from).0.unread, expected);
    let talk = json!([say("user", "a"), call, result, say("assistant", "d")]);
    assert_eq!(row(format(template), &json!({ "messages": talk })).0.unread, [earlier]);
}

#[test]
fn parts_that_are_not_text_are_refused() {
    for kind in ["image", "image_url", "video", "input_audio"] {
        let asked = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: "x"}]});
        let fault = make(format(TOOLS), json!({"messages": [asked, say("assistant", "b")]})).unwrap_err();
        assert!(fault.contains("message 0") && fault.contains(kind) && fault.contains("only text"), "{fault}");
    }
    let asked = json!({"role": "user", "content": [{"image": "a.png"}, {"text": "a"}]});
    assert!(make(format(TOOLS), json!({"messages": [asked, say("assistant", "b")]})).unwrap_err().contains("image"));
    let result = json!({"role": "tool", "content": [{"type": "image_url", "image_url": "x"}]});
    let talk = json!([say("user", "a"), result, say("assistant", "b")]);
    assert!(make(format(TOOLS), json!({"messages": talk})).unwrap_err().contains("message 1"));
    let asked = json!({"role": "user", "content": [{"type": "file", "file": "x"}, {"type": "text", "text": "a"}]});
    let (made, _) = row(format(TOOLS), &json!({"messages": [asked, say("assistant", "b")]}));
    assert_eq!(made.unread, ["parts of type `file` (not in the chat template)"]);
}

#[test]
fn long_conversations_are_cut_and_counted() {
    let talk = json!({"messages": [
        say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", &"long ".repeat(100)),
    ]});
    let files = Files::with("t.jsonl", talk.to_string());
    for (format, losses) in [(turns(TOOLS), 9 + 27), (format(TOOLS), 27)] {
        let data = open(&files, "t.jsonl", 96, format).unwrap();
        assert_eq!((data.report().cut, data.report().dropped), (1, [0; 4]));
        assert!(data.report().to_string().contains("1 longer row cut at 96 tokens"), "{}", data.report());
        let (tokens, targets) = &rows(&data)[0];
        assert_eq!(Tokenizer::Bytes.decode(&tokens[91..]), "ng lo", "no end where the text does not end");
        assert_eq!(targets.iter().filter(|&&target| target != IGNORE).count(), losses);
    }
}
