//! Trace files in the Chrome trace format, for ui.perfetto.dev: one per rank, and a merged one. Never decides what is
//! recorded.
//!
//! A rank is a process, and a lane is a thread. Concurrent operations of a lane are in separate rows, because spans of
//! one thread must nest. The compute row shows the compute stream: layers, store calls, and within them the calls that
//! start collectives or wait for them, with arrows from start to wait.
//!
//! The first line of a file has everything except the events, which follow one per line, so files are merged by lines.
use super::TracedSpan;
use super::summary::Summary;
use crate::base::timeline::Lane;
use crate::base::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::Path;

/// The metadata of a file. The first names are those of PyTorch's traces.
#[derive(Serialize, Deserialize, Clone, PartialEq, Debug)]
#[serde(rename_all = "camelCase")]
pub struct Head {
    pub display_time_unit: String,
    /// Zero of the event times, since 1970.
    pub base_time_nanoseconds: i64,
    pub distributed_info: Distributed,
    pub summary: Vec<Summary>,
}
#[derive(Serialize, Deserialize, Clone, PartialEq, Debug)]
pub struct Distributed {
    /// None in the merged file.
    pub rank: Option<usize>,
    pub world_size: usize,
}

/// Thread numbers per lane.
const ROWS: usize = 16;

/// The lane and row of a span.
fn row(span: &TracedSpan, taken: &mut BTreeMap<Lane, Vec<i64>>) -> (Lane, usize) {
    let lane = if span.is_call() || span.lane == Lane::Store { Lane::Compute } else { span.lane };
    // All other spans nest or follow each other, except background checkpoint writes.
    if !lane.is_communication() && lane != Lane::Checkpoint {
        return (lane, 0);
    }
    let ends = taken.entry(lane).or_default();
    let free = ends.iter().position(|&end| end <= span.start).unwrap_or(ends.len()).min(ROWS - 1);
    if free == ends.len() {
        ends.push(span.end);
    }
    ends[free] = span.end;
    (lane, free)
}
fn thread((lane, row): (Lane, usize)) -> usize {
    let lane = Lane::ALL.iter().position(|&other| other == lane).unwrap_or(0);
    1 + ROWS * lane + row
}

/// Microseconds, as in the format.
fn us(ns: i64) -> String {
    format!("{}{}.{:03}", if ns < 0 { "-" } else { "" }, ns.abs() / 1000, ns.abs() % 1000)
}

/// One rank's file.
pub fn write(path: &Path, head: &Head, rank: usize, spans: &[TracedSpan]) -> Result<()> {
    let failed = |e| Error::io("write a trace", path, e);
    let mut out = BufWriter::new(File::create(path).map_err(failed)?);
    begin(&mut out, head).map_err(failed)?;
    let mut lines = Lines { rank, text: String::new() };
    let mut spans: Vec<&TracedSpan> = spans.iter().collect();
    // Outer spans come before the spans they contain.
    spans.sort_by_key(|span| (span.start, std::cmp::Reverse(span.end)));
    let (mut taken, mut rows) = (BTreeMap::new(), BTreeMap::new());
    for span in spans {
        let row = row(span, &mut taken);
        rows.insert(thread(row), row);
        lines.span(span, thread(row));
        out.write_all(lines.text.as_bytes()).map_err(failed)?;
        lines.text.clear();
    }
    lines.names(&rows);
    out.write_all(lines.text.as_bytes()).map_err(failed)?;
    end(&mut out).map_err(failed)
}

fn begin(out: &mut impl Write, head: &Head) -> std::io::Result<()> {
    let head = serde_json::to_string(head)?;
    writeln!(out, "{},\"traceEvents\":[", &head[..head.len() - 1])
}
/// JSON has no trailing commas, so the last event is an empty one.
fn end(out: &mut impl Write) -> std::io::Result<()> {
    writeln!(out, "{{\"ts\":0,\"ph\":\"M\",\"pid\":0,\"tid\":0,\"name\":\"trace_end\",\"args\":{{}}}}\n]}}")?;
    out.flush()
}

struct Lines {
    rank: usize,
    text: String,
}

