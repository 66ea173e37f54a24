//! The files to load from: opened, headers checked, and tensors matched with the model's, all before any weight is
//! overwritten. Never trusts a file's description of itself, and never reads a tensor.
use super::companions::template;
use super::gguf::import::GgufModel;
use super::gguf::links::within;
use super::layout::{ADAPTER_PREFIX, Carried, Coding, FilePlan, FileTensor, Tensors};
use super::model_dir::is_model;
use super::mxfp4::Mxfp4Bytes;
use super::naming::Naming;
use super::published;
use super::state::{self, Checksums, TrainerState, file_checksum, hex};
use super::tower::{OpenFiles, Tower, changed};
use super::unstack;
use super::unused::{PREDICTORS, is_buffer, is_unused_kv, predicts_later_tokens};
use super::{header, hf};
use crate::base::{Error, Result, open};
use crate::nn::{HEAD, Layout, SCORE, Segment, Spec, goes_with_adapters, has_adapters};
use crate::optim::Moments;
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The open files of a checkpoint or model, and the tensors the plan asks for.
pub(super) struct TensorSource {
    pub files: OpenFiles,
    pub tensors: Tensors,
    /// A separately stored head of a model with tied embeddings: the index of the tensor it must equal, and the head
    /// itself.
    pub twin: Option<(usize, FileTensor)>,
    /// The other tensors of a vision-language model.
    pub tower: Option<Tower>,
    pub mxfp4: Mutex<Mxfp4Bytes>,
}

impl TensorSource {
    pub fn checkpoint(
        dir: &Path,
        spec: &Spec,
        layouts: &[Layout],
        moments: &Moments,
    ) -> Result<(TensorSource, TrainerState, Checksums)> {
        let (state, checksums) = state::read(dir)?;
        for (name, sum) in &checksums.files {
            let stated = template::within(name).map_err(|e| Error::in_file(&dir.join(state::FILE), e))?;
            let path = dir.join(stated);
            let content =
                open::read(&path).map_err(|e| damaged(&path, format!("{e}: the checkpoint is incomplete")))?;
            if file_checksum(&content) != *sum {
                let found = file_checksum(&content);
                return Err(damaged(
                    &path,
                    format!("was changed after it was saved: its checksum is {found}, not {sum}"),
                ));
            }
        }
        let mut found = OpenedFiles::default();
        let stem = if has_adapters(layouts) { "adapter_model" } else { "model" };
        found.open(dir, stem).map_err(Error::damaged)?;
        let tower = found.tower(dir, has_adapters(layouts))?;
        let plan = FilePlan::of_masters(layouts, moments, u64::MAX, tower.as_ref().map(|tower| &tower.carried));
        if !moments.names.is_empty() {
            found.open(dir, "optimizer").map_err(Error::damaged)?;
        }
        // A mismatch is the fault of the settings, unless the header itself has changed.
        let changed = found.changed(&checksums.headers);
        let source = found.matched(dir, &plan, tower, true);
        if let Some(path) = changed {
            let why = source.err().map_or(String::new(), |e| format!(" ({e})"));
            return Err(damaged(&path, format!("has a header that was changed after it was saved{why}")));
        }
        let source = source?;
        let then = hf::read(dir)?;
        same_model(dir, &then, spec)?;
        Ok((source, state, checksums))
    }

