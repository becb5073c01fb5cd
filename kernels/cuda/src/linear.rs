//! Packed weights on the device, and products with them.

use super::bank::{BankHalf, ExpertStage, LayerBank, StageTurn};
use super::driver::{Address, Buffer, Gpu, LaunchShape, Operands, Staging, Stream};
use super::exl3::parts::Exl3Parts;
use super::kernel::kernels;
use super::pack::{PackedKind, PackedShape, Packing, Stack, TILE};
use super::trellis::stack::{TrellisParts, upload, weights};
use crate::cuda::places::ExpertPlaces;
use crate::cuda::reference::LinearReferenceArgs;
use crate::cuda::weights::PackedWeight;
use nq_formats::{QuantizedWeight, Weight};
use nq_kernels::{Error, Result};
use nq_model::Dims;

/// One or several weights with the same inputs, packed on a device.
pub struct DeviceLinear {
    shape: PackedShape,
    pub(super) codes: Buffer<u8>,
    pub(super) meta: Buffer<u8>,
    rows: usize,
    inputs: usize,
    scale: f32,
    /// Of a weight in a trellis code: `codes` are its words, `meta` the scales of its rows and, behind them, of its
    /// inputs.
    pub(super) trellis: Option<TrellisParts>,
    /// Of a weight in EXL3's codes.
    pub(super) exl3: Option<Exl3Parts>,
    /// The input that each column is, `[inputs]`, if these are sorted by group: rows of activations are gathered
    /// likewise before their products.
    pub(super) order: Option<Buffer<u32>>,
    /// Of experts in a bank, which kernels find by its table: `codes` and `meta` are then its rooms.
    bank: Option<BankHalf>,
}

/// Where kernels for experts find them.
pub(super) struct ExpertOperands {
    /// Null if they are not one stack.
    pub(super) codes: Address,
    /// Likewise.
    pub(super) meta: Address,
    pub(super) scale: f32,
    pub(super) places: ExpertPlaces,
}

/// Sizes of a weight that the arguments of products have in a row.
#[derive(Clone, Copy)]
pub(super) struct WeightSizes {
    pub(super) rows: i32,
    pub(super) tiles: i32,
    pub(super) spans: i32,
    pub(super) groups: i32,
    pub(super) meta_bytes: i32,
    /// Among those of blocks.
    pub(super) scheme: i32,
}

fn is_exl3(w: &Weight) -> bool {
    matches!(w, Weight::Quantized(QuantizedWeight::Exl3(_)))
}

/// Weights that one in EXL3's codes is a stack of; 1 for others, whose layout does not depend on it.
fn experts_of(w: &Weight) -> usize {
    match w {
        Weight::Quantized(QuantizedWeight::Exl3(w)) => w.experts(),
        _ => 1,
    }
}

/// A weight in EXL3's codes as its values in FP16; another as it is.
fn in_halves(w: &Weight) -> Result<Weight> {
    match w {
        Weight::Quantized(QuantizedWeight::Exl3(w)) => Ok(Weight::Dense(w.to_f16()?)),
        other => Ok(other.clone()),
    }
}

/// Number of bytes packed and copied at a time.
const STAGING: usize = 32 << 20;

/// Packs weights on all CPU cores and copies them to a device, in overlapping steps.
pub struct Uploader {
    gpu: Gpu,
    stream: Stream,
    staging: Staging<u8>,
}

