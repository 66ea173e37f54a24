//! The gated delta rule, Mamba 2 and short convolutions: outputs and gradients compared with the recurrence and with
//! finite differences in f64. Documents have the same bits alone and packed, on the CPU whatever the threads.
use super::harness::*;
use flatshard_base::{DType, Meter};
use flatshard_device::cpu::CpuDevice;
use flatshard_device::ops::{
    BackwardOf, ConvKind, DeltaRule, DeltaRuleBackward, DeltaShape, PagedRows, RowSequences, ShortConv,
    ShortConvBackward, StateRule, documents_of_rows, paged_table,
};
use flatshard_device::{Buf, Device};
use std::sync::Arc;

const TAPS: usize = 4;
/// Longer than two blocks, exactly one, a single row, fewer than taps.
const LENGTHS: [usize; 5] = [140, 64, 1, 3, 65];
const SHAPE: DeltaShape =
    DeltaShape { key_heads: 2, value_heads: 4, key_dim: 5, value_dim: 6, rule: StateRule::Delta { doubled: false } };
/// Whole vectors, a strip of values, and betas up to 2.
const WIDE: DeltaShape =
    DeltaShape { key_heads: 1, value_heads: 2, key_dim: 32, value_dim: 80, rule: StateRule::Delta { doubled: true } };
/// Mamba 2 whose steps are clamped now and then, with a convolution with biases; and with whole vectors.
const MAMBA: DeltaShape = DeltaShape { rule: StateRule::Decay { limits: [0.2, 1.5] }, ..SHAPE };
const WIDE_MAMBA: DeltaShape = DeltaShape { rule: StateRule::Decay { limits: [0.0, f32::INFINITY] }, ..WIDE };

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Of one document: convolution and rule, row by row.
fn naive(shape: &DeltaShape, n: usize, [x, w, a, b, a_log, dt_bias, bias, skip]: [&[f64]; OPERANDS]) -> Vec<f64> {
    let (row, [of_q, of_k, of_v]) = (shape.row(), shape.columns());
    let (dk, dv, group) = (shape.key_dim, shape.value_dim, shape.value_heads / shape.key_heads);
    let mut y = vec![0.0; n * row];
    for (i, y) in y.iter_mut().enumerate() {
        let (t, c) = (i / row, i % row);
        let taps = (0..TAPS).filter(|tap| t + tap + 1 >= TAPS);
        let sum: f64 = taps.map(|tap| w[c * TAPS + tap] * x[(t + tap + 1 - TAPS) * row + c]).sum();
        *y = silu(sum + bias.get(c).unwrap_or(&0.0));
    }
    let unit = |x: &[f64]| -> Vec<f64> {
        if !shape.rule.replaces() {
            return x.to_vec();
        }
        let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        x.iter().map(|x| x / length).collect()
    };
    let mut o = vec![0.0; n * shape.values()];
    for head in 0..shape.value_heads {
        let mut state = vec![0.0; dk * dv];
        for t in 0..n {
            let at = |column: usize, len: usize| &y[t * row + column..][..len];
            let (q, k) = (unit(at(of_q + head / group * dk, dk)), unit(at(of_k + head / group * dk, dk)));
            let v = at(of_v + head * dv, dv);
            let step = (a[t * shape.value_heads + head] + dt_bias[head]).exp().ln_1p();
            let (step, beta, scale) = match shape.rule {
                StateRule::Delta { .. } => {
                    let beta = shape.most() as f64 / (1.0 + (-b[t * shape.value_heads + head]).exp());
                    (step, beta, (dk as f64).sqrt().recip())
                }
                StateRule::Decay { limits: [least, most] } => {
                    let step = step.clamp(least.into(), most.into());
                    (step, step, 1.0)
                }
            };
            let decay = (-a_log[head].exp() * step).exp();
            state.iter_mut().for_each(|s| *s *= decay);
            for j in 0..dv {
                let read: f64 = (0..dk).map(|i| k[i] * state[i * dv + j]).sum();
                let read = if shape.rule.replaces() { read } else { 0.0 };
                (0..dk).for_each(|i| state[i * dv + j] += k[i] * beta * (v[j] - read));
                let said: f64 = (0..dk).map(|i| q[i] * state[i * dv + j]).sum();
                o[t * shape.values() + head * dv + j] = said * scale + skip.get(head).map_or(0.0, |skip| skip * v[j]);
            }
        }
    }
    o
}

const OPERANDS: usize = 8;
type Operands = [Vec<f64>; OPERANDS];

