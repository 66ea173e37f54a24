//! The attention kernels: their variants, and which of them a launch takes for an element type and a head. Never launches.
//!
//! Every family has the entries `attention_forward`, `attention_dq` and `attention_dkv` with the parameters of
//! `kernels/attention_shape.ptx`, so that a launch differs by [`Kernel`] alone.
use super::Variant;

/// What of a kernel a launch needs to know: a grid of (rows / `rows` rounded up, heads) CTAs of `threads` threads. Rows are
/// queries and query heads, for `dkv` keys and key/value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    pub variant: &'static str,
    pub entry: &'static str,
    pub rows: u32,
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared: u32,
}

/// The kernels of one element type and head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    pub forward: Kernel,
    pub delta: Kernel,
    pub dq: Kernel,
    /// All are launched: together they give the gradients of keys and values.
    pub dkv: &'static [Kernel],
}

const fn plain(variant: &'static str, entry: &'static str) -> Kernel {
    Kernel { variant, entry, rows: 4, threads: 128, shared: 0 }
}

const fn variant(name: &'static str, file: &'static str, given: &'static [(&'static str, i64)]) -> Variant {
    Variant { name, file, given }
}

pub const VARIANTS: &[Variant] = &[
    variant("attention_delta_f32", "attention_delta.ptx", &[("DTYPE", 0)]),
    variant("attention_delta_bf16", "attention_delta.ptx", &[("DTYPE", 1)]),
    variant("attention_delta_f16", "attention_delta.ptx", &[("DTYPE", 2)]),
    variant("attention_plain_f32", "attention_plain.ptx", &[("DTYPE", 0)]),
    variant("attention_plain_bf16", "attention_plain.ptx", &[("DTYPE", 1)]),
    variant("attention_plain_f16", "attention_plain.ptx", &[("DTYPE", 2)]),
];

macro_rules! plain {
    ($name:ident, $dtype:literal) => {
        const $name: Family = Family {
            forward: plain(concat!("attention_plain_", $dtype), "attention_forward"),
            delta: plain(concat!("attention_delta_", $dtype), "attention_delta"),
            dq: plain(concat!("attention_plain_", $dtype), "attention_dq"),
            dkv: &[plain(concat!("attention_plain_", $dtype), "attention_dkv")],
        };
    };
}
plain!(PLAIN_F32, "f32");
plain!(PLAIN_BF16, "bf16");
plain!(PLAIN_F16, "f16");

/// Elements of the largest head that any kernel takes.
pub const MOST: usize = 256;

/// By rows, for any element type and head up to [`MOST`].
pub fn plain_family(dtype: &str, head_dim: usize) -> Option<&'static Family> {
    let family = match dtype {
        "f32" => &PLAIN_F32,
        "bf16" => &PLAIN_BF16,
        "f16" => &PLAIN_F16,
        _ => return None,
    };
    (1..=MOST).contains(&head_dim).then_some(family)
}
