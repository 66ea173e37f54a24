//! Every kernel that is shipped, in every variant: the sources of `kernels/` and the constants that shape them. Never
//! launches anything.
pub mod attention;
pub mod attention_hopper;
pub mod probes;

use crate::expand::{Error, expand};

/// A source of `kernels/` with its constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    pub name: &'static str,
    pub file: &'static str,
    pub given: &'static [(&'static str, i64)],
}

const fn variant(name: &'static str, file: &'static str, given: &'static [(&'static str, i64)]) -> Variant {
    Variant { name, file, given }
}

pub const VARIANTS: &[Variant] = &[
    variant("add_f32", "add.ptx", &[("DTYPE", 0)]),
    variant("add_bf16", "add.ptx", &[("DTYPE", 1)]),
    variant("adamw", "adamw.ptx", &[("OUT", 0)]),
    variant("adamw_bf16", "adamw.ptx", &[("OUT", 1)]),
    variant("adamw_f32", "adamw.ptx", &[("OUT", 2)]),
    variant("cast_f32_bf16", "cast.ptx", &[("FROM", 0), ("TO", 1)]),
    variant("cast_bf16_f32", "cast.ptx", &[("FROM", 1), ("TO", 0)]),
    variant("gelu_f32", "gelu.ptx", &[("DTYPE", 0)]),
    variant("gelu_bf16", "gelu.ptx", &[("DTYPE", 1)]),
    variant("gelu_backward_f32", "gelu_backward.ptx", &[("DTYPE", 0)]),
    variant("gelu_backward_bf16", "gelu_backward.ptx", &[("DTYPE", 1)]),
    variant("rmsnorm_f32", "rmsnorm.ptx", &[("DTYPE", 0)]),
    variant("rmsnorm_bf16", "rmsnorm.ptx", &[("DTYPE", 1)]),
    variant("sum_squares", "sum_squares.ptx", &[]),
    variant("swiglu_f32", "swiglu.ptx", &[("DTYPE", 0)]),
    variant("swiglu_bf16", "swiglu.ptx", &[("DTYPE", 1)]),
    variant("swiglu_backward_f32", "swiglu_backward.ptx", &[("DTYPE", 0)]),
    variant("swiglu_backward_bf16", "swiglu_backward.ptx", &[("DTYPE", 1)]),
];

const SOURCES: &[(&str, &str)] = &[
    ("attention.ptx", include_str!("../../kernels/attention.ptx")),
    ("attention_dkv.ptx", include_str!("../../kernels/attention_dkv.ptx")),
    ("attention_dq.ptx", include_str!("../../kernels/attention_dq.ptx")),
    ("attention_forward.ptx", include_str!("../../kernels/attention_forward.ptx")),
    ("attention_start.ptx", include_str!("../../kernels/attention_start.ptx")),
    ("attention_tile.ptx", include_str!("../../kernels/attention_tile.ptx")),
    ("attention_delta.ptx", include_str!("../../kernels/attention_delta.ptx")),
    ("attention_hopper.ptx", include_str!("../../kernels/attention_hopper.ptx")),
    ("attention_merge.ptx", include_str!("../../kernels/attention_merge.ptx")),
    ("attention_ranges.ptx", include_str!("../../kernels/attention_ranges.ptx")),
    ("columns.ptx", include_str!("../../kernels/columns.ptx")),
    ("attention_hopper_consumer.ptx", include_str!("../../kernels/attention_hopper_consumer.ptx")),
    ("attention_hopper_dkv.ptx", include_str!("../../kernels/attention_hopper_dkv.ptx")),
    ("attention_hopper_dq.ptx", include_str!("../../kernels/attention_hopper_dq.ptx")),
    ("attention_hopper_start.ptx", include_str!("../../kernels/attention_hopper_start.ptx")),
    ("attention_hopper_tile.ptx", include_str!("../../kernels/attention_hopper_tile.ptx")),
    ("attention_plain.ptx", include_str!("../../kernels/attention_plain.ptx")),
    ("attention_shape.ptx", include_str!("../../kernels/attention_shape.ptx")),
    ("add.ptx", include_str!("../../kernels/add.ptx")),
    ("adamw.ptx", include_str!("../../kernels/adamw.ptx")),
    ("cast.ptx", include_str!("../../kernels/cast.ptx")),
    ("element.ptx", include_str!("../../kernels/element.ptx")),
    ("gelu.ptx", include_str!("../../kernels/gelu.ptx")),
    ("gelu_backward.ptx", include_str!("../../kernels/gelu_backward.ptx")),
    ("probe_hopper.ptx", include_str!("../../kernels/probe_hopper.ptx")),
    ("probe_mma.ptx", include_str!("../../kernels/probe_mma.ptx")),
    ("rmsnorm.ptx", include_str!("../../kernels/rmsnorm.ptx")),
    ("sigmoid.ptx", include_str!("../../kernels/sigmoid.ptx")),
    ("sum_squares.ptx", include_str!("../../kernels/sum_squares.ptx")),
    ("swiglu.ptx", include_str!("../../kernels/swiglu.ptx")),
    ("swiglu_backward.ptx", include_str!("../../kernels/swiglu_backward.ptx")),
];

fn source(file: &str) -> Option<String> {
    SOURCES.iter().find(|(name, _)| *name == file).map(|(_, text)| text.to_string())
}

/// All of them.
pub fn variants() -> impl Iterator<Item = &'static Variant> {
    VARIANTS.iter().chain(attention::variants()).chain(attention_hopper::variants()).chain(probes::VARIANTS)
}

impl Variant {
    pub fn by_name(name: &str) -> Option<&'static Variant> {
        variants().find(|v| v.name == name)
    }
    /// Plain PTX with `# line "file"` markers.
    pub fn expand(&self) -> Result<String, Error> {
        let missing = || Error { what: "no such source".into(), at: (self.file.into(), 1), through: vec![] };
        expand(self.file, &source(self.file).ok_or_else(missing)?, self.given, &source)
    }
}
