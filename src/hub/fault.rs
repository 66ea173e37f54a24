//! What can go wrong with a repository, and what a user can do about it. Never prints, and never shows the token.
use super::name::HubKind;
use super::options::HubToken;
use crate::base::{Error, quote};

/// Why a request has no result.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum HubFault {
    Gated,
    /// No such repository, or a private one.
    Missing,
    /// Not found, and the server does not say what.
    Absent,
    Revision,
    File,
    BadToken,
    Disabled,
    /// Refused, with the server's reason.
    Denied(String),
    /// Too many requests; seconds to wait, where the server says so.
    Busy(Option<u64>),
    /// The server failed.
    Server(u16),
    /// Another server refuses what the hub sends there for: its status and its name.
    Elsewhere(u16, String),
    Dns(String),
    Tls(String),
    /// No connection, or one that broke.
    Network(String),
    /// A reply that a hub does not give.
    Strange(String),
    /// A downloaded file is not what the hub says.
    Hash(String),
    /// The cache.
    Disk(String),
}

impl HubFault {
    /// The hub cannot be reached, whatever it holds.
    pub fn is_of_network(&self) -> bool {
        matches!(
            self,
            HubFault::Dns(_) | HubFault::Network(_) | HubFault::Server(_) | HubFault::Busy(_) | HubFault::Tls(_)
        )
    }
    /// It may be gone with the next attempt.
    pub fn is_passing(&self) -> bool {
        matches!(self, HubFault::Network(_) | HubFault::Server(_) | HubFault::Busy(_) | HubFault::Elsewhere(..))
    }
    pub fn disk(op: &str, path: &std::path::Path, e: std::io::Error) -> HubFault {
        let full = e.kind() == std::io::ErrorKind::StorageFull;
        let remedy = if full { "make room there" } else { "make it writable" };
        HubFault::Disk(format!(
            "cannot {op} {} ({e}): {remedy}, or set HF_HUB_CACHE to another directory",
            path.display()
        ))
    }
}

/// What was asked for, for messages.
#[derive(Clone, Debug)]
pub(super) struct HubAsked<'a> {
    pub kind: HubKind,
    pub repo: &'a str,
    pub revision: &'a str,
    pub file: Option<&'a str>,
    /// Without name and password.
    pub endpoint: &'a str,
    pub token: Option<&'a HubToken>,
}

impl HubAsked<'_> {
    /// The repository's page.
    pub fn page(&self) -> String {
        let folder = if self.kind == HubKind::Dataset { "datasets/" } else { "" };
        format!("{}/{folder}{}", self.endpoint, self.repo)
    }

    pub fn explain(&self, fault: &HubFault) -> Error {
        let HubAsked { kind, repo, revision, endpoint, token, .. } = self;
        let (what, page, file) = (kind.word(), self.page(), quote(self.file.unwrap_or_default()));
        // A path with a mistake in it reads like a name.
        let here = if self.file.is_none() { "no such file or directory, and " } else { "" };
        let text = match (fault, token) {
            (HubFault::Gated, None) => format!(
                "{repo} is gated: ask for access at {page}, then set HF_TOKEN to a token of that account \
                 ({endpoint}/settings/tokens)"
            ),
            (HubFault::Gated, Some(_)) => format!(
                "{repo} is gated, and the account of your token has no access: ask for it at {page}. A fine-grained \
                 token also needs the permission to read gated repositories"
            ),
            (HubFault::Missing | HubFault::Absent, None) => format!(
                "no such file or directory, and not a name of the hub: {endpoint} has no {what} {repo}, or it is \
                 private. Check the name, or set HF_TOKEN to a token that may read it"
            ),
            (HubFault::Missing | HubFault::Absent, Some(_)) => format!(
                "no such file or directory, and not a name of the hub: {endpoint} has no {what} {repo}, or it is \
                 private and your token may not read it. Check the name and the token's account"
            ),
            (HubFault::Revision, _) => {
                format!("{repo} has no revision {revision}: name a branch, a tag or a commit of {page}/tree/main")
            }
            (HubFault::File, _) => {
                format!("{repo} has no file {file} at revision {revision}: see {page}/tree/{revision}")
            }
            (HubFault::BadToken, _) => format!(
                "{endpoint} does not accept the token: make a new one at {endpoint}/settings/tokens and set HF_TOKEN, \
                 or unset it and remove the token file for public repositories"
            ),
            (HubFault::Disabled, _) => {
                format!("{repo} is disabled: {endpoint} gives its files to no one. {page} may say why")
            }
            (HubFault::Denied(why), None) => {
                format!("{endpoint} refuses {repo} without a token{}: set HF_TOKEN", reason(why))
            }
            (HubFault::Denied(why), Some(_)) => {
                format!("{endpoint} refuses {repo}{}: check the permissions of your token", reason(why))
            }
            (HubFault::Busy(after), _) => {
                let wait = after.map_or("later".into(), |seconds| format!("in {seconds} s"));
                let more = if token.is_none() { "; with HF_TOKEN the limit is higher" } else { "" };
                format!("{endpoint} has had too many requests from here (429): try again {wait}{more}")
            }
            (HubFault::Server(status), _) => {
                format!("{endpoint} fails (status {status}): try again later. What is downloaded so far is kept")
            }
            (HubFault::Elsewhere(status, host), _) => format!(
                "{endpoint} sends to {host} for {file} of {repo}, and {host} refuses it (status {status}): check that \
                 this machine's clock is right and that a proxy lets {host} through. What is downloaded so far is kept"
            ),
            (HubFault::Dns(host), _) => format!(
                "{here}the hub cannot be reached: no address is known for {host}. Check the network, HTTPS_PROXY and \
                 HF_ENDPOINT; with HF_HUB_OFFLINE=1 only the cache is used"
            ),
            (HubFault::Tls(why), _) => format!(
                "no secure connection (TLS) to {endpoint}: {}. Behind a proxy that has its own certificate, set \
                 SSL_CERT_FILE to it",
                quote(why)
            ),
            (HubFault::Network(why), _) => format!(
                "{here}the hub cannot be reached at {endpoint}: {}. Check the network, HTTPS_PROXY and HF_ENDPOINT; what is \
                 downloaded so far is kept",
                quote(why)
            ),
            (HubFault::Strange(why), _) => {
                let why = quote(why);
                format!("{endpoint} does not answer as a hub does: {why}. Check HF_ENDPOINT and HTTPS_PROXY")
            }
            (HubFault::Hash(why), _) => format!(
                "{}: nothing of it is kept. Try again; if it stays, a proxy or the server changes files",
                quote(why)
            ),
            (HubFault::Disk(why), _) => why.clone(),
        };
        Error::input(token.map_or(text.clone(), |token| token.hide(&text)))
    }
}

fn reason(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(" ({})", quote(why)) }
}

/// A refusal of a file whose repository is there.
pub(super) fn of_file(fault: HubFault, path: &str) -> HubFault {
    match fault {
        HubFault::Absent => HubFault::File,
        HubFault::Missing => HubFault::Denied(String::new()),
        HubFault::Strange(why) => HubFault::Strange(format!("{path}: {why}")),
        other => other,
    }
}
