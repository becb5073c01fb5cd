//! The tower that sees images in a GGUF file of its own, an `mmproj`, beside that of the text model.

use super::file::GgufFile;
use super::value::malformed;
use crate::blocks::{BlockType, BlockWeight};
use crate::error::{Error, Result};
use crate::exactness::Exactness;
use crate::files::Files;
use crate::left_over::LeftOver;
use crate::scheme::Scheme;
use crate::store::{Overlay, TensorEntry, WeightStore};
use crate::stored::StoredWeight;
use crate::tensor::Tensor;
use crate::vision::{MOST_BLOCKS, TOWERS};
use crate::weight::{QuantizedWeight, Weight};
use bytes::Bytes;
use nq_model::vision::{PATCH_EMBED, gguf_name};
use nq_model::{Architecture, DType, Dims, tensor_name};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The Linear that reads patches, of the first frame and of the second.
pub(crate) const PATCHES: [&str; 2] = ["v.patch_embd.weight", "v.patch_embd.weight.1"];

/// The kind of tower that nq runs, as files name it.
pub(crate) const PROJECTOR: &str = "qwen3vl_merger";

/// The file for the tower of the text model in the GGUF file `model`.
pub(crate) fn beside(model: &Path) -> PathBuf {
    let name = model.file_name().map(|name| name.to_string_lossy());
    model.with_file_name(format!("mmproj-{}", name.unwrap_or_default()))
}

/// The one of `files`, names and bytes, that is to be read beside the text model `model`, if they hold towers: that of
/// the same name, otherwise the smallest of 16-bit floats, otherwise the smallest.
pub(crate) fn choose<'a>(model: &str, files: &[(&'a str, u64)]) -> Option<&'a str> {
    let own = beside(Path::new(model));
    let rank = |(name, bytes): &&(&'a str, u64)| {
        let sixteen = name.to_ascii_lowercase().contains("f16");
        (Path::new(name) != own, !sixteen, *bytes)
    };
    let towers = files.iter().filter(|(name, _)| is_mmproj(name));
    towers.min_by_key(rank).map(|(name, _)| *name)
}

/// True for the name of a file that holds a tower alone, as other programs name them.
pub(crate) fn is_mmproj(name: &str) -> bool {
    name.ends_with(".gguf") && name.to_ascii_lowercase().contains("mmproj")
}

/// The file with the tower of the text model in the file `model` of `files`, if there is one that nq runs; what else lies
/// there is said in `left`.
pub(super) fn find(
    files: &Files,
    model: &str,
    architecture: &Architecture,
    left: &mut Vec<LeftOver>,
) -> Result<Option<GgufFile>> {
    let mut names = files.names()?;
    names.retain(|name| is_mmproj(name));
    let sized = |name: &'_ String| -> Result<u64> {
        Ok(files.get(name)?.map_or(0, |bytes| bytes.len() as u64))
    };
    let sizes = names.iter().map(sized).collect::<Result<Vec<u64>>>()?;
    let sized: Vec<(&str, u64)> = names.iter().map(String::as_str).zip(sizes).collect();
    let Some(name) = choose(model, &sized) else {
        return Ok(None);
    };
    let others = names.iter().filter(|other| *other != name);
    left.extend(others.map(|other| LeftOver::new(other, "another tower is read")));
    let mut leave = |name: &str, why: &str| {
        left.push(LeftOver::new(name, why));
        Ok(None)
    };
    if architecture.also.is_empty() {
        return leave(name, TOWERS);
    }
    let file = GgufFile::parse(&files.path(name), files.require(name)?)?;
    match file.str("clip.projector_type")? {
        Some(PROJECTOR) => Ok(Some(file)),
        _ => leave(name, TOWERS),
    }
}

/// The blocks behind which mergers make rows.
fn deepstack(file: &GgufFile) -> Result<Vec<usize>> {
    const KEY: &str = "clip.vision.is_deepstack_layers";
    let Some(layers) = file.array(KEY)? else {
        return Ok(Vec::new());
    };
    match layers.bools().filter(|_| layers.len() <= MOST_BLOCKS) {
        Some(layers) => {
            let deep = layers.enumerate().filter(|(_, is)| *is);
            Ok(deep.map(|(block, _)| block).collect())
        }
        None => {
            let expected = format!("truth values of at most {MOST_BLOCKS} blocks");
            let found = format!("an array of {}", layers.len());
            Err(malformed(file.path(), KEY, expected, found))
        }
    }
}

