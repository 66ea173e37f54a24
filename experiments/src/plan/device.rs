//! A device that turns each call into the cost of an operation and leaves it to an [`OpExecutor`] whether the operation
//! also runs: planning advances a clock, measuring times a real device. The model, the stores and the optimizer run on
//! it as on any other device, so a plan consists of the calls that a run makes. Never computes.
use super::op::{OpCost, causal_pairs, pass_pairs};
use flatshard::base::{Category, DType, Meter, Result};
use flatshard::device::{
    Attention, Buf, Columns, CrossEntropy, Device, Embed, Epilogue, Gemm, QkNormRope, RmsNorm, Rope, View, ViewMut,
    VocabPart, epilogue,
};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What becomes of the calls.
pub trait OpExecutor: Send + Sync {
    fn name(&self) -> String;
    fn meter(&self) -> &Meter;
    fn alloc(&self, dtype: DType, len: usize, category: Category) -> Result<Buf>;
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()>;
    fn download(&self, src: View, dst: &mut [u8]) -> Result<()>;
    /// `run` does it, given a device.
    fn op(&self, op: OpCost, run: impl FnOnce(&dyn Device) -> Result<()>) -> Result<()>;
}

pub struct OpDevice<E> {
    executor: E,
    /// What was uploaded where: how many pairs attention sees stands in integers.
    words: Mutex<BTreeMap<usize, Vec<u32>>>,
    /// Pairs of a pass of ring attention, by the address of its ranges.
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
    /// The integers that `view`, whole or a part of what was uploaded, holds.
    fn words<T>(&self, view: &View, f: impl FnOnce(&[u32]) -> T) -> T {
        let words = lock(&self.words);
        let held = words.range(..=view.address()).next_back();
        let part = held.and_then(|(start, all)| {
            let first = (view.address() - start) / size_of::<u32>();
            all.get(first..all.len().min(first + view.len()))
        });
        f(part.unwrap_or_default())
    }
    /// From the ranges' making, or from the ranges themselves where they were uploaded.
    fn pairs(&self, ranges: &View) -> u64 {
        let made = lock(&self.pairs).get(&ranges.address()).copied();
        let length = |range: &[u32]| range[1].saturating_sub(range[0]) as u64;
        made.unwrap_or_else(|| self.words(ranges, |words| words.chunks_exact(2).map(length).sum()))
    }
    fn attention_op(&self, name: &'static str, s: &Attention, cu_seqlens: &View, qkv: &View, bytes: usize) -> OpCost {
        let pairs = self.words(cu_seqlens, |c| causal_pairs(c, s.window));
        OpCost::attention(name, s, qkv.dtype(), pairs, bytes)
    }
}

/// Each operation in a line: its arguments, and the operands that it passes over, those that it reads and writes twice.
macro_rules! moves {
    ($($name:ident($($arg:ident: $type:ty),*) $of:ident over [$($operand:ident),*];)*) => { $(
        #[allow(clippy::too_many_arguments)] // the device's
        fn $name(&self, $($arg: $type),*) -> Result<()> {
            let bytes = 0 $(+ $operand.bytes())*;
            let op = OpCost::moves(stringify!($name), $of.dtype(), bytes);
            self.executor.op(op, |dev| dev.$name($($arg),*))
        }
    )* };
}

