//! Floor 2: groups of ranks and what they do together. Never knows of layers or parameters.
//!
//! [Note: start, wait, release] A collective is started by one call and finished by another, so that it can overlap
//! with compute whatever runs it. `all_gather` and friends enqueue after everything that this rank's compute stream was
//! given so far, and return a [`Ticket`]. `wait(t)` makes the compute stream wait for the result (on the CPU: blocks
//! until it is there). A gathered buffer that is no longer read is `release(t)`d, and holds one gathered content at a
//! time; a buffer that was sent may be overwritten after `wait_sent(t)`. Every rank of a group starts the same
//! operations in the same order; waits and releases may come in any order. Buffers in flight are kept alive by the
//! group.
#![allow(unsafe_code)] // the communication floor: shared memory
mod collective; // the traits and values of groups
mod patience; // timeouts that others may change
pub mod seam; // calls as values, and hooks around them
pub mod operands; // checks of a call's operands
pub mod solo; // the group of one rank
pub mod unbacked; // groups of a rank that is planned
pub mod mesh; // ranks along axes, and their groups

mod nodelist; // Slurm's short form of host names
pub mod secret; // what ranks of one job know
mod launched; // what launchers call a rank's numbers
pub mod env; // who this rank is, from the environment
pub mod claim; // one process for each rank
pub mod frame; // messages on a stream of bytes
pub mod handshake; // how two ranks of a job recognize each other
pub mod door; // who may come in at a listening port
pub mod rendezvous; // how ranks find rank 0

pub mod shm; // groups on one host
pub mod hosts; // groups over several hosts
pub mod nccl; // groups of GPUs
mod threads; // ranks as threads of one process

pub mod exchange; // small messages of all ranks to all
pub mod cuts; // where a captured step ends
pub mod delayed; // delays, for tests
pub mod flight; // the flight recorder
pub mod recorder; // every call written down, for tests
pub mod timed; // operations on a timeline

pub use collective::{Axis, Collective, CommStats, CommUse, Member, Reduce, Tag, Ticket, Times};
pub use mesh::{Mesh, MeshSizes};
use patience::{Patience, Waiting};
pub use threads::run_ranks;
