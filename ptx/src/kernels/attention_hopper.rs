//! The attention kernels for sm_90a: their variants, and which of them a launch takes. Never launches.
//!
//! Their operands come by tensor maps of three dimensions, (head_dim, heads or kv_heads, rows), with boxes of ([`BOX`], 1, r):
//! r is [`Tiles::rows`](Kernel::rows) for what a CTA keeps and [`Tiles::columns`] for what passes by.
//!
//! forward: `attention_forward(map_q, map_k, map_v, o, lse, shape)`; keeps q.
//! dq: `attention_dq(map_q, map_k, map_v, map_do, lse, delta, dq, shape)`; keeps q and do.
//! dkv: `attention_dkv(map_k, map_v, map_q, map_do, map_lse, map_delta, dkv, shape)`; keeps k and v. The maps of lse and delta are of
//! (heads * queries, 1, 1) numbers with boxes of ([`Tiles::columns`], 1, 1).
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
    /// All are launched: together they give the gradients of keys and values.
    pub dkv: &'static [Tiles],
}

const ROWS: u32 = 128;
const STAGES: u32 = 4;

/// As the `.const`s of the sources make it: `own` tiles of rows, a ring, mbarriers, what comes with the rows of each place, and
/// what is lost where the array starts.
const fn tiles(variant: &Variant, entry: &'static str, dim: u32, [own, columns, numbers]: [u32; 3]) -> Tiles {
    let pitch = dim.div_ceil(BOX) * 2 * BOX;
    let shared = own * ROWS * pitch + STAGES * (columns * pitch + numbers) + 128 + 1024;
    Tiles { kernel: Kernel { variant: variant.name, entry, rows: ROWS, threads: 384, shared }, columns }
}

/// Bytes of a place's lse or delta.
const NUMBERS: u32 = 256;

/// The kernels of a head of up to `dim` elements: columns of a tile, as in the sources; `halves` where a launch has registers for the
/// gradient of keys or of values alone.
macro_rules! family {
    (@variant $stem:literal, $file:literal, $dtype:literal, $number:literal, $dim:literal $(, $key:literal = $value:literal)*) => {
        Variant {
            name: concat!("attention_hopper_", $stem, "_", $dtype, "_", $dim),
            file: $file,
            given: &[("DTYPE", $number), ("HEAD_DIM", $dim) $(, ($key, $value))*],
        }
    };
    ($family:ident, $variants:ident, $dtype:literal, $number:literal, $dim:literal, $forward:literal, $dq:literal, $dkv:literal) => {
        const $variants: [Variant; 3] = [
            family!(@variant "forward", "attention_hopper.ptx", $dtype, $number, $dim),
            family!(@variant "dq", "attention_hopper_dq.ptx", $dtype, $number, $dim),
            family!(@variant "dkv", "attention_hopper_dkv.ptx", $dtype, $number, $dim),
        ];
        const $family: Family = Family {
            forward: tiles(&$variants[0], "attention_forward", $dim, [1, $forward, 0]),
            dq: tiles(&$variants[1], "attention_dq", $dim, [2, $dq, 0]),
            dkv: &[tiles(&$variants[2], "attention_dkv", $dim, [2, $dkv, NUMBERS])],
        };
    };
    (halves $family:ident, $variants:ident, $dtype:literal, $number:literal, $dim:literal, $forward:literal, $dq:literal,
        [$dk:literal, $dv:literal]) => {
        const $variants: [Variant; 4] = [
            family!(@variant "forward", "attention_hopper.ptx", $dtype, $number, $dim),
            family!(@variant "dq", "attention_hopper_dq.ptx", $dtype, $number, $dim),
            family!(@variant "dk", "attention_hopper_dkv.ptx", $dtype, $number, $dim, "DV" = 0),
            family!(@variant "dv", "attention_hopper_dkv.ptx", $dtype, $number, $dim, "DK" = 0),
        ];
        const $family: Family = Family {
            forward: tiles(&$variants[0], "attention_forward", $dim, [1, $forward, 0]),
            dq: tiles(&$variants[1], "attention_dq", $dim, [2, $dq, 0]),
            dkv: &[
                tiles(&$variants[2], "attention_dkv", $dim, [2, $dk, NUMBERS]),
                tiles(&$variants[3], "attention_dkv", $dim, [1, $dv, NUMBERS]),
            ],
        };
    };
}
family!(BF16_64, BF16_64_VARIANTS, "bf16", 1, 64, 128, 128, 64);
family!(BF16_96, BF16_96_VARIANTS, "bf16", 1, 96, 128, 96, 64);
family!(BF16_128, BF16_128_VARIANTS, "bf16", 1, 128, 128, 96, 48);
family!(halves BF16_256, BF16_256_VARIANTS, "bf16", 1, 256, 80, 48, [48, 64]);
family!(F16_64, F16_64_VARIANTS, "f16", 2, 64, 128, 128, 64);
family!(F16_96, F16_96_VARIANTS, "f16", 2, 96, 128, 96, 64);
family!(F16_128, F16_128_VARIANTS, "f16", 2, 128, 128, 96, 48);
family!(halves F16_256, F16_256_VARIANTS, "f16", 2, 256, 80, 48, [48, 64]);

const ALL: &[&[Variant]] = &[
    &BF16_64_VARIANTS,
    &BF16_96_VARIANTS,
    &BF16_128_VARIANTS,
    &BF16_256_VARIANTS,
    &F16_64_VARIANTS,
    &F16_96_VARIANTS,
    &F16_128_VARIANTS,
    &F16_256_VARIANTS,
];

pub fn variants() -> impl Iterator<Item = &'static Variant> {
    ALL.iter().copied().flatten()
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
