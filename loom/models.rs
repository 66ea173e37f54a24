//! The shared-memory protocol under every interleaving: the waits are those of src/comm/shm, with its actual
//! synchronization words, and they guard memory whose accesses loom checks. Run only by scripts/loom_check.sh, which
//! also weakens each ordering and expects a failure.
#![cfg(all(loom, test))]
#[path = "../src/comm/shm/words.rs"]
mod words;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering::Relaxed};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread::{self, yield_now};
use words::Phase::*;
use words::{Bell, Front, Reader, Record};

/// Memory of the arena: an access concurrent with a write fails the model.
#[derive(Default)]
struct Memory(UnsafeCell<u64>);
impl Memory {
    fn write(&self, value: u64) {
        // SAFETY: loom checks for concurrent access.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }
    fn read(&self) -> u64 {
        // SAFETY: loom checks for concurrent writes.
        self.0.with(|cell| unsafe { *cell })
    }
}

/// Runs both ranks of a world under every interleaving.
fn ranks<W: Default + 'static>(rank: fn(&W, usize)) {
    /// State that ranks share by mapping it.
    struct Shared<W>(W);
    // SAFETY: atomics, and cells whose accesses loom checks.
    unsafe impl<W> Send for Shared<W> {}
    // SAFETY: as above.
    unsafe impl<W> Sync for Shared<W> {}
    let mut every = loom::model::Builder::new();
    every.preemption_bound = Some(3);
    every.check(move || {
        let world = Arc::new(Shared(W::default()));
        let other = world.clone();
        let one = thread::spawn(move || rank(&other.0, 1));
        rank(&world.0, 0);
        one.join().unwrap();
    });
}
fn until(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        yield_now();
    }
}

/// Operations of one group, in a ring of one slot: posted, compared, done, retired, and then the slot is reused.
#[test]
fn a_record_is_read_before_it_is_written_again() {
    ranks::<[Record<[u64; 2]>; 2]>(|records, me| {
        let (own, theirs) = (&records[me], &records[1 - me]);
        for seq in 0..2 {
            until(|| seq == 0 || theirs.reached(seq - 1, Retired));
            own.post(seq, [10 + seq; 2], Posted);
            until(|| theirs.reached(seq, Posted));
            assert_eq!(theirs.desc(), [10 + seq; 2]);
            own.publish(seq, Retired);
        }
    });
}

#[derive(Default)]
struct Gather {
    records: [[Record<u64>; 2]; 2],
    pieces: [Memory; 2],
    readers: [Reader; 2],
}

/// Two gathers into one buffer: a shard is written once all ranks have released the previous contents, and read once it
/// is complete.
#[test]
fn a_piece_is_whole_and_stays_until_it_is_released() {
    ranks::<Gather>(|g, me| {
        for content in 0..2 {
            g.records[me][content as usize].post(content, 0, Posted);
            until(|| g.readers.iter().all(|reader| reader.is_past(content)));
            g.pieces[me].write(20 + content);
            g.records[me][content as usize].publish(content, Ready);
            until(|| g.records[1 - me][content as usize].reached(content, Ready));
            assert_eq!(g.pieces[1 - me].read(), 20 + content);
            g.readers[me].release(content);
        }
    });
}

#[derive(Default)]
struct Reduction {
    records: [Record<u64>; 2],
    /// One per rank, each with a slice per rank.
    buffers: [[Memory; 2]; 2],
}

/// An in-place all_reduce: each rank sums a slice, then copies the other's sum; its buffer is reusable when nobody
/// copies from it.
#[test]
fn slices_are_reduced_then_copied_then_free() {
    ranks::<Reduction>(|all, me| {
        let (own, theirs, peer) = (&all.records[me], &all.records[1 - me], 1 - me);
        all.buffers[me].iter().for_each(|slice| slice.write(1 + me as u64));
        own.post(0, 0, Ready);
        until(|| theirs.reached(0, Ready));
        all.buffers[me][me].write(all.buffers[0][me].read() + all.buffers[1][me].read());
        own.publish(0, Reduced);
        until(|| theirs.reached(0, Reduced));
        all.buffers[me][peer].write(all.buffers[peer][peer].read());
        own.publish(0, Done);
        until(|| theirs.reached(0, Done));
        assert_eq!(all.buffers[me].each_ref().map(Memory::read), [3, 3]);
        all.buffers[me].iter().for_each(|slice| slice.write(0));
    });
}

#[derive(Default)]
struct Mail {
    records: [[Record<u64>; 2]; 2],
    halves: [Memory; 2],
}

/// Rank 0 sends three rounds, then an operation of one, through the two halves of its mailbox.
#[test]
fn a_half_mailbox_is_filled_when_it_is_read() {
    ranks::<Mail>(|mail, me| {
        for (seq, rounds) in [(0, 3), (1, 1)] {
            let [own, theirs] = [me, 1 - me].map(|rank| &mail.records[rank][seq as usize]);
            let last = &mail.records[1 - me][0]; // of the previous operation
            own.post(seq, 0, Posted);
            for round in 0..rounds {
                let half = &mail.halves[round as usize % 2];
                if me == 0 {
                    until(|| (round >= 2 || seq == 0 || last.reached(0, Done)) && theirs.leaves_half_of(seq, round));
                    half.write(30 + round as u64);
                    own.set_put(round + 1);
                } else {
                    until(|| theirs.reached(seq, Posted) && theirs.has_put(round));
                    assert_eq!(half.read(), 30 + round as u64);
                    own.set_taken(round + 1);
                }
            }
            own.publish(seq, Done);
        }
    });
}

/// Like the kernel's futex: it compares and sleeps, or wakes, one caller at a time.
#[derive(Default)]
struct Futex {
    queue: Mutex<()>,
    woken: Condvar,
}
impl Futex {
    fn wait(&self, word: &AtomicU32, expected: u32) {
        let queue = self.queue.lock().unwrap();
        if word.load(Relaxed) == expected {
            drop(self.woken.wait(queue).unwrap());
        }
    }
    fn wake(&self) {
        let _queue = self.queue.lock().unwrap();
        self.woken.notify_all();
    }
}

#[derive(Default)]
struct Sleepy {
    record: Record<u64>,
    bell: Bell,
    kernel: Futex,
}

/// Rank 0 publishes twice and rings; rank 1 sleeps until it sees each. A lost wake-up is a deadlock.
#[test]
fn no_ring_is_missed() {
    ranks::<Sleepy>(|world, me| {
        let Sleepy { record, bell, kernel } = world;
        for phase in [Ready, Done] {
            if me == 0 {
                record.publish(0, phase);
                bell.ring(|_| kernel.wake());
                continue;
            }
            loop {
                let heard = bell.count();
                if record.reached(0, phase) {
                    break;
                }
                bell.sleep(|word| kernel.wait(word, heard));
            }
        }
    });
}

#[derive(Default)]
struct Dropped {
    front: Front,
    buffer: Memory,
}

/// The last rank frees the memory, which then reads as zero, after all others have stopped reading.
#[test]
fn memory_goes_back_when_all_have_read() {
    ranks::<Dropped>(|world, _| {
        assert_eq!(world.buffer.read(), 0);
        if world.front.drop_last(2) {
            world.buffer.write(1);
        }
    });
}
