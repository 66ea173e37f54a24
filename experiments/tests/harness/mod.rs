//! The harness from outside: every subcommand of the binary `experiments`, its files and its exit status. Never uses
//! its internals.
mod analyze;
mod chaos;
mod chart;
mod common;
mod compare;
mod help;
mod models;
mod real;
mod run;
mod suite;
mod watch;
