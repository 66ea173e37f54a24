//! Operands of mixtures of experts. N: tokens, E: experts, K: experts per token, R = N K: routed rows, sorted by
//! expert.
use super::check::{float, read, rows, written};
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// How tokens choose experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteShape {
    /// E
    pub experts: usize,
    /// K, at most E.
    pub top_k: usize,
    /// A token's K weights are divided by their sum.
    pub normalize: bool,
}

/// Softmax of the router's logits, the K largest probabilities of each token (on ties the lower expert), and the order
/// of the routed rows: by expert, within an expert by token. Assigns all outputs.
pub struct Route<'a> {
    pub shape: RouteShape,
    /// (N, E) f32: logits, which become probabilities.
    pub probs: ViewMut<'a>,
    /// (N, K) u32: the experts of each token, in order of their probabilities.
    pub chosen: ViewMut<'a>,
    /// (N, K) f32
    pub weights: ViewMut<'a>,
    /// (E + 1) u32: the first routed row of each expert, then R.
    pub offsets: ViewMut<'a>,
    /// (R) u32: the index in `chosen` of each routed row.
    pub order: ViewMut<'a>,
    /// (N, K) u32: the routed row of each index in `chosen`.
    pub places: ViewMut<'a>,
}

impl Route<'_> {
    pub const OP: &'static str = "route";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let RouteShape { experts, top_k, .. } = self.shape;
        if top_k == 0 || top_k > experts {
            return Err(Error::op(Self::OP, format!("{top_k} of {experts} experts")));
        }
        let n = rows(Self::OP, "probs", self.probs.len(), experts)?;
        written(
            Self::OP,
            &[
                ("probs", &self.probs, DType::F32, n * experts),
                ("chosen", &self.chosen, DType::U32, n * top_k),
                ("weights", &self.weights, DType::F32, n * top_k),
                ("offsets", &self.offsets, DType::U32, experts + 1),
                ("order", &self.order, DType::U32, n * top_k),
                ("places", &self.places, DType::U32, n * top_k),
            ],
        )?;
        Ok(n)
    }
}

/// Backward of [`Route`]. Assigns `dlogits`.
pub struct RouteBackward<'a> {
    pub shape: RouteShape,
    /// (N, E) f32
    pub probs: View<'a>,
    /// (N, K) u32
    pub chosen: View<'a>,
    /// (N, K) f32
    pub weights: View<'a>,
    /// (N, K) f32
    pub dweights: View<'a>,
    /// (E) f32: the gradient of the auxiliary loss with respect to every token's probabilities ([`Balance`]).
    pub balance: View<'a>,
    /// (N, E) f32
    pub dlogits: ViewMut<'a>,
}

impl RouteBackward<'_> {
    pub const OP: &'static str = "route_backward";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let RouteShape { experts, top_k, .. } = self.shape;
        let n = rows(Self::OP, "probs", self.probs.len(), experts)?;
        read(
            Self::OP,
            &[
                ("probs", &self.probs, DType::F32, n * experts),
                ("chosen", &self.chosen, DType::U32, n * top_k),
                ("weights", &self.weights, DType::F32, n * top_k),
                ("dweights", &self.dweights, DType::F32, n * top_k),
                ("balance", &self.balance, DType::F32, experts),
            ],
        )?;
        written(Self::OP, &[("dlogits", &self.dlogits, DType::F32, n * experts)])?;
        Ok(n)
    }
}

/// The load of one layer's experts. Adds.
pub struct RouteLoad<'a> {
    /// (N, E) f32
    pub probs: View<'a>,
    /// (E + 1) u32
    pub offsets: View<'a>,
    /// (E) f64: rows of each expert.
    pub counts: ViewMut<'a>,
    /// (E) f64: the sums of its probabilities.
    pub sums: ViewMut<'a>,
}

impl RouteLoad<'_> {
    pub const OP: &'static str = "route_load";
    /// Returns E.
    pub fn check(&self) -> Result<usize> {
        let experts = self.counts.len();
        rows(Self::OP, "probs", self.probs.len(), experts)?;
        let probs = ("probs", &self.probs, DType::F32, self.probs.len());
        read(Self::OP, &[probs, ("offsets", &self.offsets, DType::U32, experts + 1)])?;
        written(Self::OP, &[("counts", &self.counts, DType::F64, experts), ("sums", &self.sums, DType::F64, experts)])?;
        Ok(experts)
    }
}

