//! Every operation of the CPU device: checks lengths and dtypes and chooses the compiled form. The arithmetic is in the files by
//! family.
use super::element::{add, convert, scale};
use super::operands::{constants, first, lengths, rows};
use super::{
    CpuDevice, activation, attention, dropout, embed, gemm, lock, loss, memory, norm, optim, reduce, ring, rope,
};
use crate::base::{Category, DType, Error, Meter, Result};
use crate::device::buf::Place;
use crate::device::{
    AdamWScalars, Attention, Buf, Columns, CrossEntropy, Device, Embed, Epilogue, Gemm, LIMBS, QkNormRope, RmsNorm,
    Rope, Sgd, View, ViewMut, VocabPart,
};
use crate::device::{epilogue, unbacked};
use half::{bf16, f16};

/// Runs `$body` at the device's level with the type `$T` that `$dtype` names; `?` inside leaves the closure.
macro_rules! floats {
    ($dev:ident, $op:ident, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F32 => floats!(@run $dev, $T = f32, $body),
            DType::Bf16 => floats!(@run $dev, $T = bf16, $body),
            DType::F16 => floats!(@run $dev, $T = f16, $body),
            other => Err(Error::op($op, format!("computes in f32, bf16 or f16, got {other}"))),
        }
    };
    (@run $dev:ident, $T:ident = $type:ty, $body:expr) => {{
        type $T = $type;
        $dev.level.run(
            #[inline(always)]
            || {
                $body;
                Ok(())
            },
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
            true => unbacked::alloc_at(Place::Mapped, dtype, len, lease),
            false => memory::alloc_at(Place::Mapped, dtype, len, lease),
        }
    }
    fn is_unbacked(&self) -> bool {
        self.unbacked.is_some()
    }
    fn attention_sums(&self, shape: &Attention, dtype: DType, queries: usize) -> usize {
        self.unbacked.map_or(0, |sums| sums(shape, dtype, queries))
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn upload(&self, src: &[u8], mut dst: ViewMut) -> Result<()> {
        lengths("upload", &[("source (bytes)", src.len(), dst.bytes())])?;
        if self.is_unbacked() {
            return Ok(());
        }
        // SAFETY: `dst` is exclusive and holds as many bytes; every dtype takes any bits.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), src.len()) };
        Ok(())
    }
    fn download(&self, src: View, dst: &mut [u8]) -> Result<()> {
        lengths("download", &[("destination (bytes)", dst.len(), src.bytes())])?;
        // SAFETY: `dst` is exclusive and holds as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    fn copy(&self, src: View, mut dst: ViewMut) -> Result<()> {
        const OP: &str = "copy";
        lengths(OP, &[("dst", dst.len(), src.len())])?;
        match (src.dtype(), dst.dtype()) {
            (a, b) if a == b => {
                // SAFETY: alike in dtype and length; `dst` is exclusive, so they do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), src.bytes()) };
                Ok(())
            }
            (DType::F32, _) => floats!(self, OP, dst.dtype(), T => convert::<f32, T>(src.host(OP)?, dst.host(OP)?)),
            (_, DType::F32) => floats!(self, OP, src.dtype(), T => convert::<T, f32>(src.host(OP)?, dst.host(OP)?)),
            (a, b) => Err(Error::op(OP, format!("cannot cast {a} to {b}"))),
        }
    }
    fn zero(&self, mut x: ViewMut) -> Result<()> {
        // SAFETY: `x` is exclusive; zero bits are zero in every dtype.
        unsafe { std::ptr::write_bytes(x.as_mut_ptr(), 0, x.bytes()) };
        Ok(())
    }
    fn add(&self, x: View, y: ViewMut) -> Result<()> {
        const OP: &str = "add";
        lengths(OP, &[("y", y.len(), x.len())])?;
        match x.dtype() == y.dtype() {
            true => floats!(self, OP, x.dtype(), T => add::<T, T>(x.host(OP)?, y.host(OP)?)),
            false => floats!(self, OP, x.dtype(), T => add::<T, f32>(x.host(OP)?, y.host(OP)?)),
        }
    }

    fn scale(&self, factor: f32, x: ViewMut) -> Result<()> {
        const OP: &str = "scale";
        floats!(self, OP, x.dtype(), T => scale::<T>(factor, x.host(OP)?))
    }

    fn gemm(&self, shape: &Gemm, a: View, b: View, c: ViewMut) -> Result<()> {
        gemm::gemm(&mut lock(&self.gemm), shape, a, b, c)
    }
    fn gemm_then(&self, shape: &Gemm, a: View, b: View, c: ViewMut, then: Epilogue) -> Result<()> {
        epilogue::in_passes(self, shape, a, b, c, then)
    }
    fn bias(&self, bias: View, y: ViewMut) -> Result<()> {
        const OP: &str = "bias";
        rows(OP, "y", y.len(), bias.len())?;
        floats!(self, OP, y.dtype(), T => norm::bias::<T>(bias.host(OP)?, y.host(OP)?))
    }
    fn bias_backward(&self, dy: View, db: ViewMut) -> Result<()> {
        const OP: &str = "bias_backward";
        rows(OP, "dy", dy.len(), db.len())?;
        floats!(self, OP, dy.dtype(), T => norm::bias_backward::<T>(dy.host(OP)?, db.host(OP)?))
    }

    fn rmsnorm(&self, norm: &RmsNorm, x: View, w: View, y: ViewMut, rstd: ViewMut) -> Result<()> {
        const OP: &str = "rmsnorm";
        let n = rows(OP, "x", x.len(), w.len())?;
        lengths(OP, &[("y", y.len(), x.len()), ("rstd", rstd.len(), n)])?;
        floats!(self, OP, x.dtype(), T =>
            norm::rmsnorm::<T>(norm, x.host(OP)?, w.host(OP)?, y.host(OP)?, rstd.host(OP)?))
    }
    fn rmsnorm_backward(
        &self,
        norm: &RmsNorm,
        x: View,
        w: View,
        rstd: View,
        dy: View,
        dx: ViewMut,
        dw: ViewMut,
    ) -> Result<()> {
        const OP: &str = "rmsnorm_backward";
        let n = rows(OP, "x", x.len(), w.len())?;
        lengths(OP, &[("rstd", rstd.len(), n), ("dw", dw.len(), w.len())])?;
        lengths(OP, &[("dy", dy.len(), x.len()), ("dx", dx.len(), x.len())])?;
        floats!(self, OP, x.dtype(), T => norm::rmsnorm_backward::<T>(
            norm, x.host(OP)?, w.host(OP)?, rstd.host(OP)?, dy.host(OP)?, dx.host(OP)?, dw.host(OP)?))
    }
    fn layernorm(&self, eps: f32, x: View, w: View, b: View, y: ViewMut, stats: ViewMut) -> Result<()> {
        const OP: &str = "layernorm";
        let n = rows(OP, "x", x.len(), w.len())?;
        lengths(OP, &[("b", b.len(), w.len()), ("y", y.len(), x.len()), ("stats", stats.len(), 2 * n)])?;
        floats!(self, OP, x.dtype(), T =>
            norm::layernorm::<T>(eps, x.host(OP)?, w.host(OP)?, b.host(OP)?, y.host(OP)?, stats.host(OP)?))
    }
    fn layernorm_backward(
        &self,
        x: View,
        w: View,
        stats: View,
        dy: View,
        dx: ViewMut,
        dw: ViewMut,
        db: ViewMut,
    ) -> Result<()> {
        const OP: &str = "layernorm_backward";
        let n = rows(OP, "x", x.len(), w.len())?;
        lengths(OP, &[("stats", stats.len(), 2 * n), ("dw", dw.len(), w.len()), ("db", db.len(), w.len())])?;
        lengths(OP, &[("dy", dy.len(), x.len()), ("dx", dx.len(), x.len())])?;
        floats!(self, OP, x.dtype(), T => norm::layernorm_backward::<T>(
            x.host(OP)?, w.host(OP)?, stats.host(OP)?, dy.host(OP)?, dx.host(OP)?, dw.host(OP)?, db.host(OP)?))
    }

    fn rope(&self, shape: &Rope, table: View, positions: View, qkv: ViewMut, inverse: bool) -> Result<()> {
        const OP: &str = "rope";
        if shape.heads * shape.head_dim > shape.row {
            return Err(Error::op(OP, format!("{shape:?}: heads must fit the row")));
        }
        let n = rows(OP, "qkv", qkv.len(), shape.row)?;
        let turns = rope::turns(OP, shape.head_dim, table, positions, n)?;
        floats!(self, OP, qkv.dtype(), T => rope::rope::<T>(shape, turns, qkv.host(OP)?, inverse))
    }
    fn qk_norm_rope(
        &self,
        shape: &QkNormRope,
        table: View,
        positions: View,
        wq: View,
        wk: View,
        qkv: View,
        out: ViewMut,
        rstd: ViewMut,
    ) -> Result<()> {
        const OP: &str = "qk_norm_rope";
        let n = rows(OP, "qkv", qkv.len(), shape.row())?;
        lengths(
            OP,
            &[("wq", wq.len(), shape.head_dim), ("wk", wk.len(), shape.head_dim), ("out", out.len(), qkv.len())],
        )?;
        lengths(OP, &[("rstd", rstd.len(), n * (shape.heads + shape.kv_heads))])?;
        let turns = rope::turns(OP, shape.head_dim, table, positions, n)?;
        floats!(self, OP, qkv.dtype(), T => rope::qk_norm_rope::<T>(
            shape, turns, [wq.host(OP)?, wk.host(OP)?], qkv.host(OP)?, out.host(OP)?, rstd.host(OP)?))
    }
    fn qk_norm_rope_backward(
        &self,
        shape: &QkNormRope,
        table: View,
        positions: View,
        wq: View,
        wk: View,
        qkv: View,
        rstd: View,
        dqkv: ViewMut,
        dwq: ViewMut,
        dwk: ViewMut,
    ) -> Result<()> {
        const OP: &str = "qk_norm_rope_backward";
        let (n, d) = (rows(OP, "qkv", qkv.len(), shape.row())?, shape.head_dim);
        lengths(OP, &[("wq", wq.len(), d), ("wk", wk.len(), d), ("dwq", dwq.len(), d), ("dwk", dwk.len(), d)])?;
        lengths(OP, &[("rstd", rstd.len(), n * (shape.heads + shape.kv_heads)), ("dqkv", dqkv.len(), qkv.len())])?;
        let turns = rope::turns(OP, d, table, positions, n)?;
        floats!(self, OP, qkv.dtype(), T => rope::qk_norm_rope_backward::<T>(
            shape, turns, [wq.host(OP)?, wk.host(OP)?], qkv.host(OP)?, rstd.host(OP)?, dqkv.host(OP)?,
            [dwq.host(OP)?, dwk.host(OP)?]))
    }
    fn attention(&self, shape: &Attention, cu_seqlens: View, qkv: View, o: ViewMut, lse: ViewMut) -> Result<()> {
        const OP: &str = "attention";
        let n = shape.rows(OP, qkv.len())?;
        lengths(OP, &[("o", o.len(), n * shape.heads * shape.head_dim), ("lse", lse.len(), shape.heads * n)])?;
        let documents = attention::documents(OP, cu_seqlens.host(OP)?, n)?;
        let scratch = &mut *lock(&self.attention);
        floats!(self, OP, qkv.dtype(), T =>
            attention::forward::<T>(self.level, scratch, shape, documents, qkv.host(OP)?, o.host(OP)?, lse.host(OP)?))
    }
    fn attention_backward(
        &self,
        shape: &Attention,
        cu_seqlens: View,
        qkv: View,
        o: View,
        lse: View,
        d_o: View,
        delta: ViewMut,
        _: ViewMut,
        dqkv: ViewMut,
    ) -> Result<()> {
        const OP: &str = "attention_backward";
        let n = shape.rows(OP, qkv.len())?;
        let (out, stats) = (n * shape.heads * shape.head_dim, shape.heads * n);
        lengths(OP, &[("o", o.len(), out), ("lse", lse.len(), stats), ("d_o", d_o.len(), out)])?;
        lengths(OP, &[("delta", delta.len(), stats), ("dqkv", dqkv.len(), qkv.len())])?;
        let documents = attention::documents(OP, cu_seqlens.host(OP)?, n)?;
        let scratch = &mut *lock(&self.attention);
        floats!(self, OP, qkv.dtype(), T => attention::backward::<T>(self.level, scratch, shape, documents, qkv.host(OP)?, o.host(OP)?, lse.host(OP)?, d_o.host(OP)?, delta.host(OP)?,
            dqkv.host(OP)?))
    }
    fn attention_ranges(
        &self,
        shape: &Attention,
        cu_seqlens: View,
        q_rows: View,
        k_rows: View,
        of_queries: ViewMut,
        of_keys: ViewMut,
    ) -> Result<()> {
        const OP: &str = "attention_ranges";
        let (queries, keys) = (q_rows.len(), k_rows.len());
        lengths(OP, &[("of_queries", of_queries.len(), 2 * queries), ("of_keys", of_keys.len(), 2 * keys)])?;
        let rows = [q_rows.host(OP)?, k_rows.host(OP)?];
        ring::ranges(shape, cu_seqlens.host(OP)?, rows, of_queries.host(OP)?, of_keys.host(OP)?)
    }
    fn attention_pass(
        &self,
        shape: &Attention,
        of_queries: View,
        qkv: View,
        kv: View,
        o: ViewMut,
        lse: ViewMut,
    ) -> Result<()> {
        const OP: &str = "attention_pass";
        let (queries, _) = shape.block(OP, qkv.len(), kv.len())?;
        let (out, stats) = (queries * shape.heads * shape.head_dim, shape.heads * queries);
        lengths(OP, &[("of_queries", of_queries.len(), 2 * queries), ("o", o.len(), out), ("lse", lse.len(), stats)])?;
        let scratch = &mut *lock(&self.attention);
        floats!(self, OP, qkv.dtype(), T => ring::forward::<T>(self.level, scratch, shape, of_queries.host(OP)?,
            qkv.host(OP)?, kv.host(OP)?, o.host(OP)?, lse.host(OP)?))
    }
    fn attention_merge(&self, shape: &Attention, o_pass: View, lse_pass: View, o: ViewMut, lse: ViewMut) -> Result<()> {
        const OP: &str = "attention_merge";
        let n = rows(OP, "o", o.len(), shape.heads * shape.head_dim)?;
        let stats = shape.heads * n;
        lengths(
            OP,
            &[("o_pass", o_pass.len(), o.len()), ("lse_pass", lse_pass.len(), stats), ("lse", lse.len(), stats)],
        )?;
        ring::merge(shape, o_pass.host(OP)?, lse_pass.host(OP)?, o.host(OP)?, lse.host(OP)?);
        Ok(())
    }
    fn attention_delta(&self, shape: &Attention, o: View, d_o: View, delta: ViewMut) -> Result<()> {
        const OP: &str = "attention_delta";
        let n = rows(OP, "o", o.len(), shape.heads * shape.head_dim)?;
        lengths(OP, &[("d_o", d_o.len(), o.len()), ("delta", delta.len(), shape.heads * n)])?;
        floats!(self, OP, o.dtype(), T => attention::delta::<T>(shape, o.host(OP)?, d_o.host(OP)?, delta.host(OP)?))
    }
    fn attention_pass_backward(
        &self,
        shape: &Attention,
        of_queries: View,
        of_keys: View,
        qkv: View,
        kv: View,
        lse: View,
        delta: View,
        d_o: View,
        _: ViewMut,
        dq: ViewMut,
        dkv: ViewMut,
    ) -> Result<()> {
        const OP: &str = "attention_pass_backward";
        let (queries, keys) = shape.block(OP, qkv.len(), kv.len())?;
        let (out, stats) = (queries * shape.heads * shape.head_dim, shape.heads * queries);
        lengths(OP, &[("of_queries", of_queries.len(), 2 * queries), ("of_keys", of_keys.len(), 2 * keys)])?;
        lengths(OP, &[("lse", lse.len(), stats), ("delta", delta.len(), stats), ("d_o", d_o.len(), out)])?;
        lengths(OP, &[("dq", dq.len(), out), ("dkv", dkv.len(), kv.len())])?;
        let scratch = &mut *lock(&self.attention);
        floats!(self, OP, qkv.dtype(), T => ring::backward::<T>(self.level, scratch, shape,
            [of_queries.host(OP)?, of_keys.host(OP)?], [qkv.host(OP)?, kv.host(OP)?, d_o.host(OP)?],
            [lse.host(OP)?, delta.host(OP)?], dq.host(OP)?, dkv.host(OP)?))
    }
    fn copy_columns(&self, shape: &Columns, src: View, dst: ViewMut) -> Result<()> {
        const OP: &str = "copy_columns";
        shape.check(src.len(), dst.len())?;
        floats!(self, OP, src.dtype(), S => match dst.dtype() {
            DType::F32 => ring::copy_columns::<S, f32>(shape, src.host(OP)?, dst.host(OP)?),
            DType::F16 => ring::copy_columns::<S, f16>(shape, src.host(OP)?, dst.host(OP)?),
            _ => ring::copy_columns::<S, bf16>(shape, src.host(OP)?, dst.host(OP)?),
        })
    }

    fn swiglu(&self, gate: View, up: View, y: ViewMut) -> Result<()> {
        const OP: &str = "swiglu";
        lengths(OP, &[("up", up.len(), gate.len()), ("y", y.len(), gate.len())])?;
        floats!(self, OP, gate.dtype(), T => activation::swiglu::<T>(gate.host(OP)?, up.host(OP)?, y.host(OP)?))
    }
    fn swiglu_backward(&self, gate: View, up: View, dy: View, dgate: ViewMut, dup: ViewMut) -> Result<()> {
        const OP: &str = "swiglu_backward";
        let n = gate.len();
        lengths(OP, &[("up", up.len(), n), ("dy", dy.len(), n), ("dgate", dgate.len(), n), ("dup", dup.len(), n)])?;
        floats!(self, OP, gate.dtype(), T => activation::swiglu_backward::<T>(
            gate.host(OP)?, up.host(OP)?, dy.host(OP)?, dgate.host(OP)?, dup.host(OP)?))
    }
    fn geglu(&self, gate: View, up: View, y: ViewMut) -> Result<()> {
        const OP: &str = "geglu";
        lengths(OP, &[("up", up.len(), gate.len()), ("y", y.len(), gate.len())])?;
        floats!(self, OP, gate.dtype(), T => activation::geglu::<T>(gate.host(OP)?, up.host(OP)?, y.host(OP)?))
    }
    fn geglu_backward(&self, gate: View, up: View, dy: View, dgate: ViewMut, dup: ViewMut) -> Result<()> {
        const OP: &str = "geglu_backward";
        let n = gate.len();
        lengths(OP, &[("up", up.len(), n), ("dy", dy.len(), n), ("dgate", dgate.len(), n), ("dup", dup.len(), n)])?;
        floats!(self, OP, gate.dtype(), T => activation::geglu_backward::<T>(
            gate.host(OP)?, up.host(OP)?, dy.host(OP)?, dgate.host(OP)?, dup.host(OP)?))
    }
    fn gelu(&self, x: View, y: ViewMut) -> Result<()> {
        const OP: &str = "gelu";
        lengths(OP, &[("y", y.len(), x.len())])?;
        floats!(self, OP, x.dtype(), T => activation::gelu::<T>(x.host(OP)?, y.host(OP)?))
    }
    fn gelu_backward(&self, x: View, dy: View, dx: ViewMut) -> Result<()> {
        const OP: &str = "gelu_backward";
        lengths(OP, &[("dy", dy.len(), x.len()), ("dx", dx.len(), x.len())])?;
        floats!(self, OP, x.dtype(), T => activation::gelu_backward::<T>(x.host(OP)?, dy.host(OP)?, dx.host(OP)?))
    }
    fn dropout(&self, p: f32, key: View, x: ViewMut) -> Result<()> {
        const OP: &str = "dropout";
        if !(0.0..1.0).contains(&p) {
            return Err(Error::op(OP, format!("p = {p} is not in [0, 1)")));
        }
        key.fits(OP, "key", DType::U32, 2)?;
        let key = key.host::<u32>(OP)?;
        let key = u64::from(key[0]) | u64::from(key[1]) << 32;
        floats!(self, OP, x.dtype(), T => dropout::dropout::<T>(p, key, x.host(OP)?))
    }

    fn embed(&self, shape: &Embed, tokens: View, w: View, y: ViewMut, accumulate: bool) -> Result<()> {
        const OP: &str = "embed";
        let tokens = tokens.host::<u32>(OP)?;
        let Some(c) = shape.columns(OP, tokens.len(), y.len(), w.len())? else { return Ok(()) };
        embed::check(OP, "token", tokens, shape.rows)?;
        floats!(self, OP, w.dtype(), T => embed::embed::<T>(shape, tokens, w.host(OP)?, y.host(OP)?, c, accumulate))
    }
    fn embed_backward(&self, shape: &Embed, tokens: View, dy: View, dw: ViewMut) -> Result<()> {
        const OP: &str = "embed_backward";
        let tokens = tokens.host::<u32>(OP)?;
        let Some(c) = shape.columns(OP, tokens.len(), dy.len(), dw.len())? else { return Ok(()) };
        embed::check(OP, "token", tokens, shape.rows)?;
        floats!(self, OP, dy.dtype(), T => embed::embed_backward::<T>(shape, tokens, dy.host(OP)?, dw.host(OP)?, c))
    }
    fn cross_entropy(
        &self,
        shape: &CrossEntropy,
        targets: View,
        scale: Option<View>,
        logits: ViewMut,
        loss: ViewMut,
    ) -> Result<()> {
        const OP: &str = "cross_entropy";
        let n = rows(OP, "logits", logits.len(), shape.vocab)?;
        lengths(OP, &[("targets", targets.len(), n), ("loss", loss.len(), 1)])?;
        let (targets, loss) = (targets.host(OP)?, &mut loss.host(OP)?[0]);
        loss::check(OP, targets, shape.vocab)?;
        let scale = scale.map(|scale| first(OP, scale)).transpose()?;
        floats!(self, OP, logits.dtype(), T => loss::cross_entropy::<T>(shape, targets, scale, logits.host(OP)?, loss))
    }
    fn cross_entropy_part(
        &self,
        shape: &CrossEntropy,
        part: &VocabPart,
        targets: View,
        logits: View,
        said: ViewMut,
    ) -> Result<()> {
        const OP: &str = "cross_entropy_part";
        let n = rows(OP, "logits", logits.len(), shape.vocab)?;
        lengths(OP, &[("targets", targets.len(), n), ("said", said.len(), VocabPart::SAID * n)])?;
        let targets = targets.host(OP)?;
        loss::check(OP, targets, part.of)?;
        floats!(self, OP, logits.dtype(), T => loss::part::<T>(shape, part, targets, logits.host(OP)?, said.host(OP)?))
    }
    #[allow(clippy::too_many_arguments)]
    fn cross_entropy_finish(
        &self,
        shape: &CrossEntropy,
        part: &VocabPart,
        targets: View,
        said: View,
        scale: Option<View>,
        logits: ViewMut,
        loss: ViewMut,
    ) -> Result<()> {
        const OP: &str = "cross_entropy_finish";
        let n = rows(OP, "logits", logits.len(), shape.vocab)?;
        lengths(OP, &[("targets", targets.len(), n), ("loss", loss.len(), 1)])?;
        if n == 0 {
            return Ok(());
        }
        rows(OP, "said", said.len(), VocabPart::SAID * n)?;
        let (targets, said, loss) = (targets.host(OP)?, said.host(OP)?, &mut loss.host(OP)?[0]);
        loss::check(OP, targets, part.of)?;
        let scale = scale.map(|scale| first(OP, scale)).transpose()?;
        floats!(self, OP, logits.dtype(), T => loss::finish::<T>(shape, part, targets, said, scale, logits.host(OP)?, loss))
    }

    fn sum_squares(&self, x: View, acc: ViewMut) -> Result<()> {
        const OP: &str = "sum_squares";
        lengths(OP, &[("acc", acc.len(), LIMBS)])?;
        let (x, acc) = (x.host(OP)?, acc.host(OP)?);
        self.level.run(
            #[inline(always)]
            || reduce::sum_squares(x, acc),
        );
        Ok(())
    }
    fn clip_scale(&self, acc: View, max_norm: f32, unscale: View, out: ViewMut) -> Result<()> {
        const OP: &str = "clip_scale";
        lengths(OP, &[("acc", acc.len(), LIMBS), ("out", out.len(), 2)])?;
        reduce::clip_scale(acc.host(OP)?, max_norm, first(OP, unscale)?, out.host(OP)?);
        Ok(())
    }
    fn adamw(
        &self,
        h: View,
        scale: View,
        g: View,
        m: ViewMut,
        v: ViewMut,
        p: ViewMut,
        out: Option<ViewMut>,
    ) -> Result<()> {
        const OP: &str = "adamw";
        let (n, dtype) = (g.len(), out.as_ref().map_or(DType::F32, ViewMut::dtype));
        lengths(OP, &[("m", m.len(), n), ("v", v.len(), n), ("p", p.len(), n)])?;
        lengths(OP, &[("out", out.as_ref().map_or(n, ViewMut::len), n)])?;
        let (h, scale, g) = (constants::<AdamWScalars>(OP, h)?, first(OP, scale)?, g.host(OP)?);
        if !scale.is_finite() {
            return Ok(());
        }
        let (m, v, p) = (m.host(OP)?, v.host(OP)?, p.host(OP)?);
        floats!(self, OP, dtype, T => {
            let out = out.map(|out| out.host::<T>(OP)).transpose()?;
            optim::adamw::<T>(&h, scale, g, m, v, p, out)
        })
    }
    fn sgd(&self, h: View, scale: View, g: View, m: Option<ViewMut>, p: ViewMut, out: Option<ViewMut>) -> Result<()> {
        const OP: &str = "sgd";
        let (n, dtype) = (g.len(), out.as_ref().map_or(DType::F32, ViewMut::dtype));
        lengths(OP, &[("m", m.as_ref().map_or(n, ViewMut::len), n), ("p", p.len(), n)])?;
        lengths(OP, &[("out", out.as_ref().map_or(n, ViewMut::len), n)])?;
        let (h, scale, g, p) = (constants::<Sgd>(OP, h)?, first(OP, scale)?, g.host(OP)?, p.host(OP)?);
        if !scale.is_finite() {
            return Ok(());
        }
        let m = m.map(|m| m.host(OP)).transpose()?;
        floats!(self, OP, dtype, T => {
            let out = out.map(|out| out.host::<T>(OP)).transpose()?;
            optim::sgd::<T>(&h, scale, g, m, p, out)
        })
    }
}
