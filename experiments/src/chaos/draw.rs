//! Draws the faults of a chaos run from a seed; the same seed gives the same plan everywhere. Never touches a process
//! or a file.
use flatshard::base::rng::Rng;
use serde::Serialize;

/// A kind of fault.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// SIGKILL of one rank.
    KillRank,
    /// SIGKILL of the process that started the ranks.
    KillLauncher,
    /// SIGKILL of everything.
    KillAll,
    /// SIGSTOP of a rank for less than the communication timeout.
    StopShort,
    /// SIGSTOP of a rank for longer than the timeout.
    StopLong,
    /// A rank that runs only a quarter of the time.
    Stall,
    FullDisk,
    /// In the newest checkpoint, or in the two newest.
    FlippedBit,
    HalfWritten,
}

impl FaultKind {
    pub const KILLS: [FaultKind; 3] = [FaultKind::KillRank, FaultKind::KillLauncher, FaultKind::KillAll];
    pub const OTHERS: [FaultKind; 6] = [
        FaultKind::StopShort,
        FaultKind::StopLong,
        FaultKind::Stall,
        FaultKind::FullDisk,
        FaultKind::FlippedBit,
        FaultKind::HalfWritten,
    ];

    pub fn name(self) -> &'static str {
        match self {
            FaultKind::KillRank => "kill a rank",
            FaultKind::KillLauncher => "kill the launcher",
            FaultKind::KillAll => "kill all",
            FaultKind::StopShort => "stop a rank, briefly",
            FaultKind::StopLong => "stop a rank",
            FaultKind::Stall => "stall a rank",
            FaultKind::FullDisk => "full disk",
            FaultKind::FlippedBit => "flipped bit",
            FaultKind::HalfWritten => "half a checkpoint",
        }
    }
}

/// When a fault hits.
#[derive(Serialize, Clone, Copy, PartialEq, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// At this fraction of a step.
    Step(f64),
    /// While a checkpoint is being written.
    Saving,
    /// Twice: the second time this many seconds after the ranks were restarted.
    Starting(f64),
}

#[derive(Serialize, Clone, PartialEq, Debug)]
pub struct DrawnFault {
    pub kind: FaultKind,
    /// The victim, if the fault hits one rank.
    pub rank: usize,
    /// New steps between recovery from the previous fault and this one.
    pub after: u64,
    pub moment: Moment,
    /// Severity in [0, 1): how long, how full, where in a file.
    pub size: f64,
    /// Random bits for the remaining choices.
    pub dice: u64,
}

/// Maximum new steps between two faults: more than between two checkpoints, so that the run makes progress.
const APART: u64 = 8;
/// Maximum time from a restart to the second kill: a start takes about 40 ms on an idle machine.
const STARTING_S: f64 = 0.06;

/// Draws `kills` SIGKILLs, 7 of 10 at a rank, and `others` cycling through the other kinds, in random order. Each kind
/// of kill occurs at least once.
pub fn draw(kills: usize, others: usize, ranks: usize, seed: u64) -> Vec<DrawnFault> {
    let dice = Rng::named(seed, "chaos");
    let fault = |n: usize| {
        let uniform = |i: u64| dice.uniform(8 * n as u64 + i);
        let by_chance = || match uniform(0) {
            x if x < 0.7 => FaultKind::KillRank,
            x if x < 0.85 => FaultKind::KillLauncher,
            _ => FaultKind::KillAll,
        };
        let kind = match n.checked_sub(kills) {
            Some(other) => FaultKind::OTHERS[other % FaultKind::OTHERS.len()],
            None => FaultKind::KILLS.get(n).copied().unwrap_or_else(by_chance),
        };
        let moment = match uniform(1) {
            x if x < 0.2 => Moment::Saving,
            x if x < 0.3 && kind == FaultKind::KillRank => Moment::Starting(STARTING_S * uniform(2)),
            _ => Moment::Step(uniform(2)),
        };
        DrawnFault {
            kind,
            rank: (uniform(3) * ranks as f64) as usize,
            after: 1 + (uniform(4) * APART as f64) as u64,
            moment,
            size: uniform(5),
            dice: dice.u64(8 * n as u64 + 6),
        }
    };
    let mut plan: Vec<(u64, DrawnFault)> =
        (0..kills + others).map(|n| (dice.u64(8 * n as u64 + 7), fault(n))).collect();
    plan.sort_by_key(|(place, _)| *place);
    plan.into_iter().map(|(_, fault)| fault).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_plans() {
        assert_eq!(draw(50, 6, 2, 7), draw(50, 6, 2, 7));
        assert_ne!(draw(50, 6, 2, 7), draw(50, 6, 2, 8));
    }

    #[test]
    fn every_kind_occurs_within_its_bounds() {
        let plan = draw(1000, 100, 3, 1);
        let share = |is: &dyn Fn(&DrawnFault) -> bool| plan.iter().filter(|f| is(f)).count();
        assert!((650..750).contains(&share(&|f| f.kind == FaultKind::KillRank)));
        assert!(FaultKind::OTHERS.iter().all(|kind| (16..=17).contains(&share(&|f| f.kind == *kind))));
        assert!((150..280).contains(&share(&|f| f.moment == Moment::Saving)));
        assert!(share(&|f| matches!(f.moment, Moment::Starting(_))) > 30);
        for rank in 0..3 {
            assert!((280..460).contains(&share(&|f| f.rank == rank)));
        }
        assert!(plan.iter().all(|f| (1..=APART).contains(&f.after) && f.rank < 3 && (0.0..1.0).contains(&f.size)));
        // A short plan has every kind, too.
        let short = draw(3, 6, 2, 9);
        assert!(FaultKind::KILLS.iter().chain(&FaultKind::OTHERS).all(|kind| short.iter().any(|f| f.kind == *kind)));
    }
}
