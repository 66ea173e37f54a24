//! Tells models apart without reading them: ranks and runs compare the directories that they start from. Never reads
//! the whole of a large weights file.
use crate::base::{Error, Result, open};
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// Bytes hashed at a place of a weights file.
const SAMPLE: u64 = 64 << 10;
/// Places of each file.
const PLACES: u64 = 64;

/// Hashes of a model directory, as "ends-places", in hexadecimal digits: its config.json and the names, sizes and last
/// bytes of its weights files; and bytes at places of the files at equal distances, which are all of a small one.
/// Hashing large files in full would take as long as loading the model. Checkpoints of earlier versions hold the first
/// hash alone.
pub fn weights_hash(dir: &Path) -> Result<String> {
    let hashed = || -> std::io::Result<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name())).collect::<std::io::Result<_>>()?;
        names.retain(|name| Path::new(name).extension().is_some_and(|e| e == "safetensors" || e == "gguf"));
        names.sort();
        let [mut ends, mut places] = [Xxh3::new(), Xxh3::new()];
        ends.update(&open::read(&dir.join("config.json"))?);
        for name in names {
            let mut file = open::file(&dir.join(&name))?;
            let len = file.seek(SeekFrom::End(0))?;
            let last = len.saturating_sub(SAMPLE);
            let mut read = |at: u64| -> std::io::Result<Vec<u8>> {
                let mut bytes = Vec::new();
                file.seek(SeekFrom::Start(at))?;
                file.by_ref().take(SAMPLE).read_to_end(&mut bytes)?;
                Ok(bytes)
            };
            ends.update(format!("{name:?} {len}\n").as_bytes());
            ends.update(&read(last)?);
            for at in (0..len).step_by(SAMPLE.max(len / PLACES) as usize) {
                places.update(&read(at)?);
            }
        }
        Ok(format!("{:016x}-{:016x}", ends.digest(), places.digest()))
    };
    hashed().map_err(|e| Error::io("read", dir, e))
}

/// Whether both are hashes of one model. `then` may be of an earlier version.
pub fn same_weights(then: &str, now: &str) -> bool {
    now == then || !then.contains('-') && now.split('-').next() == Some(then)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_that_differ_in_the_middle_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).unwrap();
        write("config.json", b"{}");
        let mut weights = vec![7u8; 300 << 10];
        write("model.safetensors", &weights);
        let before = weights_hash(dir.path()).unwrap();
        assert_eq!(weights_hash(dir.path()).unwrap(), before);
        weights[100 << 10] = 8;
        write("model.safetensors", &weights);
        let after = weights_hash(dir.path()).unwrap();
        assert!(!same_weights(&before, &after), "{before} {after}");
        // A checkpoint of an earlier version holds what is the same.
        let ends = before.split('-').next().unwrap();
        assert!(same_weights(ends, &before) && same_weights(ends, &after));
        weights[299 << 10] = 8;
        write("model.safetensors", &weights);
        assert!(!same_weights(ends, &weights_hash(dir.path()).unwrap()));
    }
}
