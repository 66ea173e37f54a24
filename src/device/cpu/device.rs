//! The CPU device: its operations, each in a line, which hands it to its family in the compiled form for dtype and
//! vectors. Runs every operation at once, on the caller's thread. Never computes itself.
use super::simd::Level;
use super::{activation, attention, dropout, element, embed, gemm, loss, memory, norm, optim, reduce, ring, rope};
use crate::base::{Category, DType, Error, Meter, Result};
use crate::device::buf::Place;
use crate::device::ops::{
    AdamW, Attention, AttentionBackward, AttentionDelta, AttentionMerge, AttentionPass, AttentionPassBackward,
    AttentionRanges, AttentionShape, Bias, BiasBackward, ClipScale, CopyColumns, CrossEntropy, CrossEntropyFinish,
    CrossEntropyPart, Dropout, DropoutRows, Embed, EmbedBackward, Gelu, GeluBackward, Gemm, GemmThen, Glu, GluBackward,
    LayerNorm, LayerNormBackward, QkNormRope, QkNormRopeBackward, RmsNorm, RmsNormBackward, Rope, Sgd, SumSquares,
};
use crate::device::{Buf, Device, View, ViewMut, epilogue, unbacked};
use half::{bf16, f16};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub struct CpuDevice {
    meter: Meter,
    level: Level,
    gemm: Mutex<gemm::GemmScratch>,
    attention: Mutex<attention::AttentionScratch>,
    /// Buffers are addresses alone. How much scratch attention's backward pass takes where the plan is for.
    unbacked: Option<AttentionSums>,
}

/// As [`Device::attention_sums`].
pub type AttentionSums = fn(&AttentionShape, DType, usize) -> usize;

impl CpuDevice {
    /// With the widest vectors that this CPU has.
    pub fn new(meter: Meter) -> CpuDevice {
        CpuDevice { meter, level: Level::best(), gemm: Mutex::default(), attention: Mutex::default(), unbacked: None }
    }
    /// With narrower ones, for tests and comparisons (the matrix product chooses for itself). An error where this CPU
    /// lacks them.
    pub fn with_level(meter: Meter, level: Level) -> Result<CpuDevice> {
        if !level.available() {
            return Err(Error::op("cpu device", format!("this CPU has no {level}, at most {}", Level::best())));
        }
        Ok(CpuDevice { level, ..CpuDevice::new(meter) })
    }
    /// A device to plan with: it allocates addresses without memory, drops what is uploaded, and computes nothing.
    pub fn unbacked(meter: Meter, sums: AttentionSums) -> CpuDevice {
        CpuDevice { unbacked: Some(sums), ..CpuDevice::new(meter) }
    }
    /// With another kernel for matrix products, for tests and comparisons. An error where this machine lacks it.
    pub fn with_kernel(meter: Meter, kernel: gemm::GemmKernel) -> Result<CpuDevice> {
        Ok(CpuDevice { gemm: Mutex::new(gemm::GemmScratch::with_kernel(kernel)?), ..CpuDevice::new(meter) })
    }
}

/// Scratch holds nothing between calls, so what a panicking thread left there does no harm.
fn lock<T>(scratch: &Mutex<T>) -> MutexGuard<'_, T> {
    scratch.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `$call` at the device's level with the type `$T` of an operand. Families check their operands, and so that it
