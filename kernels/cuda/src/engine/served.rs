//! The shapes of models that the kernels serve.

use crate::indexer::MOST_GROUP as MOST_CHOSEN_GROUP;
use crate::pack::{SPAN, TILE};
use crate::{
    CONV, DELTA_DIM, HEAD_DIM, INDEX_DIM, MOST_CHOSEN, MOST_EXPERTS, MOST_RATE_INPUTS,
    WIDE_HEAD_DIM, rotary_dims,
};
use nq_formats::{Progress, Shard};
use nq_kernels::KernelSet;
use nq_kernels::pages::PAGE;
use nq_model::{ModelConfig, OutputGate};
use nq_runtime::{Error, Result};

/// Most query heads of a key head that the kernels of attention serve.
const MOST_GROUP: usize = 8;

/// The whole of a model of shape `c`, with as many copies of its key heads as the kernels need.
pub fn served(c: &ModelConfig) -> Shard {
    Shard {
        key_copies: key_copies(c),
        ..Shard::tensors(0, 1)
    }
}

/// Copies of the key heads with which the kernels serve a model of shape `c`.
pub(super) fn key_copies(c: &ModelConfig) -> usize {
    match c.hyper {
        // Their attention is not that of steps.
        Some(_) => 1,
        None => Shard::copies_for(c, MOST_GROUP),
    }
}

/// Says that keys and values are kept more than once, if they are.
pub(super) fn note_copies(c: &ModelConfig, progress: &dyn Progress) {
    let copies = key_copies(c);
    if copies > 1 {
        progress.note(&format!(
            "keys and values take {copies} times their memory: attention on GPUs serves at most {MOST_GROUP} query heads of a \
             key head, of {}",
            c.num_attention_heads / c.num_key_value_heads
        ));
    }
}

/// Refuses shapes that the kernels do not serve.
pub fn check_shape(config: &ModelConfig, kernels: KernelSet) -> Result<()> {
    let (gated, turned) = (config.gate_dim() > 0, config.rotary_dims());
    match (config.head_dim, gated) {
        (HEAD_DIM, false) | (WIDE_HEAD_DIM, true) => {}
        (found, false) => return refuse("head_dim", "128", found),
        (found, true) => return refuse("head_dim of attention with gates", "256", found),
    }
    if turned != rotary_dims(config.head_dim) {
        let expected = rotary_dims(config.head_dim).to_string();
        return refuse(
            "values of a head that turn with the position",
            &expected,
            turned,
        );
    }
    if let Some(d) = config.delta {
        for (what, expected, found) in [
            ("linear_key_head_dim", DELTA_DIM, d.key_dim),
            ("linear_value_head_dim", DELTA_DIM, d.value_dim),
            ("linear_conv_kernel_dim", CONV, d.conv),
        ] {
            if found != expected {
                return refuse(what, &expected.to_string(), found);
            }
        }
        if config.hidden_size > MOST_RATE_INPUTS {
            let expected = format!("at most {MOST_RATE_INPUTS}");
            return refuse(
                "hidden_size of a model with recurrences",
                &expected,
                config.hidden_size,
            );
        }
        if kernels == KernelSet::Reference {
            return Err(Error::Unsupported {
                engine: "nq on a GPU",
                what: "kernels for recurrences",
                expected: "fused".into(),
                found: kernels.to_string(),
            });
        }
    }
    check_streams(config)?;
    let group = config.num_attention_heads / config.num_key_value_heads;
    let (most, expected) = match config.indexer {
        Some(_) => (MOST_CHOSEN_GROUP, "at most 16"),
        None => (MOST_GROUP, "at most 8"),
    };
    if group > most {
        return refuse("query heads per key head", expected, group);
    }
    match config.experts {
        Some(experts) => {
            let (unit, expected) = match config.hyper {
                Some(_) => (2 * TILE, "a multiple of 32"),
                None => (SPAN, "a multiple of 256"),
            };
            if !experts.width.is_multiple_of(unit) {
                return refuse("moe_intermediate_size", expected, experts.width);
            }
            if !experts.shared.is_multiple_of(unit) {
                let what = "shared_expert_intermediate_size";
                return refuse(what, expected, experts.shared);
            }
            if !config.hidden_size.is_multiple_of(TILE) {
                return refuse("hidden_size", "a multiple of 16", config.hidden_size);
            }
            if experts.count > MOST_EXPERTS {
                return refuse("num_experts", "at most 512", experts.count);
            }
            if experts.per_token > MOST_CHOSEN {
                return refuse("num_experts_per_tok", "at most 32", experts.per_token);
            }
            if kernels == KernelSet::Reference {
                return Err(Error::Unsupported {
                    engine: "nq on a GPU",
                    what: "kernels for mixtures of experts",
                    expected: "fused".into(),
                    found: kernels.to_string(),
                });
            }
        }
        None if !config.intermediate_size.is_multiple_of(8) => {
            let found = config.intermediate_size;
            return refuse("intermediate_size", "a multiple of 8", found);
        }
        None => {}
    }
    if !config.hidden_size.is_multiple_of(8) {
        return refuse("hidden_size", "a multiple of 8", config.hidden_size);
    }
    Ok(())
}

/// Refuses residuals of several streams, and what only these have, of other sizes than the kernels serve.
fn check_streams(c: &ModelConfig) -> Result<()> {
    if let Some(i) = c.indexer {
        if i.head_dim != INDEX_DIM {
            return refuse("indexer_head_dim", "128", i.head_dim);
        }
        if !i.block.is_multiple_of(4) || !PAGE.is_multiple_of(i.block.max(1)) {
            let what = "indexer_compress_ratio";
            return refuse(what, "a multiple of 4 that divides 128", i.block);
        }
    }
    match (&c.hyper, &c.ngrams) {
        (Some(hyper), _) if !hyper.rank.is_multiple_of(8) => {
            refuse("hc_lowrank", "a multiple of 8", hyper.rank)
        }
        (Some(_), Some(table)) if !table.width.is_multiple_of(8) => {
            refuse("ple_embed_dim", "a multiple of 8", table.width)
        }
        (None, _) if c.delta.is_some_and(|d| d.gate == OutputGate::Sigmoid) => {
            Err(Error::Unsupported {
                engine: "nq on a GPU",
                what: "the gate of recurrences beside a residual of one stream",
                expected: "SiLU".into(),
                found: "a sigmoid".into(),
            })
        }
        _ => Ok(()),
    }
}

/// The error of a size that the kernels do not serve.
pub(super) fn refuse<T>(what: &'static str, expected: &str, found: usize) -> Result<T> {
    Err(Error::Unsupported {
        engine: "nq on a GPU",
        what,
        expected: expected.into(),
        found: found.to_string(),
    })
}
