//! The TCP wire: needs no installation, and serves ranks started by torchrun, which cannot join an MPI world. Ranks
//! find each other through rank 0 (`comm::rendezvous`). After that, each pair opens one connection per channel when it
//! first sends. Never encrypts: hosts of a job trust their network, as with NCCL and Gloo.
use super::control::Control;
use super::messages::{self, DATA, REFUSAL, TABLE, TEXT, TableEntry};
use super::roster::{RankPlace, Roster};
use super::wire::{Bytes, Channel, Exchanged, Fault, Lost, MOVES, Move, POLL_INTERVAL, Wire};
use crate::base::{Error, Result};
use crate::comm::door::Door;
use crate::comm::env::RankEnv;
use crate::comm::frame::{HEADER, Header, Inbox};
use crate::comm::handshake::{By, greet, timespec};
use crate::comm::rendezvous::{self, by};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

const WHAT: &str = "rendezvous of hosts";
/// Purpose of a data connection.
const CHANNEL: &str = "channel";
/// Time limit for a peer to accept a connection, to greet, or to receive the table.
const CONNECT: Duration = Duration::from_secs(2);
/// Delay before retrying a greeting that was cut off.
const AGAIN: Duration = Duration::from_millis(20);
const GREET: Duration = Duration::from_secs(5);
/// Maximum connections per peer that no channel has claimed yet: more than a mesh has axes.
const ARRIVED: usize = 16;

pub struct Tcp {
    shared: Arc<TcpPeers>,
    control: Control,
    /// Used only by the listening thread.
    door: Mutex<Door>,
}

struct TcpPeers {
    env: RankEnv,
    roster: Roster,
    /// Where each rank listens.
    addresses: Vec<SocketAddr>,
    /// Connections from peers, for channels that have not claimed them yet.
    arrived: Mutex<Vec<(usize, u16, TcpStream)>>,
    arrival: Condvar,
}

impl Tcp {
    /// Returns when all ranks have joined.
    pub fn join(env: &RankEnv, timeout: Duration) -> Result<Tcp> {
        let deadline = Instant::now() + timeout;
        let failed = |e: std::io::Error| Error::Run(format!("rank {}: {WHAT}: {e}", env.rank));
        let Met { streams, entries, listeners } = match env.rank {
            0 => gather(env, deadline)?,
            _ => learn(env, deadline)?,
        };
        // Ranks on rank 0's host may have met over an address that is valid only there, so others use the address at
        // which they reached rank 0.
        let master = match env.rank {
            0 => IpAddr::V4(Ipv4Addr::LOCALHOST),
            _ => streams[0].1.peer_addr().map_err(failed)?.ip(),
        };
        let roster = Roster::new(&entries.iter().map(|entry| entry.place.clone()).collect::<Vec<_>>())?;
        let good = |ip: &IpAddr| master.is_loopback() || !ip.is_loopback();
        let address = |entry: &TableEntry| SocketAddr::new(entry.ip.filter(good).unwrap_or(master), entry.port);
        let shared = TcpPeers {
            env: env.clone(),
            roster,
            addresses: entries.iter().map(address).collect(),
            arrived: Mutex::default(),
            arrival: Condvar::new(),
        };
        Ok(Tcp {
            shared: Arc::new(shared),
            control: Control::new(streams, env.world).map_err(failed)?,
            door: Mutex::new(Door::new(listeners, CHANNEL, size_of::<u16>()).map_err(failed)?),
        })
    }
}

/// Every rank's place, without creating a wire. Returns when all ranks have joined.
pub(super) fn places(env: &RankEnv, timeout: Duration) -> Result<Vec<RankPlace>> {
    let deadline = Instant::now() + timeout;
    let met = if env.rank == 0 { gather(env, deadline)? } else { learn(env, deadline)? };
    Ok(met.entries.into_iter().map(|entry| entry.place).collect())
}

impl Wire for Tcp {
    fn roster(&self) -> &Roster {
        &self.shared.roster
    }
    fn name(&self) -> &'static str {
        "tcp"
    }
    fn channel(&self, number: u16) -> Result<Box<dyn Channel>> {
        Ok(Box::new(TcpChannel { number, shared: self.shared.clone(), peers: Vec::new() }))
    }
    fn report(&self, lost: &Lost) {
        self.control.report(lost);
    }
    fn listen(&self, at_most: Duration) -> Option<Lost> {
        let mut door = self.door.lock().unwrap_or_else(PoisonError::into_inner);
        let mut watched: Vec<PollFd> = door.watched().chain(self.control.watched()).collect();
        let _ = poll(&mut watched, Some(&timespec(at_most))); // a signal counts as a timeout
        let lost = self.control.receive();
        if lost.is_none() {
            self.shared.welcome(&mut door);
        }
        lost
    }
}

