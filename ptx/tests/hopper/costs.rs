//! What launches of the sm_90a kernels cost, against `budget.txt`: the least number of multiply-adds that whole tiles allow, no
//! conflicts in shared memory, sectors near the floor. For every variant of the family.
use crate::launch::Bench;
use crate::reference::{Inputs, Shape, Sight};
use flatshard_ptx::emulate::{Counts, Kind};
use flatshard_ptx::kernels::attention::Kernel;
use flatshard_ptx::kernels::attention_hopper::{Family, Tiles, sm_90a_family};
use std::ops::Range;

const BUDGET: &str = include_str!("budget.txt");
const HEAD: &str = "variant shape instructions sectors floor conflicts multiply-adds";

/// Products of a tile: forward S and O; dq S, dP and dQ; dkv S, dP, dV and dK.
fn products(kernel: &Kernel) -> u64 {
    let part = ["_dk_", "_dv_"].map(|part| kernel.variant.contains(part));
    match (kernel.entry, part) {
        ("attention_forward", _) | (_, [_, true]) => 2,
        ("attention_dq", _) | (_, [true, _]) => 3,
        _ => 4,
    }
}

/// Tiles of columns that any row of a tile of rows sees, over all of them; and the rows that their copies bring: whole tiles, up
/// to the last row that there is.
fn copied(ranges: &[Range<u32>], Tiles { kernel, columns }: &Tiles, last: usize) -> (u64, u64) {
    let starts = ranges
        .chunks(kernel.rows as usize)
        .flat_map(|tile| (tile[0].start as usize..tile[tile.len() - 1].end as usize).step_by(*columns as usize));
    starts.fold((0, 0), |(tiles, rows), start| (tiles + 1, rows + (last - start).min(*columns as usize) as u64))
}

/// A line of the budget for each launch.
fn costs(dtype: &str, label: &str, shape: &Shape) -> Vec<String> {
    let family = sm_90a_family(dtype, shape.head_dim).unwrap();
    let bench = Bench::new(dtype, shape, 0);
    let x = Inputs::new(shape);
    let (queries, keys) = (shape.rows().0.len() as u64, shape.rows().1.len() as u64);
    let ones = vec![1.0; shape.heads * queries as usize];
    let run = |given| bench.run(&x, given, 0.0).unwrap_or_else(|report| panic!("{report}")).1;
    let launched = [&family.forward, &family.dq].into_iter().chain(family.dkv);
    let counts = run(None).into_iter().chain(run(Some([&ones, &ones])));
    let pass = matches!(shape.sight, Sight::Pass { .. });
    let line = |(tiles, (variant, counts)): (&Tiles, (&str, Counts))| {
        let kernel = &tiles.kernel;
        assert_eq!(variant, kernel.variant);
        let turned = kernel.entry == "attention_dkv";
        let last = if turned { queries } else { keys };
        let (count, rows) = copied(&shape.tables()[turned as usize], tiles, last as usize);
        // Heads of queries go over a head of keys: all of them see each tile.
        let (heads, products) = (shape.heads as u64, products(kernel));
        let dim = [64, 96, 128, 256].into_iter().find(|d| *d >= shape.head_dim as u64).unwrap();
        let tile = kernel.rows as u64 * tiles.columns as u64 * dim;
        assert_eq!(counts.multiply_adds, heads * count * tile * products, "{variant}: tiles");
        assert_eq!(counts.bank_conflicts, 0, "{variant}");
        let row = 2 * shape.head_dim as u64;
        // A pass adds f32 gradients to what is there, and assigns f32 outputs.
        let (out, gradient) = if pass { (2 * row, 4 * row) } else { (row, row) };
        // Rows in and out once, two matrices of each tile's rows, 4 bytes a row of each sum: lse, delta.
        let floor = match (kernel.entry, variant) {
            ("attention_forward", _) => heads * (queries * (row + out + 4) + 2 * row * rows),
            ("attention_dq", _) => heads * (queries * (2 * row + gradient + 8) + 2 * row * rows),
            (_, v) if v.contains("_dk_") => keys * (2 * row + gradient) + heads * (2 * row + 8) * rows,
            (_, v) if v.contains("_dv_") => keys * (row + gradient) + heads * (2 * row + 4) * rows,
            _ => keys * 2 * (row + gradient) + heads * (2 * row + 8) * rows,
        } / 32;
        let sectors = counts.global_sectors;
        assert!(sectors as f64 <= 1.1 * floor as f64, "{variant}: {sectors} sectors, floor {floor}");
        let (instructions, conflicts) = (counts.instructions, counts.bank_conflicts);
        format!("{variant} {label} {instructions} {sectors} {floor} {conflicts} {}", counts.multiply_adds)
    };
    launched.zip(counts).map(line).collect()
}

#[test]
fn launches_cost_what_the_budget_says() {
    let window = |head_dim| Shape { window: 150, ..Shape::packed(2, 1, head_dim, &[0, 30, 300]) };
    let mut lines = vec![];
    for dtype in ["bf16", "f16"] {
        for head_dim in [64, 96, 128, 256] {
            lines.extend(costs(dtype, "300", &window(head_dim)));
        }
    }
    lines.extend(costs("bf16", "300-capped", &Shape { softcap: 30.0, ..window(128) }));
    // 128 queries over 512 keys that all of them see.
    let sight = Sight::Pass { cu_seqlens: vec![0, 640], queries: (512..640).collect(), keys: (0..512).collect() };
    lines.extend(costs("bf16", "128x512-pass", &Shape { sight, ..Shape::packed(1, 1, 128, &[]) }));
    let budget: Vec<&str> = BUDGET.lines().filter(|l| !l.starts_with('#')).collect();
    assert_eq!(budget.first(), Some(&HEAD));
    let said = lines.join("\n");
    assert!(budget[1..] == lines, "the costs have changed; if for good, budget.txt is to say:\n{HEAD}\n{said}\n");
}

/// Shared memory is what the kernel uses, and what is lost where the array starts on no multiple of 1024, as it does here: 72 bytes
/// less than that are out of bounds. They are the last mbarrier, or a number of the last place.
#[test]
fn shared_memory_is_what_the_kernel_uses() {
    for head_dim in [64, 96, 128, 256] {
        let family = *sm_90a_family("bf16", head_dim).unwrap();
        let less = |tiles: &Tiles| {
            // The last place of the values' gradient has no numbers.
            let idle = if tiles.kernel.variant.contains("_dv_") { 256 } else { 0 };
            let shared = tiles.kernel.shared;
            assert!(shared <= 227 << 10, "{}: more than a CTA of sm_90 may have", tiles.kernel.variant);
            Tiles { kernel: Kernel { shared: shared - 1024 - idle - 72, ..tiles.kernel }, ..*tiles }
        };
        let mut tight =
            vec![Family { forward: less(&family.forward), ..family }, Family { dq: less(&family.dq), ..family }];
        for tiles in family.dkv {
            tight.push(Family { dkv: Box::leak(Box::new([less(tiles)])), ..family });
        }
        let shape = Shape::packed(1, 1, head_dim, &[0, 130]);
        let (x, ones) = (Inputs::new(&shape), vec![1.0; 130]);
        for (i, family) in tight.into_iter().enumerate() {
            let bench = Bench { family, ..Bench::new("bf16", &shape, 0) };
            let given: Option<[&[f64]; 2]> = if i == 0 { None } else { Some([&ones, &ones]) };
            let report = bench.run(&x, given, 0.0).map(|_| ()).unwrap_err();
            assert!(report.has(Kind::OutOfBounds), "{head_dim}: {report}");
        }
    }
}
