//! Reference implementations of the operations: plain loops over scalars, sums from left to right, not optimized. In
//! f64 they are the ground truth; in f32 their error sets the tolerance.
use std::iter::Sum;
use std::ops::{Add, Div, Mul, Neg, Sub};

pub trait Real:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + Neg<Output = Self> + Sum
{
    fn of(x: f64) -> Self;
    fn f64(self) -> f64;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    fn tanh(self) -> Self;
    fn max(self, other: Self) -> Self;
}
macro_rules! real {
    ($t:ty) => {
        impl Real for $t {
            fn of(x: f64) -> $t {
                x as $t
            }
            fn f64(self) -> f64 {
                self as f64
            }
            fn exp(self) -> $t {
                self.exp()
            }
            fn ln(self) -> $t {
                self.ln()
            }
            fn sqrt(self) -> $t {
                self.sqrt()
            }
            fn tanh(self) -> $t {
                self.tanh()
            }
            fn max(self, other: $t) -> $t {
                self.max(other)
            }
        }
    };
}
real!(f32);
real!(f64);

pub fn reals<R: Real>(x: &[f64]) -> Vec<R> {
    x.iter().map(|&x| R::of(x)).collect()
}
pub fn f64s<R: Real>(x: &[R]) -> Vec<f64> {
    x.iter().map(|x| x.f64()).collect()
}
fn dot<R: Real>(a: &[R], b: &[R]) -> R {
    a.iter().zip(b).map(|(&a, &b)| a * b).sum()
}
fn mean<R: Real>(x: &[R]) -> R {
    x.iter().copied().sum::<R>() / R::of(x.len() as f64)
}
/// Applies `f` to the elements of each operand in turn.
pub fn each<R: Real, const N: usize, const M: usize>(x: [&[f64]; N], f: impl Fn([R; N]) -> [R; M]) -> Vec<Vec<f64>> {
    let rows: Vec<[R; M]> = (0..x[0].len()).map(|i| f(x.map(|x| R::of(x[i])))).collect();
    (0..M).map(|m| rows.iter().map(|row| row[m].f64()).collect()).collect()
}

pub fn sigmoid<R: Real>(x: R) -> R {
    R::of(1.0) / (R::of(1.0) + (-x).exp())
}
pub fn silu<R: Real>(x: R) -> R {
    x * sigmoid(x)
}
pub fn silu_slope<R: Real>(x: R) -> R {
    let s = sigmoid(x);
    s * (R::of(1.0) + x * (R::of(1.0) - s))
}
fn gelu_inner<R: Real>(x: R) -> R {
    R::of((2.0 / std::f64::consts::PI).sqrt()) * (x + R::of(0.044715) * x * x * x)
}
pub fn gelu<R: Real>(x: R) -> R {
    R::of(0.5) * x * (R::of(1.0) + gelu_inner(x).tanh())
}
pub fn gelu_slope<R: Real>(x: R) -> R {
    let (half, one, t) = (R::of(0.5), R::of(1.0), gelu_inner(x).tanh());
    let inner = R::of((2.0 / std::f64::consts::PI).sqrt()) * (one + R::of(3.0 * 0.044715) * x * x);
    half * (one + t) + half * x * (one - t * t) * inner
}

/// The normal distribution's density at x, and its mass up to there: a series near 0 (Marsaglia 2004), Laplace's
/// continued fraction beyond.
fn normal_at<R: Real>(x: R) -> (R, R) {
    let (one, z) = (R::of(1.0), x.max(-x));
    let density = R::of((0.5 / std::f64::consts::PI).sqrt()) * (R::of(-0.5) * z * z).exp();
    let tail = match z.f64() < 1.5 {
        true => {
            let (mut term, mut sum) = (z, z);
            for n in 1..40 {
                term = term * z * z / R::of(2.0 * n as f64 + 1.0);
                sum = sum + term;
            }
            R::of(0.5) - density * sum
        }
        false => density / (1..200).rev().fold(z, |sum, n| z + R::of(n as f64) / sum),
    };
    (density, if x.f64() < 0.0 { tail } else { one - tail })
}
pub fn gelu_exact<R: Real>(x: R) -> R {
    x * normal_at(x).1
}
pub fn gelu_exact_slope<R: Real>(x: R) -> R {
    let (density, mass) = normal_at(x);
    mass + x * density
}

