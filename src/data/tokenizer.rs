//! Text to token ids and back: bytes, or a Hugging Face `tokenizer.json` and the files next to it. Never reads text
//! files.
mod added;
mod growth;
mod templates;
mod words;

pub use added::later_tokens;
pub use templates::{DEFAULT, default_of};

use crate::base::{Error, Result, open, quote};
use serde_json::{Map, Value};
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenizers::Tokenizer as Pipeline;
use words::{Tokens, Words};
use xxhash_rust::xxh3::Xxh3;

/// The files of a model directory that make up its tokenizer; only the first is required.
pub const FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
];

/// Maximum bytes one text may expand to.
const LONGEST: u64 = 256 << 20;

/// An enum, not a trait: a tokenizer is chosen once, by name, and each has its own `match` arm.
#[derive(Clone, Debug)]
pub enum Tokenizer {
    /// Ids 0..=255 are bytes, 256 is the end of text.
    Bytes,
    File(Arc<LoadedTokenizer>),
    /// No tokenizer this model can use, and why: sufficient for data that is already tokenized.
    None(Arc<str>),
}

/// A `tokenizer.json`, with `tokenizer_config.json` if present.
#[derive(Clone)]
pub struct LoadedTokenizer {
    path: PathBuf,
    pipeline: Arc<Pipeline>,
    words: Option<Arc<Words>>,
    /// Factor by which a text may grow before it is split into tokens.
    growth: u64,
    /// Largest id plus one, with added tokens and without them.
    ids: usize,
    base_ids: usize,
    /// Ids are below this: the model's vocabulary, if it lacks rows for some added tokens.
    vocab: usize,
    bos: Option<Special>,
    eos: Option<Special>,
    /// All special tokens that have names, such as `pad_token`, and how they are spelled.
    named: Vec<(String, String)>,
    affixes: (Vec<u32>, Vec<u32>),
    /// Named Jinja templates, the one called `default` first.
    templates: Vec<(String, String)>,
    /// The default template is that of a checkpoint, not the tokenizer's own.
    trained: bool,
    fingerprint: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Special {
    pub text: String,
    pub id: u32,
}

impl Tokenizer {
    /// From the `tokenizer` setting: `bytes`, a `tokenizer.json`, or a directory that holds one.
    pub fn from_name(name: &str) -> Result<Tokenizer> {
        match (name, Path::new(name)) {
            ("bytes", _) => Ok(Tokenizer::Bytes),
            (_, dir) if dir.is_dir() => Tokenizer::load(&dir.join(FILES[0])),
            (_, file) if file.exists() => Tokenizer::load(file),
            _ => Err(Error::input(format!(
                "`tokenizer` {name}: no such file or directory, and not a name of the hub (OWNER/NAME). Name a \
                 tokenizer.json, a directory that holds one, or `bytes` (257 ids). Tokenized data (JSONL with `input_ids`, .npy arrays) needs none"
            ))),
        }
    }

    /// This tokenizer for a model of `vocab` ids: none if the model cannot do with it. Texts with an added token that
    /// the model has no row for are then refused.
    pub fn for_model(&self, vocab: usize) -> Tokenizer {
        match (self.check_vocab(vocab), self) {
            (Err(why), _) => Tokenizer::none(&why),
            (Ok(()), Tokenizer::File(t)) if t.vocab > vocab => {
                Tokenizer::File(Arc::new(LoadedTokenizer { vocab, ..LoadedTokenizer::clone(t) }))
            }
            _ => self.clone(),
        }
    }
    /// No tokenizer, for this reason.
    pub fn none(why: &Error) -> Tokenizer {
        Tokenizer::None(why.to_string().into())
    }
    /// An error with the reason if there is no tokenizer.
    pub fn usable(&self) -> Result<()> {
        match self {
            Tokenizer::None(why) => Err(Error::input(&**why)),
            _ => Ok(()),
        }
    }

