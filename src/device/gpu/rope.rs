//! Launches of rotary positions.
use super::{GpuDevice, missing};
use crate::base::Result;
use crate::device::{QkNormRope, Rope, View, ViewMut};

pub fn rope(_: &GpuDevice, _: &Rope, _table: View, _positions: View, _qkv: ViewMut, _inverse: bool) -> Result<()> {
    missing("rope")
}

/// Of table, positions, wq, wk, qkv.
pub fn qk_norm_rope(_: &GpuDevice, _: &QkNormRope, _: [View; 5], _out: ViewMut, _rstd: ViewMut) -> Result<()> {
    missing("qk_norm_rope")
}

/// Of table, positions, wq, wk, qkv, rstd; dwq and dwk.
pub fn qk_norm_rope_backward(
    _: &GpuDevice,
    _: &QkNormRope,
    _: [View; 6],
    _dqkv: ViewMut,
    _: [ViewMut; 2],
) -> Result<()> {
    missing("qk_norm_rope_backward")
}
