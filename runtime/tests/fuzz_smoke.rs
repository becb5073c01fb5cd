//! Runs the text fuzz targets over `fuzz/seeds` and mutations of valid files, so that every test run
//! tries some.

#[path = "../../fuzz/src/text_targets.rs"]
mod text_targets;

use nq_kernels::rng::Philox;
use nq_testkit::fuzz::replay;
use serde_json::json;

/// Changes a few bytes, or inserts some of `tokens`.
fn mutate(rng: &mut Philox, seed: &[u8], tokens: &[&str]) -> Vec<u8> {
    let mut below = |n: usize| rng.next_u32() as usize % n.max(1);
    let mut data = seed.to_vec();
    for _ in 0..1 + below(4) {
        let at = below(data.len());
        match below(4) {
            0 if !data.is_empty() => data[at] ^= 1 << below(8),
            1 => {
                let end = (at + below(20)).min(data.len());
                drop(data.drain(at.min(end)..end));
            }
            _ => {
                let token = tokens[below(tokens.len())].bytes();
                drop(data.splice(at..at, token));
            }
        }
    }
    data
}

#[test]
fn templates() {
    let seeds = [
        "{% for m in messages %}{{ m.role }}\n{{ m['content']|trim }}{% if loop.last %}!{% endif %}{% endfor %}",
        "{%- if tools %}{{ tools[0]|tojson(indent=2) }}{% endif -%}{{ messages[1:]|length }}",
        "{% macro f(a, b='c') %}{{ a ~ b }}{% endmacro %}{{ f(messages[0].role) }}",
        "{% set x = messages|map(attribute='role')|list %}{{ x[-1].split('a')[0] }}{# c #}",
        "{{ 1 is divisibleby 2 }}{{ 7 // 2 }}{{ 'a %s'|format(3) }}{{ strftime_now('%Y') }}",
    ];
    let tokens = [
        "{{",
        "}}",
        "{%",
        "%}",
        "-",
        "|list",
        "|tojson",
        "|slice(0)",
        "|batch(0)",
        "(",
        ")",
        "[",
        "::",
        "-1",
        "0",
        "9999",
        "1e9",
        " is divisibleby 0",
        " % 0",
        " // 0",
        "none",
        "true",
        "'",
        "~",
        ".",
        "messages",
        "tools",
        " in ",
        " not ",
        "|round(99)",
        "|indent(9999)",
        "{% raw %}",
        "{#",
        "%Q",
        "|map('x')",
        "|sort(attribute='a.b')",
        "|groupby(1)",
        "loop",
        "|format",
        "{:>99}",
        "\u{301}",
    ];
    replay("template", text_targets::template, &seeds);
    let mut rng = Philox::new(1, 0);
    for i in 0..1500 {
        let seed = seeds[i % seeds.len()];
        text_targets::template(&mutate(&mut rng, seed.as_bytes(), &tokens));
    }
}

/// A small tokenizer with all kinds of parts that nq reads.
#[test]
fn tokenizers() {
    let vocab: serde_json::Map<_, _> = ["a", "b", "ab", "Ġ", "Ġa"]
        .iter()
        .enumerate()
        .map(|(i, t)| ((*t).to_owned(), i.into()))
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": false});
    let seed = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 5, "content": "<|im_end|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\p{L}+|\\s+(?!\\S)"}, "behavior": "Isolated",
             "invert": false},
            {"type": "Digits", "individual_digits": true},
            {"type": "Punctuation", "behavior": "Contiguous"}, byte_level]},
        "post_processor": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": [["a", "b"], ["Ġ", "a"]]}})
    .to_string();
    text_targets::tokenizer(seed.as_bytes());
    replay("tokenizer", text_targets::tokenizer, &[&seed]);
    let tokens = [
        "null",
        "-1",
        "0",
        "5",
        "4294967295",
        "1e99",
        "[]",
        "{}",
        "\"\"",
        "\"a\"",
        ",",
        "true",
        "\"String\":\"\"",
        "a*",
        "(a*)*b",
        "\\b",
        "(?=a)",
        "^",
        "$",
        "\"Replace\"",
        "\"Precompiled\"",
        "\"Sequence\"",
        "\"MergedWithNext\"",
        "\"Removed\"",
        "\"##\"",
        "\u{301}",
        "\\u0000",
    ];
    let mut rng = Philox::new(2, 0);
    for _ in 0..1500 {
        text_targets::tokenizer(&mutate(&mut rng, seed.as_bytes(), &tokens));
    }
}
