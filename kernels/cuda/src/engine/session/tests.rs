//! Passes with adapters, on devices that are imagined.

use super::memory::SessionMemory;
use crate::Version;
use crate::driver::trace::launches;
use crate::engine::adapters::{Adapted, AdaptedSequences, CudaAdapters, by_row};
use crate::engine::layer::CudaLayers;
use crate::engine::pass::{Context, Fused, Inputs, Pass, PassState, Rows, Sequences, Sums};
use crate::engine::request::MemoryRequest;
use crate::engine::weights::TrellisCodes;
use crate::{
    DeltaSpan, DeviceLinear, Gpu, HalfRows, MOST_SEQUENCES, MOST_WIDE_SEQUENCES, PackedKind,
    SequenceRows,
};
use nq_formats::{Bits, Tensor, Weight, Zeros};
use nq_kernels::KernelSet;
use nq_kernels::pages::KvType;
use nq_model::forward::Layer;
use nq_model::{ModelConfig, Preset};
use nq_runtime::Result;
use nq_runtime::interface::AppliedAdapter;
use nq_runtime::states::is_recurrent;
use nq_testkit::sessions::session_spec;

const INT4: PackedKind = PackedKind::Affine {
    bits: Bits::B4,
    zeros: Zeros::Integer,
    groups: 4,
    two_level: false,
    table: false,
};

fn layers(gpu: &Gpu, c: &ModelConfig) -> CudaLayers {
    let mut layers = CudaLayers::new(c);
    for index in 0..c.num_hidden_layers {
        let pack = |product: &'static nq_model::Product| -> Result<_> {
            let heights: Vec<usize> = product.linears.iter().map(|l| l.dims(c).rows).collect();
            Ok(DeviceLinear::zeros(gpu, INT4, &heights, product.inputs(c))?)
        };
        let vector =
            |v: nq_model::forward::VectorSpec| -> Result<_> { Ok(gpu.zeros("a norm", v.len(c))?) };
        if let Some(d) = c.delta.filter(|_| is_recurrent(c.layer(index))) {
            let shape = vec![2 * d.value_heads, c.hidden_size];
            let zeros = vec![0.0; shape[0] * shape[1]];
            let rates = Weight::Dense(Tensor::from_f32(shape, zeros).unwrap());
            layers.rates.push(HalfRows::new(gpu, &[&rates]).unwrap());
        }
        let layer = Layer::new(index, c.layer(index), pack, vector).unwrap();
        layers.all.push(layer);
    }
    layers
}

/// The kernels of a pass over `m` rows of a step, or of a prompt, of sequences of which `applied` says the adapters.
fn kernels(
    gpu: &Gpu,
    c: &ModelConfig,
    (m, prompt): (usize, bool),
    applied: &[AppliedAdapter],
) -> Vec<String> {
    let spec = session_spec(MOST_WIDE_SEQUENCES, 512, KvType::F16, 256);
    let adapters = CudaAdapters::imagined(gpu, c, 2).unwrap();
    let head = DeviceLinear::zeros(gpu, INT4, &[c.vocab_size], c.hidden_size).unwrap();
    let request = MemoryRequest {
        info: gpu.info(),
        together: MOST_WIDE_SEQUENCES,
        config: c,
        kernels: KernelSet::Fused,
        head: &head,
        trellis: TrellisCodes::None,
        sorted: false,
        few_rows: MOST_SEQUENCES,
        part: None,
        adapters: adapters.widths,
        stage: None,
        weights: 0,
        session: Some(&spec),
        grows: false,
    };
    let mut memory = SessionMemory::new(gpu, &request, &spec).unwrap();
    let mut sequences = AdaptedSequences::new(&[], spec.slots);
    sequences.applied[0] = applied.to_vec();
    sequences.begin(by_row((0..m).map(|row| Some(if prompt { 0 } else { row }))));
    let adapted = Adapted::of_pass(&adapters, &sequences.runs, &mut memory.adapters);
    let (stream, layers) = (gpu.stream().unwrap(), layers(gpu, c));
    let on = Context {
        stream: &stream,
        config: c,
        layers: &layers,
        kernels: KernelSet::Fused,
        pages: &memory.pages,
        states: memory.states.as_ref(),
        cos_sin: &memory.cos_sin,
        host: None,
    };
    let (step, many) = (&mut memory.step, &mut memory.many);
    let spans = [DeltaSpan {
        rows: SequenceRows {
            row: 0,
            count: m,
            position: 0,
            slot: 0,
        },
        mark: None,
    }];
    let mut fused = if prompt {
        Fused::IN_PROMPTS
    } else {
        Fused::in_step(m, MOST_SEQUENCES)
    };
    fused.rates &= adapted.is_none();
    let (rows, inputs, sequences) = match prompt {
        true => (
            Rows {
                x: &mut many.x,
                qkv: &mut many.qkv,
                rates: Some(&mut many.rates),
                experts: None,
                taps: None,
            },
            Inputs::Half {
                halves: &mut many.halves,
                full: None,
                sums: None,
            },
            Sequences::Prompts {
                rows: &many.rows,
                spans: &spans,
                recurrent: many.recurrent.as_mut(),
            },
        ),
        false => (
            Rows {
                x: &mut step.x,
                qkv: &mut step.qkv,
                rates: Some(&mut step.rates),
                experts: None,
                taps: None,
            },
            match (m <= MOST_SEQUENCES, step.wide.as_mut()) {
                (false, Some(wide)) => Inputs::Half {
                    halves: &mut wide.halves,
                    full: None,
                    sums: (fused.sums == Sums::Parts).then_some(&mut wide.sums),
                },
                _ => Inputs::Full {
                    attended: &mut step.attended,
                    gated: &mut step.gated,
                    columns: &mut step.columns,
                    prepares: adapted.is_none(),
                },
            },
            Sequences::Step {
                step: &mut step.step,
                scratch: &mut step.attention,
                shared: None,
                splits: 1,
                runs: false,
            },
        ),
    };
    let mut pass = Pass {
        on,
        m,
        fused,
        rows,
        inputs,
        sequences,
        streams: None,
        ranks: None,
        observer: None,
        drafting: None,
        adapted,
        state: PassState::default(),
    };
    launches();
    layers
        .all
        .iter()
        .try_for_each(|l| l.run(&mut pass))
        .unwrap();
    let name = |line: String| line.split(' ').next().unwrap_or_default().to_owned();
    launches().into_iter().map(name).collect()
}

/// Every operand of a pass with adapters fits its kernel, and each product of each adapter is added once.
#[test]
fn adapters_add_to_every_product() {
    let applied = |adapter, scale| AppliedAdapter { adapter, scale };
    for (preset, products) in [("qwen3-0.6b", 4), ("qwen3.5-0.8b", 4)] {
        let c = Preset::find(preset).unwrap().config();
        let layers = c.num_hidden_layers.min(4);
        let c = ModelConfig {
            num_hidden_layers: layers,
            ..c
        };
        let gpu = &Gpu::imagined(Version::new(9, 0), 132, 227);
        for shape in [
            (1, false),
            (5, false),
            (16, false),
            (40, false),
            (200, true),
        ] {
            let count = |applied: &[AppliedAdapter]| {
                let all = kernels(gpu, &c, shape, applied);
                all.iter().filter(|k| k.starts_with("grad_gemm")).count()
            };
            assert_eq!(count(&[]), 0);
            let one = count(&[applied(0, 1.0)]);
            assert!(one >= products * layers, "{preset} {shape:?}: {one}");
            assert_eq!(count(&[applied(1, 0.5), applied(0, 1.0)]), 2 * one);
        }
    }
}
