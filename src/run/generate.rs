//! `--generate "prompt"`: generates text with a checkpoint, a model directory, or an adapter's and its base model,
//! sharded over ranks. Never trains and writes no file.
//!
//! Every token needs all weights. If the ranks have the memory, weights are gathered for the first token and kept
//! unsharded; otherwise they are gathered for every token.
use crate::base::{Category, Error, Meter, Result, open};
use crate::ckpt::{self, Checkpointer, Resume};
use crate::comm::env::{self, RankEnv};
use crate::comm::exchange::Exchange;
use crate::comm::mesh::Mesh;
use crate::data::Tokenizer;
use crate::data::tokenizer::FILES;
use crate::device::Device;
use crate::device::gpu::cuda::Cuda;
use crate::engine::{EngineOptions, Generator, GeneratorOptions, Sampling};
use crate::nn::Decoder;
use crate::optim::Moments;
use crate::run::launch::device::{self, RankDevice};
use crate::run::launch::{self, Launch, RankJob};
use crate::run::plan::bytes::PlannedRanks;
use crate::run::plan::ranks::RankPlan;
use crate::run::plan::{batch, bytes, data, engine, facts, memory, model};
use crate::run::settings::idle;
use crate::run::settings::value::set;
use crate::run::settings::{DeviceName, Settings, ShardingName};
use crate::run::watch::RunLog;
use serde_json::Value;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Everything that a rank needs.
struct Request {
    ranks: RankPlan,
    /// Gathers weights for every token.
    lean: GeneratorOptions,
    /// Gathers weights once, with the bytes per rank; set if that takes more memory.
    kept: Option<(GeneratorOptions, usize)>,
    /// Directory of the weights, and of the adapter that is merged into them.
    model: PathBuf,
    adapter: Option<PathBuf>,
    tokenizer: Tokenizer,
    /// The prompt's tokens.
    prompt: Vec<u32>,
    /// Tokens that end the text.
    stop: Vec<u32>,
    sampling: Sampling,
    /// Signals that stop the run.
    signals: Vec<i32>,
    /// Logged by the first process.
    notes: Vec<String>,
}

/// Prints the model's continuation of `prompt` on standard output.
pub fn main(settings: Settings, launched: Option<&RankEnv>, prompt: &str) -> Result<()> {
    let job = RankJob::Generate(Box::new(settings.clone()), prompt.to_string());
    let watch = settings.watch.clone();
    let request = Request::new(settings, launched, prompt)?;
    if launched.is_none_or(|env| env.rank == 0 && env.parent_pid.is_none()) {
        RunLog::open(&watch, launched)?.notes(&request.notes);
    }
    match launched {
        Some(env) => request.run(env),
        None => launch::run(&Launch {
            nproc: request.ranks.nproc,
            ranks_per_gpu: request.ranks.ranks_per_gpu,
            job: &job,
            poll: Duration::from_millis(10),
            signals: &request.signals,
            deadline: None,
        }),
    }
}

