//! Casts to and from FP8: every device makes the same bytes, and they are those of the definition. Products of them.
//! `tests/engine/fp8.rs` compares single casts with PyTorch's.
use super::harness::*;
use flatshard_base::fp8::{BLOCK, Fp8, Fp8Shape};
use flatshard_base::rng::Rng;
use flatshard_base::{Category, DType, Result};
use flatshard_device::ops::{
    Coded, Dequantize, Encode, Epilogue, Fp8Gemm, Fp8Values, Fp8Weight, Fp8Work, GemmShape, Quantize, RaiseScales,
};
use flatshard_device::{Buf, Device};
use half::bf16;

/// Numbers of many binades, zeros, a block of zeros, and the largest and smallest of bf16.
fn values(shape: &Fp8Shape, ld: usize) -> Vec<bf16> {
    let rng = Rng::new(6, (shape.rows * 1000 + ld) as u64);
    let value = |i: usize| {
        let (word, row, column) = (rng.u64(i as u64), i / ld, i % ld);
        let exponent = (word >> 40) as i32 % 30 - 20 + [0, 60, -70, -140][row / 3 % 4];
        let x = (word as u16 as f32 - 32768.0) / 32768.0 * 2f32.powi(exponent);
        match (column / BLOCK, word >> 20 & 15) {
            (1, _) if row < BLOCK => 0.0,
            (_, 0) => -0.0,
            (2, 1) if shape.tall == 1 => f32::MAX * x.signum() * 0.99,
            _ => x,
        }
    };
    (0..shape.rows.max(1) * ld).map(|i| bf16::from_f32(value(i))).collect()
}

/// By the definition: the scale of each block, and the nearest value.
fn naive(shape: &Fp8Shape, x: &[bf16], ld: usize) -> (Vec<f32>, Vec<f32>) {
    let most = if shape.format == Fp8::E4m3 { 448.0 } else { 57344.0 };
    let (mut scales, mut y) = (vec![], vec![0f32; shape.len()]);
    for rows in (0..shape.rows).step_by(shape.tall).map(|row| row..shape.rows.min(row + shape.tall)) {
        for columns in (0..shape.columns).step_by(BLOCK).map(|at| at..shape.columns.min(at + BLOCK)) {
            let places = || rows.clone().flat_map(|row| columns.clone().map(move |column| (row, column)));
            let amax = places().map(|(row, column)| x[row * ld + column].to_f64().abs()).fold(0.0, f64::max);
            let scale = (-110..121).map(|e| 2f64.powi(e)).find(|scale| amax / scale <= most).unwrap();
            scales.push(scale as f32);
            for (row, column) in places() {
                let x = x[row * ld + column].to_f64() / scale;
                // Ties go to the even code.
                let distance = |code: &usize| (shape.format.values()[*code] as f64 - x).abs();
                let finite = (0..256).filter(|code| shape.format.values()[*code].is_finite());
                let signed = finite.filter(|code| (*code >= 128) == x.is_sign_negative());
                let nearest = signed.min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2))));
                y[row * shape.columns + column] = shape.format.values()[nearest.unwrap()] * scale as f32;
            }
        }
    }
    (scales, y)
}

/// Bytes, scales and values.
type Cast = (Vec<u8>, Vec<f32>, Vec<bf16>);

fn downloaded(dev: &dyn Device, [bytes, scales, y]: [&Buf; 3]) -> Result<Cast> {
    let mut found = (vec![0; bytes.len()], vec![0f32; scales.len()], vec![bf16::ZERO; y.len()]);
    dev.download(bytes.view(), &mut found.0)?;
    dev.download(scales.view(), bytemuck::cast_slice_mut(&mut found.1))?;
    dev.download(y.view(), bytemuck::cast_slice_mut(&mut found.2))?;
    Ok(found)
}

fn cast(dev: &dyn Device, shape: Fp8Shape, x: &[bf16], ld: usize) -> Result<Cast> {
    let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other);
    let (mut from, mut bytes) = (alloc(DType::Bf16, x.len())?, alloc(DType::U8, shape.len())?);
    let (mut scales, mut y) = (alloc(DType::F32, shape.scales())?, alloc(DType::Bf16, shape.len())?);
    dev.upload(bytemuck::cast_slice(x), from.view_mut())?;
    dev.quantize(Quantize { shape, x: from.view(), ld, bytes: bytes.view_mut(), scales: scales.view_mut() })?;
    dev.dequantize(Dequantize { shape, bytes: bytes.view(), scales: scales.view(), y: y.view_mut() })?;
    downloaded(dev, [&bytes, &scales, &y])
}

