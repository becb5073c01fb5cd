//! The layers of a step and its head, which a stream queues or records.

use crate::engine::adapters::Adapted;
use crate::engine::held::CudaLayer;
use crate::engine::model::CudaModel;
use crate::engine::pass::{
    Context, Fused, Inputs, Pass, PassState, Rows, Sequences, StreamPass, Sums,
};
use crate::engine::session::CudaSession;
use crate::engine::session::graphs::StepKind;
use crate::engine::session::rank_rows::{Handover, RankRows, hand_over};
use crate::engine::session::step_rows::StepRows;
use crate::{BlockLimit, LayersPlan, MOST_SEQUENCES, StepLayer, StepMixer};
use nq_kernels::{Error, Result};
use nq_model::Dims;
use nq_model::forward::{Block, Mix};

impl CudaSession {
    /// Queues the step's rows, whose tokens are looked up, through the layers and the head.
    pub(super) fn queue_layers(&mut self, kind: StepKind) -> Result<()> {
        let Self {
            stream,
            model,
            pages,
            states,
            cos_sin,
            step,
            ranks,
            experts_host,
            adapters,
            adapted,
            adapter_rows,
            many,
            kept,
            ..
        } = self;
        let on = model.context(
            stream,
            pages,
            states.as_ref(),
            cos_sin,
            experts_host.as_ref(),
        );
        let size = Dims::new(kind.m, model.config.hidden_size);
        hand_over(stream, &mut step.x, ranks.as_ref(), size, Handover::Begin)?;
        if let Some(streams) = &mut many.streams {
            streams.begin(stream, &step.x, kind.m)?;
        }
        let streams = match (&mut many.streams, kept) {
            (Some(rows), Some(kept)) => Some(StreamPass {
                rows,
                kept,
                at: &many.rows,
                scored: Some(kind.scored),
            }),
            _ => None,
        };
        let at_once = kind.at_once && queue_at_once(&on, model, step, ranks.as_ref())?;
        let StepRows {
            x,
            step,
            qkv,
            rates,
            attended,
            gated,
            attention,
            cascade,
            columns,
            experts,
            wide,
            few_rows,
            taps,
            logits,
            best,
            ..
        } = step;
        let few_rows = *few_rows;
        let adapted = Adapted::of_pass(adapters, &adapted.runs, adapter_rows);
        let fused = match (&adapted, &streams) {
            (None, None) => Fused::in_step(kind.m, few_rows),
            // What is added to rates is added to a product, and a recurrence that computes them normalizes its rows.
            _ => Fused {
                rates: false,
                ..Fused::in_step(kind.m, few_rows)
            },
        };
        let inputs = match (fused.norms, wide) {
            (true, _) => Inputs::Full {
                attended,
                gated,
                columns,
                // Adapters read what attention has made, too.
                prepares: adapted.is_none(),
            },
            (false, Some(wide)) => Inputs::Half {
                halves: &mut wide.halves,
                full: None,
                sums: (fused.sums == Sums::Parts).then_some(&mut wide.sums),
            },
            (false, None) => {
                return Err(Error::Shape {
                    op: "a step",
                    what: "rows",
                    expected: format!("at most {MOST_SEQUENCES}"),
                    found: kind.m.to_string(),
                });
            }
        };
        let shared = kind.shared.zip(cascade.as_ref());
        let mut pass = Pass {
            on,
            m: kind.m,
            fused,
            rows: Rows {
                x,
                qkv,
                rates: Some(rates),
                experts: experts.as_mut(),
                taps: taps.as_mut().filter(|_| kind.runs),
            },
            inputs,
            sequences: Sequences::Step {
                step,
                scratch: attention,
                shared: shared.map(|(shape, cascade)| (cascade, shape)),
                splits: kind.splits,
                runs: kind.runs,
            },
            streams,
            ranks: ranks.as_mut(),
            observer: None,
            drafting: None,
            adapted,
            state: PassState::default(),
        };
        if !at_once {
            (model.layers.all.iter()).try_for_each(|l| l.run(&mut pass))?;
        }
        pass.end(&model.norm)?;
        pass.hand_over(Handover::End)?;
        pass.hand_over(Handover::Last)?;
        if let Some(mixing) = model.mixing() {
            pass.contract_end(&mixing)?;
        }
        pass.head(&model.norm, &model.head, logits, best)
    }

