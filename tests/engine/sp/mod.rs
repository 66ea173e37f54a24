//! Ring attention and Ulysses: a single layer compared with exact arithmetic and with plain attention; what it sends,
//! when, and how much; whole models whose ranks share sequences compared with one rank.
mod cli;
mod layer;
mod model;
mod trace;
