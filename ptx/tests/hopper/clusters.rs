//! Small kernels of clusters of two CTAs: which arrivals in the other CTA order what, and when a CTA may end.
use flatshard_ptx::emulate::{Argument, FindingKind, GlobalMemory, KernelLaunch, LaunchReport, parse};

/// Runs a body in CTAs of one warp with `%c` (rank), `%o` (the other), the arrays `s` (16 bytes) and `bar` (one
/// mbarrier of one arrival), their addresses there in `%s` and `%b`, and 64 words at `%y`.
fn run(body: &str, grid: u32, schedule: u64) -> Result<Vec<u32>, LaunchReport> {
    let source = format!(
        ".visible .entry k(.param .u64 p_y) .explicitcluster .reqnctapercluster 2, 1, 1 {{\n.reg .pred %p;
        .reg .b32 %c, %o, %s, %b, %r<4>;\n.reg .b64 %y;\n.shared .align 16 .b8 s[16];\n.shared .align 8 .b64 bar[1];
        ld.param.u64 %y, [p_y];\nmov.u32 %c, %cluster_ctarank;\nxor.b32 %o, %c, 1;\nmov.u32 %s, s;\nmov.u32 %b, bar;
        mapa.shared::cluster.u32 %s, %s, %o;\nmapa.shared::cluster.u32 %b, %b, %o;
        mov.u32 %r0, %laneid;\nsetp.eq.u32 %p, %r0, 0;
        @%p mbarrier.init.shared::cta.b64 [bar], 1;\n@%p fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;\nsetp.eq.u32 %p, %c, 0;\n{body}\nret;\n}}"
    );
    let kernels = parse("k.ptx", &source).unwrap_or_else(|e| panic!("{e}"));
    let mut memory = GlobalMemory::new();
    let y = memory.upload("y", &[0; 256]);
    let arguments = &[Argument::Pointer(y)];
    let (kernel, block) = (&kernels[0], [32, 1, 1]);
    KernelLaunch { kernel, grid: [grid, 1, 1], block, dynamic_shared: 0, arguments, schedule }.run(&mut memory)?;
    Ok(memory.download(y).unwrap().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
}
fn wrong(kind: FindingKind, words: &str, body: &str) {
    for schedule in 0..6 {
        let report = run(body, 2, schedule).err().unwrap_or_else(|| panic!("schedule {schedule}: nothing found"));
        let found = report.findings.iter().any(|f| f.kind == kind && f.to_string().contains(words));
        assert!(found, "schedule {schedule}: no {kind:?} with {words} in\n{report}");
    }
}

/// Rank 0 writes a word and arrives at rank 1's mbarrier, which waits and reads it.
const TOLD: &str = "mov.u32 %r0, %laneid; setp.ne.u32 %p, %r0, 0; @%p bra END; setp.eq.u32 %p, %c, 0; @!%p bra WAIT;
    st.global.u32 [%y], 7;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%b];
    bra END;
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p, [bar], 0; @!%p bra WAIT;
    ld.global.u32 %r1, [%y]; st.global.u32 [%y+4], %r1;
END:";

#[test]
fn arrivals_with_the_scope_of_the_cluster_order_memory() {
    for schedule in 0..6 {
        assert_eq!(run(TOLD, 2, schedule).unwrap_or_else(|e| panic!("{schedule}: {e}"))[..2], [7, 7]);
    }
    wrong(FindingKind::Race, "'y'", &TOLD.replace(".release.cluster", ""));
    wrong(FindingKind::Race, "'y'", &TOLD.replace(".acquire.cluster", ""));
}
#[test]
fn addresses_of_a_cluster() {
    wrong(FindingKind::OutOfBounds, "no CTA of rank 2", &TOLD.replace("[%b]", "[%b + 16777216]"));
    // Only arrivals and copies take an address in another CTA.
    wrong(
        FindingKind::OutOfBounds,
        "is in the CTA of rank 1, not in this one's of rank 0",
        &TOLD.replace("_, [%b]", "%y, [%b]").replace("shared::cluster.b64 %y", "shared::cta.b64 %y"),
    );
    assert!(run("", 3, 0).unwrap_err().to_string().contains("cannot be divided into clusters of 2"));
    wrong(
        FindingKind::Deadlock,
        "; cta ",
        &TOLD
            .replace("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%b];", "ret;")
            .replace("@!%p bra WAIT;\n", "bra WAIT;\n"),
    );
}
/// Rank 0 sends 16 bytes to rank 1, which confirms.
const SENT: &str = "mov.u32 %r0, %laneid; setp.ne.u32 %p, %r0, 0; @%p bra END; setp.eq.u32 %p, %c, 0; @!%p bra RECEIVE;
    st.shared.v4.u32 [s], {%r0, %o, %o, %o};
    fence.proxy.async.shared::cta;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%s], [s], 16, [%b];
TRY: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra TRY;
    st.shared.u32 [s], 1;
    bra END;
RECEIVE: mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 16;
AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra AGAIN;
    ld.shared.u32 %r1, [s + 4]; st.global.u32 [%y], %r1;
    mbarrier.arrive.shared::cluster.b64 _, [%b];
END:";

#[test]
fn copies_between_ctas() {
    for schedule in 0..6 {
        assert_eq!(run(SENT, 2, schedule).unwrap_or_else(|e| panic!("{schedule}: {e}"))[0], 1);
    }
    wrong(FindingKind::Proxy, "no fence.proxy.async", &SENT.replace("fence.proxy.async.shared::cta;", ""));
    let wait = "TRY: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra TRY;";
    // The source is overwritten, or its CTA ends, before it has been read; or before the confirmation comes.
    wrong(FindingKind::InFlight, "", &SENT.replace(wait, ""));
    wrong(FindingKind::InFlight, "", &SENT.replace(wait, "").replace("st.shared.u32 [s], 1;", ""));
    wrong(FindingKind::Launch, "completes at an mbarrier of rank 0", &SENT.replace("16, [%b]", "16, [bar]"));
}
