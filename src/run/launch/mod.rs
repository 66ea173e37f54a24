//! From a plan to running ranks: the processes of a plain start, and the device and the group of each rank.

/// A rank's device and its group.
pub mod device;
/// What a rank is to do, as its parent hands it over.
pub mod job;
/// One child a rank.
pub mod processes;
/// Starts again after failures.
pub mod restart;

pub use job::RankJob;
pub use processes::{FAILED, Launch, catch, follow_parent, pass_over_file_sizes, run};
