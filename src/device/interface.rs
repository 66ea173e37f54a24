//! The interface of a device: memory, marks in time, and one method per operation. A device enqueues on its compute
//! stream; the CPU runs synchronously. Never chooses how an operation is computed.
use super::ops::{
    AdamW, Attention, AttentionBackward, AttentionDelta, AttentionMerge, AttentionPaged, AttentionPass,
    AttentionPassBackward, AttentionRanges, BackwardOf, Balance, Bias, BiasBackward, Clamp, ClampBackward, ClampedGlu,
    ClampedGluBackward, ClipScale, CombineRows, CopyColumns, CrossEntropy, CrossEntropyFinish, CrossEntropyPart,
    DeltaRule, DeltaRuleBackward, Dequantize, DistillFinish, DistillPart, Dropout, DropoutRows, Embed, EmbedBackward,
    Encode, Expand, ExpertBias, ExpertBiasBackward, Fp8Gemm, Gelu, GeluBackward, Gemm, GemmThen, Glu, GluBackward,
    GroupedGemm, HeadSinks, HeadSinksBackward, LayerNorm, LayerNormBackward, PlaceRuns, Polynomial, QkNormRope,
    QkNormRopeBackward, Quantize, RaiseScales, RmsNorm, RmsNormBackward, Rope, Route, RouteBackward, RouteLoad,
    RouteScored, RouteScoredBackward, RowEntropies, ScaleBy, ScaleChosen, ScaleChosenBackward, Sgd, ShortConv,
    ShortConvBackward, Sigmoid, SigmoidGate, SigmoidGateBackward, SumSquares, TakeRows, WeighRows, Xielu,
    XieluBackward, XieluGrads,
};
use super::{Buf, View, ViewMut};
use flatshard_base::timeline::Mark;
use flatshard_base::{Category, DType, Error, Meter, Result};
use std::time::Instant;

/// The operations that layers are made of. Each takes a struct of operands, which documents what it computes: see
/// [`super::ops`]. Memory operations take views.
pub trait Device: Send + Sync {
    /// For messages and metrics: "cpu (avx512-bf16)".
    fn name(&self) -> String;
    fn meter(&self) -> &Meter;
    /// Zeroed, 4096-byte aligned (with huge pages where they help).
    fn alloc(&self, dtype: DType, len: usize, category: Category) -> Result<Buf>;
    /// Zeroed host memory that both this device and the host can access, for offloaded buffers. Counted as
    /// [`Category::Host`]. Call [`Device::synchronize`] before the host reads what the device wrote there, or
    /// overwrites what it may still read.
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf>;
    /// Whether buffers are addresses without memory, for a plan, so that uploads are pointless.
    fn is_unbacked(&self) -> bool {
        false
    }
    /// Whether an operation has finished when its call returns.
    fn is_synchronous(&self) -> bool {
        true
    }
    /// Whether each call launches a kernel, so that one call on a large range costs less than several on parts of it.
    fn launches_kernels(&self) -> bool {
        false
    }
    /// Host threads of this rank, for work on the host: initial weights, updates of offloaded state.
    fn host_threads(&self) -> usize {
        1
    }
    /// Another device, for one thread of the host, that computes in the memory of [`Device::alloc_host`]. Its results
    /// have the bits of this one's.
    fn on_host(&self) -> Box<dyn Device>;
    /// Waits until all submitted work is done.
    fn synchronize(&self) -> Result<()>;
    /// Starts marking. Call before each step that needs marks, with nothing in flight.
    fn begin_marks(&self) -> Result<()> {
        Ok(())
    }
    /// Ends marking.
    fn end_marks(&self) {}
    /// Marks this point of the compute stream, while a run is profiled.
    fn mark(&self) -> Result<Mark> {
        Ok(Mark::now())
    }
    /// When the compute stream reached a mark. Query marks in order, after [`Device::synchronize`]; old marks expire,
    /// which is an error.
    fn when(&self, mark: Mark) -> Result<Instant> {
        match mark {
            Mark::At(at) => Ok(at),
            Mark::Event(_) => Err(Error::op("when", "only a GPU has events")),
        }
    }
    /// Copies host bytes into `dst`, of the same length in bytes.
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()>;
    /// Waits for the compute stream, then copies to the host.
    fn download(&self, src: View, dst: &mut [u8]) -> Result<()>;
    /// The same for several buffers, with one wait.
    fn download_all(&self, parts: &mut [(View, &mut [u8])]) -> Result<()> {
        parts.iter_mut().try_for_each(|(src, dst)| self.download(*src, dst))
    }

