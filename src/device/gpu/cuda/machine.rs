//! Which GPUs this machine has and whether they can run this build, checked before anything starts. Every refusal is
//! one message with what was found, what is needed and what to do. Creates no context and allocates no device memory.
use super::failure;
use cudarc::driver::{result, sys};
use flatshard_base::{Error, Result};

/// CUDA 12.0, whose driver is the first to support PTX ISA 8.0 and sm_90; and its driver branch.
const NEEDED: (i32, &str) = (12_000, "525");
/// The oldest architecture with bf16 matrix instructions and cp.async.
const OLDEST: u32 = 80;

/// The GPUs that the driver reports, with CUDA_VISIBLE_DEVICES applied.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// The newest CUDA version that the driver supports; 12080 is CUDA 12.8.
    pub cuda: i32,
    pub gpus: Vec<Gpu>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    pub name: String,
    /// 80, 90, 100.
    pub arch: u32,
    pub bytes: usize,
}

impl Machine {
    /// Fails with an input error if there is no usable driver.
    pub fn probe() -> Result<Machine> {
        // SAFETY: loads libcuda.so.1, whose initializers have no requirements.
        if !unsafe { sys::is_culib_present() } {
            return Err(no_driver());
        }
        let mut cuda = 0;
        // SAFETY: writes one int; works before the driver is initialized.
        let version = unsafe { sys::cuDriverGetVersion(&mut cuda) };
        version.result().map_err(|e| unusable(failure::code(e)))?;
        // Before cuInit, so that an old driver is reported as such, whatever else is wrong with it.
        too_old(cuda)?;
        result::init().map_err(|e| unusable(failure::code(e)))?;
        let count = result::device::get_count().map_err(|e| unusable(failure::code(e)))?;
        let gpus = (0..count).map(Gpu::read).collect::<std::result::Result<Vec<Gpu>, _>>();
        Ok(Machine { cuda, gpus: gpus.map_err(|e| unusable(failure::code(e)))? })
    }

    /// The GPU of a local rank, if `ranks_per_gpu` ranks share each.
    pub fn choose(&self, local_rank: usize, ranks_per_gpu: usize) -> Result<(usize, &Gpu)> {
        let index = local_rank / ranks_per_gpu.max(1);
        let Some(gpu) = self.gpus.get(index) else {
            let has = match self.gpus.len() {
                0 => {
                    return Err(Error::input(
                        "`device: cuda`: no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use `device: cpu`",
                    ));
                }
                1 => "one GPU is".to_string(),
                n => format!("{n} GPUs are"),
            };
            return Err(Error::input(format!(
                "local rank {local_rank} needs GPU {index}, but only {has} visible: start one rank per \
                 GPU (`nproc_per_node: {}`), or list more in CUDA_VISIBLE_DEVICES",
                self.gpus.len()
            )));
        };
        if gpu.arch < OLDEST {
            return Err(Error::input(format!(
                "GPU {index} is a {} (sm_{}): the kernels need sm_{OLDEST} or newer (A100, H100, RTX 30 and later); choose \
                 another with CUDA_VISIBLE_DEVICES, or use `device: cpu`",
                gpu.name, gpu.arch
            )));
        }
        Ok((index, gpu))
    }
}

impl Gpu {
    fn read(ordinal: i32) -> std::result::Result<Gpu, result::DriverError> {
        use sys::CUdevice_attribute as Attribute;
        let device = result::device::get(ordinal)?;
        // SAFETY: `device` comes from `device::get`.
        let attribute = |which| unsafe { result::device::get_attribute(device, which) };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(Gpu {
            name: result::device::get_name(device)?,
            arch: (major * 10 + minor) as u32,
            // SAFETY: as above.
            bytes: unsafe { result::device::total_mem(device) }?,
        })
    }
}

fn no_driver() -> Error {
    Error::input(
        "`device: cuda` needs an NVIDIA driver, but libcuda.so.1 was not found: install one (branch 525 or newer), or in a \
         container start it with --gpus all; or use `device: cpu`",
    )
}

fn too_old(cuda: i32) -> Result<()> {
    let (needed, branch) = NEEDED;
    match cuda >= needed {
        true => Ok(()),
        false => Err(Error::input(format!(
            "the NVIDIA driver is too old: it supports CUDA {}, but the kernels need {} (driver branch {branch} or newer); \
             update the driver, or use `device: cpu`",
            dotted(cuda),
            dotted(needed)
        ))),
    }
}

fn unusable(code: sys::CUresult) -> Error {
    let remedy = match code {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => "no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES",
        sys::CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "libcuda.so.1 is the toolkit's stub, not a driver: remove its directory from LD_LIBRARY_PATH"
        }
        sys::CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => "the driver's library and kernel module differ: reboot",
        sys::CUresult::CUDA_ERROR_SYSTEM_NOT_READY => "nvidia-fabricmanager is not running: start it",
        _ => "check nvidia-smi and dmesg",
    };
    Error::input(format!(
        "`device: cuda`: the driver is unusable ({}): {remedy}; or use `device: cpu`",
        failure::name(code)
    ))
}

/// 12080 is "12.8".
fn dotted(cuda: i32) -> String {
    format!("{}.{}", cuda / 1000, cuda % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(archs: &[u32]) -> Machine {
        let gpu = |&arch: &u32| Gpu { name: format!("GPU of {arch}"), arch, bytes: 80 << 30 };
        Machine { cuda: 12_080, gpus: archs.iter().map(gpu).collect() }
    }

    #[test]
    fn ranks_take_the_gpu_of_their_number_and_may_share() {
        let two = machine(&[90, 80]);
        assert_eq!(two.choose(1, 1).unwrap().0, 1);
        assert_eq!([0, 1, 2, 3].map(|rank| two.choose(rank, 2).unwrap().0), [0, 0, 1, 1]);
        let e = two.choose(2, 1).unwrap_err();
        assert_eq!(e.exit_status(), 2);
        let text = e.to_string();
        assert!(text.contains("GPU 2") && text.contains("2 GPUs") && text.contains("`nproc_per_node: 2`"), "{text}");
        assert!(machine(&[]).choose(0, 1).unwrap_err().to_string().contains("no GPU"));
    }

    #[test]
    fn a_gpu_and_a_driver_that_are_too_old_are_named_with_what_is_needed() {
        let text = machine(&[75]).choose(0, 1).unwrap_err().to_string();
        assert!(text.contains("GPU of 75 (sm_75)") && text.contains("sm_80"), "{text}");
        let e = too_old(11_080).unwrap_err();
        assert_eq!(e.exit_status(), 2);
        assert!(e.to_string().contains("CUDA 11.8") && e.to_string().contains("12.0 (driver branch 525"), "{e}");
        too_old(12_000).unwrap();
        too_old(13_000).unwrap();
    }

    #[test]
    fn without_a_driver_probing_fails_and_with_one_it_lists_the_gpus() {
        match Machine::probe() {
            Ok(machine) => assert!(machine.cuda >= NEEDED.0),
            Err(e) => {
                assert_eq!(e.exit_status(), 2);
                assert!(e.to_string().contains("`device: cpu`"), "{e}");
            }
        }
        assert!(no_driver().to_string().contains("libcuda.so.1 was not found"));
        assert!(unusable(sys::CUresult::CUDA_ERROR_NO_DEVICE).to_string().contains("CUDA_VISIBLE_DEVICES"));
    }
}
