//! Products by groups of rows, and all operations of a sparse block together, with planted faults.
use super::experts::{floats, route_on};
use super::harness::*;
use crate::common::reference::{self, Real};
use flatshard_base::{DType, Meter, Result};
use flatshard_device::gpu::GpuDevice;
use flatshard_device::gpu::sim::Sim;
use flatshard_device::ops::{CombineRows, Grouped, GroupedGemm, RouteShape, TakeRows, WeighRows};
use flatshard_device::{Buf, Device};
use flatshard_ptx::kernels::Variant;
use std::sync::Arc;

/// A product of each kind by the definition. `c` is what was there, with gaps between the matrices of a weight
/// gradient.
fn grouped<R: Real>(
    kind: Grouped,
    [n, k, stride]: [usize; 3],
    offsets: &[usize],
    [a, b, c]: [&[f64]; 3],
    accumulate: bool,
) -> Vec<f64> {
    let mut c = reference::reals::<R>(c);
    let mut set = |at: usize, terms: &mut dyn Iterator<Item = (f64, f64)>| {
        let sum = terms.fold(R::of(0.0), |sum, (x, y)| sum + R::of(x) * R::of(y));
        c[at] = if accumulate { c[at] + sum } else { sum };
    };
    for (e, of) in offsets.windows(2).enumerate() {
        let matrix = e * stride;
        match kind {
            Grouped::Weight => {
                for (i, j) in (0..n).flat_map(|i| (0..k).map(move |j| (i, j))) {
                    set(matrix + i * k + j, &mut (of[0]..of[1]).map(|r| (a[r * n + i], b[r * k + j])));
                }
            }
            _ => {
                for (r, j) in (of[0]..of[1]).flat_map(|r| (0..n).map(move |j| (r, j))) {
                    let at = |i: usize| matrix + if kind == Grouped::Forward { j * k + i } else { i * n + j };
                    set(r * n + j, &mut (0..k).map(|i| (a[r * k + i], b[at(i)])));
                }
            }
        }
    }
    reference::f64s(&c)
}

/// Widths that fit tiles and do not, matrices next to each other and apart; groups that fill tiles, end within one,
/// have one row or none, first and last included, and more groups than lanes of a warp; depths of several stages.
#[test]
fn grouped_gemm() {
    let many: Vec<usize> = (0..40).map(|e| [0, 3, 1, 0, 5][e % 5]).collect();
    let cases: [(usize, usize, usize, &[usize]); 9] = [
        (8, 16, 0, &[4]),
        (24, 40, 8, &[3, 0, 5, 1]),
        (136, 72, 0, &[130, 0, 1, 128]),
        (64, 8, 16, &[0, 65, 64, 63, 0]),
        (5, 7, 3, &[2, 0, 9]),
        (70, 33, 0, &[70, 1]),
        (8, 24, 0, &many),
        (16, 8, 0, &[0, 0, 0]),
        (8, 296, 0, &[3, 290]),
    ];
    for (n, k, gap, counts) in cases {
        let (groups, rows, stride) = (counts.len(), counts.iter().sum::<usize>(), n * k + gap);
        let offsets: Vec<usize> = (0..=groups).map(|e| counts[..e].iter().sum()).collect();
        let matrices = (groups - 1) * stride + n * k;
        for (kind, accumulate) in [Grouped::Forward, Grouped::Input, Grouped::Weight]
            .into_iter()
            .flat_map(|kind| [(kind, false), (kind, true)])
        {
            let (of_a, of_b, of_c) = match kind {
                Grouped::Weight => (rows * n, rows * k, matrices),
                _ => (rows * k, matrices, rows * n),
            };
            let (a, b, c) = (normal(19, of_a), normal(20, of_b), before(of_c));
            let size = [n, k, stride];
            let exact = grouped::<f64>(kind, size, &offsets, [&a, &b, &c], accumulate);
            let naive = grouped::<f32>(kind, size, &offsets, [&a, &b, &c], accumulate);
            for (dev, dtype) in every_device().iter().flat_map(|dev| FLOATS.map(|dtype| (dev, dtype))) {
                let label = format!("{kind:?} {counts:?} {size:?} {accumulate} on {} in {dtype}", dev.name());
                let to = if kind == Grouped::Weight { DType::F32 } else { dtype };
                let bounds = buf(&**dev, DType::U32, &floats(&offsets));
                let (a, b, mut c) = (buf(&**dev, dtype, &a), buf(&**dev, dtype, &b), buf(&**dev, to, &c));
                let mut run = |n: usize, offsets: &Buf, b: &Buf| {
                    let (offsets, a, b, c) = (offsets.view(), a.view(), b.view(), c.view_mut());
                    dev.grouped_gemm(GroupedGemm { kind, n, k, offsets, a, b, c, stride, accumulate, alike: true })
                };
                assert!(run(n + 1, &bounds, &b).is_err(), "{label}: another width");
                let narrow = buf(&**dev, DType::U8, &vec![0.0; b.len()]);
                assert!(rows == 0 || run(n, &bounds, &narrow).is_err(), "{label}: b as bytes");
                run(n, &bounds, &b).unwrap_or_else(|e| panic!("{label}: {e}"));
                let naive = read(&**dev, &buf(&**dev, to, &naive));
                compare(&label, GRADIENT, &read(&**dev, &c), &exact, &naive);
            }
        }
    }
}

