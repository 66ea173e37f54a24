//! Every kernel in the emulator compared with a naive reference in f64, at odd sizes and under several schedules, which
//! must agree bitwise; and its costs compared with `budget.txt`.
//!
//! The bound is that of the CPU device's conformance tests: the largest and the mean error of an output are at most
//! twice those of the same naive code in f32, rounded to the output's dtype (three times for gradients), plus a
//! constant.
mod beyond;
mod budget;
mod cases;
mod elements;
mod experts;
mod harness;
mod heads;
mod recurrences;
mod rows;
mod sums;
mod tables;
