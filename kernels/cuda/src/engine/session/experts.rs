//! The experts of a pass's rows.

use super::buffers::{ExpertRows, GROUPED_ROWS};
use super::rank_rows::{RankRows, added_to};
use crate::engine::layer::mixture;
use crate::engine::model::CudaModel;
use crate::{Buffer, DeviceLinear, HostStage, Norm, Stream, stacked};
use nq_kernels::Result;
use nq_model::forward::{Experts, Packed};

/// Adds the mixture of the experts that the scored rows choose to the residual stream `x`, or to a rank's share; `normed` are
/// its normalized rows, if they exist in FP16. Many rows are grouped by expert; of few, each reads its
/// experts for itself, which the device's cache makes cheap where they are the same. Experts of a layer
/// that are on the CPU run there.
pub(super) fn add_experts(
    (stream, model, host): (&Stream, &CudaModel, Option<&HostStage>),
    layer: usize,
    (gain, experts): (&Buffer<f32>, &Experts<DeviceLinear>),
    rows: &mut ExpertRows,
    normed: Option<&Buffer<u16>>,
    (x, ranks): (&mut Buffer<f32>, &mut Option<&mut RankRows>),
    m: usize,
) -> Result<()> {
    let shape = &mixture(&model.config, experts);
    let (all, each) = (
        stacked(shape),
        shape.per_token + usize::from(shape.shared > 0),
    );
    let ExpertRows {
        scores,
        gated,
        grouped,
        ..
    } = rows;
    if let (Some(work), Some(stage)) = (model.host.work(layer), host) {
        let (n, k) = (m * model.config.hidden_size, m * shape.count);
        let key = ("experts on the CPU", "host", (shape.count, shape.width));
        return stream.timed(key, 0, || stream.on_host(stage, work, (x, n), (scores, k)));
    }
    let norm = Norm {
        gain,
        eps: model.config.rms_norm_eps,
    };
    let key = |w: &Packed<DeviceLinear>| {
        let linear = &w.linear;
        let rows = linear.rows() / all;
        (w.spec.name, linear.kind().name(), (rows, linear.inputs()))
    };
    let (up, down) = (&experts.gate_up, &experts.down);
    if let (GROUPED_ROWS.., Some(normed), Some(grouped)) = (m, normed, grouped) {
        let part = |w: &DeviceLinear| w.bytes() / all * all.min(m * each);
        let routes = ("routes", "fused", (all, each));
        stream.timed(routes, 0, || {
            stream.group_rows(normed, scores, grouped, shape, m)
        })?;
        stream.timed(key(up), part(&up.linear), || {
            stream.grouped_up(&up.linear, grouped)
        })?;
        return stream.timed(key(down), part(&down.linear), || {
            stream.grouped_down(&down.linear, grouped, added_to(x, ranks))
        });
    }
    let part = |w: &DeviceLinear| w.bytes() / all * each;
    stream.timed(key(up), m * part(&up.linear), || {
        stream.experts_up(&up.linear, (x, norm), scores, gated, shape, m)
    })?;
    stream.timed(key(down), m * part(&down.linear), || {
        let to = added_to(x, ranks);
        stream.experts_down(&down.linear, gated, scores, to, shape, m)
    })
}
