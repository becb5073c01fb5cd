//! [`Session`] on the CPU.

use super::adapters::{AdapterScratch, CpuAdapters};
use super::cache::{LayerCache, page_bytes, state_bytes};
use super::eagle::EagleModel;
use super::kept::KeptRows;
use super::layer::{Batch, Pass, Scratch};
use super::model::CpuModel;
use super::mtp::{MtpDrafter, MtpModel};
use super::stream_drafts::{Forks, StreamDrafts, draft_page_bytes};
use super::stream_states::StreamInputs;
use crate::{Epilogue, FEW_ROWS, Span};
use nq_model::ModelConfig;
use nq_runtime::checks::{all_finite, check_bytes, check_chunks, check_finite, check_states};
use nq_runtime::images::SequenceImages;
use nq_runtime::interface::{
    AppliedAdapter, Chunk, DraftedBy, Drafter, Logits, Observer, Pages, PlacedImage, Session,
    SessionSpec, StreamHead, Streams, Tapped,
};
use nq_runtime::kv::{PageCopy, PageTables};
use nq_runtime::states::Snapshots;
use nq_runtime::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError};

/// Sequences in progress over a [`CpuModel`].
pub(super) struct CpuSession {
    model: Arc<CpuModel>,
    adapters: CpuAdapters,
    adapted: Vec<Vec<AppliedAdapter>>, // [slots]
    images: Vec<SequenceImages>,       // [slots]
    spec: SessionSpec,
    tables: PageTables,
    caches: Vec<LayerCache>, // [layers]
    snapshots: Snapshots,
    kept: KeptRows,
    /// By slot, the length of the snapshot that was taken to check drafts.
    checked: Vec<Option<usize>>,
    stateless: Vec<bool>, // [slots]: pages were appended, whose states are missing
    batch: Batch,
    scratch: Scratch,
    x: Vec<f32>, // [max_rows, hidden], the residual stream, or [max_rows, streams, hidden]
    head_in: Vec<f32>, // [rows wanted, hidden]
    logits: Vec<f32>, // [rows wanted, vocab]
    taps: Taps,
}

/// Residual streams that are kept for a drafter.
#[derive(Default)]
struct Taps {
    /// The numbers of layers after which they are kept.
    after: Vec<usize>,
    slots: Vec<Tapped>,
    drafter: Option<Arc<Mutex<dyn Forks>>>,
}

/// Most tokens of a sequence whose streams are kept while no drafter asks for them.
const MOST_TAPPED: usize = 8192;

impl Taps {
    /// Makes room for `rows` more rows of the sequence in `slot`, which has `len`.
    fn extend(&mut self, slot: usize, len: usize, rows: usize, hidden: usize) {
        let (width, kept) = (self.after.len() * hidden, &mut self.slots[slot]);
        let held = kept.rows.len() / width;
        if kept.position + held != len || held + rows > MOST_TAPPED {
            kept.rows.clear();
            kept.position = len;
        }
        kept.rows.resize(kept.rows.len() + rows * width, 0.0);
    }

    /// Keeps the streams `x` `[rows, hidden]` of the latest rows of the sequence in `slot` after `layers` layers.
    fn keep(&mut self, slot: usize, layers: usize, x: &[f32], hidden: usize) {
        let width = self.after.len() * hidden;
        let kept = &mut self.slots[slot].rows;
        let first = kept.len() - x.len() / hidden * width;
        for tap in (0..self.after.len()).filter(|&t| self.after[t] == layers) {
            let rows = kept[first..]
                .chunks_exact_mut(width)
                .zip(x.chunks_exact(hidden));
            rows.for_each(|(to, x)| to[tap * hidden..][..hidden].copy_from_slice(x));
        }
    }

    /// Forgets what is past the first `len` tokens of the sequence in `slot`.
    fn truncate(&mut self, slot: usize, len: usize, hidden: usize) {
        if let Some(kept) = self.slots.get_mut(slot) {
            let rows = len.saturating_sub(kept.position);
            kept.rows.truncate(rows * self.after.len() * hidden);
        }
    }
}

