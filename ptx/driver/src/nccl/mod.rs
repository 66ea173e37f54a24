//! libnccl without a network of GPUs: communicators of ranks in several processes, whose collectives run in the simulated driver's streams.
//! Never connects beyond this machine.
//!
//! | file | what |
//! | --- | --- |
//! | `api` | the functions of nccl.h: communicators, memory |
//! | `calls` | the functions of nccl.h: collectives, messages, groups |
//! | `comm` | a communicator |
//! | `work` | operations as streams do them |
//! | `link` | a rank's connection to its world's hub |
//! | `hub` | where parts meet; a thread of the process that made the id |
//! | `sums` | what becomes of the parts |
//! | `wire` | frames |
//!
//! Stricter than the real one where that is undefined: ranks that call different collectives, sizes that differ, memory registered on one
//! rank and not on another, buffers that overlap otherwise than in place, handles that are gone. Each is said on standard error, and is
//! the communicator's error. A rank that dies is an error where ranks talk over sockets (NCCL_P2P_DISABLE and NCCL_SHM_DISABLE), and
//! otherwise nothing: what waits for it waits until its communicator is aborted. With FLATSHARD_SIMNCCL=unregistered this rank registers no
//! memory, and says so as the real one does: by no handle.
#[allow(non_snake_case)] // the names are NVIDIA's
mod api;
#[allow(non_snake_case)]
mod calls;
mod comm;
mod hub;
mod link;
mod sums;
mod wire;
mod work;
