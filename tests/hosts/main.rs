//! Several hosts, pretended on this machine: ranks that meet over TCP, and strangers on the network.
#[path = "../common/mod.rs"]
mod common;
mod addresses;
mod rendezvous;
mod two_hosts;
