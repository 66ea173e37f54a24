//! The MPI wire under a real mpirun: each test starts this binary again as four ranks on two pretended hosts.
use super::*;
use std::process::{Command, Output};

fn env(rank: usize, world: usize) -> RankEnv {
    let vars = [("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", rank % 2), ("LOCAL_WORLD_SIZE", 2)];
    let get = |name: &str| match name {
        "FLATSHARD_HOST_ID" => Some(format!("host{}", rank / 2)),
        _ => vars.iter().find(|(var, _)| *var == name).map(|(_, n)| n.to_string()),
    };
    RankEnv::read(&get).unwrap().unwrap()
}

/// In the test's own process: what four ranks said that ran `rank` under mpirun. In each of those: runs it.
fn four(test: &str, rank: impl FnOnce(MpiWire)) -> Option<Output> {
    let Some(launched) = RankEnv::from_env().unwrap() else {
        let exe = std::env::current_exe().unwrap();
        let name = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
        // mpirun of Open MPI 4.1.4 was seen to hang in its own end, after its ranks had failed (PMIx_server_finalize).
        let mut mpirun = Command::new("timeout");
        mpirun.args(["--signal", "KILL", "60", "mpirun", "-np", "4", "--oversubscribe"]).arg(exe).args([
            "--exact",
            &name,
            "--nocapture",
        ]);
        mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        return Some(mpirun.output().expect("mpirun (Debian: openmpi-bin)"));
    };
    rank(MpiWire::join(&env(launched.rank, 4), Duration::from_secs(30)).unwrap());
    None
}
fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// Bytes that say who sent them, on which channel and as which message.
fn bytes(from: usize, channel: u16, message: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + from * 31 + channel as usize * 17 + message * 5) as u8).collect()
}

/// Everyone to the two ranks of the other host and back, on three channels in three threads at once: nothing, a byte, pieces and
/// a rest, two messages a peer.
#[test]
fn bytes_arrive_in_order_on_all_channels_at_once() {
    let everyone = |wire: MpiWire| {
        assert_eq!((wire.roster().hosts(), wire.roster().per_host()), (2, 2));
        let away = [2, 3].map(|r| (r + 2 * (wire.rank / 2)) % 4);
        std::thread::scope(|s| {
            for number in [0, 5, 999] {
                let mut channel = wire.channel(number).unwrap();
                let rank = wire.rank;
                s.spawn(move || {
                    for len in [0, 1, 4096, 3 * PIECE + 13] {
                        for peer in away {
                            let sent = [bytes(rank, number, 0, len), bytes(rank, number, 1, len / 2)];
                            let (mut one, mut two) = (vec![0; len], vec![0; len / 2]);
                            let mut moves = [
                                Move::recv(peer, &mut one),
                                Move::send(peer, &sent[0]),
                                Move::send(peer, &sent[1]),
                                Move::recv(peer, &mut two),
                            ];
                            channel.exchange(&mut moves, &|| true).unwrap();
                            assert!(one == bytes(peer, number, 0, len) && two == bytes(peer, number, 1, len / 2));
                        }
                    }
                });
            }
        });
        println!("rank {} is content", wire.rank);
    };
    if let Some(output) = four("bytes_arrive_in_order_on_all_channels_at_once", everyone) {
        let said = text(&output);
        assert!(output.status.success() && said.matches("is content").count() == 4, "{said}");
    }
}

/// Rank 3 fails. The ranks of the other host hear which one and why, give up what they wait for, and leave without it.
#[test]
fn a_lost_rank_is_named_and_nobody_waits_for_it() {
    let everyone = |wire: MpiWire| match wire.rank {
        3 => {
            std::thread::sleep(Duration::from_millis(300));
            wire.tell(&Lost { rank: 3, why: "failed: out of memory".into() });
            std::thread::sleep(Duration::from_millis(700)); // before mpirun sees it go
            std::process::exit(1);
        }
        2 => {
            assert_eq!(wire.listen(Duration::from_millis(400)), None); // its own host's shared memory tells it
            wire.library.failed.store(true, Ordering::Relaxed);
        }
        rank => {
            let mut channel = wire.channel(1).unwrap();
            let heard = Mutex::new(None);
            std::thread::scope(|s| {
                s.spawn(|| *heard.lock().unwrap() = wire.listen(Duration::from_secs(20)));
                // More than is sent before the peer asks for it, so that both directions are under way.
                let (mut to, from) = (vec![0; 1 << 22], vec![1; 1 << 22]);
                let mut moves = [Move::recv(3, &mut to), Move::send(3, &from)];
                let fault = channel.exchange(&mut moves, &|| heard.lock().unwrap().is_none()).unwrap_err();
                assert_eq!(fault, Fault::GaveUp { peer: 3 });
            });
            let lost = heard.into_inner().unwrap().unwrap();
            println!("rank {rank} heard: rank {} {}", lost.rank, lost.why);
        }
    };
    if let Some(output) = four("a_lost_rank_is_named_and_nobody_waits_for_it", everyone) {
        let said = text(&output);
        assert!(!output.status.success(), "{said}");
        for rank in 0..2 {
            assert!(said.contains(&format!("rank {rank} heard: rank 3 failed: out of memory")), "{said}");
        }
    }
}

/// A wait that is nobody's fault ends when `go_on` says so, and names the rank that did not come.
#[test]
fn who_gives_up_names_the_rank_that_did_not_come() {
    let everyone = |wire: MpiWire| {
        if wire.rank == 0 {
            let since = Instant::now();
            let (mut here, mut never) = ([0], [0]);
            let mut moves = [Move::recv(2, &mut here), Move::recv(3, &mut never)];
            let fault = wire.channel(0).unwrap().exchange(&mut moves, &|| since.elapsed() < Duration::from_millis(300));
            println!("rank 0: {fault:?} after {:?}", since.elapsed() < Duration::from_secs(5));
        } else if wire.rank == 2 {
            wire.channel(0).unwrap().exchange(&mut [Move::send(0, &[1])], &|| true).unwrap();
        }
        std::thread::sleep(Duration::from_millis(800));
        wire.library.failed.store(true, Ordering::Relaxed); // as all ranks of a failed run
    };
    if let Some(output) = four("who_gives_up_names_the_rank_that_did_not_come", everyone) {
        let said = text(&output);
        assert!(said.contains("rank 0: Err(GaveUp { peer: 3 }) after true"), "{said}");
    }
}

/// Under a launcher that is not MPI's every process is a world of its own.
#[test]
fn a_world_that_is_not_mpis_is_refused() {
    if let Some(launched) = RankEnv::from_env().unwrap() {
        let error = MpiWire::join(&launched, Duration::from_secs(5)).err().unwrap();
        println!("status {}: {error}", error.exit_status());
        return;
    }
    let name = format!("{}::a_world_that_is_not_mpis_is_refused", module_path!().split_once("::").unwrap().1);
    let mut alone = Command::new(std::env::current_exe().unwrap());
    alone.envs([("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")]);
    let said = text(&alone.args(["--exact", &name, "--nocapture"]).output().unwrap());
    assert!(said.contains("status 2: rank 1 of 4: MPI says that this is rank 0 of 1: --comm mpi needs"), "{said}");
}
