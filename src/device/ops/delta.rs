//! Operands of the gated delta rule and of Mamba 2, of the short convolution in front of them, and of output gates. N:
//! rows, of one or more documents; what runs along a document starts anew with each.
use super::attention::{AttentionShape, PagedRows};
use super::check::{float, read, rows, written};
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// Rows of a document between two states that [`DeltaRule`] keeps.
pub const DELTA_BLOCK: usize = 64;
/// The most taps of a [`ShortConv`].
pub const MAX_TAPS: usize = 8;

/// What a row does to the state in front of it, besides decay.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum StateRule {
    /// It replaces what the state has of its key. A row is its queries, keys and values, the first two of which are
    /// divided by their lengths. Beta is the sigmoid of the gate `b`; with `doubled` twice that, so that what the state
    /// has of the key may change its sign.
    Delta { doubled: bool },
    /// It is added (Dao & Gu 2024, "Mamba 2"). A row is its values, keys and queries (x, B and C). Beta is the step dt,
    /// which is clamped to these limits; there is no gate `b`.
    Decay { limits: [f32; 2] },
}

impl StateRule {
    /// Whether a row replaces what the state has of its key.
    pub fn replaces(&self) -> bool {
        matches!(self, StateRule::Delta { .. })
    }
}

/// The heads of a gated delta rule or of Mamba 2: each key head serves `value_heads / key_heads` consecutive value
/// heads.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DeltaShape {
    pub key_heads: usize,
    pub value_heads: usize,
    /// Elements of a query and of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    pub rule: StateRule,
}

impl DeltaShape {
    /// The largest beta of a delta rule.
    pub fn most(&self) -> f32 {
        if self.rule == (StateRule::Delta { doubled: true }) { 2.0 } else { 1.0 }
    }
    /// Gates `b` of a token.
    pub fn betas(&self) -> usize {
        if self.rule.replaces() { self.value_heads } else { 0 }
    }
    /// The first columns of a row's queries, keys and values.
    pub fn columns(&self) -> [usize; 3] {
        match self.rule {
            StateRule::Delta { .. } => [0, self.keys(), 2 * self.keys()],
            StateRule::Decay { .. } => [self.values() + self.keys(), self.values(), 0],
        }
    }
    /// Elements of a token's keys.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }
    /// Elements of a token's values.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }
    /// Elements of a token's queries, keys and values.
    pub fn row(&self) -> usize {
        2 * self.keys() + self.values()
    }
    /// Elements of the state of all heads.
    pub fn state(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }
    /// States that are kept for `rows`: no more blocks than these begin later than their documents.
    pub fn kept(rows: usize) -> usize {
        rows / DELTA_BLOCK
    }
    /// Which of them is that in front of `row`, with which a block begins that is not its document's first.
    pub fn place(row: usize) -> usize {
        row / DELTA_BLOCK - 1
    }
    /// Elements of what a sequence goes on from: for each key head, the states in front of the block that its last row
    /// is in, and of the block's rows so far the keys, the solved values and the sums of log decays. A device that goes
    /// row by row uses the first of them, for the states after the last row.
    pub fn carried(&self) -> usize {
        self.state() + DELTA_BLOCK * (self.keys() + self.values() + self.value_heads)
    }
    /// FLOPs of a row. Each value head of a delta rule has 3 products with the state forward, 7 backward; and with the
    /// rows of its block, on average half of them, as queries and keys (2 and 5 products) and as values (2 and 5).
    /// Mamba 2 has 2 and 5 with the state, and 1 and 3 with rows of each kind, those of queries and keys for all value
    /// heads of a key head.
    pub fn flops(&self, backward: bool) -> usize {
        let (k, v, block) = (self.key_dim, self.value_dim, DELTA_BLOCK);
        let (with_state, with_rows) = match (self.rule.replaces(), backward) {
            (true, false) => (3, 2),
            (true, true) => (7, 5),
            (false, false) => (2, 1),
            (false, true) => (5, 3),
        };
        let pairing = if self.rule.replaces() { self.value_heads } else { self.key_heads };
        self.value_heads * (2 * with_state * k * v + with_rows * block * v) + pairing * with_rows * block * k
    }
    /// Checks that there are factors of skipped values if and only if the rule has them.
    fn skips(&self, op: &'static str, skip: &Option<View>, dtype: DType) -> Result<()> {
        match skip {
            Some(skip) if !self.rule.replaces() => read(op, &[("skip", skip, dtype, self.value_heads)]),
            None if self.rule.replaces() => Ok(()),
            _ => Err(Error::op(op, "only Mamba 2 has factors of values that skip the state, and always")),
        }
    }
    /// Returns N.
    fn rows(&self, op: &'static str, len: usize) -> Result<usize> {
        if self.key_heads == 0 || !self.value_heads.is_multiple_of(self.key_heads) {
            let what = format!("{} value heads do not divide by {} key heads", self.value_heads, self.key_heads);
            return Err(Error::op(op, what));
        }
        rows(op, "qkv", len, self.row())
    }
}

