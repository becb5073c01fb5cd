//! nq's forward compared with candle's, and with itself cut up differently.

use crate::common::{
    Store, candle, distance, feed, fused_config, in_pieces, nq, options, session, small_config,
    tokens,
};
use nq_formats::{AffineScheme, Bits, Group, Weight, Zeros};
use nq_load::load;
use nq_model::{
    ARCHITECTURES, Architecture, AttentionSpec, BlockSpec, Experts, HeadNorms, LayerSpec,
    LinearKind, LinearSpec, Mixer, MlpSpec, ModelConfig, NormSpec, Product, find,
};
use nq_runtime::models::Ending;
use nq_runtime::weights::weight_kinds;
use nq_runtime::{
    ActivationChoice, Chunk, EngineKind, Error, Hidden, KvType, LayerWeights, LoadOptions, Logits,
    LogitsWanted, Observer, SessionSpec,
};
use nq_testkit::models::experts;
use nq_testkit::sessions::{chunk, session_spec};

/// Logits are of order 1; two f32 implementations agree to this.
const CLOSE: f32 = 2e-5;

#[test]
fn agrees_with_candle_on_every_head_layout() {
    for tied in [true, false] {
        for (heads, kv_heads) in [(4, 4), (4, 2), (8, 2), (8, 1)] {
            let config = ModelConfig {
                num_attention_heads: heads,
                num_key_value_heads: kv_heads,
                tie_word_embeddings: tied,
                ..small_config()
            };
            assert_ne!(config.hidden_size, config.q_dim());
            let store = Store::random(&config, 7);
            let (ours, theirs) = (nq(&config, &store), candle(&config, &store));
            let mut ours = session(&*ours, 1);
            let mut theirs = session(&*theirs, 1);
            let text = tokens(40, 3);
            // A prefill, a second one after it, then single steps.
            let mut at = 0;
            for n in [21, 9, 1, 1, 1, 7] {
                let part = &text[at..at + n];
                let (a, b) = (feed(&mut *ours, 0, part), feed(&mut *theirs, 0, part));
                let d = distance(&a, &b);
                assert!(
                    d < CLOSE,
                    "{heads}/{kv_heads} heads, tied {tied}, tokens {at}..{}: {d}",
                    at + n
                );
                at += n;
            }
        }
    }
}

#[test]
fn prefill_steps_and_chunks_are_the_same() {
    let config = small_config();
    let engine = nq(&config, &Store::random(&config, 1));
    let text = tokens(33, 5);
    let whole = feed(&mut *session(&*engine, 1), 0, &text);
    for size in [1, 2, 5, 32] {
        let mut s = session(&*engine, 1);
        let parts: Vec<f32> = text
            .chunks(size)
            .flat_map(|p| feed(&mut *s, 0, p))
            .collect();
        let d = distance(&whole, &parts);
        assert!(d < CLOSE, "chunks of {size}: {d}");
        assert_eq!(s.len(0), text.len());
    }
}

#[test]
fn a_batch_equals_separate_runs() {
    let config = small_config();
    let engine = nq(&config, &Store::random(&config, 2));
    let lengths = [1, 17, 4, 30];
    let texts: Vec<Vec<u32>> = (0..4).map(|i| tokens(lengths[i] + 3, i as u64)).collect();
    let mut batch = session(&*engine, 4);
    let mut alone: Vec<_> = (0..4).map(|_| session(&*engine, 1)).collect();
    let mut at = [0; 4];
    // Prefills of different lengths; then steps, in another order, without slot 1.
    for (order, n) in [
        ([2, 0, 3, 1].as_slice(), None),
        (&[3, 0, 2], Some(1)),
        (&[0, 1, 2, 3], Some(2)),
    ] {
        let part = |slot: usize| {
            let start = at[slot];
            &texts[slot][start..start + n.unwrap_or(lengths[slot])]
        };
        let chunks: Vec<Chunk<'_>> = order
            .iter()
            .map(|&slot| chunk(slot, part(slot), LogitsWanted::All))
            .collect();
        let together = batch.forward(&chunks, None).unwrap().data.to_vec();
        let separate: Vec<f32> = order
            .iter()
            .flat_map(|&slot| feed(&mut *alone[slot], 0, part(slot)))
            .collect();
        let d = distance(&together, &separate);
        assert!(d < CLOSE, "slots {order:?}: {d}");
        for &slot in order {
            at[slot] += n.unwrap_or(lengths[slot]);
            assert_eq!(batch.len(slot), at[slot]);
        }
    }
}

