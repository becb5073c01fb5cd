//! A GPU of compute capability 9.0 that runs as one of another would, for tests and for comparing variants: it reports
//! the other's compute capability and shared memory, by which everything else chooses, and runs code compiled for the
//! other's virtual architecture. Its number of multiprocessors, clock, caches and bandwidth stay its own.
//!
//! `NQ_IMITATE=8.6:FOLDER` asks for it; `kernels/prebuilt/build --imitate --out FOLDER` makes the folder. Only builds
//! with the feature `imitate` read the variable.

use super::code::{SOURCES, unpack};
use super::info::GpuInfo;
use super::info::Version;
use super::launch::LaunchShape;
use nq_kernels::{Error, Result};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const VARIABLE: &str = "NQ_IMITATE";

/// What runs the code.
const HOST: Version = Version::new(9, 0);

/// Compute capability, code and most shared memory of a block in bytes of what can be imitated. The code of 12.0
/// is that of 9.0 without what only 9.0 has, as no compiler makes code for 9.0 from a newer virtual architecture.
/// 9.0 itself is there so that code of another compiler can be compared within one build.
const IMITATED: [(Version, &str, usize); 5] = [
    (Version::new(8, 0), "compute_80-sm_90", 163 << 10),
    (Version::new(8, 6), "compute_86-sm_90", 99 << 10),
    (Version::new(8, 9), "compute_86-sm_90", 99 << 10),
    (Version::new(9, 0), "sm_90a", 227 << 10),
    (Version::new(12, 0), "compute_90-sm_90", 99 << 10),
];

/// What the variable asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Imitation {
    capability: Version,
    target: &'static str,
    shared_memory: usize,
    folder: PathBuf,
}

/// What this process imitates.
///
/// # Errors
/// [`Error::Cuda`] if the variable says something else than a compute capability and a folder.
pub(super) fn imitation() -> Result<Option<&'static Imitation>> {
    static ASKED: OnceLock<Result<Option<Imitation>, String>> = OnceLock::new();
    let asked = ASKED.get_or_init(|| match std::env::var(VARIABLE) {
        Ok(text) => Imitation::read(&text).map(Some),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(e) => Err(e.to_string()),
    });
    match asked {
        Ok(asked) => Ok(asked.as_ref()),
        Err(why) => Err(error(format!("{VARIABLE}: {why}"))),
    }
}

fn error(why: String) -> Error {
    Error::Cuda {
        what: "imitating a GPU",
        why,
    }
}

impl Imitation {
    fn read(text: &str) -> Result<Self, String> {
        let row = text.split_once(':').and_then(|(capability, folder)| {
            let (major, minor) = capability.split_once('.')?;
            let capability = Version::new(major.parse().ok()?, minor.parse().ok()?);
            let row = IMITATED.iter().find(|row| row.0 == capability)?;
            (!folder.is_empty()).then_some((row, folder))
        });
        let Some((&(capability, target, shared_memory), folder)) = row else {
            let all = IMITATED.map(|(capability, ..)| capability.to_string());
            return Err(format!(
                "{text:?} is not one of {}, a colon and a folder",
                all.join(", ")
            ));
        };
        Ok(Imitation {
            capability,
            target,
            shared_memory,
            folder: folder.into(),
        })
    }

    /// The compute capability that stands for that of a device, `real`.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the device does not run the code.
    pub(super) fn instead_of(&self, real: Version) -> Result<Version> {
        if real == HOST {
            return Ok(self.capability);
        }
        Err(error(format!(
            "the GPU has compute capability {real}; only those of 9.0 imitate others"
        )))
    }

    /// Changes a device's properties to those of what it imitates. Its name says so, and with it every report.
    pub(super) fn describe(&self, info: &mut GpuInfo) {
        info.name += &format!(", imitates {}", self.capability);
        info.capability = self.capability;
        info.shared_memory = self.shared_memory;
    }

    /// Refuses what the imitated device would: more shared memory than it has, `fixed` bytes of which the kernel takes
    /// by itself, and clusters before compute capability 9.0.
    pub(super) fn allow(&self, name: &str, fixed: usize, shape: LaunchShape) -> Result<()> {
        let bytes = fixed + shape.shared;
        if bytes > self.shared_memory {
            let most = self.shared_memory;
            return Err(error(format!(
                "{name} takes {bytes} bytes of shared memory of {most}"
            )));
        }
        if shape.cluster > 1 && self.capability < HOST {
            return Err(error(format!("{name} runs in clusters")));
        }
        Ok(())
    }

    /// The fatbins, as [`CodeTarget::images`](super::code::Target::images) has them.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the folder has no such code, or it was compiled from other sources.
    pub(super) fn images(&self) -> Result<Vec<Cow<'static, [u8]>>> {
        let images = code(&self.folder, self.target).and_then(|packed| unpack(&packed));
        images.map_err(|why| error(format!("{}: {why}", self.folder.display())))
    }
}

