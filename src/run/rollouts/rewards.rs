//! Rewards of samples: built-in checkers, and programs that read and write JSON lines. Never samples, and never trains.
use crate::base::{Error, Result, quote};
use crate::run::settings::Settings;
use regex::Regex;
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// The field of a prompt's row that checkers compare with.
const ANSWER: &str = "answer";

/// A sample to be judged.
pub struct JudgedSample<'a> {
    /// The prompt's row, and where it is from.
    pub row: &'a Map<String, Value>,
    pub place: &'a str,
    pub sample: usize,
    pub step: u64,
    pub prompt: &'a str,
    pub text: &'a str,
    pub ids: &'a [u32],
}

enum RewardKind {
    /// The text is the row's answer, without white space around them.
    Exact,
    /// The last number of the text is the last one of the row's answer.
    Number,
    Pattern(Regex),
    /// The text is JSON.
    Json,
    /// 1 up to so many tokens, and 0 from twice as many on.
    Length(usize),
    Program(RewardProgram),
}

/// The weighted sum of several rewards.
pub struct Rewards {
    all: Vec<(f64, RewardKind)>,
}

impl Rewards {
    /// Refuses rewards that cannot be computed, without starting a program.
    pub fn check(s: &Settings) -> Result<()> {
        Rewards::new(s).map(|_| ())
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
                (_, Some(("regex", pattern))) => RewardKind::Pattern(
                    Regex::new(pattern).map_err(|e| bad(format!("is no regular expression ({e})")))?,
                ),
                (_, Some(("length", tokens))) => match tokens.parse() {
                    Ok(tokens) if tokens > 0 => RewardKind::Length(tokens),
                    _ => return Err(bad("needs a number of tokens, as in length:100".into())),
                },
                ("", _) => return Err(bad("is empty; name a checker or a command".into())),
                (command, _) => RewardKind::Program(RewardProgram { command: command.into(), timeout, running: None }),
            })
        };
        let all = names.iter().zip(weights).map(|(name, weight)| Ok((weight, kind(name)?)));
        Ok(Rewards { all: all.collect::<Result<_>>()? })
    }

    /// Refuses a row without the answer that a checker needs.
    pub fn check_row(&self, row: &Map<String, Value>, place: &str) -> Result<()> {
        let needs = self.all.iter().any(|(_, kind)| matches!(kind, RewardKind::Exact | RewardKind::Number));
        let counts = self.all.iter().any(|(_, kind)| matches!(kind, RewardKind::Number));
        let answer = answer(row);
        let wrong = match &answer {
            None if needs => "has no `answer`, with which --reward compares",
            Some(answer) if counts && last_number(answer).is_none() => "has no number in its `answer`",
            _ => return Ok(()),
        };
        Err(Error::input(format!("{place} {wrong}")))
    }

    /// The reward of a sample.
    pub fn judge(&mut self, of: &JudgedSample) -> Result<f32> {
        let mut sum = 0.0;
        for (weight, kind) in &mut self.all {
            let is = |right: bool| if right { 1.0 } else { 0.0 };
            let answer = answer(of.row);
            let reward = match kind {
                RewardKind::Exact => is(answer.is_some_and(|answer| answer.trim() == of.text.trim())),
                RewardKind::Number => {
                    let right = answer.as_deref().and_then(last_number);
                    is(right.is_some() && right == last_number(of.text))
                }
                RewardKind::Pattern(pattern) => is(pattern.is_match(of.text)),
                RewardKind::Json => is(serde_json::from_str::<serde::de::IgnoredAny>(of.text).is_ok()),
                RewardKind::Length(most) => (2.0 - of.ids.len() as f64 / *most as f64).clamp(0.0, 1.0),
                RewardKind::Program(program) => program.judge(of)?,
            };
            sum += *weight * reward;
        }
        let reward = sum as f32;
        if !reward.is_finite() {
            let (place, sample) = (of.place, of.sample);
            return Err(Error::Run(format!("reward of {place}, sample {sample}: the weighted sum is {sum}")));
        }
        Ok(reward)
    }
}

