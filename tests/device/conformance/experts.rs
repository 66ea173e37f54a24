//! Mixtures of experts: routing, the load-balancing loss, and the rows that experts get.
use super::harness::*;
use crate::common::reference::{self, Real, each};
use flatshard_base::{DType, Result};
use flatshard_device::ops::{
    Balance, CombineRows, PlaceRuns, Route, RouteBackward, RouteLoad, RouteShape, Sigmoid, TakeRows, WeighRows,
};
use flatshard_device::{Buf, Device};

/// Tokens, experts, experts per token.
const ROUTES: [(usize, usize, usize); 7] =
    [(1, 1, 1), (5, 4, 2), (37, 8, 3), (3, 60, 4), (9, 128, 8), (200, 33, 2), (1100, 5, 5)];

fn shapes() -> impl Iterator<Item = (usize, RouteShape)> {
    ROUTES
        .iter()
        .flat_map(|&(n, experts, top_k)| [false, true].map(|normalize| (n, RouteShape { experts, top_k, normalize })))
}

pub fn floats(indices: &[usize]) -> Vec<f64> {
    indices.iter().map(|&i| i as f64).collect()
}

/// The indices of each token's K largest, the lower ones first where they are equal.
pub fn largest(values: &[f64], top_k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].partial_cmp(&values[a]).unwrap());
    order.truncate(top_k);
    order
}

/// Offsets, order and places of choices.
pub fn sorted(chosen: &[usize], experts: usize) -> [Vec<usize>; 3] {
    let mut order: Vec<usize> = (0..chosen.len()).collect();
    order.sort_by_key(|&i| chosen[i]);
    let mut places = vec![0; chosen.len()];
    order.iter().enumerate().for_each(|(row, &i)| places[i] = row);
    [(0..=experts).map(|e| chosen.iter().filter(|&&c| c < e).count()).collect(), order, places]
}

/// Probabilities, choices, weights, then offsets, order and places.
fn routed<R: Real>(shape: RouteShape, logits: &[f64]) -> Outputs {
    let RouteShape { experts, top_k, normalize } = shape;
    let (mut probs, mut chosen, mut weights) = (vec![], vec![], vec![]);
    for row in logits.chunks(experts) {
        let top = row.iter().copied().fold(f64::MIN, f64::max);
        let all: Vec<R> = row.iter().map(|&x| (R::of(x) - R::of(top)).exp()).collect();
        let sum = all.iter().fold(R::of(0.0), |sum, &x| sum + x);
        let of: Vec<R> = all.iter().map(|&x| x / sum).collect();
        // By logits, so that rounding makes no other choice.
        let choice = largest(row, top_k);
        let chosen_sum = choice.iter().fold(R::of(0.0), |sum, &e| sum + of[e]);
        weights.extend(choice.iter().map(|&e| if normalize { of[e] / chosen_sum } else { of[e] }));
        chosen.extend(choice);
        probs.extend(of);
    }
    let [offsets, order, places] = sorted(&chosen, experts);
    let [chosen, offsets, order, places] = [&chosen, &offsets, &order, &places].map(|indices| floats(indices));
    vec![reference::f64s(&probs), chosen, reference::f64s(&weights), offsets, order, places]
}

pub fn u32_out(name: &'static str, n: usize) -> Operand {
    operand(name, Kind::Fixed(DType::U32), Role::Output, vec![7u32; n])
}
fn f64_in(name: &'static str, values: &[f64]) -> Operand {
    operand(name, Kind::Fixed(DType::F64), Role::Input, values.iter().copied())
}
fn f64_out(name: &'static str, values: &[f64]) -> Operand {
    operand(name, Kind::Fixed(DType::F64), Role::Output, values.iter().copied())
}

pub fn route_on(dev: &dyn Device, shape: RouteShape, bufs: &mut [Buf]) -> Result<()> {
    let [probs, chosen, weights, offsets, order, places] = bufs else { unreachable!() };
    dev.route(Route {
        shape,
        probs: probs.view_mut(),
        chosen: chosen.view_mut(),
        weights: weights.view_mut(),
        offsets: offsets.view_mut(),
        order: order.view_mut(),
        places: places.view_mut(),
    })
}

#[test]
fn route() {
    for (n, shape) in shapes() {
        // Multiples of 1/4, so that most tokens have experts alike.
        let logits: Vec<f64> = normal(3, n * shape.experts).iter().map(|x| (x * 8.0).round() / 4.0).collect();
        let rows = n * shape.top_k;
        let operands = [
            f32_out("probs", &logits),
            u32_out("chosen", rows),
            f32_out("weights", &vec![7.0; rows]),
            u32_out("offsets", shape.experts + 1),
            u32_out("order", rows),
            u32_out("places", rows),
        ];
        let (exact, naive) = (routed::<f64>(shape, &logits), routed::<f32>(shape, &logits));
        let label = format!("route {n} tokens, {shape:?}");
        conform(&label, GRADIENT, &operands, exact, naive, &|dev, bufs| route_on(dev, shape, bufs));
    }
}

