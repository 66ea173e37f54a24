//! The one file that reads environment variables: launcher variables and the user's directories. Never writes any.
use crate::base::Result;
use std::env::{temp_dir, var_os};
use std::path::PathBuf;

#[cfg(test)]
pub(super) use super::launched::here;
pub use super::launched::{ARENA_FD, HOST, JOB_SECRET, PARENT_PID, RankEnv, SlurmShell, UNKNOWN};

impl RankEnv {
    /// `None` if no launcher started this process.
    pub fn from_env() -> Result<Option<RankEnv>> {
        RankEnv::read(&text)
    }
}

impl SlurmShell {
    /// `None` outside of such a job.
    pub fn from_env() -> Option<SlurmShell> {
        SlurmShell::read(&text)
    }
}

fn text(name: &str) -> Option<String> {
    var_os(name).map(|v| v.to_string_lossy().into_owned())
}

/// Whether NCCL has a host name for this rank (NCCL_HOSTID), so that ranks may share a GPU.
pub fn names_nccl_host() -> bool {
    var_os("NCCL_HOSTID").is_some()
}
/// Whether NCCL_MAX_CTAS is set, which NCCL prefers to a communicator's limit.
pub fn limits_nccl_ctas() -> bool {
    var_os("NCCL_MAX_CTAS").is_some()
}

fn path(name: &str) -> Option<PathBuf> {
    var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from)
}
pub fn home() -> Option<PathBuf> {
    path("HOME")
}
/// Where cargo stores sources of crates: `CARGO_HOME`, else `~/.cargo`.
pub fn cargo_home() -> Option<PathBuf> {
    path("CARGO_HOME").or_else(|| Some(home()?.join(".cargo")))
}
/// Directory for tokenized data sets and choices of algorithms: `FLATSHARD_CACHE_DIR`, else under `XDG_CACHE_HOME`,
/// `~/.cache` or the temporary directory.
pub fn cache_dir() -> PathBuf {
    path("FLATSHARD_CACHE_DIR").unwrap_or_else(|| {
        let base = path("XDG_CACHE_HOME").or_else(|| Some(home()?.join(".cache")));
        base.unwrap_or_else(temp_dir).join("flatshard")
    })
}

/// Whether people want colors on a terminal: unless `NO_COLOR` is set (no-color.org) or the terminal has none.
pub fn wants_color() -> bool {
    path("NO_COLOR").is_none() && var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Directory for files that are deleted with their process.
pub fn scratch_dir() -> PathBuf {
    temp_dir()
}
