//! Project rules: no circular imports, unique type names, line widths, and documentation that matches the code. Never
//! checks behavior.
use crate::imports::{Imports, TESTS};
use crate::{root, sources};
use regex::Regex;
use std::collections::BTreeMap;
use std::fs;

const CRATES: &[(&str, &str)] = &[
    ("flatshard", "src/lib.rs"),
    ("flatshard_base", "src/base/mod.rs"),
    ("flatshard_device", "src/device/mod.rs"),
    ("flatshard_ptx", "ptx/src/lib.rs"),
    ("flatshard_simcuda", "ptx/driver/src/lib.rs"),
    ("experiments", "experiments/src/main.rs"),
    ("gpu_check", "experiments/gpu_check/main.rs"),
];

#[test]
fn files_import_one_way() {
    let read = |path: &str| fs::read_to_string(root().join(path)).ok();
    let imports = Imports::read(CRATES, &read);
    let (circles, unknown) = (imports.circles(), imports.unknown());
    assert!(circles.is_empty(), "circles of imports: {circles:#?}");
    assert!(unknown.is_empty(), "no file spells these names, so a circle through them would not be seen: {unknown:#?}");
}

#[test]
fn the_circle_check_finds_planted_circles() {
    let circles = |files: &[(&str, &str)]| -> usize {
        let read = |path: &str| files.iter().find(|file| file.0 == path).map(|file| file.1.to_string());
        Imports::read(&[("x", "src/lib.rs")], &read).circles().len()
    };
    let lib = ("src/lib.rs", "mod a;\nmod b;\npub use a::A;\npub use b::B;");
    let (a, b) = (("src/a.rs", "use crate::b::B;\npub struct A(B);"), ("src/b.rs", "pub struct B;"));
    assert_eq!(circles(&[lib, a, b]), 0);
    // Directly, through a re-export, by a path in the code, in a group, by a module's name, and with a glob.
    for planted in [
        "use crate::a::A;\npub struct B(A);",
        "use super::A;\npub struct B(A);",
        "pub struct B(crate::a::A);",
        "use crate::{a::{A}};\npub struct B(A);",
        "use crate::a;\npub struct B(a::A);",
        "use crate::a::*;\nuse super::A as Other;\npub struct B(Other);",
    ] {
        assert_eq!(circles(&[lib, a, ("src/b.rs", planted)]), 1, "{planted}");
    }
    // Through a crate under another name.
    let lower = |code: &str| {
        let files = [
            ("src/lib.rs", "mod b;\npub use lower as a;\npub use b::B;"),
            ("src/b.rs", "use crate::a::inner;\npub struct B(inner::A);"),
            ("lower/mod.rs", "pub mod inner;"),
            ("lower/inner.rs", code),
        ];
        let read = |path: &str| files.iter().find(|file| file.0 == path).map(|file| file.1.to_string());
        let imports = Imports::read(&[("x", "src/lib.rs"), ("lower", "lower/mod.rs")], &read);
        (imports.circles().len(), imports.unknown().len())
    };
    assert_eq!(lower("pub struct A;"), (0, 0));
    assert_eq!(lower("pub struct A(x::B);"), (1, 0));
    // Three files, and a folder whose mod.rs both uses its files and is used by them.
    let three = ("src/lib.rs", "mod a;\nmod b;\nmod c;");
    let c = ("src/c.rs", "use crate::a::A;\npub struct C(A);");
    assert_eq!(circles(&[three, a, ("src/b.rs", "use crate::c::C;\npub struct B(C);"), c]), 1);
    let folder = ("src/a/mod.rs", "mod inner;\npub struct A;\nfn f() { inner::g() }");
    assert_eq!(circles(&[("src/lib.rs", "mod a;"), folder, ("src/a/inner.rs", "use super::A;\npub fn g() {}")]), 1);
    // Unit tests may import anything, and comments and strings are not code.
    let tests =
        "pub struct B; // crate::a::A\nconst S: &str = \"crate::a::A\";\n#[cfg(test)]\nmod tests { use crate::a::A; }";
    assert_eq!(circles(&[lib, a, ("src/b.rs", tests)]), 0);
}

