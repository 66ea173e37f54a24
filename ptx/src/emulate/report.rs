//! The result of a launch: findings that name kernel, line, thread and allocation, and counts. Never decides what is
//! wrong.
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindingKind {
    /// Two unordered accesses, at least one a plain write.
    Race,
    /// A read of a register or memory that was never written.
    Uninitialized,
    /// An access to an asynchronous copy's destination before its wait.
    InFlight,
    /// Written by threads and accessed by a bulk copy or a wgmma, or read by threads and overwritten by a bulk copy,
    /// without `fence.proxy.async` in between.
    Proxy,
    /// An access to a wgmma's registers without `wgmma.fence` before it, or before its `wgmma.wait_group`.
    Wgmma,
    /// A barrier or mbarrier is used against its phase or count.
    Phase,
    OutOfBounds,
    /// A write to memory that the launch may only read.
    ReadOnly,
    Misaligned,
    /// Lanes are missing at an instruction that needs them together.
    Divergent,
    /// No warp can proceed.
    Deadlock,
    /// Far more instructions than any kernel needs: an endless loop.
    Endless,
    /// The launch does not match the kernel.
    Launch,
}

impl FindingKind {
    fn name(self) -> &'static str {
        match self {
            FindingKind::Race => "race",
            FindingKind::Uninitialized => "uninitialized read",
            FindingKind::InFlight => "missing wait",
            FindingKind::Proxy => "missing proxy fence",
            FindingKind::Wgmma => "wgmma registers",
            FindingKind::Phase => "phase",
            FindingKind::OutOfBounds => "out of bounds",
            FindingKind::ReadOnly => "read only",
            FindingKind::Misaligned => "misaligned",
            FindingKind::Divergent => "divergence",
            FindingKind::Deadlock => "deadlock",
            FindingKind::Endless => "endless loop",
            FindingKind::Launch => "launch",
        }
    }
}

/// One thread; a warp as a whole has no lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    pub cta: u32,
    pub warp: u32,
    pub lane: Option<u32>,
}

impl fmt::Display for Thread {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "cta {} warp {}", self.cta, self.warp)?;
        self.lane.map_or(Ok(()), |lane| write!(f, " lane {lane}"))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub kind: FindingKind,
    pub kernel: String,
    /// "file:line" of the instruction; absent if none is to blame.
    pub place: Option<String>,
    pub thread: Option<Thread>,
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.kernel)?;
        if let Some(place) = &self.place {
            write!(f, " at {place}")?;
        }
        if let Some(thread) = &self.thread {
            write!(f, ", {thread}")?;
        }
        write!(f, ": {}", self.what)
    }
}

/// The findings of a launch whose results must not be trusted. Never empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchReport {
    pub findings: Vec<Finding>,
}

impl LaunchReport {
    /// Further findings of a launch are dropped: they tend to repeat the first.
    const MOST: usize = 16;

    /// Keeps one finding per instruction and kind.
    pub(super) fn add(&mut self, new: Finding) {
        let known = self.findings.iter().any(|f| f.kind == new.kind && f.place == new.place);
        if !known && self.findings.len() < Self::MOST {
            self.findings.push(new);
        }
    }
    pub fn has(&self, kind: FindingKind) -> bool {
        self.findings.iter().any(|f| f.kind == kind)
    }
}

impl fmt::Display for LaunchReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let lines: Vec<String> = self.findings.iter().map(Finding::to_string).collect();
        write!(f, "{}", lines.join("\n"))
    }
}
impl std::error::Error for LaunchReport {}

/// Counts of a launch: the same under every schedule, so a change is a change of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchCounts {
    /// Warp instructions, including branches not taken.
    pub instructions: u64,
    /// 32-byte sectors of global memory accessed: distinct ones within each warp instruction.
    pub global_sectors: u64,
    /// Passes of shared accesses beyond the minimum.
    pub bank_conflicts: u64,
    /// Multiply-adds of the tensor cores.
    pub multiply_adds: u64,
}
