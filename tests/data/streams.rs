//! Token streams and rows: text, token arrays, JSONL, and unusable data. Never checks the order of rows.
use super::*;

// --- rows of a stream

#[test]
fn text_files_are_joined_in_sorted_order_with_end_of_text_tokens() {
    let files = Files::with("b.txt", "BBB");
    files.put("a/z.md", "é"); // 2 bytes
    files.put("a.txt", "AA");
    files.put(".hidden", "no");
    files.put("c.bin", b"text\0binary");
    files.put("latin1", b"caf\xe9 au lait");
    files.put("empty", "");
    let data = files.open("", 1);
    // Directory entries by name: `a` (and everything in it), `a.txt`, `b.txt`.
    let stream: Vec<u32> = [&[0xc3, 0xa9, END][..], &[65, 65, END], &[66, 66, 66, END]].concat();
    let rows = rows(&data);
    assert_eq!(rows.iter().map(|r| r.0[0]).collect::<Vec<_>>(), stream[..stream.len() - 1]);
    assert_eq!(rows.iter().map(|r| r.1[0] as u32).collect::<Vec<_>>(), stream[1..]);
    let report = data.report();
    assert_eq!((report.files, report.skipped, report.bytes, report.tokens), (3, 3, 7, 10));
    let line = report.to_string();
    assert!(
        line.contains("3 files") && line.contains("10 tokens in 9 rows of 1") && line.contains("3 skipped"),
        "{line}"
    );
}

/// As LLaMA-Factory's stage pt and Axolotl's pretraining data sets are read.
#[test]
fn joined_rows_are_the_stream_of_text_files_with_their_texts() {
    let texts = ["first text, longer than a sequence", "", "b", "the third"];
    let files = Files::new();
    let line = |text: &&str| serde_json::json!({ "text": text }).to_string() + "\n";
    files.put("rows.jsonl", texts.iter().map(line).collect::<String>());
    texts.iter().enumerate().for_each(|(i, text)| drop(files.put(&format!("texts/{i}.txt"), text)));
    let pretrain_mode = Format { pretrain_mode: true, ..Format::default() };
    let joined = Format { join_rows: true, ..pretrain_mode.clone() };
    for tokenizer in [Tokenizer::Bytes, tokens::load("sentencepiece")] {
        let open = |name: &str, format: &Format| {
            let (tokenizer, format) = (tokenizer.clone(), format.clone());
            Dataset::open(&DataOptions { tokenizer, format, vocab: 1000, ..files.options(name, 4) }).unwrap()
        };
        let (stream, found) = (open("texts", &Format::default()), open("rows.jsonl", &joined));
        assert_eq!(rows(&found), rows(&stream));
        let (report, text) = (found.report(), found.report().to_string());
        assert_eq!(
            (report.tokens, report.cut, report.dropped.iter().sum::<u64>()),
            (stream.report().tokens, 0, 1),
            "{text}"
        );
        // Without it, what is beyond the length is lost.
        assert!(open("rows.jsonl", &pretrain_mode).report().cut > 0);
    }
    let alone = Format { join_rows: true, ..Format::default() };
    let options = |name: &str, format: Format| DataOptions { format, ..files.options(name, 4) };
    refused(Dataset::open(&options("rows.jsonl", alone)), &["`join_rows`", "add `pretrain_mode`"]);
    refused(Dataset::open(&options("texts", joined)), &["no effect here", "is text"]);
}

#[test]
fn adjacent_rows_share_one_token_and_a_short_last_row_is_dropped() {
    let text: String = ('a'..='z').collect();
    let data = Files::with("t.txt", &text).open("t.txt", 8);
    // 27 tokens: (27 - 1) / 8 = 3 rows.
    let rows = rows(&data);
    assert_eq!(rows.len(), 3);
    for (r, (tokens, targets)) in rows.iter().enumerate() {
        let at = |i: usize| text.as_bytes()[r * 8 + i] as u32;
        assert_eq!(*tokens, (0..8).map(at).collect::<Vec<_>>());
        assert_eq!(*targets, (1..9).map(|i| at(i) as i32).collect::<Vec<_>>());
    }
}

#[test]
fn texts_longer_than_a_chunk_are_tokenized_as_a_whole() {
    // 4-byte characters shifted by one byte: every power-of-two boundary falls within a character.
    let text = format!("x{}", "\u{1F600}".repeat(200_000));
    let files = Files::with("t.txt", &text);
    files.put("u.txt", "end");
    let data = files.open("", 1000);
    let stream: Vec<u32> = rows(&data).iter().flat_map(|r| r.0.clone()).collect();
    let whole: Vec<u32> =
        text.bytes().map(u32::from).chain([END]).chain("end".bytes().map(u32::from)).chain([END]).collect();
    assert_eq!(data.report().tokens as usize, whole.len());
    assert_eq!(stream, whole[..stream.len()]);
}

// --- arrays of tokens

fn npy(descr: &str, shape: &str, elements: &[u8]) -> Vec<u8> {
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    header += &" ".repeat(63 - (10 + header.len()) % 64);
    header += "\n";
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), elements].concat()
}

