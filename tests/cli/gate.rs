//! The CI gate (`.ci/run`) and its scripts on machines without some tools, with stand-ins for the programs they call:
//! every part runs, failures and skips are in the final table, and a missing tool is reported without ending a script.
use crate::common::programs::write_program;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A stand-in for a system program in `dir`, in bash.
fn program(dir: &Path, name: &str, body: &str) {
    write_program(&dir.join(name), format!("#!/bin/bash\n{body}\n"));
}
/// The output of `script` with `dir`/bin first in PATH.
fn run(script: &Path, dir: &Path, args: &[&str]) -> (Output, String) {
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", dir.join("bin").display());
    let mut command = Command::new(script);
    command.args(args).env("PATH", path).env_remove("CARGO_TARGET_DIR").env_remove("PTXAS").env_remove("LAB");
    let output = command.output().unwrap();
    let said = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
    (output, said)
}

/// A copy of the gate in its own directory, whose parts only print that they ran.
fn gate(cargo: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_program(&dir.path().join(".ci/run"), fs::read(Path::new(ROOT).join(".ci/run")).unwrap());
    program(dir.path(), "bin/cargo", cargo);
    program(dir.path(), "bin/apt-get", "echo 'E: no network' >&2; exit 100");
    for tool in fs::read_dir(Path::new(ROOT).join("scripts")).unwrap() {
        let name = tool.unwrap().file_name().into_string().unwrap();
        program(dir.path(), &format!("scripts/{name}"), &format!("echo {name} ran"));
    }
    dir
}
fn row<'a>(said: &'a str, part: &str) -> &'a str {
    let is_row = |line: &&str| line.split_whitespace().next() == Some(part);
    said.lines().rfind(is_row).unwrap_or_else(|| panic!("no row for {part} in: {said}"))
}

#[test]
fn every_part_runs_and_a_failure_is_in_the_table_and_the_status() {
    let dir =
        gate("echo \"cargo $*\"; case $1 in clippy) exit 101 ;; test) echo 'test result: ok. 909 passed' ;; esac");
    program(dir.path(), "scripts/ptxas_check.sh", "echo a spill; exit 1");
    program(dir.path(), "scripts/watch_check.sh", "echo 'watch_check: SKIPPED, PyPI cannot be reached: nothing read'");
    let (output, said) = run(&dir.path().join(".ci/run"), dir.path(), &[]);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for ran in ["cargo fmt", "test result: ok. 909 passed", "hosts_check.sh ran", "a spill"] {
        assert!(said.contains(ran), "no {ran:?} in: {said}");
    }
    let mut tests = said.lines().filter(|line| line.starts_with("cargo test --workspace"));
    assert!(tests.any(|line| line.contains("--no-fail-fast")), "{said}");
    for (part, result) in [("lints", "FAILED"), ("tests", "passed"), ("ptxas", "FAILED"), ("hosts", "passed")] {
        assert!(row(&said, part).contains(result), "{}", row(&said, part));
    }
    assert!(row(&said, "watch").ends_with("SKIPPED, PyPI cannot be reached: nothing read"), "{said}");
}

