//! Casts to and from FP8: every device makes the same bytes, and they are those of the definition.
//! `tests/engine/fp8.rs` compares single casts with PyTorch's.
use super::harness::*;
use flatshard::base::fp8::{BLOCK, Fp8, Fp8Shape};
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Result};
use flatshard::device::Device;
use flatshard::device::ops::{Dequantize, Quantize};
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

fn cast(dev: &dyn Device, shape: Fp8Shape, x: &[bf16], ld: usize) -> Result<Cast> {
    let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other);
    let (mut from, mut bytes) = (alloc(DType::Bf16, x.len())?, alloc(DType::U8, shape.len())?);
    let (mut scales, mut y) = (alloc(DType::F32, shape.scales())?, alloc(DType::Bf16, shape.len())?);
    dev.upload(bytemuck::cast_slice(x), from.view_mut())?;
    dev.quantize(Quantize { shape, x: from.view(), ld, bytes: bytes.view_mut(), scales: scales.view_mut() })?;
    dev.dequantize(Dequantize { shape, bytes: bytes.view(), scales: scales.view(), y: y.view_mut() })?;
    let mut found = (vec![0; shape.len()], vec![0f32; shape.scales()], vec![bf16::ZERO; shape.len()]);
    dev.download(bytes.view(), &mut found.0)?;
    dev.download(scales.view(), bytemuck::cast_slice_mut(&mut found.1))?;
    dev.download(y.view(), bytemuck::cast_slice_mut(&mut found.2))?;
    Ok(found)
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
                assert_eq!(scales.iter().filter(|scale| scale.is_nan()).count(), 1);
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
    }
}
