//! `chart RESULTS.json`: the picture of speed and memory in README.md, light and dark, from what
//! `experiments/peers/compare.py` measured; `chart RUN.jsonl...`: what runs learned. Never measures.
use crate::chart::evaluations::{self, EvaluatedAs};
use crate::chart::pairs::{Contender, DARK, LIGHT, PairBar, PairChart, PairPanel, Theme};
use crate::chart::save;
use crate::learned;
use crate::summary::median;
use crate::table::grouped;
use crate::verdict::Verdict;
use flatshard::base::{Error, Result};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Draw speed and memory of flatshard and PyTorch, as measured by experiments/peers/compare.py, or the accuracy of
/// preference runs
#[derive(clap::Args)]
pub struct ChartArgs {
    /// The measurements, a JSON file of experiments/peers/compare.py; or metrics (.jsonl) of --objective dpo and rm
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write NAME-light.svg and NAME-dark.svg; also --plot NAME.svg, or NAME.png in a build with the feature png
    #[arg(long, visible_alias = "plot", default_value = "peers", value_name = "NAME")]
    out: PathBuf,
}

#[derive(Deserialize)]
struct Results {
    machine: Testbed,
    runs: Vec<MeasuredRun>,
}
#[derive(Deserialize)]
struct Testbed {
    cpu: String,
    cores: u32,
}
#[derive(Deserialize)]
struct MeasuredRun {
    name: String,
    #[serde(flatten)]
    work: BarWork,
    params: u64,
    world: u64,
    tokens_per_sec: f64,
    peak_mem_mib: f64,
}
/// What differs between a contender's bars.
#[derive(Deserialize, PartialEq, Clone)]
struct BarWork {
    precision: String,
    #[serde(rename = "max-len")]
    sequence: u64,
    #[serde(rename = "batch-size")]
    batch: u64,
}

pub fn main(args: &ChartArgs) -> Result<Verdict> {
    let is_metrics = |file: &PathBuf| file.extension().is_some_and(|e| e == "jsonl");
    match &args.files[..] {
        files if files.iter().all(is_metrics) => {
            let (of, curves) = learned::curves(files)?;
            let [title, subtitle] = match of {
                EvaluatedAs::Share => [
                    "Learning a preference",
                    "Held-out pairs whose chosen answer has the larger reward (DPO) or score (reward model), \
                     evaluated while training.",
                ],
                EvaluatedAs::Loss => ["Held-out loss", "Of runs with these optimizers and learning rates, by step."],
            };
            write(args, |theme| evaluations::svg(title, subtitle, (of, &curves), theme))
        }
        [file] => {
            let text = std::fs::read(file).map_err(|e| Error::input(format!("{}: {e}", file.display())))?;
            let bad =
                |what: String| Error::input(format!("{}: not results of peers/compare.py: {what}", file.display()));
            let results: Results = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
            let picture = picture(&results, results.runs.first().ok_or_else(|| bad("no run".into()))?);
            write(args, |theme| picture.svg(theme))
        }
        _ => Err(Error::input("chart: name one file of results, or files of metrics (.jsonl)")),
    }
}

/// The picture in each theme.
fn write(args: &ChartArgs, svg: impl Fn(&Theme) -> String) -> Result<Verdict> {
    for (ending, theme) in [("light", LIGHT), ("dark", DARK)] {
        let format = args.out.extension().and_then(|e| e.to_str()).filter(|e| ["svg", "png"].contains(e));
        let name = if format.is_some() { args.out.with_extension("") } else { args.out.clone() };
        let path = PathBuf::from(format!("{}-{ending}.{}", name.display(), format.unwrap_or("svg")));
        if let Some(dir) = path.parent().filter(|dir| *dir != Path::new("")) {
            std::fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, e))?;
        }
        save(&svg(&theme), &path)?;
        println!("plot: {}", path.display());
    }
    Ok(Verdict::Good)
}

fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    for value in values {
        if !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

/// Rounds of a contender are one bar: median speed, largest memory.
fn picture(results: &Results, first: &MeasuredRun) -> PairChart {
    let names = distinct(results.runs.iter().map(|run| run.name.as_str()));
    let works = distinct(results.runs.iter().map(|run| &run.work));
    let lengths = distinct(works.iter().map(|work| (work.sequence, work.batch)));
    let one_precision = works.iter().all(|work| work.precision == first.work.precision);
    let values = |name: &str, work: &BarWork, of: fn(&MeasuredRun) -> f64| -> Vec<f64> {
        results.runs.iter().filter(|run| run.name == name && run.work == *work).map(of).collect()
    };
    // What the subtitle does not say of a bar.
    let label = |work: &BarWork| match (&lengths[..], one_precision) {
        ([_], _) => work.precision.clone(),
        (_, true) => format!("at {}", grouped(work.sequence as f64)),
        (_, false) => format!("{} at {}", work.precision, grouped(work.sequence as f64)),
    };
    let panel = |title: &str, of: fn(&MeasuredRun) -> f64, pick: fn(Vec<f64>) -> Option<f64>| {
        let bar = |name: &str, work: &BarWork| {
            let all = values(name, work, of);
            let (low, high) = all.iter().fold((f64::INFINITY, 0f64), |(l, h), &x| (l.min(x), h.max(x)));
            let value = pick(all)?;
            // The largest is an end of its range already.
            let range = if value < high { (low, high) } else { (value, value) };
            Some(PairBar { value, range, text: format!("{} {}", grouped(value), label(work)) })
        };
        let contender = |name: &&str| Contender {
            name: shown(name),
            ours: name.starts_with("flatshard"),
            bars: works.iter().filter_map(|work| bar(name, work)).collect(),
        };
        PairPanel { title: title.into(), contenders: names.iter().map(contender).collect() }
    };
    let largest = |all: Vec<f64>| all.into_iter().reduce(f64::max);
    let torch = names.iter().find_map(|name| name.strip_prefix("torch ")?.split(' ').next());
    let rounds = works.iter().map(|work| values(&first.name, work, |run| run.tokens_per_sec).len());
    let rounds = match (rounds.clone().min().unwrap_or(0), rounds.max().unwrap_or(0)) {
        (1, 1) => "one round".into(),
        (least, most) if least == most => format!("median of {most} rounds"),
        (least, most) => format!("median of {least} to {most} rounds"),
    };
    let shape = match lengths[..] {
        [(sequence, batch)] => format!("sequence {sequence}, batch {batch} per rank"),
        _ => {
            let lengths: Vec<_> =
                lengths.iter().map(|&(s, batch)| format!("{batch} of {}", grouped(s as f64))).collect();
            let precision = if one_precision { format!("{}, ", first.work.precision) } else { String::new() };
            format!("{precision}sequences per rank ({})", lengths.join(", "))
        }
    };
    PairChart {
        title: format!("Training on a CPU: flatshard and PyTorch {}", torch.unwrap_or_default()).trim_end().into(),
        subtitle: format!(
            "LLaMA with {:.1} M parameters, {shape}, {} ranks on {} cores of an {}. \
             Speed: {rounds}; the line spans all of them. Memory: the largest of any round.",
            first.params as f64 / 1e6,
            first.world,
            results.machine.cores,
            results.machine.cpu,
        ),
        panels: vec![
            panel("Tokens per second (longer is better)", |run| run.tokens_per_sec, median),
            panel("Peak memory of a rank, MiB (shorter is better)", |run| run.peak_mem_mib, largest),
        ],
    }
}

/// `flatshard run_fsdp` as `flatshard FSDP`, `torch 2.15.0 ddp` as `PyTorch DDP`.
fn shown(name: &str) -> String {
    match name.split(' ').collect::<Vec<_>>()[..] {
        ["flatshard", binary] => format!("flatshard {}", binary.trim_start_matches("run_").to_uppercase()),
        ["torch", _, implementation, ref rest @ ..] => {
            let more: String = rest.iter().map(|word| format!(" {word}")).collect();
            format!("PyTorch {}{more}", implementation.to_uppercase())
        }
        _ => name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn drawn(runs: &[(&str, u64, f64)]) -> PairChart {
        let run = |&(precision, sequence, tokens_per_sec): &(&str, u64, f64)| {
            json!({"name": "flatshard run_fsdp", "precision": precision, "max-len": sequence, "batch-size": 1, "params": 1000000,
                "world": 2, "tokens_per_sec": tokens_per_sec, "peak_mem_mib": 10})
        };
        let runs: Vec<_> = runs.iter().map(run).collect();
        let results: Results =
            serde_json::from_value(json!({"machine": {"cpu": "CPU", "cores": 2}, "runs": runs})).unwrap();
        picture(&results, &results.runs[0])
    }

    #[test]
    fn bars_are_labeled_with_what_differs() {
        let labels = |runs: &[_]| {
            let chart = drawn(runs);
            let texts: Vec<_> = chart.panels[0].contenders[0].bars.iter().map(|bar| bar.text.clone()).collect();
            (texts.join("; "), chart.subtitle)
        };
        let (texts, subtitle) =
            labels(&[("fp32", 256, 10.0), ("bf16", 256, 30.0), ("bf16", 256, 20.0), ("bf16", 256, 90.0)]);
        assert_eq!(texts, "10 fp32; 30 bf16");
        assert!(subtitle.contains("Speed: median of 1 to 3 rounds;"), "{subtitle}");
        assert!(subtitle.contains("sequence 256, batch 1 per rank, 2 ranks"), "{subtitle}");
        let (texts, subtitle) = labels(&[("bf16", 256, 1000.0), ("bf16", 4096, 900.0)]);
        assert_eq!(texts, "1,000 at 256; 900 at 4,096");
        assert!(subtitle.contains("bf16, sequences per rank (1 of 256, 1 of 4,096), 2 ranks"), "{subtitle}");
        assert_eq!(labels(&[("fp32", 256, 9.0), ("bf16", 512, 8.0)]).0, "9 fp32 at 256; 8 bf16 at 512");
    }
}
