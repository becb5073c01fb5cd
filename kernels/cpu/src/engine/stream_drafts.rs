//! Drafts from residual streams on the CPU: those of an EAGLE-3 head, or of a model's MTP layer.

use super::cache::LayerCache;
use super::layer::{Batch, Pass, Scratch};
use super::weights::CpuLayer;
use crate::{Cpu, KvPages};
use nq_kernels::pages::KvType;
use nq_model::ModelConfig;
use nq_runtime::interface::{Draft, DraftLayer, Drafter, SessionSpec, Tapped};
use nq_runtime::kv::{PageCopy, PageTables};
use nq_runtime::rope::Rotary;
use nq_runtime::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A layer that drafts from the residual streams of a model: a model of one layer, but for its input and for what it
/// drafts from. A row of it is a token with the streams of the token before it; of drafted tokens, with what the layer
/// itself made of the token before.
pub(crate) trait DraftHead: Send + Sync {
    fn cpu(&self) -> &Cpu;

    /// The shape of a model of this layer alone.
    fn config(&self) -> &ModelConfig;

    fn rotary(&self) -> &Rotary;

    /// The layer, which begins with attention.
    fn layer(&self) -> &CpuLayer;

    /// Values of a row's streams.
    fn width(&self) -> usize;

    /// The layer's input of `tokens`, each with the `streams` `[rows, width]` of the token before it.
    fn input(&self, tokens: &[u32], streams: &[f32]) -> Result<Input>;

    /// The layer's input of the drafted `token`; `made` is what the layer made of the token before it.
    fn drafted_input(&self, token: u32, made: Vec<f32>) -> Result<Input>;

    /// What the layer makes of a token: that of its output `x` `[hidden]` from which it drafts.
    ///
    /// # Errors
    /// Values that are not finite.
    fn made(&self, x: &[f32]) -> Result<Vec<f32>>;

    /// The likeliest token behind the one that `made` was made of.
    ///
    /// # Errors
    /// Errors of kernels; values that are not finite.
    fn draft(&self, made: &[f32]) -> Result<u32>;
}

/// Rows that a layer is run over.
pub(crate) struct Input {
    /// The residual stream `[rows, hidden]`.
    pub(crate) x: Vec<f32>,
    /// Queries, keys and values `[rows, q_dim + 2 kv_dim]` of a layer that makes them of more than the stream.
    pub(crate) qkv: Option<Vec<f32>>,
}

/// Rows computed together.
const ROWS: usize = 256;

/// Type of the keys and values of layers that draft.
pub(crate) const DRAFT_KV: KvType = KvType::F16;

/// Bytes of a page of a layer that drafts.
pub(crate) fn draft_page_bytes(layer: &DraftLayer) -> usize {
    KvPages::page_bytes(DRAFT_KV, layer.heads.1, layer.head_dim)
}

/// Drafts with a [`DraftHead`]; the session that it drafts for holds the other reference.
pub(crate) struct StreamDrafts<H>(Arc<Mutex<DraftState<H>>>);

/// What a session tells its drafter besides the streams of sequences.
pub(crate) trait Forks: Send {
    /// The sequence in `to` is now the first `len` tokens of that in `from`, whose streams that the drafter has not
    /// seen are `waiting`.
    fn fork(&mut self, from: usize, to: usize, len: usize, waiting: Option<Tapped>);
}

struct DraftState<H> {
    head: Arc<H>,
    cache: LayerCache,
    /// The pages of each slot, as long as its tokens that were fed.
    tables: PageTables,
    slots: Vec<Slot>,
    ctx: usize,
    /// Drafts so far.
    drafts: u64,
}

/// What the head knows of a sequence. Row `i` is the token at `first + i + 1` of the text with the residual streams of
/// the token before it.
#[derive(Default)]
struct Slot {
    /// Position of the first token whose streams are known.
    first: usize,
    /// Tokens of the rows that the cache holds.
    fed: Vec<u32>,
    /// Streams of the rows after those, `[rows, width]`.
    streams: Vec<f32>,
    /// What the head made of the last row that was fed.
    last: Vec<f32>,
    /// The row at which the sequence was forked, whose token may be another one now.
    parted: Option<usize>,
    /// When it was drafted for last.
    drafted: u64,
}

impl Slot {
    /// Number of rows whose streams were seen.
    fn seen(&self, width: usize) -> usize {
        self.fed.len() + self.streams.len() / width
    }

    /// Begins a sequence of its own with the streams that wait: the text has changed before them, and with it the
    /// token of a row whose streams are not kept.
    fn restart(&mut self) {
        self.first += self.fed.len();
        self.fed.clear();
        self.last.clear();
    }

