//! Launches of mixtures of experts: routing, the rows that experts get, and their products. Never reads how many rows
//! an expert has: kernels find that in GPU memory, and grids cover what it can be at most.
use super::driver::{Arg, Kernel, LaunchShape};
use super::launch::{BLOCK, GpuDevice, SM_90A, VECTOR, WARPS, by_dtype, int};
use crate::View;
use crate::ops::{
    Balance, CombineRows, ExpertBias, ExpertBiasBackward, Grouped, GroupedGemm, PlaceRuns, Route, RouteBackward,
    RouteLoad, RouteRule, RouteScored, RouteScoredBackward, RouteShape, ScaleChosen, ScaleChosenBackward, Sigmoid,
    TakeRows, WeighRows,
};
use flatshard_base::{DType, Error, Result};
use flatshard_ptx::kernels::experts::{GroupedKernel, hopper_grouped, plain_grouped, tile_grouped};

/// Maximum threads per CTA.
const MOST: usize = 1024;

pub fn route(gpu: &GpuDevice, op: Route) -> Result<()> {
    let n = op.check()?;
    routed(gpu, Route::OP, n, (RouteRule::PLAIN, None), op)
}
pub fn route_scored(gpu: &GpuDevice, op: RouteScored) -> Result<()> {
    const OP: &str = RouteScored::OP;
    let (n, RouteScored { rule, bias, route }) = (op.check()?, op);
    let variant = by_dtype!(OP, bias.map_or(DType::F32, |bias| bias.dtype()), "route_scored")?;
    routed(gpu, variant, n, (rule, bias), route)
}
fn routed(
    gpu: &GpuDevice,
    variant: &'static str,
    n: usize,
    (rule, bias): (RouteRule, Option<View>),
    op: Route,
) -> Result<()> {
    let Route { shape, probs, mut chosen, weights, offsets, order, places } = op;
    let RouteShape { experts, top_k, normalize } = shape;
    if n == 0 {
        return gpu.driver.zero(offsets);
    }
    let (to, sizes) = (Arg::Out(chosen.reborrow()), [n, experts, top_k, normalize.into()].map(int));
    let [tokens, of, choices, normal] = sizes;
    let [sigmoid, groups, top_groups] = [rule.sigmoid.into(), rule.groups, rule.top_groups].map(int);
    let (probs, to_weights, bias) = (Arg::InOut(probs), Arg::Out(weights), bias.map_or(Arg::Null, Arg::In));
    let (scale, near) = (Arg::F32(rule.scale), near(rule));
    let args =
        &mut [probs, to, to_weights, tokens, of, choices, normal, bias, sigmoid, groups, top_groups, scale, near];
    gpu.launch(variant, Route::OP, n.div_ceil(WARPS), args)?;
    let (rows, chosen) = (n * top_k, Arg::In(chosen.as_view()));
    // Four loads per lane, unless there are more than 32 warps' worth.
    let threads = (rows.div_ceil(128) * 32).min(MOST) as u32;
    let args = &mut [chosen, Arg::Out(offsets), Arg::Out(order), Arg::Out(places), int(rows), int(experts)];
    gpu.line("route_sort", "route_sort", (experts as u32, threads), args)
}

pub fn route_backward(gpu: &GpuDevice, op: RouteBackward) -> Result<()> {
    let n = op.check()?;
    routed_backward(gpu, n, RouteRule::PLAIN, op)
}
pub fn route_scored_backward(gpu: &GpuDevice, op: RouteScoredBackward) -> Result<()> {
    let n = op.check()?;
    routed_backward(gpu, n, op.rule, op.route)
}
/// What kernels get of [`RouteRule::mixer`]: a number below 0 without one.
fn near(rule: RouteRule) -> Arg<'static> {
    Arg::F32(rule.mixer.unwrap_or(-1.0))
}
fn routed_backward(gpu: &GpuDevice, n: usize, rule: RouteRule, op: RouteBackward) -> Result<()> {
    const OP: &str = RouteBackward::OP;
    let RouteShape { experts, top_k, normalize } = op.shape;
    let [probs, chosen, weights, dweights, balance] =
        [op.probs, op.chosen, op.weights, op.dweights, op.balance].map(Arg::In);
    let [tokens, of, choices, normal, sigmoid] = [n, experts, top_k, normalize.into(), rule.sigmoid.into()].map(int);
    let (dlogits, scale, near) = (Arg::Out(op.dlogits), Arg::F32(rule.scale), near(rule));
    let args =
        &mut [probs, chosen, weights, dweights, balance, dlogits, tokens, of, choices, normal, sigmoid, scale, near];
    gpu.launch(OP, OP, n.div_ceil(WARPS), args)
}