/// By the files that differ from the commit it is given; the reason is in the first line.
#[test]
fn a_change_asks_for_its_parts_of_the_deep_suite() {
    let dir = gate("echo \"cargo $*\"");
    let git = |args: &[&str]| {
        let me = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"];
        let output = Command::new("git").args(me).args(args).current_dir(dir.path()).output();
        assert!(output.as_ref().is_ok_and(|output| output.status.success()), "git {args:?}: {output:?}");
    };
    git(&["init", "--quiet"]);
    git(&["add", "."]);
    git(&["commit", "--quiet", "--message", "base"]);
    let asked = |args: &[&str]| {
        let (output, said) = run(&dir.path().join(".ci/run"), dir.path(), args);
        assert!(output.status.success(), "{said}");
        let line = said.lines().find(|line| line.starts_with("deep suite: ")).unwrap().to_string();
        (line, said)
    };
    for (file, parts) in [
        ("docs/train.md", "site"),
        ("kernels/cast.ptx", "emulator ptxas sass"),
        ("src/comm/shm/words.rs", "hosts loom tsan"),
        ("src/run/plan/mesh.rs", ""),
    ] {
        let path = dir.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "changed").unwrap();
        let (line, said) = asked(&["HEAD"]);
        assert_eq!(line, format!("deep suite: {parts}, for 1 files that differ from HEAD"));
        assert_eq!(said.contains("ptxas_check.sh ran"), parts.contains("ptxas"), "{said}");
        fs::remove_file(&path).unwrap();
    }
    let (line, said) = asked(&["--full"]);
    assert_eq!(line, "deep suite: all parts");
    assert!(said.contains("cargo test --release") && said.contains("gguf_check.sh ran"), "{said}");
    // Of itself it compares with the last commit for which it passed.
    fs::write(dir.path().join(".ci/passed"), "HEAD\n").unwrap();
    assert_eq!(asked(&[]).0, "deep suite: , for 1 files that differ from HEAD");
    // A commit that is not here asks for everything.
    assert!(asked(&["no-such-commit"]).0.starts_with("deep suite: all parts, because"));
}

#[test]
fn a_gate_that_cannot_install_tools_continues_and_reports_it() {
    let dir = gate("true");
    program(dir.path(), "bin/id", "echo 0");
    // Whatever is installed on this machine.
    let no_mpicc = "command() { [ \"$2\" != mpicc ] && builtin command \"$@\"; }";
    let text = fs::read_to_string(dir.path().join(".ci/run")).unwrap();
    program(dir.path(), ".ci/run", &format!("{no_mpicc}\n{text}"));
    let (output, said) = run(&dir.path().join(".ci/run"), dir.path(), &[]);
    assert!(output.status.success(), "{said}");
    let row = row(&said, "launchers");
    assert!(row.contains("SKIPPED: no mpicc") && row.ends_with("apt-get failed"), "{said}");
}

#[test]
fn without_pypi_the_checks_of_kernels_are_skipped() {
    for check in ["ptxas_check", "sass_check"] {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("built");
        program(dir.path(), "bin/cargo", &format!("echo '{{\"target_directory\":\"{}\"}}'", target.display()));
        let pip =
            "mkdir -p $3/bin; printf '#!/bin/bash\\necho no route >&2; exit 1\\n' > $3/bin/pip; chmod +x $3/bin/pip";
        program(dir.path(), "bin/python3", pip);
        let (output, said) = run(&Path::new(ROOT).join(format!("scripts/{check}.sh")), dir.path(), &[]);
        assert!(output.status.success(), "{said}");
        assert!(said.contains(&format!("{check}: SKIPPED, PyPI cannot be reached")), "{said}");
        assert!(said.contains("no route"), "{said}");
        assert!(target.join("tools").exists(), "the tools are not where cargo builds");
    }
}

/// A kernel may allow namespaces but not have veth.
#[test]
fn without_veth_the_hosts_check_is_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let unshare = "while [[ $1 = --* ]]; do shift; done; case $1 in ip) exec \"$@\" ;; true) ;; *) exit 9 ;; esac";
    program(dir.path(), "bin/unshare", unshare);
    program(dir.path(), "bin/ip", "echo 'Error: Unknown device type.' >&2; exit 2");
    let hosts = Path::new(ROOT).join("scripts/hosts_check.sh");
    let (output, said) = run(&hosts, dir.path(), &["--binary", "/bin/true"]);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("hosts_check: SKIPPED, no veth pair: Error: Unknown device type."), "{said}");
}

#[test]
fn scripts_use_cargos_target_directory() {
    let mut target = Command::new(Path::new(ROOT).join("scripts/target.sh"));
    let output = target.env("CARGO_TARGET_DIR", "/elsewhere/built").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "/elsewhere/built\n");
}