    /// `dst = src`, cast if the dtypes (f32; bf16 or f16) differ. Assigns.
    fn copy(&self, src: View, dst: ViewMut) -> Result<()>;
    fn zero(&self, x: ViewMut) -> Result<()>;
    /// `y += x`, with y of x's dtype or f32. Adds.
    fn add(&self, x: View, y: ViewMut) -> Result<()>;
    /// `x *= factor`, in place.
    fn scale(&self, factor: f32, x: ViewMut) -> Result<()>;
    fn scale_by(&self, op: ScaleBy) -> Result<()>;

    fn gemm(&self, op: Gemm) -> Result<()>;
    fn gemm_then(&self, op: GemmThen) -> Result<()>;
    fn bias(&self, op: Bias) -> Result<()>;
    fn bias_backward(&self, op: BiasBackward) -> Result<()>;

    fn rmsnorm(&self, op: RmsNorm) -> Result<()>;
    fn rmsnorm_backward(&self, op: RmsNormBackward) -> Result<()>;
    fn layernorm(&self, op: LayerNorm) -> Result<()>;
    fn layernorm_backward(&self, op: LayerNormBackward) -> Result<()>;
    /// The same with weights that are stored minus 1.
    fn layernorm_from_one(&self, op: LayerNorm) -> Result<()>;
    fn layernorm_from_one_backward(&self, op: LayerNormBackward) -> Result<()>;

    fn rope(&self, op: Rope) -> Result<()>;
    fn qk_norm_rope(&self, op: QkNormRope) -> Result<()>;
    fn qk_norm_rope_backward(&self, op: QkNormRopeBackward) -> Result<()>;

    fn attention(&self, op: Attention) -> Result<()>;
    /// Number of f32 of scratch that the backward of an operation needs for up to `rows` rows of `dtype`, where kernels
    /// hand numbers on in memory, such as sums of the queries' gradients; otherwise 0.
    fn backward_scratch(&self, _of: &BackwardOf, _dtype: DType, _rows: usize) -> usize {
        0
    }
    fn attention_backward(&self, op: AttentionBackward) -> Result<()>;
    fn attention_ranges(&self, op: AttentionRanges) -> Result<()>;
    fn attention_pass(&self, op: AttentionPass) -> Result<()>;
    fn attention_paged(&self, op: AttentionPaged) -> Result<()>;
    fn attention_merge(&self, op: AttentionMerge) -> Result<()>;
    fn sink(&self, op: HeadSinks) -> Result<()>;
    fn sink_backward(&self, op: HeadSinksBackward) -> Result<()>;
    fn attention_delta(&self, op: AttentionDelta) -> Result<()>;
    fn attention_pass_backward(&self, op: AttentionPassBackward) -> Result<()>;
    fn copy_columns(&self, op: CopyColumns) -> Result<()>;

    fn swiglu(&self, op: Glu) -> Result<()>;
    fn swiglu_backward(&self, op: GluBackward) -> Result<()>;
    fn geglu(&self, op: Glu) -> Result<()>;
    fn geglu_backward(&self, op: GluBackward) -> Result<()>;
    fn gelu(&self, op: Gelu) -> Result<()>;
    fn gelu_backward(&self, op: GeluBackward) -> Result<()>;
    /// `y = x Phi(x)`, not the tanh form; assigns.
    fn gelu_exact(&self, op: Gelu) -> Result<()>;
    fn gelu_exact_backward(&self, op: GeluBackward) -> Result<()>;
    /// `y = max(x, 0)^2`; assigns.
    fn relu_squared(&self, op: Gelu) -> Result<()>;
    fn relu_squared_backward(&self, op: GeluBackward) -> Result<()>;
    fn clamp(&self, op: Clamp) -> Result<()>;
    fn clamp_backward(&self, op: ClampBackward) -> Result<()>;
    fn xielu(&self, op: Xielu) -> Result<()>;
    fn xielu_backward(&self, op: XieluBackward) -> Result<()>;
    fn xielu_grads(&self, op: XieluGrads) -> Result<()>;
    fn clamped_glu(&self, op: ClampedGlu) -> Result<()>;
    fn clamped_glu_backward(&self, op: ClampedGluBackward) -> Result<()>;
    fn dropout(&self, op: Dropout) -> Result<()>;
    fn dropout_rows(&self, op: DropoutRows) -> Result<()>;

