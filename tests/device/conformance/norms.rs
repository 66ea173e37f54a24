//! RMSNorm and LayerNorm, forward and backward.
use super::harness::*;
use super::layers::SHAPES;
use crate::common::reference;
use flatshard_base::DType;
use flatshard_device::ops::{LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward, RmsNormShape};

#[test]
fn rmsnorm() {
    for ((n, c), offset) in SHAPES.into_iter().filter(|&(_, c)| c > 1).zip([0.0, 1.0].into_iter().cycle()) {
        let (a, w) = (normal(1, n * c), normal(2, c));
        let shape = RmsNormShape { eps: 1e-5, offset: offset as f32 };
        conform(
            "rmsnorm",
            FORWARD,
            &[x("x", &a), x("w", &w), y("y", &before(n * c)), f32_out("rstd", &before(n))],
            reference::rmsnorm::<f64>((1e-5, offset), &a, &w),
            reference::rmsnorm::<f32>((1e-5, offset), &a, &w),
            &|dev, bufs| {
                let [a, w, y, rstd] = bufs else { unreachable!() };
                dev.rmsnorm(RmsNorm { shape, x: a.view(), w: w.view(), y: y.view_mut(), rstd: rstd.view_mut() })
            },
        );
        let rstd: Vec<f64> = reference::rmsnorm::<f32>((1e-5, offset), &a, &w)[1].clone();
        let (dy, dx, dw) = (normal(3, n * c), before(n * c), before(c));
        conform(
            "rmsnorm_backward",
            GRADIENT,
            &[x("x", &a), x("w", &w), f32_in("rstd", &rstd), x("dy", &dy), y("dx", &dx), f32_out("dw", &dw)],
            reference::rmsnorm_backward::<f64>(offset, &a, &w, &rstd, &dy, &dx, &dw),
            reference::rmsnorm_backward::<f32>(offset, &a, &w, &rstd, &dy, &dx, &dw),
            &|dev, bufs| {
                let [a, w, rstd, dy, dx, dw] = bufs else { unreachable!() };
                dev.rmsnorm_backward(RmsNormBackward {
                    shape,
                    x: a.view(),
                    w: w.view(),
                    rstd: rstd.view(),
                    dy: dy.view(),
                    dx: dx.view_mut(),
                    dw: dw.view_mut(),
                })
            },
        );
    }
}

#[test]
fn layernorm() {
    for (n, c) in SHAPES.into_iter().filter(|&(_, c)| c > 1) {
        let (a, w, b) = (normal(1, n * c), normal(2, c), normal(3, c));
        conform(
            "layernorm",
            FORWARD,
            &[x("x", &a), x("w", &w), x("b", &b), y("y", &before(n * c)), f32_out("stats", &before(2 * n))],
            reference::layernorm::<f64>(1e-5, &a, &w, &b),
            reference::layernorm::<f32>(1e-5, &a, &w, &b),
            &|dev, bufs| {
                let [a, w, b, y, stats] = bufs else { unreachable!() };
                dev.layernorm(LayerNorm {
                    eps: 1e-5,
                    x: a.view(),
                    w: w.view(),
                    b: Some(b.view()),
                    y: y.view_mut(),
                    stats: stats.view_mut(),
                })
            },
        );
        conform(
            "layernorm",
            FORWARD,
            &[x("x", &a), x("w", &w), y("y", &before(n * c)), f32_out("stats", &before(2 * n))],
            reference::layernorm::<f64>(1e-5, &a, &w, &vec![0.0; c]),
            reference::layernorm::<f32>(1e-5, &a, &w, &vec![0.0; c]),
            &|dev, bufs| {
                let [a, w, y, stats] = bufs else { unreachable!() };
                let (x, w, y, stats) = (a.view(), w.view(), y.view_mut(), stats.view_mut());
                dev.layernorm(LayerNorm { eps: 1e-5, x, w, b: None, y, stats })
            },
        );
        let stats = reference::layernorm::<f32>(1e-5, &a, &w, &b)[1].clone();
        let (dy, dx, dw, db) = (normal(4, n * c), before(n * c), before(c), before(c));
        conform(
            "layernorm_backward",
            GRADIENT,
            &[
                x("x", &a),
                x("w", &w),
                f32_in("stats", &stats),
                x("dy", &dy),
                y("dx", &dx),
                f32_out("dw", &dw),
                f32_out("db", &db),
            ],
            reference::layernorm_backward::<f64>([&a, &w, &stats, &dy], [&dx, &dw, &db]),
            reference::layernorm_backward::<f32>([&a, &w, &stats, &dy], [&dx, &dw, &db]),
            &|dev, bufs| {
                let [a, w, stats, dy, dx, dw, db] = bufs else { unreachable!() };
                let (dx, dw, db) = (dx.view_mut(), dw.view_mut(), db.view_mut());
                dev.layernorm_backward(LayerNormBackward {
                    x: a.view(),
                    w: w.view(),
                    stats: stats.view(),
                    dy: dy.view(),
                    dx,
                    dw,
                    db,
                })
            },
        );
    }
}

/// A weight that is stored minus 1 has the bits of the whole weight, whatever the vectors and threads.
#[test]
fn layernorm_from_one() {
    let (n, c) = (5, 70);
    // Sums that are exact in f32.
    let stored: Vec<f64> = normal(2, c).iter().map(|w| (w * 64.0).round() / 64.0).collect();
    let whole: Vec<f64> = stored.iter().map(|w| w + 1.0).collect();
    for dev in &devices() {
        let computed = |w: &[f64], from_one: bool, biased: bool| {
            let inputs = [normal(1, n * c), w.to_vec(), normal(3, c), normal(4, n * c)];
            let [x, w, b, dy] = inputs.map(|values| buf(&**dev, DType::F32, &values));
            let mut out = [n * c, 2 * n, n * c, c, c].map(|len| buf(&**dev, DType::F32, &before(len)));
            let [y, stats, dx, dw, db] = &mut out;
            let b = biased.then_some(b.view());
            let op = LayerNorm { eps: 1e-5, x: x.view(), w: w.view(), b, y: y.view_mut(), stats: stats.view_mut() };
            if from_one { dev.layernorm_from_one(op) } else { dev.layernorm(op) }.unwrap();
            let (stats, dy) = (stats.view(), dy.view());
            let [dx, dw, db] = [dx, dw, db].map(|of| of.view_mut());
            let op = LayerNormBackward { x: x.view(), w: w.view(), stats, dy, dx, dw, db };
            if from_one { dev.layernorm_from_one_backward(op) } else { dev.layernorm_backward(op) }.unwrap();
            out.map(|of| read(&**dev, &of))
        };
        for biased in if is_cpu(&**dev) { vec![false, true] } else { vec![true] } {
            assert_eq!(computed(&stored, true, biased), computed(&whole, false, biased), "{}", dev.name());
        }
    }
}
