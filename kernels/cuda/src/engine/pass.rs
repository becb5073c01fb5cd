//! The layers of a model, or a layer that drafts, over the rows of a step or of prompts: what the verbs of a layer are on
//! a GPU. [`Fused`] says which of them are one kernel.

mod added;
mod experts;
mod fused;
mod observed;
mod products;
mod streams;

use super::adapters::Adapted;
use super::held::CudaLayer;
use super::layer::CudaLayers;
use super::residency::Coming;
use super::session::buffers::{ExpertRows, RecurrentRows};
use super::session::rank_rows::{
    Handover, RankRows, added_to, gather_logits, hand_over, reduce, reduce_parts, reduce_written,
};
use super::session::taps::Taps;
use crate::{
    AttentionScratch, AttentionShape, Buffer, Cascade, CascadeShape, Checked, CopiedRows,
    DeltaRows, DeltaSpan, DeltaVectors, DeviceLinear, DevicePages, DeviceStates, GemmOutput, Heads,
    HostStage, LayerPages, LayerStates, Norm, Rates, Row, RowsOut, Step, StepOutput, Stream,
    Strided,
};
pub(super) use fused::{Fused, Sums, few_rows};
use nq_formats::adapter::ProductKey;
use nq_kernels::{Error, KernelSet, Result};
use nq_model::forward::{
    Delta, DeltaParameters, Experts, HeadVectors, Operand, Packed, Projection, Shared, StreamVerbs,
    Verbs,
};
use nq_model::{Dims, ModelConfig, OutputGate};
use nq_runtime::interface::Observer;
pub(super) use observed::fetch;
use products::{AddedInput, Head};
pub(super) use products::{Inputs, Product};
pub(super) use streams::StreamPass;

/// What all layers of a pass share.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) stream: &'a Stream,
    pub(super) config: &'a ModelConfig,
    pub(super) layers: &'a CudaLayers,
    pub(super) kernels: KernelSet,
    pub(super) pages: &'a DevicePages,
    /// For layers with recurrences.
    pub(super) states: Option<&'a DeviceStates>,
    pub(super) cos_sin: &'a Buffer<[f32; 2]>,
    /// For layers whose experts are on the CPU.
    pub(super) host: Option<&'a HostStage>,
}

impl<'a> Context<'a> {
    pub(super) fn norm<'b>(&self, gain: &'b Buffer<f32>) -> Norm<'b> {
        Norm {
            gain,
            eps: self.config.rms_norm_eps,
        }
    }

    /// The parameters of a layer's attention.
    pub(super) fn heads<'b>(&self, vectors: &'b HeadVectors<Buffer<f32>>) -> Heads<'b>
    where
        'a: 'b,
    {
        Heads {
            heads: self.config.num_attention_heads,
            gains: vectors.norms.as_ref().map(|norms| norms.each_ref()),
            biases: &vectors.biases,
            cos_sin: self.cos_sin,
            eps: self.config.rms_norm_eps,
        }
    }

    /// The keys and values of a layer with attention.
    pub(super) fn cache(&self, layer: usize) -> LayerPages<'a> {
        self.pages.layer(self.layers.place(layer))
    }

    /// The vectors of a layer's recurrence.
    pub(super) fn delta<'b>(&self, vectors: &'b DeltaParameters<Buffer<f32>>) -> DeltaVectors<'b> {
        DeltaVectors {
            conv: &vectors.conv,
            decay: &vectors.decay,
            dt_bias: &vectors.dt_bias,
            norm: &vectors.norm,
            gate: self.config.delta.map_or(OutputGate::Silu, |d| d.gate),
            eps: self.config.rms_norm_eps,
        }
    }

    /// The states of a layer with a recurrence.
    pub(super) fn recurrent(&self, layer: usize) -> LayerStates<'a> {
        let Some(states) = self.states else {
            unreachable!("sessions of models with recurrences have states");
        };
        states.layer(self.layers.place(layer))
    }
}

