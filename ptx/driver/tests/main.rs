//! The CUDA driver over the emulator: streams and their order, capture, and faults.
mod capture;
mod common;
mod faults;
mod order;
#[path = "../../../tests/common/time.rs"]
#[allow(dead_code)] // uses its part
mod time;
