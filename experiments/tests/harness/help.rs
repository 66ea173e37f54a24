//! The help of each subcommand, completions and the man page.
use super::common::experiments;
use std::path::Path;

#[test]
fn each_subcommand_has_examples_and_completions_know_its_flags() {
    let here = Path::new(".");
    for name in ["", "run", "analyze", "compare", "suite", "smoke", "chaos", "trace", "watch", "chart", "plan"] {
        let args: Vec<&str> = [name, "--help"].into_iter().filter(|word| !word.is_empty()).collect();
        let help = experiments(here, &args);
        let (_, examples) = help.out.rsplit_once("Examples:\n").unwrap_or_else(|| panic!("{name}: {}", help.out));
        assert!(help.code == 0 && examples.contains(&format!("  experiments {name}")), "{name}: {}", help.out);
        // A word may be longer than a line, such as a choice of names.
        assert!(help.out.lines().all(|line| line.chars().count() <= 120), "{name}: {}", help.out);
    }
    let bash = experiments(here, &["--completions", "bash"]);
    for part in ["complete -F _experiments", "--baseline", "--gpus-per-node", "--no-shuffle"] {
        assert!(bash.code == 0 && bash.out.contains(part), "no {part}");
    }
    let man = experiments(here, &["--man"]);
    assert!(man.code == 0 && man.out.contains(".TH experiments 1") && man.out.contains("analyze"), "{}", man.out);
    let alone = experiments(here, &[]);
    assert!(alone.code == 2 && alone.err.contains("Usage: experiments"), "{}", alone.err);
}
