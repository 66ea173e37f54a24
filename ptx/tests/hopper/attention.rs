//! Attention for sm_90a against f64 at odd sizes, under several schedules, which must agree to the bit; and without each
//! thing that orders its warpgroups.
use crate::reference::{Inputs, Outputs, Shape, Sight, attention};
use flatshard_ptx::emulate::{Argument, Counts, Launch, Memory, Report, Swizzle, TensorMap, parse};
use flatshard_ptx::kernels::Variant;
use flatshard_ptx::kernels::attention_hopper::{BOX, sm_90a_forward};
use half::{bf16, f16};

const SCHEDULES: std::ops::Range<u64> = 0..3;

fn encode(dtype: &str, values: &[f64]) -> Vec<u8> {
    let each =
        |x: &f64| if dtype == "bf16" { bf16::from_f64(*x).to_le_bytes() } else { f16::from_f64(*x).to_le_bytes() };
    values.iter().flat_map(each).collect()
}
fn decode(dtype: &str, bytes: &[u8]) -> Vec<f64> {
    let wide = |b: &[u8; 4]| f32::from_le_bytes(*b) as f64;
    let half =
        |b: &[u8; 2]| if dtype == "bf16" { bf16::from_le_bytes(*b).to_f64() } else { f16::from_le_bytes(*b).to_f64() };
    if dtype == "f32" {
        bytes.as_chunks().0.iter().map(wide).collect()
    } else {
        bytes.as_chunks().0.iter().map(half).collect()
    }
}
fn round(dtype: &str, x: f64) -> f64 {
    if dtype == "bf16" { bf16::from_f64(x).to_f64() } else { f16::from_f64(x).to_f64() }
}

/// o and lse of the text of a variant.
fn forward(text: Option<&str>, dtype: &str, shape: &Shape, schedule: u64) -> Result<(Outputs, Counts), Report> {
    let chosen = sm_90a_forward(dtype, shape.head_dim).unwrap();
    let variant = Variant::by_name(chosen.kernel.variant).unwrap();
    let text = text.map_or_else(|| variant.expand().unwrap(), String::from);
    let kernels = parse(variant.file, &text).unwrap_or_else(|e| panic!("{e}"));
    let Shape { heads, kv_heads, head_dim, .. } = *shape;
    let (queries, keys) = shape.rows();
    let (nq, nk, wq, wk) = (queries.len(), keys.len(), heads * head_dim, kv_heads * head_dim);
    let x = Inputs::new(shape);
    let packed = matches!(shape.sight, Sight::Packed(_));
    let mut memory = Memory::new();
    // Fused rows; in a pass the keys and values stand in a buffer of their own.
    let row = |parts: &[(&[f64], usize)], i: usize| -> Vec<f64> {
        parts.iter().flat_map(|(x, w)| x[i * w..(i + 1) * w].to_vec()).collect()
    };
    let rows = |parts: &[(&[f64], usize)], n: usize| (0..n).flat_map(|i| row(parts, i)).collect::<Vec<f64>>();
    let (q, k, q_row, kv_row);
    if packed {
        q_row = wq + 2 * wk;
        kv_row = q_row;
        q = memory.upload("qkv", &encode(dtype, &rows(&[(&x.q, wq), (&x.k, wk), (&x.v, wk)], nq)));
        k = q + 2 * wq as u64;
    } else {
        (q_row, kv_row) = (wq, 2 * wk);
        q = memory.upload("q", &encode(dtype, &x.q));
        k = memory.upload("kv", &encode(dtype, &rows(&[(&x.k, wk), (&x.v, wk)], nk)));
    }
    let map = |address: u64, heads: usize, rows: usize, row: usize, side: u32| {
        let sizes = [head_dim, heads, rows].map(|n| n as u64).to_vec();
        let strides = [head_dim, row].map(|n| 2 * n as u64).to_vec();
        let map = TensorMap { address, element: 2, sizes, strides, tile: vec![BOX, 1, side], swizzle: Swizzle::B128 };
        Argument::TensorMap(map.encode().unwrap())
    };
    let [bounds, _] = match packed {
        true => {
            [memory.upload("cu_seqlens", &shape.cu_seqlens().iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<u8>>());
                2]
        }
        false => {
            let [of_queries, _] = shape.tables();
            let ranges = of_queries.iter().flat_map(|r| [r.start, r.end]).flat_map(u32::to_le_bytes);
            [memory.upload("ranges", &ranges.collect::<Vec<u8>>()); 2]
        }
    };
    let kind = if packed { dtype } else { "f32" };
    let o = memory.alloc("o", nq * wq * if packed { 2 } else { 4 });
    let lse = memory.alloc("lse", 4 * heads * nq);
    let mut arguments = vec![
        map(q, heads, nq, q_row, chosen.kernel.rows),
        map(k, kv_heads, nk, kv_row, chosen.columns),
        map(k + 2 * wk as u64, kv_heads, nk, kv_row, chosen.columns),
        Argument::Pointer(o),
        Argument::Pointer(lse),
        Argument::Pointer(bounds),
    ];
    let documents = if packed { shape.cu_seqlens().len() - 1 } else { 0 };
    let n = [documents, shape.window, nq, nk, q_row, kv_row, 0, heads, kv_heads, head_dim];
    arguments.extend(n.map(|n| Argument::U32(n as u32)));
    arguments.extend([shape.scale(), shape.softcap].map(|x| Argument::F32(x as f32)));
    let kernel = kernels.iter().find(|k| k.name == chosen.kernel.entry).unwrap();
    let grid = [(nq as u32).div_ceil(chosen.kernel.rows), heads as u32, 1];
    let (block, dynamic_shared) = ([chosen.kernel.threads, 1, 1], chosen.kernel.shared as usize);
    let counts = Launch { kernel, grid, block, dynamic_shared, arguments: &arguments, schedule }.run(&mut memory)?;
    let o = decode(kind, memory.download(o).unwrap());
    let lse = decode("f32", memory.download(lse).unwrap());
    Ok((Outputs { o, lse, ..Outputs::default() }, counts))
}

