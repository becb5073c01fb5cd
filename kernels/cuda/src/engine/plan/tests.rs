mod downloads;
mod streams;

use super::*;
use crate::Version;
use crate::bank::StageSizes;
use crate::engine::adapters::AdapterWidths;
use crate::engine::held::HeldLayer;
use crate::engine::held::stack;
use crate::engine::model::held_layer;
use crate::engine::weights::{
    BankSizes, TrellisCodes, bank_sizes, head, no_weight, stored_by_layer, weight_bytes,
};
use crate::pack::Packing;
use crate::{DeviceLinear, GpuInfo, HalfRows, MOST_SEQUENCES, MOST_WIDE_SEQUENCES};
use nq_formats::gguf::BlockType;
use nq_formats::{
    AffineScheme, AffineWeight, Bits, Exl3Code, Exl3Scheme, Group, QuantizedWeight, Scheme, Tensor,
    TensorEntry, Weight, ZeroPoints, Zeros, trellis::Code,
};
use nq_kernels::KernelSet;
use nq_kernels::registry::WeightKind;
use nq_model::forward::{Layer, VectorSpec};
use nq_model::{DType, Dims, Experts, LinearSpec, ModelConfig, Product};
use nq_runtime::LayerWeights;
use nq_runtime::interface::DraftLayer;
use nq_runtime::weights::Kinds;
use nq_testkit::sessions::session_spec;

/// Qwen3-8B's shape.
fn config() -> ModelConfig {
    nq_model::Preset::find("qwen3-8b")
        .expect("a published shape")
        .config()
}

fn spec(ctx: usize, kv: KvType) -> SessionSpec {
    session_spec(1, ctx, kv, 512)
}

/// A weight of zeros.
fn zeros(scheme: AffineScheme, dims: Dims) -> Weight {
    let Dims { rows, cols } = dims;
    let groups = rows * scheme.group.count(cols);
    let packed = rows * scheme.bits.bytes(scheme.group.count(cols));
    let zeros = match scheme.zeros {
        Zeros::None => ZeroPoints::None,
        Zeros::Integer => ZeroPoints::Integer(vec![0; packed].into()),
        Zeros::Offset => ZeroPoints::Offset(vec![half::f16::ONE; groups].into()),
    };
    let codes = vec![0; rows * scheme.bits.bytes(cols)];
    let scales = vec![half::f16::ONE; groups];
    let weight = AffineWeight::new(scheme, dims, codes.into(), scales.into(), zeros, None);
    Weight::Quantized(QuantizedWeight::Affine(weight.unwrap()))
}

/// One weight of two rows of 64 inputs.
fn weight(scheme: AffineScheme) -> Weight {
    zeros(scheme, Dims::new(2, 64))
}