/// States of a session in each layer with a recurrence: those of its sequences and of snapshots.
fn places(spec: &SessionSpec) -> usize {
    spec.slots + spec.snapshot_count()
}

/// Bytes that [`CpuSession::new`] and a layer that drafts for it reserve: (keys and values, activations without the logits,
/// which depend on the request).
pub(crate) fn session_bytes(c: &ModelConfig, spec: &SessionSpec) -> (usize, usize) {
    let stream = size_of::<f32>() * spec.max_rows * c.stream_width();
    let page = page_bytes(c, spec.kv)
        + match spec.drafts {
            DraftedBy::Layer(layer) => draft_page_bytes(&layer),
            DraftedBy::Nothing | DraftedBy::Tokens => 0,
        };
    (
        spec.page_count() * page + places(spec) * state_bytes(c),
        Scratch::bytes(c, spec.max_rows) + stream,
    )
}

impl CpuSession {
    pub(super) fn new(model: Arc<CpuModel>, adapters: CpuAdapters, spec: SessionSpec) -> Self {
        let c = &model.config;
        let mut scratch = Scratch::new(c, spec.max_rows);
        scratch.adapters = AdapterScratch::new(&adapters.widths(), spec.max_rows);
        CpuSession {
            adapted: vec![adapters.applied.clone(); spec.slots],
            images: vec![SequenceImages::default(); spec.slots],
            adapters,
            tables: PageTables::new(&spec),
            caches: (c.layers())
                .map(|layer| LayerCache::new(c, layer, spec.kv, places(&spec), spec.page_count()))
                .collect(),
            snapshots: Snapshots::new(spec.slots, spec.snapshot_count(), spec.slots),
            kept: KeptRows::default(),
            checked: vec![None; spec.slots],
            stateless: vec![false; spec.slots],
            batch: Batch::with_capacity(c, spec.max_rows, spec.slots),
            scratch,
            x: vec![0.0; spec.max_rows * c.stream_width()],
            head_in: Vec::new(),
            logits: Vec::new(),
            taps: Taps::default(),
            model,
            spec,
        }
    }

