//! GPU memory of a quantization: estimated beforehand, so that the run fits the available memory,
//! and measured afterwards.
//!
//! Text is sampled from the source, or from a rounded copy of it if the source does not fit. Layers
//! are processed one at a time, in pieces of as many rows as fit. Quality is measured with source and
//! result side by side or, if they do not fit, with the source run layer by layer.

use crate::calibration::{SAMPLING_ROWS, sampling_slots};
use crate::error::{Error, Result};
use crate::memory::{self, session};
use crate::methods::Needs;
use crate::rounding::PIECE;
use crate::schemes::Schemes;
use crate::streamed;
use nq_f32::{hold_head, hold_layer, hold_work};
use nq_formats::{Bits, TrellisScheme};
use nq_kernels::Account;
use nq_kernels::grad::SCRATCH;
use nq_kernels::registry::WeightKind;
use nq_load::gpu::GpuSizes;
use nq_model::{DType, Dims, ModelConfig};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The model that text is sampled from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SampledFrom {
    /// The source itself.
    #[default]
    Source,
    /// The source, rounded to 8 bits while loading.
    Int8,
    /// The source, rounded to 4 bits while loading.
    Int4,
}

impl fmt::Display for SampledFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SampledFrom::Source => "the source",
            SampledFrom::Int8 => "an INT8 copy of the source",
            SampledFrom::Int4 => "an INT4 copy of the source",
        })
    }
}

/// GPU memory that a run takes, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceEstimate {
    /// Bytes that may be used.
    #[serde(rename = "limit_bytes")]
    pub limit: u64,
    /// The most bytes held at once, without tuning.
    #[serde(rename = "peak_bytes")]
    pub peak: u64,
    /// The stage that holds them.
    pub stage: &'static str,
    /// The most while text is sampled.
    #[serde(rename = "sampling_bytes")]
    pub sampling: u64,
    /// The most while layers are quantized.
    #[serde(rename = "quantizing_bytes")]
    pub quantizing: u64,
    /// The most while quality is measured.
    #[serde(rename = "measuring_bytes")]
    pub measuring: u64,
    /// The model that text is sampled from.
    pub sampled_from: SampledFrom,
    /// True if quality is measured with the source run layer by layer.
    pub streamed: bool,
    /// Rows that go through a layer together.
    pub rows: usize,
}

/// Numbers of rows to try, in order.
const ROWS: [usize; 5] = [8192, 4096, 2048, 1024, 512];

/// The parts of a run that its GPU memory depends on.
pub(crate) struct DeviceWork<'a> {
    pub(crate) schemes: &'a Schemes,
    /// Trellises that weights may get.
    pub(crate) trellises: Vec<TrellisScheme>,
    pub(crate) needs: Needs,
    /// Most sequences sampled; 0: none.
    pub(crate) sampled: usize,
    pub(crate) sizes: GpuSizes,
}

/// Schemes of the copy that text is sampled from; `None` for the source.
pub(crate) fn copy_schemes(from: SampledFrom) -> Option<Schemes> {
    let schemes = |bits| {
        let linears = crate::schemes::default_scheme(bits);
        Schemes {
            head: Some(linears.into()),
            ..Schemes::defaults(bits)
        }
    };
    match from {
        SampledFrom::Source => None,
        SampledFrom::Int8 => Some(schemes(Bits::B8)),
        SampledFrom::Int4 => Some(schemes(Bits::B4)),
    }
}