/// What runs along the rows of a call.
pub enum RowSequences<'a> {
    /// Documents, which start here: (N, 2) u32, from [`documents_of_rows`](super::documents_of_rows).
    Whole(View<'a>),
    /// Sequences that go on: all rows, each once, and the same in the device's memory, as
    /// [`paged_table`](super::paged_table) writes it; and (slots, C) that they go on from, which becomes what their
    /// next rows go on from. Of a sequence without past, it is not read.
    Carried { runs: &'a [PagedRows<'a>], table: View<'a>, memory: ViewMut<'a> },
}

impl RowSequences<'_> {
    /// `carried`: dtype and width of what sequences go on from.
    fn check(&self, op: &'static str, n: usize, (dtype, width): (DType, usize)) -> Result<()> {
        let (runs, memory) = match self {
            RowSequences::Whole(documents) => return read(op, &[("documents", documents, DType::U32, 2 * n)]),
            RowSequences::Carried { runs, table, memory } => {
                read(op, &[("table", table, DType::U32, table.len())])?;
                (*runs, memory)
            }
        };
        let slots = if width == 0 { usize::MAX } else { rows(op, "memory", memory.len(), width)? };
        written(op, &[("memory", memory, dtype, memory.len())])?;
        let mut next = 0;
        for run in runs {
            if run.first != next || run.rows == 0 || run.slot >= slots {
                return Err(Error::op(op, format!("{run:?} of {n} rows does not fit {slots} slots")));
            }
            next += run.rows;
        }
        if next == n { Ok(()) } else { Err(Error::op(op, format!("runs of {next} rows for {n}"))) }
    }
}

/// An operation for whose backward a device says how much scratch it needs.
#[derive(Clone, Copy, Debug)]
pub enum BackwardOf {
    Attention(AttentionShape),
    DeltaRule(DeltaShape),
}

/// The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), for each value head. With the state S (key_dim,
/// value_dim), which is zero in front of a document, `d = exp(-exp(a_log) softplus(a + dt_bias))`, `beta = sigmoid(b)`,
/// and q and k divided by their lengths, q by sqrt(key_dim) too:
///
/// `S = d S; S += k^T beta (v - k S); o = q S`
///
/// Or Mamba 2 ([`StateRule::Decay`]), with `dt = clamp(softplus(a + dt_bias))` and `d = exp(-exp(a_log) dt)`:
///
/// `S = d S; S += k^T dt v; o = q S + skip v`
///
/// Computed in f32, in blocks of [`DELTA_BLOCK`] rows from the document's start on, or row by row. Assigns `o` and
/// `states`. A row of a sequence that goes on has the bits of that row in the whole document.
pub struct DeltaRule<'a> {
    pub shape: DeltaShape,
    /// Carries (slots, [`DeltaShape::carried`]) f32.
    pub along: RowSequences<'a>,
    /// (N, row): queries, keys and values, from [`DeltaShape::columns`] on.
    pub qkv: View<'a>,
    /// (N, value_heads)
    pub a: View<'a>,
    /// (N, [`DeltaShape::betas`])
    pub b: View<'a>,
    /// (value_heads)
    pub a_log: View<'a>,
    /// (value_heads)
    pub dt_bias: View<'a>,
    /// (value_heads), of Mamba 2.
    pub skip: Option<View<'a>>,
    /// (N, values)
    pub o: ViewMut<'a>,
    /// (kept(N), state) f32, saved for backward: states in front of blocks, by [`DeltaShape::place`]. Or empty, as it
    /// must be if sequences go on.
    pub states: ViewMut<'a>,
}

impl DeltaRule<'_> {
    pub const OP: &'static str = "delta_rule";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, along, qkv, a, b, a_log, dt_bias, skip, o, states } = self;
        let (dtype, n) = (float(Self::OP, qkv.dtype())?, shape.rows(Self::OP, qkv.len())?);
        let heads = shape.value_heads;
        along.check(Self::OP, n, (DType::F32, shape.carried()))?;
        read(Self::OP, &[("a", a, dtype, n * heads), ("b", b, dtype, n * shape.betas())])?;
        read(Self::OP, &[("a_log", a_log, dtype, heads), ("dt_bias", dt_bias, dtype, heads)])?;
        shape.skips(Self::OP, skip, dtype)?;
        written(Self::OP, &[("o", o, dtype, n * shape.values())])?;
        let kept = match along {
            RowSequences::Whole(_) if !states.is_empty() => DeltaShape::kept(n) * shape.state(),
            _ => 0,
        };
        written(Self::OP, &[("states", states, DType::F32, kept)])?;
        Ok(n)
    }
}

