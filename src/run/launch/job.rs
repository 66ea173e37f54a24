//! The job of a rank that this program starts: planned by the parent, and read by the rank from its standard input, so
//! that nothing is parsed, checked or decided twice. Never decides anything.
use crate::base::{Error, Result};
use crate::run::plan::training::SettledPlan;
use crate::run::settings::Settings;
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Write, stdin};

#[derive(Serialize, Deserialize)]
pub enum RankJob {
    Train(Box<SettledPlan>),
    /// Write a model in another form.
    Convert(Box<Settings>),
    /// Generate text after a prompt, or after those of the file that it names.
    Generate {
        settings: Box<Settings>,
        prompt: String,
        is_file: bool,
    },
}

impl RankJob {
    /// A broken pipe is not an error: the rank died, and reports why itself.
    pub fn send(&self, mut to: impl Write) -> Result<()> {
        let text = serde_json::to_vec(self).map_err(std::io::Error::from);
        match text.and_then(|text| to.write_all(&text)) {
            Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(Error::Run(format!("cannot send a rank its job: {e}"))),
            _ => Ok(()),
        }
    }
    pub fn receive() -> Result<RankJob> {
        serde_json::from_reader(stdin().lock())
            .map_err(|e| Error::Run(format!("cannot read the job from the launching process: {e}")))
    }
}