/// The load-balancing loss (Fedus et al. 2021, "Switch Transformers", equations 4 to 6) of a micro-batch:
/// `E sum_e c_e p_e / T^2`, with `c_e` rows and `p_e` the sum of probabilities of expert e over the T tokens of all
/// ranks, each counted in every sparse layer.
pub struct Balance<'a> {
    pub shape: RouteShape,
    /// f64: counts (layers, E), then sums of probabilities (E), over all ranks.
    pub load: View<'a>,
    /// f32 (1): the loss's factor.
    pub scale: View<'a>,
    /// (E) f32: the gradient with respect to each token's probabilities. Assigns.
    pub grad: ViewMut<'a>,
    /// f64: the loss without its factor, then counts (layers, E). Adds.
    pub report: ViewMut<'a>,
}

impl Balance<'_> {
    pub const OP: &'static str = "balance";
    /// Returns the number of layers.
    pub fn check(&self) -> Result<usize> {
        let experts = self.shape.experts;
        let layers = rows(Self::OP, "load", self.load.len(), experts)?.saturating_sub(1);
        let words = [("load", &self.load, DType::F64, (layers + 1) * experts), ("scale", &self.scale, DType::F32, 1)];
        read(Self::OP, &words)?;
        let report = ("report", &self.report, DType::F64, 1 + layers * experts);
        written(Self::OP, &[("grad", &self.grad, DType::F32, experts), report])?;
        Ok(layers)
    }
}

/// Each token's row, once for each of its experts: `y[r] = x[order[r] / top_k]`. Assigns.
pub struct TakeRows<'a> {
    pub top_k: usize,
    /// (R) u32
    pub order: View<'a>,
    /// (N, C)
    pub x: View<'a>,
    /// (R, C)
    pub y: ViewMut<'a>,
}

impl TakeRows<'_> {
    pub const OP: &'static str = "take_rows";
    /// Returns C.
    pub fn check(&self) -> Result<usize> {
        let (dtype, r) = (float(Self::OP, self.x.dtype())?, self.order.len());
        read(Self::OP, &[("order", &self.order, DType::U32, r)])?;
        written(Self::OP, &[("y", &self.y, dtype, self.x.len() * self.top_k)])?;
        let width = self.y.len().checked_div(r).unwrap_or(0);
        match width * r == self.y.len() {
            true => Ok(width),
            false => Err(Error::op(Self::OP, format!("y holds {} elements, not {r} rows", self.y.len()))),
        }
    }
}

/// Two orders of the same rows, from runs of rows that follow each other in both: `order[row + i] = place + i` and
/// `places[place + i] = row + i` for each run. Assigns. Runs cover all rows and all places.
pub struct PlaceRuns<'a> {
    /// (runs, 3) u32: a run's first row, its first place, and its length.
    pub runs: View<'a>,
    /// (R) u32 each.
    pub order: ViewMut<'a>,
    pub places: ViewMut<'a>,
}

impl PlaceRuns<'_> {
    pub const OP: &'static str = "place_runs";
    /// Returns the number of runs.
    pub fn check(&self) -> Result<usize> {
        let runs = rows(Self::OP, "runs", self.runs.len(), 3)?;
        read(Self::OP, &[("runs", &self.runs, DType::U32, 3 * runs)])?;
        let order = ("order", &self.order, DType::U32, self.order.len());
        written(Self::OP, &[order, ("places", &self.places, DType::U32, self.order.len())])?;
        Ok(runs)
    }
}

/// `y[n] = sum over j of weights[n, j] x[places[n, j]]`, in the order of j, in f32. Assigns, or adds with `accumulate`.
pub struct CombineRows<'a> {
    /// C
    pub width: usize,
    /// K
    pub top_k: usize,
    /// (N, K) u32; without it, row n K + j.
    pub places: Option<View<'a>>,
    /// (N, K) f32; without it, 1.
    pub weights: Option<View<'a>>,
    /// (R, C)
    pub x: View<'a>,
    /// (N, C)
    pub y: ViewMut<'a>,
    pub accumulate: bool,
}

impl CombineRows<'_> {
    pub const OP: &'static str = "combine_rows";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let width = self.width;
        let n = rows(Self::OP, "y", self.y.len(), width)?;
        let (dtype, r) = (float(Self::OP, self.x.dtype())?, n * self.top_k);
        read(Self::OP, &[("x", &self.x, dtype, r * width)])?;
        self.places.map_or(Ok(()), |places| places.fits(Self::OP, "places", DType::U32, r))?;
        self.weights.map_or(Ok(()), |weights| weights.fits(Self::OP, "weights", DType::F32, r))?;
        written(Self::OP, &[("y", &self.y, dtype, self.y.len())])?;
        Ok(n)
    }
}

