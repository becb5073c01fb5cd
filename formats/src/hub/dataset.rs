//! Single files of data sets, for texts to evaluate on.

use super::client::Client;
use super::{Hub, RepoInfo, create, partial};
use crate::durable::{check_space, parent, sync_folder, write_bytes};
use crate::error::{Error, HubProblem, Result};
use crate::progress::{Progress, Unit};
use std::fs;
use std::path::PathBuf;

impl Hub {
    /// Returns the file `file` of the data set `repo` (`OWNER/NAME`), main branch: from the cache, or
    /// downloaded into it.
    pub fn fetch_dataset_file(
        &self,
        repo: &str,
        file: &str,
        progress: &dyn Progress,
    ) -> Result<PathBuf> {
        let folder = format!("datasets--{}", repo.replace('/', "--"));
        let root = self.options.cache.join(folder);
        let reference = root.join("refs/main");
        let snapshot = |commit: &str| root.join("snapshots").join(commit);
        if let Ok(commit) = fs::read_to_string(&reference) {
            let cached = snapshot(commit.trim()).join(file);
            if cached.exists() {
                return Ok(cached);
            }
        }
        if self.options.offline {
            return Err(Error::Hub {
                what: repo.into(),
                problem: HubProblem::Offline,
                detail: format!(
                    "{file} is not in the cache {} and the hub must not be asked (--offline or \
                     HF_HUB_OFFLINE)",
                    self.options.cache.display()
                ),
            });
        }
        let address = format!("datasets/{repo}");
        let client = Client::new(&self.options, &address);
        let info: RepoInfo = client.json(&format!("/api/{address}/revision/main"))?;
        if info.sha.is_empty() || !info.sha.chars().all(|c| c.is_ascii_alphanumeric()) {
            let detail = format!("expected a commit, found {:?}", info.sha);
            return Err(client.error(HubProblem::Broken, detail));
        }
        if !info.siblings.iter().any(|s| s.rfilename == file) {
            let detail = format!("it has no file {file}");
            return Err(client.error(HubProblem::NotFound, detail));
        }
        let path = snapshot(&info.sha).join(file);
        create(&parent(&path))?;
        let remote = client.head(&info.sha, file)?;
        let have = fs::metadata(partial(&root, &remote)).map_or(0, |m| m.len());
        check_space(&root, remote.size.saturating_sub(have))?;
        progress.begin(&format!("download {repo}"), remote.size, Unit::Bytes);
        let fetched = self.fetch_file(&client, &root, &info.sha, &remote, progress);
        progress.end();
        fetched?;
        sync_folder(&parent(&path))?;
        create(&parent(&reference))?;
        write_bytes(&reference, info.sha.as_bytes())?;
        Ok(path)
    }
}
