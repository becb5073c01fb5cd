//! Memory that kernels read and write: cache-line aligned buffers, and slices
//! of which several threads write disjoint parts.

use memmap2::MmapOptions;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// Buffers of at least this size are memory-mapped: their pages take no memory before they are
/// written, and are zero without being cleared.
const MAPPED: usize = 4 << 20;

/// Alignment of mapped buffers: that of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Types for which all-zero bytes are a valid value and that need no dropping.
pub(crate) trait Plain: Copy + Send + Sync + 'static {}
impl Plain for u8 {}
impl Plain for i8 {}
impl Plain for i32 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for f32 {}
impl Plain for half::f16 {}

/// Zero-initialised memory mapped from the system; unmapped on drop.
struct Mapping {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: owns its memory; writes to it go through the buffers carved from it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `bytes`, aligned to huge pages, and backed by them if `huge`; `None` if the
    /// system refuses or has no such call.
    #[cfg(unix)]
    fn new(bytes: usize, huge: bool) -> Option<Self> {
        let length = bytes.checked_add(HUGE_PAGE)?;
        // SAFETY: a new private anonymous mapping touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANON,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let mapping = Mapping {
            base: NonNull::new(base.cast())?,
            length,
        };
        #[cfg(target_os = "linux")]
        if huge {
            // SAFETY: advice on the mapping just made; refusal only costs speed.
            unsafe { libc::madvise(base, length, libc::MADV_HUGEPAGE) };
        }
        #[cfg(not(target_os = "linux"))]
        let _ = huge;
        Some(mapping)
    }

    #[cfg(not(unix))]
    fn new(_bytes: usize, _huge: bool) -> Option<Self> {
        None
    }

    /// Start of the aligned memory.
    fn start(&self) -> NonNull<u8> {
        let offset = self.base.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: the mapping has HUGE_PAGE bytes to spare.
        unsafe { self.base.add(offset) }
    }
}

#[cfg(unix)]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the owner of the mapping; buffers carved from it hold it alive.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// The mapping that small weights are carved from, and the bytes already taken. Huge pages
/// are larger than many weights: sharing them wastes none.
static ARENA: Mutex<Option<(Arc<Mapping>, usize)>> = Mutex::new(None);

/// Bytes of one arena; larger weights get a mapping of their own.
const ARENA_BYTES: usize = 32 << 20;

/// A zero-initialised buffer aligned to cache lines.
pub(crate) struct Buffer<T: Plain> {
    data: NonNull<T>,
    len: usize,
    /// The mapping that the memory belongs to; `None` for heap memory.
    mapping: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: a buffer owns plain values, as a `Vec` does.
unsafe impl<T: Plain> Send for Buffer<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Plain> Sync for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    /// `len` zeros for weights, on huge pages next to the previous weights. Streaming
    /// through 4 KiB pages costs a TLB miss every 64 cache lines.
    pub(crate) fn weights(len: usize) -> Self {
        let bytes = Self::layout(len).size().next_multiple_of(64);
        if len == 0 || bytes > ARENA_BYTES {
            return Self::zeroed(len);
        }
        let mut arena = ARENA.lock().unwrap_or_else(PoisonError::into_inner);
        // Weights of which none is left keep no memory: another model begins with a mapping of its own, so that what it
        // takes does not depend on what was loaded before it.
        let is_done = |mapping: &Arc<Mapping>, used| used > 0 && Arc::strong_count(mapping) == 1;
        if arena
            .as_ref()
            .is_none_or(|(mapping, used)| used + bytes > ARENA_BYTES || is_done(mapping, *used))
        {
            *arena = Mapping::new(ARENA_BYTES, true).map(|m| (Arc::new(m), 0));
        }
        let Some((mapping, used)) = &mut *arena else {
            return Self::zeroed(len);
        };
        // SAFETY: `used + bytes` is within the mapping, and taken only once.
        let data = unsafe { mapping.start().add(*used) }.cast();
        *used += bytes;
        Buffer {
            data,
            len,
            mapping: Some(Arc::<Mapping>::clone(mapping)),
        }
    }

    /// `len` zeros, on huge pages if large.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self::allocate(len, true)
    }

    /// `len` zeros that take memory in small pages as they are written: for caches of
    /// which perhaps only the start is used.
    pub(crate) fn sparse(len: usize) -> Self {
        Self::allocate(len, false)
    }

    fn allocate(len: usize, huge: bool) -> Self {
        if len == 0 {
            return Buffer {
                data: NonNull::dangling(),
                len,
                mapping: None,
            };
        }
        let layout = Self::layout(len);
        if layout.size() >= MAPPED
            && let Some(mapping) = Mapping::new(layout.size(), huge)
        {
            return Buffer {
                data: mapping.start().cast(),
                len,
                mapping: Some(Arc::new(mapping)),
            };
        }
        // SAFETY: the layout is not empty; zero bytes are a value of `T: Plain`.
        let data = unsafe { alloc_zeroed(layout) }.cast::<T>();
        let Some(data) = NonNull::new(data) else {
            handle_alloc_error(layout)
        };
        Buffer {
            data,
            len,
            mapping: None,
        }
    }

    /// Gives the memory of what the buffer holds back to the system, but for pages that it shares with others: of a mapping
    /// that others are carved from, too.
    fn discard(self) {
        #[cfg(unix)]
        if self.mapping.is_some() {
            // SAFETY: asks for a number.
            let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) });
            let page = page.unwrap_or(HUGE_PAGE);
            let start = self.data.as_ptr().cast::<u8>();
            let before = start.align_offset(page);
            let whole = size_of_val(&*self).saturating_sub(before) / page * page;
            // SAFETY: whole pages of plain values in a mapping, which nobody reads any more.
            unsafe {
                libc::madvise(
                    start.wrapping_add(before).cast(),
                    whole,
                    libc::MADV_DONTNEED,
                )
            };
        }
    }

    fn layout(len: usize) -> Layout {
        let bytes = len.checked_mul(size_of::<T>());
        bytes
            .and_then(|bytes| Layout::from_size_align(bytes, 64).ok())
            .expect("a length that fits the address space")
    }

    /// Makes room for `len` values; their contents are then unspecified.
    pub(crate) fn reserve(&mut self, len: usize) -> &mut [T] {
        if self.len < len {
            *self = Self::zeroed(len.next_power_of_two());
        }
        &mut self[..len]
    }
}

