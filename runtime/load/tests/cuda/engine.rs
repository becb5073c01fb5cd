//! The GPU engine against the CPU's. Without a GPU the tests say that they are skipped;
//! `NQ_REQUIRE_CUDA=1` makes that a failure.

use crate::common::{
    Store, distance, feed, fused_config, fused_session, gpu_engine, in_pieces, nq, tokens,
    wide_hybrid,
};
use nq_formats::trellis::Code;
use nq_formats::{AffineScheme, Bits, Group, Tensor, TrellisScheme, Weight, Zeros};
use nq_kernels::KernelSet;
use nq_model::names::is_kept;
use nq_model::{ARCHITECTURES, Dims, Experts, ModelConfig, Product, find};
use nq_runtime::{
    ActivationChoice, Chunk, DeviceChoice, Engine, KvType, LoadOptions, LogitsWanted, Observer,
    Sampler, SamplingParams, Session, SessionSpec,
};
use nq_testkit::models::experts;
use nq_testkit::sessions::{chunk, drawn, session_spec};

pub(super) const INT4: AffineScheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
pub(super) const INT8: AffineScheme = AffineScheme::new(Bits::B8, Group::Size(128), Zeros::None);

/// Rows of logits that differ by more than `close`.
fn far_rows(found: &[f32], expected: &[f32], vocab: usize, close: f32) -> usize {
    assert_eq!(found.len(), expected.len());
    let rows = found.chunks(vocab).zip(expected.chunks(vocab));
    rows.filter(|(a, b)| distance(a, b) > close).count()
}

/// Prefills and steps in turn, into both slots; logits are of order 1. Of 84 rows, at most `far` differ by
/// more than `close`: routers of mixtures may be near a tie, and then what rounding shifts decides.
fn compare(
    ours: &mut dyn Session,
    theirs: &mut dyn Session,
    (what, vocab): (&str, usize),
    close: f32,
    far: usize,
) {
    let mut rows = 0;
    let mut both = |slot, part: &[u32], ours: &mut dyn Session, theirs: &mut dyn Session| {
        rows += far_rows(
            &feed(ours, slot, part),
            &feed(theirs, slot, part),
            vocab,
            close,
        );
        assert!(rows <= far, "{what}: {rows} rows at slot {slot}");
    };
    for slot in [1, 0] {
        let text = tokens(48, 3 + slot as u64);
        let mut at = 0;
        for n in [21, 9, 1, 1, 1, 7, 1] {
            both(slot, &text[at..at + n], ours, theirs);
            at += n;
        }
        // Truncate, and continue from there.
        ours.truncate(slot, 10);
        theirs.truncate(slot, 10);
        both(slot, &text[10..11], ours, theirs);
    }
}

/// A mixture of 6 experts, 2 a token.
fn mixture() -> ModelConfig {
    ModelConfig {
        architecture: ARCHITECTURES[1],
        experts: Some(experts(6, 256, 0)),
        ..fused_config()
    }
}

/// Weights whose routers choose far from ties, so that rounded activations choose the same experts.
fn mixture_store(config: &ModelConfig, scheme: Option<AffineScheme>) -> Store {
    let plain = Store::random(config, 7);
    let mut store = match scheme {
        Some(scheme) => plain.quantized(scheme),
        None => plain.clone(),
    };
    for (name, weight) in &plain.matrices {
        if is_kept(name) {
            let Dims { rows, cols } = weight.dims();
            let mut values = vec![0.0; rows * cols];
            for (row, values) in values.chunks_exact_mut(cols).enumerate() {
                weight.dequantize_row(row, values).unwrap();
                values.iter_mut().for_each(|v| *v *= 4.0);
            }
            let tensor = Tensor::from_f32(vec![rows, cols], values).unwrap();
            store.matrices.insert(name.clone(), Weight::Dense(tensor));
        }
    }
    store
}

