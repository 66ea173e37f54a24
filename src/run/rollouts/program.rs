//! Programs that judge samples: a line of JSON in, a line of JSON out. A program is started once, and again after a
//! failure; nothing that it does can hang a run, fill its memory, or pass for another sample's reward. Never trains.
use crate::base::{Error, Result, quote};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// The longest line that a program may write.
const LINE: usize = 64 << 10;
/// What a program writes without being asked comes at once: it is here by this time after the last answer of a step.
const SETTLES: Duration = Duration::from_millis(50);
/// Between closing its output and ending.
const ENDS: Duration = Duration::from_secs(1);
/// A signal to the run is noticed within this time, however long a program takes.
const POLLS: Duration = Duration::from_millis(100);

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

/// A program that is started once, and again after a failure.
pub struct RewardProgram {
    command: String,
    timeout: Duration,
    running: Option<RunningProgram>,
    /// Failures after which it was started again, since they were last taken.
    failures: Vec<String>,
}

/// Why there is no reward.
enum Unrewarded {
    /// Another start may help.
    Again(String),
    Final(String),
    /// The run is to stop, by this signal.
    Stopped(i32),
}

struct RunningProgram {
    child: Child,
    /// Lines for it; a thread writes them, because a program that reads nothing would block.
    asked: Sender<String>,
    /// Lines of its output, until it ends.
    lines: Receiver<std::io::Result<Vec<u8>>>,
}

impl Drop for RunningProgram {
    /// Ends the program with all that it has started, which would hold its pipes.
    fn drop(&mut self) {
        if let Some(group) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process_group(group, Signal::KILL); // it may have ended
        }
        let _ = self.child.wait();
    }
}

impl RewardProgram {
    pub fn new(command: &str, timeout: Duration) -> RewardProgram {
        RewardProgram { command: command.into(), timeout, running: None, failures: Vec::new() }
    }
    /// Refuses a command that cannot start.
    pub fn check(&self) -> Result<()> {
        let command = quote(&self.command);
        if Path::new(&self.command).is_dir() {
            return Err(Error::input(format!(
                "--reward {command}: is a directory. A reward is a checker or a command; a model scores samples only in a \
                 command that runs it"
            )));
        }
        if self.is_known() {
            return Ok(());
        }
        Err(Error::input(format!(
            "--reward {command}: is no checker (exact, number, regex:PATTERN, json, json-schema:FILE, length:TOKENS), and the \
             shell knows no command of this name"
        )))
    }
    /// Whether the shell knows what the command starts with. What is more than a plain word is left to it.
    fn is_known(&self) -> bool {
        let word = self.command.split_whitespace().next().unwrap_or_default();
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-./+:@%,".contains(c);
        if !word.chars().all(plain) {
            return true;
        }
        let mut shell = Command::new("sh");
        shell.args(["-c", "command -v -- \"$1\"", "sh", word]).stdin(Stdio::null()).stdout(Stdio::null());
        shell.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    }

    /// The rewards that the program writes, a line for each sample in their order. It has all lines of input at once,
    /// so that it may work on several. A failed program is started again, once for each sample. [`Error::Signal`] once
    /// `stop` has one.
    pub fn judge(&mut self, samples: &[JudgedSample], stop: &mut dyn FnMut() -> Option<i32>) -> Result<Vec<f64>> {
        let line = |of: &JudgedSample| {
            let (prompt, completion) = (of.prompt, of.text);
            let (ids, row, sample, step) = (of.ids, of.row, of.sample, of.step);
            json!({"prompt": prompt, "completion": completion, "ids": ids, "row": row, "sample": sample, "step": step})
                .to_string()
        };
        let lines: Vec<String> = samples.iter().map(line).collect();
        let mut rewards = Vec::with_capacity(samples.len());
        // Whether the program has the lines; and whether this sample's first answer was none.
        let (mut asked, mut again) = (false, false);
        while let Some(of) = samples.get(rewards.len()) {
            let (why, times) = match self.next(&lines[rewards.len()..], asked, stop) {
                Ok(reward) => {
                    rewards.push(reward);
                    (asked, again) = (true, false);
                    continue;
                }
                Err(Unrewarded::Again(why)) if !again => {
                    self.running = None;
                    let (place, sample) = (of.place, of.sample);
                    self.failures
                        .push(format!("the program `{}` {why} ({place}, sample {sample})", quote(&self.command)));
                    (asked, again) = (false, true);
                    continue;
                }
                Err(Unrewarded::Again(why)) => (why, ", twice"),
                Err(Unrewarded::Final(why)) => (why, ""),
                Err(Unrewarded::Stopped(signal)) => {
                    self.running = None;
                    return Err(Error::Signal(signal));
                }
            };
            self.running = None;
            let (command, place, sample) = (&self.command, of.place, of.sample);
            return Err(Error::Run(format!(
                "reward of {place}, sample {sample}: the program `{}` {why}{times}. Nothing was trained on this step's samples",
                quote(command)
            )));
        }
        Ok(rewards)
    }
    /// After the last sample of a step: refuses a program that has written more lines than it was asked for. Returns
    /// the failures after which it was started again.
    pub fn end_step(&mut self, step: u64) -> Result<Vec<String>> {
        let more = self.running.as_ref().and_then(|running| running.lines.recv_timeout(SETTLES).ok());
        match more {
            None => Ok(std::mem::take(&mut self.failures)),
            Some(line) => Err(Error::Run(format!(
                "rewards of step {step}: the program `{}` {}. Nothing was trained on this step's samples",
                quote(&self.command),
                unasked(line)
            ))),
        }
    }

