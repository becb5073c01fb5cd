//! What fuzz targets are tried on in every test run.

use std::fs;
use std::path::Path;

/// Runs `target`, called `name`, on every file of `fuzz/seeds/NAME`. If NQ_FUZZ_CORPUS names a folder, writes `seeds` there
/// for libFuzzer.
///
/// # Panics
/// If the folder has no files.
pub fn replay<S: AsRef<[u8]>>(name: &str, target: fn(&[u8]), seeds: &[S]) {
    if let Some(corpus) = std::env::var_os("NQ_FUZZ_CORPUS") {
        let folder = Path::new(&corpus).join(name);
        fs::create_dir_all(&folder).unwrap();
        for (i, seed) in seeds.iter().enumerate() {
            fs::write(folder.join(format!("seed-{i}")), seed).unwrap();
        }
    }
    let kept = fs::read_dir(crate::repository().join("fuzz/seeds").join(name));
    let kept: Vec<_> = kept.unwrap().collect();
    assert!(!kept.is_empty(), "{name}");
    for file in kept {
        target(&fs::read(file.unwrap().path()).unwrap());
    }
}
