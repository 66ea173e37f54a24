//! Dispatches the operations of a GPU to their families. Never launches itself.
use super::launch::GpuDevice;
use super::{
    activation, attention, delta, distill, element, embed, expand, experts, fp8, loss, norm, optim, ring, rope, scaled,
    scratch_of,
};
use crate::cpu::CpuDevice;
use crate::ops::{
    AdamW, Attention, AttentionBackward, AttentionDelta, AttentionMerge, AttentionPaged, AttentionPass,
    AttentionPassBackward, AttentionRanges, BackwardOf, Balance, Bias, BiasBackward, Clamp, ClampBackward, ClampedGlu,
    ClampedGluBackward, ClipScale, CombineRows, CopyColumns, CrossEntropy, CrossEntropyFinish, CrossEntropyPart,
    DeltaRule, DeltaRuleBackward, Dequantize, DistillFinish, DistillPart, Dropout, DropoutRows, Embed, EmbedBackward,
    Encode, Expand, ExpertBias, ExpertBiasBackward, Fp8Gemm, Gelu, GeluBackward, Gemm, GemmThen, Glu, GluBackward,
    GroupedGemm, HeadSinks, HeadSinksBackward, LayerNorm, LayerNormBackward, PlaceRuns, Polynomial, QkNormRope,
    QkNormRopeBackward, Quantize, RaiseScales, RmsNorm, RmsNormBackward, Rope, Route, RouteBackward, RouteLoad,
    RouteScored, RouteScoredBackward, ScaleBy, ScaleChosen, ScaleChosenBackward, Sgd, ShortConv, ShortConvBackward,
    Sigmoid, SigmoidGate, SigmoidGateBackward, SumSquares, TakeRows, WeighRows, Xielu, XieluBackward, XieluGrads,
};
use crate::{Buf, Device, View, ViewMut, epilogue};
use flatshard_base::timeline::Mark;
use flatshard_base::{Category, DType, Error, Meter, Result};
use std::time::Instant;

impl Device for GpuDevice {
    fn name(&self) -> String {
        self.driver.name()
    }
    fn meter(&self) -> &Meter {
        &self.meter
    }
    fn alloc(&self, dtype: DType, len: usize, category: Category) -> Result<Buf> {
        let bytes = len.checked_mul(dtype.size()).filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes =
            bytes.ok_or_else(|| Error::op("alloc", format!("{len} elements of {dtype} exceed the address space")))?;
        self.driver.alloc(dtype, len, category, self.meter.lease_of(category, dtype, len, bytes))
    }
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf> {
        self.driver.alloc_host(dtype, len, self.meter.lease_of(Category::Host, dtype, len, len * dtype.size()))
    }
    fn is_synchronous(&self) -> bool {
        self.driver.waits()
    }
    fn launches_kernels(&self) -> bool {
        true
    }
    fn host_threads(&self) -> usize {
        self.host_threads
    }
    fn on_host(&self) -> Box<dyn Device> {
        Box::new(CpuDevice::new(Meter::default()))
    }
    fn synchronize(&self) -> Result<()> {
        self.driver.synchronize()
    }
    fn begin_marks(&self) -> Result<()> {
        self.driver.begin_marks()
    }
    fn end_marks(&self) {
        self.driver.end_marks();
    }
    fn mark(&self) -> Result<Mark> {
        self.driver.mark()
    }
    fn when(&self, mark: Mark) -> Result<Instant> {
        self.driver.when(mark)
    }
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()> {
        if src.len() != dst.bytes() {
            return Err(Error::op("upload", format!("{} bytes into {}", src.len(), dst.bytes())));
        }
        self.driver.upload(src, dst)
    }
    fn download(&self, src: View, dst: &mut [u8]) -> Result<()> {
        self.download_all(&mut [(src, dst)])
    }
    fn download_all(&self, parts: &mut [(View, &mut [u8])]) -> Result<()> {
        if let Some((src, dst)) = parts.iter().find(|(src, dst)| dst.len() != src.bytes()) {
            return Err(Error::op("download", format!("{} bytes into {}", src.bytes(), dst.len())));
        }
        self.raise_with(&mut self.scratch().faults, parts)
    }

    fn copy(&self, src: View, dst: ViewMut) -> Result<()> {
        element::copy(self, src, dst)
    }
    fn zero(&self, x: ViewMut) -> Result<()> {
        self.driver.zero(x)
    }
    fn add(&self, x: View, y: ViewMut) -> Result<()> {
        element::add(self, x, y)
    }
    fn scale(&self, factor: f32, x: ViewMut) -> Result<()> {
        element::scale(self, factor, x)
    }
    fn scale_by(&self, op: ScaleBy) -> Result<()> {
        element::scale_by(self, op)
    }

