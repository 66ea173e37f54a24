//! The engine's options: sharding strategy, optimizer, recomputation, freezing and adapters. Never builds an engine.
use super::{objective, tensor, zero};
use crate::base::{DType, Error, Result};
use crate::ckpt;
use crate::comm::MeshSizes;
use crate::device::gpu::MOST_OF_KEY;
use crate::engine::EngineOptions;
use crate::nn::{ALL_LINEAR, Arch, Checkpointing, Cuts, Lora, Recurrence, SpImpl, Spec, Tuning, linear_modules};
use crate::optim::Rule;
use crate::run::settings::fsdp::FsdpSettings;
use crate::run::settings::value::set;
use crate::run::settings::*;
use crate::store::flat::Wrap;
use crate::store::reference::ReferenceOptions;
use crate::store::replicated::ReplicatedOptions;
use crate::store::sharded::{BackwardPrefetch, ShardedOptions};
use crate::store::{Offload, Strategy, ZeroOptions};
use std::sync::Arc;

/// Limit on bytes per rank: far above any machine, far below 2^64.
const BYTES: f64 = (1u64 << 60) as f64;

/// Tokens of a rank's micro-batch: far above any, far below the 2^32 rows that kernels count.
const MOST_TOKENS: usize = 1 << 28;

/// The sharding strategy. `run.strategy` is already resolved.
pub fn strategy(s: &Settings, device: DeviceName, spec: &Spec) -> Result<Arc<dyn Strategy>> {
    if let Some(sharded) = sharded(s, device)? {
        return Ok(Arc::new(sharded));
    }
    let (f, b) = (&s.fsdp, &s.batch);
    let (dtype, masters, reduce_dtype) = (s.precision.compute()?, s.precision.masters()?, s.precision.reduce()?);
    let offload = offload(f, device);
    Ok(match (s.run.strategy, f.backend) {
        (Some(StrategyName::Ddp), _) => {
            let bucket_bytes = ReplicatedOptions::BUCKET;
            Arc::new(ReplicatedOptions { dtype, masters, reduce_dtype, bucket_bytes, offload })
        }
        (_, Some(BackendName::Zero)) => {
            Arc::new(ZeroOptions { masters, offload, ..zero::options(s, dtype, spec.dim)? })
        }
        _ => Arc::new(ReferenceOptions {
            dtype,
            masters,
            reduce_dtype,
            reshard: f.sharding != Some(ShardingName::ShardGradOp),
            grad_accum: set(&b.grad_accum, "batch.grad_accum")?,
            sync_each_batch: set(&f.sync_each_batch, "fsdp.sync_each_batch")?,
            offload,
        }),
    })
}

/// Manual sharding, if `run.strategy` is already resolved to it.
pub fn sharded(s: &Settings, device: DeviceName) -> Result<Option<ShardedOptions>> {
    let (f, b) = (&s.fsdp, &s.batch);
    let other = s.run.strategy == Some(StrategyName::Ddp)
        || f.backend == Some(BackendName::Zero)
        || f.fsdp_impl == Some(FsdpImpl::Reference);
    if other {
        return Ok(None);
    }
    Ok(Some(ShardedOptions {
        dtype: s.precision.compute()?,
        masters: s.precision.masters()?,
        reduce_dtype: s.precision.reduce()?,
        wrap: wrap(f)?,
        reshard: f.sharding != Some(ShardingName::ShardGradOp),
        max_live: f.max_live_parameters.unwrap_or(0),
        forward_prefetch: set(&f.forward_prefetch, "fsdp.forward_prefetch")?,
        backward_prefetch: match set(&f.backward_prefetch, "fsdp.backward_prefetch")? {
            PrefetchName::BackwardPre => BackwardPrefetch::Pre,
            PrefetchName::BackwardPost => BackwardPrefetch::Post,
            PrefetchName::None => BackwardPrefetch::None,
        },
        grad_accum: set(&b.grad_accum, "batch.grad_accum")?,
        sync_each_batch: set(&f.sync_each_batch, "fsdp.sync_each_batch")?,
        limit_all_gathers: set(&f.limit_all_gathers, "fsdp.limit_all_gathers")?,
        offload: offload(f, device),
    }))
}

