//! TCP messages between hosts, below the groups: two ranks, each a thread, and a secret.
use flatshard::comm::env::RankEnv;
use flatshard::comm::hosts::tcp::Tcp;
use flatshard::comm::hosts::wire::{Channel, Exchanged, Fault, Lost, Move, POLL_INTERVAL, Wire};
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

fn env(rank: usize, port: u16) -> RankEnv {
    let get = |name: &str| match name {
        "RANK" => Some(rank.to_string()),
        "WORLD_SIZE" => Some("2".into()),
        "LOCAL_RANK" => Some("0".into()),
        "LOCAL_WORLD_SIZE" => Some("1".into()),
        "FLATSHARD_HOST_ID" => Some(format!("host{rank}")),
        "MASTER_ADDR" => Some("127.0.0.1".into()),
        "MASTER_PORT" => Some(port.to_string()),
        "FLATSHARD_JOB_SECRET" => Some("the secret of a test".into()),
        _ => None,
    };
    RankEnv::read(&get).unwrap().unwrap()
}

/// What `f` gives on each of two ranks, with a channel between them.
fn both<R: Send>(f: impl Fn(usize, &dyn Wire, &mut dyn Channel) -> R + Sync) -> Vec<R> {
    let agent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = agent.local_addr().unwrap().port();
    let (f, done) = (&f, [AtomicBool::new(false), AtomicBool::new(false)]);
    let done = &done;
    let one = move |rank: usize| {
        let wire = Tcp::join(&env(rank, port), Duration::from_secs(30)).unwrap();
        std::thread::scope(|scope| {
            let listens = || {
                while !done.iter().all(|done| done.load(Relaxed)) {
                    wire.listen(POLL_INTERVAL);
                }
            };
            scope.spawn(listens);
            let result = f(rank, &wire, &mut *wire.channel(3).unwrap());
            done[rank].store(true, Relaxed);
            result
        })
    };
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || one(rank)));
        ranks.map(|rank| rank.join().unwrap()).into()
    })
}

#[test]
fn messages_of_any_length_go_both_ways_in_order() {
    both(|rank, _, channel| {
        for (i, len) in [1, 15, 16, 17, 64, 70_000, 3_000_000, 2].into_iter().enumerate() {
            let (mine, theirs) = ((2 * i + rank) as u8, (2 * i + 1 - rank) as u8);
            let (sent, mut long, mut short) = (vec![mine; len], vec![0; len], [0]);
            let peer = 1 - rank;
            let mut moves = [
                Move::send(peer, &sent),
                Move::send(peer, &sent[..1]),
                Move::recv(peer, &mut long),
                Move::recv(peer, &mut short),
            ];
            channel.exchange(&mut moves, &|| true).unwrap();
            assert!(long.iter().chain(&short).all(|byte| *byte == theirs), "message {i}");
        }
    });
}

/// Unexpected bytes never become data.
#[test]
fn a_message_of_unexpected_length_is_an_error() {
    let came = both(|rank, _, channel| -> Exchanged {
        let mut room = [0; 63];
        match rank {
            0 => channel.exchange(&mut [Move::send(1, &[1; 64])], &|| true),
            _ => channel.exchange(&mut [Move::recv(0, &mut room)], &|| true).inspect_err(|_| assert_eq!(room, [0; 63])),
        }
    });
    assert_eq!(came[0], Ok(()));
    let Err(Fault::Lost(Lost { rank: 0, why })) = &came[1] else { panic!("{came:?}") };
    assert!(why.contains("message 0 of kind 5 with 64 bytes, expected number 0 of kind 5 with 63 bytes"), "{why}");
}
