//! A thread that looks at the operations in flight: NCCL's own errors, operations that take longer than the timeout,
//! and ranks that failed. On any of them it aborts all communicators, which frees the GPU of kernels that wait for
//! ever, so that the rank's own thread comes back with the reason. Never touches results.
use super::group::NcclGroup;
use crate::base::{Error, Result};
use crate::comm::{Patience, shm};
use crate::device::gpu::cuda::Cuda;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

const EVERY: Duration = Duration::from_millis(100);

pub(super) struct NcclWatch {
    groups: WatchedGroups,
    cuda: Arc<Cuda>,
    timeout: Arc<Patience>,
    /// Dropped: the thread ends.
    open: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}
type WatchedGroups = Arc<Mutex<Vec<Weak<NcclGroup>>>>;

/// "rank 3 failed", as far as this rank knows.
pub(super) fn failed_rank(host: Option<&shm::ShmWorld>) -> Option<String> {
    host.and_then(shm::ShmWorld::failed).map(|rank| format!("rank {rank} failed"))
}

fn alive(groups: &WatchedGroups) -> Vec<Arc<NcclGroup>> {
    groups.lock().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade).collect()
}
fn end(groups: &WatchedGroups, cuda: &Cuda, why: &str) {
    // First, so that whoever comes back from waiting finds the reason.
    cuda.break_off(why.to_string());
    alive(groups).iter().for_each(|group| group.abort(why));
}

impl NcclWatch {
    pub(super) fn start(cuda: Arc<Cuda>, host: Option<Arc<shm::ShmWorld>>, timeout: Duration) -> Result<NcclWatch> {
        let timeout = Arc::new(Patience::new(timeout));
        let groups = WatchedGroups::default();
        let (open, closed) = channel::<()>();
        let watched = (groups.clone(), cuda.clone(), timeout.clone());
        let watch = move || {
            let (groups, cuda, timeout) = watched;
            if cuda.context().bind_to_thread().is_err() {
                return; // the device is lost, and every call says so
            }
            while closed.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                let all = alive(&groups);
                // Several groups may share what failed: first the one that waits for it.
                let trouble = failed_rank(host.as_deref())
                    .or_else(|| all.iter().find_map(|group| group.trouble(timeout.get())))
                    .or_else(|| all.iter().find_map(|group| group.given_up()));
                if let Some(why) = trouble {
                    return end(&groups, &cuda, &why);
                }
            }
        };
        let thread = std::thread::Builder::new().name("nccl watch".into()).spawn(watch);
        let thread = thread.map_err(|e| Error::Run(format!("cannot start a thread: {e}")))?;
        Ok(NcclWatch { groups, cuda, timeout, open: Some(open), thread: Some(thread) })
    }
    pub(super) fn add(&self, group: &Arc<NcclGroup>) {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(group));
    }
    /// Operations may take so long from now on.
    pub(super) fn set_timeout(&self, timeout: Duration) {
        self.timeout.set(timeout);
    }
    /// Aborts every group.
    pub(super) fn end(&self, why: &str) {
        end(&self.groups, &self.cuda, why);
    }
}

impl Drop for NcclWatch {
    fn drop(&mut self) {
        drop(self.open.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a watcher that panicked has nothing to add
        }
    }
}
