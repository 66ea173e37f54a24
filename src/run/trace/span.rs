//! A traced span, in nanoseconds since its tracer was created. Never records.
use crate::base::timeline::{Flow, Lane};

/// A [`Span`](crate::base::timeline::Span) with its times in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct TracedSpan {
    pub lane: Lane,
    pub what: &'static str,
    pub number: Option<u64>,
    pub start: i64,
    pub end: i64,
    pub flow: Option<Flow>,
}
impl TracedSpan {
    /// The compute stream's call of a collective, not the operation itself.
    pub fn is_call(&self) -> bool {
        self.flow.is_some_and(|flow| flow.call.is_some())
    }
}
