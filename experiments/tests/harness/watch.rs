//! `experiments watch` from outside, over plain sockets: who gets the page, and what its data says of files that grow.
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

struct Server {
    process: Child,
    port: u16,
    /// As printed, from the `?` on.
    query: String,
}

impl Server {
    fn start(dir: &Path, args: &[&str]) -> Server {
        let mut command = Command::new(crate::EXPERIMENTS);
        command.arg("watch").args(args).args(["--port", "0"]).current_dir(dir);
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut url).unwrap();
        let (host, query) = url.trim().trim_start_matches("http://").split_once('/').unwrap();
        let port = host.rsplit_once(':').unwrap().1.parse().unwrap();
        Server { process, port, query: query.to_string() }
    }
    /// (status, body) of what is sent as it is.
    fn ask(&self, request: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        let (head, body) = reply.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_string())
    }
    fn get(&self, path: &str) -> (u16, String) {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: localhost:{}\r\n\r\n", self.port))
    }
    fn data(&self, have: &str) -> Value {
        std::thread::sleep(std::time::Duration::from_millis(250)); // files are read five times a second at most
        let (status, body) = self.get(&format!("/data?have={have}"));
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }
}
impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

fn step(step: u64, loss: &str) -> String {
    format!("{{\"event\":\"step\",\"step\":{step},\"loss\":{loss},\"step_time_s\":2}}\n")
}
fn header(resumed: &str) -> String {
    format!(
        "{{\"event\":\"run\",\"world_size\":1,\"resumed_from_step\":{resumed},\"config\":{{\"run\":{{\"max_steps\":9}}}}}}\n"
    )
}

#[test]
fn files_that_grow_are_followed() {
    let dir = TempDir::new().unwrap();
    let server = Server::start(dir.path(), &["one.jsonl", "<two>/metrics.jsonl"]);
    let view = server.data("");
    let said = |view: &Value, run: usize| (view["runs"][run]["status"].clone(), view["runs"][run]["badge"].clone());
    let losses = |view: &Value, run: usize| view["runs"][run]["columns"]["loss"].to_string();
    assert_eq!((view["runs"].as_array().unwrap().len(), said(&view, 0)), (2, ("waiting".into(), "waiting".into())));
    assert_eq!(view["runs"][1]["name"], "<two>");

    let mut file = File::create(dir.path().join("one.jsonl")).unwrap();
    let mut add = |text: &str| file.write_all(text.as_bytes()).unwrap();
    let (begun, rest) = ("{\"event\":\"step\",\"st", "ep\":4,\"loss\":1.5}\n");
    add(&(header("null") + &step(1, "3") + &step(2, "null") + &step(3, "2") + begun));
    let view = server.data("");
    assert_eq!(
        (losses(&view, 0), said(&view, 0)),
        ("[3.0,null,2.0]".into(), ("running".into(), "step 3 of 9, 12s left".into()))
    );
    // Who has this version gets no curve again; the other run has none yet.
    let version = view["runs"][0]["version"].as_str().unwrap();
    assert_eq!(server.data(&format!("{version},x"))["runs"][0]["columns"], Value::Null);
    add(rest);
    let view = server.data(version);
    assert_eq!(losses(&view, 0), "[3.0,null,2.0,1.5]");
    // What is no event is passed over; a resumed run does the steps after its checkpoint again.
    add(&("no event\n".to_string() + &header("2") + &step(3, "2.5")));
    assert_eq!(losses(&server.data(""), 0), "[3.0,null,2.5]");
    add("{\"event\":\"error\",\"message\":\"rank 1 was lost\"}\n");
    assert_eq!(said(&server.data(""), 0), ("failed".into(), "failed after step 3: rank 1 was lost".into()));
    // Another run takes the file's place.
    fs::rename(dir.path().join("one.jsonl"), dir.path().join("one.jsonl.1")).unwrap();
    fs::write(dir.path().join("one.jsonl"), header("null") + &step(1, "4") + "{\"event\":\"end\"}\n").unwrap();
    let view = server.data("");
    assert_eq!((losses(&view, 0), said(&view, 0)), ("[4.0]".into(), ("done".into(), "done, 1 step".into())));

    let (status, page) = server.get("/");
    assert!(status == 200 && page.ends_with("</html>\n") && page.contains("\\u003ctwo>") && !page.contains("<two>"));
}

