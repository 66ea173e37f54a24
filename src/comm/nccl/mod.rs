//! Groups of ranks whose operations run on streams of GPUs, one process per GPU: over NCCL, on one host or many, or
//! over copies between the processes of one host (`src/comm/ipc`). Never used by CPU ranks, nor needed by a single
//! rank.
//!
//! NCCL's sums run in its own order, not in rank order: the same bits on every rank, but not the CPU's bits.
mod library; // libnccl.so.2, loaded on first use
pub mod rendezvous; // distributes the world's id
mod comm; // one communicator: init, split, poll, abort
#[cfg(test)]
mod fake; // a fake NCCL for tests
mod slot; // registered memory for collectives
pub(in crate::comm) mod work; // operations as values
pub(in crate::comm) mod transport; // what moves a group's data
mod ring; // the newest operations of a group
mod group; // a group: its communicator, stream and ring
mod captured; // operations inside a CUDA graph
mod order; // operations on streams: started, awaited, timed
mod calls; // the `Collective`
mod watch; // the thread that aborts hung operations
mod world; // joins and creates groups

pub use library::{NcclOptions, present};
pub use world::{NcclWorld, shared_gpu};
