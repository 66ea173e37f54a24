//! The beginning of a GGUF file (versions 2 and 3) that somebody else wrote: keys with typed values, and the tensors
//! with their places. Never trusts a length, count, name or offset, and never reads a tensor.
use super::codes::GgmlCode;
use super::header::TENSOR_ALIGN;
use crate::base::{Error, Result, open, quote};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

/// Limit on everything before the first tensor. The largest vocabularies in use need some 20 MB.
const MOST: u64 = 256 << 20;
/// Limits on counts whose entries are kept one by one.
const MOST_KEYS: u64 = 1 << 16;
const MOST_TENSORS: u64 = 1 << 20;
/// Dimensions of a tensor, as in ggml.
const MOST_DIMS: u32 = 4;

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    Int(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Texts(Vec<String>),
}

/// As JSON shows it.
impl fmt::Display for GgufValue {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            GgufValue::Int(n) => write!(f, "{n}"),
            GgufValue::Float(x) => write!(f, "{x}"),
            GgufValue::Bool(yes) => write!(f, "{yes}"),
            GgufValue::Text(text) => write!(f, "{text:?}"),
            GgufValue::Ints(list) => write!(f, "{list:?}"),
            GgufValue::Floats(list) => write!(f, "{list:?}"),
            GgufValue::Texts(list) => write!(f, "{list:?}"),
        }
    }
}

/// A tensor in a file. `offset` is the position of its first byte in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufPlace {
    /// Index of its file among those of a model.
    pub file: usize,
    /// The outermost dimension comes first.
    pub shape: Vec<usize>,
    pub code: GgmlCode,
    pub offset: u64,
}

/// What precedes the tensors of a file.
#[derive(Debug, Default)]
pub struct GgufFile {
    pub keys: BTreeMap<String, GgufValue>,
    pub tensors: BTreeMap<String, GgufPlace>,
}

impl GgufFile {
    pub fn open(path: &Path) -> Result<(GgufFile, File)> {
        let failed = |e| Error::in_file(path, e);
        let file = open::file(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let parsed = GgufFile::parse(BufReader::new(&file), length).map_err(|e| Error::in_file(path, e))?;
        Ok((parsed, file))
    }

    /// Parses the beginning of a file of `length` bytes. Errors do not name the file.
    pub fn parse(from: impl Read, length: u64) -> Result<GgufFile> {
        let mut bytes = GgufBytes { from, at: 0, length };
        if bytes.take::<4>()? != *b"GGUF" {
            return Err(Error::input("is not a GGUF file: it does not begin with GGUF"));
        }
        match bytes.u32()? {
            2 | 3 => {}
            1 => return Err(Error::input("has version 1 of GGUF, which llama.cpp gave up in 2023: convert it anew")),
            swapped if swapped & 0xffff == 0 => {
                return Err(Error::input("is in big-endian order: use a file for little-endian machines"));
            }
            other => return Err(Error::input(format!("has version {other} of GGUF; supported: 2 and 3"))),
        }
        let tensors = bytes.count("tensors", MOST_TENSORS)?;
        let keys = bytes.count("keys", MOST_KEYS)?;
        let mut file = GgufFile::default();
        for _ in 0..keys {
            let key = bytes.text()?;
            let value = bytes.value(&key)?;
            if file.keys.insert(key.clone(), value).is_some() {
                return Err(Error::input(format!("has the key {} twice", quote(key))));
            }
        }
        let align = file.alignment()?;
        for _ in 0..tensors {
            let name = bytes.text()?;
            let place = bytes.place(&name)?;
            if !place.offset.is_multiple_of(align) {
                return Err(Error::input(format!(
                    "tensor {} starts at {}, which is not a multiple of the file's alignment {align}",
                    quote(name),
                    place.offset
                )));
            }
            if file.tensors.insert(name.clone(), place).is_some() {
                return Err(Error::input(format!("has the tensor {} twice", quote(name))));
            }
        }
        file.place(bytes.at.next_multiple_of(align), length)?;
        Ok(file)
    }

    fn alignment(&self) -> Result<u64> {
        let Some(value) = self.keys.get("general.alignment") else { return Ok(TENSOR_ALIGN) };
        match value {
            GgufValue::Int(n @ 8..=65_536) if n & (n - 1) == 0 => Ok(*n as u64),
            _ => Err(Error::input("general.alignment must be a power of two from 8 to 65536")),
        }
    }

    /// Turns offsets from the first tensor, which is at `start`, into offsets in the file, and checks that all tensors
    /// are within the file and do not overlap.
    fn place(&mut self, start: u64, length: u64) -> Result<()> {
        let mut taken = BTreeSet::new();
        for (name, tensor) in &mut self.tensors {
            let name = quote(name);
            let long = || Error::input(format!("tensor {name} is larger than any file"));
            let bytes = tensor.code.bytes(&tensor.shape).ok_or_else(long)?;
            tensor.offset = tensor.offset.checked_add(start).ok_or_else(long)?;
            let end = tensor.offset.checked_add(bytes).ok_or_else(long)?;
            if end > length {
                return Err(Error::input(format!(
                    "is truncated: it has {length} bytes, but tensor {name} ends at {end}"
                )));
            }
            taken.insert((tensor.offset, end, name.to_string()));
        }
        let list: Vec<_> = taken.into_iter().collect();
        match list.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            Some(pair) => Err(Error::input(format!("tensors {} and {} overlap", pair[0].2, pair[1].2))),
            None => Ok(()),
        }
    }
}

