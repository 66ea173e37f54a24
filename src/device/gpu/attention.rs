//! Launches of attention.
use super::{GpuDevice, missing};
use crate::base::Result;
use crate::device::{Attention, View, ViewMut};

pub fn forward(_: &GpuDevice, _: &Attention, _cu_seqlens: View, _qkv: View, _o: ViewMut, _lse: ViewMut) -> Result<()> {
    missing("attention")
}

/// Of qkv, o, lse, d_o.
pub fn backward(
    _: &GpuDevice,
    _: &Attention,
    _cu_seqlens: View,
    _: [View; 4],
    _delta: ViewMut,
    _dqkv: ViewMut,
) -> Result<()> {
    missing("attention_backward")
}