/// A file's code without its unit tests.
fn shipped(text: &str) -> &str {
    let tests = Regex::new(TESTS).unwrap();
    &text[..tests.find(text).map_or(text.len(), |found| found.start())]
}

fn declared_twice(files: &[(String, String)]) -> Vec<String> {
    let declaration = r"(?m)^(?: *(?:pub(?:\([a-z: ]+\))? )?(?:unsafe )?(?:struct|enum|trait|union)|(?:pub(?:\([a-z: ]+\))? )?type) ([A-Z]\w*)";
    let declaration = Regex::new(declaration).unwrap();
    let mut places: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (path, text) in files {
        for found in declaration.captures_iter(shipped(text)) {
            places.entry(found.get(1).unwrap().as_str()).or_default().push(path);
        }
    }
    let twice = places.into_iter().filter(|(_, places)| places.len() > 1);
    twice.map(|(name, places)| format!("{name}: {}", places.join(", "))).collect()
}

#[test]
fn type_names_are_unique() {
    let of = |dir| sources(dir).into_iter().map(|(path, text)| (path.display().to_string(), text));
    let files = ["src", "ptx/src", "ptx/driver/src", "experiments"].into_iter().flat_map(of);
    let files: Vec<_> = files.filter(|(path, _)| !path.ends_with("tests.rs") && !path.contains("/tests/")).collect();
    let twice = declared_twice(&files);
    assert!(twice.is_empty(), "{} type names in several places: {twice:#?}", twice.len());
    let planted = |path: &str, text: &str| (path.to_string(), text.to_string());
    let group = planted("a.rs", "pub struct Group;");
    assert_eq!(
        declared_twice(&[group.clone(), planted("b.rs", "impl A { type Group = u8; }\n  type Item = u8;")]).len(),
        0
    );
    assert_eq!(declared_twice(&[group, planted("b.rs", "pub(crate) enum Group {}")]), ["Group: a.rs, b.rs"]);
}

#[test]
fn method_names_are_not_vague() {
    let vague = Regex::new(r"\bfn (look|told|said|around|turn)\b").unwrap();
    for dir in ["src", "ptx", "experiments", "benches", "tests"] {
        for (path, text) in sources(dir) {
            let found = text.lines().find(|line| vague.is_match(line));
            assert_eq!(found, None, "{}", path.display());
        }
    }
}

