//! GPU groups within one host without NCCL: each rank maps its peers' memory (CUDA IPC), a copy engine moves what they
//! hand over, and a kernel sums in rank order, so that results have the shared-memory group's bits. Streams, tickets
//! and times are those of every GPU group ([`super::nccl`]). Never between hosts, and never in a CUDA graph.
//!
//! [Note: rounds] A rank exports one allocation for each set of ranks: its *stage*, of two halves. An operation is cut
//! into rounds that use the halves in turn. In round n, each rank enqueues in the group's stream:
//!
//! 1. copy what this rank hands over from the operand to the half; write that round n is ready;
//! 2. (host) meet the peers in the shared-memory group: all have enqueued step 1;
//! 3. for each peer: wait until its round n is ready, copy this rank's part of its half: into the result or, to be
//!    summed, next to the other ranks' parts in memory of its own;
//! 4. sum.
//!
//! That a round is ready is a word in shared host memory that streams write and wait for. A wait is enqueued only after
//! the write that it waits for, because of the meeting. So work of all processes has one order in which it can run,
//! however GPUs serialize it. The host waits for its peers' hosts, never for a GPU.
//!
//! Step 1 overwrites round n - 2 without a wait of its own. This rank's stream has passed step 3 of round n - 1, so
//! every peer's had written that its round n - 1 was ready, and before that it had read round n - 2.
//!
//! [Note: words, not events] An event of another process would order streams too. But nobody can complete the event of
//! a process that died, and the streams that wait for it would hang until their process exits. Each pair of ranks has
//! words of its own, so a rank that gives up passes its own waits and nobody else's.
//!
//! [Note: failures] The meeting compares operations, and names the ranks that do not come. Once all have met, only a
//! GPU can be late: the watching thread sees it by the events of every GPU group, and the words say whose it is.
pub mod link; // the transport: memory, rounds
mod pass; // what a round hands over

/// Device bytes of a rank for each set of ranks: a stage, and the parts to be summed.
pub const STAGE: usize = 3 * pass::HALF;
