//! JSON arrays, ShareGPT and Alpaca: equal rows give equal tokens in any file format, and errors name the row.
use super::sft::{chatml, keys, make, open, recipe};
use super::*;
use flatshard::data::{InputLoss, PairKeys, Preferences, Shape, TokenizedRow};
use parquet::basic::{ConvertedType, LogicalType, Repetition, Type as Physical};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;
use serde_json::{Value, json};

fn chat() -> Format {
    Format { chat: chatml(), multiturn: true, ..Format::default() }
}
fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}
fn text(format: Format, row: Value) -> String {
    let (mut out, recipe) = (TokenizedRow::default(), flatshard::data::Recipe { max_len: 2000, ..recipe(format) });
    recipe.row(row.as_object().unwrap(), &mut out).unwrap();
    Tokenizer::Bytes.decode(&out.ids)
}
/// The tokens with loss.
pub fn learned(format: Format, row: Value) -> String {
    let (mut out, recipe) = (TokenizedRow::default(), flatshard::data::Recipe { max_len: 2000, ..recipe(format) });
    recipe.row(row.as_object().unwrap(), &mut out).unwrap();
    let learned: Vec<u32> = out.labels.iter().filter(|&&l| l != IGNORE).map(|&l| l as u32).collect();
    Tokenizer::Bytes.decode(&learned)
}

#[test]
fn sharegpt_rows_become_conversations() {
    let talk = json!([
        {"from": "human", "value": "1+1?"},
        {"from": "function_call", "value": "{\"name\": \"add\"}"},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two"},
        {"from": "user", "value": "sure?"},
        {"from": "assistant", "value": "yes"},
    ]);
    let turns = vec![
        message("user", "1+1?"),
        message("assistant", "{\"name\": \"add\"}"),
        message("tool", "2"),
        message("assistant", "two"),
        message("user", "sure?"),
        message("assistant", "yes"),
    ];
    let expected = text(chat(), json!({"messages": turns}));
    assert!(expected.contains("<|im_start|>tool\n2<|im_end|>"), "{expected}");
    for row in [json!({"conversations": talk}), json!({"messages": talk}), json!({"conversations": turns})] {
        assert_eq!(text(chat(), row.clone()), expected, "{row}");
        // Also without a flag, if there is a template.
        assert_eq!(text(Format { chat: chatml(), ..Format::default() }, row), expected);
    }
    assert_eq!(text(Format { input_key: Some("talk".into()), ..chat() }, json!({"talk": talk})), expected);
    let with_system = [vec![message("system", "be brief")], turns].concat();
    let expected = text(chat(), json!({"messages": with_system}));
    assert_eq!(text(chat(), json!({"system": "be brief", "conversations": talk})), expected);
    let own = [vec![json!({"from": "system", "value": "be brief"})], talk.as_array().unwrap().clone()].concat();
    assert_eq!(text(chat(), json!({"system": "not this", "conversations": own})), expected);
}

/// TRL's SFT learns messages as they are rendered, and completions alone; other tools can learn all of any row.
#[test]
fn prompts_are_learned_where_that_is_asked_for() {
    let turns = json!([message("user", "1+1?"), message("assistant", "2"), message("user", "sure?")]);
    let rendered =
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n";
    let with = |input_loss| Format { chat: chatml(), input_loss, ..Format::default() };
    for input_loss in [InputLoss::Conversations, InputLoss::All] {
        assert_eq!(learned(with(input_loss), json!({"messages": turns})), rendered);
    }
    // A message may still say that it has no loss.
    let mut switched = turns.clone();
    switched[1]["train"] = json!(true);
    assert_eq!(learned(with(InputLoss::Conversations), json!({"messages": switched})), "2<|im_end|>\n");
    let pair = json!({"prompt": [turns[0]], "completion": [turns[1]]});
    assert_eq!(learned(with(InputLoss::Conversations), pair.clone()), "2<|im_end|>");
    let whole = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n";
    assert_eq!(learned(with(InputLoss::All), pair), whole);
    let plain = |input_loss| Format { input_loss, ..Format::default() };
    let text = json!({"prompt": "1+1=", "completion": "2"});
    assert_eq!(learned(plain(InputLoss::Conversations), text.clone()), "2");
    assert_eq!(learned(plain(InputLoss::All), text), "1+1=2");
    let wrong = Format { preferences: Some(Preferences::Pairs(PairKeys::default())), ..plain(InputLoss::All) };
    assert!(wrong.check().unwrap_err().to_string().contains("`train_on_inputs` has no place in preferences"));
}

