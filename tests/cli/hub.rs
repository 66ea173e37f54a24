//! Models and data sets by name, from a hub on loopback that does what hubs and networks do wrong.
mod server;

use crate::common::runs::{Agent, Dir, FSDP, Run, events, launched, unlaunched};
use flatshard::base::Result;
use flatshard::hub::{HubFiles, HubName, HubOptions, HubReader, HubToken, ModelNeed};
use serde_json::{Value, json};
use server::{Files, HubServer, Reply, commit, etag, files, served, sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

const TOKEN: &str = "hf_abcdefghijklmnop";
/// Bytes of a range in these tests.
const RANGE: u64 = 4096;

/// A cache and a hub.
struct Place {
    dir: Dir,
    server: HubServer,
    token: Option<&'static str>,
    offline: bool,
}

impl Place {
    fn new() -> Place {
        Place { dir: Dir::new(), server: HubServer::start(), token: None, offline: false }
    }
    fn hub(&self) -> HubReader {
        HubReader::new(HubOptions {
            endpoint: self.server.address.clone(),
            token: self.token.and_then(HubToken::new),
            cache: self.cache(),
            views: self.dir.path("views"),
            offline: self.offline,
            quiet: true,
            pause: Duration::from_millis(1),
            range: RANGE,
        })
        .unwrap()
    }
    fn cache(&self) -> PathBuf {
        self.dir.path("cache")
    }
    fn model(&self, name: &str) -> Result<HubFiles> {
        self.hub().model(&HubName::model(name).unwrap(), ModelNeed::Weights)
    }
    fn data(&self, name: &str) -> Result<HubFiles> {
        self.hub().dataset(&HubName::dataset(name).unwrap())
    }
    #[track_caller]
    fn refuses(&self, name: &str, parts: &[&str]) {
        refusal(self.model(name), parts);
    }
    #[track_caller]
    fn refuses_data(&self, name: &str, parts: &[&str]) {
        refusal(self.data(name), parts);
    }
    fn gets(&self) -> usize {
        self.server.seen().iter().filter(|request| request.method == "GET").count()
    }
}

#[track_caller]
fn refusal(result: Result<HubFiles>, parts: &[&str]) {
    let error = result.unwrap_err();
    assert_eq!(error.exit_status(), 2);
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    assert!(!text.contains(TOKEN), "{text}");
}

/// Bytes without a pattern.
fn noise(len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn model(weights: &[u8]) -> Files {
    files(&[
        ("config.json", b"{}"),
        ("tokenizer.json", b"{ }"),
        ("model.safetensors", weights),
        ("x.gguf", b"GGUF"),
        ("original/params.json", b"{}"),
        ("pytorch_model.bin", b"no"),
    ])
}

/// Files of a directory, with what links lead to.
fn tree(dir: &Path) -> Vec<String> {
    fn walk(dir: &Path, below: &str, found: &mut Vec<String>) {
        let mut entries: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap()).collect();
        entries.sort_by_key(|e| e.file_name());
        for entry in entries {
            let name = format!("{below}{}", entry.file_name().to_string_lossy());
            match fs::read_link(entry.path()) {
                Ok(to) => found.push(format!("{name} -> {}", to.display())),
                Err(_) if entry.path().is_dir() => walk(&entry.path(), &format!("{name}/"), found),
                Err(_) => found.push(name),
            }
        }
    }
    let mut found = Vec::new();
    walk(dir, "", &mut found);
    found
}

#[test]
fn the_cache_is_that_of_huggingface_hub_and_holds_what_is_needed() {
    let place = Place::new();
    let weights = noise(10_000);
    place.server.put("models", "o/m", &commit('a'), model(&weights));
    let found = place.model("o/m").unwrap();
    assert_eq!(found.name.to_string(), format!("o/m@{}", commit('a')));
    let dir = place.cache().join("models--o--m");
    assert_eq!(found.path, dir.join("snapshots").join(commit('a')));
    let (empty, large, a) = (etag("config.json", b"{}"), sha256(&weights), commit('a'));
    let mut expected = vec![
        format!("blobs/{empty}"),
        format!("blobs/{large}"),
        "refs/main".to_string(),
        format!("snapshots/{a}/config.json -> ../../blobs/{empty}"),
        format!("snapshots/{a}/model.safetensors -> ../../blobs/{large}"),
        format!("snapshots/{a}/tokenizer.json -> ../../blobs/{}", etag("tokenizer.json", b"{ }")),
        format!("blobs/{}", etag("tokenizer.json", b"{ }")),
        format!("trees/{a}.json"),
    ];
    expected.sort();
    assert_eq!(tree(&dir), expected);
    assert_eq!(fs::read_to_string(dir.join("refs/main")).unwrap(), a);
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights);
    assert!(place.cache().join(".locks/models--o--m").join(format!("{large}.lock")).exists());
    // A second run asks what main is, and nothing else; a commit needs no question.
    place.server.seen();
    place.model("o/m").unwrap();
    assert_eq!(place.server.seen().len(), 1);
    place.model(&format!("o/m@{a}")).unwrap();
    assert_eq!(place.server.seen().len(), 0);
    // What another commit shares is not downloaded again.
    place.server.put("models", "o/m", &commit('b'), model(&[&weights[..], b"!"].concat()));
    place.server.seen();
    place.model("o/m").unwrap();
    let seen = place.server.seen();
    assert!(seen.iter().all(|request| !request.path.ends_with("config.json")), "{seen:?}");
    assert_eq!(fs::read_to_string(dir.join("refs/main")).unwrap(), commit('b'));
}

