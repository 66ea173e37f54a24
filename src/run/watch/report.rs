//! The header of a run, before its first step, and what to do after the last. Never decides anything.
use crate::base::columns::wrap;
use crate::base::{CATEGORIES, Category, DType, Result, quote};
use crate::ckpt;
use crate::data::tokenizer::DEFAULT;
use crate::data::{Report, SampleKind, Tokenizer};
use crate::nn::Checkpointing;
use crate::optim::{Rule, Warmup};
use crate::run::plan::Plan;
use crate::run::plan::resume::ResumeFrom;
use crate::run::plan::tokens;
use crate::run::settings::args;
use crate::run::settings::{OffloadName, ShardingName, WrapName};
use crate::store::Offload;
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::path::Path;

/// Columns of the header on a terminal: longer lines go on below, under the text. Elsewhere a line stays whole, for
/// grep.
const COLUMNS: usize = 100;
/// Columns of a label.
const LABEL: usize = 9;
/// Data sets of a mixture in the header; the metrics file names all.
const SOURCES: usize = 8;

/// The run in a screen of lines, each with a label.
pub fn header(plan: &Plan, resumed: Option<&ResumeFrom>, device: &str) -> Result<String> {
    let (engine, s) = (&plan.engine, &plan.settings);
    let mesh = &plan.ranks.mesh;
    let hosts = match plan.ranks.hosts() {
        1 => String::new(),
        n => format!("{n} hosts {}, ", plan.ranks.carrier.between()),
    };
    let mut lines: Vec<(&str, String)> = s.run.stage.iter().map(|stage| ("stage", stage.clone())).collect();
    let names = s.hub.all.iter().map(|named| {
        let label = if named.pinned == named.given { "file" } else { "hub" };
        (label, format!("{} {}", named.setting, quote(&named.pinned)))
    });
    lines.extend(names);
    lines.extend([
        ("model", model(plan)),
        (
            "ranks",
            format!(
                "{} on {hosts}{device}: dp_replicate {} x dp_shard {} x sp {} x tp {}{}",
                mesh.world(),
                mesh.dp_replicate,
                mesh.dp_shard,
                mesh.sp,
                mesh.tp,
                if mesh.ep > 1 { format!(", dp_shard with ep {}", mesh.ep) } else { String::new() }
            ),
        ),
        ("engine", format!("{}: {}", engine.strategy.name(), sharding(plan))),
        ("dtypes", dtypes(plan)),
        ("batch", batch(plan)?),
        (
            "optim",
            format!(
                "{}, lr {} {}{}, warmup {}{}, clip {}",
                value(&s.optim.optimizer),
                plan.schedule.peak,
                value(&s.optim.lr_scheduler),
                plan.schedule.decay.map_or(String::new(), |steps| format!(" in the last {steps} steps")),
                plan.schedule.warmup,
                if plan.schedule.rise == Warmup::Log { " (log)" } else { "" },
                engine.grad_clip
            ),
        ),
        ("memory", memory(plan)),
        ("data", format!("{}{}{}", plan.dataset.report(), packed(plan), repeated(plan)?)),
    ]);
    let sources: Vec<_> = plan.dataset.sources().collect();
    lines.extend(sources.iter().take(SOURCES).map(|(source, share)| ("", format!("{} % {source}", percent(*share)))));
    if sources.len() > SOURCES {
        lines.push(("", format!("and {} more data sets (--metrics-path lists all)", sources.len() - SOURCES)));
    }
    lines.extend(plan.eval.iter().map(|eval| ("eval", eval.report().to_string())));
    lines.extend(judged(plan).map(|text| ("eval", text)));
    lines.extend(unevaluated(plan).map(|text| ("eval", text)));
    lines.extend(task(plan).map(|text| ("defaults", text)));
    if let Err(why) = plan.tokenizer.usable() {
        lines.push(("tokens", format!("are given as ids: {}", args::with_flags(&why.to_string()))));
    }
    if let (Some(path), Some(true), true) = (&s.fsdp.deepspeed, s.fsdp.deepspeed_unclipped, engine.grad_clip == 0.0) {
        let why = "gradients are not clipped; DeepSpeed clips at 1 since 0.19.3";
        lines.push(("clip", format!("{} has no gradient_clipping: {why}", path.display())));
    }
    lines.extend(template(plan)?.map(|text| ("template", text)));
    lines.extend(inert(plan)?.map(|text| ("config", text)));
    lines.extend(undropped(plan)?.map(|text| ("dropout", text)));
    lines.extend(carried(plan)?.map(|text| ("vision", text)));
    lines.extend(never_warm(plan).map(|text| ("warmup", text)));
    lines.extend(deferred(plan)?.map(|text| ("accum", text)));
    lines.extend(offloaded(plan).map(|text| ("offload", text)));
    if let Some(from @ ResumeFrom { dir, state: then, .. }) = resumed {
        lines.push(("resume", format!("{} after step {}", dir.display(), then.step)));
        let now = plan.trainer_state(then.step, 0, 0);
        let differences =
            then.differences(&now).into_iter().filter(|text| !text.starts_with("optimizer.moments_dtype"));
        lines.extend(differences.map(|difference| ("", difference)));
        let [stored, stores] = [then, &now].map(|state| state.optimizer.get("moments_dtype").map(Value::as_str));
        if stored != stores {
            let [stored, stores] = [stored, stores].map(|name| name.flatten().unwrap_or("fp32"));
            lines.push(("", format!("moments are converted from {stored} to {stores}")));
        }
        lines.extend(plan.forgotten_evaluations(from).map(|why| ("", why)));
        let saves = plan.settings.checkpoint.ckpt_dir.as_ref().filter(|_| from.damaged.is_empty() && !plan.is_done());
        if let Some((dir, last)) = saves.map(|dir| Ok((dir, ckpt::later(dir, then.step)?))).transpose()?
            && let Some(last) = last
        {
            let dir = dir.display();
            lines.push(("", format!("later checkpoints of {dir}, up to step {last}, are replaced as this run saves")));
        }
        if plan.is_done() {
            let remedy = if plan.is_stopped(from) {
                "--patience stopped this run; raise it to continue"
            } else {
                "raise --max-steps to continue"
            };
            lines.push(("", format!("nothing is left to train: {remedy}")));
        }
    }
    Ok(lines.iter().map(|(label, text)| labeled(label, text)).collect::<Vec<_>>().join("\n"))
}

