//! One TensorBoard event file: TFRecord framing around protobuf `Event` messages. Written by hand, since six messages
//! do not justify a protobuf compiler. Never reads.
//!
//! A record is its length (u64), the masked crc32c of that, the bytes, their masked crc32c, all little endian
//! (tensorflow/core/lib/io/record_writer.h). Field numbers are those of tensorboard/compat/proto: event.proto,
//! summary.proto, tensor.proto.
use crate::base::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// TensorBoard recognizes event files by this in their name, and reads those of a directory in name order.
pub const PREFIX: &str = "events.out.tfevents.";

pub struct EventFile {
    file: File,
    path: PathBuf,
}

impl EventFile {
    /// A new file in `dir`, the last by name. TensorBoard drops steps from `first` on in older files, as they are
    /// repeated.
    pub fn create(dir: &Path, first: u64) -> Result<EventFile> {
        let listing = std::fs::read_dir(dir).map_err(|e| Error::io("list", dir, e))?;
        let names = listing.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let seconds = |name: String| name.strip_prefix(PREFIX)?.split('.').next()?.parse::<u64>().ok();
        let last = names.filter_map(seconds).max();
        let now = since_1970().as_secs().max(last.map_or(0, |last| last + 1));
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let path = dir.join(format!("{PREFIX}{now:010}.{host}.{}", std::process::id()));
        let file = OpenOptions::new().create_new(true).append(true).open(&path);
        let mut events = EventFile { file: file.map_err(|e| Error::io("create", &path, e))?, path };
        events.event(0, |event| event.bytes(3, b"brain.Event:2"))?;
        events.event(first, |event| event.message(7, |session| session.varint(1, 1)))?; // SessionLog { status: START }
        Ok(events)
    }

    pub fn scalars(&mut self, step: u64, scalars: impl Iterator<Item = (&'static str, f64)>) -> Result<()> {
        let mut scalars = scalars.peekable();
        if scalars.peek().is_none() {
            return Ok(());
        }
        self.event(step, |event| {
            event.message(5, |summary| {
                for (tag, value) in scalars {
                    summary.message(1, |entry| {
                        entry.bytes(1, tag.as_bytes());
                        entry.fixed(2, 5, &(value as f32).to_le_bytes());
                    });
                }
            });
        })
    }

    /// Markdown, shown under TEXT.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) -> Result<()> {
        self.event(step, |event| {
            event.message(5, |summary| {
                summary.message(1, |entry| {
                    entry.bytes(1, tag.as_bytes());
                    entry.message(9, |metadata| metadata.message(1, |plugin| plugin.bytes(1, b"text")));
                    entry.message(8, |tensor| {
                        tensor.varint(1, 7); // DT_STRING
                        tensor.message(2, |shape| shape.message(2, |dim| dim.varint(1, 1)));
                        tensor.bytes(8, text.as_bytes());
                    });
                });
            });
        })
    }

    /// One record per write, so that a killed run leaves at most one incomplete record.
    fn event(&mut self, step: u64, what: impl FnOnce(&mut Message)) -> Result<()> {
        let mut event = Message::default();
        event.fixed(1, 1, &since_1970().as_secs_f64().to_le_bytes());
        event.varint(2, step);
        what(&mut event);
        let length = (event.0.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(event.0.len() + 16);
        record.extend(length);
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(&event.0);
        record.extend(masked_crc(&event.0).to_le_bytes());
        self.file.write_all(&record).map_err(|e| Error::io("write", &self.path, e))
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The encoded fields of a protobuf message.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn raw(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.0.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
    }
    fn varint(&mut self, field: u64, n: u64) {
        self.raw(field << 3);
        self.raw(n);
    }
    /// Wire type 1: eight bytes; 5: four.
    fn fixed(&mut self, field: u64, wire: u64, bytes: &[u8]) {
        self.raw(field << 3 | wire);
        self.0.extend(bytes);
    }
    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.raw(field << 3 | 2);
        self.raw(bytes.len() as u64);
        self.0.extend(bytes);
    }
    fn message(&mut self, field: u64, fill: impl FnOnce(&mut Message)) {
        let mut inner = Message::default();
        fill(&mut inner);
        self.bytes(field, &inner.0);
    }
}

/// Masked as TFRecord does, so that a checksum may be part of checksummed data.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bits reflected.
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut i = 0;
        while i < 256 {
            let (mut crc, mut bit) = (i as u32, 0);
            while bit < 8 {
                crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
                bit += 1;
            }
            table[i] = crc;
            i += 1;
        }
        table
    };
    !bytes.iter().fold(!0, |crc, byte| crc >> 8 ^ TABLE[usize::from(crc as u8 ^ byte)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_rfc_3720() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn a_file_comes_after_those_that_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let names = |n| (0..n).map(|_| EventFile::create(dir.path(), 1).unwrap().path).collect::<Vec<_>>();
        let names = names(3);
        assert!(names.is_sorted() && names[0] != names[1], "{names:?}");
    }
}