/// Prompts, and steps of one row and of several, also with tokens drawn on the device.
#[test]
fn mixtures_agree_with_the_cpu() {
    let config = mixture();
    for (scheme, name) in [(None, "dense"), (Some(INT4), "int4"), (Some(INT8), "int8")] {
        let store = mixture_store(&config, scheme);
        let cpu = nq(&config, &store);
        let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
            return;
        };
        assert_eq!(
            gpu.description().bits,
            scheme.map_or(32, |s| s.bits.width())
        );
        for kv in [KvType::F16, KvType::Int8] {
            let what = format!("a mixture, {name} {kv}");
            // Logits reach 4.4 here, and routers multiply what rounding shifts by four: on the CPU
            // alone, a cache in FP16 shifts logits by .006, one in int8 by .17.
            let close = if kv == KvType::Int8 { 1.5e-1 } else { 4e-2 };
            let (mut ours, mut theirs) = (fused_session(&*gpu, kv), fused_session(&*cpu, kv));
            let named = (&what[..], config.vocab_size);
            compare(&mut *ours, &mut *theirs, named, close, 3);
            // So many rows are grouped by expert.
            let text = tokens(60, 9);
            ours.truncate(0, 0);
            theirs.truncate(0, 0);
            let (found, expected) = (feed(&mut *ours, 0, &text), feed(&mut *theirs, 0, &text));
            let far = far_rows(&found, &expected, config.vocab_size, close);
            assert!(far <= 6, "{what}: {far} of 60 rows");
        }
        // The same row gives the same bits, whatever the other rows are.
        let alone = |slots: usize| {
            let mut s = gpu
                .session(session_spec(slots, 64, KvType::F16, 128))
                .unwrap();
            let texts: Vec<Vec<u32>> = (0..slots).map(|i| tokens(5, i as u64)).collect();
            for (slot, text) in texts.iter().enumerate() {
                feed(&mut *s, slot, text);
            }
            let chunks: Vec<Chunk<'_>> = (0..slots)
                .map(|slot| chunk(slot, &texts[slot][..1], LogitsWanted::All))
                .collect();
            s.forward(&chunks, None).unwrap().data.to_vec()
        };
        let one = alone(1);
        for slots in [2, 7, 16, 24] {
            let many = alone(slots);
            let d = distance(&one, &many[..one.len()]);
            assert!(d < 5e-3, "{name}: {slots} slots: {d}");
        }
        // The step that draws on the device agrees with the logits.
        let greedy = |engine: &dyn Engine| {
            let mut s = fused_session(engine, KvType::F16);
            let mut text = tokens(6, 2);
            let mut drawn = Vec::new();
            for _ in 0..8 {
                let logits = feed(&mut *s, 0, &text);
                let last = &logits[logits.len() - config.vocab_size..];
                let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b]));
                drawn.push(best.unwrap() as u32);
                text = vec![best.unwrap() as u32];
            }
            drawn
        };
        assert_eq!(greedy(&*gpu), greedy(&*cpu), "{name}");
    }
}

/// Tokens drawn by recorded steps, prompts and steps of several rows, with the experts of some layers and
/// of all on the CPU.
#[test]
fn experts_run_on_the_cpu() {
    let config = mixture();
    let layers = config.num_hidden_layers;
    for (scheme, name) in [(None, "dense"), (Some(INT4), "int4")] {
        let store = mixture_store(&config, scheme);
        let load = |cpu_experts| {
            let options = LoadOptions {
                device: DeviceChoice::Cuda(0),
                cpu_experts: Some(cpu_experts),
                activations: ActivationChoice::F32,
                ..LoadOptions::default()
            };
            nq_load::load(&config, &store, &options, &())
        };
        if gpu_engine(&config, &store, KernelSet::Fused).is_none() {
            return;
        }
        let whole = load(0).unwrap();
        let spec = fused_session(&*whole, KvType::F16).spec();
        let weights = |engine: &dyn Engine| engine.device_memory(&spec).unwrap().weights;
        for on_cpu in [1, layers] {
            let what = format!("a mixture, {name}, experts of {on_cpu} layers on the CPU");
            let gpu = load(on_cpu).unwrap();
            let saved = weights(&*whole) - weights(&*gpu);
            // Layers are alike.
            assert!(saved > 0 && saved % on_cpu == 0, "{what}: {saved}");
            // Where the routers see the same, experts make the same.
            let mut ours = fused_session(&*gpu, KvType::F16);
            let mut theirs = fused_session(&*whole, KvType::F16);
            let named = (&what[..], config.vocab_size);
            compare(&mut *ours, &mut *theirs, named, 4e-2, 3);
            let greedy = |engine: &dyn Engine| {
                let mut sampler = Sampler::new(SamplingParams::greedy(), 0).expect("valid");
                sampler.begin(&[7]);
                let mut s = fused_session(engine, KvType::F16);
                drawn(&mut *s, 0, 7, 24, &mut sampler).expect("it runs")
            };
            assert_eq!(greedy(&*gpu), greedy(&*gpu), "{what}: not the same again");
            assert_eq!(greedy(&*gpu)[..4], greedy(&*whole)[..4], "{what}");
        }
        let refused = load(layers + 1).err().expect("too many").to_string();
        assert!(refused.contains("--cpu-experts"), "{refused}");
    }
}

