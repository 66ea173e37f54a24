//! Builds the command that starts the ranks of a run: the training binary itself, or a launcher given by name or as a
//! command line. Never starts anything, and does not know what the run is.
use flatshard::base::{Error, Result};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Launchers known by name: their flags for one host, and for several.
const NAMED: [(&str, &str, &str); 3] = [
    ("torchrun", "--standalone --nproc_per_node {nproc}", "--nnodes {nnodes} --nproc_per_node {nproc}"),
    ("srun", SRUN, SRUN),
    ("mpirun", "-np {ranks}", "-np {ranks}"),
];
const SRUN: &str = "--nodes {nnodes} --ntasks-per-node {nproc} --kill-on-bad-exit=1";

/// Launchers of Python scripts (programs, or modules after `-m`) and the flag that makes them start a program, spelled
/// with underscores, which every version accepts.
const OF_SCRIPTS: [(&str, &str); 5] = [
    (TORCHRUN, "--no_python"),
    (TORCHRUN_MODULE, "--no_python"),
    ("accelerate", "--no_python"),
    ("accelerate.commands.launch", "--no_python"),
    ("deepspeed", "--no_python"),
];
const TORCHRUN: &str = "torchrun";
const TORCHRUN_MODULE: &str = "torch.distributed.run";

/// What starts the ranks: the words of a command line. Empty: the binary itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launcher {
    words: Vec<String>,
    /// Index into [`NAMED`].
    named: Option<usize>,
}

impl FromStr for Launcher {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<Launcher, String> {
        let words = shell_words::split(text).map_err(|e| e.to_string())?;
        match words.as_slice() {
            [] => Err("is empty: give a launcher's name or command line".into()),
            [one] if one == "local" => Ok(Launcher::default()),
            [one] => Ok(Launcher { named: NAMED.iter().position(|(name, ..)| *name == base(one)), words }),
            _ => Ok(Launcher { words, named: None }),
        }
    }
}

/// The file name: `torchrun` for `/opt/bin/torchrun`.
fn base(word: &str) -> &str {
    word.rsplit('/').next().unwrap_or(word)
}

/// `NAME=VALUE` before a command.
fn is_assignment(word: &str) -> bool {
    let name = word.split_once('=').map_or("", |(name, _)| name);
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

impl Launcher {
    fn is_local(&self) -> bool {
        self.words.is_empty()
    }
    /// The words without a leading `env` and its assignments.
    fn command_words(&self) -> &[String] {
        let skipped = self.words.iter().take_while(|word| base(word) == "env" || is_assignment(word)).count();
        &self.words[skipped..]
    }
    /// The entry of [`OF_SCRIPTS`], if this is one.
    fn of_scripts(&self) -> Option<(&'static str, &'static str)> {
        let words = self.command_words();
        let module = words.iter().position(|word| word == "-m").and_then(|at| words.get(at + 1));
        let is = |name: &str| words.first().is_some_and(|word| base(word) == name) || module.is_some_and(|m| m == name);
        OF_SCRIPTS.into_iter().find(|(name, _)| is(name))
    }
    /// Whether the launcher already has a flag, with dashes or underscores, and its value as a separate word or after
    /// `=`.
    fn has_flag(&self, flag: &str, more: &[String]) -> bool {
        let name = |word: &str| word.split('=').next().unwrap_or_default().replace('_', "-");
        self.words.iter().chain(more).any(|word| name(word) == flag)
    }
    /// The command with the flags that named launchers get; `{nproc}`, `{nnodes}` and `{ranks}` are filled in later.
    fn template(&self, nnodes: u64, more: &[String]) -> Vec<String> {
        let mut words = self.words.clone();
        if words.first().is_some_and(|word| is_assignment(word)) {
            words.insert(0, "env".into());
        }
        let torchrun = matches!(self.of_scripts(), Some((TORCHRUN | TORCHRUN_MODULE, _)));
        let flags = match self.named {
            Some(at) if nnodes == 1 => NAMED[at].1,
            Some(at) => NAMED[at].2,
            None if torchrun && !self.has_flag("--nproc-per-node", more) => "--nproc_per_node {nproc}",
            None => "",
        };
        words.extend(flags.split_whitespace().map(String::from));
        words.extend_from_slice(more);
        words
    }
}

/// Flags about starting ranks.
#[derive(clap::Args, Clone, Debug)]
pub struct LaunchArgs {
    /// What starts the ranks: local (the binary itself), torchrun, srun, mpirun, or a command line such as "torchrun
    /// --nproc_per_node 2 --master_port 29501"
    ///
    /// Quotes group words as in a shell. {nproc}, {nnodes} and {ranks} are replaced by --nproc-per-node, --nnodes and
    /// their product. torchrun gets --nproc_per_node and --no_python if missing; accelerate and deepspeed get
    /// --no_python.
    #[arg(long, default_value = "local", value_name = "NAME|COMMAND")]
    pub launcher: Launcher,
    /// More arguments for the launcher, such as "--partition gpu"
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true, default_value = "", hide_default_value = true)]
    pub launcher_args: String,
    /// Ranks per host [default: 4]
    #[arg(long, value_name = "N", env = "NUM_GPUS")]
    pub nproc_per_node: Option<u64>,
    /// Number of hosts, for torchrun, srun and mpirun
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub nnodes: u64,
    /// Time limit of one run
    #[arg(long, default_value_t = 3600.0, value_name = "SECONDS")]
    pub timeout: f64,
    /// Directory of run_fsdp and run_ddp [default: that of this binary, built by cargo if missing]
    #[arg(long, value_name = "DIR")]
    pub bin_dir: Option<PathBuf>,
}

