//! Elementwise operations: casts, sums, scaling. Each is compiled for the dtypes it is used with.
use super::operands::length;
use crate::{View, ViewMut};
use flatshard_base::{Error, Result, dtype::Float};

#[inline(always)]
pub fn cast<A: Float, B: Float>(src: View, dst: ViewMut) -> Result<()> {
    const OP: &str = "copy";
    length(OP, "dst", dst.len(), src.len())?;
    if (A::DTYPE, B::DTYPE) != (src.dtype(), dst.dtype()) {
        return Err(Error::op(OP, format!("cannot cast {} to {}", src.dtype(), dst.dtype())));
    }
    for (src, dst) in src.host::<A>(OP)?.iter().zip(dst.host::<B>(OP)?) {
        *dst = B::from_f32(src.to_f32());
    }
    Ok(())
}
#[inline(always)]
pub fn add<X: Float, Y: Float>(x: View, y: ViewMut) -> Result<()> {
    const OP: &str = "add";
    length(OP, "y", y.len(), x.len())?;
    for (x, y) in x.host::<X>(OP)?.iter().zip(y.host::<Y>(OP)?) {
        *y = Y::from_f32(y.to_f32() + x.to_f32());
    }
    Ok(())
}
#[inline(always)]
pub fn scale_by<T: Float>(factor: View, x: ViewMut) -> Result<()> {
    scale::<T>(factor.host::<T>("scale_by")?[0].to_f32(), x)
}
#[inline(always)]
pub fn scale<T: Float>(factor: f32, x: ViewMut) -> Result<()> {
    for x in x.host::<T>("scale")? {
        *x = T::from_f32(x.to_f32() * factor);
    }
    Ok(())
}
