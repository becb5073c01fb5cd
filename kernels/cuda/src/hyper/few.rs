//! What blocks read of few rows of several streams, by two kernels (formulas: `cuda/hyper.cu`).

use super::StreamDims;
use crate::cuda::hyper::{
    ContractLowArgs, ContractMixArgs, FEW_STREAM_ROWS, LOW_FOURS, LOW_SPANS, MOST_STREAMS,
};
use crate::driver::{Address, Buffer, Gpu, Operands, Stream};
use crate::kernel::kernels;
use crate::linear::DeviceLinear;
use crate::pack::{PackedKind, SPAN, TILE};
use crate::rows::shape;
use nq_kernels::Result;

/// Threads of a block of `contract_low`, and bytes of its `ContractLowShared`.
const LOW_THREADS: usize = LOW_SPANS * 32;
const LOW_SHARED: usize =
    (LOW_SPANS * (1 + FEW_STREAM_ROWS * TILE) * size_of::<f32>()).next_multiple_of(16);

/// What weighs the streams that a block, or the head, reads.
#[derive(Clone, Copy)]
pub struct StreamMixing<'a> {
    /// The gains of the norm of each stream, `[streams, width]`.
    pub gain: &'a Buffer<f32>,
    /// Added to the mean of squares.
    pub eps: f32,
    /// `[rank, streams width]`
    pub down: &'a DeviceLinear,
    /// `[streams width, rank]`
    pub up: &'a DeviceLinear,
    /// `[streams, streams width]`, of a block that adds to streams.
    pub inject: Option<&'a DeviceLinear>,
}

impl StreamMixing<'_> {
    /// True if [`Stream::contract_low`] and [`Stream::contract_mix`] serve `m` rows of these streams.
    pub fn fits(&self, m: usize, dims: StreamDims) -> bool {
        let all = [self.down, self.up].into_iter().chain(self.inject);
        let plain = |w: &DeviceLinear| w.kind() == PackedKind::Fp16 && w.order.is_none();
        m <= FEW_STREAM_ROWS
            && dims.streams <= MOST_STREAMS
            && dims.width.is_multiple_of(TILE)
            && dims.width <= 4 * LOW_FOURS * LOW_THREADS
            && all.into_iter().all(plain)
    }

    /// Rows of `down`, and those of `inject` behind them, each padded to whole tiles.
    fn outputs(&self) -> [usize; 2] {
        let tiles = |w: &DeviceLinear| w.rows().next_multiple_of(TILE);
        [tiles(self.down), self.inject.map_or(0, tiles)]
    }
}

/// What the kernels that contract few rows of streams hand each other.
pub struct FewStreams {
    sums: Buffer<f32>,   // [parts, rows, outputs]
    scales: Buffer<f32>, // [rows, streams]
}

impl FewStreams {
    /// Allocates it for up to `rows` rows of `dims` that are weighed by `rank` values.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](nq_kernels::Error::DeviceMemory).
    pub fn new(gpu: &Gpu, rows: usize, dims: StreamDims, rank: usize) -> Result<Self> {
        let rows = rows.min(FEW_STREAM_ROWS);
        let outputs = rank.next_multiple_of(TILE) + dims.streams.next_multiple_of(TILE);
        let parts = low_parts(dims);
        Ok(FewStreams {
            sums: gpu.zeros("activations", parts * rows * outputs)?,
            scales: gpu.zeros("activations", rows * dims.streams)?,
        })
    }
}

/// Parts in which [`Stream::contract_low`] leaves its sums.
fn low_parts(dims: StreamDims) -> usize {
    dims.all().div_ceil(LOW_SPANS * SPAN)
}

/// What the block before has added to streams, and where they go with it.
pub struct JoinedStreams<'a> {
    /// `[m, width]`
    pub added: &'a Buffer<f32>,
    /// What each stream gets of it, `[m, streams]`.
    pub weights: &'a Buffer<f32>,
    /// `[m, streams, width]`
    pub to: &'a mut Buffer<f32>,
}

/// What a block that adds to streams begins with.
pub struct BlockAdds<'a> {
    /// Becomes zero, `[m, width]`.
    pub added: &'a mut Buffer<f32>,
    /// Becomes what each stream will get of it, `[m, streams]`.
    pub weights: &'a mut Buffer<f32>,
}

kernels! {
    CONTRACT_LOW: ContractLowArgs = "contract_low" in "hyper.cu",
        test "kernels/cuda/tests/cuda/hyper.rs::few_rows", bench "hyper";
    CONTRACT_MIX: ContractMixArgs = "contract_mix" in "hyper.cu",
        test "kernels/cuda/tests/cuda/hyper.rs::few_rows", bench "hyper";
}

