//! `suite`: ZeRO-2, FSDP and its combinations with tensor parallelism and ring attention on one model and dataset. All
//! must learn, and agree with FSDP. Never trains in its own process.
use crate::catalogue::{self, RunEntry};
use crate::compare::judge;
use crate::curve::Curve;
use crate::job::Job;
use crate::launch::{self, Common};
use crate::launcher::LaunchArgs;
use crate::sets;
use crate::summary::median;
use crate::verdict::Verdict;
use flatshard::base::{Error, Result};
use serde_json::json;
use std::path::PathBuf;

/// The run the others are compared with; if it is skipped, the first.
const CONTROL: &str = "fsdp";

/// What `--skip WORD` and the variable `SKIP_WORD` skip: the words, and the runs of each.
const SKIPS: [(&[&str], &[&str]); 8] = [
    (&["zero", "zero2", "deepspeed"], &["zero2"]),
    (&["fsdp", "fsdp2"], &["fsdp"]),
    (&["fsdp_tp", "fsdp2_tp"], &["fsdp_tp"]),
    (&["fsdp_ring", "fsdp2_ring"], &["fsdp_ring"]),
    (&["fsdp_tp_ring", "fsdp2_tp_ring"], &["fsdp_tp_ring"]),
    (&["tp"], &["fsdp_tp", "fsdp_tp_ring"]),
    (&["ring"], &["fsdp_ring", "fsdp_tp_ring"]),
    (&[COMPARE], &[]),
];
/// The word of [`SKIPS`] for the comparison after the runs.
const COMPARE: &str = "compare";

/// Run ZeRO-2, FSDP, FSDP + TP, FSDP + ring, FSDP + TP + ring on one model and dataset; exit status 1 unless all learn
/// and agree
///
/// A flag with an environment variable takes its default from there. Variables that skip runs, set to 1: SKIP_ZERO
/// (SKIP_ZERO2, SKIP_DEEPSPEED), SKIP_FSDP (SKIP_FSDP2), SKIP_FSDP_TP, SKIP_FSDP_RING, SKIP_FSDP_TP_RING (each also
/// with FSDP2), SKIP_TP and SKIP_RING for every run with it, SKIP_COMPARE for the comparison.
#[derive(clap::Args)]
pub struct SuiteArgs {
    /// Rows per run, each trained on once
    #[arg(long, env = "MAX_SAMPLES", default_value_t = 320, value_name = "N")]
    max_samples: u64,
    /// Hugging Face model directory to start from [default: a small LLaMA with random weights]
    #[arg(long, env = "MODEL", value_name = "DIR")]
    model: Option<String>,
    /// Training data: a path, or `synthetic`
    #[arg(long, env = "DATASET", default_value = "synthetic", value_name = "PATH")]
    dataset: String,
    /// One directory per run
    #[arg(
        long,
        visible_alias = "experiment-dir",
        env = "OUTPUT_DIR",
        default_value = "runs/suite",
        value_name = "DIR"
    )]
    output_dir: PathBuf,
    /// One log per run, numbered in order: 01_zero2.log, 02_fsdp.log, ... [default: OUTPUT_DIR/logs]
    #[arg(long, env = "LOG_DIR", value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Tensor-parallel ranks
    #[arg(long, env = "TP_SIZE", default_value_t = 2, value_name = "N")]
    tp_size: u64,
    /// Ring-attention ranks
    #[arg(long, env = "RING_SIZE", default_value_t = 2, value_name = "N")]
    ring_size: u64,
    /// Skip a run, every run with tp or ring, or the comparison (compare), by the words of the variables above
    #[arg(long, value_delimiter = ',', num_args = 1.., value_name = "NAME")]
    skip: Vec<String>,
    /// Same as --skip zero
    #[arg(long, visible_alias = "skip-deepspeed")]
    skip_zero: bool,
    /// Same as --skip tp
    #[arg(long)]
    skip_tp: bool,
    /// Same as --skip ring
    #[arg(long)]
    skip_ring: bool,
    /// Maximum relative difference of a step's loss from that of fsdp
    #[arg(long, visible_alias = "tolerance", default_value_t = 0.05, value_name = "FRACTION")]
    threshold: f64,
    #[command(flatten)]
    launch: LaunchArgs,
    /// After `--`: flags for every run, as in `-- --precision bf16`
    #[arg(last = true, value_name = "FLAG")]
    flags: Vec<String>,
}

