//! Corpora without user files: the synthetic task and the default data set.
use super::*;

// --- the synthetic task

#[test]
fn the_synthetic_task_has_the_stated_loss_floor() {
    let data = Dataset::open(&DataOptions { vocab: 1000, max_samples: Some(2000), ..synthetic(128, 3) }).unwrap();
    let (mut ones, mut pairs) = (vec![0f64; 64], BTreeMap::<(u32, i32), f64>::new());
    let all = rows(&data);
    for (tokens, targets) in &all {
        for (&token, &target) in tokens.iter().zip(targets) {
            ones[token as usize] += 1.0;
            *pairs.entry((token, target)).or_default() += 1.0;
        }
        assert!(tokens[1..].iter().zip(targets).all(|(&next, &target)| next as i32 == target));
    }
    let n: f64 = ones.iter().sum();
    // Tokens are uniform over 64 ids (each 4000 of 256000 times, sd 63 were they independent), which a model must learn
    // first,
    assert!(ones.iter().all(|&c| (c / n * 64.0 - 1.0).abs() < 0.15), "{ones:?}");
    // each has 4 successors, and what is left is their entropy (measured on the counts, which underestimates by 1e-3).
    assert_eq!(pairs.len(), 64 * 4);
    let entropy: f64 = pairs.iter().map(|((token, _), c)| -c / n * (c / ones[*token as usize]).ln()).sum();
    let floor = data.loss_floor().unwrap();
    assert!((floor - 1.21301).abs() < 1e-5);
    assert!((entropy - floor).abs() < 0.01, "{entropy} is not {floor}");

    let same = Dataset::open(&DataOptions { vocab: 1000, max_samples: Some(2000), ..synthetic(128, 3) }).unwrap();
    assert!(rows(&same) == all && same.fingerprint() == data.fingerprint());
    let other = Dataset::open(&DataOptions { vocab: 1000, max_samples: Some(2000), ..synthetic(128, 4) }).unwrap();
    assert!(rows(&other) != all && other.fingerprint() != data.fingerprint());
    assert_eq!(all.iter().map(|r| &r.0).collect::<BTreeSet<_>>().len(), 2000, "rows repeat");
    for vocab in [4, 5, 7, 63] {
        let task = Synthetic::new(vocab, 1).unwrap();
        for s in 0..vocab as u32 {
            let next: BTreeSet<u32> = (0..4).map(|j| task.successor(s, j)).collect();
            assert!(next.len() == 4 && next.iter().all(|&t| t < vocab as u32), "{vocab}: {next:?}");
        }
    }
}

// --- the default corpus

/// A cargo home with a small and a large file in `half`, and a crate that this build does not use.
fn cargo_home(root: &Path) {
    let lock = include_str!("../../Cargo.lock");
    let at = lock.find("name = \"half\"").unwrap();
    let version = lock[at..].lines().nth(1).unwrap().split('"').nth(1).unwrap();
    let put = |name: &str, content: String| {
        let path = root.join("registry/src/index-123").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    let line = "fn same() {} // the same line again\n";
    for i in 0..20 {
        put(&format!("half-{version}/src/part{i}.rs"), line.repeat(100_000 / line.len()));
    }
    put(&format!("half-{version}/src/generated.rs"), line.repeat(10_000));
    put(&format!("half-{version}/README.md"), "not Rust".into());
    put("half-0.0.1/src/lib.rs", "another version".into());
    put("unrelated-1.0.0/src/lib.rs", "another crate".into());
}

#[test]
fn the_default_corpus_is_the_sources_of_this_builds_crates() {
    let dir = tempfile::tempdir().unwrap();
    cargo_home(dir.path());
    let corpus = Corpus::default(Some(dir.path())).unwrap();
    let crate_files = |c: &Corpus, root: &Path| {
        let ours = c.files.iter().filter(|f| f.path.starts_with(root));
        ours.map(|f| f.path.strip_prefix(root).unwrap().to_path_buf()).collect::<Vec<_>>()
    };
    let found = crate_files(&corpus, dir.path());
    // At most 1 MiB per crate: 10 of the 20 parts of 100 kB, sampled from the whole crate; nothing else.
    assert_eq!(found.len(), 10);
    assert!(found.iter().all(|f| f.to_string_lossy().contains("src/part")), "{found:?}");
    assert!(found.iter().any(|f| f.to_string_lossy().contains("part1")), "{found:?}");
    assert!(corpus.what.starts_with("Rust sources of 1 crates"), "{}", corpus.what);
    // The order depends on the names, not on the location.
    let elsewhere = tempfile::tempdir().unwrap();
    cargo_home(elsewhere.path());
    let again = Corpus::default(Some(elsewhere.path())).unwrap();
    assert_eq!(crate_files(&again, elsewhere.path()), found);
    assert!(!found.is_sorted(), "{found:?}");
}

/// As on a machine that has the program alone, from a wheel.
#[test]
fn without_cargo_the_default_corpus_is_in_the_program() {
    let nowhere = tempfile::tempdir().unwrap();
    let little = tempfile::tempdir().unwrap();
    let crates = little.path().join("registry/src/index-123/unrelated-1.0.0");
    fs::create_dir_all(&crates).unwrap();
    fs::write(crates.join("lib.rs"), "fn f() {}\n").unwrap();
    for home in [None, Some(nowhere.path()), Some(little.path())] {
        let corpus = Corpus::default(home).unwrap();
        assert!(corpus.what.starts_with("flatshard's own sources"), "{}", corpus.what);
        assert!(corpus.files.iter().all(|f| f.path.extension().is_some_and(|e| e == "rs") && !f.path.exists()));
        let options =
            DataOptions { cargo_home: home.map(Path::to_path_buf), paths: vec![], vocab: 320, ..synthetic(128, 3) };
        let cache = tempfile::tempdir().unwrap();
        let data = Dataset::open(&DataOptions { cache: Cache::at(cache.path()), ..options }).unwrap();
        let text: u64 = corpus.files.iter().map(|f| f.size).sum();
        assert!(text > 1 << 20 && data.report().bytes == text, "{} of {text} bytes", data.report().bytes);
        let source = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/data/corpus.rs")).unwrap();
        let own = corpus.files.iter().find(|f| f.path.ends_with("data/corpus.rs")).unwrap();
        assert_eq!(own.embedded, Some(source.as_bytes()));
    }
}