#[test]
fn casts_and_scales_are_those_of_the_definition() {
    let tokens = [Fp8::E4m3, Fp8::E5m2].into_iter().flat_map(|format| {
        [(1, 4, 4), (13, 384, 400), (9, 257, 259), (7, 130, 130), (0, 5, 5)]
            .map(|(rows, columns, ld)| (Fp8Shape::tokens(format, rows, columns), ld))
    });
    let weights =
        [(1, 3), (128, 128), (300, 260), (129, 385)].map(|(rows, columns)| (Fp8Shape::weight(rows, columns), columns));
    for (shape, ld) in tokens.chain(weights) {
        let x = values(&shape, ld);
        let (scales, y) = naive(&shape, &x, ld);
        for dev in devices() {
            let found = cast(&*dev, shape, &x, ld).unwrap();
            let name = dev.name();
            assert_eq!(found.1, scales, "{name}: {shape:?}");
            for (i, (a, b)) in found.2.iter().zip(&y).enumerate() {
                assert_eq!(a.to_f32().to_bits(), b.to_bits(), "{name}: {i} of {shape:?}: {a} and {b}");
                let code = shape.format.values()[found.0[i] as usize];
                let scale = scales[i / shape.columns / shape.tall * shape.across() + i % shape.columns / BLOCK];
                assert_eq!((code * scale).to_bits(), b.to_bits(), "{name}: byte {i} of {shape:?}");
            }
        }
    }
}

/// f32 that round to these bf16, towards or away from zero.
fn unrounded(x: &[bf16]) -> Vec<f32> {
    let rng = Rng::new(7, x.len() as u64);
    let moved = |(i, x): (usize, &bf16)| {
        let noise = (rng.u64(i as u64) % 0xffff) as u32;
        // Zeros and the largest have no neighbors on both sides.
        let noise = if (0x80..0x7f00).contains(&(x.to_bits() & 0x7fff)) { noise } else { 0x7fff + noise / 2 };
        f32::from_bits(((x.to_bits() as u32) << 16) + noise - 0x7fff)
    };
    x.iter().enumerate().map(moved).collect()
}

/// Casts the parts of a weight between `cuts`, each with the scales of the others. `x`: bytes of `dtype`.
fn cast_in_parts(dev: &dyn Device, shape: Fp8Shape, (dtype, x): (DType, &[u8]), cuts: &[usize]) -> Result<Cast> {
    let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other);
    let (mut from, mut bytes) = (alloc(dtype, shape.len())?, alloc(DType::U8, shape.len())?);
    let (mut scales, mut y) = (alloc(DType::F32, shape.scales())?, alloc(DType::Bf16, shape.len())?);
    dev.upload(x, from.view_mut())?;
    dev.zero(scales.view_mut())?;
    let parts = || cuts.windows(2).map(|cut| cut[0]..cut[1]);
    // The last one is given as a part of the whole weight, the others of the rows of blocks that they are in.
    let last = cuts[cuts.len() - 2];
    let around = |part: &std::ops::Range<usize>| match part.start == last {
        true => (shape, 0..shape.scales(), 0),
        false => shape.bands(part),
    };
    for part in parts() {
        let ((shape, blocks, first), x) = (around(&part), from.view().slice(part.clone()));
        dev.raise_scales(RaiseScales { shape, at: part.start - first, x, scales: scales.view_mut().slice(blocks) })?;
    }
    for part in parts() {
        let ((shape, blocks, first), x) = (around(&part), from.view().slice(part.clone()));
        let (at, scales) = (part.start - first, scales.view().slice(blocks));
        dev.encode(Encode { shape, at, x, scales, bytes: bytes.view_mut().slice(part) })?;
    }
    dev.dequantize(Dequantize { shape, bytes: bytes.view(), scales: scales.view(), y: y.view_mut() })?;
    downloaded(dev, [&bytes, &scales, &y])
}

