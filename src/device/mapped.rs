//! Files mapped read-only into memory, so that a data set can exceed it. Never writes.
use flatshard_base::{Error, Result};
use std::{fs::File, path::Path};

pub struct MappedFile(memmap2::Mmap);

impl MappedFile {
    /// Maps all of `file`; `path` is for messages.
    pub fn of(file: &File, path: &Path) -> Result<MappedFile> {
        // SAFETY: token caches are written under another name and renamed, never changed in place. Truncating a mapped
        // file ends the process with SIGBUS; it cannot corrupt memory.
        let map = unsafe { memmap2::Mmap::map(file) }.map_err(|e| Error::io("map", path, e))?;
        Ok(MappedFile(map))
    }
}
impl std::ops::Deref for MappedFile {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}
