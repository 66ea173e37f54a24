//! AMX emulated on any CPU with AVX-512: the instructions that `amx.rs` issues, at the addresses that it uses. Never
//! fast.
use super::super::block::{Block, LeftRows};
use super::super::{amx, split};
use half::bf16;

type Tile = [[u32; 16]; 16];
pub struct Tiles;

unsafe fn tileloadd(at: *const u8, row: usize) -> Tile {
    // SAFETY: upheld by the caller: 16 rows of 64 bytes.
    std::array::from_fn(|i| unsafe { at.add(i * row).cast::<[u32; 16]>().read_unaligned() })
}
unsafe fn tilestored(at: *mut u8, row: usize, tile: &Tile) {
    // SAFETY: upheld by the caller: 16 rows of 64 bytes.
    tile.iter().enumerate().for_each(|(i, x)| unsafe { at.add(i * row).cast::<[u32; 16]>().write_unaligned(*x) });
}
impl Block<split::Part> for Tiles {
    const ROWS: usize = <amx::Tiles as Block<split::Part>>::ROWS;
    const STEPS: usize = <amx::Tiles as Block<split::Part>>::STEPS;
    const PACKED_A: usize = <amx::Tiles as Block<split::Part>>::PACKED_A;
    const CHUNK: usize = <amx::Tiles as Block<split::Part>>::CHUNK;

    unsafe fn multiply(&self, a: *const split::Part, b: *const split::Part, steps: usize, out: *mut f32, add: bool) {
        // SAFETY: as in the trait.
        unsafe { parts(LeftRows::packed(a, 32, 3072), b.cast(), steps, out.cast(), add) }
    }
    unsafe fn multiply_rows(
        &self,
        a: LeftRows<split::Part>,
        b: *const split::Part,
        steps: usize,
        out: *mut f32,
        add: bool,
    ) {
        // SAFETY: as in the trait.
        unsafe { parts(a, b.cast(), steps, out.cast(), add) }
    }
}
unsafe fn parts(a: LeftRows<split::Part>, b: *const u8, steps: usize, out: *mut u8, add: bool) {
    let (at, row, step) = (a.at.cast::<u8>(), 2 * a.row, 2 * a.step);
    if steps == 0 {
        // SAFETY: as in the trait.
        unsafe { tiles(at, [row, step], b, 0, out, add) }
    }
    for (i, of) in (0..steps).flat_map(|s| (0..6).map(move |i| (s, i))) {
        let [left, right] = [[0, 2], [0, 1], [1, 1], [1, 0], [2, 0], [0, 0]][of].map(|part| part * 2048);
        let [left, right] = if a.turned { [right, left] } else { [left, right] };
        // SAFETY: as in the trait.
        unsafe { tiles(at.add(i * step + left), [row, step], b.add(i * 6144 + right), 1, out, add || i + of > 0) }
    }
}

/// Intel's pseudocode, except for flushing subnormals.
fn tdpbf16ps(c: &mut Tile, a: &Tile, b: &Tile) {
    let [low, high] = [|x: u32| f32::from_bits(x << 16), |x: u32| f32::from_bits(x & 0xffff_0000)];
    for m in 0..16 {
        for k in 0..16 {
            for n in 0..16 {
                let sum = f32::from_bits(c[m][n]) + low(a[m][k]) * low(b[k][n]);
                c[m][n] = (sum + high(a[m][k]) * high(b[k][n])).to_bits();
            }
        }
    }
}

impl Block<bf16> for Tiles {
    const ROWS: usize = <amx::Tiles as Block<bf16>>::ROWS;
    const STEPS: usize = <amx::Tiles as Block<bf16>>::STEPS;
    const PACKED_A: usize = <amx::Tiles as Block<bf16>>::PACKED_A;
    const CHUNK: usize = <amx::Tiles as Block<bf16>>::CHUNK;

    unsafe fn multiply(&self, a: *const bf16, b: *const bf16, steps: usize, out: *mut f32, add: bool) {
        // SAFETY: as in the trait.
        unsafe { tiles(a.cast(), [64, 2048], b.cast(), steps, out.cast(), add) }
    }
    unsafe fn multiply_rows(&self, a: LeftRows<bf16>, b: *const bf16, steps: usize, out: *mut f32, add: bool) {
        // SAFETY: as in the trait.
        unsafe { tiles(a.at.cast(), [2 * a.row, 2 * a.step], b.cast(), steps, out.cast(), add) }
    }
}

unsafe fn tiles(mut a: *const u8, [row, step]: [usize; 2], mut b: *const u8, steps: usize, out: *mut u8, add: bool) {
    let mut t = [[[0u32; 16]; 16]; 4];
    // SAFETY: as in the trait.
    unsafe {
        if add {
            t = [0, 64, 2048, 2112].map(|at| tileloadd(out.add(at), 128));
        }
        for _ in 0..steps {
            let (t4, t5) = (tileloadd(a, row), tileloadd(a.add(16 * row), row));
            let (t6, t7) = (tileloadd(b, 128), tileloadd(b.add(64), 128));
            tdpbf16ps(&mut t[0], &t4, &t6);
            tdpbf16ps(&mut t[1], &t4, &t7);
            tdpbf16ps(&mut t[2], &t5, &t6);
            tdpbf16ps(&mut t[3], &t5, &t7);
            (a, b) = (a.add(step), b.add(2048));
        }
        for (at, tile) in [0, 64, 2048, 2112].iter().zip(&t) {
            tilestored(out.add(*at), 128, tile);
        }
    }
}