#[test]
fn mixtures_that_have_no_kernels_are_refused_by_name() {
    let config = mixture();
    let store = mixture_store(&config, None);
    let refused = |config: &ModelConfig, kernels| {
        nq_testkit::on_gpu(nq_cuda::device_count())?;
        let options = LoadOptions {
            device: DeviceChoice::Cuda(0),
            kernels,
            ..LoadOptions::default()
        };
        let refused = nq_load::load(config, &store, &options, &());
        Some(refused.err().expect("refused").to_string())
    };
    let Some(reference) = refused(&config, KernelSet::Reference) else {
        return;
    };
    assert!(reference.contains("mixtures of experts"), "{reference}");
    let narrow = ModelConfig {
        experts: config.experts.map(|e| Experts { width: 40, ..e }),
        ..config.clone()
    };
    let narrow = refused(&narrow, KernelSet::Fused).unwrap_or_default();
    assert!(narrow.contains("moe_intermediate_size"), "{narrow}");
}

#[test]
fn agrees_with_the_cpu() {
    for (family, tied) in [
        ("qwen3", true),
        ("qwen3", false),
        ("qwen2", false),
        ("llama", false),
    ] {
        let config = ModelConfig {
            architecture: find(|a| a.gguf, family).unwrap(),
            tie_word_embeddings: tied,
            ..fused_config()
        };
        let plain = Store::random(&config, 7);
        for (store, name) in [
            (plain.clone(), "dense"),
            (plain.quantized(INT4), "int4"),
            (plain.quantized(INT8), "int8"),
            (plain.mixed(), "mixed"),
            (plain.k_quants(), "k-quants"),
        ] {
            let cpu = nq(&config, &store);
            for kernels in [KernelSet::Fused, KernelSet::Reference] {
                let Some(gpu) = gpu_engine(&config, &store, kernels) else {
                    return;
                };
                let rounds = &gpu.description().activations;
                match (kernels, name) {
                    (KernelSet::Reference, _) => assert_eq!(rounds, "f32"),
                    (_, "dense") => assert_eq!(rounds, "f16 + 2 f16 in steps"),
                    (_, _) => assert_eq!(rounds, "f16 + int16 g64 in steps"),
                }
                for kv in [KvType::F16, KvType::Int8] {
                    let what = format!("{family} {name} tied {tied} {kernels} {kv}");
                    // A key's code that rounds the other way is half a step off.
                    let close = if kv == KvType::Int8 { 4e-2 } else { 1.5e-2 };
                    compare(
                        &mut *fused_session(&*gpu, kv),
                        &mut *fused_session(&*cpu, kv),
                        (&what[..], config.vocab_size),
                        close,
                        0,
                    );
                }
            }
        }
    }
}

/// Kernels take at most 8 query heads of a key head: of models with more, key heads are copied.
#[test]
fn key_heads_with_many_query_heads_agree_with_the_cpu() {
    let config = ModelConfig {
        num_attention_heads: 32,
        num_key_value_heads: 2,
        tie_word_embeddings: false,
        ..fused_config()
    };
    let store = Store::random(&config, 7).quantized(INT4);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let cpu = nq(&config, &store);
    compare(
        &mut *fused_session(&*gpu, KvType::F16),
        &mut *fused_session(&*cpu, KvType::F16),
        ("16 query heads of a key head", config.vocab_size),
        1.5e-2,
        0,
    );
    // Keys and values take twice the memory of as many heads of 8 query heads each.
    let session = gpu.session(SessionSpec {
        ctx: 256,
        ..fused_session(&*gpu, KvType::F16).spec()
    });
    let mut session = session.unwrap();
    let bytes = session.pages().unwrap().page_bytes();
    let dims = 2 * config.num_hidden_layers * 4 * config.head_dim * 2;
    assert_eq!(bytes, nq_kernels::pages::PAGE * dims);
}

