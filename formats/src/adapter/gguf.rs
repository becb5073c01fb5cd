//! Adapters in GGUF files: `lora_a` and `lora_b` of matrices.

use super::parts::{Adapter, AdapterPart, LoraProduct, Parts};
use crate::error::{Error, Result};
use crate::gguf::{GgufFile, MAGIC, names};
use crate::published::Form;
use crate::tensor::Tensor;
use nq_model::names::EMBEDDING;
use std::collections::BTreeMap;
use std::path::Path;

/// Opens the adapter in a file.
pub(super) fn open(path: &Path) -> Result<Adapter> {
    let bytes = crate::files::map_file(path).map_err(|e| Error::io(path, "open", e))?;
    let unsupported = |what: String, why: &str| Error::Unsupported {
        path: path.into(),
        what,
        why: why.into(),
    };
    if !bytes.starts_with(MAGIC) {
        let why = "nq merges PEFT's folders and adapters in GGUF";
        return Err(unsupported("an adapter in this file".into(), why));
    }
    let file = GgufFile::parse(path, bytes)?;
    for (key, expected) in [("general.type", "adapter"), ("adapter.type", "lora")] {
        let found = file.required(key, file.str(key)?)?;
        if found != expected {
            let why = "expected a LoRA adapter";
            return Err(unsupported(format!("{key} {found}"), why));
        }
    }
    let named = file.required("general.architecture", file.str("general.architecture")?)?;
    let architecture = nq_model::find(|a| a.gguf, named).ok_or_else(|| {
        let why = nq_model::supported(|a| a.gguf);
        unsupported(format!("architecture {named}"), &why)
    })?;
    let alpha = file.f64("adapter.lora.alpha")?.unwrap_or(0.0);
    let mut pairs: BTreeMap<String, [Option<Tensor>; 2]> = BTreeMap::new();
    for (tensor, info) in file.tensors() {
        let mut parts = [".weight.lora_a", ".weight.lora_b"].iter().enumerate();
        let part = parts.find_map(|(i, end)| Some((i, tensor.strip_suffix(end)?)));
        let known = part.and_then(|(i, name)| Some((i, names::from_gguf(architecture, name)?)));
        let (Some((i, name)), Some(dtype)) = (known, info.kind.float()) else {
            let what = format!("tensor {tensor} ({})", info.kind);
            let why = "nq merges lora_a and lora_b of Linears, in floats";
            return Err(unsupported(what, why));
        };
        let part = Tensor::new(dtype, info.shape.clone(), file.data(info))?;
        if let Some(value) = part.to_f32()?.iter().find(|v| !v.is_finite()) {
            return Err(Error::Tensor {
                path: path.into(),
                tensor: tensor.into(),
                expected: "finite values".into(),
                found: value.to_string(),
            });
        }
        pairs.entry(name).or_default()[i] = Some(part);
    }
    let mut sums = BTreeMap::new();
    for (name, pair) in pairs {
        let [Some(a), Some(b)] = pair else {
            return Err(unsupported(format!("one part of {name}"), "it has two"));
        };
        let Some(product) = product(&name, &a, &b, alpha)? else {
            let shapes = format!("{name} of shapes {:?}, {:?}", a.shape(), b.shape());
            return Err(unsupported(shapes, "they have one rank"));
        };
        sums.insert(name, AdapterPart::Product(product));
    }
    let none = BTreeMap::new;
    Ok(Adapter {
        path: path.into(),
        form: Form::Gguf,
        architecture: Some(architecture),
        sums: Parts::sums(path, sums),
        whole: Parts::replacing(path, none()),
        tokens: Parts::replacing(path, none()),
        magnitudes: Parts::lengths(path, none()),
        keeps_tied: false,
        left_over: Vec::new(),
    })
}

/// The product of `lora_a` `[rank, in]` and `lora_b` `[out, rank]`, of each expert in stacks, with another dimension in
/// front. Those of an embedding are `[vocab, rank]` and `[hidden, rank]`. `None` if the shapes do not fit each other.
fn product(name: &str, a: &Tensor, b: &Tensor, alpha: f64) -> Result<Option<LoraProduct>> {
    let (mut first, mut second) = (a.to_f32()?, b.to_f32()?);
    let (experts, rank) = match (a.shape(), b.shape()) {
        (&[_, rank], &[hidden, other]) if name == EMBEDDING && rank == other => {
            let second_by_rank = |r| second.iter().skip(r).step_by(rank).take(hidden).copied();
            let transposed = (0..rank).flat_map(second_by_rank).collect();
            (first, second) = (transposed, first);
            (1, rank)
        }
        (&[rank, _], &[_, other]) if rank == other && name != EMBEDDING => (1, rank),
        (&[experts, rank, _], &[others, _, other]) if (experts, rank) == (others, other) => {
            (experts, rank)
        }
        _ => return Ok(None),
    };
    if first.is_empty() || second.is_empty() {
        return Ok(None);
    }
    // As llama.cpp: without an alpha, nothing is scaled.
    let scale = match alpha == 0.0 {
        true => 1.0,
        false => alpha / rank as f64,
    };
    Ok(Some(LoraProduct {
        a: first,
        b: second,
        experts,
        rank,
        scale,
    }))
}
