//! Next tokens: the logits of one, of a whole text; or draws for many texts, whose keys and values are cached. Never
//! chooses a token.
use super::cache::CacheSize;
use super::context::{Batch, Cx};
use super::decoder::Decoder;
use super::root::Choose;
use super::store::{ParamStore, Pass, ROOT};
use super::workspace::{Fixed, Workspace};
use crate::base::Result;
use crate::device::Device;
use crate::device::ops::PagedRows;

impl Decoder {
    /// Allocates the KV cache in `ws`, for [`Decoder::go_on`].
    pub fn remember(&self, dev: &dyn Device, ws: &mut Workspace, size: &CacheSize) -> Result<()> {
        ws.remember(&self.split.local(&self.spec), dev, size)?;
        self.fill_tables(dev, &mut ws.fixed)
    }
    /// Copies the first `tokens` of a page of the cache to another one.
    pub fn copy_page(&self, dev: &dyn Device, ws: &mut Workspace, pages: [u32; 2], tokens: usize) -> Result<()> {
        ws.scratch.cache.copy_page(dev, self.cached_blocks(), pages, tokens)
    }
    /// Copies what a sequence goes on from to another slot.
    pub fn copy_slot(&self, dev: &dyn Device, ws: &mut Workspace, slots: [usize; 2]) -> Result<()> {
        ws.scratch.recurrent_cache.copy_slot(dev, &self.spec, slots)
    }

    /// Assigns `out (vocab)`: the logits that follow token `row` of the whole batch. Needs no targets.
    pub fn next_token_logits(
        &self,
        dev: &dyn Device,
        store: &mut dyn ParamStore,
        batch: &Batch,
        ws: &mut Workspace,
        row: usize,
        out: &mut [f32],
    ) -> Result<()> {
        self.logits(dev, store, batch, ws, row, out)
    }

    /// Continues sequences whose earlier tokens are cached in `ws` by the rows of `batch`, which `runs` tells apart.
    /// For each of the `wanted` rows, in order and perhaps repeated, `choose` chooses the next token from its index and
    /// logits on the first rank of tp; the token and its log-probability are appended to `drawn`.
    #[allow(clippy::too_many_arguments)] // the operands of a pass, and what is done with its results
    pub fn go_on(
        &self,
        dev: &dyn Device,
        store: &mut dyn ParamStore,
        batch: &Batch,
        ws: &mut Workspace,
        (runs, wanted): (&[PagedRows], &[usize]),
        choose: Choose,
        drawn: &mut Vec<(u32, f32)>,
    ) -> Result<()> {
        batch.rows(ws.tokens(), false)?;
        let Workspace {
            stream,
            kept,
            scratch,
            fixed: Fixed { table, local_table, still_table, ones, next, all_next, .. },
            groups,
            ..
        } = ws;
        scratch.cache.begin(dev, runs)?;
        let cx = Cx { paged: Some(runs), ..self.cx(dev, groups, batch, [ones, table, local_table, still_table], None) };
        self.forward(&cx, store, stream, kept, scratch, Pass::Evaluate)?;
        let w = store.acquire(ROOT, Pass::Evaluate)?;
        let x = stream[self.spec.layers % stream.len()].rows(cx.rows());
        self.root.draw(&cx, w, x, wanted, scratch, [next, all_next], choose, drawn)?;
        store.release(ROOT, Pass::Evaluate)
    }

    fn logits(
        &self,
        dev: &dyn Device,
        store: &mut dyn ParamStore,
        batch: &Batch,
        ws: &mut Workspace,
        row: usize,
        out: &mut [f32],
    ) -> Result<()> {
        batch.rows(ws.tokens(), false)?;
        let at = batch.place(dev, row)?;
        let Workspace {
            stream,
            kept,
            scratch,
            fixed: Fixed { table, local_table, still_table, ones, next, all_next, .. },
            groups,
            ..
        } = ws;
        let cx = self.cx(dev, groups, batch, [ones, table, local_table, still_table], None);
        self.begin_attention(&cx, scratch)?;
        self.forward(&cx, store, stream, kept, scratch, Pass::Evaluate)?;
        let w = store.acquire(ROOT, Pass::Evaluate)?;
        let x = stream[self.spec.layers % stream.len()].rows(cx.rows());
        self.root.logits(&cx, w, x, at, scratch, [next, all_next], bytemuck::cast_slice_mut(out))?;
        store.release(ROOT, Pass::Evaluate)?;
        let cap = self.spec.logit_cap;
        if cap > 0.0 {
            out.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
        }
        Ok(())
    }
}
