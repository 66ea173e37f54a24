//! Accepts connections on a port that strangers can reach; only those that pass the [`super::handshake`] get in. Never
//! blocks on a caller: greetings are read as they arrive, from a bounded number of callers, each with a deadline.
use super::env::RankEnv;
use super::handshake::{CODE, Codes, Hello, MAGIC, Nonce, POLL_INTERVAL, Proof, timespec};
use super::secret::random;
use hmac::Mac;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Result, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Deadline from connecting to the end of the greeting. Ranks need only a moment, unless their host is overloaded.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum connections without a complete greeting; a new one drops the oldest.
const PENDING: usize = 64;

/// A rank that has proven its identity and is owed the same.
pub struct Arrival {
    pub rank: usize,
    pub ip: IpAddr,
    pub record: Vec<u8>,
    stream: TcpStream,
    codes: Codes,
}
impl Arrival {
    /// Proves this rank's identity and sends the reply. The stream is non-blocking.
    pub fn admit(self, reply: &[u8]) -> Result<TcpStream> {
        // No data may follow a greeting before the answer; this also detects a closed connection.
        match (&self.stream).read(&mut [0]) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            _ => return Err(ErrorKind::ConnectionAborted.into()),
        }
        let code: [u8; CODE] = self.codes.listener(reply).finalize().into_bytes().into();
        write_whole(&self.stream, &[reply, &code].concat())?;
        Ok(self.stream)
    }
}

/// Writes what fits into a socket's empty send buffer.
fn write_whole(mut stream: &TcpStream, bytes: &[u8]) -> Result<()> {
    match stream.write(bytes)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(ErrorKind::WriteZero.into()),
    }
}

/// A connection that has not yet proven anything.
struct Caller {
    stream: TcpStream,
    ip: IpAddr,
    until: Instant,
    challenge: Nonce,
    greeting: Vec<u8>,
}

