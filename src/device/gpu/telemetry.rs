//! GPU telemetry from NVML: memory, clocks, throttling, ECC, temperature, power. Never fails: without libnvidia-ml, or
//! where a GPU does not report a value, it is null.
use flatshard_base::DType;
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use serde::Serialize;

/// A sample of the whole GPU, including other processes' use.
#[derive(Serialize, Clone, Debug, Default, PartialEq)]
pub struct Sample {
    pub memory_used_bytes: Option<u64>,
    pub memory_total_bytes: Option<u64>,
    pub sm_clock_mhz: Option<u32>,
    pub memory_clock_mhz: Option<u32>,
    /// Why clocks are below maximum, if they are: "power cap", "hot". Idleness does not count.
    pub throttled: Option<Vec<&'static str>>,
    /// Since the driver was loaded. Uncorrected errors lose data: such a GPU should be replaced.
    pub ecc_corrected: Option<u64>,
    pub ecc_uncorrected: Option<u64>,
    pub temperature_c: Option<u32>,
    pub power_w: Option<f64>,
}

pub struct Telemetry {
    nvml: Option<Nvml>,
    /// CUDA's indices follow CUDA_VISIBLE_DEVICES and NVML's do not, but the bus id is the same.
    pci_bus_id: String,
}

impl Telemetry {
    pub fn new(pci_bus_id: impl Into<String>) -> Telemetry {
        Telemetry { nvml: Nvml::init().ok(), pci_bus_id: pci_bus_id.into() }
    }
    /// `None` without NVML, or if it does not know the GPU.
    pub fn sample(&self) -> Option<Sample> {
        let device = self.nvml.as_ref()?.device_by_pci_bus_id(self.pci_bus_id.as_str()).ok()?;
        let memory = device.memory_info().ok();
        let ecc = |kind| device.total_ecc_errors(kind, EccCounter::Volatile).ok();
        Some(Sample {
            memory_used_bytes: memory.as_ref().map(|m| m.used),
            memory_total_bytes: memory.as_ref().map(|m| m.total),
            sm_clock_mhz: device.clock_info(Clock::SM).ok(),
            memory_clock_mhz: device.clock_info(Clock::Memory).ok(),
            throttled: device.current_throttle_reasons().ok().map(reasons),
            ecc_corrected: ecc(MemoryError::Corrected),
            ecc_uncorrected: ecc(MemoryError::Uncorrected),
            temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
            power_w: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1e3),
        })
    }
}

fn reasons(set: ThrottleReasons) -> Vec<&'static str> {
    let names = [
        (ThrottleReasons::SW_POWER_CAP, "power cap"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power brake"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "hot"),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "too hot"),
        (ThrottleReasons::HW_SLOWDOWN, "hardware slowdown"),
        (ThrottleReasons::SYNC_BOOST, "sync boost"),
        (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "clock setting"),
    ];
    names.into_iter().filter(|(reason, _)| set.contains(*reason)).map(|(_, name)| name).collect()
}

/// Peak rates from the vendor's data sheet: the reference for `mfu` and `sol`. FLOP/s are dense, which most sheets give
/// only in a footnote: the large numbers are with sparsity, twice as high.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DataSheet {
    /// bf16 and f16, with f32 accumulation.
    pub bf16: f64,
    /// f32 outside the tensor cores.
    pub fp32: f64,
    /// Bytes per second.
    pub bandwidth: f64,
}

impl DataSheet {
    /// FLOP/s of products with inputs of that dtype. In TF32, all of these GPUs have half the rate of bf16.
    pub fn flops(&self, dtype: DType, tf32: bool) -> f64 {
        match dtype {
            DType::F32 if tf32 => self.bf16 / 2.0,
            DType::F32 => self.fp32,
            _ => self.bf16,
        }
    }
    /// The numbers of a rank that shares the GPU.
    pub fn share(&self, share: f64) -> DataSheet {
        DataSheet { bf16: self.bf16 * share, fp32: self.fp32 * share, bandwidth: self.bandwidth * share }
    }
}

