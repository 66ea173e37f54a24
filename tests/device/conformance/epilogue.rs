//! Products with epilogues, fused or in separate passes: within twice the error of f32 code that rounds after each
//! pass.
use super::harness::*;
use crate::common::reference::{self, Real};
use flatshard_base::{DType, Error};
use flatshard_device::ops::{Epilogue, GemmShape, GemmThen};
use flatshard_device::{Buf, Device};

const M: usize = 5;
const N: usize = 24;
const K: usize = 33;

/// A Bᵀ, then functions of each element and its index, applied in order, each rounded.
fn chain<R: Real>(a: &[f64], b: &[f64], round: &dyn Fn(f64) -> f64, steps: &[&dyn Fn(R, usize) -> R]) -> Vec<Vec<f64>> {
    let (a, b) = (reference::reals::<R>(a), reference::reals::<R>(b));
    let product = |i: usize| (0..K).map(|l| a[i / N * K + l] * b[i % N * K + l]).sum::<R>();
    let mut rows = vec![(0..M * N).map(|i| round(product(i).f64())).collect::<Vec<f64>>()];
    for step in steps {
        let last = rows.last().unwrap();
        rows.push(last.iter().enumerate().map(|(i, x)| round(step(R::of(*x), i).f64())).collect());
    }
    rows
}

struct Given {
    a: Vec<f64>,
    b: Vec<f64>,
    bias: Vec<f64>,
    z: Vec<f64>,
}
impl Given {
    fn new() -> Given {
        Given { a: normal(1, M * K), b: normal(2, N * K), bias: normal(3, N), z: normal(4, M * N) }
    }
    /// Exact, and by the naive code of a dtype.
    fn both(
        &self,
        dev: &dyn Device,
        dtype: DType,
        exact: &[&dyn Fn(f64, usize) -> f64],
        naive: &[&dyn Fn(f32, usize) -> f32],
    ) -> [Vec<Vec<f64>>; 2] {
        let round = |x: f64| read(dev, &buf(dev, dtype, &[x]))[0];
        [chain(&self.a, &self.b, &|x| x, exact), chain(&self.a, &self.b, &round, naive)]
    }
}

fn everywhere(test: impl Fn(&dyn Device, DType, &Given, [Buf; 4], [Buf; 2])) {
    let given = Given::new();
    for dev in devices() {
        for dtype in FLOATS {
            let of = |values: &[f64]| buf(&*dev, dtype, values);
            let inputs = [of(&given.a), of(&given.b), of(&given.bias), of(&given.z)];
            test(&*dev, dtype, &given, inputs, [of(&before(M * N)), of(&before(M * N))]);
        }
    }
}

#[test]
fn bias_and_residual() {
    everywhere(|dev, dtype, given, [a, b, bias, z], [mut c, _]| {
        for (with_bias, with_residual) in [(false, false), (true, false), (false, true), (true, true)] {
            let then =
                Epilogue::Sum { bias: with_bias.then(|| bias.view()), residual: with_residual.then(|| z.view()) };
            dev.gemm_then(GemmThen { shape: GemmShape::nt(M, N, K), a: a.view(), b: b.view(), c: c.view_mut(), then })
                .unwrap();
            let (s, t) = (with_bias as usize as f64, with_residual as usize as f64);
            let [exact, naive] = given.both(
                dev,
                dtype,
                &[&|x, i| x + s * given.bias[i % N], &|x, i| x + t * given.z[i]],
                &[&|x, i| x + (s * given.bias[i % N]) as f32, &|x, i| x + (t * given.z[i]) as f32],
            );
            let label = format!("bias {with_bias} residual {with_residual} {dtype} on {}", dev.name());
            compare(&label, FORWARD, &read(dev, &c), &exact[2], &naive[2]);
        }
    });
}

#[test]
fn gelu_keeps_its_input_and_transforms_gradients() {
    everywhere(|dev, dtype, given, [a, b, bias, z], [mut c, mut kept]| {
        let shape = GemmShape::nt(M, N, K);
        for with_bias in [false, true] {
            let then = Epilogue::Gelu { bias: with_bias.then(|| bias.view()), z: kept.view_mut() };
            dev.gemm_then(GemmThen { shape, a: a.view(), b: b.view(), c: c.view_mut(), then }).unwrap();
            let s = with_bias as usize as f64;
            let [exact, naive] = given.both(
                dev,
                dtype,
                &[&|x, i| x + s * given.bias[i % N], &|x, _| reference::gelu(x)],
                &[&|x, i| x + (s * given.bias[i % N]) as f32, &|x, _| reference::gelu(x)],
            );
            let label = format!("gelu, bias {with_bias} {dtype} on {}", dev.name());
            compare(&format!("{label}: z"), FORWARD, &read(dev, &kept), &exact[1], &naive[1]);
            compare(&label, FORWARD, &read(dev, &c), &exact[2], &naive[2]);
        }
        let then = Epilogue::GeluBackward { z: z.view(), product: kept.view_mut() };
        dev.gemm_then(GemmThen { shape, a: a.view(), b: b.view(), c: c.view_mut(), then }).unwrap();
        let [exact, naive] = given.both(
            dev,
            dtype,
            &[&|x, i| x * reference::gelu_slope(given.z[i])],
            &[&|x, i| x * reference::gelu_slope(given.z[i] as f32)],
        );
        let label = format!("gelu backward {dtype} on {}", dev.name());
        compare(&label, GRADIENT, &read(dev, &c), &exact[1], &naive[1]);
    });
}

#[test]
fn mismatched_operands_are_refused() {
    everywhere(|dev, dtype, _, [a, b, bias, z], [mut c, mut kept]| {
        let (shape, other) = (GemmShape::nt(M, N, K), if dtype == DType::F32 { DType::Bf16 } else { DType::F32 });
        let mut strange = buf(dev, other, &before(M * N));
        let mut refused = |shape: GemmShape, then: Epilogue| {
            let said = dev.gemm_then(GemmThen { shape, a: a.view(), b: b.view(), c: c.view_mut(), then });
            assert!(matches!(said, Err(Error::Op { .. })), "{said:?}");
        };
        let sum = |bias, residual| Epilogue::Sum { bias, residual };
        refused(shape, sum(Some(bias.view().slice(1..N)), None));
        refused(shape, sum(None, Some(z.view().slice(1..M * N))));
        refused(shape, sum(None, Some(strange.view())));
        refused(shape.accumulate(), sum(None, Some(z.view())));
        refused(GemmShape::nt(M - 1, N - 1, K).ldc(N), sum(None, None));
        refused(shape, Epilogue::Gelu { bias: None, z: strange.view_mut() });
        refused(shape, Epilogue::Gelu { bias: Some(z.view()), z: kept.view_mut() });
        refused(shape, Epilogue::GeluBackward { z: z.view().slice(0..N), product: kept.view_mut() });
        refused(shape, Epilogue::GeluBackward { z: z.view(), product: strange.view_mut() });
    });
}
