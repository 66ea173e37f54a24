//! The samples of a step: drawn from the policy, judged, recorded, and put where there was room for them. Never updates
//! a weight.
use super::kept::{self, DrawnGroup, DrawnSample};
use super::measured::{self, Judged, OwnSamples, SampleMeans};
use super::program::JudgedSample;
use super::rewards::Rewards;
use super::{files, longest};
use crate::base::{Error, Result};
use crate::comm::exchange::Exchange;
use crate::comm::{Axis, Mesh};
use crate::data::{Fetched, JsonRow, MicroBatch, Tokenizer};
use crate::device::{Device, IGNORE};
use crate::engine::{Engine, Prompt, Sampled, SampledText, Sampling};
use crate::run::generate::ends::{TextEnds, stops};
use crate::run::generate::prompts;
use crate::run::plan::Plan;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What a rank needs to sample.
pub struct StepSampler {
    tokenizer: Tokenizer,
    /// The place of each prompt, with the fields of its row that rewards read; None: it was skipped.
    rows: Vec<Option<(String, JsonRow)>>,
    rewards: Rewards,
    sampling: Sampling,
    count: usize,
    ends: TextEnds,
    /// Updates on the same samples, and those of the last step.
    passes: u64,
    kept: Vec<MicroBatch>,
    /// The groups of these, by row; after a start between updates, those of all ranks.
    groups: BTreeMap<u64, DrawnGroup>,
    tokens: u64,
    record: Option<(PathBuf, BufWriter<File>)>,
    /// What went wrong with rewards and was repeated, since it was last taken.
    repeated: Vec<String>,
    /// Means over the step's samples; None after a start between updates on them from a checkpoint without these.
    means: Option<SampleMeans>,
}

impl StepSampler {
    /// None if the run learns from recorded samples, or from something else.
    pub fn new(plan: &Plan, mesh: &Mesh) -> Result<Option<StepSampler>> {
        let s = &plan.settings;
        if !s.objective.samples() {
            return Ok(None);
        }
        let rewards = Rewards::new(s)?;
        let mut rows = Vec::new();
        prompts::each(s, &files(s)?, prompts::field(s)?, &mut |row| {
            rows.push(row.ok().map(|row| (row.place, rewards.read_of(row.fields))));
            Ok(())
        })?;
        // Each data-parallel rank has a file, and the first rank of its tp group writes it.
        let record = s.objective.record_rollouts.as_ref().filter(|_| mesh.coords.tp == 0 && mesh.coords.sp == 0);
        let record = record.map(|path| {
            let path = match mesh.group(Axis::Dp).rank() {
                0 => path.clone(),
                rank => path.with_extension(format!("{rank}.jsonl")),
            };
            if let Some(from) = &plan.resume {
                cut(&path, from.state.step).map_err(|e| Error::io("read", &path, e))?;
            }
            let file = OpenOptions::new().create(true).append(true).open(&path);
            file.map(|file| (path.clone(), BufWriter::new(file))).map_err(|e| Error::io("open", &path, e))
        });
        Ok(Some(StepSampler {
            sampling: s.generate.sampling(plan.engine.seed)?,
            count: longest(s)?,
            ends: TextEnds::new(s, stops(s, &plan.tokenizer)?),
            passes: plan.loader(0)?.passes as u64,
            tokenizer: plan.tokenizer.clone(),
            kept: Vec::new(),
            groups: BTreeMap::new(),
            tokens: 0,
            record: record.transpose()?,
            repeated: Vec::new(),
            means: None,
            rewards,
            rows,
        }))
    }
    /// Continues after `step` steps, with the samples that the checkpoint holds if it is between updates on them.
    pub fn resume(&mut self, step: u64, stored: Option<&Value>) -> Result<()> {
        if step.is_multiple_of(self.passes) {
            return Ok(());
        }
        let wrong = |what: &str| {
            Error::input(format!(
                "the checkpoint is of step {step}, between the {} updates on the samples of one step, {what}: resume from a \
                 step that --updates-per-rollout divides",
                self.passes
            ))
        };
        let stored = stored.ok_or_else(|| wrong("which are not in it"))?;
        // Checkpoints of earlier versions hold the groups alone.
        let groups = kept::read(stored.get("groups").unwrap_or(stored));
        self.groups = groups.ok_or_else(|| wrong("which it does not hold in a form that is known"))?;
        self.means = stored.get("means").and_then(|means| SampleMeans::deserialize(means).ok());
        Ok(())
    }
    /// What a checkpoint after `step` needs to continue on the samples of its step. Collective.
    pub fn state(&self, dev: &dyn Device, mesh: &Mesh, step: u64) -> Result<Option<Value>> {
        match step.is_multiple_of(self.passes) {
            true => Ok(None),
            false => {
                let groups = kept::shared(dev, mesh, &self.groups)?;
                let means = self.means.as_ref().map(SampleMeans::untimed);
                Ok(Some(json!({"groups": groups, "means": means})))
            }
        }
    }

