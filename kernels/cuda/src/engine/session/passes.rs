//! The layers of a step: each verb is one or two kernels, which the stream queues or records, or part of another's:
//!
//! | pass | rows | a norm is | rates of a recurrence are | an added product |
//! |---|---|---|---|---|
//! | [`NarrowPass`] | 1 to 16 of a step | part of each projection | part of the recurrence | adds itself |
//! | [`WidePass`] | 17 to 64 of a step | a kernel, which adds pending sums first | a product | leaves its sums in parts |
//! | `PrefillPass` of `rows` | of prompts | a kernel | a product | adds itself |
//!
//! One row may take all layers as one kernel ([`Device::queue`]).

use super::buffers::{ExpertRows, expert_rows};
use super::experts::add_experts;
use super::graphs::StepKind;
use super::product;
use super::rank_rows::{
    Handover, RankRows, added_to, gather_logits, hand_over, reduce, reduce_parts,
};
use super::step_rows::{StepRows, WideRows};
use crate::engine::layer::CudaLayer;
use crate::engine::model::CudaModel;
use crate::{
    AttentionOutput, AttentionScratch, AttentionShape, BlockLimit, Buffer, Cascade, Checked,
    Columns, DeviceLinear, DevicePages, DeviceStates, GemvOutput, HostStage, LayerStates,
    LayersPlan, MOST_SEQUENCES, Norm, Rates, RowsOut, Step, StepLayer, StepMixer, StepOutput,
    Stream,
};
use nq_kernels::{Error, Result};
use nq_model::forward::{
    Block, Delta, DeltaParameters, Experts, HeadVectors, Mix, Operand, Packed, Projection, Shared,
    Verbs,
};
use nq_runtime::interface::Split;

/// Bytes of the weights behind attention from which on prefetching them slows down the reads of
/// attention, as measured on an H200 (1.1 MB do not, 5.5 and 8.9 MB do).
const FLOOD: usize = 4 << 20;

/// The resources that all layers of a step share.
#[derive(Clone, Copy)]
pub(super) struct Device<'a> {
    pub(super) stream: &'a Stream,
    pub(super) model: &'a CudaModel,
    pub(super) host: Option<&'a HostStage>,
    pub(super) pages: &'a DevicePages,
    pub(super) states: Option<&'a DeviceStates>,
    pub(super) cos_sin: &'a Buffer<[f32; 2]>,
    pub(super) kind: StepKind,
}

