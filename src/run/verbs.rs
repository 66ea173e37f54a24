//! The verbs of the binary `flatshard`: each is a short way to write a command line of `run_fsdp`. Never knows what a
//! flag does: a verb is a row of `VERBS`, and nothing works only here.
use crate::base::columns::wrap;
use crate::base::{Error, Result};
use crate::run::settings::args::Parsed;
use crate::run::settings::synonyms::{self, one_of};

/// A verb: what may follow it before any flag, and which flags that stands for.
pub struct VerbLine {
    pub name: &'static str,
    /// What it does, in a line.
    pub about: &'static str,
    /// Words that follow the verb, each with its flag. The last may be many, if its name ends with `...`.
    words: &'static [(&'static str, &'static str)],
    /// Flags that the verb stands for, unless they are given.
    flags: &'static [&'static str],
    /// One of these has to be given if the words are not.
    instead: &'static [&'static [&'static str]],
}

const MODEL: (&str, &str) = ("MODEL", "--pretrain");
const DATA: (&str, &str) = ("DATA...", "--dataset");
const NO_MODEL: &[&str] = &["--pretrain", "--config", "--ckpt-dir", "--resume"];
const NO_DATA: &[&str] = &["--dataset", "--config"];

/// In the order in which help lists them.
pub const VERBS: [VerbLine; 14] = [
    VerbLine {
        name: "train",
        about: "train as a file says: ours, or one of Axolotl, LLaMA-Factory, TRL or torchtitan",
        words: &[("FILE", "--config")],
        flags: &[],
        instead: &[&["--config"]],
    },
    VerbLine {
        name: "pretrain",
        about: "train on text: a new model (MODEL is llama or gpt), or one that exists",
        words: &[MODEL, DATA],
        flags: &[],
        instead: &[&["--arch", "--pretrain", "--config", "--ckpt-dir", "--resume"], &[]],
    },
    VerbLine::training("sft", "fine-tune on conversations, or on prompts and answers", &["--objective", "sft"]),
    VerbLine::training("dpo", "learn from pairs of chosen and rejected answers", &["--objective", "dpo"]),
    VerbLine::training("kto", "learn from answers that are good or bad", &["--objective", "kto"]),
    VerbLine::training("rm", "train a reward model on pairs", &["--objective", "rm"]),
    VerbLine {
        name: "grpo",
        about: "learn from rewards of samples: --reward R, or --rollouts FILE of recorded ones",
        words: &[MODEL, DATA],
        flags: &["--objective", "grpo"],
        instead: &[NO_MODEL, &[]],
    },
    VerbLine {
        name: "distill",
        about: "learn from a larger model: --teacher MODEL, with --on-policy from its view of the model's own samples",
        words: &[MODEL, DATA],
        flags: &["--objective", "distill"],
        instead: &[NO_MODEL, NO_DATA],
    },
    VerbLine {
        name: "chat",
        about: "talk to a model, an adapter or a checkpoint",
        words: &[MODEL],
        flags: &["--chat"],
        instead: &[NO_MODEL],
    },
    VerbLine {
        name: "generate",
        about: "continue a prompt, or all prompts in a file of rows at once",
        words: &[MODEL, ("PROMPT", "--generate")],
        flags: &[],
        instead: &[NO_MODEL, &["--generate"]],
    },
    VerbLine {
        name: "merge",
        about: "merge an adapter into its model: --save-hf DIR or --save-gguf FILE",
        words: &[("ADAPTER", "--lora-merge"), ("MODEL", "--pretrain")],
        flags: &[],
        instead: &[&["--lora-merge"], &[]],
    },
    VerbLine {
        name: "export",
        about: "write a model in another form: --save-hf DIR or --save-gguf FILE",
        words: &[MODEL],
        flags: &["--export"],
        instead: &[NO_MODEL],
    },
    VerbLine {
        name: "plan",
        about: "print the settings, the mesh and the bytes per rank, and start nothing",
        words: &[MODEL, DATA],
        flags: &["--print-config"],
        instead: &[&[], &[]],
    },
    VerbLine {
        name: "samples",
        about: "print the first samples as they would be trained on",
        words: &[MODEL, DATA],
        flags: &["--print-samples", "5"],
        instead: &[&[], &["--dataset", "--config", "--rollouts"]],
    },
];

