//! What names a model, a tokenizer or a data set becomes the path of its files here, before anything is planned: a name
//! of the hub, once on each host; a GGUF file; the base model of an adapter; a directory of checkpoints. An existing
//! path is never a name of the hub.
use crate::base::{Error, Result, quote};
use crate::ckpt;
use crate::comm::env::{self, RankEnv};
use crate::comm::handover::once_per_host;
use crate::data::corpus::{self, FolderSplit};
use crate::hub::{HubCommits, HubFiles, HubKind, HubName, HubOptions, HubReader, HubToken, ModelNeed};
use crate::nn::Lora;
use crate::run::generate;
use crate::run::plan::{check, data, objective, resume};
use crate::run::settings::args::Files;
use crate::run::settings::hub::{BASE, DataName, HubNames, NamedFiles, PROMPTS};
use crate::run::settings::value::set;
use crate::run::settings::{LogLevel, Settings, effect, model::ModelSettings};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Replaces the names in `runs`. `flags`: the model's flags, which must not contradict its config.
pub fn names(runs: &mut [Settings], flags: &ModelSettings, files: &Files, launched: Option<&RankEnv>) -> Result<()> {
    runs.iter_mut().try_for_each(whole_names)?;
    runs.iter_mut().try_for_each(splits)?;
    runs.iter_mut().try_for_each(of_directories)?;
    runs.iter_mut().try_for_each(base_of_adapter)?;
    if runs.iter().any(|s| may_need(s, files)) {
        from_hub(runs, files, "files", launched)?;
        runs.iter_mut().try_for_each(base_of_adapter)?; // that has been downloaded
        if runs.iter().any(|s| s.lora.is_alone && may_need(s, files)) {
            from_hub(runs, files, "base", launched)?; // its base model's shapes
        }
    }
    for s in runs {
        of_adapter(s)?;
        from_disk(s)?;
        if let Some(named) = s.hub.all.iter().find(|named| named.setting == "pretrain") {
            effect::shapes(flags, &named.path)?;
        }
    }
    Ok(())
}

/// Addresses of the hub, and what it knows by one word, become names of today.
fn whole_names(s: &mut Settings) -> Result<()> {
    let endpoint = endpoint();
    let named = |setting: &str, text: &str| match text.split_once("://") {
        Some((scheme @ ("hf" | "http" | "https"), rest)) => {
            let host = rest.split('/').next().unwrap_or_default();
            let known = ["huggingface.co", "hf.co"].contains(&host) || endpoint.split('/').any(|part| part == host);
            HubName::in_address(text).filter(|_| known || scheme == "hf").map(Some).ok_or_else(|| {
                let what = "is no address of a model or a data set of the hub, and others are not downloaded: give the path \
                            of a file that is here";
                Error::input(format!("`{setting}` {}: {what}", quote(text)))
            })
        }
        _ => Ok(HubName::of_one_word(text).filter(|_| !Path::new(DataName::of(text).name).exists())),
    };
    let (d, o) = (&mut s.data, &mut s.objective);
    for (setting, texts) in
        [("dataset", &mut d.dataset), ("eval_dataset", &mut d.eval_dataset), ("rollouts", &mut o.rollouts)]
    {
        for text in texts.iter_mut().flatten() {
            *text = named(setting, text)?.unwrap_or_else(|| std::mem::take(text));
        }
    }
    for (setting, path) in [
        ("pretrain", &mut s.model.pretrain),
        ("ref_pretrain", &mut o.ref_pretrain),
        ("teacher", &mut o.teacher),
        ("lora_merge", &mut s.lora.merge),
        ("lora_adapter", &mut s.lora.adapter),
    ] {
        let name = path.as_ref().and_then(|path| path.to_str()).map(|text| named(setting, text)).transpose()?.flatten();
        *path = name.map(PathBuf::from).or(path.take());
    }
    let name = d.tokenizer.as_ref().map(|text| named("tokenizer", text)).transpose()?.flatten();
    d.tokenizer = name.or(d.tokenizer.take());
    Ok(())
}