/// A logit that is not finite makes its token's probabilities and weights NaN, and no others; its experts are the first
/// ones, and all rows keep a place.
#[test]
fn a_logit_that_is_not_finite_stays_with_its_token() {
    let (n, shape) = (5, RouteShape { experts: 40, top_k: 3, normalize: true });
    for bad in [f64::NAN, f64::INFINITY] {
        let mut logits = normal(4, n * shape.experts);
        let clean = routed::<f64>(shape, &logits);
        logits[2 * shape.experts + 35] = bad;
        for dev in devices() {
            let rows = n * shape.top_k;
            let words = |len: usize| buf(&*dev, DType::U32, &vec![0.0; len]);
            let mut bufs = vec![buf(&*dev, DType::F32, &logits), words(rows), buf(&*dev, DType::F32, &vec![0.0; rows])];
            bufs.extend([words(shape.experts + 1), words(rows), words(rows)]);
            route_on(&*dev, shape, &mut bufs).unwrap();
            let [probs, chosen, weights, offsets, order, places] =
                std::array::from_fn(|i| read(&*dev, &bufs[i])) as [Vec<f64>; 6];
            let name = dev.name();
            for (i, w) in weights.iter().enumerate() {
                assert_eq!(w.is_nan(), i / shape.top_k == 2, "{name}: weight {i}");
            }
            for (i, p) in probs.iter().enumerate() {
                assert_eq!(p.is_nan(), i / shape.experts == 2, "{name}: probability {i}");
            }
            let mut expected = clean[1].clone();
            expected[6..9].copy_from_slice(&[0.0, 1.0, 2.0]);
            assert_eq!(chosen, expected, "{name}");
            let indices: Vec<usize> = chosen.iter().map(|&e| e as usize).collect();
            let [a, b, c] = sorted(&indices, shape.experts);
            assert_eq!([offsets, order, places], [a, b, c].map(|x| floats(&x)), "{name}");
        }
    }
}

/// dlogits, from probabilities and weights that need not belong together.
fn backward<R: Real>(shape: RouteShape, chosen: &[usize], [p, w, dw, balance]: [&[f64]; 4]) -> Outputs {
    let RouteShape { experts, top_k, normalize } = shape;
    let mut dlogits = vec![];
    for (n, p) in p.chunks(experts).enumerate() {
        let of = n * top_k..(n + 1) * top_k;
        let (chosen, p) = (&chosen[of.clone()], reference::reals::<R>(p));
        let (w, dw): (Vec<R>, Vec<R>) = (reference::reals(&w[of.clone()]), reference::reals(&dw[of]));
        let mean = w.iter().zip(&dw).fold(R::of(0.0), |sum, (&w, &dw)| sum + w * dw);
        let all = chosen.iter().fold(R::of(0.0), |sum, &e| sum + p[e]);
        let mut d = reference::reals::<R>(balance);
        chosen.iter().zip(&dw).for_each(|(&e, &dw)| d[e] = d[e] + if normalize { (dw - mean) / all } else { dw });
        let dot = p.iter().zip(&d).fold(R::of(0.0), |sum, (&p, &d)| sum + p * d);
        dlogits.extend(p.iter().zip(&d).map(|(&p, &d)| p * (d - dot)));
    }
    vec![reference::f64s(&dlogits)]
}

/// What backward gets of a router's outputs: the choice; probabilities, weights, their gradients and that of the
/// balance; and all of it as operands.
pub(super) fn given_backward(n: usize, shape: RouteShape, of: &Outputs) -> (Vec<usize>, [Vec<f64>; 4], [Operand; 6]) {
    // Exact in f32.
    let exact = |values: &[f64]| values.iter().map(|&x| x as f32 as f64).collect::<Vec<f64>>();
    let (p, w, dw, balance) = (exact(&of[0]), exact(&of[2]), normal(6, n * shape.top_k), normal(7, shape.experts));
    let chosen: Vec<usize> = of[1].iter().map(|&e| e as usize).collect();
    let words: Vec<u32> = chosen.iter().map(|&e| e as u32).collect();
    let operands = [
        f32_in("probs", &p),
        u32_in("chosen", &words),
        f32_in("weights", &w),
        f32_in("dweights", &dw),
        f32_in("balance", &balance),
        f32_out("dlogits", &before(n * shape.experts)),
    ];
    (chosen, [p, w, dw, balance], operands)
}
/// The operation on these operands.
pub(super) fn of_backward(shape: RouteShape, bufs: &mut [Buf]) -> RouteBackward<'_> {
    let [probs, chosen, weights, dweights, balance, dlogits] = bufs else { unreachable!() };
    RouteBackward {
        shape,
        probs: probs.view(),
        chosen: chosen.view(),
        weights: weights.view(),
        dweights: dweights.view(),
        balance: balance.view(),
        dlogits: dlogits.view_mut(),
    }
}

