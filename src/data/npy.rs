//! Reads token ids from a NumPy array file (NEP 1, versions 1 to 3). Never reads anything but 1-D little-endian
//! integers.
use super::place::TokenPlace;
use crate::base::{Error, Result, open};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// A NumPy integer type, from its `descr`: "<u2" is a 2-byte unsigned integer.
#[derive(Clone, Copy)]
struct Integer {
    bytes: usize,
    signed: bool,
}

impl Integer {
    /// Little-endian `raw`, widened. `None`: an unsigned number above the i64 range, which is not a token id.
    fn value(self, raw: &[u8]) -> Option<i64> {
        let fill = if self.signed && raw[self.bytes - 1] & 0x80 != 0 { 0xff } else { 0 };
        let mut wide = [fill; 8];
        wide[..self.bytes].copy_from_slice(raw);
        let x = i64::from_le_bytes(wide);
        (self.signed || x >= 0).then_some(x)
    }
}

/// Passes every id of the file to `sink`, in order and in chunks, after checking that it is in `0..bound`.
pub(super) fn read(path: &Path, bound: usize, mut sink: impl FnMut(&[u32]) -> Result<()>) -> Result<()> {
    let mut file = open::file(path).map_err(|e| Error::io("open", path, e))?;
    let (integer, len) = header(path, &mut file)?;
    let mut raw = vec![0u8; integer.bytes << 16];
    let mut ids = Vec::with_capacity(1 << 16);
    let mut done = 0;
    while done < len {
        let n = (len - done).min(1 << 16) as usize;
        let raw = &mut raw[..n * integer.bytes];
        file.read_exact(raw).map_err(|e| Error::io("read", path, e))?;
        ids.clear();
        for (i, raw) in raw.chunks_exact(integer.bytes).enumerate() {
            ids.push(TokenPlace::Index(path, done + i as u64).id(integer.value(raw), bound)?);
        }
        sink(&ids)?;
        done += n as u64;
    }
    Ok(())
}

/// The element type and count; leaves the file at its first element.
fn header(path: &Path, file: &mut File) -> Result<(Integer, u64)> {
    let bad = |what: String| Error::input(format!("{}: {what}", path.display()));
    let cut = |_| bad("not a .npy array: the file ends within its header".into());
    let mut start = [0u8; 8];
    file.read_exact(&mut start).map_err(cut)?;
    if &start[..6] != b"\x93NUMPY" {
        return Err(bad("not a .npy array: it does not begin with \\x93NUMPY".into()));
    }
    let mut len = [0u8; 4];
    let wide = if start[6] == 1 { 2 } else { 4 };
    file.read_exact(&mut len[..wide]).map_err(cut)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > 1 << 16 {
        return Err(bad(format!("not a .npy array of numbers: its header claims to be {len} bytes long")));
    }
    let mut text = vec![0u8; len];
    file.read_exact(&mut text).map_err(cut)?;
    let text = String::from_utf8_lossy(&text).into_owned();

    let value = |key: &str| {
        let at = text.find(&format!("'{key}'"))? + key.len() + 2;
        text[at..].trim_start().strip_prefix(':').map(str::trim_start)
    };
    let descr = value("descr").and_then(|v| v.split('\'').nth(1)).unwrap_or("a record");
    let integer = match descr.as_bytes() {
        [b'<' | b'|', kind @ (b'u' | b'i'), size @ (b'1' | b'2' | b'4' | b'8')] => {
            Integer { bytes: (size - b'0') as usize, signed: *kind == b'i' }
        }
        _ => {
            return Err(bad(format!(
                "its elements are {descr}, but token ids are little-endian integers: save it with \
                 `array.astype('<u4')` (or <u2, <i4, <i8)"
            )));
        }
    };
    let shape = value("shape").and_then(|v| v.strip_prefix('(')).and_then(|v| v.split(')').next()).unwrap_or("?");
    let mut dims = shape.split(',').map(str::trim).filter(|d| !d.is_empty());
    let len = match (dims.next().and_then(|d| d.parse::<u64>().ok()), dims.next()) {
        (Some(len), None) => len,
        _ => {
            return Err(bad(format!(
                "its shape is ({shape}), but a stream of tokens is 1-D: save it with `array.ravel()`, or write rows as \
                 JSONL with `input_ids`"
            )));
        }
    };
    let held = file.metadata().map_err(|e| Error::io("stat", path, e))?.len();
    let start = (8 + wide + text.len()) as u64;
    let needed = len.saturating_mul(integer.bytes as u64).saturating_add(start);
    if held < needed {
        return Err(bad(format!(
            "truncated: the header declares {len} elements ({needed} bytes), but the file holds \
                                {held} bytes"
        )));
    }
    Ok((integer, len))
}