pub fn main(args: &SuiteArgs) -> Result<Verdict> {
    args.launch.check()?;
    args.launch.check_installed()?;
    for (flag, n) in [("--max-samples", args.max_samples), ("--tp-size", args.tp_size), ("--ring-size", args.ring_size)]
    {
        if n == 0 {
            return Err(Error::input(format!("{flag} is 0; it must be at least 1")));
        }
    }
    if !(args.threshold >= 0.0 && args.threshold.is_finite()) {
        return Err(Error::input(format!("--threshold is {}; it must be 0 or more", args.threshold)));
    }
    let skipped = skipped(args)?;
    let left_out = |name: &str| SKIPS.iter().any(|(words, runs)| runs.contains(&name) && skipped.contains(&words[0]));
    let output = sets::absolute(&args.output_dir)?;
    let logs = match &args.log_dir {
        Some(dir) => sets::absolute(dir)?,
        None => output.join("logs"),
    };
    let mut config = sets::common_config(0);
    config["run"]["epochs"] = json!(1);
    if let Some(run) = config["run"].as_object_mut() {
        run.remove("max_steps"); // the samples end the run
    }
    config["data"]["dataset"] = json!([args.dataset]);
    config["data"]["max_samples"] = json!(args.max_samples);
    if let Some(model) = args.model.as_ref().filter(|model| !model.is_empty()) {
        config["model"] = json!({"pretrain": model});
    }
    let common = Common {
        bin: launch::binaries(args.launch.bin_dir.as_deref())?,
        launch: args.launch.clone(),
        config,
        flags: args.flags.clone(),
        output,
        python: None,
    };
    // Numbers do not depend on skipped runs, so that scripts find the logs.
    let entries = catalogue::suite(args.tp_size, args.ring_size);
    let chosen = entries.iter().zip(1..).filter(|(entry, _)| !left_out(entry.name));
    let job = |(entry, n): (&RunEntry, u32)| {
        let log = logs.join(format!("{n:02}_{}.log", entry.name));
        Ok(Job { log, ..common.job(entry, 1)? })
    };
    let jobs: Vec<Job> = chosen.map(job).collect::<Result<_>>()?;
    if jobs.is_empty() {
        return Err(Error::input("every run is skipped; nothing to do"));
    }
    let failed = sets::run(&jobs)?;
    if skipped.contains(&COMPARE) {
        return Ok(if failed == 0 { Verdict::Good } else { Verdict::Bad });
    }
    let good = report(&jobs, args.threshold)?;
    Ok(if failed == 0 && good { Verdict::Good } else { Verdict::Bad })
}

/// The first word of each row of [`SKIPS`] that flags and variables name.
fn skipped(args: &SuiteArgs) -> Result<Vec<&'static str>> {
    let row = |word: &str| SKIPS.iter().find(|(words, _)| words.contains(&word)).map(|(words, _)| words[0]);
    let all = || SKIPS.iter().flat_map(|(words, _)| words.iter().copied());
    let mut skipped = vec![];
    for name in &args.skip {
        let word = name.to_lowercase().replace('-', "_");
        let known = || Error::input(format!("--skip {name}: not one of {}", all().collect::<Vec<_>>().join(", ")));
        skipped.push(row(&word).ok_or_else(known)?);
    }
    let flags = [("zero", args.skip_zero), ("tp", args.skip_tp), ("ring", args.skip_ring)];
    skipped.extend(flags.into_iter().filter(|(_, on)| *on).map(|(word, _)| word));
    for (name, value) in std::env::vars_os() {
        let (name, value) = (name.to_string_lossy(), value.to_string_lossy().to_lowercase());
        let Some(word) = name.strip_prefix("SKIP_").filter(|_| !value.is_empty()) else { continue };
        let on = !["0", "n", "no", "f", "false", "off"].contains(&value.as_str());
        match row(&word.to_lowercase()) {
            Some(word) => skipped.extend(on.then_some(word)),
            None => {
                let known: Vec<String> = all().map(|word| format!("SKIP_{}", word.to_uppercase())).collect();
                eprintln!("warning: {name} has no effect here; known: {}", known.join(", "));
            }
        }
    }
    Ok(skipped)
}

