//! The optimizers, and the exact norm.
use super::harness::*;
use crate::common::reference::{Real, f64s, reals};
use bytemuck::Pod;
use flatshard::base::dynamic8::BLOCK;
use flatshard::base::{Category, DType};
use flatshard::device::ops::{
    AdamW, AdamWStep, ClipScale, Gemm, GemmShape, Polynomial, Sgd, SgdScalars, SumSquares, TensorPart,
};
use flatshard::device::{ALIGN, Buf, Device, LIMBS};

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

/// Half of a symmetric product, copied, has the bits of the whole product, with any number of threads.
#[test]
fn symmetric_products_have_the_bits_of_whole_ones() {
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
                    let (whole, s) = product(shape, &x);
                    let what = format!("{shape:?} {dtype} to {to} on {}", dev.name());
                    assert_eq!(product(shape.symmetric(), &x).0, whole, "{what}");
                    if to == dtype {
                        let square = GemmShape::nn(n, n, n);
                        assert_eq!(product(square.symmetric(), &s).0, product(square, &s).0, "square of {what}");
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
    let dev = flatshard::device::cpu::CpuDevice::new(flatshard::base::Meter::default());
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

/// The accumulator after these parts of `x`, each (start, end).
fn limbs(dev: &dyn Device, x: &[f64], cuts: &[(usize, usize)]) -> Vec<f64> {
    let x = buf(dev, DType::F32, x);
    let mut acc = dev.alloc(DType::F64, LIMBS, Category::Other).unwrap();
    for &(start, end) in cuts {
        dev.sum_squares(SumSquares { x: x.view().slice(start..end), acc: acc.view_mut() }).unwrap();
    }
    read(dev, &acc)
}
fn clip(dev: &dyn Device, acc: &[f64], max_norm: f32) -> [f64; 2] {
    unscaled_clip(dev, acc, max_norm, 1.0)
}
fn unscaled_clip(dev: &dyn Device, acc: &[f64], max_norm: f32, unscale: f32) -> [f64; 2] {
    let acc = buf(dev, DType::F64, acc);
    let mut out = buf(dev, DType::F32, &[9.0, 9.0]);
    let unscale = buf(dev, DType::F32, &[unscale as f64]);
    dev.clip_scale(ClipScale { acc: acc.view(), max_norm, unscale: unscale.view(), out: out.view_mut() }).unwrap();
    read(dev, &out).try_into().unwrap()
}

/// Numbers of every f32 magnitude, including subnormals and zeros; the last block is short.
fn wild() -> Vec<f64> {
    let magnitude = |i: usize| 2f64.powi((i * 37 % 277) as i32 - 149);
    let mut x: Vec<f64> = normal(9, 20 * ALIGN + 77).iter().enumerate().map(|(i, x)| x * magnitude(i)).collect();
    x[5 * ALIGN..6 * ALIGN].fill(0.0);
    x[7 * ALIGN..8 * ALIGN].fill(f32::from_bits(1) as f64);
    x.iter().map(|&x| (x as f32).clamp(f32::MIN, f32::MAX) as f64).collect()
}

#[test]
fn limbs_do_not_depend_on_split_or_order() {
    let x = wild();
    let n = x.len();
    let mut first: Option<Vec<f64>> = None;
    for dev in devices() {
        let whole = limbs(&*dev, &x, &[(0, n)]);
        assert!(
            whole.iter().all(|&l| l.fract() == 0.0 && (0.0..4_294_967_296.0).contains(&l)),
            "whole limbs below 2^32"
        );
        let blocks: Vec<_> = (0..n.div_ceil(ALIGN)).map(|b| (b * ALIGN, ((b + 1) * ALIGN).min(n))).collect();
        assert_eq!(limbs(&*dev, &x, &blocks), whole, "block by block");
        let backwards: Vec<_> = blocks.iter().rev().copied().collect();
        assert_eq!(limbs(&*dev, &x, &backwards), whole, "backwards");
        assert_eq!(limbs(&*dev, &x, &[(7 * ALIGN, n), (0, 0), (3 * ALIGN, 7 * ALIGN), (0, 3 * ALIGN)]), whole);
        // Ranks that each hold a part, with their limbs all-reduced: the same norm, to the bit.
        let parts = [(0, 4 * ALIGN), (4 * ALIGN, 13 * ALIGN), (13 * ALIGN, n)];
        let mut summed = vec![0.0; LIMBS];
        for part in parts {
            limbs(&*dev, &x, &[part]).iter().zip(&mut summed).for_each(|(l, s)| *s += l);
        }
        let bits = |acc: &[f64]| clip(&*dev, acc, 1.0).map(f64::to_bits);
        assert_eq!(bits(&summed), bits(&whole));
        assert_eq!(first.get_or_insert(whole.clone()), &whole, "every device, every width");
    }
}

#[test]
fn the_norm_is_correctly_rounded() {
    for dev in devices() {
        let norm = |x: &[f64]| clip(&*dev, &limbs(&*dev, x, &[(0, x.len())]), 0.0)[1];
        for x in [normal(3, 100_000), normal(4, 1), vec![], vec![0.0; 300], vec![3.0, 4.0]] {
            let want = x.iter().map(|x| x * x).sum::<f64>().sqrt();
            assert!((norm(&x) - want).abs() <= 6e-8 * want, "{} is not {want}", norm(&x));
        }
        let (tiny, huge) = (f32::from_bits(1) as f64, f32::MAX as f64);
        assert_eq!(norm(&[tiny]), tiny);
        assert_eq!(norm(&vec![tiny; 4 * ALIGN * ALIGN]), tiny * 2.0 * ALIGN as f64);
        assert_eq!(norm(&[huge, tiny]), huge);
        assert_eq!(norm(&[1e30, 1e-30]), 1e30f32 as f64);
        assert_eq!(norm(&[huge; 4]), f64::INFINITY, "twice the largest f32");
    }
}

#[test]
fn clipping() {
    for dev in devices() {
        let acc = limbs(&*dev, &[3.0, 4.0], &[(0, 2)]);
        assert_eq!(clip(&*dev, &acc, 0.0), [1.0, 5.0], "0 is off");
        assert_eq!(clip(&*dev, &acc, 10.0), [1.0, 5.0]);
        assert_eq!(clip(&*dev, &acc, 1.0), [(1.0 / (5.0 + 1e-6)) as f32 as f64, 5.0]);
        assert_eq!(clip(&*dev, &[0.0; LIMBS], 1.0), [1.0, 0.0]);
    }
}

/// A power-of-two loss scale changes no bits except the factor's exponent.
#[test]
fn a_scaled_gradient_is_clipped_like_the_unscaled_one() {
    let x: Vec<f64> = normal(3, 3 * ALIGN).to_vec();
    let scaled: Vec<f64> = x.iter().map(|x| x * 65536.0).collect();
    for dev in devices() {
        let [plain, scaled] = [&x, &scaled].map(|x| limbs(&*dev, x, &[(0, 3 * ALIGN)]));
        for max_norm in [0.0, 1.0, 100.0] {
            let [scale, norm] = clip(&*dev, &plain, max_norm);
            assert!(norm > 10.0 && norm < 100.0);
            let got = unscaled_clip(&*dev, &scaled, max_norm, 1.0 / 65536.0);
            assert_eq!(got, [scale / 65536.0, norm], "{} max {max_norm}", dev.name());
        }
    }
}

#[test]
fn a_non_finite_gradient_makes_the_norm_non_finite() {
    for dev in devices() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for at in [0, 127, 128, 299] {
                let mut x = vec![1.0; 300];
                x[at] = bad;
                let parts = limbs(&*dev, &x, &[(0, 128), (128, 300)]);
                let [scale, norm] = clip(&*dev, &parts, 1.0);
                assert!(!norm.is_finite() && !scale.is_finite(), "{bad} at {at} gave scale {scale}, norm {norm}");
            }
        }
    }
}

#[test]
fn the_norm_refuses_mismatched_operands() {
    let acc = operand("acc", Kind::Fixed(DType::F64), Role::Input, [0.0; LIMBS]);
    let x = operand("x", Kind::Fixed(DType::F32), Role::Scratch, [1.0]);
    conform("sum_squares", FORWARD, &[x, acc.clone()], vec![], vec![], &|dev, bufs| {
        let [x, acc] = bufs else { unreachable!() };
        dev.sum_squares(SumSquares { x: x.view(), acc: acc.view_mut() })
    });
    conform(
        "clip_scale",
        FORWARD,
        &[acc, operand("unscale", Kind::Fixed(DType::F32), Role::Scratch, [1.0]), f32_out("out", &[0.0; 2])],
        vec![vec![1.0, 0.0]],
        vec![vec![1.0, 0.0]],
        &|dev, bufs| {
            let [acc, unscale, out] = bufs else { unreachable!() };
            dev.clip_scale(ClipScale { acc: acc.view(), max_norm: 1.0, unscale: unscale.view(), out: out.view_mut() })
        },
    );
}
