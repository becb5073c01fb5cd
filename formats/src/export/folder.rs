//! A Hugging Face folder of packed Linears: the common part of compressed-tensors, GPTQ and AWQ.
//!
//! The Linears of the layers are packed in the layout of the format; norms, embedding and head are
//! written unquantized in the model's own type, as the loaders of these formats require.

use super::compressed_tensors;
use super::engines;
use super::hybrid::{self, AsPublished};
use super::options::OTHERWISE;
use super::packing::{Linear, LinearScheme, PackedTensor, Packing, float_bytes};
use super::report::{Change, ExportReport, Exported};
use crate::checkpoint::Checkpoint;
use crate::durable::{
    check_space, parent, rename_folder, sync_folder, temporary_folder, write_bytes,
};
use crate::error::{Error, Result};
use crate::exactness::Exactness;
use crate::experts::Recent;
use crate::files::CONFIG;
use crate::nq::copy_files;
use crate::object::json_object;
use crate::progress::Progress;
use crate::serialize::{MAX_SHARD, ShardLayout, TensorSpec};
use crate::shards::{PREFIX, TEXT_PREFIX};
use crate::store::WeightStore;
use crate::stored::StoredWeight;
use crate::synth::stored_shape;
use crate::units::human_bytes;
use crate::weight::{AffineWeight, QuantizedWeight, Weight};
use nq_model::names::{
    Shape, expert_name, is_kept, is_layer_linear, layer_vector, stack, tensor_name,
};
use nq_model::vision::{PATCH_EMBED, POSITIONS, TowerParameter, VisionConfig};
use nq_model::{DType, Dims, ModelConfig};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// The type of unquantized parameters in the folders of `checkpoint`.
pub(super) fn dense_type(checkpoint: &Checkpoint) -> DType {
    match checkpoint.config().dtype {
        Some(t @ (DType::F16 | DType::F32)) => t,
        _ => DType::BF16,
    }
}

/// A tensor to be written and its source.
enum TensorSource {
    Dense(Origin),
    Packed(Origin, PackedTensor),
}

/// A parameter, or one expert's part of a stack.
#[derive(Clone)]
struct Origin {
    /// Its name in the store.
    parameter: String,
    shape: Shape,
    /// Its rows in the parameter: all of them, unless it is a stack.
    rows: Range<usize>,
}

impl Origin {
    fn dims(&self) -> Dims {
        match self.shape {
            Shape::Matrix(rows, cols) => Dims::new(rows, cols),
            Shape::Vector(len) => Dims::new(1, len),
        }
    }

    /// Dimensions of the tensor written.
    fn shape(&self) -> Vec<usize> {
        match self.shape {
            Shape::Matrix(_, cols) => vec![self.rows.len(), cols],
            Shape::Vector(len) => vec![len],
        }
    }

    /// The weights written for the parameter `name`, by their names in the folder.
    fn of(name: &str, dims: Dims, config: &ModelConfig) -> Vec<(String, Origin)> {
        let origin = |rows| Origin {
            parameter: name.into(),
            shape: Shape::Matrix(dims.rows, dims.cols),
            rows,
        };
        let Some(linear) = stack(name) else {
            return vec![(name.into(), origin(0..dims.rows))];
        };
        let count = linear.copies(config);
        let each = dims.rows / count.max(1);
        let expert = |e: usize| {
            let name = expert_name(name, e);
            (name, origin(e * each..(e + 1) * each))
        };
        (0..count).map(expert).collect()
    }
}

pub(super) fn affine(weight: &Weight) -> Option<&AffineWeight> {
    match weight {
        Weight::Quantized(QuantizedWeight::Affine(a)) => Some(a),
        _ => None,
    }
}

