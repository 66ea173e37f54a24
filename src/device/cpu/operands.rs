//! What operands must be: lengths that the others demand, whole rows, and the few numbers that the CPU reads as such. Never
//! computes.
use crate::base::{DType, Error, Result};
use crate::device::View;

/// Refuses the first operand whose length is not the one that the others demand.
pub fn lengths(op: &'static str, operands: &[(&str, usize, usize)]) -> Result<()> {
    match operands.iter().find(|(_, have, need)| have != need) {
        None => Ok(()),
        Some((name, have, need)) => Err(Error::op(op, format!("{name} holds {have} elements, needs {need}"))),
    }
}

/// Rows of `len` elements in rows of `width`.
pub fn rows(op: &'static str, name: &str, len: usize, width: usize) -> Result<usize> {
    match len.checked_div(width) {
        Some(rows) if rows * width == len => Ok(rows),
        _ => Err(Error::op(op, format!("{name} holds {len} elements, not whole rows of {width}"))),
    }
}

/// A scale: of what [`Device::clip_scale`](crate::device::Device::clip_scale) wrote, element 0.
pub fn first(op: &'static str, scale: View) -> Result<f32> {
    let first = scale.host::<f32>(op)?.first().copied();
    first.ok_or_else(|| Error::op(op, "scale holds 0 elements, needs at least 1"))
}
/// What an update shares between elements.
pub fn constants<T: bytemuck::Pod>(op: &'static str, h: View) -> Result<T> {
    h.fits(op, "h", DType::F32, size_of::<T>() / size_of::<f32>())?;
    Ok(bytemuck::pod_read_unaligned(h.host_bytes(op)?))
}
