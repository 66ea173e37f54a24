//! Compares the disturbed run with the undisturbed one: every line of its metrics, its last checkpoint, and leftover
//! files. Never runs anything.
use super::follow::{FollowedEvent, FollowedStep};
use flatshard::base::{Error, Result};
use flatshard::ckpt::state;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// What was compared, and what is wrong.
#[derive(Serialize, Debug, Default, PartialEq)]
pub struct ChaosProof {
    pub steps: u64,
    /// Step lines; a repeated step has one for each time.
    pub lines: usize,
    /// Files of the last checkpoint, all equal.
    pub files: usize,
    /// The first step with fewer ranks, from which sums round differently.
    pub fewer_ranks_from: Option<u64>,
    /// Empty on success.
    pub wrong: Vec<String>,
}

/// Maximum relative difference of losses after the number of ranks has changed.
pub const NEAR: f64 = 0.2;

/// Every line of `disturbed` is bitwise equal to the same step of `quiet`, and no step is missing. Once the ranks are
/// fewer, losses need only be near: the global batch and the learning rate stay the same, but sums have another order.
pub fn curves(disturbed: &[FollowedEvent], quiet: &[FollowedEvent]) -> ChaosProof {
    let world = |event: &FollowedEvent| {
        if let FollowedEvent::Run { world_size, .. } = event { Some(*world_size) } else { None }
    };
    let first_world = disturbed.iter().find_map(world);
    let other =
        disturbed.iter().position(|e| world(e).is_some_and(|n| Some(n) != first_world)).unwrap_or(disturbed.len());
    let (same, other) = disturbed.split_at(other);
    let (lines, rest, quiet) = (steps(same), steps(other), steps(quiet));
    let expected: BTreeMap<u64, FollowedStep> = quiet.iter().map(|s| (s.step, *s)).collect();
    let bits = |s: &FollowedStep| [s.loss, s.grad_norm].map(|x| x.map(f64::to_bits));
    let mut wrong = Vec::new();
    let differs = |line: &&FollowedStep| expected.get(&line.step).is_none_or(|e| bits(e) != bits(line));
    if let Some(line) = lines.iter().find(differs) {
        let count = lines.iter().filter(differs).count();
        let other = expected.get(&line.step);
        wrong.push(format!(
            "{count} lines of the curve differ, the first at step {}: {line:?}, not {other:?}",
            line.step
        ));
    }
    let near = |line: &&FollowedStep| {
        let (a, b) = (expected.get(&line.step).and_then(|e| e.loss), line.loss);
        a.zip(b).is_some_and(|(a, b)| (b - a).abs() <= NEAR * a.abs())
    };
    if let Some(line) = rest.iter().find(|line| !near(line)) {
        wrong.push(format!("on fewer ranks, step {} is {line:?}, far from {:?}", line.step, expected.get(&line.step)));
    }
    let mut done: Vec<u64> = lines.iter().chain(&rest).map(|s| s.step).collect();
    done.sort_unstable();
    done.dedup();
    if let Some(step) = expected.keys().find(|step| done.binary_search(step).is_err()) {
        wrong.push(format!("step {step} has no line"));
    }
    if quiet.is_empty() {
        wrong.push("the undisturbed run has no steps".into());
    }
    let fewer_ranks_from = rest.first().map(|s| s.step);
    ChaosProof { steps: done.len() as u64, lines: lines.len() + rest.len(), files: 0, fewer_ranks_from, wrong }
}

fn steps(events: &[FollowedEvent]) -> Vec<FollowedStep> {
    events.iter().filter_map(|e| if let FollowedEvent::Step(step) = e { Some(*step) } else { None }).collect()
}

/// The files of both directories are equal, byte for byte.
pub fn checkpoints(disturbed: &Path, quiet: &Path, proof: &mut ChaosProof) -> Result<()> {
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
        let (name, content) = (PathBuf::from(entry.file_name()), fs::read(entry.path())?);
        let own = name == Path::new(state::FILE); // run ids differ
        Ok((name, if own { state::without_id(&content) } else { content }))
    };
    fs::read_dir(dir).map_err(failed)?.map(|e| entry(e).map_err(failed)).collect()
}

