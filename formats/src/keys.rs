//! The keys of `config.json`, `generation_config.json` and `tokenizer_config.json`, and what nq does with each. A key that a file has
//! and that neither a reader nor a list of unused ones knows is said to be unknown.

use crate::left_over::LeftOver;
use serde_json::Value;
use std::fmt::Write;

/// A key and what nq does with it.
pub(crate) type KeyUse = (&'static str, &'static str);

/// Keys of `config.json` that nq reads.
#[rustfmt::skip]
pub(crate) const CONFIG: &[KeyUse] = &[
    ("architectures", "the model's class, which must be one that nq runs"),
    ("model_type", "the same"),
    ("hidden_size", "width of the residual stream"),
    ("intermediate_size", "width of the MLP"),
    ("num_hidden_layers", "layers; files with more are refused"),
    ("num_attention_heads", "query heads"),
    ("num_key_value_heads", "key and value heads"),
    ("head_dim", "width of a head"),
    ("vocab_size", "rows of the embedding"),
    ("max_position_embeddings", "the longest context"),
    ("rms_norm_eps", "epsilon of the norms; 1e-6 if absent"),
    ("tie_word_embeddings", "the head is the embedding, unless the files have a head that differs from it"),
    ("eos_token_id", "tokens that end a text"),
    ("dtype", "type of the weights, for `inspect`; tensors state their own"),
    ("torch_dtype", "the same"),
    ("attention_bias", "must be what the architecture has"),
    ("qkv_bias", "must be what the architecture has"),
    ("mlp_bias", "must be what the architecture has"),
    ("use_qk_norm", "must be what the architecture has"),
    ("attn_output_gate", "must be what the architecture has"),
    ("output_gate_type", "hybrids: other gates of a recurrence's output than `silu`, which is `swish` too, are refused"),
    ("use_sliding_window", "true is refused"),
    ("layer_types", "other layers than the architecture has, or in another order, are refused"),
    ("text_config", "these keys, of the text model of one that also sees images"),
    ("full_attention_interval", "hybrids: every so many layers, one has attention"),
    ("linear_conv_kernel_dim", "hybrids: inputs of the convolution of a recurrence"),
    ("linear_key_head_dim", "hybrids: width of a recurrence's key heads"),
    ("linear_value_head_dim", "hybrids: width of a recurrence's value heads"),
    ("linear_num_key_heads", "hybrids: key heads of a recurrence"),
    ("linear_num_value_heads", "hybrids: value heads of a recurrence"),
    ("linear_value_head_order", "hybrids: `tiled` if value head h has key head h modulo their number, as in GGUF (a key of nq)"),
    ("mtp_num_hidden_layers", "hybrids: 1 if there is an MTP layer, to draft with; more are not used"),
    ("mtp_use_dedicated_embeddings", "hybrids: an MTP layer with an embedding of its own is not used"),
    ("hidden_act", "other functions than `silu` are refused"),
    ("rope_theta", "base of the rotary frequencies"),
    ("rope_parameters", "the same, and how they are stretched"),
    ("rope_scaling", "the same; taken before `rope_parameters`, as in transformers"),
    ("partial_rotary_factor", "the part of a head that is rotated; 1 if absent, 0.25 in hybrids"),
    ("original_max_position_embeddings", "must be that of `rope_scaling`"),
    ("quantization_config", "format and settings of quantized weights"),
    ("compression_config", "the same"),
    ("decoder_sparse_step", "mixtures: other values than 1 are refused"),
    ("mlp_only_layers", "mixtures: layers listed there are refused"),
    ("shared_expert_intermediate_size", "mixtures: width of the shared expert; refused in those without one"),
    ("num_experts", "mixtures: experts of a layer"),
    ("num_local_experts", "the same"),
    ("num_experts_per_tok", "mixtures: experts of a token"),
    ("moe_intermediate_size", "mixtures: width of an expert"),
    ("norm_topk_prob", "mixtures: the weights of a token's experts sum to 1"),
];