#[test]
fn route_backward() {
    for (n, shape) in shapes() {
        let (chosen, given, operands) = given_backward(n, shape, &routed::<f64>(shape, &normal(5, n * shape.experts)));
        let given = given.each_ref().map(Vec::as_slice);
        let (a, b) = (backward::<f64>(shape, &chosen, given), backward::<f32>(shape, &chosen, given));
        let label = format!("route_backward {n} tokens, {shape:?}");
        // Differences of sums, which round in another order.
        conform(&label, 4.0 * GRADIENT, &operands, a, b, &|dev, bufs| dev.route_backward(of_backward(shape, bufs)));
    }
}

#[test]
fn route_load() {
    for (n, experts) in [(1, 2), (5, 4), (70, 33), (300, 128)] {
        let p = normal(8, n * experts);
        let offsets: Vec<u32> = (0..=experts as u32).map(|e| e * e / 3).collect();
        let (counts, sums) = (before(experts), before(experts));
        let rows = |e: usize| (offsets[e + 1] - offsets[e]) as f64;
        let exact = vec![
            (0..experts).map(|e| counts[e] + rows(e)).collect::<Vec<f64>>(),
            (0..experts).map(|e| sums[e] + (0..n).map(|i| p[i * experts + e]).sum::<f64>()).collect(),
        ];
        let operands =
            [f32_in("probs", &p), u32_in("offsets", &offsets), f64_out("counts", &counts), f64_out("sums", &sums)];
        conform("route_load", FORWARD, &operands, exact.clone(), exact, &|dev, bufs| {
            let [probs, offsets, counts, sums] = bufs else { unreachable!() };
            let (probs, offsets) = (probs.view(), offsets.view());
            dev.route_load(RouteLoad { probs, offsets, counts: counts.view_mut(), sums: sums.view_mut() })
        });
    }
}

#[test]
fn balance() {
    for (layers, experts, top_k) in [(1, 1, 1), (2, 4, 2), (3, 60, 4), (5, 33, 1)] {
        let shape = RouteShape { experts, top_k, normalize: false };
        for used in [1.0, 0.0] {
            let load = normal(9, (layers + 1) * experts);
            let load: Vec<f64> = load.iter().map(|x| used * (x * x * 8.0).ceil()).collect();
            let (counts, sums) = load.split_at(layers * experts);
            let rows = counts.iter().sum::<f64>() / top_k as f64;
            let factor = if rows > 0.0 { experts as f64 / (rows * rows) } else { 0.0 };
            let of = |e: usize| (0..layers).map(|l| counts[l * experts + e]).sum::<f64>();
            let old = before(1 + layers * experts);
            let loss = old[0] + (0..experts).map(|e| factor * of(e) * sums[e]).sum::<f64>();
            let report = [loss].into_iter().chain(old[1..].iter().zip(counts).map(|(a, b)| a + b)).collect();
            let grad: Vec<f64> = (0..experts).map(|e| 0.37f32 as f64 * factor * of(e)).collect();
            let exact = vec![grad, report];
            let operands = [
                f64_in("load", &load),
                f32_in("scale", &[0.37f32 as f64]),
                f32_out("grad", &before(experts)),
                f64_out("report", &old),
            ];
            conform("balance", FORWARD, &operands, exact.clone(), exact, &|dev, bufs| {
                let [load, scale, grad, report] = bufs else { unreachable!() };
                let (load, scale) = (load.view(), scale.view());
                dev.balance(Balance { shape, load, scale, grad: grad.view_mut(), report: report.view_mut() })
            });
        }
    }
}

/// Tokens, experts per token, width.
const ROWS: [(usize, usize, usize); 6] = [(1, 1, 1), (5, 2, 3), (7, 3, 64), (4, 2, 1000), (11, 1, 257), (40, 2, 24)];

/// A permutation of rows.
fn permutation(n: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..n as u32).collect();
    order.sort_by_key(|&i| (i * 7919) % 101);
    order
}

