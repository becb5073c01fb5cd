//! Address of the hub and settings of requests.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// Address of the hub and settings of requests.
#[derive(Clone, Debug)]
pub struct HubOptions {
    /// Base address, without a trailing slash.
    pub endpoint: String,
    /// The cache folder, which holds `models--OWNER--NAME`.
    pub cache: PathBuf,
    /// Access token for gated and private models.
    pub token: Option<String>,
    /// Uses only the cache.
    pub offline: bool,
    /// Longest wait for name resolution, and for a connection.
    pub connect_timeout: Duration,
    /// Longest silence of a server before a request is retried.
    pub read_timeout: Duration,
    /// Number of retries of a download that makes no progress.
    pub retries: u32,
}

impl HubOptions {
    /// Options from the environment: `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`,
    /// `HF_TOKEN` (or a file with it, `HF_TOKEN_PATH`), `HF_HUB_OFFLINE`.
    pub fn from_env() -> Self {
        Self::from_vars(&|name| std::env::var(name).ok())
    }

    /// Like [`HubOptions::from_env`], with variables from `var`; an empty one counts as unset.
    pub fn from_vars(var: &dyn Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| var(name).filter(|v| !v.trim().is_empty());
        let path = |name: &str| get(name).map(PathBuf::from);
        let home = path("HF_HOME").unwrap_or_else(|| {
            let cache = path("XDG_CACHE_HOME")
                .or_else(|| path("HOME").map(|h| h.join(".cache")))
                .unwrap_or_else(std::env::temp_dir);
            cache.join("huggingface")
        });
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let token = get("HF_TOKEN").or_else(|| fs::read_to_string(token_file).ok());
        let offline = get("HF_HUB_OFFLINE").is_some_and(|v| {
            matches!(
                v.trim().to_lowercase().as_str(),
                "1" | "on" | "yes" | "true"
            )
        });
        let endpoint = get("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        HubOptions {
            endpoint: endpoint.trim().trim_end_matches('/').into(),
            cache: path("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub")),
            token: token.map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()),
            offline,
            connect_timeout: Duration::from_secs(5),
            read_timeout: Duration::from_secs(30),
            retries: 5,
        }
    }
}