/// Moves the weights of rows from the result of a product to its input: with `dact` the gradient of `act` for weights
/// of 1, assigns `dweights = act . dact`, and multiplies `act` and `dact` by the weights.
pub struct WeighRows<'a> {
    /// (R) u32: the index in `weights` of each row; without it, the row.
    pub order: Option<View<'a>>,
    /// (R) f32
    pub weights: View<'a>,
    /// (R, F)
    pub act: ViewMut<'a>,
    /// (R, F)
    pub dact: ViewMut<'a>,
    /// (R) f32
    pub dweights: ViewMut<'a>,
}

impl WeighRows<'_> {
    pub const OP: &'static str = "weigh_rows";
    /// Returns F.
    pub fn check(&self) -> Result<usize> {
        let (dtype, r) = (float(Self::OP, self.act.dtype())?, self.weights.len());
        read(Self::OP, &[("weights", &self.weights, DType::F32, r)])?;
        self.order.map_or(Ok(()), |order| order.fits(Self::OP, "order", DType::U32, r))?;
        written(Self::OP, &[("dact", &self.dact, dtype, self.act.len()), ("dweights", &self.dweights, DType::F32, r)])?;
        Ok(self.act.len().checked_div(r).unwrap_or(0))
    }
}

/// `x = sigmoid(x)`, f32; or with `dy`, which becomes the gradient of the sigmoid's input, x is the sigmoid.
pub struct Sigmoid<'a> {
    pub x: ViewMut<'a>,
    pub dy: Option<ViewMut<'a>>,
}

impl Sigmoid<'_> {
    pub const OP: &'static str = "sigmoid";
    pub fn check(&self) -> Result<()> {
        written(Self::OP, &[("x", &self.x, DType::F32, self.x.len())])?;
        self.dy.as_ref().map_or(Ok(()), |dy| dy.fits(Self::OP, "dy", DType::F32, self.x.len()))
    }
}

/// Which operands of a [`GroupedGemm`] are rows, of which each group has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouped {
    /// C rows (n) = A rows (k) Bᵀ, B (n, k): the forward pass.
    Forward,
    /// C rows (n) = A rows (k) B, B (k, n): the input gradient.
    Input,
    /// C (m, n) = Aᵀ B, A rows (m), B rows (n): the weight gradient. A group without rows gives zeros.
    Weight,
}

/// A matrix product for each of E groups of rows, with f32 accumulation: group e has rows `offsets[e]..offsets[e + 1]`.
/// Assigns, or adds with `accumulate`.
pub struct GroupedGemm<'a> {
    pub kind: Grouped,
    /// Widths: of C's rows and A's; of a weight gradient, its rows and columns.
    pub n: usize,
    pub k: usize,
    /// (E + 1) u32
    pub offsets: View<'a>,
    pub a: View<'a>,
    pub b: View<'a>,
    pub c: ViewMut<'a>,
    /// Elements from one group's matrix to the next one's.
    pub stride: usize,
    pub accumulate: bool,
    /// The result of a row does not depend on the number of rows in its group, which takes longer where there are few.
    pub alike: bool,
}

impl GroupedGemm<'_> {
    pub const OP: &'static str = "grouped_gemm";
    /// Returns E and R.
    pub fn check(&self) -> Result<(usize, usize)> {
        let (experts, matrix) = (self.offsets.len().saturating_sub(1), self.n * self.k);
        let r = rows(Self::OP, "a", self.a.len(), if self.kind == Grouped::Weight { self.n } else { self.k })?;
        let held = |len: usize| experts > 0 && len >= (experts - 1) * self.stride + matrix;
        let fits = match self.kind {
            Grouped::Weight => self.b.len() == r * self.k && held(self.c.len()),
            _ => self.c.len() == r * self.n && held(self.b.len()),
        };
        match fits && (experts == 1 || self.stride >= matrix) {
            true => Ok((experts, r)),
            false => Err(Error::op(
                Self::OP,
                format!(
                    "{:?} of {experts} groups of {r} rows, n {}, k {}, stride {} does not fit operands of {}, {} and {}",
                    self.kind,
                    self.n,
                    self.k,
                    self.stride,
                    self.a.len(),
                    self.b.len(),
                    self.c.len()
                ),
            )),
        }
    }
    pub fn flops(&self) -> u64 {
        let r = match self.kind {
            Grouped::Weight => self.a.len() / self.n.max(1),
            _ => self.a.len() / self.k.max(1),
        };
        2 * (r * self.n * self.k) as u64
    }
}
