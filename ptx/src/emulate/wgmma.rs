//! wgmma: products of a warpgroup, each of its warps for its own 16 rows. The result is there at once, but until
//! `wgmma.wait_group` nobody may touch the registers, nor write what is read of shared memory: touching is found, so the
//! early result is never used. Layouts are layouts.rs's.
use super::clock::Agent;
use super::decode::Source;
use super::decode_hopper::{Hopper, Left, Wgmma};
use super::kernel::Register;
use super::layouts::{Matrix, accumulator, fragment};
use super::machine::{At, Cta, Machine, Step, Stop, little_endian};
use super::report::Kind;
use super::shadow::{Access, Proxy, Who};
use super::warp::{LANES, Warp};
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Rows of a warp; depth of a product; warps of a warpgroup.
const ROWS: usize = 16;
const DEPTH: usize = 16;
pub const GROUP: usize = 4;

/// What a warp's wgmmas in flight hold.
pub struct Flying {
    /// Registers that other instructions have touched since the last `wgmma.fence`.
    touched: Vec<bool>,
    /// Wgmmas in flight by register.
    busy: Vec<u16>,
    clobbered: Option<Register>,
    fenced: bool,
    open: Vec<Held>,
    groups: VecDeque<Vec<Held>>,
    /// What all four warps must have in common.
    trace: DefaultHasher,
}
struct Held {
    n: usize,
    to: Vec<Register>,
    a: Vec<Register>,
    /// Offsets in shared memory of 16 bytes each.
    reads: Vec<usize>,
}

impl Flying {
    pub fn new(registers: usize) -> Flying {
        Flying {
            touched: vec![false; registers],
            busy: vec![0; registers],
            clobbered: None,
            fenced: false,
            open: vec![],
            groups: VecDeque::new(),
            trace: DefaultHasher::new(),
        }
    }
    /// An instruction that is no wgmma reads or writes the register.
    pub fn touch(&mut self, register: Register) {
        self.touched[register] = true;
        if self.busy[register] > 0 {
            self.clobbered = Some(register);
        }
    }
    pub fn trace(&self) -> u64 {
        self.trace.finish()
    }
    pub fn idle(&self) -> bool {
        self.open.is_empty() && self.groups.is_empty()
    }
}

