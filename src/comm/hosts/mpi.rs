//! The MPI wire (cargo feature `mpi`), for ranks started by mpirun or srun: uses whatever network the cluster's MPI
//! supports. Never uses MPI's collectives after startup, nor MPI between ranks of one host.
//!
//! [Note: who calls MPI] One thread at a time, under a mutex (MPI_THREAD_SERIALIZED), and only non-blocking calls:
//! post, test, cancel. A waiting caller tests repeatedly and sleeps in between. Messages progress only inside such
//! calls, so once calls are no longer possible ([`Library::close`]), no buffer is touched. That is how a rank gives up:
//! it cancels what it posted or, where MPI cannot cancel, closes the library for good. The process then ends without
//! MPI_Finalize, which the launcher reports as a failure and answers by ending the others.
//!
//! MPI's default error handler ends the process. Here errors are returned, and become [`Lost`] with MPI's message.
use super::roster::{PLACE, RankPlace, Roster};
use super::wire::{Bytes, Channel, Exchanged, Fault, Lost, MOVES, Move, POLL_INTERVAL, Wire};
use crate::base::{Error, Result, printable};
use crate::comm::env::RankEnv;
use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi::{self, MPI_Comm, MPI_Request};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// MPI counts bytes in a C int, so longer messages are sent in pieces of this size.
const PIECE: usize = if cfg!(test) { 1 << 16 } else { 1 << 30 };
/// Tag of messages about lost ranks. Smaller tags are channels.
const LOST: c_int = 1000;
/// Bytes of such a message: the rank, then text.
const WORD: usize = 256;
/// Polling interval for such a message.
const IDLE: Duration = Duration::from_millis(5);
/// Number of tests of an exchange before sleeping between them, and the sleep: about 0.1 ms with the kernel's slack, in
/// which a socket's buffer does not run empty below 10 Gbit/s.
const EAGER: u32 = 64;
const NAP: Duration = Duration::from_micros(50);
/// Limit for operations that finish at once or never: a farewell, a cancellation.
const MOMENT: Duration = Duration::from_millis(200);

/// This process's MPI state, while calls are allowed.
struct Library {
    open: Mutex<Option<Open>>,
    /// A rank failed: this process must not wait for the others in MPI_Finalize.
    failed: AtomicBool,
}
struct Open {
    universe: Universe,
    /// A duplicate of the world that returns errors.
    world: MPI_Comm,
}
// SAFETY: a communicator's handle is a name that any thread may use; it is only used under the mutex.
unsafe impl Send for Open {}

/// A message in flight. Its memory must stay valid until it is done, cancelled, or the library closed.
struct Posted {
    request: MPI_Request,
    receives: bool,
}
// SAFETY: as above, and MPI lets any thread test a request that another one posted.
unsafe impl Send for Posted {}

/// Carries MPI's error message.
type MpiResult = std::result::Result<(), String>;

fn mpi_result(code: c_int) -> MpiResult {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; 1024]; // MPI_MAX_ERROR_STRING: 256 in Open MPI, 512 to 1024 in MPICH
    let mut len: c_int = 0;
    // SAFETY: the text has room for the longest message of any known MPI; called under the mutex, like every call.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    Err(String::from_utf8_lossy(&text[..(len.max(0) as usize).min(text.len())]).trim().to_string())
}