    /// The answer to the first of the lines, which the program gets unless it was `asked` them.
    fn next(
        &mut self,
        lines: &[String],
        asked: bool,
        stop: &mut dyn FnMut() -> Option<i32>,
    ) -> std::result::Result<f64, Unrewarded> {
        let timeout = self.timeout;
        let running = match &mut self.running {
            Some(running) => running,
            None => self.running.insert(start(&self.command).map_err(Unrewarded::Again)?),
        };
        if !asked {
            match running.lines.try_recv() {
                Ok(line) => return Err(Unrewarded::Final(unasked(line))),
                Err(TryRecvError::Disconnected) => return Err(Unrewarded::Again(ended(&mut running.child))),
                Err(TryRecvError::Empty) => {}
            }
            for line in lines {
                // A program that is gone says so with its output's end.
                let _ = running.asked.send(line.clone());
            }
        }
        let began = Instant::now();
        let answered = loop {
            let left = timeout.saturating_sub(began.elapsed());
            match running.lines.recv_timeout(left.min(POLLS)) {
                Err(RecvTimeoutError::Timeout) if left > POLLS => {
                    if let Some(signal) = stop() {
                        return Err(Unrewarded::Stopped(signal));
                    }
                }
                answered => break answered,
            }
        };
        let answer = match answered {
            Ok(Ok(answer)) => answer,
            Ok(Err(e)) => return Err(Unrewarded::Again(format!("cannot be read from ({e})"))),
            Err(RecvTimeoutError::Disconnected) => return Err(Unrewarded::Again(ended(&mut running.child))),
            Err(RecvTimeoutError::Timeout) => {
                let timeout = timeout.as_secs_f64();
                return Err(Unrewarded::Again(format!(
                    "wrote no line within --reward-timeout {timeout} (a line counts once it is flushed)"
                )));
            }
        };
        if answer.len() > LINE {
            return Err(Unrewarded::Again(format!("wrote a line of more than {} KiB", LINE >> 10)));
        }
        let parsed: Option<Value> = serde_json::from_slice(&answer).ok();
        // A shell or Python may write .5, 1., +1 or True, which JSON does not have.
        let plain = || match std::str::from_utf8(&answer).ok()?.trim() {
            "True" => Some(1.0),
            "False" => Some(0.0),
            number => number.parse().ok(),
        };
        let of = |value: &Value| value.as_bool().map(|right| f64::from(u8::from(right))).or(value.as_f64());
        let number = parsed.map_or_else(plain, |value| of(value.get("reward").unwrap_or(&value)));
        number.filter(|x| x.is_finite()).ok_or_else(|| {
            let shown = String::from_utf8_lossy(&answer);
            Unrewarded::Again(format!(
                "wrote \"{}\", which is no number and no {{\"reward\": NUMBER}}",
                quote(shown.trim_end())
            ))
        })
    }
}

fn unasked(line: std::io::Result<Vec<u8>>) -> String {
    let shown = line.map_or_else(|e| e.to_string(), |line| String::from_utf8_lossy(&line).trim_end().to_string());
    format!("wrote more lines than it was asked for (\"{}\"): it must write one line for each sample", quote(shown))
}

