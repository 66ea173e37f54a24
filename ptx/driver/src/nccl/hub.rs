//! The hub of a simulated world: a thread of the process that created its id, to which every rank connects over
//! loopback. It waits until all ranks of a communicator have sent their part, compares the calls, and answers each rank
//! with its result. When a rank dies, it notifies the others.
use super::code::{INVALID_USAGE, REMOTE_ERROR};
use super::sums;
use super::wire::{Frame, FrameKind, KEY};
use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
struct HubState {
    /// By world rank: the connection once it exists, and the communicators not yet destroyed.
    ranks: Vec<Option<TcpStream>>,
    open: Vec<usize>,
    /// GPU and host of each rank.
    seats: Vec<Option<(u64, Vec<u8>)>>,
    /// World ranks of each communicator.
    comms: HashMap<u64, Vec<usize>>,
    /// Parts by communicator and number, in the communicator's rank order.
    waiting: HashMap<(u64, u64), Vec<Option<Frame>>>,
}

/// Serves until every rank has left. Returns its port.
pub fn open(key: [u8; KEY]) -> io::Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    let state = Arc::new(Mutex::new(HubState::default()));
    std::thread::Builder::new().name("nccl hub".into()).spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let state = state.clone();
            std::thread::spawn(move || serve(&state, stream, key));
        }
    })?;
    Ok(port)
}

fn lock(state: &Mutex<HubState>) -> MutexGuard<'_, HubState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(state: &Mutex<HubState>, mut stream: TcpStream, key: [u8; KEY]) {
    let _ = stream.set_nodelay(true);
    let Ok(hello) = Frame::read(&mut stream) else { return };
    if hello.kind != FrameKind::Hello || !hello.body.starts_with(&key) {
        return;
    }
    let me = hello.words[0] as usize;
    if !lock(state).greet(&hello, &stream) {
        let _ = stream.shutdown(Shutdown::Both);
        return;
    }
    while let Ok(frame) = Frame::read(&mut stream) {
        lock(state).take(me, frame);
    }
    lock(state).lose(me);
}

impl HubState {
    fn answer(&mut self, to: usize, frame: &Frame) {
        if let Some(Some(stream)) = self.ranks.get_mut(to) {
            let _ = frame.write(stream); // its own thread detects a closed connection
        }
    }
    fn greet(&mut self, hello: &Frame, stream: &TcpStream) -> bool {
        let [rank, size, gpu, ..] = hello.words;
        let (rank, size) = (rank as usize, size as usize);
        self.ranks.resize_with(self.ranks.len().max(size), || None);
        self.seats.resize(self.ranks.len(), None);
        self.open.resize(self.ranks.len(), 0);
        let (Ok(stream), true, true) = (stream.try_clone(), size == self.ranks.len(), rank < size) else {
            return false;
        };
        if self.ranks[rank].is_some() {
            return false;
        }
        self.ranks[rank] = Some(stream);
        self.seats[rank] = Some((gpu, hello.body[KEY..].to_vec()));
        if self.ranks.iter().all(Option::is_some) {
            let twins = self.seats.iter().enumerate().find_map(|(rank, seat)| {
                self.seats[..rank].iter().position(|other| other == seat).map(|other| (other, rank))
            });
            for to in 0..size {
                let frame = match twins {
                    // The real library's message is the same: "Duplicate GPU detected".
                    Some((a, b)) => {
                        wrong(0, 0, INVALID_USAGE, format!("Duplicate GPU detected: ranks {a} and {b} of one host"))
                    }
                    None => Frame::new(FrameKind::Ready, 0, 0, [0, to as u64, size as u64, 0, 0], Vec::new()),
                };
                self.open[to] += 1;
                self.answer(to, &frame);
            }
            self.comms.insert(0, (0..size).collect());
        }
        true
    }

    fn take(&mut self, me: usize, frame: Frame) {
        let Some(members) = self.comms.get(&frame.comm).cloned() else { return };
        let Some(index) = members.iter().position(|&rank| rank == me) else { return };
        if frame.kind == FrameKind::Post {
            let [to, nth, dtype, count, _] = frame.words;
            if let Some(&to) = members.get(to as usize) {
                let mail = Frame::new(FrameKind::Mail, frame.comm, 0, [index as u64, nth, dtype, count, 0], frame.body);
                self.answer(to, &mail);
            }
            return;
        }
        let at = (frame.comm, frame.seq);
        let parts = self.waiting.entry(at).or_insert_with(|| vec![None; members.len()]);
        parts[index] = Some(frame);
        if parts.iter().all(Option::is_some) {
            let parts: Vec<Frame> = self.waiting.remove(&at).into_iter().flatten().flatten().collect();
            let answers = self.answers(&members, &parts);
            let mut answers: Vec<_> = members.iter().zip(answers).collect();
            // Last to rank 0, whose process this is: it may exit once it has the answer.
            answers.sort_by_key(|(to, _)| **to == 0);
            for (to, answer) in answers {
                self.answer(*to, &answer);
            }
        }
    }

