//! The strategies to plan: the user's settings with each applicable strategy, as flags of `run_fsdp`, so that the
//! recommended one can be run as printed. Never ranks them.
use flatshard::run::settings::args::Cli;

/// One way to run the model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// The strategy; options follow after a plus.
    pub name: String,
    /// Appended to the user's own.
    pub flags: Vec<String>,
}

impl Candidate {
    fn new(name: impl Into<String>, flags: &str) -> Candidate {
        Candidate { name: name.into(), flags: flags.split_whitespace().map(str::to_string).collect() }
    }
    fn with(&self, name: &str, flags: &str) -> Candidate {
        let more = Candidate::new(format!("{} + {name}", self.name), flags);
        Candidate { name: more.name, flags: [self.flags.clone(), more.flags].concat() }
    }
}

/// Settings the user has fixed, which are not varied.
struct Settled {
    strategy: bool,
    checkpoint: bool,
    offload: bool,
    sync: bool,
}

impl Settled {
    fn of(cli: &Cli) -> Settled {
        let s = &cli.settings;
        let (f, p) = (&s.fsdp, &s.parallel);
        let sizes = [p.tp_size, p.ring_attn_size, p.dp_replicate_size, p.ep_size];
        Settled {
            strategy: s.run.strategy.is_some()
                || f.sharding.is_some()
                || f.backend.is_some()
                || f.zero_stage.is_some()
                || f.deepspeed.is_some()
                || f.fsdp_impl.is_some()
                || sizes.iter().any(Option::is_some),
            checkpoint: f.activation_checkpoint.is_some(),
            offload: f.cpu_offload.is_some(),
            sync: f.sync_each_batch.is_some(),
        }
    }
}

/// Sizes of an axis within a node of `per_node` that divide `gpus`.
fn sizes(gpus: usize, per_node: usize) -> impl Iterator<Item = usize> {
    (1..).map(|i| 1 << i).take_while(move |&n| n <= per_node.min(gpus)).filter(move |n| gpus.is_multiple_of(*n))
}

/// Every strategy on `gpus` ranks, `per_node` per node. With `hosts_compute`, without offloading.
pub fn candidates(cli: &Cli, gpus: usize, per_node: usize, hosts_compute: bool) -> Vec<Candidate> {
    let settled = Settled::of(cli);
    let mut all = Vec::new();
    if settled.strategy {
        all.push(Candidate::new("as given", ""));
    } else {
        all.push(Candidate::new("ddp", "--strategy ddp"));
        all.extend((1..=3).map(|n| Candidate::new(format!("zero-{n}"), &format!("--backend zero --zero-stage {n}"))));
        all.push(Candidate::new("FULL_SHARD", "--sharding FULL_SHARD"));
        all.push(Candidate::new("SHARD_GRAD_OP", "--sharding SHARD_GRAD_OP"));
        if gpus > per_node && gpus.is_multiple_of(per_node) {
            let flags = format!("--sharding HYBRID_SHARD --dp-replicate-size {}", gpus / per_node);
            all.push(Candidate::new("HYBRID_SHARD", &flags));
        }
        let cut = |what: &str, flag: &str, n: usize| {
            Candidate::new(format!("FULL_SHARD {what}{n}"), &format!("--sharding FULL_SHARD {flag} {n}"))
        };
        all.extend(sizes(gpus, per_node).map(|n| cut("tp", "--sequence-parallel --tp-size", n)));
        all.extend(sizes(gpus, per_node).map(|n| cut("ring", "--ring-attn-size", n)));
        if cli.settings.parallel.sp_impl.is_none() {
            all.extend(sizes(gpus, per_node).map(|n| cut("ulysses", "--sp-impl ulysses --ring-attn-size", n)));
        }
    }
    let plain = all.len();
    // With accumulation, each unit otherwise keeps its full gradient.
    if !settled.sync && cli.settings.batch.grad_accum.is_some_and(|n| n > 1) {
        let cut = |c: &&Candidate| c.name == "as given" || c.name.contains("SHARD");
        let more: Vec<_> = all.iter().filter(cut).map(|c| c.with("sync each batch", "--sync-each-batch")).collect();
        all.extend(more);
    }
    if !settled.checkpoint {
        let of = |c: &Candidate| {
            let selective = c.with("selective checkpointing", "--activation-checkpoint selective");
            [selective, c.with("checkpointing", "--activation-checkpoint full")]
        };
        let more: Vec<_> = all.iter().flat_map(of).collect();
        all.extend(more);
    }
    if !settled.offload && !hosts_compute {
        let sharded =
            |c: &&Candidate| matches!(c.name.as_str(), "as given" | "FULL_SHARD" | "FULL_SHARD + checkpointing");
        let more: Vec<_> = all.iter().filter(sharded).map(|c| c.with("offload", "--cpu-offload")).collect();
        all.extend(more);
    }
    // Each strategy next to its own variants, in the order of the strategies.
    let mut order: Vec<usize> = (0..all.len()).collect();
    let base = |i: usize| {
        let stem = all[i].name.split(" + ").next().unwrap_or_default();
        all[..plain].iter().position(|c| c.name == stem).unwrap_or(plain)
    };
    order.sort_by_key(|&i| base(i));
    order.into_iter().map(|i| all[i].clone()).collect()
}
