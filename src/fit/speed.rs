//! How fast a model of some shape decodes, computed from the bytes that a token reads, the bandwidth of the memory, and the
//! speeds of similar models in benches/records.
//!
//! On a GPU, a layer's weights are read while others wait for its inputs: a layer takes the root of the sum of the squares of
//! the time that reading takes and of a time that does not depend on the bandwidth. The latter is that of the model in the
//! records whose layers are most alike, found by the same formula. On a CPU, cores compute while memory is read: the cube root of the sum of
//! cubes of both times, which meets 2026-11-23-cpu-mixture.csv at two bandwidths.

use nq_kernels::Isa;
use nq_model::{ModelConfig, Preset};
use std::sync::LazyLock;

/// The part of the measured bandwidth that the longest reads reach: .94 to .96 for 8B to 32B in 16 bits
/// (2026-11-21-gpu-speed.csv).
const REACHED: f64 = 0.95;

/// Kernels of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernels {
    /// Of compute capability 9.0.
    Hopper,
    /// Of all others.
    Mma,
}

/// A figure that was computed, and the record that it rests on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Computed {
    pub(crate) tok_s: f64,
    pub(crate) record: &'static str,
    /// Whether that was measured with other kernels than the machine's.
    pub(crate) of_other_kernels: bool,
}

impl Computed {
    fn by(record: &'static str, tok_s: f64) -> Self {
        Computed {
            tok_s,
            record,
            of_other_kernels: false,
        }
    }
}

/// A line of a table of data without its remarks.
pub(super) fn lines(table: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    let lines = table.lines().filter(|line| !line.starts_with('#')).skip(1);
    lines.map(|line| line.split(',').collect())
}

/// A figure of a record.
struct SpeedRow {
    kernels: Kernels,
    codes: &'static str,
    what: &'static str,
    tok_s: f64,
    /// Bytes that a token reads, and how many of them the memory read in a second.
    bytes: f64,
    bandwidth: f64,
    record: &'static str,
    shape: Workload,
}

/// What speed depends on in a model's shape.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Workload {
    recurrent: bool,
    mixture: bool,
    layers: f64,
    /// Weights of a layer that a token passes, a part of the head among them.
    weights: f64,
}

impl Workload {
    fn of(c: &ModelConfig) -> Self {
        let layers = c.num_hidden_layers as f64;
        Workload {
            recurrent: c.delta.is_some(),
            mixture: c.experts.is_some(),
            layers,
            weights: passed(c) / layers,
        }
    }

    fn dense(self) -> Self {
        Workload {
            recurrent: false,
            mixture: false,
            ..self
        }
    }
}

/// Weights that a token passes: without the embedding's, of which it reads a row.
fn passed(c: &ModelConfig) -> f64 {
    let table = match c.tie_word_embeddings {
        true => 0,
        false => c.vocab_size * c.hidden_size,
    };
    (c.active_parameters() - table) as f64
}

static ROWS: LazyLock<Vec<SpeedRow>> = LazyLock::new(|| {
    let number = |text: &str| text.parse().unwrap_or(0.0);
    let rows = lines(include_str!("speeds.csv")).filter_map(|row| {
        let [kernels, preset, codes, what, tok_s, bytes, gb_s, record] = row[..] else {
            return None;
        };
        Some(SpeedRow {
            kernels: match kernels {
                "hopper" => Kernels::Hopper,
                _ => Kernels::Mma,
            },
            codes,
            what,
            tok_s: number(tok_s),
            bytes: number(bytes),
            bandwidth: number(gb_s) * 1e9,
            record,
            shape: Workload::of(&Preset::find(preset)?.config()),
        })
    });
    rows.collect()
});

impl SpeedRow {
    /// Seconds of a layer that do not depend on the bandwidth, squared, in a model with layers of `shape`. What trellis codes cost
    /// is arithmetic, which grows with the weights.
    fn waits(&self, shape: Workload) -> f64 {
        let layer = 1.0 / (self.tok_s * self.shape.layers);
        let read = self.bytes / (self.bandwidth * REACHED * self.shape.layers);
        let waits = (layer * layer - read * read).max(0.0);
        match self.codes.starts_with("trellis") {
            true => waits * (shape.weights / self.shape.weights).max(1.0).powi(2),
            false => waits,
        }
    }
}

