//! Requests to the hub: redirects, retries, and what a refusal means. The token goes to the endpoint's own address and
//! to no other. Never writes a file.
use super::fault::HubFault;
use super::options::{HubOptions, HubToken};
use super::progress::say;
use crate::base::{Error, Result, quote};
use std::fmt;
use std::io::Read;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};
use ureq::http::{HeaderMap, Method, Request, Uri};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body, BodyReader};

/// Attempts of a request, the first included.
pub(super) const ATTEMPTS: u32 = 5;
/// Longest wait between attempts that the hub does not ask for, and longest that it may ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(8);
const LONGEST_WAIT: u64 = 300;
const REDIRECTS: usize = 10;
const CONNECT: Duration = Duration::from_secs(10);
/// Between two reads.
const READ: Duration = Duration::from_secs(30);
/// Most bytes of a reply that is not a file, and longest time for it.
const MOST: usize = 64 << 20;
const SLOWEST: Duration = Duration::from_secs(300);

/// A server: the token is for one of them.
#[derive(Clone, PartialEq, Eq, Debug)]
struct HubOrigin {
    scheme: String,
    host: String,
    port: u16,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct HubUrl {
    origin: HubOrigin,
    /// Path and query.
    rest: String,
}

impl HubUrl {
    pub fn parse(text: &str) -> Option<HubUrl> {
        let text = text.split('#').next().unwrap_or_default();
        let uri: Uri = text.parse().ok()?;
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let known = match &scheme[..] {
            "https" => 443,
            "http" => 80,
            _ => return None,
        };
        let origin =
            HubOrigin { scheme, host: uri.host()?.to_ascii_lowercase(), port: uri.port_u16().unwrap_or(known) };
        (!origin.host.is_empty())
            .then(|| HubUrl { origin, rest: uri.path_and_query().map_or("/", |p| p.as_str()).into() })
    }
    /// Where `location` leads from here.
    pub fn join(&self, location: &str) -> Option<HubUrl> {
        let here = format!("{}://{}:{}", self.origin.scheme, self.origin.host, self.origin.port);
        let folder =
            self.rest.split('?').next().and_then(|path| path.rsplit_once('/')).map_or("", |(folder, _)| folder);
        HubUrl::parse(&match location {
            _ if location.contains("://") => location.to_string(),
            _ if location.starts_with("//") => format!("{}:{location}", self.origin.scheme),
            _ if location.starts_with('/') => format!("{here}{location}"),
            _ => format!("{here}{folder}/{location}"),
        })
    }
    /// The path, without a query.
    pub fn path(&self) -> &str {
        self.rest.split('?').next().unwrap_or_default()
    }
    /// `self`, with more of the path.
    pub fn with(&self, more: &str) -> HubUrl {
        HubUrl { origin: self.origin.clone(), rest: format!("{}{more}", self.rest.trim_end_matches('/')) }
    }
}

/// Without a name and password, as messages and requests have it.
impl fmt::Display for HubUrl {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let HubOrigin { scheme, host, port } = &self.origin;
        let usual = matches!((&scheme[..], port), ("https", 443) | ("http", 80));
        let port = if usual { String::new() } else { format!(":{port}") };
        write!(f, "{scheme}://{host}{port}{}", self.rest)
    }
}

/// A path or a part of one, as addresses have it.
pub(super) fn encoded(text: &str, slashes: bool) -> String {
    let byte = |b: u8| match b {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(b).to_string(),
        b'/' if slashes => "/".into(),
        _ => format!("%{b:02X}"),
    };
    text.bytes().map(byte).collect()
}

/// The beginning of an answer.
pub(super) struct HubReply {
    pub status: u16,
    pub headers: HeaderMap,
    /// Where it is from, after redirects.
    pub url: HubUrl,
    /// The token was sent.
    known: bool,
    body: Body,
}

