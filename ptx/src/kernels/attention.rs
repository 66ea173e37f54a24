//! The attention kernels: their variants, and which of them a launch uses for an element type and head size. Never
//! launches.
//!
//! Every family has the entry points `attention_forward`, `attention_dq` and `attention_dkv` with the parameters of
//! `kernels/attention_shape.ptx`, so launches differ only in [`AttentionKernel`].
use super::variant::{Variant, variant};

/// Launch parameters of a kernel: a grid of (rows / `rows` rounded up, heads) CTAs of `threads` threads. Rows are
/// queries and heads are query heads; for `dkv`, keys and key/value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionKernel {
    pub variant: &'static str,
    pub entry: &'static str,
    pub rows: u32,
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared: u32,
}

/// The kernels for one element type and head size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionFamily {
    pub forward: AttentionKernel,
    pub delta: AttentionKernel,
    pub dq: AttentionKernel,
    /// All are launched: together they compute the gradients of keys and values.
    pub dkv: &'static [AttentionKernel],
}

const fn plain(variant: &'static str, entry: &'static str) -> AttentionKernel {
    AttentionKernel { variant, entry, rows: 4, threads: 128, shared: 0 }
}

/// The families for heads of up to [`NARROW`] and of up to [`MOST`] elements.
macro_rules! plain {
    ($variants:ident, $families:ident, $dtype:literal, $number:literal) => {
        const $variants: [Variant; 3] = [
            variant(concat!("attention_delta_", $dtype), "attention_delta.ptx", &[("DTYPE", $number)]),
            variant(concat!("attention_plain_", $dtype), "attention_plain.ptx", &[("DTYPE", $number)]),
            variant(
                concat!("attention_plain_", $dtype, "_512"),
                "attention_plain.ptx",
                &[("DTYPE", $number), ("SLICES", 16)],
            ),
        ];
        const $families: [AttentionFamily; 2] = [
    plain!(@family $dtype, concat!("attention_plain_", $dtype)),
    plain!(@family $dtype, concat!("attention_plain_", $dtype, "_512")),
        ];
    };
    (@family $dtype:literal, $variant:expr) => {
        AttentionFamily {
            forward: plain($variant, "attention_forward"),
            delta: plain(concat!("attention_delta_", $dtype), "attention_delta"),
            dq: plain($variant, "attention_dq"),
            dkv: &[plain($variant, "attention_dkv")],
        }
    };
}
plain!(PLAIN_F32_VARIANTS, PLAIN_F32, "f32", 0);
plain!(PLAIN_BF16_VARIANTS, PLAIN_BF16, "bf16", 1);
plain!(PLAIN_F16_VARIANTS, PLAIN_F16, "f16", 2);

/// Derives a tile kernel's shared memory from its `.const`s: see `kernels/attention_tile.ptx`.
const fn tiles(
    variant: &'static str,
    entry: &'static str,
    head_dim: u32,
    [m, columns, own, extra]: [u32; 4],
) -> AttentionKernel {
    let (rows, pitch) = (64 * m, 2 * head_dim);
    let shared = own * rows * pitch + 2 * (2 * columns * pitch + extra) + 8 * rows;
    AttentionKernel { variant, entry, rows, threads: 128, shared }
}

