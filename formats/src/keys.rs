//! The keys of `config.json`, `generation_config.json` and `tokenizer_config.json`, and what nq does with each. A key that a file has
//! and that neither a reader nor a list of unused ones knows is said to be unknown.

use crate::left_over::LeftOver;
use Gguf::{May, Must, No};
use nq_model::{Architecture, DType, ModelConfig, OutputGate, RopeScaling};
use serde_json::{Value, json};
use std::fmt::Write;

/// The order of the value heads of recurrences, a key of nq's own: models read from GGUF files have them
/// [tiled](nq_model::Delta::tiled).
pub(crate) const VALUE_HEADS: &str = "linear_value_head_order";
pub(crate) const TILED: &str = "tiled";

/// A key and what nq does with it.
pub(crate) type KeyUse = (&'static str, &'static str);

/// A key of `config.json` that nq reads, what says the same in a GGUF file, and what nq writes of a model under either.
pub(crate) struct ConfigKey {
    /// Empty for what GGUF files alone say.
    pub(crate) name: &'static str,
    pub(crate) gguf: Gguf,
    pub(crate) models: Models,
    /// `None` if nothing is written.
    pub(crate) value: Written,
    what: &'static str,
}

/// A number in a GGUF file's metadata, by its key behind the architecture's name.
#[derive(Clone, Copy)]
pub(crate) enum Gguf {
    /// There is none, or others say it in another way.
    No,
    Must(&'static str),
    May(&'static str),
}

impl Gguf {
    pub(crate) fn name(self) -> Option<&'static str> {
        match self {
            Gguf::No => None,
            Gguf::Must(name) | Gguf::May(name) => Some(name),
        }
    }
}

type Models = fn(&Architecture) -> bool;
const ALL: Models = |_| true;
const MIXTURES: Models = |a| a.router().is_some();
const SHARING: Models = Architecture::shares_expert;
const HYBRIDS: Models = Architecture::has_delta;
const STREAMS: Models = Architecture::has_streams;

type Written = fn(&ModelConfig) -> Option<Value>;
const NOT: Written = |_| None;

#[rustfmt::skip]
const fn key(name: &'static str, gguf: Gguf, models: Models, value: Written, what: &'static str) -> ConfigKey {
    ConfigKey { name, gguf, models, value, what }
}

/// Keys of `config.json` that nq reads.
#[rustfmt::skip]
pub(crate) const CONFIG: &[ConfigKey] = &[
    key("architectures", No, ALL, |c| some([c.architecture.class]), "the model's class, which must be one that nq runs"),
    key("model_type", No, ALL, |c| some(c.architecture.model_type), "the same"),
    key("num_hidden_layers", No, ALL, |c| some(c.num_hidden_layers), "layers; files with more are refused"),
    // MTP layers stand behind the others.
    key("", Must("block_count"), ALL, |c| some(c.num_hidden_layers + c.mtp_layers), ""),
    key("max_position_embeddings", Must("context_length"), ALL, |c| some(c.max_position_embeddings), "the longest context"),
    key("hidden_size", Must("embedding_length"), ALL, |c| some(c.hidden_size), "width of the residual stream"),
    key("intermediate_size", Must("feed_forward_length"), ALL, |c| some(c.intermediate_size), "width of the MLP"),
    key("num_attention_heads", Must("attention.head_count"), ALL, |c| some(c.num_attention_heads), "query heads"),
    key("num_key_value_heads", May("attention.head_count_kv"), ALL, |c| some(c.num_key_value_heads), "key and value heads"),
    key("head_dim", May("attention.key_length"), ALL, |c| some(c.head_dim), "width of a head"),
    key("", May("attention.value_length"), ALL, |c| some(c.head_dim), ""),
    key("vocab_size", No, ALL, |c| some(c.vocab_size), "rows of the embedding"),
    key("num_experts", Must("expert_count"), MIXTURES, |c| some(c.experts?.count), "mixtures: experts of a layer"),
    key("num_local_experts", No, MIXTURES, NOT, "the same"),
    key("num_experts_per_tok", Must("expert_used_count"), MIXTURES, |c| some(c.experts?.per_token), "mixtures: experts of a token"),
    key("moe_intermediate_size", Must("expert_feed_forward_length"), MIXTURES, |c| some(c.experts?.width), "mixtures: width of an expert"),
    key("shared_expert_intermediate_size", Must("expert_shared_feed_forward_length"), SHARING, |c| some(c.experts?.shared), "mixtures: width of the shared expert; refused in those without one"),
    key("norm_topk_prob", No, MIXTURES, |c| some(c.experts?.normalized), "mixtures: the weights of a token's experts sum to 1"),
    key("decoder_sparse_step", No, MIXTURES, |c| c.experts.and(some(1)), "mixtures: other values than 1 are refused"),
    key("mlp_only_layers", No, MIXTURES, |c| c.experts.and(some([0; 0])), "mixtures: layers listed there are refused"),
    // Readers take a part for hybrids where nothing is said, also of heads that are rotated whole.
    key("", May("rope.dimension_count"), ALL, |c| in_part(c).then(|| c.rotary_dims().into()), ""),
    key("partial_rotary_factor", No, ALL, |c| in_part(c).then(|| (c.rotary_dims() as f64 / c.head_dim as f64).into()), "the part of a head that is rotated; 1 if absent, 0.25 in hybrids"),
    key("mtp_num_hidden_layers", May("nextn_predict_layers"), HYBRIDS, |c| some(c.mtp_layers), "hybrids: 1 if there is an MTP layer, to draft with; more are not used"),
    key("mtp_use_dedicated_embeddings", No, HYBRIDS, NOT, "hybrids: an MTP layer with an embedding of its own is not used"),
    key("full_attention_interval", May("full_attention_interval"), HYBRIDS, |c| some(c.delta?.interval), "hybrids: every so many layers, one has attention"),
    key("linear_conv_kernel_dim", Must("ssm.conv_kernel"), HYBRIDS, |c| some(c.delta?.conv), "hybrids: inputs of the convolution of a recurrence"),
    key("linear_key_head_dim", Must("ssm.state_size"), HYBRIDS, |c| some(c.delta?.key_dim), "hybrids: width of a recurrence's key heads"),
    key("linear_value_head_dim", No, HYBRIDS, |c| some(c.delta?.value_dim), "hybrids: width of a recurrence's value heads"),
    key("linear_num_key_heads", Must("ssm.group_count"), HYBRIDS, |c| some(c.delta?.key_heads), "hybrids: key heads of a recurrence"),
    key("linear_num_value_heads", Must("ssm.time_step_rank"), HYBRIDS, |c| some(c.delta?.value_heads), "hybrids: value heads of a recurrence"),
    key("", May("ssm.inner_size"), HYBRIDS, |c| some(c.delta?.values()), ""),
    key(VALUE_HEADS, No, HYBRIDS, |c| c.delta?.tiled.then(|| TILED.into()), "hybrids: `tiled` if value head h has key head h modulo their number, as in GGUF (a key of nq)"),
    key("output_gate_type", No, HYBRIDS, gate, "hybrids: the gate of a recurrence's output, `silu` (`swish`) or in Qwen3.8-Flash-Next `sigmoid`; others are refused"),
    key("hc_count", Must("hyper_connection.count"), STREAMS, |c| some(c.hyper?.streams), "Qwen3.8-Flash-Next: streams of the residual"),
    key("hc_lowrank", Must("hyper_connection.low_rank"), STREAMS, |c| some(c.hyper?.rank), "Qwen3.8-Flash-Next: width between the matrices by which streams are weighed"),
    key("indexer_n_heads", Must("attention.indexer.head_count"), STREAMS, |c| some(c.indexer?.heads), "Qwen3.8-Flash-Next: query heads of the indexer"),
    key("indexer_kv_heads", No, STREAMS, |c| c.indexer.and(some(1)), "Qwen3.8-Flash-Next: other numbers of its key heads than 1 are refused"),
    key("indexer_head_dim", Must("attention.indexer.key_length"), STREAMS, |c| some(c.indexer?.head_dim), "Qwen3.8-Flash-Next: width of its heads"),
    key("indexer_budget", Must("attention.indexer.top_k"), STREAMS, |c| some(c.indexer?.budget), "Qwen3.8-Flash-Next: positions that it chooses, in whole blocks"),
    key("indexer_compress_ratio", No, STREAMS, |c| some(c.indexer?.block), "Qwen3.8-Flash-Next: positions of a block"),
    key("ple_layer_ids", No, STREAMS, |c| some(c.ngrams.as_ref()?.layers.iter().map(|l| l + 1).collect::<Vec<_>>()), "Qwen3.8-Flash-Next: layers with a table of n-grams, from 1"),
    key("ple_embed_dim", No, STREAMS, |c| some(c.ngrams.as_ref()?.width), "Qwen3.8-Flash-Next: width of a token's rows of a table together; `hidden_size` if absent"),
    key("ple_conv_kernel_size", May("ple.conv_kernel"), STREAMS, |c| some(c.ngrams.as_ref()?.taps), "Qwen3.8-Flash-Next: inputs of the convolution over them; 4 if absent"),
    key("ple_embedding_dtype", No, STREAMS, NOT, "Qwen3.8-Flash-Next: tables of other types than `bfloat16`, `float16`, `float32` and `float8_e4m3fn` are refused"),
    key("ngram_size", May("ple.ngram_size"), STREAMS, |c| some(c.ngrams.as_ref()?.longest), "Qwen3.8-Flash-Next: tokens of the longest n-gram; 3 if absent"),
    key("heads_per_ngram", May("ple.heads_per_ngram"), STREAMS, |c| some(c.ngrams.as_ref()?.heads_per_length), "Qwen3.8-Flash-Next: rows for n-grams of a length; 8 if absent"),
    key("ngram_vocab_size_base", No, STREAMS, |c| some(c.ngrams.as_ref()?.least_rows), "Qwen3.8-Flash-Next: tables have as many rows for each head as the next primes from it on; 20000000 if absent"),
    key("make_ngram_vocab_size_divisible_by", No, STREAMS, |c| some(c.ngrams.as_ref()?.multiple), "Qwen3.8-Flash-Next: what the rows of a table are filled up to a multiple of; 128 if absent"),
    key("split_ngram_parts", No, STREAMS, |c| some(c.ngrams.as_ref()?.parts), "Qwen3.8-Flash-Next: tensors of a table, of equally many rows; 512 if absent"),
    key("seed", No, STREAMS, |c| some(c.ngrams.as_ref()?.seed), "Qwen3.8-Flash-Next: seed of the factors of n-grams; 1234 if absent"),
    key("rms_norm_eps", No, ALL, epsilon, "epsilon of the norms; 1e-6 if absent"),
    key("rope_theta", No, ALL, |c| Some(number(c.rope.theta)), "base of the rotary frequencies"),
    key("rope_parameters", No, ALL, NOT, "the same, and how they are stretched"),
    key("rope_scaling", No, ALL, scaling, "the same; taken before `rope_parameters`, as in transformers"),
    key("original_max_position_embeddings", No, ALL, NOT, "must be that of `rope_scaling`"),
    key("tie_word_embeddings", No, ALL, |c| some(c.tie_word_embeddings), "the head is the embedding, unless the files have a head that differs from it"),
    key("eos_token_id", No, ALL, ends, "tokens that end a text"),
    key("dtype", No, ALL, NOT, "type of the weights, for `inspect`; tensors state their own"),
    key("torch_dtype", No, ALL, |c| some(dtype(c)), "the same"),
    key("attention_bias", No, ALL, |c| c.architecture.matrices().all(|l| !l.bias).then(|| false.into()), "must be what the architecture has"),
    key("qkv_bias", No, ALL, NOT, "must be what the architecture has"),
    key("mlp_bias", No, ALL, NOT, "must be what the architecture has"),
    key("use_qk_norm", No, ALL, NOT, "must be what the architecture has"),
    key("attn_output_gate", No, ALL, NOT, "must be what the architecture has"),
    key("use_sliding_window", No, ALL, |_| some(false), "true is refused"),
    key("layer_types", No, ALL, NOT, "other layers than the architecture has, or in another order, are refused"),
    key("text_config", No, ALL, NOT, "these keys, of the text model of one that also sees images"),
    key("hidden_act", No, ALL, |_| some("silu"), "other functions than `silu` are refused"),
    key("quantization_config", No, ALL, NOT, "format and settings of quantized weights"),
    key("compression_config", No, ALL, NOT, "the same"),
];

fn some(value: impl Into<Value>) -> Option<Value> {
    Some(value.into())
}

fn dtype(c: &ModelConfig) -> &'static str {
    match c.dtype {
        Some(DType::F16) => "float16",
        Some(DType::F32) => "float32",
        _ => "bfloat16",
    }
}

