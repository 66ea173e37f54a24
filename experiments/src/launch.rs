//! Turns an entry of a set into a [`Job`]: the common configuration merged with the entry's changes, and the command
//! that starts its ranks. Never runs a job.
use crate::catalogue::{Program, RunEntry};
use crate::curve::METRICS;
use crate::job::Job;
use crate::launcher::LaunchArgs;
use flatshard::base::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The source tree this binary was built from.
const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const CONFIG: &str = "config.yaml";
const LOG: &str = "log.txt";
const PEER: &str = "torch_peer.py";

/// What all runs of a set share.
pub struct Common {
    pub launch: LaunchArgs,
    /// Directory of the binaries.
    pub bin: PathBuf,
    /// Sections of a configuration file.
    pub config: Value,
    /// The user's flags, after all others.
    pub flags: Vec<String>,
    pub output: PathBuf,
    /// The Python with torch.
    pub python: Option<String>,
}

impl Common {
    /// `round` counts from 1; the first has the run's own name, the others are `NAME@ROUND`.
    pub fn job(&self, entry: &RunEntry, round: u32) -> Result<Job> {
        let name = if round == 1 { entry.name.to_string() } else { format!("{}@{round}", entry.name) };
        let dir = self.output.join(&name);
        let log = dir.join(LOG);
        let config = self.config_of(entry, &dir);
        let text = yaml(&config)?;
        let path = |file: &str| dir.join(file).display().to_string();
        let timeout = Duration::from_secs_f64(self.launch.timeout);
        let flags = larger(&self.flags, entry.ranks_of_a_sample());
        let (command, mut files) = match entry.program.binary() {
            Some(binary) => {
                let program = [self.bin.join(binary).display().to_string(), "--config".into(), path(CONFIG)];
                let program = [&program[..], &flags].concat();
                (self.launch.command(&program)?.unwrap_or(program), vec![])
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
            "run": {"metrics_path": dir.join(METRICS)},
        });
        lay_over(&mut config, &run);
        if let Some((nproc, nnodes)) = self.launch.sizes() {
            lay_over(&mut config, &json!({"run": {"nproc_per_node": nproc, "num_nodes": nnodes}}));
        }
        config
    }

    /// PyTorch runs with the sizes and settings that run_fsdp derives from the same configuration.
    fn peer(&self, entry: &RunEntry, config: &Value, dir: &Path) -> Result<Vec<String>> {
        let Program::Torch(implementation) = entry.program else {
            return Err(Error::op("peer", format!("{} is not PyTorch's", entry.name)));
        };
        let python = self.python.clone().unwrap_or("python3".into());
        let mut words = vec!["--impl".to_string(), implementation.into()];
        words.extend(["--metrics-path".into(), dir.join(METRICS).display().to_string()]);
        words.extend(["--precision".into(), text(&config["precision"]["precision"])]);
        // Resolve for the CPU: see `resolved`.
        if config["run"]["device"].is_string() {
            words.extend(["--device".into(), text(&config["run"]["device"])]);
        }
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
            ("grad-accum", "batch", "grad_accum"),
            ("max-steps", "run", "max_steps"),
        ];
        for (flag, section, key) in sizes {
            words.extend([format!("--{flag}"), text(&resolved[section][key])]);
        }
        for (key, lacking) in [
            ("activation_checkpoint", &[][..]),
            ("forward_prefetch", &["ddp"]),
            ("limit_all_gathers", &["ddp", "fsdp2"]),
            ("backward_prefetch", &["ddp"]),
            ("sharding", &["ddp"]),
            // The script does not support these, and says so if they are set.
            ("activation_checkpoint_every", &[]),
            ("cpu_offload", &[]),
            ("sync_each_batch", &[]),
        ] {
            let (name, value) = (key.replace('_', "-"), &resolved["fsdp"][key]);
            match value {
                _ if lacking.contains(&implementation) => {}
                Value::Bool(false) if ["cpu_offload", "sync_each_batch"].contains(&key) => {}
                Value::Null => {}
                _ if key == "activation_checkpoint_every" && *value == json!(1) => {}
                Value::Bool(on) => words.push(format!("--{}{name}", if *on { "" } else { "no-" })),
                _ => words.extend([format!("--{name}"), text(value)]),
            }
        }
        let program = [vec![python.clone(), dir.join(PEER).display().to_string()], words].concat();
        Ok(self.launch.command(&program)?.unwrap_or_else(|| {
            let ranks = self.launch.nproc().to_string();
            let torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", &ranks];
            std::iter::once(python).chain(torchrun.map(String::from)).chain(program[1..].to_vec()).collect()
        }))
    }

    /// The configuration with every derived value, as printed by run_fsdp.
    fn resolved(&self, config: &Value, dir: &Path) -> Result<Value> {
        let mut asked = config.clone();
        // A one-rank plan on the CPU has the same sizes, and writes no files.
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

/// `flags` with the micro-batch of `--batch-size` times `factor`: ranks that share a sample take the step of as many
/// ranks that do not.
fn larger(flags: &[String], factor: u64) -> Vec<String> {
    let named = |word: &str| ["--batch-size", "--micro-batch-size"].contains(&word.replace('_', "-").as_str());
    let times = |text: &str| text.parse::<u64>().map_or(text.to_string(), |n| (n * factor).to_string());
    let mut out: Vec<String> = vec![];
    for word in flags {
        out.push(match (word.split_once('='), out.last()) {
            (Some((name, value)), _) if named(name) => format!("{name}={}", times(value)),
            (None, Some(before)) if named(before) => times(word),
            _ => word.clone(),
        });
    }
    out
}

/// A number or name as a command-line word.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), String::from)
}