/// They say which answers are not to be learned.
#[test]
fn rows_of_kto_are_not_learned_as_they_are() {
    for label in [json!(false), json!(0), json!(1.0), json!("False"), json!("1")] {
        let labeled = json!({"prompt": "q", "completion": "a", "label": label});
        let fault = make(Format::default(), labeled).unwrap_err();
        assert!(fault.contains("has a `label`, true or false") && fault.contains("objective: kto"), "{fault}");
    }
    let talk = |label: bool| json!({"messages": [message("user", "q"), message("assistant", "a")], "label": label});
    assert!(make(chat(), talk(false)).unwrap_err().contains("objective: kto"));
    assert!(make(chat(), talk(true)).is_ok());
    let tagged = json!({"instruction": "q", "output": "a", "kto_tag": false});
    assert!(make(Format::default(), tagged).unwrap_err().contains("has a `kto_tag`"));
    let class = json!({"prompt": "q", "completion": "a", "label": "spam"});
    assert_eq!(learned(Format::default(), class), "a");
}

/// What other fields a row has is named, and does not decide what is learned.
#[test]
fn a_row_of_several_formats_is_read_in_the_one_that_is_named() {
    let row = json!({
        "messages": [message("user", "mq"), message("assistant", "ma")],
        "conversations": [{"from": "human", "value": "cq"}, {"from": "gpt", "value": "ca"}],
        "instruction": "iq", "output": "ia", "prompt": "pq", "completion": "pa", "text": "t",
    });
    let read = |shape| {
        let format = Format { shape, ..Format { chat: chatml(), ..Format::default() } };
        let (mut out, recipe) = (TokenizedRow::default(), flatshard::data::Recipe { max_len: 2000, ..recipe(format) });
        recipe.row(row.as_object().unwrap(), &mut out).unwrap();
        let learned: Vec<u32> = out.labels.iter().filter(|&&l| l != IGNORE).map(|&l| l as u32).collect();
        (Tokenizer::Bytes.decode(&learned), out.unread)
    };
    for (shape, expected) in [
        (None, "pa"), // as in TRL
        (Some(Shape::Messages), "ma<|im_end|>"),
        (Some(Shape::Conversations), "ca<|im_end|>"),
        (Some(Shape::Instruction), "ia"),
        (Some(Shape::Completion), "pa"),
        (Some(Shape::Text), "t"),
    ] {
        let (learned, unread) = read(shape);
        assert_eq!(learned, expected, "{shape:?}");
        let named = |key: &str| unread.contains(&format!("`{key}`"));
        assert!(named("messages") != (shape == Some(Shape::Messages)), "{unread:?}");
        assert!(named("instruction") != (shape == Some(Shape::Instruction)), "{unread:?}");
    }
    let fault = make(Format { shape: Some(Shape::Tokens), ..Format::default() }, row.clone()).unwrap_err();
    assert!(fault.contains("has no `input_ids`, which `row_format` says"), "{fault}");
}

