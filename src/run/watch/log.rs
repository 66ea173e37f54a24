//! Log lines: on stderr, in color where that is a terminal, and in a file of each rank with time and level. Never ends
//! a run: a line that cannot be written is lost, and the first such line is a warning on stderr.
//!
//! Not the crates `log` or `tracing`: both find their logger in the process or the thread, and there is no global state
//! here.
use super::style;
use crate::base::{Error, Result, open};
use crate::comm::env::RankEnv;
use crate::run::settings::LogLevel;
use crate::run::settings::args::with_flags;
use crate::run::settings::watch::WatchSettings;
use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub struct RunLog {
    level: LogLevel,
    /// That of stderr: ranks other than 0 show warnings only.
    shown: LogLevel,
    /// Rank or launcher, as log files name it.
    name: String,
    /// Names the rank on a stderr that several processes share, where no parent of ours does.
    prefix: String,
    colors: bool,
    file: Option<File>,
    /// A line of the file was lost.
    lost: AtomicBool,
}

impl RunLog {
    /// Opens the log of a rank, or of the process that starts them, which appends to the file of rank 0.
    pub fn open(settings: &WatchSettings, launched: Option<&RankEnv>) -> Result<RunLog> {
        let rank = launched.map(|env| env.rank);
        let level = settings.log_level.unwrap_or(LogLevel::Info);
        let file = settings.log_file_of(rank.unwrap_or(0)).map(|path| {
            let failed = |e| Error::io("write --log-file", &path, e);
            open::append(&path).map_err(failed)
        });
        let others = rank.is_some_and(|rank| rank > 0);
        let log = RunLog {
            level,
            shown: if others { level.min(LogLevel::Warn) } else { level },
            name: rank.map_or("launcher".into(), |rank| format!("rank {rank}")),
            prefix: match launched {
                Some(env) if others && env.parent_pid.is_none() => format!("[rank {}] ", env.rank),
                _ => String::new(),
            },
            colors: style::on_stderr(),
            file: file.transpose()?,
            lost: AtomicBool::new(false),
        };
        if let Some(env) = launched {
            let (host, process) = (&env.host, std::process::id());
            log.note(LogLevel::Info, format_args!("rank {} of {} on {host}, process {process}", env.rank, env.world));
        }
        Ok(log)
    }

    /// Whether stderr shows lines of this level.
    pub fn shows(&self, level: LogLevel) -> bool {
        level <= self.shown
    }
    pub fn warn(&self, text: impl Display) {
        self.say(LogLevel::Warn, text);
    }
    pub fn info(&self, text: impl Display) {
        self.say(LogLevel::Info, text);
    }
    /// Settings read in another tool's spelling, and settings that have no effect: one line each.
    pub fn notes(&self, notes: &[String]) {
        notes.iter().for_each(|note| self.info(note));
    }
    /// Why the work ended early, in the file alone: on stderr it is the program's last word.
    pub fn ended(&self, e: &Error) {
        self.note(if let Error::Signal(_) = e { LogLevel::Info } else { LogLevel::Error }, e);
    }
    pub fn debug(&self, text: impl Display) {
        self.say(LogLevel::Debug, text);
    }
    pub fn say(&self, level: LogLevel, text: impl Display) {
        if self.shows(level) {
            // A closed stderr (`| head`) does not stop the run, so this does not panic as `eprintln!` would.
            let line = format!("{}{}\n", self.prefix, self.drawn(level, &spelled(level, &text)));
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
        self.note(level, text);
    }

    /// The text as stderr shows it: a warning says that it is one.
    fn drawn(&self, level: LogLevel, text: &str) -> String {
        let kind = match level {
            LogLevel::Error => (style::ERROR, "error:"),
            LogLevel::Warn => (style::WARNING, "warning:"),
            _ if self.colors => return text.lines().map(style::fields).collect::<Vec<_>>().join("\n"),
            _ => return text.into(),
        };
        match self.colors {
            true => format!("{} {text}", style::paint(kind.0, kind.1)),
            false => format!("{} {text}", kind.1),
        }
    }

    /// To the file only.
    pub fn note(&self, level: LogLevel, text: impl Display) {
        let Some(mut file) = self.file.as_ref().filter(|_| level <= self.level) else { return };
        let head = format!("{} {:5} {}: ", utc(SystemTime::now()), name(level), self.name);
        let lines: String = spelled(level, &text).lines().map(|line| format!("{head}{line}\n")).collect();
        // One write, so that lines of several processes stay whole.
        if let Err(e) = file.write_all(lines.as_bytes())
            && !self.lost.swap(true, Relaxed)
        {
            let text = self.drawn(LogLevel::Warn, &format!("--log-file cannot be written ({e}): lines are lost"));
            let _ = std::io::stderr().write_all(format!("{}{text}\n", self.prefix).as_bytes());
        }
    }
}

/// Warnings and errors may come from the library, which names fields: the command line names flags.
fn spelled(level: LogLevel, text: &impl Display) -> String {
    let text = text.to_string();
    if level <= LogLevel::Warn { with_flags(&text) } else { text }
}

fn name(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Error => "ERROR",
        LogLevel::Warn => "WARN",
        LogLevel::Info => "INFO",
        LogLevel::Debug => "DEBUG",
    }
}

/// `2026-11-21T12:34:56.789Z`
fn utc(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let (seconds, millis) = (since.as_secs(), since.subsec_millis());
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March have their leap day last: 400 of them are an era of 146,097 days (Hinnant,
    // "chrono-Compatible Low-Level Date Algorithms").
    let days = days + 719_468; // from the 1st of March of the year 0
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = 400 * era + year_of_era + u64::from(month <= 2);
    let (h, m, s) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_calendar_times() {
        let at = |seconds: u64| utc(UNIX_EPOCH + Duration::from_millis(1000 * seconds + 7));
        // By `date -u -d @N +%FT%T`.
        assert_eq!(at(0), "1970-01-01T00:00:00.007Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59.007Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.007Z");
        assert_eq!(at(951_868_800), "2000-03-01T00:00:00.007Z");
        assert_eq!(at(1_735_689_599), "2024-12-31T23:59:59.007Z");
        assert_eq!(at(1_795_262_096), "2026-11-21T11:54:56.007Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.007Z");
    }
}
