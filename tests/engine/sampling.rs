//! Many texts at once: a text has the same bits alone and among others, on any mesh; and the log-probability of each of
//! its tokens is the one that training computes, bit for bit, in any store and dtype.
use crate::common::stores::*;
use crate::common::*;
use flatshard::base::DType;
use flatshard::comm::{Axis, MeshSizes};
use flatshard::data::{MicroBatch, SampleRow};
use flatshard::engine::{
    Engine, EngineOptions, Generator, GeneratorOptions, Grpo, GrpoLoss, Objective, Prompt, ReferenceModel, SampledText,
    SamplerSize, Sampling, Step, Strategy,
};
use flatshard::nn::{Checkpointing, Cuts, Lora, Spec, Tuning};
use flatshard::store::initialize;
use std::sync::Arc;

const SAMPLING: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 7, step: 3 };
const COUNT: usize = 6;
/// The longest prompt ends shortly before a block of the delta rule does.
const LONGEST: usize = 61;

/// Prompts of different lengths, some with several samples and some longer than a page.
fn prompts(spec: &Spec, count: usize) -> Vec<Prompt> {
    let token = |i: usize, t: usize| ((i * 31 + t * 7 + t * t) % spec.vocab) as u32;
    let prompt = |i: usize| {
        let len = if i % 7 == 3 { LONGEST } else { 1 + i * 5 % 13 };
        Prompt::new(i as u64, (0..len).map(|t| token(i, t)).collect(), 1 + i % 3)
    };
    (0..count).map(prompt).collect()
}

/// Heads whose single rows are read where they are.
fn wide(spec: Spec) -> Spec {
    Spec { head_dim: 32, ..spec }
}

fn bits(texts: &[SampledText]) -> Vec<(usize, Vec<u32>, Vec<u32>)> {
    texts.iter().map(|t| (t.sample, t.ids.clone(), t.logprobs.iter().map(|x| x.to_bits()).collect())).collect()
}

fn sampled(
    spec: &Spec,
    strategy: &Arc<dyn Strategy>,
    sizes: MeshSizes,
    size: SamplerSize,
    prompts: &[Prompt],
) -> Vec<SampledText> {
    let options = GeneratorOptions { spec: spec.clone(), strategy: strategy.clone(), cuts: Cuts::ALL, size };
    let mut texts = mesh_ranks(sizes, |rank| {
        let mut generator = Generator::new(rank.device.clone(), &rank.mesh, &options)?;
        initialize(generator.store(), 3, &*rank.device)?;
        // Some tokens end a text, so that texts leave at different times.
        generator.sample(prompts, COUNT, &SAMPLING, &mut |of| of.ids.last().is_none_or(|id| id % 16 != 1))
    });
    assert!(texts.iter().all(|of| bits(of) == bits(&texts[0])), "ranks disagree");
    texts.swap_remove(0)
}

#[test]
fn a_text_is_the_same_alone_and_among_others() {
    let one = MeshSizes::sharded(1);
    for spec in [llama(), wide(gemma3()), sparse(), qwen35(), granite_hybrid(), nemotron_h(), lfm2()]
        .map(|spec| Spec { max_len: 80, ..spec })
    {
        for dtype in [DType::F32, DType::Bf16] {
            let (strategy, prompts) = (ddp(dtype), prompts(&spec, 16));
            let many = SamplerSize::of_many(LONGEST, COUNT, 40);
            let all = sampled(&spec, &strategy, one, many, &prompts);
            assert_eq!(all.len(), prompts.iter().map(|prompt| prompt.samples).sum::<usize>());
            assert!(all.iter().any(|text| text.ended) && all.iter().any(|text| text.ids.len() == COUNT));
            for (i, prompt) in prompts.iter().enumerate() {
                let alone = sampled(
                    &spec,
                    &strategy,
                    one,
                    SamplerSize::of_many(LONGEST, COUNT, 1),
                    std::slice::from_ref(prompt),
                );
                let among: Vec<SampledText> = all.iter().filter(|text| text.prompt == i).cloned().collect();
                assert_eq!(bits(&alone), bits(&among), "{:?} in {dtype}: prompt {i}", spec.arch);
            }
            // Few pages and short passes: texts wait for each other, and prompts take several passes.
            let few = SamplerSize { rows: 5, longest: LONGEST + COUNT, pages: 7, texts: 4 };
            assert_eq!(bits(&sampled(&spec, &strategy, one, few, &prompts)), bits(&all), "{:?} in {dtype}", spec.arch);
            let shared = sampled(&spec, &strategy, MeshSizes::sharded(2), few, &prompts);
            assert_eq!(bits(&shared), bits(&all), "{:?} in {dtype} on two ranks", spec.arch);
        }
    }
}

