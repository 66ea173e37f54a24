//! Copies, biases, activations, dropout and embeddings.
use super::harness::*;
use crate::common::reference::{self, Real, each};
use flatshard_base::{DType, rng::philox};
use flatshard_device::ops::{
    Bias, BiasBackward, Clamp, ClampBackward, Dropout, DropoutRows, Embed, EmbedBackward, EmbedShape, Gelu,
    GeluBackward, Gemm, GemmShape, Glu, GluBackward, SigmoidGate, SigmoidGateBackward,
};
use flatshard_device::{Buf, Device};

/// Rows and columns.
pub const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 5), (7, 64), (0, 16), (4, 768), (2, 1001)];

/// An elementwise operation: `inputs`, then outputs by name, each over `n` elements.
macro_rules! elementwise {
    ($test:ident, $operands:ident, $factor:expr, [$($input:ident),*], [$($output:ident),*], $f:expr) => {
        #[test]
        fn $test() {
            for n in [0, 1, 17, 64, 1003] {
                let mut seed = 0;
                let mut draw = || { seed += 1; normal(seed, n).iter().map(|x| x * 4.0).collect::<Vec<f64>>() };
                $(let $input = draw();)*
                conform(
                    stringify!($test),
                    $factor,
                    &[$(super::harness::x(stringify!($input), &$input),)* $(super::harness::y(stringify!($output), &before(n)),)*],
                    each::<f64, _, _>([$(&$input),*], $f),
                    each::<f32, _, _>([$(&$input),*], $f),
                    &|dev, bufs| {
                        let [$($input,)* $($output,)*] = bufs else { unreachable!() };
                        dev.$test($operands { $($input: $input.view(),)* $($output: $output.view_mut()),* })
                    },
                );
            }
        }
    };
}
fn swiglu_of<R: Real>([gate, up]: [R; 2]) -> [R; 1] {
    [reference::silu(gate) * up]
}
fn swiglu_slopes<R: Real>([gate, up, dy]: [R; 3]) -> [R; 2] {
    [dy * up * reference::silu_slope(gate), dy * reference::silu(gate)]
}
fn geglu_of<R: Real>([gate, up]: [R; 2]) -> [R; 1] {
    [reference::gelu(gate) * up]
}
fn geglu_slopes<R: Real>([gate, up, dy]: [R; 3]) -> [R; 2] {
    [dy * up * reference::gelu_slope(gate), dy * reference::gelu(gate)]
}
fn gelu_of<R: Real>([x]: [R; 1]) -> [R; 1] {
    [reference::gelu(x)]
}
fn gelu_slopes<R: Real>([x, dy]: [R; 2]) -> [R; 1] {
    [dy * reference::gelu_slope(x)]
}
elementwise!(swiglu, Glu, FORWARD, [gate, up], [y], swiglu_of);
elementwise!(swiglu_backward, GluBackward, GRADIENT, [gate, up, dy], [dgate, dup], swiglu_slopes);
elementwise!(geglu, Glu, FORWARD, [gate, up], [y], geglu_of);
elementwise!(geglu_backward, GluBackward, GRADIENT, [gate, up, dy], [dgate, dup], geglu_slopes);
elementwise!(gelu, Gelu, FORWARD, [x], [y], gelu_of);
fn relu_squared_of<R: Real>([x]: [R; 1]) -> [R; 1] {
    [if x.f64() > 0.0 { x * x } else { R::of(0.0) }]
}
fn relu_squared_slopes<R: Real>([x, dy]: [R; 2]) -> [R; 1] {
    [if x.f64() > 0.0 { dy * (x * R::of(2.0)) } else { R::of(0.0) }]
}
fn gelu_exact_of<R: Real>([x]: [R; 1]) -> [R; 1] {
    [reference::gelu_exact(x)]
}
fn gelu_exact_slopes<R: Real>([x, dy]: [R; 2]) -> [R; 1] {
    [dy * reference::gelu_exact_slope(x)]
}
elementwise!(gelu_exact, Gelu, FORWARD, [x], [y], gelu_exact_of);
elementwise!(gelu_exact_backward, GeluBackward, GRADIENT, [x, dy], [dx], gelu_exact_slopes);
elementwise!(relu_squared, Gelu, FORWARD, [x], [y], relu_squared_of);
elementwise!(relu_squared_backward, GeluBackward, GRADIENT, [x, dy], [dx], relu_squared_slopes);
elementwise!(gelu_backward, GeluBackward, GRADIENT, [x, dy], [dx], gelu_slopes);
fn sigmoid_gate_of<R: Real>([gate, x]: [R; 2]) -> [R; 1] {
    [reference::sigmoid(gate) * x]
}
elementwise!(sigmoid_gate, SigmoidGate, FORWARD, [gate, x], [y], sigmoid_gate_of);

