//! What follows a product, with its operands in host memory. Never computes.
use crate::base::{Elem, Result};
use crate::device::View;
use crate::device::ops::Epilogue;

/// What is done to complete sums before they are rounded and written: [`Epilogue`] with its operands in memory, of C's
/// shape.
pub(super) enum Completion<'a, C> {
    Nothing,
    Sum { bias: Option<&'a [C]>, residual: Option<&'a [C]> },
    Gelu { bias: Option<&'a [C]>, z: &'a mut [C] },
    GeluBackward { z: &'a [C] },
}

impl<'a, C: Elem> Completion<'a, C> {
    pub fn of(then: Epilogue<'a>) -> Result<Completion<'a, C>> {
        let host = |x: Option<View<'a>>| x.map(|x| x.host::<C>("gemm_then")).transpose();
        Ok(match then {
            Epilogue::Sum { bias, residual } => Completion::Sum { bias: host(bias)?, residual: host(residual)? },
            Epilogue::Gelu { bias, z } => Completion::Gelu { bias: host(bias)?, z: z.host("gemm_then")? },
            Epilogue::GeluBackward { z, .. } => Completion::GeluBackward { z: z.host("gemm_then")? },
        })
    }
}
