//! Attention by the simplest loops in f64; and the same with every intermediate result rounded, whose error sets the
//! tolerance. Never knows a kernel.
use half::bf16;
use std::ops::Range;

/// Which keys each query attends to.
#[derive(Clone, Debug)]
pub enum Sight {
    /// `cu_seqlens`: consecutive documents.
    Packed(Vec<u32>),
    /// The rows of those documents that are queries and keys, both increasing.
    Pass { cu_seqlens: Vec<u32>, queries: Vec<u32>, keys: Vec<u32> },
}

#[derive(Clone, Debug)]
pub struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub window: usize,
    pub softcap: f64,
    pub sight: Sight,
}

impl Shape {
    pub fn packed(heads: usize, kv_heads: usize, head_dim: usize, cu_seqlens: &[u32]) -> Shape {
        Shape { heads, kv_heads, head_dim, window: 0, softcap: 0.0, sight: Sight::Packed(cu_seqlens.to_vec()) }
    }
    pub fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt() as f32 as f64
    }
    pub fn rows(&self) -> (Vec<u32>, Vec<u32>) {
        match &self.sight {
            Sight::Packed(cu) => {
                let all: Vec<u32> = (0..*cu.last().unwrap()).collect();
                (all.clone(), all)
            }
            Sight::Pass { queries, keys, .. } => (queries.clone(), keys.clone()),
        }
    }
    pub fn cu_seqlens(&self) -> &[u32] {
        match &self.sight {
            Sight::Packed(cu) | Sight::Pass { cu_seqlens: cu, .. } => cu,
        }
    }
    /// The ends of each row's document.
    pub fn documents(&self) -> Vec<u32> {
        self.cu_seqlens().windows(2).flat_map(|of| (of[0]..of[1]).flat_map(|_| [of[0], of[1]])).collect()
    }
    fn sees(&self, query: u32, key: u32) -> bool {
        let start = self.cu_seqlens().iter().rfind(|&&c| c <= query).unwrap();
        key >= *start && key <= query && (self.window == 0 || ((query - key) as usize) < self.window)
    }
    /// The range of keys that each query attends to, and of queries for each key.
    pub fn tables(&self) -> [Vec<Range<u32>>; 2] {
        let (queries, keys) = self.rows();
        let range = |seen: &dyn Fn(usize) -> bool, n: usize, before: u32| {
            let first = (0..n).find(|&j| seen(j)).map_or(before, |j| j as u32);
            first..first + (0..n).filter(|&j| seen(j)).count() as u32
        };
        let (mut of_queries, mut of_keys) = (vec![], vec![]);
        for &q in &queries {
            let before = keys.iter().filter(|&&k| k <= q).count() as u32;
            of_queries.push(range(&|j| self.sees(q, keys[j]), keys.len(), before));
        }
        for &k in &keys {
            let before = queries.iter().filter(|&&q| q < k).count() as u32;
            of_keys.push(range(&|i| self.sees(queries[i], k), queries.len(), before));
        }
        [of_queries, of_keys]
    }
}

/// Inputs of a pass, with heads side by side in rows.
pub struct Inputs {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub d_o: Vec<f64>,
}
impl Inputs {
    pub fn new(shape: &Shape) -> Inputs {
        let (queries, keys) = shape.rows();
        let (q, k) = (queries.len() * shape.heads * shape.head_dim, keys.len() * shape.kv_heads * shape.head_dim);
        Inputs { q: normal(1, q), k: normal(2, k), v: normal(3, k), d_o: normal(4, q) }
    }
}

#[derive(Default)]
pub struct Outputs {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

/// Applies `round` to every score, weight and sum.
pub fn attention(shape: &Shape, x: &Inputs, round: &dyn Fn(f64) -> f64) -> Outputs {
    let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let (n, [of_queries, _]) = (shape.rows().0.len(), shape.tables());
    let mut out = Outputs {
        o: vec![0.0; x.q.len()],
        lse: vec![f64::NEG_INFINITY; shape.heads * n],
        dq: vec![0.0; x.q.len()],
        dk: vec![0.0; x.k.len()],
        dv: vec![0.0; x.k.len()],
    };
    let dot = |a: &[f64], b: &[f64]| round(a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>());
    for h in 0..shape.heads {
        for (i, keys) in of_queries.iter().enumerate().filter(|(_, keys)| !keys.is_empty()) {
            let q = (i * shape.heads + h) * d..(i * shape.heads + h + 1) * d;
            let at = |j: u32| (j as usize * shape.kv_heads + h / group) * d;
            let mut slopes = vec![];
            let scores: Vec<f64> = keys
                .clone()
                .map(|j| {
                    let s = shape.scale() * dot(&x.q[q.clone()], &x.k[at(j)..][..d]);
                    let t = (s / shape.softcap).tanh();
                    slopes.push(if shape.softcap == 0.0 { 1.0 } else { 1.0 - t * t });
                    round(if shape.softcap == 0.0 { s } else { shape.softcap * t })
                })
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            out.lse[h * n + i] = max + total.ln();
            let weights: Vec<f64> = scores.iter().map(|s| round((s - max).exp() / total)).collect();
            for c in 0..d {
                out.o[q.start + c] = round(keys.clone().zip(&weights).map(|(j, p)| p * x.v[at(j) + c]).sum());
            }
            let delta: f64 = x.d_o[q.clone()].iter().zip(&out.o[q.clone()]).map(|(a, b)| a * b).sum();
            for ((j, p), slope) in keys.clone().zip(&weights).zip(&slopes) {
                let dp = dot(&x.d_o[q.clone()], &x.v[at(j)..][..d]);
                let ds = round(p * (dp - delta) * slope) * shape.scale();
                for c in 0..d {
                    out.dq[q.start + c] += ds * x.k[at(j) + c];
                    out.dk[at(j) + c] += ds * x.q[q.start + c];
                    out.dv[at(j) + c] += p * x.d_o[q.start + c];
                }
            }
        }
    }
    for gradient in [&mut out.dq, &mut out.dk, &mut out.dv] {
        gradient.iter_mut().for_each(|x| *x = round(*x));
    }
    out
}

/// Bell-shaped numbers that all element types hold exactly: sums of four draws of a SplitMix64.
fn normal(seed: u64, n: usize) -> Vec<f64> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    let exact = |x: f64| if x.abs() < 1e-3 { 0.0 } else { bf16::from_f64(x).to_f64() };
    (0..n).map(|_| exact(1.7 * (uniform() + uniform() + uniform() + uniform()))).collect()
}
