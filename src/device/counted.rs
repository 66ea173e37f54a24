//! A device that turns each call into the cost of an operation, and leaves it to an [`OpExecutor`] whether the
//! operation also runs: counting sums costs, planning advances a clock, measuring times a real device. The model, the
//! stores and the optimizer run on it as on any other device, so what is counted are exactly the calls of a run. Never
//! computes.
use super::cost::{OpCost, causal_pairs, pass_pairs};
use super::ops::*;
use super::{Buf, Device, View, ViewMut, epilogue, fp8, unbacked};
use flatshard_base::{Category, DType, Meter, Result};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Handles the calls. One that leaves out the memory operations is dry: its buffers are addresses without memory.
pub trait OpExecutor: Send + Sync {
    fn name(&self) -> String {
        "dry".into()
    }
    fn meter(&self) -> &Meter;
    fn alloc(&self, dtype: DType, len: usize, category: Category) -> Result<Buf> {
        unbacked::alloc(dtype, len, self.meter().lease_of(category, dtype, len, len * dtype.size()))
    }
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf> {
        self.alloc(dtype, len, Category::Host)
    }
    /// Whether buffers are addresses without memory.
    fn is_unbacked(&self) -> bool {
        true
    }
    fn upload(&self, _: &[u8], _: ViewMut) -> Result<()> {
        Ok(())
    }
    /// Zeros: a finite loss and norm, so that no step is skipped.
    fn download(&self, _: View, dst: &mut [u8]) -> Result<()> {
        dst.fill(0);
        Ok(())
    }
    fn on_host(&self) -> Box<dyn Device> {
        Box::new(dry(Meter::default(), |_, _, _| 0))
    }
    fn has_entropies(&self) -> bool {
        false
    }
    fn backward_scratch(&self, _of: &BackwardOf, _dtype: DType, _rows: usize) -> usize {
        0
    }
    /// Whether products apply their epilogues, without passes of their own.
    fn fuses(&self) -> bool {
        false
    }
    /// `run` executes the operation on a given device.
    fn op(&self, op: OpCost, run: impl FnOnce(&dyn Device) -> Result<()>) -> Result<()>;
}

/// Like [`Device::backward_scratch`], of the device that is planned for.
pub type ScratchOf = fn(&BackwardOf, DType, usize) -> usize;

/// Computes nothing.
pub struct Dry {
    meter: Meter,
    scratch: ScratchOf,
}

/// The dry device of plans: what is built on it says how many bytes a rank will hold.
pub fn dry(meter: Meter, scratch: ScratchOf) -> OpDevice<Dry> {
    OpDevice::new(Dry { meter, scratch })
}

impl OpExecutor for Dry {
    fn meter(&self) -> &Meter {
        &self.meter
    }
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf> {
        unbacked::alloc_host(dtype, len, self.meter.lease_of(Category::Host, dtype, len, len * dtype.size()))
    }
    fn has_entropies(&self) -> bool {
        true
    }
    fn backward_scratch(&self, of: &BackwardOf, dtype: DType, rows: usize) -> usize {
        (self.scratch)(of, dtype, rows)
    }
    fn op(&self, _: OpCost, _: impl FnOnce(&dyn Device) -> Result<()>) -> Result<()> {
        Ok(())
    }
}

