//! Several hosts, simulated on this machine: ranks of external launchers that rendezvous over TCP, and attackers on the
//! network.
#[path = "../common/mod.rs"]
mod common;
mod addresses;
mod launchers;
mod rendezvous;
mod two_hosts;
