//! Gated short convolutions: outputs and gradients compared with sums in f64. Documents have the same bits alone,
//! packed and row by row, on the CPU whatever the threads.
use super::harness::*;
use flatshard_base::{DType, Meter};
use flatshard_device::cpu::CpuDevice;
use flatshard_device::ops::{
    ConvKind, PagedRows, RowSequences, ShortConv, ShortConvBackward, documents_of_rows, paged_table,
};
use flatshard_device::{Buf, Device};
use std::sync::Arc;

const TAPS: usize = 3;
/// More than a group of channels.
const CHANNELS: usize = 70;
/// Fewer rows than taps, as many, and more.
const LENGTHS: [usize; 4] = [2, 17, 1, 3];

/// The outputs, and the gradients of x and w by `dy`, of one document.
fn naive(n: usize, x: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let at = |t: usize, part: usize, c: usize| (t * 3 + part) * CHANNELS + c;
    let [mut y, mut dx, mut dw] = [vec![0.0; n * CHANNELS], vec![0.0; x.len()], vec![0.0; w.len()]];
    for (t, c) in (0..n).flat_map(|t| (0..CHANNELS).map(move |c| (t, c))) {
        let gate = x[at(t, 1, c)];
        let d = dy[t * CHANNELS + c];
        let mut sum = 0.0;
        for tap in (0..TAPS).filter(|tap| t + tap + 1 >= TAPS) {
            let (row, filter) = (t + tap + 1 - TAPS, w[c * TAPS + tap]);
            let (b, u) = (x[at(row, 0, c)], x[at(row, 2, c)]);
            sum += filter * b * u;
            dw[c * TAPS + tap] += d * gate * b * u;
            dx[at(row, 0, c)] += d * gate * filter * u;
            dx[at(row, 2, c)] += d * gate * filter * b;
        }
        y[t * CHANNELS + c] = gate * sum;
        dx[at(t, 1, c)] = d * sum;
    }
    [y, dx, dw]
}

fn computed(dev: &dyn Device, dtype: DType, lengths: &[usize], x: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let n: usize = lengths.iter().sum();
    let mut cu = vec![0];
    lengths.iter().for_each(|len| cu.push(cu[cu.len() - 1] + *len as u32));
    let documents: Vec<f64> = documents_of_rows(&cu).map(|row| row as f64).collect();
    let documents = buf(dev, DType::U32, &documents);
    let [x, w, dy] = [x, w, dy].map(|values| buf(dev, dtype, values));
    let (mut y, mut dx) = (buf(dev, dtype, &before(n * CHANNELS)), buf(dev, dtype, &before(3 * n * CHANNELS)));
    let mut dw = buf(dev, DType::F32, &vec![1.0; CHANNELS * TAPS]);
    let (kind, taps, documents) = (ConvKind::Gated, TAPS, documents.view());
    let along = RowSequences::Whole(documents);
    dev.short_conv(ShortConv { kind, taps, along, x: x.view(), w: w.view(), bias: None, y: y.view_mut() }).unwrap();
    dev.short_conv_backward(ShortConvBackward {
        kind,
        taps,
        documents,
        x: x.view(),
        w: w.view(),
        bias: None,
        dy: dy.view(),
        dx: dx.view_mut(),
        dw: Some(dw.view_mut()),
        dbias: None,
    })
    .unwrap();
    // Gradients of weights are added to what is there.
    [read(dev, &y), read(dev, &dx), read(dev, &dw).iter().map(|x| x - 1.0).collect()]
}

/// Inputs, filters and gradients of outputs.
fn given(n: usize) -> [Vec<f64>; 3] {
    [normal(1, 3 * n * CHANNELS), normal(2, CHANNELS * TAPS), normal(3, n * CHANNELS)]
}

#[test]
fn outputs_and_gradients_are_those_of_sums_in_f64() {
    let n: usize = LENGTHS.iter().sum();
    let [x, w, dy] = given(n);
    let mut want = [Vec::new(), Vec::new(), vec![0.0; w.len()]];
    let mut start = 0;
    for len in LENGTHS {
        let rows = |all: &[f64], width: usize| all[start * width..(start + len) * width].to_vec();
        let [y, dx, dw] = naive(len, &rows(&x, 3 * CHANNELS), &w, &rows(&dy, CHANNELS));
        want[0].extend(y);
        want[1].extend(dx);
        want[2].iter_mut().zip(dw).for_each(|(sum, dw)| *sum += dw);
        start += len;
    }
    for dev in devices() {
        for (dtype, bound) in [(DType::F32, 1e-6), (DType::Bf16, 2e-2)] {
            let got = computed(&*dev, dtype, &LENGTHS, &x, &w, &dy);
            for (result, (got, want)) in got.iter().zip(&want).enumerate() {
                let length = |of: &dyn Fn(f64, f64) -> f64| {
                    got.iter().zip(want).map(|(x, y)| of(*x, *y).powi(2)).sum::<f64>().sqrt()
                };
                let error = length(&|x, y| x - y) / length(&|_, y| y);
                assert!(error < bound, "{} in {dtype}: result {result}: {error:.1e}", dev.name());
            }
        }
    }
}

#[test]
fn a_document_has_the_same_bits_alone_packed_and_row_by_row() {
    let n: usize = LENGTHS.iter().sum();
    let [x, w, dy] = given(n);
    let cpu = CpuDevice::new(Meter::default()).with_threads(2).unwrap().with_grain(64);
    let all = devices().into_iter().filter(|dev| !is_cpu(&**dev)).chain([Box::new(cpu) as Box<dyn Device>]);
    for (dev, dtype) in all.flat_map(|dev| {
        let dev: Arc<dyn Device> = Arc::from(dev);
        [DType::F32, DType::Bf16].map(|dtype| (dev.clone(), dtype))
    }) {
        let dev = &*dev;
        let packed = computed(dev, dtype, &LENGTHS, &x, &w, &dy);
        let new = |values: &[f64]| -> Buf { buf(dev, dtype, values) };
        let mut memory = new(&before(2 * (TAPS - 1) * CHANNELS));
        let mut start = 0;
        for len in LENGTHS {
            let rows = |all: &[f64], width: usize| all[start * width..(start + len) * width].to_vec();
            let (own, own_dy) = (rows(&x, 3 * CHANNELS), rows(&dy, CHANNELS));
            let alone = computed(dev, dtype, &[len], &own, &w, &own_dy);
            assert!(alone[0] == rows(&packed[0], CHANNELS), "{dtype}: outputs");
            assert!(alone[1] == rows(&packed[1], 3 * CHANNELS), "{dtype}: gradients");
            for t in 0..len {
                let runs = [PagedRows { first: 0, rows: 1, past: t, pages: &[0], slot: 1 }];
                let table: Vec<f64> = paged_table(&runs).into_iter().map(f64::from).collect();
                let table = buf(dev, DType::U32, &table);
                let (row, filters) = (new(&own[t * 3 * CHANNELS..(t + 1) * 3 * CHANNELS]), new(&w));
                let mut y = new(&before(CHANNELS));
                dev.short_conv(ShortConv {
                    kind: ConvKind::Gated,
                    taps: TAPS,
                    along: RowSequences::Carried { runs: &runs, table: table.view(), memory: memory.view_mut() },
                    x: row.view(),
                    w: filters.view(),
                    bias: None,
                    y: y.view_mut(),
                })
                .unwrap();
                assert!(read(dev, &y) == alone[0][t * CHANNELS..(t + 1) * CHANNELS], "{dtype}: row {t} of {len}");
            }
            start += len;
        }
    }
}
