//! `chart RUN.jsonl...`: how well runs of preference objectives tell held-out answers apart, step by step. Never
//! trains.
use crate::chart::shares::ShareCurve;
use flatshard::base::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// The share of held-out pairs whose chosen answer has the larger reward or score, by evaluation.
pub fn curve(metrics: &Path) -> Result<ShareCurve> {
    let bad = |what: String| Error::input(format!("{}: {what}", metrics.display()));
    let text = std::fs::read_to_string(metrics).map_err(|e| bad(e.to_string()))?;
    let events: Vec<Value> = text.lines().map_while(|line| serde_json::from_str(line).ok()).collect();
    let run = events.iter().find(|event| event["event"] == "run").ok_or_else(|| bad("has no run event".into()))?;
    let objective = run["config"]["objective"]["objective"].as_str().unwrap_or_default();
    let name = match objective {
        "dpo" => "DPO",
        "rm" => "Reward model",
        other => return Err(bad(format!("--objective {other} has no accuracy; name runs of dpo or rm"))),
    };
    let share = |event: &Value| {
        let accuracy = event["reward_accuracy"].as_f64().or(event["accuracy"].as_f64())?;
        Some((event["step"].as_f64()?, accuracy))
    };
    let points: Vec<_> = events.iter().filter(|event| event["event"] == "eval").filter_map(share).collect();
    match points.is_empty() {
        true => Err(bad("has no evaluation: train with --eval-every".into())),
        false => Ok(ShareCurve { name: name.into(), points }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluations_become_points() {
        let path = std::env::temp_dir().join(format!("learned-{}.jsonl", std::process::id()));
        let run = |objective: &str, rest: &str| {
            let config = format!(r#"{{"event":"run","config":{{"objective":{{"objective":"{objective}"}}}}}}"#);
            std::fs::write(&path, format!("{config}\n{rest}")).unwrap();
            curve(&path).map(|curve| (curve.name, curve.points)).map_err(|e| e.to_string())
        };
        let step = r#"{"event":"step","step":4,"reward_accuracy":0.1}"#;
        let evals =
            [r#"{"event":"eval","step":4,"reward_accuracy":0.5}"#, r#"{"event":"eval","step":8,"accuracy":1.0}"#];
        let found = run("dpo", &[step, evals[0], evals[1]].join("\n")).unwrap();
        assert_eq!(found, ("DPO".to_string(), vec![(4.0, 0.5), (8.0, 1.0)]));
        assert!(run("sft", evals[0]).unwrap_err().contains("dpo or rm"));
        assert!(run("rm", step).unwrap_err().contains("--eval-every"));
        std::fs::remove_file(&path).unwrap();
    }
}
