//! Routing to experts, and the rows that they get. Never mixes the rows of two tokens.
use super::simd::{exp, sigmoid, sum};
use crate::ops::{
    Balance, CombineRows, PlaceRuns, Route, RouteBackward, RouteLoad, RouteRule, RouteScored, RouteScoredBackward,
    RouteShape, ScaleChosen, ScaleChosenBackward, Sigmoid, TakeRows, WeighRows,
};
use flatshard_base::{Error, Result, dtype::Float};

/// A row's softmax, in place.
fn softmax(row: &mut [f32]) {
    let max = row.iter().copied().fold(f32::MIN, f32::max);
    row.iter_mut().for_each(|x| *x = exp(*x - max));
    let factor = 1.0
        / sum(
            [&*row],
            #[inline(always)]
            |[x]| x,
        );
    row.iter_mut().for_each(|x| *x *= factor);
}

/// Assigns the largest probabilities' experts. A NaN is never larger, and never chosen twice.
fn top(probs: &[f32], chosen: &mut [u32]) {
    for j in 0..chosen.len() {
        let mut best: Option<usize> = None;
        for e in 0..probs.len() {
            let free = !chosen[..j].contains(&(e as u32));
            if free && best.is_none_or(|best| probs[e] > probs[best]) {
                best = Some(e);
            }
        }
        chosen[j] = best.unwrap_or(0) as u32;
    }
}

pub fn route(op: Route) -> Result<()> {
    op.check()?;
    routed(op, |probs, chosen, _| {
        softmax(probs);
        top(probs, chosen);
        Some(1.0)
    })
}

/// Routing by a rule. `scratch` holds E floats and two for each group.
#[inline(always)]
pub fn route_scored<T: Float>(op: RouteScored, scratch: &mut [f32]) -> Result<()> {
    const OP: &str = RouteScored::OP;
    op.check()?;
    let RouteScored { rule: RouteRule { sigmoid: by_sigmoid, groups, top_groups, scale, mixer, .. }, bias, route } = op;
    if let Some(near) = mixer {
        return routed(route, |logits, chosen, weights| {
            top(logits, chosen);
            for (k, weight) in weights.iter_mut().enumerate() {
                let best = logits[chosen[k] as usize];
                *weight = 1.0 / left(logits, chosen, k, near).map(|e| exp(logits[e] - best)).sum::<f32>();
            }
            None
        });
    }
    let bias = bias.map(|bias| bias.host::<T>(OP)).transpose()?;
    let each = route.shape.experts / groups;
    let (choice, rest) = scratch.split_at_mut(route.shape.experts);
    let (best, left) = rest.split_at_mut(groups);
    routed(route, |probs, chosen, _| {
        match by_sigmoid {
            true => probs.iter_mut().for_each(|x| *x = sigmoid(*x).0),
            false => softmax(probs),
        }
        choice.copy_from_slice(probs);
        if let Some(bias) = bias {
            choice.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias.to_f32());
        }
        if groups > 1 {
            for (best, group) in best.iter_mut().zip(choice.chunks_exact(each)) {
                let mut two = [0u32; 2];
                let count = if by_sigmoid { 2 } else { 1 };
                top(group, &mut two[..count]);
                *best = two[..count].iter().map(|&e| group[e as usize]).sum();
            }
            left.copy_from_slice(best);
            for _ in 0..top_groups {
                let mut first = [0u32];
                top(left, &mut first);
                left[first[0] as usize] = f32::NEG_INFINITY;
            }
            for (group, choice) in choice.chunks_exact_mut(each).enumerate() {
                if left[group] == best[group] {
                    choice.fill(f32::NEG_INFINITY);
                }
            }
        }
        top(choice, chosen);
        Some(scale)
    })
}

/// The experts from which choice `k` of a token is drawn, by [`RouteRule::mixer`].
fn left<'a>(logits: &'a [f32], chosen: &'a [u32], k: usize, near: f32) -> impl Iterator<Item = usize> + 'a {
    let best = logits[chosen[k] as usize];
    let is_far = move |e: usize| (best - logits[e]) / logits[e].abs().max(best) > near;
    (0..logits.len()).filter(move |&e| !chosen[..k].contains(&(e as u32)) && !is_far(e))
}