/// The gate of a recurrence's output, where an architecture has several.
fn gate(c: &ModelConfig) -> Option<Value> {
    let gate = c.delta.filter(|_| c.architecture.sigmoid_gates)?.gate;
    some(match gate {
        OutputGate::Silu => "silu",
        OutputGate::Sigmoid => "sigmoid",
    })
}

fn ends(c: &ModelConfig) -> Option<Value> {
    // N-grams do not reach across the first.
    let first = c.ngrams.as_ref().map(|n| n.end);
    let others = c
        .eos_token_ids
        .iter()
        .copied()
        .filter(|&id| Some(id) != first);
    let ids: Vec<u32> = first.into_iter().chain(others).collect();
    Some(match ids.as_slice() {
        [] => Value::Null,
        [one] => (*one).into(),
        ids => ids.to_vec().into(),
    })
}

/// f32 to decimal and back, so that 1e-6 is not written as 9.999999974752427e-7.
fn epsilon(c: &ModelConfig) -> Option<Value> {
    some(c.rms_norm_eps.to_string().parse().unwrap_or(1e-6))
}

/// Whole numbers are written without a fraction, as published.
fn number(v: f64) -> Value {
    match v.fract() == 0.0 && v.abs() < 9e15 {
        true => (v as i64).into(),
        false => v.into(),
    }
}