impl Request {
    fn new(mut s: Settings, launched: Option<&RankEnv>, prompt: &str) -> Result<Request> {
        let (dir, adapter) = with_base(&s, model_dir(&s)?)?;
        ckpt::is_model(&dir)?;
        s.model.pretrain = Some(dir.clone());
        if let Some(adapter) = adapter.as_deref().filter(|dir| dir.join(FILES[0]).exists()) {
            s.data.tokenizer.get_or_insert_with(|| adapter.display().to_string());
        }
        s.data.max_len = Some(1); // there are no training sequences that could be too long
        let mut ranks = RankPlan::new(&mut s, launched)?;
        ranks.graphs = false; // shapes change with every prompt
        ranks.init_timeout = ranks.comm_timeout;
        s.notes.extend(idle::plan(&s, &facts::of_ranks(&s, &ranks, launched))?);
        let RankPlan { device, mesh, nproc, .. } = ranks;
        batch::solve(&mut s, &mesh)?;
        let tokenizer = data::tokenizer(&mut s);
        let spec = model::spec(&mut s, &tokenizer)?;
        let tokenizer = tokenizer.for_model(spec.vocab);
        if let Some(adapter) = &adapter {
            ckpt::inspect_adapter(adapter, &spec, Decoder::new(spec.clone())?.layouts())?;
        }

        let mut tokens = Vec::new();
        let bad = |e| Error::input(format!("--generate: the prompt {e}"));
        match (&tokenizer, data::format(&s.data, &tokenizer)?.asked(prompt)?) {
            (Tokenizer::None(why), asked) => tokens = ids(&asked.unwrap_or(prompt.into()), spec.vocab, why)?,
            (_, Some(asked)) => tokenizer.encode(&asked, &mut tokens).map_err(bad)?,
            (_, None) => {
                tokens.extend(tokenizer.affixes().0);
                tokenizer.encode(prompt, &mut tokens).map_err(bad)?;
            }
        }
        let room = spec.max_len.saturating_sub(tokens.len());
        if tokens.is_empty() {
            return Err(Error::input("--generate: the prompt is empty: give it at least one token"));
        }
        if room == 0 {
            return Err(Error::input(format!(
                "--generate: the prompt has {} tokens, but the model's max_positions is {}: shorten it",
                tokens.len(),
                spec.max_len
            )));
        }
        let count = set(&s.generate.max_new_tokens, "generate.max_new_tokens")?.min(room);
        let options = |s: &Settings| -> Result<(GeneratorOptions, usize)> {
            let EngineOptions { spec, strategy, cuts, .. } = engine::options(s, device, &mesh, spec.clone())?;
            let options = GeneratorOptions { spec, strategy, cuts, prompt: tokens.len(), count };
            let planned = bytes::of_writing(&options, &PlannedRanks::new(s, mesh, device, nproc))?;
            let counts = |category: Category| device != DeviceName::Cuda || category != Category::Host;
            Ok((options, planned.iter().filter(|p| counts(p.0)).map(|p| p.1).sum()))
        };
        let (lean, planned) = options(&s)?;
        ranks.planned = planned;
        let kept = options(&gathered_once(&s)).map(|kept| Some(kept).filter(|kept| kept.1 > planned))?;
        let g = &s.generate;
        let sampling = Sampling {
            temperature: set(&g.temperature, "generate.temperature")? as f32,
            top_k: set(&g.top_k, "generate.top_k")?,
            top_p: set(&g.top_p, "generate.top_p")? as f32,
            seed: set(&s.run.seed, "run.seed")?,
        };
        Ok(Request {
            ranks,
            lean,
            kept,
            stop: stop_tokens(&dir, &tokenizer)?,
            model: dir,
            adapter,
            tokenizer,
            prompt: tokens,
            signals: s.faults.signals()?,
            notes: s.notes,
            sampling,
        })
    }

