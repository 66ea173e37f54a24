//! Dispatch of every operation to the compiled variant for its dtype and vector width. Never divides work itself.
use super::{CpuDevice, lock};
use crate::base::{Category, DType, Error, Meter, Result};
use crate::device::buf::Place;
use crate::device::cpu::divide::{Divisible, FewRows, LINE, LowerHalf};
use crate::device::cpu::operands::{first, length};
use crate::device::cpu::{
    activation, attention, distill, dropout, element, embed, expand, experts, fp8, gemm, loss, memory, norm, optim,
    reduce, ring, rope,
};
use crate::device::ops::{
    ALIGN, AdamW, Attention, AttentionBackward, AttentionDelta, AttentionMerge, AttentionPass, AttentionPassBackward,
    AttentionRanges, AttentionShape, Balance, Bias, BiasBackward, ClipScale, CombineRows, CopyColumns, CrossEntropy,
    CrossEntropyFinish, CrossEntropyPart, Dequantize, DistillFinish, DistillPart, Dropout, DropoutRows, Embed,
    EmbedBackward, Expand, Gelu, GeluBackward, Gemm, GemmShape, GemmThen, Glu, GluBackward, Grouped, GroupedGemm,
    LIMBS, LayerNorm, LayerNormBackward, Polynomial, QkNormRope, QkNormRopeBackward, Quantize, RmsNorm,
    RmsNormBackward, Rope, Route, RouteBackward, RouteLoad, Sgd, Sigmoid, SumSquares, TakeRows, WeighRows,
};
use crate::device::{Buf, Device, View, ViewMut, epilogue, unbacked};
use half::{bf16, f16};
use std::sync::Mutex;

/// f32s of a cache line: statistics of rows are one each.
const FLOATS: usize = LINE / 4;

/// Runs `$call` with the type `$T` of an operand. Families check their operands, and thereby that the type is
/// supported.
macro_rules! types {
    ($dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            DType::Bf16 => types!(@run $T = bf16, $call),
            DType::F16 => types!(@run $T = f16, $call),
            _ => types!(@run $T = f32, $call),
        }
    };
    (@run $T:ident = $type:ty, $call:expr) => {{
        type $T = $type;
        $call
    }};
}

/// As [`types`], at the device's level.
macro_rules! floats {
    ($dev:ident, $dtype:expr, $T:ident => $call:expr) => {
        types!($dtype, $T => $dev.level.run(
            #[inline(always)]
            || $call,
        ))
    };
}

