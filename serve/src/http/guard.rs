//! Access control: `Host`, `Origin` and keys, checked before a request's body is read.
//!
//! - `Host` is checked on every route. A page of another site whose name was made to point at this
//!   machine (DNS rebinding, CVE-2024-28224) sends its own name, which is not in the list. A plain IP
//!   address cannot be made to point elsewhere.
//! - A page of another origin is refused, whatever it asks for, unless the origin is in the list.
//! - Keys are compared as digests and in constant time (CVE-2025-59425), and are never logged.

use crate::engine::Client;
use crate::error::ApiError;
use hyper::header::{self, HeaderMap};
use hyper::{Method, Uri};
use sha2::{Digest, Sha256};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use subtle::ConstantTimeEq;

/// The rules of access control.
#[derive(Clone, Default)]
pub struct Security {
    /// SHA-256 of the keys; if empty, no key is needed.
    keys: Vec<[u8; 32]>,
    /// Names of this server, besides `localhost` and IP addresses.
    hosts: Vec<String>,
    /// Origins whose pages have access, besides the server's own.
    origins: Vec<Origins>,
}

/// An origin, or all that differ from it in their port (`http://localhost:*`) or in the names before its
/// own (`https://*.example.org`).
#[derive(Clone, Debug, PartialEq, Eq)]
struct Origins {
    scheme: String,
    host: String,
    /// The part behind the host, with its colon; `None`: any.
    port: Option<String>,
    /// True: names of more parts that end with the host, and not the host itself.
    below: bool,
}

impl Origins {
    fn new(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "origin: expected a scheme and a host such as https://example.org, http://localhost:* or \
                 https://*.example.org, found {text}"
            )
        };
        let origin = text.to_ascii_lowercase();
        let (scheme, rest) = origin.split_once("://").ok_or_else(wrong)?;
        let (below, rest) = match rest.strip_prefix("*.") {
            // A name of one part, such as com, is nobody's.
            Some(rest) if !rest.contains('.') => return Err(wrong()),
            Some(rest) => (true, rest),
            None => (false, rest),
        };
        let (host, any_port) = match rest.strip_suffix(":*") {
            Some(host) => (host, true),
            None => (rest, false),
        };
        // What remains is an origin without any wildcard.
        let uri: Option<Uri> = format!("{scheme}://{host}").parse().ok();
        let fits = uri.is_some_and(|u| u.host().is_some_and(|h| !h.is_empty()) && u.path() == "/");
        if !fits
            || host.contains('*')
            || host.ends_with('/')
            || (any_port && !split(host).1.is_empty())
        {
            return Err(wrong());
        }
        let (host, port) = split(host);
        Ok(Origins {
            scheme: scheme.to_owned(),
            host: host.to_owned(),
            port: (!any_port).then(|| port.to_owned()),
            below,
        })
    }

    /// True for an origin in lower case that this admits.
    fn admits(&self, origin: &str) -> bool {
        let Some((scheme, rest)) = origin.split_once("://") else {
            return false;
        };
        let (host, port) = split(rest);
        let named = match self.below {
            false => host == self.host,
            true => host
                .strip_suffix(&self.host)
                .is_some_and(|before| before.len() > 1 && before.ends_with('.')),
        };
        let digits = port.strip_prefix(':').is_none_or(is_port);
        scheme == self.scheme && named && digits && self.port.as_deref().is_none_or(|p| p == port)
    }
}

/// The host of an authority, and its port with the colon.
fn split(authority: &str) -> (&str, &str) {
    let end = authority.rfind(']').map_or(0, |at| at + 1);
    match authority[end..].find(':') {
        Some(at) => authority.split_at(end + at),
        None => (authority, ""),
    }
}

impl fmt::Debug for Security {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Security")
            .field("keys", &self.keys.len())
            .field("hosts", &self.hosts)
            .field("origins", &self.origins)
            .finish()
    }
}

