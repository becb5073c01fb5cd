//! Reads texts from Parquet files, the hub's format for data sets.
//!
//! The `parquet` crate does the reading. It panics on some damaged files (in version 60, if a
//! page's encoded lengths are wrong), which must not end the program: its panics are caught
//! here and become errors, and their messages are not printed.

use crate::error::{Error, Result};
use bytes::Bytes;
use parquet::column::reader::ColumnReader;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::Path;
use std::sync::Once;

/// Number of values decoded at a time.
const BATCH: usize = 1024;

thread_local! {
    /// True while the crate reads, whose panics nobody is to see.
    static READING: Cell<bool> = const { Cell::new(false) };
}

/// The values of the string column `column`, nulls as empty strings. `path` names the file in
/// messages. Columns are uncompressed or snappy, as pyarrow writes them by default.
///
/// # Errors
/// [`Error::Malformed`], saying what is broken or compressed differently, or that `column` is
/// absent or does not hold flat strings.
pub fn strings(path: &Path, file: Bytes, column: &str) -> Result<Vec<String>> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let hook = take_hook();
        set_hook(Box::new(move |panic| {
            if !READING.get() {
                hook(panic);
            }
        }));
    });
    READING.set(true);
    // Nothing that the closure changes outlives it.
    let found = catch_unwind(AssertUnwindSafe(|| read(path, file, column)));
    READING.set(false);
    found.unwrap_or_else(|_| {
        Err(Error::Malformed {
            path: path.into(),
            what: format!("column {column}"),
            expected: "the pages of a Parquet file".into(),
            found: "damaged ones".into(),
        })
    })
}

fn read(path: &Path, file: Bytes, column: &str) -> Result<Vec<String>> {
    let malformed = |what: &str, expected: String, found: String| Error::Malformed {
        path: path.into(),
        what: what.into(),
        expected,
        found,
    };
    let wrap = |e: ParquetError| {
        let expected = "a Parquet file, its columns snappy or uncompressed".into();
        malformed("contents", expected, e.to_string())
    };
    let reader = SerializedFileReader::new(file).map_err(wrap)?;
    let metadata = reader.metadata().file_metadata();
    let columns = metadata.schema_descr().columns();
    let Some(index) = columns.iter().position(|c| c.path().parts() == [column]) else {
        let found: Vec<String> = columns.iter().map(|c| c.path().string()).collect();
        return Err(malformed(
            "schema",
            format!("a column {column}"),
            found.join(", "),
        ));
    };
    let most = columns[index].max_def_level();
    let mut values = Vec::new();
    for group in 0..reader.num_row_groups() {
        let group = reader.get_row_group(group).map_err(wrap)?;
        let chunk = group.get_column_reader(index).map_err(wrap)?;
        let ColumnReader::ByteArrayColumnReader(mut chunk) = chunk else {
            let kind = columns[index].physical_type();
            return Err(malformed(
                &format!("column {column}"),
                "strings".into(),
                format!("values of type {kind}"),
            ));
        };
        loop {
            let (mut present, mut levels) = (Vec::new(), Vec::new());
            let (records, ..) = chunk
                .read_records(BATCH, Some(&mut levels), None, &mut present)
                .map_err(wrap)?;
            if records == 0 {
                break;
            }
            // A column whose schema has no nulls has no levels.
            let mut present = present.iter();
            for i in 0..records {
                let value = if levels.get(i).is_none_or(|&l| l == most) {
                    present.next().map_or(&[][..], |v| v.data())
                } else {
                    &[]
                };
                values.push(std::str::from_utf8(value).map(str::to_owned).map_err(|e| {
                    let found = format!("{e} in row {}", values.len());
                    malformed(&format!("column {column}"), "UTF-8".into(), found)
                })?);
            }
        }
    }
    let rows = metadata.num_rows();
    if rows != values.len() as i64 {
        return Err(malformed(
            &format!("column {column}"),
            format!("{rows} values"),
            values.len().to_string(),
        ));
    }
    Ok(values)
}
