//! The held-out loss, and samples: of given prompts at every evaluation, or of held-out text at the end. Never changes
//! a weight.
use crate::base::Result;
use crate::data::{Loader, LoaderOptions, SampleKind, StepData};
use crate::engine::{Engine, Prompt, Sampled, SampledText, Sampling};
use crate::run::generate::ends::{TextEnds, stops};
use crate::run::plan::Plan;
use crate::run::plan::prompts::{JudgedRow, SamplePrompt, SamplePrompts};
use crate::run::rollouts::measured::{self, Judged, OwnSamples, RewardMeans};
use crate::run::rollouts::program::JudgedSample;
use crate::run::rollouts::rewards::Rewards;
use crate::run::watch::{Evaluated, PromptSample};
use std::sync::Arc;

/// Tokens of the held-out text that the final sample continues.
const PROMPT: usize = 64;

/// This rank's share of the held-out rows, or of the evaluation data set.
pub struct HeldOut {
    loader: Loader,
    options: LoaderOptions,
    data: StepData,
}

impl HeldOut {
    /// For the data-parallel rank `dp_rank`. `compared`: of the evaluation data set, see [`Loader::compare`]. None if
    /// there is nothing to evaluate or evaluation is off.
    pub fn of(
        plan: &Plan,
        loader: &Loader,
        dp_rank: usize,
        compared: Option<Arc<[[f64; 2]]>>,
    ) -> Result<Option<HeldOut>> {
        let options = plan.loader(dp_rank)?;
        let loader = match &plan.eval {
            Some(eval) => Some(Loader::evaluating(eval.clone(), &options).compare(compared)),
            None => loader.held_out(),
        };
        let loader = loader.filter(|_| plan.settings.run.eval == Some(true));
        Ok(loader.map(|loader| HeldOut { loader, options, data: StepData::default() }))
    }

    /// The losses of all held-out rows over all ranks. Collective.
    pub fn evaluate(&mut self, engine: &mut Engine) -> Result<Evaluated> {
        self.loader.seek(0);
        let judged = self.loader.dataset().kind().is_judged();
        let (mut sum, mut count) = (0.0, 0);
        for _ in 0..self.loader.rows_per_epoch().div_ceil(self.options.global_batch()) {
            self.loader.next(&mut self.data);
            if judged {
                engine.evaluate_preferences(&self.data.batches)?;
                continue;
            }
            let (loss, tokens) = engine.evaluate(&self.data.batches)?;
            sum += loss;
            count += tokens;
        }
        if !judged {
            return Ok(Evaluated { sum, count, preference: None });
        }
        let (sums, kind) = (engine.end_evaluation()?, self.loader.dataset().kind());
        let pairs = sums.chosen_count as u64;
        let count = if kind == SampleKind::Pair { pairs } else { pairs + sums.rejected_count as u64 };
        Ok(Evaluated { sum: sums.loss, count, preference: Some(sums.means()) })
    }
}

/// What continues the prompts of `--sample-prompts`, or of `--eval-dataset`, and judges these.
pub struct PromptSampler<'a> {
    plan: &'a Plan,
    given: &'a SamplePrompts,
    prompts: Vec<Prompt>,
    sampling: Sampling,
    ends: TextEnds,
    rewards: Option<Rewards>,
}

/// A text after each prompt, and the means of their rewards.
pub struct PromptSamples {
    pub texts: Vec<PromptSample>,
    pub rewards: Option<RewardMeans>,
    /// What went wrong with rewards and was repeated.
    pub repeated: Vec<String>,
}

