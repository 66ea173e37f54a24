//! Settings by precedence: defaults < DeepSpeed's defaults < its file < configuration file < flags. Files are overlaid
//! as trees, key by key, so that errors name the file and the key. Never inspects the machine.
use crate::base::{Error, Result};
use crate::run::settings::args::Cli;
use crate::run::settings::blocks;
use crate::run::settings::deepspeed;
use crate::run::settings::defaults::defaults;
use crate::run::settings::effect;
use crate::run::settings::file::{ConfigFile, lay};
use crate::run::settings::idle;
use crate::run::settings::names::StrategyName;
use crate::run::settings::sections::Settings;
use crate::run::settings::stages;
use crate::run::settings::tasks;
use crate::run::settings::value::overlay;
use serde_json::Value;
use std::path::Path;

/// The runs of this command line: one, or one per training stage, in file order. All are resolved first, so that an
/// error in the last stage is found before the first one starts. `default` is the binary's strategy.
pub fn runs(cli: &Cli, default: StrategyName) -> Result<Vec<Settings>> {
    let file = file(cli)?;
    let stages = file.stages()?;
    let one = !cli.trains() || cli.files.stage.is_some() || stages.is_empty();
    let names = if one { vec![cli.files.stage.clone()] } else { stages.into_iter().map(|s| Some(s.0)).collect() };
    names.iter().map(|name| one_run(cli, &file, name.as_deref(), default)).collect()
}

/// The settings of one run; `stage` names one of the file's training stages.
pub fn resolve(cli: &Cli, stage: Option<&str>, default: StrategyName) -> Result<Settings> {
    one_run(cli, &file(cli)?, stage, default)
}

fn file(cli: &Cli) -> Result<ConfigFile> {
    let Some(path) = &cli.files.config else { return Ok(ConfigFile::default()) };
    let mut file = ConfigFile::read(path)?;
    let given = to_tree(&cli.settings)?;
    file.around.extend(given["objective"]["objective"].as_str().map(|name| format!("--objective={name}")));
    for (section, name) in [("objective", "rollouts"), ("model", "pretrain"), ("data", "dataset")] {
        file.around.extend((!given[section][name].is_null()).then(|| format!("--{name}")));
    }
    Ok(file)
}

fn one_run(cli: &Cli, file: &ConfigFile, stage: Option<&str>, default: StrategyName) -> Result<Settings> {
    let mut flags = to_tree(&cli.settings)?;
    let fsdp = cli.files.fsdp_config.as_deref();
    let trainers = fsdp.filter(|text| ConfigFile::is_trainers(text));
    let mut layer = file.settings(cli.files.model_config.as_deref(), fsdp.filter(|_| trainers.is_none()), stage)?;
    if let Some(text) = trainers {
        let more = ConfigFile::of_trainer(text)?.settings(None, None, None)?;
        lay(&mut layer.settings, more.settings);
        layer.notes.extend(more.notes);
    }
    layer.tunes |= !flags["model"]["pretrain"].is_null();
    if let (true, true, Some(stage)) = (layer.follows, cli.trains(), stage) {
        stages::flags(stage, cli.files.stage.is_some(), &mut flags, &mut layer.notes)?;
    }
    let tunes = layer.follows && layer.tunes;
    let mut requested = layer.settings;
    lay(&mut requested, flags);
    effect::evaluated(&mut requested);
    if requested["run"]["nproc_per_node"] == blocks::AUTO {
        requested["run"]["nproc_per_node"] = Value::Null;
    }
    let (mut merged, mut foreign) = (defaults().clone(), Value::Null);
    if let Some(path) = requested["fsdp"]["deepspeed"].as_str() {
        let file = deepspeed::read(Path::new(path), &requested)?;
        overlay(&mut requested, file.given);
        foreign = file.defaults;
    }
    let mut known = foreign.clone();
    overlay(&mut known, requested.clone());
    let by_task = tasks::imply(&known, tunes, &mut merged);
    effect::supersede(&mut merged, &foreign);
    overlay(&mut merged, foreign);
    effect::imply(&requested, &mut merged);
    overlay(&mut merged, requested.clone());
    let engine = effect::engine(&mut merged, default);
    // --generate, --chat and --lora-merge accept the file of a training run: only their flags must have an effect.
    let (task, requested) = match (cli.files.writes_text(), cli.settings.only_converts()) {
        (true, _) => ("generate", to_tree(&cli.settings)?),
        (false, true) => ("merge", to_tree(&cli.settings)?),
        (false, false) => ("train", requested),
    };
    let verbose = merged["watch"]["log_level"] == "debug";
    let mut notes: Vec<String> = cli.settings.notes.clone();
    notes.extend(file.summary(layer.notes, verbose));
    notes.extend(idle::settings(&requested, &mut merged, task, engine)?);
    if cli.files.local_rank.is_some() {
        notes.push("--local-rank has no effect here: the launcher's environment variables give the rank".into());
    }
    if let Some(dir) = merged["model"]["pretrain"].as_str() {
        effect::shapes(&cli.settings.model, Path::new(dir))?;
    }
    let mut settings: Settings = serde_json::from_value(merged).map_err(|e| Error::input(format!("settings: {e}")))?;
    settings.notes = notes;
    settings.task = by_task;
    settings.check()?;
    if let Some(stage) = stage {
        let names: Vec<String> = file.stages()?.into_iter().map(|s| s.0).collect();
        stages::place(&mut settings, &names, stages::find(&names, stage)?)?;
    }
    Ok(settings)
}

fn to_tree(settings: &Settings) -> Result<Value> {
    serde_json::to_value(settings).map_err(|e| Error::input(format!("settings: {e}")))
}

/// The settings of a configuration file's bytes alone, without flags or defaults: YAML, or JSON where `path` ends so.
pub fn parse(text: &[u8], path: &Path) -> Result<Value> {
    ConfigFile::parse(text, path)?.settings(None, None, None).map(|layer| layer.settings)
}
