//! Gated DeltaNets on the device: what is kept of sequences, and the launchers.

mod stored;

use super::attention::AttentionOutput;
use super::driver::{Address, Buffer, Checked, Gpu, LaunchShape, Operands, Stream};
use super::half_rows::HalfRows;
use super::kernel::kernels;
use super::pack::SPAN;
use super::prefill::SequenceRows;
use super::product::Norm;
use super::rows::{MOST_RUN, Places, Row, RowsOut, Step, shape};
use crate::cuda::delta_rows::{
    self, CopyStatesArgs, DeltaChunksArgs, DeltaConvArgs, DeltaGateArgs, DeltaScanArgs, MOST_SPANS,
};
use crate::cuda::delta_state::{self, DeltaLayer};
use crate::cuda::delta_step::{DeltaSettleArgs, DeltaStepArgs};
use crate::cuda::layers::LayerRecurrence;
use nq_kernels::delta::DeltaShape;
use nq_kernels::grad::{
    DELTA_CHUNK as CHUNK, DELTA_CHUNK_VALUES as CHUNK_PARTS, DELTA_INPUTS as INPUTS,
};
use nq_kernels::{Error, Result};
use nq_model::OutputGate;

/// The width of a head of keys and of values that the kernels serve.
pub const DELTA_DIM: usize = delta_state::DELTA_DIM;
/// `CONV` of `cuda/delta_state.cuh`: the width of the convolution that the kernels serve.
pub const CONV: usize = delta_state::CONV;
/// `KEPT` of `cuda/delta_state.cuh`: values that are kept of a step's rows, for each head of values.
const KEPT: usize = MOST_RUN * (2 * DELTA_DIM + 4);
/// `SCAN_PARTS` of `cuda/delta_rows.cu`.
const SCAN_PARTS: usize = 2;
/// Most inputs of the projections of rates that steps compute where they need them: blocks of `cuda/delta_step.cu` have
/// 8 bytes of shared memory for each.
pub const MOST_RATE_INPUTS: usize = 64 * DELTA_DIM;
const _: () = assert!(INPUTS >= MOST_RUN + CONV - 1);

/// Sizes of [`DeviceStates`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatesShape {
    /// The recurrence.
    pub delta: DeltaShape,
    /// Number of layers that have one.
    pub layers: usize,
    /// Number of states in each layer: those of slots, of the idle slot of [`DevicePages`](super::DevicePages) behind
    /// them, and of snapshots.
    pub places: usize,
    /// Number of slots, from the first on, whose rows a step of several of a sequence keeps, so that they can be taken
    /// back: all but the idle one, or none.
    pub kept: usize,
}

/// The states of the sequences of a session in all layers with a recurrence: a matrix for each head of values, and the
/// last inputs of the convolution. A row at position 0 begins with zeros, whatever its place holds.
pub struct DeviceStates {
    matrices: Buffer<f32>, // [layers, places, value_heads, 128 * 128], in the order of `cuda/delta_state.cuh`
    inputs: Buffer<f32>,   // [layers, places, INPUTS, channels]
    kept: Buffer<f32>,     // [layers, kept, value_heads, KEPT]
    shape: StatesShape,
}

/// One layer of [`DeviceStates`].
#[derive(Clone, Copy)]
pub struct LayerStates<'a> {
    states: &'a DeviceStates,
    layer: usize,
}

/// The vectors of a layer's recurrence.
pub struct DeltaVectors<'a> {
    /// Weights of the convolution `[channels, 4]`, that of the current token last.
    pub conv: &'a Buffer<f32>,
    /// Rates of decay, negated: `[value_heads]`.
    pub decay: &'a Buffer<f32>,
    /// Added to the projection `a`: `[value_heads]`.
    pub dt_bias: &'a Buffer<f32>,
    /// Gains of the norm of each head's output `[128]`.
    pub norm: &'a Buffer<f32>,
    /// What gates that output.
    pub gate: OutputGate,
    /// Epsilon of that norm.
    pub eps: f32,
}

/// The projections `b`, of which beta is the sigmoid, and `a`, which sets the decay, of the rows of a step.
pub enum Rates<'a> {
    /// `[m, 2 value_heads]`
    Products(&'a Buffer<f32>),
    /// Those of normalized rows of x `[m, hidden]`.
    Of(&'a Buffer<f32>, Norm<'a>, &'a HalfRows),
}

/// Rows of one sequence, and after how many of them its state is also written to a place: that of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSpan {
    /// The rows.
    pub rows: SequenceRows,
    /// After how many rows, at least 3 and at most all; and where to.
    pub mark: Option<(usize, usize)>,
}