/// The kernels for heads of up to `dim` elements, `suffix` in their names: "_cap" with softcap. MT, COLUMNS, OWN and
/// EXTRA as in the sources; `halves` if a launch has registers only for the gradient of keys or of values.
macro_rules! sm_80 {
    (@name $stem:literal, $dtype:literal, $dim:literal, $suffix:literal) => {
        concat!("attention_", $stem, "_", $dtype, "_", $dim, $suffix)
    };
    (@common $forward:expr, $dq:expr, $dtype:literal, $dim:literal, $suffix:literal, $dkv:expr) => {
        AttentionFamily {
            forward: tiles(sm_80!(@name "forward", $dtype, $dim, $suffix), "attention_forward", $dim, $forward),
            delta: plain(concat!("attention_delta_", $dtype), "attention_delta"),
            dq: tiles(sm_80!(@name "dq", $dtype, $dim, $suffix), "attention_dq", $dim, $dq),
            dkv: $dkv,
        }
    };
    (
        @variant $stem:literal, $file:literal, $dtype:literal, $number:literal, $dim:literal, $suffix:literal,
        $cap:literal $(, $key:literal = $value:literal)*
    ) => {
        variant(
            sm_80!(@name $stem, $dtype, $dim, $suffix),
            $file,
            &[("DTYPE", $number), ("HEAD_DIM", $dim), ("CAP", $cap) $(, ($key, $value))*],
        )
    };
    (
        $variants:ident, $family:ident, $dtype:literal = $number:literal, $dim:literal, $suffix:literal = $cap:literal,
        $forward:expr, $dq:expr, $dkv:expr
    ) => {
        const $variants: [Variant; 3] = [
            sm_80!(@variant "forward", "attention_forward.ptx", $dtype, $number, $dim, $suffix, $cap),
            sm_80!(@variant "dq", "attention_dq.ptx", $dtype, $number, $dim, $suffix, $cap),
            sm_80!(@variant "dkv", "attention_dkv.ptx", $dtype, $number, $dim, $suffix, $cap),
        ];
        const $family: AttentionFamily = sm_80!(@common $forward, $dq, $dtype, $dim, $suffix,
            &[tiles(sm_80!(@name "dkv", $dtype, $dim, $suffix), "attention_dkv", $dim, $dkv)]);
    };
    (
        halves $variants:ident, $family:ident, $dtype:literal = $number:literal, $dim:literal,
        $suffix:literal = $cap:literal, $forward:expr, $dq:expr, $dkv:expr
    ) => {
        const $variants: [Variant; 4] = [
            sm_80!(@variant "forward", "attention_forward.ptx", $dtype, $number, $dim, $suffix, $cap),
            sm_80!(@variant "dq", "attention_dq.ptx", $dtype, $number, $dim, $suffix, $cap),
            sm_80!(@variant "dk", "attention_dkv.ptx", $dtype, $number, $dim, $suffix, $cap, "DV" = 0),
            sm_80!(@variant "dv", "attention_dkv.ptx", $dtype, $number, $dim, $suffix, $cap, "DK" = 0),
        ];
        const $family: AttentionFamily = sm_80!(@common $forward, $dq, $dtype, $dim, $suffix, &[
            tiles(sm_80!(@name "dk", $dtype, $dim, $suffix), "attention_dkv", $dim, $dkv),
            tiles(sm_80!(@name "dv", $dtype, $dim, $suffix), "attention_dkv", $dim, $dkv),
        ]);
    };
}
sm_80!(BF16_64_VARIANTS, BF16_64, "bf16" = 1, 64, "" = 0, [2, 64, 1, 0], [2, 64, 2, 0], [2, 32, 2, 256]);
sm_80!(BF16_96_VARIANTS, BF16_96, "bf16" = 1, 96, "" = 0, [2, 64, 1, 0], [2, 32, 2, 0], [1, 64, 2, 512]);
sm_80!(BF16_128_VARIANTS, BF16_128, "bf16" = 1, 128, "" = 0, [2, 48, 1, 0], [2, 32, 2, 0], [1, 64, 2, 512]);
sm_80!(halves BF16_256_VARIANTS, BF16_256, "bf16" = 1, 256, "" = 0, [1, 32, 1, 0], [1, 32, 2, 0], [1, 32, 2, 256]);
sm_80!(BF16_128_CAP_VARIANTS, BF16_128_CAP, "bf16" = 1, 128, "_cap" = 1, [2, 48, 1, 0], [2, 32, 2, 0], [1, 64, 2, 512]);
sm_80!(halves BF16_256_CAP_VARIANTS, BF16_256_CAP, "bf16" = 1, 256, "_cap" = 1, [1, 32, 1, 0], [1, 32, 2, 0], [1, 32, 2, 256]);
sm_80!(F16_64_VARIANTS, F16_64, "f16" = 2, 64, "" = 0, [2, 64, 1, 0], [2, 64, 2, 0], [2, 32, 2, 256]);
sm_80!(F16_96_VARIANTS, F16_96, "f16" = 2, 96, "" = 0, [2, 64, 1, 0], [2, 32, 2, 0], [1, 64, 2, 512]);
sm_80!(F16_128_VARIANTS, F16_128, "f16" = 2, 128, "" = 0, [2, 48, 1, 0], [2, 32, 2, 0], [1, 64, 2, 512]);
sm_80!(halves F16_256_VARIANTS, F16_256, "f16" = 2, 256, "" = 0, [1, 32, 1, 0], [1, 32, 2, 0], [1, 32, 2, 256]);
sm_80!(F16_128_CAP_VARIANTS, F16_128_CAP, "f16" = 2, 128, "_cap" = 1, [2, 48, 1, 0], [2, 32, 2, 0], [1, 64, 2, 512]);
sm_80!(halves F16_256_CAP_VARIANTS, F16_256_CAP, "f16" = 2, 256, "_cap" = 1, [1, 32, 1, 0], [1, 32, 2, 0], [1, 32, 2, 256]);

