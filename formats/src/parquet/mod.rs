//! Texts from Parquet files, the form in which the hub keeps data sets.
//!
//! Reads one column of strings from files as pyarrow writes them: flat, snappy or no
//! compression, plain or dictionary encoding, data pages of version 1 or 2. Everything else
//! is refused by name. Format: <https://parquet.apache.org/docs/file-format/>.

mod snappy;
mod thrift;

use crate::error::{Error, Result};
use std::borrow::Cow;
use std::path::Path;
use thrift::Value;

/// First and last bytes of a file.
const MAGIC: &[u8; 4] = b"PAR1";

/// Bytes that a page may claim to have uncompressed: more than any writer's default (1 MiB)
/// by far, and little enough to allocate.
const MAX_PAGE: usize = 1 << 28;

/// What went wrong inside a file; [`strings`] adds the path.
#[derive(Debug)]
pub(crate) enum Fault {
    /// Bytes that make no sense: what, expected, found.
    Malformed(&'static str, String, String),
    /// Sense that nq does not read: what, why.
    Unsupported(String, &'static str),
}

type Parsed<T> = std::result::Result<T, Fault>;

fn malformed<T>(
    what: &'static str,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> Parsed<T> {
    Err(Fault::Malformed(what, expected.into(), found.into()))
}

/// The values of the string column `column`, nulls as empty strings. `path` names the file in
/// messages.
///
/// # Errors
/// [`Error::Malformed`] saying which part of the file is broken; [`Error::Unsupported`] naming
/// a compression, encoding or type without a reader.
pub fn strings(path: &Path, file: &[u8], column: &str) -> Result<Vec<String>> {
    read(file, column).map_err(|fault| match fault {
        Fault::Malformed(what, expected, found) => Error::Malformed {
            path: path.into(),
            what: what.into(),
            expected,
            found,
        },
        Fault::Unsupported(what, why) => Error::Unsupported {
            path: path.into(),
            what,
            why: why.into(),
        },
    })
}

fn read(file: &[u8], column: &str) -> Parsed<Vec<String>> {
    let footer = footer(file)?;
    let optional = find_column(&footer, column)?;
    let mut values = Vec::new();
    for group in footer.list(4, "row groups")? {
        let chunks = group.list(1, "columns")?;
        let metas = chunks.iter().map(|c| c.field(3, "column metadata"));
        for meta in metas {
            let meta = meta?;
            let name = meta.list(3, "column path")?;
            if matches!(name, [one] if one.bytes() == Some(column.as_bytes())) {
                read_chunk(file, meta, optional, &mut values)?;
            }
        }
    }
    let rows = footer.int(3, "number of rows")?;
    if rows != values.len() as i64 {
        return malformed("column", format!("{rows} values"), values.len().to_string());
    }
    Ok(values)
}

fn footer(file: &[u8]) -> Parsed<Value<'_>> {
    let tail = file.split_last_chunk::<8>();
    let Some((body, [l0, l1, l2, l3, magic @ ..])) = tail else {
        return malformed("file", "a Parquet file", format!("{} bytes", file.len()));
    };
    if !file.starts_with(MAGIC) || magic != MAGIC {
        return malformed("file", "PAR1 at start and end", "other bytes");
    }
    let len = u32::from_le_bytes([*l0, *l1, *l2, *l3]) as usize;
    match body.len().checked_sub(len) {
        Some(start) if start >= MAGIC.len() => {
            let (footer, _) = thrift::read_struct(&body[start..])?;
            Ok(footer)
        }
        _ => malformed(
            "footer",
            format!("at most {} bytes", body.len()),
            len.to_string(),
        ),
    }
}

/// Checks that `column` is a flat column of byte strings; true if values may be missing.
fn find_column(footer: &Value<'_>, column: &str) -> Parsed<bool> {
    let schema = footer.list(2, "schema")?;
    let found = schema
        .iter()
        .skip(1) // the root
        .find(|s| s.get(4).and_then(Value::bytes) == Some(column.as_bytes()));
    let Some(element) = found else {
        return malformed("schema", format!("a column {column}"), "none of that name");
    };
    const BYTE_ARRAY: i64 = 6;
    if element.get(1).and_then(Value::as_int) != Some(BYTE_ARRAY) {
        return Err(Fault::Unsupported(
            format!("column {column} of another type"),
            "nq reads strings",
        ));
    }
    match element.get(3).and_then(Value::as_int).unwrap_or(0) {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Fault::Unsupported(
            format!("repeated column {column}"),
            "nq reads flat columns",
        )),
    }
}

/// Compression codecs.
const UNCOMPRESSED: i64 = 0;
const SNAPPY: i64 = 1;

/// Page types.
const DATA_PAGE: i64 = 0;
const DICTIONARY_PAGE: i64 = 2;
const DATA_PAGE_V2: i64 = 3;

/// Encodings.
const PLAIN: i64 = 0;
const PLAIN_DICTIONARY: i64 = 2;
const RLE_DICTIONARY: i64 = 8;

