//! TensorBoard event files, read by an independent implementation of framing, checksums and protobuf and compared with
//! the metrics file number by number. `scripts/watch_check.sh` reads them with TensorBoard.

use crate::common::runs::*;
use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// One record.
#[derive(Debug, Default)]
struct Event {
    wall_time: f64,
    step: u64,
    version: Option<String>,
    /// Status of a SessionLog; 1 is START.
    session: Option<u64>,
    scalars: Vec<(String, f32)>,
    texts: Vec<(String, String)>,
}

/// Computed bit by bit from the polynomial.
fn masked_crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
        }
    }
    let crc = !crc;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

enum Field<'b> {
    Number(u64),
    Bytes(&'b [u8]),
}
impl<'b> Field<'b> {
    fn number(&self) -> u64 {
        match self {
            Field::Number(n) => *n,
            Field::Bytes(_) => panic!("a number was expected"),
        }
    }
    fn bytes(&self) -> &'b [u8] {
        match self {
            Field::Bytes(bytes) => bytes,
            Field::Number(_) => panic!("bytes were expected"),
        }
    }
    fn text(&self) -> String {
        String::from_utf8(self.bytes().to_vec()).unwrap()
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut n = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        n |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return n;
        }
    }
    panic!("a number without an end");
}
/// Field numbers and what they hold, in the order of the bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut found = vec![];
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let length = match key & 7 {
            0 => {
                found.push((key >> 3, Field::Number(varint(&mut bytes))));
                continue;
            }
            1 => 8,
            5 => 4,
            2 => varint(&mut bytes) as usize,
            wire => panic!("wire type {wire}"),
        };
        let (field, rest) = bytes.split_at(length);
        found.push((key >> 3, Field::Bytes(field)));
        bytes = rest;
    }
    found
}
fn field<'b>(message: &'b [u8], number: u64) -> Option<Field<'b>> {
    fields(message).into_iter().find(|f| f.0 == number).map(|f| f.1)
}

fn event(bytes: &[u8]) -> Event {
    let mut event = Event::default();
    for (number, value) in fields(bytes) {
        match number {
            1 => event.wall_time = f64::from_le_bytes(value.bytes().try_into().unwrap()),
            2 => event.step = value.number(),
            3 => event.version = Some(value.text()),
            7 => event.session = Some(field(value.bytes(), 1).unwrap().number()),
            5 => {
                for (_, entry) in fields(value.bytes()) {
                    let tag = field(entry.bytes(), 1).unwrap().text();
                    if let Some(scalar) = field(entry.bytes(), 2) {
                        event.scalars.push((tag, f32::from_le_bytes(scalar.bytes().try_into().unwrap())));
                    } else {
                        let tensor = field(entry.bytes(), 8).unwrap();
                        assert_eq!(field(tensor.bytes(), 1).unwrap().number(), 7, "DT_STRING");
                        event.texts.push((tag, field(tensor.bytes(), 8).unwrap().text()));
                    }
                }
            }
            other => panic!("field {other} of an event"),
        }
    }
    event
}

/// All records of a file, without an incomplete last one.
fn records(path: &Path) -> Vec<Event> {
    let bytes = fs::read(path).unwrap();
    let (mut rest, mut events) = (&bytes[..], vec![]);
    while rest.len() >= 12 {
        let (head, body) = rest.split_at(12);
        let length = u64::from_le_bytes(head[..8].try_into().unwrap()) as usize;
        assert_eq!(masked_crc32c(&head[..8]), u32::from_le_bytes(head[8..].try_into().unwrap()), "of a length");
        if body.len() < length + 4 {
            break;
        }
        let (body, after) = body.split_at(length);
        let (crc, after) = after.split_at(4);
        assert_eq!(masked_crc32c(body), u32::from_le_bytes(crc.try_into().unwrap()), "of a record");
        events.push(event(body));
        rest = after;
    }
    events
}
/// Event files of a directory in the order in which TensorBoard reads them.
fn event_files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_file()).collect();
    files.sort();
    files
}
/// Steps and values of each curve; a restart drops the steps after its own.
fn curves(dir: &Path) -> BTreeMap<String, BTreeMap<u64, f32>> {
    let mut curves: BTreeMap<String, BTreeMap<u64, f32>> = BTreeMap::new();
    for event in event_files(dir).iter().flat_map(|file| records(file)) {
        if event.session == Some(1) {
            curves.values_mut().for_each(|curve| curve.retain(|step, _| *step < event.step));
        }
        for (tag, value) in event.scalars {
            curves.entry(tag).or_default().insert(event.step, value);
        }
    }
    curves
}
/// The last value of a number at each step.
fn scalars_of(path: &Path, name: &str, number: &str) -> BTreeMap<u64, f64> {
    let value = |e: &Value| Some((e["step"].as_u64()?, number.split('.').fold(e, |e, key| &e[key]).as_f64()?));
    events(path, name).iter().filter_map(value).collect()
}

/// Rows of the table: event, number, name, unit.
fn table() -> Vec<[String; 4]> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/run/watch/scalars.tsv")).unwrap();
    let rows = text.lines().filter(|line| !line.starts_with('#'));
    rows.map(|row| row.split_whitespace().map(str::to_string).collect::<Vec<_>>().try_into().unwrap()).collect()
}

