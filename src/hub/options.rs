//! Where the hub and the cache are, as values. Never reads the environment: `comm/env.rs` does.
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct HubOptions {
    /// [`HubOptions::ENDPOINT`], or a mirror's address.
    pub endpoint: String,
    pub token: Option<HubToken>,
    /// huggingface_hub's cache of repositories.
    pub cache: PathBuf,
    /// Directory for views of data sets: links to the files of a split.
    pub views: PathBuf,
    /// Works from the cache alone.
    pub offline: bool,
    /// Shows no progress.
    pub quiet: bool,
    /// The wait before the first retry; each further one is twice as long.
    pub pause: Duration,
    /// Bytes of a request. Larger files come in several at a time.
    pub range: u64,
}

impl HubOptions {
    pub const ENDPOINT: &str = concat!("https:/", "/huggingface.co");
    pub const PAUSE: Duration = Duration::from_millis(500);
    pub const RANGE: u64 = 8 << 20;
}

/// A secret, which no format shows.
#[derive(Clone, PartialEq, Eq)]
pub struct HubToken(String);

impl HubToken {
    /// None: it is empty.
    pub fn new(text: &str) -> Option<HubToken> {
        // Text editors and shells end files and variables with a newline.
        let text = text.replace(['\r', '\n'], "").trim().to_string();
        (!text.is_empty()).then_some(HubToken(text))
    }
    /// For the header of a request only.
    #[cfg(feature = "hub")]
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }
    /// `text` without it.
    #[cfg(feature = "hub")]
    pub(super) fn hide(&self, text: &str) -> String {
        text.replace(&self.0, "[token]")
    }
    /// Whether a header can hold it.
    #[cfg(feature = "hub")]
    pub(super) fn is_plain(&self) -> bool {
        self.0.bytes().all(|b| b.is_ascii_graphic())
    }
}

impl fmt::Debug for HubToken {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("HubToken([hidden])")
    }
}
