//! Rounding a weight to a trellis: signs and a Hadamard transform make its rows close to Gaussian, and the error of each
//! tile of columns is fed to the columns after it, which the inverse of the inputs' second moments says how to do.

use super::Trellis;
use crate::error::{Error, Result};
use crate::linalg::{Matrix, add_product, product};
use crate::methods::gptq;
use crate::second_order::{Damped, Factor, Hessian, InputStats, TrellisRounded};
use bytes::Bytes;
use half::f16;
use nq_formats::trellis::{
    BLOCK, Code, LANES, SEQUENCE, STRIP, TILE, place, transform, word_place,
};
use nq_formats::{TrellisScheme, TrellisWeight};
use nq_model::Dims;
use rayon::prelude::*;
use std::sync::Arc;

/// Added to the diagonal of the second moments, as a share of its mean.
const DAMPING: f64 = 0.01;
/// Rows whose scales are refitted together.
const ROWS: usize = 256;

/// Rounds the weight `name` `[out, in]`, and returns deviations from the request beside it. With second moments of the
/// inputs, errors of columns are fed to later ones, on the device that has the moments.
///
/// # Errors
/// [`Error::Request`] if the moments are of another number of inputs; [`Error::Format`] unless `in` is a multiple of
/// [`BLOCK`] and the scales of rows are within f16; errors of the device.
pub fn round(
    name: &str,
    weight: &Matrix,
    inputs: Option<&InputStats>,
    scheme: TrellisScheme,
) -> Result<(TrellisWeight, Vec<String>)> {
    scheme.check(Dims::new(weight.rows, weight.cols))?;
    let mut fallbacks = Vec::new();
    let signs: Vec<f32> = (0..weight.cols).map(sign).collect();
    let moments = match inputs.filter(|i| i.hessian.is_some()) {
        Some(inputs) => moments(name, inputs, &signs, &mut fallbacks)?,
        None => None,
    };
    let factor = match &moments {
        Some(moments) => factor(name, moments, &mut fallbacks)?,
        None => None,
    };
    let trellis = Trellis::new(scheme);
    let turned = turned(weight, &signs);
    let mut scales = scales_of(&turned, &trellis);
    let rounded = match &factor {
        Some(factor) => factor.round_to_trellis(&trellis, &turned, &scales)?,
        None => on_host(&trellis, &turned, &scales, None),
    };
    for (scale, &best) in scales.iter_mut().zip(&rounded.scales) {
        *scale = refitted(*scale, best);
    }
    let words = rounded.words.iter().flat_map(|w| w.to_le_bytes());
    let weight = TrellisWeight::new(
        scheme,
        Dims::new(weight.rows, weight.cols),
        words.collect::<Vec<u8>>().into(),
        scales.into_iter().map(f16::from_f32).collect(),
        signs.into_iter().map(f16::from_f32).collect(),
    )?;
    Ok((weight, fallbacks))
}

/// Most rows of [`BLOCK`] inputs that [`nearest`] searches at once.
const SEARCHED: usize = 1 << 17;

/// The shape of the weight that a search for the nearest codes gives to a device at most.
pub(crate) fn nearest_rows() -> (usize, usize) {
    (SEARCHED, BLOCK)
}

/// The moments of `n` inputs that matter alike, with which the GPU of this ordinal searches trellises.
pub fn alike(gpu: usize, n: usize) -> Result<InputStats> {
    let mut moments = Matrix::zeros(n, n);
    let diagonal = moments.data.iter_mut().step_by(n + 1);
    diagonal.for_each(|v| *v = 1.0);
    InputStats::of(moments).moved_to(gpu)
}

