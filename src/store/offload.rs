//! Where a rank's shards live: on the device or in host memory. Never copies: offloaded buffers are host memory that
//! the device can address ([`Device::alloc_host`]), so a store gathers from them and reduces into them with the same
//! collectives, on the group's own stream.
//!
//! Bytes per rank, for P parameters over N ranks in bf16 [f32]; the slots stay on the device:
//!
//! ```text
//!             device                      host
//! none        (6 + 4 + 8) P/N [16 P/N]    0
//! optimizer   (2 + 4) P/N     [8 P/N]     12 P/N [12 P/N]           f32 masters, AdamW's moments
//! gradients    2 P/N          [4 P/N]     16 P/N [16 P/N]           and what gradients are reduced into
//! parameters   0                          18 P/N [16 P/N]           and what weights are gathered from
//! ```
//!
//! With bf16 moments 4 P/N less, with 8-bit moments 5.97 P/N, and with bf16 masters 2 P/N, and another 2 P/N where they
//! are what is gathered: without offloading, and with that of parameters.
use crate::base::{Category, DType, Result};
use crate::device::{Buf, Device};

/// What is offloaded to host memory. Each level includes those before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Offload {
    #[default]
    Nothing,
    /// Optimizer state and f32 masters. The host runs the update (Ren et al. 2021).
    Optimizer,
    /// Reduced gradients.
    Gradients,
    /// The weights that gathers read.
    Parameters,
}

impl Offload {
    /// Allocates a buffer that is offloaded at level `from` and above.
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
    /// Whether gathers in `dtype` read a copy instead of the masters.
    pub(super) fn copies(self, dtype: DType, masters: DType) -> bool {
        dtype != masters || matches!(self, Offload::Optimizer | Offload::Gradients)
    }
}