impl Lines {
    fn span(&mut self, span: &TracedSpan, tid: usize) {
        let (start, length, rank) = (us(span.start), us(span.end - span.start), self.rank);
        let call = span.flow.and_then(|flow| flow.call);
        let verb = match call {
            None => "",
            Some("wait") => "wait ",
            Some("wait_sent") => "wait sent ",
            Some("release") => "release ",
            Some(_) => "start ",
        };
        let number = span.number.map_or(String::new(), |n| format!(" {n}"));
        let category = if call.is_some() { "call" } else { span.lane.name() };
        let args = span.flow.map_or(String::new(), |flow| {
            format!("\"axis\":\"{}\",\"bytes\":{},\"of\":\"{}\"", flow.axis, flow.bytes, span.lane.name())
        });
        self.line(format_args!(
            "{{\"ts\":{start},\"dur\":{length},\"ph\":\"X\",\"pid\":{rank},\"tid\":{tid},\"cat\":\"{category}\",\
             \"name\":\"{verb}{}{number}\",\"args\":{{{args}}}}}",
            span.what
        ));
        // An arrow from the call that started an operation to the one that waited for it, with an id unique over ranks.
        let (Some(flow), Some(call)) = (span.flow, call.filter(|call| !matches!(*call, "release" | "wait_sent")))
        else {
            return;
        };
        let (id, phase) = ((rank as u64) << 32 | flow.id, if call == "wait" { "f\",\"bp\":\"e" } else { "s" });
        self.line(format_args!(
            "{{\"ts\":{start},\"ph\":\"{phase}\",\"id\":{id},\"pid\":{rank},\"tid\":{tid},\"cat\":\"flow\",\"name\":\"{}\"}}",
            span.lane.name()
        ));
    }
    /// Names and order of the process and its threads.
    fn names(&mut self, rows: &BTreeMap<usize, (Lane, usize)>) {
        let rank = self.rank;
        let mut says = |tid: usize, name: &str, args: String| {
            self.line(format_args!(
                "{{\"ts\":0,\"ph\":\"M\",\"pid\":{rank},\"tid\":{tid},\"name\":\"{name}\",\"args\":{{{args}}}}}"
            ));
        };
        says(0, "process_name", format!("\"name\":\"rank {rank}\""));
        says(0, "process_sort_index", format!("\"sort_index\":{rank}"));
        for (&tid, &(lane, row)) in rows {
            let number = if row > 0 { format!(" {}", row + 1) } else { String::new() };
            says(tid, "thread_name", format!("\"name\":\"{}{number}\"", lane.name()));
            says(tid, "thread_sort_index", format!("\"sort_index\":{tid}"));
        }
    }
    fn line(&mut self, line: std::fmt::Arguments) {
        let _ = writeln!(self.text, "{line},"); // writing to a String does not fail
    }
}

/// The metadata of a file.
pub fn head(path: &Path) -> Result<Head> {
    let mut line = String::new();
    let file = File::open(path).map_err(|e| Error::io("open a trace", path, e))?;
    BufReader::new(file).read_line(&mut line).map_err(|e| Error::io("read a trace", path, e))?;
    let whole = format!("{}]}}", line.trim_end());
    serde_json::from_str(&whole).map_err(|e| Error::input(format!("{}: not a flatshard trace: {e}", path.display())))
}

/// Merges files of several ranks into one, and returns its summaries.
pub fn merge(ranks: &[impl AsRef<Path>], world: usize, into: &Path) -> Result<Vec<Summary>> {
    let heads: Vec<Head> = ranks.iter().map(|path| head(path.as_ref())).collect::<Result<_>>()?;
    let base = heads.iter().map(|head| head.base_time_nanoseconds).min().unwrap_or(0);
    let summary: Vec<Summary> = heads.iter().flat_map(|head| head.summary.clone()).collect();
    let failed = |e| Error::io("write a trace", into, e);
    let mut out = BufWriter::new(File::create(into).map_err(failed)?);
    let head = Head {
        display_time_unit: "ms".into(),
        base_time_nanoseconds: base,
        distributed_info: Distributed { rank: None, world_size: world },
        summary,
    };
    begin(&mut out, &head).map_err(failed)?;
    for (path, of) in ranks.iter().map(AsRef::as_ref).zip(&heads) {
        let later = of.base_time_nanoseconds - base;
        let file = BufReader::new(File::open(path).map_err(|e| Error::io("open a trace", path, e))?);
        for line in file.lines().skip(1) {
            let line = line.map_err(|e| Error::io("read a trace", path, e))?;
            if line.contains("\"ph\":\"M\"") && line.ends_with(',') {
                writeln!(out, "{line}").map_err(failed)?;
            } else if let Some((ts, rest)) = line.strip_prefix("{\"ts\":").and_then(|l| l.split_once(','))
                && line.ends_with(',')
            {
                let ns = (ts.parse::<f64>().unwrap_or(0.0) * 1e3).round() as i64;
                writeln!(out, "{{\"ts\":{},{rest}", us(ns + later)).map_err(failed)?;
            }
        }
    }
    end(&mut out).map_err(failed)?;
    Ok(head.summary)
}
