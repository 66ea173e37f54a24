//! libcublasLt without a GPU: matrix products with epilogues, in the simulated driver's streams. Column-major, as the
//! real one.
//!
//! Stricter than the real one where that is undefined: an algorithm works only for the problem it was chosen for, with
//! buffers aligned as promised. It uses all of the workspace that it requested, so that two concurrent products in one
//! workspace corrupt each other.
//!
//! FLATSHARD_SIMBLAS, separated by commas: `plain`: no epilogues, as where the real one has no algorithm for them.
//! `algorithms=N`: that many for each product, with sums in different orders. `fastest=I`: all but this one (from 0)
//! take a simulated second; `fastest=rank`: on each rank another one. `version=N`: as an older or newer library.
mod settings; // FLATSHARD_SIMBLAS
mod choose; // which problems have an algorithm
mod product; // the sums
mod descriptors; // the functions of cublasLt.h: handles, operations, layouts, preferences
mod api; // the functions of cublasLt.h: the choice of an algorithm, the product
