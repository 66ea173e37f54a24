//! `--print-samples` and `--preview`: what a run would train on, before packing. Never starts ranks, and reads no
//! weight.
use crate::base::{Error, Result, on_terminal};
use crate::comm::env::RankEnv;
use crate::data::{Dataset, PreviewRow, PreviewSequence, Tokenizer};
use crate::device::IGNORE;
use crate::engine::Objective;
use crate::run::plan::data::RunData;
use crate::run::plan::model::ModelPlan;
use crate::run::plan::{objective, resume, tokens};
use crate::run::settings::Settings;
use crate::run::watch::style;
use clap::builder::styling::AnsiColor;
use serde_json::{Value, json};
use std::io::{BufWriter, ErrorKind, Write, stderr, stdout};

/// How samples are shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SampleLook {
    /// One JSON object per line.
    Json,
    /// Text, whose tokens with loss are green.
    Color,
}

/// Prints the first `count` samples of each data set to train on.
pub fn main(mut s: Settings, launched: Option<&RankEnv>, count: u64, look: SampleLook) -> Result<()> {
    if launched.is_some_and(|env| env.rank != 0) {
        return Ok(());
    }
    let ModelPlan { spec, tokenizer } = ModelPlan::new(&mut s)?;
    // Nothing is written, so that checkpoints of an earlier run are not in the way.
    let resumed = s.checkpoint.resume.as_ref().map_or(Ok(None), |_| resume::newest(&s.checkpoint))?;
    let tokenizer = tokens::resumed(tokenizer, &s.data, resumed.as_deref())?;
    let objective = objective::objective(&s)?;
    let data = RunData::options(&s, &tokenizer, &spec)?;
    let parts = &data.train;
    let (several, mut out) = (parts.len() > 1, BufWriter::new(stdout()));
    for (options, _) in parts {
        let name = options.paths.first().filter(|_| several).map(|path| path.display().to_string());
        let mut show = |row: u64, content: PreviewRow| {
            // Rows that are no prompts are not among those that are read here.
            let row = if let PreviewRow::Prompt(_, number) = content { number } else { row };
            let text = match look {
                SampleLook::Json => lines(row, name.as_deref(), &content, objective, &tokenizer),
                SampleLook::Color => colored(row, &content, objective, &tokenizer, style::is_on(&stdout())),
            };
            out.write_all(text.as_bytes()).map_err(|e| Error::io("write", "standard output", e))
        };
        let shown = Dataset::preview(options, count, &mut show)
            .map_err(|e| data.of_training(e))
            .and_then(|unread| out.flush().map(|()| unread).map_err(|e| Error::io("write", "standard output", e)));
        let unread = match shown {
            // A reader that stops early (`| head`) is not a failure.
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::BrokenPipe => return Ok(()),
            other => other.map_err(Error::before_start)?,
        };
        if !unread.is_empty() {
            let names: Vec<String> = unread.into_iter().collect();
            let _ = writeln!(stderr(), "not read: {}", names.join(", ")); // a closed stderr changes nothing
        }
    }
    Ok(())
}

/// A sequence of a row, with what else is known of it.
type ShownSequence<'a> = (&'a PreviewSequence, Vec<(&'static str, Value)>);

fn sequences(row: &PreviewRow, objective: Objective) -> Vec<ShownSequence<'_>> {
    match row {
        PreviewRow::Sample(sequence) | PreviewRow::Prompt(sequence, _) => vec![(sequence, vec![])],
        PreviewRow::Labeled(sequence, desirable) => vec![(sequence, vec![("label", json!(desirable))])],
        PreviewRow::Pair([chosen, rejected]) => {
            vec![(chosen, vec![("side", json!("chosen"))]), (rejected, vec![("side", json!("rejected"))])]
        }
        PreviewRow::Group(samples, rewards) => {
            let mut advantages = Vec::new();
            match objective {
                Objective::Grpo(grpo) => grpo.advantages(rewards, &mut advantages),
                _ => advantages.resize(rewards.len(), 0.0),
            }
            let each = samples.iter().enumerate().zip(rewards.iter().zip(advantages));
            let shown = each.map(|((i, sample), (reward, advantage))| {
                (sample, vec![("sample", json!(i)), ("reward", json!(reward)), ("advantage", json!(advantage))])
            });
            shown.collect()
        }
        PreviewRow::Dropped(_) => vec![],
    }
}

fn lines(row: u64, name: Option<&str>, content: &PreviewRow, objective: Objective, tokenizer: &Tokenizer) -> String {
    let mut made = Vec::new();
    if let PreviewRow::Dropped(why) = content {
        made.push(json!({"row": row, "dropped": why}));
    }
    for (sequence, more) in sequences(content, objective) {
        let mut line = json!({"row": row});
        for (key, value) in more {
            line[key] = value;
        }
        let PreviewSequence { ids, labels, cut } = sequence;
        let loss = stretches(sequence).filter(|(with, _)| *with).map(|(_, ids)| tokenizer.spelled(ids));
        line["tokens"] = json!(ids);
        line["labels"] = json!(labels);
        line["text"] = json!(tokenizer.spelled(ids));
        line["loss_text"] = loss.collect();
        line["cut"] = json!(cut);
        made.push(line);
    }
    if let Some(name) = name {
        made.iter_mut().for_each(|line| line["dataset"] = json!(name));
    }
    made.iter().map(|line| format!("{line}\n")).collect()
}

fn colored(row: u64, content: &PreviewRow, objective: Objective, tokenizer: &Tokenizer, color: bool) -> String {
    let green = AnsiColor::Green.on_default();
    if let PreviewRow::Dropped(why) = content {
        return format!("-- row {row} is dropped: {why}\n");
    }
    let each = sequences(content, objective).into_iter().map(|(sequence, more)| {
        let more: String = more.into_iter().map(|(key, value)| format!(", {key} {value}")).collect();
        let cut = if sequence.cut { ", cut" } else { "" };
        let loss = sequence.labels.iter().filter(|&&label| label != IGNORE).count();
        let text: String = stretches(sequence)
            .map(|(with, ids)| match (with, on_terminal(&tokenizer.spelled(ids))) {
                (true, text) if color => style::paint(green, &text),
                (true, text) => format!("[[{text}]]"),
                (false, text) => text,
            })
            .collect();
        format!("-- row {row}{more}: {} tokens, {loss} with loss{cut}\n{text}\n", sequence.ids.len())
    });
    each.collect()
}

/// Runs of ids with and without loss.
fn stretches(sequence: &PreviewSequence) -> impl Iterator<Item = (bool, &[u32])> {
    let with = |at: usize| sequence.labels[at] != IGNORE;
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at;
        let kind = sequence.labels.get(start).map(|_| with(start))?;
        at += sequence.labels[start..].iter().take_while(|&&label| (label != IGNORE) == kind).count();
        Some((kind, &sequence.ids[start..at]))
    })
}
