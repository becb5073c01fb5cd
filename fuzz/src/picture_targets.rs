//! The fuzz target for pictures. `fuzz/run picture` runs it under libFuzzer; `pictures/tests/hostile.rs` over
//! `fuzz/seeds/picture` and mutations of valid files.
#![allow(unreachable_pub)]

use nq_pictures::{Limits, decode, header};

/// A file of any kind: refused with a named error, or decoded to a picture of the size that its header says.
pub fn picture(data: &[u8]) {
    let limits = Limits {
        bytes: 1 << 20,
        pixels: 1 << 20,
    };
    let header = header(data, &limits);
    let Ok(pixels) = decode(data, &limits, &|| false) else {
        return;
    };
    let header = header.expect("what is decoded has a header");
    assert_eq!(pixels.width as u32, header.width);
    assert_eq!(pixels.height as u32, header.height);
    assert_eq!(pixels.levels.len(), pixels.width * pixels.height * 3);
}
