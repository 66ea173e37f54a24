//! Text to token ids and back. Never reads files.
use crate::base::{Error, Result};

/// Closed on purpose: a tokenizer is chosen once, by name, and each has its own `match` arm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokenizer {
    /// Ids 0..=255 are bytes, 256 is the end of a text.
    Bytes,
}

impl Tokenizer {
    /// From `--tokenizer`.
    pub fn from_name(name: &str) -> Result<Tokenizer> {
        match name {
            "bytes" => Ok(Tokenizer::Bytes),
            _ => Err(Error::input(format!(
                "--tokenizer {name}: not a tokenizer that this build has. Use `bytes` (257 ids), or pass rows that are \
                 already tokens: JSONL with `input_ids`, or a .npy array"
            ))),
        }
    }
    pub fn name(&self) -> &'static str {
        "bytes"
    }
    /// Ids are below this.
    pub fn vocab(&self) -> usize {
        257
    }
    pub fn end_of_text(&self) -> u32 {
        256
    }
    /// Appends. Any cut of a text gives the same tokens: bytes know no neighbours.
    pub fn encode(&self, text: &[u8], out: &mut Vec<u32>) {
        out.extend(text.iter().map(|&b| b as u32));
    }
    /// Bytes that are not UTF-8, and ids that are not in the vocabulary, become U+FFFD; the end of a text becomes nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes = ids.iter().flat_map(|&id| match id {
            0..256 => vec![id as u8],
            256 => vec![],
            _ => vec![0xff], // no byte of UTF-8
        });
        String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
    }
}