/// Why a fine-tune shows no loss of other rows than those it trains on.
fn unevaluated(plan: &Plan) -> Option<String> {
    let (run, rows) = (&plan.settings.run, plan.dataset.rows());
    let none = plan.eval.is_none() && plan.split.held_out.iter().all(|&rows| rows == 0);
    let held = plan.dataset.kind() != SampleKind::Group; // rollouts are trained on
    plan.settings.task.as_ref().filter(|_| none && held && run.eval == Some(true))?;
    let why = match plan.settings.data.shuffle {
        Some(false) => "rows in the order of the file (--no-shuffle) are all trained on".to_string(),
        _ if plan.resume.is_some() => "the run started without held-out rows".to_string(),
        _ if rows == 1 => "there is a single row".to_string(),
        _ => format!("{rows} rows are too few to hold some out"),
    };
    Some(format!("none: {why}. Name rows that are not trained on with --eval-dataset"))
}

/// The prompts whose texts are judged at evaluations.
fn judged(plan: &Plan) -> Option<String> {
    let prompts = plan.prompts.as_ref().filter(|prompts| prompts.are_judged())?;
    let paths = plan.settings.data.eval_dataset.as_deref().unwrap_or_default().join(", ");
    let plural = if prompts.rows.len() == 1 { "" } else { "s" };
    Some(format!("{} prompt{plural} of {paths}: rewards of a text after each", prompts.rows.len()))
}

