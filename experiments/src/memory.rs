//! Memory timelines of `run_fsdp --memory-timeline`: the peak of each category, and a chart of allocations over time
//! and within a step. Never measures.
use crate::chart;
use crate::chart::areas::{Area, AreaPanel, Areas};
use crate::verdict::Verdict;
use flatshard::base::{Error, Result};
use std::path::Path;

const MIB: f64 = (1u64 << 20) as f64;
/// (column, color), from the bottom of the chart to the top: permanent allocations first.
const CATEGORIES: [(&str, &str); 8] = [
    ("params", "#1e3a8a"),
    ("optimizer", "#a16207"),
    ("grads", "#7c3aed"),
    ("slots", "#0d9488"),
    ("scratch", "#94a3b8"),
    ("other", "#475569"),
    ("host", "#16a34a"),
    ("saved", "#ea580c"),
];
/// The part of `saved` that backward no longer needs.
const IDLE: &str = "#fed7aa";

/// A row of the file.
struct TimelineRow {
    rank: usize,
    time: f64,
    step: u64,
    phase: String,
    layer: String,
    /// In the order of the header, from the sixth column on.
    bytes: Vec<f64>,
}

struct Table {
    names: Vec<String>,
    rows: Vec<TimelineRow>,
}

impl Table {
    fn read(path: &Path) -> Result<Table> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
        let fault =
            |line: usize| Error::input(format!("{}: line {line} is not a row of a memory timeline", path.display()));
        let mut lines = text.lines().enumerate();
        let header = lines.next().map(|(_, line)| line.split(',').collect::<Vec<_>>()).unwrap_or_default();
        if header.get(..5) != Some(&["rank", "time_s", "step", "phase", "layer"]) {
            return Err(fault(1));
        }
        let row = |(i, line): (usize, &str)| {
            let cells: Vec<&str> = line.split(',').collect();
            let bytes = || cells[5..].iter().map(|cell| cell.parse().ok()).collect::<Option<Vec<f64>>>();
            let row = || {
                Some(TimelineRow {
                    rank: cells[0].parse().ok()?,
                    time: cells[1].parse().ok()?,
                    step: cells[2].parse().ok()?,
                    phase: cells[3].into(),
                    layer: cells[4].into(),
                    bytes: bytes()?,
                })
            };
            if cells.len() == header.len() { row() } else { None }.ok_or_else(|| fault(i + 1))
        };
        let rows = lines.map(row).collect::<Result<Vec<_>>>()?;
        Ok(Table { names: header[5..].iter().map(|name| name.to_string()).collect(), rows })
    }
    /// A column in MiB.
    fn of(&self, name: &str, row: &TimelineRow) -> f64 {
        let column = self.names.iter().position(|n| n == name);
        column.map_or(0.0, |column| row.bytes[column] / MIB)
    }
    fn area(
        &self,
        name: &'static str,
        color: &'static str,
        rows: &[&TimelineRow],
        value: impl Fn(&TimelineRow) -> f64,
    ) -> Area {
        Area { name, color, values: rows.iter().map(|row| value(row)).collect() }
    }

    /// Allocations up to the last buffer.
    fn startup(&self, rows: &[&TimelineRow]) -> AreaPanel {
        let total = |row: &TimelineRow| self.of("total", row) + self.of("host", row);
        let last = rows.windows(2).rposition(|w| total(w[0]) != total(w[1])).map_or(0, |at| at + 1);
        let end = rows[last].time * 1.15;
        let shown: Vec<&TimelineRow> = rows.iter().copied().filter(|row| row.time <= end).collect();
        let there = |name: &str| rows.iter().any(|row| self.of(name, row) > 0.0);
        let areas = CATEGORIES.iter().filter(|(name, _)| there(name));
        AreaPanel {
            title: "Allocated memory during startup (MiB)".into(),
            times: shown.iter().map(|row| row.time).collect(),
            end,
            areas: areas.map(|&(name, color)| self.area(name, color, &shown, |row| self.of(name, row))).collect(),
            marks: changes(&shown, |row| match row.phase.as_str() {
                "start" | "load" | "evaluate" | "sample" => Some(row.phase.clone()),
                "save" => Some(format!("save {}", row.step)),
                _ => Some(format!("step {}", row.step)),
            }),
            unit: "seconds",
            height: 220.0,
        }
    }

    /// Memory used within one step, layer by layer.
    fn step(&self, rows: &[&TimelineRow], step: u64) -> Vec<AreaPanel> {
        let begin = rows.iter().position(|row| row.step == step).unwrap_or(0);
        let shown: Vec<&TimelineRow> =
            rows[begin..].iter().copied().take_while(|row| row.step == step && row.phase != "save").collect();
        let (from, to) = (shown[0].time, shown[shown.len() - 1].time);
        let times: Vec<f64> = shown.iter().map(|row| 1e3 * (row.time - from)).collect();
        let end = 1e3 * (to - from) * 1.02;
        let stays = |row: &TimelineRow| CATEGORIES[..7].iter().map(|(name, _)| self.of(name, row)).sum::<f64>();
        let verbs = ["acquire", "release", "grads", "grads ready", "step"];
        let marks = changes(&shown, |row| {
            let layer = if row.layer == "0" { "" } else { &row.layer }; // the root
            let phase = row.phase.as_str();
            (!verbs.contains(&phase)).then(|| format!("{phase} {layer}").trim().to_string())
        });
        let panel = |title: String, areas, height| AreaPanel {
            title,
            times: times.clone(),
            end,
            areas,
            marks: marks.iter().map(|(at, what)| (1e3 * (at - from), what.clone())).collect(),
            unit: "milliseconds",
            height,
        };
        let used = |row: &TimelineRow| self.of("saved_in_use", row);
        let idle = |row: &TimelineRow| (self.of("saved", row) - used(row)).max(0.0);
        vec![
            panel(
                format!("Step {step}: saved activations, needed and no longer needed (MiB)"),
                vec![
                    self.area("everything else", "#94a3b8", &shown, stays),
                    self.area("saved, needed", "#ea580c", &shown, used),
                    self.area("saved, free", IDLE, &shown, idle),
                ],
                200.0,
            ),
            panel(
                format!("Step {step}: weights and gradients in use (MiB)"),
                vec![
                    self.area("weights", "#1e3a8a", &shown, |row| self.of("weights_in_use", row)),
                    self.area("gradients", "#7c3aed", &shown, |row| self.of("grads_in_use", row)),
                ],
                130.0,
            ),
        ]
    }
}

