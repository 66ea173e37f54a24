//! Writes a simulated step as a Chrome trace (chrome://tracing, Perfetto): one row for the compute stream and one per
//! group. Never decides what is in it.
use super::clock::{SimEvent, SimStream};
use flatshard::base::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;

/// The events of one step in the "JSON Array Format", times in microseconds.
pub fn chrome(events: &[SimEvent]) -> Value {
    let row = |stream: SimStream| match stream {
        SimStream::Compute => 0,
        SimStream::Group(i) => i + 1,
    };
    let rows = events.iter().map(|e| row(e.stream)).max().unwrap_or(0);
    let name = |tid: usize| {
        let name = if tid == 0 { "compute".to_string() } else { format!("communication {tid}") };
        json!({"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}})
    };
    let event = |e: &SimEvent| {
        let name = e.unit.map_or(e.name.to_string(), |unit| format!("{} {unit}", e.name));
        json!({"name": name, "ph": "X", "pid": 0, "tid": row(e.stream), "ts": 1e6 * e.begin, "dur": 1e6 * e.seconds})
    };
    Value::Array((0..=rows).map(name).chain(events.iter().map(event)).collect())
}

pub fn write(path: &Path, events: &[SimEvent]) -> Result<()> {
    std::fs::write(path, chrome(events).to_string()).map_err(|e| Error::io("write trace", path, e))
}
