//! Operations over several hosts that move bytes unchanged: gathers, broadcasts, send/recv, all_to_all. Never sums.
//!
//! Each begins with a round of messages within the columns, then meets its own host: after that all ranks of the group
//! are known to have called the same operation.
use super::job::HostsJob;
use super::post::Post;
use super::wire::Move;
use crate::base::Result;
use crate::comm::shm::{Desc, Passed};
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Copies, unless source and destination are the same.
///
/// # Safety
/// Both are valid for `bytes`.
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if from != to.cast_const() {
        // SAFETY: upheld by the caller.
        unsafe { std::ptr::copy(from, to, bytes) };
    }
}

/// If all ranks of the host gather into one shared buffer, each writes its own shard and those of its column on the
/// other hosts. Any other buffer is filled in pieces from the first rank's stage, which is such a shared buffer.
pub(super) fn all_gather(post: &mut Post, job: &HostsJob) -> Result<()> {
    post.agree(job.kind, job.tag, &job.desc)?;
    let (bytes, ranks) = (job.bytes(), post.places.size());
    if job.there.is_some() {
        if let Some((buffer, content)) = &job.content {
            post.explain(post.local.vacated(job.kind, job.tag, buffer, *content))?;
        }
        // SAFETY: `dst` holds a shard of each rank. All ranks of the host have released it, and each writes only its
        // own column's shards.
        unsafe { gather(post, job, job.src, job.dst, bytes) }?;
        return post.meet(job.kind, job.tag, &job.desc);
    }
    let (stages, room) = post.stages();
    let piece = (room / ranks) & !63;
    for at in (0..bytes).step_by(piece) {
        let n = piece.min(bytes - at);
        let stage = stages.of(0).cast_mut();
        // SAFETY: the first rank's stage has room for a piece of each rank, and all ranks have left it (at the meeting
        // below, or at that of the previous operation). `src` and `dst` are lent.
        unsafe { gather(post, job, job.src.add(at), stage, n) }?;
        post.meet(job.kind, job.tag, &job.desc)?;
        for rank in 0..ranks {
            // SAFETY: as above; all pieces have arrived.
            unsafe { copy(stage.add(rank * n), job.dst.add(rank * bytes + at), n) };
        }
        post.meet(job.kind, job.tag, &job.desc)?;
    }
    Ok(())
}

/// Puts this rank's own shard of `bytes`, and its column's shards from the other hosts, in their places in `full`.
///
/// # Safety
/// `full` is valid for one shard per rank; nobody else touches this column's shards.
pub(super) unsafe fn gather(
    post: &mut Post,
    job: &HostsJob,
    shard: *const u8,
    full: *mut u8,
    bytes: usize,
) -> Result<()> {
    // SAFETY: upheld by the caller; shards do not overlap.
    unsafe {
        copy(shard, full.add(post.places.me * bytes), bytes);
        for (to, from) in post.places.rounds() {
            let (to, from) = (post.places.across(to), post.places.across(from));
            let theirs = from_raw_parts_mut(full.add(from * bytes), bytes);
            let mine = from_raw_parts(full.add(post.places.me * bytes), bytes);
            post.exchange(job.kind, job.tag, [Move::send(to, mine), Move::recv(from, theirs)])?;
        }
    }
    Ok(())
}

/// From the root to its column, and from there to the rest of each host.
pub(super) fn broadcast(post: &mut Post, job: &HostsJob) -> Result<()> {
    post.agree(job.kind, job.tag, &job.desc)?;
    let (root, bytes) = (job.desc.to as usize, job.bytes());
    let column = root % post.places.columns;
    if post.places.me == root {
        for (to, _) in post.places.rounds() {
            let to = post.places.across(to);
            // SAFETY: a lent buffer.
            let mine = unsafe { from_raw_parts(job.src, bytes) };
            post.exchange(job.kind, job.tag, [Move::send(to, mine)])?;
        }
    } else if post.places.column() == column && post.places.here(root).is_none() {
        // SAFETY: a lent buffer.
        let mine = unsafe { from_raw_parts_mut(job.dst, bytes) };
        post.exchange(job.kind, job.tag, [Move::recv(root, mine)])?;
    }
    // SAFETY: a lent buffer.
    post.explain(unsafe { post.local.spread(job.tag, job.dst, bytes, column) })
}

