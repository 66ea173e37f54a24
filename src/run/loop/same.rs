//! Checks that all ranks run the same program with the same configuration on the same data from the same checkpoint,
//! over the world group, before anything is allocated or read. Never resolves a difference, and never writes.
//!
//! Ranks of an external launcher have each made their own plan, from the arguments, files and binary on their host.
//! They compare one hash, and exchange everything that went into it only if it differs.
//!
//! Contents are compared, not paths: each host may have its own copy of the data, the tokenizer and the initial model,
//! anywhere, if the copies are identical. Directories that all ranks write to: `run/loop/shared.rs`.
use crate::base::{Error, Result, hex, printable};
use crate::ckpt;
use crate::comm::exchange::{Exchange, texts};
use crate::comm::{Collective, Tag};
use crate::data::{Dataset, Tokenizer};
use crate::device::Device;
use crate::run::plan::Plan;
use crate::run::plan::prompts::SamplePrompts;
use crate::run::plan::ranks::RankPlan;
use crate::run::plan::record;
use crate::run::plan::resume::ResumeFrom;
use crate::run::settings::Settings;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Settings that may differ between hosts: the number of local ranks, and paths.
const OWN: [(&str, &str); 29] = [
    ("run", "nproc_per_node"),
    ("run", "threads_per_rank"),
    ("run", "job_secret_file"),
    ("run", "metrics_path"), // rank 0 writes it
    ("run", "sample_prompts"),
    ("run", "after"),
    ("model", "pretrain"),
    ("objective", "ref_pretrain"),
    ("objective", "teacher"),
    ("objective", "rollouts"), // compared as data
    ("data", "dataset"),
    ("data", "eval_dataset"),
    ("data", "tokenizer"),
    ("data", "tokenizer_chat_template"), // changes the tokens, which are compared
    ("data", "cache"),
    ("data", "cache_dir"),
    ("data", "cache_limit"),
    ("fsdp", "deepspeed"), // its contents are in the other settings
    ("checkpoint", "ckpt_dir"),
    ("checkpoint", "save_hf"),
    ("checkpoint", "save_adapter"),
    ("checkpoint", "save_gguf"),
    ("checkpoint", "resume"),
    ("faults", "save_traces_folder"),
    ("watch", "log_file"),
    ("watch", "tensorboard"),
    ("wandb", "wandb_dir"),
    ("trace", "trace_folder"),
    ("trace", "memory_timeline"),
];
/// Stands for their values: all ranks must set them, or none.
const GIVEN: &str = "a value";
/// Differences shown in an error.
const SHOWN: usize = 5;
/// Characters shown of a value.
const VALUE: usize = 200;

/// What is compared besides settings, and the remedy if it differs.
const REMEDIES: [(&str, &str); 9] = [
    (PROGRAM, "install the same binary on all hosts"),
    ("data", "copies of --dataset on different hosts must be identical"),
    ("eval_data", "copies of --eval-dataset on different hosts must be identical"),
    ("sample_prompts", "copies of --sample-prompts, or of prompts to evaluate, on different hosts must be identical"),
    ("tokenizer", "copies of --tokenizer on different hosts must be identical"),
    ("model", "copies of --pretrain on different hosts must be identical"),
    ("reference_weights", "copies of --ref-pretrain on different hosts must be identical"),
    ("teacher_weights", "copies of --teacher on different hosts must be identical"),
    ("resume", "all hosts must use the same --ckpt-dir, on a shared file system"),
];
const PROGRAM: &str = "program";
const ARGUMENTS: &str = "start all ranks with the same arguments and configuration files";

/// What one rank runs.
#[derive(Serialize, Deserialize)]
struct Facts {
    host: String,
    /// Key and value: first those of [`REMEDIES`], then the settings.
    facts: FactList,
}

/// Keys and values.
pub type FactList = Vec<(String, String)>;