pub fn scale_chosen(gpu: &GpuDevice, op: ScaleChosen) -> Result<()> {
    const OP: &str = ScaleChosen::OP;
    op.check()?;
    let variant = by_dtype!(OP, op.factors.dtype(), "scale_chosen")?;
    let (n, y) = (op.y.len(), Arg::Out(op.y));
    let args = &mut [Arg::In(op.chosen), Arg::In(op.factors), Arg::In(op.weights), y, Arg::U64(n as u64)];
    gpu.launch(variant, OP, n.div_ceil(BLOCK as usize), args)
}

pub fn scale_chosen_backward(gpu: &GpuDevice, op: ScaleChosenBackward) -> Result<()> {
    op.check()?;
    let variant = by_dtype!(ScaleChosenBackward::OP, op.factors.dtype(), "scale_chosen")?;
    let (n, experts) = (op.dy.len(), op.factors.len());
    if n == 0 {
        return Ok(());
    }
    if let Some(dfactors) = op.dfactors {
        let (dy, to) = (Arg::In(op.dy.as_view()), Arg::InOut(dfactors));
        let args = &mut [Arg::In(op.chosen), Arg::In(op.weights), dy, to, Arg::U64(n as u64)];
        gpu.line(variant, "scale_chosen_sums", (experts as u32, BLOCK), args)?;
    }
    let args = &mut [Arg::In(op.chosen), Arg::In(op.factors), Arg::Null, Arg::InOut(op.dy), Arg::U64(n as u64)];
    gpu.launch(variant, ScaleChosen::OP, n.div_ceil(BLOCK as usize), args)
}

pub fn route_load(gpu: &GpuDevice, op: RouteLoad) -> Result<()> {
    const OP: &str = RouteLoad::OP;
    let experts = op.check()?;
    let tokens = op.probs.len() / experts.max(1);
    let [counts, sums] = [op.counts, op.sums].map(Arg::InOut);
    let args = &mut [Arg::In(op.probs), Arg::In(op.offsets), counts, sums, int(tokens), int(experts)];
    gpu.line(OP, OP, (experts.div_ceil(32) as u32, 1024), args)
}

pub fn balance(gpu: &GpuDevice, op: Balance) -> Result<()> {
    const OP: &str = Balance::OP;
    let layers = op.check()?;
    let [layers, experts, top_k] = [layers, op.shape.experts, op.shape.top_k].map(int);
    let (grad, report) = (Arg::Out(op.grad), Arg::InOut(op.report));
    gpu.line(OP, OP, (1, 32), &mut [Arg::In(op.load), Arg::In(op.scale), grad, report, layers, experts, top_k])
}

pub fn take_rows(gpu: &GpuDevice, op: TakeRows) -> Result<()> {
    const OP: &str = TakeRows::OP;
    let (columns, rows) = (op.check()?, op.order.len());
    let variant = if op.x.dtype() == DType::F32 { "take_rows_b32" } else { "take_rows_b16" };
    let args = &mut [Arg::In(op.order), Arg::In(op.x), Arg::Out(op.y), int(rows), int(columns), int(op.top_k)];
    gpu.launch(variant, OP, if columns == 0 { 0 } else { rows.div_ceil(WARPS) }, args)
}

pub fn place_runs(gpu: &GpuDevice, op: PlaceRuns) -> Result<()> {
    const OP: &str = PlaceRuns::OP;
    let runs = op.check()?;
    let args = &mut [Arg::In(op.runs), Arg::Out(op.order), Arg::Out(op.places), int(runs)];
    gpu.launch(OP, OP, runs, args)
}