#[test]
fn draws_depend_on_seed_step_prompt_sample_and_position() {
    let spec = Spec { max_len: 80, ..llama() };
    let run = |sampling: Sampling, id: u64| {
        let size = SamplerSize::of_many(4, 20, 4);
        let options = GeneratorOptions { spec: spec.clone(), strategy: ddp(DType::F32), cuts: Cuts::ALL, size };
        let mut texts = ranks(1, |rank| {
            let mut generator = Generator::new(rank.device.clone(), &rank.mesh, &options)?;
            initialize(generator.store(), 3, &*rank.device)?;
            generator.sample(&[Prompt::new(id, vec![1, 2, 3, 4], 2)], 20, &sampling, &mut |_| true)
        });
        texts.remove(0).into_iter().map(|text| text.ids).collect::<Vec<_>>()
    };
    let first = run(SAMPLING, 0);
    assert_eq!(first, run(SAMPLING, 0));
    assert_ne!(first[0], first[1]);
    for other in [run(Sampling { seed: 8, ..SAMPLING }, 0), run(Sampling { step: 4, ..SAMPLING }, 0), run(SAMPLING, 1)]
    {
        assert!(other.iter().all(|text| *text != first[0] && *text != first[1]));
    }
    let likely = run(Sampling { min_p: 1.0, ..SAMPLING }, 0);
    assert_eq!(likely, run(Sampling { temperature: 0.0, ..SAMPLING }, 0));
}

fn grpo(spec: &Spec, strategy: Arc<dyn Strategy>) -> EngineOptions {
    let grpo = Grpo { loss: GrpoLoss::Dapo, beta: 0.0, clip_low: 0.2, clip_high: 0.2, temperature: 1.0 };
    EngineOptions {
        objective: Objective::Grpo(grpo),
        reference: ReferenceModel::Base,
        tokens: 400,
        samples: Some(SamplerSize::of_many(LONGEST, COUNT, 12)),
        ..options(spec, strategy, SGD)
    }
}

/// At temperature 0.7.
fn cool(options: EngineOptions) -> EngineOptions {
    let Objective::Grpo(grpo) = options.objective else { panic!("no GRPO") };
    EngineOptions { objective: Objective::Grpo(Grpo { temperature: 0.7, ..grpo }), ..options }
}

/// What a rank with `mine` trains on.
fn rollouts(prompts: &[Prompt], texts: &[SampledText]) -> MicroBatch {
    let group = |i: usize| {
        let of = texts.iter().filter(|text| text.prompt == i);
        let tokens = &prompts[i].tokens;
        of.map(|text| SampleRow {
            prompt: tokens,
            ids: &text.ids,
            logprobs: &text.logprobs,
            reward: text.sample as f32,
        })
        .collect::<Vec<_>>()
    };
    MicroBatch::from_groups((0..prompts.len()).map(group))
}

