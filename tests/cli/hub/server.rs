//! A hub on loopback: repositories with commits, the parts of the API that are used, and whatever trouble a test plants
//! in front of it. Never speaks TLS.
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::spawn;

/// A request, with header names in lower case.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    /// Path and query, as sent.
    pub path: String,
    pub headers: BTreeMap<String, String>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
    pub fn is_get_of(&self, file: &str) -> bool {
        self.method == "GET" && self.path.contains("/resolve/") && self.path.ends_with(file)
    }
}

#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// The connection breaks after so many bytes of the body.
    pub breaks: Option<usize>,
}

impl Reply {
    pub fn status(status: u16) -> Reply {
        Reply { status, ..Reply::default() }
    }
    pub fn with(mut self, name: &str, value: impl ToString) -> Reply {
        self.headers.push((name.into(), value.to_string()));
        self
    }
    pub fn json(value: &Value) -> Reply {
        Reply { body: value.to_string().into_bytes(), ..Reply::status(200) }
    }
}

/// Files of a commit by path.
pub type Files = BTreeMap<String, Vec<u8>>;
/// What comes first: None lets the hub answer. The number counts requests.
type Trouble = dyn Fn(&Request, usize) -> Option<Reply> + Send;

#[derive(Default)]
struct State {
    /// By kind and name; commits and what revisions are.
    commits: BTreeMap<(String, String), BTreeMap<String, Files>>,
    revisions: BTreeMap<(String, String), BTreeMap<String, String>>,
    seen: Vec<Request>,
    trouble: Option<Box<Trouble>>,
    /// Listings have hashes and sizes.
    blobs: bool,
}

pub struct HubServer {
    pub address: String,
    state: Arc<Mutex<State>>,
}

pub fn files(all: &[(&str, &[u8])]) -> Files {
    all.iter().map(|(path, content)| (path.to_string(), content.to_vec())).collect()
}
pub fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|b| format!("{b:02x}")).collect()
}
pub fn git_sha1(content: &[u8]) -> String {
    let hash = Sha1::new().chain_update(format!("blob {}\0", content.len())).chain_update(content).finalize();
    hash.iter().map(|b| format!("{b:02x}")).collect()
}
/// As repositories have it: weights and tables are in large storage.
pub fn is_large(path: &str) -> bool {
    path.ends_with(".safetensors") || path.ends_with(".parquet") || path.ends_with(".gguf")
}
pub fn etag(path: &str, content: &[u8]) -> String {
    if is_large(path) { sha256(content) } else { git_sha1(content) }
}
/// A commit by a digit.
pub fn commit(digit: char) -> String {
    digit.to_string().repeat(40)
}

impl HubServer {
    pub fn start() -> HubServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State { blobs: true, ..State::default() }));
        let shared = state.clone();
        spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = shared.clone();
                spawn(move || drop(answer(&stream, &state)));
            }
        });
        HubServer { address, state }
    }
    /// `kind` is models or datasets. The commit becomes main.
    pub fn put(&self, kind: &str, repo: &str, commit: &str, files: Files) {
        let (key, mut state) = ((kind.to_string(), repo.to_string()), self.state.lock().unwrap());
        state.commits.entry(key.clone()).or_default().insert(commit.into(), files);
        state.revisions.entry(key).or_default().insert("main".into(), commit.into());
    }
    pub fn revision(&self, kind: &str, repo: &str, revision: &str, commit: &str) {
        let key = (kind.to_string(), repo.to_string());
        self.state.lock().unwrap().revisions.entry(key).or_default().insert(revision.into(), commit.into());
    }
    pub fn trouble(&self, trouble: impl Fn(&Request, usize) -> Option<Reply> + Send + 'static) {
        self.state.lock().unwrap().trouble = Some(Box::new(trouble));
    }
    pub fn calm(&self) {
        self.state.lock().unwrap().trouble = None;
    }
    pub fn without_blobs(&self) {
        self.state.lock().unwrap().blobs = false;
    }
    /// The requests since the last call.
    pub fn seen(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().unwrap().seen)
    }
}

fn answer(stream: &TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    if reader.read_line(&mut line).is_err() {
        let mut stream = stream;
        return stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"); // TLS, which this is not
    }
    let mut words = line.split_whitespace().map(str::to_string);
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(()) };
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? <= 2 {
            break;
        }
        if let Some((name, value)) = line.split_once(':') {
            headers.insert(name.to_lowercase(), value.trim().to_string());
        }
    }
    let request = Request { method, path, headers };
    let reply = {
        let mut state = state.lock().unwrap();
        state.seen.push(request.clone());
        let number = state.seen.len();
        let planted = state.trouble.as_ref().and_then(|trouble| trouble(&request, number));
        planted.unwrap_or_else(|| state.reply(&request))
    };
    let Reply { status, headers, body, breaks } = reply;
    let own = headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let mut head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\n");
    if !own {
        head += &format!("Content-Length: {}\r\n", body.len());
    }
    headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
    let mut stream = stream;
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    if request.method != "HEAD" {
        stream.write_all(&body[..breaks.unwrap_or(body.len()).min(body.len())])?;
    }
    stream.flush()
}

fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.bytes());
    while let Some(b) = rest.next() {
        match b {
            b'%' => {
                let hex = [rest.next().unwrap(), rest.next().unwrap()];
                bytes.push(u8::from_str_radix(std::str::from_utf8(&hex).unwrap(), 16).unwrap());
            }
            b => bytes.push(b),
        }
    }
    String::from_utf8(bytes).unwrap()
}

impl State {
    fn reply(&self, request: &Request) -> Reply {
        let missing = || Reply::status(404).with("X-Error-Code", "RepoNotFound");
        let path = decoded(request.path.split('?').next().unwrap());
        let api = path.strip_prefix("/api/");
        let (kind, rest) = match api.or(path.strip_prefix('/')).unwrap() {
            rest if rest.starts_with("datasets/") => ("datasets", &rest[9..]),
            rest if api.is_some() => ("models", rest.strip_prefix("models/").unwrap_or(rest)),
            rest => ("models", rest),
        };
        let mut parts = rest.splitn(4, '/');
        let (Some(owner), Some(name), Some(what), Some(rest)) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return missing();
        };
        let key = (kind.to_string(), format!("{owner}/{name}"));
        let Some(commits) = self.commits.get(&key) else { return missing() };
        let of = |revision: &str| {
            let commit = self.revisions[&key].get(revision).map_or(revision, String::as_str);
            commits.get_key_value(commit)
        };
        let no_revision = || Reply::status(404).with("X-Error-Code", "RevisionNotFound");
        match (api.is_some(), what) {
            (true, "revision") => of(rest).map_or_else(no_revision, |(commit, files)| {
                let sibling = |(path, content): (&String, &Vec<u8>)| match (self.blobs, is_large(path)) {
                    (false, _) => json!({"rfilename": path}),
                    (true, false) => json!({"rfilename": path, "size": content.len(), "blobId": git_sha1(content)}),
                    (true, true) => json!({"rfilename": path, "size": content.len(), "blobId": commit, "lfs":
                        {"sha256": sha256(content), "size": content.len(), "pointerSize": 130}}),
                };
                let siblings: Vec<Value> = files.iter().map(sibling).collect();
                Reply::json(&json!({"id": key.1, "sha": commit, "siblings": siblings}))
            }),
            (true, "tree") => of(rest).map_or_else(no_revision, |(commit, files)| {
                // Two entries a page.
                let cursor = request.path.split("cursor=").nth(1).map_or(0, |text| text.parse().unwrap());
                let entry = |(path, content): (&String, &Vec<u8>)| match is_large(path) {
                    false => json!({"type": "file", "path": path, "size": content.len(), "oid": git_sha1(content)}),
                    true => json!({"type": "file", "path": path, "size": content.len(), "oid": commit, "lfs":
                        {"oid": sha256(content), "size": content.len(), "pointerSize": 130}}),
                };
                let page: Vec<Value> = files.iter().skip(cursor).take(2).map(entry).collect();
                let next = cursor + page.len();
                let reply = Reply::json(&json!(page));
                match next < files.len() {
                    true => reply.with(
                        "Link",
                        format!("</api/{kind}/{}/tree/{rest}?recursive=true&cursor={next}>; rel=\"next\"", key.1),
                    ),
                    false => reply,
                }
            }),
            (false, "resolve") => {
                let (revision, path) = rest.split_once('/').unwrap();
                match of(revision) {
                    None => no_revision(),
                    Some((commit, files)) => match files.get(path) {
                        None => Reply::status(404).with("X-Error-Code", "EntryNotFound"),
                        Some(content) => served(request, path, content).with("X-Repo-Commit", commit),
                    },
                }
            }
            _ => missing(),
        }
    }
}

/// The file, or the bytes of it that are asked for.
pub fn served(request: &Request, path: &str, content: &[u8]) -> Reply {
    let all = content.len();
    let range = request.header("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let reply = match range {
        None => Reply { body: content.to_vec(), ..Reply::status(200) },
        Some((start, end)) => {
            let (start, end) = (start.parse::<usize>().unwrap(), end.parse().unwrap_or(all - 1));
            let body = content[start..=end].to_vec();
            Reply { body, ..Reply::status(206) }.with("Content-Range", format!("bytes {start}-{end}/{all}"))
        }
    };
    let name = if is_large(path) { "X-Linked-Etag" } else { "ETag" };
    let reply = reply.with(name, format!("\"{}\"", etag(path, content)));
    if is_large(path) { reply.with("X-Linked-Size", all) } else { reply }
}