/// Steps between the passes of ring attention.
const RING: &[Variant] = &[
    variant("attention_merge", "attention_merge.ptx", &[]),
    variant("attention_ranges", "attention_ranges.ptx", &[]),
    variant("copy_columns_f32_f32", "columns.ptx", &[("FROM", 0), ("TO", 0)]),
    variant("copy_columns_f32_bf16", "columns.ptx", &[("FROM", 0), ("TO", 1)]),
    variant("copy_columns_bf16_f32", "columns.ptx", &[("FROM", 1), ("TO", 0)]),
    variant("copy_columns_f32_f16", "columns.ptx", &[("FROM", 0), ("TO", 2)]),
    variant("copy_columns_f16_f32", "columns.ptx", &[("FROM", 2), ("TO", 0)]),
    variant("copy_columns_f16_f16", "columns.ptx", &[("FROM", 2), ("TO", 2)]),
    variant("copy_columns_bf16_bf16", "columns.ptx", &[("FROM", 1), ("TO", 1)]),
];

macro_rules! paged {
    ($dtype:literal, $number:literal, $heads:literal $(, $suffix:literal, $most:literal)?) => {
        variant(
            concat!("attention_paged_", $dtype, "_", $heads $(, $suffix)?),
            "attention_paged.ptx",
            &[("DTYPE", $number), ("HEADS", $heads) $(, ("MOST", $most))?],
        )
    };
}
/// Over pages, by the query heads of a CTA; the last one for heads of more than [`NARROW`] elements.
const PAGED: [[Variant; 3]; 3] = [
    [paged!("bf16", 1, 1), paged!("bf16", 1, 4), paged!("bf16", 1, 2, "_512", 512)],
    [paged!("f16", 2, 1), paged!("f16", 2, 4), paged!("f16", 2, 2, "_512", 512)],
    [paged!("f32", 0, 1), paged!("f32", 0, 4), paged!("f32", 0, 2, "_512", 512)],
];

/// The kernel for rows over pages, where `group` query heads share keys: its variant, and the query heads of a CTA.
pub fn paged(dtype: &str, group: usize, head_dim: usize) -> Option<(&'static str, usize)> {
    let number = ["bf16", "f16", "f32"].iter().position(|name| *name == dtype)?;
    let [one, four, wide] = &PAGED[number];
    let (kernel, heads) = match group {
        _ if head_dim > NARROW => (wide, 2),
        1 => (one, 1),
        _ => (four, 4),
    };
    (1..=MOST).contains(&head_dim).then_some((kernel.name, heads))
}

const ALL: &[&[Variant]] = &[
    RING,
    &PAGED[0],
    &PAGED[1],
    &PAGED[2],
    &PLAIN_F32_VARIANTS,
    &PLAIN_BF16_VARIANTS,
    &PLAIN_F16_VARIANTS,
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

/// Elements of the largest head supported.
pub const MOST: usize = 512;
/// The width of the largest head that needs no kernel of its own.
const NARROW: usize = 256;

/// Row kernels, for any element type and heads up to [`MOST`].
pub fn plain_family(dtype: &str, head_dim: usize) -> Option<&'static AttentionFamily> {
    let [narrow, wide] = match dtype {
        "f32" => &PLAIN_F32,
        "bf16" => &PLAIN_BF16,
        "f16" => &PLAIN_F16,
        _ => return None,
    };
    (1..=MOST).contains(&head_dim).then_some(if head_dim > NARROW { wide } else { narrow })
}

/// Tensor-core kernels for sm_80 and later: 16-bit types, heads of a multiple of 8. Models with softcap have heads of
/// 128 or 256, so smaller ones with it are padded. `None` if only the row kernels apply.
pub fn sm_80_family(dtype: &str, head_dim: usize, softcap: f32) -> Option<&'static AttentionFamily> {
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
