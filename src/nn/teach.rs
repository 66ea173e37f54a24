//! A frozen teacher: its forward pass up to the head, then the head by chunks. Never trains.
use super::context::{Batch, Cx};
use super::decoder::Decoder;
use super::root::Root;
use super::saved::{AdapterScratch, Scratch};
use super::store::{ParamStore, Pass, ROOT, Weights};
use super::teacher::Teacher;
use super::tensor::Tensor;
use super::workspace::{Fixed, Workspace};
use crate::base::{Error, Result};
use crate::device::ops::DistillTerms;
use crate::device::{Device, View};
use std::ops::Range;

/// A teacher whose blocks have run on a micro-batch. The store's root must be released after it.
pub struct TeacherPass<'a> {
    root: &'a Root,
    cx: Cx<'a>,
    w: Weights<'a>,
    /// (N, C): the input of the head.
    h: View<'a>,
    width: usize,
    logits: &'a mut Tensor,
    adapter: &'a mut AdapterScratch,
    terms: DistillTerms,
}

impl Decoder {
    /// Runs the blocks as a teacher. `terms`: without its own softcap.
    pub fn teach<'a>(
        &'a self,
        dev: &'a dyn Device,
        store: &'a mut dyn ParamStore,
        batch: &Batch<'a>,
        ws: &'a mut Workspace,
        terms: DistillTerms,
    ) -> Result<TeacherPass<'a>> {
        batch.rows(ws.tokens(), true)?;
        let Workspace { stream, kept, scratch, fixed: Fixed { table, local_table, .. }, groups, .. } = ws;
        let cx = self.cx(dev, groups, batch, [table, local_table], None);
        if cx.split.tp.of > 1 {
            return Err(Error::op("teach", "a teacher is not split over tp"));
        }
        self.begin_attention(&cx, scratch)?;
        self.forward(&cx, store, stream, kept, scratch, Pass::Evaluate)?;
        let w = store.acquire(ROOT, Pass::Evaluate)?;
        let (rows, x) = (cx.rows(), stream[self.spec.layers % stream.len()].rows(cx.rows()));
        let Scratch { h, stats, logits, adapter, .. } = scratch;
        self.root.norm.forward(dev, w, x, h.rows_mut(rows), stats.rows_mut(rows))?;
        let terms = DistillTerms { teacher_cap: self.root.logit_cap, ..terms };
        let (width, h) = (h.width(), h.rows(rows));
        Ok(TeacherPass { root: &self.root, cx, w, h, width, logits, adapter, terms })
    }
}

impl Teacher for TeacherPass<'_> {
    fn terms(&self) -> DistillTerms {
        self.terms
    }
    fn logits(&mut self, band: &Range<usize>) -> Result<View<'_>> {
        let h = self.h.slice(band.start * self.width..band.end * self.width);
        self.root.head.forward(&self.cx, self.w, h, self.adapter, self.logits.rows_mut(band.len()))?;
        Ok(self.logits.rows(band.len()))
    }
}
