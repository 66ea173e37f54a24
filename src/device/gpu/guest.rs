//! Work ordered with a device's calls that is not the device's own: collectives of a group, on a separate stream that
//! forks from compute and joins it. Never reads data.
use super::args::Arg;
use flatshard_base::Result;
use std::any::Any;

/// A guest's request in its own encoding. Equal words with equal operands request the same work.
pub type Asked = [u32; 3];

/// A guest's record of its work in a graph.
pub type Taken = Box<dyn Any + Send>;

/// A group of ranks, as seen by the device. Its work runs after all earlier compute, and compute continues meanwhile.
pub trait Guest: Send + Sync {
    /// Enqueues the work or, between `begin` and `end`, captures it, in order with compute.
    fn enqueue(&self, asked: Asked, operands: &mut [Arg]) -> Result<()>;
    /// Orders compute after all of this guest's work. Fails if that will never finish.
    fn join(&self) -> Result<()>;
    /// Capture of compute starts, including this guest's work. None of it is in flight.
    fn begin(&self);
    /// Capture ends; this guest has joined compute.
    fn end(&self) -> Taken;
    /// Graph number `graph` was launched, which performs the work requested since the last launch or `enqueue`.
    fn replayed(&self, taken: &Taken, graph: u64);
}
