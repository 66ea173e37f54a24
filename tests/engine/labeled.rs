//! Rows without a target: the head multiplies none of them, and the loss and all gradients stay what they are.
use crate::common::*;
use flatshard::comm::mesh::MeshSizes;
use flatshard::data::MicroBatch;
use flatshard::device::IGNORE;
use flatshard::engine::{Engine, EngineOptions, StepCounter};
use flatshard::nn::{Lora, Spec, Tuning};
use flatshard::store::ShardedOptions;

/// The batch with only the targets for which `keeps` holds.
fn only(batch: &MicroBatch, keeps: impl Fn(usize) -> bool) -> MicroBatch {
    let kept = |(row, &target): (usize, &i32)| if keeps(row) { target } else { IGNORE };
    MicroBatch { targets: batch.targets.iter().enumerate().map(kept).collect(), ..batch.clone() }
}
/// The same with a target in each row.
fn full(batch: &MicroBatch) -> MicroBatch {
    MicroBatch { targets: batch.tokens.iter().map(|&token| token as i32).collect(), ..batch.clone() }
}

#[test]
fn flops_of_the_head_follow_the_targets() {
    let spec = llama();
    let options = options(&spec, fsdp(sharded()), SGD);
    let whole = full(&batch(&spec, 1, 0, 0));
    let mut counter = StepCounter::new(&options, MeshSizes::default(), 0).unwrap();
    let mut flops = |kept: usize| {
        let work = counter.step(&[only(&whole, |row| row % 6 < kept)]).unwrap();
        work.all_flops()
    };
    let (rows, head) = (whole.tokens.len() as u64, 6 * (spec.vocab * spec.dim) as u64);
    let all = flops(6);
    for kept in 1..=4 {
        assert_eq!(all - flops(kept), (6 - kept as u64) * rows / 6 * head, "{kept} of 6 rows");
    }
    assert_eq!(all - flops(0), (rows - 1) * head, "one row stands for all");
}

/// Steps on two micro-batches that share out the targets of a batch, or on one with all of them next to one with none.
#[test]
fn targets_may_be_divided_among_micro_batches() {
    let spec = Spec { heads: 4, kv_heads: 2, vocab: 60, ..llama() };
    let lora = Lora { rank: 3, alpha: 6.0, dropout: 0.0, targets: vec!["all-linear".into()] };
    for (tuning, mesh) in [
        (Tuning::default(), MeshSizes::default()),
        (Tuning { lora: Some(lora), ..Tuning::default() }, MeshSizes::default()),
        (Tuning::default(), MeshSizes { tp: 2, ..MeshSizes::default() }),
        (Tuning::default(), MeshSizes { sp: 2, ..MeshSizes::default() }),
    ] {
        let sharded = ShardedOptions { grad_accum: 2, ..sharded() };
        let options = EngineOptions { tuning, ..options(&spec, fsdp(sharded), SGD) };
        let steps = |divided: bool| {
            mesh_ranks(mesh, |rank| {
                let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
                let mut reports = Vec::new();
                for number in 1..=3 {
                    let whole = full(&batch(&spec, number, 0, 0));
                    let batches = match divided {
                        true => [only(&whole, |row| row % 3 == 1), only(&whole, |row| row % 3 != 1)],
                        false => [only(&whole, |_| false), whole],
                    };
                    let report = step(&mut engine, &batches, number)?;
                    reports.push((report.loss, report.grad_norm));
                }
                Ok(reports)
            })
        };
        for (divided, whole) in steps(true).iter().zip(&steps(false)) {
            for ((loss, norm), (all_loss, all_norm)) in divided.iter().zip(whole) {
                assert!((loss - all_loss).abs() < 1e-6 * all_loss.abs(), "{mesh:?}: loss {loss}, {all_loss}");
                assert!((norm - all_norm).abs() < 1e-5 * all_norm, "{mesh:?}: norm {norm}, {all_norm}");
            }
        }
    }
}
