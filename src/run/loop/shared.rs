//! That a directory which all ranks write into is one and the same for all of them: a path names another one on a host
//! that does not mount the shared file system there, and half of each checkpoint would be lost. Never leaves anything
//! behind.
use crate::base::{Error, Result};
use crate::ckpt::dirs::unfinished;
use crate::comm::exchange::{Exchange, texts};
use crate::comm::{Collective, Tag};
use crate::device::Device;
use crate::run::r#loop::same::named;
use crate::run::plan::Plan;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// What a rank says of a directory: host, device, inode, and how far above it is the nearest that exists.
const WORDS: usize = 4;

/// An error on all ranks alike, [`Error::Input`], where some of them do not see what rank 0 writes. Every rank calls
/// it; that all of them were given a directory is agreed on before ([`super::same`]).
pub fn check(plan: &Plan, host: &str, dev: &dyn Device, world: &Arc<dyn Collective>) -> Result<()> {
    let c = &plan.settings.checkpoint;
    for (flag, dir) in [("--ckpt-dir", &c.ckpt_dir), ("--save-hf", &c.save_hf)] {
        if let Some(dir) = dir.as_ref().filter(|_| world.size() > 1) {
            one(flag, dir, host, dev, world)?;
        }
    }
    Ok(())
}

fn one(flag: &str, dir: &Path, host: &str, dev: &dyn Device, world: &Arc<dyn Collective>) -> Result<()> {
    let what = format!("look at {flag} {}", dir.display());
    let mut exchange = Exchange::new(dev, world.clone(), "directories", 1 + WORDS)?;
    let ranks = exchange.share(dev, &what, identity(dir, host), WORDS)?;
    if ranks.iter().all(|rank| *rank == ranks[0]) {
        return Ok(()); // of one host, and the same place there
    }
    // Rank 0 puts a file with a random name as near as it can; who sees the directory finds it as far above as rank 0
    // did.
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
    let _ = world.barrier(Tag::new("directories", 0)); // each has read before one leaves
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    Err(Error::input(format!(
        "{flag} {}: what {} writes there is not seen by {} (this rank looked for {}). All ranks write into it: give a \
         directory that all hosts share, by a path that is the same for all",
        dir.display(),
        named(&[0], &hosts),
        named(&blind, &hosts),
        absolute(dir).unwrap_or_default().display(),
    )))
}

fn identity(dir: &Path, host: &str) -> Result<Vec<u64>> {
    let failed = |e| Error::io("look at", dir, e);
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
        let _ = fs::remove_file(&self.0); // the next run that prepares the directory removes it
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Meter;
    use crate::comm::{MeshSizes, shm};
    use crate::device::cpu::CpuDevice;

    /// Every rank on a host of its own, with a path of its own.
    fn verdicts(dirs: &[PathBuf]) -> Vec<Result<()>> {
        let meters: Vec<Meter> = dirs.iter().map(|_| Meter::default()).collect();
        let meshes = shm::threads(MeshSizes::sharded(dirs.len()), &meters).unwrap();
        let rank = |(rank, (mesh, dir)): (usize, (crate::comm::Mesh, &PathBuf))| {
            let dev = CpuDevice::new(Meter::default());
            one("--ckpt-dir", dir, &format!("node{rank}"), &dev, &mesh.world)
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
    fn hosts_that_share_a_directory_find_the_probe_by_any_path_and_it_is_gone_after() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("shared"), dir.path().join("link"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert!(verdicts(&[real.clone(), link.clone(), real.clone()]).iter().all(Result::is_ok));
        // Not made yet: two levels above it.
        assert!(verdicts(&[real.join("a/b"), link.join("a/b")]).iter().all(Result::is_ok));
        assert!(empty(&real));
    }

    #[test]
    fn who_does_not_see_it_is_named_with_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let [shared, local] = ["shared", "local"].map(|name| dir.path().join(name));
        [&shared, &local].iter().for_each(|dir| fs::create_dir(dir).unwrap());
        for (rank, told) in verdicts(&[shared.clone(), local.clone(), shared.clone()]).into_iter().enumerate() {
            let (path, e) = (if rank == 1 { &local } else { &shared }, told.unwrap_err());
            assert_eq!(e.exit_status(), 2);
            let says = format!(
                "--ckpt-dir {0}: what rank 0 on node0 writes there is not seen by rank 1 on node1 (this rank looked for {0})",
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
        let told = verdicts(&[dir.path().join("file"), dir.path().into()]);
        assert!(told[0].as_ref().unwrap_err().to_string().starts_with("write "), "{told:?}");
        let says = "rank 0 could not look at --ckpt-dir";
        assert!(told[1].as_ref().unwrap_err().to_string().starts_with(says), "{told:?}");
    }
}
