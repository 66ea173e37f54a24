//! Prompts and responses: tokens and loss compared with the definition in make.py, from JSONL and Parquet; what is
//! dropped, what is skipped, and every message for a bad row.
use super::*;
use flatshard::data::{ChatTemplate, LabelKeys, Outcome, PairKeys, Preferences, Recipe, TokenizedRow};
use serde_json::{Value, json};

fn template(name: &str, tokenizer: &Tokenizer) -> Arc<ChatTemplate> {
    let text = fs::read_to_string(tokens::golden("templates").join(format!("{name}.jinja"))).unwrap();
    Arc::new(ChatTemplate::new(&text, tokenizer.spellings()).unwrap())
}

/// The format of a golden case.
fn format(case: &Value, tokenizer: &Tokenizer) -> Format {
    let text = |key: &str| case[key].as_str().map(str::to_string);
    let on = |key: &str| case[key] == true;
    Format {
        input_key: text("input_key"),
        output_key: text("output_key"),
        input_template: text("input_template"),
        apply_chat_template: !case["template"].is_null(),
        multiturn: on("multiturn"),
        special_tokens: case["special"].as_bool(),
        pretrain_mode: on("pretrain"),
        chat: case["template"].as_str().map(|name| template(name, tokenizer)),
        ..Format::default()
    }
}

/// The ids, and `x` at positions with loss.
fn shown(row: &TokenizedRow) -> (Value, String) {
    let loss = row.ids.iter().zip(&row.labels).map(|(&id, &label)| match label {
        IGNORE => '.',
        label => {
            assert_eq!(label as u32, id, "a label is the token itself");
            'x'
        }
    });
    (json!(row.ids), loss.collect())
}

#[test]
fn tokens_and_loss_are_those_of_transformers() {
    for name in ["byte_level", "sentencepiece"] {
        let tokenizer = tokens::load(name);
        let golden: Value = serde_json::from_slice(&fs::read(tokens::golden(name).join("sft.json")).unwrap()).unwrap();
        let (mut kept, mut dropped) = (0, 0);
        for case in golden["cases"].as_array().unwrap() {
            let format = format(case, &tokenizer);
            format.check().unwrap();
            let max_len = golden["max_len"].as_u64().unwrap() as usize;
            let recipe = Recipe { format, tokenizer: tokenizer.clone(), bound: 1000, max_len };
            let mut row = TokenizedRow::default();
            let outcome = recipe.line(case["row"].to_string().as_bytes(), &mut row).unwrap();
            match case.get("ids") {
                Some(ids) => {
                    assert_eq!(outcome, Outcome::Kept, "{name}: {case}");
                    assert_eq!(shown(&row), (ids.clone(), case["loss"].as_str().unwrap().into()), "{name}: {case}");
                    kept += 1;
                }
                None => {
                    assert!(matches!(outcome, Outcome::Dropped(_)), "{name}: {case}");
                    dropped += 1;
                }
            }
        }
        assert!(kept >= 30 && dropped >= 8, "{kept} kept, {dropped} dropped");
    }
}

pub fn recipe(format: Format) -> Recipe {
    Recipe { format, tokenizer: Tokenizer::Bytes, bound: 257, max_len: 64 }
}
pub fn chatml() -> Option<Arc<ChatTemplate>> {
    Some(template("chatml", &Tokenizer::Bytes))
}
pub fn make(format: Format, row: Value) -> Result<(Vec<u32>, String), String> {
    let mut out = TokenizedRow::default();
    let outcome = recipe(format).line(row.to_string().as_bytes(), &mut out)?;
    Ok(match outcome {
        Outcome::Kept => (out.ids.clone(), shown(&out).1),
        Outcome::Dropped(why) => (vec![], format!("dropped: {why}")),
        Outcome::Text => (vec![], "text".into()),
    })
}
pub fn keys(input: &str, output: Option<&str>) -> Format {
    Format { input_key: Some(input.into()), output_key: output.map(str::to_string), ..Format::default() }
}

