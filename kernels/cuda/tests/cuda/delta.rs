//! Gated DeltaNets on the device, compared with their formulas in f64: rows of steps, of one sequence or several, and
//! many rows in pieces; states that are copied, and written on the way.

use super::{GUARD, finish, gpu, guarded, is_sanitizing};
use half::f16;
use nq_cuda::{
    AttentionOutput, Buffer, Checked, DeltaRows, DeltaSpan, DeltaVectors, DeviceStates, Gpu,
    HalfRows, Norm, Places, Rates, Row, RowsOut, SequenceRows, StatesShape, Step, StepBounds,
    Stream, operand_index,
};
use nq_kernels::{DeltaShape, reference};
use nq_model::DType;
use nq_model::OutputGate;
use nq_testkit::compare::nmse;
use nq_testkit::delta::{EPS, Vectors, reference, rows, shape, vectors};
use nq_testkit::weights::{dense, normal};

const LAYERS: usize = 2;
const LAYER: usize = 1;
/// Slots, the idle one behind them, and a place for a snapshot.
const SLOTS: usize = 2;
const IDLE: usize = SLOTS;
const SNAPSHOT: usize = SLOTS + 1;

const PLACES: Places = Places {
    positions: 4096,
    slots: SLOTS + 1,
    images: 0,
};

fn shapes() -> Vec<DeltaShape> {
    let all = [
        [2, 2, 128, 128, 4],
        [2, 6, 128, 128, 4],
        [1, 2, 128, 128, 4],
    ];
    let tiled = all.map(|s| DeltaShape {
        tiled: true,
        ..shape(s)
    });
    all.map(shape).into_iter().chain(tiled).collect()
}

/// The step of a row at (position, slot), whose states lack the `behind` rows in front of it.
fn step_at((position, slot): (usize, usize), behind: usize) -> Step {
    Step {
        position: position as i32,
        slot: slot as i32,
        behind: behind as i32,
        ..Step::default()
    }
}

/// A sequence's products and what they should give, and the vectors and states on a device.
struct DeltaCheck<'a> {
    gpu: &'a Gpu,
    stream: Stream,
    shape: DeltaShape,
    vectors: [Buffer<f32>; 4],
    states: DeviceStates,
    qkvz: Vec<f32>,
    ba: Vec<f32>,
    expected: Vec<f32>,
    gate: OutputGate,
}

impl<'a> DeltaCheck<'a> {
    fn new(gpu: &'a Gpu, shape: DeltaShape, len: usize) -> Self {
        DeltaCheck::keeping(gpu, shape, len, 0)
    }

    /// Steps keep rows of the first `kept` slots.
    fn keeping(gpu: &'a Gpu, shape: DeltaShape, len: usize, kept: usize) -> Self {
        let w: Vectors = vectors(&shape);
        let inputs = rows(&shape, len, 1);
        let expected = reference(&shape, &w, &inputs);
        let [qkvz, ba] = inputs;
        let sizes = StatesShape {
            delta: shape,
            layers: LAYERS,
            places: SNAPSHOT + 1,
            kept,
        };
        let upload = |v: &Vec<f32>| gpu.upload("a test", v).unwrap();
        DeltaCheck {
            gpu,
            stream: gpu.stream().unwrap(),
            shape,
            vectors: [&w.conv, &w.decay, &w.dt_bias, &w.norm].map(upload),
            states: DeviceStates::new(gpu, sizes).unwrap(),
            qkvz,
            ba,
            expected,
            gate: OutputGate::Silu,
        }
    }