impl Open {
    /// # Safety
    /// `at` points to `len` bytes that stay valid as [`Posted`] requires and that, for a receive, nobody else touches.
    unsafe fn post(
        &self,
        at: *mut c_void,
        len: usize,
        receives: bool,
        peer: c_int,
        tag: c_int,
    ) -> std::result::Result<Posted, String> {
        let mut request = MaybeUninit::uninit();
        let (count, world) = (len as c_int, self.world);
        // SAFETY: upheld by the caller; a call that succeeds writes `request`.
        unsafe {
            let byte = ffi::RSMPI_UINT8_T;
            mpi_result(match receives {
                true => ffi::MPI_Irecv(at, count, byte, peer, tag, world, request.as_mut_ptr()),
                false => ffi::MPI_Isend(at, count, byte, peer, tag, world, request.as_mut_ptr()),
            })?;
            Ok(Posted { request: request.assume_init(), receives })
        }
    }
    /// Whether it is done. Once true, it must not be tested again.
    fn test(&self, posted: &mut Posted) -> std::result::Result<bool, String> {
        let mut done: c_int = 0;
        // SAFETY: the request is one that was posted and not found done before.
        mpi_result(unsafe { ffi::MPI_Test(&mut posted.request, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(done != 0)
    }
    /// Tests for a moment until all are done. First cancels receives that nobody has begun to send.
    fn settle(&self, posted: &mut Vec<Posted>) -> bool {
        for p in posted.iter_mut().filter(|p| p.receives) {
            // SAFETY: as for `test`. A cancelled request still has to be tested.
            unsafe { ffi::MPI_Cancel(&mut p.request) };
        }
        let since = Instant::now();
        loop {
            posted.retain_mut(|p| !self.test(p).unwrap_or(false));
            if posted.is_empty() || since.elapsed() > MOMENT {
                return posted.is_empty();
            }
            std::thread::sleep(NAP);
        }
    }
}

impl Library {
    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// After this, the process makes no more MPI calls.
    fn close(open: &mut Option<Open>) {
        std::mem::forget(open.take()); // dropping the universe would finalize
    }
    /// See [Note: who calls MPI]. On return the memory of `posted` is free.
    fn give_up(&self, mut posted: Vec<Posted>) {
        self.failed.store(true, Ordering::Relaxed);
        let mut open = self.lock();
        if open.as_ref().is_some_and(|mpi| !mpi.settle(&mut posted)) {
            Library::close(&mut open);
        }
    }
}

/// One rank's place in an MPI launcher's world.
pub struct MpiWire {
    library: Arc<Library>,
    roster: Roster,
    rank: usize,
    ear: Mutex<Ear>,
}

/// Receives messages about lost ranks.
struct Ear {
    word: Box<[u8; WORD]>,
    posted: Option<Posted>,
}

impl MpiWire {
    /// Starts MPI, once per process. Returns when all ranks have joined.
    pub fn join(env: &RankEnv, timeout: Duration) -> Result<MpiWire> {
        let failed = |what: &str| Error::Run(format!("rank {}: MPI: {what}", env.rank));
        let (universe, level) = mpi::initialize_with_threading(Threading::Serialized)
            .ok_or_else(|| failed("was already started in this process"))?;
        let mut world = MaybeUninit::uninit();
        let (mut rank, mut size): (c_int, c_int) = (0, 0);
        // SAFETY: MPI is initialized by this thread, and no other thread uses it yet.
        let asked = unsafe {
            mpi_result(ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN))
                .and_then(|()| mpi_result(ffi::MPI_Comm_rank(ffi::RSMPI_COMM_WORLD, &mut rank)))
                .and_then(|()| mpi_result(ffi::MPI_Comm_size(ffi::RSMPI_COMM_WORLD, &mut size)))
        };
        asked.map_err(|e| failed(&e))?;
        if (rank as usize, size as usize) != (env.rank, env.world) {
            // In a world of one, finalizing would wait for nobody, so processes could end before their mismatch is
            // reported.
            std::mem::forget(universe);
            return Err(Error::input(format!(
                "rank {} of {}: according to MPI this is rank {rank} of {size}: `comm: mpi` needs ranks that mpirun or srun \
                 --mpi=pmix started (see srun --mpi=list); remove `comm` to use TCP, which works under any launcher",
                env.rank, env.world
            )));
        }
        if level < Threading::Serialized {
            return Err(failed(&format!("supports only {level:?} threads; Serialized is needed")));
        }
        // SAFETY: as above; every rank duplicates the world here.
        let world = unsafe {
            mpi_result(ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, world.as_mut_ptr())).map_err(|e| failed(&e))?;
            world.assume_init()
        };
        let open = Open { universe, world };
        let places = gather(&open, env, timeout).map_err(|e| failed(&e))?;
        let ear = Mutex::new(Ear { word: Box::new([0; WORD]), posted: None });
        let library = Arc::new(Library { open: Mutex::new(Some(open)), failed: AtomicBool::new(false) });
        Ok(MpiWire { library, roster: Roster::new(&places)?, rank: env.rank, ear })
    }
}

/// All-gathers every rank's place.
fn gather(mpi: &Open, env: &RankEnv, timeout: Duration) -> std::result::Result<Vec<RankPlace>, String> {
    let mine = RankPlace::of(env).to_bytes();
    let mut all = vec![[0; PLACE]; env.world];
    let mut request = MaybeUninit::uninit();
    let len = PLACE as c_int;
    // SAFETY: `all` has room for every rank's place; both stay valid until the request is done or this process gives
    // up.
    let mut posted = unsafe {
        let (from, to, byte) = (mine.as_ptr().cast(), all.as_mut_ptr().cast(), ffi::RSMPI_UINT8_T);
        mpi_result(ffi::MPI_Iallgather(from, len, byte, to, len, byte, mpi.world, request.as_mut_ptr()))?;
        Posted { request: request.assume_init(), receives: false }
    };
    let since = Instant::now();
    while !mpi.test(&mut posted)? {
        if since.elapsed() > timeout {
            std::mem::forget((mine, all));
            return Err(format!("not all {} ranks joined within {timeout:.0?}", env.world));
        }
        std::thread::sleep(NAP);
    }
    Ok(all.iter().map(RankPlace::from_bytes).collect())
}

impl Wire for MpiWire {
    fn roster(&self) -> &Roster {
        &self.roster
    }
    fn name(&self) -> &'static str {
        "mpi"
    }
    fn channel(&self, number: u16) -> Result<Box<dyn Channel>> {
        match c_int::from(number) {
            tag if tag < LOST => Ok(Box::new(MpiChannel { library: self.library.clone(), tag })),
            _ => Err(Error::op("channel", format!("number {number} is not below {LOST}"))),
        }
    }
    fn report(&self, lost: &Lost) {
        self.library.failed.store(true, Ordering::Relaxed);
        // An unfinished send stays in flight, so its memory is leaked. A rank fails at most once.
        let word: &'static mut [u8; WORD] = Box::leak(Box::new([0; WORD]));
        let text = &lost.why.as_bytes()[..lost.why.len().min(WORD - 5)]; // a 0 ends it
        word[..4].copy_from_slice(&(lost.rank as u32).to_le_bytes());
        word[4..4 + text.len()].copy_from_slice(text);
        let open = self.library.lock();
        let Some(mpi) = &*open else { return };
        let away = |rank: &usize| self.roster.host(*rank) != self.roster.host(self.rank);
        let send = |rank: usize| {
            // SAFETY: the message is leaked, so it lives forever, and is only read.
            unsafe { mpi.post(word.as_ptr().cast_mut().cast(), WORD, false, rank as c_int, LOST) }.ok()
        };
        let mut posted: Vec<Posted> = (0..self.roster.ranks()).filter(away).filter_map(send).collect();
        mpi.settle(&mut posted);
    }
    fn listen(&self, at_most: Duration) -> Option<Lost> {
        let since = Instant::now();
        loop {
            let heard = self.receive();
            if heard.is_some() {
                self.library.failed.store(true, Ordering::Relaxed);
                return heard;
            }
            match at_most.checked_sub(since.elapsed()) {
                Some(left) if !left.is_zero() => std::thread::sleep(IDLE.min(left)),
                _ => return None,
            }
        }
    }
}

