//! Tensors of a file that hold those of all experts of a block, one slice each, which are tensors of their own
//! everywhere else. Never reads or writes.
use crate::nn::{SlicePart, sliced};
use safetensors::Dtype;
use std::collections::HashMap;

/// Name, shape and dtype of a tensor in a file.
pub(super) type NamedShape = (String, Vec<usize>, Dtype);

/// The tensors of files that hold `tensors`: each with the indices of those that are its slices, in order, or of the
/// one that it is.
pub(super) fn whole(tensors: &[NamedShape]) -> Vec<(NamedShape, Vec<usize>)> {
    let (mut entries, mut places) = (Vec::<(NamedShape, Vec<usize>)>::new(), HashMap::new());
    for (i, (name, shape, dtype)) in tensors.iter().enumerate() {
        let Some((whole, _, part)) = sliced(name) else {
            entries.push((tensors[i].clone(), vec![i]));
            continue;
        };
        let place = *places.entry(whole).or_insert_with(|| {
            let mut all = [&[0], &shape[..]].concat();
            all[if matches!(part, SlicePart::Columns(_)) { 2 } else { 1 }] *= part.count();
            entries.push(((whole.into(), all, *dtype), Vec::new()));
            entries.len() - 1
        });
        let ((_, shape, _), slices) = &mut entries[place];
        slices.push(i);
        shape[0] = slices.len() / part.count();
    }
    entries
}
