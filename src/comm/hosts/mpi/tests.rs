//! The MPI wire under a real mpirun: each test starts this binary again as four ranks on two simulated hosts.
use super::*;
use std::fs;
use std::process::{Command, ExitStatus};
use tempfile::TempDir;

fn env(rank: usize, world: usize) -> RankEnv {
    let vars = [("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", rank % 2), ("LOCAL_WORLD_SIZE", 2)];
    let get = |name: &str| match name {
        "FLATSHARD_HOST_ID" => Some(format!("host{}", rank / 2)),
        _ => vars.iter().find(|(var, _)| *var == name).map(|(_, n)| n.to_string()),
    };
    RankEnv::read(&get).unwrap().unwrap()
}

/// What four ranks left: mpirun's status and output, and a note file per rank. Notes are files because mpirun may lose
/// the end of the output when it kills ranks.
struct Left {
    status: ExitStatus,
    output: String,
    notes: [String; 4],
}

/// In the test's own process, runs this test again as four ranks and returns what they left. In each of those, runs
/// `rank`.
fn four(test: &str, rank: impl FnOnce(MpiWire)) -> Option<Left> {
    let Some(launched) = RankEnv::from_env().unwrap() else {
        let exe = std::env::current_exe().unwrap();
        let name = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
        let notes = TempDir::new().unwrap(); // the ranks' current directory
        // mpirun of Open MPI 4.1.4 sometimes hung at its end after its ranks failed (PMIx_server_finalize).
        let mut mpirun = Command::new("timeout");
        mpirun.args(["--signal", "KILL", "60", "mpirun", "-np", "4", "--oversubscribe"]).arg(exe).args([
            "--exact",
            &name,
            "--nocapture",
        ]);
        mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1").current_dir(&notes);
        let ended = mpirun.output().expect("mpirun (Debian: openmpi-bin)");
        let output = String::from_utf8_lossy(&[&ended.stdout[..], &ended.stderr].concat()).into_owned();
        let notes = [0, 1, 2, 3].map(|rank| fs::read_to_string(notes.path().join(note_of(rank))).unwrap_or_default());
        return Some(Left { status: ended.status, output, notes });
    };
    rank(MpiWire::join(&env(launched.rank, 4), Duration::from_secs(30)).unwrap());
    None
}
fn note_of(rank: usize) -> String {
    format!("note of rank {rank}")
}
fn write_note(rank: usize, text: &str) {
    fs::write(note_of(rank), text).unwrap();
}
/// mpirun kills all ranks as soon as one fails or exits without MPI_Finalize, so nobody leaves before these have
/// written.
fn wait_for_notes(ranks: &[usize]) {
    let since = Instant::now();
    while !ranks.iter().all(|&rank| fs::read(note_of(rank)).is_ok_and(|text| !text.is_empty())) {
        assert!(since.elapsed() < Duration::from_secs(20), "missing notes of some of ranks {ranks:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Bytes that encode sender, channel and message number.
fn bytes(from: usize, channel: u16, message: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + from * 31 + channel as usize * 17 + message * 5) as u8).collect()
}

/// Every rank sends to the two ranks of the other host and back, on three channels in three threads at once: nothing, a
/// byte, pieces and a remainder, two messages per peer.
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
        write_note(wire.rank, "all arrived");
    };
    if let Some(left) = four("bytes_arrive_in_order_on_all_channels_at_once", everyone) {
        assert!(left.status.success(), "{}", left.output);
        assert_eq!(left.notes, ["all arrived"; 4], "{}", left.output);
    }
}

/// Rank 3 fails. The ranks of the other host learn which one and why, give up their waits, and leave without it.
#[test]
fn a_lost_rank_is_named_and_nobody_waits_for_it() {
    let everyone = |wire: MpiWire| match wire.rank {
        3 => {
            std::thread::sleep(Duration::from_millis(300));
            wire.report(&Lost { rank: 3, why: "failed: out of memory".into() });
            wait_for_notes(&[0, 1]);
            std::process::exit(1);
        }
        2 => {
            assert_eq!(wire.listen(Duration::from_millis(400)), None); // its own host learns through shared memory
            wait_for_notes(&[0, 1]);
            wire.library.failed.store(true, Ordering::Relaxed);
        }
        rank => {
            let mut channel = wire.channel(1).unwrap();
            let heard = Mutex::new(None);
            std::thread::scope(|s| {
                s.spawn(|| *heard.lock().unwrap() = wire.listen(Duration::from_secs(20)));
                // More than fits before the peer receives, so that both directions are in flight.
                let (mut to, from) = (vec![0; 1 << 22], vec![1; 1 << 22]);
                let mut moves = [Move::recv(3, &mut to), Move::send(3, &from)];
                let fault = channel.exchange(&mut moves, &|| heard.lock().unwrap().is_none()).unwrap_err();
                assert_eq!(fault, Fault::GaveUp { peer: 3 });
            });
            let lost = heard.into_inner().unwrap().unwrap();
            write_note(rank, &format!("rank {} {}", lost.rank, lost.why));
            wait_for_notes(&[0, 1]);
        }
    };
    if let Some(left) = four("a_lost_rank_is_named_and_nobody_waits_for_it", everyone) {
        assert!(!left.status.success(), "{}", left.output);
        assert_eq!(left.notes[..2], ["rank 3 failed: out of memory"; 2], "{}", left.output);
    }
}

/// A wait with no failed rank ends when `go_on` returns false, and names the rank that is missing.
#[test]
fn who_gives_up_names_the_rank_that_did_not_come() {
    let everyone = |wire: MpiWire| {
        if wire.rank == 0 {
            let since = Instant::now();
            let (mut here, mut never) = ([0], [0]);
            let mut moves = [Move::recv(2, &mut here), Move::recv(3, &mut never)];
            let fault = wire.channel(0).unwrap().exchange(&mut moves, &|| since.elapsed() < Duration::from_millis(300));
            write_note(0, &format!("{fault:?} after {:?}", since.elapsed() < Duration::from_secs(5)));
        } else if wire.rank == 2 {
            wire.channel(0).unwrap().exchange(&mut [Move::send(0, &[1])], &|| true).unwrap();
        }
        wait_for_notes(&[0]);
        wire.library.failed.store(true, Ordering::Relaxed); // as on every rank of a failed run
    };
    if let Some(left) = four("who_gives_up_names_the_rank_that_did_not_come", everyone) {
        assert_eq!(left.notes[0], "Err(GaveUp { peer: 3 }) after true", "{}", left.output);
    }
}

/// Under a launcher other than MPI's, every process is its own world.
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
    let ended = alone.args(["--exact", &name, "--nocapture"]).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(said.contains("status 2: rank 1 of 4: according to MPI this is rank 0 of 1: `comm: mpi` needs"), "{said}");
}
