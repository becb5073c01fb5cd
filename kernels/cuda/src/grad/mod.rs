//! Training operations on the device (`nq_kernels::grad`): launchers of `cuda/grad_*.cu`.

pub(super) mod delta;
pub(super) mod gemm;
pub(super) mod layer;
pub(super) mod train;

pub use gemm::LowRank;

use super::delta::{DeviceStates, StatesShape};
use super::driver::{Address, Blas, Buffer, Gpu, LaunchShape, Operands, Staging, Stream};
use super::kernel::{Instance, kernels};
use crate::cuda::grad_rows::GradCopyArgs;
use nq_kernels::delta::DeltaShape;
use nq_kernels::grad::{Allocate, Buffers};
use nq_kernels::{Error, Result};
use nq_model::Dims;
use rayon::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Precision of f32 products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GemmPrecision {
    /// As in f32: cuBLAS computes in f32, nq's kernels with operands in two TF32 parts, within
    /// about `2^-27 k` for sums of k products.
    #[default]
    Full,
    /// Operands rounded to TF32.
    Tf32,
}

/// A GPU as a device of training steps.
pub struct CudaOps {
    gpu: Gpu,
    stream: Stream,
    precision: GemmPrecision,
    blas: Option<Blas>,
    scratch: Mutex<Buffer<f32>>,
    /// Allocated when first needed.
    staging: Mutex<Option<Staging<f32>>>,
    /// Likewise: the state of a sequence, of a recurrence of the shape beside it.
    state: Mutex<Option<(DeltaShape, DeviceStates)>>,
}

/// The test that compares all of these kernels with the CPU's operations, and their bench.
const TEST: &str = "kernels/cuda/tests/cuda/grad.rs::operations_are_those_of_the_cpu";
const BENCH: &str = "training";

/// Number of values that are generated and copied at a time.
const STAGED: usize = 4 << 20;

/// Threads of a block for elementwise work, and for warps that take a row each.
const THREADS: usize = 256;
/// A grid with one block per `each` values.
fn blocks(n: usize, each: usize) -> [usize; 3] {
    [n.div_ceil(each).max(1), 1, 1]
}

kernels! {
    COPY: GradCopyArgs = "grad_copy" in "grad_rows.cu", test TEST, bench BENCH;
}

impl CudaOps {
    /// The device, with a stream of its own. cuBLAS does the products if it is installed
    /// (`NQ_CUBLAS` names its file, or is `off`), otherwise nq's kernels do.
    ///
    /// # Errors
    /// Errors of the driver; a library named by `NQ_CUBLAS` that is unusable.
    pub fn new(gpu: &Gpu, precision: GemmPrecision) -> Result<Self> {
        let mut ops = Self::with_own_products(gpu, precision)?;
        ops.blas = Blas::open(&ops.stream)?;
        Ok(ops)
    }

    /// Like [`CudaOps::new`], without cuBLAS.
    pub fn with_own_products(gpu: &Gpu, precision: GemmPrecision) -> Result<Self> {
        Ok(CudaOps {
            gpu: gpu.clone(),
            stream: gpu.stream()?,
            precision,
            blas: None,
            scratch: Mutex::new(gpu.zeros("partial sums", 1)?),
            staging: Mutex::new(None),
            state: Mutex::new(None),
        })
    }

    /// The implementation of products: cuBLAS and its version, or nq's kernels.
    pub fn products(&self) -> String {
        let own = || "nq's kernels".to_owned();
        self.blas.as_ref().map_or_else(own, Blas::name)
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    pub(super) fn operands(&self, op: &'static str) -> Operands<'_> {
        self.stream.operands(op)
    }

    /// # Safety
    /// See [`Stream::launch`].
    unsafe fn launch<A: Copy>(
        &self,
        kernel: impl Into<Instance<A>>,
        grid: [usize; 3],
        threads: usize,
        args: &A,
    ) -> Result<()> {
        // SAFETY: by contract.
        unsafe { self.launch_shared(kernel, grid, threads, 0, args) }
    }

    /// Launches with `threads` threads per block and bytes of shared memory.
    ///
    /// # Safety
    /// See [`Stream::launch`].
    pub(super) unsafe fn launch_shared<A: Copy>(
        &self,
        kernel: impl Into<Instance<A>>,
        grid: [usize; 3],
        threads: usize,
        shared: usize,
        args: &A,
    ) -> Result<()> {
        let shape = LaunchShape::new(grid, threads).shared(shared);
        // SAFETY: by contract.
        unsafe { self.stream.launch(kernel, shape, args) }
    }

    /// Scratch memory for `n` values. The holder queues the work that uses it; a larger
    /// buffer is allocated only once that work is done.
    fn scratch(&self, n: usize) -> Result<MutexGuard<'_, Buffer<f32>>> {
        let mut scratch = self.scratch.lock().unwrap_or_else(|e| e.into_inner());
        if scratch.len() < n {
            self.stream.synchronize()?;
            *scratch = self.gpu.zeros("partial sums", n)?;
        }
        Ok(scratch)
    }

    /// # Safety
    /// Both hold `n` values; `from` may be null, for zeros.
    unsafe fn copy_values(&self, from: Address, to: Address, n: usize) -> Result<()> {
        let args = GradCopyArgs {
            from,
            to,
            n: n as i64,
        };
        // SAFETY: by contract.
        unsafe { self.launch(&COPY, blocks(n, THREADS), THREADS, &args) }
    }
}

impl Allocate for CudaOps {
    type Floats = Buffer<f32>;
    type Ids = Buffer<u32>;
    type Codes = Buffer<u8>;
    type States = DeviceStates;

