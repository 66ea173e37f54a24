//! One launch of each variant's entry points, for properties checked on all: their cost, and that each barrier is
//! needed.
use super::harness::*;
use super::{experts, recurrences};

pub struct Case {
    pub shape: &'static str,
    /// Minimum bytes of global memory that must move.
    pub floor: usize,
    pub job: Job,
}

const N: usize = 4099;
const ROWS: usize = 7;
const COLUMNS: usize = 1024;

fn case(shape: &'static str, floor: usize, job: Job) -> Case {
    Case { shape, floor, job }
}
fn input(seed: u64, dtype: DType, n: usize) -> Slot {
    In(dtype, normal(seed, n))
}
fn both(seed: u64, dtype: DType, n: usize) -> Slot {
    InOut(dtype, normal(seed, n))
}
/// Over N elements: the operands, then N.
fn flat(variant: &str, mut slots: Vec<Slot>, more: Vec<Slot>) -> Case {
    let moved = |slot: &Slot| match slot {
        In(dtype, values) => dtype.size() * values.len(),
        InOut(dtype, values) => 2 * dtype.size() * values.len(),
        Out(dtype, n) => dtype.size() * n,
        Value(_) => 0,
    };
    let floor = slots.iter().map(moved).sum();
    slots.push(long(N));
    slots.extend(more);
    case("4099", floor, job(variant, 3, 256, slots))
}

fn optimizers() -> Vec<Case> {
    let mut cases = vec![];
    let scale = || In(F32, vec![1.0, 1.0]);
    let copies = [("", Out(F32, 0)), ("_bf16", Out(Bf16, N)), ("_f16", Out(F16, N)), ("_f32", Out(F32, N))];
    for (suffix, out) in copies {
        let again = || match out {
            Out(dtype, n) => Out(dtype, n),
            _ => unreachable!(),
        };
        let state = |n: u64| (1..n).map(|i| both(i, F32, N)).collect::<Vec<_>>();
        let constants = || In(F32, vec![0.99, 0.1, 0.95, 0.05, 0.01, 1.0, 1e-8, 0.0]);
        let step = |state| [vec![input(0, F32, N)], state, vec![again(), constants(), scale()]].concat_slots();
        cases.push(flat(&format!("adamw{suffix}"), step(state(4)), vec![]));
        // What is stored in bf16 is rounded.
        let place = || Vec::from([7, 5, 3, 0, 0].map(long));
        let stored = |m, p| step(vec![both(1, m, N), both(2, m, N), both(3, p, N)]);
        cases.push(flat(&format!("adamw_moments{suffix}"), stored(Bf16, F32), place()));
        if matches!(out, Out(F32, 0) | Out(Bf16, _)) {
            cases.push(flat(&format!("adamw_master{suffix}"), stored(F32, Bf16), place()));
            cases.push(flat(&format!("adamw_both{suffix}"), stored(Bf16, Bf16), place()));
        }
        for (name, p) in [("", F32), ("_master", Bf16)] {
            if p == F32 || matches!(out, Out(F32, 0) | Out(Bf16, _)) {
                let mut slots = vec![input(0, F32, N), block_codes(1), block_codes(2), both(3, p, N), again()];
                slots.extend([of_blocks(4), of_blocks(5), In(F32, block_tables()), constants(), scale()]);
                let more = if p == F32 { vec![] } else { place() };
                cases.push(flat(&format!("adamw_blocks{name}{suffix}"), slots, more));
            }
        }
        for (name, m) in [("sgd", 0), ("sgd_momentum", N)] {
            let constants = In(F32, vec![0.1, 0.9, 0.01]);
            let slots = vec![input(0, F32, N), both(1, F32, m), both(2, F32, N), again(), constants, scale()];
            cases.push(flat(&format!("{name}{suffix}"), slots, vec![]));
        }
    }
    for (dtype, name) in [(F32, "f32"), (Bf16, "bf16")] {
        let slots = vec![input(0, F32, N), both(1, dtype, N), scale()];
        let more = vec![long(17), real(3.0), real(-5.0), real(2.0)];
        cases.push(flat(&format!("polynomial_{name}"), slots, more));
    }
    cases
}
/// Any bytes of moments in blocks, and the largest magnitudes.
fn block_codes(seed: usize) -> Slot {
    InOut(U8, (0..N).map(|i| ((seed + i) * 167 % 256) as f64).collect())
}
fn of_blocks(seed: u64) -> Slot {
    InOut(F32, normal(seed, N.div_ceil(256)).iter().map(|x| x.abs()).collect())
}
/// The operand `tables` of adamw_blocks: even fractions, from -1 and from 0, and halfway between them.
pub fn block_tables() -> Vec<f64> {
    let fractions = [-1.0, 0.0].map(|low| (0..256).map(|i| low + (1.0 - low) * i as f64 / 255.0).collect::<Vec<_>>());
    let bounds = fractions.each_ref().map(|all| all.windows(2).map(|w| (w[0] + w[1]) / 2.0).chain([9.0]).collect());
    [fractions, bounds].concat().concat()
}
pub trait ConcatSlots {
    fn concat_slots(self) -> Vec<Slot>;
}
impl<const K: usize> ConcatSlots for [Vec<Slot>; K] {
    fn concat_slots(self) -> Vec<Slot> {
        self.into_iter().flatten().collect()
    }
}