/// The task whose defaults apply, and what it decided.
fn task(plan: &Plan) -> Option<String> {
    let s = &plan.settings;
    let task = s.task.as_ref()?;
    let longest = task.max_len.filter(|_| plan.dataset.has_rows_of_its_own());
    let lengths =
        longest.map(|limit| format!("max_len {} (the longest row, up to {limit})", plan.dataset.max_sequence()));
    let steps = s.run.epochs.filter(|_| task.epochs.is_some()).map(|epochs| format!("epochs {epochs}"));
    let all: Vec<String> = task.taken.iter().cloned().chain(lengths).chain(steps).collect();
    let given = if task.given.is_empty() { String::new() } else { format!("; given: {}", task.given.join(", ")) };
    Some(format!("of a {}: {}{given}", task.name, if all.is_empty() { "none".into() } else { all.join(", ") }))
}

fn labeled(label: &str, text: &str) -> String {
    let columns = if std::io::stderr().is_terminal() { COLUMNS } else { usize::MAX };
    wrap(&format!("{label:<LABEL$}"), text.split(' '), " ", columns)
}

/// A chat template in use that is not the tokenizer's own.
fn template(plan: &Plan) -> Result<Option<String>> {
    let (d, tokenizer) = (&plan.settings.data, &plan.tokenizer);
    let what = match &d.tokenizer_chat_template {
        _ if !matches!(tokenizer, Tokenizer::File(_)) => return Ok(None),
        None if tokenizer.has_trained_template() => "that of the checkpoint",
        None => {
            let chats = d.apply_chat_template == Some(true) || d.multiturn == Some(true);
            let named = tokens::tool_use(d, tokenizer).filter(|_| chats).map(|_| tokens::TOOL_USE);
            return Ok(
                named.map(|name| format!("{name} for rows with tools, as in transformers; others: the default one"))
            );
        }
        Some(_) if tokens::template(d, tokenizer)?.as_deref() == tokenizer.template(DEFAULT).ok() => return Ok(None),
        Some(given) if given.contains('{') => "as given",
        Some(given) => given,
    };
    Ok(Some(format!("{what}, not the tokenizer's default one; saved models hold it")))
}

fn model(plan: &Plan) -> String {
    let (spec, size) = (&plan.engine.spec, &plan.size);
    let learning = (size.trainable < size.params).then(|| format!("{} trainable", count(size.trainable as u64)));
    let active = size.params - spec.idle_params();
    let active = (active < size.params).then(|| format!("{} active", count(active as u64)));
    let part: Vec<String> = learning.into_iter().chain(active).collect();
    let part = if part.is_empty() { String::new() } else { format!(" ({})", part.join(", ")) };
    let dense = spec.has_dense_blocks().then(|| format!("ff {}", spec.ff));
    let sparse = spec.experts.as_ref().map(|e| format!("{} of {} experts of width {}", e.top_k, e.count, e.ff));
    let ff: Vec<String> = dense.into_iter().chain(sparse).collect();
    let heads = match spec.kv_heads == spec.heads {
        true => spec.heads.to_string(),
        false => format!("{}/{}", spec.heads, spec.kv_heads),
    };
    format!(
        "{} of {} parameters{part}: {} layers, width {}, {heads} heads, {}, vocabulary {}{}",
        spec.arch.name(),
        count(size.params as u64),
        spec.layers,
        spec.dim,
        ff.join(", "),
        spec.vocab,
        if spec.tied { ", tied embeddings" } else { "" },
    )
}

