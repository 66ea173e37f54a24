//! Loads, stores, atomics and cp.async, as part of decode.rs.
use super::lane::{LaneFn, lane, lane_op};
use super::op::{MemoryOrder, PtxOp};
use super::operand::{Decoded, PtxOperand, PtxSource, Space, address, list, number, register, source, target};

fn bytes(kind: &str) -> Option<usize> {
    match kind {
        "b8" | "u8" => Some(1),
        "b16" | "u16" => Some(2),
        "b32" | "u32" | "s32" | "f32" => Some(4),
        "b64" | "u64" | "s64" | "f64" => Some(8),
        _ => None,
    }
}
fn space(name: &str) -> Option<Space> {
    match name {
        "global" => Some(Space::Global),
        "shared" | "shared::cta" => Some(Space::Shared),
        _ => None,
    }
}

pub fn memory(parts: &[&str], operands: &[PtxOperand]) -> Decoded<Option<PtxOp>> {
    // Cache hints change nothing that is modeled.
    let hint = |p: &&str| matches!(*p, "nc" | "L1::no_allocate" | "L2::128B" | "cs" | "cg" | "ca" | "lu");
    let plain: Vec<&str> =
        if parts[0] == "cp" { parts.to_vec() } else { parts.iter().copied().filter(|p| !hint(p)).collect() };
    let (order, plain) = ordering(&plain);
    let op = match (&plain[..], operands) {
        (["ld", "param", kind], [to, PtxOperand::Memory(base, offset)]) => {
            let PtxOperand::Parameter(start) = **base else { return Err("ld.param needs a parameter".into()) };
            let Some(bytes) = bytes(kind) else { return Ok(None) };
            PtxOp::Parameter { to: vec![register(to)?], offset: (start as i64 + offset) as usize, bytes }
        }
        (["ld", shape @ ..], [to, from]) if !order.release => {
            let (space, shape) = spaced(shape);
            let Some(bytes) = element(shape, list(to).len()) else { return Ok(None) };
            let to = list(to).iter().map(target).collect::<Decoded<_>>()?;
            PtxOp::Load { order, space, bytes, to, address: address(from)? }
        }
        (["st", shape @ ..], [to, from]) if !order.acquire => {
            let (space, shape) = spaced(shape);
            let Some(bytes) = element(shape, list(from).len()) else { return Ok(None) };
            let from = list(from).iter().map(source).collect::<Decoded<_>>()?;
            PtxOp::Store { order, space, bytes, from, address: address(to)? }
        }
        (["red", space_name, how, kind], [at, from]) => match atomic(space_name, how, kind) {
            Some((space, bytes, function)) if *how != "cas" => {
                let from = [source(from)?, PtxSource::Immediate(0)];
                PtxOp::Atomic { order, space, bytes, function, to: None, address: address(at)?, from }
            }
            _ => return Ok(None),
        },
        (["atom", space_name, how, kind], [to, at, from @ ..]) => match atomic(space_name, how, kind) {
            Some((space, bytes, function)) if from.len() == 1 + (*how == "cas") as usize => {
                let second = from.get(1).map_or(Ok(PtxSource::Immediate(0)), source)?;
                let from = [source(&from[0])?, second];
                PtxOp::Atomic { order, space, bytes, function, to: target(to)?, address: address(at)?, from }
            }
            _ => return Ok(None),
        },
        (["cp", "async", "ca" | "cg", "shared" | "shared::cta", "global", hint @ ..], [to, from, bytes, read @ ..])
            if matches!(hint, [] | ["L2::128B"]) && read.len() < 2 =>
        {
            let bytes = number(bytes)? as usize;
            if !(bytes == 16 || parts[2] == "ca" && (bytes == 4 || bytes == 8)) {
                return Ok(None);
            }
            let read = read.first().map(source).transpose()?;
            PtxOp::CopyAsync { bytes, to: address(to)?, from: address(from)?, read }
        }
        (["cp", "async", "commit_group"], []) => PtxOp::CopyCommit,
        (["cp", "async", "wait_group"], [left]) => PtxOp::CopyWait(Some(number(left)?)),
        (["cp", "async", "wait_all"], []) => PtxOp::CopyWait(None),
        _ => return Ok(None),
    };
    Ok(Some(op))
}

/// What an access orders, and its mnemonic without that. By default an atomic is relaxed, with device scope.
fn ordering<'a>(parts: &[&'a str]) -> (MemoryOrder, Vec<&'a str>) {
    let mut order = MemoryOrder { strong: matches!(parts[0], "atom" | "red"), ..MemoryOrder::default() };
    let mut rest = parts.to_vec();
    if let Some(semantics @ ("relaxed" | "acquire" | "release" | "acq_rel")) = rest.get(1).copied() {
        order.strong = true;
        order.acquire = matches!(semantics, "acquire" | "acq_rel");
        order.release = matches!(semantics, "release" | "acq_rel");
        rest.remove(1);
    }
    if order.strong
        && let Some(scope @ ("cta" | "cluster" | "gpu" | "sys")) = rest.get(1).copied()
    {
        order.cta = scope == "cta";
        rest.remove(1);
    }
    (order, rest)
}
fn spaced<'a, 'b>(parts: &'b [&'a str]) -> (Space, &'b [&'a str]) {
    match parts.first().and_then(|name| space(name)) {
        Some(space) => (space, &parts[1..]),
        None => (Space::Generic, parts),
    }
}

/// Bytes of an element: `f32` alone, or `v2`, `v4` and a type, with `n` elements.
fn element(shape: &[&str], n: usize) -> Option<usize> {
    let (wanted, kind) = match shape {
        [kind] => (1, kind),
        ["v2", kind] => (2, kind),
        ["v4", kind] => (4, kind),
        _ => return None,
    };
    bytes(kind).filter(|bytes| n == wanted && bytes * n <= 16)
}

fn atomic(space_name: &str, how: &str, kind: &str) -> Option<(Space, usize, LaneFn)> {
    let function: LaneFn = match (how, kind) {
        ("add" | "min" | "max" | "and" | "or", _) => match lane_op(&[how, kind])? {
            (2, function) => function,
            _ => return None,
        },
        ("inc", "u32") => lane!(|old, most, _| if old as u32 >= most as u32 { 0 } else { old.wrapping_add(1) }),
        ("exch", "b32" | "b64") => lane!(|_, new, _| new),
        ("cas", "b32" | "b64") => lane!(|old, expected, new| if old == expected { new } else { old }),
        _ => return None,
    };
    Some((space(space_name)?, bytes(kind)?, function))
}