/// A pass over `m` rows.
pub(super) struct Pass<'a> {
    pub(super) on: Context<'a>,
    pub(super) m: usize,
    pub(super) fused: Fused,
    pub(super) rows: Rows<'a>,
    pub(super) inputs: Inputs<'a>,
    pub(super) sequences: Sequences<'a>,
    /// Of a residual of several streams: `rows.x` is then what a block adds to them.
    pub(super) streams: Option<StreamPass<'a>>,
    /// What this GPU exchanges with others, if it is one of several.
    pub(super) ranks: Option<&'a mut RankRows>,
    pub(super) observer: Option<&'a mut dyn Observer>,
    /// How the layer drafts, if it is one that drafts.
    pub(super) drafting: Option<Drafting<'a>>,
    /// What is added to the products of rows that have adapters.
    pub(super) adapted: Option<Adapted<'a>>,
    pub(super) state: PassState,
}

/// The rows of a pass.
pub(super) struct Rows<'a> {
    pub(super) x: &'a mut Buffer<f32>, // [rows, hidden], the residual stream
    pub(super) qkv: &'a mut Buffer<f32>, // [rows, widest products of a mixer]
    /// `[rows, 2 value heads]`, of models with recurrences, unless these compute them.
    pub(super) rates: Option<&'a mut Buffer<f32>>,
    /// Buffers of experts, if the model is a mixture.
    pub(super) experts: Option<&'a mut ExpertRows>,
    /// Where the streams go that a drafter reads.
    pub(super) taps: Option<&'a mut Taps>,
}

/// Where the rows of a pass stand, and what attention and recurrences need for them.
pub(super) enum Sequences<'a> {
    /// In the steps of several sequences, or of some that follow one another.
    Step {
        step: &'a mut Checked<Step>,
        scratch: &'a mut AttentionScratch,
        /// Pages that rows share are read once.
        shared: Option<(&'a Cascade, CascadeShape)>,
        /// Most parts that attention cuts contexts into.
        splits: usize,
        /// Several rows may belong to one sequence.
        runs: bool,
    },
    /// In prompts, whose spans attend to what is before them: rows of none only become keys and values.
    Prompts {
        rows: &'a Checked<Row>,
        spans: &'a [DeltaSpan],
        recurrent: Option<&'a mut RecurrentRows>,
    },
}

/// How a layer that drafts runs, whose tokens are drawn between passes: no kernel of it overtakes the one before its
/// predecessor, on whose tokens early reads of attention depend.
pub(super) struct Drafting<'a> {
    /// True if queries, keys and values are part of the pass's input.
    pub(super) has_qkv: bool,
    /// Where the last of several rows goes on, alone, behind attention.
    pub(super) last: Option<LastRow<'a>>,
}

/// The last of several rows, from which tokens are drafted.
pub(super) struct LastRow<'a> {
    pub(super) x: &'a mut Buffer<f32>,        // [hidden]
    pub(super) attended: &'a mut Buffer<f32>, // [q_dim]
    pub(super) step: Step,
}

/// How far a pass is.
#[derive(Default)]
pub(super) struct PassState {
    /// True while the sums of the last product are in parts, and not in the residual stream.
    pending: bool,
    /// True between a mixture's experts and its shared one, which adds to the same share of a rank.
    sharing: bool,
    /// Experts in a bank that a later layer will need.
    coming: Option<Coming>,
}

/// The rates of a model with recurrences.
fn rates_of<'a>(rates: &'a mut Option<&mut Buffer<f32>>) -> &'a mut Buffer<f32> {
    match rates {
        Some(rates) => rates,
        None => unreachable!(
            "passes over recurrences that do not compute their rates have rows for them"
        ),
    }
}

/// The rows that products multiply, and their norm: what a block has read of several streams is multiplied as it is.
fn read_rows<'b>(
    streams: &'b Option<StreamPass<'_>>,
    x: &'b Buffer<f32>,
    norm: Norm<'b>,
) -> (&'b Buffer<f32>, Option<Norm<'b>>) {
    match streams {
        Some(streams) => (&streams.rows.block, None),
        None => (x, Some(norm)),
    }
}

