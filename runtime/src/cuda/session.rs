//! [`Session`] on a GPU.

mod experts;
mod pages;
mod passes;
mod ranks;
mod rows;
mod states;
mod step;
mod taps;

use super::model::{CudaModel, has_gates, largest_mixture};
use super::plan::Request;
use super::streams::StreamRun;
use crate::checks::{all_finite, check_chunks, check_states};
use crate::error::{Error, Result};
use crate::interface::{
    Chunk, Drafter, Logits, Observer, Pages, Session, SessionSpec, StepsAhead, StreamHead, Streams,
};
use crate::kv::{PageCopy, PageTables};
use crate::states::{Snapshots, is_recurrent, shape_of};
use nq_formats::{Experts, ModelConfig};
use nq_kernels::KernelSet;
use nq_kernels::cpu::DeltaShape;
use nq_kernels::cuda::{
    Buffer, Checked, DeltaRows, DeviceLinear, DevicePages, DeviceStates, Gpu, GroupedRows,
    HostStage, MOST_SEQUENCES, MOST_TRELLIS_ROWS, Mark, PageEntry, PageStaging, PagesShape, Pinned,
    Places, Row, StatesShape, Stream, StreamOptions, TrellisRoom, TrellisSizes, gated_width,
    packed_weights, stacked,
};
use ranks::RankRows;
use std::collections::VecDeque;
use std::sync::Arc;
use step::{Graphs, StepRows, most_rows};
pub(super) use step::{least_shared_pages, most_together};
use taps::Taps;

/// Rows of logits computed and copied at a time.
pub(super) const LOGIT_ROWS: usize = 64;

/// Sequences in progress over a [`CudaModel`].
pub(super) struct CudaSession {
    // Fields are dropped in order: the stream waits for its work before memory goes.
    stream: Stream,
    graphs: Graphs,
    model: Arc<CudaModel>,
    spec: SessionSpec,
    tables: PageTables,
    /// Copy of the device's page tables, by slot.
    placed: Vec<Vec<u32>>,
    pages: DevicePages,
    states: Option<DeviceStates>,
    snapshots: Snapshots,
    /// By slot, the length at which its states stand, if the rows behind it are kept and not in them.
    behind: Vec<Option<usize>>,
    /// By slot, true if pages were appended, whose states are missing.
    stateless: Vec<bool>,
    cos_sin: Buffer<[f32; 2]>, // [ctx padded, rotated / 2]
    step: StepRows,
    many: ManyRows,
    /// Of a rank of several.
    ranks: Option<RankRows>,
    /// Reads the residual streams of the rows that the host has written.
    drafting: Option<StreamRun>,
    /// Start and end of queued chunks that have not been waited for.
    prompts: VecDeque<(Mark, Mark)>,
    logits_host: Pinned<f32>, // [LOGIT_ROWS, vocab]
    /// For layers whose experts are on the CPU.
    experts_host: Option<HostStage>,
    /// For pages that are read or appended.
    page_host: Option<PageStaging>,
    logits: Vec<f32>, // [rows wanted, vocab]
}

/// Buffers of a forward over many rows.
struct ManyRows {
    tokens: Checked<u32>,
    rows: Checked<Row>,
    wanted: Checked<u32>,
    x: Buffer<f32>,        // [rows, hidden], the residual
    normed: Buffer<u16>,   // [rows, hidden padded]
    qkv: Buffer<f32>,      // [rows, widest products of a mixer]
    attended: Buffer<u16>, // [rows, widest output of a mixer, padded]
    mlp: Buffer<u16>,      // [rows, intermediate padded]
    delta: Option<RecurrentRows>,
    head_in: Buffer<u16>, // [LOGIT_ROWS, hidden padded]
    logits: Buffer<f32>,  // [LOGIT_ROWS, vocab], or hidden states of as many rows
    experts: Option<ExpertRows>,
    full: Option<FullRows>,
    taps: Option<Taps>,
}

/// Buffers for layers with recurrences, of forwards over many rows.
struct RecurrentRows {
    rates: Buffer<f32>,   // [rows, 2 value heads]
    mixed: Buffer<f32>,   // [rows, channels]
    chunks: Buffer<f32>,  // `DeltaRows::chunk_parts`
    scanned: Buffer<f32>, // [rows, values]
}

impl RecurrentRows {
    fn new(gpu: &Gpu, delta: &DeltaShape, rows: usize, slots: usize) -> Result<Self> {
        let f32s = |n: usize| gpu.zeros::<f32>("activations", rows * n);
        Ok(RecurrentRows {
            rates: f32s(2 * delta.value_heads)?,
            mixed: f32s(delta.channels())?,
            chunks: gpu.zeros("activations", DeltaRows::chunk_parts(delta, rows, slots))?,
            scanned: f32s(delta.values())?,
        })
    }
}

