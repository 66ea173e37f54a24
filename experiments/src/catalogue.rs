//! The curated set: every run by name, as a change to the common configuration. Never starts anything, and does not
//! know what a build supports: the binary refuses a run whose feature is missing, and the tables show that.
use flatshard::base::{Error, Result};
use serde_json::{Value, json};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Program {
    Fsdp,
    Ddp,
    /// PyTorch's implementation of this name.
    Torch(&'static str),
}

impl Program {
    /// The binary; None for PyTorch.
    pub fn binary(self) -> Option<&'static str> {
        match self {
            Program::Fsdp => Some("run_fsdp"),
            Program::Ddp => Some("run_ddp"),
            Program::Torch(_) => None,
        }
    }
}

/// One run of the set.
#[derive(Clone, Debug)]
pub struct RunEntry {
    pub name: &'static str,
    /// How the run differs from the others.
    pub about: &'static str,
    pub program: Program,
    /// Merged over the common configuration.
    pub overlay: Value,
}

impl RunEntry {
    /// Ranks that share one sample, tp * sp. The micro-batch grows by this factor, so that a step has the same
    /// sequences.
    pub fn ranks_of_a_sample(&self) -> u64 {
        let size = |key: &str| self.overlay["parallel"][key].as_u64().unwrap_or(1);
        size("tp_size") * size("ring_attn_size")
    }
}

fn entry(name: &'static str, about: &'static str, program: Program, overlay: Value) -> RunEntry {
    RunEntry { name, about, program, overlay }
}

/// All runs, in execution order. fp32 unless the name says otherwise, so that each can be compared with `ddp_fp32`.
/// Each ablation differs by one setting from the run it is named after.
pub fn all() -> Vec<RunEntry> {
    use Program::{Ddp, Fsdp};
    let fsdp = |settings: Value| json!({"fsdp": settings});
    let reference = |mut settings: Value| {
        settings["fsdp_impl"] = json!("reference");
        json!({"fsdp": settings})
    };
    let zero = |stage: u64| json!({"fsdp": {"backend": "zero", "zero_stage": stage}});
    let bf16 = || json!({"precision": {"precision": "bf16"}});
    let moe = || json!({"num_experts": 8, "num_experts_per_tok": 2, "ff_hidden_dim": 352});
    vec![
        entry("ddp_fp32", "replicated parameters, all-reduced gradients", Ddp, json!({})),
        entry("ddp_bf16", "ddp_fp32 with weights and compute in bf16", Ddp, bf16()),
        entry("fsdp_manual", "flat units, FULL_SHARD, BACKWARD_PRE and forward prefetch", Fsdp, json!({})),
        entry("fsdp_manual_bf16", "fsdp_manual with all-gather and compute in bf16", Fsdp, bf16()),
        entry(
            "fsdp_manual_ac",
            "activation checkpointing: blocks recomputed in backward",
            Fsdp,
            fsdp(json!({"activation_checkpoint": true})),
        ),
        entry(
            "fsdp_manual_no_limit",
            "limit_all_gathers off: more than two all-gathers in flight",
            Fsdp,
            fsdp(json!({"limit_all_gathers": false})),
        ),
        entry(
            "fsdp_manual_backward_post",
            "BACKWARD_POST: prefetch the next unit after this unit's gradient",
            Fsdp,
            fsdp(json!({"backward_prefetch": "BACKWARD_POST"})),
        ),
        entry(
            "fsdp_manual_no_prefetch",
            "no prefetch: every unit is gathered when it is needed",
            Fsdp,
            fsdp(json!({"backward_prefetch": "NONE", "forward_prefetch": false})),
        ),
        entry(
            "fsdp_manual_shard_grad_op",
            "SHARD_GRAD_OP: weights stay unsharded between forward and backward",
            Fsdp,
            fsdp(json!({"sharding": "SHARD_GRAD_OP"})),
        ),
        entry("fsdp_manual_no_shard", "NO_SHARD: nothing is sharded", Fsdp, fsdp(json!({"sharding": "NO_SHARD"}))),
        entry(
            "fsdp_manual_hybrid_shard",
            "HYBRID_SHARD: sharded within a replica, all-reduced across two",
            Fsdp,
            json!({"fsdp": {"sharding": "HYBRID_SHARD"}, "parallel": {"dp_replicate_size": 2}}),
        ),
        entry("fsdp_reference", "per-parameter sharding, synchronous: the oracle", Fsdp, reference(json!({}))),
        entry(
            "fsdp_reference_ac",
            "fsdp_reference with activation checkpointing",
            Fsdp,
            reference(json!({"activation_checkpoint": true})),
        ),
        entry(
            "fsdp_reference_shard_grad_op",
            "fsdp_reference with weights unsharded until backward",
            Fsdp,
            reference(json!({"sharding": "SHARD_GRAD_OP"})),
        ),
        entry("fsdp_official", "PyTorch's FullyShardedDataParallel, if installed", TORCH_FSDP, fp32(json!({}))),
        entry("zero1", "optimizer state partitioned", Fsdp, zero(1)),
        entry("zero2", "optimizer state and gradients partitioned", Fsdp, zero(2)),
        entry("zero3", "optimizer state, gradients and parameters partitioned", Fsdp, zero(3)),
        entry("tp2", "tensor parallelism over two ranks", Fsdp, json!({"parallel": {"tp_size": 2}})),
        entry("ring2", "ring attention over two ranks", Fsdp, json!({"parallel": {"ring_attn_size": 2}})),
        entry(
            "moe",
            "fsdp_manual with 2 of 8 experts per token, which have as many parameters as its MLP",
            Fsdp,
            json!({"model": moe()}),
        ),
        entry(
            "moe_ep2",
            "moe with the experts shared by two ranks: rows travel in place of weights",
            Fsdp,
            json!({"model": moe(), "parallel": {"ep_size": 2}}),
        ),
        entry("tp2_ring2", "both", Fsdp, json!({"parallel": {"tp_size": 2, "ring_attn_size": 2}})),
    ]
}

