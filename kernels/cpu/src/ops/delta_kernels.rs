//! The kernels of a gated DeltaNet, for each instruction set.

use crate::simd::{LANES, Simd};

/// Added to the sum of squares of a query or a key before the root.
const UNIT_EPS: f32 = 1e-6;

/// `y = silu(sum over j of window[j] * taps[j])`, scaled to `length` if there is one. `window` and
/// `taps` are `[conv, n]`, `y` `[n]`; `n` is a multiple of 16.
#[inline(always)]
pub(crate) fn conv<S: Simd>(
    s: S,
    window: &[f32],
    taps: &[f32],
    length: Option<f32>,
    y: &mut [f32],
) {
    let n = y.len() / LANES;
    let (window, _) = window.as_chunks::<LANES>();
    let (taps, _) = taps.as_chunks::<LANES>();
    let (y, _) = y.as_chunks_mut::<LANES>();
    let mut squares = s.splat(0.0);
    for (i, y) in y.iter_mut().enumerate() {
        let mut acc = s.splat(0.0);
        let columns = window[i..].iter().step_by(n);
        for (x, w) in columns.zip(taps[i..].iter().step_by(n)) {
            // SAFETY: arrays of 16.
            acc = unsafe { s.fma(s.load(x.as_ptr()), s.load(w.as_ptr()), acc) };
        }
        let v = s.silu_mul(acc, s.splat(1.0));
        squares = s.fma(v, v, squares);
        // SAFETY: an array of 16.
        unsafe { s.store(y.as_mut_ptr(), v) };
    }
    let Some(length) = length else { return };
    let scale = s.splat(length / (s.sum(squares) + UNIT_EPS).sqrt());
    for y in y {
        // SAFETY: an array of 16.
        unsafe { s.store(y.as_mut_ptr(), s.mul(s.load(y.as_ptr()), scale)) };
    }
}

/// Rows whose queries, keys and values of a head are copied side by side before its tiles read them: in the
/// rows of a pass they are far apart, often by a power of two, where they would push each other out of the caches.
pub(super) const BLOCK: usize = 32;

/// What a tile reads: a block of rows, and the tile's values in each.
pub(crate) struct TileRows<'a> {
    /// `[rows, width]`: a query, a key and the values of the head.
    pub(super) block: &'a [f32],
    pub(super) key_dim: usize,
    pub(super) width: usize,
    /// The first of the tile's values.
    pub(super) column: usize,
    /// Number of the tile's values, at most 16.
    pub(super) values: usize,
    /// Decay and beta of each row.
    pub(super) gates: &'a [[f32; 2]],
}

impl TileRows<'_> {
    #[inline(always)]
    fn query(&self, r: usize) -> &[f32] {
        &self.block[r * self.width..][..self.key_dim]
    }

    #[inline(always)]
    fn key(&self, r: usize) -> &[f32] {
        &self.block[r * self.width + self.key_dim..][..self.key_dim]
    }

    #[inline(always)]
    fn values(&self, r: usize) -> &[f32] {
        &self.block[r * self.width + 2 * self.key_dim + self.column..][..self.values]
    }
}

/// Rows of a span through one tile `[key_dim, 16]` of its state; `put(r, o)` takes the outputs of row
/// `r`.
#[inline(always)]
pub(crate) fn tile<S: Simd>(
    s: S,
    tile: &mut [f32],
    rows: &TileRows<'_>,
    put: &dyn Fn(usize, &[f32; LANES]),
) {
    let (tile, _) = tile.as_chunks_mut::<LANES>();
    let len = rows.gates.len();
    if len == 0 {
        return;
    }
    let mut product = times(s, tile, rows.key(0));
    for (r, &[decay, beta]) in rows.gates.iter().enumerate() {
        let mut values = [0.0; LANES];
        values[..rows.values].copy_from_slice(rows.values(r));
        // SAFETY: an array of 16.
        let v = unsafe { s.load(values.as_ptr()) };
        let decay = s.splat(decay);
        let delta = s.mul(s.splat(beta), s.sub(v, s.mul(decay, product)));
        let (q, k) = (rows.query(r), rows.key(r));
        let o;
        if r + 1 < len {
            let next = rows.key(r + 1);
            (o, product) = update::<S, true>(s, tile, decay, delta, k, q, next);
        } else {
            (o, _) = update::<S, false>(s, tile, decay, delta, k, q, k);
        }
        // SAFETY: an array of 16.
        unsafe { s.store(values.as_mut_ptr(), o) };
        put(r, &values);
    }
}