/// The mismatch of two steps on the same samples: of those that sampled, and of a policy that has learned since.
fn mismatches(options: &EngineOptions, sizes: MeshSizes) -> [f64; 2] {
    let Objective::Grpo(Grpo { temperature, .. }) = options.objective else { panic!("no GRPO") };
    let sampling = Sampling { temperature, ..SAMPLING };
    let mut results = mesh_ranks(sizes, |rank| {
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, options)?;
        let prompts: Vec<Prompt> = prompts(&options.spec, 4 * sizes.dp_shard);
        let own = &prompts[4 * rank.mesh.group(Axis::Dp).rank()..][..4];
        let texts = engine.sample(own, COUNT, &sampling, &mut |of| of.ids.last() != Some(&1))?;
        let batch = rollouts(own, &texts);
        let tokens = engine.global_count(batch.loss_tokens())?;
        let mut mismatch = |number| {
            let report = engine.train_step(std::slice::from_ref(&batch), &Step { number, lr: 0.5, tokens })?;
            Ok::<_, flatshard::base::Error>(report.rollouts.unwrap().logprob_mismatch)
        };
        Ok([mismatch(1)?, mismatch(2)?])
    });
    results.swap_remove(0)
}

#[test]
fn sampled_and_trained_log_probabilities_have_the_same_bits() {
    let sizes = |dp_shard, tp| MeshSizes { dp_replicate: 1, dp_shard, sp: 1, tp, ep: 1 };
    let specs = [llama(), gemma3(), wide(qwen3()), sparse(), qwen35(), granite_hybrid(), nemotron_h(), lfm2()]
        .map(|spec| Spec { max_len: 80, heads: 4, kv_heads: 2, vocab: 60, ..spec });
    for spec in &specs {
        for dtype in [DType::F32, DType::Bf16] {
            let mut runs: Vec<(EngineOptions, MeshSizes)> =
                kinds(dtype).into_iter().map(|strategy| (grpo(spec, strategy), sizes(2, 1))).collect();
            runs.truncate(if spec.arch == llama().arch { usize::MAX } else { 1 });
            runs.push((grpo(spec, ddp(dtype)), sizes(1, 1)));
            runs.push((cool(grpo(&Spec { logit_cap: 4.0, ..spec.clone() }, ddp(dtype))), sizes(1, 1)));
            runs.push((EngineOptions { checkpoint: Checkpointing::Full, ..grpo(spec, ddp(dtype)) }, sizes(1, 1)));
            if spec.experts.is_none() {
                runs.push((grpo(spec, kinds(dtype).swap_remove(0)), sizes(1, 2)));
                runs.push((
                    EngineOptions { sequence_parallel: true, ..grpo(spec, kinds(dtype).swap_remove(0)) },
                    sizes(2, 2),
                ));
                let lora = Some(Lora { rank: 2, alpha: 8.0, dropout: 0.0, targets: vec!["all-linear".into()] });
                let tuning = Tuning { lora, ..Tuning::default() };
                runs.push((EngineOptions { tuning, ..grpo(spec, ddp(dtype)) }, sizes(1, 1)));
            }
            for (options, sizes) in runs {
                let what = format!("{:?} in {dtype}, {} on {sizes:?}", spec.arch, options.strategy.name());
                let [first, later] = mismatches(&options, sizes);
                assert_eq!(first, 0.0, "{what}");
                assert!(later > 1e-6, "{what}: after an update {later}");
            }
        }
    }
}

/// A sampler whose sums are in another order, such as one with other ranks of tp, is seen.
#[test]
fn another_order_of_sums_is_a_mismatch() {
    let spec = Spec { max_len: 80, heads: 4, kv_heads: 2, vocab: 60, ..llama() };
    let options = grpo(&spec, ddp(DType::F32));
    let prompts = prompts(&spec, 4);
    let tp = MeshSizes { tp: 2, ..MeshSizes::sharded(1) };
    let sample = |rank: Rank| {
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
        engine.sample(&prompts, COUNT, &SAMPLING, &mut |_| true)
    };
    let texts = mesh_ranks(tp, sample).swap_remove(0);
    let batch = rollouts(&prompts, &texts);
    let mismatch = ranks(1, |rank| {
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
        let step = Step { number: 1, lr: 0.1, tokens: batch.loss_tokens() };
        Ok(engine.train_step(std::slice::from_ref(&batch), &step)?.rollouts.unwrap().logprob_mismatch)
    });
    assert!(mismatch[0] > 0.0 && mismatch[0] < 1e-4, "{}", mismatch[0]);
}