impl HubReply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
    pub fn reader(self) -> BodyReader<'static> {
        self.body.into_reader()
    }
    pub fn bytes(self) -> std::result::Result<Vec<u8>, HubFault> {
        let (mut reader, since) = (self.body.into_reader(), Instant::now());
        let (mut bytes, mut piece) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            match reader.read(&mut piece) {
                Ok(0) => return Ok(bytes),
                Ok(n) => bytes.extend_from_slice(&piece[..n]),
                Err(e) => return Err(HubFault::Network(e.to_string())),
            }
            if bytes.len() > MOST {
                return Err(HubFault::Strange(format!("more than {MOST} bytes of a listing")));
            }
            if since.elapsed() > SLOWEST {
                return Err(HubFault::Network(format!("a listing took more than {} s", SLOWEST.as_secs())));
            }
        }
    }

    /// What a status other than success means. `elsewhere`: it is of another server than the hub's.
    fn fault(self, elsewhere: bool) -> HubFault {
        let status = self.status;
        let header = |name: &str| self.header(name).unwrap_or_default().to_string();
        let (code, mut why) = (header("x-error-code"), header("x-error-message"));
        let seconds = |text: &str| text.trim().parse::<u64>().ok();
        let limit = header("ratelimit"); // "api";r=0;t=55
        let reset = limit.split(';').find_map(|part| seconds(part.trim().strip_prefix("t=")?));
        let after = seconds(&header("retry-after")).or(reset);
        if why.is_empty() {
            let mut text = Vec::new();
            let _ = self.body.into_reader().take(4096).read_to_end(&mut text); // a reason is welcome, not needed
            let reply: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
            why = reply["error"].as_str().unwrap_or_default().into();
        }
        let says = why.to_lowercase();
        let invalid =
            ["credentials", "token", "password"].iter().any(|word| says.contains(word)) && says.contains("invalid");
        match (status, &code[..]) {
            // The signed address may have run out: the next attempt begins at the hub, which makes a new one.
            (403 | 404 | 410, "") if elsewhere && !self.url.path().contains("/api/") => {
                HubFault::Elsewhere(status, self.url.origin.host)
            }
            (_, "GatedRepo") => HubFault::Gated,
            (_, "RevisionNotFound") => HubFault::Revision,
            (_, "EntryNotFound") => HubFault::File,
            (_, "RepoNotFound") => HubFault::Missing,
            _ if says.contains("access to this resource is disabled") => HubFault::Disabled,
            (401 | 403, _) if invalid && self.known => HubFault::BadToken,
            (401, _) => HubFault::Missing,
            (403, _) => HubFault::Denied(why),
            (404, _) if says.contains("revision") => HubFault::Revision,
            (404, _) if says.contains("entry") => HubFault::File,
            (404, _) => HubFault::Absent,
            (429, _) => HubFault::Busy(after),
            (408 | 500..=599, _) => HubFault::Server(status),
            _ => HubFault::Strange(format!("status {status} {why}")),
        }
    }
}

pub(super) struct HubClient {
    agent: Agent,
    pub endpoint: HubUrl,
    pub token: Option<HubToken>,
    pub pause: Duration,
    pub range: u64,
    pub quiet: bool,
}

impl HubClient {
    pub fn new(options: &HubOptions) -> Result<HubClient> {
        let endpoint = HubUrl::parse(options.endpoint.trim_end_matches('/')).ok_or_else(|| {
            Error::input(format!(
                "HF_ENDPOINT={}: is not an address such as {}",
                quote(&options.endpoint),
                HubOptions::ENDPOINT
            ))
        })?;
        if options.token.as_ref().is_some_and(|token| !token.is_plain()) {
            return Err(Error::input(
                "the token of the hub has characters that no token has (HF_TOKEN, or the token file): copy it again",
            ));
        }
        // The system's certificates, or those of SSL_CERT_FILE, since a company's proxy may have its own; the bundled
        // ones where there are none, as in small containers.
        let found = rustls_native_certs::load_native_certs().certs;
        let roots = match found.is_empty() {
            true => RootCerts::WebPki,
            false => {
                let own = found.iter().map(|cert| Certificate::from_der(cert).to_owned());
                RootCerts::Specific(Arc::new(own.collect()))
            }
        };
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(READ))
            .timeout_per_read(Some(READ))
            .user_agent(concat!("flatshard/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity") // sizes are those of the content
            .tls_config(TlsConfig::builder().root_certs(roots).build());
        // A proxy cannot know what this machine calls itself.
        if ["localhost", "127.0.0.1", "[::1]"].contains(&endpoint.origin.host.as_str()) {
            config = config.proxy(None);
        }
        let config = config.build();
        let HubOptions { pause, range, quiet, .. } = *options;
        Ok(HubClient { agent: config.new_agent(), endpoint, token: options.token.clone(), pause, range, quiet })
    }

    /// A reply with success. `range`: these bytes only, if the server can.
    pub fn get(&self, url: &HubUrl, range: Option<(u64, u64)>) -> std::result::Result<HubReply, HubFault> {
        self.ask(&Method::GET, url, range)
    }
    /// A reply with success, or a redirect to another server, whose headers describe the file.
    pub fn head(&self, url: &HubUrl) -> std::result::Result<HubReply, HubFault> {
        self.ask(&Method::HEAD, url, None)
    }