/// What ranks share, and in which units.
fn sharding(plan: &Plan) -> String {
    let f = &plan.settings.fsdp;
    let mode = value(&f.sharding);
    match plan.engine.strategy.name() {
        "ddp" => "all parameters on every rank".to_string(),
        "fsdp_reference" => format!("{mode}, one unit per tensor"),
        "zero_1" => "optimizer states sharded".to_string(),
        "zero_2" => "optimizer states and gradients sharded".to_string(),
        "zero_3" => "optimizer states, gradients and parameters sharded".to_string(),
        _ => {
            let alone = f.sharding == Some(ShardingName::HybridShard) && plan.ranks.mesh.dp_replicate == 1;
            let note = if alone { ", one replica per host (--dp-replicate-size N for more)" } else { "" };
            let unit = match f.auto_wrap {
                Some(WrapName::Size) => {
                    format!("units of {} parameters or more", count(f.wrap_min_params.unwrap_or(0) as u64))
                }
                Some(WrapName::None) => "one unit".into(),
                _ => "one unit per block".into(),
            };
            let live = match (f.max_live_parameters, plan.live, &f.memory_budget) {
                (Some(most), ..) => format!(", up to {} parameters unsharded", count(most as u64)),
                (_, Some(most), Some(budget)) => {
                    format!(", up to {} parameters unsharded, which fit in {budget} per rank", count(most as u64))
                }
                _ => String::new(),
            };
            format!("{mode}, {unit}{live}{note}")
        }
    }
}

fn dtypes(plan: &Plan) -> String {
    let p = &plan.settings.precision;
    let scale = match plan.engine.scaler {
        Some(scaler) if scaler.dynamic => format!("; loss scale {}, dynamic", scaler.initial),
        Some(scaler) => format!("; loss scale {}", scaler.initial),
        None => String::new(),
    };
    let (compute, reduce) = (value(&p.precision), value(&p.reduce_dtype));
    let recomputed = recomputed(plan.engine.checkpoint);
    let named = |dtype: DType| match dtype {
        DType::F32 => "fp32",
        DType::U8 => "8bit",
        other => other.name(),
    };
    let masters = named(plan.engine.strategy.masters());
    let moments = if let Rule::AdamW { moments, .. } = plan.engine.rule { named(moments) } else { "fp32" };
    format!("compute {compute}, reduce {reduce}, master weights {masters}, optimizer {moments}{scale}{recomputed}")
}

fn batch(plan: &Plan) -> Result<String> {
    let loader = plan.loader(0)?;
    let (what, length) = match (plan.dataset.kind(), loader.packing) {
        (SampleKind::Group, _) => ("group", format!("up to {}", plan.dataset.max_len())),
        (SampleKind::Pair, false) => ("pair", format!("2 x {}", plan.dataset.max_sequence())),
        _ => ("sequence", plan.dataset.max_len().to_string()),
    };
    Ok(format!(
        "{} x {length} tokens x {} x {} = {} tokens per step; {} step{}",
        some(loader.batch_size, what),
        some(loader.grad_accum, "micro-batch"),
        some(loader.dp_size, "rank"),
        count(plan.tokens_per_step()?),
        count(plan.steps()),
        if plan.steps() == 1 { "" } else { "s" },
    ))
}

/// 1 rank, 2 ranks, 2 micro-batches
fn some(n: usize, what: &str) -> String {
    match n {
        1 => format!("1 {what}"),
        n => format!("{n} {what}{}", if what.ends_with("ch") { "es" } else { "s" }),
    }
}

fn memory(plan: &Plan) -> String {
    let is_shown = |part: &&(Category, usize)| part.1 >= 1 << 16 && part.0 != Category::Host;
    let parts = plan.size.planned.iter().filter(is_shown).map(|(category, bytes)| {
        let name = CATEGORIES.iter().find(|c| c.0 == *category).map_or("", |c| c.1);
        format!("{name} {}", mib(*bytes as u64))
    });
    let parts: Vec<String> = parts.collect();
    format!("{} planned per rank: {}", mib(plan.size.on_device() as u64), parts.join(", "))
}

/// After the dtypes of activations.
fn recomputed(checkpointing: Checkpointing) -> String {
    match checkpointing {
        Checkpointing::Off => String::new(),
        Checkpointing::Full => "; activations recomputed".into(),
        Checkpointing::FullEvery(n) => format!("; activations of one block in {n} recomputed"),
        Checkpointing::Selective => "; activations recomputed except attention outputs".into(),
        Checkpointing::SelectiveEvery(n) => {
            format!("; activations of one block in {n} recomputed except attention outputs")
        }
    }
}

