//! Tokens and scores of a SentencePiece `tokenizer.model`, read and written. The file is a protocol-buffers message of
//! which few fields are needed, so a library would cost more than these lines. Never tokenizes.
use super::vocabulary::{self, NORMAL, TokenizerFiles, Vocabulary, refused};
use crate::base::Result;

/// Scores of ids that no tokenizer gives, and of tokens that were added to it.
const NONE: f32 = -10000.0;
pub const ADDED: f32 = -1000.0;
/// SentencePiece's user-defined kind, which llama.cpp's converter reads as normal tokens.
const USER_DEFINED: u64 = 4;

/// Tokens by id, and the score of each, with what stands next to the file.
pub fn vocabulary(model: &[u8], size: usize, files: &TokenizerFiles) -> Result<(Vocabulary, Vec<f32>)> {
    let (mut vocabulary, mut scores) = (Vocabulary::unused(size), vec![NONE; size]);
    for (id, piece) in pieces(model)?.into_iter().enumerate().take(size) {
        vocabulary.set(id, &piece.text, piece.kind);
        scores[id] = piece.score;
    }
    let listed =
        files.added.as_object().into_iter().flatten().filter_map(|(token, id)| Some((id.as_u64()? as usize, token)));
    for (id, token) in listed.filter(|(id, _)| *id < size) {
        vocabulary.set(id, token, vocabulary::USER_DEFINED);
        scores[id] = ADDED;
    }
    for (id, token) in files.config["added_tokens_decoder"].as_object().into_iter().flatten() {
        let (Ok(id), Some(text)) = (id.parse::<usize>(), token["content"].as_str()) else { continue };
        if id < size {
            vocabulary.add(id, text, token["special"] == true);
            scores[id] = ADDED;
        }
    }
    Ok((vocabulary, scores))
}

pub struct Piece {
    pub text: String,
    pub score: f32,
    pub kind: i32,
}

/// A file of these pieces for BPE that falls back on bytes. `prefix`: a space is put before a text.
pub fn file(pieces: &[Piece], prefix: bool) -> Vec<u8> {
    /// A number in 7-bit groups.
    fn number(mut n: u64, out: &mut Vec<u8>) {
        while n >= 128 {
            out.push(n as u8 | 128);
            n >>= 7;
        }
        out.push(n as u8);
    }
    let field = |key: u64, n: u64, out: &mut Vec<u8>| {
        number(key << 3, out);
        number(n, out);
    };
    let bytes = |key: u64, bytes: &[u8], out: &mut Vec<u8>| {
        number(key << 3 | 2, out);
        number(bytes.len() as u64, out);
        out.extend(bytes);
    };
    let mut out = Vec::new();
    for Piece { text, score, kind } in pieces {
        let mut piece = Vec::new();
        bytes(1, text.as_bytes(), &mut piece);
        number(2 << 3 | 5, &mut piece);
        piece.extend(score.to_le_bytes());
        field(3, *kind as u64, &mut piece);
        bytes(1, &piece, &mut out);
    }
    let mut trainer = Vec::new();
    for (key, n) in [(3, 2), (4, pieces.len() as u64), (35, 1)] {
        field(key, n, &mut trainer); // the type BPE, the size, byte_fallback
    }
    bytes(2, &trainer, &mut out);
    let mut normalizer = Vec::new();
    bytes(1, b"identity", &mut normalizer);
    for (key, n) in [(3, prefix as u64), (4, 0), (5, 1)] {
        field(key, n, &mut normalizer); // add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces
    }
    bytes(3, &normalizer, &mut out);
    out
}

/// The pieces: field 1 of the message, repeated.
fn pieces(model: &[u8]) -> Result<Vec<Piece>> {
    let mut pieces = Vec::new();
    each_field(model, &mut |field, value| {
        let (1, ProtoField::Bytes(bytes)) = (field, value) else { return Some(()) };
        let mut piece = Piece { text: String::new(), score: 0.0, kind: NORMAL };
        each_field(bytes, &mut |field, value| {
            match (field, value) {
                (1, ProtoField::Bytes(text)) => piece.text = String::from_utf8(text.to_vec()).ok()?,
                (2, ProtoField::Word(score)) => piece.score = f32::from_bits(score),
                (3, ProtoField::Number(USER_DEFINED)) => piece.kind = NORMAL,
                (3, ProtoField::Number(kind)) => piece.kind = kind as i32,
                _ => {}
            }
            Some(())
        })?;
        pieces.push(piece);
        Some(())
    })
    .ok_or_else(|| refused("tokenizer.model is not a file of sentencepiece"))?;
    Ok(pieces)
}

enum ProtoField<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Four bytes.
    Word(u32),
    Other,
}

/// Calls `f` with each field of a message. `None` where it is not one.
fn each_field<'a>(mut bytes: &'a [u8], f: &mut dyn FnMut(u64, ProtoField<'a>) -> Option<()>) -> Option<()> {
    fn number(bytes: &mut &[u8]) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = bytes.split_first()?;
            *bytes = rest;
            value |= ((byte & 0x7f) as u64) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
    fn take<'a>(bytes: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = bytes.split_at_checked(len)?;
        *bytes = rest;
        Some(taken)
    }
    while !bytes.is_empty() {
        let key = number(&mut bytes)?;
        let field = match key & 7 {
            0 => ProtoField::Number(number(&mut bytes)?),
            1 => take(&mut bytes, 8).map(|_| ProtoField::Other)?,
            2 => {
                let len = number(&mut bytes)?;
                ProtoField::Bytes(take(&mut bytes, usize::try_from(len).ok()?)?)
            }
            5 => ProtoField::Word(u32::from_le_bytes(take(&mut bytes, 4)?.try_into().ok()?)),
            _ => return None,
        };
        f(key >> 3, field)?;
    }
    Some(())
}
