//! Groups of ranks over NCCL, one process per GPU, on one host or many. Never used by CPU ranks, nor needed by a single
//! rank.
//!
//! Sums run in NCCL's order, not in rank order: the same bits on every rank, but not the CPU's bits.
mod library; // libnccl.so.2, loaded on first use
pub mod rendezvous; // distributes the world's id
mod comm; // one communicator: init, split, poll, abort
#[cfg(test)]
mod fake; // a fake NCCL for tests
mod slot; // registered memory for collectives
mod work; // NCCL operations as values
mod ring; // the newest operations of a group
mod group; // a group: its communicator, stream and ring
mod captured; // operations inside a CUDA graph
mod order; // operations on streams: started, awaited, timed
mod calls; // the `Collective`
mod watch; // the thread that aborts hung operations
mod world; // joins and creates groups

pub use library::present;
pub use world::{NcclWorld, shared_gpu};