/// Each verb's name, and what it does.
pub const LINES: [(&str, &str); VERBS.len()] = {
    let mut lines = [("", ""); VERBS.len()];
    let mut i = 0;
    while i < VERBS.len() {
        lines[i] = (VERBS[i].name, VERBS[i].about);
        i += 1;
    }
    lines
};

impl VerbLine {
    /// Training on rows that start from a model.
    const fn training(name: &'static str, about: &'static str, flags: &'static [&'static str]) -> VerbLine {
        VerbLine { name, about, words: &[MODEL, DATA], flags, instead: &[NO_MODEL, NO_DATA] }
    }

    pub fn usage(&self) -> String {
        let words: Vec<&str> = self.words.iter().map(|(name, _)| *name).collect();
        format!("flatshard {} {} [FLAGS of run_fsdp]", self.name, words.join(" "))
    }

    /// The command line of `run_fsdp` for the words behind the verb.
    fn expand(&self, words: &[String]) -> Result<Vec<String>> {
        let plain = words.iter().take_while(|word| *word == "-" || !word.starts_with('-')).count();
        let (given, flags) = words.split_at(plain);
        let has = |flag: &str| {
            flags.iter().any(|word| {
                let word = word.split_once('=').map_or(&word[..], |(name, _)| name).replace('_', "-");
                word == flag || means(&word, flag)
            })
        };
        let asks_help =
            flags.iter().any(|word| ["-h", "--help", "--help-all", "--version", "--man"].contains(&&word[..]));
        let mut line = Vec::new();
        // A file of settings in place of a model.
        let settings = given.first().filter(|first| self.name != "train" && is_settings(first));
        let settings = settings.filter(|_| given.len() == 1);
        line.extend(settings.into_iter().flat_map(|file| ["--config".to_string(), file.clone()]));
        let has = |flag: &str| settings.is_some() && flag == "--config" || has(flag);
        let mut rest = if settings.is_none() { given } else { &given[1..] };
        for ((name, flag), instead) in self.words.iter().zip(self.instead) {
            let count = if name.ends_with("...") { rest.len() } else { rest.len().min(1) };
            let (own, more) = rest.split_at(count);
            rest = more;
            if own.is_empty() {
                if !instead.is_empty() && !asks_help && !instead.iter().any(|flag| has(flag)) {
                    let what = name.trim_end_matches("...");
                    return Err(Error::input(format!("flatshard {} needs {what}: {}", self.name, self.usage())));
                }
                continue;
            }
            let flag = if self.name == "pretrain" && ["llama", "gpt"].contains(&&own[0][..]) { "--arch" } else { flag };
            line.push(flag.to_string());
            line.extend(own.iter().cloned());
        }
        if let Some(extra) = rest.first() {
            return Err(Error::input(format!(
                "flatshard {}: {extra} is one word too many: {}",
                self.name,
                self.usage()
            )));
        }
        let preview = self.name == "samples" && (has("--preview") || has("--print-samples"));
        if let Some(first) = self.flags.first()
            && !has(first)
            && !preview
        {
            line.extend(self.flags.iter().map(|word| word.to_string()));
        }
        // Only GRPO learns from rollouts, and samples are those of what is learned.
        if self.name == "samples" && has("--rollouts") && !has("--objective") {
            line.extend(["--objective".to_string(), "grpo".to_string()]);
        }
        line.extend(flags.iter().cloned());
        Ok(line)
    }
}

/// Whether `word` is another tool's spelling of our `flag`.
fn means(word: &str, flag: &str) -> bool {
    let ours = flag.trim_start_matches('-').replace('-', "_");
    let rows = word.strip_prefix("--").map(synonyms::of_flag).unwrap_or_default();
    rows.iter().any(|row| row.kind == "flag" && row.key == ours)
}

/// Whether `word` names a file of settings, by its end; a model never has it.
fn is_settings(word: &str) -> bool {
    [".yaml", ".yml", ".toml"].iter().any(|end| word.ends_with(end))
}