/// The rows of a pass, and memory for what the kernels hand each other.
pub struct DeltaRows<'a> {
    /// Products `[m, channels + values]`: queries, keys and values, and the gate `z` of the output.
    pub qkvz: &'a Buffer<f32>,
    /// Products `[m, 2 value_heads]`: `b`, of which beta is the sigmoid, and `a`, which sets the decay.
    pub ba: &'a Buffer<f32>,
    /// Where each row stands.
    pub rows: &'a Checked<Row>,
    /// Receives queries, keys and values after the convolution: `[m, channels]`.
    pub mixed: &'a mut Buffer<f32>,
    /// Receives what does not depend on states: [`DeltaRows::chunk_parts`].
    pub chunks: &'a mut Buffer<f32>,
    /// Receives what the recurrence gives: `[m, values]`.
    pub scanned: &'a mut Buffer<f32>,
}

impl DeltaRows<'_> {
    /// Values of [`DeltaRows::chunks`] for up to `m` rows of at most `spans` sequences.
    pub fn chunk_parts(shape: &DeltaShape, m: usize, spans: usize) -> usize {
        // A sequence begins a chunk, and its snapshot another.
        (m / CHUNK + 2 * spans.min(m)) * shape.value_heads * CHUNK_PARTS
    }
}

impl DeviceStates {
    /// Allocates states.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; [`Error::NoKernel`] for heads or a convolution of other widths than the kernels serve.
    pub fn new(gpu: &Gpu, shape: StatesShape) -> Result<Self> {
        let d = &shape.delta;
        let of_key = d.value_heads.is_multiple_of(d.key_heads.max(1)) && d.key_heads > 0;
        if (d.key_dim, d.value_dim, d.conv) != (DELTA_DIM, DELTA_DIM, CONV) || !of_key {
            return Err(Error::NoKernel {
                op: "a gated DeltaNet",
                scheme: format!(
                    "{} heads of {} keys, {} of {} values, a convolution of {}",
                    d.key_heads, d.key_dim, d.value_heads, d.value_dim, d.conv
                ),
                activations: "f32".into(),
                device: gpu.info().to_string(),
            });
        }
        // Sizes that no memory has are refused by whoever allocates them, not wrapped to small ones.
        let places = shape.layers.saturating_mul(shape.places);
        let heads = d.key_heads.saturating_mul(2).saturating_add(d.value_heads);
        let all = |sizes: [usize; 2]| sizes.into_iter().fold(places, usize::saturating_mul);
        let kept = [shape.kept, d.value_heads, KEPT];
        let kept = kept.into_iter().fold(shape.layers, usize::saturating_mul);
        let what = "states of recurrences";
        Ok(DeviceStates {
            matrices: gpu.zeros(what, all([d.value_heads, DELTA_DIM * DELTA_DIM]))?,
            inputs: gpu.zeros(what, all([INPUTS * DELTA_DIM, heads]))?,
            kept: gpu.zeros(what, kept)?,
            shape,
        })
    }

    /// Bytes of all states.
    pub fn bytes(&self) -> usize {
        self.matrices.bytes() + self.inputs.bytes() + self.kept.bytes()
    }

    /// True if rows of steps can be taken back.
    pub(crate) fn keeps_rows(&self) -> bool {
        self.shape.kept > 0
    }

    /// One layer's states.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> LayerStates<'_> {
        assert!(layer < self.shape.layers, "layer {layer} of states");
        LayerStates {
            states: self,
            layer,
        }
    }
}

