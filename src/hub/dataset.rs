//! Which files a name of a data set means: the card's, else those of the hub's conventions. Never downloads one.
use super::card::{self, CardConfig};
use super::name::{HubKind, HubName};
use super::splits::{self, Splits};
use crate::base::quote;
use serde_json::json;
use std::collections::BTreeSet;

const TRAIN: &str = "train";
/// Splits and files that messages name.
const SHOWN: usize = 12;

/// What the files of a repository say about its splits.
#[derive(Debug, PartialEq)]
pub(super) enum FoundSplits {
    Splits(Splits),
    /// Nothing that our readers know: Parquet that the hub has made of this configuration, if that is known.
    Unreadable(Option<String>),
}

/// Whether a card has a configuration of this name.
pub fn is_config(card: &str, name: &str) -> bool {
    card::configs(card).is_ok_and(|configs| card::named(&configs, name).is_some())
}

/// The splits of a repository with this card: of the configuration that `name` ends with, or of the default one.
pub(super) fn splits(name: &HubName, files: &[String], card: &str) -> Result<FoundSplits, String> {
    let configs = card::configs(card)
        .map_err(|what| format!("{}: the card (README.md) is not valid: {}", name.repo, quote(what)))?;
    let asked = name.path.as_ref().and_then(|path| card::named(&configs, path));
    let config = asked.map_or_else(|| card::default(&configs), |config| Ok(Some(config))).map_err(|names| {
        let first = HubName { path: names.first().map(|first| first.to_string()), split: None, ..name.clone() };
        format!(
            "{} has several configurations, and none is the default: {}. Name one, such as {}",
            name.repo,
            listed(names.into_iter()),
            quote(first)
        )
    })?;
    let script = name.repo.split_once('/').map(|(_, name)| format!("{name}.py"));
    let scripted = script.is_some_and(|script| files.contains(&script));
    if let Some([first, ..]) = config.map(|config| &config.reading[..]) {
        let (repo, first) = (&name.repo, quote(first));
        return Err(format!(
            "{repo}: the card has its files read with {first}, which is not supported: prepare rows of them"
        ));
    }
    let found = match config {
        Some(config) if !config.files.is_empty() => by_card(name, files, config)?,
        _ if scripted => vec![],
        Some(CardConfig { folder: Some(folder), .. }) => splits::conventional(files, &prefix(folder)),
        _ => splits::conventional(files, ""),
    };
    let named = config.map(|config| config.name.clone());
    Ok(if found.is_empty() { FoundSplits::Unreadable(named) } else { FoundSplits::Splits(found) })
}

/// The `files` below a folder of this machine that are read, in order: its split `train`, as its card says, else as
/// their names say, then what is no row. All of them, if they are one split. An error, if they are several and none is
/// `train`.
pub fn reading_order(folder: &str, files: &[String], card: &str) -> Result<Vec<String>, String> {
    let configured = card::configs(card).is_ok_and(|configs| !configs.is_empty());
    let name = of_folder_name(folder);
    let FoundSplits::Splits(found) = splits(&name, files, if configured { card } else { "" })? else {
        return Ok(files.to_vec());
    };
    let whole = found.len() == 1 && found[0].0 != TRAIN;
    let train = if whole { found.into_iter().flat_map(|(_, files)| files).collect() } else { of_split(&name, found)? };
    let of_train: BTreeSet<&String> = train.iter().collect();
    let is_read = |path: &&String| !of_train.contains(path) && (whole || !configured && !splits::is_of_rows(path));
    let others: Vec<String> = files.iter().filter(is_read).cloned().collect();
    Ok([train, others].concat())
}

/// The card of a directory of links, which hides none of the repository.
pub const VIEW_CARD: &str = ".card.md";

/// The card of a folder that holds these files, which are read in this order.
pub(super) fn card_of(files: &[String]) -> String {
    let literal = |path: &String| path.replace('[', "[[]").replace('*', "[*]").replace('?', "[?]");
    let paths: Vec<String> = files.iter().map(literal).collect();
    let configs = json!([{"config_name": "default", "data_files": [{"split": TRAIN, "path": paths}]}]);
    format!("---\nconfigs: {configs}\n---\n")
}

/// Which of the `files` below a folder of this machine are the split `split`, as its card or their names say. `config`:
/// of this configuration of the card.
pub fn split_files(
    folder: &str,
    files: &[String],
    card: &str,
    config: Option<&str>,
    split: &str,
) -> Result<Vec<String>, String> {
    let name = HubName { split: Some(split.into()), path: config.map(String::from), ..of_folder_name(folder) };
    match splits(&name, files, card)? {
        FoundSplits::Splits(found) => of_split(&name, found),
        FoundSplits::Unreadable(_) => Err("the directory has no files of rows or text".into()),
    }
}

/// A folder of this machine, in the place of a repository.
fn of_folder_name(folder: &str) -> HubName {
    let repo = folder.trim_end_matches('/').into();
    HubName { kind: HubKind::Dataset, repo, revision: None, path: None, split: None }
}

