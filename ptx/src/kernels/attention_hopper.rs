//! The attention kernels for sm_90a: their variants, and which of them a launch uses. Never launches.
//!
//! Their operands are loaded by tensor maps of three dimensions, (head_dim, heads or kv_heads, rows), with boxes of
//! ([`BOX`], 1, r): r is [`TiledKernel::rows`](AttentionKernel::rows) for the operand that a CTA keeps and
//! [`TiledKernel::columns`] for the one it streams.
//!
//! forward: `attention_forward(map_q, map_k, map_v, o, lse, drawn, shape)`; keeps q. Its grid is of one dimension: at
//! most as many CTAs as there are tiles of rows of heads, and no more than run at a time. A kernel for pairs of heads
//! has clusters of two CTAs: an even grid, on sm_90a by the directive in its text alone.
//! backward: `attention_backward(map_k, map_v, map_q, map_do, map_lse, map_delta, dkv, sums, turns, shape)`; keeps k
//! and v. Its grid is of one dimension, and `attention_sum(sums, turns, dq, shape)` follows it.
//! dq: `attention_dq(map_q, map_k, map_v, map_do, lse, delta, dq, shape)`; keeps q and do.
//! dkv: `attention_dkv(map_k, map_v, map_q, map_do, map_lse, map_delta, dkv, shape)`; keeps k and v.
//! The maps of lse and delta are of (heads * queries, 1, 1) numbers with boxes of ([`TiledKernel::columns`], 1, 1).
//! The other parameters are as in `attention.rs`.
use super::attention::AttentionKernel;
use super::variant::Variant;

