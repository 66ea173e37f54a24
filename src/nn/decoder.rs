//! The one layer loop: embeddings, blocks, loss, and backward. Written against [`ParamStore`]: never knows how weights
//! are stored.
use super::adapters;
use super::block::DecoderBlock;
use super::context::{Batch, Cx, DropoutKeys};
use super::core::CoreAttention;
use super::layout::{Layout, Storage};
use super::lora;
use super::product_buffers::ProductWidths;
use super::recompute::SavedBlocks;
use super::root::{LossGrad, LossSums, Root};
use super::saved::{Saved, Scratch};
use super::sequences::{LossRows, Scored, SequenceBuffers, SequenceLoss, SequenceRows};
use super::shared_kv::KvSharing;
use super::spec::{Experts, Spec};
use super::split::{Groups, SpGrid, Split};
use super::store::{ParamStore, Pass, ROOT};
use super::teacher::Teacher;
use super::tensor::Tensor;
use super::tuning::{Tuning, set_saved};
use super::workspace::{Fixed, Workspace, WorkspaceOptions};
use crate::base::rng::Rng;
use crate::base::{DType, Error, Result};
use crate::comm::{Reduce, Tag};
use crate::device::ops::{Balance, RouteShape};
use crate::device::{Device, View, ViewMut};
use half::{bf16, f16};
use std::time::Instant;

/// A model as a plan: immutable, without buffers.
pub struct Decoder {
    pub(super) spec: Spec,
    /// This rank's share of each layer.
    pub(super) split: Split,
    layouts: Vec<Layout>,
    pub(super) root: Root,
    blocks: Vec<DecoderBlock>,
    /// The lowest layer that is trainable, or whose experts are: where backward ends.
    lowest: usize,
    widths: ProductWidths,
    /// Hashed names of the adapters with dropout, in the order of their keys.
    masks: Vec<u64>,
}

/// Per-micro-batch inputs besides the data, in device memory.
#[derive(Clone, Copy)]
pub struct Micro<'a> {
    /// f32 (1): 1 / loss tokens of the whole optimizer step, over all ranks and micro-batches.
    pub loss_scale: View<'a>,
    /// u32: [`Decoder::dropout_keys`]; empty without dropout.
    pub dropout_keys: View<'a>,
    /// f32 (1): the factor of the micro-batch's load-balancing loss.
    pub aux_scale: View<'a>,
}

