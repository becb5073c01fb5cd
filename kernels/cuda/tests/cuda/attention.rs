//! Attention: one token per sequence, many tokens, and compared with the reference kernel.

use super::{GUARD, finish, gpu, guarded, is_sanitizing};
use half::f16;
use nq_cpu::KvPages;
use nq_cuda::{
    AttentionOutput, AttentionScratch, AttentionShape, Buffer, Cascade, Checked, DevicePages, Gpu,
    HEAD_DIM, Heads, MOST_RUN, PageEntry, PagesShape, Row, SequenceRows, Step, StepBounds, Stream,
    WIDE_HEAD_DIM, operand_index, rotary_dims,
};
use nq_kernels::pages::{KvType, PAGE, SharedPrefix};
use nq_kernels::reference;
use nq_testkit::compare::nmse;
use nq_testkit::weights::normal;
use std::ops::Range;

/// One layer's heads, and sequences of random queries, keys and values.
pub(super) struct Case {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    /// Width of a head; behind the queries of each wide one stand its gates.
    pub(super) dim: usize,
    pub(super) kv: KvType,
    pub(super) gains: Option<[Vec<f32>; 2]>,
    /// Of queries, keys and values; empty: none.
    pub(super) biases: Vec<Vec<f32>>,
    pub(super) table: Vec<(f32, f32)>,
    pub(super) qkv: Vec<f32>,
    pub(super) len: usize,
}

impl Case {
    pub(super) fn new(heads: usize, kv_heads: usize, kv: KvType, len: usize) -> Self {
        Case::of(HEAD_DIM, heads, kv_heads, kv, len)
    }

    /// With heads of `dim`.
    pub(super) fn of(dim: usize, heads: usize, kv_heads: usize, kv: KvType, len: usize) -> Self {
        let gain = |seed| -> Vec<f32> { normal(dim, seed).iter().map(|v| 1.0 + 0.3 * v).collect() };
        let pairs = rotary_dims(dim) / 2;
        let angle = |p: usize, i: usize| p as f64 * 1e6f64.powf(-(i as f64) / pairs as f64);
        let capacity = len.next_multiple_of(PAGE);
        let table = (0..capacity * pairs)
            .map(|k| angle(k / pairs, k % pairs))
            .map(|a| (a.cos() as f32, a.sin() as f32))
            .collect();
        let gates = if dim == HEAD_DIM { 0 } else { heads };
        Case {
            heads,
            kv_heads,
            dim,
            kv,
            gains: Some([gain(61), gain(62)]),
            biases: Vec::new(),
            table,
            qkv: normal(len * (heads + gates + 2 * kv_heads) * dim, 63),
            len,
        }
    }

    /// With biases in place of norms.
    pub(super) fn biased(heads: usize, kv_heads: usize, kv: KvType, len: usize) -> Self {
        let bias = |(i, heads): (usize, usize)| normal(heads * HEAD_DIM, 64 + i as u64);
        let counts = [heads, kv_heads, kv_heads].into_iter().enumerate();
        Case {
            gains: None,
            biases: counts.map(bias).collect(),
            ..Case::new(heads, kv_heads, kv, len)
        }
    }

    pub(super) fn width(&self) -> usize {
        (self.heads * self.each() + 2 * self.kv_heads) * self.dim
    }

    /// Heads in a row of products for each query head: the queries, and gates.
    fn each(&self) -> usize {
        if self.dim == HEAD_DIM { 1 } else { 2 }
    }

