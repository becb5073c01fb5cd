//! Every Linear kernel of the CPU's registry on shapes of Qwen3-0.6B, attention and norms.
//!
//! `cargo bench --bench kernels` measures with criterion: one row of x in bytes of weights
//! per second, read from memory (a ring of copies larger than the caches); 128 rows in
//! operations per second ("elem" is one multiplication or addition). With
//! `NQ_RECORD=FILE` the same cases are instead timed briefly and appended to a CSV file,
//! with the memory bandwidth measured in the same run; see `benches/records`.
#![allow(missing_docs, reason = "a benchmark's main")]

use criterion::{BenchmarkId, Criterion, Throughput};
use nq_cpu::linear::kernel::LinearKernel;
use nq_cpu::linear::kernels::KERNELS;
use nq_cpu::{Cpu, Epilogue, KvPages, KvSequence, Linear, Span};
use nq_formats::{AffineScheme, Bits, Group, Weight, Zeros};
use nq_kernels::pages::{KvType, PAGE};
use nq_kernels::registry::{Activations, KernelSet, WeightKind};
use nq_kernels::{Isa, IsaChoice};
use nq_model::{DType, Dims};
use std::fmt::Write as _;
use std::io::Write as _;
use std::time::{Duration, Instant};

/// A projection of Qwen3-0.6B: `(out, in)`.
const SHAPE: (usize, usize) = (3072, 1024);

/// Least total size of the copies of a weight.
const RING: usize = 512 << 20;

/// Rows of x in the cases of many rows.
const ROWS: usize = 128;

fn main() {
    if let Some(path) = std::env::var_os("NQ_RECORD") {
        record(&path);
        return;
    }
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    for case in cases() {
        let mut group = criterion.benchmark_group(case.kernel.info.name);
        let cpu = cpu(case.kernel.isa);
        let run = Prepared::new(&cpu, &case);
        group.throughput(if case.rows == 1 {
            Throughput::Bytes(run.bytes() as u64)
        } else {
            Throughput::Elements(case.operations())
        });
        let id = BenchmarkId::new(case.weight_name(), format!("m{}", case.rows));
        let mut turn = 0;
        group.bench_function(id, |b| {
            let mut y = vec![0.0; case.rows * SHAPE.0];
            b.iter(|| {
                run.once(&cpu, turn, &mut y);
                turn += 1;
            });
        });
        group.finish();
    }
    attention(&mut criterion);
    norms(&mut criterion);
    criterion.final_summary();
}

/// Attention with the heads of Qwen3-0.6B: one row over 4,096 cached positions, and 512 rows
/// over themselves.
fn attention(criterion: &mut Criterion) {
    let (heads, kv_heads, d) = (16, 8, 128);
    let mut group = criterion.benchmark_group("attention");
    for (isa, (rows, len), kind) in combinations([(1, 4096), (512, 512)]) {
        let cpu = cpu(isa);
        let table: Vec<u32> = (0..len.div_ceil(PAGE) as u32).collect();
        let mut pages = KvPages::new(kind, table.len(), kv_heads, d);
        let row = weight::values(kv_heads * d);
        for p in 0..len {
            pages.store(table[p / PAGE], p % PAGE, &row, &row);
        }
        let q = weight::values(rows * heads * d);
        let mut y = vec![0.0; rows * heads * d];
        let span = Span {
            row: 0,
            len: rows,
            position: len - rows,
        };
        group.throughput(match rows {
            1 => Throughput::Bytes((2 * kv_heads * len * kind.bytes(d)) as u64),
            // Scores and sums over the positions up to each row.
            _ => Throughput::Elements((4 * heads * d * rows * (rows + 1) / 2) as u64),
        });
        let id = BenchmarkId::new(isa.name(), format!("{kind}-m{rows}"));
        group.bench_function(id, |b| {
            let kv = KvSequence::new(&pages, &table);
            b.iter(|| cpu.attention(&q, heads * d, span, heads, d, kv, &mut y));
        });
    }
    group.finish();
}

/// Every available instruction set with each shape and type of cache.
fn combinations(
    shapes: [(usize, usize); 2],
) -> impl Iterator<Item = (Isa, (usize, usize), KvType)> {
    let present = Isa::ALL.into_iter().filter(|i| i.available());
    present.flat_map(move |isa| {
        shapes
            .into_iter()
            .flat_map(move |shape| [KvType::F16, KvType::Int8].map(|kind| (isa, shape, kind)))
    })
}

