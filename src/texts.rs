//! Texts to evaluate on: a file, WikiText-2 from the hub, or the one built into the program.

use crate::demo;
use anyhow::{Context, bail};
use nq_formats::hash::sha256_hex;
use nq_formats::hub::{Hub, HubOptions};
use nq_formats::{Progress, human_bytes, parquet};
use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// A text and its name in reports.
pub struct Text {
    /// Its name, with the part that was read.
    pub name: String,
    /// The text.
    pub text: Cow<'static, str>,
}

/// Reads a whole text of at most 1 GB.
pub fn whole(path: &Path) -> anyhow::Result<String> {
    Ok(read(path, None)?.text.into_owned())
}

/// Reads `file`, or the text that is built in, the same with a network and without; WikiText-2 from the hub or its cache
/// if `file` is called [`WIKITEXT_NAME`] and there is no such file. Reads at most `max_bytes`, cut before a character
/// that would be split, and reports which text it is.
pub fn load(
    file: Option<&Path>,
    max_bytes: Option<usize>,
    offline: bool,
    progress: &dyn Progress,
) -> anyhow::Result<Text> {
    if max_bytes == Some(0) {
        bail!("text bytes: expected at least 1, found 0");
    }
    let text = match file {
        Some(path) if path == Path::new(WIKITEXT_NAME) && !path.exists() => {
            let text = wikitext(offline, progress).context("WikiText-2")?;
            let cut = text.floor_char_boundary(max_bytes.unwrap_or(text.len()));
            Text {
                name: named("WikiText-2 raw, test", cut, text.len() as u64),
                text: Cow::Owned(text[..cut].to_owned()),
            }
        }
        Some(path) => return read(path, max_bytes),
        None => built_in(max_bytes)?,
    };
    progress.note(&format!("text: {}", text.name));
    Ok(text)
}

/// The name of WikiText-2 in place of a file.
pub(crate) const WIKITEXT_NAME: &str = "wikitext2";

/// WikiText-2 on the hub.
const WIKITEXT: (&str, &str) = (
    "Salesforce/wikitext",
    "wikitext-2-raw-v1/test-00000-of-00001.parquet",
);

/// Most bytes of that file, which has 0.7 MB.
const MOST_PARQUET: u64 = 16 << 20;

/// SHA-256 of wiki.test.raw as published (Merity et al., 2016), 1,290,590 bytes.
const WIKITEXT_SHA256: &str = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08";

/// The exact text of wiki.test.raw. The hub's rows are its lines, except for lines with a single space,
/// which are empty there.
fn wikitext(offline: bool, progress: &dyn Progress) -> anyhow::Result<String> {
    let mut options = HubOptions::from_env();
    options.offline |= offline;
    let (repo, file) = WIKITEXT;
    let path = Hub::new(options).fetch_dataset_file(repo, file, progress)?;
    let bytes = File::open(&path).and_then(|file| read_bounded(file, MOST_PARQUET));
    let bytes = bytes.with_context(|| path.display().to_string())?;
    let rows = parquet::strings(&path, bytes.into(), "text")?;
    let lines = rows.iter().map(|r| if r.is_empty() { " \n" } else { r });
    let text: String = lines.collect();
    let found = sha256_hex(text.as_bytes());
    if found != WIKITEXT_SHA256 {
        bail!(
            "{}: expected the published wiki.test.raw (sha256 {WIKITEXT_SHA256}), found {found}",
            path.display()
        );
    }
    Ok(text)
}

/// The text built into the program.
pub(crate) fn built_in(max_bytes: Option<usize>) -> anyhow::Result<Text> {
    let text = demo::eval_text().context(
        "no text to evaluate on: this build has none (feature `demo` is off); give one with --text FILE or --text wikitext2",
    )?;
    let cut = text.floor_char_boundary(max_bytes.unwrap_or(text.len()));
    Ok(Text {
        name: named("demo-eval (built in)", cut, text.len() as u64),
        text: Cow::Borrowed(&text[..cut]),
    })
}