    pub fn model(dir: &Path, spec: &Spec, layouts: &[Layout]) -> Result<TensorSource> {
        is_model(dir)?;
        let then = hf::read(dir)?;
        // A causal model has a head of logits instead of the score, whose initial weights stay.
        let new_score = spec.score && !then.score;
        let planned = |carried| match new_score {
            true => FilePlan::without(layouts, SCORE),
            false => FilePlan::of_base(layouts, carried),
        };
        let mut plan = planned(None);
        let (mut found, tower) = match within(dir)? {
            none if none.is_empty() => {
                let mut found = OpenedFiles::safetensors(dir, "model")?;
                published::rename(&mut found.tensors, &then);
                let tower = found.tower(dir, false)?;
                found.tensors.retain(|name, _| !predicts_later_tokens(name, &then) && !is_unused_kv(name, &then));
                plan = planned(tower.as_ref().map(|tower| &tower.carried));
                (found, tower)
            }
            files => (OpenedFiles::gguf(&files, &then, &plan)?, None),
        };
        if new_score {
            found.tensors.remove(HEAD);
        }
        let source = found.matched(dir, &plan, tower, false)?;
        same_model(dir, &Spec { score: then.score || new_score, ..then }, spec)?;
        Ok(source)
    }

    /// The adapter in `dir`, whose tensors are those that these layouts train. `tower`: its model has a vision tower.
    pub fn adapter(dir: &Path, layouts: &[Layout], tower: bool) -> Result<TensorSource> {
        let found = OpenedFiles::safetensors(dir, "adapter_model")?;
        let tower = tower.then(|| found.around_adapters());
        let plan = FilePlan::of_masters(layouts, &Moments::NONE, u64::MAX, tower.as_ref().map(|tower| &tower.carried));
        found.matched(dir, &plan, tower, false)
    }

    pub fn verify(&self, checksums: &Checksums, sums: &[u64]) -> Result<()> {
        for (tensor, sum) in self.tensors.list.iter().zip(sums) {
            let stored = checksums.tensors.get(&tensor.name).map_or("none", String::as_str);
            if stored != hex(*sum) {
                return Err(changed(&self.files[tensor.file].0, &tensor.name, &hex(*sum), stored));
            }
        }
        Ok(())
    }
}

impl TensorSource {
    /// The bytes of `count` elements of `tensor` from its element `place` on, read into `buffer`, which grows if it is
    /// too short. Aligned for [`super::elements::widen`].
    pub fn elements<'b>(
        &self,
        tensor: &FileTensor,
        place: usize,
        count: usize,
        buffer: &'b mut Vec<u16>,
    ) -> Result<&'b [u8]> {
        let bytes = count * tensor.dtype.bitsize() / 8;
        if buffer.len() < bytes.div_ceil(2) {
            buffer.resize(bytes.div_ceil(2), 0);
        }
        let to = &mut bytemuck::cast_slice_mut::<u16, u8>(buffer)[..bytes];
        self.read_at(tensor, place, to)?;
        Ok(to)
    }

    /// The bytes of `tensor` from its element `place` on.
    pub fn read_at(&self, tensor: &FileTensor, place: usize, to: &mut [u8]) -> Result<()> {
        let ((path, file), size) = (&self.files[tensor.file], tensor.dtype.bitsize() / 8);
        let read = match &tensor.coding {
            None => tensor
                .runs(place, to.len() / size)
                .try_for_each(|(run, at)| file.read_exact_at(&mut to[run.start * size..run.end * size], at)),
            Some(coding) => {
                let mut values = vec![0f32; to.len() / size];
                let read = match coding {
                    Coding::Gguf(coding) => coding.read(file, tensor.offset, place, &mut values),
                    Coding::Transposed(coding) => coding.read(file, tensor.offset, place, &mut values),
                    Coding::Mxfp4(coding) => {
                        let mut bytes = self.mxfp4.lock().unwrap_or_else(PoisonError::into_inner);
                        bytes.read(&self.files, (tensor.file, tensor.offset), coding, place, &mut values)?;
                        Ok(())
                    }
                };
                to.copy_from_slice(bytemuck::cast_slice(&values));
                read
            }
        };
        read.map_err(|e| Error::in_file(path, format!("cannot read tensor {}: {e}", tensor.name)))
    }
    /// An error if tensors have `counts` non-finite values: such weights would make every step a skipped one, and such
    /// moments would produce them. `saved`: they come from a checkpoint.
    pub fn finite(&self, counts: &[u64], saved: bool) -> Result<()> {
        let mut strange = self.tensors.list.iter().zip(counts).filter(|(_, count)| **count > 0);
        let Some((tensor, count)) = strange.next() else { return Ok(()) };
        let more = match strange.count() {
            0 => String::new(),
            n => format!(" ({n} more tensors have non-finite values)"),
        };
        let instead = if saved { "resume from an earlier checkpoint" } else { "use a model without them" };
        let what = format!(
            "tensor {} has non-finite values (NaN or infinity): {count} of {}{more}; {instead}",
            tensor.name,
            tensor.len()
        );
        Err(Error::in_file(&self.files[tensor.file].0, what))
    }
}

