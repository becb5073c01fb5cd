//! Values in device memory that kernels use as indices into other memory.

use super::gpu::Gpu;
use super::memory::Buffer;
use super::staging::Staging;
use super::stream::Stream;
use bytemuck::Pod;
use nq_kernels::{Error, Result};
use std::fmt::Debug;

/// A value that tells a kernel where to read or write.
pub trait Followed: Pod + Debug {
    /// The bounds that it must be within.
    type Bounds: Copy + Debug;

    /// True if a kernel may use the value as an index within `bounds`.
    fn is_within(&self, bounds: &Self::Bounds) -> bool;
}

/// An id or a row number, which must be below the bound.
impl Followed for u32 {
    type Bounds = usize;

    fn is_within(&self, below: &usize) -> bool {
        (*self as usize) < *below
    }
}

/// Device memory of values within bounds, which are checked when they are written.
pub struct Checked<T: Followed> {
    values: Buffer<T>,
    bounds: T::Bounds,
    /// Staging memory of [`Stream::write_checked`].
    staging: Option<Staging<T>>,
}

impl<T: Followed> Checked<T> {
    /// Allocates `len` copies of `value`; `what` is named in the error if they do not fit.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; [`Error::Shape`] if the value is not within the bounds.
    pub fn new(
        gpu: &Gpu,
        what: &'static str,
        len: usize,
        value: T,
        bounds: T::Bounds,
    ) -> Result<Self> {
        check_bounds(what, &[value], &bounds)?;
        Ok(Checked {
            values: gpu.upload(what, &vec![value; len])?,
            bounds,
            staging: None,
        })
    }

    /// A copy of `values`.
    pub fn upload(gpu: &Gpu, what: &'static str, values: &[T], bounds: T::Bounds) -> Result<Self> {
        check_bounds(what, values, &bounds)?;
        Ok(Checked {
            values: gpu.upload(what, values)?,
            bounds,
            staging: None,
        })
    }

    /// The bounds of all values.
    pub fn bounds(&self) -> &T::Bounds {
        &self.bounds
    }

    /// The values.
    pub fn values(&self) -> &Buffer<T> {
        &self.values
    }

    /// Writes `values` from index `at` on; they are in place when this returns.
    ///
    /// # Errors
    /// [`Error::Shape`] for a value that is not within the bounds, or if they do not fit.
    pub fn write(&mut self, at: usize, values: &[T]) -> Result<()> {
        check_bounds("device write", values, &self.bounds)?;
        self.values.write(at, values)
    }
}

impl Stream {
    /// Like [`Stream::put`], for values that kernels use as indices.
    ///
    /// # Errors
    /// Errors of [`Stream::put`]; [`Error::Shape`] for a value that is not within the bounds.
    pub fn put_checked<T: Followed>(
        &self,
        to: &mut Checked<T>,
        at: usize,
        values: &[T],
    ) -> Result<()> {
        check_bounds("put", values, &to.bounds)?;
        self.put(&mut to.values, at, values)
    }

    /// Writes `values` to the start of `to`, in order with the stream's other work. Waits only if
    /// writes before the latest one are not done.
    ///
    /// # Errors
    /// Errors of [`Checked::write`]; [`Error::DeviceMemory`] at the first call.
    pub(crate) fn write_checked<T: Followed>(
        &self,
        to: &mut Checked<T>,
        values: &[T],
    ) -> Result<()> {
        check_bounds("device write", values, &to.bounds)?;
        self.write_staged(&mut to.values, 0, &mut to.staging, values)
    }
}

fn check_bounds<T: Followed>(op: &'static str, values: &[T], bounds: &T::Bounds) -> Result<()> {
    match values.iter().position(|v| !v.is_within(bounds)) {
        None => Ok(()),
        Some(at) => Err(Error::Shape {
            op,
            what: "a value that kernels follow",
            expected: format!("within {bounds:?}"),
            found: format!("{:?} at {at}", values[at]),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::check_bounds;

    #[test]
    fn ids_past_the_bound_are_refused() {
        assert!(check_bounds::<u32>("a test", &[], &0).is_ok());
        assert!(check_bounds("a test", &[0u32, 6], &7).is_ok());
        let e = check_bounds("a test", &[0u32, 7], &7)
            .unwrap_err()
            .to_string();
        assert!(e.contains("within 7") && e.contains("7 at 1"), "{e}");
        assert!(check_bounds("a test", &[u32::MAX], &7).is_err());
    }
}
