//! Sequences per step: `train_batch_size = batch_size x grad_accum x data-parallel ranks`. Never rounds: sizes that do
//! not divide are refused with the numbers.
use crate::base::{Error, Result};
use crate::comm::mesh::MeshSizes;
use crate::run::settings::Settings;

/// With a given `train_batch_size`, fills in `batch_size` or `grad_accum`, whichever is missing, as DeepSpeed does; if
/// both are, one micro-batch.
pub fn solve(s: &mut Settings, mesh: &MeshSizes) -> Result<()> {
    let (dp, b) = (mesh.dp_replicate * mesh.dp_shard, &mut s.batch);
    let Some(train) = b.train_batch_size else { return Ok(()) };
    let (micro, accum) = match (b.batch_size, b.grad_accum) {
        (Some(micro), Some(accum)) => (micro, accum),
        (Some(micro), None) => (micro, train / (micro * dp).max(1)),
        (None, accum) => (train / (accum.unwrap_or(1) * dp).max(1), accum.unwrap_or(1)),
    };
    if micro * accum * dp != train || train == 0 {
        let given = |value: Option<usize>| value.map_or("?".to_string(), |n| n.to_string());
        return Err(Error::input(format!(
            "train_batch_size {train} must be batch_size x grad_accum x data-parallel ranks, but {} x {} x {dp} {}",
            given(b.batch_size),
            given(b.grad_accum),
            match (b.batch_size, b.grad_accum) {
                (Some(_), Some(_)) => format!("= {}", micro * accum * dp),
                _ => "has no integer solution".to_string(),
            }
        )));
    }
    (b.batch_size, b.grad_accum) = (Some(micro), Some(accum));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run may go on with fewer ranks after a failure: the global batch stays, with `batch_size` given or derived.
    #[test]
    fn fewer_ranks_keep_the_batch() {
        for (given, expected) in [(Some(2), (2, 3)), (None, (6, 1))] {
            let mut s = Settings::default();
            (s.batch.batch_size, s.batch.train_batch_size) = (given, Some(12));
            solve(&mut s, &MeshSizes::sharded(2)).unwrap();
            assert_eq!((s.batch.batch_size, s.batch.grad_accum), (Some(expected.0), Some(expected.1)));
        }
    }
}
