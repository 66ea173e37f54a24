//! The transport between ranks of different hosts, as traits: TCP (`tcp`) or MPI. Never interprets the bytes, and never
//! used between ranks of one host.
//!
//! A rank creates its [`Wire`] once, when it joins. Each group opens a [`Channel`] of it, which only the group's worker
//! thread uses, so the channels of one rank run concurrently in several threads. Nothing here allocates once every pair
//! has exchanged a message.
use super::roster::Roster;
use crate::base::Result;
use std::time::Duration;

/// How often blocking calls at least check whether to go on.
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub trait Wire: Send + Sync {
    /// All ranks and their hosts, the same on every rank.
    fn roster(&self) -> &Roster;
    /// "tcp", "mpi".
    fn name(&self) -> &'static str;
    /// Opens channel `number` (below 1000), once on every rank that uses it. Data sent on a channel is received on the
    /// same channel. Does not wait for peers.
    fn channel(&self, number: u16) -> Result<Box<dyn Channel>>;
    /// Reports a lost rank to the ranks of all other hosts, best effort. Returns within a moment even if a peer does
    /// not respond, and does not fail.
    fn report(&self, lost: &Lost);
    /// Waits at most `at_most` for a lost rank, reported by a peer or detected here (a connection closed without a
    /// farewell). One thread of the rank calls it repeatedly until it returns one. Dropping a wire sends a farewell.
    fn listen(&self, at_most: Duration) -> Option<Lost>;
}

/// One group's messages. Between two ranks they arrive in the order sent.
pub trait Channel: Send {
    /// Performs all of `moves` concurrently and returns when all are done: sent buffers may then be overwritten, and
    /// received data is valid. Sends and receives do not wait for each other, so a ring of sends cannot deadlock. Moves
    /// with the same peer and direction happen in the order of `moves`. Both sides give the same lengths; zero bytes
    /// are no message. There are at most [`MOVES`].
    ///
    /// While blocked it calls `go_on` every [`POLL_INTERVAL`] or more often, and gives up when that returns false.
    fn exchange(&mut self, moves: &mut [Move], go_on: &dyn Fn() -> bool) -> Exchanged;
}

/// Maximum moves in one exchange.
pub const MOVES: usize = 4;

/// One message to or from `peer`, a world rank.
pub struct Move<'a> {
    pub peer: usize,
    pub bytes: Bytes<'a>,
    /// For the wire's own use: bytes transferred.
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

/// Why an exchange failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// `go_on` returned false before this peer (a world rank) had done its part.
    GaveUp { peer: usize },
    /// The peer can no longer be reached.
    Lost(Lost),
}

/// A lost rank: "rank 2 on node7: connection closed".
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lost {
    /// World rank.
    pub rank: usize,
    /// "failed", "connection closed".
    pub why: String,
}
