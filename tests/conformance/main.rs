//! Every operation on every device, at every vector width and in both compute dtypes, against a naive reference in f64.
//! One body: a further device is a line in [`harness::devices`].
//!
//! The rule: the largest and the mean error of an output are at most twice those of the same naive code in f32, rounded
//! to the output's dtype (three times for gradients), plus [`harness::FLOOR`]. And every operand of a wrong length or
//! dtype is refused with an `Error::Op`.
mod attention;
mod epilogue;
mod harness;
mod layers;
mod loss;
mod norms;
mod optim;
mod reference;
mod ring;