#[test]
fn npy_arrays_of_every_integer_type_are_streams() {
    let ids = [3u32, 1, 4, 1, 5, 9, 2, 6];
    let bytes =
        |n: usize| ids.iter().flat_map(|id| id.to_le_bytes().into_iter().chain([0; 4]).take(n)).collect::<Vec<_>>();
    for (descr, n) in [("|u1", 1), ("|i1", 1), ("<u2", 2), ("<i2", 2), ("<u4", 4), ("<i4", 4), ("<u8", 8), ("<i8", 8)] {
        let files = Files::with("t.npy", npy(descr, "(8,)", &bytes(n)));
        let data = Dataset::open(&DataOptions { vocab: 10, ..files.options("t.npy", 7) }).unwrap();
        assert_eq!(rows(&data), [(ids[..7].to_vec(), ids[1..].iter().map(|&i| i as i32).collect())], "{descr}");
    }
    // Ids that need more than 16 bits.
    let wide: Vec<u8> = [70_000u32, 65_535, 65_536].iter().flat_map(|id| id.to_le_bytes()).collect();
    let files = Files::with("t.npy", npy("<u4", "(3,)", &wide));
    let data = Dataset::open(&DataOptions { vocab: 100_000, ..files.options("t.npy", 2) }).unwrap();
    assert_eq!(rows(&data), [(vec![70_000, 65_535], vec![65_535, 65_536])]);
}

#[test]
fn npy_arrays_that_are_not_1d_integers_are_refused() {
    let open = |content: Vec<u8>, vocab| {
        let files = Files::with("t.npy", content);
        Dataset::open(&DataOptions { vocab, ..files.options("t.npy", 2) })
    };
    refused(open(npy("<f4", "(4,)", &[0; 16]), 9), &["t.npy", "<f4", "astype"]);
    refused(open(npy(">u2", "(4,)", &[0; 8]), 9), &["t.npy", ">u2"]);
    refused(open(npy("<u2", "(2, 2)", &[0; 8]), 9), &["t.npy", "(2, 2)", "1-D"]);
    refused(open(npy("<u2", "()", &[0; 8]), 9), &["t.npy", "1-D"]);
    refused(open(npy("<u2", "(5,)", &[0; 8]), 9), &["t.npy", "truncated", "5 elements"]);
    refused(open(npy("<u2", "(4,)", &[0; 8])[..50].to_vec(), 9), &["t.npy", "header"]);
    refused(open(b"not numpy at all".to_vec(), 9), &["t.npy", "NUMPY"]);
    refused(open(npy("<u2", "(4,)", &[1, 0, 2, 0, 9, 0, 3, 0]), 9), &["t.npy", "element 2", "id 9", "vocab_size is 9"]);
    refused(open(npy("<i4", "(4,)", &[0xff; 16]), 9), &["t.npy", "element 0", "id -1"]);
    refused(open(npy("<u8", "(1,)", &[0xff; 8]), 9), &["t.npy", "element 0"]);
}

// --- rows of JSONL

#[test]
fn jsonl_rows_are_shifted_and_truncated() {
    let lines = r#"
{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}
{"input_ids": [1, 2, 3, 4], "attention_mask": [1, 1, 1, 1]}

{"input_ids": [5, 6, 7, 8, 9, 10], "labels": [-100, 6, 7, 8, 11, 10]}
{"text": "hé"}
{"input_ids": [7, 8]}"#;
    let files = Files::with("t.jsonl", lines);
    let data = files.open("t.jsonl", 4);
    const X: i32 = IGNORE;
    assert_eq!(
        rows(&data),
        [
            (vec![1, 2, 3], vec![X, 3, X]),
            (vec![1, 2, 3, 4], vec![2, 3, 4, X]),
            (vec![5, 6, 7, 8], vec![6, 7, 8, X]), // truncated: the target of position 4 would be missing
            (vec![104, 0xc3, 0xa9, END], vec![0xc3, 0xa9, END as i32, X]),
            (vec![7, 8], vec![8, X]),
        ]
    );
    let report = data.report();
    assert_eq!((report.rows, report.cut, report.tokens), (5, 1, 17));
    assert!(report.to_string().contains("1 longer row cut at 4 tokens"), "{report}");

    let mut loader = Loader::new(data.clone(), load(5, 1, 0, 1, false)).unwrap();
    let batch = next(&mut loader);
    assert_eq!(batch.cu_seqlens, [0, 3, 7, 11, 15, 17], "a row is a document, and nothing is padded");
    assert_eq!(batch.positions, [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1]);
    assert_eq!(batch.loss_tokens(), 1 + 3 + 3 + 3 + 1);
}

