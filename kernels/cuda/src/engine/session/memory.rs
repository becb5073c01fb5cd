//! The device memory of a session, which plans and sessions allocate alike.

use super::buffers::{ManyRows, Widths};
use super::rank_rows::RankRows;
use super::step_rows::{StepRows, StepSizes, most_rows};
use super::stream_rows::{StreamRows, StreamsKept};
use crate::bank::ExpertStage;
use crate::engine::adapters::AdapterRows;
use crate::engine::held::largest_mixture;
use crate::engine::request::MemoryRequest;
use crate::engine::streams::buffers::DraftMemory;
use crate::{
    Buffer, DevicePages, DeviceStates, GatheredRows, Gpu, PagesShape, StatesShape, TrellisRoom,
    stacked,
};
use nq_runtime::Result;
use nq_runtime::interface::{DraftedBy, SessionSpec};
use nq_runtime::states::is_recurrent;

/// Device memory of a session.
pub(in crate::engine) struct SessionMemory {
    pub(super) pages: DevicePages,
    pub(super) states: Option<DeviceStates>,
    pub(super) cos_sin: Buffer<[f32; 2]>,
    pub(super) step: StepRows,
    pub(super) many: ManyRows,
    pub(super) ranks: Option<RankRows>,
    pub(super) room: Option<TrellisRoom>,
    pub(super) gathered: Option<GatheredRows>,
    pub(super) drafts: Option<DraftMemory>,
    pub(super) adapters: Option<AdapterRows>,
    pub(super) kept: Option<StreamsKept>,
}

impl SessionMemory {
    /// Allocates it for the model of `request`. The rotary table is not written yet.
    pub(in crate::engine) fn new(
        gpu: &Gpu,
        request: &MemoryRequest<'_>,
        spec: &SessionSpec,
    ) -> Result<Self> {
        let MemoryRequest {
            config: c,
            kernels,
            head,
            trellis,
            adapters,
            ..
        } = *request;
        let (w, rows) = (Widths::of(c), most_rows(spec, request.together));
        let many_rows = spec.max_rows.max(1);
        let recurrent = c.layers().filter(|l| is_recurrent(l)).count();
        let shape = PagesShape {
            kv: spec.kv,
            layers: c.num_hidden_layers - recurrent,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            pages: spec.page_count(),
            slots: spec.slots,
            ctx: spec.ctx,
        };
        let pages = DevicePages::new(gpu, shape)?;
        let pages = match c.indexer {
            Some(indexer) => pages.with_block_keys(gpu, indexer.block)?,
            None => pages,
        };
        let places = pages.places();
        let table = (places.positions + many_rows) * c.rotary_dims() / 2;
        let states = |delta| {
            let shape = StatesShape {
                delta,
                layers: recurrent,
                places: places.slots + spec.snapshot_count(),
                kept: match spec.drafts {
                    DraftedBy::Nothing => 0,
                    DraftedBy::Tokens | DraftedBy::Layer(_) => spec.slots,
                },
            };
            DeviceStates::new(gpu, shape)
        };
        let room = || TrellisRoom::new(gpu, w.trellis(many_rows.max(rows), trellis));
        let gathered = || GatheredRows::new(gpu, w.gathered(rows, many_rows));
        let ranks = request
            .part
            .map(|part| RankRows::new(gpu, c, part, rows, many_rows));
        let drafts = match spec.drafts {
            DraftedBy::Layer(layer) => Some(DraftMemory::new(gpu, layer, head, spec)?),
            DraftedBy::Nothing | DraftedBy::Tokens => None,
        };
        let shape = StepSizes {
            rows,
            few_rows: request.few_rows,
            kv: spec.kv,
            places,
            part: request.part,
            trellis: trellis.any(),
        };
        let mut step = StepRows::new(gpu, c, head, shape)?;
        let mut many = ManyRows::new(gpu, &w, kernels, many_rows, places)?;
        let kept_places = places.slots + spec.snapshot_count();
        let together = request.together;
        many.streams = StreamRows::new(gpu, c, many_rows, places, kept_places, together)?;
        if let (Some(sizes), Some(experts)) = (request.stage, &c.experts) {
            let grouped = [&mut step.experts, &mut many.experts].into_iter().flatten();
            let mut grouped = grouped.filter_map(|e| e.grouped.as_mut()).peekable();
            if grouped.peek().is_some() {
                let stage = ExpertStage::new(gpu, sizes, stacked(&largest_mixture(experts)))?;
                grouped.for_each(|rows| rows.set_stage(&stage));
            }
        }
        Ok(SessionMemory {
            drafts,
            kept: StreamsKept::new(gpu, c, kept_places)?,
            adapters: AdapterRows::new(gpu, adapters, many_rows.max(rows))?,
            room: trellis.any().then(room).transpose()?,
            gathered: request.sorted.then(gathered).transpose()?,
            states: w.delta.map(states).transpose()?,
            ranks: ranks.transpose()?,
            cos_sin: gpu.zeros("the rotary table", table)?,
            step,
            many,
            pages,
        })
    }

    /// Bytes of keys and values, and of states; with those of a layer that drafts.
    pub(in crate::engine) fn kv_bytes(&self) -> usize {
        let states = self.states.as_ref().map_or(0, DeviceStates::bytes);
        let drafts = self.drafts.as_ref().map_or(0, DraftMemory::kv_bytes);
        let kept = self.kept.as_ref().map_or(0, StreamsKept::bytes);
        self.pages.bytes() + states + drafts + kept
    }
}
