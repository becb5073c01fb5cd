//! Models with recurrences on a GPU, compared with the CPU. Without a GPU the tests say that they are skipped;
//! `NQ_REQUIRE_CUDA=1` makes that a failure.

use crate::common::{Store, distance, feed, gpu_engine, nq, restore, tokens, wide_hybrid};
use nq_formats::{AffineScheme, Bits, Group, Tensor, Weight, Zeros};
use nq_kernels::KernelSet;
use nq_kernels::pages::PAGE;
use nq_kernels::rng::Philox;
use nq_model::{Delta, Dims, ModelConfig, Product, Rope};
use nq_runtime::{
    ActivationChoice, Chunk, DeviceChoice, DraftedBy, Engine, Hidden, KvType, LayerStepper,
    LayerWeights, LoadOptions, LogitsWanted, Observer, Sampler, SamplingParams, Session,
    SessionSpec,
};
use nq_testkit::sessions::{chunk, drawn, session_spec};
use std::collections::BTreeMap;

const INT4: AffineScheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
const INT8: AffineScheme = AffineScheme::new(Bits::B8, Group::Size(128), Zeros::None);

fn configs() -> [ModelConfig; 4] {
    [
        wide_hybrid("qwen35", 2, false),
        wide_hybrid("qwen35", 6, true),
        wide_hybrid("qwen35moe", 4, false),
        wide_hybrid("qwen3next", 4, false),
    ]
}

/// Random weights, of which routers choose far from ties, so that rounded activations choose the same experts.
fn store(config: &ModelConfig, scheme: Option<AffineScheme>) -> Store {
    let plain = Store::random(config, 7);
    let mut store = match scheme {
        Some(scheme) => plain.quantized(scheme),
        None => plain.clone(),
    };
    let routers = plain
        .matrices
        .iter()
        .filter(|(name, _)| name.contains("mlp.gate"));
    for (name, weight) in routers.filter(|_| config.experts.is_some()) {
        let Dims { rows, cols } = weight.dims();
        let mut values = vec![0.0; rows * cols];
        for (row, values) in values.chunks_exact_mut(cols).enumerate() {
            weight.dequantize_row(row, values).unwrap();
            values.iter_mut().for_each(|v| *v *= 4.0);
        }
        let tensor = Tensor::from_f32(vec![rows, cols], values).unwrap();
        store.matrices.insert(name.clone(), Weight::Dense(tensor));
    }
    store
}

fn session(engine: &dyn Engine, kv: KvType, slots: usize) -> Box<dyn Session> {
    engine.session(spec(kv, slots)).unwrap()
}

fn spec(kv: KvType, slots: usize) -> SessionSpec {
    session_spec(slots, 600, kv, 300)
}

/// Prompts, steps of one row and of several, of sequences alone and beside each other: the logits of the CPU.
#[test]
fn hybrids_agree_with_the_cpu() {
    for config in configs() {
        for (scheme, name) in [(None, "dense"), (Some(INT4), "int4"), (Some(INT8), "int8")] {
            let store = store(&config, scheme);
            let cpu = nq(&config, &store);
            let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
                return;
            };
            for kv in [KvType::F16, KvType::Int8] {
                let (mut ours, mut theirs) = (session(&*gpu, kv, 3), session(&*cpu, kv, 3));
                let what = format!("{} {name} {kv}", config.architecture.title);
                let (mut rows, mut far, mut worst) = (0, 0, 0f32);
                let mut both = |slot: usize, part: &[u32]| {
                    let found = feed(&mut *ours, slot, part);
                    let expected = feed(&mut *theirs, slot, part);
                    let vocab = config.vocab_size;
                    for (a, b) in found.chunks(vocab).zip(expected.chunks(vocab)) {
                        let d = distance(a, b);
                        rows += 1;
                        worst = worst.max(d);
                        far += usize::from(d > if kv == KvType::Int8 { 2e-1 } else { 6e-2 });
                    }
                };
                for slot in [1, 0] {
                    let text = tokens(420, 3 + slot as u64);
                    let mut at = 0;
                    for n in [21, 9, 1, 1, 16, 1, 140, 3, 1, 200, 1, 1] {
                        both(slot, &text[at..at + n]);
                        at += n;
                    }
                }
                // Routers of mixtures may be near a tie, and then what rounding shifts decides.
                let most = if config.experts.is_some() {
                    rows / 8
                } else {
                    0
                };
                println!("{what}: {far} of {rows} rows far, {worst:.4} at most");
                assert!(far <= most, "{what}: {far} of {rows} rows, {worst}");
            }
        }
    }
}

