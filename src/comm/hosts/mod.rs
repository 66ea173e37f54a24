//! CPU ranks on several hosts: shared memory inside a host, a wire between hosts. Never used if all ranks are on one
//! host.
pub mod roster; // which rank is on which host
pub mod wire; // the traits of a transport between hosts
pub mod messages; // the TCP messages
mod control; // failure detection over TCP
#[cfg(feature = "mpi")]
pub mod mpi; // the MPI wire
pub mod tcp; // the TCP wire
pub mod census; // counts ranks per host if the launcher does not
mod link; // state shared by a rank's groups
mod post; // one rank's place in a group: columns, messages, meetings
mod job; // one operation
mod steps; // gathers, broadcasts, send/recv
mod chain; // sums in rank order
mod worker; // the thread that runs the operations
mod watch; // the thread that detects lost ranks
mod group; // the `Collective`: checks, starts, waits
mod world; // joins and creates groups

pub use world::{HostsWorld, threads};
