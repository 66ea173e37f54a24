//! FLATSHARD_SIMCUDA: the simulated machine, the order of its streams, and planted faults. Read once. The only file of
//! this library that reads the environment.

/// `FLATSHARD_SIMCUDA="seed=3,arch=90,gpus=1,bytes=8589934592"`; defaults are in [`SimSettings::default`].
/// [`SimSettings::default`].
#[derive(Clone, Debug, PartialEq)]
pub struct SimSettings {
    /// Seed of the order of streams; 0 is call order, as late as possible. See [`crate::queue`].
    pub seed: u64,
    /// Compute capability: 80, 90.
    pub arch: u32,
    /// Before CUDA_VISIBLE_DEVICES.
    pub gpus: usize,
    /// Memory of each GPU.
    pub bytes: usize,
    pub multiprocessors: u32,
    /// The newest CUDA version that the driver supports: 12080 is 12.8.
    pub cuda: i32,
    /// Result of cuInit.
    pub init: i32,
    /// The launch with this number (from 1) faults, as if it had read an invalid address.
    pub fault: Option<u64>,
    /// The allocation of device memory with this number fails.
    pub oom: Option<u64>,
    /// The cuStreamWaitEvent with this number is skipped, as if the program had forgotten it.
    pub forget_wait: Option<u64>,
    /// The same for cuStreamWaitValue32.
    pub forget_word: Option<u64>,
    /// Whatever can run does so as soon as it is enqueued. One such rank among late ones gets ahead of them wherever no
    /// wait keeps it back.
    pub eager: bool,
    /// `eager` and planted faults apply only to this rank (RANK in the environment).
    pub rank: Option<usize>,
    /// Each launch prints its kernel to standard error.
    pub trace: bool,
    /// CUDA_LAUNCH_BLOCKING=1: a launch returns when the kernel is done.
    pub blocking: bool,
}

impl Default for SimSettings {
    fn default() -> SimSettings {
        SimSettings {
            seed: 0,
            arch: 80,
            gpus: 1,
            bytes: 80 << 30,
            multiprocessors: 1,
            cuda: 12_080,
            init: 0,
            fault: None,
            oom: None,
            forget_wait: None,
            forget_word: None,
            eager: false,
            rank: None,
            trace: false,
            blocking: false,
        }
    }
}

/// The environment variable of another simulated library.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

impl SimSettings {
    pub fn read() -> Result<SimSettings, String> {
        let var = |name| std::env::var(name).ok();
        let mut settings = SimSettings::parse(&var("FLATSHARD_SIMCUDA").unwrap_or_default())?;
        settings.blocking = var("CUDA_LAUNCH_BLOCKING").as_deref() == Some("1");
        if let Some(visible) = var("CUDA_VISIBLE_DEVICES") {
            // As in the driver: up to the first invalid index.
            let there = |name: &&str| name.trim().parse().is_ok_and(|n: usize| n < settings.gpus);
            settings.gpus = visible.split(',').take_while(there).count();
        }
        if settings.rank.is_some() && settings.rank != var("RANK").and_then(|rank| rank.parse().ok()) {
            (settings.fault, settings.oom, settings.eager) = (None, None, false);
            (settings.forget_wait, settings.forget_word) = (None, None);
        }
        Ok(settings)
    }
    fn parse(text: &str) -> Result<SimSettings, String> {
        let mut s = SimSettings::default();
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            let wrong = || format!("FLATSHARD_SIMCUDA: {pair:?} is not a setting; the form is KEY=NUMBER,...");
            let (key, value) = pair.split_once('=').ok_or_else(wrong)?;
            let number: u64 = value.parse().map_err(|_| wrong())?;
            match key {
                "seed" => s.seed = number,
                "arch" => s.arch = number as u32,
                "gpus" => s.gpus = number as usize,
                "bytes" => s.bytes = number as usize,
                "multiprocessors" => s.multiprocessors = number as u32,
                "cuda" => s.cuda = number as i32,
                "init" => s.init = number as i32,
                "fault" => s.fault = Some(number),
                "oom" => s.oom = Some(number),
                "forget_wait" => s.forget_wait = Some(number),
                "forget_word" => s.forget_word = Some(number),
                "eager" => s.eager = number != 0,
                "trace" => s.trace = number != 0,
                "rank" => s.rank = Some(number as usize),
                _ => return Err(wrong()),
            }
        }
        Ok(s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_keys_and_numbers_and_anything_else_is_named() {
        let s = SimSettings::parse("seed=3,arch=90,oom=7").unwrap();
        assert_eq!((s.seed, s.arch, s.oom, s.gpus), (3, 90, Some(7), 1));
        assert_eq!(SimSettings::parse("").unwrap(), SimSettings::default());
        for wrong in ["seed", "seed=x", "speed=3"] {
            assert!(SimSettings::parse(wrong).unwrap_err().contains(wrong), "{wrong}");
        }
    }
}
