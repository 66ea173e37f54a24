//! `--chat`: a conversation with the model in a terminal, streamed, with its history, which is computed once. One
//! process holds the model, since only that process has the terminal. Never trains, and writes no file.
use super::TextStream;
use super::ends::end_of_turn;
use super::model::TextModel;
use super::prompts;
use crate::base::{Error, Result};
use crate::comm::env::RankEnv;
use crate::comm::shm::Arena;
use crate::data::ChatTemplate;
use crate::engine::{Generator, Sampling};
use crate::run::plan::data;
use crate::run::settings::Settings;
use crate::run::settings::value::set;
use crate::run::watch::RunLog;
use signal_hook::consts::SIGINT;
use signal_hook::flag;
use std::io::{BufRead, IsTerminal, Write, stderr, stdin, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Tokens of the longest conversation, unless longer answers are asked for. The cache of keys and values is allocated
/// for all of them.
const LONGEST: usize = 4096;
/// Status of a process that Ctrl-C ended.
const INTERRUPTED: i32 = 128 + SIGINT;
const HELP: &str = "\
/reset        forget the conversation
/system TEXT  begin anew with this system prompt
/quit         leave (or Ctrl-D)
Ctrl-C stops an answer.";

/// Answers the lines of standard input on standard output, until its end.
pub fn main(mut s: Settings, launched: Option<&RankEnv>) -> Result<()> {
    let nproc = launched.map_or(s.run.nproc_per_node.unwrap_or(1), |env| env.world);
    if nproc != 1 {
        return Err(Error::input(format!(
            "--chat on {nproc} ranks: one process holds the model and the terminal. Remove --nproc-per-node, and start \
             it without a launcher"
        )));
    }
    s.run.nproc_per_node = Some(1);
    let arena = Arena::create(1)?;
    let env = RankEnv::alone(arena.fd());
    let mut model = TextModel::new(s, None)?;
    let settings = &model.settings;
    let positions = model.spec.max_len;
    let asked = set(&settings.generate.max_new_tokens, "generate.max_new_tokens")?;
    let count = asked.min(positions / 2).max(1);
    let context = positions.min(LONGEST.max(2 * count));
    let Some(template) = data::format(&settings.data, &model.tokenizer)?.chat else {
        return Err(Error::input(
            "--chat needs a chat template, and the model's tokenizer has none: add --tokenizer-chat-template FILE, or use \
             --generate PROMPT",
        ));
    };
    model.tokenizer.usable()?;
    let idle = prompts::without_rows(settings);
    RunLog::open(&settings.watch, None)?.notes(&settings.notes.iter().cloned().chain(idle).collect::<Vec<_>>());
    let system = settings.generate.system_prompt.clone();
    let plan = model.plan(context - count, count, 1)?;
    model.load(&env, &plan, |generator, _| {
        let limit = if count < asked { "half of the model's positions" } else { "--max-new-tokens" };
        let (messages, room) = (Vec::new(), context - count);
        let chat = Chat { model: &model, template: &template, messages, room, count, limit };
        chat.talk(generator, system)
    })
}

struct Chat<'a> {
    model: &'a TextModel,
    template: &'a ChatTemplate,
    /// Role and content.
    messages: Vec<(&'static str, String)>,
    /// Tokens of the longest prompt, and of the longest answer.
    room: usize,
    count: usize,
    /// What ends an answer there.
    limit: &'static str,
}

impl Chat<'_> {
    fn talk(mut self, generator: &mut Generator, system: Option<String>) -> Result<()> {
        let failed = |e| Error::Run(format!("signal handlers: {e}"));
        let (stop, waiting) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
        flag::register_conditional_shutdown(SIGINT, INTERRUPTED, waiting.clone()).map_err(failed)?;
        flag::register(SIGINT, stop.clone()).map_err(failed)?;
        let terminal = stdin().is_terminal();
        if terminal {
            let _ = writeln!(stderr(), "{HELP}");
        }
        self.begin(system);
        for turn in 0.. {
            if terminal {
                let _ = write!(stderr(), "\n> ");
            }
            let mut line = String::new();
            let read = stdin().lock().read_line(&mut line).map_err(|e| Error::io("read", "standard input", e))?;
            let line = line.trim();
            match line.split_once(' ').map_or((line, ""), |(word, rest)| (word, rest.trim())) {
                _ if read == 0 => break,
                ("", _) => {}
                ("/quit" | "/exit", "") => break,
                ("/help", "") => drop(writeln!(stderr(), "{HELP}")),
                ("/reset", "") => {
                    let system = self.messages.first().filter(|(role, _)| *role == "system").cloned();
                    self.begin(system.map(|(_, text)| text));
                }
                ("/system", text) => self.begin(Some(text.to_string()).filter(|text| !text.is_empty())),
                (word, _) if word.starts_with('/') && !word[1..].contains('/') => {
                    let _ = writeln!(stderr(), "{word} is not a command:\n{HELP}");
                }
                _ => {
                    stop.store(false, Ordering::Relaxed);
                    waiting.store(false, Ordering::Relaxed);
                    self.answer(generator, line.to_string(), turn, &stop)?;
                    waiting.store(true, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, system: Option<String>) {
        self.messages = system.map(|text| ("system", text)).into_iter().collect();
    }

    fn answer(&mut self, generator: &mut Generator, asked: String, turn: u64, stop: &AtomicBool) -> Result<()> {
        self.messages.push(("user", asked));
        let Some(prompt) = self.prompt()? else {
            self.messages.pop();
            let _ = writeln!(stderr(), "that is longer than {} tokens: shorten it", self.room);
            return Ok(());
        };
        let TextModel { tokenizer, sampling, .. } = self.model;
        let sampling = Sampling { seed: sampling.seed.wrapping_add(turn), ..*sampling };
        let ends = self.ends();
        let strings = self.model.settings.generate.stop.as_deref().unwrap_or_default();
        let mut text = TextStream::new(tokenizer, true);
        let started = Instant::now();
        let mut ended = false;
        let written = generator.generate(&prompt, self.count, &sampling, &mut |token| {
            ended = ends.contains(&token);
            if !ended {
                text.push(token, strings);
            }
            !ended && text.is_open() && !stop.load(Ordering::Relaxed)
        })?;
        let speed = written.len() as f64 / started.elapsed().as_secs_f64();
        let answer = text.end(strings)?;
        if stdin().is_terminal() {
            let why = match (ended, stop.load(Ordering::Relaxed)) {
                (true, _) => "",
                (_, true) => ", stopped",
                _ => &format!(", cut at {}", self.limit),
            };
            let _ = writeln!(stderr(), "[{} tokens, {speed:.1} tok/s{why}]", written.len());
        }
        let _ = stdout().flush();
        self.messages.push(("assistant", answer));
        Ok(())
    }

    /// The tokens of the conversation up to the next answer, without the oldest turns if there is no room for them.
    fn prompt(&mut self) -> Result<Option<Vec<u32>>> {
        let mut forgotten = 0;
        loop {
            let messages: Vec<(&str, &str)> = self.messages.iter().map(|(role, text)| (*role, &text[..])).collect();
            let text = self.template.asked(&messages);
            let text = text.map_err(|what| Error::input(format!("--chat: the chat template: {what}")))?;
            let mut tokens = Vec::new();
            self.model.tokenizer.encode(&text, &mut tokens)?;
            if !tokens.is_empty() && tokens.len() <= self.room {
                if forgotten > 0 {
                    let _ = writeln!(stderr(), "[{forgotten} earlier messages no longer fit and are forgotten]");
                }
                return Ok(Some(tokens));
            }
            // A question with its answer, after the system prompt.
            let first = usize::from(self.messages.first().is_some_and(|(role, _)| *role == "system"));
            if self.messages.len() < first + 3 {
                return Ok(None);
            }
            self.messages.drain(first..first + 2);
            forgotten += 2;
        }
    }

    /// Tokens that end an answer: the model's, and the one that ends a turn in the template.
    fn ends(&self) -> Vec<u32> {
        let mut ends = self.model.stop.clone();
        ends.extend(end_of_turn(self.template, &self.model.tokenizer));
        ends
    }
}