/// Buffers for layers with experts.
pub(super) struct ExpertRows {
    pub(super) scores: Buffer<f32>, // [rows, experts in a stack]
    pub(super) shared: Buffer<f32>, // [rows], scores of the shared expert
    pub(super) gated: Buffer<f32>,  // [rows, chosen experts, width], of rows that are not grouped
    pub(super) grouped: Option<GroupedRows>,
}

/// From so many rows on, rows are sorted by expert, and an expert's weights are read once for all of its
/// rows; before, rows that go through their experts one by one are faster (Qwen3-30B-A3B on an H200).
const GROUPED_ROWS: usize = 48;

impl ExpertRows {
    /// Allocates them for up to `rows` rows; `None` if the model has no experts.
    pub(super) fn new(gpu: &Gpu, w: &Widths, rows: usize) -> Result<Option<Self>> {
        let Some(experts) = &w.experts else {
            return Ok(None);
        };
        let f32s = |n: usize| gpu.zeros::<f32>("activations", n);
        let experts = &largest_mixture(experts);
        let grouped = || GroupedRows::new(gpu, *experts, w.hidden, rows);
        Ok(Some(ExpertRows {
            scores: f32s(rows * stacked(experts))?,
            shared: f32s(rows)?,
            gated: f32s(rows.min(GROUPED_ROWS) * gated_width(experts))?,
            grouped: (rows >= GROUPED_ROWS).then(grouped).transpose()?,
        }))
    }
}

/// f32 activations, for the plain kernels and for observers.
struct FullRows {
    normed: Buffer<f32>,   // [rows, hidden]
    attended: Buffer<f32>, // [rows, widest output of a mixer]
    gate_up: Buffer<f32>,  // [rows, 2 intermediate]
    mlp: Buffer<f32>,      // [rows, intermediate]
}

/// Row widths of the buffers.
pub(super) struct Widths {
    pub(super) hidden: usize,
    /// Of the products that attention or a recurrence begins with.
    pub(super) qkv: usize,
    /// Of what attention or a recurrence gives to its last product.
    pub(super) attended: usize,
    /// Width of a layer's MLP or shared expert; other experts have their own buffers.
    pub(super) mlp: usize,
    pub(super) vocab: usize,
    pub(super) experts: Option<Experts>,
    pub(super) delta: Option<DeltaShape>,
}

impl Widths {
    pub(super) fn of(c: &ModelConfig) -> Self {
        let delta = shape_of(c);
        let gates = if has_gates(c) { c.q_dim() } else { 0 };
        let (products, values) = delta.map_or((0, 0), |d| (d.channels() + d.values(), d.values()));
        Widths {
            hidden: c.hidden_size,
            qkv: products.max(c.q_dim() + gates + 2 * c.kv_dim()),
            attended: values.max(c.q_dim()),
            mlp: c.mlp_width().max(c.experts.map_or(0, |e| e.shared)),
            vocab: c.vocab_size,
            experts: c.experts,
            delta,
        }
    }

    /// Of products with trellis codes of up to `many` rows.
    fn trellis(&self, many: usize) -> TrellisSizes {
        let outputs = self.qkv.max(2 * self.mlp);
        let weights = packed_weights(outputs, self.hidden);
        TrellisSizes {
            rows: MOST_TRELLIS_ROWS.max(LOGIT_ROWS),
            many,
            inputs: self.widest_input(),
            weights: weights.max(packed_weights(self.hidden, self.attended.max(self.mlp))),
        }
    }

    /// The most inputs of any product.
    fn widest_input(&self) -> usize {
        self.hidden.max(self.attended).max(self.mlp)
    }
}

pub(super) fn padded(width: usize) -> usize {
    width.next_multiple_of(256)
}

impl FullRows {
    fn new(gpu: &Gpu, w: &Widths, rows: usize) -> Result<Self> {
        let zeros = |n: usize| gpu.zeros("activations", rows * n);
        Ok(FullRows {
            normed: zeros(w.hidden)?,
            attended: zeros(w.attended)?,
            gate_up: zeros(2 * w.mlp)?,
            mlp: zeros(w.mlp)?,
        })
    }
}

