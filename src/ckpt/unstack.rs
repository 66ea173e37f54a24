//! From what files hold to the tensors of a model that are slices of it, as they are, transposed or in MXFP4. Never
//! reads.
use super::columns::ColumnHalf;
use super::layout::{Coding, FileTensor};
use super::mxfp4::{BLOCK, BLOCK_BYTES, Mxfp4};
use super::transposed::Transposed;
use crate::nn::{SlicePart, columns_name, half_name, slice_name, sliced};
use safetensors::Dtype;
use std::collections::BTreeMap;

/// Replaces what a file `found` by the slices that are `wanted` of it.
pub(super) fn expand(found: &mut BTreeMap<String, FileTensor>, wanted: &[FileTensor]) {
    let mut wholes: BTreeMap<&str, (SlicePart, &[usize])> = BTreeMap::new();
    for tensor in wanted {
        if let Some((name, _, part)) = sliced(&tensor.name) {
            wholes.entry(name).or_insert((part, &tensor.shape));
        }
    }
    for (name, (part, shape)) in wholes {
        if let Some(whole) = found.remove(name) {
            for tensor in slices(&whole, part, shape) {
                found.insert(tensor.name.clone(), tensor);
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
                    columns: None,
                };
                found.insert(tensor.name.clone(), tensor);
            }
        }
    }
}

/// The slices of `whole` along its first dimension, each in such parts of `shape`. As in transformers, a file may have
/// the transpose of each slice, if that has another shape.
fn slices(whole: &FileTensor, part_of: SlicePart, shape: &[usize]) -> Vec<FileTensor> {
    let (parts, by_columns) = (part_of.count(), matches!(part_of, SlicePart::Columns(_)));
    let (count, each) = (whole.shape.first().copied().unwrap_or(0), whole.shape.get(1..).unwrap_or_default());
    let bytes = (each.iter().product::<usize>() * whole.dtype.bitsize() / 8) as u64;
    let is_transposed = match (each, shape) {
        (&[a, b], &[rows, columns]) if matches!(whole.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) => {
            [a, b] == [columns, parts * rows] && a != b && !by_columns
        }
        _ => false,
    };
    let mut own = each.to_vec();
    if let ([_, columns], true) = (each, is_transposed) {
        own = vec![*columns, each[0]];
    }
    if let Some(cut) = own.get_mut(usize::from(by_columns)) {
        *cut /= parts;
    }
    let mut slices = Vec::with_capacity(count * parts);
    for e in 0..count {
        for part in 0..parts {
            let name = match part_of {
                SlicePart::Whole => slice_name(&whole.name, e),
                SlicePart::Rows => half_name(&whole.name, e, part),
                SlicePart::Columns(_) => columns_name(&whole.name, e, part),
            };
            let columns = ColumnHalf::of(&name, &own);
            let begin = whole.offset + e as u64 * bytes;
            let tensor = FileTensor { name, shape: own.clone(), offset: begin, ..whole.clone() };
            slices.push(match is_transposed {
                false => {
                    let back = columns.map_or(0, |columns| columns.before() * whole.dtype.bitsize() / 8);
                    let offset = begin + part as u64 * bytes / parts as u64 - back as u64;
                    FileTensor { offset, columns, ..tensor }
                }
                true => FileTensor {
                    dtype: Dtype::F32,
                    coding: Some(Coding::Transposed(Transposed {
                        dtype: whole.dtype,
                        rows: each[0],
                        columns: each[1],
                        first: part * own[0],
                    })),
                    ..tensor
                },
            });
        }
    }
    slices
}
