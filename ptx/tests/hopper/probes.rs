//! The probes' results compared with the layouts of the PTX ISA and CUTLASS's canonical layouts, written here
//! independently. scripts/gpu_check.sh compares a GPU's results.
use flatshard_ptx::emulate::{Argument, GlobalMemory, KernelLaunch, Swizzle, TensorMap, parse};
use flatshard_ptx::kernels::Variant;
use flatshard_ptx::kernels::probes::{PROBES, TENSOR_UNTOUCHED, TENSOR_WORDS};
use half::{bf16, f16};

fn launch(variant: &str, entry: &str, [ctas, threads]: [u32; 2], arguments: &[Argument], memory: &mut GlobalMemory) {
    let variant = Variant::by_name(variant).unwrap();
    let kernels = parse(variant.file, &variant.expand().unwrap()).unwrap();
    let kernel = kernels.iter().find(|k| k.name == entry).unwrap();
    let (grid, block) = ([ctas, 1, 1], [threads, 1, 1]);
    let launch = KernelLaunch { kernel, grid, block, dynamic_shared: 0, arguments, schedule: 1 };
    launch.run(memory).unwrap_or_else(|report| panic!("{report}"));
}
fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}
fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}
/// x and out of a probe.
fn probe(entry: &str) -> (Vec<u32>, Vec<u32>) {
    let probe = PROBES.iter().find(|p| p.entry == entry).unwrap();
    let x = probe.inputs();
    assert_eq!(x.len(), probe.words[0]);
    let mut memory = GlobalMemory::new();
    let (at, out) = (memory.upload("x", &bytes(&x)), memory.alloc("out", 4 * probe.words[1]));
    launch(probe.variant, entry, [probe.ctas, probe.threads], &[at, out].map(Argument::Pointer), &mut memory);
    (x, words(memory.download(out).unwrap()))
}
fn float(word: u32) -> f32 {
    f32::from_bits(word)
}

