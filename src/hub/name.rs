//! Names of the hub: `OWNER/NAME[@REVISION]`, with `/PATH` and `:SPLIT` for data sets, and `:TAG` for GGUF files; and
//! which file names may enter the cache. Never looks for a file.
use std::fmt;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum HubKind {
    Model,
    Dataset,
}

impl HubKind {
    /// The word in addresses and folders of the cache.
    pub fn plural(self) -> &'static str {
        match self {
            HubKind::Model => "models",
            HubKind::Dataset => "datasets",
        }
    }
    pub fn word(self) -> &'static str {
        match self {
            HubKind::Model => "model",
            HubKind::Dataset => "data set",
        }
    }
}

/// What a user typed in place of a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HubName {
    pub kind: HubKind,
    /// `OWNER/NAME`.
    pub repo: String,
    pub revision: Option<String>,
    /// A file or folder in the repository.
    pub path: Option<String>,
    /// The split of a data set, or the quantization of a model's GGUF file, such as Q4_K_M.
    pub split: Option<String>,
}

/// Where nothing else is said.
pub const MAIN: &str = "main";
/// Longest name of a repository.
const LONGEST: usize = 96;

/// Owners of what is known by one word: models, then data sets.
const OWNERS: [(&str, &[&str]); 12] = [
    ("openai-community", &["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]),
    ("distilbert", &["distilgpt2"]),
    ("rajpurkar", &["squad", "squad_v2"]),
    ("Skylion007", &["openwebtext"]),
    ("Salesforce", &["wikitext"]),
    ("openai", &["gsm8k"]),
    ("allenai", &["c4"]),
    ("stanfordnlp", &["imdb"]),
    ("bookcorpus", &["bookcorpus"]),
    ("Rowan", &["hellaswag"]),
    ("abisee", &["cnn_dailymail"]),
    ("EdinburghNLP", &["xsum"]),
];

impl HubName {
    /// None: it is no name of the hub.
    pub fn model(text: &str) -> Option<HubName> {
        if text.to_lowercase().ends_with(".gguf") {
            let mut parts = text.splitn(3, '/');
            let (owner, name, path) = (parts.next()?, parts.next()?, parts.next()?);
            return HubName::new(HubKind::Model, &format!("{owner}/{name}"), Some(path.to_string()), None);
        }
        let (text, tag) = text.split_once(':').map_or((text, None), |(text, tag)| (text, Some(tag.to_string())));
        let known = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
        let fine = tag.as_ref().is_none_or(|tag| !tag.is_empty() && tag.bytes().all(known));
        if fine { HubName::new(HubKind::Model, text, None, tag) } else { None }
    }

    /// None: it is no name of the hub.
    pub fn dataset(text: &str) -> Option<HubName> {
        // A slice of a split (`train[1:9]`) is a part of its name.
        let colon = text.split_once(':').filter(|(_, split)| !split.contains('/')).or_else(|| text.rsplit_once(':'));
        let (text, split) = match colon {
            Some((text, split)) => (text, Some(split.to_string())),
            None => (text, None),
        };
        let (owner, rest) = text.split_once('/')?;
        let at = rest.find(['@', '/']).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(at);
        let (revision, path) = match rest.strip_prefix('@') {
            Some(rest) => {
                // refs/convert/parquet and refs/pr/1 have slashes; other revisions end at the first.
                let parts = if rest.starts_with("refs/") { 3 } else { 1 };
                let end = rest.match_indices('/').nth(parts - 1).map_or(rest.len(), |(at, _)| at);
                (Some(&rest[..end]), &rest[end..])
            }
            None => (None, rest),
        };
        let path = path.strip_prefix('/').map(|path| path.strip_suffix('/').unwrap_or(path).to_string());
        let revision = revision.map_or(String::new(), |revision| format!("@{revision}"));
        HubName::new(HubKind::Dataset, &format!("{owner}/{name}{revision}"), path, split)
    }

    fn new(kind: HubKind, text: &str, path: Option<String>, split: Option<String>) -> Option<HubName> {
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision.to_string())),
            None => (text, None),
        };
        let fine = is_repo(repo)
            && revision.as_deref().is_none_or(is_revision)
            && path.as_deref().is_none_or(|path| unsafe_name(path).is_none());
        fine.then(|| HubName { kind, repo: repo.into(), revision, path, split })
    }

    /// The name in an address of the hub: `hf://...`, or that of a page or a file, with the split behind it.
    pub fn in_address(text: &str) -> Option<String> {
        let (scheme, rest) = text.split_once(":/")?;
        let rest = rest.strip_prefix('/')?;
        let rest = if scheme == "hf" { rest } else { rest.split_once('/')?.1 };
        let (rest, split) = rest.split_at(rest.find(':').unwrap_or(rest.len()));
        let (rest, of_data) = match rest.strip_prefix("datasets/") {
            Some(rest) => (rest, true),
            None => (rest.strip_prefix("models/").unwrap_or(rest), false),
        };
        let rest = rest.split(['?', '#']).next().unwrap_or_default();
        let mut parts = rest.split('/').filter(|part| !part.is_empty());
        let (owner, name) = (parts.next()?, parts.next()?);
        let (name, mut revision) = name.split_once('@').map_or((name, None), |(name, of)| (name, Some(of)));
        // The page of a file or folder has its revision.
        let rest: Vec<&str> = parts.collect();
        let path = match rest[..] {
            ["resolve" | "blob" | "raw" | "tree", of, ref path @ ..] => {
                revision = Some(of);
                path
            }
            _ if scheme == "hf" => &rest,
            _ => &[],
        };
        let repo = format!("{owner}/{name}");
        let named = path.last().is_some_and(|file| of_data || file.ends_with(".gguf"));
        let path = if named { format!("/{}", path.join("/")) } else { String::new() };
        let at = revision.filter(|of| *of != MAIN).map_or(String::new(), |of| format!("@{of}"));
        (matches!(scheme, "hf" | "http" | "https") && is_repo(&repo)).then(|| format!("{repo}{at}{path}{split}"))
    }

    /// The name of today for `text`, one word: names had no owner once, and the hub still knows these.
    pub fn of_one_word(text: &str) -> Option<String> {
        let end = text.find(['@', ':']).unwrap_or(text.len());
        let owner = OWNERS.iter().find_map(|(owner, names)| names.contains(&&text[..end]).then_some(owner))?;
        Some(format!("{owner}/{text}"))
    }

    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }
    /// The same at `commit`, so that it always means the same.
    pub fn at(&self, commit: &str) -> HubName {
        HubName { revision: Some(commit.into()), ..self.clone() }
    }
    /// Identifies the repository and the revision that was asked for.
    pub fn key(&self) -> String {
        format!("{}/{}@{}", self.kind.plural(), self.repo, self.revision())
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let HubName { repo, revision, path, split, .. } = self;
        f.write_str(repo)?;
        for (mark, part) in [("@", revision), ("/", path), (":", split)] {
            if let Some(part) = part {
                write!(f, "{mark}{part}")?;
            }
        }
        Ok(())
    }
}

