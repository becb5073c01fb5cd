//! Benches of residuals of several streams, n-grams and indexers, in the shape of Qwen3.8-Flash-Next.

use super::delta::noise;
use super::timing::Timing;
use nq_cuda::{
    Checked, ChosenBlocks, ConvolvedRows, DeltaSpan, DevicePages, INDEX_DIM, IndexSizes,
    IndexVectors, KeptRows, LayerRows, PagesShape, Places, Row, RowsOut, SequenceRows, StreamDims,
    StreamNorm, StreamSpans, StreamWeights, SumsOf,
};
use nq_kernels::Result;
use nq_kernels::pages::KvType;

const DIMS: StreamDims = StreamDims {
    streams: 4,
    width: 2560,
};
const RANK: usize = 320;
const SIZES: IndexSizes = IndexSizes {
    heads: 4,
    block: 4,
    most: 512,
    query_heads: 24,
    kv_heads: 2,
};
const M: usize = 2048;

/// `count` rows of one sequence, from `position` on.
fn span(count: usize, position: usize) -> DeltaSpan {
    DeltaSpan {
        rows: SequenceRows {
            row: 0,
            count,
            position,
            slot: 0,
        },
        mark: None,
    }
}

pub(crate) fn hyper(t: &mut Timing) -> Result<()> {
    let (all, width) = (DIMS.all(), DIMS.width);
    let upload = |n: usize| t.gpu.upload("a benchmark", &noise(n));
    let (source, gain, taps) = (upload(M * all)?, upload(all)?, upload(4 * all)?);
    let (gates, low, rows) = (upload(M * all)?, upload(M * RANK)?, upload(M * width)?);
    let mut x = upload(M * all)?;
    let mut y = t.gpu.zeros("a benchmark", M * all)?;
    let mut half = t.gpu.zeros("a benchmark", M * all)?;
    let mut inject = upload(M * DIMS.streams)?;
    let kept = KeptRows::new(&t.gpu, 1, 9 * all)?;
    let places = Places {
        positions: M,
        slots: 1,
        images: 0,
    };
    let mut spans = StreamSpans::new(&t.gpu, 1, places, 1)?;
    for m in [1, 64, M] {
        let what = |op: &str| format!("{op} {m} rows");
        let norm = StreamNorm {
            x: &source,
            rows: None,
            gain: &gain,
            eps: 1e-6,
        };
        t.alone(&what("spread_streams"), 4 * m * (all + width), |_| {
            t.stream.spread_streams(&rows, &mut y, m, DIMS)
        })?;
        t.alone(&what("norm_streams"), 10 * m * all, |_| {
            t.stream
                .norm_streams(&norm, &mut y, Some(&mut half), m, DIMS)
        })?;
        t.alone(&what("activate_streams"), 6 * m * RANK, |_| {
            let sums = |sums, width| SumsOf {
                sums,
                parts: 1,
                width,
            };
            let inject = Some(StreamWeights {
                inject: sums(&rows, DIMS.streams),
                weights: &mut inject,
            });
            (t.stream).activate_streams(sums(&low, RANK), &mut half, inject, m, DIMS.streams)
        })?;
        t.alone(&what("mix_streams"), m * (8 * all + 2 * width), |_| {
            let out = RowsOut::half(&mut half);
            t.stream.mix_streams(&source, &gates, &out, None, m, DIMS)
        })?;
        t.alone(&what("inject_streams"), m * (8 * all + 4 * width), |_| {
            t.stream.inject_streams(&rows, &inject, &mut x, m, DIMS)
        })?;
        t.alone(&what("gate_ngrams"), m * (12 * all + 4 * width), |_| {
            let operands = [&source, &gates, &rows];
            t.stream.gate_ngrams(operands, &mut y, m, DIMS)
        })?;
        t.stream.write_spans(&mut spans, &[span(m, 0)], m)?;
        t.alone(&what("convolve_ngrams"), 16 * m * all, |_| {
            let rows = ConvolvedRows {
                normed: &source,
                gated: &gates,
                taps: &taps,
                count: 4,
                dilation: 3,
                x: &mut x,
            };
            let layer = LayerRows {
                all: &kept,
                first: 0,
            };
            (t.stream).convolve_ngrams(rows, &spans, layer, m, &places)
        })?;
    }
    Ok(())
}

pub(crate) fn indexer(t: &mut Timing) -> Result<()> {
    const POSITIONS: usize = 131_072;
    let shape = PagesShape {
        kv: KvType::F16,
        layers: 1,
        kv_heads: SIZES.kv_heads,
        head_dim: 256,
        pages: POSITIONS / 128,
        slots: 1,
        ctx: POSITIONS,
    };
    let mut pages = DevicePages::new(&t.gpu, shape)?.with_block_keys(&t.gpu, SIZES.block)?;
    let entries: Vec<_> = (0..shape.pages)
        .map(|index| nq_cuda::PageEntry {
            slot: 0,
            index,
            page: index as u32,
        })
        .collect();
    t.stream.set_pages(&mut pages, &entries)?;
    let upload = |n: usize| t.gpu.upload("a benchmark", &noise(n));
    let gains = [upload(INDEX_DIM)?, upload(INDEX_DIM)?];
    let cos_sin = t.gpu.zeros("a benchmark", POSITIONS * 32)?;
    let mut index = upload(M * SIZES.width())?;
    let qkv = upload(M * (2 * SIZES.query_heads + 2 * SIZES.kv_heads) * 256)?;
    let mut half = t.gpu.zeros("a benchmark", M * SIZES.query_heads * 256)?;
    let kept = KeptRows::new(&t.gpu, 2, SIZES.block * INDEX_DIM)?;
    let mut chosen = ChosenBlocks::new(&t.gpu, SIZES, M, POSITIONS)?;
    let places = Places {
        positions: POSITIONS,
        slots: 2,
        images: 0,
    };
    let mut spans = StreamSpans::new(&t.gpu, 1, places, 2)?;
    for (m, depth) in [(1, 8192), (1, POSITIONS - 1), (M, 8192), (M, POSITIONS - M)] {
        let rows: Vec<Row> = (0..m)
            .map(|row| Row {
                position: (depth + row) as i32,
                ..Row::default()
            })
            .collect();
        let rows = Checked::upload(&t.gpu, "a benchmark", &rows, places)?;
        let vectors = IndexVectors {
            gains: gains.each_ref(),
            cos_sin: &cos_sin,
            eps: 1e-6,
        };
        let what = |op: &str| format!("{op} {m} rows at {depth}");
        t.stream.write_spans(&mut spans, &[span(m, depth)], m)?;
        let scored = chosen.scored(&[span(m, depth)]);
        let keys = depth / SIZES.block * INDEX_DIM * 4;
        t.alone(&what("choose_positions"), keys, |_| {
            let layer = LayerRows {
                all: &kept,
                first: 0,
            };
            let (cache, to) = (pages.layer(0), &mut chosen);
            (t.stream).choose_positions(
                &mut index, &rows, &spans, &vectors, cache, layer, to, &scored, m,
            )
        })?;
        let read = m * SIZES.most * SIZES.block * SIZES.kv_heads * 256 * 4;
        t.alone(&what("attend_chosen"), read, |_| {
            let out = RowsOut::half(&mut half);
            (t.stream).attend_chosen(&qkv, &rows, 0..m, pages.layer(0), &mut chosen, &out)
        })?;
    }
    Ok(())
}
