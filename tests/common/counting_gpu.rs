//! A simulated GPU that counts its work: FLOPs of matrix products, launches by kernel, copies from and to host memory.
use flatshard::base::meter::Lease;
use flatshard::base::{Category, DType, Result};
use flatshard::device::gpu::calls::Calls;
use flatshard::device::gpu::driver::{Arg, Driver, Graph, Kernel, LaunchShape, run};
use flatshard::device::gpu::sim::Sim;
use flatshard::device::ops::Gemm;
use flatshard::device::{Buf, Place, View, ViewMut};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

#[derive(Clone, Default, Debug)]
pub struct Counts {
    pub flops: u64,
    pub launches: BTreeMap<&'static str, usize>,
    /// Copies of gradients and weights: `down` to host memory, `up` from it, in order.
    pub copies: Vec<&'static str>,
}

impl Counts {
    /// Launches of kernels whose names have `part` in them.
    pub fn launched(&self, part: &str) -> usize {
        self.launches.iter().filter(|(name, _)| name.contains(part)).map(|(_, n)| n).sum()
    }
}

#[derive(Default)]
pub struct Counted {
    sim: Sim,
    counts: Arc<Mutex<Counts>>,
}

impl Counted {
    /// What was counted since the last call.
    pub fn take(&self) -> Counts {
        std::mem::take(&mut self.counts.lock().unwrap())
    }
}

impl Driver for Counted {
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
        true
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
        let copies = &mut self.counts.lock().unwrap().copies;
        match (src.place(), dst.place()) {
            _ if src.len() == 1 || src.dtype() == DType::F64 => {} // scale, norm
            (Place::Host, Place::Mapped) => copies.push("down"),
            (Place::Mapped, Place::Host) => copies.push("up"),
            _ => {}
        }
        self.sim.copy(src, dst)
    }
    fn zero(&self, x: ViewMut) -> Result<()> {
        self.sim.zero(x)
    }
    fn launch(&self, kernel: Kernel, shape: LaunchShape, args: &mut [Arg]) -> Result<()> {
        *self.counts.lock().unwrap().launches.entry(kernel.entry).or_default() += 1;
        self.sim.launch(kernel, shape, args)
    }
    fn gemm(&self, op: Gemm) -> Result<()> {
        self.counts.lock().unwrap().flops += op.shape.flops();
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
