//! Loading: each rank reads only the byte ranges its shards need, through one small buffer. Never validates the files:
//! [`super::source`] does that before any weight is overwritten.
use super::checkpointer::Checkpointer;
use super::checksum::{checksum, total};
use super::disk::CHUNK;
use super::elements::{not_finite, on_device, widen};
use super::hf;
use super::layout::{ElementRun, FileTensor, Share, runs};
use super::source::{OpenedFiles, TensorSource};
use super::state::{self, Checksums, TrainerState};
use super::tower::Tower;
use crate::base::{Error, Result};
use crate::device::Device;
use crate::nn::{Layout, Segment, Spec, has_adapters};
use crate::optim::{Converted, Moments, Optimizer, StoredSlice};
use crate::store::Store;
use safetensors::Dtype;
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// The state of the checkpoint in `dir`, after checking that its headers are intact and match this model and optimizer.
/// Reads headers and small files only, so a program can call it before it starts ranks.
pub fn inspect(dir: &Path, spec: &Spec, layouts: &[Layout], moments: &Moments) -> Result<TrainerState> {
    TensorSource::checkpoint(dir, spec, layouts, moments).map(|(_, state, _)| state)
}

/// Checks that the Hugging Face model in `dir` is this model (the `pretrain` setting).
pub fn inspect_model(dir: &Path, spec: &Spec, layouts: &[Layout]) -> Result<()> {
    TensorSource::model(dir, spec, layouts).map(|_| ())
}

/// Checks that the adapter in `dir` has the tensors of a run's adapters.
pub fn inspect_trained_adapter(dir: &Path, layouts: &[Layout], tower: bool) -> Result<()> {
    TensorSource::adapter(dir, layouts, tower).map(|_| ())
}

/// What a vision-language model has besides its text model, for a person.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CarriedSize {
    pub tensors: usize,
    pub bytes: u64,
}

impl fmt::Display for CarriedSize {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mib = self.bytes as f64 / (1u64 << 20) as f64;
        write!(f, "carried through: {} tensors of the vision tower, {mib:.1} MiB, not trained", self.tensors)
    }
}

/// What the model in `dir` has besides its text model, if it is a vision-language model. Reads headers only.
pub fn carried(dir: &Path) -> Result<Option<CarriedSize>> {
    let mut found = OpenedFiles::default();
    if !hf::has_tower(dir)? {
        return Ok(None);
    }
    found.open(dir, "model")?;
    let tower = found.tower(dir, false)?;
    Ok(tower.map(|tower| CarriedSize { tensors: tower.carried.tensors.len(), bytes: tower.bytes() }))
}

impl Checkpointer {
    /// Fills store and optimizer from the checkpoint in `dir`, saved by any number of ranks with any strategy. If any
    /// rank fails, all return an error, and the store's content is unspecified. After [`crate::base::Error::Damaged`],
    /// all may load another checkpoint.
    pub fn load(&mut self, dir: &Path, store: &mut dyn Store, optimizer: &mut Optimizer) -> Result<TrainerState> {
        let opened = TensorSource::checkpoint(dir, &self.spec, &self.layouts, &self.moments);
        let (source, state, checksums) = self.exchange.agree(&*self.dev, "open the checkpoint", opened)?;
        self.read(&source, store, Some(optimizer), Some(&checksums))?;
        // Adapters carry nothing, and the model that they adapt was loaded before.
        if let Some(tower) = source.tower.filter(|_| !has_adapters(&self.layouts)) {
            self.verify(&tower, &checksums)?;
            self.carry(Some(tower));
        }
        optimizer.resume(state.optimizer_steps);
        state.run.iter().for_each(|run| self.exports.run.clone_from(run)); // later saves belong to that run
        Ok(state)
    }

    /// Fills the store from a Hugging Face model directory (F32, BF16 or F16), or from the model part of a checkpoint,
    /// which is verified.
    pub fn load_model(&mut self, dir: &Path, store: &mut dyn Store) -> Result<()> {
        let opened = TensorSource::model(dir, &self.spec, &self.layouts);
        let opened = opened.and_then(|source| Ok((source, state::checksums(dir)?)));
        let (source, checksums) = self.exchange.agree(&*self.dev, "open the model", opened)?;
        self.read(&source, store, None, checksums.as_ref()).map_err(state::meant)?;
        if let (Some(tower), Some(checksums)) = (&source.tower, &checksums) {
            self.verify(tower, checksums).map_err(state::meant)?;
        }
        self.carry(source.tower);
        Ok(())
    }

