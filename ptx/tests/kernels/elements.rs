//! Kernels over flat arrays: casts, sums, gated units, GELU, dropout, the optimizers.
use super::cases::{ConcatSlots, block_tables};
use super::harness::*;
use flatshard_base::rng::philox;
use flatshard_ptx::emulate::Argument;

/// Around the width of a vector, of a warp and of a grid.
const SIZES: [usize; 7] = [1, 3, 8, 31, 257, 1003, 4101];

#[test]
fn cast_rounds_to_nearest_even() {
    for (dtype, name) in [(Bf16, "bf16"), (F16, "f16")] {
        for n in SIZES {
            // First, ties both ways and the largest value that does not round to infinity.
            let mut values: Vec<f64> = normal(1, n).iter().map(|v| v * 1.001).collect();
            let edges = [1.00390625, 1.01171875, -0.0, f32::MAX as f64, 3.3895e38, 1e-40];
            values.iter_mut().zip(edges).for_each(|(v, edge)| *v = edge);
            let cast = |from, to, values: &[f64]| {
                let of = |d| DTYPES.iter().find(|(dtype, _)| *dtype == d).unwrap().1;
                let slots = vec![In(from, values.to_vec()), Out(to, n), long(n)];
                job(format!("cast_{}_{}", of(from), of(to)), 3, 256, slots).outputs().remove(0)
            };
            let narrow = cast(F32, dtype, &values);
            assert_eq!(narrow, rounded(&values, dtype), "{name} n {n}");
            assert_eq!(cast(dtype, F32, &narrow), narrow, "{name} n {n}");
        }
    }
}

#[test]
fn add_adds_to_what_is_there() {
    let mut pairs: Vec<_> = DTYPES.iter().map(|(d, name)| (*d, *d, format!("add_{name}"))).collect();
    pairs.extend([(Bf16, F32, "add_bf16_f32".into()), (F16, F32, "add_f16_f32".into())]);
    for (from, to, variant) in pairs {
        for (n, skew) in SIZES.into_iter().zip([0, 1].into_iter().cycle()) {
            let (x, y) = (normal(1, n), normal(2, n));
            let want: Vec<f64> = x.iter().zip(&y).map(|(x, y)| y + x).collect();
            let slots = vec![In(from, x), InOut(to, y), long(n)];
            let got = job(&variant, 3, 256, slots).skewed(skew).outputs();
            assert_eq!(got[0], rounded(&want, to), "{variant} n {n}");
        }
    }
}

/// Rounded at each rank in the dtype of sums, in rank order.
fn ranks_total(parts: &[Vec<f64>], sum_dtype: DType, largest: bool) -> Vec<f64> {
    let join = |a: f64, b: f64| match largest {
        true if b > a || b.is_nan() => b,
        true => a,
        false => rounded(&[a + b], sum_dtype)[0],
    };
    let mut total = parts[0].clone();
    for part in &parts[1..] {
        total.iter_mut().zip(part).for_each(|(t, x)| *t = join(*t, *x));
    }
    total
}

