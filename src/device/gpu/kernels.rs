//! Every kernel variant of this build: its name, its target, and its text. Never launches anything.
use flatshard_base::{Error, Result};
use std::ops::Range;
use std::sync::LazyLock;

/// What build.rs found in a variant of `flatshard_ptx::kernels::variants`.
pub struct Text {
    pub variant: &'static str,
    /// Its source in `kernels/`.
    pub file: &'static str,
    /// "sm_80", "sm_90a".
    pub target: &'static str,
    /// The variant's entry points.
    pub entries: &'static [&'static str],
    /// Its bytes of all texts.
    within: Range<usize>,
}

/// In the order of `flatshard_ptx::kernels::variants`.
pub static TEXTS: &[Text] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// All texts, one after the other, decompressed (30 ms) when the first of them is read. Expanding them at every start
/// took more of the time of a short run than its steps.
static ALL: LazyLock<std::result::Result<String, String>> = LazyLock::new(|| {
    let len = TEXTS.last().map_or(0, |text| text.within.end);
    let bytes = zstd::bulk::decompress(include_bytes!(concat!(env!("OUT_DIR"), "/kernels.zst")), len);
    String::from_utf8(bytes.map_err(|e| e.to_string())?).map_err(|e| e.to_string())
});

impl Text {
    /// PTX with `# line "file"` markers.
    pub fn ptx(&self) -> Result<&'static str> {
        let all = ALL.as_ref().map_err(|e| Error::op("decompress", format!("the kernels of this program: {e}")))?;
        Ok(&all[self.within.clone()])
    }
}

/// Index of the named variant in [`TEXTS`].
pub fn place(variant: &str) -> Option<usize> {
    TEXTS.iter().position(|text| text.variant == variant)
}
