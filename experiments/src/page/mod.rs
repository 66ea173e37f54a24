//! The page of a set of runs: one self-contained HTML file, drawn by its own script from the numbers in it, for
//! `analyze` and `watch`. Never computes results, and loads nothing.
use crate::curve::{EvalMetrics, StepMetrics};
use crate::summary::RunRow;
use crate::task::{TrainingTask, shared};
use crate::{table, trace};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

mod cards;
mod models;
mod samples;
mod settings;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// Longer runs are thinned: a chart has no more pixels.
const MOST_STEPS: usize = 2000;
/// Larger traces get a link without a picture.
const LARGEST_TRACE: u64 = 64 << 20;

/// A run as the page shows it.
#[derive(Default)]
pub struct ShownRun<'r> {
    /// For a run without a row.
    pub name: &'r str,
    /// Its costs; None before its first step.
    pub row: Option<&'r RunRow>,
    /// `waiting`, `running`, `done` or `failed`.
    pub status: &'static str,
    /// Shown after the name.
    pub badge: String,
    /// Shown instead of costs.
    pub message: &'r str,
    pub traces: Vec<TraceLink>,
    /// Changes with the numbers of the run.
    pub version: String,
    /// The page has this version already, so its curves are not sent again.
    pub known: bool,
}

/// A trace file, and a picture of one of its steps.
#[derive(Clone)]
pub struct TraceLink {
    file: String,
    href: String,
    about: String,
    picture: Option<String>,
}

impl TraceLink {
    pub fn of(path: &Path, href: String) -> TraceLink {
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let small = path.metadata().is_ok_and(|m| m.len() <= LARGEST_TRACE);
        let drawn = small.then(|| trace::thumbnail(path).ok()).flatten();
        let (about, picture) = match drawn {
            Some((about, svg)) => (about, Some(format!("data:image/svg+xml,{}", encoded(&svg)))),
            None => (String::new(), None),
        };
        TraceLink { file, href, about, picture }
    }
    pub fn at(&self, href: String) -> TraceLink {
        TraceLink { href, ..self.clone() }
    }
    pub fn is_drawn(&self) -> bool {
        self.picture.is_some()
    }
}

/// Traces of a run that still exist. Their paths are relative to the run's working directory, which may be another one.
pub fn traces(row: &RunRow) -> Vec<PathBuf> {
    let dir = row.curve.path.parent().unwrap_or(Path::new("."));
    let found = row.curve.traces.iter().filter_map(|path| {
        let last: PathBuf = path.iter().rev().take(2).collect::<Vec<_>>().into_iter().rev().collect();
        [dir.join(path), dir.join(last), path.clone()].into_iter().find(|path| path.is_file())
    });
    found.collect()
}

/// The address of a file, for a page opened from disk.
pub fn file_url(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or(path.to_path_buf());
    format!("file://{}", encoded(&path.to_string_lossy()))
}

