//! The layer stepper in f32: the residual stream stays on the host, and one piece of it at a time
//! goes through a layer. Second moments of the inputs of Linears are summed and kept on the device.

use super::dense::Dense;
use super::head::OpsHead;
use super::turned::Turned;
use super::{Pass, Seen, Shown, Tape, Workspace};
use nq_formats::Weight;
use nq_kernels::Account;
use nq_kernels::grad::{Allocate, Gemm, LayerOps, delta_state_bytes};
use nq_model::forward::{self, VectorSpec};
use nq_model::{LinearKind, LinearSpec, ModelConfig, NormKind, Product};
use nq_runtime::interface::Observer;
use nq_runtime::models::{Ending, LayerWeights};
use nq_runtime::stacks::Stacks;
use nq_runtime::states::shape_of;
use nq_runtime::stepper::{
    Cut, Head, Hidden, LayerDevice, LayerPiece, LayerStepper, ProductMoments, Stepper,
};
use nq_runtime::{Error, Result};
use std::sync::Arc;

/// Counts on an account the buffers for pieces of `rows` rows of sequences of `seq` tokens, without
/// layers and sums.
///
/// # Errors
/// Never, as an account has no limit.
pub fn hold_work(
    account: &Account,
    c: &ModelConfig,
    rows: usize,
    seq: usize,
) -> Result<impl Sized> {
    let state = shape_of(c).map_or(0, |shape| delta_state_bytes(&shape));
    Ok((
        account.hold(state),
        PieceBuffers::new(account, c, rows, seq)?,
    ))
}

/// Counts a layer on an account.
///
/// # Errors
/// Never, as an account has no limit.
pub fn hold_layer(account: &Account, c: &ModelConfig) -> Result<impl Sized> {
    let dense = |n: usize| Ok::<_, Error>(Dense::<Account>(account.floats("weights", n)?));
    let spec = c.largest_layer();
    let product = |p: &'static Product| {
        let stacks = Stacks::apart(spec).of_product(p).into_iter();
        let copies = stacks.flat_map(|s| vec![s.copy_dims(c).elements(); s.copies(c)]);
        copies.map(dense).collect()
    };
    let layer: DenseLayer<Account> = DenseLayer::new(0, spec, product, |v| dense(v.len(c)))?;
    Ok(layer)
}

/// The layer stepper on the device of `ops`. It passes up to `rows` rows through a layer at once,
/// and at least one whole sequence.
pub fn stepper<O>(ops: O, config: &ModelConfig, rows: usize) -> Box<dyn LayerStepper>
where
    O: LayerOps + Send + Sync + 'static,
    O::Floats: Send,
{
    Box::new(Stepper(FullPrecision::new(ops, config, rows)))
}

/// A device of `kernels::grad` as a device of the layer stepper.
struct FullPrecision<O: LayerOps> {
    ops: Arc<O>,
    config: ModelConfig,
    rows: usize,
    room: Option<PieceBuffers<O>>,
}

/// Buffers for a piece: up to `rows` rows of sequences of up to `seq` tokens.
struct PieceBuffers<O: Allocate> {
    rows: usize,
    seq: usize,
    work: Workspace<O>,
    tape: Tape<O>,
    x: O::Floats,   // [rows, hidden]
    out: O::Floats, // [rows, hidden]
}

impl<O: Allocate> PieceBuffers<O> {
    fn new(ops: &O, c: &ModelConfig, rows: usize, seq: usize) -> Result<Self> {
        // With shorter sequences there are more of them, but their scores take less memory.
        let batch = rows.div_ceil(seq.max(1));
        let rows = batch * seq;
        let stream = || ops.floats("residual stream", rows * c.hidden_size);
        Ok(PieceBuffers {
            rows,
            seq,
            work: Workspace::new(ops, c, batch, seq, 0)?,
            tape: Tape::new(ops, c, rows)?,
            x: stream()?,
            out: stream()?,
        })
    }
}

type DenseLayer<O> = forward::Layer<Vec<Dense<O>>, Dense<O>>;

