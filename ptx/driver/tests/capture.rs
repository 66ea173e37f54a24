//! Capture as in CUDA: nothing runs, branches fork and join through events, a graph does its work at each launch, and
//! illegal calls end the capture.
use crate::common::*;
use flatshard_simcuda::api::{event::*, graph::*, memory::*, stream::*};

const UNSUPPORTED: i32 = 900;
const INVALIDATED: i32 = 901;
const UNMATCHED: i32 = 903;
const UNJOINED: i32 = 904;
const ISOLATION: i32 = 905;
const CAPTURED_EVENT: i32 = 907;

/// Ends a capture; returns the graph, or 0.
fn end_code(stream: u64) -> i32 {
    let mut graph = 0;
    unsafe { cuStreamEndCapture(stream, &mut graph) }
}
fn launched(exec: u64, stream: u64) {
    ok(unsafe { cuGraphLaunch(exec, stream) });
}

#[test]
fn a_graph_does_its_calls_at_each_launch_and_none_before() {
    start();
    let (s, x, add_one) = (stream(), alloc(32), function(ADD, "add"));
    set(x, 0, 32, s);
    ok(unsafe { cuStreamSynchronize(s) });
    begin(s);
    let mut status = 0;
    ok(unsafe { cuStreamIsCapturing(s, &mut status) });
    assert_eq!(status, 1);
    ok(add(add_one, x, 32, s));
    ok(add(add_one, x, 32, s));
    let exec = end(s);
    assert_eq!(words(x, 32, s), Ok(vec![0; 32]));
    launched(exec, s);
    launched(exec, s);
    launched(exec, stream());
    ok(add(add_one, x, 32, s));
    let last = stream();
    launched(exec, last); // after earlier launches, whatever the stream
    ok(unsafe { cuStreamSynchronize(s) });
    assert_eq!(words(x, 32, last), Ok(vec![9; 32]));
    ok(unsafe { cuGraphExecDestroy(exec) });
}

/// x is doubled in two branches on two streams and summed where they join: the branches run in any order, but never the
/// join first.
#[test]
fn branches_fork_and_join_through_events() {
    start();
    let (s, side, add_one) = (stream(), stream(), function(ADD, "add"));
    let (x, y, z) = (alloc(32), alloc(32), alloc(64));
    let (forked, joined) = (event(), event());
    begin(s);
    set(x, 0, 32, s);
    copy(y, x, 32, s); // not in the branch, where x may change meanwhile, under some seeds
    record(forked, s);
    follow(side, forked);
    for _ in 0..3 {
        ok(add(add_one, x, 32, s));
        ok(add(add_one, y, 32, side));
        ok(add(add_one, y, 32, side));
    }
    record(joined, side);
    follow(s, joined);
    copy(z, x, 32, s);
    copy(z + 128, y, 32, s);
    let exec = end(s);
    launched(exec, s);
    let mut want = vec![3; 32];
    want.extend([6; 32]);
    assert_eq!(words(z, 64, s), Ok(want));
    // The side stream is usable again.
    set(y, 0, 32, side);
    assert_eq!(words(y, 32, side), Ok(vec![0; 32]));
}

#[test]
fn branches_come_out_the_same_under_all_seeds() {
    if is_alone() {
        return;
    }
    for seed in 1..8 {
        let out = alone("capture::branches_fork_and_join_through_events", &format!("seed={seed}"));
        assert!(out.status.success(), "seed {seed}: {}", String::from_utf8_lossy(&out.stdout));
    }
}

#[test]
fn what_is_not_joined_or_not_of_the_capture_ends_it() {
    start();
    let (s, side, x, forked) = (stream(), stream(), alloc(32), event());
    begin(s);
    record(forked, s);
    follow(side, forked);
    set(x, 0, 32, side);
    assert_eq!(unsafe { cuEventQuery(forked) }, CAPTURED_EVENT);
    assert_eq!(end_code(side), UNMATCHED);
    assert_eq!(end_code(s), INVALIDATED);

    begin(s);
    record(forked, s);
    follow(side, forked);
    set(x, 0, 32, side);
    assert_eq!(end_code(s), UNJOINED);

    let outside = event();
    record(outside, side);
    begin(s);
    assert_eq!(unsafe { cuStreamWaitEvent(s, outside, 0) }, ISOLATION);
    assert_eq!(unsafe { cuMemsetD8Async(x, 0, 4, s) }, INVALIDATED);
    assert_eq!(end_code(s), INVALIDATED);
}

#[test]
fn waiting_and_allocating_are_not_allowed_meanwhile_on_this_thread() {
    start();
    let (s, other, done) = (stream(), stream(), event());
    record(done, other);
    type Call = fn(u64, u64) -> i32;
    let calls: [(&str, Call); 6] = [
        ("alloc", |_, _| unsafe { cuMemAlloc_v2(&mut 0, 16) }),
        ("pin", |_, _| unsafe { cuMemHostAlloc((&raw mut *Box::leak(Box::new(0u64))).cast(), 16, 0) }),
        ("query", |_, done| unsafe { cuEventQuery(done) }),
        ("synchronize the event", |_, done| unsafe { cuEventSynchronize(done) }),
        ("synchronize the stream", |s, _| unsafe { cuStreamSynchronize(s) }),
        ("copy and wait", |_, _| unsafe { cuMemsetD8_v2(1 << 50, 0, 4) }),
    ];
    for (name, call) in calls {
        begin(s);
        assert_eq!(call(s, done), UNSUPPORTED, "{name}");
        assert_eq!(end_code(s), INVALIDATED, "{name}");
        // Another thread is allowed to.
        begin(s);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                start();
                ok(unsafe { cuEventSynchronize(done) });
                alloc(4);
            });
        });
        assert_eq!(end_code(s), 0, "{name}");
    }
}

/// Records and waits in the graph: each launch records the event anew.
#[test]
fn external_events_are_nodes() {
    start();
    let (s, x, mark) = (stream(), alloc(32), event());
    begin(s);
    set(x, 1, 32, s);
    ok(unsafe { cuEventRecordWithFlags(mark, s, 1) });
    set(x, 2, 32, s);
    let exec = end(s);
    ok(unsafe { cuEventQuery(mark) }); // not recorded yet
    launched(exec, s);
    assert_eq!(unsafe { cuEventQuery(mark) }, 600);
    ok(unsafe { cuEventSynchronize(mark) });
    assert_eq!(words(x, 1, s), Ok(vec![0x0202_0202]));
}
