//! Requests to stop after the current step: a signal, or the time limit. Never stops the run itself.
use crate::base::Result;
use crate::comm::env::RankEnv;
use crate::run::launch;
use crate::run::plan::Plan;
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;
use std::time::Instant;

pub struct Stops {
    signals: Signals,
    /// The first that was received.
    received: Option<i32>,
    deadline: Option<Instant>,
}

impl Stops {
    /// Catches the plan's signals from now on.
    pub fn catch(plan: &Plan, env: &RankEnv) -> Result<Stops> {
        Ok(Stops {
            signals: launch::catch(&plan.restarts.signals)?,
            received: None,
            // Our own launcher enforces the limit for all ranks, across restarts.
            deadline: plan.restarts.time_limit.filter(|_| env.parent_pid.is_none()).map(|limit| Instant::now() + limit),
        })
    }
    /// A received signal; SIGTERM once the time limit is over.
    pub fn pending(&mut self) -> Option<i32> {
        let late = || self.deadline.is_some_and(|deadline| Instant::now() > deadline).then_some(SIGTERM);
        self.received = self.received.or_else(|| self.signals.pending().next()).or_else(late);
        self.received
    }
}
