//! Groups of ranks over NCCL, one process per GPU, on one host or many. Never used by CPU ranks, and not needed by
//! a rank that is alone.
//!
//! Sums run in NCCL's order, not in rank order: the same on every rank, and not the CPU's bits.
mod library; // the functions, found in libnccl.so.2 when it is first needed
pub mod rendezvous; // how ranks learn the id of their world
mod comm; // one communicator: made, split, polled, aborted
#[cfg(test)]
mod fake; // a library in NCCL's shape
mod slot; // memory that collectives use, registered
mod work; // what a group asks of NCCL, as a value
mod ring; // the operations of a group, the newest of them
mod group; // a group: its communicator, stream and ring
mod captured; // operations as part of a graph
mod order; // operations on their streams: begun, awaited, timed
mod calls; // the `Collective`
mod watch; // the thread that ends what hangs
mod world; // joins, and makes groups

pub use library::present;
pub use world::{NcclWorld, shared_gpu};