/// Sequences that run beside each other in a step, any number of them, are those of each alone.
#[test]
fn sequences_do_not_see_each_other() {
    let config = wide_hybrid("qwen35", 6, false);
    let store = Store::random(&config, 7).quantized(INT4);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let alone = |text: &[u32], step: &[u32]| {
        let mut s = session(&*gpu, KvType::F16, 1);
        feed(&mut *s, 0, text);
        feed(&mut *s, 0, step)
    };
    for (slots, width) in [(2, 1), (7, 1), (3, 5), (16, 1), (24, 1), (64, 1)] {
        let mut s = session(&*gpu, KvType::F16, slots);
        let texts: Vec<Vec<u32>> = (0..slots).map(|i| tokens(20 + i, i as u64)).collect();
        for (slot, text) in texts.iter().enumerate() {
            feed(&mut *s, slot, &text[..text.len() - width]);
        }
        let chunks: Vec<Chunk<'_>> = texts
            .iter()
            .enumerate()
            .map(|(slot, text)| chunk(slot, &text[text.len() - width..], LogitsWanted::All))
            .collect();
        let found = s.forward(&chunks, None).unwrap().data.to_vec();
        for (i, text) in texts.iter().enumerate() {
            let (begin, step) = text.split_at(text.len() - width);
            let row = width * config.vocab_size;
            let d = distance(&found[i * row..(i + 1) * row], &alone(begin, step));
            assert!(d < 2e-2, "{slots} sequences of {width} rows, {i}: {d}");
        }
    }
}

/// Sequences of random steps, forks and cuts give what each text gives alone.
#[test]
fn random_cuts_and_forks_reach_true_states() {
    cuts_and_forks(DraftedBy::Nothing);
}

/// The same where steps check drafts; the rows of a sequence's last step can then be taken back one by one.
#[test]
fn random_cuts_within_steps_reach_true_states() {
    cuts_and_forks(DraftedBy::Tokens);
}

fn cuts_and_forks(drafts: DraftedBy) {
    let config = wide_hybrid("qwen35", 4, false);
    let store = Store::random(&config, 7);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let slots = 3;
    let spec = SessionSpec {
        drafts,
        ..spec(KvType::F16, slots)
    };
    let mut s = gpu.session(spec).unwrap();
    let drafts = drafts != DraftedBy::Nothing;
    assert_eq!(s.draft_rows() > 1, drafts);
    let mut held: Vec<Vec<u32>> = vec![Vec::new(); slots];
    // By slot, the first length that can be reached because rows behind it are kept.
    let mut from: Vec<Option<usize>> = vec![None; slots];
    let mut within = 0;
    let mut rng = Philox::new(3, 1);
    let mut below = |n: usize| (rng.uniform() * n as f32) as usize % n;
    let (mut cuts, mut kept) = (0, 0);
    for round in 0..if drafts { 400 } else { 120u64 } {
        let slot = below(slots);
        let len = match from[slot] {
            // Mostly within the last step.
            Some(first) if below(4) > 0 => first + below(held[slot].len() + 1 - first),
            _ => below(held[slot].len() + 1),
        };
        match below(4) {
            0 if !held[slot].is_empty() => {
                assert!(s.reach(slot, len) <= len);
                let reached = s.truncate(slot, len);
                assert!(reached <= len);
                if from[slot].is_some_and(|first| first <= len) {
                    assert_eq!(reached, len, "round {round}");
                    within += 1;
                } else if reached < held[slot].len() {
                    from[slot] = None;
                }
                (cuts, kept) = (cuts + 1, kept + usize::from(reached > 0));
                held[slot].truncate(reached);
            }
            1 if !held[slot].is_empty() => {
                let to = (slot + 1) % slots;
                let reached = s.fork(slot, to, len).unwrap();
                if from[slot].is_some_and(|first| first <= len) {
                    assert_eq!(reached, len, "round {round}");
                }
                if len == held[slot].len() {
                    from[slot] = None;
                }
                from[to] = None;
                held[to] = held[slot][..reached].to_vec();
            }
            _ => {
                let n = [1, 1, 5, 30, 80, 2, 16][below(if drafts { 7 } else { 5 })];
                let more = tokens(n, 100 + round);
                if held[slot].len() + n > 590 {
                    continue;
                }
                let found = feed(&mut *s, slot, &more);
                from[slot] = (drafts && (2..=16).contains(&n)).then_some(held[slot].len());
                held[slot].extend(&more);
                let mut fresh = session(&*gpu, KvType::F16, 1);
                let mut all = Vec::new();
                for part in held[slot].chunks(300) {
                    all = feed(&mut *fresh, 0, part);
                }
                let vocab = config.vocab_size;
                let d = distance(&found[found.len() - vocab..], &all[all.len() - vocab..]);
                // Steps and passes round differently.
                assert!(d < 4e-2, "round {round}, {} tokens: {d}", held[slot].len());
            }
        }
        assert_eq!(s.len(slot), held[slot].len());
    }
    assert!(
        cuts > 10 && kept > 3,
        "{cuts} cuts, {kept} to a state that was kept"
    );
    assert!(!drafts || within > 20, "{within} cuts within a step");
}