/// Backward of [`DeltaRule`] over whole documents. Assigns `dqkv`, `da` and `db`; adds to the others.
pub struct DeltaRuleBackward<'a> {
    pub shape: DeltaShape,
    /// (N, 2) u32
    pub documents: View<'a>,
    /// (N, row)
    pub qkv: View<'a>,
    /// (N, value_heads)
    pub a: View<'a>,
    /// (N, betas)
    pub b: View<'a>,
    /// (value_heads)
    pub a_log: View<'a>,
    /// (value_heads)
    pub dt_bias: View<'a>,
    /// (value_heads), of Mamba 2.
    pub skip: Option<View<'a>>,
    /// (kept(N), state) f32, from the forward pass.
    pub states: View<'a>,
    /// (N, values)
    pub d_o: View<'a>,
    /// f32, [`Device::backward_scratch`](crate::Device::backward_scratch) or more: scratch.
    pub scratch: ViewMut<'a>,
    /// (N, row)
    pub dqkv: ViewMut<'a>,
    /// (N, value_heads)
    pub da: ViewMut<'a>,
    /// (N, betas)
    pub db: ViewMut<'a>,
    /// (value_heads) f32; none if frozen.
    pub da_log: Option<ViewMut<'a>>,
    /// (value_heads) f32; none if frozen.
    pub ddt_bias: Option<ViewMut<'a>>,
    /// (value_heads) f32; none if frozen or without `skip`.
    pub dskip: Option<ViewMut<'a>>,
}

impl DeltaRuleBackward<'_> {
    pub const OP: &'static str = "delta_rule_backward";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, documents, qkv, a, b, a_log, dt_bias, skip, states, d_o, scratch, dqkv, da, db, .. } = self;
        let Self { da_log, ddt_bias, dskip, .. } = self;
        let (dtype, n) = (float(Self::OP, qkv.dtype())?, shape.rows(Self::OP, qkv.len())?);
        let heads = shape.value_heads;
        read(Self::OP, &[("documents", documents, DType::U32, 2 * n)])?;
        read(Self::OP, &[("a", a, dtype, n * heads), ("b", b, dtype, n * shape.betas())])?;
        shape.skips(Self::OP, skip, dtype)?;
        read(Self::OP, &[("a_log", a_log, dtype, heads), ("dt_bias", dt_bias, dtype, heads)])?;
        read(Self::OP, &[("states", states, DType::F32, DeltaShape::kept(n) * shape.state())])?;
        read(Self::OP, &[("d_o", d_o, dtype, n * shape.values())])?;
        written(Self::OP, &[("dqkv", dqkv, dtype, qkv.len()), ("scratch", scratch, DType::F32, scratch.len())])?;
        written(Self::OP, &[("da", da, dtype, n * heads), ("db", db, dtype, n * shape.betas())])?;
        for (name, grad) in [("da_log", da_log), ("ddt_bias", ddt_bias), ("dskip", dskip)] {
            grad.as_ref().map_or(Ok(()), |grad| written(Self::OP, &[(name, grad, DType::F32, heads)]))?;
        }
        Ok(n)
    }
}

/// What surrounds a [`ShortConv`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConvKind {
    /// `y = silu(conv(x) + bias)`
    Silu,
    /// `y = c conv(b u)`, where a row of `x` is b, c and u (LFM 2).
    Gated,
}

impl ConvKind {
    /// Elements in a row of `x`, for each channel.
    pub fn parts(self) -> usize {
        match self {
            ConvKind::Silu => 1,
            ConvKind::Gated => 3,
        }
    }
}

/// A causal convolution along each document with a filter per channel, of which the last tap multiplies the row itself.
/// Assigns `y`.
pub struct ShortConv<'a> {
    pub kind: ConvKind,
    /// At most [`MAX_TAPS`].
    pub taps: usize,
    /// Carries (slots, taps - 1, C): the last rows that the filters multiply.
    pub along: RowSequences<'a>,
    /// (N, C), or (N, 3 C)
    pub x: View<'a>,
    /// (C, taps)
    pub w: View<'a>,
    /// (C); none of gated ones.
    pub bias: Option<View<'a>>,
    /// (N, C)
    pub y: ViewMut<'a>,
}

