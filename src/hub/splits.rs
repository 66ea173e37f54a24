//! Which files of a repository are which split, by the conventions of `datasets` in Python. Never opens a file.
use regex::Regex;
use std::collections::BTreeSet;

/// Splits in their order, with their files.
pub(super) type Splits = Vec<(String, Vec<String>)>;

/// Splits, and the words that mean them in names of files and folders.
const KEYWORDS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// Formats of rows and their endings; the first of equally many counts.
const FORMATS: [&[&str]; 5] =
    [&["parquet", "pq"], &["jsonl", "json", "ndjson", "jsonlines"], &["csv", "tsv"], &["txt", "text"], &["npy"]];
const PACKED: [&str; 4] = ["gz", "gzip", "zst", "zstd"];

/// Names of files about the data, in lower case and without an ending.
const ABOUT: [&str; 13] = [
    "readme",
    "license",
    "licence",
    "notice",
    "citation",
    "changelog",
    "config",
    "dataset_info",
    "dataset_infos",
    "dataset_dict",
    "state",
    "requirements",
    "croissant",
];

/// The format of a file that our readers know, by its name.
fn format(path: &str) -> Option<usize> {
    let name = path.rsplit('/').next().unwrap_or(path).to_lowercase();
    let (stem, _) = name.split_once('.')?;
    let mut endings = name.split('.').rev();
    let first = endings.next()?;
    let ending = if PACKED.contains(&first) { endings.next()? } else { first };
    let format = FORMATS.iter().position(|endings| endings.contains(&ending))?;
    (!ABOUT.contains(&stem)).then_some(format)
}

pub(super) fn is_readable(path: &str) -> bool {
    format(path).is_some()
}
/// Whether the name is that of a file of rows, and not of text.
pub(super) fn is_of_rows(path: &str) -> bool {
    format(path).is_some_and(|format| format < 3)
}

/// Hidden, or a folder for a program's own use.
fn is_hidden(path: &str) -> bool {
    path.split('/').any(|part| part.starts_with('.') || part.starts_with("__"))
}

/// The files of the format that most of them have: others are about the data.
pub(super) fn of_one_format(files: Vec<String>) -> Vec<String> {
    let count = |of: usize| files.iter().filter(|path| format(path) == Some(of)).count();
    let most = (0..FORMATS.len()).rev().max_by_key(|&of| count(of));
    files.into_iter().filter(|path| format(path).is_some() && format(path) == most).collect()
}

/// The splits of the files below `folder` (with a slash at its end, or empty), which no card describes.
pub(super) fn conventional(files: &[String], folder: &str) -> Splits {
    let splits = by_name(files, folder).into_iter().map(|(split, files)| (split, of_one_format(files)));
    splits.filter(|(_, files)| !files.is_empty()).collect()
}

/// The same, with files of all formats that are read.
fn by_name(files: &[String], folder: &str) -> Splits {
    let below = files.iter().filter(|path| path.strip_prefix(folder).is_some_and(|path| !is_hidden(path)));
    let files: Vec<String> = below.filter(|path| is_readable(path)).cloned().collect();
    let inner = |path: &String| path[folder.len()..].to_string();
    let shards = regex(r"^data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*$");
    let shard = |path: &String| Some(shards.as_ref()?.captures(&inner(path))?[1].to_string());
    let sharded: BTreeSet<String> = files.iter().filter_map(shard).collect();
    if !sharded.is_empty() {
        let known = KEYWORDS.iter().map(|(split, _)| split.to_string()).filter(|split| sharded.contains(split));
        let others = sharded.iter().filter(|split| KEYWORDS.iter().all(|(known, _)| known != split)).cloned();
        let of = |split: &String| files.iter().filter(|path| shard(path).as_ref() == Some(split)).cloned().collect();
        return known.chain(others).map(|split| (split.clone(), of(&split))).collect();
    }
    // Words in names of folders, else of files.
    for in_folders in [true, false] {
        let of = |words: &[&str]| -> Vec<String> {
            let (words, end) = (words.join("|"), if in_folders { "(?:[-._ 0-9].*)?" } else { "[-._ 0-9].*" });
            let word = regex(&format!("^(?:.*[-._ 0-9])?(?:{words}){end}$"));
            let named = |path: &&String| {
                let inner = inner(path);
                let (folders, name) = inner.rsplit_once('/').unwrap_or(("", &inner));
                if in_folders { folders.split('/').any(|part| is_match(&word, part)) } else { is_match(&word, name) }
            };
            files.iter().filter(named).cloned().collect()
        };
        let splits: Splits = KEYWORDS.iter().map(|(split, words)| (split.to_string(), of(words))).collect();
        let splits: Splits = splits.into_iter().filter(|(_, files)| !files.is_empty()).collect();
        if !splits.is_empty() {
            return splits;
        }
    }
    if files.is_empty() { vec![] } else { vec![("train".into(), files)] }
}

/// The files that a card's pattern names: a file, a folder, or with `*`, `**`, `?` and `[...]`.
pub(super) fn matching(files: &[String], pattern: &str) -> Vec<String> {
    let pattern = pattern.trim_start_matches("./");
    let folder = format!("{}/", pattern.trim_end_matches('/'));
    if !pattern.contains(['*', '?', '[']) {
        let named = |path: &&String| *path == pattern || path.starts_with(&folder) && !is_hidden(&path[folder.len()..]);
        return files.iter().filter(named).cloned().collect();
    }
    let (found, hidden) = (glob(pattern), is_hidden(pattern));
    files.iter().filter(|path| (hidden || !is_hidden(path)) && is_match(&found, path)).cloned().collect()
}

