//! The operands of an operation, checked as their addresses are taken.

use super::gpu::Gpu;
use super::locked::Locked;
use super::memory::{Address, Buffer, Mapped, Region};
use super::peers::Common;
use super::stream::Stream;
use bytemuck::Pod;
use nq_kernels::{Error, Result};

/// The operands of one operation in a stream. Every address that a kernel gets comes from here: it
/// belongs to the stream's device, holds as many values as the operation states, and stays valid as long
/// as a graph in which the operation is recorded.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    op: &'static str,
    stream: &'a Stream,
}

impl Stream {
    /// Collects the operands of `op`.
    pub(crate) fn operands(&self, op: &'static str) -> Operands<'_> {
        Operands { op, stream: self }
    }
}

/// The product of sizes; `None` on overflow.
fn product(dims: &[usize]) -> Option<usize> {
    dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d))
}

impl Operands<'_> {
    /// Name of the operation.
    pub(crate) fn op(&self) -> &'static str {
        self.op
    }

    /// The device.
    pub(crate) fn gpu(&self) -> &Gpu {
        self.stream.gpu()
    }

    /// The address of `buffer`, which must hold values of shape `dims`.
    pub(crate) fn of<T: Pod>(
        &self,
        what: &'static str,
        buffer: &Buffer<T>,
        dims: &[usize],
    ) -> Result<Address> {
        self.part(what, buffer, 0, dims)
    }

    /// The address of value `at` of `buffer`, which must hold values of shape `dims` from there on.
    pub(crate) fn part<T: Pod>(
        &self,
        what: &'static str,
        buffer: &Buffer<T>,
        at: usize,
        dims: &[usize],
    ) -> Result<Address> {
        self.region(what, &buffer.region(), at, dims)
    }

    /// The address of `memory`, which must hold values of shape `dims`.
    pub(crate) fn mapped<T: Pod>(
        &self,
        what: &'static str,
        memory: &Mapped<T>,
        dims: &[usize],
    ) -> Result<Address> {
        self.region(what, &memory.region(), 0, dims)
    }

    /// The address of byte `at` of `memory`, which must hold values of shape `dims` from there on.
    pub(crate) fn locked(
        &self,
        what: &'static str,
        memory: &Locked,
        at: usize,
        dims: &[usize],
    ) -> Result<Address> {
        self.region(what, &memory.region(), at, dims)
    }

    /// The address of `buffer`, if given, which must hold values of shape `dims`; null otherwise.
    pub(crate) fn optional<T: Pod>(
        &self,
        what: &'static str,
        buffer: Option<&Buffer<T>>,
        dims: &[usize],
    ) -> Result<Address> {
        buffer.map_or(Ok(Address::NULL), |b| self.of(what, b, dims))
    }

    /// The address of value `at` of `memory`, which may be another device's, and must hold values of shape `dims` from
    /// there on.
    pub(crate) fn common<T: Pod>(
        &self,
        what: &'static str,
        memory: &Common<T>,
        at: usize,
        dims: &[usize],
    ) -> Result<Address> {
        let region = memory.region();
        let owner = region.memory.gpu();
        if !region.memory.is_on_host() && !self.gpu().reaches(owner) {
            let expected = format!("memory that {} reaches", self.gpu().info());
            return self.refuse(what, expected, owner.info());
        }
        self.values(what, &region, at, dims)
    }

    fn region(
        &self,
        what: &'static str,
        region: &Region<'_>,
        at: usize,
        dims: &[usize],
    ) -> Result<Address> {
        if !region.memory.gpu().is(self.gpu()) {
            let found = region.memory.gpu().info().to_string();
            return self.refuse(what, format!("memory of {}", self.gpu().info()), found);
        }
        self.values(what, region, at, dims)
    }

    fn values(
        &self,
        what: &'static str,
        region: &Region<'_>,
        at: usize,
        dims: &[usize],
    ) -> Result<Address> {
        let end = product(dims).and_then(|n| n.checked_add(at));
        if end.is_none_or(|end| end > region.len) {
            let expected = match at {
                0 => format!("{dims:?} values"),
                at => format!("{dims:?} values from {at} on"),
            };
            return self.refuse(what, expected, format!("{} values", region.len));
        }
        self.stream.keep(region.memory);
        Ok(region.memory.address(at * region.value_bytes))
    }

    /// An error about operand `what`.
    pub(crate) fn refuse<T>(
        &self,
        what: &'static str,
        expected: impl ToString,
        found: impl ToString,
    ) -> Result<T> {
        Err(Error::Shape {
            op: self.op,
            what,
            expected: expected.to_string(),
            found: found.to_string(),
        })
    }

    /// An error unless `found` is at least `expected`.
    pub(crate) fn at_least(&self, what: &'static str, expected: usize, found: usize) -> Result<()> {
        if found >= expected {
            Ok(())
        } else {
            self.refuse(what, format!("at least {expected}"), found)
        }
    }

    /// An error unless `found` is at most `expected`.
    pub(crate) fn at_most(&self, what: &'static str, expected: usize, found: usize) -> Result<()> {
        if found <= expected {
            Ok(())
        } else {
            self.refuse(what, format!("{expected} at most"), found)
        }
    }

    /// An error unless `found` is a nonzero multiple of `unit`.
    pub(crate) fn multiple(&self, what: &'static str, unit: usize, found: usize) -> Result<()> {
        if found > 0 && found.is_multiple_of(unit) {
            Ok(())
        } else {
            self.refuse(what, format!("a multiple of {unit}"), found)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::product;

    #[test]
    fn sizes_beyond_counting_have_no_product() {
        assert_eq!(product(&[]), Some(1));
        assert_eq!(product(&[3, 0, usize::MAX]), Some(0));
        assert_eq!(product(&[1 << 40, 1 << 40]), None);
    }
}
