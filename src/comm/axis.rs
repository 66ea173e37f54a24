//! The axes of the mesh and the groups that combine several of them, one row each. Never holds a group.

macro_rules! axes {
    ($($(#[$about:meta])* $axis:ident $name:literal $along:expr,)*) => {
        /// The axes of the mesh, outermost first, and groups that combine several of them.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum Axis { $($(#[$about])* $axis,)* }

        impl Axis {
            pub const ALL: [Axis; [$($name),*].len()] = [$(Axis::$axis),*];

            pub fn name(self) -> &'static str {
                match self { $(Axis::$axis => $name,)* }
            }
            /// Whether the ranks of a group differ in dp_replicate, dp_shard / ep, ep, sp and tp.
            pub(super) fn along(self) -> [bool; 5] {
                match self { $(Axis::$axis => $along,)* }
            }
        }
    };
}

axes! {
    World "world" [true; 5],
    DpReplicate "dp_replicate" [true, false, false, false, false],
    DpShard "dp_shard" [false, true, true, false, false],
    Sp "sp" [false, false, false, true, false],
    Tp "tp" [false, false, false, false, true],
    /// dp_shard x sp: the ranks that parameters are sharded over.
    Fsdp "fsdp" [false, true, true, true, false],
    /// Ranks of dp_shard that share the experts of a mixture.
    Ep "ep" [false, false, true, false, false],
    /// Fsdp without ep: the ranks that parameters of experts are sharded over. The group of Fsdp if ep is 1.
    ExpertFsdp "expert_fsdp" [false, true, false, true, false],
    /// dp_replicate x dp_shard: ranks with different samples.
    Dp "dp" [true, true, true, false, false],
    /// dp_replicate x dp_shard x sp, all but tp: ranks with different tokens. Losses are summed over it.
    Loss "loss" [true, true, true, true, false],
}
