//! Checks of operands that the CPU reads as numbers: lengths, indices, factors. Never computes.
use crate::View;
use flatshard_base::{Error, Result};

/// Fails unless an operand has the length that another one requires.
pub fn length(op: &'static str, name: &str, have: usize, need: usize) -> Result<()> {
    match have == need {
        true => Ok(()),
        false => Err(Error::op(op, format!("{name} holds {have} elements, needs {need}"))),
    }
}

/// Fails at the first index outside a table.
pub fn within(op: &'static str, what: &str, indices: &[u32], rows: usize) -> Result<()> {
    match indices.iter().position(|&t| t as usize >= rows) {
        None => Ok(()),
        Some(i) => Err(Error::op(op, format!("{what} {} at row {i} is outside the table of {rows} rows", indices[i]))),
    }
}

/// Element 0 of a factor, which must have at least one.
pub fn first(op: &'static str, scale: View) -> Result<f32> {
    Ok(scale.host::<f32>(op)?[0])
}

/// Constants of an update that all elements share.
pub fn constants<T: bytemuck::Pod>(op: &'static str, h: View) -> Result<T> {
    Ok(bytemuck::pod_read_unaligned(h.host_bytes(op)?))
}