/// Wherever a weight is cut, the parts have its codes, and the largest of their scales is that of the block.
#[test]
fn parts_of_a_weight_are_cast_as_the_whole() {
    for (rows, columns, cuts) in [
        (1, 3, vec![1]),
        (128, 128, vec![0, 5000, 5001]),
        (300, 260, vec![256, 33_280, 33_281, 40_000, 77_999]),
        (129, 385, vec![49_279, 49_280]),
        (384, 256, vec![32_768, 50_000]),
    ] {
        let shape = Fp8Shape::weight(rows, columns);
        let x = values(&shape, columns);
        let wide = unrounded(&x);
        assert!(x.iter().zip(&wide).all(|(a, b)| bf16::from_f32(*b).to_bits() == a.to_bits()));
        assert!(shape.len() < 100 || x.iter().zip(&wide).any(|(a, b)| b.abs() < a.to_f32().abs()));
        let cuts = [vec![0], cuts, vec![shape.len()]].concat();
        for dev in devices() {
            let whole = cast(&*dev, shape, &x, columns).unwrap();
            for (dtype, x) in [(DType::Bf16, bytemuck::cast_slice(&x)), (DType::F32, bytemuck::cast_slice(&wide))] {
                let parts = cast_in_parts(&*dev, shape, (dtype, x), &cuts).unwrap();
                let what = format!("{} {dtype} {shape:?} {cuts:?}", dev.name());
                assert_eq!(parts.1, whole.1, "scales: {what}");
                assert_eq!(parts.0.iter().zip(&whole.0).position(|(a, b)| a != b), None, "codes: {what}");
            }
        }
    }
    // What no part has is not raised, and what is not finite is so for the whole block.
    let shape = Fp8Shape::weight(200, 300);
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX] {
        let mut x = vec![1f32; shape.len()];
        x[150 * 300 + 10] = bad;
        for dev in devices() {
            let cuts = [0, 20, 140 * 300, 150 * 300 + 5, 160 * 300, 170 * 300];
            let (_, scales, y) = cast_in_parts(&*dev, shape, (DType::F32, bytemuck::cast_slice(&x)), &cuts).unwrap();
            let one = 2f32.powi(-8);
            assert_eq!(scales, [one, one, one, f32::INFINITY, one, one], "{}", dev.name());
            let nan = |i: usize| (128 * 300..170 * 300).contains(&i) && i % 300 < 128;
            let held = y.iter().enumerate().take(170 * 300);
            held.for_each(|(i, y)| assert!(if nan(i) { y.is_nan() } else { *y == bf16::ONE }, "{i}: {y}"));
        }
    }
    for dev in devices() {
        let mut scales = dev.alloc(DType::F32, 6, Category::Other).unwrap();
        let x = dev.alloc(DType::F32, 10, Category::Other).unwrap();
        dev.zero(scales.view_mut()).unwrap();
        let op = RaiseScales { shape, at: 128 * 300 + 120, x: x.view().slice(0..8), scales: scales.view_mut() };
        dev.raise_scales(op).unwrap();
        let mut found = [0f32; 6];
        dev.download(scales.view(), bytemuck::cast_slice_mut(&mut found)).unwrap();
        assert_eq!(found, [0.0, 0.0, 0.0, 2f32.powi(-110), 0.0, 0.0], "{}", dev.name());
    }
}

/// Only its own block becomes NaN.
#[test]
fn what_is_not_finite_stays_visible() {
    for (shape, last) in [(Fp8Shape::tokens(Fp8::E5m2, 3, 260), 1), (Fp8Shape::weight(130, 260), 128)] {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let mut x = vec![bf16::ONE; shape.len()];
            x[last * 260 + 200] = bf16::from_f32(bad);
            for dev in devices() {
                let (_, scales, y) = cast(&*dev, shape, &x, 260).unwrap();
                let first = last / shape.tall * shape.tall;
                for (i, y) in y.iter().enumerate() {
                    let hit = (first..first + shape.tall).contains(&(i / 260)) && i % 260 / BLOCK == 1;
                    assert!(if hit { y.is_nan() } else { *y == bf16::ONE }, "{}: {i} of {shape:?}: {y}", dev.name());
                }
                assert_eq!(scales.iter().filter(|scale| scale.is_infinite()).count(), 1);
            }
        }
    }
}

