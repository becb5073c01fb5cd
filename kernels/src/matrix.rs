//! Products of dense f32 and f64 matrices on the host, by the kernels of matrixmultiply.

use rayon::prelude::*;
use std::ops::Range;

/// Rows or columns of C that one thread computes together.
const PIECE: usize = 256;

/// Most bytes into which a thread packs blocks of both operands: matrixmultiply takes 64 rows of A, 256
/// inputs and 1,024 columns of B at a time.
pub const PACKED: usize = 256 * (64 + 1024) * size_of::<f64>();

/// A matrix in a slice: element `(i, j)` lies at `i * row_stride + j * col_stride`.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> View<'a, T> {
    /// A contiguous row-major matrix.
    ///
    /// # Panics
    /// If `data` is too short.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        let enough = rows.checked_mul(cols).is_some_and(|n| n <= data.len());
        assert!(enough, "{rows} x {cols} values");
        View {
            data,
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
        }
    }

    /// Rows `rows` and columns `cols` of it.
    ///
    /// # Panics
    /// If it does not have them.
    pub fn part(self, rows: Range<usize>, cols: Range<usize>) -> Self {
        let inside = |r: &Range<usize>, most| r.start <= r.end && r.end <= most;
        assert!(inside(&rows, self.rows) && inside(&cols, self.cols));
        let at = rows.start * self.row_stride + cols.start * self.col_stride;
        View {
            // An empty part may begin behind the last value.
            data: self.data.get(at..).unwrap_or_default(),
            rows: rows.len(),
            cols: cols.len(),
            ..self
        }
    }

    /// The transposed matrix.
    pub fn transposed(self) -> Self {
        View {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// Where a product goes: columns `cols` of all rows of a row-major matrix.
#[derive(Debug)]
pub struct ProductTarget<'a, T> {
    /// The rows of the matrix, contiguous.
    pub data: &'a mut [T],
    /// Columns of the matrix.
    pub stride: usize,
    /// The columns that are written.
    pub cols: Range<usize>,
}

impl<'a, T> ProductTarget<'a, T> {
    /// All of a matrix with `cols` columns.
    pub fn new(data: &'a mut [T], cols: usize) -> Self {
        ProductTarget {
            data,
            stride: cols,
            cols: 0..cols,
        }
    }
}

/// The threads that compute a product. The result is the same for any number of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread alone.
    One,
    /// All of rayon's.
    All,
}

/// A type of number that matrices are multiplied in.
pub trait Real: private::Kernel {}
impl Real for f32 {}
impl Real for f64 {}

/// `c = alpha a b`, or `c += alpha a b` if `add`.
///
/// # Panics
/// If the shapes do not match.
pub fn multiply<T: Real>(
    c: ProductTarget<'_, T>,
    add: bool,
    alpha: T,
    a: View<'_, T>,
    b: View<'_, T>,
    threads: Threads,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert_eq!((c.cols.len(), b.rows), (n, k), "columns of C, rows of B");
    assert!(c.cols.end <= c.stride || n == 0, "columns of a row");
    if m == 0 || n == 0 {
        return;
    }
    let before_last = (m - 1).checked_mul(c.stride);
    let last = before_last.and_then(|n| n.checked_add(c.cols.end));
    assert!(last.is_some_and(|n| n <= c.data.len()), "{m} rows of C");
    let to = Elements(c.data[c.cols.start..].as_mut_ptr());
    let part = |rows: Range<usize>, cols: Range<usize>| {
        let (a, b) = (a.part(rows.clone(), 0..k), b.part(0..k, cols.clone()));
        let first = rows.start * c.stride + cols.start;
        // SAFETY: C has m rows of `stride` values with columns `cols` in each (checked above), is borrowed
        // mutably, and no two parts have an element in common; `View` keeps its rows and columns
        // within its slice.
        unsafe { T::product(to.at(first), c.stride, add, alpha, a, b) };
    };
    let piece = |i: usize, most: usize| i * PIECE..((i + 1) * PIECE).min(most);
    match threads {
        Threads::One => part(0..m, 0..n),
        Threads::All if m >= n => (0..m.div_ceil(PIECE))
            .into_par_iter()
            .for_each(|i| part(piece(i, m), 0..n)),
        Threads::All => (0..n.div_ceil(PIECE))
            .into_par_iter()
            .for_each(|i| part(0..m, piece(i, n))),
    }
}

/// The elements of C, of which each thread writes its own.
struct Elements<T>(*mut T);

