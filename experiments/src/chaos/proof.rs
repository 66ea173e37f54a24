//! Whether a run that was disturbed is the run that was not: every line of its metrics, its last checkpoint, and what it left
//! behind. Never runs anything.
use super::follow::{Event, Step};
use flatshard::base::{Error, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// What was compared, and what is wrong.
#[derive(Serialize, Debug, Default, PartialEq)]
pub struct Proof {
    pub steps: u64,
    /// Lines of steps: a step that was lost has as many as it was done.
    pub lines: usize,
    /// Files of the last checkpoint, all equal.
    pub files: usize,
    /// Empty where all is well.
    pub wrong: Vec<String>,
}

/// Every line of `disturbed` has the bits of the step of `quiet`, and no step is missing.
pub fn curves(disturbed: &[Event], quiet: &[Event]) -> Proof {
    let steps = |events: &[Event]| -> Vec<Step> {
        events.iter().filter_map(|e| if let Event::Step(step) = e { Some(*step) } else { None }).collect()
    };
    let (lines, quiet) = (steps(disturbed), steps(quiet));
    let expected: BTreeMap<u64, Step> = quiet.iter().map(|s| (s.step, *s)).collect();
    let bits = |s: &Step| [s.loss, s.grad_norm].map(|x| x.map(f64::to_bits));
    let mut wrong = Vec::new();
    let differs = |line: &&Step| expected.get(&line.step).is_none_or(|e| bits(e) != bits(line));
    if let Some(line) = lines.iter().find(differs) {
        let count = lines.iter().filter(differs).count();
        let other = expected.get(&line.step);
        wrong.push(format!(
            "{count} lines of the curve differ, the first at step {}: {line:?}, not {other:?}",
            line.step
        ));
    }
    let mut done: Vec<u64> = lines.iter().map(|s| s.step).collect();
    done.sort_unstable();
    done.dedup();
    if let Some(step) = expected.keys().find(|step| done.binary_search(step).is_err()) {
        wrong.push(format!("step {step} has no line"));
    }
    if quiet.is_empty() {
        wrong.push("the undisturbed run has no step".into());
    }
    Proof { steps: done.len() as u64, lines: lines.len(), files: 0, wrong }
}

/// The files of both directories are the same, byte for byte.
pub fn checkpoints(disturbed: &Path, quiet: &Path, proof: &mut Proof) -> Result<()> {
    let (theirs, ours) = (contents(quiet)?, contents(disturbed)?);
    proof.files = theirs.len();
    let names = |files: &BTreeMap<PathBuf, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
    if names(&ours) != names(&theirs) {
        proof.wrong.push(format!("the last checkpoint has {:?}, not {:?}", names(&ours), names(&theirs)));
    }
    for (name, _) in ours.iter().filter(|(name, bytes)| theirs.get(*name).is_some_and(|b| b != *bytes)) {
        proof.wrong.push(format!("{} of the last checkpoint differs", name.display()));
    }
    Ok(())
}

fn contents(dir: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let failed = |e| Error::io("read", dir, e);
    let entry = |entry: std::io::Result<fs::DirEntry>| -> std::io::Result<(PathBuf, Vec<u8>)> {
        let entry = entry?;
        Ok((entry.file_name().into(), fs::read(entry.path())?))
    };
    fs::read_dir(dir).map_err(failed)?.map(|e| entry(e).map_err(failed)).collect()
}

/// What is in the directory of checkpoints beside `keep` checkpoints, the name of the newest and `ranks` traces.
pub fn leftovers(ckpt: &Path, keep: usize, ranks: usize, proof: &mut Proof) -> Result<()> {
    let names = |dir: &Path| -> Result<Vec<String>> {
        let failed = |e| Error::io("list", dir, e);
        let name = |e: std::io::Result<fs::DirEntry>| Ok(e.map_err(failed)?.file_name().to_string_lossy().into_owned());
        fs::read_dir(dir).map_err(failed)?.map(name).collect()
    };
    let (mut there, traces) = (names(ckpt)?, ckpt.join("comm_traces"));
    there.sort();
    let checkpoints = there.iter().filter(|name| name.starts_with("step-")).count();
    if checkpoints > keep {
        proof.wrong.push(format!("{checkpoints} checkpoints are there, not {keep}: {there:?}"));
    }
    let known = |name: &String| name.starts_with("step-") || name == "latest" || name == "comm_traces";
    for left in there.iter().filter(|name| !known(name)) {
        proof.wrong.push(format!("{left} is left in the directory of checkpoints"));
    }
    let traced = if traces.is_dir() { names(&traces)? } else { Vec::new() };
    let expected = |name: &String| (0..ranks).any(|rank| *name == format!("rank-{rank}.json"));
    for left in traced.iter().filter(|name| !expected(name)) {
        proof.wrong.push(format!("{left} is left among the traces"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(steps: &[(u64, f64)]) -> Vec<Event> {
        let step = |&(step, loss): &(u64, f64)| Event::Step(Step { step, loss: Some(loss), grad_norm: Some(1.0) });
        steps.iter().map(step).collect()
    }

    #[test]
    fn a_bit_a_missing_step_and_a_step_too_many_are_found() {
        let quiet = curve(&[(1, 0.5), (2, 0.25), (3, 0.1)]);
        let good = curves(&curve(&[(1, 0.5), (2, 0.25), (1, 0.5), (2, 0.25), (3, 0.1)]), &quiet);
        assert_eq!(good, Proof { steps: 3, lines: 5, files: 0, wrong: vec![] });
        let near = f64::from_bits(0.25f64.to_bits() + 1);
        // A step that went wrong counts, even where it was done once more and right.
        let once = curves(&curve(&[(1, 0.5), (2, near), (1, 0.5), (2, 0.25), (3, 0.1)]), &quiet);
        assert!(once.wrong[0].contains("1 lines of the curve differ, the first at step 2"), "{once:?}");
        assert_eq!(curves(&curve(&[(1, 0.5), (3, 0.1)]), &quiet).wrong, ["step 2 has no line"]);
        assert!(curves(&curve(&[(1, 0.5), (2, 0.25), (3, 0.1), (4, 0.1)]), &quiet).wrong[0].contains("not None"));
    }

    #[test]
    fn what_is_left_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["step-00000001", "step-00000002", ".tmp-step-00000003-00", "comm_traces"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        for name in ["latest", "comm_traces/rank-0.json", "comm_traces/rank-2.json"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let mut proof = Proof::default();
        leftovers(dir.path(), 1, 2, &mut proof).unwrap();
        let said = ["2 checkpoints are there, not 1", ".tmp-step-00000003-00 is left", "rank-2.json is left"];
        assert!(said.iter().zip(&proof.wrong).all(|(said, wrong)| wrong.contains(said)), "{proof:?}");
        assert_eq!(proof.wrong.len(), 3);
    }

    #[test]
    fn files_are_compared_byte_for_byte() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for dir in [&a, &b] {
            fs::write(dir.path().join("model"), "same").unwrap();
        }
        let proof = |what: &str| {
            fs::write(b.path().join("state"), what).unwrap();
            fs::write(a.path().join("state"), "one").unwrap();
            let mut proof = Proof::default();
            checkpoints(a.path(), b.path(), &mut proof).unwrap();
            proof
        };
        assert_eq!(proof("one"), Proof { files: 2, ..Proof::default() });
        assert_eq!(proof("two").wrong, ["state of the last checkpoint differs"]);
    }
}