#[test]
fn wrong_operands_are_refused() {
    let shape = Fp8Shape::tokens(Fp8::E4m3, 3, 130);
    for dev in devices() {
        let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other).unwrap();
        let run = |x: (DType, usize), ld, bytes, scales| {
            let (x, mut bytes, mut scales) = (alloc(x.0, x.1), alloc(DType::U8, bytes), alloc(DType::F32, scales));
            dev.quantize(Quantize { shape, x: x.view(), ld, bytes: bytes.view_mut(), scales: scales.view_mut() })
        };
        assert!(run((DType::Bf16, 390), 130, 390, 6).is_ok());
        for (x, ld, bytes, scales) in [
            ((DType::Bf16, 389), 130, 390, 6),
            ((DType::F32, 390), 130, 390, 6),
            ((DType::Bf16, 390), 131, 390, 6),
            ((DType::Bf16, 390), 129, 390, 6),
            ((DType::Bf16, 390), 130, 389, 6),
            ((DType::Bf16, 390), 130, 390, 5),
        ] {
            assert!(run(x, ld, bytes, scales).is_err(), "{}: {x:?} {ld} {bytes} {scales}", dev.name());
        }
        let back = |bytes, scales, y: (DType, usize)| {
            let (bytes, scales, mut y) = (alloc(DType::U8, bytes), alloc(DType::F32, scales), alloc(y.0, y.1));
            dev.dequantize(Dequantize { shape, bytes: bytes.view(), scales: scales.view(), y: y.view_mut() })
        };
        assert!(back(390, 6, (DType::Bf16, 390)).is_ok());
        for (bytes, scales, y) in
            [(391, 6, (DType::Bf16, 390)), (390, 7, (DType::Bf16, 390)), (390, 6, (DType::F32, 390))]
        {
            assert!(back(bytes, scales, y).is_err(), "{}", dev.name());
        }
        let shape = Fp8Shape::weight(130, 130);
        let parts = |x: (DType, usize), at, scales, bytes| {
            let (x, mut scales, mut bytes) = (alloc(x.0, x.1), alloc(DType::F32, scales), alloc(DType::U8, bytes));
            let raised = dev.raise_scales(RaiseScales { shape, at, x: x.view(), scales: scales.view_mut() });
            let (x, scales, bytes) = (x.view(), scales.view(), bytes.view_mut());
            (raised.is_ok(), dev.encode(Encode { shape, at, x, scales, bytes }).is_ok())
        };
        assert_eq!(parts((DType::F32, 900), 16_000, 4, 900), (true, true));
        assert_eq!(parts((DType::F32, 901), 16_000, 4, 901), (false, false), "{}", dev.name());
        assert_eq!(parts((DType::F16, 900), 16_000, 4, 900), (false, false), "{}", dev.name());
        assert_eq!(parts((DType::F32, 900), 16_000, 5, 900), (false, false), "{}", dev.name());
        assert_eq!(parts((DType::F32, 900), 16_000, 4, 899), (true, false), "{}", dev.name());
    }
}

/// A product and its operands.
struct ProductCase {
    shape: GemmShape,
    format: Fp8,
    weight: Fp8Shape,
    rows: std::ops::Range<usize>,
}

