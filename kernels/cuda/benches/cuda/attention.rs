//! Benches of attention and of the pages of keys and values that it reads.

use super::timing::{MODELS, Model, Scheme, Timing};
use nq_cuda::{
    AttentionOutput, AttentionScratch, AttentionShape, Buffer, Cascade, Checked, DevicePages,
    HEAD_DIM, Heads, LayersPlan, LayersScratch, LayersSizes, PageEntry, PagesShape, Row,
    SequenceRows, Step, StepBounds, StepLayer, StepMixer,
};
use nq_kernels::Result;
use nq_kernels::pages::{KvType, PAGE, SharedPrefix};

/// Layers used in turn, so that pages come out of memory rather than the cache.
const LAYERS: usize = 8;
const KV: [(KvType, &str); 2] = [(KvType::F16, "fp16"), (KvType::Int8, "int8")];

/// Gains and rotary table, and pages filled by `slots` sequences of `ctx` positions.
struct Layers {
    gain: Buffer<f32>,
    table: Buffer<[f32; 2]>,
    pages: DevicePages,
}

impl Layers {
    fn new(t: &Timing, model: Model, kv: KvType, slots: usize, ctx: usize) -> Result<Self> {
        let each = ctx.div_ceil(PAGE);
        let shape = PagesShape {
            kv,
            layers: LAYERS,
            kv_heads: model.kv_heads,
            head_dim: HEAD_DIM,
            pages: slots * each,
            slots,
            ctx,
        };
        let mut pages = DevicePages::new(&t.gpu, shape)?;
        let entry = |i: usize| PageEntry {
            slot: i % slots,
            index: i / slots,
            page: i as u32,
        };
        let entries: Vec<PageEntry> = (0..slots * each).map(entry).collect();
        t.stream.set_pages(&mut pages, &entries)?;
        Ok(Layers {
            gain: t.gpu.upload("a benchmark", &[1.0; HEAD_DIM])?,
            table: t
                .gpu
                .upload("a benchmark", &vec![[1.0, 0.0]; each * PAGE * HEAD_DIM / 2])?,
            pages,
        })
    }

    fn heads(&self, heads: usize) -> Heads<'_> {
        Heads {
            heads,
            gains: Some([&self.gain; 2]),
            biases: &[],
            cos_sin: &self.table,
            eps: 1e-6,
        }
    }

    /// Bytes of `n` positions' keys and values in a layer.
    fn bytes(&self, n: usize) -> usize {
        let shape = self.pages.shape();
        2 * n * shape.kv_heads * shape.kv.bytes(HEAD_DIM)
    }
}

/// Attention of a step over the keys and values of `layers`.
struct StepCase<'a> {
    model: Model,
    layers: &'a Layers,
    steps: Vec<Step>,
    /// The steps may be runs of one sequence.
    runs: bool,
    /// Most positions that a row reads by itself.
    positions: usize,
    /// Rows that read their first pages together.
    together: Option<SharedPrefix>,
}

impl StepCase<'_> {
    /// Times it as `what`; it reads `bytes`.
    fn time(&self, t: &Timing, what: &str, bytes: usize) -> Result<()> {
        let (m, layers) = (self.steps.len(), self.layers);
        let (heads, kv_heads) = (self.model.heads, self.model.kv_heads);
        let qkv = vec![0.1f32; m * (heads + 2 * kv_heads) * HEAD_DIM];
        let qkv = t.gpu.upload("a benchmark", &qkv)?;
        let places = layers.pages.places();
        let bounds = StepBounds { places, tokens: 1 };
        let steps = Checked::upload(&t.gpu, "a benchmark", &self.steps, bounds)?;
        let mut scratch = AttentionScratch::new(&t.gpu, heads, kv_heads, m)?;
        let mut out = t.gpu.zeros("a benchmark", m * heads * HEAD_DIM)?;
        let mut cascade = Cascade::new(&t.gpu, m, places)?;
        let each = heads / kv_heads;
        let shared = match &self.together {
            Some(prefix) => {
                cascade.write(&t.stream, std::slice::from_ref(prefix), each, kv_heads)?
            }
            None => None,
        };
        let shape = AttentionShape {
            m,
            splits: AttentionScratch::splits(&t.gpu, kv_heads, m, self.positions),
            holds_dependents: false,
            runs: self.runs,
            shared: shared.map(|prefixes| (&cascade, prefixes)),
        };
        t.chained(what, bytes, |turn| {
            let out = AttentionOutput::Full(&mut out);
            let layer = layers.pages.layer(turn % LAYERS);
            let heads = layers.heads(heads);
            (t.stream).attention_decode(&qkv, &steps, &heads, layer, &mut scratch, out, shape)
        })
    }
}