/// A reader that knows how much of the file is left.
struct GgufBytes<R> {
    from: R,
    at: u64,
    length: u64,
}

impl<R: Read> GgufBytes<R> {
    /// An error unless the next `n` bytes are in the file and within the limit.
    fn need(&self, n: u64) -> Result<()> {
        match self.at.checked_add(n) {
            Some(end) if end <= self.length.min(MOST) => Ok(()),
            Some(end) if end <= self.length => {
                Err(Error::input(format!("has more than {MOST} bytes before its tensors")))
            }
            _ => Err(Error::input(format!("is truncated: it has {} bytes, but its keys need more", self.length))),
        }
    }
    fn bytes(&mut self, n: u64) -> Result<Vec<u8>> {
        self.need(n)?;
        let mut bytes = vec![0; n as usize];
        self.from.read_exact(&mut bytes).map_err(|e| Error::input(format!("cannot be read: {e}")))?;
        self.at += n;
        Ok(bytes)
    }
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.need(N as u64)?;
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes).map_err(|e| Error::input(format!("cannot be read: {e}")))?;
        self.at += N as u64;
        Ok(bytes)
    }
    fn u32(&mut self) -> Result<u32> {
        self.take().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_le_bytes)
    }
    fn count(&mut self, what: &str, most: u64) -> Result<u64> {
        let count = self.u64()?;
        match count <= most {
            true => Ok(count),
            false => Err(Error::input(format!("claims {count} {what}; the limit is {most}"))),
        }
    }
    fn text(&mut self) -> Result<String> {
        let length = self.u64()?;
        String::from_utf8(self.bytes(length)?).map_err(|_| Error::input("has a text that is not UTF-8"))
    }

    fn value(&mut self, key: &str) -> Result<GgufValue> {
        let kind = self.u32()?;
        Ok(match kind {
            6 => GgufValue::Float(f32::from_le_bytes(self.take()?).into()),
            7 => GgufValue::Bool(self.take::<1>()?[0] != 0),
            8 => GgufValue::Text(self.text()?),
            9 => self.list(key)?,
            12 => GgufValue::Float(f64::from_le_bytes(self.take()?)),
            _ => GgufValue::Int(self.int(kind).ok_or_else(|| unknown(key, kind))??),
        })
    }

    /// An integer of this type; none if the type is none of an integer.
    fn int(&mut self, kind: u32) -> Option<Result<i128>> {
        Some(match kind {
            0 => self.take().map(|b| u8::from_le_bytes(b).into()),
            1 => self.take().map(|b| i8::from_le_bytes(b).into()),
            2 => self.take().map(|b| u16::from_le_bytes(b).into()),
            3 => self.take().map(|b| i16::from_le_bytes(b).into()),
            4 => self.take().map(|b| u32::from_le_bytes(b).into()),
            5 => self.take().map(|b| i32::from_le_bytes(b).into()),
            10 => self.take().map(|b| u64::from_le_bytes(b).into()),
            11 => self.take().map(|b| i64::from_le_bytes(b).into()),
            _ => return None,
        })
    }

    fn list(&mut self, key: &str) -> Result<GgufValue> {
        let kind = self.u32()?;
        let count = self.u64()?;
        // Each entry has at least this size, so that no count can ask for more memory than the file has bytes.
        let least = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            _ => return Err(unknown(key, kind)),
        };
        self.need(count.saturating_mul(least))?;
        let mut floats = Vec::new();
        let mut ints = Vec::new();
        let mut texts = Vec::new();
        for _ in 0..count {
            match kind {
                6 => floats.push(f32::from_le_bytes(self.take()?)),
                7 => ints.push((self.take::<1>()?[0] != 0).into()),
                8 => texts.push(self.text()?),
                12 => floats.push(f64::from_le_bytes(self.take()?) as f32),
                _ => {
                    let int = self.int(kind).ok_or_else(|| unknown(key, kind))??;
                    let fits = i64::try_from(int);
                    ints.push(fits.map_err(|_| Error::input(format!("{} has {int}, which is too large", quote(key))))?);
                }
            }
        }
        Ok(match kind {
            6 | 12 => GgufValue::Floats(floats),
            8 => GgufValue::Texts(texts),
            _ => GgufValue::Ints(ints),
        })
    }

    /// Shape, type, and offset from the first tensor.
    fn place(&mut self, name: &str) -> Result<GgufPlace> {
        let bad = |what: String| Error::input(format!("tensor {} {what}", quote(name)));
        let dims = self.u32()?;
        if dims == 0 || dims > MOST_DIMS {
            return Err(bad(format!("has {dims} dimensions; supported: 1 to {MOST_DIMS}")));
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            let size = self.u64()?;
            let fits = usize::try_from(size).ok().filter(|&n| n > 0);
            shape.push(fits.ok_or_else(|| bad(format!("has a dimension of {size}")))?);
        }
        shape.reverse();
        let id = self.u32()?;
        let code =
            GgmlCode::of(id).map_err(|what| bad(format!("is of type {what}; supported: {}", GgmlCode::NAMES)))?;
        let row = shape.last().copied().unwrap_or(0);
        if !row.is_multiple_of(code.block()) {
            return Err(bad(format!("has rows of {row} elements, but {code:?} needs a multiple of {}", code.block())));
        }
        Ok(GgufPlace { file: 0, shape, code, offset: self.u64()? })
    }
}

