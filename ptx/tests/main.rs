//! The expander, the emulator and the kernels. Each kernel runs in the emulator and is compared with a reference, and
//! each check of the emulator is verified by a fault that it detects.
mod attention;
mod expand;
mod faults;
mod hopper;
mod instructions;
mod kernels;
mod matrix;
mod sweep;