/// The gradient of x replaces that of y.
#[test]
fn sigmoid_gate_backward() {
    fn slopes<R: Real>([gate, x, dy]: [R; 3]) -> [R; 2] {
        let s = reference::sigmoid(gate);
        [dy * s, dy * x * s * reference::sigmoid(R::of(0.0) - gate)]
    }
    for n in [0, 1, 17, 64, 1003] {
        let [gate, values, dy] = [1, 2, 3].map(|seed| normal(seed, n));
        let operands = [x("gate", &gate), x("x", &values), y("dy", &dy), y("dgate", &before(n))];
        let given = [&gate[..], &values, &dy];
        let (exact, naive) = (each::<f64, _, _>(given, slopes), each::<f32, _, _>(given, slopes));
        conform("sigmoid_gate_backward", GRADIENT, &operands, exact, naive, &|dev, bufs| {
            let [gate, x, dy, dgate] = bufs else { unreachable!() };
            let (gate, x, dy, dgate) = (gate.view(), x.view(), dy.view_mut(), dgate.view_mut());
            dev.sigmoid_gate_backward(SigmoidGateBackward { gate, x, dy, dgate })
        });
    }
}

/// Between numbers, on one of them, and ReLU.
#[test]
fn clamps() {
    for (n, limits) in [(0, [-1.0, 0.5]), (1, [-1.0, 0.5]), (1003, [-1.0, 0.5]), (17, Clamp::RELU), (64, Clamp::RELU)] {
        let [low, high] = limits.map(f64::from);
        let (mut of_x, dy) = (normal(1, n), normal(2, n));
        of_x.iter_mut().zip([low, high]).for_each(|(x, limit)| *x = limit);
        let clamped: Vec<f64> = of_x.iter().map(|x| x.clamp(low, high)).collect();
        let within = |(&x, &dy): (&f64, &f64)| if low < x && x <= high { dy } else { 0.0 };
        let masked: Vec<f64> = of_x.iter().zip(&dy).map(within).collect();
        conform("clamp", FORWARD, &[y("x", &of_x)], vec![clamped.clone()], vec![clamped], &|dev, bufs| {
            dev.clamp(Clamp { limits, x: bufs[0].view_mut() })
        });
        let operands = [x("x", &of_x), y("dx", &dy)];
        conform("clamp_backward", GRADIENT, &operands, vec![masked.clone()], vec![masked], &|dev, bufs| {
            let [x, dx] = bufs else { unreachable!() };
            dev.clamp_backward(ClampBackward { limits, x: x.view(), dx: dx.view_mut() })
        });
    }
}

/// The tails: 0 on the left, the identity on the right, and never a NaN from a finite number.
#[test]
fn activations_at_extreme_inputs() {
    for dev in devices() {
        let ends = [-3e38, -1e4, -100.0, 100.0, 1e4, f64::NAN];
        let a = buf(&*dev, DType::F32, &ends);
        let ones = buf(&*dev, DType::F32, &[1.0; 6]);
        let mut out = buf(&*dev, DType::F32, &[0.0; 6]);
        let mut other = buf(&*dev, DType::F32, &[0.0; 6]);
        let is = |got: Vec<f64>, want: [f64; 5]| {
            assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() <= 1e-6 * w.abs().max(1.0)), "{got:?}");
            assert!(got[5].is_nan());
        };
        dev.swiglu(Glu { gate: a.view(), up: ones.view(), y: out.view_mut() }).unwrap();
        is(read(&*dev, &out), [0.0, 0.0, 0.0, 100.0, 1e4]);
        dev.gelu(Gelu { x: a.view(), y: out.view_mut() }).unwrap();
        is(read(&*dev, &out), [0.0, 0.0, 0.0, 100.0, 1e4]);
        dev.geglu(Glu { gate: a.view(), up: ones.view(), y: out.view_mut() }).unwrap();
        is(read(&*dev, &out), [0.0, 0.0, 0.0, 100.0, 1e4]);
        dev.swiglu_backward(GluBackward {
            gate: a.view(),
            up: ones.view(),
            dy: ones.view(),
            dgate: out.view_mut(),
            dup: other.view_mut(),
        })
        .unwrap();
        is(read(&*dev, &out), [0.0, 0.0, 0.0, 1.0, 1.0]);
        is(read(&*dev, &other), [0.0, 0.0, 0.0, 100.0, 1e4]);
    }
}

