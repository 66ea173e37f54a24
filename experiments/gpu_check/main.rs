//! Run by `scripts/gpu_check.sh` on a machine with a GPU: one part of the check per call, as JSON on standard output,
//! whether it passes or fails. Exit status 0: passed; 1: failed, with the reasons on standard error; 3: cannot run
//! here. Never trains (`run_fsdp` does).
mod gpu; // a rank's GPU
mod report; // what a part says
mod layouts; // emulator and GPU compared
mod attention; // attention compared with the CPU's
mod bench; // rates
mod ranks; // several ranks
mod twins; // groups of GPUs and of the CPU compared
mod records; // metrics files

use flatshard::base::{Error, Result};
use flatshard::device::gpu::cuda::{Gpu, Machine};
use flatshard::device::gpu::telemetry::Telemetry;
use flatshard_ptx::kernels::known_spill;
use gpu::OpenGpu;
use ranks::RanksBy;
use report::PartReport;
use serde_json::{Value, json};
use std::process::ExitCode;

const USAGE: &str = "gpu_check machine | kernels | link | layouts [FROM] | attention [FROM] | bench [attention] | ranks [windows | ipc] | \
                     parity A.jsonl B.jsonl TOLERANCE | rate A.jsonl | table DIR";

/// Loads no kernel, which takes minutes on a GPU that has never seen this build.
fn machine() -> Result<PartReport> {
    let machine = Machine::probe()?;
    let (ordinal, _) = machine.choose(0, 1)?;
    let of_gpu = |g: &Gpu| json!({"name": g.name, "arch": g.arch, "bytes": g.bytes});
    let gpus = machine.gpus.iter().map(of_gpu).collect::<Vec<_>>();
    Ok(json!({"gpus": gpus, "first": ordinal, "cuda": machine.cuda}).into())
}

/// How the driver's compiler translated every kernel. One that spills more than any known release of ptxas makes it
/// spill fails the check.
fn kernels() -> Result<PartReport> {
    let started = std::time::Instant::now();
    let gpu = OpenGpu::open(0, 1)?;
    let seconds = started.elapsed().as_secs_f64();
    let (free, total) = gpu.cuda.memory()?;
    let report = gpu.cuda.kernels()?;
    // Local memory is counted in steps of 8 bytes.
    let most = |variant: &str| known_spill(variant).next_multiple_of(8) as i32;
    let spilling = report.iter().filter(|k| k.local_bytes > most(k.variant));
    let wrong = spilling.map(|k| format!("{} spills {} bytes of registers per thread", k.variant, k.local_bytes));
    let (wrong, warning) = (wrong.collect(), gpu.cuda.warning());
    let nvml = Telemetry::new(gpu.cuda.pci_bus_id()?).sample();
    let measured = json!({"load_seconds": seconds, "free_bytes": free, "total_bytes": total, "nvml": nvml,
                          "warning": warning, "kernels": report});
    Ok(PartReport { measured, wrong })
}

#[cfg(feature = "cust")]
fn link() -> Result<PartReport> {
    Ok(json!(flatshard::device::gpu::cuda::link::link()?).into())
}
#[cfg(not(feature = "cust"))]
fn link() -> Result<PartReport> {
    Err(Error::input("link needs a build with --features cust (see Cargo.toml); `kernels` does not"))
}

fn part(args: &[String]) -> Result<PartReport> {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        ["machine"] => machine(),
        ["kernels"] => kernels(),
        ["link"] => link(),
        ["layouts"] => layouts::run(0),
        ["layouts", from] => layouts::run(place(from)?),
        ["attention"] => attention::run(0),
        ["attention", from] => attention::run(place(from)?),
        ["bench"] => bench::run().map(PartReport::from),
        ["bench", "attention"] => bench::attention_rates().map(PartReport::from),
        ["ranks"] => ranks::run(RanksBy::Nccl).map(PartReport::from),
        ["ranks", "windows"] => ranks::run(RanksBy::Windows).map(PartReport::from),
        ["ranks", "ipc"] => ranks::run(RanksBy::Ipc).map(PartReport::from),
        ["parity", a, b, tolerance] => records::parity(a, b, tolerance),
        ["rate", a] => records::rate(a).map(PartReport::from),
        ["table", dir] => records::table(dir).map(|text| Value::String(text).into()),
        _ => Err(Error::input(USAGE)),
    }
}

fn place(from: &str) -> Result<usize> {
    from.parse().map_err(|_| Error::input(format!("{from} is not the number of a question")))
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match part(&args) {
        Ok(PartReport { measured, wrong }) => {
            match measured.as_str() {
                Some(text) => println!("{text}"),
                None => println!("{measured:#}"),
            }
            wrong.iter().for_each(|what| eprintln!("{what}"));
            ExitCode::from(u8::from(!wrong.is_empty()))
        }
        Err(e) => {
            eprintln!("{e}");
            // The library reports missing hardware as an input error.
            ExitCode::from(if matches!(e, Error::Input(_)) { 3 } else { 1 })
        }
    }
}
