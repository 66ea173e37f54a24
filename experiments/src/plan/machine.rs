//! The duration of operations and collectives on a machine. GPUs are tables of published rates, each with its source:
//! none was measured by this project. Never knows what is computed.
use super::clock::Seconds;
use super::links::{Collected, Links, Placement};
use flatshard::base::DType;
use flatshard::device::cost::{OpCost, Rate};

pub trait MachineModel: Send + Sync {
    fn name(&self) -> &str;
    fn op(&self, op: &OpCost) -> Seconds;
    /// Host time to enqueue an operation; 0 if the host computes.
    fn launch(&self) -> Seconds;
    /// Duration of a collective on its stream; with `inline`, of the call that starts it.
    fn collective(&self, what: Collected, bytes: u64, placement: Placement) -> Seconds;
    /// Ranks communicate on the computing thread, through shared memory.
    fn inline(&self) -> bool {
        false
    }
    /// With `inline`: duration of the wait.
    fn finish(&self, _: Collected, _: u64, _: Placement) -> Seconds {
        0.0
    }
    /// Device memory per rank, in bytes.
    fn memory(&self) -> Option<usize>;
    /// Peak FLOP/s, for MFU.
    fn peak(&self, dtype: DType) -> Option<f64>;
    /// Number of streaming multiprocessors of a GPU.
    fn multiprocessors(&self) -> Option<usize> {
        None
    }
}

/// A GPU in a node of the same GPUs behind one NVLink switch, with one network card each. Rates in FLOP/s and bytes/s.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GpuRates {
    pub name: &'static str,
    pub about: &'static str,
    /// Dense bf16, from the data sheet.
    pub peak: f64,
    /// bf16 and fp32 (CUDA cores; tf32) matrix products at the best shapes.
    pub product: f64,
    pub product_f32: f64,
    pub product_tf32: f64,
    /// Fused bf16 attention, forward and backward.
    pub attention: f64,
    pub attention_backward: f64,
    /// From the data sheet.
    pub memory_bytes: usize,
    pub bandwidth: f64,
    pub multiprocessors: usize,
    pub links: Links,
}

/// GPUs of sm_90, where cuBLASLt multiplies FP8 with scales for blocks.
pub const FP8_GPUS: [&str; 2] = ["h100", "h200"];

/// Fraction of the nominal bandwidth that memory-bound kernels reach. An assumption.
const STREAMED: f64 = 0.85;
/// Fraction of the best product and attention rates that a whole step sustains: other shapes, clocks under a power
/// limit, gaps between kernels. Fitted to one published run, MPT-7B on 8 H100 with sequences of 2048 (llm-foundry:
/// 10,643 tokens per second and GPU); experiments/results lists the errors for others.
const SUSTAINED: f64 = 0.66;
/// Host seconds per kernel launch. An assumption.
const LAUNCH: Seconds = 5e-6;
const GIB: usize = 1 << 30;

/// Sources. Peak, memory, bandwidth, NVLink: NVIDIA's data sheets. `product`: the best bf16 shape in
/// stas00/ml-engineering, compute/accelerator, table "Maximum Achievable Matmul FLOPS" (A100 271.2, H100 794.5, H200
/// assumed equal to it, B200 1745.0 TFLOP/s). fp32: 0.8 of the data sheet; tf32: the same fraction of peak as bf16;
/// both are assumptions. `attention`: Dao 2023 (arXiv 2307.08691): up to 73 % of an A100's peak forward and 63 %
/// backward, up to 335 TFLOP/s on H100; H200 as H100, B200 scaled by the ratio of the products. Links: H100 370 GB/s
/// for a ring and 480 GB/s for an all-reduce in the switch (NVIDIA/nccl-tests#212, an NCCL maintainer), 47 GB/s for a
/// 400 Gb/s card (NVIDIA/nccl-tests#290: 46 to 48); A100 235 GB/s (the bound in NCCL's tuning.cc), 200 Gb/s cards at
/// the same fraction of line rate; B200: twice H100's NVLink, the same cards.
pub const GPUS: [GpuRates; 4] = [
    GpuRates {
        name: "a100",
        about: "A100 SXM 80 GB, 8 per node, NVLink 3, 200 Gb/s per GPU",
        peak: 312e12,
        product: 271.2e12,
        product_f32: 15.6e12,
        product_tf32: 135.6e12,
        attention: 0.73 * 312e12,
        attention_backward: 0.63 * 312e12,
        memory_bytes: 80 * GIB,
        bandwidth: 2.039e12,
        multiprocessors: 108,
        links: Links { inside: 235e9, inside_summed: 235e9, between: 23.5e9 },
    },
    GpuRates {
        memory_bytes: 141_000_000_000,
        bandwidth: 4.8e12,
        name: "h200",
        about: "H200 SXM 141 GB, otherwise like h100",
        ..H100
    },
    H100,
    GpuRates {
        name: "b200",
        about: "B200 SXM 180 GB, 8 per node, NVLink 5, 400 Gb/s per GPU",
        peak: 2250e12,
        product: 1745e12,
        product_f32: 64e12,
        product_tf32: 872e12,
        attention: 335e12 * 1745.0 / 794.5,
        attention_backward: 335e12 * 1745.0 / 794.5,
        memory_bytes: 180_000_000_000,
        bandwidth: 8e12,
        multiprocessors: 148,
        links: Links { inside: 740e9, inside_summed: 960e9, between: 47e9 },
    },
];

const H100: GpuRates = GpuRates {
    name: "h100",
    about: "H100 SXM 80 GB, 8 per node, NVLink 4, 400 Gb/s per GPU",
    peak: 989.4e12,
    product: 794.5e12,
    product_f32: 53.5e12,
    product_tf32: 397e12,
    attention: 335e12,
    attention_backward: 335e12,
    memory_bytes: 80 * GIB,
    bandwidth: 3.35e12,
    multiprocessors: 132,
    links: Links { inside: 370e9, inside_summed: 480e9, between: 47e9 },
};

/// A [`GpuRates`], with or without tensor cores for fp32 products.
pub struct Rated {
    pub gpu: GpuRates,
    pub tf32: bool,
}

impl MachineModel for Rated {
    fn name(&self) -> &str {
        self.gpu.name
    }
    fn op(&self, op: &OpCost) -> Seconds {
        let GpuRates { product, product_f32, product_tf32, attention, attention_backward, bandwidth, .. } = self.gpu;
        let wide = op.dtype == DType::F32;
        // Attention in f32 runs at the rate of f32 products.
        let rate = match op.rate {
            Rate::Product | Rate::Attention | Rate::AttentionBackward if wide => {
                SUSTAINED * if self.tf32 { product_tf32 } else { product_f32 }
            }
            Rate::Product => SUSTAINED * product,
            Rate::Attention => SUSTAINED * attention,
            Rate::AttentionBackward => SUSTAINED * attention_backward,
            Rate::Memory => f64::INFINITY,
        };
        (op.flops as f64 / rate).max(op.bytes as f64 / (bandwidth * STREAMED))
    }
    fn launch(&self) -> Seconds {
        LAUNCH
    }
    fn collective(&self, what: Collected, bytes: u64, placement: Placement) -> Seconds {
        self.gpu.links.seconds(what, bytes, placement)
    }
    fn memory(&self) -> Option<usize> {
        Some(self.gpu.memory_bytes)
    }
    fn peak(&self, dtype: DType) -> Option<f64> {
        (dtype != DType::F32).then_some(self.gpu.peak)
    }
    fn multiprocessors(&self) -> Option<usize> {
        Some(self.gpu.multiprocessors)
    }
}
