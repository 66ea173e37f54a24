//! The same operations by a group of GPUs and by a shared-memory group, over verbs, dtypes, sizes and uneven parts:
//! their results must have the same bits. Never measures speed.
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Error, Meter, Result};
use flatshard::comm::env::RankEnv;
use flatshard::comm::shm::{ShmGroup, ShmOptions, ShmWorld};
use flatshard::comm::{Axis, Collective, CommUse, Reduce, Tag, Ticket};
use flatshard::device::{Buf, Device};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

const T: Tag = Tag::new("twins", 0);
/// Shorter and longer than vectors, warps and aligned pieces; the last takes several rounds in f32.
const LENS: [usize; 5] = [1, 3, 257, 4099, 400_003];

/// Equal contents for both groups.
struct Twin {
    gpu: Buf,
    cpu: Buf,
}

struct Twins<'a> {
    gpu: &'a dyn Collective,
    device: &'a dyn Device,
    cpu: Arc<ShmGroup>,
    compared: usize,
    made: u64,
}

/// Values of very different sizes, so that the order of a sum shows in its last bits.
fn values(dtype: DType, rng: &Rng, len: usize) -> Vec<u8> {
    let mut values = vec![0.0; len];
    rng.normals(0, &mut values);
    for (i, value) in values.iter_mut().enumerate() {
        *value *= [1.0, 3e3, -7e-4][i % 3];
    }
    match dtype {
        DType::F64 => written(&values, |value| (f64::from(value) * 1.000_000_001).to_le_bytes()),
        DType::Bf16 => written(&values, |value| half::bf16::from_f32(value).to_le_bytes()),
        DType::F16 => written(&values, |value| half::f16::from_f32(value).to_le_bytes()),
        DType::U8 => written(&values, |value| [value.to_bits() as u8]),
        _ => written(&values, f32::to_le_bytes),
    }
}
fn written<const N: usize>(values: &[f32], bytes: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
    let mut all = vec![0; values.len() * N];
    for (to, &value) in all.as_chunks_mut().0.iter_mut().zip(values) {
        *to = bytes(value);
    }
    all
}