/// `tile^T k`, in the order of [`update`].
#[inline(always)]
fn times<S: Simd>(s: S, tile: &[[f32; LANES]], k: &[f32]) -> S::F {
    let (twos, rest) = tile.as_chunks::<2>();
    let (keys, last) = k[..tile.len()].as_chunks::<2>();
    let mut acc = [s.splat(0.0); 2];
    for (lines, k) in twos.iter().zip(keys) {
        for j in 0..2 {
            // SAFETY: an array of 16.
            let line = unsafe { s.load(lines[j].as_ptr()) };
            acc[j] = s.fma(line, s.splat(k[j]), acc[j]);
        }
    }
    for (line, &k) in rest.iter().zip(last) {
        // SAFETY: an array of 16.
        let line = unsafe { s.load(line.as_ptr()) };
        acc[0] = s.fma(line, s.splat(k), acc[0]);
    }
    s.add(acc[0], acc[1])
}

/// `tile = decay tile + k delta^T`; then `tile^T q` and, if there is `MORE`, `tile^T next`.
#[inline(always)]
fn update<S: Simd, const MORE: bool>(
    s: S,
    tile: &mut [[f32; LANES]],
    decay: S::F,
    delta: S::F,
    k: &[f32],
    q: &[f32],
    next: &[f32],
) -> (S::F, S::F) {
    let n = tile.len();
    let mut sums = [[s.splat(0.0); 2]; 2];
    let (twos, rest) = tile.as_chunks_mut::<2>();
    let (keys, last_key) = k[..n].as_chunks::<2>();
    let (queries, last_query) = q[..n].as_chunks::<2>();
    let (nexts, last_next) = next[..n].as_chunks::<2>();
    for (((lines, k), q), next) in twos.iter_mut().zip(keys).zip(queries).zip(nexts) {
        let ([a, b], [first, second]) = (lines, sums);
        sums = [
            update_line::<S, MORE>(s, a, decay, delta, [k[0], q[0], next[0]], first),
            update_line::<S, MORE>(s, b, decay, delta, [k[1], q[1], next[1]], second),
        ];
    }
    for (((line, &k), &q), &next) in rest.iter_mut().zip(last_key).zip(last_query).zip(last_next) {
        sums[0] = update_line::<S, MORE>(s, line, decay, delta, [k, q, next], sums[0]);
    }
    let [[o, product], [other_o, other_product]] = sums;
    (s.add(o, other_o), s.add(product, other_product))
}

/// A line of [`update`], which adds to the sums. A function and not a closure: a closure may become a call,
/// which then runs without the instructions that its caller enables.
#[inline(always)]
fn update_line<S: Simd, const MORE: bool>(
    s: S,
    line: &mut [f32; LANES],
    decay: S::F,
    delta: S::F,
    [k, q, next]: [f32; 3],
    [o, product]: [S::F; 2],
) -> [S::F; 2] {
    // SAFETY: an array of 16.
    let old = unsafe { s.load(line.as_ptr()) };
    let new = s.fma(s.splat(k), delta, s.mul(decay, old));
    // SAFETY: an array of 16.
    unsafe { s.store(line.as_mut_ptr(), new) };
    let o = s.fma(new, s.splat(q), o);
    let product = if MORE {
        s.fma(new, s.splat(next), product)
    } else {
        product
    };
    [o, product]
}

/// `y = rms_norm(y) * silu(z)`, all of one length.
#[inline(always)]
pub(crate) fn gate<S: Simd>(s: S, y: &mut [f32], norm: &[f32], z: &[f32], eps: f32) {
    let scale = super::rows::rms_scale(s, y, eps);
    let (whole, rest) = y.as_chunks_mut::<LANES>();
    let (norms, norm_rest) = norm.as_chunks::<LANES>();
    let (zs, z_rest) = z.as_chunks::<LANES>();
    for ((y, w), z) in whole.iter_mut().zip(norms).zip(zs) {
        gate_line(s, y, w, z, scale);
    }
    if !rest.is_empty() {
        let [mut last, mut w, mut z] = [[0.0; LANES]; 3];
        last[..rest.len()].copy_from_slice(rest);
        w[..rest.len()].copy_from_slice(norm_rest);
        z[..rest.len()].copy_from_slice(z_rest);
        gate_line(s, &mut last, &w, &z, scale);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// 16 values of [`gate`].
#[inline(always)]
fn gate_line<S: Simd>(s: S, y: &mut [f32; LANES], w: &[f32; LANES], z: &[f32; LANES], scale: f32) {
    // SAFETY: arrays of 16.
    unsafe {
        let v = s.mul(s.load(y.as_ptr()), s.splat(scale));
        let v = s.mul(v, s.load(w.as_ptr()));
        s.store(y.as_mut_ptr(), s.silu_mul(s.load(z.as_ptr()), v));
    }
}