pub struct OpDevice<E> {
    executor: E,
    /// Uploaded integers by address, from which the number of attention pairs follows.
    words: Mutex<BTreeMap<usize, Vec<u32>>>,
    /// Attention pairs of a ring pass, by the address of its ranges.
    pairs: Mutex<HashMap<usize, u64>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<E: OpExecutor> OpDevice<E> {
    pub fn new(executor: E) -> OpDevice<E> {
        OpDevice { executor, words: Mutex::default(), pairs: Mutex::default() }
    }
    pub fn executor(&self) -> &E {
        &self.executor
    }
    /// The integers in `view`, which is all or a part of an upload.
    fn words<T>(&self, view: &View, f: impl FnOnce(&[u32]) -> T) -> T {
        let words = lock(&self.words);
        let held = words.range(..=view.address()).next_back();
        let part = held.and_then(|(start, all)| {
            let first = (view.address() - start) / size_of::<u32>();
            all.get(first..all.len().min(first + view.len()))
        });
        f(part.unwrap_or_default())
    }
    /// From the call that made the ranges, or from the ranges themselves if they were uploaded.
    fn pairs(&self, ranges: &View) -> u64 {
        let made = lock(&self.pairs).get(&ranges.address()).copied();
        let length = |range: &[u32]| range[1].saturating_sub(range[0]) as u64;
        made.unwrap_or_else(|| self.words(ranges, |words| words.chunks_exact(2).map(length).sum()))
    }
    fn moves(
        &self,
        name: &'static str,
        dtype: DType,
        bytes: usize,
        run: impl FnOnce(&dyn Device) -> Result<()>,
    ) -> Result<()> {
        self.executor.op(OpCost::moves(name, dtype, bytes), run)
    }
    fn attention_op(
        &self,
        name: &'static str,
        s: &AttentionShape,
        documents: &View,
        qkv: &View,
        bytes: usize,
    ) -> OpCost {
        let pairs = self.words(documents, |of| causal_pairs(of, s.window));
        OpCost::attention(name, s, qkv.dtype(), pairs, bytes)
    }
}

/// One operation per line: its operands, the one that gives the dtype, and those it touches (twice if it reads and
/// writes).
macro_rules! moves {
    ($($name:ident($type:ident) $of:ident over [$($operand:ident),*];)*) => { $(
        fn $name(&self, op: $type) -> Result<()> {
            let bytes = 0 $(+ op.$operand.bytes())*;
            self.moves(stringify!($name), op.$of.dtype(), bytes, |dev| dev.$name(op))
        }
    )* };
}

impl<E: OpExecutor> Device for OpDevice<E> {
    fn name(&self) -> String {
        self.executor.name()
    }
    fn is_unbacked(&self) -> bool {
        self.executor.is_unbacked()
    }
    fn meter(&self) -> &Meter {
        self.executor.meter()
    }
    fn alloc(&self, dtype: DType, len: usize, category: Category) -> Result<Buf> {
        self.executor.alloc(dtype, len, category)
    }
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf> {
        self.executor.alloc_host(dtype, len)
    }
    fn has_entropies(&self) -> bool {
        self.executor.has_entropies()
    }
    fn backward_scratch(&self, of: &BackwardOf, dtype: DType, rows: usize) -> usize {
        self.executor.backward_scratch(of, dtype, rows)
    }
    fn on_host(&self) -> Box<dyn Device> {
        self.executor.on_host()
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn expand(&self, op: Expand) -> Result<()> {
        let bytes = op.y.bytes() + op.y.len() / 2;
        self.moves(Expand::OP, op.y.dtype(), bytes, |dev| dev.expand(op))
    }
    fn quantize(&self, op: Quantize) -> Result<()> {
        let bytes = 2 * op.bytes.len() + op.bytes.bytes() + op.scales.bytes();
        self.moves(Quantize::OP, DType::Bf16, bytes, |dev| dev.quantize(op))
    }
    fn raise_scales(&self, op: RaiseScales) -> Result<()> {
        self.moves(RaiseScales::OP, op.x.dtype(), op.x.bytes(), |dev| dev.raise_scales(op))
    }
    fn encode(&self, op: Encode) -> Result<()> {
        self.moves(Encode::OP, op.x.dtype(), op.x.bytes() + op.bytes.bytes(), |dev| dev.encode(op))
    }
    /// Counts what the CPU does: casts, and a product in bf16.
    fn fp8_gemm(&self, op: Fp8Gemm) -> Result<()> {
        fp8::in_bf16(self, op)
    }
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()> {
        if dst.dtype() == DType::U32 {
            let words = src.chunks_exact(4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
            lock(&self.words).insert(dst.address(), words.collect());
        }
        self.executor.upload(src, dst)
    }
    fn download(&self, src: View, dst: &mut [u8]) -> Result<()> {
        self.executor.download(src, dst)
    }

    fn copy(&self, src: View, dst: ViewMut) -> Result<()> {
        self.moves("copy", src.dtype(), src.bytes() + dst.bytes(), |dev| dev.copy(src, dst))
    }
    fn zero(&self, x: ViewMut) -> Result<()> {
        self.moves("zero", x.dtype(), x.bytes(), |dev| dev.zero(x))
    }
    fn add(&self, x: View, y: ViewMut) -> Result<()> {
        self.moves("add", y.dtype(), x.bytes() + 2 * y.bytes(), |dev| dev.add(x, y))
    }
    fn scale(&self, factor: f32, x: ViewMut) -> Result<()> {
        self.moves("scale", x.dtype(), 2 * x.bytes(), |dev| dev.scale(factor, x))
    }

    moves! {
        bias(Bias) y over [bias, y, y];
        bias_backward(BiasBackward) dy over [dy, db];
        rmsnorm(RmsNorm) x over [x, w, y, rstd];
        rmsnorm_backward(RmsNormBackward) x over [x, w, rstd, dy, dx, dx, dw];
        layernorm_backward(LayerNormBackward) x over [x, w, stats, dy, dx, dx, dw, db];
        layernorm_from_one_backward(LayerNormBackward) x over [x, w, stats, dy, dx, dx, dw, db];
        qk_norm_rope(QkNormRope) qkv over [positions, qkv, out, rstd];
        qk_norm_rope_backward(QkNormRopeBackward) qkv over [positions, qkv, rstd, dqkv, dqkv];
        attention_merge(AttentionMerge) o over [o_pass, lse_pass, o, o, lse, lse];
        attention_delta(AttentionDelta) o over [o, d_o, delta];
        dequantize(Dequantize) y over [bytes, scales, y];
        swiglu(Glu) y over [gate, up, y];
        swiglu_backward(GluBackward) dy over [gate, up, dy, dgate, dup];
        geglu(Glu) y over [gate, up, y];
        geglu_backward(GluBackward) dy over [gate, up, dy, dgate, dup];
        gelu(Gelu) x over [x, y];
        gelu_backward(GeluBackward) x over [x, dy, dx];
        gelu_exact(Gelu) x over [x, y];
        gelu_exact_backward(GeluBackward) x over [x, dy, dx];
        scale_by(ScaleBy) x over [factor, x, x];
        scale_chosen(ScaleChosen) y over [chosen, weights, y];
        scale_chosen_backward(ScaleChosenBackward) dy over [chosen, weights, dy, dy];
        relu_squared(Gelu) x over [x, y];
        relu_squared_backward(GeluBackward) x over [x, dy, dx];
        clamp(Clamp) x over [x, x];
        clamp_backward(ClampBackward) x over [x, dx, dx];
        xielu(Xielu) x over [x, y];
        xielu_backward(XieluBackward) x over [x, dy, dx];
        xielu_grads(XieluGrads) x over [x, dy];
        dropout(Dropout) x over [x, x];
        dropout_rows(DropoutRows) x over [x, y];
        cross_entropy(CrossEntropy) logits over [targets, logits, logits];
        cross_entropy_part(CrossEntropyPart) logits over [targets, logits, stats];
        cross_entropy_finish(CrossEntropyFinish) logits over [targets, stats, logits, logits];
        distill_part(DistillPart) logits over [targets, teacher, logits, stats];
        distill_finish(DistillFinish) logits over [targets, teacher, stats, logits, logits];
        sum_squares(SumSquares) x over [x];
        clip_scale(ClipScale) out over [acc, out];
        route(Route) probs over [probs, probs, chosen, weights, order, places];
        route_backward(RouteBackward) probs over [probs, chosen, weights, dweights, dlogits];
        route_load(RouteLoad) probs over [probs, counts, sums];
        balance(Balance) grad over [load, grad, report];
        take_rows(TakeRows) x over [order, y, y];
        place_runs(PlaceRuns) order over [runs, order, places];
        combine_rows(CombineRows) x over [x, y];
        weigh_rows(WeighRows) act over [act, act, dact, dact, weights, dweights];
        sigmoid(Sigmoid) x over [x, x];
        sink(HeadSinks) o over [o, o, lse, lse];
        sink_backward(HeadSinksBackward) lse over [lse, delta];
        clamped_glu(ClampedGlu) y over [gate_up, y];
        clamped_glu_backward(ClampedGluBackward) dy over [gate_up, dy, dgate_up];
        expert_bias(ExpertBias) y over [y, y];
        expert_bias_backward(ExpertBiasBackward) dy over [dy];
        short_conv(ShortConv) x over [x, w, y];
        short_conv_backward(ShortConvBackward) x over [x, w, dy, dx];
        sigmoid_gate(SigmoidGate) x over [gate, x, y];
        sigmoid_gate_backward(SigmoidGateBackward) x over [gate, x, dy, dy, dgate];
    }

    fn route_scored(&self, op: RouteScored) -> Result<()> {
        let Route { probs, chosen, weights, order, places, .. } = &op.route;
        let bytes = 2 * probs.bytes() + chosen.bytes() + weights.bytes() + order.bytes() + places.bytes();
        self.moves(RouteScored::OP, probs.dtype(), bytes, |dev| dev.route_scored(op))
    }
    fn route_scored_backward(&self, op: RouteScoredBackward) -> Result<()> {
        let RouteBackward { probs, chosen, weights, dweights, dlogits, .. } = &op.route;
        let bytes = probs.bytes() + chosen.bytes() + weights.bytes() + dweights.bytes() + dlogits.bytes();
        self.moves(RouteScoredBackward::OP, probs.dtype(), bytes, |dev| dev.route_scored_backward(op))
    }

    fn gemm(&self, op: Gemm) -> Result<()> {
        let cost = OpCost::product(&op.shape, op.a.dtype(), op.c.dtype());
        self.executor.op(cost, |dev| dev.gemm(op))
    }
    fn grouped_gemm(&self, op: GroupedGemm) -> Result<()> {
        let cost = OpCost::grouped(&op);
        self.executor.op(cost, |dev| dev.grouped_gemm(op))
    }
    fn gemm_then(&self, op: GemmThen) -> Result<()> {
        if !self.executor.fuses() {
            return epilogue::in_passes(self, op);
        }
        let cost = OpCost::product(&op.shape, op.a.dtype(), op.c.dtype());
        self.executor.op(cost, |dev| dev.gemm_then(op))
    }
    fn layernorm(&self, op: LayerNorm) -> Result<()> {
        self.moves("layernorm", op.x.dtype(), op.bytes(), |dev| dev.layernorm(op))
    }
    fn layernorm_from_one(&self, op: LayerNorm) -> Result<()> {
        self.moves("layernorm_from_one", op.x.dtype(), op.bytes(), |dev| dev.layernorm_from_one(op))
    }
    /// Queries and keys of each row are read and written; values are not touched.
    fn rope(&self, op: Rope) -> Result<()> {
        let bytes = 2 * op.positions.len() * op.shape.heads * op.shape.rotated * op.qkv.dtype().size();
        self.moves("rope", op.qkv.dtype(), bytes, |dev| dev.rope(op))
    }
    fn copy_columns(&self, op: CopyColumns) -> Result<()> {
        let bytes = op.rows * op.width * (op.src.dtype().size() + op.dst.dtype().size());
        self.moves("copy_columns", op.src.dtype(), bytes, |dev| dev.copy_columns(op))
    }
    /// Only the rows of the table that occur as tokens.
    fn embed(&self, op: Embed) -> Result<()> {
        self.moves("embed", op.y.dtype(), 2 * op.y.bytes(), |dev| dev.embed(op))
    }
    fn embed_backward(&self, op: EmbedBackward) -> Result<()> {
        let bytes = op.dy.bytes() + 2 * op.dy.len() * DType::F32.size();
        self.moves("embed_backward", op.dy.dtype(), bytes, |dev| dev.embed_backward(op))
    }

    fn attention(&self, op: Attention) -> Result<()> {
        let bytes = op.qkv.bytes() + op.o.bytes() + op.lse.bytes();
        let cost = self.attention_op("attention", &op.shape, &op.documents, &op.qkv, bytes);
        self.executor.op(cost, |dev| dev.attention(op))
    }
    fn attention_backward(&self, op: AttentionBackward) -> Result<()> {
        let AttentionBackward { qkv, o, lse, d_o, delta, dqkv, .. } = &op;
        let bytes = qkv.bytes() + 2 * o.bytes() + d_o.bytes() + lse.bytes() + 2 * delta.bytes() + dqkv.bytes();
        let cost = self.attention_op("attention_backward", &op.shape, &op.documents, qkv, bytes);
        self.executor.op(cost, |dev| dev.attention_backward(op))
    }
    fn attention_ranges(&self, op: AttentionRanges) -> Result<()> {
        let cu = self.words(&op.cu_seqlens, <[u32]>::to_vec);
        let keys = self.words(&op.k_rows, <[u32]>::to_vec);
        let pairs = self.words(&op.q_rows, |queries| pass_pairs(&cu, queries, &keys, op.shape.window));
        lock(&self.pairs).insert(op.of_queries.address(), pairs);
        let bytes = op.of_queries.bytes() + op.of_keys.bytes();
        self.moves("attention_ranges", DType::U32, bytes, |dev| dev.attention_ranges(op))
    }
    fn attention_pass(&self, op: AttentionPass) -> Result<()> {
        let bytes = op.qkv.bytes() + op.kv.bytes() + op.o.bytes() + op.lse.bytes();
        let pairs = self.pairs(&op.of_queries);
        let cost = OpCost::attention("attention_pass", &op.shape, op.qkv.dtype(), pairs, bytes);
        self.executor.op(cost, |dev| dev.attention_pass(op))
    }
    fn attention_paged(&self, op: AttentionPaged) -> Result<()> {
        let window = if op.shape.window == 0 { usize::MAX } else { op.shape.window };
        let seen = |run: &PagedRows| (run.past + 1..=run.past + run.rows).map(|seen| seen.min(window)).sum::<usize>();
        let read = |run: &PagedRows| (run.past + run.rows).min(window.saturating_add(run.rows));
        let tokens: usize = op.runs.iter().map(read).sum();
        let bytes = 2 * op.qkv.bytes() + op.o.bytes() + tokens * op.shape.kv_row() * op.qkv.dtype().size();
        let pairs = op.runs.iter().map(seen).sum::<usize>() as u64;
        let cost = OpCost::attention(AttentionPaged::OP, &op.shape, op.qkv.dtype(), pairs, bytes);
        self.executor.op(cost, |dev| dev.attention_paged(op))
    }
    fn attention_pass_backward(&self, op: AttentionPassBackward) -> Result<()> {
        let bytes = op.qkv.bytes() + op.kv.bytes() + op.d_o.bytes() + 2 * (op.dq.bytes() + op.dkv.bytes());
        let pairs = self.pairs(&op.of_queries);
        let cost = OpCost::attention("attention_pass_backward", &op.shape, op.qkv.dtype(), pairs, bytes);
        self.executor.op(cost, |dev| dev.attention_pass_backward(op))
    }

    fn delta_rule(&self, op: DeltaRule) -> Result<()> {
        let bytes = op.qkv.bytes() + op.o.bytes() + op.states.bytes();
        let cost = OpCost::delta_rule(DeltaRule::OP, &op.shape, op.qkv.dtype(), op.qkv.len(), bytes);
        self.executor.op(cost, |dev| dev.delta_rule(op))
    }
    fn delta_rule_backward(&self, op: DeltaRuleBackward) -> Result<()> {
        let bytes = 2 * op.qkv.bytes() + op.d_o.bytes() + op.states.bytes();
        let cost = OpCost::delta_rule(DeltaRuleBackward::OP, &op.shape, op.qkv.dtype(), op.qkv.len(), bytes);
        self.executor.op(cost, |dev| dev.delta_rule_backward(op))
    }
    fn adamw(&self, op: AdamW) -> Result<()> {
        let largest = op.absmax.iter().flatten().map(ViewMut::bytes).sum::<usize>();
        let updated = op.m.bytes() + op.v.bytes() + op.p.bytes() + largest;
        let bytes = op.g.bytes() + 2 * updated + op.out.as_ref().map_or(0, ViewMut::bytes);
        self.moves("adamw", op.g.dtype(), bytes, |dev| dev.adamw(op))
    }
    fn polynomial(&self, op: Polynomial) -> Result<()> {
        let bytes = op.square.bytes() + 2 * op.s.bytes();
        self.moves("polynomial", op.s.dtype(), bytes, |dev| dev.polynomial(op))
    }
    fn sgd(&self, op: Sgd) -> Result<()> {
        let [momentum, copy] = [&op.m, &op.out].map(|x| x.as_ref().map_or(0, ViewMut::bytes));
        let bytes = op.g.bytes() + 2 * (momentum + op.p.bytes()) + copy;
        self.moves("sgd", op.g.dtype(), bytes, |dev| dev.sgd(op))
    }
}
