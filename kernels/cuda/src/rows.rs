//! Rows of activations on the device, and operations on each of them.

use super::driver::{Address, Buffer, Checked, Followed, LaunchShape, Operands, Stream};
use super::kernel::{Kernel, kernels};
use super::linear::DeviceLinear;
use super::pack::SPAN;
use crate::cuda::put::{MOST_WORDS, PutArgs};
use crate::cuda::reference::{EmbedArgs, NormArgs, ScaleRowsArgs, SiluArgs};
use bytemuck::Pod;
use nq_kernels::Result;
use nq_model::Dims;

/// Most rows of one sequence in a step (`cuda/attention_decode.cuh`).
pub const MOST_RUN: usize = crate::cuda::attention_decode::MOST_RUN;

pub use crate::cuda::rows::{Row, Step};

impl Step {
    /// The word that is the token.
    pub(super) const TOKEN: usize = std::mem::offset_of!(Step, token) / size_of::<u32>();
}

/// Bounds on tokens' places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// Number of positions per sequence.
    pub positions: usize,
    /// Number of sequences.
    pub slots: usize,
    /// Rows of the rotary table behind those of positions, for rows of images.
    pub images: usize,
}

impl Places {
    fn has(&self, position: i32, slot: i32, shift: i32) -> bool {
        let below = |v: i32, n: usize| usize::try_from(v).is_ok_and(|v| v < n);
        let turn = position.saturating_add(shift);
        below(position, self.positions)
            && below(slot, self.slots)
            && below(turn, self.positions + self.images)
    }

    /// Refuses places that are not all within `there`.
    pub(super) fn check(&self, o: &Operands<'_>, there: Places) -> Result<()> {
        o.at_most("positions of rows", there.positions, self.positions)?;
        o.at_most("sequences of rows", there.slots, self.slots)
    }
}

impl Followed for Row {
    type Bounds = Places;

    fn is_within(&self, places: &Places) -> bool {
        places.has(self.position, self.slot, self.shift)
    }
}

/// Bounds on steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepBounds {
    /// Bounds on the rows' places.
    pub places: Places,
    /// Size of the vocabulary.
    pub tokens: usize,
}

impl Followed for Step {
    type Bounds = StepBounds;

    fn is_within(&self, bounds: &StepBounds) -> bool {
        let behind = 0..=self.position.clamp(0, MOST_RUN as i32);
        bounds.places.has(self.position, self.slot, self.shift)
            && self.shift <= 0
            && (self.token as usize) < bounds.tokens
            && behind.contains(&self.behind)
    }
}

/// Launch shape of a kernel that starts when the previous one has ended.
pub(super) fn shape([x, y]: [usize; 2], threads: usize) -> LaunchShape {
    LaunchShape::new([x, y, 1], threads)
}

/// Output of a row-wise kernel: f32, FP16 padded to whole spans and in operand order
/// ([`operand_index`](super::pack::operand_index)), or both.
#[derive(Default)]
pub struct RowsOut<'a> {
    /// `[m, width]`
    pub full: Option<&'a mut Buffer<f32>>,
    /// `[m, width padded to 256]`
    pub half: Option<&'a mut Buffer<u16>>,
}

impl<'a> RowsOut<'a> {
    /// Rows in f32 alone.
    pub fn full(rows: &'a mut Buffer<f32>) -> Self {
        RowsOut {
            full: Some(rows),
            half: None,
        }
    }

    /// Rows in FP16 alone.
    pub fn half(rows: &'a mut Buffer<u16>) -> Self {
        RowsOut {
            full: None,
            half: Some(rows),
        }
    }

    pub(super) fn addresses(
        &self,
        o: &Operands<'_>,
        m: usize,
        width: usize,
    ) -> Result<(Address, Address)> {
        let padded = width.next_multiple_of(SPAN);
        Ok((
            o.optional("f32 output", self.full.as_deref(), &[m, width])?,
            o.optional("FP16 output", self.half.as_deref(), &[m, padded])?,
        ))
    }
}

kernels! {
    PUT: PutArgs = "put" in "put.cu",
        test "kernels/cuda/tests/cuda/driver.rs::values_are_put_in_order", bench "rows";
    EMBED: EmbedArgs = "embed" in "reference.cu",
        test "kernels/cuda/tests/cuda/mod.rs::embeddings", bench "rows";
    EMBED_STEP: EmbedArgs = "embed_step" in "reference.cu",
        test "kernels/cuda/tests/cuda/mod.rs::embeddings", bench "rows";
    RMS_NORM: NormArgs = "rms_norm" in "reference.cu",
        test "kernels/cuda/tests/cuda/rows.rs::norms", bench "rows";
    SILU_MUL: SiluArgs = "silu_mul" in "reference.cu",
        test "kernels/cuda/tests/cuda/rows.rs::gates_times_ups", bench "rows";
    SCALE_ROWS: ScaleRowsArgs = "scale_rows" in "reference.cu",
        test "kernels/cuda/tests/cuda/rows.rs::scaled_rows", bench "rows";
}

