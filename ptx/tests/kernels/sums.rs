//! The exact sum of squares: the bits are those of the CPU's accumulator for every grid and schedule.
use crate::harness::*;
use flatshard_ptx::emulate::{Argument::*, Memory};

const LIMBS: usize = 68;

/// The accumulator as src/device/cpu/reduce.rs describes it, by other means: block sums as whole numbers of 2^-1074, added
/// digit by digit in base 2^32, carried at the end.
fn accumulated(x: &[f32], before: &[f64]) -> Vec<f64> {
    let mut digits: Vec<u128> = before.iter().map(|&limb| limb as u128).collect();
    for block in x.chunks(128) {
        let mut lanes = [0.0f64; 8];
        for (i, &x) in block.iter().enumerate() {
            lanes[i % 8] += x as f64 * x as f64;
        }
        let [a, b, c, d, e, f, g, h] = lanes;
        let sum = ((a + e) + (c + g)) + ((b + f) + (d + h));
        if !sum.is_finite() {
            digits[LIMBS - 1] += 1;
            continue;
        }
        // From the highest digit down: what 2^(32 i - 1074) goes into, exactly, for f64 division by powers of two is exact.
        let mut rest = sum;
        for i in (0..LIMBS - 1).rev() {
            let power = 32 * i as i32 - 1074;
            let scaled = rest * 2f64.powi(-power / 2) * 2f64.powi(-power + power / 2);
            let digit = scaled.floor();
            digits[i] += digit as u128;
            let halves = 2f64.powi(power / 2) * digit * 2f64.powi(power - power / 2);
            rest -= halves;
        }
    }
    let mut over = 0;
    for digit in &mut digits[..LIMBS - 1] {
        let sum = *digit + over;
        (*digit, over) = (sum & 0xffff_ffff, sum >> 32);
    }
    digits.iter().map(|&d| d as f64).collect()
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
        let before = accumulated(&wild(300), &[0.0; LIMBS]);
        let want = accumulated(&x, &before);
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
