//! `trainer_state.json`: the progress of the run, and the checksums of everything next to it. Never interprets the
//! run's own settings, which it stores for the trainer to compare.
use super::evaluations::Evaluations;
use super::layout::pretty;
use crate::base::{Error, Result, open};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, path::Path};
use xxhash_rust::xxh3::xxh3_64;

pub const FILE: &str = "trainer_state.json";
/// Format version. Readers refuse any other.
const VERSION: u64 = 2;

/// The state of a run after an optimizer step. Every random number is a function of the seed, a name and a counter (see
/// [`crate::base::rng`]), so the only generator state is `seed`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Completed optimizer steps.
    pub step: u64,
    /// Samples consumed by all ranks: the complete state of the data loader.
    pub samples_consumed: u64,
    /// Tokens with loss trained on so far.
    pub trained_tokens: u64,
    /// Updates counted by the optimizer's bias correction. Set by [`super::Checkpointer::save`].
    pub optimizer_steps: u64,
    pub seed: u64,
    /// Name of the generator: "philox4x32-10".
    pub rng: String,
    /// `{"kind": "adamw", "betas": ...}`.
    pub optimizer: Map<String, Value>,
    /// `{"kind": "cosine", "lr": ..., "warmup_steps": ...}`.
    pub schedule: Map<String, Value>,
    /// The loss scaler; null if the precision needs none.
    pub scaler: Option<Map<String, Value>>,
    pub world: usize,
    pub strategy: String,
    pub precision: String,
    /// The data: name, length, fingerprint, batch size.
    pub data: Map<String, Value>,
    /// Present with `save_on_best` or early stopping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluations: Option<Evaluations>,
    /// The samples of a step between two updates on them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollouts: Option<Value>,
    /// Id of the run, made at its first start; set by [`super::Checkpointer::save`]. None in checkpoints of earlier
    /// versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
}

impl TrainerState {
    /// Settings that differ, as "seed: 1 in the checkpoint, 2 now". Progress (step, counts, scaler) and the run id are
    /// not compared.
    pub fn differences(&self, now: &TrainerState) -> Vec<String> {
        let flat = |state: &TrainerState| {
            let mut out = BTreeMap::new();
            flatten("", &json!(state), &mut out);
            for count in ["step", "samples_consumed", "trained_tokens", "optimizer_steps", "run"] {
                out.remove(count);
            }
            out.retain(|key, _| {
                !["scaler", "evaluations", "rollouts"].iter().any(|of| key.split('.').next() == Some(of))
            });
            out
        };
        let (then, now) = (flat(self), flat(now));
        let keys: std::collections::BTreeSet<&String> = then.keys().chain(now.keys()).collect();
        let show = |v: Option<&Value>| v.map_or("absent".to_string(), Value::to_string);
        keys.into_iter()
            .filter(|k| then.get(*k) != now.get(*k))
            .map(|k| format!("{k}: {} in the checkpoint, {} now", show(then.get(k)), show(now.get(k))))
            .collect()
    }
}

fn flatten(prefix: &str, value: &Value, out: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                flatten(&if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") }, value, out);
            }
        }
        _ => drop(out.insert(prefix.to_string(), value.clone())),
    }
}

/// Checksums of a checkpoint's contents, as 16 hexadecimal digits each.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Checksums {
    /// xxh3_64 of each small file.
    pub files: BTreeMap<String, String>,
    /// xxh3_64 of the header of each tensor file, including its length. None in checkpoints of earlier versions.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// `checksum` of each tensor of the model and the optimizer.
    pub tensors: BTreeMap<String, String>,
}

pub fn hex(sum: u64) -> String {
    format!("{sum:016x}")
}
pub fn file_checksum(content: &[u8]) -> String {
    hex(xxh3_64(content))
}

/// The file's text: the state, the checksums, and last the checksum of all of it (as compact JSON without that key).
pub fn to_text(state: &TrainerState, checksums: &Checksums) -> String {
    let mut map = Map::from_iter([("version".to_string(), json!(VERSION))]);
    if let Value::Object(fields) = json!(state) {
        map.extend(fields);
    }
    map.insert("checksums".into(), json!(checksums));
    let own = file_checksum(Value::Object(map.clone()).to_string().as_bytes());
    map.insert("checksum".into(), json!(own));
    pretty(&Value::Object(map))
}

/// The file's text without the run id and the checksum that covers it, equal for two identical runs.
pub fn without_id(text: &[u8]) -> Vec<u8> {
    let mut map: Map<String, Value> = serde_json::from_slice(text).unwrap_or_default();
    map.retain(|key, _| key != "run" && key != "checksum");
    Value::Object(map).to_string().into_bytes()
}

/// A fingerprint of the whole checkpoint from this file alone, which holds the checksums of all others.
pub fn fingerprint(dir: &Path) -> Result<u64> {
    let path = dir.join(FILE);
    open::read(&path).map(|text| xxh3_64(&text)).map_err(|e| Error::io("read", path, e))
}

/// Keys that transformers' Trainer writes into its file of the same name.
const TRAINERS: [&str; 2] = ["global_step", "log_history"];