/// Samples of a sequence are counted apart from sequences. Sequences are concatenated, whatever their lengths.
fn packed(plan: &Plan) -> String {
    match plan.settings.data.packing_samples == Some(true) {
        true => format!(", packed into sequences of {}", plan.dataset.max_len()),
        false if plan.dataset.has_rows_of_its_own() => "; no padding".into(),
        false => String::new(),
    }
}

/// There are fewer rows than a step takes.
fn repeated(plan: &Plan) -> Result<String> {
    let rows = plan.dataset.rows() - plan.split.held_out.iter().sum::<u64>();
    let step = plan.loader(0)?.global_batch();
    Ok(if rows < step {
        format!("; fewer rows than a step takes ({rows} and {step}): a step repeats rows")
    } else {
        String::new()
    })
}

/// A run that ends before its warmup does, as a short one does with the default.
fn never_warm(plan: &Plan) -> Option<String> {
    let (schedule, steps) = (&plan.schedule, plan.steps());
    (steps < schedule.warmup).then(|| {
        format!(
            "{} steps in a run of {steps}: lr ends at {} of {}; shorten it with --warmup-steps N",
            schedule.warmup,
            schedule.lr(steps),
            schedule.peak
        )
    })
}

/// What it costs, and saves, that gradients of several micro-batches are reduced once.
fn deferred(plan: &Plan) -> Result<Option<String>> {
    let (now, each) = (plan.size.on_device() as u64, plan.planned_if_synced()?);
    Ok(each.filter(|&each| each as u64 != now).map(|each| {
        format!(
            "gradients are reduced once per step, {} per rank; --sync-each-batch: {} times, {}",
            mib(now),
            plan.settings.batch.grad_accum.unwrap_or(1),
            mib(each as u64)
        )
    }))
}

/// What to do after the run. None for a stage: the next stage does it.
pub fn next(plan: &Plan, steps: u64, stopped: bool, exported: Option<&Path>) -> Option<String> {
    let larger = if stopped { "--patience" } else { "--max-steps" };
    let (c, adapted) = (&plan.settings.checkpoint, plan.engine.tuning.lora.is_some());
    let (generate, does) = match plan.tokenizer.usable() {
        _ if plan.engine.spec.score => ("--objective rm", "trains on, and evaluates"),
        Ok(()) => ("--generate TEXT", "generates"),
        Err(_) => ("--generate \"3 17 5\"", "generates"),
    };
    let what = match (&c.ckpt_dir, c.save_hf.as_ref().or(c.save_adapter.as_ref())) {
        _ if plan.settings.run.stage.is_some() => return None,
        (None, None) if c.save_gguf.is_some() => return None,
        (None, None) => {
            "nothing was saved: use --ckpt-dir DIR for checkpoints, --save-hf DIR to export the model".to_string()
        }
        (Some(dir), _) if adapted => format!(
            "--resume auto and a larger {larger} train on\n         --lora-merge {} --save-hf DIR merges",
            word(&ckpt::of_step(dir, steps))
        ),
        (Some(dir), _) => {
            let dir = word(dir);
            let resume = format!("--resume auto and a larger {larger} train on");
            match plan.engine.spec.score {
                true => resume,
                false => format!("{resume}\n         --ckpt-dir {dir} {generate} {does}"),
            }
        }
        (None, Some(dir)) => format!("--pretrain {} {generate} {does}", word(exported.unwrap_or(dir))),
    };
    Some(format!("{:<LABEL$}{what}", "next"))
}

/// A path to be typed in a shell.
fn word(path: &Path) -> String {
    let text = path.display().to_string();
    if text.contains(char::is_whitespace) { format!("'{text}'") } else { text }
}

