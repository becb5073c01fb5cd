//! [`Session`] on a GPU.

pub(super) mod buffers;
mod graphs;
mod images;
pub(super) mod memory;
mod pages;
pub(super) mod rank_rows;
mod ranks;
mod rows;
mod states;
pub(super) mod step;
pub(super) mod step_rows;
pub(super) mod stream_rows;
pub(super) mod taps;
#[cfg(test)]
mod tests;

use super::adapters::{AdaptedSequences, AdapterRows, CudaAdapters};
use super::model::CudaModel;
use super::page_tables::reserve_pages;
use super::part::GpuPart;
use super::residency::ModelBank;
use super::streams::StreamRun;
use super::streams::buffers::DraftMemory;
use crate::{
    Buffer, DevicePages, DeviceStates, Gpu, HostStage, MOST_SEQUENCES, Mark, PageStaging, Pinned,
    Places, Stream, StreamOptions,
};
use buffers::{LOGIT_ROWS, ManyRows};
use graphs::Graphs;
use images::SessionImages;
use memory::SessionMemory;
use nq_kernels::KernelSet;
use nq_runtime::checks::{all_finite, check_chunks, check_states};
use nq_runtime::images::SequenceImages;
use nq_runtime::interface::{
    AppliedAdapter, Chunk, Drafter, Logits, Observer, Pages, PlacedImage, Session, SessionSpec,
    StepsAhead, StreamHead, Streams,
};
use nq_runtime::kv::PageTables;
use nq_runtime::states::Snapshots;
use nq_runtime::{Error, Result};
use rank_rows::RankRows;
use std::collections::VecDeque;
use std::sync::Arc;
use step_rows::StepRows;
use stream_rows::StreamsKept;
use taps::Taps;

/// Sequences in progress over a [`CudaModel`].
pub(super) struct CudaSession {
    // Fields are dropped in order: the stream waits for its work before memory goes.
    stream: Stream,
    graphs: Graphs,
    model: Arc<CudaModel>,
    adapters: CudaAdapters,
    adapted: AdaptedSequences,
    adapter_rows: Option<AdapterRows>,
    images: SessionImages,
    spec: SessionSpec,
    tables: PageTables,
    /// Copy of the device's page tables, by slot.
    placed: Vec<Vec<u32>>,
    pages: DevicePages,
    states: Option<DeviceStates>,
    /// Of a residual of several streams, at the places of states.
    kept: Option<StreamsKept>,
    snapshots: Snapshots,
    /// By slot, the length at which its states stand, if the rows behind it are kept and not in them.
    behind: Vec<Option<usize>>,
    /// By slot, true if pages were appended, whose states are missing.
    stateless: Vec<bool>,
    cos_sin: Buffer<[f32; 2]>, // [ctx padded, then rows of images in a pass, rotary_dims / 2]
    step: StepRows,
    many: ManyRows,
    /// Of a rank of several.
    ranks: Option<RankRows>,
    /// Reads the residual streams of the rows that the host has written.
    drafting: Option<StreamRun>,
    /// For a drafter to come.
    draft_memory: Option<DraftMemory>,
    /// Start and end of queued chunks that have not been waited for.
    prompts: VecDeque<(Mark, Mark)>,
    logits_host: Pinned<f32>, // [LOGIT_ROWS, vocab]
    /// Its share of a bank of experts, if the model has one.
    bank: Option<Arc<()>>,
    /// For layers whose experts are on the CPU.
    experts_host: Option<HostStage>,
    /// For pages that are read or appended.
    page_host: Option<PageStaging>,
    logits: Vec<f32>, // [rows wanted, vocab]
}