/// [y, rstd]; the weights are `w` + `offset`.
pub fn rmsnorm<R: Real>((eps, offset): (f64, f64), x: &[f64], w: &[f64]) -> Vec<Vec<f64>> {
    let (x, w) = (reals::<R>(x), shifted::<R>(w, offset));
    let (mut y, mut rstds) = (vec![], vec![]);
    for x in x.chunks(w.len()) {
        let rstd = R::of(1.0) / (dot(x, x) / R::of(w.len() as f64) + R::of(eps)).sqrt();
        y.extend(x.iter().zip(&w).map(|(&x, &w)| x * rstd * w));
        rstds.push(rstd);
    }
    vec![f64s(&y), f64s(&rstds)]
}

fn shifted<R: Real>(w: &[f64], offset: f64) -> Vec<R> {
    w.iter().map(|&w| R::of(w) + R::of(offset)).collect()
}

/// [dx, dw], added to what they held.
pub fn rmsnorm_backward<R: Real>(
    offset: f64,
    x: &[f64],
    w: &[f64],
    rstd: &[f64],
    dy: &[f64],
    dx: &[f64],
    dw: &[f64],
) -> Vec<Vec<f64>> {
    let (x, w, rstd, dy) = (reals::<R>(x), shifted::<R>(w, offset), reals::<R>(rstd), reals::<R>(dy));
    let (mut dx, mut dw, c) = (reals::<R>(dx), reals::<R>(dw), w.len());
    for n in 0..rstd.len() {
        let normed: Vec<R> = x[n * c..][..c].iter().map(|&x| x * rstd[n]).collect();
        let g: Vec<R> = dy[n * c..][..c].iter().zip(&w).map(|(&dy, &w)| dy * w).collect();
        let m = dot(&g, &normed) / R::of(c as f64);
        for i in 0..c {
            dx[n * c + i] = dx[n * c + i] + rstd[n] * (g[i] - normed[i] * m);
            dw[i] = dw[i] + dy[n * c + i] * normed[i];
        }
    }
    vec![f64s(&dx), f64s(&dw)]
}

/// [y, stats]
pub fn layernorm<R: Real>(eps: f64, x: &[f64], w: &[f64], b: &[f64]) -> Vec<Vec<f64>> {
    let (x, w, b) = (reals::<R>(x), reals::<R>(w), reals::<R>(b));
    let (mut y, mut stats) = (vec![], vec![]);
    for x in x.chunks(w.len()) {
        let m = mean(x);
        let centred: Vec<R> = x.iter().map(|&x| x - m).collect();
        let rstd = R::of(1.0) / (dot(&centred, &centred) / R::of(w.len() as f64) + R::of(eps)).sqrt();
        y.extend((0..w.len()).map(|i| centred[i] * rstd * w[i] + b[i]));
        stats.extend([m, rstd]);
    }
    vec![f64s(&y), f64s(&stats)]
}

/// [dx, dw, db], added to what they held.
pub fn layernorm_backward<R: Real>([x, w, stats, dy]: [&[f64]; 4], [dx, dw, db]: [&[f64]; 3]) -> Vec<Vec<f64>> {
    let (x, w, stats, dy) = (reals::<R>(x), reals::<R>(w), reals::<R>(stats), reals::<R>(dy));
    let (mut dx, mut dw, mut db, c) = (reals::<R>(dx), reals::<R>(dw), reals::<R>(db), w.len());
    for n in 0..stats.len() / 2 {
        let (m, rstd) = (stats[2 * n], stats[2 * n + 1]);
        let normed: Vec<R> = x[n * c..][..c].iter().map(|&x| (x - m) * rstd).collect();
        let g: Vec<R> = dy[n * c..][..c].iter().zip(&w).map(|(&dy, &w)| dy * w).collect();
        let (g_mean, dot_mean) = (mean(&g), dot(&g, &normed) / R::of(c as f64));
        for i in 0..c {
            dx[n * c + i] = dx[n * c + i] + rstd * (g[i] - g_mean - normed[i] * dot_mean);
            dw[i] = dw[i] + dy[n * c + i] * normed[i];
            db[i] = db[i] + dy[n * c + i];
        }
    }
    vec![f64s(&dx), f64s(&dw), f64s(&db)]
}

/// Element i of a head turns with element i + d/2, by the angle of its position.
pub fn rope<R: Real>(
    (heads, d, row): (usize, usize, usize),
    table: &[f64],
    positions: &[u32],
    qkv: &[f64],
    inverse: bool,
) -> Vec<Vec<f64>> {
    rope_part::<R>((heads, d, row), (d, false), table, positions, qkv, inverse)
}

