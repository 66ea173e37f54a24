//! Damages checkpoints at rest: a flipped bit, a missing part. Never decides when.
use super::draw::DrawnFault;
use flatshard::base::{Error, Result};
use flatshard::ckpt::{self, Resume};
use std::fs;
use std::path::{Path, PathBuf};

/// Checkpoints in `dir`, in the order in which a run would resume from them.
pub fn checkpoints(dir: &Path) -> Result<Vec<PathBuf>> {
    ckpt::candidates(Some(dir), &Resume::Auto)
}
/// The step of a checkpoint, from its name.
pub fn step(checkpoint: &Path) -> u64 {
    checkpoint.file_name().and_then(|name| ckpt::dirs::step(&name.to_string_lossy())).unwrap_or(0)
}
pub fn bytes(checkpoint: &Path) -> u64 {
    let files = files(checkpoint).unwrap_or_default();
    files.iter().filter_map(|path| path.metadata().ok()).map(|m| m.len()).sum()
}

fn files(checkpoint: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e| Error::io("list", checkpoint, e);
    let entries = fs::read_dir(checkpoint).map_err(failed)?;
    let mut files: Vec<PathBuf> = entries.map(|e| Ok(e.map_err(failed)?.path())).collect::<Result<_>>()?;
    files.sort();
    Ok(files)
}
/// A random file and its content.
fn pick(checkpoint: &Path, fault: &DrawnFault) -> Result<(PathBuf, Vec<u8>)> {
    let mut files = files(checkpoint)?;
    if files.is_empty() {
        return Err(Error::Run(format!("{} is empty", checkpoint.display())));
    }
    let path = files.swap_remove(fault.dice as usize % files.len());
    let content = fs::read(&path).map_err(|e| Error::io("read", &path, e))?;
    Ok((path, content))
}

/// Flips one bit of one file.
pub fn flip(checkpoint: &Path, fault: &DrawnFault) -> Result<()> {
    let (path, mut content) = pick(checkpoint, fault)?;
    let at = (fault.size * content.len() as f64) as usize;
    // A low bit: flipping the case of the e in 1e-8 would change nothing.
    content[at] ^= 1 << ((fault.dice >> 32) % 3);
    fs::write(&path, content).map_err(|e| Error::io("write", &path, e))
}

/// Truncates a file or removes the last one, and leaves an unfinished save next to the checkpoint.
pub fn halve(checkpoint: &Path, fault: &DrawnFault) -> Result<()> {
    let (path, content) = pick(checkpoint, fault)?;
    let part = &content[..(fault.size * content.len() as f64) as usize];
    let failed = |e| Error::io("write", &path, e);
    let name = checkpoint.file_name().unwrap_or_default().to_string_lossy();
    let dead = checkpoint.with_file_name(format!(".tmp-{name}-{:016x}", fault.dice));
    let left = dead.join(path.file_name().unwrap_or_default());
    fs::create_dir_all(&dead).and_then(|()| fs::write(left, part)).map_err(failed)?;
    match fault.dice >> 63 {
        0 => fs::write(&path, part).map_err(failed),
        _ => fs::remove_file(checkpoint.join("trainer_state.json")).map_err(failed),
    }
}
