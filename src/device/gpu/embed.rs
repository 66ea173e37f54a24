//! Launches of table lookup and its scatter.
use super::{GpuDevice, missing};
use crate::base::Result;
use crate::device::{View, ViewMut};

pub fn embed(_: &GpuDevice, _tokens: View, _w: View, _scale: f32, _y: ViewMut, _accumulate: bool) -> Result<()> {
    missing("embed")
}

pub fn embed_backward(_: &GpuDevice, _tokens: View, _dy: View, _scale: f32, _dw: ViewMut) -> Result<()> {
    missing("embed_backward")
}
