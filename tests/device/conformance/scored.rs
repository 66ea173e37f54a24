//! Routers that choose experts by scores, biases and groups, and factors of experts.
use super::experts::{floats, given_backward, largest, of_backward, sorted, u32_out};
use super::harness::*;
use crate::common::reference::{self, Real};
use flatshard_device::ops::{
    Route, RouteRule, RouteScored, RouteScoredBackward, RouteShape, ScaleBy, ScaleChosen, ScaleChosenBackward,
};

/// Tokens, experts, experts per token, groups, groups of a token.
const ROUTES: [(usize, usize, usize, usize, usize); 7] = [
    (1, 2, 1, 1, 1),
    (5, 4, 2, 2, 1),
    (37, 12, 3, 3, 2),
    (3, 64, 6, 32, 3),
    (9, 160, 8, 8, 3),
    (200, 33, 2, 1, 1),
    (300, 10, 5, 5, 3),
];

fn cases() -> impl Iterator<Item = (usize, RouteShape, RouteRule)> {
    let kinds =
        [(false, false, true, 1.0), (true, true, true, 2.5), (true, false, false, 1.0), (false, true, false, 16.0)];
    ROUTES.iter().flat_map(move |&(n, experts, top_k, groups, top_groups)| {
        kinds.map(|(sigmoid, biased, normalize, scale)| {
            let rule = RouteRule { sigmoid, biased, groups, top_groups, scale, mixer: None };
            (n, RouteShape { experts, top_k, normalize }, rule)
        })
    })
}

fn scores<R: Real>(rule: RouteRule, row: &[f64]) -> Vec<R> {
    if rule.sigmoid {
        return row.iter().map(|&x| reference::sigmoid(R::of(x))).collect();
    }
    let top = row.iter().copied().fold(f64::MIN, f64::max);
    let all: Vec<R> = row.iter().map(|&x| (R::of(x) - R::of(top)).exp()).collect();
    let sum = all.iter().fold(R::of(0.0), |sum, &x| sum + x);
    all.iter().map(|&x| x / sum).collect()
}

/// A token's experts. Where two are about equally good, they are equal, so that rounding makes no other choice.
fn choice(shape: RouteShape, rule: RouteRule, row: &[f64], bias: &[f64]) -> Vec<usize> {
    let mut values: Vec<f64> = scores::<f64>(rule, row).iter().zip(bias).map(|(p, bias)| p + bias).collect();
    let each = shape.experts / rule.groups;
    let good = |group: &[f64]| {
        let best = largest(group, if rule.sigmoid { 2.min(each) } else { 1 });
        best.iter().map(|&e| group[e]).sum::<f64>()
    };
    let groups: Vec<f64> = values.chunks(each).map(good).collect();
    let kept = largest(&groups, rule.top_groups);
    for (e, value) in values.iter_mut().enumerate() {
        if !kept.contains(&(e / each)) {
            *value = f64::MIN;
        }
    }
    for all in [&values, &groups] {
        let mut all = all.clone();
        all.sort_by(f64::total_cmp);
        assert!(all.windows(2).all(|w| w[0] == w[1] || w[1] - w[0] > 1e-7), "a choice that rounding makes");
    }
    largest(&values, shape.top_k)
}

/// Scores, choices, weights, then offsets, order and places.
fn routed<R: Real>(shape: RouteShape, rule: RouteRule, logits: &[f64], bias: &[f64]) -> Outputs {
    let (mut all, mut chosen, mut weights) = (vec![], vec![], vec![]);
    for row in logits.chunks(shape.experts) {
        let (of, choice) = (scores::<R>(rule, row), choice(shape, rule, row, bias));
        let sum = choice.iter().fold(R::of(0.0), |sum, &e| sum + of[e]);
        let weight = |&e: &usize| (if shape.normalize { of[e] / sum } else { of[e] }) * R::of(rule.scale as f64);
        weights.extend(choice.iter().map(weight));
        chosen.extend(choice);
        all.extend(of);
    }
    let [offsets, order, places] = sorted(&chosen, shape.experts);
    let [chosen, offsets, order, places] = [&chosen, &offsets, &order, &places].map(|indices| floats(indices));
    vec![reference::f64s(&all), chosen, reference::f64s(&weights), offsets, order, places]
}

