//! One GPU rank, over NCCL or IPC, started once per rank by the script with a launcher's variables: checks the result
//! of every collective, and times the two that training waits for most. Never judges a rate. Ranks may share a GPU.
use crate::gpu::OpenGpu;
use crate::twins;
use flatshard::base::{Category, DType, Error, Meter, Result};
use flatshard::comm::env::RankEnv;
use flatshard::comm::{Axis, Collective, CommUse, Mesh, MeshSizes, Reduce, Tag, nccl};
use flatshard::device::gpu::GpuDevice;
use flatshard::device::{Buf, Device};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

const T: Tag = Tag::new("check", 0);
/// f32 elements per shard: a few megabytes, so that buffers are registered.
const SHARD: usize = 1 << 20;

/// What moves the data.
#[derive(Clone, Copy, PartialEq)]
pub enum RanksBy {
    Nccl,
    /// NCCL, with buffers registered as symmetric windows.
    Windows,
    /// No NCCL. Results also have the bits of the shared-memory group.
    Ipc,
}

pub fn run(by: RanksBy) -> Result<Value> {
    let env = RankEnv::from_env()?.ok_or_else(|| Error::input("ranks: set RANK, WORLD_SIZE and LOCAL_RANK"))?;
    let cuda = OpenGpu::open(env.local_rank, env.local_world)?.cuda;
    let meter = Meter::default();
    let device: Arc<dyn Device> = Arc::new(GpuDevice::new(cuda.clone(), meter.clone())?);
    let (timeout, tiny) = (Duration::from_secs(60), cuda.model()?.starts_with("Simulated"));
    let options = nccl::NcclOptions { windows: by == RanksBy::Windows, ..Default::default() };
    let world = match by {
        RanksBy::Ipc => nccl::NcclWorld::join_by_ipc(&env, cuda, device.clone(), meter.clone(), timeout)?,
        _ => nccl::NcclWorld::join(&env, cuda, None, device.clone(), meter.clone(), timeout, options)?,
    };
    let mesh = Mesh::new(world, MeshSizes::sharded(env.world))?;
    let (g, me, n) = (&**mesh.group(Axis::Fsdp), env.rank, env.world);
    let started = Instant::now();

    let put = |buf: &mut Buf, f: &dyn Fn(usize) -> f32| {
        let values: Vec<f32> = (0..buf.len()).map(f).collect();
        device.upload(bytemuck::cast_slice(&values), buf.view_mut())
    };
    let expect = |what: &str, buf: &Buf, f: &dyn Fn(usize) -> f32| {
        let mut values = vec![0f32; buf.len()];
        device.download(buf.view(), bytemuck::cast_slice_mut(&mut values))?;
        match values.iter().enumerate().find(|(i, x)| **x != f(*i)) {
            None => Ok(()),
            Some((i, x)) => Err(Error::Run(format!("rank {me}: {what}: element {i} is {x}, should be {}", f(i)))),
        }
    };
    let mut shard = device.alloc(DType::F32, SHARD, Category::Other)?;
    let mut full = g.alloc(DType::F32, SHARD * n, CommUse::Gathered, Category::Other)?;
    put(&mut shard, &|i| (me * SHARD + i) as f32)?;
    g.wait(g.all_gather(T, shard.view(), full.view_mut())?)?;
    expect("all_gather", &full, &|i| i as f32)?;

    let sum = (n * (n + 1) / 2) as f32;
    put(&mut full, &|i| (me + 1) as f32 * (i % 100) as f32)?;
    let t = g.reduce_scatter(T, full.view_mut(), shard.view_mut(), false)?;
    g.wait(t)?;
    g.wait_sent(t)?;
    expect("reduce_scatter", &shard, &|i| sum * ((me * SHARD + i) % 100) as f32)?;
    put(&mut full, &|i| (me + 1) as f32 * (i % 100) as f32)?;
    g.wait(g.reduce_scatter(T, full.view_mut(), shard.view_mut(), true)?)?;
    expect("reduce_scatter, added", &shard, &|i| 2.0 * sum * ((me * SHARD + i) % 100) as f32)?;

    put(&mut shard, &|i| (me * 10 + i % 7) as f32)?;
    g.wait(g.all_reduce(T, shard.view_mut(), Reduce::Max)?)?;
    expect("all_reduce", &shard, &|i| ((n - 1) * 10 + i % 7) as f32)?;
    let mut limbs = g.alloc(DType::F64, 4, CommUse::Reduced, Category::Other)?;
    let mine = [me as f64, 4294967295.0, 0.5, 1.0];
    device.upload(bytemuck::cast_slice(&mine), limbs.view_mut())?;
    g.wait(g.all_reduce(T, limbs.view_mut(), Reduce::Sum)?)?;
    let mut got = [0f64; 4];
    device.download(limbs.view(), bytemuck::cast_slice_mut(&mut got))?;
    let ranks = n as f64;
    if got != [ranks * (ranks - 1.0) / 2.0, ranks * 4294967295.0, ranks / 2.0, ranks] {
        return Err(Error::Run(format!("rank {me}: all_reduce of f64: {got:?}")));
    }

    put(&mut shard, &|i| (me * 1000 + i % 13) as f32)?;
    g.wait(g.broadcast(T, shard.view_mut(), n - 1)?)?;
    expect("broadcast", &shard, &|i| ((n - 1) * 1000 + i % 13) as f32)?;
    let (to, from) = ((me + 1) % n, (me + n - 1) % n);
    put(&mut shard, &|i| (me + i % 5) as f32)?;
    let mut received = device.alloc(DType::F32, SHARD, Category::Other)?;
    g.wait(g.send_recv(T, to, shard.view(), from, received.view_mut())?)?;
    expect("send_recv", &received, &|i| (from + i % 5) as f32)?;
    // Rank r sends r + k + 1 elements to rank k; the parts lie in reverse.
    let count = |from: usize, to: usize| from + to + 1;
    let from_end = |count: &dyn Fn(usize) -> usize| {
        let ends = (0..n).map(|r| SHARD - (0..r).map(count).sum::<usize>());
        ends.zip(0..n).map(|(end, r)| end - count(r)..end).collect::<Vec<_>>()
    };
    let (sends, recvs) = (from_end(&|r| count(me, r)), from_end(&|r| count(r, me)));
    put(&mut shard, &|i| (me * SHARD + i) as f32)?;
    put(&mut received, &|_| -1.0)?;
    g.wait(g.all_to_all(T, shard.view(), &sends, received.view_mut(), &recvs)?)?;
    let sent = |from: usize| SHARD - (0..=me).map(|to| count(from, to)).sum::<usize>();
    expect("all_to_all", &received, &|i| {
        recvs
            .iter()
            .position(|part| part.contains(&i))
            .map_or(-1.0, |r| (r * SHARD + sent(r) + i - recvs[r].start) as f32)
    })?;
    g.barrier(T)?;
    let same_bits = (by == RanksBy::Ipc).then(|| twins::check(&env, g, &*device, meter, timeout)).transpose()?;
    let rates = rates(g, &*device, tiny)?;
    let stats = g.stats();
    let by = match by {
        RanksBy::Nccl => "nccl",
        RanksBy::Windows => "windows",
        RanksBy::Ipc => "ipc",
    };
    Ok(json!({"rank": me, "ranks": n, "by": by, "ops": stats.ops,
        "same_bits_as_shm": same_bits, "gb_per_s": rates, "in_flight_s": stats.in_flight_s,
        "exposed_s": stats.exposed_s, "seconds": started.elapsed().as_secs_f64()}))
}

