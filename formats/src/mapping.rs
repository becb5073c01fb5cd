//! Gives memory back to the system: pages of mapped files, and memory that the allocator keeps.
//!
//! A mapped file's pages stay in memory after they were read, and count as the process's,
//! until the memory is needed elsewhere. After copying a weight, call [`release`], so that reading a
//! checkpoint takes no more memory than the copies.

use bytes::Bytes;
use memmap2::Mmap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Maps that still have views.
static MAPS: Mutex<Vec<Weak<Mmap>>> = Mutex::new(Vec::new());

fn maps() -> MutexGuard<'static, Vec<Weak<Mmap>>> {
    // A list of weak pointers is valid whatever a thread that panicked was doing.
    MAPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets [`Bytes`] own a map that [`release`] can find.
struct Owner(Arc<Mmap>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// The whole map as bytes.
pub(crate) fn share(map: Mmap) -> Bytes {
    let map = Arc::new(map);
    let mut maps = maps();
    maps.retain(|m| m.strong_count() > 0);
    maps.push(Arc::downgrade(&map));
    drop(maps);
    Bytes::from_owner(Owner(map))
}

/// Lets the system take back the memory behind `bytes` if they are a view of a mapped file;
/// reading them again reads the file again. Has no effect on other bytes.
pub fn release(bytes: &Bytes) {
    let found = maps().iter().filter_map(Weak::upgrade).find(|m| {
        let whole = m.as_ptr_range();
        let part = bytes.as_ptr_range();
        whole.start <= part.start && part.end <= whole.end
    });
    if let Some(map) = found {
        let start = bytes.as_ptr().addr() - map.as_ptr().addr();
        give_back(&map, start, bytes.len());
    }
}

#[cfg(unix)]
fn give_back(map: &Mmap, start: usize, len: usize) {
    use memmap2::UncheckedAdvice;
    if len == 0 {
        return;
    }
    // SAFETY: the map is of a file and never written through, so dropped pages come
    // back with the same contents when they are read again. This is only advice: a
    // system that refuses it keeps the pages.
    let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) };
}

#[cfg(not(unix))]
fn give_back(_: &Mmap, _: usize, _: usize) {}

/// Gives freed memory that the allocator keeps for later back to the system. glibc keeps
/// memory that a stage of large allocations freed; the next stage, which allocates other
/// sizes, would take more on top of it. Has no effect with other allocators.
pub fn trim_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` takes no pointer, locks the allocator's arenas itself and
    // touches only free memory.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// From now on, memory that is freed in large pieces goes back to the system at once, whichever thread took it. By
/// itself, glibc keeps the more the larger the pieces were, and [`trim_heap`] gives back nothing from the ends of
/// threads' own heaps. For programs that run for long, beside others. Has no effect with other allocators.
pub fn keep_little() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for parameter in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
        // SAFETY: `mallopt` takes no pointer and locks the allocator itself.
        unsafe {
            libc::mallopt(parameter, 1 << 20);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn released_bytes_read_the_same_again() {
        let contents: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&contents).unwrap();
        // SAFETY: only this test uses the file.
        let bytes = share(unsafe { Mmap::map(&file).unwrap() });
        for range in [0..contents.len(), 5000..90_001, 7..8, 9..9] {
            let part = bytes.slice(range.clone());
            release(&part);
            assert!(part == contents[range]);
        }
        let heap = Bytes::from(contents.clone());
        release(&heap);
        assert!(heap == contents);
        drop(file);
        release(&bytes);
        assert!(bytes == contents);
    }
}
