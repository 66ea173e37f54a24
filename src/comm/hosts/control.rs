//! Failure detection: one connection from each rank to rank 0, which carries only losses and farewells. Rank 0 forwards
//! each loss. A connection that closes without a farewell is a loss, so a killed rank is named at once, whatever the
//! others are doing. Never carries data.
use super::messages::{self, FAREWELL, LOSS};
use super::wire::Lost;
use crate::comm::frame::{Header, Inbox};
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt;
use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A host that vanishes without closing connections (power, network) is detected after about 10 + 3 x 5 seconds.
const SILENCE: Duration = Duration::from_secs(10);
const PROBES: (Duration, u32) = (Duration::from_secs(5), 3);

pub(super) struct Control {
    /// On rank 0, one per other rank; elsewhere, one to rank 0.
    lines: Vec<ControlLine>,
    /// World size.
    world: usize,
}
struct ControlLine {
    rank: usize,
    stream: TcpStream,
    received: Mutex<Received>,
    /// Number of messages sent.
    sent: Mutex<u32>,
}
#[derive(Default)]
struct Received {
    inbox: Inbox,
    /// No more messages will arrive.
    closed: bool,
}
enum LineEvent {
    Nothing,
    Loss(Lost),
    Silence(Lost),
}

impl Control {
    pub fn new(streams: Vec<(usize, TcpStream)>, world: usize) -> std::io::Result<Control> {
        let line = |(rank, stream): (usize, TcpStream)| {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            sockopt::set_socket_keepalive(&stream, true)?;
            sockopt::set_tcp_keepidle(&stream, SILENCE)?;
            sockopt::set_tcp_keepintvl(&stream, PROBES.0)?;
            sockopt::set_tcp_keepcnt(&stream, PROBES.1)?;
            Ok(ControlLine { rank, stream, received: Mutex::default(), sent: Mutex::default() })
        };
        Ok(Control { lines: streams.into_iter().map(line).collect::<std::io::Result<_>>()?, world })
    }
    /// The open connections, to poll.
    pub fn watched(&self) -> impl Iterator<Item = PollFd<'_>> {
        let open = |line: &&ControlLine| !line.received.lock().unwrap_or_else(PoisonError::into_inner).closed;
        self.lines.iter().filter(open).map(|line| PollFd::new(&line.stream, PollFlags::IN))
    }
    /// Sends to everyone connected here.
    pub fn report(&self, lost: &Lost) {
        self.pass_on(lost, None);
    }
    fn pass_on(&self, lost: &Lost, from: Option<usize>) {
        for line in self.lines.iter().filter(|line| line.rank != lost.rank && Some(line.rank) != from) {
            line.send(LOSS, &messages::loss(lost));
        }
    }
    /// Reads pending messages. A loss that a rank reports takes precedence over a closed connection.
    pub fn receive(&self) -> Option<Lost> {
        let mut silent = None;
        for line in &self.lines {
            match line.receive(self.world) {
                LineEvent::Nothing => {}
                LineEvent::Loss(lost) => {
                    self.pass_on(&lost, Some(line.rank));
                    return Some(lost);
                }
                LineEvent::Silence(lost) => silent = silent.or(Some(lost)),
            }
        }
        if let Some(lost) = &silent {
            self.pass_on(lost, None);
        }
        silent
    }
}
impl Drop for Control {
    fn drop(&mut self) {
        self.lines.iter().for_each(|line| line.send(FAREWELL, &[]));
    }
}

impl ControlLine {
    /// Best effort: a peer that is gone needs no message.
    fn send(&self, kind: u32, body: &[u8]) {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let header = Header { kind, sequence: *sent, len: body.len() as u64 };
        let _ = (&self.stream).write_all(&header.with(body));
        *sent += 1;
    }
    fn receive(&self, world: usize) -> LineEvent {
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        if received.closed {
            return LineEvent::Nothing;
        }
        let malformed = || ErrorKind::InvalidData.into();
        let event = match received.inbox.read(&mut &self.stream, &messages::max_len) {
            Ok(None) => return LineEvent::Nothing,
            Ok(Some((LOSS, body))) => messages::lost(&body, world).map(LineEvent::Loss).ok_or_else(malformed),
            Ok(Some(_)) => Ok(LineEvent::Nothing), // a farewell
            Err(e) => Err(e),
        };
        received.closed = !matches!(event, Ok(LineEvent::Loss(_)));
        event.unwrap_or_else(|e| {
            let why = match e.kind() {
                ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => "connection closed".to_string(),
                _ => e.to_string(),
            };
            LineEvent::Silence(Lost { rank: self.rank, why })
        })
    }
}