/// Puts splits that are settings of their own into the names of data sets; notes files, which have none.
fn splits(s: &mut Settings) -> Result<()> {
    let d = &mut s.data;
    let all = [("split", &d.split, &mut d.dataset), ("eval_split", &d.eval_split, &mut d.eval_dataset)];
    for (setting, split, texts) in all {
        let Some(split) = split else { continue };
        for text in texts.iter_mut().flatten() {
            let bad = |what: &str| Error::input(format!("`{setting}` {}: {}: {what}", quote(split), quote(&text)));
            let DataName { name, rest, .. } = DataName::of(text);
            let named = match dataset(text) {
                Some((_, name)) => Some(name.split),
                None if Path::new(name).is_dir() => Some(None),
                None => in_directory(name)
                    .map(|FolderSplit { split, .. }| name.ends_with(&format!(":{split}")).then(|| split.to_string())),
            };
            match named {
                Some(Some(named)) if named == *split => {}
                Some(Some(_)) => return Err(bad("this name has another split: remove one of them")),
                Some(None) => *text = format!("{name}:{split}{rest}"),
                None => {
                    let flag = setting.replace('_', "-");
                    s.notes.push(format!("--{flag} {split} has no effect here: {text}: a file is one split"));
                }
            }
        }
    }
    Ok(())
}

/// `DIR:SPLIT`, `DIR/CONFIG` or `DIR/CONFIG:SPLIT` of a directory, without slice and weight.
fn in_directory(text: &str) -> Option<FolderSplit<'_>> {
    let named = DataName::of(text).name;
    if Path::new(text).exists() || Path::new(named).exists() {
        return None;
    }
    let (path, split) = named.rsplit_once(':').map_or((named, None), |(path, split)| (path, Some(split)));
    let path = Path::new(path);
    if path.is_dir() {
        return split.map(|split| FolderSplit { folder: path, config: None, split });
    }
    let (folder, config) = (path.parent()?, path.file_name()?.to_str()?);
    let there = folder.is_dir() && corpus::has_config(folder, config);
    there.then_some(FolderSplit { folder, config: Some(config), split: split.unwrap_or("train") })
}

/// The files of a split take the place of its name.
fn of_directories(s: &mut Settings) -> Result<()> {
    let (d, rollouts) = (&mut s.data, &mut s.objective.rollouts);
    let all = [("dataset", &mut d.dataset), ("eval_dataset", &mut d.eval_dataset), ("rollouts", rollouts)];
    for (setting, texts) in all.into_iter().filter_map(|(setting, texts)| Some((setting, texts.as_mut()?))) {
        for text in std::mem::take(texts) {
            let Some(named) = in_directory(&text) else {
                texts.push(text);
                continue;
            };
            let bad = |what: String| Error::input(format!("`{setting}` {}: {what}", quote(&text)));
            let files = corpus::of_split(named).map_err(|e| bad(e.to_string()))?;
            match (DataName::of(&text).rest, &files[..]) {
                ("", files) => texts.extend(files.iter().map(|file| file.display().to_string())),
                (rest, [file]) => texts.push(format!("{}{rest}", file.display())),
                (_, files) => {
                    let n = files.len();
                    return Err(bad(format!(
                        "the split has {n} files, and a slice or a weight is of one: put them in a directory"
                    )));
                }
            }
        }
    }
    Ok(())
}

/// Without a model an adapter, the newest of several checkpoints, is merged into, or trained on, the base model that it
/// names.
fn base_of_adapter(s: &mut Settings) -> Result<()> {
    let c = &s.checkpoint;
    if let (Some(true), None, Some(path), true) = (c.export, &s.lora.merge, &s.model.pretrain, c.save_hf.is_none()) {
        let dir = ckpt::of_model(path)?;
        if dir.join(ckpt::adapter::FILE).exists() && ckpt::is_model(&dir).is_err() {
            (s.lora.merge, s.lora.is_alone, s.model.pretrain) = (Some(dir), true, None);
        }
    }
    for path in [&mut s.lora.merge, &mut s.lora.adapter].into_iter().flatten() {
        *path = ckpt::of_model(path)?;
    }
    if let (Some(adapter), None) = (s.lora.merge.as_ref().or(s.lora.adapter.as_ref()), &s.model.pretrain) {
        s.model.pretrain = ckpt::adapter::base(adapter).map(PathBuf::from);
    }
    Ok(())
}