fn elements(dtype: DType, name: &str) -> Vec<Case> {
    let x = || input(1, dtype, N);
    let y = || Out(dtype, N);
    let of = |kernel: &str, slots| flat(&format!("{kernel}_{name}"), slots, vec![]);
    let mut cases = vec![
        of("add", vec![x(), both(2, dtype, N)]),
        of("gelu", vec![x(), y()]),
        flat(&format!("scale_{name}"), vec![both(1, dtype, N)], vec![real(0.3)]),
        flat(&format!("scale_by_{name}"), vec![both(1, dtype, N)], vec![In(dtype, vec![0.3])]),
        of("gelu_backward", vec![x(), x(), y()]),
        of("gelu_exact", vec![x(), y()]),
        of("gelu_exact_backward", vec![x(), x(), y()]),
        of("relu_squared", vec![x(), y()]),
        of("relu_squared_backward", vec![x(), x(), y()]),
        flat(&format!("clamp_{name}"), vec![both(1, dtype, N)], vec![real(-0.5), real(0.25)]),
        // The input is the last operand.
        Case {
            floor: 3 * N * dtype.size(),
            ..flat(&format!("clamp_backward_{name}"), vec![both(1, dtype, N)], vec![real(-0.5), real(0.25), x()])
        },
        flat(&format!("clamped_glu_{name}"), vec![input(1, dtype, 2 * N), y()], vec![real(1.7), real(1.0)]),
        flat(
            &format!("clamped_glu_backward_{name}"),
            vec![input(1, dtype, 2 * N), x(), Out(dtype, 2 * N)],
            vec![real(1.7), real(1.0)],
        ),
        flat(
            &format!("dropout_{name}"),
            vec![both(1, dtype, N), In(U32, vec![7.0, 0.0])],
            vec![int(1 << 30), real(4.0 / 3.0)],
        ),
    ];
    let curve = || [0.8, 0.7, 0.5, -0.25].map(|x| In(dtype, vec![x])).into();
    for (kind, slots) in [("", vec![x(), y()]), ("_backward", vec![x(), x(), y()])] {
        cases.push(flat(&format!("xielu{kind}_{name}"), slots, curve()));
    }
    cases.push(flat(&format!("xielu_grads_{name}"), vec![x(), x(), Out(F32, 6)], curve()));
    // 64 blocks of 64: codes, scales, one factor, the mean.
    let codes = (0..528u32).map(|i| i.wrapping_mul(2_654_435_761) as f64);
    let bytes = codes.chain([0.5f32, 0.25].map(|x| x.to_bits() as f64)).collect();
    let at = [long(0), long(2048), long(2112), long(2116), int(64), int(0), int(64)];
    let mut slots = vec![In(U32, bytes), Out(dtype, 4096), int(64), int(32), int(64)];
    slots.extend(at);
    let expand = job(format!("expand_{name}"), 1, 32, slots);
    cases.push(case("64x64", 2120 + 4096 * dtype.size(), Job { grid: [1, 4], ..expand }));
    for unit in ["swiglu", "geglu", "sigmoid_gate"] {
        cases.push(of(unit, vec![x(), x(), y()]));
        cases.push(of(&format!("{unit}_backward"), vec![x(), x(), x(), y(), y()]));
    }
    if dtype != F32 {
        cases.push(flat(&format!("cast_{name}_f32"), vec![x(), Out(F32, N)], vec![]));
        cases.push(flat(&format!("cast_f32_{name}"), vec![input(1, F32, N), y()], vec![]));
        cases.push(flat(&format!("add_{name}_f32"), vec![x(), both(2, F32, N)], vec![]));
    }
    cases
}