/// Few different logits and biases, so that most tokens have experts alike.
fn given(n: usize, shape: RouteShape, rule: RouteRule) -> [Vec<f64>; 2] {
    let logits = normal(3, n * shape.experts).iter().map(|x| (x * 8.0).abs().round() / 4.0).collect();
    let bias = (0..shape.experts).map(|e| if rule.biased { (e % 3) as f64 / 16.0 - 0.125 } else { 0.0 }).collect();
    [logits, bias]
}

#[test]
fn route_scored() {
    for (n, shape, rule) in cases() {
        let ([logits, bias], rows) = (given(n, shape, rule), n * shape.top_k);
        let mut operands = vec![
            f32_out("probs", &logits),
            u32_out("chosen", rows),
            f32_out("weights", &vec![7.0; rows]),
            u32_out("offsets", shape.experts + 1),
            u32_out("order", rows),
            u32_out("places", rows),
        ];
        operands.extend(rule.biased.then(|| x("bias", &bias)));
        let (exact, naive) = (routed::<f64>(shape, rule, &logits, &bias), routed::<f32>(shape, rule, &logits, &bias));
        let label = format!("route_scored {n} tokens, {shape:?} {rule:?}");
        conform(&label, GRADIENT, &operands, exact, naive, &|dev, bufs| {
            let [probs, chosen, weights, offsets, order, places, bias @ ..] = bufs else { unreachable!() };
            let route = Route {
                shape,
                probs: probs.view_mut(),
                chosen: chosen.view_mut(),
                weights: weights.view_mut(),
                offsets: offsets.view_mut(),
                order: order.view_mut(),
                places: places.view_mut(),
            };
            dev.route_scored(RouteScored { rule, bias: bias.first().map(|bias| bias.view()), route })
        });
    }
}

/// dlogits, from scores and weights that need not belong together.
fn backward<R: Real>(
    shape: RouteShape,
    rule: RouteRule,
    chosen: &[usize],
    [p, w, dw, balance]: [&[f64]; 4],
) -> Outputs {
    let (RouteShape { experts, top_k, normalize }, scale) = (shape, R::of(rule.scale as f64));
    let mut dlogits = vec![];
    for (n, p) in p.chunks(experts).enumerate() {
        let of = n * top_k..(n + 1) * top_k;
        let (chosen, p) = (&chosen[of.clone()], reference::reals::<R>(p));
        let (w, dw): (Vec<R>, Vec<R>) = (reference::reals(&w[of.clone()]), reference::reals(&dw[of]));
        let mean = w.iter().zip(&dw).fold(R::of(0.0), |sum, (&w, &dw)| sum + w / scale * dw);
        let all = chosen.iter().fold(R::of(0.0), |sum, &e| sum + p[e]);
        let mut d = reference::reals::<R>(balance);
        for (&e, &dw) in chosen.iter().zip(&dw) {
            d[e] = d[e] + scale * if normalize { (dw - mean) / all } else { dw };
        }
        let dot = p.iter().zip(&d).fold(R::of(0.0), |sum, (&p, &d)| sum + p * d);
        let of = |(&p, &d): (&R, &R)| if rule.sigmoid { p * (R::of(1.0) - p) * d } else { p * (d - dot) };
        dlogits.extend(p.iter().zip(&d).map(of));
    }
    vec![reference::f64s(&dlogits)]
}

#[test]
fn route_scored_backward() {
    for (n, shape, rule) in cases() {
        let [logits, bias] = given(n, shape, rule);
        let of = routed::<f64>(shape, rule, &logits, &bias);
        let (chosen, given, operands) = given_backward(n, shape, &of);
        let given = given.each_ref().map(Vec::as_slice);
        let (a, b) = (backward::<f64>(shape, rule, &chosen, given), backward::<f32>(shape, rule, &chosen, given));
        let label = format!("route_scored_backward {n} tokens, {shape:?} {rule:?}");
        // Differences of sums, which round in another order.
        conform(&label, 4.0 * GRADIENT, &operands, a, b, &|dev, bufs| {
            let route = of_backward(shape, bufs);
            dev.route_scored_backward(RouteScoredBackward { rule, route })
        });
    }
}

/// Rows and experts.
const FACTORS: [(usize, usize); 4] = [(1, 1), (5, 3), (64, 40), (3000, 7)];

