//! Opens a file as the bytes that its writer meant: decompressed, in UTF-8, without a byte order mark. Never interprets
//! them.
use crate::base::{Error, Result, open};
use flate2::read::MultiGzDecoder;
use std::io::{self, BufReader, Cursor, ErrorKind, Read};
use std::path::Path;
use zstd::stream::read::Decoder;

/// The largest window that zstd can be asked for (`--long=31`), in bits.
const WINDOW: u32 = 31;

/// What a file holds, from its start.
pub(super) struct Content {
    pub file: Box<dyn Read>,
    /// What it was compressed with.
    pub packed: Option<&'static str>,
}

/// Opens the content of a regular file.
pub(super) fn open(path: &Path) -> Result<Content> {
    let file = open::file(path).map_err(|e| Error::io("open", path, e))?;
    let (start, file) = peek(file).map_err(|e| failed(path, e))?;
    let (file, packed): (Box<dyn Read>, _) = match start[..] {
        [0x1f, 0x8b, 8, ..] => (Box::new(MultiGzDecoder::new(file)), Some("gzip")),
        // The second: frames that readers skip, which parallel writers put first.
        [0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18] => {
            let mut decoder = Decoder::new(file).map_err(|e| failed(path, e))?;
            decoder.window_log_max(WINDOW).map_err(|e| failed(path, e))?;
            (Box::new(decoder), Some("zstd"))
        }
        _ => (Box::new(file), None),
    };
    let (start, mut file) = peek(file).map_err(|e| failed(path, e))?;
    let mut skip = |n: u64| io::copy(&mut file.by_ref().take(n), &mut io::sink()).map_err(|e| failed(path, e));
    let big = match start[..] {
        [0xef, 0xbb, 0xbf, ..] => {
            skip(3)?;
            None
        }
        [0xff, 0xfe, 0, 0] => None, // UTF-32, or binary
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
            skip(2)?;
            Some(start[0] == 0xfe)
        }
        _ => None,
    };
    Ok(match big {
        Some(big) => Content { file: Box::new(Utf16 { file, big, high: None, text: Cursor::default() }), packed },
        None => Content { file: Box::new(file), packed },
    })
}

/// The error of a read: of the system, or of a file whose content contradicts itself.
pub(super) fn failed(path: &Path, e: io::Error) -> Error {
    match e.raw_os_error() {
        Some(_) => Error::io("read", path, e),
        None => Error::in_file(path, format!("cannot be read to its end, so it is truncated or damaged ({e})")),
    }
}

/// No NUL, and valid UTF-8, except for a character split at the end if `cut`.
pub(super) fn is_text(bytes: &[u8], cut: bool) -> bool {
    !bytes.contains(&0)
        && match std::str::from_utf8(bytes) {
            Ok(_) => true,
            Err(e) => cut && e.error_len().is_none(),
        }
}

/// Reads until `bytes` is full or the file ends; returns the number of bytes.
pub(super) fn fill(file: &mut dyn Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut n = 0;
    while n < bytes.len() {
        match file.read(&mut bytes[n..]) {
            Ok(0) => break,
            Ok(more) => n += more,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(n)
}

/// The first bytes, at most four, and a reader that begins with them.
fn peek<R: Read>(mut file: R) -> io::Result<(Vec<u8>, impl Read)> {
    let mut start = [0; 4];
    let n = fill(&mut file, &mut start)?;
    Ok((start[..n].to_vec(), Cursor::new(start[..n].to_vec()).chain(file)))
}

/// Text in UTF-16 as UTF-8.
struct Utf16<R> {
    file: R,
    big: bool,
    /// The first half of a character whose second half has not been read.
    high: Option<u16>,
    /// Decoded, and read up to the cursor.
    text: Cursor<Vec<u8>>,
}

impl<R: Read> Read for Utf16<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.text.position() == self.text.get_ref().len() as u64 {
            self.decode()?;
        }
        self.text.read(out)
    }
}

impl<R: Read> Utf16<R> {
    fn decode(&mut self) -> io::Result<()> {
        let wrong = |what: &str| io::Error::new(ErrorKind::InvalidData, format!("invalid UTF-16: {what}"));
        let mut bytes = [0; 8192];
        let n = fill(&mut self.file, &mut bytes)?;
        let (pairs, rest) = bytes[..n].as_chunks::<2>();
        if !rest.is_empty() {
            return Err(wrong("an odd number of bytes"));
        }
        let unit = |pair: &[u8; 2]| if self.big { u16::from_be_bytes(*pair) } else { u16::from_le_bytes(*pair) };
        let mut units: Vec<u16> = self.high.take().into_iter().chain(pairs.iter().map(unit)).collect();
        if n == bytes.len() {
            self.high = units.pop_if(|last| (0xd800..0xdc00).contains(last));
        }
        let text: std::result::Result<String, _> = char::decode_utf16(units).collect();
        self.text = Cursor::new(text.map_err(|e| wrong(&e.to_string()))?.into_bytes());
        Ok(())
    }
}

/// A buffered reader of the content at `path`.
pub(super) fn buffered(path: &Path) -> Result<BufReader<Box<dyn Read>>> {
    Ok(BufReader::with_capacity(1 << 20, open(path)?.file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utf16_is_read_wherever_a_block_ends() {
        for (lead, big) in [(0, false), (1, true), (4094, false), (4095, true), (4096, false)] {
            let text = "a".repeat(lead) + &"\u{1f600}é".repeat(3000);
            let unit = |unit: u16| if big { unit.to_be_bytes() } else { unit.to_le_bytes() };
            let bytes: Vec<u8> = ['\u{feff}']
                .into_iter()
                .chain(text.chars())
                .collect::<String>()
                .encode_utf16()
                .flat_map(unit)
                .collect();
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("t");
            std::fs::write(&path, &bytes).unwrap();
            let mut found = String::new();
            open(&path).unwrap().file.read_to_string(&mut found).unwrap();
            assert_eq!(found, text);
            std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
            assert!(open(&path).unwrap().file.read_to_string(&mut found).is_err());
        }
    }
}
