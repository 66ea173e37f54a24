//! One connection from each rank to rank 0, on which nothing is said but who is lost and who leaves. Rank 0 passes word
//! of a loss on. A connection that closes without a farewell is a loss: so a rank that is killed is named at once,
//! whatever the others are doing. Never carries data.
use super::messages::{self, FAREWELL, LOSS};
use super::wire::Lost;
use crate::comm::frame::{Header, Inbox};
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt;
use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A host that vanishes without closing anything (power, network) is noticed after about 10 + 3 x 5 seconds.
const SILENCE: Duration = Duration::from_secs(10);
const PROBES: (Duration, u32) = (Duration::from_secs(5), 3);

pub(super) struct Control {
    /// Rank 0: all others. Any other rank: rank 0.
    lines: Vec<ControlLine>,
    /// Ranks of the world.
    world: usize,
}
struct ControlLine {
    rank: usize,
    stream: TcpStream,
    heard: Mutex<Heard>,
    /// Messages so far.
    said: Mutex<u32>,
}
#[derive(Default)]
struct Heard {
    inbox: Inbox,
    /// No more will come.
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
            Ok(ControlLine { rank, stream, heard: Mutex::default(), said: Mutex::default() })
        };
        Ok(Control { lines: streams.into_iter().map(line).collect::<std::io::Result<_>>()?, world })
    }
    /// The open connections, to be polled.
    pub fn watched(&self) -> impl Iterator<Item = PollFd<'_>> {
        let open = |line: &&ControlLine| !line.heard.lock().unwrap_or_else(PoisonError::into_inner).closed;
        self.lines.iter().filter(open).map(|line| PollFd::new(&line.stream, PollFlags::IN))
    }
    /// To all that are connected here.
    pub fn tell(&self, lost: &Lost) {
        self.pass_on(lost, None);
    }
    fn pass_on(&self, lost: &Lost, from: Option<usize>) {
        for line in self.lines.iter().filter(|line| line.rank != lost.rank && Some(line.rank) != from) {
            line.say(LOSS, &messages::loss(lost));
        }
    }
    /// What has been said meanwhile. What a rank says of a loss counts for more than a connection that is closed.
    pub fn hear(&self) -> Option<Lost> {
        let mut silent = None;
        for line in &self.lines {
            match line.hear(self.world) {
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
        self.lines.iter().for_each(|line| line.say(FAREWELL, &[]));
    }
}

impl ControlLine {
    /// As far as the peer can be reached: one that is gone needs no word.
    fn say(&self, kind: u32, body: &[u8]) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let header = Header { kind, sequence: *said, len: body.len() as u64 };
        let _ = (&self.stream).write_all(&header.with(body));
        *said += 1;
    }
    fn hear(&self, world: usize) -> LineEvent {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        if heard.closed {
            return LineEvent::Nothing;
        }
        let malformed = || ErrorKind::InvalidData.into();
        let said = match heard.inbox.read(&mut &self.stream, &messages::words) {
            Ok(None) => return LineEvent::Nothing,
            Ok(Some((LOSS, body))) => messages::lost(&body, world).map(LineEvent::Loss).ok_or_else(malformed),
            Ok(Some(_)) => Ok(LineEvent::Nothing), // a farewell
            Err(e) => Err(e),
        };
        heard.closed = !matches!(said, Ok(LineEvent::Loss(_)));
        said.unwrap_or_else(|e| {
            let why = match e.kind() {
                ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => "connection closed".to_string(),
                _ => e.to_string(),
            };
            LineEvent::Silence(Lost { rank: self.rank, why })
        })
    }
}