/// Result of the rendezvous on one rank.
struct Met {
    /// On rank 0, one per other rank; elsewhere, one to rank 0.
    streams: Vec<(usize, TcpStream)>,
    entries: Vec<TableEntry>,
    /// Where this rank's peers connect.
    listeners: Vec<TcpListener>,
}

/// Rank 0: collects every rank's record, then sends everyone the table.
fn gather(env: &RankEnv, deadline: Instant) -> Result<Met> {
    let failed = |e: std::io::Error| Error::Run(format!("rank 0: {WHAT}: {e}"));
    let listeners = rendezvous::listen(env, &rendezvous::resolve(env, deadline)?, 0).map_err(failed)?;
    let mut table = vec![messages::entry(&record(env, &listeners).map_err(failed)?, None); env.world];
    let mut streams: Vec<Option<TcpStream>> = (0..env.world).map(|_| None).collect();
    let met = rendezvous::serve(env, deadline, WHAT, messages::RECORD, &mut |arrival| {
        let (rank, entry) = (arrival.rank, messages::entry(&arrival.record, Some(arrival.ip)));
        streams[rank] = Some(arrival.admit(&[])?);
        table[rank] = entry;
        Ok(())
    });
    let streams = streams.into_iter().enumerate().filter_map(|(rank, stream)| Some((rank, stream?)));
    let streams: Vec<(usize, TcpStream)> = streams.collect();
    // The table of all ranks, or why there is none.
    let table = table.concat();
    let (kind, body) = match &met {
        Ok(()) => (TABLE, table.clone()),
        Err(e) => (REFUSAL, e.to_string().into_bytes()),
    };
    let body = &body[..if kind == REFUSAL { body.len().min(TEXT) } else { body.len() }];
    tell_all(&streams, &Header { kind, sequence: 0, len: body.len() as u64 }.with(body));
    met?;
    let entries = messages::table(&table, env.world).ok_or_else(|| Error::op("table", "does not list all ranks"))?;
    Ok(Met { streams, entries, listeners })
}

/// Sends to all concurrently for at most [`GREET`]. A rank that is gone by then is detected on its control connection.
fn tell_all(streams: &[(usize, TcpStream)], bytes: &[u8]) {
    let until = Instant::now() + GREET;
    let mut left: Vec<(&TcpStream, &[u8])> = streams.iter().map(|(_, stream)| (stream, bytes)).collect();
    while !left.is_empty() && Instant::now() < until {
        left.retain_mut(|(stream, rest)| match stream.write(rest) {
            Ok(n) => {
                *rest = &rest[n..];
                n > 0 && !rest.is_empty()
            }
            Err(e) => matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        });
        let mut full: Vec<PollFd> = left.iter().map(|(stream, _)| PollFd::new(*stream, PollFlags::OUT)).collect();
        if !full.is_empty() {
            let _ = poll(&mut full, Some(&timespec(POLL_INTERVAL))); // a signal counts as a timeout
        }
    }
}

/// Other ranks: send their record, receive the table.
fn learn(env: &RankEnv, deadline: Instant) -> Result<Met> {
    let (stream, listeners) = rendezvous::ask(env, deadline, WHAT, &mut |stream, until| {
        let listeners = rendezvous::listen(env, &[stream.local_addr()?.ip()], 0)?;
        greet(by(stream, until), env, WHAT, 0, &record(env, &listeners)?, &mut [])?;
        Ok((stream.try_clone()?, listeners))
    })?;
    // Rank 0 waits for the last rank, and reports if it gives up.
    let until = deadline.max(Instant::now()) + CONNECT + GREET;
    let answer = Inbox::default().read(&mut by(&stream, until), &messages::answers(env.world));
    let entries = match answer {
        Ok(Some((REFUSAL, text))) => return Err(Error::Run(messages::refusal(&text))),
        Ok(Some((_, table))) => messages::table(&table, env.world).ok_or(ErrorKind::InvalidData.into()),
        Ok(None) => Err(ErrorKind::WouldBlock.into()),
        Err(e) => Err(e),
    };
    let entries = entries.map_err(|e| {
        let what = "rank 0 left before all ranks had joined the";
        Error::Run(format!("rank {}: {what} {WHAT}: {e}", env.rank))
    })?;
    Ok(Met { streams: vec![(0, stream)], entries, listeners })
}

