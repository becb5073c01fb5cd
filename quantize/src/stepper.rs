//! The forward layer by layer that quantization drives. On a device of `kernels::grad` it is f32
//! throughout: the residual stream stays on the host, and a piece of it at a time goes through a
//! layer. Second moments of what the Linears see are summed on the device and stay there.

use crate::error::{Error, Result};
use crate::second_order::InputStats;
use crate::tune::forward::{Forward, Saved};
use crate::tune::params::{Layer, Matrix};
use nq_formats::{ModelConfig, Tensor, Weight};
use nq_kernels::grad::{Allocate, Gemm, GradOps};
use nq_runtime::{Hidden, LayerStepper, LayerWeights, Observer};
use std::ops::Range;
use std::sync::Arc;

/// Rows that run through a layer at once: enough to fill a device.
const ROWS: usize = 8192;

/// The forward layer by layer, where it runs.
pub enum Stepper {
    /// On the CPU, by the runtime.
    Host(Box<dyn LayerStepper>),
    /// On a GPU.
    #[cfg(feature = "cuda")]
    Gpu(Box<OpsStepper<nq_kernels::cuda::CudaOps>>),
}

impl AsMut<dyn LayerStepper> for Stepper {
    fn as_mut(&mut self) -> &mut (dyn LayerStepper + 'static) {
        match self {
            Stepper::Host(stepper) => stepper.as_mut(),
            #[cfg(feature = "cuda")]
            Stepper::Gpu(stepper) => stepper.as_mut(),
        }
    }
}

impl Stepper {
    /// Runs layer `index` over `hidden`, which stays as it is, and gives the statistics of what
    /// each of its products sees, second moments included; `done` hears of rows.
    /// `None` if they are an observer's to gather.
    ///
    /// # Errors
    /// What the layer or the device reports.
    pub fn moments(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &Hidden,
        done: &mut dyn FnMut(usize),
    ) -> Result<Option<Vec<InputStats>>> {
        match self {
            Stepper::Host(_) => {
                let _ = (index, weights, hidden, done);
                Ok(None)
            }
            #[cfg(feature = "cuda")]
            Stepper::Gpu(stepper) => {
                let sums = stepper.sums(index, weights, hidden, done)?;
                let stats = sums
                    .into_iter()
                    .zip(stepper.widths())
                    .map(|(sum, n)| crate::second_order::device::input_stats(&stepper.ops, sum, n));
                Ok(Some(stats.collect::<Result<_>>()?))
            }
        }
    }
}

/// [`LayerStepper`] over the operations of a training step. Keys and values stay f32.
pub struct OpsStepper<O: GradOps> {
    ops: Arc<O>,
    config: ModelConfig,
    rows: usize,
    work: Option<Work<O>>,
}

/// Memory of a piece: up to `rows` rows of sequences of up to `seq` tokens.
pub struct Work<O: Allocate> {
    rows: usize,
    seq: usize,
    forward: Forward<O>,
    saved: Saved<O>,
    x: O::Floats,   // [rows, hidden]
    out: O::Floats, // [rows, hidden]
}

impl<O: Allocate> Work<O> {
    /// Room for up to `rows` rows, in whole sequences of `seq` tokens.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn new(ops: &O, c: &ModelConfig, rows: usize, seq: usize) -> Result<Self> {
        // Of shorter sequences there are more, whose scores take less.
        let batch = rows.div_ceil(seq.max(1));
        let rows = batch * seq;
        let stream = || ops.floats("residual stream", rows * c.hidden_size);
        Ok(Work {
            rows,
            seq,
            forward: Forward::new(ops, c, (batch, seq), 0)?,
            saved: Saved::new(ops, c, rows)?,
            x: stream()?,
            out: stream()?,
        })
    }
}

/// Consecutive sequences of one length that go through a layer together.
#[derive(Debug, PartialEq, Eq)]
struct Piece {
    row: usize,
    sequences: usize,
    length: usize,
}

impl Piece {
    fn rows(&self) -> usize {
        self.sequences * self.length
    }

    /// Its values in a stream of this width.
    fn range(&self, width: usize) -> Range<usize> {
        self.row * width..(self.row + self.rows()) * width
    }
}

