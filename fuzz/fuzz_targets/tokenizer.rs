//! See `targets::tokenizer`.
#![no_main]
#[allow(dead_code)] // the other targets
#[path = "../targets.rs"]
mod targets;

// libFuzzer's hook would end the process at panics of the `tokenizers` library that we catch. An uncaught one still
// ends it.
libfuzzer_sys::fuzz_target!(
    init: std::panic::set_hook(Box::new(|_| {})),
    |bytes: &[u8]| if std::panic::catch_unwind(|| targets::tokenizer(bytes)).is_err() {
        std::process::abort()
    }
);