#[test]
fn comments_fit_120_columns() {
    let string = Regex::new(r#""(?:\\.|[^"\\])*""#).unwrap();
    let mut long = Vec::new();
    for dir in ["src", "ptx", "run_fsdp", "run_ddp", "benches", "experiments", "examples", "tests"] {
        for (path, text) in sources(dir) {
            let wide = |(_, line): &(usize, &str)| {
                line.chars().count() > 120
                    && (line.trim_start().starts_with("//") || string.replace_all(line, "").contains(" // "))
            };
            let lines = text.lines().enumerate().filter(wide);
            long.extend(lines.map(|(n, _)| format!("{}:{}", path.display(), n + 1)));
        }
    }
    assert!(long.is_empty(), "{} lines: {long:#?}", long.len());
}

/// "Of the prompt." says nothing without the name that follows.
#[test]
fn comments_name_their_subject() {
    let open = Regex::new(r"^\s*//[/!]? (Of|Those) ").unwrap();
    let mut found = Vec::new();
    for dir in ["src", "ptx", "experiments"] {
        for (path, text) in sources(dir) {
            let lines: Vec<&str> = text.lines().collect();
            let goes_on = |n: usize| n > 0 && lines[n - 1].trim_start().starts_with("//");
            let bare = (0..lines.len()).filter(|&n| open.is_match(lines[n]) && !goes_on(n));
            found.extend(bare.map(|n| format!("{}:{}", path.display(), n + 1)));
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// The tour in docs/architecture.md: each function is in its file, and is called there or in a file before it.
#[test]
fn the_tour_of_one_batch_matches_the_code() {
    let page = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let step = Regex::new(r"(?m)^\d+\. `([\w/.]+)`, `(?:\w+::)?(\w+)`").unwrap();
    let steps: Vec<_> = step.captures_iter(&page).map(|found| (found[1].to_string(), found[2].to_string())).collect();
    assert_eq!(steps.len(), 10, "{steps:?}");
    let code = |file: &str| fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    let mut before = String::new();
    for (number, (file, function)) in (1..).zip(&steps) {
        let text = code(file);
        let (with, without) = (format!("fn {function}("), format!("{function}("));
        assert!(text.contains(&with), "step {number}: {file} declares no fn {function}");
        before += shipped(&text);
        let calls = before.replace(&with, "");
        let called = calls
            .match_indices(&without)
            .any(|(at, _)| !calls[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'));
        assert!(number == 1 || called, "step {number}: no file up to {file} calls {function}");
    }
}

/// Each rule of docs/gpu-facts.md names where it is used, as a file and words in it, and if a GPU has confirmed it,
/// that GPU, whose results the page names.
#[test]
fn facts_about_gpus_are_where_the_page_says() {
    let page = fs::read_to_string(root().join("docs/gpu-facts.md")).unwrap();
    let place = Regex::new(r"`([\w/.]+): ([^`]+)`").unwrap();
    let results = Regex::new(r"\*\*(\w+)\*\* in `(experiments/results/[\w.-]+)`").unwrap();
    let results: Vec<_> =
        results.captures_iter(&page).map(|found| (found[1].to_string(), found[2].to_string())).collect();
    results.iter().for_each(|(_, file)| assert!(root().join(file).is_file(), "no {file}"));
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| ") && !line.contains("---")).collect();
    for row in rows.iter().filter(|row| !row.starts_with("| rule |")) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [_, _, used, confirmed] = cells[..] else { panic!("{row}") };
        assert!(place.is_match(used), "no place in {row}");
        for found in place.captures_iter(used) {
            let text = fs::read_to_string(root().join(&found[1])).unwrap_or_else(|e| panic!("{}: {e}", &found[1]));
            assert!(text.contains(&found[2]), "{} does not contain {}", &found[1], &found[2]);
        }
        let known = confirmed == "no" || results.iter().any(|(gpu, _)| gpu == confirmed);
        assert!(known, "no results of {confirmed}");
    }
    assert!(rows.len() > 40, "{} rows", rows.len());
}

/// The files that README.md says to read first contain what the project is about.
#[test]
fn the_files_to_read_first_have_the_collectives_and_the_copies() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let (_, section) = readme.split_once("## Reading the code").expect("README.md has its section on reading the code");
    let file = Regex::new(r"`(src/[\w/.]+\.rs)`").unwrap();
    let files: Vec<String> = file.captures_iter(section).map(|found| found[1].to_string()).collect();
    assert_eq!(files.len(), 5, "{files:?}");
    let code: String = files.iter().map(|file| fs::read_to_string(root().join(file)).unwrap()).collect();
    for call in [".all_gather(", ".reduce_scatter(", "copy_nonoverlapping("] {
        assert!(code.contains(call), "none of {files:?} has {call}");
    }
}

/// The layer loop in README.md equals the code, line by line.
#[test]
fn the_readme_shows_the_layer_loop() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let (_, shown) = readme.split_once("```rust\n").expect("README.md shows code");
    let (shown, _) = shown.split_once("```").unwrap();
    let code = fs::read_to_string(root().join("src/nn/decoder.rs")).unwrap();
    assert!(shown.contains("store.acquire(") && code.contains(shown), "src/nn/decoder.rs does not contain\n{shown}");
}