    fn floats(&self, what: &'static str, len: usize) -> Result<Buffer<f32>> {
        self.gpu.zeros(what, len)
    }

    fn ids(&self, what: &'static str, len: usize) -> Result<Buffer<u32>> {
        self.gpu.zeros(what, len)
    }

    fn codes(&self, what: &'static str, len: usize) -> Result<Buffer<u8>> {
        self.gpu.zeros(what, len)
    }

    fn states(&self, shape: DeltaShape, layers: usize, slots: usize) -> Result<DeviceStates> {
        let all = StatesShape {
            delta: shape,
            layers,
            places: slots,
            kept: 0,
        };
        DeviceStates::new(&self.gpu, all)
    }

    fn write(&self, to: &mut Buffer<f32>, from: &[f32]) -> Result<()> {
        self.stream.synchronize()?;
        to.write(0, from)
    }
}

impl Buffers for CudaOps {
    fn device(&self) -> String {
        format!("{}, products by {}", self.gpu.info(), self.products())
    }

    fn rows<E: From<Error> + Send>(
        &self,
        what: &'static str,
        Dims { rows, cols }: Dims,
        fill: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Buffer<f32>, E> {
        let mut to = self.gpu.zeros(what, rows * cols)?;
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        // A row longer than a buffer gets a buffer of its length.
        let room = STAGED.max(cols);
        let staging = match &mut *staging {
            Some(staging) if staging.len() >= room => staging,
            other => other.insert(Staging::new(&self.gpu, room)?),
        };
        let step = room / cols.max(1);
        for first in (0..rows).step_by(step.max(1)) {
            let n = step.min(rows - first) * cols;
            let host = staging.turn();
            let by_row = host.values_mut()?[..n].par_chunks_mut(cols).enumerate();
            by_row.try_for_each(|(row, values)| fill(first + row, values))?;
            self.stream.write(&mut to, first * cols, host, 0..n)?;
        }
        Ok(to)
    }

    fn read(&self, from: &Buffer<f32>, to: &mut [f32]) -> Result<()> {
        self.stream.synchronize()?;
        from.read(0, to)
    }

    fn write_codes(&self, to: &mut Buffer<u8>, from: &[u8]) -> Result<()> {
        self.stream.synchronize()?;
        to.write(0, from)
    }

    fn write_ids(&self, to: &mut Buffer<u32>, from: &[u32]) -> Result<()> {
        self.stream.synchronize()?;
        to.write(0, from)
    }

    fn read_ids(&self, from: &Buffer<u32>, to: &mut [u32]) -> Result<()> {
        self.stream.synchronize()?;
        from.read(0, to)
    }

    fn clear(&self, x: &mut Buffer<f32>, n: usize) -> Result<()> {
        let to = self.operands("clear").of("buffer", x, &[n])?;
        // SAFETY: the operand was checked.
        unsafe { self.copy_values(Address::NULL, to, n) }
    }

    fn copy(
        &self,
        (from, start): (&Buffer<f32>, usize),
        (to, at): (&mut Buffer<f32>, usize),
        n: usize,
    ) -> Result<()> {
        let o = self.operands("copy");
        let from = o.part("source", from, start, &[n])?;
        let to = o.part("destination", to, at, &[n])?;
        // SAFETY: both operands were checked.
        unsafe { self.copy_values(from, to, n) }
    }
}