/// The error of resuming from a checkpoint of transformers' Trainer in `dir`.
pub(super) fn theirs(dir: &Path) -> Error {
    let dir = dir.display();
    Error::input(format!(
        "{dir}: is a checkpoint of transformers' Trainer, whose optimizer state is not read; start from its weights with \
         `pretrain: {dir}`, in another directory"
    ))
}

/// A key that only this program's files have, near their beginning.
const OURS: &str = "\"samples_consumed\"";

/// The checksums of what is next to the file in `dir`. None if this program has written none there: other trainers'
/// files have the same name, and need not be JSON (transformers writes NaN).
pub fn checksums(dir: &Path) -> Result<Option<Checksums>> {
    let path = dir.join(FILE);
    let Ok(text) = open::read(&path) else { return Ok(None) };
    if !String::from_utf8_lossy(&text).contains(OURS) {
        return Ok(None);
    }
    match parse(dir, &path, &text) {
        Ok((_, checksums)) => Ok(Some(checksums)),
        Err(e @ Error::Damaged(_)) => Err(meant(e)),
        Err(_) => Ok(None), // another version's
    }
}

/// The error of a checkpoint that was changed, where it is read as a model: it may have been on purpose.
pub fn meant(e: Error) -> Error {
    match e {
        Error::Damaged(what) => Error::input(format!("{what}. If that was on purpose, remove {FILE} next to it")),
        other => other,
    }
}

/// Reads and verifies the file in `dir`.
pub fn read(dir: &Path) -> Result<(TrainerState, Checksums)> {
    let path = dir.join(FILE);
    let incomplete = |e| Error::Damaged(format!("{}: {e}: this is not a complete checkpoint", path.display()));
    let text = open::read(&path).map_err(incomplete)?;
    parse(dir, &path, &text)
}

fn parse(dir: &Path, path: &Path, text: &[u8]) -> Result<(TrainerState, Checksums)> {
    let damaged = |what: String| Error::Damaged(format!("{}: {what}", path.display()));
    let mut map: Map<String, Value> =
        serde_json::from_slice(text).map_err(|e| damaged(format!("is not valid JSON ({e})")))?;
    let stored = map.shift_remove("checksum");
    let computed = file_checksum(Value::Object(map.clone()).to_string().as_bytes());
    let whole = stored == Some(json!(computed));
    if map.get("version") != Some(&json!(VERSION)) {
        if TRAINERS.iter().all(|key| map.contains_key(*key)) {
            return Err(theirs(dir));
        }
        let found = map.get("version").map_or("none".to_string(), Value::to_string);
        let what = format!("has version {found}; this program reads version {VERSION}");
        return Err(if whole { Error::input(format!("{}: {what}", path.display())) } else { damaged(what) });
    }
    if !whole {
        let stored = stored.map_or("none".to_string(), |v| v.to_string());
        return Err(damaged(format!(
            "was changed after it was written: its checksum is {computed}, not the stored {stored}"
        )));
    }
    let field = |e: serde_json::Error| damaged(format!("is missing a required field ({e})"));
    let checksums = map.shift_remove("checksums").unwrap_or_default();
    let checksums = serde_json::from_value(checksums).map_err(field)?;
    Ok((serde_json::from_value(Value::Object(map)).map_err(field)?, checksums))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn state() -> TrainerState {
        let object = |value: Value| value.as_object().cloned().unwrap();
        TrainerState {
            step: 7,
            samples_consumed: 112,
            trained_tokens: 28_000,
            optimizer_steps: 7,
            seed: u64::MAX - 3,
            rng: "philox4x32-10".into(),
            optimizer: object(json!({"kind": "adamw", "betas": [0.9, 0.95], "eps": 1e-8})),
            schedule: object(json!({"kind": "cosine", "lr": 3e-4})),
            scaler: None,
            world: 2,
            strategy: "fsdp".into(),
            precision: "bf16".into(),
            data: Map::new(),
            evaluations: None,
            rollouts: None,
            run: Some("0123456789abcdef".into()),
        }
    }

    #[test]
    fn state_round_trips_and_every_flipped_digit_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let sums = Checksums { tensors: [("a".to_string(), hex(1))].into(), ..Checksums::default() };
        let text = to_text(&state(), &sums);
        fs::write(dir.path().join(FILE), &text).unwrap();
        assert_eq!(read(dir.path()).unwrap(), (state(), sums));
        for (i, byte) in text.bytes().enumerate().filter(|(_, b)| b.is_ascii_digit()) {
            let mut changed = text.clone().into_bytes();
            changed[i] = if byte == b'9' { b'8' } else { byte + 1 };
            fs::write(dir.path().join(FILE), &changed).unwrap();
            let error = read(dir.path()).unwrap_err();
            assert_eq!(error.exit_status(), 2, "byte {i}: {error}");
        }
    }

    #[test]
    fn differences_name_the_key_and_both_values() {
        let now = TrainerState { seed: 1, step: 100, world: 3, run: None, ..state() };
        let expected = ["seed: 18446744073709551612 in the checkpoint, 1 now", "world: 2 in the checkpoint, 3 now"];
        assert_eq!(state().differences(&now), expected);
    }
}
