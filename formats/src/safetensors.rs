//! Reads one safetensors file: its fully checked header, and zero-copy views of its tensors.
//!
//! The `safetensors` crate validates too, but its errors name neither tensors nor
//! numbers, and if a name occurs twice it silently keeps one of the two entries. The parser here says what is
//! wrong and where. Tests compare it with that crate.

use crate::error::{Error, Result};
use crate::files::incomplete;
use crate::store::TensorEntry;
use crate::tensor::Tensor;
use bytes::Bytes;
use nq_model::DType;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Longest header that readers of the format accept, in bytes.
pub(crate) const MAX_HEADER: u64 = 100_000_000;

/// Bytes of the length that precedes the header.
const LENGTH: usize = 8;

/// The header's key for free-form strings, which is not a tensor.
pub(crate) const METADATA: &str = "__metadata__";

/// An opened safetensors file whose header has been checked: every tensor's bytes are
/// in the file, have the length given by its shape and type, and do not overlap those of others.
#[derive(Clone, Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file_bytes: u64,
    data: Bytes, // all after the header
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, Info>,
}

#[derive(Clone, Debug)]
struct Info {
    dtype: DType,
    shape: Vec<usize>,
    range: Range<usize>, // within the data section
}

impl SafetensorsFile {
    /// Parses `bytes`, the whole file; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Malformed`] for a header that is truncated, longer than `MAX_HEADER`, not a JSON
    /// object, or does not cover the file; [`Error::Tensor`] for a tensor that is
    /// given twice, has an unknown type, a length that does not match its shape, or an
    /// offset that is out of range, overlapping or leaves a gap.
    pub fn parse(path: &Path, bytes: Bytes) -> Result<Self> {
        let malformed = |what: &str, expected: String, found: String| Error::Malformed {
            path: path.into(),
            what: what.into(),
            expected,
            found,
        };
        let Some((length, rest)) = bytes.split_first_chunk::<LENGTH>() else {
            return Err(malformed(
                "safetensors header length",
                format!("{LENGTH} bytes"),
                format!("a file of {} bytes", bytes.len()),
            ));
        };
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER {
            return Err(malformed(
                "safetensors header length",
                format!("at most {MAX_HEADER} bytes"),
                match bytes
                    .first_chunk::<LENGTH>()
                    .map(|b| (b, b.iter().all(|c| (b' '..=b'~').contains(c))))
                {
                    Some((text, true)) => {
                        format!("text that begins with \"{}\"", text.escape_ascii())
                    }
                    _ => format!("{length} bytes"),
                },
            ));
        }
        let length = length as usize;
        let Some(header) = rest.get(..length) else {
            let needed = (LENGTH + length) as u64;
            return Err(incomplete(path, needed, bytes.len() as u64));
        };
        let data = bytes.slice(LENGTH + length..);
        let Header { metadata, tensors } = Header::parse(path, header)?;
        let tensors = check_layout(path, tensors, LENGTH + length, data.len())?;
        Ok(SafetensorsFile {
            path: path.into(),
            file_bytes: bytes.len() as u64,
            data,
            metadata,
            tensors,
        })
    }

    /// The file's path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size of the whole file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// The header's `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor `name`, as a view of the file.
    pub fn get(&self, name: &str) -> Option<Tensor> {
        let info = self.tensors.get(name)?;
        let bytes = self.data.slice(info.range.clone());
        let tensor = Tensor::new(info.dtype, info.shape.clone(), bytes);
        Some(tensor.expect("lengths were checked against shapes by parse"))
    }

    /// Entries of all tensors, in name order.
    pub fn entries(&self) -> impl Iterator<Item = TensorEntry> {
        let file = self.path.file_name().unwrap_or_default();
        let file = file.to_string_lossy().into_owned();
        self.tensors.iter().map(move |(name, info)| TensorEntry {
            name: name.clone(),
            dtype: info.dtype.name().into(),
            shape: info.shape.clone(),
            bytes: info.range.len() as u64,
            file: file.clone(),
        })
    }
}

/// A tensor as described in the header.
#[derive(Deserialize)]
struct RawInfo {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawInfo {
    /// Bytes of its elements; `None` if its type is unknown or there are more than 2^64.
    fn bytes(&self) -> Option<u64> {
        let size = DType::from_name(&self.dtype)?.size() as u64;
        self.shape.iter().try_fold(size, |n, &d| n.checked_mul(d))
    }
}

struct Header {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, RawInfo)>,
}