fn unknown(key: &str, kind: u32) -> Error {
    Error::input(format!("has the key {} with a value of type {kind}, which GGUF does not define", quote(key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    }
    fn begin(tensors: u64, keys: u64) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(tensors.to_le_bytes());
        out.extend(keys.to_le_bytes());
        out
    }
    fn tensor(out: &mut Vec<u8>, name: &str, dims: &[u64], kind: u32, offset: u64) {
        text(out, name);
        out.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|n| out.extend(n.to_le_bytes()));
        out.extend(kind.to_le_bytes());
        out.extend(offset.to_le_bytes());
    }
    /// The file, padded and with `data` bytes of tensors.
    fn parsed(mut bytes: Vec<u8>, data: usize) -> Result<GgufFile> {
        bytes.resize(bytes.len().next_multiple_of(32) + data, 0);
        GgufFile::parse(&bytes[..], bytes.len() as u64)
    }
    fn refused(bytes: Vec<u8>, data: usize) -> String {
        let error = parsed(bytes, data).unwrap_err();
        assert_eq!(error.exit_status(), 2);
        error.to_string()
    }

    #[test]
    fn tensors_stay_within_the_file_and_apart() {
        let two = |dims: &[u64], kind: u32, second: u64| {
            let mut out = begin(2, 0);
            tensor(&mut out, "a", dims, kind, 0);
            tensor(&mut out, "b", &[8], 0, second);
            out
        };
        let good = parsed(two(&[4, 2], 0, 32), 64).unwrap();
        assert_eq!((&good.tensors["a"].shape[..], good.tensors["b"].offset), (&[2, 4][..], 160));
        let cases = [
            (refused(two(&[4, 2], 0, 32), 63), "truncated"),
            (refused(two(&[4, 3], 0, 32), 96), "overlap"),
            (refused(two(&[4, 2], 0, 33), 96), "multiple of the file's alignment"),
            (refused(two(&[4, 2], 0, u64::MAX - 31), 96), "larger than any file"),
            (refused(two(&[u64::MAX, 2], 0, 32), 96), "larger than any file"),
            (refused(two(&[0, 2], 0, 32), 96), "dimension of 0"),
            (refused(two(&[4, 2], 8, 32), 96), "multiple of 32"),
            (refused(two(&[4, 2], 16, 32), 96), "IQ2_XXS"),
            (refused(two(&[4, 2], 999, 32), 96), "999"),
            (refused(two(&[1, 1, 1, 1, 1], 0, 32), 96), "5 dimensions"),
            (refused(begin(1 << 60, 0), 0), "limit"),
            (refused(begin(0, 1 << 60), 0), "limit"),
        ];
        cases.iter().for_each(|(text, says)| assert!(text.contains(says), "{text}"));
        let mut twice = begin(2, 0);
        tensor(&mut twice, "a", &[8], 0, 0);
        tensor(&mut twice, "a", &[8], 0, 32);
        assert!(refused(twice, 64).contains("twice"));
    }

    #[test]
    fn keys_are_typed_and_bounded() {
        let key = |kind: u32, rest: &[u8]| {
            let mut out = begin(0, 1);
            text(&mut out, "k");
            out.extend(kind.to_le_bytes());
            out.extend(rest);
            out
        };
        let list = |kind: u32, count: u64, rest: &[u8]| {
            let mut body = kind.to_le_bytes().to_vec();
            body.extend(count.to_le_bytes());
            body.extend(rest);
            key(9, &body)
        };
        let value = |bytes| parsed(bytes, 0).unwrap().keys.remove("k").unwrap();
        assert_eq!(value(key(4, &7u32.to_le_bytes())), GgufValue::Int(7));
        assert_eq!(value(key(6, &0.5f32.to_le_bytes())), GgufValue::Float(0.5));
        assert_eq!(value(list(5, 2, &[1, 0, 0, 0, 255, 255, 255, 255])), GgufValue::Ints(vec![1, -1]));
        let cases = [
            (refused(key(13, &[0; 8]), 0), "type 13"),
            (refused(key(8, &u64::MAX.to_le_bytes()), 0), "truncated"),
            (refused(list(4, u64::MAX, &[]), 0), "truncated"),
            (refused(list(9, 1, &[]), 0), "type 9"), // a list of lists
            (refused(list(8, 1 << 40, &[]), 0), "truncated"),
            (refused(key(8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]), 0), "UTF-8"),
        ];
        cases.iter().for_each(|(text, says)| assert!(text.contains(says), "{text}"));
        let mut aligned = begin(0, 1);
        text(&mut aligned, "general.alignment");
        aligned.extend(4u32.to_le_bytes());
        aligned.extend(48u32.to_le_bytes());
        assert!(refused(aligned, 0).contains("power of two"));
        let mut old = begin(0, 0);
        old[4] = 1;
        assert!(refused(old, 0).contains("version 1"));
        assert!(GgufFile::parse(&b"GGUF"[..], 4).is_err());
    }
}
