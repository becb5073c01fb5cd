//! Reads one GGUF file: header, metadata and tensor table, fully checked in the mapped bytes, and
//! zero-copy views of its tensors. Arrays are not decoded until they are asked for.

use super::value::{Array, Value, ValueReader, malformed};
use crate::blocks::BlockType;
use crate::error::{Error, Result};
use crate::files::incomplete;
use crate::store::TensorEntry;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The first four bytes of a file.
pub const MAGIC: &[u8; 4] = b"GGUF";

/// Alignment of offsets if `general.alignment` is absent.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;

/// Alignments above this are rejected.
const MAX_ALIGNMENT: u64 = 1 << 20;

/// Most dimensions of a tensor.
const MAX_DIMS: u32 = 4;

/// Bytes of the shortest metadata entry: key length, type, a byte.
const MIN_ENTRY: u64 = 8 + 4 + 1;

/// Bytes of the shortest tensor description.
const MIN_TENSOR: u64 = 8 + 4 + 8 + 4 + 8;

/// An opened GGUF file. Every tensor's bytes are in the file, aligned, have the length given by its
/// shape and type, and do not overlap those of others.
#[derive(Clone, Debug)]
pub struct GgufFile {
    path: PathBuf,
    version: u32,
    alignment: u64,
    bytes: u64, // of the whole file
    data: Bytes,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorInfo>,
}

/// A tensor as described in the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Block type.
    pub kind: BlockType,
    /// Shape, outermost dimension first (files store the reverse).
    pub shape: Vec<usize>,
    range: Range<usize>, // within the data section
}

impl GgufFile {
    /// Parses `bytes`, the whole file; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other versions and byte orders; [`Error::Malformed`], naming
    /// the key, length or count that is wrong; [`Error::Tensor`] for a tensor of unknown
    /// type, absurd shape, or an offset that is misaligned, overlapping or out of range.
    pub fn parse(path: &Path, bytes: Bytes) -> Result<Self> {
        let mut reader = ValueReader::new(path, bytes.clone());
        let (version, tensors, entries) = header(path, &mut reader)?;
        let metadata = read_metadata(path, &mut reader, entries)?;
        let alignment = alignment(path, &metadata)?;
        let table = read_table(path, &mut reader, tensors)?;
        let start = (reader.position() as u64).next_multiple_of(alignment) as usize;
        let data = if table.is_empty() {
            Bytes::new()
        } else {
            bytes.slice(start.min(bytes.len())..)
        };
        let tensors = check_layout(
            path,
            table,
            alignment,
            data.len() as u64,
            bytes.len() as u64,
            start as u64,
        )?;
        Ok(GgufFile {
            path: path.into(),
            version,
            alignment,
            bytes: bytes.len() as u64,
            data,
            metadata,
            tensors,
        })
    }

    /// The file's path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// 2 or 3 (which do not differ in little-endian files).
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of tensor offsets, in bytes.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Size of the whole file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.bytes
    }

    /// All metadata by key.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// All tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// The bytes of a tensor of [`GgufFile::tensors`], as a view of the file.
    pub fn data(&self, info: &TensorInfo) -> Bytes {
        self.data.slice(info.range.clone())
    }

    /// Entries of all tensors, in name order.
    pub fn entries(&self) -> impl Iterator<Item = TensorEntry> {
        let file = self.path.file_name().unwrap_or_default();
        let file = file.to_string_lossy().into_owned();
        self.tensors.iter().map(move |(name, info)| TensorEntry {
            name: name.clone(),
            dtype: info.kind.name().into(),
            shape: info.shape.clone(),
            bytes: info.range.len() as u64,
            file: file.clone(),
        })
    }

    fn bad(&self, key: &str, expected: &str, found: String) -> Error {
        malformed(&self.path, key, expected.into(), found)
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(t) => Ok(Some(t)),
                None => Err(self.bad(key, expected, value.to_string())),
            },
        }
    }

    /// A non-negative integer of any width, if the key exists.
    ///
    /// # Errors
    /// [`Error::Malformed`] if it has another type.
    pub fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "a non-negative integer", Value::as_u64)
    }

    /// A finite float of either width, if the key exists.
    ///
    /// # Errors
    /// [`Error::Malformed`] if it has another type or is NaN or infinite.
    pub fn f64(&self, key: &str) -> Result<Option<f64>> {
        let finite = |v: &Value| v.as_f64().filter(|f| f.is_finite());
        self.typed(key, "a finite number", finite)
    }

    /// A boolean, if the key exists.
    ///
    /// # Errors
    /// [`Error::Malformed`] if it has another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A string, if the key exists.
    ///
    /// # Errors
    /// [`Error::Malformed`] if it has another type or is not UTF-8.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a UTF-8 string", Value::as_str)
    }

    /// An array, if the key exists.
    ///
    /// # Errors
    /// [`Error::Malformed`] if it has another type.
    pub fn array(&self, key: &str) -> Result<Option<&Array>> {
        self.typed(key, "an array", Value::as_array)
    }

    /// An array of strings, if the key exists.
    ///
    /// # Errors
    /// [`Error::Malformed`] if it has another type, or an element is not UTF-8.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        let Some(array) = self.array(key)? else {
            return Ok(None);
        };
        let Some(strings) = array.strings() else {
            return Err(self.bad(key, "an array of strings", array.to_string()));
        };
        let read = |(i, bytes)| {
            std::str::from_utf8(bytes)
                .map_err(|e| self.bad(key, "UTF-8 strings", format!("{e} in element {i}")))
        };
        strings
            .enumerate()
            .map(read)
            .collect::<Result<_>>()
            .map(Some)
    }

    /// Unwraps the result of a typed accessor of [`GgufFile`] for a required key.
    ///
    /// # Errors
    /// [`Error::Malformed`] if it is absent.
    pub fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.bad(key, "the key", "no such key".into()))
    }
}

