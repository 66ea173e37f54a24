//! Tests that need their own process, because they change a process-wide limit or measure its memory or allocations.
//! The test program starts itself again for each of them.
use std::process::Command;

const ALONE: &str = "FLATSHARD_TEST_ALONE";

/// Whether this process runs that test alone. Otherwise one that does is run to its end, and has to pass; then there is
/// nothing left to do for the caller, whose [`module_path!`] and name these are.
#[track_caller]
pub fn alone(module: &str, test: &str) -> bool {
    let module = module.split_once("::").map_or("", |(_program, module)| module);
    let name = if module.is_empty() { test.to_string() } else { format!("{module}::{test}") };
    if std::env::var(ALONE).is_ok_and(|alone| alone == name) {
        return true;
    }
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args(["--exact", &name, "--nocapture", "--test-threads=1"]).env(ALONE, &name);
    let output = again.output().unwrap();
    let said = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
    assert!(output.status.success() && said.contains("1 passed"), "{name} in a process of its own: {said}");
    false
}