/// The sequences in pieces of at most `most` rows, longer ones alone.
fn plan(lengths: &[usize], most: usize) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut row = 0;
    for &length in lengths.iter().filter(|&&l| l > 0) {
        match pieces.last_mut() {
            Some(p) if p.length == length && p.rows() + length <= most => p.sequences += 1,
            _ => pieces.push(Piece {
                row,
                sequences: 1,
                length,
            }),
        }
        row += length;
    }
    pieces
}

impl<O: GradOps> OpsStepper<O> {
    /// A stepper for models of this shape on the device of `ops`.
    pub fn new(ops: O, config: &ModelConfig) -> Self {
        Self::with_rows(ops, config, ROWS)
    }

    /// One that passes `rows` rows through a layer at once, a sequence at least.
    pub fn with_rows(ops: O, config: &ModelConfig, rows: usize) -> Self {
        OpsStepper {
            ops: Arc::new(ops),
            config: config.clone(),
            rows,
            work: None,
        }
    }

    /// The device, its work's memory given back.
    pub fn into_ops(self) -> Arc<O> {
        self.ops
    }

    /// Makes room for `pieces`.
    fn reserve(&mut self, pieces: &[Piece]) -> Result<()> {
        let rows = pieces.iter().map(Piece::rows).max().unwrap_or(0);
        let seq = pieces.iter().map(|p| p.length).max().unwrap_or(0);
        if (self.work.as_ref()).is_some_and(|w| w.rows >= rows && w.seq >= seq) {
            return Ok(());
        }
        self.work = None;
        self.work = Some(Work::new(self.ops.as_ref(), &self.config, rows, seq)?);
        Ok(())
    }

    /// What running layer `index` over `hidden` takes: its pieces and the weights on the device.
    fn begin(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &Hidden,
    ) -> Result<(Vec<Piece>, Layer<O>)> {
        hidden.check(self.config.hidden_size)?;
        let pieces = plan(&hidden.lengths, self.rows);
        self.reserve(&pieces)?;
        Ok((pieces, Layer::dense(self.ops.as_ref(), index, weights)?))
    }

    /// Widths of the inputs of a layer's products.
    fn widths(&self) -> Vec<usize> {
        let products = self.config.layer().products().into_iter();
        products.map(|p| p.inputs(&self.config)).collect()
    }

    /// Runs the layer over `x`, the rows of `piece`. `shown` sees the input `[rows, in]` of each
    /// product by its place.
    fn run(
        &mut self,
        layer: &Layer<O>,
        piece: &Piece,
        x: &[f32],
        mut shown: impl FnMut(&O, usize, &O::Floats) -> Result<()>,
    ) -> Result<()> {
        let ops = self.ops.as_ref();
        let Work {
            forward: f,
            saved,
            x: stream,
            out,
            ..
        } = (self.work.as_mut()).expect("room was made for every piece");
        ops.write(stream, x)?;
        let shape = (piece.sequences, piece.length);
        f.attention(ops, layer, stream, saved, shape)?;
        shown(ops, 0, &f.h)?;
        shown(ops, 1, &saved.o)?;
        f.mlp(ops, layer, saved, out, piece.rows())?;
        shown(ops, 2, &f.h)?;
        shown(ops, 3, &f.wide)
    }

    /// [`OpsStepper::run`] for an observer; `x` becomes what comes out.
    fn observed(
        &mut self,
        (index, layer): (usize, &Layer<O>),
        piece: &Piece,
        x: &mut [f32],
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (products, widths) = (self.config.layer().products(), self.widths());
        let wants = observer.wants_inputs();
        self.run(layer, piece, x, |ops, place, floats| {
            if wants {
                let mut seen = vec![0.0; piece.rows() * widths[place]];
                ops.read(floats, &mut seen)?;
                observer.linear_input(index, products[place], &seen);
            }
            Ok(())
        })?;
        if let Some(work) = &self.work {
            self.ops.read(&work.out, x)?;
        }
        if x.iter().map(|v| v * 0.0).sum::<f32>() != 0.0 {
            return Err(Error::Runtime(nq_runtime::Error::NotFinite {
                what: "the output",
                layer: index,
            }));
        }
        observer.layer_output(index, x);
        Ok(())
    }

