//! From what files hold to the tensors of a model that are slices of it, as they are or in MXFP4. Never reads.
use super::layout::{Coding, FileTensor};
use super::mxfp4::{BLOCK, BLOCK_BYTES, Mxfp4};
use crate::nn::{slice_name, sliced};
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};

/// Replaces what a file `found` by the slices that are `wanted` of it.
pub(super) fn expand(found: &mut BTreeMap<String, FileTensor>, wanted: &[FileTensor]) {
    let names: BTreeSet<&str> = wanted.iter().filter_map(|tensor| Some(sliced(&tensor.name)?.0)).collect();
    for name in names {
        if let Some(whole) = found.remove(name) {
            let shape = whole.shape.get(1..).unwrap_or_default().to_vec();
            let bytes = (shape.iter().product::<usize>() * whole.dtype.bitsize() / 8) as u64;
            for e in 0..whole.shape.first().copied().unwrap_or(0) {
                let (name, offset) = (slice_name(name, e), whole.offset + e as u64 * bytes);
                found.insert(name.clone(), FileTensor { name, shape: shape.clone(), offset, ..whole.clone() });
            }
            continue;
        }
        let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
        let are_packed = found.get(&blocks).zip(found.get(&scales)).is_some_and(|(blocks, scales)| {
            let [.., groups, BLOCK_BYTES] = blocks.shape[..] else { return false };
            blocks.shape.len() == 4
                && groups > 0
                && scales.shape == blocks.shape[..3]
                && [blocks, scales].iter().all(|tensor| tensor.dtype == Dtype::U8)
        });
        if let Some((blocks, scales)) =
            found.remove(&blocks).filter(|_| are_packed).zip(found.remove(&scales).filter(|_| are_packed))
        {
            let (rows, groups) = (blocks.shape[1], blocks.shape[2]);
            for e in 0..blocks.shape[0] {
                let scales = (scales.file, scales.offset + (e * rows * groups) as u64);
                let tensor = FileTensor {
                    name: slice_name(name, e),
                    shape: vec![groups * BLOCK, rows],
                    dtype: Dtype::F32,
                    file: blocks.file,
                    offset: blocks.offset + (e * rows * groups * BLOCK_BYTES) as u64,
                    coding: Some(Coding::Mxfp4(Mxfp4 { rows, groups, scales })),
                };
                found.insert(tensor.name.clone(), tensor);
            }
        }
    }
}
