//! The wire over TCP: needs nothing installed, and serves ranks that torchrun started, which cannot join an MPI world. Ranks
//! find each other through rank 0 (`comm::rendezvous`); after that, each pair that has something to say makes one connection a
//! channel, when it first says it. Never encrypts: hosts of a job trust their network, as with NCCL and Gloo.
use super::control::Control;
use super::roster::{PLACE, Place, Roster};
use super::wire::{Bytes, Channel, Exchanged, Fault, LOOK, Lost, MOVES, Move, Wire};
use crate::base::{Error, Result};
use crate::comm::env::RankEnv;
use crate::comm::rendezvous::{self, GREETING};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

const WHAT: &str = "rendezvous of hosts";
/// Bytes of what a rank tells rank 0 (its place, its port), and of what rank 0 makes of it (and its address).
const RECORD: usize = PLACE + 2;
const ENTRY: usize = RECORD + 16;
/// How long a peer may take to say its first words, or to take a connection.
const HELLO: Duration = Duration::from_secs(2);
const CONNECT: Duration = Duration::from_secs(2);

pub struct Tcp {
    shared: Arc<Shared>,
    control: Control,
    listener: TcpListener,
}

struct Shared {
    env: RankEnv,
    roster: Roster,
    /// Where each rank listens.
    addresses: Vec<SocketAddr>,
    /// Connections that peers have made, for channels that have not asked for them yet.
    arrived: Mutex<Vec<(usize, u16, TcpStream)>>,
    arrival: Condvar,
}

impl Tcp {
    /// Returns when all ranks are there.
    pub fn join(env: &RankEnv, timeout: Duration) -> Result<Tcp> {
        let deadline = Instant::now() + timeout;
        let failed = |e: std::io::Error| Error::Run(format!("rank {}: {WHAT}: {e}", env.rank));
        let listener = rendezvous::bind(env, 0).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let mut mine = [0; RECORD];
        mine[..PLACE].copy_from_slice(&Place::of(env).to_bytes());
        mine[PLACE..].copy_from_slice(&listener.local_addr().map_err(failed)?.port().to_le_bytes());
        let (streams, entries) = match env.rank {
            0 => gather(env, deadline, mine)?,
            _ => learn(env, deadline, mine)?,
        };
        // Rank 0, and ranks on its host, may have met over an address that is good there only: others reach them where they
        // have reached rank 0.
        let master = match env.rank {
            0 => IpAddr::V4(Ipv4Addr::LOCALHOST),
            _ => streams[0].1.peer_addr().map_err(failed)?.ip(),
        };
        let roster = Roster::new(&entries.iter().map(|entry| entry.place.clone()).collect::<Vec<_>>())?;
        let address =
            |entry: &Entry| SocketAddr::new(entry.ip.filter(|ip| !ip.is_loopback()).unwrap_or(master), entry.port);
        let shared = Shared {
            env: env.clone(),
            roster,
            addresses: entries.iter().map(address).collect(),
            arrived: Mutex::default(),
            arrival: Condvar::new(),
        };
        Ok(Tcp { shared: Arc::new(shared), control: Control::new(streams).map_err(failed)?, listener })
    }

    fn accept(&self) {
        while let Ok((stream, _)) = self.listener.accept() {
            // A stranger's connection is dropped.
            if let Ok((rank, channel)) = self.shared.welcome(&stream) {
                let mut arrived = self.shared.arrived.lock().unwrap_or_else(PoisonError::into_inner);
                arrived.push((rank, channel, stream));
                self.shared.arrival.notify_all();
            }
        }
    }
}