/// What plans count as one stack can be stacked, and packs to the kind that is counted; what cannot be stacked is counted
/// apart. Zero-points used to be a difference to plans alone.
#[test]
fn shared_experts_stack_where_their_weights_do() {
    let config = nq_model::Preset::find("qwen3.5-35b-a3b").unwrap();
    let config = config.config();
    let scheme = |bits, zeros| AffineScheme::new(bits, Group::Size(64), zeros);
    let (int4, plain) = (
        scheme(Bits::B4, Zeros::Integer),
        scheme(Bits::B4, Zeros::None),
    );
    let kinds = |experts: Scheme, shared: Scheme| {
        move |name: &str| match name {
            name if name.contains("shared_expert.") => WeightKind::in_scheme(shared, false),
            name if name.contains("experts.") => WeightKind::in_scheme(experts, false),
            _ => WeightKind::Dense(DType::BF16),
        }
    };
    let spec = config.layer(0);
    let stacks = |kinds: Kinds<'_>| {
        let kind = |kind| kinds(&spec.linear(kind).name(0));
        HeldLayer::new(&config, spec, false, kind).has_shared()
    };
    let bytes = |kinds: Kinds<'_>| {
        weight_bytes(&config, kinds, None, ExpertsAt::Gpu, None)
            .unwrap()
            .held
    };
    for (experts, shared) in [
        (int4, int4),
        (int4, plain),
        (plain, int4),
        (int4, scheme(Bits::B4, Zeros::Offset)),
        (int4, scheme(Bits::B8, Zeros::Integer)),
    ] {
        let kinds = kinds(experts.into(), shared.into());
        let stack = Weight::stack(&[weight(experts), weight(shared)]).ok();
        assert_eq!(stacks(&kinds), stack.is_some(), "{experts} {shared}");
        let kind = WeightKind::in_scheme(experts.into(), false);
        let stacked = kind.stacked(WeightKind::in_scheme(shared.into(), false));
        assert_eq!(stacked, stack.as_ref().map(WeightKind::of));
    }
    // A stack has the zero-points of those of its parts that have some.
    let same = kinds(int4.into(), int4.into());
    assert_eq!(bytes(&same), bytes(&kinds(int4.into(), plain.into())));
    let exl3 = |bits: usize| Scheme::Exl3(Exl3Scheme::new(Exl3Code::Mcg, 2 * bits).unwrap());
    assert!(stacks(&kinds(exl3(4), exl3(4))));
    assert!(!stacks(&kinds(exl3(4), exl3(5))));
    let octagon = nq_formats::TrellisScheme::of_bits(Code::Octagon, 4.0).unwrap();
    for scheme in [
        Scheme::Affine(int4.two_level(Bits::B8)),
        Scheme::Trellis(octagon),
    ] {
        assert!(!stacks(&kinds(scheme, scheme)));
    }
}

