//! The one file that reads environment variables: launcher variables and the user's directories. Never writes any.
use crate::base::{Result, open};
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

/// Directory of huggingface_hub: `HF_HOME`, else under `XDG_CACHE_HOME` or `~/.cache`.
fn hub_home() -> Option<PathBuf> {
    let base = || path("XDG_CACHE_HOME").or_else(|| Some(home()?.join(".cache")));
    path("HF_HOME").map(expanded).or_else(|| Some(base()?.join("huggingface")))
}
/// huggingface_hub's cache: `HF_HUB_CACHE`, else `hub` in its directory.
pub fn hub_cache() -> PathBuf {
    let given = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).map(expanded);
    given.unwrap_or_else(|| hub_home().unwrap_or_else(|| temp_dir().join("huggingface")).join("hub"))
}
/// The hub's address, if it is another than usual.
pub fn hub_endpoint() -> Option<String> {
    text("HF_ENDPOINT").filter(|endpoint| !endpoint.is_empty())
}
/// Whether only the hub's cache may be used.
pub fn hub_is_offline() -> bool {
    let given = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().find(|name| path(name).is_some());
    given.is_some_and(is_true)
}
/// The user's token of the hub: `HF_TOKEN`, else the content of `HF_TOKEN_PATH` or of `token` in its directory.
pub fn hub_token() -> Option<String> {
    if is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
        return None;
    }
    let given =
        ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"].into_iter().filter_map(text).find(|text| !text.trim().is_empty());
    given.or_else(|| {
        let file = path("HF_TOKEN_PATH").map(expanded).or_else(|| Some(hub_home()?.join("token")))?;
        String::from_utf8(open::read(&file).ok()?).ok()
    })
}
/// Whether a switch is on, as huggingface_hub reads it.
fn is_true(name: &str) -> bool {
    text(name).is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str()))
}
/// A path whose `~` no shell has replaced.
fn expanded(path: PathBuf) -> PathBuf {
    match (path.strip_prefix("~"), home()) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path,
    }
}

/// Whether people want colors on a terminal: unless `NO_COLOR` is set (no-color.org) or the terminal has none.
pub fn wants_color() -> bool {
    path("NO_COLOR").is_none() && var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Directory for files that are deleted with their process.
pub fn scratch_dir() -> PathBuf {
    temp_dir()
}