    fn gemm(&self, op: Gemm) -> Result<()> {
        op.check()?;
        if op.shape.is_empty() { Ok(()) } else { self.driver.gemm(op) }
    }
    fn gemm_then(&self, op: GemmThen) -> Result<()> {
        op.check()?;
        match op.shape.is_empty() {
            true => Ok(()),
            false if self.driver.fuses(&op)? => self.driver.gemm_then(op),
            false => epilogue::in_passes(self, op),
        }
    }
    fn bias(&self, op: Bias) -> Result<()> {
        element::bias(self, op)
    }
    fn bias_backward(&self, op: BiasBackward) -> Result<()> {
        element::bias_backward(self, op)
    }

    fn rmsnorm(&self, op: RmsNorm) -> Result<()> {
        norm::rmsnorm(self, op)
    }
    fn rmsnorm_backward(&self, op: RmsNormBackward) -> Result<()> {
        norm::rmsnorm_backward(self, op)
    }
    fn layernorm(&self, op: LayerNorm) -> Result<()> {
        norm::layernorm(self, op, false)
    }
    fn layernorm_backward(&self, op: LayerNormBackward) -> Result<()> {
        norm::layernorm_backward(self, op, false)
    }
    fn layernorm_from_one(&self, op: LayerNorm) -> Result<()> {
        norm::layernorm(self, op, true)
    }
    fn layernorm_from_one_backward(&self, op: LayerNormBackward) -> Result<()> {
        norm::layernorm_backward(self, op, true)
    }

    fn rope(&self, op: Rope) -> Result<()> {
        rope::rope(self, op)
    }
    fn qk_norm_rope(&self, op: QkNormRope) -> Result<()> {
        rope::qk_norm_rope(self, op)
    }
    fn qk_norm_rope_backward(&self, op: QkNormRopeBackward) -> Result<()> {
        rope::qk_norm_rope_backward(self, op)
    }

    fn attention(&self, op: Attention) -> Result<()> {
        attention::forward(self, op)
    }
    fn backward_scratch(&self, of: &BackwardOf, dtype: DType, rows: usize) -> usize {
        scratch_of(self.driver.arch(), of, dtype, rows)
    }
    fn attention_backward(&self, op: AttentionBackward) -> Result<()> {
        attention::backward(self, op)
    }
    fn attention_ranges(&self, op: AttentionRanges) -> Result<()> {
        ring::ranges(self, op)
    }
    fn attention_pass(&self, op: AttentionPass) -> Result<()> {
        attention::pass(self, op)
    }
    fn attention_paged(&self, op: AttentionPaged) -> Result<()> {
        attention::paged(self, op)
    }
    fn attention_merge(&self, op: AttentionMerge) -> Result<()> {
        ring::merge(self, op)
    }
    fn attention_delta(&self, op: AttentionDelta) -> Result<()> {
        attention::delta(self, op)
    }
    fn attention_pass_backward(&self, op: AttentionPassBackward) -> Result<()> {
        attention::pass_backward(self, op)
    }
    fn copy_columns(&self, op: CopyColumns) -> Result<()> {
        ring::copy_columns(self, op)
    }

    fn expand(&self, op: Expand) -> Result<()> {
        expand::expand(self, op)
    }
    fn quantize(&self, op: Quantize) -> Result<()> {
        fp8::quantize(self, op)
    }
    fn dequantize(&self, op: Dequantize) -> Result<()> {
        fp8::dequantize(self, op)
    }
    fn raise_scales(&self, op: RaiseScales) -> Result<()> {
        fp8::raise_scales(self, op)
    }
    fn encode(&self, op: Encode) -> Result<()> {
        fp8::encode(self, op)
    }
    fn fp8_gemm(&self, op: Fp8Gemm) -> Result<()> {
        scaled::product(self, op)
    }
    fn swiglu(&self, op: Glu) -> Result<()> {
        activation::swiglu(self, op)
    }
    fn swiglu_backward(&self, op: GluBackward) -> Result<()> {
        activation::swiglu_backward(self, op)
    }
    fn geglu(&self, op: Glu) -> Result<()> {
        activation::geglu(self, op)
    }
    fn geglu_backward(&self, op: GluBackward) -> Result<()> {
        activation::geglu_backward(self, op)
    }
    fn gelu(&self, op: Gelu) -> Result<()> {
        activation::gelu(self, op)
    }
    fn gelu_backward(&self, op: GeluBackward) -> Result<()> {
        activation::gelu_backward(self, op)
    }
    fn gelu_exact(&self, op: Gelu) -> Result<()> {
        activation::gelu_exact(self, op)
    }
    fn gelu_exact_backward(&self, op: GeluBackward) -> Result<()> {
        activation::gelu_exact_backward(self, op)
    }
    fn relu_squared(&self, op: Gelu) -> Result<()> {
        activation::relu_squared(self, op)
    }
    fn relu_squared_backward(&self, op: GeluBackward) -> Result<()> {
        activation::relu_squared_backward(self, op)
    }
    fn clamp(&self, op: Clamp) -> Result<()> {
        activation::clamp(self, op)
    }
    fn clamp_backward(&self, op: ClampBackward) -> Result<()> {
        activation::clamp_backward(self, op)
    }
    fn xielu(&self, op: Xielu) -> Result<()> {
        activation::xielu(self, op)
    }
    fn xielu_backward(&self, op: XieluBackward) -> Result<()> {
        activation::xielu_backward(self, op)
    }
    fn xielu_grads(&self, op: XieluGrads) -> Result<()> {
        activation::xielu_grads(self, op)
    }
    fn clamped_glu(&self, op: ClampedGlu) -> Result<()> {
        activation::clamped_glu(self, op)
    }
    fn clamped_glu_backward(&self, op: ClampedGluBackward) -> Result<()> {
        activation::clamped_glu_backward(self, op)
    }
    fn expert_bias(&self, op: ExpertBias) -> Result<()> {
        experts::expert_bias(self, op)
    }
    fn expert_bias_backward(&self, op: ExpertBiasBackward) -> Result<()> {
        experts::expert_bias_backward(self, op)
    }
    fn sink(&self, op: HeadSinks) -> Result<()> {
        attention::sink(self, op)
    }
    fn sink_backward(&self, op: HeadSinksBackward) -> Result<()> {
        attention::sink_backward(self, op)
    }
    fn short_conv(&self, op: ShortConv) -> Result<()> {
        delta::short_conv(self, op)
    }
    fn short_conv_backward(&self, op: ShortConvBackward) -> Result<()> {
        delta::short_conv_backward(self, op)
    }
    fn delta_rule(&self, op: DeltaRule) -> Result<()> {
        delta::delta_rule(self, op)
    }
    fn delta_rule_backward(&self, op: DeltaRuleBackward) -> Result<()> {
        delta::delta_rule_backward(self, op)
    }
    fn sigmoid_gate(&self, op: SigmoidGate) -> Result<()> {
        activation::sigmoid_gate(self, op)
    }
    fn sigmoid_gate_backward(&self, op: SigmoidGateBackward) -> Result<()> {
        activation::sigmoid_gate_backward(self, op)
    }
    fn dropout(&self, op: Dropout) -> Result<()> {
        element::dropout(self, op)
    }
    fn dropout_rows(&self, op: DropoutRows) -> Result<()> {
        element::dropout_rows(self, op)
    }

