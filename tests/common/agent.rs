//! MASTER_PORT for ranks that a test starts, held open as torchrun's agent does. Never guessed, so no two jobs share
//! one.
use std::net::TcpListener;

pub struct Agent {
    _held: TcpListener,
    pub port: u16,
}

impl Agent {
    /// Rank 0 listens on the first free of the 16 ports above.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Agent {
        loop {
            let held = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = held.local_addr().unwrap().port();
            if port < u16::MAX - 100 {
                return Agent { _held: held, port };
            }
        }
    }
}
