//! Ranks as threads of this process: for a program that trains on one machine without a launcher. Never starts a
//! process.
use super::mesh::{Mesh, MeshSizes};
use super::shm::{ShmOptions, threads_with};
use crate::base::{Error, Meter, Result};
use std::panic::resume_unwind;
use std::sync::OnceLock;

/// Runs `f` on every rank of a mesh of `sizes`, a thread for each, with the rank's groups and a meter for its device.
/// Returns what the ranks made, in rank order.
///
/// # Errors
/// That of the rank that failed first. The others' calls into any group end with "rank N failed", so none waits for it.
pub fn run_ranks<T: Send>(sizes: MeshSizes, f: impl Fn(Mesh, Meter) -> Result<T> + Sync) -> Result<Vec<T>> {
    let meters: Vec<Meter> = (0..sizes.world()).map(|_| Meter::default()).collect();
    let meshes = threads_with(sizes, &meters, &ShmOptions::default())?;
    let first = OnceLock::<Error>::new();
    let run = |mesh: Mesh, meter: Meter| {
        let member = mesh.member.clone();
        let failed = |e| {
            // The first error is the cause: it is set before the others hear of it.
            let _ = first.set(e);
            member.abort();
        };
        f(mesh, meter).map_err(failed).ok()
    };
    let made: Option<Vec<T>> = std::thread::scope(|scope| {
        let start = |(mesh, meter)| scope.spawn(|| run(mesh, meter));
        let threads: Vec<_> = meshes.into_iter().zip(meters).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    match (first.into_inner(), made) {
        (None, Some(made)) => Ok(made),
        (error, _) => Err(error.unwrap_or_else(|| Error::op("run_ranks", "a rank ended without a result"))),
    }
}
