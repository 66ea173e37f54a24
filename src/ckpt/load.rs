//! Reading: everything about the files is checked before a weight changes; then each rank reads the ranges that its pieces
//! need. Never trusts a length, a name or an offset of a file.
use super::layout::{Plan, Run, Share, Tensor, Tensors, checksum, runs};
use super::state::{self, Checksums, TrainerState, file_checksum, hex};
use super::{CHUNK, Checkpointer, hf};
use crate::base::{Error, Result};
use crate::device::{Device, ViewMut};
use crate::nn::{Layout, Spec};
use crate::optim::Optimizer;
use crate::store::Store;
use half::{bf16, f16};
use safetensors::{Dtype, tensor::Metadata};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Where the trainer stood, when the checkpoint in `dir` is whole in form and of this model and optimizer. Reads headers
/// and small files only: what a program checks before it starts any rank.
pub fn inspect(dir: &Path, spec: &Spec, layouts: &[Layout], moments: &[&str]) -> Result<TrainerState> {
    Source::checkpoint(dir, spec, layouts, moments).map(|(_, state, _)| state)
}

/// Whether the Hugging Face model in `dir` is this model (`--pretrain`).
pub fn inspect_model(dir: &Path, spec: &Spec, layouts: &[Layout]) -> Result<()> {
    Source::model(dir, spec, layouts).map(|_| ())
}

impl Checkpointer {
    /// Fills store and optimizer from the checkpoint in `dir`, saved by any number of ranks of any strategy. An error is
    /// an error on all ranks; after one, the store's content is unspecified.
    pub fn load(&mut self, dir: &Path, store: &mut dyn Store, optimizer: &mut Optimizer) -> Result<TrainerState> {
        let opened = Source::checkpoint(dir, &self.spec, &self.layouts, self.moments);
        let (source, state, checksums) = self.exchange.agree(&*self.dev, "open the checkpoint", opened)?;
        self.read(&source, store, Some(optimizer), Some(&checksums))?;
        optimizer.resume(state.optimizer_steps);
        Ok(state)
    }

    /// Fills the store from a Hugging Face model directory (F32, BF16 or F16), or from the model part of a checkpoint.
    pub fn load_model(&mut self, dir: &Path, store: &mut dyn Store) -> Result<()> {
        let opened = Source::model(dir, &self.spec, &self.layouts);
        let source = self.exchange.agree(&*self.dev, "open the model", opened)?;
        self.read(&source, store, None, None)
    }

    fn read(
        &mut self,
        source: &Source,
        store: &mut dyn Store,
        optimizer: Option<&mut Optimizer>,
        checksums: Option<&Checksums>,
    ) -> Result<()> {
        let tensors = source.tensors.list.len();
        let sums = source.read(&*self.dev, store, optimizer);
        let own = sums.as_ref().map_or(Vec::new(), Vec::clone);
        let all = self.exchange.share(&*self.dev, "read its part of the checkpoint", sums, tensors)?;
        // What every rank read alike is not added up.
        let total = if store.replicated() { own } else { super::total(&all, tensors) };
        let verified =
            checksums.map_or(Ok(()), |sums| source.verify(sums, &total)).and_then(|()| store.weights_changed());
        self.exchange.agree(&*self.dev, "verify the checkpoint", verified)
    }
}

/// Opened files of a checkpoint or model, with the tensors that the plan asks for.
struct Source {
    files: Vec<(PathBuf, File)>,
    tensors: Tensors,
}

impl Source {
    fn checkpoint(
        dir: &Path,
        spec: &Spec,
        layouts: &[Layout],
        moments: &[&str],
    ) -> Result<(Source, TrainerState, Checksums)> {
        let (state, checksums) = state::read(dir)?;
        for (name, sum) in &checksums.files {
            let path = dir.join(plain(&dir.join(state::FILE), name)?);
            let content = fs::read(&path).map_err(|e| bad(&path, format!("{e}; the checkpoint is not complete")))?;
            if file_checksum(&content) != *sum {
                let found = file_checksum(&content);
                return Err(bad(&path, format!("was changed after it was saved: its checksum is {found}, not {sum}")));
            }
        }
        let mut found = Found::default();
        found.open(dir, "model")?;
        if !moments.is_empty() {
            found.open(dir, "optimizer")?;
        }
        let source = found.matched(&Plan::new(layouts, moments, u64::MAX), true)?;
        let then = hf::read(dir)?;
        same_model(dir, &then, spec)?;
        Ok((source, state, checksums))
    }

    fn model(dir: &Path, spec: &Spec, layouts: &[Layout]) -> Result<Source> {
        let then = hf::read(dir)?;
        let mut found = Found::default();
        found.open(dir, "model")?;
        let source = found.matched(&Plan::new(layouts, &[], u64::MAX), false)?;
        same_model(dir, &then, spec)?;
        Ok(source)
    }

