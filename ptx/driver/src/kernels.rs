//! PTX modules, their functions, and launches in the emulator. Never runs a kernel before its stream reaches it.
use crate::code::{Code, CuResult, say};
use crate::queue::{Node, at_once};
use crate::settings::SimSettings;
use flatshard_ptx::emulate::{Argument, FindingKind, GlobalMemory, KernelLaunch, PtxKernel, parse};
use std::collections::HashMap;
use std::sync::Arc;

/// The newest PTX that a driver of that CUDA version accepts: CUDA 12.0 supports PTX 8.0, 12.8 supports 8.7.
fn newest_ptx(cuda: i32) -> (i32, i32) {
    (cuda / 1000 - 4, (cuda % 1000 / 10).min(7))
}

#[derive(Default)]
pub struct Kernels {
    modules: HashMap<u64, Arc<Vec<PtxKernel>>>,
    functions: HashMap<u64, LoadedFunction>,
}

#[derive(Clone)]
pub struct LoadedFunction {
    pub module: u64,
    kernels: Arc<Vec<PtxKernel>>,
    index: usize,
    /// Bytes of dynamic shared memory that a launch may request.
    pub dynamic: usize,
}

/// The error in a module or remarks about it, worded as a compiler's log.
pub type CompileLog = String;

/// What a driver's compiler remarks: before CUDA 12.4 it serializes the products of the backward pass for sm_90a.
pub fn remarks(settings: &SimSettings, ptx: &str) -> CompileLog {
    match settings.cuda < 12_040 && ptx.contains("wgmma.mma_async") && ptx.contains(".entry attention_backward") {
        true => "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due \
                 to non wgmma instructions defining accumulator registers of a wgmma between start and end of the \
                 pipeline stage in the function 'attention_backward'\n"
            .to_string(),
        false => String::new(),
    }
}

/// Refuses what a driver's compiler would refuse, and parses the rest.
pub fn compile(settings: &SimSettings, ptx: &str) -> std::result::Result<Arc<Vec<PtxKernel>>, (Code, CompileLog)> {
    let directive = |name: &str| {
        let line = ptx.lines().find_map(|line| line.trim_start().strip_prefix(name));
        line.map(|rest| rest.trim().trim_end_matches(';').to_string()).unwrap_or_default()
    };
    let (version, target) = (directive(".version"), directive(".target"));
    let number = version.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    match number {
        Some(number) if number <= newest_ptx(settings.cuda) => {}
        _ => return Err((Code::UNSUPPORTED_PTX_VERSION, format!("ptxas: Unsupported .version {version}"))),
    }
    let name = target.split([',', ' ']).next().unwrap_or("").trim_start_matches("sm_");
    let runs = match name.strip_suffix(['a', 'f']) {
        Some(only) => only.parse() == Ok(settings.arch),
        None => name.parse().is_ok_and(|least: u32| settings.arch >= least),
    };
    if !runs {
        return Err((Code::NO_BINARY_FOR_GPU, format!("ptxas: .target {target} on sm_{}", settings.arch)));
    }
    let entry = ptx.split_once(".entry").map_or("ptx", |(_, rest)| rest.split('(').next().unwrap_or("ptx").trim());
    match parse(&format!("{entry}.ptx"), ptx) {
        Ok(kernels) => Ok(Arc::new(kernels)),
        Err(what) => Err((Code::INVALID_PTX, what)),
    }
}

impl Kernels {
    pub fn add(&mut self, handle: u64, kernels: Arc<Vec<PtxKernel>>) {
        self.modules.insert(handle, kernels);
    }
    pub fn remove(&mut self, module: u64) -> CuResult {
        self.functions.retain(|_, f| f.module != module);
        self.modules.remove(&module).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }
    /// The handle of a function in a module, created at the first request.
    pub fn function(&mut self, module: u64, name: &str, fresh: u64) -> CuResult<u64> {
        let kernels = self.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
        let index = kernels.iter().position(|k| k.name == name).ok_or(Code::NOT_FOUND)?;
        if let Some((known, _)) = self.functions.iter().find(|(_, f)| f.module == module && f.index == index) {
            return Ok(*known);
        }
        let mut function = LoadedFunction { module, kernels: kernels.clone(), index, dynamic: 0 };
        function.dynamic = UNASKED.saturating_sub(function.shared());
        self.functions.insert(fresh, function);
        Ok(fresh)
    }
    pub fn get(&self, function: u64) -> CuResult<&LoadedFunction> {
        self.functions.get(&function).ok_or(Code::INVALID_HANDLE)
    }
    pub fn get_mut(&mut self, function: u64) -> CuResult<&mut LoadedFunction> {
        self.functions.get_mut(&function).ok_or(Code::INVALID_HANDLE)
    }
}