/// The rows of a mixture's experts.
fn experts_of<'a>(experts: &'a mut Option<&mut ExpertRows>) -> &'a mut ExpertRows {
    match experts {
        Some(rows) => rows,
        None => unreachable!("passes over mixtures have rows for them"),
    }
}

impl<'a> Pass<'a> {
    /// Rows of the residual stream, and their width.
    fn size(&self) -> Dims {
        Dims::new(self.m, self.on.config.hidden_size)
    }

    /// Gives the residual stream to other ranks, or takes it from them.
    pub(super) fn hand_over(&mut self, what: Handover) -> Result<()> {
        let (size, ranks) = (self.size(), self.ranks.as_deref());
        hand_over(self.on.stream, self.rows.x, ranks, size, what)
    }

    /// Adds the shares of all ranks to the residual stream.
    fn reduce(&mut self) -> Result<()> {
        let size = self.size();
        reduce(self.on.stream, self.rows.x, &mut self.ranks, size)
    }

    /// Adds what is pending to the residual stream of a stage, whose layers end here: `gain` are those of any norm.
    pub(super) fn end(&mut self, gain: &Buffer<f32>) -> Result<()> {
        let hands_on = self.ranks.as_ref().is_some_and(|r| r.is_stage());
        match self.state.pending && hands_on {
            true => self.norm(gain),
            false => Ok(()),
        }
    }

    /// The final norm, and the logits of a step with the best of each block.
    pub(super) fn head(
        &mut self,
        gain: &Buffer<f32>,
        w: &DeviceLinear,
        logits: &mut Buffer<f32>,
        best: &mut Buffer<[f32; 2]>,
    ) -> Result<()> {
        if self.streams.is_none() {
            self.norm(gain)?;
        }
        let on = self.on;
        let product = Product {
            stream: on.stream,
            kernels: on.kernels,
            name: "head",
            w,
            m: self.m,
            holds_dependents: false,
        };
        let to = match self.ranks.as_mut().and_then(|r| r.head_logits()) {
            Some(part) => Head::Part(part),
            None => Head::Whole(logits, best),
        };
        let (x, norm) = read_rows(&self.streams, self.rows.x, on.norm(gain));
        (self.inputs).head(product, x, norm, to)?;
        let size = Dims::new(self.m, on.config.vocab_size);
        gather_logits(on.stream, self.ranks.as_deref(), logits, Some(best), size)
    }

    /// Appends keys and values of rows that go no further through a layer that drafts.
    pub(super) fn fill(&mut self, layer: &CudaLayer) -> Result<()> {
        let (norm, attention) = layer.attention();
        if !self.drafting.as_ref().is_some_and(|d| d.has_qkv) {
            self.norm(norm)?;
        }
        self.project(layer.index, norm, &attention.qkv, Projection::Mixer)?;
        self.attend(layer.index, &attention.heads, &attention.o)
    }
}

impl<'a> Pass<'a> {
    /// A product, whose kernel keeps the next one from starting early if `holds_dependents`, or in a layer that drafts.
    fn product<'b>(&self, w: &'b Packed<DeviceLinear>, holds_dependents: bool) -> Product<'b>
    where
        'a: 'b,
    {
        Product {
            stream: self.on.stream,
            kernels: self.on.kernels,
            name: w.spec.name,
            w: &w.linear,
            m: self.m,
            holds_dependents: holds_dependents || self.drafting.is_some(),
        }
    }

    /// Goes on with the last of several rows alone, where a layer drafts from it.
    fn keep_last(&mut self) -> Result<()> {
        let Some(last) = self.drafting.as_mut().and_then(|d| d.last.take()) else {
            return Ok(());
        };
        let (Inputs::Full { attended, .. }, Sequences::Step { step, .. }) =
            (&mut self.inputs, &mut self.sequences)
        else {
            unreachable!("layers draft from steps of few rows");
        };
        let Context { stream, config, .. } = self.on;
        let copy = |from: &Buffer<f32>, to: &mut Buffer<f32>, width: usize| {
            let at = |row: usize| Strided {
                at: row * width,
                stride: width,
            };
            stream.copy_rows(CopiedRows {
                from,
                begin: at(self.m - 1),
                to,
                end: at(0),
                rows: 1,
                width,
            })
        };
        copy(attended, last.attended, config.q_dim())?;
        copy(self.rows.x, last.x, config.hidden_size)?;
        // Tokens are drawn from here on: their step follows the last row.
        stream.put_checked(step, 0, &[last.step])?;
        *attended = last.attended;
        self.rows.x = last.x;
        self.m = 1;
        Ok(())
    }
}

