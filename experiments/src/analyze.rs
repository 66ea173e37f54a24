//! `analyze`: the cost of each run of a directory compared with a baseline, as a table, a CSV file, charts and a page.
//! Never runs anything.
use crate::chart::bars::{Bar, Bars};
use crate::chart::curves::{CurvePanel, Curves, PlottedCurve};
use crate::chart::{BUSY, CURVES, EXPOSED, color, save};
use crate::page::{self, ShownRun, TraceLink};
use crate::summary::{self, Found, RunRow};
use crate::table;
use crate::task::{TrainingTask, shared};
use crate::verdict::Verdict;
use flatshard::base::{Error, Result};
use std::fs;
use std::path::PathBuf;

/// Throughput, loss, memory and communication of each run beside a baseline: table, CSV, SVG, and one HTML page
#[derive(clap::Args)]
pub struct AnalyzeArgs {
    /// The run that the others are compared with [default: ddp_fp32, or without one the first]
    #[arg(long, value_name = "NAME")]
    baseline: Option<String>,
    /// Where the runs are; the files go to DIR/analysis
    #[arg(long, visible_alias = "experiment-dir", default_value = "runs/experiments", value_name = "DIR")]
    output_dir: PathBuf,
    /// First steps of each run that are not timed
    #[arg(long, default_value_t = 2, value_name = "N")]
    warmup: usize,
}

const BASELINE: &str = "ddp_fp32";

pub fn main(args: &AnalyzeArgs) -> Result<Verdict> {
    let found = summary::read(&args.output_dir, args.warmup)?;
    let chosen = match &args.baseline {
        Some(name) => found.row(name),
        None => found.row(BASELINE).or(found.rows.first()),
    };
    let Some(baseline) = chosen else {
        if found.rows.is_empty() && args.baseline.is_none() {
            return Err(Error::input(format!(
                "--output-dir {}: no run that ended is there; a run is a directory with metrics.jsonl. `experiments watch \
                 FILE` shows metrics files",
                args.output_dir.display()
            )));
        }
        let names: Vec<&str> = found.rows.iter().map(|row| row.name.as_str()).collect();
        let there = if names.is_empty() { "none".into() } else { names.join(", ") };
        return Err(Error::input(format!(
            "--baseline {}: not among the finished runs of {} ({there})",
            args.baseline.as_deref().unwrap_or(BASELINE),
            args.output_dir.display()
        )));
    };
    let dir = args.output_dir.join("analysis");
    fs::create_dir_all(&dir).map_err(|e| Error::io("create", &dir, e))?;
    let pictures = pictures(&found, baseline);
    for picture in &pictures {
        save(&picture.svg, &dir.join(picture.file))?;
    }
    for (file, text) in
        [("summary.csv", table::csv(&found, baseline)), ("report.html", report(&found, baseline, args.warmup))]
    {
        let path = dir.join(file);
        fs::write(&path, text).map_err(|e| Error::io("write", &path, e))?;
    }
    print!("{}", table::terminal(&found, baseline));
    println!(
        "{}: summary.csv, report.html, {}",
        dir.display(),
        pictures.iter().map(|p| p.file).collect::<Vec<_>>().join(", ")
    );
    Ok(Verdict::Good)
}

/// A picture of a run's cost, and its file.
struct Picture {
    file: &'static str,
    svg: String,
}

fn report(found: &Found, baseline: &RunRow, warmup: usize) -> String {
    let row = |row| {
        let traces = page::traces(row).iter().map(|path| TraceLink::of(path, page::file_url(path))).collect();
        ShownRun { row: Some(row), status: "done", traces, ..ShownRun::default() }
    };
    let failed = found.failed.iter().map(|failed| ShownRun {
        name: &failed.name,
        status: "failed",
        badge: "failed".into(),
        message: &failed.message,
        ..ShownRun::default()
    });
    let runs: Vec<ShownRun> = found.rows.iter().map(row).chain(failed).collect();
    page::html(&page::view("Strategies side by side", &runs, Some(baseline), warmup), false)
}

fn pictures(found: &Found, baseline: &RunRow) -> Vec<Picture> {
    let drawn = [
        ("throughput.svg", throughput(found, baseline)),
        ("memory.svg", memory(found, baseline)),
        ("communication.svg", communication(found, baseline)),
        ("step_time.svg", step_time(found, baseline)),
        ("loss.svg", losses(found, baseline)),
    ];
    drawn.into_iter().filter_map(|(file, svg)| Some(Picture { file, svg: svg? })).collect()
}

/// Bars of the rows that have a `value`; none where no row has.
fn bars(
    (title, subtitle): (&str, String),
    (found, baseline): (&Found, &RunRow),
    value: impl Fn(&RunRow) -> Option<f64>,
    text: impl Fn(&RunRow, f64) -> String,
) -> Option<Bars> {
    let bar = |row: &RunRow| {
        let length = value(row)?;
        let strong = row.name == baseline.name;
        let parts = vec![(length, color(&row.name))];
        Some(Bar { label: row.name.clone(), parts, range: None, text: text(row, length), strong })
    };
    let bars: Vec<Bar> = found.rows.iter().filter_map(bar).collect();
    let (title, legend) = (title.to_string(), vec![]);
    (!bars.is_empty()).then(|| Bars { title, subtitle, bars, mark: value(baseline), legend })
}

fn ratio(x: f64, base: Option<f64>) -> String {
    base.filter(|&base| base > 0.0).map_or(String::new(), |base| format!(" ({:.2}x)", x / base))
}

