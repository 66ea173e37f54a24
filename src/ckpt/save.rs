//! Writing: into a directory under a temporary name, renamed when everything is on disk. Never gathers a tensor, and never
//! touches a checkpoint that is complete before the new one is.
use super::layout::{Plan, Run, Share, checksum, runs};
use super::state::{self, Checksums, TrainerState, file_checksum, hex};
use super::{CHUNK, Checkpointer, dirs, hf};
use crate::base::{Error, Result};
use crate::device::{Device, View};
use crate::optim::Optimizer;
use crate::store::Store;
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

/// A checkpoint, or an exported model, that is complete and durable.
#[derive(Debug)]
pub struct Saved {
    pub path: PathBuf,
    /// Of all ranks.
    pub bytes: u64,
    pub seconds: f64,
    /// What did not go as asked, without harm to the checkpoint: an old one that could not be removed. On rank 0.
    pub note: Option<String>,
}

impl Checkpointer {
    /// Writes `dir/step-{state.step}`, points `latest` to it and removes what lies behind the `keep` newest. All ranks
    /// return an error when one of them fails; then what was there before is there still, and nothing else.
    pub fn save(
        &mut self,
        dir: &Path,
        keep: usize,
        store: &mut dyn Store,
        optimizer: &mut Optimizer,
        state: &TrainerState,
    ) -> Result<Saved> {
        let name = dirs::name(state.step);
        let state = TrainerState { optimizer_steps: optimizer.steps(), ..state.clone() };
        let mut saved = self.write(self.plan.clone(), &dir.join(&name), store, Some(optimizer), Some(&state))?;
        let after = match self.rank() {
            0 => dirs::point_latest(dir, &name).map(|()| {
                saved.note = dirs::prune(dir, state.step, keep).err().map(|e| format!("an old checkpoint stays: {e}"));
            }),
            _ => Ok(()),
        };
        self.exchange.agree(&*self.dev, "point latest to the checkpoint", after)?;
        Ok(saved)
    }

    /// Writes the model alone, as a Hugging Face directory. `dir` is new, empty or an earlier export (see
    /// [`check_export`]), which is replaced.
    pub fn save_hf(&mut self, dir: &Path, store: &mut dyn Store) -> Result<Saved> {
        let plan = Plan::new(&self.layouts, &[], self.max_file_bytes);
        // Through a symbolic link, the directory that it names is replaced, and not the link.
        let dir = fs::canonicalize(dir).unwrap_or(dir.to_path_buf());
        self.write(Arc::new(plan), &dir, store, None, None)
    }

    /// The directory `target` with everything in `plan`; with `state`, a checkpoint.
    fn write(
        &mut self,
        plan: Arc<Plan>,
        target: &Path,
        store: &mut dyn Store,
        optimizer: Option<&mut Optimizer>,
        state: Option<&TrainerState>,
    ) -> Result<Saved> {
        let started = Instant::now();
        let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let unfinished = |nonce: u64| dirs::parent(target).join(dirs::unfinished(&name, nonce));

        // 1. Rank 0 finds out whether the target may be written and whether it fits.
        let nonce =
            SystemTime::UNIX_EPOCH.elapsed().map_or(0, |t| t.as_nanos() as u64) ^ (std::process::id() as u64) << 32;
        let prepared = match self.rank() {
            0 => state
                .map_or_else(|| check_export(target), |_| Ok(()))
                .and_then(|()| dirs::sweep_beside(target))
                .and_then(|()| create(&unfinished(nonce), &plan)),
            _ => Ok(()),
        };
        let what = "make room for the checkpoint";
        let nonces = self.exchange.share(&*self.dev, what, prepared.map(|()| vec![nonce]), 1)?;
        let dir = unfinished(nonces[0][0]);

        // 2. Every rank writes what it owns. 3. Rank 0 adds the small files and the name.
        let result = self.write_tensors(&plan, &dir, store, optimizer).and_then(|sums| {
            let published = match self.rank() {
                0 => self.finish(&plan, &dir, target, &sums, state),
                _ => Ok(()),
            };
            self.exchange.agree(&*self.dev, "complete the checkpoint", published)
        });
        if result.is_err() && self.rank() == 0 {
            // Already failing: what cannot be removed now is removed by the next `prepare`.
            let _ = fs::remove_dir_all(&dir);
        }
        result?;
        let seconds = started.elapsed().as_secs_f64();
        Ok(Saved { path: target.to_path_buf(), bytes: plan.bytes(), seconds, note: None })
    }