impl Device<'_> {
    /// Queues a step's layers and head.
    pub(super) fn queue(self, step: &mut StepRows, ranks: Option<&mut RankRows>) -> Result<()> {
        let layers = &self.model.layers;
        if self.kind.m <= MOST_SEQUENCES {
            let mut pass = NarrowPass {
                device: self,
                step,
                ranks,
            };
            pass.hand_over(Handover::Begin)?;
            let at_once = self.queue_at_once(pass.step, pass.ranks.as_deref())?;
            if !at_once {
                layers.iter().try_for_each(|l| l.run(&mut pass))?;
            }
            pass.hand_over(Handover::End)?;
            pass.hand_over(Handover::Last)?;
            pass.head()
        } else {
            let mut pass = WidePass::new(self, step, ranks)?;
            pass.hand_over(Handover::Begin)?;
            layers.iter().try_for_each(|l| l.run(&mut pass))?;
            pass.end()?;
            pass.hand_over(Handover::End)?;
            pass.hand_over(Handover::Last)?;
            pass.head()
        }
    }

    /// Queues all layers of a step of one row as one kernel, if that is the fastest way; true if it did.
    fn queue_at_once(self, step: &mut StepRows, ranks: Option<&RankRows>) -> Result<bool> {
        let most = ranks.map_or(usize::MAX, RankRows::blocks);
        if !self.kind.at_once || most == 0 {
            return Ok(false);
        }
        let Some((plan, layers)) = self.plan_at_once(most)? else {
            return Ok(false);
        };
        let scratch = &mut step.layers;
        self.stream
            .step_layers(&plan, &layers, &mut step.x, &step.step, scratch)?;
        Ok(true)
    }

    /// The plan of all layers of a step of one row as one kernel of at most so many blocks, and its layers; `None` if
    /// that is not the fastest way.
    pub(super) fn plan_at_once(
        &self,
        most: usize,
    ) -> Result<Option<(LayersPlan, Vec<StepLayer<'_>>)>> {
        let (model, layers) = (self.model, self.model.layers.iter());
        let layers = layers.map(|l| self.step_layer(l));
        let Some(layers) = layers.collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let beside = (model.part)
            .filter(|part| part.rank.beside)
            .map_or(1, |part| part.rank.ranks);
        let limit = BlockLimit { most, beside };
        let plan = LayersPlan::within(&model.gpu, &layers, model.stacks(), limit)?;
        Ok(plan.map(|plan| (plan, layers)))
    }

    /// A layer in the form that [`Stream::step_layers`] runs; `None` for layers of other blocks than
    /// attention or a recurrence, and an MLP or a mixture.
    fn step_layer<'b>(&self, layer: &'b CudaLayer) -> Option<StepLayer<'b>>
    where
        Self: 'b,
    {
        let [
            Block { norm, mixer },
            Block {
                norm: mlp_norm,
                mixer: feed,
            },
        ] = &layer.blocks[..]
        else {
            return None;
        };
        let model = self.model;
        let (router, gate_up, down) = match feed {
            Mix::Mlp(mlp) => (None, &mlp.gate_up, &mlp.down),
            Mix::Experts(experts) => {
                let router = model.router(layer.index)?;
                (Some(router), &experts.gate_up, &experts.down)
            }
            Mix::Attention(_) | Mix::Delta(_) => return None,
        };
        let (mixer, o) = match mixer {
            Mix::Attention(attention) => {
                let mixer = StepMixer::Attention {
                    qkv: &attention.qkv.linear,
                    heads: model.heads(&attention.heads, self.cos_sin),
                    cache: self.pages.layer(model.place(layer.index)),
                };
                (mixer, &attention.o)
            }
            Mix::Delta(delta) => {
                let mixer = StepMixer::Recurrence {
                    inputs: &delta.inputs.linear,
                    rates: model.rates(layer.index),
                    vectors: model.delta(&delta.vectors),
                    states: states_of(model, self.states, layer.index),
                };
                (mixer, &delta.out)
            }
            Mix::Mlp(_) | Mix::Experts(_) => return None,
        };
        Some(StepLayer {
            norm,
            mixer,
            o: &o.linear,
            mlp_norm,
            router,
            gate_up: &gate_up.linear,
            down: &down.linear,
        })
    }

    /// The recurrence of the step's rows.
    fn recur(
        &self,
        layer: usize,
        vectors: &DeltaParameters<Buffer<f32>>,
        products: (&Buffer<f32>, Rates<'_>),
        step: &Checked<Step>,
        out: AttentionOutput<'_>,
        late: bool,
    ) -> Result<()> {
        let (model, m) = (self.model, self.kind.m);
        let states = states_of(model, self.states, layer);
        let idle = self.pages.idle_slot();
        let key = ("recurrence", "fused", (m, model.config.hidden_size));
        self.stream.timed(key, m * states.bytes_per_row(), || {
            let vectors = model.delta(vectors);
            (self.stream).delta_step(products, step, &vectors, states, out, (m, idle), late)
        })
    }

    /// True if attention prepares its output for the product with `o`, as a narrow step of several rows does.
    fn prepares(&self, o: &DeviceLinear) -> bool {
        self.kind.m > 1 && Columns::suit(o)
    }

    fn norm<'b>(&self, gain: &'b Buffer<f32>) -> Norm<'b> {
        Norm {
            gain,
            eps: self.model.config.rms_norm_eps,
        }
    }

    /// Where the mixer of a narrow step leaves its output for the product with `o`, and whether the successors of its
    /// kernel wait for the end of its predecessor.
    fn attended<'b>(
        &self,
        o: &'b DeviceLinear,
        columns: &'b mut Option<Columns>,
        full: &'b mut Buffer<f32>,
    ) -> (AttentionOutput<'b>, bool) {
        let out = match columns {
            Some(columns) if self.prepares(o) => AttentionOutput::Columns(columns, o),
            _ => AttentionOutput::Full(full),
        };
        (out, self.kind.m == 1 && o.bytes() > FLOOD)
    }

    fn attend(
        &self,
        layer: usize,
        vectors: &HeadVectors<Buffer<f32>>,
        (qkv, step): (&Buffer<f32>, &Checked<Step>),
        (scratch, cascade): (&mut AttentionScratch, Option<&Cascade>),
        out: AttentionOutput<'_>,
        late: bool,
    ) -> Result<()> {
        let StepKind {
            m,
            splits,
            runs,
            shared,
            ..
        } = self.kind;
        let shape = AttentionShape {
            m,
            splits,
            late,
            runs: runs && m > 1,
            shared: shared.and_then(|shape| Some((cascade?, shape))),
        };
        let heads = self.model.heads(vectors, self.cos_sin);
        let cache = self.pages.layer(self.model.place(layer));
        // Only the device knows how many keys and values are read.
        let key = (
            "attention",
            "fused",
            (heads.heads, self.model.config.head_dim),
        );
        self.stream.timed(key, 0, || {
            self.stream
                .attention_decode(qkv, step, &heads, cache, scratch, out, shape)
        })
    }
}

