//! The kernels of a decode step of several sequences.

use super::attention::{Case, LAYER, Uploaded, new_cache, step_bounds};
use super::{
    EDGES, GUARD, INT4, INT8, as_multiplied, as_normalized, as_on_device, assert_best, finish, gpu,
    guarded, is_sanitizing, kinds, pack, some_rows, weights,
};
use half::f16;
use nq_cuda::{
    AttentionOutput, AttentionScratch, AttentionShape, Checked, Columns, GemvOutput, Gpu, HEAD_DIM,
    MOST_SEQUENCES, MOST_WIDE_SEQUENCES, Norm, Row, Stack, Step, Stream, best_len, operand_index,
};
use nq_formats::{AffineScheme, Bits, Group, Weight, Zeros};
use nq_kernels::pages::KvType;
use nq_kernels::reference;
use nq_model::DType;
use nq_testkit::compare::nmse;
use nq_testkit::weights::{affine, dense, normal};

/// Numbers of sequences that kernels are tested with.
const SEQUENCES: [usize; 8] = [1, 2, 3, 7, 8, 9, 13, 16];

/// A shape with so many tiles that products of up to four rows have a kernel of their own, in all schemes.
const MANY_TILES: (usize, usize) = (4104, 264);

/// A shape with so many records that products of any number of rows have that kernel, on devices of up to 135
/// multiprocessors.
const MANY_RECORDS: (usize, usize) = (4864, 4096);

/// Rows whose magnitudes differ widely, like those of residual streams.
fn activations(m: usize, inp: usize, seed: u64) -> Vec<f32> {
    let mut x = normal(m * inp, seed);
    for (i, row) in x.chunks_mut(inp).enumerate() {
        row.iter_mut().skip(i).step_by(37).for_each(|v| *v *= 300.0);
    }
    x
}

/// Checks a product of several rows in all its forms, on the weight's `rows`.
fn check(gpu: &Gpu, stream: &Stream, w: &Weight, rows: &[usize]) {
    let (out, inp) = w.dims().pair();
    let packed = pack(gpu, &[w], Stack::Concat);
    let w = &as_on_device(w);
    let x = activations(MOST_SEQUENCES, inp, 71);
    let gain: Vec<f32> = normal(inp, 72).iter().map(|v| 1.0 + 0.2 * v).collect();
    let mut matrix = vec![0f32; rows.len() * inp];
    for (&r, row) in rows.iter().zip(matrix.chunks_mut(inp)) {
        w.dequantize_row(r, row).unwrap();
    }
    let product = |x: &[f32]| -> Vec<f32> {
        let product = |row: &[f32]| reference::dot(x, row);
        matrix.chunks(inp).map(product).collect()
    };
    let pick = |y: &[f32]| -> Vec<f32> {
        let permuted = |y: &[f32]| -> Vec<f32> { rows.iter().map(|&r| y[r]).collect() };
        y.chunks(out).flat_map(permuted).collect()
    };
    let each = |f: &dyn Fn(&[f32]) -> Vec<f32>| -> Vec<f32> { x.chunks(inp).flat_map(f).collect() };
    let normalized = each(&|x| product(&as_normalized(w, x, &gain)));
    let plain = each(&|x| product(&as_multiplied(w, x)));
    let residual = normal(MOST_SEQUENCES * out, 73);

    let x = gpu.upload("a test", &x).unwrap();
    let gain = gpu.upload("a test", &gain).unwrap();
    let norm = Norm {
        gain: &gain,
        eps: 1e-6,
    };
    let mut columns = Columns::new(gpu, MOST_SEQUENCES, inp).unwrap();
    for m in SEQUENCES {
        let name = format!("gemv_batch {} [{out}, {inp}] m {m}", w.scheme_name());
        let n = m * rows.len();
        let mut last: Option<Vec<f32>> = None;
        for _ in 0..2 {
            let mut y = guarded(gpu, &vec![GUARD; m * out]);
            let output = GemvOutput::Store(Some(norm), &mut y);
            stream
                .gemv_batch(&packed, &x, output, &mut columns, m, false)
                .unwrap();
            let found = finish(stream, &y);
            let error = nmse(&pick(&found), &normalized[..n]);
            assert!(error < 2e-8, "{name} store: {error:e}");
            assert!(
                last.is_none_or(|l| l == found),
                "{name}: not the same again"
            );
            last = Some(found);
        }

        let mut logits = guarded(gpu, &vec![GUARD; m * out]);
        let blocks = best_len(gpu, &packed, m).unwrap();
        if m > 1 {
            let mut best = gpu.zeros("a test", m * blocks).unwrap();
            let output = GemvOutput::Head(Some(norm), &mut logits, &mut best);
            stream
                .gemv_batch(&packed, &x, output, &mut columns, m, true)
                .unwrap();
            let found = finish(stream, &logits);
            assert!(
                Some(&found) == last.as_ref(),
                "{name}: head differs from store"
            );
            assert_best(&best, blocks, &found, &name);
        }

        // Added to a residual, without a norm.
        let mut y = guarded(gpu, &residual[..m * out]);
        stream
            .gemv_batch(&packed, &x, GemvOutput::Add(&mut y), &mut columns, m, false)
            .unwrap();
        let found = finish(stream, &y);
        let expected: Vec<f32> = plain[..n]
            .iter()
            .zip(pick(&residual[..m * out]))
            .map(|(p, r)| p + r)
            .collect();
        let error = nmse(&pick(&found), &expected);
        assert!(error < 2e-8, "{name} add: {error:e}");
    }
}