#[test]
fn copy_and_cast() {
    let values: Vec<f64> = (0..333).map(|i| (i as f64 * 0.37).sin() * 1e3).collect();
    for dev in devices() {
        for from in FLOATS {
            for to in FLOATS {
                let src = buf(&*dev, from, &values);
                let mut dst = buf(&*dev, to, &before(333));
                let copied = dev.copy(src.view(), dst.view_mut());
                if from != to && from != DType::F32 && to != DType::F32 {
                    assert!(copied.unwrap_err().to_string().contains("cannot cast"), "{from} to {to}");
                    continue; // unused: from one narrow dtype to the other
                }
                copied.unwrap();
                // Through f32, the only supported path.
                assert_eq!(read(&*dev, &dst), read(&*dev, &buf(&*dev, to, &read(&*dev, &src))), "{from} to {to}");
            }
        }
        let tokens = buf(&*dev, DType::U32, &[4e9, 5.0]);
        let mut same = buf(&*dev, DType::U32, &[0.0; 2]);
        dev.copy(tokens.view(), same.view_mut()).unwrap();
        assert_eq!(read(&*dev, &same), [4e9, 5.0]);
        let mut floats = buf(&*dev, DType::F32, &[0.0; 2]);
        assert!(dev.copy(tokens.view(), floats.view_mut()).unwrap_err().to_string().contains("u32"));
        assert!(dev.copy(tokens.view().slice(0..1), same.view_mut()).is_err());
        dev.zero(same.view_mut().slice(0..1)).unwrap();
        assert_eq!(read(&*dev, &same), [0.0, 5.0]);
    }
}

#[test]
fn bf16_rounds_to_nearest_even_and_keeps_nan() {
    for dev in devices() {
        let bits = [0x3f80_8000u32, 0x3f81_8000, 0x3f80_8001, 0x7f7f_ffff, 0x7f80_0001, 0xff80_0000, 0x0000_8001];
        let values: Vec<f64> = bits.iter().map(|&b| f32::from_bits(b) as f64).collect();
        let src = buf(&*dev, DType::F32, &values);
        let mut dst = dev.alloc(DType::Bf16, bits.len(), flatshard_base::Category::Other).unwrap();
        dev.copy(src.view(), dst.view_mut()).unwrap();
        let mut got = vec![0; 2 * bits.len()];
        dev.download(dst.view(), &mut got).unwrap();
        let got: Vec<u16> = got.chunks(2).map(|b| u16::from_ne_bytes([b[0], b[1]])).collect();
        assert!(half::bf16::from_bits(got[4]).is_nan());
        assert_eq!([got[0], got[1], got[2], got[3], got[5], got[6]], [0x3f80, 0x3f82, 0x3f81, 0x7f80, 0xff80, 1]);
    }
}

