//! One NCCL communicator: init, enqueue, poll, abort. Never blocks inside NCCL: communicators are non-blocking, so
//! every wait is our own loop with a deadline.
//!
//! [Note: abort] The handle is behind a lock and is taken out by an abort. A call holds the lock only inside NCCL, not
//! while it polls for completion, so the watching thread can abort at any time, and the interrupted call then ends with
//! the reason. Aborting a communicator removes its kernels from the GPU. Abort and orderly destruction return only when
//! the last graph that captured the communicator is gone. So nobody else waits for them, and whoever aborts or ends a
//! world drops the graphs first.
use super::library::{Handle, IN_PROGRESS, Nccl, NcclConfig, NcclOptions, SUCCESS, UniqueId};
use super::rendezvous::ID;
use crate::base::{Error, Result};
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long a call is polled eagerly before sleeping between polls.
const EAGER: Duration = Duration::from_micros(500);
const REST: Duration = Duration::from_micros(100);
/// Time limit of the orderly shutdown.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

struct RawComm(Handle);
// SAFETY: NCCL accepts calls from any thread, one at a time, and the handle is only used under the lock.
unsafe impl Send for RawComm {}

pub(super) struct Comm {
    pub nccl: Arc<Nccl>,
    /// The options of this communicator and of those split off it.
    pub options: NcclOptions,
    handle: Mutex<Option<RawComm>>,
    failed: OnceLock<String>,
    timeout: Duration,
}

/// Generates the id on rank 0, for [`Comm::init`].
pub(super) fn unique_id(nccl: &Nccl) -> Result<[u8; ID]> {
    let mut id = UniqueId([0; ID]);
    // SAFETY: writes 128 bytes.
    match unsafe { (nccl.unique_id)(&mut id) } {
        SUCCESS => Ok(id.0),
        code => Err(Error::Run(format!("ncclGetUniqueId: {}", nccl.describe(code)))),
    }
}

/// Polls `state` until it is no longer in progress.
fn settle(
    nccl: &Nccl,
    timeout: Duration,
    mut state: impl FnMut() -> std::result::Result<c_int, String>,
) -> std::result::Result<(), String> {
    let start = Instant::now();
    loop {
        match state()? {
            SUCCESS => return Ok(()),
            IN_PROGRESS => {}
            code => return Err(format!("NCCL: {}", nccl.describe(code))),
        }
        match start.elapsed() {
            spent if spent > timeout => return Err(format!("no answer within {timeout:?} from the other ranks")),
            spent if spent > EAGER => std::thread::sleep(REST),
            _ => std::thread::yield_now(),
        }
    }
}

impl Comm {
    /// Creates a communicator over all ranks; every rank calls it, with its GPU current on this thread. `stop` returns
    /// a reason to give up early.
    pub(super) fn init(
        nccl: Arc<Nccl>,
        options: NcclOptions,
        id: [u8; ID],
        (rank, size): (usize, usize),
        timeout: Duration,
        stop: &dyn Fn() -> Option<String>,
    ) -> Result<Comm> {
        let (mut handle, mut config) = (std::ptr::null_mut(), NcclConfig::non_blocking(&options));
        let version = nccl.version_text()?;
        let failed = |what: String| {
            Error::Run(format!("rank {rank}: NCCL {version}, {size} ranks: {what}; set NCCL_DEBUG=INFO for details"))
        };
        // SAFETY: the configuration is valid, and NCCL writes the handle before it returns.
        let code = unsafe { (nccl.init)(&mut handle, size as c_int, UniqueId(id), rank as c_int, &mut config) };
        if !matches!(code, SUCCESS | IN_PROGRESS) || handle.is_null() {
            return Err(failed(nccl.describe(code)));
        }
        let comm = Comm::new(nccl, options, handle, timeout);
        comm.settled(stop).map_err(|what| {
            comm.abort(&what);
            failed(what)
        })?;
        Ok(comm)
    }
    fn new(nccl: Arc<Nccl>, options: NcclOptions, handle: Handle, timeout: Duration) -> Comm {
        Comm { nccl, options, handle: Mutex::new(Some(RawComm(handle))), failed: OnceLock::new(), timeout }
    }