#[test]
fn products_of_several_sequences() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    for (out, inp) in EDGES.into_iter().chain([MANY_TILES]) {
        let rows: Vec<usize> = (0..out).collect();
        for w in weights(out, inp, 31) {
            check(&gpu, &stream, &w, &rows);
        }
    }
}

/// Shapes of Qwen3 on seeded rows, with the schemes that nq writes.
#[test]
fn products_of_several_sequences_in_real_shapes() {
    let Some(gpu) = gpu() else { return };
    if is_sanitizing() {
        return;
    }
    let stream = gpu.stream().unwrap();
    for (i, (out, inp)) in [(1024, 3072), (4096, 1024), (4096, 12288), (5120, 25600)]
        .into_iter()
        .enumerate()
    {
        let seed = i as u64;
        let rows = some_rows(out);
        for w in [
            affine(INT4, out, inp, None, seed),
            affine(INT8, out, inp, None, seed),
            dense(DType::BF16, out, inp, seed),
        ] {
            check(&gpu, &stream, &w, &rows);
        }
    }
    // In all schemes a shape with so many records that the kernel with x in shared memory takes any number of rows.
    let (out, inp) = MANY_RECORDS;
    let rows: Vec<usize> = (0..64).map(|k| (k * 7919 + 13) % out).collect();
    let small = |s: &AffineScheme| [Group::Size(32), Group::Size(64)].contains(&s.group);
    for scheme in kinds().into_iter().filter(small) {
        check(&gpu, &stream, &affine(scheme, out, inp, None, 5), &rows);
    }
}

