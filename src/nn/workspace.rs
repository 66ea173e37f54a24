//! Every buffer of a pass besides weights and gradients, allocated once. Never grows.
//!
//! [`Workspace::plan`] sums a table of shapes, and [`Workspace::allocate`] allocates that table's tensors.
use super::cache::{CacheSize, KvCache};
use super::core::CorePlan;
use super::latent_buffers::{LatentSaved, LatentScratch};
use super::per_layer_buffers::{PerLayerSaved, PerLayerScratch};
use super::product_buffers::{AdapterScratch, ProductWidths};
use super::recompute::{Checkpointing, Outputs, SavedBlocks};
use super::recurrence::Recurrence;
use super::recurrent_buffers::{RecurrentCache, RecurrentPlan};
use super::saved::{AttentionSaved, MlpSaved, Routing, Saved, Scratch};
use super::shared_kv::SharedKv;
use super::sparse_buffers::SparseScratch;
use super::spec::{Branch, Experts, RowNorm, Spec};
use super::split::{Groups, Split};
use super::tensor::{Tensor, TensorShape, table};
use super::windows::capacity;
use crate::base::{Category, DType, Result};
use crate::comm::{Axis, CommUse};
use crate::device::ops::{AttentionShape, VocabPart};
use crate::device::{Device, ViewMut};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkspaceOptions {
    /// Maximum tokens in a rank's share of a micro-batch.
    pub tokens: usize,
    /// Dtype of activations: f32, bf16 or f16.
    pub dtype: DType,
    /// Which activations blocks save for backward.
    pub checkpoint: Checkpointing,
    /// Whether to allocate buffers for backward.
    pub train: bool,
}

table! {
    /// Small buffers.
    pub struct Fixed {
        /// (P, D) f32: cosines and sines of the rotary positions that a micro-batch can contain; empty if unused.
        table,
        /// The same for layers with a sliding window, if they differ.
        local_table,
        /// (P, head_dim) f32: cosines 1 and sines 0, for head norms without rotation after them.
        still_table,
        /// (1, C): the weights of norms that have none; empty if unused.
        ones,
        /// (E) f32 and f64 (1 + sparse blocks * E): [`crate::device::ops::Balance`]'s results; empty without experts.
        balance,
        load,
        /// (1) f64: the sum of token losses since it was last read.
        loss,
        /// (1, vocab) f32: the next token's logits over this rank's vocabulary, as wide as the largest shard.
        next,
        /// The same for all ranks; empty if the vocabulary is not sharded.
        all_next,
    }
}

/// The activations of a model.
pub struct Workspace<T = Tensor, G = Groups> {
    /// (R, C) each: the residual stream before every block and after the last; without backward, two alternating
    /// buffers.
    pub(super) stream: Vec<T>,
    /// Saved activations of the blocks; without backward, one shared buffer.
    pub(super) kept: SavedBlocks<T>,
    pub(super) scratch: Scratch<T>,
    pub(super) fixed: Fixed<T>,
    /// (R, C): the gradient of the residual stream.
    pub(super) dx: T,
    /// Maximum tokens of a rank.
    pub(super) tokens: usize,
    /// The groups that layers communicate in.
    pub(super) groups: G,
}

/// Rows in a chunk of logits: at most 64 MiB of logits, which bounds memory, but at least 256 rows. The head's weight
/// gradient reads and writes 8 bytes of f32 per 2 R flops, so R rows give R/4 flops per byte: 64 at 256 rows, above the
/// ratio of flops to memory bandwidth of a CPU core in f32 (about 10) and near that of one with AMX. Chunks are equal
/// up to rounding, so that there is no small remainder.
pub(super) fn chunk_rows(tokens: usize, vocab: usize, dtype: DType) -> usize {
    const BYTES: usize = 64 << 20;
    const LEAST: usize = 256;
    let most = (BYTES / (vocab * dtype.size())).max(LEAST);
    tokens.div_ceil(tokens.div_ceil(most))
}

