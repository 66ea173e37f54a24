//! Rotary positions, alone and after the norms of queries and keys.
use super::harness::*;
use super::rows::{EPS, norm_backward_of, norm_of, sum_rows};

/// Heads, kv heads, head_dim, rows, skew: groups of lanes of every kind, halves that are not whole vectors, more parts
/// of a half than lanes, more heads than are handled at a time.
const SHAPES: [(usize, usize, usize, usize, usize); 7] = [
    (3, 1, 64, 5, 0),
    (5, 2, 128, 3, 0),
    (1, 1, 2, 4, 0),
    (2, 1, 96, 4, 0),
    (2, 2, 6, 7, 0),
    (1, 1, 256, 2, 0),
    (2, 1, 64, 3, 1),
];
const OFFSET: f64 = 1.0;
const POSITIONS: usize = 9;

/// Not quite unit vectors, because the table is used as it is.
fn table(head_dim: usize) -> Vec<f64> {
    rounded(&normal(11, POSITIONS * head_dim), F32)
}
fn positions(rows: usize) -> Vec<f64> {
    (0..rows).map(|i| ((i * 5 + 3) % POSITIONS) as f64).collect()
}
fn rotate<R: Real>(head: &mut [R], row: &[f64], sign: f64) {
    let half = head.len() / 2;
    for i in 0..half {
        let (x, y, c, s) = (head[i], head[i + half], R::of(row[i]), R::of(sign * row[i + half]));
        (head[i], head[i + half]) = (x * c - y * s, y * c + x * s);
    }
}

#[test]
fn rope_rotates_and_rotates_back() {
    for (heads, kv_heads, d, rows, skew) in SHAPES {
        for (dtype, name) in DTYPES {
            for sign in [1.0, -1.0] {
                // Heads after the rotated ones are unchanged.
                let row = (heads + 2 * kv_heads) * d;
                let (table, positions, qkv) = (table(d), positions(rows), normal(12, rows * row));
                fn of<R: Real>(
                    qkv: &[f64],
                    [row, turned, d]: [usize; 3],
                    [table, at]: [&[f64]; 2],
                    sign: f64,
                ) -> Vec<f64> {
                    let mut x: Vec<R> = reals(qkv);
                    for (r, row) in x.chunks_mut(row).enumerate() {
                        let table = &table[at[r] as usize * d..][..d];
                        row[..turned].chunks_mut(d).for_each(|head| rotate(head, table, sign));
                    }
                    f64s(&x)
                }
                let shape = [row, (heads + kv_heads) * d, d];
                let exact = of::<f64>(&qkv, shape, [&table, &positions], sign);
                let naive = of::<f32>(&qkv, shape, [&table, &positions], sign);
                let slots = vec![
                    In(F32, table),
                    In(U32, positions),
                    InOut(dtype, qkv),
                    no_fault(),
                    int(rows),
                    int(heads + kv_heads),
                    int(d),
                    int(row),
                    real(sign as f32),
                ];
                let got = job(format!("rope_{name}"), 2, 64, slots).skewed(skew).outputs();
                compare(&format!("rope {name} {d} sign {sign}"), FORWARD, &got[0], dtype, &exact, &naive);
            }
        }
    }
}

struct Problem {
    heads: usize,
    rotated: usize,
    d: usize,
    row: usize,
    table: Vec<f64>,
    positions: Vec<f64>,
    w: [Vec<f64>; 2],
    qkv: Vec<f64>,
}

