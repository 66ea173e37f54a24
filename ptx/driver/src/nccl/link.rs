//! A rank's connection to the hub of its world. Sends at once, and stores what arrives until it is requested. Never
//! blocks on an answer.
use super::wire::{Frame, FrameKind, KEY};
use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Answers by communicator and number; messages by communicator, sender and number.
#[derive(Default)]
struct HubInbox {
    answers: HashMap<(u64, u64), Frame>,
    mail: HashMap<(u64, u64, u64), Frame>,
    /// The first rank that was lost; this rank if the hub is lost.
    lost: Option<usize>,
}

pub struct HubLink {
    stream: Mutex<TcpStream>,
    inbox: Arc<Mutex<HubInbox>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HubLink {
    pub fn open(port: u16, key: [u8; KEY], rank: usize, size: usize, gpu: u64, host: &str) -> io::Result<Arc<HubLink>> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        let mut reader = stream.try_clone()?;
        let inbox: Arc<Mutex<HubInbox>> = Arc::default();
        let link = HubLink { stream: Mutex::new(stream), inbox: inbox.clone() };
        std::thread::Builder::new().name("nccl link".into()).spawn(move || {
            while let Ok(frame) = Frame::read(&mut reader) {
                let mut inbox = lock(&inbox);
                match frame.kind {
                    FrameKind::Mail => {
                        inbox.mail.insert((frame.comm, frame.words[0], frame.words[1]), frame);
                    }
                    FrameKind::Lost => {
                        inbox.lost.get_or_insert(frame.words[0] as usize);
                    }
                    _ => {
                        inbox.answers.insert((frame.comm, frame.seq), frame);
                    }
                }
            }
            lock(&inbox).lost.get_or_insert(0); // the hub's process is rank 0's
        })?;
        let mut body = key.to_vec();
        body.extend_from_slice(host.as_bytes());
        link.send(&Frame::new(FrameKind::Hello, 0, 0, [rank as u64, size as u64, gpu, 0, 0], body))?;
        Ok(Arc::new(link))
    }
    pub fn send(&self, frame: &Frame) -> io::Result<()> {
        frame.write(&mut *lock(&self.stream))
    }
    pub fn answer(&self, comm: u64, seq: u64) -> Option<Frame> {
        lock(&self.inbox).answers.remove(&(comm, seq))
    }
    /// Whether this answer has arrived; it stays.
    pub fn has_answer(&self, comm: u64, seq: u64) -> bool {
        lock(&self.inbox).answers.contains_key(&(comm, seq))
    }
    pub fn mail(&self, comm: u64, from: u64, nth: u64) -> Option<Frame> {
        lock(&self.inbox).mail.remove(&(comm, from, nth))
    }
    /// A rank whose process has exited.
    pub fn lost(&self) -> Option<usize> {
        lock(&self.inbox).lost
    }
}

impl Drop for HubLink {
    fn drop(&mut self) {
        let _ = lock(&self.stream).shutdown(Shutdown::Both); // ends the reader too
    }
}
