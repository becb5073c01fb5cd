//! Writes GGUF version 3: head and offsets are known before the first byte is written, and data is
//! streamed tensor by tensor.

use super::file::{DEFAULT_ALIGNMENT, MAGIC};
use super::value::Value;
use crate::blocks::BlockType;
use crate::durable::{Sink, write_file};
use crate::error::{Error, Result};
use crate::progress::{Progress, Unit};
use std::path::Path;

/// The version written.
const VERSION: u32 = 3;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPlan {
    /// Its name in the file.
    pub name: String,
    /// Block type.
    pub kind: BlockType,
    /// Dimensions, outermost first; the last is a whole number of blocks.
    pub shape: Vec<usize>,
}

impl TensorPlan {
    /// Bytes of data.
    pub fn bytes(&self) -> u64 {
        let elements: usize = self.shape.iter().product();
        (elements / self.kind.elements() * self.kind.bytes()) as u64
    }
}

/// A GGUF file to be written: metadata and tensors in the order given.
#[derive(Clone, Debug, Default)]
pub struct GgufPlan {
    metadata: Vec<(String, Value)>,
    tensors: Vec<TensorPlan>,
}

impl GgufPlan {
    /// An empty file.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a metadata entry; a key given twice keeps its first place and last value.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        let (key, value) = (key.into(), value.into());
        match self.metadata.iter_mut().find(|(k, _)| *k == key) {
            Some((_, old)) => *old = value,
            None => self.metadata.push((key, value)),
        }
    }

    /// Adds a tensor.
    ///
    /// # Errors
    /// [`Error::Weight`] if its rows are not a whole number of blocks.
    pub fn add(&mut self, name: String, kind: BlockType, shape: Vec<usize>) -> Result<()> {
        let row = shape.last().copied().unwrap_or(0);
        if row == 0 || !row.is_multiple_of(kind.elements()) {
            return Err(Error::Weight {
                what: "row of blocks",
                expected: format!("a multiple of {} for {kind}", kind.elements()),
                found: format!("{row} in {name}"),
            });
        }
        self.tensors.push(TensorPlan { name, kind, shape });
        Ok(())
    }

    /// The tensors.
    pub fn tensors(&self) -> &[TensorPlan] {
        &self.tensors
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(TensorPlan::bytes).sum()
    }

    /// Header, metadata and tensor table, padded to the start of the data.
    pub fn head(&self) -> Vec<u8> {
        let mut head = MAGIC.to_vec();
        let string = |head: &mut Vec<u8>, s: &str| {
            head.extend((s.len() as u64).to_le_bytes());
            head.extend(s.as_bytes());
        };
        head.extend(VERSION.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut head, key);
            value.encode(&mut head);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            string(&mut head, &tensor.name);
            head.extend((tensor.shape.len() as u32).to_le_bytes());
            for &dim in tensor.shape.iter().rev() {
                head.extend((dim as u64).to_le_bytes());
            }
            head.extend(tensor.kind.id().to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset += tensor.bytes().next_multiple_of(DEFAULT_ALIGNMENT);
        }
        head.resize(head.len().next_multiple_of(DEFAULT_ALIGNMENT as usize), 0);
        head
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        let padded = |t: &TensorPlan| t.bytes().next_multiple_of(DEFAULT_ALIGNMENT);
        self.head().len() as u64 + self.tensors.iter().map(padded).sum::<u64>()
    }

    /// Writes the file durably: whole or not at all. `data` is called once per tensor, in
    /// order, and must write exactly the tensor's bytes.
    ///
    /// # Errors
    /// [`Error::Space`] or [`Error::Io`]; [`Error::Tensor`] if `data` wrote another length; errors of
    /// `data`.
    pub fn write(
        &self,
        path: &Path,
        progress: &dyn Progress,
        data: &mut dyn FnMut(&TensorPlan, &mut Sink) -> Result<()>,
    ) -> Result<()> {
        progress.begin("write", self.tensor_bytes(), Unit::Bytes);
        write_file(path, |sink| {
            sink.write(&self.head())?;
            for tensor in &self.tensors {
                let before = sink.written();
                data(tensor, sink)?;
                let written = sink.written() - before;
                if written != tensor.bytes() {
                    return Err(Error::Tensor {
                        path: path.into(),
                        tensor: tensor.name.clone(),
                        expected: format!("{} bytes to write", tensor.bytes()),
                        found: format!("{written} bytes"),
                    });
                }
                let padding = written.next_multiple_of(DEFAULT_ALIGNMENT) - written;
                sink.write(&[0; DEFAULT_ALIGNMENT as usize][..padding as usize])?;
                progress.advance(written);
            }
            Ok(())
        })?;
        progress.end();
        Ok(())
    }
}
