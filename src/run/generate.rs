//! `--generate "prompt"`: generates text with a checkpoint, a model directory, or an adapter's and its base model,
//! sharded over ranks, and streams it to standard output; of prompts in rows, all at once, as JSON lines. Never
//! trains and writes no file.

/// A conversation in a terminal.
pub mod chat;
/// What ends a text.
pub mod ends;
/// A model that writes text.
mod model;
/// Prompts, and their tokens.
pub mod prompts;
/// What a model's files suggest.
mod suggested;

use crate::base::{Error, Result, on_terminal};
use crate::comm::Mesh;
use crate::comm::env::RankEnv;
use crate::data::{JsonRow, Tokenizer};
use crate::engine::{Generator, Prompt, Sampled, SamplerSize};
use crate::run::launch::{self, Launch, RankJob};
use crate::run::plan::data;
use crate::run::settings::Settings;
use crate::run::settings::value::set;
use crate::run::watch::RunLog;
use ends::{TextEnds, cut, end_of_turn};
pub use model::base_name;
use model::{TextModel, WeightPlan};
use prompts::{ANSWERED, EncodedPrompt, PromptEncoder, PromptField, PromptKind, PromptRow, SkippedRows};
use serde_json::json;
use std::borrow::Cow;
use std::io::{BufWriter, ErrorKind, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Instant;

/// The word that stands for standard input.
const STDIN: &str = "-";

/// Prints the model's continuation of `prompt` on standard output.
pub fn main(settings: Settings, launched: Option<&RankEnv>, prompt: &str) -> Result<()> {
    let piped = if prompt == STDIN { Some(piped(launched)?) } else { None };
    // What is piped is a text, though a file may have its name.
    let is_file = piped.is_none() && prompts::is_file(prompt);
    asked(settings, launched, piped.as_deref().unwrap_or(prompt), is_file)
}

/// The same of a prompt that is a text, or names a file.
pub fn asked(settings: Settings, launched: Option<&RankEnv>, prompt: &str, is_file: bool) -> Result<()> {
    let job = RankJob::Generate { settings: Box::new(settings.clone()), prompt: prompt.to_string(), is_file };
    let watch = settings.watch.clone();
    let request = Request::new(settings, launched, prompt, is_file)?;
    if launched.is_none_or(|env| env.rank == 0 && env.parent_pid.is_none()) {
        RunLog::open(&watch, launched)?.notes(&request.model.settings.notes);
    }
    match launched {
        Some(env) => request.run(env),
        None => {
            let TextModel { ranks, settings, .. } = &request.model;
            launch::run(&Launch::once(ranks, &job, &settings.faults.signals()?))
        }
    }
}

/// The prompt on standard input.
fn piped(launched: Option<&RankEnv>) -> Result<String> {
    if launched.is_some() {
        return Err(Error::input("--generate -: standard input is not that of all ranks here; give the prompt itself"));
    }
    let text = std::io::read_to_string(std::io::stdin()).map_err(|e| Error::io("read", "standard input", e))?;
    let text = text.trim_end_matches('\n');
    match text.trim_start().chars().next() {
        None => Err(Error::input("--generate -: standard input is empty; a prompt is expected")),
        Some('{') => Err(Error::input(
            "--generate -: standard input is one prompt, as text, and this begins like rows; name a file of rows instead",
        )),
        Some(_) => Ok(text.into()),
    }
}

/// Texts that are written at once, if there are so many and memory for them.
const TEXTS: usize = 64;

/// Everything that a rank needs.
struct Request {
    model: TextModel,
    plan: WeightPlan,
    /// Their ids are the numbers of their rows.
    prompts: Vec<Prompt>,
    /// Maximum number of new tokens.
    count: usize,
    /// Texts are JSON lines: of prompts in rows, or several of one.
    lines: bool,
}

impl Request {
    fn new(s: Settings, launched: Option<&RankEnv>, prompt: &str, is_file: bool) -> Result<Request> {
        let mut model = TextModel::new(s, launched)?;
        let samples = set(&model.settings.generate.group_size, "generate.group_size")?;
        let format = data::format(&model.settings.data, &model.tokenizer)?;
        // As in training, an answer of a chat ends with its turn.
        let chat = format.chat.as_ref().filter(|_| is_file);
        model.stop.extend(chat.and_then(|template| end_of_turn(template, &model.tokenizer)));
        let encoder = PromptEncoder::new(&model.settings, format, &model.tokenizer, &model.spec);
        let AskedPrompts { prompts: rows, notes } = AskedPrompts::new(&model.settings, prompt, is_file, &encoder)?;
        model.settings.notes.extend(notes);
        let most = set(&model.settings.generate.max_new_tokens, "generate.max_new_tokens")?;
        let (prompt, count) = SamplerSize::fitted(rows.iter().map(|(_, ids)| ids.len()), most, model.spec.max_len);
        let prompts: Vec<Prompt> = rows.into_iter().map(|(row, ids)| Prompt::new(row, ids, samples)).collect();
        let texts = (prompts.len() * samples).clamp(1, TEXTS);
        let plan = model.plan(prompt, count, texts)?;
        Ok(Request { model, plan, prompts, count, lines: is_file || samples > 1 })
    }

    /// This process's rank.
    fn run(&self, env: &RankEnv) -> Result<()> {
        self.model.load(env, &self.plan, |generator, mesh| match self.lines {
            true => self.write_lines(generator, mesh),
            false => self.stream(generator, mesh),
        })
    }

    /// Prints one text while it is written.
    fn stream(&self, generator: &mut Generator, mesh: &Mesh) -> Result<()> {
        let TextModel { tokenizer, stop, sampling, settings, .. } = &self.model;
        let strings = settings.generate.stop.as_deref().unwrap_or_default();
        let started = Instant::now();
        let mut text = TextStream::new(tokenizer, mesh.rank() == 0);
        let written = generator.generate(&self.prompts[0].tokens, self.count, sampling, &mut |token| {
            let more = !stop.contains(&token);
            if more {
                text.push(token, strings);
            }
            more && text.is_open()
        })?;
        let (first, count) = (text.first, text.tokens.len());
        text.end(strings)?;
        if first {
            let speed = written.len() as f64 / started.elapsed().as_secs_f64();
            let _ = writeln!(std::io::stderr(), "{count} tokens, {speed:.1} tok/s");
        }
        Ok(())
    }

    /// Prints all texts, one JSON object a line, by prompt and sample.
    fn write_lines(&self, generator: &mut Generator, mesh: &Mesh) -> Result<()> {
        let TextModel { tokenizer, stop, sampling, settings, .. } = &self.model;
        let (ends, started) = (TextEnds::new(settings, stop.clone()), Instant::now());
        let next = &mut |of: &Sampled| ends.is_open(tokenizer, of.ids);
        let texts = generator.sample(&self.prompts, self.count, sampling, next)?;
        if mesh.rank() > 0 {
            return Ok(());
        }
        let seconds = started.elapsed().as_secs_f64();
        let mut out = BufWriter::new(std::io::stdout().lock());
        let mut failed = Ok(());
        for text in &texts {
            let line = json!({
                "prompt": self.prompts[text.prompt].id,
                "sample": text.sample,
                "text": ends.text(tokenizer, &text.ids),
                "finish": if text.ended { "stop" } else { "length" },
                "ids": text.ids,
                "logprobs": text.logprobs,
            });
            failed = failed.and_then(|()| writeln!(out, "{line}"));
        }
        let count: usize = texts.iter().map(|text| text.ids.len()).sum();
        let (n, speed) = (texts.len(), count as f64 / seconds);
        let _ = writeln!(std::io::stderr(), "{n} texts of {count} tokens in {seconds:.1}s, {speed:.1} tok/s");
        match failed.and_then(|()| out.flush()) {
            Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(Error::io("write", "standard output", e)),
            _ => Ok(()),
        }
    }
}

/// Prompts as tokens, each with the number of its row; and what there is to say of them.
#[derive(Default)]
struct AskedPrompts {
    prompts: Vec<(u64, Vec<u32>)>,
    notes: Vec<String>,
}

impl AskedPrompts {
    /// `prompt` itself, or its rows.
    fn new(s: &Settings, prompt: &str, is_file: bool, encoder: &PromptEncoder) -> Result<AskedPrompts> {
        let (field, most) = (prompts::field(s)?, s.data.max_samples);
        if is_file && most == Some(0) {
            return Err(Error::input("max_samples is 0; it must be at least 1"));
        }
        if is_file {
            let skip = s.data.skip_bad_rows == Some(true);
            return AskedPrompts::of_rows(s, prompt, field, most.unwrap_or(usize::MAX), skip, encoder);
        }
        let (place, asked) = ("--generate: the prompt".into(), PromptKind::Text(prompt.into()));
        let EncodedPrompt { ids, .. } = encoder.encode(&PromptRow { place, asked, fields: JsonRow::new() })?;
        Ok(AskedPrompts { prompts: vec![(0, ids)], notes: prompts::without_rows(s).collect() })
    }

    /// The first `most` prompts in the rows at `path`. Bad rows are an error, or with `skip` noted.
    fn of_rows(
        s: &Settings,
        path: &str,
        field: PromptField,
        most: usize,
        skip: bool,
        encoder: &PromptEncoder,
    ) -> Result<AskedPrompts> {
        let (mut all, mut number, mut skipped) = (AskedPrompts::default(), 0, SkippedRows::default());
        let mut answered = 0;
        prompts::read(s, "--generate", &[PathBuf::from(path)], field, &mut |row| {
            let prompt = skipped.unless(skip, row.and_then(|row| encoder.encode(&row)))?;
            answered += u64::from(prompt.as_ref().is_some_and(|prompt| prompt.answered));
            all.prompts.extend(prompt.map(|prompt| (number, prompt.ids)));
            number += 1;
            Ok(all.prompts.len() < most)
        })?;
        let plural = |n: u64| if n == 1 { "" } else { "s" };
        if answered > 0 {
            all.notes.push(format!("{path}: not read: {ANSWERED} in {answered} row{}", plural(answered)));
        }
        if all.prompts.is_empty() && skipped.count > 0 {
            return Err(skipped.all(&format!("--generate {path}")));
        }
        all.notes.extend(skipped.note(path));
        Ok(all)
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
    /// It has come to a string that ends it.
    ended: bool,
    /// Why printing failed.
    failed: Option<std::io::Error>,
}

impl<'a> TextStream<'a> {
    fn new(tokenizer: &'a Tokenizer, first: bool) -> TextStream<'a> {
        TextStream { tokenizer, tokens: Vec::new(), shown: 0, first, ended: false, failed: None }
    }
    fn push(&mut self, token: u32, stop: &[String]) {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens);
        self.ended = cut(&text, stop).len() < text.len();
        // A string that ends the text may begin here.
        let begins = |(at, _): &(usize, char)| stop.iter().any(|string| string.starts_with(&text[*at..]));
        let shown = text.char_indices().find(begins).map_or(text.len(), |(at, _)| at);
        // A character may take several tokens and decodes as U+FFFD until the last of them.
        if !text.ends_with('\u{fffd}') && !self.ended {
            self.show(&text[..shown]);
        }
    }
    fn show(&mut self, text: &str) {
        if let Some(new) = text.get(self.shown..).filter(|new| self.first && !new.is_empty()) {
            self.shown = text.len();
            let mut out = std::io::stdout();
            let new = if out.is_terminal() { Cow::Owned(on_terminal(new)) } else { Cow::Borrowed(new) };
            let written = out.write_all(new.as_bytes()).and_then(|()| out.flush());
            // A missing reader is not a failure.
            self.failed = written.err().filter(|e| e.kind() != ErrorKind::BrokenPipe);
        }
    }
    /// Whether the text can still be written.
    fn is_open(&self) -> bool {
        self.failed.is_none() && !self.ended
    }
    /// Ends the line. Returns the whole text.
    fn end(mut self, stop: &[String]) -> Result<String> {
        let text = cut(&self.tokenizer.decode(&self.tokens), stop).to_string();
        if self.failed.is_none() {
            self.show(&format!("{text}\n"));
        }
        self.failed.map_or(Ok(text), |e| Err(Error::io("write", "standard output", e)))
    }
}
