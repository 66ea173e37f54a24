//! Dispatch of every operation to the compiled variant for its dtype and vector width. Never divides work itself.
use super::{CpuDevice, lock};
use crate::buf::Place;
use crate::cpu::divide::{Divisible, LINE};
use crate::cpu::operands::length;
use crate::cpu::{
    activation, attention, clamped, conv, delta, distill, dropout, element, embed, expand, experts, fp8, loss, memory,
    norm, optim, paged, reduce, ring, rope,
};
use crate::ops::*;
use crate::{Buf, Device, View, ViewMut};
use flatshard_base::{Category, DType, Meter, Result};
use half::bf16;
use std::sync::Mutex;

/// f32s of a cache line: statistics of rows are one each.
const FLOATS: usize = LINE / 4;

/// One operation per line that is divided into rows: its operands, the one that gives the dtype, and its kernel.
macro_rules! by_rows {
    ($($name:ident($type:ident) $of:ident => $family:ident::$kernel:ident;)*) => { $(
        fn $name(&self, op: $type) -> Result<()> {
            self.rows(op, &|op| floats!(self, op.$of.dtype(), T => $family::$kernel::<T>(op)))
        }
    )* };
}

/// The same for parts of the key/value heads.
macro_rules! by_heads {
    ($($name:ident($type:ident) => $family:ident::$pass:ident;)*) => { $(
        fn $name(&self, op: $type) -> Result<()> {
            let (heads, bytes) = (op.shape.kv_heads, op.qkv.bytes());
            types!(op.qkv.dtype(), T => {
                let pass = $family::$pass::<T>::new(op)?;
                // SAFETY: `heads` makes parts that do not overlap.
                self.heads(heads, bytes, &|scratch, heads| unsafe { pass.heads(self.level, scratch, heads) })
            })
        }
    )* };
}

impl CpuDevice {
    fn layernorm_gradients<const FROM_ONE: bool>(&self, op: LayerNormBackward) -> Result<()> {
        if self.worth(op.x.bytes()) == 1 {
            return floats!(self, op.x.dtype(), T => norm::layernorm_backward::<T, FROM_ONE, true>(op));
        }
        op.check()?;
        self.parts((op.dw.len(), LINE, op.x.bytes()), &|_, columns| {
            // SAFETY: `parts` makes parts that do not overlap.
            let of = [&op.dw, &op.db].map(|x| unsafe { x.part(columns.clone()) });
            floats!(self, op.x.dtype(), T => norm::layernorm_weights::<T>(&op, columns.start, of))
        })?;
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => norm::layernorm_backward::<T, FROM_ONE, false>(op)))
    }
    /// Runs a convolution by channels.
    fn convolve(&self, pass: impl conv::ByChannels) -> Result<()> {
        self.parts((pass.channels(), conv::CHANNELS, pass.bytes()), &|_, channels| {
            // SAFETY: `parts` makes parts that do not overlap.
            self.level.run(
                #[inline(always)]
                || unsafe { pass.run(channels) },
            );
            Ok(())
        })
    }
}

