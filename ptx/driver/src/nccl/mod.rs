//! libnccl without a GPU network: communicators of ranks in several processes, whose collectives run in the simulated
//! driver's streams. Never connects beyond this machine.
//!
//! Stricter than the real one where that is undefined: ranks that call different collectives, sizes that differ, memory
//! registered on only some ranks, buffers that overlap other than in place, dead handles. Each is printed to standard
//! error and becomes the communicator's error. So are windows that ranks do not register together, at memory that is
//! not of ncclMemAlloc, or that outlive their memory; and operands that peers access at other offsets in their
//! windows. A rank's death is an error if ranks use sockets (NCCL_P2P_DISABLE and NCCL_SHM_DISABLE); otherwise whatever
//! waits for it waits until its communicator is aborted.
//!
//! FLATSHARD_SIMNCCL, separated by commas: `unregistered`: this rank registers no memory, which it reports like the
//! real one, with a null handle; `windowless`: no windows. `version=N`: as an older library. `trace`: a communicator
//! that is destroyed prints its limit and its windows. `forget_window`, `keep_window`: this rank does not register, or
//! not deregister, as if the program had forgotten it.
mod code; // results
mod settings; // FLATSHARD_SIMNCCL
mod wire; // frames
mod sums; // reductions
mod hub; // combines ranks' parts, in the process that made the id
mod link; // a rank's connection to its world's hub
mod comm; // a communicator
mod work; // operations as streams run them
#[allow(non_snake_case)] // the names are NVIDIA's
mod api; // the functions of nccl.h: communicators
#[allow(non_snake_case)]
mod memory; // the functions of nccl.h: memory, windows
#[allow(non_snake_case)]
mod calls; // the functions of nccl.h: collectives, send/recv, groups