fn encoded(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~/=:'() ,".contains(&b);
    text.bytes().map(|b| if plain(b) && b != b' ' { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

/// All that the script draws. `warmup`: first steps that were not timed.
pub fn view(title: &str, runs: &[ShownRun], baseline: Option<&RunRow>, warmup: usize) -> Value {
    let rows: Vec<&RunRow> = runs.iter().filter_map(|run| run.row).collect();
    let failed = runs.iter().filter(|run| run.status == "failed").count();
    let about_models = models::are_compared(&rows);
    let cards = match (&rows[..], baseline) {
        ([row], _) => cards::state(row),
        (rows, Some(baseline)) if about_models => models::facts(rows, baseline),
        (rows, Some(baseline)) => cards::costs(rows, baseline),
        (_, None) => vec![],
    };
    let note = match baseline.filter(|_| about_models) {
        Some(baseline) => models::note(&rows, baseline, warmup),
        None => note(&rows, baseline, warmup),
    };
    let shown = |run: &ShownRun| {
        let mut value = shown(run, baseline);
        if let Some(row) = run.row.filter(|_| about_models) {
            let (cells, keys): (Vec<_>, Vec<_>) = models::cells(row, &rows).into_iter().unzip();
            (value["cells"], value["keys"]) = (json!(cells), json!(keys));
        }
        value
    };
    json!({
        "title": if about_models || runs.len() == 1 && rows.len() == 1 { cards::title(&rows) } else { title.into() },
        "lead": lead(&rows, runs.len(), failed, baseline, about_models),
        "note": note,
        "cards": cards,
        "about_models": about_models,
        "loss_over": shared(&rows, |row| Some(TrainingTask::of(row).loss_over)),
        // The curve that comes first.
        "main": if shared(&rows, |row| Some(TrainingTask::of(row).rewarded)) == Some(true) { "reward_mean" } else { "loss" },
        "settings": settings::table(&rows),
        "head": if about_models { models::head(&rows) } else { table::HEAD.to_vec() },
        "lanes": trace::legend(),
        "runs": runs.iter().map(shown).collect::<Vec<_>>(),
    })
}

/// `live`: the script polls the server.
pub fn html(view: &Value, live: bool) -> String {
    let mut view = view.clone();
    view["live"] = json!(live);
    let title = view["title"].as_str().unwrap_or_default();
    // Only `<` can end a script element. One pass, so that no data is taken for a placeholder.
    let fill = [
        ("title", crate::chart::escaped(title)),
        ("style", STYLE.into()),
        ("script", SCRIPT.into()),
        ("data", view.to_string().replace('<', "\\u003c")),
    ];
    let mut page = String::new();
    let mut rest = PAGE;
    while let Some((before, after)) = rest.split_once("{{") {
        let (name, after) = after.split_once("}}").unwrap_or((after, ""));
        page += before;
        page += fill.iter().find(|(known, _)| *known == name).map_or("", |(_, text)| text);
        rest = after;
    }
    page + rest
}

fn shown(run: &ShownRun, baseline: Option<&RunRow>) -> Value {
    let mut value = json!({
        "name": run.row.map_or(run.name, |row| &row.name),
        "status": run.status,
        "badge": run.badge,
        "message": run.message,
        "version": run.version,
        "losses_of": run.row.map(RunRow::losses_of),
        "baseline": run.row.zip(baseline).is_some_and(|(row, baseline)| row.name == baseline.name),
        "columns": (!run.known).then(|| run.row.map_or(json!({}), columns)),
        "evals": run.row.map_or(json!({}), evals),
        "samples": run.row.filter(|_| !run.known).map(|row| samples::shown(&row.curve)),
        "traces": run.traces.iter().map(|t| json!({"file": t.file, "href": t.href, "about": t.about, "picture": t.picture}))
            .collect::<Vec<_>>(),
    });
    if let Some((row, baseline)) = run.row.zip(baseline) {
        value["cells"] = json!(table::cells(row, baseline));
        value["keys"] = json!(table::keys(row, baseline));
        value["costs"] = json!({
            "speed": row.tokens_per_sec.map(|s| [s.median, s.low, s.high]),
            "rounds": row.rounds,
            "peak": row.peak_mem_bytes,
            "plan": row.curve.header.planned_bytes,
            "step_time": row.step_time_s,
            "exposed": row.exposed_comm_s,
            "comm": row.comm_bytes,
        });
    }
    value
}

/// The evaluations of a run by column, `[step, number]`.
fn evals(row: &RunRow) -> Value {
    let of = |value: fn(&EvalMetrics) -> Option<f64>| -> Vec<Value> {
        row.curve.evals.iter().filter_map(|(step, eval)| Some(json!([step, value(eval)?]))).collect()
    };
    json!({
        "loss": of(|e| e.loss),
        "reward_margin": of(|e| e.reward_margin),
        "reward_accuracy": of(|e| e.reward_accuracy),
        "accuracy": of(|e| e.accuracy),
        "reward_mean": of(|e| e.reward_mean),
    })
}

/// The curves of a run by column, one value per step, without columns that are empty.
fn columns(row: &RunRow) -> Value {
    let steps: Vec<&StepMetrics> = row.curve.steps.values().collect();
    // Over all steps, before thinning.
    let sums = |field: fn(&StepMetrics) -> Option<f64>| -> Vec<Option<f64>> {
        let mut sum = 0.0;
        let known = steps.iter().any(|step| field(step).is_some());
        let mut add = |step: &&StepMetrics| {
            sum += field(step).unwrap_or(0.0);
            known.then_some(sum)
        };
        steps.iter().map(&mut add).collect()
    };
    let (tokens, seconds) = (sums(|s| s.tokens.map(|n| n as f64)), sums(|s| s.step_time_s));
    let kept = thinned(&steps, MOST_STEPS);
    let column = |field: &dyn Fn(usize) -> Option<f64>| -> Value {
        let values: Vec<Option<f64>> = kept.iter().map(|&n| field(n).filter(|x| x.is_finite()).map(short)).collect();
        if values.iter().all(Option::is_none) { Value::Null } else { json!(values) }
    };
    let of = |field: fn(&StepMetrics) -> Option<f64>| column(&|n| field(steps[n]));
    let all = [
        ("step", json!(kept.iter().map(|&n| steps[n].step).collect::<Vec<_>>())),
        ("tokens_so_far", column(&|n| tokens[n])),
        ("seconds_so_far", column(&|n| seconds[n])),
        ("loss", of(|s| s.loss)),
        ("tokens_per_sec", of(|s| s.tokens_per_sec)),
        ("grad_norm", of(|s| s.grad_norm)),
        ("step_time_s", of(|s| s.step_time_s)),
        ("exposed_comm_s", of(|s| s.exposed_comm_s)),
        ("peak_mem_bytes", of(|s| s.peak_mem_bytes.map(|n| n as f64))),
        ("lr", of(|s| s.lr)),
        ("mfu", of(|s| s.mfu)),
        ("sol", of(|s| s.sol)),
        ("data_time_s", of(|s| s.data_time_s)),
        ("reward_chosen", of(|s| s.reward_chosen)),
        ("reward_rejected", of(|s| s.reward_rejected)),
        ("reward_margin", of(|s| s.reward_margin)),
        ("reward_accuracy", of(|s| s.reward_accuracy)),
        ("accuracy", of(|s| s.accuracy)),
        ("reward_mean", of(|s| s.reward_mean)),
        ("kl", of(|s| s.kl)),
        ("reverse_kl", of(|s| s.reverse_kl)),
        ("entropy", of(|s| s.entropy)),
        ("completion_tokens", of(|s| s.completion_tokens)),
    ];
    Value::Object(all.into_iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k.to_string(), v)).collect::<Map<_, _>>())
}

/// Nine digits: enough to tell losses apart, and a third of the size.
fn short(x: f64) -> f64 {
    format!("{x:.8e}").parse().unwrap_or(x)
}

/// The steps that stay: the first, the last, and of each stretch those with the lowest and the highest loss; a loss
/// that is not finite counts as the highest.
fn thinned(steps: &[&StepMetrics], most: usize) -> Vec<usize> {
    if steps.len() <= most {
        return (0..steps.len()).collect();
    }
    let stretch = steps.len().div_ceil(most / 2);
    let loss = |n: &usize| steps[*n].loss.unwrap_or(f64::INFINITY);
    let mut kept = vec![0, steps.len() - 1];
    for from in (0..steps.len()).step_by(stretch) {
        let here = || from..(from + stretch).min(steps.len());
        kept.extend(here().min_by(|a, b| loss(a).total_cmp(&loss(b))));
        kept.extend(here().max_by(|a, b| loss(a).total_cmp(&loss(b))));
    }
    kept.sort_unstable();
    kept.dedup();
    kept
}

/// One line about the runs.
fn lead(rows: &[&RunRow], runs: usize, failed: usize, baseline: Option<&RunRow>, about_models: bool) -> String {
    let mut parts = vec![format!("{runs} run{}", if runs == 1 { "" } else { "s" })];
    if failed > 0 {
        parts.push(format!("{failed} of them failed"));
    }
    let Some(baseline) = baseline else { return parts.join(", ") + "." };
    let header = &baseline.curve.header;
    let all = |alike: &dyn Fn(&RunRow) -> bool| rows.iter().all(|row| alike(row));
    if let Some(params) = header.params.filter(|_| all(&|row| row.curve.header.params == header.params)) {
        let arch = header.config["model"]["arch"].as_str().unwrap_or("model");
        parts.push(format!("a {arch} of {} parameters", table::grouped(params as f64)));
    }
    let ranks = header.world_size.filter(|_| all(&|row| row.curve.header.world_size == header.world_size));
    if let Some(ranks) = ranks.filter(|_| !rows.is_empty()) {
        let device = header.device.as_str().or(header.device["kind"].as_str());
        let plural = if ranks == 1 { "" } else { "s" };
        parts.push(format!("{ranks} rank{plural}{}", device.map_or(String::new(), |device| format!(" on {device}"))));
    }
    let tokens = baseline.curve.steps.values().next_back().and_then(|step| step.tokens);
    let tokens = tokens.filter(|_| all(&|row| row.is_comparable(baseline)));
    let each = tokens.map_or(String::new(), |n| format!(" of {} tokens", table::grouped(n as f64)));
    if !about_models || all(&|row| row.curve.steps.len() == baseline.curve.steps.len()) {
        parts.push(format!("{} steps{each}", baseline.curve.steps.len()));
    }
    parts.join(", ") + "."
}

fn note(rows: &[&RunRow], baseline: Option<&RunRow>, warmup: usize) -> String {
    let Some(baseline) = baseline else { return String::new() };
    let peers = if rows.iter().any(|row| row.is_peer()) {
        " PyTorch's runs train on other tokens, so their losses are not compared; their communication is not measured."
    } else {
        ""
    };
    let others = match rows.iter().any(|row| !row.is_comparable(baseline)) {
        true => format!(
            " *: steps of another number of tokens than those of {}, or a model of another size: speeds are not \
             comparable, and not ranked.",
            baseline.name
        ),
        false => String::new(),
    };
    let (rounds, name) = (if rows.iter().any(|row| row.rounds > 1) { " and rounds" } else { "" }, &baseline.name);
    format!(
        "Medians over steps{rounds}, without the first {warmup} steps. Speed and memory are ratios to {name}. \
         Exposed: time the computing thread spends in collectives, and its share of the step. \
         Loss apart: the largest difference of any step, relative to the loss of {name}, of runs with its objective. \
         Bytes and times are those of rank 0.{peers}{others}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_the_ends_and_the_extremes() {
        let mut steps: Vec<StepMetrics> =
            (0..100_000).map(|step| StepMetrics { step, loss: Some(1.0), ..StepMetrics::default() }).collect();
        (steps[777].loss, steps[50_001].loss, steps[90_000].loss) = (Some(9.0), None, Some(0.1));
        let steps: Vec<&StepMetrics> = steps.iter().collect();
        let kept = thinned(&steps, MOST_STEPS);
        assert!(kept.len() <= MOST_STEPS + 2 && kept.is_sorted(), "{}", kept.len());
        for n in [0, 777, 50_001, 90_000, 99_999] {
            assert!(kept.contains(&n), "{n}");
        }
        assert_eq!(thinned(&steps[..5], MOST_STEPS), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn data_cannot_leave_its_place() {
        let view = json!({"title": "<b>", "runs": ["</script><script>{{style}}"]});
        let page = html(&view, false);
        assert!(page.contains("<title>&lt;b&gt;</title>") && page.contains("\\u003c/script>\\u003cscript>{{style}}"));
        assert_eq!(page.matches("</script>").count(), PAGE.matches("</script>").count());
        assert_eq!(encoded("a b#<é"), "a%20b%23%3C%C3%A9");
    }
}
