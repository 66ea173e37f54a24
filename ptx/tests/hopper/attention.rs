//! Attention for sm_90a compared with f64 at odd sizes, under several schedules, which must agree bitwise; and without
//! each operation that orders its warpgroups.
use super::launch::{Bench, Plant};
use super::reference::{Inputs, Outputs, Shape, Sight, attention};
use flatshard_ptx::emulate::{FindingKind, LATE};
use flatshard_ptx::kernels::Variant;
use half::{bf16, f16};
use std::cell::RefCell;

/// The last one keeps diverged lanes apart; its costs differ.
const SCHEDULES: [u64; 3] = [1, 2, LATE | 3];

fn round(dtype: &str, x: f64) -> f64 {
    if dtype == "bf16" { bf16::from_f64(x).to_f64() } else { f16::from_f64(x).to_f64() }
}

/// Error at most `factor` times that of the naive code that rounds every step.
fn compare(label: &str, factor: f64, got: &[f64], exact: &[f64], naive: &[f64]) {
    assert_eq!(got.len(), exact.len(), "{label}: length");
    let error = |of: &[f64]| {
        let each = of.iter().zip(exact).map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() });
        each.fold(0.0, |worst: f64, e| if e.is_nan() { e } else { worst.max(e) })
    };
    let (worst, allowed) = (error(got), factor * error(naive) + 1e-6);
    assert!(worst <= allowed, "{label}: largest error {worst:e}, allowed {allowed:e}");
}
fn check(dtype: &str, shape: &Shape) {
    let label = format!("{dtype} {shape:?}");
    let x = Inputs::new(shape);
    let (exact, naive) = (attention(shape, &x, &|v| v), attention(shape, &x, &|v| round(dtype, v)));
    let n = shape.rows().0.len();
    let delta: Vec<f64> = (0..shape.heads * n)
        .map(|i| {
            let at = (i % n * shape.heads + i / n) * shape.head_dim;
            (at..at + shape.head_dim).map(|c| exact.o[c] * x.d_o[c]).sum()
        })
        .collect();
    let (packed, before) = (matches!(shape.sight, Sight::Packed(_)), 0.5);
    let run = |schedule| {
        let bench = Bench::new(dtype, shape, schedule);
        let forward = bench.run(&x, None, before).unwrap_or_else(|report| panic!("{label}, {schedule}:\n{report}"));
        let backward = bench.run(&x, Some([&exact.lse, &delta]), before);
        (forward, backward.unwrap_or_else(|report| panic!("{label}, {schedule}:\n{report}")))
    };
    let ((forward, costs), (backward, more)) = run(0);
    for schedule in SCHEDULES {
        let again = run(schedule);
        let values = again.0.0.o == forward.o && again.0.0.lse == forward.lse;
        let same = values && (schedule & LATE != 0 || (&again.0.1, &again.1.1) == (&costs, &more));
        assert!(same, "{label}: schedule {schedule} gives other values or costs");
        let Outputs { dq, dk, dv, .. } = &again.1.0;
        assert!((dq, dk, dv) == (&backward.dq, &backward.dk, &backward.dv), "{label}: gradients, schedule {schedule}");
    }
    compare(&format!("{label}: o"), 2.0, &forward.o, &exact.o, &naive.o);
    compare(&format!("{label}: lse"), 2.0, &forward.lse, &exact.lse, &naive.lse);
    let added = if packed { 0.0 } else { before };
    for (name, got, exact, naive) in [
        ("dq", &backward.dq, &exact.dq, &naive.dq),
        ("dk", &backward.dk, &exact.dk, &naive.dk),
        ("dv", &backward.dv, &exact.dv, &naive.dv),
    ] {
        let got: Vec<f64> = got.iter().map(|x| x - added).collect();
        compare(&format!("{label}: {name}"), 3.0, &got, exact, naive);
    }
}