/// Writes `checkpoint` as the folder `out`, packed by `packing`: whole or not at all.
pub(super) fn export(
    checkpoint: &Checkpoint,
    out: &Path,
    packing: &Packing,
    progress: &dyn Progress,
) -> Result<ExportReport> {
    let config = checkpoint.config();
    let root = checkpoint.files().root();
    let store = AsPublished::new(checkpoint.store(), config, &root);
    let mut plan = FolderPlan {
        out,
        checkpoint,
        store: &store,
        packing,
        dense: dense_type(checkpoint),
        sources: BTreeMap::new(),
        specs: Vec::new(),
        linears: Vec::new(),
        widened: 0,
        report: ExportReport::default(),
    };
    for (name, shape) in hybrid::parameters_of(config) {
        match shape {
            Shape::Vector(len) => {
                // Rates of decay are published in more bits than weights.
                let dtype = match layer_vector(&name) {
                    Some(_) => store.vector(&name, len)?.dtype(),
                    None => plan.dense,
                };
                let as_stored = stored_shape(&name, shape, config);
                let origin = Origin {
                    parameter: name.clone(),
                    shape,
                    rows: 0..1,
                };
                let source = TensorSource::Dense(origin);
                plan.put(tensor_name(&name), dtype, as_stored, source);
            }
            Shape::Matrix(rows, cols) => plan.put_matrix(name, Dims::new(rows, cols))?,
        }
    }
    plan.check_quantized()?;
    if let Some(vision) = checkpoint.vision() {
        plan.add_tower(vision)?;
    }
    plan.write(progress)
}

/// The planned contents of a folder.
struct FolderPlan<'a> {
    out: &'a Path,
    checkpoint: &'a Checkpoint,
    /// Its parameters as folders hold them.
    store: &'a dyn WeightStore,
    packing: &'a Packing,
    /// Type of unquantized parameters.
    dense: DType,
    /// The source of each tensor, by name.
    sources: BTreeMap<String, TensorSource>,
    specs: Vec<TensorSpec>,
    linears: Vec<Linear>,
    /// Bytes that unquantized matrices gain.
    widened: u64,
    report: ExportReport,
}

