//! Costs of launches of the sm_90a kernels, compared with `budget.txt`: the fewest multiply-adds that whole tiles
//! allow, no bank conflicts, sectors near the minimum. For every variant of the family.
use super::launch::Bench;
use super::reference::{Inputs, Shape, Sight};
use flatshard_ptx::emulate::{FindingKind, LaunchCounts};
use flatshard_ptx::kernels::attention::AttentionKernel;
use flatshard_ptx::kernels::attention_hopper::{Backward, Fused, HopperFamily, TiledKernel, sm_90a_family};
use std::ops::Range;

const BUDGET: &str = include_str!("budget.txt");
const HEAD: &str = "variant shape instructions sectors floor conflicts multiply-adds";

/// Column tiles that any row of a row tile attends to, summed over row tiles; and the rows that their copies load:
/// whole tiles, up to the last existing row. `whole`: column tiles start at a multiple of their size.
fn copied(
    ranges: &[Range<u32>],
    TiledKernel { kernel, columns }: &TiledKernel,
    last: usize,
    whole: bool,
) -> (u64, u64) {
    let columns = *columns as usize;
    let starts = ranges.chunks(kernel.rows as usize).flat_map(|tile| {
        let (start, end) = (tile[0].start as usize, tile[tile.len() - 1].end as usize);
        (if whole { start / columns * columns } else { start }..end).step_by(columns)
    });
    starts.fold((0, 0), |(tiles, rows), start| (tiles + 1, rows + (last - start).min(columns) as u64))
}

/// One line of the budget per launch.
fn costs(dtype: &str, label: &str, shape: &Shape) -> Vec<String> {
    let all = sm_90a_family(dtype, shape.head_dim, shape.softcap as f32).unwrap();
    let family = &HopperFamily { paired: None, ..*all };
    let bench = Bench { family: *family, ..Bench::new(dtype, shape, 0) };
    let x = Inputs::new(shape);
    let (queries, keys) = (shape.rows().0.len() as u64, shape.rows().1.len() as u64);
    let ones = vec![1.0; shape.heads * queries as usize];
    let run = |given| bench.run(&x, given, 0.0).unwrap_or_else(|report| panic!("{report}")).1;
    let pass = matches!(shape.sight, Sight::Pass { .. });
    let (heads, kv_heads) = (shape.heads as u64, shape.kv_heads as u64);
    let dim = [64, 96, 128, 256].into_iter().find(|d| *d >= shape.head_dim as u64).unwrap();
    let row = 2 * shape.head_dim as u64;
    // A pass adds f32 gradients in place, and assigns f32 outputs.
    let (out, gradient) = if pass { (2 * row, 4 * row) } else { (row, row) };
    // Query heads loop over a key head: all of them attend to each tile.
    let seen = |tiles: &TiledKernel, of: usize, whole| {
        let last = if of == 1 { queries } else { keys };
        let (count, rows) = copied(&shape.tables()[of], tiles, last as usize, whole);
        (heads * count * tiles.kernel.rows as u64 * tiles.columns as u64, count, rows)
    };
    // Multiply-adds, and the bytes that must move: rows in and out once, two matrices of each tile's rows, 4 bytes per
    // row of each sum. Products per tile: forward S and O; dq S, dP and dQ; dkv S, dP, dV and dK.
    let forward = |tiles: &TiledKernel, cluster: u64| {
        let (pairs, _, rows) = seen(tiles, 0, false);
        (2 * dim * pairs, heads * queries * (row + out + 4) + heads / cluster * 2 * row * rows)
    };
    let of_queries = |tiles: &TiledKernel| {
        let (pairs, _, rows) = seen(tiles, 0, false);
        (3 * dim * pairs, heads * (queries * (2 * row + gradient + 8) + 2 * row * rows))
    };
    let of_keys = |tiles: &TiledKernel| {
        let (pairs, _, rows) = seen(tiles, 1, false);
        match tiles.kernel.variant {
            v if v.contains("_dk_") => (3 * dim * pairs, keys * (2 * row + gradient) + heads * (2 * row + 8) * rows),
            _ => (2 * dim * pairs, keys * (row + gradient) + heads * (2 * row + 4) * rows),
        }
    };
    let mut wanted = vec![(family.forward.kernel, forward(&family.forward, 1))];
    match &family.backward {
        Backward::Apart { dq, dkv } => {
            wanted.push((dq.kernel, of_queries(dq)));
            wanted.extend(dkv.iter().map(|tiles| (tiles.kernel, of_keys(tiles))));
        }
        Backward::Fused(Fused { tiles, finish, sum }) => {
            let (pairs, count, rows) = seen(tiles, 1, true);
            // dQ in two whole halves; and each CTA computes the last tile's scores once more.
            let ctas = kv_heads * keys.div_ceil(tiles.kernel.rows as u64);
            let again = ctas * (tiles.kernel.rows * tiles.columns) as u64 * dim;
            let sums = 4 * *sum as u64;
            let bytes = keys * 2 * (row + gradient) + heads * ((2 * row + 8) * rows + sums * count);
            wanted.push((tiles.kernel, ((4 * dim + dim.next_multiple_of(64)) * pairs + again, bytes)));
            let tiles = queries.div_ceil(tiles.columns as u64);
            wanted.push((*finish, (0, heads * (tiles * sums + queries * gradient))));
        }
    }
    let counts = run(None).into_iter().chain(run(Some([&ones, &ones])));
    let line = |(variant, counts): (&str, LaunchCounts), kernel: AttentionKernel, products: u64, bytes: u64| {
        assert_eq!(variant, kernel.variant);
        assert_eq!(counts.multiply_adds, products, "{variant}: tiles");
        assert_eq!(counts.bank_conflicts, 0, "{variant}");
        let LaunchCounts { instructions, global_sectors: sectors, bank_conflicts: conflicts, .. } = counts;
        let floor = bytes / 32;
        assert!(sectors as f64 <= 1.1 * floor as f64, "{variant}: {sectors} sectors, floor {floor}");
        format!("{variant} {label} {instructions} {sectors} {floor} {conflicts} {}", counts.multiply_adds)
    };
    let mut lines: Vec<String> = wanted
        .into_iter()
        .zip(counts)
        .map(|((kernel, (products, bytes)), counts)| line(counts, kernel, products, bytes))
        .collect();
    // Clusters copy keys and values once for two heads.
    if let (tiles, cluster @ 2) = all.forward_of(shape.heads, shape.kv_heads) {
        let bench = Bench { ctas: 2, ..Bench::new(dtype, shape, 0) };
        let counts = bench.run(&x, None, 0.0).unwrap_or_else(|report| panic!("{report}")).1;
        let (products, bytes) = forward(tiles, cluster.into());
        lines.insert(1, line(counts[0], tiles.kernel, products, bytes));
    }
    lines
}

