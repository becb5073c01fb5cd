//! The hub's protocol over HTTP: lists of a repository's files, their properties, their bytes.

use super::options::HubOptions;
use crate::error::{Error, HubProblem, Result};
use crate::progress::Progress;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::Duration;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::{Agent, Body};

/// A file of a repository.
#[derive(Clone, Debug)]
pub(super) struct Remote {
    pub(super) name: String,
    /// SHA-256 of large files, a git hash of small ones; names its contents in the cache.
    pub(super) etag: String,
    /// Size in bytes.
    pub(super) size: u64,
}

pub(super) struct Client<'a> {
    options: &'a HubOptions,
    repo: &'a str,
    agent: Agent,
    /// For requests whose redirect is the answer.
    direct: Agent,
}

/// Most redirects within the hub (renamed repositories) that are followed.
const MAX_REDIRECTS: usize = 5;

impl<'a> Client<'a> {
    pub(super) fn new(options: &'a HubOptions, repo: &'a str) -> Self {
        let agent = |redirects: u32| -> Agent {
            Agent::config_builder()
                .http_status_as_error(false)
                .max_redirects(redirects)
                .max_redirects_will_error(false)
                .redirect_auth_headers(RedirectAuthHeaders::SameHost)
                .timeout_resolve(Some(options.connect_timeout))
                .timeout_connect(Some(options.connect_timeout))
                .timeout_recv_response(Some(options.read_timeout))
                .timeout_per_read(Some(options.read_timeout))
                .accept_encoding("identity")
                .user_agent(concat!("nq/", env!("CARGO_PKG_VERSION")))
                .build()
                .into()
        };
        Client {
            options,
            repo,
            agent: agent(10),
            direct: agent(0),
        }
    }

    pub(super) fn error(&self, problem: HubProblem, detail: String) -> Error {
        Error::Hub {
            what: self.repo.into(),
            problem,
            detail,
        }
    }

    fn unreachable(&self, e: &ureq::Error) -> Error {
        self.error(
            HubProblem::Unreachable,
            format!(
                "{}: {e}; check the connection (HF_ENDPOINT, proxies), or use a folder or a \
                 model in the cache with --offline",
                self.options.endpoint
            ),
        )
    }

    fn url(&self, commit: &str, name: &str) -> String {
        format!(
            "{}/{}/resolve/{commit}/{name}",
            self.options.endpoint, self.repo
        )
    }

    fn authorization(&self) -> Option<String> {
        let token = self.options.token.as_ref()?;
        Some(format!("Bearer {token}"))
    }

