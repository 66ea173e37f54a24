//! Results of NCCL by the numbers of nccl.h.
use std::ffi::c_int;

/// `ncclResult_t`.
pub const SUCCESS: c_int = 0;
pub const UNHANDLED_CUDA_ERROR: c_int = 1;
pub const SYSTEM_ERROR: c_int = 2;
pub const INVALID_ARGUMENT: c_int = 4;
pub const INVALID_USAGE: c_int = 5;
pub const REMOTE_ERROR: c_int = 6;
pub const IN_PROGRESS: c_int = 7;
