//! One connection from each rank to rank 0, on which nothing is said but who is lost and who leaves. Rank 0 passes word of a loss
//! on. A connection that closes without a farewell is a loss: so a rank that is killed is named at once, whatever the others
//! are doing. Never carries data.
use super::wire::Lost;
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A host that vanishes without closing anything (power, network) is noticed after about 10 + 3 x 5 seconds.
const SILENCE: Duration = Duration::from_secs(10);
const PROBES: (Duration, u32) = (Duration::from_secs(5), 3);

/// Bytes of a word: its kind, a rank, the length of a text, the text.
const WORD: usize = 256;
const TEXT: usize = 6;
const FAREWELL: u8 = 1;
const LOSS: u8 = 2;

pub(super) struct Control {
    /// Rank 0: all others. Any other rank: rank 0.
    lines: Vec<Line>,
}
struct Line {
    rank: usize,
    stream: TcpStream,
    /// Bytes of the next word so far; none will come any more.
    heard: Mutex<Heard>,
}
#[derive(Default)]
struct Heard {
    word: Vec<u8>,
    closed: bool,
}
enum Said {
    Nothing,
    Loss(Lost),
    Silence(Lost),
}

impl Control {
    pub fn new(streams: Vec<(usize, TcpStream)>) -> std::io::Result<Control> {
        let line = |(rank, stream): (usize, TcpStream)| {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            sockopt::set_socket_keepalive(&stream, true)?;
            sockopt::set_tcp_keepidle(&stream, SILENCE)?;
            sockopt::set_tcp_keepintvl(&stream, PROBES.0)?;
            sockopt::set_tcp_keepcnt(&stream, PROBES.1)?;
            Ok(Line { rank, stream, heard: Mutex::default() })
        };
        Ok(Control { lines: streams.into_iter().map(line).collect::<std::io::Result<_>>()? })
    }
    /// The open connections, to be polled.
    pub fn watched(&self) -> impl Iterator<Item = PollFd<'_>> {
        let open = |line: &&Line| !line.heard.lock().unwrap_or_else(PoisonError::into_inner).closed;
        self.lines.iter().filter(open).map(|line| PollFd::new(&line.stream, PollFlags::IN))
    }
    /// To all that are connected here.
    pub fn tell(&self, lost: &Lost) {
        self.pass_on(lost, None);
    }
    fn pass_on(&self, lost: &Lost, from: Option<usize>) {
        for line in self.lines.iter().filter(|line| line.rank != lost.rank && Some(line.rank) != from) {
            line.say(LOSS, lost.rank, &lost.why);
        }
    }
    /// What has been said meanwhile. What a rank says of a loss counts for more than a connection that is closed.
    pub fn hear(&self) -> Option<Lost> {
        let mut silent = None;
        for line in &self.lines {
            match line.hear() {
                Said::Nothing => {}
                Said::Loss(lost) => {
                    self.pass_on(&lost, Some(line.rank));
                    return Some(lost);
                }
                Said::Silence(lost) => silent = silent.or(Some(lost)),
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
        self.lines.iter().for_each(|line| line.say(FAREWELL, 0, ""));
    }
}

impl Line {
    /// As far as the peer can be reached: one that is gone needs no word.
    fn say(&self, kind: u8, rank: usize, why: &str) {
        let mut word = [0; WORD];
        let text = &why.as_bytes()[..why.len().min(WORD - TEXT)];
        word[0] = kind;
        word[1..5].copy_from_slice(&(rank as u32).to_le_bytes());
        word[5] = text.len() as u8;
        word[TEXT..TEXT + text.len()].copy_from_slice(text);
        let _ = (&self.stream).write_all(&word);
    }
    fn hear(&self) -> Said {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        if heard.closed {
            return Said::Nothing;
        }
        let mut bytes = [0; WORD];
        let wanted = WORD - heard.word.len();
        let closed = match (&self.stream).read(&mut bytes[..wanted]) {
            Ok(n) if n > 0 => Ok(n),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Said::Nothing,
            Err(e) if e.kind() != ErrorKind::ConnectionReset => Err(e.to_string()),
            _ => Err("connection closed".to_string()),
        };
        let n = match closed {
            Ok(n) => n,
            Err(why) => {
                heard.closed = true;
                return Said::Silence(Lost { rank: self.rank, why });
            }
        };
        heard.word.extend_from_slice(&bytes[..n]);
        if n < wanted {
            return Said::Nothing;
        }
        let word = std::mem::take(&mut heard.word);
        let text = &word[TEXT..(TEXT + word[5] as usize).min(WORD)];
        match word[0] {
            LOSS => Said::Loss(Lost {
                rank: u32::from_le_bytes([word[1], word[2], word[3], word[4]]) as usize,
                why: String::from_utf8_lossy(text).into_owned(),
            }),
            _ => {
                heard.closed = true;
                Said::Nothing
            }
        }
    }
}
