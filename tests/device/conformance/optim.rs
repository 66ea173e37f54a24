//! The optimizers.
use super::harness::*;
use crate::common::reference::{Real, f64s, reals};
use bytemuck::Pod;
use flatshard_base::dynamic8::BLOCK;
use flatshard_base::{Category, DType};
use flatshard_device::ops::{AdamW, AdamWStep, Gemm, GemmShape, Polynomial, Sgd, SgdScalars, TensorPart};
use flatshard_device::{Buf, Device};

const SCALE: f64 = 0.75;

fn scale() -> Operand {
    operand("scale", Kind::Fixed(DType::F32), Role::Scratch, [SCALE, 123.0])
}

/// An update's constants as stored in memory.
fn constants(h: impl Pod) -> Vec<f64> {
    bytemuck::cast_slice::<_, f32>(&[h]).iter().map(|&x| x as f64).collect()
}
fn h(h: impl Pod) -> Operand {
    operand("h", Kind::Fixed(DType::F32), Role::Scratch, constants(h))
}

/// [m, v, p, out]: `torch.optim.AdamW`, line by line.
fn adamw_of<R: Real>(h: &AdamWStep, g: &[f64], m: &[f64], v: &[f64], p: &[f64]) -> Outputs {
    let (mut m, mut v, mut p) = (reals::<R>(m), reals::<R>(v), reals::<R>(p));
    let (lr, b1, b2) = (h.lr as f64, h.beta1 as f64, h.beta2 as f64);
    let (bc1, bc2) = (1.0 - b1.powf(h.step as f64), 1.0 - b2.powf(h.step as f64));
    for i in 0..g.len() {
        let g = R::of(g[i]) * R::of(SCALE);
        p[i] = p[i] * R::of(1.0 - lr * h.weight_decay as f64);
        m[i] = m[i] + (g - m[i]) * R::of(1.0 - b1);
        v[i] = v[i] * R::of(b2) + g * g * R::of(1.0 - b2);
        let denominator = v[i].sqrt() / R::of(bc2.sqrt()) + R::of(h.eps as f64);
        p[i] = p[i] - R::of(lr / bc1) * m[i] / denominator;
    }
    vec![f64s(&m), f64s(&v), f64s(&p), f64s(&p)]
}

