//! A residual of several streams on the CPU: what blocks read of it and add to it, tables of n-grams that add to all of
//! it, and indexers, which choose the positions that rows attend to.

use super::cache::{KeptInput, StateParts};
use super::layer::{MarkSide, Pass};
use super::stream_states::{
    StreamInputs, StreamScratch, append_index_keys, append_ngrams, gathered_pages,
};
use crate::ops::streams::{activate, weigh};
use crate::{Cpu, Epilogue, KvSequence, Linear, Span};
use nq_formats::adapter::ProductKey;
use nq_kernels::pages::PAGE;
use nq_model::forward::{Hyper, Indexer, Ngrams, Packed, StreamVerbs};
use nq_model::{IndexerShape, ModelConfig, NgramTable};
use nq_runtime::{Error, Result};

/// What weighs the streams that a block, or the head, reads: `[rank, streams hidden]` and `[streams hidden, rank]`.
pub(super) struct Mix<'a> {
    pub(super) norm: &'a [f32],
    pub(super) down: &'a Linear,
    pub(super) up: &'a Linear,
}

/// Buffers of [`Mix::run`], for its rows.
pub(super) struct MixBuffers<'a> {
    pub(super) normed: &'a mut [f32], // [rows, streams, hidden]
    pub(super) low: &'a mut [f32],    // [rows, rank]
    pub(super) gates: &'a mut [f32],  // [rows, streams, hidden]
}

impl Mix<'_> {
    /// Computes of the streams `x` `[rows, streams, hidden]` what is read of them, `out` `[rows, hidden]`. `change` may add
    /// to what either matrix gives of what it reads.
    pub(super) fn run(
        &self,
        (cpu, c): (&Cpu, &ModelConfig),
        x: &[f32],
        buffers: MixBuffers<'_>,
        out: &mut [f32],
        mut change: impl FnMut(usize, &[f32], &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let (h, eps) = (c.hidden_size, c.rms_norm_eps);
        let MixBuffers { normed, low, gates } = buffers;
        cpu.stream_norm(x, self.norm, h, eps, normed);
        cpu.linear(self.down, normed, low, Epilogue::Store)?;
        change(0, normed, low)?;
        activate(low, c.streams());
        cpu.linear(self.up, low, gates, Epilogue::Store)?;
        change(1, low, gates)?;
        cpu.mix_streams(normed, gates, h, out);
        Ok(())
    }
}

impl StreamVerbs<Linear, Vec<f32>, Error> for Pass<'_> {
    fn contract(&mut self, layer: usize, norm: &Vec<f32>, hyper: &Hyper<Linear>) -> Result<()> {
        let (cpu, c, m) = (self.cpu, self.config, self.batch.rows());
        let adapted = self.batch.adapted();
        let scratch = &mut *self.scratch;
        let own = &mut scratch.streams;
        let (stream, h, streams) = (c.stream_width(), c.hidden_size, c.streams());
        let [normed, gates] = own.wide.each_mut().map(|wide| &mut wide[..m * stream]);
        let mix = Mix {
            norm,
            down: &hyper.down.linear,
            up: &hyper.up.linear,
        };
        let low = &mut own.low[..m * mix.down.out_features()];
        let buffers = MixBuffers {
            normed: &mut *normed,
            low,
            gates,
        };
        let out = &mut scratch.normed[..m * h];
        let adapters = &mut scratch.adapters;
        mix.run((cpu, c), self.x, buffers, out, |matrix, read, to| {
            let spec = [hyper.down.spec, hyper.up.spec][matrix];
            adapted.add(cpu, ProductKey::new(layer, spec), read, to, adapters)
        })?;
        let inject = &mut own.inject[..m * streams];
        cpu.linear(&hyper.inject.linear, normed, inject, Epilogue::Store)?;
        let key = ProductKey::new(layer, hyper.inject.spec);
        adapted.add(cpu, key, normed, inject, adapters)?;
        weigh(inject, streams);
        own.added[..m * h].fill(0.0);
        Ok(())
    }

    fn inject(&mut self) -> Result<()> {
        let (c, m) = (self.config, self.batch.rows());
        let own = &self.scratch.streams;
        let (added, weights) = (&own.added[..m * c.hidden_size], &own.inject);
        self.cpu.inject(added, weights, c.hidden_size, self.x);
        Ok(())
    }

    fn select(&mut self, layer: usize, indexer: &Indexer<Linear, Vec<f32>>) -> Result<()> {
        let mut own = std::mem::take(&mut self.scratch.streams);
        let normed = std::mem::take(&mut self.scratch.normed);
        let done = self.select_over(layer, indexer, &normed, &mut own);
        self.scratch.normed = normed;
        self.scratch.streams = own;
        done
    }

    fn recall(&mut self, layer: usize, ngrams: &Ngrams<Linear, Vec<f32>>) -> Result<()> {
        let mut own = std::mem::take(&mut self.scratch.streams);
        let done = self.recall_over(layer, ngrams, &mut own);
        self.scratch.streams = own;
        done
    }
}

