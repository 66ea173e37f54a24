//! Every shipped kernel in every variant: the sources of `kernels/` and their constants. Never launches anything.
mod variant; // a source and its constants
pub mod attention; // attention row kernels, and tensor cores of sm_80
pub mod attention_hopper; // attention on sm_90a
pub mod experts; // mixtures of experts
pub mod probes; // kernels that reveal a GPU's layouts
mod catalogue; // list of all variants
mod spills; // what ptxas is known to spill

pub use catalogue::{budgeted, variants};
pub use spills::known_spill;
pub use variant::{Variant, entries, target};
