//! What gpt-oss adds: scores without a value in attention, a clamped activation of alternating gate and up, and biases
//! of experts.
use super::harness::*;
use crate::common::reference::{self, Real};
use flatshard_device::Buf;
use flatshard_device::ops::{
    AttentionShape, BiasPlaces, ClampedGlu, ClampedGluBackward, ExpertBias, ExpertBiasBackward, GluClamp, HeadSinks,
    HeadSinksBackward, WeighedBias,
};

/// Rows, heads and elements of a head.
const HEADS: [(usize, usize, usize); 4] = [(1, 1, 1), (5, 3, 10), (9, 2, 64), (300, 2, 33)];

#[test]
fn sink() {
    fn with<R: Real>(sinks: &[f64], o: &[f64], lse: &[f64]) -> Outputs {
        let (heads, rows) = (sinks.len(), lse.len() / sinks.len());
        let dim = o.len() / lse.len();
        let sum = |head: usize, row: usize| R::of(lse[head * rows + row]);
        let kept = |head: usize, row: usize| reference::sigmoid(sum(head, row) - R::of(sinks[head]));
        let of_o = |(i, x): (usize, &f64)| (R::of(*x) * kept(i / dim % heads, i / dim / heads)).f64();
        // log(exp(lse) + exp(sink)), whose log is that of the sum's share that attention had.
        let of_lse = |i: usize| (sum(i / rows, i % rows) - kept(i / rows, i % rows).ln()).f64();
        vec![o.iter().enumerate().map(of_o).collect(), (0..heads * rows).map(of_lse).collect()]
    }
    for (rows, heads, dim) in HEADS {
        let (sinks, o) = (normal(1, heads), normal(2, rows * heads * dim));
        let lse: Vec<f64> = normal(3, rows * heads).iter().map(|x| 4.0 * x).collect();
        let operands = [x("sinks", &sinks), y("o", &o), f32_out("lse", &lse)];
        let (exact, naive) = (with::<f64>(&sinks, &o, &lse), with::<f32>(&sinks, &o, &lse));
        let shape = AttentionShape { heads, kv_heads: 1, head_dim: dim, scale: 1.0, window: 0, softcap: 0.0 };
        conform("sink", FORWARD, &operands, exact, naive, &|dev, bufs| {
            let [sinks, o, lse] = bufs else { unreachable!() };
            dev.sink(HeadSinks { shape, sinks: sinks.view(), o: o.view_mut(), lse: lse.view_mut() })
        });
    }
}

#[test]
fn sink_backward() {
    fn with<R: Real>(sinks: &[f64], lse: &[f64], delta: &[f64]) -> Outputs {
        let rows = lse.len() / sinks.len();
        let of = |(head, sink): (usize, &f64)| {
            let of_row = |i: usize| (R::of(*sink) - R::of(lse[i])).exp() * R::of(delta[i]);
            let sum = (head * rows..(head + 1) * rows).map(of_row).fold(R::of(0.0), |sum, x| sum + x);
            (R::of(before(sinks.len())[head]) - sum).f64()
        };
        vec![sinks.iter().enumerate().map(of).collect()]
    }
    for (rows, heads, _) in HEADS {
        let (sinks, delta) = (normal(1, heads), normal(2, rows * heads));
        let lse: Vec<f64> = normal(3, rows * heads).iter().map(|x| x + 2.0).map(rounded).collect();
        let operands =
            [x("sinks", &sinks), f32_in("lse", &lse), f32_in("delta", &delta), f32_out("dsinks", &before(heads))];
        let (exact, naive) = (with::<f64>(&sinks, &lse, &delta), with::<f32>(&sinks, &lse, &delta));
        conform("sink_backward", GRADIENT, &operands, exact, naive, &|dev, bufs| {
            let [sinks, lse, delta, dsinks] = bufs else { unreachable!() };
            let (lse, delta) = (lse.view(), delta.view());
            dev.sink_backward(HeadSinksBackward { sinks: sinks.view(), lse, delta, dsinks: dsinks.view_mut() })
        });
    }
}

const CLAMP: GluClamp = GluClamp { alpha: 1.702, limit: 2.5 };

/// Gate, up, and what they are within the limits.
fn clamped<R: Real>(pair: &[f64]) -> [R; 2] {
    let limit = CLAMP.limit as f64;
    [R::of(pair[0].min(limit)), R::of(pair[1].clamp(-limit, limit))]
}

