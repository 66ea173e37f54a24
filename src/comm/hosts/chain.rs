//! Sums over several hosts with the same bits as on one: strictly in rank order, `((g0 + g1) + g2) + ...`, in f32 (f64
//! for f64), rounded once. Never changes the order for speed.
//!
//! [Note: chain] Ranks are numbered host by host, so the sum of a shard is a chain of hosts: a rank of the first one
//! adds its host's operands, read in place, and sends the partial sum to its column on the next, which goes on adding;
//! the last host sends the result to the owner. Every column does that for the shards of its own ranks. The work is
//! divided into *tasks* (a chunk of one owner's shard), so that all hosts work at the same time: in iteration i, host h
//! sums task i while it sends task i - 1, receives task i and, if it owns task i - r, receives that result. r = H - h:
//! the last of H hosts begins H - 1 - h iterations after h, and sends its sum one iteration later. So whatever a rank
//! waits for in an iteration was sent by iterations that do not wait for it.
//!
//! For two hosts that is two shards forward and one shard back, all concurrently. Rings that add in another order would
//! send one shard less, but then two hosts would train different weights from one.
use super::job::HostsJob;
use super::post::Post;
use super::steps::copy;
use super::wire::Move;
use crate::base::{DType, Result};
use crate::device::cpu::simd::Level;
use crate::device::cpu::sum::{Fold, Sources};
use std::ops::Range;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Elements per task.
const CHUNK: usize = 64 << 10;

/// Buffers for partial sums: one received and added to, one being sent, one complete. Allocated by a group's first
/// reduction.
#[derive(Default)]
pub(super) struct ChainScratch([Vec<u64>; 3]);

impl ChainScratch {
    /// Three parts with room for a chunk of f64 each.
    fn parts(&mut self) -> [*mut u8; 3] {
        self.0.each_mut().map(|part| {
            part.resize(CHUNK, 0);
            part.as_mut_ptr().cast()
        })
    }
}

/// Operands of one reduction: the shards of this column's ranks, one per host.
struct ColumnShards<'a> {
    /// The operands of this host's ranks.
    sources: Sources,
    /// Range of the operands that is the shard of the rank on host `d`.
    range: &'a dyn Fn(usize) -> Range<usize>,
    /// Output for this rank's own shard.
    dst: *mut u8,
}

fn fold(job: &HostsJob, from: DType, into: DType, accumulate: bool) -> Fold {
    Fold { level: Level::best(), from, into, op: job.reduce, accumulate }
}

/// # Safety
/// Operands and `dst` are valid and lent. Nobody else writes to the operands' shards meanwhile; this rank writes only
/// its own `dst`.
/// its own `dst`.
unsafe fn chain(post: &mut Post, job: &HostsJob, scratch: &mut ChainScratch, shards: ColumnShards) -> Result<()> {
    let (hosts, here, columns) = (post.places.hosts, post.places.host(), post.places.columns);
    let wide = if job.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let last = here + 1 == hosts;
    let longest = (0..hosts).map(|d| (shards.range)(d).len()).max().unwrap_or(0);
    let each = longest.div_ceil(CHUNK);
    // Owner and elements of a task. The last task of a shorter shard may be empty, and then sends no message.
    let task = |i: usize| {
        let (owner, range) = (i / each, (shards.range)(i / each));
        let start = (range.start + i % each * CHUNK).min(range.end);
        (owner, start..(start + CHUNK).min(range.end))
    };
    let tasks = each * hosts;
    let lag = hosts - here;
    let [mut sum, mut sent, whole] = scratch.parts();
    // SAFETY: scratch has room for a chunk; ranges are within the operands; `dst` holds this host's shard.
    unsafe {
        let read = |at: *mut u8, range: &Range<usize>| from_raw_parts(at.cast_const(), range.len() * wide.size());
        let write = |at: *mut u8, range: &Range<usize>| from_raw_parts_mut(at, range.len() * wide.size());
        let keep = |from: *mut u8, range: &Range<usize>| {
            let at = (range.start - (shards.range)(here).start) * job.into.size();
            let fold = fold(job, wide, job.into, job.accumulate);
            fold.run(shards.dst.add(at), Sources::new(from, 0), 1, range.len());
        };
        for i in 0..tasks + if last { 1 } else { lag } {
            let receives = Some(i).filter(|&i| here > 0 && i < tasks).map(task);
            let sends = i.checked_sub(1).filter(|&i| i < tasks).map(task).filter(|(owner, _)| !last || *owner != here);
            let gets = i.checked_sub(lag).filter(|&i| !last && i < tasks).map(task).filter(|(owner, _)| *owner == here);
            let none = 0..0;
            let next = |owner: usize| post.places.across(if last { owner } else { here + 1 });
            let moves = [
                sends
                    .as_ref()
                    .map_or(Move::send(post.places.me, &[]), |(to, range)| Move::send(next(*to), read(sent, range))),
                Move::recv(
                    post.places.across(here.saturating_sub(1)),
                    write(sum, receives.as_ref().map_or(&none, |(_, range)| range)),
                ),
                Move::recv(
                    post.places.across(hosts - 1),
                    write(whole, gets.as_ref().map_or(&none, |(_, range)| range)),
                ),
            ];
            post.exchange(job.kind, job.tag, moves)?;
            if let Some((_, range)) = &gets {
                keep(whole, range);
            }
            if i < tasks {
                let (owner, range) = task(i);
                let before = if here > 0 { sum.cast_const() } else { std::ptr::null() };
                let operands = shards.sources.offset(range.start * job.dtype.size());
                fold(job, job.dtype, wide, false).go_on(sum, before, operands, columns, range.len());
                if last && owner == here {
                    keep(sum, &range);
                }
                std::mem::swap(&mut sum, &mut sent);
            }
        }
    }
    Ok(())
}