#[test]
fn gates_and_ups_of_several_sequences() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    // Gates and ups alternate every eight rows.
    let many = ((MANY_TILES.0 / 2).next_multiple_of(8), MANY_TILES.1);
    let small = [(8, 256), (40, 72), (264, 1000), many].map(|(width, inp)| {
        let ups = weights(width, inp, 43);
        weights(width, inp, 41).into_iter().zip(ups).collect()
    });
    let (out, inp) = MANY_RECORDS;
    let half = |scheme, seed| affine(scheme, out / 2, inp, None, seed);
    let large: Vec<(Weight, Weight)> = [Bits::B4, Bits::B8]
        .map(|bits| AffineScheme::new(bits, Group::Size(64), Zeros::Integer))
        .map(|scheme| (half(scheme, 41), half(scheme, 43)))
        .into();
    for pairs in small.into_iter().chain([large]) {
        for (gate, up) in &pairs {
            let (width, inp) = gate.dims().pair();
            let packed = pack(&gpu, &[gate, up], Stack::Interleave);
            let x = activations(MOST_SEQUENCES, inp, 75);
            let ones = vec![1f32; inp];
            let mut expected = vec![0f32; MOST_SEQUENCES * width];
            for (x, y) in x.chunks(inp).zip(expected.chunks_mut(width)) {
                let row = as_normalized(gate, x, &ones);
                let (mut g, mut u) = (vec![0f32; width], vec![0f32; width]);
                reference::linear(&row, gate, &mut g).unwrap();
                reference::linear(&row, up, &mut u).unwrap();
                reference::silu_mul(&g, &u, y);
            }
            // Both share one power of two: their roundings are those of the greater.
            let f32s = matches!(gate, Weight::Dense(t) if t.dtype() == DType::F32);
            let tolerance = if f32s { 1e-6 } else { 1e-8 };
            let x = gpu.upload("a test", &x).unwrap();
            let ones = gpu.upload("a test", &ones).unwrap();
            let norm = Norm {
                gain: &ones,
                eps: 1e-6,
            };
            let mut columns = Columns::new(&gpu, MOST_SEQUENCES, inp).unwrap();
            for m in SEQUENCES {
                let mut y = guarded(&gpu, &vec![GUARD; m * width]);
                let output = GemvOutput::Silu(Some(norm), &mut y);
                stream
                    .gemv_batch(&packed, &x, output, &mut columns, m, false)
                    .unwrap();
                let error = nmse(&finish(&stream, &y), &expected[..m * width]);
                let name = gate.scheme_name();
                assert!(
                    error < tolerance,
                    "silu {name} [{width}, {inp}] m {m}: {error:e}"
                );
            }
        }
    }
}