impl Problem {
    fn new((heads, kv_heads, d, rows, _): (usize, usize, usize, usize, usize)) -> Problem {
        let row = (heads + 2 * kv_heads) * d;
        let (table, positions, w) = (table(d), positions(rows), [normal(14, d), normal(15, d)]);
        Problem { heads, rotated: heads + kv_heads, d, row, table, positions, w, qkv: normal(13, rows * row) }
    }
    fn table_row(&self, row: usize) -> &[f64] {
        &self.table[self.positions[row] as usize * self.d..][..self.d]
    }
    fn w(&self, head: usize) -> &[f64] {
        &self.w[(head >= self.heads) as usize]
    }
    /// out, rstd: each head is an RMSNorm row, then rotated.
    fn forward<R: Real>(&self) -> [Vec<f64>; 2] {
        let (mut out, mut rstd): (Vec<R>, Vec<f64>) = (reals(&self.qkv), vec![]);
        for (n, row) in out.chunks_mut(self.row).enumerate() {
            for (h, head) in row.chunks_mut(self.d).take(self.rotated).enumerate() {
                let [y, r] = norm_of::<R>(false, OFFSET, &f64s(head), self.w(h), &vec![0.0; self.d]);
                head.copy_from_slice(&reals::<R>(&y));
                rstd.extend(r);
                rotate(head, self.table_row(n), 1.0);
            }
        }
        [f64s(&out), rstd]
    }
    /// dqkv, dwq, dwk from the gradient of out and the weights' gradients before.
    fn backward<R: Real>(&self, rstd: &[f64], d_out: &[f64], before: &[Vec<f64>; 2]) -> [Vec<f64>; 3] {
        let mut dqkv: Vec<R> = reals(d_out);
        let mut dw = before.clone();
        for (n, row) in dqkv.chunks_mut(self.row).enumerate() {
            for (h, g) in row.chunks_mut(self.d).take(self.rotated).enumerate() {
                rotate(g, self.table_row(n), -1.0);
                let (x, r) = (&self.qkv[n * self.row + h * self.d..][..self.d], &rstd[n * self.rotated + h..][..1]);
                let dw = &mut dw[(h >= self.heads) as usize];
                let operands = [x, self.w(h), r, &f64s(g), &vec![0.0; self.d]];
                let [dx, sums, _] = norm_backward_of::<R>(false, OFFSET, operands, dw);
                g.copy_from_slice(&reals::<R>(&dx));
                *dw = sums;
            }
        }
        let [dwq, dwk] = dw;
        [f64s(&dqkv), dwq, dwk]
    }
    /// Arguments up to qkv, and the shape.
    fn slots(&self, dtype: DType) -> (Vec<Slot>, Vec<Slot>) {
        let rows = self.positions.len();
        let [wq, wk] = &self.w;
        let first = vec![
            In(F32, self.table.clone()),
            In(U32, self.positions.clone()),
            In(dtype, wq.clone()),
            In(dtype, wk.clone()),
            In(dtype, self.qkv.clone()),
        ];
        let shape = [rows, self.heads, self.rotated - self.heads, self.d];
        (first, [vec![no_fault()], shape.map(int).into_iter().collect()].into_iter().flatten().collect())
    }
}

#[test]
fn norms_of_heads_then_rope() {
    for shape in SHAPES {
        for (dtype, name) in DTYPES {
            let p = Problem::new(shape);
            let (mut slots, last) = p.slots(dtype);
            slots.extend([Out(dtype, p.qkv.len()), Out(F32, p.positions.len() * p.rotated)]);
            slots.extend(last);
            slots.extend([real(EPS as f32), real(OFFSET as f32)]);
            let got = job(format!("qk_norm_rope_{name}"), 2, 64, slots).skewed(shape.4).outputs();
            let (exact, naive) = (p.forward::<f64>(), p.forward::<f32>());
            let label = format!("qk_norm_rope {name} {shape:?}");
            compare(&label, FORWARD, &got[0], dtype, &exact[0], &naive[0]);
            compare(&format!("{label} rstd"), FORWARD, &got[1], F32, &exact[1], &naive[1]);
        }
    }
}

#[test]
fn gradients_of_norms_of_heads_and_rope() {
    for shape in SHAPES {
        for (dtype, name) in DTYPES {
            let p = Problem::new(shape);
            let rstd = rounded(&p.forward::<f64>()[1], F32);
            let d_out = normal(16, p.qkv.len());
            let before = [normal(17, p.d), normal(18, p.d)];
            let (mut slots, last) = p.slots(dtype);
            slots.extend([In(F32, rstd.clone()), InOut(dtype, d_out.clone()), Out(F32, 2 * 2 * p.d)]);
            slots.extend(last);
            slots.push(real(OFFSET as f32));
            let got = job(format!("qk_norm_rope_backward_{name}"), 2, 64, slots).skewed(shape.4).outputs();
            let exact = p.backward::<f64>(&rstd, &d_out, &before);
            let naive = p.backward::<f32>(&rstd, &d_out, &before);
            let label = format!("qk_norm_rope_backward {name} {shape:?}");
            compare(&label, GRADIENT, &got[0], dtype, &exact[0], &naive[0]);
            for k in 0..2 {
                let partial = &got[1][k * 2 * p.d..][..2 * p.d];
                let sum = sum_rows(partial, &before[k]);
                compare(&format!("{label} dw {k}"), GRADIENT, &sum, F32, &exact[k + 1], &naive[k + 1]);
            }
        }
    }
}