impl LayerStates<'_> {
    /// Bytes that a row of a step reads and writes.
    pub fn bytes_per_row(&self) -> usize {
        let d = self.delta();
        8 * d.value_heads * DELTA_DIM * DELTA_DIM
    }

    pub(super) fn delta(&self) -> &DeltaShape {
        &self.states.shape.delta
    }

    /// Where the rows that steps keep of the first `slots` sequences are; null if none are kept.
    fn kept(&self, o: &Operands<'_>, slots: usize) -> Result<Address> {
        let StatesShape { delta, kept, .. } = self.states.shape;
        if kept == 0 {
            return Ok(Address::NULL);
        }
        o.at_least("sequences whose rows are kept", slots, kept)?;
        let of_layer = [kept, delta.value_heads, KEPT];
        let from = self.layer * of_layer.iter().product::<usize>();
        o.part("kept rows", &self.states.kept, from, &of_layer)
    }

    /// The argument, checked as operands of `o`, for rows of up to `slots` sequences.
    fn args(
        &self,
        o: &Operands<'_>,
        vectors: &DeltaVectors<'_>,
        slots: usize,
    ) -> Result<DeltaLayer> {
        let StatesShape {
            delta: d, places, ..
        } = self.states.shape;
        o.at_most("sequences of rows", places, slots)?;
        let (matrices, inputs) = (places * d.value_heads, places * INPUTS * d.channels());
        let each = DELTA_DIM * DELTA_DIM;
        Ok(DeltaLayer {
            conv: o.of(
                "weights of the convolution",
                vectors.conv,
                &[d.channels(), CONV],
            )?,
            decay: o.of("rates of decay", vectors.decay, &[d.value_heads])?,
            dt_bias: o.of("biases of time steps", vectors.dt_bias, &[d.value_heads])?,
            norm: o.of("gain of the output", vectors.norm, &[DELTA_DIM])?,
            matrices: o.part(
                "states",
                &self.states.matrices,
                self.layer * matrices * each,
                &[matrices, each],
            )?,
            inputs: o.part(
                "states",
                &self.states.inputs,
                self.layer * inputs,
                &[inputs],
            )?,
            key_heads: d.key_heads as i32,
            value_heads: d.value_heads as i32,
            tiled: i32::from(d.tiled),
            eps: vectors.eps,
        })
    }
}

impl LayerStates<'_> {
    /// The argument of the kernel of all layers, checked as operands of `o`, for one row of any of `slots` sequences.
    pub(super) fn recurrence(
        &self,
        o: &Operands<'_>,
        vectors: &DeltaVectors<'_>,
        rates: &HalfRows,
        slots: usize,
        hidden: usize,
    ) -> Result<LayerRecurrence> {
        let (rows, scale) = rates.args(o, 2 * self.delta().value_heads, hidden)?;
        Ok(LayerRecurrence {
            delta: self.args(o, vectors, slots)?,
            rates: rows,
            // The last slot is the idle one, of which no rows are kept.
            kept: self.kept(o, slots.saturating_sub(1))?,
            scale,
            padding: [0; 1],
        })
    }
}

kernels! {
    DELTA_STEP: DeltaStepArgs = "delta_step" in "delta_step.cu",
        test "kernels/cuda/tests/cuda/delta.rs::steps", bench "delta";
    DELTA_SETTLE: DeltaSettleArgs = "delta_settle" in "delta_step.cu",
        test "kernels/cuda/tests/cuda/delta.rs::rows_are_taken_back", bench "delta";
    DELTA_CONV: DeltaConvArgs = "delta_conv" in "delta_rows.cu",
        test "kernels/cuda/tests/cuda/delta.rs::many_rows", bench "delta";
    DELTA_CHUNKS: DeltaChunksArgs = "delta_chunks" in "delta_rows.cu",
        test "kernels/cuda/tests/cuda/delta.rs::many_rows", bench "delta";
    DELTA_SCAN: DeltaScanArgs = "delta_scan" in "delta_rows.cu",
        test "kernels/cuda/tests/cuda/delta.rs::many_rows", bench "delta";
    DELTA_GATE: DeltaGateArgs = "delta_gate" in "delta_rows.cu",
        test "kernels/cuda/tests/cuda/delta.rs::many_rows", bench "delta";
    COPY_STATES: CopyStatesArgs = "copy_states" in "delta_rows.cu",
        test "kernels/cuda/tests/cuda/delta.rs::many_rows", bench "delta";
}

