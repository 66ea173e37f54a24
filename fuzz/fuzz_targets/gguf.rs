//! See `targets::gguf`.
#![no_main]
#[allow(dead_code)] // the other targets
#[path = "../targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::gguf(bytes));
