//! Attackers on the network, for tests: find where a process listens, and open connections there. Bounded, on loopback
//! only. Never asserts anything.
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Where a process listens for TCP connections.
pub fn listening(pid: u32) -> Vec<SocketAddr> {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links: Vec<String> = fds.filter_map(|fd| Some(fs::read_link(fd.path()).ok()?.to_str()?.to_string())).collect();
    let mut found = Vec::new();
    for file in ["tcp", "tcp6"] {
        for line in fs::read_to_string(format!("/proc/{pid}/net/{file}")).unwrap_or_default().lines().skip(1) {
            // sl local_address rem_address st ... inode: proc(5).
            let words: Vec<&str> = line.split_whitespace().collect();
            let inode = format!("socket:[{}]", words[9]);
            if words[3] == "0A" && links.contains(&inode) {
                found.push(address(words[1]));
            }
        }
    }
    found
}
/// "0100007F:1F90" is 127.0.0.1:8080: words of 32 bits, each in the host's order.
fn address(text: &str) -> SocketAddr {
    let (ip, port) = text.split_once(':').unwrap();
    let word = |i: usize| u32::from_str_radix(&ip[8 * i..8 * i + 8], 16).unwrap().to_ne_bytes();
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0))),
        _ => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from([0, 1, 2, 3].map(word).concat()).unwrap())),
    };
    SocketAddr::new(ip, u16::from_str_radix(port, 16).unwrap())
}
/// Open descriptors of a process.
pub fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// A background activity that runs until it is dropped, or for a minute.
pub struct Attack {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}
impl Attack {
    /// Calls `again` every so often.
    fn start(every: Duration, mut again: impl FnMut() + Send + 'static) -> Attack {
        let ended = Arc::new(AtomicBool::new(false));
        let goes_on = ended.clone();
        let thread = std::thread::spawn(move || {
            let since = Instant::now();
            while !goes_on.load(Relaxed) {
                if since.elapsed() >= Duration::from_secs(60) {
                    break;
                }
                again();
                std::thread::sleep(every);
            }
        });
        Attack { ended, thread: Some(thread) }
    }
    /// A connection every so often, to one of the addresses that take them, on which nothing is said; at most 500 at a
    /// time.
    pub fn silent(at: Vec<SocketAddr>, every: Duration) -> Attack {
        let mut open: Vec<TcpStream> = Vec::new();
        Attack::start(every, move || {
            open.truncate(500);
            open.extend(at.iter().filter_map(|at| TcpStream::connect_timeout(at, every).ok()));
        })
    }
    /// `n` connections to each address, on each of which a byte is said every so often; opened before this returns, and
    /// again when they are closed.
    pub fn slow(at: Vec<SocketAddr>, n: usize, every: Duration) -> Attack {
        let connect = |at: &SocketAddr| Some((*at, TcpStream::connect_timeout(at, Duration::from_secs(2)).ok()?));
        let mut open: Vec<(SocketAddr, TcpStream)> =
            at.iter().flat_map(|at| [at].repeat(n)).filter_map(connect).collect();
        Attack::start(every, move || {
            for (at, stream) in &mut open {
                // What the program said before this was built began so.
                if stream.write_all(b"f").is_err()
                    && let Some((_, again)) = connect(at)
                {
                    *stream = again;
                }
            }
        })
    }
}
impl Drop for Attack {
    fn drop(&mut self) {
        self.ended.store(true, Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The bytes received until the other end closes or the time is over.
pub fn heard(mut stream: &TcpStream, at_most: Duration) -> (Vec<u8>, bool) {
    stream.set_read_timeout(Some(at_most)).unwrap();
    let (mut all, mut some) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut some) {
            Ok(0) => return (all, true),
            Ok(n) => all.extend_from_slice(&some[..n]),
            Err(e) => return (all, e.kind() == std::io::ErrorKind::ConnectionReset),
        }
    }
}

/// The greeting of a rank as it was without a secret: magic, a hash of what everybody knows, the rank.
pub fn old_greeting(run_id: &str, addr: &str, port: u16, world: usize, rank: u32) -> Vec<u8> {
    let job = format!("{run_id} {addr} {port} {world} {:?}", None::<u32>);
    let word = xxhash_rust::xxh3::xxh3_64(job.as_bytes());
    [b"flatshrd", &word.to_le_bytes()[..], &rank.to_le_bytes()].concat()
}
