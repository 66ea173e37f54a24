//! The result of a launch: findings that name kernel, line, thread and allocation, and counts. Never decides what is
//! wrong.
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindingKind {
    /// Two accesses, at least one a plain write, that nothing orders.
    Race,
    /// A register or memory is read that nothing has written.
    Uninitialized,
    /// An asynchronous copy's destination is touched before its wait.
    InFlight,
    /// Written by threads, read by a bulk copy or a wgmma, and no `fence.proxy.async` between.
    Proxy,
    /// A wgmma's registers are touched without `wgmma.fence` before it, or in flight, before `wgmma.wait_group`.
    Wgmma,
    /// A barrier or mbarrier is used against its phase or count.
    Phase,
    OutOfBounds,
    /// Memory is written that the launch was lent to read.
    ReadOnly,
    Misaligned,
    /// Lanes are missing at an instruction that needs them together.
    Divergent,
    /// No warp can go on.
    Deadlock,
    /// Far more instructions than any kernel needs: a loop that does not end.
    Endless,
    /// The launch itself does not fit the kernel.
    Launch,
}

impl FindingKind {
    fn name(self) -> &'static str {
        match self {
            FindingKind::Race => "race",
            FindingKind::Uninitialized => "uninitialised read",
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
    /// "file:line" of the instruction; absent where none is to blame.
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

/// A launch that must not be trusted. Never empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchReport {
    pub findings: Vec<Finding>,
}

impl LaunchReport {
    /// Further findings of one launch are dropped: they tend to repeat the first.
    const MOST: usize = 16;

    /// One finding an instruction and kind is enough.
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

/// What a launch did. The same under every schedule, so a change is a change of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchCounts {
    /// Executed by warps, branches not taken included.
    pub instructions: u64,
    /// 32-byte pieces of global memory moved: distinct ones within each warp instruction.
    pub global_sectors: u64,
    /// Passes that shared accesses needed beyond the least possible.
    pub bank_conflicts: u64,
    /// Of the tensor cores.
    pub multiply_adds: u64,
}