/// Every number of the metrics file is in the event files under each of its names, bitwise equal, and nothing else is.
#[track_caller]
fn same(metrics: &Path, dir: &Path, ranks: f64) {
    let mut curves = curves(dir);
    for [event, number, name, unit] in table() {
        let factor = |x: f64| match unit.as_str() {
            "%" => x * 100.0,
            "GiB" => x / 1024.0 / 1024.0 / 1024.0,
            "/rank" => x / ranks,
            _ => x,
        };
        let expected: BTreeMap<u64, u32> = scalars_of(metrics, &event, &number)
            .into_iter()
            .map(|(step, x)| (step, (factor(x) as f32).to_bits()))
            .collect();
        let found: BTreeMap<u64, u32> =
            curves.remove(&name).unwrap_or_default().into_iter().map(|(step, x)| (step, x.to_bits())).collect();
        assert_eq!(found, expected, "{name}");
    }
    assert!(curves.is_empty(), "not in the table: {:?}", curves.keys());
}

#[test]
fn event_files_match_the_metrics_file() {
    let dir = Dir::new();
    let (metrics, board, ckpt) = (dir.arg("m.jsonl"), dir.arg("board"), dir.arg("ckpt"));
    let args = ["--max-steps", "6", "--eval-every", "2", "--save-every", "3", "--ckpt-dir", &ckpt];
    good(FSDP, &[&args[..], &["--metrics-path", &metrics, "--tensorboard", &board]].concat());
    let (metrics, board) = (dir.path("m.jsonl"), dir.path("board"));
    same(&metrics, &board, 2.0);

    // Names must be those of the other tools.
    let curves = curves(&board);
    for (name, steps) in [
        ("loss_metrics/global_avg_loss", 6),
        ("train/loss", 6),
        ("train/learning_rate", 6),
        ("grad_norm", 6),
        ("throughput(tps)", 6),
        ("mfu(%)", 6),
        ("mfu_llm_foundry(%)", 6),
        ("sol(%)", 6),
        ("memory/max_active(GiB)", 6),
        ("time_metrics/end_to_end(s)", 6),
        ("validation_metrics/loss", 3),
        ("eval/loss", 3),
        ("checkpoint/size(GiB)", 2),
    ] {
        assert_eq!(curves.get(name).map(BTreeMap::len), Some(steps), "{name}: {:?}", curves.keys());
    }
    // Every number of the metrics file has a name.
    let named: Vec<_> = table();
    for event in ["step", "eval", "checkpoint"] {
        for (number, value) in events(&metrics, event)[0].as_object().unwrap() {
            let known = named.iter().any(|row| row[0] == event && row[1] == *number);
            assert!(known || !value.is_number() || number == "step", "{event}.{number} has no name");
        }
    }
    let first = records(&event_files(&board)[0]);
    assert_eq!(first[0].version.as_deref(), Some("brain.Event:2"));
    assert_eq!((first[1].session, first[1].step), (Some(1), 1));
    let (tag, config) = &first[2].texts[0];
    assert!(tag == "config" && config.starts_with("```yaml\n") && config.contains("max_steps: 6"), "{config}");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    assert!(
        first.iter().all(|e| (now - 600.0..=now).contains(&e.wall_time)) && first.is_sorted_by_key(|e| e.wall_time)
    );
}

#[test]
fn a_restarted_run_is_one_curve_and_another_run_is_kept_apart() {
    let dir = Dir::new();
    let (metrics, board, ckpt) = (dir.arg("m.jsonl"), dir.arg("board"), dir.arg("ckpt"));
    let args = ["--max-steps", "40", "--save-every", "10", "--max-restarts", "1", "--ckpt-dir", &ckpt];
    let run = Run::start(FSDP, &[&args[..], &["--metrics-path", &metrics, "--tensorboard", &board]].concat());
    let path = dir.path("m.jsonl");
    wait_until("steps after a checkpoint are done", || scalars_of(&path, "step", "loss").len() > 12);
    send(Signal::KILL, run.ranks(2)[1]);
    let ended = run.end();
    assert!(ended.status.success(), "{}", ended.stderr);
    let resumed = events(&path, "run")[1]["resumed_from_step"].as_u64().unwrap();
    let board = dir.path("board");
    let files = event_files(&board);
    assert_eq!(files.len(), 2, "{files:?}");
    let again = records(&files[1]);
    assert_eq!((again[1].session, again[1].step), (Some(1), resumed + 1));
    let redone = records(&files[0]).iter().any(|e| e.step > resumed && !e.scalars.is_empty());
    assert!(redone, "no step was done twice, so this run shows nothing");
    same(&path, &board, 2.0);

    // A run from the beginning in the same directory: the files of the first are kept as a run of their own.
    let args = ["--max-steps", "3", "--metrics-path", &metrics, "--tensorboard", &dir.arg("board")];
    good(FSDP, &args);
    same(&path, &board, 2.0);
    assert_eq!(event_files(&board.join("run-1")).len(), 2);
    same(&dir.path("m.jsonl.1"), &board.join("run-1"), 2.0);
    let taken = dir.arg("m.jsonl");
    let refused = Run::start(FSDP, &["--tensorboard", &taken]).end();
    assert_eq!(refused.status.code(), Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("--tensorboard") && refused.stderr.contains("is a file"), "{}", refused.stderr);
}
