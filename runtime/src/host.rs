//! The computer's memory, as the system tells.

/// Bytes that the system can still hand out without swapping; `None` if it does not say.
pub fn available_memory() -> Option<u64> {
    proc_bytes("meminfo", "MemAvailable:")
}

/// Bytes of the machine's memory; `None` if the system does not say.
pub fn total_memory() -> Option<u64> {
    proc_bytes("meminfo", "MemTotal:")
}

/// The peak resident memory of this process so far, in bytes; `None` if the system does not say.
pub fn peak_memory() -> Option<u64> {
    proc_bytes("self/status", "VmHWM:")
}

/// The bytes given by the line of a file in /proc that begins with `line`.
fn proc_bytes(file: &str, line: &str) -> Option<u64> {
    let info = std::fs::read_to_string(format!("/proc/{file}")).ok()?;
    let kib = info.lines().find_map(|l| l.strip_prefix(line))?;
    let kib: u64 = kib.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