/// The row's answer as text.
fn answer(row: &Map<String, Value>) -> Option<String> {
    match row.get(ANSWER)? {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

/// The last number in a text; commas between digits are left out.
fn last_number(text: &str) -> Option<f64> {
    let is_part = |c: char| c.is_ascii_digit() || matches!(c, '.' | ',' | '-');
    let words = text.split(|c| !is_part(c)).filter(|word| word.contains(|c: char| c.is_ascii_digit()));
    let number = |word: &str| {
        let digits: String = word.trim_end_matches(['.', ',', '-']).chars().filter(|&c| c != ',').collect();
        let sign = digits.rfind('-').unwrap_or(0);
        digits[sign..].parse().ok()
    };
    words.rev().find_map(number)
}

/// A program that is started once, and again after a failure.
struct RewardProgram {
    command: String,
    timeout: Duration,
    running: Option<RunningProgram>,
}

struct RunningProgram {
    child: Child,
    input: ChildStdin,
    /// Lines of its output, until it ends.
    lines: Receiver<std::io::Result<String>>,
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

impl RewardProgram {
    /// The reward that the program writes for one line of input. A failed program is started again, once.
    fn judge(&mut self, of: &JudgedSample) -> Result<f64> {
        let line = json!({
            "prompt": of.prompt, "completion": of.text, "ids": of.ids, "row": of.row, "sample": of.sample, "step": of.step,
        });
        let mut why = String::new();
        for _ in 0..2 {
            match self.ask(&line.to_string()) {
                Ok(reward) => return Ok(reward),
                Err(what) => why = what,
            }
            self.running = None;
        }
        let (command, place, sample) = (&self.command, of.place, of.sample);
        Err(Error::Run(format!(
            "reward of {place}, sample {sample}: the program `{}` {why}, twice. Nothing was trained on this step's samples",
            quote(command)
        )))
    }
    fn ask(&mut self, line: &str) -> std::result::Result<f64, String> {
        let timeout = self.timeout;
        let running = match &mut self.running {
            Some(running) => running,
            None => self.running.insert(start(&self.command)?),
        };
        let sent = writeln!(running.input, "{line}").and_then(|()| running.input.flush());
        let answer = match (running.lines.recv_timeout(timeout), sent) {
            // Its end closes its input as well, sooner or later: its status says more.
            (Err(RecvTimeoutError::Disconnected), _) => {
                return Err(match running.child.wait() {
                    Ok(status) => format!("ended with {status}"),
                    Err(e) => format!("ended ({e})"),
                });
            }
            (_, Err(e)) => return Err(format!("cannot be written to ({e})")),
            (Ok(Ok(answer)), Ok(())) => answer,
            (Ok(Err(e)), Ok(())) => return Err(format!("cannot be read from ({e})")),
            (Err(RecvTimeoutError::Timeout), Ok(())) => {
                return Err(format!("wrote no line within --reward-timeout {}", timeout.as_secs_f64()));
            }
        };
        let parsed: Option<Value> = serde_json::from_str(&answer).ok();
        let number = parsed.and_then(|value| value.get("reward").unwrap_or(&value).as_f64());
        number.ok_or_else(|| format!("wrote {}, which is no number and no {{\"reward\": NUMBER}}", quote(answer)))
    }
}

fn start(command: &str) -> std::result::Result<RunningProgram, String> {
    let mut shell = Command::new("sh");
    // Its standard error is the rank's, and so in the log.
    shell.args(["-c", command]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = shell.spawn().map_err(|e| format!("cannot be started ({e})"))?;
    let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("has no standard input and output".into());
    };
    let (give, lines) = sync_channel(1);
    let read = move || {
        for line in BufReader::new(output).lines() {
            if give.send(line).is_err() {
                break;
            }
        }
    };
    let thread = std::thread::Builder::new().name("reward".into()).spawn(read);
    thread.map_err(|e| format!("cannot be read from ({e})"))?;
    Ok(RunningProgram { child, input, lines })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(names: &[&str], answer: Value, text: &str) -> f32 {
        let mut s = Settings::default();
        s.objective.reward = Some(names.iter().map(|name| name.to_string()).collect());
        let row = json!({"answer": answer}).as_object().unwrap().clone();
        let of = JudgedSample { row: &row, place: "p:1", sample: 0, step: 1, prompt: "", text, ids: &[1, 2, 3] };
        Rewards::new(&s).unwrap().judge(&of).unwrap()
    }

    #[test]
    fn checkers_compare_text_numbers_patterns_and_lengths() {
        for (name, answer, text, reward) in [
            ("exact", json!("yes"), " yes\n", 1.0),
            ("exact", json!("yes"), "yes!", 0.0),
            ("exact", json!(12), "12", 1.0),
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
    }

    #[test]
    fn a_program_answers_line_by_line_and_its_failures_are_named() {
        assert_eq!(judge(&["while read l; do echo '{\"reward\": 0.5}'; done"], json!(null), ""), 0.5);
        for (command, seconds, says) in [
            ("exit 3", 60.0, "exit status: 3"),
            ("while read l; do echo nan; done", 60.0, "wrote nan, which is no number"),
            ("sleep 5", 0.05, "wrote no line within --reward-timeout 0.05"),
        ] {
            let mut s = Settings::default();
            (s.objective.reward, s.objective.reward_timeout) = (Some(vec![command.into()]), Some(seconds));
            let row = Map::new();
            let of = JudgedSample { row: &row, place: "p:1", sample: 2, step: 1, prompt: "", text: "", ids: &[] };
            let e = Rewards::new(&s).unwrap().judge(&of).unwrap_err().to_string();
            let parts = [says, "p:1, sample 2", command.split(' ').next().unwrap()];
            assert!(parts.iter().all(|part| e.contains(part)), "{command}: {e}");
        }
    }
}
