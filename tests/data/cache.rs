//! The token-file cache: built once, rebuilt when needed, shared by threads and processes. Never checks what a row
//! means.
use super::*;

// --- the cache

#[test]
fn a_token_file_is_built_once_and_rebuilt_when_its_source_changes() {
    let files = Files::with("t.txt", "one two three");
    let first = files.open("t.txt", 4);
    assert!(first.report().built);
    let second = files.open("t.txt", 3); // another max_len reuses the same token file
    assert!(!second.report().built);
    assert_eq!(first.fingerprint(), second.fingerprint());
    files.put("t.txt", "one two four!"); // same length, other content
    let third = files.open("t.txt", 4);
    assert!(third.report().built);
    assert_ne!(first.fingerprint(), third.fingerprint());
    assert_eq!(Tokenizer::Bytes.decode(&rows(&third)[2].0), "four");
    // The first file is still mapped and complete.
    assert_eq!(Tokenizer::Bytes.decode(&rows(&first)[2].0), "thre");
}

/// As `rsync -a` and archives leave them.
#[test]
fn another_file_of_the_same_size_and_time_is_read() {
    let files = Files::with("t.txt", "one two three");
    let time = |name: &str, at: std::time::SystemTime| {
        fs::File::options().write(true).open(files.path(name)).unwrap().set_modified(at).unwrap();
    };
    let at = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1 << 30);
    time("t.txt", at);
    let first = files.open("t.txt", 4);
    assert!(first.report().built && !files.open("t.txt", 4).report().built);
    files.put("t.txt", "one two four!");
    time("t.txt", at);
    let second = files.open("t.txt", 4);
    assert!(second.report().built && second.fingerprint() != first.fingerprint());
    // A link to another one.
    for (name, text) in [("a.txt", "link to A"), ("b.txt", "link to B")] {
        files.put(name, text);
        time(name, at);
    }
    let link = |to: &str| {
        let _ = fs::remove_file(files.path("link.txt"));
        std::os::unix::fs::symlink(files.path(to), files.path("link.txt")).unwrap();
        files.open("link.txt", 4).fingerprint()
    };
    assert_ne!(link("a.txt"), link("b.txt"));
}

#[test]
fn an_incomplete_token_file_is_rebuilt() {
    let text = "all happy families are alike; ".repeat(400);
    let lines = "{\"input_ids\": [1, 2, 3, 4, 5, 6]}\n".repeat(400);
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 6] = [
        ("empty", |p| fs::write(p, b"").unwrap()),
        ("within the header", |p| fs::File::options().write(true).open(p).unwrap().set_len(1000).unwrap()),
        ("one byte short", |p| {
            let file = fs::File::options().write(true).open(p).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        }),
        ("longer", |p| fs::write(p, [fs::read(p).unwrap(), vec![0; 8]].concat()).unwrap()),
        ("a bit of the header", |p| flip(p, 33)),
        ("a bit of a token", |p| flip(p, 4096 + 1001)),
    ];
    for (name, content) in [("t.txt", &text), ("t.jsonl", &lines)] {
        for (what, damage) in damages {
            let files = Files::with(name, content);
            let whole = rows(&files.open(name, 16));
            damage(&files.token_file());
            let again = files.open(name, 16);
            assert!(again.report().built, "{name}: {what}");
            assert_eq!(rows(&again), whole, "{name}: {what}");
            assert!(!files.open(name, 16).report().built, "{name}: {what}");
        }
    }
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 4;
    fs::write(path, bytes).unwrap();
}

#[test]
fn an_unwritable_cache_is_not_fatal() {
    let lines = "{\"input_ids\": [1, 2, 3, 4, 5, 6]}\n".repeat(400);
    for (name, content) in [("t.txt", "some text that is long enough"), ("t.jsonl", &lines)] {
        let kept = Files::with(name, content);
        let expected = kept.open(name, 4);
        assert_eq!(expected.report().unkept, None);
        let files = Files::with(name, content);
        fs::write(files.cache(), "a file where the directory should be").unwrap();
        let data = files.open(name, 4);
        assert_eq!((rows(&data), data.fingerprint()), (rows(&expected), expected.fingerprint()));
        let unkept = data.report().unkept.clone().unwrap();
        assert!(unkept.starts_with(files.cache().to_str().unwrap()) && unkept.contains("("), "{unkept}");
        assert_eq!(fs::read(files.cache()).unwrap(), b"a file where the directory should be");
        // Errors in the data are still reported.
        files.put("bad.jsonl", "[]x");
        refused(Dataset::open(&files.options("bad.jsonl", 4)), &["bad.jsonl"]);
    }
}