    fn embed(&self, op: Embed) -> Result<()>;
    fn embed_backward(&self, op: EmbedBackward) -> Result<()>;
    fn cross_entropy(&self, op: CrossEntropy) -> Result<()>;
    /// Whether there is [`Device::row_entropies`], which no step needs.
    fn has_entropies(&self) -> bool {
        false
    }
    fn row_entropies(&self, _: RowEntropies) -> Result<()> {
        Err(Error::op(RowEntropies::OP, "this device does not compute entropies"))
    }
    fn cross_entropy_part(&self, op: CrossEntropyPart) -> Result<()>;
    fn cross_entropy_finish(&self, op: CrossEntropyFinish) -> Result<()>;
    fn distill_part(&self, op: DistillPart) -> Result<()>;
    fn distill_finish(&self, op: DistillFinish) -> Result<()>;

    fn sum_squares(&self, op: SumSquares) -> Result<()>;
    fn clip_scale(&self, op: ClipScale) -> Result<()>;
    fn adamw(&self, op: AdamW) -> Result<()>;
    fn sgd(&self, op: Sgd) -> Result<()>;
    fn polynomial(&self, op: Polynomial) -> Result<()>;
    fn expand(&self, op: Expand) -> Result<()>;
    fn quantize(&self, op: Quantize) -> Result<()>;
    fn dequantize(&self, op: Dequantize) -> Result<()>;
    fn raise_scales(&self, op: RaiseScales) -> Result<()>;
    fn encode(&self, op: Encode) -> Result<()>;
    fn fp8_gemm(&self, op: Fp8Gemm) -> Result<()>;

    fn route(&self, op: Route) -> Result<()>;
    fn route_backward(&self, op: RouteBackward) -> Result<()>;
    fn route_scored(&self, op: RouteScored) -> Result<()>;
    fn route_scored_backward(&self, op: RouteScoredBackward) -> Result<()>;
    fn scale_chosen(&self, op: ScaleChosen) -> Result<()>;
    fn scale_chosen_backward(&self, op: ScaleChosenBackward) -> Result<()>;
    fn route_load(&self, op: RouteLoad) -> Result<()>;
    fn balance(&self, op: Balance) -> Result<()>;
    fn take_rows(&self, op: TakeRows) -> Result<()>;
    fn place_runs(&self, op: PlaceRuns) -> Result<()>;
    fn combine_rows(&self, op: CombineRows) -> Result<()>;
    fn weigh_rows(&self, op: WeighRows) -> Result<()>;
    fn sigmoid(&self, op: Sigmoid) -> Result<()>;
    fn expert_bias(&self, op: ExpertBias) -> Result<()>;
    fn expert_bias_backward(&self, op: ExpertBiasBackward) -> Result<()>;
    fn grouped_gemm(&self, op: GroupedGemm) -> Result<()>;

    fn short_conv(&self, op: ShortConv) -> Result<()>;
    fn short_conv_backward(&self, op: ShortConvBackward) -> Result<()>;
    fn delta_rule(&self, op: DeltaRule) -> Result<()>;
    fn delta_rule_backward(&self, op: DeltaRuleBackward) -> Result<()>;
    fn sigmoid_gate(&self, op: SigmoidGate) -> Result<()>;
    fn sigmoid_gate_backward(&self, op: SigmoidGateBackward) -> Result<()>;
}
