//! Models and data sets by name, from a hub on loopback that does what hubs and networks do wrong.
mod downloads;
mod place;
mod repositories;
mod runs;
mod server;