#[test]
fn without_a_cache_no_files_are_left() {
    let files = Files::with("t.jsonl", "{\"input_ids\": [1, 2, 3]}\n".repeat(9));
    let scratch = files.0.path().join("scratch");
    fs::create_dir(&scratch).unwrap();
    let none = Cache { dir: None, limit: 1, scratch: scratch.clone() };
    let options = DataOptions { cache: none, ..files.options("t.jsonl", 4) };
    for _ in 0..2 {
        let data = Dataset::open(&options).unwrap();
        assert_eq!((data.report().built, data.report().unkept.clone(), data.rows()), (true, None, 9));
        assert_eq!(rows(&data)[8].0, [1, 2, 3]);
        assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0, "while it is read, too");
    }
    assert!(!files.cache().exists());
}

/// 4 KiB of header and 8 KiB of tokens each.
fn open_limited(files: &Files, name: &str, limit: u64) -> Dataset {
    if !files.path(name).exists() {
        files.put(name, "x".repeat(4096 - 1));
    }
    Dataset::open(&DataOptions { cache: Cache { limit, ..Cache::at(files.cache()) }, ..files.options(name, 64) })
        .unwrap()
}
fn age(path: &Path, seconds: u64) {
    let then = std::time::SystemTime::now() - std::time::Duration::from_secs(seconds);
    fs::File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
}

#[test]
fn beyond_its_limit_the_cache_evicts_the_least_recently_used_unread_files() {
    const EACH: u64 = 4096 + 8192;
    let files = Files::new();
    let held = |name: &str| -> bool { !open_limited(&files, name, u64::MAX).report().built };
    let mut paths = BTreeMap::new();
    for (n, name) in ["a", "b", "c", "d"].into_iter().enumerate() {
        drop(open_limited(&files, name, u64::MAX));
        let new = fs::read_dir(files.cache()).unwrap().map(|e| e.unwrap().path()).find(|p| !paths.contains_key(p));
        let path = new.unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), EACH);
        age(&path, 1000 - 100 * n as u64);
        paths.insert(path, name);
    }
    // Within the limit nothing is removed. Opening a file counts as use: now b is the oldest, then c, d, a.
    drop(open_limited(&files, "a", 4 * EACH));
    let reader = open_limited(&files, "c", 4 * EACH);
    age(paths.iter().find(|(_, name)| **name == "c").unwrap().0, 800);
    assert_eq!(fs::read_dir(files.cache()).unwrap().count(), 4);
    drop(open_limited(&files, "e", 3 * EACH)); // evicts b and d; c is in use
    let left = |name: &str| paths.iter().any(|(path, n)| *n == name && path.exists());
    assert_eq!(["a", "b", "c", "d"].map(left), [true, false, true, false]);
    assert_eq!(rows(&reader)[0].0, [120; 64]);
    assert!(held("a") && held("c") && held("e") && !held("b"));
    // A file larger than the limit stays while it is open, and is removed afterwards.
    drop(reader);
    let only = open_limited(&files, "f", 1);
    assert_eq!(fs::read_dir(files.cache()).unwrap().count(), 1);
    drop(only);
    // Those of prompts count too.
    fs::write(files.cache().join("prompts-0123456789abcdef.jsonl"), "{}").unwrap();
    let next = open_limited(&files, "g", 1);
    assert_eq!(fs::read_dir(files.cache()).unwrap().count(), 1);
    assert_eq!(rows(&next)[0].0, [120; 64]);
}