fn pack<O: LayerOps>(
    ops: &O,
    c: &ModelConfig,
    index: usize,
    weights: &LayerWeights,
) -> Result<DenseLayer<O>> {
    let order = Turned::new(c);
    let stacks = Stacks::apart(weights.spec);
    let product = |product: &'static Product| -> Result<Vec<Dense<O>>> {
        let named = |l: &LinearSpec| (l.name(index), weights.linear(l.kind));
        let all = product.linears.iter();
        match product.linears[0].kind {
            // Kernels of recurrences take each of their products as one.
            LinearKind::DeltaQkv | LinearKind::DeltaB => {
                let parts: Vec<_> = all.map(named).collect();
                Ok(vec![Dense::joined(ops, &parts)?])
            }
            LinearKind::Q => heads(ops, c, order, &all.map(named).collect::<Vec<_>>()),
            _ => {
                let mut each = Vec::new();
                for stack in stacks.of_product(product) {
                    let name = stack.linear.name(index);
                    for part in stack.weight(weights)?.unstack(stack.copies(c)) {
                        each.push(Dense::matrix(ops, &name, &part)?);
                    }
                }
                Ok(each)
            }
        }
    };
    let vector = |vector: VectorSpec| {
        let values = weights.values(vector)?;
        let of_heads = match vector {
            VectorSpec::Norm(norm) => matches!(norm.kind, NormKind::Q | NormKind::K),
            VectorSpec::Bias(linear) => matches!(linear.kind, LinearKind::Q | LinearKind::K),
            VectorSpec::Row(_) => false,
        };
        match of_heads {
            true => Dense::vector(ops, &order.apply(&values)),
            false => Dense::vector(ops, &values),
        }
    };
    DenseLayer::new(index, weights.spec, product, vector)
}

/// Queries, keys and values, the first two in `order`; behind them the gates of heads that have some.
fn heads<O: LayerOps>(
    ops: &O,
    c: &ModelConfig,
    order: Turned,
    linears: &[(String, &Weight)],
) -> Result<Vec<Dense<O>>> {
    let (d, q_dim) = (c.head_dim, c.q_dim());
    let mut all = Vec::new();
    for (i, (name, weight)) in linears.iter().enumerate() {
        // Behind the queries of each head stand its gates.
        let each = if i == 0 {
            weight.dims().rows / q_dim * d
        } else {
            d
        };
        let rows = weight.dims().rows / each * d;
        all.push(Dense::rows_of(ops, name, weight, rows, |row| match i {
            2 => row,
            _ => row / d * each + order.source(row % d),
        })?);
    }
    if let Some((name, weight)) = linears.first()
        && weight.dims().rows == 2 * q_dim
    {
        let gate = |row: usize| row / d * 2 * d + d + row % d;
        all.push(Dense::rows_of(ops, name, weight, q_dim, gate)?);
    }
    Ok(all)
}

impl<O: LayerOps> FullPrecision<O> {
    fn new(ops: O, config: &ModelConfig, rows: usize) -> Self {
        FullPrecision {
            ops: Arc::new(ops),
            config: config.clone(),
            rows,
            room: None,
        }
    }

    /// Runs the layer over `x`, the rows of `piece`, into `room.out`.
    fn pass(
        &mut self,
        layer: &DenseLayer<O>,
        piece: &LayerPiece,
        x: &[f32],
        every_expert: bool,
        shown: &mut Shown<'_, O>,
    ) -> Result<&O::Floats> {
        let ops = self.ops.as_ref();
        let room = (self.room.as_mut()).expect("room was made for every piece");
        ops.write(&mut room.x, x)?;
        let shape = (piece.chunks.len(), piece.chunks[0].1);
        // A piece with images is one sequence, whose tokens do not stand one behind the other.
        let (c, order) = (&self.config, Turned::new(&self.config));
        if !piece.images.is_empty() {
            let placed = order.pairs_among(c, &piece.images, shape.1);
            ops.write(&mut room.work.cos_sin, placed.as_flattened())?;
        }
        let work = (&mut room.work, &mut room.tape);
        Pass::new(ops, work, shape, (&room.x, &mut room.out), shown)
            .through_every_expert(every_expert)
            .run(layer)?;
        if !piece.images.is_empty() {
            let table = order.pairs(c, room.seq);
            ops.write(&mut room.work.cos_sin, table.as_flattened())?;
        }
        Ok(&room.out)
    }