impl Stream {
    /// Writes `values` to `to` from index `at` on, in order with the stream's other work; they may
    /// change or be dropped right after the call.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if there is no room for them; errors of the driver.
    pub fn put<T: Pod>(&self, to: &mut Buffer<T>, at: usize, values: &[T]) -> Result<()> {
        const {
            assert!(size_of::<T>() <= 4 * MOST_WORDS && size_of::<T>().is_multiple_of(4));
            assert!(align_of::<T>().is_multiple_of(4));
        }
        let o = self.operands("put");
        let together = 4 * MOST_WORDS / size_of::<T>();
        for (i, some) in values.chunks(together).enumerate() {
            let mut args = PutArgs {
                to: o.part("values", to, at + i * together, &[some.len()])?,
                words: (size_of_val(some) / 4) as i32,
                value: [0; MOST_WORDS],
                padding: [0; 1],
            };
            let bytes: &[u8] = bytemuck::cast_slice(some);
            bytemuck::cast_slice_mut(&mut args.value)[..bytes.len()].copy_from_slice(bytes);
            // SAFETY: the values are inside the buffer.
            unsafe { self.launch(&PUT, shape([1, 1], MOST_WORDS), &args)? };
        }
        Ok(())
    }

    /// `x[i]` = row `tokens[i]` of `embedding`, `[m, width]`.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn embed(
        &self,
        embedding: &DeviceLinear,
        tokens: &Checked<u32>,
        x: &mut Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        let o = self.operands("embed");
        o.at_most("bound of tokens", embedding.rows(), *tokens.bounds())?;
        let tokens = (tokens.values(), 0);
        self.look_up((&EMBED, shape([m, 1], 256)), embedding, tokens, x, m)
    }

    /// Rows of `embedding` by a kernel for packed weights, or that for trellis codes: token i is the word at `at` of
    /// value i of `tokens`.
    fn look_up<T: Pod>(
        &self,
        (kernel, shape): (&'static Kernel<EmbedArgs>, LaunchShape),
        embedding: &DeviceLinear,
        (tokens, at): (&Buffer<T>, usize),
        x: &mut Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        if embedding.is_trellis() {
            return self.trellis_embed(embedding, tokens, at, x, m);
        }
        let o = self.operands("embed");
        let args = EmbedArgs {
            w: embedding.args(&o)?,
            tokens: o.of("tokens", tokens, &[m])?,
            x: o.of("x", x, &[m, embedding.inputs()])?,
        };
        // SAFETY: the operands were checked; callers answer for the tokens.
        unsafe { self.launch(kernel, shape, &args) }
    }

    /// RMSNorm of rows of `x` `[., width]` with `gain`: of rows `0..m`, or of the listed rows.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn rms_norm(
        &self,
        x: &Buffer<f32>,
        rows: Option<&Checked<u32>>,
        gain: &Buffer<f32>,
        out: &RowsOut<'_>,
        m: usize,
        eps: f32,
    ) -> Result<()> {
        self.copy_normed(x, rows, Some((gain, eps)), gain.len(), out, m)
    }

    /// Copies `m` rows `[m, width]` to each of `out`, unchanged but for rounding.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub(crate) fn convert_rows(
        &self,
        x: &Buffer<f32>,
        out: &RowsOut<'_>,
        dims: Dims,
    ) -> Result<()> {
        let (m, width) = dims.pair();
        self.copy_normed(x, None, None, width, out, m)
    }

    fn copy_normed(
        &self,
        x: &Buffer<f32>,
        rows: Option<&Checked<u32>>,
        norm: Option<(&Buffer<f32>, f32)>,
        width: usize,
        out: &RowsOut<'_>,
        m: usize,
    ) -> Result<()> {
        let o = self.operands("rms_norm");
        o.multiple("width", 4, width)?;
        let there = rows.map_or(m, |rows| *rows.bounds());
        let (y, half) = out.addresses(&o, m, width)?;
        let args = NormArgs {
            x: o.of("x", x, &[there, width])?,
            rows: o.optional("rows", rows.map(Checked::values), &[m])?,
            gain: o.optional("gain", norm.map(|(gain, _)| gain), &[width])?,
            y,
            half,
            width: width as i32,
            padded: width.next_multiple_of(SPAN) as i32,
            eps: norm.map_or(0.0, |(_, eps)| eps),
            padding: [0; 1],
        };
        // SAFETY: the operands were checked; x has every listed row.
        unsafe { self.launch(&RMS_NORM, shape([m, 1], 256), &args) }
    }

    /// `silu(gate) * up` for rows `[m, 2 * width]` of interleaved gate and up values.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn silu_mul(
        &self,
        x: &Buffer<f32>,
        out: &RowsOut<'_>,
        m: usize,
        width: usize,
    ) -> Result<()> {
        let o = self.operands("silu_mul");
        // Gate and up alternate every eight values.
        o.multiple("width", 8, width)?;
        let (y, half) = out.addresses(&o, m, width)?;
        let args = SiluArgs {
            x: o.of("x", x, &[2, m, width])?,
            y,
            half,
            width: width as i32,
            padded: width.next_multiple_of(SPAN) as i32,
        };
        // SAFETY: the operands were checked.
        unsafe { self.launch(&SILU_MUL, shape([m, 1], 256), &args) }
    }

    /// Multiplies each of `m` rows of `width` values by the sigmoid of its score: rows in f32, in FP16, or both.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn scale_rows(&self, scores: &Buffer<f32>, rows: &RowsOut<'_>, dims: Dims) -> Result<()> {
        let (m, width) = dims.pair();
        let o = self.operands("scale_rows");
        let (full, half) = rows.addresses(&o, m, width)?;
        let scores = o.of("scores", scores, &[m])?;
        let padded = width.next_multiple_of(SPAN);
        // Rows of both kinds are as wide, or each kind has its own; what FP16 rows have behind their width is zero.
        let all = match (rows.full.is_some(), rows.half.is_some()) {
            (true, true) if padded == width => vec![(full, half, width)],
            (has_full, has_half) => [
                has_full.then_some((full, Address::NULL, width)),
                has_half.then_some((Address::NULL, half, padded)),
            ]
            .into_iter()
            .flatten()
            .collect(),
        };
        for (full, half, width) in all {
            let args = ScaleRowsArgs {
                scores,
                full,
                half,
                width: width as i32,
                padding: [0; 1],
            };
            let threads = width.next_multiple_of(32).clamp(32, 256);
            // SAFETY: the operands were checked.
            unsafe { self.launch(&SCALE_ROWS, shape([m, 1], threads).overlapping(), &args)? };
        }
        Ok(())
    }

    /// Looks up the embeddings of the step's `m` tokens: the residuals `x` `[m, width]`.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn embed_step(
        &self,
        embedding: &DeviceLinear,
        step: &Checked<Step>,
        x: &mut Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        let o = self.operands("embed_step");
        let width = embedding.inputs();
        o.at_most("bound of tokens", embedding.rows(), step.bounds().tokens)?;
        let shape = shape([width.div_ceil(256), m], 256);
        let tokens = (step.values(), Step::TOKEN);
        self.look_up((&EMBED_STEP, shape), embedding, tokens, x, m)
    }
}

