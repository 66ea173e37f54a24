//! What is known of a step's samples before they are trained on, over all ranks. Never judges one.
use crate::base::Result;
use crate::comm::exchange::Exchange;
use crate::comm::{Axis, Mesh};
use crate::device::Device;
use crate::engine::SampledText;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What samples were judged to be worth.
#[derive(Debug, PartialEq)]
pub struct Judged {
    /// The weighted sum of all rewards, by sample.
    pub sums: Vec<f32>,
    /// The sum over all samples, by reward.
    pub by_reward: Vec<f64>,
}

/// Means over the samples of all ranks.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct SampleMeans {
    /// Tokens of a sample: the mean, the fewest and the most.
    pub completion_mean: f64,
    pub completion_min: u64,
    pub completion_max: u64,
    /// Share of the samples that a limit of their length cut.
    pub completion_cut: f64,
    /// With rewards: share of the prompts whose samples all have the same one, from which nothing is learned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flat_groups: Option<f64>,
    /// Mean of each reward, without its weight.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rewards: BTreeMap<String, f64>,
    /// The longest that a rank sampled, and that it waited for rewards.
    pub sample_time_s: f64,
    pub reward_time_s: f64,
}

impl SampleMeans {
    /// The same for further updates, for which nothing is sampled or judged.
    pub fn untimed(&self) -> SampleMeans {
        SampleMeans { sample_time_s: 0.0, reward_time_s: 0.0, ..self.clone() }
    }
}

/// Means over judged texts of prompts that are not trained on.
#[derive(Serialize, Clone, Debug, PartialEq)]
pub struct RewardMeans {
    /// The weighted sum of all rewards.
    pub reward_mean: f64,
    /// Each reward, without its weight.
    pub rewards: BTreeMap<String, f64>,
    /// Tokens of a text.
    pub completion_mean: f64,
    /// Share of the texts that a limit of their length cut.
    pub completion_cut: f64,
}

/// Sums over a rank's samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OwnSamples {
    samples: f64,
    tokens: f64,
    shortest: f64,
    longest: f64,
    cut: f64,
    groups: f64,
    flat: f64,
    by_reward: Vec<f64>,
}

impl OwnSamples {
    /// `texts` are in the order of their prompts.
    pub fn of(texts: &[SampledText], judged: &Judged) -> OwnSamples {
        let mut own =
            OwnSamples { shortest: f64::INFINITY, by_reward: judged.by_reward.clone(), ..OwnSamples::default() };
        let mut rewards = &judged.sums[..];
        for group in texts.chunk_by(|a, b| a.prompt == b.prompt) {
            let (of_group, rest) = rewards.split_at(group.len().min(rewards.len()));
            rewards = rest;
            own.groups += 1.0;
            own.flat += f64::from(of_group.windows(2).all(|pair| pair[0] == pair[1]));
            for text in group {
                let len = text.ids.len() as f64;
                own.samples += 1.0;
                own.tokens += len;
                (own.shortest, own.longest) = (own.shortest.min(len), own.longest.max(len));
                own.cut += f64::from(!text.ended);
            }
        }
        own
    }
}

/// Numbers of a rank, before those of its rewards.
const NUMBERS: usize = 9;

/// The means over all ranks, if all could judge their samples; else an error of all. `mine`: those that this rank
/// counts; None: others do. `seconds`: of sampling, and of judging. Collective.
pub fn share(
    dev: &dyn Device,
    mesh: &Mesh,
    names: &[String],
    mine: Result<Option<OwnSamples>>,
    seconds: [f64; 2],
) -> Result<Result<SampleMeans>> {
    let words = NUMBERS + names.len();
    let numbers = mine.map(|own| {
        let own = own.unwrap_or_else(|| OwnSamples { shortest: f64::INFINITY, ..OwnSamples::default() });
        let OwnSamples { samples, tokens, shortest, longest, cut, groups, flat, by_reward } = own;
        let [sampling, judging] = seconds;
        let mut numbers = vec![samples, tokens, shortest, longest, cut, groups, flat, sampling, judging];
        numbers.extend(by_reward);
        numbers.resize(words, 0.0);
        numbers.into_iter().map(f64::to_bits).collect()
    });
    let mut exchange = Exchange::new(dev, mesh.group(Axis::World).clone(), "samples of a step", 1 + words)?;
    let all = match exchange.share(dev, "judge its samples", numbers, words) {
        Ok(all) => all,
        Err(e) => return Ok(Err(e)),
    };
    let of = |i: usize| all.iter().map(move |rank| f64::from_bits(rank[i]));
    let most = |i: usize| of(i).fold(0.0, f64::max);
    let sum = |i: usize| of(i).sum::<f64>();
    let [samples, groups] = [0, 5].map(|i| sum(i).max(1.0));
    let rewards = names.iter().enumerate().map(|(i, name)| (name.clone(), sum(NUMBERS + i) / samples));
    Ok(Ok(SampleMeans {
        completion_mean: sum(1) / samples,
        completion_min: of(2).fold(f64::INFINITY, f64::min) as u64,
        completion_max: most(3) as u64,
        completion_cut: sum(4) / samples,
        flat_groups: (!names.is_empty()).then(|| sum(6) / groups),
        rewards: rewards.collect(),
        sample_time_s: most(7),
        reward_time_s: most(8),
    }))
}
