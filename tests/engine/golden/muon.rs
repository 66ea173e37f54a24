//! Ten steps of Muon compared with `torch.optim.Muon`, and of AdamW for the tensors that are not its own: losses, norms
//! and every weight afterwards, on several meshes. The files are made by `tests/golden/muon.py`.
use super::{Golden, fill, spec};
use crate::common::golden_tensors::Tensors;
use crate::common::{fragments, fsdp, mesh_ranks, options, sharded, whole};
use flatshard::base::Result;
use flatshard::comm::{Axis, MeshSizes};
use flatshard::engine::{Engine, EngineOptions, Step};
use flatshard::nn::Arch;
use flatshard::optim::Rule;
use serde_json::Value;

fn path(extension: &str) -> String {
    format!("{}/tests/golden/muon.{extension}", env!("CARGO_MANIFEST_DIR"))
}

/// Measured: losses at most 3e-7 relative, weights 8e-7.
fn muon_agrees(arch: Arch, sizes: MeshSizes) {
    let name = if arch == Arch::Llama { "llama" } else { "gpt" };
    let (golden, muon) = (Golden::read(arch), std::fs::read(path("json")).unwrap());
    let muon: Value = serde_json::from_slice(&muon).unwrap();
    let number = |value: &Value| value.as_f64().unwrap() as f32;
    let [beta1, beta2] = [0, 1].map(|i| golden.numbers("betas")[i] as f32);
    let [eps, weight_decay, grad_clip] = ["eps", "weight_decay", "max_norm"].map(|name| golden.number(name) as f32);
    let (momentum, lr) = (number(&muon["momentum"]), number(&muon["lr"]));
    let rule = Rule::Muon { momentum, steps: 5, beta1, beta2, eps, weight_decay };
    let spec = spec(arch);
    let options = EngineOptions { grad_clip, ..options(&spec, fsdp(sharded()), rule) };
    let results = mesh_ranks(sizes, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
        if sizes.tp == 1 {
            fill(&mut engine, &golden)?;
        } else {
            fill_part(&mut engine, &golden)?;
        }
        let (dp, index) = (rank.mesh.group(Axis::Dp).size(), rank.mesh.group(Axis::Dp).rank());
        let steps = (1..=10).map(|number| {
            let documents = index * 4 / dp..(index + 1) * 4 / dp;
            let batch = golden.micro_batch((number - 1) % 2, documents);
            let tokens = engine.global_count(batch.loss_tokens())?;
            engine.train_step(&[batch], &Step { number: number as u64, lr, tokens })
        });
        let reports = steps.collect::<Result<Vec<_>>>()?;
        Ok((reports, fragments(&mut engine)?))
    });
    let (reports, parts): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    for (step, report) in reports[0].iter().enumerate() {
        let [loss, norm] = ["losses", "norms"].map(|key| muon[name][key][step].as_f64().unwrap());
        let errors = ((report.loss / loss - 1.0).abs(), (report.grad_norm as f64 / norm - 1.0).abs());
        println!(
            "step {}: loss {loss:.6}, relative errors of loss and norm {:.1e} {:.1e}",
            step + 1,
            errors.0,
            errors.1
        );
        assert!(errors.0 < 1e-5 && errors.1 < 1e-4, "step {}: {errors:?} on {sizes:?}", step + 1);
    }
    let Tensors { floats, .. } = Tensors::read(path("safetensors").as_ref());
    let mut worst = (0f32, String::new());
    for (tensor, values) in whole(&spec, &parts) {
        let expected = &floats[&format!("{name}.{tensor}")];
        assert_eq!(values.len(), expected.len(), "{tensor}");
        // AdamW takes full steps for rounding noise: the gradient of the keys' biases is zero.
        let noise = if tensor.ends_with("c_attn.bias") { values.len() / 3..2 * values.len() / 3 } else { 0..0 };
        let errors = values.iter().zip(expected).enumerate().filter(|(i, _)| !noise.contains(i));
        let error = errors.map(|(_, (x, y))| (x - y).abs()).fold(0.0, f32::max);
        if error >= worst.0 {
            worst = (error, tensor);
        }
    }
    println!("{arch:?} on {sizes:?}: the worst weight differs by {:.1e} ({})", worst.0, worst.1);
    assert!(worst.0 < 1e-5, "{} differs by {:.1e} on {sizes:?}", worst.1, worst.0);
}

/// As [`fill`], of a tensor's part on a rank of tp.
fn fill_part(engine: &mut Engine, golden: &Golden) -> Result<()> {
    let dev = engine.device().clone();
    let store = engine.state().0;
    store.for_each_shard(&mut |mut shard| {
        let mut values = vec![0f32; shard.master.len()];
        for segment in &shard.layout.segments {
            let weight = &golden.tensors[&format!("weight.{}", segment.name)];
            let Some(owned) = shard.owned(segment.range()) else { continue };
            let first = shard.start + owned.start - segment.start;
            for (part, place) in segment.stretches(first..first + owned.len()) {
                let at = owned.start + part.start - first;
                values[at..at + part.len()].copy_from_slice(&weight[place..place + part.len()]);
            }
        }
        dev.upload(bytemuck::cast_slice(&values), shard.master.reborrow())
    })?;
    store.weights_changed()
}

#[test]
fn llama_trains_with_muon_like_pytorch() {
    for sizes in [MeshSizes::sharded(1), MeshSizes::sharded(2), MeshSizes { tp: 2, ..MeshSizes::sharded(2) }] {
        muon_agrees(Arch::Llama, sizes);
    }
}
#[test]
fn gpt_trains_with_muon_like_pytorch() {
    for sizes in [MeshSizes::sharded(2), MeshSizes { dp_replicate: 2, ..MeshSizes::sharded(2) }] {
        muon_agrees(Arch::Gpt, sizes);
    }
}
