//! Which kernels products launch, in which shape and with which arguments, on imagined devices.

use super::Version;
use super::driver::trace::launches;
use super::driver::{Buffer, Checked, Gpu, StreamOptions};
use super::*;
use bytemuck::Pod;
use nq_formats::trellis::{Code, TrellisScheme};
use nq_formats::{Bits, Zeros};
use nq_kernels::Result;
use nq_model::Experts;
use std::fmt::Write as _;

/// Compute capability, multiprocessors, KiB of shared memory of a block; and a hash of all that the device launches.
const DEVICES: [(Version, usize, usize, u64); 5] = [
    (Version::new(8, 0), 108, 163, 0xa9bc_a748_416a_cd54),
    (Version::new(8, 6), 84, 99, 0xa9b6_59b6_820b_08f4),
    (Version::new(9, 0), 132, 227, 0x00e2_6eed_8235_06b2),
    (Version::new(10, 0), 148, 227, 0x92a9_1687_342c_bf43),
    (Version::new(12, 0), 170, 99, 0x6823_6d62_ec7a_b1e0),
];

/// Outputs and inputs.
const SHAPES: [(usize, usize); 6] = [
    (6144, 4096),
    (1024, 2048),
    (4096, 12_288),
    (10_240, 25_600),
    (151_936, 1024),
    (48, 264),
];

const ROWS: [usize; 14] = [1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 512, 2048];

fn kinds() -> Vec<PackedKind> {
    let affine = |bits, zeros, groups, two_level| PackedKind::Affine {
        bits,
        zeros,
        groups,
        two_level,
        table: false,
    };
    let trellis = TrellisScheme::all().filter(|s| {
        matches!(
            (s.code(), s.step_bits()),
            (Code::Sum, 4) | (Code::Octagon, 8)
        )
    });
    [
        affine(Bits::B4, Zeros::Integer, 2, false),
        affine(Bits::B4, Zeros::Offset, 8, false),
        affine(Bits::B8, Zeros::None, 4, false),
        affine(Bits::B4, Zeros::Integer, 8, true),
        affine(Bits::B5, Zeros::Integer, 4, true),
        affine(Bits::B6, Zeros::None, 8, true),
        PackedKind::Fp16,
    ]
    .into_iter()
    .chain(trellis.map(PackedKind::Trellis))
    .collect()
}

/// What one device does, as text.
struct Trace {
    gpu: Gpu,
    stream: Stream,
    text: String,
}

impl Trace {
    fn new(gpu: Gpu) -> Self {
        let sizes = TrellisSizes {
            rows: MOST_TRELLIS_ROWS,
            many: 2048,
            inputs: 25_600,
            weights: 151_936 * 4096,
            gate: 25_600,
            experts: CodedExperts {
                few: 64 * 9,
                sorted: 2048 * 9,
                experts: 256,
                hidden: 4096,
                width: 768,
                exl3: false,
            },
        };
        let room = Some(TrellisRoom::new(&gpu, sizes).unwrap());
        let options = StreamOptions {
            room,
            ..StreamOptions::default()
        };
        Trace {
            stream: gpu.stream_with(options).unwrap(),
            gpu,
            text: String::new(),
        }
    }

    fn zeros<T: Pod>(&self, len: usize) -> Buffer<T> {
        self.gpu.zeros("a test", len).unwrap()
    }

    /// Writes down whether an operation was refused, and its launches.
    fn note(&mut self, what: std::fmt::Arguments<'_>, outcome: Result<()>) {
        writeln!(self.text, "{what} {}", outcome.is_ok()).unwrap();
        for launch in launches() {
            writeln!(self.text, "  {launch}").unwrap();
        }
    }

