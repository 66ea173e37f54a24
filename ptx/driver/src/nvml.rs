//! libnvidia-ml without a GPU: the readings of a monitor. FLATSHARD_SIMNVML="throttle=4,ecc_uncorrected=1,..." sets
//! them, read at each nvmlInit. Never measures anything.
#![allow(non_snake_case)] // the names are NVIDIA's
use crate::settings::variable;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

/// `nvmlReturn_t`.
const SUCCESS: c_int = 0;
const UNINITIALIZED: c_int = 1;
const INVALID_ARGUMENT: c_int = 2;
const NOT_SUPPORTED: c_int = 3;
const NOT_FOUND: c_int = 6;

/// What every GPU reports; `None` is reported as unsupported.
#[derive(Clone, Copy, Debug, PartialEq)]
struct NvmlReadings {
    /// `nvmlClocksThrottleReasons`.
    throttle: u64,
    ecc_corrected: Option<u64>,
    ecc_uncorrected: Option<u64>,
    sm_clock: u64,
    memory_clock: u64,
    temperature: u64,
    /// Milliwatts.
    power: u64,
}
const USUAL: NvmlReadings = NvmlReadings {
    throttle: 0,
    ecc_corrected: Some(0),
    ecc_uncorrected: Some(0),
    sm_clock: 1980,
    memory_clock: 2619,
    temperature: 41,
    power: 312_500,
};

fn parse(text: &str) -> Option<NvmlReadings> {
    let mut readings = USUAL;
    for pair in text.split(',').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=')?;
        let number = if value == "none" { None } else { Some(value.parse().ok()?) };
        match key {
            "throttle" => readings.throttle = number?,
            "ecc_corrected" => readings.ecc_corrected = number,
            "ecc_uncorrected" => readings.ecc_uncorrected = number,
            "sm_clock" => readings.sm_clock = number?,
            "memory_clock" => readings.memory_clock = number?,
            "temperature" => readings.temperature = number?,
            "power" => readings.power = number?,
            _ => return None,
        }
    }
    Some(readings)
}

/// Between nvmlInit and nvmlShutdown: the number of opens, and the readings.
static OPEN: Mutex<(usize, NvmlReadings)> = Mutex::new((0, USUAL));