impl Verbs for Pass<'_> {
    type Linear = DeviceLinear;
    type Vector = Buffer<f32>;
    type Error = Error;

    /// Normalizes the residual stream, to which it adds pending sums first.
    fn norm(&mut self, gain: &Buffer<f32>) -> Result<()> {
        if self.streams.is_some() {
            return self.norm_streams(gain);
        }
        let Inputs::Half { halves, full, sums } = &mut self.inputs else {
            return Ok(());
        };
        let (on, m, x) = (self.on, self.m, &mut *self.rows.x);
        let normed = &mut halves.normed;
        let pending = std::mem::take(&mut self.state.pending);
        let key = ("norm", "fused", Dims::new(m, on.config.hidden_size));
        on.stream.timed(key, 0, || match sums {
            Some(sums) => {
                // No kernel may overtake the previous step's sampler, on which early reads of the attention
                // kernel depend: the first kernel of a step ensures that.
                let holds_dependents = !pending;
                let sums = pending.then_some(&**sums);
                on.stream
                    .norm_step(x, sums, on.norm(gain), normed, m, holds_dependents)
            }
            None => {
                let out = RowsOut {
                    full: full.as_mut().map(|f| &mut f.normed),
                    half: Some(normed),
                };
                on.stream
                    .rms_norm(x, None, gain, &out, m, on.config.rms_norm_eps)
            }
        })
    }

    fn streams(&mut self) -> Result<&mut dyn StreamVerbs<DeviceLinear, Buffer<f32>, Error>> {
        match self.streams {
            Some(_) => Ok(self),
            None => Err(Error::Shape {
                op: "a layer on a GPU",
                what: "the residual",
                expected: "a residual of one stream".into(),
                found: "several streams".into(),
            }),
        }
    }

    fn project(
        &mut self,
        layer: usize,
        norm: &Buffer<f32>,
        w: &Packed<DeviceLinear>,
        to: Projection,
    ) -> Result<()> {
        let has_qkv = self.drafting.as_ref().is_some_and(|d| d.has_qkv);
        match to {
            Projection::Mixer if has_qkv => return Ok(()),
            Projection::Rates if self.fused.rates => return Ok(()),
            Projection::Mixer | Projection::Gated => self.show(layer, w.spec, |f| &f.normed)?,
            Projection::Rates | Projection::Scores | Projection::SharedScore => {}
        }
        // No kernel may overtake the previous step's sampler, on which early reads of the attention
        // kernel depend: the first product of a step ensures that.
        let holds_dependents = layer == 0 && to == Projection::Mixer;
        let (on, key) = (self.on, ProductKey::new(layer, w.spec));
        let product = self.product(w, holds_dependents);
        let Rows {
            x,
            qkv,
            rates,
            experts,
            ..
        } = &mut self.rows;
        let (x, norm) = read_rows(&self.streams, x, on.norm(norm));
        let added = AddedInput::Normed(x, norm);
        let y = match to {
            Projection::Gated => match self.adapted.as_mut().filter(|a| a.changes(key)) {
                None => return self.inputs.gate(product, x, norm),
                // Adapters add to gate and up before these are multiplied.
                Some(adapted) => {
                    let mut gate_up = adapted.rows.gate_up.share();
                    self.inputs.store(product, x, norm, &mut gate_up)?;
                    adapted.add(&on, product.m, key, &mut self.inputs, added, &mut gate_up)?;
                    return self.inputs.gate_products(product, &gate_up);
                }
            },
            Projection::Mixer => &mut **qkv,
            Projection::Rates => rates_of(rates),
            Projection::Scores => &mut experts_of(experts).scores,
            Projection::SharedScore => &mut experts_of(experts).shared,
        };
        self.inputs.store(product, x, norm, y)?;
        match &mut self.adapted {
            Some(adapted) => adapted.add(&on, product.m, key, &mut self.inputs, added, y),
            None => Ok(()),
        }
    }

    fn attend(
        &mut self,
        layer: usize,
        vectors: &HeadVectors<Buffer<f32>>,
        o: &Packed<DeviceLinear>,
    ) -> Result<()> {
        let (on, m, qkv) = (self.on, self.m, &mut *self.rows.qkv);
        let (stream, heads, cache) = (on.stream, on.heads(vectors), on.cache(layer));
        let size = Dims::new(heads.heads, on.config.head_dim);
        // Only the device knows how many keys and values are read.
        let key = ("attention", "fused", size);
        if let Some(StreamPass { rows, at, .. }) = &self.streams
            && rows.index.is_some()
        {
            stream.timed(("append", "fused", size), 0, || {
                stream.append(qkv, at, &heads, cache, m)
            })?;
            return stream.timed(key, 0, || self.attend_to_chosen(&heads, cache));
        }
        match &mut self.sequences {
            Sequences::Step {
                step,
                scratch,
                shared,
                splits,
                runs,
            } => {
                let (drafts, keeps) = match &self.drafting {
                    Some(drafting) => (true, drafting.last.is_some()),
                    None => (false, false),
                };
                let (out, holds_dependents) =
                    self.inputs.attended(&o.linear, if keeps { 1 } else { m });
                let shape = AttentionShape {
                    m,
                    splits: *splits,
                    holds_dependents: holds_dependents || drafts,
                    runs: *runs && m > 1,
                    shared: *shared,
                };
                stream.timed(key, 0, || {
                    stream.attention_decode(qkv, step, &heads, cache, scratch, out, shape)
                })?;
                self.keep_last()
            }
            Sequences::Prompts { rows, spans, .. } => {
                stream.timed(("append", "fused", size), 0, || {
                    stream.append(qkv, rows, &heads, cache, m)
                })?;
                let heads = heads.heads;
                match &mut self.inputs {
                    Inputs::Half {
                        full: Some(full), ..
                    } if on.kernels == KernelSet::Reference => {
                        let out = &mut full.attended;
                        stream.attention_reference(qkv, rows, heads, cache, out, m)
                    }
                    Inputs::Half { halves, .. } => stream.timed(key, 0, || {
                        spans.iter().try_for_each(|s| {
                            let out = &mut halves.attended;
                            stream.attention_prefill(qkv, s.rows, heads, cache, out)
                        })
                    }),
                    Inputs::Full { .. } => unreachable!("rows of prompts are in FP16"),
                }
            }
        }
    }

    fn recur(
        &mut self,
        layer: usize,
        norm: &Buffer<f32>,
        delta: &Delta<DeviceLinear, Buffer<f32>>,
    ) -> Result<()> {
        let (on, m, qkv) = (self.on, self.m, &*self.rows.qkv);
        let (stream, states) = (on.stream, on.recurrent(layer));
        let vectors = on.delta(&delta.vectors);
        let key = ("recurrence", "fused", Dims::new(m, on.config.hidden_size));
        match &mut self.sequences {
            Sequences::Step { step, .. } => {
                let rates = match self.fused.rates {
                    true => Rates::Of(self.rows.x, on.norm(norm), on.layers.rates(layer)),
                    false => Rates::Products(rates_of(&mut self.rows.rates)),
                };
                let (out, holds_dependents) = self.inputs.attended(&delta.out.linear, m);
                let idle = on.pages.idle_slot();
                stream.timed(key, m * states.bytes_per_row(), || {
                    stream.delta_step(
                        qkv,
                        rates,
                        step,
                        &vectors,
                        states,
                        out,
                        m,
                        idle,
                        holds_dependents,
                    )
                })
            }
            Sequences::Prompts {
                rows,
                spans,
                recurrent,
            } => {
                let (Some(recurrent), Inputs::Half { halves, full, .. }) =
                    (recurrent, &mut self.inputs)
                else {
                    unreachable!("rows of prompts are in FP16, with memory for recurrences");
                };
                let out = RowsOut {
                    full: full.as_mut().map(|f| &mut f.attended),
                    half: Some(&mut halves.attended),
                };
                let inputs = DeltaRows {
                    qkvz: qkv,
                    ba: rates_of(&mut self.rows.rates),
                    rows,
                    mixed: &mut recurrent.mixed,
                    chunks: &mut recurrent.chunks,
                    scanned: &mut recurrent.scanned,
                };
                stream.timed(key, 0, || {
                    stream.delta_rows(inputs, spans, &vectors, states, &out, m)
                })
            }
        }
    }

    fn mix(
        &mut self,
        layer: usize,
        norm: &Buffer<f32>,
        experts: &Experts<DeviceLinear>,
    ) -> Result<()> {
        self.add_experts(layer, norm, experts)?;
        // The shared expert adds to the same share, unless its sums go elsewhere.
        self.state.sharing = experts.shared.is_some() && self.fused.sums != Sums::Parts;
        match self.state.sharing {
            true => Ok(()),
            false => self.reduce(),
        }
    }

    fn weigh(&mut self, shared: &Shared<DeviceLinear>) -> Result<()> {
        let size = Dims::new(self.m, shared.mlp.down.linear.inputs());
        let scores = &experts_of(&mut self.rows.experts).shared;
        (self.on.stream).scale_rows(scores, &self.inputs.gated(), size)
    }

    fn add(&mut self, layer: usize, operand: Operand, w: &Packed<DeviceLinear>) -> Result<()> {
        match operand {
            Operand::Attended => self.show_attended(layer, w.spec)?,
            Operand::Gated => self.show(layer, w.spec, |f| &f.gated)?,
        }
        let (product, size) = (self.product(w, false), self.size());
        let (on, key) = (self.on, ProductKey::new(layer, w.spec));
        let sharing = std::mem::take(&mut self.state.sharing);
        let (stream, x) = (self.on.stream, &mut *self.rows.x);
        if self.fused.sums == Sums::Written
            && !sharing
            && let Inputs::Half { halves, .. } = &self.inputs
            && let Some(ranks) = self.ranks.as_deref_mut()
            && let Some(written) = ranks.written()
        {
            // Nothing is to be added to, nor to be set to zero.
            product.many(None, halves.operand(operand), GemmOutput::Store(written))?;
            return reduce_written(stream, x, ranks, size);
        }
        if let Inputs::Half {
            halves,
            sums: Some(sums),
            ..
        } = &mut self.inputs
        {
            product.step(halves.operand(operand), StepOutput::Parts(sums))?;
            self.state.pending = !reduce_parts(stream, x, sums, &self.ranks, size)?;
        } else {
            (self.inputs).add(product, operand, added_to(x, &mut self.ranks))?;
            self.reduce()?;
        }
        match &mut self.adapted {
            Some(adapted) => {
                let from = AddedInput::Operand(operand);
                adapted.add(&on, product.m, key, &mut self.inputs, from, self.rows.x)
            }
            None => Ok(()),
        }
    }

    fn end_layer(&mut self, layer: usize) -> Result<()> {
        let x = &*self.rows.x;
        if let Some(taps) = &mut self.rows.taps {
            taps.keep(self.on.stream, layer, x, self.m)?;
        }
        self.show_output(layer)
    }
}