/// The parts of three ranks.
fn sums_of_ranks() -> Vec<Case> {
    let pairs = [(F32, F32, "f32"), (Bf16, Bf16, "bf16"), (F16, F16, "f16"), (F64, F64, "f64")];
    let wider = [(Bf16, F32, "bf16_f32"), (F16, F32, "f16_f32")];
    let case = |(from, to, name): (DType, DType, &str)| {
        let part = N.next_multiple_of(8);
        let more = vec![long(part * from.size()), int(3), int(0), int(0)];
        let floor = N * (3 * from.size() + to.size());
        Case { floor, ..flat(&format!("sum_ranks_{name}"), vec![input(1, from, 3 * part), Out(to, N)], more) }
    };
    pairs.into_iter().chain(wider).map(case).collect()
}

fn rows(dtype: DType, name: &str) -> Vec<Case> {
    let (n, size) = (ROWS * COLUMNS, dtype.size());
    let x = |columns: usize| input(1, dtype, ROWS * columns);
    let w = |columns: usize| input(2, dtype, columns);
    let of = |kernel: &str| format!("{kernel}_{name}");
    let shape = || [int(ROWS), int(COLUMNS)];
    let mut cases = vec![];
    let layer_norms =
        [("layernorm", 2 * ROWS, 1, 1), ("layernorm_from_one", 2 * ROWS, 1, 1), ("layernorm_plain", 2 * ROWS, 1, 0)];
    for (kernel, stats, layer, biased) in [("rmsnorm", ROWS, 0, 0)].into_iter().chain(layer_norms) {
        for (label, columns) in [("7x1024", COLUMNS), ("7x257", 257)] {
            let mut slots = vec![x(columns), w(columns)];
            slots.extend((biased == 1).then(|| w(columns)));
            slots.extend([Out(dtype, ROWS * columns), Out(F32, stats), int(ROWS), int(columns), real(1e-5)]);
            slots.extend((layer == 0).then(|| real(0.0)));
            // Each of the three CTAs reads the weights.
            let floor = 2 * ROWS * columns * size + 3 * (1 + biased) * columns * size + 4 * stats;
            cases.push(case(label, floor, job(of(kernel), 3, 64, slots)));
            if layer > biased {
                continue; // the gradients are those of LayerNorm
            }
            let mut slots =
                vec![x(columns), w(columns), input(3, F32, stats), x(columns), both(4, dtype, ROWS * columns)];
            slots.extend([Out(F32, (2 * columns) << layer), int(ROWS), int(columns)]);
            slots.extend((layer == 0).then(|| real(0.0)));
            let floor = 4 * ROWS * columns * size + 2 * columns * size + ((8 * columns) << layer) + 4 * stats;
            cases.push(case(label, floor, job(of(&format!("{kernel}_backward")), 2, 64, slots)));
        }
    }
    for (label, columns, first) in [("7x1024", COLUMNS, 0), ("7x257", 257, 3)] {
        let words = |n: usize| In(U32, vec![1.0; n]);
        let mut slots = vec![x(columns), words(2), words(ROWS), both(2, dtype, ROWS * columns)];
        slots.extend([int(ROWS), int(columns), int(first), int(1 << 30), real(4.0 / 3.0), int(1), int(1)]);
        let floor = 3 * ROWS * columns * size + 4 * (2 + ROWS);
        cases.push(case(label, floor, job(of("dropout_rows"), 3, 256, slots)));
    }
    let strips = COLUMNS.div_ceil(512 / size) as u32;
    let strip = |name: String, slots| Job { grid: [strips, 2], ..job(name, 1, 256, slots) };
    let tall = 256 * COLUMNS;
    let slots = vec![w(COLUMNS), both(1, dtype, tall), int(256), int(COLUMNS)];
    // Each of the sixteen warps of a strip reads its biases.
    cases.push(case("256x1024", 2 * tall * size + 16 * COLUMNS * size, strip(of("bias"), slots)));
    let slots = vec![input(1, dtype, tall), Out(F32, 2 * COLUMNS), int(256), int(COLUMNS)];
    cases.push(case("256x1024", tall * size + 8 * COLUMNS, strip(of("bias_backward"), slots)));
    let tokens = || In(U32, (0..ROWS).map(|i| (i % 3) as f64).collect());
    let table = || input(1, dtype, 3 * COLUMNS);
    let slots =
        [vec![tokens(), table(), Out(dtype, n), no_fault()], shape().into(), vec![real(1.0), int(0), int(0), int(3)]]
            .concat_slots();
    cases.push(case("7x1024", 2 * n * size, job(of("embed"), 3, 64, slots)));
    let (order, sorted) = ([0, 3, 6, 1, 4, 2, 5], [0, 0, 0, 1, 1, 2, 2]);
    let of_u32 = |values: [usize; ROWS]| In(U32, values.iter().map(|v| *v as f64).collect());
    let first = vec![of_u32(order), of_u32(sorted), x(COLUMNS), both(4, F32, 3 * COLUMNS), no_fault()];
    let slots = [first, shape().into(), vec![real(1.0), int(0), int(3)]].concat_slots();
    cases.push(case("7x1024", n * size + 3 * 8 * COLUMNS, job(of("embed_backward"), 2, 64, slots)));
    cases
}

