//! libcublasLt without a GPU: matrix products, with what may follow them, in the simulated driver's streams. By
//! columns, as the real one.
//!
//! Stricter than the real one where that leaves it open: an algorithm serves the problem that it was chosen for, with
//! buffers aligned as was promised, and no other; it uses all of the workspace that it asked for, so that two products
//! in it at once spoil each other. With FLATSHARD_SIMBLAS=plain nothing may follow a product, as where the real one has
//! no algorithm for that.
mod choose; // which problems have an algorithm
mod product; // the sums
mod api; // the functions of cublasLt.h: descriptors, the choice of an algorithm, the product