impl Workspace<TensorShape, ()> {
    /// The table of shapes that a rank's share of a model needs for `options`.
    pub(super) fn plan(
        whole: &Spec,
        split: &Split,
        widths: &ProductWidths,
        options: &WorkspaceOptions,
    ) -> Workspace<TensorShape, ()> {
        let &WorkspaceOptions { tokens, dtype, checkpoint, train } = options;
        let (spec, rows, tp) = (&split.local(whole), split.rows(tokens), split.tp.of);
        let of_blocks: Vec<Spec> = (0..spec.layers).map(|i| split.local(&whole.of_block(i))).collect();
        let widest = |of: &dyn Fn(&Spec) -> usize| of_blocks.iter().map(of).max().unwrap_or(0);
        let (row, head_dim) = (widest(&Spec::qkv), widest(&|spec| spec.head_dim));
        let inner = spec.heads * head_dim;
        let latent_rank = spec.latent.map_or(0, |latent| latent.q_rank.max(latent.kv_rank));
        let only = |there: bool, width: usize| if there { width } else { 0 };
        let of_tokens = (tokens, dtype, train);
        // A model may allow 131,072 positions: 134 MB at a head_dim of 256. No document is longer than its micro-batch.
        let positions = spec.forms() * spec.max_len.min(tokens * split.sp.of);
        let shape = TensorShape::new;

        let heads_of = |spec: &Spec| {
            let &Spec { heads, kv_heads, head_dim, .. } = spec;
            AttentionShape { heads, kv_heads, head_dim, scale: 1.0, window: 0, softcap: 0.0 }
        };
        let shapes = || of_blocks.iter().map(heads_of);
        let none = heads_of(spec);
        let heads = shapes().max_by_key(AttentionShape::width).unwrap_or(none);
        let keys = shapes().max_by_key(AttentionShape::kv_row).unwrap_or(none);
        let narrow = shapes().min_by_key(AttentionShape::width).unwrap_or(none);
        let attends = |i: usize| spec.attends(i);
        let seen = |all: bool| (0..spec.layers).any(|i| attends(i) && (spec.window_of(i) == 0) == all);
        let sights = [true, false].map(seen);
        let plan = CorePlan { heads: &heads, keys: &keys, narrow: &narrow, sights, split, tokens, dtype, train };
        let core_of = |heads: &AttentionShape, tokens| CorePlan { heads, tokens, ..plan }.saved();
        let recurrent = RecurrentPlan { mixer: spec.recurrence, tokens, dtype, train };
        let (has_norms, is_cut) = (spec.transforms_rows(), split.grid(spec.heads).ulysses.of > 1);

        // Blocks of mixed models, which are rare, hold the buffers of both kinds.
        let dense_ff = only(spec.has_dense_blocks(), widest(&|spec| spec.ff));
        let of_experts = |of: fn(&Experts) -> usize| spec.experts.as_ref().map_or(0, of);
        let (experts, top_k) = (of_experts(|e| e.count), of_experts(|e| e.top_k));
        let (expert_ff, shared_ff) = (of_experts(|e| e.ff), of_experts(|e| e.shared_ff));
        // Gate and up of such experts come from one matrix.
        let clamped = spec.experts.as_ref().is_some_and(|e| e.clamp.is_some());
        let beside = spec.experts.as_ref().is_some_and(|e| e.beside);
        let scales = beside || spec.experts.as_ref().is_some_and(|e| e.weighs_inputs);
        let (gate_ff, up_ff) = match clamped {
            true => (2 * expert_ff, 0),
            false => (expert_ff, only(spec.gated(), expert_ff)), // without a gate, the first matrix is up
        };
        let held = |width| shape(Category::Saved, dtype, capacity(tokens * top_k, split.ep), width);
        let one_shared = only(shared_ff > 0, 1);

        let kv_heads = widest(&|spec| spec.kv_heads);
        let of_layer_norm = matches!(spec.row_norm, Some(RowNorm::Heads | RowNorm::EachHead { .. }));
        let head_stats = spec.heads + kv_heads * (1 + usize::from(spec.value_norm));
        let head_stats = if of_layer_norm { 2 * head_stats } else { head_stats };
        let inputs = spec.layer_inputs;
        // Queries, keys or values apart from their rows.
        let kv_of = |spec: &Spec| spec.kv_heads * spec.head_dim;
        let apart = only(spec.row_norm.is_some(), inner).max(only(spec.value_norm, widest(&kv_of)));
        // Keys and values that several blocks read.
        let shared_row = [true, false].map(|all| {
            let given = (0..spec.layers).filter(|&i| (spec.window_of(i) == 0) == all && spec.gives_kv(i));
            given.map(|i| heads_of(&of_blocks[i]).kv_row()).max().unwrap_or(0)
        });

        // Gates of attention's outputs.
        let gates = only(spec.output_gate, if spec.gate_by_heads { spec.heads } else { inner });
        let keep = |width| shape(Category::Saved, dtype, tokens, width);
        let stays = |width| shape(Category::Saved, dtype, rows, width);
        let saved = |block: Option<usize>| {
            // Other blocks have only the input of the feed-forward branch, which is their output.
            let feeds = block.is_none_or(|i| spec.has(i, Branch::FeedForward));
            let [dense_ff, gate_ff, up_ff, shared_ff, one_shared, experts, top_k] =
                [dense_ff, gate_ff, up_ff, shared_ff, one_shared, experts, top_k].map(|width| only(feeds, width));
            Saved {
                attention: AttentionSaved {
                    qkv: keep(only(
                        block.is_none_or(attends) && (has_norms || !is_cut),
                        block.map_or(row, |i| match spec.kv_source(i) {
                            None => of_blocks[i].qkv(),
                            Some(_) => of_blocks[i].heads * of_blocks[i].head_dim,
                        }),
                    )),
                    branch: stays(only(spec.post_norms, spec.dim)),
                    gate: keep(only(block.is_none_or(attends), gates)),
                    core: core_of(
                        &block.map_or(heads, |i| heads_of(&of_blocks[i])),
                        if block.is_none_or(attends) { tokens } else { 0 },
                    ),
                    latent: LatentSaved::plan(spec.latent.as_ref(), tokens, dtype),
                },
                recurrent: recurrent.saved(block.is_none_or(|i| spec.recurrence_of(i).is_some())),
                per_layer: PerLayerSaved {
                    x: stays(only(inputs > 0, spec.dim)),
                    gate: keep(inputs),
                    branch: stays(only(inputs > 0, spec.dim)),
                },
                mlp: MlpSaved {
                    x: stays(spec.dim),
                    gate: keep(only(spec.gated(), dense_ff.min(block.map_or(dense_ff, |i| of_blocks[i].ff)))),
                    up: keep(dense_ff.min(block.map_or(dense_ff, |i| of_blocks[i].ff))),
                    branch: stays(only(spec.post_norms, spec.dim)),
                    experts_gate: held(gate_ff),
                    experts_up: held(up_ff),
                    experts_out: stays(only(experts > 0 && (beside || spec.norms_experts()), spec.dim)),
                    shared_gate: keep(only(spec.gated(), shared_ff)),
                    shared_up: keep(shared_ff),
                    shared_weight: shape(Category::Saved, DType::F32, tokens, one_shared),
                    routing: Routing {
                        probs: shape(Category::Saved, DType::F32, tokens, experts),
                        chosen: shape(Category::Saved, DType::U32, tokens, top_k),
                        weights: shape(Category::Saved, DType::F32, tokens, top_k),
                        scaled: shape(Category::Saved, DType::F32, tokens, only(scales, top_k)),
                        offsets: shape(Category::Saved, DType::U32, 1, only(experts > 0, experts + 1)),
                        order: shape(Category::Saved, DType::U32, tokens, top_k),
                        places: shape(Category::Saved, DType::U32, tokens, top_k),
                    },
                },
            }
        };
        // A gated delta net's gates and norm, of which each row of `unused` must hold one.
        let small = match spec.recurrence {
            Some(Recurrence::Delta(net)) => net.shape.value_heads.max(net.normed()),
            _ => 0,
        };
        let empty = || Outputs { o: keep(0), lse: shape(Category::Saved, DType::F32, 0, 0) };
        let checkpoint = if train { checkpoint } else { Checkpointing::Full };
        let stream = if train { spec.layers + 1 } else { 2 };

        let scratch = |width| shape(Category::Scratch, dtype, tokens, width);
        let back = |width| shape(Category::Scratch, dtype, if train { tokens } else { 0 }, width);
        let back_stays = |width| shape(Category::Scratch, dtype, if train { rows } else { 0 }, width);
        // Ranks of tp process a chunk together, so it has the rows that fit the largest vocabulary shard.
        let most_words = if spec.score { 1 } else { split.part(split.cuts.head).most(whole.vocab) };
        let chunk = chunk_rows(tokens, most_words, dtype);
        // Buffers that tp ranks communicate, if needed.
        let shared = |there: bool, usage, dtype, rows, width| TensorShape {
            through: there.then_some((Axis::Tp, usage)),
            ..shape(Category::Scratch, dtype, if there { rows } else { 0 }, width)
        };
        let (padded, in_parts) =
            (if split.sequence() { rows * tp } else { tokens }, !spec.score && spec.vocab < whole.vocab);
        let part_stats = VocabPart::STATS;
        let other = |dtype, rows, width| shape(Category::Other, dtype, rows, width);
        Workspace {
            stream: (0..stream).map(|_| stays(spec.dim)).collect(),
            kept: SavedBlocks::plan(spec.layers, checkpoint, saved, empty),
            scratch: Scratch {
                h: shape(Category::Scratch, dtype, if experts > 0 { tokens } else { rows }, spec.dim),
                stats: shape(Category::Scratch, DType::F32, rows, if spec.has_layer_norm() { 2 } else { 1 }),
                parts: shared(tp > 1, CommUse::Reduced, dtype, padded, spec.dim),
                whole: shared(split.sequence(), CommUse::Gathered, dtype, padded, spec.dim),
                bias: shape(Category::Scratch, dtype, 1, only(spec.qkv_bias, row)),
                rotated: scratch(only(has_norms || is_cut, row)),
                head_stats: TensorShape { dtype: DType::F32, ..scratch(only(has_norms, head_stats)) },
                queries: scratch(only(spec.output_gate, 2 * inner).max(only(spec.qkv_by_heads, row))),
                gated: scratch(only(spec.output_gate, inner)),
                head_gates: TensorShape { dtype: DType::F32, ..scratch(only(spec.gate_by_heads, gates)) },
                d_head_gates: TensorShape { dtype: DType::F32, ..back(only(spec.gate_by_heads, gates)) },
                act: scratch(dense_ff),
                logits: shape(Category::Scratch, dtype, chunk, spec.outputs()),
                part_stats: shape(Category::Scratch, DType::F32, if in_parts { chunk } else { 0 }, part_stats),
                all_stats: shared(in_parts, CommUse::Gathered, DType::F32, chunk * tp, part_stats),
                masked: back_stays(only(spec.dropout > 0.0 || spec.has_residual_factors(), spec.dim)),
                beside: back_stays(only(spec.parallel || spec.side_by_side || beside, spec.dim)),
                dh: shape(Category::Scratch, dtype, rows, spec.dim),
                d_o: back(inner),
                dqkv: back(row),
                bias_grad: shape(Category::Scratch, DType::F32, 1, only(train && spec.qkv_bias, row)),
                dgate: back(gates),
                dact: back(dense_ff),
                dup: back(dense_ff),
                row: scratch(apart.max(only(spec.shared_kv > 0, inner))),
                normed: scratch(apart.max(shared_row[0]).max(shared_row[1])),
                zeros: shape(Category::Scratch, dtype, 1, only(spec.value_norm, head_dim)),
                unused: TensorShape {
                    dtype: DType::F32,
                    rows: if train { 2 } else { 0 },
                    ..back(
                        spec.dim
                            .max(head_dim)
                            .max(inputs)
                            .max(only(spec.row_norm.is_some(), inner))
                            .max(latent_rank)
                            .max(small),
                    )
                },
                adapter: AdapterScratch::plan(widths, of_tokens, checkpoint == Checkpointing::Off),
                sparse: SparseScratch::plan(spec, split, widths, of_tokens),
                core: plan.scratch(),
                per_layer: PerLayerScratch::plan(spec.layers, inputs, of_tokens),
                shared_kv: SharedKv::plan(shared_row, of_tokens),
                latent: LatentScratch::plan(spec.latent.as_ref(), (spec.heads, spec.head_dim), of_tokens),
                cache: KvCache::plan(spec, dtype, &CacheSize::default()),
                recurrent: recurrent.scratch(),
                recurrent_cache: RecurrentCache::plan(spec, dtype, 0),
            },
            fixed: Fixed {
                table: other(DType::F32, only(spec.rope.is_some(), positions), spec.global_rotary_dim()),
                local_table: other(
                    DType::F32,
                    only(spec.local_rope.is_some() || spec.query_growth.is_some(), positions),
                    spec.rotary_dim(),
                ),
                still_table: other(DType::F32, only(spec.normed_still(), positions), spec.head_dim),
                ones: other(dtype, only(spec.has_bare_norms(), 1), spec.dim),
                balance: other(DType::F32, 1, experts),
                load: other(DType::F64, 1, only(experts > 0, 1 + spec.sparse_blocks() * experts)),
                loss: other(DType::F64, 1, 1),
                next: other(DType::F32, 1, most_words),
                all_next: TensorShape {
                    category: Category::Other,
                    ..shared(in_parts, CommUse::Gathered, DType::F32, 1, most_words * tp)
                },
            },
            dx: back_stays(spec.dim),
            tokens,
            groups: (),
        }
    }