impl Device for CpuDevice {
    by_rows! {
        bias(Bias) y => norm::bias;
        rmsnorm(RmsNorm) x => norm::rmsnorm;
        layernorm(LayerNorm) x => norm::layernorm;
        layernorm_from_one(LayerNorm) x => norm::layernorm_from_one;
        rope(Rope) qkv => rope::rope;
        qk_norm_rope(QkNormRope) qkv => rope::qk_norm_rope;
        swiglu(Glu) gate => activation::swiglu;
        swiglu_backward(GluBackward) gate => activation::swiglu_backward;
        clamped_glu(ClampedGlu) y => clamped::clamped_glu;
        clamped_glu_backward(ClampedGluBackward) dy => clamped::clamped_glu_backward;
        geglu(Glu) gate => activation::geglu;
        geglu_backward(GluBackward) gate => activation::geglu_backward;
        gelu(Gelu) x => activation::gelu;
        gelu_backward(GeluBackward) x => activation::gelu_backward;
        gelu_exact(Gelu) x => activation::gelu_exact;
        gelu_exact_backward(GeluBackward) x => activation::gelu_exact_backward;
        sigmoid_gate(SigmoidGate) x => conv::sigmoid_gate;
        sigmoid_gate_backward(SigmoidGateBackward) x => conv::sigmoid_gate_backward;
        relu_squared(Gelu) x => activation::relu_squared;
        relu_squared_backward(GeluBackward) x => activation::relu_squared_backward;
        xielu(Xielu) x => activation::xielu;
        xielu_backward(XieluBackward) x => activation::xielu_backward;
        clamp(Clamp) x => activation::clamp;
        clamp_backward(ClampBackward) x => activation::clamp_backward;
        embed(Embed) w => embed::embed;
        embed_backward(EmbedBackward) dy => embed::embed_backward;
        expand(Expand) y => expand::expand;
        cross_entropy_part(CrossEntropyPart) logits => loss::part;
        distill_part(DistillPart) logits => distill::part;
    }
    by_heads! {
        attention_pass(AttentionPass) => ring::PassForward;
        attention_pass_backward(AttentionPassBackward) => ring::PassBackward;
    }