impl ProductCase {
    /// `forward`: by a weight (n, k); else by one (k, n). The first of its rows that is used.
    fn new(format: Fp8, [m, n, k]: [usize; 3], forward: bool, first: usize) -> ProductCase {
        let shape = if forward { GemmShape::nt(m, n, k) } else { GemmShape::nn(m, n, k) };
        let [used, columns] = if forward { [n, k] } else { [k, n] };
        // One more row than is used.
        let weight = Fp8Shape::weight(first + used + 1, columns);
        ProductCase { shape, format, weight, rows: first..first + used }
    }
    /// Blocks differ in magnitude, by powers of two, so that no scale can take the place of another.
    fn values(seed: u64, rows: usize, columns: usize) -> Vec<bf16> {
        let rng = Rng::new(seed, 9);
        let value = |i: usize| {
            let (row, column) = (i / columns, i % columns);
            let block = row / BLOCK * 7 + column / BLOCK * 5 + row % 3;
            rng.normal(i as u64) * 2f32.powi(block as i32 % 11 - 5)
        };
        (0..rows * columns).map(|i| bf16::from_f32(value(i))).collect()
    }
    /// The sums and the sums of magnitudes of the rounded values, in f64.
    fn sums(&self, a: &[bf16], b: &[bf16]) -> Vec<(f64, f64)> {
        let GemmShape { m, n, k, tb, lda, .. } = self.shape;
        let (_, a) = naive(&Fp8Shape::tokens(self.format, m, k), a, lda);
        let (_, b) = naive(&self.weight, b, self.weight.columns);
        let of = |i: usize, j: usize| {
            let term = |p: usize| {
                let (row, column) = if tb { (j, p) } else { (p, j) };
                a[i * k + p] as f64 * b[(self.rows.start + row) * self.weight.columns + column] as f64
            };
            (0..k).map(term).fold((0.0, 0.0), |(sum, all), x| (sum + x, all + x.abs()))
        };
        (0..m * n).map(|at| of(at / n, at % n)).collect()
    }
}

/// Scratch as a model has it: stale, and no larger than needed.
fn with_work<T>(dev: &dyn Device, case: &ProductCase, run: impl FnOnce(Fp8Work) -> T) -> T {
    let (tokens, weight) = (Fp8Shape::tokens(case.format, case.shape.m, case.shape.k), case.weight);
    let stale = |dtype, len: usize| {
        let mut buf = dev.alloc(dtype, len, Category::Other).unwrap();
        dev.upload(&vec![0xff; buf.bytes()], buf.view_mut()).unwrap();
        buf
    };
    let mut bytes = stale(DType::U8, tokens.len().max(weight.len()));
    let mut scales = stale(DType::F32, tokens.scales() + Fp8Work::scales(&weight));
    let (mut rows, mut whole) = (stale(DType::Bf16, tokens.len()), stale(DType::Bf16, weight.len()));
    run(Fp8Work { bytes: bytes.view_mut(), scales: scales.view_mut(), rows: rows.view_mut(), weight: whole.view_mut() })
}

