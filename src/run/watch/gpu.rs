//! Telemetry of this rank's GPU at logged steps, and the warnings that follow from it. Never fails.
use crate::base::Result;
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::telemetry::{Sample, Telemetry};

pub struct GpuWatch {
    telemetry: Option<Telemetry>,
    last: Sample,
}

impl GpuWatch {
    /// Without a GPU, samples are empty.
    pub fn new(gpu: Option<&Cuda>) -> Result<GpuWatch> {
        let telemetry = gpu.map(|gpu| gpu.pci_bus_id().map(Telemetry::new)).transpose()?;
        Ok(GpuWatch { telemetry, last: Sample::default() })
    }
    /// A sample, and a warning for each problem that began since the last one.
    pub fn sample(&mut self) -> (Option<Sample>, Vec<String>) {
        let sample = self.telemetry.as_ref().and_then(Telemetry::sample);
        let Some(now) = &sample else { return (None, Vec::new()) };
        let last = std::mem::replace(&mut self.last, now.clone());
        (sample, warnings(&last, &self.last))
    }
}

/// Once each time a problem begins.
fn warnings(last: &Sample, now: &Sample) -> Vec<String> {
    let before = last.throttled.as_deref().unwrap_or_default();
    let begun: Vec<_> = now.throttled.iter().flatten().filter(|reason| !before.contains(reason)).copied().collect();
    let mut warnings = Vec::new();
    if !begun.is_empty() {
        let clock = now.sm_clock_mhz.map_or(String::new(), |mhz| format!(" to {mhz} MHz"));
        let heat = now.temperature_c.map_or(String::new(), |c| format!(", {c} C"));
        let power = now.power_w.map_or(String::new(), |watts| format!(", {watts:.0} W"));
        warnings.push(format!("the GPU throttles its clock{clock}: {}{heat}{power}", begun.join(", ")));
    }
    if now.ecc_uncorrected > last.ecc_uncorrected.or(Some(0)) {
        let errors = now.ecc_uncorrected.unwrap_or(0);
        warnings.push(format!(
            "GPU memory has lost data: {errors} uncorrected ECC errors since the driver was loaded. Replace the GPU"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_come_once_for_each_time_that_something_begins() {
        let cool = Sample { throttled: Some(vec![]), ecc_uncorrected: Some(0), ..Sample::default() };
        let hot = Sample {
            throttled: Some(vec!["hot"]),
            sm_clock_mhz: Some(1200),
            temperature_c: Some(88),
            power_w: Some(512.3),
            ..cool.clone()
        };
        assert_eq!(warnings(&Sample::default(), &cool), Vec::<String>::new());
        assert_eq!(warnings(&cool, &hot), ["the GPU throttles its clock to 1200 MHz: hot, 88 C, 512 W"]);
        assert_eq!(warnings(&hot, &hot), Vec::<String>::new());
        assert_eq!(warnings(&cool, &hot).len(), 1, "again, after it had cooled down");
        let lost = Sample { ecc_uncorrected: Some(2), ..cool.clone() };
        assert!(warnings(&cool, &lost)[0].contains("lost data: 2 uncorrected ECC errors"));
        assert_eq!(warnings(&lost, &lost), Vec::<String>::new());
        assert_eq!(warnings(&lost, &Sample::default()), Vec::<String>::new(), "a GPU without telemetry has no news");
    }
}