/// The rows at which `label` changes.
fn changes(rows: &[&TimelineRow], label: impl Fn(&TimelineRow) -> Option<String>) -> Vec<(f64, String)> {
    let mut changes: Vec<(f64, String)> = Vec::new();
    for row in rows {
        if let Some(now) = label(row).filter(|now| changes.last().is_none_or(|(_, before)| before != now)) {
            changes.push((row.time, now));
        }
    }
    changes
}

pub fn main(path: &Path, plot: Option<&Path>, step: Option<u64>) -> Result<Verdict> {
    let table = Table::read(path)?;
    let ranks = 1 + table.rows.iter().map(|row| row.rank).max().unwrap_or(0);
    let of = |rank: usize| table.rows.iter().filter(move |row| row.rank == rank);
    for (rank, last) in (0..ranks).filter_map(|rank| Some((rank, of(rank).next_back()?))) {
        let peak = of(rank).map(|row| table.of("total", row)).fold(0.0, f64::max);
        let parts = CATEGORIES.iter().map(|(name, _)| (name, table.of(name, last))).filter(|part| part.1 > 0.0);
        let parts: Vec<String> = parts.map(|(name, mib)| format!("{name} {mib:.1} MiB")).collect();
        println!(
            "rank {rank}: {:.1} MiB at the end, peak {peak:.1} MiB: {}",
            table.of("total", last),
            parts.join(", ")
        );
    }
    if let Some(plot) = plot {
        let rows: Vec<&TimelineRow> = of(0).collect();
        let close = || rows.iter().filter(|row| !row.layer.is_empty()).map(|row| row.step);
        let Some(step) = step.or(close().max()).filter(|step| close().any(|s| s == *step)) else {
            return Err(Error::input(format!("{}: no such step of rank 0 with its memory use", path.display())));
        };
        let mut panels = table.step(&rows, step);
        panels.insert(0, table.startup(&rows));
        let subtitle = format!("{}, rank 0 of {ranks}", path.display());
        chart::save(&Areas { title: "Memory over time".into(), subtitle, panels }.svg(), plot)?;
        println!("plot: {}", plot.display());
    }
    Ok(Verdict::Good)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CSV: &str = "rank,time_s,step,phase,layer,params,grads,optimizer,slots,saved,scratch,other,host,total,weights_in_use,grads_in_use,saved_in_use
0,0.0,0,start,,0,0,0,0,0,0,0,0,0,0,0,0
0,0.5,0,start,,1048576,0,0,0,0,0,0,0,1048576,0,0,0
0,1.0,0,start,,1048576,0,0,0,4194304,0,0,0,5242880,0,0,0
0,2.0,1,step,,1048576,0,0,0,4194304,0,0,0,5242880,0,0,0
0,2.5,1,forward,1,1048576,0,0,0,4194304,0,0,0,5242880,1048576,0,2097152
0,3.0,1,optimizer,,1048576,0,0,0,4194304,0,0,0,5242880,0,0,0
";

    #[test]
    fn the_chart_shows_startup_and_one_step() {
        let dir = tempfile::tempdir().unwrap();
        let (file, plot) = (dir.path().join("memory.csv"), dir.path().join("memory.svg"));
        std::fs::write(&file, CSV).unwrap();
        assert_eq!(main(&file, Some(&plot), None).unwrap(), Verdict::Good);
        let svg = std::fs::read_to_string(&plot).unwrap();
        for text in ["Step 1: saved activations", ">forward 1<", ">params<", ">saved, needed<", ">weights<"] {
            assert!(svg.contains(text), "no {text} in {svg}");
        }
        assert!(!svg.contains(">host<"), "an empty category");
        let fault = |text: &str| {
            std::fs::write(&file, text).unwrap();
            main(&file, None, None).unwrap_err().to_string()
        };
        assert!(fault("a,b\n1,2\n").contains("line 1"));
        assert!(fault(&CSV.replace("0,3.0", "0,x")).contains("line 7"));
        std::fs::write(&file, CSV).unwrap();
        assert!(main(&file, Some(&plot), Some(7)).is_err());
    }
}
