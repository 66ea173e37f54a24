"""The pages of `experiments` in a browser: no console message, no request to elsewhere, the curves have the runs' points, the table sorts
by keyboard, live updates arrive, nothing is wider than a phone, colors have contrast in both modes. Run by scripts/pages_check.sh:
pages_check.py CHROMIUM RUN_FSDP EXPERIMENTS SCRATCH [SCREENSHOTS]
"""
import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import websocket

FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
         "--disable-sync --hide-scrollbars --remote-debugging-port=0 --remote-allow-origins=*").split()
TINY = ("--dataset synthetic --embed-dim 64 --num-layers 2 --num-heads 2 --max-len 32 --batch-size 4 --lr 0.01 --warmup-steps 2 "
        "--nproc-per-node 2").split()
# Of every text and its nearest opaque background, as the Web Content Accessibility Guidelines define contrast.
CONTRAST = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = color => { const [r, g, b] = rgb(color).slice(0, 3).map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const paper = node => { for (let n = node; n; n = n.parentElement) { const c = getComputedStyle(n).backgroundColor, v = rgb(c);
    if (v.length < 4 || v[3] === 1) return c; } return 'rgb(255,255,255)'; };
  const bad = [];
  for (const node of document.querySelectorAll('main *')) {
    if (![...node.childNodes].some(child => child.nodeType === 3 && child.data.trim()) || !node.getClientRects().length) continue;
    const style = getComputedStyle(node), ink = node instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(ink), light(paper(node))], ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(`${node.tagName}.${node.className.baseVal ?? node.className} ${ratio.toFixed(2)}: ${node.textContent.slice(0, 40)}`);
  }
  return bad;
})()"""


class Browser:
    """One tab, over the DevTools protocol."""

    def __init__(self, program, profile):
        self.process = subprocess.Popen([program, *FLAGS, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.PIPE, text=True)
        while not (found := re.search(r"ws://[^/]+", line := self.process.stderr.readline())):
            assert line, "Chromium ended before it listened"
        with urllib.request.urlopen(found[0].replace("ws", "http", 1) + "/json") as pages:
            [page] = [page for page in json.load(pages) if page["type"] == "page"]
        self.socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=60)
        self.sent, self.told = 0, []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": params}))
        while (message := json.loads(self.socket.recv())).get("id") != self.sent:
            self.told.append(message)
        assert "error" not in message, f"{method}: {message}"
        return message["result"]

    def value(self, script):
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, what, script, seconds=60):
        end = time.monotonic() + seconds
        while not (found := self.value(script)):
            assert time.monotonic() < end, f"not within {seconds} s: {what}"
            time.sleep(0.05)
        return found

    def open(self, url, width=1280):
        self.told.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.call("Page.navigate", url=url)
        self.until("the page is loaded", f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def key(self, name):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode={"Enter": 13}.get(name, 0), **text)

    def mode(self, scheme):
        self.call("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path):
        if path:
            data = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
            path.write_bytes(base64.b64decode(data))

    def quiet(self, origin):
        """No exception, no message of the console, and nothing was asked of anybody else."""
        self.value("new Promise(done => setTimeout(done, 100))")
        for message in self.told:
            method, params = message.get("method"), message.get("params", {})
            assert method not in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"), params
            if method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                assert url.startswith((origin, "data:")), f"asks for {url}"

    def close(self):
        self.socket.close()
        self.process.kill()
        self.process.wait()


def steps(path):
    """{step: loss}: what was done last."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return {e["step"]: e["loss"] for e in events if e["event"] == "step"}


def drawn(run, metric="loss"):
    return f"+document.querySelector('[data-metric={metric}] path[data-run=\"{run}\"]')?.dataset.points"


def fits(browser, what):
    wide = browser.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{what} is {wide} pixels wider than the screen"


def check_contrast(browser, what):
    for scheme in ("light", "dark"):
        browser.mode(scheme)
        bad = browser.value(CONTRAST)
        assert not bad, f"{what}, {scheme}: {bad[:5]}"
    browser.mode("light")


