//! Values compared with f64 at odd sizes, under several schedules, which must agree bitwise.
use super::launch::{DType, Run};
use super::reference::{Inputs, Shape, Sight, attention};
use flatshard_ptx::emulate::{Argument, GlobalMemory, KernelLaunch, LATE, parse};
use flatshard_ptx::kernels::Variant;
use flatshard_ptx::kernels::attention::{AttentionFamily, plain_family, sm_80_family};

const SCHEDULES: [u64; 3] = [0, LATE | 1, LATE | 2];
/// Factor over the error of naive code that rounds every step to the element type.
const FORWARD: f64 = 2.0;
const GRADIENT: f64 = 3.0;
/// Tolerance where the naive code happens to be exact, as a fraction of the largest reference value.
const FLOOR: f64 = 1e-6;

fn compare(label: &str, factor: f64, got: &[f64], exact: &[f64], naive: &[f64]) {
    assert_eq!((got.len(), naive.len()), (exact.len(), exact.len()), "{label}: lengths");
    let errors = |of: &[f64]| {
        let (mut worst, mut sum) = (0.0f64, 0.0);
        for (i, (a, b)) in of.iter().zip(exact).enumerate() {
            let e = if a == b { 0.0 } else { (a - b).abs() };
            assert!(e.is_finite(), "{label}: element {i} is {a}, should be {b}");
            worst = worst.max(e);
            sum += e;
        }
        (worst, sum / exact.len().max(1) as f64)
    };
    let largest = exact.iter().fold(0.0f64, |m, x| if x.is_finite() { m.max(x.abs()) } else { m });
    let ((worst, mean), (naive_worst, naive_mean)) = (errors(got), errors(naive));
    let floor = FLOOR * largest.max(1.0);
    assert!(worst <= factor * naive_worst + floor, "{label}: largest error {worst:e}, naive {naive_worst:e}");
    assert!(mean <= factor * naive_mean + floor, "{label}: mean error {mean:e}, naive {naive_mean:e}");
}

/// Forward and backward: the same bits under every schedule, and close to the reference.
fn check(family: &AttentionFamily, dtype: DType, shape: &Shape) {
    let label = format!("{} of {shape:?}", family.forward.variant);
    let x = Inputs::new(shape);
    let before = 0.5;
    let run = |schedule| {
        let run = Run { family, dtype, shape, schedule, plant: None, alone: None };
        run.run(&x, before).unwrap_or_else(|report| panic!("{label}, schedule {schedule}:\n{report}")).0
    };
    let got = run(SCHEDULES[0]);
    for schedule in &SCHEDULES[1..] {
        let again = run(*schedule);
        let same = |a: &[f64], b: &[f64]| a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits()));
        assert!(same(&again.o, &got.o) && same(&again.lse, &got.lse), "{label}: forward, schedule {schedule}");
        let gradients = same(&again.dq, &got.dq) && same(&again.dk, &got.dk) && same(&again.dv, &got.dv);
        assert!(gradients, "{label}: backward, schedule {schedule}");
    }
    let (exact, naive) = (attention(shape, &x, &|v| v), attention(shape, &x, &|v| dtype.round(v)));
    compare(&format!("{label}: o"), FORWARD, &got.o, &exact.o, &naive.o);
    compare(&format!("{label}: lse"), FORWARD, &got.lse, &exact.lse, &naive.lse);
    let added = if matches!(shape.sight, Sight::Packed(_)) { 0.0 } else { before };
    for (name, got, exact, naive) in [
        ("dq", &got.dq, &exact.dq, &naive.dq),
        ("dk", &got.dk, &exact.dk, &naive.dk),
        ("dv", &got.dv, &exact.dv, &naive.dv),
    ] {
        let got: Vec<f64> = got.iter().map(|x| x - added).collect();
        compare(&format!("{label}: {name}"), GRADIENT, &got, exact, naive);
    }
}

fn shapes(head_dim: usize) -> Vec<Shape> {
    let packed = |heads, kv_heads, cu: &[u32]| Shape::packed(heads, kv_heads, head_dim, cu);
    let pass = |cu: &[u32], queries: Vec<u32>, keys: Vec<u32>| {
        let sight = Sight::Pass { cu_seqlens: cu.to_vec(), queries, keys };
        Shape { sight, ..packed(2, 1, cu) }
    };
    vec![
        packed(1, 1, &[0, 1]),
        packed(2, 1, &[0, 5, 5, 69, 70]),
        Shape { window: 9, ..packed(1, 1, &[0, 3, 68]) },
        Shape { softcap: 2.0, ..packed(1, 1, &[0, 33]) },
        // Zigzag: chunks 0 and 3 of a sequence over chunks 1 and 2; and over themselves.
        pass(&[0, 64], (0..16).chain(48..64).collect(), (16..48).collect()),
        Shape { window: 20, ..pass(&[0, 64], (0..16).chain(48..64).collect(), (0..16).chain(48..64).collect()) },
        // Documents split anywhere: an earlier block, which later documents do not attend to; and a later block.
        pass(&[0, 10, 37, 90], (30..61).collect(), (5..30).collect()),
        pass(&[0, 10, 37, 90], (5..30).collect(), (30..61).collect()),
    ]
}

