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
