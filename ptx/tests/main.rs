//! The expander, the emulator and the kernels. Each kernel runs in the emulator against a reference, and each check of
//! the emulator is proved by a fault that it notices.
mod attention;
mod expand;
mod faults;
mod hopper;
mod instructions;
mod kernels;
mod matrix;
mod sweep;
