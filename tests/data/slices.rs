//! `NAME[FROM:TO]` reads these rows of a file or a directory, in every format, and no others.
use super::sft::{keys, open};
use super::*;
use serde_json::json;

/// 1,300 rows, more than two chunks of a reader, with a bad one in each half.
fn lines() -> Vec<String> {
    let row = |i: usize| json!({"q": format!("{i}"), "a": "b".repeat(1 + i % 7)}).to_string();
    (0..1300).map(|i| if i % 1000 == 150 { "{".into() } else { row(i) }).collect()
}
fn format() -> Format {
    Format { skip_bad_rows: true, ..keys("q", Some("a")) }
}
/// The questions that are read, and how many rows were bad.
fn read(files: &Files, name: &str) -> (Vec<String>, u64) {
    let data = open(files, name, 200, format()).unwrap_or_else(|e| panic!("{name}: {e}"));
    let text = |ids: &[u32]| Tokenizer::Bytes.decode(ids).trim_end_matches('b').to_string();
    (rows(&data).iter().map(|(tokens, _)| text(tokens)).collect(), data.report().bad)
}
fn good(range: std::ops::Range<usize>) -> Vec<String> {
    range.filter(|i| i % 1000 != 150).map(|i| i.to_string()).collect()
}

#[test]
fn a_slice_is_rows_of_the_file_before_any_is_dropped() {
    let lines = lines();
    let files = Files::with("rows.jsonl", lines.join("\n\n"));
    let rows: Vec<&str> = lines.iter().filter(|line| line.len() > 1).map(String::as_str).collect();
    files.put("good.json", format!("[{}]", rows.join(",")));
    files.put("wrapped.json", format!("{{\"rows\": [{}]}}", rows.join(",")));
    let table: Vec<String> = (0..1300).map(|i| format!("{i},{}", "b".repeat(1 + i % 7))).collect();
    files.put("rows.csv", format!("q,a\n{}", table.join("\n")));
    for (slice, range, bad) in [
        ("[:100]", 0..100, 0),
        ("[:151]", 0..151, 1),
        ("[100:700]", 100..700, 1),
        ("[-100:]", 1200..1300, 0),
        ("[90%:]", 1170..1300, 0),
        ("[1299:]", 1299..1300, 0),
        ("[:]", 0..1300, 2),
    ] {
        let name = |file: &str| format!("{file}{slice}");
        assert_eq!(read(&files, &name("rows.jsonl")), (good(range.clone()), bad), "{slice}");
        let all: Vec<String> = range.map(|i| i.to_string()).collect();
        assert_eq!(read(&files, &name("rows.csv")), (all, 0), "{slice}");
    }
    let all = read(&files, "good.json").0;
    for name in ["good.json[600:1100]", "wrapped.json[600:1100]"] {
        assert_eq!(read(&files, name).0, all[600..1100], "{name}");
    }
    let parquet = files.put("p.parquet", fs::read(tokens::golden("parquet").join("prompts.parquet")).unwrap());
    let all = read(&files, "p.parquet").0;
    assert!(all.len() > 2, "{} has {}", parquet.display(), all.len());
    assert_eq!(read(&files, "p.parquet[1:2]").0, all[1..2]);
    assert_eq!(read(&files, "p.parquet[-1:]").0, all[all.len() - 1..]);
}

#[test]
fn a_slice_of_a_directory_is_of_its_files_together() {
    let lines = lines();
    let files = Files::with("dir/a.jsonl", lines[..400].join("\n"));
    files.put("dir/b.jsonl", lines[400..900].join("\n"));
    files.put("dir/c.jsonl", lines[900..].join("\n"));
    for (slice, range) in [("[390:410]", 390..410), ("[:900]", 0..900), ("[-450:]", 850..1300), ("[50%:]", 650..1300)] {
        assert_eq!(read(&files, &format!("dir{slice}")).0, good(range), "{slice}");
    }
    // Each path has its own.
    let paths = ["dir[:3]", "dir[1000:1002]", "dir/b.jsonl[-1:]"].map(|name| files.path(name));
    let data = Dataset::open(&DataOptions { paths: paths.into(), format: format(), ..files.options("", 200) }).unwrap();
    let text: Vec<String> = rows(&data).iter().map(|(tokens, _)| Tokenizer::Bytes.decode(tokens)).collect();
    let numbers: Vec<&str> = text.iter().map(|text| text.trim_end_matches('b')).collect();
    assert_eq!(numbers, ["0", "1", "2", "1000", "1001", "899"]);
    // A path that exists has none.
    files.put("odd[1:2]", lines[5..8].join("\n"));
    assert_eq!(read(&files, "odd[1:2]").0, ["5", "6", "7"]);
}

#[test]
fn what_is_no_slice_is_refused() {
    let files = Files::with("rows.jsonl", lines().join("\n"));
    files.put("text.txt", "some text\n".repeat(50));
    for (name, says) in [
        ("rows.jsonl[:120%]", "[:120%] is no slice: write [FROM:TO]"),
        ("rows.jsonl[a:b]", "[a:b] is no slice"),
        ("rows.jsonl[20:10]", "no rows: the slice is empty"),
        ("text.txt[:10]", "a slice is of rows, and these files are text"),
        ("rows.jsonl[5]", "no such file"),
    ] {
        let error = open(&files, name, 200, format()).map(drop).unwrap_err().to_string();
        assert!(error.contains(says), "{name}: {error}");
    }
}