#[test]
fn trellis_codes_agree_with_the_cpu() {
    let trellis = |code, bits| TrellisScheme::of_bits(code, bits).unwrap();
    let (three, four) = (trellis(Code::Octagon, 3.0), trellis(Code::Octagon, 4.0));
    let six = trellis(Code::Sum, 6.0);
    for (tied, mixed) in [(true, true), (false, false)] {
        let config = ModelConfig {
            hidden_size: 384,
            intermediate_size: 640,
            tie_word_embeddings: tied,
            ..fused_config()
        };
        let store = Store::random(&config, 7).in_trellises(|name| match name {
            _ if !mixed => four,
            name if name.contains("down") => three,
            name if name.contains("embed") => six,
            // Parts of one product that differ are held as FP16.
            name if name.contains("layers.1") && name.contains("v_proj") => three,
            _ => four,
        });
        let cpu = nq(&config, &store);
        for kernels in [KernelSet::Fused, KernelSet::Reference] {
            let Some(gpu) = gpu_engine(&config, &store, kernels) else {
                return;
            };
            let what = format!("trellis tied {tied} {kernels}");
            compare(
                &mut *fused_session(&*gpu, KvType::F16),
                &mut *fused_session(&*cpu, KvType::F16),
                (&what[..], config.vocab_size),
                1.5e-2,
                0,
            );
        }
    }
}

/// Experts in codes of their own, whose rows are few or many, and those in codes that are held as FP16.
#[test]
fn experts_in_trellis_codes_agree_with_the_cpu() {
    let trellis = |code, bits| TrellisScheme::of_bits(code, bits).unwrap();
    let (three, six) = (trellis(Code::Octagon, 3.0), trellis(Code::Sum, 6.0));
    for (hidden, shared, exl3) in [
        (512, false, false),
        (384, false, false),
        (256, true, false),
        (512, false, true),
        (384, false, true),
        (256, true, true),
    ] {
        let config = match shared {
            true => wide_hybrid("qwen35moe", 4, false),
            false => ModelConfig {
                hidden_size: hidden,
                ..mixture()
            },
        };
        let store = mixture_store(&config, None);
        let store = match exl3 {
            true => store.in_exl3(&config),
            false => store.in_trellises(|name| match name {
                name if name.contains("down") => six,
                _ => three,
            }),
        };
        let cpu = nq(&config, &store);
        let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
            return;
        };
        let what = format!("{hidden} inputs of experts in trellis codes, EXL3 {exl3}");
        let spec = session_spec(2, 192, KvType::F16, 128);
        let (mut ours, mut theirs) = (gpu.session(spec).unwrap(), cpu.session(spec).unwrap());
        let both: [&mut dyn Session; 2] = [&mut *ours, &mut *theirs];
        let mut distances = Vec::new();
        let pieces = [64, 16, 2, 1, 50];
        in_pieces(both, 0, &tokens(160, 11), &pieces, |a, b, _| {
            let rows = a.chunks(config.vocab_size).zip(b.chunks(config.vocab_size));
            distances.extend(rows.map(|(a, b)| distance(a, b)));
        });
        distances.sort_by(f32::total_cmp);
        let rows = distances.len();
        let (median, most) = (distances[rows / 2], distances[rows * 9 / 10]);
        println!("{what}: median {median:.1e}, nine of ten {most:.1e}");
        // As in `compare`: routers are near a tie for a row now and then. Recurrences add up what rounding shifts.
        let close = if shared { 6e-2 } else { 1.5e-2 };
        assert!(most < close, "{what}: {most:e}");
    }
}

