//! Residuals of several streams, and what tables of n-grams add to them: what sequences keep of these, and the launchers
//! (formulas: `cuda/hyper.cu`).

pub(crate) mod few;

use super::delta::DeltaSpan;
use super::driver::{
    Address, Buffer, Checked, CopiedRows, Gpu, Operands, Staging, Stream, Strided,
};
use super::kernel::kernels;
use super::pack::SPAN;
use super::rows::{Places, RowsOut, shape};
use crate::cuda::hyper::{
    ActivateArgs, ConvolveNgramsArgs, GateNgramsArgs, InjectArgs, MixStreamsArgs, NormStreamsArgs,
    PartedSums, STREAM_THREADS as THREADS, SpreadArgs,
};
use crate::cuda::spans::{self, StreamSpan};
use nq_kernels::{Error, Result};

/// Bytes of shared memory of kernels that add up over a block.
const SUMS: usize = THREADS / 32 * size_of::<f32>();

/// The streams of a residual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamDims {
    /// How many there are.
    pub streams: usize,
    /// Values of each.
    pub width: usize,
}

impl StreamDims {
    /// Values of a row of all streams.
    pub fn all(self) -> usize {
        self.streams * self.width
    }
}

/// Rows of several streams to be normalized.
pub struct StreamNorm<'a> {
    /// `[., streams, width]`
    pub x: &'a Buffer<f32>,
    /// Which rows; `None`: the first ones.
    pub rows: Option<&'a Checked<u32>>,
    /// Gains, `[streams, width]`.
    pub gain: &'a Buffer<f32>,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// Sums of a product of `m` rows: `[parts, m, width]`.
#[derive(Clone, Copy)]
pub struct SumsOf<'a> {
    /// The values.
    pub sums: &'a Buffer<f32>,
    /// Parts of the inputs, whose sums are still to be added up.
    pub parts: usize,
    /// Outputs of the product.
    pub width: usize,
}

/// What weighs that which a block adds to streams.
pub struct StreamWeights<'a> {
    /// Of a value for each stream.
    pub inject: SumsOf<'a>,
    /// What is made of them, `[m, streams]`.
    pub weights: &'a mut Buffer<f32>,
}

impl SumsOf<'_> {
    fn args(&self, o: &Operands<'_>, m: usize) -> Result<PartedSums> {
        Ok(PartedSums {
            sums: o.of("sums", self.sums, &[self.parts, m, self.width])?,
            parts: self.parts as i32,
            width: self.width as i32,
        })
    }
}

/// Rows over which the convolution of n-grams goes.
pub struct ConvolvedRows<'a> {
    /// What is convolved, `[m, channels]`.
    pub normed: &'a Buffer<f32>,
    /// What is added as it is, `[m, channels]`.
    pub gated: &'a Buffer<f32>,
    /// Weights, `[channels, count]`.
    pub taps: &'a Buffer<f32>,
    /// Weights of a channel.
    pub count: usize,
    /// Rows between two taps.
    pub dilation: usize,
    /// The residual, `[m, channels]`.
    pub x: &'a mut Buffer<f32>,
}

/// What the sequences of a session keep beside pages and the states of recurrences, in places as those have.
pub struct KeptRows {
    values: Buffer<f32>, // [places, words]
    words: usize,
    places: usize,
}

/// What a layer has of [`KeptRows`].
#[derive(Clone, Copy)]
pub struct LayerRows<'a> {
    /// That of all layers.
    pub all: &'a KeptRows,
    /// The first value of the layer at each place.
    pub first: usize,
}

impl KeptRows {
    /// Allocates `places` of `words` values each.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu, places: usize, words: usize) -> Result<Self> {
        Ok(KeptRows {
            values: gpu.zeros("states of recurrences", places.saturating_mul(words))?,
            words,
            places,
        })
    }

    /// Bytes of all places.
    pub fn bytes(&self) -> usize {
        self.values.bytes()
    }

    /// Bytes of a place.
    pub(crate) fn place_bytes(&self) -> usize {
        self.words * size_of::<f32>()
    }

    fn check_place(&self, place: usize) -> Result<()> {
        match place < self.places {
            true => Ok(()),
            false => Err(Error::Shape {
                op: "kept rows",
                what: "places",
                expected: format!("{} at most", self.places),
                found: place.to_string(),
            }),
        }
    }
}

impl LayerRows<'_> {
    /// The argument, of `words` values of the layer at each place.
    pub(super) fn args(&self, o: &Operands<'_>, words: usize) -> Result<spans::KeptRows> {
        let all = self.all;
        o.at_most("kept values of a layer", all.words, self.first + words)?;
        // Kernels read four at once.
        if !self.first.is_multiple_of(4) || !all.words.is_multiple_of(4) {
            let found = format!("{} of {}", self.first, all.words);
            return o.refuse("kept values of a layer", "multiples of 4", found);
        }
        let len = all.places * all.words - self.first;
        Ok(spans::KeptRows {
            values: o.part("kept rows", &all.values, self.first, &[len])?,
            words: all.words as i32,
            padding: [0; 1],
        })
    }
}

