//! Tensor maps: a tensor in global memory, divided into boxes that a bulk copy moves and swizzles. The 128 bytes of a
//! map here are the emulator's own encoding; a driver's for a GPU (cuTensorMapEncodeTiled) takes the same values with
//! the same limits. The byte order in shared memory follows the PTX ISA: see layouts.rs. Never moves data.
use super::layouts::Swizzle;

/// Bytes of an encoded map, as on a GPU.
pub const MAP_BYTES: usize = 128;
const MAGIC: u64 = 0x5041_4d52_4f53_4e45;
const MOST_DIMENSIONS: usize = 5;

/// A tensor of up to five dimensions, the contiguous one first, and the box that one copy moves. Out-of-bounds elements
/// read as zeros and are not written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    pub address: u64,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub element: usize,
    pub sizes: Vec<u64>,
    /// Bytes between neighbors in the second dimension and each further one.
    pub strides: Vec<u64>,
    pub tile: Vec<u32>,
    pub swizzle: Swizzle,
}

/// A run of a box: its address, if within the tensor; its offset in the unswizzled box; bytes, at most 16.
pub struct BoxRun {
    pub global: Option<u64>,
    pub at: usize,
    pub bytes: usize,
}

impl TensorMap {
    /// A map as a kernel's parameter. What cuTensorMapEncodeTiled refuses is an error.
    pub fn encode(&self) -> Result<[u8; MAP_BYTES], String> {
        self.check().map_err(|what| format!("tensor map of sizes {:?}, box {:?}: {what}", self.sizes, self.tile))?;
        let rank = self.sizes.len();
        let mut words =
            vec![MAGIC, self.address, self.element as u64 | (rank as u64) << 8 | (self.swizzle as u64) << 16];
        words.extend(&self.sizes);
        words.extend(&self.strides);
        // Two sides of a box per word: 16 words hold five dimensions.
        words.extend(self.tile.chunks(2).map(|pair| pair[0] as u64 | (*pair.get(1).unwrap_or(&0) as u64) << 32));
        let mut bytes = [0; MAP_BYTES];
        bytes.chunks_mut(8).zip(&words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        Ok(bytes)
    }
    fn check(&self) -> Result<(), String> {
        let rank = self.sizes.len();
        if !(1..=MOST_DIMENSIONS).contains(&rank) || self.tile.len() != rank || self.strides.len() + 1 != rank {
            return Err(format!(
                "{rank} dimensions, {} strides, {} sides of a box",
                self.strides.len(),
                self.tile.len()
            ));
        }
        if !matches!(self.element, 1 | 2 | 4 | 8) || !self.address.is_multiple_of(16) {
            return Err(format!(
                "elements of {} bytes at {:#x}: must be a power of two, aligned to 16 bytes",
                self.element, self.address
            ));
        }
        if let Some(stride) = self.strides.iter().find(|s| !s.is_multiple_of(16) || **s >= 1 << 40) {
            return Err(format!("a stride of {stride} bytes: must be a multiple of 16 below 2^40"));
        }
        if self.sizes.iter().any(|n| !(1..=1 << 32).contains(n)) || self.tile.iter().any(|n| !(1..=256).contains(n)) {
            return Err("sizes must be 1 to 2^32, sides of a box 1 to 256".into());
        }
        let row = self.tile[0] as usize * self.element;
        if !row.is_multiple_of(16) || self.swizzle != Swizzle::None && row > self.swizzle.row() {
            return Err(format!("a row of {row} bytes in a box with {:?}", self.swizzle));
        }
        Ok(())
    }
    pub fn decode(bytes: &[u8]) -> Option<TensorMap> {
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        let (head, rest) = words.split_at_checked(3)?;
        let rank = (head[2] >> 8 & 255) as usize;
        let swizzle = Swizzle::from_bits(head[2] >> 16)?;
        if head[0] != MAGIC || !(1..=MOST_DIMENSIONS).contains(&rank) {
            return None;
        }
        let (sizes, rest) = rest.split_at(rank);
        let (strides, rest) = rest.split_at(rank - 1);
        let tile = rest.iter().flat_map(|w| [*w as u32, (w >> 32) as u32]).take(rank).collect();
        let element = (head[2] & 255) as usize;
        Some(TensorMap { address: head[1], element, sizes: sizes.to_vec(), strides: strides.to_vec(), tile, swizzle })
    }
    pub fn bytes(&self) -> usize {
        self.tile.iter().map(|n| *n as usize).product::<usize>() * self.element
    }
    /// The box whose first element has these coordinates.
    pub fn pieces(&self, corner: &[i64]) -> Vec<BoxRun> {
        let side = |d: usize| self.tile[d] as usize;
        let row = side(0) * self.element;
        let mut pieces = vec![];
        for index in 0..self.bytes() / row {
            let (mut rest, mut address, mut inside) = (index, self.address, true);
            for (d, first) in corner.iter().enumerate().skip(1) {
                let x = first + (rest % side(d)) as i64;
                rest /= side(d);
                inside &= (0..self.sizes[d] as i64).contains(&x);
                address = address.wrapping_add_signed(x * self.strides[d - 1] as i64);
            }
            // 16 bytes at a time where all of them are inside, else element by element.
            let first = address.wrapping_add_signed(corner[0] * self.element as i64);
            let whole = corner[0] >= 0 && corner[0] + side(0) as i64 <= self.sizes[0] as i64;
            let bytes = if whole { 16 } else { self.element };
            for at in (0..row).step_by(bytes) {
                let x = corner[0] + (at / self.element) as i64;
                let inside = inside && (0..self.sizes[0] as i64).contains(&x);
                let global = inside.then(|| first.wrapping_add(at as u64));
                pieces.push(BoxRun { global, at: index * row + at, bytes });
            }
        }
        pieces
    }
}