impl ManyRows {
    /// Allocates buffers for forwards over up to `m` rows, which stand in `places`.
    fn new(gpu: &Gpu, w: &Widths, kernels: KernelSet, m: usize, places: Places) -> Result<Self> {
        let f32s = |n: usize| gpu.zeros::<f32>("activations", n);
        let halves = |n: usize| gpu.zeros::<u16>("activations", n);
        Ok(ManyRows {
            tokens: Checked::new(gpu, "activations", m, 0, w.vocab)?,
            rows: Checked::new(gpu, "activations", m, Row::default(), places)?,
            wanted: Checked::new(gpu, "activations", m, 0, m)?,
            x: f32s(m * w.hidden)?,
            normed: halves(m * padded(w.hidden))?,
            qkv: f32s(m * w.qkv)?,
            attended: halves(m * padded(w.attended))?,
            mlp: halves(m * padded(w.mlp))?,
            delta: match &w.delta {
                Some(delta) => Some(RecurrentRows::new(gpu, delta, m, places.slots)?),
                None => None,
            },
            head_in: halves(LOGIT_ROWS * padded(w.hidden))?,
            logits: f32s(LOGIT_ROWS * w.vocab)?,
            experts: ExpertRows::new(gpu, w, m)?,
            full: match kernels {
                KernelSet::Reference => Some(FullRows::new(gpu, w, m)?),
                KernelSet::Fused => None,
            },
            taps: None,
        })
    }
}

/// Device memory of a session.
pub(super) struct SessionMemory {
    pages: DevicePages,
    states: Option<DeviceStates>,
    cos_sin: Buffer<[f32; 2]>,
    step: StepRows,
    many: ManyRows,
    ranks: Option<RankRows>,
    room: Option<TrellisRoom>,
}

impl SessionMemory {
    /// Allocates it for the model of `request`. The rotary table is not written yet.
    pub(super) fn new(gpu: &Gpu, request: &Request<'_>, spec: &SessionSpec) -> Result<Self> {
        let Request {
            config: c,
            kernels,
            head,
            trellis,
            ..
        } = *request;
        let (w, rows) = (Widths::of(c), most_rows(spec, request.together));
        let many = spec.max_rows.max(1);
        let recurrent = c.layers().filter(|l| is_recurrent(l)).count();
        let shape = PagesShape {
            kv: spec.kv,
            layers: c.num_hidden_layers - recurrent,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            pages: spec.page_count(),
            slots: spec.slots,
            ctx: spec.ctx,
        };
        let pages = DevicePages::new(gpu, shape)?;
        let places = pages.places();
        let table = places.positions * c.rotated() / 2;
        let states = |delta| {
            let shape = StatesShape {
                delta,
                layers: recurrent,
                places: places.slots + spec.snapshot_count(),
                kept: if spec.drafts { spec.slots } else { 0 },
            };
            DeviceStates::new(gpu, shape)
        };
        let room = || TrellisRoom::new(gpu, w.trellis(many.max(rows)));
        let ranks = request
            .rank
            .map(|rank| RankRows::new(gpu, &w, rank, (rows, many)));
        Ok(SessionMemory {
            room: trellis.then(room).transpose()?,
            states: w.delta.map(states).transpose()?,
            ranks: ranks.transpose()?,
            cos_sin: gpu.zeros("the rotary table", table)?,
            step: StepRows::new(
                gpu,
                c,
                head,
                rows,
                (spec.kv, places),
                (request.rank, trellis),
            )?,
            many: ManyRows::new(gpu, &w, kernels, many, places)?,
            pages,
        })
    }

    /// Bytes of keys and values, and of states.
    pub(super) fn kv_bytes(&self) -> usize {
        self.pages.bytes() + self.states.as_ref().map_or(0, DeviceStates::bytes)
    }
}

impl CudaSession {
    pub(super) fn new(model: Arc<CudaModel>, spec: SessionSpec) -> Result<Self> {
        let gpu = &model.gpu;
        let c = &model.config;
        let memory = SessionMemory::new(gpu, &model.request(&spec), &spec)?;
        let mut cos_sin = memory.cos_sin;
        let positions = cos_sin.len() / (c.rotated() / 2);
        let slots = memory.pages.places().slots;
        let rows = memory.step.rows().max(spec.max_rows);
        let experts_host = match (&c.experts, model.host.layers()) {
            (Some(experts), 1..) => {
                let row = c.hidden_size + experts.count;
                Some(gpu.host_stage("rows for the CPU", rows * row)?)
            }
            _ => None,
        };
        cos_sin.write(0, &model.rotary.pairs(positions))?;
        Ok(CudaSession {
            stream: gpu.stream_with(StreamOptions {
                room: memory.room,
                beside: model.rank.is_some_and(|rank| rank.beside),
            })?,
            graphs: Graphs::default(),
            tables: PageTables::new(&spec),
            placed: vec![Vec::new(); spec.slots],
            pages: memory.pages,
            states: memory.states,
            snapshots: Snapshots::new(slots, spec.snapshot_count(), spec.slots),
            behind: vec![None; spec.slots],
            stateless: vec![false; spec.slots],
            cos_sin,
            step: memory.step,
            many: memory.many,
            ranks: memory.ranks,
            drafting: None,
            prompts: VecDeque::new(),
            logits_host: gpu.pinned("logits", LOGIT_ROWS * model.config.vocab_size)?,
            logits: Vec::new(),
            experts_host,
            page_host: None,
            model,
            spec,
        })
    }
}

