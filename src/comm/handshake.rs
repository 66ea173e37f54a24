//! Mutual authentication of a connection: both sides prove that they know the job's secret before they exchange
//! anything else. Never encrypts what follows.
//!
//! [Note: greeting]
//!
//! | from | what |
//! | --- | --- |
//! | listener | `MAGIC`, a nonce |
//! | caller | `MAGIC`, its rank, a nonce, a record, a code ([`Hello`]) |
//! | listener | a reply, a code |
//!
//! A code is the HMAC-SHA-256, under the secret, of all that both sides know by then: the connection's purpose, the
//! job, both ranks, both nonces and the record. The listener's code also covers its reply, and always differs from a
//! caller's (`Codes`). So nothing overheard on one connection can be replayed on another, and no message can be
//! reflected to its sender. Without a secret the key is empty: greetings then keep jobs apart, but not strangers out.
//!
//! The listener's side, which waits for nobody, is [`super::door`].
use super::env::RankEnv;
use super::secret::random;
use hmac::{Hmac, KeyInit, Mac};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sha2::{Digest, Sha256};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

pub(super) const MAGIC: &[u8; 8] = b"flatshd2";
pub(super) const NONCE: usize = 32;
pub(super) const CODE: usize = 32;
pub(super) const CHALLENGE: usize = MAGIC.len() + NONCE;
/// How often callers at least check whether to go on.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(super) type Nonce = [u8; NONCE];

/// The nonce in a listener's first message.
pub fn challenge(bytes: &[u8]) -> Option<Nonce> {
    bytes.strip_prefix(MAGIC)?.try_into().ok()
}

/// A caller's message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello<'a> {
    pub rank: u32,
    pub nonce: Nonce,
    pub record: &'a [u8],
    pub code: [u8; CODE],
}
impl<'a> Hello<'a> {
    pub const fn bytes(record: usize) -> usize {
        MAGIC.len() + 4 + NONCE + record + CODE
    }
    /// Parses a message with a record of `record` bytes.
    pub fn parse(bytes: &'a [u8], record: usize) -> Option<Hello<'a>> {
        let (rank, rest) = bytes.strip_prefix(MAGIC)?.split_first_chunk()?;
        let (nonce, rest) = rest.split_first_chunk()?;
        let (record, code) = rest.split_at_checked(record)?;
        Some(Hello { rank: u32::from_le_bytes(*rank), nonce: *nonce, record, code: code.try_into().ok()? })
    }
    fn to_bytes(self) -> Vec<u8> {
        [MAGIC, &self.rank.to_le_bytes()[..], &self.nonce, self.record, &self.code].concat()
    }
}

/// What is proven: both codes cover all of it.
pub(super) struct Proof<'a> {
    /// "NCCL rendezvous".
    pub purpose: &'a str,
    pub caller: usize,
    pub listener: usize,
    /// The caller's nonce.
    pub nonce: &'a Nonce,
    pub challenge: &'a Nonce,
    pub record: &'a [u8],
}

/// The common part of a connection's two codes.
#[derive(Clone)]
pub(super) struct Codes(Hmac<Sha256>);

impl Codes {
    pub fn new(env: &RankEnv, proof: &Proof) -> Codes {
        // HMAC accepts any key; one block long, it cannot fail.
        let mut key = [0; 64];
        if let Some(secret) = &env.secret {
            key[..32].copy_from_slice(&Sha256::digest(secret.reveal()));
        }
        let RankEnv { run_id, master_addr, master_port, world, parent_pid, .. } = env;
        let job = format!("{master_port} {world} {parent_pid:?}");
        let [caller, listener] = [proof.caller, proof.listener].map(|rank| (rank as u64).to_le_bytes());
        let mut codes = Codes(Hmac::new(&key.into()));
        for part in
            [proof.purpose.as_bytes(), run_id.as_bytes(), master_addr.as_bytes(), job.as_bytes(), &caller, &listener]
        {
            codes.add(part);
        }
        for part in [proof.nonce, proof.challenge, proof.record] {
            codes.add(part);
        }
        codes
    }
    /// Includes the length, so that different lists of parts never collide.
    fn add(&mut self, part: &[u8]) {
        self.0.update(&(part.len() as u64).to_le_bytes());
        self.0.update(part);
    }
    pub fn caller(mut self) -> Hmac<Sha256> {
        self.add(b"caller");
        self.0
    }
    pub fn listener(mut self, reply: &[u8]) -> Hmac<Sha256> {
        self.add(b"listener");
        self.add(reply);
        self.0
    }
}