#[test]
fn alpaca_rows_become_a_prompt_and_an_answer() {
    let row = json!({"instruction": "Add.", "input": "1 and 1", "output": "2"});
    let bare = json!({"instruction": "Say hi.", "input": "", "output": "hi"});
    let as_messages = |turns: Vec<Value>| text(chat(), json!({"messages": turns}));
    assert_eq!(
        text(chat(), row.clone()),
        as_messages(vec![message("user", "Add.\n1 and 1"), message("assistant", "2")])
    );
    // A text next to them is a rendering of them, as in tatsu-lab/alpaca; without a template it is no more read.
    let plain = || Format::default();
    assert_eq!(
        text(plain(), json!({"instruction": "Say hi.", "output": "hi", "text": "ignored"})),
        text(plain(), bare.clone())
    );
    for none in [bare.clone(), json!({"instruction": "Say hi.", "output": "hi", "text": "ignored"})] {
        assert_eq!(text(chat(), none), as_messages(vec![message("user", "Say hi."), message("assistant", "hi")]));
    }
    let long = json!({"system": "s", "history": [["a", "b"]], "instruction": "c", "input": null, "output": "d"});
    let turns = [
        message("system", "s"),
        message("user", "a"),
        message("assistant", "b"),
        message("user", "c"),
        message("assistant", "d"),
    ];
    assert_eq!(text(chat(), long.clone()), as_messages(turns.to_vec()));

    // Without a chat template: PROMPT_DICT of Stanford Alpaca's train.py.
    let prompt = "Below is an instruction that describes a task, paired with an input that provides further context. \
    Write a \
                  response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 and \
                  1\n\n\
                  ### Response:";
    let plain = Format::default;
    assert_eq!(text(plain(), row.clone()), format!("{prompt}2"));
    assert_eq!(learned(plain(), row), "2");
    let prompt = "Below is an instruction that describes a task. Write a response that appropriately completes the \
    request.\n\n\
                  ### Instruction:\nSay hi.\n\n### Response:";
    assert_eq!(text(plain(), bare), format!("{prompt}hi"));
    let says = |format: Format, row: Value, parts: &[&str]| {
        let fault = make(format, row).unwrap_err();
        parts.iter().for_each(|part| assert!(fault.contains(part), "{part:?} is not in: {fault}"));
    };
    says(plain(), long, &["a system", "`apply_chat_template`"]);
    says(plain(), json!({"history": [["a", "b"]], "instruction": "c", "output": "d"}), &["a history"]);
    says(plain(), json!({"instruction": 3, "output": "d"}), &["a number as instruction"]);
    says(plain(), json!({"instruction": "c", "input": []}), &["none of", "instruction", "instruction, input"]);
    says(
        chat(),
        json!({"instruction": "c", "input": []}),
        &["none of `messages`, `conversations`", "instruction, input"],
    );
    says(chat(), json!({"instruction": "c", "output": "d", "input": 3}), &["a number as input"]);
    says(chat(), json!({"instruction": "c", "output": "d", "history": ["a"]}), &["a string in its history"]);
    says(chat(), json!({"conversations": [{"from": "narrator", "value": "a"}]}), &["from \"narrator\"", "human, gpt"]);
    says(chat(), json!({"conversations": [{"from": "gpt", "value": 3}]}), &["message 0", "a number as value"]);
    says(chat(), json!({"conversations": "a"}), &["a string as conversations"]);
}

/// Conversations of two messages, and instructions.
fn talks(n: usize) -> Vec<[String; 2]> {
    (0..n).map(|i| [format!("a \"question\" [{i}]"), format!("{{answer}} \\ {i}")]).collect()
}
fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

