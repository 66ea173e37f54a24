//! The distribution of initial weights: mean and deviation of every tensor within statistical bounds, and one hash of
//! all bits.
use crate::common::{ADAMW, Fragments, fragments, fsdp, options, ranks, sharded};
use flatshard::engine::{Engine, EngineOptions};
use flatshard::nn::{Activation, Arch, Lora, Spec, Tuning};
use std::collections::BTreeMap;
use xxhash_rust::xxh3::Xxh3;

const LAYERS: usize = 3;
const DIM: usize = 128;

fn spec(arch: Arch) -> Spec {
    let llama = Spec {
        arch,
        vocab: 600,
        dim: DIM,
        layers: LAYERS,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        ff: 300,
        max_len: 64,
        qkv_bias: true,
        ..Spec::default()
    };
    match arch {
        Arch::Gpt => {
            Spec { kv_heads: 4, tied: true, rope: None, activation: Activation::Gelu, qkv_bias: false, ..llama }
        }
        _ => llama,
    }
}

/// Every tensor as initialized by an engine of two ranks.
fn fresh(spec: &Spec, tuning: Tuning) -> BTreeMap<String, Vec<f32>> {
    let options = EngineOptions { tuning, seed: 11, ..options(spec, fsdp(sharded()), ADAMW) };
    let parts = ranks(2, |rank| fragments(&mut Engine::new(rank.device, &rank.mesh, &options)?));
    let mut parts: Fragments = parts.into_iter().flatten().collect();
    parts.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
    let mut whole: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (name, start, values) in parts {
        let tensor = whole.entry(name).or_default();
        assert_eq!(tensor.len(), start, "a gap or an overlap");
        tensor.extend(values);
    }
    whole
}

fn moments(values: &[f32]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().map(|&x| x as f64).sum::<f64>() / n;
    (mean, (values.iter().map(|&x| (x as f64 - mean).powi(2)).sum::<f64>() / n).sqrt())
}

/// The mean of n draws with deviation s deviates by s / sqrt(n), and their deviation by s sqrt((k - 1) / 4n), where k
/// is the kurtosis: 3 for normal, 9/5 for uniform numbers. The bounds are five of those: one test in a million would
/// fail by chance, and the numbers are the same each time.
fn distributed(name: &str, values: &[f32], s: f64, kurtosis: f64) {
    let (n, (mean, deviation)) = (values.len() as f64, moments(values));
    let (of_mean, of_deviation) = (5.0 * s / n.sqrt(), 5.0 * s * ((kurtosis - 1.0) / (4.0 * n)).sqrt());
    assert!(mean.abs() < of_mean, "{name}: mean {mean:.2e}, more than {of_mean:.1e} off 0");
    let off = (deviation - s).abs();
    assert!(off < of_deviation, "{name}: deviation {deviation:.5}, more than {of_deviation:.1e} off {s:.5}");
}

/// Radford et al. 2019: 0.02, and 0.02 / sqrt(2 layers) for projections that end a residual branch.
#[test]
fn initial_weights_have_the_expected_means_and_deviations() {
    for arch in [Arch::Llama, Arch::Gpt] {
        let residual = ["o_proj.weight", "down_proj.weight", "attn.c_proj.weight", "mlp.c_proj.weight"];
        let mut counted = [0; 4];
        for (name, values) in &fresh(&spec(arch), Tuning::default()) {
            let norm = ["norm", "ln_"].iter().any(|part| name.contains(part));
            let kind = match name {
                _ if name.ends_with("bias") => 0,
                _ if norm => 1,
                _ if residual.iter().any(|end| name.ends_with(end)) => 2,
                _ => 3,
            };
            counted[kind] += 1;
            match kind {
                0 => assert!(values.iter().all(|&x| x == 0.0), "{name}"),
                1 => assert!(values.iter().all(|&x| x == 1.0), "{name}"),
                2 => distributed(name, values, 0.02 / (2.0 * LAYERS as f64).sqrt(), 3.0),
                _ => distributed(name, values, 0.02, 3.0),
            }
        }
        // Biases, norms, ends of branches, the rest.
        let want = match arch {
            Arch::Gpt => [LAYERS * 6 + 1, LAYERS * 2 + 1, LAYERS * 2, LAYERS * 2 + 2],
            _ => [LAYERS * 3, LAYERS * 2 + 1, LAYERS * 2, LAYERS * 5 + 2],
        };
        assert_eq!(counted, want, "{arch:?}");
    }
}

/// PEFT's initialization: A like `nn.Linear`, uniform within 1 / sqrt(inputs); B zero.
#[test]
fn initial_adapters_have_pefts_distribution() {
    let lora = Lora { rank: 16, alpha: 32.0, dropout: 0.0, targets: vec!["all-linear".into()] };
    let spec = spec(Arch::Llama);
    let weights = fresh(&spec, Tuning { lora: Some(lora), ..Tuning::default() });
    let mut adapters = 0;
    for (name, values) in weights.iter().filter(|(name, _)| name.contains("lora_A")) {
        let inputs = values.len() / 16;
        let bound = 1.0 / (inputs as f64).sqrt();
        distributed(name, values, bound / 3f64.sqrt(), 1.8);
        let most = values.iter().map(|x| x.abs() as f64).fold(0.0, f64::max);
        assert!(most <= bound && most > 0.99 * bound, "{name}: at most {most}, where the bound is {bound}");
        assert!(weights[&name.replace("lora_A", "lora_B")].iter().all(|&x| x == 0.0), "{name}");
        adapters += 1;
    }
    assert_eq!(adapters, 7 * LAYERS);
}

/// The initial weights of a seed never change. Sine, cosine and logarithm are computed in f64 and rounded to f32, so
/// that another C library gives the same bits.
#[test]
fn a_seed_gives_the_same_bits_in_every_version() {
    let hash = |weights: BTreeMap<String, Vec<f32>>| -> String {
        let mut hash = Xxh3::new();
        for (name, values) in &weights {
            hash.update(name.as_bytes());
            values.iter().for_each(|x| hash.update(&x.to_bits().to_le_bytes()));
        }
        format!("{:016x}", hash.digest())
    };
    let lora = Lora { rank: 4, alpha: 8.0, dropout: 0.0, targets: vec!["q_proj".into()] };
    assert_eq!(
        [
            hash(fresh(&spec(Arch::Llama), Tuning::default())),
            hash(fresh(&spec(Arch::Gpt), Tuning::default())),
            hash(fresh(&spec(Arch::Llama), Tuning { lora: Some(lora), ..Tuning::default() })),
        ],
        ["3bef6c9e4af748ac", "27e73b81d07ffed2", "2e924e8d6d57ab82"]
    );
}