def report(browser, scratch, run_fsdp, experiments, shots):
    """The page of `analyze`."""
    names = ["ddp_fp32", "fsdp_manual", "zero1"]
    set_of_runs = [experiments, "run", "--bin-dir", str(Path(run_fsdp).parent), "--execute", "--output-dir", "cmp", "--steps", "30",
                   "--nproc-per-node", "2", "--only", ",".join(names), "--", "--embed-dim", "64", "--num-layers", "2", "--num-heads", "2",
                   "--num-kv-heads", "2", "--max-len", "64", "--profile-steps", "10:12", "--eval", "--eval-every", "7"]
    odd = "<b>what</b> & so on"
    (scratch / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", odd)))
    set_of_runs += ["--sample-prompts", str(scratch / "prompts.jsonl"), "--max-new-tokens", "8"]
    for command in (set_of_runs, [experiments, "analyze", "--output-dir", "cmp"]):
        ended = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    page = scratch / "cmp/analysis/report.html"
    browser.mode("light")
    browser.open(page.as_uri())
    for name in names:
        losses = steps(scratch / "cmp" / name / "metrics.jsonl")
        assert browser.value(drawn(name)) == len(losses) == 30, browser.value(drawn(name))
    data = "JSON.parse(document.getElementById('data').textContent).runs"
    columns = browser.value(f"{data}[0].columns")
    assert dict(zip(columns["step"], columns["loss"])) == {s: float(f"{x:.8e}") for s, x in steps(scratch / "cmp/ddp_fp32/metrics.jsonl").items()}
    assert browser.value("document.querySelectorAll('#runs tbody tr').length") == 3
    assert browser.value("document.querySelectorAll('#bars figure').length") == 4
    assert browser.value("[...document.querySelectorAll('.thumb img')].filter(image => image.naturalWidth > 100).length") == 3
    # Each prompt of each run, with its first and last text, and the three evaluations between behind a click.
    assert browser.value("document.querySelector('[data-metric=loss]').parentElement.nextElementSibling.id") == "samples"
    assert browser.value("document.querySelectorAll('.sample').length") == 2 * len(names)
    assert browser.value("[...document.querySelectorAll('.sample > p')].map(node => node.textContent)") == ["a", odd] * len(names)
    assert browser.value("document.querySelectorAll('.sample p b').length") == 0, "a prompt is text"
    assert browser.value("[...document.querySelectorAll('.sample')].every(node => node.querySelectorAll(':scope > .texts > div').length === 2)")
    browser.value("document.querySelector('.sample summary').click()")
    assert browser.value("document.querySelectorAll('.sample details[open] .texts > div').length") == 3
    # Sorted by keyboard, up and down.
    order = "[...document.querySelectorAll('#runs tbody tr')].map(row => row.cells[2].textContent.replace(/,/g, ''))"
    for down in (False, True):
        browser.value("document.querySelectorAll('#runs th button')[2].focus()")
        browser.key("Enter")
        speeds = [float(speed) for speed in browser.value(order)]
        assert speeds == sorted(speeds, reverse=down), speeds
    # Log scale, smoothing, another axis, a hidden run, hover by mouse and by keyboard, zoom.
    first = "document.querySelector('[data-metric=loss] path[data-run]').getAttribute('d')"
    before = browser.value(first)
    browser.value("document.querySelector('[data-log=loss]').click()")
    assert browser.value(first) != before
    browser.value("document.querySelector('[data-log=loss]').click()")
    slide = "(() => { const s = document.getElementById('smoothing'); s.value = %s; s.oninput(); })()"
    browser.value(slide % 0.9)
    browser.until("the curve is smoothed", f"{first} !== {json.dumps(before)} && !!document.querySelector('[data-metric=loss] path.raw')")
    browser.value(slide % 0)
    browser.until("the curve is as it was", f"{first} === {json.dumps(before)}")
    browser.value("document.querySelectorAll('#legend button')[1].click()")
    assert browser.value("document.querySelectorAll('[data-metric=loss] path[data-run]').length") == 2
    browser.value("document.querySelectorAll('#legend button')[1].click()")
    box = browser.value("(() => { const b = document.querySelector('[data-metric=loss] svg'); b.scrollIntoView({block: 'center'});"
                        " const r = b.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()")
    mouse = lambda kind, share, **more: browser.call("Input.dispatchMouseEvent", type=kind, x=box[0] + share * box[2], y=box[1] + box[3] / 2, **more)
    mouse("mouseMoved", 0.5)
    tip = browser.value("document.querySelector('[data-metric=loss] .tip').textContent")
    assert re.match(r"step 1\d", tip) and all(name in tip for name in names), tip
    browser.picture(shots and shots / "report-hover.png")
    mouse("mousePressed", 0.5, button="left", clickCount=1)
    mouse("mouseMoved", 0.8, button="left")
    mouse("mouseReleased", 0.8, button="left", clickCount=1)
    assert browser.value("!document.getElementById('unzoom').hidden") and browser.value(first) != before
    browser.value("document.querySelector('[data-metric=loss] svg').focus()")
    browser.key("Escape")
    assert browser.value(first) == before
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert browser.value("document.querySelector('[data-metric=loss] .tip').textContent").startswith("step 2")
    check_contrast(browser, "report")
    browser.picture(shots and shots / "report-1280.png")
    browser.mode("dark")
    browser.picture(shots and shots / "report-dark.png")
    browser.quiet("file:")
    for width in (400, 320):
        browser.open(page.as_uri(), width)
        fits(browser, f"the report at {width}")
    browser.open(page.as_uri(), 400)
    browser.picture(shots and shots / "report-400-dark.png")
    browser.mode("light")
    browser.picture(shots and shots / "report-400.png")
    browser.open(page.as_uri())
    pdf = base64.b64decode(browser.call("Page.printToPDF", printBackground=False)["data"])
    assert len(pdf) > 20_000
    if shots:
        (shots / "report.pdf").write_bytes(pdf)
    print(f"analyze: {len(names)} runs of 30 steps, {page.stat().st_size / 1024:.0f} KiB; printed {len(pdf) / 1024:.0f} KiB")


def live(browser, scratch, run_fsdp, experiments, shots):
    """The page of `watch`, while two runs train and one has not begun."""
    files = [scratch / name for name in ("one.jsonl", "<b>two&.jsonl", "late.jsonl")]
    server = subprocess.Popen([experiments, "watch", *files, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        url = server.stdout.readline().strip()
        browser.open(url)
        browser.until("the page waits for the runs", "document.querySelectorAll('.badge.waiting').length === 3")
        train = lambda path, count: subprocess.Popen(
            [run_fsdp, *TINY, "--max-steps", str(count), "--metrics-path", path], cwd=scratch, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        runs = [train(path, 400) for path in files[:2]]
        browser.until("points arrive", drawn("one"))
        for run in runs:
            assert run.wait(300) == 0
        browser.until("all points have arrived", f"{drawn('one')} === 400")
        name = json.dumps(files[1].stem)
        browser.until("the odd name is text", f"[...document.querySelectorAll('#runs td')].some(cell => cell.textContent.startsWith({name}))")
        assert browser.value("document.querySelectorAll('#runs b').length") == 0
        # Lines that arrive one by one, which a run may not show: it can end before the page first asks. Half of a line shows nothing; its
        # other half does. A resumed run goes back.
        event = lambda step, loss, **more: json.dumps({"event": "step", "step": step, "loss": loss, **more}) + "\n"
        with files[2].open("w") as late:
            late.write('{"event":"run","world_size":1}\n' + event(1, 3.0) + event(2, None) + event(3, 2.5) + event(4, 2.0)[:20])
            late.flush()
            browser.until("whole lines arrive", f"{drawn('late')} === 2")
            late.write(event(4, 2.0)[20:])
            late.flush()
            browser.until("the half line is whole", f"{drawn('late')} === 3")
            late.write('{"event":"run","world_size":1,"resumed_from_step":1}\n' + event(2, 2.9))
            late.flush()
            browser.until("the run goes back", f"{drawn('late')} === 2")
            late.write('{"event":"end","steps":2}\n')
        browser.until("the page says that all ended", "document.getElementById('state').textContent === 'all runs ended'")
        check_contrast(browser, "watch")
        browser.picture(shots and shots / "watch-1280.png")
        browser.open(url, 400)
        browser.until("curves at 400 pixels", f"{drawn('one')} === 400")
        fits(browser, "the live page at 400")
        browser.picture(shots and shots / "watch-400.png")
        browser.quiet(url)
        with urllib.request.urlopen(url) as page:
            size = len(page.read())
    finally:
        server.send_signal(signal.SIGINT)
    assert server.wait(60) == 130, server.returncode
    print(f"watch: 3 runs, {size / 1024:.0f} KiB; updates arrived")


def elsewhere(browser, scratch, experiments):
    """Bound to every address, the page is for those who have the token."""
    server = subprocess.Popen([experiments, "watch", scratch / "one.jsonl", "--port", "0", "--bind", "0.0.0.0"], stdout=subprocess.PIPE, text=True)
    try:
        _, port, token = re.fullmatch(r"http://([^/]+):(\d+)/\?token=(\w{32})", server.stdout.readline().strip()).groups()
        for query in ("", "?token=", f"?token={'0' * 32}"):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/{query}")
                raise AssertionError(f"answered {query!r}")
            except urllib.error.HTTPError as refused:
                assert refused.code == 403
        url = f"http://127.0.0.1:{port}/?token={token}"
        browser.open(url)
        browser.until("the curve is drawn", f"{drawn('one')} === 400")
        browser.until("the page is live", "document.getElementById('state').textContent !== ''")
        browser.quiet(f"http://127.0.0.1:{port}/")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    print("watch --bind: refused without the token, live with it")


def main(chromium, run_fsdp, experiments, scratch, shots=None):
    run_fsdp, experiments, scratch = os.path.abspath(run_fsdp), os.path.abspath(experiments), Path(scratch).resolve()
    shots = Path(shots).resolve() if shots else None
    if shots:
        shots.mkdir(parents=True, exist_ok=True)
    browser = Browser(chromium, scratch / "profile")
    try:
        report(browser, scratch, run_fsdp, experiments, shots)
        live(browser, scratch, run_fsdp, experiments, shots)
        elsewhere(browser, scratch, experiments)
    finally:
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