#[test]
fn ranks_are_summed_in_order_and_the_largest_may_be_nan() {
    let mut pairs: Vec<_> = DTYPES.iter().map(|(d, name)| (*d, *d, name.to_string())).collect();
    pairs.extend([(F64, F64, "f64".into()), (Bf16, F32, "bf16_f32".into()), (F16, F32, "f16_f32".into())]);
    for (from, to, name) in pairs {
        let sum_dtype = if from == F64 { F64 } else { F32 };
        for (i, (n, skew)) in SIZES.into_iter().zip([0, 1].into_iter().cycle()).enumerate() {
            let (ranks, part) = (1 + i % 4, n + i % 3);
            // Parts of very different sizes, so that the order shows in the last bits.
            let scale = |r: usize| [1.0, 3e3, -7e-4, 1.7][r];
            let mut parts: Vec<Vec<f64>> = (0..ranks)
                .map(|r| rounded(&normal(r as u64, n).iter().map(|x| x * scale(r)).collect::<Vec<_>>(), from))
                .collect();
            let y = rounded(&normal(9, n), to);
            let run = |parts: &[Vec<f64>], add: usize, largest: usize| {
                let gap = vec![0.0; part - n];
                let x = parts.iter().flat_map(|values| [values.clone(), gap.clone()].concat()).collect();
                let flags = [long(part * from.size()), int(ranks), int(add), int(largest)];
                let slots = [vec![In(from, x), InOut(to, y.clone()), long(n)], flags.into()].concat_slots();
                job(format!("sum_ranks_{name}"), 3, 256, slots).skewed(skew).outputs().remove(0)
            };
            let total = ranks_total(&parts, sum_dtype, false);
            assert_eq!(run(&parts, 0, 0), rounded(&total, to), "{name}: {ranks} of {n}");
            let added: Vec<f64> = total.iter().zip(&y).map(|(t, y)| rounded(&[y + t], sum_dtype)[0]).collect();
            assert_eq!(run(&parts, 1, 0), rounded(&added, to), "{name}: {ranks} of {n}, added");
            parts[ranks - 1][n / 2] = f64::NAN;
            let (got, mut want) = (run(&parts, 0, 1), rounded(&ranks_total(&parts, sum_dtype, true), to));
            assert!(got[n / 2].is_nan() && want[n / 2].is_nan(), "{name}: {ranks} of {n}");
            want[n / 2] = got[n / 2];
            assert_eq!(format!("{got:?}"), format!("{want:?}"), "{name}: {ranks} of {n}, largest");
        }
    }
}

#[test]
fn scale_multiplies_in_place() {
    for (dtype, name) in DTYPES {
        for (n, skew) in SIZES.into_iter().zip([0, 1].into_iter().cycle()) {
            let x = normal(1, n);
            let want: Vec<f64> = x.iter().map(|x| (*x as f32 * 0.37) as f64).collect();
            let got =
                job(format!("scale_{name}"), 3, 256, vec![InOut(dtype, x), long(n), real(0.37)]).skewed(skew).outputs();
            assert_eq!(got[0], rounded(&want, dtype), "{name} n {n}");
        }
    }
}

/// Including inputs at which a sigmoid in f32 is 0 or 1.
fn gates(n: usize) -> Vec<f64> {
    let mut gates: Vec<f64> = normal(2, n).iter().map(|g| g * 4.0).collect();
    gates.iter_mut().zip([0.0, -120.0, 120.0, -90.0, -16.0, 16.0]).for_each(|(g, edge)| *g = edge);
    gates
}

/// (f(x), f'(x)) as they are written.
fn silu<R: Real>(x: R) -> (R, R) {
    let s = R::of(1.0) / (R::of(1.0) + (-x).exp());
    (x * s, s + x * s * (R::of(1.0) - s))
}
fn gelu<R: Real>(x: R) -> (R, R) {
    let (one, half) = (R::of(1.0), R::of(0.5));
    let (c, k) = (R::of((2.0 / std::f64::consts::PI).sqrt()), R::of(0.044715));
    let t = (c * (x + k * x * x * x)).tanh();
    (half * x * (one + t), half * (one + t) + half * x * (one - t * t) * c * (one + R::of(3.0) * k * x * x))
}
type Unit<R> = fn(R) -> (R, R);

#[test]
fn gated_units_and_their_gradients() {
    let units: [(&str, Unit<f64>, Unit<f32>); 2] = [("swiglu", silu, silu), ("geglu", gelu, gelu)];
    for (unit, exact, naive) in units {
        for (dtype, name) in DTYPES {
            for (n, skew) in SIZES.into_iter().zip([0, 3].into_iter().cycle()) {
                let (gate, up, dy) = (gates(n), normal(3, n), normal(4, n));
                fn of<R: Real>(f: Unit<R>, gate: &[f64], up: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
                    let mut out = [vec![], vec![], vec![]];
                    for ((g, u), d) in gate.iter().zip(up).zip(dy) {
                        let (u, d, (y, slope)) = (R::of(*u), R::of(*d), f(R::of(*g)));
                        out.iter_mut().zip([y * u, d * u * slope, d * y]).for_each(|(o, v)| o.push(v.f64()));
                    }
                    out
                }
                let (want, rough) = (of(exact, &gate, &up, &dy), of(naive, &gate, &up, &dy));
                let (gate, up) = (|| In(dtype, gate.clone()), || In(dtype, up.clone()));
                let forward = vec![gate(), up(), Out(dtype, n), long(n)];
                let label = format!("{unit} {name} n {n}");
                let y = job(format!("{unit}_{name}"), 3, 256, forward).skewed(skew).outputs();
                compare(&label, FORWARD, &y[0], dtype, &want[0], &rough[0]);
                let backward = vec![gate(), up(), In(dtype, dy), Out(dtype, n), Out(dtype, n), long(n)];
                let got = job(format!("{unit}_backward_{name}"), 3, 256, backward).skewed(skew).outputs();
                for k in 0..2 {
                    compare(&format!("{label}: gradient {k}"), GRADIENT, &got[k], dtype, &want[k + 1], &rough[k + 1]);
                }
            }
        }
    }
}