/// Assigns the results of [`Route`]. `choose` turns a token's logits into scores and chooses its experts; it returns
/// the factor of its weights, unless it assigned them.
fn routed(op: Route, mut choose: impl FnMut(&mut [f32], &mut [u32], &mut [f32]) -> Option<f32>) -> Result<()> {
    const OP: &str = Route::OP;
    let RouteShape { experts, top_k, normalize } = op.shape;
    let (probs, chosen, weights) = (op.probs.host::<f32>(OP)?, op.chosen.host::<u32>(OP)?, op.weights.host::<f32>(OP)?);
    let (offsets, order, places) = (op.offsets.host::<u32>(OP)?, op.order.host::<u32>(OP)?, op.places.host::<u32>(OP)?);
    let tokens =
        probs.chunks_exact_mut(experts).zip(chosen.chunks_exact_mut(top_k)).zip(weights.chunks_exact_mut(top_k));
    for ((probs, chosen), weights) in tokens {
        let Some(scale) = choose(probs, chosen, weights) else { continue };
        weights.iter_mut().zip(&*chosen).for_each(|(w, &e)| *w = probs[e as usize]);
        if normalize {
            let all: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|w| *w /= all);
        }
        if scale != 1.0 {
            weights.iter_mut().for_each(|w| *w *= scale);
        }
    }
    // A stable counting sort: offsets[e] first counts, then is the next free row of expert e - 1.
    offsets.fill(0);
    chosen.iter().for_each(|&e| offsets[e as usize + 1] += 1);
    (1..=experts).for_each(|e| offsets[e] += offsets[e - 1]);
    for (index, &e) in chosen.iter().enumerate() {
        let place = offsets[e as usize];
        offsets[e as usize] += 1;
        (order[place as usize], places[index]) = (index as u32, place);
    }
    (1..=experts).rev().for_each(|e| offsets[e] = offsets[e - 1]);
    offsets[0] = 0;
    Ok(())
}

/// With s = sum of the chosen p: dp = (dw - w . dw) / s if normalized, else dw; dlogit = p (dp - p . dp).
pub fn route_backward(op: RouteBackward) -> Result<()> {
    op.check()?;
    rows_backward(
        op,
        1.0,
        #[inline(always)]
        |probs, dlogits| {
            let dot = sum(
                [probs, &*dlogits],
                #[inline(always)]
                |[p, d]| p * d,
            );
            dlogits.iter_mut().zip(probs).for_each(|(d, p)| *d = p * (*d - dot));
        },
    )
}

/// Like [`route_backward`], with the weights' factor; with sigmoids, dlogit = p (1 - p) dp.
pub fn route_scored_backward(op: RouteScoredBackward) -> Result<()> {
    op.check()?;
    let RouteScoredBackward { rule: RouteRule { sigmoid, scale, mixer, .. }, route } = op;
    if let Some(near) = mixer {
        return mixed_backward(route, near);
    }
    rows_backward(route, scale, |probs, dlogits| {
        let dot: f32 = if sigmoid { 0.0 } else { probs.iter().zip(&*dlogits).map(|(p, d)| p * d).sum() };
        for (d, p) in dlogits.iter_mut().zip(probs) {
            *d = if sigmoid { p * (1.0 - p) * *d } else { p * (*d - dot) };
        }
    })
}

/// With choices k of weights w, and p the softmax of each choice: dlogit = sum over k of dw w ([it is chosen] - p).
fn mixed_backward(op: RouteBackward, near: f32) -> Result<()> {
    const OP: &str = RouteBackward::OP;
    let RouteShape { experts, top_k, .. } = op.shape;
    let (logits, chosen, weights) =
        (op.probs.host::<f32>(OP)?, op.chosen.host::<u32>(OP)?, op.weights.host::<f32>(OP)?);
    let (dweights, dlogits) = (op.dweights.host::<f32>(OP)?, op.dlogits.host::<f32>(OP)?);
    for (n, (logits, dlogits)) in logits.chunks_exact(experts).zip(dlogits.chunks_exact_mut(experts)).enumerate() {
        let of = n * top_k..(n + 1) * top_k;
        let (chosen, weights, dweights) = (&chosen[of.clone()], &weights[of.clone()], &dweights[of]);
        dlogits.fill(0.0);
        for (k, (w, dw)) in weights.iter().zip(dweights).enumerate() {
            let (d, best) = (w * dw, chosen[k] as usize);
            dlogits[best] += d;
            left(logits, chosen, k, near).for_each(|e| dlogits[e] -= d * w * exp(logits[e] - logits[best]));
        }
    }
    Ok(())
}

