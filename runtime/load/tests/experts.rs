//! Mixtures of experts: compared with candle's, with themselves cut up differently, and the bytes
//! of experts that are read.

use crate::common::{
    Notes, Store, candle, distance, feed, hybrid, nq, options, session, small_config,
    small_mixture, tokens,
};
use nq_cpu::plan::{WeightSource, hold_model};
use nq_formats::{AffineScheme, Bits, Group, Tensor, Weight, Zeros};
use nq_kernels::registry::WeightKind;
use nq_kernels::{Account, KernelSet, Routes};
use nq_model::{Dims, Experts, LinearKind, ModelConfig, in_layer};
use nq_runtime::{Chunk, EngineKind, LoadOptions, LogitsWanted, Observer};
use nq_testkit::sessions::chunk;

/// Logits are of order 1; two f32 implementations agree to this.
const CLOSE: f32 = 2e-5;

#[test]
fn mixtures_agree_with_candle() {
    for tied in [true, false] {
        for per_token in [1, 2, 8] {
            for normalized in [true, false] {
                let config = ModelConfig {
                    tie_word_embeddings: tied,
                    ..small_mixture(per_token, normalized)
                };
                let store = Store::random(&config, 7);
                let mut ours = session(&*nq(&config, &store), 1);
                let mut theirs = session(&*candle(&config, &store), 1);
                let text = tokens(40, 3);
                // A prefill, a second one after it, then single steps.
                let mut at = 0;
                for n in [21, 9, 1, 1, 1, 7] {
                    let part = &text[at..at + n];
                    let (a, b) = (feed(&mut *ours, 0, part), feed(&mut *theirs, 0, part));
                    let d = distance(&a, &b);
                    assert!(
                        d < CLOSE,
                        "tied {tied}, top {per_token}, normalized {normalized}, from {at}: {d}"
                    );
                    at += n;
                }
            }
        }
    }
}

/// Experts with random signs would cancel each other; here each must change the sum.
#[test]
fn every_expert_counts() {
    let config = small_mixture(8, true);
    let store = Store::random(&config, 5);
    let text = tokens(30, 1);
    let logits = |store: &Store| feed(&mut *session(&*nq(&config, store), 1), 0, &text);
    let all = logits(&store);
    let name = in_layer(1, "mlp.experts.down_proj");
    for expert in 0..9 {
        let mut without = store.clone();
        let Dims { rows, cols } = without.matrices[&name].dims();
        let mut values = vec![0.0; rows * cols];
        for (row, values) in values.chunks_exact_mut(cols).enumerate() {
            if row / 48 != expert {
                store.matrices[&name].dequantize_row(row, values).unwrap();
            }
        }
        let tensor = Tensor::from_f32(vec![rows, cols], values).unwrap();
        without.matrices.insert(name.clone(), Weight::Dense(tensor));
        let d = distance(&all, &logits(&without));
        assert!(d > 100.0 * CLOSE, "expert {expert}: {d}");
    }
}

#[test]
fn cuts_batches_threads_and_kernels_change_nothing() {
    let config = small_mixture(3, true);
    let store = Store::random(&config, 1);
    let engine = nq(&config, &store);
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
    }
    let mut batch = session(&*engine, 3);
    let texts: Vec<Vec<u32>> = (0..3).map(|i| tokens(4 + 5 * i, i as u64)).collect();
    let chunk = |(slot, tokens)| chunk(slot, tokens, LogitsWanted::All);
    let chunks: Vec<Chunk<'_>> = texts
        .iter()
        .map(Vec::as_slice)
        .enumerate()
        .map(chunk)
        .collect();
    let together = batch.forward(&chunks, None).unwrap().data.to_vec();
    let alone: Vec<f32> = texts
        .iter()
        .flat_map(|t| feed(&mut *session(&*engine, 1), 0, t))
        .collect();
    assert!(distance(&together, &alone) < CLOSE);

    let other = |change: &dyn Fn(&mut LoadOptions)| {
        let mut options = options(EngineKind::Nq);
        change(&mut options);
        let engine = nq_load::load(&config, &store, &options, &()).unwrap();
        feed(&mut *session(&*engine, 1), 0, &text)
    };
    let one = other(&|o| o.threads = Some(1));
    for threads in [2, 3] {
        let same = other(&|o| o.threads = Some(threads));
        assert!(one == same, "{threads} threads differ from 1");
    }
    let reference = other(&|o| o.kernels = KernelSet::Reference);
    assert!(distance(&one, &reference) < CLOSE);
}

