//! A row's logits have the same bits whichever rows are computed with it, however its sequence is cut into pieces, and
//! whether its beginning was computed or kept.

use crate::common::{
    Store, fused_config, hybrid, options, round_to_nearest, small_config, small_mixture, tokens,
    wide_hybrid,
};
use nq_cpu::FEW_ROWS;
use nq_formats::{AffineScheme, Bits, Group, Tensor, Weight, Zeros};
use nq_kernels::{Isa, IsaChoice};
use nq_model::{DType, ModelConfig};
use nq_runtime::{
    ActivationChoice, Chunk, Engine, EngineKind, KvType, LoadOptions, LogitsWanted, Session,
};
use nq_testkit::sessions::{chunk, session_spec};
use std::sync::Arc;

/// A dense model, one whose heads are no whole vectors, a mixture, and hybrids without and with experts.
fn families() -> [(&'static str, ModelConfig); 5] {
    let narrow = ModelConfig {
        head_dim: 20,
        ..small_config()
    };
    [
        ("dense", small_config()),
        ("dense, heads of 20", narrow),
        ("mixture", small_mixture(2, true)),
        ("hybrid", hybrid("qwen35", 6, false)),
        ("hybrid mixture", hybrid("qwen35moe", 4, true)),
    ]
}

/// The store with every matrix as dense values of another type.
fn dense(store: &Store, dtype: DType) -> Store {
    let mut store = store.dequantized();
    for w in store.matrices.values_mut() {
        let Weight::Dense(t) = &*w else {
            unreachable!("dequantized")
        };
        let values = t.to_f32().unwrap();
        let data: Vec<u8> = match dtype {
            DType::F16 => (values.iter())
                .flat_map(|&v| half::f16::from_f32(v).to_le_bytes())
                .collect(),
            _ => (values.iter())
                .flat_map(|&v| half::bf16::from_f32(v).to_le_bytes())
                .collect(),
        };
        *w = Weight::Dense(Tensor::new(dtype, t.shape().to_vec(), data.into()).unwrap());
    }
    store
}

/// Models of every family with weights of every kind, and the activations they are computed with.
fn models() -> Vec<(String, ModelConfig, Store, ActivationChoice)> {
    let int = |bits, group, zeros| AffineScheme::new(bits, Group::Size(group), zeros);
    let mut models = Vec::new();
    let auto = ActivationChoice::Auto;
    for (family, config) in families() {
        let plain = Store::random(&config, 3);
        let three = int(Bits::B3, 16, Zeros::Integer);
        let four = plain.quantized(int(Bits::B4, 32, Zeros::Integer));
        let kinds = [
            ("3 bits", plain.quantized(three), auto),
            ("4 bits in f32", four.clone(), ActivationChoice::F32),
            ("4 bits", four, auto),
            (
                "8 bits",
                plain.quantized(int(Bits::B8, 64, Zeros::None)),
                auto,
            ),
            ("mixed", plain.mixed(), auto),
            ("mixed in f32", plain.mixed(), ActivationChoice::F32),
            ("blocks of GGUF", plain.k_quants(), auto),
            (
                "bf16",
                dense(&plain, DType::BF16),
                ActivationChoice::AutoBf16,
            ),
            ("bf16 in f32", dense(&plain, DType::BF16), auto),
            ("f16", dense(&plain, DType::F16), auto),
            ("f32", plain, auto),
        ];
        for (kind, store, activations) in kinds {
            models.push((
                format!("{family}, {kind}"),
                config.clone(),
                store,
                activations,
            ));
        }
    }
    for (family, config) in [
        ("dense", fused_config()),
        ("hybrid", wide_hybrid("qwen35", 4, false)),
    ] {
        let config = ModelConfig {
            num_hidden_layers: if config.delta.is_some() { 4 } else { 2 },
            hidden_size: 256,
            intermediate_size: 512,
            ..config
        };
        let store = Store::random(&config, 3);
        let trellises = store.in_trellises(|name| match name.contains("mlp") {
            true => "trellis3 octagon".parse().unwrap(),
            false => "trellis4 sum".parse().unwrap(),
        });
        models.push((
            format!("{family}, EXL3"),
            config.clone(),
            store.in_exl3(&config),
            auto,
        ));
        for activations in [auto, ActivationChoice::F32] {
            let name = format!("{family}, trellises, {activations}");
            models.push((name, config.clone(), trellises.clone(), activations));
        }
    }
    models
}

fn load(model: &(String, ModelConfig, Store, ActivationChoice), isa: IsaChoice) -> Arc<dyn Engine> {
    let (_, config, store, activations) = model;
    let options = LoadOptions {
        isa,
        activations: *activations,
        // The number of threads changes nothing, and one does not wait for others on a busy machine.
        threads: Some(1),
        ..options(EngineKind::Nq)
    };
    nq_load::load(config, store, &options, &()).unwrap()
}

fn session(engine: &dyn Engine, kv: KvType) -> Box<dyn Session> {
    engine.session(session_spec(3, 640, kv, 640)).unwrap()
}

/// The bits of the logits of further tokens of some sequences, one after another.
fn bits(s: &mut dyn Session, parts: &[(usize, &[u32])]) -> Vec<u32> {
    let chunk = |&(slot, tokens)| chunk(slot, tokens, LogitsWanted::All);
    let chunks: Vec<Chunk<'_>> = parts.iter().map(chunk).collect();
    let logits = s.forward(&chunks, None).unwrap();
    logits.data.iter().map(|v| v.to_bits()).collect()
}

/// Those of a text in pieces of the given lengths, over and over.
fn in_pieces(s: &mut dyn Session, text: &[u32], lengths: &[usize]) -> Vec<u32> {
    s.truncate(0, 0);
    let mut found = Vec::new();
    let mut rest = text;
    for &len in lengths.iter().cycle() {
        let (piece, others) = rest.split_at(len.min(rest.len()));
        found.extend(bits(s, &[(0, piece)]));
        rest = others;
        if rest.is_empty() {
            return found;
        }
    }
    unreachable!("there are lengths")
}

/// Any number of rows, with every kind of weight, on every instruction set.
#[test]
fn rows_have_the_bits_of_each_alone() {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.available());
    let best = isas.clone().next_back();
    let text = tokens(40, 4);
    let models = models();
    for isa in isas {
        for model in &models {
            let engine = load(model, IsaChoice::Force(isa));
            let mut s = session(&*engine, KvType::F16);
            assert_eq!([s.exact_rows(), s.draft_rows()], [640, FEW_ROWS]);
            let alone = in_pieces(&mut *s, &text, &[1]);
            let lengths: Vec<usize> = match Some(isa) == best {
                true => (2..=33).collect(),
                false => vec![2, 5, 9, 33],
            };
            for len in lengths {
                let together = in_pieces(&mut *s, &text, &[len]);
                assert!(together == alone, "{}, {isa}: pieces of {len}", model.0);
            }
        }
    }
}