/// Assigns dp, and what `to_logits` makes of it, row by row, for weights with a factor.
#[inline(always)]
fn rows_backward(op: RouteBackward, scale: f32, to_logits: impl Fn(&[f32], &mut [f32])) -> Result<()> {
    const OP: &str = RouteBackward::OP;
    let RouteShape { experts, top_k, normalize } = op.shape;
    let (probs, chosen, weights) = (op.probs.host::<f32>(OP)?, op.chosen.host::<u32>(OP)?, op.weights.host::<f32>(OP)?);
    let (dweights, balance, dlogits) =
        (op.dweights.host::<f32>(OP)?, op.balance.host::<f32>(OP)?, op.dlogits.host::<f32>(OP)?);
    for (n, (probs, dlogits)) in probs.chunks_exact(experts).zip(dlogits.chunks_exact_mut(experts)).enumerate() {
        let of = n * top_k..(n + 1) * top_k;
        let (chosen, weights, dweights) = (&chosen[of.clone()], &weights[of.clone()], &dweights[of]);
        dlogits.copy_from_slice(balance);
        let mean: f32 = weights.iter().zip(dweights).map(|(w, dw)| w / scale * dw).sum();
        let all: f32 = chosen.iter().map(|&e| probs[e as usize]).sum();
        for (&e, dw) in chosen.iter().zip(dweights) {
            dlogits[e as usize] += scale * if normalize { (dw - mean) / all } else { *dw };
        }
        to_logits(probs, dlogits);
    }
    Ok(())
}

pub fn route_load(op: RouteLoad) -> Result<()> {
    const OP: &str = RouteLoad::OP;
    let experts = op.check()?;
    let (probs, offsets) = (op.probs.host::<f32>(OP)?, op.offsets.host::<u32>(OP)?);
    let (counts, sums) = (op.counts.host::<f64>(OP)?, op.sums.host::<f64>(OP)?);
    counts.iter_mut().zip(offsets.windows(2)).for_each(|(count, rows)| *count += (rows[1] - rows[0]) as f64);
    for row in probs.chunks_exact(experts) {
        sums.iter_mut().zip(row).for_each(|(sum, p)| *sum += *p as f64);
    }
    Ok(())
}

pub fn balance(op: Balance) -> Result<()> {
    const OP: &str = Balance::OP;
    let (layers, experts) = (op.check()?, op.shape.experts);
    let (counts, sums) = op.load.host::<f64>(OP)?.split_at(layers * experts);
    let (scale, grad) = (op.scale.host::<f32>(OP)?[0] as f64, op.grad.host::<f32>(OP)?);
    let (loss, reported) = op.report.host::<f64>(OP)?.split_at_mut(1);
    let rows = counts.iter().sum::<f64>() / op.shape.top_k as f64;
    let factor = if rows > 0.0 { experts as f64 / (rows * rows) } else { 0.0 };
    for (e, grad) in grad.iter_mut().enumerate() {
        let count: f64 = counts.iter().skip(e).step_by(experts).sum();
        loss[0] += factor * count * sums[e];
        *grad = (scale * factor * count) as f32;
    }
    reported.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
    Ok(())
}

fn inside(op: &'static str, indices: &[u32], of: usize) -> Result<()> {
    match indices.iter().all(|&i| (i as usize) < of) {
        true => Ok(()),
        false => Err(Error::op(op, format!("an index is not below {of}"))),
    }
}

#[inline(always)]
pub fn scale_chosen<T: Float>(op: ScaleChosen) -> Result<()> {
    const OP: &str = ScaleChosen::OP;
    op.check()?;
    let (chosen, factors) = (op.chosen.host::<u32>(OP)?, op.factors.host::<T>(OP)?);
    inside(OP, chosen, factors.len())?;
    for ((y, w), &e) in op.y.host::<f32>(OP)?.iter_mut().zip(op.weights.host::<f32>(OP)?).zip(chosen) {
        *y = factors[e as usize].to_f32() * w;
    }
    Ok(())
}

#[inline(always)]
pub fn scale_chosen_backward<T: Float>(op: ScaleChosenBackward) -> Result<()> {
    const OP: &str = ScaleChosenBackward::OP;
    op.check()?;
    let (chosen, factors, dy) = (op.chosen.host::<u32>(OP)?, op.factors.host::<T>(OP)?, op.dy.host::<f32>(OP)?);
    inside(OP, chosen, factors.len())?;
    if let Some(dfactors) = op.dfactors {
        let dfactors = dfactors.host::<f32>(OP)?;
        for ((d, w), &e) in dy.iter().zip(op.weights.host::<f32>(OP)?).zip(chosen) {
            dfactors[e as usize] += d * w;
        }
    }
    dy.iter_mut().zip(chosen).for_each(|(d, &e)| *d *= factors[e as usize].to_f32());
    Ok(())
}