/// An adapter that is trained on decides what adapters the run has.
fn of_adapter(s: &mut Settings) -> Result<()> {
    let Some(dir) = s.lora.adapter.clone() else { return Ok(()) };
    let l = &mut s.lora;
    let Lora { rank, alpha, targets, dropout } = ckpt::adapter::read(&dir)?.trainable(&dir)?;
    let differs = |flag: &str, given: String, found: String| {
        Error::input(format!("--{flag} {given}: the adapter {} has {found}: remove the flag", dir.display()))
    };
    let alpha = f64::from(alpha);
    if let Some(given) = l.rank.filter(|given| *given != rank) {
        return Err(differs("lora-rank", given.to_string(), rank.to_string()));
    }
    if let Some(given) = l.alpha.filter(|given| *given as f32 != alpha as f32) {
        return Err(differs("lora-alpha", given.to_string(), alpha.to_string()));
    }
    let sorted = |names: &[String]| names.iter().cloned().collect::<BTreeSet<_>>();
    if let Some(given) = l.target_modules.as_ref().filter(|given| sorted(given) != sorted(&targets)) {
        return Err(differs("lora-target-modules", given.join(" "), targets.join(" ")));
    }
    (l.rank, l.alpha, l.target_modules) = (Some(rank), Some(alpha), Some(targets));
    // As PEFT, which trains on with the adapter's own.
    l.dropout = l.dropout.or_else(|| dropout.to_string().parse().ok());
    Ok(())
}

/// GGUF files become the directories that they were made from; an export takes the newest of several checkpoints.
fn from_disk(s: &mut Settings) -> Result<()> {
    // An adapter alone needs no weights of its base model.
    if let Some(path) = s.model.pretrain.as_ref().filter(|_| s.checkpoint.export == Some(true) && !s.lora.is_alone) {
        s.model.pretrain = Some(ckpt::of_model(path)?);
    }
    let cache = data::cache_dir(&s.data);
    let o = &mut s.objective;
    for (setting, path) in
        [("pretrain", &mut s.model.pretrain), ("ref_pretrain", &mut o.ref_pretrain), ("teacher", &mut o.teacher)]
    {
        let Some(file) = path.clone() else { continue };
        let dir = ckpt::gguf::resolve(&file, &cache)?;
        if dir == file {
            continue;
        }
        if let Some(written) = s.checkpoint.save_gguf.as_ref().filter(|written| ckpt::same_place(written, &file)) {
            return Err(Error::input(format!(
                "--save-gguf {}: is the file of `{setting}`, which is never overwritten; give another file",
                written.display()
            )));
        }
        // The settings that a run records name the file.
        match s.hub.all.iter_mut().find(|named| named.path == file) {
            Some(named) => named.path.clone_from(&dir),
            None => {
                let given = file.display().to_string();
                s.hub.all.push(NamedFiles { setting: setting.into(), pinned: given.clone(), given, path: dir.clone() });
            }
        }
        *path = Some(dir);
    }
    Ok(())
}

fn from_hub(runs: &mut [Settings], files: &Files, what: &str, launched: Option<&RankEnv>) -> Result<()> {
    let (first, work) = (runs[0].clone(), || resolved(runs, files));
    let found: Vec<(HubNames, Vec<String>)> = match launched {
        None => work()?,
        Some(env) => {
            let limit = Duration::from_secs_f64(set(&first.faults.init_timeout, "faults.init_timeout")?);
            once_per_host(env, what, limit, work)?
        }
    };
    for (s, (names, notes)) in runs.iter_mut().zip(found) {
        apply(s, &names);
        s.notes.extend(notes);
    }
    Ok(())
}