#[test]
fn packed_documents() {
    check("bf16", &Shape::packed(2, 1, 128, &[0, 5, 5, 69, 70, 300]));
    check("bf16", &Shape::packed(1, 1, 64, &[0, 1]));
    check("f16", &Shape::packed(2, 2, 64, &[0, 260]));
    check("bf16", &Shape::packed(1, 1, 96, &[0, 100, 140]));
    check("bf16", &Shape::packed(1, 1, 256, &[0, 40, 150]));
    // Heads that do not fill their tile.
    check("bf16", &Shape::packed(2, 1, 8, &[0, 33]));
    check("f16", &Shape::packed(1, 1, 104, &[0, 65]));
}
#[test]
fn windows_and_softcaps() {
    check("bf16", &Shape { window: 9, ..Shape::packed(1, 1, 64, &[0, 3, 268]) });
    check("bf16", &Shape { window: 130, ..Shape::packed(1, 1, 64, &[0, 400]) });
    // Capped heads smaller than their kernels' are padded.
    check("f16", &Shape { softcap: 2.0, ..Shape::packed(1, 1, 64, &[0, 140]) });
    check("bf16", &Shape { softcap: 2.0, window: 60, ..Shape::packed(2, 1, 128, &[0, 7, 150]) });
    check("bf16", &Shape { softcap: 2.0, ..Shape::packed(1, 1, 256, &[0, 140]) });
}
#[test]
fn passes_of_ring_attention() {
    let pass = |cu: &[u32], queries: Vec<u32>, keys: Vec<u32>| Shape {
        sight: Sight::Pass { cu_seqlens: cu.to_vec(), queries, keys },
        ..Shape::packed(2, 1, 64, cu)
    };
    check("bf16", &pass(&[0, 256], (0..64).chain(192..256).collect(), (64..192).collect()));
    check("bf16", &pass(&[0, 10, 37, 90], (30..61).collect(), (5..30).collect()));
    // No query attends to any key.
    check("f16", &pass(&[0, 10, 37, 90], (5..30).collect(), (30..61).collect()));
}

/// Sections of two heads, one head, all heads: whatever order CTAs take their work in, all of it is done once.
#[test]
fn heads_in_sections() {
    let shape = Shape::packed(3, 3, 64, &[0, 300]);
    let x = Inputs::new(&shape);
    let name = "attention_hopper_forward_bf16_64";
    let numbers = |text: &str| text.matches("8388608").count();
    assert_eq!(numbers(&Variant::by_name(name).unwrap().expand().unwrap()), 1);
    let run = |plant: Plant| {
        Bench { plant, ..Bench::new("bf16", &shape, 0) }.run(&x, None, 0.0).unwrap_or_else(|e| panic!("{e}"))
    };
    let (whole, costs) = run(None);
    for keys in [600, 1] {
        let change = |text: String| text.replace("8388608", &(64 * keys).to_string());
        let (cut, again) = run(Some((name, &change)));
        assert!((&cut.o, &cut.lse) == (&whole.o, &whole.lse), "{keys} keys");
        assert_eq!(again, costs);
    }
}