/// The row of the kernels, or else of Hopper's, whose layers are most like those of `shape`. What trellis codes cost is arithmetic, of
/// which other cards have less.
fn nearest(
    kernels: Kernels,
    codes: &str,
    what: &str,
    shape: Workload,
) -> Option<&'static SpeedRow> {
    let of_kernels = |kernels| {
        let wanted = (kernels, codes, what, shape.recurrent, shape.mixture);
        let kind = |row: &SpeedRow| {
            let Workload {
                recurrent, mixture, ..
            } = row.shape;
            (row.kernels, row.codes, row.what, recurrent, mixture)
        };
        let distance = |row: &&SpeedRow| (row.shape.weights / shape.weights).ln().abs();
        let rows = ROWS.iter().filter(|row| kind(row) == wanted);
        rows.min_by(|a, b| distance(a).total_cmp(&distance(b)))
    };
    let other = || of_kernels(Kernels::Hopper).filter(|_| !codes.starts_with("trellis"));
    of_kernels(kernels).or_else(other)
}

/// Codes of one width in all layers, of which records have all kinds of models.
const SIMPLE: &str = "4 simple";

/// The codes in the records that are read as fast as `codes`.
fn alike(codes: &str) -> &str {
    match codes {
        "3" | "5" | "6" => "4",
        other => other,
    }
}

/// Decode of one sequence on a GPU whose memory is read at `bandwidth` bytes a second, where a token reads `bytes`; `None`
/// without a record of such models or codes.
pub(crate) fn on_gpu(
    c: &ModelConfig,
    codes: &str,
    kernels: Kernels,
    bytes: f64,
    bandwidth: f64,
) -> Option<Computed> {
    let shape = Workload::of(c);
    let find = |codes: &str, shape: Workload| nearest(kernels, codes, "decode", shape);
    let (waits, row, record) = match find(alike(codes), shape) {
        Some(row) => (row.waits(shape), row, row.record),
        None => {
            let row = find(SIMPLE, shape)?;
            // What these codes cost a dense model more.
            let dense = |codes| find(codes, shape.dense());
            let (other, simple) = (dense(alike(codes))?, dense(SIMPLE)?);
            let more = other.waits(shape) - simple.waits(shape);
            (row.waits(shape) + more.max(0.0), row, other.record)
        }
    };
    let read = bytes / (bandwidth * REACHED * shape.layers);
    Some(Computed {
        tok_s: 1.0 / (shape.layers * (read * read + waits).sqrt()),
        record,
        of_other_kernels: row.kernels != kernels,
    })
}

/// The record of how often texts find experts in rooms.
pub(crate) const FOUND: &str = "2026-11-30-expert-hits.csv";

/// The part of the experts that a text needs that it finds in rooms, if such a `share` of all has one: by replaying choices
/// that repeat as published traces do, with nq's policy.
pub(crate) fn found(share: f64) -> f64 {
    let rows = lines(include_str!("hits.csv")).filter_map(|row| match row[..] {
        [share, found, _] => Some((share.parse::<f64>().ok()?, found.parse::<f64>().ok()?)),
        _ => None,
    });
    let mut below = (0.0, 0.0);
    for row in rows {
        if share <= row.0 {
            let part = (share - below.0) / (row.0 - below.0);
            return below.1 + part * (row.1 - below.1);
        }
        below = row;
    }
    1.0
}

/// How many times the tokens of one sequence so many get together, on GPUs; `None` without a record of such models.
pub(crate) fn together(c: &ModelConfig, clients: usize) -> Option<Computed> {
    let shape = Workload::of(c);
    let find = |n: usize| nearest(Kernels::Hopper, SIMPLE, &format!("together {n}"), shape);
    let one = find(1)?;
    let ratio = |n| Some(find(n)?.tok_s / one.tok_s);
    let sizes = [1, 4, 16, 64];
    let above = sizes.into_iter().find(|&n| n >= clients).unwrap_or(64);
    let below = sizes.into_iter().rev().find(|&n| n <= clients).unwrap_or(1);
    let (low, high) = (ratio(below)?, ratio(above)?);
    let steps = |n: usize| (n as f64 / below as f64).ln();
    let part = if above == below {
        0.0
    } else {
        steps(clients) / steps(above)
    };
    Some(Computed::by(one.record, low * (high / low).powf(part)))
}