/// A mixture whose rows are whole groups.
fn wide(per_token: usize) -> ModelConfig {
    let mixture = small_mixture(per_token, true);
    ModelConfig {
        hidden_size: 64,
        experts: mixture
            .experts
            .map(|e| nq_model::Experts { width: 96, ..e }),
        ..mixture
    }
}

/// Quantizes all weights but the routers, which no scheme covers.
fn quantized(store: &Store, scheme: AffineScheme) -> Store {
    let mut rounded = store.quantized(scheme);
    for (name, weight) in &store.matrices {
        if nq_model::names::is_kept(name) {
            rounded.matrices.insert(name.clone(), weight.clone());
        }
    }
    rounded
}

#[test]
fn quantized_experts_equal_their_dequantized_values() {
    let config = wide(2);
    for bits in [Bits::B4, Bits::B8] {
        for zeros in [Zeros::None, Zeros::Integer, Zeros::Offset] {
            let group = Group::Size(32);
            let scheme = AffineScheme::new(bits, group, zeros);
            let store = quantized(&Store::random(&config, 11), scheme);
            let rounded = nq(&config, &store);
            assert_eq!(rounded.description().bits, bits.width());
            let dense = nq(&config, &store.dequantized());
            let text = tokens(20, 2);
            let a = feed(&mut *session(&*rounded, 1), 0, &text);
            let b = feed(&mut *session(&*dense, 1), 0, &text);
            let d = distance(&a, &b);
            assert!(d < CLOSE, "{scheme}: {d}");
        }
    }
}

/// Decoding reads only the experts that a token is routed to.
#[test]
fn a_token_reads_its_experts_alone() {
    let bytes = |per_token| {
        let config = wide(per_token);
        nq(&config, &Store::random(&config, 3)).bytes_per_token()
    };
    let expert = 3 * 64 * 96 * 4; // f32
    assert_eq!(bytes(4) - bytes(1), 3 * 3 * expert);
    let dense = ModelConfig {
        hidden_size: 64,
        intermediate_size: 96,
        ..small_config()
    };
    let dense = nq(&dense, &Store::random(&dense, 3)).bytes_per_token();
    // One expert is as wide as the MLP; the difference is the routers.
    assert_eq!(bytes(1) - dense, 3 * 16 * 64 * 4, "9 rows in panels of 16");
}

/// Records what observers see: every row through every expert, and the routes.
#[derive(Default)]
struct SeenRoutes {
    inputs: Vec<(usize, usize, usize)>, // layer, expert, values
    routes: Vec<Routes>,
    others: usize,
}

impl Observer for SeenRoutes {
    fn linear_input(&mut self, _: usize, _: &nq_model::Product, _: &[f32]) {
        self.others += 1;
    }

    fn expert_input(
        &mut self,
        layer: usize,
        product: &nq_model::Product,
        expert: usize,
        x: &[f32],
    ) {
        assert_eq!(product.linears[0].kind, LinearKind::Down);
        self.inputs.push((layer, expert, x.len()));
    }

    fn routed(&mut self, _: usize, routes: &Routes) {
        self.routes.push(routes.clone());
    }
}

#[test]
fn observers_see_every_row_through_every_expert() {
    let config = small_mixture(2, true);
    let engine = nq(&config, &Store::random(&config, 6));
    let text = tokens(5, 0);
    let chunk = chunk(0, &text, LogitsWanted::All);
    let mut seen = SeenRoutes::default();
    let mut watched = session(&*engine, 1);
    let logits = watched.forward(&[chunk], Some(&mut seen)).unwrap();
    assert_eq!(logits.data, feed(&mut *session(&*engine, 1), 0, &text));
    let expected: Vec<_> = (0..3)
        .flat_map(|layer| (0..9).map(move |e| (layer, e, 5 * 40)))
        .collect();
    assert_eq!(seen.inputs, expected);
    assert_eq!((seen.routes.len(), seen.others), (3, 3 * 3));
    for routes in &seen.routes {
        for row in 0..5 {
            let weights: f32 = routes.of(row).iter().map(|r| r.1).sum();
            assert!((weights - 1.0).abs() < 1e-6);
            assert!(routes.of(row)[0].0 < routes.of(row)[1].0);
        }
    }
}

