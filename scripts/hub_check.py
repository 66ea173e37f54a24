#!/usr/bin/env python3
"""huggingface_hub and run_fsdp in one cache: each finds what the other has downloaded, also while both download. For scripts/hub_check.sh.

    hub_check.py RUN_FSDP

A hub on loopback serves a model of run_fsdp's own and a data set.
"""
import hashlib
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

RUN = os.path.abspath(sys.argv[1])
PLACE = tempfile.mkdtemp(prefix="hub_check")
COMMITS = {"models": "a" * 40, "datasets": "d" * 40}
REPOS = {"models": "owner/model", "datasets": "owner/data"}
FILES = {"models": {}, "datasets": {}}
SEEN = []
DELAY = [0.0]  # seconds before each megabyte


def large(path):
    return path.endswith((".safetensors", ".parquet"))


def git_hash(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def etag(path, content):
    return hashlib.sha256(content).hexdigest() if large(path) else git_hash(content)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            for at in range(0, len(body), 1 << 20):
                time.sleep(DELAY[0])
                self.wfile.write(body[at : at + (1 << 20)])

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        SEEN.append((self.command, self.path))
        path = urllib.parse.unquote(self.path.split("?")[0])
        for kind, repo in REPOS.items():
            commit, files = COMMITS[kind], FILES[kind]
            api, site = f"/api/{kind}/{repo}", f"/{'datasets/' if kind == 'datasets' else ''}{repo}/resolve/"
            if path.startswith(api + "/tree/"):
                entry = lambda p, c: {"type": "file", "path": p, "size": len(c), "oid": git_hash(c)} | (
                    {"lfs": {"oid": etag(p, c), "size": len(c), "pointerSize": 130}} if large(p) else {})
                return self.reply(200, json.dumps([entry(p, c) for p, c in files.items()]).encode(), Content_Type="application/json")
            if path == api or path.startswith(api + "/revision/"):
                sibling = lambda p, c: {"rfilename": p, "size": len(c), "blobId": git_hash(c)} | (
                    {"lfs": {"sha256": etag(p, c), "size": len(c), "pointerSize": 130}} if large(p) else {})
                info = {"id": repo, "sha": commit, "siblings": [sibling(p, c) for p, c in files.items()], "private": False,
                        "downloads": 0, "likes": 0, "tags": []}
                return self.reply(200, json.dumps(info).encode(), Content_Type="application/json")
            if path.startswith(site):
                revision, _, name = path[len(site) :].partition("/")
                if revision in (commit, "main") and name in files:
                    content = files[name]
                    headers = {"ETag": f'"{etag(name, content)}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
                    if large(name):
                        headers |= {"X_Linked_Etag": f'"{etag(name, content)}"', "X_Linked_Size": str(len(content))}
                    span = self.headers.get("Range", "")
                    if span.startswith("bytes=") and self.command == "GET":
                        start, _, end = span[6:].partition("-")
                        start, end = int(start), int(end or len(content) - 1)
                        headers["Content_Range"] = f"bytes {start}-{end}/{len(content)}"
                        return self.reply(206, content[start : end + 1], **headers)
                    return self.reply(200, content, **headers)
                return self.reply(404, X_Error_Code="EntryNotFound")
        self.reply(404, X_Error_Code="RepoNotFound")


def environment(home, **more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name.lower()}
    return kept | {"HF_ENDPOINT": ADDRESS, "HF_HOME": home, "FLATSHARD_CACHE_DIR": home + "-own", "HF_HUB_DISABLE_XET": "1"} | more


TRAIN = ["--pretrain", "owner/model", "--dataset", "owner/data", "--input_key", "question", "--output_key", "response", "--max-steps",
         "1", "--no-eval", "--no-sample", "--no-measure-peak", "--nproc-per-node", "1"]
SNAPSHOT = """
import sys
from huggingface_hub import snapshot_download
local = sys.argv[1] == "local"
for repo, kind in [("owner/model", "model"), ("owner/data", "dataset")]:
    path = snapshot_download(repo, repo_type=kind, local_files_only=local, ignore_patterns=["*.bin", "test.jsonl", "original/*"])
    print(path)
"""
SCAN = """
from huggingface_hub import scan_cache_dir
info = scan_cache_dir()
assert not info.warnings, info.warnings
print(sorted((repo.repo_id, repo.nb_files) for repo in info.repos))
"""


def fsdp(home, **more):
    done = subprocess.run([RUN, *TRAIN], env=environment(home, **more), cwd=PLACE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def python(home, code, *arguments, **more):
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment(home, **more), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents():
    seen, SEEN[:] = list(SEEN), []
    return [path for command, path in seen if command == "GET" and "/resolve/" in path]


def whole(home):
    """Every blob has the content that its name says, and nothing else is left."""
    for folder, _, names in os.walk(os.path.join(home, "hub")):
        for name in names:
            path = os.path.join(folder, name)
            assert not name.endswith((".incomplete", ".tmp")), path
            if os.path.basename(folder) == "blobs":
                content = open(path, "rb").read()
                assert name in (hashlib.sha256(content).hexdigest(), git_hash(content)), path


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
ADDRESS = f"http://127.0.0.1:{server.server_address[1]}"
threading.Thread(target=server.serve_forever, daemon=True).start()
make = "--dataset synthetic --vocab-size 320 --embed-dim 512 --num-layers 4 --num-heads 2 --max-positions 128 --max-len 16 --max-steps 1 \
--batch-size 1 --nproc-per-node 1 --no-eval --no-sample --no-measure-peak --save-hf model"
done = subprocess.run([RUN, *make.split()], cwd=PLACE, env=environment(PLACE + "/none"), capture_output=True, text=True)
assert done.returncode == 0, done.stderr
for name in ["config.json", "model.safetensors"]:
    FILES["models"][name] = open(os.path.join(PLACE, "model", name), "rb").read()
FILES["models"] |= {"tokenizer_config.json": b"{}", "pytorch_model.bin": b"no", "original/params.json": b"no", "README.md": b"# A model"}
row = b'{"question": "what?", "response": "that"}\n'
FILES["datasets"] |= {"train.jsonl": row * 40, "test.jsonl": row, "README.md": b"# Data"}
weights = len(FILES["models"]["model.safetensors"])
assert weights > 1 << 25, weights  # several connections

home = PLACE + "/ours"
fsdp(home)
ours = contents()
assert not any(".bin" in path or "original" in path or "test" in path for path in ours), ours
FILES["models"].pop("README.md")  # which run_fsdp does not need; the listing in the cache has it
print("scan_cache_dir:", python(home, SCAN).strip())
model = python(home, "from huggingface_hub import hf_hub_download as get; print(get('owner/model', 'model.safetensors'))").strip()
assert open(model, "rb").read() == FILES["models"]["model.safetensors"]
python(home, "from huggingface_hub import hf_hub_download as get; get('owner/data', 'train.jsonl', repo_type='dataset', local_files_only=True)")
assert contents() == [], "huggingface_hub has downloaded what run_fsdp had"
print("huggingface_hub finds what run_fsdp has downloaded")

home = PLACE + "/theirs"
python(home, SNAPSHOT, "online")
contents()
fsdp(home)
assert contents() == [], "run_fsdp has downloaded what huggingface_hub had"
DOWN, ADDRESS = ADDRESS, "http://127.0.0.1:1"
fsdp(home, HF_HUB_OFFLINE="1")
ADDRESS = DOWN
print("run_fsdp finds what huggingface_hub has downloaded, also offline")

DELAY[0] = 0.02
for attempt in range(3):
    home = f"{PLACE}/both{attempt}"
    started = []
    for i in range(2):
        started.append(subprocess.Popen([RUN, *TRAIN], env=environment(home), cwd=PLACE, stderr=subprocess.PIPE, text=True))
        started.append(subprocess.Popen([sys.executable, "-c", SNAPSHOT, "online"], env=environment(home), stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, text=True))
        time.sleep(0.1)
    for process in started:
        text = process.communicate()[1]
        assert process.returncode == 0, text
    whole(home)
    got = [path for path in contents() if path.endswith("model.safetensors")]
    python(home, SNAPSHOT, "local")
    print("both at once: the weights were asked for", len(got), "times")
print("scan_cache_dir:", python(home, SCAN).strip())
subprocess.run(["rm", "-rf", PLACE])