impl FolderPlan<'_> {
    fn unsupported(&self, what: String, why: String) -> Error {
        Error::Unsupported {
            path: self.out.into(),
            what,
            why,
        }
    }

    /// Adds the tensor `name`; returns its bytes.
    fn put(&mut self, name: String, dtype: DType, shape: Vec<usize>, source: TensorSource) -> u64 {
        let spec = TensorSpec { name, dtype, shape };
        let bytes = spec.bytes();
        self.sources.insert(spec.name.clone(), source);
        self.specs.push(spec);
        bytes
    }

    fn put_dense(&mut self, name: &str, origin: Origin) -> u64 {
        let shape = origin.shape();
        self.put(
            tensor_name(name),
            self.dense,
            shape,
            TensorSource::Dense(origin),
        )
    }

    /// Adds a matrix, or each expert's of a stack: packed if it is a quantized Linear of a layer.
    fn put_matrix(&mut self, name: String, dims: Dims) -> Result<()> {
        let store = self.store;
        let weight = store.matrix(&name, dims)?;
        let linear = is_layer_linear(&name) || hybrid::is_fused_linear(&name);
        let packs = linear && affine(&weight).is_some();
        let (mut kept, mut bytes) = (Exactness::Exact, 0);
        for (own, origin) in Origin::of(&name, dims, self.checkpoint.config()) {
            let weight = if origin.rows.len() == dims.rows {
                weight.clone()
            } else {
                weight.rows(origin.rows.clone())
            };
            let packed = affine(&weight).filter(|_| packs);
            let (how, size) = match packed {
                Some(a) => self.put_packed(&own, &origin, a)?,
                None => self.put_unpacked(&own, origin, &weight),
            };
            bytes += size;
            if how != Exactness::Exact {
                kept = how;
            }
            if linear || is_kept(&name) || hybrid::is_fused_kept(&name) {
                self.linears.push(Linear {
                    name: own,
                    scheme: packed.map(LinearScheme::of),
                });
            }
        }
        self.report.weights.push(Exported {
            from: store.stored(&name, dims)?.scheme_name(),
            to: match affine(&weight).filter(|_| packs) {
                Some(a) => a.scheme().to_string(),
                None => self.dense.to_string(),
            },
            change: Change::Kept(kept),
            bytes,
            name,
        });
        Ok(())
    }

    /// Adds a matrix unquantized; returns how exactly it is stored, and its bytes.
    fn put_unpacked(&mut self, name: &str, origin: Origin, weight: &Weight) -> (Exactness, u64) {
        let bytes = self.put_dense(name, origin);
        if matches!(weight, Weight::Dense(t) if t.dtype() == self.dense) {
            return (Exactness::Exact, bytes);
        }
        self.widened += bytes - (weight.bytes() as u64).min(bytes);
        (Exactness::ValuesRounded(self.dense), bytes)
    }

    /// Adds the tensors of a packed Linear; returns how exactly they store it, and their bytes.
    fn put_packed(
        &mut self,
        name: &str,
        origin: &Origin,
        a: &AffineWeight,
    ) -> Result<(Exactness, u64)> {
        let kept = self.packing.fits(a, self.dense).map_err(|why| {
            let what = format!("{name} ({}) in {}", a.scheme(), self.packing.format);
            self.unsupported(what, format!("{why}; {OTHERWISE}"))
        })?;
        let mut bytes = 0;
        for part in (self.packing.parts)(a, self.dense) {
            let (suffix, dtype, shape) = (part.suffix, part.dtype, part.shape.clone());
            let source = TensorSource::Packed(origin.clone(), part);
            bytes += self.put(format!("{name}.{suffix}"), dtype, shape, source);
        }
        let kept = match kept {
            Exactness::Exact => self.store.exactness(&origin.parameter),
            rounded => rounded,
        };
        Ok((kept, bytes))
    }

    /// Makes the plan of a text model that of a model that sees, with the tower as the source has it.
    fn add_tower(&mut self, vision: &VisionConfig) -> Result<()> {
        let whole = |name: &str| match name.strip_prefix(PREFIX) {
            Some(rest) => format!("{TEXT_PREFIX}{rest}"),
            None => name.into(),
        };
        let sources = std::mem::take(&mut self.sources).into_iter();
        self.sources = sources
            .map(|(name, source)| (whole(&name), source))
            .collect();
        let specs = self.specs.iter_mut().map(|spec| &mut spec.name);
        let linears = self.linears.iter_mut().map(|linear| &mut linear.name);
        specs.chain(linears).for_each(|name| *name = whole(name));
        for TowerParameter { name, shape } in vision.parameters() {
            let (dtype, rows, stored_as) = match shape {
                Shape::Vector(len) => (self.store.vector(&name, len)?.dtype(), 1, shape.dims()),
                Shape::Matrix(rows, cols) => {
                    let dtype = match self.store.matrix(&name, Dims::new(rows, cols))? {
                        Weight::Dense(tensor) => tensor.dtype(),
                        Weight::Quantized(_) => self.dense,
                    };
                    match name == PATCH_EMBED {
                        true => (dtype, rows, vision.patch_kernel().to_vec()),
                        false => (dtype, rows, shape.dims()),
                    }
                }
            };
            if stored_as.len() == 2 && name != POSITIONS {
                let (name, scheme) = (name.clone(), None);
                self.linears.push(Linear { name, scheme });
            }
            let rows = 0..rows;
            let tensor = tensor_name(&name);
            let parameter = name;
            let origin = Origin {
                parameter,
                shape,
                rows,
            };
            self.put(tensor, dtype, stored_as, TensorSource::Dense(origin));
        }
        Ok(())
    }

    /// # Errors
    /// [`Error::Unsupported`] if there is nothing to pack.
    fn check_quantized(&self) -> Result<()> {
        if self.linears.iter().any(|l| l.scheme.is_some()) {
            return Ok(());
        }
        let store = self.checkpoint.store();
        let (what, why) = match store.quantization() {
            None => (
                "an unquantized model".to_owned(),
                "its Linears have no integer codes; quantize the model first",
            ),
            Some(_) => (
                store.format().to_string(),
                "its Linears have no integer codes; --requantize gives them some",
            ),
        };
        let what = format!("{what} in {}", self.packing.format);
        Err(self.unsupported(what, why.into()))
    }

    /// Writes a temporary folder, then moves it into place.
    fn write(mut self, progress: &dyn Progress) -> Result<ExportReport> {
        let (checkpoint, packing) = (self.checkpoint, self.packing);
        let (description, extra) = (packing.describe)(&self.linears)
            .map_err(|why| self.unsupported(format!("this mix in {}", packing.format), why))?;
        let specs = std::mem::take(&mut self.specs);
        let layout = ShardLayout::new(specs, &[("format".into(), "pt".into())].into(), MAX_SHARD);
        let folder = parent(self.out);
        check_space(&folder, layout.file_bytes())?;
        let staging = temporary_folder(&folder)?;
        let new = staging.path().join("folder");
        std::fs::create_dir(&new).map_err(|e| Error::io(&new, "create", e))?;
        let store = self.store;
        let (mut weights, mut stored) = (Recent::default(), Recent::default());
        layout.write(
            &new,
            progress,
            &mut |spec, sink| match &self.sources[&spec.name] {
                TensorSource::Dense(origin) => {
                    sink.write(&dense_bytes(store, origin, spec.dtype, &mut stored)?)
                }
                TensorSource::Packed(origin, part) => {
                    let read = || store.matrix(&origin.parameter, origin.dims());
                    let whole = weights.get(&origin.parameter, read)?;
                    let weight = whole.rows(origin.rows.clone());
                    let affine = affine(&weight).expect("it was one when the layout was made");
                    sink.write(&(packing.pack)(affine, part))
                }
            },
        )?;
        copy_files(checkpoint.files(), &new)?;
        let config = config_json(checkpoint, self.dense, description)?;
        write_json(&new.join(CONFIG), &config)?;
        for (name, json) in extra {
            write_json(&new.join(name), &json)?;
        }
        sync_folder(&new)?;
        rename_folder(&new, self.out)?;
        if self.widened > 0 {
            self.report.notes.push(format!(
                "embedding and head are {}, as loaders of {} need them: {} more",
                self.dense,
                packing.format,
                human_bytes(self.widened),
            ));
        }
        let mut schemes: Vec<(usize, bool)> = Vec::new();
        for scheme in self.linears.iter().filter_map(|l| l.scheme) {
            let scheme = (scheme.bits, scheme.symmetric);
            if !schemes.contains(&scheme) {
                schemes.push(scheme);
            }
        }
        let engines = match checkpoint.config().delta {
            None => engines::notes(packing.format, &schemes),
            Some(_) if packing.format == compressed_tensors::PACKING.format => {
                vec!["loads in transformers 5.24 (tried with symmetric Linears of 8 bits)".into()]
            }
            Some(_) => vec!["not tried in other engines with a model of this kind".into()],
        };
        self.report.notes.extend(engines);
        self.report.tensor_bytes = layout.tensor_bytes();
        self.report.file_bytes = layout.file_bytes();
        Ok(self.report)
    }
}

