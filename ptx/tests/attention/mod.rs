//! The attention kernels of sm_80 and those by rows: values, costs, and the faults that the emulator must see.
mod costs;
mod faults;
pub mod launch;
pub mod reference;
mod values;