#[test]
fn fragments_of_mma() {
    let (x, out) = probe("probe_mma");
    for (kind, depth) in [(0, 16), (1, 16), (2, 8)] {
        let register = |i: usize, lane: usize| x[(10 * kind + i) * 32 + lane];
        // Element (row, k) of A and (k, column) of B: the lane and the register that hold it.
        let value = |i: usize, lane: usize, k: usize| {
            let word = register(i, lane);
            match kind {
                0 => bf16::from_bits((word >> (16 * (k % 2))) as u16).to_f32(),
                1 => f16::from_bits((word >> (16 * (k % 2))) as u16).to_f32(),
                _ => float(word),
            }
        };
        let pairs = if kind == 2 { 1 } else { 2 };
        let a = |row: usize, k: usize| {
            let (half, within) = (k / (depth / 2), k % (depth / 2));
            value(row / 8 + 2 * half, row % 8 * 4 + within / pairs, k)
        };
        let b = |k: usize, column: usize| {
            let (half, within) = (k / (depth / 2), k % (depth / 2));
            value(4 + half, column * 4 + within / pairs, k)
        };
        for row in 0..16 {
            for column in 0..8 {
                let (i, lane) = (2 * (row / 8) + column % 2, row % 8 * 4 + column / 2);
                let sum: f32 = (0..depth).map(|k| a(row, k) * b(k, column)).sum();
                assert_eq!(
                    float(out[(4 * kind + i) * 32 + lane]),
                    sum + float(register(6 + i, lane)),
                    "{kind} {row} {column}"
                );
            }
        }
    }
}
#[test]
fn fragments_of_ldmatrix() {
    let (x, out) = probe("probe_ldmatrix");
    let element =
        |m: usize, row: usize, column: usize| x[m * 32 + row * 4 + column / 2] >> (16 * (column % 2)) & 0xffff;
    for m in 0..4 {
        for lane in 0..32 {
            let (r, c) = (lane / 4, 2 * (lane % 4));
            assert_eq!(out[m * 32 + lane], element(m, r, c) | element(m, r, c + 1) << 16);
            assert_eq!(out[(4 + m) * 32 + lane], element(m, c, r) | element(m, c + 1, r) << 16);
        }
    }
}
#[test]
fn fragments_of_stmatrix() {
    let (x, out) = probe("probe_stmatrix");
    let element =
        |m: usize, row: usize, column: usize| x[m * 32 + row * 4 + column / 2] >> (16 * (column % 2)) & 0xffff;
    for (m, row, word) in (0..4).flat_map(|m| (0..32).map(move |i| (m, i / 4, i % 4))) {
        let at = m * 32 + row * 4 + word;
        assert_eq!(out[at], element(m, row, 2 * word) | element(m, row, 2 * word + 1) << 16);
        assert_eq!(out[128 + at], element(m, 2 * word, row) | element(m, 2 * word + 1, row) << 16);
    }
}
/// Swizzle<bits, 4, 3> of CUTLASS on a byte offset: `bits` bits from 4 on, exclusive-or those from 7 on.
fn swizzled(bits: u32, offset: usize) -> usize {
    let mask = ((1 << bits) - 1) << 4;
    offset ^ (offset >> 3 & mask)
}
#[test]
fn operands_of_wgmma() {
    let (x, out) = probe("probe_wgmma");
    let at = |offset: usize| bf16::from_bits((x[offset / 4] >> (8 * (offset % 4))) as u16).to_f32();
    for m in 0..9 {
        // Bits of the swizzle, by the descriptor field's encoding.
        let bits = [0, 3, 2, 1][m % 4];
        let row = 16usize << bits;
        let (stride, lead) = (8 * row, if bits == 0 { 4096 } else { 128 * row });
        let offset = |i: usize, k: usize| match (m / 4 % 2, bits) {
            (0, 0) => i / 8 * stride + i % 8 * 16 + k / 8 * lead + k % 8 * 2,
            (0, _) => i / 8 * stride + i % 8 * row + k * 2,
            (_, 0) => i % 8 * 2 + i / 8 * stride + k % 8 * 16 + k / 8 * lead,
            _ => {
                let wide = row / 2;
                i % wide * 2 + i / wide * lead + k % 8 * row + k / 8 * stride
            }
        };
        let a = |i: usize, k: usize| {
            if m < 8 {
                return at(swizzled(bits, offset(i, k)));
            }
            // Registers: word r of thread t's 16 bytes.
            let (t, r) = (i / 16 * 32 + i % 8 * 4 + k % 8 / 2, i % 16 / 8 + 2 * (k / 8));
            at(16 * t + 4 * r + k % 2 * 2)
        };
        let b = |j: usize, k: usize| at(16384 + swizzled(bits, offset(j, k)));
        for i in 0..64 {
            for j in 0..64 {
                let sum: f32 = (0..16).map(|k| a(i, k) * b(j, k)).sum();
                let (t, e) = (i / 16 * 32 + i % 8 * 4 + j % 8 / 2, j / 8 * 4 + i % 16 / 8 * 2 + j % 2);
                assert_eq!(float(out[(32 * m + e) * 128 + t]), sum, "product {m}, row {i}, column {j}");
            }
        }
    }
}
/// N = 32 from the middle of a row of the pattern on, and N = 96 and 128 across its columns.
#[test]
fn wide_operands_of_wgmma() {
    let (x, out) = probe("probe_wgmma_wide");
    let at = |offset: usize| bf16::from_bits((x[offset / 4] >> (8 * (offset % 4))) as u16).to_f32();
    for (columns, first, start) in [(32, 0, 64), (96, 16, 0), (128, 64, 0)] {
        let offset = |i: usize, k: usize| i % 64 * 2 + i / 64 * 8192 + k % 8 * 128 + k / 8 * 1024;
        let a = |i: usize, k: usize| {
            if columns == 32 {
                return at(swizzled(3, offset(i, k)));
            }
            let (t, r) = (i / 16 * 32 + i % 8 * 4 + k % 8 / 2, i % 16 / 8 + 2 * (k / 8));
            at(16 * t + 4 * r + k % 2 * 2)
        };
        let b = |j: usize, k: usize| at(16384 + swizzled(3, start + offset(j, k)));
        for (i, j) in (0..64).flat_map(|i| (0..columns).map(move |j| (i, j))) {
            let sum: f32 = (0..16).map(|k| a(i, k) * b(j, k)).sum();
            let (t, e) = (i / 16 * 32 + i % 8 * 4 + j % 8 / 2, j / 8 * 4 + i % 16 / 8 * 2 + j % 2);
            assert_eq!(float(out[(first + e) * 128 + t]), sum, "N {columns}, row {i}, column {j}");
        }
    }
}
/// 32 columns from 96 bytes on pass the end of a row of 128.
#[test]
fn an_operand_that_starts_in_a_row_and_passes_its_end_is_reported() {
    let text = Variant::by_name("probe_hopper").unwrap().expand().unwrap();
    let [right, wrong] = ["%a, 1028;", "%a, 1030;"];
    assert_eq!(text.matches(right).count(), 1);
    let kernels = parse("probe_hopper.ptx", &text.replace(right, wrong)).unwrap();
    let kernel = kernels.iter().find(|kernel| kernel.name == "probe_wgmma_wide").unwrap();
    let mut memory = GlobalMemory::new();
    let at = [memory.upload("x", &[0; 4 * 8192]), memory.alloc("out", 4 * 128 * 128)].map(Argument::Pointer);
    let (grid, block) = ([1, 1, 1], [128, 1, 1]);
    let launch = KernelLaunch { kernel, grid, block, dynamic_shared: 0, arguments: &at, schedule: 1 };
    let report = launch.run(&mut memory).unwrap_err().to_string();
    assert!(report.contains("32 elements from byte 96 of a row of 128 on, with B128, pass its end"), "{report}");
}
/// Both CTAs of a cluster have the product of N = 128 that a CTA alone has, whatever their addresses are.
#[test]
fn operands_of_wgmma_in_a_cluster() {
    let (alone, pair) = (probe("probe_wgmma_wide").1, probe("probe_wgmma_pair").1);
    for (rank, out) in pair.chunks(65 * 128).enumerate() {
        assert!(out[..64 * 128] == alone[64 * 128..], "rank {rank}");
        assert!(out[64 * 128..].iter().all(|&byte| byte == rank as u32), "{:?}", &out[64 * 128..]);
    }
}
#[test]
fn boxes_of_tensor_copies() {
    // 5 planes of 7 rows of 40 16-bit elements, with rows of 48: element (x, y, z) holds its position.
    let (sizes, strides) = ([40, 7, 5], [48, 7 * 48]);
    let x: Vec<u8> = (0..5 * 7 * 48u16).flat_map(|i| i.to_le_bytes()).collect();
    for (swizzle, bits, wide) in
        [(Swizzle::None, 0, 24), (Swizzle::B32, 1, 16), (Swizzle::B64, 2, 32), (Swizzle::B128, 3, 64)]
    {
        for corner in [[0i32, 0, 0], [8, 2, 1], [-8, -3, 0], [32, 5, 4], [16, -1, -2]] {
            let mut memory = GlobalMemory::new();
            let (address, out) = (memory.upload("x", &x), memory.alloc("out", 4 * TENSOR_WORDS));
            let strides = strides.iter().map(|s| 2 * s).collect();
            let tile = vec![wide, 8, 3];
            let map = TensorMap { address, element: 2, sizes: sizes.to_vec(), strides, tile, swizzle };
            let mut arguments = vec![Argument::TensorMap(map.encode().unwrap()), Argument::Pointer(out)];
            arguments.extend(corner.map(|c| Argument::U32(c as u32)));
            arguments.push(Argument::U32(map.bytes() as u32));
            launch("probe_hopper", "probe_tensor", [1, 128], &arguments, &mut memory);
            let got: Vec<u16> =
                memory.download(out).unwrap().as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
            let mut want = vec![TENSOR_UNTOUCHED as u16; 2 * TENSOR_WORDS];
            for (i, place) in (0..wide as usize * 8 * 3).map(|i| (i, swizzled(bits, 2 * i) / 2)) {
                let [a, b, c] = [i % wide as usize, i / wide as usize % 8, i / wide as usize / 8];
                let at = [a as i64 + corner[0] as i64, b as i64 + corner[1] as i64, c as i64 + corner[2] as i64];
                let inside = at.iter().zip(sizes).all(|(x, n)| (0..n as i64).contains(x));
                want[place] = if inside { (at[0] + 48 * at[1] + 7 * 48 * at[2]) as u16 } else { 0 };
            }
            assert!(got == want, "{swizzle:?} at {corner:?}");
        }
    }
}
#[test]
fn maps_that_a_driver_refuses() {
    let good = TensorMap {
        address: 64,
        element: 2,
        sizes: vec![64, 8],
        strides: vec![128],
        tile: vec![64, 8],
        swizzle: Swizzle::B128,
    };
    assert!(good.encode().is_ok());
    let bad = |change: fn(&mut TensorMap)| {
        let mut map = good.clone();
        change(&mut map);
        map.encode().unwrap_err()
    };
    assert!(bad(|m| m.address = 8).contains("aligned to 16 bytes"));
    assert!(bad(|m| m.strides = vec![24]).contains("a stride of 24 bytes"));
    assert!(bad(|m| m.tile = vec![64, 257]).contains("sides of a box 1 to 256"));
    assert!(bad(|m| m.tile = vec![128, 8]).contains("a row of 256 bytes in a box with B128"));
    assert!(bad(|m| m.strides = vec![]).contains("0 strides"));
}