/// Appends the values of one column chunk.
fn read_chunk(
    file: &[u8],
    meta: &Value<'_>,
    optional: bool,
    values: &mut Vec<String>,
) -> Parsed<()> {
    let codec = meta.int(4, "codec")?;
    if !matches!(codec, UNCOMPRESSED | SNAPPY) {
        return Err(Fault::Unsupported(
            format!("compression codec {codec}"),
            "nq reads snappy and uncompressed pages",
        ));
    }
    let first = meta.int(9, "data page offset")?;
    let dictionary_at = meta.get(11).and_then(Value::as_int).filter(|&o| o > 0);
    let start = dictionary_at.map_or(first, |d| d.min(first));
    let wanted = meta.int(5, "number of values")?;
    let mut at = usize::try_from(start).unwrap_or(usize::MAX);
    let mut dictionary: Vec<String> = Vec::new();
    let end = wanted.saturating_add(values.len() as i64);
    while (values.len() as i64) < end {
        let Some(rest) = file.get(at..) else {
            return malformed("page", "an offset inside the file", at.to_string());
        };
        let (header, header_bytes) = thrift::read_struct(rest)?;
        let size = |id, what| -> Parsed<usize> {
            let n = header.int(id, what)?;
            usize::try_from(n).or_else(|_| malformed(what, "a size", n.to_string()))
        };
        let uncompressed = size(2, "uncompressed page size")?;
        let compressed = size(3, "compressed page size")?;
        let Some(page) = rest.get(header_bytes..).and_then(|r| r.get(..compressed)) else {
            let found = format!("{} bytes left", rest.len().saturating_sub(header_bytes));
            return malformed("page", format!("{compressed} bytes"), found);
        };
        if uncompressed > MAX_PAGE {
            let found = format!("{uncompressed} bytes");
            return malformed("page", format!("at most {MAX_PAGE} bytes"), found);
        }
        at += header_bytes + compressed;
        match header.int(1, "page type")? {
            DICTIONARY_PAGE => {
                let h = header.field(7, "dictionary page header")?;
                let page = expand(page, codec, uncompressed)?;
                dictionary = plain(&page, h.count(1, "dictionary's values")?)?;
            }
            DATA_PAGE => {
                let h = header.field(5, "data page header")?;
                let page = expand(page, codec, uncompressed)?;
                let n = h.count(1, "page's values")?;
                let (present, body) = match optional {
                    false => (vec![true; checked(n, &page)?], &page[..]),
                    true => {
                        let (len, rest) = split_u32(&page)?;
                        let Some((levels, body)) = rest.split_at_checked(len) else {
                            return malformed("definition levels", "whole", "cut short");
                        };
                        (definition(levels, n)?, body)
                    }
                };
                append(h.int(2, "encoding")?, body, &present, &dictionary, values)?;
            }
            DATA_PAGE_V2 => {
                let h = header.field(8, "data page header")?;
                let n = h.count(1, "page's values")?;
                let levels = h.count(5, "definition levels")? + h.count(6, "repetition levels")?;
                let Some((levels, body)) = page.split_at_checked(levels) else {
                    return malformed("levels", "within their page", "past its end");
                };
                let packed = h.get(7).and_then(Value::as_bool).unwrap_or(true);
                let codec = if packed { codec } else { UNCOMPRESSED };
                let body = expand(body, codec, uncompressed.saturating_sub(levels.len()))?;
                let present = match optional {
                    false => vec![true; checked(n, &body)?],
                    true => definition(levels, n)?,
                };
                append(h.int(4, "encoding")?, &body, &present, &dictionary, values)?;
            }
            _ => {} // index pages hold no values
        }
    }
    match values.len() as i64 == end {
        true => Ok(()),
        false => malformed("column chunk", format!("{wanted} values"), "more"),
    }
}

/// A count of values, refused if no page of this size could hold them.
fn checked(n: usize, page: &[u8]) -> Parsed<usize> {
    // Dictionary indices may take no bits at all, so the page alone bounds nothing; the
    // greatest page that pyarrow writes has far fewer values than this.
    const MAX_VALUES: usize = 1 << 26;
    match n <= MAX_VALUES {
        true => Ok(n),
        false => malformed(
            "page",
            format!("at most {MAX_VALUES} values"),
            format!("{n} in {} bytes", page.len()),
        ),
    }
}

fn expand(page: &[u8], codec: i64, uncompressed: usize) -> Parsed<Cow<'_, [u8]>> {
    if codec == UNCOMPRESSED || (page.is_empty() && uncompressed == 0) {
        return Ok(Cow::Borrowed(page));
    }
    snappy::decompress(page, uncompressed).map(Cow::Owned)
}