    /// A communicator of the ranks that pass the same color, ordered by key. Every rank of this one must call.
    pub(super) fn split(&self, color: usize, key: usize, stop: &dyn Fn() -> Option<String>) -> Result<Comm> {
        let mut config = NcclConfig::non_blocking(&self.options);
        // An NCCL thread writes this when the new communicator is ready, so it must not move.
        let mut slot: Box<Handle> = Box::new(std::ptr::null_mut());
        let new: *mut Handle = &mut *slot;
        let failed = |what: String| Error::Run(format!("ncclCommSplit: {what}; set NCCL_DEBUG=INFO for details"));
        let started = self.run_unless(stop, |handle, nccl| {
            // SAFETY: a live communicator; `new` stays valid until this communicator has settled below.
            unsafe { (nccl.split)(handle, color as c_int, key as c_int, new, &mut config) }
        });
        let done = started.and_then(|()| {
            settle(&self.nccl, self.timeout, || {
                // SAFETY: NCCL stores a pointer there at most once.
                let there = unsafe { new.read_volatile() };
                match stop() {
                    Some(why) => Err(why),
                    None => Ok(if there.is_null() { IN_PROGRESS } else { SUCCESS }),
                }
            })
        });
        if let Err(what) = done {
            // NCCL may still write to it.
            std::mem::forget(slot);
            return Err(failed(what));
        }
        let comm = Comm::new(self.nccl.clone(), self.options, *slot, self.timeout);
        comm.settled(stop).map_err(|what| {
            comm.abort(&what);
            failed(what)
        })?;
        Ok(comm)
    }

    fn lock(&self) -> MutexGuard<'_, Option<RawComm>> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn gone(&self) -> String {
        self.failed.get().cloned().unwrap_or_else(|| "the communicator is closed".into())
    }
    /// NCCL's status of the work so far.
    fn state(&self) -> std::result::Result<c_int, String> {
        let guard = self.lock();
        let Some(RawComm(handle)) = &*guard else { return Err(self.gone()) };
        let mut state = SUCCESS;
        // SAFETY: a live communicator; writes one int.
        match unsafe { (self.nccl.async_error)(*handle, &mut state) } {
            SUCCESS => Ok(state),
            code => Err(format!("NCCL: {}", self.nccl.describe(code))),
        }
    }
    fn settled(&self, stop: &dyn Fn() -> Option<String>) -> std::result::Result<(), String> {
        settle(&self.nccl, self.timeout, || match stop() {
            Some(why) => Err(why),
            None => self.state(),
        })
    }

    /// Enqueues with `call` and returns when NCCL has done so: later work in the stream is ordered after it.
    pub(super) fn run(&self, call: impl FnOnce(Handle, &Nccl) -> c_int) -> std::result::Result<(), String> {
        self.run_unless(&|| None, call)
    }
    /// Gives up waiting when `stop` returns a reason.
    fn run_unless(
        &self,
        stop: &dyn Fn() -> Option<String>,
        call: impl FnOnce(Handle, &Nccl) -> c_int,
    ) -> std::result::Result<(), String> {
        let code = match &*self.lock() {
            Some(RawComm(handle)) => call(*handle, &self.nccl),
            None => return Err(self.gone()),
        };
        match code {
            SUCCESS => Ok(()),
            IN_PROGRESS => self.settled(stop),
            code => Err(format!("NCCL: {}", self.nccl.describe(code))),
        }
    }
    /// Calls with the handle, for registration; `None` once aborted.
    pub(super) fn with<T>(&self, call: impl FnOnce(Handle, &Nccl) -> T) -> Option<T> {
        self.lock().as_ref().map(|RawComm(handle)| call(*handle, &self.nccl))
    }
    /// An asynchronous error that no call has returned.
    pub(super) fn trouble(&self) -> Option<String> {
        match self.state() {
            Ok(SUCCESS | IN_PROGRESS) => None,
            Ok(code) => Some(format!("NCCL: {}", self.nccl.describe(code))),
            Err(_) if self.failed.get().is_some() => None, // already reported
            Err(what) => Some(what),
        }
    }
    pub(super) fn abort(&self, why: &str) {
        let _ = self.failed.set(why.to_string());
        let taken = self.lock().take();
        if let Some(RawComm(handle)) = taken {
            // SAFETY: taken out of the lock, so no other call has or will get it.
            let _ = unsafe { (self.nccl.abort)(handle) };
        }
    }
    pub(super) fn failure(&self) -> Option<&str> {
        self.failed.get().map(String::as_str)
    }
}