/// The rows of each sequence of a pass: on the device, where kernels look for them, so that recorded steps find others.
pub struct StreamSpans {
    values: Buffer<StreamSpan>, // [sequences]
    staging: Option<Staging<StreamSpan>>,
    spans: Vec<DeltaSpan>,
    m: usize,
    there: Places,
    places: usize,
}

impl StreamSpans {
    /// Allocates them for up to `sequences` in a pass whose sequences stand within `there` and keep rows at `places` places.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu, sequences: usize, there: Places, places: usize) -> Result<Self> {
        Ok(StreamSpans {
            values: gpu.zeros("activations", sequences)?,
            staging: None,
            spans: Vec::new(),
            m: 0,
            there,
            places,
        })
    }

    /// The spans that were written last.
    pub(crate) fn all(&self) -> &[DeltaSpan] {
        &self.spans
    }

    /// The address, for `m` rows within `there` of sequences that keep rows in `kept`.
    pub(super) fn args(
        &self,
        o: &Operands<'_>,
        kept: &LayerRows<'_>,
        m: usize,
        there: &Places,
    ) -> Result<Address> {
        self.there.check(o, *there)?;
        o.at_most("rows of spans", m, self.m)?;
        o.at_most("places of kept rows", kept.all.places, self.places)?;
        o.of("spans", &self.values, &[self.spans.len()])
    }
}

kernels! {
    SPREAD_STREAMS: SpreadArgs = "spread_streams" in "hyper.cu",
        test "kernels/cuda/tests/cuda/hyper.rs::streams", bench "hyper";
    NORM_STREAMS: NormStreamsArgs = "norm_streams" in "hyper.cu",
        test "kernels/cuda/tests/cuda/hyper.rs::streams", bench "hyper";
    ACTIVATE_STREAMS: ActivateArgs = "activate_streams" in "hyper.cu",
        test "kernels/cuda/tests/cuda/hyper.rs::streams", bench "hyper";
    MIX_STREAMS: MixStreamsArgs = "mix_streams" in "hyper.cu",
        test "kernels/cuda/tests/cuda/hyper.rs::streams", bench "hyper";
    INJECT_STREAMS: InjectArgs = "inject_streams" in "hyper.cu",
        test "kernels/cuda/tests/cuda/hyper.rs::streams", bench "hyper";
    GATE_NGRAMS: GateNgramsArgs = "gate_ngrams" in "hyper.cu",
        test "kernels/cuda/tests/cuda/hyper.rs::ngrams", bench "hyper";
    CONVOLVE_NGRAMS: ConvolveNgramsArgs = "convolve_ngrams" in "hyper.cu",
        test "kernels/cuda/tests/cuda/hyper.rs::ngrams", bench "hyper";
}