/// is one of these.
macro_rules! floats {
    ($dev:ident, $dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            DType::Bf16 => floats!(@run $dev, $T = bf16, $call),
            DType::F16 => floats!(@run $dev, $T = f16, $call),
            _ => floats!(@run $dev, $T = f32, $call),
        }
    };
    (@run $dev:ident, $T:ident = $type:ty, $call:expr) => {{
        type $T = $type;
        $dev.level.run(
            #[inline(always)]
            || $call,
        )
    }};
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        format!("cpu ({}, {})", self.level, lock(&self.gemm).kernel_name())
    }
    fn meter(&self) -> &Meter {
        &self.meter
    }
    fn alloc(&self, dtype: DType, len: usize, category: Category) -> Result<Buf> {
        let lease = self.meter.lease_of(category, dtype, len, len * dtype.size());
        if self.is_unbacked() { unbacked::alloc(dtype, len, lease) } else { memory::alloc(dtype, len, lease) }
    }
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf> {
        let lease = self.meter.lease_of(Category::Host, dtype, len, len * dtype.size());
        match self.is_unbacked() {
            true => unbacked::alloc_host(dtype, len, lease),
            false => memory::alloc_at(Place::Mapped, dtype, len, lease),
        }
    }
    fn is_unbacked(&self) -> bool {
        self.unbacked.is_some()
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()> {
        if self.is_unbacked() { Ok(()) } else { memory::upload(src, dst) }
    }
    fn download(&self, src: View, dst: &mut [u8]) -> Result<()> {
        memory::download(src, dst)
    }

    fn copy(&self, src: View, dst: ViewMut) -> Result<()> {
        match src.dtype() {
            dtype if dtype == dst.dtype() => memory::copy(src, dst),
            DType::F32 => floats!(self, dst.dtype(), T => element::cast::<f32, T>(src, dst)),
            dtype => floats!(self, dtype, T => element::cast::<T, f32>(src, dst)),
        }
    }
    fn zero(&self, x: ViewMut) -> Result<()> {
        memory::zero(x)
    }
    fn add(&self, x: View, y: ViewMut) -> Result<()> {
        match x.dtype() == y.dtype() {
            true => floats!(self, x.dtype(), T => element::add::<T, T>(x, y)),
            false => floats!(self, x.dtype(), T => element::add::<T, f32>(x, y)),
        }
    }
    fn scale(&self, factor: f32, x: ViewMut) -> Result<()> {
        floats!(self, x.dtype(), T => element::scale::<T>(factor, x))
    }

    fn gemm(&self, op: Gemm) -> Result<()> {
        gemm::gemm(&mut lock(&self.gemm), op)
    }
    fn gemm_then(&self, op: GemmThen) -> Result<()> {
        epilogue::in_passes(self, op)
    }
    fn bias(&self, op: Bias) -> Result<()> {
        floats!(self, op.y.dtype(), T => norm::bias::<T>(op))
    }
    fn bias_backward(&self, op: BiasBackward) -> Result<()> {
        floats!(self, op.dy.dtype(), T => norm::bias_backward::<T>(op))
    }

    fn rmsnorm(&self, op: RmsNorm) -> Result<()> {
        floats!(self, op.x.dtype(), T => norm::rmsnorm::<T>(op))
    }
    fn rmsnorm_backward(&self, op: RmsNormBackward) -> Result<()> {
        floats!(self, op.x.dtype(), T => norm::rmsnorm_backward::<T>(op))
    }
    fn layernorm(&self, op: LayerNorm) -> Result<()> {
        floats!(self, op.x.dtype(), T => norm::layernorm::<T>(op))
    }
    fn layernorm_backward(&self, op: LayerNormBackward) -> Result<()> {
        floats!(self, op.x.dtype(), T => norm::layernorm_backward::<T>(op))
    }

    fn rope(&self, op: Rope) -> Result<()> {
        floats!(self, op.qkv.dtype(), T => rope::rope::<T>(op))
    }
    fn qk_norm_rope(&self, op: QkNormRope) -> Result<()> {
        floats!(self, op.qkv.dtype(), T => rope::qk_norm_rope::<T>(op))
    }
    fn qk_norm_rope_backward(&self, op: QkNormRopeBackward) -> Result<()> {
        floats!(self, op.qkv.dtype(), T => rope::qk_norm_rope_backward::<T>(op))
    }

    fn attention(&self, op: Attention) -> Result<()> {
        floats!(self, op.qkv.dtype(), T => attention::forward::<T>(self.level, &mut lock(&self.attention), op))
    }
    fn attention_sums(&self, shape: &AttentionShape, dtype: DType, queries: usize) -> usize {
        self.unbacked.map_or(0, |sums| sums(shape, dtype, queries))
    }
    fn attention_backward(&self, op: AttentionBackward) -> Result<()> {
        floats!(self, op.qkv.dtype(), T => attention::backward::<T>(self.level, &mut lock(&self.attention), op))
    }
    fn attention_ranges(&self, op: AttentionRanges) -> Result<()> {
        ring::ranges(op)
    }
    fn attention_pass(&self, op: AttentionPass) -> Result<()> {
        floats!(self, op.qkv.dtype(), T => ring::forward::<T>(self.level, &mut lock(&self.attention), op))
    }
    fn attention_merge(&self, op: AttentionMerge) -> Result<()> {
        ring::merge(op)
    }
    fn attention_delta(&self, op: AttentionDelta) -> Result<()> {
        floats!(self, op.o.dtype(), T => attention::delta::<T>(op))
    }
    fn attention_pass_backward(&self, op: AttentionPassBackward) -> Result<()> {
        floats!(self, op.qkv.dtype(), T => ring::backward::<T>(self.level, &mut lock(&self.attention), op))
    }
    fn copy_columns(&self, op: CopyColumns) -> Result<()> {
        floats!(self, op.src.dtype(), S => floats!(self, op.dst.dtype(), D => ring::copy_columns::<S, D>(op)))
    }

    fn swiglu(&self, op: Glu) -> Result<()> {
        floats!(self, op.gate.dtype(), T => activation::swiglu::<T>(op))
    }
    fn swiglu_backward(&self, op: GluBackward) -> Result<()> {
        floats!(self, op.gate.dtype(), T => activation::swiglu_backward::<T>(op))
    }
    fn geglu(&self, op: Glu) -> Result<()> {
        floats!(self, op.gate.dtype(), T => activation::geglu::<T>(op))
    }
    fn geglu_backward(&self, op: GluBackward) -> Result<()> {
        floats!(self, op.gate.dtype(), T => activation::geglu_backward::<T>(op))
    }
    fn gelu(&self, op: Gelu) -> Result<()> {
        floats!(self, op.x.dtype(), T => activation::gelu::<T>(op))
    }
    fn gelu_backward(&self, op: GeluBackward) -> Result<()> {
        floats!(self, op.x.dtype(), T => activation::gelu_backward::<T>(op))
    }
    fn dropout(&self, op: Dropout) -> Result<()> {
        let key = dropout::key(&op)?;
        floats!(self, op.x.dtype(), T => dropout::dropout::<T>(op, key))
    }
    fn dropout_rows(&self, op: DropoutRows) -> Result<()> {
        let key = dropout::rows_key(&op)?;
        floats!(self, op.x.dtype(), T => dropout::dropout_rows::<T>(op, key))
    }

    fn embed(&self, op: Embed) -> Result<()> {
        floats!(self, op.w.dtype(), T => embed::embed::<T>(op))
    }
    fn embed_backward(&self, op: EmbedBackward) -> Result<()> {
        floats!(self, op.dy.dtype(), T => embed::embed_backward::<T>(op))
    }
    fn cross_entropy(&self, op: CrossEntropy) -> Result<()> {
        floats!(self, op.logits.dtype(), T => loss::cross_entropy::<T>(op))
    }
    fn cross_entropy_part(&self, op: CrossEntropyPart) -> Result<()> {
        floats!(self, op.logits.dtype(), T => loss::part::<T>(op))
    }
    fn cross_entropy_finish(&self, op: CrossEntropyFinish) -> Result<()> {
        floats!(self, op.logits.dtype(), T => loss::finish::<T>(op))
    }

    fn sum_squares(&self, op: SumSquares) -> Result<()> {
        self.level.run(
            #[inline(always)]
            || reduce::sum_squares(op),
        )
    }
    fn clip_scale(&self, op: ClipScale) -> Result<()> {
        reduce::clip_scale(op)
    }
    fn adamw(&self, op: AdamW) -> Result<()> {
        floats!(self, op.out.as_ref().map_or(DType::F32, ViewMut::dtype), T => optim::adamw::<T>(op))
    }
    fn sgd(&self, op: Sgd) -> Result<()> {
        floats!(self, op.out.as_ref().map_or(DType::F32, ViewMut::dtype), T => optim::sgd::<T>(op))
    }
}
