//! Costs of launches, compared with `budget.txt`: the fewest multiply-adds that whole tiles allow, no bank conflicts,
//! sectors near the minimum. For every variant of the family.
use super::launch::{DType, Run};
use super::reference::{Inputs, Shape};
use flatshard_ptx::kernels::attention::{AttentionKernel, sm_80_family};
use std::ops::Range;

const BUDGET: &str = include_str!("budget.txt");
const HEAD: &str = "variant instructions sectors floor conflicts multiply-adds";

/// COLUMNS of a kernel's source, and products per tile: forward S and O; dq S, dP and dQ; dkv S, dP, dV and dK.
fn tiles(kernel: &AttentionKernel, head_dim: usize) -> (usize, u64) {
    let part = ["_dk_", "_dv_"].map(|part| kernel.variant.contains(part));
    match (kernel.entry, part) {
        ("attention_forward", _) => ([64, 64, 48, 32][index(head_dim)], 2),
        ("attention_dq", _) => ([64, 32, 32, 32][index(head_dim)], 3),
        (_, [true, _]) => (32, 3),
        (_, [_, true]) => (32, 2),
        _ => ([32, 64, 64, 32][index(head_dim)], 4),
    }
}
fn index(head_dim: usize) -> usize {
    [64, 96, 128, 256].iter().position(|d| *d == head_dim).unwrap()
}

/// Column tiles that any row of a row tile attends to, summed over row tiles; and the rows of these column tiles.
fn seen(ranges: &[Range<u32>], rows: usize, columns: usize) -> (u64, u64) {
    let of_tile = |tile: &[Range<u32>]| (tile[tile.len() - 1].end - tile[0].start) as usize;
    let tiles = ranges.chunks(rows).map(|tile| of_tile(tile).div_ceil(columns) as u64).sum();
    (tiles, ranges.chunks(rows).map(|tile| of_tile(tile) as u64).sum())
}

#[test]
fn launch_costs_match_the_budget() {
    let mut lines = vec![];
    for dtype in [DType::Bf16, DType::F16] {
        for (head_dim, softcap) in [(64, 0.0), (96, 0.0), (128, 0.0), (256, 0.0), (128, 30.0), (256, 30.0)] {
            let family = sm_80_family(dtype.name(), head_dim, softcap as f32).unwrap();
            let shape = Shape { window: 150, softcap, ..Shape::packed(2, 1, head_dim, &[0, 30, 300]) };
            let run = Run { family, dtype, shape: &shape, schedule: 0, plant: None, alone: None };
            let (_, costs) = run.run(&Inputs::new(&shape), 0.0).unwrap_or_else(|report| panic!("{report}"));
            for (kernel, counts) in costs.iter().filter(|(kernel, _)| kernel.entry != "attention_delta") {
                let (columns, products) = tiles(kernel, head_dim);
                let turned = kernel.entry == "attention_dkv";
                let (tiles, rows_seen) = seen(&shape.tables()[turned as usize], kernel.rows as usize, columns);
                // Two query heads per key head: both attend to each tile.
                let tile = (kernel.rows as usize * columns * head_dim) as u64;
                assert_eq!(counts.multiply_adds, 2 * tiles * tile * products, "{}: tiles", kernel.variant);
                assert_eq!(counts.bank_conflicts, 0, "{}", kernel.variant);
                // Rows in and out once (dq and o as wide as q), two matrices of each column attended to, 4 or 8 bytes
                // of sums.
                let (row, n) = (2 * head_dim as u64, 300);
                let floor = match kernel.entry {
                    "attention_forward" => 2 * (2 * n * row + 4 * n) + 2 * (2 * row * rows_seen),
                    "attention_dq" => 2 * (3 * n * row + 8 * n) + 2 * (2 * row * rows_seen),
                    // Keys, values and their gradients: as many as there are products.
                    _ => products * n * row + 2 * (2 * row + 8) * rows_seen,
                } / 32;
                let sectors = counts.global_sectors;
                assert!(sectors as f64 <= 1.1 * floor as f64, "{}: {sectors} sectors, floor {floor}", kernel.variant);
                let (instructions, conflicts) = (counts.instructions, counts.bank_conflicts);
                let products = counts.multiply_adds;
                lines.push(format!("{} {instructions} {sectors} {floor} {conflicts} {products}", kernel.variant));
            }
        }
    }
    let budget: Vec<&str> = BUDGET.lines().filter(|l| !l.starts_with('#')).collect();
    assert_eq!(budget.first(), Some(&HEAD));
    let said = lines.join("\n");
    assert!(budget[1..] == lines, "the costs have changed; if intended, set budget.txt to:\n{HEAD}\n{said}\n");
}

/// Shared memory is exactly what the kernel uses: with 16 bytes less, an access is out of bounds or a range of columns
/// is missing.
#[test]
fn shared_memory_is_what_the_kernel_uses() {
    for head_dim in [64, 96, 128, 256] {
        let family = sm_80_family("bf16", head_dim, 0.0).unwrap();
        let less = |kernel: AttentionKernel| AttentionKernel { shared: kernel.shared - 8, ..kernel };
        let dkv: Vec<AttentionKernel> = family.dkv.iter().copied().map(less).collect();
        let (forward, dq) = (less(family.forward), less(family.dq));
        let tight = [
            flatshard_ptx::kernels::attention::AttentionFamily { forward, ..*family },
            flatshard_ptx::kernels::attention::AttentionFamily { dq, ..*family },
            flatshard_ptx::kernels::attention::AttentionFamily { dkv: Box::leak(dkv.into_boxed_slice()), ..*family },
        ];
        let shape = Shape::packed(1, 1, head_dim, &[0, 3]);
        for family in &tight {
            let run = Run { family, dtype: DType::Bf16, shape: &shape, schedule: 0, plant: None, alone: None };
            let report = run.run(&Inputs::new(&shape), 0.0).map(|_| ()).unwrap_err();
            assert!(report.has(flatshard_ptx::emulate::FindingKind::OutOfBounds), "{head_dim}: {report}");
        }
    }
}