#[test]
fn f16_rounds_to_nearest_even_and_keeps_subnormals_infinities_and_nan() {
    for dev in devices() {
        // 65504 and the tie above it, the smallest normal, ties between subnormals, half of the smallest one.
        let values = [1.000_488_281_25, 1.001_464_843_75, 65519.0, 65520.0, 6.103_515_625e-5, 2.5 / 16_777_216.0];
        let more = [3.5 / 16_777_216.0, 0.5 / 16_777_216.0, f64::NEG_INFINITY, f64::NAN];
        let src = buf(&*dev, DType::F32, &[&values[..], &more].concat());
        let mut dst = dev.alloc(DType::F16, 10, flatshard_base::Category::Other).unwrap();
        dev.copy(src.view(), dst.view_mut()).unwrap();
        let mut got = vec![0; 20];
        dev.download(dst.view(), &mut got).unwrap();
        let got: Vec<u16> = got.chunks(2).map(|b| u16::from_ne_bytes([b[0], b[1]])).collect();
        assert_eq!(got[..9], [0x3c00, 0x3c02, 0x7bff, 0x7c00, 0x0400, 2, 4, 0, 0xfc00], "{}", dev.name());
        assert!(half::f16::from_bits(got[9]).is_nan());
        let mut back = buf(&*dev, DType::F32, &[0.0; 10]);
        dev.copy(dst.view(), back.view_mut()).unwrap();
        assert_eq!(read(&*dev, &back)[..9], read(&*dev, &dst)[..9]);
    }
}

#[test]
fn alloc_is_zeroed_aligned_and_counted() {
    for dev in devices() {
        let own = dev.meter().total();
        for len in [0, 1, 5000, 2 << 20] {
            let buf = dev.alloc(DType::F32, len, flatshard_base::Category::Saved).unwrap();
            let alignment = if is_cpu(&*dev) { 4096 } else { 256 };
            assert_eq!((buf.len(), buf.view().as_ptr() as usize % alignment), (len, 0));
            assert_eq!(dev.meter().live(flatshard_base::Category::Saved), 4 * len);
            assert!(read(&*dev, &buf).iter().all(|&x| x == 0.0));
        }
        assert_eq!(dev.meter().total(), own);
        assert!(dev.alloc(DType::F32, usize::MAX / 8, flatshard_base::Category::Other).is_err());
    }
}

#[test]
fn add() {
    for n in [0, 1, 100] {
        let (a, b) = (normal(1, n), normal(2, n));
        let exact = each::<f64, 2, 1>([&a, &b], |[a, b]| [a + b]);
        let naive = each::<f32, 2, 1>([&a, &b], |[a, b]| [a + b]);
        conform("add", FORWARD, &[x("x", &a), y("y", &b)], exact, naive, &|dev, bufs| {
            let [a, b] = bufs else { unreachable!() };
            dev.add(a.view(), b.view_mut())
        });
        // Narrow elements into f32: exact in both.
        for dev in devices() {
            for from in [DType::Bf16, DType::F16] {
                let (x, mut sums) = (buf(&*dev, from, &a), buf(&*dev, DType::F32, &b));
                dev.add(x.view(), sums.view_mut()).unwrap();
                let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| (*a as f32 + *b as f32) as f64).collect();
                assert_eq!(read(&*dev, &sums), want, "{from} on {}", dev.name());
                let mut narrow = buf(&*dev, from, &b);
                assert!(dev.add(sums.view(), narrow.view_mut()).is_err(), "f32 into {from}");
            }
        }
    }
}

/// Any length is valid, so no wrong one is refused.
#[test]
fn scale() {
    for n in [0, 1, 100] {
        let a = normal(1, n);
        let exact: Vec<f64> = a.iter().map(|a| a * 0.37f32 as f64).collect();
        for dev in devices() {
            for dtype in FLOATS {
                let mut x = buf(&*dev, dtype, &a);
                dev.scale(0.37, x.view_mut()).unwrap();
                let naive = read(&*dev, &buf(&*dev, dtype, &exact));
                compare(&format!("scale on {} in {dtype}", dev.name()), FORWARD, &read(&*dev, &x), &exact, &naive);
            }
            let mut words = buf(&*dev, DType::U32, &a);
            assert!(dev.scale(0.37, words.view_mut()).is_err());
        }
    }
}