impl Uploader {
    /// Reserves page-locked memory to copy from.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Uploader {
            stream: gpu.stream()?,
            staging: Staging::new(gpu, STAGING)?,
            gpu: gpu.clone(),
        })
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Packs `parts` as one weight, with values of FP16 if `plain` and if they are in trellis codes. Its last bytes
    /// may still be in transfer on return: [`Uploader::finish`] waits for them.
    ///
    /// # Errors
    /// Errors of [`Packing::new`]; [`Error::NoKernel`] for parts in trellis codes with different scales of inputs;
    /// [`Error::DeviceMemory`].
    pub fn pack(&mut self, parts: &[&Weight], stack: Stack, plain: bool) -> Result<DeviceLinear> {
        let packing = Packing::new(parts, stack, plain)?;
        // No row of EXL3 is decoded alone: where others are beside them, all values become FP16 first.
        if !matches!(packing.kind(), PackedKind::Exl3(_)) && parts.iter().any(|w| is_exl3(w)) {
            let halves: Vec<Weight> = parts.iter().map(|w| in_halves(w)).collect::<Result<_>>()?;
            return self.pack(&halves.iter().collect::<Vec<_>>(), stack, plain);
        }
        let heights: Vec<usize> = parts.iter().map(|w| w.dims().rows).collect();
        let (kind, inputs) = (packing.kind(), packing.inputs());
        let experts = parts.first().map_or(1, |w| experts_of(w));
        let mut linear =
            DeviceLinear::zeros_of_experts(&self.gpu, kind, &heights, inputs, experts)?;
        if let Some(trellis) = &mut linear.trellis {
            let (stream, staging) = (&self.stream, &mut self.staging);
            let codes = &mut linear.codes;
            let weights = weights(parts)?;
            let scales = upload(trellis, &weights, stack, |at, words| {
                for (i, piece) in words.chunks(STAGING).enumerate() {
                    let host = staging.turn();
                    host.values_mut()?[..piece.len()].copy_from_slice(piece);
                    stream.write(codes, at * words.len() + i * STAGING, host, 0..piece.len())?;
                }
                Ok(())
            })?;
            linear.meta.write(0, bytemuck::cast_slice(&scales))?;
            return Ok(linear);
        }
        if let Some(exl3) = &mut linear.exl3 {
            let (stream, staging) = (&self.stream, &mut self.staging);
            let codes = &mut linear.codes;
            let scales = exl3.upload(parts, stack, |at, words| {
                for (i, piece) in words.chunks(STAGING).enumerate() {
                    let host = staging.turn();
                    host.values_mut()?[..piece.len()].copy_from_slice(piece);
                    stream.write(codes, at + i * STAGING, host, 0..piece.len())?;
                }
                Ok(())
            })?;
            linear.meta.write(0, bytemuck::cast_slice(&scales))?;
            return Ok(linear);
        }
        linear.scale = packing.scale();
        if let Some(order) = packing.order() {
            linear.order = Some(self.gpu.upload("weights", order)?);
        }
        let code_tile = packing.spans() * kind.code_bytes();
        let meta_tile = packing.spans() * kind.meta_bytes();
        let step = STAGING / (code_tile + meta_tile).max(1);
        if step == 0 {
            return Err(Error::Shape {
                op: "packing",
                what: "inputs",
                expected: format!("rows of 16 within {STAGING} bytes"),
                found: format!("{} inputs", packing.inputs()),
            });
        }
        for first in (0..packing.tiles()).step_by(step) {
            let n = step.min(packing.tiles() - first);
            let (cn, mn) = (n * code_tile, n * meta_tile);
            let (stream, host) = (&self.stream, self.staging.turn());
            let (c, m) = host.values_mut()?[..cn + mn].split_at_mut(cn);
            packing.pack(first, c, m)?;
            stream.write(&mut linear.codes, first * code_tile, host, 0..cn)?;
            stream.write(&mut linear.meta, first * meta_tile, host, cn..cn + mn)?;
        }
        Ok(linear)
    }

    /// Its stream, in whose order weights come to the device.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Waits until all weights are on the device.
    pub fn finish(self) -> Result<()> {
        self.stream.synchronize()
    }
}

