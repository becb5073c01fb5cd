//! Runs the fuzz target for pictures over `fuzz/seeds` and mutations of the fixtures, so that every test run tries
//! some.

#[path = "../../fuzz/src/picture_targets.rs"]
mod picture_targets;

use picture_targets::picture;
use std::path::Path;

/// A sequence of numbers that is the same on every machine (Marsaglia's xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n.max(1) as u64) as usize
    }
}

/// Changes a few bytes, mostly of the header, cuts some out, or puts some in twice.
fn mutate(numbers: &mut Numbers, seed: &[u8]) -> Vec<u8> {
    let mut data = seed.to_vec();
    for _ in 0..1 + numbers.below(4) {
        let reach = [data.len().min(64), data.len()][numbers.below(2)];
        let at = numbers.below(reach);
        let end = (at + numbers.below(40)).min(data.len());
        match numbers.below(5) {
            0 => drop(data.drain(at..end)),
            1 => {
                let twice = data[at..end].to_vec();
                drop(data.splice(at..at, twice));
            }
            2 => data[at..end].fill([0, 0xFF][numbers.below(2)]),
            _ if at < data.len() => data[at] ^= 1 << numbers.below(8),
            _ => {}
        }
    }
    data
}

#[test]
fn mutated_pictures_are_refused_or_read() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = |folder: &str| -> Vec<Vec<u8>> {
        let entries = std::fs::read_dir(root.join(folder)).expect("a folder");
        let mut paths: Vec<_> = entries.map(|e| e.expect("an entry").path()).collect();
        paths.retain(|p| p.is_file());
        paths.sort();
        paths
            .iter()
            .map(|p| std::fs::read(p).expect("a file"))
            .collect()
    };
    let seeds = files("../fuzz/seeds/picture");
    assert!(!seeds.is_empty());
    seeds.iter().for_each(|s| picture(s));
    let mut numbers = Numbers(67);
    for seed in files("tests/fixtures") {
        for _ in 0..100 {
            picture(&mutate(&mut numbers, &seed));
        }
    }
}
