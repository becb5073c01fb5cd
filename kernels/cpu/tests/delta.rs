//! Gated DeltaNet compared with its formulas in f64, on every instruction set.

use crate::common::{Guarded, cpu, isas, view};
use nq_cpu::{Cpu, DeltaRows, Span, state_len};
use nq_kernels::DeltaShape;
use nq_model::Dims;
use nq_testkit::compare::nmse;
use nq_testkit::delta::{EPS, Vectors, reference, rows, shape, shapes, vectors};

/// Runs one sequence in pieces of these lengths: outputs and state.
fn in_pieces(
    cpu: &Cpu,
    shape: &DeltaShape,
    w: &Vectors,
    [qkvz, ba]: &[Vec<f32>; 2],
    pieces: &[usize],
) -> [Vec<f32>; 2] {
    let (stride, values) = (shape.channels() + shape.values(), shape.values());
    let mut state = Guarded::new(&vec![0.0; state_len(shape)]);
    let mut out = Vec::new();
    let mut row = 0;
    for &len in pieces {
        let mut piece = Guarded::new(&qkvz[row * stride..(row + len) * stride]);
        let mut y = Guarded::new(&vec![7.0; len * values]);
        let rows = DeltaRows {
            qkvz: piece.values(),
            ba: &ba[row * 2 * shape.value_heads..][..len * 2 * shape.value_heads],
        };
        let span = Span {
            row: 0,
            len,
            position: row,
        };
        cpu.delta(
            shape,
            &view(w),
            rows,
            &[span],
            &mut [state.values()],
            EPS,
            y.values(),
        );
        piece.finish();
        out.extend(y.finish());
        row += len;
    }
    assert_eq!(row * stride, qkvz.len());
    [out, state.finish()]
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// The formulas' values, and the same bits for every cut into pieces and number of threads.
#[test]
fn follows_the_formulas_in_any_pieces() {
    let m = 37;
    for shape in shapes() {
        let (w, rows) = (vectors(&shape), rows(&shape, m, 1));
        let expected = reference(&shape, &w, &rows);
        for isa in isas() {
            let whole = in_pieces(cpu(isa, 1), &shape, &w, &rows, &[m]);
            let error = nmse(&whole[0], &expected);
            assert!(error < 1e-12, "{shape:?} {isa}: {error:e}");
            assert!(whole[1].iter().all(|v| v.is_finite()));
            for pieces in [&[m][..], &[1; 37], &[2, 1, 3, 0, 5, 26], &[17, 20]] {
                for threads in [1, 2, 3] {
                    let found = in_pieces(cpu(isa, threads), &shape, &w, &rows, pieces);
                    for (found, whole) in found.iter().zip(&whole) {
                        assert!(
                            bits(found) == bits(whole),
                            "{shape:?} {isa}, {threads} threads, pieces {pieces:?}"
                        );
                    }
                }
            }
        }
    }
}

/// Sequences of one pass do not see each other, and rows between their spans stay as they are.
#[test]
fn a_batch_equals_its_sequences() {
    for shape in [shape([2, 4, 128, 128, 4]), shape([1, 2, 20, 36, 3])] {
        let w = vectors(&shape);
        let (stride, values) = (shape.channels() + shape.values(), shape.values());
        let (before, lengths) = ([3, 0, 9, 1], [1, 12, 1, 2]);
        // A row before, between and behind the spans belongs to nobody.
        let mut spans = Vec::new();
        let mut row = 1;
        for (&position, &len) in before.iter().zip(&lengths) {
            spans.push(Span { row, len, position });
            row += len + 1;
        }
        let [qkvz, ba] = rows(&shape, row, 3);
        for isa in isas() {
            let mut states = Vec::new();
            let mut expected = vec![7.0; row * values];
            let mut expected_states = Vec::new();
            for (i, span) in spans.iter().enumerate() {
                let [mut a, mut b] = rows(&shape, span.position, 5 + i as u64);
                let pieces = [span.position];
                let history = [a.clone(), b.clone()];
                let [_, state] = in_pieces(cpu(isa, 1), &shape, &w, &history, &pieces);
                states.push(state);
                let own = span.row..span.row + span.len;
                a.extend(&qkvz[own.start * stride..own.end * stride]);
                b.extend(&ba[own.start * 2 * shape.value_heads..own.end * 2 * shape.value_heads]);
                let pieces = [span.position, span.len];
                let [out, state] = in_pieces(cpu(isa, 1), &shape, &w, &[a, b], &pieces);
                expected[own.start * values..own.end * values]
                    .copy_from_slice(&out[span.position * values..]);
                expected_states.push(state);
            }
            for threads in [1, 2] {
                let (mut qkvz, mut states) = (qkvz.clone(), states.clone());
                let mut out = Guarded::new(&vec![7.0; row * values]);
                let rows = DeltaRows {
                    qkvz: &mut qkvz,
                    ba: &ba,
                };
                let mut in_place: Vec<&mut [f32]> = states.iter_mut().map(|s| &mut s[..]).collect();
                cpu(isa, threads).delta(
                    &shape,
                    &view(&w),
                    rows,
                    &spans,
                    &mut in_place,
                    EPS,
                    out.values(),
                );
                assert!(bits(&out.finish()) == bits(&expected), "{shape:?} {isa}");
                assert!(states == expected_states, "{shape:?} {isa}");
            }
        }
    }
}

/// Damage anywhere shows in the outputs.
#[test]
fn keeps_what_is_not_a_number() {
    let shape = shape([1, 2, 32, 20, 4]);
    let (keys, values) = (shape.keys(), shape.values());
    let places = 13;
    for isa in isas() {
        for (place, m) in (0..places).flat_map(|p| [(p, 1), (p, 5)]) {
            let mut w = vectors(&shape);
            let [mut qkvz, mut ba] = rows(&shape, m, 1);
            let history = rows(&shape, 6, 2);
            let [_, mut state] = in_pieces(cpu(isa, 1), &shape, &w, &history, &[6]);
            let matrices = state.len() - 3 * shape.channels();
            let value = match place {
                0 => &mut qkvz[3],
                1 => &mut qkvz[keys + 30],
                2 => &mut qkvz[2 * keys + 19],
                3 => &mut qkvz[2 * keys + values + 2],
                4 => &mut ba[1],
                5 => &mut ba[2],
                6 => &mut w.conv[5],
                7 => &mut w.decay[1],
                8 => &mut w.dt_bias[0],
                9 => &mut w.norm[17],
                10 => &mut state[0],
                // A column of the last tile that is not padding.
                11 => &mut state[matrices - 13],
                _ => &mut state[matrices + 1],
            };
            *value = f32::NAN;
            let mut y = vec![0.0; m * values];
            let rows = DeltaRows {
                qkvz: &mut qkvz,
                ba: &ba,
            };
            let span = Span {
                row: 0,
                len: m,
                position: 6,
            };
            cpu(isa, 2).delta(
                &shape,
                &view(&w),
                rows,
                &[span],
                &mut [&mut state],
                EPS,
                &mut y,
            );
            let first = &y[..values];
            assert!(
                first.iter().any(|v| v.is_nan()),
                "{isa}: place {place}, {m} rows"
            );
        }
    }
}

#[test]
fn is_profiled_once_per_pass() {
    let shape = shape([1, 2, 16, 16, 4]);
    let cpu = Cpu::new(Some(2), nq_kernels::IsaChoice::Auto).unwrap();
    cpu.profile().start();
    in_pieces(&cpu, &shape, &vectors(&shape), &rows(&shape, 3, 1), &[1, 2]);
    let timings = cpu.profile().stop();
    assert_eq!(timings.len(), 1);
    let t = &timings[0];
    assert_eq!((t.op, t.calls, t.shape), ("delta", 2, Dims::new(2, 16)));
    assert_eq!(t.bytes, 2 * 4 * state_len(&shape) as u64);
}
