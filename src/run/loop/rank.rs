//! One rank's run: takes its device, joins the mesh, checks that the ranks agree on what they run, then trains. A
//! failure aborts the other ranks at once. Never parses and never validates: the plan is already valid.
use super::context::RankContext;
use super::same;
use super::shared;
use super::stops::Stops;
use super::trainer::Trainer;
use crate::base::{Error, Meter, Result};
use crate::comm::Collective;
use crate::comm::env::RankEnv;
use crate::comm::flight::Flight;
use crate::comm::mesh::Mesh;
use crate::run::launch::device::{self, RankDevice};
use crate::run::plan::Plan;
use crate::run::plan::ranks::RankPlan;
use crate::run::settings::Settings;
use crate::run::trace::Tracer;
use crate::run::watch::{self, RunLog};
use std::sync::Arc;
use std::time::Instant;

/// Runs this process's rank to its end.
pub fn run(plan: &Plan, env: &RankEnv, log: &RunLog) -> Result<()> {
    let stops = Stops::catch(plan, env)?;
    let (starting, mut tracer) = (Instant::now(), Tracer::of(plan, env.rank));
    let env = &plan.ranks.with_secret(env);
    let agree = || same::of_training(plan);
    let joined = join(&plan.settings, &plan.ranks, env, tracer.meter(), log, agree)?;
    let (RankDevice { device, member, gpu, graphs }, world) = joined;
    log.debug(format_args!("{} taken after {:.2}s", device.name(), starting.elapsed().as_secs_f64()));
    if let (Some(_), Some(_), 0) = (&graphs, &plan.profile, env.rank) {
        log.info(
            "--compile: profiled steps run without CUDA graphs, because a replayed graph has no operations to time",
        );
    }
    let flight = Flight::default();
    let mesh = tracer.watch(flight.watch(Mesh::with_world(world, member, plan.ranks.mesh)?));
    let rank = RankContext { plan, log, device, gpu, graphs: graphs.clone(), flight: &flight, mesh: &mesh };
    let result = Trainer::new(&rank, &mut tracer, stops).and_then(|mut trainer| trainer.run());
    if let Err(e) = &result {
        if !matches!(e, Error::Signal(_)) {
            // What all ranks agreed on ends them after what they still do together, which an abort would fail.
            if !matches!(e, Error::Agreed(_)) {
                mesh.member.abort();
            }
            dump_flight(plan, &flight, env.rank, e);
        }
        tracer.salvage();
        watch::failed(plan, env, e);
    }
    if let (Some(graphs), 0, Ok(())) = (&graphs, env.rank, &result) {
        log.info(graphs.given());
    }
    result
}

/// Takes this rank's device and joins the other ranks, whose facts must be the same, and which must see the directories
/// that all write to. `env` has the job's secret.
pub fn join(
    s: &Settings,
    ranks: &RankPlan,
    env: &RankEnv,
    meter: Meter,
    log: &RunLog,
    facts: impl FnOnce() -> Result<same::FactList>,
) -> Result<(RankDevice, Arc<dyn Collective>)> {
    ranks.caution(env).iter().for_each(|caution| log.warn(caution));
    ranks.crowded(env).iter().for_each(|crowded| log.warn(crowded));
    let taken = device::take(ranks, env, meter)?;
    if let Some(text) = taken.gpu.as_ref().and_then(|gpu| gpu.warning()).filter(|_| env.local_rank == 0) {
        log.warn(text);
    }
    let (host, device, world) = (&env.host, &*taken.device, Mesh::world(&*taken.member)?);
    let agreed = same::check(facts, host, device, &world);
    match agreed.and_then(|()| shared::check(&s.checkpoint, host, device, &world)) {
        Ok(()) => Ok((taken, world)),
        Err(e) => {
            if !matches!(e, Error::Input(_)) {
                taken.member.abort(); // all ranks return an input error together
            }
            Err(e)
        }
    }
}

/// Writes this rank's flight recorder, if the run has a directory for it and a collective may be to blame. A failure to
/// write is ignored: the run's own error matters more.
fn dump_flight(plan: &Plan, flight: &Flight, rank: usize, e: &Error) {
    // Bad input is refused before anything is computed.
    if let Some(dir) = plan.restarts.traces.as_ref().filter(|_| !matches!(e, Error::Input(_) | Error::Agreed(_))) {
        let _ = flight.dump(dir, rank, e);
    }
}