fn readings() -> Result<NvmlReadings, c_int> {
    let (open, readings) = *OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if open > 0 { Ok(readings) } else { Err(UNINITIALIZED) }
}
/// # Safety
/// `out` can hold a `T`.
unsafe fn answer<T>(out: *mut T, value: Result<T, c_int>) -> c_int {
    match value {
        // SAFETY: upheld by the caller.
        Ok(value) => unsafe {
            *out = value;
            SUCCESS
        },
        Err(code) => code,
    }
}
/// The GPU of a handle.
fn gpu(handle: *mut c_void) -> Result<usize, c_int> {
    let gpu = (handle as usize).checked_sub(1).ok_or(INVALID_ARGUMENT)?;
    if gpu < crate::room().len() { Ok(gpu) } else { Err(INVALID_ARGUMENT) }
}
fn of<T>(handle: *mut c_void, tell: impl FnOnce(NvmlReadings) -> T) -> Result<T, c_int> {
    let readings = readings()?;
    gpu(handle).map(|_| tell(readings))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_int {
    let Some(readings) = parse(&variable("FLATSHARD_SIMNVML").unwrap_or_default()) else { return INVALID_ARGUMENT };
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    *open = (open.0 + 1, readings);
    SUCCESS
}
#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_int {
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    match open.0 {
        0 => UNINITIALIZED,
        _ => {
            open.0 -= 1;
            SUCCESS
        }
    }
}
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: c_int) -> *const c_char {
    let text = match code {
        SUCCESS => c"The operation was successful",
        UNINITIALIZED => c"NVML was not first initialized with nvmlInit()",
        INVALID_ARGUMENT => c"A supplied argument is invalid",
        NOT_SUPPORTED => c"The requested operation is not available on target device",
        NOT_FOUND => c"A query to find an object was unsuccessful",
        _ => c"An internal driver error occurred",
    };
    text.as_ptr()
}
/// # Safety
/// As in nvml.h: a string, and space for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, out: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's string.
    let id = unsafe { CStr::from_ptr(id) }.to_string_lossy().to_lowercase();
    // As cuDeviceGetPCIBusId formats them; NVML accepts a domain of four or eight digits.
    let found = (0..crate::room().len()).find(|gpu| id.trim_start_matches("0000") == format!(":{gpu:02x}:00.0"));
    let handle = readings().and_then(|_| found.ok_or(NOT_FOUND));
    // SAFETY: as above.
    unsafe { answer(out, handle.map(|gpu| (gpu + 1) as *mut c_void)) }
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct NvmlMemory {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}
/// # Safety
/// As in nvml.h: a structure whose version is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(handle: *mut c_void, out: *mut NvmlMemory) -> c_int {
    // SAFETY: the caller's structure.
    let version = unsafe { (*out).version };
    if version as usize != size_of::<NvmlMemory>() | 2 << 24 {
        return 25; // NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    }
    let memory = readings().and_then(|_| gpu(handle)).map(|gpu| {
        let (used, total) = crate::room()[gpu];
        NvmlMemory { version, total: total as u64, reserved: 0, free: (total - used) as u64, used: used as u64 }
    });
    // SAFETY: as above.
    unsafe { answer(out, memory) }
}
/// # Safety
/// `out` can hold an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetClockInfo(handle: *mut c_void, kind: c_int, out: *mut c_uint) -> c_int {
    let clock = of(handle, |readings| match kind {
        0 | 1 => Ok(readings.sm_clock as c_uint),
        2 => Ok(readings.memory_clock as c_uint),
        _ => Err(NOT_SUPPORTED),
    });
    // SAFETY: as above.
    unsafe { answer(out, clock.and_then(|clock| clock)) }
}
/// # Safety
/// `out` can hold 64 bits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(handle: *mut c_void, out: *mut u64) -> c_int {
    // SAFETY: as above.
    unsafe { answer(out, of(handle, |readings| readings.throttle)) }
}
/// # Safety
/// `out` can hold 64 bits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTotalEccErrors(
    handle: *mut c_void,
    kind: c_int,
    counter: c_int,
    out: *mut u64,
) -> c_int {
    let count = of(handle, |readings| match (kind, counter) {
        (0, 0 | 1) => readings.ecc_corrected.ok_or(NOT_SUPPORTED),
        (1, 0 | 1) => readings.ecc_uncorrected.ok_or(NOT_SUPPORTED),
        _ => Err(INVALID_ARGUMENT),
    });
    // SAFETY: as above.
    unsafe { answer(out, count.and_then(|count| count)) }
}
/// # Safety
/// `out` can hold an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTemperature(handle: *mut c_void, sensor: c_int, out: *mut c_uint) -> c_int {
    let celsius = of(handle, |readings| readings.temperature as c_uint)
        .and_then(|t| if sensor == 0 { Ok(t) } else { Err(INVALID_ARGUMENT) });
    // SAFETY: as above.
    unsafe { answer(out, celsius) }
}
/// # Safety
/// `out` can hold an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPowerUsage(handle: *mut c_void, out: *mut c_uint) -> c_int {
    // SAFETY: as above.
    unsafe { answer(out, of(handle, |readings| readings.power as c_uint)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_says_can_be_set() {
        assert_eq!(parse(""), Some(USUAL));
        assert_eq!(
            parse("throttle=4,ecc_uncorrected=none"),
            Some(NvmlReadings { throttle: 4, ecc_uncorrected: None, ..USUAL })
        );
        assert_eq!((parse("throttle=x"), parse("weight=3")), (None, None));
    }
}
