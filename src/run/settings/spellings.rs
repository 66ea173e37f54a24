//! Rewrites the command line before clap reads it: underscores, `--no-x`, and flags of other tools, each of which is
//! read as ours, has no effect, or is refused, according to `synonyms.tsv`. Never gives one of our flags a second
//! meaning.
use crate::base::{Error, Result};
use crate::run::settings::synonyms::{self, Synonym, same, similar};
use crate::run::settings::value::StepInterval;
use claims::{Assignment, OwnFlags, Reading};
use std::any::TypeId;
use std::iter::once;
use typed::{TypedFlag, truth};

mod claims;
mod typed;
pub use claims::{argument, is_switch};
pub use typed::means;

/// `argv` with our flags only. `around`: flags that are not read here, on which rows may depend. Errors are
/// [`Error::Input`].
pub fn read(argv: impl IntoIterator<Item = String>, around: &[String], command: &clap::Command) -> Result<Reading> {
    let mut line = Line {
        own: OwnFlags(command),
        typed: typed::split(argv),
        around: typed::split(around.iter().cloned()),
        claims: Vec::new(),
        out: Reading::default(),
        refused: Vec::new(),
    };
    for at in 0..line.typed.len() {
        line.flag(at)?;
    }
    if !line.refused.is_empty() {
        return Err(Error::input(line.refused.join("\n")));
    }
    claims::settle(line.claims, &line.typed, line.own, &mut line.out)?;
    line.out.notes.sort_by_key(|(at, _)| *at);
    Ok(line.out)
}

struct Line<'a> {
    own: OwnFlags<'a>,
    typed: Vec<TypedFlag>,
    around: Vec<TypedFlag>,
    claims: Vec<Assignment>,
    out: Reading,
    /// Unknown flags, and those without an equivalent: all of them are reported at once.
    refused: Vec<String>,
}

