//! The run in a few lines, before its first step. Never decides anything.
use crate::base::CATEGORIES;
use crate::base::{Category, Result};
use crate::ckpt;
use crate::data::Report;
use crate::nn::Checkpointing;
use crate::optim::Warmup;
use crate::run::plan::Plan;
use crate::run::plan::resume::ResumeFrom;
use crate::run::settings::OffloadName;
use crate::run::settings::ShardingName;
use crate::run::settings::args;
use crate::store::Offload;
use serde_json::{Value, json};

/// The run in a few lines.
pub fn header(plan: &Plan, resumed: Option<&ResumeFrom>, device: &str) -> Result<String> {
    let (spec, engine, s) = (&plan.engine.spec, &plan.engine, &plan.settings);
    let arch = spec.arch.name();
    let (compute, reduce) = (value(&s.precision.precision), value(&s.precision.reduce_dtype));
    let loader = plan.loader(0)?;
    let sharding = match engine.strategy.name() {
        "ddp" => "every rank keeps all weights".to_string(),
        "fsdp_reference" => format!("{}, unit: tensor", value(&s.fsdp.sharding)),
        "zero_1" => "optimizer states partitioned".to_string(),
        "zero_2" => "optimizer states and gradients partitioned".to_string(),
        "zero_3" => "optimizer states, gradients and parameters partitioned".to_string(),
        _ => {
            let alone = s.fsdp.sharding == Some(ShardingName::HybridShard) && plan.ranks.mesh.dp_replicate == 1;
            let note = if alone { "; one host is one replica: --dp-replicate-size N makes more" } else { "" };
            format!("{}, unit: {}{note}", value(&s.fsdp.sharding), value(&s.fsdp.auto_wrap))
        }
    };
    let hosts = match plan.ranks.hosts() {
        1 => String::new(),
        n => format!("{n} hosts {}, ", plan.ranks.carrier.between()),
    };
    let parts = plan.size.planned.iter().filter(|p| p.1 > 0 && p.0 != Category::Host).map(|(category, bytes)| {
        let name = CATEGORIES.iter().find(|c| c.0 == *category).map_or("", |c| c.1);
        format!("{name} {}", mib(*bytes as u64))
    });
    let parts: Vec<String> = parts.collect();
    let stage = s.run.stage.iter().map(|stage| format!("stage    {stage}"));
    let mut lines: Vec<String> = stage.collect();
    lines.extend([
        format!(
            "model    {arch} of {} parameters{}: {} layers, width {}, {} heads, ff {}, vocabulary {}{}",
            count(plan.size.params as u64),
            match plan.size.trainable {
                all if all == plan.size.params => String::new(),
                some => format!(", {} of them learn", count(some as u64)),
            },
            spec.layers,
            spec.dim,
            if spec.kv_heads == spec.heads {
                spec.heads.to_string()
            } else {
                format!("{}/{}", spec.heads, spec.kv_heads)
            },
            spec.ff,
            spec.vocab,
            if spec.tied { ", tied head" } else { "" },
        ),
        format!(
            "ranks    {} on {hosts}{device}: dp_replicate {} x dp_shard {} x sp {} x tp {}; {} ({sharding})",
            plan.ranks.mesh.world(),
            plan.ranks.mesh.dp_replicate,
            plan.ranks.mesh.dp_shard,
            plan.ranks.mesh.sp,
            plan.ranks.mesh.tp,
            engine.strategy.name(),
        ),
        format!(
            "dtypes   param {compute}, compute {compute}, reduce {reduce}, master fp32, optimizer fp32{}{}",
            match engine.scaler {
                Some(scaler) if scaler.dynamic => format!("; loss scale {}, dynamic", scaler.initial),
                Some(scaler) => format!("; loss scale {}", scaler.initial),
                None => String::new(),
            },
            recomputed(engine.checkpoint)
        ),
        format!(
            "step     {} sequences x {} tokens x {} micro-batches x {} ranks = {} tokens; {} steps",
            loader.batch_size,
            plan.dataset.max_len(),
            loader.grad_accum,
            loader.dp_size,
            count(plan.tokens_per_step()?),
            plan.steps(),
        ),
        format!(
            "optim    {}, lr {} {}, warmup {}{}, clip {}",
            value(&s.optim.optimizer),
            plan.schedule.peak,
            value(&s.optim.lr_scheduler),
            plan.schedule.warmup,
            if plan.schedule.rise == Warmup::Log { " (log)" } else { "" },
            engine.grad_clip
        ),
        format!("memory   {} planned for a rank: {}", mib(plan.size.on_device() as u64), parts.join(", ")),
        format!("data     {}{}", plan.dataset.report(), packed(plan)),
    ]);
    lines.extend(plan.dataset.sources().map(|(source, share)| format!("         {} % {source}", percent(share))));
    lines.extend(plan.eval.iter().map(|eval| format!("eval     {}", eval.report())));
    if let Err(why) = plan.tokenizer.usable() {
        lines.push(format!("tokens   are given as ids: {}", args::with_flags(&why.to_string())));
    }
    if let (Some(path), Some(true), true) = (&s.fsdp.deepspeed, s.fsdp.deepspeed_unclipped, engine.grad_clip == 0.0) {
        lines.push(format!(
            "clip     {} has no gradient_clipping: gradients are not clipped; DeepSpeed clips at 1 since 0.19.3",
            path.display()
        ));
    }
    lines.extend(undropped(plan)?);
    lines.extend(never_warm(plan));
    lines.extend(deferred(plan)?);
    lines.extend(offloaded(plan));
    if let Some(from @ ResumeFrom { dir, state: then, .. }) = resumed {
        lines.push(format!("resume   {} after step {}", dir.display(), then.step));
        let now = plan.trainer_state(then.step, 0, 0);
        lines.extend(then.differences(&now).into_iter().map(|d| format!("         {d}")));
        lines.extend(plan.forgotten_evaluations(from).map(|why| format!("         {why}")));
        if plan.is_done() {
            let larger = if plan.is_stopped(from) {
                "--patience has stopped this run, and a larger one"
            } else {
                "a larger --max-steps"
            };
            lines.push(format!("         nothing is left to train: {larger} goes on"));
        }
    }
    Ok(lines.join("\n"))
}

