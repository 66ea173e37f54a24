//! The NCCL functions that groups use, loaded on first use. Never panics on a missing symbol.
//!
//! Why not cudarc's binding: it looks only for `libnccl.so`, while distributions and Python wheels install
//! `libnccl.so.2`; it panics if a function is missing; and it stores results in a Rust enum, which a newer library may
//! exceed.
//!
//! Constants and layouts are those of nccl.h 2.18 to 2.32. The config is version 2.17's; its size tells later versions
//! to use their defaults for the missing fields.
use crate::base::{Error, Result};
use crate::comm::env::limits_nccl_ctas;
use libloading::Library;
use serde::{Deserialize, Serialize};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

/// `ncclComm_t`.
pub type Handle = *mut c_void;
/// `cudaStream_t`, which is the driver's `CUstream`.
pub type Stream = *mut c_void;

pub const SUCCESS: c_int = 0;
pub const IN_PROGRESS: c_int = 7;

/// What a run asks of its communicators beyond NCCL's own choices. By default nothing, which leaves everything to
/// NCCL and its environment variables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclOptions {
    /// Most CTAs (multiprocessors) that a collective occupies.
    pub max_ctas: Option<usize>,
    /// Registers long-lived buffers as symmetric windows, where NCCL has an allocation and a window for them.
    pub windows: bool,
}

/// `winFlags`: a collective may assume that operands have the same offset in the windows of all ranks.
pub const WINDOW_SYMMETRIC: c_int = 1;

/// `ncclRedOp_t`.
pub const SUM: c_int = 0;
pub const MAX: c_int = 2;

/// `ncclUniqueId`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` as of 2.17.
#[repr(C)]
pub struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    pub blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}
const UNDEFINED: c_int = c_int::MIN;
impl NcclConfig {
    /// Calls return at once and are polled, which makes timeouts possible. What `options` does not set is undefined:
    /// NCCL then uses its environment variables and its own choice.
    pub fn non_blocking(options: &NcclOptions) -> NcclConfig {
        let ctas = |n| c_int::try_from(n).unwrap_or(c_int::MAX);
        NcclConfig {
            size: size_of::<NcclConfig>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: options.max_ctas.map_or(UNDEFINED, ctas),
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// The oldest version with communicators that can be split and can register buffers.
const NEEDED: c_int = 21_901;
/// The oldest version with windows.
const WINDOWS: c_int = 22_703;

macro_rules! functions {
    ({$($name:ident: $symbol:literal ($($arg:ty),*);)*} optional {$($maybe:ident: $other:literal ($($marg:ty),*);)*}) => {
        /// One function pointer per call; `None` if the library is older than the call.
        pub struct Nccl {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> c_int,)*
            $(pub $maybe: Option<unsafe extern "C" fn($($marg),*) -> c_int>,)*
            pub(super) error_string: unsafe extern "C" fn(c_int) -> *const c_char,
            /// Keeps the function pointers valid.
            pub(super) _library: Library,
        }
        impl Nccl {
            /// # Safety
            /// `library` is NCCL, whose functions have the signatures of nccl.h.
            unsafe fn bind(library: Library) -> std::result::Result<Nccl, libloading::Error> {
                // SAFETY: the signatures are those of nccl.h; the pointers live as long as `_library`.
                unsafe {
                    Ok(Nccl {
                        $($name: *library.get($symbol)?,)*
                        $($maybe: library.get($other).ok().map(|f| *f),)*
                        error_string: *library.get(b"ncclGetErrorString\0")?,
                        _library: library,
                    })
                }
            }
        }
    };
}
functions! {{
    version: b"ncclGetVersion\0" (*mut c_int);
    unique_id: b"ncclGetUniqueId\0" (*mut UniqueId);
    init: b"ncclCommInitRankConfig\0" (*mut Handle, c_int, UniqueId, c_int, *mut NcclConfig);
    split: b"ncclCommSplit\0" (Handle, c_int, c_int, *mut Handle, *mut NcclConfig);
    finalize: b"ncclCommFinalize\0" (Handle);
    destroy: b"ncclCommDestroy\0" (Handle);
    abort: b"ncclCommAbort\0" (Handle);
    async_error: b"ncclCommGetAsyncError\0" (Handle, *mut c_int);
    all_gather: b"ncclAllGather\0" (*const c_void, *mut c_void, usize, c_int, Handle, Stream);
    reduce_scatter: b"ncclReduceScatter\0" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream);
    all_reduce: b"ncclAllReduce\0" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream);
    broadcast: b"ncclBroadcast\0" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream);
    send: b"ncclSend\0" (*const c_void, usize, c_int, c_int, Handle, Stream);
    recv: b"ncclRecv\0" (*mut c_void, usize, c_int, c_int, Handle, Stream);
    group_start: b"ncclGroupStart\0" ();
    group_end: b"ncclGroupEnd\0" ();
} optional {
    mem_alloc: b"ncclMemAlloc\0" (*mut *mut c_void, usize);
    mem_free: b"ncclMemFree\0" (*mut c_void);
    register: b"ncclCommRegister\0" (Handle, *mut c_void, usize, *mut *mut c_void);
    deregister: b"ncclCommDeregister\0" (Handle, *mut c_void);
    window_register: b"ncclCommWindowRegister\0" (Handle, *mut c_void, usize, *mut *mut c_void, c_int);
    window_deregister: b"ncclCommWindowDeregister\0" (Handle, *mut c_void);
}}

