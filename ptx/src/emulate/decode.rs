//! From a mnemonic and its operands to an operation. Forms that are not listed are errors: ignoring a modifier would
//! silently give a wrong answer.
use super::approximate::approximate;
use super::clock::FencedMemory;
use super::decode_hopper::hopper;
use super::decode_memory::memory;
use super::lane::{LaneFn, lane, lane_op};
use super::op::{Fence, MmaType, POLICIES, PtxOp, Shuffle, WarpVote};
use super::operand::{
    Decoded, PtxOperand, PtxSource, SpecialRegister, address, list, mapped, register, source, target,
};

pub fn decode(mnemonic: &str, operands: &[PtxOperand]) -> Decoded<PtxOp> {
    let parts: Vec<&str> = mnemonic.split('.').collect();
    let decoded = match parts[0] {
        "mbarrier" | "wgmma" | "setmaxnreg" | "prefetch" => hopper(&parts, operands)?.map(PtxOp::Hopper),
        "cp" if parts[1..].iter().take(3).any(|part| *part == "bulk") => hopper(&parts, operands)?.map(PtxOp::Hopper),
        "barrier" if parts.get(1) == Some(&"cluster") => hopper(&parts, operands)?.map(PtxOp::Hopper),
        "ld" | "st" | "atom" | "red" | "cp" => memory(&parts, operands)?,
        "ldmatrix" | "stmatrix" | "mma" => matrix(&parts, operands)?,
        _ => other(&parts, operands)?,
    };
    decoded.ok_or_else(|| format!("'{mnemonic}' with {} operands is not modeled", operands.len()))
}

