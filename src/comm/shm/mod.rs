//! Groups of ranks on one host over shared memory: processes, or threads in tests, by the same code. Never starts a
//! thread and never spins for longer than about 100 microseconds.
mod words; // the words that order all accesses to shared memory, and the memory orderings
mod arena; // the shared file and its mappings
mod record; // what ranks publish about an operation, and the mailboxes
mod buffer; // what `alloc` gives: who still reads it, when its memory goes back
mod seat; // one rank: its bell (futex), the abort word, its live buffers
mod sum; // reductions in rank order
mod hub; // what the operations of a group see of it
mod op; // one operation, as a state
mod mail; // the steps that go through mailboxes
mod steps; // the steps of each kind of operation
mod group; // progress, starts and waits
mod calls; // the `Collective`
mod part; // what a group over several hosts does on each of them
mod rendezvous; // how ranks of other launchers find the arena
mod world; // joins, and makes groups

pub use arena::Arena;
pub(in crate::comm) use buffer::ShmBuffer;
pub use group::ShmGroup;
pub(in crate::comm) use part::Passed;
pub(in crate::comm) use record::Desc;
pub(in crate::comm) use sum::{Fold, Sources};
pub use world::{ShmOptions, ShmWatch, ShmWorld, threads, threads_with};