#[test]
fn bias() {
    for (n, c) in SHAPES.into_iter().filter(|&(n, c)| n > 1 && c > 1) {
        let (b, a) = (normal(1, c), normal(2, n * c));
        fn sums<R: Real>(a: &[f64], b: &[f64]) -> Outputs {
            let (mut sums, c) = (reference::reals::<R>(b), b.len());
            a.iter().enumerate().for_each(|(i, &a)| sums[i % c] = sums[i % c] + R::of(a));
            vec![reference::f64s(&sums)]
        }
        let repeated: Vec<f64> = b.iter().copied().cycle().take(n * c).collect();
        let exact = each::<f64, 2, 1>([&a, &repeated], |[a, b]| [a + b]);
        let naive = each::<f32, 2, 1>([&a, &repeated], |[a, b]| [a + b]);
        conform("bias", FORWARD, &[x("bias", &b), y("y", &a)], exact, naive, &|dev, bufs| {
            let [b, y] = bufs else { unreachable!() };
            dev.bias(Bias { bias: b.view(), y: y.view_mut() })
        });
        let operands = [x("dy", &a), f32_out("db", &b)];
        conform("bias_backward", GRADIENT, &operands, sums::<f64>(&a, &b), sums::<f32>(&a, &b), &|dev, bufs| {
            let [dy, db] = bufs else { unreachable!() };
            dev.bias_backward(BiasBackward { dy: dy.view(), db: db.view_mut() })
        });
    }
}

#[test]
fn dropout() {
    let (p, key) = (0.3f32, 0x1234_5678_9abc_def0u64);
    let words = |dev: &dyn Device| buf(dev, DType::U32, &[key as u32, (key >> 32) as u32].map(f64::from));
    for n in [0, 1, 63, 64, 1001] {
        let a = normal(1, n);
        let kept = |i: usize| philox(key, [i as u32 / 4, 0, 0, 0])[i % 4] as f64 >= p as f64 * 4_294_967_296.0;
        let of = |scale: fn(f64) -> f64| -> Outputs {
            vec![a.iter().enumerate().map(|(i, &x)| if kept(i) { scale(x) } else { 0.0 }).collect()]
        };
        let (exact, naive) = (of(|x| x / (1.0 - 0.3f32 as f64)), of(|x| (x as f32 / (1.0 - 0.3f32)) as f64));
        for dev in devices() {
            let (keys, mut b) = (words(&*dev), buf(&*dev, DType::F32, &a));
            dev.dropout(Dropout { p, key: keys.view(), x: b.view_mut() }).unwrap();
            let zeros = read(&*dev, &b).iter().filter(|&&x| x == 0.0).count();
            assert!(n < 1000 || (250..350).contains(&zeros), "{zeros} of {n} dropped with p = 0.3");
        }
        let mut any_length = y("x", &a);
        any_length.role = Role::Output;
        for dev in devices() {
            let keys = words(&*dev);
            for dtype in FLOATS {
                let mut b = buf(&*dev, dtype, &any_length.values);
                dev.dropout(Dropout { p, key: keys.view(), x: b.view_mut() }).unwrap();
                let naive = read(&*dev, &buf(&*dev, dtype, &naive[0]));
                compare(&format!("dropout on {} in {dtype}", dev.name()), FORWARD, &read(&*dev, &b), &exact[0], &naive);
            }
            let mut integers = buf(&*dev, DType::U32, &[1.0]);
            assert!(dev.dropout(Dropout { p, key: keys.view(), x: integers.view_mut() }).is_err());
            let error =
                dev.dropout(Dropout { p: 1.0, key: keys.view(), x: integers.view_mut() }).unwrap_err().to_string();
            assert!(error.contains("p = 1"), "{error}");
            let (half, mut b) = (keys.view().slice(0..1), buf(&*dev, DType::F32, &a));
            assert!(
                dev.dropout(Dropout { p, key: half, x: b.view_mut() }).unwrap_err().to_string().contains("key holds 1")
            );
        }
    }
}