/// Appends a page's values; where `present` is false, an empty string.
fn append(
    encoding: i64,
    body: &[u8],
    present: &[bool],
    dictionary: &[String],
    values: &mut Vec<String>,
) -> Parsed<()> {
    let stored = present.iter().filter(|&&p| p).count();
    let mut stored = match encoding {
        PLAIN => plain(body, stored)?,
        PLAIN_DICTIONARY | RLE_DICTIONARY if stored == 0 => Vec::new(),
        PLAIN_DICTIONARY | RLE_DICTIONARY => {
            let Some((&width, body)) = body.split_first() else {
                return malformed("dictionary indices", "a bit width", "nothing");
            };
            let indices = hybrid(body, width, stored)?;
            let look_up = |i: u32| match dictionary.get(i as usize) {
                Some(s) => Ok(s.clone()),
                None => malformed(
                    "dictionary index",
                    format!("below {}", dictionary.len()),
                    i.to_string(),
                ),
            };
            indices.into_iter().map(look_up).collect::<Parsed<_>>()?
        }
        other => {
            return Err(Fault::Unsupported(
                format!("encoding {other}"),
                "nq reads plain and dictionary encodings",
            ));
        }
    }
    .into_iter();
    values.extend(present.iter().map(|&p| match p {
        true => stored.next().unwrap_or_default(),
        false => String::new(),
    }));
    Ok(())
}

/// Plain byte strings: a length and bytes each.
fn plain(mut bytes: &[u8], n: usize) -> Parsed<Vec<String>> {
    let mut strings = Vec::new();
    for _ in 0..n {
        let (len, rest) = split_u32(bytes)?;
        let Some((text, rest)) = rest.split_at_checked(len) else {
            return malformed("string", format!("{len} bytes"), rest.len().to_string());
        };
        match std::str::from_utf8(text) {
            Ok(text) => strings.push(text.to_owned()),
            Err(e) => return malformed("string", "UTF-8", e.to_string()),
        }
        bytes = rest;
    }
    Ok(strings)
}

fn split_u32(bytes: &[u8]) -> Parsed<(usize, &[u8])> {
    match bytes.split_first_chunk::<4>() {
        Some((len, rest)) => Ok((u32::from_le_bytes(*len) as usize, rest)),
        None => malformed("length", "4 bytes", bytes.len().to_string()),
    }
}

/// Definition levels of a flat column: true where a value is stored.
fn definition(levels: &[u8], n: usize) -> Parsed<Vec<bool>> {
    let n = checked(n, levels)?;
    Ok(hybrid(levels, 1, n)?.into_iter().map(|l| l == 1).collect())
}

/// `n` numbers of `width` bits in the run-length / bit-packed hybrid.
fn hybrid(mut bytes: &[u8], width: u8, n: usize) -> Parsed<Vec<u32>> {
    if width > 32 {
        return malformed("bit width", "at most 32", width.to_string());
    }
    let width = usize::from(width);
    let mut out = Vec::new();
    while out.len() < n {
        let (head, used) = thrift::varint(bytes)?;
        bytes = &bytes[used..];
        let left = n - out.len();
        if head & 1 == 0 {
            // A run: one value in whole bytes, low byte first.
            let Some((value, rest)) = bytes.split_at_checked(width.div_ceil(8)) else {
                return malformed("run", "a value", "the end of the page");
            };
            let value = value.iter().rev().fold(0u32, |v, &b| v << 8 | u32::from(b));
            let run = usize::try_from(head >> 1).unwrap_or(usize::MAX);
            if run == 0 {
                return malformed("run", "at least one value", "none");
            }
            out.extend(std::iter::repeat_n(value, run.min(left)));
            bytes = rest;
        } else {
            // Groups of 8 values, bits packed from the lowest.
            let groups = usize::try_from(head >> 1).unwrap_or(usize::MAX);
            let size = groups.saturating_mul(width);
            let packed = &bytes[..size.min(bytes.len())];
            let count = groups.saturating_mul(8).min(left);
            if count == 0 || packed.len() * 8 < count * width {
                return malformed("bit-packed values", format!("{size} bytes"), "fewer");
            }
            let bit = |i: usize| u32::from(packed[i / 8] >> (i % 8) & 1);
            out.extend(
                (0..count).map(|v| (0..width).fold(0, |value, b| value | bit(v * width + b) << b)),
            );
            bytes = &bytes[packed.len()..];
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hybrid_reads_runs_and_packed_groups() {
        // Parquet's own example: 0 to 7 in 3 bits each.
        assert_eq!(
            hybrid(&[0b11, 0b1000_1000, 0b1100_0110, 0b1111_1010], 3, 8).unwrap(),
            [0, 1, 2, 3, 4, 5, 6, 7]
        );
        // A run of five 300s, then one group of which three values are wanted.
        assert_eq!(
            hybrid(&[5 << 1, 0x2c, 0x01], 9, 5).unwrap(),
            [300, 300, 300, 300, 300]
        );
        assert_eq!(
            hybrid(&[2 << 1, 1, 0b11, 0b0000_0101], 1, 5).unwrap(),
            [1, 1, 1, 0, 1]
        );
        assert!(hybrid(&[3], 8, 2).is_err(), "cut short");
        assert!(hybrid(&[0, 1], 8, 2).is_err(), "a run of none");
        assert_eq!(hybrid(&[4 << 1], 0, 4).unwrap(), [0; 4]);
    }
}