    /// This rank's runs of all tensors, synced; returns the checksum of every tensor over all ranks.
    fn write_tensors(
        &mut self,
        plan: &Plan,
        dir: &Path,
        store: &mut dyn Store,
        optimizer: Option<&mut Optimizer>,
    ) -> Result<Vec<u64>> {
        let (share, tensors) = (self.share(store), plan.tensors.list.len());
        let sums = Writer::open(&*self.dev, plan, dir).and_then(|writer| writer.write_all(store, share, optimizer));
        let all = self.exchange.share(&*self.dev, "write its part of the checkpoint", sums, tensors)?;
        Ok(super::total(&all, tensors))
    }

    /// Rank 0: the small files, the state last; then the directory's name.
    fn finish(&self, plan: &Plan, dir: &Path, target: &Path, sums: &[u64], state: Option<&TrainerState>) -> Result<()> {
        let mut checksums = Checksums::default();
        let config = (hf::FILE.to_string(), hf::config(&self.spec));
        for (name, text) in plan.indices.iter().chain([&config]) {
            dirs::write_synced(&dir.join(name), text.as_bytes())?;
            checksums.files.insert(name.clone(), file_checksum(text.as_bytes()));
        }
        if let Some(state) = state {
            let tensors = plan.tensors.list.iter().zip(sums);
            checksums.tensors.extend(tensors.map(|(t, sum)| (t.name.clone(), hex(*sum))));
            dirs::write_synced(&dir.join(state::FILE), state::to_text(state, &checksums).as_bytes())?;
        }
        dirs::sync_dir(dir)?;
        dirs::publish(dir, target)
    }
}

/// Whether `--save-hf dir` may be written: new, empty, or holding nothing but an earlier export.
pub fn check_export(dir: &Path) -> Result<()> {
    let refuse = |what: String| {
        Error::input(format!(
            "--save-hf {}: {what}; give a new or empty directory: nothing is overwritten",
            dir.display()
        ))
    };
    let list = match fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        list => list.map_err(|e| refuse(format!("cannot be listed ({e})")))?,
    };
    let names = list.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names: Vec<String> = names.collect::<std::io::Result<_>>().map_err(|e| refuse(e.to_string()))?;
    let ours = |name: &String| {
        name == hf::FILE
            || name.starts_with("model") && (name.ends_with(".safetensors") || name.ends_with(".index.json"))
    };
    match names.iter().find(|name| !ours(name)) {
        Some(other) => Err(refuse(format!("holds {other}, which is not part of an earlier export"))),
        None if names.is_empty() || names.iter().any(|n| n == hf::FILE) => Ok(()),
        None => Err(refuse("is not an earlier export: it has no config.json".into())),
    }
}

/// The directory with every tensor file at its full length: a full disk is found here, before anything is written.
fn create(dir: &Path, plan: &Plan) -> Result<()> {
    let parent = dirs::parent(dir);
    if !parent.exists() {
        fs::create_dir_all(parent).map_err(|e| Error::io("make", parent, e))?;
        dirs::sync_dir(dirs::parent(parent))?;
    }
    if free(parent).is_some_and(|free| free < plan.bytes()) {
        return Err(no_room(parent, plan, Errno::NOSPC.into()));
    }
    let make = || {
        fs::create_dir(dir).map_err(|e| Error::io("make", dir, e))?;
        for plan_file in &plan.files {
            let path = dir.join(&plan_file.name);
            let failed = |e| Error::io("write", &path, e);
            let file = OpenOptions::new().write(true).create_new(true).open(&path).map_err(failed)?;
            match fallocate(&file, FallocateFlags::empty(), 0, plan_file.bytes) {
                // A file system that cannot promise space: a full disk is found while writing.
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(plan_file.bytes).map_err(failed)?,
                Err(e) => return Err(no_room(&path, plan, e.into())),
                Ok(()) => {}
            }
            file.write_all_at(&plan_file.header, 0).map_err(failed)?;
            file.sync_all().map_err(failed)?;
        }
        Ok(())
    };
    make().inspect_err(|_| drop(fs::remove_dir_all(dir)))
}

