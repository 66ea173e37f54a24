//! The transport of GPU groups over IPC: the ranks' memory, mapped, and the rounds in which they exchange it; see
//! [Note: rounds]. Never waits for a GPU, except at its end.
use super::pass::{DeviceBytes, HALF, HandOver, IpcPass};
use crate::base::meter::Lease;
use crate::base::{Category, DType, Error, Meter, Result};
use crate::comm::nccl::transport::{Transport, TransportCall};
use crate::comm::nccl::work::{PairRanges, Work};
use crate::comm::operands::CheckedCall;
use crate::comm::seam::Seam;
use crate::comm::shm::{Desc, PairParts, ShmGroup};
use crate::comm::{Collective, CommUse, Reduce, Tag};
use crate::device::gpu::Arg;
use crate::device::gpu::cuda::{Cuda, IPC_HANDLE, ImportedMemory, RankSum, StreamWords};
use crate::device::gpu::driver::Driver;
use crate::device::{Buf, ViewMut};
use cudarc::driver::{CudaStream, DriverError};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long this rank waits at its end: for its own stream after an abort, otherwise for the last rank to leave.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between aborts in that time.
const REST: Duration = Duration::from_micros(100);
/// Rounds by which an abort is ahead of all others: words are compared modulo 2^32.
const BEYOND: u32 = 1 << 30;

pub struct IpcLink {
    /// Peers' stages, by rank. Closed before their owners free them.
    peers: Vec<Option<ImportedMemory>>,
    /// The ranks' hosts: meetings, failures.
    control: Arc<ShmGroup>,
    /// For each writer and reader, the rounds that the writer has handed over.
    words: StreamWords,
    /// u8 (2 halves), which the peers map. Freed only if they have closed it.
    stage: ManuallyDrop<Buf>,
    /// u8: the parts that are summed.
    parts: Buf,
    /// f32 (1), in shared memory: the most rounds that a rank needs.
    most: Mutex<Buf>,
    cuda: Arc<Cuda>,
    /// The group's, of which operations are enqueued.
    stream: Arc<CudaStream>,
    /// World ranks, and this one's index.
    ranks: Vec<usize>,
    me: usize,
    /// Rounds begun.
    begun: AtomicU32,
    /// One operation at a time.
    turn: Mutex<()>,
    failed: OnceLock<String>,
}

fn exchange(control: &ShmGroup, mine: [u8; IPC_HANDLE]) -> Result<Vec<[u8; IPC_HANDLE]>> {
    let tag = Tag::new("memory handles", 0);
    let mut own = control.alloc(DType::U8, IPC_HANDLE, CommUse::Reduced, Category::Other)?;
    let mut all = control.alloc(DType::U8, IPC_HANDLE * control.size(), CommUse::Gathered, Category::Other)?;
    own.view_mut().host_bytes_mut("memory handles")?.copy_from_slice(&mine);
    let ticket = control.all_gather(tag, own.view(), all.view_mut())?;
    control.wait(ticket)?;
    let handles = all.view().host_bytes("memory handles")?.as_chunks().0.to_vec();
    control.release(ticket)?;
    Ok(handles)
}

