//! Dense matrices for the methods: row-major f32, and the inverse of a Cholesky factor.

use crate::error::{Error, Result};
use nq_formats::Weight;
use nq_kernels::matrix::{PACKED, ProductTarget, Threads, View, multiply};
use nq_model::Dims;
use rayon::prelude::*;

/// A row-major f32 matrix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Matrix {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// `[rows, cols]`.
    pub data: Vec<f32>,
}

impl Matrix {
    /// A matrix of zeros.
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Matrix {
            rows,
            cols,
            data: vec![0.0; rows * cols],
        }
    }

    /// The values of a weight, `[out, in]`.
    ///
    /// # Errors
    /// [`Error::NotFinite`] with `name` and the first NaN or infinity; a dense weight that is not of a
    /// float type.
    pub(crate) fn from_weight(name: &str, weight: &Weight) -> Result<Self> {
        let Dims { rows, cols } = weight.dims();
        let mut m = Matrix::zeros(rows, cols);
        m.data
            .par_chunks_mut(cols.max(1))
            .enumerate()
            .try_for_each(|(row, out)| read_row(name, weight, row, out))?;
        Ok(m)
    }

    /// The matrix as an f32 weight.
    ///
    /// # Errors
    /// None for a consistent matrix.
    #[cfg(test)]
    pub(crate) fn to_weight(&self) -> Result<Weight> {
        let tensor = nq_formats::Tensor::from_f32(vec![self.rows, self.cols], self.data.clone())?;
        Ok(Weight::Dense(tensor))
    }

    /// A copy of rows `rows`.
    pub fn part(&self, rows: std::ops::Range<usize>) -> Matrix {
        Matrix {
            rows: rows.len(),
            cols: self.cols,
            data: self.data[rows.start * self.cols..rows.end * self.cols].to_vec(),
        }
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.cols..(i + 1) * self.cols]
    }

    /// Row `i`, mutable.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.cols..(i + 1) * self.cols]
    }

    /// All rows.
    pub(crate) fn iter_rows(&self) -> impl Iterator<Item = &[f32]> {
        self.data.chunks_exact(self.cols.max(1))
    }

    /// The sum of squares of all elements.
    pub fn square_norm(&self) -> f64 {
        let row = |r: &[f32]| r.iter().map(|&v| f64::from(v).powi(2)).sum();
        let rows: Vec<f64> = self.data.par_chunks(self.cols.max(1)).map(row).collect();
        rows.iter().sum() // in order: the same for any number of threads
    }

    fn view(&self) -> View<'_, f32> {
        View::new(&self.data, self.rows, self.cols)
    }
}

/// Reads row `row` of the weight `name` into `out` (`cols` long).
///
/// # Errors
/// [`Error::NotFinite`] for NaN or infinity; a dense weight that is not of a float type.
pub(crate) fn read_row(name: &str, weight: &Weight, row: usize, out: &mut [f32]) -> Result<()> {
    weight.dequantize_row(row, out)?;
    // Only NaN and infinity times 0 is NaN: cheaper than checking each value.
    if out.iter().map(|v| v * 0.0).sum::<f32>() == 0.0 {
        return Ok(());
    }
    let column = out.iter().position(|v| !v.is_finite()).unwrap_or(0);
    Err(Error::NotFinite {
        tensor: name.into(),
        found: out[column],
        row,
        column,
    })
}

/// Rows of second moments that one thread computes together.
const MOMENT_ROWS: usize = 128;

/// Running sums for the second moments `E[x x^T]` of a Linear's input.
#[derive(Clone, Debug)]
pub struct Moments {
    n: usize,
    sum: Vec<f32>, // [n, n], of which the lower triangle counts; or [n], the diagonal
    full: bool,
    rows: usize,
}

impl Moments {
    /// Starts with no rows, for inputs of `n` elements; keeps only the diagonal unless `full`.
    pub fn new(n: usize, full: bool) -> Self {
        Moments {
            n,
            sum: vec![0.0; if full { n * n } else { n }],
            full,
            rows: 0,
        }
    }

    /// Adds the rows of `x` `[rows, n]`.
    pub fn add(&mut self, x: &[f32]) {
        let rows = x.len() / self.n;
        self.rows += rows;
        if self.full {
            let (n, x) = (self.n, View::new(x, rows, self.n));
            let pieces = self.sum.par_chunks_mut(MOMENT_ROWS * n).enumerate();
            pieces.for_each(|(i, sum)| {
                let (start, end) = (i * MOMENT_ROWS, i * MOMENT_ROWS + sum.len() / n);
                let to = ProductTarget {
                    data: sum,
                    stride: n,
                    cols: 0..end,
                };
                let left = x.part(0..rows, start..end).transposed();
                multiply(to, true, 1.0, left, x.part(0..rows, 0..end), Threads::One);
            });
        } else {
            for x in x.chunks_exact(self.n) {
                for (s, &x) in self.sum.iter_mut().zip(x) {
                    *s += x * x;
                }
            }
        }
    }

