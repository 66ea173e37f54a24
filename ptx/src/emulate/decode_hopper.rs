//! The instructions introduced with sm_90: mbarrier, bulk and tensor copies, wgmma, setmaxnreg, cluster barriers. As in
//! decode.rs, unlisted forms are refused.
use super::op::{Hopper, Left, MmaType, Wgmma};
use super::operand::{Decoded, PtxOperand, PtxSource, address, list, number, register, source, target};
use std::sync::Arc;

pub fn hopper(parts: &[&str], operands: &[PtxOperand]) -> Decoded<Option<Hopper>> {
    match parts[0] {
        "mbarrier" => mbarrier(parts, operands),
        "cp" => bulk(parts, operands),
        "wgmma" => wgmma(parts, operands),
        _ => others(parts, operands),
    }
}

fn mbarrier(parts: &[&str], operands: &[PtxOperand]) -> Decoded<Option<Hopper>> {
    // The defaults, spelled out: release or acquire, within the CTA; expect_tx is `relaxed`.
    let implied = |p: &&str| matches!(*p, "release" | "acquire" | "relaxed" | "cta" | "cluster");
    let plain: Vec<&str> = parts.iter().copied().filter(|p| !implied(p)).collect();
    let [_, what @ .., space @ ("shared" | "shared::cta" | "shared::cluster"), "b64"] = &plain[..] else {
        return Ok(None);
    };
    let (mapped, wide) = (*space == "shared::cluster", parts.contains(&"cluster"));
    // In another CTA one can only arrive, and learns no phase.
    if mapped && (what[0] != "arrive" || operands.first() != Some(&PtxOperand::Nothing)) {
        return Ok(None);
    }
    Ok(Some(match (what, operands) {
        (["init"], [at, count]) => Hopper::MbarrierInit { at: address(at)?, count: source(count)? },
        (["inval"], [at]) => Hopper::MbarrierInvalidate { at: address(at)? },
        (["arrive"], [to, at, count @ ..]) if count.len() < 2 => {
            let count = count.first().map_or(Ok(PtxSource::Immediate(1)), source)?;
            Hopper::Arrive { mapped, wide, to: target(to)?, at: address(at)?, count, expect: None }
        }
        (["arrive", "expect_tx"], [to, at, bytes]) => {
            let count = PtxSource::Immediate(1);
            Hopper::Arrive { mapped, wide, to: target(to)?, at: address(at)?, count, expect: Some(source(bytes)?) }
        }
        (["expect_tx"], [at, bytes]) => Hopper::ExpectTx { at: address(at)?, bytes: source(bytes)? },
        (["try_wait" | "test_wait", parity @ ..], [to, at, phase, hint @ ..])
            if matches!(parity, [] | ["parity"]) && hint.len() <= (what[0] == "try_wait") as usize =>
        {
            let parity = !parity.is_empty();
            Hopper::Wait { wide, to: register(to)?, at: address(at)?, phase: source(phase)?, parity }
        }
        _ => return Ok(None),
    }))
}

fn bulk(parts: &[&str], operands: &[PtxOperand]) -> Decoded<Option<Hopper>> {
    const DONE: &str = "mbarrier::complete_tx::bytes";
    // A cache hint has an operand of its own, the last.
    const HINT: &str = "L2::cache_hint";
    if let ([operands @ .., policy], true) = (operands, parts.contains(&HINT)) {
        let plain: Vec<&str> = parts.iter().copied().filter(|part| *part != HINT).collect();
        let (copy, policy) = (bulk(&plain, operands)?, source(policy)?);
        return Ok(copy.map(|copy| Hopper::Hinted { copy: Box::new(copy), policy }));
    }
    let coordinates = |dimensions: &str, operand: &PtxOperand| -> Decoded<Option<(PtxSource, Vec<PtxSource>)>> {
        let PtxOperand::Tensor(map, at) = operand else { return Err("[map, {coordinates}] expected".into()) };
        let at: Vec<PtxSource> = at.iter().map(source).collect::<Decoded<_>>()?;
        Ok((dimensions == format!("{}d", at.len())).then_some((source(map)?, at)))
    };
    if let ["cp", "reduce", "async", "bulk", "global", "shared::cta", "bulk_group", "add", "f32"] = parts {
        let [to, from, bytes] = operands else { return Ok(None) };
        let (to, from, bytes) = (address(to)?, address(from)?, source(bytes)?);
        return Ok(Some(Hopper::BulkStore { to, from, bytes, add: true }));
    }
    Ok(Some(match (&parts[3..], operands) {
        (["commit_group"], []) => Hopper::BulkCommit,
        (["wait_group"], [left]) => Hopper::BulkWait { left: number(left)?, read: false },
        (["wait_group", "read"], [left]) => Hopper::BulkWait { left: number(left)?, read: true },
        (["shared::cluster" | "shared::cta", "global", DONE], [to, from, bytes, barrier]) => Hopper::BulkLoad {
            to: address(to)?,
            from: address(from)?,
            bytes: source(bytes)?,
            barrier: address(barrier)?,
        },
        (["shared::cluster", "shared::cta", DONE], [to, from, bytes, barrier]) => Hopper::BulkSend {
            to: address(to)?,
            from: address(from)?,
            bytes: source(bytes)?,
            barrier: address(barrier)?,
        },
        (["global", "shared::cta", "bulk_group"], [to, from, bytes]) => {
            Hopper::BulkStore { to: address(to)?, from: address(from)?, bytes: source(bytes)?, add: false }
        }
        (["tensor", dimensions, "shared::cluster" | "shared::cta", "global", DONE], [to, from, barrier])
        | (["tensor", dimensions, "shared::cluster" | "shared::cta", "global", "tile", DONE], [to, from, barrier]) => {
            let Some((map, at)) = coordinates(dimensions, from)? else { return Ok(None) };
            Hopper::TensorLoad { to: address(to)?, map, at, barrier: address(barrier)?, ranks: None }
        }
        (
            ["tensor", dimensions, "shared::cluster", "global", DONE, "multicast::cluster"],
            [to, from, barrier, ranks],
        ) => {
            let Some((map, at)) = coordinates(dimensions, from)? else { return Ok(None) };
            Hopper::TensorLoad { to: address(to)?, map, at, barrier: address(barrier)?, ranks: Some(source(ranks)?) }
        }
        (["tensor", dimensions, "global", "shared::cta", "bulk_group"], [to, from])
        | (["tensor", dimensions, "global", "shared::cta", "tile", "bulk_group"], [to, from]) => {
            let Some((map, at)) = coordinates(dimensions, to)? else { return Ok(None) };
            Hopper::TensorStore { map, at, from: address(from)? }
        }
        _ => return Ok(None),
    }))
}

