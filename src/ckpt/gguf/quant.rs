//! Elements of a GGUF file: f32 to f32, f16, bf16 and q8_0, with the rounding of llama.cpp's converter. Never places
//! them.
use half::{bf16, f16};

/// Elements of a row that q8_0 scales together.
pub const Q8_0_BLOCK: usize = 32;

/// How a tensor is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GgmlType {
    F32,
    F16,
    Bf16,
    /// Blocks of [`Q8_0_BLOCK`] elements: a scale in f16, then one i8 per element.
    Q8_0,
}

impl GgmlType {
    /// Its number in a file.
    pub fn id(self) -> u32 {
        match self {
            GgmlType::F32 => 0,
            GgmlType::F16 => 1,
            GgmlType::Q8_0 => 8,
            GgmlType::Bf16 => 30,
        }
    }
    /// As `--gguf-type` has it.
    pub fn name(self) -> &'static str {
        match self {
            GgmlType::F32 => "f32",
            GgmlType::F16 => "f16",
            GgmlType::Bf16 => "bf16",
            GgmlType::Q8_0 => "q8_0",
        }
    }
    /// The largest magnitude that stays finite.
    pub fn most(self) -> f32 {
        match self {
            GgmlType::F32 => f32::MAX,
            GgmlType::Bf16 => bf16::MAX.to_f32(),
            GgmlType::F16 => f16::MAX.to_f32(),
            GgmlType::Q8_0 => f16::MAX.to_f32() * 127.0,
        }
    }
    /// Elements that are stored together.
    pub fn block(self) -> usize {
        if self == GgmlType::Q8_0 { Q8_0_BLOCK } else { 1 }
    }
    /// Size of `elements`, which are whole blocks.
    pub fn bytes(self, elements: usize) -> usize {
        match self {
            GgmlType::F32 => 4 * elements,
            GgmlType::F16 | GgmlType::Bf16 => 2 * elements,
            GgmlType::Q8_0 => elements / self.block() * (2 + self.block()),
        }
    }
    /// Appends `values`, whole blocks, to `out`.
    pub fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            GgmlType::F32 => out.extend(values.iter().flat_map(|x| x.to_le_bytes())),
            GgmlType::F16 => out.extend(values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes())),
            GgmlType::Bf16 => out.extend(values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes())),
            GgmlType::Q8_0 => values.chunks_exact(self.block()).for_each(|block| q8_0(block, out)),
        }
    }
}

fn q8_0(block: &[f32], out: &mut Vec<u8>) {
    let scale = block.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    out.extend(f16::from_f32(scale).to_le_bytes());
    out.extend(block.iter().map(|x| (x * inverse).round() as i8 as u8)); // halves away from zero
}
