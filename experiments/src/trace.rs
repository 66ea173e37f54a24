//! `trace FILE`: summarizes a trace of `run_fsdp --profile-steps` in numbers and as a chart of one step, or a memory
//! timeline ([`crate::memory`]). Never measures.
use crate::chart::gantt::{Gantt, GanttGroup, GanttRow, GanttSpan};
use crate::chart::{self, EXPOSED};
use crate::verdict::Verdict;
use flatshard::base::{Error, Result};
use flatshard::run::trace::chrome;
use flatshard::run::trace::chrome::Head;
use flatshard::run::trace::summary::Summary;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Summarize and draw a trace of --profile-steps or a --memory-timeline
#[derive(clap::Args)]
pub struct TraceArgs {
    /// FILE.json: trace of one rank, or of all; FILE.csv: memory
    file: PathBuf,
    /// Draw one step of a trace, or the memory of rank 0, as .svg, or .png in a build with the feature png; also
    /// --plot FILE [default file: trace.svg]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "trace.svg", value_name = "FILE")]
    plot: Option<PathBuf>,
    /// The step to draw [default: the last]
    #[arg(long, value_name = "N")]
    step: Option<u64>,
}

/// The fields read from an event.
#[derive(Deserialize)]
struct TraceEvent {
    ts: f64,
    #[serde(default)]
    dur: f64,
    ph: String,
    pid: usize,
    tid: usize,
    #[serde(default)]
    cat: String,
    name: String,
    #[serde(default)]
    args: serde_json::Map<String, serde_json::Value>,
}
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TraceFile {
    trace_events: Vec<TraceEvent>,
}

/// (category or first word of a name, color, label in the legend).
const COLORS: [(&str, &str, &str); 15] = [
    ("forward", "#2563eb", "forward"),
    ("backward", "#1e3a8a", "backward"),
    ("recompute", "#60a5fa", "recomputed"),
    ("loss", "#0e7490", "head and loss, embedding"),
    ("embed", "#0e7490", ""),
    ("optimizer", "#a16207", "norm, update"),
    ("store", "#94a3b8", "store"),
    ("call", EXPOSED, "in a collective"),
    ("gathers", "#0d9488", "gather in flight"),
    ("scatters", "#7c3aed", "scatter"),
    ("all-reduces", "#db2777", "all-reduce"),
    ("sends", "#16a34a", "send"),
    ("other collectives", "#475569", "other collective"),
    ("data", "#ca8a04", "waiting for data"),
    ("checkpoint", "#64748b", "checkpoint"),
];

/// Index of an event's color in [`COLORS`].
fn color(event: &TraceEvent) -> usize {
    let of = |key: &str| COLORS.iter().position(|(name, ..)| *name == key);
    let word = event.name.split(' ').next().unwrap_or_default();
    let by_name = if event.cat == "compute" { of(word) } else { None };
    by_name.or_else(|| of(&event.cat)).unwrap_or(0)
}

pub fn main(args: &TraceArgs) -> Result<Verdict> {
    if args.file.extension().is_some_and(|e| e == "csv") {
        return crate::memory::main(&args.file, args.plot.as_deref(), args.step);
    }
    let head = chrome::head(&args.file)?;
    for line in head.summary.iter().flat_map(Summary::lines) {
        println!("{line}");
    }
    if let Some(path) = &args.plot {
        chart::save(&picture(&args.file, &head, &events(&args.file)?, args.step)?.svg(), path)?;
        println!("plot: {}", path.display());
    }
    Ok(Verdict::Good)
}

fn events(path: &Path) -> Result<Vec<TraceEvent>> {
    let text = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
    let file: TraceFile = serde_json::from_slice(&text)
        .map_err(|e| Error::input(format!("{}: not a complete trace: {e}", path.display())))?;
    Ok(file.trace_events)
}

/// What the colors of a picture mean.
pub fn legend() -> Vec<(&'static str, &'static str)> {
    COLORS.iter().filter(|(.., meaning)| !meaning.is_empty()).map(|&(_, color, meaning)| (color, meaning)).collect()
}

/// The last step of a trace: rank 0's communication in words, and an SVG picture without any.
pub fn thumbnail(path: &Path) -> Result<(String, String)> {
    let head = chrome::head(path)?;
    let gantt = picture(path, &head, &events(path)?, None)?;
    let words = gantt.groups.first().map_or("", |group| &group.title);
    Ok((format!("{}, {words}", gantt.title.to_lowercase()), gantt.thumbnail()))
}