    /// What went wrong with rewards and was repeated, since it was last taken.
    pub fn take_repeated(&mut self) -> Vec<String> {
        std::mem::take(&mut self.repeated)
    }
    /// What is known of the step's samples.
    pub fn means(&self) -> Option<&SampleMeans> {
        self.means.as_ref()
    }
    /// Gives the prompts of a step their samples, or those of the update before it. The inner error is one of all
    /// ranks, after which they can go on together: there is no reward, or `stop` has a signal. Collective.
    pub fn sample(
        &mut self,
        engine: &mut Engine,
        fetched: &mut Fetched,
        stop: &mut dyn FnMut() -> Option<i32>,
    ) -> Result<Result<()>> {
        let Fetched { step, data } = fetched;
        if (*step - 1).is_multiple_of(self.passes) {
            let (dev, mesh) = (engine.device().clone(), engine.mesh().clone());
            match self.draw(engine, (&*dev, &mesh), *step, &data.batches, stop)? {
                Ok(groups) => self.groups = groups,
                Err(e) => return Ok(Err(e)),
            }
            self.kept.clear();
        } else {
            self.means = self.means.as_ref().map(SampleMeans::untimed);
        }
        if self.kept.is_empty() {
            self.kept = kept::batches(data.batches.iter().map(prompts_of), &self.groups)?;
            let own = self.kept.iter().map(|batch| batch.tokens.len() as u64).sum();
            self.tokens = engine.global_count(own)?;
        }
        data.batches.clone_from(&self.kept);
        data.tokens = self.tokens;
        Ok(Ok(()))
    }

    fn draw(
        &mut self,
        engine: &mut Engine,
        (dev, mesh): (&dyn Device, &Mesh),
        step: u64,
        batches: &[MicroBatch],
        stop: &mut dyn FnMut() -> Option<i32>,
    ) -> Result<Result<BTreeMap<u64, DrawnGroup>>> {
        let prompts: Vec<Prompt> = batches.iter().flat_map(prompts_of).collect();
        let next = &mut |of: &Sampled| self.ends.is_open(&self.tokenizer, of.ids);
        let began = Instant::now();
        let texts = engine.sample(&prompts, self.count, &Sampling { step, ..self.sampling }, next)?;
        let sampled = Instant::now();
        // Programs run once per data-parallel rank.
        let judged = (mesh.coords.tp == 0).then(|| self.judge(step, &prompts, &texts, stop)).transpose();
        let seconds = [(sampled - began).as_secs_f64(), sampled.elapsed().as_secs_f64()];
        let (mine, mut rewards) = match judged {
            Ok(Some(judged)) => (Ok(Some(OwnSamples::of(&texts, &judged))), judged.sums),
            Ok(None) => (Ok(None), Vec::new()),
            Err(e) => (Err(e), Vec::new()),
        };
        match measured::share(dev, mesh, self.rewards.names(), mine, seconds)? {
            Ok(means) => self.means = Some(means),
            Err(e) => return Ok(Err(e)),
        }
        if mesh.group(Axis::Tp).size() > 1 {
            let mut words: Vec<u64> = rewards.iter().map(|reward| reward.to_bits() as u64).collect();
            words.resize(texts.len(), 0);
            let all = Exchange::new(dev, mesh.group(Axis::Tp).clone(), "rewards", words.len())?.gather(dev, &words)?;
            rewards = all[..texts.len()].iter().map(|&bits| f32::from_bits(bits as u32)).collect();
        }
        self.record(step, &prompts, &texts, &rewards)?;
        let mut groups: BTreeMap<u64, DrawnGroup> = BTreeMap::new();
        for (SampledText { prompt, ids, logprobs, .. }, reward) in texts.into_iter().zip(rewards) {
            groups.entry(prompts[prompt].id).or_default().push(DrawnSample { ids, logprobs, reward });
        }
        Ok(Ok(groups))
    }

