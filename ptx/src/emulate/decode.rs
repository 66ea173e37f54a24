//! A mnemonic and its operands to an operation that can be executed. A form that is not listed is an error: a modifier
//! that was skipped would be a wrong answer without a word.
use super::approximate::{Approximate, approximate};
use super::decode_hopper::{Hopper, hopper};
use super::decode_memory::memory;
use super::kernel::{Operand, PARAMETER_BASE, Register, Special};
use super::lane::{LaneFn, lane_op};

#[derive(Clone, Copy, Debug)]
pub enum Source {
    Register(Register),
    Immediate(u64),
}
#[derive(Clone, Copy, Debug)]
pub struct Address {
    pub base: Source,
    pub offset: i64,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Global,
    Shared,
    /// Whichever the address lies in.
    Generic,
}
/// What an access orders besides itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Relaxed at least: meets other strong accesses without a race.
    pub strong: bool,
    pub acquire: bool,
    pub release: bool,
    /// Among the CTA's threads alone.
    pub cta: bool,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// `fence.acq_rel`, `fence.sc`, `membar`; whether among the CTA's threads alone.
    Order { cta: bool },
    /// `fence.proxy.async`
    Proxy,
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
pub enum Vote {
    Ballot,
    Any,
    All,
}

/// Of the operands of an mma; the accumulator is f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MmaType {
    Bf16,
    F16,
    Tf32,
}

pub enum Op {
    /// Each lane for itself.
    Lane {
        function: LaneFn,
        to: Register,
        from: [Source; 3],
    },
    /// The same, not to the last bit.
    Approximate {
        how: Approximate,
        to: Register,
        from: [Source; 2],
    },
    Special {
        to: Register,
        which: Special,
    },
    /// `mov.b64 {%low, %high}, %x`
    Split {
        to: [Option<Register>; 2],
        bits: u32,
        from: Source,
    },
    Parameter {
        to: Vec<Register>,
        offset: usize,
        bytes: usize,
    },
    /// `bytes` is the size of one element; there is a register for each.
    Load {
        order: Order,
        space: Space,
        bytes: usize,
        to: Vec<Option<Register>>,
        address: Address,
    },
    Store {
        order: Order,
        space: Space,
        bytes: usize,
        from: Vec<Source>,
        address: Address,
    },
    /// `function` of the old value and the operands is stored; the old value goes to `to`.
    Atomic {
        order: Order,
        space: Space,
        bytes: usize,
        function: LaneFn,
        to: Option<Register>,
        address: Address,
        from: [Source; 2],
    },
    Branch(usize),
    Exit,
    /// `threads` of the CTA, or all of them.
    Barrier {
        id: Source,
        threads: Option<Source>,
    },
    BarrierArrive {
        id: Source,
        threads: Source,
    },
    WarpBarrier {
        mask: Source,
    },
    /// `elect.sync`: the lowest lane of the mask.
    Elect {
        to: Option<Register>,
        chosen: Register,
        mask: Source,
    },
    Fence(Fence),
    Shuffle {
        how: Shuffle,
        to: Register,
        valid: Option<Register>,
        from: Source,
        lane: Source,
        clamp: Source,
        mask: Source,
    },
    Vote {
        how: Vote,
        to: Register,
        from: Register,
        negated: bool,
        mask: Source,
    },
    /// `cp.async`: `read` bytes of global memory (the rest zeros) to `bytes` of shared.
    CopyAsync {
        bytes: usize,
        to: Address,
        from: Address,
        read: Option<Source>,
    },
    CopyCommit,
    /// Leaves at most so many groups in flight; none, counted singly, for `wait_all`.
    CopyWait(Option<u64>),
    /// `ldmatrix`: an 8x8 matrix of 16-bit elements to each register.
    LoadMatrix {
        transposed: bool,
        to: Vec<Register>,
        address: Address,
    },
    /// `mma.sync` m16n8k16, or m16n8k8 for tf32.
    Mma {
        kind: MmaType,
        to: Vec<Register>,
        a: Vec<Source>,
        b: Vec<Source>,
        c: Vec<Source>,
    },
    /// What sm_90 brought.
    Hopper(Hopper),
}

pub type Result<T> = std::result::Result<T, String>;

