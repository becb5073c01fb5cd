//! Exports a quantized checkpoint of another format as nq's own folder.

use super::options::ExportOptions;
use super::report::{Change, ExportReport, Exported};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::nq::{Opened, Param, Writer, WriterOptions};
use crate::nq::{QuantizationRecord, SourceRecord};
use crate::progress::Progress;
use crate::store::WeightStore;
use crate::tensor::Tensor;
use crate::weight::Weight;
use nq_model::names::{EMBEDDING, HEAD, Shape, end_parameters, layer_parameters, parameters};
use nq_model::{Dims, mtp};
use serde_json::json;
use std::path::Path;

/// Writes `checkpoint` to the folder `out`: codes are kept, scales become f16.
///
/// # Errors
/// Errors of [`super::export`]; [`Error::Unsupported`] for a model that is not quantized.
pub fn export(
    checkpoint: &Checkpoint,
    out: &Path,
    options: &ExportOptions,
    progress: &dyn Progress,
) -> Result<ExportReport> {
    let store = checkpoint.store();
    let Some(quantization) = store.quantization() else {
        return Err(Error::Unsupported {
            path: checkpoint.files().root(),
            what: "an unquantized model in nq's format".into(),
            why: "the format is for quantized weights; quantize it first".into(),
        });
    };
    let settings = json!({ "format": store.format(), "quantization": quantization });
    let plan = json!({ "convert": settings });
    let writer_options = WriterOptions {
        resume: false,
        force: options.force,
        expected_bytes: store.file_bytes(),
    };
    let opened = Writer::open(out, checkpoint.files(), &plan, writer_options)?;
    let Opened::Writer(writer) = opened else {
        unreachable!("only a resumed run can be complete before it starts");
    };
    let config = checkpoint.config();
    let mut report = ExportReport::default();
    let mut stage = |step: &str, names: Vec<(String, Shape)>| {
        stage(&writer, store, step, &names, &mut report.weights)
    };
    let outside = |wanted: &str| {
        let all = parameters(config).into_iter();
        all.filter(|(n, _)| n == wanted).collect::<Vec<_>>()
    };
    stage("embedding", outside(EMBEDDING))?;
    for layer in 0..config.num_hidden_layers {
        let names = layer_parameters(config, layer).collect();
        stage(&format!("layer-{layer:05}"), names)?;
    }
    for part in config.ngrams.iter().flat_map(|n| n.parameters()) {
        stage(&format!("table-{}", part.0), vec![part])?;
    }
    stage("norm", end_parameters(config).collect())?;
    if !config.tie_word_embeddings {
        stage("head", outside(HEAD))?;
    }
    if config.mtp_layers > 0 {
        stage("mtp", mtp::parameters(config).collect())?;
    }
    writer.put_tower(checkpoint)?;
    let root = checkpoint.files().root();
    let record = QuantizationRecord {
        method: format!("converted from {}", store.format()),
        settings: match settings {
            serde_json::Value::Object(map) => map,
            _ => unreachable!("the literal above is an object"),
        },
        source: SourceRecord {
            name: root
                .file_name()
                .map_or("model".into(), |n| n.to_string_lossy().into_owned()),
            ..SourceRecord::default()
        },
        ..QuantizationRecord::default()
    };
    let written = writer.finish(record, progress)?;
    report.tensor_bytes = written.tensor_bytes;
    report.file_bytes = written.file_bytes;
    Ok(report)
}

/// Stages the parameters `names` as stored, and adds the matrices to `exported`.
fn stage(
    writer: &Writer,
    store: &dyn WeightStore,
    step: &str,
    names: &[(String, Shape)],
    exported: &mut Vec<Exported>,
) -> Result<()> {
    let mut vectors: Vec<(String, Tensor)> = Vec::new();
    let mut matrices: Vec<(String, Weight)> = Vec::new();
    for (name, shape) in names {
        match *shape {
            Shape::Vector(len) => vectors.push((name.clone(), store.vector(name, len)?)),
            Shape::Matrix(rows, cols) => {
                let weight = store.matrix(name, Dims::new(rows, cols))?;
                exported.push(Exported {
                    name: name.clone(),
                    from: store.stored(name, Dims::new(rows, cols))?.scheme_name(),
                    to: weight.scheme_name(),
                    change: Change::Kept(store.exactness(name)),
                    bytes: weight.bytes() as u64,
                });
                matrices.push((name.clone(), weight));
            }
        }
    }
    let vectors = vectors.iter().map(|(n, t)| (n.clone(), Param::Vector(t)));
    let matrices = matrices.iter().map(|(n, w)| (n.clone(), Param::Matrix(w)));
    writer.put(step, &vectors.chain(matrices).collect::<Vec<_>>())
}
