//! Rotary positions. Never reads a head that is not rotated.
use crate::base::dtype::Float;
use crate::device::Rope;

/// `positions` are within the table, rows as `shape` says: checked by the caller.
#[inline(always)]
pub fn rope<T: Float>(shape: &Rope, table: &[f32], positions: &[u32], qkv: &mut [T], inverse: bool) {
    let (d, half) = (shape.head_dim, shape.head_dim / 2);
    let sign = if inverse { -1.0 } else { 1.0 };
    for (row, &position) in qkv.chunks_exact_mut(shape.row).zip(positions) {
        let (cos, sin) = table[position as usize * d..][..d].split_at(half);
        for head in row[..shape.heads * d].chunks_exact_mut(d) {
            let (a, b) = head.split_at_mut(half);
            for i in 0..half {
                let (x, y, c, s) = (a[i].to_f32(), b[i].to_f32(), cos[i], sign * sin[i]);
                a[i] = T::from_f32(x * c - y * s);
                b[i] = T::from_f32(y * c + x * s);
            }
        }
    }
}
