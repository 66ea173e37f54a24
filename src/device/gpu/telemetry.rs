//! What NVML says of a GPU beside its work: memory, clocks, what holds them down, ECC, temperature, power. Never fails:
//! where libnvidia-ml is absent, or a GPU does not tell a value, it is null.
use crate::base::DType;
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use serde::Serialize;

/// At one moment; of the GPU, whoever uses it.
#[derive(Serialize, Clone, Debug, Default, PartialEq)]
pub struct Sample {
    pub memory_used_bytes: Option<u64>,
    pub memory_total_bytes: Option<u64>,
    pub sm_clock_mhz: Option<u32>,
    pub memory_clock_mhz: Option<u32>,
    /// Why clocks are below their most, if they are: "power cap", "hot". Idleness is no reason.
    pub throttled: Option<Vec<&'static str>>,
    /// Since the driver was loaded. The second kind costs data: such a GPU should be replaced.
    pub ecc_corrected: Option<u64>,
    pub ecc_uncorrected: Option<u64>,
    pub temperature_c: Option<u32>,
    pub power_w: Option<f64>,
}

pub struct Telemetry {
    nvml: Option<Nvml>,
    /// CUDA's numbers follow CUDA_VISIBLE_DEVICES, NVML's do not: the bus id is the same.
    pci_bus_id: String,
}

impl Telemetry {
    pub fn new(pci_bus_id: impl Into<String>) -> Telemetry {
        Telemetry { nvml: Nvml::init().ok(), pci_bus_id: pci_bus_id.into() }
    }
    /// `None` where there is no NVML, or it does not know the GPU.
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

/// Dense peak FLOP/s by the maker's data sheet, without sparsity: what MFU is measured against.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// bf16 and f16, f32 accumulation.
    pub bf16: f64,
    /// f32 outside the tensor cores.
    pub fp32: f64,
}

impl Peak {
    /// Of products with inputs of that dtype.
    pub fn of(&self, dtype: DType) -> f64 {
        if dtype == DType::F32 { self.fp32 } else { self.bf16 }
    }
}

/// By part of the name that the driver gives; the first that fits.
const PEAKS: &[(&str, Peak)] = &[
    ("GB200", Peak { bf16: 2500e12, fp32: 80e12 }),
    ("B200", Peak { bf16: 2250e12, fp32: 80e12 }),
    ("H200 NVL", Peak { bf16: 835e12, fp32: 60e12 }),
    ("GH200", Peak { bf16: 989.4e12, fp32: 66.9e12 }),
    ("H200", Peak { bf16: 989.4e12, fp32: 66.9e12 }),
    ("H100 PCIe", Peak { bf16: 756e12, fp32: 51.2e12 }),
    ("H100 NVL", Peak { bf16: 835e12, fp32: 60e12 }),
    ("H100", Peak { bf16: 989.4e12, fp32: 66.9e12 }),
    ("H800", Peak { bf16: 989.4e12, fp32: 66.9e12 }),
    ("A100", Peak { bf16: 312e12, fp32: 19.5e12 }),
    ("A800", Peak { bf16: 312e12, fp32: 19.5e12 }),
    ("A30", Peak { bf16: 165e12, fp32: 10.3e12 }),
    ("L40S", Peak { bf16: 362e12, fp32: 91.6e12 }),
    ("L40", Peak { bf16: 181e12, fp32: 90.5e12 }),
    ("L4", Peak { bf16: 121e12, fp32: 30.3e12 }),
    ("A40", Peak { bf16: 149.7e12, fp32: 37.4e12 }),
    ("A10", Peak { bf16: 125e12, fp32: 31.2e12 }),
    ("RTX A6000", Peak { bf16: 154.8e12, fp32: 38.7e12 }),
    ("RTX 5090", Peak { bf16: 209.5e12, fp32: 104.8e12 }),
    ("RTX 4090", Peak { bf16: 165.2e12, fp32: 82.6e12 }),
    ("RTX 3090", Peak { bf16: 71e12, fp32: 35.6e12 }),
];

/// `None` for a GPU that the table does not know: then MFU is null unless it is measured.
pub fn peak(gpu: &str) -> Option<Peak> {
    PEAKS.iter().find(|(part, _)| gpu.contains(part)).map(|(_, peak)| *peak)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_nvml_there_is_no_sample_and_no_failure() {
        let telemetry = Telemetry::new("0000:00:00.0");
        // No GPU sits on that bus id, with or without NVML.
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
    fn peaks_are_those_of_the_exact_part() {
        let bf16 = |name| peak(name).map(|p| p.bf16);
        assert_eq!(bf16("NVIDIA H100 80GB HBM3"), Some(989.4e12));
        assert_eq!(bf16("NVIDIA H100 PCIe"), Some(756e12));
        assert_eq!(bf16("NVIDIA H200"), Some(989.4e12));
        assert_eq!(bf16("NVIDIA A100-SXM4-80GB"), Some(312e12));
        assert_eq!(bf16("NVIDIA L40S"), Some(362e12));
        assert_eq!(bf16("NVIDIA L4"), Some(121e12));
        assert_eq!(bf16("NVIDIA GeForce GTX 1080"), None);
    }
}