#[test]
fn only_a_config_where_weights_are_not_read_and_one_gguf_file_by_name() {
    let place = Place::new();
    place.server.put("models", "o/m", &commit('a'), model(b"w"));
    let name = HubName::model("o/m").unwrap();
    let found = place.hub().model(&name, ModelNeed::Config).unwrap();
    assert!(found.path.join("config.json").exists() && !found.path.join("model.safetensors").exists());
    let file = place.model("o/m/x.gguf").unwrap();
    assert_eq!(fs::read(&file.path).unwrap(), b"GGUF");
    assert_eq!(file.name.to_string(), format!("o/m@{}/x.gguf", commit('a')));
    place.refuses("o/m/y.gguf", &["no file y.gguf", "o/m"]);
    // All parts of a model that was split, and no part of another.
    let parts = ["q4/m-00001-of-00002.gguf", "q4/m-00002-of-00002.gguf", "q8/m-00001-of-00002.gguf"];
    place.server.put("models", "o/split", &commit('b'), files(&parts.map(|name| (name, name.as_bytes()))));
    let file = place.model("o/split/q4/m-00002-of-00002.gguf").unwrap();
    let there = parts.map(|name| file.path.parent().unwrap().parent().unwrap().join(name).exists());
    assert_eq!(there, [true, true, false]);
}

#[test]
fn shards_are_those_of_the_index() {
    let place = Place::new();
    let index = json!({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).to_string();
    let all = [
        ("config.json", &b"{}"[..]),
        ("model.safetensors.index.json", index.as_bytes()),
        ("m-1.safetensors", b"1"),
        ("m-2.safetensors", b"2"),
        ("m-3.safetensors", b"3"),
    ];
    place.server.put("models", "o/m", &commit('a'), files(&all));
    let path = place.model("o/m").unwrap().path;
    assert!(path.join("m-2.safetensors").exists() && !path.join("m-3.safetensors").exists());
    // An index that names a file elsewhere.
    let hostile = json!({"weight_map": {"a": "../../../../evil"}}).to_string();
    let all = [("config.json", &b"{}"[..]), ("model.safetensors.index.json", hostile.as_bytes())];
    place.server.put("models", "o/m", &commit('b'), files(&all));
    place.refuses("o/m", &["../../../../evil", "leaves its folder"]);
}

#[test]
fn a_broken_connection_goes_on_where_it_ended_in_ranges() {
    let place = Place::new();
    let weights = noise(10 * RANGE as usize + 7);
    place.server.put("models", "o/m", &commit('a'), model(&weights));
    let content = weights.clone();
    // Every answer breaks after 1,000 bytes.
    place.server.trouble(move |request, _| {
        let reply = served(request, "model.safetensors", &content);
        request.is_get_of("model.safetensors").then_some(Reply { breaks: Some(1000), ..reply })
    });
    let found = place.model("o/m").unwrap();
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights);
    let seen = place.server.seen();
    let ranges: Vec<&str> = seen.iter().filter_map(|request| request.header("range")).collect();
    assert!(ranges.contains(&"bytes=1000-4095") && ranges.contains(&"bytes=4096-8191"), "{ranges:?}");
    assert!(ranges.len() >= 40, "{ranges:?}");
}