#[test]
fn gelu_and_its_gradient() {
    for (dtype, name) in DTYPES {
        for n in SIZES {
            let (x, dy) = (gates(n), normal(4, n));
            fn of<R: Real>(x: &[f64], dy: &[f64]) -> [Vec<f64>; 2] {
                let both: Vec<(R, R)> = x.iter().map(|x| gelu(R::of(*x))).collect();
                let slope = both.iter().zip(dy).map(|(b, d)| (R::of(*d) * b.1).f64());
                [both.iter().map(|b| b.0.f64()).collect(), slope.collect()]
            }
            let (want, rough) = (of::<f64>(&x, &dy), of::<f32>(&x, &dy));
            let x = || In(dtype, x.clone());
            let y = job(format!("gelu_{name}"), 3, 256, vec![x(), Out(dtype, n), long(n)]).outputs();
            compare(&format!("gelu {name} n {n}"), FORWARD, &y[0], dtype, &want[0], &rough[0]);
            let slots = vec![x(), In(dtype, dy), Out(dtype, n), long(n)];
            let dx = job(format!("gelu_backward_{name}"), 3, 256, slots).outputs();
            compare(&format!("gelu backward {name} n {n}"), GRADIENT, &dx[0], dtype, &want[1], &rough[1]);
        }
    }
}

#[test]
fn activations_at_the_ends() {
    let gate = vec![f64::NAN, 1.0, -3e38, 3e38, -1e4, -100.0, 100.0];
    let up = vec![1.0, f64::NAN, 1.0, 1.0, 1.0, 1.0, 1.0];
    let y = job("swiglu_f32", 1, 32, vec![In(F32, gate), In(F32, up), Out(F32, 7), long(7)]).outputs().remove(0);
    assert_eq!(y.iter().map(|y| y.is_nan()).collect::<Vec<_>>(), [true, true, false, false, false, false, false]);
    assert_eq!(y[2], 0.0);
    assert_eq!(y[3], 3e38f32 as f64);
    assert_eq!(y[4], 0.0);
    assert!(y[5].abs() < 1e-30 && y[6] == 100.0, "{y:?}");
    let x = vec![f64::NAN, -3e38, 3e38, -100.0, 100.0];
    let y = job("gelu_exact_f32", 1, 32, vec![In(F32, x.clone()), Out(F32, 5), long(5)]).outputs().remove(0);
    assert!(y[0].is_nan() && y[1..] == [0.0, 3e38f32 as f64, 0.0, 100.0], "{y:?}");
    let slots = vec![In(F32, x), In(F32, vec![1.0; 5]), Out(F32, 5), long(5)];
    let dx = job("gelu_exact_backward_f32", 1, 32, slots).outputs().remove(0);
    assert!(dx[0].is_nan() && dx[1..] == [0.0, 1.0, 0.0, 1.0], "{dx:?}");
}