#[test]
fn jsonl_rows_with_ids_above_16_bits() {
    let files = Files::with("t.jsonl", r#"{"input_ids": [65535, 70000, 3], "labels": [1, -100, 65535]}"#);
    let data = Dataset::open(&DataOptions { vocab: 100_000, ..files.options("t.jsonl", 3) }).unwrap();
    assert_eq!(rows(&data), [(vec![65_535, 70_000, 3], vec![IGNORE, 65_535, IGNORE])]);
    // The largest vocabularies of 16 bits, on both sides of the switch.
    for vocab in [65_535, 65_536, 65_537] {
        let top = vocab as u32 - 1;
        let files = Files::with("t.jsonl", format!(r#"{{"input_ids": [0, {top}]}}"#));
        let data = Dataset::open(&DataOptions { vocab, ..files.options("t.jsonl", 2) }).unwrap();
        assert_eq!(rows(&data), [(vec![0, top], vec![top as i32, IGNORE])], "{vocab}");
    }
}

#[test]
fn malformed_jsonl_rows_are_named() {
    let good = r#"{"input_ids": [1, 2]}"#;
    let open = |line: &str| {
        let files = Files::with("t.jsonl", format!("{good}\n{good}\n{line}\n{good}\n"));
        Dataset::open(&files.options("t.jsonl", 4))
    };
    refused(open(r#"{"input_ids": [1, 2"#), &["t.jsonl", "line 3", "{\"input_ids\": [1, 2"]);
    refused(open(r#"{"input_ids": "one"}"#), &["t.jsonl", "line 3"]);
    refused(open(r#"{"input_ids": [1.5]}"#), &["t.jsonl", "line 3"]);
    refused(open(r#"{"prompt": "a", "answer": "b"}"#), &["line 3", "input_ids", "prompt, answer"]);
    refused(open(r#"{"input_ids": []}"#), &["line 3", "no tokens"]);
    refused(
        open(r#"{"input_ids": [1, 257]}"#),
        &["t.jsonl", "line 3", "id 257", "vocab_size is 257", "tokenizer mismatch"],
    );
    refused(open(r#"{"input_ids": [1, -1]}"#), &["line 3", "id -1"]);
    refused(open(r#"{"input_ids": [1, 2], "labels": [1, 2, 3]}"#), &["line 3", "3 labels for 2 input_ids"]);
    refused(open(r#"{"input_ids": [1, 2], "labels": [-1, 2]}"#), &["line 3", "label -1", "-100"]);
    refused(open(r#"{"input_ids": [1, 2], "labels": [1, 257]}"#), &["line 3", "label 257"]);
    let files = Files::with("t.jsonl", b"{\"text\": \"caf\xe9\"}");
    refused(Dataset::open(&files.options("t.jsonl", 4)), &["t.jsonl", "line 1", "UTF-8"]);
    // No half-built file is left where the next run would look.
    assert_eq!(fs::read_dir(files.cache()).unwrap().count(), 0);
}

// --- what cannot be trained on

#[test]
fn bad_data_sets_are_refused_with_a_remedy() {
    let files = Files::with("novel.txt", "Call me Ishmael.");
    files.put("rows.jsonl", "");
    files.put("binary/x.dat", b"\0\0");
    files.put("nothing", "");
    let open = |name: &str, max_len| Dataset::open(&files.options(name, max_len));
    let message = refused(open("novl.txt", 4), &["novl.txt", "no such file", "novel.txt"]);
    assert!(message.find("novel.txt") < message.find("rows.jsonl"), "the nearest name comes first: {message}");
    refused(open("gone/deeper/x.txt", 4), &["gone/deeper/x.txt", "novel.txt"]);
    refused(open("rows.jsonl", 4), &["rows.jsonl", "no rows"]);
    refused(open("binary", 4), &["binary", "no readable text in 1 files"]);
    refused(open("binary/x.dat", 4), &["x.dat", "not a text file"]);
    refused(open("nothing", 4), &["nothing", "empty"]);
    refused(open("", 4), &["rows (.jsonl, .json) and text cannot be mixed", "x.dat", "rows.jsonl"]);
    refused(open("novel.txt", 17), &["17 tokens", "max_len 17", "18"]);
    assert_eq!(open("novel.txt", 16).unwrap().rows(), 1);
    refused(open("novel.txt", 0), &["max_len"]);
    fs::create_dir(files.path("bare")).unwrap();
    refused(open("bare", 4), &["bare", "no files"]);
    refused(Dataset::open(&DataOptions { vocab: 256, ..files.options("novel.txt", 4) }), &["256", "257", "bytes"]);
    refused(Dataset::open(&DataOptions { max_samples: Some(0), ..files.options("novel.txt", 4) }), &["max_samples"]);
    refused(Dataset::open(&DataOptions { vocab: 3, ..synthetic(4, 1) }), &["synthetic", "vocab_size 3"]);
    let mut mixed = synthetic(4, 1);
    mixed.paths.push(files.path("novel.txt"));
    refused(Dataset::open(&mixed), &["synthetic", "alone"]);
}

#[test]
fn a_step_larger_than_the_data_set_is_refused_with_the_equation() {
    let data = Files::with("t.txt", "0123456789").open("t.txt", 1); // 10 rows
    refused(
        Loader::new(data.clone(), load(2, 3, 0, 2, true)),
        &["10 rows", "12 = batch_size 2 * grad_accum 3 *", "ranks 2"],
    );
    refused(Loader::new(data.clone(), load(0, 3, 0, 2, true)), &["batch_size is 0"]);
    assert!(Loader::new(data, load(5, 1, 0, 2, true)).is_ok());
}
