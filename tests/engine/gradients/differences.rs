//! Every tensor's gradient compared with finite differences of the loss, in every family.
use super::*;
use crate::common::plain_store::dot;
use flatshard::base::rng::Rng;
use flatshard::nn::{Lora, Segment};

/// Step of the finite differences. A longer step has more truncation error, a shorter one more rounding (losses are
/// computed in f32): errors are smallest about here, at most 1e-4.
const STEP: f32 = 1e-2;
const TOLERANCE: f64 = 3e-4;

/// The directional derivative from four losses (fourth-order error in `step`).
fn difference(model: &mut Model, layer: usize, segment: &Segment, direction: &[f32], step: f32) -> f64 {
    let start = model.store.weights(layer, segment).to_vec();
    let mut loss = |by: f32| {
        let weights = model.store.weights(layer, segment);
        for ((w, s), d) in weights.iter_mut().zip(&start).zip(direction) {
            *w = s + by * d;
        }
        model.store.publish(&model.dev);
        model.train()
    };
    let near = loss(step) - loss(-step);
    let far = loss(2.0 * step) - loss(-2.0 * step);
    loss(0.0);
    (8.0 * near - far) / (12.0 * step as f64)
}

/// Every tensor's gradient along itself (detects a wrong factor) and along two random directions (detects a wrong
/// element). Errors are relative to the norms of gradient times direction, so that a small product does not hide them.
fn check_gradients(spec: Spec) {
    check_gradients_of(Model::new(spec, options(Checkpointing::Off)));
}
/// Frozen tensors have none.
fn check_gradients_of(model: Model) {
    check_gradients_within(model, TOLERANCE, STEP);
}
fn check_gradients_within(mut model: Model, tolerance: f64, step: f32) {
    model.train();
    let analytic: Vec<(usize, Segment, Vec<f32>)> = model
        .store
        .segments()
        .filter(|(_, segment)| segment.is_trained())
        .map(|(layer, segment)| (layer, segment.clone(), model.store.grad(layer, segment).to_vec()))
        .collect();
    let mut worst = (0.0, String::new());
    for (layer, segment, grad) in &analytic {
        let length = dot(grad, grad).sqrt();
        assert!(length > 1e-3, "{}: the gradient is {length}: nothing is tested", segment.name);
        let random = |seed| -> Vec<f32> {
            let rng = Rng::new(seed, 1);
            (0..grad.len()).map(|i| rng.normal(i as u64) / (grad.len() as f32).sqrt()).collect()
        };
        let along = grad.iter().map(|g| g / length as f32).collect();
        for direction in [along, random(1), random(2)] {
            let numeric = LOSS_SCALE as f64 * difference(&mut model, *layer, segment, &direction, step);
            let error = (numeric - dot(grad, &direction)).abs() / (length * dot(&direction, &direction).sqrt());
            if error > worst.0 {
                worst = (error, segment.name.clone());
            }
        }
    }
    println!("worst error {:.1e} in {}", worst.0, worst.1);
    assert!(worst.0 < tolerance, "{}: relative error {:.1e}", worst.1, worst.0);
}
#[test]
fn llama_gradients() {
    check_gradients(llama());
}
/// The adapters' gradients, and through them those of the layers below; recomputation draws the masks again.
#[test]
fn lora_gradients() {
    let targets = |names: &[&str]| names.iter().map(|n| n.to_string()).collect();
    for (targets, dropout) in [(targets(&["all-linear"]), 0.3), (targets(&["q_proj", "v_proj", "down_proj"]), 0.0)] {
        let lora = Some(Lora { rank: 3, alpha: 5.0, dropout, targets });
        let tuning = Tuning { lora, ..Tuning::default() };
        check_gradients_of(Model::tuned(llama(), &tuning, options(Checkpointing::Full)));
    }
}
#[test]
fn llama_gradients_with_tied_head_and_dropout() {
    check_gradients(Spec { tied: true, dropout: 0.2, ..llama() });
}
#[test]
fn gpt_gradients() {
    check_gradients(Spec { tied: false, ..gpt() });
}
#[test]
fn gpt_gradients_with_tied_head_and_dropout() {
    check_gradients(Spec { dropout: 0.2, ..gpt() });
}

#[test]
fn gradients_with_biases_and_a_window() {
    check_gradients(qwen2());
}
#[test]
fn gradients_with_norms_of_heads() {
    check_gradients(Spec { dropout: 0.2, ..qwen3() });
}
#[test]
fn gradients_of_gated_delta_nets() {
    // Normalized queries, keys and outputs bend the loss within a step, and decays hardly change it in documents this
    // short; `tests/device/conformance/delta.rs` takes differences in f64.
    const WIDE: f64 = 3e-3;
    let check = |spec| check_gradients_within(Model::new(spec, options(Checkpointing::Off)), WIDE, STEP);
    check(Spec { dropout: 0.2, ..qwen35() });
    let Some(Recurrence::Delta(net)) = qwen35().recurrence else { panic!("no gated delta net") };
    let net = DeltaNet { form: DeltaForm::Fused, ..net };
    check(Spec { arch: Arch::Qwen3Next, recurrence: Some(Recurrence::Delta(net)), ..qwen35() });
    // Adapters bend the loss more: the error of STEP is 2.7e-2, and that of a third of it 5.3e-4.
    const SHORT: f32 = 3e-3;
    let lora = Some(Lora { rank: 3, alpha: 5.0, dropout: 0.3, targets: vec!["all-linear".into()] });
    let tuning = Tuning { lora, ..Tuning::default() };
    check_gradients_within(Model::tuned(qwen35(), &tuning, options(Checkpointing::Full)), WIDE, SHORT);
}
#[test]
fn gradients_of_short_convolutions() {
    // Products of three factors bend the loss within a step.
    check_gradients_within(Model::new(Spec { dropout: 0.2, ..lfm2() }, options(Checkpointing::Off)), 5e-3, STEP);
}
#[test]
fn gemma2_gradients() {
    check_gradients(Spec { dropout: 0.2, ..gemma2() });
}
#[test]
fn gemma3_gradients() {
    check_gradients(gemma3());
}
#[test]
fn gemma4_gradients() {
    check_gradients(gemma3());
}
