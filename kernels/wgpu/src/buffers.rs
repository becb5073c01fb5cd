//! The buffers of a session.

use crate::gpu::Gpu;
use crate::sizes::Sizes;
use nq_model::ModelConfig;
use nq_runtime::Result;
use nq_runtime::states::is_recurrent;
use wgpu::Buffer;

/// The buffers of a session.
pub(crate) struct Buffers {
    /// Sizes of the pass, and of what goes through the head.
    pub(crate) step: Buffer,
    pub(crate) head_step: Buffer,
    pub(crate) stream: Buffer,
    pub(crate) normed: Buffer,
    pub(crate) qkv: Buffer,
    pub(crate) attended: Buffer,
    pub(crate) gated: Buffer,
    pub(crate) gate_up: Buffer,
    pub(crate) rates: Buffer,
    pub(crate) mixed: Buffer,
    pub(crate) scores: Buffer,
    pub(crate) shared_scores: Buffer,
    pub(crate) routes: Buffer,
    pub(crate) groups: Buffer,
    pub(crate) experts_gated: Buffer,
    pub(crate) experts_out: Buffer,
    pub(crate) rounded: Buffer,
    pub(crate) rounded_scales: Buffer,
    /// Positions and page tables, tiles of attention, wanted rows, cosines and sines.
    pub(crate) batch: Buffer,
    pub(crate) parts: Buffer,
    /// `[head rows, hidden]`
    pub(crate) head_in: Buffer,
    /// `[head rows, vocab]`
    pub(crate) logits: Buffer,
    /// Rows of a pass at most.
    pub(crate) rows: usize,
    /// By layer.
    pub(crate) kept: Vec<Kept>,
    /// A page or a state on its way from one place to another.
    pub(crate) moved: Buffer,
    /// From which the host reads results.
    pub(crate) results: Buffer,
    /// `[rows of a step, DRAW_PARTS, 2]`: the best logits of parts of the vocabulary, and their tokens.
    pub(crate) best: Buffer,
    /// From which the host reads them.
    pub(crate) drawn: Buffer,
}

/// A buffer of parts of as many bytes: pages or states.
#[derive(Clone, Copy)]
pub(crate) struct CopyPlaces<'a> {
    pub(crate) buffer: &'a Buffer,
    pub(crate) bytes: usize,
}

/// What a layer keeps of sequences.
pub(crate) enum Kept {
    /// Keys and values of its attention, and scales of both, by page.
    Pages([Buffer; 3]),
    /// States of its recurrence, by place.
    States(Buffer),
}

impl Buffers {
    /// Allocates them.
    ///
    /// # Errors
    /// [`Error::Device`] if memory is short.
    pub(crate) fn new(gpu: &Gpu, sizes: &Sizes, c: &ModelConfig) -> Result<Self> {
        let make = |what, bytes| gpu.buffer(what, bytes);
        let kept = |layer| match is_recurrent(layer) {
            true => make("states", sizes.states).map(Kept::States),
            false => {
                let [keys, values, scales] = sizes.kept();
                Ok(Kept::Pages([
                    make("keys", keys)?,
                    make("values", values)?,
                    make("scales of keys and values", scales)?,
                ]))
            }
        };
        Ok(Buffers {
            rows: sizes.rows,
            step: gpu.uniform(&[0; 8])?,
            head_step: gpu.uniform(&[0; 8])?,
            stream: make("the residual stream", sizes.stream)?,
            normed: make("normalized rows", sizes.normed)?,
            qkv: make("queries, keys and values", sizes.qkv)?,
            attended: make("the output of attention", sizes.attended)?,
            gated: make("the gated rows", sizes.gated)?,
            gate_up: make("gates", sizes.gate_up)?,
            rates: make("rates of recurrences", sizes.rates)?,
            mixed: make("heads of recurrences", sizes.mixed)?,
            scores: make("scores of experts", sizes.scores)?,
            shared_scores: make("scores of the shared expert", sizes.shared_scores)?,
            routes: make("chosen experts", sizes.routes)?,
            groups: make("rows of experts", sizes.groups)?,
            experts_gated: make("gated rows of experts", sizes.experts_gated)?,
            experts_out: make("outputs of experts", sizes.experts_out)?,
            rounded: make("rounded inputs", sizes.rounded)?,
            rounded_scales: make("scales of rounded inputs", sizes.rounded_scales)?,
            batch: make("page tables", sizes.batch)?,
            parts: make("parts of attention", sizes.parts)?,
            head_in: make("inputs of the head", sizes.head_in)?,
            logits: make("logits", sizes.logits)?,
            kept: c.layers().map(kept).collect::<Result<_>>()?,
            moved: make("a page or a state", sizes.moved)?,
            results: gpu.staging(sizes.logits.max(sizes.head_in))?,
            best: make("drawn tokens", sizes.best)?,
            drawn: gpu.staging(sizes.best)?,
        })
    }

    /// Keys, values and their scales of all layers with attention, with the bytes of a page of each.
    pub(crate) fn pages(&self, sizes: &Sizes) -> Vec<CopyPlaces<'_>> {
        let all = self.kept.iter().map(|kept| match kept {
            Kept::Pages(pages) => &pages[..],
            Kept::States(_) => &[],
        });
        let places = |(buffer, bytes)| CopyPlaces { buffer, bytes };
        let all = all.flat_map(|pages| pages.iter().zip(sizes.page).map(places));
        all.filter(|places| places.bytes > 0).collect()
    }

    /// States of all layers with recurrences, with the bytes of one.
    pub(crate) fn states(&self, sizes: &Sizes) -> Vec<CopyPlaces<'_>> {
        let bytes = sizes.state;
        let all = self.kept.iter().filter_map(|kept| match kept {
            Kept::States(buffer) => Some(CopyPlaces { buffer, bytes }),
            Kept::Pages(_) => None,
        });
        all.collect()
    }
}
