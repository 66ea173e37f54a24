//! Every operation on every device, at every vector width and in both compute dtypes, compared with a naive f64
//! reference. Tests are written once; another device is a line in [`harness::devices`].
//!
//! The rule: the maximum and the mean error of an output are at most twice those of the same naive code in f32, rounded
//! to the output's dtype (three times for gradients), plus [`harness::FLOOR`]. Every operand with a wrong length or
//! dtype is refused with an `Error::Op`.
//!
//! Tests of the package flatshard-device rather than of the whole, which compiles its tests without optimization.
#[path = "../../common"]
#[allow(dead_code)] // this program uses its part
mod common {
    pub mod deep;
    pub mod programs;
    pub mod reference;
    pub mod simcuda;
}

mod attention;
mod conv;
mod delta;
mod epilogue;
mod expand;
mod experts;
mod fp8;
mod grad_norm;
mod grouped;
mod harness;
mod layers;
mod loss;
mod norms;
mod optim;
mod paged;
mod ring;
mod scored;
mod sinks;
mod xielu;

use crate::common::simcuda;
use std::process::Command;

/// The same with the code of `--device cuda` on a mock driver, except for attention and rings, which are slow there.
#[test]
fn the_real_driver_behaves_like_the_simulated_one() {
    let mut again = Command::new(std::env::current_exe().unwrap());
    again
        .args(
            [
                "layers",
                "loss",
                "optim",
                "grad_norm",
                "epilogue",
                "expand",
                "fp8",
                "experts",
                "scored",
                "xielu",
                "grouped",
            ]
            .map(|part| format!("{part}::")),
        )
        .env("LD_LIBRARY_PATH", simcuda::libraries())
        .env(harness::ONLY_CUDA, "1");
    let out = again.env("FLATSHARD_SIMCUDA", "arch=90,seed=2,trace=1").output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("simulated CUDA: launch 100 of "), "nothing ran there: {said}");
    assert!(said.contains(" of transpose_codes"), "no bytes were multiplied there: {said}");
}
