//! Times cuBLASLt's algorithms for the products of a run, before its first step, on memory of its own. Never runs
//! inside a step, so that no product changes its algorithm between two steps, or between two launches of a graph.
use super::blas::Blas;
use super::choices::Choices;
use super::device::{Cuda, lock};
use super::failure;
use super::memory::{self, DriverResult};
use super::operands::{ALIGNED, Operands, Scaled, Then, alignment};
use crate::Buf;
use crate::ops::GemmShape;
use cudarc::cublaslt::sys as blas_sys;
use cudarc::driver::result;
use cudarc::driver::sys::{CUdeviceptr, CUresult};
use flatshard_base::fp8::{BLOCK, Fp8};
use flatshard_base::rng::Rng;
use flatshard_base::{Category, DType, Meter, Result};
use std::collections::HashSet;

/// Rounds of measurements after one that does not count. A round times every algorithm, so that a change of the GPU's
/// clock meets all of them.
const ROUNDS: usize = 5;
/// Calls in a measurement.
const CALLS: usize = 4;
/// Another algorithm replaces the library's first only if it takes at most this share of its time.
const WORTH: f64 = 0.98;
/// Elements of random operands that are drawn; the rest repeats them. (Zeros multiply faster.)
const DRAWN: usize = 1 << 16;

/// A product of the run: its shape, and operands whose addresses count only by their alignment.
#[derive(Clone, Copy)]
pub struct WantedProduct {
    pub(super) shape: GemmShape,
    pub(super) operands: Operands,
}

/// The result of [`Cuda::tune`].
#[derive(Debug, Default)]
pub struct TunedProducts {
    pub choices: Choices,
    /// Products with several algorithms: chosen by an earlier run, timed now, and too large for the free memory.
    pub known: usize,
    pub timed: usize,
    pub too_large: usize,
}

/// Operands in memory that is used for nothing else.
struct Trial {
    operands: Operands,
    _memory: Vec<Buf>,
}

impl Cuda {
    /// What a table of choices depends on besides the product.
    pub fn tuned_machine(&self) -> Result<String> {
        // SAFETY: no requirements; the library is loaded, since the device has it.
        let library = unsafe { blas_sys::cublasLtGetVersion() };
        let name = self.name.split_once('(').map_or(&*self.name, |(_, rest)| rest.trim_end_matches(')'));
        Ok(format!("{name}, {} multiprocessors, cuBLASLt {library}", self.multiprocessors))
    }

    /// Chooses an algorithm for each of these products that has several: that of `known`, or the fastest. Installs
    /// nothing.
    pub fn tune(&self, wanted: &[WantedProduct], known: &Choices) -> Result<TunedProducts> {
        self.context.bind_to_thread().map_err(|e| self.failed("tune", e))?;
        let (mut tuned, mut seen) = (TunedProducts::default(), HashSet::new());
        for WantedProduct { shape, operands } in wanted {
            let mut blas = lock(&self.blas);
            // Layers repeat each other's products.
            let Some(name) = blas.name(shape, operands).filter(|name| seen.insert(name.clone())) else { continue };
            let Some(algorithms) = blas.algorithms(shape, operands)?.filter(|all| all.len() > 1) else { continue };
            if let Some(algorithm) = known.get(&name)
                && blas.accepts(shape, operands, &algorithm)?
            {
                tuned.choices.set(name, algorithm);
                tuned.known += 1;
                continue;
            }
            let Some(trial) = self.trial(shape, operands)? else {
                tuned.too_large += 1;
                continue;
            };
            let seconds = self.seconds_of(&mut blas, shape, &trial.operands, &algorithms)?;
            tuned.choices.set(name, algorithms[fastest(&seconds)]);
            tuned.timed += 1;
        }
        Ok(tuned)
    }
    /// Products compute with these algorithms from now on. Returns for how many that is not the library's first choice.
    pub fn install(&self, choices: &Choices) -> Result<usize> {
        self.context.bind_to_thread().map_err(|e| self.failed("tune", e))?;
        Ok(lock(&self.blas).install(choices))
    }

    /// Median seconds of each algorithm; infinite for one that fails.
    fn seconds_of(
        &self,
        blas: &mut Blas,
        shape: &GemmShape,
        at: &Operands,
        algorithms: &[blas_sys::cublasLtMatmulAlgo_t],
    ) -> Result<Vec<f64>> {
        let failed = |e| self.failed("tune", e);
        let (from, to) = (self.event(true)?, self.event(true)?);
        let mut times = vec![Vec::with_capacity(ROUNDS); algorithms.len()];
        for round in 0..=ROUNDS {
            for (times, algorithm) in times.iter_mut().zip(algorithms) {
                blas.compute_with(shape, at, *algorithm)?;
                from.record(&self.compute).map_err(failed)?;
                let done = (0..CALLS).try_for_each(|_| blas.gemm(shape, at, self.compute.cu_stream()));
                to.record(&self.compute).map_err(failed)?;
                to.synchronize().map_err(failed)?;
                match done {
                    Err(_) => times.push(f64::INFINITY),
                    Ok(()) if round == 0 => {}
                    Ok(()) => times.push(self.seconds(&from, &to)?),
                }
            }
        }
        blas.compute_with(shape, at, algorithms[0])?;
        Ok(times.iter_mut().map(|times| median(times)).collect())
    }