    fn vectors(&self) -> DeltaVectors<'_> {
        let [conv, decay, dt_bias, norm] = &self.vectors;
        DeltaVectors {
            gate: self.gate,
            conv,
            decay,
            dt_bias,
            norm,
            eps: EPS,
        }
    }

    /// Products of the sequence's rows at `positions`, in this order.
    fn products(&self, positions: &[usize]) -> (Buffer<f32>, Buffer<f32>) {
        let last = |all: &[f32], width: usize| {
            let rows = positions.iter().flat_map(|&p| &all[p * width..][..width]);
            let rows: Vec<f32> = rows.copied().collect();
            self.gpu.upload("a test", &rows).unwrap()
        };
        let stride = self.shape.channels() + self.shape.values();
        (
            last(&self.qkvz, stride),
            last(&self.ba, 2 * self.shape.value_heads),
        )
    }

    /// Steps of these rows (position, slot); the outputs, of which FP16 ones are exact to 1e-3.
    fn step(&self, at: &[(usize, usize)], half: bool) -> Vec<f32> {
        self.step_of(at, half, None)
    }

    /// As [`DeltaCheck::step`], with `rates` in place of the sequence's.
    fn step_of(&self, at: &[(usize, usize)], half: bool, rates: Option<Rates<'_>>) -> Vec<f32> {
        let steps: Vec<Step> = at.iter().map(|&at| step_at(at, 0)).collect();
        let positions: Vec<usize> = at.iter().map(|a| a.0).collect();
        self.run(&steps, &positions, half, rates)
    }

    /// Runs `steps` over the products of the sequence's rows at `positions`; the outputs.
    fn run(
        &self,
        steps: &[Step],
        positions: &[usize],
        half: bool,
        rates: Option<Rates<'_>>,
    ) -> Vec<f32> {
        let (m, width) = (steps.len(), self.shape.values());
        let (qkvz, ba) = self.products(positions);
        let bounds = StepBounds {
            places: PLACES,
            tokens: 1,
        };
        let steps = Checked::upload(self.gpu, "a test", steps, bounds).unwrap();
        let padded = width.next_multiple_of(256);
        let mut full = guarded(self.gpu, &vec![GUARD; m * width]);
        let mut halves = self.gpu.zeros::<u16>("a test", m * padded).unwrap();
        let out = match half {
            true => AttentionOutput::Half(&mut halves),
            false => AttentionOutput::Full(&mut full),
        };
        let layer = self.states.layer(LAYER);
        (self.stream)
            .delta_step(
                &qkvz,
                rates.unwrap_or(Rates::Products(&ba)),
                &steps,
                &self.vectors(),
                layer,
                out,
                m,
                IDLE,
                m % 2 == 0,
            )
            .unwrap();
        if !half {
            return finish(&self.stream, &full);
        }
        self.stream.synchronize().unwrap();
        let mut found = vec![0u16; m * padded];
        halves.read(0, &mut found).unwrap();
        let rows = found.chunks(padded);
        let value = |row: &[u16], i: usize| f16::from_bits(row[operand_index(i)]).to_f32();
        rows.flat_map(|row| (0..width).map(|i| value(row, i)).collect::<Vec<f32>>())
            .collect()
    }

    /// Many rows of (slot, first position, count, rows in front of a snapshot); the outputs.
    fn many(&self, parts: &[(usize, usize, usize, Option<usize>)]) -> Vec<f32> {
        let (mut positions, mut places, mut spans) = (Vec::new(), Vec::new(), Vec::new());
        for &(slot, position, count, mark) in parts {
            spans.push(DeltaSpan {
                rows: SequenceRows {
                    row: positions.len(),
                    count,
                    position,
                    slot,
                },
                mark: mark.map(|rows| (rows, SNAPSHOT)),
            });
            positions.extend(position..position + count);
            places.extend((position..position + count).map(|p| Row {
                position: p as i32,
                slot: slot as i32,
                ..Row::default()
            }));
        }
        let (m, width) = (positions.len(), self.shape.values());
        let (qkvz, ba) = self.products(&positions);
        let rows = Checked::upload(self.gpu, "a test", &places, PLACES).unwrap();
        let mut mixed = self.gpu.zeros("a test", m * self.shape.channels()).unwrap();
        let parts = DeltaRows::chunk_parts(&self.shape, m, spans.len());
        let mut chunks = self.gpu.zeros("a test", parts).unwrap();
        let mut scanned = self.gpu.zeros("a test", m * width).unwrap();
        let mut full = guarded(self.gpu, &vec![GUARD; m * width]);
        let padded = width.next_multiple_of(256);
        let mut half = self.gpu.zeros::<u16>("a test", m * padded).unwrap();
        let inputs = DeltaRows {
            qkvz: &qkvz,
            ba: &ba,
            rows: &rows,
            mixed: &mut mixed,
            chunks: &mut chunks,
            scanned: &mut scanned,
        };
        let out = RowsOut {
            full: Some(&mut full),
            half: Some(&mut half),
        };
        let layer = self.states.layer(LAYER);
        (self.stream)
            .delta_rows(inputs, &spans, &self.vectors(), layer, &out, m)
            .unwrap();
        let found = finish(&self.stream, &full);
        let mut halves = vec![0u16; m * padded];
        half.read(0, &mut halves).unwrap();
        for (row, values) in halves.chunks(padded).zip(found.chunks(width)) {
            for (i, v) in values.iter().enumerate() {
                assert_eq!(row[operand_index(i)], f16::from_f32(*v).to_bits());
            }
        }
        found
    }

    /// Compares outputs of the sequence's rows from `position` on.
    fn compare(&self, what: &str, position: usize, found: &[f32], tolerance: f64) {
        let expected = &self.expected[position * self.shape.values()..][..found.len()];
        let error = nmse(found, expected);
        assert!(
            error < tolerance,
            "{what} at {position} {:?}: {error:e}",
            self.shape
        );
    }
}