/// The states of `layer`, which has a recurrence.
pub(super) fn states_of<'a>(
    model: &CudaModel,
    states: Option<&'a DeviceStates>,
    layer: usize,
) -> LayerStates<'a> {
    let Some(states) = states else {
        unreachable!("sessions of models with recurrences have states");
    };
    states.layer(model.place(layer))
}

/// Up to [`MOST_SEQUENCES`] rows: a step consists of products, which include the norms, and attention.
struct NarrowPass<'a> {
    device: Device<'a>,
    step: &'a mut StepRows,
    ranks: Option<&'a mut RankRows>,
}

impl NarrowPass<'_> {
    fn multiply(
        device: Device<'_>,
        (name, w): (&'static str, &DeviceLinear),
        x: &Buffer<f32>,
        out: GemvOutput<'_>,
        columns: &mut Option<Columns>,
        late: bool,
    ) -> Result<()> {
        let (stream, m) = (device.stream, device.kind.m);
        product(stream, name, w, || match columns {
            Some(columns) if m > 1 => stream.gemv_batch(w, x, out, columns, m, late),
            _ => stream.gemv(w, x, out, late),
        })
    }

    /// Adds a product to the residual stream, or to this rank's share.
    fn add_product(&mut self, operand: Operand, w: &Packed<DeviceLinear>) -> Result<()> {
        let (device, step) = (self.device, &mut *self.step);
        let to = added_to(&mut step.x, &mut self.ranks);
        let operand = match (operand, &step.columns) {
            (Operand::Attended, Some(columns)) if device.prepares(&w.linear) => {
                let (name, w, m) = (w.spec.name, &w.linear, device.kind.m);
                return product(device.stream, name, w, || {
                    device.stream.multiply_columns(w, columns, to, m)
                });
            }
            (Operand::Attended, _) => &step.attended,
            (Operand::Gated, _) => &step.gated,
        };
        let (w, out) = ((w.spec.name, &w.linear), GemvOutput::Add(to));
        Self::multiply(device, w, operand, out, &mut step.columns, false)
    }

    /// Adds the shares of all ranks to the residual stream.
    fn reduce(&mut self) -> Result<()> {
        let size = (self.device.kind.m, self.device.model.config.hidden_size);
        reduce(self.device.stream, &mut self.step.x, &mut self.ranks, size)
    }

    /// Gives the residual stream to other ranks, or takes it from them.
    fn hand_over(&mut self, what: Handover) -> Result<()> {
        let (device, ranks) = (self.device, self.ranks.as_deref());
        let size = (device.kind.m, device.model.config.hidden_size);
        hand_over(device.stream, &mut self.step.x, ranks, size, what)
    }

    /// Final norm and head.
    fn head(&mut self) -> Result<()> {
        let (device, step) = (self.device, &mut *self.step);
        let (norm, head) = (device.norm(&device.model.norm), &device.model.head);
        let out = match self.ranks.as_mut().and_then(|r| r.head_logits()) {
            Some(part) => GemvOutput::Store(norm, part),
            None => GemvOutput::Head(norm, &mut step.logits, &mut step.best),
        };
        let columns = &mut step.columns;
        Self::multiply(device, ("head", head), &step.x, out, columns, false)?;
        let size = (device.kind.m, device.model.config.vocab_size);
        let to = (&mut step.logits, Some(&mut step.best));
        gather_logits(device.stream, self.ranks.as_deref(), to, size)
    }
}

