//! Every buffer that a pass needs besides weights and gradients, allocated once. Never grows.
//!
//! The tables below are structs over `T`: with `T =` [`Shape`] they say what is needed, with `T =` [`Tensor`] they are
//! it. [`Workspace::planned`] adds up the first and [`Workspace::allocate`] makes the second from it, so that formula
//! and allocation cannot drift apart.
use super::cache::Cache;
use super::parallel::{Groups, Split};
use super::recompute::{Checkpointing, Outputs, SavedBlocks};
use super::ring::Ring;
use super::spec::{Arch, Spec};
use crate::base::{Category, DType, Result};
use crate::comm::{Axis, CommUse};
use crate::device::{Attention, Buf, Device, View, ViewMut, VocabPart, gpu};
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkspaceOptions {
    /// The most tokens in a rank's part of a micro-batch.
    pub tokens: usize,
    /// Of activations: f32, bf16 or f16.
    pub dtype: DType,
    /// What blocks keep for backward.
    pub checkpoint: Checkpointing,
    /// Without, there is no room for a backward pass.
    pub train: bool,
}

/// `rows` of `width` elements.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub(super) category: Category,
    dtype: DType,
    pub(super) rows: usize,
    width: usize,
    /// Of what a group communicates: which group, how, and how many ranks it has.
    through: Option<(Axis, CommUse, usize)>,
    /// Scratch of the device's for attention's backward pass over `rows` queries of `dtype`: it says how many numbers it takes.
    sums: Option<Attention>,
}

pub struct Tensor {
    buf: Buf,
    width: usize,
}

impl Shape {
    pub(super) fn new(category: Category, dtype: DType, rows: usize, width: usize) -> Shape {
        Shape { category, dtype, rows, width, through: None, sums: None }
    }
    /// The group of `axis`, which has so many ranks, communicates it.
    pub(super) fn through(self, axis: Axis, usage: CommUse, ranks: usize) -> Shape {
        Shape { through: Some((axis, usage, ranks)), ..self }
    }
    pub(super) fn bytes(&self) -> usize {
        let bytes = self.rows * self.width * self.dtype.size();
        self.through.map_or(bytes, |(_, usage, ranks)| usage.counted(bytes, ranks))
    }
    /// Bytes that a GPU adds for its kernels, at most.
    fn summed(&self) -> usize {
        self.sums.map_or(0, |heads| DType::F32.size() * gpu::attention_sums(&heads, self.dtype, self.rows))
    }
    /// Bytes that are there beyond [`Shape::bytes`] where each rank has its own.
    fn apart(&self) -> usize {
        Shape { through: None, ..*self }.bytes() - self.bytes()
    }
    pub(super) fn allocate(&self, name: &'static str, dev: &dyn Device, groups: &Groups) -> Result<Tensor> {
        let _for = dev.meter().purpose(name);
        if let Some(heads) = &self.sums {
            let len = dev.attention_sums(heads, self.dtype, self.rows);
            return Ok(Tensor { buf: dev.alloc(DType::F32, len, self.category)?, width: 1 });
        }
        let (len, width) = (self.rows * self.width, self.width);
        let buf = match self.through {
            Some((axis, usage, _)) if len > 0 => {
                let group = if axis == Axis::Tp { &groups.tp } else { &groups.sp };
                group.alloc(self.dtype, len, usage, self.category)?
            }
            _ => dev.alloc(self.dtype, len, self.category)?,
        };
        Ok(Tensor { buf, width })
    }
}

