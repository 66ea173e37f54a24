//! How far a download is: a bar where stderr is a terminal, else a line every ten seconds. Never measures more than
//! bytes and time.
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Display;
use std::io::{IsTerminal, Write, stderr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Between two lines.
const EVERY: Duration = Duration::from_secs(10);

/// A line on stderr.
pub(super) fn say(quiet: bool, text: impl Display) {
    if !quiet {
        let _ = stderr().write_all(format!("{text}\n").as_bytes()); // a closed stderr stops no download
    }
}

pub(super) struct Downloading {
    what: String,
    total: u64,
    done: AtomicU64,
    /// Bytes that an earlier download left.
    found: AtomicU64,
    started: Instant,
    said: Mutex<Instant>,
    bar: Option<ProgressBar>,
    quiet: bool,
}

impl Downloading {
    pub fn new(what: String, files: usize, total: u64, quiet: bool) -> Downloading {
        let plural = if files == 1 { "" } else { "s" };
        say(quiet, format_args!("download {what}: {files} file{plural}, {}", size(total)));
        let bar = (!quiet && stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(total);
            let template = "{bar:20} {bytes}/{total_bytes}  {bytes_per_sec}  eta {eta}";
            bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        let now = Instant::now();
        let (done, found) = (AtomicU64::new(0), AtomicU64::new(0));
        Downloading { what, total, done, found, started: now, said: Mutex::new(now), bar, quiet }
    }

    /// Bytes that need not be downloaded.
    pub fn skip(&self, bytes: u64) {
        self.found.fetch_add(bytes, Relaxed);
        self.add(bytes);
    }
    /// Bytes that have to be downloaded again.
    pub fn lose(&self, bytes: u64) {
        self.done.fetch_sub(bytes, Relaxed);
        self.bar.iter().for_each(|bar| bar.dec(bytes));
    }
    pub fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Relaxed) + bytes;
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
            return;
        }
        let Ok(mut said) = self.said.try_lock() else { return };
        if said.elapsed() >= EVERY {
            *said = Instant::now();
            let (total, rate) = (self.total, self.rate(done));
            let left = (total.saturating_sub(done) as f64 / rate.max(1.0)).round() as u64;
            let rate = size(rate as u64);
            let line = format_args!(
                "download {}: {} of {}, {rate}/s, eta {}m{:02}s",
                self.what,
                size(done),
                size(total),
                left / 60,
                left % 60
            );
            say(self.quiet, line);
        }
    }
    fn rate(&self, done: u64) -> f64 {
        let new = done.saturating_sub(self.found.load(Relaxed));
        new as f64 / self.started.elapsed().as_secs_f64().max(1e-3)
    }
    pub fn finish(&self) {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
        let (seconds, rate) = (self.started.elapsed().as_secs_f64(), self.rate(self.done.load(Relaxed)));
        say(self.quiet, format_args!("download {}: done in {seconds:.1} s, {}/s", self.what, size(rate as u64)));
    }
}

/// 16.1 GB
pub(super) fn size(bytes: u64) -> String {
    let units = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    let unit = units.iter().find(|(_, of)| bytes as f64 >= *of);
    unit.map_or(format!("{bytes} bytes"), |(name, of)| format!("{:.1} {name}", bytes as f64 / of))
}
