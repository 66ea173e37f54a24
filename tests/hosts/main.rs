//! Several hosts, pretended on this machine: ranks that launchers start and that meet over TCP, and strangers on the
//! network.
#[path = "../common/mod.rs"]
mod common;
mod addresses;
mod launchers;
mod rendezvous;
mod two_hosts;
