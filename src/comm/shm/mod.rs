//! Groups of ranks on one host over shared memory: processes, or threads in tests, with the same code. Never starts a
//! thread and never spins for longer than about 100 microseconds.
mod words; // synchronization words and their memory orderings
mod arena; // the shared file and its mappings
mod record; // ranks' records of an operation, and the mailboxes
mod buffer; // allocated buffers: readers and lifetime
mod seat; // one rank: its bell (futex), the abort word, its live buffers
mod hub; // what a group's operations can access
mod op; // one operation's state
mod mail; // the steps that go through mailboxes
mod pairs; // the all_to_all
mod steps; // the steps of each kind of operation
mod group; // progress, starts and waits
mod calls; // the `Collective`
mod part; // the per-host part of a group over several hosts
mod rendezvous; // how ranks find the arena under other launchers
mod world; // joins and creates groups

pub use arena::Arena;
pub(in crate::comm) use buffer::ShmBuffer;
pub use group::ShmGroup;
pub(in crate::comm) use part::Passed;
pub(in crate::comm) use record::{Desc, PairParts};
pub use world::{ShmOptions, ShmWatch, ShmWorld, threads, threads_with};
