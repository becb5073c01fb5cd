//! Pictures of every kind against what transformers' processor makes of them. `fixtures/pictures.py` writes both.

mod hostile;

use nq_model::vision::{Grid, ImageTokens, PixelSpec, VisionConfig};
use nq_pictures::{Error, Header, Limits, PictureFormat, decode, grid, header, patches};
use std::cell::Cell;
use std::path::{Path, PathBuf};

const NEVER: &dyn Fn() -> bool = &|| false;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(fixtures().join(name)).expect("a file of this folder")
}

/// Names of all pictures.
fn names() -> Vec<String> {
    let entries = std::fs::read_dir(fixtures()).expect("a folder");
    let names = entries.map(|e| {
        e.expect("an entry")
            .file_name()
            .into_string()
            .expect("UTF-8")
    });
    let kinds = [".png", ".jpg", ".webp", ".gif", ".bmp"];
    let mut names: Vec<String> = names
        .filter(|n| kinds.iter().any(|k| n.ends_with(k)))
        .collect();
    names.sort();
    names
}

/// A model with squares of `patch * 2` pixels.
fn model(patch: usize, pixels: [u64; 2]) -> VisionConfig {
    VisionConfig {
        depth: 1,
        deepstack: Vec::new(),
        hidden_size: 8,
        intermediate_size: 8,
        num_heads: 1,
        patch_size: patch,
        temporal_patch_size: 2,
        spatial_merge_size: 2,
        position_side: 8,
        out_hidden_size: 8,
        tokens: ImageTokens {
            pad: 2,
            start: 0,
            end: 1,
        },
        pixels: PixelSpec {
            least: pixels[0],
            most: pixels[1],
            mean: [0.5; 3],
            std: [0.5; 3],
        },
    }
}

/// The model of `fixtures/pictures.py`.
fn small() -> VisionConfig {
    model(4, [256, 4096])
}

#[test]
fn pictures_are_those_of_the_published_processor() {
    let limits = Limits::default();
    let model = small();
    let names = names();
    assert!(names.len() >= 40, "{}", names.len());
    for name in names {
        let made = patches(&read(&name), &model, u64::MAX, &limits, NEVER);
        let made = made.unwrap_or_else(|e| panic!("{name}: {e}"));
        let expected =
            decode(&read(&format!("expected/{name}.png")), &limits, NEVER).expect("a PNG");
        let sides = [
            made.grid.h * model.patch_size,
            made.grid.w * model.patch_size,
        ];
        assert_eq!(sides, [expected.height, expected.width], "{name}");
        assert_eq!(made.rows.len(), made.grid.patches() * model.patch_values());
        let mut worst = 0;
        let squares = made.grid.places(model.spatial_merge_size);
        for ((y, x), row) in squares.zip(made.rows.chunks_exact(model.patch_values())) {
            // [channel][time][line][column]
            for (at, value) in row.iter().enumerate() {
                let (channel, line, column) = (at / 32, at / 4 % 4, at % 4);
                let pixel = (y * 4 + line) * expected.width + x * 4 + column;
                let level = ((value + 1.0) * 127.5).round() as i32;
                worst = worst.max((level - i32::from(expected.levels[pixel * 3 + channel])).abs());
            }
        }
        // JPEG decoders differ: in the rounding of their transforms, and in how they enlarge halved colours.
        let most = match name.as_str() {
            "halved.jpg" | "halved-across.jpg" => 8,
            jpeg if jpeg.ends_with(".jpg") => 2,
            _ => 0,
        };
        assert!(
            worst <= most,
            "{name}: {worst} levels from the published processor's"
        );
    }
}

#[test]
fn values_are_those_of_the_published_processor() {
    let text = String::from_utf8(read("values.json")).expect("UTF-8");
    let expected: Vec<f32> = serde_json::from_str(&text).expect("values");
    let made = patches(
        &read("rgb-37x53.png"),
        &small(),
        u64::MAX,
        &Limits::default(),
        NEVER,
    );
    let made = made.expect("a picture").rows;
    let rows = made.chunks_exact(96).step_by(3);
    let made: Vec<f32> = rows
        .flat_map(|row| [0, 5, 16, 31, 47, 95].map(|c| row[c]))
        .collect();
    assert_eq!(made, expected);
}

#[test]
fn sizes_are_those_of_the_published_processor() {
    let text = String::from_utf8(read("sizes.json")).expect("UTF-8");
    let sizes: Vec<[u32; 4]> = serde_json::from_str(&text).expect("sizes");
    let model = model(16, [65_536, 16_777_216]);
    for [height, width, h, w] in sizes {
        let header = Header {
            format: PictureFormat::Png,
            width,
            height,
        };
        let Grid {
            h: rows,
            w: columns,
            ..
        } = grid(&header, &model, u64::MAX);
        assert_eq!(
            [rows * 16, columns * 16],
            [h as usize, w as usize],
            "{height} x {width}"
        );
    }
}

#[test]
fn fewer_tokens_make_a_smaller_picture() {
    let model = model(16, [65_536, 16_777_216]);
    let header = Header {
        format: PictureFormat::Png,
        width: 1920,
        height: 1080,
    };
    assert_eq!(grid(&header, &model, u64::MAX).tokens(2), 60 * 34);
    let grid = |most| grid(&header, &model, most).tokens(2) as u64;
    assert!(grid(256) <= 256 && grid(256) > 200);
    // Also below what the model takes at least.
    assert!(grid(10) <= 10 && grid(10) > 0);
}

