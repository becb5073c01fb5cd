//! Writes safetensors: the layout of all files is known before the first byte is written, and
//! data is streamed tensor by tensor.

use crate::durable::{
    Sink, check_space, parent, rename_folder, temporary_folder, write_bytes, write_file,
};
use crate::error::{Error, Result};
use crate::progress::{Progress, Unit};
use crate::safetensors::METADATA;
use crate::shards::{INDEX, SINGLE};
use bytes::Bytes;
use nq_model::DType;
use nq_model::names::natural_order;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Most bytes of data in one file, like the shards of Hugging Face's tools.
pub(crate) const MAX_SHARD: u64 = 5_000_000_000;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name in the file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of data.
    pub fn bytes(&self) -> u64 {
        let elements: usize = self.shape.iter().product();
        (elements * self.dtype.size()) as u64
    }
}

/// The distribution of a set of tensors over files.
#[derive(Clone, Debug)]
pub struct ShardLayout {
    files: Vec<FileLayout>,
}

#[derive(Clone, Debug)]
struct FileLayout {
    name: String,
    head: Vec<u8>, // length and header
    tensors: Vec<TensorSpec>,
}

impl ShardLayout {
    /// Lays out `tensors` in `model.safetensors`, or in shards of at most `max_shard` bytes
    /// each (a larger tensor gets one of its own). The result does not depend on the order
    /// given: shards follow the layers, and within a file wide types come first so
    /// that all data is aligned.
    pub fn new(
        mut tensors: Vec<TensorSpec>,
        metadata: &BTreeMap<String, String>,
        max_shard: u64,
    ) -> Self {
        tensors.sort_by(|a, b| natural_order(&a.name, &b.name));
        let mut shards = vec![Vec::new()];
        let mut filled = 0;
        for tensor in tensors {
            if filled > 0 && filled + tensor.bytes() > max_shard {
                shards.push(Vec::new());
                filled = 0;
            }
            filled += tensor.bytes();
            shards.last_mut().expect("never empty").push(tensor);
        }
        let n = shards.len();
        let name = |i: usize| match n {
            1 => SINGLE.to_owned(),
            _ => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        let file = |(i, tensors)| FileLayout::new(name(i), tensors, metadata);
        ShardLayout {
            files: shards.into_iter().enumerate().map(file).collect(),
        }
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        let tensors = self.files.iter().flat_map(|f| &f.tensors);
        tensors.map(TensorSpec::bytes).sum()
    }

    /// Bytes of all files, including headers.
    pub fn file_bytes(&self) -> u64 {
        let heads: usize = self.files.iter().map(|f| f.head.len()).sum();
        self.tensor_bytes() + heads as u64
    }

    /// Writes the files, and the index if there are several, into `folder`, durably.
    /// `data` is called once per tensor, in the order of the files, and must write
    /// exactly the tensor's bytes.
    ///
    /// # Errors
    /// [`Error::Space`] or [`Error::Io`]; [`Error::Tensor`] if `data` wrote another length; errors of
    /// `data`.
    pub fn write(
        &self,
        folder: &Path,
        progress: &dyn Progress,
        data: &mut dyn FnMut(&TensorSpec, &mut Sink) -> Result<()>,
    ) -> Result<()> {
        progress.begin("write", self.tensor_bytes(), Unit::Bytes);
        for file in &self.files {
            file.write(&folder.join(&file.name), progress, data)?;
        }
        if self.files.len() > 1 {
            write_bytes(&folder.join(INDEX), &self.index())?;
        }
        progress.end();
        Ok(())
    }

    fn index(&self) -> Vec<u8> {
        let mut map = BTreeMap::new();
        for file in &self.files {
            for tensor in &file.tensors {
                map.insert(&tensor.name, &file.name);
            }
        }
        let index = json!({
            "metadata": { "total_size": self.tensor_bytes() },
            "weight_map": map,
        });
        let mut text = serde_json::to_vec_pretty(&index).expect("string keys");
        text.push(b'\n');
        text
    }
}

impl FileLayout {
    fn new(
        name: String,
        mut tensors: Vec<TensorSpec>,
        metadata: &BTreeMap<String, String>,
    ) -> Self {
        tensors.sort_by_key(|t| std::cmp::Reverse(t.dtype.size())); // stable
        let mut header = Map::new();
        if !metadata.is_empty() {
            header.insert(METADATA.into(), json!(metadata));
        }
        let mut offset = 0;
        for t in &tensors {
            let end = offset + t.bytes();
            let info = json!({
                "dtype": t.dtype.name(), "shape": t.shape, "data_offsets": [offset, end],
            });
            header.insert(t.name.clone(), info);
            offset = end;
        }
        let mut json = serde_json::to_vec(&Value::Object(header)).expect("string keys");
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut head = (json.len() as u64).to_le_bytes().to_vec();
        head.append(&mut json);
        FileLayout {
            name,
            head,
            tensors,
        }
    }

    fn write(
        &self,
        path: &Path,
        progress: &dyn Progress,
        data: &mut dyn FnMut(&TensorSpec, &mut Sink) -> Result<()>,
    ) -> Result<()> {
        write_file(path, |sink| {
            sink.write(&self.head)?;
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
                progress.advance(written);
            }
            Ok(())
        })
    }
}

/// Writes `tensors` as the single file `path`, durably.
pub fn write_tensors(
    path: &Path,
    tensors: &[(String, crate::tensor::Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let by_name: BTreeMap<&str, _> = tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
    let specs = tensors.iter().map(|(name, t)| TensorSpec {
        name: name.clone(),
        dtype: t.dtype(),
        shape: t.shape().to_vec(),
    });
    let layout = ShardLayout::new(specs.collect(), metadata, u64::MAX);
    layout.files[0].write(path, &(), &mut |spec, sink| {
        sink.write(by_name[spec.name.as_str()].data())
    })
}

/// Writes a checkpoint folder, `files` by name and the tensors of `layout`, which appears at
/// `dest` whole or not at all.
///
/// # Errors
/// [`Error::Exists`] if `dest` exists; [`Error::Space`], checked before anything is written;
/// otherwise errors of [`ShardLayout::write`].
pub fn write_folder(
    dest: &Path,
    files: &BTreeMap<String, Bytes>,
    layout: &ShardLayout,
    progress: &dyn Progress,
    data: &mut dyn FnMut(&TensorSpec, &mut Sink) -> Result<()>,
) -> Result<()> {
    if std::fs::symlink_metadata(dest).is_ok() {
        return Err(Error::Exists {
            path: dest.into(),
            what: "already there".into(),
        });
    }
    let parent = parent(dest);
    let others: usize = files.values().map(Bytes::len).sum();
    check_space(&parent, layout.file_bytes() + others as u64)?;
    std::fs::create_dir_all(&parent).map_err(|e| Error::io(&parent, "create", e))?;
    let folder = temporary_folder(&parent)?;
    for (name, contents) in files {
        write_bytes(&folder.path().join(name), contents)?;
    }
    layout.write(folder.path(), progress, data)?;
    rename_folder(folder.path(), dest)
}
