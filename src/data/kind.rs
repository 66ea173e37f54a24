//! Decides what a file is, from its name and its content. Links are not resolved: a name is the one that was given.
//! Never knows the files around it, and never reads more than the beginning.
use super::array::{self, Elements, Lists};
use super::content::{self, is_text};
use super::{foreign, json, shapes};
use crate::base::Result;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use std::io::{BufRead, BufReader, Read, Take};
use std::path::Path;

/// How the content of a file is laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileForm {
    Text,
    /// A JSON object per line.
    Lines,
    /// A JSON array of objects.
    Array,
    /// A JSON object, one of whose values is an array of objects.
    Wrapped,
    /// Rows of fields with this byte between them, after a header.
    Table(u8),
    Parquet,
    Tokens,
    /// Not read: another tool's file among text.
    Unread,
}

/// What is known of a file alone.
pub(super) enum Look {
    Is(FileForm),
    /// Rows, unless there is text next to it, as in a source tree. `known`: its keys mark them as data, and as hardly
    /// anything else.
    Rows {
        form: FileForm,
        known: bool,
    },
    /// Text by its name, but plainly this.
    Doubtful {
        what: &'static str,
        known: bool,
    },
    /// What it is, and what to do instead of reading it.
    Foreign(String),
    /// Neither text nor anything that is known.
    Binary,
    Empty,
}

/// Bytes that are inspected of every file.
const HEAD: u64 = 8 << 10;
/// Most bytes read of a file that seems to be JSON.
const DETECT: u64 = 16 << 20;
/// Lines of a file, one of which must be an object.
const LINES: usize = 3;

/// Names of text and metadata about the data next to it, in lower case and without an ending.
const CARDS: [&str; 17] = [
    "readme",
    "license",
    "licence",
    "notice",
    "citation",
    "changelog",
    "dataset_card",
    "datasheet",
    "dataset_info",
    "dataset_infos",
    "dataset_dict",
    "state",
    "croissant",
    "_success",
    "_metadata",
    "_common_metadata",
    "checksums",
];
/// Endings that such names have.
const CARD_ENDINGS: [&str; 10] = ["", "md", "txt", "rst", "json", "yaml", "yml", "cff", "bib", "html"];
/// Endings of text.
const TEXT: [&str; 19] = [
    "txt", "text", "md", "markdown", "mdx", "rst", "log", "html", "htm", "xml", "yaml", "yml", "toml", "ini", "cfg",
    "tex", "csv", "tsv", "tab",
];

/// Endings of what editors, merges and broken downloads leave.
const LEFTOVER: [&str; 10] =
    ["bak", "orig", "swp", "swo", "tmp", "temp", "part", "partial", "crdownload", "incomplete"];

/// A copy that an editor or a merge has left next to its file, or a part of a download.
pub(super) fn is_leftover(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.ends_with('~') || name.starts_with('#') && name.ends_with('#') || LEFTOVER.contains(&&*ending(path).0)
}

/// Whether the name says that a file holds rows.
pub(super) fn is_named_rows(path: &Path) -> bool {
    let (ending, _) = ending(path);
    matches!(&ending[..], "jsonl" | "ndjson" | "jsonlines" | "json" | "parquet" | "pq" | "csv" | "tsv" | "tab")
}

/// Text or metadata that describes the rows in the same folder, by its name.
pub(super) fn is_card(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let (name, ending) = name.split_once('.').unwrap_or((&name, ""));
    CARDS.contains(&name) && CARD_ENDINGS.contains(&ending)
}

/// The ending of a name in lower case, without that of a compression; and whether it had one.
fn ending(path: &Path) -> (String, bool) {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let whole = [".gz", ".gzip", ".zst", ".zstd"].iter().find_map(|packed| name.strip_suffix(packed));
    let ending = whole.unwrap_or(&name).rsplit_once('.').map_or("", |(_, ending)| ending);
    (ending.to_string(), whole.is_some())
}

