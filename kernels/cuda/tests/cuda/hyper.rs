//! Residuals of several streams, and what tables of n-grams add to them.

use super::rows::in_order;
use super::{GUARD, finish, gpu, guarded};
use half::f16;
use nq_cuda::{
    BlockAdds, Buffer, Checked, ConvolvedRows, DeltaSpan, FewStreams, JoinedStreams, KeptRows,
    LayerRows, Places, RowsOut, SequenceRows, Stack, StreamDims, StreamMixing, StreamNorm,
    StreamSpans, StreamWeights, SumsOf, Uploader,
};
use nq_formats::{Tensor, Weight};
use nq_kernels::reference;
use nq_testkit::compare::nmse;
use nq_testkit::weights::normal;

fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(x)).exp())) as f32
}

/// RMSNorm of each stream: `x` `[m, streams, width]`.
fn normed(x: &[f32], gain: &[f32], dims: StreamDims) -> Vec<f32> {
    let mut y = vec![0.0; x.len()];
    let rows = x.chunks(dims.width).zip(y.chunks_mut(dims.width));
    for (i, (x, y)) in rows.enumerate() {
        let gain = &gain[i % dims.streams * dims.width..][..dims.width];
        reference::rms_norm(x, gain, 1e-6, y);
    }
    y
}

#[test]
fn streams() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    for (m, streams, width, rank) in [(1, 2, 8, 8), (3, 4, 264, 40), (5, 3, 1024, 320)] {
        let what = format!("{m} rows of {streams} streams of {width}");
        let dims = StreamDims { streams, width };
        let upload = |v: &[f32]| gpu.upload("a test", v).unwrap();
        let (embedded, mut x) = (
            normal(m * width, 1),
            guarded(&gpu, &vec![GUARD; m * dims.all()]),
        );
        stream
            .spread_streams(&upload(&embedded), &mut x, m, dims)
            .unwrap();
        let spread: Vec<f32> = (embedded.chunks(width))
            .flat_map(|row| std::iter::repeat_n(row, streams).flatten().copied())
            .collect();
        assert_eq!(finish(&stream, &x), spread, "{what}");

        let (values, gain) = (normal(m * dims.all(), 2), normal(dims.all(), 3));
        let listed: Vec<u32> = (0..m as u32).map(|i| (i * 2 + 1) % m as u32).collect();
        let rows = listed
            .iter()
            .flat_map(|&r| &values[r as usize * dims.all()..][..dims.all()]);
        let rows: Vec<f32> = rows.copied().collect();
        let n = normed(&rows, &gain, dims);
        let (x, gain) = (upload(&values), upload(&gain));
        let listed = Checked::upload(&gpu, "a test", &listed, m).unwrap();
        let norm = StreamNorm {
            x: &x,
            rows: Some(&listed),
            gain: &gain,
            eps: 1e-6,
        };
        let padded = dims.all().next_multiple_of(256);
        let mut full = guarded(&gpu, &vec![GUARD; m * dims.all()]);
        let mut half = gpu.upload("a test", &vec![0x7eefu16; m * padded]).unwrap();
        stream
            .norm_streams(&norm, &mut full, Some(&mut half), m, dims)
            .unwrap();
        assert!(nmse(&finish(&stream, &full), &n) < 1e-11, "{what}");
        let halves = |half: &Buffer<u16>, width: usize| {
            stream.synchronize().unwrap();
            let mut values = vec![0; half.len()];
            half.read(0, &mut values).unwrap();
            in_order(&values, width, width.next_multiple_of(256))
        };
        assert!(nmse(&halves(&half, dims.all()), &n) < 1e-6, "{what}");

        // Of one in three parts.
        let (low, inject) = (normal(m * rank, 4), normal(3 * m * streams, 5));
        let mut weights = guarded(&gpu, &vec![GUARD; m * streams]);
        let mut half = gpu
            .upload("a test", &vec![0x7eefu16; m * rank.next_multiple_of(256)])
            .unwrap();
        let (of_low, of_inject, by) = (upload(&low), upload(&inject), streams as f32);
        let sums = |sums, parts, width| SumsOf { sums, parts, width };
        let to = Some(StreamWeights {
            inject: sums(&of_inject, 3, streams),
            weights: &mut weights,
        });
        stream
            .activate_streams(sums(&of_low, 1, rank), &mut half, to, m, streams)
            .unwrap();
        let activated: Vec<f32> = low.iter().map(|v| reference::silu(v / by)).collect();
        assert!(nmse(&halves(&half, rank), &activated) < 1e-6, "{what}");
        let of_streams: Vec<f32> = (0..m * streams)
            .map(|i| {
                let parts = (0..3).map(|part| inject[part * m * streams + i]);
                2.0 * sigmoid(parts.sum::<f32>() / by)
            })
            .collect();
        assert!(
            nmse(&finish(&stream, &weights), &of_streams) < 1e-11,
            "{what}"
        );

        let gates = normal(m * dims.all(), 6);
        let mut read = vec![0f32; m * width];
        for (i, (n, gate)) in n.iter().zip(&gates).enumerate() {
            read[i / dims.all() * width + i % width] += sigmoid(*gate) * n / by;
        }
        let mut full = guarded(&gpu, &vec![GUARD; m * width]);
        let mut added = guarded(&gpu, &vec![GUARD; m * width]);
        let mut half = gpu
            .upload("a test", &vec![0x7eefu16; m * width.next_multiple_of(256)])
            .unwrap();
        let out = RowsOut {
            full: Some(&mut full),
            half: Some(&mut half),
        };
        let (n, gates) = (upload(&n), upload(&gates));
        stream
            .mix_streams(&n, &gates, &out, Some(&mut added), m, dims)
            .unwrap();
        assert!(nmse(&finish(&stream, &full), &read) < 1e-11, "{what}");
        assert!(nmse(&halves(&half, width), &read) < 1e-6, "{what}");
        assert_eq!(finish(&stream, &added), vec![0.0; m * width], "{what}");

        let added = normal(m * width, 7);
        let expected: Vec<f32> = (values.iter().enumerate())
            .map(|(i, x)| {
                let (row, c) = (i / dims.all(), i % dims.all() / width);
                x + of_streams[row * streams + c] * added[row * width + i % width]
            })
            .collect();
        let mut x = guarded(&gpu, &values);
        stream
            .inject_streams(&upload(&added), &weights, &mut x, m, dims)
            .unwrap();
        assert!(nmse(&finish(&stream, &x), &expected) < 1e-11, "{what}");
        assert!(
            stream
                .inject_streams(&n, &weights, &mut x, m + 99, dims)
                .is_err()
        );
    }
}

