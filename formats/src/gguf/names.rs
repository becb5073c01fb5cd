//! Translates parameter names, without `.weight`, between GGUF and Hugging Face checkpoints.

use nq_model::mtp;
use nq_model::names::{EMBEDDING, HEAD, MIX_DOWN, MIX_NORM, MIX_UP, NORM, in_layer};
use nq_model::{Architecture, LAYERS, Parameter};
use std::borrow::Cow;

/// Names outside the layers: (Hugging Face, GGUF), the same in every architecture.
const MODEL: [(&str, &str); 6] = [
    (EMBEDDING, "token_embd"),
    (NORM, "output_norm"),
    (MIX_NORM, "output_hc_norm"),
    (MIX_DOWN, "output_hc_down"),
    (MIX_UP, "output_hc_up"),
    (HEAD, "output"),
];

/// The divisors of the rotary frequencies, where files of an architecture have them as a tensor.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Prefixes of names in layers, before the layer's number: (Hugging Face, GGUF).
const PREFIXES: (&str, &str) = (LAYERS, "blk.");

/// Names in layers of matrices that some files hold in place of several: (Hugging Face, GGUF).
const FUSED: [(&str, &str); 2] = [
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.in_proj_qkvz", "ssm_in"),
];

/// Names of what is around an MTP layer: (Hugging Face, GGUF within the layer's block).
const NEXTN: [(&str, &str); 4] = [
    (mtp::FC, "nextn.eh_proj"),
    (mtp::EMBEDDING_NORM, "nextn.enorm"),
    (mtp::HIDDEN_NORM, "nextn.hnorm"),
    (mtp::NORM, "nextn.shared_head_norm"),
];

/// The tensors that files hold the queries and the key of an indexer in, which nq has as one matrix, called `stored`.
pub(crate) fn index_names(stored: &str) -> [String; 2] {
    ["q_proj", "k_proj"].map(|part| stored.replace("indexer.qk_proj", &format!("indexer.{part}")))
}

/// Translates a name by (from, to) pairs: for names outside the layers, for the prefix before the
/// layer's number, and for the rest after it.
fn translate(
    name: &str,
    mut outside: impl Iterator<Item = (&'static str, &'static str)>,
    prefix: &str,
    other: &str,
    within: impl Fn(&Parameter) -> (Cow<'static, str>, Cow<'static, str>),
    architecture: &Architecture,
) -> Option<String> {
    if let Some((_, to)) = outside.find(|(from, _)| *from == name) {
        return Some(to.into());
    }
    let (layer, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    let number: usize = layer.parse().ok()?;
    if number.to_string() != layer {
        return None; // "+1", "01"
    }
    let pairs = architecture.parameters().map(|p| within(&p));
    let fused = FUSED.map(|(hf, gguf)| match prefix == PREFIXES.0 {
        true => (hf.into(), gguf.into()),
        false => (gguf.into(), hf.into()),
    });
    let (_, to) = pairs.chain(fused).find(|(from, _)| from == rest)?;
    Some(format!("{other}{layer}.{to}"))
}

/// The GGUF name of a Hugging Face parameter, e.g. `blk.0.attn_q` for
/// `model.layers.0.self_attn.q_proj`. `layers` are those of the model, behind which its MTP layer stands.
pub fn to_gguf(architecture: &Architecture, layers: usize, name: &str) -> Option<String> {
    if let Some((_, within)) = NEXTN.iter().find(|(from, _)| *from == name) {
        return Some(format!("{}{layers}.{within}", PREFIXES.1));
    }
    let behind = name.strip_prefix(mtp::LAYER);
    let behind = behind.map(|suffix| in_layer(layers, suffix));
    let name = behind.as_deref().unwrap_or(name);
    let within = |p: &Parameter| (p.suffix(), p.gguf());
    translate(
        name,
        MODEL.into_iter(),
        PREFIXES.0,
        PREFIXES.1,
        within,
        architecture,
    )
}

/// The Hugging Face name of a GGUF parameter: the inverse of [`to_gguf`] for a model without an MTP layer.
pub fn from_gguf(architecture: &Architecture, name: &str) -> Option<String> {
    let outside = MODEL.into_iter().map(|(hf, gguf)| (gguf, hf));
    let within = |p: &Parameter| (p.gguf(), p.suffix());
    translate(name, outside, PREFIXES.1, PREFIXES.0, within, architecture)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_model::ARCHITECTURES;

    #[test]
    fn names_translate_both_ways() {
        let qwen3 = ARCHITECTURES[0];
        for (hf, gguf) in [
            ("model.embed_tokens", "token_embd"),
            ("lm_head", "output"),
            ("model.layers.0.self_attn.q_norm", "blk.0.attn_q_norm"),
            ("model.layers.12.mlp.down_proj", "blk.12.ffn_down"),
            ("model.layers.3.post_attention_layernorm", "blk.3.ffn_norm"),
        ] {
            assert_eq!(to_gguf(qwen3, 36, hf).as_deref(), Some(gguf));
            assert_eq!(from_gguf(qwen3, gguf).as_deref(), Some(hf));
        }
        let qwen3_5 = nq_model::find(|a| a.gguf, "qwen35").unwrap();
        for (hf, gguf) in [
            ("mtp.fc", "blk.24.nextn.eh_proj"),
            ("mtp.norm", "blk.24.nextn.shared_head_norm"),
            ("mtp.layers.0.self_attn.q_proj", "blk.24.attn_q"),
        ] {
            assert_eq!(to_gguf(qwen3_5, 24, hf).as_deref(), Some(gguf));
        }
        assert_eq!(to_gguf(qwen3_5, 24, "mtp.layers.1.self_attn.q_proj"), None);
        for unknown in [
            "blk.0",
            "blk.x.attn_q",
            "blk.00.attn_q",
            "blk.+1.attn_q",
            "rope_freqs",
        ] {
            assert_eq!(from_gguf(qwen3, unknown), None);
        }
    }
}
