//! From an entry of a set to a [`Job`]: the common configuration with the entry's changes, and the command that starts
//! its ranks. Never runs a job.
use crate::catalogue::{Program, RunEntry};
use crate::curve::METRICS;
use crate::job::Job;
use clap::ValueEnum;
use flatshard::base::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The checkout that this binary was built from.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const CONFIG: &str = "config.yaml";
const LOG: &str = "log.txt";
const PEER: &str = "torch_peer.py";

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Launcher {
    /// The binary starts its ranks itself
    #[default]
    Local,
    Torchrun,
    Srun,
}

/// Who starts how many ranks of what.
#[derive(clap::Args, Clone, Debug)]
pub struct LaunchArgs {
    /// Who starts the ranks
    #[arg(long, value_enum, default_value_t)]
    pub launcher: Launcher,
    /// More arguments of torchrun or srun, split at spaces, as "--partition gpu"
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true, default_value = "")]
    pub launcher_args: String,
    /// Ranks on each host
    #[arg(long, default_value_t = 4, value_name = "N", env = "NUM_GPUS")]
    pub nproc_per_node: u64,
    /// Hosts, for torchrun and srun
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub nnodes: u64,
    /// Longest time of one run
    #[arg(long, default_value_t = 3600.0, value_name = "SECONDS")]
    pub timeout: f64,
    /// Where run_fsdp and run_ddp are [default: beside this binary, built by cargo where they are not]
    #[arg(long, value_name = "DIR")]
    pub bin_dir: Option<PathBuf>,
}

impl LaunchArgs {
    pub fn check(&self) -> Result<()> {
        let whole = [("--nproc-per-node", self.nproc_per_node), ("--nnodes", self.nnodes)];
        if let Some((flag, _)) = whole.iter().find(|(_, n)| *n == 0) {
            return Err(Error::input(format!("{flag} is 0: it must be at least 1")));
        }
        if !(self.timeout > 0.0 && self.timeout <= 1e9) {
            return Err(Error::input(format!("--timeout is {}: it must be above 0, at most 1e9", self.timeout)));
        }
        if self.launcher == Launcher::Local && self.nnodes > 1 {
            return Err(Error::input(format!(
                "--nnodes {} needs a launcher of several hosts: --launcher torchrun or srun",
                self.nnodes
            )));
        }
        Ok(())
    }

    /// That what it starts is there.
    pub fn check_installed(&self) -> Result<()> {
        let program = match self.launcher {
            Launcher::Local => return Ok(()),
            Launcher::Torchrun => "torchrun",
            Launcher::Srun => "srun",
        };
        let paths = std::env::var_os("PATH").unwrap_or_default();
        match std::env::split_paths(&paths).any(|dir| dir.join(program).is_file()) {
            true => Ok(()),
            false => Err(Error::input(format!("--launcher {program}: there is no {program} in PATH"))),
        }
    }

    /// The words that start `program` on every rank.
    fn command(&self, program: Vec<String>, script: bool) -> Vec<String> {
        let more = self.launcher_args.split_whitespace().map(String::from);
        let (ranks, hosts) = (self.nproc_per_node.to_string(), self.nnodes.to_string());
        let words = |words: &[&str]| words.iter().map(|w| w.to_string()).collect::<Vec<_>>();
        let mut command = match self.launcher {
            Launcher::Local => return program,
            Launcher::Torchrun if self.nnodes == 1 => words(&["torchrun", "--standalone", "--nproc-per-node", &ranks]),
            Launcher::Torchrun => words(&["torchrun", "--nnodes", &hosts, "--nproc-per-node", &ranks]),
            Launcher::Srun => words(&["srun", "--nodes", &hosts, "--ntasks-per-node", &ranks, "--kill-on-bad-exit=1"]),
        };
        command.extend(more);
        if self.launcher == Launcher::Torchrun && !script {
            command.push("--no-python".into());
        }
        command.extend(program);
        command
    }
}

/// What all runs of a set have in common.
pub struct Common {
    pub launch: LaunchArgs,
    /// Directory of the binaries.
    pub bin: PathBuf,
    /// Sections of a configuration file.
    pub config: Value,
    /// Flags of the user, after everything else.
    pub flags: Vec<String>,
    pub output: PathBuf,
    /// Logs go to `DIR/NAME.log`, not into each run's directory.
    pub logs: Option<PathBuf>,
    /// The Python that has torch.
    pub python: Option<String>,
}