/// Whether a name of the hub is among the settings, or may be in a file that they name.
fn may_need(s: &Settings, files: &Files) -> bool {
    let data = [&s.data.dataset, &s.data.eval_dataset, &s.objective.rollouts].into_iter().flatten().flatten();
    let base = files.writes_text() && generate::base_name(s).is_some();
    base || prompts(files).is_some()
        || models(s).iter().any(|(_, text)| is_model(text))
        || data.into_iter().any(|text| dataset(text).is_some())
}

fn is_model(text: &str) -> bool {
    !Path::new(text).exists() && HubName::model(text).is_some_and(|name| name.path.is_some() || !is_file(&name.repo))
}

/// The name in an entry of a data set, as text and parsed.
fn dataset(text: &str) -> Option<(&str, HubName)> {
    let given = DataName::of(text).name;
    let name = HubName::dataset(given).filter(|_| !Path::new(text).exists() && !Path::new(given).exists())?;
    // rows/train.jsonl is a path with a mistake in it.
    (name.path.is_some() || !is_file(&name.repo)).then_some((given, name))
}

/// A data set of prompts that `--generate` names; text has spaces, or no slash.
fn prompts(files: &Files) -> Option<(&str, HubName)> {
    dataset(files.generate.as_deref().filter(|text| !text.contains(char::is_whitespace))?)
}

fn is_file(text: &str) -> bool {
    FILES.iter().any(|ending| text.ends_with(ending))
}

/// Endings of files, which no repository has.
const FILES: [&str; 11] =
    [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".npy", ".txt", ".gz", ".zst", ".gguf", ".safetensors"];

/// For `experiments plan`, which reads a model's config, and its tokenizer if prompts are to be counted.
pub fn config(s: &mut Settings) -> Result<()> {
    let need = if s.run.sample_prompts.is_some() { ModelNeed::Config } else { ModelNeed::Shapes };
    whole_names(s)?;
    let given = s.model.pretrain.as_ref().and_then(|path| path.to_str()).filter(|text| is_model(text));
    if let Some((text, name)) = given.and_then(|text| Some((text.to_string(), HubName::model(text)?))) {
        let found = HubReader::new(options(s))?.model(&name, need);
        s.model.pretrain = Some(found.map_err(|e| in_setting("pretrain", &text, e))?.path);
    }
    from_disk(s)
}

/// Settings that name a model.
fn models(s: &Settings) -> Vec<(&'static str, String)> {
    let o = &s.objective;
    let paths = [
        ("pretrain", &s.model.pretrain),
        ("ref_pretrain", &o.ref_pretrain),
        ("teacher", &o.teacher),
        ("lora_merge", &s.lora.merge),
        ("lora_adapter", &s.lora.adapter),
    ];
    let paths = paths.into_iter().filter_map(|(setting, path)| Some((setting, path.as_ref()?.to_str()?.to_string())));
    paths.chain(s.data.tokenizer.clone().map(|text| ("tokenizer", text))).collect()
}

fn endpoint() -> String {
    env::hub_endpoint().unwrap_or_else(|| HubOptions::ENDPOINT.into())
}
fn options(s: &Settings) -> HubOptions {
    HubOptions {
        endpoint: endpoint(),
        token: env::hub_token().and_then(|text| HubToken::new(&text)),
        cache: env::hub_cache(),
        views: env::cache_dir().join("hub"),
        offline: env::hub_is_offline(),
        quiet: s.watch.log_level.unwrap_or(LogLevel::Info) < LogLevel::Info,
        pause: HubOptions::PAUSE,
        range: HubOptions::RANGE,
    }
}

/// The names of each run, and what to say about them.
fn resolved(runs: &[Settings], files: &Files) -> Result<Vec<(HubNames, Vec<String>)>> {
    let mut hub = HubReader::new(options(&runs[0]))?;
    let writes = !files.writes_text() && files.print_samples.is_none() && files.preview.is_none();
    if writes {
        // Before an hour of downloading.
        runs.iter().try_for_each(check::outputs)?;
        runs.iter().filter(|s| !s.only_converts()).try_for_each(objective::check)?;
    }
    runs.iter().map(|s| Ok((one(&mut hub, s, files)?, hub.notes()))).collect()
}

