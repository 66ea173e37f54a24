//! What a rank owns, on the device or in host memory. Never moves anything: host memory here is memory that the device
//! reaches as it does its own ([`Device::alloc_host`]), so a store gathers from it and reduces into it by the
//! collectives that it uses anyway, on the group's own stream, and knows nothing more of where a buffer is.
//!
//! Bytes of a rank, for P parameters over N ranks in bf16 [f32]; the slots stay on the device:
//!
//! ```text
//!             device                      host
//! none        (6 + 4 + 8) P/N [16 P/N]    0
//! optimizer   (2 + 4) P/N     [8 P/N]     12 P/N [12 P/N]           f32 masters, AdamW's moments
//! gradients    2 P/N          [4 P/N]     16 P/N [16 P/N]           and what gradients are reduced into
//! parameters   0                          18 P/N [16 P/N]           and what weights are gathered from
//! ```
use crate::base::{Category, DType, Result};
use crate::device::{Buf, Device};

/// What is in host memory; each includes those before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Offload {
    #[default]
    Nothing,
    /// Optimizer state and f32 masters; the update is done by the host (Ren et al. 2021).
    Optimizer,
    /// Reduced gradients.
    Gradients,
    /// The weights that are gathered.
    Parameters,
}

impl Offload {
    /// A buffer of what is offloaded from `from` on.
    pub(super) fn alloc(
        self,
        from: Offload,
        dev: &dyn Device,
        dtype: DType,
        len: usize,
        category: Category,
    ) -> Result<Buf> {
        match self >= from {
            true => dev.alloc_host(dtype, len),
            false => dev.alloc(dtype, len, category),
        }
    }
    /// Whether weights are gathered from a copy of the masters, which are f32, when they are gathered in `dtype`.
    pub(super) fn copies(self, dtype: DType) -> bool {
        dtype != DType::F32 || matches!(self, Offload::Optimizer | Offload::Gradients)
    }
}
