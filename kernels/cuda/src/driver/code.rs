//! The kernels' code: which of a build's targets a device runs, and which driver that needs.

use super::info::Version;
use nq_kernels::{Error, Result};
use std::borrow::Cow;

include!(concat!(env!("OUT_DIR"), "/code.rs"));

/// What a target's code is made of: fatbins, or an xz file of them.
#[cfg(feature = "cuda-source")]
type TargetCode = &'static [&'static [u8]];
#[cfg(not(feature = "cuda-source"))]
type TargetCode = &'static [u8];

/// Code by target, e.g. `sm_90a`; `sm_8x` is no target, but what those of 8.x share.
fn code() -> impl Iterator<Item = (&'static str, TargetCode)> {
    CODE.iter().flat_map(|family| family.iter()).copied()
}

/// Most bytes of a target's unpacked code: several times the actual size.
#[cfg(any(not(feature = "cuda-source"), feature = "imitate"))]
const MOST_BYTES: usize = 256 << 20;

/// A target, by the compiler's name: `sm_86` is machine code for compute capability 8.6 and
/// newer 8.x; `sm_90a` for 9.0 alone; `compute_100` is PTX for 10.0 and newer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CodeTarget {
    name: &'static str,
    capability: Version,
    ptx: bool,
    exact: bool,
}

impl CodeTarget {
    fn of(name: &'static str) -> Option<Self> {
        let (kind, arch) = name.split_once('_')?;
        let digits = arch.trim_end_matches('a');
        let number: i32 = digits.parse().ok()?;
        Some(CodeTarget {
            name,
            capability: Version::new(number / 10, number % 10),
            ptx: kind == "compute",
            exact: digits != arch,
        })
    }

    #[cfg(test)]
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    #[cfg(test)]
    pub(crate) fn is_ptx(&self) -> bool {
        self.ptx
    }

    fn runs_on(&self, capability: Version) -> bool {
        if self.exact {
            return self.capability == capability;
        }
        self.capability <= capability && (self.ptx || self.capability.major == capability.major)
    }

    /// CUDA version of the oldest driver that supports it: machine code needs the assembler's major
    /// version, PTX the compiler's version.
    fn driver(&self) -> Version {
        if self.ptx {
            return COMPILER;
        }
        Version::new(ASSEMBLER.major, 0)
    }

    /// The fatbins: its own, and those that all targets of its generation share (`sm_8x`).
    ///
    /// # Errors
    /// [`Error::Cuda`] if the embedded code is damaged.
    pub(crate) fn images(&self) -> Result<Vec<Cow<'static, [u8]>>> {
        let shared = format!("sm_{}x", self.capability.major);
        let mut all = Vec::new();
        for (name, code) in code() {
            if name == self.name || (!self.ptx && name == shared) {
                all.extend(images(code).map_err(|why| Error::Cuda {
                    what: "unpacking the kernels",
                    why: format!("{name}: {why}"),
                })?);
            }
        }
        Ok(all)
    }
}

/// All targets for which this build has code.
pub(crate) fn targets() -> impl Iterator<Item = CodeTarget> {
    code().filter_map(|(name, _)| CodeTarget::of(name))
}

/// The best of `targets` for a device: machine code if there is any, and the newest.
fn best(targets: impl Iterator<Item = CodeTarget>, capability: Version) -> Option<CodeTarget> {
    targets
        .filter(|t| t.runs_on(capability))
        .max_by_key(|t| (!t.ptx, t.capability, t.exact))
}

/// The name of the code that a device of `capability` runs; `None` if there is none.
pub(super) fn name_of_code(capability: Version) -> Option<&'static str> {
    best(targets(), capability).map(|target| target.name)
}

/// The target for a device of `capability`, if its driver, of CUDA version `driver` (e.g. 13000),
/// supports it.
///
/// # Errors
/// The reason why it cannot be used, and what can be done.
pub(super) fn target_for(capability: Version, driver: i32) -> Result<CodeTarget, String> {
    let Some(target) = best(targets(), capability) else {
        let names: Vec<&str> = targets().map(|t| t.name).collect();
        return Err(format!(
            "it has compute capability {capability}, for which this build has no code (it has {}); \
             8.0 or newer is needed",
            names.join(", ")
        ));
    };
    let needed = target.driver();
    if Version::of_cuda(driver) < needed {
        return Err(too_old(driver, needed));
    }
    Ok(target)
}

/// The error for a driver of CUDA version `driver` if `needed` is the oldest supported.
pub(super) fn too_old(driver: i32, needed: Version) -> String {
    format!(
        "the NVIDIA driver is too old: it is for CUDA {}, and this build's kernels need one for \
         {needed} (driver {} or newer)",
        Version::of_cuda(driver),
        release(needed)
    )
}

/// Release number of the oldest driver that this build's machine code needs, e.g. 580.
pub fn driver_needed() -> u32 {
    release(Version::new(ASSEMBLER.major, 0))
}

