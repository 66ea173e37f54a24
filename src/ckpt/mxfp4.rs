//! Matrices in 4 bits with an exponent for each 32 (MXFP4), as gpt-oss is published: read as what transformers expands
//! them to. Never writes.
use crate::base::{Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Elements that share a scale, and their bytes.
pub(super) const BLOCK: usize = 32;
pub(super) const BLOCK_BYTES: usize = BLOCK / 2;
/// What the codes of E2M1 stand for; the highest of the four bits is the sign.
const VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// A matrix in 4 bits, whose transpose the model has: `rows` of `groups` blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Mxfp4 {
    pub(super) rows: usize,
    pub(super) groups: usize,
    /// File and offset of the scales, an exponent for each block.
    pub(super) scales: (usize, u64),
}

/// The bytes of the matrix that was read last: its elements are read in another order than they are stored.
#[derive(Default)]
pub(super) struct Mxfp4Bytes {
    of: Option<(usize, u64)>,
    blocks: Vec<u8>,
    scales: Vec<u8>,
}

impl Mxfp4Bytes {
    /// Assigns `out` from the matrix at `offset` of `file`: the model's elements `at..`.
    pub fn read(
        &mut self,
        files: &[(PathBuf, File)],
        (file, offset): (usize, u64),
        coding: &Mxfp4,
        at: usize,
        out: &mut [f32],
    ) -> Result<()> {
        let &Mxfp4 { rows, groups, scales } = coding;
        if self.of != Some((file, offset)) {
            self.of = None;
            let read = |(file, offset): (usize, u64), bytes: &mut Vec<u8>, len: usize| {
                let (path, file) = &files[file];
                bytes.resize(len, 0);
                file.read_exact_at(bytes, offset).map_err(|e| Error::in_file(path, e))
            };
            read((file, offset), &mut self.blocks, rows * groups * BLOCK_BYTES)?;
            read(scales, &mut self.scales, rows * groups)?;
            self.of = Some((file, offset));
        }
        for (i, x) in out.iter_mut().enumerate() {
            let (column, row) = ((at + i) / rows, (at + i) % rows);
            let block = row * groups + column / BLOCK;
            let pair = self.blocks[block * BLOCK_BYTES + column % BLOCK / 2];
            let code = if column % 2 == 0 { pair & 15 } else { pair >> 4 };
            *x = VALUES[code as usize] * f32::exp2(self.scales[block] as f32 - 127.0);
        }
        Ok(())
    }
}
