//! Keys and values of a head, as they are stored.

use crate::kv::KvView;
use crate::simd::Simd;
use half::f16;

/// Access to the vectors of one head in a page, as they are stored: lines of a stride, which are dimensions of 16
/// keys, or values.
pub(super) trait Lines: Copy {
    /// True if vectors have factors.
    const SCALED: bool;
    /// 16 stored values of line `line` from `i` on.
    unsafe fn load<S: Simd>(self, s: S, line: usize, i: usize) -> S::F;
    /// One of them.
    unsafe fn value(self, line: usize, i: usize) -> f32;
    /// The factor of the vector of position `at`.
    unsafe fn scale(self, at: usize) -> f32;
    /// The scales of 16 positions.
    unsafe fn scales<S: Simd>(self, s: S, at: usize) -> S::F;
}

#[derive(Clone, Copy)]
pub(super) struct F32Lines(*const f32, usize);
#[derive(Clone, Copy)]
pub(super) struct F16Lines(*const f16, usize);
#[derive(Clone, Copy)]
pub(super) struct Int8Lines(*const i8, *const f16, usize);

/// [`Lines`] of values without factors.
macro_rules! plain_lines {
    ($name:ident, $load:ident, $value:expr) => {
        impl Lines for $name {
            const SCALED: bool = false;
            #[inline(always)]
            unsafe fn load<S: Simd>(self, s: S, line: usize, i: usize) -> S::F {
                // SAFETY: the caller keeps the line and `i .. i + 16` inside the page.
                unsafe { s.$load(self.0.add(line * self.1 + i)) }
            }
            #[inline(always)]
            unsafe fn value(self, line: usize, i: usize) -> f32 {
                // SAFETY: as above.
                $value(unsafe { *self.0.add(line * self.1 + i) })
            }
            #[inline(always)]
            unsafe fn scale(self, _: usize) -> f32 {
                1.0
            }
            #[inline(always)]
            unsafe fn scales<S: Simd>(self, s: S, _: usize) -> S::F {
                s.splat(1.0)
            }
        }
    };
}
plain_lines!(F32Lines, load, f32::from);
plain_lines!(F16Lines, load_f16, f16::to_f32);

impl Lines for Int8Lines {
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, line: usize, i: usize) -> S::F {
        // SAFETY: the caller keeps the line and `i .. i + 16` inside the page.
        unsafe { s.load_i8(self.0.add(line * self.2 + i)) }
    }
    #[inline(always)]
    unsafe fn value(self, line: usize, i: usize) -> f32 {
        // SAFETY: as above.
        f32::from(unsafe { *self.0.add(line * self.2 + i) })
    }
    #[inline(always)]
    unsafe fn scale(self, at: usize) -> f32 {
        // SAFETY: as above, of the position.
        unsafe { *self.1.add(at) }.to_f32()
    }
    #[inline(always)]
    unsafe fn scales<S: Simd>(self, s: S, at: usize) -> S::F {
        // SAFETY: as above, of 16 positions.
        unsafe { s.load_f16(self.1.add(at)) }
    }
}

/// The pages of one head; page `i` of the sequence as [`Lines`] of `stride` values.
pub(super) trait Pages: Copy {
    type Lines: Lines;
    unsafe fn page(self, i: usize, stride: usize) -> Self::Lines;
}

#[derive(Clone, Copy)]
pub(super) struct F32Pages<'a>(pub(super) KvView<'a>, pub(super) &'a [f32]);
#[derive(Clone, Copy)]
pub(super) struct F16Pages<'a>(pub(super) KvView<'a>, pub(super) &'a [f16]);
#[derive(Clone, Copy)]
pub(super) struct Int8Pages<'a>(
    pub(super) KvView<'a>,
    pub(super) &'a [i8],
    pub(super) &'a [f16],
);

impl Pages for F32Pages<'_> {
    type Lines = F32Lines;
    #[inline(always)]
    unsafe fn page(self, i: usize, stride: usize) -> F32Lines {
        let at = self.0.page_row(i) * self.0.head_dim;
        // SAFETY: a sequence's pages lie in the pool.
        F32Lines(unsafe { self.1.as_ptr().add(at) }, stride)
    }
}

impl Pages for F16Pages<'_> {
    type Lines = F16Lines;
    #[inline(always)]
    unsafe fn page(self, i: usize, stride: usize) -> F16Lines {
        let at = self.0.page_row(i) * self.0.head_dim;
        // SAFETY: a sequence's pages lie in the pool.
        F16Lines(unsafe { self.1.as_ptr().add(at) }, stride)
    }
}

impl Pages for Int8Pages<'_> {
    type Lines = Int8Lines;
    #[inline(always)]
    unsafe fn page(self, i: usize, stride: usize) -> Int8Lines {
        let row = self.0.page_row(i);
        // SAFETY: a sequence's pages lie in the pool.
        unsafe {
            let codes = self.1.as_ptr().add(row * self.0.head_dim);
            Int8Lines(codes, self.2.as_ptr().add(row), stride)
        }
    }
}

/// Calls `$body` with the view's [`Pages`].
macro_rules! with_pages {
    ($view:expr, |$pages:ident| $body:expr) => {
        match $view.data {
            $crate::kv::KvData::F32(d) => {
                let $pages = $crate::ops::attention::lines::F32Pages($view, d);
                $body
            }
            $crate::kv::KvData::F16(d) => {
                let $pages = $crate::ops::attention::lines::F16Pages($view, d);
                $body
            }
            $crate::kv::KvData::Int8 { codes, scales } => {
                let $pages = $crate::ops::attention::lines::Int8Pages($view, codes, scales);
                $body
            }
        }
    };
}
pub(super) use with_pages;
