//! The samples of a step, for its further updates and for checkpoints between them: by row, so that any mesh finds its
//! own. Never samples, and never judges.
use crate::base::{Error, Result};
use crate::comm::exchange::Exchange;
use crate::comm::{Axis, Mesh};
use crate::data::{MicroBatch, SampleRow};
use crate::device::Device;
use crate::engine::Prompt;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A sample, with its reward.
#[derive(Clone, Debug, PartialEq)]
pub struct DrawnSample {
    pub ids: Vec<u32>,
    pub logprobs: Vec<f32>,
    pub reward: f32,
}

/// The samples of a prompt.
pub type DrawnGroup = Vec<DrawnSample>;

fn sample_row<'a>(prompt: &'a Prompt, of: &'a DrawnSample) -> SampleRow<'a> {
    let DrawnSample { ids, logprobs, reward } = of;
    SampleRow { prompt: &prompt.tokens, ids, logprobs, reward: *reward }
}

/// Micro-batches of the samples of these prompts.
pub fn batches(
    prompts: impl Iterator<Item = Vec<Prompt>>,
    groups: &BTreeMap<u64, DrawnGroup>,
) -> Result<Vec<MicroBatch>> {
    let of_batch = |prompts: Vec<Prompt>| {
        let rows = prompts.iter().map(|prompt| {
            let Some(group) = groups.get(&prompt.id).filter(|group| group.len() >= prompt.samples) else {
                return Err(Error::Run(format!(
                    "the checkpoint has no samples of row {}: the prompts, their order or --group-size have changed. \
                     Resume from a step that --updates-per-rollout divides",
                    prompt.id
                )));
            };
            Ok(group[..prompt.samples].iter().map(|of| sample_row(prompt, of)).collect::<Vec<_>>())
        });
        rows.collect::<Result<Vec<_>>>().map(MicroBatch::from_groups)
    };
    prompts.map(of_batch).collect()
}

/// The groups of all ranks, for a checkpoint. Numbers are stored by their bits.
pub fn shared(dev: &dyn Device, mesh: &Mesh, groups: &BTreeMap<u64, DrawnGroup>) -> Result<Value> {
    let mut words = vec![groups.len() as u64];
    for (row, group) in groups {
        words.extend([*row, group.len() as u64]);
        for DrawnSample { ids, logprobs, reward } in group {
            words.extend([reward.to_bits().into(), ids.len() as u64]);
            words.extend(ids.iter().zip(logprobs).map(|(&id, x)| (id as u64) << 32 | x.to_bits() as u64));
        }
    }
    let mut lengths = Exchange::new(dev, mesh.group(Axis::Dp).clone(), "length of samples", 1)?;
    let most = lengths.gather(dev, &[words.len() as u64])?.into_iter().max().unwrap_or(1) as usize;
    words.resize(most, 0);
    let all = Exchange::new(dev, mesh.group(Axis::Dp).clone(), "samples", most)?.gather(dev, &words)?;
    let mut rows = BTreeMap::new();
    for rank in all.chunks_exact(most) {
        let mut words = rank.iter().copied();
        let mut next = || words.next().unwrap_or(0);
        for _ in 0..next() {
            let (row, samples) = (next(), next());
            let mut sample = || {
                let (reward, n) = (next(), next());
                let (ids, logprobs): (Vec<u64>, Vec<u64>) =
                    (0..n).map(|_| next()).map(|word| (word >> 32, word & u64::from(u32::MAX))).unzip();
                json!({"ids": ids, "logprob_bits": logprobs, "reward_bits": reward})
            };
            rows.insert(row, (0..samples).map(|_| sample()).collect::<Vec<_>>());
        }
    }
    Ok(rows.into_iter().map(|(row, samples)| json!({"row": row, "samples": samples})).collect())
}

/// What [`shared`] has made; None of anything else.
pub fn read(stored: &Value) -> Option<BTreeMap<u64, DrawnGroup>> {
    let word = |value: &Value| value.as_u64().and_then(|word| u32::try_from(word).ok());
    let words = |value: &Value| value.as_array()?.iter().map(word).collect::<Option<Vec<u32>>>();
    let sample = |of: &Value| {
        let (ids, bits) = (words(&of["ids"])?, words(&of["logprob_bits"])?);
        let logprobs: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        let reward = f32::from_bits(word(&of["reward_bits"])?);
        (ids.len() == logprobs.len()).then_some(DrawnSample { ids, logprobs, reward })
    };
    let group = |of: &Value| {
        let samples = of["samples"].as_array()?.iter().map(sample).collect::<Option<Vec<_>>>()?;
        Some((of["row"].as_u64()?, samples))
    };
    stored.as_array()?.iter().map(group).collect()
}
