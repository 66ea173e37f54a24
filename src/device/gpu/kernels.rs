//! Every kernel variant of this build: its name, its target, and its text, expanded on demand. Never launches anything.
use flatshard_base::{Error, Result};
use flatshard_ptx::kernels::Variant;

/// What build.rs found in a variant of `flatshard_ptx::kernels::variants`.
#[derive(Clone, Copy)]
pub struct Text {
    pub variant: &'static str,
    /// "sm_80", "sm_90a".
    pub target: &'static str,
    /// The variant's entry points.
    pub entries: &'static [&'static str],
}

/// In the order of `flatshard_ptx::kernels::variants`.
pub const TEXTS: &[Text] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

impl Text {
    /// Its source file in `kernels/`, and plain PTX with `# line "file"` markers.
    pub fn ptx(&self) -> Result<(&'static str, String)> {
        let failed = |what: String| Error::op("expand", format!("kernel variant {}: {what}", self.variant));
        let variant = Variant::by_name(self.variant).ok_or_else(|| failed("is not in this build".into()))?;
        let text = variant.expand().map_err(|e| failed(format!("kernels/{e}")))?;
        Ok((variant.file, text))
    }
}

/// Index of the named variant in [`TEXTS`].
pub fn place(variant: &str) -> Option<usize> {
    TEXTS.iter().position(|text| text.variant == variant)
}
