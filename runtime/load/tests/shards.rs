//! The parts of a model that several devices have, put together again.

use crate::common::{Store, hybrid, small_config, small_mixture};
use nq_formats::trellis::Code;
use nq_formats::{AffineScheme, Bits, Group, Shard, TrellisScheme, Weight, WeightStore, Zeros};
use nq_model::names::layer_of;
use nq_model::{Delta, Dims, LinearKind, ModelConfig, Parameter, Preset, find};

/// Which of `ranks` parts has row `row` of the outputs of a Linear (or of a bias), by its heads.
fn owner_of_row(kind: LinearKind, row: usize, c: &ModelConfig, ranks: usize) -> Option<usize> {
    let (heads, kv_heads) = (c.num_attention_heads, c.num_key_value_heads);
    let by = |index: usize, all: usize| Some(index / (all / ranks));
    let experts = c.experts;
    match kind {
        LinearKind::Q => {
            let gates = if c.delta.is_some() { 2 } else { 1 };
            by(row / (gates * c.head_dim), heads)
        }
        LinearKind::K | LinearKind::V => by(row / c.head_dim, kv_heads),
        LinearKind::DeltaQkv => {
            let d = c.delta?;
            match row.checked_sub(2 * d.key_heads * d.key_dim) {
                None => by(row / d.key_dim % d.key_heads, d.key_heads),
                Some(value) => owner_of_value_head(value / d.value_dim, &d, ranks),
            }
        }
        LinearKind::DeltaZ => owner_of_value_head(row / c.delta?.value_dim, &c.delta?, ranks),
        LinearKind::DeltaB | LinearKind::DeltaA => owner_of_value_head(row, &c.delta?, ranks),
        LinearKind::Gate | LinearKind::Up => match experts {
            Some(e) => by(row % e.width, e.width),
            None => by(row, c.intermediate_size),
        },
        LinearKind::SharedGate | LinearKind::SharedUp => by(row, experts?.shared),
        LinearKind::O
        | LinearKind::DeltaOut
        | LinearKind::Router
        | LinearKind::Down
        | LinearKind::SharedScore
        | LinearKind::SharedDown
        | LinearKind::AttentionMixDown
        | LinearKind::AttentionMixUp
        | LinearKind::AttentionInject
        | LinearKind::MlpMixDown
        | LinearKind::MlpMixUp
        | LinearKind::MlpInject
        | LinearKind::IndexQk
        | LinearKind::NgramKey
        | LinearKind::NgramValue => None,
    }
}

fn owner_of_value_head(head: usize, d: &Delta, ranks: usize) -> Option<usize> {
    let key_head = match d.tiled {
        true => head % d.key_heads,
        false => head / (d.value_heads / d.key_heads),
    };
    Some(key_head / (d.key_heads / ranks))
}

/// Which part has input `col` of a Linear.
fn owner_of_col(kind: LinearKind, col: usize, c: &ModelConfig, ranks: usize) -> Option<usize> {
    match kind {
        LinearKind::O => Some(col / c.head_dim / (c.num_attention_heads / ranks)),
        LinearKind::DeltaOut => owner_of_value_head(col / c.delta?.value_dim, &c.delta?, ranks),
        LinearKind::Down => match c.experts {
            Some(e) => Some(col / (e.width / ranks)),
            None => Some(col / (c.intermediate_size / ranks)),
        },
        LinearKind::SharedDown => Some(col / (c.experts?.shared / ranks)),
        _ => None,
    }
}

fn values(w: &Weight) -> Vec<Vec<f32>> {
    let Dims { rows, cols } = w.dims();
    let mut all = vec![vec![0.0; cols]; rows];
    for (row, values) in all.iter_mut().enumerate() {
        w.dequantize_row(row, values).unwrap();
    }
    all
}

