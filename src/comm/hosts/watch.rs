//! The thread that detects lost ranks and accepts connections from peers. Never carries data.
use super::link::Link;
use super::wire::POLL_INTERVAL;
use crate::base::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;

/// Runs as long as there is a member or a group.
pub(super) struct HostsWatch {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HostsWatch {
    pub fn start(link: &Arc<Link>) -> Result<HostsWatch> {
        let ended = Arc::new(AtomicBool::new(false));
        let watched = (link.clone(), ended.clone());
        let watch = move || {
            let (link, ended) = watched;
            while !ended.load(Relaxed) {
                if let Some(lost) = link.wire.listen(POLL_INTERVAL) {
                    return link.learn(lost);
                }
            }
        };
        let thread = std::thread::Builder::new().name("hosts watch".into()).spawn(watch);
        let thread = thread.map_err(|e| Error::Run(format!("cannot start a thread: {e}")))?;
        Ok(HostsWatch { ended, thread: Some(thread) })
    }
}
impl Drop for HostsWatch {
    fn drop(&mut self) {
        self.ended.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // nothing to report if the watcher panicked
        }
    }
}