/// Finds leftovers: anything in the checkpoint directory except `keep` checkpoints, `latest` and the traces of `ranks`
/// ranks.
pub fn leftovers(ckpt: &Path, keep: usize, ranks: usize, proof: &mut ChaosProof) -> Result<()> {
    let names = |dir: &Path| -> Result<Vec<String>> {
        let failed = |e| Error::io("list", dir, e);
        let name = |e: std::io::Result<fs::DirEntry>| Ok(e.map_err(failed)?.file_name().to_string_lossy().into_owned());
        fs::read_dir(dir).map_err(failed)?.map(name).collect()
    };
    let (mut there, traces) = (names(ckpt)?, ckpt.join("comm_traces"));
    there.sort();
    let checkpoints = there.iter().filter(|name| name.starts_with("step-")).count();
    if checkpoints > keep {
        proof.wrong.push(format!("{checkpoints} checkpoints instead of {keep}: {there:?}"));
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

    fn curve(steps: &[(u64, f64)]) -> Vec<FollowedEvent> {
        let step = |&(step, loss): &(u64, f64)| {
            FollowedEvent::Step(FollowedStep { step, loss: Some(loss), grad_norm: Some(1.0) })
        };
        steps.iter().map(step).collect()
    }

    #[test]
    fn a_flipped_bit_a_missing_step_and_an_extra_step_are_found() {
        let quiet = curve(&[(1, 0.5), (2, 0.25), (3, 0.1)]);
        let good = curves(&curve(&[(1, 0.5), (2, 0.25), (1, 0.5), (2, 0.25), (3, 0.1)]), &quiet);
        assert_eq!(good, ChaosProof { steps: 3, lines: 5, ..ChaosProof::default() });
        let near = f64::from_bits(0.25f64.to_bits() + 1);
        // A wrong step counts, even if it was repeated correctly.
        let once = curves(&curve(&[(1, 0.5), (2, near), (1, 0.5), (2, 0.25), (3, 0.1)]), &quiet);
        assert!(once.wrong[0].contains("1 lines of the curve differ, the first at step 2"), "{once:?}");
        assert_eq!(curves(&curve(&[(1, 0.5), (3, 0.1)]), &quiet).wrong, ["step 2 has no line"]);
        assert!(curves(&curve(&[(1, 0.5), (2, 0.25), (3, 0.1), (4, 0.1)]), &quiet).wrong[0].contains("not None"));
    }

    #[test]
    fn on_fewer_ranks_losses_are_near() {
        let quiet = curve(&[(1, 0.5), (2, 0.25), (3, 0.1)]);
        let judged = |last: f64| {
            let began = |world_size| vec![FollowedEvent::Run { resumed_from_step: None, world_size }];
            let parts = [began(2), curve(&[(1, 0.5), (2, 0.25)]), began(1), curve(&[(2, 0.2501), (3, last)])];
            curves(&parts.concat(), &quiet)
        };
        assert_eq!(
            judged(0.1001),
            ChaosProof { steps: 3, lines: 4, fewer_ranks_from: Some(2), ..ChaosProof::default() }
        );
        assert!(judged(0.2).wrong[0].contains("on fewer ranks, step 3"));
    }

    #[test]
    fn leftovers_are_named() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["step-00000001", "step-00000002", ".tmp-step-00000003-00", "comm_traces"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        for name in ["latest", "comm_traces/rank-0.json", "comm_traces/rank-2.json"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let mut proof = ChaosProof::default();
        leftovers(dir.path(), 1, 2, &mut proof).unwrap();
        let expected = ["2 checkpoints instead of 1", ".tmp-step-00000003-00 is left", "rank-2.json is left"];
        assert!(expected.iter().zip(&proof.wrong).all(|(expected, wrong)| wrong.contains(expected)), "{proof:?}");
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
            let mut proof = ChaosProof::default();
            checkpoints(a.path(), b.path(), &mut proof).unwrap();
            proof
        };
        assert_eq!(proof("one"), ChaosProof { files: 2, ..ChaosProof::default() });
        assert_eq!(proof("two").wrong, ["state of the last checkpoint differs"]);
    }
}
