//! Rows of Parquet files and of tables mean what the same rows of JSON mean: every column is seen, not only those that
//! are learned, and values have the types that `datasets` gives them.
use super::files::{gzip, lines, texts, utf16};
use super::sft::{chatml, keys, open};
use super::*;
use flatshard::data::{JsonRow, LabelKeys, PairKeys, Preferences, RowResult};
use serde_json::{Value, json};

fn sft() -> Format {
    Format { chat: chatml(), ..Format::default() }
}
fn with_system(format: Format) -> Format {
    Format { system_key: Some("system_prompt".into()), apply_chat_template: true, ..format }
}
fn pairs() -> Format {
    Format { preferences: Some(Preferences::Pairs(PairKeys::default())), ..sft() }
}
fn labels() -> Format {
    Format { preferences: Some(Preferences::Labels(LabelKeys::default())), ..sft() }
}

#[test]
fn rows_of_parquet_are_those_of_json() {
    let dir = tokens::golden("parquet").join("columns");
    let sees = |name: &str, format: Format| {
        let files = Files::with(name, fs::read(dir.join(name)).unwrap());
        match open(&files, name, 200, format) {
            Ok(data) => {
                let rows = rows(&data).into_iter().map(|(ids, targets)| (Tokenizer::Bytes.decode(&ids), targets));
                let report = data.report().to_string();
                Ok((rows.collect::<Vec<_>>(), report.split_once("not read: ").map(|(_, unread)| unread.to_string())))
            }
            Err(fault) => {
                let place = format!("{}: ", files.path(name).display());
                let fault = fault.to_string().replace(&place, "");
                Err(fault.replace("row 0 (from 0)", "line 1"))
            }
        }
    };
    let of_keys = || Format { chat: chatml(), ..keys("q", Some("a")) };
    for (name, format, expected) in [
        ("system", with_system(of_keys()), "<|im_start|>system\ns<|im_end|>"),
        ("system_pair", with_system(pairs()), "<|im_start|>system\ns<|im_end|>"),
        ("system", of_keys(), "`id` in 1 row, `system_prompt`"),
        ("undesired", sft(), "the undesirable ones would be learned"),
        ("undesired_messages", sft(), "the undesirable ones would be learned"),
        ("image", sft(), "only text is trained on"),
        ("no_image", sft(), "user\nq<|im_end|>"),
        ("image_pair", pairs(), "only text is trained on"),
        ("packed", sft(), "holds several samples"),
        ("packed_segments", sft(), "holds several samples"),
        ("weights", sft(), "tokens have a loss or none"),
        ("swift_pair", pairs(), "assistant\nb<|im_end|>"),
        ("swift_messages", pairs(), "assistant\nb<|im_end|>"),
        ("openai_pair", pairs(), "assistant\nb<|im_end|>"),
        ("unnamed", sft(), "its keys are: task, problem, solution. Name the prompt and response fields"),
        ("unnamed", pairs(), "its keys are: task, problem, solution."),
        ("unnamed", labels(), "its keys are: task, problem, solution"),
        ("talk", sft(), "`dialogue` holds messages: `input_key: dialogue` with `apply_chat_template` reads them"),
        ("unnamed", Format { pretrain_mode: true, ..keys("problem", None) }, "`solution` in 1 row, `task`"),
    ] {
        let columns = sees(&format!("{name}.parquet"), format.clone());
        assert_eq!(columns, sees(&format!("{name}.jsonl"), format), "{name}");
        let said = match columns {
            Ok((rows, unread)) => rows.into_iter().map(|(text, _)| text).chain(unread).collect::<String>(),
            Err(fault) => fault,
        };
        assert!(said.contains(expected), "{name}: {said}");
    }
}

#[test]
fn columns_next_to_token_ids_are_lists_in_tables_too() {
    for (column, list, expected) in [
        ("cu_seqlens", "[0, 2, 4]", "holds several samples"),
        ("segment_ids", "[0, 0, 1, 1]", "holds several samples"),
        ("token_weights", "[0.0, 1.0, 1.0, 1.0]", "tokens have a loss or none"),
        ("shift_labels", "[2, 3, 4, -100]", "not shifted"),
        ("prompt_mask", "[1, 1, 0, 0]", "trainers differ in what its 0 and 1 mean"),
    ] {
        let files = Files::with("t.csv", format!("input_ids,{column}\n\"[1, 2, 3, 4]\",\"{list}\"\n"));
        refused(open(&files, "t.csv", 200, sft()), &["line 2", expected]);
    }
}