fn heads(dtype: DType, name: &str) -> Vec<Case> {
    let mut cases = rotations(dtype, name, 128, "7x24x128");
    if dtype == F32 {
        cases.extend(rotations(dtype, "f32_512", 512, "7x24x512").split_off(2));
    }
    let heads = 16;
    let (all, dim) = (ROWS * heads, 256);
    let of_sink = |entry, ctas, slots| Job { entry, ..job(format!("sink_{name}"), ctas, 256, slots) };
    let slots = vec![input(1, dtype, heads), both(2, dtype, all * dim), both(3, F32, all), int(ROWS), int(heads)];
    let job = of_sink("sink", 2, [slots, vec![int(dim)]].concat_slots());
    let sink = case("7x16x256", 2 * all * dim * dtype.size() + 8 * all, job);
    let slots = vec![input(1, dtype, 2), input(2, F32, 4000), input(3, F32, 4000), both(4, F32, 2), int(2000)];
    let sink_backward = case("2000x2", 8 * 4000, of_sink("sink_backward", 2, slots));
    cases.extend([sink, sink_backward]);
    cases
}
/// Rotary positions alone, then with norms and their gradients, of heads of `d` elements.
fn rotations(dtype: DType, name: &str, d: usize, label: &'static str) -> Vec<Case> {
    let (heads, kv_heads) = (16, 4);
    let (row, rotated) = ((heads + 2 * kv_heads) * d, heads + kv_heads);
    let first = || vec![input(1, F32, ROWS * d), In(U32, (0..ROWS).map(|i| i as f64).collect())];
    let w = || vec![input(2, dtype, d), input(3, dtype, d), input(4, dtype, ROWS * row)];
    let turned = ROWS * rotated * d * dtype.size();
    let table = 4 * d * ROWS;
    let rope = |kernel: &str| {
        let slots = [
            first(),
            vec![both(4, dtype, ROWS * row), no_fault()],
            [ROWS, rotated, d, d, row].map(int).into_iter().collect(),
            vec![real(1.0)],
        ];
        case(label, 2 * turned + table, job(format!("{kernel}_{name}"), 2, 64, slots.concat_slots()))
    };
    let shape = || [ROWS, heads, kv_heads, d].map(int).into_iter().collect::<Vec<_>>();
    let out = vec![Out(dtype, ROWS * row), Out(F32, ROWS * rotated), no_fault()];
    let slots = [first(), w(), out, shape(), vec![real(1e-6), real(0.0)]].concat_slots();
    let floor = 2 * ROWS * row * dtype.size() + table;
    let forward = case(label, floor, job(format!("qk_norm_rope_{name}"), 2, 64, slots));
    let grads = vec![input(5, F32, ROWS * rotated), both(6, dtype, ROWS * row), Out(F32, 2 * 2 * d), no_fault()];
    let slots = [first(), w(), grads, shape(), vec![real(0.0)]].concat_slots();
    let floor = 3 * turned + table + 16 * d;
    let backward = case(label, floor, job(format!("qk_norm_rope_backward_{name}"), 2, 64, slots));
    vec![rope("rope"), rope("rope_adjacent"), forward, backward]
}

