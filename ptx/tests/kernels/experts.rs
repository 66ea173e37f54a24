//! One launch of each kernel of mixtures of experts, for cases.rs; tests/device/conformance/experts.rs compares values.
use super::cases::{Case, ConcatSlots};
use super::harness::*;
use flatshard_ptx::kernels::experts::{GroupedKernel, hopper_grouped, plain_grouped, tile_grouped};

const TOKENS: usize = 64;
const EXPERTS: usize = 40;
const TOP_K: usize = 4;
const ROWS: usize = TOKENS * TOP_K;

fn case(shape: &'static str, floor: usize, job: Job) -> Case {
    Case { shape, floor, job }
}
fn ints<const N: usize>(values: [usize; N]) -> Vec<Slot> {
    values.map(int).into_iter().collect()
}
fn words(values: impl Iterator<Item = usize>) -> Slot {
    In(U32, values.map(|v| v as f64).collect())
}
/// Every 7th expert.
fn chosen() -> Slot {
    words((0..ROWS).map(|i| i * 7 % EXPERTS))
}

fn routing() -> Vec<Case> {
    let (probs, shape) = (TOKENS * EXPERTS, "64x40x4");
    let floats = |seed, n| In(F32, normal(seed, n));
    let positive = |n| In(F32, normal(4, n).iter().map(|x| x.abs() + 0.1).collect());
    let sizes = || ints([TOKENS, EXPERTS, TOP_K, 1]);
    let sort = vec![chosen(), Out(U32, EXPERTS + 1), Out(U32, ROWS), Out(U32, ROWS), int(ROWS), int(EXPERTS)];
    // Four runs in the reverse order.
    let (placed, length) = (4096, 1024);
    let run = |run: usize| [run * length, placed - (run + 1) * length, length];
    let runs = vec![words((0..4).flat_map(run)), Out(U32, placed), Out(U32, placed), int(4)];
    let given = vec![positive(probs), chosen(), positive(ROWS), floats(3, ROWS), floats(5, EXPERTS), Out(F32, probs)];
    let offsets = words((0..=EXPERTS).map(|e| e * 6));
    let added = |n| InOut(F64, vec![1.0; n]);
    let load = vec![positive(probs), offsets, added(EXPERTS), added(EXPERTS), int(TOKENS), int(EXPERTS)];
    // Sigmoids, eight groups of which a token uses three, and a factor of the weights.
    let rule = || vec![int(1), int(8), int(3), real(2.5), real(-1.0)];
    let by = |bias| [vec![InOut(F32, normal(1, probs)), Out(U32, ROWS), Out(F32, ROWS)], sizes(), vec![bias], rule()];
    let scored = |(dtype, name): (DType, &str)| {
        let slots = by(In(dtype, normal(6, EXPERTS))).concat_slots();
        case(shape, 8 * probs + 8 * ROWS, job(format!("route_scored_{name}"), 3, 256, slots))
    };
    let factored = |(dtype, name): (DType, &str)| {
        let of = |entry, ctas, slots| Job { entry, ..job(format!("scale_chosen_{name}"), ctas, 256, slots) };
        let slots = vec![chosen(), In(dtype, normal(6, EXPERTS)), floats(7, ROWS), Out(F32, ROWS), long(ROWS)];
        let sums = vec![chosen(), floats(7, ROWS), floats(8, ROWS), InOut(F32, normal(9, EXPERTS)), long(ROWS)];
        [
            case("256", 12 * ROWS, of("scale_chosen", 1, slots)),
            case("256x40", 12 * ROWS + 8 * EXPERTS, of("scale_chosen_sums", EXPERTS as u32, sums)),
        ]
    };
    let layers = 3;
    let summed = In(F64, (0..(layers + 1) * EXPERTS).map(|i| i as f64).collect());
    let out = vec![summed, In(F32, vec![0.5]), Out(F32, EXPERTS), added(1 + layers * EXPERTS)];
    let cases = vec![
        case("4x1024", 8 * placed + 12 * 4, job("place_runs", 3, 64, runs)),
        case(shape, 8 * probs + 8 * ROWS, job("route", 3, 256, by(long(0)).concat_slots())),
        case(shape, 12 * ROWS + 4 * EXPERTS, job("route_sort", EXPERTS as u32, 64, sort)),
        case(
            shape,
            8 * probs + 12 * ROWS,
            job("route_backward", 3, 256, [given, sizes(), vec![int(1), real(2.5), real(-1.0)]].concat_slots()),
        ),
        case(shape, 4 * probs + 36 * EXPERTS, job("route_load", 2, 1024, load)),
        case(
            "3x40",
            24 * layers * EXPERTS + 12 * EXPERTS,
            job("balance", 1, 32, [out, ints([layers, EXPERTS, TOP_K])].concat_slots()),
        ),
    ];
    cases.into_iter().chain(DTYPES.into_iter().map(scored)).chain(DTYPES.into_iter().flat_map(factored)).collect()
}