#[cfg(test)]
mod tests {
    use super::{Followed, Places, Row, Step, StepBounds};

    #[test]
    fn places_outside_are_told() {
        let places = Places {
            positions: 5,
            slots: 2,
            images: 0,
        };
        let row = |position, slot| Row {
            position,
            slot,
            ..Row::default()
        };
        assert!(row(0, 0).is_within(&places) && row(4, 1).is_within(&places));
        for outside in [row(5, 0), row(0, 2), row(-1, 0), row(0, -1)] {
            assert!(!outside.is_within(&places), "{outside:?}");
        }
        let bounds = StepBounds { places, tokens: 3 };
        let step = |position, token| Step {
            position,
            token,
            ..Step::default()
        };
        assert!(step(4, 2).is_within(&bounds));
        let shifted = |shift| Row { shift, ..row(4, 0) };
        let images = Places {
            images: 2,
            ..places
        };
        assert!(shifted(-4).is_within(&places) && shifted(2).is_within(&images));
        assert!(!shifted(-5).is_within(&places) && !shifted(1).is_within(&places));
        assert!(!shifted(3).is_within(&images) && !shifted(i32::MAX).is_within(&images));
        let forward = Step {
            shift: 1,
            ..step(0, 2)
        };
        assert!(!forward.is_within(&bounds));
        assert!(!step(4, 3).is_within(&bounds) && !step(5, 2).is_within(&bounds));
    }
}