/// Chooses the best way of doing each stage that fits `limit` bytes of a GPU.
///
/// # Errors
/// [`Error::Request`] with the bytes needed if a stage does not fit; a scheme that no kernel supports.
pub(crate) fn fit(c: &ModelConfig, work: &DeviceWork<'_>, limit: u64) -> Result<DeviceEstimate> {
    // An engine with a session: of the source, or of its weights under `schemes`.
    let engine = |schemes: Option<&Schemes>, slots, max_rows| {
        let dense = WeightKind::Dense(DType::BF16);
        let kinds = |name: &str| schemes.map_or(dense, |s| s.kind(name, DType::BF16));
        (work.sizes.engine)(c, &kinds, &session(c, slots, max_rows))
    };
    let what = "memory of the GPU for sampling text";
    let (sampled_from, sampling) = match work.sampled {
        0 => (SampledFrom::Source, 0),
        n => {
            let slots = sampling_slots(c, n, session(c, 0, 0).ctx, Some(work.sizes.together));
            let copies = [SampledFrom::Source, SampledFrom::Int8, SampledFrom::Int4];
            first(&copies, limit, what, |from| {
                Ok(engine(copy_schemes(from).as_ref(), slots, SAMPLING_ROWS)?.total() as u64)
            })?
        }
    };
    let what = "memory of the GPU for quantizing a layer";
    let (rows, quantizing) = first(&ROWS, limit, what, |rows| {
        peak(|a| quantize(a, c, work, rows))
    })?;
    let source = engine(None, 1, memory::ROWS)?;
    let result = engine(Some(work.schemes), 1, memory::ROWS)?.total();
    // Measuring the source against itself takes two sessions.
    let both = (source.total() + result.max(source.total() - source.weights)) as u64;
    let streamed = both > limit;
    let (rows, measuring) = if streamed {
        // Layers run before the result is loaded, and only the head stays.
        let head = peak(|a| {
            hold_head(a, c, streamed::ROWS)?;
            Ok(())
        })?;
        let fewer = &ROWS[ROWS.iter().position(|&r| r == rows).unwrap_or(0)..];
        let what = "memory of the GPU for measuring quality";
        first(fewer, limit, what, |rows| {
            let layers = peak(|a| {
                run(a, c, rows)?;
                Ok(())
            })?;
            Ok(layers.max(head + result as u64))
        })?
    } else {
        (rows, both)
    };
    let stages = [
        (sampling, "sampling text"),
        (quantizing, "quantizing a layer"),
        (measuring, "measuring quality"),
    ];
    let (peak, stage) = stages.into_iter().max().unwrap_or_default();
    Ok(DeviceEstimate {
        limit,
        peak,
        stage,
        sampling,
        quantizing,
        measuring,
        sampled_from,
        streamed,
        rows,
    })
}

/// The first of `ways` that takes at most `limit` bytes, and the bytes it takes.
fn first<T: Copy>(
    ways: &[T],
    limit: u64,
    what: &'static str,
    bytes: impl Fn(T) -> Result<u64>,
) -> Result<(T, u64)> {
    let mut least = u64::MAX;
    for &way in ways {
        let taken = bytes(way)?;
        if taken <= limit {
            return Ok((way, taken));
        }
        least = least.min(taken);
    }
    Err(Error::Request {
        what,
        expected: format!("at least {least} bytes (--device-memory, or --device cpu)"),
        found: format!("{limit} available"),
    })
}

/// Most bytes that `stage` holds, including the workspace of its products.
fn peak(stage: impl FnOnce(&Account) -> Result<()>) -> Result<u64> {
    let account = Account::gpu();
    let _scratch = account.hold(SCRATCH);
    stage(&account)?;
    Ok(account.peak() as u64)
}

/// Runs a layer over pieces of `rows` rows, whose memory stays held.
fn run(a: &Account, c: &ModelConfig, rows: usize) -> Result<impl Sized> {
    let work = hold_work(a, c, rows, session(c, 0, 0).ctx)?;
    drop(hold_layer(a, c)?);
    Ok(work)
}

/// Quantizes the layers, after the head, which is rounded in pieces.
fn quantize(a: &Account, c: &ModelConfig, work: &DeviceWork<'_>, rows: usize) -> Result<()> {
    let moments = |n: usize| a.hold(4 * n * n);
    if work.needs != Needs::Hessian {
        return run(a, c, rows).map(drop);
    }
    let n = c.hidden_size;
    let head = moments(n);
    // Those of inputs that matter alike, for an embedding in a trellis.
    let alike = (!work.trellises.is_empty()).then(|| moments(n));
    round(a, c.vocab_size.min(PIECE / n), n, work);
    drop((head, alike));
    let products = c.largest_layer().products().into_iter();
    let all = products.flat_map(|p| (0..p.shares(c)).map(|_| p.inputs(c)));
    let _moments: Vec<_> = all.map(moments).collect();
    let _pass = run(a, c, rows)?;
    for product in c.largest_layer().products() {
        for linear in product.linears {
            let (out, inputs) = linear.dims(c).pair();
            round(a, out / product.shares(c), inputs, work);
        }
    }
    Ok(())
}