pub fn combine_rows(gpu: &GpuDevice, op: CombineRows) -> Result<()> {
    const OP: &str = CombineRows::OP;
    let (n, variant) = (op.check()?, by_dtype!(OP, op.x.dtype(), "combine_rows")?);
    let flags = [op.places.is_some(), op.weights.is_some(), op.accumulate].map(|flag| int(flag.into()));
    let [places, weights] = [op.places, op.weights].map(|operand| operand.map_or(Arg::Null, Arg::In));
    let y = if op.accumulate { Arg::InOut(op.y) } else { Arg::Out(op.y) };
    let [mapped, weighted, adds] = flags;
    let [tokens, columns, top_k] = [n, op.width, op.top_k].map(int);
    let args = &mut [places, weights, Arg::In(op.x), y, tokens, columns, top_k, mapped, weighted, adds];
    gpu.launch(variant, OP, n.div_ceil(WARPS), args)
}

pub fn weigh_rows(gpu: &GpuDevice, op: WeighRows) -> Result<()> {
    const OP: &str = WeighRows::OP;
    let (columns, rows) = (op.check()?, op.weights.len());
    let variant = by_dtype!(OP, op.act.dtype(), "weigh_rows")?;
    let (mapped, order) = (int(op.order.is_some().into()), op.order.map_or(Arg::Null, Arg::In));
    let [act, dact] = [op.act, op.dact].map(Arg::InOut);
    let args = &mut [order, Arg::In(op.weights), act, dact, Arg::Out(op.dweights), int(rows), int(columns), mapped];
    gpu.launch(variant, OP, if columns == 0 { 0 } else { rows.div_ceil(WARPS) }, args)
}

pub fn sigmoid(gpu: &GpuDevice, op: Sigmoid) -> Result<()> {
    const OP: &str = Sigmoid::OP;
    op.check()?;
    let (n, x) = (op.x.len(), Arg::InOut(op.x));
    let length = Arg::U64(n as u64);
    match op.dy {
        None => gpu.each("sigmoid", OP, n, DType::F32, &mut [x, length]),
        Some(dy) => gpu.each("sigmoid_backward", OP, n, DType::F32, &mut [x, Arg::InOut(dy), length]),
    }
}

/// The kernel of a product: on tensor cores where the operands allow it, and for sm_90a unless the driver has compiled
/// it badly.
fn kernel(gpu: &GpuDevice, op: &GroupedGemm) -> Result<&'static GroupedKernel> {
    const OP: &str = GroupedGemm::OP;
    let (a, b, c) = (op.a.dtype(), op.b.dtype(), op.c.dtype());
    let expected = if op.kind == Grouped::Weight { DType::F32 } else { a };
    if a != b || c != expected {
        return Err(Error::op(OP, format!("{:?}: cannot multiply {a} and {b} into {c}", op.kind)));
    }
    let addresses = [op.a.address(), op.b.address(), op.c.address()];
    let aligned = [op.n, op.k, op.stride].iter().all(|n| n.is_multiple_of(8))
        && addresses.iter().all(|&address| address.is_multiple_of(VECTOR));
    let kind = match op.kind {
        Grouped::Forward => 0,
        Grouped::Input => 1,
        Grouped::Weight => 2,
    };
    let hopper = hopper_grouped(a.name()).filter(|_| aligned && gpu.driver.arch() == SM_90A);
    let hopper = hopper.map(|family| &family[kind]).filter(|kernel| !gpu.driver.avoids(kernel.variant));
    let others = || tile_grouped(a.name()).filter(|_| aligned).or_else(|| plain_grouped(a.name()));
    let kernel = hopper.or_else(|| others().map(|family| &family[kind]));
    kernel.ok_or_else(|| Error::op(OP, format!("computes in f32, bf16 or f16, got {a}")))
}

