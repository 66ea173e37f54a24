//! Floor 1: buffers and the operations on them. A device enqueues on its compute stream; the CPU runs at once.
//! Never knows of ranks, layers or parameters. Every backward says whether it *assigns* or *adds*.
#![allow(unsafe_code)] // the device floor: raw memory behind `Buf`, cpu intrinsics
pub mod buf;
pub mod cpu;
pub mod epilogue;
pub mod gpu;
pub mod host;
pub mod mapped;
pub mod ops;
pub mod unbacked;

pub use buf::{Buf, Place, View, ViewMut};
pub use host::HostUpdate;
pub use ops::{
    AdamW, AdamWScalars, Attention, Columns, CrossEntropy, Embed, Epilogue, Gemm, QkNormRope, RmsNorm, Rope, Sgd,
    VocabPart,
};

use crate::base::timeline::Mark;
use crate::base::{Category, DType, Error, Meter, Result};
use std::time::Instant;

/// Targets with this value carry no loss (the Hugging Face convention).
pub const IGNORE: i32 = -100;

/// Elements to which segments and shard cuts are aligned: 256 bytes in bf16, 512 in f32. The exact gradient norm sums in
/// blocks of this size, so its bits do not depend on where a unit is cut (see [`Device::sum_squares`]).
pub const ALIGN: usize = 128;

/// Limbs of the exact accumulator behind [`Device::sum_squares`]: each holds an integer below 2^32 as an f64, so that
/// limbs of up to 2^20 ranks add without rounding.
pub const LIMBS: usize = 68;