/// Inputs of all rows: x, a and b; and the weights: w, a_log, dt_bias, and of Mamba 2 the biases and factors of skipped
/// values.
fn inputs(shape: &DeltaShape, n: usize) -> Operands {
    let scaled = |x: Vec<f64>, by: f64| x.iter().map(|x| rounded(x * by)).collect();
    let (heads, is_mamba) = (shape.value_heads, !shape.rule.replaces());
    [
        normal(1, n * shape.row()),
        scaled(normal(2, shape.row() * TAPS), 0.5),
        normal(3, n * heads),
        normal(4, n * shape.betas()),
        scaled(normal(5, heads), 0.5),
        normal(6, heads),
        normal(8, if is_mamba { shape.row() } else { 0 }),
        normal(9, if is_mamba { heads } else { 0 }),
    ]
}
/// The rows of one document.
fn rows_of(all: &Operands, (start, n, total): (usize, usize, usize)) -> Operands {
    let cut = |x: &Vec<f64>| {
        let width = x.len() / total;
        x[start * width..(start + n) * width].to_vec()
    };
    std::array::from_fn(|i| if [0, 2, 3].contains(&i) { cut(&all[i]) } else { all[i].clone() })
}

/// The output, and the gradients of all operands if `d_o` is given.
fn computed(
    dev: &dyn Device,
    dtype: DType,
    shape: DeltaShape,
    lengths: &[usize],
    given: &Operands,
    d_o: Option<&[f64]>,
) -> Vec<Vec<f64>> {
    let (n, heads) = (lengths.iter().sum::<usize>(), shape.value_heads);
    let mut cu = vec![0];
    lengths.iter().for_each(|len| cu.push(cu[cu.len() - 1] + *len as u32));
    let documents: Vec<f64> = documents_of_rows(&cu).map(|row| row as f64).collect();
    let new = |values: &[f64]| buf(dev, dtype, values);
    let garbage = |len: usize| new(&before(len));
    let [x, w, a, b, a_log, dt_bias, bias, skip] = given.each_ref().map(|values| new(values));
    let is_mamba = !shape.rule.replaces();
    let [bias, skip] = [&bias, &skip].map(|operand| is_mamba.then(|| operand.view()));
    let documents = buf(dev, DType::U32, &documents);
    let (mut y, mut o) = (garbage(n * shape.row()), garbage(n * shape.values()));
    let mut states = buf(dev, DType::F32, &before(DeltaShape::kept(n) * shape.state()));
    let (documents, taps, kind) = (documents.view(), TAPS, ConvKind::Silu);
    let along = || RowSequences::Whole(documents);
    dev.short_conv(ShortConv { kind, taps, along: along(), x: x.view(), w: w.view(), bias, y: y.view_mut() }).unwrap();
    dev.delta_rule(DeltaRule {
        shape,
        along: along(),
        qkv: y.view(),
        a: a.view(),
        b: b.view(),
        a_log: a_log.view(),
        dt_bias: dt_bias.view(),
        skip,
        o: o.view_mut(),
        states: states.view_mut(),
    })
    .unwrap();
    let Some(d_o) = d_o else { return vec![read(dev, &o)] };
    let d_o = new(d_o);
    let (mut dy, mut dx) = (garbage(n * shape.row()), garbage(n * shape.row()));
    let (mut da, mut db) = (garbage(n * heads), garbage(n * shape.betas()));
    // Gradients of weights are added to what is there.
    let grad = |len: usize| buf(dev, DType::F32, &vec![1.0; len]);
    let mut scratch = buf(dev, DType::F32, &before(dev.backward_scratch(&BackwardOf::DeltaRule(shape), dtype, n)));
    let (mut dw, mut da_log, mut ddt_bias) = (grad(shape.row() * TAPS), grad(heads), grad(heads));
    let (mut dbias, mut dskip) = (grad(given[6].len()), grad(given[7].len()));
    dev.delta_rule_backward(DeltaRuleBackward {
        shape,
        documents,
        qkv: y.view(),
        a: a.view(),
        b: b.view(),
        a_log: a_log.view(),
        dt_bias: dt_bias.view(),
        skip,
        states: states.view(),
        d_o: d_o.view(),
        scratch: scratch.view_mut(),
        dqkv: dy.view_mut(),
        da: da.view_mut(),
        db: db.view_mut(),
        da_log: Some(da_log.view_mut()),
        ddt_bias: Some(ddt_bias.view_mut()),
        dskip: is_mamba.then(|| dskip.view_mut()),
    })
    .unwrap();
    dev.short_conv_backward(ShortConvBackward {
        kind,
        taps,
        documents,
        x: x.view(),
        w: w.view(),
        bias,
        dy: dy.view(),
        dx: dx.view_mut(),
        dw: Some(dw.view_mut()),
        dbias: is_mamba.then(|| dbias.view_mut()),
    })
    .unwrap();
    let added = |grad: &Buf| read(dev, grad).iter().map(|x| x - 1.0).collect();
    let of_rows = [read(dev, &o), read(dev, &dx), added(&dw), read(dev, &da), read(dev, &db)];
    [of_rows.to_vec(), [&da_log, &ddt_bias, &dbias, &dskip].map(added).to_vec()].concat()
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}
fn length(x: &[f64]) -> f64 {
    dot(x, x).sqrt()
}