impl CudaSession {
    /// Logits of the latest forward.
    pub(super) fn logits(&self) -> Logits<'_> {
        Logits {
            data: &self.logits,
            vocab: self.model.config.vocab_size,
        }
    }

    /// Refuses chunks that do not fit, or whose sequence a queued step continues.
    fn check_chunks(&self, chunks: &[Chunk<'_>]) -> Result<()> {
        let vocab = self.model.config.vocab_size;
        check_chunks(chunks, &self.spec, vocab, |slot| self.tables.len(slot))?;
        check_states(chunks, &self.stateless)?;
        match chunks.iter().find(|c| self.step.seats_slot(c.slot)) {
            None => Ok(()),
            Some(chunk) => Err(Error::Request {
                what: "chunk",
                expected: "a sequence that is not seated in a step".into(),
                found: format!("slot {}, which is seated", chunk.slot),
            }),
        }
    }

    /// Makes room for more positions of sequences, given as (slot, positions).
    fn reserve(&mut self, growth: impl Iterator<Item = (usize, usize)> + Clone) -> Result<()> {
        let tables = (&mut self.tables, &mut self.placed[..]);
        reserve_pages(&self.stream, tables, &mut self.pages, growth)
    }
}

/// Makes room for more positions of sequences, given as (slot, positions): queues the copies of shared
/// pages and the changes of the device's page tables, of which `placed` is a copy.
pub(super) fn reserve_pages(
    stream: &Stream,
    (tables, placed): (&mut PageTables, &mut [Vec<u32>]),
    pages: &mut DevicePages,
    growth: impl Iterator<Item = (usize, usize)> + Clone,
) -> Result<()> {
    for PageCopy { from, to, .. } in tables.reserve(growth.clone())? {
        // Copies all rows: those past the shared ones are written before they are read.
        stream.copy_page(pages, from, to)?;
    }
    let mut entries = Vec::new();
    for (slot, _) in growth {
        let placed = &mut placed[slot];
        for (index, &page) in tables.all()[slot].iter().enumerate() {
            match placed.get_mut(index) {
                Some(there) if *there == page => continue,
                Some(there) => *there = page,
                None => placed.push(page),
            }
            entries.push(PageEntry { slot, index, page });
        }
    }
    Ok(stream.set_pages(pages, &entries)?)
}

/// Host memory for copying pages, allocated at its first use.
fn staging<'a>(
    host: &'a mut Option<PageStaging>,
    pages: &DevicePages,
    gpu: &Gpu,
) -> Result<&'a mut PageStaging> {
    match host {
        Some(host) => Ok(host),
        None => Ok(host.insert(pages.staging(gpu)?)),
    }
}

/// Queues a product with `w`, timed as `op`.
fn product(
    stream: &Stream,
    op: &'static str,
    w: &DeviceLinear,
    queue: impl FnOnce() -> nq_kernels::Result<()>,
) -> nq_kernels::Result<()> {
    let key = (op, w.kind().name(), (w.rows(), w.inputs()));
    stream.timed(key, w.bytes(), queue)
}

impl Session for CudaSession {
    fn spec(&self) -> SessionSpec {
        self.spec
    }

    fn len(&self, slot: usize) -> usize {
        self.tables.len(slot)
    }