    /// Loads the `tokenizer.json` at `path`; special tokens and chat templates come from the files next to it.
    pub fn load(path: &Path) -> Result<Tokenizer> {
        let bad = |path: &Path, what: String| Error::input(format!("{}: {what}", path.display()));
        let read = |path: &Path| match open::read(path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(bad(path, format!("cannot be read: {e}"))),
        };
        let Some(bytes) = read(path)? else {
            return Err(bad(path, "not found: a tokenizer is a tokenizer.json of the `tokenizers` library".into()));
        };
        // Checked before loading, because loading already normalizes the special tokens.
        let growth =
            growth::growth(&bytes).map_err(|e| bad(path, format!("is not a usable tokenizer: {}", quote(e))))?;
        let mut pipeline = caught(|| Pipeline::from_bytes(&bytes))
            .map_err(|e| bad(path, format!("is not a tokenizer of the `tokenizers` library ({})", quote(e))))?;
        // Padding and truncation left in the file by a training script do not apply here.
        pipeline.with_padding(None).with_truncation(None).map_err(|e| bad(path, e.to_string()))?;

        let mut hash = Xxh3::new();
        hash.update(&bytes);
        let mut beside = |name: &str| -> Result<Option<(PathBuf, Vec<u8>)>> {
            let path = path.with_file_name(name);
            let found = read(&path)?;
            hash.update(found.as_deref().unwrap_or_default());
            Ok(found.map(|bytes| (path, bytes)))
        };
        let mut object = |name: &str| -> Result<Map<String, Value>> {
            let Some((path, bytes)) = beside(name)? else { return Ok(Map::new()) };
            serde_json::from_slice(&bytes).map_err(|e| bad(&path, format!("is not a JSON object ({})", quote(e))))
        };
        let config = object("tokenizer_config.json")?;
        let map = object("special_tokens_map.json")?;
        let named = added::named(&config, &map);
        let added = object("added_tokens.json")?;
        caught(|| Ok(added::add(&mut pipeline, &config, &map, &added)))
            .unwrap_or_else(|e| Err(e.to_string()))
            .map_err(|e| bad(path, format!("cannot take the tokens that the files next to it add: {e}")))?;
        let special = |key: &str| -> Result<Option<Special>> {
            let Some((_, text)) = named.iter().find(|(name, _)| name == key) else { return Ok(None) };
            match pipeline.token_to_id(text) {
                Some(id) => Ok(Some(Special { text: text.into(), id })),
                None => Err(bad(
                    path,
                    format!("has no token \"{}\", which the files next to it name as {key}", quote(text)),
                )),
            }
        };
        let (bos, eos) = (special("bos_token")?, special("eos_token")?);
        let affixes =
            caught(|| affixes(&pipeline)).map_err(|e| bad(path, format!("cannot tokenize a letter ({})", quote(e))))?;
        let ids = |added| pipeline.get_vocab(added).into_values().max().map_or(0, |id| id as usize + 1);
        let (ids, base_ids) = (ids(true), ids(false));
        let templates = templates::read(path.parent().unwrap_or(Path::new("")), &config)?;
        let fingerprint = hash.digest();
        let path = path.to_path_buf();
        Ok(Tokenizer::File(Arc::new(LoadedTokenizer {
            path,
            words: Words::new(&pipeline).map(Arc::new),
            pipeline: Arc::new(pipeline),
            growth,
            ids,
            base_ids,
            vocab: ids,
            bos,
            eos,
            named,
            affixes,
            templates,
            trained: false,
            fingerprint,
        })))
    }

