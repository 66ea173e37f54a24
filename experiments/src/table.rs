//! Results as text: a table for the terminal, a CSV file, and the wording that both share with the page. Never computes
//! results.
use crate::summary::{Found, RunRow};
use flatshard::run::watch::report::count;
use serde_json::{Value, json};

/// What stands where nothing is known.
pub const UNKNOWN: &str = "–";

/// Columns of the table, for the terminal and the page.
pub const HEAD: [&str; 10] = [
    "run",
    "mesh",
    "tokens/s",
    "speed",
    "peak MiB",
    "memory",
    "comm MiB/step",
    "exposed",
    "loss first → last",
    "loss apart",
];

pub fn cells(row: &RunRow, baseline: &RunRow) -> [String; 10] {
    let or = |text: Option<String>| text.unwrap_or(UNKNOWN.into());
    let ratio = |x: Option<f64>, base: Option<f64>| or(x.zip(base).map(|(x, base)| format!("{:.2}x", x / base)));
    let peak = |row: &RunRow| row.peak_mem_bytes.map(|n| n as f64);
    let losses = row.first_loss().zip(row.last_loss()).filter(|_| !row.is_peer());
    [
        row.name.clone(),
        mesh(row) + &other_step(row, baseline),
        or(row.speed().map(grouped)),
        ratio(row.speed(), baseline.speed()) + if row.is_comparable(baseline) { "" } else { "*" },
        or(peak(row).map(|n| mib(n, 0))),
        ratio(peak(row), peak(baseline)),
        or(row.comm_bytes.map(|n| mib(n, 1))),
        or(exposed(row)),
        or(losses.map(|(first, last)| format!("{first:.4} → {last:.4}"))),
        or(apart(row, baseline)),
    ]
}

/// What [`cells`] are sorted by: numbers, or text; null where nothing is known.
pub fn keys(row: &RunRow, baseline: &RunRow) -> [Value; 10] {
    let peak = row.peak_mem_bytes;
    [
        json!(row.name),
        json!(mesh(row)),
        json!(row.speed()),
        json!(row.speed()),
        json!(peak),
        json!(peak),
        json!(row.comm_bytes),
        json!(row.exposed_comm_s),
        json!(row.last_loss().filter(|_| !row.is_peer())),
        json!(row.difference(baseline)),
    ]
}

/// Axes with more than one rank: `shard 2 x tp 2`.
pub fn mesh(row: &RunRow) -> String {
    let axes = [("dp_replicate", "replicate"), ("dp_shard", "shard"), ("sp", "ring"), ("tp", "tp")];
    let sizes = &row.curve.header.mesh;
    let size = |axis: &str| sizes.get(axis).copied().unwrap_or(1);
    let named: Vec<String> =
        axes.iter().filter(|(axis, _)| size(axis) > 1).map(|(axis, name)| format!("{name} {}", size(axis))).collect();
    match (named.is_empty(), row.curve.header.world_size) {
        (false, _) => named.join(" x "),
        (true, Some(1)) => "1 rank".into(),
        (true, Some(n)) => format!("{n} ranks"),
        (true, None) => UNKNOWN.into(),
    }
}

/// `, 1,024 tokens/step`, if that is not the baseline's.
fn other_step(row: &RunRow, baseline: &RunRow) -> String {
    let tokens = row.tokens_per_step().filter(|_| !row.is_comparable(baseline));
    tokens.map_or(String::new(), |tokens| format!(", {} tokens/step", grouped(tokens)))
}

/// `12.3 ms, 4 %`: what communication does not hide, and of a step.
pub fn exposed(row: &RunRow) -> Option<String> {
    Some(format!("{}, {:.0} %", milliseconds(1e3 * row.exposed_comm_s?), 100.0 * row.exposed_share()?))
}

/// To three digits at least.
pub fn milliseconds(x: f64) -> String {
    if x < 100.0 { format!("{x:.1} ms") } else { format!("{} ms", grouped(x)) }
}

/// How far the losses are from the baseline's.
pub fn apart(row: &RunRow, baseline: &RunRow) -> Option<String> {
    Some(match row.difference(baseline)? {
        _ if row.name == baseline.name => "baseline".into(),
        d if d.is_nan() => "not finite".into(),
        0.0 => "same bits".into(),
        d if d < 1e-3 => format!("{d:.1e}"),
        d => format!("{:.2} %", 100.0 * d),
    })
}

pub fn mib(bytes: f64, digits: usize) -> String {
    format!("{:.digits$}", bytes / (1u64 << 20) as f64)
}

