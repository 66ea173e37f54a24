//! CPU ranks on several hosts: shared memory inside a host, a wire between them. Never used where all ranks are on one
//! host.
pub mod roster; // which rank is on which host
pub mod wire; // what carries bytes between hosts, as traits
pub mod messages; // what ranks say over TCP, as values
mod control; // word of lost ranks, over TCP
#[cfg(feature = "mpi")]
pub mod mpi; // the wire of MPI
pub mod tcp; // the wire over TCP
pub mod census; // how many ranks a host has, where nobody said
mod link; // what a rank's groups share
mod post; // one rank's place in a group: columns, messages, meetings
mod job; // one operation, as a value
mod steps; // gathers, broadcasts, pairs
mod chain; // sums in rank order
mod worker; // the thread that runs the operations
mod watch; // the thread that hears of lost ranks
mod group; // the `Collective`: checks, starts, waits
mod world; // joins, and makes groups

pub use world::{HostsWorld, threads};
