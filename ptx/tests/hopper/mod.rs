//! Hopper's instructions in the emulator: a warp-specialized product is correct under every schedule, and removing any
//! ordering operation is detected.
mod attention;
mod clusters;
mod costs;
mod faults;
pub mod launch;
mod order;
mod pairs;
mod probes;
mod product;
mod tickets;
#[allow(dead_code)]
use super::attention::reference;