/// The model's config.json with `quantization_config`.
fn config_json(checkpoint: &Checkpoint, dense: DType, quantization: Value) -> Result<Value> {
    let files = checkpoint.files();
    let mut config = json_object(&files.path(CONFIG), &files.require(CONFIG)?)?;
    let shape = checkpoint.config();
    if checkpoint.vision().is_some() {
        config = hybrid::whole_config(config, shape);
    } else if shape.delta.is_some() {
        config = hybrid::text_config(config, shape);
    }
    let tied = shape.tie_word_embeddings;
    config.insert("tie_word_embeddings".into(), tied.into());
    config.shift_remove("compression_config");
    let name = match dense {
        DType::F32 => "float32",
        DType::F16 => "float16",
        _ => "bfloat16",
    };
    config.insert("torch_dtype".into(), name.into());
    config.insert("quantization_config".into(), quantization);
    Ok(Value::Object(config))
}

fn write_json(path: &Path, json: &Value) -> Result<()> {
    write_bytes(path, format!("{json:#}\n").as_bytes())
}

/// An unquantized parameter in `dtype`.
fn dense_bytes(
    store: &dyn WeightStore,
    origin: &Origin,
    dtype: DType,
    recent: &mut Recent<StoredWeight>,
) -> Result<Vec<u8>> {
    let (name, cols) = (&origin.parameter, origin.dims().cols);
    let mut out = Vec::with_capacity(origin.rows.len() * cols * dtype.size());
    let mut values = vec![0f32; cols];
    if matches!(origin.shape, Shape::Vector(_)) {
        store.vector(name, cols)?.copy_f32(0, &mut values)?;
        float_bytes(&values, dtype, &mut out);
        return Ok(out);
    }
    let weight = recent.get(name, || store.stored(name, origin.dims()))?;
    for row in origin.rows.clone() {
        weight.dequantize_row(row, &mut values)?;
        float_bytes(&values, dtype, &mut out);
    }
    Ok(out)
}
