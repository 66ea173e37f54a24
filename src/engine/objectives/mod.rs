//! What a run minimizes. Fine-tuning's mean over tokens is the decoder's own loss; the others are functions of whole
//! sequences. Never knows how rows become sequences.
mod dpo; // the loss of a pair
mod rm; // the loss of a reward model
mod objective; // all of them
mod pairs; // sums of a step's pairs
mod sequences; // log-probabilities in, weights of sequences out
mod reference; // the frozen reference model
mod preference; // a micro-batch of pairs, from reference to backward

pub use dpo::Dpo;
pub use objective::Objective;
pub use pairs::{PairMeans, PairSums};
pub(super) use preference::{PreferenceLoss, StagedPairs};
pub use rm::Rm;