impl ShortConv<'_> {
    pub const OP: &'static str = "short_conv";
    /// Returns N and C.
    pub fn check(&self) -> Result<(usize, usize)> {
        let Self { kind, taps, along, x, w, bias, y } = self;
        let (n, c) = sizes(Self::OP, *kind, *taps, x, w, bias)?;
        along.check(Self::OP, n, (x.dtype(), (taps - 1) * c))?;
        read(Self::OP, &[("w", w, x.dtype(), c * taps)])?;
        written(Self::OP, &[("y", y, x.dtype(), n * c)])?;
        Ok((n, c))
    }
}

fn sizes(
    op: &'static str,
    kind: ConvKind,
    taps: usize,
    x: &View,
    w: &View,
    bias: &Option<View>,
) -> Result<(usize, usize)> {
    float(op, x.dtype())?;
    if !(1..=MAX_TAPS).contains(&taps) {
        return Err(Error::op(op, format!("{taps} taps; there must be 1 to {MAX_TAPS}")));
    }
    let c = rows(op, "w", w.len(), taps)?;
    match bias {
        Some(_) if kind == ConvKind::Gated => return Err(Error::op(op, "gated channels have no biases")),
        Some(bias) => read(op, &[("bias", bias, x.dtype(), c)])?,
        None => {}
    }
    Ok((rows(op, "x", x.len(), kind.parts() * c)?, c))
}

/// Backward of [`ShortConv`] over whole documents. Assigns `dx`; adds to `dw` and `dbias`.
pub struct ShortConvBackward<'a> {
    pub kind: ConvKind,
    pub taps: usize,
    /// (N, 2) u32
    pub documents: View<'a>,
    /// (N, C), or (N, 3 C)
    pub x: View<'a>,
    /// (C, taps)
    pub w: View<'a>,
    /// (C); none of gated ones.
    pub bias: Option<View<'a>>,
    /// (N, C)
    pub dy: View<'a>,
    /// Like `x`.
    pub dx: ViewMut<'a>,
    /// (C, taps) f32; none if frozen.
    pub dw: Option<ViewMut<'a>>,
    /// (C) f32; none if frozen or without `bias`.
    pub dbias: Option<ViewMut<'a>>,
}

impl ShortConvBackward<'_> {
    pub const OP: &'static str = "short_conv_backward";
    /// Returns N and C.
    pub fn check(&self) -> Result<(usize, usize)> {
        let Self { kind, taps, documents, x, w, bias, dy, dx, dw, dbias } = self;
        let ((n, c), dtype) = (sizes(Self::OP, *kind, *taps, x, w, bias)?, x.dtype());
        read(Self::OP, &[("documents", documents, DType::U32, 2 * n), ("w", w, dtype, c * taps)])?;
        read(Self::OP, &[("dy", dy, dtype, n * c)])?;
        written(Self::OP, &[("dx", dx, dtype, x.len())])?;
        dw.as_ref().map_or(Ok(()), |dw| written(Self::OP, &[("dw", dw, DType::F32, w.len())]))?;
        dbias.as_ref().map_or(Ok(()), |db| written(Self::OP, &[("dbias", db, DType::F32, c)]))?;
        Ok((n, c))
    }
}

/// `y = sigmoid(gate) * x`. Assigns.
pub struct SigmoidGate<'a> {
    pub gate: View<'a>,
    pub x: View<'a>,
    pub y: ViewMut<'a>,
}

impl SigmoidGate<'_> {
    pub const OP: &'static str = "sigmoid_gate";
    pub fn check(&self) -> Result<()> {
        let (dtype, n) = (float(Self::OP, self.gate.dtype())?, self.gate.len());
        read(Self::OP, &[("x", &self.x, dtype, n)])?;
        written(Self::OP, &[("y", &self.y, dtype, n)])
    }
}

/// Backward of [`SigmoidGate`]: `dy` becomes the gradient of `x` in place. Assigns `dgate`.
pub struct SigmoidGateBackward<'a> {
    pub gate: View<'a>,
    pub x: View<'a>,
    pub dy: ViewMut<'a>,
    pub dgate: ViewMut<'a>,
}

impl SigmoidGateBackward<'_> {
    pub const OP: &'static str = "sigmoid_gate_backward";
    pub fn check(&self) -> Result<()> {
        let (dtype, n) = (float(Self::OP, self.gate.dtype())?, self.gate.len());
        read(Self::OP, &[("x", &self.x, dtype, n)])?;
        written(Self::OP, &[("dy", &self.dy, dtype, n), ("dgate", &self.dgate, dtype, n)])
    }
}
