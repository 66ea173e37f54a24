//! The tail of a growing file, line by line. Never returns an incomplete line.
use flatshard::base::{Error, Result};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A file that may not exist yet.
pub struct Tail {
    path: PathBuf,
    file: Option<File>,
    /// An incomplete last line.
    begun: Vec<u8>,
    generation: u64,
}

impl Tail {
    pub fn new(path: PathBuf) -> Tail {
        Tail { path, file: None, begun: Vec::new(), generation: 0 }
    }
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// How often the file was replaced or truncated.
    pub fn generation(&self) -> u64 {
        self.generation
    }
    /// Complete new lines since the last call. A file that replaces the previous one is read from its start.
    pub fn lines(&mut self) -> Result<Vec<String>> {
        let failed = |e| Error::io("read", &self.path, e);
        let mut bytes = std::mem::take(&mut self.begun);
        if let Some(file) = &mut self.file {
            let read = file.stream_position().map_err(failed)?;
            if file.metadata().map_err(failed)?.len() < read {
                file.rewind().map_err(failed)?;
                bytes.clear();
                self.generation += 1;
            }
            file.read_to_end(&mut bytes).map_err(failed)?;
        }
        let there = match self.path.metadata() {
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            there => Some(there.map_err(failed)?.ino()),
        };
        let open = self.file.as_ref().map(|file| file.metadata()).transpose().map_err(failed)?.map(|m| m.ino());
        if there.is_some() && there != open {
            let mut file = File::open(&self.path).map_err(failed)?;
            file.read_to_end(&mut bytes).map_err(failed)?;
            self.generation += u64::from(self.file.is_some());
            self.file = Some(file);
        }
        let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        self.begun = bytes.split_off(whole);
        Ok(String::from_utf8_lossy(&bytes).lines().map(String::from).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn complete_lines_come_once_and_a_new_file_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut tail = Tail::new(path.clone());
        assert!(tail.lines().unwrap().is_empty());
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one\ntw").unwrap();
        assert_eq!(tail.lines().unwrap(), ["one"]);
        assert!(tail.lines().unwrap().is_empty());
        file.write_all(b"o\nthree\n").unwrap();
        assert_eq!(tail.lines().unwrap(), ["two", "three"]);
        std::fs::rename(&path, dir.path().join("file.1")).unwrap();
        assert!(tail.lines().unwrap().is_empty());
        std::fs::write(&path, "four\n").unwrap();
        assert_eq!(tail.lines().unwrap(), ["four"]);
        assert_eq!(tail.generation(), 1);
        // Shorter than what was read: another run began in the same file.
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"five\n").unwrap();
        assert_eq!(tail.lines().unwrap(), ["five"]);
        std::fs::OpenOptions::new().write(true).truncate(true).open(&path).unwrap().write_all(b"six\n").unwrap();
        assert_eq!((tail.lines().unwrap(), tail.generation()), (vec!["six".to_string()], 2));
    }
}