/// Rounds the weight `[out, in]` to the nearest codes, as if its inputs mattered alike, and refits scales to them. As no
/// errors are fed to later columns, all blocks of inputs are searched side by side, by the host or on the device
/// that holds `equal`, [`alike`] for [`BLOCK`] inputs.
///
/// # Errors
/// [`Error::Format`] for widths that are not whole blocks, and scales beyond f16; errors of the device.
pub fn nearest(
    weight: &Matrix,
    scheme: TrellisScheme,
    equal: Option<&InputStats>,
) -> Result<TrellisWeight> {
    let dims @ Dims { rows, cols } = Dims::new(weight.rows, weight.cols);
    scheme.check(dims)?;
    let trellis = Trellis::new(scheme);
    let signs: Vec<f32> = (0..cols).map(sign).collect();
    let turned = turned(weight, &signs);
    let mut scales = scales_of(&turned, &trellis);
    // A row for each block of each row, by blocks; strips that are not full are filled with zeros.
    let (strips, blocks) = (rows.div_ceil(STRIP), cols / BLOCK);
    let filled = strips * STRIP;
    let mut all = Matrix::zeros(filled * blocks, BLOCK);
    let mut of_all = vec![1.0; all.rows];
    for block in 0..blocks {
        of_all[block * filled..][..rows].copy_from_slice(&scales);
        for (row, values) in turned.iter_rows().enumerate() {
            let part = &values[block * BLOCK..][..BLOCK];
            all.row_mut(block * filled + row).copy_from_slice(part);
        }
    }
    let order: Vec<usize> = (0..BLOCK).collect();
    let plain = Damped {
        order: &order,
        dead: &[],
        fill: 0.0,
        damping: 0.0,
        noise: 0.0,
    };
    let moments = equal.and_then(|e| e.hessian.as_ref());
    let factor = moments.map(|h| h.inverse_factor(&plain)).transpose()?;
    let mut words = Vec::new();
    for start in (0..all.rows).step_by(SEARCHED) {
        let rows = start..(start + SEARCHED).min(all.rows);
        let (part, scales) = (all.part(rows.clone()), &of_all[rows]);
        let found = match factor.iter().flatten().next() {
            Some(factor) => factor.round_to_trellis(&trellis, &part, scales)?,
            None => on_host(&trellis, &part, scales, None),
        };
        words.extend(found.words);
    }
    // From blocks, strips and tiles to strips, blocks and tiles.
    let tiles: Vec<&[u32]> = words
        .chunks_exact(words.len() / (strips * blocks))
        .collect();
    let places = (0..strips * blocks).map(|i| i % blocks * strips + i / blocks);
    let words: Bytes = (places.flat_map(|i| tiles[i]).flat_map(|w| w.to_le_bytes()))
        .collect::<Vec<u8>>()
        .into();
    let of_inputs: Arc<[f16]> = signs.into_iter().map(f16::from_f32).collect();
    let new = |scales: &[f32]| {
        let scales = scales.iter().map(|&s| f16::from_f32(s)).collect();
        TrellisWeight::new(scheme, dims, words.clone(), scales, of_inputs.clone())
    };
    let rounded = new(&scales)?;
    scales.par_iter_mut().enumerate().for_each(|(i, scale)| {
        let mut values = vec![0.0; cols];
        rounded.dequantize_row(i, &mut values);
        let share = dot(weight.row(i), &values) / dot(&values, &values);
        *scale = refitted(*scale, f64::from(*scale) * share);
    });
    Ok(new(&scales)?)
}

/// The scales with which rows of a weight of transformed inputs are searched.
fn scales_of(turned: &Matrix, trellis: &Trellis) -> Vec<f32> {
    let rows = turned.data.par_chunks(turned.cols).map(|row| {
        let squares: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum();
        let deviation = (squares / row.len() as f64).sqrt() as f32;
        let scale = deviation * trellis.unit();
        f16::from_f32(scale.min(f16::MAX.to_f32())).to_f32()
    });
    rows.collect()
}

/// The scale that is best for the codes found with `scale`; `scale` where there is none.
fn refitted(scale: f32, best: f64) -> f32 {
    let best = f16::from_f64(best.min(f16::MAX.to_f64())).to_f32();
    if best.is_finite() && best > 0.0 {
        best
    } else {
        scale
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    let products = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b));
    products.sum()
}

/// Rounds the weight `[out, in]` of transformed inputs on the host, with the factor of their moments and these.
pub(crate) fn on_host(
    trellis: &Trellis,
    weight: &Matrix,
    scales: &[f32],
    moments: Option<(&Matrix, &Matrix)>,
) -> TrellisRounded {
    let (words, values) = encode(trellis, weight, scales, moments.map(|(factor, _)| factor));
    TrellisRounded {
        words,
        scales: best_scales(weight, &values, moments.map(|(_, moments)| moments)),
    }
}

