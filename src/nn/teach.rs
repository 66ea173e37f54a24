//! A frozen teacher: its forward pass up to the head, then the head by chunks. Never trains.
use super::context::{Batch, Cx, Whole};
use super::decoder::Decoder;
use super::product_buffers::AdapterScratch;
use super::root::Root;
use super::saved::Scratch;
use super::split::Groups;
use super::store::{ParamStore, Pass, ROOT, Weights};
use super::teacher::{StudentRows, Teacher, TeacherChunk, TeacherStats};
use super::tensor::{Tensor, TensorShape};
use super::workspace::{Fixed, Workspace};
use crate::base::{Category, DType, Result};
use crate::comm::{Axis, CommUse};
use crate::device::Device;
use crate::device::ops::DistillTerms;
use std::ops::Range;

/// A teacher whose blocks have run on a micro-batch. The store's root must be released after it.
pub struct TeacherPass<'a> {
    root: &'a Root,
    cx: Cx<'a>,
    w: Weights<'a>,
    /// (N, C): the input of the head.
    h: Whole<'a>,
    width: usize,
    logits: &'a mut Tensor,
    adapter: &'a mut AdapterScratch,
    terms: DistillTerms,
    stats: &'a mut TeacherStats,
    student: Option<StudentRows<'a>>,
}

impl Decoder {
    /// Buffers for [`Decoder::teach`] in workspace `ws`.
    pub fn teacher_stats(&self, dev: &dyn Device, groups: &Groups, ws: &Workspace) -> Result<TeacherStats> {
        let (rows, over) = (ws.scratch.logits.capacity(), self.root.words.over.of);
        let shape = |rows| TensorShape::new(Category::Scratch, DType::F32, rows, DistillTerms::STATS);
        let all = if over > 1 { shape(rows * over).through(Axis::Tp, CommUse::Gathered) } else { shape(0) };
        Ok(TeacherStats {
            own: shape(rows).allocate("teacher_stats", dev, groups)?,
            all: all.allocate("all_teacher_stats", dev, groups)?,
        })
    }

    /// Runs the blocks as a teacher. `terms`: without its own softcap. `student`: of all rows of this rank.
    pub fn teach<'a>(
        &'a self,
        dev: &'a dyn Device,
        store: &'a mut dyn ParamStore,
        batch: &Batch<'a>,
        (ws, stats): (&'a mut Workspace, &'a mut TeacherStats),
        (terms, student): (DistillTerms, Option<StudentRows<'a>>),
    ) -> Result<TeacherPass<'a>> {
        batch.rows(ws.tokens(), true)?;
        let Workspace {
            stream, kept, scratch, fixed: Fixed { table, local_table, still_table, ones, .. }, groups, ..
        } = ws;
        let cx = self.cx(dev, groups, batch, [ones, table, local_table, still_table], None);
        self.begin_attention(&cx, scratch)?;
        self.forward(&cx, store, stream, kept, scratch, Pass::Evaluate)?;
        let w = store.acquire(ROOT, Pass::Evaluate)?;
        let (rows, x) = (cx.rows(), stream[self.spec.layers % stream.len()].rows(cx.rows()));
        let Scratch { h, stats: norm, whole, logits, adapter, .. } = scratch;
        self.root.norm.forward(&cx, w, x, h.rows_mut(rows), norm.rows_mut(rows))?;
        let terms = DistillTerms { teacher_cap: self.root.logit_cap, ..terms };
        let width = h.width();
        let h = cx.whole(h.rows(rows), whole)?;
        Ok(TeacherPass { root: &self.root, cx, w, h, width, logits, adapter, terms, stats, student })
    }
}

impl TeacherPass<'_> {
    /// The micro-batch needs the teacher no more.
    pub fn end(self) -> Result<()> {
        self.cx.release(self.h)
    }
}

impl Teacher for TeacherPass<'_> {
    fn chunk(&mut self, band: &Range<usize>) -> Result<TeacherChunk<'_>> {
        let h = self.h.rows.slice(band.start * self.width..band.end * self.width);
        self.root.project(&self.cx, self.w, h, self.adapter, self.logits.rows_mut(band.len()))?;
        Ok(TeacherChunk {
            terms: self.terms,
            logits: self.logits.rows(band.len()),
            stats: self.stats,
            student: self.student.as_mut().map(|rows| rows.slice(band)),
        })
    }
}