impl Header {
    fn parse(path: &Path, json: &[u8]) -> Result<Header> {
        // The parser does not validate strings that it skips.
        let json = std::str::from_utf8(json).map_err(|e| Error::Malformed {
            path: path.into(),
            what: "header".into(),
            expected: "JSON in UTF-8".into(),
            found: e.to_string(),
        })?;
        // The entry being read, so that JSON errors can name it.
        let current = RefCell::new(None);
        let mut parser = serde_json::Deserializer::from_str(json);
        parser
            .deserialize_map(HeaderVisitor { current: &current })
            .and_then(|h| parser.end().map(|()| h))
            .map_err(|e| match current.take() {
                Some(tensor) => Error::Tensor {
                    path: path.into(),
                    tensor,
                    expected: "dtype, shape and data_offsets, once".into(),
                    found: e.to_string(),
                },
                None => Error::Malformed {
                    path: path.into(),
                    what: "header".into(),
                    expected: "a JSON object".into(),
                    found: e.to_string(),
                },
            })
    }
}

struct HeaderVisitor<'a> {
    current: &'a RefCell<Option<String>>,
}

impl<'de> Visitor<'de> for HeaderVisitor<'_> {
    type Value = Header;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut metadata = None;
        let mut tensors: BTreeMap<String, RawInfo> = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == METADATA {
                if metadata.replace(map.next_value()?).is_some() {
                    return Err(A::Error::custom(format!("{METADATA} twice")));
                }
                continue;
            }
            *self.current.borrow_mut() = Some(key.clone());
            let info = map.next_value()?;
            if tensors.insert(key, info).is_some() {
                return Err(A::Error::custom("the name twice"));
            }
            *self.current.borrow_mut() = None;
        }
        Ok(Header {
            metadata: metadata.unwrap_or_default(),
            tensors: tensors.into_iter().collect(),
        })
    }
}

/// Checks that the tensors fill the data section of `data_len` bytes after the header, as the format requires:
/// no overlap, no gap, nothing past the end.
fn check_layout(
    path: &Path,
    mut tensors: Vec<(String, RawInfo)>,
    header_len: usize,
    data_len: usize,
) -> Result<BTreeMap<String, Info>> {
    tensors.sort_by_key(|(_, t)| t.data_offsets);
    // A file whose tensors are consistent with each other, but go on after its end, was cut off.
    let last = tensors.iter().map(|(_, t)| t.data_offsets.1).max();
    let consistent = (tensors.windows(2)).all(|t| t[0].1.data_offsets.1 == t[1].1.data_offsets.0)
        && tensors
            .iter()
            .all(|(_, t)| t.bytes() == t.data_offsets.1.checked_sub(t.data_offsets.0));
    if let Some(end) = last.filter(|&end| consistent && end > data_len as u64) {
        let needed = end.saturating_add(header_len as u64);
        return Err(incomplete(path, needed, (header_len + data_len) as u64));
    }
    let mut checked = BTreeMap::new();
    let mut end = 0;
    let mut previous = String::new();
    for (name, raw) in tensors {
        let error = |expected: String, found: String| Error::Tensor {
            path: path.into(),
            tensor: name.clone(),
            expected,
            found,
        };
        let Some(dtype) = DType::from_name(&raw.dtype) else {
            let known: Vec<_> = DType::ALL.iter().map(|d| d.name()).collect();
            return Err(error(
                format!("a dtype among {}", known.join(", ")),
                raw.dtype,
            ));
        };
        let (from, to) = raw.data_offsets;
        if from > to || to > data_len as u64 {
            return Err(error(
                format!("offsets within the file's {data_len} bytes of data"),
                format!("{from} to {to}"),
            ));
        }
        let (from, to) = (from as usize, to as usize); // at most data_len
        let bytes = raw.bytes();
        if bytes != Some((to - from) as u64) {
            let bytes = bytes.map_or("more than 2^64".into(), |n| n.to_string());
            return Err(error(
                format!("{bytes} bytes for {dtype} of shape {:?}", raw.shape),
                format!("{} bytes at offsets {from} to {to}", to - from),
            ));
        }
        if from != end {
            let found = if from < end {
                format!("offset {from}, overlapping {previous}")
            } else {
                format!("offset {from}, leaving a gap")
            };
            return Err(error(format!("data from offset {end}"), found));
        }
        end = to;
        previous.clone_from(&name);
        let info = Info {
            dtype,
            // Exact on 64-bit targets; elsewhere, another dimension is zero if one exceeds usize.
            shape: raw.shape.iter().map(|&d| d as usize).collect(),
            range: from..to,
        };
        checked.insert(name, info);
    }
    if end != data_len {
        return Err(Error::Malformed {
            path: path.into(),
            what: "data".into(),
            expected: format!("{end} bytes, as the header says"),
            found: format!("{data_len} bytes"),
        });
    }
    Ok(checked)
}