/// Behind the dtypes of activations.
fn recomputed(checkpointing: Checkpointing) -> String {
    match checkpointing {
        Checkpointing::Off => String::new(),
        Checkpointing::Selective => "; activations recomputed but for attention's".into(),
        Checkpointing::Full => "; activations recomputed".into(),
        Checkpointing::SelectiveEvery(n) => format!("; activations of one block in {n} recomputed but for attention's"),
        Checkpointing::FullEvery(n) => format!("; activations of one block in {n} recomputed"),
    }
}

/// Samples of a sequence are counted apart from sequences.
fn packed(plan: &Plan) -> String {
    match plan.settings.data.packing_samples == Some(true) {
        true => format!(", packed into sequences of {}", plan.dataset.max_len()),
        false => String::new(),
    }
}

/// A run that ends before its warmup does, as a short one does with the default.
fn never_warm(plan: &Plan) -> Option<String> {
    let (schedule, steps) = (&plan.schedule, plan.steps());
    (steps < schedule.warmup).then(|| {
        format!(
            "warmup   of {} steps in a run of {steps}: the learning rate ends at {} of {}; --warmup-steps N shortens it",
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
            "accum    gradients travel once a step, {} a rank; with --sync-each-batch {} times, {}",
            mib(now),
            plan.settings.batch.grad_accum.unwrap_or(1),
            mib(each as u64)
        )
    }))
}

/// What can be done with what a run has left; of a stage, the stage behind it will do it.
pub fn next(plan: &Plan, steps: u64, stopped: bool) -> Option<String> {
    let larger = if stopped { "--patience" } else { "--max-steps" };
    let (c, adapted) = (&plan.settings.checkpoint, plan.engine.tuning.lora.is_some());
    let generate = match plan.tokenizer.usable() {
        Ok(()) => "--generate TEXT writes on from a text",
        Err(_) => "--generate \"3 17 5\" writes on from token ids",
    };
    let what = match (&c.ckpt_dir, &c.save_hf) {
        _ if plan.settings.run.stage.is_some() => return None,
        (None, None) => {
            "nothing was saved: --ckpt-dir DIR keeps checkpoints to go on from, --save-hf DIR the model alone"
                .to_string()
        }
        (Some(dir), _) if adapted => format!(
            "--resume auto with a larger {larger} goes on; --lora-merge {}/step-{steps:08} --save-hf DIR makes one model of both",
            dir.display()
        ),
        (Some(dir), _) => {
            format!("--resume auto with a larger {larger} goes on; --ckpt-dir {} {generate}", dir.display())
        }
        (None, Some(dir)) if adapted => format!("--lora-merge {} --save-hf DIR makes one model of both", dir.display()),
        (None, Some(dir)) => format!("--pretrain {} {generate}", dir.display()),
    };
    Some(format!("next     {what}"))
}

/// Dropout that the model's configuration asks for and this run does without.
fn undropped(plan: &Plan) -> Result<Option<String>> {
    let (Some(dir), dropout) = (&plan.settings.model.pretrain, plan.engine.spec.dropout) else { return Ok(None) };
    let unused: Vec<String> = ckpt::hf::unused_dropout(dir, dropout)?;
    Ok((!unused.is_empty()).then(|| {
        format!(
            "dropout  not applied: {} of {}. --dropout P drops embeddings and residual branches; attention is never dropped",
            unused.join(", "),
            dir.join(ckpt::hf::FILE).display()
        )
    }))
}

/// What `--cpu-offload` comes to.
fn offloaded(plan: &Plan) -> Option<String> {
    let what = match plan.settings.fsdp.cpu_offload? {
        OffloadName::Off => return None,
        _ if plan.engine.strategy.offload() == Offload::Nothing => {
            return Some("offload  nothing to do: CPU ranks hold everything in host memory".into());
        }
        OffloadName::Optimizer => "masters and optimizer state",
        OffloadName::Gradients => "masters, optimizer state and gradients",
        OffloadName::Parameters => "parameters, gradients and optimizer state",
    };
    let host = plan.size.planned.iter().find(|p| p.0 == Category::Host).map_or(0, |p| p.1);
    Some(format!("offload  {what} in host memory, {} a rank; updates run there", mib(host as u64)))
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
