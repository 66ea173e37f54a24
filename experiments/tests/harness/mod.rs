//! The harness from outside: every verb of the binary `experiments`, its files and its exit status. Nothing here knows
//! how it works inside.
mod analyze;
mod chaos;
mod common;
mod compare;
mod real;
mod run;
mod suite;