/// Elements in a box's rows: the limit of a 128-byte swizzle.
pub const BOX: u32 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TiledKernel {
    pub kernel: AttentionKernel,
    pub columns: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperFamily {
    pub forward: TiledKernel,
    /// The same for pairs of query heads with the same key/value head.
    pub paired: Option<TiledKernel>,
    pub backward: Backward,
}

impl HopperFamily {
    /// The kernel of a forward launch, and the CTAs of its clusters.
    pub fn forward_of(&self, heads: usize, kv_heads: usize) -> (&TiledKernel, u32) {
        let even = kv_heads > 0 && heads.is_multiple_of(2 * kv_heads);
        self.paired.as_ref().filter(|_| even).map_or((&self.forward, 1), |paired| (paired, 2))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backward {
    /// All gradients at once, with those of queries as sums still to be rounded.
    Fused(Fused),
    Apart {
        dq: TiledKernel,
        /// All are launched: together they compute the gradients of keys and values.
        dkv: &'static [TiledKernel],
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fused {
    pub tiles: TiledKernel,
    /// From sums to gradients: two CTAs per tile of queries and head.
    pub finish: AttentionKernel,
    /// Elements of a tile's sums.
    pub sum: usize,
}

impl Fused {
    /// Number of tiles of queries.
    fn queries(&self, queries: usize) -> usize {
        queries.div_ceil(self.tiles.columns as usize)
    }
    /// Number of 4-byte turn counters that a launch needs, initially zero;
    pub fn turns(&self, heads: usize, queries: usize) -> usize {
        1 + heads * self.queries(queries)
    }
    /// and of sums, aligned to 16 bytes.
    pub fn sums(&self, heads: usize, queries: usize) -> usize {
        self.sum * heads * self.queries(queries)
    }
}

const ROWS: u32 = 128;
const STAGES: u32 = 4;
/// Rows of a tile in the backward pass.
const QUERIES: u32 = 64;

/// Shared memory according to the `.const`s of the sources: `own` tiles of rows, a ring, mbarriers, numbers for the
/// rows of each slot, and alignment padding.
const fn tiles(variant: &Variant, entry: &'static str, dim: u32, [own, columns, numbers]: [u32; 3]) -> TiledKernel {
    let pitch = dim.div_ceil(BOX) * 2 * BOX;
    let shared = own * ROWS * pitch + STAGES * (columns * pitch + numbers) + 128 + 1024;
    TiledKernel { kernel: AttentionKernel { variant: variant.name, entry, rows: ROWS, threads: 384, shared }, columns }
}

/// A CTA takes tile after tile: with a tile's head, first row and ranges.
const fn forward(variant: &Variant, dim: u32, columns: u32) -> TiledKernel {
    let TiledKernel { kernel, columns } = tiles(variant, "attention_forward", dim, [1, columns, 0]);
    TiledKernel { kernel: AttentionKernel { shared: kernel.shared + 16 + 8 * ROWS, ..kernel }, columns }
}

/// Bytes of a slot's lse or delta.
const NUMBERS: u32 = 256;

/// Gradients of scores and sums, after the ring.
const fn fused(variant: &Variant, finish: &Variant, dim: u32) -> Backward {
    let TiledKernel { kernel, columns } = tiles(variant, "attention_backward", dim, [2, QUERIES, NUMBERS]);
    let sum = QUERIES * dim.next_multiple_of(64);
    let shared = kernel.shared + ROWS * QUERIES * 2 + 2 * 4 * sum;
    let finish = AttentionKernel { variant: finish.name, entry: "attention_sum", rows: 64, threads: 128, shared: 0 };
    Backward::Fused(Fused {
        tiles: TiledKernel { kernel: AttentionKernel { shared, ..kernel }, columns },
        finish,
        sum: sum as usize,
    })
}

macro_rules! variant {
    (
        $stem:literal, $file:literal, $dtype:literal = $number:literal, $dim:literal, $suffix:literal = $cap:literal
        $(, $key:literal = $value:literal)*
    ) => {
        Variant {
            name: concat!("attention_hopper_", $stem, "_", $dtype, "_", $dim, $suffix),
            file: $file,
            given: &[("DTYPE", $number), ("HEAD_DIM", $dim), ("CAP", $cap) $(, ($key, $value))*],
        }
    };
}
/// The kernels for heads of up to `dim` elements, `suffix` in their names: "_cap" with softcap.
macro_rules! family {
    (
        $family:ident, $variants:ident, $dtype:literal = $number:literal, $dim:literal, $suffix:literal = $cap:literal,
        $sum:expr
    ) => {
        const $variants: [Variant; 2] = [
            variant!("forward", "attention_hopper.ptx", $dtype = $number, $dim, $suffix = $cap),
            variant!("backward", "attention_hopper_backward.ptx", $dtype = $number, $dim, $suffix = $cap),
        ];
        const $family: HopperFamily = HopperFamily {
            forward: forward(&$variants[0], $dim, 128),
            paired: None,
            backward: fused(&$variants[1], $sum, $dim),
        };
    };
}
const PAIRED: [Variant; 2] = [
    variant!("forward", "attention_hopper.ptx", "bf16" = 1, 128, "_pair" = 0, "PAIR" = 1),
    variant!("forward", "attention_hopper.ptx", "f16" = 2, 128, "_pair" = 0, "PAIR" = 1),
];
/// With a kernel for pairs.
const fn paired(family: HopperFamily, variant: &Variant) -> HopperFamily {
    HopperFamily { paired: Some(forward(variant, 128, 128)), ..family }
}
/// The largest heads, for which a launch has registers only for the gradient of keys or of values.
macro_rules! large {
    ($family:ident, $variants:ident, $dtype:literal = $number:literal, $suffix:literal = $cap:literal) => {
        const $variants: [Variant; 4] = [
            variant!("forward", "attention_hopper.ptx", $dtype = $number, 256, $suffix = $cap),
            variant!("dq", "attention_hopper_dq.ptx", $dtype = $number, 256, $suffix = $cap),
            variant!("dk", "attention_hopper_dkv.ptx", $dtype = $number, 256, $suffix = $cap),
            variant!("dv", "attention_hopper_dkv.ptx", $dtype = $number, 256, $suffix = $cap, "DK" = 0),
        ];
        const $family: HopperFamily = HopperFamily {
            forward: forward(&$variants[0], 256, 80),
            paired: None,
            backward: Backward::Apart {
                dq: tiles(&$variants[1], "attention_dq", 256, [2, 48, 0]),
                dkv: &[
                    tiles(&$variants[2], "attention_dkv", 256, [2, 48, NUMBERS]),
                    tiles(&$variants[3], "attention_dkv", 256, [1, 64, NUMBERS]),
                ],
            },
        };
    };
}
const SUMS: [Variant; 4] = [
    Variant {
        name: "attention_hopper_sum_bf16_32",
        file: "attention_hopper_sum.ptx",
        given: &[("DTYPE", 1), ("HALF", 32)],
    },
    Variant { name: "attention_hopper_sum_bf16_64", file: "attention_hopper_sum.ptx", given: &[("DTYPE", 1)] },
    Variant {
        name: "attention_hopper_sum_f16_32",
        file: "attention_hopper_sum.ptx",
        given: &[("DTYPE", 2), ("HALF", 32)],
    },
    Variant { name: "attention_hopper_sum_f16_64", file: "attention_hopper_sum.ptx", given: &[("DTYPE", 2)] },
];
family!(BF16_64, BF16_64_VARIANTS, "bf16" = 1, 64, "" = 0, &SUMS[0]);
family!(BF16_96, BF16_96_VARIANTS, "bf16" = 1, 96, "" = 0, &SUMS[1]);
family!(BF16_128_SINGLE, BF16_128_VARIANTS, "bf16" = 1, 128, "" = 0, &SUMS[1]);
const BF16_128: HopperFamily = paired(BF16_128_SINGLE, &PAIRED[0]);
large!(BF16_256, BF16_256_VARIANTS, "bf16" = 1, "" = 0);
family!(BF16_128_CAP, BF16_128_CAP_VARIANTS, "bf16" = 1, 128, "_cap" = 1, &SUMS[1]);
large!(BF16_256_CAP, BF16_256_CAP_VARIANTS, "bf16" = 1, "_cap" = 1);
family!(F16_64, F16_64_VARIANTS, "f16" = 2, 64, "" = 0, &SUMS[2]);
family!(F16_96, F16_96_VARIANTS, "f16" = 2, 96, "" = 0, &SUMS[3]);
family!(F16_128_SINGLE, F16_128_VARIANTS, "f16" = 2, 128, "" = 0, &SUMS[3]);
const F16_128: HopperFamily = paired(F16_128_SINGLE, &PAIRED[1]);
large!(F16_256, F16_256_VARIANTS, "f16" = 2, "" = 0);
family!(F16_128_CAP, F16_128_CAP_VARIANTS, "f16" = 2, 128, "_cap" = 1, &SUMS[3]);
large!(F16_256_CAP, F16_256_CAP_VARIANTS, "f16" = 2, "_cap" = 1);

const ALL: &[&[Variant]] = &[
    &SUMS,
    &PAIRED,
    &BF16_64_VARIANTS,
    &BF16_96_VARIANTS,
    &BF16_128_VARIANTS,
    &BF16_256_VARIANTS,
    &BF16_128_CAP_VARIANTS,
    &BF16_256_CAP_VARIANTS,
    &F16_64_VARIANTS,
    &F16_96_VARIANTS,
    &F16_128_VARIANTS,
    &F16_256_VARIANTS,
    &F16_128_CAP_VARIANTS,
    &F16_256_CAP_VARIANTS,
];

pub fn variants() -> impl Iterator<Item = &'static Variant> {
    ALL.iter().copied().flatten()
}

/// For 16-bit types and heads of a multiple of 8 elements, as tensor maps require; with softcap, as
/// [`sm_80_family`](super::attention::sm_80_family).
pub fn sm_90a_family(dtype: &str, head_dim: usize, softcap: f32) -> Option<&'static HopperFamily> {
    if !head_dim.is_multiple_of(8) {
        return None;
    }
    match (dtype, softcap != 0.0, head_dim) {
        ("bf16", false, 1..=64) => Some(&BF16_64),
        ("bf16", false, 65..=96) => Some(&BF16_96),
        ("bf16", false, 97..=128) => Some(&BF16_128),
        ("bf16", false, 129..=256) => Some(&BF16_256),
        ("bf16", true, 1..=128) => Some(&BF16_128_CAP),
        ("bf16", true, 129..=256) => Some(&BF16_256_CAP),
        ("f16", false, 1..=64) => Some(&F16_64),
        ("f16", false, 65..=96) => Some(&F16_96),
        ("f16", false, 97..=128) => Some(&F16_128),
        ("f16", false, 129..=256) => Some(&F16_256),
        ("f16", true, 1..=128) => Some(&F16_128_CAP),
        ("f16", true, 129..=256) => Some(&F16_256_CAP),
        _ => None,
    }
}
