//! What a launch costs, against `budget.txt`; and that no kernel has a barrier too many or too few. Both for every variant.
use crate::cases::CASES;
use crate::harness::SCHEDULES;
use flatshard_ptx::emulate::parse;
use flatshard_ptx::kernels::{VARIANTS, Variant, variants};
use std::collections::BTreeSet;

const BUDGET: &str = include_str!("../budget.txt");
const HEAD: &str = "variant entry shape instructions sectors floor conflicts";

#[test]
fn every_launch_costs_what_the_budget_says() {
    let mut lines = vec![];
    for case in CASES {
        let variant = Variant::by_name(case.variant).unwrap();
        let kernels = parse(variant.file, &variant.expand().unwrap()).unwrap();
        let kernel = kernels.iter().find(|k| k.name == case.entry).unwrap();
        let counts = case.run(kernel, SCHEDULES[0]).unwrap_or_else(|report| panic!("{report}"));
        for schedule in &SCHEDULES[1..] {
            let again = case.run(kernel, *schedule).unwrap_or_else(|report| panic!("{report}"));
            assert_eq!(again, counts, "{} under schedule {schedule}", case.variant);
        }
        let (instructions, sectors) = (counts.instructions, counts.global_sectors);
        let (floor, conflicts) = (case.floor.div_ceil(32), counts.bank_conflicts);
        lines.push(format!(
            "{} {} {} {instructions} {sectors} {floor} {conflicts}",
            case.variant, case.entry, case.shape
        ));
    }
    let budget: Vec<&str> = BUDGET.lines().filter(|l| !l.starts_with('#')).collect();
    let said = format!("{HEAD}\n{}\n", lines.join("\n"));
    assert_eq!(budget[0], HEAD);
    assert!(budget[1..] == lines, "the costs have changed; if for good, tests/budget.txt is to say:\n{said}");
}

#[test]
fn every_variant_has_a_case_and_every_source_a_variant() {
    let names: BTreeSet<&str> = VARIANTS.iter().map(|v| v.name).collect();
    assert_eq!(names.len(), VARIANTS.len(), "two variants of one name");
    assert_eq!(CASES.iter().map(|c| c.variant).collect::<BTreeSet<_>>(), names);
    let mut entries = BTreeSet::new();
    for variant in VARIANTS {
        for kernel in parse(variant.file, &variant.expand().unwrap()).unwrap() {
            entries.insert((variant.name, kernel.name));
        }
    }
    assert_eq!(CASES.iter().map(|c| (c.variant, c.entry.to_string())).collect::<BTreeSet<_>>(), entries);
    // A source without an entry is there to be included.
    let used: BTreeSet<String> = variants().map(|v| v.file.to_string()).collect();
    for file in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels")).unwrap() {
        let file = file.unwrap();
        let text = std::fs::read_to_string(file.path()).unwrap();
        let name = file.file_name().into_string().unwrap();
        assert!(text.starts_with("// "), "{name} does not open with what it is");
        assert_eq!(text.contains(".entry"), used.contains(&name), "{name} and the list of variants");
    }
}

/// Takes out each barrier of each kernel in turn: the emulator must notice, or the barrier is of no use.
#[test]
fn every_barrier_is_needed_and_its_loss_is_noticed() {
    let mut tried = 0;
    for case in CASES {
        let variant = Variant::by_name(case.variant).unwrap();
        let text = variant.expand().unwrap();
        // The entry's own text: from its .entry to the next.
        let start = text.find(&format!(".entry {}(", case.entry)).unwrap();
        let end = text[start + 1..].find(".entry").map_or(text.len(), |next| start + 1 + next);
        for barrier in ["bar.sync", "bar.warp.sync"] {
            for (at, _) in text[start..end].match_indices(barrier) {
                let at = start + at;
                let stop = at + text[at..].find(';').unwrap() + 1;
                let without = format!("{}{}", &text[..at], &text[stop..]);
                let kernels = parse(variant.file, &without).unwrap();
                let kernel = kernels.iter().find(|k| k.name == case.entry).unwrap();
                tried += 1;
                for schedule in SCHEDULES {
                    let line = text[..at].matches('\n').count();
                    let caught = case.run(kernel, schedule).is_err();
                    assert!(caught, "{} without its barrier ({line} of the expansion) passes", case.variant);
                }
            }
        }
    }
    assert!(tried >= 10, "only {tried} barriers tried");
}