    /// Adds `share` times the mean of the diagonal to each of its elements.
    pub(crate) fn raise(&mut self, share: f32) {
        let (n, step) = (self.n, if self.full { self.n + 1 } else { 1 });
        let diagonal = self.sum.iter().step_by(step);
        let more = share * diagonal.sum::<f32>() / n.max(1) as f32;
        let diagonal = self.sum.iter_mut().step_by(step);
        diagonal.for_each(|v| *v += more);
    }

    /// Elements of an input.
    pub fn width(&self) -> usize {
        self.n
    }

    /// Number of rows added.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// `E[x x^T]`.
    ///
    /// # Panics
    /// If only the diagonal was kept.
    pub fn matrix(mut self) -> Matrix {
        assert!(self.full, "only the diagonal was kept");
        let n = self.n;
        let scale = 1.0 / self.rows.max(1) as f32;
        self.sum.iter_mut().for_each(|v| *v *= scale);
        for i in 0..n {
            for j in 0..i {
                self.sum[j * n + i] = self.sum[i * n + j];
            }
        }
        Matrix {
            rows: n,
            cols: n,
            data: self.sum,
        }
    }

    /// `E[x_i^2]`.
    pub(crate) fn mean_squares(&self) -> Vec<f32> {
        let step = if self.full { self.n + 1 } else { 1 };
        let scale = 1.0 / self.rows.max(1) as f32;
        self.sum.iter().step_by(step).map(|v| v * scale).collect()
    }

    /// True if the full `E[x x^T]` is kept.
    pub(crate) fn is_full(&self) -> bool {
        self.full
    }
}

/// Rows that [`inverse_factor`] adds to the factor at a time, and rows of their diagonal block.
const BLOCKS: [usize; 2] = [256, 32];

/// Bytes that [`inverse_factor`] takes for `n` inputs, its result included: an f64 matrix, the factor, the two
/// products of a block of rows with those above, and what threads pack.
pub(crate) fn factor_bytes(n: usize) -> usize {
    (8 + 4) * n * n + 2 * 8 * n * BLOCKS[0].min(n) + rayon::current_num_threads() * PACKED
}

/// The upper triangular `U` with `(P (H + noise diag(H)) P^T + damping I)^-1 = U^T U`, `[n, n]` row-major, where
/// `P` moves element `order[i]` to place `i`; `None` if the matrix is not positive definite.
///
/// `U` is the inverse of the factor `R` of `H = R R^T` (R upper triangular): the inverse of the Cholesky
/// factor of the reversed matrix, reversed. Computed in f64.
pub(crate) fn inverse_factor(
    h: &Matrix,
    order: &[usize],
    damping: f64,
    noise: f64,
) -> Option<Matrix> {
    let n = order.len();
    let at = |i: usize| order[n - 1 - i];
    let mut inverse = vec![0f64; n * n];
    inverse.par_chunks_mut(n).enumerate().for_each(|(i, row)| {
        for (j, v) in row.iter_mut().enumerate().take(i + 1) {
            *v = f64::from(h.data[at(i) * n + at(j)]);
        }
        row[i] += noise * row[i] + damping;
    });
    invert_cholesky(&mut inverse, n, &BLOCKS)?;
    let mut u = Matrix::zeros(n, n);
    u.data.par_chunks_mut(n).enumerate().for_each(|(i, row)| {
        let reversed = inverse[(n - 1 - i) * n..][..n - i].iter().rev();
        row[i..]
            .iter_mut()
            .zip(reversed)
            .for_each(|(u, &v)| *u = v as f32);
    });
    let finite = u.data.par_iter().all(|v| v.is_finite());
    finite.then_some(u)
}