// SAFETY: `multiply` gives threads parts that have no element in common.
unsafe impl<T: Send> Sync for Elements<T> {}

impl<T> Elements<T> {
    /// The element at `offset`.
    ///
    /// # Safety
    /// There must be one.
    unsafe fn at(&self, offset: usize) -> *mut T {
        // SAFETY: as the caller promises.
        unsafe { self.0.add(offset) }
    }
}

mod private {
    use super::View;

    /// The kernel of a type of number.
    pub trait Kernel: Copy + Send + Sync {
        /// `c (+)= alpha a b` with `c` `[m, n]`, rows `stride` apart, `a` `[m, k]` and `b` `[k, n]`.
        ///
        /// # Safety
        /// `c` points to `m` rows of `n` values that nothing else refers to.
        unsafe fn product(
            c: *mut Self,
            stride: usize,
            add: bool,
            alpha: Self,
            a: View<'_, Self>,
            b: View<'_, Self>,
        );
    }

    macro_rules! kernel {
        ($($real:ty: $function:path),*) => {$(
            impl Kernel for $real {
                unsafe fn product(
                    c: *mut Self,
                    stride: usize,
                    add: bool,
                    alpha: Self,
                    a: View<'_, Self>,
                    b: View<'_, Self>,
                ) {
                    let beta = if add { 1.0 } else { 0.0 };
                    // SAFETY: as the caller promises; `a` and `b` hold what their shapes say.
                    unsafe {
                        $function(
                            a.rows, a.cols, b.cols, alpha,
                            a.data.as_ptr(), a.row_stride as isize, a.col_stride as isize,
                            b.data.as_ptr(), b.row_stride as isize, b.col_stride as isize,
                            beta, c, stride as isize, 1,
                        );
                    }
                }
            }
        )*};
    }
    kernel!(f32: matrixmultiply::sgemm, f64: matrixmultiply::dgemm);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Philox;

    fn random(n: usize, stream: u64) -> Vec<f64> {
        let mut rng = Philox::new(3, stream);
        (0..n).map(|_| f64::from(rng.normal())).collect()
    }

    /// Products of parts and of transposed matrices, beside sums one by one.
    #[test]
    fn products_are_sums_of_products() {
        let shapes = [
            (1, 1, 1),
            (3, 5, 2),
            (64, 40, 64),
            (17, 1, 33),
            (1, 70, 300),
            (130, 259, 513),
            (2, 3, 0),
        ];
        for (m, n, k) in shapes {
            let (a, b, c) = (
                random(m * k, 0),
                random((n + 2) * k, 1),
                random(m * (n + 3), 2),
            );
            for (turned, add, threads) in [
                (false, false, Threads::One),
                (true, true, Threads::One),
                (true, false, Threads::All),
            ] {
                let view_a = if turned {
                    View::new(&a, k, m).transposed()
                } else {
                    View::new(&a, m, k)
                };
                let view_b = View::new(&b, n + 2, k).part(1..n + 1, 0..k).transposed();
                let mut got = c.clone();
                let to = ProductTarget {
                    data: &mut got,
                    stride: n + 3,
                    cols: 2..n + 2,
                };
                multiply(to, add, -0.5, view_a, view_b, threads);
                for i in 0..m {
                    for j in 0..n + 3 {
                        let old = c[i * (n + 3) + j];
                        let want = if (2..n + 2).contains(&j) {
                            let of_a = |l| if turned { a[l * m + i] } else { a[i * k + l] };
                            let sum: f64 = (0..k).map(|l| of_a(l) * b[(j - 1) * k + l]).sum();
                            if add { old - 0.5 * sum } else { -0.5 * sum }
                        } else {
                            old
                        };
                        let got = got[i * (n + 3) + j];
                        assert!(
                            (got - want).abs() < 1e-10,
                            "{m} {n} {k} at {i} {j}: {got} {want}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let (m, n, k) = (300, 500, 700);
        let single = |v: Vec<f64>| -> Vec<f32> { v.into_iter().map(|v| v as f32).collect() };
        let (a, b) = (single(random(m * k, 0)), single(random(k * n, 1)));
        let product = |threads| {
            let mut c = vec![0f32; m * n];
            let (a, b) = (View::new(&a, m, k), View::new(&b, k, n));
            multiply(ProductTarget::new(&mut c, n), false, 1.0, a, b, threads);
            c
        };
        let alone = product(Threads::One);
        for threads in [2, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            assert!(
                pool.install(|| product(Threads::All)) == alone,
                "{threads} threads"
            );
        }
    }
}
