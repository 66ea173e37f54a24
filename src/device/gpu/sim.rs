//! A simulated GPU: kernels run in the emulator of `flatshard_ptx`, matrix products on the host, and every call is
//! synchronous. Never models speed.
//!
//! Its memory is the host's, so ranks share it as CPU ranks do. A kernel can access only its operands: each is an
//! allocation of the emulator with the operand's bounds, named after the kernel's parameter. Read-only operands
//! ([`Arg::In`]) cannot be written; outputs ([`Arg::Out`]) count as uninitialized at the start and must be fully
//! written at the end. So a bug in a kernel is an error here that names kernel, line, thread and allocation.
use super::calls::Calls;
use super::driver::{Arg, Driver, Graph, Kernel, LaunchShape, Map, run};
use super::kernels::{TEXTS, place};
use crate::buf::Place;
use crate::cpu::{gemm, memory};
use crate::ops::Gemm;
use crate::{Buf, View, ViewMut};
use flatshard_base::meter::Lease;
use flatshard_base::{Category, DType, Error, Result};
use flatshard_ptx::emulate::{self, Argument, GlobalMemory, KernelLaunch, LaunchCounts, TensorMap, parse};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The fewest possible, so that launches in tests have several CTAs, and CTAs several work items.
const MULTIPROCESSORS: u32 = 1;

pub struct Sim {
    /// In the order of [`TEXTS`]; parsed at first launch.
    kernels: Vec<OnceLock<Entries>>,
    /// Order of the warps; see [`KernelLaunch::schedule`].
    schedule: u64,
    arch: u32,
    gemm: Mutex<gemm::GemmScratch>,
    tally: Mutex<Tally>,
}

/// The entry points of a variant, or its parse error.
type Entries = std::result::Result<Vec<emulate::PtxKernel>, String>;

/// Work executed so far.
#[derive(Clone, Copy, Default, Debug)]
pub struct Tally {
    pub launches: u64,
    pub products: u64,
    pub copies: u64,
    /// Downloads and synchronizations, where the host would block.
    pub waits: u64,
    pub uploads: u64,
    pub graphs: u64,
    pub instructions: u64,
    pub global_sectors: u64,
}

