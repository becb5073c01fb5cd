//! The computer's memory, as the system tells.

use std::fs;
use std::path::Path;

/// Bytes that the system can still hand out without swapping, as far as the control groups of this process allow (a
/// container's limit); `None` if it does not say.
pub fn available_memory() -> Option<u64> {
    let free = proc_bytes("meminfo", "MemAvailable:")?;
    Some(free.min(left_of_groups(Path::new("/"))))
}

/// Bytes that the control groups of this process leave, by the files under `root`; `u64::MAX` without a limit. Each limit
/// holds for a group and all within it (<https://docs.kernel.org/admin-guide/cgroup-v2.html>, "Memory"). Cached files
/// count as left, as the system drops them first.
fn left_of_groups(root: &Path) -> u64 {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut least = u64::MAX;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        // Version 2 names no controllers.
        let (mount, limit, used) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max", "memory.current"),
            named if named.split(',').any(|name| name == "memory") => (
                "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            ),
            _ => continue,
        };
        let mount = root.join(mount);
        let own = mount.join(path.trim_start_matches('/'));
        for group in own.ancestors().take_while(|g| g.starts_with(&mount)) {
            let read = |file: &str| fs::read_to_string(group.join(file)).unwrap_or_default();
            let bytes = |file: &str| read(file).trim().parse::<u64>().ok();
            let (Some(limit), Some(used)) = (bytes(limit), bytes(used)) else {
                continue;
            };
            let stat = read("memory.stat");
            let cached = stat.lines().filter_map(|line| match line.split_once(' ')? {
                ("active_file" | "inactive_file", n) => n.trim().parse::<u64>().ok(),
                _ => None,
            });
            least = least.min(limit.saturating_sub(used.saturating_sub(cached.sum())));
        }
    }
    least
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
    let info = fs::read_to_string(format!("/proc/{file}")).ok()?;
    let kib = info.lines().find_map(|l| l.strip_prefix(line))?;
    let kib: u64 = kib.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_group_says_what_is_left() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(left_of_groups(root), u64::MAX);
        write("proc/self/cgroup", "12:cpu:/x\n0::/a/b\n");
        write("sys/fs/cgroup/a/b/memory.max", "max\n");
        write("sys/fs/cgroup/a/b/memory.current", "700\n");
        assert_eq!(left_of_groups(root), u64::MAX);
        // Of 700 bytes in use, 150 are of files.
        write("sys/fs/cgroup/a/memory.max", "1000\n");
        write("sys/fs/cgroup/a/memory.current", "700\n");
        let stat = "anon 500\nactive_file 100\ninactive_file 50\nshmem 50\n";
        write("sys/fs/cgroup/a/memory.stat", stat);
        assert_eq!(left_of_groups(root), 450);
        // A group within it may have a lower limit, and be over it.
        write("sys/fs/cgroup/a/b/memory.max", "600\n");
        assert_eq!(left_of_groups(root), 0);
        // Version 1; a container sees its own group as the whole.
        write("proc/self/cgroup", "9:memory,cpu:/docker/1\n");
        write("sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n");
        write("sys/fs/cgroup/memory/memory.usage_in_bytes", "2000\n");
        assert_eq!(left_of_groups(root), 3000);
    }
}