pub fn source(operand: &Operand) -> Result<Source> {
    match operand {
        Operand::Register(register) => Ok(Source::Register(*register)),
        Operand::Immediate(value) => Ok(Source::Immediate(*value)),
        Operand::Parameter(offset) => Ok(Source::Immediate(PARAMETER_BASE + *offset as u64)),
        other => Err(format!("a register or a number expected, found {other:?}")),
    }
}
pub fn register(operand: &Operand) -> Result<Register> {
    match operand {
        Operand::Register(register) => Ok(*register),
        other => Err(format!("a register expected, found {other:?}")),
    }
}
pub fn target(operand: &Operand) -> Result<Option<Register>> {
    if *operand == Operand::Nothing { Ok(None) } else { register(operand).map(Some) }
}
pub fn address(operand: &Operand) -> Result<Address> {
    match operand {
        Operand::Memory(base, offset) => Ok(Address { base: source(base)?, offset: *offset }),
        other => Err(format!("[address] expected, found {other:?}")),
    }
}
pub fn number(operand: &Operand) -> Result<u64> {
    match operand {
        Operand::Immediate(value) => Ok(*value),
        other => Err(format!("a number expected, found {other:?}")),
    }
}
/// The elements of `{a, b}`, or the operand alone.
pub fn list(operand: &Operand) -> &[Operand] {
    if let Operand::List(list) = operand { list } else { std::slice::from_ref(operand) }
}
pub fn decode(mnemonic: &str, operands: &[Operand]) -> Result<Op> {
    let parts: Vec<&str> = mnemonic.split('.').collect();
    let decoded = match parts[0] {
        "mbarrier" | "wgmma" | "setmaxnreg" => hopper(&parts, operands)?.map(Op::Hopper),
        "cp" if parts[1..].iter().take(3).any(|part| *part == "bulk") => hopper(&parts, operands)?.map(Op::Hopper),
        "barrier" if parts.get(1) == Some(&"cluster") => hopper(&parts, operands)?.map(Op::Hopper),
        "ld" | "st" | "atom" | "red" | "cp" => memory(&parts, operands)?,
        "ldmatrix" | "mma" => matrix(&parts, operands)?,
        _ => other(&parts, operands)?,
    };
    decoded.ok_or_else(|| format!("'{mnemonic}' with {} operands is not modelled", operands.len()))
}

