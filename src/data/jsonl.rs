//! Rows of a JSONL file: tokens with labels, or text. Never keeps more than one line.
use super::reader::Place;
use super::tokenizer::Tokenizer;
use crate::base::{Error, Result};
use crate::device::IGNORE;
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Other keys (`attention_mask`, an id, a source) are allowed and not read.
#[derive(Deserialize)]
struct Line {
    input_ids: Option<Vec<i64>>,
    labels: Option<Vec<i64>>,
    text: Option<String>,
}

/// Every row in order to `sink`: its ids and, as long, its labels ([`IGNORE`]: no loss), not shifted.
pub(super) fn read(
    path: &Path,
    tokenizer: &Tokenizer,
    bound: usize,
    mut sink: impl FnMut(&[u32], &[i32]) -> Result<()>,
) -> Result<()> {
    let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    let mut file = BufReader::with_capacity(1 << 20, file);
    let (mut text, mut ids, mut labels) = (String::new(), Vec::new(), Vec::new());
    for number in 1.. {
        text.clear();
        match file.read_line(&mut text) {
            Ok(0) => break,
            Ok(_) if text.trim().is_empty() => continue,
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
                return Err(Place::Line(path, number).error("is not UTF-8, which JSON must be"));
            }
            Err(e) => return Err(Error::io("read", path, e)),
        }
        let place = Place::Line(path, number);
        let line: Line = serde_json::from_str(&text).map_err(|e| place.error(not_a_row(&text, e)))?;
        ids.clear();
        labels.clear();
        match (line.input_ids, line.text) {
            (Some(input), _) => {
                for id in &input {
                    ids.push(place.id(Some(*id), bound)?);
                }
                match line.labels {
                    None => labels.extend(ids.iter().map(|&id| id as i32)),
                    Some(given) if given.len() != ids.len() => {
                        let (labels, ids) = (given.len(), ids.len());
                        return Err(place.error(format!(
                            "has {labels} labels for {ids} input_ids: there is one for each, not shifted"
                        )));
                    }
                    Some(given) => {
                        for &label in &given {
                            labels.push(place.label(label, bound)?);
                        }
                    }
                }
            }
            (None, Some(text)) => {
                let (end, (before, behind)) = (tokenizer.end_of_text()?, tokenizer.around());
                ids.extend_from_slice(before);
                tokenizer.encode(&text, &mut ids)?;
                ids.extend_from_slice(behind);
                if ids.last() != Some(&end) {
                    ids.push(end);
                }
                labels.extend(ids.iter().map(|&id| id as i32));
            }
            (None, None) => return Err(place.error(without_tokens(&text))),
        }
        if ids.is_empty() {
            return Err(place.error("has no tokens: leave such rows out"));
        }
        sink(&ids, &labels)?;
    }
    Ok(())
}

fn not_a_row(text: &str, error: serde_json::Error) -> String {
    let shown: String = text.trim_end().chars().take(80).collect();
    format!(
        "is not a row ({error}): {shown} -- a row is {{\"input_ids\": [...], \"labels\": [...]}} or {{\"text\": ...}}"
    )
}

fn without_tokens(text: &str) -> String {
    let keys: Vec<String> =
        serde_json::from_str::<serde_json::Map<_, _>>(text).into_iter().flatten().map(|(k, _)| k).collect();
    format!("has neither `input_ids` nor `text`; its keys are: {}", keys.join(", "))
}

impl Place<'_> {
    fn label(&self, label: i64, bound: usize) -> Result<i32> {
        match label {
            -100 => Ok(IGNORE),
            l if l >= 0 && (l as u64) < bound as u64 => Ok(l as i32),
            l => Err(self.error(format!(
                "has label {l}: a label is a token id below vocab_size {bound}, or -100 for a token without loss"
            ))),
        }
    }
}
