//! Files of a repository: what is downloaded, in which pieces, and what a broken transfer or a mirror leaves.
use super::place::{Place, RANGE, model, noise, tree};
use super::server::{HubServer, Reply, Request, commit, etag, files, served, sha256};
use flatshard::hub::{HubName, ModelNeed};
use serde_json::{Value, json};
use std::fs;

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
    let tagged = place.model("o/split:Q8").unwrap();
    assert_eq!(tagged.name.to_string(), format!("o/split@{}/q8/m-00001-of-00002.gguf", commit('b')));
    place.refuses("o/split:Q5_K_M", &["no GGUF file of q5_k_m", "q4/m-00001-of-00002.gguf"]);
    place.refuses("o/m:q4", &["o/m", "x.gguf"]);
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
        let bare = Request { headers: Default::default(), ..request.clone() };
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
        (request.method == "HEAD").then(|| {
            let reply = Reply::status(200).with("ETag", "\"../../evil\"").with("X-Linked-Size", 1);
            reply.with("X-Repo-Commit", commit('a'))
        })
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

/// Mirrors, proxies and caches make up hashes, or leave them out: the listing's are verified.
#[test]
fn hashes_that_a_mirror_makes_up_are_names_of_nothing() {
    let weights = noise(9000);
    for listed in [true, false] {
        for hash in [None, Some(commit('9')), Some("W/\"65a1b2c3-2328\"".into()), Some("d".repeat(64))] {
            let place = Place::new();
            if !listed {
                place.server.without_blobs();
            }
            place.server.put("models", "o/m", &commit('a'), model(&weights));
            let (all, hash) = (model(&weights), hash.clone());
            place.server.trouble(move |request, _| {
                if !listed && request.path.contains("/tree/") {
                    return Some(Reply::status(404));
                }
                let path = request.path.split_once(&format!("/resolve/{}/", commit('a')))?.1;
                let mut reply = served(request, path, &all[path]);
                reply.headers.retain(|(name, _)| name == "Content-Range");
                Some(match &hash {
                    Some(hash) => reply.with("ETag", hash),
                    None => reply,
                })
            });
            let found = place.model("o/m").unwrap().path;
            assert_eq!(fs::read(found.join("config.json")).unwrap(), b"{}", "{listed}");
            assert_eq!(fs::read(found.join("tokenizer.json")).unwrap(), b"{ }", "{listed}");
            assert_eq!(fs::read(found.join("model.safetensors")).unwrap(), weights, "{listed}");
        }
    }
}

/// A listing that says nothing of large storage has the hash of a file's pointer.
#[test]
fn the_hash_of_a_pointer_is_not_that_of_its_file() {
    let (place, weights) = (Place::new(), noise(9000));
    place.server.put("models", "o/m", &commit('a'), model(&weights));
    let size = weights.len();
    place.server.trouble(move |request, _| {
        let large = json!({"rfilename": "model.safetensors", "size": size, "blobId": commit('e')});
        let small = json!({"rfilename": "config.json", "size": 2, "blobId": etag("config.json", b"{}")});
        let info = json!({"id": "o/m", "sha": commit('a'), "siblings": [large, small]});
        request.path.contains("/revision/").then(|| Reply::json(&info))
    });
    let found = place.model("o/m").unwrap().path;
    assert_eq!(fs::read(found.join("model.safetensors")).unwrap(), weights);
}

/// An address that the hub has signed runs out while a file is downloaded.
#[test]
fn an_address_that_has_run_out_is_made_anew() {
    for (status, lasting) in [(403, false), (404, false), (410, false), (403, true)] {
        let (place, elsewhere, weights) = (Place::new(), HubServer::start(), noise(9000));
        place.server.put("models", "o/m", &commit('a'), model(&weights));
        let (content, address) = (weights.clone(), elsewhere.address.clone());
        place.server.trouble(move |request, number| {
            let is = request.path.contains("/resolve/") && request.path.ends_with("model.safetensors");
            let headers = || served(request, "model.safetensors", &content).headers;
            let away = || Reply { headers: headers(), ..Reply::status(302) };
            is.then(|| away().with("Location", format!("{address}/cdn/model.safetensors?signed={number}")))
        });
        let content = weights.clone();
        elsewhere.trouble(move |request, number| {
            Some(match lasting || number == 1 {
                true => Reply::status(status),
                false => served(request, "model.safetensors", &content),
            })
        });
        match lasting {
            true => place.refuses("o/m", &["for model.safetensors of o/m", "refuses it (status 403)", "clock"]),
            false => {
                let found = place.model("o/m").unwrap();
                assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights);
                let seen: Vec<String> = elsewhere.seen().into_iter().map(|request| request.path).collect();
                assert!(seen.len() > 1 && seen[0] != seen[1], "{seen:?}");
            }
        }
    }
}