fn factored(n: usize, experts: usize) -> (Vec<u32>, [Operand; 3]) {
    let chosen: Vec<u32> = (0..n).map(|i| (i * 7 % experts) as u32).collect();
    let given = [
        u32_in("chosen", &chosen),
        operand("factors", Kind::Compute, Role::Scratch, normal(1, experts)),
        f32_in("weights", &normal(2, n)),
    ];
    (chosen, given)
}

#[test]
fn scale_by() {
    for (dev, n) in devices().iter().flat_map(|dev| [0, 1, 17, 1003].map(|n| (&**dev, n))) {
        let (a, factor) = (normal(1, n), rounded(-0.37));
        let exact: Vec<f64> = a.iter().map(|x| x * factor).collect();
        for dtype in FLOATS {
            let (mut x, one) = (buf(dev, dtype, &a), buf(dev, dtype, &[factor]));
            dev.scale_by(ScaleBy { factor: one.view(), x: x.view_mut() }).unwrap();
            let naive = read(dev, &buf(dev, dtype, &exact));
            compare(&format!("scale_by on {} in {dtype}", dev.name()), FORWARD, &read(dev, &x), &exact, &naive);
            let two = buf(dev, dtype, &[factor; 2]);
            assert!(dev.scale_by(ScaleBy { factor: two.view(), x: x.view_mut() }).is_err());
        }
    }
}

#[test]
fn scale_chosen() {
    fn of<R: Real>(chosen: &[u32], given: &[Operand; 3]) -> Outputs {
        let [_, factors, weights] = given.each_ref().map(|o| reference::reals::<R>(&o.values));
        vec![chosen.iter().zip(weights).map(|(&e, w)| (factors[e as usize] * w).f64()).collect()]
    }
    for (n, experts) in FACTORS {
        let (chosen, given) = factored(n, experts);
        let (exact, naive) = (of::<f64>(&chosen, &given), of::<f32>(&chosen, &given));
        let [a, b, c] = given;
        conform("scale_chosen", FORWARD, &[a, b, c, f32_out("y", &before(n))], exact, naive, &|dev, bufs| {
            let [chosen, factors, weights, y] = bufs else { unreachable!() };
            let (chosen, factors, weights) = (chosen.view(), factors.view(), weights.view());
            dev.scale_chosen(ScaleChosen { chosen, factors, weights, y: y.view_mut() })
        });
    }
}

#[test]
fn scale_chosen_backward() {
    fn of<R: Real>(chosen: &[u32], given: &[Operand; 3], dy: &[f64]) -> Outputs {
        let [_, factors, weights] = given.each_ref().map(|o| reference::reals::<R>(&o.values));
        let mut dfactors: Vec<R> = reference::reals(&before(factors.len()));
        for ((&e, &w), &d) in chosen.iter().zip(&weights).zip(dy) {
            dfactors[e as usize] = dfactors[e as usize] + R::of(d) * w;
        }
        let dy = chosen.iter().zip(dy).map(|(&e, &d)| (factors[e as usize] * R::of(d)).f64()).collect();
        vec![dy, reference::f64s(&dfactors)]
    }
    for (n, experts) in FACTORS {
        let ((chosen, given), dy) = (factored(n, experts), normal(3, n));
        let (exact, naive) = (of::<f64>(&chosen, &given, &dy), of::<f32>(&chosen, &given, &dy));
        let [a, b, c] = given;
        let operands = [a, b, c, f32_out("dy", &dy), f32_out("dfactors", &before(experts))];
        conform("scale_chosen_backward", GRADIENT, &operands, exact, naive, &|dev, bufs| {
            let [chosen, factors, weights, dy, dfactors] = bufs else { unreachable!() };
            let (chosen, factors, weights) = (chosen.view(), factors.view(), weights.view());
            let (dy, dfactors) = (dy.view_mut(), Some(dfactors.view_mut()));
            dev.scale_chosen_backward(ScaleChosenBackward { chosen, factors, weights, dy, dfactors })
        });
    }
}

/// Rules by which each weight is a softmax among experts that are nearly as good, with ties, and with few or many of
/// them.
fn mixers() -> impl Iterator<Item = (usize, RouteShape, RouteRule)> {
    ROUTES.into_iter().flat_map(|(n, experts, top_k, ..)| {
        let shape = RouteShape { experts, top_k, normalize: false };
        [0.02, 0.31].map(|near| (n, shape, RouteRule { mixer: Some(near), ..RouteRule::PLAIN }))
    })
}

