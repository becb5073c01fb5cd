//! The memory that rendering may take.

use nq_formats::human_bytes;
use rlimit::Resource;

/// Stack for parsing and rendering. The parser and the compiler recurse over chains of operators
/// without a limit of their own; the deepest chain in a source of the permitted length takes half of this
/// (a test checks that). Memory that is not touched is not taken.
pub(super) const STACK: usize = 512 << 20;

/// Most bytes that the process may allocate. Linux enforces this; macOS has no such limit.
pub(super) const MAX_MEMORY: u64 = 1 << 30;

/// Most bytes of address space that the process takes.
pub(super) const MEMORY: u64 = MAX_MEMORY + STACK as u64;

/// Most bytes of address space that this process and those that it starts may take.
pub(super) fn allowed() -> u64 {
    Resource::AS.get().map_or(u64::MAX, |(_, hard)| hard)
}

/// What an error adds where the shell allows less than a process that renders may need, which is no fault of a template's.
pub(super) fn limit_note() -> String {
    let allowed = allowed();
    if allowed >= MEMORY {
        return String::new();
    }
    format!(
        "; this shell's processes may take {} of address space (ulimit -v), and one that renders up to {}",
        human_bytes(allowed),
        human_bytes(MEMORY)
    )
}