/// As TRL's trainers do, whatever the fields are; as OpenRLHF's do where its `input_key` names them.
#[test]
fn text_that_no_template_renders_begins_and_ends_as_the_tokenizers() {
    let tokenizer = tokens::load("sentencepiece");
    let make = |format: Format, row: Value| {
        let recipe = Recipe { format, tokenizer: tokenizer.clone(), bound: 1000, max_len: 200 };
        let mut out = TokenizedRow::default();
        assert_eq!(recipe.line(row.to_string().as_bytes(), &mut out).unwrap(), Outcome::Kept);
        out
    };
    let of = |text: &str, special: Option<bool>| {
        let mut ids = if special == Some(false) { vec![] } else { vec![tokenizer.bos().unwrap()] };
        tokenizer.encode(&format!("{text}{}</s>", if special == Some(false) { " " } else { "" }), &mut ids).unwrap();
        ids
    };
    let preferences = |rows| Format { preferences: Some(rows), ..Format::default() };
    let (pairs, labels) = (
        || preferences(Preferences::Pairs(PairKeys::default())),
        || preferences(Preferences::Labels(LabelKeys::default())),
    );
    for special in [None, Some(true), Some(false)] {
        let plain = |format: Format| Format { special_tokens: special, ..format };
        let asked = json!({"prompt": "The fox", "completion": " jumps"});
        let row = make(plain(Format::default()), asked);
        assert_eq!(row.ids, of("The fox jumps", special));
        let learned = row.labels.iter().position(|&label| label != IGNORE).unwrap();
        assert_eq!(tokenizer.decode(&row.ids[learned..]).trim(), "jumps");
        let pair = json!({"prompt": "The fox", "chosen": " jumps", "rejected": " is lazy"});
        let both = [of("The fox jumps", special), of("The fox is lazy", special)].concat();
        assert_eq!(make(plain(pairs()), pair).ids, both);
        let label = json!({"prompt": "The fox", "completion": " jumps", "label": true});
        assert!(make(plain(labels()), label).ids.starts_with(&of("The fox jumps", special)));
        let alpaca = make(plain(Format::default()), json!({"instruction": "Jump.", "output": "no"})).ids;
        assert_eq!(alpaca.first() == tokenizer.bos().as_ref(), special != Some(false));
        let text = make(plain(Format::default()), json!({"text": "The fox"})).ids;
        assert_eq!(text.first() == tokenizer.bos().as_ref(), special != Some(false));
    }
    let keyed = |special| Format { special_tokens: special, ..keys("q", Some("a")) };
    let row = || json!({"q": "The fox", "a": " jumps"});
    assert_eq!(make(keyed(None), row()).ids, of("The fox jumps", Some(false)));
    assert_eq!(make(keyed(Some(true)), row()).ids, of("The fox jumps", Some(true)));
    // What is written there is not added.
    let written = make(Format::default(), json!({"prompt": "<s>The fox", "completion": " jumps"})).ids;
    assert_eq!(written.iter().filter(|id| Some(**id) == tokenizer.bos()).count(), 1);
    let refused = Format { special_tokens: Some(true), apply_chat_template: true, ..Format::default() };
    assert!(refused.check().unwrap_err().to_string().contains("`add_special_tokens`"));
}

#[test]
fn byte_tokens_end_with_the_unspellable_end_of_text() {
    let of = |text: &str| text.bytes().map(u32::from).chain([END]).collect::<Vec<_>>();
    let format = Format { input_template: Some("Q: {}\nA: ".into()), ..keys("q", Some("a")) };
    let row = make(format, json!({"q": "why", "a": "so\n"})).unwrap();
    assert_eq!(row, (of("Q: why\nA: so"), "..........xxx".into()));
    let chat = Format { chat: chatml(), multiturn: true, ..Format::default() };
    let talk = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    let (ids, loss) = make(chat, talk).unwrap();
    assert_eq!(ids, of("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"));
    assert!(loss.ends_with(".xxxxxxxxxxxx"), "b, its end, and the end of text: {loss}"); // 1 + 10 + 1
}

#[test]
fn thinking_templates_drop_earlier_thoughts_and_keep_answers_in_the_loss() {
    let format = Format { chat: Some(template("qwen3", &Tokenizer::Bytes)), multiturn: true, ..Format::default() };
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let messages = [
        turn("user", "1+1?"),
        turn("assistant", "<think>\none and one\n</think>\n\n2"),
        turn("user", "2+2?"),
        turn("assistant", "<think>\ntwice two\n</think>\n\n4"),
    ];
    let text = shapes::learned(format, json!({"messages": messages}));
    assert_eq!(text, "2<|im_end|>\n<think>\ntwice two\n</think>\n\n4<|im_end|>");
}