impl Device for CpuDevice {
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
        match self.is_unbacked() {
            true => unbacked::alloc(dtype, len, lease),
            false => self.touched(memory::alloc(dtype, len, lease)?),
        }
    }
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf> {
        let lease = self.meter.lease_of(Category::Host, dtype, len, len * dtype.size());
        match self.is_unbacked() {
            true => unbacked::alloc_host(dtype, len, lease),
            false => self.touched(memory::alloc_at(Place::Mapped, dtype, len, lease)?),
        }
    }
    fn is_unbacked(&self) -> bool {
        self.unbacked.is_some()
    }
    fn host_threads(&self) -> usize {
        self.pool.threads()
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

    fn gemm(&self, op: Gemm) -> Result<()> {
        let (few, step) = {
            let scratch = lock(&self.gemm[0]);
            (scratch.has_few_rows(&op.shape), scratch.kernel().panel())
        };
        let run = |thread: usize, op| gemm::gemm(&mut lock(&self.gemm[thread]), op);
        match few {
            true => self.rows_on(LINE, FewRows(op), &|thread, FewRows(op)| run(thread, op)),
            false if op.shape.symmetric && lock(&self.gemm[0]).fuses(&op.shape) => {
                op.check()?;
                let (mut c, shape) = (op.c, op.shape);
                let half = LowerHalf { op: Gemm { c: c.reborrow(), ..op }, first: 0 };
                self.rows_on(step, half, &|thread, LowerHalf { op, first }| {
                    gemm::gemm_lower(&mut lock(&self.gemm[thread]), op, first)
                })?;
                floats!(self, c.dtype(), T => gemm::mirror::<T>(&shape, c))
            }
            false => self.rows_on(step, op, &run),
        }
    }
    fn gemm_then(&self, op: GemmThen) -> Result<()> {
        let (fuses, step) = {
            let scratch = lock(&self.gemm[0]);
            (scratch.fuses(&op.shape), scratch.kernel().panel())
        };
        match fuses {
            true => self.rows_on(step, op, &|thread, op| gemm::gemm_then(&mut lock(&self.gemm[thread]), op)),
            false => epilogue::in_passes(self, op),
        }
    }
    fn bias(&self, op: Bias) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.y.dtype(), T => norm::bias::<T>(op)))
    }
    fn bias_backward(&self, op: BiasBackward) -> Result<()> {
        op.check()?;
        self.parts((op.db.len(), LINE, op.dy.bytes()), &|_, columns| {
            // SAFETY: `parts` makes parts that do not overlap.
            let db = unsafe { op.db.part(columns.clone()) };
            floats!(self, op.dy.dtype(), T => norm::bias_backward::<T>(&op, columns.start, db))
        })
    }

    fn rmsnorm(&self, op: RmsNorm) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => norm::rmsnorm::<T>(op)))
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
    fn layernorm(&self, op: LayerNorm) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => norm::layernorm::<T>(op)))
    }
    fn layernorm_backward(&self, op: LayerNormBackward) -> Result<()> {
        if self.worth(op.x.bytes()) == 1 {
            return floats!(self, op.x.dtype(), T => norm::layernorm_backward::<T, true>(op));
        }
        op.check()?;
        self.parts((op.dw.len(), LINE, op.x.bytes()), &|_, columns| {
            // SAFETY: as above.
            let of = [&op.dw, &op.db].map(|x| unsafe { x.part(columns.clone()) });
            floats!(self, op.x.dtype(), T => norm::layernorm_weights::<T>(&op, columns.start, of))
        })?;
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => norm::layernorm_backward::<T, false>(op)))
    }

    fn rope(&self, op: Rope) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.qkv.dtype(), T => rope::rope::<T>(op)))
    }
    fn qk_norm_rope(&self, op: QkNormRope) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.qkv.dtype(), T => rope::qk_norm_rope::<T>(op)))
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
        let (heads, bytes) = (op.shape.kv_heads, op.qkv.bytes());
        types!(op.qkv.dtype(), T => {
            let pass = attention::WholeForward::<T>::new(op)?;
            // SAFETY: `heads` makes parts that do not overlap.
            self.heads(heads, bytes, &|scratch, heads| unsafe { pass.heads(self.level, scratch, heads) })
        })
    }
    fn attention_sums(&self, shape: &AttentionShape, dtype: DType, queries: usize) -> usize {
        self.unbacked.map_or(0, |sums| sums(shape, dtype, queries))
    }
    fn attention_backward(&self, op: AttentionBackward) -> Result<()> {
        let (heads, bytes) = (op.shape.kv_heads, op.qkv.bytes());
        types!(op.qkv.dtype(), T => {
            let pass = attention::WholeBackward::<T>::new(op)?;
            // SAFETY: `heads` makes parts that do not overlap.
            self.heads(heads, bytes, &|scratch, heads| unsafe { pass.heads(self.level, scratch, heads) })
        })
    }
    fn attention_ranges(&self, op: AttentionRanges) -> Result<()> {
        ring::ranges(op)
    }
    fn attention_pass(&self, op: AttentionPass) -> Result<()> {
        let (heads, bytes) = (op.shape.kv_heads, op.qkv.bytes());
        types!(op.qkv.dtype(), T => {
            let pass = ring::PassForward::<T>::new(op)?;
            // SAFETY: `heads` makes parts that do not overlap.
            self.heads(heads, bytes, &|scratch, heads| unsafe { pass.heads(self.level, scratch, heads) })
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
    fn attention_pass_backward(&self, op: AttentionPassBackward) -> Result<()> {
        let (heads, bytes) = (op.shape.kv_heads, op.qkv.bytes());
        types!(op.qkv.dtype(), T => {
            let pass = ring::PassBackward::<T>::new(op)?;
            // SAFETY: `heads` makes parts that do not overlap.
            self.heads(heads, bytes, &|scratch, heads| unsafe { pass.heads(self.level, scratch, heads) })
        })
    }
    fn copy_columns(&self, op: CopyColumns) -> Result<()> {
        self.rows(op, &|op| {
            floats!(self, op.src.dtype(), S => floats!(self, op.dst.dtype(), D => ring::copy_columns::<S, D>(op)))
        })
    }

    fn swiglu(&self, op: Glu) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.gate.dtype(), T => activation::swiglu::<T>(op)))
    }
    fn swiglu_backward(&self, op: GluBackward) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.gate.dtype(), T => activation::swiglu_backward::<T>(op)))
    }
    fn geglu(&self, op: Glu) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.gate.dtype(), T => activation::geglu::<T>(op)))
    }
    fn geglu_backward(&self, op: GluBackward) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.gate.dtype(), T => activation::geglu_backward::<T>(op)))
    }
    fn gelu(&self, op: Gelu) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => activation::gelu::<T>(op)))
    }
    fn gelu_backward(&self, op: GeluBackward) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => activation::gelu_backward::<T>(op)))
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

    fn embed(&self, op: Embed) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.w.dtype(), T => embed::embed::<T>(op)))
    }
    fn embed_backward(&self, op: EmbedBackward) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.dy.dtype(), T => embed::embed_backward::<T>(op)))
    }
    fn cross_entropy(&self, op: CrossEntropy) -> Result<()> {
        if self.worth(op.logits.bytes()) == 1 {
            let scratch = &mut lock(&self.gemm[0]);
            return floats!(self, op.logits.dtype(), T => loss::cross_entropy::<T>(op, scratch));
        }
        let (n, CrossEntropy { shape, targets, scale, logits, loss }) = (op.check()?, op);
        loss::check(CrossEntropy::OP, targets.host(CrossEntropy::OP)?, shape.vocab)?;
        self.row_losses(n, logits, loss, &|thread, row, logits, loss| {
            let op = CrossEntropy { shape, targets: targets.slice(row..row + 1), scale, logits, loss };
            let scratch = &mut lock(&self.gemm[thread]);
            floats!(self, op.logits.dtype(), T => loss::cross_entropy::<T>(op, scratch))
        })
    }
    fn expand(&self, op: Expand) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.y.dtype(), T => expand::expand::<T>(op)))
    }
    fn quantize(&self, op: Quantize) -> Result<()> {
        self.rows_on(op.shape.tall, op, &|_, op| {
            self.level.run(
                #[inline(always)]
                || fp8::quantize(op),
            )
        })
    }
    fn dequantize(&self, op: Dequantize) -> Result<()> {
        self.rows_on(op.shape.tall, op, &|_, op| {
            self.level.run(
                #[inline(always)]
                || fp8::dequantize(op),
            )
        })
    }
    fn cross_entropy_part(&self, op: CrossEntropyPart) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.logits.dtype(), T => loss::part::<T>(op)))
    }
    fn cross_entropy_finish(&self, op: CrossEntropyFinish) -> Result<()> {
        const OP: &str = CrossEntropyFinish::OP;
        let ((n, _), CrossEntropyFinish { shape, part, targets, stats, scale, logits, loss }) = (op.check()?, op);
        let (targets, stats) = (targets.host::<i32>(OP)?, stats.host::<f32>(OP)?.as_chunks().0);
        loss::check(OP, targets, part.of)?;
        let scale = scale.map(|scale| first(OP, scale)).transpose()?;
        self.row_losses(n, logits, loss, &|_, row, logits, loss| {
            let of_row = loss::FinishRow { shape, part, target: targets[row], stats: &stats[row..], apart: n, scale };
            let loss = &mut loss.host::<f64>(OP)?[0];
            floats!(self, logits.dtype(), T => {
                *loss = loss::finish(&of_row, logits.host::<T>(OP)?);
                Ok(())
            })
        })
    }
    fn distill_part(&self, op: DistillPart) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.logits.dtype(), T => distill::part::<T>(op)))
    }
    fn distill_finish(&self, op: DistillFinish) -> Result<()> {
        const OP: &str = DistillFinish::OP;
        let ((n, _), DistillFinish { shape, part, terms, targets, teacher, stats, scale, logits, loss }) =
            (op.check()?, op);
        let (targets, stats) = (targets.host::<i32>(OP)?, stats.host::<f32>(OP)?.as_chunks().0);
        loss::check(OP, targets, part.of)?;
        let scale = first(OP, scale)?;
        self.row_losses(n, logits, loss, &|_, row, logits, loss| {
            let (target, stats) = (targets[row], &stats[row..]);
            let of_row = distill::DistillRow { shape, part, terms, target, stats, apart: n, scale };
            let (teacher, loss) =
                (teacher.slice(row * shape.vocab..(row + 1) * shape.vocab), &mut loss.host::<f64>(OP)?[0]);
            floats!(self, logits.dtype(), T => {
                *loss = distill::finish::<T>(&of_row, logits.host(OP)?, teacher.host(OP)?);
                Ok(())
            })
        })
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
    /// Group by group: each product is divided over the threads as any other.
    fn grouped_gemm(&self, op: GroupedGemm) -> Result<()> {
        let (_, rows) = op.check()?;
        let GroupedGemm { kind, n, k, offsets, a, b, mut c, stride, accumulate, alike } = op;
        let step = lock(&self.gemm[0]).kernel().panel();
        let offsets = offsets.host::<u32>(GroupedGemm::OP)?;
        for (e, of) in offsets.windows(2).enumerate() {
            let (from, to) = (of[0] as usize, of[1] as usize);
            if from > to || to > rows {
                return Err(Error::op(GroupedGemm::OP, format!("group {e} has rows {from} to {to} of {rows}")));
            }
            let (m, matrix) = (to - from, e * stride..e * stride + n * k);
            let (shape, of_a, of_b, of_c) = match kind {
                Grouped::Forward => (GemmShape::nt(m, n, k), from * k..to * k, matrix, from * n..to * n),
                Grouped::Input => (GemmShape::nn(m, n, k), from * k..to * k, matrix, from * n..to * n),
                Grouped::Weight => (GemmShape::tn(n, k, m), from * n..to * n, from * k..to * k, matrix),
            };
            let (shape, c) = (GemmShape { accumulate, ..shape }, c.reborrow().slice(of_c));
            let product = Gemm { shape, a: a.slice(of_a), b: b.slice(of_b), c };
            match alike {
                true => self.rows_on(step, product, &|t, op| gemm::gemm_alike(&mut lock(&self.gemm[t]), op))?,
                false => self.gemm(product)?,
            }
        }
        Ok(())
    }
}
