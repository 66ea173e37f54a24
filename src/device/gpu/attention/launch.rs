//! Shared by the launches of all attention kernels: their last arguments, their grids, and the outputs of gradients.
//! Never chooses a kernel.
use crate::gpu::driver::{Arg, Kernel, LaunchShape};
use crate::gpu::launch::GpuDevice;
use crate::{View, ViewMut};
use flatshard_base::Result;
use flatshard_ptx::kernels::attention;

/// Alignment in bytes of rows and operands for the tensor-core kernels.
pub const VECTOR: usize = 16;

/// The last arguments of every kernel: attention ranges and row layout.
pub struct TailArgs<'a> {
    pub bounds: View<'a>,
    /// Whether bounds are each row's document; otherwise they are ranges.
    pub packed: bool,
    pub queries: usize,
    pub keys: usize,
    pub q_row: usize,
    pub kv_row: usize,
    pub out_row: usize,
}

/// `args!(tail, shape; first ..)`: an array of the first arguments followed by those of a [`TailArgs`].
macro_rules! args {
    ($tail:expr, $a:expr; $($first:expr),*) => {{
        let (t, a): (&TailArgs, &AttentionShape) = (&$tail, $a);
        &mut [
            $($first,)* Arg::In(t.bounds), Arg::U32(t.packed.into()), Arg::U32(a.window.min(u32::MAX as usize) as u32),
            Arg::U32(t.queries as u32), Arg::U32(t.keys as u32), Arg::U32(t.q_row as u32), Arg::U32(t.kv_row as u32),
            Arg::U32(t.out_row as u32), Arg::U32(a.heads as u32), Arg::U32(a.kv_heads as u32),
            Arg::U32(a.head_dim as u32), Arg::F32(a.scale), Arg::F32(a.softcap),
        ]
    }};
}

pub fn launch(
    gpu: &GpuDevice,
    kernel: &attention::AttentionKernel,
    rows: usize,
    heads: usize,
    args: &mut [Arg],
) -> Result<()> {
    launch_grid(gpu, kernel, [(rows as u32).div_ceil(kernel.rows), heads as u32], args)
}
pub fn launch_grid(
    gpu: &GpuDevice,
    kernel: &attention::AttentionKernel,
    [x, y]: [u32; 2],
    args: &mut [Arg],
) -> Result<()> {
    let attention::AttentionKernel { variant, entry, threads, shared, .. } = *kernel;
    gpu.driver.launch(Kernel { variant, entry }, LaunchShape { grid: [x, y, 1], block: [threads, 1, 1], shared }, args)
}

/// Outputs of gradients: queries, keys and values in one row, or queries in rows of their own.
pub enum Gradients<'a> {
    /// The gradients of keys start at the given element.
    Fused(ViewMut<'a>, usize),
    Apart([ViewMut<'a>; 2]),
}

impl Gradients<'_> {
    pub fn of_queries(&mut self) -> ViewMut<'_> {
        match self {
            Gradients::Fused(all, _) => all.reborrow(),
            Gradients::Apart([dq, _]) => dq.reborrow(),
        }
    }
    pub fn of_keys(&mut self) -> ViewMut<'_> {
        match self {
            Gradients::Fused(all, at) => {
                let len = all.len();
                all.reborrow().slice(*at..len)
            }
            Gradients::Apart([_, dkv]) => dkv.reborrow(),
        }
    }
}
pub(super) use args;