    /// The JSON at a path of the hub.
    pub(super) fn json<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let mut request = self.agent.get(format!("{}{path}", self.options.endpoint));
        if let Some(token) = self.authorization() {
            request = request.header("authorization", token);
        }
        let mut response = request.call().map_err(|e| self.unreachable(&e))?;
        self.check(&response, path)?;
        let text = response.body_mut().read_to_string();
        let text = text.map_err(|e| self.unreachable(&e))?;
        serde_json::from_str(&text).map_err(|e| {
            let detail = format!("{path}: expected a repository's description, found {e}");
            self.error(HubProblem::Broken, detail)
        })
    }

    /// The properties of a file: redirects to a store are not followed, since the answer before them
    /// has the hash.
    pub(super) fn head(&self, commit: &str, name: &str) -> Result<Remote> {
        let mut url = self.url(commit, name);
        for _ in 0..MAX_REDIRECTS {
            let mut request = self.direct.head(&url);
            if let Some(token) = self.authorization() {
                request = request.header("authorization", token);
            }
            let response = request.call().map_err(|e| self.unreachable(&e))?;
            let headers = response.headers();
            if response.status().is_redirection() && header(headers, "x-linked-etag").is_none() {
                match header(headers, "location") {
                    Some(path) if path.starts_with('/') => {
                        url = format!("{}{path}", self.options.endpoint);
                        continue;
                    }
                    _ => {}
                }
            }
            if !response.status().is_redirection() {
                self.check(&response, name)?;
            }
            let either = |a: &str, b: &str| header(headers, a).or_else(|| header(headers, b));
            let etag = either("x-linked-etag", "etag").map(clean_etag);
            let size = either("x-linked-size", "content-length").and_then(|s| s.parse().ok());
            return match (etag, size) {
                (Some(Some(etag)), Some(size)) => Ok(Remote {
                    name: name.into(),
                    etag,
                    size,
                }),
                (etag, size) => Err(self.error(
                    HubProblem::Broken,
                    format!("{name}: expected an etag and a size, found {etag:?} and {size:?}"),
                )),
            };
        }
        let detail = format!("{name}: more than {MAX_REDIRECTS} redirects");
        Err(self.error(HubProblem::Broken, detail))
    }

    /// Converts an HTTP status to an error that says what to do.
    fn check(&self, response: &Response<Body>, asked: &str) -> Result<()> {
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let reason = header(response.headers(), "x-error-message").unwrap_or_default();
        let site = &self.options.endpoint;
        Err(match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let todo = match self.options.token {
                    None => format!(
                        "the model does not exist, is private or is gated: check its name, \
                         accept its terms at {site}/{} and set HF_TOKEN",
                        self.repo
                    ),
                    Some(_) => format!(
                        "the token gives no access: accept the model's terms at {site}/{}, or \
                         check HF_TOKEN",
                        self.repo
                    ),
                };
                self.error(
                    HubProblem::Denied,
                    format!("{status} for {asked} {reason}; {todo}"),
                )
            }
            StatusCode::NOT_FOUND => self.error(
                HubProblem::NotFound,
                format!("{site} has no {asked} {reason}; check the name"),
            ),
            _ => self.error(
                HubProblem::Broken,
                format!("{site} answered {status} for {asked} {reason}"),
            ),
        })
    }

    /// Downloads `remote` to `partial`, continuing what is already there, and checks it. After
    /// failures of the connection it retries as long as there is progress, and `retries` times
    /// without progress.
    pub(super) fn download(
        &self,
        commit: &str,
        remote: &Remote,
        partial: &Path,
        progress: &dyn Progress,
    ) -> Result<()> {
        let failed = |action| move |e: io::Error| Error::io(partial, action, e);
        let opened = OpenOptions::new().append(true).create(true).open(partial);
        let mut file = opened.map_err(failed("open"))?;
        let length = |f: &File| f.metadata().map(|m| m.len()).map_err(failed("read"));
        if length(&file)? > remote.size {
            file.set_len(0).map_err(failed("truncate"))?;
        }
        progress.advance(length(&file)?);
        let mut failures = 0;
        loop {
            let have = length(&file)?;
            if have == remote.size {
                break;
            }
            match self.download_from(commit, remote, have, &mut file, partial, progress) {
                Ok(()) if length(&file)? == remote.size => break,
                Ok(()) => {} // closed early, without an error
                Err(Attempt::Final(e)) => return Err(e),
                Err(Attempt::Again(e)) if failures == self.options.retries => return Err(e),
                Err(Attempt::Again(_)) => {}
            }
            if length(&file)? > have {
                failures = 0;
                continue;
            }
            if failures == self.options.retries {
                let detail = format!("{}: the server sends nothing", remote.name);
                return Err(self.error(HubProblem::Broken, detail));
            }
            std::thread::sleep(Duration::from_millis(100 << failures.min(6)));
            failures += 1;
        }
        file.sync_all().map_err(failed("sync"))?;
        self.check_hash(remote, partial)
    }

    fn download_from(
        &self,
        commit: &str,
        remote: &Remote,
        have: u64,
        file: &mut File,
        partial: &Path,
        progress: &dyn Progress,
    ) -> Result<(), Attempt> {
        let again = |e: &ureq::Error| Attempt::Again(self.unreachable(e));
        let mut request = self.agent.get(self.url(commit, &remote.name));
        if let Some(token) = self.authorization() {
            request = request.header("authorization", token);
        }
        if have > 0 {
            request = request.header("range", format!("bytes={have}-"));
        }
        let response = request.call().map_err(|e| again(&e))?;
        let status = response.status();
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            let e = self.check(&response, &remote.name);
            return e.map_err(Attempt::Again);
        }
        self.check(&response, &remote.name)
            .map_err(Attempt::Final)?;
        // A server without range support sends the file from its beginning.
        let mut skip = if status == StatusCode::PARTIAL_CONTENT {
            0
        } else {
            have
        };
        let mut body = response.into_body().into_reader();
        let mut left = remote.size - have;
        let mut buffer = vec![0; 1 << 17];
        loop {
            let n = match body.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => n,
                Err(e) => return Err(again(&e.into())),
            };
            let skipped = skip.min(n as u64);
            skip -= skipped;
            let fresh = &buffer[skipped as usize..n];
            if fresh.len() as u64 > left {
                let detail = format!("{}: more than {} bytes", remote.name, remote.size);
                return Err(Attempt::Final(self.error(HubProblem::Broken, detail)));
            }
            file.write_all(fresh)
                .map_err(|e| Attempt::Final(Error::io(partial, "write", e)))?;
            left -= fresh.len() as u64;
            progress.advance(fresh.len() as u64);
        }
    }

    /// Checks a large file, which is named by its SHA-256, against that hash. A file that does not
    /// match is removed, since continuing it could never succeed.
    fn check_hash(&self, remote: &Remote, partial: &Path) -> Result<()> {
        if remote.etag.len() != 64 {
            return Ok(()); // a git hash
        }
        let failed = |e: io::Error| Error::io(partial, "read", e);
        let mut file = File::open(partial).map_err(failed)?;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer).map_err(failed)? {
                0 => break,
                n => hasher.update(&buffer[..n]),
            }
        }
        let found: String = hasher
            .finalize()
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        if found == remote.etag {
            return Ok(());
        }
        std::fs::remove_file(partial).map_err(|e| Error::io(partial, "remove", e))?;
        Err(self.error(
            HubProblem::Broken,
            format!(
                "{}: expected SHA-256 {}, found {found}; the file was removed, try again",
                remote.name, remote.etag
            ),
        ))
    }
}

/// How an attempt failed.
enum Attempt {
    /// Another attempt may succeed.
    Again(Error),
    /// No attempt will succeed.
    Final(Error),
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// An etag without its quotes, if it is safe as a file name.
fn clean_etag(etag: &str) -> Option<String> {
    let etag = etag.trim_start_matches("W/").trim_matches('"');
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let good = !etag.is_empty() && !etag.starts_with('.') && etag.chars().all(plain);
    good.then(|| etag.to_owned())
}
