//! Instructions that a warp can execute, as data. Never text, and never executed here.
use super::approximate::Approximate;
use super::clock::FencedMemory;
use super::lane::LaneFn;
use super::operand::{Address, PtxSource, Register, Space, SpecialRegister};
use std::sync::Arc;

/// The memory ordering of an access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryOrder {
    /// At least relaxed: no race with other strong accesses.
    pub strong: bool,
    pub acquire: bool,
    pub release: bool,
    /// CTA scope only.
    pub cta: bool,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// `fence.acq_rel`, `fence.sc`, `membar`; whether with CTA scope only.
    Order { cta: bool },
    /// `fence.proxy.async`, for one memory or all
    Proxy(Option<FencedMemory>),
    /// `fence.mbarrier_init`
    MbarrierInit,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shuffle {
    Index,
    Up,
    Down,
    Butterfly,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WarpVote {
    Ballot,
    Any,
    All,
}

/// Types of an mma's operands; the accumulator is f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MmaType {
    Bf16,
    F16,
    Tf32,
}

pub enum PtxOp {
    /// Per-lane, exact.
    Lane {
        function: LaneFn,
        to: Register,
        from: [PtxSource; 3],
    },
    /// Per-lane, approximate.
    Approximate {
        how: Approximate,
        to: Register,
        from: [PtxSource; 2],
    },
    Special {
        to: Register,
        which: SpecialRegister,
    },
    /// `mov.b64 {%low, %high}, %x`
    Split {
        to: [Option<Register>; 2],
        bits: u32,
        from: PtxSource,
    },
    Parameter {
        to: Vec<Register>,
        offset: usize,
        bytes: usize,
    },
    /// `bytes` is the size of one element; there is one register per element.
    Load {
        order: MemoryOrder,
        space: Space,
        bytes: usize,
        to: Vec<Option<Register>>,
        address: Address,
    },
    Store {
        order: MemoryOrder,
        space: Space,
        bytes: usize,
        from: Vec<PtxSource>,
        address: Address,
    },
    /// Stores `function` of the old value and the operands; the old value goes to `to`.
    Atomic {
        order: MemoryOrder,
        space: Space,
        bytes: usize,
        function: LaneFn,
        to: Option<Register>,
        address: Address,
        from: [PtxSource; 2],
    },
    Branch(usize),
    Exit,
    /// `threads` of the CTA, or all of them.
    Barrier {
        id: PtxSource,
        threads: Option<PtxSource>,
    },
    BarrierArrive {
        id: PtxSource,
        threads: PtxSource,
    },
    WarpBarrier {
        mask: PtxSource,
    },
    /// `elect.sync`: the lowest lane of the mask.
    Elect {
        to: Option<Register>,
        chosen: Register,
        mask: PtxSource,
    },
    Fence(Fence),
    Shuffle {
        how: Shuffle,
        to: Register,
        valid: Option<Register>,
        from: PtxSource,
        lane: PtxSource,
        clamp: PtxSource,
        mask: PtxSource,
    },
    Vote {
        how: WarpVote,
        to: Register,
        from: Register,
        negated: bool,
        mask: PtxSource,
    },
    /// `cp.async`: copies `read` bytes of global memory, then zeros, to `bytes` of shared memory.
    CopyAsync {
        bytes: usize,
        to: Address,
        from: Address,
        read: Option<PtxSource>,
    },
    CopyCommit,
    /// Leaves at most this many groups in flight; none, counted singly, for `wait_all`.
    CopyWait(Option<u64>),
    /// `ldmatrix`: an 8x8 matrix of 16-bit elements to each register.
    LoadMatrix {
        transposed: bool,
        to: Vec<Register>,
        address: Address,
    },
    /// `stmatrix`: each register's 8x8 matrix of 16-bit elements to shared memory.
    StoreMatrix {
        transposed: bool,
        from: Vec<PtxSource>,
        address: Address,
    },
    /// `mma.sync` m16n8k16, or m16n8k8 for tf32.
    Mma {
        kind: MmaType,
        to: Vec<Register>,
        a: Vec<PtxSource>,
        b: Vec<PtxSource>,
        c: Vec<PtxSource>,
    },
    /// Introduced with sm_90.
    Hopper(Hopper),
}

