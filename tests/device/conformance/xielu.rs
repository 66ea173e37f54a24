//! xIELU, whose two numbers are learned.
use super::harness::*;
use crate::common::reference::{self, Real};
use flatshard_device::Buf;
use flatshard_device::ops::{Xielu, XieluBackward, XieluCurve, XieluGrads};

const SIZES: [usize; 5] = [5, 17, 64, 1003, 9000];

/// alpha_p, alpha_n, beta, eps
fn numbers() -> [f64; 4] {
    [0.75, -0.5, 0.5, -1e-6].map(rounded)
}
fn operands() -> [Operand; 4] {
    let values = numbers();
    let of = |i: usize| x(["alpha_p", "alpha_n", "beta", "eps"][i], &values[i..=i]);
    [0, 1, 2, 3].map(of)
}
fn curve(bufs: &[Buf]) -> XieluCurve<'_> {
    let [alpha_p, alpha_n, beta, eps] = bufs else { unreachable!() };
    XieluCurve { alpha_p: alpha_p.view(), alpha_n: alpha_n.view(), beta: beta.view(), eps: eps.view() }
}
/// Inputs on both sides of 0, some between eps and it.
fn inputs(seed: u64, n: usize) -> Vec<f64> {
    let near = |(i, x): (usize, f64)| match i % 11 {
        0 => 0.0,
        1 => rounded(-5e-7),
        2 => rounded(x / 64.0),
        _ => 2.0 * x,
    };
    normal(seed, n).into_iter().enumerate().map(near).collect()
}

/// p, n, beta, eps, and the derivatives of p and n.
fn of_numbers<R: Real>() -> [R; 6] {
    let [p, n, beta, eps] = numbers().map(R::of);
    let softplus = |x: R| (R::of(1.0) + x.exp()).ln();
    [softplus(p), beta + softplus(n), beta, eps, reference::sigmoid(p), reference::sigmoid(n)]
}
/// `expm1(min(x, eps)) - x`
fn bent<R: Real>(x: f64, eps: R) -> R {
    (if x < eps.f64() { R::of(x) } else { eps }).exp() - R::of(1.0) - R::of(x)
}

#[test]
fn xielu() {
    fn of<R: Real>(xs: &[f64]) -> Outputs {
        let [p, n, beta, eps, ..] = of_numbers::<R>();
        let unit = |&x: &f64| {
            let (at, v) = (if x > 0.0 { p * R::of(x) * R::of(x) } else { n * bent(x, eps) }, R::of(x));
            (beta * v + at).f64()
        };
        vec![xs.iter().map(unit).collect()]
    }
    for len in SIZES {
        let xs = inputs(1, len);
        let all: Vec<Operand> = operands().into_iter().chain([x("x", &xs), y("y", &before(len))]).collect();
        conform("xielu", FORWARD, &all, of::<f64>(&xs), of::<f32>(&xs), &|dev, bufs| {
            let (numbers, [x, y]) = bufs.split_at_mut(4) else { unreachable!() };
            dev.xielu(Xielu { curve: curve(numbers), x: x.view(), y: y.view_mut() })
        });
    }
}

#[test]
fn xielu_backward() {
    fn of<R: Real>(xs: &[f64], dy: &[f64]) -> Outputs {
        let [p, n, beta, eps, ..] = of_numbers::<R>();
        let unit = |(&x, &dy): (&f64, &f64)| {
            let slope = match x > 0.0 {
                true => R::of(2.0) * p * R::of(x),
                false => n * if x < eps.f64() { R::of(x).exp() - R::of(1.0) } else { R::of(-1.0) },
            };
            (R::of(dy) * (beta + slope)).f64()
        };
        vec![xs.iter().zip(dy).map(unit).collect()]
    }
    for len in SIZES {
        let (xs, dy) = (inputs(1, len), normal(2, len));
        let more = [x("x", &xs), x("dy", &dy), y("dx", &before(len))];
        let all: Vec<Operand> = operands().into_iter().chain(more).collect();
        conform("xielu_backward", GRADIENT, &all, of::<f64>(&xs, &dy), of::<f32>(&xs, &dy), &|dev, bufs| {
            let (numbers, [x, dy, dx]) = bufs.split_at_mut(4) else { unreachable!() };
            let (x, dy, dx) = (x.view(), dy.view(), dx.view_mut());
            dev.xielu_backward(XieluBackward { curve: curve(numbers), x, dy, dx })
        });
    }
}

#[test]
fn xielu_grads() {
    fn of<R: Real>(xs: &[f64], dy: &[f64]) -> Outputs {
        let [.., eps, dp, dn] = of_numbers::<R>();
        let mut sums = [R::of(0.0); 2];
        for (&x, &dy) in xs.iter().zip(dy) {
            let (side, term) = if x > 0.0 { (0, R::of(x) * R::of(x)) } else { (1, bent(x, eps)) };
            sums[side] = sums[side] + R::of(dy) * term;
        }
        let old = R::of(before(1)[0]);
        vec![vec![(old + sums[0] * dp).f64()], vec![(old + sums[1] * dn).f64()]]
    }
    for len in SIZES {
        let (xs, dy) = (inputs(1, len), normal(2, len));
        let more = [x("x", &xs), x("dy", &dy), f32_out("dalpha_p", &before(1)), f32_out("dalpha_n", &before(1))];
        let all: Vec<Operand> = operands().into_iter().chain(more).collect();
        conform("xielu_grads", 4.0 * GRADIENT, &all, of::<f64>(&xs, &dy), of::<f32>(&xs, &dy), &|dev, bufs| {
            let (numbers, [x, dy, dalpha_p, dalpha_n]) = bufs.split_at_mut(4) else { unreachable!() };
            let (dalpha_p, dalpha_n) = (dalpha_p.view_mut(), dalpha_n.view_mut());
            dev.xielu_grads(XieluGrads { curve: curve(numbers), x: x.view(), dy: dy.view(), dalpha_p, dalpha_n })
        });
    }
}
