//! `experiments analyze` from outside, on handmade metrics: correct numbers, complete files, and a page without
//! external resources.
use super::common::{experiments, view};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// A run whose steps take `seconds` each, but the first two 9 s; losses as given.
fn run(dir: &Path, name: &str, seconds: &[f64], exposed: f64, peak_mib: u64, losses: &[f64]) {
    let path = dir.join(name);
    fs::create_dir_all(&path).unwrap();
    let mut text = String::from(
        "{\"event\":\"run\",\"world_size\":4,\"params\":3000000,\"mesh\":{\"dp_replicate\":1,\"dp_shard\":2,\"sp\":1,\"tp\":2},\
         \"device\":\"cpu\",\"planned_bytes\":{\"params\":5,\"total\":77}}\n",
    );
    for (i, loss) in losses.iter().enumerate() {
        let seconds = if i < 2 { 9.0 } else { seconds[(i - 2) % seconds.len()] };
        let loss = if loss.is_finite() { loss.to_string() } else { "null".into() };
        text += &format!(
            "{{\"event\":\"step\",\"step\":{},\"loss\":{loss},\"tokens\":1000,\"tokens_per_sec\":{},\"step_time_s\":{seconds},\
             \"forward_time_s\":0.25,\"trained_tokens_per_sec\":50,\"comm_time_s\":0.5,\"exposed_comm_s\":{exposed},\"comm_bytes\":2097152,\"peak_mem_bytes\":{}}}\n",
            i + 1,
            1000.0 / seconds,
            peak_mib << 20,
        );
    }
    fs::write(path.join("metrics.jsonl"), text + "{\"event\":\"end\"}\n").unwrap();
}

/// The CSV file by run and column.
fn csv(path: &Path) -> BTreeMap<String, BTreeMap<String, String>> {
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    let head: Vec<&str> = lines.next().unwrap().split(',').collect();
    let row = |line: &str| {
        // Quoted fields hold no comma in these tests but in the message, which is last.
        let fields: Vec<String> = line.splitn(head.len(), ',').map(String::from).collect();
        assert_eq!(fields.len(), head.len(), "{line}");
        (fields[0].clone(), head.iter().map(|h| h.to_string()).zip(fields).collect())
    };
    lines.map(row).collect()
}