/// What is planned for a mixture by the kinds of its weights is what their matrices take, byte for byte: with the shared
/// expert behind the others where it can be, by itself where its scheme is another, and with the experts on the host.
#[test]
fn planned_mixtures_take_what_their_matrices_do() {
    let preset = nq_model::Preset::find("qwen3.5-35b-a3b").unwrap();
    let preset = preset.config();
    let experts = preset.experts.map(|e| Experts {
        count: 3,
        per_token: 1,
        width: 256,
        shared: 256,
        ..e
    });
    let config = ModelConfig {
        hidden_size: 256,
        vocab_size: 64,
        num_hidden_layers: 4,
        tie_word_embeddings: true,
        experts,
        ..preset
    };
    let scheme = AffineScheme::new;
    let int4 = scheme(Bits::B4, Group::Size(64), Zeros::Integer);
    for (shared, stands_behind) in [
        (int4, true),
        (scheme(Bits::B4, Group::Size(64), Zeros::None), true),
        (scheme(Bits::B4, Group::Size(64), Zeros::Offset), false),
        (scheme(Bits::B4, Group::Size(80), Zeros::Integer), false),
        (scheme(Bits::B8, Group::Size(64), Zeros::Integer), false),
        (scheme(Bits::B5, Group::Size(32), Zeros::None), false),
    ] {
        let scheme_of = |name: &str| match name {
            name if name.contains("shared_expert.") => Some(shared),
            name if name.contains("experts.") => Some(int4),
            _ => None,
        };
        let kinds = |name: &str| match scheme_of(name) {
            Some(scheme) => WeightKind::in_scheme(scheme.into(), false),
            None => WeightKind::Dense(DType::F32),
        };
        for on_host in [0, 2] {
            let account = Account::gpu();
            let gpu = Gpu::dry(INFO.clone(), account.clone());
            let mut kept = Vec::new();
            for index in 0..config.num_hidden_layers {
                let spec = config.layer(index);
                let tensor = |shape: Vec<usize>| {
                    let values = vec![0.0; shape.iter().product()];
                    Tensor::from_f32(shape, values)
                };
                let linear = |l: &LinearSpec| {
                    let dims = l.dims(&config);
                    match scheme_of(&l.name(index)) {
                        Some(scheme) => Ok(zeros(scheme, dims)),
                        None => tensor(vec![dims.rows, dims.cols]).map(Weight::Dense),
                    }
                };
                let vector = |v: VectorSpec| tensor(vec![v.len(&config)]);
                let weights = LayerWeights::collect(spec, linear, vector).unwrap();
                let held = held_layer(&config, &weights, index < on_host);
                assert_eq!(held.has_shared(), stands_behind && index >= on_host);
                let pack = |product: &'static Product| -> Result<DeviceLinear> {
                    let parts = held.parts(product).into_iter();
                    let parts: Vec<_> = parts.map(|p| p.weight(&weights)).collect::<Result<_>>()?;
                    let parts: Vec<&Weight> = parts.iter().map(|part| &**part).collect();
                    if parts.is_empty() {
                        return Ok(no_weight(&gpu)?);
                    }
                    let packing = Packing::new(&parts, stack(product), held.is_plain(product))?;
                    let rows: Vec<usize> = parts.iter().map(|w| w.dims().rows).collect();
                    let (kind, inputs) = (packing.kind(), packing.inputs());
                    let linear = DeviceLinear::zeros(&gpu, kind, &rows, inputs)?;
                    Ok(linear.with_order(&gpu, packing.order().is_some())?)
                };
                let vector = |v: VectorSpec| Ok(gpu.zeros::<f32>("a norm", v.len(&config))?);
                let mut layer = Layer::new(index, spec, pack, vector).unwrap();
                if held.has_shared() {
                    layer.drop_shared_expert();
                }
                let rates = weights.spec.recurrence().map(|d| weights.product(&d.rates));
                let router = held.router().map(|router| {
                    let linears = router.linears();
                    linears.map(|l| weights.linear(l.kind)).collect()
                });
                let halves = rates.into_iter().chain(router).map(|parts: Vec<&Weight>| {
                    let rows = parts.iter().map(|w| w.dims().rows).sum();
                    let bytes = HalfRows::bytes(rows, config.hidden_size);
                    gpu.zeros::<u8>("a weight", bytes).unwrap()
                });
                kept.push((layer, halves.collect::<Vec<_>>()));
            }
            let _norm = gpu.zeros::<f32>("a norm", config.hidden_size).unwrap();
            let _head = head(&gpu, &config, &kinds, None).unwrap();
            let planned = weight_bytes(&config, &kinds, None, ExpertsAt::Cpu(on_host), None)
                .unwrap()
                .held;
            assert_eq!(planned, account.held(), "{shared}, {on_host} on the host");
        }
    }
}

/// Experts in trellis codes take their own bits, on the device and in banks; scales of rows and the like a hundredth more.
#[test]
fn experts_in_trellis_codes_take_their_bits() {
    let preset = nq_model::Preset::find("qwen3-30b-a3b").unwrap();
    let config = preset.config();
    let three = nq_formats::TrellisScheme::of_bits(Code::Octagon, 3.0).unwrap();
    let kinds = |name: &str| match name.contains("experts.") {
        true => WeightKind::in_scheme(Scheme::Trellis(three), false),
        false => WeightKind::Dense(DType::BF16),
    };
    let bytes = |at| weight_bytes(&config, &kinds, None, at, None).unwrap().held;
    let experts = 48 * 128 * 3 * 2048 * 768 / 8 * 3;
    let near =
        |found: usize, expected: usize| found >= expected && found - expected < expected / 100;
    let rest = bytes(ExpertsAt::Cpu(config.num_hidden_layers));
    assert!(near(bytes(ExpertsAt::Gpu) - rest, experts));
    let rooms = |rooms| bytes(ExpertsAt::Bank { rooms, whole: 0 });
    assert!(near(rooms(128) - rooms(64), experts / 2));
}

