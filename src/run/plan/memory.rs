//! Memory as the kernel reports it: available on this host, and held by this process. Never allocates for the run.
use std::fs::read_to_string;

/// Bytes that can still be allocated: the host's estimate, or the rest of the container's limit. `None` if unknown.
pub fn available() -> Option<usize> {
    let host = field(&read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let file = |name: &str| read_to_string(format!("/sys/fs/cgroup/memory.{name}")).unwrap_or_default();
    Some(host.min(left_in_group(&file("max"), &file("current"), &file("stat")).unwrap_or(usize::MAX)))
}

/// What a control group's limit leaves, by its files; `None` without a limit. Cached files count as used there, but are
/// dropped for whoever allocates.
fn left_in_group(max: &str, current: &str, stat: &str) -> Option<usize> {
    let cached = ["active_file", "inactive_file"].into_iter().filter_map(|name| number(stat, name)).sum();
    let used = current.trim().parse::<usize>().unwrap_or(0).saturating_sub(cached);
    Some(max.trim().parse::<usize>().ok()?.saturating_sub(used))
}

/// Bytes that this process holds: its private memory, plus its share of shared memory (each page divided by the number
/// of processes that map it). Mapped files are not counted: the kernel can drop them. Walks the page tables, so it is
/// sampled instead of read at every step.
pub fn held() -> Option<usize> {
    let text = read_to_string("/proc/self/smaps_rollup").ok()?;
    match (field(&text, "Pss_Anon:"), field(&text, "Pss_Shmem:")) {
        (Some(anonymous), Some(shared)) => Some(anonymous + shared),
        // Kernels before 5.9 or without smaps: the resident peak, with shared memory counted fully.
        _ => field(&read_to_string("/proc/self/status").ok()?, "VmHWM:"),
    }
}

/// The kilobytes after `name`, in bytes.
fn field(text: &str, name: &str) -> Option<usize> {
    number(text, name).map(|kib| kib << 10)
}
/// The number after `name`, with which a line begins.
fn number(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_files_leave_room_in_a_control_group() {
        let stat = "anon 50\nfile 700\ninactive_file 600\nactive_file 100\nunevictable 0\n";
        assert_eq!(left_in_group("1000\n", "750\n", stat), Some(950));
        assert_eq!(left_in_group("1000\n", "750\n", ""), Some(250));
        assert_eq!(left_in_group("max\n", "750\n", stat), None);
    }

    #[test]
    fn held_grows_by_what_is_touched() {
        // Other tests of this process may free memory meanwhile, so one success is enough.
        let grows = |_| {
            let before = held().unwrap();
            let touched = std::hint::black_box(vec![1u8; 64 << 20]);
            let after = held().unwrap();
            drop(touched);
            after >= before + (60 << 20)
        };
        assert!((0..20).any(grows));
        assert!(available().unwrap() > 0);
    }
}
