//! The curated set: every run by name, as its changes to the common configuration. Never starts anything, and does not
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
    /// The binary; none for PyTorch.
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
    /// What sets it apart from the others.
    pub about: &'static str,
    pub program: Program,
    /// Laid over the common configuration.
    pub overlay: Value,
}

impl RunEntry {
    /// Ranks that share one sample, tp * sp: so many times larger is a micro-batch, for the same sequences in a step.
    pub fn ranks_of_a_sample(&self) -> u64 {
        let size = |key: &str| self.overlay["parallel"][key].as_u64().unwrap_or(1);
        size("tp_size") * size("ring_attn_size")
    }
}

fn entry(name: &'static str, about: &'static str, program: Program, overlay: Value) -> RunEntry {
    RunEntry { name, about, program, overlay }
}

/// All runs, in the order in which they are run. In fp32 unless the name says otherwise, so that each can be held to
/// `ddp_fp32`; each ablation is one setting away from the run that it is named after.
pub fn all() -> Vec<RunEntry> {
    use Program::{Ddp, Fsdp};
    let fsdp = |settings: Value| json!({"fsdp": settings});
    let reference = |mut settings: Value| {
        settings["fsdp_impl"] = json!("reference");
        json!({"fsdp": settings})
    };
    let zero = |stage: u64| json!({"fsdp": {"backend": "zero", "zero_stage": stage}});
    let bf16 = || json!({"precision": {"precision": "bf16"}});
    vec![
        entry("ddp_fp32", "everything replicated, gradients all-reduced", Ddp, json!({})),
        entry("ddp_bf16", "the same, weights and compute in bf16", Ddp, bf16()),
        entry("fsdp_manual", "flat units, FULL_SHARD, BACKWARD_PRE and forward prefetch", Fsdp, json!({})),
        entry("fsdp_manual_bf16", "the same, gathered and computed in bf16", Fsdp, bf16()),
        entry(
            "fsdp_manual_ac",
            "activation checkpointing: blocks recomputed in backward",
            Fsdp,
            fsdp(json!({"activation_checkpoint": true})),
        ),
        entry(
            "fsdp_manual_no_limit",
            "limit_all_gathers off: more than two gathers may be in flight",
            Fsdp,
            fsdp(json!({"limit_all_gathers": false})),
        ),
        entry(
            "fsdp_manual_backward_post",
            "the next unit is gathered after this one's gradient",
            Fsdp,
            fsdp(json!({"backward_prefetch": "BACKWARD_POST"})),
        ),
        entry(
            "fsdp_manual_no_prefetch",
            "every unit is gathered when it is needed",
            Fsdp,
            fsdp(json!({"backward_prefetch": "NONE", "forward_prefetch": false})),
        ),
        entry(
            "fsdp_manual_shard_grad_op",
            "weights stay gathered between forward and backward",
            Fsdp,
            fsdp(json!({"sharding": "SHARD_GRAD_OP"})),
        ),
        entry("fsdp_manual_no_shard", "nothing is sharded", Fsdp, fsdp(json!({"sharding": "NO_SHARD"}))),
        entry(
            "fsdp_manual_hybrid_shard",
            "sharded in groups, all-reduced across two replicas",
            Fsdp,
            json!({"fsdp": {"sharding": "HYBRID_SHARD"}, "parallel": {"dp_replicate_size": 2}}),
        ),
        entry("fsdp_reference", "one shard a parameter, synchronous: the oracle", Fsdp, reference(json!({}))),
        entry(
            "fsdp_reference_ac",
            "the same with activation checkpointing",
            Fsdp,
            reference(json!({"activation_checkpoint": true})),
        ),
        entry(
            "fsdp_reference_shard_grad_op",
            "the same with weights kept until backward",
            Fsdp,
            reference(json!({"sharding": "SHARD_GRAD_OP"})),
        ),
        entry("fsdp_official", "PyTorch's FullyShardedDataParallel, where Python has it", TORCH_FSDP, fp32(json!({}))),
        entry("zero1", "optimizer state partitioned", Fsdp, zero(1)),
        entry("zero2", "optimizer state and gradients partitioned", Fsdp, zero(2)),
        entry("zero3", "optimizer state, gradients and parameters partitioned", Fsdp, zero(3)),
        entry("tp2", "layers cut over two ranks", Fsdp, json!({"parallel": {"tp_size": 2}})),
        entry(
            "ring2",
            "sequences cut over two ranks, ring attention",
            Fsdp,
            json!({"parallel": {"ring_attn_size": 2}}),
        ),
        entry("tp2_ring2", "both", Fsdp, json!({"parallel": {"tp_size": 2, "ring_attn_size": 2}})),
    ]
}

