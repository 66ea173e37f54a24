//! Which rows a run holds out, fixed at its first start: a checkpoint keeps the number, so that a run that goes on with
//! another batch or on another mesh never trains on them. Never looks into a row.
use crate::base::Result;
use crate::ckpt::TrainerState;
use crate::comm::mesh::MeshSizes;
use crate::data::{Dataset, held_out, held_out_by_steps};
use crate::run::settings::Settings;
use crate::run::settings::value::set;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Key of the number in `data` of the trainer state.
pub const HELD_OUT: &str = "held_out";

/// Rows that are evaluated and rows that are trained on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EvalSplit {
    /// Rows at the end of the data set, or of each that is mixed, that are never trained on, and evaluated unless
    /// there is a data set for that.
    pub held_out: Vec<u64>,
    /// Where that is not what the run began with, or may not be.
    pub warning: Option<String>,
}

impl EvalSplit {
    /// `then`: where the run goes on from.
    pub fn new(s: &Settings, mesh: &MeshSizes, dataset: &Dataset, then: Option<&TrainerState>) -> Result<EvalSplit> {
        let shuffle = set(&s.data.shuffle, "data.shuffle")?;
        let eval = s.data.eval_dataset.is_some();
        let usual = held_out(dataset, shuffle);
        let fresh =
            |warning| EvalSplit { held_out: usual.iter().map(|n| if eval { 0 } else { *n }).collect(), warning };
        let Some(then) = then else { return Ok(fresh(None)) };
        let number = |key: &str| then.data.get(key).and_then(Value::as_u64);
        // The rows are the same ones: those of a stream begin elsewhere where they are of another length.
        let rows_alone = dataset.has_rows_of_its_own() && dataset.last_of_a_stream().is_none();
        let same = number("rows") == Some(dataset.rows())
            && then.data.get("fingerprint").and_then(Value::as_str) == Some(&dataset.fingerprint_text())
            && (rows_alone || number("max_len") == Some(dataset.max_len() as u64));
        if !same {
            return Ok(fresh(Some(
                "the rows are not those of the checkpoint: which of them are held out, the length of an epoch and the order \
                 are new, so rows that were trained on may be among those held out"
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
                    "the run began with {rows} held-out rows: it still does not train on them, and evaluates --eval-dataset"
                )),
                (false, 0) if evaluates && usual.iter().any(|&n| n > 0) => Some(
                    "the run began without held-out rows and holds no row out now: give --eval-dataset to evaluate"
                        .into(),
                ),
                _ => None,
            };
            return Ok(EvalSplit { held_out, warning });
        }
        // Checkpoints of earlier versions: the batch decided.
        let ranks = then.world / (mesh.sp * mesh.tp).max(1);
        let global = number("batch_size").zip(number("grad_accum")).map_or(0, |(b, a)| b * a * ranks as u64);
        let shuffled = then.data.get("shuffle").and_then(Value::as_bool).unwrap_or(shuffle);
        let held_out = held_out_by_steps(dataset, shuffled, global);
        let warning = format!(
            "the checkpoint does not say which rows are held out: it takes the last {held_out}, as for its steps of {global} \
             sequences"
        );
        Ok(EvalSplit { held_out: vec![held_out], warning: Some(warning) })
    }
    /// As a checkpoint keeps it: a number, or one for each data set that is mixed.
    pub fn recorded(&self) -> Value {
        match self.held_out[..] {
            [held_out] => held_out.into(),
            _ => self.held_out.clone().into(),
        }
    }
}
