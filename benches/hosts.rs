//! All-gathers over several hosts, hierarchical and flat, and reduce-scatters. Started once per rank by a launcher,
//! whose variables identify the rank, as `hosts --reps 5 --mib 1,16 [--comm mpi]`. Rank 0 prints one JSON object per
//! line: operation, MiB per shard, seconds of the slowest rank (median over repetitions), and MiB sent by all ranks of
//! each host together.
//!
//! In the `flat` variant every rank fetches every remote shard itself, into its own buffer.
use flatshard::base::{Category, DType, Error, Meter, Result};
use flatshard::comm::env::RankEnv;
use flatshard::comm::hosts::wire::{Channel, Move, Wire};
use flatshard::comm::hosts::{HostsWorld, tcp::Tcp};
use flatshard::comm::{Axis, Collective, CommUse, Mesh, MeshSizes, Reduce, Tag, shm};
use flatshard::device::{Buf, Device, cpu::CpuDevice};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(120);
/// A channel that no axis uses.
const CHANNEL: u16 = 900;

struct Options {
    comm: String,
    reps: usize,
    mib: Vec<usize>,
}

fn options() -> Result<Options> {
    let mut options = Options { comm: "tcp".into(), reps: 5, mib: vec![1, 16] };
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench"); // added by cargo
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(|| Error::input(format!("{flag} needs a value")))?;
        let number = |text: &str| text.parse().map_err(|_| Error::input(format!("{flag} {value}: not a number")));
        match flag.as_str() {
            "--comm" => options.comm = value.clone(),
            "--reps" => options.reps = number(&value)?,
            "--mib" => options.mib = value.split(',').map(number).collect::<Result<_>>()?,
            _ => return Err(Error::input(format!("{flag}: unknown flag; known: --comm, --reps, --mib"))),
        }
    }
    Ok(options)
}

fn wire(comm: &str, env: &RankEnv, timeout: Duration) -> Result<Box<dyn Wire>> {
    match comm {
        "tcp" => Ok(Box::new(Tcp::join(env, timeout)?)),
        #[cfg(feature = "mpi")]
        "mpi" => Ok(Box::new(flatshard::comm::hosts::mpi::MpiWire::join(env, timeout)?)),
        other => Err(Error::input(format!("--comm {other}: must be tcp, or mpi in a build with that feature"))),
    }
}

/// Fetches every remote shard into this rank's buffer; local shards come through shared memory.
struct Flat {
    channel: Box<dyn Channel>,
    rank: usize,
    per_host: usize,
    world: usize,
    full: Vec<u8>,
}
impl Flat {
    /// Returns the bytes sent to other hosts.
    fn gather(&mut self, shard: &[u8]) -> Result<u64> {
        let (host, hosts, n) = (self.rank / self.per_host, self.world / self.per_host, self.per_host);
        let start = Instant::now();
        let go_on = || start.elapsed() < TIMEOUT;
        let mut sent = 0;
        for away in 1..hosts {
            for turn in 0..n {
                let column = self.rank % n;
                let to = (host + away) % hosts * n + (column + turn) % n;
                let from = (host + hosts - away) % hosts * n + (column + n - turn) % n;
                let place = &mut self.full[from * shard.len()..(from + 1) * shard.len()];
                let mut moves = [Move::send(to, shard), Move::recv(from, place)];
                let failed = |fault| Error::Run(format!("rank {}: {fault:?}", self.rank));
                self.channel.exchange(&mut moves, &go_on).map_err(failed)?;
                sent += shard.len() as u64;
            }
        }
        Ok(sent)
    }
}

/// Reduces `value` over all ranks: the maximum or the sum.
fn agree(world: &dyn Collective, numbers: &mut Buf, value: f64, op: Reduce) -> Result<f64> {
    numbers.view_mut().host::<f64>("bench")?[0] = value;
    world.wait(world.all_reduce(Tag::new("bench", 0), numbers.view_mut(), op)?)?;
    Ok(numbers.view().host::<f64>("bench")?[0])
}

