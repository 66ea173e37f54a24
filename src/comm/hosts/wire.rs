//! What carries bytes between ranks of different hosts, as traits: TCP (`tcp`) or MPI. Never knows what the bytes mean,
//! and never used between ranks of one host.
//!
//! A rank's [`Wire`] is made once, when it joins. Each group opens a [`Channel`] of it and is then the only one to use
//! that; its worker thread does, so channels of one rank work at the same time in several threads. Nothing here
//! allocates once every pair has exchanged a message.
use super::roster::Roster;
use crate::base::Result;
use std::time::Duration;

/// Blocking calls ask at least so often whether they should go on.
pub const LOOK: Duration = Duration::from_millis(50);

pub trait Wire: Send + Sync {
    /// Which ranks there are, and on which hosts: the same on every rank.
    fn roster(&self) -> &Roster;
    /// "tcp", "mpi".
    fn name(&self) -> &'static str;
    /// Channel `number` (below 1000), which every rank that will use it opens once. What is sent on one is received on
    /// the same. Does not wait for the peers.
    fn channel(&self, number: u16) -> Result<Box<dyn Channel>>;
    /// Tells the ranks of all other hosts that a rank is lost, as far as they can be reached. Takes no longer than a
    /// moment, also where a peer does not listen, and does not fail.
    fn tell(&self, lost: &Lost);
    /// Waits, at most that long, for word of a lost rank: from a peer, or seen here (a connection that closed without
    /// a farewell). Called by one thread of the rank, again and again until it brings one. A wire that is dropped says
    /// farewell.
    fn listen(&self, at_most: Duration) -> Option<Lost>;
}

/// One group's messages. Between two ranks they arrive in the order in which they were sent.
pub trait Channel: Send {
    /// Does all of `moves` at the same time and returns when all are done: what is sent may then be overwritten, what
    /// is received is there. Sends and receives do not wait for each other, so ranks that send round a ring cannot
    /// block it. Those to one peer, and those from one peer, happen in the order of `moves`. Both sides state the same
    /// lengths; zero bytes are no message. There are at most [`MOVES`].
    ///
    /// While it blocks it asks `go_on` every [`LOOK`] or more often, and gives up when that says no.
    fn exchange(&mut self, moves: &mut [Move], go_on: &dyn Fn() -> bool) -> Exchanged;
}

/// The most moves in one exchange.
pub const MOVES: usize = 4;

/// One message, to or from `peer`, a world rank.
pub struct Move<'a> {
    pub peer: usize,
    pub bytes: Bytes<'a>,
    /// For the wire's own use: bytes that are through.
    pub done: usize,
}
pub enum Bytes<'a> {
    Send(&'a [u8]),
    Recv(&'a mut [u8]),
}
impl<'a> Move<'a> {
    pub fn send(peer: usize, bytes: &'a [u8]) -> Move<'a> {
        Move { peer, bytes: Bytes::Send(bytes), done: 0 }
    }
    pub fn recv(peer: usize, bytes: &'a mut [u8]) -> Move<'a> {
        Move { peer, bytes: Bytes::Recv(bytes), done: 0 }
    }
    pub fn len(&self) -> usize {
        match &self.bytes {
            Bytes::Send(bytes) => bytes.len(),
            Bytes::Recv(bytes) => bytes.len(),
        }
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    pub fn is_done(&self) -> bool {
        self.done == self.len()
    }
}

pub type Exchanged = std::result::Result<(), Fault>;

/// Why an exchange did not happen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// `go_on` said no while this peer (a world rank) had not done its part.
    GaveUp { peer: usize },
    /// The peer cannot be reached any more.
    Lost(Lost),
}

/// A rank that is gone: "rank 2 on node7: connection closed".
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lost {
    /// World rank.
    pub rank: usize,
    /// "failed", "connection closed".
    pub why: String,
}
