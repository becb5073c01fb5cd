//! A kernel, as its row of the table says: its argument structure, source, test and bench.
//!
//! A row stands beside the launcher that fills its arguments in (`kernels!`). A launch names a row
//! and passes that row's structure, so that the types agree; that the device agrees on the size is
//! checked when it first hands the kernel out. Kernels over packed weights come as one row of many
//! instances.

use super::pack::PackedKind;
use nq_formats::{Bits, Zeros};
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What the table says of a kernel.
pub struct KernelRow {
    /// What operations, benches and errors call it.
    pub name: &'static str,
    /// Names of its instances in the source, one or more.
    pub instances: &'static [&'static str],
    /// File in `kernels/cuda` that defines them.
    pub source: &'static str,
    /// Bytes of its one argument, a structure passed by value.
    pub args: usize,
    /// The test that holds it against a reference: file of the workspace and function.
    pub test: &'static str,
    /// The function in `kernels/benches/cuda` that times it.
    pub bench: &'static str,
    /// Number of the first instance among all kernels' instances.
    first: OnceLock<usize>,
}

/// Instances of all kernels, at most: a device keeps a place for each.
pub(super) const MOST_INSTANCES: usize = 1024;

/// Instances of the rows that have numbers.
static NUMBERED: AtomicUsize = AtomicUsize::new(0);

impl KernelRow {
    /// The number of an instance among those of all kernels.
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

/// A row, and the type of its argument structure.
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
    /// If there are not so many.
    pub(super) fn instance(&'static self, index: usize) -> Instance<A> {
        assert!(index < self.row.instances.len(), "{}", self.row.name);
        Instance {
            row: &self.row,
            index,
            args: PhantomData,
        }
    }

    /// The instance for weights of `kind` of a row whose names are those of all kinds ([`names`]),
    /// at `suffix`.
    pub(super) fn of_kind(&'static self, suffix: usize, kind: PackedKind) -> Instance<A> {
        self.instance(suffix * KINDS + kind_index(kind))
    }
}

/// What is launched.
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
    /// As the source calls it.
    pub(super) fn name(&self) -> &'static str {
        self.row.instances[self.index]
    }
}

/// Defines rows of the table, and `ROWS`, which lists them:
/// `ID: ArgumentStructure = "name" in "source.cu", test "file::function", bench "function";`,
/// where there are several instances with `, instances LIST` before the semicolon.
macro_rules! kernels {
    ($($id:ident: $args:ty = $name:literal in $source:literal, test $test:expr,
       bench $bench:expr $(, instances $instances:expr)?;)+) => {
        $(
            static $id: $crate::cuda::kernel::Kernel<$args> = $crate::cuda::kernel::Kernel::new(
                $name,
                kernels!(@instances $name $(, $instances)?),
                $source,
                $test,
                $bench,
            );
        )+
        /// The kernels that this file launches.
        pub(in crate::cuda) static ROWS: &[&$crate::cuda::kernel::KernelRow] = &[$(&$id.row),+];
    };
    (@instances $name:literal) => { &[$name] };
    (@instances $name:literal, $instances:expr) => { $instances };
}
pub(super) use kernels;

/// Kinds of packed weights that kernels are compiled for; the last is FP16.
pub(super) const KINDS: usize = 13;

/// Place of a kind in [`names`].
pub(super) fn kind_index(kind: PackedKind) -> usize {
    let PackedKind::Affine {
        bits,
        zeros,
        groups,
    } = kind
    else {
        return KINDS - 1;
    };
    let bits = match bits {
        Bits::B4 => 0,
        _ => 1,
    };
    // Kernels read scales for each 32 inputs, or for each 64.
    let slot = usize::from(groups == 8);
    let zeros = match zeros {
        Zeros::None => 0,
        Zeros::Integer => 1,
        Zeros::Offset => 2,
    };
    (2 * bits + slot) * 3 + zeros
}

/// Names of instances over packed weights, suffix by suffix and in the order of [`kind_index`]: of
/// all `kinds`, or of affine `schemes` alone.
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
            concat!($prefix, "_int8_offset_64", $suffix),
            concat!($prefix, "_int8_sym_32", $suffix),
            concat!($prefix, "_int8_int_32", $suffix),
            concat!($prefix, "_int8_offset_32", $suffix),
            $(concat!($prefix, $last, $suffix),)?
        ]
    };
}
pub(super) use names;