/// Keys of `rope_parameters` and `rope_scaling` that nq reads.
#[rustfmt::skip]
pub(crate) const ROPE: &[KeyUse] = &[
    ("rope_type", "`default`, `yarn` and `llama3`; others are refused"),
    ("type", "the same, as older files name it"),
    ("rope_theta", "base of the frequencies, before the one beside it"),
    ("partial_rotary_factor", "the part of a head that is rotated, before the one beside it"),
    ("factor", "stretch of the context; if absent, `max_position_embeddings` by the original length"),
    ("original_max_position_embeddings", "length before it; `max_position_embeddings` if absent"),
    ("beta_fast", "rotations above which a dimension stays; 32 if absent or 0"),
    ("beta_slow", "rotations below which it is stretched fully; 1 if absent or 0"),
    ("truncate", "whether the dimensions between which the stretch grows are rounded outwards; true if absent"),
    ("attention_factor", "factor on cosines and sines; 0.1 ln(factor) + 1 if absent"),
    ("mscale", "with `mscale_all_dim`: makes the factor a quotient of two such terms"),
    ("mscale_all_dim", "see `mscale`"),
    ("low_freq_factor", "`llama3`: waves longer than the original length by it are stretched fully"),
    ("high_freq_factor", "`llama3`: waves shorter than the original length by it stay"),
    ("attn_factor", "multiplies the factor, as in vLLM (transformers ignores it)"),
];

/// Keys of `generation_config.json` that nq reads.
#[rustfmt::skip]
pub(crate) const GENERATION: &[KeyUse] = &[
    ("do_sample", "false: greedy"),
    ("temperature", "default of the sampler"),
    ("top_k", "the same; 0 or less: all tokens"),
    ("top_p", "the same"),
    ("min_p", "the same"),
    ("repetition_penalty", "the same"),
    ("eos_token_id", "tokens that end a text, beside those of config.json and the tokenizer"),
];

/// Keys of `tokenizer_config.json` that nq reads, beside all that end in `_token`.
#[rustfmt::skip]
pub(crate) const TOKENIZER: &[KeyUse] = &[
    ("eos_token", "a token that ends a text, and a variable of the chat template"),
    ("bos_token", "a variable of the chat template, as is all else that ends in `_token`"),
    ("pad_token", "the same"),
    ("unk_token", "the same"),
    ("chat_template", "the template, unless chat_template.jinja is there; of several, `default` and `tool_use`"),
    ("added_tokens_decoder", "flags of the added tokens, before those of tokenizer.json; tokens and ids that it does not have are said"),
    ("additional_special_tokens", "tokens that tokenizer.json does not have are said"),
    ("extra_special_tokens", "the same"),
    ("add_bos_token", "texts that stand alone (completions, perplexity, embeddings) have around them what the post-processor of tokenizer.json says; true is said where that adds none"),
    ("add_eos_token", "the same"),
    ("split_special_tokens", "true is refused"),
];

/// Keys of `tokenizer_config.json` that change nothing in what nq computes.
#[rustfmt::skip]
pub(crate) const TOKENIZER_UNUSED: &[KeyUse] = &[
    ("_commit_hash", NOTHING), ("add_prefix_space", DIVIDED), ("auto_map", NOTHING), ("backend", NOTHING),
    ("clean_up_tokenization_spaces", SPELLED), ("device_map", NOTHING), ("errors", SPELLED),
    ("fix_mistral_regex", DIVIDED), ("from_slow", NOTHING), ("is_local", NOTHING), ("legacy", DIVIDED),
    ("local_files_only", NOTHING), ("max_length", LENGTH), ("merges_file", NOTHING),
    ("model_input_names", NOTHING), ("model_max_length", LENGTH), ("model_specific_special_tokens", NOTHING),
    ("name_or_path", NOTHING), ("pad_to_multiple_of", FILLED), ("pad_token_type_id", FILLED),
    ("padding", FILLED), ("padding_side", FILLED), ("pretokenize_regex", DIVIDED), ("processor_class", NOTHING),
    ("response_schema", NOTHING), ("return_tensors", NOTHING), ("return_token_type_ids", NOTHING),
    ("revision", NOTHING), ("sp_model_kwargs", DIVIDED), ("spaces_between_special_tokens", SPELLED),
    ("special_tokens_map_file", NOTHING), ("stride", LENGTH), ("tokenizer_class", DIVIDED),
    ("tokenizer_file", NOTHING), ("transformers_version", NOTHING), ("truncation", LENGTH),
    ("truncation_side", LENGTH), ("truncation_strategy", LENGTH), ("trust_remote_code", NOTHING),
    ("unsloth_version", NOTHING), ("use_default_system_prompt", NOTHING), ("use_fast", NOTHING),
    ("vocab_file", NOTHING),
];