/// Compares every parameter of every part with the rows and inputs of the whole that belong to it.
fn check(name: &str, c: &ModelConfig, store: &Store, ranks: usize) {
    for rank in 0..ranks {
        let shard = Shard::tensors(rank, ranks);
        let (config, part) = (shard.config(c).unwrap(), shard.store(store, c).unwrap());
        let mine = |owner: Option<usize>| owner.is_none_or(|o| o == rank);
        for layer in 0..c.num_hidden_layers {
            for parameter in c.layer(layer).parameters() {
                if let Parameter::Linear(linear) = parameter {
                    let named = linear.name(layer);
                    let whole = values(&store.matrix(&named, linear.dims(c)).unwrap());
                    let found = part.matrix(&named, linear.dims(&config)).unwrap();
                    let row = |r: usize| owner_of_row(linear.kind, r, c, ranks);
                    let col = |i: usize| owner_of_col(linear.kind, i, c, ranks);
                    let rows = whole.iter().enumerate().filter(|(r, _)| mine(row(*r)));
                    let expected: Vec<Vec<f32>> = rows
                        .map(|(_, values)| {
                            let cols = values.iter().enumerate().filter(|(i, _)| mine(col(*i)));
                            cols.map(|(_, v)| *v).collect()
                        })
                        .collect();
                    assert_eq!(found.dims(), linear.dims(&config), "{name} {named}");
                    assert!(
                        values(&found) == expected,
                        "{name} {named}, part {rank} of {ranks}"
                    );
                }
                if let Parameter::Bias(linear) = parameter {
                    let named = linear.bias_name(layer);
                    let all = store
                        .vector(&named, linear.dims(c).rows)
                        .unwrap()
                        .to_f32()
                        .unwrap();
                    let found = part.vector(&named, linear.dims(&config).rows).unwrap();
                    let rows = all.iter().enumerate();
                    let rows = rows.filter(|(r, _)| mine(owner_of_row(linear.kind, *r, c, ranks)));
                    let expected: Vec<f32> = rows.map(|(_, v)| *v).collect();
                    assert_eq!(found.to_f32().unwrap(), expected, "{name} {named}");
                }
                if let (Parameter::Vector(row), Some(d)) = (parameter, c.delta) {
                    let named = row.name(layer);
                    let all = store
                        .vector(&named, row.len.of(c))
                        .unwrap()
                        .to_f32()
                        .unwrap();
                    let found = part.vector(&named, row.len.of(&config)).unwrap();
                    // The taps of a channel, or a value of a head.
                    let owner = |i: usize| match all.len() == d.value_heads {
                        true => owner_of_value_head(i, &d, ranks),
                        false => owner_of_row(LinearKind::DeltaQkv, i / d.conv, c, ranks),
                    };
                    let mine = all.iter().enumerate().filter(|(i, _)| mine(owner(*i)));
                    let expected: Vec<f32> = mine.map(|(_, v)| *v).collect();
                    assert_eq!(found.to_f32().unwrap(), expected, "{name} {named}");
                }
            }
        }
        let embedding = ("model.embed_tokens", Dims::new(c.vocab_size, c.hidden_size));
        let whole = values(&store.matrix(embedding.0, embedding.1).unwrap());
        assert!(
            values(&part.matrix(embedding.0, embedding.1).unwrap()) == whole,
            "{name}"
        );
    }
}

