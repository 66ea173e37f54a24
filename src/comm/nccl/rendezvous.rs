//! Distributes the id of an NCCL world: rank 0 creates it and sends it to every other rank. Never touches a GPU.
use crate::base::Result;
use crate::comm::env::RankEnv;
use crate::comm::handshake::greet;
use crate::comm::rendezvous::{ask, by, serve};
use std::time::{Duration, Instant};

/// Size of an `ncclUniqueId` in bytes.
pub const ID: usize = 128;
const WHAT: &str = "NCCL rendezvous";

/// Returns rank 0's id on every rank. `make` is called on rank 0 only. Returns when this rank has it and, on rank 0,
/// when all have.
pub fn exchange(env: &RankEnv, timeout: Duration, make: impl FnOnce() -> Result<[u8; ID]>) -> Result<[u8; ID]> {
    let deadline = Instant::now() + timeout;
    if env.rank > 0 {
        return ask(env, deadline, WHAT, &mut |stream, until| {
            let mut id = [0; ID];
            greet(by(stream, until), env, WHAT, 0, &[], &mut id)?;
            Ok(id)
        });
    }
    let id = make()?;
    serve(env, deadline, WHAT, 0, &mut |arrival| arrival.admit(&id).map(|_| ()))?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::env::here as env;
    use std::net::TcpListener;

    fn id() -> [u8; ID] {
        std::array::from_fn(|i| i as u8)
    }
    /// A port whose successors are probably free: the system has just assigned it.
    fn port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().min(u16::MAX - 100)
    }

    #[test]
    fn all_ranks_learn_the_id_though_the_agent_holds_the_port_and_a_stranger_the_next() {
        let agent = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = agent.local_addr().unwrap().port();
        let stranger = TcpListener::bind(("127.0.0.1", port + 1)); // never accepts, so connections there time out
        let timeout = Duration::from_secs(30);
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..4)
                .rev() // rank 0 starts last
                .map(|rank| {
                    let made = move || if rank == 0 { Ok(id()) } else { panic!("only rank 0 makes the id") };
                    scope.spawn(move || exchange(&env(rank, 4, port), timeout, made).unwrap())
                })
                .collect();
            for rank in ranks {
                assert_eq!(rank.join().unwrap(), id());
            }
        });
        drop((agent, stranger));
    }

    #[test]
    fn who_is_missing_is_named_on_both_sides() {
        let timeout = Duration::from_millis(300);
        let text = exchange(&env(0, 3, port()), timeout, || Ok(id())).unwrap_err().to_string();
        assert!(text.contains("ranks 1, 2 of 3 did not join") && text.contains("MASTER_PORT"), "{text}");
        let text = exchange(&env(2, 3, port()), timeout, || Ok(id())).unwrap_err().to_string();
        assert!(text.contains("needs rank 0 of 3, which did not answer at 127.0.0.1"), "{text}");
    }

    #[test]
    fn ranks_of_another_job_are_not_served() {
        let port = port();
        let (ours, theirs) = (env(0, 2, port), RankEnv { run_id: "another".into(), ..env(1, 2, port) });
        let timeout = Duration::from_secs(1);
        std::thread::scope(|scope| {
            let server = scope.spawn(|| exchange(&ours, timeout, || Ok(id())));
            assert!(exchange(&theirs, timeout, || Ok(id())).is_err());
            assert!(server.join().unwrap().unwrap_err().to_string().contains("rank 1 of 2 did not join"));
        });
    }
}