/// Whatever rounds the operands, and wherever the product is computed. One rounding to bf16, and sums in f32.
#[test]
fn products_are_those_of_the_rounded_values() {
    let cases = [
        ProductCase::new(Fp8::E4m3, [20, 144, 272], true, 0),
        ProductCase::new(Fp8::E4m3, [20, 272, 512], true, 128),
        ProductCase::new(Fp8::E5m2, [24, 400, 144], false, 0),
        ProductCase::new(Fp8::E5m2, [4, 144, 272], false, 256),
        ProductCase::new(Fp8::E4m3, [8, 16, 16], false, 0),
        // No library has these.
        ProductCase::new(Fp8::E4m3, [7, 144, 272], true, 0),
        ProductCase::new(Fp8::E4m3, [8, 150, 272], true, 0),
        ProductCase::new(Fp8::E5m2, [8, 150, 132], false, 0),
        ProductCase::new(Fp8::E4m3, [8, 144, 272], true, 64),
    ];
    for case in cases {
        let GemmShape { m, n, k, .. } = case.shape;
        // Rows of A and C with gaps.
        let (lda, ldc) = (k + 16, n + 16);
        let a = ProductCase::values(1, m, lda);
        let w = ProductCase::values(2, case.weight.rows, case.weight.columns);
        let case = ProductCase { shape: case.shape.lda(lda), ..case };
        let sums = case.sums(&a, &w);
        let bias = ProductCase::values(3, 1, n);
        let before = ProductCase::values(4, m, ldc);
        for dev in devices() {
            let up = |values: &[bf16]| {
                let mut buf = dev.alloc(DType::Bf16, values.len(), Category::Other).unwrap();
                dev.upload(bytemuck::cast_slice(values), buf.view_mut()).unwrap();
                buf
            };
            let (x, weight, bias_of, onto) = (up(&a), up(&w), up(&bias), up(&before[..m * n]));
            let (bytes, scales, _) = cast(&*dev, case.weight, &w, case.weight.columns).unwrap();
            let mut codes = dev.alloc(DType::U8, bytes.len(), Category::Other).unwrap();
            dev.upload(&bytes, codes.view_mut()).unwrap();
            // Scales of a layer start anywhere.
            for offset in [0, 1] {
                let mut of = dev.alloc(DType::F32, scales.len() + offset, Category::Other).unwrap();
                let whole = of.view_mut().slice(offset..scales.len() + offset);
                dev.upload(bytemuck::cast_slice(&scales), whole).unwrap();
                let scales = of.view().slice(offset..scales.len() + offset);
                for coded in [false, true] {
                    let run = |shape: GemmShape, c: &mut Buf, then: Option<Epilogue>| {
                        let values = match coded {
                            true => Fp8Values::Coded(Coded { bytes: codes.view(), scales }),
                            false => Fp8Values::Whole(weight.view()),
                        };
                        let b = Fp8Weight { shape: case.weight, values, rows: case.rows.clone() };
                        let (format, a, c) = (case.format, x.view(), c.view_mut());
                        with_work(&*dev, &case, |work| {
                            dev.fp8_gemm(Fp8Gemm { shape, format, a, b, c, then, work }).unwrap();
                        });
                    };
                    let what = format!("{}: {} {:?} coded {coded}", dev.name(), case.format as u32, case.shape);
                    // Tensor cores of sm_90 add products of FP8 with some 14 bits (DeepSeek-V3, section 3.3.2), as an
                    // H200 has shown.
                    let precision = 2f64.powi(if dev.name().starts_with("cuda") { -13 } else { -16 });
                    // Devices without the epilogue round in between: the product and what is added.
                    let near =
                        |name: &str, found: &[f64], want: &dyn Fn(usize) -> f64, added: &dyn Fn(usize) -> f64| {
                            for (i, found) in found.iter().enumerate() {
                                let rounded = (want(i).abs() + sums[i].0.abs() + added(i)) / 128.0;
                                let (within, off) = (rounded + sums[i].1 * precision, (found - want(i)).abs());
                                assert!(off <= within, "{what}: {name} {i}: {found}, should be {}", want(i));
                            }
                        };
                    let nothing = |_: usize| 0.0;
                    // Assigned, with gaps; and added.
                    let mut c = up(&before);
                    run(case.shape.ldc(ldc), &mut c, None);
                    let found = read(&*dev, &c);
                    let rows: Vec<f64> = (0..m * n).map(|i| found[i / n * ldc + i % n]).collect();
                    near("C", &rows, &|i| sums[i].0, &nothing);
                    let gaps = (0..m - 1).flat_map(|row| row * ldc + n..(row + 1) * ldc);
                    gaps.for_each(|i| assert_eq!(found[i], before[i].to_f64(), "{what}: gap {i}"));
                    let mut c = up(&before[..m * n]);
                    run(case.shape.accumulate(), &mut c, None);
                    near("C +=", &read(&*dev, &c), &|i| sums[i].0 + before[i].to_f64(), &nothing);
                    // With epilogues.
                    let mut c = up(&before[..m * n]);
                    let then = Epilogue::Sum { bias: Some(bias_of.view()), residual: Some(onto.view()) };
                    run(case.shape, &mut c, Some(then));
                    let biased = |i: usize| sums[i].0 + bias[i % n].to_f64();
                    let added = |i: usize| bias[i % n].to_f64().abs();
                    near("C + bias", &read(&*dev, &c), &|i| biased(i) + before[i].to_f64(), &added);
                    let mut z = up(&before[..m * n]);
                    run(case.shape, &mut c, Some(Epilogue::Gelu { bias: Some(bias_of.view()), z: z.view_mut() }));
                    near("z", &read(&*dev, &z), &biased, &added);
                    let mut product = up(&before[..m * n]);
                    let then = Epilogue::GeluBackward { z: onto.view(), product: product.view_mut() };
                    run(case.shape, &mut c, Some(then));
                    let slope = |z: f64| {
                        let (r, t) = ((2.0 / std::f64::consts::PI).sqrt(), |z: f64| z + 0.044715 * z * z * z);
                        let tanh = (r * t(z)).tanh();
                        0.5 * (1.0 + tanh) + 0.5 * z * (1.0 - tanh * tanh) * r * (1.0 + 3.0 * 0.044715 * z * z)
                    };
                    near("dC", &read(&*dev, &c), &|i| sums[i].0 * slope(before[i].to_f64()), &nothing);
                }
            }
        }
    }
}

