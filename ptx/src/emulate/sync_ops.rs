//! Barriers, shuffles and votes. That the lanes they need are there has been checked before.
use super::decode::{Op, Shuffle, Vote};
use super::machine::{At, Machine, Step, Stop};
use super::report::Kind;
use super::warp::{LANES, State, Warp, lanes};

impl Machine<'_, '_> {
    pub(super) fn synchronise(&mut self, warp: &mut Warp, active: u32, op: &Op, at: At) -> Step {
        if active == 0 {
            return Ok(());
        }
        match op {
            Op::Barrier { id, threads } => {
                let first = active.trailing_zeros() as usize;
                let barrier = self.read(warp, *id, active, at)[first];
                let threads = threads.map(|threads| self.read(warp, threads, active, at)[first]);
                warp.state = State::Waiting { barrier, threads, pc: at.pc };
            }
            Op::WarpBarrier { mask } => {
                let mask = self.read(warp, *mask, active, at)[active.trailing_zeros() as usize] as u32;
                // Clocks are a warp's: an order among some of its lanes cannot be told from one among all.
                if mask & warp.live() != warp.live() {
                    let what = format!("bar.warp.sync of a part of the warp ({mask:#010x}) is not modelled");
                    self.find(Kind::Launch, at, what);
                    return Err(Stop);
                }
                warp.clocks[warp.id] += 1;
            }
            Op::Shuffle { how, to, valid, from, lane, clamp, .. } => {
                let [values, b, c] = [*from, *lane, *clamp].map(|source| self.read(warp, source, active, at));
                let (mut moved, mut inside) = ([0; LANES], [0; LANES]);
                for lane in lanes(active) {
                    let (source, ok) = shuffle(*how, lane, b[lane] as u32, c[lane] as u32);
                    if active >> source & 1 == 0 {
                        let what = format!("takes from lane {source}, which does not take part");
                        self.find(Kind::Divergent, At { lane: Some(lane), ..at }, what);
                    }
                    (moved[lane], inside[lane]) = (values[source] as u32 as u64, ok as u64);
                }
                warp.set(*to, active, &moved);
                if let Some(valid) = valid {
                    warp.set(*valid, active, &inside);
                }
            }
            Op::Vote { how, to, from, negated, .. } => {
                let values = self.read(warp, super::decode::Source::Register(*from), active, at);
                let votes = lanes(active).filter(|&l| (values[l] != 0) != *negated).fold(0u32, |v, l| v | 1 << l);
                let result = match how {
                    Vote::Ballot => votes as u64,
                    Vote::Any => (votes != 0) as u64,
                    Vote::All => (votes == active) as u64,
                };
                warp.set(*to, active, &[result; LANES]);
            }
            _ => {}
        }
        Ok(())
    }
}

/// The lane to take from, and whether it lies within the segment (PTX ISA, shfl.sync: the pseudocode of its semantics).
fn shuffle(how: Shuffle, lane: usize, b: u32, c: u32) -> (usize, bool) {
    let (lane32, b, clamp, segments) = (lane as u32, b & 31, c & 31, c >> 8 & 31);
    let highest = (lane32 & segments) | (clamp & !segments);
    let lowest = lane32 & segments;
    let (source, inside) = match how {
        Shuffle::Up => (lane32.wrapping_sub(b), lane32 as i32 - b as i32 >= highest as i32),
        Shuffle::Down => (lane32 + b, lane32 + b <= highest),
        Shuffle::Butterfly => (lane32 ^ b, lane32 ^ b <= highest),
        Shuffle::Index => (lowest | (b & !segments), lowest | (b & !segments) <= highest),
    };
    if inside { (source as usize, true) } else { (lane, false) }
}
