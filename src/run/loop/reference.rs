//! The reference model's log-probabilities of a data set, for --precompute-ref-logps: kept next to its tokens, or
//! computed by all ranks together before there is an engine. Never trains.
//!
//! They are kept under a key of everything they depend on: the model's files, the tokens, the compute dtype, the
//! device, and what changes how sums are rounded: mesh axes, and the trained model's adapters, 4 bits and FP8.
use super::context::RankContext;
use super::load;
use crate::base::{Category, DType, Result};
use crate::comm::exchange::Exchange;
use crate::comm::{Axis, CommUse, Reduce, Tag};
use crate::data::{Dataset, Loader, StepData, cache};
use crate::engine::{ReferenceModel, ReferenceScorer};
use crate::nn::{Spec, Tuning};
use crate::run::plan::{data, objective};
use std::sync::Arc;
use std::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

/// Two summed token losses per row; see [`Loader::compare`]. None without --precompute-ref-logps. Collective.
pub fn logps(rank: &RankContext, rows: &Arc<Dataset>) -> Result<Option<Arc<[[f64; 2]]>>> {
    let (plan, mesh, device) = (rank.plan, rank.mesh, &rank.device);
    let model = objective::reference_model(&plan.settings, &plan.engine.spec)?;
    let Some(spec) = model.filter(|_| plan.engine.reference == ReferenceModel::Given) else { return Ok(None) };
    let cache = data::cache(&plan.settings.data)?;
    let key = key(rank, rows, &spec)?;
    let kept = cache::numbers(&cache, key).filter(|kept| kept.len() as u64 == 2 * rows.rows());
    // A host may lack what another one has.
    let mut exchange = Exchange::new(&**device, mesh.group(Axis::World).clone(), "reference", 1)?;
    let have = exchange.gather(&**device, &[u64::from(kept.is_some())])?;
    let (count, started) = (rows.rows(), Instant::now());
    let all = match kept.filter(|_| !have.contains(&0)) {
        Some(kept) => {
            log(rank, format_args!("reference  log-probabilities of {count} rows, kept by an earlier run"));
            kept
        }
        None => {
            let computed = compute(rank, rows, &spec)?;
            cache::keep_numbers(&cache, key, &computed);
            let seconds = started.elapsed().as_secs_f64();
            log(rank, format_args!("reference  log-probabilities of {count} rows in {seconds:.1} s"));
            computed
        }
    };
    Ok(Some(all.as_chunks().0.into()))
}

fn log(rank: &RankContext, text: std::fmt::Arguments) {
    if rank.mesh.rank() == 0 {
        rank.log.info(text);
    }
}

fn key(rank: &RankContext, rows: &Dataset, spec: &Spec) -> Result<u64> {
    let (plan, sizes) = (rank.plan, &rank.mesh.sizes);
    let model = objective::fingerprint(&plan.settings, spec)?;
    let data = (rows.fingerprint(), rows.rows(), rows.kind(), rows.max_len());
    let sums = (plan.engine.strategy.dtype(), rank.device.name(), sizes.sp, plan.engine.sp_impl, sizes.tp);
    let Tuning { lora, load_in_4bit, fp8, .. } = plan.engine.tuning_of(spec);
    let rounded = (lora.map(|lora| lora.targets), load_in_4bit, fp8);
    Ok(xxh3_64(format!("reference 2 {model:016x} {data:?} {sums:?} {rounded:?}").as_bytes()))
}

/// Each data-parallel rank scores its share of the rows; a sum with the zeros of the others gives all ranks all
/// numbers.
fn compute(rank: &RankContext, rows: &Arc<Dataset>, spec: &Spec) -> Result<Vec<f64>> {
    let (plan, mesh, device) = (rank.plan, rank.mesh, &rank.device);
    let mut scorer = ReferenceScorer::new(device.clone(), mesh, &plan.engine, spec)?;
    load::reference(plan, device.clone(), mesh, scorer.model())?;
    let options = plan.loader(mesh.group(Axis::Dp).rank())?;
    let (mut loader, mut step) = (Loader::evaluating(rows.clone(), &options), StepData::default());
    let (sequences, batch) = (rows.kind().sequences(), options.batch_size);
    let mut host = vec![0f64; 2 * options.global_batch() as usize];
    let mut sums = mesh.group(Axis::Loss).alloc(DType::F64, host.len(), CommUse::Reduced, Category::Other)?;
    let mut all = Vec::with_capacity(2 * rows.rows() as usize + host.len());
    while (all.len() as u64) < 2 * rows.rows() {
        loader.next(&mut step);
        host.fill(0.0);
        for (micro, own) in step.batches.iter().enumerate() {
            let at = 2 * (micro * options.dp_size + options.dp_rank) * batch;
            let mut put = |found: &[f64], first: usize, each: usize| {
                // Ranks of sp find the same numbers.
                let places = host[at + first..].chunks_mut(2).flat_map(|row| row.iter_mut().take(each));
                places.zip(found).filter(|_| mesh.coords.sp == 0).for_each(|(place, found)| *place = *found);
            };
            put(scorer.score(own)?, 0, sequences);
            if let Some(mismatched) = &own.mismatched {
                put(scorer.score(mismatched)?, 1, 1);
            }
        }
        device.upload(bytemuck::cast_slice(&host), sums.view_mut())?;
        let ticket = mesh.group(Axis::Loss).all_reduce(Tag::new("reference", 0), sums.view_mut(), Reduce::Sum)?;
        mesh.group(Axis::Loss).wait(ticket)?;
        device.download(sums.view(), bytemuck::cast_slice_mut(&mut host))?;
        mesh.group(Axis::Loss).wait_sent(ticket)?;
        all.extend(&host);
    }
    all.truncate(2 * rows.rows() as usize);
    // Ends the last gathers, which would keep the memory of the model's slots.
    scorer.model().1.weights_changed()?;
    Ok(all)
}