#[test]
fn the_page_is_for_this_machine_or_for_the_token() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("one.jsonl"), step(1, "3")).unwrap();
    let own = Server::start(dir.path(), &["one.jsonl"]);
    assert_eq!((own.query.as_str(), own.get("/").0, own.get("/data").0), ("", 200, 200));
    for (request, status) in [
        ("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
        ("GET /data HTTP/1.1\r\n\r\n", 403),
        ("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        ("hello\r\n\r\n", 400),
        ("GET /../one.jsonl HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("GET /trace/0/0 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    ] {
        assert_eq!(own.ask(request).0, status, "{request}");
    }
    let open = Server::start(dir.path(), &["one.jsonl", "--bind", "0.0.0.0"]);
    let token = open.query.strip_prefix("?token=").unwrap();
    assert_eq!(token.len(), 32);
    let wrong = format!("{}x", &token[1..]);
    for (path, status) in [
        ("/".to_string(), 403),
        (format!("/?token={wrong}"), 403),
        ("/data?have=".into(), 403),
        (format!("/?token={token}"), 200),
        (format!("/data?have=&token={token}"), 200),
    ] {
        let (found, body) = open.get(&path);
        assert_eq!(found, status, "{path}");
        assert_eq!(body.contains("one"), status == 200, "{path}: {body}");
    }
}

/// Traces are what a run names and what is one: no other file of the machine.
#[test]
fn traces_are_linked_and_nothing_else_is_served() {
    let dir = TempDir::new().unwrap();
    let bin = super::common::real_binaries();
    let words = "--dataset synthetic --embed-dim 32 --num-layers 1 --num-heads 2 --vocab-size 64 --max-len 16 --max-steps 4 \
                 --profile-steps 2:3 --metrics-path run.jsonl --nproc-per-node 2";
    let ended =
        Command::new(bin.join("run_fsdp")).args(words.split_whitespace()).current_dir(dir.path()).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    fs::write(dir.path().join("secret"), "secret").unwrap();
    let path = dir.path().join("run.jsonl");
    let planted = fs::read_to_string(&path).unwrap() + "{\"event\":\"trace\",\"path\":\"secret\"}\n";
    fs::write(&path, planted).unwrap();
    let server = Server::start(dir.path(), &["."]);
    let run = &server.data("")["runs"][0];
    assert_eq!((run["name"].as_str(), run["status"].as_str()), (Some("run"), Some("done")));
    let traces = run["traces"].as_array().unwrap();
    assert_eq!(traces.len(), 1, "{traces:?}");
    assert!(traces[0]["picture"].as_str().unwrap().starts_with("data:image/svg+xml,%3Csvg"), "{traces:?}");
    let href = format!("/{}", traces[0]["href"].as_str().unwrap());
    let (status, body) = server.get(&href);
    assert!(status == 200 && body.contains("\"traceEvents\""), "{status}");
    for other in ["/trace/0/0", "/trace/0/1", "/trace/0/2", "/trace/1/0"].into_iter().filter(|other| *other != href) {
        assert_eq!(server.get(other).0, 404, "{other}");
    }
}

#[test]
fn a_bad_address_is_bad_input() {
    let dir = TempDir::new().unwrap();
    for (args, says) in [(["--bind", "192.0.2.1"], "--bind 192.0.2.1 --port 8321: "), (["--port", "70000"], "70000")] {
        let ended = super::common::experiments(dir.path(), &[&["watch", "a.jsonl"], &args[..]].concat());
        assert!(ended.code == 2 && ended.err.contains(says), "{} {}", ended.code, ended.err);
    }
    assert_eq!(super::common::experiments(dir.path(), &["watch"]).code, 2);
}
