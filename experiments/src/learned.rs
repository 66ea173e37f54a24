//! `chart RUN.jsonl...`: what evaluations found, step by step: how well runs of preference objectives tell held-out
//! answers apart, or the held-out loss of other runs. Never trains.
use crate::chart::evaluations::{EvaluatedAs, EvaluationCurve};
use flatshard::base::{Error, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// What to call a run, its kind, and what its evaluations found.
fn curve(metrics: &Path) -> Result<(EvaluatedAs, EvaluationCurve)> {
    let bad = |what: String| Error::input(format!("{}: {what}", metrics.display()));
    let text = std::fs::read_to_string(metrics).map_err(|e| bad(e.to_string()))?;
    let events: Vec<Value> = text.lines().map_while(|line| serde_json::from_str(line).ok()).collect();
    let run = events.iter().find(|event| event["event"] == "run").ok_or_else(|| bad("has no run event".into()))?;
    let (config, optim) = (&run["config"], &run["config"]["optim"]);
    let (of, kind, name) = match config["objective"]["objective"].as_str().unwrap_or_default() {
        "dpo" => (EvaluatedAs::Share, 0, "DPO".to_string()),
        "rm" => (EvaluatedAs::Share, 1, "Reward model".to_string()),
        "sft" => {
            let optimizer = optim["optimizer"].as_str().unwrap_or_default();
            let kind = ["muon", "adamw"].iter().position(|name| *name == optimizer).unwrap_or(2);
            (EvaluatedAs::Loss, kind, format!("{optimizer} {:e}", optim["lr"].as_f64().unwrap_or_default()))
        }
        other => return Err(bad(format!("no chart of --objective {other}; name runs of dpo, rm or sft"))),
    };
    let value = |event: &Value| {
        let value = match of {
            EvaluatedAs::Share => event["reward_accuracy"].as_f64().or(event["accuracy"].as_f64())?,
            EvaluatedAs::Loss => event["loss"].as_f64()?,
        };
        Some((event["step"].as_f64()?, value))
    };
    let points: Vec<_> = events.iter().filter(|event| event["event"] == "eval").filter_map(value).collect();
    match points.is_empty() {
        true => Err(bad("has no evaluation: train with --eval-every".into())),
        false => Ok((of, EvaluationCurve { name, kind, points })),
    }
}

/// The curves of several runs, whose evaluations must be comparable.
pub fn curves(files: &[PathBuf]) -> Result<(EvaluatedAs, Vec<EvaluationCurve>)> {
    let (kinds, mut curves): (Vec<_>, Vec<_>) =
        files.iter().map(|file| curve(file)).collect::<Result<Vec<_>>>()?.into_iter().unzip();
    let names: Vec<String> = curves.iter().map(|curve: &EvaluationCurve| curve.name.clone()).collect();
    for (curve, file) in curves.iter_mut().zip(files) {
        if names.iter().filter(|name| **name == curve.name).count() > 1 {
            curve.name += &format!(" ({})", file.display());
        }
    }
    match kinds.iter().position(|kind| *kind != kinds[0]) {
        None => Ok((kinds[0], curves)),
        Some(other) => Err(Error::input(format!(
            "chart: {} has accuracies and {} has losses, or the reverse; name runs of one objective",
            files[0].display(),
            files[other].display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluations_become_points() {
        let path = |n: usize| std::env::temp_dir().join(format!("learned-{}-{n}.jsonl", std::process::id()));
        let write = |n: usize, objective: &str, rest: &str| {
            let optim = r#""optim":{"optimizer":"muon","lr":0.003}"#;
            let config = format!(r#"{{"event":"run","config":{{"objective":{{"objective":"{objective}"}},{optim}}}}}"#);
            std::fs::write(path(n), format!("{config}\n{rest}")).unwrap();
        };
        let run = |objective: &str, rest: &str| {
            write(0, objective, rest);
            curve(&path(0)).map(|(of, curve)| (of, curve.name, curve.points)).map_err(|e| e.to_string())
        };
        let step = r#"{"event":"step","step":4,"reward_accuracy":0.1,"loss":3.0}"#;
        let evals = [
            r#"{"event":"eval","step":4,"reward_accuracy":0.5,"loss":2.0}"#,
            r#"{"event":"eval","step":8,"accuracy":1.0,"loss":1.5}"#,
        ];
        let all = [step, evals[0], evals[1]].join("\n");
        assert_eq!(run("dpo", &all).unwrap(), (EvaluatedAs::Share, "DPO".to_string(), vec![(4.0, 0.5), (8.0, 1.0)]));
        assert_eq!(run("sft", &all).unwrap(), (EvaluatedAs::Loss, "muon 3e-3".into(), vec![(4.0, 2.0), (8.0, 1.5)]));
        assert!(run("kto", evals[0]).unwrap_err().contains("dpo, rm or sft"));
        assert!(run("rm", step).unwrap_err().contains("--eval-every"));
        (0..2).for_each(|n| write(n, "sft", &all));
        let names: Vec<String> = curves(&[path(0), path(1)]).unwrap().1.into_iter().map(|curve| curve.name).collect();
        assert_eq!(names, [0, 1].map(|n| format!("muon 3e-3 ({})", path(n).display())));
        write(0, "rm", &all);
        write(1, "sft", &all);
        assert!(curves(&[path(0), path(1)]).unwrap_err().to_string().contains("one objective"));
        (0..2).for_each(|n| std::fs::remove_file(path(n)).unwrap());
    }
}