/// This rank's own record.
fn record(env: &RankEnv, listeners: &[TcpListener]) -> std::io::Result<[u8; messages::RECORD]> {
    let port = listeners.first().ok_or(ErrorKind::AddrNotAvailable)?.local_addr()?.port();
    Ok(messages::record(&RankPlace::of(env), port))
}

impl TcpPeers {
    /// Accepts authenticated ranks, for the channel that they name.
    fn welcome(&self, door: &mut Door) {
        for arrival in door.answer(&self.env) {
            let Ok(channel) = <[u8; 2]>::try_from(&arrival.record[..]).map(u16::from_le_bytes) else { continue };
            let rank = arrival.rank;
            let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
            // A second connection replaces the first, which the peer has given up.
            arrived.retain(|(r, c, _)| (*r, *c) != (rank, channel));
            let waiting = arrived.iter().filter(|(r, ..)| *r == rank).count();
            // The higher one of two ranks connects.
            if rank > self.env.rank && waiting < ARRIVED {
                arrived.extend(arrival.admit(&[]).map(|stream| (rank, channel, stream)));
                self.arrival.notify_all();
            }
        }
    }
    fn lost(&self, rank: usize, what: &str, e: std::io::Error) -> Fault {
        let why = match e.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => "connection closed".into(),
            _ => format!("{what}: {e}"),
        };
        Fault::Lost(Lost { rank, why })
    }
}

struct TcpChannel {
    number: u16,
    shared: Arc<TcpPeers>,
    peers: Vec<Peer>,
}

/// The connection to one rank.
struct Peer {
    rank: usize,
    stream: TcpStream,
    sent: Way,
    received: Way,
}
/// One direction of a connection. Each message follows a header with its number and length.
#[derive(Default)]
struct Way {
    /// Number of complete messages.
    sequence: u32,
    /// Header of the current message, and how many of its bytes are done.
    header: [u8; HEADER],
    through: usize,
}

impl Peer {
    /// Transfers as much of a message as possible without blocking. Returns whether any bytes moved.
    fn advance(&mut self, m: &mut Move) -> std::io::Result<bool> {
        let (mut moved, len) = (false, m.len() as u64);
        while !m.is_done() {
            let went = match &mut m.bytes {
                Bytes::Send(bytes) => self.send(&bytes[m.done..], len),
                Bytes::Recv(bytes) => self.receive(&mut bytes[m.done..], len),
            };
            match went {
                Ok(n) => m.done += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(moved),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
            moved = true;
        }
        let way = if let Bytes::Send(_) = m.bytes { &mut self.sent } else { &mut self.received };
        (way.sequence, way.through) = (way.sequence.wrapping_add(1), 0);
        Ok(true)
    }
    /// Sends the header, then `rest`; returns the bytes of `rest` sent.
    fn send(&mut self, rest: &[u8], len: u64) -> std::io::Result<usize> {
        let way = &mut self.sent;
        if way.through == 0 {
            way.header = Header { kind: DATA, sequence: way.sequence, len }.to_bytes();
        }
        let head = &way.header[way.through..];
        let n = match (&self.stream).write_vectored(&[IoSlice::new(head), IoSlice::new(rest)])? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            n => n,
        };
        let of_head = n.min(head.len());
        way.through += of_head;
        Ok(n - of_head)
    }
    /// Receives and checks the header, then `rest`; returns the bytes of `rest` received.
    fn receive(&mut self, rest: &mut [u8], len: u64) -> std::io::Result<usize> {
        let way = &mut self.received;
        let in_head = way.through < HEADER;
        let room = if in_head { &mut way.header[way.through..] } else { rest };
        let n = match (&self.stream).read(room)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            n => n,
        };
        if !in_head {
            return Ok(n);
        }
        way.through += n;
        if way.through == HEADER {
            let header = Header::parse(&way.header).ok_or(ErrorKind::InvalidData)?;
            header.expect(DATA, way.sequence, len)?;
        }
        Ok(0)
    }
}