/// `engine` with at most `max_live` parameters unsharded, if given.
pub fn keeping(
    s: &Settings,
    device: DeviceName,
    max_live: Option<usize>,
    engine: EngineOptions,
) -> Result<EngineOptions> {
    let Some(sharded) = sharded(s, device)?.filter(|_| max_live.is_some()) else { return Ok(engine) };
    let max_live = max_live.unwrap_or(sharded.max_live);
    Ok(EngineOptions { strategy: Arc::new(ShardedOptions { max_live, ..sharded }), ..engine })
}

/// CPU ranks already keep everything in host memory: the setting is accepted there and changes nothing.
pub fn offload(f: &FsdpSettings, device: DeviceName) -> Offload {
    match f.cpu_offload {
        _ if device == DeviceName::Cpu => Offload::Nothing,
        None | Some(OffloadName::Off) => Offload::Nothing,
        Some(OffloadName::Optimizer) => Offload::Optimizer,
        Some(OffloadName::Gradients) => Offload::Gradients,
        Some(OffloadName::Parameters) => Offload::Parameters,
    }
}

pub fn wrap(f: &FsdpSettings) -> Result<Wrap> {
    Ok(match set(&f.auto_wrap, "fsdp.auto_wrap")? {
        WrapName::Transformer => Wrap::Transformer,
        WrapName::Size => Wrap::Size(set(&f.wrap_min_params, "fsdp.wrap_min_params")?),
        WrapName::None => Wrap::None,
    })
}

/// What a model of `blocks` blocks recomputes in backward.
fn checkpointing(f: &FsdpSettings, blocks: usize) -> Result<Checkpointing> {
    let every = f.activation_checkpoint_every.unwrap_or(1);
    let all = match set(&f.activation_checkpoint, "fsdp.activation_checkpoint")? {
        CheckpointName::Off => Checkpointing::Off,
        CheckpointName::Selective => Checkpointing::Selective,
        CheckpointName::Full => Checkpointing::Full,
    };
    // The last group of `every` blocks keeps its activations: backward needs them right away.
    if every == 0 || every > 1 && blocks / every < 2 {
        let most = if blocks < 4 { "1".to_string() } else { format!("1 to {}", blocks / 2) };
        return Err(Error::input(format!(
            "--activation-checkpoint-every {every}: none of the {blocks} blocks would be recomputed. One in {every} is, \
             and the last of these always keeps its activations: choose {most}, or --no-activation-checkpoint"
        )));
    }
    Ok(all.every(every))
}

/// Per-tensor settings, and adapters if a rank is given.
fn tuning(s: &Settings, spec: &Spec) -> Result<Tuning> {
    let (t, l) = (&s.tune, &s.lora);
    let targets = || match l.target_modules.clone() {
        // PEFT's default for these families.
        None if spec.fused_qkv => {
            let qkv = spec.arch.family().modules.qkv;
            vec![qkv.rsplit('.').next().unwrap_or(qkv).into()]
        }
        None => vec!["q_proj".into(), "v_proj".into()],
        // By name, because PEFT's `all-linear` has adapters for routers too, and for matrices that it refuses.
        Some(names)
            if (spec.experts.is_some() || !spec.arch.adapts_mamba_out())
                && names.iter().any(|name| name == ALL_LINEAR) =>
        {
            linear_modules(&spec.layouts())
        }
        Some(names) => names,
    };
    let tower = || s.model.pretrain.as_deref().map_or(Ok(false), ckpt::hf::has_tower);
    let lora = |rank| {
        if spec.arch == Arch::Llama4 && tower()? {
            // The paths of its modules are others than those of all classes with a tower that PEFT adapts.
            return Err(Error::input(
                "lora: adapters of Llama 4 with its vision tower are not supported; train all of its text model, or \
                 adapt a model of the text alone",
            ));
        }
        Ok(Lora {
            rank,
            alpha: l.alpha.unwrap_or(rank as f64) as f32,
            dropout: l.dropout.unwrap_or(0.0) as f32,
            targets: ckpt::adapter::targets(targets(), spec, tower)?,
        })
    };
    Ok(Tuning {
        freeze: t.freeze.clone().unwrap_or_default(),
        unfreeze: t.unfreeze.clone().unwrap_or_default(),
        no_decay: t.no_decay.clone().unwrap_or_default(),
        lr_scale: t.lr_scales()?,
        lora: l.rank.map(lora).transpose()?,
        load_in_4bit: l.load_in_4bit == Some(true),
        fp8: s.precision.fp8(),
        uniform: s.fsdp.use_orig_params == Some(false),
    })
}