#[test]
fn exl3_agrees_with_the_cpu() {
    let config = ModelConfig {
        hidden_size: 384,
        intermediate_size: 640,
        vocab_size: 256,
        tie_word_embeddings: false,
        ..fused_config()
    };
    let store = Store::random(&config, 7).in_exl3(&config);
    let cpu = nq(&config, &store);
    for kernels in [KernelSet::Fused, KernelSet::Reference] {
        let Some(gpu) = gpu_engine(&config, &store, kernels) else {
            return;
        };
        compare(
            &mut *fused_session(&*gpu, KvType::F16),
            &mut *fused_session(&*cpu, KvType::F16),
            (&format!("EXL3 {kernels}")[..], config.vocab_size),
            1.5e-2,
            0,
        );
    }
}

/// A shape of whose steps of one row one kernel runs all layers, where the GPU supports it.
#[test]
fn steps_of_all_layers_at_once_agree_with_the_cpu() {
    let config = ModelConfig {
        hidden_size: 256,
        intermediate_size: 768,
        num_attention_heads: 16,
        num_key_value_heads: 8,
        ..fused_config()
    };
    let qwen2 = ModelConfig {
        architecture: find(|a| a.gguf, "qwen2").unwrap(),
        ..config.clone()
    };
    let store = Store::random(&config, 8);
    for (name, config, store) in [
        ("INT4", &config, store.quantized(INT4)),
        ("a mix", &config, store.mixed()),
        ("biases", &qwen2, Store::random(&qwen2, 8).quantized(INT4)),
    ] {
        let cpu = nq(config, &store);
        let Some(gpu) = gpu_engine(config, &store, KernelSet::Fused) else {
            return;
        };
        for kv in [KvType::F16, KvType::Int8] {
            let close = if kv == KvType::Int8 { 4e-2 } else { 1.5e-2 };
            let what = format!("all layers of {name} at once {kv}");
            compare(
                &mut *fused_session(&*gpu, kv),
                &mut *fused_session(&*cpu, kv),
                (&what[..], config.vocab_size),
                close,
                0,
            );
        }
    }
}

/// Collects all activations that are shown.
#[derive(Default)]
struct Everything(Vec<(String, Vec<f32>)>);

impl Observer for Everything {
    fn linear_input(&mut self, layer: usize, product: &Product, x: &[f32]) {
        self.0
            .push((format!("{layer} {}", product.name), x.to_vec()));
    }
    fn layer_output(&mut self, layer: usize, x: &[f32]) {
        self.0.push((format!("{layer} output"), x.to_vec()));
    }
    fn head_input(&mut self, x: &[f32]) {
        self.0.push(("head".into(), x.to_vec()));
    }
}

#[test]
fn observers_see_what_the_cpu_shows() {
    let config = fused_config();
    let store = Store::random(&config, 9).quantized(INT8);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let plain = gpu_engine(&config, &store, KernelSet::Reference).expect("there is a GPU");
    let cpu = nq(&config, &store);
    let text = tokens(30, 1);
    let seen = |engine: &dyn Engine| {
        let mut all = Everything::default();
        let chunk = chunk(0, &text, nq_runtime::LogitsWanted::All);
        let mut s = fused_session(engine, KvType::F16);
        s.forward(&[chunk], Some(&mut all)).expect("it runs");
        all.0
    };
    let (a, b, c) = (seen(&*gpu), seen(&*plain), seen(&*cpu));
    assert_eq!(a.len(), c.len());
    for (((name, a), (_, b)), (expected, c)) in a.iter().zip(&b).zip(&c) {
        assert_eq!(name, expected);
        let norm = |x: &[f32]| x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let off = |x: &[f32], y: &[f32]| {
            let d: Vec<f32> = x.iter().zip(y).map(|(a, b)| a - b).collect();
            norm(&d) / norm(y)
        };
        // A forward over rows rounds the input of each product to FP16: five times a layer
        // (norms, queries, softmax weights, attention's output, gated values). The root mean square of
        // a rounding's error is 2.0e-4 of the value, and independent errors add in squares; the bound
        // leaves a factor of two for their growth in the next layers. Hopper's products also round
        // the weights, four times a layer. Single inputs of products are smaller than the
        // residual that their errors come from.
        let layers = name.split(' ').next().and_then(|l| l.parse::<f64>().ok());
        let roundings = 9.0 * (layers.unwrap_or(config.num_hidden_layers as f64 - 1.0) + 1.0);
        let close = 2.0 * 2.0e-4 * roundings.sqrt() * if name.contains('[') { 2.0 } else { 1.0 };
        assert!(
            off(a, c) < close,
            "{name}: fused against the CPU: {}",
            off(a, c)
        );
        assert!(
            off(a, b) < close,
            "{name}: fused against plain: {}",
            off(a, b)
        );
        // Both round keys and values to FP16. Where that is a close call, sums in another order
        // fall to the other side, 4.9e-4 away: a few elements in a hundred at most.
        assert!(
            off(b, c) < 2e-4,
            "{name}: plain against the CPU: {}",
            off(b, c)
        );
    }
}

