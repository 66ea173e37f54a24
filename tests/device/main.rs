//! Devices: the simulated GPU, and `--device cuda` on a mock driver.
#[path = "../common/mod.rs"]
mod common;
mod cuda_driver;
mod cuda_fp8;
mod cuda_graphs;
mod cuda_input;
mod cuda_ipc;
mod cuda_nccl;
mod cuda_ranks;
mod cuda_training;
mod cuda_tuning;
mod gpu_check_script;
mod graphs;
mod kernel_faults;
mod quantize;
mod simulated_expert_parallel;
mod simulated_training;
