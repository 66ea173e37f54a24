//! `D = epilogue(alpha op(A) op(B) + beta C + bias)`, column-major, summed in f32 and rounded once to D's type. Runs in
//! two steps of a stream, with the sums in the workspace in between if there is one.
use super::choose::{BF16, COMPUTE_32F_FAST_TF32, DGELU, F16, MatrixLayout, Problem, width};
use crate::{CuResult, DriverMemory, NodeProgress};
use half::{bf16, f16};
use std::time::Duration;

/// A call with its parameters.
#[derive(Clone, Copy)]
pub struct LtProduct {
    pub problem: Problem,
    pub alpha: f32,
    pub beta: f32,
    /// A, B, C, D.
    pub at: [u64; 4],
    pub bias: u64,
    pub aux: u64,
    /// Address and size; the algorithm uses all of it.
    pub workspace: (u64, usize),
    /// Partial sums of an element: algorithms differ in the order of their sums.
    pub partial: usize,
    /// Simulated time.
    pub takes: Duration,
}

fn value(dtype: i32, bytes: &[u8]) -> f32 {
    match dtype {
        BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}
fn put(dtype: i32, bytes: &mut [u8], x: f32) {
    match dtype {
        BF16 => bytes.copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
        F16 => bytes.copy_from_slice(&f16::from_f32(x).to_le_bytes()),
        _ => bytes.copy_from_slice(&x.to_le_bytes()),
    }
}
/// Rounds to 10 bits of mantissa, halves away from zero (cvt.rna.tf32).
fn tf32(x: f32) -> f32 {
    if x.is_finite() { f32::from_bits((x.to_bits() + 0x1000) & !0x1fff) } else { x }
}

/// Loads a column-major matrix, skipping gaps between columns.
fn load(memory: &mut DriverMemory, at: u64, layout: MatrixLayout) -> CuResult<Vec<f32>> {
    let size = width(layout.dtype).unwrap_or(1);
    let mut values = Vec::with_capacity((layout.rows * layout.columns) as usize);
    for column in 0..layout.columns {
        let from = at + column * layout.ld as u64 * size as u64;
        let bytes = memory.read(from, layout.rows as usize * size)?;
        values.extend(bytes.chunks_exact(size).map(|bytes| value(layout.dtype, bytes)));
    }
    Ok(values)
}
fn store(memory: &mut DriverMemory, at: u64, layout: MatrixLayout, values: &[f32]) -> CuResult {
    let (size, rows) = (width(layout.dtype).unwrap_or(1), layout.rows as usize);
    for (column, values) in values.chunks_exact(rows).enumerate() {
        let to = at + column as u64 * layout.ld as u64 * size as u64;
        let bytes = memory.write(to, rows * size)?;
        bytes.chunks_exact_mut(size).zip(values).for_each(|(bytes, x)| put(layout.dtype, bytes, *x));
    }
    Ok(())
}
/// Transposes.
fn turned(values: &[f32], rows: usize) -> Vec<f32> {
    let columns = values.len() / rows;
    (0..values.len()).map(|i| values[i % columns * rows + i / columns]).collect()
}

/// The tanh form, as in the library's epilogues.
fn gelu(z: f32) -> f32 {
    0.5 * z * (1.0 + inner(z).tanh())
}
fn inner(z: f32) -> f32 {
    (2.0 / std::f32::consts::PI).sqrt() * (z + 0.044_715 * z * z * z)
}
fn gelu_slope(z: f32) -> f32 {
    let t = inner(z).tanh();
    let slope = (2.0 / std::f32::consts::PI).sqrt() * (1.0 + 3.0 * 0.044_715 * z * z);
    0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * slope
}

impl LtProduct {
    /// The steps of one launch.
    pub fn run(self) -> impl FnMut(&mut DriverMemory) -> CuResult<NodeProgress> + Send {
        let mut summed = false;
        move |memory| {
            let (at, bytes) = self.workspace;
            if !summed {
                memory.spend(self.takes);
                let sums = self.sums(memory)?;
                if bytes == 0 {
                    return self.follow(memory, sums).map(|()| NodeProgress::Done);
                }
                let raw: Vec<u8> = sums.iter().flat_map(|x| x.to_le_bytes()).collect();
                memory.write(at, bytes)?[..raw.len()].copy_from_slice(&raw);
                summed = true;
                return Ok(NodeProgress::Moved);
            }
            let (m, n, _) = self.problem.shape();
            let raw = &memory.read(at, bytes)?[..(m * n) as usize * 4];
            let sums = raw.chunks_exact(4).map(|bytes| value(0, bytes)).collect();
            self.follow(memory, sums).map(|()| NodeProgress::Done)
        }
    }

    /// alpha op(A) op(B), f32 (m, n), column-major.
    fn sums(&self, memory: &mut DriverMemory) -> CuResult<Vec<f32>> {
        let Problem { transposed, layouts: [a, b, ..], compute, .. } = self.problem;
        let (m, n, k) = self.problem.shape();
        // Each element is a dot product of two columns along k.
        let (mut first, mut second) = (load(memory, self.at[0], a)?, load(memory, self.at[1], b)?);
        if !transposed[0] {
            first = turned(&first, a.rows as usize);
        }
        if transposed[1] {
            second = turned(&second, b.rows as usize);
        }
        if compute == COMPUTE_32F_FAST_TF32 {
            first.iter_mut().chain(&mut second).for_each(|x| *x = tf32(*x));
        }
        let mut sums = Vec::with_capacity((m * n) as usize);
        for column in second.chunks_exact(k as usize) {
            sums.extend(first.chunks_exact(k as usize).map(|row| self.alpha * dot(row, column, self.partial)));
        }
        Ok(sums)
    }

    /// Applies beta C, bias and epilogue.
    fn follow(&self, memory: &mut DriverMemory, mut values: Vec<f32>) -> CuResult {
        let Problem { epilogue, layouts: [_, _, c, d], aux_ld, .. } = self.problem;
        let rows = d.rows as usize;
        // C is not read if beta is 0.
        if self.beta != 0.0 {
            let added = load(memory, self.at[2], c)?;
            values.iter_mut().zip(added).for_each(|(x, c)| *x += self.beta * c);
        }
        if self.problem.has_bias() {
            let bias = load(memory, self.bias, MatrixLayout { columns: 1, ..d })?;
            values.iter_mut().enumerate().for_each(|(i, x)| *x += bias[i % rows]);
        }
        if self.problem.has_aux() {
            let aux = MatrixLayout { ld: aux_ld, ..d };
            if epilogue == DGELU {
                let z = load(memory, self.aux, aux)?;
                values.iter_mut().zip(z).for_each(|(x, z)| *x *= gelu_slope(z));
            } else {
                store(memory, self.aux, aux, &values)?;
                values.iter_mut().for_each(|x| *x = gelu(*x));
            }
        }
        store(memory, self.at[3], d, &values)
    }
}

/// In at most eight partial sums.
fn dot(a: &[f32], b: &[f32], partial: usize) -> f32 {
    let mut sums = [0f32; 8];
    let sums = &mut sums[..partial];
    let (heads, tails) = (a.chunks_exact(partial), b.chunks_exact(partial));
    let rest: f32 = heads.remainder().iter().zip(tails.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in heads.zip(tails) {
        for (sum, (x, y)) in sums.iter_mut().zip(x.iter().zip(y)) {
            *sum += x * y;
        }
    }
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tf32_keeps_ten_bits_of_mantissa() {
        assert_eq!(tf32(1.0 + 2f32.powi(-11)), 1.0 + 2f32.powi(-10)); // half away from zero
        assert_eq!(tf32(1.0 + 2f32.powi(-12)), 1.0);
        assert_eq!((tf32(-3.0), tf32(f32::INFINITY)), (-3.0, f32::INFINITY));
    }

    #[test]
    fn the_slope_of_gelu_is_its_difference_quotient() {
        for z in [-3.0f32, -0.7, 0.0, 0.4, 2.5] {
            let h = 1e-2;
            let quotient = (gelu(z + h) - gelu(z - h)) / (2.0 * h);
            assert!((quotient - gelu_slope(z)).abs() < 1e-3, "{z}: {quotient} and {}", gelu_slope(z));
        }
    }

    #[test]
    fn turned_twice_is_the_same() {
        let values: Vec<f32> = (0..6).map(|i| i as f32).collect();
        assert_eq!(turned(&values, 2), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
        assert_eq!(turned(&turned(&values, 2), 3), values);
        assert_eq!([1, 5, 8].map(|partial| dot(&[1.0; 11], &[2.0; 11], partial)), [22.0; 3]);
    }
}