    /// Forgets all rows.
    fn forget(&mut self, width: usize) {
        self.first += self.seen(width);
        self.fed.clear();
        self.streams.clear();
        self.last.clear();
    }

    /// Forgets all but the first `rows` rows.
    fn truncate(&mut self, rows: usize, width: usize) {
        let waiting = rows.saturating_sub(self.fed.len());
        self.streams.truncate(waiting * width);
        if rows < self.fed.len() {
            self.fed.truncate(rows);
            self.last.clear();
        }
    }
}

impl<H: DraftHead> StreamDrafts<H> {
    /// Drafts with `head` for a session of `spec`.
    pub(crate) fn new(head: Arc<H>, spec: &SessionSpec) -> Self {
        StreamDrafts(Arc::new(Mutex::new(DraftState::new(head, spec))))
    }

    fn state(&self) -> MutexGuard<'_, DraftState<H>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<H: DraftHead + 'static> StreamDrafts<H> {
    /// The drafter, for its session.
    pub(crate) fn forks(&self) -> Arc<Mutex<dyn Forks>> {
        Arc::clone(&self.0) as Arc<Mutex<dyn Forks>>
    }
}

impl<H: DraftHead> DraftState<H> {
    fn new(head: Arc<H>, spec: &SessionSpec) -> Self {
        let c = head.config();
        DraftState {
            cache: LayerCache::new(c, c.layer(0), DRAFT_KV, 0, spec.page_count()),
            tables: PageTables::new(spec),
            slots: (0..spec.slots).map(|_| Slot::default()).collect(),
            ctx: spec.ctx,
            drafts: 0,
            head,
        }
    }

    /// Makes room for `rows` more rows of the sequence in `slot`, if need be of sequences that were not drafted for the
    /// longest. False if there is none.
    fn reserve(&mut self, slot: usize, rows: usize) -> Result<bool> {
        let width = self.head.width();
        loop {
            match self.tables.reserve([(slot, rows)].into_iter()) {
                Ok(copies) => {
                    let pages = self.cache.pages_mut();
                    for PageCopy { from, to, rows } in copies {
                        pages.copy_rows(from, to, rows);
                    }
                    return Ok(true);
                }
                Err(Error::PagesFull { .. }) => {}
                Err(e) => return Err(e),
            }
            let others = self.slots.iter().enumerate();
            let with_pages = others.filter(|(other, s)| *other != slot && !s.fed.is_empty());
            let Some(idle) = with_pages.min_by_key(|(_, s)| s.drafted).map(|(i, _)| i) else {
                return Ok(false);
            };
            self.slots[idle].forget(width);
            self.tables.truncate(idle, 0);
        }
    }