#[inline(always)]
pub fn take_rows<T: Float>(op: TakeRows) -> Result<()> {
    const OP: &str = TakeRows::OP;
    let c = op.check()?;
    if c == 0 {
        return Ok(());
    }
    let (order, x, y) = (op.order.host::<u32>(OP)?, op.x.host::<T>(OP)?, op.y.host::<T>(OP)?);
    inside(OP, order, x.len() / c * op.top_k)?;
    for (y, &at) in y.chunks_exact_mut(c).zip(order) {
        y.copy_from_slice(&x[at as usize / op.top_k * c..][..c]);
    }
    Ok(())
}

pub fn place_runs(op: PlaceRuns) -> Result<()> {
    const OP: &str = PlaceRuns::OP;
    op.check()?;
    let (runs, order, places) = (op.runs.host::<u32>(OP)?, op.order.host::<u32>(OP)?, op.places.host::<u32>(OP)?);
    for run in runs.chunks_exact(3) {
        let end = run[2] as usize + run[0].max(run[1]) as usize;
        if end > order.len() {
            return Err(Error::op(OP, format!("a run ends at {end} of {} rows", order.len())));
        }
        for i in 0..run[2] {
            let (row, place) = (run[0] + i, run[1] + i);
            (order[row as usize], places[place as usize]) = (place, row);
        }
    }
    Ok(())
}

/// `sums`: C values of scratch.
#[inline(always)]
pub fn combine_rows<T: Float>(op: CombineRows, sums: &mut [f32]) -> Result<()> {
    const OP: &str = CombineRows::OP;
    let (n, c) = (op.check()?, op.width);
    let places = op.places.map(|places| places.host::<u32>(OP)).transpose()?;
    let weights = op.weights.map(|weights| weights.host::<f32>(OP)).transpose()?;
    let (x, y) = (op.x.host::<T>(OP)?, op.y.host::<T>(OP)?);
    places.map_or(Ok(()), |places| inside(OP, places, n * op.top_k))?;
    for (n, y) in y.chunks_exact_mut(c).enumerate() {
        match op.accumulate {
            true => sums.iter_mut().zip(&*y).for_each(|(sum, y)| *sum = y.to_f32()),
            false => sums.fill(0.0),
        }
        for index in n * op.top_k..(n + 1) * op.top_k {
            let place = places.map_or(index, |places| places[index] as usize);
            let weight = weights.map_or(1.0, |weights| weights[index]);
            sums.iter_mut().zip(&x[place * c..][..c]).for_each(|(sum, x)| *sum = x.to_f32().mul_add(weight, *sum));
        }
        y.iter_mut().zip(&*sums).for_each(|(y, sum)| *y = T::from_f32(*sum));
    }
    Ok(())
}

#[inline(always)]
pub fn weigh_rows<T: Float>(op: WeighRows) -> Result<()> {
    const OP: &str = WeighRows::OP;
    let f = op.check()?;
    if f == 0 {
        return Ok(());
    }
    let (order, weights) = (op.order.map(|order| order.host::<u32>(OP)).transpose()?, op.weights.host::<f32>(OP)?);
    let (act, dact, dweights) = (op.act.host::<T>(OP)?, op.dact.host::<T>(OP)?, op.dweights.host::<f32>(OP)?);
    order.map_or(Ok(()), |order| inside(OP, order, weights.len()))?;
    for (r, (act, dact)) in act.chunks_exact_mut(f).zip(dact.chunks_exact_mut(f)).enumerate() {
        let index = order.map_or(r, |order| order[r] as usize);
        let weight = weights[index];
        dweights[index] = sum(
            [&*act, &*dact],
            #[inline(always)]
            |[act, dact]| act * dact,
        );
        act.iter_mut().chain(dact).for_each(|x| *x = T::from_f32(x.to_f32() * weight));
    }
    Ok(())
}

pub fn sigmoid_rows(op: Sigmoid) -> Result<()> {
    const OP: &str = Sigmoid::OP;
    op.check()?;
    let x = op.x.host::<f32>(OP)?;
    match op.dy {
        None => x.iter_mut().for_each(|x| *x = sigmoid(*x).0),
        Some(dy) => dy.host::<f32>(OP)?.iter_mut().zip(x).for_each(|(dy, s)| *dy *= *s * (1.0 - *s)),
    }
    Ok(())
}