impl LaunchArgs {
    pub fn check(&self) -> Result<()> {
        let whole = [("--nproc-per-node", self.nproc()), ("--nnodes", self.nnodes)];
        if let Some((flag, _)) = whole.iter().find(|(_, n)| *n == 0) {
            return Err(Error::input(format!("{flag} is 0; it must be at least 1")));
        }
        if !(self.timeout > 0.0 && self.timeout <= 1e9) {
            return Err(Error::input(format!(
                "--timeout is {}; it must be above 0 and at most 1e9 seconds",
                self.timeout
            )));
        }
        let more = self.more()?;
        if self.launcher.is_local() {
            if self.nnodes > 1 {
                return Err(Error::input(format!(
                    "--nnodes {} needs a multi-host launcher: set --launcher torchrun, srun or mpirun",
                    self.nnodes
                )));
            }
            if !more.is_empty() {
                return Err(Error::input("--launcher-args has no effect here: remove it, or set --launcher"));
            }
            return Ok(());
        }
        let template = self.launcher.template(self.nnodes, &more);
        let has = |places: [&str; 2]| template.iter().any(|word| places.iter().any(|place| word.contains(place)));
        if self.nnodes > 1 && !has(["{nnodes}", "{ranks}"]) {
            return Err(Error::input(format!(
                "--nnodes {} has no effect here: remove it, or use {{nnodes}} in --launcher",
                self.nnodes
            )));
        }
        if let Some(n) = self.nproc_per_node.filter(|_| !has(["{nproc}", "{ranks}"])) {
            eprintln!("note: --nproc-per-node {n} (NUM_GPUS) has no effect here: --launcher sets the number of ranks");
        }
        Ok(())
    }

    /// Checks that the launcher's program exists.
    pub fn check_installed(&self) -> Result<()> {
        let Some(program) = self.launcher.command_words().first() else { return Ok(()) };
        let runs = |path: &Path| path.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let found = match program.contains('/') {
            true => runs(Path::new(program)),
            false => std::env::split_paths(&paths).any(|dir| runs(&dir.join(program))),
        };
        match (found, program.contains('/')) {
            (true, _) => Ok(()),
            (false, true) => Err(Error::input(format!("--launcher: {program} is not executable"))),
            (false, false) => Err(Error::input(format!("--launcher: {program} is not in PATH"))),
        }
    }

    pub fn nproc(&self) -> u64 {
        self.nproc_per_node.unwrap_or(4)
    }

    /// (ranks, hosts) for the run's configuration; None if the launcher's command line decides.
    pub fn sizes(&self) -> Option<(u64, u64)> {
        (self.launcher.is_local() || self.launcher.named.is_some()).then(|| (self.nproc(), self.nnodes))
    }

    fn more(&self) -> Result<Vec<String>> {
        shell_words::split(&self.launcher_args).map_err(|e| Error::input(format!("--launcher-args: {e}")))
    }