/// What layers are made of. `x`, `w`, `y` are in the compute dtype (f32, bf16 or f16, all alike in one call) unless a line says
/// otherwise; statistics and weight gradients are f32. N: rows (tokens), C: columns. Lengths and dtypes that do not fit
/// are an [`crate::base::Error::Op`], never undefined behaviour.
pub trait Device: Send + Sync {
    /// For people and metrics: "cpu (avx512-bf16)".
    fn name(&self) -> String;
    fn meter(&self) -> &Meter;
    /// Zeroed, 4096-byte aligned (huge pages are asked for where they help).
    fn alloc(&self, dtype: DType, len: usize, category: Category) -> Result<Buf>;
    /// Zeroed host memory that this device reaches as it does its own, but for the speed, and so does the host: where offloaded
    /// buffers are. Counted as [`Category::Host`]. Before the host reads what the device wrote there, or writes what it may
    /// still read: [`Device::synchronize`].
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf>;
    /// Whether buffers are addresses without memory, for a plan: nothing is worth uploading.
    fn is_unbacked(&self) -> bool {
        false
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
    /// When the compute stream came to a mark: in order, after [`Device::synchronize`], and before so many more were made that
    /// it is lost (then an error).
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

    /// `C (+)= op(A) op(B)`, f32 accumulation; A and B alike in dtype, C f32 or that dtype. See [`Gemm`].
    fn gemm(&self, shape: &Gemm, a: View, b: View, c: ViewMut) -> Result<()>;
    /// `gemm`, which assigns, and what [`Epilogue`] says of its result: in one pass where the device can.
    fn gemm_then(&self, shape: &Gemm, a: View, b: View, c: ViewMut, then: Epilogue) -> Result<()>;
    /// `y (N, C) += bias (C)`.
    fn bias(&self, bias: View, y: ViewMut) -> Result<()>;
    /// `db (C) f32 += column sums of dy (N, C)`. Adds.
    fn bias_backward(&self, dy: View, db: ViewMut) -> Result<()>;

    /// `y = x * rstd * (w + offset)`, rstd (N) f32 kept for backward (Zhang & Sennrich 2019). C is `w.len()`.
    fn rmsnorm(&self, norm: &RmsNorm, x: View, w: View, y: ViewMut, rstd: ViewMut) -> Result<()>;
    /// Adds to `dx` (the residual's gradient) and to `dw` f32.
    #[allow(clippy::too_many_arguments)]
    fn rmsnorm_backward(
        &self,
        norm: &RmsNorm,
        x: View,
        w: View,
        rstd: View,
        dy: View,
        dx: ViewMut,
        dw: ViewMut,
    ) -> Result<()>;
    /// `y = (x - mean) * rstd * w + b`; `stats` (N, 2) f32 keeps mean and rstd (Ba et al. 2016).
    fn layernorm(&self, eps: f32, x: View, w: View, b: View, y: ViewMut, stats: ViewMut) -> Result<()>;
    /// Adds to `dx`, `dw` f32 and `db` f32.
    #[allow(clippy::too_many_arguments)]
    fn layernorm_backward(
        &self,
        x: View,
        w: View,
        stats: View,
        dy: View,
        dx: ViewMut,
        dw: ViewMut,
        db: ViewMut,
    ) -> Result<()>;

    /// Rotates the query and key heads of `qkv` in place (Su et al. 2021, the half-split form of Hugging Face: element i
    /// pairs with i + head_dim/2). `table` (max_len, head_dim) f32 holds head_dim/2 cosines, then as many sines, a row a
    /// position; `positions` (N) u32. `inverse` rotates back: the backward pass.
    fn rope(&self, shape: &Rope, table: View, positions: View, qkv: ViewMut, inverse: bool) -> Result<()>;
    /// RMSNorm of each query head with `wq` (head_dim) and of each key head with `wk` (head_dim), then [`Device::rope`]:
    /// `out` = [rotated queries, rotated keys, values as they are], a row like `qkv`. `rstd` (N, heads + kv_heads) f32 is
    /// kept for backward. Assigns (Qwen 3, Gemma 3).
    #[allow(clippy::too_many_arguments)]
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
    ) -> Result<()>;
    /// `qkv` and `rstd` are those of the forward pass. `dqkv`: from the gradient of `out` to that of `qkv`, in place. Adds to
    /// `dwq` and `dwk` f32.
    #[allow(clippy::too_many_arguments)]
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
    ) -> Result<()>;
    /// Flash-style attention (Dao et al. 2022): causal within each document of `cu_seqlens` (S + 1) u32, within the window
    /// where there is one, no T x T matrix.
    /// `qkv` (N, (heads + 2 kv_heads) * head_dim), `o` (N, heads * head_dim), `lse` (heads, N) f32. Assigns.
    fn attention(&self, shape: &Attention, cu_seqlens: View, qkv: View, o: ViewMut, lse: ViewMut) -> Result<()>;
    /// Numbers (f32) of scratch, `sums`, that the backward passes below take for up to so many queries of `dtype`: where kernels add
    /// up gradients of queries in memory. Elsewhere none.
    fn attention_sums(&self, _shape: &Attention, _dtype: DType, _queries: usize) -> usize {
        0
    }
    /// Assigns `dqkv`. `delta` (heads, N) f32 is scratch, and `sums`: [`Device::attention_sums`] or more.
    #[allow(clippy::too_many_arguments)]
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
    ) -> Result<()>;

    /// Who sees whom in a pass of ring attention (Liu et al. 2023): queries at the rows `q_rows` (Nq) and keys at the rows
    /// `k_rows` (Nk), u32 and rising, of the packed batch that `cu_seqlens` bounds. So any cut of any batch is described alike:
    /// zigzag chunks of dense sequences, or documents cut anywhere. As all of these rise, each query sees one range of the
    /// block's keys: `of_queries` (Nq, 2) u32; and each key is seen by one range of queries: `of_keys` (Nk, 2). Assigns.
    fn attention_ranges(
        &self,
        shape: &Attention,
        cu_seqlens: View,
        q_rows: View,
        k_rows: View,
        of_queries: ViewMut,
        of_keys: ViewMut,
    ) -> Result<()>;
    /// Attention of the queries in `qkv` (Nq, row) over one block `kv` (Nk, 2 kv_heads * head_dim), keys before values in a
    /// row: `o` (Nq, heads * head_dim) f32 and `lse` (heads, Nq) f32, which is -inf (and o 0) where nothing is seen. Assigns.
    fn attention_pass(
        &self,
        shape: &Attention,
        of_queries: View,
        qkv: View,
        kv: View,
        o: ViewMut,
        lse: ViewMut,
    ) -> Result<()>;
    /// `o` and `lse` of earlier passes become those of all with one more: o = sum of exp(lse_i - lse) o_i, without overflow.
    fn attention_merge(&self, shape: &Attention, o_pass: View, lse_pass: View, o: ViewMut, lse: ViewMut) -> Result<()>;
    /// `delta` (heads, N) f32 = row sums of d_o * o, both (N, heads * head_dim). Assigns.
    fn attention_delta(&self, shape: &Attention, o: View, d_o: View, delta: ViewMut) -> Result<()>;
    /// The backward pass over one block, from the `lse` of all passes merged: adds to `dq` (Nq, heads * head_dim) f32 and to
    /// `dkv` (Nk, 2 kv_heads * head_dim) f32, which travels with its block. `sums` as in [`Device::attention_backward`].
    #[allow(clippy::too_many_arguments)]
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
    ) -> Result<()>;
    /// Columns of `src` to columns of `dst`, cast where the dtypes (f32; bf16 or f16) differ; both start at their first column. The
    /// other columns keep what they hold.
    fn copy_columns(&self, shape: &Columns, src: View, dst: ViewMut) -> Result<()>;

    /// `y = silu(gate) * up` (Shazeer 2020).
    fn swiglu(&self, gate: View, up: View, y: ViewMut) -> Result<()>;
    /// Assigns `dgate` and `dup`.
    fn swiglu_backward(&self, gate: View, up: View, dy: View, dgate: ViewMut, dup: ViewMut) -> Result<()>;
    /// `y = gelu(gate) * up` with the tanh form of GELU (Shazeer 2020; Gemma).
    fn geglu(&self, gate: View, up: View, y: ViewMut) -> Result<()>;
    /// Assigns `dgate` and `dup`.
    fn geglu_backward(&self, gate: View, up: View, dy: View, dgate: ViewMut, dup: ViewMut) -> Result<()>;
    /// The tanh form of GELU (`gelu_new` of GPT-2).
    fn gelu(&self, x: View, y: ViewMut) -> Result<()>;
    /// Assigns `dx`.
    fn gelu_backward(&self, x: View, dy: View, dx: ViewMut) -> Result<()>;
    /// In place: `x[i] = keep(i) ? x[i] / (1 - p) : 0`, keep from the counter (key, index of the element). `key` u32 (2), the
    /// low word first, is a [`crate::base::rng::Rng::key`] that names run, step, micro-batch, rank and place in the model. The
    /// same call on the gradient is the backward pass.
    fn dropout(&self, p: f32, key: View, x: ViewMut) -> Result<()>;

    /// `y (N, C) = scale * table[tokens]`, or `y +=` with `accumulate` (learned positions). `w` holds rows of the table from
    /// [`Embed::first`] on: a token whose row is elsewhere gives 0. A token outside the table is an error.
    fn embed(&self, shape: &Embed, tokens: View, w: View, y: ViewMut, accumulate: bool) -> Result<()>;
    /// `dw f32`, the rows that `w` was, `+= scatter of scale * dy (N, C)`. Adds, in row order.
    fn embed_backward(&self, shape: &Embed, tokens: View, dy: View, dw: ViewMut) -> Result<()>;
    /// Loss and gradient in one pass over a chunk of logits (R, V): `loss` f64 (1) `+= sum of -log softmax[target]` over
    /// targets that are not [`IGNORE`], in row order. With a `scale` f32 (1), logits are overwritten by
    /// `scale * (softmax - onehot)` (0 for ignored rows): 1 / loss tokens of the whole optimizer step, the engine's one
    /// division.
    fn cross_entropy(
        &self,
        shape: &CrossEntropy,
        targets: View,
        scale: Option<View>,
        logits: ViewMut,
        loss: ViewMut,
    ) -> Result<()>;
    /// Of logits (R, `shape.vocab`) that are columns of wider ones, what the loss and the gradient need of each row: `said`
    /// (R, [`VocabPart::SAID`]) f32. Assigns (Shoeybi et al. 2019, "Megatron-LM", section 3; here one exchange a chunk).
    fn cross_entropy_part(
        &self,
        shape: &CrossEntropy,
        part: &VocabPart,
        targets: View,
        logits: View,
        said: ViewMut,
    ) -> Result<()>;
    /// [`Device::cross_entropy`] of one part's columns, from what all parts said, (parts, R, [`VocabPart::SAID`]): merged in
    /// their order, so that all come to the same loss.
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
    ) -> Result<()>;

    /// Adds the sum of squares of `x` f32 into the exact accumulator `acc` f64 ([`LIMBS`]). Blocks of [`ALIGN`] elements,
    /// counted from the start of `x`, are summed in f64 in a fixed order; block sums are added exactly. So any cut at
    /// multiples of [`ALIGN`] gives the same limbs. A NaN or infinity makes the result non-finite.
    fn sum_squares(&self, x: View, acc: ViewMut) -> Result<()>;
    /// From the (reduced) accumulator of a gradient that was scaled by 1 / `unscale` f32 (1): `out` f32 (2) = [scale, norm], norm
    /// the unscaled gradient's, scale = unscale * min(1, max_norm / (norm + 1e-6)) as in `torch.nn.utils.clip_grad_norm_`, and
    /// `unscale` where `max_norm` is 0 (no clipping). Where the norm is not finite, neither is the scale.
    fn clip_scale(&self, acc: View, max_norm: f32, unscale: View, out: ViewMut) -> Result<()>;
    /// One fused pass (Loshchilov & Hutter 2019, decoupled decay): `g * scale[0]` into m, v; p updated; a copy in the
    /// compute dtype to `out` where one is kept. All f32 but `out`. `h`: [`AdamWScalars`]. Where `scale[0]` is not finite,
    /// nothing changes.
    #[allow(clippy::too_many_arguments)]
    fn adamw(
        &self,
        h: View,
        scale: View,
        g: View,
        m: ViewMut,
        v: ViewMut,
        p: ViewMut,
        out: Option<ViewMut>,
    ) -> Result<()>;
    /// SGD with momentum (PyTorch's form: `m = momentum * m + g + decay * p; p -= lr * m`). `m` is absent without momentum.
    /// `h`: [`Sgd`]. Where `scale[0]` is not finite, nothing changes.
    fn sgd(&self, h: View, scale: View, g: View, m: Option<ViewMut>, p: ViewMut, out: Option<ViewMut>) -> Result<()>;
}
