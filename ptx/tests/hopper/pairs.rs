//! Forward by clusters of two CTAs: the bits of the kernel for single heads, half its copies of keys and values, and
//! nothing that orders the two CTAs can be removed.
use super::launch::{Bench, Plant};
use super::reference::{Inputs, Shape, Sight};
use flatshard_ptx::emulate::{FindingKind, LATE};
use flatshard_ptx::kernels::Variant;
use flatshard_ptx::kernels::attention_hopper::{HopperFamily, sm_90a_family};

const NAME: &str = "attention_hopper_forward_bf16_128_pair";

#[test]
fn pairs_have_the_bits_of_single_heads() {
    let pass = |heads, kv_heads, cu: &[u32], queries: Vec<u32>, keys: Vec<u32>| Shape {
        sight: Sight::Pass { cu_seqlens: cu.to_vec(), queries, keys },
        ..Shape::packed(heads, kv_heads, 128, cu)
    };
    let (some, none) = ((0..140).chain(400..460).collect(), (5..30).collect());
    for (dtype, shape) in [
        ("bf16", Shape::packed(2, 1, 128, &[0, 5, 5, 69, 70, 301])),
        ("bf16", Shape::packed(4, 2, 128, &[0, 300])),
        ("f16", Shape { window: 70, ..Shape::packed(4, 1, 104, &[0, 30, 259]) }),
        ("bf16", Shape::packed(8, 1, 128, &[0, 1])),
        ("bf16", pass(2, 1, &[0, 140, 300, 460], some, (100..460).collect())),
        // No query of some tiles, or of all, attends to any key.
        ("bf16", pass(2, 1, &[0, 140, 300, 460], (0..140).chain(300..460).collect(), (300..460).collect())),
        ("f16", pass(2, 1, &[0, 10, 37, 90], none, (30..61).collect())),
    ] {
        let x = Inputs::new(&shape);
        let family = *sm_90a_family(dtype, shape.head_dim, 0.0).unwrap();
        let run = |family: HopperFamily, ctas, schedule| {
            let bench = Bench { family, ctas, ..Bench::new(dtype, &shape, schedule) };
            bench.run(&x, None, 0.0).unwrap_or_else(|e| panic!("{shape:?}, {ctas}, {schedule}:\n{e}"))
        };
        let (single, costs) = run(HopperFamily { paired: None, ..family }, usize::MAX, 0);
        assert!(!costs[0].0.ends_with("_pair"));
        for (ctas, schedule) in [(2, 0), (4, 0), (usize::MAX, 0), (2, 1), (4, 2), (6, LATE | 3)] {
            let (pair, again) = run(family, ctas, schedule);
            assert!((&pair.o, &pair.lse) == (&single.o, &single.lse), "{shape:?}: {ctas} CTAs, schedule {schedule}");
            assert!(again[0].0.ends_with("_pair") && again[0].1.multiply_adds == costs[0].1.multiply_adds);
        }
    }
}
/// An odd number of query heads per key/value head has no pairs; nor have other head sizes.
#[test]
fn only_even_groups_of_the_right_size_are_paired() {
    let of = |head_dim, softcap, heads, kv_heads| {
        let family = sm_90a_family("bf16", head_dim, softcap).unwrap();
        family.forward_of(heads, kv_heads).0.kernel.variant
    };
    assert_eq!(of(128, 0.0, 8, 4), NAME);
    assert_eq!(of(104, 0.0, 32, 8), NAME);
    for (head_dim, softcap, heads, kv_heads) in
        [(128, 0.0, 3, 1), (128, 0.0, 6, 2), (128, 0.0, 4, 4), (96, 0.0, 4, 2), (256, 0.0, 4, 2), (128, 2.0, 4, 2)]
    {
        assert!(!of(head_dim, softcap, heads, kv_heads).contains("pair"));
    }
}