/// Reads version, number of tensors, number of metadata entries.
fn header(path: &Path, reader: &mut ValueReader<'_>) -> Result<(u32, u64, u64)> {
    let magic = reader.take("magic", 4)?;
    if magic != MAGIC {
        let found = format!("{:?}", magic.escape_ascii().to_string());
        return Err(malformed(path, "magic", "\"GGUF\"".into(), found));
    }
    let version = reader.u32("version")?;
    let unsupported = |what: String, why: &str| Error::Unsupported {
        path: path.into(),
        what,
        why: why.into(),
    };
    match version {
        2 | 3 => {}
        1 => {
            return Err(unsupported(
                "GGUF version 1".into(),
                "nq reads versions 2 and 3",
            ));
        }
        v if (1..=3).contains(&v.swap_bytes()) => {
            let what = format!("big-endian GGUF version {}", v.swap_bytes());
            return Err(unsupported(what, "nq reads little-endian files"));
        }
        v => {
            let what = format!("GGUF version {v}");
            return Err(unsupported(what, "nq reads versions 2 and 3"));
        }
    }
    let tensors = reader.count("tensor count", MIN_TENSOR)?;
    let entries = reader.count("metadata count", MIN_ENTRY)?;
    Ok((version, tensors, entries))
}

fn read_metadata(
    path: &Path,
    reader: &mut ValueReader<'_>,
    entries: u64,
) -> Result<BTreeMap<String, Value>> {
    let mut metadata = BTreeMap::new();
    for i in 0..entries {
        let key = reader.name(&format!("key of metadata entry {i}"))?;
        let value = reader.value(&key)?;
        if metadata.insert(key.clone(), value).is_some() {
            let found = "this one twice".into();
            return Err(malformed(path, &key, "each key once".into(), found));
        }
    }
    Ok(metadata)
}