/// Pairs on one host use shared memory, other pairs the wire, both concurrently.
pub(super) fn send_recv(post: &mut Post, job: &mut HostsJob) -> Result<()> {
    let (to, from) = (job.desc.to as usize, job.desc.from as usize);
    let wanted = job.desc.recv_len as usize;
    let passed = Passed {
        dtype: job.dtype,
        send: post.places.here(to).map(|to| (job.src, job.len, to)),
        recv: post.places.here(from).map(|from| (job.dst, wanted, from)),
        keep: std::mem::take(&mut job.keep),
    };
    let (sends, receives) = (passed.send.is_none(), passed.recv.is_none());
    let keep = passed.keep.clone();
    let local = post.explain(post.local.pass(job.tag, passed))?;
    // Each pair first compares its calls, so that nothing unexpected is sent.
    let (mine, mut theirs) = (job.desc, job.desc);
    let said = if sends { bytemuck::bytes_of(&mine) } else { &[] };
    let heard = if receives { bytemuck::bytes_of_mut(&mut theirs) } else { &mut [] };
    post.exchange(job.kind, job.tag, [Move::send(to, said), Move::recv(from, heard)])?;
    if receives {
        post.compare(job.kind, job.tag, &mine, &theirs, from)?;
    }
    let size = job.dtype.size();
    // SAFETY: lent buffers, kept alive until the end.
    let moves = unsafe {
        [
            Move::send(to, if sends { from_raw_parts(job.src, job.bytes()) } else { &[] }),
            Move::recv(from, if receives { from_raw_parts_mut(job.dst, wanted * size) } else { &mut [] }),
        ]
    };
    post.exchange(job.kind, job.tag, moves)?;
    post.explain(post.local.finish(local))?;
    drop(keep);
    Ok(())
}

/// Ranks of the host use shared memory, others the wire, both concurrently. A part goes straight to its receiver, so
/// each byte crosses once, and every rank of a host carries its own. In each round all ranks send to different ones.
pub(super) fn all_to_all(post: &mut Post, job: &HostsJob) -> Result<()> {
    let (columns, column, size) = (post.places.columns, post.places.column(), job.dtype.size());
    let first = post.places.host() * columns;
    let (send, recv) = ((job.src, job.len), (job.dst, job.desc.recv_len as usize));
    let local = post.explain(post.local.trade(job.tag, job.dtype, send, recv, &job.pairs[first..first + columns]))?;
    for (to_host, from_host) in post.places.rounds() {
        for shift in 0..columns {
            let to = to_host * columns + (column + shift) % columns;
            let from = from_host * columns + (column + columns - shift) % columns;
            // Each pair first compares its calls, so that nothing unexpected is sent.
            let (said, mut heard) = (job.desc.toward(to, || job.pairs[to]), job.desc);
            let said = bytemuck::bytes_of(&said);
            post.exchange(
                job.kind,
                job.tag,
                [Move::send(to, said), Move::recv(from, bytemuck::bytes_of_mut(&mut heard))],
            )?;
            post.compare(job.kind, job.tag, &job.desc.toward(from, || job.pairs[from]), &heard, from)?;
            let [sent, got] = [job.pairs[to], job.pairs[from]];
            // SAFETY: lent buffers, kept alive by the job; the ranges have been checked to be within them.
            let moves = unsafe {
                let (out, into) = (job.src.add(sent.send_at as usize * size), job.dst.add(got.recv_at as usize * size));
                [
                    Move::send(to, from_raw_parts(out, sent.sends as usize * size)),
                    Move::recv(from, from_raw_parts_mut(into, got.recvs as usize * size)),
                ]
            };
            post.exchange(job.kind, job.tag, moves)?;
        }
    }
    post.explain(post.local.finish(local))
}

pub(super) fn barrier(post: &mut Post, job: &HostsJob) -> Result<()> {
    let desc: &Desc = &job.desc;
    post.agree(job.kind, job.tag, desc)
}