/// PyTorch's FSDP1, which has every setting that the set ablates.
const TORCH_FSDP: Program = Program::Torch("fsdp1");

fn fp32(mut overlay: Value) -> Value {
    overlay["precision"] = json!({"precision": "fp32"});
    overlay
}

/// PyTorch's own implementations on the same model: see `experiments/peers/torch_peer.py`. `fsdp_official` has the same
/// ablations as `fsdp_manual`; torch_fsdp2 has no BACKWARD_POST and no limit_all_gathers.
pub fn peers() -> Vec<RunEntry> {
    let fsdp = |settings: Value| fp32(json!({"fsdp": settings}));
    let bf16 = || json!({"precision": {"precision": "bf16"}});
    let (ddp, fsdp2) = (Program::Torch("ddp"), Program::Torch("fsdp2"));
    let (ac, no_prefetch) = (
        || fsdp(json!({"activation_checkpoint": true})),
        || fsdp(json!({"backward_prefetch": "NONE", "forward_prefetch": false})),
    );
    let (no_limit, post) = (json!({"limit_all_gathers": false}), json!({"backward_prefetch": "BACKWARD_POST"}));
    let grad_op = || fsdp(json!({"sharding": "SHARD_GRAD_OP"}));
    vec![
        entry("fsdp_official_bf16", "fsdp_official with bf16 parameters", TORCH_FSDP, bf16()),
        entry("fsdp_official_ac", "with activation checkpointing", TORCH_FSDP, ac()),
        entry("fsdp_official_no_limit", "with limit_all_gathers off", TORCH_FSDP, fsdp(no_limit)),
        entry("fsdp_official_backward_post", "with BACKWARD_POST", TORCH_FSDP, fsdp(post)),
        entry("fsdp_official_no_prefetch", "without prefetch", TORCH_FSDP, no_prefetch()),
        entry("fsdp_official_shard_grad_op", "with SHARD_GRAD_OP", TORCH_FSDP, grad_op()),
        entry("torch_ddp", "PyTorch's DistributedDataParallel", ddp, fp32(json!({}))),
        entry("torch_ddp_bf16", "torch_ddp under autocast", ddp, bf16()),
        entry("torch_ddp_ac", "with activation checkpointing", ddp, ac()),
        entry("torch_fsdp2", "PyTorch's fully_shard", fsdp2, fp32(json!({}))),
        entry("torch_fsdp2_bf16", "torch_fsdp2 with bf16 parameters", fsdp2, bf16()),
        entry("torch_fsdp2_ac", "with activation checkpointing", fsdp2, ac()),
        entry("torch_fsdp2_no_prefetch", "without prefetch", fsdp2, no_prefetch()),
        entry("torch_fsdp2_shard_grad_op", "with SHARD_GRAD_OP", fsdp2, grad_op()),
    ]
}