/// A block that is not finite makes its row, or its columns, NaN.
#[test]
fn products_of_what_is_not_finite_stay_visible() {
    let case = ProductCase::new(Fp8::E4m3, [8, 144, 272], true, 0);
    for (in_a, at) in [(true, 3 * 272 + 200), (false, 130 * 272 + 10)] {
        let mut a = ProductCase::values(1, 8, 272);
        let mut w = ProductCase::values(2, 145, 272);
        *(if in_a { &mut a[at] } else { &mut w[at] }) = bf16::INFINITY;
        for dev in devices() {
            let mut bufs = [&a, &w].map(|values| dev.alloc(DType::Bf16, values.len(), Category::Other).unwrap());
            for (buf, values) in bufs.iter_mut().zip([&a, &w]) {
                dev.upload(bytemuck::cast_slice(values), buf.view_mut()).unwrap();
            }
            let mut c = dev.alloc(DType::F32, 8 * 144, Category::Other).unwrap();
            let b = Fp8Weight { shape: case.weight, values: Fp8Values::Whole(bufs[1].view()), rows: 0..144 };
            with_work(&*dev, &case, |work| {
                let (shape, format, a, c) = (case.shape, case.format, bufs[0].view(), c.view_mut());
                dev.fp8_gemm(Fp8Gemm { shape, format, a, b, c, then: None, work }).unwrap();
            });
            for (i, x) in read(&*dev, &c).iter().enumerate() {
                let hit = if in_a { i / 144 == 3 } else { i % 144 >= 128 };
                assert_eq!(x.is_nan(), hit, "{}: {i}: {x}", dev.name());
            }
        }
    }
}

#[test]
fn products_of_wrong_operands_are_refused() {
    let case = ProductCase::new(Fp8::E4m3, [8, 16, 32], true, 0);
    for dev in devices() {
        let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other).unwrap();
        let run = |a, b: (DType, usize), c: (DType, usize), rows, bytes, scales| {
            let (a, w, mut c) = (alloc(DType::Bf16, a), alloc(b.0, b.1), alloc(c.0, c.1));
            let (mut bytes, mut scales) = (alloc(DType::U8, bytes), alloc(DType::F32, scales));
            let (mut of_a, mut weight) = (alloc(DType::Bf16, 8 * 32), alloc(DType::Bf16, 17 * 32));
            let b = Fp8Weight { shape: case.weight, values: Fp8Values::Whole(w.view()), rows };
            let (bytes, scales) = (bytes.view_mut(), scales.view_mut());
            let work = Fp8Work { bytes, scales, rows: of_a.view_mut(), weight: weight.view_mut() };
            let (shape, format, a, c) = (case.shape, case.format, a.view(), c.view_mut());
            let done = dev.fp8_gemm(Fp8Gemm { shape, format, a, b, c, then: None, work });
            done.inspect_err(|e| assert!(e.to_string().len() > 20, "{e}")).is_ok()
        };
        let (w, c, scales) = ((DType::Bf16, 17 * 32), (DType::Bf16, 8 * 16), 8 + Fp8Work::scales(&case.weight));
        assert!(run(8 * 32, w, c, 0..16, 17 * 32, scales), "{}", dev.name());
        assert!(!run(8 * 32 - 1, w, c, 0..16, 17 * 32, scales));
        assert!(!run(8 * 32, (DType::Bf16, 16 * 32), c, 0..16, 17 * 32, scales));
        assert!(!run(8 * 32, (DType::F32, 17 * 32), c, 0..16, 17 * 32, scales));
        assert!(!run(8 * 32, w, (DType::Bf16, 8 * 16 - 1), 0..16, 17 * 32, scales));
        assert!(!run(8 * 32, w, (DType::F16, 8 * 16), 0..16, 17 * 32, scales));
        assert!(!run(8 * 32, w, c, 0..17, 17 * 32, scales));
        assert!(!run(8 * 32, w, c, 2..18, 17 * 32, scales));
        assert!(!run(8 * 32, w, c, 0..16, 17 * 32 - 1, scales));
        assert!(!run(8 * 32, w, c, 0..16, 17 * 32, scales - 1));
    }
}