/// Error at most twice that of the naive code that rounds every step.
fn compare(label: &str, got: &[f64], exact: &[f64], naive: &[f64]) {
    assert_eq!(got.len(), exact.len(), "{label}: length");
    let error = |of: &[f64]| {
        let each = of.iter().zip(exact).map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() });
        each.fold(0.0, |worst: f64, e| if e.is_nan() { e } else { worst.max(e) })
    };
    let (worst, allowed) = (error(got), 2.0 * error(naive) + 1e-6);
    assert!(worst <= allowed, "{label}: largest error {worst:e}, allowed {allowed:e}");
}
fn check(dtype: &str, shape: &Shape) {
    let label = format!("{dtype} {shape:?}");
    let first = forward(None, dtype, shape, 0).unwrap_or_else(|report| panic!("{label}:\n{report}"));
    for schedule in SCHEDULES {
        let again =
            forward(None, dtype, shape, schedule).unwrap_or_else(|report| panic!("{label}, {schedule}:\n{report}"));
        let same = again.0.o == first.0.o && again.0.lse == first.0.lse && again.1 == first.1;
        assert!(same, "{label}: schedule {schedule} gives other values or costs");
    }
    let x = Inputs::new(shape);
    let (exact, naive) = (attention(shape, &x, &|v| v), attention(shape, &x, &|v| round(dtype, v)));
    compare(&format!("{label}: o"), &first.0.o, &exact.o, &naive.o);
    compare(&format!("{label}: lse"), &first.0.lse, &exact.lse, &naive.lse);
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
    check("f16", &Shape { softcap: 2.0, ..Shape::packed(1, 1, 64, &[0, 140]) });
}
#[test]
fn passes_of_ring_attention() {
    let pass = |cu: &[u32], queries: Vec<u32>, keys: Vec<u32>| Shape {
        sight: Sight::Pass { cu_seqlens: cu.to_vec(), queries, keys },
        ..Shape::packed(2, 1, 64, cu)
    };
    check("bf16", &pass(&[0, 256], (0..64).chain(192..256).collect(), (64..192).collect()));
    check("bf16", &pass(&[0, 10, 37, 90], (30..61).collect(), (5..30).collect()));
    // Nothing is seen.
    check("f16", &pass(&[0, 10, 37, 90], (5..30).collect(), (30..61).collect()));
}

/// Every schedule must notice that the n-th of `old` has become `new`.
fn noticed(n: usize, old: &str, new: &str) {
    let shape = Shape::packed(1, 1, 64, &[0, 513]);
    let text = Variant::by_name("attention_hopper_bf16_64").unwrap().expand().unwrap();
    let (at, _) = text.match_indices(old).nth(n).unwrap_or_else(|| panic!("nothing to replace: {old}"));
    let text = format!("{}{new}{}", &text[..at], &text[at + old.len()..]);
    for schedule in 0..2 {
        assert!(
            forward(Some(&text), "bf16", &shape, schedule).is_err(),
            "schedule {schedule}: {old} {n} -> {new} passes"
        );
    }
}
#[test]
fn what_orders_the_warpgroups_is_needed() {
    for n in 0..3 {
        noticed(n, "@%leader mbarrier.arrive.shared::cta.b64", "//");
    }
    // Each wait asks once: the producer's for its place (the first one is free), the consumers' for their tiles.
    let wait = "@!%done bra             AGAIN;";
    let waits = Variant::by_name("attention_hopper_bf16_64").unwrap().expand().unwrap().matches(wait).count();
    (1..waits).for_each(|n| noticed(n, wait, ""));
    noticed(0, "bar.sync                0;", "");
    noticed(0, "fence.mbarrier_init.release.cluster;", "");
    noticed(0, "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;");
    (0..3).for_each(|n| noticed(n, "wgmma.wait_group.sync.aligned 0;", ""));
}
