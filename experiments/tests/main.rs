//! The harness and the planner: the planner against the real engine, and the program from outside.
mod harness;
mod plan;
mod plan_cli;

// What the tests of the engine share.
#[path = "../../tests/common/probe.rs"]
#[allow(dead_code)] // these tests use a part
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