/// Of a head, the first `part` elements turn: i with i + part/2, or 2 i with 2 i + 1 if they are `adjacent`.
pub fn rope_part<R: Real>(
    (heads, d, row): (usize, usize, usize),
    (part, adjacent): (usize, bool),
    table: &[f64],
    positions: &[u32],
    qkv: &[f64],
    inverse: bool,
) -> Vec<Vec<f64>> {
    let (table, mut qkv) = (reals::<R>(table), reals::<R>(qkv));
    for (n, &position) in positions.iter().enumerate() {
        for h in 0..heads {
            for i in 0..part / 2 {
                let turn = position as usize * part + i;
                let (cos, sin) = (table[turn], table[turn + part / 2]);
                let sin = if inverse { -sin } else { sin };
                let head = n * row + h * d;
                let (a, b) = if adjacent { (head + 2 * i, head + 2 * i + 1) } else { (head + i, head + i + part / 2) };
                let (x, y) = (qkv[a], qkv[b]);
                (qkv[a], qkv[b]) = (x * cos - y * sin, y * cos + x * sin);
            }
        }
    }
    vec![f64s(&qkv)]
}

/// [out, rstd]: the first `heads` heads normalised with `wq`, the next `kv` with `wk`, all of them rotated; values
/// kept.
pub fn qk_norm_rope<R: Real>(
    (heads, kv, d): (usize, usize, usize),
    norm: (f64, f64),
    [table, wq, wk, qkv]: [&[f64]; 4],
    positions: &[u32],
) -> Vec<Vec<f64>> {
    let row = (heads + 2 * kv) * d;
    let (mut normed, mut rstd) = (qkv.to_vec(), vec![]);
    for (n, row) in normed.chunks_mut(row).enumerate() {
        for h in 0..heads + kv {
            let [y, r] = rmsnorm::<R>(norm, &qkv[n * row.len() + h * d..][..d], if h < heads { wq } else { wk })
                .try_into()
                .unwrap();
            row[h * d..][..d].copy_from_slice(&y);
            rstd.extend(r);
        }
    }
    let out = rope::<R>((heads + kv, d, row), table, positions, &normed, false);
    vec![out.into_iter().next().unwrap(), rstd]
}

/// [dqkv, dwq, dwk], the last two added to what they held.
pub fn qk_norm_rope_backward<R: Real>(
    (heads, kv, d): (usize, usize, usize),
    offset: f64,
    [table, wq, wk, qkv, rstd, d_out]: [&[f64]; 6],
    positions: &[u32],
    [dwq, dwk]: [&[f64]; 2],
) -> Vec<Vec<f64>> {
    let (row, rotated) = ((heads + 2 * kv) * d, heads + kv);
    let mut dqkv = rope::<R>((rotated, d, row), table, positions, d_out, true).remove(0);
    let (mut dwq, mut dwk) = (dwq.to_vec(), dwk.to_vec());
    for (n, dqkv) in dqkv.chunks_mut(row).enumerate() {
        for h in 0..rotated {
            let (w, dw) = if h < heads { (wq, &mut dwq) } else { (wk, &mut dwk) };
            let (x, dx) = (&qkv[n * row + h * d..][..d], &mut dqkv[h * d..][..d]);
            let back = rmsnorm_backward::<R>(offset, x, w, &rstd[n * rotated + h..][..1], dx, &vec![0.0; d], dw);
            dx.copy_from_slice(&back[0]);
            dw.copy_from_slice(&back[1]);
        }
    }
    vec![dqkv, dwq, dwk]
}

/// Shape of an attention: heads, key/value heads, elements of a head, scale.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub q: usize,
    pub kv: usize,
    pub d: usize,
    pub scale: f64,
    /// 0: none.
    pub window: usize,
    pub cap: f64,
}
impl Heads {
    pub fn row(&self) -> usize {
        (self.q + 2 * self.kv) * self.d
    }
    /// Where the query, key and value of query head h start in a row.
    fn starts(&self, h: usize) -> [usize; 3] {
        let kv = h / (self.q / self.kv);
        [h, self.q + kv, self.q + self.kv + kv].map(|head| head * self.d)
    }
    /// First key that query i sees: the start of its document, or of its window.
    fn first(&self, cu: &[u32], i: usize) -> usize {
        let start = cu.iter().map(|&c| c as usize).filter(|&c| c <= i).max().unwrap();
        if self.window == 0 { start } else { start.max((i + 1).saturating_sub(self.window)) }
    }
    /// A score, and its derivative by the product of query and key.
    fn score<R: Real>(&self, product: R) -> (R, R) {
        let scale = R::of(self.scale);
        if self.cap == 0.0 { (scale * product, scale) } else { softcap(R::of(self.cap), scale * product, scale) }
    }
}