#[test]
fn parts_are_those_of_their_heads() {
    let wide = |c: ModelConfig| ModelConfig {
        intermediate_size: 512,
        head_dim: 64,
        hidden_size: 128,
        ..c
    };
    let mixture = ModelConfig {
        experts: small_mixture(2, true)
            .experts
            .map(|e| nq_model::Experts { width: 256, ..e }),
        ..wide(small_mixture(2, true))
    };
    let hybrid = |gguf: &str, tiled: bool| {
        let small = hybrid(gguf, 6, false);
        ModelConfig {
            experts: small.experts.map(|e| nq_model::Experts {
                width: 256,
                shared: 128,
                ..e
            }),
            delta: small.delta.map(|d| Delta {
                value_dim: 64,
                key_dim: 32,
                tiled,
                ..d
            }),
            ..wide(small)
        }
    };
    let qwen2 = ModelConfig {
        architecture: find(|a| a.gguf, "qwen2").unwrap(),
        ..wide(small_config())
    };
    for (name, c) in [
        ("dense", wide(small_config())),
        ("biased", qwen2),
        ("mixture", mixture),
        ("hybrid", hybrid("qwen35", false)),
        ("tiled hybrid", hybrid("qwen35", true)),
        ("hybrid mixture", hybrid("qwen35moe", true)),
    ] {
        let plain = Store::random(&c, 7);
        let scheme = |bits, group, zeros| plain.quantized(AffineScheme::new(bits, group, zeros));
        for (scheme, store) in [
            ("f32", plain.clone()),
            ("int4", scheme(Bits::B4, Group::Size(64), Zeros::Integer)),
            ("int3", scheme(Bits::B3, Group::Size(32), Zeros::Offset)),
            ("int6", scheme(Bits::B6, Group::Size(32), Zeros::Integer)),
            ("int8", scheme(Bits::B8, Group::Channel, Zeros::None)),
            ("mixed", plain.mixed()),
        ] {
            check(&format!("{name} {scheme}"), &c, &store, 2);
        }
    }
}

#[test]
fn what_cannot_be_divided_is_refused_by_name() {
    let refused = |c: &ModelConfig, ranks| {
        let shard = Shard::tensors(0, ranks);
        shard
            .config(c)
            .err()
            .map(|e| e.to_string())
            .unwrap_or_default()
    };
    let c = small_config();
    let beyond = Shard::tensors(2, 2);
    assert!(beyond.config(&c).is_err());
    assert!(Shard::tensors(0, 0).config(&c).is_err());
    assert!(refused(&c, 3).contains("num_attention_heads"));
    assert!(refused(&c, 4).contains("num_key_value_heads"));
    assert!(
        refused(
            &ModelConfig {
                intermediate_size: 81,
                ..c.clone()
            },
            2
        )
        .contains("intermediate_size")
    );
    // Groups of 32 that two parts would share: 80 inputs.
    let scheme = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
    let store = Store::random(&c, 1).quantized(scheme);
    let shard = Shard::tensors(1, 2);
    let part = shard.store(&store, &c).unwrap();
    let found = part
        .matrix("model.layers.0.mlp.down_proj", Dims::new(48, 40))
        .err()
        .unwrap()
        .to_string();
    assert!(
        found.contains("down_proj") && found.contains("groups of 32"),
        "{found}"
    );
}

/// A stage has its layers by their numbers from its first one on, and what is not of a layer.
#[test]
fn stages_have_their_layers() {
    let hybrid = ModelConfig {
        num_hidden_layers: 8,
        ..hybrid("qwen35", 4, false)
    };
    for (c, first) in [(small_config(), 1), (hybrid, 4)] {
        let store = Store::random(&c, 3);
        let layers = first..c.num_hidden_layers;
        let shard = Shard {
            rank: 1,
            ranks: 2,
            layers: Some(layers.clone()),
            key_copies: 1,
        };
        let (config, part) = (shard.config(&c).unwrap(), shard.store(&store, &c).unwrap());
        assert_eq!(config.num_hidden_layers, layers.len());
        for (index, layer) in layers.clone().enumerate() {
            assert!(std::ptr::eq(config.layer(index), c.layer(layer)));
            for linear in c.layer(layer).matrices() {
                let (name, dims) = (linear.name(index), linear.dims(&c));
                let whole = store.matrix(&linear.name(layer), dims).unwrap();
                assert!(part.contains(&name));
                assert!(
                    values(&part.matrix(&name, dims).unwrap()) == values(&whole),
                    "{name}"
                );
            }
        }
        assert!(part.vector("model.norm", c.hidden_size).is_ok());
        let layers_of = |store: &dyn WeightStore| -> Vec<usize> {
            let entries = store.entries().into_iter();
            entries.filter_map(|e| layer_of(&e.name)).collect()
        };
        let own = layers_of(&store).into_iter().filter(|l| layers.contains(l));
        let own: Vec<usize> = own.map(|l| l - first).collect();
        assert_eq!(layers_of(&part), own);
    }
}

