//! Ranks as threads of this process, for programs that train on one machine without a launcher. Never starts a process.
use super::mesh::{Mesh, MeshSizes};
use super::shm::{ShmOptions, threads_with};
use crate::base::{Error, Meter, Result};
use std::panic::resume_unwind;
use std::sync::OnceLock;

/// Runs `f` on every rank of a mesh of `sizes`, each in its own thread, with the rank's groups and a meter for its
/// device. Returns the results in rank order.
///
/// # Errors
/// Returns the error of the rank that failed first. Other ranks' calls into any group end with "rank N failed", so none
/// waits for it.
pub fn run_ranks<T: Send>(sizes: MeshSizes, f: impl Fn(Mesh, Meter) -> Result<T> + Sync) -> Result<Vec<T>> {
    let meters: Vec<Meter> = (0..sizes.world()).map(|_| Meter::default()).collect();
    let meshes = threads_with(sizes, &meters, &ShmOptions::default())?;
    let first = OnceLock::<Error>::new();
    let run = |mesh: Mesh, meter: Meter| {
        let member = mesh.member.clone();
        let failed = |e| {
            // The first error is the cause: it is recorded before other ranks learn of the failure.
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
