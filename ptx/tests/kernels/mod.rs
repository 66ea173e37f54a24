//! Every kernel in the emulator against a naive reference in f64, at odd sizes and under several schedules, which must
//! agree to the bit; and what each costs against `budget.txt`.
//!
//! The rule is that of the CPU device's conformance tests: the largest and the mean error of an output are at most
//! twice those of the same naive code in f32, rounded to the output's dtype (three times for gradients), plus a floor.
mod beyond;
mod budget;
mod cases;
mod elements;
mod harness;
mod heads;
mod rows;
mod sums;
mod tables;