impl<'a> PromptSampler<'a> {
    /// None without prompts.
    pub fn of(plan: &'a Plan) -> Result<Option<PromptSampler<'a>>> {
        let (s, Some(given)) = (&plan.settings, &plan.prompts) else { return Ok(None) };
        let prompts = given.rows.iter().enumerate().map(|(i, row)| Prompt::new(i as u64, row.tokens.clone(), 1));
        Ok(Some(PromptSampler {
            plan,
            given,
            prompts: prompts.collect(),
            // The same numbers at each evaluation: what differs is the model.
            sampling: s.generate.sampling(plan.engine.seed)?,
            ends: TextEnds::new(s, stops(s, &plan.tokenizer)?),
            rewards: given.are_judged().then(|| Rewards::new(s)).transpose()?,
        }))
    }
    /// Samples of the model after `step`. The inner error is one of all ranks, after which they can go on together:
    /// there is no reward, or `stop` has a signal. Collective.
    pub fn sample(
        &mut self,
        engine: &mut Engine,
        step: u64,
        stop: &mut dyn FnMut() -> Option<i32>,
    ) -> Result<Result<PromptSamples>> {
        let (tokenizer, SamplePrompts { rows, count, .. }) = (&self.plan.tokenizer, self.given);
        let next = &mut |of: &Sampled| self.ends.is_open(tokenizer, of.ids);
        let texts = engine.sample_shared(&self.prompts, *count, &self.sampling, next)?;
        let sample = |of: &SampledText| PromptSample {
            prompt: rows[of.prompt].shown.clone(),
            text: self.ends.text(tokenizer, &of.ids),
            finish: if of.ended { "stop" } else { "length" },
            tokens: of.ids.len(),
            reward: None,
        };
        let mut written: Vec<PromptSample> = texts.iter().map(sample).collect();
        let mut repeated = Vec::new();
        let Some(rewards) = &mut self.rewards else {
            return Ok(Ok(PromptSamples { texts: written, rewards: None, repeated }));
        };
        // All ranks have all texts: one of them judges.
        let (dev, mesh) = (engine.device().clone(), engine.mesh().clone());
        let judged = (mesh.rank() == 0).then(|| judge(rewards, rows, (&texts, &written), step, stop)).transpose();
        let own = judged.map(|judged| {
            let (judged, failures) = judged?;
            repeated = failures;
            written.iter_mut().zip(&judged.sums).for_each(|(text, &reward)| text.reward = Some(reward));
            Some(OwnSamples::of(&texts, &judged))
        });
        let means = measured::share(&*dev, &mesh, rewards.names(), own, [0.0; 2])?;
        Ok(means.map(|means| PromptSamples { texts: written, rewards: Some(rewards.means(&means)), repeated }))
    }
}

/// The rewards of the texts of these rows, and what went wrong and was repeated.
fn judge(
    rewards: &mut Rewards,
    rows: &[SamplePrompt],
    (texts, written): (&[SampledText], &[PromptSample]),
    step: u64,
    stop: &mut dyn FnMut() -> Option<i32>,
) -> Result<(Judged, Vec<String>)> {
    let samples = texts.iter().zip(written).filter_map(|(text, PromptSample { prompt, text: words, .. })| {
        let JudgedRow { place, fields } = rows[text.prompt].judged.as_ref()?;
        let (ids, sample) = (&text.ids[..], text.sample);
        Some(JudgedSample { row: fields, place, sample, step, prompt, text: words, ids })
    });
    let judged = rewards.judge(&samples.collect::<Vec<_>>(), stop)?;
    Ok((judged, rewards.end_step(step)?))
}

/// Prompts and texts to print at the end: those of the last evaluation, or held-out text with the model's continuation.
/// None without --sample. Collective.
pub fn sample(plan: &Plan, engine: &mut Engine, samples: &[PromptSample]) -> Result<Option<String>> {
    let run = &plan.settings.run;
    if plan.prompts.as_ref().is_some_and(|prompts| !prompts.are_judged()) {
        let block = |of: &PromptSample| block("", &of.prompt, &of.text);
        return Ok(Some(samples.iter().map(block).collect()).filter(|_| run.sample == Some(true)));
    }
    let count = run.sample_tokens.unwrap_or(0);
    let data = plan.evaluated();
    let Some(row) = data.last_of_a_stream().filter(|_| run.sample == Some(true) && count > 0) else { return Ok(None) };
    let len = data.max_len();
    let (mut tokens, mut targets) = (vec![0; len], vec![0; len]);
    data.fill(row, &mut tokens, &mut targets);
    let prompt = &tokens[..PROMPT.min(len)];
    let sampling = Sampling { temperature: 0.8, seed: plan.engine.seed, ..Sampling::default() };
    let written = engine.generate(prompt, count, &sampling)?;
    let what = if plan.tokenizer.usable().is_ok() { "text" } else { "tokens" };
    let (prompt, written) = (plan.tokenizer.decode(prompt), plan.tokenizer.decode(&written));
    Ok(Some(block(&format!(" (held-out {what})"), &prompt, &written)))
}

fn block(what: &str, prompt: &str, text: &str) -> String {
    let (prompt, text) = (harmless(prompt), harmless(text));
    format!("--- prompt{what} ---\n{prompt}\n--- generated ---\n{text}\n")
}

/// Nothing that a terminal obeys: control characters, and what is not UTF-8, become `.`; runs of them stay as long.
fn harmless(text: &str) -> String {
    let is_shown = |c: char| matches!(c, '\n' | '\t') || !(c.is_control() || c == char::REPLACEMENT_CHARACTER);
    text.chars().map(|c| if is_shown(c) { c } else { '.' }).collect()
}