/// Prints a line per finished run; true if all are as they should be.
fn report(jobs: &[Job], threshold: f64) -> Result<bool> {
    let mut curves: Vec<(&Job, Curve)> = vec![];
    for job in jobs.iter().filter(|job| job.before().is_ok_and(|status| status.is_some())) {
        curves.push((job, Curve::with_steps(&job.dir)?));
    }
    let named = if jobs.iter().any(|job| job.name == CONTROL) { CONTROL } else { &jobs[0].name };
    let Some(control) = curves.iter().position(|(job, _)| job.name == named) else {
        println!("{named} did not finish, so there is nothing to compare the others with");
        return Ok(false);
    };
    let control = curves[control].1.clone();
    let (mut flat, mut apart) = (0, 0);
    for (job, curve) in &curves {
        let loss = |step| curve.loss(step).unwrap_or(f64::NAN);
        let (first, last) = (loss(curve.first()), loss(curve.last()));
        let judgment = judge(&control, curve, threshold);
        flat += !falls(curve) as usize;
        apart += judgment.parted.is_some() as usize;
        let verdict = match (falls(curve), judgment.parted) {
            (false, _) => "does not learn".to_string(),
            (true, Some(parted)) => format!("diverges from {named} at step {}: {}", parted.step, parted.why),
            (true, None) => {
                let most = judgment.differences.iter().map(|d| d.1).fold(0.0, f64::max);
                format!("ok, at most {:.3} % from {named}", 100.0 * most)
            }
        };
        println!("{:12}  loss {first:.4} to {last:.4}  {verdict}  ({})", job.name, job.log.display());
    }
    println!("{}", conclusion(curves.len(), flat, apart, threshold));
    Ok(flat + apart == 0)
}

/// `flat` runs do not learn; the losses of `apart` runs differ from the control's by more than `threshold`.
fn conclusion(runs: usize, flat: usize, apart: usize, threshold: f64) -> String {
    let falls = match flat {
        0 => "the losses fall".to_string(),
        _ if flat == runs => "no loss falls".to_string(),
        _ => format!("the losses of {flat} of {runs} runs do not fall"),
    };
    let agree = match (flat, apart) {
        (0, 0) => " and agree",
        (_, 0) => "; all agree",
        _ => "; not all agree",
    };
    format!("{falls}{agree} within {} %", 100.0 * threshold)
}

/// The median loss of the last quarter of steps is below that of the first.
pub fn falls(curve: &Curve) -> bool {
    let losses: Vec<f64> = curve.points().into_iter().map(|p| p.1).collect();
    let quarter = losses.len().div_ceil(4);
    let of = |part: &[f64]| median(part.to_vec()).unwrap_or(f64::NAN);
    // NaN is not below anything.
    losses.len() > 1 && of(&losses[losses.len() - quarter..]) < of(&losses[..quarter])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::StepMetrics;

    #[test]
    fn the_conclusion_counts_falling_and_agreeing_losses() {
        assert_eq!(conclusion(3, 0, 0, 0.05), "the losses fall and agree within 5 %");
        assert_eq!(conclusion(3, 0, 1, 0.05), "the losses fall; not all agree within 5 %");
        assert_eq!(conclusion(3, 1, 0, 0.05), "the losses of 1 of 3 runs do not fall; all agree within 5 %");
        assert_eq!(conclusion(3, 3, 2, 0.05), "no loss falls; not all agree within 5 %");
    }

    #[test]
    fn a_falling_loss_is_recognized() {
        let curve = |losses: &[f64]| {
            let step = |(i, &loss): (usize, &f64)| {
                let step = i as u64 + 1;
                (step, StepMetrics { step, loss: Some(loss).filter(|x| x.is_finite()), ..StepMetrics::default() })
            };
            Curve { steps: losses.iter().enumerate().map(step).collect(), ..Curve::default() }
        };
        assert!(falls(&curve(&[4.0, 3.9, 3.5, 3.0, 2.0])));
        assert!(!falls(&curve(&[4.0, 3.9, 3.5, 3.0, 4.0, 4.1])));
        assert!(!falls(&curve(&[4.0, 3.0, 2.0, f64::NAN])));
        assert!(!falls(&curve(&[4.0])) && !falls(&curve(&[])));
    }
}