/// Refuses what [`StreamMixing::fits`] does not take, and weights of other sizes than the streams'.
fn check_few(
    o: &Operands<'_>,
    mixing: &StreamMixing<'_>,
    m: usize,
    dims: StreamDims,
) -> Result<()> {
    if !mixing.fits(m, dims) {
        let expected = format!("at most {FEW_STREAM_ROWS} of streams with weights in FP16");
        return o.refuse("rows", expected, format!("{m} of {dims:?}"));
    }
    let (all, rank) = (dims.all(), mixing.down.rows());
    let sized = |what, w: &DeviceLinear, rows: usize, inputs: usize| {
        if (w.rows(), w.inputs()) == (rows, inputs) {
            return Ok(());
        }
        let found = format!("[{}, {}]", w.rows(), w.inputs());
        o.refuse(what, format!("[{rows}, {inputs}]"), found)
    };
    sized("down", mixing.down, rank, all)?;
    sized("up", mixing.up, all, rank)?;
    mixing
        .inject
        .map_or(Ok(()), |w| sized("inject", w, dims.streams, all))
}

impl Stream {
    /// The first half of what a block reads of `m` rows, of few and of weights in FP16 ([`StreamMixing::fits`]): the norms of the
    /// streams `x` `[m, streams, width]`, which first get what the block before has added, and their products with `down` and
    /// `inject`.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn contract_low(
        &self,
        mixing: &StreamMixing<'_>,
        x: &Buffer<f32>,
        joined: Option<JoinedStreams<'_>>,
        to: &mut FewStreams,
        m: usize,
        dims: StreamDims,
    ) -> Result<()> {
        let o = self.operands("contract_low");
        let StreamDims { streams, width } = dims;
        check_few(&o, mixing, m, dims)?;
        let outputs: usize = mixing.outputs().iter().sum();
        let (down, _, down_scale) = mixing.down.operands(&o)?;
        let inject = mixing.inject.map(|w| w.operands(&o)).transpose()?;
        let (inject, _, inject_scale) = inject.unwrap_or((Address::NULL, Address::NULL, 0.0));
        let of_all = [m, streams, width];
        let joined = joined.as_ref();
        let args = ContractLowArgs {
            x: o.of("x", x, &of_all)?,
            added: o.optional("added", joined.map(|j| j.added), &[m, width])?,
            weights: o.optional("weights", joined.map(|j| j.weights), &[m, streams])?,
            joined: o.optional("streams", joined.map(|j| &*j.to), &of_all)?,
            gain: o.of("gain", mixing.gain, &[streams, width])?,
            down,
            inject,
            sums: o.of("sums", &to.sums, &[low_parts(dims), m, outputs])?,
            scales: o.of("scales", &to.scales, &[m, streams])?,
            m: m as i32,
            streams: streams as i32,
            width: width as i32,
            low_tiles: mixing.down.rows().div_ceil(TILE) as i32,
            spans: mixing.down.spans() as i32,
            outputs: outputs as i32,
            eps: mixing.eps,
            down_scale,
            inject_scale,
            padding: [0; 1],
        };
        let shape = shape([outputs / TILE, low_parts(dims)], LOW_THREADS)
            .shared(LOW_SHARED + 2 * m * LOW_SPANS * SPAN)
            .overlapping();
        // SAFETY: the operands were checked; streams do not go where they come from.
        unsafe { self.launch(&CONTRACT_LOW, shape, &args) }
    }

    /// The second half: what a block reads of the streams `x`, joined, is `y` `[m, width]`.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub fn contract_mix(
        &self,
        mixing: &StreamMixing<'_>,
        x: &Buffer<f32>,
        contracted: &FewStreams,
        y: &mut Buffer<f32>,
        adds: Option<BlockAdds<'_>>,
        m: usize,
        dims: StreamDims,
    ) -> Result<()> {
        let o = self.operands("contract_mix");
        let StreamDims { streams, width } = dims;
        check_few(&o, mixing, m, dims)?;
        let [low_width, of_inject] = mixing.outputs();
        let (up, _, scale) = mixing.up.operands(&o)?;
        let (rank, outputs) = (mixing.up.inputs(), low_width + of_inject);
        let adds = adds.as_ref();
        if adds.is_some() && mixing.inject.is_none() {
            return o.refuse("weights of what a block adds", "a product", "none");
        }
        let args = ContractMixArgs {
            sums: o.of("sums", &contracted.sums, &[low_parts(dims), m, outputs])?,
            x: o.of("x", x, &[m, streams, width])?,
            scales: o.of("scales", &contracted.scales, &[m, streams])?,
            gain: o.of("gain", mixing.gain, &[streams, width])?,
            up,
            y: o.of("y", y, &[m, width])?,
            added: o.optional("added", adds.map(|a| &*a.added), &[m, width])?,
            weights: o.optional("weights", adds.map(|a| &*a.weights), &[m, streams])?,
            parts: low_parts(dims) as i32,
            m: m as i32,
            streams: streams as i32,
            width: width as i32,
            rank: rank as i32,
            low_width: low_width as i32,
            outputs: outputs as i32,
            spans: mixing.up.spans() as i32,
            scale,
            padding: [0; 1],
        };
        let inputs = 2 * m * rank.next_multiple_of(32);
        let shape = shape([width / TILE, 1], 32 * streams)
            .shared(2 * streams * m * TILE * size_of::<f32>() + inputs)
            .overlapping();
        // SAFETY: the operands were checked.
        unsafe { self.launch(&CONTRACT_MIX, shape, &args) }
    }
}
