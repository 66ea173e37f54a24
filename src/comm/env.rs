//! The one file that reads environment variables: what launchers say about this rank, and where things of the user are.
//! Never writes any.
use crate::base::Result;
use std::env::{temp_dir, var_os};
use std::path::PathBuf;

#[cfg(test)]
pub(super) use super::launched::here;
pub use super::launched::{ARENA_FD, HOST, JOB_SECRET, PARENT_PID, RankEnv, UNKNOWN};

impl RankEnv {
    /// `None` when no launcher started this process.
    pub fn from_env() -> Result<Option<RankEnv>> {
        RankEnv::read(&|name| var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }
}

/// Whether NCCL was given a name for this rank's host, so that ranks may share a GPU.
pub fn names_nccl_host() -> bool {
    var_os("NCCL_HOSTID").is_some()
}

fn path(name: &str) -> Option<PathBuf> {
    var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from)
}
pub fn home() -> Option<PathBuf> {
    path("HOME")
}
/// Where cargo keeps the sources of crates: `CARGO_HOME`, else `~/.cargo`.
pub fn cargo_home() -> Option<PathBuf> {
    path("CARGO_HOME").or_else(|| Some(home()?.join(".cargo")))
}
/// For tokenised corpora: `FLATSHARD_CACHE_DIR`, else below `XDG_CACHE_HOME`, `~/.cache` or the directory for temporary
/// files.
pub fn cache_dir() -> PathBuf {
    path("FLATSHARD_CACHE_DIR").unwrap_or_else(|| {
        let base = path("XDG_CACHE_HOME").or_else(|| Some(home()?.join(".cache")));
        base.unwrap_or_else(temp_dir).join("flatshard")
    })
}

/// For files that go with their process.
pub fn scratch_dir() -> PathBuf {
    temp_dir()
}