/// True if files have to say which part of a head is rotated.
fn in_part(c: &ModelConfig) -> bool {
    c.rope.dims.is_some() || c.architecture.rotary_parts > 1
}

fn scaling(c: &ModelConfig) -> Option<Value> {
    Some(match c.rope.scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Yarn {
            factor,
            original_max_position_embeddings,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor,
        } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original_max_position_embeddings,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "truncate": truncate,
            "attention_factor": attention_factor,
        }),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position_embeddings,
        }),
    })
}

/// Keys of `rope_parameters` and `rope_scaling` that nq reads.
#[rustfmt::skip]
pub(crate) const ROPE: &[KeyUse] = &[
    ("rope_type", "`default`, `yarn` and `llama3`; others are refused"),
    ("type", "the same, as older files name it"),
    ("rope_theta", "base of the frequencies, taken before the one outside"),
    ("partial_rotary_factor", "the part of a head that is rotated, taken before the one outside"),
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
    ("mrope_section", "how many frequencies follow time, row and column of a token of an image, in turn; a third each if absent"),
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
    ("eos_token_id", "tokens that end a text, in addition to those of config.json and the tokenizer"),
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
    ("mamba_ssm_dtype", STATE), ("mrope_interleaved", COORDINATES), ("sliding_window", WINDOW),
    ("video_token_id", IMAGES), ("vision_config", IMAGES), ("vision_end_token_id", IMAGES),
    ("vision_start_token_id", IMAGES), ("task_specific_params", NOTHING), ("transformers_version", NOTHING),
    ("unsloth_fixed", NOTHING), ("unsloth_version", NOTHING), ("use_bfloat16", NOTHING), ("use_cache", NOTHING),
];