fn step(position: usize, slot: usize) -> Step {
    Step {
        position: position as i32,
        slot: slot as i32,
        ..Step::default()
    }
}

/// Steps with one row per sequence.
pub(crate) fn attention_decode(t: &mut Timing) -> Result<()> {
    for model in MODELS {
        for (kv, name) in KV {
            for (m, depth) in [(1, 128), (1, 8192), (1, 32_768), (16, 512), (64, 512)] {
                let layers = Layers::new(t, model, kv, m, depth)?;
                let case = StepCase {
                    model,
                    layers: &layers,
                    steps: (0..m).map(|slot| step(depth - 1, slot)).collect(),
                    runs: false,
                    positions: depth,
                    together: None,
                };
                let what = format!("{} {m} x {depth} positions {name}", model.name);
                case.time(t, &what, layers.bytes(m * depth))?;
            }
        }
    }
    Ok(())
}

/// Steps whose rows all belong to one sequence: its full pages read once for all rows, and row by row.
pub(crate) fn attention_run(t: &mut Timing) -> Result<()> {
    for model in MODELS {
        for (kv, name) in KV {
            for depth in [150, 534, 1046, 2070, 4118, 8214, 16_406] {
                let layers = Layers::new(t, model, kv, 1, depth)?;
                for m in [2, 4, 8, 16] {
                    let pages = (depth - m) / PAGE;
                    let prefix = SharedPrefix {
                        slot: 0,
                        pages,
                        rows: (0..m).collect(),
                    };
                    for (together, how) in [(Some(prefix), "once"), (None, "row by row")] {
                        let case = StepCase {
                            model,
                            layers: &layers,
                            steps: (0..m).map(|row| step(depth - m + row, 0)).collect(),
                            runs: true,
                            positions: depth - together.as_ref().map_or(0, |p| p.pages * PAGE),
                            together,
                        };
                        let what = format!("{} {m} of {depth} {name}, {how}", model.name);
                        case.time(t, &what, layers.bytes(depth))?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Rows whose sequences share this many pages and have 64 positions each of their own: with shared
/// pages read once for all of them, and row by row.
pub(crate) fn attention_shared(t: &mut Timing) -> Result<()> {
    const SHAPES: [(usize, usize); 8] = [
        (2, 8),
        (2, 32),
        (4, 8),
        (4, 64),
        (16, 1),
        (16, 4),
        (16, 64),
        (64, 4),
    ];
    for model in MODELS {
        for (kv, name) in KV {
            for (m, pages) in SHAPES {
                let depth = pages * PAGE + 64;
                let mut layers = Layers::new(t, model, kv, m, depth)?;
                let entries: Vec<PageEntry> = (0..m * pages)
                    .map(|i| PageEntry {
                        slot: i % m,
                        index: i / m,
                        page: (i / m * m) as u32,
                    })
                    .collect();
                t.stream.set_pages(&mut layers.pages, &entries)?;
                let prefix = SharedPrefix {
                    slot: 0,
                    pages,
                    rows: (0..m).collect(),
                };
                for (together, how, read) in [
                    (Some(prefix), "once", depth + 64 * (m - 1)),
                    (None, "row by row", m * depth),
                ] {
                    let case = StepCase {
                        model,
                        layers: &layers,
                        steps: (0..m).map(|slot| step(depth - 1, slot)).collect(),
                        runs: false,
                        positions: if together.is_some() { 64 } else { depth },
                        together,
                    };
                    let what = format!("{} {m} rows, {pages} pages {name}, {how}", model.name);
                    case.time(t, &what, layers.bytes(read))?;
                }
            }
        }
    }
    Ok(())
}

/// All layers of a step of one row at once, for models that run this way.
pub(crate) fn step_layers(t: &mut Timing) -> Result<()> {
    for model in MODELS {
        let mut weights = Vec::new();
        for (_, out, inp) in model.products() {
            weights.push(t.weights(Scheme::Int4, out, inp)?);
        }
        let weight =
            |product: usize, layer: usize| &weights[product][layer % weights[product].len()];
        let gain = t.gpu.upload("a benchmark", &vec![1.0; model.hidden])?;
        let pages = Layers::new(t, model, KvType::F16, 1, PAGE)?;
        let layers: Vec<StepLayer<'_>> = (0..LAYERS)
            .map(|i| StepLayer {
                norm: &gain,
                mixer: StepMixer::Attention {
                    qkv: weight(0, i),
                    heads: pages.heads(model.heads),
                    cache: pages.pages.layer(i),
                },
                o: weight(1, i),
                mlp_norm: &gain,
                router: None,
                gate_up: weight(2, i),
                down: weight(3, i),
            })
            .collect();
        let Some(plan) = LayersPlan::new(&t.gpu, &layers, None)? else {
            println!("  skipped: {} does not run this way", model.name);
            continue;
        };
        let at = Step {
            position: 79,
            ..Step::default()
        };
        let bounds = StepBounds {
            places: pages.pages.places(),
            tokens: 1,
        };
        let step = Checked::upload(&t.gpu, "a benchmark", &[at], bounds)?;
        let sizes = LayersSizes {
            hidden: model.hidden,
            heads: model.heads,
            kv_heads: model.kv_heads,
            head_dim: HEAD_DIM,
            delta: None,
            experts: None,
            intermediate: weights[3][0].inputs(),
            trellis: false,
        };
        let mut scratch = LayersScratch::new(&t.gpu, sizes)?;
        let mut x = t.gpu.upload("a benchmark", &vec![0.5; model.hidden])?;
        let bytes = (0..4).flat_map(|p| (0..LAYERS).map(move |i| (p, i)));
        let bytes =
            bytes.map(|(p, i)| weight(p, i).bytes()).sum::<usize>() + LAYERS * pages.bytes(80);
        t.chained(
            &format!("{} {LAYERS} layers int4", model.name),
            bytes,
            |_| (t.stream).step_layers(&plan, &layers, &mut x, &step, &mut scratch),
        )?;
    }
    Ok(())
}

/// Attention of a prompt over its own rows: appending, the fast kernel, and the reference kernel.
pub(crate) fn attention_prefill(t: &mut Timing) -> Result<()> {
    const ROWS: usize = 2048;
    for model in MODELS {
        for (kv, name) in KV {
            let layers = Layers::new(t, model, kv, 1, ROWS)?;
            let (heads, width) = (model.heads, model.heads + 2 * model.kv_heads);
            let qkv = vec![0.1f32; ROWS * width * HEAD_DIM];
            let mut qkv = t.gpu.upload("a benchmark", &qkv)?;
            let rows: Vec<Row> = (0..ROWS as i32)
                .map(|position| Row {
                    position,
                    ..Row::default()
                })
                .collect();
            let rows = Checked::upload(&t.gpu, "a benchmark", &rows, layers.pages.places())?;
            let what = |op: &str| format!("{} {op} {ROWS} rows {name}", model.name);
            let moved = 4 * ROWS * width * HEAD_DIM + layers.bytes(ROWS);
            t.alone(&what("append"), moved, |turn| {
                let layer = layers.pages.layer(turn % LAYERS);
                t.stream
                    .append(&mut qkv, &rows, &layers.heads(heads), layer, ROWS)
            })?;
            let sequence = SequenceRows {
                row: 0,
                count: ROWS,
                position: 0,
                slot: 0,
            };
            let mut half = t.gpu.zeros("a benchmark", ROWS * heads * HEAD_DIM)?;
            t.alone(&what("attention_prefill"), layers.bytes(ROWS), |turn| {
                let layer = layers.pages.layer(turn % LAYERS);
                t.stream
                    .attention_prefill(&qkv, sequence, heads, layer, &mut half)
            })?;
            let mut full = t.gpu.zeros("a benchmark", ROWS * heads * HEAD_DIM)?;
            t.alone(&what("attention_reference"), layers.bytes(ROWS), |turn| {
                let layer = layers.pages.layer(turn % LAYERS);
                t.stream
                    .attention_reference(&qkv, &rows, heads, layer, &mut full, ROWS)
            })?;
        }
    }
    Ok(())
}

pub(crate) fn pages(t: &mut Timing) -> Result<()> {
    for model in MODELS {
        for (kv, name) in KV {
            let mut layers = Layers::new(t, model, kv, 4, 8 * PAGE)?;
            let page = layers.bytes(PAGE) * LAYERS;
            let what = format!("{} copy_page {LAYERS} layers {name}", model.name);
            t.alone(&what, 2 * page, |turn| {
                let turn = turn as u32;
                t.stream.copy_page(&mut layers.pages, turn, turn + 1)
            })?;
            let entry = PageEntry {
                slot: 1,
                index: 2,
                page: 3,
            };
            t.chained(&format!("{} set_pages", model.name), 4, |_| {
                t.stream.set_pages(&mut layers.pages, &[entry])
            })?;
        }
    }
    Ok(())
}
