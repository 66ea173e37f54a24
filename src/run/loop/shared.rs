//! Checks that an output directory is the same one for all ranks: on a host that does not mount the shared file system,
//! the path would be a local directory, and part of each checkpoint would be lost. Never leaves files there.
use crate::base::{Error, Result};
use crate::ckpt::dirs::unfinished;
use crate::comm::exchange::{Exchange, texts};
use crate::comm::{Collective, Tag};
use crate::device::Device;
use crate::run::r#loop::same::named;
use crate::run::settings::checkpoint::CheckpointSettings;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Words that identify a directory: host, device, inode, and how many levels up the nearest existing directory is.
const WORDS: usize = 4;

/// Returns [`Error::Input`] on all ranks if some do not see what rank 0 writes. Collective; [`super::same`] has checked
/// that all ranks have a directory.
pub fn check(c: &CheckpointSettings, host: &str, dev: &dyn Device, world: &Arc<dyn Collective>) -> Result<()> {
    let gguf = c.save_gguf.as_ref().and_then(|file| file.parent()).map(|dir| Path::new(".").join(dir));
    let dirs = [
        ("--ckpt-dir", &c.ckpt_dir),
        ("--save-hf", &c.save_hf),
        ("--save-adapter", &c.save_adapter),
        ("--save-gguf", &gguf),
    ];
    for (flag, dir) in dirs {
        if let Some(dir) = dir.as_ref().filter(|_| world.size() > 1) {
            one(flag, dir, host, dev, world)?;
        }
    }
    Ok(())
}

fn one(flag: &str, dir: &Path, host: &str, dev: &dyn Device, world: &Arc<dyn Collective>) -> Result<()> {
    let what = format!("inspect {flag} {}", dir.display());
    let mut exchange = Exchange::new(dev, world.clone(), "directories", 1 + WORDS)?;
    let ranks = exchange.share(dev, &what, identity(dir, host), WORDS)?;
    if ranks.iter().all(|rank| *rank == ranks[0]) {
        return Ok(()); // the same directory on the same host
    }
    // Rank 0 writes a file with a random name into the nearest existing directory; a rank that shares it finds the file
    // the same number of levels up.
    let above = |name: &str| -> Result<PathBuf> {
        let path = absolute(dir).map_err(|e| Error::io("resolve", dir, e))?;
        Ok(path.ancestors().nth(ranks[0][WORDS - 1] as usize).unwrap_or(Path::new("/")).join(name))
    };
    let nonce = RandomState::new().hash_one(std::process::id());
    let probe = match world.rank() {
        0 => above(&unfinished("probe", nonce)).and_then(Probe::write).map(Some),
        _ => Ok(None),
    };
    let (probe, written) = match probe {
        Ok(probe) => (probe, Ok(vec![nonce])),
        Err(e) => (None, Err(e)),
    };
    let nonce = exchange.share(dev, &what, written, 1)?[0][0];
    let sees = fs::exists(above(&unfinished("probe", nonce))?).unwrap_or(false);
    let see = exchange.share(dev, &what, Ok(vec![sees as u64]), 1)?;
    drop(probe);
    let blind: Vec<usize> = (0..see.len()).filter(|&rank| see[rank][0] == 0).collect();
    if blind.is_empty() {
        return Ok(());
    }
    let hosts = texts(dev, world, "directories", host)?;
    let _ = world.barrier(Tag::new("directories", 0)); // nobody exits before all have read
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    Err(Error::input(format!(
        "{flag} {}: files that {} writes there are not visible to {} (this rank's path is {}). All ranks write to it: \
         use a directory that all hosts share, under the same path",
        dir.display(),
        named(&[0], &hosts),
        named(&blind, &hosts),
        absolute(dir).unwrap_or_default().display(),
    )))
}

fn identity(dir: &Path, host: &str) -> Result<Vec<u64>> {
    let failed = |e| Error::io("inspect", dir, e);
    let path = absolute(dir).map_err(failed)?;
    let there = path.ancestors().enumerate().find(|(_, p)| p.exists());
    let (above, there) = there.unwrap_or((0, Path::new("/")));
    let meta = fs::metadata(there).map_err(failed)?;
    Ok(vec![xxh3_64(host.as_bytes()), meta.dev(), meta.ino(), above as u64])
}

/// An empty file, until it is dropped.
struct Probe(PathBuf);
impl Probe {
    fn write(path: PathBuf) -> Result<Probe> {
        fs::write(&path, "").map_err(|e| Error::io("write", &path, e))?;
        Ok(Probe(path))
    }
}
impl Drop for Probe {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0); // if this fails, the next run in the directory removes it
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Meter;
    use crate::comm::{Axis, MeshSizes, shm};
    use crate::device::cpu::CpuDevice;

    /// The result of every rank, each on its own host with its own path.
    fn verdicts(dirs: &[PathBuf]) -> Vec<Result<()>> {
        let meters: Vec<Meter> = dirs.iter().map(|_| Meter::default()).collect();
        let meshes = shm::threads(MeshSizes::sharded(dirs.len()), &meters).unwrap();
        let rank = |(rank, (mesh, dir)): (usize, (crate::comm::Mesh, &PathBuf))| {
            let dev = CpuDevice::new(Meter::default());
            one("--ckpt-dir", dir, &format!("node{rank}"), &dev, mesh.group(Axis::World))
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> =
                meshes.into_iter().zip(dirs).enumerate().map(|r| scope.spawn(move || rank(r))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
    fn empty(dir: &Path) -> bool {
        fs::read_dir(dir).unwrap().next().is_none()
    }

    #[test]
    fn shared_directories_pass_by_any_path_and_the_probe_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("shared"), dir.path().join("link"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert!(verdicts(&[real.clone(), link.clone(), real.clone()]).iter().all(Result::is_ok));
        // Not created yet: the probe is two levels up.
        assert!(verdicts(&[real.join("a/b"), link.join("a/b")]).iter().all(Result::is_ok));
        assert!(empty(&real));
    }

    #[test]
    fn ranks_that_do_not_see_the_directory_are_named_with_their_host() {
        let dir = tempfile::tempdir().unwrap();
        let [shared, local] = ["shared", "local"].map(|name| dir.path().join(name));
        [&shared, &local].iter().for_each(|dir| fs::create_dir(dir).unwrap());
        for (rank, verdict) in verdicts(&[shared.clone(), local.clone(), shared.clone()]).into_iter().enumerate() {
            let (path, e) = (if rank == 1 { &local } else { &shared }, verdict.unwrap_err());
            assert_eq!(e.exit_status(), 2);
            let says = format!(
                "--ckpt-dir {0}: files that rank 0 on node0 writes there are not visible to rank 1 on node1 (this rank's path is {0})",
                path.display()
            );
            assert!(e.to_string().starts_with(&says), "{e}");
        }
        // The mount point is missing.
        assert!(verdicts(&[shared.clone(), local.join("shared")]).iter().all(Result::is_err));
        assert!(empty(&shared) && empty(&local));
    }

    #[test]
    fn a_probe_that_cannot_be_written_fails_on_all_ranks() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let found = verdicts(&[dir.path().join("file"), dir.path().into()]);
        assert!(found[0].as_ref().unwrap_err().to_string().starts_with("write "), "{found:?}");
        let says = "rank 0 could not inspect --ckpt-dir";
        assert!(found[1].as_ref().unwrap_err().to_string().starts_with(says), "{found:?}");
    }
}