    /// Feeds the rows of the draft's text that are new. False if nothing can be drafted: the streams of its last
    /// tokens are unknown, or the text has tokens that the model does not know, or there is no page. Makes room for `ahead` rows
    /// more.
    fn catch_up(&mut self, draft: &Draft<'_>, ahead: usize) -> Result<bool> {
        let (width, head) = (self.head.width(), &self.head);
        let Some(slot) = self.slots.get_mut(draft.slot) else {
            return Ok(false);
        };
        let text = draft.text;
        if text.len() > self.ctx {
            return Ok(false);
        }
        let rows = slot.fed.iter().zip(text.iter().skip(slot.first + 1));
        let compared = rows.len();
        let same = rows.take_while(|(fed, token)| fed == token).count();
        let parted = slot.parted.take().filter(|_| !slot.streams.is_empty());
        if same < compared && parted == Some(same) {
            // The text parted behind this row's streams, which are not kept: its keys and values stay those of the
            // other token. Only drafts depend on them.
            slot.fed[same] = text[slot.first + 1 + same];
        } else if same < compared {
            slot.restart();
        }
        let tokens = text.get(slot.first + 1..).unwrap_or_default();
        slot.truncate(tokens.len(), width);
        self.tables.truncate(draft.slot, slot.fed.len());
        if tokens.is_empty() || slot.seen(width) < tokens.len() {
            return Ok(false);
        }
        let new = &tokens[slot.fed.len()..];
        if new.iter().any(|&t| t as usize >= head.config().vocab_size) {
            return Ok(false);
        }
        self.drafts += 1;
        slot.drafted = self.drafts;
        let ahead = ahead.min(self.ctx.saturating_sub(slot.fed.len() + new.len()));
        if !self.reserve(draft.slot, new.len() + ahead)? {
            self.slots[draft.slot].forget(width);
            self.tables.truncate(draft.slot, 0);
            return Ok(false);
        }
        let slot = &mut self.slots[draft.slot];
        if !new.is_empty() {
            let parts = new.chunks(ROWS).zip(slot.streams.chunks(ROWS * width));
            for (i, (tokens, streams)) in parts.enumerate() {
                let input = self.head.input(tokens, streams)?;
                let tables = &self.tables.all()[draft.slot..][..1];
                slot.last = run(
                    &*self.head,
                    &mut self.cache,
                    tables,
                    slot.fed.len() + i * ROWS,
                    input,
                )?;
            }
            slot.fed.extend_from_slice(new);
            slot.streams.clear();
            self.tables.advance(draft.slot, new.len());
        }
        Ok(!slot.last.is_empty())
    }
}

/// Runs the layer of `head` over rows of the sequence whose page table is the only one of `tables`, from `position` on.
/// Returns what the layer makes of the last; of the others only keys and values are needed.
fn run(
    head: &impl DraftHead,
    cache: &mut LayerCache,
    tables: &[Vec<u32>],
    position: usize,
    mut input: Input,
) -> Result<Vec<f32>> {
    let (c, layer) = (head.config(), head.layer());
    let (norm, attention) = layer.attention();
    let rows = input.x.len() / c.hidden_size;
    let mut scratch = Scratch::new(c, rows);
    let (others, last) = input.x.split_at_mut((rows - 1) * c.hidden_size);
    let parts = [(0..rows - 1, others), (rows - 1..rows, &mut *last)];
    for (part, x) in parts.into_iter().filter(|(part, _)| !part.is_empty()) {
        let mut batch = Batch::with_capacity(c, part.len(), 1);
        // Drafts count tokens: where images stand changes what is guessed, and nothing else.
        let positions = position + part.start..position + part.end;
        batch.push(head.rotary(), 0, positions, |i| [i; 3]);
        let qkv = input.qkv.as_ref().map(|qkv| {
            let width = qkv.len() / rows;
            &qkv[part.start * width..part.end * width]
        });
        let mut pass = Pass {
            cpu: head.cpu(),
            config: c,
            batch: &batch,
            cache: &mut *cache,
            tables,
            scratch: &mut scratch,
            x,
            inputs: None,
            qkv,
            observer: &mut (),
            kept: None,
        };
        match part.end == rows {
            true => layer.run(&mut pass)?,
            false => pass.fill(norm, attention)?,
        }
    }
    head.made(last)
}

impl<H: DraftHead> DraftState<H> {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
        for draft in drafts {
            let ahead = draft.most.saturating_sub(1);
            if !self.catch_up(draft, ahead)? {
                continue;
            }
            let (head, slot) = (&self.head, &self.slots[draft.slot]);
            let (mut made, mut at) = (slot.last.clone(), slot.fed.len());
            let table = &self.tables.all()[draft.slot..][..1];
            let end = (at + ahead).min(self.ctx);
            while draft.tokens.len() < draft.most {
                let token = head.draft(&made)?;
                draft.tokens.push(token);
                if at == end {
                    break;
                }
                // The rows of drafted tokens are written over by those of the text.
                let input = head.drafted_input(token, made)?;
                made = run(&**head, &mut self.cache, table, at, input)?;
                at += 1;
            }
        }
        Ok(())
    }

    fn see(&mut self, slot: usize, tapped: Tapped) {
        let width = self.head.width();
        let index = slot;
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        let end = slot.first + slot.seen(width);
        if (slot.first..=end).contains(&tapped.position) {
            slot.truncate(tapped.position - slot.first, width);
        } else {
            // What is between is unknown: the head sees the text from here on.
            slot.truncate(0, width);
            slot.streams.clear();
            slot.first = tapped.position;
        }
        slot.streams.extend_from_slice(&tapped.rows);
        self.tables.truncate(index, slot.fed.len());
    }
}

impl<H: DraftHead> Forks for DraftState<H> {
    fn fork(&mut self, from: usize, to: usize, len: usize, waiting: Option<Tapped>) {
        if let Some(tapped) = waiting {
            self.see(from, tapped);
        }
        let width = self.head.width();
        let Ok([source, known]) = self.slots.get_disjoint_mut([from, to]) else {
            return;
        };
        let rows = source.seen(width).min(len.saturating_sub(source.first));
        let fed = rows.min(source.fed.len());
        known.first = source.first;
        known.fed = source.fed[..fed].to_vec();
        known.streams = source.streams[..(rows - fed) * width].to_vec();
        known.last.clear();
        known.parted = fed.checked_sub(1);
        if self.tables.fork(from, to, fed).is_err() {
            unreachable!("as many rows have pages as were fed, in slots that there are");
        }
    }
}

impl<H: DraftHead> Drafter for StreamDrafts<H> {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
        self.state().draft(drafts)
    }

    fn reads_streams(&self) -> bool {
        true
    }

    fn see(&mut self, slot: usize, tapped: Tapped) {
        self.state().see(slot, tapped);
    }
}
