//! Reading: each rank reads the ranges of the files that its pieces need, through one small buffer, and nothing else. Never
//! judges the files: [`super::source`] has done that before a weight changes.
use super::layout::{Run, Share, Tensor, checksum, runs};
use super::source::{Source, bad};
use super::state::{Checksums, TrainerState};
use super::{CHUNK, Checkpointer};
use crate::base::Result;
use crate::device::{Device, ViewMut};
use crate::nn::{Layout, Spec};
use crate::optim::Optimizer;
use crate::store::Store;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use safetensors::Dtype;
use std::os::unix::fs::FileExt;
use std::path::Path;

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
        let sums = Reader::new(source, &*self.dev).read(store, optimizer);
        let own = sums.as_ref().map_or(Vec::new(), Vec::clone);
        let all = self.exchange.share(&*self.dev, "read its part of the checkpoint", sums, tensors)?;
        // What every rank read alike is not added up.
        let total = if store.replicated() { own } else { super::total(&all, tensors) };
        let verified =
            checksums.map_or(Ok(()), |sums| source.verify(sums, &total)).and_then(|()| store.weights_changed());
        self.exchange.agree(&*self.dev, "verify the checkpoint", verified)
    }
}

/// One rank's way through the files. Holds [`CHUNK`] bytes as they are on disk, and as many values.
struct Reader<'a> {
    source: &'a Source,
    dev: &'a dyn Device,
    /// u16, so that it is aligned for the half types.
    bytes: Vec<u16>,
    values: Vec<f32>,
    /// Of what was read of each tensor.
    sums: Vec<u64>,
}

impl<'a> Reader<'a> {
    fn new(source: &'a Source, dev: &'a dyn Device) -> Reader<'a> {
        let sums = vec![0; source.tensors.list.len()];
        Reader { source, dev, bytes: vec![0; CHUNK / 2], values: vec![0.0; CHUNK / 4], sums }
    }

    /// Every run of this rank's pieces, into masters, parameters and moments. Returns the sums over what was read.
    fn read(mut self, store: &mut dyn Store, mut optimizer: Option<&mut Optimizer>) -> Result<Vec<u64>> {
        store.for_each_piece(&mut |mut piece| {
            let stored = runs(piece.layout, piece.start, piece.master.len(), Share::WHOLE);
            for run in stored.filter(|run| self.source.tensors.holds(&run.segment.name)) {
                let master = piece.master.reborrow().slice(run.range.clone());
                self.run(0, &run, master)?;
                let Some(optimizer) = optimizer.as_mut().filter(|_| piece.grad.is_some()) else { continue };
                for (moment, (_, state)) in optimizer.state(piece.unit).enumerate() {
                    self.run(1 + moment, &run, state.slice(run.range.clone()))?;
                }
            }
            match piece.param {
                Some(param) => self.dev.copy(piece.master.as_view(), param),
                None => Ok(()),
            }
        })?;
        Ok(self.sums)
    }

    fn run(&mut self, group: usize, run: &Run, mut to: ViewMut) -> Result<()> {
        let index = self.source.tensors.find(group, &run.segment.name)?;
        let (tensor, len) = (&self.source.tensors.list[index], to.len());
        let twin = self.source.twin.as_ref().filter(|(of, _)| *of == index).map(|(_, twin)| twin);
        for from in (0..len).step_by(CHUNK / 4) {
            let part = to.reborrow().slice(from..len.min(from + CHUNK / 4));
            let (at, n) = (run.at + from, part.len());
            let bytes = read(self.source, tensor, at, n, &mut self.bytes)?;
            if tensor.dtype == Dtype::F32 {
                self.sums[index] = self.sums[index].wrapping_add(checksum(bytes, at));
                self.dev.upload(bytes, part)?;
            } else {
                widen(bytes, tensor.dtype, &mut self.values[..n]);
                self.dev.upload(bytemuck::cast_slice(&self.values[..n]), part)?;
            }
            if let Some(twin) = twin {
                self.same(tensor, twin, at, n)?;
            }
        }
        Ok(())
    }

    /// Whether the second copy of a tied tensor says what the first one says, in `n` elements from `at` on.
    fn same(&mut self, tensor: &Tensor, twin: &Tensor, at: usize, n: usize) -> Result<()> {
        let mut values = |tensor: &Tensor| -> Result<Vec<f32>> {
            let mut out = vec![0.0; n];
            widen(read(self.source, tensor, at, n, &mut self.bytes)?, tensor.dtype, &mut out);
            Ok(out)
        };
        let (table, head) = (values(tensor)?, values(twin)?);
        match table.iter().zip(&head).position(|(a, b)| a.to_bits() != b.to_bits()) {
            None => Ok(()),
            Some(i) => Err(bad(
                &self.source.files[twin.file].0,
                format!(
                    "tensor {} differs from {} at element {}, yet config.json ties the two; if the model has a head of its \
                     own, set tie_word_embeddings to false",
                    twin.name,
                    tensor.name,
                    at + i
                ),
            )),
        }
    }
}

/// The bytes of `n` elements of `tensor` from element `at` on.
fn read<'b>(source: &Source, tensor: &Tensor, at: usize, n: usize, buf: &'b mut [u16]) -> Result<&'b [u8]> {
    let size = tensor.dtype.bitsize() / 8;
    let bytes = &mut bytemuck::cast_slice_mut::<u16, u8>(buf)[..n * size];
    let (path, file) = &source.files[tensor.file];
    file.read_exact_at(bytes, tensor.offset + (size * at) as u64)
        .map_err(|e| bad(path, format!("cannot read tensor {}: {e}", tensor.name)))?;
    Ok(bytes)
}

/// Elements as a file holds them, as values. bf16 and f16 need `bytes` aligned to 2.
pub(super) fn widen(bytes: &[u8], dtype: Dtype, out: &mut [f32]) {
    match dtype {
        Dtype::BF16 => bytemuck::cast_slice::<u8, bf16>(bytes).convert_to_f32_slice(out),
        Dtype::F16 => bytemuck::cast_slice::<u8, f16>(bytes).convert_to_f32_slice(out),
        _ => bytemuck::cast_slice_mut::<f32, u8>(out).copy_from_slice(bytes),
    }
}
