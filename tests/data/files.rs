//! What a file is: from its name and its content, in every compression, next to others, through links; and which files
//! are refused, with what to do. Files of columns have their own tests (columns.rs).
use super::sft::{chatml, keys, open};
use super::*;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::fs::symlink;

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(Vec::new(), Compression::default());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}
fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 3).unwrap()
}
pub fn utf16(text: &str, unit: fn(u16) -> [u8; 2]) -> Vec<u8> {
    format!("\u{feff}{text}").encode_utf16().flat_map(unit).collect()
}

fn talks() -> Vec<Value> {
    let message = |role: &str, content: String| json!({"role": role, "content": content});
    let talk =
        |i: usize| json!({"messages": [message("user", format!("{i}\n\u{e9}")), message("assistant", "b".repeat(i))]});
    (1..700).map(talk).collect()
}
pub fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}
fn chat() -> Format {
    Format { chat: chatml(), ..Format::default() }
}
fn as_text() -> Format {
    Format { pretrain_mode: true, ..Format::default() }
}
/// The decoded tokens of all rows.
pub fn texts(data: &Dataset) -> Vec<String> {
    rows(data).iter().map(|(tokens, _)| Tokenizer::Bytes.decode(tokens)).collect()
}

#[test]
fn rows_are_rows_under_every_name_and_in_every_compression() {
    let talks = talks();
    let (text, array) = (lines(&talks), json!(talks).to_string());
    let pretty = |value: &Value| serde_json::to_string_pretty(value).unwrap();
    let files = Files::with("rows.jsonl", &text);
    let expected = rows(&open(&files, "rows.jsonl", 2000, chat()).unwrap());
    assert_eq!(expected.len(), 699);
    let bytes = text.as_bytes();
    let two = [gzip(&bytes[..5000]), gzip(&bytes[5000..])].concat();
    // As zstd --long and parallel writers do.
    let skippable =
        [&[0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 9, 9][..], &zstd(&bytes[..99]), &zstd(&bytes[99..])].concat();
    for (name, content) in [
        ("a.ndjson", bytes.to_vec()),
        ("a.JSONL", bytes.to_vec()),
        ("a.Json", array.clone().into_bytes()),
        ("a.jsonl.gz", gzip(bytes)),
        ("a.members.jsonl.gz", two),
        ("a.jsonl.zst", zstd(bytes)),
        ("a.frames.JSONL.ZST", skippable),
        ("a.json.gz", gzip(array.as_bytes())),
        ("a.json.zst", zstd(pretty(&json!(talks)).as_bytes())),
        ("named.jsonl", gzip(bytes)), // its content says how it is compressed
        ("9bb2", bytes.to_vec()),
        ("6a1f", gzip(bytes)),
        ("77aa", array.clone().into_bytes()),
        ("train.split", bytes.to_vec()),
        ("bom.jsonl", [b"\xef\xbb\xbf", bytes].concat()),
        ("bom.jsonl.gz", gzip(&[b"\xef\xbb\xbf", bytes].concat())),
        ("little.jsonl", utf16(&text, u16::to_le_bytes)),
        ("big.jsonl", utf16(&text, u16::to_be_bytes)),
        ("big.json", utf16(&array, u16::to_be_bytes)),
        ("wrapped.json", pretty(&json!({"version": "1.0", "tags": ["x"], "data": talks})).into_bytes()),
        ("line.json", json!({"data": talks, "info": {"n": [{"data": []}]}}).to_string().into_bytes()),
    ] {
        files.put(name, content);
        let found = open(&files, name, 2000, chat()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(rows(&found) == expected, "{name}");
    }
}

#[test]
fn a_link_is_read_by_its_own_name_and_its_content() {
    let talks = talks();
    let files = Files::with("blobs/9bb2", lines(&talks));
    files.put("blobs/notes.txt", "a;b\n");
    files.put("blobs/6a1f", fs::read(tokens::golden("parquet/codec_gzip.parquet")).unwrap());
    fs::create_dir_all(files.path("snapshots/one")).unwrap();
    let link = |name: &str, to: &str| symlink(to, files.path(name)).unwrap();
    link("snapshots/one/train.jsonl", "../../blobs/9bb2");
    link("snapshots/all.parquet", "../blobs/6a1f");
    link("snapshots/other", "../blobs/6a1f");
    link("snapshots/rows.csv", "../blobs/notes.txt");
    for name in ["snapshots/one/train.jsonl", "snapshots/one", "blobs/9bb2"] {
        assert_eq!(open(&files, name, 2000, chat()).unwrap().rows(), 699, "{name}");
    }
    for name in ["snapshots/all.parquet", "snapshots/other"] {
        assert_eq!(open(&files, name, 99, Format::default()).unwrap().rows(), 60, "{name}");
    }
    refused(open(&files, "snapshots/rows.csv", 9, Format::default()), &["snapshots/rows.csv", "a;b", "semicolons"]);
    // Its blob was pruned, or never downloaded.
    link("snapshots/one/train-2.jsonl", "../../blobs/0000");
    let words = ["one/train-2.jsonl links to ../../blobs/0000", "No such file", "download it again"];
    refused(open(&files, "snapshots/one", 2000, chat()), &words);
}

#[test]
fn descriptions_next_to_rows_are_not_data() {
    let card = "---\nlicense: mit\ntask_categories:\n- text-generation\n---\n# My set\n";
    let files = Files::with("hub/data/train.jsonl", lines(&talks()));
    files.put("hub/README.md", card);
    files.put("hub/.gitattributes", "*.parquet filter=lfs\n");
    files.put("hub/LICENSE", "free\n");
    files.put("hub/dataset_infos.json", r#"{"default": {"features": [{"name": "messages"}]}}"#);
    files.put("hub/data/_SUCCESS", "");
    files.put("hub/data/state.json", "{\n\"a\": 1}\n");
    let found = open(&files, "hub", 2000, chat()).unwrap();
    assert_eq!((found.rows(), found.report().files), (699, 1));
    // Other text is not silently left out, and neither are rows next to text.
    files.put("hub/prepare.py", "import json\n");
    refused(open(&files, "hub", 2000, chat()), &["cannot be mixed", "prepare.py", "train.jsonl"]);
    // Without rows there is no data, only its description.
    let files = Files::with("card/README.md", card);
    files.put("card/dataset_info.json", "{\n\"features\": {}\n}");
    refused(open(&files, "card", 9, Format::default()), &["README.md", "the card of a data set", "`pretrain_mode`"]);
    assert!(open(&files, "card", 9, as_text()).is_ok());
    let files = Files::with("notes/README.md", "# Notes\nOn training.\n");
    files.put("notes/LICENSE", "free\n");
    assert_eq!(open(&files, "notes", 9, Format::default()).unwrap().report().files, 2);
}

#[test]
fn files_of_other_tools_are_refused_by_name() {
    let zip: &[u8] = b"PK\x03\x04\x14\0\0\0";
    let mut tar = vec![0u8; 1024];
    tar[..5].copy_from_slice(b"a.txt");
    tar[257..262].copy_from_slice(b"ustar");
    let pointer: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    for (name, content, says) in [
        ("data-00000-of-00001.arrow", &b"\xff\xff\xff\xff\x10\0\0\0"[..], &["Arrow", "to_parquet"][..]),
        ("rows", b"ARROW1\0\0", &["Arrow", "to_parquet"]),
        ("text_document.bin", b"\x05\0\x07\0", &["Megatron", "np.save"]),
        ("text_document.idx", b"MMIDIDX\0\0\x01\0", &["Megatron", "np.save"]),
        ("shard-000000.tar", &tar, &["tar archive", "unpack"]),
        ("shard.tar.gz", &gzip(&tar), &["tar archive", "unpack"]),
        ("rows.zip", zip, &["ZIP archive", "unpack"]),
        ("rows.jsonl.xz", b"\xfd7zXZ\0\0\x04", &["xz", "gzip or zstd"]),
        ("rows.jsonl.bz2", b"BZh91AY&SY\0\xff", &["bzip2", "gzip or zstd"]),
        ("rows.pkl", b"\x80\x04\x95\0\0\0\0", &["a pickle", "Parquet"]),
        ("rows.pickle", b"(lp0\n(dp1\nVtext\np2\nVone\np3\nsa.", &["a pickle", "Parquet"]),
        ("rows.pt", zip, &["ZIP archive", "Parquet"]),
        ("rows.xlsx", zip, &["ZIP archive"]),
        ("train.parquet", pointer, &["Git LFS", "git lfs pull"]),
        ("train.jsonl", pointer, &["Git LFS", "git lfs pull"]),
        ("train.txt", pointer, &["Git LFS", "git lfs pull"]),
        ("rows.parquet.gz", &gzip(b"PAR1"), &["gzip", "decompress"]),
        ("wide.jsonl", b"{\0\"\0t\0e\0x\0t\0\"\0", &["UTF-16 without a byte order mark", "UTF-8"]),
        ("rows.jsonl.gz", b"\0\x01\x02", &["damaged"]),
    ] {
        let files = Files::with(&format!("folder/{name}"), content);
        files.put("folder/dataset_info.json", "{\n\"features\": {}\n}");
        for format in [Format::default(), as_text()] {
            refused(open(&files, &format!("folder/{name}"), 9, format), &[&[name][..], says].concat());
        }
        refused(open(&files, "folder", 9, Format::default()), &[&[name][..], says].concat());
        // Among rows, too; in a source tree it is counted as skipped, as other binary files are.
        files.put("folder/rows.json", r#"[{"text": "a"}]"#);
        refused(open(&files, "folder", 9, Format::default()), &[&[name][..], says].concat());
        let files = Files::with(&format!("src/{name}"), content);
        files.put("src/main.rs", "fn main() {}\n");
        if !name.ends_with("jsonl.gz") {
            let found = open(&files, "src", 9, Format::default()).unwrap();
            assert_eq!((found.report().files, found.report().skipped), (1, 1), "{name}");
        }
    }
    // By its content it is text.
    let files = Files::with("corpus.pt", "Era uma vez um rapaz.\n");
    assert_eq!(texts(&open(&files, "corpus.pt", 8, Format::default()).unwrap())[0], "Era uma ");
}

#[test]
fn leftovers_next_to_data_are_not_read_unless_they_are_named() {
    let row = |text: &str| format!("{{\"text\": \"{text}\"}}\n");
    let files = Files::with("d/train.jsonl", row("good"));
    let others =
        ["train.jsonl.bak", "train.jsonl~", "#train.jsonl#", "train.jsonl.tmp", "train.jsonl.1", "notes", "a.old"];
    for name in others {
        files.put(&format!("d/{name}"), row("old!"));
    }
    let found = open(&files, "d", 4, Format::default()).unwrap();
    assert_eq!((texts(&found), found.report().skipped), (vec!["good".to_string()], 0));
    assert!(Corpus::find(&[files.0.path().join("data/d")]).unwrap().what.contains("(not read: "));
    assert_eq!(texts(&open(&files, "d/train.jsonl.bak", 4, Format::default()).unwrap()), ["old!"]);
    // Rows without an ending are data where no file has one; text has any ending but those.
    let files = Files::with("d/part-00000", row("good"));
    files.put("d/part-00001", row("more"));
    assert_eq!(open(&files, "d", 4, Format::default()).unwrap().rows(), 2);
    let files = Files::with("src/main.rs", "fn main() {}\n");
    files.put("src/main.rs.orig", "fn old() {}\n");
    files.put("src/Makefile", "all:\n");
    assert_eq!(open(&files, "src", 9, Format::default()).unwrap().report().files, 2);
}

#[test]
fn data_under_the_name_of_text_is_trained_on_only_if_asked_to() {
    let rows = "{\"q\": \"a\"}\n{\"q\": \"b\"}\n";
    for (name, content, says) in [
        ("rows.txt", rows, "a JSON object per line"),
        ("rows.log", "\n{\"score\": NaN}\n", "a JSON object per line"),
        ("rows.md", "[{\"q\": \"a\"},\n{\"q\": \"b\"}]", "a JSON array of objects"),
        ("rows.csv", rows, "a JSON object per line"),
        ("rows.txt.gz", rows, "a JSON object per line"),
        ("rows.yaml", "{\"data\": [{\"q\": \"a\"}]}", "a JSON object around rows"),
        ("config.json", "{\n\"lr\": 0.5,\n\"betas\": [1, 2]\n}\n", "JSON, but not rows"),
        ("row.json", "{\n\"messages\": [\n{\"role\": \"user\"}]\n}\n", "a single row over several lines"),
        ("texts.json", "[\"one text\", \"another\"]", "JSON, but not rows"),
        ("texts.txt", "[\"one text\", \"another\"]", "JSON, but not rows"),
        ("broken.json", "{\"text\": \"one", "damaged"),
        ("prose.json", "Call me Ishmael.", "by its name only"),
        ("notebook.ipynb", "{\n\"cells\": [\n{\"source\": []}\n]\n}", "a JSON object around rows"),
        ("rows.text", "# mine\n{\"q\": \"a\"}\n{\"q\": \"b\"}\n", "JSON objects, line by line, after other text"),
        ("printed.txt", "{'q': 'a'}\n{'q': 'b'}\n{'q': 'c'}\n", "dictionaries as Python prints them"),
        ("table.txt", "prompt,completion\nred,\"blue, dog\"\n", "a table with a header"),
        ("table.dat", "instruction\tinput\toutput\na\tb\tc\n", "a table with a header"),
        ("letter.txt", "{\\rtf1\\ansi text}", "rich text (RTF)"),
        ("train.txt", "<!DOCTYPE html>\n<html>404</html>\n", "an HTML page"),
        ("drawing.txt", "<svg width='9'></svg>\n", "XML"),
        ("feed.txt", "<?xml version='1.0'?>\n<rss/>\n", "XML"),
        ("rows.xml", "<data><row><prompt>q</prompt><completion>a</completion></row></data>\n", "rows in XML"),
        ("rows.json5", "[{q: 'a'}, // first\n{q: 'b'}]", "a syntax of its own"),
        ("rows.yml", "- instruction: add\n  output: two\n", "a list of rows in YAML"),
        ("README.md", "---\nconfigs:\n- split: train\n---\nrows", "the card of a data set"),
    ] {
        let put = if name.ends_with("gz") { gzip(content.as_bytes()) } else { content.as_bytes().to_vec() };
        let files = Files::with(name, put);
        let message = refused(open(&files, name, 4, Format::default()), &[name, says, "not plain text"]);
        assert!(message.contains("`pretrain_mode`"), "{message}");
        assert!(!files.cache().exists(), "{name}: nothing was read");
        let found = open(&files, name, 4, as_text()).unwrap();
        assert_eq!(texts(&found).concat(), content[..found.rows() as usize * 4], "{name}");
    }
    // As text of a source tree they are text, unless they are rows that would hardly be anything else.
    let files = Files::with("src/main.rs", "fn main() {}\n");
    files.put("src/fixture.txt", rows);
    files.put("src/main.js.map", "{\"version\": 3, \"sections\": [{}]}");
    files.put("src/table.csv", "a,b\n1,2\n");
    files.put("src/page.txt", "<html></html>");
    assert_eq!(open(&files, "src", 9, Format::default()).unwrap().report().files, 5);
    files.put("src/talks.txt", lines(&talks()));
    refused(open(&files, "src", 9, Format::default()), &["talks.txt", "a JSON object per line", "`pretrain_mode`"]);
    assert_eq!(open(&files, "src", 9, as_text()).unwrap().report().files, 6);
    // What begins like JSON is not always JSON.
    for text in [
        "[1] A footnote.\n",
        "- note: buy milk\n",
        "{% if x %}\n{% endif %}\n",
        "[section]\nkey = 1\n",
        "{\n  int i = 0;\n}\n",
    ] {
        let files = Files::with("a.txt", text);
        assert!(open(&files, "a.txt", 4, Format::default()).is_ok(), "{text}");
        files.put("noname", text);
        assert!(open(&files, "noname", 4, Format::default()).is_ok(), "{text}");
    }
}

#[test]
fn text_is_decompressed_and_decoded() {
    let text = "Na\u{ef}ve \u{1f600} text.\n".repeat(30_000); // several pieces
    let files = Files::with("plain.txt", &text);
    let expected = rows(&open(&files, "plain.txt", 50, Format::default()).unwrap());
    for (name, content) in [
        ("a.txt.gz", gzip(text.as_bytes())),
        ("a.txt.zst", zstd(text.as_bytes())),
        ("a.gz", gzip(text.as_bytes())),
        ("bom.txt", format!("\u{feff}{text}").into_bytes()),
        ("wide.txt", utf16(&text, u16::to_le_bytes)),
        ("wide.md.gz", gzip(&utf16(&text, u16::to_be_bytes))),
    ] {
        files.put(name, content);
        assert!(rows(&open(&files, name, 50, Format::default()).unwrap()) == expected, "{name}");
    }
}

#[test]
fn damaged_compression_is_an_error_of_its_file() {
    let rows = lines(&talks());
    let (gz, zst) = (gzip(rows.as_bytes()), zstd(rows.as_bytes()));
    let broken = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        let middle = bytes.len() / 2;
        bytes[middle..middle + 40].fill(0x55);
        bytes
    };
    let format = || Format { skip_bad_rows: true, ..chat() };
    for (name, content) in [
        ("cut.jsonl.gz", gz[..gz.len() - 9].to_vec()),
        ("short.jsonl.gz", gz[..20].to_vec()),
        ("cut.jsonl.zst", zst[..zst.len() - 5].to_vec()),
        ("broken.jsonl.gz", broken(&gz)),
        ("broken.jsonl.zst", broken(&zst)),
        ("tail.jsonl.gz", [&gz[..], b"tail"].concat()),
        ("odd.jsonl", utf16(&rows, u16::to_le_bytes)[..3001].to_vec()),
        ("cut.txt.gz", gz[..gz.len() - 9].to_vec()),
    ] {
        let files = Files::with(name, content);
        let format = if name.ends_with("txt.gz") { as_text() } else { format() };
        refused(open(&files, name, 2000, format), &[name, "truncated or damaged"]);
    }
}

#[test]
fn several_lists_of_objects_are_not_rows() {
    let files = Files::with("a.json", r#"{"train": [{"text": "a"}], "test": [{"text": "b"}]}"#);
    refused(open(&files, "a.json", 9, Format::default()), &["a.json", "`train` and in `test`", "as an array"]);
    files.put("b.json", "{\"data\": [{\"text\": \"a\"}, {\"text\": ");
    refused(open(&files, "b.json", 9, Format::default()), &["b.json: row 1", "truncated"]);
    files.put("c.json", "{\"data\": [{\"text\": \"a\"}], ");
    refused(open(&files, "c.json", 9, Format::default()), &["c.json", "truncated"]);
}

#[test]
fn numbers_that_json_does_not_have_are_accepted_where_nothing_reads_them() {
    let large = "9".repeat(400);
    let rows = format!(
        "{{\"q\": \"a\", \"a\": \"b\", \"score\": NaN}}\n{{\"q\": \"NaN\", \"a\": \"-Infinity\", \"x\": [-Infinity, {{\"y\": \
         Infinity}}]}}\n{{\"q\": \"a\", \"a\": \"b\", \"n\": {large}, \"n\": 1e999}}\n"
    );
    let files = Files::with("t.jsonl", &rows);
    let found = open(&files, "t.jsonl", 32, keys("q", Some("a"))).unwrap();
    assert_eq!((found.rows(), &texts(&found)[1][..12]), (3, "NaN-Infinity"));
    let array = format!("[{}]", rows.trim_end().replace('\n', ",\n"));
    files.put("t.json", array);
    assert_eq!(open(&files, "t.json", 32, keys("q", Some("a"))).unwrap().rows(), 3);
    refused(open(&files, "t.jsonl", 32, keys("q", Some("score"))), &["line 1", "score", "NaN, which is not a number"]);
    files.put("u.jsonl", "{\"input_ids\": [1, NaN]}");
    refused(open(&files, "u.jsonl", 32, Format::default()), &["line 1", "NaN, which is not a number"]);
    files.put("v.jsonl", "{\"text\": NaN}");
    refused(open(&files, "v.jsonl", 32, Format::default()), &["line 1", "NaN, which is not a number"]);
}

/// As `datasets.load_dataset` reads a folder.
#[test]
fn a_folder_of_rows_is_its_split_train() {
    let row = |word: &str| format!("{}\n", json!({ "text": word }));
    let card = "---\nconfigs:\n- config_name: main\n  default: true\n  data_files: a.jsonl\n- config_name: other\n  \
                data_files: b.jsonl\n---\n";
    let only = |word: &str| vec![word.to_string()];
    for (files, expected, unread) in [
        (vec![("train.jsonl", "x"), ("test.jsonl", "y"), ("more.jsonl", "z")], only("x"), "more.jsonl and 1 more"),
        (
            vec![("data/train-00000-of-00001.jsonl", "x"), ("data/test-00000-of-00001.jsonl", "y")],
            only("x"),
            "test-00000",
        ),
        (
            vec![("train/0.jsonl", "x"), ("validation/0.jsonl", "y"), ("test/0.jsonl", "y")],
            only("x"),
            "0.jsonl and 1 more",
        ),
        (vec![("a.jsonl", "x"), ("b.jsonl", "y"), ("README.md", card)], only("x"), "b.jsonl"),
        (vec![("a.jsonl", "x"), ("logo.png", "\0")], only("x"), "logo.png"),
        (vec![("test.jsonl", "y")], only("y"), ""),
    ] {
        let dir = Files::with("none", "");
        fs::remove_file(dir.path("none")).unwrap();
        for (name, content) in &files {
            fs::create_dir_all(dir.path(name).parent().unwrap()).unwrap();
            dir.put(name, if name.ends_with("jsonl") { row(content) } else { content.to_string() });
        }
        let data = open(&dir, "", 99, Format::default()).unwrap();
        assert_eq!(texts(&data), expected, "{files:?}");
        let said = data.report().to_string();
        assert!(said.contains("(not read: ") != unread.is_empty() && said.contains(unread), "{said}");
    }
    // In the card's order, of which a name may look like a pattern.
    let ordered = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: [test.jsonl, \"a[[]1].jsonl\", a.jsonl]\n---\n";
    let dir = Files::with("README.md", ordered);
    for name in ["a.jsonl", "a[1].jsonl", "b.jsonl", "test.jsonl"] {
        dir.put(name, row(name));
    }
    let rows = texts(&open(&dir, "", 99, Format::default()).unwrap());
    assert_eq!(rows, ["test.jsonl", "a[1].jsonl", "a.jsonl"]);
    // Text is not split, and a file that is named is read.
    let notes = Files::with("test.txt", "tests");
    notes.put("train.txt", "trains");
    assert_eq!(open(&notes, "", 5, Format::default()).unwrap().report().files, 2);
    let named = Files::with("test.jsonl", row("y"));
    assert_eq!(texts(&open(&named, "test.jsonl", 99, Format::default()).unwrap()), only("y"));
}