/// The ZeRO-2, FSDP and combined runs of `suite`.
pub fn suite(tp: u64, ring: u64) -> Vec<RunEntry> {
    let fsdp = |name, about, overlay| entry(name, about, Program::Fsdp, overlay);
    vec![
        fsdp(
            "zero2",
            "optimizer state and gradients partitioned",
            json!({"fsdp": {"backend": "zero", "zero_stage": 2}}),
        ),
        fsdp("fsdp", "parameters sharded too, in flat units", json!({})),
        fsdp("fsdp_tp", "with tensor parallelism", json!({"parallel": {"tp_size": tp}})),
        fsdp("fsdp_ring", "with ring attention", json!({"parallel": {"ring_attn_size": ring}})),
        fsdp(
            "fsdp_tp_ring",
            "with tensor parallelism and ring attention",
            json!({"parallel": {"tp_size": tp, "ring_attn_size": ring}}),
        ),
    ]
}

/// The entries that match `only` (all, if it is empty) and do not match `skip`. A pattern may end in `*`. A pattern
/// without a match is an error.
pub fn choose(entries: Vec<RunEntry>, only: &[String], skip: &[String]) -> Result<Vec<RunEntry>> {
    let matches = |pattern: &str, name: &str| match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == pattern,
    };
    for (flag, patterns) in [("--only", only), ("--skip", skip)] {
        if let Some(unknown) = patterns.iter().find(|p| !entries.iter().any(|e| matches(p, e.name))) {
            let names: Vec<&str> = entries.iter().map(|e| e.name).collect();
            return Err(Error::input(format!("{flag} {unknown}: no such run; known runs: {}", names.join(", "))));
        }
    }
    let named = |patterns: &[String], e: &RunEntry| patterns.iter().any(|p| matches(p, e.name));
    let chosen: Vec<RunEntry> =
        entries.into_iter().filter(|e| (only.is_empty() || named(only, e)) && !named(skip, e)).collect();
    match chosen.is_empty() {
        true => Err(Error::input("--only and --skip select no runs")),
        false => Ok(chosen),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_the_required_runs_exist() {
        let all: Vec<RunEntry> = all().into_iter().chain(peers()).collect();
        let names: std::collections::BTreeSet<&str> = all.iter().map(|e| e.name).collect();
        assert_eq!(names.len(), all.len());
        for name in
            "ddp_fp32 fsdp_manual_bf16 fsdp_reference fsdp_official zero1 zero2 zero3 tp2 ring2 tp2_ring2 moe moe_ep2"
                .split(' ')
        {
            assert!(names.contains(name), "{name}");
        }
    }

    #[test]
    fn patterns_select_runs() {
        let names = |only: &[&str], skip: &[&str]| {
            let strings = |list: &[&str]| list.iter().map(|s| s.to_string()).collect::<Vec<_>>();
            choose(all(), &strings(only), &strings(skip)).map(|e| e.iter().map(|e| e.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&["zero*", "tp2"], &["zero2"]).unwrap(), ["zero1", "zero3", "tp2"]);
        assert_eq!(names(&[], &[]).unwrap().len(), all().len());
        assert!(names(&["zer0"], &[]).unwrap_err().to_string().contains("zer0"));
        assert!(names(&["tp2"], &["tp2"]).is_err());
    }
}
