//! CPU ranks on several hosts: shared memory inside a host, a wire between them. Never used where all ranks are on one host.
//!
//! | file | what |
//! | --- | --- |
//! | `wire` | what carries bytes between hosts, as traits |
//! | `roster` | which rank is on which host |
//! | `mpi` | the wire of MPI, with the cargo feature `mpi` |
pub mod roster;
pub mod wire;

#[cfg(feature = "mpi")]
pub mod mpi;
