//! Run by `scripts/gpu_check.sh` on a machine with a GPU: one part of the check per call, as JSON on standard output.
//! Exit status 0: passed; 1: failed, with the reason on standard error; 3: cannot run here. Never trains (`run_fsdp`
//! does).
mod gpu; // a rank's GPU
mod layouts; // emulator and GPU compared
mod bench; // rates
mod ranks; // several ranks
mod twins; // groups of GPUs and of the CPU compared
mod records; // metrics files

use flatshard::base::{Error, Result};
use flatshard::device::gpu::cuda::Machine;
use flatshard::device::gpu::telemetry::Telemetry;
use gpu::OpenGpu;
use ranks::RanksBy;
use serde_json::{Value, json};
use std::process::ExitCode;

const USAGE: &str = "gpu_check machine | kernels | link | layouts | attention | bench [attention] | ranks [windows | ipc] | \
                     parity A.jsonl B.jsonl TOLERANCE | rate A.jsonl | table DIR";

fn machine() -> Result<Value> {
    let machine = Machine::probe()?;
    let gpu = OpenGpu::open(0, 1)?;
    let (free, total) = gpu.cuda.memory()?;
    Ok(json!({
        "gpus": machine.gpus.iter().map(|g| json!({"name": g.name, "arch": g.arch, "bytes": g.bytes})).collect::<Vec<_>>(),
        "cuda": machine.cuda,
        "free_bytes": free,
        "total_bytes": total,
        "nvml": Telemetry::new(gpu.cuda.pci_bus_id()?).sample(),
    }))
}

/// How the driver's compiler translated every kernel. A kernel that spills fails the check.
fn kernels() -> Result<Value> {
    let started = std::time::Instant::now();
    let gpu = OpenGpu::open(0, 1)?;
    let seconds = started.elapsed().as_secs_f64();
    let report = gpu.cuda.kernels()?;
    let spilling: Vec<&str> = report.iter().filter(|k| k.local_bytes > 0).map(|k| k.variant).collect();
    if !spilling.is_empty() {
        return Err(Error::Run(format!("kernels spill registers to local memory: {}", spilling.join(", "))));
    }
    Ok(json!({"load_seconds": seconds, "kernels": report}))
}

#[cfg(feature = "cust")]
fn link() -> Result<Value> {
    Ok(json!(flatshard::device::gpu::cuda::link::link()?))
}
#[cfg(not(feature = "cust"))]
fn link() -> Result<Value> {
    Err(Error::input("link needs a build with --features cust (see Cargo.toml); `kernels` does not"))
}

fn part(args: &[String]) -> Result<Value> {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        ["machine"] => machine(),
        ["kernels"] => kernels(),
        ["link"] => link(),
        ["layouts"] => layouts::run(),
        ["attention"] => layouts::attention(),
        ["bench"] => bench::run(),
        ["bench", "attention"] => bench::attention_rates(),
        ["ranks"] => ranks::run(RanksBy::Nccl),
        ["ranks", "windows"] => ranks::run(RanksBy::Windows),
        ["ranks", "ipc"] => ranks::run(RanksBy::Ipc),
        ["parity", a, b, tolerance] => records::parity(a, b, tolerance),
        ["rate", a] => records::rate(a),
        ["table", dir] => records::table(dir).map(Value::String),
        _ => Err(Error::input(USAGE)),
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match part(&args) {
        Ok(value) => {
            match value.as_str() {
                Some(text) => println!("{text}"),
                None => println!("{value:#}"),
            }
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("{e}");
            // The library reports missing hardware as an input error.
            ExitCode::from(if matches!(e, Error::Input(_)) { 3 } else { 1 })
        }
    }
}