impl Stream {
    /// Copies rows `from` `[m, width]` to each stream of `x` `[m, streams, width]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    pub fn spread_streams(
        &self,
        from: &Buffer<f32>,
        x: &mut Buffer<f32>,
        m: usize,
        dims: StreamDims,
    ) -> Result<()> {
        let o = self.operands("spread_streams");
        let args = SpreadArgs {
            from: o.of("from", from, &[m, dims.width])?,
            x: o.of("x", x, &[m, dims.streams, dims.width])?,
            width: dims.width as i32,
            streams: dims.streams as i32,
        };
        // SAFETY: the operands were checked.
        unsafe { self.launch(&SPREAD_STREAMS, shape([m, dims.streams], THREADS), &args) }
    }

    /// RMSNorm of each stream of `m` rows: `y` `[m, streams, width]`, which may be x, and `half` `[m, streams width padded to
    /// 256]` in FP16, in operand order.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    pub fn norm_streams(
        &self,
        norm: &StreamNorm<'_>,
        y: &mut Buffer<f32>,
        half: Option<&mut Buffer<u16>>,
        m: usize,
        dims: StreamDims,
    ) -> Result<()> {
        let o = self.operands("norm_streams");
        let StreamDims { streams, width } = dims;
        o.multiple("width", 8, width)?;
        let there = norm.rows.map_or(m, |rows| *rows.bounds());
        let padded = dims.all().next_multiple_of(SPAN);
        let args = NormStreamsArgs {
            x: o.of("x", norm.x, &[there, streams, width])?,
            rows: o.optional("rows", norm.rows.map(Checked::values), &[m])?,
            gain: o.of("gain", norm.gain, &[streams, width])?,
            y: o.of("y", y, &[m, streams, width])?,
            half: o.optional("FP16 output", half.as_deref(), &[m, padded])?,
            width: width as i32,
            streams: streams as i32,
            padded: padded as i32,
            eps: norm.eps,
        };
        let shape = shape([m, streams], THREADS).shared(SUMS);
        // SAFETY: the operands were checked; x has every listed row.
        unsafe { self.launch(&NORM_STREAMS, shape, &args) }
    }

    /// Makes of `low`, of `rank` values a row, the input of the next product, `half` `[m, rank padded to 256]`; and weights
    /// of the `streams`, for a block that adds to them.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    pub fn activate_streams(
        &self,
        low: SumsOf<'_>,
        half: &mut Buffer<u16>,
        added: Option<StreamWeights<'_>>,
        m: usize,
        streams: usize,
    ) -> Result<()> {
        let o = self.operands("activate_streams");
        o.at_most("streams", THREADS, streams)?;
        let padded = low.width.next_multiple_of(SPAN);
        let (inject, weights) = added.map(|a| (a.inject, a.weights)).unzip();
        if let Some(inject) = inject
            && inject.width != streams
        {
            return o.refuse("weights of streams", streams, inject.width);
        }
        let args = ActivateArgs {
            low: low.args(&o, m)?,
            inject: inject.map_or(Ok(PartedSums::default()), |sums| sums.args(&o, m))?,
            half: o.of("FP16 output", half, &[m, padded])?,
            weights: o.optional("weights of streams", weights.as_deref(), &[m, streams])?,
            padded: padded as i32,
            streams: streams as i32,
            m: m as i32,
            padding: [0; 1],
        };
        // SAFETY: the operands were checked.
        unsafe { self.launch(&ACTIVATE_STREAMS, shape([m, 1], THREADS), &args) }
    }

    /// What a block reads of streams `n`, normalized, and their `gates`, both `[m, streams, width]`; `added` `[m, width]`
    /// becomes zero.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    pub fn mix_streams(
        &self,
        n: &Buffer<f32>,
        gates: &Buffer<f32>,
        out: &RowsOut<'_>,
        added: Option<&mut Buffer<f32>>,
        m: usize,
        dims: StreamDims,
    ) -> Result<()> {
        let o = self.operands("mix_streams");
        let StreamDims { streams, width } = dims;
        o.multiple("width", 8, width)?;
        let (y, half) = out.addresses(&o, m, width)?;
        let padded = width.next_multiple_of(SPAN);
        let args = MixStreamsArgs {
            n: o.of("n", n, &[m, streams, width])?,
            gates: o.of("gates", gates, &[m, streams, width])?,
            y,
            half,
            added: o.optional("added", added.as_deref(), &[m, width])?,
            width: width as i32,
            streams: streams as i32,
            padded: padded as i32,
            padding: [0; 1],
        };
        let shape = shape([m, padded.div_ceil(2 * THREADS)], THREADS);
        // SAFETY: the operands were checked.
        unsafe { self.launch(&MIX_STREAMS, shape, &args) }
    }

    /// Adds `added` `[m, width]`, times the `weights` `[m, streams]`, to `x` `[m, streams, width]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    pub fn inject_streams(
        &self,
        added: &Buffer<f32>,
        weights: &Buffer<f32>,
        x: &mut Buffer<f32>,
        m: usize,
        dims: StreamDims,
    ) -> Result<()> {
        let o = self.operands("inject_streams");
        let StreamDims { streams, width } = dims;
        let args = InjectArgs {
            added: o.of("added", added, &[m, width])?,
            weights: o.of("weights", weights, &[m, streams])?,
            x: o.of("x", x, &[m, streams, width])?,
            width: width as i32,
            streams: streams as i32,
        };
        let shape = shape([m, width.div_ceil(THREADS)], THREADS);
        // SAFETY: the operands were checked.
        unsafe { self.launch(&INJECT_STREAMS, shape, &args) }
    }

    /// Writes the spans of a pass of `m` rows, in order with the stream's other work.
    ///
    /// # Errors
    /// [`Error::Shape`] for rows or places that are not there; errors of the driver.
    pub fn write_spans(&self, to: &mut StreamSpans, spans: &[DeltaSpan], m: usize) -> Result<()> {
        let o = self.operands("spans of streams");
        let one = |span: &DeltaSpan| {
            let of_delta = span.args(&o, m, &to.there, to.places)?;
            Ok(StreamSpan {
                row: of_delta.row,
                count: of_delta.count,
                position: of_delta.position,
                slot: of_delta.slot,
                mark: of_delta.mark,
                place: of_delta.place,
            })
        };
        let values = spans.iter().map(one).collect::<Result<Vec<_>>>()?;
        (to.spans, to.m) = (spans.to_vec(), m);
        self.write_staged(&mut to.values, 0, &mut to.staging, &values)
    }

    /// Gates of n-grams: of `keys` and `queries`, normalized, and `values` `[m, width]`; `out` `[m, streams, width]` may be
    /// the keys.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    pub fn gate_ngrams(
        &self,
        [keys, queries, values]: [&Buffer<f32>; 3],
        out: &mut Buffer<f32>,
        m: usize,
        dims: StreamDims,
    ) -> Result<()> {
        let o = self.operands("gate_ngrams");
        let StreamDims { streams, width } = dims;
        let args = GateNgramsArgs {
            keys: o.of("keys", keys, &[m, streams, width])?,
            queries: o.of("queries", queries, &[m, streams, width])?,
            values: o.of("values", values, &[m, width])?,
            out: o.of("out", out, &[m, streams, width])?,
            width: width as i32,
            streams: streams as i32,
        };
        let shape = shape([m, streams], THREADS).shared(SUMS);
        // SAFETY: the operands were checked.
        unsafe { self.launch(&GATE_NGRAMS, shape, &args) }
    }

    /// The convolution over n-grams' values of `m` rows, which `spans` has all of, behind those that `kept` has of their
    /// sequences, which stand within `there`. What `kept` has is brought forward.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    pub fn convolve_ngrams(
        &self,
        rows: ConvolvedRows<'_>,
        spans: &StreamSpans,
        kept: LayerRows<'_>,
        m: usize,
        there: &Places,
    ) -> Result<()> {
        let o = self.operands("convolve_ngrams");
        let ConvolvedRows {
            normed,
            gated,
            taps,
            count,
            dilation,
            x,
        } = rows;
        o.multiple("weights of the convolution", count.max(1), taps.len())?;
        let channels = taps.len() / count;
        let args = ConvolveNgramsArgs {
            normed: o.of("normed", normed, &[m, channels])?,
            gated: o.of("gated", gated, &[m, channels])?,
            taps: o.of("weights of the convolution", taps, &[channels, count])?,
            x: o.of("x", x, &[m, channels])?,
            kept: kept.args(&o, (count - 1) * dilation * channels)?,
            channels: channels as i32,
            count: count as i32,
            dilation: dilation as i32,
            spans: spans.args(&o, &kept, m, there)?,
            before_spans: [0; 1],
        };
        let shape = shape([channels.div_ceil(THREADS), spans.all().len()], THREADS);
        // SAFETY: the operands were checked, and that the spans' rows and places are there.
        unsafe { self.launch(&CONVOLVE_NGRAMS, shape, &args) }
    }

    /// Copies what is kept at place `from` to place `to`.
    ///
    /// # Errors
    /// [`Error::Shape`] for a place that does not exist; errors of the driver.
    pub fn copy_kept(&self, kept: &mut KeptRows, from: usize, to: usize) -> Result<()> {
        let words = kept.words;
        let place = |place: usize| Strided {
            at: place * words,
            stride: words,
        };
        kept.check_place(from.max(to))?;
        let all = kept.values.share();
        self.copy_rows(CopiedRows {
            from: &all,
            begin: place(from),
            to: &mut kept.values,
            end: place(to),
            rows: 1,
            width: words,
        })
    }

    /// Appends what is kept at `place` to `out`, once the stream's work is done.
    ///
    /// # Errors
    /// As of [`Stream::copy_kept`].
    pub(crate) fn read_kept(&self, kept: &KeptRows, place: usize, out: &mut Vec<u8>) -> Result<()> {
        kept.check_place(place)?;
        self.synchronize()?;
        let mut values = vec![0f32; kept.words];
        kept.values.read(place * kept.words, &mut values)?;
        out.extend_from_slice(bytemuck::cast_slice(&values));
        Ok(())
    }

    /// Makes what is kept at `place` that of `bytes`, once the stream's work is done.
    ///
    /// # Errors
    /// [`Error::Shape`] for a place that does not exist, or another number of bytes; errors of the driver.
    pub(crate) fn write_kept(&self, kept: &mut KeptRows, place: usize, bytes: &[u8]) -> Result<()> {
        kept.check_place(place)?;
        let mut values = vec![0f32; bytes.len() / size_of::<f32>()];
        if values.len() != kept.words {
            return Err(Error::Shape {
                op: "kept rows",
                what: "bytes",
                expected: kept.place_bytes().to_string(),
                found: bytes.len().to_string(),
            });
        }
        bytemuck::cast_slice_mut(&mut values).copy_from_slice(bytes);
        self.synchronize()?;
        kept.values.write(place * kept.words, &values)
    }
}
