//! The values that a command line's flags give to each setting: checks that they agree, and produces clap's arguments
//! and the notes for flags of other tools. Never parses a flag.
use super::typed::TypedFlag;
use crate::base::{Error, Result};
use crate::run::settings::defaults::defaults;
use crate::run::settings::effect::GROUP;
use crate::run::settings::synonyms::{Synonym, same};
use std::iter::once;

/// The arguments for clap, and the notes about them.
#[derive(Debug, Default)]
pub struct Reading {
    pub argv: Vec<String>,
    /// A note per flag of another tool, with the index of the typed flag.
    pub notes: Vec<(usize, String)>,
    /// Flags of other tools and how they are read, for clap's errors, which name only our flags.
    pub read_as: Vec<(String, String)>,
}

/// Looks up our flags by name and by setting.
#[derive(Clone, Copy)]
pub struct OwnFlags<'a>(pub &'a clap::Command);

/// The argument of a setting, or of the pair whose half it is. Its id is the key, after the section where two sections
/// have that key.
pub fn argument<'a>(command: &'a clap::Command, section: &str, key: &str) -> Option<&'a clap::Arg> {
    let key = key.split('.').next().unwrap_or(key);
    let of = |id: &str| command.get_arguments().find(|arg| arg.get_id() == id);
    of(&format!("{section}_{key}")).or_else(|| of(key))
}

/// An on/off flag, with or without further modes: `true` is one of its values.
pub fn is_switch(arg: &clap::Arg) -> bool {
    arg.get_possible_values().iter().any(|v| v.matches("true", false)) && arg.get_action().takes_values()
}

impl<'a> OwnFlags<'a> {
    pub fn named(self, name: &str) -> Option<&'a clap::Arg> {
        let named = |a: &&clap::Arg| a.get_long_and_visible_aliases().is_some_and(|l| l.contains(&name));
        self.0.get_arguments().find(named)
    }
    /// The id of our argument for `row`, with `.0` or `.1` for one value of a pair.
    pub fn id(self, row: &Synonym) -> String {
        let half = row.key.find('.').map_or("", |dot| &row.key[dot..]);
        argument(self.0, row.section, row.key).map_or(row.key.into(), |arg| format!("{}{half}", arg.get_id()))
    }
    /// The argument with this id.
    pub fn of(self, id: &str) -> Option<&'a clap::Arg> {
        let id = id.split('.').next();
        self.0.get_arguments().find(|arg| Some(arg.get_id().as_str()) == id)
    }
    /// `--lr 0.1`, or `--lr` without words; a switch as `--x` or `--no-x`.
    pub fn show(self, key: &str, words: &[String]) -> String {
        let arg = self.of(key);
        let long = arg.and_then(clap::Arg::get_long).unwrap_or(key);
        match words {
            [word] if arg.is_some_and(is_switch) && word == "true" => format!("--{long}"),
            [word] if arg.is_some_and(is_switch) && word == "false" => format!("--no-{long}"),
            words => once(format!("--{long}")).chain(words.iter().cloned()).collect::<Vec<_>>().join(" "),
        }
    }
}

/// A value that the command line gives to a setting.
#[derive(Clone)]
pub struct Assignment {
    /// Id of our argument, with `.0` or `.1` for one value of a pair.
    pub key: String,
    pub words: Vec<String>,
    /// Index of the typed flag, and its row in the table: `None` for one of our flags.
    pub by: usize,
    pub row: Option<&'static Synonym>,
}

impl Assignment {
    fn is_weak(&self) -> bool {
        self.row.is_some_and(Synonym::is_weak)
    }
}

/// Checks that several flags for one setting agree, and adds arguments and notes for flags of other tools.
pub fn settle(mut claims: Vec<Assignment>, typed: &[TypedFlag], own: OwnFlags, out: &mut Reading) -> Result<()> {
    per_prompt(&mut claims, typed)?;
    per_rate(&mut claims);
    // The last one counts of a repeated flag, and of several of our own for a setting.
    let replaces = |new: &Assignment, old: &Assignment| {
        let alike = typed[new.by].name == typed[old.by].name || (new.row.is_none() && old.row.is_none());
        new.by > old.by && new.key == old.key && alike
    };
    let last: Vec<Assignment> =
        claims.iter().filter(|old| !claims.iter().any(|new| replaces(new, old))).cloned().collect();
    let mut kept = Vec::new();
    for claim in &last {
        let other = last.iter().find(|other| claim.is_weak() && !other.is_weak() && other.key == claim.key);
        match (other, claim.row) {
            (Some(other), Some(row)) => {
                let this = typed[claim.by].show(row.shown(&typed[claim.by].words));
                let this = format!("{this} gives way to --{} ({})", typed[other.by].text, row.tool);
                out.notes.push((claim.by, this));
            }
            _ => kept.push(claim.clone()),
        }
    }
    pair(&mut kept);
    for claim in kept.iter().filter(|claim| claim.row.is_some()) {
        let agrees = |other: &&Assignment| {
            let words = || other.words.iter().zip(&claim.words);
            other.words.len() == claim.words.len() && words().all(|(a, b)| same(a, b))
        };
        if let Some(other) = kept.iter().find(|other| other.key == claim.key && other.by != claim.by && !agrees(other))
        {
            let [this, other] = [claim, other].map(|claim| typed[claim.by].show(&typed[claim.by].words));
            return Err(Error::input(format!(
                "{this} and {other} give {} different values: remove one",
                own.show(&claim.key, &[])
            )));
        }
    }
    for (at, flag) in typed.iter().enumerate() {
        let claims: Vec<_> = kept.iter().filter(|c| c.by == at).filter_map(|claim| Some((claim, claim.row?))).collect();
        note(flag, &claims, own, out);
    }
    // Each setting once: clap would concatenate repeated lists.
    for (n, claim) in kept.iter().enumerate().filter(|(_, claim)| claim.row.is_some()) {
        if !kept.iter().enumerate().any(|(m, other)| other.key == claim.key && (other.row.is_none() || m < n)) {
            let long = own.show(&claim.key, &[]);
            match &claim.words[..] {
                [word] => out.argv.push(format!("{long}={word}")),
                words => out.argv.extend(once(long).chain(words.iter().cloned())),
            }
        }
    }
    Ok(())
}

