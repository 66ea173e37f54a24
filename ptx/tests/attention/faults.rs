//! Faults planted into the tile kernels: each is detected under every schedule.
use super::launch::{DType, Run};
use super::reference::{Inputs, Shape, attention};
use flatshard_ptx::emulate::{Argument, FindingKind, GlobalMemory, KernelLaunch, LaunchReport, parse};
use flatshard_ptx::kernels::Variant;
use flatshard_ptx::kernels::attention::{AttentionFamily, sm_80_family};

const SCHEDULES: [u64; 3] = [0, 1, 2];
const ENTRIES: [&str; 3] = ["attention_forward", "attention_dq", "attention_dkv"];

fn family() -> &'static AttentionFamily {
    sm_80_family("bf16", 64, 0.0).unwrap()
}
/// Enough columns to refill both stages.
fn shape() -> Shape {
    Shape::packed(1, 1, 64, &[0, 200])
}

/// Without the `index`-th `what` of an entry point; `None` if there is none.
fn without(entry: &str, what: &str, index: usize, schedule: u64) -> Option<Result<(), LaunchReport>> {
    let found = std::cell::Cell::new(false);
    let plant = |name: &str, text: String| {
        let Some((at, _)) = text.match_indices(what).nth(index).filter(|_| name == entry) else { return text };
        found.set(true);
        let end = at + text[at..].find(';').unwrap() + 1;
        format!("{}{}", &text[..at], &text[end..])
    };
    let (shape, plant) = (shape(), Some(&plant as _));
    let run = Run { family: family(), dtype: DType::Bf16, shape: &shape, schedule, plant, alone: None };
    let outcome = run.run(&Inputs::new(&shape), 0.0).map(|_| ());
    found.get().then_some(outcome)
}

#[test]
fn a_copy_that_is_not_waited_for_is_named() {
    for entry in ENTRIES {
        let report = without(entry, "cp.async.wait_group", 0, 1).unwrap().unwrap_err();
        assert!(report.has(FindingKind::InFlight), "{report}");
        assert!(report.to_string().contains("attention_tile.ptx"), "{report}");
    }
}

/// Chunks swapped on one side only: wrong numbers, or bank conflicts.
#[test]
fn another_swizzle_is_wrong_or_slow() {
    let (shape, schedule) = (shape(), 0);
    let x = Inputs::new(&shape);
    let exact = attention(&shape, &x, &|v| v);
    let run = |plant: Option<super::launch::Plant>| {
        let run = Run { family: family(), dtype: DType::Bf16, shape: &shape, schedule, plant, alone: None };
        let (out, costs) = run.run(&x, 0.0).unwrap_or_else(|report| panic!("{report}"));
        let wrong = out.o.iter().zip(&exact.o).any(|(a, b)| (a - b).abs() > 0.1);
        (wrong, costs.iter().map(|(_, counts)| counts.bank_conflicts).sum::<u64>())
    };
    assert_eq!(run(None), (false, 0));
    // The swizzles in order: of copies, of fragments, of those that are B of rows, of results being written.
    let swizzle = |which: Option<usize>| {
        move |entry: &str, mut text: String| {
            let places: Vec<usize> = text.match_indices(", 7;").map(|(at, _)| at).collect();
            assert_eq!(places.len() >= 4, entry != "attention_delta", "{entry}: swizzles");
            for (i, at) in places.iter().enumerate().filter(|_| entry == "attention_forward") {
                if which.is_none_or(|which| which == i) {
                    text.replace_range(*at..at + 4, ", 3;");
                }
            }
            text
        }
    };
    assert!(run(Some(&swizzle(Some(0)))).0, "copies alone");
    assert!(run(Some(&swizzle(Some(1)))).0, "fragments alone");
    assert!(run(Some(&swizzle(Some(2)))).0, "fragments of rows alone");
    let (wrong, conflicts) = run(Some(&swizzle(None)));
    assert!(!wrong && conflicts > 100, "four ways in place of eight: {conflicts} conflicts");
}

/// A thread that leaves its warp before an mma: the emulator names the lanes.
#[test]
fn a_lane_that_leaves_is_named() {
    let plant = |entry: &str, text: String| {
        let at = text.find("LOOP:").filter(|_| entry == "attention_forward");
        at.map_or(text.clone(), |at| format!("{}setp.eq.u32 %in, %lane, 5;\n@%in ret;\n{}", &text[..at], &text[at..]))
    };
    let shape = shape();
    let run =
        Run { family: family(), dtype: DType::Bf16, shape: &shape, schedule: 1, plant: Some(&plant), alone: None };
    let report = run.run(&Inputs::new(&shape), 0.0).map(|_| ()).unwrap_err();
    assert!(report.has(FindingKind::Divergent) || report.has(FindingKind::Deadlock), "{report}");
}

/// The merge writes an lse that all lanes have read before: without its barrier that is a race.
#[test]
fn a_merge_without_its_barrier_is_noticed() {
    let merge = Variant::by_name("attention_merge").unwrap();
    let run = |text: &str, schedule| {
        let kernels = parse(merge.file, text).unwrap();
        let mut memory = GlobalMemory::new();
        let f32s = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let (n, dim) = (5, 40);
        let pointers = [("o_pass", n * dim), ("lse_pass", n), ("o", n * dim), ("lse", n)]
            .map(|(name, len)| Argument::Pointer(memory.upload(name, &f32s(&vec![0.5; len]))));
        let shape = [n, 1, dim].map(|n| Argument::U32(n as u32));
        let arguments = &[&pointers[..], &shape].concat();
        let (grid, block) = ([2, 1, 1], [128, 1, 1]);
        let launch = KernelLaunch { kernel: &kernels[0], grid, block, dynamic_shared: 0, arguments, schedule };
        launch.run(&mut memory).map(|_| ())
    };
    let text = merge.expand().unwrap();
    let at = text.find("bar.warp.sync").unwrap();
    let without = format!("{}{}", &text[..at], &text[at + text[at..].find(';').unwrap() + 1..]);
    for schedule in SCHEDULES {
        run(&text, schedule).unwrap_or_else(|report| panic!("{report}"));
        assert!(run(&without, schedule).unwrap_err().has(FindingKind::Race));
    }
}
