//! Files of other tools, by their endings and their first bytes: what each is, and what to do instead of reading it.
//! Never reads a file.
use super::shapes;
use serde_json::Value;

const EXPORT: &str = "write its rows as .jsonl or Parquet";
const UNPACK: &str = "unpack it and name the files in it";

/// First bytes, the name, and the remedy.
const STARTS: [(&[u8], &str, &str); 18] = [
    (b"ARROW1", "an Arrow file", ARROW),
    (
        b"PK\x03\x04",
        "a ZIP archive (.zip, .npz, .pt, .xlsx)",
        "unpack it, or write its content as .jsonl, Parquet or .npy",
    ),
    (b"\xfd7zXZ\0", "compressed with xz", "compress it with gzip or zstd instead"),
    (b"BZh", "compressed with bzip2", "compress it with gzip or zstd instead"),
    (b"\x04\x22\x4d\x18", "compressed with LZ4", "compress it with gzip or zstd instead"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", UNPACK),
    (b"Rar!", "a RAR archive", UNPACK),
    (b"\x89HDF", "an HDF5 file", EXPORT),
    (b"SQLite format 3\0", "an SQLite database", EXPORT),
    (b"Obj\x01", "an Avro file", EXPORT),
    (b"ORC", "an ORC file", EXPORT),
    (b"MMIDIDX\0", "the index of Megatron's .bin", MEGATRON),
    (b"GGUF", "a model", "name it with `pretrain`"),
    (b"%PDF-", "a PDF document", "extract its text first"),
    // Protocol 0, which is text.
    (b"(lp0\n", PICKLE, EXPORT),
    (b"(dp0\n", PICKLE, EXPORT),
    (b"ccopy_reg\n", PICKLE, EXPORT),
    (b"PARE", "an encrypted Parquet file", "write it without encryption"),
];
const PICKLE: &str = "a pickle, which can run any code";
const ARROW: &str = "read it with `datasets` (`load_from_disk`) and write it with `to_parquet`";
const MEGATRON: &str = "save its tokens with `np.save` as a .npy array";

/// Endings, the name, and the remedy.
const ENDINGS: [(&[&str], &str, &str); 14] = [
    (&["arrow", "feather", "ipc"], "an Arrow file", ARROW),
    (&["bin", "idx"], "a file of Megatron or of raw tokens", MEGATRON),
    (&["tar", "tgz", "wds"], "a tar archive, as WebDataset writes", UNPACK),
    (&["zip", "7z", "rar"], "an archive", UNPACK),
    (&["xz", "bz2", "lz4", "lzma", "br"], "compressed", "compress it with gzip or zstd instead"),
    (&["pkl", "pickle", "pt", "pth", "joblib"], PICKLE, EXPORT),
    (&["npz"], "an archive of NumPy arrays", "save one array with `np.save`"),
    (&["h5", "hdf5"], "an HDF5 file", EXPORT),
    (&["tfrecord", "tfrecords", "record"], "a file of TFRecords", EXPORT),
    (&["mds", "lance", "beton"], "a shard of another loader", EXPORT),
    (&["avro", "orc", "msgpack", "rds"], "a table of another format", EXPORT),
    (&["db", "sqlite", "sqlite3", "duckdb"], "a database", EXPORT),
    (&["xlsx", "xls", "ods"], "a spreadsheet", "save it as .csv"),
    (&["safetensors", "gguf"], "a model", "name its directory with `pretrain`"),
];

/// What a binary file is, by the ending of its name in lower case.
pub(super) fn by_name(ending: &str) -> Option<String> {
    let (_, what, remedy) = ENDINGS.iter().find(|(endings, ..)| endings.contains(&ending))?;
    Some(format!("is {what}: {remedy}"))
}

/// What a file is that begins with `head`.
pub(super) fn by_content(head: &[u8]) -> Option<String> {
    let binary = head.contains(&0) || std::str::from_utf8(&head[..head.len().min(64)]).is_err();
    // Some begin as text may.
    let word = |start: &[u8]| start.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'!');
    let starts = STARTS.iter().find(|(start, ..)| head.starts_with(start) && (binary || !word(start)));
    match starts {
        Some((_, what, remedy)) => Some(format!("is {what}: {remedy}")),
        None if head.get(257..262) == Some(b"ustar") => by_name("tar"),
        None => None,
    }
}

/// What stands in a repository for a file that was not downloaded.
pub(super) fn pointer(head: &[u8]) -> Option<String> {
    head.starts_with(b"version https://git-lfs.github.com/spec/").then(|| {
        "is a pointer of Git LFS, not the file: run `git lfs pull` in the clone that it is in, or give its name on the hub, \
         OWNER/NAME; if it came from there, its content was never uploaded"
            .into()
    })
}

/// Rows that do not begin as rows of JSON do: most lines are objects, or dictionaries.
fn rows(head: &[u8]) -> Option<&'static str> {
    let text = String::from_utf8_lossy(head);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let most = |begins: &str| {
        let count = lines.iter().filter(|line| line.trim_start().starts_with(begins)).count();
        lines.len() > 2 && 3 * count >= 2 * lines.len()
    };
    match () {
        _ if most("{\"") => Some("JSON objects, line by line, after other text"),
        _ if most("{'") => Some("dictionaries as Python prints them, not JSON (json.dumps writes that)"),
        _ => None,
    }
}

/// Whether a text begins as a list in YAML whose first item has the keys of a row.
fn is_yaml_rows(start: &str) -> bool {
    let item = start.strip_prefix("- ").and_then(|items| items.split("\n- ").next()).unwrap_or_default();
    let fields =
        item.lines().enumerate().filter_map(|(i, line)| if i == 0 { Some(line) } else { line.strip_prefix("  ") });
    let keys = fields.filter_map(|field| field.split_once(':')).map(|(key, _)| (key.to_string(), Value::from(1)));
    shapes::is_known(&keys.collect())
}

/// Tags of rows of a data set.
const ROW_TAGS: [&str; 9] = [
    "<row>",
    "<row ",
    "<prompt>",
    "<completion>",
    "<question>",
    "<answer>",
    "<instruction>",
    "<response>",
    "<conversation",
];

/// Markup that is not what a corpus of text holds under this ending.
pub(super) fn markup(ending: &str, head: &[u8]) -> Option<&'static str> {
    if head.starts_with(b"{\\rtf") {
        return Some("rich text (RTF)");
    }
    if let Some(what) = rows(head) {
        return Some(what);
    }
    let start = String::from_utf8_lossy(&head[..head.len().min(4096)]).trim_start().to_lowercase();
    let html = ["<!doctype html", "<html"].iter().any(|tag| start.starts_with(tag));
    let xml = ["<?xml", "<svg"].iter().any(|tag| start.starts_with(tag));
    match ending {
        "txt" | "text" | "" if html => Some("an HTML page, as servers send instead of a file"),
        "txt" | "text" | "" if xml => Some("XML"),
        "xml" if ROW_TAGS.iter().any(|tag| start.contains(tag)) => Some("rows in XML"),
        "json5" | "jsonc" | "hjson" => Some("JSON with a syntax of its own"),
        "txt" | "text" | "yaml" | "yml" | "" if is_yaml_rows(&start) => Some("a list of rows in YAML"),
        "md" if start.starts_with("---") => {
            let lines = start.lines().skip(1).take_while(|line| line.trim_end() != "---");
            let keys = ["dataset_info:", "configs:", "task_categories:", "size_categories:", "annotations_creators:"];
            let card = lines.into_iter().any(|line| keys.iter().any(|key| line.starts_with(key)));
            card.then_some("the card of a data set")
        }
        _ => None,
    }
}
