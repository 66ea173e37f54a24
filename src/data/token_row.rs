//! Rows of token ids, with their labels and masks: what other programs have tokenized. Never changes an id, and never
//! takes several samples for one.
use super::fields::{JsonRow, RowResult, array, field, present, token_id, truth, whole};
use super::format::InputLoss;
use super::recipe::{Outcome, Recipe, TokenizedRow};
use super::shapes::{MASKS, Shape};
use crate::device::IGNORE;
use serde_json::Value;

impl Recipe {
    /// Token ids with their labels and masks.
    pub(super) fn tokens(&self, row: &JsonRow, out: &mut TokenizedRow) -> RowResult<Outcome> {
        for id in array(field(row, "input_ids")?, "input_ids")? {
            out.ids.push(token_id(whole(id, "input_ids")?, self.bound)?);
        }
        let ids = out.ids.len();
        if ids == 0 {
            return Err("has no tokens: remove the row".into());
        }
        let column = |key: &str| -> RowResult<Option<&Vec<Value>>> {
            let Some(list) = present(row, key) else { return Ok(None) };
            let list = array(list, key)?;
            match list.len() == ids {
                true => Ok(Some(list)),
                false => Err(format!("has {} {key} for {ids} input_ids: each id needs one, not shifted", list.len())),
            }
        };
        match column("labels")? {
            None => out.labels.extend(out.ids.iter().map(|&id| id as i32)),
            Some(labels) => {
                for label in labels {
                    out.labels.push(self.label(whole(label, "labels")?)?);
                }
            }
        }
        refuse_unclear(row)?;
        for key in MASKS {
            for (mask, label) in column(key)?.into_iter().flatten().zip(&mut out.labels) {
                *label = if bit(mask, key)? { *label } else { IGNORE };
            }
        }
        // Padding.
        if let Some(attended) = column("attention_mask")? {
            let keep = attended.iter().map(|mask| bit(mask, "attention_mask")).collect::<RowResult<Vec<bool>>>()?;
            let mut each = keep.iter();
            out.ids.retain(|_| each.next() == Some(&true));
            let mut each = keep.iter();
            out.labels.retain(|_| each.next() == Some(&true));
        }
        if self.format.input_loss == InputLoss::All && out.labels.contains(&IGNORE) {
            let what =
                "says which of its tokens have a loss, and `train_on_inputs` asks for all: remove one of the two";
            return Err(what.into());
        }
        Ok(Outcome::Kept)
    }

    fn label(&self, label: i64) -> RowResult<i32> {
        match label {
            -100 => Ok(IGNORE),
            l if l >= 0 && (l as u64) < self.bound as u64 => Ok(l as i32),
            l => Err(format!(
                "has label {l}: a label must be a token id below vocab_size {}, or -100 for no loss",
                self.bound
            )),
        }
    }
}

/// Refuses columns that change what is learned, in a way that this row does not say, and rows of several samples.
fn refuse_unclear(row: &JsonRow) -> RowResult<()> {
    let attended = present(row, "attention_mask").and_then(Value::as_array);
    let is_padding = |at: usize| attended.is_some_and(|mask| mask.get(at).and_then(truth) == Some(false));
    for (key, value) in row {
        let Some(list) = value.as_array() else { continue };
        let known = Shape::Tokens.reads().contains(&key.as_str()) || key == "special_tokens_mask";
        if key.contains("mask") && !known {
            return Err(format!(
                "has `{key}`, and trainers differ in what its 0 and 1 mean: name it {} (0: no loss), or remove it",
                MASKS[4]
            ));
        }
        if key.contains("weight") && list.iter().any(|weight| weight.as_f64() != Some(1.0)) {
            return Err(format!(
                "has `{key}`: tokens have a loss or none, so weigh them with 0 and 1 as {}, or remove it",
                MASKS[4]
            ));
        }
        if key.contains("label") && key.contains("shift") {
            return Err(format!("has `{key}`: write `labels`, one for each of input_ids, which are not shifted"));
        }
        let tokens = || list.iter().enumerate().filter(|(at, _)| !is_padding(*at)).map(|(_, value)| value);
        let packed = match key.as_str() {
            bounds if bounds.starts_with("cu_seq") => list.len() > 2,
            "position_ids" => tokens().skip(1).any(|position| *position == 0),
            key if SEGMENTS.contains(&key) => tokens().zip(tokens().skip(1)).any(|(before, after)| before != after),
            // The lengths of several samples.
            lengths if lengths.contains("len") => {
                let sum: Option<u64> = list.iter().map(Value::as_u64).sum();
                let all = sum == array(field(row, "input_ids")?, "input_ids").ok().map(|ids| ids.len() as u64);
                list.len() > 1 && (all || lengths == "seq_lengths")
            }
            _ => false,
        };
        if packed {
            return Err(format!(
                "holds several samples, as its `{key}` says: write a row for each; `packing_samples` packs them without \
                 attention between them"
            ));
        }
    }
    Ok(())
}

/// Columns that number the samples of a row, one number for each token.
const SEGMENTS: [&str; 14] = [
    "segment_ids",
    "segment_id",
    "sequence_ids",
    "sequence_id",
    "seq_ids",
    "seq_id",
    "seq_idx",
    "document_ids",
    "document_id",
    "doc_ids",
    "doc_id",
    "sample_ids",
    "sample_id",
    "pack_ids",
];

/// An element of a mask.
fn bit(value: &Value, key: &str) -> RowResult<bool> {
    truth(value).ok_or_else(|| format!("has {value} in its {key}, which must be 0 or 1"))
}
