//! Models as GGUF files. Written for llama.cpp: every rank writes the bytes that it owns, as in a checkpoint. Read: as
//! the directory that a file was made from ([`as_directory`]). Never gathers a tensor, and never shows a file under its
//! name before it is complete.
//!
//! The bytes are those that llama.cpp's convert_hf_to_gguf.py makes of a [`Checkpointer::save_hf`] directory in f32
//! (`tests/golden/gguf_files.py`).
mod adapter; // adapters alone
mod check; // what llama.cpp does not compute
mod codes; // elements of files of others
pub(super) mod coding; // tensors of files of others
mod family; // what llama.cpp knows of each family
mod family_keys; // keys of each family
mod file; // keys and tensors of files of others
mod gemma4; // the vocabulary of Gemma 4
mod header; // keys and tensors, as bytes
pub(super) mod import; // files of others as directories
mod keys; // keys of a model
pub(super) mod links; // which files such a directory stands for
mod model; // names and shapes of a model
mod order; // where a file has rows and columns
mod parts; // tensors that a file has in two, or transposed
mod quant; // elements
mod sentencepiece; // tokenizer.model
mod special; // special tokens and the chat template
mod splits; // how byte-level tokenizers split a text
mod tokenizer; // tokens and merges, as keys
mod vocabulary; // tokens by id

pub use adapter::save_adapter;
pub use check::left_out;
pub use import::{as_directory, described, resolve};
pub use links::{origin, within};
pub use model::GgufType;
pub use quant::Q8_0_BLOCK;

use super::checkpointer::Checkpointer;
use super::companions::Companions;
use super::dirs;
use super::disk::{self, CHUNK};
use super::layout::runs;
use super::publish::SavedCheckpoint;
use super::room::reserve;
use super::writer::open_made;
use crate::base::{Error, Result, open, quote};
use crate::nn::{Arch, Layout, Segment, Spec};
use crate::store::{self, Store};
use header::{GgufEntry, GgufKeys, header, is_gguf};
use model::{GgufTensor, GgufTensors, padded};
use quant::GgmlType;
use safetensors::Dtype;
use serde_json::Value;
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::time::Instant;

/// Elements that are read at a time of models that have matrices to transpose: 64 MiB.
const TURNED: usize = 16 << 20;

/// An error unless `file` is new, or a GGUF file and `overwrite` is set.
pub fn check_file(file: &Path, overwrite: bool) -> Result<()> {
    let refuse = |what: &str| Err(Error::input(format!("`save_gguf` {}: {what}; give another file", file.display())));
    match fs::metadata(file) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return refuse(&format!("cannot be looked at ({e})")),
        Ok(_) => {}
    }
    let mut start = Vec::new();
    let read = open::file(file).and_then(|file| file.take(4).read_to_end(&mut start));
    match read {
        Ok(_) if !is_gguf(&start) => refuse("is not a GGUF file, and is never overwritten"),
        Ok(_) if !overwrite => refuse("exists, and only `overwrite` replaces it"),
        Ok(_) => Ok(()),
        Err(e) => refuse(&format!("cannot be read ({e})")),
    }
}

/// The bytes before the first tensor, then the rotary factors of models that have them; and the offset of the first
/// tensor.
pub fn beginning(
    file: &Path,
    spec: &Spec,
    layouts: &[Layout],
    kind: GgufType,
    companions: &Companions,
) -> Result<(Vec<u8>, u64)> {
    let tensors = GgufTensors::new(spec, layouts, kind)?;
    let bad = |what| Error::op("save-gguf", format!("{}: {what}", super::hf::FILE));
    let config = super::hf::map(companions.config(spec, Dtype::F32).as_bytes()).map_err(bad)?;
    let kind_of = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    if super::hf::is_tower(&config)
        && !matches!(spec.arch, Arch::Gemma3 | Arch::Gemma4 | Arch::Qwen35 | Arch::Qwen35Moe | Arch::Ministral3)
        && kind_of != "qwen3_vl"
    {
        return Err(Error::input(format!(
            "`save_gguf`: the export of a {} model is not supported: of vision-language models, only Gemma 3 and 4, Qwen \
             3 VL and 3.5 and Ministral 3 can be exported. `save_hf` DIR exports this model",
            quote(kind_of)
        )));
    }
    let config = super::hf::flat(&config);
    let generation = companions.file("generation_config.json").and_then(|text| serde_json::from_slice(text).ok());
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    let mut pairs = GgufKeys::default();
    let generation = generation.unwrap_or(Value::Null);
    keys::put(&mut pairs, &name, spec, &config, &generation, &tensors, kind);
    tokenizer::put(&mut pairs, spec, &config, &generation, companions)?;
    let shapes: Vec<[usize; 1]> = tensors.factors.iter().map(|factors| [factors.values.len()]).collect();
    let mut offset = 0;
    let factors = tensors.factors.iter().zip(&shapes).map(|(factors, shape)| {
        let entry = GgufEntry { name: factors.name, shape, form: GgmlType::F32, offset };
        offset += padded(factors.bytes());
        entry
    });
    let list = tensors.list.iter().filter(|t| t.is_first());
    let list = list.map(|t| GgufEntry { name: &t.name, shape: &t.shape, form: t.form, offset: t.offset });
    let entries: Vec<GgufEntry> = factors.chain(list).collect();
    let mut bytes = header(&pairs, entries.into_iter());
    let start = bytes.len() as u64;
    for factors in &tensors.factors {
        GgmlType::F32.encode(&factors.values, &mut bytes);
        bytes.resize(bytes.len() + padded(factors.bytes()) as usize - factors.bytes(), 0);
    }
    Ok((bytes, start))
}