/// cap tanh(x / cap), and `slope` times its derivative.
pub fn softcap<R: Real>(cap: R, x: R, slope: R) -> (R, R) {
    let t = (x / cap).tanh();
    (cap * t, slope * (R::of(1.0) - t * t))
}

/// [o, lse]
pub fn attention<R: Real>(a: Heads, cu: &[u32], qkv: &[f64]) -> Vec<Vec<f64>> {
    let (qkv, n) = (reals::<R>(qkv), qkv.len() / a.row());
    let (mut o, mut lse) = (vec![R::of(0.0); n * a.q * a.d], vec![R::of(0.0); a.q * n]);
    let at = |n: usize, start: usize| &qkv[n * a.row() + start..][..a.d];
    for h in 0..a.q {
        let [q, k, v] = a.starts(h);
        for i in 0..n {
            let keys = a.first(cu, i)..i + 1;
            let scores: Vec<R> = keys.clone().map(|j| a.score(dot(at(i, q), at(j, k))).0).collect();
            let max = scores.iter().copied().reduce(R::max).unwrap();
            let weights: Vec<R> = scores.iter().map(|&s| (s - max).exp()).collect();
            let total = weights.iter().copied().sum::<R>();
            lse[h * n + i] = max + total.ln();
            for c in 0..a.d {
                o[(i * a.q + h) * a.d + c] = keys.clone().zip(&weights).map(|(j, &p)| p / total * at(j, v)[c]).sum();
            }
        }
    }
    vec![f64s(&o), f64s(&lse)]
}

/// [dqkv], from the given `o` and `lse`: p = exp(s - lse), ds = p (dp - sum(do o)) (Dao et al. 2022, appendix B).
pub fn attention_backward<R: Real>(a: Heads, cu: &[u32], [qkv, o, lse, d_o]: [&[f64]; 4]) -> Vec<Vec<f64>> {
    let (qkv, o, lse, d_o) = (reals::<R>(qkv), reals::<R>(o), reals::<R>(lse), reals::<R>(d_o));
    let n = qkv.len() / a.row();
    let mut dqkv = vec![R::of(0.0); qkv.len()];
    let at = |n: usize, start: usize| &qkv[n * a.row() + start..][..a.d];
    for h in 0..a.q {
        let [q, k, v] = a.starts(h);
        for i in 0..n {
            let (o, d_o) = (&o[(i * a.q + h) * a.d..][..a.d], &d_o[(i * a.q + h) * a.d..][..a.d]);
            for j in a.first(cu, i)..=i {
                let (score, slope) = a.score(dot(at(i, q), at(j, k)));
                let p = (score - lse[h * n + i]).exp();
                let ds = p * (dot(d_o, at(j, v)) - dot(d_o, o)) * slope;
                for (c, &d_o) in d_o.iter().enumerate() {
                    let mut add = |at: usize, x: R| dqkv[at] = dqkv[at] + x;
                    add(i * a.row() + q + c, ds * at(j, k)[c]);
                    add(j * a.row() + k + c, ds * at(i, q)[c]);
                    add(j * a.row() + v + c, p * d_o);
                }
            }
        }
    }
    vec![f64s(&dqkv)]
}

/// [logits or their gradient, loss]; targets of -100 carry no loss. A cap of 0 is none.
pub fn cross_entropy<R: Real>(
    (vocab, scale, grad, cap): (usize, f64, bool, f64),
    targets: &[i32],
    logits: &[f64],
    loss: f64,
) -> Vec<Vec<f64>> {
    let (mut out, mut loss) = (reals::<R>(logits), loss);
    for (row, &target) in out.chunks_mut(vocab).zip(targets) {
        let one = R::of(1.0);
        let cap = |&x: &R| if cap == 0.0 { (x, one) } else { softcap(R::of(cap), x, one) };
        let capped: Vec<(R, R)> = row.iter().map(cap).collect();
        let max = capped.iter().map(|z| z.0).reduce(R::max).unwrap();
        let total = capped.iter().map(|z| (z.0 - max).exp()).sum::<R>();
        if target != -100 {
            loss += (total.ln() + max - capped[target as usize].0).f64();
        }
        for (i, x) in row.iter_mut().enumerate().filter(|_| grad) {
            let hot = R::of((i as i32 == target) as u8 as f64);
            let (z, slope) = capped[i];
            *x = if target == -100 { R::of(0.0) } else { R::of(scale) * ((z - max).exp() / total - hot) * slope };
        }
    }
    vec![f64s(&out), vec![loss]]
}
