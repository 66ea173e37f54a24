//! Every kernel that is shipped, in every variant: the sources of `kernels/` and the constants that shape them. Never
//! launches anything.
mod variant; // a source and its constants
pub mod attention; // attention by rows and on sm_80
pub mod attention_hopper; // attention on sm_90a
pub mod probes; // kernels that show a GPU's layouts
mod catalogue; // all of them

pub use catalogue::{VARIANTS, variants};
pub use variant::{Variant, entries, target};