/// Returns [`Error::Input`] on all ranks if their `facts` differ. Collective over the world group.
pub fn check(
    facts: impl FnOnce() -> Result<FactList>,
    host: &str,
    dev: &dyn Device,
    world: &Arc<dyn Collective>,
) -> Result<()> {
    if world.size() == 1 {
        return Ok(());
    }
    let mine = Facts { host: host.into(), facts: facts()? };
    let hash = mine.facts.iter().flat_map(|(key, value)| [key, value]).fold(Xxh3::new(), |mut hash, text| {
        hash.update(text.as_bytes());
        hash.update(&[0]);
        hash
    });
    let hashes = Exchange::new(dev, world.clone(), "agreement", 1)?.gather(dev, &[hash.digest()])?;
    if hashes.iter().all(|hash| *hash == hashes[0]) {
        return Ok(());
    }
    let text = serde_json::to_string(&mine).map_err(|e| Error::op("agreement", e.to_string()))?;
    let ranks = texts(dev, world, "agreement", &text)?;
    let _ = world.barrier(Tag::new("agreement", 0)); // nobody exits before all have read
    let ranks: Vec<Facts> = ranks.iter().filter_map(|text| Some(shown(serde_json::from_str(text).ok()?))).collect();
    if ranks.len() < world.size() {
        return Err(Error::input(format!("ranks run different programs: {}", REMEDIES[0].1)));
    }
    Err(Error::Input(differences(&ranks)))
}

/// Escapes control characters, which JSON decoding has restored, for the terminal.
fn shown(Facts { host, facts }: Facts) -> Facts {
    let shown = |text: &String| printable(text, VALUE);
    Facts { host: shown(&host), facts: facts.iter().map(|(key, value)| (shown(key), shown(value))).collect() }
}

/// The facts of a training run.
pub fn of_training(plan: &Plan) -> Result<FactList> {
    let what = |data: &Dataset| {
        let weights = data.shares().map_or(String::new(), |shares| format!(", weights {shares:?}"));
        let (rows, tokens, hash) = (data.rows(), data.report().tokens, data.fingerprint());
        format!("{rows} rows, {tokens} tokens ({hash:016x}){weights}")
    };
    let resume = match &plan.resume {
        Some(ResumeFrom { dir, state, .. }) => format!("step {} ({:016x})", state.step, ckpt::fingerprint(dir)?),
        None => "the beginning".into(),
    };
    let prompts = plan.prompts.as_ref().map(SamplePrompts::fingerprint);
    let own = [
        ("data", what(&plan.dataset)),
        ("eval_data", plan.eval.as_deref().map_or("none".into(), what)),
        ("sample_prompts", prompts.map_or("none".into(), |hash| format!("{hash:016x}"))),
        ("resume", resume),
        ("max_live_parameters", plan.live.map_or("none".into(), |live| live.to_string())),
    ];
    let mut all = of_model(&plan.settings, &plan.ranks, &plan.tokenizer)?;
    let models = plan.models.iter().map(|(key, value)| (key.clone(), value.as_str().unwrap_or_default().to_string()));
    // The base of adapters is the model, and so is the reference, unless another is given.
    let others: FactList = models.filter(|(_, hash)| all.iter().all(|(_, known)| known != hash)).collect();
    let own = own.map(|(key, value)| (key.into(), value)).into_iter().chain(others);
    all.splice(1..1, own); // differences are shown in this order
    Ok(all)
}

/// The facts of any work with a model, the program first.
pub fn of_model(s: &Settings, ranks: &RankPlan, tokenizer: &Tokenizer) -> Result<FactList> {
    let model = s.model.pretrain.as_deref().map(ckpt::weights_hash).transpose()?;
    let facts = [
        (PROGRAM, program()?),
        ("tokenizer", format!("{:016x}", tokenizer.fingerprint())),
        ("model", model.unwrap_or_else(|| "none".into())),
        ("device", format!("{:?}", ranks.device).to_lowercase()),
    ];
    let mut facts: FactList = facts.into_iter().map(|(key, value)| (key.into(), value)).collect();
    if let Value::Object(sections) = record::config(s) {
        for (section, body) in &sections {
            for (key, value) in body.as_object().into_iter().flatten() {
                let own = OWN.contains(&(section, key));
                facts.push((format!("{section}.{key}"), if own { GIVEN.into() } else { value.to_string() }));
            }
        }
    }
    Ok(facts)
}