fn documents(lengths: &[usize]) -> impl Iterator<Item = (usize, usize, usize)> {
    let total = lengths.iter().sum();
    lengths.iter().scan(0, move |start, &n| {
        *start += n;
        Some((*start - n, n, total))
    })
}

#[test]
fn outputs_and_gradients_are_those_of_the_recurrence() {
    for (shape, lengths) in [(SHAPE, &LENGTHS[..]), (WIDE, &[70][..]), (MAMBA, &LENGTHS[..]), (WIDE_MAMBA, &[70][..])] {
        let n: usize = lengths.iter().sum();
        let (given, d_o) = (inputs(&shape, n), normal(7, n * shape.values()));
        let all = |given: &Operands| -> Vec<f64> {
            let each = documents(lengths).map(|of| (rows_of(given, of), of.1));
            each.flat_map(|(rows, n)| naive(&shape, n, rows.each_ref().map(Vec::as_slice))).collect()
        };
        let want = all(&given);
        let found = computed(&CpuDevice::new(Meter::default()), DType::F32, shape, lengths, &given, Some(&d_o));
        // Along each gradient, and along random directions.
        let mut differences = Vec::new();
        for (operand, grad) in found[1..].iter().enumerate().filter(|(_, grad)| !grad.is_empty()) {
            let along: Vec<f64> = grad.iter().map(|g| g / length(grad)).collect();
            for direction in [along, normal(50 + operand as u64, grad.len())] {
                let moved = |by: f64| {
                    let mut given = given.clone();
                    given[operand].iter_mut().zip(&direction).for_each(|(x, d)| *x += by * d);
                    dot(&all(&given), &d_o)
                };
                let step = 1e-4 / length(&direction);
                let numeric = (moved(step) - moved(-step)) / (2.0 * step);
                differences.push((operand, direction, numeric));
            }
        }
        for dev in devices() {
            // A GPU adds up rows in f32.
            let of_sums = if is_cpu(&*dev) { 5e-6 } else { 1e-5 };
            for (dtype, bound, bound_of_gradients) in [(DType::F32, 1e-6, of_sums), (DType::Bf16, 1e-2, 3e-2)] {
                let got = computed(&*dev, dtype, shape, lengths, &given, Some(&d_o));
                let difference: Vec<f64> = got[0].iter().zip(&want).map(|(x, y)| x - y).collect();
                let error = length(&difference) / length(&want);
                assert!(error < bound, "{} in {dtype}: outputs: {error:.1e}", dev.name());
                for (operand, direction, numeric) in &differences {
                    let grad = &got[1 + operand];
                    let error = (numeric - dot(grad, direction)).abs() / (length(grad) * length(direction));
                    let of = format!("{} in {dtype}: gradient of operand {operand}", dev.name());
                    assert!(error < bound_of_gradients, "{of}: {error:.1e}");
                }
            }
        }
    }
}

fn gpus() -> impl Iterator<Item = Box<dyn Device>> {
    devices().into_iter().filter(|dev| !is_cpu(&**dev))
}

/// Nor does the number of the CPU's threads change a bit.
#[test]
fn a_document_has_the_same_bits_alone_and_packed() {
    let n: usize = LENGTHS.iter().sum();
    let same_bits = |one: &dyn Device, three: &dyn Device, dtype, shape: DeltaShape| {
        let (given, d_o) = (inputs(&shape, n), normal(7, n * shape.values()));
        let packed = computed(three, dtype, shape, &LENGTHS, &given, Some(&d_o));
        for (start, len, total) in documents(&LENGTHS) {
            let rows = rows_of(&given, (start, len, total));
            let d_o = &d_o[start * shape.values()..(start + len) * shape.values()];
            let alone = computed(one, dtype, shape, &[len], &rows, Some(d_o));
            for result in [0, 1, 3, 4] {
                let width = packed[result].len() / total;
                let packed = &packed[result][start * width..(start + len) * width];
                assert!(packed == alone[result], "{} in {dtype}: {result}", three.name());
            }
        }
    };
    let one = || CpuDevice::new(Meter::default());
    for dtype in [DType::F32, DType::Bf16] {
        let three = || one().with_threads(3).unwrap().with_grain(64);
        for shape in [SHAPE, MAMBA] {
            same_bits(&one(), &three(), dtype, shape);
        }
        for (gpu, shape) in gpus().map(|gpu| (gpu, SHAPE)).chain(gpus().map(|gpu| (gpu, MAMBA))) {
            same_bits(&*gpu, &*gpu, dtype, shape);
        }
    }
}