fn losses(dtype: DType, name: &str) -> Vec<Case> {
    let of = |variant: String, vocab: usize, shape| {
        let rows = 4;
        let slots = vec![
            In(I32, vec![1.0, vocab as f64 - 1.0, 9.0, 0.0]),
            both(1, dtype, rows * vocab),
            Out(F64, rows),
            no_fault(),
            In(F32, vec![1.0]),
            int(rows),
            int(vocab),
            real(30.0),
            int(0),
        ];
        case(shape, 2 * rows * vocab * dtype.size(), job(variant, 2, 64, slots))
    };
    // The second of two parts.
    let part = |cap: &str, vocab: usize| {
        let given = vec![In(I32, vec![1.0, 2.0 * vocab as f64 - 1.0, vocab as f64, 0.0]), input(1, dtype, 4 * vocab)];
        let slots = [given, vec![Out(F32, 12), no_fault(), int(4), int(vocab), int(vocab), real(30.0)]].concat_slots();
        case("4x2000", 4 * vocab * dtype.size(), job(format!("cross_entropy_part_{cap}{name}"), 2, 64, slots))
    };
    let finish = |cap: &str, vocab: usize| {
        let said = In(F32, [2.0, 3.0, 0.5].repeat(8));
        let given = vec![In(I32, vec![1.0, 2.0 * vocab as f64 - 1.0, vocab as f64, 0.0]), said];
        let out = vec![both(1, dtype, 4 * vocab), Out(F64, 4), no_fault(), In(F32, vec![1.0])];
        let sizes = [4, 2, vocab, vocab].map(int).into_iter().collect();
        let slots = [given, out, sizes, vec![real(30.0), int(0)]].concat_slots();
        case("4x2000", 8 * vocab * dtype.size(), job(format!("cross_entropy_finish_{cap}{name}"), 2, 64, slots))
    };
    let taught = || input(2, dtype, 4 * 2000);
    let distill_part = || {
        let given = In(I32, vec![1.0, 3999.0, 2000.0, 0.0]);
        let slots = vec![given, taught(), input(1, dtype, 4 * 2000), Out(F32, 28), no_fault()];
        let sizes = vec![int(4), int(2000), int(2000), real(0.0), real(0.0), real(0.5)];
        let job = job(format!("distill_part_{name}"), 2, 64, [slots, sizes].concat_slots());
        case("4x2000", 8 * 2000 * dtype.size(), job)
    };
    let distill_finish = || {
        let given = In(I32, vec![1.0, 3999.0, 2000.0, 0.0]);
        let said = In(F32, [2.0, 3.0, 4.0, 0.5, 2.0, 5.0, 0.1].repeat(8));
        let slots = vec![given, taught(), said, both(1, dtype, 4 * 2000), Out(F64, 4), no_fault(), In(F32, vec![1.0])];
        let sizes = [4, 2, 2000, 2000].map(int).into_iter().collect();
        let slots = [slots, sizes, [0.0, 0.0, 2.0, 0.5].map(real).into_iter().collect()].concat_slots();
        case("4x2000", 12 * 2000 * dtype.size(), job(format!("distill_finish_{name}"), 2, 64, slots))
    };
    vec![
        distill_part(),
        distill_finish(),
        part("", 2000),
        part("cap_", 2000),
        finish("", 2000),
        finish("cap_", 2000),
        of(format!("cross_entropy_{name}"), 2000, "4x2000"),
        of(format!("cross_entropy_{name}"), 5003, "4x5003"),
        of(format!("cross_entropy_cap_{name}"), 1500, "4x1500"),
    ]
}