fn one(hub: &mut HubReader, s: &Settings, files: &Files) -> Result<HubNames> {
    let samples = files.print_samples.is_some() || files.preview.is_some();
    hub.pin(if !files.writes_text() && !samples { recorded(s)? } else { HubCommits::new() });
    let mut names = HubNames::default();
    let mut found = |setting: &str, given: &str, result: Result<HubFiles>| {
        let HubFiles { path, name } = result.map_err(|e| in_setting(setting, given, e))?;
        let files = path.clone();
        names.all.push(NamedFiles { setting: setting.into(), given: given.into(), pinned: name.to_string(), path });
        Ok::<PathBuf, Error>(files)
    };
    for (setting, text) in models(s).iter().filter(|(_, text)| is_model(text)) {
        names.without_weights |= files.print_config && *setting != "tokenizer";
        let config = samples || files.print_config || *setting == "tokenizer" || s.lora.is_alone;
        let need = if config { ModelNeed::Config } else { ModelNeed::Weights };
        let Some(name) = HubName::model(text) else { continue };
        let dir = found(setting, text, hub.model(&name, need))?;
        let base = ckpt::adapter::base(&dir).filter(|_| setting.starts_with("lora_") && s.model.pretrain.is_none());
        if let Some(base) = base.filter(|base| is_model(base))
            && let Some(name) = HubName::model(&base)
        {
            found("pretrain", &base, hub.model(&name, need))?;
        }
    }
    // --generate, --chat, --lora-merge and --export read no data.
    let trains = !files.writes_text() && !s.only_converts();
    let (d, o) = (&s.data, &s.objective);
    let data = [("dataset", &d.dataset), ("eval_dataset", &d.eval_dataset), ("rollouts", &o.rollouts)];
    for (setting, texts) in data.into_iter().filter(|_| trains) {
        for (given, name) in texts.iter().flatten().filter_map(|text| dataset(text)) {
            found(setting, given, hub.dataset(&name))?;
        }
    }
    if let Some((given, name)) = prompts(files) {
        let rows = hub.dataset(&name).map_err(|e| {
            let hint = "A word like OWNER/NAME is a data set of prompts: to continue it as text, write it into a row";
            Error::input(format!("{e}. {hint}"))
        });
        found(PROMPTS, given, rows)?;
    }
    if files.writes_text() {
        let mut s = s.clone();
        apply(&mut s, &names);
        if let Some((adapter, base)) = generate::base_name(&s) {
            let name = HubName { kind: HubKind::Model, ..base };
            let HubFiles { path, name } = hub
                .model(&name, ModelNeed::Weights)
                .map_err(|e| Error::input(format!("--generate: the base model of {}: {e}", adapter.display())))?;
            let (setting, given) = (BASE.into(), adapter.display().to_string());
            names.all.push(NamedFiles { setting, given, pinned: name.to_string(), path });
        }
    }
    names.commits = hub.commits();
    Ok(names)
}

fn in_setting(setting: &str, given: &str, e: Error) -> Error {
    match e {
        Error::Input(what) => Error::input(format!("`{setting}` {}: {what}", quote(given))),
        other => Error::input(format!("`{setting}` {}: {other}", quote(given))),
    }
}

/// What revisions were in the run that this one continues: they may have moved since.
fn recorded(s: &Settings) -> Result<HubCommits> {
    let Some(dir) = resume::newest(&s.checkpoint)? else { return Ok(HubCommits::new()) };
    let Ok((state, _)) = ckpt::state::read(&dir) else { return Ok(HubCommits::new()) }; // the plan reports damage
    let commits = state.data.get(resume::HUB).cloned().unwrap_or_default();
    Ok(serde_json::from_value(commits).unwrap_or_default())
}

