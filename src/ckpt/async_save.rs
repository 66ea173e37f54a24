//! Async checkpoints: copies what this rank owns and writes the copy on a thread. Never touches the store after the
//! copy, and never holds more than one copy.
use super::disk::{CHUNK, Disk};
use super::elements::widen_device;
use super::layout::{FilePlan, Share};
use super::publish::{Publication, SavedCheckpoint};
use super::writer::{ShardWriter, each_run};
use crate::base::meter::Lease;
use crate::base::timeline::{Lane, Timeline};
use crate::base::{Category, DType, Error, Result};
use crate::device::Device;
use crate::optim::Optimizer;
use crate::store::Store;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

/// What a rank owns, copied between two steps.
#[derive(Default)]
pub(super) struct Snapshot {
    bytes: Vec<u8>,
    /// (tensor, first element in this rank's part of it, bytes, dtype), in order.
    runs: Vec<(usize, usize, usize, DType)>,
    lease: Option<Lease>,
}

impl Snapshot {
    /// Replaces the previous contents. The memory is reused from save to save.
    pub fn take(
        &mut self,
        dev: &dyn Device,
        plan: &FilePlan,
        share: Share,
        store: &mut dyn Store,
        mut optimizer: Option<&mut Optimizer>,
    ) -> Result<()> {
        if self.lease.is_none() {
            let mut needed = 0;
            each_run(plan, share, store, optimizer.as_deref_mut(), &mut |_, _, data| {
                needed += data.bytes();
                Ok(())
            })?;
            self.bytes.try_reserve_exact(needed).map_err(|e| {
                Error::op(
                    "async-save",
                    format!(
                        "cannot allocate {needed} bytes for the copy ({e}): set `async_save: \
                                                 false`"
                    ),
                )
            })?;
            self.bytes.resize(needed, 0);
            self.lease = Some(dev.meter().lease(Category::Other, needed));
        }
        let (runs, mut rest) = (&mut self.runs, &mut self.bytes[..]);
        runs.clear();
        each_run(plan, share, store, optimizer, &mut |index, at, data| {
            let Some((mine, after)) = std::mem::take(&mut rest).split_at_mut_checked(data.bytes()) else {
                return Err(Error::op("async-save", "the store has grown since the last save"));
            };
            rest = after;
            runs.push((index, at, data.bytes(), data.dtype()));
            dev.download(data, mine)
        })
    }

    fn write(&self, mut writer: ShardWriter) -> Result<Vec<u64>> {
        let mut rest = &self.bytes[..];
        let mut values = vec![0f32; CHUNK / 4];
        for &(index, at, len, dtype) in &self.runs {
            let (mine, after) = rest.split_at(len);
            rest = after;
            for (i, chunk) in mine.chunks(CHUNK / 4 * dtype.size()).enumerate() {
                let values = &mut values[..chunk.len() / dtype.size()];
                widen_device(chunk, dtype, values);
                writer.put(index, at + i * CHUNK / 4, values)?;
            }
        }
        writer.finish()
    }
}

/// The thread that writes one snapshot, and returns it.
pub(super) struct SaveJob(JoinHandle<(Snapshot, Result<Vec<u64>>)>);

impl SaveJob {
    pub fn start(
        snapshot: Snapshot,
        disk: Disk,
        plan: Arc<FilePlan>,
        dir: PathBuf,
        timeline: Timeline,
    ) -> Result<SaveJob> {
        let write = move || {
            let write = || ShardWriter::open(&disk, plan, &dir).and_then(|writer| snapshot.write(writer));
            let sums = timeline.host(Lane::Checkpoint, "write", None, write);
            (snapshot, sums)
        };
        let thread = std::thread::Builder::new().name("save".into()).spawn(write);
        thread.map(SaveJob).map_err(|e| Error::Run(format!("cannot start the checkpoint thread: {e}")))
    }
    pub fn ended(&self) -> bool {
        self.0.is_finished()
    }
    /// Waits until it ends.
    pub fn join(self) -> (Snapshot, Result<Vec<u64>>) {
        let lost = |_| (Snapshot::default(), Err(Error::op("async-save", "the checkpoint thread panicked")));
        self.0.join().unwrap_or_else(lost)
    }
}

/// The state of the save in the background, the same on every rank.
#[derive(Default)]
pub(super) enum AsyncSave {
    #[default]
    Nothing,
    Writing(SaveJob, Box<Publication>),
    /// Rank 0 keeps the thread until its result is reported; the other ranks are done.
    Publishing(Option<JoinHandle<Result<SavedCheckpoint>>>),
}
