//! Cards of workstations and clouds without a switch between them, as tables of published rates. None was measured by
//! this project, and what is not published is an assumption. Never knows what is computed.
//!
//! Peak (dense, fp32 accumulation), memory and bandwidth: the vendors' data sheets and architecture papers. Not
//! published: products at 0.8 of the peak, as on H100; attention at 0.6 of it; products in fp32 at 0.8. Links: PCIe 4
//! x16 at 20 GB/s and PCIe 5 x16 at 40 GB/s per rank of a ring, 12 and 25 GB/s for GeForce cards, whose copies go
//! through host memory; 100 Gb/s of network for a host of eight. MI300X: xGMI at 310 GB/s in a ring, 400 Gb/s cards.
use super::links::Links;
use super::machine::{GPUS, GpuRates};

const GB: usize = 1_000_000_000;
const GIB: usize = 1 << 30;

const PCIE4: Links = Links { inside: 20e9, inside_summed: 20e9, between: 1.5e9 };
const PCIE5: Links = Links { inside: 40e9, inside_summed: 40e9, between: 1.5e9 };
const GEFORCE4: Links = Links { inside: 12e9, inside_summed: 12e9, between: 1.5e9 };
const GEFORCE5: Links = Links { inside: 25e9, inside_summed: 25e9, between: 1.5e9 };
const XGMI: Links = Links { inside: 310e9, inside_summed: 310e9, between: 47e9 };

/// A card with the assumed fractions of its `peak` in bf16 and of `fp32`, in FLOP/s.
const fn card(name: &'static str, about: &'static str, peak: f64, fp32: f64, links: Links) -> GpuRates {
    GpuRates {
        name,
        about,
        peak,
        product: 0.8 * peak,
        product_f32: 0.8 * fp32,
        product_tf32: 0.4 * peak,
        attention: 0.6 * peak,
        attention_backward: 0.6 * peak,
        memory_bytes: 24 * GIB,
        bandwidth: 1e12,
        multiprocessors: 128,
        links,
    }
}

pub const CARDS: [GpuRates; 8] = [
    GpuRates { bandwidth: 1.008e12, ..card("4090", "GeForce RTX 4090 24 GB, PCIe 4", 165.2e12, 82.6e12, GEFORCE4) },
    GpuRates {
        memory_bytes: 32 * GIB,
        bandwidth: 1.792e12,
        multiprocessors: 170,
        ..card("5090", "GeForce RTX 5090 32 GB, PCIe 5", 209.5e12, 104.8e12, GEFORCE5)
    },
    GpuRates {
        bandwidth: 0.6e12,
        multiprocessors: 80,
        ..card("a10g", "A10G 24 GB of AWS, PCIe 4", 70e12, 35e12, PCIE4)
    },
    GpuRates { bandwidth: 0.3e12, multiprocessors: 58, ..card("l4", "L4 24 GB, PCIe 4", 121e12, 30.3e12, PCIE4) },
    GpuRates {
        memory_bytes: 48 * GIB,
        bandwidth: 0.864e12,
        multiprocessors: 142,
        ..card("l40s", "L40S 48 GB, PCIe 4", 362e12, 91.6e12, PCIE4)
    },
    GpuRates {
        memory_bytes: 48 * GIB,
        bandwidth: 0.96e12,
        multiprocessors: 142,
        ..card("rtx6000-ada", "RTX 6000 Ada 48 GB, PCIe 4", 364.2e12, 91.1e12, PCIE4)
    },
    GpuRates {
        memory_bytes: 96 * GIB,
        bandwidth: 1.792e12,
        multiprocessors: 188,
        ..card("rtx6000-blackwell", "RTX PRO 6000 Blackwell 96 GB, PCIe 5", 503.8e12, 125e12, PCIE5)
    },
    GpuRates {
        memory_bytes: 192 * GB,
        bandwidth: 5.3e12,
        multiprocessors: 304,
        ..card("mi300x", "MI300X 192 GB, 8 per node: numbers only, nothing here runs on it", 1307.4e12, 163.4e12, XGMI)
    },
];

/// Every GPU of the tables.
pub fn all() -> impl Iterator<Item = &'static GpuRates> {
    GPUS.iter().chain(&CARDS)
}

/// Words of a vendor's name of a card that tell no two of them apart here.
const MEANINGLESS: [&str; 18] = [
    "nvidia",
    "amd",
    "instinct",
    "geforce",
    "rtx",
    "pro",
    "tensor",
    "core",
    "gpu",
    "sxm",
    "sxm4",
    "sxm5",
    "sxm6",
    "hbm2e",
    "hbm3",
    "hbm3e",
    "generation",
    "edition",
];

/// The GPU of a table that a name means, such as `NVIDIA H100 80GB HBM3` or `RTX4090`: the words of its own name, and
/// the size of its memory if the name has one.
pub fn named(name: &str) -> Option<&'static GpuRates> {
    let (sizes, given): (Vec<_>, Vec<_>) = words(name).into_iter().partition(|word| gigabytes(word).is_some());
    let fits = |gpu: &GpuRates, size: usize| [GB, GIB].iter().any(|unit| gpu.memory_bytes.abs_diff(size * unit) < GB);
    all().find(|gpu| {
        words(gpu.name) == given && sizes.iter().filter_map(|word| gigabytes(word)).all(|size| fits(gpu, size))
    })
}

/// `rtx4090` and `mi300x` are one word each, the former without its prefix.
fn words(name: &str) -> Vec<String> {
    let name = name.to_lowercase();
    let parts = name.split(|c: char| !c.is_ascii_alphanumeric()).map(|part| match part.strip_prefix("rtx") {
        Some(number) if number.starts_with(|c: char| c.is_ascii_digit()) => number,
        _ => part,
    });
    parts.filter(|part| !part.is_empty() && !MEANINGLESS.contains(part)).map(str::to_string).collect()
}

fn gigabytes(word: &str) -> Option<usize> {
    word.strip_suffix("gb").and_then(|digits| digits.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vendors_names_mean_the_cards_of_the_tables() {
        for (given, card) in [
            ("H100", Some("h100")),
            ("NVIDIA H100 80GB HBM3", Some("h100")),
            ("NVIDIA A100-SXM4-80GB", Some("a100")),
            ("RTX4090", Some("4090")),
            ("NVIDIA GeForce RTX 5090", Some("5090")),
            ("nvidia-l40s", Some("l40s")),
            ("NVIDIA RTX 6000 Ada Generation", Some("rtx6000-ada")),
            ("NVIDIA RTX PRO 6000 Blackwell", Some("rtx6000-blackwell")),
            ("AMD Instinct MI300X", Some("mi300x")),
            // Others have other rates, or another memory.
            ("NVIDIA A100-SXM4-40GB", None),
            ("NVIDIA H100 PCIe", None),
            ("NVIDIA GeForce RTX 4090 D", None),
            ("rtx6000", None),
            ("", None),
        ] {
            assert_eq!(named(given).map(|gpu| gpu.name), card, "{given}");
        }
    }
}
