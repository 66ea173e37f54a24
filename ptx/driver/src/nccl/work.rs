//! NCCL operations as streams run them: started when the stream reaches them, finished when the hub has answered, with
//! no thread waiting. A failed operation stays pending, like the real library's kernel, until its communicator is
//! aborted.
use super::code::INVALID_USAGE;
use super::comm::NcclComm;
use super::sums::{self, NcclOperation};
use super::wire::{Frame, FrameKind};
use crate::{CuResult, DriverMemory, NodeProgress};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

#[derive(Clone, Copy, Debug)]
pub enum NcclCallKind {
    Collective { operation: NcclOperation, reduction: u64, root: u64 },
    Send { to: usize },
    Receive { from: usize },
}

/// One call with checked arguments.
#[derive(Clone)]
pub struct NcclCall {
    pub comm: Arc<NcclComm>,
    pub what: NcclCallKind,
    pub source: u64,
    pub target: u64,
    pub count: usize,
    pub dtype: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum CallStage {
    Ahead,
    Asked(u64),
    Over,
}

/// A call in flight.
struct Running {
    call: NcclCall,
    stage: CallStage,
}

/// Calls that run together: those between ncclGroupStart and ncclGroupEnd, or one.
pub struct CallGroup {
    running: Vec<Running>,
    begun: bool,
}

impl CallGroup {
    pub fn new(calls: &[NcclCall]) -> CallGroup {
        let running = calls.iter().map(|call| Running { call: call.clone(), stage: CallStage::Ahead }).collect();
        calls[0].comm.in_flight.fetch_add(1, SeqCst);
        CallGroup { running, begun: false }
    }
    fn comm(&self) -> &NcclComm {
        &self.running[0].call.comm
    }
    /// One step of a stream.
    pub fn step(&mut self, memory: &mut DriverMemory) -> CuResult<NodeProgress> {
        if self.comm().aborted() {
            self.comm().running.store(false, SeqCst);
            return Ok(NodeProgress::Done);
        }
        if !self.begun {
            if self.comm().running.swap(true, SeqCst) {
                return Ok(NodeProgress::Waits); // another stream's operation of the same communicator is in flight
            }
            self.begun = true;
        }
        let before = self.over();
        for running in &mut self.running {
            running.step(memory)?;
        }
        Ok(match self.over() {
            all if all == self.running.len() => {
                self.comm().running.store(false, SeqCst);
                NodeProgress::Done
            }
            more if more > before => NodeProgress::Moved,
            _ => NodeProgress::Waits,
        })
    }
    fn over(&self) -> usize {
        self.running.iter().filter(|running| running.stage == CallStage::Over).count()
    }
}

impl Drop for CallGroup {
    fn drop(&mut self) {
        self.comm().in_flight.fetch_sub(1, SeqCst);
    }
}

impl Running {
    fn step(&mut self, memory: &mut DriverMemory) -> CuResult {
        let NcclCall { comm, what, source, target, count, dtype } = self.call.clone();
        let width = sums::size(dtype).unwrap_or(0);
        match (what, self.stage) {
            (_, CallStage::Over) => {}
            (NcclCallKind::Collective { operation, reduction, root }, CallStage::Ahead) => {
                let (rank, size) = comm.seat().map_or((0, 1), |seat| (seat.rank, seat.size));
                let (given, _) = operation.elements(count, size);
                let gives = operation != NcclOperation::Broadcast || root == rank as u64;
                let body = if gives { memory.read(source, given * width)?.to_vec() } else { Vec::new() };
                let words = [operation as u64, dtype, reduction, root, count as u64];
                self.stage = CallStage::Asked(comm.request(FrameKind::Part, words, body));
            }
            (NcclCallKind::Collective { .. }, CallStage::Asked(number)) => {
                if let Some(frame) = comm.answer(number) {
                    match frame.kind {
                        FrameKind::Done => {
                            memory.write(target, frame.body.len())?.copy_from_slice(&frame.body);
                            self.stage = CallStage::Over;
                        }
                        _ => comm.fail(frame.words[0] as i32, &String::from_utf8_lossy(&frame.body)),
                    }
                }
            }
            (NcclCallKind::Send { to }, _) => {
                let words = [to as u64, comm.nth(true, to), dtype, count as u64, 0];
                let body = memory.read(source, count * width)?.to_vec();
                if let Some(seat) = comm.seat() {
                    let _ = seat.link.send(&Frame::new(FrameKind::Post, seat.id, 0, words, body));
                }
                self.stage = CallStage::Over;
            }
            (NcclCallKind::Receive { from }, CallStage::Ahead) => self.stage = CallStage::Asked(comm.nth(false, from)),
            (NcclCallKind::Receive { from }, CallStage::Asked(nth)) => {
                let mail = comm.seat().and_then(|seat| seat.link.mail(seat.id, from as u64, nth));
                match mail {
                    Some(frame) if frame.words[2..4] == [dtype, count as u64] => {
                        memory.write(target, frame.body.len())?.copy_from_slice(&frame.body);
                        self.stage = CallStage::Over;
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