fn damaged(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::in_file(path, what).damaged()
}

fn same_model(dir: &Path, then: &Spec, now: &Spec) -> Result<()> {
    match hf::differences(then, now) {
        none if none.is_empty() => Ok(()),
        some => Err(Error::in_file(&dir.join(hf::FILE), format!("is of another model: {}", some.join("; ")))),
    }
}

/// What the headers describe.
#[derive(Default)]
pub(super) struct OpenedFiles {
    pub files: Vec<(PathBuf, File)>,
    /// Checksums of the headers.
    headers: Vec<String>,
    pub tensors: BTreeMap<String, FileTensor>,
}

impl OpenedFiles {
    pub fn safetensors(dir: &Path, stem: &str) -> Result<OpenedFiles> {
        let mut found = OpenedFiles::default();
        found.open(dir, stem)?;
        Ok(found)
    }

    /// Opens GGUF files of a model like `spec`, as far as they have the tensors of `plan`, or a head next to a tied
    /// table.
    fn gguf(files: &[PathBuf], spec: &Spec, plan: &FilePlan) -> Result<OpenedFiles> {
        let model = GgufModel::open(files)?;
        let tensors = model.tensors(spec, plan.tensors.list.iter())?;
        Ok(OpenedFiles { files: model.files, headers: Vec::new(), tensors })
    }