fn other(parts: &[&str], operands: &[PtxOperand]) -> Decoded<Option<PtxOp>> {
    let op = match (parts, operands) {
        (["createpolicy", "fractional", priority, "b64"], [to]) => {
            let Some(&(_, policy)) = POLICIES.iter().find(|(name, _)| name == priority) else { return Ok(None) };
            let from = [policy, 0, 0].map(PtxSource::Immediate);
            PtxOp::Lane { function: lane!(|policy, _, _| policy), to: register(to)?, from }
        }
        (["mov", "u32" | "b32"], [to, PtxOperand::Special(which)]) => {
            PtxOp::Special { to: register(to)?, which: *which }
        }
        (["mov", "u32" | "b32"], [to, PtxOperand::Variable(own)]) => {
            PtxOp::Special { to: register(to)?, which: SpecialRegister::Variable(*own) }
        }
        (["mov", kind @ ("b32" | "b64")], [PtxOperand::List(to), from]) if to.len() == 2 => {
            let bits = if *kind == "b32" { 16 } else { 32 };
            PtxOp::Split { to: [target(&to[0])?, target(&to[1])?], bits, from: source(from)? }
        }
        (["mov", kind @ ("b32" | "b64")], [to, PtxOperand::List(from)]) if from.len() == 2 => {
            let function: LaneFn = if *kind == "b32" {
                lane!(|low, high, _| (low & 0xffff) | (high & 0xffff) << 16)
            } else {
                lane!(|low, high, _| (low & 0xffff_ffff) | high << 32)
            };
            let from = [source(&from[0])?, source(&from[1])?, PtxSource::Immediate(0)];
            PtxOp::Lane { function, to: register(to)?, from }
        }
        (["mapa", "shared::cluster", "u32"], [to, at, rank]) => {
            let from = [source(at)?, source(rank)?, PtxSource::Immediate(0)];
            PtxOp::Lane { function: lane!(|at, rank, _| mapped(at, rank)), to: register(to)?, from }
        }
        (["bra"] | ["bra", "uni"], [PtxOperand::Label(at)]) => PtxOp::Branch(*at),
        (["ret"] | ["exit"], []) => PtxOp::Exit,
        (["bar", "sync"] | ["barrier", "sync", "aligned"], [id]) => PtxOp::Barrier { id: source(id)?, threads: None },
        (["bar", "sync"] | ["barrier", "sync", "aligned"], [id, threads]) => {
            PtxOp::Barrier { id: source(id)?, threads: Some(source(threads)?) }
        }
        (["bar", "arrive"] | ["barrier", "arrive", "aligned"], [id, threads]) => {
            PtxOp::BarrierArrive { id: source(id)?, threads: source(threads)? }
        }
        (["elect", "sync"], [to, mask]) if list(to).len() == 2 => {
            PtxOp::Elect { to: target(&list(to)[0])?, chosen: register(&list(to)[1])?, mask: source(mask)? }
        }
        (["fence", "acq_rel" | "sc", scope @ ("cta" | "cluster" | "gpu" | "sys")], []) => {
            PtxOp::Fence(Fence::Order { cta: *scope == "cta" })
        }
        (["membar", scope @ ("cta" | "gl" | "sys")], []) => PtxOp::Fence(Fence::Order { cta: *scope == "cta" }),
        (["fence", "proxy", "async"], []) => PtxOp::Fence(Fence::Proxy(None)),
        (["fence", "proxy", "async", "global"], []) => PtxOp::Fence(Fence::Proxy(Some(FencedMemory::Global))),
        (["fence", "proxy", "async", "shared::cta" | "shared::cluster"], []) => {
            PtxOp::Fence(Fence::Proxy(Some(FencedMemory::Shared)))
        }
        (["fence", "mbarrier_init", "release", "cluster"], []) => PtxOp::Fence(Fence::MbarrierInit),
        (["bar", "warp", "sync"], [mask]) => PtxOp::WarpBarrier { mask: source(mask)? },
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
            PtxOp::Shuffle { how, to, valid, from, lane: source(lane)?, clamp: source(clamp)?, mask: source(mask)? }
        }
        (["vote", "sync", how, kind], [to, from, mask]) => {
            let how = match (*how, *kind) {
                ("ballot", "b32") => WarpVote::Ballot,
                ("any", "pred") => WarpVote::Any,
                ("all", "pred") => WarpVote::All,
                _ => return Ok(None),
            };
            let (from, negated) = match from {
                PtxOperand::Not(from) => (*from, true),
                from => (register(from)?, false),
            };
            PtxOp::Vote { how, to: register(to)?, from, negated, mask: source(mask)? }
        }
        (_, [to, sources @ ..]) => {
            let operand = |i: usize| sources.get(i).map_or(Ok(PtxSource::Immediate(0)), source);
            match (lane_op(parts), approximate(parts)) {
                (Some((n, function)), _) if n == sources.len() => {
                    PtxOp::Lane { function, to: register(to)?, from: [operand(0)?, operand(1)?, operand(2)?] }
                }
                (_, Some((n, how))) if n == sources.len() => {
                    PtxOp::Approximate { how, to: register(to)?, from: [operand(0)?, operand(1)?] }
                }
                _ => return Ok(None),
            }
        }
        _ => return Ok(None),
    };
    Ok(Some(op))
}

fn matrix(parts: &[&str], operands: &[PtxOperand]) -> Decoded<Option<PtxOp>> {
    let sources = |operand: &PtxOperand| list(operand).iter().map(source).collect::<Decoded<Vec<_>>>();
    let registers = |operand: &PtxOperand| list(operand).iter().map(register).collect::<Decoded<Vec<_>>>();
    match (parts, operands) {
        (["ldmatrix", "sync", "aligned", "m8n8", count, trans @ .., "shared" | "shared::cta", "b16"], [to, from])
            if matches!(trans, [] | ["trans"]) =>
        {
            let to = registers(to)?;
            let known = matches!((*count, to.len()), ("x1", 1) | ("x2", 2) | ("x4", 4));
            let transposed = !trans.is_empty();
            Ok(if known { Some(PtxOp::LoadMatrix { transposed, to, address: address(from)? }) } else { None })
        }
        (["stmatrix", "sync", "aligned", "m8n8", count, trans @ .., "shared" | "shared::cta", "b16"], [to, from])
            if matches!(trans, [] | ["trans"]) =>
        {
            let from = sources(from)?;
            let known = matches!((*count, from.len()), ("x1", 1) | ("x2", 2) | ("x4", 4));
            let transposed = !trans.is_empty();
            Ok(if known { Some(PtxOp::StoreMatrix { transposed, from, address: address(to)? }) } else { None })
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
            Ok(if fits { Some(PtxOp::Mma { kind, to, a, b, c }) } else { None })
        }
        _ => Ok(None),
    }
}
