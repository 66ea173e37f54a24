//! Names, revisions, splits, tokens and refusals of a hub.
use super::place::{Place, TOKEN, model, noise, tree};
use super::runs::run;
use super::server::{HubServer, Reply, commit, files, served};
use flatshard::base::Result;
use flatshard::data::corpus::Corpus;
use flatshard::hub::{HubFiles, HubName, HubReader, ModelNeed, VIEW_CARD};
use serde_json::json;
use std::fs;

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
        match path.is_file() {
            true => vec![path.file_name().unwrap().to_string_lossy().into_owned()],
            false => tree(&path).into_iter().filter(|name| name != VIEW_CARD).collect(),
        }
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
    place.refuses_data("o/d/b:train+test", &["sums of splits are not read"]);
    place.refuses_data("o/d/c", &["no file or folder c"]);
    let ordered = "---\nconfigs:\n- config_name: a\n  data_files: [z.jsonl, test.jsonl, 'a[[]b].jsonl']\n---\n";
    let all = ["a[b].jsonl", "test.jsonl", "z.jsonl", "a.jsonl"];
    let mut repository: Vec<(&str, &[u8])> = all.iter().map(|name| (*name, name.as_bytes())).collect();
    repository.push(("README.md", ordered.as_bytes()));
    put('4', &repository);
    let read = Corpus::find(&[place.data("o/d").unwrap().path]).unwrap().files;
    let names: Vec<_> = read.iter().map(|file| file.path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["z.jsonl", "test.jsonl", "a[b].jsonl"], "the card's order, and no other splits by name");
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

/// For a plan of its shapes, a model is its config; the tokenizer and the weights stay where they are.
#[test]
fn the_shapes_of_a_model_are_its_config_alone() {
    let place = Place::new();
    place.server.put("models", "o/m", &commit('a'), model(&noise(9000)));
    let found = place.hub().model(&HubName::model("o/m").unwrap(), ModelNeed::Shapes).unwrap();
    assert_eq!(fs::read(found.path.join("config.json")).unwrap(), b"{}");
    assert!(!found.path.join("tokenizer.json").exists() && !found.path.join("model.safetensors").exists());
    let fetched = place.server.seen().iter().filter(|request| request.path.contains("/resolve/")).count();
    assert!(fetched > 0 && place.server.seen().iter().all(|request| !request.is_get_of("tokenizer.json")));
}