impl Wire for Tcp {
    fn roster(&self) -> &Roster {
        &self.shared.roster
    }
    fn name(&self) -> &'static str {
        "tcp"
    }
    fn channel(&self, number: u16) -> Result<Box<dyn Channel>> {
        Ok(Box::new(TcpChannel { number, shared: self.shared.clone(), streams: Vec::new() }))
    }
    fn tell(&self, lost: &Lost) {
        self.control.tell(lost);
    }
    fn listen(&self, at_most: Duration) -> Option<Lost> {
        let door = PollFd::new(&self.listener, PollFlags::IN);
        let mut watched: Vec<PollFd> = std::iter::once(door).chain(self.control.watched()).collect();
        let _ = poll(&mut watched, Some(&timespec(at_most))); // a signal is as good as a timeout
        self.accept();
        self.control.hear()
    }
}

/// A rank as rank 0 tells of it.
struct Entry {
    place: Place,
    port: u16,
    /// As rank 0 sees it; `None`: rank 0.
    ip: Option<IpAddr>,
}
type Met = (Vec<(usize, TcpStream)>, Vec<Entry>);

/// Rank 0: hears all ranks, then tells all of them of all.
fn gather(env: &RankEnv, deadline: Instant, mine: [u8; RECORD]) -> Result<Met> {
    let mut table = vec![[0; ENTRY]; env.world];
    table[0][..RECORD].copy_from_slice(&mine);
    let mut streams: Vec<Option<TcpStream>> = (0..env.world).map(|_| None).collect();
    let met = rendezvous::serve(env, deadline, WHAT, &mut |rank, mut stream| {
        let (record, ip) = table[rank].split_at_mut(RECORD);
        stream.read_exact(record)?;
        let seen = match stream.peer_addr()?.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        ip.copy_from_slice(&seen.octets());
        streams[rank] = Some(stream);
        Ok(())
    });
    let streams = streams.into_iter().enumerate().filter_map(|(rank, stream)| Some((rank, stream?)));
    let mut streams: Vec<(usize, TcpStream)> = streams.collect();
    // All of them, or why there is none.
    let answer = match &met {
        Ok(()) => [&[0], table.as_flattened()].concat(),
        Err(e) => [&[1], e.to_string().as_bytes()].concat(),
    };
    for (_, stream) in &mut streams {
        let _ = stream.write_all(&answer); // one that is gone by now shows on its line
    }
    met?;
    Ok((streams, table.iter().map(entry).collect()))
}

/// Any other rank: tells of itself, hears of all.
fn learn(env: &RankEnv, deadline: Instant, mine: [u8; RECORD]) -> Result<Met> {
    let mut stream = rendezvous::ask(env, deadline, WHAT, &mut |mut stream| {
        stream.write_all(&mine)?;
        Ok(stream)
    })?;
    let mut answer = Vec::new();
    let mut table = vec![[0; ENTRY]; env.world];
    let heard = (|| {
        // Rank 0 waits for the last rank, and says when it gives up.
        stream.set_read_timeout(Some(deadline.saturating_duration_since(Instant::now()) + CONNECT))?;
        let mut ok = [0];
        stream.read_exact(&mut ok)?;
        match ok {
            [0] => stream.read_exact(table.as_flattened_mut()),
            _ => stream.read_to_end(&mut answer).map(|_| ()),
        }
    })();
    heard.map_err(|e| {
        let what = "rank 0 left before all ranks had come to the";
        Error::Run(format!("rank {}: {what} {WHAT}: {e}", env.rank))
    })?;
    match answer.is_empty() {
        true => Ok((vec![(0, stream)], table.iter().map(entry).collect())),
        false => Err(Error::Run(String::from_utf8_lossy(&answer).into_owned())),
    }
}

fn entry(bytes: &[u8; ENTRY]) -> Entry {
    let mut place = [0; PLACE];
    place.copy_from_slice(&bytes[..PLACE]);
    let mut octets = [0; 16];
    octets.copy_from_slice(&bytes[RECORD..]);
    let ip = Some(Ipv6Addr::from(octets).to_canonical()).filter(|ip| !ip.is_unspecified());
    Entry { place: Place::from_bytes(&place), port: u16::from_le_bytes([bytes[PLACE], bytes[PLACE + 1]]), ip }
}

