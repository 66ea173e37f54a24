//! `compare A B`: compares two loss curves step by step. Never says which of the two is right.
use crate::chart::curves::{self, CurvePanel, Curves};
use crate::chart::{self, INK};
use crate::curve::Curve;
use crate::verdict::Verdict;
use flatshard::base::{Error, Result};
use std::path::{Path, PathBuf};

/// Compare two loss curves step by step; exit status 1 and the first diverging step if they differ
#[derive(clap::Args)]
pub struct CompareArgs {
    /// Baseline run: its metrics file, directory or log
    #[arg(required_unless_present = "deepspeed_log")]
    a: Option<PathBuf>,
    /// Run to compare with it
    #[arg(required_unless_present = "fsdp2_log")]
    b: Option<PathBuf>,
    /// Same as A, for scripts that compare FSDP2 with DeepSpeed
    #[arg(long, value_name = "FILE", conflicts_with_all = ["a", "b"], requires = "fsdp2_log")]
    deepspeed_log: Option<PathBuf>,
    /// Same as B
    #[arg(long, value_name = "FILE", conflicts_with_all = ["a", "b"], requires = "deepspeed_log")]
    fsdp2_log: Option<PathBuf>,
    /// Maximum |B - A| / |A| at any step
    #[arg(long, visible_alias = "tolerance", default_value_t = 0.05, value_name = "FRACTION")]
    threshold: f64,
    /// Draw both curves and their difference, as .svg, or .png in a build with the feature png; also --plot FILE
    /// [default file: compare.svg]
    #[arg(
        long,
        visible_alias = "output",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "compare.svg",
        value_name = "FILE"
    )]
    plot: Option<PathBuf>,
}

/// The first step at which the curves diverge, and why.
#[derive(Debug, PartialEq)]
pub struct Parted {
    pub step: u64,
    pub why: String,
}

/// The comparison of two curves.
#[derive(Debug, Default)]
pub struct Judgment {
    /// (step, |B - A| / |A|) for steps with finite losses in both.
    pub differences: Vec<(u64, f64)>,
    pub parted: Option<Parted>,
}

impl Judgment {
    /// The step with the largest difference.
    pub fn largest(&self) -> Option<(u64, f64)> {
        self.differences.iter().copied().max_by(|x, y| x.1.total_cmp(&y.1))
    }
}

/// A step that only one run has, or with a non-finite loss, counts as diverged: a run that died early or went to NaN
/// must not pass.
pub fn judge(a: &Curve, b: &Curve, threshold: f64) -> Judgment {
    let mut judgment = Judgment::default();
    let (first, last) = (a.first().min(b.first()), a.last().max(b.last()));
    for step in first..=last {
        let why = match (a.loss(step), b.loss(step)) {
            (None, None) => continue,
            (Some(_), None) => "B has no such step".into(),
            (None, Some(_)) => "A has no such step".into(),
            (Some(x), Some(y)) if !x.is_finite() || !y.is_finite() => {
                let which = if x.is_finite() {
                    "B"
                } else if y.is_finite() {
                    "A"
                } else {
                    "A and B"
                };
                format!("the loss of {which} is not finite")
            }
            (Some(x), Some(y)) => {
                let difference = if x == y { 0.0 } else { (y - x).abs() / x.abs() };
                judgment.differences.push((step, difference));
                if difference <= threshold {
                    continue;
                }
                format!("loss {x:.6} vs {y:.6}, {:.2} % apart", 100.0 * difference)
            }
        };
        judgment.parted.get_or_insert(Parted { step, why });
    }
    judgment
}

pub fn main(args: &CompareArgs) -> Result<Verdict> {
    if !(args.threshold >= 0.0 && args.threshold.is_finite()) {
        return Err(Error::input(format!("--threshold is {}; it must be 0 or more", args.threshold)));
    }
    let curve = |position: &Option<PathBuf>, named: &Option<PathBuf>| {
        let path = position.as_ref().or(named.as_ref()).ok_or_else(|| Error::input("two runs are needed: A and B"))?;
        Curve::with_steps(path)
    };
    let (a, b) = (curve(&args.a, &args.deepspeed_log)?, curve(&args.b, &args.fsdp2_log)?);
    for (name, curve) in [("A", &a), ("B", &b)] {
        if !curve.earlier.is_empty() {
            println!("note: {name} holds {} training stages, and the last one is compared", curve.earlier.len() + 1);
        }
        if let Some(engine) = &curve.header.engine {
            println!("note: {name} is {engine}, which trains on different tokens, so its losses are not comparable");
        }
    }
    if let Some(path) = &args.plot {
        plot(&a, &b, args.threshold, path)?;
    }
    let judgment = judge(&a, &b, args.threshold);
    for (name, curve) in [("A", &a), ("B", &b)] {
        let (first, last) = (curve.first(), curve.last());
        let loss = |step| curve.loss(step).unwrap_or(f64::NAN);
        println!(
            "{name}: steps {first} to {last}, loss {:.4} to {:.4} ({})",
            loss(first),
            loss(last),
            curve.path.display()
        );
    }
    if let Some((step, difference)) = judgment.largest() {
        println!("largest difference {:.4} % at step {step}", 100.0 * difference);
    }
    match judgment.parted {
        None => {
            println!("agree within {} %", 100.0 * args.threshold);
            Ok(Verdict::Good)
        }
        Some(Parted { step, why }) => {
            println!("diverged first at step {step}: {why} (threshold {} %)", 100.0 * args.threshold);
            Ok(Verdict::Bad)
        }
    }
}

fn plot(a: &Curve, b: &Curve, threshold: f64, path: &Path) -> Result<()> {
    let curve =
        |name: &str, color, dashes, points| curves::PlottedCurve { names: vec![name.into()], color, dashes, points };
    let both = vec![curve("A", INK, "", a.points()), curve("B", chart::color("fsdp"), "6 4", b.points())];
    let differences = judge(a, b, threshold).differences.into_iter().map(|(step, d)| (step as f64, d)).collect();
    let apart = CurvePanel {
        title: "|B - A| / |A|".into(),
        curves: vec![curve("", chart::color("fsdp"), "", differences)],
        log: false,
        mark: Some((threshold, "threshold".into())),
        height: 150.0,
    };
    let losses =
        CurvePanel { title: "loss (nats a token)".into(), curves: both, log: false, mark: None, height: 260.0 };
    let subtitle = format!("A: {}   B: {}", a.path.display(), b.path.display());
    let svg = Curves { title: "Two loss curves".into(), subtitle, panels: vec![losses, apart] }.svg();
    chart::save(&svg, path).map(|()| println!("plot: {}", path.display()))
}
