//! Costs of launches, compared with `budget.txt`; and every barrier of a kernel is necessary. Both for every variant.
use super::cases::{Case, cases};
use super::harness::SCHEDULES;
use flatshard_ptx::emulate::{FIRST, PtxKernel, parse};
use flatshard_ptx::kernels::{Variant, budgeted, variants};
use std::collections::{BTreeMap, BTreeSet};

const BUDGET: &str = include_str!("../budget.txt");
const HEAD: &str = "variant entry shape instructions sectors floor conflicts";

/// Every case with its kernel.
fn prepared() -> Vec<(Case, PtxKernel)> {
    let with_kernel = |case: Case| {
        let mut kernels = case.job.kernels();
        let name = case.job.choose(&kernels).name.clone();
        let at = kernels.iter().position(|k| k.name == name).unwrap();
        (case, kernels.swap_remove(at))
    };
    cases().into_iter().map(with_kernel).collect()
}

/// May move more than a tenth over the minimum (and a few sectors), each for a reason.
fn moves_more(name: &str, shape: &str) -> bool {
    // Rows that are not a multiple of 16 bytes are handled element by element, and a warp's part of one begins
    // within a sector; rows of 5003 f32 do not fit in registers and are read twice. Sorting compares each row with
    // each: its minimum is comparisons. The constants of an update, and the tables of one in blocks, which each CTA
    // reads, show next to a state of few bytes, as do the numbers of xIELU, which each warp reads. A teacher's rows
    // are read twice, for the maxima and for the sums, whose 28 bytes show next to a short row. Gate and up
    // alternate, so a thread reads both halves of a sector one after the other, the second from L1, as with heads of
    // 512 in f32. Each warp of an expansion reads its block's scale and factor, mostly from L1. Routing, factors and
    // biases of experts, products and delta rules read operands several times, from caches, which the emulator does
    // not have; convolutions read the rows in front of a chunk, and each warp the documents.
    let families = [
        "adamw_both",
        "adamw_blocks",
        "balance",
        "clamped_glu",
        "combine_rows",
        "delta",
        "distill",
        "expand",
        "expert_bias",
        "grouped",
        "mamba",
        "qk_norm_rope_f32_512",
        "qk_norm_rope_backward_f32_512",
        "route",
        "scale_chosen",
        "short_conv",
        "xielu",
    ];
    let again = families.iter().any(|family| name.starts_with(family));
    matches!(shape, "7x257" | "4x5003") || name == "embed_sort" || again
}
/// May have bank conflicts: once per CTA, when it adds its warps' sums; in limbs chosen by the exponents of the data;
/// in tables searched for it; and once per block, when threads sum rows of a square.
fn meets_banks_twice(name: &str) -> bool {
    let families = ["qk_norm_rope_backward", "adamw_blocks", "delta_blocks", "mamba_blocks"];
    families.iter().any(|family| name.starts_with(family)) || name == "sum_squares"
}

#[test]
fn every_launch_matches_its_budget() {
    let mut lines = vec![];
    for (case, kernel) in prepared() {
        let variant = &case.job.variant;
        let run = |schedule: u64| match case.job.run(&kernel, schedule) {
            Ok((counts, _)) => counts,
            Err(report) => panic!("{variant}: {report}"),
        };
        let counts = run(SCHEDULES[0]);
        assert_eq!(run(SCHEDULES[1]), counts, "{variant} under schedule {}", SCHEDULES[1]);
        let (instructions, sectors) = (counts.instructions, counts.global_sectors);
        let (floor, conflicts) = (case.floor.div_ceil(32), counts.bank_conflicts);
        let (most, shape) = (floor as f64 * 1.1 + 8.0, case.shape);
        assert!(
            sectors as f64 <= most || moves_more(variant, shape),
            "{variant} {shape}: {sectors} sectors, floor {floor}"
        );
        assert!(conflicts == 0 || meets_banks_twice(variant), "{variant} {shape}: {conflicts} conflicts");
        lines.push(format!("{variant} {} {} {instructions} {sectors} {floor} {conflicts}", kernel.name, case.shape));
    }
    lines.sort();
    let budget: Vec<&str> = BUDGET.lines().filter(|l| !l.starts_with('#')).collect();
    let said = format!("{HEAD}\n{}\n", lines.join("\n"));
    assert_eq!(budget[0], HEAD);
    assert!(budget[1..] == lines, "the costs have changed; if intended, set tests/budget.txt to:\n{said}");
}

#[test]
fn every_variant_has_a_case_and_every_source_a_variant() {
    let names: BTreeSet<&str> = variants().map(|v| v.name).collect();
    assert_eq!(names.len(), variants().count(), "two variants of one name");
    let mut entries = BTreeSet::new();
    for variant in budgeted() {
        for kernel in parse(variant.file, &variant.expand().unwrap()).unwrap() {
            entries.insert((variant.name.to_string(), kernel.name));
        }
    }
    let tried: BTreeSet<_> = prepared().into_iter().map(|(case, kernel)| (case.job.variant, kernel.name)).collect();
    assert_eq!(tried, entries);
    // A source without an entry point is only for inclusion.
    let used: BTreeSet<String> = variants().map(|v| v.file.to_string()).collect();
    for file in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels")).unwrap() {
        let file = file.unwrap();
        let text = std::fs::read_to_string(file.path()).unwrap();
        let name = file.file_name().into_string().unwrap();
        assert!(text.starts_with("// "), "{name} does not begin with a description");
        assert_eq!(text.contains(".entry"), used.contains(&name), "{name} does not match the list of variants");
    }
}

/// Removes each barrier of each kernel: the emulator must detect it in one of the kernel's cases, under every schedule,
/// or the barrier is useless.
#[test]
fn every_barrier_is_needed_and_its_loss_is_noticed() {
    let mut by_entry: BTreeMap<(String, String), Vec<Case>> = BTreeMap::new();
    for (case, kernel) in prepared() {
        by_entry.entry((case.job.variant.clone(), kernel.name)).or_default().push(case);
    }
    let mut tried = 0;
    for ((name, entry), cases) in &by_entry {
        let variant = Variant::by_name(name).unwrap();
        let text = variant.expand().unwrap();
        // The entry point's own text: up to the next `.entry`.
        let start = text.find(&format!(".entry {entry}(")).unwrap();
        let end = text[start + 1..].find(".entry").map_or(text.len(), |next| start + 1 + next);
        for barrier in ["bar.sync", "bar.warp.sync"] {
            for (at, _) in text[start..end].match_indices(barrier) {
                let at = start + at;
                let stop = at + text[at..].find(';').unwrap() + 1;
                let without = format!("{}{}", &text[..at], &text[stop..]);
                let kernels = parse(variant.file, &without).unwrap();
                let kernel = kernels.iter().find(|k| k.name == *entry).unwrap();
                let line = text[..at].matches('\n').count();
                let noticed = |case: &Case| SCHEDULES.iter().all(|s| case.job.run(kernel, s | FIRST).is_err());
                assert!(cases.iter().any(noticed), "{name} without its barrier ({line} of the expansion) passes");
                tried += 1;
            }
        }
    }
    assert!(tried >= 40, "only {tried} barriers tried");
}