/// Experts in EXL3's codes take their own bits on the device, with scales of inputs of each; banks have none of them.
#[test]
fn experts_in_exl3_take_their_bits() {
    let preset = nq_model::Preset::find("qwen3-30b-a3b").unwrap();
    let config = preset.config();
    let of_bits = |bits: usize| Exl3Scheme::new(Exl3Code::Mcg, 2 * bits).unwrap();
    let kinds = |name: &str| match name {
        name if name.contains("down_proj") => WeightKind::Exl3(of_bits(5)),
        name if name.contains("experts.") => WeightKind::Exl3(of_bits(4)),
        _ => WeightKind::Dense(DType::BF16),
    };
    let bytes = |at| weight_bytes(&config, &kinds, None, at, None).unwrap().held;
    let rest = bytes(ExpertsAt::Cpu(config.num_hidden_layers));
    let scales = 3 * (2048 + 768) * 2;
    let experts = 48 * 128 * (2048 * 768 / 8 * (4 + 4 + 5) + scales);
    // Routers stand beside them.
    let found = bytes(ExpertsAt::Gpu) - rest;
    assert!(found >= experts && found - experts < experts / 500);
    assert!(bank_sizes(&config, &kinds).unwrap().is_none());
}

static INFO: GpuInfo = GpuInfo {
    ordinal: 0,
    name: String::new(),
    capability: Version::new(9, 0),
    multiprocessors: 132,
    shared_memory: 227 << 10,
    l2_bytes: 50 << 20,
    memory: 141 << 30,
    driver: 13_000,
    multi_process: false,
};

fn bf16(_: &str) -> WeightKind {
    WeightKind::Dense(DType::BF16)
}

/// A model of that shape, with memory reserved for its head.
struct PlannedModel {
    config: ModelConfig,
    head: DeviceLinear,
}

impl PlannedModel {
    fn new() -> Self {
        let config = config();
        let gpu = Gpu::dry(INFO.clone(), Account::gpu());
        let head = head(&gpu, &config, &bf16, None).unwrap();
        PlannedModel { config, head }
    }

    fn request<'a>(&'a self, weights: usize, session: &'a SessionSpec) -> MemoryRequest<'a> {
        MemoryRequest {
            info: &INFO,
            together: MOST_SEQUENCES,
            config: &self.config,
            kernels: KernelSet::Fused,
            head: &self.head,
            trellis: TrellisCodes::None,
            sorted: false,
            few_rows: MOST_SEQUENCES,
            part: None,
            adapters: AdapterWidths::default(),
            stage: None,
            weights,
            session: Some(session),
            grows: false,
        }
    }

    /// The memory of a session whose steps take `together` sequences.
    fn session(&self, spec: &SessionSpec, together: usize) -> DeviceMemory {
        let mut request = self.request(0, spec);
        request.together = together;
        request.plan().unwrap()
    }
}

#[test]
fn what_does_not_fit_is_refused_with_figures() {
    let (model, spec) = (PlannedModel::new(), spec(32_768, KvType::F16));
    let request = model.request(5_000_000_000, &spec);
    let plan = request.plan().unwrap();
    assert!(request.check(plan.total()).is_ok());
    let refused = request.check(plan.total() - 1).unwrap_err().to_string();
    let human = |bytes: usize| human_bytes(bytes as u64);
    for figure in [
        human(plan.total()),
        human(plan.total() - 1),
        "5.00 GB of weights".into(),
        format!("{} for a context of 32768 tokens", human(plan.kv)),
        format!("{} of activations", human(plan.scratch)),
        "a context of 32512 tokens (--ctx), or INT8 keys and values (--kv 8), or the CPU".into(),
    ] {
        assert!(refused.contains(&figure), "{figure} in {refused}");
    }
}

