//! A GGUF file as the Hugging Face directory that it was made from: `config.json` and the tokenizer's files, made from
//! its keys in the cache directory, next to a link to the file, from which the weights are read by byte range. Never
//! copies a tensor.
mod config;
mod tokenizer;

use super::codes::GgmlCode;
use super::coding::GgufCoding;
use super::family::GgufFactors;
use super::file::{GgufFile, GgufPlace, GgufValue};
use super::header::is_gguf;
use super::links::MADE;
use super::model::GgufName;
use super::order::GgufOrder;
use crate::base::{Error, Result, open, quote, split_name};
use crate::ckpt::layout::{Coding, FileTensor, pretty};
use crate::nn::Spec;
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// The directory to load instead of `path` if that is a GGUF file; else `path`.
pub fn resolve(path: &Path, cache: &Path) -> Result<PathBuf> {
    let named = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    let is_file = path.is_file() && (named || begins_as_gguf(path));
    if is_file { as_directory(path, cache) } else { Ok(path.to_path_buf()) }
}

fn begins_as_gguf(path: &Path) -> bool {
    let mut start = Vec::new();
    open::file(path).and_then(|file| file.take(4).read_to_end(&mut start)).is_ok_and(|_| is_gguf(&start))
}

/// A directory with the config and the tokenizer of the model in `file`, and with links to its files; in `cache`.
pub fn as_directory(file: &Path, cache: &Path) -> Result<PathBuf> {
    let model = GgufModel::open(&parts(file)?)?;
    let divisors = model.divisors()?;
    let files = contents(&model.keys, &divisors).map_err(|e| Error::in_file(file, e))?;
    // The hub's cache holds files under their hashes, and links with their names.
    let links: Vec<(PathBuf, String)> = model.files.iter().map(|(path, _)| link(path)).collect();
    // Equal contents, one directory: it is complete, or it is not there.
    let key = fingerprint(&files, &links);
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let dir = cache.join("gguf").join(format!("{stem}-{key:016x}{MADE}"));
    if dir.is_dir() {
        return Ok(dir);
    }
    let unfinished = cache.join("gguf").join(format!(".{key:016x}-{}", std::process::id()));
    let written = || -> io::Result<()> {
        fs::create_dir_all(&unfinished)?;
        files.iter().try_for_each(|(name, content)| fs::write(unfinished.join(name), content))?;
        links.iter().try_for_each(|(target, name)| symlink(target, unfinished.join(name)))?;
        fs::rename(&unfinished, &dir)
    };
    match written() {
        Ok(()) => Ok(dir),
        // Another process was faster.
        Err(_) if dir.is_dir() => fs::remove_dir_all(&unfinished).map(|()| dir).map_err(|e| Error::in_file(file, e)),
        Err(e) => Err(Error::input(format!(
            "{}: its config and tokenizer cannot be written to {} ({e}): set FLATSHARD_CACHE_DIR to a directory that \
             can be written",
            file.display(),
            cache.display()
        ))),
    }
}

/// The files of the directory for a GGUF file in memory, for tests. Rotary divisors are not read.
pub fn described(bytes: &[u8]) -> Result<Vec<(&'static str, Vec<u8>)>> {
    contents(&GgufFile::parse(bytes, bytes.len() as u64)?, &[])
}

/// Name and content of each file for a model with these keys.
fn contents(keys: &GgufFile, divisors: &[f32]) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let mut config = config::config(keys, divisors)?;
    let (begin, ends) = tokenizer::ends(keys)?;
    let end = if ends.len() > 1 { json!(ends) } else { json!(ends.first()) };
    config.insert("bos_token_id".into(), json!(begin));
    config.insert("eos_token_id".into(), end.clone());
    config.insert("torch_dtype".into(), json!(dtype(keys)));
    let json = |map| pretty(&Value::Object(map)).into_bytes();
    let mut files = tokenizer::files(keys)?;
    files.push(("config.json", json(config)));
    files.push(("generation_config.json", json(generation(keys, begin, end))));
    Ok(files)
}

/// The type of most elements, as transformers names it.
fn dtype(keys: &GgufFile) -> &'static str {
    let mut sizes = [0usize; 3];
    for place in keys.tensors.values() {
        let kind = match place.code {
            GgmlCode::BF16 => 1,
            GgmlCode::F16 => 2,
            _ => 0,
        };
        sizes[kind] += place.shape.iter().product::<usize>();
    }
    let most = (0..3).max_by_key(|kind| sizes[*kind]).unwrap_or(0);
    ["float32", "bfloat16", "float16"][most]
}

/// A file without links, and its name in the directory.
fn link(path: &Path) -> (PathBuf, String) {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let named = path.extension().is_some_and(|e| e == "gguf");
    let name = if named { name } else { format!("{name}.gguf") };
    (fs::canonicalize(path).unwrap_or(path.to_path_buf()), name)
}

fn fingerprint(files: &[(&str, Vec<u8>)], links: &[(PathBuf, String)]) -> u64 {
    let mut hash = Xxh3::new();
    for (name, content) in files {
        hash.update(format!("{name} {}\n", content.len()).as_bytes());
        hash.update(content);
    }
    hash.update(format!("{links:?}").as_bytes());
    hash.digest()
}