/// A non-blocking stream with a deadline for all reads and writes together.
pub struct By<'a> {
    pub stream: &'a TcpStream,
    pub until: Instant,
    /// Called every `POLL_INTERVAL` or more often.
    pub go_on: &'a dyn Fn() -> bool,
}
impl By<'_> {
    fn wait(&self, flags: PollFlags) -> Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() || !(self.go_on)() {
            return Err(Error::new(ErrorKind::TimedOut, "no answer in time"));
        }
        // A signal counts as a timeout.
        let _ = poll(&mut [PollFd::new(self.stream, flags)], Some(&timespec(left.min(POLL_INTERVAL))));
        Ok(())
    }
    fn retry<T>(&self, flags: PollFlags, mut f: impl FnMut(&TcpStream) -> Result<T>) -> Result<T> {
        loop {
            match f(self.stream) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => self.wait(flags)?,
                done => return done,
            }
        }
    }
}
impl Read for By<'_> {
    fn read(&mut self, buf: &mut [u8]) -> Result<usize> {
        self.retry(PollFlags::IN, |mut stream| stream.read(buf))
    }
}
impl Write for By<'_> {
    fn write(&mut self, buf: &[u8]) -> Result<usize> {
        self.retry(PollFlags::OUT, |mut stream| stream.write(buf))
    }
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// The caller's side: proves that it is this rank and verifies that rank `to` listens there; fills `reply` with its
/// reply.
pub fn greet(mut by: By, env: &RankEnv, purpose: &str, to: usize, record: &[u8], reply: &mut [u8]) -> Result<()> {
    by.stream.set_nonblocking(true)?;
    by.stream.set_nodelay(true)?;
    let mut said = [0; CHALLENGE];
    by.read_exact(&mut said)?;
    let challenge = challenge(&said).ok_or(ErrorKind::InvalidData)?;
    let nonce = random()?;
    let proof = Proof { purpose, caller: env.rank, listener: to, nonce: &nonce, challenge: &challenge, record };
    let codes = Codes::new(env, &proof);
    let code = codes.clone().caller().finalize().into_bytes().into();
    by.write_all(&Hello { rank: env.rank as u32, nonce, record, code }.to_bytes())?;
    let mut code = [0; CODE];
    by.read_exact(reply)?;
    by.read_exact(&mut code)?;
    codes.listener(reply).verify_slice(&code).map_err(|_| ErrorKind::InvalidData.into())
}

pub fn timespec(t: Duration) -> Timespec {
    Timespec { tv_sec: t.as_secs() as _, tv_nsec: t.subsec_nanos() as _ }
}

/// A purpose, secrets and ranks for tests here and in `door`.
#[cfg(test)]
pub(super) mod testing {
    use super::super::env::{RankEnv, here};
    use super::super::secret::Secret;

    pub const FOR: &str = "test";
    pub const OURS: Option<&str> = Some("the secret of this job");

    pub fn rank(rank: usize, secret: Option<&str>) -> RankEnv {
        RankEnv { secret: secret.map(|text| Secret::new(text, "test").unwrap()), ..here(rank, 3, 29_500) }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{FOR, OURS, rank};
    use super::*;

    /// The codes cover everything on which both sides must agree, so none of it can be changed in transit.
    #[test]
    fn codes_cover_all_that_is_meant() {
        let (nonce, challenge) = ([1; NONCE], [2; NONCE]);
        let codes =
            |env: &RankEnv, purpose: &str, ranks: [usize; 2], nonces: [&Nonce; 2], record: &[u8]| -> [[u8; CODE]; 2] {
                let [caller, listener] = ranks;
                let proof = Proof { purpose, caller, listener, nonce: nonces[0], challenge: nonces[1], record };
                let codes = Codes::new(env, &proof);
                [codes.clone().caller(), codes.listener(b"")].map(|code| code.finalize().into_bytes().into())
            };
        let env = rank(1, OURS);
        let nonces = [&nonce, &challenge];
        let of = |env: &RankEnv| codes(env, FOR, [1, 0], nonces, b"ab");
        let mut all = [
            of(&env),
            of(&rank(1, None)),
            of(&RankEnv { world: 4, ..env.clone() }),
            of(&RankEnv { run_id: "another".into(), ..env.clone() }),
            of(&RankEnv { master_port: 1, ..env.clone() }),
            of(&RankEnv { master_addr: "node1".into(), ..env.clone() }),
            codes(&env, "testa", [1, 0], nonces, b"b"),
            codes(&env, FOR, [2, 0], nonces, b"ab"),
            codes(&env, FOR, [0, 1], nonces, b"ab"),
            codes(&env, FOR, [1, 0], [&[3; NONCE], &challenge], b"ab"),
            codes(&env, FOR, [1, 0], [&nonce, &[3; NONCE]], b"ab"),
            codes(&env, FOR, [1, 0], nonces, b"abc"),
        ]
        .concat();
        let n = all.len();
        all.sort();
        all.dedup();
        assert_eq!((all.len(), n), (24, 24));
    }
}
