//! One rank's run: takes its device, joins the mesh, checks that the ranks agree on what they run, then trains or
//! merges. A failure aborts the other ranks at once. Never parses and never validates: the plan is already valid.
use super::context::RankContext;
use super::merge;
use super::same;
use super::shared;
use super::stops::Stops;
use super::trainer::Trainer;
use crate::base::{Error, Result};
use crate::comm::env::RankEnv;
use crate::comm::flight::Flight;
use crate::comm::mesh::Mesh;
use crate::run::launch::device::{self, RankDevice};
use crate::run::plan::Plan;
use crate::run::trace::Tracer;
use crate::run::watch::{self, RunLog};
use std::time::Instant;

/// Runs this process's rank to its end.
pub fn run(plan: &Plan, env: &RankEnv, log: &RunLog) -> Result<()> {
    let stops = Stops::catch(plan, env)?;
    let (starting, mut tracer) = (Instant::now(), Tracer::of(plan, env.rank));
    let env = &plan.ranks.with_secret(env);
    plan.ranks.caution(env).iter().for_each(|caution| log.warn(caution));
    plan.ranks.crowded(env).iter().for_each(|crowded| log.warn(crowded));
    let RankDevice { device, member, gpu, graphs } = device::take(&plan.ranks, env, tracer.meter())?;
    if let Some(text) = gpu.as_ref().and_then(|gpu| gpu.warning()).filter(|_| env.local_rank == 0) {
        log.warn(text);
    }
    log.debug(format_args!("{} taken after {:.2}s", device.name(), starting.elapsed().as_secs_f64()));
    if let (Some(_), Some(_), 0) = (&graphs, &plan.profile, env.rank) {
        log.info(
            "--compile: profiled steps run without CUDA graphs, because a replayed graph has no operations to time",
        );
    }
    let flight = Flight::default();
    let world = Mesh::world(&*member)?;
    let agreed =
        same::check(plan, &env.host, &*device, &world).and_then(|()| shared::check(plan, &env.host, &*device, &world));
    if let Err(e) = agreed {
        if !matches!(e, Error::Input(_)) {
            member.abort(); // all ranks return an input error together
        }
        return Err(e);
    }
    let mesh = tracer.watch(flight.watch(Mesh::with_world(world, member, plan.ranks.mesh)?));
    let result = match plan.settings.only_converts() {
        true => merge::run(plan, device, &mesh, log),
        false => {
            let rank = RankContext { plan, log, device, gpu, graphs: graphs.clone(), flight: &flight, mesh: &mesh };
            Trainer::new(&rank, &mut tracer, stops).and_then(|mut trainer| trainer.run())
        }
    };
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

/// Writes this rank's flight recorder, if the run has a directory for it and a collective may be to blame. A failure to
/// write is ignored: the run's own error matters more.
fn dump_flight(plan: &Plan, flight: &Flight, rank: usize, e: &Error) {
    // Bad input is refused before anything is computed.
    if let Some(dir) = plan.restarts.traces.as_ref().filter(|_| !matches!(e, Error::Input(_) | Error::Agreed(_))) {
        let _ = flight.dump(dir, rank, e);
    }
}
