//! `experiments compare` from outside: each verdict with its exit status and the step it names.
use super::common::{experiments, pretenders};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

fn compare(dir: &Path, more: &[&str]) -> (i32, String, String) {
    let ended = experiments(dir, &[&["compare"], more].concat());
    (ended.code, ended.out, ended.err)
}
/// A metrics file with these losses from step 1; NaN is written as null, as the trainer does.
fn losses(dir: &Path, name: &str, losses: &[f64]) {
    let line = |(i, loss): (usize, &f64)| {
        let loss = if loss.is_finite() { loss.to_string() } else { "null".into() };
        format!("{{\"event\":\"step\",\"step\":{},\"loss\":{loss}}}\n", i + 1)
    };
    let steps: String = losses.iter().enumerate().map(line).collect();
    fs::write(dir.join(name), format!("{{\"event\":\"run\",\"world_size\":2}}\n{steps}{{\"event\":\"end\"}}\n"))
        .unwrap();
}

#[test]
fn curves_within_the_threshold_agree() {
    let dir = TempDir::new().unwrap();
    losses(dir.path(), "a", &[4.0, 3.0, 2.0]);
    losses(dir.path(), "b", &[4.1, 3.0, 1.91]);
    let (code, out, _) = compare(dir.path(), &["a", "b"]);
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("4.5000 % at step 3") && out.contains("agree within 5 %"), "{out}");
    let (code, out, _) = compare(dir.path(), &["a", "b", "--threshold", "0.04"]);
    assert_eq!(code, 1);
    assert!(out.contains("diverged first at step 3"), "{out}");
    let (code, out, _) = compare(dir.path(), &["a", "b", "--threshold", "0"]);
    assert_eq!(code, 1);
    assert!(out.contains("diverged first at step 1"), "{out}");
    assert_eq!(compare(dir.path(), &["a", "a", "--threshold", "0"]).0, 0);
}

/// Metrics of `losses` are version 1, which has no `schema`.
#[test]
fn metrics_of_older_versions_are_read_and_newer_ones_refused() {
    let dir = TempDir::new().unwrap();
    losses(dir.path(), "a", &[4.0, 3.0, 2.0]);
    let text = fs::read_to_string(dir.path().join("a")).unwrap();
    for version in [2, 3] {
        let versioned = text.replace("\"run\"", &format!("\"run\",\"schema\":{version}"));
        fs::write(dir.path().join(version.to_string()), versioned).unwrap();
    }
    assert_eq!(compare(dir.path(), &["a", "2", "--threshold", "0"]).0, 0);
    let (code, _, err) = compare(dir.path(), &["a", "3"]);
    assert!(code == 2 && err.contains("metrics of schema 3, and this program reads up to 2"), "{err}");
}

#[test]
fn a_non_finite_or_missing_loss_does_not_agree() {
    let dir = TempDir::new().unwrap();
    losses(dir.path(), "a", &[4.0, 3.0, 2.0]);
    losses(dir.path(), "nan", &[4.0, f64::NAN, 2.0]);
    losses(dir.path(), "short", &[4.0, 3.0]);
    let cases = [
        (["a", "nan"], "step 2: the loss of B is not finite"),
        (["nan", "a"], "step 2: the loss of A is not finite"),
        (["nan", "nan"], "step 2: the loss of A and B is not finite"),
        (["a", "short"], "step 3: B has no such step"),
        (["short", "a"], "step 3: A has no such step"),
    ];
    for (files, says) in cases {
        let (code, out, _) = compare(dir.path(), &files);
        assert_eq!(code, 1, "{files:?}: {out}");
        assert!(out.contains(&format!("diverged first at {says}")), "{files:?}: {out}");
    }
}

#[test]
fn directories_are_accepted_and_the_later_line_of_a_repeated_step_counts() {
    let dir = TempDir::new().unwrap();
    fs::create_dir(dir.path().join("run")).unwrap();
    losses(&dir.path().join("run"), "metrics.jsonl", &[4.0, 3.0]);
    let twice = "{\"event\":\"step\",\"step\":1,\"loss\":9}\n{\"event\":\"step\",\"step\":2,\"lo\n\
                 {\"event\":\"step\",\"step\":1,\"loss\":4}\n{\"event\":\"step\",\"step\":2,\"loss\":3}\n";
    fs::write(dir.path().join("twice"), twice).unwrap();
    let (code, out, err) = compare(dir.path(), &["run", "twice", "--threshold", "0"]);
    assert_eq!(code, 0, "{out}{err}");
}

#[test]
fn bad_input_is_named() {
    let dir = TempDir::new().unwrap();
    losses(dir.path(), "a", &[4.0]);
    fs::write(dir.path().join("empty"), "").unwrap();
    fs::write(dir.path().join("text"), "a loss of words\n").unwrap();
    let cases: [(&[&str], &str); 8] = [
        (&["a", "no-such"], "no-such"),
        (&["empty", "a"], "empty: holds no step"),
        (&["a", "text"], "text, line 1"),
        (&["a", "a", "--threshold=-1"], "--threshold is -1"),
        (&["a"], "<B>"),
        (&["--deepspeed-log", "a"], "--fsdp2-log"),
        (&["--fsdp2_log", "a"], "--deepspeed-log"),
        (&["a", "--deepspeed_log", "a", "--fsdp2_log", "a"], "cannot be used with"),
    ];
    for (args, says) in cases {
        let (code, out, err) = compare(dir.path(), args);
        assert_eq!(code, 2, "{args:?}: {out}{err}");
        assert!(err.contains(says), "{args:?}: {err}");
        assert!(out.is_empty(), "{args:?}: {out}");
    }
}

