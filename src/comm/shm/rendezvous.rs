//! How ranks started by another launcher find their host's arena: the first rank creates it and publishes its location
//! in a small file. Never used by our own launcher, whose ranks inherit the arena.
//!
//! [Note: rendezvous] The file's name identifies the job (user, launcher's id and restart, port, world, host). Its text
//! names the descriptor `/proc/PID/fd/N`, the start time of that process, and a random word that the arena holds too. A
//! file left by a dead job is detected by the process's start time, or because the descriptor is not such an arena. The
//! file is removed once every rank has joined, so a later job cannot find an arena in use.
use super::arena::Arena;
use super::seat::Seat;
use crate::base::{Error, Meter, Result};
use crate::comm::env::RankEnv;
use std::fs::{self, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Ranks that have not joined by then were never started.
const PATIENCE: Duration = Duration::from_secs(120);
const RETRY: Duration = Duration::from_millis(5);

/// Joins the arena of this rank's job. Returns when all ranks have joined.
pub(super) fn meet(env: &RankEnv, meter: Meter, timeout: Duration) -> Result<Seat> {
    let path = place(env);
    let deadline = Instant::now() + PATIENCE.min(timeout);
    let (seat, published) = match env.local_rank {
        0 => {
            let arena = Arc::new(Arena::create(env.local_world)?);
            let nonce = RandomState::new().hash_one(std::process::id());
            arena.set_nonce(nonce)?;
            let published = Published::new(path, &arena, nonce)?;
            (Seat::take(arena, 0, first(env), meter, timeout)?, Some(published))
        }
        _ => (find(&path, env, meter, timeout, deadline)?, None),
    };
    seat.assemble(deadline)?;
    drop(published);
    Ok(seat)
}

/// World rank of this host's first rank.
fn first(env: &RankEnv) -> usize {
    env.rank - env.local_rank
}

fn place(env: &RankEnv) -> PathBuf {
    let uid = rustix::process::getuid().as_raw();
    let RankEnv { run_id, master_addr, master_port, world, host, .. } = env;
    // In tests, one machine plays two hosts.
    let job = format!("{run_id} {master_addr} {master_port} {world} {host} {}", first(env));
    let shm = Path::new("/dev/shm");
    let dir = if shm.is_dir() { shm.to_path_buf() } else { std::env::temp_dir() };
    dir.join(format!("flatshard-{uid}-{:016x}", xxhash_rust::xxh3::xxh3_64(job.as_bytes())))
}

/// The file, removed when ranks no longer need it.
struct Published {
    path: PathBuf,
    text: String,
}
impl Published {
    fn new(path: PathBuf, arena: &Arena, nonce: u64) -> Result<Published> {
        let pid = std::process::id();
        let started = start_time(pid)
            .ok_or_else(|| Error::Run("cannot read /proc, which ranks need to find each other".into()))?;
        // Written under another name and renamed, so that nobody reads a partial file.
        let draft = path.with_extension(pid.to_string());
        let text = format!("{pid} {} {started} {nonce}", arena.fd());
        let mut file = OpenOptions::new();
        let written = file.write(true).create(true).truncate(true).mode(0o600).open(&draft).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            fs::rename(&draft, &path)
        });
        written.map_err(|e| Error::io("write", &path, e))?;
        Ok(Published { path, text })
    }
}
impl Drop for Published {
    fn drop(&mut self) {
        // Only our own file: another job of the same name may have replaced it.
        if fs::read_to_string(&self.path).is_ok_and(|text| text == self.text) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn find(path: &Path, env: &RankEnv, meter: Meter, timeout: Duration, deadline: Instant) -> Result<Seat> {
    loop {
        // A taken seat belongs to another job of the same name: retry.
        let seat = open(path, env.local_world);
        let take = |arena| Seat::take(arena, env.local_rank, first(env), meter.clone(), timeout).ok();
        match seat.and_then(take) {
            Some(seat) => return Ok(seat),
            None if Instant::now() < deadline => std::thread::sleep(RETRY),
            None => {
                return Err(Error::Run(format!(
                    "rank {}: rank {} of {} did not start on this host (looked for {}; MASTER_PORT {} and the \
                     launcher's job id must be the same for all ranks of a job, and differ between jobs)",
                    env.rank,
                    first(env),
                    env.world,
                    path.display(),
                    env.master_port
                )));
            }
        }
    }
}

/// Opens the arena that a live process of this user published.
fn open(path: &Path, world: usize) -> Option<Arc<Arena>> {
    if fs::metadata(path).ok()?.uid() != rustix::process::getuid().as_raw() {
        return None;
    }
    let text = fs::read_to_string(path).ok()?;
    let mut words = text.split(' ').map(|w| w.parse::<u64>().ok());
    let [pid, fd, started, nonce] = std::array::from_fn(|_| words.next().flatten());
    let pid = u32::try_from(pid?).ok()?;
    if start_time(pid)? != started? {
        return None;
    }
    let arena = Arena::open_path(&format!("/proc/{pid}/fd/{}", fd?), world).ok()?;
    (arena.nonce() == nonce).then(|| Arc::new(arena))
}

/// Start time of a process in clock ticks since boot: a later process with the same id has another.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Field 22. The name in field 2 may contain spaces; it ends with the last parenthesis (man proc_pid_stat).
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}
