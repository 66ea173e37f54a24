//! Models and data sets by name: found in the cache that huggingface_hub uses, or downloaded into it from the hub or a
//! server like it. Never sends the token to another host, never prints it, and never gives a file its name before its
//! size and hash are verified.
//!
//! The protocol is that of huggingface_hub: a listing of the repository at a revision gives the commit and the files, a
//! HEAD request of each file its hash, and ranges of a GET request its content. What a revision is, is asked once.

/// What a user types.
pub mod name;
/// Where the hub and the cache are.
pub mod options;

/// Requests, redirects, retries.
#[cfg(feature = "hub")]
mod client;
/// What can go wrong, in words.
#[cfg(feature = "hub")]
mod fault;
/// The cache's layout.
#[cfg(feature = "hub")]
mod cache;
/// Files of a repository at a commit.
#[cfg(feature = "hub")]
mod listing;
/// Content, in ranges and verified.
#[cfg(feature = "hub")]
mod transfer;
/// Missing files of a repository, several at a time.
#[cfg(feature = "hub")]
mod download;
/// A bar, or lines.
#[cfg(feature = "hub")]
mod progress;
/// The files of a model.
#[cfg(feature = "hub")]
mod model;
/// The card of a data set.
#[cfg_attr(not(feature = "hub"), allow(dead_code))]
mod card;
/// Which files are a split.
#[cfg_attr(not(feature = "hub"), allow(dead_code))]
mod splits;
/// The files of a data set.
#[cfg_attr(not(feature = "hub"), allow(dead_code))]
mod dataset;
/// All of it.
#[cfg(feature = "hub")]
mod repositories;
#[cfg(feature = "hub")]
pub use repositories::HubReader;

/// A build without the feature `hub`.
#[cfg(not(feature = "hub"))]
mod absent;
#[cfg(not(feature = "hub"))]
pub use absent::NoHub as HubReader;

pub use dataset::{VIEW_CARD, is_config, reading_order, split_files};
pub use name::{HubKind, HubName};
pub use options::{HubOptions, HubToken};

use std::collections::BTreeMap;
use std::path::PathBuf;

/// What of a model is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModelNeed {
    /// Everything that it needs to run.
    Weights,
    /// Its config and its tokenizer.
    Config,
    /// Its config alone.
    Shapes,
}

/// What a name stands for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HubFiles {
    /// A file or a directory.
    pub path: PathBuf,
    /// The name that always means these files.
    pub name: HubName,
}

/// The commit of each repository at a revision, by [`HubName::key`].
pub type HubCommits = BTreeMap<String, String>;
