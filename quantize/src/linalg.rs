//! Dense matrices for the methods: row-major f32, with products and factorizations by faer.

use crate::error::{Error, Result};
use faer::linalg::matmul::matmul;
use faer::linalg::matmul::triangular::{self, BlockStructure};
use faer::linalg::triangular_inverse::invert_lower_triangular;
use faer::{Accum, Mat, MatMut, MatRef, Par, Side};
use nq_formats::{Tensor, Weight};
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
    pub fn from_weight(name: &str, weight: &Weight) -> Result<Self> {
        let (rows, cols) = weight.dims();
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
    pub fn to_weight(&self) -> Result<Weight> {
        let tensor = Tensor::from_f32(vec![self.rows, self.cols], self.data.clone())?;
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
    pub fn iter_rows(&self) -> impl Iterator<Item = &[f32]> {
        self.data.chunks_exact(self.cols.max(1))
    }

    /// The sum of squares of all elements.
    pub fn square_norm(&self) -> f64 {
        let row = |r: &[f32]| r.iter().map(|&v| f64::from(v).powi(2)).sum();
        let rows: Vec<f64> = self.data.par_chunks(self.cols.max(1)).map(row).collect();
        rows.iter().sum() // in order: the same for any number of threads
    }

    fn view(&self) -> MatRef<'_, f32> {
        MatRef::from_row_major_slice(&self.data, self.rows, self.cols)
    }
}

/// Reads row `row` of the weight `name` into `out` (`cols` long).
///
/// # Errors
/// [`Error::NotFinite`] for NaN or infinity; a dense weight that is not of a float type.
pub fn read_row(name: &str, weight: &Weight, row: usize, out: &mut [f32]) -> Result<()> {
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

/// Running sums for the second moments `E[x x^T]` of a Linear's input.
#[derive(Clone, Debug)]
pub struct Moments {
    n: usize,
    sum: Vec<f32>, // [n, n], lower triangle; or [n], the diagonal
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
            let x = MatRef::from_row_major_slice(x, rows, self.n);
            triangular::matmul(
                MatMut::from_row_major_slice_mut(&mut self.sum, self.n, self.n),
                BlockStructure::TriangularLower,
                Accum::Add,
                x.transpose(),
                BlockStructure::Rectangular,
                x,
                BlockStructure::Rectangular,
                1.0,
                Par::rayon(0),
            );
        } else {
            for x in x.chunks_exact(self.n) {
                for (s, &x) in self.sum.iter_mut().zip(x) {
                    *s += x * x;
                }
            }
        }
    }

    /// Adds `share` times the mean of the diagonal to each of its elements.
    pub fn raise(&mut self, share: f32) {
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
    pub fn mean_squares(&self) -> Vec<f32> {
        let step = if self.full { self.n + 1 } else { 1 };
        let scale = 1.0 / self.rows.max(1) as f32;
        self.sum.iter().step_by(step).map(|v| v * scale).collect()
    }

    /// True if the full `E[x x^T]` is kept.
    pub fn is_full(&self) -> bool {
        self.full
    }
}

/// The upper triangular `U` with `(P H P^T + d I)^-1 = U^T U`, `[n, n]` row-major, where `P`
/// moves element `order[i]` to place `i`; `None` if the matrix is not positive definite.
///
/// `U` is the inverse of the factor `R` of `H = R R^T` (R upper triangular), which comes from a
/// Cholesky factorization of the reversed matrix: one factorization and one triangular inverse,
/// in f64.
pub fn inverse_factor(h: &Matrix, order: &[usize], damping: f64) -> Option<Matrix> {
    let n = order.len();
    let at = |i: usize| order[n - 1 - i];
    let reversed = Mat::from_fn(n, n, |i, j| {
        let v = f64::from(h.data[at(i) * n + at(j)]);
        if i == j { v + damping } else { v }
    });
    let factor = reversed.llt(Side::Lower).ok()?;
    let mut inverse = reversed;
    invert_lower_triangular(inverse.as_mut(), factor.L(), Par::rayon(0));
    let mut u = Matrix::zeros(n, n);
    u.data.par_chunks_mut(n).enumerate().for_each(|(i, row)| {
        for (j, v) in row.iter_mut().enumerate().skip(i) {
            *v = inverse[(n - 1 - i, n - 1 - j)] as f32;
        }
    });
    let finite = u.data.par_iter().all(|v| v.is_finite());
    finite.then_some(u)
}

/// `dst += alpha * a b` on one thread, all row-major. `a` is `[m, k]`; `b` is the columns
/// `from ..` of rows `rows` of a matrix with `b.cols` columns; `dst` is the same columns of
/// a matrix `[m, dst_cols]`.
pub fn add_product(
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
    let dst = MatMut::from_row_major_slice_mut(dst, m, dst_cols);
    let a = MatRef::from_row_major_slice(a, m, k);
    let b = b.view();
    let b = b.subrows(rows.start, k);
    matmul(
        dst.subcols_mut(from, dst_cols - from),
        Accum::Add,
        a,
        b.subcols(from, dst_cols - from),
        alpha,
        Par::Seq,
    );
}

/// `tr(E H E^T)` for `e` `[rows, n]` and a symmetric `h` `[n, n]`: the mean squared output
/// error caused by the weight error `e`, summed over outputs.
pub fn quadratic_error(e: &Matrix, h: &Matrix) -> f64 {
    const TILE: usize = 64;
    let n = e.cols;
    let parts: Vec<f64> = e
        .data
        .par_chunks(TILE * n)
        .map(|e| {
            let mut product = vec![0.0; e.len()];
            add_product(&mut product, n, 1.0, e, h, 0..n, 0);
            e.iter()
                .zip(&product)
                .map(|(&a, &b)| f64::from(a) * f64::from(b))
                .sum()
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

    /// `U (P H P^T + d I) U^T` is the identity, and `U` upper triangular.
    #[test]
    fn inverse_factor_inverts() {
        let n = 23;
        let mut moments = Moments::new(n, true);
        moments.add(&random(100, n, 1).data);
        let h = moments.matrix();
        let order: Vec<usize> = (0..n).map(|i| (i * 7) % n).collect();
        let u = inverse_factor(&h, &order, 0.1).unwrap();
        for i in 0..n {
            for j in 0..n {
                let mut sum = 0f64;
                for a in 0..n {
                    for b in 0..n {
                        let mut v = f64::from(h.data[order[a] * n + order[b]]);
                        if a == b {
                            v += 0.1;
                        }
                        sum += f64::from(u.data[i * n + a]) * v * f64::from(u.data[j * n + b]);
                    }
                }
                let want = if i == j { 1.0 } else { 0.0 };
                assert!((sum - want).abs() < 1e-4, "{i} {j}: {sum}");
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
        assert!(inverse_factor(&h, &order, 0.0).is_none());
        assert!(inverse_factor(&h, &order, 0.01).is_some());
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
