//! The two things that ranks of tp do together in a layer. What one does in forward, the other does in backward: where a
//! column-cut product begins, its input is made *whole*; where a row-cut one ends, the ranks' parts are *summed*. Never decides
//! what is cut.
//!
//! Without sequence parallelism whole rows are there already and a sum is an all-reduce: two a block and direction. With it
//! (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models") a rank has its part of the rows
//! outside: whole is an all-gather, a sum a reduce-scatter. A gathered input is not kept: the weight gradient gathers it again.
//! A block that is computed again for its backward pass repeats what leads to what is kept: the first branch's sum (both where a
//! branch ends in a norm), and with sequence parallelism the gathers in front of both.
use crate::base::Result;
use crate::comm::{Reduce, Tag, Ticket};
use crate::device::{View, ViewMut};
use crate::nn::context::Cx;
use crate::nn::workspace::Tensor;

/// All rows of what ranks have parts of, readable until [`Cx::release`].
pub(in crate::nn) struct Whole<'a> {
    pub rows: View<'a>,
    ticket: Option<Ticket>,
}

impl Cx<'_> {
    /// Rows of the residual stream that this rank has.
    pub fn rows(&self) -> usize {
        self.split.rows(self.n)
    }
    /// Those of all ranks of tp together: `n`, and with sequence parallelism what fills the last rank's part up.
    fn padded(&self) -> usize {
        if self.split.sequence() { self.rows() * self.split.tp.of } else { self.n }
    }

    /// (N, C) from this rank's rows `x`, by way of `all`.
    pub fn whole<'a>(&self, x: View<'a>, all: &'a mut Tensor) -> Result<Whole<'a>> {
        if !self.split.sequence() {
            return Ok(Whole { rows: x, ticket: None });
        }
        let tp = &self.groups.tp;
        let ticket = tp.all_gather(Tag::new("tp gather", self.layer), x, all.rows_mut(self.padded()))?;
        tp.wait(ticket)?;
        Ok(Whole { rows: all.rows(self.n), ticket: Some(ticket) })
    }
    /// The rows are read no more.
    pub fn release(&self, whole: Whole) -> Result<()> {
        whole.ticket.map_or(Ok(()), |ticket| self.groups.tp.release(ticket))
    }

    /// Assigns this rank's rows of `y`: where the work is `cut`, the sum over tp of what `part` assigns to (N, C), by way of
    /// `parts`; otherwise what `part` assigns.
    pub fn sum(
        &self,
        cut: bool,
        parts: &mut Tensor,
        y: ViewMut,
        part: impl FnOnce(ViewMut) -> Result<()>,
    ) -> Result<()> {
        if self.split.part(cut).of == 1 {
            return part(y);
        }
        let (tp, n, padded) = (&self.groups.tp, self.n, self.padded());
        part(parts.rows_mut(n))?;
        if self.split.sequence() {
            // Rows of no token: 0 in what is summed, so they are in what becomes of it.
            self.dev.zero(parts.band_mut(&(n..padded)))?;
            let ticket = tp.reduce_scatter(Tag::new("tp sum", self.layer), parts.rows_mut(padded), y, false)?;
            tp.wait(ticket)?;
            return tp.wait_sent(ticket);
        }
        let ticket = tp.all_reduce(Tag::new("tp sum", self.layer), parts.rows_mut(n), Reduce::Sum)?;
        tp.wait(ticket)?;
        self.dev.copy(parts.rows(n), y)?;
        tp.wait_sent(ticket)
    }
}
