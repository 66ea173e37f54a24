//! Translates driver results into one message with device, operation and remedy. Asks the driver only for the name of a
//! result.
use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use flatshard_base::Error;

/// After these the context is lost: every later call fails too, and the process must exit.
fn is_kernel_fault(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ASSERT
    )
}

/// The codes under which the driver's kernel module logs a fault (NVIDIA, "Xid Errors"), for searching `dmesg`.
fn xid(code: CUresult) -> Option<&'static str> {
    match code {
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => Some("31"),
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE => Some("48, 63, 64, 94 or 95"),
        CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE => Some("74"),
        CUresult::CUDA_ERROR_UNKNOWN => Some("79 (fallen off the bus) or 119"),
        code if is_kernel_fault(code) => Some("13"),
        _ => None,
    }
}

/// `device`: "cuda:0 (NVIDIA H100 80GB HBM3)"; `recent`: the most recent kernels, newest first.
pub(super) fn explain(device: &str, op: &str, code: CUresult, recent: &str) -> Error {
    let name = name(code);
    let log = xid(code).map_or("see dmesg for NVRM lines".into(), |n| format!("see dmesg for NVRM: Xid {n}"));
    if is_kernel_fault(code) {
        return Error::Run(format!(
            "{device}: a kernel faulted ({name}), detected in {op}. Most recent kernels, newest first: {recent}. Faults are reported late: \
             rerun with CUDA_LAUNCH_BLOCKING=1 to find the kernel, or under compute-sanitizer to find the \
             address, and {log}; `resume: auto` continues from the last checkpoint"
        ));
    }
    let remedy = match code {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            "the GPU's memory is in use: stop other processes on it (nvidia-smi), or choose another with CUDA_VISIBLE_DEVICES"
        }
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE => {
            "the GPU's memory has uncorrectable errors: take it out of service (nvidia-smi -q -d ECC) and resume on another"
        }
        CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE => {
            "an NVLink failed: see nvidia-smi nvlink -e, take the GPU out of service and resume on others"
        }
        CUresult::CUDA_ERROR_UNKNOWN => {
            "the GPU may have dropped off the bus: if nvidia-smi does not show it, reboot and resume"
        }
        CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES => {
            "the driver compiled the kernel to more registers or shared memory than the GPU has: update the driver"
        }
        CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            "another process holds the GPU in exclusive mode: see nvidia-smi, or choose another with CUDA_VISIBLE_DEVICES"
        }
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "the driver's library and kernel module differ: reboot or reinstall it"
        }
        CUresult::CUDA_ERROR_SYSTEM_NOT_READY => "the GPU's fabric manager is not running: start nvidia-fabricmanager",
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            "the driver is too old for this build's kernels: install a newer one"
        }
        _ => return Error::Run(format!("{device}: {op}: {name}; {log}")),
    };
    match xid(code) {
        Some(_) => Error::Run(format!("{device}: {op}: {name}; {remedy}; {log}")),
        None => Error::Run(format!("{device}: {op}: {name}; {remedy}")),
    }
}

/// "CUDA_ERROR_OUT_OF_MEMORY: out of memory"; without a driver, derived from the number.
pub(super) fn name(code: CUresult) -> String {
    format!("{code:?}")
}

/// Extracts the code without its text.
pub(super) fn code(e: DriverError) -> CUresult {
    e.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_fault_names_device_kernels_and_remedy() {
        let e = explain("cuda:0 (H100)", "download", CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, "adamw_bf16, sum_squares");
        assert_eq!(e.exit_status(), 1);
        let text = e.to_string();
        for part in
            ["cuda:0 (H100)", "ILLEGAL_ADDRESS", "adamw_bf16", "CUDA_LAUNCH_BLOCKING=1", "Xid 31;", "`resume: auto`"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn other_failures_say_what_to_do() {
        let text = |code| explain("cuda:1", "copy", code, "").to_string();
        let ecc = text(CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
        assert!(ecc.contains("out of service") && ecc.contains("Xid 48, 63"), "{ecc}");
        assert!(text(CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE).contains("Xid 74"));
        assert!(text(CUresult::CUDA_ERROR_MISALIGNED_ADDRESS).contains("Xid 13"));
        assert!(text(CUresult::CUDA_ERROR_UNKNOWN).contains("nvidia-smi"));
        assert!(text(CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE).contains("CUDA_VISIBLE_DEVICES"));
        assert!(text(CUresult::CUDA_ERROR_INVALID_VALUE).starts_with("cuda:1: copy: CUDA_ERROR_INVALID_VALUE"));
    }
}
