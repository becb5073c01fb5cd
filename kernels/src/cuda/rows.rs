//! Rows of activations on the device, and what is done to each of them.

use super::driver::{Address, Buffer, LaunchShape, Stream};
use super::linear::{DeviceLinear, PackedArgs};
use super::pack::SPAN;
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};

/// A token's place: `Row` of `cuda/rows.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Row {
    /// Position in its sequence.
    pub position: i32,
    /// Its sequence.
    pub slot: i32,
}

/// Where a decode step stands: `Step` of `cuda/common.cuh`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Step {
    /// Position of the token that is fed.
    pub position: i32,
    /// Its sequence.
    pub slot: i32,
    /// The token.
    pub token: u32,
    /// Tokens sampled since the steps were queued.
    pub drawn: i32,
}

/// Refuses an operand of fewer values than `expected`.
pub(super) fn at_least(
    op: &'static str,
    what: &'static str,
    expected: usize,
    found: usize,
) -> Result<()> {
    if found >= expected {
        return Ok(());
    }
    Err(Error::Shape {
        op,
        what,
        expected: format!("at least {expected}"),
        found: found.to_string(),
    })
}

/// Of a kernel that starts when the one before it has ended.
pub(super) fn shape(grid: (usize, usize), threads: usize) -> LaunchShape {
    LaunchShape {
        grid: (grid.0, grid.1, 1),
        threads,
        shared: 0,
        overlap: false,
    }
}

/// Where a row-wise kernel puts its result: f32, FP16 padded to whole spans and in operand order
/// ([`operand_index`](super::pack::operand_index)), or both.
#[derive(Default)]
pub struct RowsOut<'a> {
    /// `[m, width]`
    pub full: Option<&'a mut Buffer<f32>>,
    /// `[m, width padded to 256]`
    pub half: Option<&'a mut Buffer<u16>>,
}

impl RowsOut<'_> {
    fn addresses(&self, op: &'static str, m: usize, width: usize) -> Result<(Address, Address)> {
        let padded = width.next_multiple_of(SPAN);
        let mut both = (Address::NULL, Address::NULL);
        if let Some(full) = &self.full {
            at_least(op, "f32 output", m * width, full.len())?;
            both.0 = full.at(0);
        }
        if let Some(half) = &self.half {
            at_least(op, "FP16 output", m * padded, half.len())?;
            both.1 = half.at(0);
        }
        Ok(both)
    }
}

impl Stream {
    /// Writes `values` to `to` from index `at` on, in order with the stream's other work; they may
    /// change or go right after.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is no room for them; the driver's.
    pub fn put<T: Pod>(&self, to: &mut Buffer<T>, at: usize, values: &[T]) -> Result<()> {
        /// `MOST_WORDS` of `cuda/put.cu`.
        const MOST: usize = 64;
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            to: Address,
            words: i32,
            value: [u32; MOST],
        }
        const {
            assert!(size_of::<T>() <= 4 * MOST && size_of::<T>().is_multiple_of(4));
            assert!(align_of::<T>().is_multiple_of(4));
        }
        at_least("put", "values", at + values.len(), to.len())?;
        let together = 4 * MOST / size_of::<T>();
        for (i, some) in values.chunks(together).enumerate() {
            let mut args = Args {
                to: to.at(at + i * together),
                words: (size_of_val(some) / 4) as i32,
                value: [0; MOST],
            };
            let bytes = bytemuck::cast_slice(some);
            bytemuck::bytes_of_mut(&mut args.value)[..bytes.len()].copy_from_slice(bytes);
            // SAFETY: the arguments are `PutArgs` of the kernel, copied at the launch; the values
            // lie in the buffer.
            unsafe { self.launch("put", shape((1, 1), MOST), &args)? };
        }
        Ok(())
    }

    /// `x[i]` = row `tokens[i]` of `embedding`, `[m, width]`. Tokens must be in range.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn embed(
        &self,
        embedding: &DeviceLinear,
        tokens: &Buffer<u32>,
        x: &mut Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            w: PackedArgs,
            tokens: Address,
            x: Address,
        }
        at_least("embed", "tokens", m, tokens.len())?;
        at_least("embed", "x", m * embedding.inputs(), x.len())?;
        let args = Args {
            w: embedding.args(),
            tokens: tokens.at(0),
            x: x.at(0),
        };
        // SAFETY: the arguments are the kernel's; x holds m rows. Tokens are checked by the
        // engine against the vocabulary, which is the embedding's height.
        unsafe { self.launch("embed", shape((m, 1), 256), &args) }
    }

    /// RMSNorm of rows of `x` `[., width]` with `gain`: of rows `0..m`, or of those listed.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn rms_norm(
        &self,
        x: &Buffer<f32>,
        rows: Option<&Buffer<i32>>,
        gain: &Buffer<f32>,
        out: &RowsOut<'_>,
        m: usize,
        eps: f32,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            x: Address,
            rows: Address,
            gain: Address,
            y: Address,
            half: Address,
            width: i32,
            padded: i32,
            eps: f32,
        }
        let width = gain.len();
        if !width.is_multiple_of(4) {
            return Err(Error::Shape {
                op: "rms_norm",
                what: "width",
                expected: "a multiple of 4".into(),
                found: width.to_string(),
            });
        }
        at_least(
            "rms_norm",
            "x",
            width * if rows.is_some() { 1 } else { m },
            x.len(),
        )?;
        if let Some(rows) = rows {
            at_least("rms_norm", "rows", m, rows.len())?;
        }
        let (y, half) = out.addresses("rms_norm", m, width)?;
        let args = Args {
            x: x.at(0),
            rows: rows.map_or(Address::NULL, |r| r.at(0)),
            gain: gain.at(0),
            y,
            half,
            width: width as i32,
            padded: width.next_multiple_of(SPAN) as i32,
            eps,
        };
        // SAFETY: the arguments are the kernel's; sizes were checked. Listed rows are the
        // engine's own, below the rows that x holds.
        unsafe { self.launch("rms_norm", shape((m, 1), 256), &args) }
    }

    /// `silu(gate) * up` of rows `[m, 2 * width]` of interleaved gates and ups.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn silu_mul(
        &self,
        x: &Buffer<f32>,
        out: &RowsOut<'_>,
        m: usize,
        width: usize,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            x: Address,
            y: Address,
            half: Address,
            width: i32,
            padded: i32,
        }
        at_least("silu_mul", "x", 2 * m * width, x.len())?;
        let (y, half) = out.addresses("silu_mul", m, width)?;
        let args = Args {
            x: x.at(0),
            y,
            half,
            width: width as i32,
            padded: width.next_multiple_of(SPAN) as i32,
        };
        // SAFETY: the arguments are the kernel's; sizes were checked.
        unsafe { self.launch("silu_mul", shape((m, 1), 256), &args) }
    }

    /// The embeddings of the step's `m` tokens: the residuals `x` `[m, width]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn embed_step(
        &self,
        embedding: &DeviceLinear,
        step: &Buffer<Step>,
        x: &mut Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            w: PackedArgs,
            step: Address,
            x: Address,
        }
        let width = embedding.inputs();
        at_least("embed_step", "x", m * width, x.len())?;
        at_least("embed_step", "step", m, step.len())?;
        let args = Args {
            w: embedding.args(),
            step: step.at(0),
            x: x.at(0),
        };
        // SAFETY: the arguments are the kernel's; sizes were checked, and the tokens are in the
        // vocabulary: the engine checks those it writes, and the sampler yields no others.
        unsafe { self.launch("embed_step", shape((width.div_ceil(256), m), 256), &args) }
    }
}