/// The splits that a card names. Empty, if no file of them can be read.
fn by_card(name: &HubName, files: &[String], config: &CardConfig) -> Result<Splits, String> {
    let folder = config.folder.as_deref().map_or(String::new(), prefix);
    let mut all: Splits = Vec::new();
    for (split, patterns) in &config.files {
        let mut found: Vec<String> = Vec::new();
        for pattern in patterns {
            if pattern.contains(":/") {
                return Err(format!(
                    "{}: the card names files elsewhere ({}), which are not downloaded: download them and name their \
                     paths",
                    name.repo,
                    quote(pattern)
                ));
            }
            let more = splits::matching(files, &format!("{folder}{pattern}"));
            if more.is_empty() && split == name.split.as_deref().unwrap_or(TRAIN) {
                let pattern = quote(pattern);
                return Err(format!(
                    "{}: the card's split {split} is {pattern}, and no file has such a name",
                    name.repo
                ));
            }
            let known = |path: &String| all.iter().any(|(s, f)| s == split && f.contains(path));
            let more: Vec<String> = more.into_iter().filter(|path| !known(path) && !found.contains(path)).collect();
            found.extend(more);
        }
        let readable = splits::of_one_format(found);
        match all.iter_mut().find(|(known, _)| known == split) {
            Some((_, known)) => known.extend(readable),
            None => all.push((split.clone(), readable)),
        }
    }
    all.retain(|(_, files)| !files.is_empty());
    Ok(all)
}

/// What paths below a card's `data_dir` begin with: nothing, or the folder and a slash.
fn prefix(folder: &str) -> String {
    let parts = folder.split('/').filter(|part| !part.is_empty() && *part != ".");
    parts.map(|part| format!("{part}/")).collect()
}

/// The files of the split that is asked for.
pub(super) fn of_split(name: &HubName, mut splits: Splits) -> Result<Vec<String>, String> {
    let split = name.split.as_deref().unwrap_or(TRAIN);
    if split.contains('+') {
        return Err(format!("{name}: sums of splits are not read: name each as a data set of its own"));
    }
    match splits.iter().position(|(known, _)| known == split) {
        Some(at) => Ok(splits.swap_remove(at).1),
        None => {
            let trains = splits.iter().find(|(known, _)| known.starts_with(split)).or(splits.first());
            Err(format!(
                "{} has no split {}; it has {}: name one, such as {}",
                name.repo,
                quote(split),
                listed(splits.iter().map(|(known, _)| &known[..])),
                HubName { split: trains.map(|(known, _)| quote(known).to_string()), ..name.clone() }
            ))
        }
    }
}

/// Parquet that the hub has made: `CONFIG/SPLIT/0000.parquet`, by split; and the configuration.
pub(super) fn converted(name: &HubName, files: &[String], config: Option<&str>) -> Result<(String, Splits), String> {
    let mut all: Vec<(&str, &str, &String)> = Vec::new();
    for path in files.iter().filter(|path| path.ends_with(".parquet")) {
        let mut parts = path.split('/');
        if let (Some(config), Some(split), Some(_), None) = (parts.next(), parts.next(), parts.next(), parts.next()) {
            all.push((config, split, path));
        }
    }
    let mut configs: Vec<&str> = all.iter().map(|(config, ..)| *config).collect();
    configs.dedup();
    let known = |config: &str| configs.contains(&config);
    let config = match config.or(Some("default")).filter(|config| known(config)) {
        Some(config) => config,
        None if configs.len() == 1 => configs[0],
        None => {
            let folder = HubName {
                revision: Some(CONVERTED.into()),
                path: Some(format!("{}/{TRAIN}", configs.first().unwrap_or(&"CONFIG"))),
                ..name.clone()
            };
            return Err(format!(
                "{} has several configurations, and none is the default: {}. Name one's folder instead, such as {}",
                name.repo,
                listed(configs.iter().copied()),
                quote(folder)
            ));
        }
    };
    let mut splits: Splits = Vec::new();
    for (_, split, path) in all.iter().filter(|(of, ..)| *of == config) {
        // The hub converts the first 5 GB of a large split, and says so.
        let split = split.strip_prefix("partial-").unwrap_or(split);
        match splits.iter_mut().find(|(known, _)| known == split) {
            Some((_, files)) => files.push((*path).clone()),
            None => splits.push((split.into(), vec![(*path).clone()])),
        }
    }
    Ok((config.into(), splits))
}

/// The revision that holds what the hub has made.
pub(super) const CONVERTED: &str = "refs/convert/parquet";

/// What stands in a folder of a repository.
pub(super) fn of_folder(name: &HubName, files: &[String], folder: &str) -> Result<Vec<String>, String> {
    let found = splits::conventional(files, &format!("{}/", folder.trim_matches('/')));
    // A folder of one split is meant as a whole.
    match (&name.split, found.len()) {
        (None, 1) => Ok(found.into_iter().flat_map(|(_, files)| files).collect()),
        _ => of_split(name, found),
    }
}