#[test]
fn layers_that_draft_are_counted_and_can_be_left_out() {
    let model = PlannedModel::new();
    let plain = spec(32_768, KvType::F16);
    let drafts = SessionSpec {
        drafts: DraftedBy::Layer(DraftLayer::of(&model.config)),
        ..plain
    };
    let plan = |spec: &SessionSpec| model.request(5_000_000_000, spec).plan().unwrap();
    // The keys and values of one layer more than 36.
    let (with, without) = (plan(&drafts), plan(&plain));
    let layer = without.kv / 36;
    assert!((layer - (1 << 20)..layer + (1 << 20)).contains(&(with.kv - without.kv)));
    assert!(with.scratch > without.scratch + 16 * 4 * model.config.hidden_size);
    let request = model.request(5_000_000_000, &drafts);
    let help = |free| request.help(free);
    assert!(help(without.total()).contains("no drafts (--draft none)"));
    assert!(!help(without.total() - 1).contains("--draft"));
    let request = model.request(5_000_000_000, &plain);
    assert!(!request.help(without.total()).contains("--draft"));
}

/// The context that `help` suggests.
fn suggested(help: &str) -> usize {
    let (_, rest) = help.split_once("context of ").expect(help);
    rest.split(' ').next().unwrap().parse().expect(help)
}