/// However many CTAs share the tiles, and whichever draws them: the bits of a CTA for each tile.
#[test]
fn tiles_in_turn() {
    let tables = Sight::Pass {
        cu_seqlens: vec![0, 140, 300, 700],
        queries: (0..140).chain(500..700).collect(),
        keys: (300..650).collect(),
    };
    for shape in [
        Shape::packed(3, 1, 64, &[0, 30, 400]),
        Shape { window: 70, ..Shape::packed(2, 2, 128, &[0, 300]) },
        Shape::packed(2, 1, 256, &[0, 200]),
        // No query of some tiles attends to any key.
        Shape { sight: tables, ..Shape::packed(2, 1, 64, &[]) },
    ] {
        let x = Inputs::new(&shape);
        let run = |ctas, schedule| {
            let bench = Bench { ctas, ..Bench::new("bf16", &shape, schedule) };
            bench.run(&x, None, 0.0).unwrap_or_else(|e| panic!("{shape:?}, {ctas}, {schedule}:\n{e}")).0
        };
        let each = run(usize::MAX, 0);
        for (ctas, schedule) in [(1, 0), (1, 1), (2, 0), (2, 1), (3, 2), (5, LATE | 3)] {
            let now = run(ctas, schedule);
            assert!((&now.o, &now.lse) == (&each.o, &each.lse), "{shape:?}: {ctas} CTAs, schedule {schedule}");
        }
    }
}
/// What goes on from one tile to the next: a mistake is a finding, or gives other values.
#[test]
fn what_goes_on_from_tile_to_tile_is_needed() {
    let shape = Shape::packed(2, 1, 64, &[0, 420]);
    let (x, zeros) = (Inputs::new(&shape), RefCell::new(vec![]));
    let variant = "attention_hopper_forward_bf16_64";
    let run = |plant: Plant, schedule| {
        let bench = Bench { plant, ctas: 2, turns: Some(&zeros), ..Bench::new("bf16", &shape, schedule) };
        bench.run(&x, None, 0.0)
    };
    let right = run(None, 0).unwrap_or_else(|report| panic!("{report}")).0;
    let arrive = "mbarrier.arrive.shared::cta.b64 _, [%bars + ";
    let [mine, freed] = [72, 88].map(|at| format!("{arrive}{at}];"));
    let opened = |n: usize| (n, "xor.b32                 %noted, %noted, 1;", "");
    for (n, old, new) in [
        // Phases that do not change with the tile: of notes, for each of their three users, and of the queries.
        opened(0),
        opened(1),
        opened(2),
        (0, "xor.b32                 %own_parity, %own_parity, 1;", ""),
        (1, "xor.b32                 %own_parity, %own_parity, 1;", ""),
        // Nobody says that the queries are free, or that a note has been read; or one does twice.
        (0, &*mine, "mov.u32 %t, %t;"),
        (0, &*freed, ""),
        (1, &*freed, "mov.u32 %t, %t;"),
        (0, &*freed, &*format!("{freed} {freed}")),
        // A tile too many, one skipped.
        (0, "setp.ge.u32             %none, %index, %work;", "setp.gt.u32 %none, %index, %work;"),
        (0, "add.u32                 %index, %index, %t;", "add.u32 %index, %index, %t; add.u32 %index, %index, 1;"),
        // The turns start anew.
        (0, "bra                     NEXT_TILE;", "bra ANEW;"),
    ] {
        let change = |text: String| {
            let (at, _) = text.match_indices(old).nth(n).unwrap_or_else(|| panic!("nothing to replace: {old} {n}"));
            let text = format!("{}{new}{}", &text[..at], &text[at + old.len()..]);
            text.replacen("setp.eq.u32             %in, %warpgroup, 2;", "ANEW: setp.eq.u32 %in, %warpgroup, 2;", 1)
        };
        for schedule in 0..2 {
            let same = |now: Outputs| (now.o, now.lse) == (right.o.clone(), right.lse.clone());
            let passes = run(Some((variant, &change)), schedule).is_ok_and(|(now, _)| same(now));
            assert!(!passes, "{old} {n} -> {new} passes, schedule {schedule}");
        }
    }
}