#[test]
fn launch_costs_match_the_budget() {
    let window = |head_dim| Shape { window: 150, ..Shape::packed(2, 1, head_dim, &[0, 30, 300]) };
    let mut lines = vec![];
    for dtype in ["bf16", "f16"] {
        for head_dim in [64, 96, 128, 256] {
            lines.extend(costs(dtype, "300", &window(head_dim)));
        }
    }
    for head_dim in [128, 256] {
        lines.extend(costs("bf16", "300", &Shape { softcap: 30.0, ..window(head_dim) }));
    }
    // 128 queries over 512 keys that all of them attend to.
    let sight = Sight::Pass { cu_seqlens: vec![0, 640], queries: (512..640).collect(), keys: (0..512).collect() };
    lines.extend(costs("bf16", "128x512-pass", &Shape { sight, ..Shape::packed(1, 1, 128, &[]) }));
    let budget: Vec<&str> = BUDGET.lines().filter(|l| !l.starts_with('#')).collect();
    assert_eq!(budget.first(), Some(&HEAD));
    let said = lines.join("\n");
    assert!(budget[1..] == lines, "the costs have changed; if intended, set budget.txt to:\n{HEAD}\n{said}\n");
}

/// Shared memory is what the kernel uses plus alignment padding for an array that does not start at a multiple of 1024,
/// as here: 72 bytes less are out of bounds. They are the last mbarrier, or a number of the last slot.
#[test]
fn shared_memory_is_what_the_kernel_uses() {
    for head_dim in [64, 96, 128, 256] {
        let family = *sm_90a_family("bf16", head_dim, 0.0).unwrap();
        let less = |tiles: &TiledKernel| {
            // The last slot of the values' gradient has no numbers.
            let idle = if tiles.kernel.variant.contains("_dv_") { 256 } else { 0 };
            let shared = tiles.kernel.shared;
            assert!(shared <= 227 << 10, "{}: exceeds the limit of a CTA on sm_90", tiles.kernel.variant);
            TiledKernel { kernel: AttentionKernel { shared: shared - 1024 - idle - 72, ..tiles.kernel }, ..*tiles }
        };
        let mut tight = vec![HopperFamily { forward: less(&family.forward), ..family }];
        let mut backward = |backward| tight.push(HopperFamily { backward, ..family });
        match family.backward {
            Backward::Fused(fused) => backward(Backward::Fused(Fused { tiles: less(&fused.tiles), ..fused })),
            Backward::Apart { dq, dkv } => {
                backward(Backward::Apart { dq: less(&dq), dkv });
                for tiles in dkv {
                    backward(Backward::Apart { dq, dkv: Box::leak(Box::new([less(tiles)])) });
                }
            }
        }
        let shape = Shape::packed(1, 1, head_dim, &[0, 130]);
        let (x, ones) = (Inputs::new(&shape), vec![1.0; 130]);
        for (i, family) in tight.into_iter().enumerate() {
            let bench = Bench { family, ..Bench::new("bf16", &shape, 0) };
            let given: Option<[&[f64]; 2]> = if i == 0 { None } else { Some([&ones, &ones]) };
            let report = bench.run(&x, given, 0.0).map(|_| ()).unwrap_err();
            assert!(report.has(FindingKind::OutOfBounds), "{head_dim}: {report}");
        }
    }
}