impl Common {
    /// `round`: from 1; the first is the run's own name, the others are `NAME@ROUND`.
    pub fn job(&self, entry: &RunEntry, round: u32) -> Result<Job> {
        let name = if round == 1 { entry.name.to_string() } else { format!("{}@{round}", entry.name) };
        let dir = self.output.join(&name);
        let log = self.logs.as_ref().map_or(dir.join(LOG), |logs| logs.join(format!("{name}.log")));
        let config = self.config_of(entry, &dir);
        let text = yaml(&config)?;
        let path = |file: &str| dir.join(file).display().to_string();
        let timeout = Duration::from_secs_f64(self.launch.timeout);
        let (command, mut files) = match entry.program.binary() {
            Some(binary) => {
                let program = [self.bin.join(binary).display().to_string(), "--config".into(), path(CONFIG)];
                (self.launch.command([&program[..], &self.flags].concat(), false), vec![])
            }
            None => {
                (self.peer(entry, &config, &dir)?, vec![(PEER, include_str!("../peers/torch_peer.py").to_string())])
            }
        };
        files.push((CONFIG, format!("# {name}: {}.\n# {}\n{text}", entry.about, shell(&command))));
        let threads = ("OMP_NUM_THREADS".to_string(), "1".to_string());
        let env = if entry.program.binary().is_none() { vec![threads] } else { vec![] };
        Ok(Job { name, dir, log, command, env, files, timeout })
    }

    fn config_of(&self, entry: &RunEntry, dir: &Path) -> Value {
        let mut config = self.config.clone();
        lay_over(&mut config, &entry.overlay);
        let batch = config["batch"]["batch_size"].as_u64().unwrap_or(1) * entry.ranks_of_a_sample();
        let run = json!({
            "batch": {"batch_size": batch},
            "run": {
                "nproc_per_node": self.launch.nproc_per_node,
                "num_nodes": self.launch.nnodes,
                "metrics_path": dir.join(METRICS),
            },
        });
        lay_over(&mut config, &run);
        config
    }

    /// PyTorch's sizes are those that run_fsdp derives from the same configuration.
    fn peer(&self, entry: &RunEntry, config: &Value, dir: &Path) -> Result<Vec<String>> {
        let Program::Torch(implementation) = entry.program else {
            return Err(Error::op("peer", format!("{} is not PyTorch's", entry.name)));
        };
        let python = self.python.clone().unwrap_or("python3".into());
        let mut words = vec!["--impl".to_string(), implementation.into()];
        words.extend(["--metrics-path".into(), dir.join(METRICS).display().to_string()]);
        words.extend(["--precision".into(), text(&config["precision"]["precision"])]);
        let resolved = self.resolved(config, dir)?;
        let sizes = [
            ("embed-dim", "model", "embed_dim"),
            ("num-layers", "model", "num_layers"),
            ("num-heads", "model", "num_heads"),
            ("num-kv-heads", "model", "num_kv_heads"),
            ("ff-hidden-dim", "model", "ff_hidden_dim"),
            ("vocab-size", "model", "vocab_size"),
            ("max-len", "data", "max_len"),
            ("batch-size", "batch", "batch_size"),
            ("max-steps", "run", "max_steps"),
        ];
        for (flag, section, key) in sizes {
            words.extend([format!("--{flag}"), text(&resolved[section][key])]);
        }
        let script = dir.join(PEER).display().to_string();
        Ok(match self.launch.launcher {
            Launcher::Local => {
                let ranks = self.launch.nproc_per_node.to_string();
                let torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", &ranks];
                std::iter::once(python).chain(torchrun.map(String::from)).chain([script]).chain(words).collect()
            }
            Launcher::Torchrun => self.launch.command([vec![script], words].concat(), true),
            Launcher::Srun => self.launch.command([vec![python, script], words].concat(), true),
        })
    }

    /// The configuration with every derived value, as run_fsdp prints it.
    fn resolved(&self, config: &Value, dir: &Path) -> Result<Value> {
        let mut asked = config.clone();
        // A plan of one rank on the CPU has the same sizes, and no file is to be written.
        lay_over(&mut asked, &json!({"run": {"nproc_per_node": 1, "num_nodes": 1, "device": "cpu"}}));
        let path = dir.join("sizes.yaml");
        let failed = |e| Error::io("write", &path, e);
        std::fs::create_dir_all(dir).map_err(failed)?;
        std::fs::write(&path, yaml(&asked)?).map_err(failed)?;
        let program = self.bin.join("run_fsdp");
        let out = Command::new(&program).arg("--config").arg(&path).args(&self.flags).arg("--print-config").output();
        let _ = std::fs::remove_file(&path); // a scratch file
        let out = out.map_err(|e| Error::io("start", &program, e))?;
        if !out.status.success() {
            let words = String::from_utf8_lossy(&out.stderr);
            return Err(Error::input(words.trim().trim_start_matches("error: ")));
        }
        serde_saphyr::from_str(&String::from_utf8_lossy(&out.stdout))
            .map_err(|e| Error::op("print-config", e.to_string()))
    }
}

/// A number or name as a word of a command.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), String::from)
}

fn yaml(config: &Value) -> Result<String> {
    serde_saphyr::to_string(config).map_err(|e| Error::op("config", e.to_string()))
}

