//! The CPU device: runs every operation at once, on this thread.
pub mod gemm;