/// Replaces `a` `[n, n]`, of which only the lower triangle is read, by the inverse of its Cholesky
/// factor; `None` if it is not positive definite. Takes `blocks[0]` rows at a time, and their diagonal
/// block in the same way with the next size. What is above the diagonal blocks is left as it was.
///
/// By bordering: if `X` is the inverse of the factor of the rows above, then rows `A` with the diagonal
/// block `D` add `L = A X^T` and the Cholesky factor `C` of `D - L L^T` to the factor, and
/// `-C^-1 L X` and `C^-1` to its inverse. These are as many operations as factorization and
/// inversion take one after the other, and no second matrix is needed.
fn invert_cholesky(a: &mut [f64], n: usize, blocks: &[usize]) -> Option<()> {
    let Some((&block, smaller)) = blocks.split_first() else {
        return invert_small_cholesky(a, n);
    };
    for start in (0..n).step_by(block) {
        let rows = block.min(n - start);
        let (above, a) = a.split_at_mut(start * n);
        let x = View::new(above, start, n);
        let own = View::new(a, rows, n);
        let mut l = vec![0.0; start * rows]; // L^T
        let pieces = l.par_chunks_mut(block * rows).enumerate();
        pieces.for_each(|(i, l)| {
            let (from, to) = (i * block, (i + 1) * block);
            let a = own.part(0..rows, 0..to).transposed();
            let x = x.part(from..to, 0..to);
            multiply(ProductTarget::new(l, rows), false, 1.0, x, a, Threads::One);
        });
        let l = View::new(&l, start, rows);
        let mut lx = vec![0.0; start * rows]; // (L X)^T
        let pieces = lx.par_chunks_mut(block * rows).enumerate();
        pieces.for_each(|(i, lx)| {
            let (from, to) = (i * block, (i + 1) * block);
            let x = x.part(from..start, from..to).transposed();
            let l = l.part(from..start, 0..rows);
            multiply(ProductTarget::new(lx, rows), false, 1.0, x, l, Threads::One);
        });

        let diagonal = (0..rows).flat_map(|i| &a[i * n + start..][..rows]);
        let mut c: Vec<f64> = diagonal.copied().collect();
        let to = ProductTarget::new(&mut c, rows);
        multiply(to, true, -1.0, l.transposed(), l, Threads::All);
        invert_cholesky(&mut c, rows, smaller)?;
        for (i, c) in c.chunks_exact_mut(rows).enumerate() {
            c[i + 1..].fill(0.0);
            a[i * n + start..][..rows].copy_from_slice(c);
        }
        let to = ProductTarget {
            data: a,
            stride: n,
            cols: 0..start,
        };
        let lx = View::new(&lx, start, rows).transposed();
        multiply(to, false, -1.0, View::new(&c, rows, rows), lx, Threads::All);
    }
    Some(())
}

/// [`invert_cholesky`] row by row.
fn invert_small_cholesky(a: &mut [f64], n: usize) -> Option<()> {
    for i in 0..n {
        let (x, row) = a.split_at_mut(i * n);
        let l: Vec<f64> = (x.chunks_exact(n).enumerate())
            .map(|(j, x)| x[..=j].iter().zip(&row[..]).map(|(x, a)| x * a).sum())
            .collect();
        let square = row[i] - l.iter().map(|l| l * l).sum::<f64>();
        if square.is_nan() || square <= 0.0 {
            return None;
        }
        let scale = square.sqrt().recip();
        row[i] = scale;
        for (j, v) in row[..i].iter_mut().enumerate() {
            *v = -scale * (j..i).map(|k| l[k] * x[k * n + j]).sum::<f64>();
        }
    }
    Some(())
}

/// `dst += alpha * a b` on one thread, all row-major. `a` is `[m, k]`; `b` is the columns
/// `from ..` of rows `rows` of a matrix with `b.cols` columns; `dst` is the same columns of
/// a matrix `[m, dst_cols]`.
pub(crate) fn add_product(
    dst: &mut [f32],
    dst_cols: usize,
    alpha: f32,
    a: &[f32],
    b: &Matrix,
    rows: std::ops::Range<usize>,
    from: usize,
) {
    let k = rows.len();
    let m = a.len() / k;
    let b = b.view().part(rows, from..dst_cols);
    let to = ProductTarget {
        data: dst,
        stride: dst_cols,
        cols: from..dst_cols,
    };
    multiply(to, true, alpha, View::new(a, m, k), b, Threads::One);
}

/// `a b` on one thread.
pub(crate) fn product(a: &Matrix, b: &Matrix) -> Matrix {
    let mut c = Matrix::zeros(a.rows, b.cols);
    let to = ProductTarget::new(&mut c.data, b.cols);
    multiply(to, false, 1.0, a.view(), b.view(), Threads::One);
    c
}