/// A few roundings to 17 bits, squared.
const CLOSE: f64 = 1e-9;
const HALF: f64 = 1e-6;

/// Single rows, runs of up to 16, and rows of another sequence and of nobody beside them.
#[test]
fn steps() {
    let Some(gpu) = gpu() else { return };
    for shape in shapes() {
        let len = 60;
        let c = DeltaCheck::new(&gpu, shape, len);
        let width = c.shape.values();
        let (mut from, mut run, mut other) = (0, 1, 0);
        while from < len {
            let n = usize::min(run, len - from);
            let mut at = vec![(other, 1), (0, IDLE)];
            at.extend((from..from + n).map(|p| (p, 0)));
            let half = run % 3 == 2;
            let found = c.step(&at, half);
            let close = if half { HALF } else { CLOSE };
            c.compare("a neighbour", other, &found[..width], close);
            c.compare("a run", from, &found[2 * width..], close);
            (from, other, run) = (from + n, other + 1, run % 16 + 1);
        }
        // A new sequence begins with nothing, whatever its place holds.
        c.compare("a new sequence", 0, &c.step(&[(0, 0)], false), CLOSE);
    }
}

/// Steps of several rows, of which only the first few are the sequence's: the next rows are as if the others had never
/// been, in steps, behind a copy and in passes of many rows.
#[test]
fn rows_are_taken_back() {
    let Some(gpu) = gpu() else { return };
    let len = if is_sanitizing() { 60 } else { 400 };
    for shape in shapes() {
        let mut c = DeltaCheck::keeping(&gpu, shape, len, SLOTS);
        let width = c.shape.values();
        let (mut at, mut behind, mut turn) = (0, 0, 0);
        while at + 20 < len {
            turn += 1;
            let n = 1 + turn * 7 % 16;
            let right = 1 + turn * 5 % n;
            let mut steps = vec![step_at((turn, 1), 0)];
            let mut positions = vec![turn];
            for i in 0..n {
                let behind = if i == 0 { behind } else { 0 };
                steps.push(step_at((at + i, 0), behind));
                // Wrong rows are those of other positions.
                let wrong = (at + i * 7 + 13) % len;
                positions.push(if i < right { at + i } else { wrong });
            }
            if turn == 1 {
                c.step(&[(0, 1)], false);
            }
            let found = c.run(&steps, &positions, false, None);
            c.compare("a neighbour", turn, &found[..width], CLOSE);
            c.compare("a run", at, &found[width..][..right * width], CLOSE);
            (at, behind) = (at + right, if n > 1 { right } else { 0 });
            if turn.is_multiple_of(3) && behind > 0 {
                // The kept rows go into a copy first, then into the sequence itself.
                c.stream.copy_states(&mut c.states, 0, SNAPSHOT).unwrap();
                let settle = |c: &mut DeltaCheck<'_>, place| {
                    c.stream
                        .settle_states(&mut c.states, 0, place, behind)
                        .unwrap();
                };
                settle(&mut c, SNAPSHOT);
                settle(&mut c, 0);
                c.compare("many rows", at, &c.many(&[(0, at, 5, None)]), CLOSE);
                c.stream.copy_states(&mut c.states, SNAPSHOT, 0).unwrap();
                c.compare("a copy", at, &c.step(&[(at, 0)], false), CLOSE);
                (at, behind) = (at + 1, 0);
            }
        }
    }
    let mut c = DeltaCheck::new(&gpu, shapes()[0], 4);
    assert!(c.stream.settle_states(&mut c.states, 0, 0, 1).is_err());
}