/// A tool's result and what follows go on in the answer's turn, as in Gemma 4's template, whose thoughts are those
/// after the last question.
#[test]
fn thoughts_that_are_left_out_between_tools_change_no_answer() {
    const TEMPLATE: &str = "{%- set ns = namespace(last=-1) -%}
        {%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
        {%- for m in messages -%}
            {%- if m.role == 'assistant' -%}
                {%- if loop.first or loop.previtem.role != 'tool' -%}<m>{%- endif -%}
                {%- if m.reasoning_content and loop.index0 > ns.last -%}[{{ m.reasoning_content }}]{%- endif -%}
                {%- if m.tool_calls -%}(call){%- else -%}{{ m.content }}</m>{%- endif -%}
            {%- elif m.role == 'tool' -%}({{ m.content }})
            {%- else -%}<u>{{ m.content }}</u>
            {%- endif -%}
        {%- endfor -%}
        {%- if add_generation_prompt and messages[-1].role != 'tool' -%}<m>{%- endif -%}";
    let chat = ChatTemplate::new(TEMPLATE, ("", "")).unwrap();
    let format = Format { chat: Some(std::sync::Arc::new(chat)), multiturn: true, ..Format::default() };
    let learned = |thoughts: Value| {
        let call = json!([{"type": "function", "function": {"name": "f", "arguments": {}}}]);
        let messages = json!([
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "reasoning_content": thoughts, "tool_calls": call},
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "Wet", "reasoning_content": thoughts},
            {"role": "user", "content": "thx"},
            {"role": "assistant", "content": "np", "reasoning_content": "polite"},
        ]);
        shapes::learned(format.clone(), json!({"messages": messages}))
    };
    let expected = "(call)Wet</m>[polite]np</m>";
    assert_eq!([learned(json!("need a tool")), learned(json!(null))], [expected, expected]);
}

#[test]
fn unusable_rows_are_reported_with_the_reason() {
    let says = |format: Format, row: Value, parts: &[&str]| {
        let fault = make(format, row).unwrap_err();
        parts.iter().for_each(|part| assert!(fault.contains(part), "{part:?} is not in: {fault}"));
    };
    let qa = || keys("q", Some("a"));
    says(qa(), json!({"q": "x", "answer": "y"}), &["no `a`", "q, answer"]);
    says(qa(), json!({"q": "x", "a": null}), &["no `a`"]);
    says(qa(), json!({"q": 3, "a": "y"}), &["a number as q", "a string is expected"]);
    says(qa(), json!(["q"]), &["is not a JSON object", "JSON object"]);
    says(Format { pretrain_mode: true, ..Format::default() }, json!({"t": ""}), &["no `text`", "t"]);
    let chat = || Format { chat: chatml(), apply_chat_template: true, ..Format::default() };
    let talk = |turns: Value| json!({ "messages": turns });
    let user = || json!({"role": "user", "content": "a"});
    says(chat(), talk(json!([])), &["no messages"]);
    says(chat(), talk(json!([user()])), &["one message"]);
    says(chat(), talk(json!("hi")), &["a string as messages", "a list is expected"]);
    says(Format { input_key: Some("q".into()), ..chat() }, json!({"q": "hi"}), &["a string as q", "`output_key`"]);
    says(chat(), talk(json!([user(), "hi"])), &["message 1", "not an object"]);
    says(
        chat(),
        talk(json!([{"speaker": "human", "value": "a"}, user()])),
        &["message 0 without `role`", "speaker, value"],
    );
    says(chat(), talk(json!([user(), {"role": "gpt", "content": "b"}])), &["message 1 with role \"gpt\"", "assistant"]);
    says(chat(), talk(json!([user(), {"role": "assistant"}])), &["message 1 without `content`"]);
    says(chat(), talk(json!([user(), {"role": "assistant", "content": 7}])), &["message 1", "a number"]);
    let answered = json!([user(), {"role": "assistant", "content": "b"}, user()]);
    says(chat(), talk(answered), &["ends with a \"user\" message"]);
    let turns = || Format { multiturn: true, ..chat() };
    says(turns(), talk(json!([user(), user()])), &["no assistant message"]);
    says(
        Format { chat: None, ..chat() },
        talk(json!([user(), user()])),
        &["no chat template", "`tokenizer_chat_template`"],
    );
    let gemma = Format { chat: Some(template("gemma", &Tokenizer::Bytes)), ..chat() };
    let system = json!([{"role": "system", "content": "s"}, {"role": "assistant", "content": "b"}]);
    says(gemma, talk(system), &["line 1 of the chat template", "System role not supported"]);
    let backwards = "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}";
    let backwards = Some(Arc::new(ChatTemplate::new(backwards, ("", "")).unwrap()));
    let ab = json!([user(), {"role": "assistant", "content": "b"}]);
    says(Format { chat: backwards, ..chat() }, talk(ab), &["the start of the response is unknown"]);
}