impl Twins<'_> {
    fn make(&mut self, dtype: DType, len: usize) -> Result<Twin> {
        self.made += 1;
        let bytes = values(dtype, &Rng::new(self.made, self.gpu.rank() as u64), len);
        let mut gpu = self.device.alloc(dtype, len, Category::Other)?;
        let mut cpu = self.cpu.alloc(dtype, len, CommUse::Reduced, Category::Other)?;
        self.device.upload(&bytes, gpu.view_mut())?;
        cpu.view_mut().host_bytes_mut("twins")?.copy_from_slice(&bytes);
        Ok(Twin { gpu, cpu })
    }
    fn finish(&self, [gpu, cpu]: [Ticket; 2]) -> Result<()> {
        for (group, ticket) in [(self.gpu, gpu), (&*self.cpu as &dyn Collective, cpu)] {
            group.wait(ticket)?;
            group.release(ticket)?;
            group.wait_sent(ticket)?;
        }
        Ok(())
    }
    fn compare(&mut self, what: String, twin: &Twin) -> Result<()> {
        let want = twin.cpu.view().host_bytes("twins")?;
        let mut got = vec![0; want.len()];
        self.device.download(twin.gpu.view(), &mut got)?;
        self.compared += 1;
        if got == want {
            return Ok(());
        }
        let at = got.iter().zip(want).position(|(a, b)| a != b).unwrap_or_default();
        let (rank, size) = (self.gpu.rank(), twin.gpu.dtype().size());
        let what = format!("rank {rank}: {what}: element {} has other bits than in shared memory", at / size);
        Err(Error::Run(what))
    }

    fn sums(&mut self, dtype: DType, len: usize) -> Result<()> {
        let n = self.gpu.size();
        for op in [Reduce::Sum, Reduce::Max] {
            let mut x = self.make(dtype, len)?;
            let gpu = self.gpu.all_reduce(T, x.gpu.view_mut(), op)?;
            self.finish([gpu, self.cpu.all_reduce(T, x.cpu.view_mut(), op)?])?;
            self.compare(format!("all_reduce of {len} {dtype}, {op:?}"), &x)?;
        }
        let into = if dtype == DType::F64 { &[][..] } else { &[dtype, DType::F32] };
        for (to, add) in into.iter().flat_map(|to| [(*to, false), (*to, true)]) {
            let (mut full, mut shard) = (self.make(dtype, n * len)?, self.make(to, len)?);
            let gpu = self.gpu.reduce_scatter(T, full.gpu.view_mut(), shard.gpu.view_mut(), add)?;
            let cpu = self.cpu.reduce_scatter(T, full.cpu.view_mut(), shard.cpu.view_mut(), add)?;
            self.finish([gpu, cpu])?;
            self.compare(format!("reduce_scatter of {len} {dtype} to {to}, add {add}"), &shard)?;
        }
        Ok(())
    }

    fn copies(&mut self, dtype: DType, len: usize) -> Result<()> {
        let (n, me) = (self.gpu.size(), self.gpu.rank());
        let (shard, mut full) = (self.make(dtype, len)?, self.make(dtype, n * len)?);
        let gpu = self.gpu.all_gather(T, shard.gpu.view(), full.gpu.view_mut())?;
        self.finish([gpu, self.cpu.all_gather(T, shard.cpu.view(), full.cpu.view_mut())?])?;
        self.compare(format!("all_gather of {len} {dtype}"), &full)?;
        for root in 0..n {
            let mut x = self.make(dtype, len)?;
            let gpu = self.gpu.broadcast(T, x.gpu.view_mut(), root)?;
            self.finish([gpu, self.cpu.broadcast(T, x.cpu.view_mut(), root)?])?;
            self.compare(format!("broadcast of {len} {dtype} from {root}"), &x)?;
        }
        // Each pair's length differs.
        let (to, from) = ((me + 1) % n, (me + n - 1) % n);
        let (sent, mut got) = (self.make(dtype, len + 7 * n)?, self.make(dtype, len + 7 * n)?);
        let (out, into) = (0..len + 7 * me, 7 * (n - from)..len + 7 * n);
        let (x, y) = (sent.gpu.view().slice(out.clone()), got.gpu.view_mut().slice(into.clone()));
        let gpu = self.gpu.send_recv(T, to, x, from, y)?;
        let (x, y) = (sent.cpu.view().slice(out), got.cpu.view_mut().slice(into));
        self.finish([gpu, self.cpu.send_recv(T, to, x, from, y)?])?;
        self.compare(format!("send_recv of {len} {dtype}"), &got)?;
        // Rank r sends len * (r + k) % 3 elements to rank k, from the end on. All ranks allocate the same.
        let parts = |count: &dyn Fn(usize) -> usize| {
            let mut end = 2 * n * len;
            let part = |r: usize| {
                end -= count(r);
                end..end + count(r)
            };
            (0..n).map(part).collect::<Vec<Range<usize>>>()
        };
        let count = |from: usize, to: usize| len * ((from + to) % 3);
        let (sends, recvs) = (parts(&|r| count(me, r)), parts(&|r| count(r, me)));
        let (x, mut y) = (self.make(dtype, 2 * n * len)?, self.make(dtype, 2 * n * len)?);
        let gpu = self.gpu.all_to_all(T, x.gpu.view(), &sends, y.gpu.view_mut(), &recvs)?;
        self.finish([gpu, self.cpu.all_to_all(T, x.cpu.view(), &sends, y.cpu.view_mut(), &recvs)?])?;
        self.compare(format!("all_to_all of {len} {dtype}"), &y)
    }
}

/// Compares `gpu` with a shared-memory group of its ranks, all of which another launcher has started on this host.
/// Returns the number of comparisons.
pub fn check(
    env: &RankEnv,
    gpu: &dyn Collective,
    device: &dyn Device,
    meter: Meter,
    timeout: Duration,
) -> Result<usize> {
    // The ranks' own arena is in use: another one, found by another port.
    let other = RankEnv { master_port: env.master_port + 1, arena_fd: None, ..env.clone() };
    let world = ShmWorld::join(&other, meter, &ShmOptions { timeout })?;
    let cpu = world.group(Axis::World, (0..env.world).collect())?;
    let mut twins = Twins { gpu, device, cpu, compared: 0, made: 0 };
    for len in LENS {
        let long = len == LENS[LENS.len() - 1];
        for dtype in [DType::F32, DType::Bf16, DType::F16, DType::F64] {
            if !long || dtype == DType::F32 {
                twins.sums(dtype, len)?;
            }
        }
        for dtype in [DType::U8, DType::Bf16, DType::F32] {
            // An all_gather takes several rounds from 4 MiB on.
            if !long || dtype == DType::F32 {
                twins.copies(dtype, if long { 3 * len } else { len })?;
            }
        }
    }
    twins.cpu.barrier(T)?;
    Ok(twins.compared)
}
