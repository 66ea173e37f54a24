//! Opening files that a user or another program made. Accepts regular files only, checked on the open descriptor, so a
//! named pipe cannot block the process and a device cannot exhaust memory. Never interprets the contents.
use rustix::fs::OFlags;
use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Cap for configs, indices, tokenizers and templates. The largest in use are about 50 MB.
const MOST: u64 = 1 << 30;

/// Opens the regular file at `path`. Anything else is an error, returned without blocking.
pub fn file(path: &Path) -> Result<File> {
    // Without O_NONBLOCK, opening a pipe that has no writer blocks.
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    let kind = file.metadata()?.file_type();
    match kind.is_file() {
        true => Ok(file),
        false => Err(Error::new(ErrorKind::InvalidInput, format!("it is {}, not a regular file", name(kind)))),
    }
}

/// Reads a regular file into memory.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let file = file(path)?;
    let len = file.metadata()?.len();
    if len > MOST {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("it has {len} bytes; the limit is {MOST}")));
    }
    let mut bytes = Vec::with_capacity(len as usize);
    file.take(MOST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The paths in a directory, sorted; none if there is no such directory.
pub fn listed(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(vec![]),
        Err(e) => return Err(e),
    };
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// Whether both are the same file or directory, through any links and mounts.
pub fn is_same(a: &Metadata, b: &Metadata) -> bool {
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// Opens a file for appending, and creates it if missing. A device that accepts no data (/dev/full) fails here.
pub fn append(path: &Path) -> Result<File> {
    path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    file.write(&[]).map(|_| file)
}

fn name(kind: FileType) -> &'static str {
    match () {
        _ if kind.is_dir() => "a directory",
        _ if kind.is_fifo() => "a named pipe",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_files_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"text").unwrap();
        assert_eq!(read(&path).unwrap(), b"text");
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let refused = [(dir.path(), "a directory"), (&pipe, "a named pipe"), (Path::new("/dev/zero"), "a device")];
        for (path, what) in refused {
            let error = read(path).unwrap_err().to_string();
            assert!(error.contains(&format!("it is {what}, not a regular file")), "{error}");
        }
        // A sparse file of 2 TB takes no disk space, but would exhaust memory if read.
        let huge = dir.path().join("huge");
        File::create(&huge).unwrap().set_len(2 << 40).unwrap();
        let error = read(&huge).unwrap_err().to_string();
        assert!(error.contains("it has 2199023255552 bytes; the limit is 1073741824"), "{error}");
    }
}
