//! The logits of next tokens: of a whole text, or token by token with a cache of keys and values. Never computes a
//! loss.
use super::context::{Batch, Cx, Past};
use super::decoder::Decoder;
use super::store::{ParamStore, Pass, ROOT};
use super::workspace::{Fixed, Workspace};
use crate::base::Result;
use crate::device::Device;

impl Decoder {
    /// Allocates the KV cache in `ws` for a sequence of up to `tokens`, to be extended by [`Decoder::go_on`]; 0 frees
    /// it. A pass covers the whole prompt, or one token.
    pub fn remember(&self, dev: &dyn Device, ws: &mut Workspace, tokens: usize) -> Result<()> {
        ws.remember(&self.split.local(&self.spec), dev, tokens)?;
        self.fill_tables(dev, &mut ws.fixed)
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
        self.logits(dev, store, batch, ws, (row, None), out)
    }

    /// Assigns `out (vocab)`: the logits that follow the last token of `batch`. `batch` is the prompt if `past` is 0,
    /// else the one token after the `past` tokens cached in `ws`.
    pub fn go_on(
        &self,
        dev: &dyn Device,
        store: &mut dyn ParamStore,
        batch: &Batch,
        ws: &mut Workspace,
        past: usize,
        out: &mut [f32],
    ) -> Result<()> {
        let cache = &mut ws.scratch.cache;
        let past = Past { tokens: past, room: cache.kv.capacity() / self.spec.layers };
        past.check(batch.tokens.len())?;
        cache.set_ranges(dev, past, self.spec.window)?;
        self.logits(dev, store, batch, ws, (batch.tokens.len() - 1, Some(past)), out)
    }

    fn logits(
        &self,
        dev: &dyn Device,
        store: &mut dyn ParamStore,
        batch: &Batch,
        ws: &mut Workspace,
        (row, past): (usize, Option<Past>),
        out: &mut [f32],
    ) -> Result<()> {
        batch.rows(ws.tokens(), false)?;
        let at = batch.place(dev, row)?;
        let Workspace {
            stream,
            kept,
            scratch,
            fixed: Fixed { table, local_table, still_table, next, all_next, .. },
            groups,
            ..
        } = ws;
        let cx = Cx { past, ..self.cx(dev, groups, batch, [table, local_table, still_table], None) };
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
