//! The results of a chaos run, as a table and as JSON. Never measures.
use super::inflict::FaultRecord;
use super::proof::ChaosProof;
use flatshard::base::{Error, Result};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::Path;

/// Results of one kind of fault; seconds are (median, largest).
#[derive(Serialize, Debug, PartialEq)]
pub struct ReportRow {
    pub kind: &'static str,
    pub count: usize,
    pub noticed_s: Option<[f64; 2]>,
    pub first_step_s: [f64; 2],
    pub new_step_s: [f64; 2],
    pub steps_lost: [f64; 2],
}

/// One row per kind, in order of first occurrence.
pub fn rows(records: &[FaultRecord]) -> Vec<ReportRow> {
    let mut kinds: Vec<&'static str> = records.iter().map(|r| r.kind).collect();
    let mut known = Vec::new();
    kinds.retain(|kind| !known.contains(kind) && (known.push(*kind), true).1);
    let row = |kind: &'static str| {
        let all: Vec<&FaultRecord> = records.iter().filter(|r| r.kind == kind).collect();
        let of = |value: &dyn Fn(&FaultRecord) -> f64| spread(all.iter().map(|r| value(r)).collect());
        ReportRow {
            kind,
            count: all.len(),
            noticed_s: all.iter().map(|r| r.noticed_s).collect::<Option<Vec<f64>>>().map(spread),
            first_step_s: of(&|r| r.first_step_s),
            new_step_s: of(&|r| r.new_step_s),
            steps_lost: of(&|r| r.steps_lost as f64),
        }
    };
    kinds.into_iter().map(row).collect()
}

/// Median (the upper one of an even number) and largest.
fn spread(mut values: Vec<f64>) -> [f64; 2] {
    values.sort_by(f64::total_cmp);
    [values.get(values.len() / 2).copied().unwrap_or(0.0), values.last().copied().unwrap_or(0.0)]
}

const HEAD: [&str; 6] = ["fault", "count", "noticed (s)", "first step (s)", "first new step (s)", "steps lost"];

/// The table for the terminal. Pairs are median and largest.
pub fn table(records: &[FaultRecord]) -> String {
    let pair = |[median, largest]: [f64; 2]| format!("{median:.2} {largest:.2}");
    let cells = |row: ReportRow| {
        [
            row.kind.to_string(),
            row.count.to_string(),
            row.noticed_s.map_or("-".into(), pair),
            pair(row.first_step_s),
            pair(row.new_step_s),
            format!("{:.0} {:.0}", row.steps_lost[0], row.steps_lost[1]),
        ]
    };
    let lines: Vec<[String; 6]> =
        std::iter::once(HEAD.map(String::from)).chain(rows(records).into_iter().map(cells)).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let line = |cells: &[String; 6]| {
        let padded = cells.iter().enumerate().map(|(i, cell)| match i {
            0 => format!("{cell:<w$}", w = width(i)),
            _ => format!("{cell:>w$}", w = width(i)),
        });
        padded.collect::<Vec<_>>().join("  ")
    };
    lines.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// The JSON file: parameters, one line per fault, the rows of the table, and the proof.
pub fn write(
    path: &Path,
    about: Value,
    records: &[FaultRecord],
    unplanned: &[String],
    proof: &ChaosProof,
) -> Result<()> {
    let text = |value: Value| serde_json::to_string(&value).map_err(|e| Error::op("chaos", e.to_string()));
    let list = |values: Vec<Value>| -> Result<String> {
        let lines: Vec<String> = values.into_iter().map(text).collect::<Result<_>>()?;
        Ok(if lines.is_empty() { "[]".into() } else { format!("[\n    {}\n  ]", lines.join(",\n    ")) })
    };
    let parts = [
        ("about", text(about)?),
        ("by_kind", list(rows(records).iter().map(rounded).collect())?),
        ("proof", text(json!(proof))?),
        ("unplanned", list(unplanned.iter().map(|line| json!(line)).collect())?),
        ("faults", list(records.iter().map(rounded).collect())?),
    ];
    let body: Vec<String> = parts.iter().map(|(name, text)| format!("  \"{name}\": {text}")).collect();
    std::fs::write(path, format!("{{\n{}\n}}\n", body.join(",\n"))).map_err(|e| Error::io("write", path, e))
}

/// Rounds seconds to 0.1 ms: there may be a thousand of them.
fn rounded(of: impl Serialize) -> Value {
    let mut value = json!(of);
    for field in value.as_object_mut().into_iter().flat_map(|record| record.values_mut()) {
        for number in field.as_array_mut().into_iter().flatten() {
            round(number);
        }
        round(field);
    }
    value
}

fn round(number: &mut Value) {
    if let Some(seconds) = number.as_f64().filter(|_| number.is_f64()) {
        *number = json!((seconds * 1e4).round() / 1e4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_row_per_kind_with_median_and_largest() {
        let record = |kind, noticed: Option<f64>, lost| FaultRecord {
            kind,
            noticed_s: noticed,
            new_step_s: noticed.unwrap_or(9.0),
            steps_lost: lost,
            ..FaultRecord::default()
        };
        let records =
            [record("a", Some(0.5), 1), record("b", None, 7), record("a", Some(0.25), 2), record("a", Some(2.0), 3)];
        let rows = rows(&records);
        assert_eq!(rows.iter().map(|r| (r.kind, r.count)).collect::<Vec<_>>(), [("a", 3), ("b", 1)]);
        assert_eq!((rows[0].noticed_s, rows[1].noticed_s), (Some([0.5, 2.0]), None));
        assert_eq!((rows[0].steps_lost, rows[1].steps_lost), ([2.0, 3.0], [7.0, 7.0]));
        let table = table(&records);
        assert!(table.lines().nth(1).unwrap().ends_with("0.50 2.00         2 3"), "{table}");
    }
}