/// Bytes that this user may still write on the disk of `dir`.
fn free(dir: &Path) -> Option<u64> {
    statvfs(dir).ok().map(|s| s.f_bavail.saturating_mul(s.f_frsize))
}

fn no_room(path: &Path, plan: &Plan, cause: std::io::Error) -> Error {
    let free = free(dirs::parent(path)).map_or("an unknown number".into(), |free| free.to_string());
    let text = format!(
        "{cause}: a checkpoint of this model needs {} bytes and {free} are free here; free some, keep fewer (--keep), or \
         save elsewhere (--ckpt-dir). Complete checkpoints are untouched",
        plan.bytes()
    );
    Error::io("reserve", path, std::io::Error::new(cause.kind(), text))
}

/// One rank's part of the files.
struct Writer<'a> {
    dev: &'a dyn Device,
    plan: &'a Plan,
    /// With the path, and whether this rank wrote into it.
    files: Vec<(PathBuf, File, bool)>,
    chunk: Vec<u8>,
    sums: Vec<u64>,
}

impl<'a> Writer<'a> {
    fn open(dev: &'a dyn Device, plan: &'a Plan, dir: &Path) -> Result<Writer<'a>> {
        let open = |name: &String| {
            let path = dir.join(name);
            match OpenOptions::new().write(true).open(&path) {
                Ok(file) => Ok((path, file, false)),
                Err(e) if e.kind() == ErrorKind::NotFound => Err(Error::Run(format!(
                    "{} is not there, although rank 0 made it: the directory of checkpoints must be on a file system that \
                     all hosts share",
                    path.display()
                ))),
                Err(e) => Err(Error::io("open", path, e)),
            }
        };
        let files = plan.files.iter().map(|f| open(&f.name)).collect::<Result<_>>()?;
        Ok(Writer { dev, plan, files, chunk: vec![0; CHUNK], sums: vec![0; plan.tensors.list.len()] })
    }

    /// Every run of this rank's share, then syncs. Returns this rank's checksums.
    fn write_all(
        mut self,
        store: &mut dyn Store,
        share: Share,
        mut optimizer: Option<&mut Optimizer>,
    ) -> Result<Vec<u64>> {
        store.for_each_piece(&mut |piece| {
            for run in runs(piece.layout, piece.start, piece.master.len(), share) {
                self.write(0, &run, piece.master.as_view().slice(run.range.clone()))?;
                let Some(optimizer) = optimizer.as_mut().filter(|_| piece.grad.is_some()) else { continue };
                for (moment, (_, state)) in optimizer.state(piece.unit).enumerate() {
                    self.write(1 + moment, &run, state.as_view().slice(run.range.clone()))?;
                }
            }
            Ok(())
        })?;
        for (path, file, _) in self.files.iter().filter(|(_, _, wrote)| *wrote) {
            file.sync_all().map_err(|e| Error::io("sync", path, e))?;
        }
        Ok(self.sums)
    }

    /// `data`: the f32 elements of `run`.
    fn write(&mut self, group: usize, run: &Run, data: View) -> Result<()> {
        let index = self.plan.tensors.find(group, &run.segment.name)?;
        let tensor = &self.plan.tensors.list[index];
        let (path, file, wrote) = &mut self.files[tensor.file];
        *wrote = true;
        for from in (0..data.len()).step_by(CHUNK / 4) {
            let part = data.slice(from..data.len().min(from + CHUNK / 4));
            let bytes = &mut self.chunk[..part.bytes()];
            self.dev.download(part, bytes)?;
            let at = run.at + from;
            self.sums[index] = self.sums[index].wrapping_add(checksum(bytes, at));
            file.write_all_at(bytes, tensor.offset + 4 * at as u64).map_err(|e| Error::io("write", &*path, e))?;
        }
        Ok(())
    }
}
