//! Where ranks of this job connect, and strangers may: who greets as [`super::handshake`] says is let in. Never waits
//! for anybody: what there is of each greeting is read, a few callers at a time, up to one deadline each.
use super::env::RankEnv;
use super::handshake::{CODE, Codes, Hello, LOOK, MAGIC, Nonce, Proof, timespec};
use super::secret::random;
use hmac::Mac;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Result, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// A caller has so long from connecting to the end of its greeting. Ranks need a moment, unless their host is
/// overloaded.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections that may be open without having greeted: who opens more drops the oldest.
const PENDING: usize = 64;

/// A rank that has proven who it is, and waits for the same.
pub struct Arrival {
    pub rank: usize,
    pub ip: IpAddr,
    pub record: Vec<u8>,
    stream: TcpStream,
    codes: Codes,
}
impl Arrival {
    /// Proves it, and gives the caller what it came for. The stream does not block.
    pub fn admit(self, reply: &[u8]) -> Result<TcpStream> {
        // Nothing may follow a greeting before its answer; and who has hung up is not here.
        match (&self.stream).read(&mut [0]) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            _ => return Err(ErrorKind::ConnectionAborted.into()),
        }
        let code: [u8; CODE] = self.codes.listener(reply).finalize().into_bytes().into();
        write_whole(&self.stream, &[reply, &code].concat())?;
        Ok(self.stream)
    }
}

/// What fits into a socket's buffer, which is empty so far.
fn write_whole(mut stream: &TcpStream, bytes: &[u8]) -> Result<()> {
    match stream.write(bytes)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(ErrorKind::WriteZero.into()),
    }
}

/// A connection of nobody in particular.
struct Caller {
    stream: TcpStream,
    ip: IpAddr,
    until: Instant,
    challenge: Nonce,
    said: Vec<u8>,
}

impl Caller {
    fn new(stream: TcpStream, ip: IpAddr, said: usize) -> Result<Caller> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let challenge = random()?;
        write_whole(&stream, &[&MAGIC[..], &challenge].concat())?;
        Ok(Caller { stream, ip, until: Instant::now() + PATIENCE, challenge, said: Vec::with_capacity(said) })
    }
    /// Whether that many bytes have come.
    fn hear(&mut self, bytes: usize) -> Result<bool> {
        let mut heard = [0; 256];
        while self.said.len() < bytes {
            let room = (bytes - self.said.len()).min(heard.len());
            match (&self.stream).read(&mut heard[..room]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.said.extend_from_slice(&heard[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock && Instant::now() < self.until => return Ok(false),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }
    fn judge(self, env: &RankEnv, purpose: &str, record: usize) -> Option<Arrival> {
        let hello = Hello::parse(&self.said, record)?;
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
    /// Bytes of a caller's record.
    record: usize,
    /// In the order in which they came.
    pending: VecDeque<Caller>,
    /// Those who did not greet as a rank of this job does, and the last of them.
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
    /// What is to be polled.
    pub fn watched(&self) -> impl Iterator<Item = PollFd<'_>> {
        let callers = self.pending.iter().map(|caller| PollFd::new(&caller.stream, PollFlags::IN));
        self.listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)).chain(callers)
    }
    /// Returns when something has happened there, or after so long.
    pub fn wait(&self, at_most: Duration) {
        let mut watched: Vec<PollFd> = self.watched().collect();
        let _ = poll(&mut watched, Some(&timespec(at_most))); // a signal is as good as a timeout
    }
    /// Moves every greeting on as far as it goes without waiting. Who has proven now that it is a rank of this job.
    pub fn answer(&mut self, env: &RankEnv) -> Vec<Arrival> {
        self.accept();
        let mut arrived = Vec::new();
        for _ in 0..self.pending.len() {
            let Some(mut caller) = self.pending.pop_front() else { break };
            let ip = caller.ip;
            match caller.hear(Hello::bytes(self.record)) {
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
            // A flood is no reason to stay here.
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
                        // Most likely no descriptor is left: one is given back, and none taken for a moment.
                        self.drop_oldest();
                        std::thread::sleep(LOOK);
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
    /// "3 connections, the last from 10.0.0.9, did not prove ...", where there were any.
    pub fn strangers(&self) -> Option<String> {
        let (n, s) = (self.refused, if self.refused == 1 { "" } else { "s" });
        let whose = "did not prove to be of this job: is the job secret the same for all ranks?";
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
    /// Ranks, and what they bring.
    type Came = Vec<(usize, Vec<u8>)>;
    /// What comes of whoever connects within so long.
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
    /// Both ends of one call.
    fn met(caller: &RankEnv, to: usize, listener: &RankEnv) -> (Came, Result<[u8; 5]>) {
        let (mut door, at) = door();
        std::thread::scope(|scope| {
            let called = scope.spawn(|| call(caller, at, to, b"rec1"));
            let served = serve(&mut door, listener, if caller.secret == listener.secret { 10_000 } else { 300 });
            drop(door);
            (served, called.join().unwrap())
        })
    }

    /// A stranger passes on what a listener and a caller say first, and keeps it.
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
        // Said again to the listener, it proves nothing: the challenge is another.
        let mut again = TcpStream::connect(at).unwrap();
        again.write_all(&overheard.1).unwrap();
        assert!(serve(&mut door, &listener, 300).is_empty());
        assert!(door.strangers().unwrap().starts_with("1 connection, the last from 127.0.0.1, did not prove"));
        // Nor does what the listener said, to the caller again: its nonce is another.
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

    /// A stranger that gives a rank's words back to it, or to another rank that it calls at the same time.
    #[test]
    fn what_a_rank_says_cannot_be_said_back_to_it() {
        let (mut door, at) = door();
        let listener = rank(0, OURS);
        // The stranger listens, and the rank that calls it is to prove itself to it: it passes that on as its own proof
        // to rank 0, but the rank meant rank 2.
        let between = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = between.local_addr().unwrap();
        std::thread::scope(|scope| {
            let called = scope.spawn(|| call(&rank(1, OURS), there, 2, b"rec1"));
            let stranger = scope.spawn(|| {
                let (mut near, mut far) = (between.accept().unwrap().0, TcpStream::connect(at).unwrap());
                let (_, hello) = relay(&mut near, &mut far);
                // Its own code instead of the listener's.
                near.write_all(&[b"reply", &hello[hello.len() - CODE..]].concat()).unwrap();
            });
            assert!(serve(&mut door, &listener, 500).is_empty());
            stranger.join().unwrap();
            assert_eq!(called.join().unwrap().unwrap_err().kind(), ErrorKind::InvalidData);
        });
        assert!(door.strangers().is_some());
        // A rank does not greet itself.
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
            let mut said = Vec::new();
            stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            stream.read_to_end(&mut said).is_ok()
        };
        assert!(ended(&silent[0]) && ended(&silent[39]) && !ended(&silent[40]));
        // They stand in nobody's way.
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
        let (since, mut said) = (Instant::now(), 0);
        while door.refused == 0 {
            said += slow.write(&MAGIC[..1]).unwrap_or(0);
            std::thread::sleep(Duration::from_millis(100));
            door.wait(Duration::from_millis(10));
            assert!(door.answer(&env).is_empty());
        }
        assert!(since.elapsed() >= PATIENCE && said < Hello::bytes(4), "{said} bytes, which may be all of a greeting");
        // Nor does a listener that speaks so slowly keep a caller.
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