    /// Expected attention of the listed rows over the rows up to each: `[len, heads * dim]`.
    pub(super) fn expected(&self, rows: &[usize]) -> Vec<f32> {
        let d = self.dim;
        let group = self.heads / self.kv_heads;
        let mut pages = KvPages::new(self.kv, self.len.div_ceil(PAGE), self.kv_heads, d);
        let place = |p: usize| ((p / PAGE) as u32, p % PAGE);
        let turned = |x: &[f32], kind: usize, position: usize| {
            let mut v = x.to_vec();
            if let Some(gains) = &self.gains {
                reference::rms_norm(x, &gains[kind], 1e-6, &mut v);
            }
            let turned = rotary_dims(d);
            reference::rope(
                &mut v[..turned],
                &self.table[position * turned / 2..(position + 1) * turned / 2],
            );
            v
        };
        let mut qkv = self.qkv.clone();
        for row in qkv
            .chunks_mut(self.width())
            .filter(|_| !self.biases.is_empty())
        {
            let bias = self.biases.iter().flatten();
            row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
        }
        for (position, row) in qkv.chunks(self.width()).enumerate() {
            let (k, v) = row[self.heads * self.each() * d..].split_at(self.kv_heads * d);
            let k = k.chunks(d).flat_map(|k| turned(k, 1, position));
            let (page, at) = place(position);
            pages.store(page, at, &k.collect::<Vec<f32>>(), v);
        }
        let mut out = Vec::new();
        for &r in rows {
            for h in 0..self.heads {
                let at = r * self.width() + h * self.each() * d;
                let q = turned(&qkv[at..][..d], 0, r);
                let (mut k, mut v) = (vec![0f32; (r + 1) * d], vec![0f32; (r + 1) * d]);
                for position in 0..=r {
                    let row = position * d..(position + 1) * d;
                    let (page, at) = place(position);
                    pages.load(page, at, h / group, &mut k[row.clone()], &mut v[row]);
                }
                let mut y = vec![0f32; d];
                reference::attend(&q, &k, &v, &mut y);
                if self.each() == 2 {
                    let gates = &qkv[at + d..][..d];
                    let gated = y.iter_mut().zip(gates);
                    gated.for_each(|(y, g)| *y /= 1.0 + (-g).exp());
                }
                out.extend(y);
            }
        }
        out
    }
}

/// A case's gains and rotary table on a device.
pub(super) struct Uploaded {
    heads: usize,
    gains: Option<[Buffer<f32>; 2]>,
    biases: Vec<Buffer<f32>>,
    table: Buffer<[f32; 2]>,
}

impl Uploaded {
    pub(super) fn new(gpu: &Gpu, case: &Case) -> Self {
        let table: Vec<[f32; 2]> = case.table.iter().map(|&(c, s)| [c, s]).collect();
        let upload = |values: &[f32]| gpu.upload("a test", values).unwrap();
        Uploaded {
            heads: case.heads,
            gains: (case.gains.as_ref()).map(|g| g.each_ref().map(|g| upload(g))),
            biases: case.biases.iter().map(|b| upload(b)).collect(),
            table: gpu.upload("a test", &table).unwrap(),
        }
    }

    pub(super) fn settings(&self) -> Heads<'_> {
        Heads {
            heads: self.heads,
            gains: self.gains.as_ref().map(|g| g.each_ref()),
            biases: &self.biases,
            cos_sin: &self.table,
            eps: 1e-6,
        }
    }
}

/// Number of sequences in the cache, and the one that is used.
const SLOTS: usize = 2;
const SLOT: usize = 1;
/// Number of its layers, and the one that is used.
const LAYERS: usize = 3;
pub(super) const LAYER: usize = 1;

/// Pages for `slots` sequences of up to `case.len` positions, assigned so that no two pages of a
/// sequence are adjacent.
pub(super) fn new_cache(gpu: &Gpu, stream: &Stream, case: &Case, slots: usize) -> DevicePages {
    let each = case.len.div_ceil(PAGE);
    let shape = PagesShape {
        kv: case.kv,
        layers: LAYERS,
        kv_heads: case.kv_heads,
        head_dim: case.dim,
        pages: slots * each,
        slots,
        ctx: case.len,
    };
    let mut pages = DevicePages::new(gpu, shape).unwrap();
    let entry = |i: usize| PageEntry {
        slot: i % slots,
        index: i / slots,
        page: (slots * each - 1 - i) as u32,
    };
    let entries: Vec<PageEntry> = (0..slots * each).map(entry).collect();
    stream.set_pages(&mut pages, &entries).unwrap();
    pages
}

/// Bounds of steps whose tokens are not looked up.
pub(super) fn step_bounds(cache: &DevicePages) -> StepBounds {
    StepBounds {
        places: cache.places(),
        tokens: 1,
    }
}

/// A case on a device, and the expected results for some of its rows.
struct AttentionCheck<'a> {
    gpu: &'a Gpu,
    stream: Stream,
    case: &'a Case,
    on_device: Uploaded,
    name: String,
    rows: Vec<usize>,
    expected: Vec<f32>,
}

impl<'a> AttentionCheck<'a> {
    fn new(gpu: &'a Gpu, case: &'a Case) -> Self {
        let len = case.len;
        let rows: Vec<usize> = (0..len).filter(|r| r % 61 == 0 || r + 3 > len).collect();
        AttentionCheck {
            gpu,
            stream: gpu.stream().unwrap(),
            case,
            on_device: Uploaded::new(gpu, case),
            name: format!(
                "{} heads {}/{} of {} len {len}",
                case.kv, case.heads, case.kv_heads, case.dim
            ),
            expected: case.expected(&rows),
            rows,
        }
    }

