//! Removes each waiting, fencing, committing or publishing instruction from the attention kernels, one at a time, and
//! runs their launches: the emulator must detect it, or the results must differ. `budget.txt` lists those that stay
//! undetected, with reasons. The barriers of all other kernels are swept in ../kernels/budget.rs, and all of them are
//! detected.
use super::attention::launch as tile;
use super::attention::reference::{Inputs, Outputs, Shape};
use super::hopper::launch as hopper;
use flatshard_ptx::emulate::FIRST;
use flatshard_ptx::kernels::Variant;
use flatshard_ptx::kernels::attention::sm_80_family;
use std::collections::BTreeMap;
use std::ops::Range;

const BUDGET: &str = include_str!("budget.txt");
/// In order, and drawn. A fault counts as detected if both detect it.
const SCHEDULES: [u64; 2] = [FIRST, FIRST | 1];

/// What is removed: the whole statement, guard included; of a read or an addition, only its ordering.
const OUT: [&str; 18] = [
    "bar.sync",
    "bar.arrive",
    "bar.warp.sync",
    "fence.proxy",
    "fence.mbarrier_init",
    "cp.async.commit_group",
    "cp.async.wait_group",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group",
    "mbarrier.init",
    "mbarrier.arrive",
    "wgmma.fence",
    "wgmma.commit_group",
    "wgmma.wait_group",
    "setmaxnreg",
    "barrier.cluster",
    // Waits that loop: the first answer is taken.
    "@!%done bra             AGAIN",
    "@%in bra                TURN",
];
const WEAKER: [(&str, &str); 2] = [("ld.acquire", "ld.relaxed"), ("red.release", "red.relaxed")];

/// Each fault of a text: its name, "instruction number", the bytes to replace, and the replacement.
fn faults(text: &str) -> Vec<(String, Range<usize>, &'static str)> {
    let mut all = vec![];
    for what in OUT {
        for (n, (at, _)) in text.match_indices(what).enumerate() {
            let start = text[..at].rfind([';', '{', '}', '\n', ':']).map_or(0, |before| before + 1);
            let end = at + text[at..].find(';').unwrap() + 1;
            all.push((format!("{} {n}", what.split([' ', '%']).next_back().unwrap()), start..end, ""));
        }
    }
    for (old, new) in WEAKER {
        all.extend(
            text.match_indices(old).enumerate().map(|(n, (at, _))| (format!("{old} {n}"), at..at + old.len(), new)),
        );
    }
    all
}

/// Sweeps a variant's launch: `run` returns its outputs' bits with a text in place of the variant's. The undetected
/// faults must be the budget's.
fn sweep(name: &str, run: impl Fn(u64, &dyn Fn(String) -> String) -> Option<Vec<u64>>) {
    let text = Variant::by_name(name).unwrap().expand().unwrap();
    let right =
        SCHEDULES.map(|schedule| run(schedule, &|text| text).unwrap_or_else(|| panic!("{name} fails as it is")));
    let all = faults(&text);
    let passes = |(_, range, new): &&(String, Range<usize>, &str)| {
        let planted = |_: String| format!("{}{new}{}", &text[..range.start], &text[range.end..]);
        SCHEDULES.iter().zip(&right).any(|(schedule, right)| run(*schedule, &planted).as_ref() == Some(right))
    };
    let unseen: Vec<&str> = all.iter().filter(passes).map(|(fault, ..)| fault.as_str()).collect();
    let lines = BUDGET.lines().filter(|line| !line.starts_with('#'));
    let of: BTreeMap<&str, Vec<&str>> = lines.fold(BTreeMap::new(), |mut of, line| {
        let (variant, rest) = line.split_once(": ").unwrap_or_else(|| panic!("no variant: {line}"));
        let (faults, reason) = rest.split_once(" -- ").unwrap_or_else(|| panic!("no reason: {line}"));
        assert!(reason.len() > 20, "no reason: {line}");
        of.entry(variant).or_insert_with(Vec::new).extend(faults.split(", "));
        of
    });
    let mut wanted = of.get(name).cloned().unwrap_or_default();
    let mut found = unseen.clone();
    wanted.sort_unstable();
    found.sort_unstable();
    assert!(all.len() >= 5, "{name}: only {} faults to plant", all.len());
    assert!(
        found == wanted,
        "{name}: of {} faults these are unseen: {}\nbudget.txt: {wanted:?}",
        all.len(),
        unseen.join(", ")
    );
}

fn bits(out: &Outputs) -> Vec<u64> {
    [&out.o, &out.lse, &out.dq, &out.dk, &out.dv].into_iter().flatten().map(|x| x.to_bits()).collect()
}

/// Rows that refill each slot of the ring.
fn hopper(stem: &str, head_dim: usize, rows: u32) {
    let name = format!("attention_hopper_{stem}_bf16_{head_dim}");
    let shape = Shape::packed(1, 1, head_dim, &[0, rows]);
    let (x, ones) = (Inputs::new(&shape), vec![1.0; rows as usize]);
    sweep(&name, |schedule, change| {
        let given: Option<[&[f64]; 2]> = if stem == "forward" { None } else { Some([&ones, &ones]) };
        let (plant, alone) = (Some((&name[..], change)), Some(&name[..]));
        let bench = hopper::Bench { plant, alone, ..hopper::Bench::new("bf16", &shape, schedule) };
        bench.run(&x, given, 0.0).ok().map(|(out, _)| bits(&out))
    });
}
#[test]
fn hopper_forward() {
    hopper("forward", 64, 385);
}
/// Both CTAs refill each slot, and take two tiles.
#[test]
fn hopper_forward_of_pairs() {
    let name = "attention_hopper_forward_bf16_128_pair";
    let shape = Shape::packed(2, 1, 128, &[0, 300]);
    let x = Inputs::new(&shape);
    sweep(name, |schedule, change| {
        let plant = Some((name, change));
        let bench = hopper::Bench { plant, ctas: 2, ..hopper::Bench::new("bf16", &shape, schedule) };
        bench.run(&x, None, 0.0).ok().map(|(out, _)| bits(&out))
    });
}
#[test]
fn hopper_backward() {
    hopper("backward", 64, 385);
}
#[test]
fn hopper_queries_of_wide_heads() {
    hopper("dq", 256, 385);
}
#[test]
fn hopper_keys_of_wide_heads() {
    hopper("dk", 256, 200);
    hopper("dv", 256, 200);
}

/// The kernels of sm_80: rows that refill both stages.
#[test]
fn tiles() {
    let (shape, family) = (Shape::packed(1, 1, 64, &[0, 200]), sm_80_family("bf16", 64, 0.0).unwrap());
    let x = Inputs::new(&shape);
    for kernel in [family.forward, family.dq, family.dkv[0]] {
        sweep(kernel.variant, |schedule, change| {
            let plant = &|entry: &str, text: String| if entry == kernel.entry { change(text) } else { text };
            let (dtype, plant, alone) = (tile::DType::Bf16, Some(plant as tile::Plant), Some(kernel.entry));
            let run = tile::Run { family, dtype, shape: &shape, schedule, plant, alone };
            run.run(&x, 0.0).ok().map(|(out, _)| bits(&out))
        });
    }
}