/// PyTorch's first implementation: it has every setting that the set ablates.
const TORCH_FSDP: Program = Program::Torch("fsdp1");

fn fp32(mut overlay: Value) -> Value {
    overlay["precision"] = json!({"precision": "fp32"});
    overlay
}

/// PyTorch's own, on the same model: see `experiments/peers/torch_peer.py`. `fsdp_official` is ablated as `fsdp_manual`
/// is; torch_fsdp2 has no BACKWARD_POST and no limit_all_gathers.
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
        entry("fsdp_official_bf16", "the same with bf16 parameters", TORCH_FSDP, bf16()),
        entry("fsdp_official_ac", "with activation checkpointing", TORCH_FSDP, ac()),
        entry("fsdp_official_no_limit", "with limit_all_gathers off", TORCH_FSDP, fsdp(no_limit)),
        entry("fsdp_official_backward_post", "with BACKWARD_POST", TORCH_FSDP, fsdp(post)),
        entry("fsdp_official_no_prefetch", "without prefetch", TORCH_FSDP, no_prefetch()),
        entry("fsdp_official_shard_grad_op", "with SHARD_GRAD_OP", TORCH_FSDP, grad_op()),
        entry("torch_ddp", "PyTorch's DistributedDataParallel", ddp, fp32(json!({}))),
        entry("torch_ddp_bf16", "the same under autocast", ddp, bf16()),
        entry("torch_ddp_ac", "with activation checkpointing", ddp, ac()),
        entry("torch_fsdp2", "PyTorch's fully_shard", fsdp2, fp32(json!({}))),
        entry("torch_fsdp2_bf16", "the same with bf16 parameters", fsdp2, bf16()),
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
        fsdp("fsdp", "parameters too, in flat units", json!({})),
        fsdp("fsdp_tp", "with layers cut", json!({"parallel": {"tp_size": tp}})),
        fsdp("fsdp_ring", "with sequences cut", json!({"parallel": {"ring_attn_size": ring}})),
        fsdp("fsdp_tp_ring", "with both", json!({"parallel": {"tp_size": tp, "ring_attn_size": ring}})),
    ]
}

/// Those of `entries` that `only` names (all, where it names none) and `skip` does not. A name may end in `*`. A
/// pattern that matches nothing is an error.
pub fn choose(entries: Vec<RunEntry>, only: &[String], skip: &[String]) -> Result<Vec<RunEntry>> {
    let matches = |pattern: &str, name: &str| match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == pattern,
    };
    for (flag, patterns) in [("--only", only), ("--skip", skip)] {
        if let Some(unknown) = patterns.iter().find(|p| !entries.iter().any(|e| matches(p, e.name))) {
            let names: Vec<&str> = entries.iter().map(|e| e.name).collect();
            return Err(Error::input(format!("{flag} {unknown}: no such run; there are {}", names.join(", "))));
        }
    }
    let named = |patterns: &[String], e: &RunEntry| patterns.iter().any(|p| matches(p, e.name));
    let chosen: Vec<RunEntry> =
        entries.into_iter().filter(|e| (only.is_empty() || named(only, e)) && !named(skip, e)).collect();
    match chosen.is_empty() {
        true => Err(Error::input("--only and --skip leave no run")),
        false => Ok(chosen),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_different_and_fit_the_issue() {
        let all: Vec<RunEntry> = all().into_iter().chain(peers()).collect();
        let names: std::collections::BTreeSet<&str> = all.iter().map(|e| e.name).collect();
        assert_eq!(names.len(), all.len());
        for name in
            "ddp_fp32 fsdp_manual_bf16 fsdp_reference fsdp_official zero1 zero2 zero3 tp2 ring2 tp2_ring2".split(' ')
        {
            assert!(names.contains(name), "{name}");
        }
    }

    #[test]
    fn patterns_choose() {
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
