//! The types that tensors of a GGUF file are stored in, and their values in f32: bit for bit those of the gguf package
//! (`gguf/quants.py`, which follows ggml's `ggml-quants.c`). Never encodes, and never places anything.
use half::{bf16, f16};

/// Elements of a block of the types that end in `_K`.
const K: usize = 256;

/// How a tensor is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(non_camel_case_types)] // ggml's names
pub enum GgmlCode {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
}

/// The types that are not read, by their numbers in files.
const OTHERS: [(u32, &str); 18] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

impl GgmlCode {
    pub const NAMES: &str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and Q2_K to Q6_K";

    /// The type of this number, or the name of one that is not read.
    pub fn of(id: u32) -> Result<GgmlCode, String> {
        Ok(match id {
            0 => GgmlCode::F32,
            1 => GgmlCode::F16,
            2 => GgmlCode::Q4_0,
            3 => GgmlCode::Q4_1,
            6 => GgmlCode::Q5_0,
            7 => GgmlCode::Q5_1,
            8 => GgmlCode::Q8_0,
            10 => GgmlCode::Q2_K,
            11 => GgmlCode::Q3_K,
            12 => GgmlCode::Q4_K,
            13 => GgmlCode::Q5_K,
            14 => GgmlCode::Q6_K,
            30 => GgmlCode::BF16,
            _ => {
                let known = OTHERS.iter().find(|(other, _)| *other == id);
                return Err(known.map_or(format!("number {id}"), |(_, name)| name.to_string()));
            }
        })
    }
    /// Elements that are stored together.
    pub fn block(self) -> usize {
        match self {
            GgmlCode::F32 | GgmlCode::F16 | GgmlCode::BF16 => 1,
            GgmlCode::Q4_0 | GgmlCode::Q4_1 | GgmlCode::Q5_0 | GgmlCode::Q5_1 | GgmlCode::Q8_0 => 32,
            _ => K,
        }
    }
    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            GgmlCode::F32 => 4,
            GgmlCode::F16 | GgmlCode::BF16 => 2,
            GgmlCode::Q4_0 => 18,
            GgmlCode::Q4_1 => 20,
            GgmlCode::Q5_0 => 22,
            GgmlCode::Q5_1 => 24,
            GgmlCode::Q8_0 => 34,
            GgmlCode::Q2_K => 84,
            GgmlCode::Q3_K => 110,
            GgmlCode::Q4_K => 144,
            GgmlCode::Q5_K => 176,
            GgmlCode::Q6_K => 210,
        }
    }
    /// Size of a tensor whose rows are whole blocks; none if it is beyond 64 bits.
    pub fn bytes(self, shape: &[usize]) -> Option<u64> {
        let elements = shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim as u64))?;
        (elements / self.block() as u64).checked_mul(self.block_bytes() as u64)
    }

    /// Assigns `out` from whole blocks.
    pub fn decode(self, blocks: &[u8], out: &mut [f32]) {
        let pairs = blocks.chunks_exact(self.block_bytes()).zip(out.chunks_exact_mut(self.block()));
        match self {
            GgmlCode::F32 => pairs.for_each(|(b, x)| x[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            GgmlCode::F16 => pairs.for_each(|(b, x)| x[0] = half(b)),
            GgmlCode::BF16 => pairs.for_each(|(b, x)| x[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
            GgmlCode::Q4_0 => pairs.for_each(|(b, x)| fours(half(b), -8, 0.0, [0; 4], &b[2..], x)),
            GgmlCode::Q4_1 => pairs.for_each(|(b, x)| fours(half(b), 0, half(&b[2..]), [0; 4], &b[4..], x)),
            GgmlCode::Q5_0 => {
                pairs.for_each(|(b, x)| fours(half(b), -16, 0.0, [b[2], b[3], b[4], b[5]], &b[6..], x));
            }
            GgmlCode::Q5_1 => {
                pairs.for_each(|(b, x)| fours(half(b), 0, half(&b[2..]), [b[4], b[5], b[6], b[7]], &b[8..], x));
            }
            GgmlCode::Q8_0 => pairs.for_each(|(b, x)| {
                let d = half(b);
                x.iter_mut().zip(&b[2..]).for_each(|(x, q)| *x = (*q as i8) as f32 * d);
            }),
            GgmlCode::Q2_K => pairs.for_each(|(b, x)| q2_k(b, x)),
            GgmlCode::Q3_K => pairs.for_each(|(b, x)| q3_k(b, x)),
            GgmlCode::Q4_K => pairs.for_each(|(b, x)| q45_k(b, None, &b[16..], x)),
            GgmlCode::Q5_K => pairs.for_each(|(b, x)| q45_k(b, Some(&b[16..48]), &b[48..], x)),
            GgmlCode::Q6_K => pairs.for_each(|(b, x)| q6_k(b, x)),
        }
    }
}

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// 32 elements `d (q + shift) + min`: low nibbles, then high ones; `high` has a fifth bit for each.
fn fours(d: f32, shift: i32, min: f32, high: [u8; 4], nibbles: &[u8], out: &mut [f32]) {
    let high = u32::from_le_bytes(high);
    for (i, x) in out.iter_mut().enumerate() {
        let low = nibbles[i % 16] >> (4 * (i / 16)) & 15;
        let q = low as i32 | ((high >> i & 1) as i32) << 4;
        let scaled = d * (q + shift) as f32;
        *x = if shift == 0 { scaled + min } else { scaled };
    }
}

/// 16 scales with 16 minima in nibbles, 256 elements of two bits, the scale of scales, that of minima.
fn q2_k(b: &[u8], out: &mut [f32]) {
    let (d, min) = (half(&b[80..]), half(&b[82..]));
    for (i, x) in out.iter_mut().enumerate() {
        let scale = b[i / 16];
        let q = two_bits(&b[16..], i);
        *x = d * (scale & 15) as f32 * q as f32 - min * (scale >> 4) as f32;
    }
}

/// The two bits of element `i`: 32 bytes hold four times 32 elements.
fn two_bits(b: &[u8], i: usize) -> u8 {
    b[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3
}

/// A third bit of 256 elements, two bits of each, 16 scales of six bits, the scale of scales.
fn q3_k(b: &[u8], out: &mut [f32]) {
    let scales = &b[96..108];
    let d = half(&b[108..]);
    for (i, x) in out.iter_mut().enumerate() {
        let s = i / 16;
        let low = scales[s % 8] >> (4 * (s / 8)) & 15;
        let high = scales[8 + s % 4] >> (2 * (s / 4)) & 3;
        let scale = (low | high << 4) as i32 - 32;
        // The offset is 0 where the bit is set.
        let offset = if b[i % 32] >> (i / 32) & 1 == 0 { 4 } else { 0 };
        let q = two_bits(&b[32..], i) as i32 - offset;
        *x = d * scale as f32 * q as f32;
    }
}

/// The scale of scales, that of minima, eight of each in six bits, for five bits a high bit of 256 elements, nibbles.
fn q45_k(b: &[u8], high: Option<&[u8]>, nibbles: &[u8], out: &mut [f32]) {
    let (d, min) = (half(b), half(&b[2..]));
    let s = &b[4..16];
    for (i, group) in out.chunks_exact_mut(32).enumerate() {
        let (scale, least) = match i {
            0..4 => (s[i] & 63, s[4 + i] & 63),
            _ => (s[4 + i] & 15 | s[i - 4] >> 2 & 0x30, s[4 + i] >> 4 | s[i] >> 2 & 0x30),
        };
        let (d, min) = (d * scale as f32, min * least as f32);
        for (j, x) in group.iter_mut().enumerate() {
            let low = nibbles[i / 2 * 32 + j] >> (4 * (i % 2)) & 15;
            let q = low | high.map_or(0, |bits| (bits[j] >> i & 1) << 4);
            *x = d * q as f32 - min;
        }
    }
}

/// Four bits of 256 elements, two more of each, 16 scales, the scale of scales.
fn q6_k(b: &[u8], out: &mut [f32]) {
    let d = half(&b[208..]);
    for (i, x) in out.iter_mut().enumerate() {
        let low = b[i / 128 * 64 + i % 64] >> (4 * (i / 64 % 2)) & 15;
        let q = (low | two_bits(&b[128..], i) << 4) as i32 - 32;
        *x = d * (b[192 + i / 16] as i8) as f32 * q as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `tests/golden/gguf_in.py` made the values, with the gguf package.
    #[test]
    fn values_are_those_of_the_gguf_package() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/gguf_in/blocks.bin");
        let mut bytes = &std::fs::read(path).unwrap()[..];
        let mut seen = Vec::new();
        while !bytes.is_empty() {
            let word = |i: usize| u32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().unwrap()) as usize;
            let (code, size, count) = (GgmlCode::of(word(0) as u32).unwrap(), word(1), word(2));
            let (blocks, rest) = bytes[12..].split_at(size);
            let (values, rest) = rest.split_at(4 * count);
            let mut found = vec![0f32; count];
            code.decode(blocks, &mut found);
            assert!(bytemuck::cast_slice::<f32, u8>(&found) == values, "{code:?}");
            seen.push(code);
            bytes = rest;
        }
        assert_eq!(seen.len(), 13, "{seen:?}");
    }
}