/// Bytes that each rank receives per second, one operation after another. On a simulated GPU it means nothing.
fn rates(g: &dyn Collective, device: &dyn Device, tiny: bool) -> Result<Value> {
    let (shard, rounds) = if tiny { (1 << 10, 1) } else { (32 << 20, 10) };
    let n = g.size();
    let mut mine = device.alloc(DType::Bf16, shard, Category::Other)?;
    let mut full = g.alloc(DType::Bf16, shard * n, CommUse::Gathered, Category::Other)?;
    let mut grads = g.alloc(DType::Bf16, shard * n, CommUse::Reduced, Category::Other)?;
    let mut seconds = [0.0; 2];
    for round in 0..rounds + 1 {
        for (verb, seconds) in seconds.iter_mut().enumerate() {
            g.barrier(T)?;
            let started = Instant::now();
            let ticket = match verb {
                0 => g.all_gather(T, mine.view(), full.view_mut())?,
                _ => g.reduce_scatter(T, grads.view_mut(), mine.view_mut(), false)?,
            };
            g.wait(ticket)?;
            g.release(ticket)?;
            g.wait_sent(ticket)?;
            g.barrier(T)?;
            if round > 0 {
                *seconds += started.elapsed().as_secs_f64(); // not the first
            }
        }
    }
    let rate = |seconds: f64| (rounds * (n - 1) * 2 * shard) as f64 / seconds / 1e9;
    Ok(json!({"all_gather": rate(seconds[0]), "reduce_scatter": rate(seconds[1])}))
}