    fn name(&self) -> String {
        let kernel = lock(&self.gemm[0]).kernel_name();
        match self.pool.threads() {
            1 => format!("cpu ({}, {kernel})", self.level),
            threads => format!("cpu ({}, {kernel}, {threads} threads)", self.level),
        }
    }
    fn meter(&self) -> &Meter {
        &self.meter
    }
    fn alloc(&self, dtype: DType, len: usize, category: Category) -> Result<Buf> {
        let lease = self.meter.lease_of(category, dtype, len, len * dtype.size());
        self.touched(memory::alloc(dtype, len, lease)?)
    }
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf> {
        let lease = self.meter.lease_of(Category::Host, dtype, len, len * dtype.size());
        self.touched(memory::alloc_at(Place::Mapped, dtype, len, lease)?)
    }
    fn host_threads(&self) -> usize {
        self.pool.threads()
    }
    fn on_host(&self) -> Box<dyn Device> {
        Box::new(CpuDevice::new(Meter::default()))
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()> {
        memory::upload(src, dst)
    }
    fn download(&self, src: View, dst: &mut [u8]) -> Result<()> {
        memory::download(src, dst)
    }

    fn copy(&self, src: View, dst: ViewMut) -> Result<()> {
        length("copy", "dst", dst.len(), src.len())?;
        self.elements(&dst, &|part, dst| {
            let src = src.slice(part);
            match src.dtype() {
                dtype if dtype == dst.dtype() => memory::copy(src, dst),
                DType::F32 => floats!(self, dst.dtype(), T => element::cast::<f32, T>(src, dst)),
                dtype => floats!(self, dtype, T => element::cast::<T, f32>(src, dst)),
            }
        })
    }
    fn zero(&self, x: ViewMut) -> Result<()> {
        self.elements(&x, &|_, x| memory::zero(x))
    }
    fn add(&self, x: View, y: ViewMut) -> Result<()> {
        length("add", "y", y.len(), x.len())?;
        self.elements(&y, &|part, y| {
            let x = x.slice(part);
            match x.dtype() == y.dtype() {
                true => floats!(self, x.dtype(), T => element::add::<T, T>(x, y)),
                false => floats!(self, x.dtype(), T => element::add::<T, f32>(x, y)),
            }
        })
    }
    fn scale(&self, factor: f32, x: ViewMut) -> Result<()> {
        self.elements(&x, &|_, x| floats!(self, x.dtype(), T => element::scale::<T>(factor, x)))
    }

    fn scale_by(&self, op: ScaleBy) -> Result<()> {
        op.check()?;
        self.elements(&op.x, &|_, x| floats!(self, x.dtype(), T => element::scale_by::<T>(op.factor, x)))
    }

    fn gemm(&self, op: Gemm) -> Result<()> {
        self.product(op)
    }
    fn gemm_then(&self, op: GemmThen) -> Result<()> {
        self.product_then(op)
    }
    fn bias_backward(&self, op: BiasBackward) -> Result<()> {
        op.check()?;
        self.parts((op.db.len(), LINE, op.dy.bytes()), &|_, columns| {
            // SAFETY: `parts` makes parts that do not overlap.
            let db = unsafe { op.db.part(columns.clone()) };
            floats!(self, op.dy.dtype(), T => norm::bias_backward::<T>(&op, columns.start, db))
        })
    }

    fn rmsnorm_backward(&self, op: RmsNormBackward) -> Result<()> {
        if self.worth(op.x.bytes()) == 1 {
            return floats!(self, op.x.dtype(), T => norm::rmsnorm_backward::<T, true>(op));
        }
        op.check()?;
        self.parts((op.dw.len(), LINE, op.x.bytes()), &|_, columns| {
            // SAFETY: `parts` makes parts that do not overlap.
            let dw = unsafe { op.dw.part(columns.clone()) };
            floats!(self, op.x.dtype(), T => norm::rmsnorm_weights::<T>(&op, columns.start, dw))
        })?;
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => norm::rmsnorm_backward::<T, false>(op)))
    }
    fn layernorm_backward(&self, op: LayerNormBackward) -> Result<()> {
        self.layernorm_gradients::<false>(op)
    }
    fn layernorm_from_one_backward(&self, op: LayerNormBackward) -> Result<()> {
        self.layernorm_gradients::<true>(op)
    }

    fn qk_norm_rope_backward(&self, op: QkNormRopeBackward) -> Result<()> {
        if self.worth(op.qkv.bytes()) == 1 {
            return floats!(self, op.qkv.dtype(), T => rope::qk_norm_rope_backward::<T, true>(op));
        }
        op.check()?;
        let half = op.shape.head_dim / 2;
        self.parts((half, LINE / 4, op.qkv.bytes()), &|_, columns| {
            let second = half + columns.start..half + columns.end;
            let of = [(&op.dwq, &columns), (&op.dwq, &second), (&op.dwk, &columns), (&op.dwk, &second)];
            // SAFETY: as above, in either half.
            let of = of.map(|(x, columns)| unsafe { x.part(columns.clone()) });
            floats!(self, op.qkv.dtype(), T => rope::qk_norm_rope_weights::<T>(&op, columns.start, of))
        })?;
        self.rows(op, &|op| floats!(self, op.qkv.dtype(), T => rope::qk_norm_rope_backward::<T, false>(op)))
    }

    fn attention(&self, op: Attention) -> Result<()> {
        let bytes = op.qkv.bytes();
        types!(op.qkv.dtype(), T => {
            let pass = attention::WholeForward::<T>::new(op)?;
            // SAFETY: each part is run once.
            self.each(pass.parts(), bytes, &|scratch, part| unsafe { pass.part(self.level, scratch, part) });
            Ok(())
        })
    }
    fn attention_backward(&self, mut op: AttentionBackward) -> Result<()> {
        op.check()?;
        let AttentionBackward { shape, o, lse, d_o, ref mut delta, ref mut sums, .. } = op;
        self.attention_delta(AttentionDelta { shape, o, lse, d_o, delta: delta.reborrow(), sums: sums.reborrow() })?;
        let bytes = op.qkv.bytes();
        types!(op.qkv.dtype(), T => {
            let pass = attention::WholeBackward::<T>::new(&mut op)?;
            // SAFETY: as above.
            self.each(pass.parts(), bytes, &|scratch, part| unsafe { pass.part(self.level, scratch, part) });
            Ok(())
        })
    }
    fn attention_ranges(&self, op: AttentionRanges) -> Result<()> {
        ring::ranges(op)
    }
    fn attention_paged(&self, op: AttentionPaged) -> Result<()> {
        types!(op.qkv.dtype(), T => {
            let paged = paged::PagedForward::<T>::new(op)?;
            let (pairs, bytes) = paged.pairs();
            // SAFETY: `heads` makes parts that do not overlap.
            self.heads(pairs, bytes, &|scratch, pairs| unsafe { paged.compute(self.level, scratch, pairs) })
        })
    }
    fn attention_merge(&self, op: AttentionMerge) -> Result<()> {
        let bytes = op.o.bytes();
        let merge = ring::PassMerge::new(op)?;
        self.parts((merge.rows, FLOATS, bytes), &|_, rows| {
            // SAFETY: `parts` makes parts that do not overlap.
            unsafe { merge.rows(rows) };
            Ok(())
        })
    }
    fn attention_delta(&self, op: AttentionDelta) -> Result<()> {
        let bytes = op.o.bytes();
        types!(op.o.dtype(), T => {
            let delta = attention::DeltaRows::<T>::new(op)?;
            self.parts((delta.rows, FLOATS, bytes), &|_, rows| {
                self.level.run(
                    #[inline(always)]
                    // SAFETY: `parts` makes parts that do not overlap.
                    || unsafe { delta.rows(rows) },
                );
                Ok(())
            })
        })
    }
    fn copy_columns(&self, op: CopyColumns) -> Result<()> {
        self.rows(op, &|op| {
            floats!(self, op.src.dtype(), S => floats!(self, op.dst.dtype(), D => ring::copy_columns::<S, D>(op)))
        })
    }

    fn dropout(&self, op: Dropout) -> Result<()> {
        let key = dropout::key(&op)?;
        let Dropout { p, key: words, x } = op;
        self.elements(&x, &|part, x| {
            let op = Dropout { p, key: words, x };
            floats!(self, op.x.dtype(), T => dropout::dropout::<T>(op, key, part.start))
        })
    }
    fn dropout_rows(&self, op: DropoutRows) -> Result<()> {
        let key = dropout::rows_key(&op)?;
        let n = op.check()?;
        self.parts((n, 1, op.x.bytes()), &|_, rows| {
            // SAFETY: `parts` makes parts that do not overlap.
            let part = unsafe { op.part(&rows, n.max(1)) };
            floats!(self, op.x.dtype(), T => dropout::dropout_rows::<T>(part, key, rows.start))
        })
    }

    fn cross_entropy(&self, op: CrossEntropy) -> Result<()> {
        self.token_losses(op)
    }
    fn has_entropies(&self) -> bool {
        true
    }
    fn row_entropies(&self, op: RowEntropies) -> Result<()> {
        let (n, RowEntropies { shape, targets, logits, entropies }) = (op.check()?, op);
        self.parts((n, 1, logits.bytes()), &|_, rows| {
            let logits = logits.slice(rows.start * shape.vocab..rows.end * shape.vocab);
            // SAFETY: `parts` makes parts that do not overlap.
            let entropies = unsafe { entropies.part(rows.clone()) };
            let part = RowEntropies { shape, targets: targets.slice(rows), logits, entropies };
            floats!(self, part.logits.dtype(), T => loss::entropies::<T>(part))
        })
    }
    fn quantize(&self, op: Quantize) -> Result<()> {
        self.rows_on(op.shape.tall, op, &|_, op| {
            self.level.run(
                #[inline(always)]
                || fp8::quantize(op),
            )
        })
    }
    fn raise_scales(&self, op: RaiseScales) -> Result<()> {
        let run = |op: RaiseScales| floats!(self, op.x.dtype(), T => fp8::raise_scales::<T>(op));
        self.rows_on(op.shape.tall, op, &|_, op| run(op))
    }
    fn encode(&self, op: Encode) -> Result<()> {
        let run = |op: Encode| floats!(self, op.x.dtype(), T => fp8::encode::<T>(op));
        self.rows_on(op.shape.tall, op, &|_, op| run(op))
    }
    fn dequantize(&self, op: Dequantize) -> Result<()> {
        self.rows_on(op.shape.tall, op, &|_, op| {
            self.level.run(
                #[inline(always)]
                || fp8::dequantize(op),
            )
        })
    }
    fn fp8_gemm(&self, op: Fp8Gemm) -> Result<()> {
        crate::fp8::in_bf16(self, op)
    }
    fn cross_entropy_finish(&self, op: CrossEntropyFinish) -> Result<()> {
        self.finish_token_losses(op)
    }
    fn distill_finish(&self, op: DistillFinish) -> Result<()> {
        self.finish_distillation(op)
    }

    fn sum_squares(&self, op: SumSquares) -> Result<()> {
        op.check()?;
        let (x, acc) = (op.x.host::<f32>(SumSquares::OP)?, Mutex::new(op.acc.host::<f64>(SumSquares::OP)?));
        self.parts((x.len(), ALIGN, op.x.bytes()), &|_, part| {
            let mut own = [0.0; LIMBS];
            self.level.run(
                #[inline(always)]
                || reduce::sum_squares(&x[part], &mut own),
            );
            reduce::merge(&own, &mut lock(&acc));
            Ok(())
        })
    }
    fn clip_scale(&self, op: ClipScale) -> Result<()> {
        reduce::clip_scale(op)
    }
    fn adamw(&self, op: AdamW) -> Result<()> {
        let copy = op.out.as_ref().map_or(DType::F32, ViewMut::dtype);
        let bf16 = |x: &ViewMut| x.dtype() == DType::Bf16;
        let run = |op: AdamW| match (bf16(&op.m), bf16(&op.p)) {
            (_, false) if op.absmax.is_some() => floats!(self, copy, T => optim::adamw_in_blocks::<f32, T>(op)),
            (_, true) if op.absmax.is_some() => floats!(self, copy, T => optim::adamw_in_blocks::<bf16, T>(op)),
            (false, false) => floats!(self, copy, T => optim::adamw::<f32, f32, T>(op)),
            (true, false) => floats!(self, copy, T => optim::adamw::<bf16, f32, T>(op)),
            (false, true) => floats!(self, copy, T => optim::adamw::<f32, bf16, T>(op)),
            (true, true) => floats!(self, copy, T => optim::adamw::<bf16, bf16, T>(op)),
        };
        self.rows(op, &run)
    }
    fn polynomial(&self, op: Polynomial) -> Result<()> {
        floats!(self, op.s.dtype(), T => optim::polynomial::<T>(op))
    }
    fn sgd(&self, op: Sgd) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.out.as_ref().map_or(DType::F32, ViewMut::dtype), T => optim::sgd::<T>(op)))
    }

    fn route(&self, op: Route) -> Result<()> {
        experts::route(op)
    }
    fn route_backward(&self, op: RouteBackward) -> Result<()> {
        experts::route_backward(op)
    }
    fn route_load(&self, op: RouteLoad) -> Result<()> {
        experts::route_load(op)
    }
    fn balance(&self, op: Balance) -> Result<()> {
        experts::balance(op)
    }
    fn take_rows(&self, op: TakeRows) -> Result<()> {
        floats!(self, op.x.dtype(), T => experts::take_rows::<T>(op))
    }
    fn place_runs(&self, op: PlaceRuns) -> Result<()> {
        experts::place_runs(op)
    }
    fn combine_rows(&self, op: CombineRows) -> Result<()> {
        let width = op.width;
        let mut scratch = lock(&self.gemm[0]);
        let sums = scratch.floats(width);
        floats!(self, op.x.dtype(), T => experts::combine_rows::<T>(op, sums))
    }
    fn weigh_rows(&self, op: WeighRows) -> Result<()> {
        floats!(self, op.act.dtype(), T => experts::weigh_rows::<T>(op))
    }
    fn sigmoid(&self, op: Sigmoid) -> Result<()> {
        experts::sigmoid_rows(op)
    }
    fn grouped_gemm(&self, op: GroupedGemm) -> Result<()> {
        self.grouped(op)
    }
    fn route_scored(&self, op: RouteScored) -> Result<()> {
        let mut scratch = lock(&self.gemm[0]);
        let floats = scratch.floats(op.route.shape.experts + 2 * op.rule.groups);
        floats!(self, op.bias.map_or(DType::F32, |bias| bias.dtype()), T => experts::route_scored::<T>(op, floats))
    }
    fn route_scored_backward(&self, op: RouteScoredBackward) -> Result<()> {
        experts::route_scored_backward(op)
    }
    fn scale_chosen(&self, op: ScaleChosen) -> Result<()> {
        floats!(self, op.factors.dtype(), T => experts::scale_chosen::<T>(op))
    }
    fn scale_chosen_backward(&self, op: ScaleChosenBackward) -> Result<()> {
        floats!(self, op.factors.dtype(), T => experts::scale_chosen_backward::<T>(op))
    }
    fn xielu_grads(&self, op: XieluGrads) -> Result<()> {
        floats!(self, op.x.dtype(), T => activation::xielu_grads::<T>(op))
    }
    fn sink(&self, op: HeadSinks) -> Result<()> {
        floats!(self, op.o.dtype(), T => clamped::sink::<T>(op))
    }
    fn sink_backward(&self, op: HeadSinksBackward) -> Result<()> {
        floats!(self, op.sinks.dtype(), T => clamped::sink_backward::<T>(op))
    }
    fn expert_bias(&self, op: ExpertBias) -> Result<()> {
        floats!(self, op.y.dtype(), T => clamped::expert_bias::<T>(op))
    }
    fn expert_bias_backward(&self, op: ExpertBiasBackward) -> Result<()> {
        floats!(self, op.dy.dtype(), T => clamped::expert_bias_backward::<T>(op))
    }

    fn short_conv(&self, op: ShortConv) -> Result<()> {
        types!(op.x.dtype(), T => match op.kind {
            ConvKind::Silu => self.convolve(conv::ConvForward::<T, false>::new(op)?),
            ConvKind::Gated => self.convolve(conv::ConvForward::<T, true>::new(op)?),
        })
    }
    fn short_conv_backward(&self, op: ShortConvBackward) -> Result<()> {
        types!(op.x.dtype(), T => match op.kind {
            ConvKind::Silu => self.convolve(conv::ConvBackward::<T, false>::new(op)?),
            ConvKind::Gated => self.convolve(conv::ConvBackward::<T, true>::new(op)?),
        })
    }
    fn delta_rule(&self, op: DeltaRule) -> Result<()> {
        let (heads, bytes) = (op.shape.key_heads, op.qkv.bytes());
        types!(op.qkv.dtype(), T => {
            let pass = delta::DeltaForward::<T>::new(op)?;
            self.parts((heads, 1, bytes), &|thread, heads| {
                let (mut tiles, mut gemm) = (lock(&self.attention[thread]), lock(&self.gemm[thread]));
                // SAFETY: as above.
                unsafe { pass.heads(self.level, &mut tiles, &mut gemm, heads) };
                Ok(())
            })
        })
    }
    fn delta_rule_backward(&self, op: DeltaRuleBackward) -> Result<()> {
        let (heads, bytes) = (op.shape.key_heads, op.qkv.bytes());
        types!(op.qkv.dtype(), T => {
            let pass = delta::DeltaBackward::<T>::new(op)?;
            self.parts((heads, 1, bytes), &|thread, heads| {
                let (mut tiles, mut gemm) = (lock(&self.attention[thread]), lock(&self.gemm[thread]));
                // SAFETY: as above.
                unsafe { pass.heads(self.level, &mut tiles, &mut gemm, heads) };
                Ok(())
            })
        })
    }
}