/// What routing, gathering, multiplying and combining give for tokens with equal logits and experts of several tiles.
fn pipeline(dev: &dyn Device) -> Result<Vec<Vec<f64>>> {
    let (n, width, shape) = (150, 16, RouteShape { experts: 5, top_k: 2, normalize: true });
    let (rows, matrix, mut outputs) = (n * shape.top_k, width * width, vec![]);
    let logits: Vec<f64> = normal(21, n * shape.experts).iter().map(|x| x.round()).collect();
    let words = |len: usize| buf(dev, DType::U32, &vec![0.0; len]);
    let mut routing = vec![buf(dev, DType::F32, &logits), words(rows), buf(dev, DType::F32, &vec![0.0; rows])];
    routing.extend([words(shape.experts + 1), words(rows), words(rows)]);
    route_on(dev, shape, &mut routing)?;
    outputs.extend(routing.iter().map(|buf| read(dev, buf)));
    let [_, _, weights, offsets, order, places] = &routing[..] else { unreachable!() };
    for dtype in [DType::F32, DType::Bf16] {
        let of = |len: usize| buf(dev, dtype, &vec![0.0; len]);
        let (x, w) = (buf(dev, dtype, &normal(22, n * width)), buf(dev, dtype, &normal(23, shape.experts * matrix)));
        let (mut taken, mut out, mut y, mut dweights) =
            (of(rows * width), of(rows * width), of(n * width), buf(dev, DType::F32, &vec![0.0; rows]));
        let mut dw = buf(dev, DType::F32, &vec![0.0; shape.experts * matrix]);
        let top_k = shape.top_k;
        dev.take_rows(TakeRows { top_k, order: order.view(), x: x.view(), y: taken.view_mut() })?;
        for (kind, b, c) in [(Grouped::Forward, &w, &mut out), (Grouped::Weight, &taken, &mut dw)] {
            let (offsets, a, b, c) = (offsets.view(), taken.view(), b.view(), c.view_mut());
            let (n, k, stride) = (width, width, matrix);
            dev.grouped_gemm(GroupedGemm { kind, n, k, offsets, a, b, c, stride, accumulate: false, alike: true })?;
        }
        let (places, weights) = (Some(places.view()), weights.view());
        let (x, to, given) = (out.view(), y.view_mut(), Some(weights));
        dev.combine_rows(CombineRows { width, top_k, places, weights: given, x, y: to, accumulate: false })?;
        outputs.extend([&out, &dw, &y].map(|buf| read(dev, buf)));
        let (act, dact, order) = (taken.view_mut(), out.view_mut(), Some(order.view()));
        dev.weigh_rows(WeighRows { order, weights, act, dact, dweights: dweights.view_mut() })?;
        outputs.push(read(dev, &dweights));
    }
    Ok(outputs)
}