    /// The second moments `[in, in]` of the input of each of the layer's products, on the device: by
    /// product, and by expert if experts have inputs of their own.
    fn sums(
        &mut self,
        (index, weights): (usize, &LayerWeights),
        hidden: &Hidden,
        pieces: &[LayerPiece],
        observer: &mut dyn Observer,
    ) -> Result<Vec<Vec<O::Floats>>> {
        let (ops, c) = (Arc::clone(&self.ops), self.config.clone());
        let products = c.layer(index).products();
        let zeros = |p: &&Product| {
            let n = p.inputs(&c);
            let one = |_| Ok(ops.floats("moments of a layer's inputs", n * n)?);
            (0..p.shares(&c)).map(one).collect()
        };
        let mut sums = products
            .iter()
            .map(zeros)
            .collect::<Result<Vec<Vec<_>>>>()?;
        let share = 1.0 / hidden.lengths.iter().sum::<usize>().max(1) as f32;
        let layer = pack(ops.as_ref(), &c, index, weights)?;
        for piece in pieces {
            let rows = piece.rows();
            let x = &hidden.data[piece.values(c.hidden_size)];
            self.pass(&layer, piece, x, true, &mut |seen| {
                let (product, expert, x) = match seen {
                    Seen::Input(product, expert, x) => (product, expert, x),
                    Seen::Routes(routes) => {
                        observer.routed(index, routes);
                        return Ok(());
                    }
                };
                let n = product.inputs(&c);
                let square = Gemm {
                    alpha: share,
                    ..Gemm::weight_grad(rows, n, n).add()
                };
                let place = products.iter().position(|&p| p == product);
                let sum = place.and_then(|place| sums[place].get_mut(expert));
                sum.map_or(Ok(()), |sum| Ok(ops.gemm(square, x, x, sum)?))
            })?;
            observer.rows(rows);
        }
        Ok(sums)
    }
}

