//! What a run is for, by its settings: its name in a title, what its loss is the mean over, and what it is judged by.
//! Never draws.
use crate::curve::EvalMetrics;
use crate::summary::RunRow;
use serde_json::{Value, json};

/// A number of evaluations, and how it is written.
pub struct Measure {
    pub title: &'static str,
    /// Above a column of a table.
    pub column: &'static str,
    pub value: fn(&EvalMetrics) -> Option<f64>,
    pub text: fn(f64) -> String,
    /// More is better.
    pub rises: bool,
}

const LOSS: Measure =
    Measure { title: "evaluation loss", column: "eval loss", value: |e| e.loss, text: four_digits, rises: false };
const PERPLEXITY: Measure = Measure {
    title: "evaluation perplexity",
    column: "eval perplexity",
    value: |e| e.loss.map(f64::exp),
    text: |x| format!("{x:.2}"),
    rises: false,
};
const ACCURACY: Measure = Measure {
    title: "evaluation accuracy",
    column: "eval accuracy",
    value: |e| e.reward_accuracy.or(e.accuracy),
    text: |x| format!("{:.1} %", 100.0 * x),
    rises: true,
};
const MARGIN: Measure = Measure {
    title: "evaluation reward margin",
    column: "eval margin",
    value: |e| e.reward_margin,
    text: four_digits,
    rises: true,
};
const REWARD: Measure = Measure {
    title: "evaluation reward",
    column: "eval reward",
    value: |e| e.reward_mean,
    text: four_digits,
    rises: true,
};

pub fn four_digits(x: f64) -> String {
    format!("{x:.4}")
}

/// A kind of training.
pub struct TrainingTask {
    /// What one run is called, and several.
    pub names: [&'static str; 2],
    /// What its loss is the mean over.
    pub loss_over: &'static str,
    /// Its steps have rewards, and their loss says little.
    pub rewarded: bool,
    /// Runs are compared by their models, not by what their training costs.
    pub about_models: bool,
    /// The first one ranks runs.
    pub measures: &'static [Measure],
    /// Settings that change what the first measure means.
    scale: &'static [(&'static str, &'static str)],
}

const TOKENS: TrainingTask = TrainingTask {
    names: ["fine-tune", "fine-tunes"],
    loss_over: "per token",
    rewarded: false,
    about_models: true,
    measures: &[LOSS, PERPLEXITY],
    scale: &[],
};
static FINE_TUNE: TrainingTask = TOKENS;
// Its evaluations report the cross entropy, as those of fine-tunes do.
static DISTILLATION: TrainingTask = TrainingTask { names: ["distillation", "distillations"], ..TOKENS };
static SCRATCH: TrainingTask =
    TrainingTask { names: ["training from scratch", "trainings from scratch"], about_models: false, ..TOKENS };
/// The task of a log, or of another engine.
static UNKNOWN: TrainingTask = TrainingTask { names: [""; 2], about_models: false, ..TOKENS };
const PAIRS: TrainingTask =
    TrainingTask { names: ["DPO"; 2], loss_over: "mean over pairs", measures: &[ACCURACY, MARGIN, LOSS], ..TOKENS };
static DPO: TrainingTask = PAIRS;
static REWARD_MODEL: TrainingTask = TrainingTask { names: ["reward model", "reward models"], ..PAIRS };
static KTO: TrainingTask = TrainingTask {
    names: ["KTO"; 2],
    loss_over: "mean over answers",
    measures: &[MARGIN, LOSS],
    scale: &[("objective", "beta")],
    ..TOKENS
};
static GRPO: TrainingTask = TrainingTask {
    names: ["GRPO"; 2],
    loss_over: "",
    rewarded: true,
    measures: &[REWARD],
    scale: &[
        ("objective", "reward"),
        ("objective", "reward_weights"),
        ("generate", "max_new_tokens"),
        ("generate", "temperature"),
        ("generate", "top_k"),
        ("generate", "top_p"),
        ("generate", "min_p"),
    ],
    ..TOKENS
};

impl TrainingTask {
    pub fn of(row: &RunRow) -> &'static TrainingTask {
        let config = &row.curve.header.config;
        match config["objective"]["objective"].as_str() {
            None => &UNKNOWN,
            _ if row.is_peer() => &UNKNOWN,
            _ if !config["objective"]["teacher"].is_null() => &DISTILLATION,
            Some("dpo") => &DPO,
            Some("kto") => &KTO,
            Some("rm") => &REWARD_MODEL,
            Some("grpo") => &GRPO,
            _ if config["model"]["pretrain"].is_null() => &SCRATCH,
            _ => &FINE_TUNE,
        }
    }
}

/// What all runs agree on; None where they do not.
pub fn shared<T: PartialEq>(rows: &[&RunRow], of: impl Fn(&RunRow) -> Option<T>) -> Option<T> {
    let first = of(rows.first()?)?;
    rows.iter().all(|row| of(row).as_ref() == Some(&first)).then_some(first)
}

/// The first and the last evaluation that has the number: (step, number).
pub fn before_and_after(row: &RunRow, measure: &Measure) -> Option<[(u64, f64); 2]> {
    let known = || row.curve.evals.iter().filter_map(|(&step, eval)| Some((step, (measure.value)(eval)?)));
    Some([known().next()?, known().next_back()?])
}

/// What the number that ranks a run is of. Numbers are comparable only where this is equal; None without a number.
fn judged_on(row: &RunRow) -> Option<Value> {
    let (task, config) = (TrainingTask::of(row), &row.curve.header.config);
    let measure = &task.measures[0];
    let [_, (step, _)] = before_and_after(row, measure)?;
    let eval = &row.curve.evals[&step];
    let own_rows = ["dataset", "split", "eval_split", "held_out", "max_samples"];
    let keys = if config["data"]["eval_dataset"].is_null() { &own_rows[..] } else { &["eval_dataset", "eval_split"] };
    let rows: Vec<&Value> = keys.iter().map(|key| &config["data"][key]).collect();
    let scale: Vec<&Value> = task.scale.iter().map(|(section, key)| &config[section][key]).collect();
    // Rows that another tokenizer or template reads have other numbers of tokens.
    let size = [eval.tokens, eval.pairs, eval.samples, eval.prompts];
    Some(json!([task.loss_over, measure.title, rows, scale, size]))
}

/// The best runs by their last evaluation, several if they are equal, and the runs that are not evaluated as the
/// baseline is, which have no rank. None is best where no two runs are comparable.
pub fn best<'r>(rows: &[&'r RunRow], baseline: &'r RunRow) -> (Vec<&'r RunRow>, Vec<&'r RunRow>) {
    let base = std::iter::once(baseline).chain(rows.iter().copied()).find_map(judged_on);
    let (alike, others): (Vec<&RunRow>, Vec<&RunRow>) =
        rows.iter().partition(|row| base.is_some() && judged_on(row) == base);
    let merit = |row: &RunRow| {
        let measure = &TrainingTask::of(row).measures[0];
        let [_, (_, after)] = before_and_after(row, measure)?;
        Some(if measure.rises { after } else { -after })
    };
    let most = alike.iter().filter_map(|row| merit(row)).max_by(f64::total_cmp);
    let best = alike.iter().copied().filter(|row| alike.len() > 1 && merit(row) == most).collect();
    (best, others)
}
