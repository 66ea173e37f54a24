//! The block product with Intel AMX: `tdpbf16ps` multiplies a tile of A (16 rows x 32 bf16) by a tile of B (16 pairs x
//! 16 columns). Uses inline assembly, since the intrinsics and `is_x86_feature_detected!("amx-bf16")` are unstable.
use super::block::{Block, LeftRows};
use super::pack::COLUMNS;
use super::split::Part;
use half::bf16;
use std::arch::{asm, x86_64::__cpuid_count};
use std::marker::PhantomData;

/// Whether the CPU has tiles with bf16 products, and Linux saves them and lets this process use them.
pub(super) fn available() -> bool {
    const OSXSAVE: u32 = 1 << 27; // leaf 1 ecx: xgetbv does not fault
    const BF16_AND_TILE: u32 = 1 << 22 | 1 << 24; // leaf 7 edx
    const TILES: u64 = 3 << 17; // xcr0: configuration and data
    let cpu = __cpuid_count(0, 0).eax >= 7
        && __cpuid_count(1, 0).ecx & OSXSAVE != 0
        && __cpuid_count(7, 0).edx & BF16_AND_TILE == BF16_AND_TILE;
    cpu && xcr0() & TILES == TILES && permitted()
}

fn xcr0() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the caller has checked OSXSAVE.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags));
    }
    (high as u64) << 32 | low as u64
}

/// Requests 8 KB of tile data in this process's saved state. Repeating the request is harmless.
fn permitted() -> bool {
    const SYS_ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XTILEDATA: u64 = 18;
    let status: i64;
    // SAFETY: the call takes two integers and accesses no memory of this process.
    unsafe {
        asm!("syscall", inlateout("rax") SYS_ARCH_PRCTL => status, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") XTILEDATA,
             out("rcx") _, out("r11") _, options(nostack));
    }
    status == 0
}

/// Operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// This thread's eight tiles, each 16 rows of 64 bytes, until dropped. Not Send: tiles belong to a thread.
pub(in crate::cpu) struct Tiles(PhantomData<*const ()>);

impl Tiles {
    /// # Safety
    /// [`available`] returned true, and nothing else on this thread uses tiles until this is dropped.
    pub(super) unsafe fn configure() -> Tiles {
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: upheld by the caller. The configuration is 64 bytes of valid palette 1.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &config,
                 out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                 out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                 options(nostack, readonly, preserves_flags));
        }
        Tiles(PhantomData)
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: configured on this thread.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
    }
}

/// A block product, of whose steps the lines multiply one, and go on to B's next.
macro_rules! tiles {
    ($a:expr, $b:expr, $steps:expr, $out:expr, $add:expr, $element:ty: $($line:literal),*) => {{
        let [row, step] = [$a.row, $a.step].map(|x| x * size_of::<$element>());
        const { assert!(COLUMNS == 32) };
        asm!(
            "test {add}, {add}",
            "jz 4f",
            "tileloadd tmm0, [{out} + {row_b}*1]",
            "tileloadd tmm1, [{out} + {row_b}*1 + 64]",
            "tileloadd tmm2, [{out} + {row_b}*1 + 2048]",
            "tileloadd tmm3, [{out} + {row_b}*1 + 2112]",
            "jmp 5f",
            "4:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "5:",
            "test {steps}, {steps}",
            "jz 3f",
            "2:",
            $($line,)*
            "mov {left}, {lines}",
            "test {left}, {left}",
            "jz 7f",
            "6:",
            "prefetcht1 [{next}]",
            "add {next}, 64",
            "dec {left}",
            "jnz 6b",
            "7:",
            "add {a}, {step}",
            "add {low}, {step}",
            "dec {steps}",
            "jnz 2b",
            "3:",
            "tilestored [{out} + {row_b}*1], tmm0",
            "tilestored [{out} + {row_b}*1 + 64], tmm1",
            "tilestored [{out} + {row_b}*1 + 2048], tmm2",
            "tilestored [{out} + {row_b}*1 + 2112], tmm3",
            a = inout(reg) $a.at => _, low = inout(reg) $a.at.wrapping_byte_add(16 * row) => _,
            b = inout(reg) $b => _, steps = inout(reg) $steps => _, out = in(reg) $out, step = in(reg) step,
            next = inout(reg) $a.next => _, lines = in(reg) $a.lines, left = out(reg) _,
            row_a = in(reg) row, row_b = in(reg) 128usize, add = in(reg) $add as usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _, options(nostack),
        )
    }};
}

impl Block<bf16> for Tiles {
    /// 2 x 2 tiles of sums, 2 tiles of A and 2 of B use all eight, with one load per product.
    const ROWS: usize = 32;
    /// 1536 bf16. Longer stretches write C less often, from L3.
    const STEPS: usize = 48;
    /// Half of a 2 MB L2 cache: 320 rows of 48 steps. With 1.5 MB, products take a quarter longer.
    const PACKED_A: usize = 1 << 20;
    /// A product takes 64 bytes per cycle of its panels, twice what L2 gives. 16 KB of a panel of B stay in L1 (48 KB)
    /// next to as much of A and the sums. Relative rates on Granite Rapids, 48 steps: 4 at a time 0.80, 6 0.92, 8 1, 12
    /// and 16 0.86, all 0.87 (of 24 steps 0.74).
    const CHUNK: usize = 8;