fn picture(path: &Path, head: &Head, events: &[TraceEvent], step: Option<u64>) -> Result<Gantt> {
    let number = |event: &TraceEvent| event.name.strip_prefix("step ")?.parse::<u64>().ok();
    let steps = || events.iter().filter(|e| e.cat == "steps").filter_map(|e| Some((number(e)?, e)));
    let (first, last) = (steps().map(|s| s.0).min(), steps().map(|s| s.0).max());
    let (Some(first), Some(last)) = (first, last) else {
        return Err(Error::input(format!("{}: has no steps", path.display())));
    };
    let step = step.unwrap_or(last);
    let whole = steps().filter(|s| s.0 == step).map(|s| s.1);
    let from = whole.clone().map(|e| e.ts).fold(f64::INFINITY, f64::min);
    let to = whole.map(|e| e.ts + e.dur).fold(f64::NEG_INFINITY, f64::max);
    if !from.is_finite() {
        return Err(Error::input(format!("{}: no step {step}; it has steps {first} to {last}", path.display())));
    }

    let threads = events.iter().filter(|e| e.ph == "M" && e.name == "thread_name");
    let names: BTreeMap<(usize, usize), &str> =
        threads.filter_map(|e| Some(((e.pid, e.tid), e.args.get("name")?.as_str()?))).collect();
    let (mut used, mut groups) = ([false; COLORS.len()], BTreeMap::<usize, Vec<GanttRow>>::new());
    for (&(rank, thread), name) in names.iter().filter(|(_, name)| **name != "steps") {
        let here =
            |e: &&TraceEvent| e.ph == "X" && (e.pid, e.tid) == (rank, thread) && e.ts < to && e.ts + e.dur > from;
        let mut spans: Vec<&TraceEvent> = events.iter().filter(here).collect();
        // Nested spans are drawn on top of their parents.
        spans.sort_by(|a, b| a.ts.total_cmp(&b.ts).then(b.dur.total_cmp(&a.dur)));
        let span = |e: &&TraceEvent| {
            let color = color(e);
            used[color] = true;
            GanttSpan {
                from: (e.ts - from) / 1e3,
                to: (e.ts + e.dur - from) / 1e3,
                color: COLORS[color].1,
                // The root has a separate name for each of its spans.
                text: match e.cat.as_str() {
                    "store" | "call" => String::new(),
                    "compute" => e.name.trim_end_matches(" 0").to_string(),
                    _ => e.name.clone(),
                },
                hint: format!("{} ({:.3} ms)", e.name, e.dur / 1e3),
            }
        };
        let row = GanttRow { label: name.to_string(), spans: spans.iter().map(span).collect() };
        if !row.spans.is_empty() {
            groups.entry(rank).or_default().push(row);
        }
    }
    let title = |rank: usize| {
        let of = head.summary.iter().find(|s| s.rank == rank);
        of.map_or(format!("rank {rank}"), |s| {
            let ms = 1e3 / s.steps.max(1) as f64;
            format!(
                "rank {rank}: communication {:.1} ms per step, exposed {:.1} ms; {:.0} % overlapped",
                s.comm.in_flight_s * ms,
                s.comm.exposed_s * ms,
                100.0 * s.comm.overlap()
            )
        })
    };
    Ok(Gantt {
        title: format!("Step {step}"),
        subtitle: format!("{}, steps {first} to {last} of {} ranks", path.display(), head.distributed_info.world_size),
        legend: COLORS
            .iter()
            .zip(used)
            .filter(|((.., meaning), used)| *used && !meaning.is_empty())
            .map(|(&(_, color, meaning), _)| (color, meaning))
            .collect(),
        from: 0.0,
        to: (to - from) / 1e3,
        unit: "milliseconds",
        groups: groups.into_iter().map(|(rank, rows)| GanttGroup { title: title(rank), rows }).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatshard::base::timeline::{Flow, Lane};
    use flatshard::run::trace::TracedSpan;
    use flatshard::run::trace::chrome::Distributed;

    /// Two ranks with one step of 10 ms each.
    fn merged(dir: &Path) -> PathBuf {
        let ms = |n: i64| n * 1_000_000;
        let span =
            |lane, what, number, from, to| TracedSpan { lane, what, number, start: ms(from), end: ms(to), flow: None };
        let gather = |from, to, call| {
            let flow = Some(Flow { id: 1, axis: "fsdp", bytes: 1 << 20, call });
            TracedSpan { flow, ..span(Lane::Gathers, "gather", Some(1), from, to) }
        };
        let files = [0, 1].map(|rank| {
            let spans = [
                span(Lane::Steps, "step", Some(4), 0, 10),
                span(Lane::Compute, "forward", Some(1), 0, 6),
                gather(0, 8, None),
                gather(6, 8, Some("wait")),
                span(Lane::Optimizer, "update", None, 8, 10),
            ];
            let head = Head {
                display_time_unit: "ms".into(),
                base_time_nanoseconds: 1000 * rank as i64,
                distributed_info: Distributed { rank: Some(rank), world_size: 2 },
                summary: vec![Summary::of(rank, &spans, 0)],
            };
            let path = dir.join(format!("rank-{rank}.json"));
            chrome::write(&path, &head, rank, &spans).unwrap();
            path
        });
        let path = dir.join("all.json");
        assert_eq!(chrome::merge(&files, 2, &path).unwrap().len(), 2);
        path
    }

    #[test]
    fn the_chart_has_the_lanes_of_every_rank() {
        let dir = tempfile::tempdir().unwrap();
        let (file, plot) = (merged(dir.path()), dir.path().join("trace.svg"));
        let draw = |step| main(&TraceArgs { file: file.clone(), plot: Some(plot.clone()), step });
        assert_eq!(draw(None).unwrap(), Verdict::Good);
        let svg = std::fs::read_to_string(&plot).unwrap();
        for text in [">Step 4<", ">forward 1<", ">update<", ">gathers<", ">optimizer<", "wait gather 1 (2.000 ms)"] {
            assert_eq!(svg.matches(text).count(), if text == ">Step 4<" { 1 } else { 2 }, "{text}");
        }
        // 8 ms of communication, 6 of them hidden by the forward.
        assert!(svg.contains("rank 1: communication 8.0 ms per step, exposed 2.0 ms; 75 % overlapped"), "{svg}");
        assert!(!svg.contains("all-reduce"), "a legend entry without spans");
        // The second rank's wall clock is a microsecond late.
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains("{\"ts\":1.000,\"dur\":10000.000,\"ph\":\"X\",\"pid\":1,"), "{text}");
        assert!(draw(Some(5)).unwrap_err().to_string().contains("it has steps 4 to 4"));
    }
}