    /// Every run of this rank's pieces, into masters, parameters and moments. Returns the sums over what was read.
    fn read(&self, dev: &dyn Device, store: &mut dyn Store, mut optimizer: Option<&mut Optimizer>) -> Result<Vec<u64>> {
        let mut sums = vec![0; self.tensors.list.len()];
        let chunk = &mut vec![0; CHUNK][..];
        store.for_each_piece(&mut |mut piece| {
            for run in runs(piece.layout, piece.start, piece.master.len(), Share::WHOLE) {
                let master = piece.master.reborrow().slice(run.range.clone());
                self.read_run(dev, chunk, &mut sums, 0, &run, master)?;
                let Some(optimizer) = optimizer.as_mut().filter(|_| piece.grad.is_some()) else { continue };
                for (moment, (_, state)) in optimizer.state(piece.unit).enumerate() {
                    self.read_run(dev, chunk, &mut sums, 1 + moment, &run, state.slice(run.range.clone()))?;
                }
            }
            match piece.param {
                Some(param) => dev.copy(piece.master.as_view(), param),
                None => Ok(()),
            }
        })?;
        Ok(sums)
    }

    fn read_run(
        &self,
        dev: &dyn Device,
        chunk: &mut [u8],
        sums: &mut [u64],
        group: usize,
        run: &Run,
        mut to: ViewMut,
    ) -> Result<()> {
        let index = self.tensors.find(group, &run.segment.name)?;
        let tensor = &self.tensors.list[index];
        let (path, file) = &self.files[tensor.file];
        let size = tensor.dtype.bitsize() / 8;
        let len = to.len();
        for from in (0..len).step_by(CHUNK / 4) {
            let part = to.reborrow().slice(from..len.min(from + CHUNK / 4));
            let (at, bytes) = (run.at + from, &mut chunk[..part.len() * size]);
            file.read_exact_at(bytes, tensor.offset + (size * at) as u64)
                .map_err(|e| bad(path, format!("cannot read tensor {}: {e}", tensor.name)))?;
            let pair = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
            match tensor.dtype {
                Dtype::F32 => {
                    sums[index] = sums[index].wrapping_add(checksum(bytes, at));
                    dev.upload(bytes, part)?;
                }
                dtype => {
                    let value = |b| {
                        if dtype == Dtype::F16 {
                            f16::from_bits(pair(b)).to_f32()
                        } else {
                            bf16::from_bits(pair(b)).to_f32()
                        }
                    };
                    let values: Vec<f32> = bytes.chunks_exact(size).map(value).collect();
                    dev.upload(bytemuck::cast_slice(&values), part)?;
                }
            }
        }
        Ok(())
    }

    fn verify(&self, checksums: &Checksums, sums: &[u64]) -> Result<()> {
        for (tensor, sum) in self.tensors.list.iter().zip(sums) {
            let stored = checksums.tensors.get(&tensor.name).map_or("none", String::as_str);
            if stored != hex(*sum) {
                let what = format!(
                    "tensor {} was changed after it was saved: its checksum is {}, not {stored}; resume from another \
                     checkpoint",
                    tensor.name,
                    hex(*sum)
                );
                return Err(bad(&self.files[tensor.file].0, what));
            }
        }
        Ok(())
    }
}

fn bad(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::input(format!("{}: {what}", path.display()))
}

fn same_model(dir: &Path, then: &Spec, now: &Spec) -> Result<()> {
    match hf::differences(then, now) {
        none if none.is_empty() => Ok(()),
        some => Err(bad(&dir.join(hf::FILE), format!("is of another model: {}", some.join("; ")))),
    }
}

/// A file name that stays in its directory.
fn plain<'a>(index: &Path, name: &'a str) -> Result<&'a str> {
    let plain = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
    plain.then_some(name).ok_or_else(|| bad(index, format!("names the file {name:?}, which is not a plain file name")))
}

/// The format's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// What the files say that they hold.
#[derive(Default)]
struct Found {
    files: Vec<(PathBuf, File)>,
    tensors: HashMap<String, Tensor>,
}