#[test]
fn numbers_match_the_metrics() {
    let dir = TempDir::new().unwrap();
    let losses = [4.0, 3.5, 3.0, 2.5, 2.0];
    run(dir.path(), "ddp_fp32", &[2.0, 1.0, 4.0], 0.5, 100, &losses);
    run(dir.path(), "zero1", &[1.0], 0.1, 50, &[4.0, 3.5, 3.03, 2.5, 2.0]);
    // Rounds: medians 2000, 1000, 500 tokens/s.
    run(dir.path(), "fsdp_manual", &[0.5], 0.1, 60, &losses);
    run(dir.path(), "fsdp_manual@2", &[1.0], 0.1, 70, &losses);
    run(dir.path(), "fsdp_manual@3", &[2.0], 0.1, 60, &losses);
    let ended = experiments(dir.path(), &["analyze", "--output-dir", "."]);
    assert_eq!(ended.code, 0, "{}", ended.err);
    let rows = csv(&dir.path().join("analysis/summary.csv"));
    let number = |run: &str, column: &str| rows[run][column].parse::<f64>().unwrap();
    let expected = [
        ("ddp_fp32", "tokens_per_sec", 500.0), // steps of 2, 1, 4 s: the median is 2 s
        ("ddp_fp32", "step_time_s", 2.0),
        ("ddp_fp32", "relative_speed", 1.0),
        ("ddp_fp32", "world_size", 4.0),
        ("ddp_fp32", "tp", 2.0),
        ("ddp_fp32", "planned_bytes", 77.0),
        ("ddp_fp32", "largest_loss_difference", 0.0),
        ("zero1", "relative_speed", 2.0),
        ("zero1", "relative_memory", 0.5),
        ("zero1", "exposed_comm_s", 0.1),
        ("zero1", "comm_bytes_per_step", 2097152.0),
        ("zero1", "first_loss", 4.0),
        ("zero1", "last_loss", 2.0),
        ("fsdp_manual", "rounds", 3.0),
        ("fsdp_manual", "tokens_per_sec", 1000.0),
        ("fsdp_manual", "tokens_per_sec_min", 500.0),
        ("fsdp_manual", "tokens_per_sec_max", 2000.0),
        ("fsdp_manual", "forward_time_s", 0.25),
        ("fsdp_manual", "trained_tokens_per_sec", 50.0),
        ("fsdp_manual", "peak_mem_bytes", (70u64 << 20) as f64),
    ];
    for (run, column, value) in expected {
        assert_eq!(number(run, column), value, "{run} {column}");
    }
    assert!((number("zero1", "largest_loss_difference") - 0.01).abs() < 1e-12);
    // The table says the same, in the order of the set.
    let line = |name: &str| ended.out.lines().position(|l| l.starts_with(name)).unwrap();
    assert!(line("ddp_fp32") < line("fsdp_manual") && line("fsdp_manual") < line("zero1"), "{}", ended.out);
    let text = ended.out.lines().nth(line("zero1")).unwrap();
    for part in ["shard 2 x tp 2", "1,000", "2.00x", "50", "0.50x", "2.0", "100 ms, 10 %", "1.00 %"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    assert!(ended.out.lines().nth(line("fsdp_manual")).unwrap().contains("same bits"), "{}", ended.out);
    // Another baseline, and all steps timed.
    let ended = experiments(dir.path(), &["analyze", "--output-dir", ".", "--baseline", "zero1", "--warmup", "0"]);
    assert_eq!(ended.code, 0, "{}", ended.err);
    let rows = csv(&dir.path().join("analysis/summary.csv"));
    assert_eq!(rows["ddp_fp32"]["step_time_s"], "4"); // 9, 9, 2, 1, 4
    assert_eq!(rows["zero1"]["relative_speed"], "1");
}

/// Losses of another objective and speeds of a model of another size say nothing next to the baseline's.
#[test]
fn only_what_is_alike_is_compared() {
    let dir = TempDir::new().unwrap();
    let none = experiments(dir.path(), &["analyze", "--output-dir", "."]);
    assert!(none.code == 2 && none.err.contains("no run that ended is there"), "{}", none.err);
    run(dir.path(), "ddp_fp32", &[2.0], 0.5, 100, &[4.0, 3.5, 3.0]);
    run(dir.path(), "zero1", &[2.0], 0.5, 100, &[4.0, 3.5, 3.03]);
    run(dir.path(), "dpo", &[1.0], 0.1, 50, &[0.7, 0.6, 0.5]);
    let metrics = dir.path().join("dpo/metrics.jsonl");
    let text = fs::read_to_string(&metrics).unwrap();
    let other = "\"params\":9000000,\"config\":{\"objective\":{\"objective\":\"dpo\"}}";
    fs::write(&metrics, text.replace("\"params\":3000000", other)).unwrap();
    let ended = experiments(dir.path(), &["analyze", "--output-dir", "."]);
    assert_eq!(ended.code, 0, "{}", ended.err);
    let rows = csv(&dir.path().join("analysis/summary.csv"));
    let differences = ["zero1", "dpo"].map(|run| rows[run]["largest_loss_difference"].clone());
    assert!(differences[0].starts_with("0.0") && differences[1].is_empty(), "{differences:?}");
    assert!(
        ended.out.contains("than ddp_fp32's, or a model of another size: speeds are not comparable"),
        "{}",
        ended.out
    );
    let page = fs::read_to_string(dir.path().join("analysis/report.html")).unwrap();
    assert!(page.contains("3 runs, 4 ranks on cpu, 3 steps") && page.contains("fastest: 500 tokens/s"), "{page}");
    let picture = fs::read_to_string(dir.path().join("analysis/loss.svg")).unwrap();
    let (losses, apart) = picture.split_once("|loss - loss of").unwrap();
    assert!(losses.contains(">dpo<") && !apart.contains(">dpo<"), "{picture}");
}

#[test]
fn charts_and_page_are_complete_and_self_contained() {
    let dir = TempDir::new().unwrap();
    run(dir.path(), "ddp_fp32", &[2.0], 0.5, 100, &[4.0, 3.5, 3.0]);
    run(dir.path(), "<odd & name>", &[2.0], 0.5, 100, &[4.0, f64::NAN, 3.0]);
    assert_eq!(experiments(dir.path(), &["analyze", "--output-dir", "."]).code, 0);
    let files = ["throughput.svg", "memory.svg", "communication.svg", "step_time.svg", "loss.svg"];
    for file in files {
        let picture = fs::read_to_string(dir.path().join("analysis").join(file)).unwrap();
        assert!(picture.starts_with("<svg") && picture.contains("width=\"960\""), "{file}: {picture}");
        assert!(picture.contains("ddp_fp32") && picture.ends_with("</svg>\n"), "{file}: {picture}");
    }
    let page = fs::read_to_string(dir.path().join("analysis/report.html")).unwrap();
    assert!(page.trim_end().ends_with("</html>") && page.contains("default-src 'none'"));
    for outside in ["<script src", "<img", "@import", "url(http", "url(/"] {
        assert!(!page.contains(outside), "{outside}");
    }
    // The one address is the name space of SVG, which nothing fetches.
    assert_eq!(page.matches("://").count(), page.matches("http://www.w3.org/2000/svg").count());
    assert!(!page.contains("<odd") && page.contains("\\u003codd & name>"));
    let data = page.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
    let view: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!(view["runs"][0]["columns"]["loss"], serde_json::json!([4.0, 3.5, 3.0]));
    assert_eq!(view["runs"][1]["columns"]["loss"], serde_json::json!([4.0, null, 3.0]));
    assert_eq!(
        (&view["runs"][0]["costs"]["plan"]["params"], &view["runs"][0]["costs"]["peak"]),
        (&5.into(), &(100 << 20).into())
    );
    assert!(page.contains("not finite"));
}

#[test]
fn failed_runs_are_shown_and_not_counted() {
    let dir = TempDir::new().unwrap();
    run(dir.path(), "ddp_fp32", &[2.0], 0.5, 100, &[4.0, 3.5, 3.0]);
    run(dir.path(), "tp2", &[2.0], 0.5, 100, &[4.0]);
    let status = "{\"ended\":\"failed\",\"message\":\"exit status 2: no \\\"tp\\\", yet\",\"command\":[]}";
    fs::write(dir.path().join("tp2/status.json"), status).unwrap();
    run(dir.path(), "ring2", &[2.0], 0.5, 100, &[4.0, 3.0]);
    let path = dir.path().join("ring2/metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("{\"event\":\"end\"}", "{\"event\":\"step\",\"st")).unwrap();
    run(dir.path(), "zero2", &[2.0], 0.5, 100, &[4.0, 3.0]);
    let path = dir.path().join("zero2/metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("{\"event\":\"end\"}", "{\"event\":\"error\",\"message\":\"rank 1 was lost\"}"))
        .unwrap();
    fs::create_dir(dir.path().join("not-a-run")).unwrap();
    let ended = experiments(dir.path(), &["analyze", "--output-dir", "."]);
    assert_eq!(ended.code, 0, "{}", ended.err);
    for line in
        ["failed: tp2: exit status 2: no \"tp\", yet", "failed: ring2: did not end", "failed: zero2: rank 1 was lost"]
    {
        assert!(ended.out.contains(line), "no {line} in {}", ended.out);
    }
    let rows = csv(&dir.path().join("analysis/summary.csv"));
    assert_eq!(rows.len(), 4);
    assert_eq!((rows["tp2"]["status"].as_str(), rows["tp2"]["tokens_per_sec"].as_str()), ("failed", ""));
    assert_eq!(rows["tp2"]["message"], "\"exit status 2: no \"\"tp\"\", yet\"");
    let page = fs::read_to_string(dir.path().join("analysis/report.html")).unwrap();
    assert!(page.contains("rank 1 was lost"));
}

#[test]
fn values_a_peer_does_not_report_are_unknown_not_zero() {
    let dir = TempDir::new().unwrap();
    run(dir.path(), "ddp_fp32", &[2.0], 0.5, 100, &[4.0, 3.5, 3.0]);
    fs::create_dir(dir.path().join("torch_ddp")).unwrap();
    let peer = "{\"event\":\"run\",\"engine\":\"torch 9 ddp\",\"world_size\":4,\"params\":3}\n\
                {\"event\":\"step\",\"step\":1,\"loss\":7.5,\"step_time_s\":4,\"tokens\":1000,\"tokens_per_sec\":250,\"peak_mem_bytes\":5}\n\
                {\"event\":\"end\"}\n";
    fs::write(dir.path().join("torch_ddp/metrics.jsonl"), peer).unwrap();
    let ended = experiments(dir.path(), &["analyze", "--output-dir", "."]);
    assert_eq!(ended.code, 0, "{}", ended.err);
    let row = &csv(&dir.path().join("analysis/summary.csv"))["torch_ddp"];
    assert_eq!((row["engine"].as_str(), row["relative_speed"].as_str()), ("torch 9 ddp", "0.5"));
    for column in ["comm_bytes_per_step", "exposed_comm_s", "largest_loss_difference"] {
        assert_eq!(row[column], "", "{column}");
    }
}

#[test]
fn bad_input_is_named() {
    let dir = TempDir::new().unwrap();
    run(dir.path(), "zero1", &[2.0], 0.5, 100, &[4.0]);
    fs::create_dir(dir.path().join("empty")).unwrap();
    let cases: [(&[&str], &[&str]); 3] = [
        (&["--output-dir", ".", "--baseline", "ddp_fp32"], &["--baseline ddp_fp32", "zero1"]),
        (&["--output-dir", "empty"], &["--output-dir empty", "no run that ended is there"]),
        (&["--output-dir", "nowhere"], &["--output-dir nowhere"]),
    ];
    for (args, says) in cases {
        let ended = experiments(dir.path(), &[&["analyze"], args].concat());
        assert_eq!(ended.code, 2, "{}", ended.out);
        says.iter().for_each(|part| assert!(ended.err.contains(part), "{}", ended.err));
    }
    // Without ddp_fp32 the first run is the baseline.
    let ended = experiments(dir.path(), &["analyze", "--experiment_dir", "."]);
    assert!(ended.code == 0 && ended.out.contains("baseline"), "{}{}", ended.out, ended.err);
    fs::create_dir(dir.path().join("text")).unwrap();
    fs::write(dir.path().join("text/metrics.jsonl"), "step 1\n").unwrap();
    let ended = experiments(dir.path(), &["analyze", "--output-dir", ".", "--baseline", "zero1"]);
    assert_eq!(ended.code, 2);
    assert!(ended.err.contains("text/metrics.jsonl, line 1"), "{}", ended.err);
}

#[test]
fn steps_of_other_sizes_are_marked_and_not_ranked() {
    let dir = TempDir::new().unwrap();
    run(dir.path(), "ddp_fp32", &[2.0], 0.5, 100, &[4.0, 3.5, 3.0]);
    run(dir.path(), "tp2", &[1.0], 0.5, 100, &[4.0, 3.5, 3.0]);
    let path = dir.path().join("tp2/metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"tokens\":1000,", "\"tokens\":500,")).unwrap();
    let ended = experiments(dir.path(), &["analyze", "--output-dir", "."]);
    for part in ["500 tokens/step", "2.00x*", "* steps of another number of tokens than ddp_fp32's"] {
        assert!(ended.out.contains(part), "no {part} in {}", ended.out);
    }
    let cards = view(dir.path())["cards"].to_string();
    assert!(cards.contains("fastest") && !cards.contains("tp2"), "{cards}");
}
