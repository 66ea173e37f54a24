//! The CPU device of tests, also of benches that include one file of these helpers. Never falls back to other kernels.
use flatshard::base::Meter;
use flatshard::device::cpu::{CpuDevice, gemm::GemmKernel, simd::Level};

/// The CPU, with this machine's fastest kernels or with those that FLATSHARD_TEST_CPU names (scripts/kernels_check.sh).
pub fn cpu(meter: Meter) -> CpuDevice {
    let Ok(name) = std::env::var("FLATSHARD_TEST_CPU") else { return CpuDevice::new(meter) };
    let kernel = GemmKernel::ALL.into_iter().find(|kernel| kernel.name() == name);
    let level = [Level::Baseline, Level::Avx2, Level::Avx512].into_iter().find(|level| level.to_string() == name);
    let dev = match (kernel, level) {
        (Some(kernel), _) => CpuDevice::with_kernel(meter, kernel),
        (None, Some(level)) => CpuDevice::with_level(meter, level),
        _ => panic!("FLATSHARD_TEST_CPU={name}: neither a kernel nor a vector width"),
    };
    dev.expect("this CPU has what FLATSHARD_TEST_CPU names")
}