#[test]
fn as_few_experts_as_necessary_stay_on_the_cpu() {
    let mut model = PlannedModel::new();
    let spec = spec(4096, KvType::F16);
    let rest = |model: &PlannedModel| model.request(0, &spec).plan().unwrap().total();
    let weights = |at: ExpertsAt| match at {
        ExpertsAt::Bank { rooms, whole } => {
            Ok(2_500_000_000 + rooms * 450_000_000 + whole * (200_000_000 - rooms * 12_500_000))
        }
        ExpertsAt::Gpu | ExpertsAt::Cpu(_) => Ok(10_000_000_000 - at.cpu_layers() * 200_000_000),
    };
    let split = |model: &PlannedModel, wanted, bank, free| {
        let free = rest(model) + free;
        let found = model
            .request(0, &spec)
            .split(wanted, free, bank, usize::MAX, weights);
        let found = found.map(|placed| (placed.at, placed.weights));
        found.map_err(|e| e.to_string())
    };
    // A dense model has no experts to leave on the CPU.
    assert!(split(&model, None, None, 9_900_000_000).is_err());
    model.config.experts = Some(nq_model::Experts {
        count: 16,
        per_token: 2,
        width: 768,
        normalized: true,
        shared: 0,
    });
    let all = Ok((ExpertsAt::Gpu, 10_000_000_000));
    assert_eq!(split(&model, None, None, 10_000_000_000), all);
    let cpu = |layers, weights| Ok((ExpertsAt::Cpu(layers), weights));
    assert_eq!(
        split(&model, None, None, 9_999_999_999),
        cpu(1, 9_800_000_000)
    );
    assert_eq!(
        split(&model, None, None, 2_800_000_000),
        cpu(36, 2_800_000_000)
    );
    let refused = split(&model, None, None, 2_799_999_999).unwrap_err();
    assert!(refused.contains("2.80 GB of weights"), "{refused}");
    // What is asked for is done, or refused.
    let sizes = BankSizes {
        layers: vec![220_000_000; 36],
        ..BankSizes::default()
    };
    let bank = Some(&sizes);
    for bank in [None, bank] {
        let found = split(&model, Some(5), bank, 20_000_000_000);
        assert_eq!(found, cpu(5, 9_000_000_000));
        assert!(split(&model, Some(5), bank, 8_999_999_999).is_err());
    }
    // With banks, as many experts of each layer have rooms as fit, at least one.
    assert_eq!(split(&model, None, bank, 10_000_000_000), all);
    let rooms = |rooms, weights| Ok((ExpertsAt::Bank { rooms, whole: 0 }, weights));
    assert_eq!(
        split(&model, None, bank, 9_999_999_999),
        rooms(15, 9_250_000_000)
    );
    assert_eq!(
        split(&model, None, bank, 9_249_999_999),
        rooms(14, 8_800_000_000)
    );
    // Beside the weights stand the places of experts, and stacks for prompts.
    assert_eq!(
        split(&model, None, bank, 2_960_000_000),
        rooms(1, 2_950_000_000)
    );
    assert_eq!(
        split(&model, None, bank, 2_949_999_999),
        cpu(36, 2_800_000_000)
    );
    // The computer's memory has no room for the experts of 6 layers, which are all on the GPU then.
    let host = 30 * 220_000_000;
    let few = model.request(0, &spec);
    let few = few.split(None, rest(&model) + 8_000_000_000, bank, host, weights);
    let whole = ExpertsAt::Bank {
        rooms: 11,
        whole: 6,
    };
    assert_eq!(few.unwrap().at, whole);
    // Nor has the GPU: the CPU runs some.
    for (free, host) in [(2_900_000_000, host), (9_999_999_999, 1_000)] {
        let none = model.request(0, &spec);
        let none = none.split(None, rest(&model) + free, bank, host, weights);
        assert!(none.unwrap().at.cpu_layers() > 0);
    }
    // What sessions to come shall have is not taken by rooms, but by all experts if they fit.
    let later = MemoryRequest {
        session: None,
        ..model.request(0, &spec)
    };
    let at = |free| {
        later
            .split(None, free, bank, usize::MAX, weights)
            .unwrap()
            .at
    };
    assert_eq!(at(10_000_000_000), ExpertsAt::Gpu);
    assert_eq!(
        at(9_999_999_999),
        ExpertsAt::Bank {
            rooms: 11,
            whole: 0
        }
    );
    // One that may grow has what it asks for, and as much as one to come.
    let free = 9_000_000_000;
    for (slots, ctx, more) in [(1, 4096, true), (2, 16_384, false)] {
        let asked = session_spec(slots, ctx, KvType::F16, 2048);
        let taken = model.request(0, &asked).plan().unwrap().total();
        assert_eq!(taken < free / 4, more, "{taken}");
        let growing = MemoryRequest {
            grows: true,
            ..model.request(0, &asked)
        };
        let found = growing.split(None, free, bank, usize::MAX, weights);
        let most = (free - taken.max(free / 4) - 2_500_000_000) / 450_000_000;
        assert_eq!(found.unwrap().at.rooms(), Some(most));
    }
    // One conversation takes more tokens of its prompts at once, if that costs at most a quarter of the rooms.
    let rows = |max_rows| session_spec(1, 16_384, KvType::F16, max_rows);
    let taken = |spec: &SessionSpec| model.request(0, spec).plan().unwrap().total();
    let (usual, long) = (rows(2048), rows(8192));
    let free = taken(&usual) + 9_600_000_000;
    // A little is taken by tables.
    let fit = |spec| (free - taken(spec) - 2_510_000_000) / 450_000_000;
    let (most, fewer) = (fit(&usual), fit(&long));
    let found = model
        .request(0, &usual)
        .split(None, free, bank, usize::MAX, weights);
    let found = found.unwrap();
    assert_eq!(found.is_wide, fewer >= most - most / 4, "{fewer} of {most}");
    let rooms = if found.is_wide { fewer } else { most };
    assert_eq!(found.at, ExpertsAt::Bank { rooms, whole: 0 });
    let few = model.request(0, &usual).split(
        None,
        taken(&usual) + 2_960_000_000,
        bank,
        usize::MAX,
        weights,
    );
    assert!(!few.unwrap().is_wide);
    for narrow in [rows(512), SessionSpec { slots: 2, ..usual }] {
        assert!(wide(&narrow).is_none() && wide(&usual).is_some_and(|s| s.max_rows == 8192));
    }
}

