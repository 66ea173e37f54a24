//! The exact sum of squares: the bits are those of the CPU device for every grid and schedule.
use crate::harness::*;
use flatshard::base::{Category, Meter};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::{Device, LIMBS};
use flatshard_ptx::emulate::{Argument::*, Memory};

/// The CPU device's accumulator after `before` and x.
fn on_the_cpu(x: &[f32], before: &[f64]) -> Vec<f64> {
    let cpu = CpuDevice::new(Meter::default());
    let buf = |dtype, len, bytes: Vec<u8>| {
        let mut buf = cpu.alloc(dtype, len, Category::Other).unwrap();
        cpu.upload(&bytes, buf.view_mut()).unwrap();
        buf
    };
    let x_buf = buf(flatshard::base::DType::F32, x.len(), x.iter().flat_map(|x| x.to_ne_bytes()).collect());
    let bytes = before.iter().flat_map(|l| l.to_ne_bytes()).collect();
    let mut acc = buf(flatshard::base::DType::F64, LIMBS, bytes);
    cpu.sum_squares(x_buf.view(), acc.view_mut()).unwrap();
    let mut bytes = vec![0; LIMBS * 8];
    cpu.download(acc.view(), &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|b| f64::from_ne_bytes(*b)).collect()
}

fn limbs(x: &[f32], before: &[f64], ctas: u32, schedule: u64) -> Vec<f64> {
    let mut memory = Memory::new();
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    let acc: Vec<u8> = before.iter().flat_map(|l| l.to_le_bytes()).collect();
    let (x_at, acc) = (memory.upload("x", &bytes), memory.upload("acc", &acc));
    let partial = memory.alloc("partial", ctas as usize * LIMBS * 8);
    let program = program("sum_squares");
    let first = [Pointer(x_at), Pointer(partial), U64(x.len() as u64)];
    program.run("sum_squares", &mut memory, (ctas, 256), &first, schedule);
    let second = [Pointer(partial), Pointer(acc), U32(ctas)];
    program.run("sum_squares_finish", &mut memory, (1, 96), &second, schedule);
    memory.download(acc).unwrap().as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
}

/// Values from the smallest to the largest f32.
fn wild(n: usize) -> Vec<f32> {
    let scale = |i: usize| [1.0, 1e-30, 1e30, f32::MIN_POSITIVE / 8.0, 3e38, 1e-3, 1e-45][i / 128 % 7];
    normal(5, n).iter().enumerate().map(|(i, x)| (*x as f32).clamp(-1.0, 1.0) * scale(i)).collect()
}

#[test]
fn the_sum_is_exact_for_every_grid_and_schedule() {
    for n in [1, 7, 127, 128, 1000, 128 * 67 + 5] {
        let x = wild(n);
        let before = on_the_cpu(&wild(300), &[0.0; LIMBS]);
        let want = on_the_cpu(&x, &before);
        for (ctas, schedule) in [(1, 0), (1, 1), (2, 2), (3, 3), (5, 4)] {
            assert_eq!(limbs(&x, &before, ctas, schedule), want, "n {n}, {ctas} CTAs");
        }
    }
}

#[test]
fn a_cut_at_a_block_changes_nothing() {
    let x = wild(128 * 40);
    let whole = limbs(&x, &[0.0; LIMBS], 2, 1);
    let first = limbs(&x[..128 * 13], &[0.0; LIMBS], 3, 1);
    assert_eq!(limbs(&x[128 * 13..], &first, 1, 1), whole);
}

#[test]
fn what_is_not_finite_raises_the_flag_and_leaves_the_sum() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = wild(128 * 12);
        let clean = x[..128 * 3].iter().chain(&x[128 * 4..]).copied().collect::<Vec<_>>();
        x[128 * 3 + 77] = bad;
        let got = limbs(&x, &[0.0; LIMBS], 2, 1);
        assert_eq!(got[LIMBS - 1], 1.0);
        assert_eq!(got[..LIMBS - 1], limbs(&clean, &[0.0; LIMBS], 2, 1)[..LIMBS - 1]);
    }
}
