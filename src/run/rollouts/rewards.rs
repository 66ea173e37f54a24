//! Rewards of samples: built-in checkers, and the sum of several. Never samples, and never trains.
use super::measured::{Judged, RewardMeans, SampleMeans};
use super::number::last_number;
use super::program::{JudgedSample, RewardProgram};
use super::schema::JsonSchema;
use crate::base::{Error, Result, open, quote};
use crate::data::{JsonRow, in_json, number_in};
use crate::run::settings::Settings;
use regex::Regex;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// The field of a prompt's row that checkers compare with, unless `output_key` names another.
const ANSWER: &str = "answer";
/// The field of verl's rows that holds it as `ground_truth`.
const JUDGED: &str = "reward_model";

enum RewardKind {
    /// The text is the row's answer, without white space around them.
    Exact,
    /// The last number of the text is the last one of the row's answer.
    Number,
    Pattern(Regex),
    /// The text is JSON.
    Json,
    /// The text is JSON that the schema describes.
    Schema(Box<JsonSchema>),
    /// 1 up to so many tokens, and 0 from twice as many on.
    Length(usize),
    Program(RewardProgram),
}

/// The weighted sum of several rewards.
pub struct Rewards {
    all: Vec<(f64, RewardKind)>,
    names: Vec<String>,
    /// The field of a row that checkers compare with.
    answer: String,
}

impl Rewards {
    /// Refuses rewards that cannot be computed, without starting a program.
    pub fn check(s: &Settings) -> Result<()> {
        for (_, kind) in Rewards::new(s)?.all {
            if let RewardKind::Program(program) = kind {
                program.check()?;
            }
        }
        Ok(())
    }
    pub fn new(s: &Settings) -> Result<Rewards> {
        let names = s.objective.reward.as_deref().unwrap_or_default();
        let weights = s.objective.reward_weights.clone().unwrap_or(vec![1.0; names.len()]);
        if weights.len() != names.len() {
            let (n, of) = (weights.len(), names.len());
            return Err(Error::input(format!("--reward-weights: {n} numbers for {of} rewards; give one for each")));
        }
        let timeout = Duration::from_secs_f64(s.objective.reward_timeout.unwrap_or(60.0));
        let kind = |name: &String| -> Result<RewardKind> {
            let bad = |what: String| Error::input(format!("--reward {}: {what}", quote(name)));
            Ok(match (name.as_str(), name.split_once(':')) {
                ("exact", _) => RewardKind::Exact,
                ("number", _) => RewardKind::Number,
                ("json", _) => RewardKind::Json,
                (_, Some(("json-schema", path))) => RewardKind::Schema(Box::new(schema(path).map_err(bad)?)),
                (_, Some(("regex", pattern))) => RewardKind::Pattern(
                    Regex::new(pattern).map_err(|e| bad(format!("is no regular expression ({e})")))?,
                ),
                (_, Some(("length", tokens))) => match tokens.parse() {
                    Ok(tokens) if tokens > 0 => RewardKind::Length(tokens),
                    _ => return Err(bad("needs a number of tokens, as in length:100".into())),
                },
                ("", _) => return Err(bad("is empty; name a checker or a command".into())),
                (command, _) => RewardKind::Program(RewardProgram::new(command, timeout)),
            })
        };
        let all = names.iter().zip(weights).map(|(name, weight)| Ok((weight, kind(name)?)));
        let answer = s.data.output_key.clone().unwrap_or(ANSWER.into());
        let rewards = Rewards { all: all.collect::<Result<_>>()?, names: names.to_vec(), answer };
        match &s.data.output_key {
            Some(key) if !rewards.compares() => Err(Error::input(format!(
                "--output-key {key} names the answers that --reward exact and number compare with, and none of the rewards \
                 compares: remove it"
            ))),
            _ => Ok(rewards),
        }
    }
    /// Whether a checker compares with the row's answer.
    fn compares(&self) -> bool {
        self.all.iter().any(|(_, kind)| matches!(kind, RewardKind::Exact | RewardKind::Number))
    }
    /// The means of rewards, of samples of which these are known.
    pub fn means(&self, of: &SampleMeans) -> RewardMeans {
        let each = self.all.iter().zip(&self.names);
        let reward_mean = each.map(|((weight, _), name)| weight * of.rewards.get(name).unwrap_or(&0.0)).sum();
        let &SampleMeans { completion_mean, completion_cut, .. } = of;
        RewardMeans { reward_mean, rewards: of.rewards.clone(), completion_mean, completion_cut }
    }
    /// The rewards as the settings have them.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Keeps the fields of a row that are read: programs read all, checkers the answer.
    pub fn read_of(&self, mut row: JsonRow) -> JsonRow {
        if !self.all.iter().any(|(_, kind)| matches!(kind, RewardKind::Program(_))) {
            row.retain(|key, _| [&self.answer, JUDGED].contains(&key.as_str()));
        }
        in_json(row)
    }