/// A configuration file, section by section.
pub fn read_config(path: &Path) -> Result<Value> {
    let bad = |e: String| Error::input(format!("--config {}: {e}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
    let config: Value = serde_saphyr::from_str(&text).map_err(|e| bad(e.to_string()))?;
    match config.is_object() {
        true => Ok(config),
        false => Err(bad("it holds no sections".into())),
    }
}

/// `over` wins, key by key.
pub fn lay_over(under: &mut Value, over: &Value) {
    match (under, over) {
        (Value::Object(under), Value::Object(over)) => {
            for (key, value) in over {
                lay_over(under.entry(key.clone()).or_insert(Value::Object(Map::new())), value);
            }
        }
        (under, over) => *under = over.clone(),
    }
}

/// A command as a line for a shell.
pub fn shell(command: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@+".contains(c);
    let word = |w: &String| match !w.is_empty() && w.chars().all(plain) {
        true => w.clone(),
        false => format!("'{}'", w.replace('\'', r"'\''")),
    };
    command.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// The directory that holds run_fsdp and run_ddp: `asked`, else beside this binary, where cargo builds them if need be.
pub fn binaries(asked: Option<&Path>) -> Result<PathBuf> {
    let holds = |dir: &Path| ["run_fsdp", "run_ddp"].iter().all(|name| dir.join(name).is_file());
    if let Some(dir) = asked {
        return match holds(dir) {
            true => std::path::absolute(dir).map_err(|e| Error::io("resolve", dir, e)),
            false => Err(Error::input(format!("--bin-dir {}: holds no run_fsdp and run_ddp", dir.display()))),
        };
    }
    let own = std::env::current_exe().map_err(|e| Error::io("find", "this binary", e))?;
    let dir = own.parent().unwrap_or(Path::new("/")).to_path_buf();
    if !holds(&dir) {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        cargo.current_dir(ROOT).args(["build", "--package", "flatshard", "--bin", "run_fsdp", "--bin", "run_ddp"]);
        if dir.ends_with("release") {
            cargo.arg("--release");
        }
        eprintln!("run_fsdp and run_ddp are not beside this binary: building them");
        let built = cargo.status().is_ok_and(|status| status.success());
        if !built || !holds(&dir) {
            return Err(Error::input(format!(
                "{} holds no run_fsdp and run_ddp, and cargo did not build them; say --bin-dir DIR",
                dir.display()
            )));
        }
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue;

    fn common(launcher: Launcher) -> Common {
        let launch = LaunchArgs {
            launcher,
            launcher_args: "--partition gpu".into(),
            nproc_per_node: 4,
            nnodes: if launcher == Launcher::Local { 1 } else { 2 },
            timeout: 1.0,
            bin_dir: None,
        };
        Common {
            launch,
            bin: "/bin".into(),
            config: json!({"batch": {"batch_size": 3}, "fsdp": {"auto_wrap": "none"}}),
            flags: vec!["--seed".into(), "3".into()],
            output: "/out".into(),
            logs: None,
            python: None,
        }
    }

    #[test]
    fn a_run_is_the_common_configuration_with_its_own_laid_over() {
        let common = common(Launcher::Local);
        let all = catalogue::all();
        let entry = all.iter().find(|e| e.name == "tp2_ring2").unwrap();
        let config = common.config_of(entry, Path::new("/out/x"));
        // Four ranks share a sample: as many sequences in a step as where each has its own.
        assert_eq!(config["batch"]["batch_size"], 12);
        assert_eq!(config["parallel"], json!({"tp_size": 2, "ring_attn_size": 2}));
        assert_eq!(config["fsdp"]["auto_wrap"], "none");
        let job = common.job(entry, 2).unwrap();
        assert_eq!((job.name.as_str(), job.dir.to_str().unwrap()), ("tp2_ring2@2", "/out/tp2_ring2@2"));
        assert_eq!(job.command, ["/bin/run_fsdp", "--config", "/out/tp2_ring2@2/config.yaml", "--seed", "3"]);
        let read: Value = serde_saphyr::from_str(&job.files[0].1).unwrap();
        assert_eq!(read["run"]["metrics_path"], "/out/tp2_ring2@2/metrics.jsonl");
    }

    #[test]
    fn launchers_start_every_rank() {
        let entry = &catalogue::all()[0];
        let line = |launcher| shell(&common(launcher).job(entry, 1).unwrap().command);
        let run = "/bin/run_ddp --config /out/ddp_fp32/config.yaml --seed 3";
        assert_eq!(line(Launcher::Local), run);
        let torchrun = "torchrun --nnodes 2 --nproc-per-node 4 --partition gpu --no-python";
        assert_eq!(line(Launcher::Torchrun), format!("{torchrun} {run}"));
        let srun = "srun --nodes 2 --ntasks-per-node 4 --kill-on-bad-exit=1 --partition gpu";
        assert_eq!(line(Launcher::Srun), format!("{srun} {run}"));
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(shell(&["a b".into(), "it's".into(), "--x=1".into(), "".into()]), r"'a b' 'it'\''s' --x=1 ''");
    }
}