    /// This process's rank.
    fn run(&self, env: &RankEnv) -> Result<()> {
        let env = &self.ranks.with_secret(env);
        if let Some(caution) = self.ranks.caution(env) {
            let _ = writeln!(std::io::stderr(), "{caution}");
        }
        if let Some(crowded) = self.ranks.crowded(env) {
            let _ = writeln!(std::io::stderr(), "{crowded}");
        }
        let RankDevice { device, member, gpu, .. } = device::take(&self.ranks, env, Meter::default())?;
        let mesh = Mesh::with_world(Mesh::world(&*member)?, member, self.ranks.mesh)?;
        let write = || {
            let options = match &self.kept {
                Some((kept, planned)) if self.fits(*planned, &*device, gpu.as_deref(), &mesh)? => kept,
                Some((_, planned)) => {
                    if mesh.rank() == 0 {
                        let gib = *planned as f64 / (1u64 << 30) as f64;
                        let what = "gathering weights for every token: keeping them would take";
                        let _ = writeln!(std::io::stderr(), "{what} {gib:.2} GiB per rank, more than is free");
                    }
                    &self.lean
                }
                None => &self.lean,
            };
            let mut generator = Generator::new(device.clone(), &mesh, options)?;
            let layouts = generator.decoder().layouts().to_vec();
            let mut checkpointer = Checkpointer::new(device, &mesh, &options.spec, &layouts, Moments::NONE)?;
            checkpointer.load_model(&self.model, generator.store())?;
            if let Some(adapter) = &self.adapter {
                checkpointer.merge(adapter, generator.store())?;
            }
            let started = Instant::now();
            let first = mesh.rank() == 0;
            let mut text = TextStream { tokenizer: &self.tokenizer, tokens: Vec::new(), shown: 0, first, failed: None };
            let written = generator.generate(&self.prompt, options.count, &self.sampling, &mut |token| {
                let more = !self.stop.contains(&token);
                if more {
                    text.push(token);
                }
                more && text.failed.is_none()
            })?;
            text.end(written.len() as f64 / started.elapsed().as_secs_f64())
        };
        write().inspect_err(|_| mesh.member.abort())
    }

    /// Whether every rank has the memory for `planned` bytes. Collective; called before the first large allocation.
    fn fits(&self, planned: usize, dev: &dyn Device, gpu: Option<&Cuda>, mesh: &Mesh) -> Result<bool> {
        let fits = match gpu {
            Some(gpu) => gpu.require(planned, self.ranks.ranks_per_gpu).is_ok(),
            None => memory::available().is_none_or(|bytes| planned * self.ranks.nproc <= bytes),
        };
        let mut exchange = Exchange::new(dev, mesh.world.clone(), "memory for weights", 1)?;
        Ok(exchange.gather(dev, &[u64::from(fits)])?.iter().all(|&fits| fits == 1))
    }
}

/// Generated text, streamed to standard output.
struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// Bytes already printed.
    shown: usize,
    /// Only rank 0 prints.
    first: bool,
    /// Why printing failed.
    failed: Option<std::io::Error>,
}

impl TextStream<'_> {
    fn push(&mut self, token: u32) {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens);
        // A character may take several tokens and decodes as U+FFFD until the last of them.
        if !text.ends_with('\u{fffd}') {
            self.show(&text);
        }
    }
    fn show(&mut self, text: &str) {
        if let Some(new) = text.get(self.shown..).filter(|new| self.first && !new.is_empty()) {
            self.shown = text.len();
            let mut out = std::io::stdout();
            let written = out.write_all(new.as_bytes()).and_then(|()| out.flush());
            // A missing reader is not a failure.
            self.failed = written.err().filter(|e| e.kind() != ErrorKind::BrokenPipe);
        }
    }
    fn end(mut self, tokens_per_sec: f64) -> Result<()> {
        if let Some(e) = self.failed {
            return Err(Error::io("write", "standard output", e));
        }
        let rest = self.tokenizer.decode(&self.tokens);
        self.show(&format!("{rest}\n"));
        if self.first {
            let _ = writeln!(std::io::stderr(), "{} tokens, {tokens_per_sec:.1} tok/s", self.tokens.len());
        }
        self.failed.map_or(Ok(()), |e| Err(Error::io("write", "standard output", e)))
    }
}

/// The prompt of a model without a tokenizer: token ids, separated by spaces or commas.
fn ids(prompt: &str, vocab: usize, why: &str) -> Result<Vec<u32>> {
    let words = prompt.split(|c: char| c.is_whitespace() || c == ',').filter(|word| !word.is_empty());
    let id = |word: &str| match word.parse() {
        Ok(id) if (id as usize) < vocab => Ok(id),
        Ok(id) => Err(Error::input(format!("--generate: the prompt has token id {id}, but vocab_size is {vocab}"))),
        Err(_) => Err(Error::input(format!(
            "--generate: no tokenizer for the prompt: {why}. Or give token ids, such as \"3 17 5\""
        ))),
    };
    words.map(id).collect()
}