impl Caller {
    fn new(stream: TcpStream, ip: IpAddr, greeting: usize) -> Result<Caller> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let challenge = random()?;
        write_whole(&stream, &[&MAGIC[..], &challenge].concat())?;
        Ok(Caller { stream, ip, until: Instant::now() + PATIENCE, challenge, greeting: Vec::with_capacity(greeting) })
    }
    /// Whether that many bytes have arrived.
    fn receive(&mut self, bytes: usize) -> Result<bool> {
        let mut chunk = [0; 256];
        while self.greeting.len() < bytes {
            let room = (bytes - self.greeting.len()).min(chunk.len());
            match (&self.stream).read(&mut chunk[..room]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.greeting.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock && Instant::now() < self.until => return Ok(false),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }
    fn judge(self, env: &RankEnv, purpose: &str, record: usize) -> Option<Arrival> {
        let hello = Hello::parse(&self.greeting, record)?;
        let (caller, listener) = (hello.rank as usize, env.rank);
        let (nonce, challenge, record) = (&hello.nonce, &self.challenge, hello.record);
        let codes = Codes::new(env, &Proof { purpose, caller, listener, nonce, challenge, record });
        let proven = codes.clone().caller().verify_slice(&hello.code).is_ok();
        let known = caller < env.world && caller != env.rank;
        let record = record.to_vec();
        (proven && known).then_some(Arrival { rank: caller, ip: self.ip, record, stream: self.stream, codes })
    }
}

pub struct Door {
    listeners: Vec<TcpListener>,
    purpose: &'static str,
    /// Length of a caller's record in bytes.
    record: usize,
    /// In order of arrival.
    pending: VecDeque<Caller>,
    /// Number of connections that failed the handshake, and the last one's address.
    refused: usize,
    last: Option<IpAddr>,
}

impl Door {
    pub fn new(listeners: Vec<TcpListener>, purpose: &'static str, record: usize) -> Result<Door> {
        listeners.iter().try_for_each(|listener| listener.set_nonblocking(true))?;
        Ok(Door { listeners, purpose, record, pending: VecDeque::new(), refused: 0, last: None })
    }
    pub fn port(&self) -> u16 {
        self.listeners.first().and_then(|listener| listener.local_addr().ok()).map_or(0, |at| at.port())
    }
    /// Descriptors to poll.
    pub fn watched(&self) -> impl Iterator<Item = PollFd<'_>> {
        let callers = self.pending.iter().map(|caller| PollFd::new(&caller.stream, PollFlags::IN));
        self.listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)).chain(callers)
    }
    /// Returns on activity, or after `at_most`.
    pub fn wait(&self, at_most: Duration) {
        let mut watched: Vec<PollFd> = self.watched().collect();
        let _ = poll(&mut watched, Some(&timespec(at_most))); // a signal counts as a timeout
    }
    /// Advances every greeting without blocking. Returns the callers that have now proven to be ranks of this job.
    pub fn answer(&mut self, env: &RankEnv) -> Vec<Arrival> {
        self.accept();
        let mut arrived = Vec::new();
        for _ in 0..self.pending.len() {
            let Some(mut caller) = self.pending.pop_front() else { break };
            let ip = caller.ip;
            match caller.receive(Hello::bytes(self.record)) {
                Ok(false) => self.pending.push_back(caller),
                Ok(true) => match caller.judge(env, self.purpose, self.record) {
                    Some(arrival) => arrived.push(arrival),
                    None => self.refuse(ip),
                },
                Err(_) => self.refuse(ip),
            }
        }
        arrived
    }
    fn accept(&mut self) {
        for i in 0..self.listeners.len() {
            // Bounded, so that a flood of connections cannot keep this loop busy.
            for _ in 0..PENDING {
                match self.listeners[i].accept() {
                    Ok((stream, from)) => {
                        let ip = from.ip().to_canonical();
                        match Caller::new(stream, ip, Hello::bytes(self.record)) {
                            Ok(caller) => self.pending.push_back(caller),
                            Err(_) => self.refuse(ip),
                        }
                        if self.pending.len() > PENDING {
                            self.drop_oldest();
                        }
                    }
                    Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => {
                        // Probably out of descriptors: drop one, and accept none for a moment.
                        self.drop_oldest();
                        std::thread::sleep(POLL_INTERVAL);
                        break;
                    }
                }
            }
        }
    }
    fn drop_oldest(&mut self) {
        if let Some(caller) = self.pending.pop_front() {
            self.refuse(caller.ip);
        }
    }
    fn refuse(&mut self, ip: IpAddr) {
        self.refused += 1;
        self.last = Some(ip);
    }
    /// "3 connections, the last from 10.0.0.9, did not prove ...", if there were any.
    pub fn strangers(&self) -> Option<String> {
        let (n, s) = (self.refused, if self.refused == 1 { "" } else { "s" });
        let whose = "did not prove to belong to this job: is the job secret the same on all ranks?";
        self.last.map(|ip| format!("{n} connection{s}, the last from {ip}, {whose}"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::handshake::testing::{FOR, OURS, rank};
    use super::super::handshake::{By, CHALLENGE, greet};
    use super::*;
    use std::net::SocketAddr;

    fn door() -> (Door, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        (Door::new(vec![listener], FOR, 4).unwrap(), at)
    }
    /// Ranks and their records.
    type Came = Vec<(usize, Vec<u8>)>;
    /// The ranks that get in within this many milliseconds.
    fn serve(door: &mut Door, env: &RankEnv, ms: u64) -> Came {
        let until = Instant::now() + Duration::from_millis(ms);
        let mut came = Vec::new();
        while Instant::now() < until && came.is_empty() {
            door.wait(Duration::from_millis(5));
            for arrival in door.answer(env) {
                let who = (arrival.rank, arrival.record.clone());
                came.extend(arrival.admit(b"reply").map(|_| who));
            }
        }
        came
    }
    fn call(env: &RankEnv, at: SocketAddr, to: usize, record: &[u8]) -> Result<[u8; 5]> {
        let (stream, mut reply) = (TcpStream::connect(at)?, [0; 5]);
        let by = By { stream: &stream, until: Instant::now() + Duration::from_secs(10), go_on: &|| true };
        greet(by, env, FOR, to, record, &mut reply).map(|()| reply)
    }
    /// Both ends of one connection.
    fn met(caller: &RankEnv, to: usize, listener: &RankEnv) -> (Came, Result<[u8; 5]>) {
        let (mut door, at) = door();
        std::thread::scope(|scope| {
            let called = scope.spawn(|| call(caller, at, to, b"rec1"));
            let served = serve(&mut door, listener, if caller.secret == listener.secret { 10_000 } else { 300 });
            drop(door);
            (served, called.join().unwrap())
        })
    }

    /// A stranger relays and records the first message of each side.
    fn relay(caller: &mut TcpStream, listener: &mut TcpStream) -> ([u8; CHALLENGE], Vec<u8>) {
        let (mut challenge, mut hello) = ([0; CHALLENGE], vec![0; Hello::bytes(4)]);
        listener.read_exact(&mut challenge).unwrap();
        caller.write_all(&challenge).unwrap();
        caller.read_exact(&mut hello).unwrap();
        listener.write_all(&hello).unwrap();
        (challenge, hello)
    }

    #[test]
    fn ranks_with_one_secret_meet_and_others_do_not() {
        let (served, called) = met(&rank(1, OURS), 0, &rank(0, OURS));
        assert_eq!((served, called.unwrap()), (vec![(1, b"rec1".to_vec())], *b"reply"));
        let (served, called) = met(&rank(2, None), 0, &rank(0, None));
        assert_eq!((served[0].0, called.unwrap()), (2, *b"reply"));
        for (caller, listener) in [(None, OURS), (OURS, None), (Some("another job's secret"), OURS)] {
            let (served, called) = met(&rank(1, caller), 0, &rank(0, listener));
            assert!(served.is_empty() && called.is_err(), "{caller:?} {listener:?}");
        }
    }

    #[test]
    fn a_greeting_that_was_overheard_is_worth_nothing_again() {
        let (listener, caller) = (rank(0, OURS), rank(1, OURS));
        let (mut door, at) = door();
        let between = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = between.local_addr().unwrap();
        let overheard = std::thread::scope(|scope| {
            let called = scope.spawn(|| call(&caller, there, 0, b"rec1"));
            let stranger = scope.spawn(|| {
                let (mut near, mut far) = (between.accept().unwrap().0, TcpStream::connect(at).unwrap());
                let (challenge, hello) = relay(&mut near, &mut far);
                let mut answer = [0; 5 + CODE];
                far.read_exact(&mut answer).unwrap();
                near.write_all(&answer).unwrap();
                (challenge, hello, answer)
            });
            assert_eq!(serve(&mut door, &listener, 10_000).len(), 1);
            assert_eq!(called.join().unwrap().unwrap(), *b"reply");
            stranger.join().unwrap()
        });
        // Replayed to the listener, it proves nothing: the challenge has changed.
        let mut again = TcpStream::connect(at).unwrap();
        again.write_all(&overheard.1).unwrap();
        assert!(serve(&mut door, &listener, 300).is_empty());
        assert!(door.strangers().unwrap().starts_with("1 connection, the last from 127.0.0.1, did not prove"));
        // Replaying the listener's answer to the caller fails too: the nonce has changed.
        let answers = std::thread::spawn(move || {
            let (mut near, mut hello) = (between.accept().unwrap().0, vec![0; Hello::bytes(4)]);
            near.write_all(&overheard.0).unwrap();
            near.read_exact(&mut hello).unwrap();
            near.write_all(&overheard.2).unwrap();
            hello
        });
        assert_eq!(call(&caller, there, 0, b"rec1").unwrap_err().kind(), ErrorKind::InvalidData);
        assert_ne!(answers.join().unwrap(), overheard.1);
    }

    /// A stranger that reflects a rank's messages to it, or relays them to another rank.
    #[test]
    fn a_reflected_message_proves_nothing() {
        let (mut door, at) = door();
        let listener = rank(0, OURS);
        // The stranger listens, and relays the greeting of a rank that calls it to rank 0 as its own; but the rank
        // meant rank 2.
        let between = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = between.local_addr().unwrap();
        std::thread::scope(|scope| {
            let called = scope.spawn(|| call(&rank(1, OURS), there, 2, b"rec1"));
            let stranger = scope.spawn(|| {
                let (mut near, mut far) = (between.accept().unwrap().0, TcpStream::connect(at).unwrap());
                let (_, hello) = relay(&mut near, &mut far);
                // The caller's own code instead of the listener's.
                near.write_all(&[b"reply", &hello[hello.len() - CODE..]].concat()).unwrap();
            });
            assert!(serve(&mut door, &listener, 500).is_empty());
            stranger.join().unwrap();
            assert_eq!(called.join().unwrap().unwrap_err().kind(), ErrorKind::InvalidData);
        });
        assert!(door.strangers().is_some());
        // A rank cannot greet itself.
        let (served, called) = met(&rank(0, OURS), 0, &rank(0, OURS));
        assert!(served.is_empty() && called.is_err());
    }

    #[test]
    fn pending_callers_are_few_and_the_oldest_goes_first() {
        let (mut door, at) = door();
        let env = rank(0, OURS);
        let mut silent = Vec::new();
        for _ in 0..PENDING + 40 {
            silent.push(TcpStream::connect(at).unwrap());
            door.wait(Duration::from_secs(5));
            assert!(door.answer(&env).is_empty());
        }
        assert_eq!((door.pending.len(), door.refused), (PENDING, 40));
        let ended = |mut stream: &TcpStream| {
            let mut greeting = Vec::new();
            stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            stream.read_to_end(&mut greeting).is_ok()
        };
        assert!(ended(&silent[0]) && ended(&silent[39]) && !ended(&silent[40]));
        // They do not block anyone.
        std::thread::scope(|scope| {
            let called = scope.spawn(|| call(&rank(1, OURS), at, 0, b"rec1"));
            assert_eq!(serve(&mut door, &env, 10_000).len(), 1);
            called.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_byte_now_and_then_does_not_put_the_end_off() {
        let (mut door, at) = door();
        let env = rank(0, OURS);
        let mut slow = TcpStream::connect(at).unwrap();
        let (since, mut sent) = (Instant::now(), 0);
        while door.refused == 0 {
            sent += slow.write(&MAGIC[..1]).unwrap_or(0);
            std::thread::sleep(Duration::from_millis(100));
            door.wait(Duration::from_millis(10));
            assert!(door.answer(&env).is_empty());
        }
        assert!(since.elapsed() >= PATIENCE && sent < Hello::bytes(4), "{sent} bytes, which may be a whole greeting");
        // A listener that sends this slowly does not hold up a caller either.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            while stream.write_all(b"f").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let (stream, since) = (TcpStream::connect(there).unwrap(), Instant::now());
        let by = By { stream: &stream, until: since + Duration::from_millis(200), go_on: &|| true };
        assert_eq!(greet(by, &rank(1, OURS), FOR, 0, b"rec1", &mut []).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(since.elapsed() < Duration::from_secs(5));
    }
}
