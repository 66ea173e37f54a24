//! The device's copy of the micro-batch at hand, allocated once. Never holds more than one.
use crate::base::{Category, DType, Error, Result};
use crate::data::MicroBatch;
use crate::device::{Buf, Device};
use crate::nn::Batch;

pub(super) struct Staging {
    tokens: Buf,
    targets: Buf,
    positions: Buf,
    cu_seqlens: Buf,
}

impl Staging {
    /// Room for `tokens` tokens in as many documents.
    pub fn new(dev: &dyn Device, tokens: usize) -> Result<Staging> {
        let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other);
        Ok(Staging {
            tokens: alloc(DType::U32, tokens)?,
            targets: alloc(DType::I32, tokens)?,
            positions: alloc(DType::U32, tokens)?,
            cu_seqlens: alloc(DType::U32, tokens + 1)?,
        })
    }
    /// Bytes that `new` allocates.
    pub fn planned(tokens: usize) -> (Category, usize) {
        (Category::Other, (4 * tokens + 1) * DType::U32.size())
    }
    pub fn capacity(&self) -> usize {
        self.tokens.len()
    }

    /// Copies the micro-batch over. Without targets (all of them, or none) it serves prediction only.
    pub fn upload(&mut self, dev: &dyn Device, batch: &MicroBatch) -> Result<Batch<'_>> {
        let (n, documents) = (batch.tokens.len(), batch.cu_seqlens.len());
        if n > self.capacity() || documents > self.cu_seqlens.len() {
            let what = format!("{n} tokens, {documents} document borders in a buffer for {} tokens", self.capacity());
            return Err(Error::op("upload", what));
        }
        let [tokens, targets, positions, cu_seqlens] = [
            (&mut self.tokens, bytemuck::cast_slice::<u32, u8>(&batch.tokens)),
            (&mut self.targets, bytemuck::cast_slice(&batch.targets)),
            (&mut self.positions, bytemuck::cast_slice(&batch.positions)),
            (&mut self.cu_seqlens, bytemuck::cast_slice(&batch.cu_seqlens)),
        ]
        .map(|(buf, src)| {
            let len = src.len() / buf.dtype().size();
            dev.upload(src, buf.view_mut().slice(0..len))?;
            Ok(buf.view().slice(0..len))
        });
        Ok(Batch { tokens: tokens?, targets: targets?, positions: positions?, cu_seqlens: cu_seqlens? })
    }
}