#[test]
fn take_rows() {
    for (n, top_k, width) in ROWS {
        let (order, a) = (permutation(n * top_k), normal(10, n * width));
        let exact: Vec<f64> =
            order.iter().flat_map(|&i| a[i as usize / top_k * width..][..width].iter().copied()).collect();
        let operands = [u32_in("order", &order), x("x", &a), y("y", &before(n * top_k * width))];
        conform("take_rows", FORWARD, &operands, vec![exact.clone()], vec![exact], &|dev, bufs| {
            let [order, x, y] = bufs else { unreachable!() };
            dev.take_rows(TakeRows { top_k, order: order.view(), x: x.view(), y: y.view_mut() })
        });
    }
}

/// Runs with no rows, with one, and with more than a CTA has threads.
#[test]
fn place_runs() {
    for lengths in [&[1][..], &[0, 3, 0, 0, 1], &[5, 600, 2, 0, 257, 31]] {
        let rows: usize = lengths.iter().sum();
        // Places are in the order of runs 1, 3, 5, .., 0, 2, 4, ..
        let turned = || (0..lengths.len()).filter(|run| run % 2 == 1).chain((0..lengths.len()).step_by(2));
        let place = |run: usize| -> usize { turned().take_while(|&r| r != run).map(|r| lengths[r]).sum() };
        let first = |run: usize| -> usize { lengths[..run].iter().sum() };
        let runs: Vec<u32> =
            (0..lengths.len()).flat_map(|run| [first(run), place(run), lengths[run]].map(|n| n as u32)).collect();
        let order: Vec<f64> =
            (0..lengths.len()).flat_map(|run| (0..lengths[run]).map(move |i| (place(run) + i) as f64)).collect();
        let places: Vec<f64> =
            turned().flat_map(|run| (0..lengths[run]).map(move |i| (first(run) + i) as f64)).collect();
        let operands = [u32_in("runs", &runs), u32_out("order", rows), u32_out("places", rows)];
        let exact = vec![order, places];
        conform("place_runs", FORWARD, &operands, exact.clone(), exact, &|dev, bufs| {
            let [runs, order, places] = bufs else { unreachable!() };
            dev.place_runs(PlaceRuns { runs: runs.view(), order: order.view_mut(), places: places.view_mut() })
        });
    }
}

#[test]
fn combine_rows() {
    for ((n, top_k, width), flags) in ROWS.into_iter().flat_map(|rows| (0..8).map(move |flags| (rows, flags))) {
        let [mapped, weighted, accumulate] = [1, 2, 4].map(|bit| flags & bit != 0);
        let (places, a, w, old) =
            (permutation(n * top_k), normal(11, n * top_k * width), normal(12, n * top_k), before(n * width));
        fn sums<R: Real>(of: &dyn Fn(usize, usize) -> (f64, f64), old: &[f64], n: usize, top_k: usize) -> Outputs {
            let width = old.len() / n;
            let sum = |at: usize| {
                let first = R::of(old[at]);
                (at / width * top_k..(at / width + 1) * top_k).fold(first, |sum, index| {
                    let (x, w) = of(index, at % width);
                    sum + R::of(x) * R::of(w)
                })
            };
            vec![(0..old.len()).map(|at| sum(at).f64()).collect()]
        }
        let of = |index: usize, column: usize| {
            let place = if mapped { places[index] as usize } else { index };
            (a[place * width + column], if weighted { w[index] } else { 1.0 })
        };
        let from = if accumulate { old.clone() } else { vec![0.0; old.len()] };
        let mut operands = vec![x("x", &a), y("y", &old)];
        operands.extend(mapped.then(|| u32_in("places", &places)));
        operands.extend(weighted.then(|| f32_in("weights", &w)));
        let (exact, naive) = (sums::<f64>(&of, &from, n, top_k), sums::<f32>(&of, &from, n, top_k));
        let label = format!("combine_rows {n} x {width} of {top_k}, {flags}");
        conform(&label, FORWARD, &operands, exact, naive, &|dev, bufs| {
            let [x, y, rest @ ..] = bufs else { unreachable!() };
            let places = mapped.then(|| rest[0].view());
            let weights = weighted.then(|| rest[mapped as usize].view());
            let (x, y) = (x.view(), y.view_mut());
            dev.combine_rows(CombineRows { width, top_k, places, weights, x, y, accumulate })
        });
    }
}