#[test]
fn plain_kernels() {
    for (dtype, head_dim) in [(DType::F32, 3), (DType::F32, 40), (DType::Bf16, 5), (DType::F16, 5), (DType::Bf16, 300)]
    {
        let family = plain_family(dtype.name(), head_dim).unwrap();
        shapes(head_dim).iter().for_each(|shape| check(family, dtype, shape));
    }
}

#[test]
fn sm_80_kernels() {
    for (dtype, head_dim) in [(DType::Bf16, 64), (DType::Bf16, 80), (DType::F16, 128), (DType::Bf16, 256)] {
        for shape in shapes(head_dim) {
            check(sm_80_family(dtype.name(), head_dim, shape.softcap as f32).unwrap(), dtype, &shape);
        }
    }
}

/// Documents one short of a tile, one more, and two tiles and one; three query heads per key head.
#[test]
fn sm_80_kernels_around_the_size_of_a_tile() {
    let family = sm_80_family("bf16", 64, 0.0).unwrap();
    check(family, DType::Bf16, &Shape::packed(3, 1, 64, &[0, 63, 128, 257]));
}

/// What the kernels of sm_90a add to exponents: of (heads, rows), finite even where a row has seen nothing; and delta
/// again, each head at a multiple of four, with zeros in between.
#[test]
fn offsets_of_exponents() {
    let (heads, rows, dim) = (2usize, 5, 24);
    let lse = [0.0, 1.5, f32::NEG_INFINITY, -7.25, 88.0, f32::NEG_INFINITY, 1e-3, -3e38, 3e38, 2.0];
    let x: Vec<f64> = (0..heads * rows * dim).map(|i| (i % 7) as f64 - 3.0).collect();
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let variant = Variant::by_name(&format!("attention_delta_{}", dtype.name())).unwrap();
        let kernels = parse(variant.file, &variant.expand().unwrap()).unwrap();
        let mut memory = GlobalMemory::new();
        let [o, d_o] = ["o", "d_o"].map(|name| memory.upload(name, &dtype.encode(&x)));
        let given = memory.upload("lse", &lse.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        let pitch = rows.next_multiple_of(4);
        let (delta, numbers) = (memory.alloc("delta", 4 * lse.len()), memory.alloc("numbers", 2 * 4 * heads * pitch));
        let mut arguments = [o, d_o, given, delta, numbers].map(Argument::Pointer).to_vec();
        arguments.extend([rows, heads, dim].map(|n| Argument::U32(n as u32)));
        let (grid, block) = ([rows.div_ceil(4) as u32, heads as u32, 1], [128, 1, 1]);
        let arguments = &arguments;
        KernelLaunch { kernel: &kernels[0], grid, block, dynamic_shared: 0, arguments, schedule: 1 }
            .run(&mut memory)
            .unwrap_or_else(|report| panic!("{report}"));
        let bits = |at| memory.download(at).unwrap().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let (delta, numbers): (Vec<u32>, Vec<u32>) = (bits(delta), bits(numbers));
        let (exponents, again) = numbers.split_at(heads * pitch);
        let of = |head: usize, row: usize| (row * heads + head) * dim;
        let sum = |at: usize| x[at..at + dim].iter().map(|x| x * x).sum::<f64>() as f32;
        for (i, lse) in lse.iter().enumerate() {
            assert_eq!(f32::from_bits(delta[i]), sum(of(i / rows, i % rows)), "delta {i}");
            let wanted = (-std::f32::consts::LOG2_E * lse).min(f32::MAX);
            let at = i / rows * pitch + i % rows;
            assert_eq!((exponents[at], wanted.is_finite() || *lse > 2e38), (wanted.to_bits(), true), "{lse}");
            assert_eq!(again[at], delta[i], "delta {i}");
        }
        let between = (0..heads * pitch).filter(|at| at % pitch >= rows);
        between.for_each(|at| assert_eq!([exponents[at], again[at]], [0, 0], "{at}"));
    }
}