    /// The answers of a collective that all ranks have reached.
    fn answers(&mut self, members: &[usize], parts: &[Frame]) -> Vec<Frame> {
        let (comm, seq, kind) = (parts[0].comm, parts[0].seq, parts[0].kind);
        let refuse = |code, why: String| vec![wrong(comm, seq, code, why); parts.len()];
        if let Some(rank) = parts.iter().position(|part| part.kind != kind) {
            return refuse(
                INVALID_USAGE,
                format!("rank {rank} calls {:?}, but rank 0 calls {kind:?}", parts[rank].kind),
            );
        }
        match kind {
            FrameKind::Split => self.split(members, parts),
            FrameKind::End => {
                members.iter().for_each(|&rank| self.open[rank] = self.open[rank].saturating_sub(1));
                vec![Frame::new(FrameKind::Done, comm, seq, [0; 5], Vec::new()); parts.len()]
            }
            FrameKind::Window => match parts.iter().position(|part| part.words != parts[0].words) {
                None => vec![Frame::new(FrameKind::Done, comm, seq, [0; 5], Vec::new()); parts.len()],
                Some(rank) => {
                    let said = |part: &Frame| format!("{} bytes, flags {}", part.words[0], part.words[1]);
                    let (other, first) = (said(&parts[rank]), said(&parts[0]));
                    refuse(
                        INVALID_USAGE,
                        format!("ranks disagree: rank {rank} registers a window of {other}; rank 0 of {first}"),
                    )
                }
            },
            _ => {
                if let Some(rank) = parts.iter().position(|part| part.words != parts[0].words) {
                    let said = |words: [u64; 5]| {
                        let name =
                            sums::NcclOperation::of(words[0]).map_or("?".into(), |operation| format!("{operation:?}"));
                        let (reduction, registered) =
                            (words[2] & 0xff, ["", ", source registered", ", target registered", ", both registered"]);
                        let registered = registered[(words[2] >> 8 & 3) as usize];
                        let windows = match words[2] >> 10 {
                            0 => String::new(),
                            word => format!(", offset in its window {}", word - 1),
                        };
                        format!(
                            "{name} of {} elements, dtype {}, reduction {reduction}, root {}{registered}{windows}",
                            words[4], words[1], words[3]
                        )
                    };
                    let (other, first) = (said(parts[rank].words), said(parts[0].words));
                    return refuse(INVALID_USAGE, format!("ranks disagree: rank {rank} calls {other}; rank 0 {first}"));
                }
                let bodies: Vec<&[u8]> = parts.iter().map(|part| part.body.as_slice()).collect();
                match sums::results(parts[0].words, &bodies) {
                    Ok(results) => {
                        results.into_iter().map(|body| Frame::new(FrameKind::Done, comm, seq, [0; 5], body)).collect()
                    }
                    Err((code, why)) => refuse(code, why),
                }
            }
        }
    }

    /// Ranks of a color, ordered by key and then by rank.
    fn split(&mut self, members: &[usize], parts: &[Frame]) -> Vec<Frame> {
        let mut answers =
            vec![Frame::new(FrameKind::Ready, parts[0].comm, parts[0].seq, [u64::MAX; 5], Vec::new()); parts.len()];
        let mut colors: Vec<u64> = parts.iter().map(|part| part.words[0]).filter(|&color| color as i64 >= 0).collect();
        colors.sort_unstable();
        colors.dedup();
        for color in colors {
            let mut of: Vec<usize> = (0..parts.len()).filter(|&i| parts[i].words[0] == color).collect();
            of.sort_by_key(|&i| (parts[i].words[1], i));
            let comm = self.comms.keys().max().map_or(1, |last| last + 1);
            self.comms.insert(comm, of.iter().map(|&i| members[i]).collect());
            for (rank, &i) in of.iter().enumerate() {
                answers[i].words = [comm, rank as u64, of.len() as u64, 0, 0];
                self.open[members[i]] += 1;
            }
        }
        answers
    }

    fn lose(&mut self, me: usize) {
        if let Some(place) = self.ranks.get_mut(me) {
            *place = None;
        }
        if self.open.get(me).is_some_and(|&open| open > 0) {
            for to in 0..self.ranks.len() {
                self.answer(
                    to,
                    &Frame::new(FrameKind::Lost, 0, 0, [me as u64, REMOTE_ERROR as u64, 0, 0, 0], Vec::new()),
                );
            }
        }
    }
}

