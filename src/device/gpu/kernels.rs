//! The text of every kernel variant, expanded by build.rs: plain PTX, embedded. Never launches anything.

/// A variant of `flatshard_ptx::kernels::variants` as plain PTX with `# line "file"` markers.
#[derive(Clone, Copy)]
pub struct Text {
    pub variant: &'static str,
    /// Its source in `kernels/`.
    pub file: &'static str,
    pub ptx: &'static str,
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The variant of that name.
pub fn text(variant: &str) -> Option<&'static Text> {
    TEXTS.iter().find(|text| text.variant == variant)
}