impl IpcLink {
    /// Every rank of the group calls it. `ranks`: world ranks.
    pub(in crate::comm) fn join(
        control: Arc<ShmGroup>,
        cuda: Arc<Cuda>,
        stream: Arc<CudaStream>,
        meter: &Meter,
        ranks: Vec<usize>,
    ) -> Result<IpcLink> {
        let (me, size) = (control.rank(), control.size());
        let alloc = |bytes| cuda.alloc(DType::U8, bytes, Category::Other, meter.lease(Category::Other, bytes));
        let (stage, parts) = (alloc(2 * HALF)?, alloc(HALF)?);
        let words = cuda.share_words(control.alloc(DType::U32, size * size, CommUse::Gathered, Category::Other)?)?;
        let most = Mutex::new(control.alloc(DType::F32, 1, CommUse::Reduced, Category::Other)?);
        let (peers, stage) = (Vec::new(), ManuallyDrop::new(stage));
        let (begun, turn, failed) = (AtomicU32::new(0), Mutex::new(()), OnceLock::new());
        let mut link =
            IpcLink { peers, control, words, stage, parts, most, cuda, stream, ranks, me, begun, turn, failed };
        // From here on peers may have mapped the stage: if this fails, `drop` does not free it.
        match link.import() {
            Ok(peers) => link.peers = peers,
            Err(e) => {
                let _ = link.failed.set(e.to_string());
                return Err(e);
            }
        }
        Ok(link)
    }
    fn import(&self) -> Result<Vec<Option<ImportedMemory>>> {
        // A peer's memory cannot be read before it exists: it is zeroed in the order of its compute stream.
        self.cuda.synchronize()?;
        let handles = exchange(&self.control, self.cuda.export(&self.stage)?)?;
        let open = |peer: usize| match peer == self.me {
            true => Ok(None),
            false => self.cuda.import(handles[peer], 2 * HALF).map(Some).map_err(|e| {
                Error::Run(format!(
                    "rank {}: the GPU cannot map the memory of rank {}'s ({}): without peer access between the two, \
                     use `comm: nccl`",
                    self.ranks[self.me],
                    self.ranks[peer],
                    self.cuda.failed("open memory of another process", e)
                ))
            }),
        };
        (0..self.size()).map(open).collect()
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }
    /// The other ranks, the next one first, so that not all read from the same.
    fn others(&self) -> impl Iterator<Item = usize> {
        let (me, size) = (self.me, self.size());
        (1..size).map(move |by| (me + by) % size)
    }
    fn word(&self, writer: usize, reader: usize) -> usize {
        writer * self.size() + reader
    }
    fn driver(&self, done: std::result::Result<(), DriverError>) -> Result<()> {
        done.map_err(|e| self.cuda.failed("order streams of several processes", e))
    }
    /// Writes for all readers that this rank has handed over its part of the round.
    fn publish(&self, stream: &CudaStream, round: u32) -> Result<()> {
        self.others().try_for_each(|reader| self.driver(self.words.write(stream, self.word(self.me, reader), round)))
    }
    fn await_peer(&self, stream: &CudaStream, peer: usize, round: u32) -> Result<()> {
        self.driver(self.words.wait(stream, self.word(peer, self.me), round))
    }
    fn copy(&self, stream: &CudaStream, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: operands were checked and are kept, and parts of stages are asserted to be within them, which live
        // until all ranks have parted.
        unsafe { self.cuda.copy_on(stream, to, from, bytes) }
    }

    /// All rounds of a pass: `meet` is the meeting of the hosts, and `sum` the sum of the bytes from `start`.
    fn run(
        &self,
        stream: &CudaStream,
        pass: &IpcPass,
        rounds: usize,
        meet: &dyn Fn(usize) -> Result<()>,
        sum: &mut dyn FnMut(usize, usize) -> Result<()>,
    ) -> Result<()> {
        let (step, me) = (pass.step(), self.me);
        for done in 0..rounds {
            let round = self.begun.fetch_add(1, SeqCst).wrapping_add(1);
            let (half, start) = ((round % 2) as usize * HALF, done * step);
            let own = self.stage.view().address() as u64 + half as u64;
            // What this rank takes of each one's part.
            let target = |rank: usize| {
                let piece = pass.got[rank].cut(start, step);
                match pass.sums {
                    true => DeviceBytes { at: self.parts.view().address() as u64 + (rank * step) as u64, ..piece },
                    false => piece,
                }
            };
            match &pass.given {
                HandOver::One(piece) => {
                    let piece = piece.cut(start, step);
                    self.copy(stream, own, piece.at, piece.bytes)?;
                }
                HandOver::Each(pieces) => {
                    for reader in self.others() {
                        let piece = pieces[reader].cut(start, step);
                        self.copy(stream, own + pass.offset(reader) as u64, piece.at, piece.bytes)?;
                    }
                }
            }
            let mine = target(me);
            self.copy(stream, mine.at, pass.given_to(me).cut(start, step).at, mine.bytes)?;
            self.publish(stream, round)?;
            meet(done)?;
            for peer in self.others() {
                self.await_peer(stream, peer, round)?;
                let piece = target(peer);
                if let Some(memory) = self.peers[peer].as_ref().filter(|_| piece.bytes > 0) {
                    self.copy(stream, piece.at, memory.part(half + pass.offset(me), piece.bytes), piece.bytes)?;
                }
            }
            // Other ranks' parts may take more rounds.
            if pass.sums && mine.bytes > 0 {
                sum(start, mine.bytes)?;
            }
        }
        Ok(())
    }