/// The packed code for `target` in `folder`, if it is that of the manifest, which must be of this build's sources.
fn code(folder: &Path, target: &str) -> Result<Vec<u8>, String> {
    let manifest = folder.join("manifest");
    let manifest = std::fs::read_to_string(manifest).map_err(|e| format!("manifest: {e}"))?;
    let sources = manifest.lines().filter_map(|l| l.strip_prefix("source "));
    if !sources.eq(SOURCES.iter().copied()) {
        return Err("its kernels were compiled from other sources than this build's".into());
    }
    let rows = manifest.lines().filter_map(|l| l.strip_prefix("code "));
    let told = rows
        .filter_map(|l| l.split_once(' ')?.1.split_once(' '))
        .find_map(|(hash, name)| (name == target).then_some(hash))
        .ok_or_else(|| format!("its manifest has no {target}"))?;
    let packed = std::fs::read(folder.join(format!("{target}.xz")))
        .map_err(|e| format!("{target}.xz: {e}"))?;
    let hash = Sha256::digest(&packed);
    if hash.iter().map(|b| format!("{b:02x}")).collect::<String>() != told {
        return Err(format!("{target}.xz is not the code of the manifest"));
    }
    Ok(packed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_names_a_capability_and_a_folder() {
        let read = Imitation::read("8.9:/a:b").unwrap();
        assert_eq!(read.folder, Path::new("/a:b"));
        assert_eq!(
            (read.capability, read.target),
            (Version::new(8, 9), "compute_86-sm_90")
        );
        for wrong in ["", "8.6", "8.6:", "86:/a", "7.5:/a", "9.1:/a", "8.x:/a"] {
            let why = Imitation::read(wrong).unwrap_err();
            assert!(why.contains("8.0, 8.6, 8.9, 9.0, 12.0"), "{why}");
        }
    }

    #[test]
    fn a_device_reports_what_it_imitates() {
        let imitation = Imitation::read("12.0:/a").unwrap();
        let mut info = GpuInfo {
            name: "NVIDIA H200".into(),
            ..GpuInfo::default()
        };
        imitation.describe(&mut info);
        assert_eq!(
            info.to_string(),
            "cuda:0 (NVIDIA H200, imitates 12.0, sm_120)"
        );
        assert_eq!(info.shared_memory, 101_376);
        assert_eq!(imitation.instead_of((9, 0)).unwrap(), (12, 0));
        assert!(imitation.instead_of((8, 9)).is_err());
    }

    #[test]
    fn what_the_imitated_device_could_not_run_is_refused() {
        let shape = LaunchShape::new([1, 1, 1], 32).shared(99 << 10);
        let allow = |text: &str, fixed, shape| {
            let imitation = Imitation::read(text).unwrap();
            imitation.allow("gemv", fixed, shape).is_ok()
        };
        assert!(allow("8.6:/a", 0, shape));
        assert!(!allow("8.6:/a", 1, shape));
        assert!(allow("8.0:/a", 1, shape));
        assert!(!allow("8.0:/a", 0, shape.clusters_of(2)));
        assert!(allow("12.0:/a", 0, shape.clusters_of(2)));
    }

    const PACKED: &[u8] = &[
        253, 55, 122, 88, 90, 0, 0, 1, 105, 34, 222, 54, 2, 0, 33, 1, 12, 0, 0, 0, 143, 152, 65,
        156, 224, 0, 15, 0, 13, 93, 0, 40, 59, 70, 171, 95, 32, 61, 231, 147, 73, 158, 230, 0, 0,
        0, 0, 0, 12, 130, 186, 86, 0, 1, 37, 16, 168, 117, 194, 213, 144, 66, 153, 13, 1, 0, 0, 0,
        0, 1, 89, 90,
    ];

    #[test]
    fn only_code_of_these_sources_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let target = "compute_80-sm_90";
        // The header of a fatbin of nothing, as xz packs it.
        let frame = PACKED;
        let hash: String = Sha256::digest(frame)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        std::fs::write(folder.path().join(format!("{target}.xz")), frame).unwrap();
        let write = |sources: &[&str], name: &str, hash: &str| {
            let mut manifest = String::from("compiler 13.0.88\n");
            for source in sources {
                manifest += &format!("source {source}\n");
            }
            manifest += &format!("code 00 {hash} {name}\n");
            std::fs::write(folder.path().join("manifest"), manifest).unwrap();
        };
        let imitation = Imitation::read(&format!("8.0:{}", folder.path().display())).unwrap();
        let refused = |word: &str| {
            let why = imitation.images().unwrap_err().to_string();
            assert!(why.contains(word), "{why}");
        };
        refused("manifest");
        write(SOURCES, target, &hash);
        assert_eq!(imitation.images().unwrap().len(), 1);
        write(&SOURCES[1..], target, &hash);
        refused("other sources");
        write(SOURCES, "compute_86-sm_90", &hash);
        refused("no compute_80-sm_90");
        write(SOURCES, target, "00");
        refused("not the code");
    }
}