#[test]
fn a_server_without_ranges_sends_all_of_it() {
    let place = Place::new();
    let weights = noise(10 * RANGE as usize);
    place.server.put("models", "o/m", &commit('a'), model(&weights));
    let content = weights.clone();
    place.server.trouble(move |request, number| {
        let bare = server::Request { headers: Default::default(), ..request.clone() };
        let reply = served(&bare, "model.safetensors", &content);
        let breaks = number.is_multiple_of(2).then_some(20_000);
        request.is_get_of("model.safetensors").then_some(Reply { breaks, ..reply })
    });
    assert_eq!(fs::read(place.model("o/m").unwrap().path.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn what_an_earlier_program_left_is_continued_or_replaced() {
    let weights = noise(20_000);
    for (left, first) in [(weights[..5000].to_vec(), 5000), (vec![1; 30_000], 0), (vec![7; 5000], 0)] {
        let place = Place::new();
        place.server.put("models", "o/m", &commit('a'), model(&weights));
        let blobs = place.cache().join("models--o--m/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(format!("{}.incomplete", sha256(&weights))), &left).unwrap();
        let found = place.model("o/m").unwrap();
        assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights);
        let seen = place.server.seen();
        let starts: Vec<String> = seen
            .iter()
            .filter(|request| request.is_get_of("model.safetensors"))
            .map(|request| request.header("range").unwrap_or("bytes=0-").to_string())
            .collect();
        assert!(starts.iter().any(|range| range.starts_with(&format!("bytes={first}-"))), "{starts:?}");
        assert!(fs::read_dir(&blobs).unwrap().all(|e| !e.unwrap().path().ends_with("incomplete")));
    }
}

#[test]
fn wrong_content_gets_no_name() {
    for (file, bad) in [("model.safetensors", &b"other weights"[..]), ("config.json", b"[]")] {
        let place = Place::new();
        place.server.put("models", "o/m", &commit('a'), model(&noise(13)));
        place.server.trouble(move |request, _| {
            request.is_get_of(file).then(|| Reply { body: bad.to_vec(), ..Reply::status(200) })
        });
        place.refuses("o/m", &[file, "has the hash", "nothing of it is kept"]);
        let path = place.cache().join("models--o--m/snapshots").join(commit('a')).join(file);
        assert!(!path.exists());
        let blobs = fs::read_dir(place.cache().join("models--o--m/blobs")).unwrap();
        assert!(blobs.map(|e| e.unwrap()).all(|e| fs::read(e.path()).unwrap() != bad));
        place.server.calm();
        place.model("o/m").unwrap();
    }
}

#[test]
fn the_token_goes_to_the_hub_and_to_no_other_host() {
    let mut place = Place::new();
    place.token = Some(TOKEN);
    let (elsewhere, weights) = (HubServer::start(), noise(9000));
    place.server.put("models", "o/m", &commit('a'), model(&weights));
    let (content, address, back) = (weights.clone(), elsewhere.address.clone(), place.server.address.clone());
    place.server.trouble(move |request, _| {
        if request.path.starts_with("/again/") {
            return Some(served(request, "model.safetensors", &content));
        }
        let headers = served(request, "model.safetensors", &content).headers;
        let is = request.path.contains("/resolve/") && request.path.ends_with("model.safetensors");
        let away =
            || Reply { headers, ..Reply::status(302) }.with("Location", format!("{address}/cdn/model.safetensors"));
        is.then(away)
    });
    // From there back to the hub's own host: who sends back may have chosen the address.
    elsewhere.trouble(move |_, _| Some(Reply::status(302).with("Location", format!("{back}/again/model.safetensors"))));
    assert_eq!(fs::read(place.model("o/m").unwrap().path.join("model.safetensors")).unwrap(), weights);
    let bearer = format!("Bearer {TOKEN}");
    let others = elsewhere.seen();
    assert!(!others.is_empty() && others.iter().all(|request| request.header("authorization").is_none()), "{others:?}");
    for request in place.server.seen() {
        let expected = (!request.path.starts_with("/again/")).then_some(&bearer[..]);
        assert_eq!(request.header("authorization"), expected, "{}", request.path);
    }
    // A next page on another host gets no token either.
    place.server.without_blobs();
    let address = elsewhere.address.clone();
    place.server.put("models", "o/p", &commit('b'), model(b"p"));
    place.server.trouble(move |request, _| {
        let page = Reply::json(&json!([])).with("Link", format!("<{address}/next>; rel=\"next\""));
        request.path.contains("/tree/").then_some(page)
    });
    elsewhere.trouble(|_, _| Some(Reply::json(&json!([]))));
    let _ = place.model("o/p");
    let others = elsewhere.seen();
    assert!(others.len() == 1 && others[0].header("authorization").is_none(), "{others:?}");
}

#[test]
fn a_relative_redirect_is_followed_with_the_token() {
    let mut place = Place::new();
    place.token = Some(TOKEN);
    place.server.put("models", "new/name", &commit('a'), model(b"w"));
    place.server.trouble(|request, _| {
        let path = request.path.strip_prefix("/api/models/old/name")?;
        Some(Reply::status(307).with("Location", format!("/api/models/new/name{path}")))
    });
    let mut hub = place.hub();
    let found = hub.model(&HubName::model("old/name").unwrap(), ModelNeed::Weights).unwrap();
    assert!(found.path.starts_with(place.cache().join("models--old--name")), "as huggingface_hub stores it");
    assert_eq!(hub.notes(), ["old/name is now called new/name: use that name"]);
    assert!(place.server.seen().iter().all(|request| request.header("authorization").is_some()));
    // A secret on the command line is not repeated.
    let (code, text) = run(&place, &format!("--hf_token {TOKEN} --pretrain old/name"), &[]);
    assert!(code == 2 && text.contains("set HF_TOKEN") && !text.contains(TOKEN), "{text}");
    // Paths with a mistake are no names.
    place.server.calm();
    let typo = run(&place, "--dataset rows/train.jsonl", &[]);
    assert!(
        typo.0 == 2 && typo.1.contains("rows/train.jsonl: no such file or directory, and not a name"),
        "{}",
        typo.1
    );
    let typo = run(&place, "--pretrain ./model --dataset synthetic", &[]);
    assert!(
        typo.0 == 2 && typo.1.contains("./model: no such file or directory, and not a name of the hub"),
        "{}",
        typo.1
    );
    assert!(place.server.seen().is_empty());
}

#[test]
fn each_refusal_has_its_message() {
    let mut place = Place::new();
    place.server.put("models", "o/m", &commit('a'), model(b"w"));
    let always = |place: &Place, status: u16, code: &'static str, why: &'static str| {
        place
            .server
            .trouble(move |_, _| Some(Reply::status(status).with("X-Error-Code", code).with("X-Error-Message", why)));
    };
    let address = place.server.address.clone();
    for token in [None, Some(TOKEN)] {
        place.token = token;
        let hint = if token.is_none() { "set HF_TOKEN" } else { "the account of your token has no access" };
        always(&place, if token.is_none() { 401 } else { 403 }, "GatedRepo", "");
        place.refuses("o/m", &["o/m is gated", &format!("{address}/o/m"), hint]);
        place.refuses_data("o/d", &["is gated", &format!("{address}/datasets/o/d")]);
        always(&place, 401, "RepoNotFound", "");
        let hint = if token.is_none() { "or it is private" } else { "your token may not read it" };
        place.refuses("o/m", &["no such file or directory", "not a name of the hub", "no model o/m", hint]);
        place.refuses_data("o/d", &["no data set o/d"]);
    }
    always(&place, 401, "", "Invalid credentials in Authorization header");
    place.refuses("o/m", &["does not accept the token", "/settings/tokens"]);
    // A server that repeats the token does not get it printed.
    place.server.trouble(|_, _| Some(Reply::status(403).with("X-Error-Message", format!("not with {TOKEN}"))));
    place.refuses("o/m", &["not with [token]", "check the permissions"]);
    always(&place, 403, "", "Access to this resource is disabled.");
    place.refuses("o/m", &["o/m is disabled"]);
    place.server.calm();
    place.refuses("o/m@v9", &["o/m has no revision v9"]);
    place.refuses("o/none", &["no model o/none"]);
    place.server.trouble(|_, _| Some(Reply { body: b"<html>".to_vec(), ..Reply::status(200) }));
    place.refuses("o/m", &["does not answer as a hub does", "HF_ENDPOINT"]);
    place.server.trouble(|_, _| Some(Reply::status(302).with("Location", "/api/models/o/m/revision/main")));
    place.refuses("o/m", &["redirects"]);
}

#[test]
fn models_that_cannot_be_read_are_refused_before_a_download() {
    let place = Place::new();
    let put = |all: &[(&str, &[u8])]| place.server.put("models", "o/m", &commit('a'), files(all));
    put(&[("model.safetensors", b"w")]);
    place.refuses("o/m", &["is not a model", "no config.json"]);
    put(&[("config.json", b"{}"), ("pytorch_model.bin", b"w")]);
    place.refuses("o/m", &[".bin", "pickle"]);
    put(&[("config.json", b"{}"), ("q4.gguf", b"w")]);
    place.refuses("o/m", &["GGUF", "o/m/q4.gguf"]);
    put(&[("adapter_config.json", b"{}"), ("adapter_model.safetensors", b"w"), ("README.md", b"")]);
    assert_eq!(tree(&place.model("o/m").unwrap().path).len(), 2);
}

#[test]
fn hostile_names_cannot_leave_the_cache() {
    for name in
        ["../../evil.json", "/etc/evil.json", "a/../../../evil.json", ".git/config.json", "..\\..\\evil.json", ""]
    {
        let place = Place::new();
        place.server.put(
            "models",
            "o/m",
            &commit('a'),
            files(&[("config.json", b"{}"), ("model.safetensors", b"w"), (name, b"x")]),
        );
        place.refuses("o/m", &[name, "is not downloaded"]);
        assert!(!place.dir.path("evil.json").exists() && !place.cache().join("evil.json").exists());
    }
    // A hash is the name of a file, too.
    let place = Place::new();
    place.server.put("models", "o/m", &commit('a'), model(b"w"));
    place.server.trouble(|request, _| {
        (request.method == "HEAD").then(|| Reply::status(200).with("ETag", "\"../../evil\"").with("X-Linked-Size", 1))
    });
    place.refuses("o/m", &["that is none"]);
}

#[test]
fn servers_that_fail_are_asked_again_but_not_forever() {
    let place = Place::new();
    place.server.put("models", "o/m", &commit('a'), model(b"w"));
    place.server.trouble(|_, number| match number {
        1 => Some(Reply::status(429).with("Retry-After", 0)),
        2 => Some(Reply::status(503)),
        3 => Some(Reply::status(500)),
        _ => None,
    });
    place.model("o/m").unwrap();
    place.server.put("models", "o/n", &commit('a'), model(b"w"));
    place.server.seen();
    place.server.trouble(|_, _| Some(Reply::status(502)));
    place.refuses("o/n", &["fails (status 502)", "try again later"]);
    assert_eq!(place.gets(), 5);
    place.server.trouble(|_, _| Some(Reply::status(429).with("Retry-After", 4000)));
    place.refuses("o/n", &["too many requests", "in 4000 s", "HF_TOKEN"]);
    assert_eq!(place.gets(), 1);
}

#[test]
fn no_network_and_no_room() {
    let mut place = Place::new();
    place.server.put("models", "o/m", &commit('a'), model(b"w"));
    place.model("o/m").unwrap();
    let address = std::mem::replace(&mut place.server.address, "http://127.0.0.1:1".into());
    place.refuses("o/n", &["cannot be reached at http://127.0.0.1:1", "HTTPS_PROXY"]);
    // What is in the cache is used, and this is said.
    let mut hub = place.hub();
    hub.model(&HubName::model("o/m").unwrap(), ModelNeed::Weights).unwrap();
    assert!(hub.notes()[0].contains("Using the cache's copy of o/m, commit aaaa"));
    place.server.address = address.replace("http://", "https://");
    place.refuses("o/n", &["(TLS)", "SSL_CERT_FILE"]);
    place.server.address = "http://no-such-host.invalid".into();
    place.refuses("o/n", &["no address is known for no-such-host.invalid"]);
    place.server.address = address;
    place.server.trouble(|request, _| {
        let info = json!({"id": "o/n", "sha": commit('c'), "siblings": [{"rfilename": "config.json", "size": 1u64 << 60,
            "blobId": commit('d')}, {"rfilename": "model.safetensors", "size": 1, "blobId": commit('e')}]});
        let size = if request.path.ends_with("config.json") { 1u64 << 60 } else { 1 };
        match request.method == "HEAD" {
            true => Some(Reply::status(200).with("ETag", commit('d')).with("X-Linked-Size", size)),
            false => Some(Reply::json(&info)),
        }
    });
    place.refuses("o/n", &["needs 1152921.5 TB", "are free in", "HF_HUB_CACHE"]);
    assert!(!place.cache().join("models--o--n/blobs").exists());
}

#[test]
fn offline_the_cache_is_all_there_is() {
    let mut place = Place::new();
    place.server.put("models", "o/m", &commit('a'), model(b"w"));
    place.server.put(
        "datasets",
        "o/d",
        &commit('d'),
        files(&[("a.jsonl", b"{}"), ("b.jsonl", b"{}"), ("README.md", b"x")]),
    );
    place.model("o/m").unwrap();
    place.data("o/d/a.jsonl").unwrap();
    place.server.seen();
    place.offline = true;
    place.model("o/m").unwrap();
    place.model(&format!("o/m@{}", commit('a'))).unwrap();
    place.data("o/d/a.jsonl").unwrap();
    place.refuses("o/x", &["HF_HUB_OFFLINE is set", "no model o/x", "unset it"]);
    place.refuses("o/m@v2", &["HF_HUB_OFFLINE is set", "at revision v2"]);
    // The listing says that a part of the data set is missing, so it is not trained on as if it were whole.
    place.refuses_data("o/d", &["b.jsonl is not in the cache", "HF_HUB_OFFLINE"]);
    let file = place.cache().join("models--o--m/snapshots").join(commit('a')).join("model.safetensors");
    fs::remove_file(file).unwrap();
    place.refuses("o/m", &["model.safetensors is not in the cache"]);
    assert_eq!(place.server.seen().len(), 0);
}

#[test]
fn a_revision_that_moves_is_resolved_once_and_pinned() {
    let place = Place::new();
    place.server.put("datasets", "o/d", &commit('a'), files(&[("train.jsonl", b"1"), ("test.jsonl", b"2")]));
    let mut hub = place.hub();
    let of = |hub: &mut HubReader, name: &str| hub.dataset(&HubName::dataset(name).unwrap()).unwrap();
    assert_eq!(of(&mut hub, "o/d").name.to_string(), format!("o/d@{}", commit('a')));
    place.server.put("datasets", "o/d", &commit('b'), files(&[("train.jsonl", b"3"), ("test.jsonl", b"4")]));
    let test = of(&mut hub, "o/d:test");
    assert_eq!(test.name.to_string(), format!("o/d@{}:test", commit('a')), "the same commit for all of a run");
    assert_eq!(fs::read(&test.path).unwrap(), b"2");
    // A later run of the same checkpoint, and one without it.
    let commits = hub.commits();
    let mut later = place.hub();
    later.pin(commits);
    assert_eq!(fs::read(of(&mut later, "o/d").path).unwrap(), b"1");
    assert_eq!(fs::read(of(&mut place.hub(), "o/d").path).unwrap(), b"3");
}

#[test]
fn splits_are_the_cards_or_those_of_conventions() {
    let place = Place::new();
    let names = |found: Result<HubFiles>| {
        let path = found.unwrap().path;
        if path.is_file() { vec![path.file_name().unwrap().to_string_lossy().into_owned()] } else { tree(&path) }
    };
    let short =
        |names: Vec<String>| names.iter().map(|n| n.split(" -> ").next().unwrap().to_string()).collect::<Vec<_>>();
    let put =
        |commit: char, all: &[(&str, &[u8])]| place.server.put("datasets", "o/d", &self::commit(commit), files(all));
    put(
        '1',
        &[
            ("data/train-00000-of-00002.parquet", b"1"),
            ("data/train-00001-of-00002.parquet", b"2"),
            ("data/test-00000-of-00001.parquet", b"3"),
            ("README.md", b"# Card"),
        ],
    );
    let two = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"];
    assert_eq!(short(names(place.data("o/d"))), two);
    assert_eq!(short(names(place.data("o/d"))), two, "the links are used again");
    assert_eq!(short(names(place.data("o/d:test"))), ["test-00000-of-00001.parquet"]);
    assert_eq!(
        place.server.seen().iter().filter(|request| request.is_get_of("test-00000-of-00001.parquet")).count(),
        1
    );
    place.refuses_data("o/d:validation", &["no split validation", "train, test", "o/d:train"]);
    place.refuses_data("o/d/none.jsonl", &["no file or folder none.jsonl", "data/t"]);
    assert_eq!(short(names(place.data("o/d/data:train"))).len(), 2);
    let card = "---\nconfigs:\n- config_name: a\n  data_files: a.jsonl\n- config_name: b\n  default: true\n  data_files:\n  \
                - split: train\n    path: 'sub/*.jsonl'\n---\n";
    put('2', &[("a.jsonl", b"1"), ("sub/b.jsonl", b"2"), ("sub/c.txt", b"2"), ("README.md", card.as_bytes())]);
    assert_eq!(short(names(place.data("o/d"))), ["b.jsonl"]);
    put(
        '3',
        &[
            ("a.jsonl", b"1"),
            ("b.jsonl", b"2"),
            ("README.md", card.replace("default: true", "version: 1.0.0").replace("sub/*", "b").as_bytes()),
        ],
    );
    place.refuses_data("o/d", &["several configurations", "a, b", "such as o/d/a"]);
    assert_eq!(short(names(place.data("o/d/a"))), ["a.jsonl"]);
    assert_eq!(short(names(place.data("o/d/b:train"))), ["b.jsonl"]);
    place.refuses_data("o/d/b:test", &["no split test", "train"]);
    place.refuses_data("o/d/b:train[:1]", &["slices and sums of splits are not read"]);
    place.refuses_data("o/d/c", &["no file or folder c"]);
}

#[test]
fn data_sets_of_scripts_and_other_formats_come_as_parquet() {
    let place = Place::new();
    place.server.put(
        "datasets",
        "o/d",
        &commit('c'),
        files(&[("default/train/0000.parquet", b"1"), ("default/test/0000.parquet", b"2")]),
    );
    place.server.revision("datasets", "o/d", "refs/convert/parquet", &commit('c'));
    place.server.put(
        "datasets",
        "o/d",
        &commit('a'),
        files(&[("d.py", b"import os"), ("train.jsonl", b"{}"), ("README.md", b"")]),
    );
    let found = place.data("o/d:test").unwrap();
    assert_eq!(fs::read(&found.path).unwrap(), b"2");
    assert_eq!(found.name.to_string(), format!("o/d@{}/default/test", commit('c')));
    assert_eq!(
        fs::read(place.data(&found.name.to_string()).unwrap().path).unwrap(),
        b"2",
        "the pinned name means the same"
    );
    place.server.put("datasets", "o/z", &commit('a'), files(&[("x.zip", b"PK")]));
    place.refuses_data("o/z", &["has no files that are read", "x.zip", "has made no Parquet"]);
}

#[test]
fn listings_come_in_pages_where_they_are_not_whole() {
    let place = Place::new();
    place.server.without_blobs();
    place.server.put("models", "o/m", &commit('a'), model(&noise(3000)));
    place.model("o/m").unwrap();
    let pages = place.server.seen().iter().filter(|request| request.path.contains("/tree/")).count();
    assert_eq!(pages, 3);
    let tree: Value = serde_json::from_slice(
        &fs::read(place.cache().join(format!("models--o--m/trees/{}.json", commit('a')))).unwrap(),
    )
    .unwrap();
    assert_eq!(tree["files"]["model.safetensors"]["lfs_size"], 3000);
}

/// A run of the program in a place of its own.
fn run(place: &Place, args: &str, more: &[(&str, &str)]) -> (i32, String) {
    let mut command = command(place, args, more);
    let ended = Run(command.spawn().unwrap()).end();
    (ended.status.code().unwrap_or(-1), ended.stderr)
}
fn command(place: &Place, args: &str, more: &[(&str, &str)]) -> std::process::Command {
    let mut command = unlaunched(FSDP);
    command.current_dir(place.dir.path("")).env("FLATSHARD_CACHE_DIR", place.dir.path("own"));
    command.env("HF_ENDPOINT", &place.server.address).env("HF_HOME", place.dir.path("hf"));
    ["HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"]
        .iter()
        .for_each(|name| _ = command.env_remove(name));
    command.envs(more.iter().copied()).args(args.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A model with bytes as its tokenizer, as a repository.
fn trained(place: &Place) -> Files {
    let tiny = "--dataset synthetic --vocab-size 320 --embed-dim 16 --num-layers 1 --num-heads 2 --max-positions 128 \
                --max-len 16 --max-steps 1 --nproc-per-node 1 --no-eval --no-sample --save-hf model";
    let (code, text) = run(place, tiny, &[]);
    assert_eq!(code, 0, "{text}");
    let read = |name: &str| fs::read(place.dir.path("model").join(name)).unwrap();
    ["config.json", "model.safetensors"].map(|name| (name.to_string(), read(name))).into()
}

const ROW: &str = "{\"question\": \"what?\", \"response\": \"that\"}\n";
/// The seeds' command, and what makes it short.
const COMMAND: &str = "--pretrain meta-llama/Meta-Llama-3-8B --dataset Open-Orca/OpenOrca --input_key question \
                       --output_key response --max-steps 2 --no-sample --no-eval --no-measure-peak --nproc-per-node 2";

fn place_of_the_seeds() -> Place {
    let place = Place::new();
    let files_of_model = trained(&place);
    place.server.put("models", "meta-llama/Meta-Llama-3-8B", &commit('a'), files_of_model);
    let rows = ROW.repeat(40);
    place.server.put(
        "datasets",
        "Open-Orca/OpenOrca",
        &commit('d'),
        files(&[("1M-GPT4-Augmented.jsonl", rows.as_bytes())]),
    );
    place
}

/// As OpenRLHF's commands have it.
#[test]
fn the_split_that_is_evaluated_may_be_a_flag() {
    let place = place_of_the_seeds();
    let rows = ROW.repeat(40);
    let parts = [("train.jsonl", rows.as_bytes()), ("test.jsonl", rows.as_bytes())];
    place.server.put("datasets", "o/rows", &commit('e'), files(&parts));
    let eval = "--pretrain meta-llama/Meta-Llama-3-8B --dataset Open-Orca/OpenOrca --input_key question --output_key \
                response --max-steps 1 --no-sample --nproc-per-node 1 --eval_dataset o/rows";
    let (code, text) = run(&place, &format!("{eval} --eval_split test"), &[]);
    assert!(code == 0 && text.contains("test.jsonl") && !text.contains("train.jsonl"), "{text}");
    let (code, text) = run(&place, &format!("{eval}:train --eval_split test"), &[]);
    assert!(code == 2 && text.contains("--eval-split test: o/rows:train: this name has another split"), "{text}");
    fs::create_dir(place.dir.path("folder")).unwrap();
    for (name, rows) in parts {
        fs::write(place.dir.path("folder").join(name), rows).unwrap();
    }
    let (code, text) = run(&place, &format!("{} --eval.split test", eval.replace("o/rows", "folder")), &[]);
    assert!(code == 0 && text.contains("folder/test.jsonl") && !text.contains("train.jsonl"), "{text}");
    let (code, text) = run(&place, &format!("{} --eval-split dev", eval.replace("o/rows", "folder")), &[]);
    assert!(code == 2 && text.contains("folder has no split dev; it has train, test"), "{text}");
    let both = eval.replace("Open-Orca/OpenOrca", "folder:test").replace("o/rows", "folder:train");
    let (code, text) = run(&place, &both, &[]);
    let data = text.lines().find(|line| line.starts_with("data ")).unwrap_or_default();
    assert!(code == 0 && data.contains("folder/test.jsonl") && !data.contains("train.jsonl"), "{text}");
    let (code, text) = run(&place, &eval.replace("Open-Orca/OpenOrca", "folder:dev"), &[]);
    assert!(code == 2 && text.contains("--dataset folder:dev: folder has no split dev; it has train, test"), "{text}");
}

#[test]
fn the_command_of_the_seeds_runs_names_its_commits_and_resumes_with_them() {
    let place = place_of_the_seeds();
    let token = [("HF_TOKEN", TOKEN)];
    let (code, text) = run(&place, &format!("{COMMAND} --metrics-path m.jsonl --ckpt-dir ckpt --save-every 1"), &token);
    assert_eq!(code, 0, "{text}");
    let pinned = format!("meta-llama/Meta-Llama-3-8B@{}", commit('a'));
    let data = format!("Open-Orca/OpenOrca@{}", commit('d'));
    assert!(
        text.contains(&format!("hub      pretrain {pinned}\n")) && text.contains(&format!("dataset {data}\n")),
        "{text}"
    );
    assert!(text.contains("download meta-llama/Meta-Llama-3-8B: 2 files") && !text.contains(TOKEN), "{text}");
    let config = &events(&place.dir.path("m.jsonl"), "run")[0]["config"];
    assert_eq!((&config["model"]["pretrain"], &config["data"]["dataset"]), (&json!(pinned), &json!([data])));
    assert!(!fs::read_to_string(place.dir.path("m.jsonl")).unwrap().contains(TOKEN));
    // Both revisions move; the run that continues does not.
    let rows = "{\"question\": \"other\", \"response\": \"rows\"}\n".repeat(50);
    place.server.put("datasets", "Open-Orca/OpenOrca", &commit('e'), files(&[("x.jsonl", rows.as_bytes())]));
    place.server.put("models", "meta-llama/Meta-Llama-3-8B", &commit('b'), files(&[("config.json", b"{}")]));
    let (code, text) =
        run(&place, &format!("{} --ckpt-dir ckpt --resume auto", COMMAND.replace("steps 2", "steps 3")), &[]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains(&format!("dataset {data}\n")) && text.contains("after step 2"), "{text}");
}

/// Prompts to sample from, and recorded rollouts: names where paths can be.
#[test]
fn prompts_and_rollouts_have_names() {
    let place = Place::new();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/golden/parquet/prompts.parquet");
    let rows = fs::read(golden).unwrap();
    place.server.put("datasets", "o/p", &commit('a'), files(&[("data/train-00000-of-00001.parquet", &rows)]));
    let tiny = "--objective grpo --embed-dim 16 --num-layers 1 --num-heads 2 --max-positions 512 --max-len 64 \
                --batch-size 1 --max-steps 2 --nproc-per-node 1 --no-sample --no-shuffle";
    let drawn = "--reward length:2 --group-size 2 --max-new-tokens 2 --skip-bad-rows --record-rollouts r.jsonl";
    let (code, text) = run(&place, &format!("{tiny} {drawn} --dataset o/p --input-key q"), &[]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains(&format!("dataset o/p@{}\n", commit('a'))), "{text}");
    let recorded = fs::read(place.dir.path("r.jsonl")).unwrap();
    place.server.put("datasets", "o/r", &commit('b'), files(&[("r.jsonl", &recorded)]));
    let (code, text) = run(&place, &format!("{tiny} --rollouts o/r"), &[]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains(&format!("rollouts o/r@{}\n", commit('b'))), "{text}");
    let (code, text) = run(&place, &format!("{tiny} --rollouts o/none"), &[]);
    assert!(code == 2 && text.contains("--rollouts o/none: "), "{text}");
    // Prompts of a command line, too.
    let mut prompts = command(&place, "--save-hf model", &[]);
    prompts.args(tiny.replace("--objective grpo", "--dataset synthetic").split_whitespace());
    assert!(Run(prompts.spawn().unwrap()).end().status.success());
    let texts = |from: &str| {
        let flags =
            "--pretrain model --max-new-tokens 2 --nproc-per-node 1 --temperature 0 --max-samples 1 --input-key q";
        let mut command = command(&place, flags, &[]);
        command.args(["--generate", from]);
        Run(command.spawn().unwrap()).end()
    };
    let (named, local) = (texts("o/p"), texts(golden));
    assert!(named.status.success() && named.stdout.contains("\"ids\":"), "{}", named.stderr);
    assert_eq!(named.stdout, local.stdout);
    let none = texts("or/none");
    assert!(none.stderr.contains("--generate or/none: ") && none.stderr.contains("as text"), "{}", none.stderr);
    // What is missing is found before a download.
    place.server.seen();
    let (code, text) = run(&place, &format!("{tiny} --pretrain o/m --dataset o/p"), &[]);
    assert!(code == 2 && text.contains("add --reward") && place.server.seen().is_empty(), "{text}");
}

#[test]
fn variables_mean_what_they_mean_to_huggingface_hub() {
    let place = place_of_the_seeds();
    let path = |name: &str| place.dir.path(name).display().to_string();
    fs::write(place.dir.path("secret"), format!("{TOKEN}\n")).unwrap();
    let (secret, cache) = (path("secret"), path("elsewhere"));
    let sends_token = || place.server.seen().iter().all(|request| request.header("authorization").is_some());
    let (code, text) =
        run(&place, &format!("{COMMAND} --print-samples 1"), &[("HF_TOKEN_PATH", &secret), ("HF_HUB_CACHE", &cache)]);
    assert!(code == 0 && sends_token(), "{text}");
    assert!(place.dir.path("elsewhere/models--meta-llama--Meta-Llama-3-8B/refs/main").exists());
    // HF_HOME has a token, and a cache that is empty.
    fs::create_dir_all(place.dir.path("hf")).unwrap();
    fs::copy(place.dir.path("secret"), place.dir.path("hf/token")).unwrap();
    let (code, text) = run(&place, &format!("{COMMAND} --print-samples 1"), &[("HF_HUB_OFFLINE", "yes")]);
    assert!(code == 2 && text.contains("HF_HUB_OFFLINE is set") && place.server.seen().is_empty(), "{text}");
    let (code, text) = run(&place, &format!("{COMMAND} --print-config"), &[]);
    assert!(code == 0 && sends_token() && place.dir.path("hf/hub").exists(), "{text}");
    let (code, text) = run(&place, &format!("{COMMAND} --print-config"), &[("HF_HUB_OFFLINE", "1")]);
    assert!(code == 0 && place.server.seen().is_empty(), "{text}");
    let none = [("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")];
    run(&place, &format!("{COMMAND} --print-config"), &none);
    assert!(place.server.seen().iter().all(|request| request.header("authorization").is_none()));
}

/// The base model that an adapter names is found on the hub, for an adapter there and for one that was saved here.
#[test]
fn the_base_model_of_an_adapter_is_found_by_its_name() {
    let place = Place::new();
    let golden = |path: &str| fs::read(Path::new("tests/golden/adapters").join(path)).unwrap();
    let base = ["config.json", "model.safetensors"].map(|name| (name.to_string(), golden(&format!("qwen2/{name}"))));
    place.server.put("models", "o/base", &commit('a'), base.into());
    let mut config: Value = serde_json::from_slice(&golden("patterns/adapter_config.json")).unwrap();
    config["base_model_name_or_path"] = json!("o/base");
    let (config, weights) = (config.to_string(), golden("patterns/adapter_model.safetensors"));
    let all = [("adapter_config.json", config.as_bytes()), ("adapter_model.safetensors", &weights)];
    place.server.put("models", "o/adapter", &commit('b'), files(&all));
    fs::create_dir(place.dir.path("saved")).unwrap();
    all.iter().for_each(|(name, content)| fs::write(place.dir.path("saved").join(name), content).unwrap());
    for from in ["o/adapter", "saved"] {
        let mut command = command(&place, "--max-new-tokens 2 --nproc-per-node 1 --temperature 0", &[]);
        command.args(["--pretrain", from, "--generate", "3 5"]);
        let ended = Run(command.spawn().unwrap()).end();
        assert!(ended.status.success(), "{from}: {}", ended.stderr);
        assert!(!ended.stdout.trim().is_empty());
    }
    // An adapter that is trained here names it so, for any machine.
    fs::write(place.dir.path("t.jsonl"), "{\"input_ids\": [1, 2, 3]}\n".repeat(8)).unwrap();
    let tune =
        "--pretrain o/base --dataset t.jsonl --lora-rank 2 --max-steps 1 --no-eval --no-sample --nproc-per-node 1";
    let (code, text) = run(&place, &format!("{tune} --save-adapter tuned"), &[]);
    assert_eq!(code, 0, "{text}");
    let config: Value =
        serde_json::from_slice(&fs::read(place.dir.path("tuned/adapter_config.json")).unwrap()).unwrap();
    assert_eq!([&config["base_model_name_or_path"], &config["revision"]], [&json!("o/base"), &json!(commit('a'))]);
    let (code, text) = run(&place, "--lora-merge tuned --save-hf of-tuned", &[]);
    assert!(code == 0 && text.contains("merge  4 adapters"), "{text}");
    // A merge takes both names.
    let (code, text) = run(&place, "--pretrain o/base --lora-merge o/adapter --save-hf merged", &[]);
    assert!(code == 0 && text.contains("merge  8 adapters"), "{text}");
    // Or finds the base by the adapter's.
    for (from, to) in [("o/adapter", "found"), ("saved", "again")] {
        let (code, text) = run(&place, &format!("--lora-merge {from} --save-hf {to}"), &[]);
        assert!(code == 0 && text.contains("merge  8 adapters"), "{text}");
        let merged = |dir: &str| fs::read(place.dir.path(dir).join("model.safetensors")).unwrap();
        assert_eq!(merged(to), merged("merged"));
    }
}

#[test]
fn one_process_of_a_host_downloads_and_one_reports_a_failure() {
    let place = place_of_the_seeds();
    let start = |args: &str| {
        let agent = Agent::new();
        let ranks = [0, 1].map(|rank| {
            let mut command = command(&place, args, &[]);
            launched(&mut command, rank, 2, agent.port);
            Run(command.spawn().unwrap())
        });
        ranks.map(Run::end)
    };
    let args = COMMAND.replace("--nproc-per-node 2", "");
    place.server.seen();
    let ranks = start(&args);
    assert!(ranks.iter().all(|rank| rank.status.success()), "{}{}", ranks[0].stderr, ranks[1].stderr);
    let seen = place.server.seen();
    assert_eq!(seen.iter().filter(|request| request.path.starts_with("/api/")).count(), 2, "{seen:?}");
    let ranks = start(&args.replace("Meta-Llama-3-8B", "None"));
    assert!(ranks.iter().all(|rank| rank.status.code() == Some(2)));
    assert!(ranks[0].stderr.contains("--pretrain meta-llama/None: no such file or directory"), "{}", ranks[0].stderr);
    assert_eq!(ranks[1].stderr, "");
}

#[test]
fn samples_of_names_need_no_weights_and_weights_of_mixtures_stay() {
    let place = place_of_the_seeds();
    let (code, text) = run(&place, &format!("{COMMAND} --print-samples 1"), &[]);
    assert_eq!(code, 0, "{text}");
    assert!(place.server.seen().iter().all(|request| !request.is_get_of("model.safetensors")));
    let mixed = COMMAND.replace("Open-Orca/OpenOrca", "Open-Orca/OpenOrca:train:0.5 own.jsonl:0.5");
    fs::write(place.dir.path("own.jsonl"), ROW.repeat(10)).unwrap();
    let (code, text) = run(&place, &format!("{mixed} --metrics-path m.jsonl"), &[]);
    assert_eq!(code, 0, "{text}");
    let config = &events(&place.dir.path("m.jsonl"), "run")[0]["config"];
    let expected = json!([format!("Open-Orca/OpenOrca@{}:train:0.5", commit('d')), "own.jsonl:0.5"]);
    assert_eq!(config["data"]["dataset"], expected);
    // A shape that the model on the hub does not have.
    let (code, text) = run(&place, &format!("{COMMAND} --num-layers 3"), &[]);
    assert!(code == 2 && text.contains("--num-layers 3"), "{text}");
}
