//! Saving: writes into a directory with a temporary name, and renames it when everything is on disk. Never gathers a
//! tensor, and never touches a complete checkpoint before the new one is complete.
//!
//! Every kind of save has three stages: rank 0 makes *room*; every rank *writes* what it owns; rank 0 *publishes*. In
//! an async save, the second and third stage each run on a thread, and the ranks agree in between.
use super::async_save::{AsyncSave, SaveJob};
use super::checkpointer::Checkpointer;
use super::checksum::total;
use super::disk::{self, CHUNK};
use super::layout::FilePlan;
use super::publish::{Publication, SavedCheckpoint};
use super::room::{create, mark};
use super::state::TrainerState;
use super::writer::{ShardWriter, each_run};
use super::{dirs, hf};
use crate::base::timeline::Lane;
use crate::base::{Error, Result};
use crate::optim::{Converted, Moments, Optimizer};
use crate::store::Store;
use safetensors::Dtype;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

impl Checkpointer {
    /// Writes `dir/step-{state.step}`, points `latest` to it and removes all but the newest `keep`. If any rank fails,
    /// all return an error, and the directory is as before.
    pub fn save(
        &mut self,
        dir: &Path,
        keep: usize,
        store: &mut dyn Store,
        optimizer: &mut Optimizer,
        state: &TrainerState,
    ) -> Result<SavedCheckpoint> {
        self.settle()?;
        let publication = self.room_for_step(dir, keep, optimizer, state)?;
        self.write(publication, store, Some(optimizer))
    }

    /// Like [`Checkpointer::save`], but returns once this rank's part is copied: the copy is written in the background.
    /// Waits for a save still in flight first. Call [`Checkpointer::ended`], [`Checkpointer::advance`] and
    /// [`Checkpointer::published`] after each step, and [`Checkpointer::settle`] at the end.
    pub fn save_async(
        &mut self,
        dir: &Path,
        keep: usize,
        store: &mut dyn Store,
        optimizer: &mut Optimizer,
        state: &TrainerState,
    ) -> Result<Option<SavedCheckpoint>> {
        let earlier = self.settle()?;
        let publication = self.room_for_step(dir, keep, optimizer, state)?;
        let share = self.share(store);
        let mut snapshot = std::mem::take(&mut self.snapshot);
        let job = snapshot.take(&*self.dev, &publication.plan, share, store, Some(optimizer)).and_then(|()| {
            let Publication { disk, plan, dir, .. } = &publication;
            SaveJob::start(snapshot, disk.clone(), plan.clone(), dir.clone(), self.timeline.clone())
        });
        let job = self.exchange.agree(&*self.dev, "copy its part of the checkpoint", job);
        self.background =
            AsyncSave::Writing(job.inspect_err(|_| publication.abandon(self.rank()))?, Box::new(publication));
        Ok(earlier)
    }

    /// Whether this rank has finished writing its part of an async save, successfully or not. When every rank has, call
    /// [`Checkpointer::advance`].
    pub fn ended(&self) -> bool {
        matches!(&self.background, AsyncSave::Writing(job, _) if job.ended())
    }

    /// Collective; called when every part is written. Rank 0 starts to publish. If any rank failed to write, all return
    /// its error.
    pub fn advance(&mut self) -> Result<()> {
        let (job, publication) = match std::mem::take(&mut self.background) {
            AsyncSave::Writing(job, publication) => (job, publication),
            other => {
                self.background = other;
                return Ok(());
            }
        };
        let tensors = publication.plan.tensors.list.len();
        let (snapshot, sums) = job.join();
        self.snapshot = snapshot;
        let all = self.exchange.share(&*self.dev, WRITE, sums, tensors);
        let sums = total(&all.inspect_err(|_| publication.abandon(self.rank()))?, tensors);
        let timeline = self.timeline.clone();
        let publish = move || timeline.host(Lane::Checkpoint, "publish", None, || publication.publish(&sums));
        let thread = (self.rank() == 0).then(|| std::thread::spawn(publish));
        self.background = AsyncSave::Publishing(thread);
        Ok(())
    }

    /// The async save that became complete since the last call; on rank 0, once.
    pub fn published(&mut self) -> Result<Option<SavedCheckpoint>> {
        match &mut self.background {
            AsyncSave::Publishing(thread) => {
                thread.take_if(|t| t.is_finished()).map(|t| t.join().unwrap_or_else(|_| Err(lost()))).transpose()
            }
            _ => Ok(None),
        }
    }

    /// Waits until no save is in flight. On rank 0, returns the save that [`Checkpointer::published`] has not.
    pub fn settle(&mut self) -> Result<Option<SavedCheckpoint>> {
        if matches!(self.background, AsyncSave::Nothing) {
            return Ok(None);
        }
        self.advance()?;
        let AsyncSave::Publishing(thread) = std::mem::take(&mut self.background) else { return Ok(None) };
        let saved = thread.map(|t| t.join().unwrap_or_else(|_| Err(lost()))).transpose();
        self.exchange.agree(&*self.dev, PUBLISH, saved)
    }