fn glob(pattern: &str) -> Option<Regex> {
    let (mut text, mut rest) = (String::from("^"), pattern);
    while let Some(c) = rest.chars().next() {
        let (part, len) = match c {
            _ if rest.starts_with("**/") => ("(?:.*/)?".to_string(), 3),
            _ if rest.starts_with("**") => (".*".to_string(), 2),
            '*' => ("[^/]*".to_string(), 1),
            '?' => ("[^/]".to_string(), 1),
            '[' => match rest[1..].find(']').filter(|&at| at > 0) {
                Some(at) => {
                    let class = &rest[1..1 + at];
                    let (not, class) = class.strip_prefix('!').map_or(("", class), |class| ("^", class));
                    let class = class.replace('\\', r"\\").replace('[', r"\[").replace('&', r"\&").replace('~', r"\~");
                    (format!("[{not}{class}]"), at + 2)
                }
                None => (r"\[".to_string(), 1),
            },
            c => (regex::escape(&c.to_string()), c.len_utf8()),
        };
        text += &part;
        rest = &rest[len..];
    }
    regex(&(text + "$"))
}

/// None, which matches nothing, if it is no pattern.
fn regex(text: &str) -> Option<Regex> {
    Regex::new(text).ok()
}
fn is_match(pattern: &Option<Regex>, text: &str) -> bool {
    pattern.as_ref().is_some_and(|pattern| pattern.is_match(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(paths: &[&str]) -> Vec<String> {
        paths.iter().map(|path| path.to_string()).collect()
    }
    fn splits(paths: &[&str]) -> Vec<String> {
        conventional(&owned(paths), "").iter().map(|(split, files)| format!("{split}: {}", files.join(" "))).collect()
    }

    /// The results are those of `datasets.data_files.get_data_patterns`.
    #[test]
    fn conventions_of_datasets() {
        let shards = ["data/test-00000-of-00001.parquet", "data/train-00000-of-00002-abc.parquet", "README.md"];
        assert_eq!(splits(&shards), [format!("train: {}", shards[1]), format!("test: {}", shards[0])]);
        assert_eq!(
            splits(&["data/train_sft-00000-of-00001.parquet"]),
            ["train_sft: data/train_sft-00000-of-00001.parquet"]
        );
        assert_eq!(splits(&["train.jsonl", "dev.jsonl"]), ["train: train.jsonl", "validation: dev.jsonl"]);
        assert_eq!(
            splits(&["my_train_file.csv", "data-test.csv"]),
            ["train: my_train_file.csv", "test: data-test.csv"]
        );
        assert_eq!(splits(&["train/a.json", "test/b.json"]), ["train: train/a.json", "test: test/b.json"]);
        let orca = ["1M-GPT4-Augmented.parquet", "3_5M-GPT3_5-Augmented.parquet", ".gitattributes", "README.md"];
        assert_eq!(splits(&orca), [format!("train: {} {}", orca[0], orca[1])]);
        assert_eq!(
            splits(&["en/train.jsonl", "en/valid.jsonl", "de/train.jsonl"]),
            ["train: en/train.jsonl de/train.jsonl", "validation: en/valid.jsonl"]
        );
        assert_eq!(
            splits(&["c4-train.00000-of-01024.json.gz", "c4-validation.0.json.gz"]),
            ["train: c4-train.00000-of-01024.json.gz", "validation: c4-validation.0.json.gz"]
        );
        assert_eq!(
            splits(&["eval/x.jsonl", "x-training/y.jsonl"]),
            ["train: x-training/y.jsonl", "test: eval/x.jsonl"]
        );
        assert_eq!(splits(&["Train.csv", "Test.csv"]), ["train: Train.csv Test.csv"]);
        assert_eq!(splits(&["trainer.jsonl"]), ["train: trainer.jsonl"], "no word of its own: all of it is train");
        assert_eq!(splits(&["a.zip", "script.py", "README.md", "dataset_infos.json"]), [""; 0]);
        assert_eq!(splits(&[".hidden/train.jsonl", "__x/train.jsonl"]), [""; 0]);
        let among = ["data/train-00000-of-00001.parquet", "x.csv", "y.csv", "notes.txt"];
        assert_eq!(splits(&among), ["train: data/train-00000-of-00001.parquet"]);
        assert_eq!(
            splits(&["train.jsonl", "test.jsonl", "stats/a.csv", "stats/b.csv", "stats/c.csv"]),
            ["train: train.jsonl", "test: test.jsonl"]
        );
        assert_eq!(splits(&["a.jsonl.gz", "b.jsonl.zst", "notes.txt"]), ["train: a.jsonl.gz b.jsonl.zst"]);
    }

    #[test]
    fn patterns_of_cards() {
        let files = owned(&["a.jsonl", "data/b.jsonl", "data/x/c.jsonl", "data/.h/d.jsonl", "d1.csv", "d[1].csv"]);
        let found = |pattern: &str| matching(&files, pattern).join(" ");
        assert_eq!(found("a.jsonl"), "a.jsonl");
        assert_eq!(found("data"), "data/b.jsonl data/x/c.jsonl");
        assert_eq!(found("*.jsonl"), "a.jsonl");
        assert_eq!(found("data/*"), "data/b.jsonl");
        assert_eq!(found("**/*.jsonl"), "a.jsonl data/b.jsonl data/x/c.jsonl");
        assert_eq!(found("data/**"), "data/b.jsonl data/x/c.jsonl");
        assert_eq!(found("d[0-9].csv"), "d1.csv");
        assert_eq!(found("d[!0-9].csv"), "");
        assert_eq!(found("d?.csv"), "d1.csv");
        assert_eq!(found("[*.jsonl"), "");
    }
}