impl Stream {
    /// The recurrence of a step's `m` rows, of which up to [`MOST_RUN`] that follow one another may belong to one
    /// sequence, at consecutive positions: from its products `qkvz` ([`DeltaRows`]) and `rates` to the norm of its output
    /// times its gate of `z`, `[m, values]`. States are brought forward, but for the slot `idle`; where rows are kept
    /// ([`StatesShape::kept`]), those of a sequence with several rows stay in front of them, until a later step is told
    /// how many of these rows were right ([`Step::behind`]), or [`Stream::settle_states`]. With
    /// `holds_dependents`, the next kernel (a programmatic dependent launch) does not start before the previous one has
    /// ended.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub fn delta_step(
        &self,
        qkvz: &Buffer<f32>,
        rates: Rates<'_>,
        step: &Checked<Step>,
        vectors: &DeltaVectors<'_>,
        states: LayerStates<'_>,
        out: AttentionOutput<'_>,
        m: usize,
        idle: usize,
        holds_dependents: bool,
    ) -> Result<()> {
        let o = self.operands("delta_step");
        let d = states.delta();
        let slots = step.bounds().places.slots;
        let layer = states.args(&o, vectors, slots)?;
        let kept = states.kept(&o, slots.min(idle))?;
        let out = out.args(&o, m, d.values())?;
        let [mut ba, mut x, mut gain, mut rows] = [Address::NULL; 4];
        let (mut hidden, mut scale, mut shared) = (0, 1.0, 0);
        match rates {
            Rates::Products(products) => ba = o.of("rates", products, &[m, 2 * d.value_heads])?,
            Rates::Of(stream, norm, w) => {
                o.multiple("inputs of rates", 4, w.inputs())?;
                o.at_most("inputs of rates", MOST_RATE_INPUTS, w.inputs())?;
                (hidden, shared) = (w.inputs(), 8 * w.inputs());
                x = o.of("x", stream, &[m, hidden])?;
                gain = norm.gain(&o, hidden)?;
                (rows, scale) = w.args(&o, 2 * d.value_heads, hidden)?;
            }
        }
        let args = DeltaStepArgs {
            layer,
            qkvz: o.of("qkvz", qkvz, &[m, d.channels() + d.values()])?,
            ba,
            x,
            gain,
            rates: rows,
            step: o.of("step", step.values(), &[m])?,
            out: out.full,
            half: out.half,
            columns: out.columns,
            m: m as i32,
            padded: out.padded,
            column_rows: out.column_rows,
            nibbles: out.nibbles,
            idle: idle as i32,
            holds_dependents: i32::from(holds_dependents),
            hidden: hidden as i32,
            scale,
            kept,
            sigmoid: i32::from(vectors.gate == OutputGate::Sigmoid),
            padding: [0; 1],
        };
        let shape = shape([d.value_heads, m], 4 * DELTA_DIM)
            .shared(shared)
            .overlapping();
        // SAFETY: the operands were checked, and that the steps' slots have states.
        unsafe { self.launch(&DELTA_STEP, shape, &args) }
    }

    /// The recurrence of many rows, which `spans` has all of: the norm of its output times its gate of `z`, `m` rows. States are brought
    /// forward.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    pub fn delta_rows(
        &self,
        buffers: DeltaRows<'_>,
        spans: &[DeltaSpan],
        vectors: &DeltaVectors<'_>,
        states: LayerStates<'_>,
        out: &RowsOut<'_>,
        m: usize,
    ) -> Result<()> {
        let o = self.operands("delta_rows");
        let d = states.delta();
        let places = buffers.rows.bounds();
        let layer = states.args(&o, vectors, places.slots)?;
        let qkvz = o.of("qkvz", buffers.qkvz, &[m, d.channels() + d.values()])?;
        let ba = o.of("rates", buffers.ba, &[m, 2 * d.value_heads])?;
        let mixed = o.of(
            "queries, keys and values",
            buffers.mixed,
            &[m, d.channels()],
        )?;
        let scanned = o.of("outputs", buffers.scanned, &[m, d.values()])?;
        let conv = DeltaConvArgs {
            layer,
            qkvz,
            rows: o.of("rows", buffers.rows.values(), &[m])?,
            mixed,
            m: m as i32,
            padding: [0; 1],
        };
        let heads = 2 * d.key_heads + d.value_heads;
        // SAFETY: the operands were checked, and that the rows' slots have states.
        unsafe { self.launch(&DELTA_CONV, shape([m.div_ceil(8), heads], 256), &conv)? };
        let mut chunk = 0;
        for some in spans.chunks(MOST_SPANS) {
            let mut of_spans = [delta_rows::DeltaSpan::default(); MOST_SPANS];
            let mut most = 0;
            for (to, span) in of_spans.iter_mut().zip(some) {
                *to = span.args(&o, m, places, states.states.shape.places)?;
                to.chunk = chunk as i32;
                chunk += span.chunks();
                most = most.max(span.chunks());
            }
            let parts = o.of(
                "chunks",
                buffers.chunks,
                &[chunk, d.value_heads, CHUNK_PARTS],
            )?;
            let args = DeltaChunksArgs {
                layer,
                mixed,
                ba,
                parts,
                spans: of_spans,
            };
            let grid = LaunchShape::new([most, d.key_heads, some.len()], 128);
            // SAFETY: the operands were checked, and that the spans' rows and chunks are there.
            unsafe { self.launch(&DELTA_CHUNKS, grid, &args)? };
            let args = DeltaScanArgs {
                layer,
                mixed,
                qkvz,
                parts,
                out: scanned,
                spans: of_spans,
            };
            let grid = [d.value_heads * SCAN_PARTS, some.len()];
            // SAFETY: the operands were checked, and that the spans' rows, chunks and places are there.
            unsafe { self.launch(&DELTA_SCAN, shape(grid, DELTA_DIM), &args)? };
        }
        let padded = d.values().next_multiple_of(SPAN);
        let (full, half) = out.addresses(&o, m, d.values())?;
        let args = DeltaGateArgs {
            layer,
            o: scanned,
            qkvz,
            out: full,
            half,
            m: m as i32,
            padded: padded as i32,
            sigmoid: i32::from(vectors.gate == OutputGate::Sigmoid),
            padding: [0; 1],
        };
        // SAFETY: the operands were checked.
        unsafe {
            self.launch(
                &DELTA_GATE,
                shape([m.div_ceil(8), d.value_heads], 256),
                &args,
            )
        }
    }

    /// Writes the states of the sequence in `slot`, brought forward by the first `count` of the rows that the latest step
    /// kept of it, to `place`, in all layers. The inputs of the convolution there are those of `slot` already.
    ///
    /// # Errors
    /// [`Error::Shape`] for a place or rows that do not exist; errors of the driver.
    pub fn settle_states(
        &self,
        states: &mut DeviceStates,
        slot: usize,
        place: usize,
        count: usize,
    ) -> Result<()> {
        let o = self.operands("settle_states");
        let StatesShape {
            delta: d,
            layers,
            places,
            kept,
        } = states.shape;
        o.at_least("places", place.saturating_add(1), places)?;
        o.at_least(
            "sequences whose rows are kept",
            slot.saturating_add(1),
            kept,
        )?;
        o.at_most("kept rows", MOST_RUN, count)?;
        let whole = |all: &Buffer<f32>| o.of("states", all, &[all.len()]);
        let args = DeltaSettleArgs {
            matrices: whole(&states.matrices)?,
            kept: whole(&states.kept)?,
            value_heads: d.value_heads as i32,
            places: places as i32,
            slots: kept as i32,
            slot: slot as i32,
            place: place as i32,
            count: count as i32,
        };
        let shape = shape([d.value_heads, layers], 4 * DELTA_DIM);
        // SAFETY: place, slot and rows are there.
        unsafe { self.launch(&DELTA_SETTLE, shape, &args) }
    }

    /// Copies the states at place `from` to place `to`, in all layers.
    ///
    /// # Errors
    /// [`Error::Shape`] for a place that does not exist; errors of the driver.
    pub fn copy_states(&self, states: &mut DeviceStates, from: usize, to: usize) -> Result<()> {
        let o = self.operands("copy_states");
        let StatesShape {
            delta: d,
            layers,
            places,
            ..
        } = states.shape;
        o.at_least("places", from.max(to) + 1, places)?;
        let whole = |all: &Buffer<f32>| o.of("states", all, &[all.len()]);
        let args = CopyStatesArgs {
            parts: [whole(&states.matrices)?, whole(&states.inputs)?],
            words: [
                d.value_heads * DELTA_DIM * DELTA_DIM / 4,
                INPUTS * d.channels() / 4,
            ]
            .map(|n| n as i32),
            places: places as i32,
            from: from as i32,
            to: to as i32,
            padding: [0; 1],
        };
        // SAFETY: both places are there.
        unsafe { self.launch(&COPY_STATES, shape([32, layers], 256), &args) }
    }
}