/// Every schedule must report one of these about the kernel with its n-th `old` replaced.
fn caught(kinds: &[FindingKind], old: &str, n: usize, new: &str) {
    let text = Variant::by_name(NAME).unwrap().expand().unwrap();
    let (at, _) = text.match_indices(old).nth(n).unwrap_or_else(|| panic!("nothing to replace: {old} {n}"));
    let change = |text: String| format!("{}{new}{}", &text[..at], &text[at + old.len()..]);
    let plant: Plant = Some((NAME, &change));
    // More tiles of keys than the ring has slots, and two tiles of queries for each cluster.
    let shape = Shape::packed(2, 1, 128, &[0, 500]);
    let x = Inputs::new(&shape);
    for schedule in 0..3 {
        let run = Bench { plant, ctas: 4, ..Bench::new("bf16", &shape, schedule) }.run(&x, None, 0.0);
        let report = run.err().unwrap_or_else(|| panic!("schedule {schedule}: {old} {n} -> {new}: nothing found"));
        assert!(kinds.iter().any(|kind| report.has(*kind)), "schedule {schedule}: {old} -> {new}:\n{report}");
    }
}
use FindingKind::{Deadlock, InFlight, Launch, Phase, Proxy, Race, Uninitialized};

#[test]
fn a_slot_is_refilled_only_when_both_ctas_have_returned_it() {
    // The mbarrier counts the arrivals of one CTA: the other's come too, and one of them must be wrong.
    caught(&[Race, InFlight, Phase, Deadlock], "[%bars + 32], 16;", 0, "[%bars + 32], 8;");
    // Nobody tells the peer, so neither of its producers goes on.
    caught(&[Deadlock], "setp.lt.u32         %each, %lane, 2;", 0, "setp.lt.u32 %each, %lane, 1;");
    // The own CTA's consumers arrive twice instead.
    caught(
        &[Race, InFlight, Phase, Deadlock],
        "and.b32             %each_bars, %lane, 1;",
        0,
        "mov.u32 %each_bars, %rank;",
    );
}
#[test]
fn mbarriers_exist_before_the_peer_uses_them() {
    let wait = "barrier.cluster.wait.acquire.aligned;";
    let arrive = "barrier.cluster.arrive.relaxed.aligned;";
    let both = format!("{arrive}     // nothing but mbarriers has been written\n        {wait}");
    caught(&[Race, Uninitialized], &both, 0, "bar.sync 0;");
    caught(&[Proxy, Race], "fence.mbarrier_init.release.cluster;", 0, "");
    caught(&[Phase], arrive, 0, "");
    // Arriving alone is no wait.
    caught(&[Race, Uninitialized, Phase], wait, 0, "bar.sync 0;");
}
#[test]
fn masks_of_a_multicast() {
    // One's own half only: the peer's never comes. The peer's half only. A CTA that the cluster lacks; none.
    caught(&[Deadlock], "mov.b16             %everyone, 3;", 0, "mov.b16 %everyone, 1;");
    caught(&[Deadlock, Phase], "mov.b16             %everyone, 3;", 0, "mov.b16 %everyone, 2;");
    caught(&[Launch], "mov.b16             %everyone, 3;", 0, "mov.b16 %everyone, 7;");
    caught(&[Launch], "mov.b16             %everyone, 3;", 0, "mov.b16 %everyone, 0;");
}
/// In rank 1's descriptor, the rank would be part of the leading offset, by which values of the upper half of the head
/// are read.
#[test]
fn an_address_in_a_descriptor_is_without_the_rank() {
    let start = "bfe.u32                 %ring_low, %ring_start, 4, 14;";
    caught(&[Race, InFlight], start, 0, "shr.u32 %ring_low, %ring_start, 4;");
}
#[test]
fn a_cta_ends_after_all_that_comes_from_its_peer() {
    // The producer does not wait for the last returns of its slots; for one of them.
    caught(&[InFlight], "bra COPIED;", 0, "bra END;");
    // Rank 0 ends before its last number has been read.
    caught(&[InFlight], "@%in bra            END;", 0, "bra END;");
}