/// How a program ended that has closed its output.
fn ended(child: &mut Child) -> String {
    let deadline = Instant::now() + ENDS;
    loop {
        let status: std::io::Result<Option<ExitStatus>> = child.try_wait();
        match status {
            Ok(Some(status)) => return format!("ended with {status}"),
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(2)),
            Ok(None) => return "closed its standard output".into(),
            Err(e) => return format!("ended ({e})"),
        }
    }
}

fn start(command: &str) -> std::result::Result<RunningProgram, String> {
    let mut shell = Command::new("sh");
    // Its standard error is the rank's, and so in the log. Its own process group: a Ctrl-C is for the run, which ends
    // after its step, and what the shell starts ends with it.
    shell.args(["-c", command]).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
    let mut child = shell.spawn().map_err(|e| format!("cannot be started ({e})"))?;
    let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("has no standard input and output".into());
    };
    let (give, lines) = sync_channel(1);
    let read = move || {
        let mut output = BufReader::new(output);
        loop {
            let mut line = Vec::new();
            let read = output.by_ref().take(LINE as u64 + 1).read_until(b'\n', &mut line);
            let over = match &read {
                Ok(0) => break,
                Ok(_) => line.len() > LINE,
                Err(_) => true,
            };
            if give.send(read.map(|_| line)).is_err() || over {
                break;
            }
        }
    };
    let (asked, asks) = channel::<String>();
    let write = move || {
        for line in asks {
            if writeln!(input, "{line}").and_then(|()| input.flush()).is_err() {
                break;
            }
        }
    };
    let spawn = |work: Box<dyn FnOnce() + Send>| thread::Builder::new().name("reward".into()).spawn(work);
    let running = RunningProgram { child, asked, lines };
    spawn(Box::new(read)).map_err(|e| format!("cannot be read from ({e})"))?;
    spawn(Box::new(write)).map_err(|e| format!("cannot be written to ({e})"))?;
    Ok(running)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECONDS: f64 = 20.0;

    /// What a program says of some samples, one after another, and of their step.
    fn judged(command: &str, timeout: f64, samples: usize) -> (Vec<f64>, Vec<String>, String) {
        let mut program = RewardProgram::new(command, Duration::from_secs_f64(timeout));
        let row = json!({"answer": 3}).as_object().unwrap().clone();
        let texts: Vec<String> = (0..samples).map(|sample| "x".repeat(100_000 * sample)).collect();
        let of =
            |(sample, text)| JudgedSample { row: &row, place: "p:1", sample, step: 7, prompt: "q", text, ids: &[1] };
        let samples: Vec<JudgedSample> = texts.iter().map(String::as_str).enumerate().map(of).collect();
        let rewards = match program.judge(&samples, &mut || None) {
            Ok(rewards) => rewards,
            Err(e) => return (Vec::new(), program.failures, e.to_string()),
        };
        match program.end_step(7) {
            Ok(failures) => (rewards, failures, String::new()),
            Err(e) => (rewards, Vec::new(), e.to_string()),
        }
    }

    #[test]
    fn programs_answer_line_by_line_and_may_end_between_samples() {
        for (command, failures) in [
            ("while read l; do echo 0.5; done", 0),
            ("while read l; do echo ' {\"reward\": 5e-1, \"why\": \"so\"}\r'; done", 0),
            ("while read l; do echo +.5; done", 0),
            ("echo noise >&2; while read l; do echo noise >&2; echo 0.5; done", 0),
            ("read l; echo 0.5; exit 3", 2), // it ends after each sample
        ] {
            let (rewards, failed, error) = judged(command, SECONDS, 3);
            assert_eq!((&rewards[..], &error[..]), (&[0.5; 3][..], ""), "{command}");
            assert_eq!(failed.len(), failures, "{command}: {failed:?}");
            assert!(
                failed.iter().all(|why| why.contains("exit status: 3") && why.contains("p:1, sample")),
                "{failed:?}"
            );
        }
    }

    #[test]
    fn truth_is_a_reward_of_one() {
        for (line, reward) in [("true", 1.0), ("{\\\"reward\\\": false}", 0.0), ("True", 1.0), ("False", 0.0)] {
            let (rewards, _, error) = judged(&format!("while read l; do echo \"{line}\"; done"), SECONDS, 2);
            assert_eq!((rewards, &error[..]), (vec![reward; 2], ""), "{line}");
        }
    }

    #[test]
    fn a_program_has_all_samples_at_once() {
        let (rewards, failed, error) =
            judged("read a && read b && read c && echo 1; echo 2; echo 3; read l", SECONDS, 3);
        assert_eq!((&rewards[..], failed.len(), &error[..]), (&[1.0, 2.0, 3.0][..], 0, ""));
    }

    #[test]
    fn what_is_no_reward_names_the_sample_the_command_and_why() {
        for (command, says) in [
            ("exit 3", "ended with exit status: 3, twice"),
            ("kill -9 $$", "ended with signal: 9"),
            ("exec >&-; sleep 60", "closed its standard output, twice"),
            ("no-such-program-here", "ended with exit status: 127"),
            ("while read l; do echo NaN; done", "wrote \"NaN\", which is no number"),
            ("while read l; do echo '{\"reward\": NaN}'; done", "which is no number"),
            ("while read l; do echo 1e999; done", "which is no number"),
            ("while read l; do echo Infinity; done", "which is no number"),
            ("while read l; do echo '\"0.5\"'; done", "which is no number"),
            ("while read l; do echo '{\"score\": 1}'; done", "which is no number"),
            ("while read l; do echo yes; done", "which is no number"),
            ("while read l; do echo; done", "wrote \"\", which is no number"),
            ("while read l; do printf '\\377\\n'; done", "which is no number"),
            ("yes | tr -d '\\n'", "wrote a line of more than 64 KiB"),
        ] {
            let (rewards, _, error) = judged(command, SECONDS, 1);
            assert!(rewards.is_empty(), "{command}: {rewards:?}");
            assert!([says, "p:1, sample 0", "Nothing was trained"].iter().all(|part| error.contains(part)), "{error}");
        }
    }

    /// One that reads nothing, with more input than a pipe holds; one that stops; and one whose child keeps its pipes.
    #[test]
    fn a_program_that_hangs_ends_with_all_that_it_started() {
        // Where an answer is expected, a busy machine has the time for it.
        let (_, failed, error) = judged("read l; echo 1; sleep 60 & sleep 60", SECONDS, 1);
        assert_eq!((failed.len(), &error[..]), (0, ""));
        let (_, failed, error) = judged("sleep 60 & sleep 60", 0.2, 2);
        assert!(error.contains("wrote no line within --reward-timeout 0.2") && failed.len() == 1, "{error}");
        let (rewards, failed, error) = judged("read l; echo 1; sleep 60; echo 1", 5.0, 2);
        assert_eq!((&rewards[..], failed.len(), &error[..]), (&[1.0; 2][..], 1, ""), "it is started again");
    }

    #[test]
    fn a_signal_to_the_run_ends_a_program_that_hangs() {
        let mut program = RewardProgram::new("sleep 60", Duration::from_secs_f64(SECONDS));
        let row = Map::new();
        let of = JudgedSample { row: &row, place: "p:1", sample: 0, step: 7, prompt: "q", text: "", ids: &[1] };
        let (began, mut asked) = (Instant::now(), 0);
        let mut stop = || {
            asked += 1;
            (asked > 2).then_some(15)
        };
        assert!(matches!(program.judge(&[of], &mut stop), Err(Error::Signal(15))));
        assert!(began.elapsed() < Duration::from_secs_f64(SECONDS / 2.0));
    }

    #[test]
    fn lines_that_were_not_asked_for_are_no_rewards() {
        for command in ["while read l; do echo 1; echo 2; done", "while read l; do printf '1\\n2\\n'; done", "yes 1"] {
            let (_, _, error) = judged(command, SECONDS, 3);
            assert!(error.contains("wrote more lines than it was asked for"), "{command}: {error}");
        }
    }

    #[test]
    fn the_shell_knows_the_first_word_of_a_command() {
        let known = |command: &str| RewardProgram::new(command, Duration::ZERO).is_known();
        assert!(["cat", "sh judge.sh", "cd x && y", "A=1 unknown", "while read l; do :; done"].into_iter().all(known));
        assert!(!known("exakt") && !known("no-such-program --flag") && !known("./no/such/file"));
    }
}