/// What the words of a command line of `flatshard` ask for: a text to print, or a command line of `run_fsdp`.
pub fn read(words: Vec<String>) -> Result<Parsed<Vec<String>>> {
    let Some(first) = words.first().filter(|word| *word != "help") else { return Ok(Parsed::Help(overview())) };
    if ["-h", "--help"].contains(&&first[..]) {
        return Ok(Parsed::Help(overview()));
    }
    match VERBS.iter().find(|verb| verb.name == first) {
        Some(verb) => verb.expand(&words[1..]).map(|words| Parsed::Run(Box::new(words))),
        // --version, --completions, --man: those of run_fsdp.
        None if first.starts_with("--") => Ok(Parsed::Run(Box::new(words))),
        None => {
            let names = VERBS.iter().map(|verb| verb.name);
            Err(Error::input(format!("flatshard {first}: the verb must be {}", one_of(first, names))))
        }
    }
}

/// The words of a training binary, whose command lines begin with no verb.
pub fn none(program: &str, words: Vec<String>) -> Result<Parsed<Vec<String>>> {
    match words.first().and_then(|first| VERBS.iter().find(|verb| verb.name == first)) {
        Some(verb) => {
            Err(Error::input(format!("{program} takes flags only, and {} is a verb: {}", verb.name, verb.usage())))
        }
        None => Ok(Parsed::Run(Box::new(words))),
    }
}

/// The verbs, with an example.
fn overview() -> String {
    let width = VERBS.iter().map(|verb| verb.name.len()).max().unwrap_or(0);
    let lines = VERBS.iter().map(|verb| wrap(&format!("  {:width$}  ", verb.name), [verb.about], "", 100));
    format!(
        "Train, fine-tune and talk to language models, sharded over ranks.\n\nUsage: flatshard VERB MODEL [DATA...] [FLAGS of \
         run_fsdp]\n\nVerbs:\n{}\n\nExamples:\n  flatshard sft model chats.jsonl --lora-rank 8 --save-hf tuned\n  flatshard \
         chat tuned\n\nA verb is a short way to write flags of run_fsdp: `flatshard sft M D` is `run_fsdp --pretrain M \
         --dataset D --objective sft`.\n`flatshard VERB --help` lists the main flags, --help-all all of them.\n",
        lines.collect::<Vec<_>>().join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(String::from).collect()
    }

    #[test]
    fn verbs_are_command_lines() {
        for (typed, line) in [
            ("sft m a.jsonl b.jsonl --lr 1", "--pretrain m --dataset a.jsonl b.jsonl --objective sft --lr 1"),
            ("sft --config c.yaml", "--objective sft --config c.yaml"),
            ("dpo m --dataset d", "--pretrain m --objective dpo --dataset d"),
            ("pretrain llama text --embed-dim 8", "--arch llama --dataset text --embed-dim 8"),
            ("pretrain m text", "--pretrain m --dataset text"),
            ("generate m hello --temperature 0", "--pretrain m --generate hello --temperature 0"),
            ("merge a --save-hf out", "--lora-merge a --save-hf out"),
            ("merge a m --save-hf out", "--lora-merge a --pretrain m --save-hf out"),
            ("samples m d", "--pretrain m --dataset d --print-samples 5"),
            ("samples m d --preview 2", "--pretrain m --dataset d --preview 2"),
            ("samples m --rollouts r", "--pretrain m --print-samples 5 --objective grpo --rollouts r"),
            ("chat m", "--pretrain m --chat"),
            ("export m --save-gguf f", "--pretrain m --export --save-gguf f"),
            ("plan", "--print-config"),
            ("train c.yaml --lr 1", "--config c.yaml --lr 1"),
            ("sft c.yml --lr 1", "--config c.yml --objective sft --lr 1"),
            ("dpo --model_name_or_path m --dataset_name d", "--objective dpo --model_name_or_path m --dataset_name d"),
            ("sft --help", "--objective sft --help"),
            ("--version", "--version"),
        ] {
            let Parsed::Run(found) = read(words(typed)).unwrap() else { panic!("{typed} prints help") };
            assert_eq!(*found, words(line), "{typed}");
        }
        for (typed, says) in [
            ("sft m", "needs DATA"),
            ("chat", "needs MODEL"),
            ("chat m n", "n is one word too many"),
            ("stf m d", "sft"),
        ] {
            let text = read(words(typed)).err().unwrap().to_string();
            assert!(text.contains(says), "{typed}: {text}");
        }
        assert!(matches!(read(vec![]), Ok(Parsed::Help(text)) if text.contains("sft")));
    }
}
