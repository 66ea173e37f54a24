//! Runs compared by their models: fine-tunes, preferences, rewards and distillations whose settings of learning differ.
//! Never computes results.
use super::cards::{evaluated, rewards, tokens_seen};
use super::settings;
use crate::summary::RunRow;
use crate::table::{UNKNOWN, grouped, mib};
use crate::task::{Measure, TrainingTask, before_and_after, best, four_digits};
use serde_json::{Value, json};

/// Whether the page is about the models of the runs. Runs of one thing under several strategies are compared by cost.
pub fn are_compared(rows: &[&RunRow]) -> bool {
    rows.iter().all(|row| TrainingTask::of(row).about_models)
        && match rows {
            [] => false,
            [_] => true,
            rows => settings::learn_differently(rows),
        }
}

/// What the evaluations of any run measure.
fn measures(rows: &[&RunRow]) -> Vec<&'static Measure> {
    let mut all: Vec<&Measure> = vec![];
    for row in rows {
        let known = TrainingTask::of(row).measures.iter().filter(|measure| before_and_after(row, measure).is_some());
        for measure in known {
            if all.iter().all(|other| other.title != measure.title) {
                all.push(measure);
            }
        }
    }
    all
}

fn some_are_rewarded(rows: &[&RunRow], rewarded: bool) -> bool {
    rows.iter().any(|row| TrainingTask::of(row).rewarded == rewarded)
}

/// Columns of the table of runs.
pub fn head(rows: &[&RunRow]) -> Vec<&'static str> {
    let mut head = vec!["run"];
    head.extend(measures(rows).iter().map(|measure| measure.column));
    head.extend(some_are_rewarded(rows, true).then_some("reward first → last"));
    head.extend(some_are_rewarded(rows, false).then_some("loss first → last"));
    head.extend(["tokens seen", "steps", "tokens/s", "peak MiB"]);
    head
}

/// A run's cells under [`head`], and what they are sorted by.
pub fn cells(row: &RunRow, rows: &[&RunRow]) -> Vec<(String, Value)> {
    let task = TrainingTask::of(row);
    let cell = |text: Option<String>, key: Value| (text.unwrap_or(UNKNOWN.into()), key);
    let judged = |measure: &&Measure| {
        let own = task.measures.iter().find(|own| own.title == measure.title);
        let after = own.and_then(|own| before_and_after(row, own)).map(|[_, (_, after)]| after);
        cell(own.and_then(|own| evaluated(row, own)).map(|[change, _]| change), json!(after))
    };
    let count = |n: Option<u64>| cell(n.map(|n| grouped(n as f64)), json!(n));
    let mut cells = vec![cell(Some(row.name.clone()), json!(row.name))];
    cells.extend(measures(rows).iter().map(judged));
    if some_are_rewarded(rows, true) {
        let last = row.curve.steps.values().next_back().and_then(|step| step.reward_mean);
        cells.push(cell(rewards(row), json!(last)));
    }
    if some_are_rewarded(rows, false) {
        let ends = row.first_loss().zip(row.last_loss()).filter(|_| !task.rewarded);
        let text = ends.map(|(first, last)| format!("{} → {}", four_digits(first), four_digits(last)));
        cells.push(cell(text, json!(ends.map(|(_, last)| last))));
    }
    cells.push(count(tokens_seen(row)));
    cells.push(count(Some(row.curve.last())));
    cells.push(cell(row.speed().map(grouped), json!(row.speed())));
    cells.push(cell(row.peak_mem_bytes.map(|n| mib(n as f64, 0)), json!(row.peak_mem_bytes)));
    cells
}

fn names(rows: &[&RunRow]) -> String {
    rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// (value, meaning): which run is best, and the evaluations of each before and after.
pub fn facts(rows: &[&RunRow], baseline: &RunRow) -> Vec<[String; 2]> {
    const MOST: usize = 6;
    let (best, _) = best(rows, baseline);
    let first = best.first().map(|row| {
        let measure = &TrainingTask::of(row).measures[0];
        let so_far = if rows.iter().all(|row| row.curve.ended) { "" } else { " so far" };
        let share = if best.len() > 1 { "share the " } else { "" };
        let most = if measure.rises { "highest" } else { "lowest" };
        [names(&best), format!("{share}{most} {}{so_far}", measure.title)]
    });
    let each = rows.iter().take(MOST).filter_map(|row| {
        let [change, of] = TrainingTask::of(row).measures.iter().find_map(|measure| evaluated(row, measure))?;
        Some([change, format!("{}: {of}", row.name)])
    });
    first.into_iter().chain(each).collect()
}

/// What the numbers are of, and what is not compared.
pub fn note(rows: &[&RunRow], baseline: &RunRow, warmup: usize) -> String {
    let mut parts = vec![];
    if !measures(rows).is_empty() {
        parts.push("Evaluations are the first and the last one of a run; circles in the curves.".to_string());
    }
    parts.push(format!(
        "Speeds are medians over steps, without the first {warmup} steps. Bytes and times are those of rank 0."
    ));
    if rows.len() == 1 {
        return parts.join(" ");
    }
    let (best, others) = best(rows, baseline);
    if best.is_empty() {
        parts.push("No run is best: no two were evaluated on the same rows under the same settings.".into());
    } else if !others.is_empty() {
        let which = names(&others);
        parts.push(format!("Not ranked, because not evaluated on the same rows under the same settings: {which}."));
    }
    let seen = || rows.iter().filter_map(|row| tokens_seen(row));
    if let Some((least, most)) = seen().min().zip(seen().max()).filter(|(least, most)| 10 * most > 11 * least) {
        let (least, most) = (grouped(least as f64), grouped(most as f64));
        parts.push(format!("Training was not equally long: the runs saw from {least} to {most} tokens."));
    }
    parts.join(" ")
}
