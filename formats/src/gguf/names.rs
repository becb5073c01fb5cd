//! Parameter names: GGUF's and those of Hugging Face checkpoints, without `.weight`.

/// Outside the layers: (Hugging Face, GGUF).
const MODEL: [(&str, &str); 3] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
];

/// Within a layer: (Hugging Face after `model.layers.N.`, GGUF after `blk.N.`).
const LAYER: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Rewrites `name` from `prefix.N.a` to `other.N.b`, or by the model's table.
fn translate(
    name: &str,
    (prefix, other): (&str, &str),
    pick: fn(&(&'static str, &'static str)) -> (&'static str, &'static str),
) -> Option<String> {
    let look_up = |table: &[(&'static str, &'static str)], name: &str| {
        let found = table.iter().map(pick).find(|(from, _)| *from == name);
        found.map(|(_, to)| to)
    };
    if let Some(to) = look_up(&MODEL, name) {
        return Some(to.into());
    }
    let (layer, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    let number: usize = layer.parse().ok()?;
    if number.to_string() != layer {
        return None; // "+1", "01"
    }
    Some(format!("{other}{layer}.{}", look_up(&LAYER, rest)?))
}

/// The GGUF name of a Hugging Face parameter, e.g. `blk.0.attn_q` for
/// `model.layers.0.self_attn.q_proj`.
pub fn to_gguf(name: &str) -> Option<String> {
    translate(name, ("model.layers.", "blk."), |&(hf, gguf)| (hf, gguf))
}

/// The Hugging Face name of a GGUF parameter: the inverse of [`to_gguf`].
pub fn from_gguf(name: &str) -> Option<String> {
    translate(name, ("blk.", "model.layers."), |&(hf, gguf)| (gguf, hf))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_translate_both_ways() {
        for (hf, gguf) in [
            ("model.embed_tokens", "token_embd"),
            ("lm_head", "output"),
            ("model.layers.0.self_attn.q_norm", "blk.0.attn_q_norm"),
            ("model.layers.12.mlp.down_proj", "blk.12.ffn_down"),
            ("model.layers.3.post_attention_layernorm", "blk.3.ffn_norm"),
        ] {
            assert_eq!(to_gguf(hf).as_deref(), Some(gguf));
            assert_eq!(from_gguf(gguf).as_deref(), Some(hf));
        }
        for unknown in [
            "blk.0",
            "blk.x.attn_q",
            "blk.00.attn_q",
            "blk.+1.attn_q",
            "rope_freqs",
        ] {
            assert_eq!(from_gguf(unknown), None);
        }
    }
}
