//! When transfers between ranks of sp start relative to the launches of a simulated GPU, which are recorded in the same
//! log.
use super::layer::{Case, heads};
use flatshard::base::meter::Lease;
use flatshard::base::{Category, DType, Meter, Result};
use flatshard::comm::Collective;
use flatshard::comm::Tag;
use flatshard::comm::recorder::{Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::device::gpu::GpuDevice;
use flatshard::device::gpu::calls::Calls;
use flatshard::device::gpu::driver::{Arg, Driver, Graph, Kernel, LaunchShape, run};
use flatshard::device::gpu::sim::Sim;
use flatshard::device::ops::Gemm;
use flatshard::device::{Buf, Device, View, ViewMut};
use flatshard::nn::SpImpl;
use std::sync::Arc;

/// Records the kernels it launches.
struct Noting {
    sim: Sim,
    log: Log,
}

impl Driver for Noting {
    fn launch(&self, kernel: Kernel, shape: LaunchShape, args: &mut [Arg]) -> Result<()> {
        self.log.note(Tag::new(kernel.entry, 0));
        self.sim.launch(kernel, shape, args)
    }
    fn name(&self) -> String {
        self.sim.name()
    }
    fn arch(&self) -> u32 {
        self.sim.arch()
    }
    fn multiprocessors(&self) -> u32 {
        self.sim.multiprocessors()
    }
    fn waits(&self) -> bool {
        self.sim.waits()
    }
    fn alloc(&self, dtype: DType, len: usize, category: Category, lease: Lease) -> Result<Buf> {
        self.sim.alloc(dtype, len, category, lease)
    }
    fn alloc_host(&self, dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
        self.sim.alloc_host(dtype, len, lease)
    }
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()> {
        self.sim.upload(src, dst)
    }
    fn download(&self, parts: &mut [(View, &mut [u8])]) -> Result<()> {
        self.sim.download(parts)
    }
    fn copy(&self, src: View, dst: ViewMut) -> Result<()> {
        self.sim.copy(src, dst)
    }
    fn zero(&self, x: ViewMut) -> Result<()> {
        self.sim.zero(x)
    }
    fn gemm(&self, op: Gemm) -> Result<()> {
        self.sim.gemm(op)
    }
    fn synchronize(&self) -> Result<()> {
        self.sim.synchronize()
    }
    fn capture(&self, calls: Calls) -> Result<Graph> {
        self.sim.capture(calls)
    }
    fn replay(&self, graph: &mut Graph) -> Result<()> {
        run(self, &mut graph.calls)
    }
}

/// What rank 0 of 3 does in one forward and one backward pass of a layer: capital letters when a transfer starts, in
/// brackets when it is waited for; lowercase letters for launches. A pass is `forward`, or `dq` and `dkv`.
fn trace(sp_impl: SpImpl) -> String {
    const WORLD: usize = 3;
    let logs: Vec<Log> = (0..WORLD).map(|_| Log::default()).collect();
    let device = |rank: usize, meter: Meter| -> Result<Arc<dyn Device>> {
        let driver = Noting { sim: Sim::new(), log: logs[rank].clone() };
        Ok(Arc::new(GpuDevice::new(Arc::new(driver), meter)?))
    };
    let recorded = |group: Arc<dyn Collective>| -> Arc<dyn Collective> {
        let log = logs[group.rank()].clone();
        Arc::new(Recorder::new(group, log))
    };
    Case { heads: heads(3, 3, 16), cu: &[0, 96], dtype: DType::F32 }.shared(WORLD, sp_impl, &device, &recorded);
    let words: Vec<String> = logs[0]
        .entries()
        .iter()
        .filter_map(|entry| {
            let what = entry.tag.what.replace("ring ", "").replace("ulysses ", "");
            match entry.seam {
                None => Some(what.strip_prefix("attention_").filter(|kernel| *kernel != "ranges")?.to_string()),
                Some(Seam::SendRecv | Seam::AllGather | Seam::ReduceScatter | Seam::AllToAll) => {
                    Some(what.to_uppercase())
                }
                Some(Seam::Wait) => Some(format!("({})", what.to_uppercase())),
                _ => None,
            }
        })
        .collect();
    // Forward and backward ran twice, the same each time.
    let (first, second) = words.split_at(words.len() / 2);
    assert_eq!(first, second);
    first.join(" ")
}

/// Nothing overlaps attention: it needs all tokens of its heads.
#[test]
fn ulysses_exchanges_four_times() {
    assert_eq!(trace(SpImpl::Ulysses), "QKV (QKV) forward O (O) D_O (D_O) delta dq dkv DQKV (DQKV)");
}

#[test]
fn transfers_of_the_next_block_overlap_the_current_pass() {
    assert_eq!(
        trace(SpImpl::Ring),
        "KV forward (KV) KV forward merge (KV) forward merge \
         delta KV dq dkv DKV (KV) KV dq dkv (DKV) DKV (KV) dq dkv (DKV) DKV (DKV)"
    );
    assert_eq!(
        trace(SpImpl::AllGather),
        "KV forward (KV) forward merge forward merge delta KV dq dkv (KV) dq dkv dq dkv DKV (DKV)"
    );
}
