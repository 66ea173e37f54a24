//! libnccl without a network of GPUs: communicators of ranks in several processes, whose collectives run in the
//! simulated driver's streams. Never connects beyond this machine.
//!
//! Stricter than the real one where that is undefined: ranks that call different collectives, sizes that differ, memory
//! registered on one rank and not on another, buffers that overlap otherwise than in place, handles that are gone. Each
//! is said on standard error, and is the communicator's error. A rank that dies is an error where ranks talk over
//! sockets (NCCL_P2P_DISABLE and NCCL_SHM_DISABLE), and otherwise nothing: what waits for it waits until its
//! communicator is aborted. With FLATSHARD_SIMNCCL=unregistered this rank registers no memory, and says so as the real
//! one does: by no handle.
mod code; // results
mod wire; // frames
mod sums; // what becomes of the parts
mod hub; // where parts meet: a thread of the process that made the id
mod link; // a rank's connection to its world's hub
mod comm; // a communicator
mod work; // operations as streams do them
#[allow(non_snake_case)] // the names are NVIDIA's
mod api; // the functions of nccl.h: communicators, memory
#[allow(non_snake_case)]
mod calls; // the functions of nccl.h: collectives, messages, groups
