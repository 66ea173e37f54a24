//! Writes one rank's part of the files: converts f32 elements to the file's dtype, adds them to the checksum and syncs.
//! Never decides what is written, and never creates a file.
use super::checksum::checksum;
use super::disk::{CHUNK, Disk, Writing};
use super::elements::storable;
use super::layout::{FilePlan, Share, runs};
use crate::base::{Error, Result};
use crate::optim::{Optimizer, StoredSlice};
use crate::store::Store;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use safetensors::Dtype;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

pub(super) struct ShardWriter {
    plan: Arc<FilePlan>,
    /// With whether this rank wrote to the file.
    files: Vec<(Writing, bool)>,
    sums: Vec<u64>,
    /// Scratch for [`CHUNK`] bytes of f32 converted to a 16-bit type.
    narrow: Vec<u16>,
}

impl ShardWriter {
    pub fn open(disk: &Disk, plan: Arc<FilePlan>, dir: &Path) -> Result<ShardWriter> {
        let open = |name: &String| open_made(disk, &dir.join(name)).map(|file| (file, false));
        let files = plan.files.iter().map(|f| open(&f.name)).collect::<Result<_>>()?;
        Ok(ShardWriter { files, sums: vec![0; plan.tensors.list.len()], narrow: Vec::new(), plan })
    }

    /// Writes `values`, at most [`CHUNK`] bytes: elements of this rank's part of tensor `index` in the plan, from
    /// element `at` on.
    pub fn put(&mut self, index: usize, at: usize, values: &[f32]) -> Result<()> {
        let tensor = &self.plan.tensors.list[index];
        let (file, wrote) = &mut self.files[tensor.file];
        *wrote = true;
        let (dtype, most) = match tensor.dtype {
            Dtype::F16 => ("fp16", f16::MAX.to_f32()),
            Dtype::BF16 => ("bf16", bf16::MAX.to_f32()),
            _ => ("fp32", f32::MAX),
        };
        storable(&tensor.name, values, dtype, most)?;
        let stretches = self.plan.tensors.stretches(index, at..at + values.len());
        let bytes = match tensor.dtype {
            Dtype::F32 => bytemuck::cast_slice(values),
            dtype => {
                self.narrow.resize(CHUNK / 4, 0);
                let narrow = &mut self.narrow[..values.len()];
                match dtype {
                    Dtype::BF16 => bytemuck::cast_slice_mut::<u16, bf16>(narrow).convert_from_f32_slice(values),
                    _ => bytemuck::cast_slice_mut::<u16, f16>(narrow).convert_from_f32_slice(values),
                }
                bytemuck::cast_slice(narrow)
            }
        };
        // With a tensor sharded along its second dimension, each row is a separate run: a few kB in models of any size.
        let size = tensor.dtype.bitsize() / 8;
        for (part, place) in stretches {
            let bytes = &bytes[(part.start - at) * size..(part.end - at) * size];
            if tensor.dtype == Dtype::F32 {
                self.sums[index] = self.sums[index].wrapping_add(checksum(bytes, place));
            }
            let mut runs = tensor.runs(place, part.len());
            runs.try_for_each(|(run, at)| file.write_at(&bytes[run.start * size..run.end * size], at))?;
        }
        Ok(())
    }

    /// Syncs everything. Returns this rank's part of every tensor's checksum.
    pub fn finish(self) -> Result<Vec<u64>> {
        self.files.iter().filter(|(_, wrote)| *wrote).try_for_each(|(file, _)| file.sync())?;
        Ok(self.sums)
    }
}

/// Opens a file that rank 0 created.
pub(super) fn open_made(disk: &Disk, path: &Path) -> Result<Writing> {
    disk.open(path).map_err(|e| match e.kind() {
        ErrorKind::NotFound => Error::Run(format!(
            "{} does not exist here, although rank 0 created it: the checkpoint directory must be on a file system shared \
             by all hosts",
            path.display()
        )),
        _ => Error::io("open", path, e),
    })
}

/// Visits every run of a rank's share as (index of the tensor in the plan, first element in the rank's part of it,
/// elements), in the order of the store's shards, and of the moments within each.
pub(super) fn each_run(
    plan: &FilePlan,
    share: Share,
    store: &mut dyn Store,
    mut optimizer: Option<&mut Optimizer>,
    f: &mut dyn FnMut(usize, usize, StoredSlice) -> Result<()>,
) -> Result<()> {
    store.for_each_shard(&mut |mut shard| {
        let stored = runs(shard.layout, shard.start, shard.master.len(), share);
        for run in stored.filter(|run| plan.tensors.holds(&run.segment.name)) {
            let index = |group| plan.tensors.find(group, &run.segment.name);
            let masters = StoredSlice::plain(shard.master.reborrow().slice(run.range.clone()));
            f(index(0)?, run.at, masters)?;
            let Some(optimizer) = optimizer.as_mut().filter(|_| shard.grad.is_some()) else { continue };
            for (moment, state) in optimizer.state(shard.part(), run.range.clone()) {
                f(index(1 + moment)?, run.at, state)?;
            }
        }
        Ok(())
    })
}