#[test]
fn stages_without_layers_or_from_another_kind_of_layer_are_refused() {
    let c = ModelConfig {
        num_hidden_layers: 8,
        ..hybrid("qwen35", 4, false)
    };
    for layers in [0..0, 2..8, 4..9] {
        let shard = Shard {
            rank: 0,
            ranks: 1,
            layers: Some(layers.clone()),
            key_copies: 1,
        };
        assert!(shard.config(&c).is_err(), "{layers:?}");
    }
}

/// Copies of key heads, of a whole model, of a part of every layer, and of a stage.
#[test]
fn key_heads_are_copied() {
    let c = ModelConfig {
        num_attention_heads: 8,
        num_key_value_heads: 2,
        ..small_config()
    };
    assert_eq!(
        [1, 2, 3, 4, 8].map(|most| Shard::copies_for(&c, most)),
        [4, 2, 2, 1, 1]
    );
    let store = Store::random(&c, 5);
    let last = c.num_hidden_layers - 1;
    for (shard, heads, layer) in [
        (Shard::tensors(0, 1), vec![0, 0, 1, 1], 0),
        (Shard::tensors(1, 2), vec![1, 1], 0),
        (
            Shard {
                layers: Some(last..last + 1),
                ..Shard::tensors(1, 2)
            },
            vec![0, 0, 1, 1],
            last,
        ),
    ] {
        let shard = Shard {
            key_copies: 2,
            ..shard
        };
        let config = shard.config(&c).unwrap();
        assert_eq!(config.num_key_value_heads, heads.len());
        let part = shard.store(&store, &c).unwrap();
        for (index, name) in [(0, "self_attn.k_proj"), (0, "self_attn.v_proj")] {
            let dims = Dims::new(c.num_key_value_heads * c.head_dim, c.hidden_size);
            let whole = store.matrix(&format!("model.layers.{layer}.{name}"), dims);
            let whole = values(&whole.unwrap());
            let expected: Vec<Vec<f32>> = (heads.iter())
                .flat_map(|h| whole[h * c.head_dim..(h + 1) * c.head_dim].to_vec())
                .collect();
            let dims = Dims::new(heads.len() * c.head_dim, c.hidden_size);
            let found = part.matrix(&format!("model.layers.{index}.{name}"), dims);
            assert!(values(&found.unwrap()) == expected, "{name}, {shard:?}");
        }
    }
}

/// What a store says of a part's schemes, without reading codes, is what the part is read in: whether its rows are copied,
/// left out, or all there.
#[test]
fn parts_tell_their_schemes() {
    let c = ModelConfig {
        hidden_size: 128,
        intermediate_size: 256,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        head_dim: 128,
        ..small_config()
    };
    let int4 = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
    let octagon = TrellisScheme::of_bits(Code::Octagon, 4.0).unwrap();
    let copied = Shard {
        key_copies: 2,
        ..Shard::tensors(0, 1)
    };
    for (store, shard) in [
        (Store::random(&c, 5).quantized(int4), copied.clone()),
        (Store::random(&c, 5).in_trellises(|_| octagon), copied),
        (Store::random(&c, 5).quantized(int4), Shard::tensors(1, 2)),
    ] {
        let (config, part) = (shard.config(&c).unwrap(), shard.store(&store, &c).unwrap());
        for linear in config.layer(0).matrices() {
            let (name, dims) = (linear.name(0), linear.dims(&config));
            let read = part.matrix_in_levels(&name, dims).unwrap();
            let Weight::Quantized(quantized) = &read else {
                panic!("{name} is dense");
            };
            assert_eq!(
                part.scheme_in_levels(&name),
                Some(quantized.scheme()),
                "{name}"
            );
            // Values, of copies too.
            if shard.ranks == 1 {
                let whole = store.matrix(&name, linear.dims(&c)).unwrap();
                let head = |row: usize| match linear.kind {
                    LinearKind::K | LinearKind::V => {
                        row / (2 * c.head_dim) * c.head_dim + row % c.head_dim
                    }
                    _ => row,
                };
                let (read, whole) = (values(&read), values(&whole));
                assert!(
                    (0..dims.rows).all(|row| read[row] == whole[head(row)]),
                    "{name}"
                );
            }
        }
    }
}