/// The two kernels of few rows, behind what another block has added, are those for many and the products between them.
#[test]
fn few_rows() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let upload = |v: &[f32]| gpu.upload("a test", v).unwrap();
    for (m, streams, width, rank) in [(1, 4, 2560, 320), (3, 2, 16, 24), (8, 3, 560, 344)] {
        let what = format!("{m} rows of {streams} streams of {width}");
        let dims = StreamDims { streams, width };
        let (all, by) = (dims.all(), streams as f32);
        let [x, gain, added, joins] =
            [m * all, all, m * width, m * streams].map(|n| normal(n, n as u64));
        let weight = |rows: usize, inputs: usize, scale: f32| {
            let values = normal(rows * inputs, rows as u64).into_iter();
            let values: Vec<f32> = values.map(|v| f16::from_f32(v * scale).to_f32()).collect();
            let tensor = Tensor::from_f32(vec![rows, inputs], values.clone()).unwrap();
            let mut uploader = Uploader::new(&gpu).unwrap();
            let packed = (uploader.pack(&[&Weight::Dense(tensor)], Stack::Concat, false)).unwrap();
            uploader.finish().unwrap();
            (values, packed)
        };
        let scale = 1.0 / (all as f32).sqrt();
        let (down, down_on) = weight(rank, all, scale);
        let (up, up_on) = weight(all, rank, 1.0);
        let (inject, inject_on) = weight(streams, all, scale);
        let expected: Vec<f32> = (x.iter().enumerate())
            .map(|(i, x)| {
                let (row, c) = (i / all, i % all / width);
                x + joins[row * streams + c] * added[row * width + i % width]
            })
            .collect();
        let n = normed(&expected, &gain, dims);
        let product = |w: &[f32], x: &[f32], row: usize| {
            reference::dot(&w[row * x.len()..(row + 1) * x.len()], x)
        };
        let (mut read, mut weights) = (vec![0f32; m * width], Vec::new());
        for (n, read) in n.chunks(all).zip(read.chunks_mut(width)) {
            let low = (0..rank).map(|r| reference::silu(product(&down, n, r) / by));
            let low: Vec<f32> = low.collect();
            weights.extend((0..streams).map(|c| 2.0 * sigmoid(product(&inject, n, c) / by)));
            for (i, n) in n.iter().enumerate() {
                read[i % width] += sigmoid(product(&up, &low, i)) * n / by;
            }
        }
        let gain = upload(&gain);
        let end = StreamMixing {
            gain: &gain,
            eps: 1e-6,
            down: &down_on,
            up: &up_on,
            inject: None,
        };
        let block = StreamMixing {
            inject: Some(&inject_on),
            ..end
        };
        assert!(block.fits(m, dims) && !block.fits(9, dims), "{what}");
        let mut few = FewStreams::new(&gpu, m, dims, rank).unwrap();
        let mut to = guarded(&gpu, &vec![GUARD; m * all]);
        let on_device = upload(&x);
        let joined = JoinedStreams {
            added: &upload(&added),
            weights: &upload(&joins),
            to: &mut to,
        };
        stream
            .contract_low(&block, &on_device, Some(joined), &mut few, m, dims)
            .unwrap();
        let mut y = guarded(&gpu, &vec![GUARD; m * width]);
        let mut zero = guarded(&gpu, &vec![GUARD; m * width]);
        let mut found = guarded(&gpu, &vec![GUARD; m * streams]);
        let adds = BlockAdds {
            added: &mut zero,
            weights: &mut found,
        };
        stream
            .contract_mix(&block, &to, &few, &mut y, Some(adds), m, dims)
            .unwrap();
        assert!(nmse(&finish(&stream, &to), &expected) < 1e-12, "{what}");
        assert!(nmse(&finish(&stream, &found), &weights) < 1e-6, "{what}");
        assert_eq!(finish(&stream, &zero), vec![0.0; m * width], "{what}");
        let first = finish(&stream, &y);
        let error = nmse(&first, &read);
        assert!(error < 1e-5, "{what}: {error:e}");
        // The head adds nothing, and streams that nothing is added to stay where they are.
        stream
            .contract_low(&end, &to, None, &mut few, m, dims)
            .unwrap();
        stream
            .contract_mix(&end, &to, &few, &mut y, None, m, dims)
            .unwrap();
        assert_eq!(finish(&stream, &y), first, "{what}");
        let refused = stream.contract_low(&end, &to, None, &mut few, 9, dims);
        assert!(refused.is_err());
    }
}