    /// Refuses a row without the answer that a checker needs.
    pub fn check_row(&self, row: &JsonRow, place: &str) -> Result<()> {
        if !self.compares() {
            return Ok(());
        }
        let (key, counts) = (&self.answer, self.all.iter().any(|(_, kind)| matches!(kind, RewardKind::Number)));
        let wrong = match answers(row, key) {
            None => format!("has an `{key}` that is neither text, nor a number, nor a list of these"),
            Some(all) if all.is_empty() => {
                let keys = row.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                format!(
                    "has no `{key}`, with which --reward compares; its keys are: {keys}. Name the field of the answer with \
                     `output_key`"
                )
            }
            Some(all) if counts && all.iter().all(|answer| last_number(answer).is_none()) => {
                format!("has no number in its `{key}`")
            }
            Some(_) => return Ok(()),
        };
        Err(Error::input(format!("{place} {wrong} (set `skip_bad_rows` to skip and count such rows)")))
    }
    /// The rewards of samples, in their order. [`Error::Signal`] once `stop` has one.
    pub fn judge(&mut self, samples: &[JudgedSample], stop: &mut dyn FnMut() -> Option<i32>) -> Result<Judged> {
        let (mut sums, mut by_reward) = (vec![0.0; samples.len()], Vec::new());
        let is = |right: bool| if right { 1.0 } else { 0.0 };
        let each = |reward: &dyn Fn(&JudgedSample) -> f64| samples.iter().map(reward).collect::<Vec<_>>();
        let key = &self.answer;
        let right = |of: &JudgedSample| answers(of.row, key).unwrap_or_default();
        for (weight, kind) in &mut self.all {
            let rewards = match kind {
                RewardKind::Exact => each(&|of| is(right(of).iter().any(|answer| answer.trim() == of.text.trim()))),
                RewardKind::Number => each(&|of| {
                    let found = last_number(of.text);
                    is(found.is_some() && right(of).iter().any(|answer| last_number(answer) == found))
                }),
                RewardKind::Pattern(pattern) => each(&|of| is(pattern.is_match(of.text))),
                RewardKind::Json => each(&|of| is(serde_json::from_str::<serde::de::IgnoredAny>(of.text).is_ok())),
                RewardKind::Schema(schema) => each(&|of| is(schema.describes(of.text))),
                RewardKind::Length(most) => each(&|of| (2.0 - of.ids.len() as f64 / *most as f64).clamp(0.0, 1.0)),
                RewardKind::Program(program) => program.judge(samples, stop)?,
            };
            by_reward.push(rewards.iter().sum());
            sums.iter_mut().zip(rewards).for_each(|(sum, reward)| *sum += *weight * reward);
        }
        let finite = |(of, sum): (&JudgedSample, f64)| match sum as f32 {
            reward if reward.is_finite() => Ok(reward),
            _ => Err(Error::Run(format!(
                "reward of {}, sample {}: the weighted sum is {sum}, beyond float32",
                of.place, of.sample
            ))),
        };
        Ok(Judged { sums: samples.iter().zip(sums).map(finite).collect::<Result<_>>()?, by_reward })
    }
}

impl Rewards {
    /// After the last sample of a step. Returns what went wrong and was repeated.
    pub fn end_step(&mut self, step: u64) -> Result<Vec<String>> {
        let mut failures = Vec::new();
        for (_, kind) in &mut self.all {
            if let RewardKind::Program(program) = kind {
                failures.extend(program.end_step(step)?);
            }
        }
        Ok(failures)
    }
}

/// The schema in a file.
fn schema(path: &str) -> std::result::Result<JsonSchema, String> {
    let bytes = open::read(Path::new(path)).map_err(|e| format!("the schema cannot be read ({e})"))?;
    let schema: Value = serde_json::from_slice(&bytes).map_err(|e| format!("the schema is not JSON ({e})"))?;
    JsonSchema::new(&schema).map_err(|what| format!("the schema at {what}"))
}