impl Shared {
    /// Who connects, and for which channel.
    fn welcome(&self, mut stream: &TcpStream) -> std::io::Result<(usize, u16)> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(HELLO))?;
        let (mut theirs, mut channel) = ([0; GREETING], [0; 2]);
        stream.read_exact(&mut theirs)?;
        stream.read_exact(&mut channel)?;
        let rank = rendezvous::greeted(&self.env, &theirs).ok_or(ErrorKind::InvalidData)?;
        Ok((rank, u16::from_le_bytes(channel)))
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
    shared: Arc<Shared>,
    /// With their peers.
    streams: Vec<(usize, TcpStream)>,
}

impl TcpChannel {
    fn index(&self, peer: usize) -> Option<usize> {
        self.streams.iter().position(|(rank, _)| *rank == peer)
    }
    /// Of two ranks the higher one connects. Peers take connections whatever else they do, so nobody waits in a circle.
    fn connect(&mut self, peer: usize, go_on: &dyn Fn() -> bool) -> Exchanged {
        if self.index(peer).is_some() {
            return Ok(());
        }
        let stream = match peer < self.shared.env.rank {
            true => self.call(peer),
            false => Ok(self.called(peer, go_on).ok_or(Fault::GaveUp { peer })?),
        };
        let ready = stream.and_then(|stream| {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            Ok(stream)
        });
        let stream = ready.map_err(|e| self.shared.lost(peer, "connection", e))?;
        self.streams.push((peer, stream));
        Ok(())
    }
    fn call(&self, peer: usize) -> std::io::Result<TcpStream> {
        let at = self.shared.addresses[peer];
        let named = |e: std::io::Error| std::io::Error::new(e.kind(), format!("{at}: {e}"));
        let mut stream = TcpStream::connect_timeout(&at, CONNECT).map_err(named)?;
        stream.write_all(&rendezvous::greeting(&self.shared.env))?;
        stream.write_all(&self.number.to_le_bytes())?;
        Ok(stream)
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
            arrived = self.shared.arrival.wait_timeout(arrived, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
    /// As much of a message as goes now; true if any.
    fn advance(&self, m: &mut Move) -> std::io::Result<bool> {
        let Some(i) = self.index(m.peer) else { return Err(ErrorKind::NotConnected.into()) };
        let mut stream = &self.streams[i].1;
        let before = m.done;
        while !m.is_done() {
            let went = match &mut m.bytes {
                Bytes::Send(bytes) => stream.write(&bytes[m.done..]),
                Bytes::Recv(bytes) => stream.read(&mut bytes[m.done..]),
            };
            match went {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => m.done += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(m.done > before)
    }
}

/// Whether a move must wait for an earlier one, to or from the same peer.
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
    /// Until something can go on, or for [`LOOK`].
    fn sleep(&self, moves: &[Move]) {
        let way = |m: &Move| match m.bytes {
            Bytes::Send(_) => PollFlags::OUT,
            Bytes::Recv(_) => PollFlags::IN,
        };
        let mut pending = moves.iter().filter(|m| !m.is_done());
        let Some(first) = pending.next().and_then(|m| Some((self.index(m.peer)?, way(m)))) else { return };
        let mut waited = [(); MOVES].map(|()| PollFd::new(&self.streams[first.0].1, first.1));
        let mut n = 1;
        for (fd, (m, i)) in waited[1..].iter_mut().zip(pending.filter_map(|m| Some((m, self.index(m.peer)?)))) {
            *fd = PollFd::new(&self.streams[i].1, way(m));
            n += 1;
        }
        let _ = poll(&mut waited[..n], Some(&timespec(LOOK))); // a signal is as good as a timeout
    }
}

fn timespec(t: Duration) -> Timespec {
    Timespec { tv_sec: t.as_secs() as _, tv_nsec: t.subsec_nanos() as _ }
}
