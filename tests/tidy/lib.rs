//! Rules the compiler does not check: floors, module heads, where unsafe code and environment variables may occur, and
//! that every path named in the docs exists. Never checks behavior.
#![cfg(test)]
mod house;
mod imports;

use std::fs;
use std::path::{Path, PathBuf};

/// Lowest first; modules of one row share a floor. A module uses only its own floor and lower ones.
const FLOORS: &[&[&str]] = &[
    &["base"],
    &["device"],
    &["comm"],
    &["nn"],
    &["store", "hub"],
    &["optim", "data"],
    &["ckpt"],
    &["engine"],
    &["run"],
];

fn root() -> PathBuf {
    fs::canonicalize(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap()
}

/// Every Rust file below `dir`, with its text, in a fixed order.
fn sources(dir: &str) -> Vec<(PathBuf, String)> {
    fn walk(dir: &Path, found: &mut Vec<(PathBuf, String)>) {
        let mut entries: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
        entries.sort();
        for path in entries {
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    let mut found = vec![];
    walk(&root().join(dir), &mut found);
    assert!(!found.is_empty(), "no sources below {dir}");
    found
}

/// The modules of `higher` that a statement names by `crate::x` or within `crate::{..}`.
fn named<'a>(statement: &str, higher: &[&'a str]) -> Vec<&'a str> {
    let Some(at) = statement.find("crate::") else { return vec![] };
    let rest = &statement[at..];
    let grouped = rest.starts_with("crate::{");
    let word = |m: &str| rest.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == m);
    let direct = |m: &str| rest.split("crate::").any(|s| s.split(|c: char| !c.is_alphanumeric()).next() == Some(m));
    higher.iter().copied().filter(|m| direct(m) || grouped && word(m)).collect()
}

fn floor_violations(module: &str, floor: usize, file: &str, text: &str) -> Vec<String> {
    let higher: Vec<&str> = FLOORS
        .iter()
        .enumerate()
        .flat_map(|(f, row)| row.iter().filter(move |m| f > floor || f == floor && **m != module))
        .copied()
        .collect();
    let mut bad = vec![];
    // A `use crate::{` may span lines, so statements are matched, not lines.
    for statement in text.split(';') {
        let code: Vec<&str> = statement.lines().map(|l| l.split("//").next().unwrap()).collect();
        for name in named(&code.join(" "), &higher) {
            bad.push(format!("{file} names {name}, which is not below {module}"));
        }
    }
    bad
}