/// The options of every rank's engine.
pub fn options(s: &Settings, device: DeviceName, mesh: &MeshSizes, spec: Spec) -> Result<EngineOptions> {
    let (f, o, b) = (&s.fsdp, &s.optim, &s.batch);
    let weight_decay = set(&o.weight_decay, "optim.weight_decay")? as f32;
    let rule = match set(&o.optimizer, "optim.optimizer")? {
        name @ (OptimizerName::Adamw | OptimizerName::Adamw8bit) => {
            let betas = set(&o.betas, "optim.betas")?;
            Rule::AdamW {
                beta1: betas[0] as f32,
                beta2: betas[1] as f32,
                eps: set(&o.eps, "optim.eps")? as f32,
                weight_decay,
                moments: if name == OptimizerName::Adamw8bit { DType::U8 } else { s.precision.moments()? },
            }
        }
        OptimizerName::Muon => {
            let betas = set(&o.betas, "optim.betas")?;
            Rule::Muon {
                momentum: set(&o.muon_momentum, "optim.muon_momentum")? as f32,
                steps: set(&o.muon_ns_steps, "optim.muon_ns_steps")?,
                beta1: betas[0] as f32,
                beta2: betas[1] as f32,
                eps: set(&o.eps, "optim.eps")? as f32,
                weight_decay,
            }
        }
        OptimizerName::Sgd => Rule::Sgd { momentum: set(&o.momentum, "optim.momentum")? as f32, weight_decay },
    };
    computes(device, &spec)?;
    if device != DeviceName::Cpu && s.objective.on_policy == Some(true) {
        return Err(Error::input(
            "--on-policy: GPUs have no kernel yet for the divergence from a teacher; use --device cpu",
        ));
    }
    let strategy = strategy(s, device, &spec)?;
    let checkpoint = checkpointing(f, spec.layers)?;
    let sequences = if s.objective.has_pairs() { 2 } else { 1 };
    let row = s.largest_group.max(sequences * set(&s.data.max_len, "data.max_len")?);
    let batch_size = set(&b.batch_size, "batch.batch_size")?;
    let tokens = batch_size.checked_mul(row).filter(|&tokens| tokens <= MOST_TOKENS).ok_or_else(|| {
        Error::input(format!(
            "batch_size {batch_size} of up to {row} tokens: a micro-batch has at most {MOST_TOKENS} tokens; use grad_accum"
        ))
    })?;
    let tuning = tuning(s, &spec)?;
    let mut options = EngineOptions {
        tokens,
        objective: objective::objective(s)?,
        reference: objective::reference(s, &spec)?,
        teacher: objective::teacher(s, &spec)?,
        spec,
        tuning,
        strategy,
        rule,
        grad_clip: set(&o.grad_clip, "optim.grad_clip")? as f32,
        scaler: s.precision.scaler()?,
        checkpoint,
        seed: set(&s.run.seed, "run.seed")?,
        sequence_parallel: set(&s.parallel.sequence_parallel, "parallel.sequence_parallel")?,
        cuts: Cuts::ALL,
        sp_impl: match (
            set(&s.parallel.sp_impl, "parallel.sp_impl")?,
            set(&s.parallel.ring_impl, "parallel.ring_impl")?,
        ) {
            (SpName::Ulysses, _) => SpImpl::Ulysses,
            (SpName::Ring, RingName::Ring) => SpImpl::Ring,
            (SpName::Ring, RingName::Allgather) => SpImpl::AllGather,
        },
        moe_overlap: set(&s.parallel.moe_overlap, "parallel.moe_overlap")?,
        aux_coef: 0.0,
        samples: None, // set by the plan
    };
    options.aux_coef = experts(s, &options)?;
    fits_a_word(&options)?;
    tensor::settle(s, mesh, &mut options)?;
    Ok(options)
}