impl Security {
    /// Access rules with these keys, names and origins (`https://example.org`).
    ///
    /// # Errors
    /// A key shorter than 16 bytes or with characters that are invalid in headers; a malformed origin.
    pub fn new(keys: &[String], hosts: &[String], origins: &[String]) -> Result<Self, String> {
        for (i, key) in keys.iter().enumerate() {
            if key.len() < 16 || !key.bytes().all(|b| b.is_ascii_graphic()) {
                return Err(format!(
                    "key {}: expected 16 or more printable ASCII characters without spaces, found {}",
                    i + 1,
                    key.len()
                ));
            }
        }
        let origins: Result<Vec<Origins>, String> =
            origins.iter().map(|o| Origins::new(o)).collect();
        Ok(Security {
            keys: keys
                .iter()
                .map(|k| Sha256::digest(k.as_bytes()).into())
                .collect(),
            hosts: hosts.iter().map(|h| h.to_ascii_lowercase()).collect(),
            origins: origins?,
        })
    }

    /// True if a key is needed.
    pub fn needs_key(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Refuses a `Host` that is not a name of this server.
    ///
    /// # Errors
    /// No `Host`, several, or another name.
    pub(crate) fn check_host(&self, headers: &HeaderMap, uri: &Uri) -> Result<(), ApiError> {
        let mut given = headers.get_all(header::HOST).iter();
        let host = match (given.next(), given.next(), uri.authority()) {
            (Some(host), None, _) => host.to_str().ok(),
            (None, None, Some(authority)) => Some(authority.as_str()),
            _ => None,
        };
        // A target in absolute form has a name too, which counts before that of the header (RFC 9112, 3.2.2).
        let target = uri.authority().map(|a| host_name(a.as_str()));
        let target = target.is_none_or(|name| name.is_some_and(|name| self.is_own(&name)));
        let name = host.and_then(host_name);
        match name {
            Some(name) if target && self.is_own(&name) => Ok(()),
            _ => Err(ApiError::denied(
                403,
                "Host: this is not a name of this server; --allow-host adds one",
                "host_not_allowed",
            )),
        }
    }

    fn is_own(&self, name: &str) -> bool {
        name == "localhost"
            || name.parse::<IpAddr>().is_ok()
            || self.hosts.iter().any(|h| h == name)
    }

    /// The origin to allow to read the answer, for a request from another origin's page.
    ///
    /// # Errors
    /// A page of an origin without access.
    pub(crate) fn check_origin(
        &self,
        headers: &HeaderMap,
        method: &Method,
    ) -> Result<Option<String>, ApiError> {
        let refuse = || {
            Err(ApiError::denied(
                403,
                "Origin: pages of other sites may not use this server; --allow-origin admits one",
                "origin_not_allowed",
            ))
        };
        let mut origins = headers.get_all(header::ORIGIN).iter();
        let origin = match (origins.next(), origins.next()) {
            (None, _) => None,
            (Some(origin), None) => Some(origin.to_str().unwrap_or("null").to_ascii_lowercase()),
            _ => return refuse(),
        };
        let Some(origin) = origin else {
            // Browsers that send no origin still say what kind of site a request comes from.
            let site = headers.get("sec-fetch-site").and_then(|v| v.to_str().ok());
            let reads = *method == Method::GET || *method == Method::HEAD;
            return match site {
                None | Some("same-origin" | "none") => Ok(None),
                Some(_) if reads && !is_fetch(headers) => Ok(None),
                Some(_) => refuse(),
            };
        };
        let host = headers.get(header::HOST).and_then(|h| h.to_str().ok());
        let own = origin.split_once("://").zip(host);
        if own.is_some_and(|((_, authority), host)| authority == host.to_ascii_lowercase()) {
            return Ok(None);
        }
        if self.origins.iter().any(|o| o.admits(&origin)) {
            Ok(Some(origin))
        } else {
            refuse()
        }
    }

    /// Identifies the client by its key or, if none is needed, by its address. Clients with the same key
    /// share common beginnings of their prompts.
    ///
    /// # Errors
    /// A missing or wrong key.
    pub fn client(&self, headers: &HeaderMap, peer: IpAddr) -> Result<Client, ApiError> {
        if self.keys.is_empty() {
            let mut hasher = DefaultHasher::new();
            peer.hash(&mut hasher);
            return Ok(Client {
                id: hasher.finish(),
                salt: 0,
            });
        }
        let bearer = headers
            .get(header::AUTHORIZATION)
            .and_then(|v| v.to_str().ok());
        let bearer = bearer.and_then(|v| match v.split_at_checked(7) {
            Some((scheme, key)) if scheme.eq_ignore_ascii_case("bearer ") => Some(key.trim()),
            _ => None,
        });
        let key = bearer.or_else(|| headers.get("x-api-key").and_then(|v| v.to_str().ok()));
        let digest: [u8; 32] = Sha256::digest(key.unwrap_or_default().as_bytes()).into();
        // Compares with all keys, so that the time reveals nothing.
        let mut found = false;
        for known in &self.keys {
            found |= bool::from(known.ct_eq(&digest));
        }
        // The same after a restart, and wherever the key is in the list: pages on disk
        // depend on it.
        let name = u64::from_le_bytes(std::array::from_fn(|i| digest[i]));
        match (key, found) {
            (Some(_), true) => Ok(Client {
                id: name,
                salt: name,
            }),
            (given, _) => Err(ApiError::denied(
                401,
                match given {
                    None => "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                    Some(_) => "this key is not known",
                },
                "invalid_api_key",
            )),
        }
    }
}

/// True for a request by a script, not by a person who follows a link.
fn is_fetch(headers: &HeaderMap) -> bool {
    let mode = headers.get("sec-fetch-mode").and_then(|v| v.to_str().ok());
    mode != Some("navigate")
}

/// The name in `Host`, without the port, in lower case.
fn host_name(host: &str) -> Option<String> {
    let name = match host.strip_prefix('[') {
        Some(rest) => {
            let (name, port) = rest.split_once(']')?;
            let fits = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
            fits.then_some(name)?
        }
        None => match host.split_once(':') {
            Some((name, port)) => is_port(port).then_some(name)?,
            None => host,
        },
    };
    (!name.is_empty()).then(|| name.to_ascii_lowercase())
}

fn is_port(port: &str) -> bool {
    port.parse::<u16>().is_ok() && port.bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;

    const KEY: &str = "0123456789abcdef";

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(*name, HeaderValue::from_str(value).unwrap());
        }
        map
    }

    #[test]
    fn only_its_own_names_are_hosts() {
        let security = Security::new(&[], &["Box.lan".into()], &[]).unwrap();
        let check = |host| security.check_host(&headers(&[("host", host)]), &Uri::from_static("/"));
        for host in [
            "localhost",
            "localhost:8080",
            "127.0.0.1:1",
            "[::1]:8080",
            "192.168.0.7",
            "box.LAN:80",
        ] {
            assert!(check(host).is_ok(), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "localhost:x",
            "localhost:80:80",
            "[::1",
            "evil.example:8080",
            "localhost@evil",
            "1.2.3.4:+5",
        ] {
            assert_eq!(check(host).unwrap_err().status, 403, "{host}");
        }
        let two = headers(&[("host", "localhost"), ("host", "evil.example")]);
        assert!(security.check_host(&two, &Uri::from_static("/")).is_err());
        assert!(
            security
                .check_host(&headers(&[]), &Uri::from_static("/"))
                .is_err()
        );
    }

    #[test]
    fn pages_of_other_origins_are_refused() {
        let security = Security::new(&[], &[], &["https://app.example".into()]).unwrap();
        let check = |pairs: &[(&'static str, &str)], method: Method| {
            security
                .check_origin(&headers(pairs), &method)
                .map_err(|e| e.status)
        };
        let host = ("host", "localhost:8080");
        let post = Method::POST;
        assert_eq!(check(&[host], post.clone()), Ok(None));
        assert_eq!(
            check(&[host, ("origin", "http://localhost:8080")], post.clone()),
            Ok(None)
        );
        let app = Some("https://app.example".into());
        assert_eq!(
            check(&[host, ("origin", "https://app.example")], post.clone()),
            Ok(app)
        );
        for origin in [
            "http://evil.example",
            "null",
            "http://localhost:81",
            "https://app.example.evil",
        ] {
            assert_eq!(
                check(&[host, ("origin", origin)], post.clone()),
                Err(403),
                "{origin}"
            );
            assert_eq!(
                check(&[host, ("origin", origin)], Method::GET),
                Err(403),
                "{origin}"
            );
        }
        assert_eq!(
            check(&[host, ("sec-fetch-site", "cross-site")], post),
            Err(403)
        );
        let link = [
            host,
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
        ];
        assert_eq!(check(&link, Method::GET), Ok(None));
        let script = [
            host,
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "no-cors"),
        ];
        assert_eq!(check(&script, Method::GET), Err(403));
    }

    #[test]
    fn wildcards_of_origins_match_or_are_refused() {
        for (pattern, admitted, others) in [
            (
                "http://localhost:*",
                vec![
                    "http://localhost",
                    "http://localhost:1",
                    "http://localhost:65535",
                ],
                vec![
                    "https://localhost:1",
                    "http://localhost.evil:1",
                    "http://localhost:1.evil",
                    "http://x:1",
                ],
            ),
            (
                "https://*.example.com",
                vec!["https://a.example.com", "https://a.b.example.com"],
                vec![
                    "https://example.com",
                    "https://.example.com",
                    "https://aexample.com",
                    "https://a.example.com:81",
                    "https://a.example.com.evil",
                    "http://a.example.com",
                ],
            ),
            (
                "http://[::1]:*",
                vec!["http://[::1]:81"],
                vec!["http://[::2]:81"],
            ),
            (
                "tauri://localhost",
                vec!["tauri://localhost"],
                vec!["http://localhost"],
            ),
            (
                "App://obsidian.md",
                vec!["app://obsidian.md"],
                vec!["app://obsidian.me"],
            ),
        ] {
            let origins = Origins::new(pattern).unwrap();
            admitted
                .iter()
                .for_each(|o| assert!(origins.admits(o), "{pattern} {o}"));
            others
                .iter()
                .for_each(|o| assert!(!origins.admits(o), "{pattern} {o}"));
        }
        for wrong in [
            "*",
            "https://*",
            "https://*.com",
            "*://a.example",
            "https://a.*.example",
            "https://*a.example",
            "http://a.example:8*",
            "http://a.example:80:*",
            "https://a.example/*",
            "https://a.example/",
            "a.example",
        ] {
            assert!(Security::new(&[], &[], &[wrong.into()]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn keys_are_needed_where_there_are_any() {
        let peer = IpAddr::from([127, 0, 0, 1]);
        let open = Security::default();
        assert_eq!(open.client(&headers(&[]), peer).unwrap().salt, 0);
        let other = "fedcba9876543210".to_owned();
        let security = Security::new(&[KEY.into(), other.clone()], &[], &[]).unwrap();
        let client = |pairs: &[(&'static str, &str)]| security.client(&headers(pairs), peer);
        let first = client(&[("authorization", &format!("Bearer {KEY}"))]).unwrap();
        assert_eq!(client(&[("x-api-key", KEY)]).unwrap(), first);
        let second = client(&[("authorization", &format!("bearer {other}"))]).unwrap();
        assert!(first.salt != second.salt && first.id != second.id);
        let basic = format!("Basic {KEY}");
        for pairs in [
            vec![],
            vec![("authorization", "Bearer ")],
            vec![("authorization", "Bearer 0123456789abcdee")],
            vec![("authorization", basic.as_str())],
            vec![("x-api-key", "0123456789abcde")],
        ] {
            let e = client(&pairs).unwrap_err();
            assert_eq!((e.status, e.code), (401, Some("invalid_api_key")));
            assert!(!e.to_string().contains("0123"), "{e}");
        }
        assert!(!format!("{security:?}").contains("0123"));
        assert!(Security::new(&["short".into()], &[], &[]).is_err());
        assert!(Security::new(&[], &[], &["example.org".into()]).is_err());
        assert!(Security::new(&[], &[], &["*".into()]).is_err());
    }
}