#[test]
fn conflicting_settings_are_refused() {
    let wrong = |format: Format, parts: &[&str]| drop(refused(format.check(), parts));
    let template = |t: &str| Format { input_template: Some(t.into()), ..keys("q", Some("a")) };
    wrong(keys("q", None), &["`input_key`", "`output_key`", "`pretrain_mode`"]);
    wrong(Format { input_key: None, ..keys("q", Some("a")) }, &["`output_key` needs `input_key`"]);
    wrong(template("no place"), &["`input_template`", "{}"]);
    wrong(template("{} and {}"), &["`input_template`", "{}"]);
    wrong(Format { apply_chat_template: true, ..template("{}") }, &["`input_template`", "chat template"]);
    wrong(Format { pretrain_mode: true, ..keys("q", Some("a")) }, &["`pretrain_mode`", "`output_key`"]);
    wrong(Format { pretrain_mode: true, multiturn: true, ..keys("q", None) }, &["`pretrain_mode`", "`multiturn`"]);
    assert!(keys("q", Some("a")).check().is_ok() && template("{}").check().is_ok());
}

// --- files

pub fn open(files: &Files, name: &str, max_len: usize, format: Format) -> Result<Dataset, Error> {
    Dataset::open(&DataOptions { format, ..files.options(name, max_len) })
}

#[test]
fn long_prompts_are_dropped_and_counted() {
    let row = |n: usize| json!({"q": "q".repeat(n), "a": "answer"}).to_string();
    // 14 tokens leave no room within 16; 13 leave room for three.
    let files = Files::with("t.jsonl", [row(13), row(14), row(30), row(3)].join("\n"));
    let data = open(&files, "t.jsonl", 16, keys("q", Some("a"))).unwrap();
    let report = data.report();
    assert_eq!((report.rows, report.dropped, report.bad, report.cut), (2, [2, 0, 0, 0], 0, 1));
    assert!(report.to_string().contains("1 longer row cut at 16 tokens; 2 rows dropped (the prompt"), "{report}");
    let (tokens, targets) = &rows(&data)[0];
    assert_eq!(tokens[13..], [97, 110, 115], "the rest is cut off, and no end is put where the text does not end");
    assert_eq!(targets[11..], [IGNORE, 97, 110, 115, IGNORE]);
    // Another max_len is another token file, with its own counts.
    assert_eq!(open(&files, "t.jsonl", 64, keys("q", Some("a"))).unwrap().report().dropped, [0; 4]);
    let again = open(&files, "t.jsonl", 16, keys("q", Some("a"))).unwrap();
    assert_eq!((again.report().built, again.report().dropped, again.report().cut), (false, [2, 0, 0, 0], 1));
    refused(open(&files, "t.jsonl", 5, keys("q", Some("a"))), &["none of its 4 rows", "max_len 5", "`max_len`"]);
}

#[test]
fn bad_rows_are_named_or_skipped_and_counted() {
    let good = r#"{"q": "a", "a": "b"}"#;
    let lines = [
        good.as_bytes(),
        b"{\"q\": \"a\"",
        good.as_bytes(),
        b"{\"q\": \"caf\xe9\", \"a\": \"b\"}",
        b"",
        b"[]",
        good.as_bytes(),
    ];
    let files = Files::with("t.jsonl", lines.join(&b'\n'));
    refused(
        open(&files, "t.jsonl", 16, keys("q", Some("a"))),
        &["t.jsonl: line 2", "is not a JSON object", "`skip_bad_rows`"],
    );
    let skip = || Format { skip_bad_rows: true, ..keys("q", Some("a")) };
    let data = open(&files, "t.jsonl", 16, skip()).unwrap();
    let report = data.report();
    assert_eq!((report.rows, report.bad), (3, 3));
    assert!(report.to_string().contains("3 bad rows skipped (the first: "), "{report}");
    assert!(report.notes.first_bad.as_ref().unwrap().contains("line 2"), "{report}");
    let again = open(&files, "t.jsonl", 16, skip()).unwrap();
    assert_eq!((again.report().built, again.report().bad), (false, 3));
    // Line numbers are right far into the file and on other threads too.
    let mut many = vec![good; 5000];
    many[4321] = "oops";
    let files = Files::with("t.jsonl", many.join("\n"));
    refused(open(&files, "t.jsonl", 16, keys("q", Some("a"))), &["line 4322", "oops"]);
    let files = Files::with("t.jsonl", "x\ny\n");
    refused(open(&files, "t.jsonl", 16, skip()), &["2 bad", "line 1"]);
}