/// Rows that start with a counter and within one, in order and as on the ranks of a ring, assigned and added.
#[test]
fn dropout_rows() {
    let (p, key) = (0.3f32, 0x1234_5678_9abc_def0u64);
    let map = [5u32, 0, 70_000, 2, 2, 1 << 31, 9];
    let first = [0, 6, 4096, 1023];
    for ((&(rows, width), first), [mapped, accumulate]) in SHAPES
        .iter()
        .zip(first.into_iter().cycle())
        .flat_map(|shape| [[false, false], [true, false], [true, true]].map(|flags| (shape, flags)))
    {
        let (n, token) = (rows * width, |i: usize| if mapped { map[i] } else { i as u32 });
        let (a, old) = (normal(1, n), before(n));
        let kept = |i: usize| {
            let (row, channel) = (i / width, first + i % width);
            let word = philox(key, [channel as u32 / 4, 0, token(row), 0])[channel % 4];
            word as f64 >= p as f64 * 4_294_967_296.0
        };
        let of = |scale: fn(f64) -> f64, add: fn(f64, f64) -> f64| -> Outputs {
            let made = |i: usize| if kept(i) { scale(a[i]) } else { 0.0 };
            vec![(0..n).map(|i| if accumulate { add(old[i], made(i)) } else { made(i) }).collect()]
        };
        let words = u32_in("key", &[key as u32, (key >> 32) as u32]);
        let mut operands = vec![x("x", &a), words, y("y", &old)];
        operands.extend(mapped.then(|| u32_in("rows", &map[..rows])));
        conform(
            &format!("dropout_rows {rows} x {width} from {first}, mapped {mapped}, accumulate {accumulate}"),
            FORWARD,
            &operands,
            of(|x| x / (1.0 - 0.3f32 as f64), |a, b| a + b),
            of(|x| (x as f32 / (1.0 - 0.3f32)) as f64, |a, b| (a as f32 + b as f32) as f64),
            &|dev, bufs| {
                let [x, key, y, map @ ..] = bufs else { unreachable!() };
                let (x, key, y, rows) = (x.view(), key.view(), y.view_mut(), map.first().map(Buf::view));
                dev.dropout_rows(DropoutRows { p, key, rows, width, first, x, y, accumulate })
            },
        );
    }
    // How many of them are kept, and their sum.
    for dev in devices() {
        let (width, n) = (64, 64 * 100);
        let key = buf(&*dev, DType::U32, &[3.0, 4.0]);
        let (x, mut y) = (buf(&*dev, DType::F32, &vec![1.0; n]), buf(&*dev, DType::F32, &vec![7.0; n]));
        let mut drop = |p: f32, rows: Option<&Buf>| {
            let (key, rows, x, y) = (key.view(), rows.map(Buf::view), x.view(), y.view_mut());
            dev.dropout_rows(DropoutRows { p, key, rows, width, first: 0, x, y, accumulate: false })
        };
        assert!(drop(1.0, None).unwrap_err().to_string().contains("p = 1"));
        assert!(drop(p, Some(&key)).unwrap_err().to_string().contains("rows holds 2"));
        drop(p, None).unwrap();
        let values = read(&*dev, &y);
        let kept = values.iter().filter(|&&x| x != 0.0).count() as f64 / n as f64;
        assert!((kept - 0.7).abs() < 0.03, "{kept} kept with p = 0.3");
        assert!(values.iter().all(|&x| x == 0.0 || (x - 1.0 / 0.7).abs() < 1e-6));
    }
}

