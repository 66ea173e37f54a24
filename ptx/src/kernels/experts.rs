//! The kernels of mixtures of experts: their variants, and which of the grouped products a launch uses. Never launches.
use super::variant::{Variant, variant};

/// A grouped product: CTAs of 256 threads, each with a tile of `rows` and `columns` of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupedKernel {
    pub variant: &'static str,
    pub rows: usize,
    pub columns: usize,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

/// The kernels of an element type: forward, input gradient, weight gradient.
pub type GroupedFamily = [GroupedKernel; 3];

macro_rules! grouped {
    ($variants:ident, $family:ident, $stem:literal, $dtype:literal, $number:literal, $tile:literal, $shared:literal) => {
        const $variants: [Variant; 3] = [
    grouped!(@variant $stem, "forward", $dtype, $number, 0),
    grouped!(@variant $stem, "input", $dtype, $number, 1),
    grouped!(@variant $stem, "weight", $dtype, $number, 2),
        ];
        const $family: GroupedFamily = [
    grouped!(@kernel $stem, "forward", $dtype, $tile, $shared),
    grouped!(@kernel $stem, "input", $dtype, $tile, $shared),
    grouped!(@kernel $stem, "weight", $dtype, $tile, $shared),
        ];
    };
    (@variant $stem:literal, $kind:literal, $dtype:literal, $number:literal, $given:literal) => {
        variant(
            concat!("grouped_", $stem, "_", $kind, "_", $dtype),
            concat!("grouped_", $stem, ".ptx"),
            &[("DTYPE", $number), ("KIND", $given)],
        )
    };
    (@kernel $stem:literal, $kind:literal, $dtype:literal, $tile:literal, $shared:literal) => {
        GroupedKernel {
            variant: concat!("grouped_", $stem, "_", $kind, "_", $dtype),
            rows: $tile,
            columns: $tile,
            shared: $shared,
        }
    };
}
grouped!(PLAIN_F32_VARIANTS, PLAIN_F32, "plain", "f32", 0, 64, 0);
grouped!(PLAIN_BF16_VARIANTS, PLAIN_BF16, "plain", "bf16", 1, 64, 0);
grouped!(PLAIN_F16_VARIANTS, PLAIN_F16, "plain", "f16", 2, 64, 0);
grouped!(TILE_BF16_VARIANTS, TILE_BF16, "tile", "bf16", 1, 128, 0);
grouped!(TILE_F16_VARIANTS, TILE_F16, "tile", "f16", 2, 128, 0);
grouped!(HOPPER_BF16_VARIANTS, HOPPER_BF16, "hopper", "bf16", 1, 128, 99328);
grouped!(HOPPER_F16_VARIANTS, HOPPER_F16, "hopper", "f16", 2, 128, 99328);

/// The kernels between the products, and those of the products.
pub const VARIANTS: [&[Variant]; 8] = [
    &[
        variant("balance", "balance.ptx", &[]),
        variant("combine_rows_bf16", "combine_rows.ptx", &[("DTYPE", 1)]),
        variant("combine_rows_f16", "combine_rows.ptx", &[("DTYPE", 2)]),
        variant("combine_rows_f32", "combine_rows.ptx", &[("DTYPE", 0)]),
        variant("expert_bias_bf16", "expert_bias.ptx", &[("DTYPE", 1)]),
        variant("expert_bias_f16", "expert_bias.ptx", &[("DTYPE", 2)]),
        variant("expert_bias_f32", "expert_bias.ptx", &[("DTYPE", 0)]),
        variant("place_runs", "place_runs.ptx", &[]),
        variant("route", "route.ptx", &[]),
        variant("route_backward", "route_backward.ptx", &[]),
        variant("route_load", "route_load.ptx", &[]),
        variant("route_scored_bf16", "route.ptx", &[("SCORED", 1), ("DTYPE", 1)]),
        variant("route_scored_f16", "route.ptx", &[("SCORED", 1), ("DTYPE", 2)]),
        variant("route_scored_f32", "route.ptx", &[("SCORED", 1), ("DTYPE", 0)]),
        variant("route_sort", "route_sort.ptx", &[]),
        variant("scale_chosen_bf16", "scale_chosen.ptx", &[("DTYPE", 1)]),
        variant("scale_chosen_f16", "scale_chosen.ptx", &[("DTYPE", 2)]),
        variant("scale_chosen_f32", "scale_chosen.ptx", &[("DTYPE", 0)]),
        variant("sigmoid", "sigmoid_rows.ptx", &[("BACKWARD", 0)]),
        variant("sigmoid_backward", "sigmoid_rows.ptx", &[("BACKWARD", 1)]),
        variant("take_rows_b16", "take_rows.ptx", &[("BYTES", 2)]),
        variant("take_rows_b32", "take_rows.ptx", &[("BYTES", 4)]),
        variant("weigh_rows_bf16", "weigh_rows.ptx", &[("DTYPE", 1)]),
        variant("weigh_rows_f16", "weigh_rows.ptx", &[("DTYPE", 2)]),
        variant("weigh_rows_f32", "weigh_rows.ptx", &[("DTYPE", 0)]),
    ],
    &PLAIN_F32_VARIANTS,
    &PLAIN_BF16_VARIANTS,
    &PLAIN_F16_VARIANTS,
    &TILE_BF16_VARIANTS,
    &TILE_F16_VARIANTS,
    &HOPPER_BF16_VARIANTS,
    &HOPPER_F16_VARIANTS,
];

/// Multiply-add kernels, for any element type, width and alignment.
pub fn plain_grouped(dtype: &str) -> Option<&'static GroupedFamily> {
    match dtype {
        "f32" => Some(&PLAIN_F32),
        "bf16" => Some(&PLAIN_BF16),
        "f16" => Some(&PLAIN_F16),
        _ => None,
    }
}

/// Tensor-core kernels for sm_80 and later: 16-bit types, with widths and the distance of matrices multiples of 8, and
/// operands aligned to 16 bytes. `None` for other types.
pub fn tile_grouped(dtype: &str) -> Option<&'static GroupedFamily> {
    match dtype {
        "bf16" => Some(&TILE_BF16),
        "f16" => Some(&TILE_F16),
        _ => None,
    }
}

/// The same for sm_90a, with operands as for [`tile_grouped`].
pub fn hopper_grouped(dtype: &str) -> Option<&'static GroupedFamily> {
    match dtype {
        "bf16" => Some(&HOPPER_BF16),
        "f16" => Some(&HOPPER_F16),
        _ => None,
    }
}
