//! From settings to each part of the plan: what follows from what. Each function fills in the settings that it derives, so
//! that they can be shown. Never starts anything and never writes.
use crate::base::{Error, Result, open};
use crate::ckpt;
use crate::comm::env;
use crate::comm::mesh::MeshSizes;
use crate::data::{Cache, ChatTemplate, DataOptions, Dataset, Format, Loader, LoaderOptions, Tokenizer, tokenizer};
use crate::engine::EngineOptions;
use crate::nn::{Activation, Arch, Cuts, Lora, RingImpl, Rotary, Scaling, Spec, Tuning};
use crate::optim::{DecayShape, Rule, Schedule, Warmup};
use crate::run::plan::knobs;
use crate::run::plan::recompute;
use crate::run::settings::zero;
use crate::run::settings::*;
use crate::store::flat::Wrap;
use crate::store::reference::ReferenceOptions;
use crate::store::replicated::ReplicatedOptions;
use crate::store::sharded::{BackwardPrefetch, ShardedOptions};
use crate::store::{Strategy, ZeroOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Steps of a run that says neither max-steps nor epochs: a few minutes of the default model on two cores.
const DEFAULT_STEPS: u64 = 600;

/// The value of a setting that has a default.
pub fn set<T: Clone>(value: &Option<T>, name: &str) -> Result<T> {
    value.clone().ok_or_else(|| Error::input(format!("{name} has no value: give it one, or remove its null")))
}

/// Sharded or replicated: NO_SHARD is what DDP does.
pub fn strategy(s: &mut Settings, default: StrategyName) -> StrategyName {
    let asked = s.run.strategy.filter(|&x| x != StrategyName::Auto).unwrap_or(default);
    let name = if s.fsdp.sharding == Some(ShardingName::NoShard) { StrategyName::Ddp } else { asked };
    s.run.strategy = Some(name);
    name
}

/// The one that was asked for, or that of the model directory, or bytes.
pub fn tokenizer(s: &mut Settings) -> Result<Tokenizer> {
    let beside = s.model.pretrain.as_ref().filter(|dir| dir.join(tokenizer::FILES[0]).is_file());
    let beside = beside.map(|dir| dir.display().to_string());
    Tokenizer::from_name(s.data.tokenizer.get_or_insert(beside.unwrap_or_else(|| "bytes".into())))
}

/// The model: what its directory says, or the settings.
pub fn spec(s: &mut Settings, tokenizer: &Tokenizer) -> Result<Spec> {
    let (max_len, m) = (set(&s.data.max_len, "data.max_len")?, &mut s.model);
    let mut spec = match m.pretrain.clone() {
        Some(dir) => pretrained(m, &dir)?,
        None => described(m, tokenizer, max_len)?,
    };
    if let Some(Rotary { scaling: Scaling::Dynamic { .. }, .. }) = spec.rope {
        // Made for sequences longer than the model's own.
        spec.max_len = spec.max_len.max(max_len);
    }
    if max_len > spec.max_len {
        return Err(Error::input(format!(
            "max_len {max_len} is longer than the model's max_positions {}: use a shorter --max-len or a longer model",
            spec.max_len
        )));
    }
    spec.validate()?;
    Ok(spec)
}

/// Shapes of the directory's `config.json`, filled in to the settings; dropout is the run's own affair.
fn pretrained(m: &mut Model, dir: &Path) -> Result<Spec> {
    ckpt::is_model(dir)?;
    let spec = Spec { dropout: set(&m.dropout, "model.dropout")? as f32, ..ckpt::hf::read(dir)? };
    m.arch = Some(if spec.arch == Arch::Gpt { ArchName::Gpt } else { ArchName::Llama });
    m.embed_dim = Some(spec.dim);
    m.num_layers = Some(spec.layers);
    m.num_heads = Some(spec.heads);
    m.num_kv_heads = Some(spec.kv_heads);
    m.ff_hidden_dim = Some(spec.ff);
    m.vocab_size = Some(spec.vocab);
    m.max_positions = Some(spec.max_len);
    m.tie_embeddings = Some(spec.tied);
    Ok(spec)
}

fn described(m: &mut Model, tokenizer: &Tokenizer, max_len: usize) -> Result<Spec> {
    let arch = match set(&m.arch, "model.arch")? {
        ArchName::Llama => Arch::Llama,
        ArchName::Gpt => Arch::Gpt,
    };
    let (dim, heads) = (set(&m.embed_dim, "model.embed_dim")?, set(&m.num_heads, "model.num_heads")?);
    if dim % heads != 0 {
        return Err(Error::input(format!(
            "embed_dim {dim} is not a multiple of num_heads {heads}: each head has an equal part"
        )));
    }
    let gpt = arch == Arch::Gpt;
    let ff = if gpt { 4 * dim } else { (8 * dim).div_ceil(3).next_multiple_of(64) };
    Ok(Spec {
        arch,
        vocab: *m.vocab_size.get_or_insert(tokenizer.vocab().next_multiple_of(64)),
        dim,
        layers: set(&m.num_layers, "model.num_layers")?,
        heads,
        kv_heads: *m.num_kv_heads.get_or_insert(heads),
        head_dim: dim / heads,
        ff: *m.ff_hidden_dim.get_or_insert(ff),
        max_len: *m.max_positions.get_or_insert(max_len),
        norm_eps: 1e-5,
        rope: (!gpt).then_some(Rotary::new(10_000.0)),
        activation: if gpt { Activation::Gelu } else { Activation::SwiGlu },
        tied: *m.tie_embeddings.get_or_insert(gpt),
        dropout: set(&m.dropout, "model.dropout")? as f32,
        ..Spec::default()
    })
}

pub fn engine(s: &Settings, strategy: StrategyName, device: DeviceName, spec: Spec) -> Result<EngineOptions> {
    let (f, o, b) = (&s.fsdp, &s.optim, &s.batch);
    let (dtype, reduce_dtype) = (s.precision.compute()?, s.precision.reduce()?);
    let offload = knobs::offload(f, device);
    let strategy: Arc<dyn Strategy> = match (strategy, f.backend, f.fsdp_impl) {
        (StrategyName::Ddp, ..) => {
            Arc::new(ReplicatedOptions { dtype, reduce_dtype, bucket_bytes: ReplicatedOptions::BUCKET, offload })
        }
        (_, Some(BackendName::Zero), _) => Arc::new(ZeroOptions { offload, ..zero::options(s, dtype, spec.dim)? }),
        (_, _, Some(FsdpImpl::Reference)) => Arc::new(ReferenceOptions {
            dtype,
            reduce_dtype,
            reshard: f.sharding != Some(ShardingName::ShardGradOp),
            grad_accum: set(&b.grad_accum, "batch.grad_accum")?,
            sync_each_batch: set(&f.sync_each_batch, "fsdp.sync_each_batch")?,
            offload,
        }),
        _ => Arc::new(ShardedOptions {
            dtype,
            reduce_dtype,
            wrap: wrap(f)?,
            reshard: f.sharding != Some(ShardingName::ShardGradOp),
            forward_prefetch: set(&f.forward_prefetch, "fsdp.forward_prefetch")?,
            backward_prefetch: match set(&f.backward_prefetch, "fsdp.backward_prefetch")? {
                PrefetchName::BackwardPre => BackwardPrefetch::Pre,
                PrefetchName::BackwardPost => BackwardPrefetch::Post,
                PrefetchName::None => BackwardPrefetch::None,
            },
            grad_accum: set(&b.grad_accum, "batch.grad_accum")?,
            sync_each_batch: set(&f.sync_each_batch, "fsdp.sync_each_batch")?,
            limit_all_gathers: set(&f.limit_all_gathers, "fsdp.limit_all_gathers")?,
            offload,
        }),
    };
    let weight_decay = set(&o.weight_decay, "optim.weight_decay")? as f32;
    let rule = match set(&o.optimizer, "optim.optimizer")? {
        OptimizerName::Adamw => {
            let betas = set(&o.betas, "optim.betas")?;
            Rule::AdamW {
                beta1: betas[0] as f32,
                beta2: betas[1] as f32,
                eps: set(&o.eps, "optim.eps")? as f32,
                weight_decay,
            }
        }
        OptimizerName::Sgd => Rule::Sgd { momentum: set(&o.momentum, "optim.momentum")? as f32, weight_decay },
    };
    let checkpoint = recompute::checkpointing(f, spec.layers)?;
    Ok(EngineOptions {
        tokens: set(&b.batch_size, "batch.batch_size")? * set(&s.data.max_len, "data.max_len")?,
        spec,
        tuning: Tuning { uniform: f.use_orig_params == Some(false), ..tuning(&s.tune, lora(&s.lora)?)? },
        strategy,
        rule,
        grad_clip: set(&o.grad_clip, "optim.grad_clip")? as f32,
        scaler: s.precision.scaler()?,
        checkpoint,
        seed: set(&s.run.seed, "run.seed")?,
        sequence_parallel: set(&s.parallel.sequence_parallel, "parallel.sequence_parallel")?,
        cuts: Cuts::ALL,
        ring: match set(&s.parallel.ring_impl, "parallel.ring_impl")? {
            RingName::Ring => RingImpl::Ring,
            RingName::Allgather => RingImpl::AllGather,
        },
        update_threads: 1, // the plan knows how many ranks share the host
    })
}

/// What one unit is.
pub fn wrap(f: &crate::run::settings::Fsdp) -> Result<Wrap> {
    Ok(match set(&f.auto_wrap, "fsdp.auto_wrap")? {
        WrapName::Transformer => Wrap::Transformer,
        WrapName::Size => Wrap::Size(set(&f.wrap_min_params, "fsdp.wrap_min_params")?),
        WrapName::None => Wrap::None,
    })
}

/// Adapters, where a rank is given.
fn lora(l: &LoraArgs) -> Result<Option<Lora>> {
    let Some(rank) = l.rank else {
        return match (&l.alpha, &l.target_modules) {
            (None, None) => Ok(None),
            _ => Err(Error::input("lora: alpha or target_modules is given, but no rank: add --lora-rank N")),
        };
    };
    if l.merge.is_some() {
        return Err(Error::input("lora: --lora-merge trains nothing: leave out --lora-rank"));
    }
    let targets = l.target_modules.clone().unwrap_or_else(|| vec!["q_proj".into(), "v_proj".into()]);
    Ok(Some(Lora { rank, alpha: l.alpha.unwrap_or(rank as f64) as f32, targets }))
}

fn tuning(t: &Tune, lora: Option<Lora>) -> Result<Tuning> {
    let scale = |text: &String| {
        let pair =
            text.rsplit_once('=').and_then(|(pattern, factor)| Some((pattern.to_string(), factor.parse().ok()?)));
        pair.ok_or_else(|| {
            Error::input(format!("lr_scale {text:?}: PATTERN=FACTOR is expected, as in embed_tokens=0.1"))
        })
    };
    Ok(Tuning {
        freeze: t.freeze.clone().unwrap_or_default(),
        no_decay: t.no_decay.clone().unwrap_or_default(),
        lr_scale: t.lr_scale.iter().flatten().map(scale).collect::<Result<_>>()?,
        lora,
        uniform: false,
    })
}

pub fn dataset(s: &Settings, tokenizer: &Tokenizer, engine: &EngineOptions) -> Result<Dataset> {
    let merges = s.lora.merge.is_some(); // reads no data
    let dataset = Dataset::open(&DataOptions {
        paths: s.data.dataset.iter().flatten().map(PathBuf::from).collect(),
        tokenizer: tokenizer.clone(),
        format: if merges { Format::default() } else { format(&s.data, tokenizer)? },
        vocab: engine.spec.vocab,
        max_len: set(&s.data.max_len, "data.max_len")?,
        max_samples: s.data.max_samples.map(|n| n as u64),
        seed: engine.seed,
        cache: cache(&s.data)?,
        cargo_home: env::cargo_home(),
    })?;
    if !merges {
        dataset.check_row_settings(&[
            ("packing_samples", s.data.packing_samples == Some(true)),
            ("tokenizer_chat_template", s.data.tokenizer_chat_template.is_some()),
        ])?;
    }
    Ok(dataset)
}

/// Where token files are kept: the settings' directory, or the environment's.
fn cache(d: &Data) -> Result<Cache> {
    let dir = d.cache_dir.clone().unwrap_or_else(env::cache_dir);
    Ok(Cache {
        dir: set(&d.cache, "data.cache")?.then_some(dir),
        limit: bytes("cache_limit", &set(&d.cache_limit, "data.cache_limit")?)?,
        scratch: env::scratch_dir(),
    })
}

pub fn loader(s: &Settings, mesh: &MeshSizes, dp_rank: usize, held_out: u64) -> Result<LoaderOptions> {
    Ok(LoaderOptions {
        batch_size: set(&s.batch.batch_size, "batch.batch_size")?,
        grad_accum: set(&s.batch.grad_accum, "batch.grad_accum")?,
        dp_rank,
        dp_size: mesh.dp_replicate * mesh.dp_shard,
        shuffle: set(&s.data.shuffle, "data.shuffle")?,
        seed: set(&s.run.seed, "run.seed")?,
        packing: set(&s.data.packing_samples, "data.packing_samples")?,
        by_length: set(&s.data.group_by_length, "data.group_by_length")?,
        held_out: Some(held_out),
    })
}

/// What the flags say of rows, and the chat template: the flag's, or the tokenizer's, also of rows that no flag speaks of.
pub fn format(d: &Data, tokenizer: &Tokenizer) -> Result<Format> {
    let on = |flag: Option<bool>| flag == Some(true);
    let needed = on(d.apply_chat_template) || on(d.multiturn);
    let new = |text: &str| ChatTemplate::new(text, tokenizer.spellings());
    let chat = match (&d.tokenizer_chat_template, tokenizer.template(tokenizer::DEFAULT)) {
        (Some(given), _) => {
            let bad = |what: String| Error::input(format!("--tokenizer-chat-template {given}: {what}"));
            let text = match Path::new(given).is_file() {
                true => {
                    let text = open::read(Path::new(given)).map_err(|e| bad(e.to_string()))?;
                    String::from_utf8(text).map_err(|_| bad("is not UTF-8".into()))?
                }
                false if given.contains('{') => given.clone(),
                false => return Err(bad("is no file, and no Jinja text either".into())),
            };
            Some(new(&text).map_err(bad)?)
        }
        (None, Ok(text)) if needed => {
            Some(new(text).map_err(|what| Error::input(format!("--tokenizer {}: {what}", tokenizer.name())))?)
        }
        (None, Ok(text)) => new(text).ok(),
        (None, Err(names)) if needed => {
            let names = if names.is_empty() { "none".into() } else { names.join(", ") };
            return Err(Error::input(format!(
                "--tokenizer {} has no default chat template (it has {names}): pass one with --tokenizer-chat-template",
                tokenizer.name()
            )));
        }
        (None, Err(_)) => None,
    };
    Ok(Format {
        input_key: d.input_key.clone(),
        output_key: d.output_key.clone(),
        input_template: d.input_template.clone(),
        apply_chat_template: on(d.apply_chat_template),
        multiturn: on(d.multiturn),
        pretrain_mode: on(d.pretrain_mode),
        skip_bad_rows: on(d.skip_bad_rows),
        chat: chat.map(Arc::new),
    })
}

/// Steps of the whole run; filled in where the settings leave it to the data.
pub fn steps(s: &mut Settings, dataset: &Arc<Dataset>, loader: LoaderOptions) -> Result<u64> {
    let mut loader = Loader::new(dataset.clone(), loader)?;
    let rows = loader.rows_per_epoch();
    // The step that holds the last row of the last epoch is taken whole: it goes on into the next epoch.
    let by_epochs = s.run.epochs.map(|epochs| loader.steps_until(epochs.saturating_mul(rows)));
    let steps = match (s.run.max_steps, by_epochs) {
        (Some(a), Some(b)) => a.min(b),
        (one, other) => one.or(other).unwrap_or(DEFAULT_STEPS),
    };
    s.run.max_steps = Some(steps);
    Ok(steps)
}

pub fn schedule(o: &Optim, total: u64) -> Result<Schedule> {
    Ok(Schedule {
        shape: match set(&o.lr_scheduler, "optim.lr_scheduler")? {
            SchedulerName::Constant => DecayShape::Constant,
            SchedulerName::Linear => DecayShape::Linear,
            SchedulerName::Cosine => DecayShape::Cosine,
            SchedulerName::CosineWithMinLr => DecayShape::CosineWithMin(set(&o.min_lr_ratio, "optim.min_lr_ratio")?),
        },
        peak: set(&o.lr, "optim.lr")?,
        rise: match set(&o.warmup_type, "optim.warmup_type")? {
            WarmupName::Linear => Warmup::Linear,
            WarmupName::Log => Warmup::Log,
        },
        warmup: set(&o.warmup_steps, "optim.warmup_steps")?,
        total,
    })
}

/// How models and checkpoints are written.
#[derive(Clone, Copy, Debug)]
pub struct SaveOptions {
    /// A file grows up to so many bytes.
    pub max_file_bytes: u64,
    /// Of what `--save-hf` writes.
    pub dtype: ckpt::Dtype,
    /// Checkpoints between steps are written while training goes on.
    pub behind: bool,
}

pub fn save(c: &Checkpoint) -> Result<SaveOptions> {
    Ok(SaveOptions {
        max_file_bytes: bytes("max_shard_size", &set(&c.max_shard_size, "checkpoint.max_shard_size")?)?,
        dtype: match set(&c.save_dtype, "checkpoint.save_dtype")? {
            PrecisionName::Fp32 => ckpt::Dtype::F32,
            PrecisionName::Bf16 => ckpt::Dtype::BF16,
            PrecisionName::Fp16 => ckpt::Dtype::F16,
        },
        behind: set(&c.async_save, "checkpoint.async_save")?,
    })
}

/// A size as transformers writes it: "5GB", "200MB", "1GiB", or bytes.
fn bytes(name: &str, text: &str) -> Result<u64> {
    const UNITS: [(&str, u64); 7] = [
        ("KIB", 1 << 10),
        ("MIB", 1 << 20),
        ("GIB", 1 << 30),
        ("KB", 1000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("", 1),
    ];
    let upper = text.trim().to_uppercase();
    let split = UNITS.iter().find_map(|(unit, size)| Some((upper.strip_suffix(unit)?, *size)));
    let size = split.and_then(|(number, unit)| number.trim().parse::<u64>().ok()?.checked_mul(unit)).filter(|&n| n > 0);
    size.ok_or_else(|| Error::input(format!("{name} is {text:?}: it must be a size such as 10GB, 200MB or 1GiB")))
}