#[test]
fn headers_say_what_decoding_gives() {
    for name in names() {
        let bytes = read(&name);
        let header = header(&bytes, &Limits::default()).expect("a header");
        let pixels = decode(&bytes, &Limits::default(), NEVER).expect("a picture");
        assert_eq!(
            [header.width as usize, header.height as usize],
            [pixels.width, pixels.height],
            "{name}"
        );
        assert_eq!(pixels.levels.len(), pixels.width * pixels.height * 3);
    }
}

/// Nothing is ever half a picture: a file that was cut gives an error or, where only what follows the picture is
/// missing, the whole picture.
#[test]
fn truncated_files_are_errors() {
    for name in names() {
        let bytes = read(&name);
        let whole = decode(&bytes, &Limits::default(), NEVER).expect("a picture");
        let mut refused = 0;
        for cut in 0..bytes.len() {
            match decode(&bytes[..cut], &Limits::default(), NEVER) {
                Err(_) => refused += 1,
                Ok(pixels) => assert_eq!(
                    pixels,
                    whole,
                    "{name} cut to {cut} of {} bytes",
                    bytes.len()
                ),
            }
        }
        assert!(refused > 40, "{name}: {refused}");
    }
}

#[test]
fn limits_are_held_before_decoding() {
    let bytes = read("rgb-300x200.png");
    let few = Limits {
        pixels: 59_999,
        ..Limits::default()
    };
    let refused = decode(&bytes, &few, NEVER).expect_err("too many pixels");
    assert_eq!(
        refused.to_string(),
        "a picture of 300 x 200 pixels; the limit is 59999 pixels"
    );
    let short = Limits {
        bytes: 100,
        ..Limits::default()
    };
    assert!(matches!(
        decode(&bytes, &short, NEVER),
        Err(Error::Bytes { limit: 100, .. })
    ));
    // The header alone says 65,535 x 65,535: nothing is reserved for it.
    let mut vast = bytes.clone();
    vast[16..24].copy_from_slice(&[0, 0, 255, 255, 0, 0, 255, 255]);
    let crc = crc32(&vast[12..29]);
    vast[29..33].copy_from_slice(&crc.to_be_bytes());
    assert!(matches!(
        header(&vast, &Limits::default()),
        Err(Error::Pixels { width: 65_535, .. })
    ));
    let mut thin = bytes.clone();
    thin[16..24].copy_from_slice(&[0, 0, 0, 201, 0, 0, 0, 1]);
    let crc = crc32(&thin[12..29]);
    thin[29..33].copy_from_slice(&crc.to_be_bytes());
    assert!(matches!(
        header(&thin, &Limits::default()),
        Err(Error::Ratio { limit: 200, .. })
    ));
}

/// The checksum of PNG chunks.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg())
        })
    })
}

#[test]
fn formats_are_told_by_content() {
    for (bytes, found) in [
        (&b""[..], "nothing"),
        (
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            "bytes that begin with [3c, 73, 76, 67",
        ),
        (b"II*\0\x08\0\0\0", "Tiff"),
        (b"%PDF-1.7", "bytes that begin with [25, 50"),
    ] {
        let refused = header(bytes, &Limits::default())
            .expect_err("no picture")
            .to_string();
        assert!(refused.contains(found), "{refused}");
    }
}

#[test]
fn work_ends_when_it_is_told_to() {
    let stopped = decode(&read("rgb-300x200.png"), &Limits::default(), &|| true);
    assert!(matches!(stopped, Err(Error::Stopped)));
    // Whichever question is the first that is answered so, the work ends: at those between rows of resizing, too.
    // (A decoder may ask for bytes once more when it has got none.)
    let seen = |after: usize| {
        let asked = Cell::new(0);
        let stop = || asked.replace(asked.get() + 1) >= after;
        let made = patches(
            &read("rgb-300x200.png"),
            &small(),
            64,
            &Limits::default(),
            &stop,
        );
        (made.map(|_| ()), asked.get())
    };
    let (made, all) = seen(usize::MAX);
    made.expect("patches");
    assert!(all > 200, "asked {all} times");
    for after in (0..all).step_by(7) {
        let (made, asked) = seen(after);
        assert!(
            matches!(made, Err(Error::Stopped)),
            "after {after} of {all}"
        );
        assert!(asked <= after + 2, "{asked} after {after}");
    }
}

#[test]
fn digests_tell_what_the_tower_sees() {
    let digest = |name: &str, most| {
        patches(&read(name), &small(), most, &Limits::default(), NEVER)
            .expect(name)
            .digest
    };
    // The same pixels in other files.
    assert_eq!(
        digest("lossless.webp", u64::MAX),
        digest("colour.bmp", u64::MAX)
    );
    assert_ne!(
        digest("colour.bmp", u64::MAX),
        digest("rgb-37x53.png", u64::MAX)
    );
    assert_ne!(digest("colour.bmp", u64::MAX), digest("colour.bmp", 8));
}