/// The first Linux driver that supports a CUDA version (CUDA Toolkit Release Notes, table 3).
fn release(cuda: Version) -> u32 {
    match (cuda.major, cuda.minor) {
        (..=12, 0) => 525,
        (12, 1) => 530,
        (12, 2) => 535,
        (12, 3) => 545,
        (12, 4) => 550,
        (12, 5) => 555,
        (12, 6) => 560,
        (12, 7 | 8) => 570,
        (..=12, _) => 575,
        (13, 0) => 580,
        _ => 590,
    }
}

#[cfg(feature = "cuda-source")]
fn images(code: &[&'static [u8]]) -> Result<Vec<Cow<'static, [u8]>>, String> {
    Ok(code.iter().map(|image| Cow::Borrowed(*image)).collect())
}

#[cfg(not(feature = "cuda-source"))]
use unpack as images;

/// The fatbins in an xz file, each a block of its own, so that several threads unpack them.
#[cfg(any(not(feature = "cuda-source"), feature = "imitate"))]
pub(super) fn unpack(packed: &[u8]) -> Result<Vec<Cow<'static, [u8]>>, String> {
    use std::io::{Cursor, Read};
    const MOST_THREADS: usize = 8;
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MOST_THREADS));
    let mut unpacked = Vec::new();
    let reader = lzma_rust2::XzReaderMt::new(Cursor::new(packed.to_vec()), false, threads as u32);
    let mut limited = reader.map_err(|e| e.to_string())?.take(MOST_BYTES as u64);
    limited
        .read_to_end(&mut unpacked)
        .map_err(|e| e.to_string())?;
    split(&unpacked)
}

/// Splits `all` into its fatbins. Each begins with a header: magic, version (u16),
/// bytes of the header (u16), bytes after it (u64).
#[cfg(any(not(feature = "cuda-source"), feature = "imitate"))]
fn split(mut all: &[u8]) -> Result<Vec<Cow<'static, [u8]>>, String> {
    const MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
    let mut images = Vec::new();
    while !all.is_empty() {
        let header = all.get(..16).ok_or("a fatbin's header is cut off")?;
        if header[..4] != MAGIC {
            return Err("what should be a fatbin is none".into());
        }
        let own = u16::from_le_bytes([header[6], header[7]]) as usize;
        let behind = u64::from_le_bytes(header[8..16].try_into().expect("8 bytes"));
        let image = usize::try_from(behind)
            .ok()
            .and_then(|n| all.get(..own.checked_add(n)?))
            .ok_or("a fatbin is cut off")?;
        images.push(Cow::Owned(image.to_vec()));
        all = &all[image.len()..];
    }
    Ok(images)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&'static str], capability: Version) -> Option<&'static str> {
        let targets = names.iter().map(|name| CodeTarget::of(name).unwrap());
        best(targets, capability).map(|t| t.name)
    }

    #[test]
    fn a_device_gets_the_newest_machine_code_that_it_runs() {
        let all = [
            "sm_80",
            "sm_86",
            "sm_90a",
            "sm_100",
            "sm_120",
            "compute_100",
        ];
        for (capability, name) in [
            ((7, 5), None),
            ((8, 0), Some("sm_80")),
            ((8, 7), Some("sm_86")),
            ((8, 9), Some("sm_86")),
            ((9, 0), Some("sm_90a")),
            ((9, 1), None), // code of an `a` target runs on that capability alone
            ((10, 3), Some("sm_100")),
            ((11, 0), Some("compute_100")),
            ((12, 1), Some("sm_120")),
            ((13, 0), Some("compute_100")),
        ] {
            let (major, minor) = capability;
            let found = chosen(&all, Version::new(major, minor));
            assert_eq!(found, name, "{capability:?}");
        }
    }

    #[test]
    fn a_driver_that_is_too_old_is_told_which_is_needed() {
        let why = too_old(12_040, Version::new(13, 0));
        assert!(why.contains("CUDA 12.4"), "{why}");
        assert!(why.contains("driver 580 or newer"), "{why}");
        let target = targets().next().expect("this build has code");
        let old = (target.driver().major - 1) * 1000;
        let why = target_for(target.capability, old).unwrap_err();
        assert!(why.contains("too old"), "{why}");
        let new = (target.driver().major + 1) * 1000;
        assert_eq!(target_for(target.capability, new), Ok(target));
    }

    #[test]
    fn a_device_without_code_is_told_so() {
        let why = target_for(Version::new(7, 5), 99_000).unwrap_err();
        assert!(why.contains("7.5"), "{why}");
    }

    #[cfg(any(not(feature = "cuda-source"), feature = "imitate"))]
    #[test]
    fn damaged_code_is_refused() {
        assert!(split(&[1; 8]).is_err());
        assert!(split(&[0; 16]).is_err());
        let mut cut = 0xba55_ed50_u32.to_le_bytes().to_vec();
        cut.extend([1, 0, 16, 0]);
        cut.extend(u64::MAX.to_le_bytes());
        assert!(split(&cut).is_err());
    }
}