fn throughput(found: &Found, baseline: &RunRow) -> Option<String> {
    let several = found.rows.iter().any(|row| row.rounds > 1);
    let subtitle = format!(
        "Tokens a second of the whole job, median step{}. Dashed: {}. Longer is better.",
        if several { " and round, with the least and most of the rounds" } else { "" },
        baseline.name
    );
    let text = |_: &RunRow, x: f64| table::grouped(x) + &ratio(x, baseline.speed());
    let mut bars = bars(("Throughput", subtitle), (found, baseline), RunRow::speed, text)?;
    for bar in &mut bars.bars {
        let row = found.row(&bar.label).filter(|row| row.rounds > 1);
        bar.range = row.and_then(|row| row.tokens_per_sec).map(|s| (s.low, s.high));
    }
    Some(bars.svg())
}

fn memory(found: &Found, baseline: &RunRow) -> Option<String> {
    let peak = |row: &RunRow| row.peak_mem_bytes.map(|n| n as f64);
    let subtitle = format!("MiB, of the rank that held most. Dashed: {}. Shorter is better.", baseline.name);
    let text = |_: &RunRow, x: f64| format!("{} MiB{}", table::mib(x, 0), ratio(x, peak(baseline)));
    bars(("Peak memory of a rank", subtitle), (found, baseline), peak, text).map(|bars| bars.svg())
}

fn communication(found: &Found, baseline: &RunRow) -> Option<String> {
    let subtitle = format!(
        "MiB that rank 0 receives from its peers in an optimizer step, median. Dashed: {}. Shorter is better.",
        baseline.name
    );
    let text = |_: &RunRow, x: f64| format!("{} MiB{}", table::mib(x, 1), ratio(x, baseline.comm_bytes));
    let value = |row: &RunRow| row.comm_bytes;
    bars(("Communication", subtitle), (found, baseline), value, text).map(|bars| bars.svg())
}

fn step_time(found: &Found, baseline: &RunRow) -> Option<String> {
    let subtitle = "Milliseconds of an optimizer step, median; of it, what the computing thread spent in collectives: \
                    communication that is not hidden behind compute."
        .to_string();
    let value = |row: &RunRow| row.step_time_s.map(|s| 1e3 * s);
    let text = |row: &RunRow, x: f64| match row.exposed_share() {
        Some(share) => format!("{}, {:.0} % exposed", table::milliseconds(x), 100.0 * share),
        None => format!("{}, communication not measured", table::milliseconds(x)),
    };
    let mut bars = bars(("Time of a step", subtitle), (found, baseline), value, text)?;
    bars.legend = vec![(EXPOSED, "exposed communication".into()), (BUSY, "everything else".into())];
    bars.mark = None;
    for bar in &mut bars.bars {
        let (whole, row) = (bar.parts[0].0, found.row(&bar.label));
        let exposed = row.and_then(|row| row.exposed_comm_s).map_or(0.0, |s| (1e3 * s).min(whole));
        bar.parts = vec![(exposed, EXPOSED), (whole - exposed, BUSY)];
    }
    Some(bars.svg())
}

/// Runs with the same losses, and those: (step, loss).
type SameLosses<'a> = (Vec<&'a RunRow>, Vec<(f64, f64)>);

/// Runs whose losses are the same bits are one curve.
fn losses(found: &Found, baseline: &RunRow) -> Option<String> {
    let mut groups: Vec<SameLosses> = vec![];
    for row in found.rows.iter().filter(|row| !row.is_peer()) {
        let points = row.curve.points();
        let bits = |points: &[(f64, f64)]| points.iter().map(|p| (p.0, p.1.to_bits())).collect::<Vec<_>>();
        match groups.iter_mut().find(|group| bits(&group.1) == bits(&points)) {
            Some(group) => group.0.push(row),
            None => groups.push((vec![row], points)),
        }
    }
    if groups.is_empty() {
        return None;
    }
    // The baseline's group is the solid one.
    groups.sort_by_key(|group| !group.0.iter().any(|row| row.name == baseline.name));
    let styled = |n: usize, names: Vec<String>, points: Vec<(f64, f64)>| {
        let dashes = ["", "7 4", "2 3", "9 3 2 3"][n.div_ceil(2) % 4];
        PlottedCurve { names, color: CURVES[n % CURVES.len()], dashes, points }
    };
    let names = |rows: &[&RunRow]| rows.iter().map(|row| row.name.clone()).collect::<Vec<_>>();
    let curves = groups.iter().enumerate().map(|(n, (rows, points))| styled(n, names(rows), points.clone())).collect();
    let title = match shared(&found.rows.iter().collect::<Vec<_>>(), |row| Some(TrainingTask::of(row).loss_over)) {
        Some("per token") => "loss (nats a token)".to_string(),
        Some(over) if !over.is_empty() => format!("loss ({over})"),
        _ => "loss".to_string(),
    };
    let mut panels = vec![CurvePanel { title, curves, log: false, mark: None, height: 260.0 }];
    let apart = |(n, (rows, points)): (usize, &SameLosses)| {
        let base = |step: f64| baseline.curve.loss(step as u64);
        let points: Vec<(f64, f64)> =
            points.iter().filter_map(|&(step, y)| base(step).map(|x| (step, (y - x).abs() / x.abs()))).collect();
        let compared = rows.iter().any(|row| row.difference(baseline).is_some()) && points.iter().any(|p| p.1 > 0.0);
        compared.then(|| styled(n, names(rows), points))
    };
    let apart: Vec<PlottedCurve> = groups.iter().enumerate().filter_map(apart).collect();
    if !apart.is_empty() {
        let title = format!("|loss - loss of {}| / loss of {0}", baseline.name);
        panels.push(CurvePanel { title, curves: apart, log: true, mark: None, height: 170.0 });
    }
    let subtitle = "Runs that stand together in the legend have the same losses, bit for bit.".to_string();
    Some(Curves { title: "Loss".into(), subtitle, panels }.svg())
}
