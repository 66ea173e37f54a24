//! Norms and biases, row by row, and the sums over rows behind their gradients.
use super::harness::*;

pub const EPS: f64 = 1e-5;
/// Rows, columns, threads, CTAs, skew: fewer columns than a vector, whole vectors, an odd one more, several pieces per
/// thread, as many as the threads can handle; more rows than CTAs; misaligned operands.
const SHAPES: [(usize, usize, u32, u32, usize); 8] = [
    (1, 1, 32, 1, 0),
    (5, 7, 32, 3, 0),
    (3, 64, 32, 2, 0),
    (4, 257, 64, 3, 0),
    (7, 1000, 96, 3, 0),
    (2, 1024, 64, 1, 0),
    (3, 200, 32, 2, 1),
    (5, 512, 32, 3, 0),
];

fn column_sums<R: Real>(columns: usize, x: &[R]) -> Vec<R> {
    let mut sums = vec![zero::<R>(); columns];
    x.iter().enumerate().for_each(|(i, x)| sums[i % columns] += *x);
    sums
}
fn add<R: Real>(a: &[R], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| (R::of(*b) + *a).f64()).collect()
}

/// y, stats
pub fn norm_of<R: Real>(layer: bool, offset: f64, x: &[f64], w: &[f64], b: &[f64]) -> [Vec<f64>; 2] {
    let c = w.len();
    let (mut y, mut stats) = (vec![], vec![]);
    for row in x.chunks(c) {
        let row: Vec<R> = reals(row);
        let sum = |f: &dyn Fn(usize) -> R| (0..c).fold(zero::<R>(), |s, i| s + f(i)) / R::of(c as f64);
        let mean = if layer { sum(&|i| row[i]) } else { zero() };
        let r = R::of(1.0) / (sum(&|i| (row[i] - mean) * (row[i] - mean)) + R::of(EPS)).sqrt();
        stats.extend(if layer { vec![mean.f64(), r.f64()] } else { vec![r.f64()] });
        y.extend((0..c).map(|i| ((row[i] - mean) * r * (R::of(w[i]) + R::of(offset)) + R::of(b[i])).f64()));
    }
    [y, stats]
}

#[test]
fn norms() {
    for (kind, layer, biased) in
        [("rmsnorm", false, false), ("layernorm", true, true), ("layernorm_plain", true, false)]
    {
        for (dtype, name) in DTYPES {
            for (rows, columns, threads, ctas, skew) in SHAPES {
                let (x, w, b) = (normal(1, rows * columns), normal(2, columns), normal(3, columns));
                let (offset, bias) =
                    (if layer { 0.0 } else { 1.0 }, if biased { b.clone() } else { vec![0.0; columns] });
                let mut slots = vec![In(dtype, x.clone()), In(dtype, w.clone())];
                slots.extend(biased.then_some(In(dtype, b)));
                slots.extend([Out(dtype, rows * columns), Out(F32, rows << layer as usize)]);
                slots.extend([int(rows), int(columns), real(EPS as f32)]);
                slots.extend((!layer).then(|| real(offset as f32)));
                let got = job(format!("{kind}_{name}"), ctas, threads, slots).skewed(skew).outputs();
                let exact = norm_of::<f64>(layer, offset, &x, &w, &bias);
                let naive = norm_of::<f32>(layer, offset, &x, &w, &bias);
                let label = format!("{kind} {name} ({rows}, {columns})");
                compare(&format!("{label} y"), FORWARD, &got[0], dtype, &exact[0], &naive[0]);
                compare(&format!("{label} stats"), FORWARD, &got[1], F32, &exact[1], &naive[1]);
            }
        }
    }
}

/// dx, dw, db, added to their initial values.
pub fn norm_backward_of<R: Real>(
    layer: bool,
    offset: f64,
    [x, w, stats, dy, dx]: [&[f64]; 5],
    before: &[f64],
) -> [Vec<f64>; 3] {
    let c = w.len();
    let (mut out, mut dw, mut db) = (vec![], vec![], vec![]);
    for (i, row) in x.chunks(c).enumerate() {
        let (mean, r) = if layer { (stats[2 * i], stats[2 * i + 1]) } else { (0.0, stats[i]) };
        let (mean, r) = (R::of(mean), R::of(r));
        let n: Vec<R> = row.iter().map(|x| (R::of(*x) - mean) * r).collect();
        let d: Vec<R> = reals(&dy[i * c..][..c]);
        let g: Vec<R> = d.iter().zip(w).map(|(d, w)| *d * (R::of(*w) + R::of(offset))).collect();
        let count = R::of(c as f64);
        let shift = if layer { g.iter().fold(zero::<R>(), |s, g| s + *g) / count } else { zero() };
        let dot = g.iter().zip(&n).fold(zero::<R>(), |s, (g, n)| s + *g * *n) / count;
        for k in 0..c {
            out.push((R::of(dx[i * c + k]) + r * (g[k] - shift - n[k] * dot)).f64());
            dw.push(d[k] * n[k]);
            db.push(d[k]);
        }
    }
    [out, add(&column_sums(c, &dw), before), add(&column_sums(c, &db), before)]
}