/// Divides what flags of other tools count in samples, where ours count prompts, by the samples of a prompt.
fn per_prompt(claims: &mut [Assignment], typed: &[TypedFlag]) -> Result<()> {
    let number = |claim: &Assignment| claim.words.first().and_then(|word| word.parse::<usize>().ok());
    let group = claims.iter().rfind(|claim| claim.key == "group_size").map_or(Some(GROUP), number);
    let Some(group) = group.filter(|&group| group > 0) else { return Ok(()) }; // clap reports it
    split_groups(claims, group);
    for claim in claims.iter_mut().filter(|claim| claim.row.is_some_and(Synonym::counts_samples)) {
        let (Some(samples), Some(row)) = (number(claim), claim.row) else { continue };
        if samples % group > 0 {
            let (flag, key) = (&typed[claim.by], row.key.replace('_', "-"));
            return Err(Error::input(format!(
                "{} ({}) counts samples, and {samples} is no multiple of the {group} samples of a prompt \
                 (--group-size): use --{key}, which counts prompts",
                flag.show(&flag.words),
                row.tool
            )));
        }
        claim.words = vec![(samples / group).to_string()];
    }
    Ok(())
}

/// Where a micro-batch of samples holds no whole groups, but those of a step do, moves samples from its other
/// micro-batches there: a step is the mean over all of its samples.
fn split_groups(claims: &mut [Assignment], group: usize) {
    let number = |claim: &Assignment| claim.words.first().and_then(|word| word.parse::<usize>().ok());
    let last = |key: &str| claims.iter().rposition(|claim| claim.key == key);
    let (Some(batch), Some(accum)) = (last("batch_size"), last("grad_accum")) else { return };
    let (Some(samples), Some(count)) = (number(&claims[batch]), number(&claims[accum])) else { return };
    let counts = claims[batch].row.is_some_and(Synonym::counts_samples) && claims[accum].row.is_some();
    if !counts || count == 0 || samples % group == 0 || samples * count % group > 0 {
        return;
    }
    let prompts = samples * count / group;
    let count = (1..=count).rev().find(|count| prompts.is_multiple_of(*count)).unwrap_or(1);
    claims[batch].words = vec![(prompts / count * group).to_string()];
    claims[accum].words = vec![count.to_string()];
}

/// Divides rates by the learning rate, where our setting is a fraction of it.
fn per_rate(claims: &mut [Assignment]) {
    let number = |claim: &Assignment| claim.words.first().and_then(|word| word.parse::<f64>().ok());
    let Some(peak) = claims.iter().rfind(|claim| claim.key == "lr").and_then(number) else { return };
    for claim in claims.iter_mut().filter(|claim| claim.row.is_some_and(Synonym::is_rate)) {
        if let Some(rate) = number(claim) {
            claim.words = vec![(rate / peak).to_string()];
        }
    }
}

/// Combines single values of a pair into the pair, with the default if only one is given.
fn pair(claims: &mut Vec<Assignment>) {
    let halves: Vec<Assignment> = claims.extract_if(.., |claim| claim.key.contains('.')).collect();
    let Some((key, row)) = halves.last().and_then(|last| Some((last.key.split('.').next()?, last.row?))) else {
        return;
    };
    let default = &defaults()[row.section][key];
    let half = |n: usize| {
        let given = halves.iter().rfind(|claim| claim.key.ends_with(&format!(".{n}")));
        given.map_or(default[n].to_string(), |claim| claim.words.concat())
    };
    let words = vec![half(0), half(1)];
    claims.extend(halves.iter().map(|c| Assignment { key: key.into(), words: words.clone(), by: c.by, row: c.row }));
}

/// Adds the note about a flag of another tool. Shows values only if ours differ.
fn note(flag: &TypedFlag, claims: &[(&Assignment, &'static Synonym)], own: OwnFlags, out: &mut Reading) {
    let Some((claim, first)) = claims.first() else { return };
    let at = claim.by;
    let same_words = claims.iter().all(|(claim, row)| {
        row.value.is_empty() && !row.key.contains('.') && !matches!(&claim.words[..], [word] if word == "false")
    });
    let mut ours = Vec::new();
    for (claim, _) in claims {
        let long = own.show(&claim.key, &[]);
        ours.push(if same_words { long.clone() } else { own.show(&claim.key, &claim.words) });
        out.read_as.push((flag.text.clone(), long));
    }
    let words = if same_words { &[] } else { claims.iter().fold(&flag.words[..], |words, (_, row)| row.shown(words)) };
    let why = if first.why.is_empty() { String::new() } else { format!(": {}", first.why) };
    out.notes.push((at, format!("{} is read as {} ({}){why}", flag.show(words), ours.join(" "), first.tool)));
}