    fn new_cache(&self) -> DevicePages {
        new_cache(self.gpu, &self.stream, self.case, SLOTS)
    }

    /// Values per row of attention's output.
    fn width(&self) -> usize {
        self.case.heads * self.case.dim
    }

    /// Scratch memory for steps of up to `rows` rows.
    fn scratch(&self, rows: usize) -> AttentionScratch {
        AttentionScratch::new(self.gpu, self.width() / HEAD_DIM, self.case.kv_heads, rows).unwrap()
    }

    /// The selected rows, out of rows of `stride` values.
    fn pick(&self, all: &[f32], stride: usize) -> Vec<f32> {
        let row = |&r: &usize| all[r * stride..][..self.width()].to_vec();
        self.rows.iter().flat_map(row).collect()
    }

    /// Compares `found` with the expected values, with `factor` times the usual tolerance.
    fn compare(&self, op: &str, found: &[f32], factor: f64) {
        // Codes may differ by one where rounding is a close call; keys and values then differ by
        // half a step of 1/127 of their greatest value.
        let tolerance = match self.case.kv {
            KvType::Int8 => 2e-5,
            _ => 1e-6,
        };
        let error = nmse(found, &self.expected);
        assert!(error < factor * tolerance, "{op} {}: {error:e}", self.name);
    }

    /// Appends the tokens `part` of the case; gives back their queries, keys and values.
    fn append(&self, cache: &DevicePages, part: Range<usize>) -> (Buffer<f32>, Checked<Row>) {
        let place = |p: usize| Row {
            position: p as i32,
            slot: SLOT as i32,
            ..Row::default()
        };
        let places: Vec<Row> = part.clone().map(place).collect();
        let places = Checked::upload(self.gpu, "a test", &places, cache.places()).unwrap();
        let width = self.case.width();
        let qkv = &self.case.qkv[part.start * width..part.end * width];
        let mut qkv = self.gpu.upload("a test", qkv).unwrap();
        self.stream
            .append(
                &mut qkv,
                &places,
                &self.on_device.settings(),
                cache.layer(LAYER),
                part.len(),
            )
            .unwrap();
        self.stream.synchronize().unwrap();
        (qkv, places)
    }

    /// Many tokens, in two parts with the second at an offset, and at once: positions that
    /// are whole groups of eight take another path.
    fn prefill(&self) {
        let (heads, len, width) = (self.case.heads, self.case.len, self.width());
        let cut = len / 3;
        let cache = self.new_cache();
        for part in [0..cut, cut..len] {
            if !part.is_empty() {
                self.append(&cache, part);
            }
        }
        let at_once = self.new_cache();
        let (qkv, places) = self.append(&at_once, 0..len);
        if self.case.dim == HEAD_DIM {
            let mut full = guarded(self.gpu, &vec![GUARD; len * width]);
            let layer = at_once.layer(LAYER);
            (self.stream)
                .attention_reference(&qkv, &places, heads, layer, &mut full, len)
                .unwrap();
            let found = finish(&self.stream, &full);
            self.compare("attention_reference", &self.pick(&found, width), 1.0);
        }
        let padded = width.next_multiple_of(256);
        let mut half = self.gpu.zeros::<u16>("a test", len * padded).unwrap();
        for (row, count) in [(0, cut), (cut, len - cut)] {
            if count > 0 {
                let sequence = SequenceRows {
                    row,
                    count,
                    position: row,
                    slot: SLOT,
                };
                self.stream
                    .attention_prefill(&qkv, sequence, heads, cache.layer(LAYER), &mut half)
                    .unwrap();
            }
        }
        self.stream.synchronize().unwrap();
        let mut halves = vec![0u16; len * padded];
        half.read(0, &mut halves).unwrap();
        let in_order = |i: usize| f16::from_bits(halves[operand_index(i)]).to_f32();
        let halves: Vec<f32> = (0..halves.len()).map(in_order).collect();
        self.compare("attention_prefill", &self.pick(&halves, padded), 2.0);
    }