/// "ranks disagree on optim.lr: rank 0 has 0.001, rank 3 has 0.003. Start all ...".
fn differences(ranks: &[Facts]) -> String {
    let mut keys: Vec<&String> = Vec::new();
    for (key, _) in ranks.iter().flat_map(|rank| &rank.facts) {
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let hosts: Vec<&str> = ranks.iter().map(|rank| rank.host.as_str()).collect();
    let different = keys.iter().filter_map(|key| {
        let value = |rank: &Facts| rank.facts.iter().find(|(k, _)| k == *key).map_or("nothing".into(), |f| f.1.clone());
        let values: Vec<String> = ranks.iter().map(value).collect();
        (values.iter().any(|v| *v != values[0])).then(|| (key.as_str(), format!("{key}: {}", who_has(&values, &hosts))))
    });
    let mut different: Vec<(&str, String)> = different.collect();
    if different.first().is_some_and(|(key, _)| *key == PROGRAM) {
        different.truncate(1); // other differences may only follow from it
    }
    let remedy = |key: &str| REMEDIES.iter().find(|(own, _)| *own == key).map_or(ARGUMENTS, |(_, remedy)| remedy);
    let mut remedies: Vec<&str> = different.iter().map(|(key, _)| remedy(key)).collect();
    remedies.dedup();
    let shown: Vec<&str> = different.iter().take(SHOWN).map(|(_, what)| what.as_str()).collect();
    let more = different.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    format!("ranks disagree on {}{more}; {}", shown.join("; "), remedies.join("; "))
}

/// "rank 0 has a, ranks 1 and 2 have b", in rank order; with host names if there are several hosts.
pub fn who_has(values: &[String], hosts: &[&str]) -> String {
    let mut groups: Vec<(&String, Vec<usize>)> = Vec::new();
    for (rank, value) in values.iter().enumerate() {
        match groups.iter_mut().find(|(of, _)| *of == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((value, vec![rank])),
        }
    }
    let parts = groups.iter().map(|(value, ranks)| {
        let has = if ranks.len() == 1 { "has" } else { "have" };
        format!("{} {has} {value}", named(ranks, hosts))
    });
    parts.collect::<Vec<_>>().join(", ")
}

/// "rank 3", "ranks 0 and 2", "ranks 4 to 7 on node2".
pub fn named(ranks: &[usize], hosts: &[&str]) -> String {
    let all_alike = hosts.windows(2).all(|pair| pair[0] == pair[1]);
    let mut on: Vec<&str> = ranks.iter().filter_map(|&rank| hosts.get(rank).copied()).filter(|_| !all_alike).collect();
    on.dedup();
    let on = match on.len() {
        0 => String::new(),
        1..=3 => format!(" on {}", on.join(", ")),
        n => format!(" on {n} hosts"),
    };
    let run = ranks.windows(2).all(|pair| pair[0] + 1 == pair[1]);
    let text = match ranks {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        [first, .., last] if run && ranks.len() > 2 => format!("ranks {first} to {last}"),
        [first @ .., last] if ranks.len() <= 4 => {
            let first: Vec<String> = first.iter().map(usize::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
        }
        [first, ..] => format!("ranks {first} and {} more", ranks.len() - 1),
    };
    text + &on
}

/// Version and build: the GNU build-id, or else a hash of the executable.
fn program() -> Result<String> {
    let exe = Path::new("/proc/self/exe"); // valid even if the file has been replaced since
    let failed = |e| Error::io("read", exe, e);
    let mut file = File::open(exe).map_err(failed)?;
    let mut head = Vec::new();
    file.by_ref().take(4096).read_to_end(&mut head).map_err(failed)?;
    let build = match note(&head) {
        Some(id) => hex(id),
        None => {
            file.read_to_end(&mut head).map_err(failed)?;
            format!("{:016x}", xxh3_64(&head))
        }
    };
    Ok(format!("{} {}, build {build}", env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION")))
}

/// The build-id of an ELF file that starts with `head`: a note of type 3 and name "GNU", which the linker puts after
/// the program headers.
fn note(head: &[u8]) -> Option<&[u8]> {
    let at = head.windows(8).position(|w| w == b"\x03\0\0\0GNU\0")?;
    let size = u32::from_le_bytes(head.get(at.checked_sub(4)?..at)?.try_into().ok()?) as usize;
    head.get(at + 8..at + 8 + size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::settings::Settings;

    fn rank(host: &str, facts: &[(&str, &str)]) -> Facts {
        let facts = facts.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        Facts { host: host.into(), facts }
    }

    #[test]
    fn settings_that_may_differ_exist() {
        let settings = serde_json::json!(Settings::default());
        for (section, key) in OWN {
            assert!(settings[section].get(key).is_some(), "{section}.{key}");
        }
    }

    #[test]
    fn ranks_are_named_by_number_and_with_several_hosts_by_host() {
        let values: Vec<String> = ["a", "b", "b", "a", "b"].map(String::from).into();
        assert_eq!(who_has(&values, &["x"; 5]), "ranks 0 and 3 have a, ranks 1, 2 and 4 have b");
        let hosts = ["x", "x", "y", "y", "y"];
        let values: Vec<String> = ["a", "a", "b", "b", "b"].map(String::from).into();
        assert_eq!(who_has(&values, &hosts), "ranks 0 and 1 on x have a, ranks 2 to 4 on y have b");
        assert_eq!(named(&[1, 2], &hosts), "ranks 1 and 2 on x, y");
        assert_eq!(named(&[0, 2, 4, 6, 8], &["x"; 9]), "ranks 0 and 4 more");
    }

    #[test]
    fn all_differing_keys_are_reported_unless_the_program_differs() {
        let a = [("program", "p"), ("data", "5 rows"), ("optim.lr", "0.1"), ("run.seed", "1")];
        let b = [("program", "p"), ("data", "5 rows"), ("optim.lr", "0.3"), ("run.seed", "1"), ("run.epochs", "2")];
        assert_eq!(
            differences(&[rank("x", &a), rank("x", &b)]),
            format!(
                "ranks disagree on optim.lr: rank 0 has 0.1, rank 1 has 0.3; run.epochs: rank 0 has nothing, rank 1 \
                has 2; \
                 {ARGUMENTS}"
            )
        );
        let c = [("program", "q"), ("data", "6 rows"), ("optim.lr", "0.3")];
        assert_eq!(
            differences(&[rank("x", &a), rank("y", &c)]),
            format!("ranks disagree on program: rank 0 on x has p, rank 1 on y has q; {}", REMEDIES[0].1)
        );
        let many = ["a", "b", "c", "d", "e", "f", "g"].map(|key| (key, "1"));
        let none = differences(&[rank("x", &many), rank("x", &[])]);
        assert!(none.contains("e: rank 0 has 1") && !none.contains("f: ") && none.contains("; and 2 more; "), "{none}");
    }

    #[test]
    fn the_build_is_the_gnu_build_id() {
        let note_of = |id: &[u8]| {
            [b"\x7fELF....\x04\0\0\0", &(id.len() as u32).to_le_bytes()[..], b"\x03\0\0\0GNU\0", id].concat()
        };
        assert_eq!(note(&[note_of(b"0123456789abcdefghij"), vec![0; 9]].concat()), Some(&b"0123456789abcdefghij"[..]));
        assert_eq!(note(&note_of(b"0123")[..20]), None, "cut short");
        assert_eq!(note(b"\x7fELF"), None);
        assert_eq!(program().unwrap(), program().unwrap());
    }
}