/// Prompts of 512 tokens on an H100 or H200, which have as much arithmetic; `None` for others and for codes of which no record has
/// the speed.
pub(crate) fn prompt_on_gpu(c: &ModelConfig, codes: &str, kernels: Kernels) -> Option<Computed> {
    let shape = Workload::of(c);
    let codes = match codes.starts_with("trellis") {
        true => codes,
        false => SIMPLE,
    };
    let row = nearest(kernels, codes, "prompt", shape).filter(|row| row.kernels == kernels)?;
    let all = |shape: Workload| shape.weights * shape.layers;
    Some(Computed::by(
        row.record,
        row.tok_s * all(row.shape) / all(shape),
    ))
}

/// A CPU's threads and instructions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cores {
    pub(crate) threads: usize,
    pub(crate) isa: Isa,
}

/// What a core computes, by the record; `None` without one.
fn rate(isa: Isa, codes: &str, what: &str) -> Option<Computed> {
    let isa = match isa {
        Isa::Avx512 => Isa::Avx512Bf16, // the same kernels, for quantized weights
        isa => isa,
    };
    lines(include_str!("cpu.csv")).find_map(|row| {
        let [of_isa, of_codes, of_what, rate, record] = row[..] else {
            return None;
        };
        let same = (of_isa, of_codes, of_what) == (isa.name(), codes, what);
        Some(Computed::by(record, rate.parse().ok()?)).filter(|_| same)
    })
}

/// Decode of one sequence on a CPU whose memory is read at `bandwidth` bytes a second, where a token reads `bytes` of weights and of
/// keys and values, and passes `weights`; `None` without a record of its instructions.
pub(crate) fn on_cpu(
    c: &ModelConfig,
    codes: &str,
    cores: Cores,
    bytes: f64,
    bandwidth: f64,
) -> Option<Computed> {
    let (layers, head) = match codes {
        "trellis 4" => ("trellis 4", "trellis 6"),
        "trellis 3" | "trellis 2" => (codes, "trellis 4"),
        "3" | "4" | SIMPLE => ("4", "4"),
        // Wider codes wait for memory before they wait for arithmetic.
        _ => ("", ""),
    };
    let reading = bytes / bandwidth;
    if layers.is_empty() {
        let record = rate(cores.isa, "4", "decode")?.record;
        return Some(Computed::by(record, 1.0 / reading));
    }
    let of_head = (c.vocab_size * c.hidden_size) as f64;
    let each = rate(cores.isa, layers, "decode")?;
    let head = rate(cores.isa, head, "decode")?;
    let seconds = |weights: f64, rate: f64| weights / (1e9 * rate * cores.threads as f64);
    let computing = seconds(passed(c) - of_head, each.tok_s) + seconds(of_head, head.tok_s);
    let both = reading.powi(3) + computing.powi(3);
    Some(Computed::by(each.record, both.powf(-1.0 / 3.0)))
}

/// Prompts of 512 tokens on a CPU; `None` without a record of its instructions and codes.
pub(crate) fn prompt_on_cpu(c: &ModelConfig, codes: &str, cores: Cores) -> Option<Computed> {
    let integer = matches!(codes, "3" | "4" | SIMPLE);
    let known = rate(cores.isa, "4", "prompt").filter(|_| integer)?;
    let measured = Preset::find("qwen3-0.6b")?.config();
    let without_head = |c: &ModelConfig| passed(c) - (c.vocab_size * c.hidden_size) as f64;
    let here = known.tok_s * cores.threads as f64;
    Some(Computed::by(
        known.record,
        here * without_head(&measured) / without_head(c),
    ))
}
