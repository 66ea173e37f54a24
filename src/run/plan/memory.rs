//! What the kernel says about memory: how much this host still has, and how much this process holds. Never allocates
//! for the run.
use std::fs::read_to_string;

/// Bytes that may still be allocated here: the host's estimate, or what is left of this control group's limit. `None`
/// where the kernel does not say.
pub fn available() -> Option<usize> {
    let host = field(&read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let bytes = |name: &str| read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok()?.trim().parse::<usize>().ok();
    let group = bytes("max").map(|max| max.saturating_sub(bytes("current").unwrap_or(0)));
    Some(host.min(group.unwrap_or(usize::MAX)))
}

/// Bytes that this process holds: its private memory, and of the memory that ranks share (the arena) its share, each
/// page divided by the number of processes that map it. Files (the program, mapped tokens) are not counted: the kernel
/// drops them when it wants the room. Costs a walk of the page tables, so it is sampled, not read at every step.
pub fn held() -> Option<usize> {
    let text = read_to_string("/proc/self/smaps_rollup").ok()?;
    match (field(&text, "Pss_Anon:"), field(&text, "Pss_Shmem:")) {
        (Some(anonymous), Some(shared)) => Some(anonymous + shared),
        // Kernels before 5.9, or a /proc without smaps: the peak of everything resident, shared memory counted whole.
        _ => field(&read_to_string("/proc/self/status").ok()?, "VmHWM:"),
    }
}

/// The kilobytes behind `name`, in bytes.
fn field(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<usize>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_grows_by_what_is_touched() {
        // Other tests of this process free memory meanwhile: now and then, not each time.
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