fn single() -> Vec<Case> {
    // Adjacent blocks of very different magnitude: each adds to other limbs.
    let scales = [1.0, 1e-20, 1e18, 1e-5, 1e30, 1e-30, 1e10];
    let x: Vec<f64> = normal(3, 100 * N).iter().enumerate().map(|(i, x)| x * scales[i / 512 % 7]).collect();
    let squares = vec![In(F32, x), Out(U64, 3 * 68), long(100 * N)];
    let acc: Vec<f64> = (0..68).map(|i| i as f64).collect();
    let finish = vec![In(U64, vec![3.0; 3 * 68]), InOut(F64, acc.clone()), int(3)];
    let tokens = || In(U32, (0..300).map(|i| (i * 7 % 31) as f64).collect());
    let sort = vec![tokens(), Out(U32, 300), Out(U32, 300), no_fault(), int(300)];
    vec![
        case(
            "4099",
            4 * N,
            job("check", 3, 256, vec![In(U32, vec![3.0; N]), InOut(U64, vec![0.0]), int(N), int(4), int(0)]),
        ),
        case("68", 8 * 68, job("clip_scale", 1, 96, vec![In(F64, acc), Out(F32, 2), In(F32, vec![1.0]), real(1.0)])),
        case("300", 12 * 300, job("embed_sort", 10, 256, sort)),
        case("300", 8 * 300, job("sum_losses", 1, 256, vec![input(1, F64, 300), InOut(F64, vec![0.0]), int(300)])),
        case(
            "130x96",
            4 * 130 * 96 + 8 * 96,
            job("sum_rows", 3, 1024, vec![input(1, F32, 130 * 96), both(2, F32, 96), int(130), int(96)]),
        ),
        case("409900", 400 * N, Job { entry: "sum_squares", ..job("sum_squares", 3, 256, squares) }),
        case("3", 5 * 68 * 8, Job { entry: "sum_squares_finish", ..job("sum_squares", 1, 1024, finish) }),
    ]
}

/// Rows of whole vectors, and others.
fn fp8() -> Vec<Case> {
    let mut cases = vec![];
    for (label, rows, columns) in [("256x384", 256, 384), ("7x257", ROWS, 257)] {
        let (n, across) = (rows * columns, columns.div_ceil(128));
        let sizes = || [rows, columns].map(int).into_iter();
        for (format, tall) in [("e4m3", 1), ("e5m2", 1), ("weight", 128)] {
            let blocks = rows.div_ceil(tall) * across;
            let slots = vec![input(1, Bf16, n), Out(U8, n), Out(F32, blocks)];
            let slots = slots.into_iter().chain(sizes()).chain([columns, across, 1].map(int)).collect();
            cases.push(case(label, 3 * n + 4 * blocks, job(format!("quantize_{format}"), 2, 256, slots)));
            if tall == 1 {
                let codes = In(U8, (0..n).map(|i| (i * 37 % 120) as f64).collect());
                let scales = In(F32, (0..blocks).map(|i| 2f64.powi(i as i32 % 9 - 4)).collect());
                let slots = [codes, scales, Out(Bf16, n)].into_iter().chain(sizes()).chain([int(tall)]).collect();
                cases.push(case(label, 3 * n + 4 * blocks, job(format!("dequantize_{format}"), 2, 256, slots)));
            }
        }
        // All elements but some at both ends of the weight: as shards end, and anywhere.
        let ends = if columns.is_multiple_of(128) { 256 } else { 1 };
        let (len, blocks) = (n - 2 * ends, rows.div_ceil(128) * across);
        for (dtype, name) in [(F32, "f32"), (Bf16, "bf16")] {
            let part = || [long(ends), long(len)].into_iter().chain(sizes());
            let floor = dtype.size() * len + 4 * blocks;
            let slots = [input(1, dtype, len), InOut(F32, vec![0.0; blocks])].into_iter().chain(part()).collect();
            cases.push(case(label, floor, job(format!("raise_scales_{name}"), 2, 256, slots)));
            let scales = In(F32, (0..blocks).map(|i| 2f64.powi(i as i32 % 9 - 12)).collect());
            let slots = [input(1, dtype, len), scales, Out(U8, len)].into_iter().chain(part()).collect();
            cases.push(case(label, floor + len, job(format!("encode_{name}"), 2, 256, slots)));
        }
    }
    let (rows, columns, blocks) = (256, 384, 6);
    let (codes, scales) = (input(1, U8, rows * columns), input(2, F32, blocks));
    let slots = vec![codes, scales, Out(U8, rows * columns), Out(F32, 12), int(rows), int(columns)];
    let floor = 2 * rows * columns + 4 * (blocks + 12);
    cases.push(case("256x384", floor, job("transpose_codes", 2, 256, slots)));
    cases
}

pub fn cases() -> Vec<Case> {
    let mut cases =
        [single(), fp8(), sums_of_ranks(), optimizers(), experts::cases()].into_iter().flatten().collect::<Vec<_>>();
    for (dtype, name) in DTYPES {
        for family in [elements, rows, heads, losses, recurrences::cases] {
            cases.extend(family(dtype, name));
        }
    }
    cases
}
