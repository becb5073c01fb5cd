//! A kernel's row of the table: its argument structure, source, test and bench.
//!
//! A row is in the same file as the launcher that fills in its arguments (`kernels!`). A launch names
//! a row and passes that row's structure, so that the types agree; whether the device expects the same
//! size is checked when it first hands out the kernel. Kernels over packed weights are one row with
//! many instances.

use super::pack::PackedKind;
use nq_formats::{Bits, Zeros};
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A row of the table.
pub struct KernelRow {
    /// Its name in operations, benches and errors.
    pub name: &'static str,
    /// Names of its instances in the source, one or more.
    pub instances: &'static [&'static str],
    /// File in `kernels/cuda` that defines them.
    pub source: &'static str,
    /// Size in bytes of its single argument, a structure passed by value.
    pub args: usize,
    /// The test that compares it with a reference: file in the workspace and function.
    pub test: &'static str,
    /// The function in `kernels/cuda/benches/cuda` that times it.
    pub bench: &'static str,
    /// Number of the first instance among all kernels' instances.
    first: OnceLock<usize>,
}

/// Most instances of all kernels together: a device keeps a slot for each.
pub(super) const MOST_INSTANCES: usize = 1024;

/// Number of instances in the rows that have been numbered.
static NUMBERED: AtomicUsize = AtomicUsize::new(0);

impl KernelRow {
    /// The number of an instance among the instances of all kernels.
    ///
    /// # Panics
    /// If there are more than [`MOST_INSTANCES`].
    pub(super) fn number(&self, instance: usize) -> usize {
        let count = self.instances.len();
        let first = self.first.get_or_init(|| {
            let first = NUMBERED.fetch_add(count, Ordering::Relaxed);
            assert!(first + count <= MOST_INSTANCES, "{}", self.name);
            first
        });
        first + instance
    }
}

/// A row with the type of its argument structure.
pub(crate) struct Kernel<A> {
    pub(super) row: KernelRow,
    args: PhantomData<fn(A)>,
}

impl<A: Copy> Kernel<A> {
    pub(super) const fn new(
        name: &'static str,
        instances: &'static [&'static str],
        source: &'static str,
        test: &'static str,
        bench: &'static str,
    ) -> Self {
        Kernel {
            row: KernelRow {
                name,
                instances,
                source,
                args: size_of::<A>(),
                test,
                bench,
                first: OnceLock::new(),
            },
            args: PhantomData,
        }
    }

    /// Instance `index`.
    ///
    /// # Panics
    /// If the row does not have this many instances.
    pub(super) fn instance(&'static self, index: usize) -> Instance<A> {
        assert!(index < self.row.instances.len(), "{}", self.row.name);
        Instance {
            row: &self.row,
            index,
            args: PhantomData,
        }
    }

    /// The instance at `suffix` for weights of `kind`, in a row whose instances cover all kinds
    /// ([`names`]).
    pub(super) fn of_kind(&'static self, suffix: usize, kind: PackedKind) -> Instance<A> {
        self.instance(suffix * KINDS + kind_index(kind))
    }
}

/// An instance of a kernel, ready to be launched.
pub(crate) struct Instance<A> {
    pub(super) row: &'static KernelRow,
    pub(super) index: usize,
    args: PhantomData<fn(A)>,
}

impl<A> Clone for Instance<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Instance<A> {}

impl<A: Copy> From<&'static Kernel<A>> for Instance<A> {
    fn from(kernel: &'static Kernel<A>) -> Self {
        kernel.instance(0)
    }
}

impl<A> Instance<A> {
    /// Its name in the source.
    pub(super) fn name(&self) -> &'static str {
        self.row.instances[self.index]
    }
}

