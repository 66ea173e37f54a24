//! AdamW, SGD and Muon's polynomial: one pass over memory, so the bits do not depend on how the range is divided. Never
//! keeps state of its own.
use super::operands::{constants, first};
use crate::ops::{AdamW, AdamWScalars, Polynomial, Sgd, SgdScalars};
use flatshard_base::dtype::{Float, Stored};
use flatshard_base::dynamic8::{self, SIGNED, UNSIGNED};
use flatshard_base::{Result, rng::philox};

/// The update of one element.
#[inline(always)]
fn update(k: &AdamWScalars, scale: f32, g: f32, m: &mut f32, v: &mut f32, p: &mut f32) {
    let g = g * scale;
    *m += (g - *m) * k.new_m;
    *v = *v * k.beta2 + g * g * k.new_v;
    *p = *p * k.keep - k.size * *m / (v.sqrt() * k.root + k.eps);
}

/// `torch.optim.AdamW` (single tensor): decay, moments, then `p -= lr/bc1 * m / (sqrt(v)/sqrt(bc2) + eps)`. M, P, T:
/// how moments, masters and the copy are stored.
#[inline(always)]
pub fn adamw<M: Stored, P: Stored, T: Float>(op: AdamW) -> Result<()> {
    const OP: &str = AdamW::OP;
    op.check()?;
    let (k, scale) = (&constants::<AdamWScalars>(OP, op.h)?, first(OP, op.scale)?);
    if !scale.is_finite() {
        return Ok(());
    }
    let (at, rounds) = (op.at, op.rounds());
    let (g, m, v) = (op.g.host::<f32>(OP)?, op.m.host::<M>(OP)?, op.v.host::<M>(OP)?);
    let (p, mut out) = (op.p.host::<P>(OP)?, op.out.map(|out| out.host::<T>(OP)).transpose()?);
    let mut words = [[0; BLOCK]; 3];
    let mut start = 0;
    while start < g.len() {
        let (element, contiguous) = if rounds { at.place(start) } else { (0, usize::MAX) };
        let n = contiguous.min(g.len() - start).min(BLOCK);
        if rounds {
            draw(at.key, element, k.step, &mut words);
        }
        let of = start..start + n;
        let state = (&mut m[of.clone()], &mut v[of.clone()], &mut p[of.clone()]);
        adamw_slices(k, scale, &g[of.clone()], state, out.as_mut().map(|out| &mut out[of]), &words);
        start += n;
    }
    Ok(())
}
/// The same with moments in u8, block by block.
#[inline(always)]
pub fn adamw_in_blocks<P: Stored, T: Float>(op: AdamW) -> Result<()> {
    const OP: &str = AdamW::OP;
    op.check()?;
    let (k, scale, at, rounds) = (&constants::<AdamWScalars>(OP, op.h)?, first(OP, op.scale)?, op.at, op.rounds());
    let Some([of_m, of_v]) = op.absmax.filter(|_| scale.is_finite()) else { return Ok(()) };
    let (of_m, of_v) = (of_m.host::<f32>(OP)?, of_v.host::<f32>(OP)?);
    let (g, m, v) = (op.g.host::<f32>(OP)?, op.m.host::<u8>(OP)?, op.v.host::<u8>(OP)?);
    let (p, mut out) = (op.p.host::<P>(OP)?, op.out.map(|out| out.host::<T>(OP)).transpose()?);
    let (mut words, mut new_m, mut new_v) = ([[0; BLOCK]; 3], [0f32; dynamic8::BLOCK], [0f32; dynamic8::BLOCK]);
    for (block, start) in (0..g.len()).step_by(dynamic8::BLOCK).enumerate() {
        let end = g.len().min(start + dynamic8::BLOCK);
        let (new_m, new_v) = (&mut new_m[..end - start], &mut new_v[..end - start]);
        SIGNED.dequantize(&m[start..end], of_m[block], new_m);
        UNSIGNED.dequantize(&v[start..end], of_v[block], new_v);
        let mut i = start;
        while i < end {
            let (element, contiguous) = if rounds { at.place(i) } else { (0, usize::MAX) };
            let n = contiguous.min(end - i).min(BLOCK);
            if rounds {
                draw(at.key, element, k.step, &mut words);
            }
            let (own, of) = (i - start..i - start + n, i..i + n);
            let state = (&mut new_m[own.clone()], &mut new_v[own], &mut p[of.clone()]);
            adamw_slices(k, scale, &g[of.clone()], state, out.as_mut().map(|out| &mut out[of]), &words);
            i += n;
        }
        of_m[block] = SIGNED.quantize(new_m, &mut m[start..end]);
        of_v[block] = UNSIGNED.quantize(new_v, &mut v[start..end]);
    }
    Ok(())
}

