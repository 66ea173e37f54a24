//! wgmma: products of a warpgroup, where each warp computes its own 16 rows. The result is written at once, but until
//! `wgmma.wait_group` nobody may access the registers or write the shared memory that is read: such accesses are
//! findings, so the early result is never used. Layouts are in layouts.rs.
use super::clock::FencedMemory;
use super::in_flight::WgmmaOperands;
use super::lane::LANES;
use super::layouts::{SharedMatrix, accumulator, fragment};
use super::machine::{Cta, Emulator, Site, StepResult, Stop, little_endian};
use super::matrix_ops::row_products;
use super::memory_ops::Touched;
use super::op::{Left, Wgmma};
use super::operand::{PtxSource, Register};
use super::report::FindingKind;
use super::shadow::{Access, Proxy};
use super::warp::Warp;
use std::hash::Hash;
use std::sync::Arc;

/// Rows of a warp; depth of a product; warps of a warpgroup.
const ROWS: usize = 16;
const DEPTH: usize = 16;
pub const GROUP: usize = 4;

impl Emulator<'_, '_> {
    /// Checks an instruction's registers against wgmmas in flight.
    pub(super) fn check_flying(&mut self, warp: &mut Warp, at: Site) {
        if let Some(register) = warp.flying.clobbered.take() {
            let name = &self.kernel.registers[register];
            let what = format!("register {name} is accessed while a wgmma uses it: wgmma.wait_group is missing");
            self.find(FindingKind::Wgmma, at, what);
        }
    }
    /// A warp has returned, or the CTA ends.
    pub(super) fn finish_wgmma(&mut self, cta: &Cta, warps: &[Warp]) {
        let at = |warp: usize| Site { pc: 0, cta: cta.id, warp, lane: None };
        for group in warps.chunks(GROUP) {
            if let Some(busy) = group.iter().find(|warp| !warp.flying.idle()) {
                self.find(FindingKind::Wgmma, at(busy.id), "ends with a wgmma in flight".into());
            }
            let other =
                group.iter().find(|w| w.flying.trace() != group[0].flying.trace() || w.budget != group[0].budget);
            if let Some(other) = other {
                let what = format!("has not executed the same wgmma and setmaxnreg as warp {}", group[0].id);
                self.find(FindingKind::Divergent, at(other.id), what);
            }
        }
    }
    pub(super) fn wgmma(&mut self, cta: &mut Cta, warp: &mut Warp, op: &Wgmma, at: Site) -> StepResult {
        let a = if let Left::Registers(a) = &op.a { a.clone() } else { Arc::default() };
        self.counts.multiply_adds += (ROWS * op.n * DEPTH) as u64;
        self.check_registers(warp, op, &a, at);
        let mut held = WgmmaOperands { n: op.n, to: op.to.clone(), a, reads: vec![] };
        // The same in all lanes, so lane 0's suffices; and not a register access that the fence orders.
        let mut one = |machine: &mut Self, source: PtxSource| machine.value(warp, source, 0, at);
        let (b, keep) = (one(self, op.b), one(self, op.keep) != 0);
        let right = self.shared_matrix(cta, warp, b, op.transposed[1], 0, op.n, &mut held.reads, op, at)?;
        let left = match &op.a {
            Left::Descriptor(descriptor) => {
                let descriptor = self.value(warp, *descriptor, 0, at);
                descriptor.hash(&mut warp.flying.trace);
                let first = warp.id % GROUP * ROWS;
                self.shared_matrix(cta, warp, descriptor, op.transposed[0], first, ROWS, &mut held.reads, op, at)?
            }
            Left::Registers(registers) => {
                let mut left = vec![[0.0; DEPTH]; ROWS];
                for (i, &register) in registers.iter().enumerate() {
                    for lane in 0..LANES {
                        let ((row, depth), pair) = (fragment(lane, i), warp.registers[register][lane]);
                        left[row][depth] = op.kind.value(pair, 0);
                        left[row][depth + 1] = op.kind.value(pair, 1);
                    }
                }
                left
            }
        };
        (b, keep).hash(&mut warp.flying.trace);
        let sign = if op.negate[0] != op.negate[1] { -1.0 } else { 1.0 };
        let right: [Vec<f64>; DEPTH] = std::array::from_fn(|k| right.iter().map(|row| row[k]).collect());
        let mut products = vec![vec![0.0; op.n]; ROWS];
        products.iter_mut().zip(&left).for_each(|(sums, left)| row_products(left, &right, sums));
        for (e, &to) in op.to.iter().enumerate() {
            for lane in 0..LANES {
                let (row, column) = accumulator(lane, e);
                let old = if keep { f32::from_bits(warp.registers[to][lane] as u32) as f64 } else { 0.0 };
                warp.registers[to][lane] = ((old + sign * products[row][column]) as f32).to_bits() as u64;
            }
            warp.written[to] = u32::MAX;
        }
        held.to.iter().chain(held.a.iter()).for_each(|&register| warp.flying.busy[register] += 1);
        warp.flying.open.push(held);
        Ok(())
    }
    /// Registers must be written, ordered by a fence, and free of other products.
    fn check_registers(&mut self, warp: &mut Warp, op: &Wgmma, a: &[Register], at: Site) {
        let flying = &warp.flying;
        let mut wrong = None;
        if !flying.fenced {
            wrong = Some((FindingKind::Wgmma, "no wgmma.fence comes before the first wgmma".to_string()));
        }
        for &register in op.to.iter().chain(a) {
            let name = &self.kernel.registers[register];
            if flying.touched[register] {
                wrong =
                    Some((FindingKind::Wgmma, format!("no wgmma.fence orders an earlier access to register {name}")));
            }
        }
        let all = flying.groups.iter().flatten().chain(&flying.open);
        // Allowed in flight together: the same accumulator of the same shape, and inputs.
        let apart =
            |held: &WgmmaOperands| held.n == op.n && held.to == op.to || held.to.iter().all(|r| !op.to.contains(r));
        if let Some(held) = all
            .into_iter()
            .find(|h| !apart(h) || h.to.iter().any(|r| a.contains(r)) || h.a.iter().any(|r| op.to.contains(r)))
        {
            let name = &self.kernel.registers[held.to[0]];
            wrong = Some((
                FindingKind::Wgmma,
                format!("its registers are used by another wgmma in flight, into {name} .."),
            ));
        }
        let reads = op.to.iter().filter(|_| !matches!(op.keep, PtxSource::Immediate(0))).chain(a);
        let keep = match op.keep {
            PtxSource::Immediate(value) => value != 0,
            PtxSource::Register(register) => warp.registers[register][0] != 0,
        };
        for &register in reads {
            if warp.written[register] != u32::MAX && (keep || a.contains(&register)) {
                let name = &self.kernel.registers[register];
                wrong = Some((FindingKind::Uninitialized, format!("register {name} was never written in some lanes")));
            }
        }
        if let Some((kind, what)) = wrong {
            self.find(kind, at, what);
        }
    }
    /// `rows` rows of 16 elements each, from row `first` on, of a descriptor's matrix.
    #[allow(clippy::too_many_arguments)] // who reads, and what of the matrix
    fn shared_matrix(
        &mut self,
        cta: &mut Cta,
        warp: &Warp,
        descriptor: u64,
        transposed: bool,
        first: usize,
        rows: usize,
        reads: &mut Vec<usize>,
        op: &Wgmma,
        at: Site,
    ) -> Result<Vec<[f64; DEPTH]>, Stop> {
        let matrix = SharedMatrix::new(descriptor, transposed);
        let matrix = match matrix.and_then(|matrix| matrix.holds(first + rows).map(|()| matrix)) {
            Ok(matrix) => matrix,
            Err(what) => {
                self.find(FindingKind::Misaligned, at, what);
                return Err(Stop);
            }
        };
        let mut out = vec![[0.0; DEPTH]; rows];
        // (i, j) of SharedMatrix::row, and the destination of its eight elements.
        let (outer, inner) =
            if transposed { (0..DEPTH, first / 8..(first + rows) / 8) } else { (first..first + rows, 0..2) };
        for i in outer {
            for j in inner.clone() {
                let (array, base, within) = self.find_shared(matrix.row(i, j), 16, at)?;
                let who = warp.who(cta.id, u32::MAX, at.pc, Proxy::Async(FencedMemory::Shared));
                let offset = base + within;
                let trouble = cta.shadow.hold(offset, 16, &who);
                self.judge(trouble, Access::Read, (Touched::Shared(array), within), 16, at);
                reads.push(offset);
                for (k, pair) in cta.shared[offset..offset + 16].chunks(2).enumerate() {
                    let value = op.kind.value(little_endian(pair), 0);
                    match transposed {
                        true => out[8 * j + k - first][i] = value,
                        false => out[i - first][8 * j + k] = value,
                    }
                }
            }
        }
        Ok(out)
    }
}
