//! All time limits of tests. Never a measure of speed: a limit ends a hang, and FLATSHARD_TEST_TIME_FACTOR=3 stretches
//! every limit and timeout of the tests on a busy machine.
use std::time::{Duration, Instant};

fn factor() -> f64 {
    std::env::var("FLATSHARD_TEST_TIME_FACTOR").map_or(1.0, |text| text.parse().expect("FLATSHARD_TEST_TIME_FACTOR"))
}
/// For timeouts that a test gives to what it tests.
pub fn scaled(ms: u64) -> Duration {
    Duration::from_millis(ms).mul_f64(factor())
}
/// Longer than anything in a test takes, and less than the timeouts of a run that sets none (300 s and more): what ends
/// within it did not end by them.
pub fn limit() -> Duration {
    scaled(120_000)
}

/// Waits until `done`, or until the limit has passed. Returns whether it is done.
pub fn done_in_time(mut done: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    while !done() {
        if started.elapsed() >= limit() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}
#[track_caller]
pub fn wait_until(what: &str, done: impl FnMut() -> bool) {
    assert!(done_in_time(done), "not within {:?}: {what}", limit());
}

/// For what is to end long before the timeout that would end it otherwise.
#[track_caller]
pub fn in_time<T>(f: impl FnOnce() -> T) -> T {
    within(limit(), f)
}

/// For what a thread computes, in its own time: however busy the machine is, that stays what it is.
#[track_caller]
pub fn in_own_time<T>(f: impl FnOnce() -> T) -> T {
    let started = own_time();
    let result = f();
    let took = own_time() - started;
    assert!(took < limit(), "{took:?} of this thread, not within {:?}", limit());
    result
}
/// What this thread has computed so far, in user space and in the kernel: fields 14 and 15, in hundredths of a second.
fn own_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let (_name, fields) = text.rsplit_once(')').unwrap();
    let ticks = fields.split_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().unwrap());
    Duration::from_millis(10 * ticks.sum::<u64>())
}

/// For what took longer by a known fault.
#[track_caller]
pub fn within<T>(most: Duration, f: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let result = f();
    assert!(started.elapsed() < most, "{:?}, not within {most:?}", started.elapsed());
    result
}

/// Seconds since then, to be compared with another measure of the same run.
pub fn seconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64()
}

/// Measures until one measurement passes. A busy machine only adds time: what holds passes in some of many
/// measurements, and what does not hold in none of them.
#[track_caller]
pub fn passes_once(measure: impl Fn() -> Result<(), String>) {
    let failed = |_| measure().err();
    let said: Vec<String> = (0..40).map_while(failed).collect();
    assert!(said.len() < 40, "in none of 40 measurements; the last: {}", said[39]);
}