/// Shared memory per block without opt-in.
pub const UNASKED: usize = 48 << 10;
/// Threads, registers and bytes of shared memory per multiprocessor, and the maximum per block (CUDA C++ Programming
/// Guide, table 27).
pub const THREADS: usize = 2048;
pub const REGISTERS: usize = 65536;
pub fn shared_most(arch: u32) -> usize {
    match arch {
        80 => 163 << 10,
        86 | 89 | 120 => 99 << 10,
        _ => 227 << 10,
    }
}

/// Grid, block, bytes of dynamic shared memory.
#[derive(Clone, Copy)]
pub struct GridShape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: usize,
}

impl LoadedFunction {
    pub fn kernel(&self) -> &PtxKernel {
        &self.kernels[self.index]
    }
    /// Bytes of each parameter, in order.
    pub fn parameters(&self) -> Vec<usize> {
        self.kernel().parameters.iter().map(|p| p.bytes).collect()
    }
    /// Static shared memory in bytes.
    pub fn shared(&self) -> usize {
        self.kernel().shared.iter().map(|array| array.bytes).sum()
    }
    pub fn threads(&self) -> usize {
        self.kernel().max_threads.unwrap_or(1024) as usize
    }
    pub fn registers(&self) -> usize {
        self.kernel().registers_a_thread(self.threads()) as usize
    }
    /// Blocks of that many threads per multiprocessor.
    pub fn blocks(&self, arch: u32, threads: usize, dynamic: usize) -> usize {
        let registers = self.kernel().registers_a_thread(threads) as usize * threads;
        let shared = (self.shared() + dynamic + 1024) / 128 * 128;
        (THREADS / threads.max(1)).min(REGISTERS / registers.max(1)).min((shared_most(arch) + 1024) / shared).min(32)
    }

    /// A launch with these parameters, each of its declared size. Errors that a driver detects at the call are returned
    /// now.
    pub fn launch(&self, shape: GridShape, arguments: &[Vec<u8>]) -> CuResult<Node> {
        let threads: u64 = shape.block.iter().map(|&n| u64::from(n)).product();
        let limits = [shape.grid[1], shape.grid[2]].iter().all(|&n| n <= 65535) && shape.block[2] <= 64;
        if shape.grid.contains(&0) || threads == 0 || threads > self.threads() as u64 || !limits {
            return Err(Code::INVALID_VALUE);
        }
        if !shape.grid[0].is_multiple_of(self.kernel().cluster) {
            return Err(Code::INVALID_CLUSTER_SIZE);
        }
        if shape.shared > self.dynamic {
            return Err(Code::INVALID_VALUE);
        }
        if REGISTERS / (self.kernel().registers_a_thread(threads as usize) as usize).max(1) < threads as usize {
            return Err(Code::LAUNCH_OUT_OF_RESOURCES);
        }
        let arguments = arguments.iter().map(|bytes| argument(bytes)).collect::<CuResult<Vec<Argument>>>()?;
        let (kernels, index) = (self.kernels.clone(), self.index);
        Ok(at_once(move |memory| {
            let GridShape { grid, block, shared } = shape;
            let kernel = &kernels[index];
            let launch =
                KernelLaunch { kernel, grid, block, dynamic_shared: shared, arguments: &arguments, schedule: 0 };
            let run = |memory: &mut GlobalMemory| launch.run(memory);
            memory.lend(run).map(|_| ()).map_err(|report| {
                say(&report.to_string());
                let kind = report.findings.first().map(|finding| finding.kind);
                match kind {
                    Some(FindingKind::OutOfBounds | FindingKind::ReadOnly) => Code::ILLEGAL_ADDRESS,
                    Some(FindingKind::Misaligned) => Code::MISALIGNED_ADDRESS,
                    Some(FindingKind::Deadlock | FindingKind::Endless) => Code::LAUNCH_TIMEOUT,
                    _ => Code::LAUNCH_FAILED,
                }
            })
        }))
    }
    /// A launch of this function that faults like an invalid address.
    pub fn faulty(&self) -> Node {
        let name = self.kernel().name.clone();
        at_once(move |_| {
            say(&format!("planted fault: out of bounds: {name}"));
            Err(Code::ILLEGAL_ADDRESS)
        })
    }
}

/// Converts by size, the only thing a launch knows about a parameter's type.
fn argument(bytes: &[u8]) -> CuResult<Argument> {
    if let Ok(bytes) = <[u8; 4]>::try_from(bytes) {
        return Ok(Argument::U32(u32::from_le_bytes(bytes)));
    }
    if let Ok(bytes) = <[u8; 8]>::try_from(bytes) {
        return Ok(Argument::U64(u64::from_le_bytes(bytes)));
    }
    <[u8; 128]>::try_from(bytes).map(Argument::TensorMap).map_err(|_| Code::INVALID_VALUE)
}