    /// Runs layer `index` over `hidden`, which stays as it is: the second moments of what each
    /// of its products sees, `[in, in]`, on the device. `done` hears of rows.
    ///
    /// # Errors
    /// What the layer or the device reports.
    pub fn sums(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &Hidden,
        done: &mut dyn FnMut(usize),
    ) -> Result<Vec<O::Floats>> {
        let width = self.widths();
        let zeros = |&n: &usize| Ok(self.ops.floats("moments of a layer's inputs", n * n)?);
        let mut sums = width.iter().map(zeros).collect::<Result<Vec<_>>>()?;
        let share = 1.0 / hidden.lengths.iter().sum::<usize>().max(1) as f32;
        let (pieces, layer) = self.begin(index, weights, hidden)?;
        for piece in &pieces {
            let rows = piece.rows();
            let x = &hidden.data[piece.range(self.config.hidden_size)];
            self.run(&layer, piece, x, |ops, place, x| {
                let product = Gemm {
                    alpha: share,
                    ..Gemm::weight_grad(rows, width[place], width[place]).add()
                };
                Ok(ops.gemm(product, x, x, &mut sums[place])?)
            })?;
            done(rows);
        }
        Ok(sums)
    }

    fn logits(
        &mut self,
        norm: &Tensor,
        head: &Weight,
        hidden: &Hidden,
        ranges: &[Range<usize>],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let (h, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        hidden.check_rows(h, ranges)?;
        // The layers' memory makes room for the head.
        self.work = None;
        let ops = self.ops.as_ref();
        let vocab = head.dims().0;
        let Matrix::Dense(w) = Matrix::dense(ops, "head", head)? else {
            unreachable!("made dense");
        };
        let norm = norm.to_f32()?;
        let mut gain = ops.floats("norm", h)?;
        ops.write(&mut gain, &norm)?;
        let most = ranges.iter().map(Range::len).max().unwrap_or(0);
        let floats = |n: usize| ops.floats("logits", most * n);
        let (mut x, mut normed) = (floats(h)?, floats(h)?);
        let (mut inv, mut logits) = (floats(1)?, floats(vocab)?);
        let mut host = Vec::new();
        for (i, range) in ranges.iter().enumerate() {
            let rows = range.len();
            host.resize(rows * vocab, 0.0);
            if rows > 0 {
                ops.write(&mut x, &hidden.data[range.start * h..range.end * h])?;
                ops.rms_norm(&x, &gain, &mut normed, &mut inv, (rows, h), eps)?;
                ops.gemm(Gemm::linear(rows, vocab, h), &normed, &w, &mut logits)?;
                ops.read(&logits, &mut host)?;
            }
            each(i, &host);
        }
        Ok(())
    }
}

/// What the interface reports.
fn outward(e: Error) -> nq_runtime::Error {
    match e {
        Error::Runtime(e) => e,
        Error::Kernels(e) => e.into(),
        Error::Format(e) => e.into(),
        other => nq_runtime::Error::Request {
            what: "a layer",
            expected: "finite weights".into(),
            found: other.to_string(),
        },
    }
}

type Outward<T> = std::result::Result<T, nq_runtime::Error>;

impl<O: GradOps + Send + Sync> LayerStepper for OpsStepper<O>
where
    O::Floats: Send,
    O::Codes: Send,
    O::Ids: Send,
{
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn layer(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &mut Hidden,
        observer: &mut dyn Observer,
    ) -> Outward<()> {
        let h = self.config.hidden_size;
        let (pieces, layer) = self.begin(index, weights, hidden).map_err(outward)?;
        for piece in &pieces {
            let x = &mut hidden.data[piece.range(h)];
            self.observed((index, &layer), piece, x, observer)
                .map_err(outward)?;
        }
        Ok(())
    }

    fn observe(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &Hidden,
        observer: &mut dyn Observer,
    ) -> Outward<()> {
        let h = self.config.hidden_size;
        let (pieces, layer) = self.begin(index, weights, hidden).map_err(outward)?;
        for piece in &pieces {
            let mut copy = hidden.data[piece.range(h)].to_vec();
            self.observed((index, &layer), piece, &mut copy, observer)
                .map_err(outward)?;
        }
        Ok(())
    }

    fn heads(
        &mut self,
        norm: &Tensor,
        head: &Weight,
        hidden: &Hidden,
        ranges: &[Range<usize>],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Outward<()> {
        self.logits(norm, head, hidden, ranges, each)
            .map_err(outward)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::Gather;
    use crate::methods::Needs;
    use nq_formats::Checkpoint;
    use nq_kernels::grad::CpuOps;
    use nq_runtime::models;
    use nq_runtime::{ActivationChoice, DeviceChoice, KvType, LoadOptions, load};
    use std::path::Path;

    #[test]
    fn pieces_hold_sequences_of_one_length_and_every_row_once() {
        for lengths in [
            vec![],
            vec![5],
            vec![4, 4, 4, 4, 3, 3, 4, 0, 4],
            vec![100, 4],
        ] {
            let pieces = plan(&lengths, 9);
            let mut next = 0;
            for p in &pieces {
                assert_eq!(p.row, next, "{lengths:?}");
                assert!(p.rows() <= 9 || p.sequences == 1, "{p:?}");
                next += p.rows();
            }
            assert_eq!(next, lengths.iter().sum::<usize>());
        }
    }

    /// How far apart, relative to `b`.
    fn off(a: &[f32], b: &[f32]) -> f64 {
        assert_eq!(a.len(), b.len());
        let square = |x: f32| f64::from(x).powi(2);
        let far: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
        (far / b.iter().map(|&b| square(b)).sum::<f64>()).sqrt()
    }

    /// The demo model's layers, moments and logits are those of the CPU's own stepper.
    #[test]
    fn it_is_the_forward_of_the_cpu() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
        let checkpoint = Checkpoint::open(&root).unwrap();
        let (config, store) = (checkpoint.config(), checkpoint.store());
        let options = LoadOptions {
            device: DeviceChoice::Cpu,
            activations: ActivationChoice::F32,
            ..LoadOptions::default()
        };
        let mut cpu = load::cpu_stepper(config, &options, KvType::F32).unwrap();
        let mut own = OpsStepper::new(CpuOps, config);
        let text: Vec<Vec<u32>> = [21, 21, 21, 33, 2]
            .iter()
            .map(|&n| (0..n).map(|i| (i * 37 + n) % 4000).collect())
            .collect();
        let embedding = models::embedding(store, config).unwrap();
        let mut a = Hidden::embed(&embedding, &text).unwrap();
        let mut b = a.clone();
        for index in 0..config.num_hidden_layers {
            let weights = LayerWeights::read(store, config, index).unwrap();
            let mut rows = 0;
            let sums = own.sums(index, &weights, &a, &mut |n| rows += n).unwrap();
            assert_eq!(rows, 98);
            let gathered = |stepper: &mut dyn LayerStepper, hidden| {
                let mut gather = Gather::new(config, Needs::Hessian, &());
                stepper
                    .observe(index, &weights, hidden, &mut gather)
                    .unwrap();
                gather
                    .matrices()
                    .into_iter()
                    .map(|m| m.data)
                    .collect::<Vec<_>>()
            };
            let (seen, expected) = (gathered(&mut own, &a), gathered(cpu.as_mut(), &b));
            for ((sum, seen), expected) in sums.iter().zip(&seen).zip(&expected) {
                assert!(off(sum, seen) < 1e-5, "{}", off(sum, seen));
                assert!(off(seen, expected) < 1e-4, "{}", off(seen, expected));
            }
            own.layer(index, &weights, &mut a, &mut ()).unwrap();
            cpu.layer(index, &weights, &mut b, &mut ()).unwrap();
            assert!(off(&a.data, &b.data) < 1e-4, "{}", off(&a.data, &b.data));
        }
        let norm = models::final_norm(store, config).unwrap();
        let rows = 3..40;
        let a = own.head(&norm, &embedding, &a, rows.clone()).unwrap();
        let b = cpu.head(&norm, &embedding, &b, rows).unwrap();
        assert!(off(&a, &b) < 1e-4, "{}", off(&a, &b));
    }

    #[test]
    fn overflow_is_reported_with_its_layer() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
        let checkpoint = Checkpoint::open(&root).unwrap();
        let (config, store) = (checkpoint.config(), checkpoint.store());
        let weights = LayerWeights::read(store, config, 1).unwrap();
        let mut hidden = Hidden {
            data: vec![f32::NAN; 2 * config.hidden_size],
            lengths: vec![2],
        };
        let mut own = OpsStepper::new(CpuOps, config);
        let error = own.layer(1, &weights, &mut hidden, &mut ()).unwrap_err();
        assert!(error.to_string().contains("layer 1"), "{error}");
        hidden.lengths = vec![3];
        let error = own.layer(1, &weights, &mut hidden, &mut ()).unwrap_err();
        assert!(error.to_string().contains("residual stream"), "{error}");
    }
}