/// `tr(E H E^T)` for `e` `[rows, n]` and a symmetric `h` `[n, n]`: the mean squared output
/// error caused by the weight error `e`, summed over outputs.
pub fn quadratic_error(e: &Matrix, h: &Matrix) -> f64 {
    // Enough rows that packing `h` for the product costs little beside the product.
    const TILE: usize = 256;
    // Of what is on both sides of the diagonal blocks of this size, one side counts twice.
    const BLOCK: usize = 256;
    let n = e.cols;
    let parts: Vec<f64> = e
        .data
        .par_chunks(TILE * n)
        .map(|e| {
            let rows = e.len() / n;
            let all = View::new(e, rows, n);
            let mut product = vec![0.0; rows * BLOCK];
            let mut sum = 0.0;
            for start in (0..n).step_by(BLOCK) {
                let end = n.min(start + BLOCK);
                let product = &mut product[..rows * (end - start)];
                for (inputs, times) in [(start..end, 1.0), (end..n, 2.0)] {
                    let left = all.part(0..rows, inputs.clone());
                    let right = h.view().part(inputs, start..end);
                    let to = ProductTarget::new(product, end - start);
                    multiply(to, times > 1.0, times, left, right, Threads::One);
                }
                for (e, product) in e.chunks_exact(n).zip(product.chunks_exact(end - start)) {
                    let e = e[start..end].iter().zip(product);
                    sum += e.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
                }
            }
            sum
        })
        .collect();
    parts.iter().sum() // in order: the same for any number of threads
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_kernels::rng::Philox;

    pub(crate) fn random(rows: usize, cols: usize, stream: u64) -> Matrix {
        let mut rng = Philox::new(7, stream);
        let mut m = Matrix::zeros(rows, cols);
        m.data.iter_mut().for_each(|v| *v = rng.normal());
        m
    }

    #[test]
    fn moments_are_means_of_outer_products() {
        let (rows, n) = (37, 5);
        let x = random(rows, n, 0);
        let mut full = Moments::new(n, true);
        full.add(&x.data[..20 * n]);
        full.add(&x.data[20 * n..]);
        let full = full.matrix();
        let mut diagonal = Moments::new(n, false);
        diagonal.add(&x.data);
        let diagonal = diagonal.mean_squares();
        for i in 0..n {
            for j in 0..n {
                let want: f32 = x.iter_rows().map(|r| r[i] * r[j]).sum::<f32>() / rows as f32;
                let got = full.data[i * n + j];
                assert!((got - want).abs() < 1e-5, "{i} {j}: {got} {want}");
            }
            assert!((full.data[i * n + i] - diagonal[i]).abs() < 1e-5);
        }
    }

    /// `U (P H P^T + d I) U^T` is the identity, and `U` upper triangular, in one block and in several.
    #[test]
    fn inverse_factor_inverts() {
        for n in [1, 23, 300, 513] {
            inverts(n);
        }
    }

    fn inverts(n: usize) {
        let mut moments = Moments::new(n, true);
        moments.add(&random(100, n, 1).data);
        let h = moments.matrix();
        let order: Vec<usize> = (0..n).map(|i| (i * 7) % n).collect();
        let u = inverse_factor(&h, &order, 0.1, 0.0).unwrap();
        let mut permuted = Matrix::zeros(n, n);
        for i in 0..n {
            for j in 0..n {
                permuted.row_mut(i)[j] = h.data[order[i] * n + order[j]];
            }
            permuted.row_mut(i)[i] += 0.1;
        }
        let product = |a: View<'_, f32>, b: View<'_, f32>| {
            let mut c = vec![0.0; n * n];
            multiply(
                ProductTarget::new(&mut c, n),
                false,
                1.0,
                a,
                b,
                Threads::All,
            );
            c
        };
        let hu = product(permuted.view(), u.view().transposed());
        let identity = product(u.view(), View::new(&hu, n, n));
        for i in 0..n {
            for j in 0..n {
                let (got, want) = (identity[i * n + j], if i == j { 1.0 } else { 0.0 });
                assert!((got - want).abs() < 2e-4, "{n}, {i} {j}: {got}");
                assert!(j >= i || u.data[i * n + j] == 0.0);
            }
        }
    }

    #[test]
    fn a_singular_matrix_has_no_factor() {
        let mut moments = Moments::new(4, true);
        moments.add(&[1.0, 2.0, 0.0, 1.0]);
        let h = moments.matrix();
        let order = [0, 1, 2, 3];
        assert!(inverse_factor(&h, &order, 0.0, 0.0).is_none());
        assert!(inverse_factor(&h, &order, 0.01, 0.0).is_some());
    }

    #[test]
    fn quadratic_error_is_the_output_error() {
        let (out, n, rows) = (3, 8, 50);
        let (e, x) = (random(out, n, 2), random(rows, n, 3));
        let mut moments = Moments::new(n, true);
        moments.add(&x.data);
        let h = moments.matrix();
        let mut want = 0f64;
        for x in x.iter_rows() {
            for e in e.iter_rows() {
                let y: f32 = x.iter().zip(e).map(|(a, b)| a * b).sum();
                want += f64::from(y * y) / rows as f64;
            }
        }
        let got = quadratic_error(&e, &h);
        assert!((got - want).abs() < 1e-4 * want, "{got} {want}");
    }

    #[test]
    fn not_finite_weights_are_named() {
        let mut m = random(3, 4, 4);
        m.data[6] = f32::NAN;
        let error = Matrix::from_weight("model.x", &m.to_weight().unwrap()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "model.x: expected finite weights, found NaN in row 1, column 2"
        );
    }
}