    /// Runs the layers over the chunks: `x` becomes the residual stream after the last layer.
    /// With `locate`, checks every layer's output for NaN and infinity.
    fn run_layers(
        &mut self,
        chunks: &[Chunk<'_>],
        locate: bool,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let model = &*self.model;
        let x = &mut self.x[..self.batch.rows() * model.config.stream_width()];
        let tokens: Vec<u32> = chunks.iter().flat_map(|c| c.tokens).copied().collect();
        model.embed(tokens.iter(), x)?;
        let h = model.config.stream_width();
        // Shows the rows of images, level by level, to the rows of the stream in their places.
        let (batch, images) = (&self.batch, &self.images);
        let show = |x: &mut [f32], level: usize, each: fn((&mut f32, &f32))| {
            for (chunk, span) in chunks.iter().zip(batch.spans()) {
                let tokens = span.position..span.position + span.len;
                for (index, rows) in images[chunk.slot].rows(tokens, level) {
                    let x = &mut x[(span.row + index - span.position) * h..];
                    x.iter_mut().zip(rows).for_each(each);
                }
            }
        };
        show(x, 0, |(x, row)| *x = *row);
        for (index, layer) in model.layers.iter().enumerate() {
            let mut pass = Pass {
                cpu: &model.cpu,
                config: &model.config,
                batch: &self.batch,
                cache: &mut self.caches[index],
                tables: self.tables.all(),
                scratch: &mut self.scratch,
                x,
                inputs: Some(StreamInputs {
                    tokens: &tokens,
                    table: model.tables[index].as_ref(),
                    rotary: &model.rotary,
                }),
                qkv: None,
                observer,
                kept: Some(&mut self.kept),
            };
            layer.run(&mut pass)?;
            show(x, index + 1, |(x, row)| *x += row);
            if locate {
                check_finite(index, x)?;
            } else if self.taps.after.contains(&(index + 1)) {
                for (chunk, span) in chunks.iter().zip(self.batch.spans()) {
                    let x = &x[span.row * h..(span.row + span.len) * h];
                    self.taps.keep(chunk.slot, index + 1, x, h);
                }
            }
        }
        Ok(())
    }

    /// Makes room for the chunks and runs the layers over them. The sequences' lengths stay the old
    /// ones.
    fn run(&mut self, chunks: &[Chunk<'_>], observer: &mut dyn Observer) -> Result<()> {
        let vocab = self.model.config.vocab_size;
        check_chunks(chunks, &self.spec, vocab, |slot| self.tables.len(slot))?;
        check_states(chunks, &self.stateless)?;
        let growth = chunks.iter().map(|c| (c.slot, c.tokens.len()));
        for PageCopy { from, to, rows } in self.tables.reserve(growth)? {
            let pages = self.caches.iter_mut().filter_map(LayerCache::pages_of);
            pages.for_each(|layer| layer.copy_rows(from, to, rows));
        }
        self.keep_rows(chunks);
        self.batch.clear();
        for chunk in chunks {
            let position = self.tables.len(chunk.slot);
            let rows = chunk.tokens.len();
            if position == 0 {
                self.clear_states(chunk.slot);
            }
            if !self.taps.after.is_empty() {
                let hidden = self.model.config.hidden_size;
                self.taps.extend(chunk.slot, position, rows, hidden);
            }
            let images = &self.images[chunk.slot];
            let coordinates = |index| images.coordinates(index);
            let positions = position..position + rows;
            self.batch
                .push(&self.model.rotary, chunk.slot, positions, coordinates);
            for applied in &self.adapted[chunk.slot] {
                self.batch.adapt(&self.adapters, applied);
            }
            if let Some((before, place)) = self.snapshots.due(chunk.slot, position, rows, 1) {
                self.batch.mark(before, place);
            }
        }
        let result = self.run_located(chunks, observer);
        result.inspect_err(|_| self.lose(chunks))
    }

    /// Runs the layers, and finds the first that fails if the last one's output is not finite.
    fn run_located(&mut self, chunks: &[Chunk<'_>], observer: &mut dyn Observer) -> Result<()> {
        self.run_layers(chunks, false, observer)?;
        let rows = self.batch.rows() * self.model.config.stream_width();
        if !all_finite(&self.x[..rows]) {
            // Running again is safe (states that it has brought forward are lost anyway); the layer that
            // fails first is worth the time.
            self.run_layers(chunks, true, &mut ())?;
        }
        Ok(())
    }

    /// Has the rows of sequences kept whose drafts are checked, and takes snapshots in front of them.
    fn keep_rows(&mut self, chunks: &[Chunk<'_>]) {
        let checks = |c: &&Chunk<'_>| {
            let rows = c.tokens.len();
            (2..=FEW_ROWS).contains(&rows) && c.logits.rows(rows).len() > 1
        };
        let checked = match self.recurrent() {
            true => chunks.iter().filter(checks).collect(),
            false => Vec::new(),
        };
        for chunk in &checked {
            let (slot, position) = (chunk.slot, self.tables.len(chunk.slot));
            if let Some(before) = self.checked[slot].take() {
                self.snapshots.forget(slot, before);
            }
            if let Some(place) = self.snapshots.take(slot, position) {
                self.copy_states(slot, place);
                self.checked[slot] = Some(position);
            }
        }
        let tables = &self.tables;
        let rows = checked
            .iter()
            .map(|c| (c.slot, tables.len(c.slot), c.tokens));
        self.kept.begin(rows);
    }

    fn clear_states(&mut self, slot: usize) {
        self.caches.iter_mut().for_each(|cache| cache.clear(slot));
    }

    fn copy_states(&mut self, from: usize, to: usize) {
        self.caches
            .iter_mut()
            .for_each(|cache| cache.copy_state(from, to));
    }

    /// Gives the sequence in `to` the states that the one in `from` had at `len` tokens or, of those kept,
    /// shortly before. Returns that length.
    fn resume(&mut self, from: usize, to: usize, len: usize) -> usize {
        let end = self.tables.len(from);
        if let Some(span) = self.kept.of(from, len, end)
            && self.snapshots.reach(from, span.position) == span.position
        {
            match self.snapshots.nearest(from, span.position) {
                Some((place, _)) => self.copy_states(place, to),
                None => self.clear_states(to),
            }
            let model = &*self.model;
            self.kept.run_again(
                (&model.cpu, &model.config),
                (&model.layers, &mut self.caches),
                (to, span, len - span.position),
            );
            return len;
        }
        match self.snapshots.nearest(from, len) {
            None => 0,
            Some((place, len)) => {
                self.copy_states(place, to);
                len
            }
        }
    }

    /// Lets the drafter know of the sequence in `to` what it knows of the first `len` tokens of that in `from`.
    fn fork_streams(&mut self, from: usize, to: usize, len: usize) {
        let Some(drafter) = self.taps.drafter.clone() else {
            return;
        };
        let waiting = self.take(from);
        let mut drafter = drafter.lock().unwrap_or_else(PoisonError::into_inner);
        drafter.fork(from, to, len, waiting);
        self.taps.slots[to] = Tapped {
            position: len,
            rows: Vec::new(),
        };
    }

    /// True if the sequence can be cut at its end: if it has states there, or none at all.
    fn ends_whole(&self, slot: usize, len: usize) -> bool {
        !self.recurrent() || len >= self.tables.len(slot) && !self.stateless[slot]
    }

    /// True if a sequence has states that cannot be cut.
    fn recurrent(&self) -> bool {
        self.model.config.delta.is_some()
    }

    /// Called when a forward over the chunks fails after its layers have begun: what that did to states
    /// cannot be undone, so their sequences become empty.
    fn lose(&mut self, chunks: &[Chunk<'_>]) {
        if self.recurrent() {
            for chunk in chunks {
                self.tables.truncate(chunk.slot, 0);
                self.snapshots.cut(chunk.slot, 0);
            }
        }
    }

    fn advance(&mut self, chunks: &[Chunk<'_>]) {
        for chunk in chunks {
            self.tables.advance(chunk.slot, chunk.tokens.len());
        }
    }

    /// Final norm over the rows that the chunks want.
    fn run_norm(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        let model = &*self.model;
        let c = &model.config;
        let (h, width) = (c.hidden_size, c.stream_width());
        let rows_of = |chunk: &Chunk<'_>| chunk.logits.rows(chunk.tokens.len());
        let wanted: usize = chunks.iter().map(|c| rows_of(c).len()).sum();
        self.head_in.resize(wanted * h, 0.0);
        let mut at = 0;
        for (chunk, span) in chunks.iter().zip(self.batch.spans()) {
            let rows = rows_of(chunk);
            let x = &self.x[(span.row + rows.start) * width..(span.row + rows.end) * width];
            let normed = &mut self.head_in[at..at + rows.len() * h];
            if !x.is_empty() {
                model.ending.run((&model.cpu, c), x, normed)?;
            }
            at += normed.len();
        }
        Ok(())
    }

    /// The head over the rows of [`CpuSession::run_norm`].
    fn run_head(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let model = &*self.model;
        let c = &model.config;
        let wanted = self.head_in.len() / c.hidden_size;
        self.logits.resize(wanted * c.vocab_size, 0.0);
        if wanted == 0 {
            return Ok(());
        }
        observer.head_input(&self.head_in);
        let logits = &mut self.logits;
        model
            .cpu
            .linear(&model.head, &self.head_in, logits, Epilogue::Store)?;
        Ok(())
    }
}

impl Session for CpuSession {
    fn spec(&self) -> SessionSpec {
        self.spec
    }

    fn len(&self, slot: usize) -> usize {
        self.tables.len(slot)
    }

    fn truncate(&mut self, slot: usize, len: usize) -> usize {
        let mut len = len;
        if self.recurrent() && (len < self.tables.len(slot) || self.stateless[slot]) {
            len = self.resume(slot, slot, len);
            self.stateless[slot] = false;
        }
        self.snapshots.cut(slot, len);
        if len == 0 || len < self.tables.len(slot) {
            self.images[slot].truncate(len);
        }
        self.tables.truncate(slot, len);
        let hidden = self.model.config.hidden_size;
        self.taps.truncate(slot, len, hidden);
        self.tables.len(slot)
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize> {
        self.tables.fork(from, to, len)?;
        if from != to {
            self.adapted[to] = self.adapted[from].clone();
            self.images[to] = self.images[from].clone();
        }
        self.snapshots.cut(to, 0);
        self.stateless[to] = false;
        let reached = if !self.recurrent() {
            len
        } else if self.ends_whole(from, len) {
            self.copy_states(from, to);
            // The sequences part here: others may, too.
            if let Some(place) = self.snapshots.take(from, len) {
                self.copy_states(from, place);
            }
            len
        } else {
            self.resume(from, to, len)
        };
        self.snapshots.share(from, to, reached);
        self.tables.truncate(to, reached);
        self.images[to].truncate(reached);
        self.fork_streams(from, to, reached);
        Ok(reached)
    }

    fn adapt(&mut self, slot: usize, adapters: &[AppliedAdapter]) -> Result<()> {
        self.check_adapters(slot, adapters, self.adapters.packed.len())?;
        self.adapted[slot] = adapters.to_vec();
        Ok(())
    }

    fn show(&mut self, slot: usize, images: &[PlacedImage]) -> Result<()> {
        let shown = SequenceImages::new(images, self.model.config.hidden_size)?;
        shown.show_in(&mut self.images, slot)
    }

    fn reach(&self, slot: usize, len: usize) -> usize {
        let end = self.tables.len(slot);
        let kept = |span: &Span| self.snapshots.reach(slot, span.position) == span.position;
        match self.kept.of(slot, len, end).filter(kept) {
            _ if self.ends_whole(slot, len) => len.min(end),
            Some(_) => len,
            None => self.snapshots.reach(slot, len),
        }
    }

    fn keep_at(&mut self, slot: usize, len: usize) {
        if self.recurrent() {
            self.snapshots.want(slot, len);
        }
    }

    fn snapshots(&self) -> (usize, usize) {
        match self.recurrent() {
            true => self.snapshots.count(),
            false => (0, 0),
        }
    }

    fn pages(&mut self) -> Option<&mut dyn Pages> {
        Some(self)
    }

    fn streams(&mut self) -> Option<&mut dyn Streams> {
        Some(self)
    }

    fn exact_rows(&self) -> usize {
        self.spec.max_rows
    }

    fn draft_rows(&self) -> usize {
        // Rows that are not kept are taken out of states again from a snapshot in front of them.
        match self.recurrent() && self.spec.snapshot_count() == 0 {
            true => 1,
            false => FEW_ROWS.min(self.spec.max_rows),
        }
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        observer: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        let mut nobody = ();
        let observer = observer.unwrap_or(&mut nobody);
        self.run(chunks, observer)?;
        self.run_norm(chunks)?;
        self.run_head(observer)?;
        if !all_finite(&self.logits) {
            self.lose(chunks);
            return Err(Error::LogitsNotFinite);
        }
        self.advance(chunks);
        Ok(Logits {
            data: &self.logits,
            vocab: self.model.config.vocab_size,
        })
    }

    fn hidden(&mut self, chunks: &[Chunk<'_>], out: &mut Vec<f32>) -> Result<()> {
        self.run(chunks, &mut ())?;
        self.run_norm(chunks)?;
        if !all_finite(&self.head_in) {
            self.lose(chunks);
            return Err(Error::NotFinite {
                what: "the final norm behind the output",
                layer: self.model.layers.len() - 1,
            });
        }
        out.extend_from_slice(&self.head_in);
        self.advance(chunks);
        Ok(())
    }
}

impl Pages for CpuSession {
    fn free(&self) -> usize {
        self.tables.free_pages()
    }

    fn page_bytes(&self) -> usize {
        page_bytes(&self.model.config, self.spec.kv)
    }

    fn state_bytes(&self) -> Option<usize> {
        Some(state_bytes(&self.model.config))
    }

    fn read(&mut self, slot: usize, index: usize, out: &mut Vec<u8>) -> Result<()> {
        let page = self.tables.whole_page(slot, index)?;
        let layers = self.caches.iter().filter_map(LayerCache::pages);
        layers.for_each(|layer| layer.read_page(page, out));
        Ok(())
    }

    fn append(&mut self, slot: usize, page: &[u8]) -> Result<()> {
        let expected = self.page_bytes();
        check_bytes("a page of keys and values", page, expected)?;
        let at = self.tables.append_page(slot, self.spec.ctx)?;
        self.stateless[slot] = self.recurrent();
        let mut caches: Vec<_> =
            (self.caches.iter_mut().filter_map(LayerCache::pages_of)).collect();
        let layers = page.chunks_exact(expected / caches.len().max(1));
        for (layer, bytes) in caches.iter_mut().zip(layers) {
            layer.write_page(at, bytes);
        }
        Ok(())
    }

    fn read_state(&mut self, slot: usize, len: usize, out: &mut Vec<u8>) -> Result<()> {
        let place = match self.ends_whole(slot, len) {
            true => Some((slot, self.tables.len(slot))),
            false => self.snapshots.nearest(slot, len),
        };
        let Some((place, _)) = place.filter(|&(_, there)| there == len) else {
            return Err(Error::Request {
                what: "states of a sequence",
                expected: "a length at which they are kept".into(),
                found: format!("length {len} of slot {slot}"),
            });
        };
        let states = self.caches.iter().filter_map(|cache| cache.state(place));
        states.for_each(|state| out.extend_from_slice(bytemuck::cast_slice(state)));
        Ok(())
    }

    fn write_state(&mut self, slot: usize, state: &[u8]) -> Result<()> {
        let expected = state_bytes(&self.model.config);
        check_bytes("states of a sequence", state, expected)?;
        let caches = (self.caches.iter_mut()).filter_map(|cache| cache.state_mut(slot));
        let mut rest = state;
        for values in caches {
            let layer = bytemuck::cast_slice_mut::<f32, u8>(values);
            let (bytes, others) = rest.split_at(layer.len());
            layer.copy_from_slice(bytes);
            rest = others;
        }
        self.stateless[slot] = false;
        if self.recurrent()
            && let Some(place) = self.snapshots.take(slot, self.tables.len(slot))
        {
            self.copy_states(slot, place);
        }
        Ok(())
    }
}

impl Streams for CpuSession {
    fn drafter(&mut self, head: &StreamHead) -> Result<Box<dyn Drafter>> {
        head.check("the CPU", self.spec.drafts)?;
        let (drafter, forks): (Box<dyn Drafter>, _) = match head.weights::<MtpModel>() {
            Some(layer) => {
                let head = MtpDrafter::new(layer, Arc::clone(&self.model));
                let drafts = StreamDrafts::new(Arc::new(head), &self.spec);
                let forks = drafts.forks();
                (Box::new(drafts), forks)
            }
            None => {
                let Some(head) = head.weights::<EagleModel>() else {
                    unreachable!("a layer that drafts is an MTP layer or an EAGLE-3 head");
                };
                let drafts = StreamDrafts::new(head, &self.spec);
                let forks = drafts.forks();
                (Box::new(drafts), forks)
            }
        };
        self.taps = Taps {
            after: head.taps.clone(),
            slots: vec![Tapped::default(); self.spec.slots],
            drafter: Some(forks),
        };
        Ok(drafter)
    }

    fn take(&mut self, slot: usize) -> Option<Tapped> {
        let kept = self.taps.slots.get_mut(slot)?;
        let next = Tapped {
            position: self.tables.len(slot),
            rows: Vec::new(),
        };
        let taken = std::mem::replace(kept, next);
        (!taken.rows.is_empty()).then_some(taken)
    }
}