/// Puts the paths in the place of the names.
fn apply(s: &mut Settings, names: &HubNames) {
    for NamedFiles { setting, given, path, .. } in &names.all {
        let path = || Some(path.clone());
        match &setting[..] {
            "pretrain" => s.model.pretrain = path(),
            "ref_pretrain" => s.objective.ref_pretrain = path(),
            "teacher" => s.objective.teacher = path(),
            "lora_merge" => s.lora.merge = path(),
            "lora_adapter" => s.lora.adapter = path(),
            "tokenizer" => s.data.tokenizer = path().map(|path| path.display().to_string()),
            PROMPTS => {}
            BASE => (s.model.pretrain, s.checkpoint.resume) = (path(), Some(given.clone())),
            _ => {
                let of = match &setting[..] {
                    "dataset" => &mut s.data.dataset,
                    "rollouts" => &mut s.objective.rollouts,
                    _ => &mut s.data.eval_dataset,
                };
                for text in of.iter_mut().flatten().filter(|text| DataName::of(text).name == given) {
                    *text = format!("{}{}", path().unwrap_or_default().display(), DataName::of(text).rest);
                }
            }
        }
    }
    s.hub = names.clone();
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn addresses_and_words_become_names() {
        let mut s = Settings::default();
        s.model.pretrain = Some("https://huggingface.co/o/m/tree/main".into());
        s.lora.adapter = Some("tuned".into());
        s.data.dataset = Some(vec!["hf://datasets/o/d:test[:10%]:0.25".into(), "rows.jsonl:0.75".into()]);
        s.data.eval_dataset = Some(vec!["https://hf.co/datasets/o/d/blob/main/held.jsonl".into()]);
        s.data.tokenizer = Some("hf://o/t@v1".into());
        s.objective.teacher = Some("gpt2".into());
        whole_names(&mut s).unwrap();
        assert_eq!(s.model.pretrain.as_deref(), Some(Path::new("o/m")));
        assert_eq!(s.lora.adapter.as_deref(), Some(Path::new("tuned")));
        assert_eq!(s.data.dataset, Some(vec!["o/d:test[:10%]:0.25".into(), "rows.jsonl:0.75".into()]));
        assert_eq!(s.data.eval_dataset, Some(vec!["o/d/held.jsonl".into()]));
        assert_eq!(s.data.tokenizer.as_deref(), Some("o/t@v1"));
        assert_eq!(s.objective.teacher.as_deref(), Some(Path::new("openai-community/gpt2")));
        for other in ["https://example.com/a/b/rows.jsonl", "https://huggingface.co/docs"] {
            s.data.dataset = Some(vec![other.into()]);
            let fault = whole_names(&mut s).unwrap_err().to_string();
            assert!(fault.contains(other) && fault.contains("not downloaded"), "{fault}");
        }
    }

    #[test]
    fn paths_and_names_take_each_others_place() {
        let mut s = Settings::default();
        s.model.pretrain = Some("o/m".into());
        s.data.dataset = Some(vec!["o/d:test[:10%]:0.25".into(), "rows.jsonl:0.75".into()]);
        s.objective.rollouts = Some(vec!["o/r".into()]);
        let named = |setting: &str, given: &str, pinned: &str, path: &str| NamedFiles {
            setting: setting.into(),
            given: given.into(),
            pinned: pinned.into(),
            path: path.into(),
        };
        let all = vec![named("pretrain", "o/m", "o/m@1", "/c/m"), named("dataset", "o/d:test", "o/d@2:test", "/c/d")];
        let all = all.into_iter().chain([named("rollouts", "o/r", "o/r@3", "/c/r")]).collect();
        let names = HubNames { all, ..HubNames::default() };
        apply(&mut s, &names);
        assert_eq!(s.model.pretrain.as_deref(), Some(Path::new("/c/m")));
        assert_eq!(s.data.dataset, Some(vec!["/c/d[:10%]:0.25".into(), "rows.jsonl:0.75".into()]));
        assert_eq!(s.objective.rollouts, Some(vec!["/c/r".into()]));
        let mut config = json!(s);
        config["data"]["tokenizer"] = json!("/c/m");
        names.restore(&mut config);
        assert_eq!((&config["model"]["pretrain"], &config["data"]["tokenizer"]), (&json!("o/m@1"), &json!("o/m@1")));
        assert_eq!(config["data"]["dataset"], json!(["o/d@2:test[:10%]:0.25", "rows.jsonl:0.75"]));
    }
}
