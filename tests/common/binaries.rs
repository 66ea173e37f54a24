//! The programs that tests start: those that cargo built with the tests, or those of another build. The gate names its
//! release build, so that process tests run what users run. Never builds anything.
pub const FSDP: &str = either(option_env!("FLATSHARD_TEST_RUN_FSDP"), env!("CARGO_BIN_EXE_run_fsdp"));
pub const DDP: &str = either(option_env!("FLATSHARD_TEST_RUN_DDP"), env!("CARGO_BIN_EXE_run_ddp"));
pub const FLATSHARD: &str = either(option_env!("FLATSHARD_TEST_FLATSHARD"), env!("CARGO_BIN_EXE_flatshard"));
pub const GPU_CHECK: &str = either(option_env!("FLATSHARD_TEST_GPU_CHECK"), env!("CARGO_BIN_EXE_gpu_check"));

pub const fn either(other: Option<&'static str>, own: &'static str) -> &'static str {
    match other {
        Some(other) => other,
        None => own,
    }
}