/// `complete` is called when this rank has its shard; peers may still be reading its input.
pub(super) fn reduce_scatter(
    post: &mut Post,
    job: &HostsJob,
    scratch: &mut ChainScratch,
    complete: &mut dyn FnMut(&Post),
) -> Result<()> {
    post.agree(job.kind, job.tag, &job.desc)?;
    let (columns, column, ranks) = (post.places.columns, post.places.column(), post.places.size());
    let shard = |host: usize, len: usize| {
        let start = (host * columns + column) * len;
        start..start + len
    };
    if let Some(sources) = job.there {
        let range = |host| shard(host, job.len);
        // SAFETY: all ranks are here, so their inputs are; they stay until the meeting below.
        unsafe { chain(post, job, scratch, ColumnShards { sources, range: &range, dst: job.dst }) }?;
        complete(post);
        return post.meet(job.kind, job.tag, &job.desc);
    }
    let (stages, room) = post.stages();
    let size = job.dtype.size();
    let piece = (room / ranks / size) & !63;
    for at in (0..job.len).step_by(piece) {
        let n = piece.min(job.len - at);
        let range = |host| shard(host, n);
        // SAFETY: the own stage has room for a piece of each shard, and peers have left it; the rest as above.
        unsafe {
            for rank in 0..ranks {
                let mine = stages.of(column).cast_mut().add(rank * n * size);
                copy(job.src.add((rank * job.len + at) * size), mine, n * size);
            }
            post.meet(job.kind, job.tag, &job.desc)?;
            let dst = job.dst.add(at * job.into.size());
            chain(post, job, scratch, ColumnShards { sources: stages, range: &range, dst })?;
        }
        post.meet(job.kind, job.tag, &job.desc)?;
    }
    complete(post);
    Ok(())
}

/// Reduce-scatters the column's slice of the buffer, then gathers it between hosts and inside them.
pub(super) fn all_reduce(post: &mut Post, job: &HostsJob, scratch: &mut ChainScratch) -> Result<()> {
    post.agree(job.kind, job.tag, &job.desc)?;
    let size = job.dtype.size();
    if let Some(sources) = job.there {
        // SAFETY: all ranks are here; the buffers are lent, and peers write to their own slices only.
        return unsafe { all_reduce_in(post, job, scratch, sources, job.dst, job.len) };
    }
    let (stages, room) = post.stages();
    for at in (0..job.len).step_by(room / size) {
        let n = (room / size).min(job.len - at);
        // SAFETY: the own stage has room for n elements and peers have left it.
        unsafe {
            let (mine, out) = (stages.of(post.places.column()).cast_mut(), job.dst.add(at * size));
            copy(out, mine, n * size);
            post.meet(job.kind, job.tag, &job.desc)?;
            all_reduce_in(post, job, scratch, stages, out, n)?;
        }
    }
    Ok(())
}

/// # Safety
/// As for [`chain`]. Reduced slices are written to `sources` too, and the complete result to `out`.
unsafe fn all_reduce_in(
    post: &mut Post,
    job: &HostsJob,
    scratch: &mut ChainScratch,
    sources: Sources,
    out: *mut u8,
    len: usize,
) -> Result<()> {
    let (size, hosts, columns) = (job.dtype.size(), post.places.hosts, post.places.columns);
    let (column, here) = (post.places.column(), post.places.host());
    let slice = |column| part(0..len, column, columns, size);
    let range = |host| part(slice(column), host, hosts, size);
    let mine = sources.of(column).cast_mut();
    // SAFETY: ranges are within the buffers. Each rank writes its own buffer's slice, which no other rank reads before
    // the meeting, and `out`, which no other rank uses.
    unsafe {
        let dst = mine.add(range(here).start * size);
        chain(post, job, scratch, ColumnShards { sources, range: &range, dst })?;
        for (to, from) in post.places.rounds() {
            let theirs = from_raw_parts_mut(mine.add(range(from).start * size), range(from).len() * size);
            let done = from_raw_parts(mine.add(range(here).start * size), range(here).len() * size);
            let (to, from) = (post.places.across(to), post.places.across(from));
            post.exchange(job.kind, job.tag, [Move::send(to, done), Move::recv(from, theirs)])?;
        }
        post.meet(job.kind, job.tag, &job.desc)?;
        for column in 0..columns {
            let slice = slice(column);
            copy(sources.of(column).add(slice.start * size), out.add(slice.start * size), slice.len() * size);
        }
    }
    post.meet(job.kind, job.tag, &job.desc)
}

/// The `i`th of `n` parts of a range: whole cache lines, all equal except the last ones.
fn part(range: Range<usize>, i: usize, n: usize, size: usize) -> Range<usize> {
    let each = range.len().div_ceil(n).next_multiple_of(64 / size);
    let at = |i: usize| (range.start + i * each).min(range.end);
    at(i)..at(i + 1)
}
