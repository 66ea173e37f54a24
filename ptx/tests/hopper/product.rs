//! The product of product.ptx compared with f64, and the base of the planted faults.
use flatshard_ptx::emulate::{
    Argument, GlobalMemory, KernelLaunch, LaunchCounts, LaunchReport, Swizzle, TensorMap, parse,
};
use flatshard_ptx::expand::expand;
use half::bf16;

pub const SCHEDULES: std::ops::Range<u64> = 0..6;
const N: usize = 64;

pub fn source() -> String {
    let text = expand("product.ptx", include_str!("product.ptx"), &[], &|_| None).unwrap_or_else(|e| panic!("{e}"));
    // Without markers, lines are the expansion's own.
    text.lines().filter(|l| !l.starts_with("# ")).collect::<Vec<_>>().join("\n")
}
/// Small integers, so that sums are exact.
pub fn whole(seed: usize, n: usize) -> Vec<f64> {
    (0..n).map(|i| ((i * 7919 + seed * 104729) % 61 % 9) as f64 - 4.0).collect()
}
pub fn halves(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|v| bf16::from_f64(*v).to_le_bytes()).collect()
}
pub fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b) as f64).collect()
}

pub struct Setting {
    pub tiles: usize,
    pub swizzle: Swizzle,
    /// Columns of A and B that exist; the rest of the last tile is zero-filled.
    pub depth: usize,
}
pub const USUAL: Setting = Setting { tiles: 5, swizzle: Swizzle::B128, depth: 5 * 64 };

pub fn product(source: &str, set: &Setting, schedule: u64) -> Result<(Vec<f64>, LaunchCounts), LaunchReport> {
    let depth = set.depth;
    let mut memory = GlobalMemory::new();
    let a = memory.upload("a", &halves(&whole(1, N * depth)));
    let b = memory.upload("b", &halves(&whole(2, N * depth)));
    let d = memory.alloc("d", N * N * 4);
    let map = |address, swizzle| {
        let (sizes, strides) = (vec![depth as u64, N as u64], vec![depth as u64 * 2]);
        let map = TensorMap { address, element: 2, sizes, strides, tile: vec![64, N as u32], swizzle };
        Argument::TensorMap(map.encode().unwrap())
    };
    let (sizes, strides, tile) = (vec![N as u64; 2], vec![N as u64 * 4], vec![32, N as u32]);
    let out = TensorMap { address: d, element: 4, sizes, strides, tile, swizzle: Swizzle::B128 };
    let out = Argument::TensorMap(out.encode().unwrap());
    let arguments = [map(a, set.swizzle), map(b, set.swizzle), out, Argument::U32(set.tiles as u32)];
    let kernels = parse("k.ptx", source).unwrap_or_else(|e| panic!("{e}"));
    let (grid, block) = ([1; 3], [256, 1, 1]);
    let launch = KernelLaunch { kernel: &kernels[0], grid, block, dynamic_shared: 0, arguments: &arguments, schedule };
    launch.run(&mut memory).map(|counts| (floats(memory.download(d).unwrap()), counts))
}
pub fn exact(depth: usize) -> Vec<f64> {
    let (a, b) = (whole(1, N * depth), whole(2, N * depth));
    let dot = |i: usize, j: usize| (0..depth).map(|k| a[i * depth + k] * b[j * depth + k]).sum();
    (0..N * N).map(|ij| dot(ij / N, ij % N)).collect()
}

#[test]
fn a_product_of_two_warpgroups_is_right_and_costs_the_same_under_every_schedule() {
    let source = source();
    for (tiles, depth) in [(5, 320), (1, 64), (3, 136), (2, 72)] {
        let set = Setting { tiles, depth, ..USUAL };
        let first = product(&source, &set, 0).unwrap_or_else(|report| panic!("{report}"));
        assert_eq!(first.0, exact(depth), "{depth} deep");
        for schedule in SCHEDULES {
            let again = product(&source, &set, schedule).unwrap_or_else(|report| panic!("{schedule}: {report}"));
            assert!(again == first, "schedule {schedule}: other results or costs");
        }
    }
}