impl Drop for Comm {
    /// Peers may still wait for operations in flight, so all ranks shut down together, with a time limit.
    fn drop(&mut self) {
        let finished = match &*self.lock() {
            // SAFETY: a live communicator.
            Some(RawComm(handle)) => unsafe { (self.nccl.finalize)(*handle) },
            None => return,
        };
        let finished =
            matches!(finished, SUCCESS | IN_PROGRESS) && settle(&self.nccl, EXIT_TIMEOUT, || self.state()).is_ok();
        if let Some(RawComm(handle)) = self.lock().take() {
            // SAFETY: taken out of the lock, and destroyed once.
            let _ = unsafe { if finished { (self.nccl.destroy)(handle) } else { (self.nccl.abort)(handle) } };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake;
    use super::*;
    use std::sync::atomic::Ordering::SeqCst;

    const PATIENT: Duration = Duration::from_secs(20);
    const NEVER: i32 = i32::MAX;

    fn on() -> Option<String> {
        None
    }
    fn enqueue(comm: &Comm) -> std::result::Result<(), String> {
        let null = std::ptr::null_mut;
        // SAFETY: the fake dereferences no pointer.
        comm.run(|handle, nccl| unsafe { (nccl.all_gather)(null(), null(), 0, 7, handle, null()) })
    }

    #[test]
    fn a_communicator_is_made_split_used_and_ended_in_order() {
        let (comm, state) = fake::comm(5, PATIENT, &on);
        let comm = comm.unwrap();
        let part = comm.split(0, 1, &on).unwrap();
        state.polls.store(4, SeqCst);
        enqueue(&comm).unwrap();
        assert_eq!(state.polls.load(SeqCst), 0, "the call must wait until NCCL has finished");
        assert_eq!((comm.trouble(), part.trouble()), (None, None));
        drop((comm, part));
        assert_eq!((state.destroyed.load(SeqCst), state.aborted.load(SeqCst)), (1, 0));
    }

    #[test]
    fn ranks_that_never_come_end_the_wait_and_the_communicator_is_aborted_once() {
        let (comm, state) = fake::comm(NEVER, Duration::from_millis(50), &on);
        let text = comm.err().unwrap().to_string();
        assert!(text.contains("NCCL 2.28.9, 2 ranks: no answer within 50ms") && text.contains("NCCL_DEBUG"), "{text}");
        assert_eq!((state.destroyed.load(SeqCst), state.aborted.load(SeqCst)), (0, 1));
    }

    #[test]
    fn a_rank_that_failed_ends_the_wait_at_once() {
        let (comm, state) = fake::comm(NEVER, PATIENT, &|| Some("rank 1 failed".into()));
        assert!(comm.err().unwrap().to_string().contains("rank 1 failed"));
        assert_eq!(state.aborted.load(SeqCst), 1);
    }

    #[test]
    fn a_rank_that_failed_ends_a_split_at_once() {
        let (comm, state) = fake::comm(0, PATIENT, &on);
        let comm = comm.unwrap();
        let ask = |polls| {
            state.polls.store(polls, SeqCst);
            comm.split(0, 1, &|| Some("rank 1 failed".into())).err().unwrap().to_string()
        };
        // Before the other ranks call, and while the new communicator is being created.
        for text in [ask(NEVER), ask(0)] {
            assert!(text.contains("ncclCommSplit: rank 1 failed"), "{text}");
        }
    }

    #[test]
    fn an_abort_from_another_thread_ends_a_call_in_progress_with_the_reason() {
        let (comm, state) = fake::comm(0, PATIENT, &on);
        let comm = comm.unwrap();
        state.polls.store(NEVER, SeqCst);
        let ended = std::thread::scope(|scope| {
            let call = scope.spawn(|| enqueue(&comm));
            std::thread::sleep(Duration::from_millis(50));
            comm.abort("rank 3 failed");
            comm.abort("something later");
            call.join().unwrap()
        });
        assert_eq!(ended, Err("rank 3 failed".to_string()));
        assert_eq!((enqueue(&comm), comm.trouble()), (Err("rank 3 failed".into()), None));
        drop(comm);
        assert_eq!((state.destroyed.load(SeqCst), state.aborted.load(SeqCst)), (0, 1));
    }

    #[test]
    fn an_error_that_arises_while_nobody_calls_is_seen() {
        let (comm, state) = fake::comm(0, PATIENT, &on);
        let comm = comm.unwrap();
        state.result.store(6, SeqCst);
        assert_eq!(comm.trouble(), Some("NCCL: remote process exited".into()));
        assert_eq!(enqueue(&comm), Err("NCCL: remote process exited".into()));
    }
}
