//! Kernels that reveal a GPU's matrix layouts in registers and shared memory. Their results on a GPU and in the
//! emulator are compared bit for bit by `scripts/gpu_check.sh`, and `ptx/tests/hopper/probes.rs` checks the emulator's
//! against formulas.
use super::variant::Variant;

pub const VARIANTS: &[Variant] = &[
    Variant { name: "probe_mma", file: "probe_mma.ptx", given: &[] },
    Variant { name: "probe_hopper", file: "probe_hopper.ptx", given: &[] },
];

/// A probe of two buffers: `entry(x, out)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutProbe {
    pub variant: &'static str,
    pub entry: &'static str,
    /// CTAs: one, or a cluster.
    pub ctas: u32,
    pub threads: u32,
    /// Number of 32-bit words in x and in out.
    pub words: [usize; 2],
}

pub const PROBES: [LayoutProbe; 6] = [
    // First what the attention kernels depend on and nobody else has shown.
    LayoutProbe { variant: "probe_hopper", entry: "probe_wgmma_wide", ctas: 1, threads: 128, words: [8192, 128 * 128] },
    LayoutProbe {
        variant: "probe_hopper",
        entry: "probe_wgmma_pair",
        ctas: 2,
        threads: 128,
        words: [8192, 2 * 65 * 128],
    },
    LayoutProbe { variant: "probe_mma", entry: "probe_mma", ctas: 1, threads: 32, words: [30 * 32, 12 * 32] },
    LayoutProbe { variant: "probe_mma", entry: "probe_ldmatrix", ctas: 1, threads: 32, words: [128, 8 * 32] },
    LayoutProbe { variant: "probe_hopper", entry: "probe_stmatrix", ctas: 1, threads: 32, words: [128, 256] },
    LayoutProbe { variant: "probe_hopper", entry: "probe_wgmma", ctas: 1, threads: 128, words: [8192, 9 * 32 * 128] },
];

impl LayoutProbe {
    /// The contents of x: integers from -4 to 4, in the type that reads them, so that every sum is exact.
    pub fn inputs(&self) -> Vec<u32> {
        let whole = |i: usize| ((i * 7919 + 13) % 61 % 9) as f32 - 4.0;
        let wide = |i: usize| whole(i).to_bits();
        let bf16 = |i: usize| (wide(2 * i) >> 16) | (wide(2 * i + 1) & 0xffff_0000);
        let half = |i: usize| half::f16::from_f32(whole(i)).to_bits() as u32;
        let f16 = |i: usize| half(2 * i) | half(2 * i + 1) << 16;
        // probe_mma: 4 registers of A, 2 of B and 4 of C, 32 lanes each, in bf16, f16 and tf32, which is stored as f32.
        let mma = |i: usize| match (i / 320, i % 320 / 32) {
            (0, 0..6) => bf16(i),
            (1, 0..6) => f16(i),
            _ => wide(i),
        };
        (0..self.words[0]).map(|i| if self.entry == "probe_mma" { mma(i) } else { bf16(i) }).collect()
    }
}

/// Words of `probe_tensor(map, out, a, b, c, bytes)`; untouched ones keep their initial value.
pub const TENSOR_WORDS: usize = 4096;
pub const TENSOR_UNTOUCHED: u32 = 0x5555_5555;