impl TcpChannel {
    fn index(&self, peer: usize) -> Option<usize> {
        self.peers.iter().position(|p| p.rank == peer)
    }
    /// The higher one of two ranks connects. Peers accept connections whatever else they do, so there is no circular
    /// wait.
    fn connect(&mut self, peer: usize, go_on: &dyn Fn() -> bool) -> Exchanged {
        if self.index(peer).is_some() {
            return Ok(());
        }
        let stream = match peer < self.shared.env.rank {
            true => self.call(peer, go_on)?,
            false => self.called(peer, go_on).ok_or(Fault::GaveUp { peer })?,
        };
        self.peers.push(Peer { rank: peer, stream, sent: Way::default(), received: Way::default() });
        Ok(())
    }
    /// Retries a greeting that is cut off, because strangers may have crowded it out. A peer that is gone no longer
    /// listens.
    fn call(&self, peer: usize, go_on: &dyn Fn() -> bool) -> std::result::Result<TcpStream, Fault> {
        let (at, shared) = (self.shared.addresses[peer], &self.shared);
        loop {
            let called = TcpStream::connect_timeout(&at, CONNECT).map_err(|e| (e, false)).and_then(|stream| {
                let by = By { stream: &stream, until: Instant::now() + GREET, go_on };
                let greeted = greet(by, &shared.env, CHANNEL, peer, &self.number.to_le_bytes(), &mut []);
                greeted.map(|()| stream).map_err(|e| (e, true))
            });
            match called {
                Ok(stream) => return Ok(stream),
                Err((e, true)) if e.kind() != ErrorKind::InvalidData => {
                    if !go_on() {
                        return Err(Fault::GaveUp { peer });
                    }
                    std::thread::sleep(AGAIN);
                }
                Err((e, _)) => {
                    let e = std::io::Error::new(e.kind(), format!("{at}: {e}"));
                    return Err(shared.lost(peer, "connection", e));
                }
            }
        }
    }
    fn called(&self, peer: usize, go_on: &dyn Fn() -> bool) -> Option<TcpStream> {
        let mut arrived = self.shared.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(i) = arrived.iter().position(|(rank, number, _)| (*rank, *number) == (peer, self.number)) {
                return Some(arrived.swap_remove(i).2);
            }
            if !go_on() {
                return None;
            }
            arrived =
                self.shared.arrival.wait_timeout(arrived, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
    fn advance(&mut self, m: &mut Move) -> std::io::Result<bool> {
        match self.index(m.peer) {
            Some(i) => self.peers[i].advance(m),
            None => Err(ErrorKind::NotConnected.into()),
        }
    }
}

/// Whether a move must wait for an earlier one with the same peer and direction.
fn follows(moves: &[Move], i: usize) -> bool {
    let way = |m: &Move| (m.peer, matches!(m.bytes, Bytes::Send(_)));
    moves[..i].iter().any(|earlier| !earlier.is_done() && way(earlier) == way(&moves[i]))
}

impl Channel for TcpChannel {
    fn exchange(&mut self, moves: &mut [Move], go_on: &dyn Fn() -> bool) -> Exchanged {
        for m in moves.iter().filter(|m| !m.is_done()) {
            self.connect(m.peer, go_on)?;
        }
        loop {
            let mut moved = false;
            for i in 0..moves.len() {
                if !moves[i].is_done() && !follows(moves, i) {
                    let peer = moves[i].peer;
                    moved |= self.advance(&mut moves[i]).map_err(|e| self.shared.lost(peer, "transfer", e))?;
                }
            }
            let Some(waits) = moves.iter().find(|m| !m.is_done()) else { return Ok(()) };
            if moved {
                continue;
            }
            if !go_on() {
                return Err(Fault::GaveUp { peer: waits.peer });
            }
            self.sleep(moves);
        }
    }
}

impl TcpChannel {
    /// Sleeps until something can proceed, or for [`POLL_INTERVAL`].
    fn sleep(&self, moves: &[Move]) {
        let way = |m: &Move| match m.bytes {
            Bytes::Send(_) => PollFlags::OUT,
            Bytes::Recv(_) => PollFlags::IN,
        };
        let mut pending = moves.iter().filter(|m| !m.is_done());
        let Some(first) = pending.next().and_then(|m| Some((self.index(m.peer)?, way(m)))) else { return };
        let mut waited = [(); MOVES].map(|()| PollFd::new(&self.peers[first.0].stream, first.1));
        let mut n = 1;
        for (fd, (m, i)) in waited[1..].iter_mut().zip(pending.filter_map(|m| Some((m, self.index(m.peer)?)))) {
            *fd = PollFd::new(&self.peers[i].stream, way(m));
            n += 1;
        }
        let _ = poll(&mut waited[..n], Some(&timespec(POLL_INTERVAL))); // a signal counts as a timeout
    }
}