/// The random sign of an input. It follows from the input's index alone, so weights of the same inputs share it.
fn sign(input: usize) -> f32 {
    // The finalizer of SplitMix64.
    let mut h = (input as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    h = (h ^ (h >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    h = (h ^ (h >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    if h >> 63 == 0 { 1.0 } else { -1.0 }
}

/// The weight of transformed inputs.
fn turned(weight: &Matrix, signs: &[f32]) -> Matrix {
    let mut turned = weight.clone();
    turned.data.par_chunks_mut(weight.cols).for_each(|row| {
        row.iter_mut().zip(signs).for_each(|(v, sign)| *v *= sign);
        transform(row);
    });
    turned
}

/// Second moments of transformed inputs.
struct Moments {
    hessian: Arc<dyn Hessian>,
    /// The mean of the diagonal.
    mean: f64,
    /// Inputs that were always zero.
    dead: usize,
}

/// The moments of `inputs`, transformed; none if they cannot be used, which `fallbacks` then says.
fn moments(
    name: &str,
    inputs: &InputStats,
    signs: &[f32],
    fallbacks: &mut Vec<String>,
) -> Result<Option<Moments>> {
    let n = signs.len();
    let found = (inputs.hessian.as_ref()).filter(|h| h.width() == n);
    let hessian = found.ok_or_else(|| Error::Request {
        what: "second moments of the inputs for a trellis",
        expected: format!("those of {n} inputs of {name}"),
        found: inputs.mean_square.len().to_string(),
    })?;
    if !hessian.is_finite() {
        fallbacks.push(not_fed(name, "the inputs' moments are not finite"));
        return Ok(None);
    }
    let squares = &inputs.mean_square;
    let mean = squares.iter().map(|&d| f64::from(d)).sum::<f64>() / n as f64;
    let dead = squares.iter().filter(|&&d| d <= 0.0).count();
    if dead == n {
        fallbacks.push(not_fed(name, "all inputs are zero in calibration"));
        return Ok(None);
    }
    // An input that was always zero gives no information, but other text may use it: its weights count as much as
    // those of an average input.
    let noise = 1.0 + gptq::noise(n, inputs.rows) as f32;
    let diagonal = squares.iter().map(|&square| match square > 0.0 {
        true => square * noise,
        false => mean as f32,
    });
    let diagonal: Vec<f32> = diagonal.collect();
    Ok(Some(Moments {
        hessian: hessian.transformed(signs, &diagonal)?,
        mean,
        dead,
    }))
}

fn not_fed(name: &str, why: &str) -> String {
    format!("{name}: {why}: errors are not fed to later columns")
}

/// The factor of the inverse of `moments`; none if there is none, which `fallbacks` then says.
fn factor<'m>(
    name: &str,
    moments: &'m Moments,
    fallbacks: &mut Vec<String>,
) -> Result<Option<Box<dyn Factor + 'm>>> {
    let n = moments.hessian.width();
    let order: Vec<usize> = (0..n).collect();
    let found = gptq::damped(DAMPING, |damping| {
        moments.hessian.inverse_factor(&Damped {
            order: &order,
            dead: &[],
            fill: 0.0,
            damping: damping * moments.mean,
            noise: 0.0,
        })
    })?;
    let Some((factor, damping)) = found else {
        fallbacks.push(not_fed(name, "the Hessian cannot be inverted"));
        return Ok(None);
    };
    if moments.dead > 0 {
        fallbacks.push(format!(
            "{name}: {} of {n} inputs are zero in calibration: their weights count as those of average inputs",
            moments.dead
        ));
    }
    if damping > DAMPING {
        fallbacks.push(format!(
            "{name}: the Hessian could be inverted only with damping {damping} instead of {DAMPING}"
        ));
    }
    Ok(Some(factor))
}

/// `moments`, with this diagonal, of inputs that are multiplied by `signs` and transformed.
pub(crate) fn turned_moments(moments: &Matrix, signs: &[f32], diagonal: &[f32]) -> Matrix {
    let n = moments.cols;
    let mut moments = moments.clone();
    (moments.data.par_chunks_mut(n).enumerate()).for_each(|(i, row)| {
        row[i] = diagonal[i];
        for (v, sign) in row.iter_mut().zip(signs) {
            *v *= signs[i] * sign;
        }
        transform(row);
    });
    moments.data.par_chunks_mut(BLOCK * n).for_each(|block| {
        let mut half = 1;
        while half < BLOCK {
            for pair in block.chunks_exact_mut(2 * half * n) {
                let (a, b) = pair.split_at_mut(half * n);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        let norm = 1.0 / (BLOCK as f32).sqrt();
        block.iter_mut().for_each(|v| *v *= norm);
    });
    moments
}

/// The words of all tiles, and the code's values, `[out, in]`.
fn encode(
    trellis: &Trellis,
    weight: &Matrix,
    scales: &[f32],
    factor: Option<&Matrix>,
) -> (Vec<u32>, Matrix) {
    let (scheme, n) = (trellis.scheme(), weight.cols);
    let (each, strips, tiles) = (scheme.words(), weight.rows.div_ceil(STRIP), n / TILE);
    let mut all = vec![0; strips * tiles * LANES * each];
    // The targets of columns to come, as errors so far have changed them, and the values of those that are rounded.
    let mut columns = weight.clone();
    let mut values = vec![0.0; strips * LANES * SEQUENCE];
    let mut words = vec![0; strips * LANES * each];
    for tile in 0..tiles {
        let (start, end) = (tile * TILE, (tile + 1) * TILE);
        let rows = |strip: usize| strip * STRIP..(strip * STRIP + STRIP).min(weight.rows);
        let strip = columns.data.par_chunks(STRIP * n).enumerate();
        let of_strip = values.par_chunks_mut(LANES * SEQUENCE);
        strip.zip(of_strip).for_each(|((strip, columns), values)| {
            let scales = &scales[rows(strip)];
            for_each_step(scheme.code(), values, |row, column, values| {
                for (k, value) in values.iter_mut().enumerate() {
                    // Rows that fill the strip up may be anything; those without a scale are zero.
                    let scale = scales.get(row).filter(|s| **s > 0.0);
                    *value = scale.map_or(0.0, |s| columns[row * n + start + column + k] / s);
                }
            });
        });
        trellis.encode(&mut values, &mut words);
        let strip = columns.data.par_chunks_mut(STRIP * n).enumerate();
        let of_strip = values.par_chunks_mut(LANES * SEQUENCE);
        strip.zip(of_strip).for_each(|((strip, columns), values)| {
            let scales = &scales[rows(strip)];
            let mut errors = vec![0.0; scales.len() * TILE];
            for_each_step(scheme.code(), values, |row, column, values| {
                for (k, &mut value) in values.iter_mut().enumerate().filter(|_| row < scales.len())
                {
                    let target = &mut columns[row * n + start + column + k];
                    errors[row * TILE + column + k] = *target - scales[row] * value;
                    *target = value;
                }
            });
            if let Some(factor) = factor.filter(|_| end < n) {
                // errors U_bb^-1
                for errors in errors.chunks_exact_mut(TILE) {
                    for j in 0..TILE {
                        let u = &factor.row(start + j)[start..end];
                        let error = errors[j] / u[j];
                        errors[j] = error;
                        for (e, u) in errors[j + 1..].iter_mut().zip(&u[j + 1..]) {
                            *e -= error * u;
                        }
                    }
                }
                add_product(columns, n, -1.0, &errors, factor, start..end, end);
            }
        });
        for (lane, words) in words.chunks_exact(each).enumerate() {
            let at = (lane / LANES * tiles + tile) * LANES * each;
            for (word, &value) in words.iter().enumerate() {
                all[at + word_place(each, lane % LANES, word)] = value;
            }
        }
    }
    (all, columns)
}

/// Calls `f` with the row, the first column and the values of each step of a tile's sequences.
fn for_each_step(code: Code, values: &mut [f32], mut f: impl FnMut(usize, usize, &mut [f32])) {
    for (lane, values) in values.chunks_exact_mut(SEQUENCE).enumerate() {
        for (step, values) in values.chunks_exact_mut(code.width()).enumerate() {
            let (row, column) = place(code, lane, step);
            f(row, column, values);
        }
    }
}

/// The scales of rows with which `values` have the least error, weighted by the second moments.
fn best_scales(weight: &Matrix, values: &Matrix, moments: Option<&Matrix>) -> Vec<f64> {
    let parts = (0..weight.rows).into_par_iter().step_by(ROWS);
    let of_parts = parts.flat_map_iter(|start| {
        let values = values.part(start..(start + ROWS).min(weight.rows));
        let weighted = match moments {
            Some(moments) => product(&values, moments),
            None => values.clone(),
        };
        (0..values.rows).map(move |i| {
            let weighted = weighted.row(i);
            dot(weighted, weight.row(start + i)) / dot(weighted, values.row(i))
        })
    });
    of_parts.collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::gaussians;
    use super::*;
    use crate::linalg::{Moments, quadratic_error};

    fn scheme(code: Code, step_bits: u32) -> TrellisScheme {
        TrellisScheme::new(code, step_bits).unwrap()
    }

    fn dequantized(weight: &TrellisWeight) -> Matrix {
        let mut all = Matrix::zeros(weight.out_features(), weight.in_features());
        let rows = all.data.chunks_exact_mut(weight.in_features());
        rows.enumerate()
            .for_each(|(i, row)| weight.dequantize_row(i, row));
        all
    }

    fn change(weight: &Matrix, rounded: &TrellisWeight) -> Matrix {
        let mut change = dequantized(rounded);
        change
            .data
            .iter_mut()
            .zip(&weight.data)
            .for_each(|(c, w)| *c -= w);
        change
    }

    /// Weights with large columns, and moments of correlated inputs of which some are large.
    fn example(rows: usize) -> (Matrix, Matrix) {
        let n = 256;
        let mut weight = Matrix::zeros(rows, n);
        weight.data = gaussians(rows * n, 22);
        for (i, w) in weight.data.iter_mut().enumerate() {
            *w *= if i % 64 == 9 { 0.1 } else { 0.02 };
        }
        let g = gaussians(2 * n * n, 21);
        let mut x = vec![0.0; g.len()];
        for (i, x) in x.iter_mut().enumerate() {
            let large = if i % 32 == 5 { 4.0 } else { 1.0 };
            *x = (g[i] + 0.7 * g[i / 8 * 8]) * large;
        }
        let mut moments = Moments::new(n, true);
        moments.add(&x);
        (weight, moments.matrix())
    }

    fn relative_error(weight: &Matrix, moments: &Matrix, rounded: &TrellisWeight) -> f64 {
        quadratic_error(&change(weight, rounded), moments) / quadratic_error(weight, moments)
    }

    /// The errors of benches/trellis/rounding.py in blocks of 32 columns on the same numbers, means over four seeds of
    /// signs: with errors fed to later columns and without.
    #[test]
    fn as_good_as_the_prototype() {
        let (weight, moments) = example(256);
        let inputs = InputStats::of(moments.clone());
        for (scheme, fed, alone) in [
            (scheme(Code::Octagon, 4), 0.052764, 0.079499),
            (scheme(Code::Octagon, 6), 0.013272, 0.021061),
            (scheme(Code::Octagon, 8), 0.003499, 0.005688),
            (scheme(Code::Sum, 6), 0.000209, 0.000340),
        ] {
            for (inputs, expected) in [(Some(&inputs), fed), (None, alone)] {
                let (rounded, fallbacks) = round("w", &weight, inputs, scheme).unwrap();
                assert!(fallbacks.is_empty(), "{fallbacks:?}");
                let error = relative_error(&weight, &moments, &rounded);
                // Scales are refitted here, which the prototype does not do.
                let ratio = error / expected;
                assert!(
                    (0.9..1.03).contains(&ratio),
                    "{scheme}: {error}, expected {expected}"
                );
            }
        }
    }

    /// Searched by blocks, a weight gets the codes that it gets as a whole.
    #[test]
    fn the_nearest_codes_are_those_of_rounding_without_moments() {
        let weight = &example(160).0;
        for scheme in [scheme(Code::Octagon, 7), scheme(Code::Sum, 3)] {
            let found = &nearest(weight, scheme, None).unwrap();
            let (alone, _) = round("w", weight, None, scheme).unwrap();
            // Of rows that fill a strip up, codes may differ.
            let strip = scheme.strip_bytes(weight.cols);
            assert_eq!(found.words()[..strip], alone.words()[..strip]);
            assert_eq!(found.input_scales(), alone.input_scales());
            let change = change(&dequantized(&alone), found).square_norm();
            assert!(change < 1e-6 * weight.square_norm(), "{change}");
        }
    }

    /// A weight of some rows is the same rows of a larger one, in any number of threads.
    #[test]
    fn strips_and_threads_change_nothing() {
        let scheme = scheme(Code::Octagon, 6);
        let (weight, moments) = example(160);
        let inputs = InputStats::of(moments);
        let round = |weight: &Matrix| round("w", weight, Some(&inputs), scheme).unwrap().0;
        let all = round(&weight);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        let alone = pool.unwrap().install(|| round(&weight));
        assert_eq!(
            (all.words(), all.row_scales()),
            (alone.words(), alone.row_scales())
        );
        let (first, last) = (round(&weight.part(0..128)), round(&weight.part(128..160)));
        assert_eq!(
            all.words()[..],
            [&first.words()[..], &last.words()[..]].concat()
        );
        assert_eq!(
            all.row_scales(),
            [first.row_scales(), last.row_scales()].concat()
        );
        assert_eq!(all.input_scales(), last.input_scales());
    }

    /// Rows of zeros stay zeros, and the others are rounded as if there were none.
    #[test]
    fn rows_of_zeros() {
        let (mut weight, _) = example(130);
        weight.row_mut(3).fill(0.0);
        let (rounded, _) = round("w", &weight, None, scheme(Code::Sum, 4)).unwrap();
        let change = change(&weight, &rounded);
        assert!(change.row(3).iter().all(|v| *v == 0.0));
        assert!(change.square_norm() < 0.006 * weight.square_norm());
    }

    /// Inputs that were always zero keep their weights about as exactly as others do.
    #[test]
    fn inputs_without_information() {
        let (weight, mut moments) = example(128);
        let n = weight.cols;
        for i in [7, 130] {
            for j in 0..n {
                (moments.data[i * n + j], moments.data[j * n + i]) = (0.0, 0.0);
            }
        }
        let inputs = InputStats::of(moments.clone());
        let scheme = scheme(Code::Octagon, 8);
        let (rounded, fallbacks) = round("w", &weight, Some(&inputs), scheme).unwrap();
        assert!(
            fallbacks[0].contains("2 of 256 inputs are zero"),
            "{fallbacks:?}"
        );
        assert!(relative_error(&weight, &moments, &rounded) < 0.0045);
        let change = change(&weight, &rounded);
        let square = |m: &Matrix, i: usize| -> f32 { m.iter_rows().map(|r| r[i] * r[i]).sum() };
        for i in [7, 130] {
            assert!(square(&change, i) < 0.03 * square(&weight, i), "input {i}");
        }

        let zero = InputStats::of(Matrix::zeros(n, n));
        let (rounded, fallbacks) = round("w", &weight, Some(&zero), scheme).unwrap();
        assert!(
            fallbacks[0].contains("all inputs are zero"),
            "{fallbacks:?}"
        );
        assert!(change_norm(&weight, &rounded) < 0.007);
    }

    fn change_norm(weight: &Matrix, rounded: &TrellisWeight) -> f64 {
        change(weight, rounded).square_norm() / weight.square_norm()
    }

    #[test]
    fn moments_that_cannot_be_used() {
        let (weight, mut moments) = example(128);
        let scheme = scheme(Code::Octagon, 8);
        moments.data[5] = f32::NAN;
        let inputs = InputStats::of(moments.clone());
        let (rounded, fallbacks) = round("w", &weight, Some(&inputs), scheme).unwrap();
        assert!(fallbacks[0].contains("not finite"), "{fallbacks:?}");
        assert!(change_norm(&weight, &rounded) < 0.007);
        // Not the moments of anything: no damping makes them positive definite.
        moments.data.fill(0.0);
        for i in 0..weight.cols {
            moments.data[i * weight.cols + i] = if i % 2 == 0 { 3.0 } else { 1.0 };
            moments.data[i * weight.cols + (i ^ 1)] = 9.0;
        }
        let inputs = InputStats::of(moments);
        let (_, fallbacks) = round("w", &weight, Some(&inputs), scheme).unwrap();
        assert!(fallbacks[0].contains("cannot be inverted"), "{fallbacks:?}");
    }

    #[test]
    fn refuses_what_does_not_fit() {
        let (weight, _) = example(128);
        let inputs = InputStats::of(Matrix::zeros(128, 128));
        let scheme = scheme(Code::Octagon, 8);
        let error = round("w", &weight, Some(&inputs), scheme)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("256 inputs of w") && error.contains("128"),
            "{error}"
        );
        let error = round("w", &Matrix::zeros(4, 96), None, scheme)
            .unwrap_err()
            .to_string();
        assert!(error.contains("multiple of 128"), "{error}");
    }
}