impl Verbs for NarrowPass<'_> {
    type Linear = DeviceLinear;
    type Vector = Buffer<f32>;
    type Error = Error;

    fn norm(&mut self, _norm: &Buffer<f32>) -> Result<()> {
        Ok(())
    }

    fn project(
        &mut self,
        layer: usize,
        norm: &Buffer<f32>,
        w: &Packed<DeviceLinear>,
        to: Projection,
    ) -> Result<()> {
        let (device, step) = (self.device, &mut *self.step);
        let norm = device.norm(norm);
        let out = match to {
            Projection::Mixer => GemvOutput::Store(norm, &mut step.qkv),
            Projection::Gated => GemvOutput::Silu(norm, &mut step.gated),
            Projection::Scores => {
                GemvOutput::Store(norm, &mut expert_rows(&mut step.experts).scores)
            }
            Projection::SharedScore => {
                GemvOutput::Store(norm, &mut expert_rows(&mut step.experts).shared)
            }
            // The kernel of the recurrence computes them.
            Projection::Rates => return Ok(()),
        };
        // No kernel may overtake the previous step's sampler, on which early reads of the attention
        // kernel depend: the first product of a step ensures that.
        let late = layer == 0 && to == Projection::Mixer;
        let w = (w.spec.name, &w.linear);
        Self::multiply(device, w, &step.x, out, &mut step.columns, late)
    }

    fn attend(
        &mut self,
        layer: usize,
        vectors: &HeadVectors<Buffer<f32>>,
        o: &Packed<DeviceLinear>,
    ) -> Result<()> {
        let (device, step) = (self.device, &mut *self.step);
        let (out, late) = device.attended(&o.linear, &mut step.columns, &mut step.attended);
        let from = (&step.qkv, &step.step);
        let memory = (&mut step.attention, step.cascade.as_ref());
        device.attend(layer, vectors, from, memory, out, late)
    }

    fn recur(
        &mut self,
        layer: usize,
        norm: &Buffer<f32>,
        delta: &Delta<DeviceLinear, Buffer<f32>>,
    ) -> Result<()> {
        let (device, step) = (self.device, &mut *self.step);
        let o = &delta.out.linear;
        let (out, late) = device.attended(o, &mut step.columns, &mut step.attended);
        let rates = Rates::Of(&step.x, device.norm(norm), device.model.rates(layer));
        let products = (&step.qkv, rates);
        device.recur(layer, &delta.vectors, products, &step.step, out, late)
    }

    fn mix(
        &mut self,
        layer: usize,
        norm: &Buffer<f32>,
        experts: &Experts<DeviceLinear>,
    ) -> Result<()> {
        let (device, step) = (self.device, &mut *self.step);
        let on = (device.stream, device.model, device.host);
        let to = (&mut step.x, &mut self.ranks);
        let rows = expert_rows(&mut step.experts);
        add_experts(on, layer, (norm, experts), rows, None, to, device.kind.m)?;
        // The shared expert adds to the same share.
        match experts.shared {
            Some(_) => Ok(()),
            None => self.reduce(),
        }
    }

    fn weigh(&mut self, shared: &Shared<DeviceLinear>) -> Result<()> {
        let (device, step) = (self.device, &mut *self.step);
        let scaled = RowsOut {
            full: Some(&mut step.gated),
            half: None,
        };
        let size = (device.kind.m, shared.mlp.down.linear.inputs());
        let scores = &expert_rows(&mut step.experts).shared;
        device.stream.scale_rows(scores, &scaled, size)
    }

    fn add(&mut self, _layer: usize, operand: Operand, w: &Packed<DeviceLinear>) -> Result<()> {
        self.add_product(operand, w)?;
        self.reduce()
    }

    fn end_layer(&mut self, layer: usize) -> Result<()> {
        let (device, step) = (self.device, &mut *self.step);
        match &mut step.taps {
            Some(taps) if device.kind.runs => {
                taps.keep(device.stream, layer, &step.x, device.kind.m)
            }
            _ => Ok(()),
        }
    }
}