impl Found {
    /// `stem.safetensors`, or the files that its index names.
    fn open(&mut self, dir: &Path, stem: &str) -> Result<()> {
        let (single, index) =
            (dir.join(format!("{stem}.safetensors")), dir.join(format!("{stem}.safetensors.index.json")));
        if single.exists() {
            return self.add(single, |_, _| Ok(()));
        }
        let text =
            fs::read(&index).map_err(|_| bad(&single, "is missing, and so is an index of several such files"))?;
        let parsed: Value = serde_json::from_slice(&text).map_err(|e| bad(&index, format!("is not JSON ({e})")))?;
        let Some(map) = parsed.get("weight_map").and_then(Value::as_object) else {
            return Err(bad(&index, "has no weight_map"));
        };
        let mut placed = BTreeMap::new();
        for (tensor, file) in map {
            let Some(file) = file.as_str() else { return Err(bad(&index, format!("tensor {tensor} is in {file}"))) };
            placed.insert(tensor.as_str(), plain(&index, file)?);
        }
        let names: BTreeSet<&str> = placed.values().copied().collect();
        for name in names {
            self.add(dir.join(name), |tensor, path| match placed.get(tensor) {
                Some(file) if *file == name => Ok(()),
                _ => Err(bad(path, format!("holds tensor {tensor}, which {} does not place there", index.display()))),
            })?;
        }
        match placed.iter().find(|(tensor, _)| !self.tensors.contains_key(**tensor)) {
            Some((tensor, file)) => {
                Err(bad(&dir.join(file), format!("lacks tensor {tensor}, which the index places there")))
            }
            None => Ok(()),
        }
    }

    /// Reads and checks the header of one file. `expected` judges each tensor's name.
    fn add(&mut self, path: PathBuf, expected: impl Fn(&str, &Path) -> Result<()>) -> Result<()> {
        let failed = |e: std::io::Error| bad(&path, e);
        let file = File::open(&path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut prefix = [0; 8];
        let header = match file.read_exact_at(&mut prefix, 0) {
            Ok(()) => u64::from_le_bytes(prefix),
            Err(_) => return Err(bad(&path, format!("has {length} bytes: truncated, or not a safetensors file"))),
        };
        if header > length - 8 {
            return Err(bad(&path, format!("is truncated: it has {length} bytes, its header alone {header}")));
        }
        if header > MAX_HEADER {
            return Err(bad(&path, format!("has a header of {header} bytes; safetensors allows {MAX_HEADER}")));
        }
        let mut text = vec![0; header as usize];
        file.read_exact_at(&mut text, 8).map_err(failed)?;
        let meta: Metadata =
            serde_json::from_slice(&text).map_err(|e| bad(&path, format!("has a header that cannot be used: {e}")))?;
        let promised = 8 + header + meta.data_len() as u64;
        if promised != length {
            let how = if length < promised { "is truncated" } else { "has bytes too many" };
            return Err(bad(&path, format!("{how}: it has {length} bytes, its header describes {promised}")));
        }
        for (name, info) in meta.tensors() {
            expected(&name, &path)?;
            let tensor = Tensor {
                name: name.clone(),
                shape: info.shape.clone(),
                dtype: info.dtype,
                file: self.files.len(),
                offset: 8 + header + info.data_offsets.0 as u64,
            };
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(bad(&path, format!("holds tensor {name}, which another file holds too")));
            }
        }
        self.files.push((path, file));
        Ok(())
    }

    /// The tensors in the plan's order. `exact`: our own checkpoint, all f32 and nothing more; else the names that models
    /// of others go by are understood, and buffers without weights are passed over.
    fn matched(mut self, plan: &Plan, exact: bool) -> Result<Source> {
        let mut tensors = plan.tensors.clone();
        let place = |files: &[(PathBuf, File)], t: &Tensor| files[t.file].0.clone();
        let holder = self.files.first().map_or(PathBuf::new(), |(path, _)| path.parent().unwrap_or(path).to_path_buf());
        for want in &mut tensors.list {
            let bare = want.name.strip_prefix("transformer.").filter(|_| !exact);
            let found = self.tensors.remove(&want.name).or_else(|| self.tensors.remove(bare?));
            let Some(found) = found else {
                return Err(bad(
                    &holder,
                    format!(
                        "no file holds tensor {}, which this model and optimizer have; give the flags of the model that was saved",
                        want.name
                    ),
                ));
            };
            let path = place(&self.files, &found);
            if found.shape != want.shape {
                return Err(bad(
                    &path,
                    format!(
                        "tensor {} has shape {:?}, in this model {:?}; give the flags of the model that was saved",
                        want.name, found.shape, want.shape
                    ),
                ));
            }
            if found.dtype != Dtype::F32 && (exact || !matches!(found.dtype, Dtype::BF16 | Dtype::F16)) {
                return Err(bad(&path, format!("tensor {} is {:?}, which is not read here", want.name, found.dtype)));
            }
            *want = Tensor { name: std::mem::take(&mut want.name), ..found };
        }
        let passed_over = |name: &str| {
            let buffer = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"].iter().any(|b| name.ends_with(b));
            !exact && (buffer || name == "lm_head.weight")
        };
        match self.tensors.values().filter(|t| !passed_over(&t.name)).min_by(|a, b| a.name.cmp(&b.name)) {
            Some(t) => Err(bad(
                &place(&self.files, t),
                format!(
                    "holds tensor {}, which this model does not have; give the flags of the model that was saved",
                    t.name
                ),
            )),
            None => Ok(Source { files: self.files, tensors }),
        }
    }
}