fn rows(dtype: DType, name: &str) -> Vec<Case> {
    let (tokens, top_k, size) = (7, 2, dtype.size());
    let mut cases = vec![];
    for (shape, columns) in [("7x1024", 1024), ("7x257", 257)] {
        let (r, of_tokens) = (tokens * top_k, tokens * columns);
        let x = |seed, n| In(dtype, normal(seed, n));
        let both = |seed, n| InOut(dtype, normal(seed, n));
        let order = || words((0..r).map(|i| i * 5 % r));
        let weights = || In(F32, normal(2, r));
        if dtype != F16 {
            let bits = 8 * size;
            let slots = vec![order(), x(1, of_tokens), Out(dtype, r * columns), int(r), int(columns), int(top_k)];
            let floor = 2 * r * columns * size + 4 * r;
            cases.push(case(shape, floor, job(format!("take_rows_b{bits}"), 2, 64, slots)));
        }
        let slots = vec![order(), weights(), x(1, r * columns), both(3, of_tokens)];
        let slots = [slots, ints([tokens, columns, top_k, 1, 1, 1])].concat_slots();
        let floor = (r + 2 * tokens) * columns * size + 8 * r;
        cases.push(case(shape, floor, job(format!("combine_rows_{name}"), 2, 64, slots)));
        let slots = vec![order(), weights(), both(1, r * columns), both(3, r * columns), Out(F32, r)];
        let slots = [slots, ints([r, columns, 1])].concat_slots();
        cases.push(case(shape, 4 * r * columns * size + 12 * r, job(format!("weigh_rows_{name}"), 2, 64, slots)));
        // Biases of three experts, one of which has no rows; the last row has no expert.
        let (offsets, bias) = (|| words([0, 5, 5, r - 1].into_iter()), || x(1, 3 * columns));
        let biases = |entry, grid, block, slots: Vec<Vec<Slot>>| {
            let slots = slots.into_iter().flatten().collect();
            Job { entry, grid, ..job(format!("expert_bias_{name}"), 1, block, slots) }
        };
        let sizes = || ints([columns, columns]);
        let slots = vec![vec![bias(), offsets(), both(2, r * columns)], ints([r]), sizes(), ints([3])];
        let floor = (2 * (r - 1) + 2) * columns * size;
        cases.push(case(shape, floor, biases("expert_bias", [2, 1], 64, slots)));
        let given = vec![offsets(), order(), weights(), x(3, r * columns), Out(F32, 3 * columns)];
        let grid = [3, columns.div_ceil(256) as u32];
        let sums = biases("expert_bias_sums", grid, 256, vec![given, sizes(), ints([1, 1, 0])]);
        cases.push(case(shape, (r - 1) * columns * size + 12 * columns, sums));
        let given = vec![bias(), offsets(), order(), x(3, r * columns), InOut(F32, normal(4, r))];
        let of_weights = biases("expert_bias_weights", [2, 1], 64, vec![given, ints([r]), sizes(), ints([3, 1])]);
        cases.push(case(shape, (r + 1) * columns * size, of_weights));
    }
    cases
}

/// Groups that end within a tile, and one without rows.
fn products(dtype: DType, name: &str) -> Vec<Case> {
    const OFFSETS: [usize; 4] = [0, 140, 140, 200];
    let (groups, rows) = (3, 200);
    let mut cases = vec![];
    let families = [
        (plain_grouped(name), "200x70x33", 70usize, 33usize),
        (tile_grouped(name), "200x136x72", 136, 72),
        (hopper_grouped(name), "200x136x72", 136, 72),
    ];
    for (family, shape, n, k) in families {
        for (kind, &GroupedKernel { variant, rows: tile, columns, shared }) in family.into_iter().flatten().enumerate()
        {
            let (rows_n, rows_k, matrices) = (rows * n, rows * k, groups * n * k);
            let (a, b, out, to, tiles) = match kind {
                2 => (rows_n, rows_k, matrices, F32, groups * n.div_ceil(tile) * k.div_ceil(columns)),
                _ => (rows_k, matrices, rows_n, dtype, (rows / tile + groups) * n.div_ceil(columns)),
            };
            let operands = vec![In(dtype, normal(1, a)), In(dtype, normal(2, b)), InOut(to, normal(3, out))];
            let sizes = [ints([groups, rows, n, k]), vec![long(n * k), int(1)]].concat_slots();
            let slots = [vec![words(OFFSETS.into_iter())], operands, sizes].concat_slots();
            let floor = (a + b) * dtype.size() + 2 * out * to.size();
            cases.push(case(shape, floor, Job { shared, ..job(variant, tiles as u32, 256, slots) }));
        }
    }
    cases
}

fn sigmoids() -> Vec<Case> {
    let n = 4099;
    let both = |seed| InOut(F32, normal(seed, n));
    vec![
        case("4099", 8 * n, job("sigmoid", 3, 256, vec![both(1), long(n)])),
        case("4099", 12 * n, job("sigmoid_backward", 3, 256, vec![In(F32, normal(1, n)), both(2), long(n)])),
    ]
}

pub fn cases() -> Vec<Case> {
    let each = |(dtype, name)| [rows(dtype, name), products(dtype, name)].into_iter().flatten();
    [routing(), sigmoids()].into_iter().flatten().chain(DTYPES.into_iter().flat_map(each)).collect()
}