/// Every schedule must detect that the n-th `old` of a variant has become `new`.
fn noticed((stem, head_dim): (&str, usize), n: usize, old: &str, new: &str) {
    // Several tiles: more than the ring has slots.
    let n_rows = if stem == "dk" || stem == "dv" { 200 } else { 385 };
    let shape = Shape::packed(1, 1, head_dim, &[0, n_rows]);
    let (x, ones) = (Inputs::new(&shape), vec![1.0; n_rows as usize]);
    let variant = format!("attention_hopper_{stem}_bf16_{head_dim}");
    let change = |text: String| {
        let (at, _) = text.match_indices(old).nth(n).unwrap_or_else(|| panic!("nothing to replace: {old}"));
        format!("{}{new}{}", &text[..at], &text[at + old.len()..])
    };
    for schedule in 0..2 {
        let bench = Bench { plant: Some((&variant, &change)), ..Bench::new("bf16", &shape, schedule) };
        let given: Option<[&[f64]; 2]> = if stem == "forward" { None } else { Some([&ones, &ones]) };
        assert!(bench.run(&x, given, 0.0).is_err(), "{variant}, schedule {schedule}: {old} {n} -> {new} passes");
    }
}
/// What orders the sums of the queries' gradients.
#[test]
fn what_hands_the_sums_on_is_needed() {
    let of = ("backward", 64);
    let missed = |n: usize, old: &str, new: &str| noticed(of, n, old, new);
    // Both warpgroups' gradients of scores: written, visible to the tensor cores, read before they are overwritten.
    missed(0, "bar.sync                1, 256;", "");
    missed(0, "bar.sync                %t, 256;", "bar.arrive %t, 256;");
    for (n, of, other) in [(0, "global", "shared::cta"), (0, "shared::cta", "global"), (1, "shared::cta", "global")] {
        let fence = |memory: &str| format!("fence.proxy.async.{memory};");
        missed(n, &fence(of), "");
        missed(n, &fence(of), &fence(other));
    }
    // A copy leaves shared memory before it is overwritten, and has arrived before the next one adds.
    missed(0, "cp.async.bulk.wait_group.read 0;", "");
    missed(0, "cp.async.bulk.wait_group 0;", "");
    missed(0, "mbarrier.arrive.shared::cta.b64 _, [%low", "//");
    // The turn: awaited, published, by which thread, and in which order.
    missed(0, "@%in bra                TURN;", "");
    missed(0, "ld.acquire.gpu", "ld.relaxed.gpu");
    missed(0, "red.release.gpu", "red.relaxed.gpu");
    missed(0, "red.release.gpu.global.max.u32", "//");
    missed(0, "add.u32                 %t, %mine, 1;", "add.u32 %t, %mine, 2;");
    missed(0, "setp.lt.u32             %in, %t, %mine;", "setp.eq.u32 %in, %t, %mine;");
    // Nobody is first, or everybody.
    missed(0, "@%first_here bra        ASSIGN;", "");
    missed(0, "@%first_here bra        ASSIGN;", "bra ASSIGN;");
    // Work by CTA number instead of tickets waits for a CTA that may never become resident.
    let shape = Shape::packed(1, 1, 64, &[0, 1000]);
    let (x, ones) = (Inputs::new(&shape), vec![1.0; 1000]);
    let drawn = "atom.global.add.u32 %t, [%turns], 1;";
    let change = |text: String| text.replacen(drawn, "mov.u32 %t, %ctaid.x;", 1);
    let variant = "attention_hopper_backward_bf16_64";
    let plant: Plant = Some((variant, &change));
    assert!(Variant::by_name(variant).unwrap().expand().unwrap().contains(drawn));
    let run = |schedule| Bench { plant, ..Bench::new("bf16", &shape, schedule) }.run(&x, Some([&ones, &ones]), 0.0);
    assert!((0..8).any(|schedule| run(schedule).is_err_and(|report| report.has(FindingKind::Deadlock))));
}
/// Where gradients of scores are stored and which ranges lanes look for: a mistake is a finding, or gives other values.
#[test]
fn stored_slopes_and_searched_ranges() {
    let shape = Shape { window: 100, ..Shape::packed(1, 1, 64, &[0, 30, 330]) };
    let (x, ones) = (Inputs::new(&shape), vec![1.0; 330]);
    let variant = "attention_hopper_backward_bf16_64";
    let run = |plant: Plant| Bench { plant, ..Bench::new("bf16", &shape, 0) }.run(&x, Some([&ones, &ones]), 0.0);
    let right = run(None).unwrap_or_else(|report| panic!("{report}")).0;
    for (old, new) in [
        // Matrices: not transposed, at the keys of their lanes, swizzled.
        ("m8n8.x4.shared", "m8n8.x4.trans.shared"),
        (
            "and.b32                 %t, %lane, 15;\n    mad.lo.u32              %slope",
            "and.b32 %t, %lane, 7;\nmad.lo.u32 %slope",
        ),
        ("shr.u32                 %other, %lane, 4;", "shr.u32 %other, %lane, 3;"),
        ("xor.b32             %t, %slope, 32;", "xor.b32 %t, %slope, 16;"),
        // Ranges of the first row, the last, the one before, and a thread's own.
        ("%c, %row_lo, 16,", "%c, %row_lo, 17,"),
        ("%first_hi, %row_hi, 16,", "%first_hi, %row_hi, 17,"),
        ("%last_lo, %row_lo, 17,", "%last_lo, %row_lo, 16,"),
        ("%end, %row_hi, 17,", "%end, %row_hi, 16,"),
        ("%before_hi, %row_hi, 18,", "%before_hi, %row_hi, 17,"),
        ("%before_hi, %row_hi, 18,", "%before_hi, %row_lo, 18,"),
        ("selp.b32            %row, -1, %row, %in;", "selp.b32 %row, -40, %row, %in;"),
        ("%lo0, %row_lo, %t,", "%lo0, %row_lo, 0,"),
        ("%hi1, %row_hi, %t,", "%hi1, %row_hi, 0,"),
    ] {
        let change = |text: String| {
            assert!(text.contains(old), "nothing to replace: {old}");
            text.replacen(old, new, 1)
        };
        let same = |now: Outputs| (now.dq, now.dk, now.dv) == (right.dq.clone(), right.dk.clone(), right.dv.clone());
        assert!(!run(Some((variant, &change))).is_ok_and(|(now, _)| same(now)), "{old} -> {new} passes");
    }
}