impl Pass<'_> {
    /// Multiplies `from` by a matrix that is not quantized.
    fn multiply(
        &mut self,
        layer: usize,
        w: &Packed<Linear>,
        from: &[f32],
        to: &mut [f32],
    ) -> Result<()> {
        self.cpu.linear(&w.linear, from, to, Epilogue::Store)?;
        let key = ProductKey::new(layer, w.spec);
        let (adapted, adapters) = (self.batch.adapted(), &mut self.scratch.adapters);
        adapted.add(self.cpu, key, from, to, adapters)
    }

    /// [`StreamVerbs::recall`] over buffers that are not in the scratch meanwhile.
    fn recall_over(
        &mut self,
        layer: usize,
        ngrams: &Ngrams<Linear, Vec<f32>>,
        own: &mut StreamScratch,
    ) -> Result<()> {
        let (cpu, c, m) = (self.cpu, self.config, self.batch.rows());
        let (Some(inputs), Some(table)) = (self.inputs, &c.ngrams) else {
            unreachable!("passes of models with tables of n-grams have tokens");
        };
        let (stream, h, eps) = (c.stream_width(), c.hidden_size, c.rms_norm_eps);
        let parts = StateParts::of_layer(c, c.layer(layer));
        let found = &mut own.found[..m * table.width];
        self.look_up(inputs, table, &parts, found)?;
        let [keys, gated] = own.wide.each_mut().map(|wide| &mut wide[..m * stream]);
        self.multiply(layer, &ngrams.key, found, gated)?;
        cpu.stream_norm(gated, &ngrams.key_norm, h, eps, keys);
        let values = &mut own.values[..m * h];
        self.multiply(layer, &ngrams.value, found, values)?;
        let queries = &self.scratch.normed[..m * stream];
        cpu.gate_ngrams(keys, queries, values, h, gated);
        let normed = keys;
        cpu.stream_norm(gated, &ngrams.conv_norm, h, eps, normed);
        if let Some(kept) = &mut self.kept {
            kept.keep(
                layer,
                self.batch.slot_spans(),
                (KeptInput::Ngrams, normed),
                m,
            );
        }
        let before = table.conv_rows() * stream;
        for (slot, span) in self.batch.slot_spans() {
            let rows = span.row * stream..(span.row + span.len) * stream;
            let state = self.cache.part_mut(slot, &parts.ngrams);
            let window = [&state[..before], &normed[rows.clone()]].concat();
            let (gated, x) = (&gated[rows.clone()], &mut self.x[rows]);
            cpu.convolve_ngrams(&window, &ngrams.conv, table.longest, gated, (stream, x));
        }
        for part in [MarkSide::First, MarkSide::Rest] {
            for (&slot, span) in self.batch.slots().iter().zip(self.batch.part(part)) {
                let rows = &normed[span.row * stream..(span.row + span.len) * stream];
                let tokens = &inputs.tokens[span.row..span.row + span.len];
                let state = self.cache.part_mut(slot, &parts.ngrams);
                append_ngrams(table, state, rows, tokens);
            }
            self.copy_marked(part, &parts.ngrams);
        }
        Ok(())
    }

    /// Writes what the layer's table has for the rows to `found` `[rows, width]`.
    fn look_up(
        &self,
        inputs: StreamInputs<'_>,
        table: &NgramTable,
        parts: &StateParts,
        found: &mut [f32],
    ) -> Result<()> {
        let Some(rows) = inputs.table else {
            unreachable!("a layer with n-grams has a table");
        };
        for (slot, span) in self.batch.slot_spans() {
            let state = self
                .cache
                .state(slot)
                .map(|state| &state[parts.ngrams.clone()]);
            let ids = state.map_or(&[][..], |state| &state[state.len() - table.context()..]);
            let before: Vec<u32> = ids
                .iter()
                .filter_map(|&id| (id as u32).checked_sub(1))
                .collect();
            let tokens = &inputs.tokens[span.row..span.row + span.len];
            let out = &mut found[span.row * table.width..][..span.len * table.width];
            rows.look_up(&before, tokens, out)?;
        }
        Ok(())
    }

    /// [`StreamVerbs::select`] over buffers that are not in the scratch meanwhile.
    fn select_over(
        &mut self,
        layer: usize,
        indexer: &Indexer<Linear, Vec<f32>>,
        normed: &[f32],
        own: &mut StreamScratch,
    ) -> Result<()> {
        let (cpu, c, m) = (self.cpu, self.config, self.batch.rows());
        let Some(shape) = &c.indexer else {
            unreachable!("layers with an indexer have a shape for it");
        };
        let (d, width) = (shape.head_dim, (shape.heads + 1) * shape.head_dim);
        let index = &mut own.index[..m * width];
        self.multiply(layer, &indexer.qk, &normed[..m * c.hidden_size], index)?;
        let [q_norm, k_norm] = &indexer.norms;
        let (half, eps) = (c.rotary_dims() / 2, c.rms_norm_eps);
        let heads = (0, shape.heads, d);
        let (turns, rows) = self.batch.turns();
        cpu.turn_heads(
            index,
            width,
            heads,
            (Some(q_norm), eps),
            (turns, half),
            rows,
        );
        let keys = index.chunks_exact(width).flat_map(|row| &row[width - d..]);
        let keys: Vec<f32> = keys.copied().collect();
        self.append_keys(layer, shape, k_norm, &keys);
        let pages = self.cache.pages_mut();
        let Some(blocks) = &pages.blocks else {
            unreachable!("pages of layers with an indexer have keys of blocks");
        };
        own.chosen.clear();
        let mut scores = Vec::new();
        for (slot, span) in self.batch.slot_spans() {
            let table = &self.tables[slot];
            for r in 0..span.len {
                let whole = (span.position + r + 1) / shape.block;
                if whole <= shape.blocks() {
                    own.chosen.push(Vec::new());
                    continue;
                }
                let queries = &index[(span.row + r) * width..][..width - d];
                let key = |block: usize| {
                    let first = block * shape.block;
                    blocks.key(table[first / PAGE], first % PAGE)
                };
                scores.clear();
                scores.resize(whole, 0.0);
                cpu.index_scores(queries, d, key, &mut scores);
                own.chosen.push(best(&scores, shape.blocks()));
            }
        }
        Ok(())
    }

    /// Appends the rows' keys `[rows, head_dim]` of an indexer to their sequences, and makes the keys of the blocks that
    /// become whole.
    fn append_keys(&mut self, layer: usize, shape: &IndexerShape, norm: &[f32], keys: &[f32]) {
        let (cpu, c, d) = (self.cpu, self.config, shape.head_dim);
        let Some(inputs) = self.inputs else {
            unreachable!("passes of models with indexers have angles of positions");
        };
        if let Some(kept) = &mut self.kept {
            let rows = self.batch.rows();
            kept.keep(
                layer,
                self.batch.slot_spans(),
                (KeptInput::IndexKeys, keys),
                rows,
            );
        }
        let parts = StateParts::of_layer(c, c.layer(layer));
        let half = c.rotary_dims() / 2;
        let (mut mean, mut turns) = (vec![0.0; d], vec![(0.0, 0.0); half]);
        for part in [MarkSide::First, MarkSide::Rest] {
            for (&slot, span) in self.batch.slots().iter().zip(self.batch.part(part)) {
                for (r, key) in (span.row..span.row + span.len).zip(span.position..) {
                    let state = self.cache.part_mut(slot, &parts.index);
                    append_index_keys(shape, state, &keys[r * d..][..d], key);
                    if !(key + 1).is_multiple_of(shape.block) {
                        continue;
                    }
                    let first = key + 1 - shape.block;
                    mean.fill(0.0);
                    for key in state.chunks_exact(d) {
                        mean.iter_mut().zip(key).for_each(|(mean, v)| *mean += v);
                    }
                    mean.iter_mut().for_each(|v| *v /= shape.block as f32);
                    inputs.rotary.row_at([first; 3], &mut turns);
                    let gains = (Some(norm), c.rms_norm_eps);
                    cpu.turn_heads(&mut mean, d, (0, 1, d), gains, (&turns, half), &[0]);
                    let page = self.tables[slot][first / PAGE];
                    if let Some(blocks) = &mut self.cache.pages_mut().blocks {
                        blocks.store(page, first % PAGE, &mean);
                    }
                }
            }
            self.copy_marked(part, &parts.index);
        }
    }

    /// Lets the rows attend, whose queries are the columns from `first` on of the rows of the scratch.
    pub(super) fn attend_rows(&mut self, first: usize, stride: usize) {
        let (cpu, c, batch) = (self.cpu, self.config, self.batch);
        let (heads, d, m) = (c.num_attention_heads, c.head_dim, batch.rows());
        let (tables, kv) = (self.tables, &self.cache.pages_mut().kv);
        let scratch = &mut *self.scratch;
        let own = &mut scratch.streams;
        let q = &scratch.qkv[first..m * stride];
        let attended = &mut scratch.attended[..m * c.q_dim()];
        let Some((shape, gathered)) = c.indexer.zip(own.gathered.as_mut()) else {
            let sequence = |i: usize| KvSequence::new(kv, &tables[batch.slots()[i]]);
            cpu.attention_batch(q, stride, batch.spans(), heads, d, sequence, attended);
            return;
        };
        // The first rows of a span may attend to all positions, the others to some.
        let dense = |(slot, span): (usize, Span)| {
            let rows = &own.chosen[span.row..span.row + span.len];
            let len = rows.iter().take_while(|chosen| chosen.is_empty()).count();
            (len > 0).then_some((slot, Span { len, ..span }))
        };
        let (slots, spans): (Vec<usize>, Vec<Span>) = batch.slot_spans().filter_map(dense).unzip();
        let sequence = |i: usize| KvSequence::new(kv, &tables[slots[i]]);
        if !spans.is_empty() {
            cpu.attention_batch(q, stride, &spans, heads, d, sequence, attended);
        }
        let pages: Vec<u32> = (0..gathered_pages(c) as u32).collect();
        for (slot, span) in batch.slot_spans() {
            for r in span.row..span.row + span.len {
                let chosen = &own.chosen[r];
                if chosen.is_empty() {
                    continue;
                }
                let end = span.position + r - span.row + 1;
                let blocks = chosen.iter().flat_map(|&block| {
                    let first = block as usize * shape.block;
                    first..first + shape.block
                });
                let mut seen = 0;
                for position in blocks.chain(end - end % shape.block..end) {
                    let from = (tables[slot][position / PAGE], position % PAGE);
                    gathered.gather((pages[seen / PAGE], seen % PAGE), kv, from);
                    seen += 1;
                }
                let row = Span {
                    row: 0,
                    len: 1,
                    position: seen - 1,
                };
                let (q, y) = (
                    &q[r * stride..],
                    &mut attended[r * c.q_dim()..][..c.q_dim()],
                );
                let sequence = |_| KvSequence::new(gathered, &pages);
                cpu.attention_batch(q, stride, &[row], heads, d, sequence, y);
            }
        }
    }
}

/// The `count` places with the greatest scores, in order; of equal ones, the first. Equal ones are not rare: where the
/// products of a key with all heads are negative, the score is 0. In transformers it is up to torch which of these are
/// chosen.
fn best(scores: &[f32], count: usize) -> Vec<u32> {
    let mut places: Vec<u32> = (0..scores.len() as u32).collect();
    if count < places.len() {
        places.select_nth_unstable_by(count, |&a, &b| {
            let order = scores[b as usize].total_cmp(&scores[a as usize]);
            order.then(a.cmp(&b))
        });
        places.truncate(count);
    }
    places.sort_unstable();
    places
}

#[cfg(test)]
mod tests {
    use super::best;

    #[test]
    fn the_best_are_chosen_in_order_and_of_equal_ones_the_first() {
        assert_eq!(best(&[0.0, 3.0, 1.0, 3.0, 0.0], 3), [1, 2, 3]);
        assert_eq!(best(&[0.0, 3.0, 0.0, 3.0, 0.0], 3), [0, 1, 3]);
        assert_eq!(best(&[0.0; 4], 2), [0, 1]);
        assert_eq!(best(&[1.0, 2.0], 2), [0, 1]);
    }
}
