//! The sm_80 attention kernels and the row kernels: values, costs, and the faults that the emulator must detect.
mod costs;
mod faults;
pub mod launch;
pub mod reference;
mod values;
