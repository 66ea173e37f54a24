//! A thread that monitors operations in flight for NCCL errors, timeouts and failed ranks. On any of them it aborts all
//! communicators, repeatedly until the end. That frees the GPU of kernels that would wait forever, so the rank's own
//! thread returns with the reason. Never touches results.
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
    /// Dropping it ends the thread.
    open: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}
type WatchedGroups = Arc<Mutex<Vec<Weak<NcclGroup>>>>;

/// "rank 3 failed", if known here.
pub(super) fn failed_rank(host: Option<&shm::ShmWorld>) -> Option<String> {
    host.and_then(shm::ShmWorld::failed).map(|rank| format!("rank {rank} failed"))
}

fn alive(groups: &WatchedGroups) -> Vec<Arc<NcclGroup>> {
    groups.lock().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade).collect()
}
fn end(groups: &WatchedGroups, cuda: &Cuda, why: &str) {
    // First, so that a thread that returns from waiting finds the reason.
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
                return; // the device is lost, and every call reports it
            }
            let mut trouble = None;
            while closed.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                if trouble.is_none() {
                    let all = alive(&groups);
                    // Several groups may share what failed; report the one that is waiting for it.
                    trouble = failed_rank(host.as_deref())
                        .or_else(|| all.iter().find_map(|group| group.trouble(timeout.get())))
                        .or_else(|| all.iter().find_map(|group| group.given_up()));
                }
                // Once is not enough over IPC: peers that still run may overwrite what an abort writes.
                if let Some(why) = &trouble {
                    end(&groups, &cuda, why);
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
    /// Sets the time limit of operations from now on.
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
            let _ = thread.join(); // nothing to report if the watcher panicked
        }
    }
}
