//! Which rows a run holds out, fixed at its first start: checkpoints record the number, so that a run resumed with
//! another batch size or mesh never trains on them. Never reads a row.
use crate::base::Result;
use crate::ckpt::TrainerState;
use crate::comm::mesh::MeshSizes;
use crate::data::{Dataset, held_out, held_out_by_steps, held_out_share};
use crate::run::settings::Settings;
use crate::run::settings::value::set;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Key in `data` of the trainer state.
pub const HELD_OUT: &str = "held_out";

/// The split into training rows and held-out rows.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EvalSplit {
    /// Number of held-out rows at the end of the data set, or of each data set of a mixture. They are evaluated unless
    /// there is an evaluation data set.
    pub held_out: Vec<u64>,
    /// Set if the split is, or may be, different from the one that the run started with.
    pub warning: Option<String>,
}

impl EvalSplit {
    /// `then`: the checkpoint that the run resumes from.
    pub fn new(s: &Settings, mesh: &MeshSizes, dataset: &Dataset, then: Option<&TrainerState>) -> Result<EvalSplit> {
        let shuffle = set(&s.data.shuffle, "data.shuffle")?;
        let eval = s.data.eval_dataset.is_some();
        let usual = match s.data.held_out {
            Some(share) => held_out_share(dataset, share),
            None if s.run.eval == Some(false) => held_out_share(dataset, 0.0),
            None => held_out(dataset, shuffle, s.task.is_some()),
        };
        let fresh =
            |warning| EvalSplit { held_out: usual.iter().map(|n| if eval { 0 } else { *n }).collect(), warning };
        let Some(then) = then else { return Ok(fresh(None)) };
        let number = |key: &str| then.data.get(key).and_then(Value::as_u64);
        // Rows of a token stream start elsewhere with another max_len.
        let rows_alone = dataset.has_rows_of_its_own() && dataset.last_of_a_stream().is_none();
        let same = number("rows") == Some(dataset.rows())
            && then.data.get("fingerprint").and_then(Value::as_str) == Some(&dataset.fingerprint_text())
            && (rows_alone || number("max_len") == Some(dataset.max_len() as u64));
        if !same {
            return Ok(fresh(Some(
                "the data is not the checkpoint's: held-out rows, epoch length and data order are new, so held-out \
                rows may \
                 include rows that were trained on"
                    .into(),
            )));
        }
        let recorded = then.data.get(HELD_OUT).and_then(|held| match held {
            Value::Array(each) => each.iter().map(Value::as_u64).collect(),
            one => one.as_u64().map(|held| vec![held]),
        });
        if let Some(held_out) = recorded.filter(|held: &Vec<u64>| held.len() == usual.len()) {
            let (rows, evaluates) = (held_out.iter().sum::<u64>(), s.run.eval == Some(true));
            let warning = match (eval, rows) {
                (true, 1..) => Some(format!(
                    "the run started with {rows} held-out rows: it still does not train on them, and evaluates --eval-dataset"
                )),
                (false, 0) if evaluates && usual.iter().any(|&n| n > 0) => Some(
                    "the run started without held-out rows, so there is nothing to evaluate: give --eval-dataset"
                        .into(),
                ),
                (false, _) if s.data.held_out.is_some() && held_out != usual => {
                    Some(format!("the run started with {rows} held-out rows, and keeps them: --held-out has no effect"))
                }
                _ => None,
            };
            return Ok(EvalSplit { held_out, warning });
        }
        // Checkpoints of earlier versions do not record the number, which depended on the batch.
        let ranks = then.world / (mesh.sp * mesh.tp).max(1);
        let global = number("batch_size").zip(number("grad_accum")).map_or(0, |(b, a)| b * a * ranks as u64);
        let shuffled = then.data.get("shuffle").and_then(Value::as_bool).unwrap_or(shuffle);
        let held_out = held_out_by_steps(dataset, shuffled, global);
        let warning = format!(
            "the checkpoint does not record its held-out rows: holding out the last {held_out}, as for its steps of \
            {global} \
             sequences"
        );
        Ok(EvalSplit { held_out: vec![held_out], warning: Some(warning) })
    }
    /// What checkpoints record: a number, or one per data set of a mixture.
    pub fn recorded(&self) -> Value {
        match self.held_out[..] {
            [held_out] => held_out.into(),
            _ => self.held_out.clone().into(),
        }
    }
}