    /// `bytes`, or the path.
    pub fn name(&self) -> String {
        match self {
            Tokenizer::None(_) => "none".into(),
            Tokenizer::Bytes => "bytes".into(),
            Tokenizer::File(t) => t.path.display().to_string(),
        }
    }
    /// Equal for tokenizers that give the same tokens.
    pub fn fingerprint(&self) -> u64 {
        match self {
            Tokenizer::Bytes => 0,
            Tokenizer::None(_) => 1,
            Tokenizer::File(t) => t.fingerprint,
        }
    }
    /// The files that belong next to the weights in a model directory: those of [`FILES`] that exist. Named chat
    /// templates have a folder of their own.
    pub fn files(&self) -> Vec<PathBuf> {
        let Tokenizer::File(t) = self else { return vec![] };
        let beside = FILES[1..].iter().map(|name| t.path.with_file_name(name));
        std::iter::once(t.path.clone()).chain(beside.filter(|p| p.is_file())).collect()
    }
    /// Number of ids; every id is below it.
    pub fn vocab(&self) -> usize {
        match self {
            Tokenizer::None(_) => 0,
            Tokenizer::Bytes => 257,
            Tokenizer::File(t) => t.vocab,
        }
    }
    /// An error unless a model of `model` ids can do with this tokenizer: it needs rows for all tokens but added ones,
    /// and for those that begin and end texts.
    pub fn check_vocab(&self, model: usize) -> Result<()> {
        self.usable()?;
        let (name, ids, base) = match self {
            Tokenizer::File(t) => (self.name(), t.ids, t.base_ids),
            _ => (self.name(), self.vocab(), self.vocab()),
        };
        let (before, after) = self.affixes();
        let marks = self.bos().into_iter().chain(self.eos()).chain(before.iter().chain(after).copied());
        if marks.max().is_none_or(|id| (id as usize) < model) && base <= model {
            return Ok(());
        }
        Err(Error::input(format!(
            "the model's vocab_size {model} is smaller than the {ids} ids of `tokenizer` {name}: tokenizer mismatch. \
             Use the model's own tokenizer, or set vocab_size to {ids} or more"
        )))
    }
    /// The token that begins a text, if the tokenizer has one.
    pub fn bos(&self) -> Option<u32> {
        match self {
            Tokenizer::Bytes | Tokenizer::None(_) => None,
            Tokenizer::File(t) => t.bos.as_ref().map(|s| s.id),
        }
    }
    /// The token that ends a text, if the tokenizer has one.
    pub fn eos(&self) -> Option<u32> {
        match self {
            Tokenizer::Bytes => Some(256),
            Tokenizer::None(_) => None,
            Tokenizer::File(t) => t.eos.as_ref().map(|s| s.id),
        }
    }
    /// How templates spell (bos, eos); the byte tokenizer's end of text has no spelling.
    pub fn spellings(&self) -> (&str, &str) {
        match self {
            Tokenizer::Bytes | Tokenizer::None(_) => ("", ""),
            Tokenizer::File(t) => {
                (t.bos.as_ref().map_or("", |s| s.text.as_str()), t.eos.as_ref().map_or("", |s| s.text.as_str()))
            }
        }
    }
    /// Names of special tokens, such as `pad_token`, and how they are spelled: variables of chat templates.
    pub fn named_tokens(&self) -> &[(String, String)] {
        match self {
            Tokenizer::Bytes | Tokenizer::None(_) => &[],
            Tokenizer::File(t) => &t.named,
        }
    }
    /// [`Tokenizer::eos`], or an error for callers that need it.
    pub fn end_of_text(&self) -> Result<u32> {
        self.usable()?;
        self.eos().ok_or_else(|| {
            Error::input(format!(
                "`tokenizer` {}: no end-of-text token is defined: put a tokenizer_config.json with eos_token next to \
                 it",
                self.name()
            ))
        })
    }
    /// The chat template of this name, or the names that exist.
    pub fn template(&self, name: &str) -> std::result::Result<&str, Vec<&str>> {
        let all = match self {
            Tokenizer::Bytes if name == DEFAULT => return Ok(CHATML),
            Tokenizer::Bytes | Tokenizer::None(_) => &[][..],
            Tokenizer::File(t) => &t.templates,
        };
        let found = all.iter().find(|(n, _)| n == name).map(|(_, text)| text.as_str());
        found.ok_or_else(|| all.iter().map(|(n, _)| n.as_str()).collect())
    }

    /// This tokenizer with the chat template that a checkpoint was trained with as the default one.
    pub fn with_trained_template(&self, text: String) -> Tokenizer {
        match self {
            Tokenizer::File(t) if self.template(DEFAULT) != Ok(&text) => {
                let mut t = LoadedTokenizer { trained: true, ..(**t).clone() };
                t.templates.retain(|(name, _)| name != DEFAULT);
                t.templates.insert(0, (DEFAULT.into(), text));
                Tokenizer::File(Arc::new(t))
            }
            other => other.clone(),
        }
    }
    /// Whether the default chat template is that of a checkpoint.
    pub fn has_trained_template(&self) -> bool {
        matches!(self, Tokenizer::File(t) if t.trained)
    }

    /// Appends the tokens of `text` verbatim; special tokens spelled out in it are recognized.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<()> {
        match self {
            Tokenizer::None(_) => return self.usable(),
            Tokenizer::Bytes => out.extend(text.bytes().map(u32::from)),
            Tokenizer::File(t) => return t.encode(text, Tokens { ids: out, places: None }),
        }
        Ok(())
    }
    /// The same, with the bytes of `text` that each token stands for.
    pub(super) fn encode_with_places(
        &self,
        text: &str,
        out: &mut Vec<u32>,
        places: &mut Vec<Range<usize>>,
    ) -> Result<()> {
        match self {
            Tokenizer::None(_) => return self.usable(),
            Tokenizer::Bytes => {
                out.extend(text.bytes().map(u32::from));
                places.extend((0..text.len()).map(|at| at..at + 1));
            }
            Tokenizer::File(t) => return t.encode(text, Tokens { ids: out, places: Some(places) }),
        }
        Ok(())
    }
    /// What transformers adds (before, after) a whole text: the special tokens of the file's post-processor, whatever
    /// `add_bos_token` and `add_eos_token` of tokenizer_config.json say.
    pub fn affixes(&self) -> (&[u32], &[u32]) {
        match self {
            Tokenizer::Bytes | Tokenizer::None(_) => (&[], &[]),
            Tokenizer::File(t) => (&t.affixes.0, &t.affixes.1),
        }
    }
    /// What comes before a whole text, unless it is written there.
    pub fn before(&self, text: &str) -> &[u32] {
        let (begin, _) = self.spellings();
        if !begin.is_empty() && text.starts_with(begin) { &[] } else { self.affixes().0 }
    }
    /// Appends the tokens of `text` that end after its first `from` bytes.
    pub(super) fn encode_after(&self, text: &str, from: usize, out: &mut Vec<u32>) -> Result<()> {
        let Tokenizer::File(t) = self else { return self.encode(&text[from..], out) };
        let (mut ids, mut places) = (vec![], vec![]);
        t.encode(text, Tokens { ids: &mut ids, places: Some(&mut places) })?;
        out.extend(ids.iter().zip(places).filter(|(_, place)| place.end > from).map(|(id, _)| id));
        Ok(())
    }