/// What a micro-batch minimizes.
pub enum Minimized<'a> {
    /// The cross entropy of tokens.
    Tokens,
    Sequences(&'a mut dyn SequenceLoss),
    /// Distillation of tokens.
    Taught(&'a mut dyn Teacher),
}

impl Decoder {
    /// A model with all tensors trainable.
    pub fn new(spec: Spec) -> Result<Decoder> {
        Decoder::tuned(spec, &Tuning::default())
    }
    /// A model on one rank, with `tuning` applied.
    pub fn tuned(spec: Spec, tuning: &Tuning) -> Result<Decoder> {
        Decoder::split(spec, tuning, &Split::NONE)
    }
    /// One rank's share of a model, with `tuning` applied.
    pub fn split(spec: Spec, tuning: &Tuning, split: &Split) -> Result<Decoder> {
        spec.validate()?;
        split.check(&spec)?;
        let (mut layouts, mut root, mut blocks) = spec.layers(split);
        tuning.apply(&mut layouts)?;
        let mut widths = ProductWidths::of(&layouts);
        let masks = match &tuning.lora {
            Some(lora) => adapters::attach(lora, &spec, &layouts, (&mut root, &mut blocks), &mut widths)?,
            None => Vec::new(),
        };
        let learns = |layer: usize| layouts[layer].segments.iter().any(|s| s.is_trained());
        for sparse in blocks.iter().filter_map(DecoderBlock::sparse) {
            sparse.experts.check(&layouts[sparse.experts.layer])?;
        }
        let experts_learn = |layer: usize| {
            let sparse = layer.checked_sub(1).and_then(|i| blocks[i].sparse());
            sparse.is_some_and(|sparse| learns(sparse.experts.layer))
        };
        let lowest = (0..=blocks.len()).find(|&layer| learns(layer) || experts_learn(layer)).unwrap_or(layouts.len());
        Ok(Decoder { layouts, spec, split: *split, root, blocks, lowest, widths, masks })
    }
    /// The model whose logits are divided by `t`: with a cap c, c tanh(x / c) / t = (c / t) tanh((x / t) / (c / t)).
    pub fn at_temperature(mut self, t: f32) -> Decoder {
        self.root.logit_scale /= t;
        self.root.logit_cap /= t;
        self
    }
    /// A tuned model without its adapters, for passes with [`Scored::base`], in which it is bit for bit the tuned one.
    pub fn base(spec: Spec, tuning: &Tuning, split: &Split) -> Result<Decoder> {
        let mut base = Decoder::split(spec, tuning, split)?;
        lora::remove(&mut base.layouts);
        base.masks.clear();
        base.widths = base.widths.without_adapters();
        Ok(base)
    }
    pub fn spec(&self) -> &Spec {
        &self.spec
    }
    /// The ranks of sp.
    pub fn grid(&self) -> SpGrid {
        self.split.grid_of(&self.spec)
    }
    /// By layer: the root, the blocks, then the experts of each sparse block.
    pub fn layouts(&self) -> &[Layout] {
        &self.layouts
    }

    /// The same with every tensor frozen.
    pub fn frozen_layouts(&self) -> Vec<Layout> {
        let mut layouts = self.layouts.clone();
        let trained = layouts.iter_mut().flat_map(|l| &mut l.segments).filter(|s| s.is_trained());
        trained.for_each(|s| s.storage = Storage::Frozen);
        set_saved(&mut layouts);
        layouts
    }

    /// Allocates a workspace. `groups` are those of this rank's [`Split`].
    pub fn workspace(&self, dev: &dyn Device, groups: &Groups, options: &WorkspaceOptions) -> Result<Workspace> {
        let mut ws = Workspace::plan(&self.spec, &self.split, &self.widths, options).allocate(dev, groups)?;
        self.fill_tables(dev, &mut ws.fixed)?;
        if !dev.is_unbacked() {
            dev.zero(ws.scratch.zeros.all_mut())?;
        }
        Ok(ws)
    }
    /// For each block of the cache, elements of a token in those before it, and in it.
    pub(super) fn cached_blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let attention = self.blocks.iter().filter_map(DecoderBlock::attention);
        let own = attention.filter(|attention| !matches!(attention.sharing, KvSharing::Takes(_)));
        own.map(|attention| (attention.cached_before, attention.shape.kv_row()))
    }
    pub(super) fn fill_tables(&self, dev: &dyn Device, fixed: &mut Fixed) -> Result<()> {
        if dev.is_unbacked() {
            return Ok(());
        }
        let Fixed { table, local_table, still_table, ones, .. } = fixed;
        let one = match ones.dtype() {
            DType::F32 => 1f32.to_ne_bytes().to_vec(),
            DType::Bf16 => bf16::ONE.to_ne_bytes().to_vec(),
            _ => f16::ONE.to_ne_bytes().to_vec(),
        };
        let n = ones.capacity();
        dev.upload(&one.repeat(n * ones.width()), ones.rows_mut(n))?;
        for (rope, table) in [(&self.spec.rope, table), (&self.spec.local_rope, &mut *local_table)] {
            if let Some(rope) = rope {
                let (rows, d, forms) = (table.capacity(), table.width(), self.spec.forms());
                let mut values = rope.table(d, rows / forms, self.spec.max_len, forms);
                if self.spec.turns_back {
                    values.chunks_exact_mut(d).flat_map(|row| &mut row[d / 2..]).for_each(|sine| *sine = -*sine);
                }
                dev.upload(bytemuck::cast_slice(&values), table.rows_mut(rows))?;
            }
        }
        if let Some(growth) = self.spec.query_growth {
            let rows = local_table.capacity();
            let values = growth.table(self.spec.rotary_dim(), rows);
            dev.upload(bytemuck::cast_slice(&values), local_table.rows_mut(rows))?;
        }
        let (rows, half) = (still_table.capacity(), self.spec.head_dim / 2);
        let still: Vec<f32> = [vec![1.0; half], vec![0.0; half]].concat().repeat(rows);
        dev.upload(bytemuck::cast_slice(&still), still_table.rows_mut(rows))
    }

    /// Words of a micro-batch's dropout keys; 0 without dropout.
    pub fn dropout_words(&self) -> usize {
        self.row_words() + 2 * self.masks.len()
    }
    /// Words for dropout in the residual stream; the adapters' follow.
    fn row_words(&self) -> usize {
        if self.spec.dropout > 0.0 { DropoutKeys::words(1 + self.blocks.len()) } else { 0 }
    }
    /// Derives all dropout keys of a micro-batch from `key`, which identifies run, step, micro-batch and rank. `shared`
    /// is the same on all sp ranks, whose adapters draw one mask.
    pub fn dropout_keys(&self, key: u64, shared: u64, words: &mut [u32]) {
        // Ranks of tp that hold the same rows draw the same masks.
        let own = if self.split.sequence() { Rng::new(key, self.split.tp.index as u64).key() } else { key };
        let (rows, adapters) = words.split_at_mut(self.row_words());
        DropoutKeys::fill(own, rows);
        DropoutKeys::fill_named(shared, &self.masks, adapters);
    }

    /// Forward and backward. Adds the summed token losses to the workspace, and their gradients times
    /// [`Micro::loss_scale`] to the store; for a loss of sequences its weights replace the scale. Returns the host's
    /// time between the two, after the loss.
    pub fn train(
        &self,
        dev: &dyn Device,
        store: &mut dyn ParamStore,
        batch: &Batch,
        ws: &mut Workspace,
        micro: &Micro,
        minimized: Minimized,
    ) -> Result<Instant> {
        let n = batch.rows(ws.tokens(), true)?;
        if ws.dx.capacity() < self.split.rows(n) {
            return Err(Error::op("train", "the workspace was allocated without backward buffers"));
        }
        let Workspace { stream, kept, scratch, fixed, dx, groups, .. } = ws;
        let Fixed { table, local_table, still_table, ones, balance, load, loss, .. } = fixed;
        let cx = self.cx(dev, groups, batch, [ones, table, local_table, still_table], Some(micro.dropout_keys));
        let rows = cx.rows();
        self.begin_attention(&cx, scratch)?;
        self.begin_load(dev, scratch)?;
        self.forward(&cx, store, stream, kept, scratch, Pass::Forward)?;
        self.balance(&cx, scratch, [&mut *balance, &mut *load], micro)?;
        let cx = Cx { balance: Some(balance.rows(1)), ..cx };

        let w = store.acquire(ROOT, Pass::Forward)?;
        let x = stream[self.spec.layers].rows(rows);
        let whole = all_rows(&cx);
        let of_tokens =
            LossSums { scales: Some(micro.loss_scale), ..LossSums::new(LossRows::Sequences(&whole), loss.rows_mut(1)) };
        let losses = match minimized {
            Minimized::Tokens => of_tokens,
            Minimized::Taught(teacher) => LossSums { teacher: Some(teacher), ..of_tokens },
            Minimized::Sequences(sequences) => {
                let SequenceBuffers { rows, sums, entropies, .. } = sequences.buffers();
                let measured = LossSums { entropies, ..LossSums::new(rows, sums) };
                self.root.loss(&cx, w, x, scratch, measured, None)?;
                sequences.weigh(dev)?;
                let SequenceBuffers { rows, sums, weights, .. } = sequences.buffers();
                LossSums { scales: Some(weights), ..LossSums::new(rows, sums) }
            }
        };
        let (w, grads) = store.grads(ROOT)?;
        let backward = LossGrad { grads, dx: dx.rows_mut(rows) };
        self.root.loss(&cx, w, x, scratch, losses, Some(backward))?;
        let between = Instant::now();
        scratch.shared_kv.begin_backward(dev)?;

        for i in (0..self.spec.layers).rev() {
            let (layer, x) = (i + 1, stream[i].rows(rows));
            let sparse = self.blocks[i].sparse();
            if layer < self.lowest {
                for layer in sparse.map(|sparse| sparse.experts.layer).into_iter().chain([layer]) {
                    store.grads_ready(layer)?; // may complete a unit of several layers
                    store.release(layer, Pass::Backward)?;
                }
                continue;
            }
            let w = store.acquire(layer, Pass::Backward)?;
            let (cx, mut whole) = (Cx { layer, attended: kept.is_selective(), ..cx }, kept.is_whole(i));
            let (block, saved) = (&self.blocks[i], kept.of(i));
            if !whole {
                block.forward(&cx, w, x, saved, scratch, None)?;
            }
            if let Some(sparse) = sparse {
                if block.goes_on() {
                    if !whole {
                        self.experts(&cx, store, Pass::Backward, saved, scratch, None)?;
                        whole = true;
                    }
                    let (w, mut dw) = store.grads(layer)?;
                    block.go_on_backward(&cx, w, &mut dw, saved, scratch, dx.rows_mut(rows))?;
                }
                let w = store.acquire(layer, Pass::Backward)?;
                block.renorm(&cx, w, x, saved, scratch)?;
                let layer = sparse.experts.layer;
                store.acquire(layer, Pass::Backward)?;
                let (w, mut dw) = store.grads(layer)?;
                let (cx, dy) = (block.of_mlp(&cx), dx.rows(rows));
                sparse.experts.backward(&cx, w, &mut dw, &mut saved.mlp, scratch, dy, whole)?;
                store.grads_ready(layer)?;
                store.release(layer, Pass::Backward)?;
            }
            let (w, mut dw) = store.grads(layer)?;
            block.backward(&cx, w, &mut dw, x, saved, scratch, dx.rows_mut(rows))?;
            store.grads_ready(layer)?;
            store.release(layer, Pass::Backward)?;
        }

        let (w, dw) = store.grads(ROOT)?;
        self.root.embed_backward(&cx, w, dw, stream[0].rows(rows), scratch, dx.rows_mut(rows))?;
        store.grads_ready(ROOT)?;
        store.release(ROOT, Pass::Backward)?;
        Ok(between)
    }

    /// Forward only, without dropout: adds the summed token losses to the workspace, or those of each sequence to the
    /// sums of `sequences`.
    pub fn evaluate(
        &self,
        dev: &dyn Device,
        store: &mut dyn ParamStore,
        batch: &Batch,
        ws: &mut Workspace,
        sequences: Option<Scored>,
    ) -> Result<()> {
        batch.rows(ws.tokens(), true)?;
        let Workspace {
            stream,
            kept,
            scratch,
            fixed: Fixed { table, local_table, still_table, ones, loss, .. },
            groups,
            ..
        } = ws;
        let adapted = sequences.as_ref().is_none_or(|scored| !scored.base);
        let cx = Cx { adapted, ..self.cx(dev, groups, batch, [ones, table, local_table, still_table], None) };
        self.begin_attention(&cx, scratch)?;
        self.forward(&cx, store, stream, kept, scratch, Pass::Evaluate)?;
        let w = store.acquire(ROOT, Pass::Evaluate)?;
        let x = stream[self.spec.layers % stream.len()].rows(cx.rows());
        let whole = all_rows(&cx);
        let losses = match sequences {
            None => LossSums::new(LossRows::Sequences(&whole), loss.rows_mut(1)),
            Some(scored) => {
                let SequenceBuffers { rows, sums, .. } = scored.loss.buffers();
                LossSums::new(rows, sums)
            }
        };
        self.root.loss(&cx, w, x, scratch, losses, None)?;
        store.release(ROOT, Pass::Evaluate)
    }

    pub(super) fn cx<'a>(
        &'a self,
        dev: &'a dyn Device,
        groups: &'a Groups,
        batch: &Batch<'a>,
        [ones, tables @ ..]: [&'a Tensor; 4],
        keys: Option<View<'a>>,
    ) -> Cx<'a> {
        let p = self.spec.dropout;
        let rows = self.row_words();
        let dropout = keys.filter(|_| p > 0.0).map(|keys| (p, keys.slice(0..rows)));
        let adapter_keys = keys.filter(|_| !self.masks.is_empty()).map(|keys| keys.slice(rows..keys.len()));
        let tables = tables.map(|table| table.rows(table.capacity()));
        Cx {
            dev,
            groups,
            split: self.split,
            batch: *batch,
            n: batch.tokens.len(),
            tables,
            ones: ones.rows(ones.capacity()),
            residual: self.spec.residual_multiplier,
            dropout,
            adapter_keys,
            layer: ROOT,
            attended: false,
            adapted: true,
            balance: None,
            paged: None,
            spec: &self.spec,
        }
    }

    /// Begins the load of a micro-batch's experts.
    fn begin_load(&self, dev: &dyn Device, scratch: &mut Scratch) -> Result<()> {
        if self.spec.experts.is_some() { dev.zero(scratch.sparse.load.all_mut()) } else { Ok(()) }
    }
    /// Sums the load over all ranks, and derives the load-balancing loss and its gradient: before backward, as one
    /// micro-batch is balanced as a whole.
    fn balance(&self, cx: &Cx, scratch: &mut Scratch, [grad, report]: [&mut Tensor; 2], micro: &Micro) -> Result<()> {
        let Some(Experts { count, top_k, normalize, .. }) = self.spec.experts else { return Ok(()) };
        let (group, load) = (&cx.groups.loss, &mut scratch.sparse.load);
        let ticket = group.all_reduce(Tag::new("expert load", 0), load.all_mut(), Reduce::Sum)?;
        group.wait(ticket)?;
        let shape = RouteShape { experts: count, top_k, normalize };
        let (load, scale) = (load.rows(load.capacity()), micro.aux_scale);
        let report = report.rows_mut(1);
        cx.dev.balance(Balance { shape, load, scale, grad: grad.rows_mut(1), report })?;
        if cx.split.part(cx.split.cuts.mlp).index > 0 {
            // Ranks of tp sum the gradients of routers: one of them has the loss's.
            cx.dev.zero(grad.rows_mut(1))?;
        }
        group.wait_sent(ticket)
    }

    /// Prepares attention over several ranks.
    pub(super) fn begin_attention(&self, cx: &Cx, scratch: &mut Scratch) -> Result<()> {
        let Some(rows) = cx.batch.rows else { return Ok(()) };
        let shapes = self.blocks.iter().filter_map(|block| block.attention().map(|attention| &attention.shape));
        let Some(shape) = shapes.clone().next() else { return Ok(()) };
        let mut windows = shapes.map(|shape| shape.window);
        let (all, near) = (windows.clone().find(|&w| w == 0), windows.find(|&w| w > 0));
        let attention = CoreAttention::of(cx, shape);
        attention.begin(&mut scratch.core, all.into_iter().chain(near), rows)
    }

    /// Assigns the residual stream and the activations saved by each block.
    pub(super) fn forward(
        &self,
        cx: &Cx,
        store: &mut dyn ParamStore,
        stream: &mut [Tensor],
        kept: &mut SavedBlocks,
        scratch: &mut Scratch,
        pass: Pass,
    ) -> Result<()> {
        let n = cx.rows();
        let w = store.acquire(ROOT, pass)?;
        self.root.embed(cx, w, scratch, stream[0].rows_mut(n))?;
        for i in 0..self.spec.layers {
            let layer = i + 1;
            let (x, y) = stream_pair(stream, i);
            let w = store.acquire(layer, pass)?;
            self.blocks[i].forward(&Cx { layer, ..*cx }, w, x.rows(n), kept.of(i), scratch, Some(y.rows_mut(n)))?;
            self.experts(&Cx { layer, ..*cx }, store, pass, kept.of(i), scratch, Some(y.rows_mut(n)))?;
            store.release(layer, pass)?;
        }
        Ok(())
    }
    /// If the block has experts: assigns its output `y`, after [`DecoderBlock::forward`]. Without `y`, only what
    /// backward needs.
    fn experts(
        &self,
        cx: &Cx,
        store: &mut dyn ParamStore,
        pass: Pass,
        saved: &mut Saved,
        scratch: &mut Scratch,
        y: Option<ViewMut>,
    ) -> Result<()> {
        let block = &self.blocks[cx.layer - 1];
        let Some(sparse) = block.sparse() else { return Ok(()) };
        let layer = sparse.experts.layer;
        let w = store.acquire(layer, pass)?;
        sparse.experts.forward(cx, w, &mut saved.mlp, scratch)?;
        if pass != Pass::Backward {
            store.release(layer, pass)?;
        }
        if block.goes_on() {
            let w = store.acquire(cx.layer, pass)?;
            return block.go_on(cx, w, saved, scratch, y);
        }
        y.map_or(Ok(()), |y| sparse.combine(&block.of_mlp(cx), &saved.mlp, scratch, y))
    }
}

/// The token loss sums all rows together.
fn all_rows(cx: &Cx) -> [SequenceRows; 1] {
    [SequenceRows { rows: 0..cx.n, sequence: 0, ends: false }]
}

/// The input and output of block `i`: adjacent buffers, wrapping around if there are fewer than blocks.
fn stream_pair(stream: &mut [Tensor], i: usize) -> (&Tensor, &mut Tensor) {
    let (x, y) = (i % stream.len(), (i + 1) % stream.len());
    let (low, high) = stream.split_at_mut(x.max(y));
    if x < y { (&low[x], &mut high[0]) } else { (&high[0], &mut low[y]) }
}