pub(super) fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(SHOWN);
    let shown: Vec<String> = names.take(SHOWN).map(|name| quote(name).to_string()).collect();
    match (shown.len(), more) {
        (0, _) => "none".into(),
        (_, 0) => shown.join(", "),
        _ => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(paths: &[&str]) -> Vec<String> {
        paths.iter().map(|path| path.to_string()).collect()
    }

    #[test]
    fn cards_come_before_conventions_and_scripts_need_a_conversion() {
        let name = HubName::dataset("o/n").unwrap();
        let files = owned(&["train.jsonl", "sub/a.jsonl", "sub/b.jsonl", "x.zip"]);
        let found = |card: &str| splits(&name, &files, card);
        let card = |configs: &str| format!("---\nconfigs:\n{configs}\n---\n");
        let is = |split: &str, paths: &[&str]| Ok(FoundSplits::Splits(vec![(split.into(), owned(paths))]));
        assert_eq!(found(""), is("train", &["train.jsonl"]));
        let sub = card("- config_name: default\n  data_files:\n  - split: all\n    path: sub/*");
        assert_eq!(found(&sub), is("all", &["sub/a.jsonl", "sub/b.jsonl"]));
        assert_eq!(found(&card("- config_name: c\n  data_dir: sub")), is("train", &["sub/a.jsonl", "sub/b.jsonl"]));
        for root in [".", "./", "/", "./sub/.."] {
            let found = found(&card(&format!("- config_name: c\n  data_dir: {root}")));
            assert_eq!(found.is_ok_and(|found| found == FoundSplits::Unreadable(Some("c".into()))), root == "./sub/..");
        }
        let zip = card("- config_name: c\n  data_files: '*.zip'");
        assert_eq!(found(&zip), Ok(FoundSplits::Unreadable(Some("c".into()))));
        let two = card("- config_name: one\n  data_files: sub/a.jsonl\n- config_name: two\n  data_files: sub/b.jsonl");
        let says = found(&two).unwrap_err();
        assert!(says.contains("one, two") && says.contains("such as o/n/one"), "{says}");
        let named = HubName::dataset("o/n/two").unwrap();
        assert_eq!(splits(&named, &files, &two), is("train", &["sub/b.jsonl"]));
        assert!(is_config(&two, "two") && !is_config(&two, "sub") && !is_config("", "two"));
        assert!(
            found(&card("- config_name: c\n  data_files: https://x.example/y.jsonl"))
                .unwrap_err()
                .contains("elsewhere")
        );
        assert_eq!(splits(&name, &owned(&["n.py", "train.jsonl"]), ""), Ok(FoundSplits::Unreadable(None)));
    }

    #[test]
    fn a_folder_is_its_split_train() {
        let read = |paths: &[&str], card: &str| reading_order("d", &owned(paths), card).map(|read| read.join(" "));
        assert_eq!(
            read(&["train.jsonl", "test.jsonl", "contest.jsonl", "README.md"], ""),
            Ok("train.jsonl README.md".into())
        );
        let one = "one split is meant as a whole";
        assert_eq!(read(&["eval/b.jsonl", "test.jsonl"], ""), Ok("eval/b.jsonl test.jsonl".into()), "{one}");
        assert_eq!(read(&["a.jsonl", "b.jsonl"], ""), Ok("a.jsonl b.jsonl".into()));
        let says = "d has no split train; it has test_sft, train_sft: name one, such as d:train_sft";
        let shards = ["data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"];
        assert_eq!(read(&shards, ""), Err(says.into()));
        let card = |files: &str| format!("---\nconfigs:\n- config_name: default\n  data_files:\n{files}\n---\n");
        let named = "  - split: test_sft\n    path: data/test*\n  - split: train_sft\n    path: data/train*";
        assert_eq!(read(&shards, &card(named)), Err(says.into()));
        let train = "  - split: train\n    path: [data/train*, more.jsonl]";
        assert!(read(&shards, &card(train)).unwrap_err().contains("train is more.jsonl, and no file has such a name"));
        assert_eq!(
            read(&[&shards[..], &["more.jsonl"]].concat(), &card(train)),
            Ok(format!("{} more.jsonl", shards[0]))
        );
        let twice = card("  - split: train\n    path: [\"data/*\", data/train_sft-00000-of-00001.jsonl]");
        assert_eq!(split_files("d", &owned(&shards), &twice, None, TRAIN), Ok(owned(&shards)));
    }

    #[test]
    fn conversions_have_a_folder_for_each_split() {
        let name = HubName::dataset("o/n").unwrap();
        let files = owned(&["a/train/0000.parquet", "a/train/0001.parquet", "a/partial-test/0000.parquet"]);
        let (config, splits) = converted(&name, &files, None).unwrap();
        assert_eq!((&config[..], splits.len(), splits[0].1.len(), &splits[1].0[..]), ("a", 2, 2, "test"));
        let both = [files, owned(&["b/train/0000.parquet"])].concat();
        assert_eq!(converted(&name, &both, Some("b")).unwrap().0, "b");
        assert!(converted(&name, &both, None).unwrap_err().contains("o/n@refs/convert/parquet/a/train"));
    }
}