/// Keys of `preprocessor_config.json` that nq reads.
#[rustfmt::skip]
pub(crate) const PREPROCESSOR: &[KeyUse] = &[
    ("size", "`shortest_edge` and `longest_edge` are the pixels of a whole image at least and at most"),
    ("min_pixels", "the same, in older files"), ("max_pixels", "the same"),
    ("image_mean", "subtracted from red, green and blue, which are 0 to 1; one half if absent"),
    ("image_std", "what the differences are divided by; one half if absent"),
    ("patch_size", "must be what config.json says"), ("temporal_patch_size", "must be what config.json says"),
    ("merge_size", "must be what config.json says"), ("do_resize", "false is refused"),
    ("do_rescale", "false is refused"), ("do_normalize", "false is refused"), ("do_convert_rgb", "false is refused"),
    ("resample", "other methods than bicubic (3) are refused"), ("rescale_factor", "must be 1/255"),
];

/// Keys of `preprocessor_config.json` that change nothing in what nq computes.
#[rustfmt::skip]
pub(crate) const PREPROCESSOR_UNUSED: &[KeyUse] = &[
    ("auto_map", NOTHING), ("crop_size", NOTHING), ("data_format", NOTHING), ("default_to_square", NOTHING),
    ("device", NOTHING), ("disable_grouping", NOTHING), ("image_processor_type", NOTHING),
    ("input_data_format", NOTHING), ("processor_class", NOTHING), ("return_tensors", NOTHING),
];
/// Why a key is left over that no list has.
pub(crate) const UNKNOWN: &str = "a key that nq does not know";
const NOTHING: &str = "concerns other programs";
const TRAINING: &str = "is for training";
const PROMPT: &str = "prompts are as templates and tokenizers make them";
const LENGTH: &str = "lengths are set by --ctx and --max-tokens";
const IMAGES: &str = "what sees images is read if the files have it";
const COORDINATES: &str =
    "the coordinates of a position are equal in text, and take frequencies in turn in images";
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
    let named = CONFIG.iter().filter(|k| !k.name.is_empty());
    let config: Vec<KeyUse> = named.map(|k| (k.name, k.what)).collect();
    let files = [
        ("config.json", &config[..]),
        ("`rope_parameters`, `rope_scaling`", ROPE),
        ("generation_config.json", GENERATION),
        ("config.json, generation_config.json", UNUSED),
        ("preprocessor_config.json", PREPROCESSOR),
        ("preprocessor_config.json", PREPROCESSOR_UNUSED),
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
