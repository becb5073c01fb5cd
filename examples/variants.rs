//! Makes variants of a model that a method should handle as well as the model itself: the head untied
//! by a copy, one layer dropped, and outlier channels like those of large models: some channels
//! of a norm are multiplied by 32 and the inputs of the next weights divided by it, which changes no
//! output. Each is a folder that can be quantized and measured like any model.
//!
//! `cargo run --release --example variants -- MODEL OUT` writes `OUT/untied`, `OUT/dropped` and
//! `OUT/outliers` from a folder of bf16 weights with a tied head.

use anyhow::{Context, ensure};
use nq_formats::safetensors::SafetensorsFile;
use nq_formats::serialize::write_tensors;
use nq_formats::{Tensor, files};
use nq_model::names::{EMBEDDING, HEAD, in_layer, layer_of};
use nq_model::{DType, InputSource, NormSpec, Product};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A power of two: products with it are exact in bf16.
const OUTLIER: f32 = 32.0;

type Tensors = BTreeMap<String, Tensor>;

fn read(model: &Path) -> anyhow::Result<Tensors> {
    let mut tensors = Tensors::new();
    for entry in std::fs::read_dir(model)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let file = SafetensorsFile::parse(&path, files::map_file(&path)?)?;
            for name in file.names() {
                let tensor = file.get(name).context("a listed tensor")?;
                tensors.insert(name.to_owned(), tensor);
            }
        }
    }
    ensure!(!tensors.is_empty(), "{}: no weights", model.display());
    Ok(tensors)
}

/// `tensor` `[.., columns]` with every `each`-th column multiplied by `factor`.
fn scaled(tensor: &Tensor, each: usize, factor: f32) -> anyhow::Result<Tensor> {
    ensure!(tensor.dtype() == DType::BF16, "expected bf16 weights");
    let columns = *tensor.shape().last().context("a dimension")?;
    let bytes: Vec<u8> = (tensor.to_f32()?.into_iter().enumerate())
        .flat_map(|(i, v)| {
            let v = if i % columns % each == 0 {
                v * factor
            } else {
                v
            };
            ((v.to_bits() >> 16) as u16).to_le_bytes()
        })
        .collect();
    Ok(Tensor::new(
        DType::BF16,
        tensor.shape().to_vec(),
        bytes.into(),
    )?)
}

/// Multiplies channels of the norm that produces a product's input in layer `layer`, and divides the
/// inputs of the product's weights by the same factor.
fn outliers(
    tensors: &mut Tensors,
    layer: usize,
    norm: &NormSpec,
    product: &Product,
) -> anyhow::Result<()> {
    const EACH: usize = 61;
    let mut change = |name: String, factor| -> anyhow::Result<()> {
        let tensor = tensors.get_mut(&format!("{name}.weight"));
        let tensor = tensor.with_context(|| name)?;
        *tensor = scaled(tensor, EACH, factor)?;
        Ok(())
    };
    change(norm.name(layer), OUTLIER)?;
    for linear in product.linears {
        change(linear.name(layer), 1.0 / OUTLIER)?;
    }
    Ok(())
}

/// The tensors without layer `dropped`; later layers are renumbered.
fn without(tensors: &Tensors, dropped: usize) -> Tensors {
    let renamed = tensors.iter().filter_map(|(name, tensor)| {
        let name = match layer_of(name) {
            Some(index) if index == dropped => return None,
            Some(index) if index > dropped => {
                name.replacen(&in_layer(index, ""), &in_layer(index - 1, ""), 1)
            }
            _ => name.clone(),
        };
        Some((name, tensor.clone()))
    });
    renamed.collect()
}

fn write(
    (model, out): (&Path, &Path),
    tensors: Tensors,
    change: impl Fn(&mut serde_json::Value),
) -> anyhow::Result<()> {
    std::fs::create_dir_all(out)?;
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ] {
        std::fs::copy(model.join(name), out.join(name)).with_context(|| name.to_owned())?;
    }
    let mut config = serde_json::from_slice(&std::fs::read(model.join("config.json"))?)?;
    change(&mut config);
    std::fs::write(out.join("config.json"), serde_json::to_vec_pretty(&config)?)?;
    let tensors: Vec<(String, Tensor)> = tensors.into_iter().collect();
    let format = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    Ok(write_tensors(
        &out.join("model.safetensors"),
        &tensors,
        &format,
    )?)
}

fn main() -> anyhow::Result<()> {
    let args: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [model, out] = &args[..] else {
        anyhow::bail!("expected MODEL OUT");
    };
    let source = read(model)?;

    let mut untied = source.clone();
    let embedding = source.get(&format!("{EMBEDDING}.weight"));
    let embedding = embedding.context("an embedding")?.clone();
    untied.insert(format!("{HEAD}.weight"), embedding);
    write((model, &out.join("untied")), untied, |config| {
        config["tie_word_embeddings"] = false.into();
    })?;

    let dropped = without(&source, 2);
    write((model, &out.join("dropped")), dropped, |config| {
        let layers = config["num_hidden_layers"].as_u64().unwrap_or(0);
        config["num_hidden_layers"] = (layers - 1).into();
    })?;

    let mut scaled = source;
    let path = model.join(files::CONFIG);
    let config = nq_formats::config::parse(&path, &std::fs::read(&path)?)?;
    // In one layer before attention, in another before the MLP.
    let mut layers = [1, 3].into_iter();
    for product in config.layer(0).products() {
        if let InputSource::Norm(kind) = product.source
            && let Some(layer) = layers.next()
        {
            let norm = config.layer(layer).norm(kind);
            outliers(&mut scaled, layer, norm, product)?;
        }
    }
    write((model, &out.join("outliers")), scaled, |_| {})
}