/// Reads all of `input`; more than `most` bytes are an error.
///
/// # Errors
/// Errors of reading; a text that is longer.
pub(crate) fn read_bounded(input: impl Read, most: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    input.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        Err(std::io::Error::other(format!(
            "expected at most {}, found more",
            human_bytes(most)
        )))
    } else {
        Ok(bytes)
    }
}

/// Most bytes of a text to evaluate on or to calibrate with.
const MOST: u64 = 1_000_000_000;

fn read(path: &Path, max_bytes: Option<usize>) -> anyhow::Result<Text> {
    let open = || -> std::io::Result<(Vec<u8>, u64)> {
        let file = File::open(path)?;
        let total = file.metadata()?.len();
        // One character more than requested, so that a cut inside a character can be told from
        // bytes that are not UTF-8.
        let most = max_bytes.map_or(u64::MAX, |n| (n as u64).saturating_add(3));
        let bytes = read_bounded(file.take(most), MOST)?;
        Ok((bytes, total))
    };
    let (mut bytes, total) = open().with_context(|| format!("text {}", path.display()))?;
    let text_end = match std::str::from_utf8(&bytes) {
        Ok(_) => bytes.len(),
        Err(e) if e.error_len().is_none() && (bytes.len() as u64) < total => e.valid_up_to(),
        Err(e) => bail!(
            "text {}: expected UTF-8, found byte {:#04x} at offset {}",
            path.display(),
            bytes[e.valid_up_to()],
            e.valid_up_to()
        ),
    };
    bytes.truncate(text_end);
    let mut text = String::from_utf8(bytes)?;
    text.truncate(text.floor_char_boundary(max_bytes.unwrap_or(text.len())));
    let name = path.file_name().map_or_else(
        || path.display().to_string(),
        |n| n.to_string_lossy().into_owned(),
    );
    Ok(Text {
        name: named(&name, text.len(), total),
        text: Cow::Owned(text),
    })
}

fn named(name: &str, read: usize, total: u64) -> String {
    if read as u64 == total {
        name.to_owned()
    } else {
        format!("{name} (first {read} bytes)")
    }
}

#[cfg(test)]
mod tests {
    use super::load;
    use std::io::Write;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut f = tempfile::NamedTempFile::new().unwrap();
        f.write_all(bytes).unwrap();
        f
    }

    #[test]
    fn a_cut_never_splits_a_character() {
        let f = file("aé漢z".as_bytes()); // 1 + 2 + 3 + 1 bytes
        for (bytes, expected) in [(1, "a"), (2, "a"), (3, "aé"), (5, "aé"), (6, "aé漢")] {
            let t = load(Some(f.path()), Some(bytes), true, &()).unwrap();
            assert_eq!(t.text, expected, "{bytes} bytes");
            assert!(
                t.name
                    .ends_with(&format!("(first {} bytes)", expected.len()))
            );
        }
        let whole = load(Some(f.path()), Some(7), true, &()).unwrap();
        assert_eq!(whole.text, "aé漢z");
        assert!(!whole.name.contains("first"));
        assert_eq!(load(Some(f.path()), None, true, &()).unwrap().text, "aé漢z");
    }

    #[test]
    fn what_is_no_text_is_refused_with_its_place() {
        let f = file(b"ab\xff\xfecd");
        let message = format!("{:#}", load(Some(f.path()), None, true, &()).err().unwrap());
        assert!(message.contains("found byte 0xff at offset 2"), "{message}");
        let cut_short = file("a漢".as_bytes().split_last().unwrap().1);
        let message = format!(
            "{:#}",
            load(Some(cut_short.path()), None, true, &()).err().unwrap()
        );
        assert!(message.contains("at offset 1"), "{message}");
        assert!(load(Some(f.path()), Some(0), true, &()).is_err());
        assert!(load(Some(std::path::Path::new("/no/such/file")), None, true, &()).is_err());
    }
}