/// By part of the driver's name; the first match counts.
const DATA_SHEETS: &[(&str, DataSheet)] = &[
    ("GB200", DataSheet { bf16: 2500e12, fp32: 80e12, bandwidth: 8000e9 }),
    ("B200", DataSheet { bf16: 2250e12, fp32: 80e12, bandwidth: 8000e9 }),
    ("H200 NVL", DataSheet { bf16: 835e12, fp32: 60e12, bandwidth: 4800e9 }),
    ("GH200 144G", DataSheet { bf16: 989.4e12, fp32: 66.9e12, bandwidth: 4900e9 }),
    ("GH200", DataSheet { bf16: 989.4e12, fp32: 66.9e12, bandwidth: 4000e9 }),
    ("H200", DataSheet { bf16: 989.4e12, fp32: 66.9e12, bandwidth: 4800e9 }),
    ("H100 PCIe", DataSheet { bf16: 756e12, fp32: 51.2e12, bandwidth: 2000e9 }),
    ("H100 NVL", DataSheet { bf16: 835e12, fp32: 60e12, bandwidth: 3900e9 }),
    ("H100", DataSheet { bf16: 989.4e12, fp32: 66.9e12, bandwidth: 3350e9 }),
    ("H800 PCIe", DataSheet { bf16: 756e12, fp32: 51.2e12, bandwidth: 2000e9 }),
    ("H800", DataSheet { bf16: 989.4e12, fp32: 66.9e12, bandwidth: 3350e9 }),
    ("A100 80GB PCIe", DataSheet { bf16: 312e12, fp32: 19.5e12, bandwidth: 1935e9 }),
    ("A100-SXM4-80GB", DataSheet { bf16: 312e12, fp32: 19.5e12, bandwidth: 2039e9 }),
    ("A100", DataSheet { bf16: 312e12, fp32: 19.5e12, bandwidth: 1555e9 }),
    ("A800 80GB PCIe", DataSheet { bf16: 312e12, fp32: 19.5e12, bandwidth: 1935e9 }),
    ("A800-SXM4-80GB", DataSheet { bf16: 312e12, fp32: 19.5e12, bandwidth: 2039e9 }),
    ("A800", DataSheet { bf16: 312e12, fp32: 19.5e12, bandwidth: 1555e9 }),
    ("A30", DataSheet { bf16: 165e12, fp32: 10.3e12, bandwidth: 933e9 }),
    ("L40S", DataSheet { bf16: 362e12, fp32: 91.6e12, bandwidth: 864e9 }),
    ("L40", DataSheet { bf16: 181e12, fp32: 90.5e12, bandwidth: 864e9 }),
    ("L4", DataSheet { bf16: 121e12, fp32: 30.3e12, bandwidth: 300e9 }),
    ("A40", DataSheet { bf16: 149.7e12, fp32: 37.4e12, bandwidth: 696e9 }),
    ("A10", DataSheet { bf16: 125e12, fp32: 31.2e12, bandwidth: 600e9 }),
    ("RTX A6000", DataSheet { bf16: 154.8e12, fp32: 38.7e12, bandwidth: 768e9 }),
    ("RTX 5090", DataSheet { bf16: 209.5e12, fp32: 104.8e12, bandwidth: 1792e9 }),
    ("RTX 4090", DataSheet { bf16: 165.2e12, fp32: 82.6e12, bandwidth: 1008e9 }),
    ("RTX 3090", DataSheet { bf16: 71e12, fp32: 35.6e12, bandwidth: 936e9 }),
];

/// `None` if the GPU is not in the table, and is to be measured. A name that goes on is another part: "A10G", "RTX 4090
/// Laptop GPU".
pub fn data_sheet(gpu: &str) -> Option<DataSheet> {
    let is = |part: &str| {
        let rest = gpu.split_once(part).map(|(_, rest)| rest);
        let goes_on = |c: char| c.is_ascii_alphanumeric() || part.starts_with("RTX");
        rest.is_some_and(|rest| !rest.starts_with(goes_on))
    };
    DATA_SHEETS.iter().find(|(part, _)| is(part)).map(|(_, sheet)| *sheet)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_nvml_there_is_no_sample_and_no_failure() {
        let telemetry = Telemetry::new("0000:00:00.0");
        // No GPU has that bus id, with or without NVML.
        assert_eq!(telemetry.sample(), None);
        let line = serde_json::to_value(Sample::default()).unwrap();
        assert!(line["sm_clock_mhz"].is_null() && line["throttled"].is_null(), "{line}");
    }

    #[test]
    fn reasons_are_named_and_idleness_is_none() {
        assert_eq!(reasons(ThrottleReasons::GPU_IDLE), Vec::<&str>::new());
        let set = ThrottleReasons::SW_POWER_CAP | ThrottleReasons::HW_THERMAL_SLOWDOWN;
        assert_eq!(reasons(set), ["power cap", "too hot"]);
    }

    #[test]
    fn rates_are_those_of_the_exact_part() {
        let of = |name| data_sheet(name).map(|sheet| (sheet.bf16 / 1e12, sheet.bandwidth / 1e9));
        assert_eq!(of("NVIDIA H100 80GB HBM3"), Some((989.4, 3350.0)));
        assert_eq!(of("NVIDIA H100 PCIe"), Some((756.0, 2000.0)));
        assert_eq!(of("NVIDIA H100 NVL"), Some((835.0, 3900.0)));
        assert_eq!(of("NVIDIA H200"), Some((989.4, 4800.0)));
        assert_eq!(of("NVIDIA GH200 480GB"), Some((989.4, 4000.0)));
        assert_eq!(of("NVIDIA B200"), Some((2250.0, 8000.0)));
        assert_eq!(of("NVIDIA A100-SXM4-80GB"), Some((312.0, 2039.0)));
        assert_eq!(of("NVIDIA A100-PCIE-40GB"), Some((312.0, 1555.0)));
        assert_eq!(of("NVIDIA L40S"), Some((362.0, 864.0)));
        assert_eq!(of("NVIDIA L4"), Some((121.0, 300.0)));
        assert_eq!(of("NVIDIA GeForce RTX 4090"), Some((165.2, 1008.0)));
        for other in ["GeForce GTX 1080", "A10G", "GeForce RTX 4090 Laptop GPU", "GeForce RTX 3090 Ti"] {
            assert_eq!(data_sheet(&format!("NVIDIA {other}")), None, "{other}");
        }
        let h100 = data_sheet("NVIDIA H100 80GB HBM3").unwrap();
        let of = |dtype, tf32| h100.flops(dtype, tf32) / 1e12;
        assert_eq!([of(DType::F32, false), of(DType::F32, true), of(DType::F16, true)], [66.9, 494.7, 989.4]);
    }
}
