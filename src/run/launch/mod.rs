//! From a plan to running ranks: starts one process per rank, and gives each rank its device and group. Never trains.

/// A rank's device and its group.
pub mod device;
/// What a parent tells its ranks to do.
pub mod job;
/// One child process per rank.
pub mod processes;
/// Restarts after failures.
pub mod restart;

pub use job::RankJob;
pub use processes::{FAILED, Launch, catch, follow_parent, pass_over_file_sizes, run};

use crate::comm::env::RankEnv;

/// Whether this process prepares a host for its ranks: it will start them, or is the first of those that an external
/// launcher has started there. For ranks that we start, their parent has.
pub fn prepares(launched: Option<&RankEnv>) -> bool {
    launched.is_none_or(|env| env.parent_pid.is_none() && env.local_rank == 0)
}

/// Whether this process is rank 0 or will start it.
pub fn is_first(launched: Option<&RankEnv>) -> bool {
    launched.is_none_or(|env| env.rank == 0)
}
