//! A machine known by measurement: the seconds of every operation and collective of a short run of a shallow model.
//! Anything else is scaled from the nearest operation of its kind. Never measures: `calibrate` does.
use super::clock::Seconds;
use super::links::{Collected, Placement};
use super::machine::MachineModel;
use flatshard::base::DType;
use flatshard::device::cost::{OpCost, Rate};
use std::collections::HashMap;

/// A collective as seen by the computing thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CollectiveCall {
    pub what: Collected,
    /// The call that waits, not the one that starts.
    pub waits: bool,
    pub bytes: u64,
}

/// All measured durations.
#[derive(Default, Debug)]
pub struct Timings {
    ops: HashMap<OpCost, Vec<Seconds>>,
    calls: HashMap<CollectiveCall, Vec<Seconds>>,
}

impl Timings {
    pub fn op(&mut self, op: OpCost, seconds: Seconds) {
        self.ops.entry(op).or_default().push(seconds);
    }
    pub fn call(&mut self, call: CollectiveCall, seconds: Seconds) {
        self.calls.entry(call).or_default().push(seconds);
    }
    pub fn merge(&mut self, other: Timings) {
        for (op, seen) in other.ops {
            self.ops.entry(op).or_default().extend(seen);
        }
        for (call, seen) in other.calls {
            self.calls.entry(call).or_default().extend(seen);
        }
    }
}

pub struct Measured {
    name: String,
    ops: HashMap<OpCost, Seconds>,
    calls: HashMap<CollectiveCall, Seconds>,
    /// Bytes per rank.
    memory: Option<usize>,
}

/// The median: a shared machine has long tails.
pub fn median(seen: &mut [Seconds]) -> Seconds {
    seen.sort_by(f64::total_cmp);
    match seen.len() {
        0 => 0.0,
        n if n % 2 == 1 => seen[n / 2],
        n => (seen[n / 2 - 1] + seen[n / 2]) / 2.0,
    }
}

impl Measured {
    pub fn new(name: String, timings: Timings, memory: Option<usize>) -> Measured {
        let ops = timings.ops.into_iter().map(|(op, mut seen)| (op, median(&mut seen))).collect();
        let calls = timings.calls.into_iter().map(|(call, mut seen)| (call, median(&mut seen))).collect();
        Measured { name, ops, calls, memory }
    }
    /// FLOP/s of the measured products, and bytes/s of the operations that only move data, for display.
    pub fn rates(&self, dtype: DType) -> [Option<f64>; 2] {
        let rate = |of: &dyn Fn(&OpCost) -> Option<u64>| {
            let seen = self.ops.iter().filter_map(|(op, s)| Some((of(op)? as f64, s)));
            let (work, seconds) = seen.fold((0.0, 0.0), |sum, (work, s)| (sum.0 + work, sum.1 + s));
            (seconds > 0.0).then_some(work / seconds)
        };
        [
            rate(&|op| (op.rate == Rate::Product && op.dtype == dtype).then_some(op.flops)),
            rate(&|op| (op.rate == Rate::Memory).then_some(op.bytes)),
        ]
    }
    pub fn kinds(&self) -> (usize, usize) {
        (self.ops.len(), self.calls.len())
    }

    /// Scaled by work from the nearest operation of the same name, else of the same bound.
    fn scaled(&self, op: &OpCost) -> Seconds {
        let work = |o: &OpCost| if op.flops > 0 { o.flops } else { o.bytes }.max(1) as f64;
        let far = |o: &OpCost| (work(o) / work(op)).ln().abs();
        let turned = |o: &OpCost| (o.rate == Rate::Product && o.shape[3] != op.shape[3]) as u8;
        let kin: [&dyn Fn(&OpCost) -> bool; 3] =
            [&|o| o.name == op.name && o.dtype == op.dtype, &|o| o.rate == op.rate && o.dtype == op.dtype, &|o| {
                o.rate == op.rate
            }];
        let nearest = kin.iter().find_map(|of| {
            let alike = self.ops.iter().filter(|(o, _)| of(o));
            alike.min_by(|a, b| {
                (turned(a.0), far(a.0)).partial_cmp(&(turned(b.0), far(b.0))).unwrap_or(std::cmp::Ordering::Equal)
            })
        });
        nearest.map_or(0.0, |(o, seconds)| seconds * work(op) / work(o))
    }
    fn call(&self, call: CollectiveCall) -> Seconds {
        if let Some(seconds) = self.calls.get(&call) {
            return *seconds;
        }
        let alike = self.calls.iter().filter(|(c, _)| c.what == call.what && c.waits == call.waits && c.bytes > 0);
        let far = |c: &CollectiveCall| (c.bytes as f64 / call.bytes.max(1) as f64).ln().abs();
        let nearest = alike.min_by(|a, b| far(a.0).total_cmp(&far(b.0)));
        nearest.map_or(0.0, |(c, seconds)| seconds * call.bytes as f64 / c.bytes as f64)
    }
}

impl MachineModel for Measured {
    fn name(&self) -> &str {
        &self.name
    }
    fn op(&self, op: &OpCost) -> Seconds {
        self.ops.get(op).copied().unwrap_or_else(|| self.scaled(op))
    }
    fn launch(&self) -> Seconds {
        0.0
    }
    fn collective(&self, what: Collected, bytes: u64, _: Placement) -> Seconds {
        self.call(CollectiveCall { what, waits: false, bytes })
    }
    fn inline(&self) -> bool {
        true
    }
    fn finish(&self, what: Collected, bytes: u64, _: Placement) -> Seconds {
        self.call(CollectiveCall { what, waits: true, bytes })
    }
    fn memory(&self) -> Option<usize> {
        self.memory
    }
    fn peak(&self, _: DType) -> Option<f64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Measured {
        let mut timings = Timings::default();
        let copy = |bytes| OpCost::moves("copy", DType::F32, bytes);
        [1.0, 9.0, 2.0].into_iter().for_each(|s| timings.op(copy(100), s));
        timings.op(copy(10_000), 100.0);
        let mut more = Timings::default();
        more.op(copy(10_000), 300.0);
        more.call(CollectiveCall { what: Collected::AllGather, waits: true, bytes: 64 }, 4.0);
        timings.merge(more);
        Measured::new("test".into(), timings, None)
    }

    #[test]
    fn measured_operations_take_their_median() {
        let m = machine();
        assert_eq!(m.op(&OpCost::moves("copy", DType::F32, 100)), 2.0);
        assert_eq!(m.op(&OpCost::moves("copy", DType::F32, 10_000)), 200.0);
        assert_eq!(m.finish(Collected::AllGather, 64, Placement { ranks: 2, nodes: 1 }), 4.0);
    }

    #[test]
    fn other_operations_are_scaled_from_the_nearest() {
        let m = machine();
        assert_eq!(m.op(&OpCost::moves("copy", DType::F32, 200)), 4.0);
        assert_eq!(m.op(&OpCost::moves("copy", DType::F32, 5_000)), 100.0);
        assert_eq!(m.op(&OpCost::moves("never seen", DType::F32, 50)), 1.0);
        assert_eq!(m.finish(Collected::AllGather, 128, Placement { ranks: 2, nodes: 1 }), 8.0);
        assert_eq!(m.collective(Collected::AllGather, 128, Placement { ranks: 2, nodes: 1 }), 0.0);
    }
}