/// What the file at `path` is.
pub(super) fn inspect(path: &Path) -> Result<Look> {
    let (ending, named_packed) = ending(path);
    let mut content = content::open(path)?;
    let mut head = Vec::new();
    content.file.by_ref().take(HEAD).read_to_end(&mut head).map_err(|e| content::failed(path, e))?;
    let by_name = match &ending[..] {
        "jsonl" | "ndjson" | "jsonlines" => Some(FileForm::Lines),
        "parquet" | "pq" => Some(FileForm::Parquet),
        "npy" => Some(FileForm::Tokens),
        _ => None,
    };
    let by_content = match &head[..] {
        [b'P', b'A', b'R', b'1', ..] => Some(FileForm::Parquet),
        [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => Some(FileForm::Tokens),
        _ => None,
    };
    if let (Some(packed), Some(_)) = (content.packed, by_content) {
        return Ok(Look::Foreign(format!("is compressed as a whole with {packed}: decompress it")));
    }
    let stored = by_content.or(by_name.filter(|form| matches!(form, FileForm::Parquet | FileForm::Tokens)));
    if let Some(what) = foreign::pointer(&head).or_else(|| foreign::by_content(&head)) {
        return Ok(Look::Foreign(what));
    }
    if let Some(form) = stored {
        return Ok(Look::Is(form));
    }
    if head.is_empty() {
        return Ok(by_name.map_or(Look::Empty, Look::Is));
    }
    if !is_text(&head, head.len() as u64 == HEAD) {
        let rows = by_name.is_some() || matches!(&ending[..], "json" | "csv" | "tsv" | "tab");
        return Ok(match foreign::by_name(&ending) {
            Some(what) => Look::Foreign(what),
            None if named_packed && content.packed.is_none() => {
                Look::Foreign("is not compressed as its name says, nor is it text: it is damaged".into())
            }
            None if rows && head.contains(&0) => Look::Foreign(
                "has NUL bytes, so it is binary, or UTF-16 without a byte order mark: write it as UTF-8".into(),
            ),
            None if rows => textual(&ending, by_name, &head, || again(path))?,
            None => Look::Binary,
        });
    }
    textual(&ending, by_name, &head, || again(path))
}

/// The content from its start.
fn again(path: &Path) -> Result<Box<dyn Read>> {
    Ok(content::open(path)?.file)
}

/// What a file of text is.
fn textual(
    ending: &str,
    by_name: Option<FileForm>,
    head: &[u8],
    again: impl Fn() -> Result<Box<dyn Read>>,
) -> Result<Look> {
    let first = head.iter().find(|b| !b.is_ascii_whitespace());
    if let Some(form) = by_name {
        return Ok(Look::Is(if first == Some(&b'[') { FileForm::Array } else { form }));
    }
    let json = match first {
        Some(b'{' | b'[') => Json::of(again, ending == "json")?,
        _ => Json::None,
    };
    let delimiter = if ending == "csv" { b',' } else { b'\t' };
    Ok(match json {
        Json::Rows { form, known } if ending == "json" => Look::Rows { form, known },
        Json::Rows { form, known } if form != FileForm::Wrapped && !TEXT.contains(&ending) => {
            Look::Rows { form, known }
        }
        Json::Rows { form, known } if ending.is_empty() => Look::Rows { form, known },
        Json::Rows { form: FileForm::Lines, known } => Look::Doubtful { what: "a JSON object per line", known },
        Json::Rows { form: FileForm::Array, known } => Look::Doubtful { what: "a JSON array of objects", known },
        Json::Rows { known, .. } => Look::Doubtful { what: "a JSON object around rows", known },
        Json::Other(what) => Look::Doubtful { what, known: false },
        Json::None if ending == "json" => Look::Doubtful { what: "JSON by its name only, or damaged", known: false },
        Json::None if matches!(ending, "csv" | "tsv" | "tab") => {
            Look::Rows { form: FileForm::Table(delimiter), known: is_known_header(head, delimiter) }
        }
        Json::None if [b',', b'\t'].into_iter().any(|delimiter| is_header(head, delimiter)) => {
            Look::Doubtful { what: "a table with a header, as .csv and .tsv files are", known: true }
        }
        Json::None => match foreign::markup(ending, head) {
            Some(what) => Look::Doubtful { what, known: false },
            None => Look::Is(FileForm::Text),
        },
    })
}

/// A header of a table of data rows.
fn is_known_header(head: &[u8], delimiter: u8) -> bool {
    shapes::is_known(&header(head, delimiter))
}
/// The first line can hardly be text.
fn is_header(head: &[u8], delimiter: u8) -> bool {
    let row = header(head, delimiter);
    shapes::is_known(&row) && row.len() > 1 || shapes::both(&row, ["prompt", "completion"])
}
/// The first line as a row with a value in each column.
fn header(head: &[u8], delimiter: u8) -> Map<String, Value> {
    let line = head.split(|&b| b == b'\n').next().unwrap_or_default();
    let name = |field: &[u8]| String::from_utf8_lossy(field).trim().trim_matches('"').to_string();
    line.split(|&b| b == delimiter).map(|field| (name(field), Value::from(1))).collect()
}

/// What JSON a text is.
enum Json {
    Rows {
        form: FileForm,
        known: bool,
    },
    /// Not rows.
    Other(&'static str),
    None,
}

impl Json {
    /// Looks at a file that begins with a bracket or a brace. `named`: the name says that it is JSON.
    fn of(again: impl Fn() -> Result<Box<dyn Read>>, named: bool) -> Result<Json> {
        let start = || again().map(|file| BufReader::new(file.take(DETECT)));
        match Json::rows(&start, named)? {
            Some(rows) => Ok(rows),
            None if Json::is_whole(start()?) => Ok(Json::Other("JSON, but not rows")),
            None => Ok(Json::None),
        }
    }

    /// Errors of reading are not reported here, but when the rows are read.
    fn rows(start: &dyn Fn() -> Result<BufReader<Take<Box<dyn Read>>>>, named: bool) -> Result<Option<Json>> {
        let mut file = start()?;
        let mut first = Vec::new();
        if array::opens(&mut file).unwrap_or(false) {
            let _ = Elements::of(file).next(DETECT, &mut first);
            let begins = matches!(first.trim_ascii_start().first(), None | Some(b'{'));
            return Ok(match json::object(&first) {
                Ok((row, _)) => Some(Json::Rows { form: FileForm::Array, known: shapes::is_known(&row) }),
                // Damage is reported when rows are read; under another name it is not JSON.
                Err(_) if named && begins => Some(Json::Rows { form: FileForm::Array, known: false }),
                Err(_) => None,
            });
        }
        let mut lines: Vec<Option<Map<String, Value>>> = Vec::new();
        while lines.len() < LINES && file.read_until(b'\n', &mut first).is_ok_and(|n| n > 0) {
            if !first.trim_ascii().is_empty() {
                lines.push(json::object(&first).ok().map(|(row, _)| row));
            }
            first.clear();
        }
        let known = lines.iter().flatten().any(shapes::is_known);
        let first_is_row = lines.first().is_some_and(Option::is_some);
        if !known && (lines.len() == 1 || !first_is_row) {
            let mut lists = Lists::of(start()?);
            if let Ok(Some(key)) = lists.next() {
                let _ = lists.elements().next(DETECT, &mut first);
                let known = json::object(&first).is_ok_and(|(row, _)| shapes::is_known(&row));
                let names_row = shapes::is_known(&[(key, Value::from(1))].into_iter().collect());
                return Ok(Some(match names_row {
                    true if lines.len() == 1 => Json::Rows { form: FileForm::Lines, known: true },
                    true => Json::Other("a single row over several lines"),
                    false => Json::Rows { form: FileForm::Wrapped, known },
                }));
            }
        }
        // Only its first line may be damaged.
        let found = first_is_row || lines.iter().any(Option::is_some) && !Json::is_whole(start()?);
        Ok(found.then_some(Json::Rows { form: FileForm::Lines, known }))
    }

    /// The file is JSON from its start on, as far as it is read.
    fn is_whole(mut file: BufReader<Take<Box<dyn Read>>>) -> bool {
        let mut values = serde_json::Deserializer::from_reader(&mut file).into_iter::<IgnoredAny>();
        let cut = match values.next() {
            Some(Ok(_)) => return !matches!(values.next(), Some(Err(_))),
            Some(Err(e)) => e.is_eof(),
            None => false,
        };
        cut && file.get_ref().limit() == 0
    }
}