/// Keys of the model's configuration that change nothing.
fn inert(plan: &Plan) -> Result<Option<String>> {
    let Some(dir) = &plan.settings.model.pretrain else { return Ok(None) };
    let keys = ckpt::hf::inert_keys(dir)?;
    Ok((!keys.is_empty()).then(|| {
        let (keys, path) = (keys.join(", "), dir.join(ckpt::hf::FILE));
        format!(
            "{} has keys that transformers' class for this model does not have, without effect: {keys}",
            path.display()
        )
    }))
}

/// Dropout that the model's configuration asks for and this run does without.
fn undropped(plan: &Plan) -> Result<Option<String>> {
    let (Some(dir), dropout) = (&plan.settings.model.pretrain, plan.engine.spec.dropout) else { return Ok(None) };
    let unused: Vec<String> = ckpt::hf::unused_dropout(dir, dropout)?;
    Ok((!unused.is_empty()).then(|| {
        format!(
            "not applied: {} of {}. --dropout P drops embeddings and residual branches, never attention",
            unused.join(", "),
            dir.join(ckpt::hf::FILE).display()
        )
    }))
}

/// What the model has besides the text model that is trained.
pub fn carried(plan: &Plan) -> Result<Option<String>> {
    let resumed = plan.resume.as_ref().filter(|_| plan.engine.tuning.lora.is_none()).map(|resume| &resume.dir);
    let pretrained = plan.settings.model.pretrain.as_ref().filter(|_| !plan.settings.hub.without_weights);
    let Some(dir) = resumed.or(pretrained) else { return Ok(None) };
    Ok(ckpt::carried(dir)?.map(|carried| carried.to_string()))
}

/// What `--cpu-offload` comes to.
fn offloaded(plan: &Plan) -> Option<String> {
    let what = match plan.settings.fsdp.cpu_offload? {
        OffloadName::Off => return None,
        _ if plan.engine.strategy.offload() == Offload::Nothing => {
            return Some("no effect: CPU ranks hold everything in host memory".into());
        }
        OffloadName::Optimizer => "master weights and optimizer state",
        OffloadName::Gradients => "master weights, optimizer state and gradients",
        OffloadName::Parameters => "parameters, gradients and optimizer state",
    };
    let host = plan.size.planned.iter().find(|p| p.0 == Category::Host).map_or(0, |p| p.1);
    Some(format!("{what} in host memory, {} per rank; updates run there", mib(host as u64)))
}

/// The data sets of a mixture, for the metrics, with the samples so far where they are known; null without a mixture.
pub fn sources(plan: &Plan, samples: &[u64]) -> Option<Vec<Value>> {
    plan.dataset.shares()?;
    let held_out = plan.split.held_out.iter();
    let source = |(i, ((report, share), held_out)): (usize, ((&Report, f64), &u64))| {
        let samples = samples.get(i);
        let epochs = samples.map(|&n| n as f64 / (report.rows - held_out) as f64);
        json!({"dataset": report.what, "weight": share, "rows": report.rows, "held_out": held_out, "samples": samples, "epochs": epochs})
    };
    Some(plan.dataset.sources().zip(held_out).enumerate().map(source).collect())
}

/// What the run has trained on of each of them.
pub fn consumed(sources: &[Value]) -> impl Iterator<Item = String> {
    let samples = |source: &Value| source["samples"].as_u64().unwrap_or(0);
    let all: u64 = sources.iter().map(samples).sum();
    sources.iter().map(move |source| {
        let (what, epochs) = (source["dataset"].as_str().unwrap_or_default(), source["epochs"].as_f64().unwrap_or(0.0));
        format!("mixture  {what}: {} of {} samples, {epochs:.2} epochs", count(samples(source)), count(all))
    })
}

fn percent(share: f64) -> f64 {
    (share * 1e4).round() / 1e2
}

/// A name as files spell it.
fn value<T: serde::Serialize>(x: &T) -> String {
    serde_json::to_value(x).ok().and_then(|v| v.as_str().map(str::to_string)).unwrap_or_default()
}

/// 12,345,678
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}
pub fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}