#[test]
fn rows_keep_their_order_with_any_number_of_threads() {
    let lines: Vec<String> = (0..3000).map(|i| json!({"text": i.to_string().repeat(1 + i % 7)}).to_string()).collect();
    let files = Files::with("t.jsonl", lines.join("\n"));
    let data = Dataset::open(&DataOptions {
        tokenizer: tokens::load("byte_level"),
        vocab: 1000,
        ..files.options("t.jsonl", 99)
    });
    let t = tokens::load("byte_level");
    for (i, (tokens, _)) in rows(&data.unwrap()).iter().enumerate() {
        assert_eq!(t.decode(tokens), i.to_string().repeat(1 + i % 7));
    }
}

fn parquet(name: &str) -> Vec<u8> {
    fs::read(tokens::golden("parquet").join(name)).unwrap()
}

#[test]
fn parquet_gives_the_rows_of_jsonl() {
    let golden: Value = serde_json::from_slice(&fs::read(tokens::golden("byte_level/sft.json")).unwrap()).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    let same = |name: &str, format: Format, of: &dyn Fn(&Value) -> bool| {
        let mut unique: Vec<&Value> = Vec::new();
        cases.iter().map(|c| &c["row"]).filter(|r| of(r)).for_each(|r| {
            if !unique.contains(&r) {
                unique.push(r)
            }
        });
        let lines: Vec<String> = unique.iter().map(|r| r.to_string()).collect();
        let files = Files::with("rows.jsonl", lines.join("\n"));
        files.put(name, parquet(name));
        let expected = open(&files, "rows.jsonl", 200, format.clone()).unwrap();
        let found = open(&files, name, 200, format).unwrap();
        assert_eq!(rows(&found), rows(&expected), "{name}");
        assert_eq!(found.report().dropped, expected.report().dropped);
        found.rows()
    };
    assert_eq!(same("prompts.parquet", keys("q", Some("a")), &|r| r.get("q").is_some()), 4);
    let chat = Format { chat: chatml(), multiturn: true, ..Format::default() };
    assert_eq!(same("talks.parquet", chat, &|r| r.get("messages").is_some()), 5);

    let files = Files::with("tokens.parquet", parquet("tokens.parquet"));
    let found = rows(&files.open("tokens.parquet", 8));
    assert_eq!(found.len(), 5);
    assert_eq!(found[2], (vec![0, 1, 2, 3], vec![1, 2, 3, IGNORE]));
}

#[test]
fn parquet_without_usable_rows_is_refused() {
    let files = Files::with("p.parquet", parquet("prompts.parquet"));
    refused(open(&files, "p.parquet", 64, Format::default()), &["p.parquet: row 0", "id, q, blob, a"]);
    refused(open(&files, "p.parquet", 64, keys("question", Some("a"))), &["row 0", "no `question`", "q"]);
    refused(open(&files, "p.parquet", 64, keys("id", Some("a"))), &["row 0", "a number as id"]);
    refused(
        open(&files, "p.parquet", 64, keys("blob", Some("a"))),
        &[
            "row 0",
            "a value that JSON does not have as blob",
            "a string is expected",
            "column `blob` holds binary data",
        ],
    );
    let whole = parquet("prompts.parquet");
    files.put("cut.parquet", &whole[..whole.len() - 20]);
    refused(open(&files, "cut.parquet", 64, keys("q", Some("a"))), &["cut.parquet", "Parquet"]);
    // A damaged byte anywhere is refused or changes only values: never a crash.
    for at in (0..whole.len()).step_by(23) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x55;
        files.put("d.parquet", &damaged);
        let _ = open(&files, "d.parquet", 64, Format { skip_bad_rows: true, ..keys("q", Some("a")) });
    }
}
