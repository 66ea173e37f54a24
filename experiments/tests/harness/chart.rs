//! `experiments chart` from outside: the pictures in README.md are those of the measurements next to them.
use super::common::experiments;
use resvg::tiny_skia::Pixmap;
use std::path::Path;
use tempfile::TempDir;

const RESULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/experiments/results/2026-11-21-peers-cpu.json");
const SHIPPED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/images");

#[test]
fn the_readme_shows_the_measurements() {
    let dir = TempDir::new().unwrap();
    let ended = experiments(dir.path(), &["chart", RESULTS, "--out", "deep/peers"]);
    assert_eq!(ended.code, 0, "{}", ended.err);
    let read = |path: &Path| std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    for file in ["peers-light.png", "peers-dark.png"] {
        let shipped = read(&Path::new(SHIPPED).join(file));
        assert!(shipped.len() <= 150 * 1024, "{file}: {} bytes", shipped.len());
        let drawn = Pixmap::decode_png(&read(&dir.path().join("deep").join(file))).unwrap();
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
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    for part in ["docs/images/peers-light.png", "docs/images/peers-dark.png", "prefers-color-scheme: dark", "alt=\""] {
        assert!(readme.contains(part), "README.md has no {part}");
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