impl Checkpointer {
    /// Writes the model with its tokenizer to `file`. [`check_file`] says what that may be.
    pub fn save_gguf(&mut self, file: &Path, kind: GgufType, store: &mut dyn Store) -> Result<SavedCheckpoint> {
        let started = Instant::now();
        let tensors = GgufTensors::new(&self.spec, &self.layouts, kind)?;
        let target = fs::canonicalize(file).unwrap_or(file.to_path_buf());
        let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let place = || self.exports.place(&target, |file| check_file(file, self.exports.overwrite));
        let unfinished = |nonce: u64| disk::parent(&target).join(dirs::unfinished(&name, nonce));
        let nonce = dirs::nonce();
        let mut held = None;
        let made = match self.exchange.rank() {
            0 => place()
                .and_then(|_| self.room_for_gguf((file, &target), &unfinished(nonce), kind, &tensors))
                .and_then(|start| {
                    held = Some(dirs::hold(&unfinished(nonce))?);
                    Ok(vec![nonce, start])
                }),
            _ => Ok(vec![0; 2]),
        };
        let made = self.exchange.share(&*self.dev, "make room for the GGUF file", made, 2)?;
        let (path, start) = (unfinished(made[0][0]), made[0][1]);
        let abandon = || drop((made[0][0] == nonce).then(|| fs::remove_file(&path)));

        let written = self.write_gguf(&path, start, &tensors, store);
        self.exchange.agree(&*self.dev, "write its part of the GGUF file", written).inspect_err(|_| abandon())?;
        let disk = &self.disk;
        let publish = || {
            let (target, note) = place()?;
            dirs::publish(disk, &path, &target)?;
            Ok((if note.is_some() { target } else { file.into() }, note))
        };
        let published = if self.exchange.rank() == 0 { publish() } else { Ok((file.into(), None)) };
        let published = self.exchange.agree(&*self.dev, "complete the GGUF file", published);
        let (path, note) = published.inspect_err(|_| abandon())?;
        drop(held);
        let (bytes, seconds) = (start + tensors.bytes, started.elapsed().as_secs_f64());
        Ok(SavedCheckpoint { path, step: None, bytes, seconds, evaluation: None, note })
    }

    /// Makes the file under a temporary name, at its full length, with its beginning. Returns the offset of the first
    /// tensor.
    fn room_for_gguf(
        &self,
        (file, target): (&Path, &Path),
        path: &Path,
        kind: GgufType,
        tensors: &GgufTensors,
    ) -> Result<u64> {
        let (beginning, start) = beginning(file, &self.spec, &self.layouts, kind, &self.companions)?;
        let parent = disk::parent(path);
        self.disk.make_dirs(parent)?;
        dirs::sweep_unfinished(target)?;
        let bytes = start + tensors.bytes;
        reserve(&self.disk, path, &beginning, bytes, bytes).inspect_err(|_| drop(fs::remove_file(path)))?;
        Ok(start)
    }

    /// Writes and syncs this rank's part of all tensors.
    fn write_gguf(&self, path: &Path, start: u64, tensors: &GgufTensors, store: &mut dyn Store) -> Result<()> {
        let (file, share) = (open_made(&self.disk, path)?, self.share(store));
        let (mut rounded, mut scratch) = (Vec::new(), Vec::new());
        // Rows of a transposed matrix that are read together are written together.
        let most = if tensors.list.iter().any(GgufTensor::is_turned) { TURNED } else { CHUNK / 4 };
        let mut chunk = vec![0f32; most];
        let mut put = |segment: &Segment, at: usize, values: &mut [f32]| -> Result<()> {
            let stretches = segment.stretches(at..at + values.len());
            let stretches: Vec<_> = stretches.map(|(part, place)| (part.start - at..part.end - at, place)).collect();
            let mut put = |bytes: &[u8], offset| file.write_at(bytes, start + offset);
            tensors.place(&segment.name, &stretches, values, &mut scratch, &mut put)
        };
        store.for_each_shard(&mut |shard| {
            let stored = runs(shard.layout, shard.start, shard.master.len(), share);
            for run in stored.filter(|run| tensors.has(&run.segment.name)) {
                for (range, at) in run.chunks(most) {
                    let values = &mut chunk[..range.len()];
                    store::values(&*self.dev, shard.master.as_view().slice(range), &mut rounded, values)?;
                    if let Some(merging) = &self.merging {
                        merging.add(run.segment, at, values)?;
                    }
                    put(run.segment, at, values)?;
                }
            }
            Ok(())
        })?;
        if let Some(merging) = &self.merging {
            merging.each_packed(&*self.dev, share, store, &mut put)?;
        }
        file.sync()
    }
}