#[test]
fn a_router_that_is_no_number_is_reported_with_its_layer() {
    let config = small_mixture(2, true);
    let mut store = Store::random(&config, 2);
    let name = in_layer(1, "mlp.gate");
    let mut values = vec![0.0; 9 * 48];
    values[48 * 4 + 3] = f32::NAN;
    let tensor = Tensor::from_f32(vec![9, 48], values).unwrap();
    store.matrices.insert(name, Weight::Dense(tensor));
    let engine = nq(&config, &store);
    let text = tokens(3, 0);
    let chunk = chunk(0, &text, LogitsWanted::Last);
    let mut s = session(&*engine, 1);
    let error = s.forward(&[chunk], None).map(|l| l.rows()).unwrap_err();
    assert!(error.to_string().contains("layer 1"), "{error}");
}

/// Where memory has no room for weights they lie in a file: those of experts first, and of as many layers as need be.
#[test]
fn weights_in_a_file_compute_the_same() {
    let int4 = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
    for (config, is_mixture) in [(small_mixture(2, true), true), (small_config(), false)] {
        let store = Store::random(&config, 11).quantized(int4);
        let text = tokens(30, 1);
        let kinds = |name: &str| WeightKind::of(&store.matrices[name]);
        let planned = hold_model(&Account::host(), &config, &kinds, WeightSource::Made, 0);
        let mut in_files = Vec::new();
        let mut logits = Vec::new();
        for room in [usize::MAX, planned.bytes() / 2, 0] {
            let notes = Notes::default();
            let options = LoadOptions {
                host_memory: Some(room),
                ..options(EngineKind::Nq)
            };
            let engine = nq_load::load(&config, &store, &options, &notes).unwrap();
            logits.push(feed(&mut *session(&*engine, 1), 0, &text));
            let notes = notes.0.lock().unwrap();
            in_files.push(notes.iter().find_map(|note| {
                let (bytes, rest) = note
                    .strip_prefix("memory has no room for ")?
                    .split_once(" of weights of ")?;
                let (layers, _) = rest.split_once(" layers")?;
                Some((bytes.to_owned(), layers.parse::<usize>().unwrap()))
            }));
        }
        assert!(logits[0] == logits[1] && logits[0] == logits[2]);
        let [all_fit, half, none_fits] = &in_files[..] else {
            unreachable!("three rooms");
        };
        assert_eq!(*all_fit, None);
        assert!(
            half.is_some() && half != none_fits,
            "{half:?}, {none_fits:?}"
        );
        let layers = none_fits.as_ref().map(|(_, layers)| *layers);
        assert_eq!(
            layers,
            Some(config.num_hidden_layers),
            "mixture: {is_mixture}"
        );
    }
}

/// What is planned for a mixture on a CPU is what its weights take, byte for byte: of experts whose rows do not fill panels,
/// and of a shared expert in another scheme than theirs.
#[test]
fn planned_mixtures_take_what_was_planned() {
    let scheme = AffineScheme::new;
    let int4 = scheme(Bits::B4, Group::Size(32), Zeros::Integer);
    for shared in [
        int4,
        scheme(Bits::B8, Group::Size(24), Zeros::Offset),
        scheme(Bits::B8, Group::Channel, Zeros::None),
    ] {
        let config = hybrid("qwen35moe", 4, true);
        // With all experts chosen, a token reads all weights.
        let experts = config.experts.map(|e| Experts {
            per_token: e.count,
            width: 40,
            ..e
        });
        let config = ModelConfig { experts, ..config };
        let dense = Store::random(&config, 11);
        let mut store = dense.quantized(int4);
        let others = dense.quantized(shared).matrices.into_iter();
        let own = others.filter(|(name, _)| name.contains("shared_expert."));
        store.matrices.extend(own);
        let account = Account::host();
        let kinds = |name: &str| WeightKind::of(&store.matrices[name]);
        let planned = hold_model(&account, &config, &kinds, WeightSource::Made, 0);
        let taken = nq(&config, &store).bytes_per_token();
        assert_eq!(planned.bytes(), taken, "{shared}");
    }
}