#[test]
fn clamped_glu() {
    fn of<R: Real>(gate_up: &[f64]) -> Outputs {
        let unit = |pair: &[f64]| {
            let [g, u] = clamped::<R>(pair);
            ((u + R::of(1.0)) * (g * reference::sigmoid(g * R::of(CLAMP.alpha as f64)))).f64()
        };
        vec![gate_up.chunks_exact(2).map(unit).collect()]
    }
    for n in [0, 1, 17, 64, 1003] {
        let gate_up: Vec<f64> = normal(1, 2 * n).iter().map(|x| 2.0 * x).collect();
        let operands = [x("gate_up", &gate_up), y("y", &before(n))];
        conform("clamped_glu", FORWARD, &operands, of::<f64>(&gate_up), of::<f32>(&gate_up), &|dev, bufs| {
            let [gate_up, y] = bufs else { unreachable!() };
            dev.clamped_glu(ClampedGlu { clamp: CLAMP, gate_up: gate_up.view(), y: y.view_mut() })
        });
    }
}

#[test]
fn clamped_glu_backward() {
    fn of<R: Real>(gate_up: &[f64], dy: &[f64]) -> Outputs {
        let unit = |(pair, dy): (&[f64], &f64)| {
            let ([g, u], alpha, dy) = (clamped::<R>(pair), R::of(CLAMP.alpha as f64), R::of(*dy));
            let s = reference::sigmoid(g * alpha);
            let slope = s + g * alpha * s * reference::sigmoid(-(g * alpha));
            let grads = [dy * (u + R::of(1.0)) * slope, dy * g * s].map(Real::f64);
            let inside = [pair[0] == g.f64(), pair[1] == u.f64()];
            [0, 1].map(|i| if inside[i] { grads[i] } else { 0.0 })
        };
        vec![gate_up.chunks_exact(2).zip(dy).flat_map(unit).collect()]
    }
    for n in [0, 1, 17, 64, 1003] {
        let gate_up: Vec<f64> = normal(1, 2 * n).iter().map(|x| 2.0 * x).collect();
        let dy = normal(2, n);
        let operands = [x("gate_up", &gate_up), x("dy", &dy), y("dgate_up", &before(2 * n))];
        let (exact, naive) = (of::<f64>(&gate_up, &dy), of::<f32>(&gate_up, &dy));
        conform("clamped_glu_backward", GRADIENT, &operands, exact, naive, &|dev, bufs| {
            let [gate_up, dy, dgate_up] = bufs else { unreachable!() };
            let (gate_up, dy, dgate_up) = (gate_up.view(), dy.view(), dgate_up.view_mut());
            dev.clamped_glu_backward(ClampedGluBackward { clamp: CLAMP, gate_up, dy, dgate_up })
        });
    }
}

/// Rows of each expert, some of which have none; rows without an expert behind them; width and stride.
const BIASES: [(&[u32], usize, usize, usize); 3] =
    [(&[0, 3], 0, 1, 1), (&[0, 4, 4, 9], 2, 37, 50), (&[0, 0, 70], 0, 300, 300)];
/// Of each of the rows that have one.
fn expert_of(offsets: &[u32], row: usize) -> usize {
    offsets[1..].iter().filter(|&&end| end as usize <= row).count()
}

#[test]
fn expert_bias() {
    fn of<R: Real>(offsets: &[u32], [width, stride]: [usize; 2], bias: &[f64], y: &[f64]) -> Outputs {
        let experts = offsets.len() - 1;
        let unit = |(i, y): (usize, &f64)| match expert_of(offsets, i / width) {
            e if e < experts => (R::of(*y) + R::of(bias[e * stride + i % width])).f64(),
            _ => *y,
        };
        vec![y.iter().enumerate().map(unit).collect()]
    }
    for (offsets, more, width, stride) in BIASES {
        let (experts, rows) = (offsets.len() - 1, offsets[offsets.len() - 1] as usize + more);
        let (bias, given, sizes) =
            (normal(1, (experts - 1) * stride + width), normal(2, rows * width), [width, stride]);
        let (exact, naive) = (of::<f64>(offsets, sizes, &bias, &given), of::<f32>(offsets, sizes, &bias, &given));
        for dev in devices() {
            for dtype in FLOATS {
                let [bias, mut y] = [&bias, &given].map(|values| buf(&*dev, dtype, values));
                let of_offsets =
                    buf(&*dev, flatshard_base::DType::U32, &offsets.iter().map(|&o| o.into()).collect::<Vec<f64>>());
                let places = BiasPlaces { width, stride, offsets: of_offsets.view() };
                dev.expert_bias(ExpertBias { places, bias: bias.view(), y: y.view_mut() }).unwrap();
                let naive = read(&*dev, &buf(&*dev, dtype, &naive[0]));
                compare(
                    &format!("expert_bias on {} in {dtype}", dev.name()),
                    FORWARD,
                    &read(&*dev, &y),
                    &exact[0],
                    &naive,
                );
            }
        }
    }
}

