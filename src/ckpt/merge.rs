//! Merges adapters into the weights of their base model. Never writes a model: saving comes afterwards.
use super::adapter::{WEIGHTS, read};
use super::checkpointer::Checkpointer;
use super::disk::CHUNK;
use super::elements::widen;
use super::layout::{ADAPTER_PREFIX, Share, runs};
use crate::base::{Error, Result, open};
use crate::device::Device;
use crate::nn::{Lora, Segment};
use crate::store::{Store, assign, values as read_values};
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// The two matrices of a module in row-major f32: A (rank, inputs) and B (outputs, rank).
#[derive(Default)]
struct Pair {
    a: Vec<f32>,
    b: Vec<f32>,
    inputs: usize,
}

/// The matrices, by the name of the module's weight.
fn pairs(dir: &Path, rank: usize) -> Result<BTreeMap<String, Pair>> {
    let path = dir.join(WEIGHTS);
    let mut bytes = Vec::new();
    open::file(&path).and_then(|mut file| file.read_to_end(&mut bytes)).map_err(|e| Error::in_file(&path, e))?;
    let tensors =
        SafeTensors::deserialize(&bytes).map_err(|e| Error::in_file(&path, format!("not a safetensors file: {e}")))?;
    let mut pairs: BTreeMap<String, Pair> = BTreeMap::new();
    for (name, view) in tensors.tensors() {
        let strange = || {
            Error::in_file(
                &path,
                format!("tensor {name} with shape {:?} is not part of an adapter of rank {rank}", view.shape()),
            )
        };
        let module = name.strip_prefix(ADAPTER_PREFIX).unwrap_or(&name);
        let is_a = module.ends_with(".lora_A.weight");
        let module = module.strip_suffix(if is_a { ".lora_A.weight" } else { ".lora_B.weight" }).ok_or_else(strange)?;
        let &[rows, columns] = view.shape() else { return Err(strange()) };
        if (if is_a { rows } else { columns }) != rank {
            return Err(strange());
        }
        if !matches!(view.dtype(), Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            return Err(Error::in_file(
                &path,
                format!("tensor {name} is {:?}; supported: F32, BF16, F16", view.dtype()),
            ));
        }
        let pair = pairs.entry(format!("{module}.weight")).or_default();
        let matrix = if is_a { &mut pair.a } else { &mut pair.b };
        matrix.resize(rows * columns, 0.0);
        match view.dtype() {
            Dtype::F32 => widen(view.data(), Dtype::F32, matrix),
            dtype => {
                // Copied, because the file's data need not be aligned to two bytes.
                let pairs = view.data().chunks_exact(2).map(|b| u16::from_ne_bytes([b[0], b[1]]));
                widen(bytemuck::cast_slice(&pairs.collect::<Vec<u16>>()), dtype, matrix);
            }
        }
        if let Some(n) = Some(matrix.iter().filter(|x| !x.is_finite()).count()).filter(|&n| n > 0) {
            let what = format!(
                "tensor {name} has non-finite values (NaN or infinity): {n} of {}. Use an adapter without them",
                matrix.len()
            );
            return Err(Error::in_file(&path, what));
        }
        if is_a {
            pair.inputs = columns;
        }
    }
    match pairs.iter().find(|(_, pair)| pair.a.is_empty() || pair.b.is_empty()) {
        Some((name, _)) => Err(Error::in_file(&path, format!("{name} has only one of its two matrices"))),
        None if pairs.is_empty() => Err(Error::in_file(&path, "has no adapter tensors")),
        None => Ok(pairs),
    }
}

impl Pair {
    /// Adds `scale (B A)` to the elements of the matrix from `at` on, which `w` holds.
    fn add(&self, scale: f32, rank: usize, at: usize, w: &mut [f32]) {
        for (i, w) in w.iter_mut().enumerate() {
            let (row, column) = ((at + i) / self.inputs, (at + i) % self.inputs);
            let b = &self.b[row * rank..(row + 1) * rank];
            let dot: f32 = b.iter().enumerate().map(|(k, b)| b * self.a[k * self.inputs + column]).sum();
            *w += scale * dot;
        }
    }
}

impl Checkpointer {
    /// Adds the adapters in `dir` to the weights in the store: W + alpha / rank B A, in f32. Every rank updates its own
    /// shards. An adapter for a matrix the model does not have is an error, and changes nothing.
    pub fn merge(&mut self, dir: &Path, store: &mut dyn Store) -> Result<usize> {
        let read = read(dir, false).and_then(|lora| Ok((pairs(dir, lora.rank)?, lora)));
        let checked = read.and_then(|(pairs, lora)| self.check(dir, &pairs, &lora).map(|()| (pairs, lora)));
        let (pairs, lora) = self.exchange.agree(&*self.dev, "open the adapter", checked)?;
        let (mut chunk, mut rounded) = (vec![0f32; CHUNK / 4], Vec::new());
        let dev: &dyn Device = &*self.dev;
        let merged = store.for_each_shard(&mut |mut shard| {
            for run in runs(shard.layout, shard.start, shard.master.len(), Share::ALL) {
                let Some(pair) = pairs.get(&run.segment.name) else { continue };
                for from in (0..run.range.len()).step_by(CHUNK / 4) {
                    let n = (run.range.len() - from).min(CHUNK / 4);
                    let start = run.range.start + from;
                    let values = &mut chunk[..n];
                    read_values(dev, shard.master.as_view().slice(start..start + n), &mut rounded, values)?;
                    for (part, place) in run.segment.stretches(run.at + from..run.at + from + n) {
                        let part = part.start - run.at - from..part.end - run.at - from;
                        pair.add(lora.scale(), lora.rank, place, &mut values[part]);
                    }
                    assign(dev, values, &mut rounded, shard.master.reborrow().slice(start..start + n))?;
                }
            }
            match shard.param {
                Some(param) => dev.copy(shard.master.as_view(), param),
                None => Ok(()),
            }
        });
        let merged = merged.and_then(|()| store.weights_changed());
        self.exchange.agree(&*self.dev, "merge the adapter", merged)?;
        Ok(pairs.len())
    }

    /// Checks that every adapter belongs to a matrix of this model.
    fn check(&self, dir: &Path, pairs: &BTreeMap<String, Pair>, lora: &Lora) -> Result<()> {
        let segments = || self.layouts.iter().flat_map(|l| &l.segments);
        for (name, pair) in pairs {
            let (rows, columns) = (pair.b.len() / lora.rank, pair.inputs);
            match segments().find(|s| s.name == *name).map(Segment::global_shape) {
                Some(shape) if shape == [rows, columns] => {}
                Some(shape) => {
                    return Err(Error::in_file(
                        &dir.join(WEIGHTS),
                        format!("adapts {name} as ({rows}, {columns}), but in this model it has shape {shape:?}"),
                    ));
                }
                None => {
                    return Err(Error::in_file(
                        &dir.join(WEIGHTS),
                        format!(
                            "adapts {name}, which this model does not have: use the model the adapter was trained \
                                 on"
                        ),
                    ));
                }
            }
        }
        Ok(())
    }
}
