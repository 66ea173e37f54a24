//! Tensor-core fragments and products: ldmatrix, stmatrix and mma.sync, with the PTX ISA's layout over a warp's lanes.
//! Products are summed in f64 and rounded once; the hardware's order and rounding differ in the last bits.
use super::lane::{LANES, from_bf16, from_f16};
use super::machine::{Cta, Emulator, Site, StepResult, little_endian};
use super::memory_ops::Touch;
use super::op::{MmaType, PtxOp};
use super::operand::{Address, PtxSource, Space};
use super::shadow::{Access, Proxy};
use super::warp::Warp;

/// Rows of A, columns of B.
const M: usize = 16;
const N: usize = 8;
/// Rows, and bytes per row, of the 8x8 matrix that ldmatrix loads and stmatrix stores.
const ROWS: usize = 8;
const ROW: usize = 16;

impl MmaType {
    /// The depth of one product.
    fn k(self) -> usize {
        if self == MmaType::Tf32 { 8 } else { 16 }
    }
    /// Elements in a 32-bit register.
    fn packed(self) -> usize {
        if self == MmaType::Tf32 { 1 } else { 2 }
    }
    pub fn value(self, register: u64, element: usize) -> f64 {
        let half = register >> (16 * element);
        match self {
            MmaType::Bf16 => from_bf16(half) as f64,
            MmaType::F16 => from_f16(half) as f64,
            // The lower 13 bits are ignored.
            MmaType::Tf32 => f32::from_bits(register as u32 & !0x1fff) as f64,
        }
    }
}

/// Assigns a row of a product, whose sums are in the order of depth: side by side, so that the compiler uses vectors.
/// `right` by depth.
pub(super) fn row_products(left: &[f64], right: &[impl AsRef<[f64]>], sums: &mut [f64]) {
    sums.fill(-0.0); // what addition leaves as it is
    for (a, right) in left.iter().zip(right) {
        sums.iter_mut().zip(right.as_ref()).for_each(|(sum, b)| *sum += a * b);
    }
}

impl Emulator<'_, '_> {
    pub(super) fn matrix(&mut self, cta: &mut Cta, warp: &mut Warp, active: u32, op: &PtxOp, at: Site) -> StepResult {
        if active == 0 {
            return Ok(());
        }
        match op {
            PtxOp::LoadMatrix { transposed, to, address } => self.load_matrix(cta, warp, *transposed, to, *address, at),
            PtxOp::StoreMatrix { transposed, from, address } => {
                self.store_matrix(cta, warp, *transposed, from, *address, at)
            }
            PtxOp::Mma { kind, to, a, b, c } => {
                self.multiply(warp, *kind, to, [a, b, c], at);
                Ok(())
            }
            _ => Ok(()),
        }
    }
    /// Lane 8 i + r gives the address of row r of matrix i. Lane l receives, of each matrix, elements 2 (l % 4) and the
    /// next of row l / 4; transposed, of column l / 4.
    fn load_matrix(
        &mut self,
        cta: &mut Cta,
        warp: &mut Warp,
        transposed: bool,
        to: &[usize],
        address: Address,
        at: Site,
    ) -> StepResult {
        let givers = u32::MAX >> (LANES - ROWS * to.len());
        let addresses = self.addresses(cta, warp, (Space::Shared, address), givers, at)?;
        self.count(Space::Shared, &addresses, givers, ROW);
        for (i, &to) in to.iter().enumerate() {
            let mut matrix = [[0u64; ROWS]; ROWS];
            for (r, row) in matrix.iter_mut().enumerate() {
                let lane = ROWS * i + r;
                let (address, access, proxy) = (addresses[lane], Access::Read, Proxy::Generic);
                let touch = Touch { space: Space::Shared, address, bytes: ROW, access, proxy };
                let bytes = self.touch_as(cta, warp, lane, u32::MAX, touch, at)?;
                for (element, bytes) in row.iter_mut().zip(bytes.chunks(2)) {
                    *element = little_endian(bytes);
                }
            }
            let values = std::array::from_fn(|lane| {
                let (row, pair) = (lane / 4, lane % 4 * 2);
                let at = |k: usize| if transposed { matrix[pair + k][row] } else { matrix[row][pair + k] };
                at(0) | at(1) << 16
            });
            warp.set(to, u32::MAX, &values);
        }
        Ok(())
    }
    /// The inverse of [`Self::load_matrix`]. Every lane contributes to a row, so it is a write of all of them.
    fn store_matrix(
        &mut self,
        cta: &mut Cta,
        warp: &mut Warp,
        transposed: bool,
        from: &[PtxSource],
        address: Address,
        at: Site,
    ) -> StepResult {
        let givers = u32::MAX >> (LANES - ROWS * from.len());
        let addresses = self.addresses(cta, warp, (Space::Shared, address), givers, at)?;
        self.count(Space::Shared, &addresses, givers, ROW);
        for (i, &from) in from.iter().enumerate() {
            let values = self.read(warp, from, u32::MAX, at);
            for r in 0..ROWS {
                let lane = ROWS * i + r;
                let (address, access, proxy) = (addresses[lane], Access::Write, Proxy::Generic);
                let touch = Touch { space: Space::Shared, address, bytes: ROW, access, proxy };
                let bytes = self.touch_as(cta, warp, lane, u32::MAX, touch, at)?;
                for (column, bytes) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    let (row, column) = if transposed { (column, r) } else { (r, column) };
                    *bytes = ((values[4 * row + column / 2] >> (16 * (column % 2))) as u16).to_le_bytes();
                }
            }
        }
        Ok(())
    }
    /// D (16, 8) = A (16, k) B (k, 8) + C (16, 8). Lane l holds, with P elements to a register: register i of A at row
    /// l / 4 + 8 (i % 2), depth P (l % 4) + k / 2 (i / 2); of B at depth P (l % 4) + k / 2 i, column l / 4; of C and D
    /// at row l / 4 + 8 (i / 2), column 2 (l % 4) + i % 2.
    fn multiply(&mut self, warp: &mut Warp, kind: MmaType, to: &[usize], sources: [&[PtxSource]; 3], at: Site) {
        self.counts.multiply_adds += (M * N * kind.k()) as u64;
        sources.iter().for_each(|list| list.iter().for_each(|&source| self.check_written(warp, source, u32::MAX, at)));
        let [a, b, c] = sources;
        let c = [0, 1, 2, 3].map(|i| warp.all(c[i]));
        let (mut left, mut right) = ([[0.0; M]; M], [[0.0; N]; M]);
        for lane in 0..LANES {
            for element in 0..kind.packed() {
                let depth = lane % 4 * kind.packed() + element;
                for (i, &register) in a.iter().enumerate() {
                    let value = kind.value(warp.of(register, lane), element);
                    left[lane / 4 + 8 * (i % 2)][depth + kind.k() / 2 * (i / 2)] = value;
                }
                for (i, &register) in b.iter().enumerate() {
                    right[depth + kind.k() / 2 * i][lane / 4] = kind.value(warp.of(register, lane), element);
                }
            }
        }
        let mut products = [[0.0; N]; M];
        products.iter_mut().zip(&left).for_each(|(sums, left)| row_products(left, &right, sums));
        for (i, (&to, c)) in to.iter().zip(&c).enumerate() {
            let values = std::array::from_fn(|lane| {
                let (row, column) = (lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2);
                ((products[row][column] + f32::from_bits(c[lane] as u32) as f64) as f32).to_bits() as u64
            });
            warp.set(to, u32::MAX, &values);
        }
    }
}