    /// One token after another; a token that is already there is written again with the same result.
    fn decode(&self) {
        let (kv_heads, width) = (self.case.kv_heads, self.case.width());
        let cache = self.new_cache();
        let mut scratch = self.scratch(1);
        let mut out = guarded(self.gpu, &vec![GUARD; self.width()]);
        let bounds = step_bounds(&cache);
        let mut step = Checked::new(self.gpu, "a test", 1, Step::default(), bounds).unwrap();
        let mut found = Vec::new();
        for r in 0..self.case.len {
            let shape = AttentionShape {
                m: 1,
                splits: AttentionScratch::splits(self.gpu, kv_heads, 1, r + 1),
                holds_dependents: r % 2 == 0,
                runs: false,
                shared: None,
            };
            let at = Step {
                position: r as i32,
                slot: SLOT as i32,
                ..Step::default()
            };
            step.write(0, &[at]).unwrap();
            let row = &self.case.qkv[r * width..(r + 1) * width];
            let row = self.gpu.upload("a test", row).unwrap();
            let settings = self.on_device.settings();
            let mut run = |is_read: bool| {
                self.stream
                    .attention_decode(
                        &row,
                        &step,
                        &settings,
                        cache.layer(LAYER),
                        &mut scratch,
                        AttentionOutput::Full(&mut out),
                        shape,
                    )
                    .unwrap();
                is_read.then(|| finish(&self.stream, &out))
            };
            let is_read = self.rows.contains(&r);
            if let Some(values) = run(is_read) {
                assert!(
                    run(true).as_ref() == Some(&values),
                    "attention_decode {}: not the same again",
                    self.name
                );
                found.extend(values);
            }
        }
        self.compare("attention_decode", &found, 1.0);
    }

    /// Runs of tokens, between rows of another sequence with the same tokens, one at a time: their full pages
    /// read row by row, or once for all of them (`together`).
    fn runs(&self, together: bool) {
        let (heads, kv_heads, width) = (self.case.heads, self.case.kv_heads, self.case.width());
        let cache = self.new_cache();
        let mut scratch = self.scratch(2 + MOST_RUN);
        let mut out = guarded(self.gpu, &vec![GUARD; (2 + MOST_RUN) * self.width()]);
        let mut found = vec![0.0; self.case.len * self.width()];
        let mut other = 0;
        let (mut from, mut length) = (0, 1);
        while from < self.case.len {
            let run = length.min(self.case.len - from);
            let at = |position: usize, slot: usize| Step {
                position: position as i32,
                slot: slot as i32,
                ..Step::default()
            };
            let mut places: Vec<Step> = (from..from + run).map(|p| at(p, SLOT)).collect();
            // A neighbour at the position before the run's, and an idle one after it.
            places.insert(0, at(other, 1 - SLOT));
            places.push(at(0, cache.idle_slot()));
            let m = places.len();
            let row = |p: usize| &self.case.qkv[p * width..][..width];
            let mut qkv = row(other).to_vec();
            (from..from + run).for_each(|p| qkv.extend(row(p)));
            qkv.extend(row(0));
            let qkv = self.gpu.upload("a test", &qkv).unwrap();
            let bounds = step_bounds(&cache);
            let step = Checked::upload(self.gpu, "a test", &places, bounds).unwrap();
            let mut cascade = Cascade::new(self.gpu, m, cache.places()).unwrap();
            let prefix = SharedPrefix {
                slot: SLOT,
                pages: from / PAGE,
                rows: (1..=run).collect(),
            };
            let shares =
                together && prefix.pages > 0 && run > 1 && Cascade::fits(self.gpu, self.case.kv);
            let prefixes = if shares { vec![prefix] } else { Vec::new() };
            let each = heads / kv_heads;
            let shape = cascade
                .write(&self.stream, &prefixes, each, kv_heads)
                .unwrap();
            let shape = AttentionShape {
                m,
                splits: AttentionScratch::splits(self.gpu, kv_heads, m, from + run),
                holds_dependents: run % 2 == 0,
                runs: true,
                shared: shape.map(|shape| (&cascade, shape)),
            };
            self.stream
                .attention_decode(
                    &qkv,
                    &step,
                    &self.on_device.settings(),
                    cache.layer(LAYER),
                    &mut scratch,
                    AttentionOutput::Full(&mut out),
                    shape,
                )
                .unwrap();
            let values = finish(&self.stream, &out);
            found[from * self.width()..(from + run) * self.width()]
                .copy_from_slice(&values[self.width()..(1 + run) * self.width()]);
            (from, other) = (from + run, other + 1);
            length = (length + 4) % MOST_RUN + 1;
        }
        self.compare("attention_run", &self.pick(&found, self.width()), 1.0);
    }
}