/// Adds to `config`, the config.json of the text model, what the `file` says of its tower; returns the
/// preprocessor_config.json.
pub(super) fn describe(
    file: &GgufFile,
    tokens: Option<Vec<&str>>,
    config: &mut Map<String, Value>,
) -> Result<Value> {
    let number = |name: &str| -> Result<u64> {
        let key = format!("clip.vision.{name}");
        file.required(&key, file.u64(&key)?)
    };
    // Files are written with the epsilon of the text model, which is the same.
    const EPSILON: &str = "clip.vision.attention.layer_norm_epsilon";
    if let Some(eps) = file.f64(EPSILON)?.filter(|eps| (eps - 1e-6).abs() > 1e-8) {
        return Err(Error::Unsupported {
            path: file.path().into(),
            what: format!("{EPSILON} {eps}"),
            why: "the norms of towers have an epsilon of 1e-6".into(),
        });
    }
    let shape = |name: &str| file.tensors().get(name).map(|info| info.shape.clone());
    let positions = shape("v.position_embd.weight").and_then(|s| s.first().copied());
    config.insert(
        "vision_config".into(),
        json!({
            "depth": number("block_count")?,
            "hidden_size": number("embedding_length")?,
            "intermediate_size": number("feed_forward_length")?,
            "num_heads": number("attention.head_count")?,
            "patch_size": number("patch_size")?,
            "temporal_patch_size": PATCHES.iter().filter(|name| shape(name).is_some()).count(),
            "spatial_merge_size": number("spatial_merge_size")?,
            "num_position_embeddings": positions,
            "out_hidden_size": number("projection_dim")?,
            "deepstack_visual_indexes": deepstack(file)?,
        }),
    );
    let id = |token: &str| tokens.as_ref()?.iter().position(|t| *t == token);
    for (key, token) in [
        ("image_token_id", "<|image_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ] {
        let Some(id) = id(token) else {
            return Err(Error::Unsupported {
                path: file.path().into(),
                what: format!("{key} of a model whose tokenizer has no {token}"),
                why: "no token stands for its images".into(),
            });
        };
        config.insert(key.into(), id.into());
    }
    let values = |name: &str| -> Result<Value> {
        let values = file.array(&format!("clip.vision.{name}"))?;
        let values = values.and_then(|values| values.f32s());
        Ok(values.map(|v| v.collect::<Vec<f32>>()).into())
    };
    let mut pixels =
        json!({ "image_mean": values("image_mean")?, "image_std": values("image_std")? });
    for (key, said) in [
        ("min_pixels", "image_min_pixels"),
        ("max_pixels", "image_max_pixels"),
    ] {
        if let Some(n) = file.u64(&format!("clip.vision.{said}"))? {
            pixels[key] = n.into();
        }
    }
    Ok(pixels)
}

/// The store of a text model with the tower of another file.
pub(super) struct WithTower {
    inner: Box<dyn WeightStore>,
    file: GgufFile,
    deepstack: Vec<usize>,
}

impl WithTower {
    pub(super) fn over(
        inner: Box<dyn WeightStore>,
        file: GgufFile,
    ) -> Result<Box<dyn WeightStore>> {
        let deepstack = deepstack(&file)?;
        Ok(Box::new(WithTower {
            inner,
            file,
            deepstack,
        }))
    }

    /// The tensor of the file that holds a parameter; `None` for those of the text model.
    fn stored_name(&self, name: &str) -> Option<String> {
        gguf_name(name, &self.deepstack).map(|stored| tensor_name(&stored))
    }

    fn error(&self, tensor: &str, expected: String, found: String) -> Error {
        Error::Tensor {
            path: self.file.path().into(),
            tensor: tensor.into(),
            expected,
            found,
        }
    }

    /// The type and bytes of a tensor, which must have this shape.
    fn require(&self, stored: &str, shape: &[usize]) -> Result<(BlockType, Bytes)> {
        let expected = || format!("shape {shape:?}");
        match self.file.tensors().get(stored) {
            None => Err(self.error(stored, expected(), "no such tensor".into())),
            Some(info) if info.shape != shape => {
                let found = format!("{} {:?}", info.kind, info.shape);
                Err(self.error(stored, expected(), found))
            }
            Some(info) => Ok((info.kind, self.file.data(info))),
        }
    }

    /// The same of floats.
    fn floats(&self, stored: &str, shape: &[usize]) -> Result<(DType, Bytes)> {
        let (kind, bytes) = self.require(stored, shape)?;
        match kind.float() {
            Some(dtype) => Ok((dtype, bytes)),
            None => Err(self.error(stored, "F32, F16 or BF16".into(), kind.name().into())),
        }
    }

    /// The Linear that reads patches: its inputs are those of each channel, frame by frame, where the file has frame by
    /// frame those of each channel.
    fn patches(&self, dims: Dims) -> Result<Weight> {
        let there = |name: &&&str| self.file.tensors().contains_key(**name);
        let frames: Vec<&str> = PATCHES.iter().filter(there).copied().collect();
        let Some(info) = frames
            .first()
            .and_then(|name| self.file.tensors().get(*name))
        else {
            let expected = format!("shape of {} values", dims.elements());
            return Err(self.error(PATCHES[0], expected, "no such tensor".into()));
        };
        let shape = info.shape.clone();
        let elements = shape
            .iter()
            .try_fold(frames.len(), |n, d| n.checked_mul(*d));
        let [rows, _, height, width] = shape[..] else {
            let expected = "[hidden, channels, rows, columns]".into();
            return Err(self.error(frames[0], expected, format!("{shape:?}")));
        };
        if rows != dims.rows || elements != Some(dims.elements()) {
            let expected = format!("{} rows, {} values", dims.rows, dims.elements());
            return Err(self.error(frames[0], expected, format!("{shape:?}")));
        }
        let read = |name: &&str| self.floats(name, &shape);
        let frames: Vec<(DType, Bytes)> = frames.iter().map(read).collect::<Result<_>>()?;
        let dtype = frames[0].0;
        if let Some((other, _)) = frames.iter().find(|(other, _)| *other != dtype) {
            return Err(self.error(PATCHES[1], dtype.to_string(), other.to_string()));
        }
        let plane = height * width * dtype.size();
        let mut bytes = Vec::with_capacity(dims.elements() * dtype.size());
        for at in (0..frames[0].1.len()).step_by(plane.max(1)) {
            for (_, frame) in &frames {
                bytes.extend_from_slice(&frame[at..at + plane]);
            }
        }
        let matrix = Tensor::new(dtype, vec![dims.rows, dims.cols], bytes.into());
        Ok(Weight::Dense(matrix?))
    }
}

impl Overlay for WithTower {
    fn inner(&self) -> &dyn WeightStore {
        self.inner.as_ref()
    }

    fn contains(&self, name: &str) -> bool {
        match self.stored_name(name) {
            Some(stored) => self.file.tensors().contains_key(&stored),
            None => self.inner.contains(name),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        match self.stored_name(name) {
            Some(stored) => {
                let (dtype, bytes) = self.floats(&stored, &[len])?;
                Tensor::new(dtype, vec![len], bytes)
            }
            None => self.inner.vector(name, len),
        }
    }

    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        match self.stored_name(name) {
            Some(_) => None,
            None => self.inner.scheme_in_levels(name),
        }
    }

    fn matrix_in_codes(&self, name: &str, dims: Dims) -> Result<Weight> {
        match self.stored_name(name) {
            Some(_) => Overlay::matrix(self, name, dims),
            None => self.inner.matrix_in_codes(name, dims),
        }
    }

    fn matrix_in_levels(&self, name: &str, dims: Dims) -> Result<Weight> {
        match self.stored_name(name) {
            Some(_) => Overlay::matrix(self, name, dims),
            None => self.inner.matrix_in_levels(name, dims),
        }
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        let Some(stored) = self.stored_name(name) else {
            return self.inner.matrix(name, dims);
        };
        if name == PATCH_EMBED {
            return self.patches(dims);
        }
        let (kind, bytes) = self.require(&stored, &[dims.rows, dims.cols])?;
        let weight = match kind.float() {
            Some(dtype) => Tensor::new(dtype, vec![dims.rows, dims.cols], bytes).map(Weight::Dense),
            None => BlockWeight::new(kind, dims, bytes)
                .and_then(|blocks| blocks.to_affine())
                .map(|affine| Weight::Quantized(QuantizedWeight::Affine(affine))),
        };
        weight.map_err(|e| e.in_tensor(self.file.path(), &stored))
    }

    fn stored(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        match self.stored_name(name) {
            Some(_) => Overlay::matrix(self, name, dims).map(StoredWeight::Canonical),
            None => self.inner.stored(name, dims),
        }
    }

    fn sources(&self, name: &str) -> Vec<String> {
        match self.stored_name(name) {
            Some(_) if name == PATCH_EMBED => PATCHES.map(String::from).to_vec(),
            Some(stored) => vec![stored],
            None => self.inner.sources(name),
        }
    }

    fn exactness(&self, name: &str) -> Exactness {
        match self.stored_name(name) {
            Some(_) => Exactness::Exact,
            None => self.inner.exactness(name),
        }
    }

    fn entries(&self) -> Vec<TensorEntry> {
        let mut all = self.inner.entries();
        all.extend(self.file.entries());
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    fn file_bytes(&self) -> u64 {
        self.inner.file_bytes() + self.file.file_bytes()
    }

    fn gguf_file(&self) -> Option<&Path> {
        self.inner.gguf_file()
    }
}
