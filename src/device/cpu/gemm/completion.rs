//! What follows a product, with its operands in host memory. Never computes.
use crate::ops::Epilogue;
use crate::{View, ViewMut};
use flatshard_base::{Elem, Result};

/// Where the host writes C, or what has its shape. Threads write columns of the same rows, so that neither is ever
/// borrowed as a whole.
pub(super) fn written<C: Elem>(mut c: ViewMut) -> Result<*mut C> {
    c.reborrow().slice(0..0).host::<C>("gemm")?; // checks type and place
    Ok(c.as_mut_ptr().cast())
}

/// What is done to complete sums before they are rounded and written: [`Epilogue`] with its operands in memory, which
/// have C's columns, and rows as far apart.
pub(super) enum Completion<'a, C> {
    Nothing,
    Sum { bias: Option<&'a [C]>, residual: Option<&'a [C]> },
    Gelu { bias: Option<&'a [C]>, z: *mut C },
    GeluBackward { z: &'a [C] },
}

impl<'a, C: Elem> Completion<'a, C> {
    pub fn of(then: Epilogue<'a>) -> Result<Completion<'a, C>> {
        let host = |x: Option<View<'a>>| x.map(|x| x.host::<C>("gemm_then")).transpose();
        Ok(match then {
            Epilogue::Sum { bias: None, residual: None } => Completion::Nothing,
            Epilogue::Sum { bias, residual } => Completion::Sum { bias: host(bias)?, residual: host(residual)? },
            Epilogue::Gelu { bias, z } => Completion::Gelu { bias: host(bias)?, z: written(z)? },
            Epilogue::GeluBackward { z, .. } => Completion::GeluBackward { z: z.host("gemm_then")? },
        })
    }
}