/// In whatever order rows arrive, they are summed in that of the top-k: 1e8 + 1 is 1e8 in f32.
#[test]
fn rows_are_combined_in_the_order_of_the_top_k() {
    let rows = [1e8, -1e8, 1.0];
    for (order, sum) in [([0.0, 2.0, 1.0], 0.0), ([0.0, 1.0, 2.0], 1.0), ([2.0, 0.0, 1.0], 0.0), ([1.0, 0.0, 2.0], 1.0)]
    {
        for dev in devices() {
            let [x, places] = [(DType::F32, rows), (DType::U32, order)].map(|(dtype, x)| buf(&*dev, dtype, &x));
            let mut y = buf(&*dev, DType::F32, &[7.0]);
            let (places, x, y_out) = (Some(places.view()), x.view(), y.view_mut());
            let op = CombineRows { width: 1, top_k: 3, places, weights: None, x, y: y_out, accumulate: false };
            dev.combine_rows(op).unwrap();
            assert_eq!(read(&*dev, &y), [sum], "{}: {order:?}", dev.name());
        }
    }
}

#[test]
fn weigh_rows() {
    for ((rows, _, width), mapped) in ROWS.into_iter().flat_map(|rows| [(rows, false), (rows, true)]) {
        let (order, w) = (permutation(rows), normal(13, rows));
        let (act, dact) = (normal(14, rows * width), normal(15, rows * width));
        fn weighed<R: Real>(order: &[usize], [w, act, dact]: [&[f64]; 3]) -> Outputs {
            let (width, mut dweights) = (act.len() / w.len(), vec![R::of(0.0); w.len()]);
            let times = |x: &[f64]| {
                let of = |(i, &x): (usize, &f64)| (R::of(x) * R::of(w[order[i / width]])).f64();
                x.iter().enumerate().map(of).collect::<Vec<f64>>()
            };
            for (i, (&a, &d)) in act.iter().zip(dact).enumerate() {
                dweights[order[i / width]] = dweights[order[i / width]] + R::of(a) * R::of(d);
            }
            vec![times(act), times(dact), reference::f64s(&dweights)]
        }
        let at: Vec<usize> = (0..rows).map(|r| if mapped { order[r] as usize } else { r }).collect();
        let given = [&w[..], &act, &dact];
        let mut operands =
            vec![f32_in("weights", &w), y("act", &act), y("dact", &dact), f32_out("dweights", &before(rows))];
        operands.extend(mapped.then(|| u32_in("order", &order)));
        let (exact, naive) = (weighed::<f64>(&at, given), weighed::<f32>(&at, given));
        conform("weigh_rows", GRADIENT, &operands, exact, naive, &|dev, bufs| {
            let [weights, act, dact, dweights, order @ ..] = bufs else { unreachable!() };
            let order = order.first().map(Buf::view);
            let (act, dact, dweights) = (act.view_mut(), dact.view_mut(), dweights.view_mut());
            dev.weigh_rows(WeighRows { order, weights: weights.view(), act, dact, dweights })
        });
    }
}

/// Any length is valid.
#[test]
fn sigmoid() {
    for n in [1, 17, 1003] {
        let (a, s, d) = (normal(16, n).iter().map(|x| x * 8.0).collect::<Vec<f64>>(), normal(17, n), normal(18, n));
        let s: Vec<f64> = s.iter().map(|s| rounded(s.abs() / 8.0)).collect();
        for dev in devices() {
            let mut x = buf(&*dev, DType::F32, &a);
            dev.sigmoid(Sigmoid { x: x.view_mut(), dy: None }).unwrap();
            let exact = each::<f64, 1, 1>([&a], |[x]| [reference::sigmoid(x)]);
            let naive = each::<f32, 1, 1>([&a], |[x]| [reference::sigmoid(x)]);
            compare(&format!("sigmoid on {}", dev.name()), FORWARD, &read(&*dev, &x), &exact[0], &naive[0]);
            let (mut x, mut dy) = (buf(&*dev, DType::F32, &s), buf(&*dev, DType::F32, &d));
            dev.sigmoid(Sigmoid { x: x.view_mut(), dy: Some(dy.view_mut()) }).unwrap();
            let exact = each::<f64, 2, 1>([&s, &d], |[s, d]| [d * (s * (1.0 - s))]);
            let naive = each::<f32, 2, 1>([&s, &d], |[s, d]| [d * (s * (1.0 - s))]);
            compare(&format!("its gradient on {}", dev.name()), GRADIENT, &read(&*dev, &dy), &exact[0], &naive[0]);
            let (mut short, mut words) = (buf(&*dev, DType::F32, &s[1..]), buf(&*dev, DType::U32, &s));
            assert!(dev.sigmoid(Sigmoid { x: short.view_mut(), dy: Some(dy.view_mut()) }).is_err());
            assert!(dev.sigmoid(Sigmoid { x: words.view_mut(), dy: None }).is_err());
        }
    }
}
