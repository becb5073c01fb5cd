//! The experts of a pass's rows.

use super::{Inputs, Pass, Sequences, experts_of, read_rows};
use crate::engine::layer::mixture;
use crate::engine::session::buffers::{ExpertRows, GROUPED_ROWS};
use crate::engine::session::rank_rows::added_to;
use crate::{Buffer, DeviceLinear, stacked};
use nq_kernels::Result;
use nq_model::Dims;
use nq_model::forward::{Experts, Packed};

impl Pass<'_> {
    /// Adds the mixture of the experts that the scored rows choose to the residual stream, or to a rank's share. Many rows
    /// are grouped by expert; of few, each reads its experts for itself, which the device's cache makes cheap where they
    /// are the same. Experts of a layer that are on the CPU run there.
    pub(super) fn add_experts(
        &mut self,
        layer: usize,
        gain: &Buffer<f32>,
        experts: &Experts<DeviceLinear>,
    ) -> Result<()> {
        let (on, m) = (self.on, self.m);
        let stream = on.stream;
        let shape = &mixture(on.config, experts);
        let (all, each) = (
            stacked(shape),
            shape.per_token + usize::from(shape.shared > 0),
        );
        let ExpertRows {
            scores,
            gated,
            grouped,
            ..
        } = experts_of(&mut self.rows.experts);
        let x = &mut *self.rows.x;
        if let (Some(work), Some(stage)) = (on.layers.host.work(layer), on.host) {
            let (n, k) = (m * on.config.hidden_size, m * shape.count);
            let key = (
                "experts on the CPU",
                "host",
                Dims::new(shape.count, shape.width),
            );
            return stream.timed(key, 0, || stream.on_host(stage, work, x, n, scores, k));
        }
        let key = |w: &Packed<DeviceLinear>| {
            let linear = &w.linear;
            let rows = linear.rows() / all;
            (
                w.spec.name,
                linear.kind().name(),
                Dims::new(rows, linear.inputs()),
            )
        };
        let (up, down) = (&experts.gate_up, &experts.down);
        // Rows of several streams, but for those of a step, are in FP16.
        let least = if self.streams.is_some() {
            1
        } else {
            GROUPED_ROWS
        };
        if let (true, Inputs::Half { halves, .. }, Some(grouped)) =
            (m >= least, &self.inputs, grouped)
        {
            let part = |w: &DeviceLinear| w.bytes() / all * all.min(m * each);
            let routes = ("routes", "fused", Dims::new(all, each));
            stream.timed(routes, 0, || {
                let stacks = [&up.linear, &down.linear];
                stream.group_rows(&halves.normed, scores, grouped, shape, m, stacks)
            })?;
            if let (Some(bank), Some(of_layer)) = (&on.layers.bank, up.linear.layer_bank()) {
                let key = ("experts from the host", "fused", Dims::new(all, each));
                stream.timed(key, 0, || match self.sequences {
                    // A recorded step waits for no other stream.
                    Sequences::Step { .. } => stream.stage_experts(of_layer, grouped),
                    Sequences::Prompts { .. } => {
                        let coming = self.state.coming.take();
                        self.state.coming = bank.bring(stream, layer, grouped, coming)?;
                        Ok(())
                    }
                })?;
            }
            stream.timed(key(up), part(&up.linear), || {
                stream.grouped_up(&up.linear, grouped)
            })?;
            return stream.timed(key(down), part(&down.linear), || {
                stream.grouped_down(&down.linear, grouped, added_to(x, &mut self.ranks))
            });
        }
        let part = |w: &DeviceLinear| w.bytes() / all * each;
        stream.timed(key(up), m * part(&up.linear), || {
            let rows = read_rows(&self.streams, x, on.norm(gain));
            stream.experts_up(&up.linear, rows, scores, gated, shape, m)
        })?;
        stream.timed(key(down), m * part(&down.linear), || {
            let to = added_to(x, &mut self.ranks);
            stream.experts_down(&down.linear, gated, scores, to, shape, m)
        })
    }
}