/// Pages and states that were read continue a sequence in another session; pages alone do not.
#[test]
fn pages_and_states_move_to_another_session() {
    let config = wide_hybrid("qwen35", 6, false);
    let store = Store::random(&config, 7).quantized(INT8);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let (first, more) = (tokens(PAGE + 21, 4), tokens(6, 5));
    for drafts in [DraftedBy::Nothing, DraftedBy::Tokens] {
        let spec = |slots| SessionSpec {
            drafts,
            ..spec(KvType::F16, slots)
        };
        let mut s = gpu.session(spec(1)).unwrap();
        s.keep_at(0, PAGE);
        feed(&mut *s, 0, &first);
        let behind = feed(&mut *s, 0, &more);
        let (mut page, mut state, mut end) = (Vec::new(), Vec::new(), Vec::new());
        let pages = s.pages().unwrap();
        pages.read(0, 0, &mut page).unwrap();
        pages.read_state(0, PAGE, &mut state).unwrap();
        // The end's states are brought forward by the rows that the last step kept.
        let len = first.len() + more.len();
        pages.read_state(0, len, &mut end).unwrap();
        assert_eq!(Some(state.len()), pages.state_bytes());
        assert_ne!(state, end);
        let elsewhere = pages.read_state(0, PAGE + 1, &mut Vec::new());
        assert!(elsewhere.is_err());

        let mut s = gpu.session(spec(2)).unwrap();
        restore(&mut *s, &page, &state, &first);
        let d = distance(&feed(&mut *s, 1, &more), &behind);
        assert!(d < 2e-2, "{d:e}");
        // A sequence without its states goes back to where it has some.
        assert_eq!(s.truncate(1, PAGE), PAGE);
        s.pages().unwrap().append(1, &page).unwrap();
        assert_eq!(s.truncate(1, 2 * PAGE), PAGE);
    }
}

/// Tokens drawn by recorded steps ahead of the host are those of the logits.
#[test]
fn steps_ahead_draw_the_same() {
    for config in configs() {
        for scheme in [INT4, INT8] {
            let store = Store::random(&config, 7).quantized(scheme);
            let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
                return;
            };
            let prompt = tokens(30, 5);
            let (last, begin) = prompt.split_last().unwrap();
            let mut s = session(&*gpu, KvType::F16, 2);
            feed(&mut *s, 1, begin);
            let (mut token, mut expected) = (*last, Vec::new());
            for _ in 0..24 {
                let logits = feed(&mut *s, 1, &[token]);
                let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
                token = best.unwrap() as u32;
                expected.push(token);
            }
            let mut sampler = Sampler::new(SamplingParams::greedy(), 0).unwrap();
            sampler.begin(&prompt);
            let mut s = session(&*gpu, KvType::F16, 2);
            feed(&mut *s, 0, begin);
            let drawn = drawn(&mut *s, 0, *last, 24, &mut sampler).unwrap();
            let title = config.architecture.title;
            assert_eq!(drawn, expected, "{title} {scheme}");
        }
    }
}

/// Mean squares of the inputs of products, by layer, product and expert.
#[derive(Default)]
struct Squares(BTreeMap<(usize, String, usize), (usize, Vec<f64>)>);

impl Squares {
    fn add(&mut self, (layer, product, expert): (usize, &Product, usize), x: &[f32], n: usize) {
        let key = (layer, product.name.to_owned(), expert);
        let (rows, sums) = self.0.entry(key).or_insert_with(|| (0, vec![0.0; n]));
        *rows += x.len() / n;
        for row in x.chunks_exact(n) {
            let squares = row.iter().map(|&v| f64::from(v).powi(2));
            sums.iter_mut().zip(squares).for_each(|(s, v)| *s += v);
        }
    }

    fn means(&self, layer: usize, product: &Product, expert: usize) -> Vec<f32> {
        let (rows, sums) = &self.0[&(layer, product.name.to_owned(), expert)];
        sums.iter().map(|s| (s / *rows as f64) as f32).collect()
    }
}

/// [`Squares`] of a model of this shape.
struct Watch<'a>(&'a ModelConfig, Squares);

