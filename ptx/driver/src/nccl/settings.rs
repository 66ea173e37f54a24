//! FLATSHARD_SIMNCCL, separated by commas: an older library, a machine that registers nothing, planted mistakes. Never
//! changes what a collective computes.
use crate::settings::variable;
use std::ffi::c_int;

/// 2.30.7.
const VERSION: c_int = 23_007;

fn words() -> String {
    variable("FLATSHARD_SIMNCCL").unwrap_or_default()
}
pub fn is_set(name: &str) -> bool {
    words().split(',').any(|word| word == name)
}
/// As `ncclGetVersion`: `version=22605` is 2.26.5.
pub fn version() -> c_int {
    words().split(',').find_map(|word| word.strip_prefix("version=")?.parse().ok()).unwrap_or(VERSION)
}
