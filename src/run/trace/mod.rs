//! `--profile-steps` and `--memory-timeline`: what each rank did in some steps, as trace files and in numbers. Never
//! changes what a step does.

/// A span with its times.
pub mod span;
/// Sets of intervals, and what they have in common.
pub mod intervals;
/// A profile in numbers.
pub mod summary;
/// A profile as a Chrome trace.
pub mod chrome;
/// Bytes over time.
pub mod memory;
/// One rank's tracer.
pub mod tracer;

pub use span::TracedSpan;
pub use tracer::{ProfileReport, Tracer};