impl MpiWire {
    fn receive(&self) -> Option<Lost> {
        let mut ear = self.ear.lock().unwrap_or_else(PoisonError::into_inner);
        let open = self.library.lock();
        let mpi = open.as_ref()?;
        if ear.posted.is_none() {
            let word = ear.word.as_mut_ptr();
            // SAFETY: the buffer is on the heap and read only when the receive is done; dropping the wire cancels it,
            // or closes the library.
            ear.posted = unsafe { mpi.post(word.cast(), WORD, true, ffi::RSMPI_ANY_SOURCE, LOST) }.ok();
        }
        if !mpi.test(ear.posted.as_mut()?).ok()? {
            return None;
        }
        ear.posted = None;
        let [a, b, c, d, text @ ..] = &*ear.word;
        let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
        let rank = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
        Some(Lost { rank, why: printable(&String::from_utf8_lossy(text), WORD) })
    }
}

impl Drop for MpiWire {
    /// Waits for the others, as MPI_Finalize does, unless one of them failed.
    fn drop(&mut self) {
        let mut open = self.library.lock();
        let Some(mpi) = &*open else { return };
        let ear = self.ear.get_mut().unwrap_or_else(PoisonError::into_inner);
        let quiet = mpi.settle(&mut ear.posted.take().into_iter().collect());
        if !quiet || self.library.failed.load(Ordering::Relaxed) || std::thread::panicking() {
            return Library::close(&mut open);
        }
        if let Some(Open { universe, mut world }) = open.take() {
            // SAFETY: nobody calls MPI any more, and nothing is in flight on this communicator.
            unsafe { ffi::MPI_Comm_free(&mut world) };
            drop(universe);
        }
    }
}

