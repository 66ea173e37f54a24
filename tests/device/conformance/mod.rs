//! Every operation on every device, at every vector width and in both compute dtypes, against a naive reference in f64.
//! One body: a further device is a line in [`harness::devices`].
//!
//! The rule: the largest and the mean error of an output are at most twice those of the same naive code in f32, rounded
//! to the output's dtype (three times for gradients), plus [`harness::FLOOR`]. And every operand of a wrong length or
//! dtype is refused with an `Error::Op`.
mod attention;
mod epilogue;
mod harness;
mod layers;
mod loss;
mod norms;
mod optim;
mod ring;

use crate::common::simcuda;
use std::process::Command;

/// The same once more by the code of `--device cuda`, on a driver that pretends the GPU: all but attention and rings,
/// which take long there.
#[test]
fn the_driver_of_gpus_does_what_the_simulated_one_does() {
    let mut again = Command::new(std::env::current_exe().unwrap());
    again
        .args(["layers", "loss", "optim", "epilogue"].map(|part| format!("conformance::{part}::")))
        .env("LD_LIBRARY_PATH", simcuda::libraries());
    let out = again.env("FLATSHARD_SIMCUDA", "arch=90,seed=2,trace=1").output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("simulated CUDA: launch 100 of "), "nothing ran there: {said}");
}