    /// The most rounds that any rank needs, where they differ.
    fn agree(&self, tag: Tag, rounds: usize) -> Result<usize> {
        let mut most = self.most.lock().unwrap_or_else(PoisonError::into_inner);
        most.view_mut().host::<f32>("rounds")?[0] = rounds as f32;
        let ticket = self.control.all_reduce(tag, most.view_mut(), Reduce::Max)?;
        self.control.wait(ticket)?;
        Ok(most.view().host::<f32>("rounds")?[0] as usize)
    }

    fn sum_into(
        &self,
        stream: &CudaStream,
        (from, add, largest): (DType, bool, bool),
        target: &mut ViewMut,
        (start, bytes): (usize, usize),
    ) -> Result<()> {
        let range = start / from.size()..(start + bytes) / from.size();
        let sum = RankSum { ranks: self.size(), stride: IpcPass::cell(self.size()), from, add, largest };
        self.cuda.sum_ranks_on(stream, sum, self.parts.view(), target.reborrow().slice(range))
    }

    fn enqueue_in_turn(
        &self,
        call: CheckedCall,
        work: Work,
        pairs: &[PairRanges],
        operands: &mut [Arg],
        stream: &CudaStream,
    ) -> Result<()> {
        let (size, me, tag) = (self.size(), self.me, call.tag);
        let ((first, dtype), (second, _)) = (DeviceBytes::of(operands.first()), DeviceBytes::of(operands.get(1)));
        let meet_as = |kind: Seam, desc: Desc| move |_: usize| self.control.meet(kind, tag, desc);
        let no_sum = &mut |_: usize, _: usize| Ok(());
        let all = |piece: &dyn Fn(usize) -> DeviceBytes| (0..size).map(piece).collect::<Vec<DeviceBytes>>();
        let only =
            |from: usize, piece: DeviceBytes| all(&|rank| if rank == from { piece } else { DeviceBytes::default() });
        match work {
            Work::Gather => {
                let at = |rank| DeviceBytes { at: second.at + (rank * first.bytes) as u64, ..first };
                let pass = IpcPass { given: HandOver::One(first), got: all(&at), sums: false };
                let desc = Desc::new(Seam::AllGather, tag, dtype, first.bytes / dtype.size());
                self.run(stream, &pass, pass.rounds(), &meet_as(Seam::AllGather, desc), no_sum)
            }
            Work::Scatter { add } => {
                let Some(Arg::InOut(shard)) = operands.get_mut(1) else { return Err(call.error("has no shard")) };
                let bytes = first.bytes / size;
                let to = |rank| first.cut(rank * bytes, bytes);
                let pass = IpcPass { given: HandOver::Each(all(&to)), got: all(&|_| to(me)), sums: true };
                let desc = Desc::new(Seam::ReduceScatter, tag, dtype, shard.len());
                let mut sum = |start, bytes| self.sum_into(stream, (dtype, add, false), shard, (start, bytes));
                self.run(stream, &pass, pass.rounds(), &meet_as(Seam::ReduceScatter, desc), &mut sum)
            }
            Work::Reduce(op) => {
                let Some(Arg::InOut(buf)) = operands.first_mut() else { return Err(call.error("has no buffer")) };
                let mut desc = Desc::new(Seam::AllReduce, tag, dtype, buf.len());
                desc.arg = op as u8;
                let (meet, how) = (meet_as(Seam::AllReduce, desc), (dtype, false, op == Reduce::Max));
                // Short ones are summed by everybody, in one round.
                if first.bytes <= IpcPass::cell(size) {
                    let pass = IpcPass { given: HandOver::One(first), got: vec![first; size], sums: true };
                    let mut sum = |start, bytes| self.sum_into(stream, how, buf, (start, bytes));
                    return self.run(stream, &pass, 1, &meet, &mut sum);
                }
                let slice = |rank| first.slice(rank, size);
                let mine = (slice(me).at - first.at) as usize;
                let scatter = IpcPass { given: HandOver::Each(all(&slice)), got: vec![slice(me); size], sums: true };
                let mut sum = |start, bytes| self.sum_into(stream, how, buf, (mine + start, bytes));
                let longest = |pass: &IpcPass| slice(0).bytes.div_ceil(pass.step());
                self.run(stream, &scatter, longest(&scatter), &meet, &mut sum)?;
                let gather = IpcPass { given: HandOver::One(slice(me)), got: all(&slice), sums: false };
                self.run(stream, &gather, longest(&gather), &meet, no_sum)
            }
            Work::Broadcast { root } => {
                let root = root as usize;
                let given = HandOver::One(if root == me { first } else { DeviceBytes::default() });
                let pass = IpcPass { given, got: only(root, first), sums: false };
                let mut desc = Desc::new(Seam::Broadcast, tag, dtype, first.bytes / dtype.size());
                desc.to = root as u32;
                self.run(stream, &pass, pass.rounds(), &meet_as(Seam::Broadcast, desc), no_sum)
            }
            Work::SendRecv { to, from } => {
                let pass = IpcPass { given: HandOver::One(first), got: only(from as usize, second), sums: false };
                let mut desc = Desc::new(Seam::SendRecv, tag, dtype, first.bytes / dtype.size());
                (desc.to, desc.from, desc.recv_len) = (to, from, (second.bytes / dtype.size()) as u64);
                let rounds = self.agree(tag, pass.rounds())?;
                self.run(stream, &pass, rounds, &meet_as(Seam::SendRecv, desc), no_sum)
            }
            Work::AllToAll { .. } => {
                let width = dtype.size();
                let given = HandOver::Each(pairs.iter().map(|(send, _)| first.elements(send, width)).collect());
                let got = pairs.iter().map(|(_, recv)| second.elements(recv, width)).collect();
                let pass = IpcPass { given, got, sums: false };
                let parts: Vec<PairParts> = pairs.iter().map(|(send, recv)| PairParts::new(send, recv)).collect();
                let rounds = self.agree(tag, pass.rounds())?;
                let meet = |_| self.control.meet_pairs(tag, dtype, &parts);
                self.run(stream, &pass, rounds, &meet, no_sum)
            }
            Work::Wait { .. } => Ok(()),
        }
    }
}