    fn embed(&self, op: Embed) -> Result<()> {
        embed::embed(self, op)
    }
    fn embed_backward(&self, op: EmbedBackward) -> Result<()> {
        embed::embed_backward(self, op)
    }
    fn cross_entropy(&self, op: CrossEntropy) -> Result<()> {
        loss::cross_entropy(self, op)
    }
    fn cross_entropy_part(&self, op: CrossEntropyPart) -> Result<()> {
        loss::part(self, op)
    }
    fn cross_entropy_finish(&self, op: CrossEntropyFinish) -> Result<()> {
        loss::finish(self, op)
    }
    fn distill_part(&self, op: DistillPart) -> Result<()> {
        distill::part(self, op)
    }
    fn distill_finish(&self, op: DistillFinish) -> Result<()> {
        distill::finish(self, op)
    }

    fn sum_squares(&self, op: SumSquares) -> Result<()> {
        optim::sum_squares(self, op)
    }
    fn clip_scale(&self, op: ClipScale) -> Result<()> {
        optim::clip_scale(self, op)
    }
    fn adamw(&self, op: AdamW) -> Result<()> {
        optim::adamw(self, op)
    }
    fn polynomial(&self, op: Polynomial) -> Result<()> {
        optim::polynomial(self, op)
    }
    fn sgd(&self, op: Sgd) -> Result<()> {
        optim::sgd(self, op)
    }

    fn route(&self, op: Route) -> Result<()> {
        experts::route(self, op)
    }
    fn route_backward(&self, op: RouteBackward) -> Result<()> {
        experts::route_backward(self, op)
    }
    fn route_scored(&self, op: RouteScored) -> Result<()> {
        experts::route_scored(self, op)
    }
    fn route_scored_backward(&self, op: RouteScoredBackward) -> Result<()> {
        experts::route_scored_backward(self, op)
    }
    fn scale_chosen(&self, op: ScaleChosen) -> Result<()> {
        experts::scale_chosen(self, op)
    }
    fn scale_chosen_backward(&self, op: ScaleChosenBackward) -> Result<()> {
        experts::scale_chosen_backward(self, op)
    }
    fn route_load(&self, op: RouteLoad) -> Result<()> {
        experts::route_load(self, op)
    }
    fn balance(&self, op: Balance) -> Result<()> {
        experts::balance(self, op)
    }
    fn take_rows(&self, op: TakeRows) -> Result<()> {
        experts::take_rows(self, op)
    }
    fn place_runs(&self, op: PlaceRuns) -> Result<()> {
        experts::place_runs(self, op)
    }
    fn combine_rows(&self, op: CombineRows) -> Result<()> {
        experts::combine_rows(self, op)
    }
    fn weigh_rows(&self, op: WeighRows) -> Result<()> {
        experts::weigh_rows(self, op)
    }
    fn sigmoid(&self, op: Sigmoid) -> Result<()> {
        experts::sigmoid(self, op)
    }
    fn grouped_gemm(&self, op: GroupedGemm) -> Result<()> {
        experts::grouped_gemm(self, op)
    }
}