fn check_attention(gpu: &Gpu, case: &Case) {
    let check = AttentionCheck::new(gpu, case);
    check.prefill();
    check.decode();
    check.runs(false);
    if case.dim == HEAD_DIM {
        check.runs(true);
    }
}

#[test]
fn attention() {
    let Some(gpu) = gpu() else { return };
    for kv in [KvType::F16, KvType::Int8] {
        for (heads, kv_heads, len) in [
            (2, 2, 5),
            (4, 2, 70),
            (16, 8, 300),
            (5, 1, 130),
            (8, 1, 700),
        ] {
            if len > 130 && is_sanitizing() {
                continue;
            }
            check_attention(&gpu, &Case::new(heads, kv_heads, kv, len));
            if len <= 300 {
                check_attention(&gpu, &Case::biased(heads, kv_heads, kv, len));
            }
        }
        for (heads, kv_heads, len) in [(2, 2, 5), (4, 2, 70), (8, 1, 300), (12, 2, 700)] {
            if len <= 130 || !is_sanitizing() {
                check_attention(&gpu, &Case::of(WIDE_HEAD_DIM, heads, kv_heads, kv, len));
            }
        }
    }
}

/// A copied page works as well as the original, in every layer.
#[test]
fn copied_pages() {
    let Some(gpu) = gpu() else { return };
    for kv in [KvType::F16, KvType::Int8] {
        let case = Case::new(4, 2, kv, 2 * PAGE + 30);
        let check = AttentionCheck::new(&gpu, &case);
        let mut cache = new_cache(&gpu, &check.stream, &case, 3);
        let (qkv, places) = check.append(&cache, 0..case.len);
        let width = check.width();
        let mut out = guarded(&gpu, &vec![GUARD; case.len * width]);
        let attend = |cache: &DevicePages, out: &mut Buffer<f32>| {
            let layer = cache.layer(LAYER);
            check
                .stream
                .attention_reference(&qkv, &places, case.heads, layer, out, case.len)
                .unwrap();
            finish(&check.stream, out)
        };
        let before = attend(&cache, &mut out);
        // Slot 1 has pages 7, 4 and 1 of 9, slot 0 has 8, 5 and 2.
        let mut entries = Vec::new();
        for (index, (from, page)) in [(7, 8), (4, 5), (1, 2)].into_iter().enumerate() {
            check.stream.copy_page(&mut cache, from, page).unwrap();
            entries.push(PageEntry {
                slot: SLOT,
                index,
                page,
            });
        }
        check.stream.set_pages(&mut cache, &entries).unwrap();
        assert!(attend(&cache, &mut out) == before, "{kv}");
        let outside = PageEntry {
            slot: SLOT,
            index: 0,
            page: 9,
        };
        assert!(check.stream.set_pages(&mut cache, &[outside]).is_err());
        assert!(check.stream.copy_page(&mut cache, 0, 9).is_err());
    }
}

/// Rows outside the cache are refused before a kernel gets them.
#[test]
fn rows_outside_the_cache_are_refused() {
    let Some(gpu) = gpu() else { return };
    let case = Case::new(4, 2, KvType::F16, 30);
    let check = AttentionCheck::new(&gpu, &case);
    let cache = check.new_cache();
    let larger = new_cache(
        &gpu,
        &check.stream,
        &Case::new(4, 2, KvType::F16, PAGE + 1),
        2,
    );
    let place = |position: usize, slot: i32| Row {
        position: position as i32,
        slot,
        ..Row::default()
    };
    for outside in [place(PAGE, 0), place(0, 3), place(0, -1)] {
        let rows = Checked::upload(&gpu, "a test", &[outside], cache.places());
        assert!(rows.is_err(), "{outside:?}");
    }
    let rows = Checked::upload(&gpu, "a test", &[place(PAGE, 0)], larger.places()).unwrap();
    let mut qkv = gpu.zeros("a test", check.case.width()).unwrap();
    let settings = check.on_device.settings();
    let append = (check.stream).append(&mut qkv, &rows, &settings, cache.layer(LAYER), 1);
    assert!(
        append
            .unwrap_err()
            .to_string()
            .contains("positions of rows")
    );
    let mut out = gpu.zeros("a test", check.width()).unwrap();
    let layer = cache.layer(LAYER);
    let attended = (check.stream).attention_reference(&qkv, &rows, 4, layer, &mut out, 1);
    assert!(attended.is_err());
}