fn wgmma(parts: &[&str], operands: &[PtxOperand]) -> Decoded<Option<Hopper>> {
    let [_, what, "sync", "aligned", shape @ ..] = parts else { return Ok(None) };
    match (*what, shape, operands) {
        ("fence", [], []) => Ok(Some(Hopper::WgmmaFence)),
        ("commit_group", [], []) => Ok(Some(Hopper::WgmmaCommit)),
        ("wait_group", [], [left]) => Ok(Some(Hopper::WgmmaWait(number(left)?))),
        ("mma_async", [shape, "f32", left, right], [to, a, b, keep, flags @ ..]) if left == right => {
            let kind = match *left {
                "bf16" => MmaType::Bf16,
                "f16" => MmaType::F16,
                _ => return Ok(None),
            };
            let n = shape.strip_prefix("m64n").and_then(|s| s.strip_suffix("k16")).and_then(|n| n.parse().ok());
            let Some(n) = n.filter(|n: &usize| (8..=256).contains(n) && n.is_multiple_of(8)) else { return Ok(None) };
            let registers = |operand: &PtxOperand| list(operand).iter().map(register).collect::<Decoded<Arc<_>>>();
            let to = registers(to)?;
            let a = match a {
                PtxOperand::List(_) => Left::Registers(registers(a)?),
                descriptor => Left::Descriptor(source(descriptor)?),
            };
            let flags: Vec<i64> = flags.iter().map(|f| number(f).map(|f| f as i64)).collect::<Decoded<_>>()?;
            let transposed = match (&a, &flags[..]) {
                (Left::Registers(a), [_, _, b]) if a.len() == 4 => [0, *b],
                (Left::Descriptor(_), [_, _, a, b]) => [*a, *b],
                _ => return Ok(None),
            };
            let scales = [flags[0], flags[1]];
            if to.len() != n / 2 || scales.iter().any(|s| s.abs() != 1) || transposed.iter().any(|t| *t & !1 != 0) {
                return Ok(None);
            }
            let (b, keep) = (source(b)?, source(keep)?);
            let (negate, transposed) = (scales.map(|s| s < 0), transposed.map(|t| t == 1));
            Ok(Some(Hopper::Wgmma(Wgmma { kind, n, to, a, b, keep, negate, transposed })))
        }
        _ => Ok(None),
    }
}

fn others(parts: &[&str], operands: &[PtxOperand]) -> Decoded<Option<Hopper>> {
    Ok(Some(match (parts, operands) {
        (["setmaxnreg", how @ ("inc" | "dec"), "sync", "aligned", "u32"], [count]) => {
            let count = number(count)?;
            if !(24..=256).contains(&count) || !count.is_multiple_of(8) {
                return Err(format!("setmaxnreg takes a multiple of 8 from 24 to 256, not {count}"));
            }
            Hopper::Registers { count, more: *how == "inc" }
        }
        (["prefetch", "tensormap"], [map]) => Hopper::PrefetchMap(address(map)?),
        (["barrier", "cluster", "arrive", how @ ..], []) => match how {
            [] | ["aligned"] | ["release"] | ["release", "aligned"] => Hopper::ClusterArrive { release: true },
            ["relaxed"] | ["relaxed", "aligned"] => Hopper::ClusterArrive { release: false },
            _ => return Ok(None),
        },
        (["barrier", "cluster", "wait"] | ["barrier", "cluster", "wait", "aligned"], []) => Hopper::ClusterWait,
        (["barrier", "cluster", "wait", "acquire"] | ["barrier", "cluster", "wait", "acquire", "aligned"], []) => {
            Hopper::ClusterWait
        }
        _ => return Ok(None),
    }))
}