struct MpiChannel {
    library: Arc<Library>,
    tag: c_int,
}

/// Progress of the moves of an exchange.
#[derive(Default)]
struct MpiExchange {
    posted: [Option<Posted>; MOVES],
    /// Bytes posted of each move.
    begun: [usize; MOVES],
}

impl MpiExchange {
    /// Posts and tests what it can. Returns whether all is done, or the peer whose message failed and why.
    fn advance(&mut self, mpi: &Open, tag: c_int, moves: &mut [Move]) -> std::result::Result<bool, Lost> {
        for i in 0..moves.len() {
            let (peer, len) = (moves[i].peer, moves[i].len());
            let lost = |why: String| Lost { rank: peer, why };
            while !moves[i].is_done() {
                if let Some(posted) = &mut self.posted[i] {
                    if !mpi.test(posted).map_err(lost)? {
                        break;
                    }
                    self.posted[i] = None;
                    moves[i].done = self.begun[i];
                } else if self.may_begin(i, moves) {
                    let (from, piece) = (self.begun[i], PIECE.min(len - self.begun[i]));
                    let (at, receives) = match &mut moves[i].bytes {
                        Bytes::Send(bytes) => (bytes[from..].as_ptr().cast_mut(), false),
                        Bytes::Recv(bytes) => (bytes[from..].as_mut_ptr(), true),
                    };
                    // SAFETY: the bytes are borrowed until the exchange returns, and by then nothing is in flight.
                    let posted = unsafe { mpi.post(at.cast(), piece, receives, peer as c_int, tag) };
                    self.posted[i] = Some(posted.map_err(lost)?);
                    self.begun[i] += piece;
                } else {
                    break;
                }
            }
        }
        Ok(moves.iter().all(Move::is_done))
    }
    /// Pieces of one peer and direction are posted in the order of the moves, and both sides split messages alike.
    fn may_begin(&self, i: usize, moves: &[Move]) -> bool {
        let way = |m: &Move| (m.peer, matches!(m.bytes, Bytes::Recv(_)));
        (0..i).all(|before| way(&moves[before]) != way(&moves[i]) || self.begun[before] == moves[before].len())
    }
}

impl Channel for MpiChannel {
    fn exchange(&mut self, moves: &mut [Move], go_on: &dyn Fn() -> bool) -> Exchanged {
        let mut flight = MpiExchange::default();
        let (mut tests, mut asked) = (0, Instant::now());
        let fault = loop {
            let advanced = match &*self.library.lock() {
                Some(mpi) => flight.advance(mpi, self.tag, moves),
                None => break Fault::GaveUp { peer: waiting_for(moves) },
            };
            match advanced {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(lost) => break Fault::Lost(lost),
            }
            if asked.elapsed() >= POLL_INTERVAL {
                if !go_on() {
                    break Fault::GaveUp { peer: waiting_for(moves) };
                }
                asked = Instant::now();
            }
            tests += 1;
            match tests < EAGER {
                true => std::thread::yield_now(),
                false => std::thread::sleep(NAP),
            }
        };
        self.library.give_up(flight.posted.into_iter().flatten().collect());
        Err(fault)
    }
}

fn waiting_for(moves: &[Move]) -> usize {
    moves.iter().find(|m| !m.is_done()).map_or(0, |m| m.peer)
}