    /// A step of A is 2 tiles of 16 rows of 64 bytes, consecutive in a panel.
    unsafe fn multiply(&self, a: *const bf16, b: *const bf16, steps: usize, out: *mut f32, add: bool) {
        // SAFETY: upheld by the caller.
        unsafe { self.multiply_rows(LeftRows::packed(a, 32, 1024), b, steps, out, add) }
    }
    /// A step of B is 16 rows of 128 bytes: 2 tiles side by side. So is the block of sums: 2 x 2 tiles in rows of 128
    /// bytes.
    #[inline]
    unsafe fn multiply_rows(&self, a: LeftRows<bf16>, b: *const bf16, steps: usize, out: *mut f32, add: bool) {
        // SAFETY: the panels hold `steps` steps of 2048 bytes and `out` 32 rows of 128 bytes; tiles are configured.
        unsafe {
            tiles!(a, b, steps, out, add, bf16:
                "tileloadd tmm4, [{a} + {row_a}*1]",
                "tileloadd tmm6, [{b} + {row_b}*1]",
                "tileloadd tmm7, [{b} + {row_b}*1 + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{low} + {row_a}*1]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {b}, 2048"
            );
        }
    }
}

/// f32 in three parts: 24 instructions for four blocks of products, with 14 loads. With operands read from L1 and L2,
/// the tiles of Granite Rapids reach 2,400 GFLOP/s, and these products 1,300 to 1,450, a sixth of it as f32: 1.5 times
/// what AVX-512 reaches in f32.
impl Block<Part> for Tiles {
    const ROWS: usize = 32;
    /// 768 f32.
    const STEPS: usize = 24;
    const PACKED_A: usize = 1 << 20;
    /// 18 KB of a panel of B in L1. 2, 4, 12 and all are as fast; 6 and 8 take 15 % longer.
    const CHUNK: usize = 3;

    unsafe fn multiply(&self, a: *const Part, b: *const Part, steps: usize, out: *mut f32, add: bool) {
        // SAFETY: upheld by the caller.
        unsafe { self.multiply_rows(LeftRows::packed(a, 32, 3072), b, steps, out, add) }
    }
    /// From the smallest products to the largest. Parts are 2048 bytes apart.
    #[inline]
    unsafe fn multiply_rows(&self, a: LeftRows<Part>, b: *const Part, steps: usize, out: *mut f32, add: bool) {
        // SAFETY: the panels hold `steps` steps of 6144 bytes and `out` 32 rows of 128 bytes; tiles are configured.
        unsafe {
            match a.turned {
                false => tiles!(a, b, steps, out, add, Part:
                    // A's first part by B's third and second
                    "tileloadd tmm4, [{a} + {row_a}*1]",
                    "tileloadd tmm6, [{b} + {row_b}*1 + 4096]",
                    "tileloadd tmm7, [{b} + {row_b}*1 + 4160]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{low} + {row_a}*1]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tileloadd tmm6, [{b} + {row_b}*1 + 2048]",
                    "tileloadd tmm7, [{b} + {row_b}*1 + 2112]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    // the second by the second and first
                    "tileloadd tmm4, [{a} + {row_a}*1 + 2048]",
                    "tileloadd tmm5, [{low} + {row_a}*1 + 2048]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tileloadd tmm6, [{b} + {row_b}*1]",
                    "tileloadd tmm7, [{b} + {row_b}*1 + 64]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    // the third by the first, and the first by the first
                    "tileloadd tmm4, [{a} + {row_a}*1 + 4096]",
                    "tileloadd tmm5, [{low} + {row_a}*1 + 4096]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tileloadd tmm4, [{a} + {row_a}*1]",
                    "tileloadd tmm5, [{low} + {row_a}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {b}, 6144"
                ),
                true => tiles!(a, b, steps, out, add, Part:
                    // A's third part by B's first
                    "tileloadd tmm4, [{a} + {row_a}*1 + 4096]",
                    "tileloadd tmm6, [{b} + {row_b}*1]",
                    "tileloadd tmm7, [{b} + {row_b}*1 + 64]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{low} + {row_a}*1 + 4096]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    // the second by the first and second
                    "tileloadd tmm4, [{a} + {row_a}*1 + 2048]",
                    "tileloadd tmm5, [{low} + {row_a}*1 + 2048]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tileloadd tmm6, [{b} + {row_b}*1 + 2048]",
                    "tileloadd tmm7, [{b} + {row_b}*1 + 2112]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    // the first by the second, third and first
                    "tileloadd tmm4, [{a} + {row_a}*1]",
                    "tileloadd tmm5, [{low} + {row_a}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tileloadd tmm6, [{b} + {row_b}*1 + 4096]",
                    "tileloadd tmm7, [{b} + {row_b}*1 + 4160]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tileloadd tmm6, [{b} + {row_b}*1]",
                    "tileloadd tmm7, [{b} + {row_b}*1 + 64]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {b}, 6144"
                ),
            }
        }
    }
}