    /// Fills the store's adapters from the adapter in `dir`, of a model with a vision tower if `tower`. That of a
    /// checkpoint is verified.
    pub fn load_adapter(&mut self, dir: &Path, tower: bool, store: &mut dyn Store) -> Result<()> {
        let opened = TensorSource::adapter(dir, &self.layouts, tower);
        let opened = opened.and_then(|source| Ok((source, state::checksums(dir)?)));
        let (source, checksums) = self.exchange.agree(&*self.dev, "open the adapter", opened)?;
        self.read(&source, store, None, checksums.as_ref()).map_err(state::meant)
    }

    /// Compares what is carried through with its checksums, on one rank.
    fn verify(&mut self, tower: &Tower, checksums: &Checksums) -> Result<()> {
        let verified = if self.rank() == 0 { tower.verify(checksums) } else { Ok(()) };
        self.exchange.agree(&*self.dev, "verify the checkpoint", verified)
    }

    fn read(
        &mut self,
        source: &TensorSource,
        store: &mut dyn Store,
        optimizer: Option<&mut Optimizer>,
        checksums: Option<&Checksums>,
    ) -> Result<()> {
        let tensors = source.tensors.list.len();
        let read = TensorReader::new(source, &*self.dev, self.share(store), checksums.is_some()).read(store, optimizer);
        let (sums, strange) = match read {
            Ok((sums, strange)) => (Ok(sums), strange),
            Err(e) => (Err(if checksums.is_some() { e.damaged() } else { e }), Vec::new()),
        };
        let sums = self.exchange.share(&*self.dev, "read its part of the checkpoint", sums, tensors)?;
        let strange = self.exchange.share(&*self.dev, "count values", Ok(strange), tensors)?;
        let verified = checksums.map_or(Ok(()), |expected| source.verify(expected, &total(&sums, tensors)));
        // Report damage first: damaged values may be anything.
        let verified = verified.and_then(|()| source.finite(&total(&strange, tensors), checksums.is_some()));
        self.exchange.agree(&*self.dev, "verify the checkpoint", verified.and_then(|()| store.weights_changed()))
    }
}

/// One rank's reader. Holds [`CHUNK`] bytes in the file's dtype, and the same number of values.
struct TensorReader<'a> {
    source: &'a TensorSource,
    dev: &'a dyn Device,
    /// u16, so that it is aligned for 16-bit types.
    bytes: Vec<u16>,
    values: Vec<f32>,
    /// The values as they are stored, where that is not f32.
    converted: Converted,
    /// If several ranks read the same elements, the first counts them.
    share: Share,
    /// Whether there are checksums to compare with.
    verify: bool,
    /// Per tensor: the checksum of the counted elements, and how many of them are not finite.
    sums: Vec<u64>,
    strange: Vec<u64>,
}