/// The mask by definition, from the engine's own Philox.
#[test]
fn dropout_has_the_bits_of_the_definition() {
    let (p, key) = (0.3f32, 0x0123_4567_89ab_cdef_u64);
    let threshold = (p as f64 * 4294967296.0) as u32;
    for (dtype, name) in DTYPES {
        for (n, skew) in SIZES.into_iter().zip([0, 1].into_iter().cycle()) {
            let x = normal(5, n);
            let scale = 1.0 / (1.0 - p);
            let want: Vec<f64> = (0..n)
                .map(|i| {
                    let word = philox(key, [(i / 4) as u32, 0, 0, 0])[i % 4];
                    if word >= threshold { (x[i] as f32 * scale) as f64 } else { 0.0 }
                })
                .collect();
            let words = In(U32, [key as u32, (key >> 32) as u32].map(f64::from).to_vec());
            let slots = vec![InOut(dtype, x), words, long(n), Value(Argument::U32(threshold)), real(scale)];
            let got = job(format!("dropout_{name}"), 3, 256, slots).skewed(skew).outputs();
            assert_eq!(got[0], rounded(&want, dtype), "{name} n {n}");
        }
    }
}

#[test]
fn dropout_of_rows_has_the_bits_of_the_definition() {
    let (p, key, rows) = (0.3f32, 0x0123_4567_89ab_cdef_u64, 5);
    let (threshold, scale) = ((p as f64 * 4294967296.0) as u32, 1.0 / (1.0 - p));
    let map = [3u32, 1 << 31, 0, 3, 7];
    for (dtype, name) in DTYPES {
        // Whole counters; the same with unaligned rows; rows that begin or end within a counter.
        for (width, first, skew) in [(64, 8, 0), (64, 8, 1), (1028, 0, 0), (61, 4, 0), (64, 6, 0), (3, 3, 1), (1, 2, 0)]
        {
            for (mapped, adds) in [(0, 0), (1, 0), (1, 1)] {
                let (x, y) = (rounded(&normal(5, rows * width), dtype), rounded(&normal(6, rows * width), dtype));
                let made = |i: usize| {
                    let (row, channel) = (i / width, first + i % width);
                    let token = if mapped == 1 { map[row] } else { row as u32 };
                    let word = philox(key, [(channel / 4) as u32, 0, token, 0])[channel % 4];
                    let kept = if word >= threshold { x[i] as f32 * scale } else { 0.0 };
                    if adds == 1 { (y[i] as f32 + kept) as f64 } else { kept as f64 }
                };
                let want: Vec<f64> = (0..rows * width).map(made).collect();
                let words = In(U32, [key as u32, (key >> 32) as u32].map(f64::from).to_vec());
                let map = In(U32, map.map(f64::from).to_vec());
                let out = if adds == 1 { InOut(dtype, y.clone()) } else { Out(dtype, rows * width) };
                let mut slots = vec![In(dtype, x.clone()), words, map, out, int(rows), int(width), int(first)];
                slots.extend([Value(Argument::U32(threshold)), real(scale), int(mapped), int(adds)]);
                let columns = (first % 4 + width).div_ceil(4).div_ceil(256) as u32;
                let job = Job { grid: [3, columns], ..job(format!("dropout_rows_{name}"), 1, 256, slots) };
                let got = job.skewed(skew).outputs();
                assert_eq!(got[0], rounded(&want, dtype), "{name} {width} from {first}, {mapped} {adds}");
            }
        }
    }
}

/// lr, beta1, beta2, eps, decay.
const HYPER: [f32; 5] = [1e-2, 0.9, 0.95, 1e-8, 0.1];
const SCALE: f64 = 0.75;

/// [m, v, p]: torch.optim.AdamW, line by line.
fn adamw_of<R: Real>(g: &[f64], m: &[f64], v: &[f64], p: &[f64], step: i32) -> [Vec<f64>; 3] {
    let [lr, b1, b2, eps, decay] = HYPER.map(|h| h as f64);
    let (bc1, bc2) = (1.0 - b1.powi(step), 1.0 - b2.powi(step));
    let mut out = [vec![], vec![], vec![]];
    for i in 0..g.len() {
        let g = R::of(g[i]) * R::of(SCALE);
        let p = R::of(p[i]) * R::of(1.0 - lr * decay);
        let m = R::of(m[i]);
        let m = m + (g - m) * R::of(1.0 - b1);
        let v = R::of(v[i]) * R::of(b2) + g * g * R::of(1.0 - b2);
        let denominator = v.sqrt() / R::of(bc2.sqrt()) + R::of(eps);
        let p = p - R::of(lr / bc1) * m / denominator;
        out.iter_mut().zip([m, v, p]).for_each(|(out, value)| out.push(value.f64()));
    }
    out
}