fn other(parts: &[&str], operands: &[Operand]) -> Result<Option<Op>> {
    let op = match (parts, operands) {
        (["mov", "u32" | "b32"], [to, Operand::Special(which)]) => Op::Special { to: register(to)?, which: *which },
        (["mov", kind @ ("b32" | "b64")], [Operand::List(to), from]) if to.len() == 2 => {
            let bits = if *kind == "b32" { 16 } else { 32 };
            Op::Split { to: [target(&to[0])?, target(&to[1])?], bits, from: source(from)? }
        }
        (["mov", kind @ ("b32" | "b64")], [to, Operand::List(from)]) if from.len() == 2 => {
            let function: LaneFn = if *kind == "b32" {
                |low, high, _| (low & 0xffff) | (high & 0xffff) << 16
            } else {
                |low, high, _| (low & 0xffff_ffff) | high << 32
            };
            let from = [source(&from[0])?, source(&from[1])?, Source::Immediate(0)];
            Op::Lane { function, to: register(to)?, from }
        }
        (["bra"] | ["bra", "uni"], [Operand::Label(at)]) => Op::Branch(*at),
        (["ret"] | ["exit"], []) => Op::Exit,
        (["bar", "sync"] | ["barrier", "sync", "aligned"], [id]) => Op::Barrier { id: source(id)?, threads: None },
        (["bar", "sync"] | ["barrier", "sync", "aligned"], [id, threads]) => {
            Op::Barrier { id: source(id)?, threads: Some(source(threads)?) }
        }
        (["bar", "arrive"] | ["barrier", "arrive", "aligned"], [id, threads]) => {
            Op::BarrierArrive { id: source(id)?, threads: source(threads)? }
        }
        (["elect", "sync"], [to, mask]) if list(to).len() == 2 => {
            Op::Elect { to: target(&list(to)[0])?, chosen: register(&list(to)[1])?, mask: source(mask)? }
        }
        (["fence", "acq_rel" | "sc", scope @ ("cta" | "cluster" | "gpu" | "sys")], []) => {
            Op::Fence(Fence::Order { cta: *scope == "cta" })
        }
        (["membar", scope @ ("cta" | "gl" | "sys")], []) => Op::Fence(Fence::Order { cta: *scope == "cta" }),
        (
            ["fence", "proxy", "async"] | ["fence", "proxy", "async", "global" | "shared::cta" | "shared::cluster"],
            [],
        ) => Op::Fence(Fence::Proxy),
        (["fence", "mbarrier_init", "release", "cluster"], []) => Op::Fence(Fence::MbarrierInit),
        (["bar", "warp", "sync"], [mask]) => Op::WarpBarrier { mask: source(mask)? },
        (["shfl", "sync", how, "b32"], [to, from, lane, clamp, mask]) => {
            let how = match *how {
                "idx" => Shuffle::Index,
                "up" => Shuffle::Up,
                "down" => Shuffle::Down,
                "bfly" => Shuffle::Butterfly,
                _ => return Ok(None),
            };
            let valid = list(to).get(1).map(register).transpose()?;
            let (to, from) = (register(&list(to)[0])?, source(from)?);
            Op::Shuffle { how, to, valid, from, lane: source(lane)?, clamp: source(clamp)?, mask: source(mask)? }
        }
        (["vote", "sync", how, kind], [to, from, mask]) => {
            let how = match (*how, *kind) {
                ("ballot", "b32") => Vote::Ballot,
                ("any", "pred") => Vote::Any,
                ("all", "pred") => Vote::All,
                _ => return Ok(None),
            };
            let (from, negated) = match from {
                Operand::Not(from) => (*from, true),
                from => (register(from)?, false),
            };
            Op::Vote { how, to: register(to)?, from, negated, mask: source(mask)? }
        }
        (_, [to, sources @ ..]) => {
            let operand = |i: usize| sources.get(i).map_or(Ok(Source::Immediate(0)), source);
            match (lane_op(parts), approximate(parts)) {
                (Some((n, function)), _) if n == sources.len() => {
                    Op::Lane { function, to: register(to)?, from: [operand(0)?, operand(1)?, operand(2)?] }
                }
                (_, Some((n, how))) if n == sources.len() => {
                    Op::Approximate { how, to: register(to)?, from: [operand(0)?, operand(1)?] }
                }
                _ => return Ok(None),
            }
        }
        _ => return Ok(None),
    };
    Ok(Some(op))
}

fn matrix(parts: &[&str], operands: &[Operand]) -> Result<Option<Op>> {
    let sources = |operand: &Operand| list(operand).iter().map(source).collect::<Result<Vec<_>>>();
    let registers = |operand: &Operand| list(operand).iter().map(register).collect::<Result<Vec<_>>>();
    match (parts, operands) {
        (["ldmatrix", "sync", "aligned", "m8n8", count, trans @ .., "shared" | "shared::cta", "b16"], [to, from])
            if matches!(trans, [] | ["trans"]) =>
        {
            let to = registers(to)?;
            let known = matches!((*count, to.len()), ("x1", 1) | ("x2", 2) | ("x4", 4));
            let transposed = !trans.is_empty();
            Ok(if known { Some(Op::LoadMatrix { transposed, to, address: address(from)? }) } else { None })
        }
        (["mma", "sync", "aligned", shape, "row", "col", "f32", left, right, "f32"], [to, a, b, c])
            if left == right =>
        {
            let kind = match (*shape, *left) {
                ("m16n8k16", "bf16") => MmaType::Bf16,
                ("m16n8k16", "f16") => MmaType::F16,
                ("m16n8k8", "tf32") => MmaType::Tf32,
                _ => return Ok(None),
            };
            let (to, a, b, c) = (registers(to)?, sources(a)?, sources(b)?, sources(c)?);
            let fits = [to.len(), a.len(), b.len(), c.len()] == [4, 4, 2, 4];
            Ok(if fits { Some(Op::Mma { kind, to, a, b, c }) } else { None })
        }
        _ => Ok(None),
    }
}