impl Observer for Watch<'_> {
    fn linear_input(&mut self, layer: usize, product: &Product, x: &[f32]) {
        self.1.add((layer, product, 0), x, product.inputs(self.0));
    }

    fn expert_input(&mut self, layer: usize, product: &Product, expert: usize, x: &[f32]) {
        self.1
            .add((layer, product, expert), x, product.inputs(self.0));
    }
}

/// The layer stepper that quantizing uses: each layer's output, the inputs of its products, the second moments that are
/// summed on the GPU, and logits are those of the CPU. Texts are of several lengths, one of which is longer than a piece.
#[test]
fn layers_are_those_of_the_cpu() {
    if nq_testkit::on_gpu(nq_cuda::device_count()).is_none() {
        return;
    }
    for config in configs() {
        let what = &config.architecture.title;
        let store = store(&config, None);
        let stepper = |device| -> Box<dyn LayerStepper> {
            let options = LoadOptions {
                device,
                activations: ActivationChoice::F32,
                ..LoadOptions::default()
            };
            nq_load::stepper(&config, &options, KvType::F32, 64).unwrap()
        };
        let (mut gpu, mut cpu) = (stepper(DeviceChoice::Cuda(0)), stepper(DeviceChoice::Cpu));
        let texts = [21, 21, 21, 150, 33, 2, 2].map(|n| tokens(n, n as u64));
        let embedding = nq_runtime::models::embedding(&store, &config).unwrap();
        let mut a = Hidden::embed(&embedding, &texts, 1).unwrap();
        for index in 0..config.num_hidden_layers {
            let weights = LayerWeights::read(&store, &config, index).unwrap();
            let mut b = a.clone();
            let watched = |stepper: &mut dyn LayerStepper| {
                let mut watch = Watch(&config, Squares::default());
                stepper.observe(index, &weights, &a, &mut watch).unwrap();
                watch.1
            };
            let (found, expected) = (watched(&mut *gpu), watched(&mut *cpu));
            assert_eq!(found.0.len(), expected.0.len(), "{what}, layer {index}");
            let moments = gpu.moments(index, &weights, &a, &mut ()).unwrap();
            let moments = moments.expect("a GPU sums them itself");
            for (product, moments) in weights.spec.products().into_iter().zip(&moments) {
                for (expert, sums) in moments.iter().enumerate() {
                    let want = expected.means(index, product, expert);
                    for got in [&found.means(index, product, expert)[..], sums.diagonal()] {
                        let d = distance(got, &want);
                        let name = product.name;
                        assert!(d < 1e-4, "{what}, layer {index}, {name} {expert}: {d:e}");
                    }
                }
            }
            gpu.layer(index, &weights, &mut a, &mut ()).unwrap();
            cpu.layer(index, &weights, &mut b, &mut ()).unwrap();
            let d = distance(&a.data, &b.data);
            println!("{what}, layer {index}: {d:.2e}");
            assert!(d < 3e-4, "{what}, layer {index}: {d:e}");
        }
        let head = nq_runtime::models::head(&store, &config).unwrap();
        let norm = nq_runtime::models::Ending::read(&store, &config).unwrap();
        let [found, expected] = [gpu, cpu].map(|mut s| s.head(&norm, &head, &a, 3..90).unwrap());
        let d = distance(&found, &expected);
        assert!(d < 1e-4, "{what}, logits: {d:e}");
    }
}

/// Sizes that have no kernels are refused by name, before weights are read.
#[test]
fn hybrids_that_have_no_kernels_are_refused_by_name() {
    if nq_testkit::on_gpu(nq_cuda::device_count()).is_none() {
        return;
    }
    let good = wide_hybrid("qwen35", 4, false);
    let refused = |config: &ModelConfig| {
        let options = LoadOptions {
            device: DeviceChoice::Cuda(0),
            ..LoadOptions::default()
        };
        let refused = nq_load::load(config, &Store::random(config, 7), &options, &());
        refused.err().expect("refused").to_string()
    };
    let narrow = ModelConfig {
        delta: good.delta.map(|d| Delta { key_dim: 64, ..d }),
        ..good.clone()
    };
    assert!(refused(&narrow).contains("linear_key_head_dim"));
    let heads = ModelConfig {
        head_dim: 128,
        rope: Rope {
            dims: Some(32),
            ..good.rope
        },
        ..good.clone()
    };
    assert!(refused(&heads).contains("head_dim"));
    let turned = ModelConfig {
        rope: Rope {
            dims: Some(128),
            ..good.rope
        },
        ..good
    };
    assert!(refused(&turned).contains("turn with the position"));
}