/// A head that is not the embedding is divided by tokens, where tiles allow it.
#[test]
fn heads_are_divided_by_tokens() {
    let c = ModelConfig {
        vocab_size: 96,
        tie_word_embeddings: false,
        ..small_config()
    };
    let store = Store::random(&c, 5);
    let shard = Shard::tensors(1, 2);
    assert_eq!(shard.head_rows(&c), 48..96);
    let part = shard.store(&store, &c).unwrap();
    let dims = Dims::new(c.vocab_size, c.hidden_size);
    let whole = values(&store.matrix("lm_head", dims).unwrap());
    assert!(values(&part.matrix("lm_head", dims).unwrap()) == whole[48..]);
    let odd = ModelConfig {
        vocab_size: 90,
        ..c.clone()
    };
    assert_eq!(shard.head_rows(&odd), 0..90);
    let tied = ModelConfig {
        tie_word_embeddings: true,
        ..c
    };
    assert_eq!(shard.head_rows(&tied), 0..96);
}

#[test]
fn columns_keep_their_scheme() {
    let c = small_config();
    let dims = Dims::new(c.hidden_size, c.intermediate_size);
    let name = "model.layers.0.mlp.down_proj";
    let scheme = |bits, group| AffineScheme::new(bits, Group::Size(group), Zeros::Integer);
    for (bits, group) in [(Bits::B4, 8), (Bits::B5, 16), (Bits::B8, 32)] {
        let scheme = scheme(bits, group);
        let store = Store::random(&c, 5).quantized(scheme);
        let whole = store.matrix(name, dims).unwrap();
        let all = values(&whole);
        for cols in [0..32, 32..dims.cols] {
            let part = whole.columns(cols.clone()).unwrap();
            assert_eq!(part.scheme_name(), whole.scheme_name());
            assert_eq!(part.dims(), Dims::new(dims.rows, cols.len()));
            for (part, row) in values(&part).iter().zip(&all) {
                assert_eq!(part, &row[cols.clone()]);
            }
        }
        for within in [0..33, 31..dims.cols, 0..dims.cols + 1, 0..0] {
            assert!(whole.columns(within.clone()).is_err(), "{within:?}");
        }
    }
    let whole = Store::random(&c, 5).matrix(name, dims).unwrap();
    let part = values(&whole.columns(3..10).unwrap());
    let all = values(&whole);
    assert!(part.iter().zip(&all).all(|(part, row)| part == &row[3..10]));
}

/// Two GPUs, and four, run the published sizes, but for those whose residual has several streams.
#[test]
fn published_sizes_can_be_divided() {
    for preset in Preset::all() {
        let c = preset.config();
        if c.hyper.is_some() {
            let refused = Shard::tensors(1, 2).config(&c).unwrap_err().to_string();
            assert!(refused.contains("a residual of one stream"), "{refused}");
            continue;
        }
        for ranks in [2, 4] {
            let shard = Shard::tensors(ranks - 1, ranks).config(&c);
            let divides = c.num_key_value_heads.is_multiple_of(ranks);
            match shard {
                Ok(shard) => assert!(shard.parameters() < c.parameters(), "{}", preset.name),
                Err(e) => assert!(!divides, "{} by {ranks}: {e}", preset.name),
            }
        }
    }
}
