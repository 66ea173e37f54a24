//! Results of the driver API by their numbers and names in cuda.h. Never decides which applies.
use std::ffi::CStr;

/// `CUresult` other than success.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Code(pub i32);
pub type CuResult<T = ()> = std::result::Result<T, Code>;

/// Prints diagnostics that no GPU would give to standard error.
pub fn say(what: &str) {
    eprintln!("simulated CUDA: {what}");
}

macro_rules! codes {
    ($($name:ident = $number:literal: $text:literal;)*) => {
        impl Code {
            $(pub const $name: Code = Code($number);)*
        }
        /// The name in cuda.h and its description.
        pub fn words(number: i32) -> Option<(&'static CStr, &'static CStr)> {
            let text = |s: &'static str| CStr::from_bytes_with_nul(s.as_bytes()).ok();
            let (name, meaning) = match number {
                0 => ("CUDA_SUCCESS\0", "no error\0"),
                $($number => (concat!("CUDA_ERROR_", stringify!($name), "\0"), concat!($text, "\0")),)*
                _ => return None,
            };
            text(name).zip(text(meaning))
        }
    };
}
codes! {
    INVALID_VALUE = 1: "invalid argument";
    OUT_OF_MEMORY = 2: "out of memory";
    NOT_INITIALIZED = 3: "initialization error";
    STUB_LIBRARY = 34: "CUDA driver is a stub library";
    DEVICE_UNAVAILABLE = 46: "CUDA-capable device(s) is/are busy or unavailable";
    NO_DEVICE = 100: "no CUDA-capable device is detected";
    INVALID_DEVICE = 101: "invalid device ordinal";
    INVALID_CONTEXT = 201: "invalid device context";
    NO_BINARY_FOR_GPU = 209: "no kernel image is available for execution on the device";
    ECC_UNCORRECTABLE = 214: "uncorrectable ECC error encountered";
    INVALID_PTX = 218: "a PTX JIT compilation failed";
    UNSUPPORTED_PTX_VERSION = 222: "the provided PTX was compiled with an unsupported toolchain.";
    INVALID_HANDLE = 400: "invalid resource handle";
    ILLEGAL_STATE = 401: "the operation cannot be performed in the present state";
    NOT_FOUND = 500: "named symbol not found";
    NOT_READY = 600: "device not ready";
    ILLEGAL_ADDRESS = 700: "an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = 701: "too many resources requested for launch";
    LAUNCH_TIMEOUT = 702: "the launch timed out and was terminated";
    MISALIGNED_ADDRESS = 716: "misaligned address";
    LAUNCH_FAILED = 719: "unspecified launch failure";
    NOT_SUPPORTED = 801: "operation not supported";
    SYSTEM_DRIVER_MISMATCH = 803: "system has unsupported display driver / cuda driver combination";
    STREAM_CAPTURE_UNSUPPORTED = 900: "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901: "operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE = 902: "operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED = 903: "capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED = 904: "capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION = 905: "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906: "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907: "operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD = 908: "attempt to terminate a thread-local capture sequence from another thread";
    INVALID_CLUSTER_SIZE = 912: "invalid cluster dimension";
    UNKNOWN = 999: "unknown error";
}