/// The second element is the norm, which optimizers do not use.
fn scale() -> Slot {
    In(F32, vec![SCALE, 123.0])
}

#[test]
fn adamw() {
    for (variant, copy) in
        [("adamw", None), ("adamw_bf16", Some(Bf16)), ("adamw_f16", Some(F16)), ("adamw_f32", Some(F32))]
    {
        for (n, step, skew) in [(1, 1, 0), (7, 3, 1), (1003, 1, 0), (1003, 1, 1), (4101, 1000, 0)] {
            let (g, m, p) = (normal(1, n), normal(2, n), normal(3, n));
            let v: Vec<f64> = normal(4, n).iter().map(|v| v * v).collect();
            let [lr, b1, b2, _, decay] = HYPER.map(|h| h as f64);
            let (size, root) = (lr / (1.0 - b1.powi(step)), 1.0 / (1.0 - b2.powi(step)).sqrt());
            let constants = [1.0 - lr * decay, 1.0 - b1, b2, 1.0 - b2, size, root, HYPER[3] as f64, 0.0];
            let constants = In(F32, constants.map(|s| s as f32 as f64).to_vec());
            let out = copy.map_or(Out(F32, 0), |dtype| Out(dtype, n));
            let state = [&m, &v, &p].map(|values| InOut(F32, values.clone()));
            let mut slots = vec![In(F32, g.clone())];
            slots.extend(state);
            slots.extend([out, constants, scale(), long(n)]);
            let got = job(variant, 3, 256, slots).skewed(skew).outputs();
            let (exact, naive) = (adamw_of::<f64>(&g, &m, &v, &p, step), adamw_of::<f32>(&g, &m, &v, &p, step));
            for (k, what) in ["m", "v", "p"].iter().enumerate() {
                compare(&format!("{variant} {what} n {n}"), FORWARD, &got[k], F32, &exact[k], &naive[k]);
            }
            if let Some(dtype) = copy {
                assert_eq!(got[3], rounded(&got[2], dtype), "{variant}: the copy is p rounded");
            }
        }
    }
}

/// A block of a moment after a step: from values to bytes, by a search, and the largest magnitude.
fn quantized(x: &[f32], bounds: &[f64]) -> (Vec<f64>, f64) {
    let of = x.iter().fold(0f32, |most, x| most.max(x.abs()));
    let of = if of < f32::MIN_POSITIVE { 0.0 } else { of };
    let inverse = if of > 0.0 { 1.0 / of } else { 0.0 };
    let code = |x: &f32| bounds.iter().filter(|bound| (**bound as f32) < x * inverse).count() as f64;
    (x.iter().map(code).collect(), of as f64)
}

