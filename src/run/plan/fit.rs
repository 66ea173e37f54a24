//! Whether a plan fits on this host: memory, GPUs, output files. Never starts a rank.
use super::carrier::Carrier;
use super::memory;
use super::ranks::RankPlan;
use super::training::Plan;
use crate::base::{Category, Error, Result, open};
use crate::ckpt;
use crate::comm::nccl;
use crate::device::cpu::CpuDevice;
use crate::device::gpu::cuda::{self, Machine};
use crate::run::settings::{DeviceName, Settings};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Called once per host, before any rank starts. On the `first` host creates the checkpoint directory and locks it for
/// this run as long as the returned lock lives.
pub fn prepare(plan: &Plan, first: bool) -> Result<Option<ckpt::Lock>> {
    memory_of(&plan.ranks, &plan.size.planned, LESS_TO_TRAIN)?;
    fp8(plan)?;
    if first {
        opened(&plan.settings)?;
    }
    plan.settings.checkpoint.ckpt_dir.as_deref().filter(|_| first).map(ckpt::prepare).transpose()
}

/// What takes less memory than a run that does not fit.
const LESS_TO_TRAIN: &str =
    "a smaller model, --batch-size or --max-len, --activation-checkpoint, --precision bf16, or more hosts";

/// The ranks of this host, which hold `planned` bytes each, fit on it and on its GPUs. Otherwise `less` says what to
/// use.
pub fn memory_of(ranks: &RankPlan, planned: &[(Category, usize)], less: &str) -> Result<()> {
    let bytes =
        |on_host: &dyn Fn(Category) -> bool| planned.iter().filter(|p| on_host(p.0)).map(|p| p.1).sum::<usize>();
    match ranks.device {
        DeviceName::Cuda => {
            gpus(ranks)?;
            host(ranks, bytes(&|of| of == Category::Host), less)
        }
        // On the CPU, device memory is host memory too, and each thread has scratch of its own.
        _ => host(ranks, bytes(&|_| true) + ranks.threads * CpuDevice::SCRATCH, less),
    }
}

/// Every local rank has a GPU, and fits on it if nothing else runs there.
fn gpus(r: &RankPlan) -> Result<()> {
    let machine = Machine::probe()?;
    if !cuda::has_blas() {
        return Err(cuda::no_blas());
    }
    for local_rank in 0..r.nproc {
        let (index, gpu) = machine.choose(local_rank, r.ranks_per_gpu)?;
        let name = format!("GPU {index} ({})", gpu.name);
        cuda::fits(&name, r.planned, r.ranks_per_gpu, gpu.bytes, gpu.bytes)?;
    }
    match (r.mesh.world(), r.carrier) {
        (1, _) | (_, Carrier::Ipc) => Ok(()),
        _ => nccl::present(&r.nccl),
    }
}

/// cuBLASLt multiplies FP8 only in such sides: others would be computed in bf16, with a cast and no gain.
const FP8_SIDES: usize = 16;

/// Every local rank has a GPU that multiplies FP8, if that is asked for, and the matrices of every rank of tp have such
/// sides.
fn fp8(plan: &Plan) -> Result<()> {
    let (ranks, mesh) = (&plan.ranks, &plan.ranks.mesh);
    if plan.engine.tuning.fp8.is_none() || ranks.device != DeviceName::Cuda {
        return Ok(());
    }
    let machine = Machine::probe()?;
    for local_rank in 0..ranks.nproc {
        let (index, gpu) = machine.choose(local_rank, ranks.ranks_per_gpu)?;
        if let Some(why) = cuda::without_fp8(gpu.arch) {
            let name = &gpu.name;
            return Err(Error::input(format!(
                "--precision fp8 on GPU {index} ({name}): {why}. Or use --precision bf16"
            )));
        }
    }
    for rank in 0..mesh.tp {
        let decoder = plan.engine.decoder(mesh, &mesh.coords(rank))?;
        let mut matrices = decoder.layouts().iter().flat_map(|layout| &layout.segments).filter(|s| s.fp8);
        if let Some(odd) = matrices.find(|s| s.shape.iter().any(|side| !side.is_multiple_of(FP8_SIDES))) {
            return Err(Error::input(format!(
                "--precision fp8: {} has {:?} elements on a rank, and GPUs multiply FP8 only in sides that are multiples \
                 of {FP8_SIDES}. Name it in --fp8-exclude",
                odd.name, odd.shape
            )));
        }
    }
    Ok(())
}

/// The ranks of this host, with `rank` bytes each, fit in its memory.
fn host(ranks: &RankPlan, rank: usize, less: &str) -> Result<()> {
    let available = memory::available();
    let needed = rank * ranks.nproc;
    if available.is_some_and(|available| needed > available) {
        let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
        return Err(Error::input(format!(
            "this run needs {:.2} GiB on this host ({} ranks of {:.2} GiB), which has {:.2} GiB available. Use {less}",
            gib(needed),
            ranks.nproc,
            gib(rank),
            gib(available.unwrap_or(0)),
        )));
    }
    Ok(())
}

/// Opens the outputs of the first rank once before any rank starts, which finds a full disk or a name that is too long.
/// A new file is removed again, since the run may still be refused.
fn opened(s: &Settings) -> Result<()> {
    let bad = |flag: &str, path: &Path, e| Error::input(format!("{flag} {}: {e}", path.display()));
    // Closing a pipe would end its reader.
    let is_pipe = |path: &Path| path.metadata().is_ok_and(|m| m.file_type().is_fifo());
    if let Some(path) = s.run.metrics_path.as_ref().filter(|path| !is_pipe(path)) {
        let new = !path.exists();
        let opened = open::append(path).and_then(|_| if new { std::fs::remove_file(path) } else { Ok(()) });
        opened.map_err(|e| bad("--metrics-path", path, e))?;
    }
    if let Some(dir) = &s.watch.tensorboard {
        std::fs::create_dir_all(dir).map_err(|e| bad("--tensorboard", dir, e))?;
    }
    Ok(())
}