fn yaml(config: &Value) -> Result<String> {
    serde_saphyr::to_string(config).map_err(|e| Error::op("config", e.to_string()))
}

/// Reads a configuration file of sections.
pub fn read_config(path: &Path) -> Result<Value> {
    let bad = |e: String| Error::input(format!("--config {}: {e}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
    let config: Value = serde_saphyr::from_str(&text).map_err(|e| bad(e.to_string()))?;
    match config.is_object() {
        true => Ok(config),
        false => Err(bad("it has no sections".into())),
    }
}

/// Merges `over` into `under`, key by key; `over` wins.
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

/// A command as a shell line. `--flag=VALUE` needs no quotes, which shell_words would add.
pub fn shell(command: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@+".contains(c);
    let word = |w: &String| match !w.is_empty() && w.chars().all(plain) {
        true => w.clone(),
        false => shell_words::quote(w).into_owned(),
    };
    command.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// The directory of run_fsdp and run_ddp: `asked`, else that of this binary, where cargo builds them if missing.
pub fn binaries(asked: Option<&Path>) -> Result<PathBuf> {
    let holds = |dir: &Path| ["run_fsdp", "run_ddp"].iter().all(|name| dir.join(name).is_file());
    if let Some(dir) = asked {
        return match holds(dir) {
            true => std::path::absolute(dir).map_err(|e| Error::io("resolve", dir, e)),
            false => Err(Error::input(format!("--bin-dir {}: run_fsdp and run_ddp not found", dir.display()))),
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
        eprintln!("run_fsdp and run_ddp are not next to this binary: building them");
        let built = cargo.status().is_ok_and(|status| status.success());
        if !built || !holds(&dir) {
            return Err(Error::input(format!(
                "run_fsdp and run_ddp are not in {}, and cargo could not build them: set --bin-dir DIR",
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

    fn common(launcher: &str) -> Common {
        let launch = LaunchArgs {
            launcher: launcher.parse().unwrap(),
            launcher_args: String::new(),
            nproc_per_node: None,
            nnodes: 1,
            timeout: 1.0,
            bin_dir: None,
        };
        Common {
            launch,
            bin: "/bin".into(),
            config: json!({"batch": {"batch_size": 3}, "fsdp": {"auto_wrap": "none"}}),
            flags: vec!["--seed".into(), "3".into()],
            output: "/out".into(),
            python: None,
        }
    }

    #[test]
    fn a_run_merges_its_changes_into_the_common_configuration() {
        let common = common("local");
        let all = catalogue::all();
        let entry = all.iter().find(|e| e.name == "tp2_ring2").unwrap();
        let config = common.config_of(entry, Path::new("/out/x"));
        // Four ranks share a sample, so a step has the same number of sequences as with one rank per sample.
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
    fn a_batch_size_after_the_dashes_keeps_steps_equal() {
        let common = Common { flags: ["--batch-size", "4", "--lr=1"].map(String::from).to_vec(), ..common("local") };
        let of = |name: &str| {
            let all = catalogue::all();
            let entry = all.into_iter().find(|entry| entry.name == name).unwrap();
            common.job(&entry, 1).unwrap().command[3..].join(" ")
        };
        assert_eq!([of("fsdp_manual"), of("tp2")], ["--batch-size 4 --lr=1", "--batch-size 8 --lr=1"]);
        assert_eq!(larger(&["--batch_size=3".into()], 2), ["--batch_size=6"]);
    }

    #[test]
    fn a_launcher_starts_every_rank() {
        let entry = &catalogue::all()[0];
        let line = |launcher| shell(&common(launcher).job(entry, 1).unwrap().command);
        let run = "/bin/run_ddp --config /out/ddp_fp32/config.yaml --seed 3";
        assert_eq!(line("local"), run);
        assert_eq!(line("srun -p a"), format!("srun -p a {run}"));
        let sizes = |launcher| common(launcher).config_of(entry, Path::new("/out/x"))["run"]["nproc_per_node"].clone();
        assert_eq!((sizes("torchrun"), sizes("srun -p a")), (json!(4), Value::Null));
    }

    #[test]
    fn words_are_quoted_for_the_shell() {
        assert_eq!(shell(&["a b".into(), "it's".into(), "--x=1".into(), "".into()]), r"'a b' 'it'\''s' --x=1 ''");
    }
}
