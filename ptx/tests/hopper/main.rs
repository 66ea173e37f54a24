//! Hopper's instructions in the emulator: a warp-specialised product is right under every schedule, layouts agree with each
//! other, and each thing that orders something is missed when it is taken out.
mod faults;
mod layouts;
mod order;
mod product;
