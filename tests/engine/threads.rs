//! Training on several threads per rank: the bits of one thread.
use crate::common::*;
use flatshard::base::{DType, Result};
use flatshard::comm::MeshSizes;
use flatshard::device::Device;
use flatshard::device::cpu::CpuDevice;
use flatshard::engine::Engine;
use flatshard::nn::{Arch, Spec};
use flatshard::store::ShardedOptions;
use std::sync::Arc;

/// So wide that every operation is divided, if it is worth a thread from one byte on.
fn wide(spec: Spec) -> Spec {
    let (kv_heads, head_dim) = if spec.arch == Arch::Gpt { (6, 24) } else { (3, 64) };
    Spec { dim: 144, heads: 6, kv_heads, head_dim, ff: 300, vocab: 301, layers: 2, ..spec }
}

fn trained(spec: &Spec, dtype: DType, sizes: MeshSizes, threads: usize) -> Outcome {
    let options = options(spec, fsdp(ShardedOptions { dtype, ..sharded() }), ADAMW);
    let device = |_, meter| -> Result<Arc<dyn Device>> {
        Ok(Arc::new(CpuDevice::new(meter).with_threads(threads)?.with_grain(1)))
    };
    let results = mesh_ranks_on(sizes, device, |rank| {
        let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
        let reports = train(&mut engine, &options.spec, 2, 1)?;
        Ok((reports, fragments(&mut engine)?))
    });
    gathered(spec, results)
}

#[test]
fn any_number_of_threads_trains_the_bits_of_one() {
    let gemma3 = Spec { windowed: vec![true, false], ..gemma3() };
    let over = |sp, tp| MeshSizes { dp_replicate: 1, dp_shard: 1, sp, tp, ep: 1 };
    for (spec, dtype, sizes) in [
        (llama(), DType::F32, over(1, 1)),
        (llama(), DType::Bf16, MeshSizes::sharded(2)),
        (gpt(), DType::Bf16, over(1, 1)),
        (gpt(), DType::F32, MeshSizes::sharded(2)),
        (qwen3(), DType::Bf16, over(1, 1)),
        (gemma3, DType::F32, over(1, 1)),
        (gpt(), DType::F32, over(2, 1)),
        (llama(), DType::Bf16, over(1, 2)),
    ] {
        let spec = wide(spec);
        let spec = Spec { kv_heads: if sizes.tp > 1 { spec.heads } else { spec.kv_heads }, ..spec };
        let one = trained(&spec, dtype, sizes, 1);
        for threads in [2, 3] {
            let what = format!("{:?} in {dtype} on {sizes:?} with {threads} threads", spec.arch);
            assert_same_bits(&one, &trained(&spec, dtype, sizes, threads), &what);
        }
    }
}