/// Keys of the other two files that change nothing in what nq computes.
#[rustfmt::skip]
pub(crate) const UNUSED: &[KeyUse] = &[
    ("_attn_implementation", NOTHING), ("_attn_implementation_autoset", NOTHING), ("_commit_hash", NOTHING),
    ("_from_model_config", NOTHING), ("_name_or_path", NOTHING), ("attention_dropout", TRAINING),
    ("attn_implementation", NOTHING), ("auto_map", NOTHING), ("bos_token_id", PROMPT),
    ("cache_implementation", NOTHING), ("chunk_size_feed_forward", NOTHING), ("decoder_start_token_id", PROMPT),
    ("dropout", TRAINING), ("embd_pdrop", TRAINING), ("hidden_dropout", TRAINING), ("id2label", NOTHING),
    ("initializer_range", TRAINING), ("is_decoder", NOTHING), ("is_encoder_decoder", NOTHING),
    ("label2id", NOTHING), ("max_length", LENGTH), ("max_new_tokens", LENGTH), ("max_window_layers", WINDOW),
    ("model_max_length", LENGTH), ("output_attentions", NOTHING), ("output_hidden_states", NOTHING),
    ("output_router_logits", TRAINING), ("output_scores", NOTHING), ("pad_token_id", PROMPT),
    ("pretraining_tp", NOTHING), ("problem_type", NOTHING), ("resid_pdrop", TRAINING),
    ("return_dict", NOTHING), ("return_dict_in_generate", NOTHING), ("router_aux_loss_coef", TRAINING),
    ("image_token_id", IMAGES), ("language_model_only", IMAGES),
    ("mamba_ssm_dtype", STATE), ("mrope_interleaved", COORDINATES),
    ("mrope_section", COORDINATES), ("sliding_window", WINDOW),
    ("video_token_id", IMAGES), ("vision_config", IMAGES), ("vision_end_token_id", IMAGES),
    ("vision_start_token_id", IMAGES), ("task_specific_params", NOTHING), ("transformers_version", NOTHING),
    ("unsloth_fixed", NOTHING), ("unsloth_version", NOTHING), ("use_bfloat16", NOTHING), ("use_cache", NOTHING),
];
/// Why a key is left over that no list has.
pub(crate) const UNKNOWN: &str = "a key that nq does not know";
const NOTHING: &str = "concerns other programs";
const TRAINING: &str = "is for training";
const PROMPT: &str = "prompts are as templates and tokenizers make them";
const LENGTH: &str = "lengths are set by --ctx and --max-tokens";
const IMAGES: &str = "images are not read";
const COORDINATES: &str = "the coordinates of a position are equal in text";
const STATE: &str = "the state of recurrences is f32";
const DIVIDED: &str = "tokenizer.json says how texts are divided";
const SPELLED: &str = "answers are spelled as their tokens are";
const FILLED: &str = "texts are not filled up";
const WINDOW: &str = "without `use_sliding_window`, all layers attend fully";

/// What is left over of an object's keys: those that hold a value, that no reader asked for and that
/// `unused` does not list.
pub(crate) fn unknown<'a>(
    file: &str,
    unused: &[KeyUse],
    entries: impl Iterator<Item = (&'a String, &'a Value)>,
) -> Vec<LeftOver> {
    // What is off or empty asks for nothing.
    let says = |v: &Value| match v {
        Value::Null | Value::Bool(false) => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    };
    let unknown = entries.filter(|(key, v)| says(v) && !unused.iter().any(|(k, _)| k == key));
    unknown
        .map(|(key, _)| LeftOver::new(format!("{file}: {key}"), UNKNOWN))
        .collect()
}

/// The keys as a table in Markdown, for docs/formats.md.
pub fn table() -> String {
    let mut out = String::from("| file | key | |\n|---|---|---|\n");
    let files = [
        ("config.json", CONFIG),
        ("`rope_parameters`, `rope_scaling`", ROPE),
        ("generation_config.json", GENERATION),
        ("config.json, generation_config.json", UNUSED),
        ("tokenizer_config.json", TOKENIZER),
        ("tokenizer_config.json", TOKENIZER_UNUSED),
    ];
    for (file, keys) in files {
        let mut rows: Vec<(Vec<&str>, &str)> = Vec::new();
        for (key, what) in keys {
            match rows.iter_mut().find(|(_, w)| w == what && *w != "the same") {
                Some((names, _)) => names.push(key),
                None => match rows.last_mut().filter(|_| *what == "the same") {
                    Some((names, _)) => names.push(key),
                    None => rows.push((vec![key], what)),
                },
            }
        }
        for (names, what) in rows {
            let names: Vec<String> = names.iter().map(|n| format!("`{n}`")).collect();
            // Writing to a string does not fail.
            let _ = writeln!(out, "| {file} | {} | {what} |", names.join(", "));
        }
    }
    out
}