/// The rules of the hub for the names of repositories.
pub fn is_repo(text: &str) -> bool {
    let part = |part: &str| {
        let known = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        !part.is_empty() && part.bytes().all(known) && !part.starts_with(['-', '.']) && !part.ends_with(['-', '.'])
    };
    let strange = ["--", ".."].iter().any(|mark| text.contains(mark)) || text.ends_with(".git");
    let parts = text.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name));
    parts && !strange && text.len() <= LONGEST
}

fn is_revision(text: &str) -> bool {
    let known = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/' | b'+');
    text.bytes().all(known) && !text.starts_with('-') && unsafe_name(text).is_none()
}

/// Whether `text` is a commit, which never moves.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Why a file of this name cannot be in the cache: it would not stay in its folder, or another program would take it
/// for something else.
pub fn unsafe_name(path: &str) -> Option<&'static str> {
    let part = |part: &str| match part {
        "" => Some("has an empty part"),
        "." | ".." => Some("leaves its folder"),
        _ if part.eq_ignore_ascii_case(".git") => Some("has a part .git"),
        _ if part.len() > 255 => Some("is too long"),
        _ => None,
    };
    match path {
        "" => Some("is empty"),
        _ if path.starts_with('/') => Some("is absolute"),
        _ if path.contains('\\') => Some("has a backslash"),
        _ if path.contains(char::is_control) => Some("has control characters"),
        _ if path.len() > 2000 => Some("is too long"),
        _ => path.split('/').find_map(part),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_from_paths() {
        let model = |text: &str| HubName::model(text).map(|name| (name.repo.clone(), name.revision.clone(), name.path));
        let some = |repo: &str, revision: Option<&str>, path: Option<&str>| {
            Some((repo.to_string(), revision.map(str::to_string), path.map(str::to_string)))
        };
        assert_eq!(model("meta-llama/Meta-Llama-3-8B"), some("meta-llama/Meta-Llama-3-8B", None, None));
        assert_eq!(model("a/b@refs/pr/3"), some("a/b", Some("refs/pr/3"), None));
        assert_eq!(model("a/b@v1/q4/x.GGUF"), some("a/b", Some("v1"), Some("q4/x.GGUF")));
        let no = "gpt2 /a/b ./a ../a a/b/c a//b a/b@ a/-b a/b--c a/b.git a/b@../c ~/a a/b: a/b:c/d a/b:c:d hf://a/b";
        for no in no.split(' ') {
            assert_eq!(model(no), None, "{no}");
        }
        let tag = HubName::model("a/b-GGUF@v1:Q4_K_M").unwrap();
        assert_eq!((tag.split.as_deref(), &*tag.to_string()), (Some("Q4_K_M"), "a/b-GGUF@v1:Q4_K_M"));
        let data = |text: &str| HubName::dataset(text).map(|name| [name.revision, name.path, name.split]);
        let three = |parts: [Option<&str>; 3]| Some(parts.map(|part| part.map(str::to_string)));
        assert_eq!(data("Open-Orca/OpenOrca"), three([None, None, None]));
        assert_eq!(data("a/b@v1:test"), three([Some("v1"), None, Some("test")]));
        assert_eq!(data("a/b/in/it.jsonl"), three([None, Some("in/it.jsonl"), None]));
        assert_eq!(data("a/b@v1/in/it.jsonl"), three([Some("v1"), Some("in/it.jsonl"), None]));
        assert_eq!(
            data("a/b@refs/convert/parquet/x/y:z"),
            three([Some("refs/convert/parquet"), Some("x/y"), Some("z")])
        );
        for no in ["a", "synthetic", "a/../b", "/a/b", "a/b/../c", "a/b/", "a/b/.git/c", "a\\b/c"] {
            assert_eq!(data(no), None, "{no}");
        }
        for text in ["a/b@v1:test", "a/b/in/it.jsonl", "a/b@v1/in/it.jsonl:x"] {
            assert_eq!(HubName::dataset(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn one_word_has_an_owner() {
        for (text, name) in [
            ("gpt2", Some("openai-community/gpt2")),
            ("squad:validation", Some("rajpurkar/squad:validation")),
            ("gpt2@main", Some("openai-community/gpt2@main")),
            ("gpt3", None),
            ("a/gpt2", None),
            ("", None),
        ] {
            assert_eq!(HubName::of_one_word(text).as_deref(), name, "{text}");
        }
    }

    #[test]
    fn addresses_hold_names() {
        for (address, name) in [
            ("https://huggingface.co/datasets/a/b", "a/b"),
            ("https://huggingface.co/a/b/tree/main", "a/b"),
            ("https://huggingface.co/a/b/tree/v1", "a/b@v1"),
            ("https://huggingface.co/a/b/blob/main/model.safetensors", "a/b"),
            ("https://huggingface.co/a/b/resolve/main/b-Q4_K_M.gguf?download=true", "a/b/b-Q4_K_M.gguf"),
            ("https://huggingface.co/datasets/a/b/viewer/default/train", "a/b"),
            ("https://huggingface.co/datasets/a/b/resolve/v1/d/c.jsonl", "a/b@v1/d/c.jsonl"),
            ("hf://datasets/a/b/c.jsonl", "a/b/c.jsonl"),
            ("hf://datasets/a/b@v1/c.jsonl", "a/b@v1/c.jsonl"),
            ("hf://datasets/a/b:train[:9]", "a/b:train[:9]"),
            ("http://localhost:80/datasets/a/b", "a/b"),
            ("hf://a/b", "a/b"),
        ] {
            assert_eq!(HubName::in_address(address).as_deref(), Some(name), "{address}");
        }
        for other in ["a/b", "s3://a/b", "https://a", "hf://a", "/a/b"] {
            assert_eq!(HubName::in_address(other), None, "{other}");
        }
        let split = |text: &str| HubName::dataset(text).unwrap().split.unwrap();
        assert_eq!(HubName::dataset("a/b/en/").unwrap().path.as_deref(), Some("en"));
        assert_eq!((split("a/b:train[:10]"), split("a/b/x:y")), ("train[:10]".into(), "y".into()));
    }

    #[test]
    fn file_names_stay_in_their_folder() {
        for bad in ["", "/etc/x", "../x", "a/../../x", "a//b", "a\\..\\b", ".git/config", "a/.GIT/x", "a\0b", "a/."] {
            assert!(unsafe_name(bad).is_some(), "{bad:?}");
        }
        for fine in ["a", ".gitattributes", "data/train-00000-of-00001.parquet", "a..b", "größe.txt"] {
            assert_eq!(unsafe_name(fine), None, "{fine}");
        }
    }
}