    /// Writes only the model, in `dtype` (F32, BF16), as a Hugging Face directory. See [`super::check_export`] for what
    /// `dir` may be.
    pub fn save_hf(&mut self, dir: &Path, dtype: Dtype, store: &mut dyn Store) -> Result<SavedCheckpoint> {
        let carried = self.tower.as_ref().map(|tower| &tower.carried);
        let plan = FilePlan::new(&self.layouts, &Moments::NONE, dtype, self.max_file_bytes, carried);
        // For a symbolic link, replace the directory it points to, not the link.
        let dir = fs::canonicalize(dir).unwrap_or(dir.to_path_buf());
        let publication = self.room(Arc::new(plan), dir, dtype, None)?;
        self.write(publication, store, None)
    }

    fn room_for_step(
        &mut self,
        dir: &Path,
        keep: usize,
        optimizer: &Optimizer,
        state: &TrainerState,
    ) -> Result<Publication> {
        let state =
            TrainerState { optimizer_steps: optimizer.steps(), run: Some(self.exports.run.clone()), ..state.clone() };
        let target = dir.join(dirs::name(state.step));
        self.room(self.plan.clone(), target, Dtype::F32, Some((state, keep)))
    }

    /// Rank 0 checks that `target` may be written and fits, and creates the files under a temporary name.
    fn room(
        &mut self,
        plan: Arc<FilePlan>,
        target: PathBuf,
        dtype: Dtype,
        state: Option<(TrainerState, usize)>,
    ) -> Result<Publication> {
        let started = Instant::now();
        let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let unfinished = |nonce: u64| disk::parent(&target).join(dirs::unfinished(&name, nonce));
        let nonce = dirs::nonce();
        let exports = state.is_none().then(|| self.exports.clone());
        let mut held = None;
        let prepared = match self.rank() {
            0 => exports
                .as_ref()
                .map_or(Ok(()), |exports| exports.directory(&target).map(drop))
                .and_then(|()| dirs::sweep_unfinished(&target))
                .and_then(|()| create(&self.disk, &unfinished(nonce), &plan))
                .and_then(|()| dirs::hold(&unfinished(nonce)))
                .map(|file| held = Some(file)),
            _ => Ok(()),
        };
        let what = "make room for the checkpoint";
        let nonces = self.exchange.share(&*self.dev, what, prepared.map(|()| vec![nonce]), 1)?;
        let dir = unfinished(nonces[0][0]);
        let mut small = Vec::new();
        if self.rank() == 0 {
            small.extend(plan.indices.iter().map(|(name, text)| (name.clone(), text.clone().into_bytes())));
            small.push((hf::FILE.to_string(), self.companions.config(&self.spec, dtype).into_bytes()));
            small.extend(self.companions.files.iter().cloned());
            small.extend(state.is_none().then(|| mark(&self.exports.run)));
        }
        let (disk, tower) = (self.disk.clone(), self.tower.clone());
        Ok(Publication { disk, plan, tower, dir, target, small, state, exports, started, _held: held })
    }

    /// The second and third stage of a synchronous save.
    fn write(
        &mut self,
        publication: Publication,
        store: &mut dyn Store,
        optimizer: Option<&mut Optimizer>,
    ) -> Result<SavedCheckpoint> {
        let tensors = publication.plan.tensors.list.len();
        let (path, bytes, started) = (publication.target.clone(), publication.plan.bytes(), publication.started);
        let step = publication.state.as_ref().map(|(state, _)| state.step);
        let sums = self.write_part(&publication, store, optimizer);
        let all = self.exchange.share(&*self.dev, WRITE, sums, tensors);
        let sums = total(&all.inspect_err(|_| publication.abandon(self.rank()))?, tensors);
        let published = (self.rank() == 0).then(|| publication.publish(&sums)).transpose();
        let saved = self.exchange.agree(&*self.dev, PUBLISH, published)?;
        Ok(saved.unwrap_or_else(|| SavedCheckpoint {
            path,
            step,
            bytes,
            seconds: started.elapsed().as_secs_f64(),
            evaluation: None,
            note: None,
        }))
    }

    /// Writes and syncs this rank's runs of all tensors; returns its part of their checksums.
    fn write_part(
        &self,
        publication: &Publication,
        store: &mut dyn Store,
        optimizer: Option<&mut Optimizer>,
    ) -> Result<Vec<u64>> {
        let share = self.share(store);
        let mut writer = ShardWriter::open(&publication.disk, publication.plan.clone(), &publication.dir)?;
        let (mut chunk, mut converted) = (vec![0f32; CHUNK / 4], Converted::default());
        let tensors = &publication.plan.tensors;
        each_run(&publication.plan, share, store, optimizer, &mut |index, at, data| {
            for from in (0..data.len()).step_by(CHUNK / 4) {
                let values = &mut chunk[..data.len().min(from + CHUNK / 4) - from];
                data.read(&*self.dev, from, &mut converted, values)?;
                if let Some(merging) = &self.merging {
                    merging.add(tensors.part(index), at + from, values)?;
                }
                writer.put(index, at + from, values)?;
            }
            Ok(())
        })?;
        if let Some(merging) = &self.merging {
            merging.each_packed(&*self.dev, share, store, &mut |segment, at, values| {
                writer.put(tensors.find(0, &segment.name)?, at, values)
            })?;
        }
        writer.finish()
    }
}

const WRITE: &str = "write its part of the checkpoint";
const PUBLISH: &str = "complete the checkpoint";

fn lost() -> Error {
    Error::op("async-save", "the publishing thread panicked")
}