/// A long text in long and short pieces, alone and beside others, from a fresh and from a kept beginning.
#[test]
fn long_texts_have_the_bits_of_their_rows() {
    let text = tokens(420, 5);
    let others = [tokens(420, 6), tokens(420, 7)];
    for (i, model) in models().iter().enumerate() {
        let (engine, vocab) = (load(model, IsaChoice::Auto), model.1.vocab_size);
        let kv = [KvType::F16, KvType::Int8][i % 2];
        let name = format!("{}, {kv}", model.0);
        let mut s = session(&*engine, kv);
        let alone = in_pieces(&mut *s, &text, &[1]);
        for lengths in [&[420][..], &[255, 1, 1, 70], &[130, 7], &[8, 9, 64]] {
            let pieces = in_pieces(&mut *s, &text, lengths);
            assert!(pieces == alone, "{name}: pieces of {lengths:?}");
        }
        // Beside two others, which begin and go on in other steps.
        (0..3).for_each(|slot| assert_eq!(s.truncate(slot, 0), 0));
        s.keep_at(0, 290);
        let mut found: Vec<u32> = Vec::new();
        for step in [
            [200, 0, 31],
            [1, 1, 1],
            [0, 300, 9],
            [3, 2, 1],
            [216, 1, 40],
        ] {
            let mut parts = Vec::new();
            for (slot, text) in [&text, &others[0], &others[1]].into_iter().enumerate() {
                let at = s.len(slot);
                if step[slot] > 0 {
                    parts.push((slot, &text[at..at + step[slot]]));
                }
            }
            let all = bits(&mut *s, &parts);
            found.extend(&all[..step[0] * vocab]);
        }
        assert!(found == alone, "{name}: beside others");
        // A sequence that begins as this one does, from whatever was kept.
        for len in [290, 170] {
            s.truncate(2, 0);
            let reached = s.fork(0, 2, len).unwrap();
            assert!(len < 290 || reached == len);
            let again = bits(&mut *s, &[(2, &text[reached..])]);
            let same = again == alone[reached * vocab..];
            assert!(same, "{name}: from {reached} on");
        }
    }
}

/// A weight rounded to a scheme whose groups are a whole row has these bits too.
#[test]
fn rows_of_whole_groups_have_the_bits_of_each_alone() {
    let config = hybrid("qwen35", 6, false);
    let mut store = Store::random(&config, 8);
    let scheme = AffineScheme::new(Bits::B4, Group::Channel, Zeros::Integer);
    for w in store.matrices.values_mut() {
        *w = round_to_nearest(w, scheme);
    }
    let model = (String::new(), config, store, ActivationChoice::Auto);
    let engine = load(&model, IsaChoice::Auto);
    let mut s = session(&*engine, KvType::F32);
    let text = tokens(40, 2);
    let alone = in_pieces(&mut *s, &text, &[1]);
    for len in 2..=33 {
        assert!(
            in_pieces(&mut *s, &text, &[len]) == alone,
            "pieces of {len}"
        );
    }
}
