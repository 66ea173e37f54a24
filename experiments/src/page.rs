//! The report: one self-contained HTML file with inline charts and no scripts. Never computes results.
use crate::chart::escaped;
use crate::summary::{Found, RunRow};
use crate::table;
use std::fmt::Write;

const STYLE: &str = "
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f4f6f8; color: #1f2933;
  font: 15px/1.5 system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 36px 0 12px; }
p { margin: 0 0 12px; max-width: 78ch; }
.quiet { color: #64707d; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 14px; margin: 24px 0 0; }
.fact, figure, .table { background: #fff; border: 1px solid #dde3e9; border-radius: 8px; }
.fact { padding: 14px 16px; }
.fact b { display: block; font-size: 21px; line-height: 1.3; overflow-wrap: anywhere; }
.fact span { font-size: 13px; color: #64707d; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 9px; text-align: right; white-space: nowrap; border-bottom: 1px solid #e9edf1; }
th { font-weight: 600; color: #64707d; background: #fafbfc; white-space: normal; vertical-align: bottom; }
td:first-child { white-space: normal; overflow-wrap: anywhere; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
tr:last-child td { border-bottom: 0; }
tr.baseline td { background: #eef4ff; font-weight: 600; }
tr.failed td { color: #9f2d20; text-align: left; white-space: normal; }
figure { margin: 0 0 18px; padding: 10px 12px; }
figure svg { display: block; width: 100%; height: auto; }
code { font-size: 13px; }
@media (max-width: 1180px) {
table, tbody { display: block; }
thead { display: none; }
tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(128px, 1fr)); padding: 8px 4px;
  border-bottom: 1px solid #dde3e9; }
tr:last-child { border-bottom: 0; }
tr.baseline { background: #eef4ff; }
tbody td { display: block; text-align: left; padding: 4px 10px; border: 0; white-space: normal; }
td:first-child { grid-column: 1 / -1; font-size: 15px; font-weight: 600; }
tr.failed td { grid-column: 1 / -1; }
td[data-head]::before { content: attr(data-head); display: block; font-size: 12px; font-weight: 400; color: #64707d; }
}
";

/// A picture of the page, and its file.
pub struct Picture {
    pub file: &'static str,
    pub svg: String,
}

/// `warmup`: steps that were not timed.
pub fn html(found: &Found, baseline: &RunRow, pictures: &[Picture], warmup: usize) -> String {
    let mut page = String::new();
    // Writing to a String does not fail.
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>flatshard: strategies side by side</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <h1>Strategies side by side</h1>\n<p class=\"quiet\">{}</p>\n",
        escaped(&lead(found, baseline))
    );
    page += "<div class=\"facts\">\n";
    for (value, meaning) in facts(found, baseline) {
        let _ =
            writeln!(page, "<div class=\"fact\"><b>{}</b><span>{}</span></div>", escaped(&value), escaped(&meaning));
    }
    page += "</div>\n<h2>All runs</h2>\n<div class=\"table\"><table>\n<thead><tr>";
    for head in table::HEAD {
        let _ = write!(page, "<th>{}</th>", escaped(head));
    }
    page += "</tr></thead>\n<tbody>\n";
    for row in &found.rows {
        page += if row.name == baseline.name { "<tr class=\"baseline\">" } else { "<tr>" };
        // On narrow screens a row is a card, and each value but the name says what it is.
        for (i, (head, cell)) in table::HEAD.iter().zip(table::cells(row, baseline)).enumerate() {
            let says = if i == 0 { String::new() } else { format!(" data-head=\"{}\"", escaped(head)) };
            let _ = write!(page, "<td{says}>{}</td>", escaped(&cell));
        }
        page += "</tr>\n";
    }
    for failed in &found.failed {
        let (name, message) = (escaped(&failed.name), escaped(&failed.message));
        let rest = table::HEAD.len() - 1;
        let _ = writeln!(page, "<tr class=\"failed\"><td>{name}</td><td colspan=\"{rest}\">{message}</td></tr>");
    }
    let _ = write!(
        page,
        "</tbody></table></div>\n<p class=\"quiet\" style=\"margin-top:12px\">Medians over steps, without the first {warmup}, \
         and over rounds. Speed and memory are ratios to {}. Exposed: what the computing thread spent in \
         collectives, and its share of the step. Loss apart: the largest difference of any step, \
         relative to the baseline's loss. Bytes and \
         times are those of rank 0.{}</p>\n<h2>Pictures</h2>\n",
        escaped(&baseline.name),
        if found.rows.iter().any(RunRow::is_peer) {
            " PyTorch's runs train on other tokens, so their losses are not compared; their communication is not measured."
        } else {
            ""
        }
    );
    for picture in pictures {
        let _ = writeln!(page, "<figure>{}</figure>", picture.svg);
    }
    page += "</main>\n</body>\n</html>\n";
    page
}

/// What was run, in a line.
fn lead(found: &Found, baseline: &RunRow) -> String {
    let header = &baseline.curve.header;
    let mut parts = vec![format!("{} runs", found.rows.len() + found.failed.len())];
    if !found.failed.is_empty() {
        parts.push(format!("{} of them failed", found.failed.len()));
    }
    if let Some(params) = header.params {
        let arch = header.config["model"]["arch"].as_str().unwrap_or("model");
        parts.push(format!("a {arch} of {} parameters", table::grouped(params as f64)));
    }
    if let Some(ranks) = header.world_size {
        let device = header.device.as_str().or(header.device["kind"].as_str());
        parts.push(format!("{ranks} ranks{}", device.map_or(String::new(), |device| format!(" on {device}"))));
    }
    let tokens = baseline.curve.steps.values().next_back().and_then(|step| step.tokens);
    let each = tokens.map_or(String::new(), |n| format!(" of {} tokens", table::grouped(n as f64)));
    parts.push(format!("{} steps{each}", baseline.curve.steps.len()));
    parts.join(", ") + "."
}

/// (what, of what): the best of each cost.
fn facts(found: &Found, baseline: &RunRow) -> Vec<(String, String)> {
    let best = |value: &dyn Fn(&RunRow) -> Option<f64>| {
        let known = found.rows.iter().filter_map(|row| Some((row, value(row)?)));
        known.max_by(|a, b| a.1.total_cmp(&b.1))
    };
    let peak = |row: &RunRow| row.peak_mem_bytes.map(|n| n as f64);
    let mut facts = vec![];
    if let Some((row, speed)) = best(&RunRow::speed) {
        let times = baseline.speed().map_or(String::new(), |base| format!(", {:.2}x {}", speed / base, baseline.name));
        facts.push((row.name.clone(), format!("fastest: {} tokens/s{times}", table::grouped(speed))));
    }
    if let Some((row, bytes)) = best(&|row| peak(row).map(|n| -n)) {
        let times = peak(baseline).map_or(String::new(), |base| format!(", {:.2}x {}", -bytes / base, baseline.name));
        facts.push((row.name.clone(), format!("least memory: {} MiB a rank{times}", table::mib(-bytes, 0))));
    }
    if let Some((row, share)) = best(&|row| row.exposed_share().map(|share| -share)) {
        facts.push((row.name.clone(), format!("least exposed communication: {:.1} % of a step", -100.0 * share)));
    }
    let ours = || found.rows.iter().filter(|row| !row.is_peer() && row.name != baseline.name);
    let same = ours().filter(|row| row.difference(baseline) == Some(0.0)).count();
    facts.push((format!("{same} of {}", ours().count()), format!("have the losses of {} bit for bit", baseline.name)));
    facts
}
