//! `smoke`: does this build train at all? DDP, manual and reference FSDP on one rank with checkpoints and telemetry,
//! then two ranks with collectives, in well under a minute. Never measures speed.
use crate::catalogue::{Program, RunEntry};
use crate::compare::judge;
use crate::curve::{Curve, METRICS};
use crate::job::{JobOutcome, stop_signals};
use crate::launch::{self, Common};
use crate::launcher::{LaunchArgs, Launcher};
use crate::sets;
use crate::suite::falls;
use crate::verdict::Verdict;
use flatshard::base::{Error, Result};
use serde_json::{Value, json};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Check DDP, manual and reference FSDP with checkpoints and telemetry, and collectives, in under a minute
#[derive(clap::Args)]
pub struct SmokeArgs {
    /// Keep the runs there [default: a scratch directory, removed on success]
    #[arg(long, visible_alias = "experiment-dir", value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// Directory of run_fsdp and run_ddp [default: that of this binary, built by cargo if missing]
    #[arg(long, value_name = "DIR")]
    bin_dir: Option<PathBuf>,
}

const STEPS: u64 = 12;
const SAVED: u64 = 8;

/// Fields of every step event, from the contract's metrics table. `mfu` and `sol` are null in an
/// emulator.
const STEP_FIELDS: [&str; 15] = [
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "trained_tokens",
    "tokens_per_sec",
    "step_time_s",
    "comm_time_s",
    "exposed_comm_s",
    "comm_bytes",
    "data_time_s",
    "peak_mem_bytes",
    "mfu",
    "mfu_llm_foundry",
    "sol",
];

/// The runs; prints a line as each ends.
struct Smoke {
    bin: PathBuf,
    output: PathBuf,
    signals: Signals,
    good: bool,
}

pub fn main(args: &SmokeArgs) -> Result<Verdict> {
    let started = Instant::now();
    let scratch = std::env::temp_dir().join(format!("flatshard-smoke-{}", std::process::id()));
    let output = sets::absolute(args.output_dir.as_ref().unwrap_or(&scratch))?;
    let (bin, signals) = (launch::binaries(args.bin_dir.as_deref())?, stop_signals()?);
    let mut smoke = Smoke { bin, output, signals, good: true };
    smoke.all()?;
    println!("{} in {:.1} s", if smoke.good { "passed" } else { "FAILED" }, started.elapsed().as_secs_f64());
    match (smoke.good, args.output_dir.is_none()) {
        (true, true) => std::fs::remove_dir_all(&scratch).map_err(|e| Error::io("remove", &scratch, e))?,
        _ => println!("the runs are in {}", smoke.output.display()),
    }
    Ok(if smoke.good { Verdict::Good } else { Verdict::Bad })
}

impl Smoke {
    fn all(&mut self) -> Result<()> {
        let ckpt = |name: &str| self.output.join(name).join("ckpt");
        let (manual, reference) = (ckpt("fsdp_manual"), ckpt("fsdp_reference"));
        let saving = |dir: &Path| json!({"ckpt_dir": dir, "save_every": SAVED});
        let resuming = |dir: &Path| json!({"resume": dir.join(format!("step-{SAVED:08}"))});
        let is_reference = json!({"fsdp_impl": "reference"});

        let ddp = self.run("ddp", Program::Ddp, json!({}), 1)?;
        let sharded = self.run("fsdp_manual", Program::Fsdp, json!({"checkpoint": saving(&manual)}), 1)?;
        self.agree("manual FSDP and DDP have equal losses", &ddp, &sharded, 0.0);
        let resumed = self.run("fsdp_manual_resumed", Program::Fsdp, json!({"checkpoint": resuming(&manual)}), 1)?;
        self.goes_on("manual FSDP resumes from its checkpoint, bit for bit", &sharded, &resumed);

        let overlay = json!({"fsdp": is_reference, "checkpoint": saving(&reference)});
        let oracle = self.run("fsdp_reference", Program::Fsdp, overlay, 1)?;
        self.agree("reference FSDP and DDP have equal losses within 1e-5", &ddp, &oracle, 1e-5);
        let overlay = json!({"fsdp": is_reference, "checkpoint": resuming(&reference)});
        let resumed = self.run("fsdp_reference_resumed", Program::Fsdp, overlay, 1)?;
        self.goes_on("reference FSDP resumes from its checkpoint, bit for bit", &oracle, &resumed);

        let two = self.run("fsdp_two_ranks", Program::Fsdp, json!({}), 2)?;
        self.agree("two ranks and one have equal losses within 1e-4", &ddp, &two, 1e-4);
        let bytes = |curve: &Option<Curve>| curve.as_ref().map(|c| c.steps.values().filter_map(|s| s.comm_bytes).sum());
        let (alone, together): (Option<u64>, Option<u64>) = (bytes(&ddp), bytes(&two));
        let collective = together.is_some_and(|n| n > 0) && alone == Some(0);
        self.report(collective, "collectives: two ranks receive bytes from each other, one rank receives none", "");
        Ok(())
    }

