//! NCCL's functions, with the names and numbers of nccl.h 2.30: creation and destruction of communicators. Only this
//! file and `memory` dereference callers' pointers. Waits for other ranks only in blocking communicators.
use super::code::{
    IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS, SYSTEM_ERROR, UNHANDLED_CUDA_ERROR,
};
use super::comm::{CommConfig, CommRank, NcclComm, POLL, complain, lock};
use super::hub;
use super::link::HubLink;
use super::settings;
use super::wire::{FrameKind, KEY};
use crate::current_gpu;
use crate::settings::variable;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

const MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;
/// `MAXCHANNELS`. The real library lowers a larger limit; here it is an error, since the caller's has no effect then.
const CHANNELS: c_int = 64;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct NcclUniqueId([u8; 128]);

/// `ncclConfig_t` up to version 2.17, the smallest that a caller passes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NcclInitConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// Live handles. A handle is a number and is never dereferenced.
static COMMS: Mutex<Option<HashMap<usize, Arc<NcclComm>>>> = Mutex::new(None);
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// A number for a handle.
pub fn fresh() -> usize {
    NEXT.fetch_add(1, SeqCst)
}
/// Live communicators.
pub fn live() -> Vec<Arc<NcclComm>> {
    lock(&COMMS).iter().flat_map(HashMap::values).cloned().collect()
}
fn add(comm: Arc<NcclComm>) -> usize {
    let handle = 0x10_0000 + 64 * fresh();
    lock(&COMMS).get_or_insert_default().insert(handle, comm);
    handle
}
pub fn find(handle: *mut c_void) -> Result<Arc<NcclComm>, c_int> {
    let comm = lock(&COMMS).as_ref().and_then(|comms| comms.get(&(handle as usize)).cloned());
    comm.ok_or_else(|| {
        complain(&format!("{handle:?} is not a live communicator"));
        INVALID_ARGUMENT
    })
}
fn remove(handle: *mut c_void) -> Result<Arc<NcclComm>, c_int> {
    let comm = find(handle)?;
    lock(&COMMS).as_mut().and_then(|comms| comms.remove(&(handle as usize)));
    Ok(comm)
}
pub fn code(done: Result<c_int, c_int>) -> c_int {
    done.unwrap_or_else(|code| code)
}

/// Whether to use sockets, as where peers may not share memory.
fn over_sockets() -> bool {
    ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"].iter().all(|name| variable(name).as_deref() == Some("1"))
}

/// # Safety
/// `out` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(out: *mut c_int) -> c_int {
    // SAFETY: the caller's int.
    unsafe { *out = settings::version() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text: &CStr = match code {
        SUCCESS => c"no error",
        UNHANDLED_CUDA_ERROR => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        SYSTEM_ERROR => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        INVALID_ARGUMENT => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        INVALID_USAGE => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// # Safety
/// `out` points to 128 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(out: *mut NcclUniqueId) -> c_int {
    let random = || RandomState::new().hash_one(std::process::id()).to_le_bytes();
    let key: [u8; KEY] = std::array::from_fn(|i| if i < 8 { random()[i] } else { random()[i - 8] });
    let Ok(port) = hub::open(key) else { return SYSTEM_ERROR };
    let mut id = [0; 128];
    id[..2].copy_from_slice(&port.to_le_bytes());
    id[2..2 + KEY].copy_from_slice(&key);
    // SAFETY: the caller's 128 bytes.
    unsafe { *out = NcclUniqueId(id) };
    SUCCESS
}

/// As `parseCommConfig`: of a child, `parent`'s where there is no config.
fn parse(config: *const NcclInitConfig, parent: CommConfig) -> Result<CommConfig, c_int> {
    let wrong = |what: String| {
        complain(&what);
        INVALID_ARGUMENT
    };
    if config.is_null() {
        return Ok(parent);
    }
    // SAFETY: a config starts with its size and its magic number, whatever its version.
    let (size, magic) = unsafe { ((*config).size, (*config).magic) };
    if magic != MAGIC {
        return Err(wrong("ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER".into()));
    }
    if size < size_of::<NcclInitConfig>() {
        return Err(wrong(format!("ncclConfig_t of {size} bytes: older than 2.18")));
    }
    // SAFETY: it has at least this many bytes.
    let c = unsafe { *config };
    if !(20_000..=settings::version()).contains(&(c.version as c_int)) {
        return Err(wrong(format!("ncclConfig_t of version {}", c.version)));
    }
    let within = |value: c_int, least: c_int, most: c_int| value == UNDEFINED || (least..=most).contains(&value);
    let valid = within(c.blocking, 0, 1)
        && within(c.cga_cluster_size, 0, 8)
        && within(c.min_ctas, 1, CHANNELS)
        && within(c.max_ctas, 1, CHANNELS)
        && (c.max_ctas == UNDEFINED || c.min_ctas <= c.max_ctas)
        && within(c.split_share, 0, 1);
    // An older version has no such fields, and the real library would not read them.
    let has_more = !c.net_name.is_null() || c.max_ctas != UNDEFINED || c.min_ctas != UNDEFINED;
    if !valid || (c.version < 21_700 && has_more) {
        return Err(wrong(format!(
            "Invalid config attribute value: blocking {}, minCTAs {}, maxCTAs {}, version {}",
            c.blocking, c.min_ctas, c.max_ctas, c.version
        )));
    }
    Ok(CommConfig { blocking: c.blocking != 0, max_ctas: (c.max_ctas != UNDEFINED).then_some(c.max_ctas) })
}

/// # Safety
/// As in nccl.h: `out` can hold a handle; `config` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    out: *mut *mut c_void,
    size: c_int,
    id: NcclUniqueId,
    rank: c_int,
    config: *const NcclInitConfig,
) -> c_int {
    code((|| {
        let config = parse(config, CommConfig { blocking: true, max_ctas: None })?;
        if size < 1 || !(0..size).contains(&rank) {
            complain(&format!("Invalid rank requested : {rank}/{size}"));
            return Err(INVALID_ARGUMENT);
        }
        let gpu = current_gpu().map_err(|_| UNHANDLED_CUDA_ERROR)?;
        let comm = NcclComm::new(gpu, config, over_sockets());
        // SAFETY: the caller's handle.
        unsafe { *out = add(comm.clone()) as *mut c_void };
        let port = u16::from_le_bytes([id.0[0], id.0[1]]);
        let key: [u8; KEY] = std::array::from_fn(|i| id.0[2 + i]);
        let host = variable("NCCL_HOSTID").unwrap_or_default();
        comm.in_background(move |comm| {
            let link = HubLink::open(port, key, rank as usize, size as usize, gpu as u64, &host)
                .map_err(|e| (SYSTEM_ERROR, format!("cannot reach rank 0: {e}")))?;
            loop {
                if let Some(frame) = link.answer(0, 0) {
                    if frame.kind != FrameKind::Ready {
                        return Err((frame.words[0] as c_int, String::from_utf8_lossy(&frame.body).into_owned()));
                    }
                    comm.sit(CommRank { link, id: 0, rank: rank as usize, size: size as usize });
                    return Ok(());
                }
                match link.lost() {
                    Some(rank) => return Err((REMOTE_ERROR, format!("rank {rank} left during initialization"))),
                    None if comm.aborted() => return Ok(()),
                    None => std::thread::sleep(POLL),
                }
            }
        });
        Ok(settle(&comm))
    })())
}