impl<E: OpExecutor> Device for OpDevice<E> {
    fn name(&self) -> String {
        self.executor.name()
    }
    fn meter(&self) -> &Meter {
        self.executor.meter()
    }
    fn alloc(&self, dtype: DType, len: usize, category: Category) -> Result<Buf> {
        self.executor.alloc(dtype, len, category)
    }
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf> {
        self.executor.alloc(dtype, len, Category::Host)
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
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

    moves! {
        copy(src: View, dst: ViewMut) src over [src, dst];
        zero(x: ViewMut) x over [x];
        add(x: View, y: ViewMut) y over [x, y, y];
        scale(factor: f32, x: ViewMut) x over [x, x];
        bias(bias: View, y: ViewMut) y over [bias, y, y];
        bias_backward(dy: View, db: ViewMut) dy over [dy, db];
        rmsnorm(norm: &RmsNorm, x: View, w: View, y: ViewMut, rstd: ViewMut) x over [x, w, y, rstd];
        rmsnorm_backward(norm: &RmsNorm, x: View, w: View, rstd: View, dy: View, dx: ViewMut, dw: ViewMut)
            x over [x, w, rstd, dy, dx, dx, dw];
        layernorm(eps: f32, x: View, w: View, b: View, y: ViewMut, stats: ViewMut) x over [x, w, b, y, stats];
        layernorm_backward(x: View, w: View, stats: View, dy: View, dx: ViewMut, dw: ViewMut, db: ViewMut)
            x over [x, w, stats, dy, dx, dx, dw, db];
        qk_norm_rope(shape: &QkNormRope, table: View, positions: View, wq: View, wk: View, qkv: View, out: ViewMut,
            rstd: ViewMut) qkv over [positions, qkv, out, rstd];
        qk_norm_rope_backward(shape: &QkNormRope, table: View, positions: View, wq: View, wk: View, qkv: View, rstd: View,
            dqkv: ViewMut, dwq: ViewMut, dwk: ViewMut) qkv over [positions, qkv, rstd, dqkv, dqkv];
        attention_merge(shape: &Attention, o_pass: View, lse_pass: View, o: ViewMut, lse: ViewMut)
            o over [o_pass, lse_pass, o, o, lse, lse];
        attention_delta(shape: &Attention, o: View, d_o: View, delta: ViewMut) o over [o, d_o, delta];
        swiglu(gate: View, up: View, y: ViewMut) y over [gate, up, y];
        swiglu_backward(gate: View, up: View, dy: View, dgate: ViewMut, dup: ViewMut) dy over [gate, up, dy, dgate, dup];
        geglu(gate: View, up: View, y: ViewMut) y over [gate, up, y];
        geglu_backward(gate: View, up: View, dy: View, dgate: ViewMut, dup: ViewMut) dy over [gate, up, dy, dgate, dup];
        gelu(x: View, y: ViewMut) x over [x, y];
        gelu_backward(x: View, dy: View, dx: ViewMut) x over [x, dy, dx];
        dropout(p: f32, key: View, x: ViewMut) x over [x, x];
        cross_entropy(shape: &CrossEntropy, targets: View, scale: Option<View>, logits: ViewMut, loss: ViewMut)
            logits over [targets, logits, logits];
        cross_entropy_part(s: &CrossEntropy, at: &VocabPart, targets: View, logits: View, said: ViewMut)
            logits over [targets, logits, said];
        cross_entropy_finish(
            s: &CrossEntropy, at: &VocabPart, targets: View, said: View, scale: Option<View>, logits: ViewMut, loss: ViewMut
        ) logits over [targets, said, logits, logits];
        sum_squares(x: View, acc: ViewMut) x over [x];
        clip_scale(acc: View, max_norm: f32, unscale: View, out: ViewMut) out over [acc, out];
    }

    fn gemm(&self, shape: &Gemm, a: View, b: View, c: ViewMut) -> Result<()> {
        let op = OpCost::product(shape, a.dtype(), c.dtype());
        self.executor.op(op, |dev| dev.gemm(shape, a, b, c))
    }
    fn gemm_then(&self, shape: &Gemm, a: View, b: View, c: ViewMut, then: Epilogue) -> Result<()> {
        epilogue::in_passes(self, shape, a, b, c, then)
    }
    /// Queries and keys of each row, read and written; the values are not touched.
    fn rope(&self, shape: &Rope, table: View, positions: View, qkv: ViewMut, inverse: bool) -> Result<()> {
        let bytes = 2 * positions.len() * shape.heads * shape.head_dim * qkv.dtype().size();
        let op = OpCost::moves("rope", qkv.dtype(), bytes);
        self.executor.op(op, |dev| dev.rope(shape, table, positions, qkv, inverse))
    }
    fn copy_columns(&self, shape: &Columns, src: View, dst: ViewMut) -> Result<()> {
        let bytes = shape.rows * shape.width * (src.dtype().size() + dst.dtype().size());
        let op = OpCost::moves("copy_columns", src.dtype(), bytes);
        self.executor.op(op, |dev| dev.copy_columns(shape, src, dst))
    }
    /// Only the rows of the table that tokens name.
    fn embed(&self, s: &Embed, tokens: View, w: View, y: ViewMut, accumulate: bool) -> Result<()> {
        let op = OpCost::moves("embed", y.dtype(), 2 * y.bytes());
        self.executor.op(op, |dev| dev.embed(s, tokens, w, y, accumulate))
    }
    fn embed_backward(&self, s: &Embed, tokens: View, dy: View, dw: ViewMut) -> Result<()> {
        let op = OpCost::moves("embed_backward", dy.dtype(), dy.bytes() + 2 * dy.len() * DType::F32.size());
        self.executor.op(op, |dev| dev.embed_backward(s, tokens, dy, dw))
    }

    fn attention(&self, s: &Attention, cu_seqlens: View, qkv: View, o: ViewMut, lse: ViewMut) -> Result<()> {
        let op = self.attention_op("attention", s, &cu_seqlens, &qkv, qkv.bytes() + o.bytes() + lse.bytes());
        self.executor.op(op, |dev| dev.attention(s, cu_seqlens, qkv, o, lse))
    }
    fn attention_backward(
        &self,
        s: &Attention,
        cu_seqlens: View,
        qkv: View,
        o: View,
        lse: View,
        d_o: View,
        delta: ViewMut,
        sums: ViewMut,
        dqkv: ViewMut,
    ) -> Result<()> {
        let bytes = qkv.bytes() + 2 * o.bytes() + d_o.bytes() + lse.bytes() + 2 * delta.bytes() + dqkv.bytes();
        let op = self.attention_op("attention_backward", s, &cu_seqlens, &qkv, bytes);
        self.executor.op(op, |dev| dev.attention_backward(s, cu_seqlens, qkv, o, lse, d_o, delta, sums, dqkv))
    }
    fn attention_ranges(
        &self,
        s: &Attention,
        cu_seqlens: View,
        q_rows: View,
        k_rows: View,
        of_queries: ViewMut,
        of_keys: ViewMut,
    ) -> Result<()> {
        let cu = self.words(&cu_seqlens, <[u32]>::to_vec);
        let keys = self.words(&k_rows, <[u32]>::to_vec);
        let pairs = self.words(&q_rows, |queries| pass_pairs(&cu, queries, &keys, s.window));
        lock(&self.pairs).insert(of_queries.address(), pairs);
        let op = OpCost::moves("attention_ranges", DType::U32, of_queries.bytes() + of_keys.bytes());
        self.executor.op(op, |dev| dev.attention_ranges(s, cu_seqlens, q_rows, k_rows, of_queries, of_keys))
    }
    fn attention_pass(
        &self,
        s: &Attention,
        of_queries: View,
        qkv: View,
        kv: View,
        o: ViewMut,
        lse: ViewMut,
    ) -> Result<()> {
        let bytes = qkv.bytes() + kv.bytes() + o.bytes() + lse.bytes();
        let op = OpCost::attention("attention_pass", s, qkv.dtype(), self.pairs(&of_queries), bytes);
        self.executor.op(op, |dev| dev.attention_pass(s, of_queries, qkv, kv, o, lse))
    }
    fn attention_pass_backward(
        &self,
        s: &Attention,
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
        let bytes = qkv.bytes() + kv.bytes() + d_o.bytes() + 2 * (dq.bytes() + dkv.bytes());
        let op = OpCost::attention("attention_pass_backward", s, qkv.dtype(), self.pairs(&of_queries), bytes);
        self.executor
            .op(op, |dev| dev.attention_pass_backward(s, of_queries, of_keys, qkv, kv, lse, delta, d_o, sums, dq, dkv))
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
        let bytes = g.bytes() + 2 * (m.bytes() + v.bytes() + p.bytes()) + out.as_ref().map_or(0, ViewMut::bytes);
        self.executor.op(OpCost::moves("adamw", g.dtype(), bytes), |dev| dev.adamw(h, scale, g, m, v, p, out))
    }
    fn sgd(&self, h: View, scale: View, g: View, m: Option<ViewMut>, p: ViewMut, out: Option<ViewMut>) -> Result<()> {
        let [momentum, copy] = [&m, &out].map(|x| x.as_ref().map_or(0, ViewMut::bytes));
        let bytes = g.bytes() + 2 * (momentum + p.bytes()) + copy;
        self.executor.op(OpCost::moves("sgd", g.dtype(), bytes), |dev| dev.sgd(h, scale, g, m, p, out))
    }
}