fn wrong(comm: u64, seq: u64, code: i32, why: String) -> Frame {
    Frame::new(FrameKind::Wrong, comm, seq, [code as u64, 0, 0, 0, 0], why.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::super::link::HubLink;
    use super::*;
    use std::time::{Duration, Instant};

    const F32: u64 = 7;

    fn world(gpus: [u64; 2], host: &str) -> [Arc<HubLink>; 2] {
        let key = [7; KEY];
        let port = open(key).unwrap();
        [0, 1].map(|rank| HubLink::open(port, key, rank, 2, gpus[rank], host).unwrap())
    }
    fn until<T>(mut asked: impl FnMut() -> Option<T>) -> T {
        let started = Instant::now();
        loop {
            if let Some(answer) = asked() {
                return answer;
            }
            assert!(started.elapsed() < Duration::from_secs(20), "no answer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    fn answers(links: &[Arc<HubLink>; 2], seq: u64) -> [(FrameKind, String); 2] {
        [0, 1].map(|rank| {
            let frame = until(|| links[rank].answer(0, seq));
            (frame.kind, String::from_utf8_lossy(&frame.body).into_owned())
        })
    }
    fn part(seq: u64, words: [u64; 5], elements: usize) -> Frame {
        Frame::new(FrameKind::Part, 0, seq, words, vec![0; 4 * elements])
    }

    #[test]
    fn ranks_that_disagree_learn_the_difference() {
        let links = world([0, 1], "");
        assert_eq!(answers(&links, 0).map(|(kind, _)| kind), [FrameKind::Ready; 2]);
        links[0].send(&part(1, [0, F32, 0, 0, 8], 8)).unwrap();
        links[1].send(&part(1, [0, F32, 0, 0, 8], 8)).unwrap();
        assert_eq!(answers(&links, 1).map(|(kind, _)| kind), [FrameKind::Done; 2]);
        for (other, says) in [
            ([0, F32, 0, 0, 9], "rank 1 calls AllGather of 9 elements"),
            ([2, F32, 0, 0, 8], "rank 1 calls AllReduce of 8 elements"),
            ([0, F32, 0x200, 0, 8], "root 0, target registered; rank 0 AllGather of 8"),
        ] {
            let seq = 2 + other[4] + other[0] + other[2];
            links[0].send(&part(seq, [0, F32, 0, 0, 8], 8)).unwrap();
            links[1].send(&part(seq, other, other[4] as usize)).unwrap();
            for (kind, text) in answers(&links, seq) {
                assert!(kind == FrameKind::Wrong && text.contains(says), "{text}");
            }
        }
    }

    #[test]
    fn windows_need_every_rank_and_one_size() {
        let links = world([0, 1], "");
        answers(&links, 0);
        let window = |seq, bytes| Frame::new(FrameKind::Window, 0, seq, [bytes, 1, 0, 0, 0], Vec::new());
        let both = |seq, first: Frame, second: Frame| {
            links[0].send(&first).unwrap();
            links[1].send(&second).unwrap();
            answers(&links, seq)
        };
        assert_eq!(both(1, window(1, 64), window(1, 64)).map(|(kind, _)| kind), [FrameKind::Done; 2]);
        let sizes = both(2, window(2, 64), window(2, 128));
        let missing = both(3, window(3, 64), part(3, [0, F32, 0, 0, 8], 8));
        let apart = both(4, part(4, [0, F32, 1 << 10, 0, 8], 8), part(4, [0, F32, 5 << 10, 0, 8], 8));
        for (got, says) in [
            (sizes, "rank 1 registers a window of 128 bytes, flags 1; rank 0 of 64 bytes"),
            (missing, "rank 1 calls Part, but rank 0 calls Window"),
            (apart, "offset in its window 4; rank 0"),
        ] {
            for (kind, text) in got {
                assert!(kind == FrameKind::Wrong && text.contains(says), "{text}");
            }
        }
    }

    #[test]
    fn a_rank_that_leaves_is_lost_to_the_others_and_one_that_has_ended_is_not() {
        let [first, second] = world([0, 1], "");
        until(|| first.answer(0, 0));
        drop(second);
        assert_eq!(until(|| first.lost()), 1);
        let links = world([0, 1], "");
        answers(&links, 0);
        links.iter().for_each(|link| link.send(&Frame::new(FrameKind::End, 0, 1, [0; 5], vec![])).unwrap());
        answers(&links, 1);
        let [first, second] = links;
        drop(second);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(first.lost(), None);
    }

    #[test]
    fn two_ranks_of_a_host_on_one_gpu_are_refused() {
        for (kind, text) in answers(&world([0, 0], "here"), 0) {
            assert!(kind == FrameKind::Wrong && text.contains("Duplicate GPU detected: ranks 0 and 1"), "{text}");
        }
    }
}