impl DeviceLinear {
    /// Allocates a stack of weights of `heights` rows and so many inputs, all zeros, with which [`Uploader::pack`]
    /// begins.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn zeros(gpu: &Gpu, kind: PackedKind, heights: &[usize], inputs: usize) -> Result<Self> {
        Self::zeros_of_experts(gpu, kind, heights, inputs, 1)
    }

    /// As [`DeviceLinear::zeros`] for weights that are stacks of those of `experts`: in EXL3's codes each has scales of
    /// inputs of its own.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub(crate) fn zeros_of_experts(
        gpu: &Gpu,
        kind: PackedKind,
        heights: &[usize],
        inputs: usize,
        experts: usize,
    ) -> Result<Self> {
        let rows = heights.iter().sum();
        let trellis = match kind {
            PackedKind::Trellis(scheme) => Some(TrellisParts::zeros(gpu, scheme, heights)?),
            _ => None,
        };
        let shape = PackedShape::new(kind, rows, inputs);
        let room = |bytes: usize| gpu.zeros("weights", bytes);
        let mut exl3 = None;
        let (codes, meta) = match kind {
            PackedKind::Exl3(bits) => {
                let (parts, codes, meta) = Exl3Parts::zeros(gpu, bits, heights, inputs, experts)?;
                exl3 = Some(parts);
                (room(codes)?, room(meta)?)
            }
            PackedKind::Trellis(scheme) => {
                let (codes, meta) = TrellisParts::bytes(scheme, heights, inputs);
                (gpu.zeros("weights", codes)?, gpu.zeros("weights", meta)?)
            }
            _ => (room(shape.codes_bytes())?, room(shape.meta_bytes())?),
        };
        Ok(DeviceLinear {
            shape,
            codes,
            meta,
            rows,
            inputs,
            scale: 1.0,
            trellis,
            exl3,
            order: None,
            bank: None,
        })
    }

    /// The same with memory for the order of its inputs, if they are `sorted`: as [`Uploader::pack`] has it.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub(crate) fn with_order(mut self, gpu: &Gpu, sorted: bool) -> Result<Self> {
        if sorted {
            self.order = Some(gpu.zeros("weights", self.inputs)?);
        }
        Ok(self)
    }

    /// The same memory, for inputs that are in its order already.
    pub(super) fn in_order(&self) -> Self {
        DeviceLinear {
            shape: self.shape,
            codes: self.codes.share(),
            meta: self.meta.share(),
            rows: self.rows,
            inputs: self.inputs,
            scale: self.scale,
            trellis: None,
            exl3: None,
            order: None,
            bank: None,
        }
    }

    /// The first `rows` rows in the same memory; `None` for codes whose rows do not lie one after another, and for as many rows
    /// as are not whole tiles or as it does not have more than.
    pub(super) fn first_rows(&self, rows: usize) -> Option<Self> {
        let one_after_another = !self.is_unpacked() && self.order.is_none() && self.bank.is_none();
        let fewer = rows.is_multiple_of(TILE) && (1..self.rows).contains(&rows);
        (one_after_another && fewer).then(|| DeviceLinear {
            shape: PackedShape::new(self.shape.kind, rows, self.inputs),
            rows,
            ..self.in_order()
        })
    }

    /// One half of the experts of a bank, of which kernels for experts alone take products.
    pub(super) fn of_bank(half: BankHalf) -> Self {
        let (shape, experts) = half.shape();
        let tiles = experts * shape.tiles;
        DeviceLinear {
            shape: PackedShape { tiles, ..shape },
            codes: half.memory(),
            meta: half.memory(),
            rows: tiles * TILE,
            inputs: half.inputs,
            scale: half.scale,
            trellis: half.coded().map(TrellisParts::share),
            exl3: None,
            order: None,
            bank: Some(half),
        }
    }

    /// The stack of a bank's experts that `stage` has, as products of many rows read it.
    pub(super) fn of_stage(half: &BankHalf, stage: &ExpertStage, turn: StageTurn) -> Self {
        let stack = stage.stack(half.half, turn);
        DeviceLinear {
            codes: stack.codes.share(),
            meta: stack.meta.share(),
            bank: None,
            ..Self::of_bank(half.clone())
        }
    }

    /// The bank that its experts are in, if they are not one stack.
    pub(super) fn bank(&self) -> Option<&BankHalf> {
        self.bank.as_ref()
    }

    /// The layer's bank, likewise.
    pub(crate) fn layer_bank(&self) -> Option<&LayerBank> {
        self.bank.as_ref().map(|half| &*half.layer)
    }

    /// FP16 values `[rows, inputs]` in packed order, whose memory is that of `codes`; `meta` is empty.
    pub(super) fn of_halves(
        codes: &Buffer<u8>,
        meta: &Buffer<u8>,
        Dims { rows, cols: inputs }: Dims,
    ) -> Self {
        DeviceLinear {
            shape: PackedShape::new(PackedKind::Fp16, rows, inputs),
            codes: codes.share(),
            meta: meta.share(),
            rows,
            inputs,
            scale: 1.0,
            trellis: None,
            exl3: None,
            order: None,
            bank: None,
        }
    }

    /// The kind of packed weight, which selects kernels.
    pub fn kind(&self) -> PackedKind {
        self.shape.kind
    }

    /// Number of outputs of all parts together.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Number of tiles of 16 outputs.
    pub(super) fn tiles(&self) -> usize {
        self.shape.tiles
    }

    /// Number of spans of 256 inputs.
    pub(super) fn spans(&self) -> usize {
        self.shape.spans
    }

    /// Its sizes as kernels read it.
    pub(super) fn shape(&self) -> PackedShape {
        self.shape
    }

    /// Its sizes as arguments.
    pub(super) fn sizes(&self) -> WeightSizes {
        let PackedShape { kind, tiles, spans } = self.shape;
        WeightSizes {
            rows: self.rows as i32,
            tiles: tiles as i32,
            spans: spans as i32,
            groups: kind.groups() as i32,
            meta_bytes: kind.meta_bytes() as i32,
            scheme: kind.block_scheme().unwrap_or_default() as i32,
        }
    }

    /// Bytes that one pass over all of it reads.
    pub fn bytes(&self) -> usize {
        match self.bank {
            Some(_) => self.shape.codes_bytes() + self.shape.meta_bytes(),
            None => {
                let order = self.order.as_ref().map_or(0, Buffer::bytes);
                self.codes.bytes() + self.meta.bytes() + order
            }
        }
    }

    /// A stack of experts, checked as an operand of `o`: kernels for experts also read those of a bank.
    pub(super) fn expert_operands(&self, o: &Operands<'_>) -> Result<ExpertOperands> {
        if let Some(half) = &self.bank {
            return Ok(ExpertOperands {
                codes: Address::NULL,
                meta: Address::NULL,
                scale: self.scale,
                places: half.layer.args(o)?,
            });
        }
        let (codes, meta, scale) = self.operands(o)?;
        Ok(ExpertOperands {
            codes,
            meta,
            scale,
            places: ExpertPlaces::default(),
        })
    }

    /// Codes, metadata and the scale of all, checked as operands of `o`, whose rows are in the order of its inputs.
    pub(super) fn operands(&self, o: &Operands<'_>) -> Result<(Address, Address, f32)> {
        if self.is_unpacked() {
            return o.refuse("a weight", "integer codes or FP16", self.kind().name());
        }
        if self.bank.is_some() {
            return o.refuse("a weight", "one stack", "experts in a bank");
        }
        if self.order.is_some() {
            return o.refuse("a weight", "inputs in their own order", "sorted by group");
        }
        let codes = o.of("weights", &self.codes, &[self.codes.len()])?;
        let meta = o.of("weights", &self.meta, &[self.meta.len()])?;
        Ok((codes, meta, self.scale))
    }

    /// The argument of kernels for any kind, checked as an operand of `o`.
    pub(crate) fn args(&self, o: &Operands<'_>) -> Result<PackedWeight> {
        let (codes, meta, scale) = self.operands(o)?;
        let (kind, sizes) = (self.kind(), self.sizes());
        Ok(PackedWeight {
            codes,
            meta,
            rows: sizes.rows,
            inputs: self.inputs as i32,
            spans: sizes.spans,
            bits: kind.bits() as i32,
            zero: kind.zero_code() as i16,
            two_level: u8::from(kind.is_two_level()),
            table: u8::from(kind.has_table()),
            groups: sizes.groups,
            meta_bytes: sizes.meta_bytes,
            scale,
        })
    }
}

kernels! {
    LINEAR_REFERENCE: LinearReferenceArgs = "linear_reference" in "reference.cu",
        test "kernels/cuda/tests/cuda/mod.rs::products_of_many_rows", bench "linear_reference";
}

impl Stream {
    /// `y` `[m, rows]` = `x` `[m, inputs]` times `w`, or added to `y` if `add`, by the reference
    /// kernel.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    pub fn linear_reference(
        &self,
        w: &DeviceLinear,
        x: &Buffer<f32>,
        y: &mut Buffer<f32>,
        m: usize,
        add: bool,
    ) -> Result<()> {
        let o = self.operands("linear_reference");
        let args = LinearReferenceArgs {
            w: w.args(&o)?,
            x: o.of("x", x, &[m, w.inputs])?,
            y: o.of("y", y, &[m, w.rows])?,
            m: m as i32,
            add: i32::from(add),
        };
        let shape = LaunchShape::new([w.rows.div_ceil(8), m.div_ceil(8), 1], 256);
        // SAFETY: the operands were checked.
        unsafe { self.launch(&LINEAR_REFERENCE, shape, &args) }
    }
}