#[test]
fn expert_bias_backward() {
    /// Gradients of biases, added to those before or not, and of weights.
    fn of<R: Real>(
        offsets: &[u32],
        [width, stride]: [usize; 2],
        [bias, dy, weights]: [&[f64]; 3],
        order: Option<&[u32]>,
        adds: bool,
    ) -> Outputs {
        let (experts, rows) = (offsets.len() - 1, dy.len() / width);
        let mut db: Vec<R> = before(bias.len()).into_iter().map(R::of).collect();
        let mut dweights: Vec<R> = before(rows).into_iter().map(R::of).collect();
        for e in 0..if adds { 0 } else { experts } {
            db[e * stride..e * stride + width].fill(R::of(0.0));
        }
        for row in 0..offsets[experts] as usize {
            let (e, at) = (expert_of(offsets, row), order.map_or(row, |order| order[row] as usize));
            let mut dot = R::of(0.0);
            for i in 0..width {
                let dy = R::of(dy[row * width + i]);
                db[e * stride + i] = db[e * stride + i] + dy * R::of(weights[at]);
                dot = dot + dy * R::of(bias[e * stride + i]);
            }
            dweights[at] = dweights[at] + dot;
        }
        vec![reference::f64s(&db), reference::f64s(&dweights)]
    }
    for ((offsets, more, width, stride), (mapped, adds)) in
        BIASES.into_iter().flat_map(|of| [(false, true), (true, false)].map(|how| (of, how)))
    {
        use flatshard_base::DType::{F32, U32};
        let (experts, rows) = (offsets.len() - 1, offsets[offsets.len() - 1] as usize + more);
        let (bias, dy) = (normal(1, (experts - 1) * stride + width), normal(2, rows * width));
        let (weights, order) = (normal(3, rows), (0..rows as u32).rev().collect::<Vec<u32>>());
        let (order, sizes) = (mapped.then_some(&order[..]), [width, stride]);
        let given = [&bias[..], &dy, &weights];
        let exact = of::<f64>(offsets, sizes, given, order, adds);
        let naive = of::<f32>(offsets, sizes, given, order, adds);
        let words = |words: &[u32]| words.iter().map(|&word| word.into()).collect::<Vec<f64>>();
        for dev in devices() {
            for dtype in FLOATS {
                let [of_bias, dy] = [&bias, &dy].map(|values| buf(&*dev, dtype, values));
                let of_weights = buf(&*dev, F32, &weights);
                let [mut db, mut dweights] = [bias.len(), rows].map(|n| buf(&*dev, F32, &before(n)));
                let of_offsets = buf(&*dev, U32, &words(offsets));
                let of_order = order.map(|order| buf(&*dev, U32, &words(order)));
                let weighed = WeighedBias {
                    bias: of_bias.view(),
                    order: of_order.as_ref().map(Buf::view),
                    weights: of_weights.view(),
                    dweights: dweights.view_mut(),
                };
                dev.expert_bias_backward(ExpertBiasBackward {
                    places: BiasPlaces { width, stride, offsets: of_offsets.view() },
                    dy: dy.view(),
                    weighed: Some(weighed),
                    db: Some(db.view_mut()),
                    accumulate: adds,
                })
                .unwrap();
                let label = format!("expert_bias_backward on {} in {dtype}", dev.name());
                compare(&format!("{label}: db"), GRADIENT, &read(&*dev, &db), &exact[0], &naive[0]);
                compare(&format!("{label}: dweights"), GRADIENT, &read(&*dev, &dweights), &exact[1], &naive[1]);
            }
        }
    }
}
