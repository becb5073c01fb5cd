//! cuBLAS, if it is installed: products of f32 matrices.
//!
//! NVIDIA's library is not part of a driver, so it is loaded when first needed, and callers have
//! kernels of their own for machines without it. Only the functions that are called are looked up, in
//! whichever version is found: they are the same in all versions.

use super::gpu::Gpu;
use super::memory::{Address, Buffer};
use super::stream::Stream;
use cudarc::cublas::sys::{
    cublasComputeType_t as Compute, cublasGemmAlgo_t as Algorithm, cublasHandle_t as Handle,
    cublasOperation_t as Operation, cudaDataType as Type,
};
use cudarc::driver::sys::CUstream;
use libloading::Library;
use nq_kernels::grad::Gemm;
use nq_kernels::{Error, Result};
use std::env;
use std::ffi::{OsStr, c_int, c_longlong, c_void};
use std::fmt::Display;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// Environment variable with the library's path, or `off`.
pub(crate) const VARIABLE: &str = "NQ_CUBLAS";

/// File names tried otherwise: the newest that the loader knows, then those of the toolkit.
const NAMES: [&str; 4] = [
    "libcublas.so.13",
    "libcublas.so.12",
    "libcublas.so.11",
    "/usr/local/cuda/lib64/libcublas.so",
];

/// Size of the library's workspace: NVIDIA's recommendation for its largest chips
/// (cuBLAS documentation, `cublasSetWorkspace`). Provided so that it allocates none by itself.
const WORKSPACE: usize = 32 << 20;

/// Result of a function; 0 is success.
type Status = c_int;
type Create = unsafe extern "C" fn(*mut Handle) -> Status;
type Destroy = unsafe extern "C" fn(Handle) -> Status;
type SetStream = unsafe extern "C" fn(Handle, CUstream) -> Status;
type SetWorkspace = unsafe extern "C" fn(Handle, *mut c_void, usize) -> Status;
type GetVersion = unsafe extern "C" fn(Handle, *mut c_int) -> Status;
type GemmStridedBatchedEx = unsafe extern "C" fn(
    Handle,
    Operation,
    Operation,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    Type,
    c_int,
    c_longlong,
    *const c_void,
    Type,
    c_int,
    c_longlong,
    *const c_void,
    *mut c_void,
    Type,
    c_int,
    c_longlong,
    c_int,
    Compute,
    Algorithm,
) -> Status;

/// A matrix of a product, row-major: its start, and the distance between rows in values.
#[derive(Clone, Copy)]
pub(crate) struct Side {
    pub(crate) at: Address,
    pub(crate) ld: usize,
}

/// The library, bound to one stream.
pub(crate) struct Blas {
    gpu: Gpu,
    // One call at a time: calls share the handle's workspace.
    handle: Mutex<Owned>,
    gemm: GemmStridedBatchedEx,
    destroy: Destroy,
    version: c_int,
    _workspace: Buffer<u8>,
    // Last field, so that nothing outlives its code.
    _library: Library,
}

struct Owned(Handle);

// SAFETY: the handle may be used from any thread, one at a time, which the mutex around it
// ensures, once the context is current there.
unsafe impl Send for Owned {}

fn failed(name: &OsStr, why: &dyn Display) -> Error {
    Error::Cuda {
        what: "using cuBLAS",
        why: format!("{}: {why} ({VARIABLE}=off does without)", name.display()),
    }
}

/// Looks up a function of the library.
///
/// # Safety
/// `F` is its type.
unsafe fn symbol<F: Copy>(name: &OsStr, library: &Library, function: &str) -> Result<F> {
    // SAFETY: by contract.
    let found = unsafe { library.get::<F>(function) };
    found.map(|f| *f).map_err(|e| failed(name, &e))
}

impl Blas {
    /// Loads the library, with its work queued in `stream`; `None` if none is installed or the user
    /// disabled it.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the library that the user names, or each of those installed, is
    /// unusable.
    pub(crate) fn open(stream: &Stream) -> Result<Option<Self>> {
        // SAFETY: the library's initializers are NVIDIA's own.
        let load = |name: &OsStr| unsafe { Library::new(name) };
        match env::var_os(VARIABLE).filter(|v| !v.is_empty()) {
            Some(v) if v == "off" => Ok(None),
            Some(path) => {
                let library = load(&path).map_err(|e| failed(&path, &e))?;
                Self::bind(&path, library, stream).map(Some)
            }
            None => {
                let mut refusal = None;
                for name in NAMES.map(OsStr::new) {
                    let Ok(library) = load(name) else { continue };
                    match Self::bind(name, library, stream) {
                        Ok(blas) => return Ok(Some(blas)),
                        Err(e) => refusal = refusal.or(Some(e)),
                    }
                }
                refusal.map_or(Ok(None), Err)
            }
        }
    }

