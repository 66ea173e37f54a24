//! The title of a page and its cards: (value, meaning). Never computes results.
use crate::summary::RunRow;
use crate::table;
use crate::task::{Measure, TrainingTask, before_and_after, four_digits, shared};
use std::path::Path;

/// `NAME, NAME: LoRA fine-tunes of MODEL`; only the names where a task is unknown.
pub fn title(rows: &[&RunRow]) -> String {
    const MOST: usize = 4;
    let names: Vec<&str> = rows.iter().take(MOST).map(|row| row.name.as_str()).collect();
    let more = if rows.len() > MOST { format!(" and {} more", rows.len() - MOST) } else { String::new() };
    let names = names.join(", ") + &more;
    let tasks: Vec<&TrainingTask> = rows.iter().map(|row| TrainingTask::of(row)).collect();
    if tasks.iter().any(|task| task.names[0].is_empty()) {
        return names;
    }
    let mut kinds: Vec<&str> = vec![];
    for task in &tasks {
        let several = tasks.iter().filter(|other| other.names == task.names).count() > 1;
        let kind = task.names[usize::from(several)];
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let full = |row: &RunRow| row.curve.header.config["lora"]["rank"].is_null();
    let adapters = if shared(rows, |row| Some(full(row))) == Some(false) { "LoRA " } else { "" };
    let model = shared(rows, |row| row.curve.header.config["model"]["pretrain"].as_str().map(String::from));
    let last = |model: &String| Path::new(model).file_name().map(|name| name.to_string_lossy().into_owned());
    let model = model.map_or(String::new(), |model| format!(" of {}", last(&model).unwrap_or(model)));
    format!("{names}: {adapters}{}{model}", kinds.join(" and "))
}

/// `1.9 → 1.2`, and of which evaluations.
pub fn evaluated(row: &RunRow, measure: &Measure) -> Option<[String; 2]> {
    let [(first, before), (last, after)] = before_and_after(row, measure)?;
    if first == last {
        return Some([(measure.text)(after), format!("{} of step {last}", measure.title)]);
    }
    let start = if first == 0 { "before training".to_string() } else { format!("of step {first}") };
    let change = format!("{} → {}", (measure.text)(before), (measure.text)(after));
    Some([change, format!("{} {start} and of step {last}", measure.title)])
}

/// `0.4 → 0.6`: mean rewards of the samples of the first and the last step.
pub fn rewards(row: &RunRow) -> Option<String> {
    let steps = &row.curve.steps;
    let ends = [steps.first_key_value()?, steps.last_key_value()?].map(|(_, step)| step.reward_mean);
    Some(format!("{} → {}", four_digits(ends[0]?), four_digits(ends[1]?)))
}

pub fn tokens_seen(row: &RunRow) -> Option<u64> {
    Some(row.curve.steps.values().filter_map(|step| step.tokens).sum()).filter(|&tokens| tokens > 0)
}

/// How far the run is: tokens seen, and the time left.
fn progress(row: &RunRow) -> Vec<[String; 2]> {
    let seen = tokens_seen(row).map(|tokens| [table::grouped(tokens as f64), "tokens seen".into()]);
    let last = row.curve.header.config["run"]["max_steps"].as_u64().filter(|_| !row.curve.ended);
    let left = last.map(|last| last.saturating_sub(row.curve.last())).filter(|&left| left > 0);
    let left = left.zip(row.step_time_s).map(|(left, seconds)| {
        let minutes = (left as f64 * seconds / 60.0).ceil() as u64;
        let text =
            if minutes < 60 { format!("{minutes} min") } else { format!("{} h {} min", minutes / 60, minutes % 60) };
        [text, format!("left, {left} steps")]
    });
    seen.into_iter().chain(left).collect()
}

fn peak(row: &RunRow) -> Option<f64> {
    row.peak_mem_bytes.map(|n| n as f64)
}

/// The state of a single run: what it learned, how far it is, and what it costs.
pub fn state(row: &RunRow) -> Vec<[String; 2]> {
    let task = TrainingTask::of(row);
    let mut facts: Vec<[String; 2]> = task.measures.iter().filter_map(|measure| evaluated(row, measure)).collect();
    let (first, last) = (row.curve.first(), row.curve.last());
    facts.extend(match task.rewarded {
        true => rewards(row).map(|text| [text, format!("reward of the samples of steps {first} and {last}")]),
        false => row.last_loss().map(|loss| [four_digits(loss), format!("loss of step {last}")]),
    });
    facts.extend(progress(row));
    facts.extend(row.speed().map(|speed| [table::grouped(speed), "tokens/s, median".into()]));
    facts.extend(peak(row).map(|bytes| [format!("{} MiB", table::mib(bytes, 0)), "peak memory per rank".into()]));
    facts.extend(
        row.exposed_share().map(|x| [format!("{:.1} %", 100.0 * x), "of a step in exposed communication".into()]),
    );
    facts
}

/// The best of each cost.
pub fn costs(rows: &[&RunRow], baseline: &RunRow) -> Vec<[String; 2]> {
    let mut facts = vec![];
    let ratio = |row: &RunRow, x: Option<f64>| {
        let other = x.filter(|_| row.name != baseline.name);
        other.map_or(String::new(), |x| format!(", {x:.2}x {}", baseline.name))
    };
    let best = |value: &dyn Fn(&RunRow) -> Option<f64>| {
        let fair = rows.iter().filter(|row| row.is_comparable(baseline));
        let known = fair.filter_map(|row| Some((*row, value(row)?)));
        known.max_by(|a, b| a.1.total_cmp(&b.1))
    };
    if let Some((row, speed)) = best(&RunRow::speed) {
        let times = ratio(row, baseline.speed().map(|base| speed / base));
        facts.push([row.name.clone(), format!("fastest: {} tokens/s{times}", table::grouped(speed))]);
    }
    if let Some((row, bytes)) = best(&|row| peak(row).map(|n| -n)) {
        let times = ratio(row, peak(baseline).map(|base| -bytes / base));
        facts.push([row.name.clone(), format!("least memory: {} MiB per rank{times}", table::mib(-bytes, 0))]);
    }
    if let Some((row, share)) = best(&|row| row.exposed_share().map(|share| -share)) {
        facts.push([row.name.clone(), format!("least exposed communication: {:.1} % of a step", -100.0 * share)]);
    }
    let ours = || rows.iter().filter(|row| row.difference(baseline).is_some() && row.name != baseline.name);
    if ours().count() > 0 {
        let same = ours().filter(|row| row.difference(baseline) == Some(0.0)).count();
        facts.push([
            format!("{same} of {}", ours().count()),
            format!("have the losses of {} bit for bit", baseline.name),
        ]);
    }
    facts
}