#[test]
fn tables_of_text_are_rows() {
    let rows = [("a", "plain"), ("b, \"c\"\n d", "x"), ("\u{e9}", "y\r\nz")];
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let table = |between: char, end: &str| {
        let row = |(q, a): &(&str, &str)| format!("{}{between}{}{between}{end}", quoted(q), quoted(a));
        format!("q{between}a{between}note{end}{}", rows.iter().map(row).collect::<String>())
    };
    let json: Vec<Value> = rows.iter().map(|(q, a)| json!({"q": q, "a": a, "note": null})).collect();
    let files = Files::with("t.jsonl", lines(&json));
    let expected = texts(&open(&files, "t.jsonl", 99, keys("q", Some("a"))).unwrap());
    for (name, content) in [
        ("t.csv", table(',', "\n").into_bytes()),
        ("t.CSV", table(',', "\r\n").into_bytes()),
        ("t.csv.gz", gzip(table(',', "\n").as_bytes())),
        ("t.tsv", format!("\u{feff}{}", table('\t', "\n")).into_bytes()),
        ("wide.tsv", utf16(&table('\t', "\r\n"), u16::to_le_bytes)),
    ] {
        files.put(name, content);
        assert_eq!(texts(&open(&files, name, 99, keys("q", Some("a"))).unwrap()), expected, "{name}");
    }
    // Where no line feed is, carriage returns end lines, as in old Mac files.
    files.put("mac.csv", "question,a\ra,plain\r\"b, c\",x");
    let mac = [json!({"question": "a", "a": "plain"}), json!({"question": "b, c", "a": "x"})];
    files.put("mac.jsonl", lines(&mac));
    let [mac, same] = ["mac.csv", "mac.jsonl"].map(|name| open(&files, name, 99, keys("question", Some("a"))).unwrap());
    assert_eq!(texts(&mac), texts(&same));
    // A bad row names its line, and can be skipped; an empty field is absent.
    files.put("bad.csv", "q,a\nx,y\n\n\"two\nlines\",z\nonly\nx,\n\"x\"y,z\n");
    let open =
        |name: &str, skip_bad_rows: bool| open(&files, name, 32, Format { skip_bad_rows, ..keys("q", Some("a")) });
    refused(open("bad.csv", false), &["bad.csv: line 6 has 1 fields, but the header has 2", "`skip_bad_rows`"]);
    let found = open("bad.csv", true).unwrap();
    assert_eq!((found.rows(), found.report().bad), (2, 3));
    for (content, says) in [
        ("q,a\nx,y\nx,\"y\nx,y\n", &["line 3 has a quotation mark that is never closed"][..]),
        ("q,q\nx,y\n", &["header has two columns `q`"]),
        ("q;a\nx;y\n", &["`q;a`", "semicolons"]),
        ("q,b\nx,y\n", &["line 2 has no `a`"]),
        ("q,a\nx,\n", &["line 2 has no `a`"]),
        ("q,a\n\"x\"y,z\n", &["line 2 has text after the quotation mark"]),
        ("q,a\n\nx,y\n\"\"\"\",3,\n", &["line 4 has 3 fields"]),
        ("q,a\n", &["no rows"]),
    ] {
        files.put("t.csv", content);
        refused(open("t.csv", false), &[&["t.csv"][..], says].concat());
    }
}

/// What `datasets` parses: messages, parts of tools, and values of maps.
#[test]
fn json_in_parquet_is_what_it_says() {
    let of = |name: &str| {
        let mut rows = Vec::new();
        let path = tokens::golden("parquet").join(name);
        let mut each = |_: String, row: RowResult<JsonRow>| {
            rows.push(row.unwrap());
            Ok(())
        };
        flatshard::data::each_row(&[path], &Default::default(), &mut each).unwrap();
        rows
    };
    let found = of("json.parquet");
    assert_eq!(found.len(), 2);
    assert_eq!(found, of("json.jsonl"));
}