    fn ask(&self, method: &Method, url: &HubUrl, range: Option<(u64, u64)>) -> std::result::Result<HubReply, HubFault> {
        let mut attempt = 1;
        loop {
            let fault = match self.follow(method, url.clone(), range) {
                Ok(reply) if reply.status < 400 => return Ok(reply),
                Ok(reply) => {
                    let elsewhere = self.is_elsewhere(&reply.url);
                    reply.fault(elsewhere)
                }
                Err(fault) => fault,
            };
            if !fault.is_passing() || attempt == ATTEMPTS {
                return Err(fault);
            }
            let wait = match fault {
                HubFault::Busy(Some(seconds)) if seconds > LONGEST_WAIT => return Err(fault),
                HubFault::Busy(Some(seconds)) => Duration::from_secs(seconds),
                _ => self.pause(attempt),
            };
            if wait > LONGEST_PAUSE {
                say(self.quiet, format_args!("the hub asks to wait for {} s", wait.as_secs()));
            }
            sleep(wait);
            attempt += 1;
        }
    }
    /// The wait after failures in a row.
    pub fn pause(&self, failures: u32) -> Duration {
        (self.pause * 2u32.pow(failures.saturating_sub(1).min(8))).min(LONGEST_PAUSE)
    }

    /// Another server than the hub's, which may send its own visitors from http to https.
    fn is_elsewhere(&self, url: &HubUrl) -> bool {
        let (here, there) = (&self.endpoint.origin, &url.origin);
        there.host != here.host || there.scheme == here.scheme && there.port != here.port
    }

    fn follow(
        &self,
        method: &Method,
        mut url: HubUrl,
        range: Option<(u64, u64)>,
    ) -> std::result::Result<HubReply, HubFault> {
        let mut known = true;
        for _ in 0..=REDIRECTS {
            // Once elsewhere, the token stays away: whoever sends back here may have chosen the address.
            known = known && url.origin == self.endpoint.origin;
            let reply = self.once(method, &url, range, known)?;
            let location = match reply.status {
                301 | 302 | 303 | 307 | 308 => reply.header("location"),
                _ => return Ok(reply),
            };
            let next = location.and_then(|location| url.join(location));
            let next = next.ok_or_else(|| HubFault::Strange("a redirect without an address".into()))?;
            let elsewhere = next.origin != self.endpoint.origin;
            if elsewhere && *method == Method::HEAD && reply.header("x-linked-etag").is_some() {
                return Ok(reply);
            }
            url = next;
        }
        Err(HubFault::Strange(format!("more than {REDIRECTS} redirects")))
    }

    fn once(
        &self,
        method: &Method,
        url: &HubUrl,
        range: Option<(u64, u64)>,
        known: bool,
    ) -> std::result::Result<HubReply, HubFault> {
        let mut request = Request::builder().method(method).uri(url.to_string());
        if let Some((start, end)) = range {
            request = request.header("range", format!("bytes={start}-{}", end.saturating_sub(1)));
        }
        if let Some(token) = self.token.as_ref().filter(|_| known) {
            request = request.header("authorization", format!("Bearer {}", token.reveal()));
        }
        let request = request.body(()).map_err(|_| HubFault::Strange("an address that is none".into()))?;
        let reply = self.agent.run(request).map_err(|e| of_transport(e, url))?;
        let (parts, body) = reply.into_parts();
        Ok(HubReply {
            status: parts.status.as_u16(),
            headers: parts.headers,
            url: url.clone(),
            known: known && self.token.is_some(),
            body,
        })
    }
}

fn of_transport(e: ureq::Error, url: &HubUrl) -> HubFault {
    let secure = url.origin.scheme == "https";
    let host = || url.origin.host.clone();
    match e {
        ureq::Error::HostNotFound => HubFault::Dns(host()),
        ureq::Error::Io(e) if e.to_string().contains("lookup address") => HubFault::Dns(host()),
        ureq::Error::Timeout(ureq::Timeout::Resolve) => HubFault::Dns(host()),
        ureq::Error::Io(e) if secure && e.kind() == std::io::ErrorKind::InvalidData => HubFault::Tls(e.to_string()),
        ureq::Error::Tls(why) => HubFault::Tls(why.into()),
        ureq::Error::Rustls(e) => HubFault::Tls(e.to_string()),
        ureq::Error::BadUri(_) | ureq::Error::Http(_) => HubFault::Strange("an address that is none".into()),
        ureq::Error::InvalidProxyUrl => HubFault::Network("HTTPS_PROXY is not an address".into()),
        other => HubFault::Network(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_join() {
        let base = HubUrl::parse("https://user:word@Hub.example/a/b?x=1#y").unwrap();
        assert_eq!(base.to_string(), "https://hub.example/a/b?x=1");
        for (location, expected) in [
            ("/c?d", "https://hub.example/c?d"),
            ("c", "https://hub.example/a/c"),
            ("//cdn.example/c", "https://cdn.example/c"),
            ("http://hub.example:8080/c", "http://hub.example:8080/c"),
        ] {
            assert_eq!(base.join(location).unwrap().to_string(), expected);
        }
        assert_eq!(base.join("ftp://x/y"), None);
        assert_eq!(encoded("refs/pr/1 ü", false), "refs%2Fpr%2F1%20%C3%BC");
    }
}