#[test]
fn embed() {
    let (rows, c) = (11, 24);
    let tokens = [3, 0, 10, 3, 3, 7];
    let (table, dy, old) = (normal(1, rows * c), normal(2, tokens.len() * c), before(tokens.len() * c));
    // The whole table, its beginning, its end.
    let parts = [0..rows, 0..4, 4..rows];
    let all = [(false, 1.0), (true, 1.0), (false, 5.5), (true, 5.5)];
    for ((accumulate, scale), held) in all.into_iter().flat_map(|a| parts.clone().map(|p| (a, p))) {
        let row = |i: usize, t: u32| (0..c).map(move |j| (t as usize * c + j, i * c + j));
        let of = |f: &dyn Fn(f64, f64) -> f64| -> Outputs {
            let there = |at: usize| if held.contains(&(at / c)) { table[at] } else { 0.0 };
            let at = |(w_at, y_at): (usize, usize)| f(there(w_at), if accumulate { old[y_at] } else { 0.0 });
            vec![tokens.iter().enumerate().flat_map(|(i, &t)| row(i, t)).map(at).collect()]
        };
        let shape = EmbedShape { rows, first: held.start, scale: scale as f32 };
        let w = &table[held.start * c..held.end * c];
        let operands = [u32_in("tokens", &tokens), x("w", w), y("y", &old)];
        conform(
            "embed",
            FORWARD,
            &operands,
            of(&|a, b| scale * a + b),
            of(&|a, b| (scale as f32 * a as f32 + b as f32) as f64),
            &|dev, bufs| {
                let [tokens, w, y] = bufs else { unreachable!() };
                dev.embed(Embed { shape, tokens: tokens.view(), w: w.view(), y: y.view_mut(), accumulate })
            },
        );
    }
    fn scatter<R: Real>(tokens: &[u32], dy: &[f64], scale: f64, dw: &[f64], first: usize, c: usize) -> Outputs {
        let mut dw = reference::reals::<R>(dw);
        for (i, &dy) in dy.iter().enumerate() {
            let at = (tokens[i / c] as usize * c + i % c).wrapping_sub(first * c);
            if let Some(dw) = dw.get_mut(at) {
                *dw = *dw + R::of(scale) * R::of(dy);
            }
        }
        vec![reference::f64s(&dw)]
    }
    for (scale, held) in [1.0, 5.5].into_iter().flat_map(|scale| parts.clone().map(|p| (scale, p))) {
        let dw = before(held.len() * c);
        let operands = [u32_in("tokens", &tokens), x("dy", &dy), f32_out("dw", &dw)];
        let shape = EmbedShape { rows, first: held.start, scale: scale as f32 };
        let exact = scatter::<f64>(&tokens, &dy, scale, &dw, held.start, c);
        let naive = scatter::<f32>(&tokens, &dy, scale, &dw, held.start, c);
        conform("embed_backward", GRADIENT, &operands, exact, naive, &|dev, bufs| {
            let [tokens, dy, dw] = bufs else { unreachable!() };
            dev.embed_backward(EmbedBackward { shape, tokens: tokens.view(), dy: dy.view(), dw: dw.view_mut() })
        });
    }
}

#[test]
fn embed_names_a_token_outside_the_table() {
    for dev in devices() {
        let (tokens, w) = (buf(&*dev, DType::U32, &[1.0, 300.0]), buf(&*dev, DType::F32, &[0.0; 256 * 2]));
        let mut y = buf(&*dev, DType::F32, &[7.0; 4]);
        let done = dev.embed(Embed {
            shape: EmbedShape::whole(256, 1.0),
            tokens: tokens.view(),
            w: w.view(),
            y: y.view_mut(),
            accumulate: false,
        });
        let error = settled(&*dev, done, &w).unwrap_err().to_string();
        assert!(error.contains("token 300") && error.contains("256 rows"), "{error}");
        assert_eq!(read(&*dev, &y), [7.0; 4], "nothing is written");
    }
}

/// The product itself is tested next to its kernels; here, that the device passes on both dtypes of C.
#[test]
fn gemm() {
    let (m, n, k) = (5, 9, 33);
    let (a, b, c) = (normal(1, m * k), normal(2, n * k), before(m * n));
    fn product<R: Real>(a: &[f64], b: &[f64], c: &[f64], n: usize, k: usize) -> Outputs {
        let (a, b) = (reference::reals::<R>(a), reference::reals::<R>(b));
        let at =
            |(i, &c): (usize, &f64)| (R::of(c) + (0..k).map(|l| a[i / n * k + l] * b[i % n * k + l]).sum::<R>()).f64();
        vec![c.iter().enumerate().map(at).collect()]
    }
    let (exact, naive) = (product::<f64>(&a, &b, &c, n, k), product::<f32>(&a, &b, &c, n, k));
    for out in [y("c", &c), f32_out("c", &c)] {
        for dev in devices() {
            for dtype in FLOATS {
                let to = if out.kind == Kind::Compute { dtype } else { DType::F32 };
                let (a, b, mut c) = (buf(&*dev, dtype, &a), buf(&*dev, dtype, &b), buf(&*dev, to, &c));
                dev.gemm(Gemm {
                    shape: GemmShape::nt(m, n, k).accumulate(),
                    a: a.view(),
                    b: b.view(),
                    c: c.view_mut(),
                })
                .unwrap();
                let naive = read(&*dev, &buf(&*dev, to, &naive[0]));
                compare(&format!("gemm {dtype} to {to}"), FORWARD, &read(&*dev, &c), &exact[0], &naive);
            }
        }
    }
}