fn alignment(path: &Path, metadata: &BTreeMap<String, Value>) -> Result<u64> {
    const KEY: &str = "general.alignment";
    let Some(value) = metadata.get(KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value.as_u64() {
        Some(n) if n.is_power_of_two() && n <= MAX_ALIGNMENT => Ok(n),
        _ => Err(malformed(
            path,
            KEY,
            format!("a power of two up to {MAX_ALIGNMENT}"),
            value.to_string(),
        )),
    }
}

/// A tensor of the table before its position is checked.
struct UncheckedTensor {
    name: String,
    kind: BlockType,
    shape: Vec<usize>,
    bytes: u64,
    offset: u64,
}

fn read_table(
    path: &Path,
    reader: &mut ValueReader<'_>,
    count: u64,
) -> Result<Vec<UncheckedTensor>> {
    let mut table = Vec::with_capacity(count as usize); // at most the file's length / MIN_TENSOR
    for i in 0..count {
        let name = reader.name(&format!("name of tensor {i}"))?;
        let what = format!("description of tensor {name}");
        let error = |expected: String, found: String| Error::Tensor {
            path: path.into(),
            tensor: name.clone(),
            expected,
            found,
        };
        let dims = reader.u32(&what)?;
        if !(1..=MAX_DIMS).contains(&dims) {
            let found = format!("{dims} dimensions");
            return Err(error(format!("1 to {MAX_DIMS} dimensions"), found));
        }
        let mut shape = Vec::with_capacity(dims as usize);
        for _ in 0..dims {
            shape.push(reader.u64(&what)?);
        }
        let id = reader.u32(&what)?;
        let offset = reader.u64(&what)?;
        let Some(kind) = BlockType::from_id(id) else {
            let known: Vec<_> = BlockType::all().map(BlockType::name).collect();
            let expected = format!("a type among {}", known.join(", "));
            return Err(error(expected, format!("type number {id}")));
        };
        // Rows are whole blocks; the innermost dimension is stored first.
        if shape[0] == 0 || !shape[0].is_multiple_of(kind.elements() as u64) {
            let expected = format!("rows of a multiple of {} for {kind}", kind.elements());
            return Err(error(expected, format!("{} in a row", shape[0])));
        }
        let size = shape[1..]
            .iter()
            .try_fold(kind.row_bytes(shape[0]).unwrap_or(u64::MAX), |n, &d| {
                n.checked_mul(d)
            })
            .filter(|&n| n > 0 && i64::try_from(n).is_ok());
        shape.reverse();
        let Some(bytes) = size else {
            let expected = format!("1 to 2^63 bytes of {kind}");
            return Err(error(expected, format!("shape {shape:?}")));
        };
        let dim = |&d: &u64| usize::try_from(d).ok();
        let Some(shape) = shape.iter().map(dim).collect() else {
            let expected = "dimensions that this machine can address".into();
            return Err(error(expected, format!("shape {shape:?}")));
        };
        table.push(UncheckedTensor {
            name,
            kind,
            shape,
            bytes,
            offset,
        });
    }
    Ok(table)
}

/// Checks names and positions: aligned, within the data section of `length` bytes at `start` of `file` bytes,
/// one after another.
/// The format leaves nothing but alignment between tensors and after the last: if the space that a
/// tensor takes differs from its size, its type or shape is wrong.
fn check_layout(
    path: &Path,
    mut table: Vec<UncheckedTensor>,
    alignment: u64,
    length: u64,
    file: u64,
    start: u64,
) -> Result<BTreeMap<String, TensorInfo>> {
    table.sort_by_key(|t| t.offset);
    // A file whose tensors follow each other as they must, but go on after its end, was cut off.
    let end = table.iter().try_fold(0u64, |due, t| {
        let follows = t.offset == due.checked_next_multiple_of(alignment)?;
        t.offset.checked_add(t.bytes).filter(|_| follows)
    });
    if let Some(end) = end.filter(|&end| end > length) {
        return Err(incomplete(path, start.saturating_add(end), file));
    }
    let mut tensors = BTreeMap::new();
    let (mut end, mut next) = (0, 0);
    let mut previous = String::new();
    for raw in table {
        let error = |expected: String, found: String| Error::Tensor {
            path: path.into(),
            tensor: raw.name.clone(),
            expected,
            found,
        };
        let offset = raw.offset;
        if !offset.is_multiple_of(alignment) {
            let expected = format!("an offset that is a multiple of {alignment}");
            return Err(error(expected, offset.to_string()));
        }
        if offset < end {
            return Err(error(
                format!("an offset of at least {end}, where {previous} ends"),
                offset.to_string(),
            ));
        }
        end = match offset.checked_add(raw.bytes).filter(|&e| e <= length) {
            Some(end) => end,
            None => {
                return Err(error(
                    format!("{} bytes within the file's {length} of data", raw.bytes),
                    format!("them at offset {offset}"),
                ));
            }
        };
        let due = next;
        next = end.next_multiple_of(alignment);
        if offset != due {
            let after = match previous.as_str() {
                "" => "where data starts".into(),
                name => format!("where {name} ends"),
            };
            return Err(error(
                format!("an offset of {due}, {after}"),
                offset.to_string(),
            ));
        }
        previous.clone_from(&raw.name);
        let info = TensorInfo {
            kind: raw.kind,
            shape: raw.shape,
            range: offset as usize..end as usize, // at most length, which is a usize
        };
        if tensors.insert(raw.name.clone(), info).is_some() {
            return Err(error("each name once".into(), "this one twice".into()));
        }
    }
    if length > next {
        let expected = format!("{next} bytes, where {previous} ends");
        return Err(malformed(path, "data", expected, length.to_string()));
    }
    Ok(tensors)
}