impl<O: LayerOps + Send + Sync + 'static> LayerDevice for FullPrecision<O>
where
    O::Floats: Send,
{
    type Layer = DenseLayer<O>;

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn name(&self) -> String {
        self.ops.device()
    }

    fn cut(&self) -> Cut {
        Cut {
            rows: self.rows,
            alike: true,
        }
    }

    fn reserve(&mut self, pieces: &[LayerPiece]) -> Result<()> {
        let rows = pieces.iter().map(LayerPiece::rows).max().unwrap_or(0);
        let seq = pieces.iter().map(|p| p.chunks[0].1).max().unwrap_or(0);
        if (self.room.as_ref()).is_some_and(|w| w.rows >= rows && w.seq >= seq) {
            return Ok(());
        }
        self.room = None;
        self.room = Some(PieceBuffers::new(
            self.ops.as_ref(),
            &self.config,
            rows,
            seq,
        )?);
        Ok(())
    }

    fn pack(&self, index: usize, weights: &LayerWeights) -> Result<DenseLayer<O>> {
        pack(self.ops.as_ref(), &self.config, index, weights)
    }

    fn run(
        &mut self,
        layer: &DenseLayer<O>,
        (piece, _): (&LayerPiece, &[u32]),
        x: &mut [f32],
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (ops, c) = (Arc::clone(&self.ops), self.config.clone());
        let wants = observer.wants_inputs();
        let out = self.pass(layer, piece, x, wants, &mut |seen| {
            match seen {
                Seen::Routes(routes) => observer.routed(layer.index, routes),
                Seen::Input(..) if !wants => {}
                Seen::Input(product, expert, floats) => {
                    let mut seen = vec![0.0; piece.rows() * product.inputs(&c)];
                    ops.read(floats, &mut seen)?;
                    match product.shares(&c) {
                        1 => observer.linear_input(layer.index, product, &seen),
                        _ => observer.expert_input(layer.index, product, expert, &seen),
                    }
                }
            }
            Ok(())
        })?;
        ops.read(out, x)?;
        observer.layer_output(layer.index, x);
        Ok(())
    }

    fn moments(
        &mut self,
        layer: (usize, &LayerWeights),
        hidden: &Hidden,
        pieces: &[LayerPiece],
        observer: &mut dyn Observer,
    ) -> Result<Option<ProductMoments>> {
        let Some(device) = self.ops.second_order() else {
            return Ok(None);
        };
        let products = layer.1.spec.products();
        let sums = self.sums(layer, hidden, pieces, observer)?;
        let moments = sums.into_iter().zip(products).map(|(sums, product)| {
            let n = product.inputs(&self.config);
            let own = sums.into_iter();
            own.map(|sum| Ok(Arc::clone(&device).moments(sum, n)?))
                .collect()
        });
        Ok(Some(moments.collect::<Result<_>>()?))
    }

    fn head(&mut self, ending: &Ending, head: &Weight, rows: usize) -> Result<Box<dyn Head>> {
        if ending.mix.is_some() {
            return Err(Error::no_streams("a forward in full precision"));
        }
        self.room = None;
        let (ops, eps) = (Arc::clone(&self.ops), self.config.rms_norm_eps);
        Ok(Box::new(OpsHead::new(ops, &ending.norm, head, rows, eps)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuOps;
    use nq_formats::Checkpoint;
    use nq_formats::synth;
    use nq_kernels::pages::KvType;
    use nq_model::Preset;
    use nq_runtime::interface::{ActivationChoice, DeviceChoice, LoadOptions};
    use nq_runtime::models;

    fn demo() -> Checkpoint {
        let root = nq_testkit::demo();
        Checkpoint::open(&root).unwrap()
    }

    /// Root of the squared difference relative to `b`.
    fn off(a: &[f32], b: &[f32]) -> f64 {
        assert_eq!(a.len(), b.len());
        let square = |x: f32| f64::from(x).powi(2);
        let far: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
        (far / b.iter().map(|&b| square(b)).sum::<f64>()).sqrt()
    }

    /// Counts rows.
    struct RowCounter(usize);

    impl Observer for RowCounter {
        fn rows(&mut self, rows: usize) {
            self.0 += rows;
        }
    }

    /// All inputs of Linears, by product.
    #[derive(Default)]
    struct AllInputs(Vec<(&'static str, usize, Vec<f32>)>);

    impl AllInputs {
        fn add(&mut self, name: &'static str, expert: usize, x: &[f32]) {
            match self.0.iter_mut().find(|s| (s.0, s.1) == (name, expert)) {
                Some(seen) => seen.2.extend_from_slice(x),
                None => self.0.push((name, expert, x.to_vec())),
            }
        }
    }

    impl Observer for AllInputs {
        fn linear_input(&mut self, _layer: usize, product: &Product, x: &[f32]) {
            self.add(product.name, 0, x);
        }

        fn expert_input(&mut self, _: usize, product: &Product, expert: usize, x: &[f32]) {
            self.add(product.name, expert, x);
        }
    }

    impl AllInputs {
        /// Mean squares, by product, expert and element.
        fn squares(&self, c: &ModelConfig, layer: usize) -> Vec<Vec<f32>> {
            let products = c.layer(layer).products().into_iter();
            let all = products.flat_map(|p| (0..p.shares(c)).map(move |expert| (p, expert)));
            let mean = |(product, expert): (&Product, usize)| {
                let seen = self.0.iter().find(|s| (s.0, s.1) == (product.name, expert));
                let (_, _, x) = seen.unwrap_or_else(|| panic!("{} {expert}", product.name));
                let n = product.inputs(c);
                let rows = (x.len() / n) as f32;
                let square = |i: usize| x.iter().skip(i).step_by(n).map(|v| v * v).sum::<f32>();
                (0..n).map(|i| square(i) / rows).collect()
            };
            all.map(mean).collect()
        }
    }

    /// The demo model's layers, inputs, moments and logits agree with those of the CPU's own
    /// stepper.
    #[test]
    fn it_is_the_forward_of_the_cpu() {
        agrees_with_the_cpu(&demo());
        agrees_with_the_cpu(&mixture());
        for (preset, value_heads) in [("qwen3.5-0.8b", 2), ("qwen3.5-35b-a3b", 4)] {
            agrees_with_the_cpu(&hybrid(preset, value_heads));
        }
    }

    /// A small hybrid of random weights: layers with recurrences and one with gated attention, which turns a quarter of
    /// a head.
    fn hybrid(preset: &str, value_heads: usize) -> Checkpoint {
        let whole = Preset::find(preset).unwrap().config();
        let config = ModelConfig {
            hidden_size: 64,
            intermediate_size: 96,
            experts: whole.experts.map(|e| nq_model::Experts {
                count: 5,
                per_token: 2,
                width: 24,
                shared: 40,
                ..e
            }),
            delta: whole.delta.map(|d| nq_model::Delta {
                key_heads: 2,
                value_heads,
                key_dim: 16,
                value_dim: 24,
                ..d
            }),
            num_hidden_layers: 4,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 32,
            vocab_size: 4001,
            rope: nq_model::Rope {
                dims: Some(8),
                ..whole.rope
            },
            tie_word_embeddings: true,
            mtp_layers: 0,
            eos_token_ids: vec![299],
            ..whole
        };
        synth::checkpoint("a hybrid", &config, 5).unwrap()
    }

    /// A random mixture of 5 experts, 2 a token.
    fn mixture() -> Checkpoint {
        let config = ModelConfig {
            hidden_size: 64,
            experts: Some(nq_model::Experts {
                count: 5,
                per_token: 2,
                width: 24,
                normalized: false,
                shared: 0,
            }),
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 16,
            vocab_size: 4001,
            tie_word_embeddings: true,
            mtp_layers: 0,
            eos_token_ids: vec![299],
            ..Preset::find("30b-a3b").unwrap().config()
        };
        synth::checkpoint("a mixture", &config, 5).unwrap()
    }

    fn agrees_with_the_cpu(checkpoint: &Checkpoint) {
        let (config, store) = (checkpoint.config(), checkpoint.store());
        let options = LoadOptions {
            device: DeviceChoice::Cpu,
            activations: ActivationChoice::F32,
            ..LoadOptions::default()
        };
        let mut cpu = Stepper(nq_cpu::CpuLayers::new(config, &options, KvType::F32).unwrap());
        let mut own = Stepper(FullPrecision::new(CpuOps, config, 64));
        let text: Vec<Vec<u32>> = [21, 21, 21, 33, 2]
            .iter()
            .map(|&n| (0..n).map(|i| (i * 37 + n) % 4000).collect())
            .collect();
        let embedding = models::embedding(store, config).unwrap();
        let mut a = Hidden::embed(&embedding, &text, 1).unwrap();
        let mut b = a.clone();
        for index in 0..config.num_hidden_layers {
            let weights = LayerWeights::read(store, config, index).unwrap();
            let mut rows = RowCounter(0);
            let pieces = nq_runtime::stepper::plan(&a.lengths, &[], own.0.cut());
            own.0.reserve(&pieces).unwrap();
            let layer = (index, &weights);
            let sums = own.0.sums(layer, &a, &pieces, &mut rows).unwrap();
            assert_eq!(rows.0, 98);
            let seen = |stepper: &mut dyn LayerStepper, hidden: &Hidden| {
                let mut seen = AllInputs::default();
                stepper.observe(index, &weights, hidden, &mut seen).unwrap();
                seen.squares(config, index)
            };
            let (seen, expected) = (seen(&mut own, &a), seen(&mut cpu, &b));
            for ((sum, seen), expected) in sums.iter().flatten().zip(&seen).zip(&expected) {
                let diagonal: Vec<f32> = sum.iter().step_by(seen.len() + 1).copied().collect();
                assert!(off(&diagonal, seen) < 1e-5, "{}", off(&diagonal, seen));
                assert!(off(seen, expected) < 1e-4, "{}", off(seen, expected));
                let n = seen.len();
                let mirrored: Vec<f32> = (0..n * n).map(|i| sum[i % n * n + i / n]).collect();
                assert!(off(sum, &mirrored) < 1e-5);
            }
            own.layer(index, &weights, &mut a, &mut ()).unwrap();
            cpu.layer(index, &weights, &mut b, &mut ()).unwrap();
            assert!(off(&a.data, &b.data) < 1e-4, "{}", off(&a.data, &b.data));
        }
        let norm = Ending::read(store, config).unwrap();
        let rows = 3..40;
        let a = own.head(&norm, &embedding, &a, rows.clone()).unwrap();
        let b = cpu.head(&norm, &embedding, &b, rows).unwrap();
        assert!(off(&a, &b) < 1e-4, "{}", off(&a, &b));
    }

    #[test]
    fn overflow_is_reported_with_its_layer() {
        let checkpoint = demo();
        let (config, store) = (checkpoint.config(), checkpoint.store());
        let weights = LayerWeights::read(store, config, 1).unwrap();
        let mut hidden = Hidden {
            data: vec![f32::NAN; 2 * config.hidden_size],
            lengths: vec![2],
            tokens: vec![0; 2],
            images: Vec::new(),
        };
        let mut own = Stepper(FullPrecision::new(CpuOps, config, 64));
        let error = own.layer(1, &weights, &mut hidden, &mut ()).unwrap_err();
        assert!(error.to_string().contains("layer 1"), "{error}");
        hidden.lengths = vec![3];
        hidden.tokens.push(0);
        let error = own.layer(1, &weights, &mut hidden, &mut ()).unwrap_err();
        assert!(error.to_string().contains("residual stream"), "{error}");
    }
}
