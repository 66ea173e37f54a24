//! Attention for sm_90a against f64 at odd sizes, under several schedules, which must agree to the bit; and without each
//! thing that orders its warpgroups.
use crate::reference::{Inputs, Outputs, Shape, Sight, attention};
use flatshard_ptx::emulate::{Argument, Counts, Launch, Memory, Report, Swizzle, TensorMap, parse};
use flatshard_ptx::kernels::Variant;
use flatshard_ptx::kernels::attention::Kernel;
use flatshard_ptx::kernels::attention_hopper::{BOX, Tiles, sm_90a_family};
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

/// Where a fault is planted: the entry, and what becomes of its text.
type Plant<'a> = Option<(&'a str, &'a dyn Fn(String) -> String)>;

struct Bench<'a> {
    dtype: &'a str,
    shape: &'a Shape,
    schedule: u64,
    plant: Plant<'a>,
}
impl Bench<'_> {
    fn launch(
        &self,
        tiles: &Tiles,
        rows: usize,
        heads: usize,
        arguments: &[Argument],
        memory: &mut Memory,
    ) -> Result<Counts, Report> {
        let Kernel { variant, entry, rows: side, threads, shared } = tiles.kernel;
        let variant = Variant::by_name(variant).unwrap();
        let mut text = variant.expand().unwrap_or_else(|e| panic!("{e}"));
        if let Some((_, change)) = self.plant.filter(|(name, _)| *name == entry) {
            text = change(text);
        }
        let kernels = parse(variant.file, &text).unwrap_or_else(|e| panic!("{e}"));
        let kernel = kernels.iter().find(|k| k.name == entry).unwrap();
        let grid = [(rows as u32).div_ceil(side), heads as u32, 1];
        let (block, dynamic_shared) = ([threads, 1, 1], shared as usize);
        Launch { kernel, grid, block, dynamic_shared, arguments, schedule: self.schedule }.run(memory)
    }
    /// A ring pass adds its gradients to `before`.
    fn run(
        &self,
        x: &Inputs,
        lse_and_delta: Option<[&[f64]; 2]>,
        before: f64,
    ) -> Result<(Outputs, Vec<Counts>), Report> {
        let Bench { dtype, shape, .. } = *self;
        let family = sm_90a_family(dtype, shape.head_dim).unwrap();
        let Shape { heads, kv_heads, head_dim, .. } = *shape;
        let (queries, keys) = shape.rows();
        let (nq, nk, wq, wk) = (queries.len(), keys.len(), heads * head_dim, kv_heads * head_dim);
        let packed = matches!(shape.sight, Sight::Packed(_));
        let mut memory = Memory::new();
        // Fused rows; in a pass the keys and values stand in a buffer of their own.
        let rows = |parts: &[(&[f64], usize)], n: usize| -> Vec<f64> {
            (0..n).flat_map(|i| parts.iter().flat_map(move |(x, w)| x[i * w..(i + 1) * w].to_vec())).collect()
        };
        let (q, k, q_row, kv_row);
        if packed {
            (q_row, kv_row) = (wq + 2 * wk, wq + 2 * wk);
            q = memory.upload("qkv", &encode(dtype, &rows(&[(&x.q, wq), (&x.k, wk), (&x.v, wk)], nq)));
            k = q + 2 * wq as u64;
        } else {
            (q_row, kv_row) = (wq, 2 * wk);
            q = memory.upload("q", &encode(dtype, &x.q));
            k = memory.upload("kv", &encode(dtype, &rows(&[(&x.k, wk), (&x.v, wk)], nk)));
        }
        let v = k + 2 * wk as u64;
        let d_o = memory.upload("d_o", &encode(dtype, &x.d_o));
        let map = |address: u64, heads: usize, rows: usize, row: usize, side: u32| {
            let sizes = [head_dim, heads, rows].map(|n| n as u64).to_vec();
            let strides = [head_dim, row].map(|n| 2 * n as u64).to_vec();
            let map =
                TensorMap { address, element: 2, sizes, strides, tile: vec![BOX, 1, side], swizzle: Swizzle::B128 };
            Argument::TensorMap(map.encode().unwrap())
        };
        let tables = shape.tables();
        let bounds = match packed {
            true => {
                [memory.upload(
                    "cu_seqlens",
                    &shape.cu_seqlens().iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<u8>>(),
                ); 2]
            }
            false => [0, 1].map(|of: usize| {
                let ends = tables[of].iter().flat_map(|r| [r.start, r.end]).flat_map(u32::to_le_bytes);
                memory.upload("ranges", &ends.collect::<Vec<u8>>())
            }),
        };
        let documents = if packed { shape.cu_seqlens().len() - 1 } else { 0 };
        let tail = |of: usize, out_row: usize| {
            let n = [documents, shape.window, nq, nk, q_row, kv_row, out_row, heads, kv_heads, head_dim];
            let mut tail = vec![Argument::Pointer(bounds[of])];
            tail.extend(n.map(|n| Argument::U32(n as u32)));
            tail.extend([shape.scale(), shape.softcap].map(|x| Argument::F32(x as f32)));
            tail
        };
        let (out, size) = if packed { (dtype, 2) } else { ("f32", 4) };
        let mut costs = vec![];
        let Some([lse, delta]) = lse_and_delta else {
            let (o, lse) = (memory.alloc("o", nq * wq * size), memory.alloc("lse", 4 * heads * nq));
            let Tiles { kernel, columns } = family.forward;
            let mut arguments = vec![map(q, heads, nq, q_row, kernel.rows)];
            arguments.extend([k, v].map(|at| map(at, kv_heads, nk, kv_row, columns)));
            arguments.extend([o, lse].map(Argument::Pointer));
            arguments.extend(tail(0, 0));
            costs.push(self.launch(&family.forward, nq, heads, &arguments, &mut memory)?);
            let o = decode(out, memory.download(o).unwrap());
            let lse = decode("f32", memory.download(lse).unwrap());
            return Ok((Outputs { o, lse, ..Outputs::default() }, costs));
        };
        let single = |x: &[f64]| x.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect::<Vec<u8>>();
        let (lse, delta) = (memory.upload("lse", &single(lse)), memory.upload("delta", &single(delta)));
        let mut gradient = |name: &str, n: usize| match packed {
            // Where sm_80's kernels do the rest, it is not missing.
            true if family.dkv.is_none() => memory.upload(name, &vec![0; 2 * n]),
            true => memory.alloc(name, 2 * n),
            false => memory.upload(name, &single(&vec![before; n])),
        };
        let (dq, dkv, dq_row, dkv_row);
        if packed {
            dq = gradient("dqkv", nq * q_row);
            (dkv, dq_row, dkv_row) = (dq + 2 * wq as u64, q_row, q_row);
        } else {
            (dq, dkv, dq_row, dkv_row) = (gradient("dq", nq * wq), gradient("dkv", nk * 2 * wk), wq, 2 * wk);
        }
        let Tiles { kernel, columns } = family.dq;
        let mut arguments = vec![map(q, heads, nq, q_row, kernel.rows)];
        arguments.extend([k, v].map(|at| map(at, kv_heads, nk, kv_row, columns)));
        arguments.push(map(d_o, heads, nq, wq, kernel.rows));
        arguments.extend([lse, delta, dq].map(Argument::Pointer));
        arguments.extend(tail(0, dq_row));
        costs.push(self.launch(&family.dq, nq, heads, &arguments, &mut memory)?);
        if let Some(tiles) = family.dkv {
            let Tiles { kernel, columns } = tiles;
            let mut arguments: Vec<Argument> = [k, v].map(|at| map(at, kv_heads, nk, kv_row, kernel.rows)).to_vec();
            arguments.extend([map(q, heads, nq, q_row, columns), map(d_o, heads, nq, wq, columns)]);
            arguments.extend([lse, delta, dkv].map(Argument::Pointer));
            arguments.extend(tail(1, dkv_row));
            costs.push(self.launch(&tiles, nk, kv_heads, &arguments, &mut memory)?);
        }
        let bytes = |at: u64| memory.download(at).map(|bytes| decode(out, bytes));
        let part = |x: &[f64], row: usize, at: usize, w: usize| {
            x.chunks(row).flat_map(|r| r[at..at + w].to_vec()).collect::<Vec<f64>>()
        };
        let mut outputs = Outputs::default();
        let (dq, dkv) = if packed {
            let all = bytes(dq).unwrap();
            (part(&all, q_row, 0, wq), part(&all, q_row, wq, 2 * wk))
        } else {
            (bytes(dq).unwrap(), bytes(dkv).unwrap())
        };
        outputs.dq = dq;
        outputs.dk = part(&dkv, 2 * wk, 0, wk);
        outputs.dv = part(&dkv, 2 * wk, wk, wk);
        Ok((outputs, costs))
    }
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
        let bench = Bench { dtype, shape, schedule, plant: None };
        let forward = bench.run(&x, None, before).unwrap_or_else(|report| panic!("{label}, {schedule}:\n{report}"));
        let backward = bench.run(&x, Some([&exact.lse, &delta]), before);
        (forward, backward.unwrap_or_else(|report| panic!("{label}, {schedule}:\n{report}")))
    };
    let ((forward, costs), (backward, more)) = run(0);
    for schedule in SCHEDULES {
        let again = run(schedule);
        let same =
            again.0.0.o == forward.o && again.0.0.lse == forward.lse && (&again.0.1, &again.1.1) == (&costs, &more);
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
        if name != "dq" && shape.head_dim > 128 {
            continue;
        }
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

/// Every schedule must notice that the n-th `old` of an entry has become `new`.
fn noticed(entry: &str, n: usize, old: &str, new: &str) {
    // Five tiles: more than the ring has places for.
    let n_rows = if entry == "attention_forward" { 513 } else { 257 };
    let shape = Shape::packed(1, 1, 64, &[0, n_rows]);
    let x = Inputs::new(&shape);
    let ones = vec![1.0; n_rows as usize];
    let change = |text: String| {
        let (at, _) = text.match_indices(old).nth(n).unwrap_or_else(|| panic!("nothing to replace: {old}"));
        format!("{}{new}{}", &text[..at], &text[at + old.len()..])
    };
    for schedule in 0..2 {
        let bench = Bench { dtype: "bf16", shape: &shape, schedule, plant: Some((entry, &change)) };
        let given: Option<[&[f64]; 2]> = if entry == "attention_forward" { None } else { Some([&ones, &ones]) };
        assert!(bench.run(&x, given, 0.0).is_err(), "{entry}, schedule {schedule}: {old} {n} -> {new} passes");
    }
}
#[test]
fn what_orders_the_warpgroups_is_needed() {
    for variant in ["forward", "dq", "dkv"] {
        let entry = format!("attention_{variant}");
        let text = Variant::by_name(&format!("attention_hopper_{variant}_bf16_64")).unwrap().expand().unwrap();
        for (old, new) in [
            ("@%leader mbarrier.arrive.shared::cta.b64", "//"),
            ("bar.sync                0;", ""),
            ("fence.mbarrier_init.release.cluster;", ""),
            ("wgmma.wait_group.sync.aligned 0;", ""),
        ] {
            (0..text.matches(old).count()).for_each(|n| noticed(&entry, n, old, new));
        }
        // Each wait asks once: the producer's for its place, the consumers' for their tiles. Forward's first place is free;
        // of two places that are read and given back together, the producer has waited for one when it comes to the other.
        let wait = "@!%done bra             AGAIN;";
        let idle = usize::from(variant != "forward");
        (0..text.matches(wait).count()).filter(|n| *n != idle).for_each(|n| noticed(&entry, n, wait, ""));
    }
    noticed("attention_forward", 0, "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;");
    noticed("attention_dq", 0, "wgmma.wait_group.sync.aligned 2;", "wgmma.wait_group.sync.aligned 3;");
    noticed("attention_dkv", 0, "wgmma.wait_group.sync.aligned 2;", "wgmma.wait_group.sync.aligned 4;");
}