impl Machine<'_, '_> {
    pub(super) fn hopper(&mut self, cta: &mut Cta, warp: &mut Warp, active: u32, op: &Hopper, at: At) -> Step {
        if active == 0 {
            return Ok(());
        }
        use Hopper::*;
        match op {
            Wait { .. } => return self.wait(cta, warp, active, op, at),
            BulkLoad { .. }
            | BulkStore { .. }
            | TensorLoad { .. }
            | TensorStore { .. }
            | BulkCommit
            | BulkWait { .. } => return self.bulk(cta, warp, active, op, at),
            ClusterArrive | ClusterWait => return self.cluster(cta, warp, op, at),
            WgmmaFence => {
                warp.flying.touched.fill(false);
                warp.flying.fenced = true;
            }
            WgmmaCommit => {
                let open = std::mem::take(&mut warp.flying.open);
                warp.flying.groups.push_back(open);
            }
            WgmmaWait(left) => {
                let done = warp.flying.groups.len().saturating_sub(*left as usize);
                let by = self.agent(cta, Agent::TensorCore(warp.id / GROUP), warp.warps, at.pc);
                let live = warp.live();
                warp.views.change(live, live, |view| view.note(&by));
                for held in warp.flying.groups.drain(..done).flatten().collect::<Vec<_>>() {
                    held.to.iter().chain(&held.a).for_each(|&register| warp.flying.busy[register] -= 1);
                    let who = Who { cta: cta.id, warp, lanes: u32::MAX, pc: at.pc, proxy: Proxy::Async };
                    held.reads.iter().for_each(|&offset| cta.shadow.let_go(offset, 16, by, |e| who.follows(e)));
                }
            }
            Wgmma(op) => self.wgmma(cta, warp, op, at)?,
            _ => return self.mbarrier_op(cta, warp, active, op, at),
        }
        at.pc.hash(&mut warp.flying.trace);
        Ok(())
    }
    /// An instruction has touched what a wgmma in flight holds.
    pub(super) fn check_flying(&mut self, warp: &mut Warp, at: At) {
        if let Some(register) = warp.flying.clobbered.take() {
            let name = &self.kernel.registers[register];
            let what = format!("register {name} is touched while a wgmma holds it: wgmma.wait_group is missing");
            self.find(Kind::Wgmma, at, what);
        }
    }
    /// A warp has returned, or the CTA ends.
    pub(super) fn finish_wgmma(&mut self, cta: &Cta, warps: &[Warp]) {
        let at = |warp: usize| At { pc: 0, cta: cta.id, warp, lane: None };
        for group in warps.chunks(GROUP) {
            if let Some(busy) = group.iter().find(|warp| !warp.flying.idle()) {
                self.find(Kind::Wgmma, at(busy.id), "ends with a wgmma in flight".into());
            }
            let other =
                group.iter().find(|w| w.flying.trace() != group[0].flying.trace() || w.budget != group[0].budget);
            if let Some(other) = other {
                let what = format!("has not executed the same wgmma and setmaxnreg as warp {}", group[0].id);
                self.find(Kind::Divergent, at(other.id), what);
            }
        }
    }
    fn wgmma(&mut self, cta: &mut Cta, warp: &mut Warp, op: &Wgmma, at: At) -> Step {
        let no_registers = vec![];
        let a = if let Left::Registers(a) = &op.a { a } else { &no_registers };
        self.counts.multiply_adds += (ROWS * op.n * DEPTH) as u64;
        self.check_registers(warp, op, a, at);
        let mut held = Held { n: op.n, to: op.to.clone(), a: a.clone(), reads: vec![] };
        // The same for all lanes, so lane 0's will do; and not an access of the registers that the fence orders.
        let mut one = |machine: &mut Self, source: Source| machine.value(warp, source, 0, at);
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
        for (e, &to) in op.to.iter().enumerate() {
            for lane in 0..LANES {
                let (row, column) = accumulator(lane, e);
                let product: f64 = left[row].iter().zip(&right[column]).map(|(a, b)| a * b).sum();
                let old = if keep { f32::from_bits(warp.registers[to][lane] as u32) as f64 } else { 0.0 };
                warp.registers[to][lane] = ((old + sign * product) as f32).to_bits() as u64;
            }
            warp.written[to] = u32::MAX;
        }
        held.to.iter().chain(&held.a).for_each(|&register| warp.flying.busy[register] += 1);
        warp.flying.open.push(held);
        Ok(())
    }
    /// Registers are written, ordered by a fence, and free of other products.
    fn check_registers(&mut self, warp: &mut Warp, op: &Wgmma, a: &[Register], at: At) {
        let flying = &warp.flying;
        let mut wrong = None;
        if !flying.fenced {
            wrong = Some((Kind::Wgmma, "no wgmma.fence comes before the first wgmma".to_string()));
        }
        for &register in op.to.iter().chain(a) {
            let name = &self.kernel.registers[register];
            if flying.touched[register] {
                wrong = Some((Kind::Wgmma, format!("no wgmma.fence orders what touched register {name} before")));
            }
        }
        let all = flying.groups.iter().flatten().chain(&flying.open);
        // In flight together: the same accumulator of the same shape, and inputs.
        let apart = |held: &Held| held.n == op.n && held.to == op.to || held.to.iter().all(|r| !op.to.contains(r));
        if let Some(held) = all
            .into_iter()
            .find(|h| !apart(h) || h.to.iter().any(|r| a.contains(r)) || h.a.iter().any(|r| op.to.contains(r)))
        {
            let name = &self.kernel.registers[held.to[0]];
            wrong = Some((Kind::Wgmma, format!("its registers are held by another wgmma in flight, into {name} ..")));
        }
        let reads = op.to.iter().filter(|_| !matches!(op.keep, Source::Immediate(0))).chain(a);
        let keep = match op.keep {
            Source::Immediate(value) => value != 0,
            Source::Register(register) => warp.registers[register][0] != 0,
        };
        for &register in reads {
            if warp.written[register] != u32::MAX && (keep || a.contains(&register)) {
                let name = &self.kernel.registers[register];
                wrong = Some((Kind::Uninitialised, format!("register {name} was never written in some lanes")));
            }
        }
        if let Some((kind, what)) = wrong {
            self.find(kind, at, what);
        }
    }
    /// `rows` rows of 16 elements each, from row `first` on, of the matrix that a descriptor tells of.
    #[allow(clippy::too_many_arguments)]
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
        at: At,
    ) -> Result<Vec<[f64; DEPTH]>, Stop> {
        let matrix = match Matrix::new(descriptor, transposed) {
            Ok(matrix) => matrix,
            Err(what) => {
                self.find(Kind::Misaligned, at, what);
                return Err(Stop);
            }
        };
        let mut out = vec![[0.0; DEPTH]; rows];
        // (i, j) of Matrix::row, and where its eight elements go.
        let (outer, inner) =
            if transposed { (0..DEPTH, first / 8..(first + rows) / 8) } else { (first..first + rows, 0..2) };
        for i in outer {
            for j in inner.clone() {
                let (name, base, within) = self.find_shared(matrix.row(i, j), 16, at)?;
                let who = Who { cta: cta.id, warp, lanes: u32::MAX, pc: at.pc, proxy: Proxy::Async };
                let offset = base + within;
                if let Some(trouble) = cta.shadow.hold(offset, 16, &who) {
                    self.judge(Some(trouble), Access::Read, &format!("shared '{name}'"), within, 16, at);
                }
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