    /// Operands like these, A and B random. None if the GPU has no memory for them.
    fn trial(&self, shape: &GemmShape, like: &Operands) -> Result<Option<Trial>> {
        match self.place(shape, like) {
            Ok(trial) => Ok(Some(trial)),
            Err(e) if failure::code(e) == CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(None),
            Err(e) => Err(self.failed("tune", e)),
        }
    }
    fn place(&self, shape: &GemmShape, like: &Operands) -> DriverResult<Trial> {
        let mut memory = Vec::new();
        let mut zeros = |like: CUdeviceptr, dtype: DType, len: usize| {
            if like == 0 {
                return Ok(0);
            }
            let bytes = len * dtype.size() + ALIGNED as usize;
            // Not counted: it is freed before the first step.
            let lease = Meter::default().lease(Category::Scratch, bytes);
            let buf = memory::alloc(&self.compute, DType::U8, bytes, lease)?;
            let at = buf.view().address() as CUdeviceptr + u64::from(alignment(like) % ALIGNED);
            memory.push(buf);
            Ok(at)
        };
        let ([a, b, c], Operands { inputs, output, then, .. }) = (shape.extents(), *like);
        let blocks = shape.k.div_ceil(BLOCK);
        let of_blocks = [shape.m * blocks, shape.n.div_ceil(BLOCK) * blocks.next_multiple_of(4)];
        let scaled = match like.scaled {
            Some(scaled) => Some(Scaled {
                a: zeros(scaled.a, DType::F32, of_blocks[0])?,
                b: zeros(scaled.b, DType::F32, of_blocks[1])?,
                ..scaled
            }),
            None => None,
        };
        let operands = Operands {
            a: zeros(like.a, inputs, a)?,
            b: zeros(like.b, inputs, b)?,
            c: zeros(like.c, output, c)?,
            then: Then {
                bias: zeros(then.bias, output, shape.n)?,
                z: zeros(then.z, output, shape.m * shape.n)?,
                residual: zeros(then.residual, output, c)?,
                ..then
            },
            scaled,
            ..*like
        };
        let (noise, ones) = (noise(inputs), 1f32.to_ne_bytes());
        let scales = scaled.into_iter().flat_map(|scaled| [scaled.a, scaled.b].into_iter().zip(of_blocks));
        let scales = scales.map(|(at, len)| (at, len * ones.len(), &ones[..]));
        let values = [(operands.a, a), (operands.b, b)].map(|(at, len)| (at, len * inputs.size(), &noise[..]));
        for (at, all, noise) in values.into_iter().chain(scales) {
            let (mut done, stream) = (noise.len().min(all), self.compute.cu_stream());
            // On the stream of the zeros, which would otherwise come afterwards at times: zeros multiply faster.
            // SAFETY: the operand holds `all` bytes; pageable memory has been read when the call returns.
            unsafe { result::memcpy_htod_async(at, &noise[..done], stream) }?;
            while done < all {
                let more = done.min(all - done);
                let to = at + done as u64;
                // SAFETY: both ranges are in the operand and do not overlap.
                unsafe { result::memcpy_dtod_async(to, at, more, stream) }?;
                done += more;
            }
        }
        Ok(Trial { operands, _memory: memory })
    }
}

/// Random numbers in a product's input type, as bytes.
fn noise(dtype: DType) -> Vec<u8> {
    let mut values = vec![0f32; DRAWN];
    Rng::new(DRAWN as u64, 1).normals(0, &mut values);
    match dtype {
        DType::Bf16 => values.into_iter().flat_map(|x| half::bf16::from_f32(x).to_ne_bytes()).collect(),
        DType::F16 => values.into_iter().flat_map(|x| half::f16::from_f32(x).to_ne_bytes()).collect(),
        // Numbers in E5M2 too.
        DType::U8 => values.into_iter().map(|x| Fp8::E4m3.encode(x)).collect(),
        _ => values.into_iter().flat_map(f32::to_ne_bytes).collect(),
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::INFINITY)
}

/// The first, unless another is faster by more than what measurements differ.
fn fastest(seconds: &[f64]) -> usize {
    let least = (0..seconds.len()).min_by(|&i, &j| seconds[i].total_cmp(&seconds[j])).unwrap_or(0);
    if seconds[least] < WORTH * seconds[0] { least } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_algorithm_stays_unless_another_is_clearly_faster() {
        assert_eq!(fastest(&[1.0, 0.99, 1.2]), 0);
        assert_eq!(fastest(&[1.0, 0.97, 0.9, 2.0]), 2);
        assert_eq!(fastest(&[f64::INFINITY, f64::INFINITY, 3.0]), 2);
        assert_eq!((fastest(&[1.0, f64::INFINITY]), median(&mut [5.0, 1.0, 3.0])), (0, 3.0));
    }
}