impl Transport for IpcLink {
    fn alloc(
        &self,
        _: CheckedCall,
        (dtype, len): (DType, usize),
        category: Category,
        lease: Lease,
        _: &dyn Fn(bool) -> Result<bool>,
    ) -> Result<Buf> {
        self.cuda.alloc(dtype, len, category, lease)
    }
    fn enqueue(&self, asked: TransportCall, operands: &mut [Arg], stream: &Arc<CudaStream>) -> Result<()> {
        let TransportCall { call, work, pairs } = asked;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(why) = self.failed.get() {
            return Err(call.error(why.clone()));
        }
        self.enqueue_in_turn(call, work, pairs, operands, stream).inspect_err(|e| {
            let _ = self.failed.set(e.to_string());
        })
    }
    fn failure(&self) -> Option<String> {
        self.failed.get().cloned()
    }
    /// Ranks that have not handed over what this rank waits for.
    fn missing(&self) -> Option<Vec<usize>> {
        let is_late = |peer: &usize| {
            let (mine, theirs) = (self.words.get(self.word(self.me, *peer)), self.words.get(self.word(*peer, self.me)));
            *peer != self.me && mine.wrapping_sub(theirs) as i32 > 0
        };
        let late: Vec<usize> = (0..self.size()).filter(is_late).map(|peer| self.control.world_rank(peer)).collect();
        (!late.is_empty()).then_some(late)
    }
    /// Passes this rank's waits, so that its streams come to their end. What they then hold is never used: the GPU is
    /// aborted first. A peer whose stream still runs may overwrite a word with an earlier round, so callers repeat it.
    fn abort(&self, why: &str) {
        let _ = self.failed.set(why.to_string());
        let beyond = self.begun.load(SeqCst).wrapping_add(BEYOND);
        for peer in self.others() {
            self.words.set(self.word(peer, self.me), beyond);
        }
    }
}

impl Drop for IpcLink {
    /// Peers may still read this rank's stage, so all ranks leave together: each has closed what it opened before any
    /// frees what it exported. If one does not come within a limit, nothing is freed before the process ends.
    fn drop(&mut self) {
        let begun = Instant::now();
        while self.failed.get().is_some() && !self.cuda.is_idle(&self.stream) && begun.elapsed() < EXIT_TIMEOUT {
            self.abort("its group has ended");
            std::thread::sleep(REST);
        }
        let _ = self.cuda.context().synchronize(); // failures were reported earlier
        self.peers.clear();
        if self.failed.get().is_none() && self.control.part(EXIT_TIMEOUT) {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.stage) };
        }
    }
}