/// Values of cache policies, by the priority of what is accessed: as CUTLASS's `TMA::CacheHintSm90` encodes them.
pub const POLICIES: [(&str, u64); 2] =
    [("L2::evict_first", 0x12f0_0000_0000_0000), ("L2::evict_last", 0x14f0_0000_0000_0000)];

/// The instructions introduced with sm_90: mbarrier, bulk and tensor copies, wgmma, setmaxnreg, cluster barriers.
pub enum Hopper {
    MbarrierInit {
        at: Address,
        count: PtxSource,
    },
    MbarrierInvalidate {
        at: Address,
    },
    /// `expect`: additional bytes before the phase completes. `to` receives the phase. `mapped`: the address may be
    /// another CTA's. `wide`: it releases to the cluster.
    Arrive {
        mapped: bool,
        wide: bool,
        to: Option<Register>,
        at: Address,
        count: PtxSource,
        expect: Option<PtxSource>,
    },
    ExpectTx {
        at: Address,
        bytes: PtxSource,
    },
    /// `try_wait` and `test_wait`: for the phase that `arrive` returned, or for a parity. `wide`: it acquires from the
    /// cluster.
    Wait {
        wide: bool,
        to: Register,
        at: Address,
        phase: PtxSource,
        parity: bool,
    },
    BulkLoad {
        to: Address,
        from: Address,
        bytes: PtxSource,
        barrier: Address,
    },
    /// From shared memory to that of a CTA of the cluster.
    BulkSend {
        to: Address,
        from: Address,
        bytes: PtxSource,
        barrier: Address,
    },
    /// With `add`, f32 that are added to the destination.
    BulkStore {
        to: Address,
        from: Address,
        bytes: PtxSource,
        add: bool,
    },
    TensorLoad {
        to: Address,
        map: PtxSource,
        at: Vec<PtxSource>,
        barrier: Address,
        /// Multicast: the ranks of the CTAs that receive it, as bits.
        ranks: Option<PtxSource>,
    },
    TensorStore {
        map: PtxSource,
        at: Vec<PtxSource>,
        from: Address,
    },
    /// A copy with a cache policy.
    Hinted {
        copy: Box<Hopper>,
        policy: PtxSource,
    },
    /// Brings a tensor map closer; changes nothing else.
    PrefetchMap(Address),
    BulkCommit,
    /// Until at most `left` groups are in flight; with `read`, until their shared memory has been read.
    BulkWait {
        left: u64,
        read: bool,
    },
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait(u64),
    Wgmma(Wgmma),
    Registers {
        count: u64,
        more: bool,
    },
    ClusterArrive {
        release: bool,
    },
    ClusterWait,
}

/// `wgmma.mma_async` m64nNk16 with an f32 accumulator.
pub struct Wgmma {
    pub kind: MmaType,
    pub n: usize,
    /// Shared by reference with the products in flight.
    pub to: Arc<[Register]>,
    pub a: Left,
    /// Descriptor of B.
    pub b: PtxSource,
    /// Whether to accumulate into D.
    pub keep: PtxSource,
    pub negate: [bool; 2],
    /// B, and A from shared memory, have M or N contiguous rather than K.
    pub transposed: [bool; 2],
}
pub enum Left {
    Registers(Arc<[Register]>),
    Descriptor(PtxSource),
}

impl Hopper {
    /// Whether it is undefined without all 32 lanes.
    pub fn aligned(&self) -> bool {
        use Hopper::*;
        matches!(
            self,
            WgmmaFence | WgmmaCommit | WgmmaWait(_) | Wgmma(_) | Registers { .. } | ClusterArrive { .. } | ClusterWait
        )
    }
}