/// Stage two: `before` += the rows of `partial`.
pub fn sum_rows(partial: &[f64], before: &[f64]) -> Vec<f64> {
    let (rows, columns) = (partial.len() / before.len(), before.len());
    let slots = vec![In(F32, partial.to_vec()), InOut(F32, before.to_vec()), int(rows), int(columns)];
    job("sum_rows", columns.div_ceil(32) as u32, 1024, slots).outputs().remove(0)
}

#[test]
fn norm_gradients_add_to_what_is_there() {
    for layer in [false, true] {
        for (dtype, name) in DTYPES {
            for (rows, columns, threads, ctas, skew) in SHAPES {
                let n = rows * columns;
                let (x, w, dy, dx) = (normal(1, n), normal(2, columns), normal(4, n), normal(5, n));
                let before = normal(6, columns);
                let offset = if layer { 0.0 } else { 1.0 };
                let stats = rounded(&norm_of::<f64>(layer, offset, &x, &w, &vec![0.0; columns])[1], F32);
                let mut slots = vec![In(dtype, x.clone()), In(dtype, w.clone()), In(F32, stats.clone())];
                slots.extend([In(dtype, dy.clone()), InOut(dtype, dx.clone())]);
                slots.push(Out(F32, (ctas as usize * columns) << layer as usize));
                slots.extend([int(rows), int(columns)]);
                slots.extend((!layer).then(|| real(offset as f32)));
                let kind = if layer { "layernorm" } else { "rmsnorm" };
                let got = job(format!("{kind}_backward_{name}"), ctas, threads, slots).skewed(skew).outputs();
                let operands = [&x[..], &w, &stats, &dy, &dx];
                let exact = norm_backward_of::<f64>(layer, offset, operands, &before);
                let naive = norm_backward_of::<f32>(layer, offset, operands, &before);
                let label = format!("{kind} backward {name} ({rows}, {columns})");
                compare(&format!("{label} dx"), GRADIENT, &got[0], dtype, &exact[0], &naive[0]);
                for (k, partial) in got[1].chunks(ctas as usize * columns).enumerate() {
                    let sum = sum_rows(partial, &before);
                    let label = format!("{label} {}", ["dw", "db"][k]);
                    compare(&label, GRADIENT, &sum, F32, &exact[k + 1], &naive[k + 1]);
                }
            }
        }
    }
}

#[test]
fn rows_are_summed_whatever_their_number() {
    for (rows, columns) in [(1, 1), (31, 33), (129, 64), (300, 7)] {
        let (x, before) = (normal(1, rows * columns), normal(2, columns));
        let exact = add(&column_sums::<f64>(columns, &reals(&x)), &before);
        let naive = add(&column_sums::<f32>(columns, &reals(&x)), &before);
        compare(&format!("({rows}, {columns})"), GRADIENT, &sum_rows(&x, &before), F32, &exact, &naive);
    }
}

#[test]
fn biases_and_their_gradients() {
    // Rows, columns, CTAs of rows, skew: several strips, a strip in part, one column.
    for (rows, columns, chunks, skew) in [(1, 1, 1, 0), (9, 7, 1, 0), (20, 264, 2, 0), (33, 520, 3, 0), (5, 301, 2, 1)]
    {
        for (dtype, name) in DTYPES {
            let (bias, y) = (normal(1, columns), normal(2, rows * columns));
            let strips = columns.div_ceil(32 * 16 / dtype.size()) as u32;
            let grid = |job: Job| Job { grid: [strips, chunks], ..job }.skewed(skew);
            let slots = vec![In(dtype, bias.clone()), InOut(dtype, y.clone()), int(rows), int(columns)];
            let got = grid(job(format!("bias_{name}"), 1, 256, slots)).outputs();
            let want: Vec<f64> = y.iter().enumerate().map(|(i, y)| y + bias[i % columns]).collect();
            assert_eq!(got[0], rounded(&want, dtype), "bias {name} ({rows}, {columns})");
            let slots = vec![In(dtype, y.clone()), Out(F32, chunks as usize * columns), int(rows), int(columns)];
            let partial = grid(job(format!("bias_backward_{name}"), 1, 256, slots)).outputs();
            let exact = add(&column_sums::<f64>(columns, &reals(&y)), &bias);
            let naive = add(&column_sums::<f32>(columns, &reals(&y)), &bias);
            let label = format!("bias backward {name} ({rows}, {columns})");
            compare(&label, GRADIENT, &sum_rows(&partial[0], &bias), F32, &exact, &naive);
        }
    }
}