/// Sequences in slots, some rows of each in every pass: the bits of whole documents, whatever was in the slots before.
#[test]
fn sequences_that_go_on_have_the_bits_of_whole_documents() {
    let (slots, parts) = ([3, 1, 2], [[2, 1, 66, 1, 1, 1, 68], [1, 2, 1, 3, 60, 66, 7], [64, 1, 1, 62, 1, 1, 10]]);
    let lengths = parts.map(|parts| parts.iter().sum::<usize>());
    let n: usize = lengths.iter().sum();
    let starts: Vec<usize> = documents(&lengths).map(|of| of.0).collect();
    let cpu =
        || -> Box<dyn Device> { Box::new(CpuDevice::new(Meter::default()).with_threads(2).unwrap().with_grain(64)) };
    let all = [SHAPE, MAMBA].map(|shape| [(DType::F32, shape), (DType::Bf16, shape)]).concat();
    let all = [all, vec![(DType::F32, WIDE), (DType::F32, WIDE_MAMBA)]].concat();
    for (dev, (dtype, shape)) in gpus().chain([cpu()]).flat_map(|dev| {
        let dev: Arc<dyn Device> = Arc::from(dev);
        all.clone().into_iter().map(move |of| (dev.clone(), of))
    }) {
        let (given, dev) = (inputs(&shape, n), &*dev);
        let want = &computed(dev, dtype, shape, &lengths, &given, None)[0];
        let mut rule = buf(dev, DType::F32, &before(4 * shape.carried()));
        let mut recent = buf(dev, dtype, &before(4 * (TAPS - 1) * shape.row()));
        let mut past = [0; 3];
        for pass in 0..parts[0].len() {
            let (mut runs, mut first) = (Vec::new(), 0);
            for (of, parts) in parts.iter().enumerate() {
                let (rows, pages) = (parts[pass], &[0; 5][..]);
                runs.push(PagedRows { first, rows, past: past[of], pages, slot: slots[of] });
                first += rows;
            }
            let each = runs.iter().enumerate().map(|(of, run)| rows_of(&given, (starts[of] + run.past, run.rows, n)));
            let each: Vec<Operands> = each.collect();
            let joined = |operand: usize| -> Vec<f64> { each.iter().flat_map(|of| of[operand].clone()).collect() };
            let new = |values: &[f64]| buf(dev, dtype, values);
            let [x, a, b] = [0, 2, 3].map(|operand| new(&joined(operand)));
            let [w, a_log, dt_bias, bias, skip] = [1, 4, 5, 6, 7].map(|operand| new(&given[operand]));
            let [bias, skip] = [&bias, &skip].map(|operand| (!shape.rule.replaces()).then(|| operand.view()));
            let (mut y, mut o) = (new(&before(first * shape.row())), new(&before(first * shape.values())));
            let mut none = buf(dev, DType::F32, &[]);
            let table: Vec<f64> = paged_table(&runs).into_iter().map(f64::from).collect();
            let table = buf(dev, DType::U32, &table);
            dev.short_conv(ShortConv {
                kind: ConvKind::Silu,
                taps: TAPS,
                along: RowSequences::Carried { runs: &runs, table: table.view(), memory: recent.view_mut() },
                x: x.view(),
                w: w.view(),
                bias,
                y: y.view_mut(),
            })
            .unwrap();
            dev.delta_rule(DeltaRule {
                shape,
                along: RowSequences::Carried { runs: &runs, table: table.view(), memory: rule.view_mut() },
                qkv: y.view(),
                a: a.view(),
                b: b.view(),
                a_log: a_log.view(),
                dt_bias: dt_bias.view(),
                skip,
                o: o.view_mut(),
                states: none.view_mut(),
            })
            .unwrap();
            let (got, width) = (read(dev, &o), shape.values());
            for (of, run) in runs.iter().enumerate() {
                let got = &got[run.first * width..(run.first + run.rows) * width];
                let want = &want[(starts[of] + run.past) * width..][..run.rows * width];
                assert!(got == want, "{} in {dtype}: {run:?}", dev.name());
                past[of] += run.rows;
            }
        }
        assert_eq!(past, lengths);
    }
}
