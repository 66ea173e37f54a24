//! Hopper's instructions in the emulator: a warp-specialised product is right under every schedule, and each thing that
//! orders something is missed when it is taken out.
mod attention;
mod costs;
mod faults;
pub mod launch;
mod order;
mod probes;
mod product;
#[allow(dead_code)]
use super::attention::reference;
