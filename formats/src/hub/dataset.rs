//! Single files of data sets, for texts to evaluate on.

use super::client::Client;
use super::{Hub, RepoInfo, create, partial};
use crate::durable::{check_space, parent, sync_folder, write_bytes};
use crate::error::{Error, HubProblem, Result};
use crate::files::CONFIG;
use crate::progress::{Progress, Unit};
use std::fs;
use std::path::PathBuf;

/// Where one file of a repository is.
struct FilePlace {
    /// The repository's folder in the cache.
    root: PathBuf,
    /// Its address at the hub, of files and, behind `/api/`, of their list.
    address: String,
    listed: String,
    revision: String,
}

impl Hub {
    /// Returns the file `file` of the data set `repo` (`OWNER/NAME`), main branch: from the cache, or
    /// downloaded into it.
    ///
    /// # Errors
    /// [`Error::Hub`], [`Error::Space`] and [`Error::Io`], as of [`Hub::fetch_model`].
    pub fn fetch_dataset_file(
        &self,
        repo: &str,
        file: &str,
        progress: &dyn Progress,
    ) -> Result<PathBuf> {
        let folder = format!("datasets--{}", repo.replace('/', "--"));
        let address = format!("datasets/{repo}");
        let place = FilePlace {
            root: self.options.cache.join(folder),
            listed: address.clone(),
            address,
            revision: "main".into(),
        };
        self.fetch_one(&place, file, progress)
    }

    /// Returns the `config.json` of the model `id`, without its weights: from the cache, or downloaded into it.
    ///
    /// # Errors
    /// As of [`Hub::fetch_model`]; [`HubProblem::NotFound`] for repositories of GGUF files, which often have none.
    pub fn fetch_config(&self, id: &str, progress: &dyn Progress) -> Result<PathBuf> {
        let id = super::parse(id)?;
        let place = FilePlace {
            root: self.root(&id),
            address: id.repo.clone(),
            listed: format!("models/{}", id.repo),
            revision: id.revision,
        };
        self.fetch_one(&place, CONFIG, progress)
    }

    fn fetch_one(&self, place: &FilePlace, file: &str, progress: &dyn Progress) -> Result<PathBuf> {
        let FilePlace {
            root,
            address,
            listed,
            revision,
        } = place;
        let reference = root.join("refs").join(revision);
        let snapshot = |commit: &str| root.join("snapshots").join(commit);
        // For a revision that is a commit, there is no reference file.
        let commit = fs::read_to_string(&reference).unwrap_or_else(|_| revision.clone());
        let cached = snapshot(commit.trim()).join(file);
        if cached.exists() {
            return Ok(cached);
        }
        if self.options.offline {
            return Err(Error::Hub {
                what: address.clone(),
                problem: HubProblem::Offline,
                detail: format!(
                    "{file} is not in the cache {} and the hub must not be asked (--offline or \
                     HF_HUB_OFFLINE)",
                    self.options.cache.display()
                ),
            });
        }
        let client = Client::new(&self.options, address);
        let revision = revision.replace('/', "%2F");
        let info: RepoInfo = client.json(&format!("/api/{listed}/revision/{revision}"))?;
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
        let have = fs::metadata(partial(root, &remote)).map_or(0, |m| m.len());
        check_space(root, remote.size.saturating_sub(have))?;
        progress.begin(&format!("download {file}"), remote.size, Unit::Bytes);
        let fetched = self.fetch_file(&client, root, &info.sha, &remote, progress);
        progress.end();
        fetched?;
        sync_folder(&parent(&path))?;
        create(&parent(&reference))?;
        write_bytes(&reference, info.sha.as_bytes())?;
        Ok(path)
    }
}
