//! One launch of each kernel of gated delta rules, Mamba 2 and short convolutions, for cases.rs; delta.rs and conv.rs
//! of tests/device/conformance compare values.
use super::cases::{Case, ConcatSlots};
use super::harness::*;

/// Two documents, which are also the rows of two sequences in slots.
const ROWS: usize = 70;
const STARTS: [usize; 3] = [0, 66, ROWS];

fn words(of: impl Fn(usize, usize) -> Vec<usize>) -> Slot {
    let of_row = |row| of(row, usize::from(row >= STARTS[1]));
    In(U32, (0..ROWS).flat_map(of_row).map(|word| word as f64).collect())
}
fn documents() -> Slot {
    words(|_, own| STARTS[own..own + 2].to_vec())
}
fn table() -> Slot {
    words(|row, own| vec![0, row - STARTS[own] + 1, 0, own])
}
fn input(seed: u64, dtype: DType, n: usize) -> Slot {
    In(dtype, normal(seed, n))
}
fn both(seed: u64, dtype: DType, n: usize) -> Slot {
    InOut(dtype, normal(seed, n))
}

fn convolutions(dtype: DType, name: &str) -> Vec<Case> {
    const CHANNELS: usize = 260;
    const TAPS: usize = 4;
    let mut cases = vec![];
    for (kind, parts) in [("short_conv", 1), ("short_conv_biased", 1), ("short_conv_gated", 3)] {
        let bias = || if kind == "short_conv_biased" { vec![input(5, dtype, CHANNELS)] } else { vec![] };
        let (x, y) = (ROWS * parts * CHANNELS, ROWS * CHANNELS);
        let mut add = |floor: usize, entry, chunks: usize, slots: Vec<Slot>, last: Vec<Slot>| {
            let inputs = vec![input(1, dtype, x), input(2, dtype, CHANNELS * TAPS)];
            let slots = [inputs, slots, vec![int(ROWS), int(CHANNELS), int(TAPS)], last, bias()].concat_slots();
            let slots = match (entry, bias().is_empty()) {
                ("short_conv_backward", false) => [slots, vec![Out(F32, 2 * CHANNELS)]].concat_slots(),
                _ => slots,
            };
            let job = Job { entry, grid: [2, chunks as u32], ..job(format!("{kind}_{name}"), 2, 256, slots) };
            cases.push(Case { shape: "70x260", floor: floor * dtype.size(), job });
        };
        add(x + y, "short_conv", 2, vec![documents(), Out(dtype, y)], vec![int(40)]);
        let memory = both(3, dtype, 2 * (TAPS - 1) * CHANNELS);
        add(x + y, "short_conv_carried", ROWS, vec![table(), memory, Out(dtype, y)], vec![]);
        let slots = vec![documents(), input(4, dtype, y), Out(dtype, x), Out(F32, 2 * CHANNELS * TAPS)];
        add(2 * x + y, "short_conv_backward", 2, slots, vec![int(40), int(1)]);
    }
    cases
}

fn delta_rules(dtype: DType, name: &str) -> Vec<Case> {
    const KEY_HEADS: usize = 1;
    const HEADS: usize = 1;
    const VALUE_DIM: usize = 20;
    let values = ROWS * HEADS * VALUE_DIM;
    let mut cases = vec![];
    for (kind, key_dim, shape) in [
        ("delta_rule", 20, "70x20x20"),
        ("delta_rule_wide", 130, "70x130x20"),
        ("mamba_rule", 20, "70x20x20"),
        ("mamba_rule_wide", 130, "70x130x20"),
    ] {
        let is_mamba = kind.starts_with("mamba");
        let (state, of_keys) = (HEADS * key_dim * VALUE_DIM, 2 * ROWS * HEADS * key_dim);
        let qkv = 2 * ROWS * KEY_HEADS * key_dim + values;
        let sizes = || Vec::from([ROWS, KEY_HEADS, HEADS, key_dim, VALUE_DIM].map(int));
        let f32s = |seed, n| input(seed, F32, n);
        let kept = |seed| both(seed, F32, state);
        let d_o = || input(7, dtype, values);
        let dqkv = || both(8, dtype, qkv);
        let mut add = |variant: &str, entry, floor: usize, grid: [usize; 2], slots: Vec<Slot>| {
            let job = Job { entry, grid: grid.map(|n| n as u32), ..job(format!("{variant}_{name}"), 2, 256, slots) };
            cases.push(Case { shape, floor, job });
        };
        let with_inputs = |slots: Vec<Slot>, last: Vec<Slot>| {
            let gates = [(2, ROWS * HEADS), (3, ROWS * HEADS), (4, HEADS), (5, HEADS)];
            let mut gates: Vec<Slot> = gates.map(|(seed, n)| input(seed, dtype, n)).into();
            let mut limits = vec![];
            if is_mamba {
                gates[1] = long(0);
                limits = vec![real(0.5), input(10, dtype, HEADS)];
            }
            [vec![input(1, dtype, qkv)], gates, slots, sizes(), vec![real(1.0)], last, limits].concat_slots()
        };
        let (columns, bytes) = (HEADS, (qkv + values) * dtype.size());
        let slots = with_inputs(vec![documents(), kept(6), Out(dtype, values)], vec![int(1)]);
        add(kind, "delta_rule", bytes, [2, columns], slots);
        let slots = with_inputs(vec![table(), both(6, F32, 2 * state), Out(dtype, values)], vec![int(state)]);
        add(kind, "delta_carried", bytes, [ROWS, columns], slots);
        if !is_mamba {
            let slots = with_inputs(vec![documents(), f32s(6, state), Out(F32, values)], vec![]);
            add(kind, "delta_replay", bytes, [2, columns], slots);
        }
        let slots = with_inputs(vec![documents(), d_o(), dqkv(), Out(F32, values), kept(9)], vec![]);
        add(kind, "delta_walk", bytes, [2, columns], slots);
        if matches!(kind, "delta_rule" | "mamba_rule") {
            let blocks = if is_mamba { "mamba_blocks" } else { "delta_blocks" };
            let r = if is_mamba { long(0) } else { f32s(7, values) };
            let given = vec![documents(), d_o(), f32s(6, state), r, f32s(8, values), f32s(9, state)];
            let gate = || Out(dtype, ROWS * HEADS);
            let gates = vec![gate(), if is_mamba { long(0) } else { gate() }];
            let sums = Out(F32, (2 + usize::from(is_mamba)) * ROWS * HEADS);
            let results = [vec![Out(F32, of_keys)], gates, vec![sums]].concat_slots();
            let mut slots = with_inputs([given, results].concat_slots(), vec![]);
            if is_mamba {
                slots.pop(); // it has no use for what values that skip the state are multiplied by
            }
            add(blocks, "delta_blocks", 8 * values, [2, HEADS], slots);
            let slots = [vec![input(1, dtype, qkv), f32s(2, of_keys), dqkv()], sizes()].concat_slots();
            add(blocks, "delta_lengths", 4 * of_keys, [2, 1], slots);
        }
    }
    cases
}

pub fn cases(dtype: DType, name: &str) -> Vec<Case> {
    [convolutions(dtype, name), delta_rules(dtype, name)].into_iter().flatten().collect()
}