/// The right answers of a row as text, any of which will do: those in field `key`, else that of verl's rows. None: the
/// row has something else there.
fn answers(row: &JsonRow, key: &str) -> Option<Vec<String>> {
    let own = row.get(key).filter(|answer| !answer.is_null());
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        Value::Object(map) => number_in(map).map(String::from),
        _ => None,
    };
    match own.or_else(|| row.get(JUDGED)?.get("ground_truth")) {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(text).collect(),
        Some(one) => text(one).map(|answer| vec![answer]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rewards(names: &[&str]) -> Rewards {
        let mut s = Settings::default();
        s.objective.reward = Some(names.iter().map(|name| name.to_string()).collect());
        Rewards::new(&s).unwrap()
    }
    fn judge(names: &[&str], answer: Value, text: &str) -> f32 {
        let row = json!({"answer": answer}).as_object().unwrap().clone();
        let of = JudgedSample { row: &row, place: "p:1", sample: 0, step: 1, prompt: "", text, ids: &[1, 2, 3] };
        rewards(names).judge(&[of], &mut || None).unwrap().sums[0]
    }

    #[test]
    fn checkers_compare_text_numbers_patterns_and_lengths() {
        for (name, answer, text, reward) in [
            ("exact", json!("yes"), " yes\n", 1.0),
            ("exact", json!("yes"), "yes!", 0.0),
            ("exact", json!(12), "12", 1.0),
            ("exact", json!(["yes", "y"]), "y", 1.0),
            ("exact", json!(["yes", "y"]), "no", 0.0),
            ("number", json!(["2", 3]), "it is 2", 1.0),
            ("number", json!(["2", 3]), "2, no: 3", 1.0),
            ("number", json!(["2", 3]), "4", 0.0),
            ("number", json!("so 1,234"), "it is 1234.", 1.0),
            ("number", json!(-3), "2 - 5 = -3", 1.0),
            ("number", json!(3), "2-5", 0.0),
            ("number", json!(3), "none", 0.0),
            ("regex:^a+$", json!(null), "aaa", 1.0),
            ("regex:^a+$", json!(null), "aab", 0.0),
            ("json", json!(null), "{\"a\": [1]}", 1.0),
            ("json", json!(null), "{a}", 0.0),
            ("length:3", json!(null), "", 1.0),
            ("length:2", json!(null), "", 0.5),
            ("length:1", json!(null), "", 0.0),
        ] {
            assert_eq!(judge(&[name], answer, text), reward, "{name} {text}");
        }
        assert_eq!(judge(&["json", "regex:1"], json!(null), "1"), 2.0);
        // verl's rows have the answer within.
        let of_verl = json!({"reward_model": {"style": "rule", "ground_truth": "72"}}).as_object().unwrap().clone();
        let checker = rewards(&["number"]);
        let row = checker.read_of(of_verl);
        assert_eq!(answers(&row, ANSWER), Some(vec!["72".into()]));
        checker.check_row(&row, "p:1").unwrap();
    }

    #[test]
    fn rows_without_an_answer_are_refused() {
        for (row, says) in [
            (json!({"solution": 3}), "has no `answer`, with which --reward compares; its keys are: solution"),
            (json!({"answer": {"value": 3}}), "neither text, nor a number, nor a list"),
            (json!({"answer": [[3]]}), "neither text, nor a number, nor a list"),
            (json!({"answer": []}), "has no `answer`"),
            (json!({"answer": ["a", "b"]}), "has no number in its `answer`"),
        ] {
            let fault = rewards(&["number"]).check_row(row.as_object().unwrap(), "p:1").unwrap_err().to_string();
            assert!(fault.contains(says), "{row}: {fault}");
        }
        let mut s = Settings::default();
        (s.objective.reward, s.data.output_key) = (Some(vec!["number".into()]), Some("solution".into()));
        let row = json!({"answer": "none", "solution": "3"}).as_object().unwrap().clone();
        let mut named = Rewards::new(&s).unwrap();
        let row = named.read_of(row);
        named.check_row(&row, "p:1").unwrap();
        let of = JudgedSample { row: &row, place: "p:1", sample: 0, step: 1, prompt: "", text: "3", ids: &[1] };
        assert_eq!(named.judge(&[of], &mut || None).unwrap().sums, [1.0]);
    }
}
