//! Attention to positions that an indexer chooses.

use super::rows::in_order;
use super::{GUARD, finish, gpu, guarded};
use half::f16;
use nq_cuda::{
    Checked, ChosenBlocks, DeltaSpan, DevicePages, Heads, INDEX_DIM, IndexSizes, IndexVectors,
    KeptRows, LayerRows, PageEntry, PagesShape, Places, Row, RowsOut, SequenceRows, StreamSpans,
};
use nq_kernels::pages::KvType;
use nq_kernels::reference;
use nq_testkit::compare::nmse;
use nq_testkit::weights::normal;

const DIM: usize = 256;
const EPS: f32 = 1e-6;
const SIZES: IndexSizes = IndexSizes {
    heads: 3,
    block: 4,
    most: 7,
    query_heads: 6,
    kv_heads: 2,
};

/// A head in its norm, and its first 64 values turned.
fn turned(head: &[f32], gain: &[f32], angles: &[[f32; 2]]) -> Vec<f32> {
    let mut out = vec![0.0; head.len()];
    reference::rms_norm(head, gain, EPS, &mut out);
    let pairs: Vec<(f32, f32)> = angles.iter().map(|&[c, s]| (c, s)).collect();
    reference::rope(&mut out[..64], &pairs);
    out
}

/// A sequence in pieces behind one another, which is in pages out of order: what each row attends to is that of the blocks of
/// highest scores, the first of equal ones, and of the positions behind them.
#[test]
fn chosen_positions() {
    const LEN: usize = 300;
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let upload = |v: &[f32]| gpu.upload("a test", v).unwrap();
    let shape = PagesShape {
        kv: KvType::F16,
        layers: 2,
        kv_heads: SIZES.kv_heads,
        head_dim: DIM,
        pages: 5,
        slots: 2,
        ctx: 384,
    };
    let pages = DevicePages::new(&gpu, shape).unwrap();
    let mut pages = pages.with_block_keys(&gpu, SIZES.block).unwrap();
    let entry = |(index, page)| PageEntry {
        slot: 1,
        index,
        page,
    };
    let entries = [(0, 3), (1, 0), (2, 4)].map(entry);
    stream.set_pages(&mut pages, &entries).unwrap();
    let places = Places {
        positions: 384,
        slots: 3,
        images: 0,
    };
    let angles: Vec<[f32; 2]> = (0..384 * 32)
        .map(|i| {
            let angle = (i / 32) as f32 * 0.7f32.powi(i % 32);
            [angle.cos(), angle.sin()]
        })
        .collect();
    let of_position = |p: usize| &angles[p * 32..(p + 1) * 32];
    let cos_sin = gpu.upload("a test", &angles).unwrap();
    let width = SIZES.width();
    let mut raw = normal(LEN * width, 1);
    // The keys of a block are 0, with which every score is: it ties with blocks whose products are all negative.
    for position in 40..44 {
        raw[position * width + width - INDEX_DIM..(position + 1) * width].fill(0.0);
    }
    let gains = [normal(INDEX_DIM, 2), normal(INDEX_DIM, 3)];
    let head_gains = [normal(DIM, 4), normal(DIM, 5)];
    let of_row = (2 * SIZES.query_heads + 2 * SIZES.kv_heads) * DIM;
    let qkv = normal(LEN * of_row, 6);

    // The plain computation.
    let key = |p: usize| &raw[p * width + width - INDEX_DIM..(p + 1) * width];
    let block_keys: Vec<Vec<f32>> = (0..LEN / SIZES.block)
        .map(|b| {
            let first = b * SIZES.block;
            let mean: Vec<f32> = (0..INDEX_DIM)
                .map(|i| (first..first + SIZES.block).map(|p| key(p)[i]).sum::<f32>() / 4.0)
                .collect();
            turned(&mean, &gains[1], of_position(first))
        })
        .collect();
    let chosen_of = |p: usize| {
        let whole = (p + 1) / SIZES.block;
        let queries: Vec<Vec<f32>> = (0..SIZES.heads)
            .map(|h| {
                turned(
                    &raw[p * width + h * INDEX_DIM..][..INDEX_DIM],
                    &gains[0],
                    of_position(p),
                )
            })
            .collect();
        let score = |b: usize| -> f32 {
            let of_head = |q: &Vec<f32>| reference::dot(q, &block_keys[b]).max(0.0);
            queries.iter().map(of_head).sum()
        };
        let scores: Vec<f32> = (0..whole).map(score).collect();
        let mut blocks: Vec<usize> = (0..whole).collect();
        blocks.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        // Rows where the last chosen and the next are nearly equal, but not both 0, show nothing.
        let clear = whole <= SIZES.most || {
            let (last, next) = (scores[blocks[SIZES.most - 1]], scores[blocks[SIZES.most]]);
            last - next > 1e-3 || (last == 0.0 && next == 0.0)
        };
        blocks.truncate(SIZES.most);
        let positions = blocks.into_iter().flat_map(|b| b * 4..b * 4 + 4);
        (positions.chain(whole * 4..p + 1).collect::<Vec<_>>(), clear)
    };
    let kv_at = |p: usize, which: usize, kv: usize| {
        let head = 2 * SIZES.query_heads + which * SIZES.kv_heads + kv;
        let v = &qkv[p * of_row + head * DIM..][..DIM];
        let v = match which {
            0 => turned(v, &head_gains[1], of_position(p)),
            _ => v.to_vec(),
        };
        v.into_iter()
            .map(|v| f16::from_f32(v).to_f32())
            .collect::<Vec<f32>>()
    };
    let keys: Vec<_> = (0..LEN).map(|p| [0, 1].map(|kv| kv_at(p, 0, kv))).collect();
    let values: Vec<_> = (0..LEN).map(|p| [0, 1].map(|kv| kv_at(p, 1, kv))).collect();
    let attended = |p: usize, positions: &[usize]| -> Vec<f32> {
        let of_head = |h: usize| {
            let at = p * of_row + 2 * h * DIM;
            let q = turned(&qkv[at..][..DIM], &head_gains[0], of_position(p));
            let kv = h / (SIZES.query_heads / SIZES.kv_heads);
            let weight = |&p: &usize| f64::from(reference::dot(&q, &keys[p][kv]) / 16.0).exp();
            let weights: Vec<f64> = positions.iter().map(weight).collect();
            let all: f64 = weights.iter().sum();
            let gates = &qkv[at + DIM..][..DIM];
            let value = |i: usize| {
                let terms = positions.iter().zip(&weights);
                let sum: f64 = terms.map(|(&p, w)| w * f64::from(values[p][kv][i])).sum();
                (sum / all / (1.0 + f64::from(-gates[i]).exp())) as f32
            };
            (0..DIM).map(value).collect::<Vec<f32>>()
        };
        (0..SIZES.query_heads).flat_map(of_head).collect()
    };

    let kept = KeptRows::new(&gpu, 4, 4 + SIZES.block * INDEX_DIM).unwrap();
    let mut chosen = ChosenBlocks::new(&gpu, SIZES, 200, places.positions).unwrap();
    let mut spans = StreamSpans::new(&gpu, 1, places, 4).unwrap();
    let gains = gains.each_ref().map(|g| upload(g));
    let head_gains = head_gains.each_ref().map(|g| upload(g));
    let vectors = IndexVectors {
        gains: gains.each_ref(),
        cos_sin: &cos_sin,
        eps: EPS,
    };
    let heads = Heads {
        heads: SIZES.query_heads,
        gains: Some(head_gains.each_ref()),
        biases: &[],
        cos_sin: &cos_sin,
        eps: EPS,
    };
    let (mut position, mut clear_rows) = (0, 0);
    for count in [1, 2, 30, 5, 1, 1, 1, 1, 70, 180, 8] {
        let rows: Vec<Row> = (position..position + count)
            .map(|p| Row {
                position: p as i32,
                slot: 1,
                ..Row::default()
            })
            .collect();
        let rows = Checked::upload(&gpu, "a test", &rows, places).unwrap();
        let span = DeltaSpan {
            rows: SequenceRows {
                row: 0,
                count,
                position,
                slot: 1,
            },
            mark: None,
        };
        let layer = LayerRows {
            all: &kept,
            first: 4,
        };
        let mut index = guarded(&gpu, &raw[position * width..(position + count) * width]);
        let cache = pages.layer(1);
        stream.write_spans(&mut spans, &[span], count).unwrap();
        let scored = chosen.scored(&[span]);
        stream
            .choose_positions(
                &mut index,
                &rows,
                &spans,
                &vectors,
                cache,
                layer,
                &mut chosen,
                &scored,
                count,
            )
            .unwrap();
        finish(&stream, &index);
        let mut of_rows = upload(&qkv[position * of_row..(position + count) * of_row]);
        stream
            .append(&mut of_rows, &rows, &heads, cache, count)
            .unwrap();
        let out_width = SIZES.query_heads * DIM;
        let mut full = guarded(&gpu, &vec![GUARD; count * out_width]);
        let mut half = gpu.zeros("a test", count * out_width).unwrap();
        let out = RowsOut {
            full: Some(&mut full),
            half: Some(&mut half),
        };
        stream
            .attend_chosen(&of_rows, &rows, 0..count, cache, &mut chosen, &out)
            .unwrap();
        let found = finish(&stream, &full);
        let mut halves = vec![0u16; half.len()];
        half.read(0, &mut halves).unwrap();
        assert!(nmse(&in_order(&halves, out_width, out_width), &found) < 1e-6);
        for (i, found) in found.chunks(out_width).enumerate() {
            let (positions, clear) = chosen_of(position + i);
            if clear {
                clear_rows += 1;
                let error = nmse(found, &attended(position + i, &positions));
                assert!(error < 1e-7, "position {}: {error:e}", position + i);
            }
        }
        position += count;
    }
    assert_eq!(position, LEN);
    assert!(clear_rows > 250, "{clear_rows} rows");
    // What does not fit is refused.
    let wrong = IndexSizes { block: 8, ..SIZES };
    let mut wrong = ChosenBlocks::new(&gpu, wrong, 1, 384).unwrap();
    let rows = Checked::upload(&gpu, "a test", &[Row::default()], places).unwrap();
    let mut index = upload(&raw[..width]);
    let layer = LayerRows {
        all: &kept,
        first: 4,
    };
    let refused = stream.choose_positions(
        &mut index,
        &rows,
        &spans,
        &vectors,
        pages.layer(0),
        layer,
        &mut wrong,
        &[],
        1,
    );
    assert!(refused.is_err());
    let layer = LayerRows {
        all: &kept,
        first: 1,
    };
    let refused = stream.choose_positions(
        &mut index,
        &rows,
        &spans,
        &vectors,
        pages.layer(0),
        layer,
        &mut chosen,
        &[],
        1,
    );
    assert!(refused.unwrap_err().to_string().contains("multiples of 4"));
}