impl CudaSession {
    pub(super) fn new(
        model: Arc<CudaModel>,
        adapters: CudaAdapters,
        spec: SessionSpec,
    ) -> Result<Self> {
        let gpu = &model.gpu;
        let c = &model.config;
        let request = model.request(&spec, adapters.widths);
        let memory = SessionMemory::new(gpu, &request, &spec)?;
        let mut cos_sin = memory.cos_sin;
        let Places {
            positions, slots, ..
        } = memory.pages.places();
        let rows = memory.step.rows().max(spec.max_rows);
        let experts_host = match (&c.experts, model.layers.host.layers()) {
            (Some(experts), 1..) => {
                let row = c.hidden_size + experts.count;
                Some(gpu.host_stage("rows for the CPU", rows * row)?)
            }
            _ => None,
        };
        let bank = model.layers.bank.as_ref().map(ModelBank::join);
        cos_sin.write(0, &model.rotary.pairs(positions))?;
        Ok(CudaSession {
            stream: gpu.stream_with(StreamOptions {
                room: memory.room,
                gathered: memory.gathered,
                beside: model.part.is_some_and(|part| part.rank.beside),
                last: false,
            })?,
            graphs: Graphs::default(),
            adapted: AdaptedSequences::new(&adapters.applied, spec.slots),
            adapter_rows: memory.adapters,
            adapters,
            images: SessionImages::new(spec.slots),
            tables: PageTables::new(&spec),
            placed: vec![Vec::new(); spec.slots],
            pages: memory.pages,
            states: memory.states,
            kept: memory.kept,
            snapshots: Snapshots::new(slots, spec.snapshot_count(), spec.slots),
            behind: vec![None; spec.slots],
            stateless: vec![false; spec.slots],
            cos_sin,
            step: memory.step,
            many: memory.many,
            ranks: memory.ranks,
            drafting: None,
            draft_memory: memory.drafts,
            prompts: VecDeque::new(),
            logits_host: gpu.pinned("logits", LOGIT_ROWS * model.config.vocab_size)?,
            logits: Vec::new(),
            bank: bank.transpose()?,
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

    /// Lets experts of a bank move, between work that was queued and what comes next.
    fn adapt_bank(&self) -> Result<()> {
        match &self.model.layers.bank {
            Some(bank) if self.bank.is_some() => bank.adapt(&self.stream),
            _ => Ok(()),
        }
    }

    /// Makes room for more positions of sequences, given as (slot, positions).
    fn reserve(&mut self, growth: impl Iterator<Item = (usize, usize)> + Clone) -> Result<()> {
        let (tables, placed) = (&mut self.tables, &mut self.placed[..]);
        reserve_pages(&self.stream, tables, placed, &mut self.pages, growth)
    }
}

/// Copies what a sequence has at place `from` beside pages to place `to`.
fn copy_places(
    stream: &Stream,
    states: &mut DeviceStates,
    kept: &mut Option<StreamsKept>,
    from: usize,
    to: usize,
) -> nq_kernels::Result<()> {
    stream.copy_states(states, from, to)?;
    match kept {
        Some(kept) => kept.copy(stream, from, to),
        None => Ok(()),
    }
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
        if len == 0 || len < self.tables.len(slot) {
            self.images.shown[slot].truncate(len);
        }
        self.tables.truncate(slot, len);
        if let Some(drafting) = &self.drafting {
            drafting.truncate(slot, len);
        }
        self.tables.len(slot)
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize> {
        self.tables.fork(from, to, len)?;
        if from != to {
            self.adapted.applied[to] = self.adapted.applied[from].clone();
            self.images.shown[to] = self.images.shown[from].clone();
        }
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
                copy_places(&self.stream, states, &mut self.kept, from, to)?;
                if at < len {
                    self.stream.settle_states(states, from, to, len - at)?;
                }
                len
            }
            Some(states) if ends => {
                copy_places(&self.stream, states, &mut self.kept, from, to)?;
                // The sequences part here: others may, too.
                if let Some(place) = self.snapshots.take(from, len) {
                    copy_places(&self.stream, states, &mut self.kept, from, place)?;
                }
                len
            }
            Some(_) => self.resume(from, to, len),
        };
        self.snapshots.share(from, to, reached);
        self.tables.truncate(to, reached);
        self.images.shown[to].truncate(reached);
        if let Some(drafting) = &self.drafting {
            drafting.fork(from, to, reached)?;
        }
        Ok(reached)
    }

    fn adapt(&mut self, slot: usize, adapters: &[AppliedAdapter]) -> Result<()> {
        self.check_adapters(slot, adapters, self.adapters.len())?;
        self.adapted.applied[slot] = adapters.to_vec();
        Ok(())
    }

    fn show(&mut self, slot: usize, images: &[PlacedImage]) -> Result<()> {
        if self.kept.is_some() && !images.is_empty() {
            return Err(Error::Unsupported {
                engine: "nq on a GPU",
                what: "images before a residual of several streams",
                expected: "text".into(),
                found: format!("{} images", images.len()),
            });
        }
        let shown = SequenceImages::new(images, self.model.config.hidden_size)?;
        // Layers of other GPUs do not add rows of images.
        let (levels, layers) = (shown.levels(), self.model.layers.all.len());
        if levels > 1 + layers && self.model.part.is_none_or(GpuPart::begins) {
            return Err(Error::Request {
                what: "images of a sequence",
                expected: format!(
                    "rows for the first {layers} layers at most, which the first GPU has"
                ),
                found: format!("rows for the first {}", levels - 1),
            });
        }
        shown.show_in(&mut self.images.shown, slot)
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
        let fused = self.model.kernels == KernelSet::Fused;
        let steps = fused && observer.is_none() && self.is_idle();
        let ran = match chunks {
            [] => Ok(()),
            chunks if steps && self.fit_a_step(chunks) => self.forward_step(chunks),
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
                layer: self.model.layers.all.len() - 1,
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
        match self.model.has_steps() && takes_back {
            true => self.step.most_run(),
            false => 1,
        }
    }

    fn pages(&mut self) -> Option<&mut dyn Pages> {
        Some(self)
    }

    fn ahead(&mut self) -> Option<&mut dyn StepsAhead> {
        match self.model.has_steps() {
            true => Some(self),
            false => None,
        }
    }

    fn streams(&mut self) -> Option<&mut dyn Streams> {
        Some(self)
    }
}

impl Streams for CudaSession {
    fn drafter(&mut self, head: &StreamHead) -> Result<Box<dyn Drafter>> {
        let (model, spec) = (&self.model, &self.spec);
        if !model.has_steps() {
            return Err(Error::Unsupported {
                engine: "nq on a GPU",
                what: "drafts from residual streams",
                expected: "--kernels fused, and a residual of one stream".into(),
                found: format!("{} and {} streams", model.kernels, model.config.streams()),
            });
        }
        head.check("a GPU", spec.drafts)?;
        let Some(memory) = self.draft_memory.take() else {
            return Err(Error::Request {
                what: "drafters of a session",
                expected: "one".into(),
                found: "another one".into(),
            });
        };
        let (run, tapped) = StreamRun::new(head, model, &self.stream, spec, memory)?;
        let taps = |streams| Taps::new(head.taps.clone(), model.config.hidden_size, streams);
        let [of_steps, of_many] = tapped.map(taps);
        self.step.taps = Some(of_steps);
        // Wide steps leave sums in parts behind each layer.
        self.step.few_rows = MOST_SEQUENCES;
        self.many.taps = Some(of_many);
        self.drafting = Some(run.clone());
        // The recorded steps keep no streams.
        self.graphs = Graphs::default();
        Ok(Box::new(run))
    }
}