    /// Special tokens are omitted; invalid UTF-8 becomes U+FFFD; ids outside the vocabulary become U+FFFD or are
    /// omitted. Without a tokenizer: the ids, separated by spaces.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.text(ids, true)
    }
    /// The same, with special tokens as they are spelled.
    pub fn spelled(&self, ids: &[u32]) -> String {
        self.text(ids, false)
    }
    fn text(&self, ids: &[u32], plain: bool) -> String {
        match self {
            Tokenizer::None(_) => ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
            Tokenizer::Bytes => {
                let bytes = ids.iter().flat_map(|&id| match id {
                    0..256 => vec![id as u8],
                    256 => vec![],
                    _ => vec![0xff], // never valid in UTF-8
                });
                String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
            }
            Tokenizer::File(t) => caught(|| t.pipeline.decode(ids, plain)).unwrap_or_default(),
        }
    }
}

impl LoadedTokenizer {
    fn encode(&self, text: &str, mut out: Tokens) -> Result<()> {
        if (text.len() as u64).saturating_mul(self.growth) > LONGEST {
            return Err(Error::input(format!(
                "{}: can expand a text of {} bytes {} times, beyond the limit of {} MiB. Split it into shorter texts",
                self.path.display(),
                text.len(),
                self.growth,
                LONGEST >> 20
            )));
        }
        let first = out.ids.len();
        self.pipe(text, &mut out)
            .map_err(|e| Error::op("tokenizer", format!("{}: {}", self.path.display(), quote(e))))?;
        match out.ids[first..].iter().find(|&&id| id as usize >= self.vocab) {
            None => Ok(()),
            Some(&id) => Err(Error::input(format!(
                "has token \"{}\" with id {id}, for which the model has no row (vocab_size is {}): remove it from the \
                 text",
                quote(self.pipeline.id_to_token(id).unwrap_or_default()),
                self.vocab
            ))),
        }
    }

    /// Appends the tokens that the library gives, word by word where that is known to be the same.
    fn pipe(&self, text: &str, out: &mut Tokens) -> tokenizers::Result<()> {
        let (ids, places) = (out.ids.len(), out.places.as_ref().map_or(0, |places| places.len()));
        if let Some(words) = &self.words {
            let by_words = || words.encode(&self.pipeline, text, out).ok_or_else(|| "left to the library".into());
            if caught(by_words).is_ok() {
                return Ok(());
            }
        }
        out.ids.truncate(ids);
        if let Some(kept) = &mut out.places {
            kept.truncate(places);
        }
        let tokens = caught(|| self.pipeline.encode(text, false))?;
        out.extend(0, tokens.get_ids(), tokens.get_offsets().iter().copied());
        Ok(())
    }
}

impl fmt::Debug for LoadedTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Tokenizer({}, {} ids)", self.path.display(), self.ids)
    }
}

/// The library panics on files with contradictions it does not check for.
fn caught<T>(run: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err("the file contradicts itself".into()))
}

/// The tokens added before and after a text: those of the post-processor.
fn affixes(pipeline: &Pipeline) -> tokenizers::Result<(Vec<u32>, Vec<u32>)> {
    let (bare, whole) = (pipeline.encode("a", false)?, pipeline.encode("a", true)?);
    let (bare, whole) = (bare.get_ids(), whole.get_ids());
    let at = whole.windows(bare.len().max(1)).position(|w| w == bare).unwrap_or(0);
    Ok((whole[..at].to_vec(), whole[(at + bare.len()).min(whole.len())..].to_vec()))
}

/// The byte tokenizer's template; any would do.
const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