/// Sequences of different lengths, in slots in another order, step together.
fn check_attention(gpu: &Gpu, case: &Case, lengths: &[usize]) {
    let stream = gpu.stream().unwrap();
    let (heads, width, m) = (case.heads, case.width(), lengths.len());
    let name = format!("{} heads {heads}/{} {lengths:?}", case.kv, case.kv_heads);
    let uploaded = Uploaded::new(gpu, case);
    let settings = uploaded.settings();
    let slot_of = |i: usize| (i + 1) % m;
    let cache = new_cache(gpu, &stream, case, m);
    for (i, &len) in lengths.iter().enumerate() {
        let places: Vec<Row> = (0..len)
            .map(|p| Row {
                position: p as i32,
                slot: slot_of(i) as i32,
                ..Row::default()
            })
            .collect();
        let places = Checked::upload(gpu, "a test", &places, cache.places()).unwrap();
        let mut qkv = gpu.upload("a test", &case.qkv).unwrap();
        stream
            .append(&mut qkv, &places, &settings, cache.layer(LAYER), len)
            .unwrap();
        stream.synchronize().unwrap();
    }
    let last: Vec<usize> = lengths.iter().map(|n| n - 1).collect();
    let steps: Vec<Step> = (last.iter().enumerate())
        .map(|(i, &p)| Step {
            position: p as i32,
            slot: slot_of(i) as i32,
            ..Step::default()
        })
        .collect();
    let steps = Checked::upload(gpu, "a test", &steps, step_bounds(&cache)).unwrap();
    let row = |&p: &usize| case.qkv[p * width..(p + 1) * width].to_vec();
    let qkv: Vec<f32> = last.iter().flat_map(row).collect();
    let qkv = gpu.upload("a test", &qkv).unwrap();
    let mut scratch = AttentionScratch::new(gpu, heads, case.kv_heads, m).unwrap();
    let longest = lengths.iter().copied().max().unwrap();
    let shape = AttentionShape {
        m,
        splits: AttentionScratch::splits(gpu, case.kv_heads, m, longest),
        holds_dependents: false,
        runs: false,
        shared: None,
    };
    let expected = case.expected(&last);
    let tolerance = if case.kv == KvType::Int8 { 2e-5 } else { 1e-6 };
    let mut run = |out: AttentionOutput<'_>| {
        let cache = cache.layer(LAYER);
        stream
            .attention_decode(&qkv, &steps, &settings, cache, &mut scratch, out, shape)
            .unwrap();
    };
    let outputs = heads * HEAD_DIM;
    let mut before: Option<Vec<f32>> = None;
    for _ in 0..2 {
        let mut out = guarded(gpu, &vec![GUARD; m * outputs]);
        run(AttentionOutput::Full(&mut out));
        let found = finish(&stream, &out);
        let error = nmse(&found, &expected);
        assert!(error < tolerance, "attention_decode {name}: {error:e}");
        assert!(
            before.is_none_or(|b| b == found),
            "attention_decode {name}: not the same again"
        );
        before = Some(found);
    }
    // Prepared for a product: as if it had been prepared from these.
    let weights = [
        (Bits::B4, 64, Zeros::Integer),
        (Bits::B4, 32, Zeros::None),
        (Bits::B8, 128, Zeros::None),
    ];
    for (i, (bits, group, zeros)) in weights.into_iter().enumerate() {
        let scheme = AffineScheme::new(bits, Group::Size(group), zeros);
        // Few rows of a weight, and enough that products of up to eight rows have their own kernel.
        for rows in [48, 4096] {
            let w = pack(
                gpu,
                &[&affine(scheme, rows, outputs, None, i as u64)],
                Stack::Concat,
            );
            if m > MOST_SEQUENCES || !Columns::suit(&w) {
                continue;
            }
            let mut columns = Columns::new(gpu, m, outputs).unwrap();
            let full = gpu.upload("a test", before.as_ref().unwrap()).unwrap();
            let residual = normal(m * rows, 91);
            let mut expected = guarded(gpu, &residual);
            let output = GemvOutput::Add(&mut expected);
            stream
                .gemv_batch(&w, &full, output, &mut columns, m, false)
                .unwrap();
            let mut columns = Columns::new(gpu, m, outputs).unwrap();
            run(AttentionOutput::Columns(&mut columns, &w));
            let mut y = guarded(gpu, &residual);
            stream.multiply_columns(&w, &columns, &mut y, m).unwrap();
            assert!(
                finish(&stream, &y) == finish(&stream, &expected),
                "attention_decode {name}: columns for {} x {rows}",
                w.kind().name()
            );
        }
    }
    // The same in FP16; values past the outputs are not changed.
    let padded = outputs.next_multiple_of(256);
    const OTHER: u16 = 0x7eef;
    let mut half = gpu
        .upload("a test", &vec![OTHER; (m + 1) * padded])
        .unwrap();
    run(AttentionOutput::Half(&mut half));
    stream.synchronize().unwrap();
    let mut found = vec![0u16; (m + 1) * padded];
    half.read(0, &mut found).unwrap();
    let mut rounded = vec![OTHER; (m + 1) * padded];
    let rows = before.iter().flat_map(|b| b.chunks(outputs));
    for (row, to) in rows.zip(rounded.chunks_mut(padded)) {
        for (k, v) in row.iter().enumerate() {
            to[operand_index(k)] = f16::from_f32(*v).to_bits();
        }
    }
    assert!(
        found == rounded,
        "attention_decode {name}: otherwise in FP16"
    );
}

#[test]
fn attention_of_several_sequences() {
    let Some(gpu) = gpu() else { return };
    for kv in [KvType::F16, KvType::Int8] {
        let case = Case::new(16, 8, kv, 300);
        check_attention(&gpu, &case, &[1, 300]);
        check_attention(&gpu, &case, &[257, 32, 33, 1, 2, 300, 128, 129]);
        // Outputs that end inside a padded span, for as many sequences as a step can have.
        let case = Case::new(3, 1, kv, 300);
        let lengths: Vec<usize> = (0..MOST_WIDE_SEQUENCES).map(|i| 1 + i * 37 % 300).collect();
        check_attention(&gpu, &case, &lengths);
        if is_sanitizing() {
            continue;
        }
        let case = Case::new(8, 1, kv, 1500);
        check_attention(&gpu, &case, &[1500, 700, 5]);
        let lengths: Vec<usize> = (0..MOST_SEQUENCES).map(|i| 1 + 97 * i).collect();
        check_attention(&gpu, &case, &lengths);
        let lengths: Vec<usize> = (0..MOST_WIDE_SEQUENCES).map(|i| 1 + 23 * i).collect();
        check_attention(&gpu, &case, &lengths);
    }
}