#[test]
fn adamw() {
    for (n, step) in [(0, 1), (1, 1), (1003, 1), (640, 1000)] {
        let adamw = AdamWStep { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
        let (g, m, p) = (normal(1, n), normal(2, n), normal(3, n));
        let v: Vec<f64> = normal(4, n).iter().map(|v| v * v).map(|v| v as f32 as f64).collect();
        let (mine, h) = ([f32_in("g", &g), f32_out("m", &m), f32_out("v", &v), f32_out("p", &p)], h(adamw.scalars()));
        let [g_in, m_out, v_out, p_out] = mine;
        let operands = [h, scale(), g_in, m_out, v_out, p_out, y("out", &before(n))];
        let (exact, naive) = (adamw_of::<f64>(&adamw, &g, &m, &v, &p), adamw_of::<f32>(&adamw, &g, &m, &v, &p));
        conform("adamw", FORWARD, &operands, exact.clone(), naive.clone(), &|dev, bufs| {
            let [h, scale, g, m, v, p, out] = bufs else { unreachable!() };
            let (m, v, p) = (m.view_mut(), v.view_mut(), p.view_mut());
            dev.adamw(AdamW {
                h: h.view(),
                scale: scale.view(),
                g: g.view(),
                m,
                v,
                p,
                out: Some(out.view_mut()),
                absmax: None,
                at: TensorPart::default(),
            })
        });
        conform("adamw", FORWARD, &operands[..6], exact[..3].to_vec(), naive[..3].to_vec(), &|dev, bufs| {
            let [h, scale, g, m, v, p] = bufs else { unreachable!() };
            dev.adamw(AdamW {
                h: h.view(),
                scale: scale.view(),
                g: g.view(),
                m: m.view_mut(),
                v: v.view_mut(),
                p: p.view_mut(),
                out: None,
                absmax: None,
                at: TensorPart::default(),
            })
        });
    }
}

/// Steps of every combination of dtypes that is stored: the same bits on every device, however the range is split (with
/// 8-bit moments, between their blocks), with the random numbers of a tensor that is cut along its columns.
#[test]
fn stored_bits_are_those_of_every_device_and_split() {
    let (n, b, f, blocks) = (1000, DType::Bf16, DType::F32, DType::U8);
    let at = TensorPart { key: 0x0123_4567_89ab_cdef, first: 5, before: 7, row: 30, skip: 90 };
    let whole = TensorPart { row: 0, skip: 0, ..at };
    for (moments, master, out, at) in [
        (f, f, Some(b), at),
        (b, f, None, at),
        (b, f, Some(b), whole),
        (b, f, Some(DType::F16), at),
        (b, f, Some(f), at),
        (f, b, None, at),
        (f, b, Some(b), at),
        (b, b, None, whole),
        (b, b, Some(b), at),
        (blocks, f, None, at),
        (blocks, f, Some(b), at),
        (blocks, f, Some(DType::F16), at),
        (blocks, f, Some(f), at),
        (blocks, b, None, whole),
        (blocks, b, Some(b), at),
    ] {
        let mut first: Option<Vec<Vec<f64>>> = None;
        for dev in devices() {
            let kernels = !is_cpu(&*dev);
            let cuts = match moments {
                DType::U8 => vec![0, 256, 768, n],
                _ if kernels => vec![0, 8, 24, 504, n],
                _ => vec![0, 1, 18, 501, 999, n],
            };
            for cuts in [vec![0, n], cuts] {
                let of = |dtype, values: Vec<f64>| buf(&*dev, dtype, &values);
                let (g, scale) = (of(f, normal(1, n)), of(f, vec![SCALE]));
                let (mut m, mut v, mut p) =
                    (of(moments, vec![0.0; n]), of(moments, vec![0.0; n]), of(master, normal(3, n)));
                let mut copy = out.map(|dtype| of(dtype, vec![0.0; n]));
                let mut largest = (moments == blocks).then(|| [0, 1].map(|_| of(f, vec![0.0; n.div_ceil(BLOCK)])));
                for step in 1..=3 {
                    let h = AdamWStep { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
                    let h = h.scalars();
                    let mut words = dev.alloc(f, size_of_val(&h) / 4, Category::Other).unwrap();
                    dev.upload(bytemuck::bytes_of(&h), words.view_mut()).unwrap();
                    for w in cuts.windows(2) {
                        let r = w[0]..w[1];
                        let [m, v, p] = [&mut m, &mut v, &mut p].map(|x| x.view_mut().slice(r.clone()));
                        let out = copy.as_mut().map(|out| out.view_mut().slice(r.clone()));
                        let own = r.start / BLOCK..r.end.div_ceil(BLOCK);
                        let absmax = largest.as_mut();
                        let absmax = absmax.map(|of| of.each_mut().map(|x| x.view_mut().slice(own.clone())));
                        let (h, scale, g, at) =
                            (words.view(), scale.view(), g.view().slice(r.clone()), at.from(r.start));
                        dev.adamw(AdamW { h, scale, g, m, v, p, out, absmax, at }).unwrap();
                    }
                }
                let mut made: Vec<Vec<f64>> = [&m, &v, &p].map(|x| read(&*dev, x)).to_vec();
                made.extend(copy.iter().chain(largest.iter().flatten()).map(|out| read(&*dev, out)));
                assert!(
                    first.get_or_insert_with(|| made.clone()) == &made,
                    "{} {moments} {master} {out:?}",
                    dev.name()
                );
            }
        }
    }
}

/// Of a matrix that 4 does not divide; the same bits on every device.
#[test]
fn polynomials_have_the_bits_of_their_formula() {
    const N: usize = 37;
    let (coefficients, z) = ([3.4445f32, -4.775, 2.0315], 0.3f32);
    for dtype in [DType::F32, DType::Bf16] {
        let (s, square) = (normal(1, N * N), normal(2, N * N));
        let stored = |x: f64| if dtype == DType::Bf16 { rounded(x) } else { x };
        let [a, b, c] = coefficients;
        let made: Vec<f64> = (0..N * N)
            .map(|i| {
                let (s, square, zz) = (stored(s[i]) as f32, square[i] as f32, z * z);
                let even = (b * (s * zz) + c * ((square * zz) * zz)) * z;
                stored(if i % (N + 1) == 0 { a * z + even } else { even } as f64)
            })
            .collect();
        for dev in devices() {
            let (mut s, square) = (buf(&*dev, dtype, &s), buf(&*dev, DType::F32, &square));
            let scale = buf(&*dev, DType::F32, &[z as f64, 5.0]);
            let (scale, square) = (scale.view(), square.view());
            dev.polynomial(Polynomial { coefficients, scale, square, s: s.view_mut() }).unwrap();
            assert_eq!(read(&*dev, &s), made, "{dtype} on {}", dev.name());
            let odd = Polynomial { coefficients, scale, square, s: s.view_mut().slice(0..N * N - 1) };
            assert!(dev.polynomial(odd).unwrap_err().to_string().contains("a square"));
        }
    }
}

/// On the CPU, a symmetric product has the bits of the whole product's lower half, copied, with any number of threads.
/// Others compute it whole.
#[test]
fn symmetric_products_are_the_lower_half_of_whole_ones() {
    for (n, k) in [(1, 5), (9, 40), (40, 7), (100, 70), (300, 33), (70, 3100)] {
        for (dtype, to) in [(DType::F32, DType::F32), (DType::Bf16, DType::F32), (DType::Bf16, DType::Bf16)] {
            for dev in devices().into_iter().filter(|dev| is_cpu(&**dev) || n * n * k < 100_000) {
                let x = buf(&*dev, dtype, &normal(5, n * k));
                let product = |shape: GemmShape, x: &Buf| {
                    let mut c = buf(&*dev, to, &vec![f64::NAN; n * n]);
                    dev.gemm(Gemm { shape, a: x.view(), b: x.view(), c: c.view_mut() }).unwrap();
                    (read(&*dev, &c), c)
                };
                for shape in [GemmShape::nt(n, n, k), GemmShape::tn(n, n, k)] {
                    let half = |c: Vec<f64>| -> Vec<f64> {
                        let lower = |at: usize| c[(at / n).max(at % n) * n + (at / n).min(at % n)];
                        if is_cpu(&*dev) { (0..n * n).map(lower).collect() } else { c }
                    };
                    let (whole, s) = product(shape, &x);
                    let what = format!("{shape:?} {dtype} to {to} on {}", dev.name());
                    assert!(product(shape.symmetric(), &x).0 == half(whole), "{what}");
                    if to == dtype {
                        let square = GemmShape::nn(n, n, n);
                        let whole = product(square, &s).0;
                        assert!(product(square.symmetric(), &s).0 == half(whole), "square of {what}");
                    }
                }
            }
        }
    }
}

/// A tiny update of masters in bf16, far below half of their spacing: rounding to nearest would never move them. Over
/// many steps and elements they follow f32, and so does the second moment; a weight and its moments draw other words.
#[test]
fn stochastic_rounding_has_no_bias_over_steps() {
    let (n, steps) = (4096, 200);
    let dev = flatshard_device::cpu::CpuDevice::new(flatshard_base::Meter::default());
    let run = |dtype: DType| {
        let of = |dtype, values: Vec<f64>| buf(&dev, dtype, &values);
        let (g, scale) = (of(DType::F32, vec![1e-3; n]), of(DType::F32, vec![1.0]));
        let (mut m, mut v) = (of(dtype, vec![1e-3; n]), of(dtype, vec![4e-6; n]));
        let mut p = of(dtype, vec![1.0; n]);
        for step in 1..=steps {
            let h = AdamWStep { lr: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, step: 1000 + step };
            let h = h.scalars();
            let mut words = dev.alloc(DType::F32, size_of_val(&h) / 4, Category::Other).unwrap();
            dev.upload(bytemuck::bytes_of(&h), words.view_mut()).unwrap();
            let (m, v, p) = (m.view_mut(), v.view_mut(), p.view_mut());
            let at = TensorPart { key: 99, ..TensorPart::default() };
            dev.adamw(AdamW {
                h: words.view(),
                scale: scale.view(),
                g: g.view(),
                m,
                v,
                p,
                out: None,
                absmax: None,
                at,
            })
            .unwrap();
        }
        [read(&dev, &p), read(&dev, &v)]
    };
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
    let ([exact_p, exact_v], [p, v]) = (run(DType::F32), run(DType::Bf16));
    let moved = 1.0 - exact_p[0];
    assert!(moved > 5e-3 && moved / (steps as f64) < 1.0 / 512.0, "{moved}: bf16 is spaced by 1 / 256 below 1");
    assert!((mean(&p) - exact_p[0]).abs() < 0.02 * moved, "{} is not {}", mean(&p), exact_p[0]);
    assert!((mean(&v) - exact_v[0]).abs() < 2e-3 * exact_v[0], "{} is not {}", mean(&v), exact_v[0]);
    let deviates = |x: &[f64]| x.iter().map(|each| each - mean(x)).collect::<Vec<_>>();
    let (of_p, of_v) = (deviates(&p), deviates(&v));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let correlation = dot(&of_p, &of_v) / (dot(&of_p, &of_p) * dot(&of_v, &of_v)).sqrt();
    assert!(correlation.abs() < 0.2, "weights and second moments are rounded together: {correlation}");
}

/// [m, p, out]
fn sgd_of<R: Real>(h: &SgdScalars, g: &[f64], m: &[f64], p: &[f64]) -> Outputs {
    let (mut m, mut p) = (reals::<R>(m), reals::<R>(p));
    for i in 0..g.len() {
        let decayed = R::of(g[i]) * R::of(SCALE) + R::of(h.weight_decay as f64) * p[i];
        m[i] = R::of(h.momentum as f64) * m[i] + decayed;
        p[i] = p[i] - R::of(h.lr as f64) * m[i];
    }
    vec![f64s(&m), f64s(&p), f64s(&p)]
}

#[test]
fn sgd() {
    for n in [0, 1, 777] {
        let (g, m, p, zeros) = (normal(1, n), normal(2, n), normal(3, n), vec![0.0; n]);
        let with = SgdScalars { lr: 0.1, momentum: 0.9, weight_decay: 0.01 };
        let operands = [h(with), scale(), f32_in("g", &g), f32_out("m", &m), f32_out("p", &p), y("out", &before(n))];
        let (exact, naive) = (sgd_of::<f64>(&with, &g, &m, &p), sgd_of::<f32>(&with, &g, &m, &p));
        conform("sgd", FORWARD, &operands, exact, naive, &|dev, bufs| {
            let [h, scale, g, m, p, out] = bufs else { unreachable!() };
            dev.sgd(Sgd {
                h: h.view(),
                scale: scale.view(),
                g: g.view(),
                m: Some(m.view_mut()),
                p: p.view_mut(),
                out: Some(out.view_mut()),
            })
        });
        let without = SgdScalars { momentum: 0.0, ..with };
        let operands = [h(without), scale(), f32_in("g", &g), f32_out("p", &p)];
        let of = |all: Outputs| vec![all[1].clone()];
        let (exact, naive) = (of(sgd_of::<f64>(&without, &g, &zeros, &p)), of(sgd_of::<f32>(&without, &g, &zeros, &p)));
        conform("sgd", FORWARD, &operands, exact, naive, &|dev, bufs| {
            let [h, scale, g, p] = bufs else { unreachable!() };
            dev.sgd(Sgd { h: h.view(), scale: scale.view(), g: g.view(), m: None, p: p.view_mut(), out: None })
        });
    }
}

/// Any split gives the same bits: sharding must not be visible.
#[test]
fn optimizers_do_not_depend_on_how_a_range_is_split() {
    let h = AdamWStep { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3 };
    let n = 1000;
    for dev in devices() {
        let run = |cuts: &[usize]| {
            let of = |values: Vec<f64>| buf(&*dev, DType::F32, &values);
            let (g, mut m, mut v, mut p) = (of(normal(1, n)), of(normal(2, n)), of(vec![0.5; n]), of(normal(3, n)));
            let (h, scale, mut out) =
                (of(constants(h.scalars())), of(vec![SCALE]), buf(&*dev, DType::Bf16, &vec![0.0; n]));
            for w in cuts.windows(2) {
                let r = w[0]..w[1];
                let (m, v) = (m.view_mut().slice(r.clone()), v.view_mut().slice(r.clone()));
                let (p, out) = (p.view_mut().slice(r.clone()), out.view_mut().slice(r.clone()));
                dev.adamw(AdamW {
                    h: h.view(),
                    scale: scale.view(),
                    g: g.view().slice(r),
                    m,
                    v,
                    p,
                    out: Some(out),
                    absmax: None,
                    at: TensorPart::default(),
                })
                .unwrap();
            }
            [read(&*dev, &m), read(&*dev, &v), read(&*dev, &p), read(&*dev, &out)]
        };
        let whole = run(&[0, n]);
        // Kernels need operands aligned to 16 bytes, which every shard is.
        let cuts = if is_cpu(&*dev) { [0, 1, 18, 500, 501, 516, 999, n] } else { [0, 8, 24, 496, 504, 520, 992, n] };
        assert_eq!(whole, run(&cuts));
        assert!(whole[2] != normal(3, n), "it did something");
    }
}

/// An overflowed gradient changes nothing: the host need not know before it continues.
#[test]
fn optimizers_change_nothing_with_a_non_finite_scale() {
    let (adamw, sgd) = (
        AdamWStep { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3 },
        SgdScalars { lr: 0.1, momentum: 0.9, weight_decay: 0.01 },
    );
    for dev in devices() {
        for scale in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let of = |values: &[f64]| buf(&*dev, DType::F32, values);
            let (h, momentum) = (of(&constants(adamw.scalars())), of(&constants(sgd)));
            let (scale, g) = (of(&[scale]), of(&[f64::NAN; 9]));
            let (mut m, mut v, mut p) = (of(&[1.0; 9]), of(&[2.0; 9]), of(&[3.0; 9]));
            let mut out = buf(&*dev, DType::Bf16, &[4.0; 9]);
            let (s, into) = (scale.view(), Some(out.view_mut()));
            dev.adamw(AdamW {
                h: h.view(),
                scale: s,
                g: g.view(),
                m: m.view_mut(),
                v: v.view_mut(),
                p: p.view_mut(),
                out: into,
                absmax: None,
                at: TensorPart::default(),
            })
            .unwrap();
            dev.sgd(Sgd {
                h: momentum.view(),
                scale: s,
                g: g.view(),
                m: Some(m.view_mut()),
                p: p.view_mut(),
                out: Some(out.view_mut()),
            })
            .unwrap();
            dev.sgd(Sgd { h: momentum.view(), scale: s, g: g.view(), m: None, p: p.view_mut(), out: None }).unwrap();
            let left = [&m, &v, &p, &out].map(|buf| read(&*dev, buf));
            assert_eq!(left, [[1.0; 9], [2.0; 9], [3.0; 9], [4.0; 9]], "{}", dev.name());
        }
    }
}
