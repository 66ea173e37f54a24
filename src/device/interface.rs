//! The interface of a device: memory, points in time, and an operation a line. A device enqueues on its compute stream;
//! the CPU runs at once. Never chooses how an operation is computed.
use super::ops::{
    AdamW, Attention, AttentionBackward, AttentionDelta, AttentionMerge, AttentionPass, AttentionPassBackward,
    AttentionRanges, AttentionShape, Bias, BiasBackward, ClipScale, CopyColumns, CrossEntropy, CrossEntropyFinish,
    CrossEntropyPart, Dropout, DropoutRows, Embed, EmbedBackward, Gelu, GeluBackward, Gemm, GemmThen, Glu, GluBackward,
    LayerNorm, LayerNormBackward, QkNormRope, QkNormRopeBackward, RmsNorm, RmsNormBackward, Rope, Sgd, SumSquares,
};
use super::{Buf, View, ViewMut};
use crate::base::timeline::Mark;
use crate::base::{Category, DType, Error, Meter, Result};
use std::time::Instant;

/// What layers are made of. Each operation takes the struct of its operands, which says what it computes: see
/// [`super::ops`]. Moving memory takes views.
pub trait Device: Send + Sync {
    /// For people and metrics: "cpu (avx512-bf16)".
    fn name(&self) -> String;
    fn meter(&self) -> &Meter;
    /// Zeroed, 4096-byte aligned (huge pages are asked for where they help).
    fn alloc(&self, dtype: DType, len: usize, category: Category) -> Result<Buf>;
    /// Zeroed host memory that this device reaches as it does its own, but for the speed, and so does the host: where
    /// offloaded buffers are. Counted as [`Category::Host`]. Before the host reads what the device wrote there, or
    /// writes what it may still read: [`Device::synchronize`].
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf>;
    /// Whether buffers are addresses without memory, for a plan: nothing is worth uploading.
    fn is_unbacked(&self) -> bool {
        false
    }
    /// Whether an operation is done when its call returns.
    fn is_synchronous(&self) -> bool {
        true
    }
    /// Waits until the device has done all that it was given.
    fn synchronize(&self) -> Result<()>;
    /// Before each step whose marks are wanted, with nothing under way.
    fn begin_marks(&self) -> Result<()> {
        Ok(())
    }
    /// No more marks are wanted.
    fn end_marks(&self) {}
    /// This point of the compute stream in time, while a run is profiled.
    fn mark(&self) -> Result<Mark> {
        Ok(Mark::now())
    }
    /// When the compute stream came to a mark: in order, after [`Device::synchronize`], and before so many more were
    /// made that it is lost (then an error).
    fn when(&self, mark: Mark) -> Result<Instant> {
        match mark {
            Mark::At(at) => Ok(at),
            Mark::Event(_) => Err(Error::op("when", "events are a GPU's")),
        }
    }
    /// Host bytes into `dst`; lengths in bytes are equal.
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()>;
    /// Waits for the compute stream, then copies to the host.
    fn download(&self, src: View, dst: &mut [u8]) -> Result<()>;
    /// The same of several, with one wait.
    fn download_all(&self, parts: &mut [(View, &mut [u8])]) -> Result<()> {
        parts.iter_mut().try_for_each(|(src, dst)| self.download(*src, dst))
    }

    /// `dst = src`, cast where the dtypes (f32; bf16 or f16) differ. Assigns.
    fn copy(&self, src: View, dst: ViewMut) -> Result<()>;
    fn zero(&self, x: ViewMut) -> Result<()>;
    /// `y += x`, y like x or f32. Adds.
    fn add(&self, x: View, y: ViewMut) -> Result<()>;
    /// `x *= factor`, in place.
    fn scale(&self, factor: f32, x: ViewMut) -> Result<()>;

    fn gemm(&self, op: Gemm) -> Result<()>;
    fn gemm_then(&self, op: GemmThen) -> Result<()>;
    fn bias(&self, op: Bias) -> Result<()>;
    fn bias_backward(&self, op: BiasBackward) -> Result<()>;

    fn rmsnorm(&self, op: RmsNorm) -> Result<()>;
    fn rmsnorm_backward(&self, op: RmsNormBackward) -> Result<()>;
    fn layernorm(&self, op: LayerNorm) -> Result<()>;
    fn layernorm_backward(&self, op: LayerNormBackward) -> Result<()>;

    fn rope(&self, op: Rope) -> Result<()>;
    fn qk_norm_rope(&self, op: QkNormRope) -> Result<()>;
    fn qk_norm_rope_backward(&self, op: QkNormRopeBackward) -> Result<()>;

    fn attention(&self, op: Attention) -> Result<()>;
    /// Numbers (f32) of scratch, `sums`, that the backward passes of attention take for up to so many queries of
    /// `dtype`: where kernels add up gradients of queries in memory. Elsewhere none.
    fn attention_sums(&self, _shape: &AttentionShape, _dtype: DType, _queries: usize) -> usize {
        0
    }
    fn attention_backward(&self, op: AttentionBackward) -> Result<()>;
    fn attention_ranges(&self, op: AttentionRanges) -> Result<()>;
    fn attention_pass(&self, op: AttentionPass) -> Result<()>;
    fn attention_merge(&self, op: AttentionMerge) -> Result<()>;
    fn attention_delta(&self, op: AttentionDelta) -> Result<()>;
    fn attention_pass_backward(&self, op: AttentionPassBackward) -> Result<()>;
    fn copy_columns(&self, op: CopyColumns) -> Result<()>;

    fn swiglu(&self, op: Glu) -> Result<()>;
    fn swiglu_backward(&self, op: GluBackward) -> Result<()>;
    fn geglu(&self, op: Glu) -> Result<()>;
    fn geglu_backward(&self, op: GluBackward) -> Result<()>;
    fn gelu(&self, op: Gelu) -> Result<()>;
    fn gelu_backward(&self, op: GeluBackward) -> Result<()>;
    fn dropout(&self, op: Dropout) -> Result<()>;
    fn dropout_rows(&self, op: DropoutRows) -> Result<()>;

    fn embed(&self, op: Embed) -> Result<()>;
    fn embed_backward(&self, op: EmbedBackward) -> Result<()>;
    fn cross_entropy(&self, op: CrossEntropy) -> Result<()>;
    fn cross_entropy_part(&self, op: CrossEntropyPart) -> Result<()>;
    fn cross_entropy_finish(&self, op: CrossEntropyFinish) -> Result<()>;

    fn sum_squares(&self, op: SumSquares) -> Result<()>;
    fn clip_scale(&self, op: ClipScale) -> Result<()>;
    fn adamw(&self, op: AdamW) -> Result<()>;
    fn sgd(&self, op: Sgd) -> Result<()>;
}
