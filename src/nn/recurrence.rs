//! What mixes tokens by a state of a fixed size, as data: gated delta nets, Mamba 2, short convolutions. Never runs.
use crate::device::ops::{DeltaShape, StateRule};

/// The gated delta nets of blocks that mix tokens with one, or their Mamba 2.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DeltaNet {
    pub shape: DeltaShape,
    /// Taps of the convolution of queries, keys and values.
    pub taps: usize,
    pub form: DeltaForm,
}

/// Which matrices a gated delta net has.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum DeltaForm {
    /// One for queries, keys, values and the outputs' gate, head by head; and one for the rule's gates.
    Fused,
    /// One for queries, keys and values, and one for each gate.
    Joined,
    /// One for each, and three convolutions.
    Apart,
    /// One for all, of Mamba 2.
    Mamba(Mamba),
}

/// What Mamba 2 has besides the sizes of a gated delta net.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Mamba {
    pub conv_bias: bool,
    /// A norm in front of the last matrix.
    pub normed: bool,
    /// Factors of what the first matrix gives: z, values, keys, queries and steps.
    pub factors: [f32; 5],
}

impl Mamba {
    /// Whether factors are those of filters: a convolution of products with numbers.
    pub fn scales_filters(&self) -> bool {
        self.factors[1..4] != [1.0; 3]
    }
}

impl Default for Mamba {
    fn default() -> Mamba {
        Mamba { conv_bias: true, normed: true, factors: [1.0; 5] }
    }
}

impl DeltaNet {
    /// Without heads.
    pub const NONE: DeltaNet = DeltaNet {
        shape: DeltaShape {
            key_heads: 0,
            value_heads: 0,
            key_dim: 0,
            value_dim: 0,
            rule: StateRule::Delta { doubled: false },
        },
        taps: 0,
        form: DeltaForm::Joined,
    };
    /// Groups that Mamba 2 normalizes apart: those of its key heads.
    pub fn groups(&self) -> Option<usize> {
        matches!(self.form, DeltaForm::Mamba(_)).then_some(self.shape.key_heads)
    }
    /// What it has as Mamba 2.
    pub fn mamba(&self) -> Option<&Mamba> {
        if let DeltaForm::Mamba(mamba) = &self.form { Some(mamba) } else { None }
    }
    /// Whether its convolution has biases.
    pub fn has_bias(&self) -> bool {
        self.mamba().is_some_and(|mamba| mamba.conv_bias)
    }
    /// Whether its filters are not those of one tensor.
    pub fn has_own_filters(&self) -> bool {
        self.form == DeltaForm::Apart || self.mamba().is_some_and(Mamba::scales_filters)
    }
    /// Elements of the weight of its norm.
    pub fn normed(&self) -> usize {
        if self.groups().is_some() { self.shape.values() } else { self.shape.value_dim }
    }
}

/// What blocks have in place of attention that mix tokens by a state of a fixed size.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Recurrence {
    Delta(DeltaNet),
    /// A short convolution of gated channels.
    Conv {
        channels: usize,
        taps: usize,
    },
}

impl Recurrence {
    /// Taps of the convolution.
    pub fn taps(&self) -> usize {
        match *self {
            Recurrence::Delta(net) => net.taps,
            Recurrence::Conv { taps, .. } => taps,
        }
    }
    /// Channels of the convolution.
    pub fn channels(&self) -> usize {
        match *self {
            Recurrence::Delta(net) => net.shape.row(),
            Recurrence::Conv { channels, .. } => channels,
        }
    }
    /// For messages.
    pub fn name(&self) -> &'static str {
        match self {
            Recurrence::Delta(net) if net.groups().is_some() => "Mamba layers",
            Recurrence::Delta(_) => "gated delta nets",
            Recurrence::Conv { .. } => "short convolutions",
        }
    }
}
