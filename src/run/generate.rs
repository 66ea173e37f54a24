//! `--generate "prompt"`: generates text with a checkpoint, a model directory, or an adapter's and its base model,
//! sharded over ranks, and streams it to standard output. Never trains and writes no file.

/// A conversation in a terminal.
pub mod chat;
/// A model that writes text.
mod model;

use crate::base::{Error, Result};
use crate::comm::env::RankEnv;
use crate::data::Tokenizer;
use crate::run::launch::{self, Launch, RankJob};
use crate::run::plan::data;
use crate::run::settings::Settings;
use crate::run::settings::value::set;
use crate::run::watch::RunLog;
pub use model::base_name;
use model::{TextModel, WeightPlan};
use std::io::{ErrorKind, Write};
use std::time::{Duration, Instant};

/// Prints the model's continuation of `prompt` on standard output.
pub fn main(settings: Settings, launched: Option<&RankEnv>, prompt: &str) -> Result<()> {
    let job = RankJob::Generate(Box::new(settings.clone()), prompt.to_string());
    let watch = settings.watch.clone();
    let request = Request::new(settings, launched, prompt)?;
    if launched.is_none_or(|env| env.rank == 0 && env.parent_pid.is_none()) {
        RunLog::open(&watch, launched)?.notes(&request.model.settings.notes);
    }
    match launched {
        Some(env) => request.run(env),
        None => launch::run(&Launch {
            nproc: request.model.ranks.nproc,
            ranks_per_gpu: request.model.ranks.ranks_per_gpu,
            job: &job,
            poll: Duration::from_millis(10),
            signals: &request.model.settings.faults.signals()?,
            deadline: None,
        }),
    }
}

/// Everything that a rank needs.
struct Request {
    model: TextModel,
    plan: WeightPlan,
    /// The prompt's tokens.
    prompt: Vec<u32>,
    /// Maximum number of new tokens.
    count: usize,
}

impl Request {
    fn new(s: Settings, launched: Option<&RankEnv>, prompt: &str) -> Result<Request> {
        let mut model = TextModel::new(s, launched)?;
        let (spec, tokenizer) = (&model.spec, &model.tokenizer);
        let mut tokens = Vec::new();
        let bad = |e| Error::input(format!("--generate: the prompt {e}"));
        let system = model.settings.generate.system_prompt.as_deref();
        match (tokenizer, data::format(&model.settings.data, tokenizer)?.asked(system, prompt)?) {
            (Tokenizer::None(why), asked) => tokens = ids(&asked.unwrap_or(prompt.into()), spec.vocab, why)?,
            (_, Some(asked)) => tokenizer.encode(&asked, &mut tokens).map_err(bad)?,
            (_, None) => {
                tokens.extend(tokenizer.affixes().0);
                tokenizer.encode(prompt, &mut tokens).map_err(bad)?;
            }
        }
        let room = spec.max_len.saturating_sub(tokens.len());
        if tokens.is_empty() {
            return Err(Error::input("--generate: the prompt is empty: give it at least one token"));
        }
        if room == 0 {
            return Err(Error::input(format!(
                "--generate: the prompt has {} tokens, but the model's max_positions is {}: shorten it",
                tokens.len(),
                spec.max_len
            )));
        }
        let count = set(&model.settings.generate.max_new_tokens, "generate.max_new_tokens")?.min(room);
        let plan = model.plan(tokens.len(), count)?;
        Ok(Request { model, plan, prompt: tokens, count })
    }

    /// This process's rank.
    fn run(&self, env: &RankEnv) -> Result<()> {
        let TextModel { tokenizer, stop, sampling, .. } = &self.model;
        self.model.load(env, &self.plan, |generator, mesh| {
            let started = Instant::now();
            let mut text = TextStream::new(tokenizer, mesh.rank() == 0);
            let written = generator.generate(&self.prompt, self.count, sampling, &mut |token| {
                let more = !stop.contains(&token);
                if more {
                    text.push(token);
                }
                more && text.is_open()
            })?;
            let (first, count) = (text.first, text.tokens.len());
            text.end()?;
            if first {
                let speed = written.len() as f64 / started.elapsed().as_secs_f64();
                let _ = writeln!(std::io::stderr(), "{count} tokens, {speed:.1} tok/s");
            }
            Ok(())
        })
    }
}

/// Generated text, streamed to standard output.
struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// Bytes already printed.
    shown: usize,
    /// Only rank 0 prints.
    first: bool,
    /// Why printing failed.
    failed: Option<std::io::Error>,
}

impl<'a> TextStream<'a> {
    fn new(tokenizer: &'a Tokenizer, first: bool) -> TextStream<'a> {
        TextStream { tokenizer, tokens: Vec::new(), shown: 0, first, failed: None }
    }
    fn push(&mut self, token: u32) {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens);
        // A character may take several tokens and decodes as U+FFFD until the last of them.
        if !text.ends_with('\u{fffd}') {
            self.show(&text);
        }
    }
    fn show(&mut self, text: &str) {
        if let Some(new) = text.get(self.shown..).filter(|new| self.first && !new.is_empty()) {
            self.shown = text.len();
            let mut out = std::io::stdout();
            let written = out.write_all(new.as_bytes()).and_then(|()| out.flush());
            // A missing reader is not a failure.
            self.failed = written.err().filter(|e| e.kind() != ErrorKind::BrokenPipe);
        }
    }
    /// Whether the text can still be written.
    fn is_open(&self) -> bool {
        self.failed.is_none()
    }
    /// Ends the line. Returns the whole text.
    fn end(mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.tokens);
        if self.failed.is_none() {
            self.show(&format!("{text}\n"));
        }
        self.failed.map_or(Ok(text), |e| Err(Error::io("write", "standard output", e)))
    }
}

/// The prompt of a model without a tokenizer: token ids, separated by spaces or commas.
fn ids(prompt: &str, vocab: usize, why: &str) -> Result<Vec<u32>> {
    let words = prompt.split(|c: char| c.is_whitespace() || c == ',').filter(|word| !word.is_empty());
    let id = |word: &str| match word.parse() {
        Ok(id) if (id as usize) < vocab => Ok(id),
        Ok(id) => Err(Error::input(format!("--generate: the prompt has token id {id}, but vocab_size is {vocab}"))),
        Err(_) => Err(Error::input(format!(
            "--generate: no tokenizer for the prompt: {why}. Or give token ids, such as \"3 17 5\""
        ))),
    };
    words.map(id).collect()
}