/// Each fault changes a result or is an error of the simulated GPU.
#[test]
fn planted_faults_show() {
    let device = |sim: Sim| GpuDevice::new(Arc::new(sim), Meter::default()).unwrap();
    let expected = [80, 90].map(|arch| pipeline(&device(Sim::new().of_arch(arch))).unwrap());
    let previous = "max.u32 %group, %group, 1; sub.u32 %group, %group, 1; cvt.u64.u32 %matrix, %group;";
    let faults = [
        ("of equal logits, the higher expert", "route", "not.b32", "mov.b32"),
        (
            "rows of an expert are not in the order of tokens",
            "route_sort",
            "sub.u32 %lower, %lower, 1;",
            "neg.s32 %lower, %lower;",
        ),
        ("the previous expert's matrix", "grouped_plain_forward_f32", "cvt.u64.u32 %matrix, %group;", previous),
        ("the previous expert's matrix", "grouped_tile_forward_bf16", "cvt.u64.u32 %matrix, %group;", previous),
        ("the previous expert's gradient", "grouped_tile_weight_bf16", "cvt.u64.u32 %matrix, %group;", previous),
        (
            "a row past the group is written",
            "grouped_plain_forward_f32",
            "setp.lt.u32 %in, %m, %m_end;",
            "setp.le.u32 %in, %m, %m_end;",
        ),
        (
            "a row past the group is written",
            "grouped_tile_forward_bf16",
            "setp.lt.u32 %in, %i, %m_end;",
            "setp.le.u32 %in, %i, %m_end;",
        ),
        (
            "a row past the group is added",
            "grouped_plain_weight_f32",
            "setp.lt.u32 %in, %d, %depth_end;",
            "setp.le.u32 %in, %d, %depth_end;",
        ),
        (
            "a row past the group is added",
            "grouped_tile_weight_bf16",
            "setp.lt.u32 %in, %d, %depth_end;",
            "setp.le.u32 %in, %d, %depth_end;",
        ),
        ("the previous expert's matrix", "grouped_hopper_forward_bf16", "cvt.u64.u32 %matrix, %group;", previous),
        ("the previous expert's gradient", "grouped_hopper_weight_bf16", "cvt.u64.u32 %matrix, %group;", previous),
        (
            "a row past the group is written",
            "grouped_hopper_forward_bf16",
            "setp.lt.u32 %in, %i, %m_end;",
            "setp.le.u32 %in, %i, %m_end;",
        ),
        (
            "a row past the group is added",
            "grouped_hopper_weight_bf16",
            "setp.lt.u32 %in, %d, %depth_end;",
            "setp.le.u32 %in, %d, %depth_end;",
        ),
        ("chunks that wgmma may not see", "grouped_hopper_forward_bf16", "fence.proxy.async.shared::cta;", ""),
        ("a stage that is still read", "grouped_hopper_weight_bf16", "wgmma.wait_group.sync.aligned 0;", ""),
        ("a stage on its way", "grouped_hopper_weight_bf16", "cp.async.wait_group 1;", "cp.async.wait_group 2;"),
        ("eight rows apart, not sixteen", "grouped_hopper_forward_bf16", "0x40000040", "0x40000080"),
        (
            "the other warpgroup's rows",
            "grouped_hopper_forward_bf16",
            "shr.u32 %own, %warp, 2;",
            "shr.u32 %own, %warp, 3;",
        ),
        ("rows are combined unsorted", "combine_rows_bf16", "@%mapped ld.global.u32 %place, [%from];", ""),
        ("weights of rows are unsorted", "weigh_rows_f32", "@%mapped ld.global.u32 %index, [%at];", ""),
        ("rows are taken unsorted", "take_rows_b16", "ld.global.u32 %index, [%at];", "mov.u32 %index, %row;"),
    ];
    for (what, name, from, to) in faults {
        let variant = Variant::by_name(name).unwrap();
        let one_space = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ") + "\n";
        let text: String = variant.expand().unwrap().lines().map(one_space).collect();
        let faulty = text.replace(from, to);
        assert_ne!(faulty, text, "{name} has no {from}");
        let hopper = name.contains("hopper");
        let sim = Sim::new().of_arch(if hopper { 90 } else { 80 });
        let got = pipeline(&device(sim.replace(name, variant.file, &faulty).unwrap()));
        assert!(got.is_err() || got.unwrap() != expected[usize::from(hopper)], "{name}: {what}");
    }
}
