//! Hand-written PTX without a GPU: [`expand`] turns kernel sources into plain PTX, [`emulate`] runs plain PTX on the
//! CPU and checks it, [`kernels`] lists every shipped variant. Never needs a driver, a toolkit or the network.
pub mod emulate;
pub mod expand;
pub mod kernels;