/// Elements that are drawn for at a time.
const BLOCK: usize = 64;

/// Random words of the elements from `first` on: of weights, first and second moments.
#[inline(always)]
fn draw(key: u64, first: u64, step: u32, words: &mut [[u32; BLOCK]; 3]) {
    let [p, m, v] = words;
    for (i, ((p, m), v)) in p.iter_mut().zip(m).zip(v).enumerate() {
        let element = first + i as u64;
        [*p, *m, *v, _] = philox(key, [element as u32, (element >> 32) as u32, step, 0]);
    }
}
/// Takes slices, which the compiler knows do not overlap.
#[inline(always)]
fn adamw_slices<M: Stored, P: Stored, T: Float>(
    k: &AdamWScalars,
    scale: f32,
    g: &[f32],
    (m, v, p): (&mut [M], &mut [M], &mut [P]),
    out: Option<&mut [T]>,
    [of_p, of_m, of_v]: &[[u32; BLOCK]; 3],
) {
    let n = g.len().min(BLOCK);
    let (g, m, v, p) = (&g[..n], &mut m[..n], &mut v[..n], &mut p[..n]);
    for i in 0..n {
        let (mut new_m, mut new_v, mut new_p) = (m[i].to_f32(), v[i].to_f32(), p[i].to_f32());
        update(k, scale, g[i], &mut new_m, &mut new_v, &mut new_p);
        (m[i], v[i], p[i]) = (M::store(new_m, of_m[i]), M::store(new_v, of_v[i]), P::store(new_p, of_p[i]));
    }
    if let Some(out) = out {
        for (out, p) in out.iter_mut().zip(p) {
            *out = T::from_f32(p.to_f32());
        }
    }
}

/// The diagonal apart, so that the loop has no division.
#[inline(always)]
pub fn polynomial<T: Float>(op: Polynomial) -> Result<()> {
    const OP: &str = Polynomial::OP;
    let (n, z) = (op.check()?, first(OP, op.scale)?);
    let ([a, b, c], zz) = (op.coefficients, z * z);
    let (square, s) = (op.square.host::<f32>(OP)?, op.s.host::<T>(OP)?);
    for (row, (square, s)) in square.chunks_exact(n.max(1)).zip(s.chunks_exact_mut(n.max(1))).enumerate() {
        let even = |s: T, square: f32| (b * (s.to_f32() * zz) + c * ((square * zz) * zz)) * z;
        let diagonal = T::from_f32(a * z + even(s[row], square[row]));
        for (s, square) in s.iter_mut().zip(square) {
            *s = T::from_f32(even(*s, *square));
        }
        s[row] = diagonal;
    }
    Ok(())
}

#[inline(always)]
pub fn sgd<T: Float>(op: Sgd) -> Result<()> {
    const OP: &str = Sgd::OP;
    op.check()?;
    let (h, scale) = (constants::<SgdScalars>(OP, op.h)?, first(OP, op.scale)?);
    if !scale.is_finite() {
        return Ok(());
    }
    let (g, p) = (op.g.host::<f32>(OP)?, op.p.host::<f32>(OP)?);
    let m = op.m.map(|m| m.host::<f32>(OP)).transpose()?;
    let out = op.out.map(|out| out.host::<T>(OP)).transpose()?;
    sgd_slices(&h, scale, g, m, p, out);
    Ok(())
}
#[inline(always)]
fn sgd_slices<T: Float>(
    h: &SgdScalars,
    scale: f32,
    g: &[f32],
    m: Option<&mut [f32]>,
    p: &mut [f32],
    out: Option<&mut [T]>,
) {
    let n = g.len();
    let p = &mut p[..n];
    match m {
        None => {
            for i in 0..n {
                p[i] -= h.lr * (g[i] * scale + h.weight_decay * p[i]);
            }
        }
        Some(m) => {
            let m = &mut m[..n];
            for i in 0..n {
                m[i] = h.momentum * m[i] + (g[i] * scale + h.weight_decay * p[i]);
                p[i] -= h.lr * m[i];
            }
        }
    }
    if let Some(out) = out {
        for (out, p) in out.iter_mut().zip(p) {
            *out = T::from_f32(*p);
        }
    }
}