/// A blocking communicator returns when all is done.
pub fn settle(comm: &NcclComm) -> c_int {
    while comm.config.blocking && comm.state() == IN_PROGRESS {
        std::thread::sleep(POLL);
    }
    comm.state()
}

/// # Safety
/// As in nccl.h: a handle is written to `out` later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    handle: *mut c_void,
    color: c_int,
    key: c_int,
    out: *mut *mut c_void,
    config: *const NcclInitConfig,
) -> c_int {
    code((|| {
        let comm = find(handle)?;
        comm.ready()?;
        let config = parse(config, comm.config)?;
        // SAFETY: the caller's handle; null until the split is complete.
        unsafe { *out = std::ptr::null_mut() };
        let out = out as usize;
        comm.in_background(move |comm| {
            let number =
                comm.request(FrameKind::Split, [i64::from(color) as u64, i64::from(key) as u64, 0, 0, 0], Vec::new());
            let Some(frame) = comm.wait(number) else { return Ok(()) };
            if frame.kind != FrameKind::Ready {
                return Err((frame.words[0] as c_int, String::from_utf8_lossy(&frame.body).into_owned()));
            }
            let [id, rank, size, ..] = frame.words;
            if let Some(seat) = comm.seat().filter(|_| id != u64::MAX) {
                let child = NcclComm::new(comm.gpu, config, comm.sockets);
                child.sit(CommRank { link: seat.link.clone(), id, rank: rank as usize, size: size as usize });
                // SAFETY: the caller keeps the memory until the split is complete.
                unsafe { (out as *mut *mut c_void).write_volatile(add(child) as *mut c_void) };
            }
            Ok(())
        });
        Ok(settle(&comm))
    })())
}

/// # Safety
/// `out` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(handle: *mut c_void, out: *mut c_int) -> c_int {
    code(find(handle).map(|comm| {
        // SAFETY: the caller's int.
        unsafe { *out = comm.state() };
        SUCCESS
    }))
}

/// Returns when all requested operations of the communicator are done, on every rank.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(handle: *mut c_void) -> c_int {
    code((|| {
        let comm = find(handle)?;
        comm.ready()?;
        comm.in_background(|comm| {
            let mut said = false;
            while comm.in_flight.load(SeqCst) + comm.nodes.load(SeqCst) > 0 && !comm.aborted() {
                if !said && comm.in_flight.load(SeqCst) == 0 {
                    complain(
                        "a communicator is finalized while a graph holds its operations: waiting for the graph to be destroyed",
                    );
                    said = true;
                }
                std::thread::sleep(POLL);
            }
            comm.request(FrameKind::End, [0; 5], Vec::new());
            comm.wait_for_end();
            Ok(())
        });
        Ok(settle(&comm))
    })())
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(handle: *mut c_void) -> c_int {
    code(remove(handle).map(|comm| {
        let left = lock(&comm.registered).len();
        if left > 0 {
            complain(&format!("a communicator is destroyed with {left} buffers still registered"));
        }
        if let Some(seat) = comm.seat().filter(|_| settings::is_set("trace")) {
            let limit = comm.config.max_ctas.map_or("not set".into(), |n| n.to_string());
            let windows = comm.windows.load(SeqCst);
            eprintln!("NCCL trace: rank {} of {}: max_ctas {limit}, windows {windows}", seat.rank, seat.size);
        }
        SUCCESS
    }))
}

/// Kernels in flight are removed from the GPU.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(handle: *mut c_void) -> c_int {
    code(remove(handle).map(|comm| {
        comm.abort();
        SUCCESS
    }))
}