impl Nccl {
    /// Searches the usual directories and LD_LIBRARY_PATH. Fails with an input error if there is none, or it is too
    /// old.
    pub fn load() -> Result<Arc<Nccl>> {
        let mut last = String::new();
        for name in ["libnccl.so.2", "libnccl.so"] {
            // SAFETY: NCCL's initializers have no requirements; another library of that name would lack the symbols.
            match unsafe { Library::new(name).and_then(|library| Nccl::bind(library)) } {
                Ok(nccl) => return nccl.check_version().map(Arc::new),
                Err(e) => last = e.to_string(),
            }
        }
        Err(Error::input(format!(
            "`device: cuda` with several ranks needs NCCL 2.19 or newer, but libnccl.so.2 was not found ({last}). Install it \
             (package libnccl2, or pip install nvidia-nccl-cu13) and put its directory in LD_LIBRARY_PATH, or use \
             `nproc_per_node: 1`"
        )))
    }
    fn check_version(self) -> Result<Nccl> {
        let version = self.version_number()?;
        match version >= NEEDED {
            true => Ok(self),
            false => Err(Error::input(format!(
                "NCCL {} is too old: several CUDA ranks need 2.19 or newer; put a newer libnccl.so.2 in LD_LIBRARY_PATH",
                dotted(version)
            ))),
        }
    }
    /// Fails with an input error if the library is too old for what a run asks, or the environment overrides it.
    pub fn provides(&self, options: &NcclOptions) -> Result<()> {
        let version = self.version_number()?;
        let calls = self.mem_alloc.is_some() && self.window_register.is_some() && self.window_deregister.is_some();
        if options.windows && !(calls && version >= WINDOWS) {
            return Err(Error::input(format!(
                "`nccl_windows` needs NCCL {} or newer, but libnccl.so.2 is {}: put a newer one in LD_LIBRARY_PATH, or \
                 remove it",
                dotted(WINDOWS),
                dotted(version)
            )));
        }
        match options.max_ctas.filter(|_| limits_nccl_ctas()) {
            Some(limit) => Err(Error::input(format!(
                "`nccl_max_ctas: {limit}` has no effect, because NCCL prefers NCCL_MAX_CTAS in the environment: remove one \
                 of them"
            ))),
            None => Ok(()),
        }
    }
    fn version_number(&self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: writes one int.
        match unsafe { (self.version)(&mut version) } {
            SUCCESS => Ok(version),
            code => Err(Error::Run(format!("ncclGetVersion: {}", self.describe(code)))),
        }
    }
    /// "2.28.9".
    pub fn version_text(&self) -> Result<String> {
        Ok(dotted(self.version_number()?))
    }
    /// NCCL's description of a result code.
    pub fn describe(&self, code: c_int) -> String {
        // SAFETY: takes any code and returns a constant string.
        let text = unsafe { (self.error_string)(code) };
        if text.is_null() {
            return format!("NCCL result {code}");
        }
        // SAFETY: a constant of the library, which is loaded as long as `self` lives.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// 22809 is 2.28.9; before 2.9 it was 2804 for 2.8.4.
fn dotted(version: c_int) -> String {
    match version {
        0..10_000 => format!("{}.{}.{}", version / 1000, version % 1000 / 100, version % 100),
        _ => format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100),
    }
}

/// Fails with an input error if there is no NCCL that provides `options`.
pub fn present(options: &NcclOptions) -> Result<()> {
    Nccl::load()?.provides(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_layout_of_nccl_2_17() {
        assert_eq!((size_of::<NcclConfig>(), std::mem::offset_of!(NcclConfig, net_name)), (48, 32));
        let config = NcclConfig::non_blocking(&NcclOptions::default());
        assert_eq!((config.size, config.magic, config.version, config.blocking), (48, 0xcafebeef, 21800, 0));
        assert_eq!((config.min_ctas, config.max_ctas), (c_int::MIN, c_int::MIN), "left to NCCL");
        let limited = NcclConfig::non_blocking(&NcclOptions { max_ctas: Some(4), windows: false });
        assert_eq!((limited.min_ctas, limited.max_ctas), (c_int::MIN, 4));
    }

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!([dotted(2804), dotted(21901), dotted(22809)], ["2.8.4", "2.19.1", "2.28.9"]);
    }

    /// Without NCCL, the one error says what to install; with NCCL, binding works.
    #[test]
    fn without_nccl_the_error_names_the_remedy() {
        match Nccl::load() {
            Ok(nccl) => assert!(nccl.version_text().unwrap().starts_with("2.")),
            Err(e) => {
                assert_eq!(e.exit_status(), 2);
                let text = e.to_string();
                assert!(text.contains("libnccl.so.2") && text.contains("LD_LIBRARY_PATH"), "{text}");
            }
        }
    }
}