#[test]
fn a_plot_is_an_image() {
    let dir = TempDir::new().unwrap();
    losses(dir.path(), "a", &[4.0, 3.0, 2.0]);
    losses(dir.path(), "b", &[4.0, f64::NAN, 2.5]);
    let (code, out, _) = compare(dir.path(), &["a", "b", "--plot"]);
    assert_eq!(code, 1, "{out}");
    let is_svg = |file: &str| fs::read(dir.path().join(file)).unwrap().starts_with(b"<svg");
    assert!(is_svg("compare.svg"));
    fs::remove_file(dir.path().join("compare.svg")).unwrap();
    assert_eq!(compare(dir.path(), &["--plot", "a", "a"]).0, 0);
    assert!(is_svg("compare.svg"));
    assert_eq!(compare(dir.path(), &["--plot", "y.svg", "a", "a"]).0, 0);
    assert!(is_svg("y.svg"));
    let (code, _, err) = compare(dir.path(), &["--plot", "y.png", "a", "a"]);
    // scripts/wheel.sh tries a program with the feature.
    assert!(code == 2 && err.contains("y.png") && err.contains("--features png"), "{code}: {err}");
    let (code, _, err) = compare(dir.path(), &["a", "a", "--plot", "y.jpg"]);
    assert!(code == 2 && err.contains("y.jpg"), "{err}");
    assert_eq!(compare(dir.path(), &["a", "a", "--plot=x.svg"]).0, 0);
    let svg = fs::read_to_string(dir.path().join("x.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.contains("threshold"), "{svg}");
    let (code, _, err) = compare(dir.path(), &["a", "a", "--plot=x.jpg"]);
    assert_eq!(code, 2);
    assert!(err.contains("x.jpg"), "{err}");
}

#[test]
fn logs_are_accepted_under_the_flags_of_comparison_scripts() {
    let dir = TempDir::new().unwrap();
    let deepspeed = "Train step of epoch 0: 50%|# | 1/2 [00:01<00:01, gpt_loss=4, lr=1e-3]\r\
                     Train step of epoch 0: 100%|##| 2/2 [00:02<00:00, gpt_loss=3, lr=1e-3]\n";
    fs::write(dir.path().join("1.log"), deepspeed).unwrap();
    let ours =
        |second: &str| format!("ranks    2\nstep 1/2  loss 4.100  lr 1.0e-3\nstep 2/2  loss {second}  lr 1.0e-3\n");
    fs::write(dir.path().join("2.log"), ours("3.0300")).unwrap();
    fs::write(dir.path().join("3.log"), ours("3.3000")).unwrap();
    let judged = |log: &str| {
        compare(dir.path(), &["--deepspeed_log", "1.log", "--fsdp2_log", log, "--tolerance", "0.05", "--plot", "x.svg"])
    };
    let (code, out, err) = judged("2.log");
    assert!(code == 0 && out.contains("largest difference 2.5000 % at step 1"), "{out}{err}");
    assert!(fs::read_to_string(dir.path().join("x.svg")).unwrap().starts_with("<svg "));
    let (code, out, _) = judged("3.log");
    assert!(code == 1 && out.contains("diverged first at step 2: loss 3.000000 vs 3.300000"), "{out}");
}

/// The texts in the chart.
fn texts(svg: &str) -> Vec<&str> {
    svg.lines().filter_map(|line| line.strip_prefix("<text ")?.split_once('>')?.1.strip_suffix("</text>")).collect()
}

#[test]
fn ticks_are_short_and_no_curve_runs_through_the_threshold() {
    let dir = TempDir::new().unwrap();
    losses(dir.path(), "a", &[4.0, 3.0, 2.0]);
    losses(dir.path(), "b", &[4.001, 3.0, 2.0009]);
    for threshold in ["0.001", "0.0006", "0.00003", "2e-7"] {
        experiments(dir.path(), &["compare", "a", "b", "--threshold", threshold, "--plot=x.svg"]);
        let svg = fs::read_to_string(dir.path().join("x.svg")).unwrap();
        let ticks: Vec<&str> = texts(&svg).into_iter().filter(|text| text.parse::<f64>().is_ok()).collect();
        assert!(ticks.len() > 8 && ticks.iter().all(|tick| tick.len() <= 7), "{threshold}: {ticks:?}");
        // The label starts to the right of all curves and lines.
        let end = |line: &str| line.split_once("x2=\"")?.1.split_once('"')?.0.parse::<f64>().ok();
        let right = svg.lines().filter_map(end).fold(0.0, f64::max);
        let word = svg.lines().find(|line| line.ends_with(">threshold</text>")).unwrap();
        let from: f64 = word.split('"').nth(1).unwrap().parse().unwrap();
        assert!(from > right && word.contains("text-anchor=\"start\""), "{threshold}: {word}, lines end at {right}");
    }
}

/// The commands of the docs page, with mock training binaries: `compare` gets what `run` writes.
#[test]
fn the_page_compares_what_run_writes() {
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/experiments.md")).unwrap();
    let line = |verb: &str| {
        let start = format!("experiments {verb} ");
        let line =
            page.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("no {verb} in the page"));
        line.split_whitespace().skip(1).map(String::from).collect::<Vec<_>>()
    };
    let dir = TempDir::new().unwrap();
    pretenders(dir.path(), "");
    let pretend = ["--bin-dir", "bin", "--python", "bin/none"];
    let run = [line("run"), pretend.map(String::from).to_vec()].concat();
    for words in [run, line("compare")] {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let ended = experiments(dir.path(), &words);
        assert_eq!(ended.code, 0, "{words:?}: {}{}", ended.out, ended.err);
    }
}