/// Defines rows of the table, and `ROWS`, which lists them:
/// `ID: ArgumentStructure = "name" in "source.cu", test "file::function", bench "function";`.
/// A row with several instances has `, instances LIST` before the semicolon.
macro_rules! kernels {
    ($($id:ident: $args:ty = $name:literal in $source:literal, test $test:expr,
       bench $bench:expr $(, instances $instances:expr)?;)+) => {
        $(
            static $id: $crate::kernel::Kernel<$args> = $crate::kernel::Kernel::new(
                $name,
                kernels!(@instances $name $(, $instances)?),
                $source,
                $test,
                $bench,
            );
        )+
        /// The kernels that this file launches.
        pub(crate) static ROWS: &[&$crate::kernel::KernelRow] = &[$(&$id.row),+];
    };
    (@instances $name:literal) => { &[$name] };
    (@instances $name:literal, $instances:expr) => { $instances };
}
pub(super) use kernels;

/// Number of kinds of packed weights for which kernels are compiled; the last is FP16.
pub(super) const KINDS: usize = SCHEMES + 1;
/// Of these, kinds of integer codes; the last stands for those of blocks (`with_block_scheme` of `cuda/weights.cuh`).
pub(super) const SCHEMES: usize = 18;
/// The first of them are INT4 with a scale for 64 inputs or more; those from TWO_LEVEL on have scales in two
/// levels.
pub(super) const UNIFORM: usize = 3;
pub(super) const TWO_LEVEL: usize = 11;

/// Index of a kind in [`names`].
pub(super) fn kind_index(kind: PackedKind) -> usize {
    let PackedKind::Affine {
        bits,
        zeros,
        groups,
        two_level,
        ..
    } = kind
    else {
        return KINDS - 1;
    };
    if kind.block_scheme().is_some() {
        return SCHEMES - 1;
    }
    // Kernels read a scale per 32 inputs, or per 64.
    let slot = usize::from(groups == 8);
    if two_level {
        return TWO_LEVEL + 2 * (bits.width() - 4) + slot;
    }
    let bits = match bits {
        Bits::B4 => 0,
        _ => 1,
    };
    let zeros = match zeros {
        Zeros::None => 0,
        Zeros::Integer => 1,
        Zeros::Offset => 2,
    };
    let index = (2 * bits + slot) * 3 + zeros;
    // Offsets of INT8 are those of 32 inputs.
    index - usize::from(index > 8)
}

/// Names of instances over packed weights, suffix by suffix, each in the order of [`kind_index`]: for
/// all `kinds`, or for affine `schemes` alone.
macro_rules! names {
    (kinds $prefix:literal; $($suffix:literal),+) => {
        <[_]>::as_flattened(&[$(names!(@ ["_fp16"] $prefix, $suffix)),+])
    };
    (schemes $prefix:literal; $($suffix:literal),+) => {
        <[_]>::as_flattened(&[$(names!(@ [] $prefix, $suffix)),+])
    };
    (@ [$($last:literal)?] $prefix:literal, $suffix:literal) => {
        [
            concat!($prefix, "_int4_sym_64", $suffix),
            concat!($prefix, "_int4_int_64", $suffix),
            concat!($prefix, "_int4_offset_64", $suffix),
            concat!($prefix, "_int4_sym_32", $suffix),
            concat!($prefix, "_int4_int_32", $suffix),
            concat!($prefix, "_int4_offset_32", $suffix),
            concat!($prefix, "_int8_sym_64", $suffix),
            concat!($prefix, "_int8_int_64", $suffix),
            concat!($prefix, "_int8_sym_32", $suffix),
            concat!($prefix, "_int8_int_32", $suffix),
            concat!($prefix, "_int8_offset_32", $suffix),
            concat!($prefix, "_int4_int_64_scales8", $suffix),
            concat!($prefix, "_int4_int_32_scales8", $suffix),
            concat!($prefix, "_int5_int_64_scales8", $suffix),
            concat!($prefix, "_int5_int_32_scales8", $suffix),
            concat!($prefix, "_int6_sym_64_scales8", $suffix),
            concat!($prefix, "_int6_sym_32_scales8", $suffix),
            concat!($prefix, "_blocks", $suffix),
            $(concat!($prefix, $last, $suffix),)?
        ]
    };
}
pub(super) use names;