impl DeltaSpan {
    /// Its chunks: those in front of a snapshot end there.
    fn chunks(&self) -> usize {
        let marked = self.mark.map_or(0, |m| m.0);
        marked.div_ceil(CHUNK) + (self.rows.count - marked).div_ceil(CHUNK)
    }

    /// The argument, checked against `m` rows, which stand within `there`, and `places` states.
    pub(super) fn args(
        &self,
        o: &Operands<'_>,
        m: usize,
        there: &Places,
        places: usize,
    ) -> Result<delta_rows::DeltaSpan> {
        let SequenceRows {
            row,
            count,
            position,
            slot,
        } = self.rows;
        o.at_least("rows", row.saturating_add(count), m)?;
        o.at_least("rows of a sequence", 1, count)?;
        o.at_most("positions", there.positions, position.saturating_add(count))?;
        o.at_least("sequences", slot.saturating_add(1), there.slots)?;
        let (mark, place) = self.mark.unwrap_or((0, 0));
        if self.mark.is_some() {
            o.at_least("rows in front of a snapshot", CONV - 1, mark)?;
            o.at_most("rows in front of a snapshot", count, mark)?;
            o.at_least("places", place.saturating_add(1), places)?;
        }
        Ok(delta_rows::DeltaSpan {
            row: row as i32,
            count: count as i32,
            position: position as i32,
            slot: slot as i32,
            mark: mark as i32,
            place: place as i32,
            chunk: 0,
        })
    }
}