fn bench() -> Result<()> {
    let options = options()?;
    let Some(env) = RankEnv::from_env()?.filter(|env| env.world > env.local_world) else {
        println!("this benchmark needs several hosts: start it with a launcher");
        return Ok(());
    };
    let (meter, shm) = (Meter::default(), shm::ShmOptions { timeout: TIMEOUT });
    let member = HostsWorld::join(&env, meter.clone(), &shm, |env, timeout| wire(&options.comm, env, timeout))?;
    let channel = member.wire().channel(CHANNEL)?;
    let hosts = env.world / env.local_world;
    let mesh = Mesh::new(member, MeshSizes { dp_replicate: hosts, dp_shard: env.local_world, sp: 1, tp: 1, ep: 1 })?;
    let (world, host) = (&**mesh.group(Axis::World), &**mesh.group(Axis::DpShard));
    let mut flat = Flat { channel, rank: env.rank, per_host: env.local_world, world: env.world, full: Vec::new() };
    let device = CpuDevice::new(meter);
    let mut numbers = world.alloc(DType::F64, 1, CommUse::Reduced, Category::Other)?;
    let tag = Tag::new("bench", 1);
    for &mib in &options.mib {
        let len = mib << 18;
        let mut shard = device.alloc(DType::F32, len, Category::Other)?;
        let mut full = world.alloc(DType::F32, len * env.world, CommUse::Gathered, Category::Other)?;
        let mut grads = world.alloc(DType::F32, len * env.world, CommUse::Reduced, Category::Other)?;
        let mut near = host.alloc(DType::F32, len * env.local_world, CommUse::Gathered, Category::Other)?;
        flat.full.resize(len * env.world * 4, 0);
        for what in ["hierarchical gather", "flat gather", "reduce-scatter"] {
            let mut times = Vec::new();
            let mut crossed = 0;
            for rep in 0..=options.reps {
                world.barrier(tag)?;
                let (start, before) = (Instant::now(), world.stats().crossed);
                let mut sent = 0;
                match what {
                    "hierarchical gather" => {
                        let ticket = world.all_gather(tag, shard.view(), full.view_mut())?;
                        world.wait(ticket)?;
                        world.release(ticket)?;
                    }
                    "flat gather" => {
                        let ticket = host.all_gather(tag, shard.view(), near.view_mut())?;
                        sent = flat.gather(bytemuck::cast_slice(shard.view().host::<f32>("bench")?))?;
                        host.wait(ticket)?;
                        host.release(ticket)?;
                    }
                    _ => {
                        let ticket = world.reduce_scatter(tag, grads.view_mut(), shard.view_mut(), false)?;
                        world.wait(ticket)?;
                        world.wait_sent(ticket)?;
                    }
                }
                let seconds = start.elapsed().as_secs_f64();
                sent += world.stats().crossed - before;
                let slowest = agree(world, &mut numbers, seconds, Reduce::Max)?;
                // The first repetition makes connections and touches memory for the first time.
                if rep > 0 {
                    times.push(slowest);
                    crossed = agree(world, &mut numbers, sent as f64, Reduce::Sum)? as u64;
                }
            }
            times.sort_by(f64::total_cmp);
            if env.rank == 0 {
                let left = crossed as f64 / hosts as f64 / (1 << 20) as f64;
                let (median, comm) = (times[times.len() / 2], &options.comm);
                let ranks = env.world;
                println!(
                    "{}",
                    serde_json::json!({"what": what, "comm": comm, "hosts": hosts, "ranks": ranks, "shard_mib": mib, "seconds": median, "mib_left_a_host": left})
                );
            }
        }
    }
    world.barrier(tag)
}

fn main() -> ExitCode {
    match bench() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(e.exit_status())
        }
    }
}