/// More rows: a product that is added leaves its sums in parts, which the following norm adds up.
struct WidePass<'a> {
    device: Device<'a>,
    x: &'a mut Buffer<f32>,
    step: &'a Checked<Step>,
    qkv: &'a mut Buffer<f32>,
    rates: &'a mut Buffer<f32>,
    scratch: &'a mut AttentionScratch,
    cascade: Option<&'a Cascade>,
    rows: &'a mut WideRows,
    experts: &'a mut Option<ExpertRows>,
    head: (&'a mut Buffer<f32>, &'a mut Buffer<[f32; 2]>),
    ranks: Option<&'a mut RankRows>,
    /// True while the last product's sums are not in `x` yet.
    pending: bool,
}

impl<'a> WidePass<'a> {
    fn new(
        device: Device<'a>,
        step: &'a mut StepRows,
        ranks: Option<&'a mut RankRows>,
    ) -> Result<Self> {
        let StepRows {
            x,
            step,
            qkv,
            rates,
            attention,
            cascade,
            wide: Some(rows),
            experts,
            logits,
            best,
            ..
        } = step
        else {
            return Err(Error::Shape {
                op: "a step",
                what: "rows",
                expected: format!("at most {MOST_SEQUENCES}"),
                found: device.kind.m.to_string(),
            });
        };
        Ok(WidePass {
            device,
            x,
            step,
            qkv,
            rates,
            scratch: attention,
            cascade: cascade.as_ref(),
            rows,
            experts,
            head: (logits, best),
            ranks,
            pending: false,
        })
    }

    /// Rows of the pass and their width.
    fn size(&self) -> (usize, usize) {
        (self.device.kind.m, self.device.model.config.hidden_size)
    }

    fn multiply(
        device: Device<'_>,
        (name, w): (&'static str, &DeviceLinear),
        x: &Buffer<u16>,
        out: StepOutput<'_>,
    ) -> Result<()> {
        let (stream, m) = (device.stream, device.kind.m);
        product(stream, name, w, || stream.gemm_step(w, x, out, m))
    }

    /// Gives the residual stream to other ranks, or takes it from them.
    fn hand_over(&mut self, what: Handover) -> Result<()> {
        let (size, ranks) = (self.size(), self.ranks.as_deref());
        hand_over(self.device.stream, self.x, ranks, size, what)
    }

    /// Adds what is pending to the residual stream of a stage, whose layers end here.
    fn end(&mut self) -> Result<()> {
        let model = self.device.model;
        if self.pending && model.part.is_some_and(|part| part.split == Split::Layers) {
            self.norm(&model.norm)?;
        }
        Ok(())
    }

    /// Final norm and head.
    fn head(&mut self) -> Result<()> {
        let model = self.device.model;
        self.norm(&model.norm)?;
        let (logits, best) = (&mut *self.head.0, &mut *self.head.1);
        let out = match self.ranks.as_mut().and_then(|r| r.head_logits()) {
            Some(part) => StepOutput::Store(part),
            None => StepOutput::Head(logits, best),
        };
        Self::multiply(self.device, ("head", &model.head), &self.rows.normed, out)?;
        let size = (self.device.kind.m, model.config.vocab_size);
        let to = (&mut *self.head.0, Some(&mut *self.head.1));
        gather_logits(self.device.stream, self.ranks.as_deref(), to, size)
    }
}

impl Verbs for WidePass<'_> {
    type Linear = DeviceLinear;
    type Vector = Buffer<f32>;
    type Error = Error;

