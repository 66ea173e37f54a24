//! The attention kernels of every family: values, costs, and the faults that the emulator must see.
mod launch;
mod reference;
mod values;
