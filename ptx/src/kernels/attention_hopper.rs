//! The attention kernels for sm_90a: their variants, and which of them a launch takes. Never launches.
//!
//! Their operands come by tensor maps of three dimensions, (head_dim, heads or kv_heads, rows), with boxes of ([`BOX`], 1, r):
//! r is [`Tiles::rows`](Kernel::rows) for what a CTA keeps and [`Tiles::columns`] for what passes by.
//!
//! forward: `attention_forward(map_q, map_k, map_v, o, lse, shape)`; keeps q.
//! dq: `attention_dq(map_q, map_k, map_v, map_do, lse, delta, dq, shape)`; keeps q and do.
//! dkv: `attention_dkv(map_k, map_v, map_q, map_do, lse, delta, dkv, shape)`; keeps k and v.
//! The other parameters are as in `attention.rs`.
use super::Variant;
use super::attention::Kernel;

/// Elements of a box's rows: what a swizzle of 128 bytes takes.
pub const BOX: u32 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    pub kernel: Kernel,
    pub columns: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    pub forward: Tiles,
    pub dq: Tiles,
    /// None where two accumulators of the head do not fit in registers: sm_80's kernels do it.
    pub dkv: Option<Tiles>,
}

const ROWS: u32 = 128;
const STAGES: u32 = 4;

/// As the `.const`s of the sources make it: `own` tiles of rows, a ring, mbarriers, and what is lost where the array starts.
const fn tiles(variant: &'static str, entry: &'static str, dim: u32, own: u32, columns: u32) -> Tiles {
    let pitch = dim.div_ceil(BOX) * 2 * BOX;
    let shared = own * ROWS * pitch + STAGES * columns * pitch + 128 + 1024;
    Tiles { kernel: Kernel { variant, entry, rows: ROWS, threads: 384, shared }, columns }
}

macro_rules! family {
    ($family:ident, $variants:ident, $dtype:literal, $number:literal, $dim:literal, $forward:literal, $dq:literal, $dkv:expr) => {
        const $variants: [Variant; 3] = [
    family!(@variant "forward", "attention_hopper.ptx", $dtype, $number, $dim),
    family!(@variant "dq", "attention_hopper_dq.ptx", $dtype, $number, $dim),
    family!(@variant "dkv", "attention_hopper_dkv.ptx", $dtype, $number, $dim),
        ];
        const $family: Family = Family {
            forward: tiles($variants[0].name, "attention_forward", $dim, 1, $forward),
            dq: tiles($variants[1].name, "attention_dq", $dim, 2, $dq),
            dkv: match $dkv {
                Some(columns) => Some(tiles($variants[2].name, "attention_dkv", $dim, 2, columns)),
                None => None,
            },
        };
    };
    (@variant $stem:literal, $file:literal, $dtype:literal, $number:literal, $dim:literal) => {
        Variant {
            name: concat!("attention_hopper_", $stem, "_", $dtype, "_", $dim),
            file: $file,
            given: &[("DTYPE", $number), ("HEAD_DIM", $dim)],
        }
    };
}
family!(BF16_64, BF16_64_VARIANTS, "bf16", 1, 64, 128, 64, Some(64));
family!(BF16_96, BF16_96_VARIANTS, "bf16", 1, 96, 128, 64, Some(64));
family!(BF16_128, BF16_128_VARIANTS, "bf16", 1, 128, 128, 64, Some(48));
family!(BF16_256, BF16_256_VARIANTS, "bf16", 1, 256, 64, 32, None);
family!(F16_64, F16_64_VARIANTS, "f16", 2, 64, 128, 64, Some(64));
family!(F16_96, F16_96_VARIANTS, "f16", 2, 96, 128, 64, Some(64));
family!(F16_128, F16_128_VARIANTS, "f16", 2, 128, 128, 64, Some(48));
family!(F16_256, F16_256_VARIANTS, "f16", 2, 256, 64, 32, None);

pub fn variants() -> impl Iterator<Item = &'static Variant> {
    let all = [
        &BF16_64_VARIANTS,
        &BF16_96_VARIANTS,
        &BF16_128_VARIANTS,
        &F16_64_VARIANTS,
        &F16_96_VARIANTS,
        &F16_128_VARIANTS,
    ];
    let largest = [&BF16_256_VARIANTS, &F16_256_VARIANTS];
    all.into_iter().flatten().chain(largest.into_iter().flat_map(|variants| &variants[..2]))
}

/// For 16-bit types and heads of a multiple of 8 elements, which tensor maps ask for.
pub fn sm_90a_family(dtype: &str, head_dim: usize) -> Option<&'static Family> {
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
