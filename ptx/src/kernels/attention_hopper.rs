//! The attention kernels for sm_90a: their variants, and which of them a launch takes. Never launches.
//!
//! Queries, keys and values come by tensor maps; the rest of the parameters is as in `attention.rs`.
use super::Variant;
use super::attention::Kernel;

/// Elements of a box's rows: what a swizzle of 128 bytes takes.
pub const BOX: u32 = 64;

/// A forward kernel: `attention_forward(map_q, map_k, map_v, o, lse, shape)`. The maps are of three dimensions, (head_dim,
/// heads or kv_heads, rows), with boxes of ([`BOX`], 1, rows) for queries and ([`BOX`], 1, columns) for keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    pub kernel: Kernel,
    pub columns: u32,
}

/// Of a head of up to `dim` elements: as the `.const`s of `kernels/attention_hopper.ptx` make it.
const fn forward(variant: &'static str, dim: u32) -> Forward {
    let (rows, columns) = (128, if dim == 256 { 64 } else { 128 });
    let pitch = dim.div_ceil(BOX) * 2 * BOX;
    // Queries, a ring of four tiles, mbarriers, and what may be lost where the array starts.
    let shared = rows * pitch + 4 * columns * pitch + 128 + 1024;
    Forward { kernel: Kernel { variant, entry: "attention_forward", rows, threads: 384, shared }, columns }
}

macro_rules! variants {
    ($($name:ident $variant:literal $dtype:literal $dim:literal),*) => {
        pub const VARIANTS: &[Variant] = &[$(
            Variant { name: $variant, file: "attention_hopper.ptx", given: &[("DTYPE", $dtype), ("HEAD_DIM", $dim)] }
        ),*];
        $(const $name: Forward = forward($variant, $dim);)*
    };
}
variants!(
    BF16_64 "attention_hopper_bf16_64" 1 64,
    BF16_96 "attention_hopper_bf16_96" 1 96,
    BF16_128 "attention_hopper_bf16_128" 1 128,
    BF16_256 "attention_hopper_bf16_256" 1 256,
    F16_64 "attention_hopper_f16_64" 2 64,
    F16_96 "attention_hopper_f16_96" 2 96,
    F16_128 "attention_hopper_f16_128" 2 128,
    F16_256 "attention_hopper_f16_256" 2 256
);

/// For 16-bit types and heads of a multiple of 8 elements, which tensor maps ask for.
pub fn sm_90a_forward(dtype: &str, head_dim: usize) -> Option<&'static Forward> {
    if !head_dim.is_multiple_of(8) {
        return None;
    }
    match (dtype, head_dim) {
        ("bf16", 1..=64) => Some(&BF16_64),
        ("bf16", 65..=96) => Some(&BF16_96),
        ("bf16", 97..=128) => Some(&BF16_128),
        ("bf16", 129..=256) => Some(&BF16_256),
        ("f16", 1..=64) => Some(&F16_64),
        ("f16", 65..=96) => Some(&F16_96),
        ("f16", 97..=128) => Some(&F16_128),
        ("f16", 129..=256) => Some(&F16_256),
        _ => None,
    }
}