    /// Opens `stem.safetensors`, or the files its index names.
    pub fn open(&mut self, dir: &Path, stem: &str) -> Result<()> {
        let single = dir.join(format!("{stem}.safetensors"));
        let index = dir.join(format!("{stem}.safetensors.index.json"));
        if single.exists() {
            return self.add(single, |_, _| Ok(()));
        }
        let text = open::read(&index).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::in_file(&single, "is missing, and there is no index of several such files")
            }
            _ => Error::in_file(&index, e),
        })?;
        let placed = header::index(&text).map_err(|e| Error::in_file(&index, e))?;
        let names: BTreeSet<&String> = placed.values().collect();
        for name in names {
            self.add(dir.join(name), |tensor, path| match placed.get(tensor) {
                Some(file) if file == name => Ok(()),
                _ => Err(Error::in_file(
                    path,
                    format!("has tensor {tensor}, which {} does not list for this file", index.display()),
                )),
            })?;
        }
        match placed.iter().find(|(tensor, _)| !self.tensors.contains_key(*tensor)) {
            Some((tensor, file)) => {
                Err(Error::in_file(&dir.join(file), format!("lacks tensor {tensor}, which the index lists for it")))
            }
            None => Ok(()),
        }
    }

    /// Reads and checks the header of one file. `expected` checks each tensor's name.
    fn add(&mut self, path: PathBuf, expected: impl Fn(&str, &Path) -> Result<()>) -> Result<()> {
        let failed = |e: std::io::Error| Error::in_file(&path, e);
        let file = open::file(&path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0)
            .map_err(|_| Error::in_file(&path, format!("has {length} bytes: truncated, or not a safetensors file")))?;
        let mut text = vec![0; header::length(prefix, length).map_err(|e| Error::in_file(&path, e))? as usize];
        file.read_exact_at(&mut text, 8).map_err(failed)?;
        for header::TensorEntry { name, shape, dtype, offset } in
            header::tensors(&text, length).map_err(|e| Error::in_file(&path, e))?
        {
            expected(&name, &path)?;
            let file = self.files.len();
            let tensor = FileTensor { name: name.clone(), shape, dtype, file, offset, coding: None, columns: None };
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(Error::in_file(&path, format!("has tensor {name}, which another file has too")));
            }
        }
        self.headers.push(file_checksum(&[&prefix[..], &text].concat()));
        self.files.push((path, file));
        Ok(())
    }

    /// The first file whose header differs from the one that was written.
    fn changed(&self, written: &BTreeMap<String, String>) -> Option<PathBuf> {
        let changed = |(path, sum): &(&PathBuf, &String)| {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            written.get(&name).is_some_and(|written| written != *sum)
        };
        let files = self.files.iter().map(|(path, _)| path);
        files.zip(&self.headers).find(changed).map(|(path, _)| path.clone())
    }

    /// Takes what the model in `dir` has besides the text model that is trained: a vision tower, or layers that predict
    /// several tokens. None if there is nothing. `adapters`: the files have those of its text model.
    pub fn tower(&mut self, dir: &Path, adapters: bool) -> Result<Option<Tower>> {
        if !hf::has_tower(dir)? {
            let others = self.tensors.extract_if(.., |name, _| !adapters && name.starts_with(PREDICTORS));
            let tensors: Vec<FileTensor> = others.map(|(_, tensor)| tensor).collect();
            let own: Vec<String> = self.tensors.keys().map(|name| Naming::text_name(name)).collect();
            let class = Naming::of_class(own.iter().map(String::as_str));
            if !adapters && Naming::of(self.tensors.keys()) != class {
                // The text model's own class, saved after it was read from a vision-language model.
                let tensors = std::mem::take(&mut self.tensors).into_values();
                self.tensors = own.iter().map(|name| class.file_name(name)).zip(tensors).collect();
            }
            let carried = Carried { naming: Naming::Plain, tensors };
            return Ok((!carried.tensors.is_empty()).then(|| Tower { carried, ..Tower::default() }));
        }
        if adapters {
            return Ok(Some(self.around_adapters()));
        }
        let naming = Naming::of(self.tensors.keys());
        let others = self.tensors.extract_if(.., |name, _| !naming.is_text(name));
        let tensors: Vec<FileTensor> = others.map(|(_, tensor)| tensor).collect();
        match tensors.is_empty() {
            false => Ok(Some(Tower { carried: Carried { naming, tensors }, ..Tower::default() })),
            true => Err(Error::in_file(
                dir,
                format!(
                    "no file has tensors of the vision tower that {} describes: use the whole model, or the config of \
                     its text model alone",
                    hf::FILE
                ),
            )),
        }
    }

    /// Every tensor, to be verified.
    pub fn all(self) -> Tower {
        let carried = Carried { tensors: self.tensors.into_values().collect(), ..Carried::default() };
        Tower { carried, files: Arc::new(self.files) }
    }

    /// The names of a vision-language model whose text model has these adapters.
    fn around_adapters(&self) -> Tower {
        let module = |name: &String| name.strip_prefix(ADAPTER_PREFIX).unwrap_or(name).to_string();
        let modules: Vec<String> = self.tensors.keys().map(module).collect();
        let naming = Naming::of(modules.iter());
        Tower { carried: Carried { naming, tensors: Vec::new() }, ..Tower::default() }
    }

    /// The tensors in the plan's order. `exact`: our own checkpoint, all f32 and nothing else. Otherwise the names that
    /// third-party models use are accepted, and buffers without weights are ignored.
    fn matched(mut self, dir: &Path, plan: &FilePlan, tower: Option<Tower>, exact: bool) -> Result<TensorSource> {
        const FLAGS: &str = "use the model settings it was saved with";
        let mut tensors = plan.tensors.clone();
        let head = tower.as_ref().map_or(HEAD.into(), |tower| tower.carried.naming.file_name(HEAD));
        let is_tied = !exact && tensors.list.iter().all(|want| want.name != head);
        unstack::expand(&mut self.tensors, &tensors.list);
        let mut missing = Vec::new();
        for want in &mut tensors.list {
            // A base model saved without its head has no prefix.
            let bare = ["transformer.", "model.", "gpt_neox."].iter().find_map(|p| want.name.strip_prefix(p));
            let bare = bare.filter(|_| !exact && tower.is_none());
            let found = self.tensors.remove(&want.name).or_else(|| self.tensors.remove(bare?));
            // Some tools save only the first, by name, of tensors that share memory.
            let is_table = is_tied && TABLES.iter().any(|table| want.name.ends_with(table));
            let found = found.or_else(|| is_table.then(|| self.tensors.remove(&head))?);
            let Some(found) = found else {
                missing.push(want.name.clone());
                continue;
            };
            self.fits(&found, &want.name, &want.shape, exact)?;
            *want = FileTensor { name: std::mem::take(&mut want.name), ..found };
        }
        if !missing.is_empty() {
            let what = format!("no file has {}, which this model or optimizer needs: {FLAGS}", named(&missing));
            return Err(Error::in_file(dir, what));
        }
        let mut twin = None;
        if !exact {
            self.tensors.retain(|name, _| !is_buffer(name));
            // Tied embeddings need no head; a file may have one nevertheless, which must equal the table.
            let table = tensors.list.iter().position(|t| TABLES.iter().any(|table| t.name.ends_with(table)));
            if let (Some(table), Some(head)) = (table, self.tensors.remove(&head)) {
                self.fits(&head, HEAD, &tensors.list[table].shape, exact)?;
                twin = Some((table, head));
            }
        }
        match self.tensors.values().next() {
            Some(first) => {
                let names: Vec<String> = self.tensors.keys().cloned().collect();
                let what = format!("has {}, which this model does not: {FLAGS}", named(&names));
                Err(Error::in_file(&self.files[first.file].0, what))
            }
            None => {
                let files = Arc::new(self.files);
                let tower = tower.map(|tower| Tower { files: files.clone(), ..tower });
                Ok(TensorSource { files, tensors, twin, tower, mxfp4: Mutex::default() })
            }
        }
    }

    fn fits(&self, found: &FileTensor, name: &str, shape: &[usize], exact: bool) -> Result<()> {
        let path = &self.files[found.file].0;
        if found.shape != shape {
            let what = format!(
                "tensor {name} has shape {:?}; in this model it is {shape:?}: use the model settings it was saved with",
                found.shape
            );
            return Err(Error::in_file(path, what));
        }
        match found.dtype {
            Dtype::F32 => Ok(()),
            Dtype::BF16 | Dtype::F16 if !exact => Ok(()),
            other => {
                let read = if exact { "checkpoints have F32 only" } else { "supported: F32, BF16, F16" };
                Err(Error::in_file(path, format!("tensor {name} is {other:?}; {read}")))
            }
        }
    }
}

/// The tensors a head may be tied to.
pub(super) const TABLES: [&str; 4] = ["embed_tokens.weight", "embeddings.weight", "embed_in.weight", "wte.weight"];

/// Whether a run creates the tensor if a model directory lacks it: adapters, and the score head of a reward model.
pub fn is_created(segment: &Segment) -> bool {
    goes_with_adapters(segment)
}

/// "tensor a", or "3 tensors: a, b, c"; at most the first few.
fn named(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let more = if names.len() > SHOWN { ", ..." } else { "" };
    let list = names[..names.len().min(SHOWN)].join(", ");
    if names.len() == 1 { format!("tensor {list}") } else { format!("{} tensors: {list}{more}", names.len()) }
}