#[test]
fn ngrams() {
    const LEN: usize = 61;
    const TAPS: usize = 4;
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let dims = StreamDims {
        streams: 3,
        width: 104,
    };
    let (c, dilation) = (dims.all(), 3);
    let upload = |v: &[f32]| gpu.upload("a test", v).unwrap();
    let [keys, queries] = [1, 2].map(|seed| normal(LEN * c, seed));
    let values = normal(LEN * dims.width, 3);
    let mut gated = vec![0f32; LEN * c];
    for (i, row) in gated.chunks_mut(dims.width).enumerate() {
        let own = i * dims.width..(i + 1) * dims.width;
        let score = reference::dot(&keys[own.clone()], &queries[own]) / (dims.width as f32).sqrt();
        let gate = sigmoid(score.signum() * score.abs().max(1e-6).sqrt());
        let values = &values[i / dims.streams * dims.width..];
        row.iter_mut()
            .zip(values)
            .for_each(|(to, v)| *to = gate * v);
    }
    let mut found = guarded(&gpu, &vec![GUARD; LEN * c]);
    let operands = [&upload(&keys), &upload(&queries), &upload(&values)];
    stream.gate_ngrams(operands, &mut found, LEN, dims).unwrap();
    assert!(nmse(&finish(&stream, &found), &gated) < 1e-11);

    // Two sequences of these rows, of which one is an earlier part of the other, in pieces.
    let (n, weights) = (normal(LEN * c, 4), normal(c * TAPS, 5));
    let convolved = |row: usize, channel: usize| {
        let tap = |i: usize| Some((i, row.checked_sub((TAPS - 1 - i) * dilation)?));
        let taps = (0..TAPS).filter_map(tap);
        let sum = taps.map(|(i, row)| weights[channel * TAPS + i] * n[row * c + channel]);
        reference::silu(sum.sum())
    };
    let places = Places {
        positions: LEN,
        slots: 3,
        images: 0,
    };
    let words = 8 + (TAPS - 1) * dilation * c;
    let mut kept = KeptRows::new(&gpu, 4, words).unwrap();
    let mut on_device = StreamSpans::new(&gpu, 2, places, 4).unwrap();
    let weights_on = upload(&weights);
    let mut position = 0;
    let mut worst = 0f64;
    for (piece, count) in [1, 2, 9, 30, 1, 18].into_iter().enumerate() {
        let span = |row, slot, mark| DeltaSpan {
            rows: SequenceRows {
                row,
                count,
                position,
                slot,
            },
            mark,
        };
        let mark = (count == 30).then_some((4, 3));
        let spans = [span(0, 2, mark), span(count, 0, None)];
        let own = position * c..(position + count) * c;
        let twice = |v: &[f32]| upload(&[&v[own.clone()], &v[own.clone()]].concat());
        let x = normal(2 * count * c, 6);
        let mut on = guarded(&gpu, &x);
        let rows = ConvolvedRows {
            normed: &twice(&n),
            gated: &twice(&gated),
            taps: &weights_on,
            count: TAPS,
            dilation,
            x: &mut on,
        };
        let layer = LayerRows {
            all: &kept,
            first: 8,
        };
        stream
            .write_spans(&mut on_device, &spans, 2 * count)
            .unwrap();
        stream
            .convolve_ngrams(rows, &on_device, layer, 2 * count, &places)
            .unwrap();
        let expected: Vec<f32> = (x.iter().enumerate())
            .map(|(i, x)| {
                let (row, channel) = (position + i / c % count, i % c);
                x + gated[row * c + channel] + convolved(row, channel)
            })
            .collect();
        worst = worst.max(nmse(&finish(&stream, &on), &expected));
        position += count;
        // From the snapshot on, the sequence goes on as it did.
        if piece == 3 {
            stream.copy_kept(&mut kept, 3, 1).unwrap();
            let (first, count) = (position - 30 + 4, 5);
            let own = first * c..(first + count) * c;
            let spans = [DeltaSpan {
                rows: SequenceRows {
                    row: 0,
                    count,
                    position: first,
                    slot: 1,
                },
                mark: None,
            }];
            let mut on = guarded(&gpu, &vec![0.0; count * c]);
            let rows = ConvolvedRows {
                normed: &upload(&n[own.clone()]),
                gated: &upload(&gated[own]),
                taps: &weights_on,
                count: TAPS,
                dilation,
                x: &mut on,
            };
            let layer = LayerRows {
                all: &kept,
                first: 8,
            };
            stream.write_spans(&mut on_device, &spans, count).unwrap();
            stream
                .convolve_ngrams(rows, &on_device, layer, count, &places)
                .unwrap();
            let expected: Vec<f32> = (0..count * c)
                .map(|i| gated[first * c + i] + convolved(first + i / c, i % c))
                .collect();
            worst = worst.max(nmse(&finish(&stream, &on), &expected));
        }
    }
    assert!(worst < 1e-10, "{worst:e}");
    assert!(stream.copy_kept(&mut kept, 0, 4).is_err());
}
