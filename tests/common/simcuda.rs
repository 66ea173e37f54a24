//! The emulated CUDA driver (`ptx/driver`), for programs that load CUDA by name. Cargo builds it next to the test
//! binaries.
use super::programs::unlaunched;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use tempfile::TempDir;

fn library() -> PathBuf {
    let built = std::env::current_exe().unwrap().with_file_name("libflatshard_simcuda.so");
    assert!(built.exists(), "{} is not there: it is a dev-dependency", built.display());
    built
}

/// A directory for LD_LIBRARY_PATH, with links to one file, which the loader treats as one library. cudarc tries the
/// names without a version first; with only `libcublasLt.so.12` here, it would load a real `.so.13` from elsewhere.
pub fn libraries() -> &'static Path {
    static MADE: OnceLock<TempDir> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        for name in ["libcuda.so", "libcublasLt.so", "libnccl.so.2", "libnvidia-ml.so.1"] {
            symlink(library(), dir.path().join(name)).unwrap();
        }
        dir
    });
    made.path()
}

/// A program on that driver: `machine` as of ptx/driver/src/settings.rs, "seed=3,arch=90".
pub fn run(program: &str, machine: &str) -> Command {
    let mut command = unlaunched(program);
    command.env_remove("CUDA_VISIBLE_DEVICES").env_remove("CUDA_LAUNCH_BLOCKING");
    command.env("FLATSHARD_SIMCUDA", machine).env("LD_LIBRARY_PATH", libraries());
    command
}