impl Sim {
    pub fn new() -> Sim {
        Sim::with_schedule(0)
    }
    /// Runs CTAs and warps in another order, which must not change a kernel's results.
    pub fn with_schedule(schedule: u64) -> Sim {
        let kernels = std::iter::repeat_with(OnceLock::new).take(TEXTS.len()).collect();
        Sim { kernels, schedule, arch: 80, gemm: Mutex::default(), tally: Mutex::default() }
    }
    /// The same as a GPU of another architecture, by which launches choose kernels.
    pub fn of_arch(self, arch: u32) -> Sim {
        Sim { arch, ..self }
    }
    /// With another text for a variant: a test's own kernel, correct or faulty.
    pub fn replace(mut self, variant: &str, file: &str, ptx: &str) -> Result<Sim> {
        let index =
            place(variant).ok_or_else(|| Error::op("replace", format!("sim: no kernel variant is named {variant}")))?;
        self.kernels[index] = OnceLock::from(parse(file, ptx).map_err(|e| e.to_string()));
        Ok(self)
    }
    pub fn tally(&self) -> Tally {
        *self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn count(&self, what: impl FnOnce(&mut Tally)) {
        what(&mut self.tally.lock().unwrap_or_else(PoisonError::into_inner));
    }
    fn kernel(&self, kernel: Kernel) -> Result<&emulate::PtxKernel> {
        let Kernel { variant, entry } = kernel;
        let index =
            place(variant).ok_or_else(|| Error::op(entry, format!("sim: no kernel variant is named {variant}")))?;
        let parsed = self.kernels[index].get_or_init(|| {
            let ptx = TEXTS[index].ptx().map_err(|e| e.to_string())?;
            parse(TEXTS[index].file, ptx).map_err(|e| e.to_string())
        });
        let entries = parsed.as_ref().map_err(|e| Error::op(entry, format!("sim: cannot parse {variant}: {e}")))?;
        let found = entries.iter().find(|k| k.name == entry);
        found.ok_or_else(|| Error::op(entry, format!("sim: {variant} has no entry point of that name")))
    }
}

impl Default for Sim {
    fn default() -> Sim {
        Sim::new()
    }
}

impl Driver for Sim {
    fn name(&self) -> String {
        format!("sim (sm_{}, {} kernel variants)", self.arch(), TEXTS.len())
    }
    fn arch(&self) -> u32 {
        self.arch
    }
    fn multiprocessors(&self) -> u32 {
        MULTIPROCESSORS
    }
    fn waits(&self) -> bool {
        true
    }
    fn alloc(&self, dtype: DType, len: usize, _: Category, lease: Lease) -> Result<Buf> {
        memory::alloc(dtype, len, lease)
    }
    fn alloc_host(&self, dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
        memory::alloc_at(Place::Mapped, dtype, len, lease)
    }
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()> {
        self.count(|tally| tally.uploads += 1);
        dst.host_bytes_mut("upload")?.copy_from_slice(src);
        Ok(())
    }
    fn download(&self, parts: &mut [(View, &mut [u8])]) -> Result<()> {
        self.count(|tally| tally.waits += 1);
        for (src, dst) in parts {
            dst.copy_from_slice(src.host_bytes("download")?);
        }
        Ok(())
    }
    fn copy(&self, src: View, dst: ViewMut) -> Result<()> {
        self.count(|tally| tally.copies += 1);
        dst.host_bytes_mut("copy")?.copy_from_slice(src.host_bytes("copy")?);
        Ok(())
    }
    fn zero(&self, x: ViewMut) -> Result<()> {
        self.count(|tally| tally.copies += 1);
        x.host_bytes_mut("zero")?.fill(0);
        Ok(())
    }
    fn launch(&self, kernel: Kernel, shape: LaunchShape, args: &mut [Arg]) -> Result<()> {
        let found = self.kernel(kernel)?;
        let mut memory = GlobalMemory::new();
        let mut arguments = Vec::with_capacity(args.len());
        for (i, arg) in args.iter_mut().enumerate() {
            let name = found.parameters.get(i).map_or("?", |p| p.name.strip_prefix("p_").unwrap_or(&p.name));
            arguments.push(match arg {
                Arg::In(view) => Argument::Pointer(memory.lend(name, view.host_bytes(kernel.entry)?)),
                Arg::InOut(view) => {
                    Argument::Pointer(memory.lend_mut(name, view.reborrow().host_bytes_mut(kernel.entry)?, true))
                }
                Arg::Out(view) => {
                    Argument::Pointer(memory.lend_mut(name, view.reborrow().host_bytes_mut(kernel.entry)?, false))
                }
                Arg::Null => Argument::Pointer(0),
                Arg::U32(x) => Argument::U32(*x),
                Arg::U64(x) => Argument::U64(*x),
                Arg::F32(x) => Argument::F32(*x),
                Arg::Map(map) => {
                    let address = memory.lend(name, map.of.host_bytes(kernel.entry)?);
                    tensor_map(kernel.entry, map, address)?
                }
            });
        }
        let LaunchShape { grid, block, shared } = shape;
        let launch = KernelLaunch {
            kernel: found,
            grid,
            block,
            dynamic_shared: shared as usize,
            arguments: &arguments,
            schedule: self.schedule,
        };
        let failed = |what: String| Error::op(kernel.entry, format!("sim, variant {}: {what}", kernel.variant));
        let counts = launch.run(&mut memory).map_err(|report| failed(report.to_string()))?;
        memory.filled().map_err(failed)?;
        let LaunchCounts { instructions, global_sectors, .. } = counts;
        self.count(|tally| {
            tally.launches += 1;
            tally.instructions += instructions;
            tally.global_sectors += global_sectors;
        });
        Ok(())
    }
    fn gemm(&self, op: Gemm) -> Result<()> {
        self.count(|tally| tally.products += 1);
        gemm::gemm(&mut self.gemm.lock().unwrap_or_else(PoisonError::into_inner), op)
    }
    fn synchronize(&self) -> Result<()> {
        self.count(|tally| tally.waits += 1);
        Ok(())
    }
    /// Keeps the calls, to be executed again as they are.
    fn capture(&self, calls: Calls) -> Result<Graph> {
        Ok(Graph { calls, made: Box::new(()) })
    }
    fn replay(&self, graph: &mut Graph) -> Result<()> {
        self.count(|tally| tally.graphs += 1);
        run(self, &mut graph.calls)
    }
}

fn tensor_map(op: &'static str, map: &Map, address: u64) -> Result<Argument> {
    let element = map.of.dtype().size();
    let strides = map.strides.map(|elements| elements * element as u64).to_vec();
    let (sizes, tile, swizzle) = (map.sizes.to_vec(), map.tile.to_vec(), map.swizzle);
    let encoded = TensorMap { address, element, sizes, strides, tile, swizzle }.encode();
    encoded.map(Argument::TensorMap).map_err(|e| Error::op(op, format!("sim: {e}")))
}
