//! Operations of NCCL as streams do them: begun when their turn comes, done when the hub has answered, never waited for by a thread. One that
//! failed stays where it is, as the real one's kernel does, until its communicator is aborted.
use super::api::INVALID_USAGE;
use super::comm::Comm;
use super::sums::{self, Operation};
use super::wire::{Frame, Kind};
use crate::{Memory, Outcome, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

#[derive(Clone, Copy, Debug)]
pub enum What {
    Collective { operation: Operation, reduction: u64, root: u64 },
    Send { to: usize },
    Receive { from: usize },
}

/// One call, its arguments checked.
#[derive(Clone)]
pub struct Call {
    pub comm: Arc<Comm>,
    pub what: What,
    pub source: u64,
    pub target: u64,
    pub count: usize,
    pub dtype: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Stage {
    Ahead,
    Asked(u64),
    Over,
}

/// A call under way.
struct Running {
    call: Call,
    stage: Stage,
}

/// Calls that run together: those between ncclGroupStart and ncclGroupEnd, or one.
pub struct Together {
    running: Vec<Running>,
    begun: bool,
}

impl Together {
    pub fn new(calls: &[Call]) -> Together {
        let running = calls.iter().map(|call| Running { call: call.clone(), stage: Stage::Ahead }).collect();
        calls[0].comm.in_flight.fetch_add(1, SeqCst);
        Together { running, begun: false }
    }
    fn comm(&self) -> &Comm {
        &self.running[0].call.comm
    }
    /// One step of a stream.
    pub fn step(&mut self, memory: &mut Memory) -> Result<Outcome> {
        if self.comm().aborted() {
            self.comm().turn.store(false, SeqCst);
            return Ok(Outcome::Done);
        }
        if !self.begun {
            if self.comm().turn.swap(true, SeqCst) {
                return Ok(Outcome::Waits); // another stream's operation of the same communicator is under way
            }
            self.begun = true;
        }
        let before = self.over();
        for running in &mut self.running {
            running.step(memory)?;
        }
        Ok(match self.over() {
            all if all == self.running.len() => {
                self.comm().turn.store(false, SeqCst);
                Outcome::Done
            }
            more if more > before => Outcome::Moved,
            _ => Outcome::Waits,
        })
    }
    fn over(&self) -> usize {
        self.running.iter().filter(|running| running.stage == Stage::Over).count()
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        self.comm().in_flight.fetch_sub(1, SeqCst);
    }
}

impl Running {
    fn step(&mut self, memory: &mut Memory) -> Result {
        let Call { comm, what, source, target, count, dtype } = self.call.clone();
        let width = sums::size(dtype).unwrap_or(0);
        match (what, self.stage) {
            (_, Stage::Over) => {}
            (What::Collective { operation, reduction, root }, Stage::Ahead) => {
                let (rank, size) = comm.seat().map_or((0, 1), |seat| (seat.rank, seat.size));
                let (given, _) = operation.elements(count, size);
                let gives = operation != Operation::Broadcast || root == rank as u64;
                let body = if gives { memory.read(source, given * width)?.to_vec() } else { Vec::new() };
                let words = [operation as u64, dtype, reduction, root, count as u64];
                self.stage = Stage::Asked(comm.tell(Kind::Part, words, body));
            }
            (What::Collective { .. }, Stage::Asked(number)) => {
                if let Some(frame) = comm.answer(number) {
                    match frame.kind {
                        Kind::Done => {
                            memory.write(target, frame.body.len())?.copy_from_slice(&frame.body);
                            self.stage = Stage::Over;
                        }
                        _ => comm.fail(frame.words[0] as i32, &String::from_utf8_lossy(&frame.body)),
                    }
                }
            }
            (What::Send { to }, _) => {
                let words = [to as u64, comm.nth(true, to), dtype, count as u64, 0];
                let body = memory.read(source, count * width)?.to_vec();
                if let Some(seat) = comm.seat() {
                    let _ = seat.link.send(&Frame::new(Kind::Post, seat.id, 0, words, body));
                }
                self.stage = Stage::Over;
            }
            (What::Receive { from }, Stage::Ahead) => self.stage = Stage::Asked(comm.nth(false, from)),
            (What::Receive { from }, Stage::Asked(nth)) => {
                let mail = comm.seat().and_then(|seat| seat.link.mail(seat.id, from as u64, nth));
                match mail {
                    Some(frame) if frame.words[2..4] == [dtype, count as u64] => {
                        memory.write(target, frame.body.len())?.copy_from_slice(&frame.body);
                        self.stage = Stage::Over;
                    }
                    Some(frame) => {
                        let [sent_dtype, sent] = [frame.words[2], frame.words[3]];
                        let why = format!(
                            "ranks disagree: rank {from} sends {sent} elements of dtype {sent_dtype}, received as {count} of {dtype}"
                        );
                        comm.fail(INVALID_USAGE, &why);
                    }
                    None => {}
                }
            }
        }
        Ok(())
    }
}
