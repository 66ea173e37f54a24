//! `D = epilogue(alpha op(A) op(B) + beta C + bias)`, column-major, summed in f32 and rounded once to D's type. Runs in
//! two steps of a stream, with the sums in the workspace in between if there is one.
use super::choose::{
    BF16, BLK128X128, COMPUTE_32F_FAST_TF32, DGELU, E4M3, E5M2, F16, MatrixLayout, OperandsApart, Problem, width,
};
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
    pub apart: OperandsApart,
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
        E4M3 => fp8(bytes[0], 4, 3),
        E5M2 => fp8(bytes[0], 5, 2),
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
/// A sign, then bits of exponent and mantissa ("FP8 formats for deep learning", table 1). Codes of E4M3 have no
/// infinity.
fn fp8(code: u8, exponent: u32, mantissa: u32) -> f32 {
    let (e, m) = (code as u32 >> mantissa & ((1 << exponent) - 1), code as u32 & ((1 << mantissa) - 1));
    let (bias, top) = ((1 << (exponent - 1)) - 1, (1 << exponent) - 1);
    let part = m as f32 / (1 << mantissa) as f32;
    let size = match (e, exponent) {
        (0, _) => part * 2f32.powi(1 - bias),
        (e, 4) if e == top && m == 7 => f32::NAN,
        (e, 5) if e == top => {
            if m == 0 {
                f32::INFINITY
            } else {
                f32::NAN
            }
        }
        (e, _) => (1.0 + part) * 2f32.powi(e as i32 - bias),
    };
    if code >> 7 == 1 { -size } else { size }
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
        if self.problem.is_fp8() {
            let rows = self.scales(memory, 0, m)?;
            let columns = self.scales(memory, 1, n)?;
            return Ok(self.scaled_sums([&first, &second], [&rows, &columns]));
        }
        let mut sums = Vec::with_capacity((m * n) as usize);
        for column in second.chunks_exact(k as usize) {
            sums.extend(first.chunks_exact(k as usize).map(|row| self.alpha * dot(row, column, self.partial)));
        }
        Ok(sums)
    }

    /// The scales of A (0) or B (1), of each of its `extent` rows or columns for each 128 elements along k. Only those
    /// that are used are read: the rest of a column of scales may hold anything.
    fn scales(&self, memory: &mut DriverMemory, of: usize, extent: u64) -> CuResult<Vec<f32>> {
        let (_, _, k) = self.problem.shape();
        let blocks = k.div_ceil(128);
        let mut all = Vec::with_capacity((extent * blocks) as usize);
        for i in 0..extent {
            for block in 0..blocks {
                let place = match self.problem.scales[of] {
                    // L4 x extent / 128, contiguous along k.
                    BLK128X128 => i / 128 * blocks.next_multiple_of(4) + block,
                    // extent x L, contiguous along the extent.
                    _ => block * extent + i,
                };
                all.push(value(0, memory.read(self.apart.scales[of] + 4 * place, 4)?));
            }
        }
        Ok(all)
    }
    /// Each 128 products are summed, scaled and added in f32.
    fn scaled_sums(&self, [a, b]: [&[f32]; 2], [of_a, of_b]: [&[f32]; 2]) -> Vec<f32> {
        let k = self.problem.shape().2 as usize;
        let blocks = k.div_ceil(128);
        let mut sums = Vec::new();
        for (column, of_column) in b.chunks_exact(k).zip(of_b.chunks_exact(blocks)) {
            sums.extend(a.chunks_exact(k).zip(of_a.chunks_exact(blocks)).map(|(row, of_row)| {
                let parts = row.chunks(128).zip(column.chunks(128)).map(|(x, y)| dot(x, y, self.partial));
                let scaled = parts.zip(of_row.iter().zip(of_column)).map(|(sum, (s, t))| sum * s * t);
                self.alpha * scaled.sum::<f32>()
            }));
        }
        sums
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
            let bias = load(memory, self.apart.bias, MatrixLayout { columns: 1, ..d })?;
            values.iter_mut().enumerate().for_each(|(i, x)| *x += bias[i % rows]);
        }
        if self.problem.has_aux() {
            let aux = MatrixLayout { ld: aux_ld, ..d };
            if epilogue == DGELU {
                let z = load(memory, self.apart.aux, aux)?;
                values.iter_mut().zip(z).for_each(|(x, z)| *x *= gelu_slope(z));
            } else {
                store(memory, self.apart.aux, aux, &values)?;
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
    fn codes_of_fp8_are_those_of_the_paper() {
        let of = [fp8(0x7e, 4, 3), fp8(0x01, 4, 3), fp8(0x08, 4, 3), fp8(0xb8, 4, 3), fp8(0xff, 4, 3)];
        assert_eq!((&of[..4], of[4].is_nan()), (&[448.0, 2f32.powi(-9), 2f32.powi(-6), -1.0][..], true));
        let of = [fp8(0x7b, 5, 2), fp8(0x01, 5, 2), fp8(0xfc, 5, 2), fp8(0x3e, 5, 2), fp8(0x7d, 5, 2)];
        assert_eq!((&of[..4], of[4].is_nan()), (&[57344.0, 2f32.powi(-16), f32::NEG_INFINITY, 1.5][..], true));
    }

    #[test]
    fn turned_twice_is_the_same() {
        let values: Vec<f32> = (0..6).map(|i| i as f32).collect();
        assert_eq!(turned(&values, 2), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
        assert_eq!(turned(&turned(&values, 2), 3), values);
        assert_eq!([1, 5, 8].map(|partial| dot(&[1.0; 11], &[2.0; 11], partial)), [22.0; 3]);
    }
}