    fn bind(name: &OsStr, library: Library, stream: &Stream) -> Result<Self> {
        let gpu = stream.gpu().clone();
        gpu.0.bind()?;
        // SAFETY: the types are those in the library's headers.
        let (create, destroy, set_stream, set_workspace, get_version, gemm) = unsafe {
            (
                symbol::<Create>(name, &library, "cublasCreate_v2")?,
                symbol::<Destroy>(name, &library, "cublasDestroy_v2")?,
                symbol::<SetStream>(name, &library, "cublasSetStream_v2")?,
                symbol::<SetWorkspace>(name, &library, "cublasSetWorkspace_v2")?,
                symbol::<GetVersion>(name, &library, "cublasGetVersion_v2")?,
                symbol::<GemmStridedBatchedEx>(name, &library, "cublasGemmStridedBatchedEx")?,
            )
        };
        let workspace: Buffer<u8> = gpu.zeros("cuBLAS's workspace", WORKSPACE)?;
        let place = workspace.range("cuBLAS's workspace", 0, WORKSPACE)?;
        let mut handle: Handle = ptr::null_mut();
        let mut version = 0;
        let call = |what: &str, status: Status| match status {
            0 => Ok(()),
            status => Err(failed(name, &format!("{what} answers {status}"))),
        };
        // SAFETY: the context is current; the handle was just created; stream and workspace
        // live as long as it. The stream is set first, since setting it would reset the workspace.
        unsafe {
            call("cublasCreate", create(&raw mut handle))?;
            let ready = call("cublasSetStream", set_stream(handle, stream.raw()))
                .and_then(|()| {
                    let at = place.0 as *mut c_void;
                    call("cublasSetWorkspace", set_workspace(handle, at, WORKSPACE))
                })
                .and_then(|()| call("cublasGetVersion", get_version(handle, &raw mut version)));
            if let Err(e) = ready {
                destroy(handle);
                return Err(e);
            }
        }
        Ok(Blas {
            gpu,
            handle: Mutex::new(Owned(handle)),
            gemm,
            destroy,
            version,
            _workspace: workspace,
            _library: library,
        })
    }

    /// The library and its version.
    pub(crate) fn name(&self) -> String {
        // 11.x and later: major * 10000 + minor * 100 + patch.
        let (major, minor) = (self.version / 10_000, self.version / 100 % 100);
        format!("cuBLAS {major}.{minor}")
    }

    /// Queues `C (+)= alpha op(A) op(B)`, with operands rounded to TF32 if `tf32`, otherwise in f32.
    ///
    /// # Safety
    /// The operands have the shapes given by `g`, and exist until the stream is waited for.
    ///
    /// # Errors
    /// A shape beyond the library's integers; errors of the library.
    pub(crate) unsafe fn product(
        &self,
        g: Gemm,
        a: Side,
        b: Side,
        c: Side,
        tf32: bool,
    ) -> Result<()> {
        let failed = |why: String| Error::Cuda {
            what: "multiplying matrices by cuBLAS",
            why,
        };
        let size = |n: usize| {
            c_int::try_from(n).map_err(|_| failed(format!("{n} is beyond what it counts to")))
        };
        let op = |transposed| {
            if transposed {
                Operation::CUBLAS_OP_T
            } else {
                Operation::CUBLAS_OP_N
            }
        };
        let pointer = |s: Side| s.at.0 as *const c_void;
        let stride = |n: usize| n as c_longlong;
        let compute = if tf32 {
            Compute::CUBLAS_COMPUTE_32F_FAST_TF32
        } else {
            Compute::CUBLAS_COMPUTE_32F
        };
        let beta = if g.accumulate { 1.0f32 } else { 0.0 };
        let (m, n, k, batch) = (size(g.m)?, size(g.n)?, size(g.k)?, size(g.batch)?);
        let (lda, ldb, ldc) = (size(a.ld)?, size(b.ld)?, size(c.ld)?);
        let float = Type::CUDA_R_32F;
        self.gpu.0.bind()?;
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        // The library's matrices are column-major: C^T = op(B)^T op(A)^T.
        // SAFETY: by contract; the factors are read before the call returns, which is the
        // library's default.
        let status = unsafe {
            (self.gemm)(
                handle.0,
                op(g.tb),
                op(g.ta),
                n,
                m,
                k,
                (&raw const g.alpha).cast(),
                pointer(b),
                float,
                ldb,
                stride(g.k * g.n),
                pointer(a),
                float,
                lda,
                stride(g.m * g.k),
                (&raw const beta).cast(),
                c.at.0 as *mut c_void,
                float,
                ldc,
                stride(g.m * g.n),
                batch,
                compute,
                Algorithm::CUBLAS_GEMM_DEFAULT,
            )
        };
        match status {
            0 => Ok(()),
            status => Err(failed(format!(
                "{}: status {status} for {} x {} x {}, {} at once",
                self.name(),
                g.m,
                g.n,
                g.k,
                g.batch
            ))),
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let handle = self
            .handle
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if self.gpu.0.bind().is_ok() {
            // SAFETY: created by `load`, destroyed once. There is no one to report a failure to.
            unsafe { (self.destroy)(handle.0) };
        }
    }
}