    /// All ways to multiply `m` rows by `w`.
    fn products(&mut self, w: &mut DeviceLinear, m: usize, x: (&Buffer<f32>, &Buffer<u16>)) {
        let (rows, inputs) = (w.rows(), w.inputs());
        let (y, half) = (&mut self.zeros(m * rows), &mut self.zeros(m * (rows + 512)));
        let gain = self.zeros(inputs);
        let norm = Norm {
            gain: &gain,
            eps: 0.5,
        };
        let best = &mut self.zeros(m * rows);
        let columns = &mut Columns::new(&self.gpu, m.min(16), inputs).unwrap();
        let mut sums = PartialSums::new(&self.gpu, m, rows).unwrap();
        let case = format!("{} {rows}x{inputs} m={m}", w.kind().name());
        let s = self.stream.clone();
        for epilogue in 0..4 {
            if let Some(parts) = &mut w.trellis {
                parts.paired = epilogue == 2;
            }
            if m <= 17 {
                let holds_dependents = epilogue % 2 == 0;
                for one in [true, false] {
                    let out = match epilogue {
                        0 => GemvOutput::Store(Some(norm), y),
                        1 => GemvOutput::Add(y),
                        2 => GemvOutput::Silu(Some(norm), y),
                        _ => GemvOutput::Head(Some(norm), y, best),
                    };
                    let done = match (one, m) {
                        (true, 1) => s.gemv(w, x.0, out, holds_dependents),
                        (true, _) => continue,
                        _ => s.gemv_batch(w, x.0, out, columns, m, holds_dependents),
                    };
                    self.note(format_args!("gemv {one} {epilogue} {case}"), done);
                }
            }
            if m <= 65 {
                let out = match epilogue {
                    0 => StepOutput::Store(y),
                    1 => StepOutput::Parts(&mut sums),
                    2 => StepOutput::Silu(half),
                    _ => StepOutput::Head(y, best),
                };
                let done = s.gemm_step(w, x.1, out, m);
                self.note(format_args!("gemm_step {epilogue} {case}"), done);
            }
            let out = match epilogue {
                0 => GemmOutput::Store(y),
                1 => GemmOutput::Add(y),
                _ => GemmOutput::Silu(half),
            };
            let done = s.gemm(w, x.1, out, m);
            self.note(format_args!("gemm {epilogue} {case}"), done);
        }
        if m <= 17 && Columns::suit(w) {
            let done = s.multiply_columns(w, columns, y, m);
            self.note(format_args!("columns {case}"), done);
        }
        // The widest head has no room on some devices.
        if m > 1 || inputs < 25_600 {
            let blocks = (best_len(&self.gpu, w, m), wide_best_len(&self.gpu, w, m));
            writeln!(self.text, "best {case} {blocks:?}").unwrap();
        }
        let done = s.linear_reference(w, x.0, y, m, m.is_multiple_of(2));
        self.note(format_args!("reference {case}"), done);
        let x = &mut self.zeros(m * inputs);
        let tokens = Checked::new(&self.gpu, "a test", m, 1, rows).unwrap();
        let done = s.embed(w, &tokens, x, m);
        self.note(format_args!("embed {case}"), done);
        let bounds = StepBounds {
            places: Places {
                positions: 1,
                slots: 1,
                images: 0,
            },
            tokens: rows,
        };
        let steps = Checked::new(&self.gpu, "a test", m, Step::default(), bounds).unwrap();
        let done = s.embed_step(w, &steps, x, m);
        self.note(format_args!("embed_step {case}"), done);
    }

    /// Experts of `m` rows, each alone and sorted by expert.
    fn experts(&mut self, e: &Experts, hidden: usize, kind: PackedKind, m: usize) {
        let all = stacked(e);
        let mut up = DeviceLinear::zeros(&self.gpu, kind, &[all * 2 * e.width], hidden).unwrap();
        let down = DeviceLinear::zeros(&self.gpu, kind, &[all * hidden], e.width).unwrap();
        if let Some(parts) = &mut up.trellis {
            parts.paired = true;
        }
        let (x, gain, scores) = (
            &mut self.zeros(m * hidden),
            self.zeros(hidden),
            self.zeros(m * all),
        );
        let norm = Norm {
            gain: &gain,
            eps: 0.5,
        };
        let case = format!("{} {e:?} {hidden} m={m}", kind.name());
        let s = self.stream.clone();
        let gated = &mut self.zeros(m * gated_width(e));
        let done = s.experts_up(&up, (x, Some(norm)), &scores, gated, e, m);
        self.note(format_args!("experts_up {case}"), done);
        let done = s.experts_down(&down, gated, &scores, x, e, m);
        self.note(format_args!("experts_down {case}"), done);
        let mut rows = GroupedRows::new(&self.gpu, *e, hidden, m).unwrap();
        let half = self.zeros(m * hidden.next_multiple_of(256));
        let done = s
            .group_rows(&half, &scores, &mut rows, e, m, [&up, &down])
            .and_then(|()| s.grouped_up(&up, &mut rows))
            .and_then(|()| s.grouped_down(&down, &mut rows, x));
        self.note(format_args!("grouped {case}"), done);
    }

    fn all(mut self) -> String {
        for (rows, inputs) in SHAPES {
            for kind in kinds() {
                let mut w = DeviceLinear::zeros(&self.gpu, kind, &[rows], inputs).unwrap();
                let x = self.zeros(2048 * inputs);
                let half = self.zeros(2048 * inputs.next_multiple_of(256));
                ROWS.iter()
                    .for_each(|&m| self.products(&mut w, m, (&x, &half)));
            }
        }
        let experts = |count, per_token, width, shared| Experts {
            count,
            per_token,
            width,
            normalized: shared == 0,
            shared,
        };
        for (e, hidden) in [
            (experts(128, 8, 768, 0), 2048),
            (experts(255, 8, 512, 512), 4096),
        ] {
            for kind in kinds() {
                for m in [1, 2, 16, 64, 300, 2048] {
                    self.experts(&e, hidden, kind, m);
                }
            }
        }
        self.text
    }
}

/// Another hash means that something else runs for a shape than was measured. `NQ_LAUNCHES=FOLDER` writes the launches to
/// files there, to be compared with those of the commit before.
#[test]
fn products_launch_what_was_measured() {
    let mut others = Vec::new();
    for (capability, multiprocessors, kib, expected) in DEVICES {
        let text = Trace::new(Gpu::imagined(capability, multiprocessors, kib)).all();
        if let Some(folder) = std::env::var_os("NQ_LAUNCHES") {
            let file = capability.to_string();
            std::fs::write(std::path::Path::new(&folder).join(file), &text).unwrap();
        }
        // FNV-1a.
        let found = text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, b| {
            (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
        });
        if found != expected {
            others.push(format!("{capability}: {found:#x}"));
        }
    }
    assert!(others.is_empty(), "other launches: {others:#?}");
}