/// All files of a model that was split: NAME-00001-of-00003.gguf and its siblings.
fn parts(file: &Path) -> Result<Vec<PathBuf>> {
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Some((stem, count)) = split_name(&name) else { return Ok(vec![file.to_path_buf()]) };
    let all = (1..=count).map(|i| file.with_file_name(format!("{stem}-{i:05}-of-{count:05}.gguf")));
    let all: Vec<PathBuf> = all.collect();
    match all.iter().find(|path| !path.exists()) {
        Some(missing) => Err(Error::in_file(missing, "is missing: the model needs all files that it was split into")),
        None => Ok(all),
    }
}

/// `generation_config.json`.
fn generation(keys: &GgufFile, begin: Option<usize>, end: Value) -> Map<String, Value> {
    let mut map = Map::new();
    map.insert("bos_token_id".into(), json!(begin));
    map.insert("eos_token_id".into(), end);
    for (key, name) in [
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("temp", "temperature"),
        ("penalty_repeat", "repetition_penalty"),
    ] {
        let value = match keys.keys.get(&format!("general.sampling.{key}")) {
            Some(GgufValue::Int(n)) => json!(*n as i64),
            Some(GgufValue::Float(x)) => json!(crate::ckpt::hf::decimal(*x as f32)),
            _ => continue,
        };
        map.insert(name.into(), value);
    }
    map
}

/// The open files of a model, with the keys of the first.
pub struct GgufModel {
    /// With the tensors of all files.
    keys: GgufFile,
    pub files: Vec<(PathBuf, File)>,
}

impl GgufModel {
    pub fn open(paths: &[PathBuf]) -> Result<GgufModel> {
        let mut model = GgufModel { keys: GgufFile::default(), files: Vec::new() };
        for path in paths {
            let (parsed, file) = GgufFile::open(path)?;
            for (name, place) in parsed.tensors {
                let place = GgufPlace { file: model.files.len(), ..place };
                if model.keys.tensors.insert(name.clone(), place).is_some() {
                    return Err(Error::in_file(
                        path,
                        format!("has tensor {}, which another file has too", quote(name)),
                    ));
                }
            }
            if model.files.is_empty() {
                model.keys.keys = parsed.keys;
            }
            model.files.push((path.clone(), file));
        }
        Ok(model)
    }

    /// Divisors of the rotary frequencies; empty if the model has none.
    fn divisors(&self) -> Result<Vec<f32>> {
        let Some(place) = self.keys.tensors.get(GgufFactors::FREQS) else { return Ok(Vec::new()) };
        let (path, file) = &self.files[place.file];
        let len: usize = place.shape.iter().product();
        if len > 1 << 16 {
            return Err(Error::in_file(path, format!("tensor {} has {len} elements", GgufFactors::FREQS)));
        }
        let mut values = vec![0.0; len];
        let coding = GgufCoding::plain(place.code);
        coding.read(file, place.offset, 0, &mut values).map_err(|e| Error::in_file(path, e))?;
        Ok(values)
    }

    /// The tensors that a model like `spec` has under the names of `wanted`, as far as the files have them.
    pub fn tensors<'a>(
        &self,
        spec: &Spec,
        wanted: impl Iterator<Item = &'a FileTensor>,
    ) -> Result<BTreeMap<String, FileTensor>> {
        let mut found = BTreeMap::new();
        let mut unused: BTreeMap<&str, usize> =
            self.keys.tensors.iter().map(|(name, place)| (&name[..], place.file)).collect();
        // A reward model starts without the head.
        for name in [GgufFactors::FREQS, "output.weight"] {
            unused.remove(name);
        }
        for want in wanted {
            let GgufName { name, expert, .. } = GgufName::of(spec, &want.name)?;
            let Some(place) = self.keys.tensors.get(&name) else { continue };
            unused.remove(&name[..]);
            let mut shape = place.shape.clone();
            let mut first = 0;
            if let Some(expert) = expert {
                let experts = shape.remove(0);
                if expert >= experts {
                    let what = format!("tensor {name} has {experts} experts, but the model has more");
                    return Err(Error::in_file(&self.files[place.file].0, what));
                }
                first = expert * shape.iter().product::<usize>();
            }
            // llama.cpp drops dimensions of 1.
            if shape.len() < want.shape.len() && shape.iter().product::<usize>() == want.len() {
                shape.clone_from(&want.shape);
            }
            let coding = GgufCoding {
                code: place.code,
                row: shape.get(1).copied().unwrap_or(1),
                order: GgufOrder::of(spec, &want.name),
                minus_one: spec.norm_from_one && want.name.ends_with("norm.weight"),
            };
            let offset = place.offset + (first / place.code.block() * place.code.block_bytes()) as u64;
            let (dtype, coding) = match (coding.stored(), coding) {
                (Some(dtype), _) => (dtype, None),
                (None, coding) => (Dtype::F32, Some(Coding::Gguf(coding))),
            };
            let tensor =
                FileTensor { name: want.name.clone(), shape, dtype, file: place.file, offset, coding, columns: None };
            found.insert(want.name.clone(), tensor);
        }
        match unused.into_iter().next() {
            None => Ok(found),
            Some((name, file)) => Err(Error::in_file(
                &self.files[file].0,
                format!("has tensor {}, which a {} model does not have", quote(name), spec.arch.name()),
            )),
        }
    }
}
