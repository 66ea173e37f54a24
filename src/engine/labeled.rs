//! The rows of a micro-batch that have a target, where the head skips the others: prompts, and documents' last tokens.
//! Never on GPUs, whose products are tuned by shape and whose steps may be captured: the number of rows varies.
use crate::base::{Category, DType, Result};
use crate::device::{Buf, Device, IGNORE};
use crate::nn::LabeledRows;

/// All rows have logits if more than so many eighths have a target: then moving rows saves little.
const MOST_EIGHTHS: usize = 7;

pub(super) struct LabeledStaging {
    /// Room for this many rows; 0 on GPUs.
    capacity: usize,
    rows: Buf,
    places: Buf,
    targets: Buf,
    /// Host copies.
    host_rows: Vec<u32>,
    host_places: Vec<u32>,
    host_targets: Vec<i32>,
}

impl LabeledStaging {
    /// For up to `tokens` rows.
    pub fn new(dev: &dyn Device, tokens: usize) -> Result<LabeledStaging> {
        let capacity = if dev.launches_kernels() { 0 } else { tokens };
        let alloc = |dtype| dev.alloc(dtype, capacity, Category::Other);
        Ok(LabeledStaging {
            capacity,
            rows: alloc(DType::U32)?,
            places: alloc(DType::U32)?,
            targets: alloc(DType::I32)?,
            host_rows: Vec::with_capacity(capacity),
            host_places: Vec::with_capacity(capacity),
            host_targets: Vec::with_capacity(capacity),
        })
    }
    /// Uploads what `targets` say; none if all rows had better have logits. At least one row has.
    pub fn upload(&mut self, dev: &dyn Device, targets: &[i32]) -> Result<Option<LabeledRows<'_>>> {
        let labeled = targets.iter().filter(|&&target| target != IGNORE).count();
        if targets.is_empty() || targets.len() > self.capacity || 8 * labeled > MOST_EIGHTHS * targets.len() {
            return Ok(None);
        }
        let LabeledStaging { rows, places, targets: of_rows, host_rows, host_places, host_targets, .. } = self;
        host_rows.clear();
        host_places.clear();
        host_targets.clear();
        // Without any, the first row stands for all, so that gradients are assigned.
        let count = labeled.max(1);
        for (row, &target) in targets.iter().enumerate() {
            let has_logits = target != IGNORE || labeled == 0 && row == 0;
            host_places.push(if has_logits { host_rows.len() } else { count } as u32);
            if has_logits {
                host_rows.push(row as u32);
                host_targets.push(target);
            }
        }
        dev.upload(bytemuck::cast_slice(host_rows), rows.view_mut().slice(0..count))?;
        dev.upload(bytemuck::cast_slice(host_places), places.view_mut().slice(0..targets.len()))?;
        dev.upload(bytemuck::cast_slice(host_targets), of_rows.view_mut().slice(0..count))?;
        Ok(Some(LabeledRows {
            host: host_rows,
            rows: rows.view().slice(0..count),
            places: places.view().slice(0..targets.len()),
            targets: of_rows.view().slice(0..count),
        }))
    }
}