/// Prompts whole and in pieces, several at a time, also behind steps.
#[test]
fn many_rows() {
    let Some(gpu) = gpu() else { return };
    let len = if is_sanitizing() { 40 } else { 150 };
    for shape in shapes() {
        let mut c = DeltaCheck::new(&gpu, shape, len);
        let width = c.shape.values();
        let whole = c.many(&[(0, 0, len, None)]);
        c.compare("whole", 0, &whole, CLOSE);
        // Of gates that are sigmoids, the output times z is what it is with SiLU. Steps refuse them.
        c.gate = OutputGate::Sigmoid;
        let by_sigmoid = c.many(&[(0, 0, len, None)]);
        let stride = c.shape.channels() + width;
        let z = c.qkvz.chunks(stride).flat_map(|row| &row[stride - width..]);
        let times_z: Vec<f32> = by_sigmoid.iter().zip(z).map(|(y, z)| y * z).collect();
        c.compare("gates by a sigmoid", 0, &times_z, CLOSE);
        c.gate = OutputGate::Silu;
        let mark = 27;
        let first = c.many(&[(1, 0, 35, Some(mark)), (0, 0, 3, None)]);
        c.compare("the first piece", 0, &first[..35 * width], CLOSE);
        c.compare("three rows", 0, &first[35 * width..], CLOSE);
        let second = c.many(&[(0, 3, 1, None), (1, 35, len - 35, None)]);
        c.compare("one row", 3, &second[..width], CLOSE);
        c.compare("the rest", 35, &second[width..], CLOSE);
        // From the snapshot on, by steps and by many rows.
        c.stream.copy_states(&mut c.states, SNAPSHOT, 0).unwrap();
        let run: Vec<(usize, usize)> = (mark..mark + 5).map(|p| (p, 0)).collect();
        c.compare("a run behind a snapshot", mark, &c.step(&run, false), CLOSE);
        c.stream.copy_states(&mut c.states, SNAPSHOT, 0).unwrap();
        let rest = c.many(&[(0, mark, len - mark, None)]);
        c.compare("behind the snapshot", mark, &rest, CLOSE);
        c.step(&[(0, 0)], false);
        let behind = c.many(&[(0, 1, len - 1, None)]);
        c.compare("behind a step", 1, &behind, CLOSE);
        assert!(
            c.stream
                .copy_states(&mut c.states, SNAPSHOT + 1, 0)
                .is_err()
        );
    }
}

/// The projections of rates computed by the blocks that need them: the same outputs as from products.
#[test]
fn rates_of_rows() {
    let Some(gpu) = gpu() else { return };
    // With as many inputs as 9B has, static and dynamic shared memory together are more than what needs no request.
    let of_9b = (shapes()[0], 4096);
    for (shape, hidden) in shapes()
        .into_iter()
        .map(|shape| (shape, 520))
        .chain([of_9b])
    {
        let heads = shape.value_heads;
        let mut c = DeltaCheck::new(&gpu, shape, 12);
        let (x, gain) = (normal(12 * hidden, 21), normal(hidden, 22));
        let part = |seed| dense(DType::F16, heads, hidden, seed);
        let parts = [part(23), part(24)];
        let mut products = Vec::new();
        for x in x.chunks(hidden) {
            let mut normed = vec![0.0; hidden];
            reference::rms_norm(x, &gain, EPS, &mut normed);
            for w in &parts {
                let mut y = vec![0.0; heads];
                reference::linear(&normed, w, &mut y).unwrap();
                products.extend(y);
            }
        }
        c.ba = products;
        let at: Vec<(usize, usize)> = (0..12).map(|p| (p, 0)).collect();
        let expected = c.step(&at, false);
        let upload = |v: &[f32]| gpu.upload("a test", v).unwrap();
        let (x, gain) = (upload(&x), upload(&gain));
        let rows = HalfRows::new(&gpu, &[&parts[0], &parts[1]]).unwrap();
        let norm = Norm {
            gain: &gain,
            eps: EPS,
        };
        let found = c.step_of(&at, false, Some(Rates::Of(&x, norm, &rows)));
        let error = nmse(&found, &expected);
        assert!(error < CLOSE, "{shape:?}: {error:e}");
    }
}

/// Sizes and places that the kernels do not serve are refused.
#[test]
fn refused() {
    let Some(gpu) = gpu() else { return };
    for other in [
        [2, 2, 64, 128, 4],
        [2, 2, 128, 64, 4],
        [2, 2, 128, 128, 3],
        [2, 3, 128, 128, 4],
    ] {
        let sizes = StatesShape {
            delta: shape(other),
            layers: 1,
            places: 1,
            kept: 0,
        };
        assert!(DeviceStates::new(&gpu, sizes).is_err(), "{other:?}");
    }
}
