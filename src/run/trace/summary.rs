//! Summary of traced steps: how long each lane was busy, and how much communication was exposed. Never measures.
//!
//! ```text
//! calls    the compute stream inside calls of collectives: on CPUs copies, reductions and waits, on GPUs its waits for
//!          an operation
//! busy     (compute, store, optimizer) - calls
//! comm     (operations in flight, calls)
//! exposed  comm - busy
//! ```
//!
//! All are sets of times. `exposed` is the metrics' `exposed_comm_s` (the time in calls) plus the time that operations
//! are in flight while the rank does nothing else, such as waiting for data.
use super::TracedSpan;
use super::intervals::Intervals;
use crate::base::timeline::Lane;
use serde::{Deserialize, Serialize};

/// One rank's summary, in seconds over all its traced steps.
#[derive(Serialize, Deserialize, Clone, PartialEq, Debug)]
pub struct Summary {
    pub rank: usize,
    pub steps: usize,
    pub step_s: f64,
    pub compute_s: f64,
    pub store_s: f64,
    pub optimizer_s: f64,
    pub data_s: f64,
    pub checkpoint_s: f64,
    pub comm: CommSummary,
    /// Lanes with at least one operation.
    pub lanes: Vec<(String, CommSummary)>,
    /// Spans that were dropped; if any, all other values are too low.
    pub lost: u64,
}

#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Debug)]
pub struct CommSummary {
    pub ops: usize,
    pub bytes: u64,
    /// Time with at least one operation in flight.
    pub in_flight_s: f64,
    pub exposed_s: f64,
}

impl CommSummary {
    /// The fraction of the time in flight that was overlapped with computation.
    pub fn overlap(&self) -> f64 {
        if self.in_flight_s > 0.0 { 1.0 - self.exposed_s / self.in_flight_s } else { 1.0 }
    }
}

impl Summary {
    pub fn of(rank: usize, spans: &[TracedSpan], lost: u64) -> Summary {
        let set = |is: &dyn Fn(&TracedSpan) -> bool| -> Intervals {
            spans.iter().filter(|span| is(span)).map(|span| (span.start, span.end)).collect()
        };
        let calls = set(&TracedSpan::is_call);
        let of_lane = |lane: Lane| set(&|span| span.lane == lane && !span.is_call());
        let busy = |lane| of_lane(lane).minus(&calls);
        let (compute, store, optimizer) = (busy(Lane::Compute), busy(Lane::Store), busy(Lane::Optimizer));
        let all_busy = compute.union(&store).union(&optimizer);
        let comm = |is: &dyn Fn(Lane) -> bool| {
            let in_flight = set(&|span| is(span.lane) && span.lane.is_communication());
            let ops = spans.iter().filter(|span| is(span.lane) && !span.is_call() && span.lane.is_communication());
            CommSummary {
                ops: ops.clone().count(),
                bytes: ops.filter_map(|span| span.flow).map(|flow| flow.bytes as u64).sum(),
                in_flight_s: in_flight.seconds(),
                exposed_s: in_flight.minus(&all_busy).seconds(),
            }
        };
        let lanes = Lane::ALL.iter().filter(|lane| lane.is_communication());
        let lanes = lanes.map(|&lane| (lane.name().to_string(), comm(&|other| other == lane)));
        Summary {
            rank,
            steps: spans.iter().filter(|span| span.lane == Lane::Steps).count(),
            step_s: of_lane(Lane::Steps).seconds(),
            compute_s: compute.seconds(),
            store_s: store.seconds(),
            optimizer_s: optimizer.seconds(),
            data_s: of_lane(Lane::Data).minus(&calls).seconds(),
            checkpoint_s: of_lane(Lane::Checkpoint).minus(&calls).seconds(),
            comm: comm(&|_| true),
            lanes: lanes.filter(|(_, comm)| comm.ops > 0).collect(),
            lost,
        }
    }

    /// Log lines, per step.
    pub fn lines(&self) -> Vec<String> {
        let steps = self.steps.max(1) as f64;
        let ms = |seconds: f64| format!("{:.2} ms", 1e3 * seconds / steps);
        let comm = |c: &CommSummary| {
            format!(
                "in flight {}, exposed {} ({:.0} % overlapped)",
                ms(c.in_flight_s),
                ms(c.exposed_s),
                100.0 * c.overlap()
            )
        };
        let mut lines = vec![format!(
            "rank {}, per step of {}: compute {}, optimizer {}, store {}, data wait {}; communication {}",
            self.rank,
            ms(self.step_s),
            ms(self.compute_s),
            ms(self.optimizer_s),
            ms(self.store_s),
            ms(self.data_s),
            comm(&self.comm)
        )];
        lines.extend(self.lanes.iter().map(|(name, c)| {
            let mib = c.bytes as f64 / steps / (1u64 << 20) as f64;
            format!("  {name}: {:.0} operations, {mib:.1} MiB, {}", c.ops as f64 / steps, comm(c))
        }));
        if self.lost > 0 {
            lines.push(format!("  {} spans were dropped: profile fewer steps", self.lost));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::timeline::Flow;

    fn span(lane: Lane, start: i64, end: i64, call: Option<&'static str>) -> TracedSpan {
        let flow = lane.is_communication().then_some(Flow { id: 1, axis: "fsdp", bytes: 100, call });
        TracedSpan { lane, what: "x", number: None, start, end, flow }
    }

    /// A gather in flight over 0..100, started by a call of 10, waited for in 60..100; compute in 10..60 and 100..150.
    /// A scatter in flight over 120..180, 30 of it overlapped with compute.
    #[test]
    fn communication_without_compute_is_exposed() {
        let spans = [
            span(Lane::Steps, 0, 200, None),
            span(Lane::Store, 0, 10, None),
            span(Lane::Gathers, 0, 10, Some("all_gather")),
            span(Lane::Compute, 10, 60, None),
            span(Lane::Store, 60, 100, None),
            span(Lane::Gathers, 60, 100, Some("wait")),
            span(Lane::Gathers, 0, 100, None),
            span(Lane::Compute, 100, 150, None),
            span(Lane::Scatters, 120, 180, None),
        ];
        let ns = 1e-9;
        let of = Summary::of(3, &spans, 0);
        let close = |a: f64, b: f64| assert!((a - b * ns).abs() < 1e-15, "{a} is not {b} ns");
        assert_eq!((of.steps, of.store_s), (1, 0.0));
        close(of.step_s, 200.0);
        close(of.compute_s, 100.0);
        close(of.comm.in_flight_s, 160.0);
        close(of.comm.exposed_s, 80.0);
        let lane = |name: &str| of.lanes.iter().find(|(n, _)| n == name).unwrap().1;
        close(lane("gathers").exposed_s, 50.0);
        close(lane("scatters").exposed_s, 30.0);
        assert_eq!((lane("gathers").ops, lane("gathers").bytes, of.comm.ops), (1, 100, 2));
        assert_eq!(of.lanes.len(), 2);
        assert!((of.comm.overlap() - 0.5).abs() < 1e-12);
    }
}