/// Refuses models with blocks that a device has no operations for.
fn computes(device: DeviceName, spec: &Spec) -> Result<()> {
    match spec.recurrence {
        Some(Recurrence::Delta(net)) if device != DeviceName::Cpu && net.shape.key_dim > MOST_OF_KEY => {
            Err(Error::input(format!(
                "GPUs have no kernels for the keys of {} elements in the {} of {}, at most {MOST_OF_KEY}: use --device cpu",
                net.shape.key_dim,
                spec.recurrence.as_ref().map_or("blocks", Recurrence::name),
                spec.arch.name()
            )))
        }
        _ => Ok(()),
    }
}

/// The factor of the load-balancing loss, after refusing what a mixture of experts cannot do yet.
fn experts(s: &Settings, e: &EngineOptions) -> Result<f64> {
    let (given, name) = (s.model.router_aux_loss_coef, e.spec.arch.name());
    if e.spec.score && e.spec.arch.family().scored.is_none() {
        return Err(Error::input(format!(
            "--objective rm: transformers has no reward models of {name}, so nothing could load it; use another model"
        )));
    }
    let Some(experts) = &e.spec.experts else {
        return match given {
            None => Ok(0.0),
            Some(_) => Err(Error::input(format!("router_aux_loss_coef: {name} has no experts; remove it"))),
        };
    };
    if let Some(factor) = given.filter(|&factor| factor > 0.0 && (experts.rule.is_some() || experts.beside)) {
        return Err(Error::input(format!(
            "router_aux_loss_coef {factor}: the load-balancing loss is not supported for {name}'s routers; remove it"
        )));
    }
    Ok(given.unwrap_or(if experts.aux_loss { experts.aux_coef } else { 0.0 }))
}

/// Later code multiplies sizes without overflow checks, so a generous bound on parameters with gradients and moments
/// and on the activations of a micro-batch is checked here.
fn fits_a_word(e: &EngineOptions) -> Result<()> {
    let (s, tokens) = (&e.spec, e.tokens as f64);
    let [layers, dim, mut ff, vocab, positions] = [s.layers, s.dim, s.ff, s.vocab, s.max_len].map(|n| n as f64);
    let mut mlps = 1.0;
    if let Some(e) = &s.experts {
        ff += e.count as f64 * e.ff as f64 + e.shared_ff as f64;
        mlps += e.count as f64;
    }
    ff *= if s.wide_shared { 2.0 } else { 1.0 };
    let head_dim = s.kinds_of_heads().map(|sizes| sizes.head_dim).max().unwrap_or(0);
    let heads = (s.heads * head_dim) as f64;
    let adapters = e.tuning.lora.as_ref().map_or(0.0, |lora| lora.rank as f64 * 7.0 * (mlps * dim + heads + ff));
    let params = layers * (dim * (4.0 * heads + 3.0 * ff) + adapters) + dim * (2.0 * vocab + positions);
    let activations = tokens * (layers * (8.0 * dim + 8.0 * heads + 3.0 * ff) + vocab + dim);
    if 32.0 * (params + activations) <= BYTES {
        return Ok(());
    }
    Err(Error::input(format!(
        "model too large for any machine: {} layers, width {}, ff {}, vocabulary {}, {} tokens per micro-batch. \
        Reduce one of \
         these sizes",
        s.layers, s.dim, s.ff, s.vocab, e.tokens
    )))
}