impl<'a> TensorReader<'a> {
    fn new(source: &'a TensorSource, dev: &'a dyn Device, share: Share, verify: bool) -> TensorReader<'a> {
        let none = vec![0; source.tensors.list.len()];
        let (bytes, values) = (vec![0; CHUNK / 2], vec![0.0; CHUNK / 4]);
        let sums = none.clone();
        TensorReader { source, dev, bytes, values, converted: Converted::default(), share, verify, sums, strange: none }
    }

    /// Reads every run of this rank's shards into master weights, parameters and moments. Returns for each tensor the
    /// checksum of the counted elements, and how many of them are not finite.
    fn read(mut self, store: &mut dyn Store, mut optimizer: Option<&mut Optimizer>) -> Result<(Vec<u64>, Vec<u64>)> {
        store.for_each_shard(&mut |mut shard| {
            let stored = runs(shard.layout, shard.start, shard.master.len(), Share::ALL);
            for run in stored.filter(|run| self.source.tensors.holds(&run.segment.name)) {
                let masters = StoredSlice::plain(shard.master.reborrow().slice(run.range.clone()));
                self.run(0, &run, masters)?;
                let Some(optimizer) = optimizer.as_mut().filter(|_| shard.grad.is_some()) else { continue };
                for (moment, state) in optimizer.state(shard.part(), run.range.clone()) {
                    self.run(1 + moment, &run, state)?;
                }
            }
            match shard.param {
                Some(param) => self.dev.copy(shard.master.as_view(), param),
                None => Ok(()),
            }
        })?;
        let (dev, source) = (self.dev, self.source);
        store.for_each_packed(&mut |shard| {
            shard.fill(dev, &|segment| source.tensors.holds(&segment.name), &mut |segment, place, values, own| {
                self.values_at(segment, place, values, own)
            })
        })?;
        Ok((self.sums, self.strange))
    }

    /// Elements of the whole tensor from `place` on. Counts non-finite ones if they are this rank's own.
    fn values_at(&mut self, segment: &Segment, place: usize, values: &mut [f32], own: bool) -> Result<()> {
        let index = self.source.tensors.find(0, &segment.name)?;
        let tensor = &self.source.tensors.list[index];
        let counted = own && self.share.index == 0 && self.share.has(segment);
        for (i, values) in values.chunks_mut(CHUNK / 4).enumerate() {
            let bytes = self.source.elements(tensor, place + i * CHUNK / 4, values.len(), &mut self.bytes)?;
            if counted {
                self.strange[index] += not_finite(bytes, tensor.dtype);
            }
            if counted && self.verify && tensor.dtype == Dtype::F32 {
                self.sums[index] = self.sums[index].wrapping_add(checksum(bytes, place + i * CHUNK / 4));
            }
            widen(bytes, tensor.dtype, values);
        }
        Ok(())
    }

    fn run(&mut self, group: usize, run: &ElementRun, mut to: StoredSlice) -> Result<()> {
        let index = self.source.tensors.find(group, &run.segment.name)?;
        let (tensor, len) = (&self.source.tensors.list[index], to.len());
        let counted = self.share.index == 0 && self.share.has(run.segment);
        let twin = self.source.twin.as_ref().filter(|(of, _)| *of == index).map(|(_, twin)| twin);
        for from in (0..len).step_by(CHUNK / 4) {
            let n = len.min(from + CHUNK / 4) - from;
            let range = run.at + from..run.at + from + n;
            let bytes = read(self.source, (index, tensor), range.clone(), &mut self.bytes)?;
            if counted {
                self.strange[index] += not_finite(bytes, tensor.dtype);
            }
            if counted && self.verify && tensor.dtype == Dtype::F32 {
                for (stretch, place) in self.source.tensors.stretches(index, range.clone()) {
                    let bytes = &bytes[4 * (stretch.start - range.start)..4 * (stretch.end - range.start)];
                    self.sums[index] = self.sums[index].wrapping_add(checksum(bytes, place));
                }
            }
            if on_device(tensor.dtype) == Some(to.values.dtype()) {
                self.dev.upload(bytes, to.values.reborrow().slice(from..from + n))?;
            } else {
                let values = &mut self.values[..range.len()];
                widen(bytes, tensor.dtype, values);
                to.write(self.dev, from, &mut self.converted, values)?;
            }
            if let Some(twin) = twin {
                self.same(index, tensor, twin, range)?;
            }
        }
        Ok(())
    }

    /// Checks that the second copy of a tied tensor equals the first, in `range` of this rank's part of it.
    fn same(&mut self, index: usize, tensor: &FileTensor, twin: &FileTensor, range: Range<usize>) -> Result<()> {
        let mut values = |tensor: &FileTensor| -> Result<Vec<f32>> {
            let mut out = vec![0.0; range.len()];
            widen(read(self.source, (index, tensor), range.clone(), &mut self.bytes)?, tensor.dtype, &mut out);
            Ok(out)
        };
        let (table, head) = (values(tensor)?, values(twin)?);
        match table.iter().zip(&head).position(|(a, b)| a.to_bits() != b.to_bits()) {
            None => Ok(()),
            Some(i) => {
                let mut place = self.source.tensors.stretches(index, range.start + i..range.start + i + 1);
                let what = format!(
                    "tensor {} differs from {} at element {}, but config.json ties the two. If the model has a \
                     separate head, set tie_word_embeddings to false",
                    twin.name,
                    tensor.name,
                    place.next().map_or(0, |(_, place)| place)
                );
                Err(Error::in_file(&self.source.files[twin.file].0, what))
            }
        }
    }
}

/// The bytes of `tensor` in `range` of this rank's part of it; `index` is its place in the plan.
fn read<'b>(
    source: &TensorSource,
    (index, tensor): (usize, &FileTensor),
    range: Range<usize>,
    buf: &'b mut [u16],
) -> Result<&'b [u8]> {
    let size = tensor.dtype.bitsize() / 8;
    let bytes = &mut bytemuck::cast_slice_mut::<u16, u8>(buf)[..range.len() * size];
    for (part, place) in source.tensors.stretches(index, range.clone()) {
        let to = &mut bytes[(part.start - range.start) * size..(part.end - range.start) * size];
        source.read_at(tensor, place, to)?;
    }
    Ok(bytes)
}
