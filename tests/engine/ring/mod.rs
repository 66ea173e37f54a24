//! Ring attention: one layer's attention around the ring against exact arithmetic and against the plain path; what it
//! sends, when, and how much; whole models cut over a ring against one rank.
mod cli;
mod layer;
mod model;
mod trace;