/// Rounds a weight `[out, n]` using the moments of its inputs.
fn round(a: &Account, out: usize, n: usize, work: &DeviceWork<'_>) {
    let (values, groups) = (out * n, work.schemes.linears.group().count(n));
    let factor = a.hold(4 * n * n);
    drop(a.hold((work.sizes.factor)(n)));
    // The weight, once as it is and once permuted, codes, errors of a block and parameters.
    drop(a.hold(9 * values + (512 + 8 * groups) * out));
    let trellis = work
        .trellises
        .iter()
        .map(|s| (work.sizes.trellis)(*s, Dims::new(out, n)));
    if let Some(bytes) = trellis.max() {
        // Beside the moments, those of transformed inputs.
        drop(a.hold(4 * n * n + bytes));
    }
    drop(factor);
    // The weight, its changes and the changed outputs, codes.
    drop(a.hold(13 * values));
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_formats::Scheme;
    use nq_model::Preset;
    use nq_model::names::{self, Shape};
    use nq_runtime::DeviceMemory;

    #[test]
    fn the_best_way_that_fits_is_taken() {
        let way = |limit| first(&[100, 60, 40], limit, "a test", Ok);
        assert_eq!(way(120).unwrap(), (100, 100));
        assert_eq!(way(60).unwrap(), (60, 60));
        let error = way(39).unwrap_err().to_string();
        assert!(
            error.contains("a test") && error.contains("at least 40 bytes"),
            "{error}"
        );
    }

    /// Packed weights are about as large as stored ones, and a session of one sequence is small.
    const ABOUT: GpuSizes = GpuSizes {
        together: 64,
        engine: |c, kinds, spec| {
            let all = names::parameters(c).into_iter();
            let bytes = all.map(|(name, shape)| match shape {
                Shape::Matrix(out, inputs) => kinds(&name).bytes(Dims::new(out, inputs)),
                Shape::Vector(n) => 4 * n,
            });
            Ok(DeviceMemory {
                weights: bytes.sum(),
                kv: 4 * c.num_hidden_layers * c.kv_dim() * spec.ctx * spec.slots,
                scratch: 64 * 10 * c.vocab_size,
                free: 0,
                on_host: false,
            })
        },
        factor: |n| 8 * n * (n + 128),
        trellis: |_, Dims { rows: out, cols: n }| 13 * out * n + (1 << 30),
    };

    /// Common GPU sizes: 8B fits 12 GB, of which the driver takes a part, and 32B fits 80 GB. On a small
    /// GPU, text is sampled from a rounded copy and the source is streamed.
    #[test]
    fn published_shapes_fit_the_cards_of_their_users() {
        for sizes in [Some(ABOUT), nq_load::gpu::sizes().ok()]
            .into_iter()
            .flatten()
        {
            let choose_for = |schemes: &Schemes, preset: &str, limit: u64| {
                let config = Preset::find(preset).expect("a published shape").config();
                let work = DeviceWork {
                    schemes,
                    trellises: schemes.all().filter_map(Scheme::trellis).collect(),
                    needs: Needs::Hessian,
                    sampled: 64,
                    sizes,
                };
                let found = fit(&config, &work, limit)?;
                assert!(found.peak <= limit, "{found:?}");
                Ok::<_, Error>((found.sampled_from, found.streamed))
            };
            let choose =
                |preset: &str, limit| choose_for(&Schemes::defaults(Bits::B4), preset, limit);
            let small = choose("qwen3-8b", 11_300_000_000).unwrap();
            assert_eq!(small, (SampledFrom::Int8, true));
            let large = choose("qwen3-32b", 79_000_000_000).unwrap();
            assert_eq!(large, (SampledFrom::Source, true));
            let whole = choose("qwen3-8b", 140_000_000_000).unwrap();
            assert_eq!(whole, (SampledFrom::Source, false));
            assert!(choose("qwen3-8b", 4_000_000_000).is_err());
            for scheme in TrellisScheme::all() {
                let schemes = Schemes::trellis(scheme);
                let whole = choose_for(&schemes, "qwen3-8b", 79_000_000_000).unwrap();
                assert_eq!(whole, (SampledFrom::Source, false), "{scheme}");
            }
            for (hybrid, limit) in [
                ("qwen3.5-27b", 79_000_000_000),
                ("qwen3.5-35b-a3b", 140_000_000_000),
            ] {
                let whole = choose(hybrid, limit).unwrap();
                assert_eq!(whole, (SampledFrom::Source, false), "{hybrid}");
            }
        }
    }
}
