//! Work between a device's own calls that is not the device's: collectives of a group, which run on a stream of their
//! own, forked from compute and joined with it. Never looks at data.
use super::args::Arg;
use crate::base::Result;
use std::any::Any;

/// What a guest is asked for, in words of its own. Equal words with equal operands ask for the same.
pub type Asked = [u32; 3];

/// What a graph has of a guest's work.
pub type Taken = Box<dyn Any + Send>;

/// A group of ranks, to the device. Its work runs after all that compute was given before, and compute goes on
/// meanwhile.
pub trait Guest: Send + Sync {
    /// Enqueues it; or, between `begin` and `end`, has it taken down, in order with compute.
    fn enqueue(&self, asked: Asked, operands: &mut [Arg]) -> Result<()>;
    /// Compute goes on when all work of this guest is over. An error where it never will be.
    fn join(&self) -> Result<()>;
    /// Compute is captured from now on, and this guest's work with it: nothing of it is under way.
    fn begin(&self);
    /// It is no longer, and this guest has joined it.
    fn end(&self) -> Taken;
    /// The graph of that number was launched, which did what was asked since the last launch or `enqueue`.
    fn replayed(&self, taken: &Taken, graph: u64);
}