    fn truncate(&mut self, slot: usize, len: usize) -> usize {
        let mut len = len;
        if self.states.is_some() && (len < self.tables.len(slot) || self.stateless[slot]) {
            if !self.can_take_back(slot, len) {
                len = self.resume(slot, slot, len);
            }
            self.snapshots.cut(slot, len);
        }
        self.tables.truncate(slot, len);
        if let Some(drafting) = &self.drafting {
            drafting.truncate(slot, len);
        }
        self.tables.len(slot)
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize> {
        self.tables.fork(from, to, len)?;
        self.snapshots.cut(to, 0);
        self.behind[to] = None;
        self.stateless[to] = false;
        let ends = len == self.tables.len(from) && !self.stateless[from];
        if ends {
            self.settle(from)?;
        }
        let kept = self.behind[from].filter(|&at| at <= len);
        let reached = match &mut self.states {
            None => len,
            Some(states) if let Some(at) = kept => {
                self.stream.copy_states(states, from, to)?;
                if at < len {
                    self.stream.settle_states(states, from, to, len - at)?;
                }
                len
            }
            Some(states) if ends => {
                self.stream.copy_states(states, from, to)?;
                // The sequences part here: others may, too.
                if let Some(place) = self.snapshots.take(from, len) {
                    self.stream.copy_states(states, from, place)?;
                }
                len
            }
            Some(_) => self.resume(from, to, len),
        };
        self.snapshots.share(from, to, reached);
        self.tables.truncate(to, reached);
        if let Some(drafting) = &self.drafting {
            drafting.fork(from, to, reached)?;
        }
        Ok(reached)
    }

    fn reach(&self, slot: usize, len: usize) -> usize {
        let held = self.tables.len(slot);
        let ends = len >= held && !self.stateless[slot];
        if self.states.is_none() || ends || self.can_take_back(slot, len) {
            return len.min(held);
        }
        self.snapshots.reach(slot, len)
    }

    fn keep_at(&mut self, slot: usize, len: usize) {
        if self.states.is_some() {
            self.snapshots.want(slot, len);
        }
    }

    fn snapshots(&self) -> (usize, usize) {
        match self.states {
            Some(_) => self.snapshots.count(),
            None => (0, 0),
        }
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        observer: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        self.check_chunks(chunks)?;
        self.logits.clear();
        let fused = self.model.kernels == KernelSet::Fused && observer.is_none() && self.is_idle();
        let ran = match chunks {
            [] => Ok(()),
            chunks if fused && self.fit_a_step(chunks) => self.forward_step(chunks),
            chunks => self.forward_many(chunks, observer),
        };
        ran.inspect_err(|e| self.lose(chunks, e))?;
        if !all_finite(&self.logits) {
            self.lose(chunks, &Error::LogitsNotFinite);
            return Err(Error::LogitsNotFinite);
        }
        for chunk in chunks {
            self.tables.advance(chunk.slot, chunk.tokens.len());
        }
        Ok(self.logits())
    }

    fn hidden(&mut self, chunks: &[Chunk<'_>], out: &mut Vec<f32>) -> Result<()> {
        self.check_chunks(chunks)?;
        let first = out.len();
        if !chunks.is_empty() {
            let ran = self.hidden_many(chunks, out);
            ran.inspect_err(|e| self.lose(chunks, e))?;
        }
        if !all_finite(&out[first..]) {
            let error = Error::NotFinite {
                what: "the final norm behind the output",
                layer: self.model.layers.len() - 1,
            };
            self.lose(chunks, &error);
            return Err(error);
        }
        for chunk in chunks {
            self.tables.advance(chunk.slot, chunk.tokens.len());
        }
        Ok(())
    }

    fn draft_rows(&self) -> usize {
        // Rows that turn out to be wrong have to be taken out of states again.
        let takes_back = self.states.as_ref().is_none_or(DeviceStates::keeps_rows);
        match self.model.kernels {
            KernelSet::Fused if takes_back => self.step.most_run(),
            KernelSet::Fused | KernelSet::Reference => 1,
        }
    }

    fn pages(&mut self) -> Option<&mut dyn Pages> {
        Some(self)
    }

    fn ahead(&mut self) -> Option<&mut dyn StepsAhead> {
        match self.model.kernels {
            KernelSet::Fused => Some(self),
            KernelSet::Reference => None,
        }
    }

    fn streams(&mut self) -> Option<&mut dyn Streams> {
        Some(self)
    }
}

impl Streams for CudaSession {
    fn drafter(&mut self, head: &StreamHead) -> Result<Box<dyn Drafter>> {
        let (model, spec) = (&self.model, &self.spec);
        if model.kernels == KernelSet::Reference {
            return Err(Error::Unsupported {
                engine: "nq on a GPU",
                what: "drafts from residual streams",
                expected: "--kernels fused".into(),
                found: model.kernels.to_string(),
            });
        }
        let run = StreamRun::new(head, model, &self.stream, spec)?;
        let taps = |rows: usize| {
            Taps::new(
                &model.gpu,
                head.taps.clone(),
                rows,
                model.config.hidden_size,
            )
        };
        self.step.taps = Some(taps(MOST_SEQUENCES)?);
        self.many.taps = Some(taps(spec.max_rows.max(1))?);
        self.drafting = Some(run.clone());
        // The recorded steps keep no streams.
        self.graphs = Graphs::default();
        Ok(Box::new(run))
    }
}