/// The norms of one layer of Qwen3-0.6B on 512 rows; those of its keys and queries with their
/// rotary embedding.
fn norms(criterion: &mut Criterion) {
    let (rows, hidden, heads, d) = (512, 1024, 24, 128);
    let x = weight::values(rows * hidden);
    let gain = weight::values(hidden);
    let angles = vec![(0.6, 0.8); rows * d / 2];
    let positions: Vec<usize> = (0..rows).collect();
    let mut group = criterion.benchmark_group("norms");
    for isa in Isa::ALL.into_iter().filter(|i| i.available()) {
        let cpu = cpu(isa);
        let mut y = vec![0.0; rows * hidden];
        group.throughput(Throughput::Bytes(8 * (rows * hidden) as u64));
        group.bench_function(BenchmarkId::new("rms_norm", isa.name()), |b| {
            b.iter(|| cpu.rms_norm(&x, &gain, 1e-6, &mut y));
        });
        let mut qk = weight::values(rows * heads * d);
        group.throughput(Throughput::Bytes(8 * (rows * heads * d) as u64));
        group.bench_function(BenchmarkId::new("turn_heads", isa.name()), |b| {
            b.iter(|| {
                let width = heads * d;
                let gains = (Some(&gain[..d]), 1e-6);
                cpu.turn_heads(
                    &mut qk,
                    width,
                    (0, heads, d),
                    gains,
                    (&angles, d / 2),
                    &positions,
                );
            });
        });
    }
    group.finish();
}

fn cpu(isa: Isa) -> Cpu {
    Cpu::new(None, IsaChoice::Force(isa)).expect("an available instruction set")
}

/// One kernel on one weight.
struct Case {
    kernel: &'static LinearKernel,
    weight: Weight,
    activations: Activations,
    rows: usize,
}

impl Case {
    fn weight_name(&self) -> String {
        self.weight.scheme_name().replace(' ', "-")
    }

    fn operations(&self) -> u64 {
        2 * (self.rows * SHAPE.0 * SHAPE.1) as u64
    }
}

/// Every registry row that runs here, with the schemes that nq writes by default and unquantized.
fn cases() -> Vec<Case> {
    let affine = |bits, group, zeros| AffineScheme::new(bits, group, zeros);
    let mut weights = vec![
        weight::affine(affine(Bits::B4, Group::Size(64), Zeros::Integer), SHAPE),
        weight::affine(affine(Bits::B4, Group::Size(128), Zeros::None), SHAPE),
        weight::affine(affine(Bits::B8, Group::Size(128), Zeros::None), SHAPE),
    ];
    weights.extend([DType::F32, DType::F16, DType::BF16].map(|d| weight::dense(d, SHAPE)));
    let codes = ["trellis4 octagon", "trellis3 octagon", "trellis6 sum"];
    weights.extend(codes.map(|scheme| weight::trellis(scheme, Dims::new(SHAPE.0, SHAPE.1))));
    let mut cases = Vec::new();
    for kernel in KERNELS.iter().flat_map(|k| k.iter()) {
        if !kernel.isa.available() {
            continue;
        }
        for weight in &weights {
            // As models run: a trellis code takes a scale for each block of its transform.
            let group = match WeightKind::of(weight) {
                WeightKind::Trellis(_) => 128,
                _ => 32,
            };
            for activations in [
                Activations::F32,
                Activations::Bf16,
                Activations::Int8 { group },
                Activations::Int16 { group: 128 },
            ] {
                for rows in [1, ROWS] {
                    if kernel
                        .info
                        .serves(WeightKind::of(weight), activations, rows)
                    {
                        cases.push(Case {
                            kernel,
                            weight: weight.clone(),
                            activations,
                            rows,
                        });
                    }
                }
            }
        }
    }
    cases
}

/// A case's weight, packed as often as needed to exceed the caches.
struct Prepared {
    copies: Vec<Linear>,
    x: Vec<f32>,
}

impl Prepared {
    fn new(cpu: &Cpu, case: &Case) -> Self {
        let pack = || {
            Linear::new(cpu, &[&case.weight], case.activations, KernelSet::Fused)
                .expect("a kernel that says it serves this")
        };
        let first = pack();
        assert!(first.kernel_names().contains(&case.kernel.info.name));
        let count = if case.rows == 1 {
            RING.div_ceil(first.bytes())
        } else {
            1
        };
        let mut copies = vec![first];
        copies.resize_with(count, pack);
        Prepared {
            copies,
            x: weight::values(case.rows * SHAPE.1),
        }
    }

    fn bytes(&self) -> usize {
        self.copies[0].bytes()
    }

    fn once(&self, cpu: &Cpu, turn: usize, y: &mut [f32]) {
        let linear = &self.copies[turn % self.copies.len()];
        cpu.linear(linear, &self.x, y, Epilogue::Store)
            .expect("shapes that fit");
    }
}