#[test]
fn what_is_suggested_fits_and_no_longer_context_does() {
    let model = PlannedModel::new();
    for (ctx, free) in [
        (65_536, 8_000_000_000),
        (40_960, 7_500_000_000),
        (131_072, 9_123_456_789),
    ] {
        let asked = spec(ctx, KvType::F16);
        let help = model.request(5_000_000_000, &asked).help(free);
        let ways: Vec<&str> = help.split(", or ").collect();
        for (way, kv) in ways.iter().zip([KvType::F16, KvType::Int8]) {
            assert_eq!(way.contains("INT8"), kv == KvType::Int8, "{help}");
            let longest = suggested(way);
            let total = |ctx| {
                let spec = spec(ctx, kv);
                model.request(5_000_000_000, &spec).plan().unwrap().total()
            };
            assert!(total(longest) <= free, "{help}");
            assert!(total(longest + CTX_STEP) > free, "{help}");
        }
    }
}

#[test]
fn what_cannot_help_is_not_suggested() {
    let (model, spec) = (PlannedModel::new(), spec(8192, KvType::Int8));
    // 8.2 billion parameters in 16 bits do not fit 12 GB; in 4 bits they do.
    let help = model.request(16_400_000_000, &spec).help(12_000_000_000);
    assert!(
        help.starts_with("4-bit weights") && !help.contains("--ctx"),
        "{help}"
    );
    let help = model.request(16_400_000_000, &spec).help(2_000_000_000);
    assert_eq!(help, "the CPU (--device cpu)");
    // With the weights already loaded.
    let session = model.request(0, &spec);
    let refused = session
        .check(session.plan().unwrap().total() - 1)
        .unwrap_err();
    let refused = refused.to_string();
    assert!(!refused.contains("weights"), "{refused}");
    assert!(!refused.contains("--kv 8"), "{refused}");
}

#[test]
fn layers_of_other_bits_are_counted_as_stored() {
    let entry = |name: &str, bytes| TensorEntry {
        name: name.into(),
        dtype: String::new(),
        shape: Vec::new(),
        bytes,
        file: String::new(),
    };
    let entries = [
        entry("model.layers.0.mlp.up_proj.codes", 60),
        entry("model.layers.0.mlp.up_proj.scales", 40),
        entry("model.layers.1.mlp.up_proj.codes", 200),
        entry("model.norm.weight", 7),
    ];
    let stored = stored_by_layer(&entries, 2).unwrap();
    assert_eq!(stored, [100, 200]);
    assert_eq!(stored_by_layer(&entries, 3), None);
    assert_eq!(stored_by_layer(&entries, 1), None);
    let gguf = [entry("blk.0.attn_q.weight", 5), entry("output.weight", 9)];
    assert_eq!(stored_by_layer(&gguf, 1), Some(vec![5]));
    // Nor do layers to draft with belong to the model.
    let mtp = [
        entry("model.layers.0.mlp.up_proj.weight", 60),
        entry("mtp.layers.0.mlp.up_proj.weight", 30),
    ];
    assert_eq!(stored_by_layer(&mtp, 1), Some(vec![60]));
    let names = ["blk.0.attn_q", "blk.1.attn_q", "blk.1.nextn.eh_proj"];
    assert_eq!(
        stored_by_layer(&names.map(|n| entry(n, 8)), 1),
        Some(vec![8])
    );
}

