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
    // Whole heads of every kind, and parts of heads, whole vectors or not.
    let shapes = SHAPES.map(|(heads, kv, d, rows, skew)| (heads, kv, d, d, rows, skew)).into_iter();
    let parts = [(2, 1, 96, 48, 3, 0), (2, 1, 10, 6, 3, 0), (1, 1, 36, 32, 2, 0), (1, 1, 40, 32, 2, 0)];
    for (heads, kv_heads, d, part, rows, skew) in shapes.chain(parts) {
        for ((dtype, name), adjacent) in DTYPES.into_iter().flat_map(|of| [(of, false), (of, true)]) {
            for sign in [1.0, -1.0] {
                // Heads after the rotated ones are unchanged.
                let row = (heads + 2 * kv_heads) * d;
                let (table, positions, qkv) = (table(part), positions(rows), normal(12, rows * row));
                let of = Turned { row, heads: heads + kv_heads, d, part, adjacent };
                let exact = of.turned::<f64>(&qkv, [&table, &positions], sign);
                let naive = of.turned::<f32>(&qkv, [&table, &positions], sign);
                let slots = vec![
                    In(F32, table),
                    In(U32, positions),
                    InOut(dtype, qkv),
                    no_fault(),
                    int(rows),
                    int(heads + kv_heads),
                    int(d),
                    int(part),
                    int(row),
                    real(sign as f32),
                ];
                let kernel = if adjacent { "rope_adjacent" } else { "rope" };
                let got = job(format!("{kernel}_{name}"), 2, 64, slots).skewed(skew).outputs();
                let label = format!("{kernel} {name} {part} of {d} sign {sign}");
                compare(&label, FORWARD, &got[0], dtype, &exact, &naive);
            }
        }
    }
}

/// Which elements of rows turn.
struct Turned {
    row: usize,
    heads: usize,
    d: usize,
    part: usize,
    adjacent: bool,
}

impl Turned {
    fn turned<R: Real>(&self, qkv: &[f64], [table, at]: [&[f64]; 2], sign: f64) -> Vec<f64> {
        let mut x: Vec<R> = reals(qkv);
        for (r, row) in x.chunks_mut(self.row).enumerate() {
            let table = &table[at[r] as usize * self.part..][..self.part];
            for head in row[..self.heads * self.d].chunks_mut(self.d) {
                let head = &mut head[..self.part];
                if !self.adjacent {
                    rotate(head, table, sign);
                    continue;
                }
                // Evens, then odds: halves.
                let mut halves: Vec<R> = (0..2).flat_map(|odd| head.iter().skip(odd).step_by(2).copied()).collect();
                rotate(&mut halves, table, sign);
                (0..self.part).for_each(|i| head[i] = halves[i / 2 + i % 2 * self.part / 2]);
            }
        }
        f64s(&x)
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
