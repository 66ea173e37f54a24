//! A build without the feature `hub`: names are refused. Never reads the cache.
use super::{HubCommits, HubFiles, HubName, HubOptions, ModelNeed};
use crate::base::{Error, Result};

pub struct NoHub;

impl NoHub {
    pub fn new(_: HubOptions) -> Result<NoHub> {
        Ok(NoHub)
    }
    pub fn model(&mut self, _: &HubName, _: ModelNeed) -> Result<HubFiles> {
        Err(refused())
    }
    pub fn dataset(&mut self, _: &HubName) -> Result<HubFiles> {
        Err(refused())
    }
    pub fn pin(&mut self, _: HubCommits) {}
    pub fn commits(&self) -> HubCommits {
        HubCommits::new()
    }
    pub fn notes(&mut self) -> Vec<String> {
        Vec::new()
    }
}

fn refused() -> Error {
    Error::input(
        "no such file or directory, and this build has no hub: build with the default feature `hub`, or download the \
         files and name their directory",
    )
}