/// Appends a line per case to the CSV file at `path`.
fn record(path: &std::ffi::OsStr) {
    let all_threads = cpu_default();
    let buffer = all_threads.bandwidth_buffer(1 << 30);
    let mut lines = String::new();
    for case in cases() {
        let cpu = cpu(case.kernel.isa);
        let run = Prepared::new(&cpu, &case);
        // Measured right before each case: on a shared host it changes within seconds.
        let bandwidth = all_threads.read_bandwidth(&buffer).median / 1e9;
        let mut y = vec![0.0; case.rows * SHAPE.0];
        let mut times = Vec::new();
        let begin = Instant::now();
        let mut turn = 0;
        // One full turn of the ring to warm up, then at least 9 repeats and 100 ms.
        while turn < run.copies.len() {
            run.once(&cpu, turn, &mut y);
            turn += 1;
        }
        while times.len() < 9 || begin.elapsed() < Duration::from_millis(100) {
            let start = Instant::now();
            run.once(&cpu, turn, &mut y);
            times.push(start.elapsed().as_secs_f64());
            turn += 1;
        }
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        writeln!(
            lines,
            "{},{},{},{}x{},{},{:.1},{:.2},{:.1},{bandwidth:.1},{}",
            case.kernel.info.name,
            case.weight_name(),
            case.activations.to_string().replace(' ', "-"),
            SHAPE.0,
            SHAPE.1,
            case.rows,
            median * 1e6,
            run.bytes() as f64 / median / 1e9,
            case.operations() as f64 / median / 1e9,
            cpu.threads(),
        )
        .expect("writing to a string");
    }
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .expect("a file that can be written");
    file.write_all(lines.as_bytes())
        .expect("room for the record");
}

fn cpu_default() -> Cpu {
    Cpu::new(None, IsaChoice::Auto).expect("the scalar set is always there")
}

/// Random weights, never zeros.
mod weight {
    use nq_formats::pack::pack_rows;
    use nq_formats::synth::random_trellis;
    use nq_formats::{
        AffineScheme, AffineWeight, QuantizedWeight, Tensor, Weight, ZeroPoints, Zeros,
    };
    use nq_kernels::rng::Philox;
    use nq_model::{DType, Dims};

    pub(super) fn values(n: usize) -> Vec<f32> {
        let mut rng = Philox::new(1, 1);
        (0..n).map(|_| rng.normal()).collect()
    }

    /// A dense weight; f16 and bf16 get random bits of moderate exponents.
    pub(super) fn dense(dtype: DType, (out, inp): (usize, usize)) -> Weight {
        let mut rng = Philox::new(2, 2);
        let data: Vec<u8> = match dtype {
            DType::F32 => (0..out * inp)
                .flat_map(|_| rng.normal().to_le_bytes())
                .collect(),
            DType::BF16 => (0..out * inp)
                .flat_map(|_| ((rng.normal().to_bits() >> 16) as u16).to_le_bytes())
                .collect(),
            // Sign, exponent 2^-3 to 2^0, random significand.
            _ => (0..out * inp)
                .flat_map(|_| {
                    let r = rng.next_u32();
                    let exponent = 12 + (r >> 16 & 3) as u16;
                    ((r as u16 & 0x83ff) | exponent << 10).to_le_bytes()
                })
                .collect(),
        };
        let tensor = Tensor::new(dtype, vec![out, inp], data.into());
        Weight::Dense(tensor.expect("as long as the shape says"))
    }

    pub(super) fn trellis(scheme: &str, dims: Dims) -> Weight {
        let scheme = scheme.parse().expect("a scheme");
        let weight = random_trellis(4, "weight", dims, scheme).expect("whole blocks of inputs");
        Weight::Quantized(QuantizedWeight::Trellis(weight))
    }

    pub(super) fn affine(scheme: AffineScheme, (out, inp): (usize, usize)) -> Weight {
        let mut rng = Philox::new(3, 3);
        let groups = scheme.group.count(inp);
        let mask = scheme.bits.max_code();
        let mut codes = |n| -> Vec<u8> { (0..n).map(|_| rng.next_u32() as u8 & mask).collect() };
        let packed = pack_rows(scheme.bits, &codes(out * inp), inp);
        let zeros = match scheme.zeros {
            Zeros::Integer => {
                ZeroPoints::Integer(pack_rows(scheme.bits, &codes(out * groups), groups).into())
            }
            Zeros::None => ZeroPoints::None,
            Zeros::Offset => unreachable!("not among the cases"),
        };
        let scales = values(out * groups)
            .into_iter()
            .map(|v| half::f16::from_f32(0.01 + 0.001 * v))
            .collect();
        let weight = AffineWeight::new(
            scheme,
            Dims::new(out, inp),
            packed.into(),
            scales,
            zeros,
            None,
        );
        Weight::Quantized(QuantizedWeight::Affine(weight.expect("consistent parts")))
    }
}