impl Line<'_> {
    fn flag(&mut self, at: usize) -> Result<()> {
        let flag = self.typed[at].clone();
        let (rows, own) = (synonyms::of_flag(&flag.name), self.own.named(&flag.name).is_some());
        if flag.name.is_empty() {
            self.out.argv.extend(flag.words);
            return Ok(());
        }
        if self.foreign(at, &rows, own)? {
            return Ok(());
        }
        if own || ["help", "version"].contains(&flag.name.as_str()) {
            self.pass(at);
            return Ok(());
        }
        if let Some(positive) = flag.without_no().filter(|_| !flag.inline) {
            if let Some(arg) = self.own.named(&positive).filter(|arg| is_switch(arg)) {
                let words = vec!["false".into()];
                self.claims.push(Assignment { key: arg.get_id().to_string(), words, by: at, row: None });
                self.out.argv.extend(once(format!("--{positive}=false")).chain(flag.words));
                return Ok(());
            }
            let rows = synonyms::of_flag(&positive);
            self.typed[at] = TypedFlag { name: positive, words: vec!["false".into()], off: true, ..flag.clone() };
            if self.foreign(at, &rows, false)? {
                self.out.argv.extend(flag.words);
                return Ok(());
            }
        }
        self.refused.push(self.unknown(&flag, &rows));
        Ok(())
    }

    /// One of our flags: its value in our spelling, a switch with `=`.
    fn pass(&mut self, at: usize) {
        let TypedFlag { name, mut words, inline, text, .. } = self.typed[at].clone();
        let arg = self.own.named(&name);
        let key = arg.map_or(String::new(), |arg| arg.get_id().to_string());
        for word in &mut words {
            if let Some(row) = synonyms::value_row(&key, word) {
                if !row.is_own() {
                    let ours = self.own.show(&key, &[row.value.to_string()]);
                    self.out.notes.push((at, format!("--{text} {word} is read as {ours} ({})", row.tool)));
                }
                *word = row.value.into();
            }
        }
        let switched = words.first().and_then(|word| truth(word)).filter(|_| arg.is_some_and(is_switch));
        if let (Some(value), Some(word)) = (switched, words.first_mut()) {
            *word = value.into();
        }
        if arg.is_some() {
            let given = if words.is_empty() { vec!["true".into()] } else { words.clone() };
            self.claims.push(Assignment { key, words: given, by: at, row: None });
        }
        match inline || switched.is_some() {
            true => self.out.argv.push(format!("--{name}={}", words.remove(0))),
            false => self.out.argv.push(format!("--{name}")),
        }
        self.out.argv.extend(words);
    }

    /// A flag of another tool, if one of `rows` matches; `own`: the name is also ours, for all other values.
    fn foreign(&mut self, at: usize, rows: &[&'static Synonym], own: bool) -> Result<bool> {
        if rows.is_empty() {
            return Ok(false);
        }
        let bools = rows.iter().any(|row| row.flag.values.iter().any(|v| ["true", "false"].contains(v)));
        let (units, rest) = self.units(&self.typed[at], rows, bools, own);
        let mut found = Vec::new();
        for unit in units {
            let fits = |row: &&&Synonym| {
                let listed = unit.len() == 1 && row.flag.values.iter().any(|value| means(&unit[0], value));
                let mut others = self.typed.iter().chain(&self.around);
                let with = row.with.as_ref().is_none_or(|with| others.any(|other| other.is_with(with, &unit)));
                (row.flag.values.is_empty() && (!own || row.with.is_some()) || listed) && with
            };
            match rows.iter().find(fits) {
                // Rows of one spelling act together.
                Some(fit) => {
                    found.extend(rows.iter().filter(|r| r.spelling == fit.spelling).map(|r| (*r, unit.clone())))
                }
                None if !own && bools && unit == ["false"] => {
                    let (shown, tool) = (self.typed[at].show(&unit), rows[0].tool);
                    self.out
                        .notes
                        .push((at, format!("{shown} has no effect here: this value turns nothing on ({tool})")));
                }
                None => return Ok(false),
            }
        }
        for (row, unit) in found {
            self.apply(at, row, unit)?;
        }
        self.out.argv.extend(rest);
        Ok(true)
    }

    /// The words of a flag, grouped as they are read, and the words after a switch, which do not belong to it.
    fn units(&self, flag: &TypedFlag, rows: &[&Synonym], bools: bool, own: bool) -> (Vec<Vec<String>>, Vec<String>) {
        let values = || rows.iter().flat_map(|row| &row.flag.values);
        let (switches, others): (Vec<&Synonym>, Vec<&Synonym>) = rows
            .iter()
            .filter(|row| row.kind == "flag" && row.flag.values.is_empty())
            .partition(|row| self.own.of(&self.own.id(row)).is_some_and(is_switch));
        let switch = !own && others.is_empty() && (bools || !switches.is_empty());
        let listed = |word: &str| truth(word).is_some() || values().any(|value| means(word, value));
        let mine = |word: &&String| flag.inline || word.split([' ', ',']).all(listed);
        let count = if switch { flag.words.iter().take_while(mine).count() } else { flag.words.len() };
        let (words, rest) = flag.words.split_at(count);
        let mut words = words.to_vec();
        if words.is_empty() && (switch || bools) {
            words.push("true".into());
        }
        if let [word] = &mut words[..]
            && let Some(value) = truth(word).filter(|_| (switch || bools) && !values().any(|value| same(word, value)))
        {
            *word = value.into();
        }
        // A flag with a list of values may have several of them, even if it is ours for other values.
        let several = words.len() > 1 && words.iter().all(|word| values().any(|value| means(word, value)));
        let units = match own && !several || rows.iter().any(|row| row.flag.values.is_empty()) {
            true => vec![words],
            false => {
                let parts = words.iter().flat_map(|word| word.split([' ', ',']).filter(|part| !part.is_empty()));
                parts.map(|part| vec![part.to_string()]).collect()
            }
        };
        (units, rest.to_vec())
    }

    fn apply(&mut self, at: usize, row: &'static Synonym, words: Vec<String>) -> Result<()> {
        let flag = &self.typed[at];
        let bare = flag.show(&[]);
        // A secret is not repeated.
        let shown = if flag.words.is_empty() || bare.ends_with("token") { bare } else { flag.show(&words) };
        let off = matches!(&words[..], [word] if truth(word) == Some("false") || same(word, "0") || same(word, "none"));
        match row.kind {
            "idle" => self.out.notes.push((at, format!("{shown} has no effect here: {} ({})", row.why, row.tool))),
            "refused" if off && row.flag.values.is_empty() => {
                self.out.notes.push((at, format!("{shown} has no effect here: it is always off ({})", row.tool)));
            }
            "refused" => {
                let value: Vec<String> = once(row.value).filter(|value| !value.is_empty()).map(String::from).collect();
                let nearest = match row.key {
                    "" => "remove it".to_string(),
                    _ => format!("the nearest is {}", self.own.show(&self.own.id(row), &value)),
                };
                let what = format!("{shown} has no equivalent ({}): {}; {nearest}", row.tool, row.why);
                self.refused.push(what);
            }
            _ => {
                let key = self.own.id(row);
                let words = row.convert(&words).into_iter().map(|word| self.whole(&key, word)).collect();
                self.claims.push(Assignment { key, words, by: at, row: Some(row) });
            }
        }
        Ok(())
    }

    /// Other tools accept 3.0 and 1e8 for whole numbers.
    fn whole(&self, key: &str, word: String) -> String {
        let counts = [TypeId::of::<u64>(), TypeId::of::<usize>(), TypeId::of::<u32>(), TypeId::of::<StepInterval>()];
        let counted = |arg: &clap::Arg| counts.iter().any(|id| arg.get_value_parser().type_id() == *id);
        let number = word.parse().ok().filter(|x: &f64| x.fract() == 0.0 && (0.0..1e15).contains(x));
        number.filter(|_| self.own.of(key).is_some_and(counted)).map_or(word, |x| format!("{x}"))
    }

    fn unknown(&self, flag: &TypedFlag, rows: &[&Synonym]) -> String {
        if let Some(row) = rows.first() {
            let read = rows.iter().filter(|row| row.kind != "refused");
            let mut values: Vec<&str> = read.flat_map(|row| row.flag.values.iter().copied()).collect();
            values.dedup();
            let (shown, text) = (flag.show(&flag.words), &flag.text);
            return format!("{shown} ({}): --{text} takes {}", row.tool, values.join(", "));
        }
        let known =
            self.own.0.get_arguments().filter(|a| !a.is_hide_set()).filter_map(|a| a.get_long_and_visible_aliases());
        let positive = flag.without_no().unwrap_or_else(|| flag.name.clone());
        let near = |known: Vec<&str>| similar(&positive, known).map(String::from);
        let hint = match near(known.flatten().collect()).or_else(|| near(synonyms::flag_names().collect())) {
            Some(near) => format!(": the nearest known one is --{near} (--help-all lists all)"),
            None => ": --help-all lists all".into(),
        };
        format!("unknown flag --{}{hint}", flag.name)
    }
}