/// Of prompts in one piece and in several, of some of their rows, of both slots at once, and more rows than pass
/// through the memory of logits together.
#[test]
fn hidden_states_agree_with_the_cpu() {
    let config = fused_config();
    let plain = Store::random(&config, 9);
    for (name, store) in [
        ("int4", plain.quantized(INT4)),
        ("int8", plain.quantized(INT8)),
        ("dense", plain),
    ] {
        let cpu = nq(&config, &store);
        for kernels in [KernelSet::Fused, KernelSet::Reference] {
            let Some(gpu) = gpu_engine(&config, &store, kernels) else {
                return;
            };
            let mut ours = fused_session(&*gpu, KvType::F16);
            let mut theirs = fused_session(&*cpu, KvType::F16);
            let (long, short) = (tokens(60, 3), tokens(20, 4));
            let chunk = |slot, tokens, logits| chunk(slot, tokens, logits);
            let steps: [Vec<Chunk<'_>>; 5] = [
                vec![chunk(0, &long[..21], LogitsWanted::Last)],
                vec![chunk(0, &long[21..55], LogitsWanted::All)],
                vec![
                    chunk(0, &long[55..59], LogitsWanted::None),
                    chunk(1, &short[..15], LogitsWanted::Window(3..9)),
                ],
                vec![
                    chunk(1, &short[15..16], LogitsWanted::Last),
                    chunk(0, &long[59..], LogitsWanted::Last),
                ],
                vec![chunk(1, &short[16..], LogitsWanted::None)],
            ];
            for (i, chunks) in steps.iter().enumerate() {
                let rows: usize =
                    (chunks.iter().map(|c| c.logits.rows(c.tokens.len()).len())).sum();
                let (mut found, mut expected) = (vec![7.0], vec![7.0]);
                ours.hidden(chunks, &mut found).unwrap();
                theirs.hidden(chunks, &mut expected).unwrap();
                assert_eq!(found.len(), 1 + rows * config.hidden_size);
                let norm = |x: &[f32]| x.iter().map(|v| v * v).sum::<f32>().sqrt();
                let off: Vec<f32> = found.iter().zip(&expected).map(|(a, b)| a - b).collect();
                // F32 weights are held as FP16; the reference kernels round nothing else.
                let close = match (kernels, name) {
                    (KernelSet::Fused, _) | (_, "dense") => 2.5e-3,
                    (KernelSet::Reference, _) => 3e-4,
                };
                let off = norm(&off) / norm(&expected);
                assert!(off < close, "{name} {kernels}, step {i}: {off}");
            }
            for slot in [0, 1] {
                assert_eq!(ours.len(slot), theirs.len(slot));
            }
            // What follows is computed as after a forward.
            let next = tokens(1, 8);
            let (a, b) = (feed(&mut *ours, 0, &next), feed(&mut *theirs, 0, &next));
            assert!(
                distance(&a, &b) < 1.5e-2,
                "{name} {kernels}: {}",
                distance(&a, &b)
            );
        }
    }
}

#[test]
fn requests_that_do_not_fit_are_refused() {
    let config = fused_config();
    let store = Store::random(&config, 11);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let e = gpu
        .session(session_spec(1, 1 << 40, KvType::F16, 1))
        .err()
        .expect("it cannot fit")
        .to_string();
    assert!(e.contains("--ctx"), "{e}");
}
