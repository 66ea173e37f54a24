//! Tells models apart without reading them: ranks and runs compare the directories that they start from. Never reads
//! the whole of a weights file.
use crate::base::{Error, Result, open};
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// Bytes hashed at the end of a weights file.
const SAMPLE: u64 = 64 << 10;

/// Hash of a model directory: its config.json, and names, sizes and last bytes of its weights files. Hashing the files
/// in full would take as long as loading the model.
pub fn weights_hash(dir: &Path) -> Result<u64> {
    let hashed = || -> std::io::Result<u64> {
        let mut names: Vec<_> =
            fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name())).collect::<std::io::Result<_>>()?;
        names.retain(|name| Path::new(name).extension().is_some_and(|e| e == "safetensors" || e == "gguf"));
        names.sort();
        let mut hash = Xxh3::new();
        hash.update(&open::read(&dir.join("config.json"))?);
        for name in names {
            let mut file = open::file(&dir.join(&name))?;
            let len = file.seek(SeekFrom::End(0))?;
            file.seek(SeekFrom::Start(len.saturating_sub(SAMPLE)))?;
            let mut end = Vec::new();
            file.read_to_end(&mut end)?;
            hash.update(format!("{name:?} {len}\n").as_bytes());
            hash.update(&end);
        }
        Ok(hash.digest())
    };
    hashed().map_err(|e| Error::io("read", dir, e))
}