    pub(super) fn allocate(&self, dev: &dyn Device, groups: &Groups) -> Result<Workspace> {
        self.map(groups.clone(), &mut |name, shape: &TensorShape| shape.allocate(name, dev, groups))
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
            tokens: self.tokens,
            groups,
        })
    }
}

impl Workspace {
    /// Bytes that backward still needs with `b` blocks to go, indexed by b: 0, 1, ...
    pub fn saved_for(&self) -> Result<Vec<usize>> {
        let kept = self.kept.needed(self.stream.len() - 1, |tensor| tensor.bytes())?;
        let stream = |blocks: usize| self.stream.iter().take(blocks + 1).map(|tensor| tensor.bytes()).sum::<usize>();
        Ok(kept.into_iter().enumerate().map(|(blocks, kept)| stream(blocks) + kept).collect())
    }
    /// Enqueues moving the unscaled sum of token losses into `out` f64 (1) and resetting it to zero.
    pub fn move_loss(&mut self, dev: &dyn Device, out: ViewMut) -> Result<()> {
        dev.copy(self.fixed.loss.rows(1), out)?;
        dev.zero(self.fixed.loss.rows_mut(1))
    }
    /// The same sum, read on the host, which waits for it.
    pub fn take_loss(&mut self, dev: &dyn Device) -> Result<f64> {
        let mut loss = [0f64];
        dev.download(self.fixed.loss.rows(1), bytemuck::cast_slice_mut(&mut loss))?;
        dev.zero(self.fixed.loss.rows_mut(1))?;
        Ok(loss[0])
    }
    /// Reads the load of the experts since it was last read ([`crate::device::ops::Balance`]).
    pub fn take_load(&mut self, dev: &dyn Device, out: &mut [u8]) -> Result<()> {
        dev.download(self.fixed.load.rows(1), out)?;
        dev.zero(self.fixed.load.rows_mut(1))
    }
    /// Allocates a KV cache, and position tables for its longest sequence, which the caller must fill.
    pub(super) fn remember(&mut self, spec: &Spec, dev: &dyn Device, size: &CacheSize) -> Result<()> {
        let Workspace { scratch, fixed: Fixed { table, local_table, still_table, .. }, groups, .. } = self;
        let dtype = scratch.act.dtype();
        // The previous cache is freed first.
        for size in [&CacheSize::default(), size] {
            scratch.cache = KvCache::plan(spec, dtype, size).allocate(dev, groups)?;
            scratch.recurrent_cache = RecurrentCache::plan(spec, dtype, size.slots).allocate(dev, groups)?;
        }
        for (name, table) in [("table", table), ("local_table", local_table), ("still_table", still_table)] {
            let longer = longer_table(table, spec.forms() * size.longest.min(spec.max_len));
            if longer.rows > table.capacity() {
                *table = longer.allocate(name, dev, groups)?;
            }
        }
        Ok(())
    }
    pub fn tokens(&self) -> usize {
        self.tokens
    }
    /// The type of activations.
    pub fn dtype(&self) -> DType {
        self.scratch.act.dtype()
    }
}

/// Shape of a table of `rows`, no shorter than `table`; empty if that is.
fn longer_table(table: &Tensor, rows: usize) -> TensorShape {
    let rows = if table.capacity() > 0 { table.capacity().max(rows) } else { 0 };
    TensorShape::new(Category::Other, DType::F32, rows, table.width())
}