#[test]
fn leftovers_are_removed_and_foreign_files_stay() {
    let files = Files::new();
    drop(open_limited(&files, "a", u64::MAX));
    let ours =
        ["0123456789abcdef.lock", "00000000000000ff.partial", "00000000000000ff.ends", "00000000000000fe.scratch"];
    let others = ["poetry.lock", "0123456789abcdef.txt", "0123456789abcdef0.tokens", "notes.tokens"];
    for name in ours.iter().chain(&others) {
        fs::write(files.cache().join(name), "").unwrap();
    }
    fs::write(files.cache().join("0000000000000abc.lock"), "").unwrap();
    let used = fs::File::open(files.cache().join("0000000000000abc.lock")).unwrap();
    rustix::fs::flock(&used, rustix::fs::FlockOperation::LockExclusive).unwrap();
    drop(open_limited(&files, "a", 1));
    let there = |name: &str| files.cache().join(name).exists();
    assert_eq!(ours.map(there), [false; 4]);
    assert_eq!(others.map(there), [true; 4]);
    assert!(there("0000000000000abc.lock"), "an earlier version builds under this lock");
}

#[test]
fn leftovers_of_a_killed_builder_are_overwritten() {
    let files = Files::with("t.txt", "some text that is long enough");
    files.open("t.txt", 4);
    let path = files.token_file();
    let whole = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(path.with_extension("partial"), vec![7; 100_000]).unwrap();
    assert!(files.open("t.txt", 4).report().built);
    assert_eq!(fs::read(&path).unwrap(), whole);
    assert!(!path.with_extension("partial").exists());
}

#[test]
fn one_of_several_concurrent_openers_builds_and_the_others_wait() {
    let files = Files::with("t.txt", "to be, or not to be. ".repeat(500_000));
    let barrier = Barrier::new(8);
    let data: Vec<Dataset> = std::thread::scope(|scope| {
        let open = || {
            barrier.wait();
            Dataset::open(&files.options("t.txt", 64)).unwrap()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(data.iter().filter(|d| d.report().built).count(), 1);
    assert!(data.iter().all(|d| d.fingerprint() == data[0].fingerprint() && d.rows() == data[0].rows()));
}

/// Run by the test below in separate processes; run on its own it opens a small corpus.
#[test]
fn opener() {
    let given = std::env::var_os("FLATSHARD_TEST_CORPUS").map(PathBuf::from);
    let own = Files::with("t.txt", "a small corpus");
    let mut options = own.options("t.txt", 4);
    if let Some(dir) = given {
        options = DataOptions { paths: vec![dir.join("data")], cache: Cache::at(dir.join("cache")), ..options };
    }
    let data = Dataset::open(&options).unwrap();
    assert!(data.rows() > 0);
    println!("built={} fingerprint={:016x}", data.report().built, data.fingerprint());
}

#[test]
fn processes_share_one_token_file_and_survive_the_death_of_its_builder() {
    let files = Files::with("t.txt", "to be, or not to be. ".repeat(1_000_000));
    let spawn = || {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "cache::opener", "--nocapture"])
            .env("FLATSHARD_TEST_CORPUS", files.0.path())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    // Kill the builder while it holds the lock and writes: as soon as a partial file exists. On a busy machine that may
    // be too late: try again.
    let exists = |extension: &str| {
        let mut entries = fs::read_dir(files.cache()).into_iter().flatten().flatten();
        entries.any(|e| e.path().extension().is_some_and(|x| x == extension))
    };
    let killed_in_time = (0..20).any(|_| {
        let _ = fs::remove_dir_all(files.cache());
        let mut child = spawn();
        while !exists("partial") && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        exists("partial") && !exists("tokens")
    });
    assert!(killed_in_time);
    let others: Vec<_> = (0..3).map(|_| spawn()).collect();
    let said: Vec<String> =
        others.into_iter().map(|c| String::from_utf8(c.wait_with_output().unwrap().stdout).unwrap()).collect();
    let count = |what: &str| said.iter().filter(|s| s.contains(what)).count();
    assert_eq!((count("built=true"), count("built=false")), (1, 2), "{said:?}");
    let mine = files.open("", 4);
    assert_eq!(count(&format!("fingerprint={:016x}", mine.fingerprint())), 3);
}