    /// Blocks of the kernel of all layers that this device runs at once; 0 if it runs the layers otherwise.
    pub(in crate::engine) fn blocks_at_once(&self) -> nq_runtime::Result<usize> {
        let (states, host) = (self.states.as_ref(), self.experts_host.as_ref());
        let on = (self.model).context(&self.stream, &self.pages, states, &self.cos_sin, host);
        let plan = plan_at_once(&on, &self.model, usize::MAX)?;
        Ok(plan.map_or(0, |(plan, _)| plan.blocks()))
    }
}

/// Queues all layers of a step of one row as one kernel, if that is the fastest way; true if it did.
fn queue_at_once(
    on: &Context<'_>,
    model: &CudaModel,
    step: &mut StepRows,
    ranks: Option<&RankRows>,
) -> Result<bool> {
    let most = ranks.map_or(usize::MAX, RankRows::blocks);
    if most == 0 {
        return Ok(false);
    }
    let Some((plan, layers)) = plan_at_once(on, model, most)? else {
        return Ok(false);
    };
    let scratch = &mut step.layers;
    (on.stream).step_layers(&plan, &layers, &mut step.x, &step.step, scratch)?;
    Ok(true)
}

/// The plan of all layers of a step of one row as one kernel of at most so many blocks, and its layers; `None` if
/// that is not the fastest way.
fn plan_at_once<'a>(
    on: &Context<'a>,
    model: &'a CudaModel,
    most: usize,
) -> Result<Option<(LayersPlan, Vec<StepLayer<'a>>)>> {
    let layers = model.layers.all.iter().map(|l| step_layer(on, l));
    let Some(layers) = layers.collect::<Option<Vec<_>>>() else {
        return Ok(None);
    };
    let beside = (model.part)
        .filter(|part| part.rank.beside)
        .map_or(1, |part| part.rank.ranks);
    let limit = BlockLimit { most, beside };
    let stacks = model.layers.stacks(on.config);
    let plan = LayersPlan::within(&model.gpu, &layers, stacks, limit)?;
    Ok(plan.map(|plan| (plan, layers)))
}

/// A layer in the form that [`Stream::step_layers`](crate::Stream::step_layers) runs; `None` for layers of other blocks
/// than attention or a recurrence, and an MLP or a mixture.
fn step_layer<'a>(on: &Context<'a>, layer: &'a CudaLayer) -> Option<StepLayer<'a>> {
    let [
        Block {
            norm,
            hyper: None,
            mixer,
        },
        Block {
            norm: mlp_norm,
            hyper: None,
            mixer: feed,
        },
    ] = &layer.blocks[..]
    else {
        return None;
    };
    let (router, gate_up, down) = match feed {
        Mix::Mlp(mlp) => (None, &mlp.gate_up, &mlp.down),
        Mix::Experts(experts) => {
            let router = on.layers.routers[layer.index].as_ref()?;
            (Some(router), &experts.gate_up, &experts.down)
        }
        Mix::Attention(_) | Mix::Delta(_) | Mix::Ngrams(_) => return None,
    };
    let (mixer, o) = match mixer {
        Mix::Attention(attention) => {
            let mixer = StepMixer::Attention {
                qkv: &attention.qkv.linear,
                heads: on.heads(&attention.heads),
                cache: on.cache(layer.index),
            };
            (mixer, &attention.o)
        }
        Mix::Delta(delta) => {
            let mixer = StepMixer::Recurrence {
                inputs: &delta.inputs.linear,
                rates: on.layers.rates(layer.index),
                vectors: on.delta(&delta.vectors),
                states: on.recurrent(layer.index),
            };
            (mixer, &delta.out)
        }
        Mix::Mlp(_) | Mix::Experts(_) | Mix::Ngrams(_) => return None,
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
