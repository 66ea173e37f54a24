//! Attention sinks, the clamped activation and the biases of experts of gpt-oss. Never multiplies matrices.
use super::simd::{exp, sigmoid};
use crate::ops::{
    ClampedGlu, ClampedGluBackward, ExpertBias, ExpertBiasBackward, GluClamp, HeadSinks, HeadSinksBackward, WeighedBias,
};
use flatshard_base::{Error, Result, dtype::Float};

/// With d = lse - sink: o becomes o sigmoid(d), and lse becomes lse - log sigmoid(d).
#[inline(always)]
pub fn sink<T: Float>(op: HeadSinks) -> Result<()> {
    const OP: &str = HeadSinks::OP;
    let (n, heads, width) = (op.check()?, op.shape.heads, op.shape.head_dim);
    let (sinks, o, lse) = (op.sinks.host::<T>(OP)?, op.o.host::<T>(OP)?, op.lse.host::<f32>(OP)?);
    for (head, sink) in sinks.iter().map(|sink| sink.to_f32()).enumerate() {
        for (row, lse) in lse[head * n..(head + 1) * n].iter_mut().enumerate() {
            let d = *lse - sink;
            let (kept, _) = sigmoid(d);
            *lse = if d > 0.0 { *lse + exp(-d).ln_1p() } else { sink + exp(d).ln_1p() };
            let first = (row * heads + head) * width;
            o[first..first + width].iter_mut().for_each(|x| *x = T::from_f32(x.to_f32() * kept));
        }
    }
    Ok(())
}

/// The sink's value is zero, so its score's gradient is -p delta, with its probability p = exp(sink - lse).
#[inline(always)]
pub fn sink_backward<T: Float>(op: HeadSinksBackward) -> Result<()> {
    const OP: &str = HeadSinksBackward::OP;
    let n = op.check()?;
    let (sinks, lse, delta) = (op.sinks.host::<T>(OP)?, op.lse.host::<f32>(OP)?, op.delta.host::<f32>(OP)?);
    for (head, (sink, dsink)) in sinks.iter().zip(op.dsinks.host::<f32>(OP)?).enumerate() {
        let of = head * n..(head + 1) * n;
        let sum: f64 =
            lse[of.clone()].iter().zip(&delta[of]).map(|(lse, delta)| (exp(sink.to_f32() - lse) * delta) as f64).sum();
        *dsink -= sum as f32;
    }
    Ok(())
}

#[inline(always)]
pub fn clamped_glu<T: Float>(op: ClampedGlu) -> Result<()> {
    const OP: &str = ClampedGlu::OP;
    op.check()?;
    let GluClamp { alpha, limit } = op.clamp;
    for (pair, y) in op.gate_up.host::<T>(OP)?.chunks_exact(2).zip(op.y.host::<T>(OP)?) {
        let (gate, up) = (pair[0].to_f32().min(limit), pair[1].to_f32().clamp(-limit, limit));
        *y = T::from_f32((up + 1.0) * gate * sigmoid(alpha * gate).0);
    }
    Ok(())
}

/// With s = sigmoid(alpha g): d (g s) / dg = s + alpha g s (1 - s); zero where an input is clamped.
#[inline(always)]
pub fn clamped_glu_backward<T: Float>(op: ClampedGluBackward) -> Result<()> {
    const OP: &str = ClampedGluBackward::OP;
    op.check()?;
    let GluClamp { alpha, limit } = op.clamp;
    let (gate_up, dgate_up) = (op.gate_up.host::<T>(OP)?, op.dgate_up.host::<T>(OP)?);
    for ((pair, grads), dy) in gate_up.chunks_exact(2).zip(dgate_up.chunks_exact_mut(2)).zip(op.dy.host::<T>(OP)?) {
        let (gate, up, dy) = (pair[0].to_f32(), pair[1].to_f32(), dy.to_f32());
        let (g, u) = (gate.min(limit), up.clamp(-limit, limit));
        let (s, rest) = sigmoid(alpha * g);
        let inside = |x: f32, kept: bool| T::from_f32(if kept { x } else { 0.0 });
        grads[0] = inside(dy * (u + 1.0) * (alpha * g * s).mul_add(rest, s), gate <= limit);
        grads[1] = inside(dy * g * s, (-limit..=limit).contains(&up));
    }
    Ok(())
}

/// The rows of each expert.
fn groups(op: &'static str, offsets: &[u32], rows: usize) -> Result<impl Iterator<Item = std::ops::Range<usize>>> {
    let fits = offsets.is_sorted() && offsets.last().is_some_and(|&end| end as usize <= rows);
    match fits {
        true => Ok(offsets.windows(2).map(|of| of[0] as usize..of[1] as usize)),
        false => Err(Error::op(op, format!("offsets end beyond {rows} rows"))),
    }
}

#[inline(always)]
pub fn expert_bias<T: Float>(op: ExpertBias) -> Result<()> {
    const OP: &str = ExpertBias::OP;
    let (r, width, stride) = (op.check()?, op.places.width, op.places.stride);
    let (bias, y) = (op.bias.host::<T>(OP)?, op.y.host::<T>(OP)?);
    for (e, rows) in groups(OP, op.places.offsets.host::<u32>(OP)?, r)?.enumerate() {
        let bias = &bias[e * stride..][..width];
        for row in y[rows.start * width..rows.end * width].chunks_exact_mut(width) {
            row.iter_mut().zip(bias).for_each(|(y, b)| *y = T::from_f32(y.to_f32() + b.to_f32()));
        }
    }
    Ok(())
}

#[inline(always)]
pub fn expert_bias_backward<T: Float>(op: ExpertBiasBackward) -> Result<()> {
    const OP: &str = ExpertBiasBackward::OP;
    let r = op.check()?;
    let ExpertBiasBackward { places, dy, weighed, db, accumulate } = op;
    let (width, stride, dy) = (places.width, places.stride, dy.host::<T>(OP)?);
    let offsets = places.offsets.host::<u32>(OP)?;
    let order = weighed.as_ref().and_then(|w| w.order).map(|order| order.host::<u32>(OP)).transpose()?;
    let weights = weighed.as_ref().map(|w| w.weights.host::<f32>(OP)).transpose()?;
    let index = |row: usize| order.map_or(row, |order| order[row] as usize);
    if order.is_some_and(|order| order.iter().any(|&i| i as usize >= r)) {
        return Err(Error::op(OP, format!("an index is not below {r}")));
    }
    if let Some(db) = db {
        let db = db.host::<f32>(OP)?;
        for (e, rows) in groups(OP, offsets, r)?.enumerate() {
            let db = &mut db[e * stride..][..width];
            if !accumulate {
                db.fill(0.0);
            }
            for row in rows {
                let weight = weights.map_or(1.0, |weights| weights[index(row)]);
                let dy = &dy[row * width..(row + 1) * width];
                db.iter_mut().zip(dy).for_each(|(db, dy)| *db = dy.to_f32().mul_add(weight, *db));
            }
        }
    }
    if let Some(WeighedBias { bias, dweights, .. }) = weighed {
        let (bias, dweights) = (bias.host::<T>(OP)?, dweights.host::<f32>(OP)?);
        for (e, rows) in groups(OP, offsets, r)?.enumerate() {
            let bias = &bias[e * stride..][..width];
            for row in rows {
                let dy = &dy[row * width..(row + 1) * width];
                dweights[index(row)] += dy.iter().zip(bias).map(|(dy, b)| dy.to_f32() * b.to_f32()).sum::<f32>();
            }
        }
    }
    Ok(())
}
