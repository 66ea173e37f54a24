//! `experiments chart` from outside: the pictures of pages are those of the measurements next to them.
use super::common::experiments;
use resvg::tiny_skia::Pixmap;
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
    let read = |path: &Path| std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    for file in [format!("{name}-light.png"), format!("{name}-dark.png")] {
        let shipped = read(&Path::new(ROOT).join("docs/images").join(&file));
        assert!(shipped.len() <= 150 * 1024, "{file}: {} bytes", shipped.len());
        let drawn = Pixmap::decode_png(&read(&dir.path().join("deep").join(&file))).unwrap();
        let shipped = Pixmap::decode_png(&shipped).unwrap();
        assert_eq!((drawn.width(), drawn.height()), (shipped.width(), shipped.height()), "{file}");
        // Other processors may round the edge of a letter differently.
        let apart = |(a, b): (&u8, &u8)| a.abs_diff(*b) > 32;
        let differ = drawn.data().iter().zip(shipped.data()).filter(|pair| apart(*pair)).count();
        assert!(
            differ * 2000 < drawn.data().len(),
            "{file}: {differ} bytes differ; make it again with: experiments chart"
        );
    }
    let text = std::fs::read_to_string(Path::new(ROOT).join(page)).unwrap();
    let [light, dark] = ["light", "dark"].map(|theme| format!("images/{name}-{theme}.png"));
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