impl Tensor {
    /// The first `n` rows.
    pub fn rows(&self, n: usize) -> View<'_> {
        self.buf.view().slice(0..n * self.width)
    }
    pub fn rows_mut(&mut self, n: usize) -> ViewMut<'_> {
        self.buf.view_mut().slice(0..n * self.width)
    }
    pub fn all_mut(&mut self) -> ViewMut<'_> {
        self.buf.view_mut()
    }
    pub fn band(&self, rows: &Range<usize>) -> View<'_> {
        self.buf.view().slice(rows.start * self.width..rows.end * self.width)
    }
    pub fn band_mut(&mut self, rows: &Range<usize>) -> ViewMut<'_> {
        self.buf.view_mut().slice(rows.start * self.width..rows.end * self.width)
    }
    pub fn width(&self) -> usize {
        self.width
    }
    pub fn dtype(&self) -> DType {
        self.buf.dtype()
    }
    /// Rows that there is room for.
    pub fn capacity(&self) -> usize {
        self.buf.len() / self.width.max(1)
    }
}

/// A struct of alike fields and of other tables, and the map over them by name.
macro_rules! table {
    ($(#[$about:meta])* $name:ident {
        $($(#[$what:meta])* $field:ident,)*
        $(; $($(#[$whose:meta])* $inner:ident: $table:ident,)*)?
    }) => {
        $(#[$about])*
        pub struct $name<T = Tensor> { $($(#[$what])* pub $field: T,)* $($($(#[$whose])* pub $inner: $table<T>,)*)? }
        impl<T> $name<T> {
            pub(super) fn map<U>(&self, f: &mut dyn FnMut(&'static str, &T) -> Result<U>) -> Result<$name<U>> {
                Ok($name { $($field: f(stringify!($field), &self.$field)?,)* $($($inner: self.$inner.map(f)?,)*)? })
            }
        }
    };
}
pub(super) use table;

table! {
    /// What the attention branch keeps for its backward pass. Widths here and below are this rank's of tp; R rows of the
    /// residual stream are N, or the rank's part of them.
    AttentionSaved {
        /// (N, (heads + 2 kv_heads) head_dim), rotated; as projected where heads are normalised.
        qkv,
        /// (N, heads * head_dim)
        o,
        /// (heads, N) f32
        lse,
        /// (R, C): what the branch's last norm read; empty without one.
        branch,
    }
}
table! {
    /// What the feed-forward branch keeps for its backward pass.
    MlpSaved {
        /// (R, C): its input.
        x,
        /// (N, F), empty without a gate.
        gate,
        /// (N, F)
        up,
        /// (R, C): what the branch's last norm read; empty without one.
        branch,
    }
}
/// What one block keeps for its backward pass, besides its input.
pub struct Saved<T = Tensor> {
    pub attention: AttentionSaved<T>,
    pub mlp: MlpSaved<T>,
}
impl<T> Saved<T> {
    pub(super) fn map<U>(&self, f: &mut dyn FnMut(&'static str, &T) -> Result<U>) -> Result<Saved<U>> {
        Ok(Saved { attention: self.attention.map(f)?, mlp: self.mlp.map(f)? })
    }
}
table! {
    /// Used within a block or the head, by one after the other. From `masked` on: backward only.
    Scratch {
        /// (R, C): the normalised input of a branch, or of the head.
        h,
        /// (R, 1) f32: 1/rms; with LayerNorm (R, 2): mean and 1/deviation.
        stats,
        /// (N, C): this rank's parts of what ranks of tp sum; empty where there is one.
        parts,
        /// (N, C): the rows of all ranks; empty without sequence parallelism.
        whole,
        /// (1, (heads + 2 kv_heads) head_dim): biases side by side; empty without.
        bias,
        /// (N, (heads + 2 kv_heads) head_dim): normalised and rotated; empty where heads are not normalised.
        turned,
        /// (N, heads + kv_heads) f32: 1/rms of their heads.
        turned_stats,
        /// (N, F): the activation, then the gate's gradient.
        act,
        /// (N, rank): what adapters make of their input; empty without.
        low,
        /// (R, vocab): a chunk of logits, then their gradient.
        logits,
        /// (R, 3) f32: what is said of a chunk of logits that are this rank's words only; empty where they are all.
        said,
        /// (tp R, 3) f32: the same of all ranks.
        heard,
        /// (R, C): the residual's gradient under a dropout mask; empty without dropout.
        masked,
        /// (R, C): the gradient of `h`.
        dh,
        /// (N, heads * head_dim)
        d_o,
        /// (heads, N) f32
        delta,
        /// f32, as many as the device asks for: see [`Device::attention_sums`].
        sums,
        /// (N, (heads + 2 kv_heads) head_dim)
        dqkv,
        /// (1, (heads + 2 kv_heads) head_dim) f32: column sums of `dqkv`; empty without biases.
        bias_grad,
        /// (N, F)
        dact,
        /// (N, F)
        dup,
        /// (N, rank): the gradient of `low`.
        dlow,
        /// (2, C) f32, or wider heads: where the gradients of frozen norms go.
        unused,
        ;
        /// Of the ring of sp.
        ring: Ring,
        /// Of a sequence that goes on: see [`Workspace::remember`].
        cache: Cache,
    }
}
table! {
    /// Small things.
    Fixed {
        /// (P, head_dim) f32: cosines and sines of the rotary positions that a micro-batch can hold; empty without.
        table,
        /// The same of the layers within a window, where theirs are others.
        local_table,
        /// (1) f64: the sum of token losses since it was last taken.
        loss,
        /// (1, vocab) f32: the next token's logits, of this rank's words; as wide as where they are most.
        next,
        /// The same of all ranks; empty where the words are all here.
        all_next,
    }
}

/// The activations of a model.
pub struct Workspace<T = Tensor, G = Groups> {
    /// (R, C) each: the residual stream before every block and after the last; without backward, two taking turns.
    pub(super) stream: Vec<T>,
    /// What blocks keep; without backward, one for all.
    pub(super) kept: SavedBlocks<T>,
    pub(super) scratch: Scratch<T>,
    pub(super) fixed: Fixed<T>,
    /// (R, C): the gradient of the residual stream.
    pub(super) dx: T,
    /// What layers communicate in.
    pub(super) groups: G,
}

/// Rows of a chunk of logits: at most 64 MiB of them, so that no more than that exists at a time, but at least 256
/// rows. The head's weight gradient reads and writes 8 bytes of f32 for every 2 R flops, so R rows give it R/4 flops a
/// byte: 64 at 256 rows, above the ratio of flops to memory bytes that a CPU core sustains in f32 (about 10) and near
/// that of one with AMX. Chunks are equal but for rounding, so that none is a small rest.
pub(super) fn chunk_rows(tokens: usize, vocab: usize, dtype: DType) -> usize {
    const BYTES: usize = 64 << 20;
    const LEAST: usize = 256;
    let most = (BYTES / (vocab * dtype.size())).max(LEAST);
    tokens.div_ceil(tokens.div_ceil(most))
}

impl Workspace<Shape, ()> {
    /// The table: what a rank's part of a model needs for `options`.
    /// `rank`: of the adapters, 0 without.
    pub(super) fn plan(whole: &Spec, split: &Split, rank: usize, options: &WorkspaceOptions) -> Workspace<Shape, ()> {
        let &WorkspaceOptions { tokens, dtype, checkpoint, train } = options;
        let (spec, rows, tp) = (&split.local(whole), split.rows(tokens), split.tp.of);
        let inner = spec.heads * spec.head_dim;
        let only = |there: bool, width: usize| if there { width } else { 0 };
        // A model may take 131,072 positions: 134 MB at a head_dim of 256. No document is longer than its micro-batch.
        let positions = spec.max_len.min(tokens * split.sp.of);
        let shape = Shape::new;

        let heads = Attention {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            scale: 1.0,
            window: 0,
            softcap: 0.0,
        };
        let seen = |all: bool| (0..spec.layers).any(|i| (spec.window_of(i) == 0) == all);
        let around = WorkspaceOptions { tokens: if split.sp.of > 1 { tokens } else { 0 }, ..*options };

        let keep = |width| shape(Category::Saved, dtype, tokens, width);
        let stays = |width| shape(Category::Saved, dtype, rows, width);
        let saved = || Saved {
            attention: AttentionSaved {
                qkv: keep(spec.qkv()),
                o: keep(inner),
                lse: shape(Category::Saved, DType::F32, tokens, spec.heads),
                branch: stays(only(spec.post_norms, spec.dim)),
            },
            mlp: MlpSaved {
                x: stays(spec.dim),
                gate: keep(only(spec.gated(), spec.ff)),
                up: keep(spec.ff),
                branch: stays(only(spec.post_norms, spec.dim)),
            },
        };
        let empty = || Outputs { o: keep(0), lse: shape(Category::Saved, DType::F32, 0, 0) };
        let checkpoint = if train { checkpoint } else { Checkpointing::Full };
        let stream = if train { spec.layers + 1 } else { 2 };

        let scratch = |width| shape(Category::Scratch, dtype, tokens, width);
        let back = |width| shape(Category::Scratch, dtype, if train { tokens } else { 0 }, width);
        let back_stays = |width| shape(Category::Scratch, dtype, if train { rows } else { 0 }, width);
        // Ranks of tp go through a chunk together, so it has the rows that fit where most words are.
        let most_words = split.part(split.cuts.head).most(whole.vocab);
        let chunk = chunk_rows(tokens, most_words, dtype);
        // What ranks of tp communicate, if it is there.
        let shared = |there: bool, usage, dtype, rows, width| Shape {
            through: there.then_some((Axis::Tp, usage, tp)),
            ..shape(Category::Scratch, dtype, if there { rows } else { 0 }, width)
        };
        let (padded, in_parts) = (if split.sequence() { rows * tp } else { tokens }, spec.vocab < whole.vocab);
        let said = VocabPart::SAID;
        let other = |dtype, rows, width| shape(Category::Other, dtype, rows, width);
        Workspace {
            stream: (0..stream).map(|_| stays(spec.dim)).collect(),
            kept: SavedBlocks::plan(spec.layers, checkpoint, saved, empty),
            scratch: Scratch {
                h: shape(Category::Scratch, dtype, rows, spec.dim),
                stats: shape(Category::Scratch, DType::F32, rows, if spec.arch == Arch::Gpt { 2 } else { 1 }),
                parts: shared(tp > 1, CommUse::Reduced, dtype, padded, spec.dim),
                whole: shared(split.sequence(), CommUse::Gathered, dtype, padded, spec.dim),
                bias: shape(Category::Scratch, dtype, 1, only(spec.qkv_bias, spec.qkv())),
                turned: scratch(only(spec.qk_norm, spec.qkv())),
                turned_stats: Shape { dtype: DType::F32, ..scratch(only(spec.qk_norm, spec.heads + spec.kv_heads)) },
                act: scratch(spec.ff),
                logits: shape(Category::Scratch, dtype, chunk, spec.vocab),
                said: shape(Category::Scratch, DType::F32, if in_parts { chunk } else { 0 }, said),
                heard: shared(in_parts, CommUse::Gathered, DType::F32, chunk * tp, said),
                masked: back_stays(only(spec.dropout > 0.0, spec.dim)),
                dh: back_stays(spec.dim),
                d_o: back(inner),
                delta: Shape { dtype: DType::F32, ..back(spec.heads) },
                sums: Shape { sums: Some(heads), ..back(0) },
                dqkv: back(spec.qkv()),
                bias_grad: shape(Category::Scratch, DType::F32, 1, only(train && spec.qkv_bias, spec.qkv())),
                dact: back(spec.ff),
                dup: back(spec.ff),
                low: scratch(rank),
                dlow: back(rank),
                unused: Shape {
                    dtype: DType::F32,
                    rows: if train { 2 } else { 0 },
                    ..back(spec.dim.max(spec.head_dim))
                },
                ring: Ring::plan(&heads, [true, false].map(seen), split.sp.of, split.ring, &around),
                cache: Cache::plan(spec, dtype, 0),
            },
            fixed: Fixed {
                table: other(DType::F32, only(spec.rope.is_some(), positions), spec.head_dim),
                local_table: other(DType::F32, only(spec.local_rope.is_some(), positions), spec.head_dim),
                loss: other(DType::F64, 1, 1),
                next: other(DType::F32, 1, most_words),
                all_next: Shape {
                    category: Category::Other,
                    ..shared(in_parts, CommUse::Gathered, DType::F32, 1, most_words * tp)
                },
            },
            dx: back_stays(spec.dim),
            groups: (),
        }
    }

    /// Bytes by category.
    pub(super) fn planned(&self) -> Vec<(Category, usize)> {
        let mut bytes = [Category::Saved, Category::Scratch, Category::Other].map(|category| (category, 0));
        let mut count = |_, shape: &Shape| {
            bytes.iter_mut().filter(|b| b.0 == shape.category).for_each(|b| b.1 += shape.bytes());
            Ok(())
        };
        self.map((), &mut count).ok(); // counting cannot fail
        bytes.to_vec()
    }

    pub(super) fn gathered_apart(&self) -> usize {
        self.total(Shape::apart)
    }
    pub(super) fn summed(&self) -> usize {
        self.total(Shape::summed)
    }
    fn total(&self, of: impl Fn(&Shape) -> usize) -> usize {
        let mut bytes = 0;
        let mut count = |_, shape: &Shape| {
            bytes += of(shape);
            Ok(())
        };
        self.map((), &mut count).ok(); // counting cannot fail
        bytes
    }

    pub(super) fn allocate(&self, dev: &dyn Device, groups: &Groups) -> Result<Workspace> {
        self.map(groups.clone(), &mut |name, shape: &Shape| shape.allocate(name, dev, groups))
    }
}

impl<T, G> Workspace<T, G> {
    fn map<U, H>(&self, groups: H, f: &mut dyn FnMut(&'static str, &T) -> Result<U>) -> Result<Workspace<U, H>> {
        Ok(Workspace {
            stream: self.stream.iter().map(|t| f("stream", t)).collect::<Result<_>>()?,
            kept: self.kept.map(f)?,
            scratch: self.scratch.map(f)?,
            fixed: self.fixed.map(f)?,
            dx: f("dx", &self.dx)?,
            groups,
        })
    }
}

impl Workspace {
    /// Bytes that backward still needs when it has yet to pass `b` blocks, by b: 0, 1, ...
    pub fn saved_for(&self) -> Result<Vec<usize>> {
        let kept = self.kept.needed(self.stream.len() - 1, |tensor| tensor.buf.bytes())?;
        let stream =
            |blocks: usize| self.stream.iter().take(blocks + 1).map(|tensor| tensor.buf.bytes()).sum::<usize>();
        Ok(kept.into_iter().enumerate().map(|(blocks, kept)| stream(blocks) + kept).collect())
    }
    /// Has the device assign to `out` f64 (1) the sum of token losses since the last call, unscaled, and start again from zero.
    pub fn move_loss(&mut self, dev: &dyn Device, out: ViewMut) -> Result<()> {
        dev.copy(self.fixed.loss.rows(1), out)?;
        dev.zero(self.fixed.loss.rows_mut(1))
    }
    /// The same sum on the host, which waits for it.
    pub fn take_loss(&mut self, dev: &dyn Device) -> Result<f64> {
        let mut loss = [0f64];
        dev.download(self.fixed.loss.rows(1), bytemuck::cast_slice_mut(&mut loss))?;
        dev.zero(self.fixed.loss.rows_mut(1))?;
        Ok(loss[0])
    }
    pub fn tokens(&self) -> usize {
        self.scratch.act.capacity()
    }
}
