//! The beginning of a GGUF file (version 3): keys with typed values, then each tensor's name, shape, type and offset.
//! Never knows what a key means.
use super::quant::GgmlType;

/// Tensors start on multiples of this.
pub const TENSOR_ALIGN: u64 = 32;
const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;

/// A value of a key, in a type that llama.cpp expects of that key.
pub enum KeyValue<'a> {
    U32(usize),
    I32(i64),
    F32(f64),
    Bool(bool),
    Text(&'a str),
    Bools(&'a [bool]),
    Texts(&'a [Vec<u8>]),
    I32s(&'a [i32]),
    F32s(&'a [f32]),
}

/// Keys and values, in the order in which they are first put.
#[derive(Default)]
pub struct GgufKeys {
    entries: Vec<(String, Vec<u8>)>,
}

impl GgufKeys {
    /// Replaces the value of a key that is there, as the gguf package does: a file may have each key once.
    pub fn put(&mut self, key: &str, value: KeyValue) {
        let mut bytes = Vec::new();
        let out = &mut bytes;
        match value {
            KeyValue::U32(x) => tagged(out, 4, &(x as u32).to_le_bytes()),
            KeyValue::I32(x) => tagged(out, 5, &(x as i32).to_le_bytes()),
            KeyValue::F32(x) => tagged(out, 6, &(x as f32).to_le_bytes()),
            KeyValue::Bool(x) => tagged(out, 7, &[x as u8]),
            KeyValue::Text(x) => {
                tagged(out, 8, &[]);
                text(out, x.as_bytes());
            }
            KeyValue::Bools(list) => {
                array(out, 7, list.len());
                out.extend(list.iter().map(|x| *x as u8));
            }
            KeyValue::Texts(list) => {
                array(out, 8, list.len());
                list.iter().for_each(|x| text(out, x));
            }
            KeyValue::I32s(list) => {
                array(out, 5, list.len());
                out.extend(list.iter().flat_map(|x| x.to_le_bytes()));
            }
            KeyValue::F32s(list) => {
                array(out, 6, list.len());
                out.extend(list.iter().flat_map(|x| x.to_le_bytes()));
            }
        }
        match self.entries.iter_mut().find(|(there, _)| there == key) {
            Some((_, value)) => *value = bytes,
            None => self.entries.push((key.into(), bytes)),
        }
    }
}

/// Name, shape with the outermost dimension first, type, and first byte counted from the first tensor's.
pub struct GgufEntry<'a> {
    pub name: &'a str,
    pub shape: &'a [usize],
    pub form: GgmlType,
    pub offset: u64,
}

/// Everything before the first tensor, padding included.
pub fn header<'a>(keys: &GgufKeys, tensors: impl ExactSizeIterator<Item = GgufEntry<'a>>) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((keys.entries.len() as u64).to_le_bytes());
    for (key, value) in &keys.entries {
        text(&mut out, key.as_bytes());
        out.extend(value);
    }
    for GgufEntry { name, shape, form, offset } in tensors {
        text(&mut out, name.as_bytes());
        out.extend((shape.len() as u32).to_le_bytes());
        out.extend(shape.iter().rev().flat_map(|n| (*n as u64).to_le_bytes()));
        out.extend(form.id().to_le_bytes());
        out.extend(offset.to_le_bytes());
    }
    out.resize(out.len().next_multiple_of(TENSOR_ALIGN as usize), 0);
    out
}

/// Whether a file of these first bytes is a GGUF file.
pub fn is_gguf(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

fn tagged(out: &mut Vec<u8>, kind: u32, value: &[u8]) {
    out.extend(kind.to_le_bytes());
    out.extend(value);
}
fn array(out: &mut Vec<u8>, kind: u32, len: usize) {
    tagged(out, 9, &kind.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}
fn text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}
