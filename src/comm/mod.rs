//! Floor 2: groups of ranks and their collectives. Never knows about layers or parameters.
//!
//! [Note: start, wait, release] One call starts a collective and another finishes it, so that it can overlap with
//! compute whatever runs it. `all_gather` and the others are ordered after everything submitted to this rank's compute
//! stream so far, and return a [`Ticket`]. `wait(t)` makes the compute stream wait for the result (on the CPU, it
//! blocks). `release(t)` ends the reading of a gathered buffer, which holds one gathered content at a time.
//! `wait_sent(t)` makes a sent buffer safe to overwrite. Every rank of a group starts the same operations in the same
//! order; waits and releases may come in any order. The group keeps buffers in flight alive.
#![allow(unsafe_code)] // the communication floor: shared memory
mod axis; // the axes of the mesh
mod collective; // the traits and types of groups
mod patience; // adjustable timeouts
pub mod seam; // calls as values, and hooks around them
pub mod operands; // checks of a call's operands
pub mod solo; // the group of one rank
pub mod unbacked; // groups for planning
pub mod mesh; // ranks along axes, and their groups

mod nodelist; // Slurm's short form of host names
pub mod secret; // the job's secret
mod launched; // launchers' variable names
pub mod env; // this rank's identity from the environment
pub mod claim; // one process per rank
pub mod handover; // work that one process of a host does for all
pub mod frame; // messages on a stream of bytes
pub mod handshake; // mutual authentication of two ranks
pub mod door; // authenticated accept on a listening port
pub mod rendezvous; // how ranks find rank 0

pub mod shm; // groups on one host
pub mod hosts; // groups over several hosts
pub mod nccl; // groups of GPUs
mod ipc; // groups of GPUs on one host, without NCCL
mod threads; // ranks as threads of one process

pub mod exchange; // all-gathers of small messages
pub mod cuts; // flushes a captured step
pub mod delayed; // delays, for tests
pub mod flight; // the flight recorder
pub mod recorder; // records every call, for tests
pub mod timed; // operations on a timeline

pub use crate::base::Reduce;
pub use axis::Axis;
pub use collective::{Collective, CommStats, CommUse, Member, Tag, Ticket, Times};
pub use ipc::STAGE as IPC_STAGE;
pub use mesh::{Mesh, MeshSizes};
use patience::{Patience, Waiting};
pub use threads::run_ranks;
