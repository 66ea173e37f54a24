//! Fills packed shards, quantizing the range of each matrix that this rank owns, and expands them. Never reads files,
//! and never communicates: every rank reads the whole matrix for the magnitudes of its blocks, whose mean is part of
//! every scale, and again what it owns. So the bytes do not depend on the mesh.
//!
//! In addition to the shard, holds 1/16 byte per element of one matrix, the owned bytes of it, and [`PIECE`] values.
use super::PackedShard;
use crate::base::Result;
use crate::base::nf4::{BLOCK, GROUP, NF4, Nf4Scales, SCALES, encode, magnitude};
use crate::device::Device;
use crate::nn::Segment;
use std::ops::Range;

/// Elements read at a time; whole blocks.
pub const PIECE: usize = 1 << 16;

/// Reads elements of the whole tensor from an index on. The flag: they are this rank's own, which is so once for every
/// element over all ranks that share a matrix.
pub type ReadValues<'a> = dyn FnMut(&Segment, usize, &mut [f32], bool) -> Result<()> + 'a;

/// Takes values of this rank's part of a segment, from an element on.
pub type VisitValues<'a> = dyn FnMut(&Segment, usize, &mut [f32]) -> Result<()> + 'a;

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

impl PackedShard<'_> {
    /// Fills the matrices that `wanted` chooses.
    pub fn fill(
        mut self,
        dev: &dyn Device,
        wanted: &dyn Fn(&Segment) -> bool,
        read: &mut ReadValues<'_>,
    ) -> Result<()> {
        let shard = self.start..self.start + self.bytes.len();
        for segment in self.layout.segments.iter().filter(|segment| wanted(segment)) {
            let owned = overlap(&segment.bytes(), &shard);
            if !owned.is_empty() {
                let bytes = quantized(segment, owned.start - segment.start..owned.end - segment.start, read)?;
                let to = owned.start - self.start..owned.end - self.start;
                dev.upload(&bytes, self.bytes.reborrow().slice(to))?;
            }
        }
        Ok(())
    }

    /// Visits the values of this rank's codes of the matrices that `wanted` chooses, a piece of 2^16 at a time at most:
    /// the segment, the first element in this rank's part of it, and the values. `read` gives what the matrix was
    /// quantized from, since other ranks may have the scales.
    pub fn values(
        self,
        dev: &dyn Device,
        wanted: &dyn Fn(&Segment) -> bool,
        read: &mut ReadValues<'_>,
        visit: &mut VisitValues<'_>,
    ) -> Result<()> {
        let shard = self.start..self.start + self.bytes.len();
        let (mut bytes, mut values) = (vec![0u8; PIECE / 2], vec![0f32; PIECE]);
        for segment in self.layout.segments.iter().filter(|segment| wanted(segment)) {
            let (shape, owned) = (segment.packing(), overlap(&segment.bytes(), &shard));
            let codes = overlap(&shape.codes(), &(owned.start - segment.start..owned.end - segment.start));
            if owned.is_empty() || codes.is_empty() {
                continue;
            }
            let magnitudes = magnitudes(segment, read)?;
            let scales = Nf4Scales::new(&magnitudes);
            for from in codes.clone().step_by(PIECE / 2) {
                let bytes = &mut bytes[..(codes.end - from).min(PIECE / 2)];
                let at = segment.start + from - self.start;
                dev.download(self.bytes.as_view().slice(at..at + bytes.len()), bytes)?;
                let values = &mut values[..2 * bytes.len()];
                for (i, (codes, values)) in bytes.chunks(BLOCK / 2).zip(values.chunks_mut(BLOCK)).enumerate() {
                    let block = shape.block(2 * from / BLOCK + i);
                    let scale = SCALES[scales.code(block) as usize] * scales.factors[block / GROUP] + scales.mean;
                    let pairs = values.as_chunks_mut::<2>().0.iter_mut().zip(codes);
                    pairs.for_each(|(to, code)| *to = [code >> 4, code & 15].map(|code| NF4[code as usize] * scale));
                }
                visit(segment, 2 * from, values)?;
            }
        }
        Ok(())
    }
}

/// The largest magnitudes of all blocks of the whole matrix.
fn magnitudes(segment: &Segment, read: &mut ReadValues<'_>) -> Result<Vec<f32>> {
    let (whole, mut values) = (segment.packing().whole, vec![0f32; PIECE]);
    let mut magnitudes = vec![0f32; whole / BLOCK];
    for at in (0..whole).step_by(PIECE) {
        let values = &mut values[..PIECE.min(whole - at)];
        read(segment, at, values, false)?;
        magnitudes[at / BLOCK..].iter_mut().zip(values.chunks(BLOCK)).for_each(|(to, block)| *to = magnitude(block));
    }
    Ok(magnitudes)
}

/// The bytes of the packed segment in `owned`, which begins at a multiple of [`crate::device::ALIGN`].
fn quantized(segment: &Segment, owned: Range<usize>, read: &mut ReadValues<'_>) -> Result<Vec<u8>> {
    let (shape, mut values) = (segment.packing(), vec![0f32; PIECE]);
    let magnitudes = magnitudes(segment, read)?;
    let mut out = vec![0u8; owned.len()];
    let codes = overlap(&shape.codes(), &owned);
    for (part, place) in segment.stretches(2 * codes.start..2 * codes.end) {
        for at in (0..part.len()).step_by(PIECE) {
            let values = &mut values[..PIECE.min(part.len() - at)];
            read(segment, place + at, values, true)?;
            let to = &mut out[(part.start + at) / 2 - owned.start..];
            for (i, (block, to)) in values.chunks(BLOCK).zip(to.chunks_mut(BLOCK / 2)).enumerate() {
                encode(block, magnitudes[(place + at) / BLOCK + i], to);
            }
        }
    }
    let scales = Nf4Scales::new(&magnitudes);
    for at in overlap(&shape.scales(), &owned) {
        out[at - owned.start] = scales.code(shape.block(at - shape.scales().start));
    }
    let end = scales.factors.iter().chain([&scales.mean]).flat_map(|x| x.to_le_bytes());
    for (at, byte) in (shape.factors().start..).zip(end).filter(|(at, _)| owned.contains(at)) {
        out[at - owned.start] = byte;
    }
    Ok(out)
}