#[test]
fn a_session_counts_keys_and_values_and_rows() {
    let model = PlannedModel::new();
    let with = |spec: &SessionSpec| model.session(spec, MOST_SEQUENCES);
    let plan = with(&spec(8192, KvType::F16));
    // 64 pages and the unowned one: 36 layers, 8 heads of 128, keys and values of two bytes each.
    let bytes = 36 * (8192 + 128) * 8 * 128 * 2 * 2;
    assert!((bytes..bytes + (6 << 20)).contains(&plan.kv), "{plan:?}");
    assert!(with(&spec(8192, KvType::Int8)).kv < plan.kv * 9 / 16);
    let twice = with(&spec(16384, KvType::F16)).kv;
    assert!(twice < 2 * plan.kv && twice > plan.kv * 19 / 10);
    // 512 rows of 4096 + 6144 f32 and 4096 + 4096 + 12288 FP16, logits of 64 rows; a step of 16 rows with
    // logits, biases and counts of tokens.
    let rows = 512 * (4 * 10240 + 2 * 20480) + 16 * 10 * 151_936;
    assert!(
        (rows..2 * rows + 64 * 4 * 151_936).contains(&plan.scratch),
        "{plan:?}"
    );
    // A step has as many rows as there are slots, up to the device's limit. Each row has logits,
    // biases and counts of tokens; in wide steps also FP16 rows and partial sums. Added to that: the
    // candidates, and up to 16 parts of attention over shared pages, 520 bytes for each of 32 query
    // heads.
    let many = SessionSpec {
        slots: 64,
        ..spec(8192, KvType::F16)
    };
    let narrow = model.session(&many, MOST_SEQUENCES).scratch;
    let wide = model.session(&many, MOST_WIDE_SEQUENCES).scratch;
    let more = 48 * (10 * 151_936 + 4 * 10240) + 64 * (2 * 20480 + 8 * 4 * 4096);
    assert!(
        (more..more + more / 10 + 64 * 16 * 32 * 520).contains(&(wide - narrow)),
        "{}",
        wide - narrow
    );
    let few = SessionSpec { slots: 16, ..many };
    assert_eq!(
        model.session(&few, MOST_WIDE_SEQUENCES),
        model.session(&few, MOST_SEQUENCES)
    );
}

#[test]
fn weights_are_counted_layer_by_layer_or_as_they_are_stored() {
    let config = config();
    let all = weight_bytes(&config, &bf16, None, ExpertsAt::Gpu, None)
        .unwrap()
        .held;
    let parameters = 2 * config.parameters();
    assert!(
        (parameters..parameters + parameters / 100).contains(&all),
        "{all}"
    );
    let layers = config.num_hidden_layers;
    let stored = |last: u64| {
        let mut stored = vec![4; layers];
        stored[layers - 1] = last;
        weight_bytes(&config, &bf16, Some(&stored), ExpertsAt::Gpu, None)
            .unwrap()
            .held
    };
    assert_eq!(stored(4), all);
    let layer = 2 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288);
    let off = all - stored(2) - layer / 2;
    assert!(off < 1 << 20, "{off}");
}

#[test]
fn rooms_and_tables_are_planned() {
    let config = ModelConfig {
        num_hidden_layers: 3,
        vocab_size: 1000,
        ..nq_model::Preset::find("qwen3.5-35b-a3b")
            .expect("a published shape")
            .config()
    };
    let int4 = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
    let kinds = |name: &str| match name.contains("experts.") || name.contains("shared_expert.") {
        true => WeightKind::in_scheme(int4.into(), false),
        false => WeightKind::Dense(DType::BF16),
    };
    let sizes = bank_sizes(&config, &kinds).unwrap().expect("a mixture");
    let bytes = |at| weight_bytes(&config, &kinds, None, at, None).unwrap().held;
    let (all, bare) = (bytes(ExpertsAt::Gpu), bytes(ExpertsAt::Cpu(3)));
    let with_rooms = |rooms| bytes(ExpertsAt::Bank { rooms, whole: 0 });
    let each = (with_rooms(101) - with_rooms(1)) / 100;
    // Each layer's rooms are one buffer, whose size is rounded up.
    let rounded = config.num_hidden_layers * (4 << 20);
    for rooms in [2, 5, 50] {
        let more = with_rooms(rooms) - with_rooms(1);
        assert!(
            more.abs_diff((rooms - 1) * each) <= rounded,
            "{rooms}: {more}"
        );
    }
    // All experts, with the shared one, and a table of their places and counts.
    let whole = with_rooms(257);
    assert!(whole.abs_diff(all) <= all / 50, "{whole} and {all}");
    assert_ne!(sizes.stage, StageSizes::default());
    assert!(bare + 5 * each <= with_rooms(5) + rounded);
}
