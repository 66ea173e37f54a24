//! One page over HTTP/1.1: GET only, one request a connection, and only for those who may read it. Never writes a file,
//! and knows nothing of runs. A server library would bring more than the hundred lines here, and none for plain threads
//! has had a release in years.
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// Further simultaneous connections are closed unanswered.
const MOST_CONNECTIONS: usize = 32;
const LONGEST_REQUEST: usize = 16 << 10;
const PATIENCE: Duration = Duration::from_secs(10);

/// A parsed request.
pub struct PageRequest {
    pub path: String,
    query: Vec<(String, String)>,
}

impl PageRequest {
    pub fn value(&self, name: &str) -> &str {
        self.query.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }
}

/// The response to it.
pub struct PageReply {
    pub status: &'static str,
    pub kind: &'static str,
    pub body: Vec<u8>,
    /// Offered as a download under this name.
    pub file: Option<String>,
}

impl PageReply {
    pub fn of(kind: &'static str, body: impl Into<Vec<u8>>) -> PageReply {
        PageReply { status: "200 OK", kind, body: body.into(), file: None }
    }
    pub fn refused(status: &'static str, why: &str) -> PageReply {
        PageReply { status, ..PageReply::of("text/plain; charset=utf-8", format!("{why}\n")) }
    }
}

/// Access control: with a token, only requests that carry it; without one, only requests whose Host header names the
/// loopback. That stops other sites whose name was made to resolve to 127.0.0.1 (DNS rebinding).
pub struct Guard {
    pub token: Option<String>,
}

impl Guard {
    fn refuses(&self, request: &PageRequest, host: Option<&str>) -> Option<PageReply> {
        match &self.token {
            Some(token) if same(token, request.value("token")) => None,
            Some(_) => {
                Some(PageReply::refused("403 Forbidden", "The URL needs the token that `experiments watch` printed."))
            }
            None if host.is_some_and(is_loopback) => None,
            None => {
                Some(PageReply::refused("403 Forbidden", "This page is for localhost; see `experiments watch --bind`."))
            }
        }
    }
}

/// Compares in constant time.
fn same(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// For a Host header, with or without a port.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Answers until the process ends.
pub fn serve(listener: &TcpListener, guard: Guard, answer: impl Fn(&PageRequest) -> PageReply + Send + Sync + 'static) {
    let shared = Arc::new((guard, answer));
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            std::thread::sleep(Duration::from_millis(50)); // such as no free file descriptor
            continue;
        };
        if Arc::strong_count(&shared) > MOST_CONNECTIONS {
            continue;
        }
        let shared = shared.clone();
        // Without a thread the connection is closed, and the page polls again.
        let _ = std::thread::Builder::new().spawn(move || {
            let _ = converse(stream, &shared.0, &shared.1); // the client has disconnected
        });
    }
}

fn converse(mut stream: TcpStream, guard: &Guard, answer: &dyn Fn(&PageRequest) -> PageReply) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let mut bytes = [0; 2048];
        match stream.read(&mut bytes)? {
            0 => return Ok(()),
            n => head.extend(&bytes[..n]),
        }
        if head.len() > LONGEST_REQUEST {
            return reply(
                &mut stream,
                &PageReply::refused("431 Request Header Fields Too Large", "The request is too long."),
            );
        }
    }
    let answered = match parsed(&String::from_utf8_lossy(&head)) {
        Err(refused) => refused,
        Ok((request, host)) => guard.refuses(&request, host.as_deref()).unwrap_or_else(|| answer(&request)),
    };
    reply(&mut stream, &answered)
}

/// The request, and its Host header.
fn parsed(head: &str) -> Result<(PageRequest, Option<String>), PageReply> {
    let mut lines = head.split("\r\n");
    let words: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
    let (method, target) = match words[..] {
        [method, target, version] if target.starts_with('/') && version.starts_with("HTTP/1.") => (method, target),
        _ => return Err(PageReply::refused("400 Bad Request", "Not a request of HTTP/1.1.")),
    };
    if method != "GET" {
        return Err(PageReply::refused("405 Method Not Allowed", "Only GET is answered."));
    }
    let headers = lines.filter_map(|line| line.split_once(':'));
    let hosts = headers.filter(|(name, _)| name.eq_ignore_ascii_case("host"));
    let host = hosts.map(|(_, value)| value.trim().to_string()).next();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let query = pairs.map(|(name, value)| (decoded(name), decoded(value))).collect();
    Ok((PageRequest { path: decoded(path), query }, host))
}

fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((&first, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        match (first, code) {
            (b'%', Some(byte)) => (bytes.push(byte), rest = &after[2..]).1,
            _ => (bytes.push(if first == b'+' { b' ' } else { first }), rest = after).1,
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn reply(stream: &mut TcpStream, reply: &PageReply) -> std::io::Result<()> {
    let PageReply { status, kind, body, file } = reply;
    let plain =
        |name: &String| name.chars().filter(|c| c.is_ascii_alphanumeric() || "-_.".contains(*c)).collect::<String>();
    let named = |name: String| format!("Content-Disposition: attachment; filename=\"{name}\"\r\n");
    let download = file.as_ref().map(plain).map_or(String::new(), named);
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n{download}\
         Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n\
         Referrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    stream.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_the_loopback_are_its_own() {
        for own in ["localhost", "LOCALHOST:80", "127.0.0.1:8321", "127.9.9.9", "[::1]:80", "[::1]"] {
            assert!(is_loopback(own), "{own}");
        }
        for other in ["", "evil.example", "localhost.evil.example:80", "10.0.0.1", "127.0.0.1.evil.example", "[::2]"] {
            assert!(!is_loopback(other), "{other}");
        }
    }

    #[test]
    fn requests_are_read_as_browsers_write_them() {
        let (request, host) = parsed("GET /da%74a?have=a%2Cb+c&token=%zz HTTP/1.1\r\nhOst: x:1\r\n\r\n").ok().unwrap();
        assert_eq!((request.path.as_str(), request.value("have"), request.value("token")), ("/data", "a,b c", "%zz"));
        assert_eq!((host.as_deref(), request.value("none")), (Some("x:1"), ""));
        let status = |head: &str| parsed(head).err().unwrap().status;
        assert!(status("POST / HTTP/1.1\r\n\r\n").starts_with("405") && status("GET x\r\n\r\n").starts_with("400"));
        assert!(same("abc", "abc") && !same("abc", "abd") && !same("abc", "ab"));
    }
}
