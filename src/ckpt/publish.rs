//! The last stage of a save: carried tensors, small files, checksums, then the final name. Never touches a complete
//! checkpoint before the new one is complete.
use super::companions::template;
use super::dirs;
use super::disk::{self, Disk};
use super::evaluations::Evaluations;
use super::layout::FilePlan;
use super::room::Exports;
use super::state::{self, Checksums, TrainerState, file_checksum, hex};
use super::tower::Tower;
use crate::base::Result;
use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// A complete and durable checkpoint or exported model.
#[derive(Debug)]
pub struct SavedCheckpoint {
    pub path: PathBuf,
    /// The step; None for an export.
    pub step: Option<u64>,
    /// Written by all ranks.
    pub bytes: u64,
    /// From the start of the save until it was complete.
    pub seconds: f64,
    /// The evaluation loss after that step, if evaluations are tracked, and whether it is the lowest so far.
    pub evaluation: Option<(Option<f64>, bool)>,
    /// A problem that does not harm the checkpoint, such as an old one that could not be removed. Rank 0 only.
    pub note: Option<String>,
}

/// The third stage, done by rank 0 when all tensors are on disk.
pub(super) struct Publication {
    pub disk: Disk,
    pub plan: Arc<FilePlan>,
    pub tower: Option<Tower>,
    /// The directory with the tensors.
    pub dir: PathBuf,
    /// The final name of `dir`.
    pub target: PathBuf,
    /// The files next to the tensors; rank 0 only.
    pub small: Vec<(String, Vec<u8>)>,
    /// For a checkpoint: its state, and the number of checkpoints to keep.
    pub state: Option<(TrainerState, usize)>,
    /// For an export: which places it may take.
    pub exports: Option<Exports>,
    pub started: Instant,
    /// Keeps other runs from removing `dir`; rank 0 only.
    pub _held: Option<File>,
}

impl Publication {
    /// Writes the small files, the state last, then renames the directory and updates `best` and `latest`. A resume
    /// starts from what `latest` names, so it repeats whatever a crash prevented.
    pub fn publish(self, sums: &[u64]) -> Result<SavedCheckpoint> {
        let (bytes, started) = (self.plan.bytes(), self.started);
        let state = self.state.as_ref().map(|(state, _)| state);
        let (step, evaluation) = (state.map(|state| state.step), state.and_then(evaluation));
        let (path, note) = self.try_publish(sums).inspect_err(|_| self.abandon(0))?;
        Ok(SavedCheckpoint { path, step, bytes, seconds: started.elapsed().as_secs_f64(), evaluation, note })
    }

    fn try_publish(&self, sums: &[u64]) -> Result<(PathBuf, Option<String>)> {
        let (disk, mut checksums) = (&self.disk, Checksums::default());
        if let Some(tower) = self.tower.as_ref().filter(|_| !self.plan.carried.is_empty()) {
            checksums.tensors.extend(tower.copy(disk, &self.dir, &self.plan)?);
        }
        for (name, content) in &self.small {
            if name.contains('/') {
                disk.make_dirs(disk::parent(&self.dir.join(name)))?;
            }
            disk.write(&self.dir.join(name), content)?;
            checksums.files.insert(name.clone(), file_checksum(content));
        }
        let folder = self.dir.join(template::FOLDER);
        if folder.is_dir() {
            disk.sync_dir(&folder)?;
        }
        let Some((state, keep)) = &self.state else {
            disk.sync_dir(&self.dir)?;
            let here = Ok((self.target.clone(), None));
            let (target, note) = self.exports.as_ref().map_or(here, |exports| exports.directory(&self.target))?;
            dirs::publish(disk, &self.dir, &target)?;
            return Ok((target, note));
        };
        let headers = self.plan.files.iter().map(|file| (file.name.clone(), file_checksum(&file.header)));
        checksums.headers.extend(headers);
        let tensors = self.plan.tensors.list.iter().zip(sums);
        checksums.tensors.extend(tensors.map(|(t, sum)| (t.name.clone(), hex(*sum))));
        disk.write(&self.dir.join(state::FILE), state::to_text(state, &checksums).as_bytes())?;
        disk.sync_dir(&self.dir)?;
        dirs::publish(disk, &self.dir, &self.target)?;
        let all = disk::parent(&self.target);
        if let Some(best) = state.evaluations.as_ref().and_then(Evaluations::best_checkpoint) {
            dirs::point_best(disk, all, best)?;
        }
        dirs::point(disk, all, dirs::LATEST, state.step)?;
        let kept = dirs::prune(all, state.step, *keep).err();
        Ok((self.target.clone(), kept.map(|e| format!("an old checkpoint could not be removed: {e}"))))
    }

    /// Cleans up after a failure; what cannot be removed now is removed by the next `prepare`.
    pub fn abandon(&self, rank: usize) {
        if rank == 0 {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

/// For [`SavedCheckpoint::evaluation`].
fn evaluation(state: &TrainerState) -> Option<(Option<f64>, bool)> {
    let newest = state.evaluations.as_ref().filter(|evaluations| evaluations.step == state.step)?;
    Some((newest.loss, newest.newest_is_best()))
}
