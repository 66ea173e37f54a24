//! Tests of the harness and the planner: the planner compared with the real engine, and the program from outside.
mod harness;
mod plan_cli;
mod planner;

// The planner is in a binary, which no test can link: compiled again.
#[path = "../src/say.rs"]
#[allow(dead_code)]
#[macro_use]
mod say;
#[path = "../src/plan/mod.rs"]
#[allow(dead_code, unused_imports)]
mod plan;

const EXPERIMENTS: &str =
    binaries::either(option_env!("FLATSHARD_TEST_EXPERIMENTS"), env!("CARGO_BIN_EXE_experiments"));

// Shared with the engine tests.
#[path = "../../tests/common/binaries.rs"]
#[allow(dead_code)]
mod binaries;
#[path = "../../tests/common/probe.rs"]
#[allow(dead_code)] // only a part is used here
mod probe;
#[path = "../../tests/common/stores.rs"]
#[allow(dead_code)]
mod stores;
#[path = "../../tests/common/time.rs"]
#[allow(dead_code)]
mod time;
#[path = "../../tests/common/worlds.rs"]
#[allow(dead_code)]
mod worlds;