/// A whole number with commas.
pub fn grouped(x: f64) -> String {
    let (sign, size) = (if x <= -0.5 { "-" } else { "" }, x.abs().round() as u64);
    format!("{sign}{}", count(size))
}

/// Left columns of text, right ones of numbers.
pub fn terminal(found: &Found, baseline: &RunRow) -> String {
    let rows: Vec<[String; 10]> = found.rows.iter().map(|row| cells(row, baseline)).collect();
    let head = HEAD.map(String::from);
    let wide = |column: usize| rows.iter().chain([&head]).map(|cells| cells[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEAD.len()).map(wide).collect();
    let line = |cells: &[String; 10]| {
        let padded = cells.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            let spaces = " ".repeat(width - cell.chars().count());
            if column < 2 { format!("{cell}{spaces}") } else { format!("{spaces}{cell}") }
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_string() + "\n"
    };
    let rule = widths.iter().map(|width| "-".repeat(*width)).collect::<Vec<_>>().join("  ") + "\n";
    let mut out = line(&head) + &rule + &rows.iter().map(line).collect::<String>();
    if found.rows.iter().any(|row| !row.is_comparable(baseline)) {
        out += &format!(
            "* steps of another number of tokens than {}'s, or a model of another size: speeds are not comparable\n",
            baseline.name
        );
    }
    for failed in &found.failed {
        out += &format!("failed: {}: {}\n", failed.name, failed.message);
    }
    out
}

/// One line a run, in units of the metrics file; an empty field is unknown.
pub fn csv(found: &Found, baseline: &RunRow) -> String {
    let columns = "name,status,engine,world_size,dp_replicate,dp_shard,sp,tp,rounds,steps,tokens_per_sec,tokens_per_sec_min,\
                   tokens_per_sec_max,trained_tokens_per_sec,relative_speed,step_time_s,forward_time_s,backward_time_s,\
                   optimizer_time_s,comm_time_s,exposed_comm_s,comm_bytes_per_step,\
                   peak_mem_bytes,relative_memory,planned_bytes,first_loss,last_loss,largest_loss_difference,message";
    let mut out = columns.to_string() + "\n";
    for row in &found.rows {
        let header = &row.curve.header;
        let number = |x: Option<f64>| x.map_or(String::new(), |x| x.to_string());
        let whole = |x: Option<u64>| x.map_or(String::new(), |x| x.to_string());
        let axis = |name: &str| whole(header.mesh.get(name).copied());
        let speed = row.tokens_per_sec;
        let over = |x: Option<f64>, base: Option<f64>| number(x.zip(base).map(|(x, base)| x / base));
        let peak = |row: &RunRow| row.peak_mem_bytes.map(|n| n as f64);
        let fields = [
            row.name.clone(),
            "done".into(),
            header.engine.clone().unwrap_or("flatshard".into()),
            whole(header.world_size),
            axis("dp_replicate"),
            axis("dp_shard"),
            axis("sp"),
            axis("tp"),
            row.rounds.to_string(),
            row.curve.steps.len().to_string(),
            number(speed.map(|s| s.median)),
            number(speed.map(|s| s.low)),
            number(speed.map(|s| s.high)),
            number(row.trained_tokens_per_sec),
            over(row.speed(), baseline.speed()),
            number(row.step_time_s),
            number(row.forward_time_s),
            number(row.backward_time_s),
            number(row.optimizer_time_s),
            number(row.comm_time_s),
            number(row.exposed_comm_s),
            number(row.comm_bytes),
            whole(row.peak_mem_bytes),
            over(peak(row), peak(baseline)),
            whole(header.planned_bytes.get("total").copied()),
            number(row.first_loss()),
            number(row.last_loss()),
            number(row.difference(baseline)),
            String::new(),
        ];
        out += &(fields.map(|field| quoted(&field)).join(",") + "\n");
    }
    for failed in &found.failed {
        let empty = ",".repeat(columns.matches(',').count() - 2);
        out += &format!("{},failed{empty},{}\n", quoted(&failed.name), quoted(&failed.message));
    }
    out
}

/// A field as RFC 4180 quotes it.
fn quoted(field: &str) -> String {
    match field.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")),
        false => field.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_fields() {
        assert_eq!(
            (grouped(1234567.4), grouped(999.6), grouped(12.0)),
            ("1,234,567".into(), "1,000".into(), "12".into())
        );
        assert_eq!((grouped(-1234.0), grouped(-123.0)), ("-1,234".into(), "-123".into()));
        assert_eq!(quoted("a \"b\", c"), "\"a \"\"b\"\", c\"");
        assert_eq!(mib(1572864.0, 1), "1.5");
    }
}