#[test]
fn truncating_and_feeding_again_equals_a_fresh_run() {
    let config = small_config();
    let store = Store::random(&config, 3);
    for engine in [nq(&config, &store), candle(&config, &store)] {
        let text = tokens(24, 9);
        let whole = feed(&mut *session(&*engine, 1), 0, &text);
        let mut s = session(&*engine, 1);
        feed(&mut *s, 0, &text[..10]);
        feed(&mut *s, 0, &tokens(14, 10));
        s.truncate(0, 10);
        assert_eq!(s.len(0), 10);
        let rest = feed(&mut *s, 0, &text[10..]);
        let d = distance(&whole[10 * config.vocab_size..], &rest);
        assert!(d < CLOSE, "{}: {d}", engine.description().engine);
        s.truncate(0, 0);
        let again = feed(&mut *s, 0, &text);
        let d = distance(&whole, &again);
        assert!(d < CLOSE, "{}: {d}", engine.description().engine);
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let config = small_config();
    let store = Store::random(&config, 4);
    let run = |threads| {
        let options = LoadOptions {
            threads: Some(threads),
            ..options(EngineKind::Nq)
        };
        let engine = nq_load::load(&config, &store, &options, &()).unwrap();
        assert_eq!(engine.description().threads, threads);
        let mut s = session(&*engine, 1);
        let text = tokens(40, 1);
        let mut logits = feed(&mut *s, 0, &text[..37]);
        for t in &text[37..] {
            logits.extend(feed(&mut *s, 0, &[*t]));
        }
        logits.iter().map(|l| l.to_bits()).collect::<Vec<_>>()
    };
    let one = run(1);
    assert!(one == run(2), "2 threads differ from 1");
    assert!(one == run(3), "3 threads differ from 1");
}

#[test]
fn quantized_weights_equal_their_dequantized_values() {
    for tied in [true, false] {
        for bits in [Bits::B4, Bits::B8] {
            for zeros in [Zeros::None, Zeros::Integer, Zeros::Offset] {
                for group in [Group::Size(16), Group::Size(32), Group::Channel] {
                    let config = ModelConfig {
                        hidden_size: 64,
                        intermediate_size: 96,
                        num_hidden_layers: 1,
                        tie_word_embeddings: tied,
                        ..small_config()
                    };
                    let scheme = AffineScheme::new(bits, group, zeros);
                    let store = Store::random(&config, 11).quantized(scheme);
                    let quantized = nq(&config, &store);
                    let dense = nq(&config, &store.dequantized());
                    assert_eq!(quantized.description().bits, bits.width());
                    assert_eq!(dense.description().bits, 32);
                    let text = tokens(20, 2);
                    let a = feed(&mut *session(&*quantized, 1), 0, &text);
                    let b = feed(&mut *session(&*dense, 1), 0, &text);
                    let d = distance(&a, &b);
                    assert!(d < CLOSE, "{scheme}, tied {tied}: {d}");
                }
            }
        }
    }
}

/// EXL3 is held in its own codes, and gives what its values in f32 give.
#[test]
fn exl3_equals_its_values() {
    let config = ModelConfig {
        hidden_size: 256,
        intermediate_size: 384,
        vocab_size: 256,
        tie_word_embeddings: false,
        ..fused_config()
    };
    check_exl3(&config);
    // All of its experts are read.
    check_exl3(&ModelConfig {
        architecture: find(|a| a.gguf, "qwen3moe").unwrap(),
        experts: Some(experts(4, 128, 0)).map(|e| Experts { per_token: 4, ..e }),
        ..config
    });
}

fn check_exl3(config: &ModelConfig) {
    let store = Store::random(config, 7).in_exl3(config);
    let coded = nq(config, &store);
    let values = nq(config, &store.dequantized());
    let held = |w: &Weight| match w {
        Weight::Quantized(_) => w.bytes(),
        Weight::Dense(_) => 0,
    };
    let codes: usize = store.matrices.values().map(held).sum();
    // Beside the codes a token reads gains of norms, and what scores experts.
    let read = coded.bytes_per_token();
    assert!(
        read > codes && read < codes + codes / 20,
        "{read} of {codes}"
    );
    let (mut a, mut b) = (session(&*coded, 1), session(&*values, 1));
    let pieces = [21, 9, 1, 1, 1, 7];
    in_pieces(
        [&mut *a, &mut *b],
        0,
        &tokens(40, 3),
        &pieces,
        |a, b, at| {
            let d = distance(a, b);
            assert!(d < CLOSE, "tokens before {at}: {d}");
        },
    );
}

#[test]
fn activations_are_rounded_as_asked_and_by_default_for_4_bits() {
    let config = ModelConfig {
        hidden_size: 64,
        intermediate_size: 96,
        ..small_config()
    };
    let scheme = |bits| AffineScheme::new(bits, Group::Size(32), Zeros::Integer);
    let dense = Store::random(&config, 21);
    let text = tokens(20, 2);
    let load = |store: &Store, activations| {
        let options = LoadOptions {
            activations,
            ..options(EngineKind::Nq)
        };
        nq_load::load(&config, store, &options, &())
    };
    let run = |store: &Store, activations, named: &str| {
        let engine = load(store, activations).unwrap();
        assert_eq!(engine.description().activations, named);
        feed(&mut *session(&*engine, 1), 0, &text)
    };
    let int8 = ActivationChoice::Int8 { group: 32 };
    let int16 = ActivationChoice::Int16 { group: 128 };
    for (bits, by_default) in [(Bits::B4, "int8 g32"), (Bits::B8, "int16 g128")] {
        let store = dense.quantized(scheme(bits));
        let exact = run(&store, ActivationChoice::F32, "f32");
        let rounded = run(&store, int8, "int8 g32");
        let d = distance(&exact, &rounded);
        assert!((1e-4..0.2).contains(&d), "{bits:?}: {d}");
        let finely = run(&store, int16, "int16 g128");
        let fine = distance(&exact, &finely);
        assert!(fine > 0.0 && fine < d / 20.0, "{bits:?}: {fine} after {d}");
        let auto = run(&store, ActivationChoice::Auto, by_default);
        let same = if bits == Bits::B4 { &rounded } else { &finely };
        assert!(&auto == same, "{bits:?}: auto is neither");
    }
    // An unquantized head among quantized layers stays as it is, and an unquantized model does not
    // round its activations.
    let mut mixed = dense.quantized(scheme(Bits::B4));
    let head = dense.matrices["lm_head"].clone();
    mixed.matrices.insert("lm_head".into(), head);
    run(&mixed, int8, "int8 g32 + f32");
    run(&dense, ActivationChoice::Auto, "f32");
    // Only quantized weights take integer activations, and only unquantized ones bf16.
    let quantized = dense.quantized(scheme(Bits::B4));
    for (store, choice) in [
        (&dense, int8),
        (&dense, int16),
        (&quantized, ActivationChoice::Bf16),
    ] {
        let refused = load(store, choice).err().expect("refused").to_string();
        assert!(refused.contains("quantized weights for int8"), "{refused}");
    }
}

#[test]
fn rounding_the_cache_costs_little() {
    let config = small_config();
    let engine = nq(&config, &Store::random(&config, 5));
    let text = tokens(50, 8);
    let run = |kv| {
        let spec = session_spec(1, 50, kv, 50);
        feed(&mut *engine.session(spec).unwrap(), 0, &text)
    };
    let exact = run(KvType::F32);
    let (half, int8) = (
        distance(&exact, &run(KvType::F16)),
        distance(&exact, &run(KvType::Int8)),
    );
    assert!((1e-6..5e-3).contains(&half), "f16: {half}");
    assert!((1e-4..1e-1).contains(&int8), "int8: {int8}");
}

/// Records all that an observer is shown.
#[derive(Default)]
struct Recorder {
    inputs: Vec<(usize, Product, Vec<f32>)>,
    outputs: Vec<(usize, Vec<f32>)>,
    head: Vec<f32>,
}

impl Observer for Recorder {
    fn linear_input(&mut self, layer: usize, product: &Product, x: &[f32]) {
        self.inputs.push((layer, *product, x.to_vec()));
    }

    fn layer_output(&mut self, layer: usize, x: &[f32]) {
        self.outputs.push((layer, x.to_vec()));
    }

    fn head_input(&mut self, x: &[f32]) {
        self.head.extend(x);
    }
}

#[test]
fn an_observer_sees_every_input_in_order() {
    let config = small_config();
    let store = Store::random(&config, 6);
    let engine = nq(&config, &store);
    let text = tokens(12, 4);
    let mut seen = Recorder::default();
    let chunk = chunk(0, &text, LogitsWanted::Window(3..7));
    let mut s = session(&*engine, 1);
    let logits = s.forward(&[chunk], Some(&mut seen)).unwrap().data.to_vec();
    let whole = feed(&mut *session(&*engine, 1), 0, &text);
    let window = 3 * config.vocab_size..7 * config.vocab_size;
    assert!(distance(&logits, &whole[window]) < CLOSE);

    let expected = (0..config.num_hidden_layers).flat_map(|layer| {
        config
            .layer(layer)
            .products()
            .into_iter()
            .map(move |p| (layer, *p))
    });
    assert!(seen.inputs.iter().map(|(l, p, _)| (*l, *p)).eq(expected));
    for (layer, product, x) in &seen.inputs {
        let width = product.inputs(&config);
        assert_eq!(x.len(), text.len() * width, "layer {layer}, {product:?}");
    }
    assert_eq!(seen.outputs.len(), config.num_hidden_layers);
    assert_eq!(seen.head.len(), 4 * config.hidden_size);
    // The observed input of the down projection times its weight is what the projection adds.
    let (_, _, down_in) = seen.inputs.last().unwrap();
    let last = LayerWeights::read(&store, &config, config.num_hidden_layers - 1).unwrap();
    let mut added = vec![0.0; text.len() * config.hidden_size];
    nq_kernels::reference::linear(down_in, last.linear(LinearKind::Down), &mut added).unwrap();
    let (_, _, o_in) = &seen.inputs[seen.inputs.len() - 3];
    let mut attended = vec![0.0; added.len()];
    nq_kernels::reference::linear(o_in, last.linear(LinearKind::O), &mut attended).unwrap();
    let before = &seen.outputs[config.num_hidden_layers - 2].1;
    let sum: Vec<f32> = (0..added.len())
        .map(|i| before[i] + attended[i] + added[i])
        .collect();
    let d = distance(&sum, &seen.outputs.last().unwrap().1);
    assert!(d < CLOSE, "residuals: {d}");
}

#[test]
fn layer_by_layer_equals_the_whole_forward() {
    let config = small_config();
    let store = Store::random(&config, 12);
    let engine = nq(&config, &store);
    // One sequence is longer than the rows that a stepper takes at once.
    let texts: Vec<Vec<u32>> = [5, 1, 700, 30, 30]
        .iter()
        .map(|&n| tokens(n, n as u64))
        .collect();
    let mut stepper =
        nq_load::stepper(&config, &options(EngineKind::Nq), KvType::F32, usize::MAX).unwrap();
    let embedding = nq_runtime::models::embedding(&store, &config).unwrap();
    let head = nq_runtime::models::head(&store, &config).unwrap();
    let ending = Ending::read(&store, &config).unwrap();
    let mut hidden: Hidden = Hidden::embed(&embedding, &texts, 1).unwrap();
    let mut seen = Recorder::default();
    for index in 0..config.num_hidden_layers {
        let weights = LayerWeights::read(&store, &config, index).unwrap();
        stepper
            .layer(index, &weights, &mut hidden, &mut seen)
            .unwrap();
    }
    let rows: usize = texts.iter().map(Vec::len).sum();
    let observed: usize = seen.outputs.iter().map(|(_, x)| x.len()).sum();
    assert_eq!(
        observed,
        config.num_hidden_layers * rows * config.hidden_size
    );
    let logits = stepper.head(&ending, &head, &hidden, 0..rows).unwrap();
    let mut at = 0;
    for text in &texts {
        let spec = session_spec(1, 700, KvType::F32, 700);
        let want = feed(&mut *engine.session(spec).unwrap(), 0, text);
        let d = distance(&logits[at..at + want.len()], &want);
        assert!(d < CLOSE, "{} tokens: {d}", text.len());
        at += want.len();
    }
    assert_eq!(at, logits.len());
}

#[test]
fn a_profile_counts_every_operation() {
    let config = small_config();
    let store = Store::random(&config, 16);
    let engine = nq(&config, &store);
    let mut s = session(&*engine, 1);
    feed(&mut *s, 0, &tokens(5, 1));
    assert!(engine.start_profile());
    for token in tokens(3, 2) {
        feed(&mut *s, 0, &[token]);
    }
    let timings = engine.stop_profile();
    let layers = config.num_hidden_layers as u64;
    for (op, calls) in [
        ("qkv", 3 * layers),
        ("attention", 3 * layers),
        ("o", 3 * layers),
        ("gate_up", 3 * layers),
        ("down", 3 * layers),
        ("head", 3),
    ] {
        let timed = timings.iter().filter(|t| t.op == op);
        assert_eq!(
            timed.map(|t| t.calls).sum::<u64>(),
            calls,
            "{op}: {timings:?}"
        );
    }
    feed(&mut *s, 0, &[1]);
    assert!(engine.stop_profile().is_empty());
    assert!(!candle(&config, &store).start_profile());
}

#[test]
fn what_does_not_fit_is_refused_before_anything_changes() {
    let config = small_config();
    let engine = nq(&config, &Store::random(&config, 13));
    let mut s = session(&*engine, 2);
    feed(&mut *s, 0, &tokens(60, 1));
    let long = tokens(70, 1);
    let mut refuse = |chunks: &[(usize, &[u32], LogitsWanted)], expected: &str| {
        let chunks: Vec<Chunk<'_>> = chunks
            .iter()
            .map(|(slot, tokens, logits)| chunk(*slot, tokens, logits.clone()))
            .collect();
        let found = s.forward(&chunks, None).map(|l: Logits<'_>| l.rows());
        let found = found.expect_err(expected).to_string();
        assert!(found.contains(expected), "{found}");
        assert_eq!((s.len(0), s.len(1)), (60, 0));
    };
    let last = LogitsWanted::Last;
    refuse(
        &[(0, &[1; 5], last.clone())],
        "context of 64 tokens is full: 65",
    );
    refuse(
        &[(1, &long[..65], last.clone())],
        "context of 64 tokens is full: 65",
    );
    refuse(&[(2, &[1], last.clone())], "a slot below 2, found 2");
    refuse(
        &[(1, &[1], last.clone()), (1, &[2], last.clone())],
        "slot 1 twice",
    );
    refuse(&[(1, &[], last.clone())], "at least one token");
    refuse(
        &[(1, &[7, 101], last.clone())],
        "below the vocabulary's 101, found 101",
    );
    refuse(
        &[(1, &[7, 8], LogitsWanted::Window(1..3))],
        "rows within 0..2, found 1..3",
    );
    refuse(
        &[(0, &long, last.clone()), (1, &long, last)],
        "at most 128, found 140",
    );
}

#[test]
fn numbers_that_overflow_are_located() {
    let config = small_config();
    let good = Store::random(&config, 14);
    let poison = |name: &str| {
        let mut store = good.clone();
        let w = store.matrices.get_mut(name).unwrap();
        let (out, inputs) = w.dims().pair();
        let values = vec![f32::MAX; out * inputs];
        let t = nq_formats::Tensor::from_f32(vec![out, inputs], values).unwrap();
        *w = nq_formats::Weight::Dense(t);
        let engine = nq(&config, &store);
        let mut s = session(&*engine, 1);
        let text = tokens(5, 1);
        let error = s
            .forward(&[chunk(0, &text, LogitsWanted::Last)], None)
            .map(|l| l.rows())
            .expect_err(name);
        assert_eq!(s.len(0), 0, "{name}");
        error
    };
    let error = poison("model.layers.1.mlp.down_proj");
    assert!(
        matches!(error, Error::NotFinite { layer: 1, .. }),
        "{error}"
    );
    let error = poison("lm_head");
    assert!(matches!(error, Error::LogitsNotFinite), "{error}");
}

#[test]
fn candle_names_what_it_does_not_do() {
    let config = small_config();
    let store = Store::random(&config, 15);
    let engine = candle(&config, &store);
    let spec = session_spec(1, 64, KvType::F32, 64);
    let refused = |spec| engine.session(spec).err().expect("refused").to_string();
    assert!(refused(SessionSpec { slots: 2, ..spec }).contains("slots: expected 1, found 2"));
    assert!(
        refused(SessionSpec {
            kv: KvType::F16,
            ..spec
        })
        .contains("found f16")
    );
    assert!(refused(SessionSpec { ctx: 257, ..spec }).contains("at most 256 positions"));
    let mut s = engine.session(spec).unwrap();
    let chunk = chunk(0, &[1], LogitsWanted::Last);
    let error = s
        .forward(&[chunk], Some(&mut ()))
        .map(|l| l.rows())
        .expect_err("no observer");
    assert!(error.to_string().contains("candle: observer"), "{error}");
    let scheme = AffineScheme::new(Bits::B8, Group::Channel, Zeros::None);
    let quantized = store.quantized(scheme);
    let error = nq_load::load(&config, &quantized, &options(EngineKind::Candle), &());
    let error = error.err().expect("no quantized weights").to_string();
    assert!(
        error.contains("int8 channel symmetric in model.layers.0.self_attn.q_proj"),
        "{error}"
    );
}

/// Qwen3's layers under other names.
fn renamed() -> &'static Architecture {
    let name = |n: &str| -> &'static str { format!("other.{n}").leak() };
    let norm = |n: NormSpec| NormSpec {
        suffix: name(n.suffix),
        ..n
    };
    let linear = |l: &LinearSpec| LinearSpec {
        suffix: name(l.suffix),
        ..*l
    };
    let product = |p: Product| Product {
        linears: p.linears.iter().map(linear).collect::<Vec<_>>().leak(),
        ..p
    };
    let block = |block: &BlockSpec| BlockSpec {
        norm: norm(block.norm),
        hyper: None,
        mixer: match block.mixer {
            Mixer::Attention(a) => Mixer::Attention(AttentionSpec {
                qkv: product(a.qkv),
                head_norms: a.head_norms.map(|h| HeadNorms {
                    q: norm(h.q),
                    k: norm(h.k),
                }),
                gated: a.gated,
                indexer: None,
                o: product(a.o),
            }),
            Mixer::Mlp(m) => Mixer::Mlp(MlpSpec {
                gate_up: product(m.gate_up),
                down: product(m.down),
            }),
            Mixer::Delta(_) | Mixer::Experts(_) | Mixer::Ngrams(_) => panic!("a dense layer"),
        },
    };
    let layer = |layer: &LayerSpec| LayerSpec {
        blocks: layer.blocks.iter().map(block).collect::<Vec<_>>().leak(),
    };
    let qwen3 = ARCHITECTURES[0];
    Box::leak(Box::new(Architecture {
        family: "Other",
        title: "Other",
        class: "OtherForCausalLM",
        model_type: "other",
        gguf: "other",
        kinds: qwen3.kinds.iter().map(layer).collect::<Vec<_>>().leak(),
        presets: &[],
        ..*qwen3
    }))
}

/// Names of weights come from the architecture's table alone: under other names the same
/// weights give the same logits, whole and layer by layer.
#[test]
fn another_architecture_of_the_same_layers_is_a_table() {
    let plain = small_config();
    let other = ModelConfig {
        architecture: renamed(),
        ..plain.clone()
    };
    let text = tokens(9, 3);
    let run = |config: &ModelConfig| {
        let store = Store::random(config, 31);
        let kinds = weight_kinds(config, &store, false).unwrap();
        assert!(kinds.keys().eq(store.matrices.keys()));
        let mut stepper =
            nq_load::stepper(config, &options(EngineKind::Nq), KvType::F32, usize::MAX).unwrap();
        let embedding = nq_runtime::models::embedding(&store, config).unwrap();
        let mut hidden = Hidden::embed(&embedding, std::slice::from_ref(&text), 1).unwrap();
        for index in 0..config.num_hidden_layers {
            let weights = LayerWeights::read(&store, config, index).unwrap();
            stepper
                .layer(index, &weights, &mut hidden, &mut ())
                .unwrap();
        }
        let logits = feed(&mut *session(&*nq(config, &store), 1), 0, &text);
        (store, logits, hidden.data)
    };
    let ((_, logits, hidden), (store, same_logits, same_hidden)) = (run(&plain), run(&other));
    assert!(
        store
            .vectors
            .contains_key("model.layers.2.other.self_attn.q_norm")
    );
    assert!(
        !store
            .matrices
            .contains_key("model.layers.2.self_attn.q_proj")
    );
    assert_eq!(logits, same_logits);
    assert_eq!(hidden, same_hidden);

    // candle supports only its own architectures.
    let refused = load(&other, &store, &options(EngineKind::Candle), &());
    let refused = refused.err().expect("candle has no such model").to_string();
    assert!(refused.contains("OtherForCausalLM"), "{refused}");
}