    /// The words that start `program` on every rank; None if it starts its own ranks.
    pub fn command(&self, program: &[String]) -> Result<Option<Vec<String>>> {
        if self.launcher.is_local() {
            return Ok(None);
        }
        let more = self.more()?;
        let (nproc, nnodes) = (self.nproc(), self.nnodes);
        let fill = |word: String| {
            let word = word.replace("{nproc}", &nproc.to_string()).replace("{nnodes}", &nnodes.to_string());
            word.replace("{ranks}", &nproc.saturating_mul(nnodes).to_string())
        };
        let mut command: Vec<String> = self.launcher.template(nnodes, &more).into_iter().map(fill).collect();
        if let Some((_, flag)) = self.launcher.of_scripts().filter(|_| !self.launcher.has_flag("--no-python", &more)) {
            command.push(flag.into());
        }
        command.extend_from_slice(program);
        Ok(Some(command))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(launcher: &str, more: &str, nproc: Option<u64>, nnodes: u64) -> LaunchArgs {
        let launcher = launcher.parse().unwrap();
        LaunchArgs { launcher, launcher_args: more.into(), nproc_per_node: nproc, nnodes, timeout: 1.0, bin_dir: None }
    }
    fn line(launcher: &str, more: &str, nproc: Option<u64>, nnodes: u64) -> String {
        let args = args(launcher, more, nproc, nnodes);
        args.check().unwrap();
        args.command(&["run".into()]).unwrap().unwrap().join(" ")
    }

    #[test]
    fn named_launchers_get_the_number_of_ranks() {
        assert!(args("local", "", None, 1).command(&["run".into()]).unwrap().is_none());
        assert_eq!(line("torchrun", "", None, 1), "torchrun --standalone --nproc_per_node 4 --no_python run");
        let torchrun = "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id a --no_python run";
        assert_eq!(line("torchrun", "--rdzv_id a", Some(8), 2), torchrun);
        assert_eq!(
            line("srun", "--partition 'gpu a'", None, 2),
            "srun --nodes 2 --ntasks-per-node 4 --kill-on-bad-exit=1 --partition gpu a run"
        );
        assert_eq!(line("/opt/bin/mpirun", "", Some(3), 2), "/opt/bin/mpirun -np 6 run");
        assert_eq!(args("srun", "", Some(2), 3).sizes(), Some((2, 3)));
    }

    #[test]
    fn command_lines_get_only_what_is_missing() {
        let same = |text: &str| assert_eq!(line(text, "", None, 1), format!("{text} run"));
        same("torchrun --nproc_per_node 2 --no-python");
        same("python3 -m torch.distributed.run --nproc-per-node=2 --no_python");
        same("mpirun -np 2 --oversubscribe");
        same("srun -p deepspeed");
        same("./start");
        let no_python = |text: &str| assert_eq!(line(text, "", None, 1), format!("{text} --no_python run"));
        no_python("torchrun --nproc_per_node 2 --master_port 29501");
        no_python("/opt/bin/torchrun --nproc_per_node=2");
        no_python("env A=1 python3 -m torch.distributed.run --nproc-per-node 2");
        no_python("accelerate launch --num_processes 2");
        no_python("deepspeed --num_gpus 2");
        assert_eq!(
            line("A=1 torchrun --rdzv_id x", "", Some(2), 1),
            "env A=1 torchrun --rdzv_id x --nproc_per_node 2 --no_python run"
        );
        assert_eq!(line("x -n {ranks} --per={nproc} {nnodes}", "", Some(2), 3), "x -n 6 --per=2 3 run");
        // The command line sets the number of ranks, so the configuration does not.
        assert_eq!(args("torchrun --nproc_per_node 2", "", None, 1).sizes(), None);
    }

    #[test]
    fn flags_without_effect_are_refused() {
        let refused =
            |launcher: &str, more: &str, nnodes| args(launcher, more, None, nnodes).check().unwrap_err().to_string();
        assert!(refused("local", "", 2).contains("--launcher torchrun, srun or mpirun"));
        assert!(refused("local", "-v", 1).contains("--launcher-args has no effect here"));
        assert!(refused("torchrun --nproc_per_node 2", "", 2).contains("{nnodes}"));
        assert!(refused("srun", "'a", 1).contains("--launcher-args: missing closing quote"));
        assert!("".parse::<Launcher>().unwrap_err().contains("is empty"));
        assert!("torchrun 'a".parse::<Launcher>().unwrap_err().contains("missing closing quote"));
    }
}
