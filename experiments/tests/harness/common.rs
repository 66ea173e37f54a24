//! Shared by the harness tests: the binary, mock training binaries, and handmade metrics.
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The result of a command.
pub struct Ended {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// Runs `experiments` with these arguments in `dir`, without variables that would affect it.
pub fn experiments(dir: &Path, args: &[&str]) -> Ended {
    experiments_with(dir, args, &[])
}
pub fn experiments_with(dir: &Path, args: &[&str], variables: &[(&str, &str)]) -> Ended {
    let mut command = Command::new(crate::EXPERIMENTS);
    for name in
        "NUM_GPUS MAX_SAMPLES MODEL DATASET OUTPUT_DIR LOG_DIR TP_SIZE RING_SIZE RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
            .split_whitespace()
    {
        command.env_remove(name);
    }
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("SKIP_")) {
        command.env_remove(name);
    }
    let output = command.args(args).envs(variables.iter().copied()).current_dir(dir).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ended { code: output.status.code().unwrap_or(-1), out: text(&output.stdout), err: text(&output.stderr) }
}

/// A directory with a mock `run_fsdp` and `run_ddp` that do not train. Each call appends a line to `calls` and writes
/// metrics of a few steps where the configuration says; then it runs `more`, in which $1 $2 are `--config FILE`.
pub fn pretenders(dir: &Path, more: &str) -> PathBuf {
    let bin = dir.join("bin");
    let lines = format!(
        "echo \"$0 $*\" >> {calls}\n\
         metrics=$(sed -n 's/^ *metrics_path: *//p' \"$2\" | tr -d '\"')\n\
         {{ echo '{{\"event\":\"run\",\"world_size\":4}}'\n\
         for step in 1 2 3 4; do echo \"{{\\\"event\\\":\\\"step\\\",\\\"step\\\":$step,\\\"loss\\\":$((10 - \
         step))}}\"; done\n\
         echo '{{\"event\":\"end\"}}'; }} > \"$metrics\"\n\
         {more}",
        calls = dir.join("calls").display()
    );
    for name in ["run_fsdp", "run_ddp"] {
        script(&bin, name, &lines);
    }
    bin
}
/// A mock program of this name in `bin`.
pub fn script(bin: &Path, name: &str, lines: &str) -> String {
    fs::create_dir_all(bin).unwrap();
    let path = bin.join(name);
    fs::write(&path, format!("#!/bin/sh\n{lines}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}
/// How often the mocks were called so far.
pub fn calls(dir: &Path) -> usize {
    fs::read_to_string(dir.join("calls")).unwrap_or_default().lines().count()
}

/// The data of the page that `analyze` made of the runs in `dir`.
pub fn view(dir: &Path) -> serde_json::Value {
    let page = fs::read_to_string(dir.join("analysis/report.html")).unwrap();
    let data = page.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
    serde_json::from_str(data).unwrap()
}

/// The directory of the real training binaries: cargo builds all binaries of a package for its tests.
pub fn real_binaries() -> PathBuf {
    Path::new(crate::binaries::FSDP).parent().unwrap().to_path_buf()
}