/// The softmax of each choice of a token: 0 for the experts of earlier choices, and for those that are not nearly as
/// good.
fn softmaxes<R: Real>(rule: RouteRule, row: &[f64], chosen: &[usize]) -> Vec<Vec<R>> {
    let near = rule.mixer.unwrap() as f64;
    let of = |k: usize| {
        let best = row[chosen[k]];
        let is_far = |e: usize| (best - row[e]) / row[e].abs().max(best) > near;
        let is_left = |e: usize| !chosen[..k].contains(&e) && !is_far(e);
        let all = (0..row.len()).map(|e| match is_left(e) {
            true => (R::of(row[e]) - R::of(best)).exp(),
            false => R::of(0.0),
        });
        let all: Vec<R> = all.collect();
        let sum = all.iter().fold(R::of(0.0), |sum, &x| sum + x);
        all.iter().map(|&x| x / sum).collect()
    };
    (0..chosen.len()).map(of).collect()
}

/// As [`routed`].
fn mixed<R: Real>(shape: RouteShape, rule: RouteRule, logits: &[f64]) -> Outputs {
    let (mut chosen, mut weights) = (vec![], vec![]);
    for row in logits.chunks(shape.experts) {
        let choice = largest(row, shape.top_k);
        weights.extend(softmaxes::<R>(rule, row, &choice).iter().zip(&choice).map(|(p, &e)| p[e]));
        chosen.extend(choice);
    }
    let [offsets, order, places] = sorted(&chosen, shape.experts);
    let [chosen, offsets, order, places] = [&chosen, &offsets, &order, &places].map(|indices| floats(indices));
    vec![logits.to_vec(), chosen, reference::f64s(&weights), offsets, order, places]
}

/// dlogits, from the weights and their gradients.
fn mixed_backward<R: Real>(
    shape: RouteShape,
    rule: RouteRule,
    logits: &[f64],
    chosen: &[usize],
    [w, dw]: [&[f64]; 2],
) -> Outputs {
    let mut dlogits = vec![];
    for (n, (row, chosen)) in logits.chunks(shape.experts).zip(chosen.chunks(shape.top_k)).enumerate() {
        let mut d = vec![R::of(0.0); row.len()];
        for (k, p) in softmaxes::<R>(rule, row, chosen).iter().enumerate() {
            let at = n * shape.top_k + k;
            let of = R::of(w[at]) * R::of(dw[at]);
            d[chosen[k]] = d[chosen[k]] + of;
            d.iter_mut().zip(p).for_each(|(d, &p)| *d = *d - of * p);
        }
        dlogits.extend(d);
    }
    vec![reference::f64s(&dlogits)]
}

#[test]
fn choices_are_mixed() {
    for (n, shape, rule) in mixers() {
        let (logits, rows) = (given(n, shape, rule)[0].clone(), n * shape.top_k);
        let logits: Vec<f64> = logits.iter().enumerate().map(|(i, x)| if i % 5 == 0 { 0.0 - x } else { *x }).collect();
        let operands = [
            f32_out("probs", &logits),
            u32_out("chosen", rows),
            f32_out("weights", &vec![7.0; rows]),
            u32_out("offsets", shape.experts + 1),
            u32_out("order", rows),
            u32_out("places", rows),
        ];
        let (exact, naive) = (mixed::<f64>(shape, rule, &logits), mixed::<f32>(shape, rule, &logits));
        let label = format!("choices of {n} tokens, {shape:?} {rule:?}");
        conform(&label, GRADIENT, &operands, exact.clone(), naive, &|dev, bufs| {
            let [probs, chosen, weights, offsets, order, places] = bufs else { unreachable!() };
            let route = Route {
                shape,
                probs: probs.view_mut(),
                chosen: chosen.view_mut(),
                weights: weights.view_mut(),
                offsets: offsets.view_mut(),
                order: order.view_mut(),
                places: places.view_mut(),
            };
            dev.route_scored(RouteScored { rule, bias: None, route })
        });
        let (chosen, given, operands) = given_backward(n, shape, &exact);
        let given = [&given[1][..], &given[2]];
        let a = mixed_backward::<f64>(shape, rule, &logits, &chosen, given);
        let b = mixed_backward::<f32>(shape, rule, &logits, &chosen, given);
        conform(&label, 4.0 * GRADIENT, &operands, a, b, &|dev, bufs| {
            dev.route_scored_backward(RouteScoredBackward { rule, route: of_backward(shape, bufs) })
        });
    }
}