#[test]
fn adamw_in_blocks_has_the_bits_of_its_formula_in_f32() {
    let tables = block_tables();
    let constants = [0.999, 0.1, 0.95, 0.05, 0.01, 1.5, 1e-8].map(|x| x as f32);
    let [keep, new1, beta2, new2, size, root, eps] = constants;
    for (copy, suffix) in [(None, ""), (Some(Bf16), "_bf16"), (Some(F16), "_f16"), (Some(F32), "_f32")] {
        for (n, skew, tiny) in [(1, 0, 1.0), (257, 1, 1.0), (1003, 0, 1.0), (4101, 3, 1.0), (600, 0, 1e-20)] {
            let blocks = |n: usize| n.div_ceil(256);
            let (g, p) = (normal(1, n).iter().map(|g| g * tiny).collect::<Vec<_>>(), normal(3, n));
            let codes = |seed: usize| (0..n).map(|i| ((seed + i) * 167 % 256) as f64).collect::<Vec<_>>();
            let largest = |seed| normal(seed, blocks(n)).iter().map(|x| x.abs() * tiny * tiny).collect::<Vec<_>>();
            let (m, v, of_m, of_v) = (codes(1), codes(2), largest(5), largest(6));
            let mut want = [m.clone(), v.clone(), vec![], vec![], vec![]];
            for block in 0..blocks(n) {
                let all = 256 * block..n.min(256 * block + 256);
                let (mut new_m, mut new_v) = (vec![], vec![]);
                for i in all.clone() {
                    let g = g[i] as f32 * SCALE as f32;
                    let was = tables[m[i] as usize] as f32 * of_m[block] as f32;
                    new_m.push(was + (g - was) * new1);
                    let was = tables[256 + v[i] as usize] as f32 * of_v[block] as f32;
                    new_v.push(was * beta2 + g * g * new2);
                    let (m, v) = (new_m[new_m.len() - 1], new_v[new_v.len() - 1]);
                    want[2].push((p[i] as f32 * keep - m * size / (v.sqrt() * root + eps)) as f64);
                }
                for (k, x, bounds) in [(0, new_m, &tables[512..767]), (1, new_v, &tables[768..1023])] {
                    let (codes, of) = quantized(&x, bounds);
                    want[k].splice(all.clone(), codes);
                    want[3 + k].push(of);
                }
            }
            let out = copy.map_or(Out(F32, 0), |dtype| Out(dtype, n));
            let h = In(F32, constants.into_iter().chain([0.0]).map(f64::from).collect());
            let state = [InOut(U8, m), InOut(U8, v), InOut(F32, p), out, InOut(F32, of_m), InOut(F32, of_v)];
            let mut slots = vec![In(F32, g)];
            slots.extend(state);
            slots.extend([In(F32, tables.clone()), h, scale(), long(n)]);
            let mut got = job(format!("adamw_blocks{suffix}"), 3, 256, slots).skewed(skew).outputs();
            let copied = got.remove(3);
            assert_eq!(got, want, "{suffix} n {n}");
            if let Some(dtype) = copy {
                assert_eq!(copied, rounded(&got[2], dtype));
            }
        }
    }
}

/// A scale that is not finite: nothing is written.
#[test]
fn an_overflowed_gradient_updates_nothing() {
    for scale in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let both = |x: f64| InOut(F32, vec![x; 9]);
        let end = || [In(F32, vec![0.5; 8]), In(F32, vec![scale]), long(9)];
        let mut slots = vec![In(F32, vec![1.0; 9]), both(2.0), both(3.0), both(4.0), InOut(Bf16, vec![5.0; 9])];
        slots.extend(end());
        assert_eq!(job("adamw_bf16", 1, 256, slots).outputs(), [[2.0; 9], [3.0; 9], [4.0; 9], [5.0; 9]]);
        let mut slots = vec![In(F32, vec![1.0; 9]), both(2.0), both(3.0), InOut(F16, vec![4.0; 9])];
        slots.extend(end());
        assert_eq!(job("sgd_momentum_f16", 1, 256, slots).outputs(), [[2.0; 9], [3.0; 9], [4.0; 9]]);
    }
}

#[test]
fn sgd_has_the_bits_of_its_formula_in_f32() {
    let (lr, momentum, decay) = (0.1f32, 0.9f32, 0.01f32);
    for (with, name) in [(false, "sgd"), (true, "sgd_momentum")] {
        for (copy, suffix) in [(None, ""), (Some(Bf16), "_bf16"), (Some(F16), "_f16"), (Some(F32), "_f32")] {
            for (n, skew) in [(1, 0), (7, 1), (1003, 0), (4101, 0)] {
                let (g, m, p) = (normal(1, n), normal(2, n), normal(3, n));
                let (mut want_m, mut want_p) = (vec![], vec![]);
                for i in 0..n {
                    let d = g[i] as f32 * SCALE as f32 + decay * p[i] as f32;
                    let new = if with { momentum * m[i] as f32 + d } else { d };
                    want_m.push(if with { new as f64 } else { m[i] });
                    want_p.push((p[i] as f32 - lr * new) as f64);
                }
                let out = copy.map_or(Out(F32, 0), |dtype| Out(dtype, n));
                let constants = In(F32, [lr, momentum, decay].map(f64::from).to_vec());
                let slots = vec![In(F32, g), InOut(F32, m), InOut(F32, p), out, constants, scale(), long(n)];
                let got = job(format!("{name}{suffix}"), 3, 256, slots).skewed(skew).outputs();
                assert_eq!((&got[0], &got[1]), (&want_m, &want_p), "{name}{suffix} n {n}");
                if let Some(dtype) = copy {
                    assert_eq!(got[2], rounded(&want_p, dtype));
                }
            }
        }
    }
}