#[test]
fn a_module_names_only_lower_floors() {
    let mut bad = vec![];
    for (floor, row) in FLOORS.iter().enumerate() {
        for module in *row {
            for (path, text) in sources(&format!("src/{module}")) {
                // A file's unit tests may import anything.
                let code = text.split("#[cfg(test)]").next().unwrap();
                bad.extend(floor_violations(module, floor, &path.display().to_string(), code));
            }
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
fn the_floor_check_finds_a_planted_import() {
    let planted = "use crate::base::Error;\nuse crate::{\n    device::Buf,\n    store::Store,\n};";
    let bad = floor_violations("nn", 3, "planted.rs", planted);
    assert_eq!(bad.len(), 1, "{bad:?}");
    assert_eq!(floor_violations("optim", 5, "planted.rs", "use crate::data::Loader;").len(), 1);
    assert!(floor_violations("nn", 3, "planted.rs", "use crate::nn::Layout; use crate::base::Result;").is_empty());
}

#[test]
fn every_module_has_its_floor() {
    let known: Vec<&str> = FLOORS.iter().flat_map(|row| row.iter().copied()).collect();
    for entry in fs::read_dir(root().join("src")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let module = name.trim_end_matches(".rs");
        assert!(module == "lib" || known.contains(&module), "src/{name} is on no floor");
    }
}

#[test]
fn every_file_has_a_module_head() {
    for dir in ["src", "ptx", "run_fsdp", "run_ddp", "benches", "examples", "experiments", "tests"] {
        for (path, text) in sources(dir) {
            assert!(text.starts_with("//! "), "{} does not open with //!", path.display());
        }
    }
}

#[test]
fn unsafe_code_is_only_in_device_and_comm_with_a_reason() {
    for (path, text) in sources("src") {
        let file = path.strip_prefix(root()).unwrap().display().to_string();
        let low = file.starts_with("src/device") || file.starts_with("src/comm");
        let lines: Vec<&str> = text.lines().collect();
        for (n, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap();
            if !code.contains("unsafe {") && !code.contains("unsafe impl") {
                continue;
            }
            assert!(low, "{file}:{} holds unsafe code", n + 1);
            let reason = lines[n.saturating_sub(8)..=n].iter().any(|l| l.contains("SAFETY"));
            assert!(reason, "{file}:{}: unsafe without a SAFETY comment in the lines above", n + 1);
        }
    }
}

#[test]
fn environment_variables_are_read_in_one_file() {
    for (path, text) in sources("src") {
        let code = text.split("#[cfg(test)]").next().unwrap();
        let reads = ["env::var(", "env::var_os(", "env::vars("].iter().any(|call| code.contains(call));
        assert!(!reads || path.ends_with("src/comm/env.rs"), "{} reads the environment", path.display());
    }
}

/// A busy machine takes several times longer, and another process may use a port: limits come from
/// tests/common/time.rs, ports from tests/common/agent.rs. Asserting that something takes *at least* some time is
/// allowed.
#[test]
fn tests_use_no_timing_and_no_fixed_ports() {
    for dir in ["tests", "experiments/tests", "ptx/tests", "ptx/driver/tests"] {
        for (path, text) in sources(dir) {
            if ["tests/common/time.rs", "tests/tidy/lib.rs"].iter().any(|own| path.ends_with(own)) {
                continue;
            }
            for (n, line) in text.lines().enumerate() {
                let at = format!("{}:{}: {line}", path.display(), n + 1);
                assert!(!line.contains(".elapsed()") || line.contains(".elapsed() >="), "{at}: races the clock");
                let guessed = line.contains("process::id() %") || line.contains("process::id() *");
                assert!(!guessed, "{at}: guesses a number that others may have");
            }
        }
    }
}

/// CARGO_TARGET_DIR may be anywhere. Comments and printed text may mention target/.
#[test]
fn scripts_do_not_assume_the_target_directory() {
    let files = |dir: &str| fs::read_dir(root().join(dir)).unwrap().map(|e| e.unwrap().path()).collect::<Vec<_>>();
    let all = [".ci", "scripts", "scripts/hosts", "experiments/peers", "tests/golden"].map(files).concat();
    let scripts = all.iter().filter(|p| p.ends_with("run") || p.extension().is_some_and(|e| e == "sh" || e == "py"));
    let mut read = 0;
    for path in scripts {
        read += 1;
        let text = fs::read_to_string(path).unwrap();
        // For Python, skip the docstring.
        let code = text.split_once("import ").map_or(&*text, |(_, code)| code);
        let code = code.replace("$target/", "");
        for line in code.lines().map(|line| line.split('#').next().unwrap()) {
            let named = line.contains("target/") || line.contains("\"target\" /") || line.contains("\"target\", \"");
            assert!(!named, "{}: {line}", path.display());
        }
    }
    assert!(read > 15, "{read} scripts");
}

#[test]
fn no_unfinished_markers() {
    let marks = [concat!("todo", "!("), concat!("unimplemented", "!("), concat!("#[ign", "ore"), concat!("FIX", "ME")];
    for dir in ["src", "ptx", "run_fsdp", "run_ddp", "tests", "benches", "examples", "experiments"] {
        for (path, text) in sources(dir) {
            for mark in marks {
                assert!(!text.contains(mark), "{} contains {mark}", path.display());
            }
        }
    }
}

#[test]
fn pages_name_only_paths_that_exist() {
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|page| page.unwrap().path());
    let pages = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(|page| root().join(page));
    let mut checked = 0;
    for page in pages.into_iter().chain(docs.filter(|page| page.extension().is_some_and(|e| e == "md"))) {
        let (text, page) = (fs::read_to_string(&page).unwrap(), page.display());
        // Links between pages, too.
        let dir = if text.contains("](docs/") { root() } else { root().join("docs") };
        for link in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            let here = link.is_empty() || link.contains("://") || dir.join(link).exists() || root().join(link).exists();
            assert!(here, "{page} links to {link}, which does not exist");
        }
        for code in text.split('`').skip(1).step_by(2) {
            let path = code.split([':', ' ']).next().unwrap();
            let ours = [
                "src/",
                "tests/",
                "benches/",
                "configs/",
                "examples/",
                "experiments/",
                "run_fsdp/",
                "run_ddp/",
                "ptx/",
                "kernels/",
                "scripts/",
                ".ci/",
            ];
            if !ours.iter().any(|dir| path.starts_with(dir)) || path.contains(['*', '{', '<']) {
                continue;
            }
            checked += 1;
            assert!(root().join(path).exists(), "{page} names {path}, which does not exist");
        }
    }
    assert!(checked > 80, "{checked} paths: is the check still reading the pages?");
}