    fn judge(
        &mut self,
        step: u64,
        prompts: &[Prompt],
        texts: &[SampledText],
        stop: &mut dyn FnMut() -> Option<i32>,
    ) -> Result<Judged> {
        let shown = |text: &SampledText| {
            let before = self.tokenizer.decode(&prompts[text.prompt].tokens);
            (before, self.ends.text(&self.tokenizer, &text.ids))
        };
        let shown: Vec<(String, String)> = texts.iter().map(shown).collect();
        let mut samples = Vec::with_capacity(texts.len());
        for (text, (prompt, written)) in texts.iter().zip(&shown) {
            let Some(Some((place, row))) = self.rows.get(prompts[text.prompt].id as usize) else {
                return Err(Error::op("rewards", format!("no row {} of prompts", prompts[text.prompt].id)));
            };
            samples.push(JudgedSample { row, place, sample: text.sample, step, prompt, text: written, ids: &text.ids });
        }
        let judged = self.rewards.judge(&samples, stop)?;
        self.repeated.extend(self.rewards.end_step(step)?);
        Ok(judged)
    }

    /// Appends the groups to the file of --record-rollouts, as --rollouts reads them.
    fn record(&mut self, step: u64, prompts: &[Prompt], texts: &[SampledText], rewards: &[f32]) -> Result<()> {
        let Some((path, file)) = &mut self.record else { return Ok(()) };
        let mut written = Ok(());
        for (i, prompt) in prompts.iter().enumerate() {
            let of = texts.iter().zip(rewards).filter(|(text, _)| text.prompt == i);
            let samples: Vec<Value> = of
                .map(|(text, reward)| {
                    let judged = self.ends.text(&self.tokenizer, &text.ids);
                    json!({"ids": text.ids, "logprobs": text.logprobs, "reward": reward, "text": judged})
                })
                .collect();
            let line = json!({"step": step, "row": prompt.id, "prompt_ids": prompt.tokens, "samples": samples});
            written = written.and_then(|()| writeln!(file, "{line}"));
        }
        written.and_then(|()| file.flush()).map_err(|e| Error::io("write", &*path, e))
    }
}

/// Removes the last lines of a record that are of steps after `step`: a run that resumes takes these steps again.
fn cut(path: &Path, step: u64) -> std::io::Result<()> {
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        file => file?,
    };
    let (mut lines, mut line) = (BufReader::new(&file), Vec::new());
    let (mut at, mut end) = (0, 0);
    while let n @ 1.. = lines.read_until(b'\n', &mut line)? {
        at += n as u64;
        let of = serde_json::from_slice::<Value>(&line).ok().and_then(|line| line["step"].as_u64());
        if of.is_none_or(|of| of <= step) {
            end = at;
        }
        line.clear();
    }
    if end < at { file.set_len(end) } else { Ok(()) }
}

/// The prompts of a micro-batch that has no samples yet; their ids are the numbers of their rows.
fn prompts_of(batch: &MicroBatch) -> Vec<Prompt> {
    let mut first = 0;
    let group = |(&end, &row): (&u32, &u64)| {
        let document = batch.cu_seqlens[first] as usize..batch.cu_seqlens[first + 1] as usize;
        let targets = &batch.targets[document.clone()];
        let len = 1 + targets.iter().position(|&target| target != IGNORE).unwrap_or(0);
        let samples = end as usize - first;
        first = end as usize;
        let tokens = batch.tokens[document.start..document.start + len].to_vec();
        Prompt::new(row, tokens, samples)
    };
    batch.recorded.groups.iter().zip(&batch.recorded.rows).map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::cut;
    use std::fs;

    #[test]
    fn a_record_is_cut_where_a_run_resumes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.jsonl");
        cut(&path, 1).unwrap();
        // The steps of an earlier run stay.
        let lines = |steps: &[u64]| steps.iter().map(|step| format!("{{\"step\":{step}}}\n")).collect::<String>();
        for (written, step, left) in
            [(&[1, 2, 9, 1, 2, 3][..], 1, &[1, 2, 9, 1][..]), (&[1, 2, 3], 3, &[1, 2, 3]), (&[2, 3], 1, &[])]
        {
            fs::write(&path, lines(written)).unwrap();
            cut(&path, step).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), lines(left), "{written:?} from {step}");
        }
    }
}
