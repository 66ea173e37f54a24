//! How the tensor cores and the copy engine order bytes and elements, one function each, based on the PTX ISA manual
//! (sections "Asynchronous warpgroup level matrix instructions" and "Tensor copies"; K- and MN-major canonical layouts
//! as in CUTLASS's mma_sm90_desc.hpp). To be verified on a GPU once: kernels/probe_*.ptx run there and here and are
//! compared bit for bit (`scripts/gpu_check.sh`; the emulator's answers: tests/hopper/probes.rs).
//!
//! | what                                        | here                          | probe                            |
//! |---------------------------------------------|-------------------------------|----------------------------------|
//! | mma m16n8k16, m16n8k8 fragments             | matrix_ops.rs, multiply       | probe_mma.ptx, probe_mma         |
//! | ldmatrix, ldmatrix.trans                    | matrix_ops.rs, load_matrix    | probe_mma.ptx, probe_ldmatrix    |
//! | stmatrix, stmatrix.trans                    | matrix_ops.rs, store_matrix   | probe_hopper.ptx, .._stmatrix    |
//! | wgmma accumulators, A from registers        | [`accumulator`], [`fragment`] | probe_hopper.ptx, probe_wgmma    |
//! | wgmma descriptors, swizzles, transposes     | [`SharedMatrix::row`]         | probe_hopper.ptx, probe_wgmma    |
//! | .. N = 32 inside of a row, N = 96 and 128   | [`SharedMatrix::row`]         | probe_hopper.ptx, .._wgmma_wide  |
//! | addresses of variables in a cluster         | operand.rs, mapped            | probe_hopper.ptx, .._wgmma_pair  |
//! | boxes of tensor copies, swizzles, zero fill | tensor.rs, [`Swizzle::apply`] | probe_hopper.ptx, probe_tensor   |

/// Swizzle: permutes 16-byte pieces within a pattern, so that rows and columns are spread over the banks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    None,
    B32,
    B64,
    B128,
}

impl Swizzle {
    pub fn from_bits(bits: u64) -> Option<Swizzle> {
        [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128].get(bits as usize).copied()
    }
    /// Bytes in a row of the pattern, which has eight.
    pub fn row(self) -> usize {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }
    /// Period of the pattern in bytes, which is also its alignment.
    pub fn pattern(self) -> usize {
        8 * self.row()
    }
    /// The swizzled address of a plain one: bits 4.. are XORed with the bits from 7 on.
    pub fn apply(self, address: u64) -> u64 {
        let mask = self.row() as u64 / 16 - 1;
        address ^ (address >> 7 & mask) << 4
    }
}

/// Row and column of element `e` of a lane's accumulator registers in its warp's 16 rows.
pub fn accumulator(lane: usize, e: usize) -> (usize, usize) {
    (lane / 4 + 8 * (e / 2 % 2), 8 * (e / 4) + 2 * (lane % 4) + e % 2)
}
/// Row and depth of the two elements of register `i` of four that hold A; the second is one deeper.
pub fn fragment(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i / 2))
}

/// A matrix in shared memory as a descriptor defines it; elements are 16-bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedMatrix {
    pub start: u64,
    /// Bytes, "leading" and "stride" dimension offset.
    leading: u64,
    stride: u64,
    pub swizzle: Swizzle,
    /// M or N contiguous, not K.
    transposed: bool,
}

impl SharedMatrix {
    /// Bits 0-13 start, 16-29 leading and 32-45 stride offset, each in 16 bytes; 49-51 base offset; 62-63 swizzle.
    pub fn new(descriptor: u64, transposed: bool) -> Result<SharedMatrix, String> {
        let field = |bit: u32| (descriptor >> bit & 0x3fff) << 4;
        let swizzle = match descriptor >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        let matrix = SharedMatrix { start: field(0), leading: field(16), stride: field(32), swizzle, transposed };
        if descriptor & 0x3fff_c000_c000_c000 != 0 {
            return Err(format!(
                "descriptor {descriptor:#018x} has bits that are not modeled (a base offset among them)"
            ));
        }
        // Advancing along K goes by parts of a pattern row, or by whole patterns.
        if swizzle != Swizzle::None && matrix.start % swizzle.pattern() as u64 >= swizzle.row() as u64 {
            let (start, pattern) = (matrix.start, swizzle.pattern());
            return Err(format!(
                "a matrix with {swizzle:?} starts at {start:#x}, which is not aligned to its pattern of {pattern} bytes"
            ));
        }
        Ok(matrix)
    }
    /// Transposed, what starts inside a row of the pattern must end in it: 64 columns from 64 bytes on were wrong on an
    /// H200.
    pub fn holds(&self, rows: usize) -> Result<(), String> {
        let (row, from) = (self.swizzle.row() as u64, self.start % self.swizzle.row() as u64);
        if self.transposed && self.swizzle != Swizzle::None && from > 0 && from + 2 * rows as u64 > row {
            let swizzle = self.swizzle;
            return Err(format!(
                "{rows} elements from byte {from} of a row of {row} on, with {swizzle:?}, pass its end"
            ));
        }
        Ok(())
    }
    /// Address of the 16 bytes that hold eight adjacent elements: K-major, elements of row `i` from depth `8 j` on;
    /// transposed, rows of depth `i` from `8 j` on.
    pub fn row(&self, i: usize, j: usize) -> u64 {
        let (group, within, j) = ((i / 8) as u64, (i % 8) as u64, j as u64);
        let (row, wide) = (self.swizzle.row() as u64, self.swizzle.row() as u64 / 16);
        let plain = match (self.swizzle, self.transposed) {
            // Core matrices of 8 rows of 16 bytes, adjacent ones `leading` apart along K and `stride` apart along M or
            // N
            (Swizzle::None, false) => group * self.stride + within * 16 + j * self.leading,
            // .. or the other way around.
            (Swizzle::None, true) => group * self.leading + within * 16 + j * self.stride,
            // A row of the pattern holds at least the 16 elements of K.
            (_, false) => group * self.stride + within * row + j * 16,
            (_, true) => group * self.stride + within * row + j % wide * 16 + j / wide * self.leading,
        };
        self.swizzle.apply(self.start + plain)
    }
}