    /// A run of [`STEPS`] steps with the same four sequences per step, for any number of ranks. None if it failed.
    fn run(&mut self, name: &'static str, program: Program, overlay: Value, ranks: u64) -> Result<Option<Curve>> {
        let mut config = sets::common_config(STEPS);
        let small = json!({
            "model": {"embed_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 64},
            "data": {"max_len": 64},
            "batch": {"batch_size": 4 / ranks},
            "optim": {"lr": 1e-2, "warmup_steps": 2},
        });
        launch::lay_over(&mut config, &small);
        let launch = LaunchArgs {
            launcher: Launcher::default(),
            launcher_args: String::new(),
            nproc_per_node: Some(ranks),
            nnodes: 1,
            timeout: 60.0,
            bin_dir: None,
        };
        let (bin, output) = (self.bin.clone(), self.output.clone());
        let common = Common { launch, bin, config, flags: vec![], output, python: None };
        let job = common.job(&RunEntry { name, about: "a smoke test", program, overlay }, 1)?;
        // An earlier result may be from another build, so nothing counts as done.
        if job.dir.exists() {
            std::fs::remove_dir_all(&job.dir).map_err(|e| Error::io("remove", &job.dir, e))?;
        }
        match job.run(&mut self.signals)? {
            JobOutcome::Done(status) | JobOutcome::Before(status) => {
                let curve = Curve::with_steps(&job.dir)?;
                let missing = missing_field(&job.dir.join(METRICS))?;
                let resumed = curve.first() > 1;
                let fine = (falls(&curve) || resumed) && missing.is_none() && curve.ended;
                let loss = |step| curve.loss(step).unwrap_or(f64::NAN);
                let losses = format!("loss {:.4} to {:.4}", loss(curve.first()), loss(curve.last()));
                let but = missing.map_or(String::new(), |what| format!(", but {what}"));
                self.report(fine, &format!("{name}: {losses} in {:.1} s{but}", status.seconds), "");
                Ok(Some(curve))
            }
            JobOutcome::Failed(status) => {
                self.report(false, name, &status.message);
                Ok(None)
            }
        }
    }

    fn agree(&mut self, what: &str, a: &Option<Curve>, b: &Option<Curve>, threshold: f64) {
        let (Some(a), Some(b)) = (a, b) else { return self.report(false, what, "one of them failed") };
        let parted = judge(a, b, threshold).parted.map(|p| format!("step {}: {}", p.step, p.why));
        self.report(parted.is_none(), what, &parted.unwrap_or_default());
    }

    /// `resumed` has exactly the later steps of `whole`.
    fn goes_on(&mut self, what: &str, whole: &Option<Curve>, resumed: &Option<Curve>) {
        let tail = whole.as_ref().map(|whole| {
            let steps = whole.steps.clone().into_iter().filter(|(step, _)| *step > SAVED).collect();
            Curve { steps, ..whole.clone() }
        });
        self.agree(what, &tail, resumed, 0.0);
    }

    fn report(&mut self, good: bool, what: &str, why: &str) {
        let mark = if good { "ok    " } else { "FAIL  " };
        println!("{mark}{what}{}{why}", if why.is_empty() { "" } else { ": " });
        self.good &= good;
    }
}

/// The first required field missing from a metrics file.
fn missing_field(path: &Path) -> Result<Option<String>> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    let events: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let steps = || events.iter().filter(|e| e["event"] == "step");
    let missing = |step: &&Value| STEP_FIELDS.iter().find(|name| !step[**name].is_number());
    if let Some((step, name)) = steps().find_map(|step| Some((step, missing(&step)?))) {
        return Ok(Some(format!("step {} has no {name}", step["step"])));
    }
    let run = events.iter().find(|e| e["event"] == "run");
    let header = ["world_size", "mesh", "device", "params", "planned_bytes", "config"];
    Ok(match run {
        None => Some("there is no run event".into()),
        Some(run) => {
            header.iter().find(|name| run[**name].is_null()).map(|name| format!("the run event has no {name}"))
        }
    })
}