pub fn grouped_gemm(gpu: &GpuDevice, op: GroupedGemm) -> Result<()> {
    const OP: &str = GroupedGemm::OP;
    let (groups, rows) = op.check()?;
    op.offsets.fits(OP, "offsets", DType::U32, groups + 1)?;
    let GroupedKernel { variant, rows: tile, columns, shared } = *kernel(gpu, &op)?;
    let GroupedGemm { kind, n, k, offsets, a, b, c, stride, accumulate, .. } = op;
    let tiles = match kind {
        Grouped::Weight => groups * n.div_ceil(tile) * k.div_ceil(columns),
        // Each group with rows has at most one tile that is not full.
        _ => (rows / tile + groups.min(rows)) * n.div_ceil(columns),
    };
    if tiles == 0 {
        return Ok(());
    }
    let grid = u32::try_from(tiles).ok().filter(|&tiles| tiles <= i32::MAX as u32);
    let grid = grid.ok_or_else(|| Error::op(OP, format!("{rows} rows of {n} and {k} exceed a launch's limit")))?;
    // A weight gradient's matrices are apart, and an empty group adds nothing.
    let c = if accumulate || kind == Grouped::Weight { Arg::InOut(c) } else { Arg::Out(c) };
    let [groups, rows, n, k, adds] = [groups, rows, n, k, accumulate.into()].map(int);
    let args = &mut [Arg::In(offsets), Arg::In(a), Arg::In(b), c, groups, rows, n, k, Arg::U64(stride as u64), adds];
    gpu.driver.launch(Kernel { variant, entry: OP }, LaunchShape { shared, ..LaunchShape::line(grid, BLOCK) }, args)
}

pub fn expert_bias(gpu: &GpuDevice, op: ExpertBias) -> Result<()> {
    const OP: &str = ExpertBias::OP;
    let (rows, places, variant) = (op.check()?, op.places, by_dtype!(OP, op.y.dtype(), "expert_bias")?);
    let [n, width, stride, experts] = [rows, places.width, places.stride, places.offsets.len() - 1].map(int);
    let args = &mut [Arg::In(op.bias), Arg::In(places.offsets), Arg::InOut(op.y), n, width, stride, experts];
    gpu.launch(variant, OP, rows.div_ceil(WARPS), args)
}

pub fn expert_bias_backward(gpu: &GpuDevice, op: ExpertBiasBackward) -> Result<()> {
    const OP: &str = ExpertBiasBackward::OP;
    let (rows, variant) = (op.check()?, by_dtype!(OP, op.dy.dtype(), "expert_bias")?);
    let ExpertBiasBackward { places, dy, weighed, db, accumulate } = op;
    let experts = places.offsets.len() - 1;
    let order = weighed.as_ref().and_then(|weighed| weighed.order);
    let [width, stride, mapped] = [places.width, places.stride, order.is_some().into()];
    let order = || order.map_or(Arg::Null, Arg::In);
    if let Some(db) = db {
        let weights = weighed.as_ref().map_or(Arg::Null, |weighed| Arg::In(weighed.weights));
        // Between the biases of two experts may be other gradients.
        let out = Arg::InOut(db);
        let numbers = [width, stride, mapped, weighed.is_some().into(), accumulate.into()].map(int);
        let [wide, apart, mapped, weighs, adds] = numbers;
        let args =
            &mut [Arg::In(places.offsets), order(), weights, Arg::In(dy), out, wide, apart, mapped, weighs, adds];
        let grid = [experts as u32, (width as u32).div_ceil(BLOCK), 1];
        let shape = LaunchShape { grid, block: [BLOCK, 1, 1], shared: 0 };
        gpu.driver.launch(Kernel { variant, entry: "expert_bias_sums" }, shape, args)?;
    }
    let Some(weighed) = weighed else { return Ok(()) };
    let [n, width, stride, experts, mapped] = [rows, width, stride, experts, mapped].map(int);
    let (bias, offsets, dy, out) =
        (Arg::In(weighed.bias), Arg::In(places.offsets), Arg::In(dy), Arg::InOut(weighed.dweights));
    let args = &mut [bias, offsets, order(), dy, out, n, width, stride, experts, mapped];
    gpu.launch(variant, "expert_bias_weights", rows.div_ceil(WARPS), args)
}
