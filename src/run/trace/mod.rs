//! `--profile-steps` and `--memory-timeline`: traces and summaries of selected steps. Never changes what a step does.

/// A span with its times.
pub mod span;
/// Sets of time intervals.
pub mod intervals;
/// A profile's summary.
pub mod summary;
/// A profile as a Chrome trace.
pub mod chrome;
/// Bytes over time.
pub mod memory;
/// One rank's tracer.
pub mod tracer;

pub use span::TracedSpan;
pub use tracer::{ProfileReport, Tracer};