/// Labels, margins and token ids of tables, whose values are text.
#[test]
fn tables_hold_labels_margins_and_ids() {
    let labels = |table: &str| {
        let files = Files::with("t.csv", table);
        let format = Format { preferences: Some(Preferences::Labels(LabelKeys::default())), ..Format::default() };
        open(&files, "t.csv", 64, format).map(|data| (0..data.rows()).map(|row| data.number(row)).collect::<Vec<_>>())
    };
    let row = |label: &str| format!("why,because,{label}\n");
    for (yes, no) in [("True", "False"), ("true", "FALSE"), ("1", "0"), ("1.0", "0.0")] {
        let found = labels(&format!("prompt,completion,label\n{}{}", row(yes), row(no))).unwrap();
        assert_eq!(found, [Some(1.0), Some(0.0)], "{yes}");
    }
    refused(labels(&format!("prompt,completion,label\n{}{}", row("yes"), row("no"))), &["line 2 has \"yes\" as label"]);
    let files = Files::with("p.csv", "prompt,chosen,rejected,margin\nq,a,b,1.5\n");
    let keys = PairKeys { margin: Some("margin".into()), ..PairKeys::default() };
    let pairs = open(&files, "p.csv", 64, Format { preferences: Some(Preferences::Pairs(keys)), ..Format::default() });
    assert_eq!(pairs.unwrap().number(0), Some(1.5));
    files.put("ids.csv", "input_ids,labels,note\n\"[5, 6, 7]\",\"[-100, 6, 7]\",\"[1]\"\n");
    let ids = open(&files, "ids.csv", 64, Format::default()).unwrap();
    assert_eq!(rows(&ids), [(vec![5, 6, 7], vec![6, 7, IGNORE])]);
}

#[test]
fn parquet_is_read_in_every_codec() {
    let parquet = |name: &str| fs::read(tokens::golden("parquet").join(name)).unwrap();
    for codec in ["gzip", "brotli", "lz4", "snappy", "zstd"] {
        let files = Files::with("t.parquet", parquet(&format!("codec_{codec}.parquet")));
        files.put("PART-0.PARQUET", parquet(&format!("codec_{codec}.parquet")));
        for name in ["t.parquet", "PART-0.PARQUET"] {
            let found = texts(&open(&files, name, 9, Format::default()).unwrap());
            assert_eq!((found.len(), &found[1][..3], &found[59][..5]), (60, "two", "three"), "{codec}");
        }
    }
}

#[test]
fn parquet_types_are_those_of_datasets_or_refused_by_name() {
    let parquet = |name: &str| fs::read(tokens::golden("parquet").join(name)).unwrap();
    let files = Files::with("t.parquet", parquet("types.parquet"));
    files.put("int96.parquet", parquet("int96.parquet"));
    // Unused, they are not in the way; nor are they among the keys of a row that is wrong.
    for name in ["t.parquet", "int96.parquet"] {
        let twice = open(&files, name, 9, keys("text", Some("text"))).unwrap();
        assert_eq!(texts(&twice), ["xx", "yy", "zz"], "{name}");
        refused(open(&files, name, 9, keys("nothing", Some("text"))), &[name, "row 0", "no `nothing`", "text"]);
    }
    assert!(texts(&open(&files, "t.parquet", 99, chat_of("messages")).unwrap())[0].contains("user\na"));
    for (column, holds) in [
        ("decimal", "decimals"),
        ("decimal256", "decimals"),
        ("timestamp_us", "timestamps"),
        ("timestamp_ms", "timestamps"),
        ("timestamp_ns", "timestamps"),
        ("date", "dates"),
        ("time", "times"),
        ("binary", "binary data"),
        ("fixed", "binary data"),
        ("float", "numbers, null or NaN"),
        ("float16", "numbers, null or NaN"),
        ("map", "a list"),
        ("structs", "a list"),
        ("lists", "a list"),
        ("fixed_list", "a list"),
        ("large_list", "a list"),
        ("uint32", "a number"),
        ("uint64", "a number"),
        ("int8", "a number"),
        ("duration", "a number"),
        ("bool", "a boolean"),
        ("null", "no `null`"),
    ] {
        refused(open(&files, "t.parquet", 9, keys(column, Some("text"))), &["t.parquet: row 0", column, holds]);
    }
    refused(open(&files, "int96.parquet", 9, keys("int96", Some("text"))), &["row 0", "int96", "timestamps"]);
    for column in ["large", "view", "words"] {
        let format = Format { skip_bad_rows: true, ..keys("text", Some(column)) };
        assert_eq!(texts(&open(&files, "t.parquet", 9, format).unwrap())[0], "xa", "{column}");
    }
    // A template sees a map as a list of pairs, as `to_pylist` of pyarrow gives it.
    let template = "{% for m in messages %}{{ m.role }}:{{ m['content'] }}{% for pair in m.meta %}<{{ pair[0] }}={{ pair[1] \
                    is none }}>{% endfor %};{% endfor %}";
    let template = flatshard::data::ChatTemplate::new(template, ("", "")).unwrap();
    let format = Format { chat: Some(Arc::new(template)), ..chat_of("messages") };
    let found = texts(&open(&files, "t.parquet", 99, format).unwrap());
    assert!(found[0].to_lowercase().starts_with("user:a<k=false><l=true>;assistant:b;"), "{found:?}");
}

fn chat_of(key: &str) -> Format {
    Format { input_key: Some(key.into()), apply_chat_template: true, ..sft() }
}