impl<T: Plain> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        let mut copy = Self::sparse(self.len);
        copy.copy_from_slice(self);
        copy
    }
}

impl<T: Plain> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer of {}", self.len)
    }
}

impl<T: Plain> Default for Buffer<T> {
    fn default() -> Self {
        Self::zeroed(0)
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.mapping.is_none() && self.len > 0 {
            // SAFETY: allocated in `allocate` with this layout.
            unsafe { dealloc(self.data.as_ptr().cast(), Self::layout(self.len)) };
        }
    }
}

impl<T: Plain> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised values, owned.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: `len` initialised values, owned and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

/// A file for weights that memory has no room for. The system keeps in memory what is read of it, as far as there is room.
/// It has no name, so that nothing is left of it when the process ends, however it ends.
pub(crate) struct WeightFile(File);

impl WeightFile {
    /// An empty file in `folder`.
    ///
    /// # Errors
    /// The system's, of a folder in which no file can be made.
    pub(crate) fn new(folder: &Path) -> io::Result<Self> {
        tempfile::tempfile_in(folder).map(WeightFile)
    }

    /// Moves what `buffer` holds behind what the file holds.
    ///
    /// # Errors
    /// The system's; of a full disk, for instance. The buffer is as it was then.
    pub(crate) fn take<T: Plain>(&mut self, buffer: &mut Buffer<T>) -> io::Result<()> {
        let size = size_of_val(&**buffer);
        if size == 0 {
            return Ok(());
        }
        // SAFETY: plain values are bytes that may be read.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.data.as_ptr().cast(), size) };
        // A mapping begins with a page.
        let end = self.0.seek(SeekFrom::End(0))?;
        let at = self
            .0
            .seek(SeekFrom::Start(end.next_multiple_of(HUGE_PAGE as u64)))?;
        self.0.write_all(bytes)?;
        // What is not on disk yet takes memory.
        self.0.sync_data()?;
        // SAFETY: nobody else has the file, which has no name, and what was written to it is not written again; what would be
        // written to the mapping stays in memory.
        let mut mapping = unsafe { MmapOptions::new().offset(at).len(size).map_copy(&self.0)? };
        let data = NonNull::new(mapping.as_mut_ptr()).ok_or(io::ErrorKind::OutOfMemory)?;
        let moved = Buffer {
            data: data.cast(),
            len: buffer.len,
            mapping: Some(Arc::new(mapping)),
        };
        std::mem::replace(buffer, moved).discard();
        Ok(())
    }
}

/// A mutable slice whose disjoint parts the members of a team write.
pub(crate) struct SharedSlice<'a, T> {
    data: *mut T,
    len: usize,
    _slice: PhantomData<&'a mut [T]>,
}

// SAFETY: stands for a `&mut [T]` that is split among threads; `part`'s contract keeps the
// parts disjoint.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        SharedSlice {
            data: slice.as_mut_ptr(),
            len: slice.len(),
            _slice: PhantomData,
        }
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The elements of `range`, as another shared slice.
    pub(crate) fn within(&self, range: Range<usize>) -> SharedSlice<'_, T> {
        assert!(range.start <= range.end && range.end <= self.len);
        SharedSlice {
            // SAFETY: inside the slice.
            data: unsafe { self.data.add(range.start) },
            len: range.len(),
            _slice: PhantomData,
        }
    }

    /// The elements of `range`.
    ///
    /// # Safety
    /// No other part that is alive overlaps `range`.
    #[allow(clippy::mut_from_ref, reason = "the contract keeps parts disjoint")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice; disjoint from other parts by contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.len()) }
    }
}

/// Scratch that a thread keeps from one operation to the next, so that hot paths do not
/// allocate. It is taken out while in use: a nested user gets a new one.
macro_rules! with_scratch {
    ($kind:ty, |$name:ident| $body:expr) => {{
        thread_local! {
            static KEPT: std::cell::Cell<Option<Box<$kind>>> = const { std::cell::Cell::new(None) };
        }
        let mut kept = KEPT.take().unwrap_or_default();
        let $name: &mut $kind = &mut kept;
        let result = $body;
        KEPT.set(Some(kept));
        result
    }};
}
pub(crate) use with_scratch;
