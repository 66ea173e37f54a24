//! The device copy of the current micro-batch, or of this rank's part of it, with its dropout keys; allocated once.
//! Never holds more than one.
use super::labeled::LabeledStaging;
use crate::base::{Category, DType, Error, Result};
use crate::data::MicroBatch;
use crate::data::zigzag::ZigzagCut;
use crate::device::ops::documents_of_rows;
use crate::device::{Buf, Device, View};
use crate::nn::rotary::rows_of_forms;
use crate::nn::{Batch, Decoder};

pub(super) struct BatchStaging {
    /// Tokens of a whole micro-batch.
    capacity: usize,
    tokens: Buf,
    targets: Buf,
    labeled: LabeledStaging,
    positions: Buf,
    cu_seqlens: Buf,
    documents: Buf,
    /// Host copy of `documents`.
    host_documents: Vec<u32>,
    rows: Buf,
    /// Empty without dropout.
    keys: Buf,
    /// Host copy of `keys`.
    host_keys: Vec<u32>,
    /// Set if the ranks of sp share the micro-batch.
    cut: Option<ZigzagCut>,
    /// [`Spec::long_from`], and then the micro-batch with rows of the rotation table as positions.
    long_from: Option<usize>,
    turned: MicroBatch,
}

/// A micro-batch on the device.
pub(super) struct StagedBatch<'a> {
    /// This rank's part.
    pub batch: Batch<'a>,
    /// The rows of the whole batch that this rank holds; none: all.
    pub local: Option<&'a [u32]>,
    pub keys: View<'a>,
}

impl BatchStaging {
    /// For `decoder`'s part of `tokens` tokens in at most that many documents.
    pub fn new(dev: &dyn Device, tokens: usize, decoder: &Decoder) -> Result<BatchStaging> {
        let (sp, keys) = (decoder.grid(), decoder.dropout_words());
        let _for = dev.meter().purpose("micro-batch");
        let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other);
        let (part, cut) = (tokens.div_ceil(sp.ranks()), sp.ranks() > 1);
        let all = part * sp.ranks();
        // Passes of a ring have ranges of their own. Padding is one more document.
        let (borders, attended) = if sp.ring.of > 1 { (tokens + 2, 0) } else { (0, all) };
        let rows = if cut { all } else { 0 };
        Ok(BatchStaging {
            capacity: tokens,
            tokens: alloc(DType::U32, part)?,
            targets: alloc(DType::I32, part)?,
            labeled: LabeledStaging::new(dev, part)?,
            positions: alloc(DType::U32, part)?,
            cu_seqlens: alloc(DType::U32, borders)?,
            documents: alloc(DType::U32, 2 * attended)?,
            host_documents: Vec::with_capacity(2 * attended),
            rows: alloc(DType::U32, rows)?,
            keys: alloc(DType::U32, keys)?,
            host_keys: vec![0; keys],
            cut: cut.then(|| ZigzagCut::new(sp.index(), sp.ranks(), sp.ulysses.of, tokens)),
            long_from: decoder.spec().long_from(),
            turned: MicroBatch::default(),
        })
    }
    /// Uploads the dropout keys of the next micro-batch, written by `fill`.
    pub fn upload_keys(&mut self, dev: &dyn Device, fill: impl FnOnce(&mut [u32])) -> Result<()> {
        if self.host_keys.is_empty() {
            return Ok(());
        }
        fill(&mut self.host_keys);
        dev.upload(bytemuck::cast_slice(&self.host_keys), self.keys.view_mut())
    }

    /// Uploads this rank's part of the micro-batch, and returns it with the keys. Targets are given for all tokens or
    /// for none; without them it serves prediction only.
    pub fn upload(&mut self, dev: &dyn Device, batch: &MicroBatch) -> Result<StagedBatch<'_>> {
        let (n, documents) = (batch.tokens.len(), batch.cu_seqlens.len());
        if n > self.capacity || documents > self.capacity + 1 {
            let what = format!(
                "{n} tokens with {documents} document boundaries exceed the buffer for {} tokens",
                self.capacity
            );
            return Err(Error::op("upload", what));
        }
        let batch = match self.long_from {
            None => batch,
            Some(original) => {
                self.turned.clone_from(batch);
                rows_of_forms(&mut self.turned.positions, &batch.cu_seqlens, original);
                &self.turned
            }
        };
        let (part, rows, local): (_, &[u32], _) = match &mut self.cut {
            None => (batch, &[], None),
            Some(cut) => {
                cut.fill(batch);
                (&cut.part, &cut.rows, Some(cut.own()))
            }
        };
        let (table, borders): (&[u32], &[u32]) = match self.cu_seqlens.is_empty() {
            true => (&part.cu_seqlens, &[]),
            false => (&[], &part.cu_seqlens),
        };
        self.host_documents.clear();
        self.host_documents.extend(documents_of_rows(table));
        let [tokens, targets, positions, cu_seqlens, documents, rows] = [
            (&mut self.tokens, bytemuck::cast_slice::<u32, u8>(&part.tokens)),
            (&mut self.targets, bytemuck::cast_slice(&part.targets)),
            (&mut self.positions, bytemuck::cast_slice(&part.positions)),
            (&mut self.cu_seqlens, bytemuck::cast_slice(borders)),
            (&mut self.documents, bytemuck::cast_slice(&self.host_documents)),
            (&mut self.rows, bytemuck::cast_slice(rows)),
        ]
        .map(|(buf, src)| {
            let len = src.len() / buf.dtype().size();
            if len > 0 {
                dev.upload(src, buf.view_mut().slice(0..len))?;
            }
            Ok(buf.view().slice(0..len))
        });
        let labeled = self.labeled.upload(dev, &part.targets)?;
        let rows = Some(rows?).filter(|_| local.is_some());
        let padding = local.map_or(0, |own| own.iter().rev().take_while(|&&row| row as usize >= n).count());
        let (tokens, targets, positions) = (tokens?, targets?, positions?);
        let (cu_seqlens, documents) = (cu_seqlens?, documents?);
        let batch = Batch { tokens, targets, positions, cu_seqlens, documents, rows, padding, labeled };
        Ok(StagedBatch { batch, local, keys: self.keys.view() })
    }
}
