//! The operations of a GPU: each in a line, which hands it to its family. Never launches itself.
use super::launch::GpuDevice;
use super::{activation, attention, element, embed, loss, norm, optim, ring, rope};
use crate::base::timeline::Mark;
use crate::base::{Category, DType, Error, Meter, Result};
use crate::device::{
    Attention, Buf, Columns, CrossEntropy, Device, Embed, Epilogue, Gemm, QkNormRope, RmsNorm, Rope, View, ViewMut,
    VocabPart, epilogue,
};
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
            bytes.ok_or_else(|| Error::op("alloc", format!("{len} elements of {dtype}: more than addresses")))?;
        self.driver.alloc(dtype, len, category, self.meter.lease_of(category, dtype, len, bytes))
    }
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf> {
        self.driver.alloc_host(dtype, len, self.meter.lease_of(Category::Host, dtype, len, len * dtype.size()))
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

    fn gemm(&self, shape: &Gemm, a: View, b: View, c: ViewMut) -> Result<()> {
        shape.check(&a, &b, &c)?;
        match shape.m == 0 || shape.n == 0 {
            true => Ok(()),
            false => self.driver.gemm(shape, a, b, c),
        }
    }
    fn gemm_then(&self, shape: &Gemm, a: View, b: View, c: ViewMut, then: Epilogue) -> Result<()> {
        then.check(shape, &a, &b, &c)?;
        if shape.m == 0 || shape.n == 0 {
            return Ok(());
        }
        match self.driver.fuses(shape, a, b, &c, &then)? {
            true => self.driver.gemm_then(shape, a, b, c, then),
            false => epilogue::in_passes(self, shape, a, b, c, then),
        }
    }
    fn bias(&self, bias: View, y: ViewMut) -> Result<()> {
        element::bias(self, bias, y)
    }
    fn bias_backward(&self, dy: View, db: ViewMut) -> Result<()> {
        element::bias_backward(self, dy, db)
    }

    fn rmsnorm(&self, norm: &RmsNorm, x: View, w: View, y: ViewMut, rstd: ViewMut) -> Result<()> {
        norm::rmsnorm(self, norm, x, w, y, rstd)
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
        norm::rmsnorm_backward(self, norm, [x, w, rstd, dy], dx, dw)
    }
    fn layernorm(&self, eps: f32, x: View, w: View, b: View, y: ViewMut, stats: ViewMut) -> Result<()> {
        norm::layernorm(self, eps, x, w, b, y, stats)
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
        norm::layernorm_backward(self, [x, w, stats, dy], dx, dw, db)
    }

    fn rope(&self, shape: &Rope, table: View, positions: View, qkv: ViewMut, inverse: bool) -> Result<()> {
        rope::rope(self, shape, table, positions, qkv, inverse)
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
        rope::qk_norm_rope(self, shape, [table, positions, wq, wk, qkv], out, rstd)
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
        rope::qk_norm_rope_backward(self, shape, [table, positions, wq, wk, qkv, rstd], dqkv, [dwq, dwk])
    }
    fn attention(&self, shape: &Attention, cu_seqlens: View, qkv: View, o: ViewMut, lse: ViewMut) -> Result<()> {
        attention::forward(self, shape, cu_seqlens, qkv, o, lse)
    }
    fn attention_sums(&self, shape: &Attention, dtype: DType, queries: usize) -> usize {
        attention::sums_of(self.driver.arch(), shape, dtype, queries)
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
        sums: ViewMut,
        dqkv: ViewMut,
    ) -> Result<()> {
        attention::backward(self, shape, cu_seqlens, [qkv, o, lse, d_o], [delta, sums], dqkv)
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
        ring::ranges(self, shape, [cu_seqlens, q_rows, k_rows], of_queries, of_keys)
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
        attention::pass(self, shape, [of_queries, qkv, kv], o, lse)
    }
    fn attention_merge(&self, shape: &Attention, o_pass: View, lse_pass: View, o: ViewMut, lse: ViewMut) -> Result<()> {
        ring::merge(self, shape, [o_pass, lse_pass], o, lse)
    }
    fn attention_delta(&self, shape: &Attention, o: View, d_o: View, delta: ViewMut) -> Result<()> {
        attention::delta(self, shape, o, d_o, delta)
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
        sums: ViewMut,
        dq: ViewMut,
        dkv: ViewMut,
    ) -> Result<()> {
        attention::pass_backward(self, shape, [of_queries, of_keys], [qkv, kv, lse, delta, d_o], sums, [dq, dkv])
    }
    fn copy_columns(&self, shape: &Columns, src: View, dst: ViewMut) -> Result<()> {
        ring::copy_columns(self, shape, src, dst)
    }

    fn swiglu(&self, gate: View, up: View, y: ViewMut) -> Result<()> {
        activation::swiglu(self, gate, up, y)
    }
    fn swiglu_backward(&self, gate: View, up: View, dy: View, dgate: ViewMut, dup: ViewMut) -> Result<()> {
        activation::swiglu_backward(self, [gate, up, dy], [dgate, dup])
    }
    fn geglu(&self, gate: View, up: View, y: ViewMut) -> Result<()> {
        activation::geglu(self, gate, up, y)
    }
    fn geglu_backward(&self, gate: View, up: View, dy: View, dgate: ViewMut, dup: ViewMut) -> Result<()> {
        activation::geglu_backward(self, [gate, up, dy], [dgate, dup])
    }
    fn gelu(&self, x: View, y: ViewMut) -> Result<()> {
        activation::gelu(self, x, y)
    }
    fn gelu_backward(&self, x: View, dy: View, dx: ViewMut) -> Result<()> {
        activation::gelu_backward(self, x, dy, dx)
    }
    fn dropout(&self, p: f32, key: View, x: ViewMut) -> Result<()> {
        element::dropout(self, p, key, x)
    }

    fn embed(&self, shape: &Embed, tokens: View, w: View, y: ViewMut, accumulate: bool) -> Result<()> {
        embed::embed(self, shape, tokens, w, y, accumulate)
    }
    fn embed_backward(&self, shape: &Embed, tokens: View, dy: View, dw: ViewMut) -> Result<()> {
        embed::embed_backward(self, shape, tokens, dy, dw)
    }
    fn cross_entropy(
        &self,
        shape: &CrossEntropy,
        targets: View,
        scale: Option<View>,
        logits: ViewMut,
        loss: ViewMut,
    ) -> Result<()> {
        loss::cross_entropy(self, shape, targets, scale, logits, loss)
    }
    fn cross_entropy_part(
        &self,
        shape: &CrossEntropy,
        part: &VocabPart,
        targets: View,
        logits: View,
        said: ViewMut,
    ) -> Result<()> {
        loss::part(self, shape, part, targets, logits, said)
    }
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
        loss::finish(self, shape, part, targets, said, scale, logits, loss)
    }

    fn sum_squares(&self, x: View, acc: ViewMut) -> Result<()> {
        optim::sum_squares(self, x, acc)
    }
    fn clip_scale(&self, acc: View, max_norm: f32, unscale: View, out: ViewMut) -> Result<()> {
        optim::clip_scale(self, acc, max_norm, unscale, out)
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
        optim::adamw(self, [h, scale, g], [m, v, p], out)
    }
    fn sgd(&self, h: View, scale: View, g: View, m: Option<ViewMut>, p: ViewMut, out: Option<ViewMut>) -> Result<()> {
        optim::sgd(self, [h, scale, g], m, p, out)
    }
}