    /// Normalizes `x`, including pending sums, to `normed`.
    fn norm(&mut self, gain: &Buffer<f32>) -> Result<()> {
        let Device {
            stream,
            model,
            kind: StepKind { m, .. },
            ..
        } = self.device;
        // No kernel may overtake the previous step's sampler, on which early reads of the attention
        // kernel depend: the first kernel of a step ensures that.
        let late = !self.pending;
        let WideRows { normed, sums, .. } = &mut *self.rows;
        let sums = self.pending.then_some(&*sums);
        self.pending = false;
        let gain = self.device.norm(gain);
        let key = ("norm", "fused", (m, model.config.hidden_size));
        stream.timed(key, 0, || {
            stream.norm_step(self.x, sums, gain, normed, m, late)
        })
    }

    fn project(
        &mut self,
        _layer: usize,
        _norm: &Buffer<f32>,
        w: &Packed<DeviceLinear>,
        to: Projection,
    ) -> Result<()> {
        let WideRows { normed, gated, .. } = &mut *self.rows;
        let out = match to {
            Projection::Mixer => StepOutput::Store(self.qkv),
            Projection::Gated => StepOutput::Silu(gated),
            Projection::Rates => StepOutput::Store(self.rates),
            Projection::Scores => StepOutput::Store(&mut expert_rows(self.experts).scores),
            Projection::SharedScore => StepOutput::Store(&mut expert_rows(self.experts).shared),
        };
        Self::multiply(self.device, (w.spec.name, &w.linear), normed, out)
    }

    fn attend(
        &mut self,
        layer: usize,
        vectors: &HeadVectors<Buffer<f32>>,
        _o: &Packed<DeviceLinear>,
    ) -> Result<()> {
        let out = AttentionOutput::Half(&mut self.rows.attended);
        let from = (&*self.qkv, self.step);
        let memory = (&mut *self.scratch, self.cascade);
        self.device.attend(layer, vectors, from, memory, out, false)
    }

    fn recur(
        &mut self,
        layer: usize,
        _norm: &Buffer<f32>,
        delta: &Delta<DeviceLinear, Buffer<f32>>,
    ) -> Result<()> {
        let out = AttentionOutput::Half(&mut self.rows.attended);
        let products = (&*self.qkv, Rates::Products(self.rates));
        let (device, vectors) = (self.device, &delta.vectors);
        device.recur(layer, vectors, products, self.step, out, false)
    }

    fn mix(
        &mut self,
        layer: usize,
        norm: &Buffer<f32>,
        experts: &Experts<DeviceLinear>,
    ) -> Result<()> {
        let (device, size) = (self.device, self.size());
        let on = (device.stream, device.model, device.host);
        let normed = Some(&self.rows.normed);
        let (of, to) = ((norm, experts), (&mut *self.x, &mut self.ranks));
        add_experts(on, layer, of, expert_rows(self.experts), normed, to, size.0)?;
        reduce(device.stream, self.x, &mut self.ranks, size)
    }

    fn weigh(&mut self, shared: &Shared<DeviceLinear>) -> Result<()> {
        let scaled = RowsOut {
            full: None,
            half: Some(&mut self.rows.gated),
        };
        let size = (self.device.kind.m, shared.mlp.down.linear.inputs());
        let scores = &expert_rows(self.experts).shared;
        self.device.stream.scale_rows(scores, &scaled, size)
    }

    fn add(&mut self, _layer: usize, operand: Operand, w: &Packed<DeviceLinear>) -> Result<()> {
        let size = self.size();
        let WideRows {
            attended,
            gated,
            sums,
            ..
        } = &mut *self.rows;
        let operand = match operand {
            Operand::Attended => attended,
            Operand::Gated => gated,
        };
        let out = StepOutput::Parts(sums);
        Self::multiply(self.device, (w.spec.name, &w.linear), operand, out)?;
        let reduced = reduce_parts(self.device.stream, self.x, sums, &self.ranks, size)?;
        self.pending = !reduced;
        Ok(())
    }
}
