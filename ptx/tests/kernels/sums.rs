//! The exact sum of squares and its clip scale: the bits equal the CPU device's for every grid and schedule.
use super::harness::*;
use flatshard_base::{Category, Meter};
use flatshard_device::cpu::CpuDevice;
use flatshard_device::ops::{ClipScale, SumSquares};
use flatshard_device::{Buf, Device, LIMBS};

fn cpu_buf(cpu: &CpuDevice, dtype: flatshard_base::DType, bytes: &[u8]) -> Buf {
    let mut buf = cpu.alloc(dtype, bytes.len() / dtype.size(), Category::Other).unwrap();
    cpu.upload(bytes, buf.view_mut()).unwrap();
    buf
}
fn cpu_read(cpu: &CpuDevice, buf: &Buf, dtype: DType) -> Vec<f64> {
    let mut bytes = vec![0; buf.bytes()];
    cpu.download(buf.view(), &mut bytes).unwrap();
    decode(&bytes, dtype)
}
/// The CPU device's accumulator after `before` and x.
fn on_the_cpu(x: &[f64], before: &[f64]) -> Vec<f64> {
    let cpu = CpuDevice::new(Meter::default());
    let x = cpu_buf(&cpu, flatshard_base::DType::F32, &encode(x, F32));
    let mut acc = cpu_buf(&cpu, flatshard_base::DType::F64, &encode(before, F64));
    cpu.sum_squares(SumSquares { x: x.view(), acc: acc.view_mut() }).unwrap();
    cpu_read(&cpu, &acc, F64)
}

fn limbs(x: &[f64], before: &[f64], ctas: u32) -> Vec<f64> {
    let partial = ctas as usize * LIMBS;
    let slots = vec![In(F32, x.to_vec()), Out(U64, partial), long(x.len())];
    let first = Job { entry: "sum_squares", ..job("sum_squares", ctas, 256, slots) };
    let slots = vec![In(U64, first.outputs().remove(0)), InOut(F64, before.to_vec()), int(ctas as usize)];
    Job { entry: "sum_squares_finish", ..job("sum_squares", 1, 1024, slots) }.outputs().remove(0)
}

/// Values from the smallest to the largest f32.
fn wild(n: usize) -> Vec<f64> {
    let scale = |i: usize| [1.0, 1e-30, 1e30, f32::MIN_POSITIVE / 8.0, 3e38, 1e-3, 1e-45][i / 128 % 7];
    normal(5, n).iter().enumerate().map(|(i, x)| ((*x as f32).clamp(-1.0, 1.0) * scale(i)) as f64).collect()
}

#[test]
fn the_sum_is_exact_for_every_grid_and_schedule() {
    for n in [1, 7, 127, 128, 1000, 128 * 67 + 5] {
        let x = wild(n);
        let before = on_the_cpu(&wild(300), &[0.0; LIMBS]);
        let want = on_the_cpu(&x, &before);
        for ctas in [1, 2, 3, 5] {
            assert_eq!(limbs(&x, &before, ctas), want, "n {n}, {ctas} CTAs");
        }
    }
}

#[test]
fn a_cut_at_a_block_changes_nothing() {
    let x = wild(128 * 40);
    let whole = limbs(&x, &[0.0; LIMBS], 2);
    let first = limbs(&x[..128 * 13], &[0.0; LIMBS], 3);
    assert_eq!(limbs(&x[128 * 13..], &first, 1), whole);
}

#[test]
fn what_is_not_finite_raises_the_flag_and_leaves_the_sum() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut x = wild(128 * 12);
        let clean = x[..128 * 3].iter().chain(&x[128 * 4..]).copied().collect::<Vec<_>>();
        x[128 * 3 + 77] = bad;
        let got = limbs(&x, &[0.0; LIMBS], 2);
        assert_eq!(got[LIMBS - 1], 1.0);
        assert_eq!(got[..LIMBS - 1], limbs(&clean, &[0.0; LIMBS], 2)[..LIMBS - 1]);
    }
}

/// Every position of the highest bit, ties that only the lowest limb breaks, sums over ranks without carry propagation.
#[test]
fn the_clip_scale_has_the_bits_of_the_cpu() {
    let cpu = CpuDevice::new(Meter::default());
    let mut accumulators =
        vec![vec![0.0; LIMBS], on_the_cpu(&[3.0, 4.0], &[0.0; LIMBS]), on_the_cpu(&wild(1000), &[0.0; LIMBS])];
    for exponent in (-149..128).step_by(7) {
        for tail in [0.0, 1e-40] {
            let x = [1.5 * 2f64.powi(exponent), 1.0 * 2f64.powi(exponent), 2f64.powi(exponent - 26), tail];
            accumulators.push(on_the_cpu(&rounded(&x, F32), &[0.0; LIMBS]));
        }
    }
    accumulators.push(accumulators[2].iter().map(|l| l * 512.0).collect());
    let mut poisoned = accumulators[1].clone();
    poisoned[LIMBS - 1] = 2.0;
    accumulators.push(poisoned);
    for acc in accumulators {
        for (max_norm, unscale) in
            [(0.0, 1.0), (1.0, 1.0), (1e-3, 1.0), (0.0, 0.25), (1.0, 2f32.powi(-16)), (1e-3, 1e-3)]
        {
            let acc_buf = cpu_buf(&cpu, flatshard_base::DType::F64, &encode(&acc, F64));
            let mut want = cpu.alloc(flatshard_base::DType::F32, 2, Category::Other).unwrap();
            let given = cpu_buf(&cpu, flatshard_base::DType::F32, &encode(&[unscale as f64], F32));
            cpu.clip_scale(ClipScale { acc: acc_buf.view(), max_norm, unscale: given.view(), out: want.view_mut() })
                .unwrap();
            let want = cpu_read(&cpu, &want, F32);
            let slots = vec![In(F64, acc.clone()), Out(F32, 2), In(F32, vec![unscale as f64]), real(max_norm)];
            let got = job("clip_scale", 1, 96, slots).outputs();
            let same = |a: &f64, b: &f64| a == b || a.is_nan() && b.is_nan();
            assert!(got[0].iter().zip(&want).all(|(a, b)| same(a, b)), "{got:?}, not {want:?}, of {acc:?}");
        }
    }
}