/// A Parquet file with one row group: `columns` of strings, or of lists with one string per part.
fn parquet_of(schema: Type, columns: &[(Vec<&str>, usize)]) -> Vec<u8> {
    let properties = Arc::new(WriterProperties::builder().build());
    let mut file = SerializedFileWriter::new(Vec::new(), Arc::new(schema), properties).unwrap();
    let mut group = file.next_row_group().unwrap();
    for (texts, each) in columns {
        let values: Vec<ByteArray> = texts.iter().map(|&text| ByteArray::from(text)).collect();
        let repeats: Vec<i16> = (0..texts.len()).map(|i| (i % each > 0) as i16).collect();
        let defined = vec![1; texts.len()];
        let mut column = group.next_column().unwrap().unwrap();
        let levels = (*each > 1).then_some((&defined[..], &repeats[..])).unzip();
        column.typed::<ByteArrayType>().write_batch(&values, levels.0, levels.1).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    file.into_inner().unwrap()
}
fn texts(name: &str) -> Arc<Type> {
    let column = Type::primitive_type_builder(name, Physical::BYTE_ARRAY).with_repetition(Repetition::REQUIRED);
    Arc::new(column.with_logical_type(Some(LogicalType::String)).build().unwrap())
}
fn group(name: &str, repetition: Option<Repetition>, list: bool, fields: Vec<Arc<Type>>) -> Type {
    let mut group = Type::group_type_builder(name).with_fields(fields);
    if let Some(repetition) = repetition {
        group = group.with_repetition(repetition);
    }
    if list {
        group = group.with_logical_type(Some(LogicalType::List)).with_converted_type(ConvertedType::LIST);
    }
    group.build().unwrap()
}

#[test]
fn equal_rows_give_equal_tokens_in_every_file_format() {
    let talks = talks(1500); // several chunks
    let sharegpt: Vec<Value> = talks
        .iter()
        .map(|[q, a]| json!({"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}))
        .collect();
    let openai: Vec<Value> =
        talks.iter().map(|[q, a]| json!({"messages": [message("user", q), message("assistant", a)]})).collect();
    let alpaca: Vec<Value> = talks.iter().map(|[q, a]| json!({"instruction": q, "input": "", "output": a})).collect();
    let parts = |i: usize| talks.iter().map(|talk| talk[i].as_str()).collect::<Vec<_>>();
    let element = group("element", Some(Repetition::REQUIRED), false, vec![texts("from"), texts("value")]);
    let list = group("list", Some(Repetition::REPEATED), false, vec![Arc::new(element)]);
    let list = group("conversations", Some(Repetition::REQUIRED), true, vec![Arc::new(list)]);
    let flat = |i: usize| talks.iter().flat_map(move |t| [["human", t[0].as_str()][i], ["gpt", t[1].as_str()][i]]);
    let nested = [(flat(0).collect(), 2), (flat(1).collect(), 2)];
    let columns = vec![texts("instruction"), texts("input"), texts("output")];
    let flat = [(parts(0), 1), (vec![""; 1500], 1), (parts(1), 1)];
    let compact = serde_json::to_string(&sharegpt).unwrap();
    let files = Files::with("rows.jsonl", lines(&openai));
    files.put("compact.json", &compact);
    files.put("pretty.json", format!("\u{feff}\n {}\n\n", serde_json::to_string_pretty(&openai).unwrap()));
    files.put("lines.json", lines(&sharegpt));
    files.put("array.jsonl", &compact);
    files.put("sharegpt.jsonl", lines(&sharegpt));
    files.put("sharegpt.parquet", parquet_of(group("schema", None, false, vec![Arc::new(list)]), &nested));
    files.put("alpaca.json", serde_json::to_string(&alpaca).unwrap());
    files.put("alpaca.jsonl", lines(&alpaca));
    files.put("alpaca.parquet", parquet_of(group("schema", None, false, columns), &flat));
    let on = || Format { chat: chatml(), apply_chat_template: true, ..Format::default() };
    let expected = open(&files, "rows.jsonl", 200, on()).unwrap();
    assert_eq!(expected.rows(), 1500);
    for name in [
        "compact.json",
        "pretty.json",
        "lines.json",
        "array.jsonl",
        "sharegpt.jsonl",
        "sharegpt.parquet",
        "alpaca.json",
        "alpaca.jsonl",
        "alpaca.parquet",
    ] {
        let found = open(&files, name, 200, on()).unwrap();
        assert_eq!(found.report().tokens, expected.report().tokens, "{name}");
        assert_eq!(rows(&found), rows(&expected), "{name}");
        assert!(found.report().to_string().contains("tokens in 1500 samples of up to 200"), "{}", found.report());
    }
    // Without a template, with Alpaca's own prompt; another max_len is another token file.
    let plain = |name, len| rows(&open(&files, name, len, Format::default()).unwrap());
    let expected = plain("alpaca.jsonl", 400);
    assert!(Tokenizer::Bytes.decode(&expected[7].0).ends_with("### Response:{answer} \\ 7"));
    assert_eq!(plain("alpaca.json", 400), expected);
    assert_eq!(plain("alpaca.parquet", 400), expected);
    refused(open(&files, "alpaca.json", 50, Format::default()), &["none of its 1500 rows"]);
}

#[test]
fn truncated_arrays_are_refused_and_bad_rows_named_or_skipped() {
    let good = r#"{"q": "a", "a": "b"}"#;
    let of = |rows: &[&str]| format!("[{}]", rows.join(",\n"));
    let put = |text: String| Files::with("t.json", text);
    let skip = || Format { skip_bad_rows: true, ..keys("q", Some("a")) };
    let says = |text: String, parts: &[&str]| {
        refused(open(&put(text.clone()), "t.json", 16, keys("q", Some("a"))), parts);
    };
    says(of(&[good, "{\"q\": }", good]), &["t.json: row 1 (from 0) is not a JSON object", "`skip_bad_rows`"]);
    says(of(&[good, good, "{\"q\": \"a\"}"]), &["row 2 (from 0) has no `a`"]);
    says(of(&[good, "3"]), &["row 1 (from 0) is not a JSON object", "JSON object"]);
    let found = open(&put(of(&[good, "{\"q\": }", "3", good])), "t.json", 16, skip()).unwrap();
    assert_eq!((found.rows(), found.report().bad), (2, 2));
    assert!(found.report().notes.first_bad.as_ref().unwrap().contains("row 1"));
    let whole = of(&[good, good]);
    for (cut, says) in [(whole.len() - 1, "row 2"), (whole.len() - 2, "row 1"), (8, "row 0"), (1, "row 0")] {
        // Damage of the array itself is not the fault of one row.
        for format in [skip(), keys("q", Some("a"))] {
            refused(open(&put(whole[..cut].into()), "t.json", 16, format), &["t.json", says, "truncated"]);
        }
    }
    says(format!("{whole} {good}"), &["follows the end of the array"]);
    says(of(&[good, ""]), &["row 1", "nothing precedes a comma"]);
    refused(open(&put("[]".into()), "t.json", 16, keys("q", Some("a"))), &["t.json", "no rows"]);
    let plain = open(&put(of(&[good])), "t.json", 16, Format::default());
    refused(plain, &["row 0", "`conversations`", "q, a", "`input_key`"]);
}

#[test]
fn the_kind_of_a_json_file_follows_from_its_beginning_and_its_neighbors() {
    let kind = |files: &Files, name: &str| Corpus::find(&[files.path(name)]).map(|c| c.kind.is_rows());
    let files = Files::with("rows/a.json", r#"[{"messages": []}]"#);
    files.put("rows/b.json", "{\"instruction\": \"a\", \"output\": \"b\"}\n{}\n");
    files.put("rows/c.jsonl", "{}");
    assert!(kind(&files, "rows").unwrap());
    files.put("own/a.json", r#"[{"question": 3}]"#);
    assert!(kind(&files, "own").unwrap() && kind(&files, "own/a.json").unwrap());
    // As in a source tree.
    files.put("code/package.json", "{\n  \"name\": \"x\"\n}\n");
    files.put("code/fixtures.json", r#"[{"question": 3}, {"text": "a"}]"#);
    files.put("code/numbers.json", "[1, 2, 3]");
    files.put("code/main.rs", "fn main() {}");
    assert!(!kind(&files, "code").unwrap());
    assert!(!kind(&files, "code/package.json").unwrap() && !kind(&files, "code/numbers.json").unwrap());
    // Rows that would otherwise be trained on as text.
    files.put("code/train.json", r#"[{"conversations": []}]"#);
    refused(kind(&files, "code"), &["cannot be mixed", "train.json", "rows (.jsonl, .json)"]);
}

#[test]
fn row_settings_are_refused_for_data_without_rows() {
    let files = Files::with("t.txt", "some plain text");
    files.put("object.json", "{\n\"messages\": []\n}");
    let on = |change: fn(&mut Format)| {
        let mut format = Format { chat: chatml(), ..Format::default() };
        change(&mut format);
        format
    };
    let cases: [(&str, Format); 6] = [
        ("`apply_chat_template`", on(|f| f.apply_chat_template = true)),
        ("`multiturn`", on(|f| f.multiturn = true)),
        ("`input_key`", keys("q", Some("a"))),
        ("`input_key`", Format { input_template: Some("{}".into()), ..keys("q", Some("a")) }),
        ("`pretrain_mode`", on(|f| f.pretrain_mode = true)),
        ("`skip_bad_rows`", on(|f| f.skip_bad_rows = true)),
    ];
    for (flag, format) in cases {
        refused(open(&files, "t.txt", 4, format.clone()), &[flag, "has no effect", "t.txt", "is text", ".jsonl"]);
        // `pretrain_mode` says that it is text.
        if !format.pretrain_mode {
            refused(open(&files, "object.json", 4, format.clone()), &["object.json is not plain text but JSON"]);
        }
        let synthetic = DataOptions { format, ..synthetic(4, 1) };
        refused(Dataset::open(&synthetic), &[flag, "has no effect", "synthetic"]);
    }
    assert!(!files.cache().exists(), "nothing was read");
    assert!(open(&files, "t.txt", 4, on(|_| ())).is_ok());
}
