//! A thread that looks at the operations in flight: NCCL's own errors, operations that take longer than the timeout, and ranks
//! that failed. On any of them it aborts all communicators, which frees the GPU of kernels that wait for ever, so that the
//! rank's own thread comes back with the reason. Never touches results.
use super::group::Group;
use super::{Patience, failed_rank};
use crate::base::{Error, Result};
use crate::comm::shm;
use crate::device::gpu::cuda::Cuda;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

const EVERY: Duration = Duration::from_millis(100);

pub(super) struct Watch {
    groups: Groups,
    cuda: Arc<Cuda>,
    timeout: Arc<Patience>,
    /// Dropped: the thread ends.
    open: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}
type Groups = Arc<Mutex<Vec<Weak<Group>>>>;

fn alive(groups: &Groups) -> Vec<Arc<Group>> {
    groups.lock().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade).collect()
}
fn end(groups: &Groups, cuda: &Cuda, why: &str) {
    // First, so that whoever comes back from waiting finds the reason.
    cuda.break_off(why.to_string());
    alive(groups).iter().for_each(|group| group.abort(why));
}

impl Watch {
    pub(super) fn start(cuda: Arc<Cuda>, host: Option<Arc<shm::World>>, timeout: Duration) -> Result<Watch> {
        let timeout = Arc::new(Patience::new(timeout));
        let groups = Groups::default();
        let (open, closed) = channel::<()>();
        let watched = (groups.clone(), cuda.clone(), timeout.clone());
        let look = move || {
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
        let thread = std::thread::Builder::new().name("nccl watch".into()).spawn(look);
        let thread = thread.map_err(|e| Error::Run(format!("cannot start a thread: {e}")))?;
        Ok(Watch { groups, cuda, timeout, open: Some(open), thread: Some(thread) })
    }
    pub(super) fn add(&self, group: &Arc<Group>) {
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

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.open.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a watcher that panicked has nothing to add
        }
    }
}
