//! A variant of a kernel: a source of `kernels/`, embedded by build.rs, and its constants. The list of variants is in
//! catalogue.rs.
use crate::expand::{ExpandError, expand};

/// A source of `kernels/` with its constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    pub name: &'static str,
    pub file: &'static str,
    pub given: &'static [(&'static str, i64)],
}

impl Variant {
    /// Plain PTX with `# line "file"` markers.
    pub fn expand(&self) -> Result<String, ExpandError> {
        let missing =
            || ExpandError { what: "there is no such source".into(), at: (self.file.into(), 1), through: vec![] };
        expand(self.file, &source(self.file).ok_or_else(missing)?, self.given, &source)
    }
}

pub const fn variant(name: &'static str, file: &'static str, given: &'static [(&'static str, i64)]) -> Variant {
    Variant { name, file, given }
}

// SOURCES, from build.rs.
include!(concat!(env!("OUT_DIR"), "/sources.rs"));

fn source(file: &str) -> Option<String> {
    SOURCES.iter().find(|(name, _)| *name == file).map(|(_, text)| text.to_string())
}

/// The names after `.visible .entry`.
pub fn entries(ptx: &str) -> impl Iterator<Item = &str> {
    ptx.split(".entry").skip(1).filter_map(|rest| {
        let name = rest.trim_start();
        Some(&name[..name.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == '$'))?])
    })
}

/// "sm_90a" of `.target sm_90a`.
pub fn target(ptx: &str) -> &str {
    let line = ptx.lines().find_map(|l| l.trim_start().strip_prefix(".target"));
    line.and_then(|l| l.split([',', ' ', ';']).find(|w| w.starts_with("sm_"))).unwrap_or("sm_80")
}
