//! Parquet files written by pyarrow 26: `["a", "", "bc", null, "a", "été", null]` 40 times.

use nq_formats::parquet::strings;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> (PathBuf, Vec<u8>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let path = folder.join(name);
    let bytes = std::fs::read(&path).unwrap();
    (path, bytes)
}

const READABLE: [&str; 2] = ["snappy-dictionary.parquet", "plain-v2.parquet"];

#[test]
fn columns_of_strings_are_read_whole() {
    let once = ["a", "", "bc", "", "a", "été", ""];
    for name in READABLE {
        let (path, bytes) = fixture(name);
        let values = strings(&path, bytes.into(), "text").unwrap();
        assert_eq!(values, once.repeat(40), "{name}");
    }
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    let check = |name: &str, column: &str, expected: &str| {
        let (path, bytes) = fixture(name);
        let message = strings(&path, bytes.into(), column)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains(expected) && message.contains(name),
            "{message}"
        );
    };
    check("zstd.parquet", "text", "zstd");
    check("plain-v2.parquet", "title", "a column title");
    check(
        "snappy-dictionary.parquet",
        "n",
        "column n: expected strings, found values of type",
    );
    let message = strings(Path::new("x.parquet"), (&b"PAR1"[..]).into(), "text").unwrap_err();
    assert!(message.to_string().contains("a Parquet file"), "{message}");
}

/// Every truncation and every damaged byte gives values or an error, never a panic.
#[test]
fn damage_never_panics() {
    for name in READABLE {
        let (path, bytes) = fixture(name);
        for i in 0..bytes.len() {
            assert!(
                strings(&path, bytes[..i].to_vec().into(), "text").is_err(),
                "{name} cut at {i}"
            );
            let mut damaged = bytes.clone();
            for flip in [0x01, 0x80, 0xff] {
                damaged[i] = bytes[i] ^ flip;
                let _ = strings(&path, damaged.clone().into(), "text");
            }
        }
    }
}