/// The same settings with weights that stay unsharded: SHARD_GRAD_OP, or ZeRO stage 2.
fn gathered_once(s: &Settings) -> Settings {
    let mut s = s.clone();
    s.fsdp.sharding = Some(ShardingName::ShardGradOp);
    if s.fsdp.zero_stage == Some(3) {
        (s.fsdp.zero_stage, s.zero) = (Some(2), Default::default());
    }
    s
}

/// The checkpoint of `--resume` or `--ckpt-dir`, or else the model of `--pretrain`, which may also be a checkpoint
/// directory.
fn model_dir(s: &Settings) -> Result<PathBuf> {
    let c = &s.checkpoint;
    let from = match (c.resume.as_deref(), &c.ckpt_dir, &s.model.pretrain) {
        (None | Some("auto"), Some(dir), _) => dir,
        (Some("best"), Some(dir), _) => &dir.join("best"),
        (Some(dir), ..) if dir != "auto" => &PathBuf::from(dir),
        (_, _, Some(dir)) => dir,
        _ => {
            return Err(Error::input(
                "--generate needs a model: add --pretrain DIR, or --ckpt-dir DIR for the newest checkpoint there",
            ));
        }
    };
    if from.join(ckpt::hf::FILE).exists() {
        return Ok(from.clone());
    }
    let newest = if from.is_file() { None } else { ckpt::newest(from)? };
    match (newest, &s.model.pretrain) {
        (Some(newest), _) => Ok(newest),
        (None, Some(dir)) if dir == from => Ok(from.clone()),
        (None, _) => ckpt::resolve(None, &Resume::Dir(from.clone()))?
            .ok_or_else(|| Error::input(format!("{}: holds no checkpoint", from.display()))),
    }
}

/// The model in `dir`; if it is an adapter alone, its base model (of `--pretrain`, or that it names) and itself.
fn with_base(s: &Settings, dir: PathBuf) -> Result<(PathBuf, Option<PathBuf>)> {
    if !dir.join(ckpt::adapter::FILE).exists() || ckpt::is_model(&dir).is_ok() {
        return Ok((dir, None));
    }
    let given = s.model.pretrain.clone().filter(|base| *base != dir);
    let base = given.or_else(|| ckpt::adapter::base(&dir).map(PathBuf::from));
    let cache = s.data.cache_dir.clone().unwrap_or_else(env::cache_dir);
    let base = base.map(|base| ckpt::gguf::resolve(&base, &cache)).transpose()?;
    match base.filter(|base| base.is_dir()) {
        Some(base) => Ok((base, Some(dir))),
        None => Err(Error::input(format!(
            "--generate: {} is a LoRA adapter, and its base model ({}) is not a directory here: add --pretrain BASE \
             --resume {}",
            dir.display(),
            ckpt::adapter::base(&dir).unwrap_or("not named".into()),
            dir.display()
        ))),
    }
}

/// End-of-text tokens: `eos_token_id` of generation_config.json, else of config.json, and the tokenizer's own.
fn stop_tokens(model: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut stop: Vec<u32> = tokenizer.eos().into_iter().collect();
    for name in ["generation_config.json", ckpt::hf::FILE] {
        let path = model.join(name);
        let Ok(text) = open::read(&path) else { continue };
        let bad = |what: String| Error::input(format!("{}: {what}", path.display()));
        let parsed: Value = serde_json::from_slice(&text).map_err(|e| bad(format!("is not JSON ({e})")))?;
        let ids = match &parsed["eos_token_id"] {
            Value::Null => continue,
            Value::Array(ids) => ids.clone(),
            one => vec![one.clone()],
        };
        for id in ids {
            let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
            stop.push(number.ok_or_else(|| bad(format!("eos_token_id {id}: it must be a token id")))?);
        }
        break;
    }
    Ok(stop)
}
