//! `experiments chart` from outside: the pictures of pages are those of the measurements next to them.
use super::common::experiments;
use std::path::Path;
use tempfile::TempDir;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// A page, the name of its picture, and what it shows.
const PICTURES: [[&str; 3]; 2] = [
    ["README.md", "peers", "2026-11-21-peers-cpu.json"],
    ["docs/benchmarks.md", "lengths", "2026-11-24-peers-lengths-amx-cpu.json"],
];

#[test]
fn pages_show_the_measurements() {
    PICTURES.into_iter().for_each(shows);
}

fn shows([page, name, results]: [&str; 3]) {
    let dir = TempDir::new().unwrap();
    let results = format!("{ROOT}/experiments/results/{results}");
    let ended = experiments(dir.path(), &["chart", &results, "--out", &format!("deep/{name}")]);
    assert_eq!(ended.code, 0, "{}", ended.err);
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    for file in [format!("{name}-light.svg"), format!("{name}-dark.svg")] {
        let shipped = read(&Path::new(ROOT).join("docs/images").join(&file));
        let drawn = read(&dir.path().join("deep").join(&file));
        assert!(drawn == shipped, "docs/images/{file} is not what experiments chart draws from {results}");
    }
    let text = std::fs::read_to_string(Path::new(ROOT).join(page)).unwrap();
    let [light, dark] = ["light", "dark"].map(|theme| format!("images/{name}-{theme}.svg"));
    for part in [&light, &dark, "prefers-color-scheme: dark", "alt=\""] {
        assert!(text.contains(part), "{page} has no {part}");
    }
}

#[test]
fn other_files_are_named() {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("a.json"), "{\"runs\":[]}").unwrap();
    for (file, says) in [("a.json", "a.json: not results of peers/compare.py"), ("b.json", "b.json: ")] {
        let ended = experiments(dir.path(), &["chart", file]);
        assert!(ended.code == 2 && ended.err.contains(says), "{} {}", ended.code, ended.err);
    }
}
