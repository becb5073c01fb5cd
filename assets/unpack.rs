//! Unpacks the demo model's weights, for build scripts. The repository has them packed; the program embeds them and tests
//! read them as they were. `xz -dk` gives the same.

use std::fs::{self, File};
use std::io::{self, BufReader};
use std::path::Path;

/// Unpacks each file of `assets/packed` to `assets/demo`, unless it is there. `assets` is the folder of both.
pub(crate) fn unpack(assets: &Path) -> io::Result<()> {
    for entry in fs::read_dir(assets.join("packed"))? {
        let packed = entry?.path();
        let Some(name) = packed.file_stem() else {
            continue;
        };
        let whole = assets.join("demo").join(name);
        for path in [&packed, &whole] {
            println!("cargo::rerun-if-changed={}", path.display());
        }
        // An unpacked file gets the time of the packed one: so it is known to be made of it, and is not newer than the
        // build that made it, which cargo would take for a change.
        let time = fs::metadata(&packed)?.modified()?;
        if fs::metadata(&whole).is_ok_and(|m| m.modified().is_ok_and(|t| t == time)) {
            continue;
        }
        // Two build scripts may do this at once: each writes a file of its own.
        let part = whole.with_extension(format!("{}.part", std::process::id()));
        let mut file = File::create(&part)?;
        let mut reader = lzma_rust2::XzReader::new(BufReader::new(File::open(&packed)?), false);
        io::copy(&mut reader, &mut file)?;
        file.set_modified(time)?;
        fs::rename(part, whole)?;
    }
    Ok(())
}
