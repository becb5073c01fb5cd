//! How several GPUs divide a model.

use super::served::{check_shape, key_copies};
use crate::Gpu;
use nq_formats::{Progress, Scheme, Shard, WeightStore};
use nq_kernels::KernelSet;
use nq_model::ModelConfig;
use nq_runtime::interface::Split;
use nq_runtime::models::LayerWeights;
use nq_runtime::{Error, Result};
use std::ops::Range;

/// The parts of a model that GPUs with so many `free` bytes get.
///
/// # Errors
/// [`Error::Unsupported`] if there are fewer layers than GPUs.
pub(super) fn shards(split: Split, c: &ModelConfig, free: &[usize]) -> Result<Vec<Shard>> {
    let ranks = free.len();
    let of_layers = |rank| Shard {
        key_copies: key_copies(c),
        ..Shard::tensors(rank, ranks)
    };
    if split == Split::Tensors {
        return Ok((0..ranks).map(of_layers).collect());
    }
    let shard = |(rank, layers)| Shard {
        layers: Some(layers),
        ..of_layers(rank)
    };
    Ok(stages(c, free)?
        .into_iter()
        .enumerate()
        .map(shard)
        .collect())
}

/// Divides the layers by free memory. A stage of a hybrid begins where its kinds of layers begin anew.
fn stages(c: &ModelConfig, free: &[usize]) -> Result<Vec<Range<usize>>> {
    let (all, ranks) = (c.num_hidden_layers, free.len());
    let unit = c.delta.map_or(1, |d| d.interval.max(1));
    let units = all / unit;
    if units < ranks {
        return Err(Error::Unsupported {
            engine: "nq on several GPUs",
            what: "layers",
            expected: format!("at least {} for {ranks} GPUs", ranks * unit),
            found: all.to_string(),
        });
    }
    let total: u128 = free.iter().map(|f| *f as u128).sum::<u128>().max(1);
    let (mut before, mut begin) = (0u128, 0);
    let mut stages = Vec::with_capacity(ranks);
    for (rank, &free) in free.iter().enumerate() {
        before += free as u128;
        // To the nearest one; each stage has a unit, and leaves one for each behind it.
        let end = (2 * before * units as u128 + total) / (2 * total);
        let end = (end as usize).clamp(begin + 1, units - (ranks - 1 - rank));
        let last = if rank + 1 == ranks { all } else { end * unit };
        stages.push(begin * unit..last);
        begin = end;
    }
    Ok(stages)
}

/// How the model is divided among `gpus`: as `asked`, or else by tensors if that can be, which is faster. By layers it is said
/// why.
///
/// # Errors
/// What stands against a division that was asked for; errors of reading weights.
pub(super) fn choose(
    asked: Option<Split>,
    c: &ModelConfig,
    store: &dyn WeightStore,
    gpus: &[Gpu],
    progress: &dyn Progress,
) -> Result<Split> {
    if asked == Some(Split::Layers) {
        return Ok(Split::Layers);
    }
    match (by_tensors(c, store, gpus), asked) {
        (Ok(()), _) => Ok(Split::Tensors),
        (Err(e), Some(_)) => Err(e),
        (Err(e), None) => {
            progress.note(&format!(
                "each GPU has some of the layers, as parts of every layer cannot be had: {e}"
            ));
            Ok(Split::Layers)
        }
    }
}

/// Whether each GPU can have a part of every layer.
fn by_tensors(c: &ModelConfig, store: &dyn WeightStore, gpus: &[Gpu]) -> Result<()> {
    let kind = |gpu: &Gpu| {
        let info = gpu.info();
        let sizes = (info.multiprocessors, info.shared_memory);
        (info.name.clone(), info.capability, sizes)
    };
    // Steps, whose sums must be the same everywhere, are planned for the GPU.
    if let Some(other) = gpus.iter().find(|gpu| kind(gpu) != kind(&gpus[0])) {
        return refuse(
            "GPUs",
            &format!("GPUs like {}", gpus[0].info()),
            other.info(),
        );
    }
    let shard = Shard {
        key_copies: key_copies(c),
        ..Shard::tensors(0, gpus.len())
    };
    let shape = shard.config(c)?;
    check_shape(&shape, KernelSet::Fused)?;
    for layer in 0..c.num_hidden_layers {
        for linear in c.layer(layer).matrices() {
            let name = linear.name(layer);
            let scheme = store
                .scheme(&name)
                .or_else(|| store.scheme_in_levels(&name));
            if let Some(scheme @ (Scheme::Trellis(_) | Scheme::Exl3(_))) = scheme {
                return refuse(
                    "weights of parts of every layer",
                    "integers or floats",
                    format!("{scheme} of {name}"),
                );
            }
        }
    }
    // Only the weights themselves tell whether their inputs can be cut.
    LayerWeights::read(&shard.store(store, c)?, &shape, 0).map(drop)
}

/// The error of what several GPUs do not serve.
pub(super) fn refuse<T>(what: &'static str, expected: &str, found: impl ToString) -> Result<T> {
    Err(Error::Unsupported {
        engine: "nq on several GPUs",
        what,
        expected: expected.into(),
        found: found.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_model::Preset;

    #[test]
    fn stages_are_by_free_memory() {
        let dense = Preset::find("qwen3-8b").unwrap().config();
        let divided = |free: &[usize]| stages(&dense, free).unwrap();
        assert_eq!(divided(&[80, 80]), [0..18, 18..36]);
        assert_eq!(divided(&[24, 12]), [0..24, 24..36]);
        assert_eq!(divided(&[100, 0, 0]), [0..34, 34..35, 35..36]);
        assert_eq!(divided(&[0, 0, 100]), [0..1, 1..2, 2..36]);
        assert_eq!(divided(&[0, 0]), [0..1, 1..36]);
        let hybrid = Preset::find("qwen3.5-4b").unwrap().config();
        let interval = hybrid.delta.unwrap().interval;
        for free in [[80, 80], [24, 12], [1, 100]] {
            let stages = stages(&hybrid, &free).unwrap();
            assert!(stages[0].end.is_multiple_of(interval), "{stages:?}");
            assert_eq!(stages[1], stages[0].end..hybrid.num_hidden_layers);
        }
        let short = ModelConfig {
            num_hidden_layers: 4,
            ..hybrid
        };
        assert!(stages(&short, &[1, 1]).is_err());
    }
}
