//! What works element by element: casts, sums, scales. Each compiled for the dtypes that it meets.
use crate::base::dtype::Float;

#[inline(always)]
pub fn convert<A: Float, B: Float>(src: &[A], dst: &mut [B]) {
    for (src, dst) in src.iter().zip(dst) {
        *dst = B::from_f32(src.to_f32());
    }
}
#[inline(always)]
pub fn add<X: Float, Y: Float>(x: &[X], y: &mut [Y]) {
    for (x, y) in x.iter().zip(y) {
        *y = Y::from_f32(y.to_f32() + x.to_f32());
    }
}
#[inline(always)]
pub fn scale<T: Float>(factor: f32, x: &mut [T]) {
    for x in x {
        *x = T::from_f32(x.to_f32() * factor);
    }
}
