//! The passes of ring attention: merged passes over all blocks equal unsharded attention, for any distribution of rows.
use super::harness::*;
use crate::common::reference::{self, Heads};
use flatshard_base::{Category, DType, Result};
use flatshard_device::ops::{
    AttentionDelta, AttentionMerge, AttentionPass, AttentionPassBackward, AttentionRanges, AttentionShape, BackwardOf,
    CopyColumns,
};
use flatshard_device::{Buf, Device, View, ViewMut};
use std::ops::Range;

/// Rows of each rank, as runs.
type Cut = Vec<Vec<Range<usize>>>;

/// Chunks r and 2 world - 1 - r of each sequence: every rank has the same work under a causal mask.
fn zigzag(cu: &[u32], world: usize) -> Cut {
    let chunk = |doc: &[u32], c: usize| {
        let (start, len) = (doc[0] as usize, (doc[1] - doc[0]) as usize);
        start + len * c / (2 * world)..start + len * (c + 1) / (2 * world)
    };
    (0..world).map(|r| cu.windows(2).flat_map(|doc| [chunk(doc, r), chunk(doc, 2 * world - 1 - r)]).collect()).collect()
}
/// The same number of rows on each rank, wherever documents end.
fn contiguous(cu: &[u32], world: usize) -> Cut {
    let n = *cu.last().unwrap() as usize;
    (0..world).map(|r| std::iter::once(n * r / world..n * (r + 1) / world).collect()).collect()
}
/// The last row alone on the last rank, as when a token is generated.
fn last_alone(cu: &[u32], world: usize) -> Cut {
    let last = cu.last().unwrap() - 1;
    let mut cut = contiguous(&[last], world.max(2) - 1);
    cut.push(std::iter::once(last as usize..last as usize + 1).collect());
    cut
}

fn count(runs: &[Range<usize>]) -> usize {
    runs.iter().map(Range::len).sum()
}
/// Rows of `width` elements, gathered from the whole and scattered back.
fn gather(dev: &dyn Device, whole: &Buf, runs: &[Range<usize>], width: usize) -> Result<Buf> {
    let mut part = dev.alloc(whole.dtype(), count(runs) * width, Category::Other)?;
    let mut at = 0;
    for run in runs {
        let to = part.view_mut().slice(at * width..(at + run.len()) * width);
        dev.copy(whole.view().slice(run.start * width..run.end * width), to)?;
        at += run.len();
    }
    Ok(part)
}
fn scatter(
    dev: &dyn Device,
    part: &Buf,
    at: usize,
    whole: &mut Buf,
    runs: &[Range<usize>],
    width: usize,
) -> Result<()> {
    let mut from = at;
    for run in runs {
        let to = whole.view_mut().slice(run.start * width..run.end * width);
        dev.copy(part.view().slice(from * width..(from + run.len()) * width), to)?;
        from += run.len();
    }
    Ok(())
}

struct Rank {
    runs: Vec<Range<usize>>,
    rows: Buf,
    qkv: Buf,
    kv: Buf,
}

struct Case<'a> {
    dev: &'a dyn Device,
    a: AttentionShape,
    cu: Buf,
    n: usize,
    ranks: Vec<Rank>,
}

impl Case<'_> {
    fn new<'a>(dev: &'a dyn Device, a: AttentionShape, cu: &[u32], qkv: &Buf, cut: Cut) -> Result<Case<'a>> {
        let as_f64 = |x: Vec<u32>| x.into_iter().map(f64::from).collect::<Vec<f64>>();
        let rank = |runs: Vec<Range<usize>>| {
            let rows = as_f64(runs.iter().flat_map(|run| run.clone().map(|row| row as u32)).collect());
            let qkv = gather(dev, qkv, &runs, a.row())?;
            let mut kv = dev.alloc(qkv.dtype(), rows.len() * a.kv_row(), Category::Other)?;
            dev.copy_columns(CopyColumns {
                rows: rows.len(),
                width: a.kv_row(),
                src_row: a.row(),
                dst_row: a.kv_row(),
                src: qkv.view().slice(a.width().min(qkv.len())..qkv.len()),
                dst: kv.view_mut(),
            })?;
            Ok(Rank { runs, rows: buf(dev, DType::U32, &rows), qkv, kv })
        };
        let n = *cu.last().unwrap() as usize;
        let ranks = cut.into_iter().map(rank).collect::<Result<_>>()?;
        Ok(Case { dev, a, cu: buf(dev, DType::U32, &as_f64(cu.to_vec())), n, ranks })
    }
    fn f32s(&self, len: usize) -> Result<Buf> {
        self.dev.alloc(DType::F32, len, Category::Other)
    }
    fn ranges(&self, queries: &Rank, keys: &Rank) -> Result<[Buf; 2]> {
        let alloc = |rank: &Rank| self.dev.alloc(DType::U32, 2 * rank.rows.len(), Category::Other);
        let [mut of_queries, mut of_keys] = [alloc(queries)?, alloc(keys)?];
        let rows = [queries.rows.view(), keys.rows.view()];
        let (q, k) = (of_queries.view_mut(), of_keys.view_mut());
        self.dev.attention_ranges(AttentionRanges {
            shape: self.a,
            cu_seqlens: self.cu.view(),
            q_rows: rows[0],
            k_rows: rows[1],
            of_queries: q,
            of_keys: k,
        })?;
        Ok([of_queries, of_keys])
    }
    /// `o` and `lse` of the whole batch, each rank separately over the blocks of all ranks, its own first.
    fn forward(&self, o: &mut Buf, lse: &mut Buf) -> Result<()> {
        let (width, world) = (self.a.heads * self.a.head_dim, self.ranks.len());
        for (r, rank) in self.ranks.iter().enumerate() {
            let n = rank.rows.len();
            let (mut out, mut sums) = (self.f32s(n * width)?, self.f32s(self.a.heads * n)?);
            let (mut pass, mut pass_sums) = (self.f32s(n * width)?, self.f32s(self.a.heads * n)?);
            for hop in 0..world {
                let block = &self.ranks[(r + hop) % world];
                let [of_queries, _] = self.ranges(rank, block)?;
                let given = [of_queries.view(), rank.qkv.view(), block.kv.view()];
                if hop == 0 {
                    self.dev.attention_pass(AttentionPass {
                        shape: self.a,
                        of_queries: given[0],
                        qkv: given[1],
                        kv: given[2],
                        o: out.view_mut(),
                        lse: sums.view_mut(),
                    })?;
                    continue;
                }
                let (o, lse) = (pass.view_mut(), pass_sums.view_mut());
                self.dev.attention_pass(AttentionPass {
                    shape: self.a,
                    of_queries: given[0],
                    qkv: given[1],
                    kv: given[2],
                    o,
                    lse,
                })?;
                let passed = [pass.view(), pass_sums.view()];
                self.dev.attention_merge(AttentionMerge {
                    shape: self.a,
                    o_pass: passed[0],
                    lse_pass: passed[1],
                    o: out.view_mut(),
                    lse: sums.view_mut(),
                })?;
            }
            let mut rounded = self.dev.alloc(o.dtype(), n * width, Category::Other)?;
            self.dev.copy(out.view(), rounded.view_mut())?;
            scatter(self.dev, &rounded, 0, o, &rank.runs, width)?;
            for head in 0..self.a.heads {
                let runs: Vec<_> = rank.runs.iter().map(|r| head * self.n + r.start..head * self.n + r.end).collect();
                scatter(self.dev, &sums, head * n, lse, &runs, 1)?;
            }
        }
        Ok(())
    }
    fn backward(&self, o: &Buf, lse: &Buf, d_o: &Buf, dqkv: &mut Buf) -> Result<()> {
        let (a, width) = (&self.a, self.a.heads * self.a.head_dim);
        // Each block's gradient accumulates over the ranks, as on its way through the ring.
        let mut d_blocks = self.ranks.iter().map(|b| self.f32s(b.kv.len())).collect::<Result<Vec<_>>>()?;
        let mut d_queries = vec![];
        for rank in &self.ranks {
            let n = rank.rows.len();
            let (o, d_o) = (gather(self.dev, o, &rank.runs, width)?, gather(self.dev, d_o, &rank.runs, width)?);
            let heads = 0..a.heads;
            let runs = heads.flat_map(|h| rank.runs.iter().map(move |r| h * self.n + r.start..h * self.n + r.end));
            let lse = gather(self.dev, lse, &runs.collect::<Vec<_>>(), 1)?;
            let mut delta = self.f32s(a.heads * n)?;
            let mut sums = self.f32s(self.dev.backward_scratch(&BackwardOf::Attention(*a), rank.qkv.dtype(), n))?;
            self.dev.attention_delta(AttentionDelta {
                shape: *a,
                o: o.view(),
                d_o: d_o.view(),
                lse: lse.view(),
                delta: delta.view_mut(),
                sums: sums.view_mut(),
            })?;
            let mut dq = self.f32s(n * width)?;
            for (block, dkv) in self.ranks.iter().zip(&mut d_blocks) {
                let [of_queries, of_keys] = self.ranges(rank, block)?;
                self.dev.attention_pass_backward(AttentionPassBackward {
                    shape: *a,
                    of_queries: of_queries.view(),
                    of_keys: of_keys.view(),
                    qkv: rank.qkv.view(),
                    kv: block.kv.view(),
                    lse: lse.view(),
                    delta: delta.view(),
                    d_o: d_o.view(),
                    sums: sums.view_mut(),
                    dq: dq.view_mut(),
                    dkv: dkv.view_mut(),
                })?;
            }
            d_queries.push(dq);
        }
        for ((rank, dq), dkv) in self.ranks.iter().zip(&d_queries).zip(&d_blocks) {
            let rows = rank.rows.len();
            let mut local = self.dev.alloc(dqkv.dtype(), rows * a.row(), Category::Other)?;
            let columns = |width, src: &Buf, dst: ViewMut| {
                let op = CopyColumns { rows, width, src_row: width, dst_row: a.row(), src: src.view(), dst };
                self.dev.copy_columns(op)
            };
            columns(width, dq, local.view_mut())?;
            let len = local.len();
            columns(a.kv_row(), dkv, local.view_mut().slice(width.min(len)..len))?;
            scatter(self.dev, &local, 0, dqkv, &rank.runs, a.row())?;
        }
        Ok(())
    }
}

/// Heads, document lengths, and how the rows are distributed over this number of ranks.
type Shape = (Heads, Vec<u32>, fn(&[u32], usize) -> Cut);
fn shapes() -> Vec<Shape> {
    let heads = |q, kv, d| Heads { q, kv, d, scale: 1.0 / (d as f64).sqrt() as f32 as f64, window: 0, cap: 0.0 };
    vec![
        (heads(2, 1, 24), vec![0, 64, 128], zigzag),
        (Heads { window: 20, ..heads(1, 1, 16) }, vec![0, 96], zigzag),
        (heads(2, 2, 5), vec![0, 10, 37, 90, 90, 131], contiguous),
        (Heads { window: 9, cap: 0.8, ..heads(4, 2, 8) }, vec![0, 1, 60, 70], contiguous),
        (heads(4, 2, 24), vec![0, 150], last_alone),
        (Heads { window: 40, cap: 0.8, ..heads(6, 2, 64) }, vec![0, 30, 100], last_alone),
        // Fewer rows than ranks: some have none.
        (heads(1, 1, 8), vec![0, 3], contiguous),
    ]
}

fn check(a: Heads, cu: &[u32], cut: fn(&[u32], usize) -> Cut) {
    let n = *cu.last().unwrap() as usize;
    let shape = AttentionShape {
        heads: a.q,
        kv_heads: a.kv,
        head_dim: a.d,
        scale: a.scale as f32,
        window: a.window,
        softcap: a.cap as f32,
    };
    let (qkv, d_o) = (normal(5, n * a.row()), normal(6, n * a.q * a.d));
    let (exact, naive) = (reference::attention::<f64>(a, cu, &qkv), reference::attention::<f32>(a, cu, &qkv));
    let o: Vec<f64> = exact[0].iter().map(|&o| rounded(o)).collect();
    let lse: Vec<f64> = exact[1].iter().map(|&l| l as f32 as f64).collect();
    let given = [&qkv[..], &o, &lse, &d_o];
    let d_exact = reference::attention_backward::<f64>(a, cu, given);
    let d_naive = reference::attention_backward::<f32>(a, cu, given);
    for compute in FLOATS {
        for dev in every_device().iter().filter(|dev| computes(&***dev, compute, qkv.len())) {
            let dev = &**dev;
            // The passes of one rank are among those of two.
            for world in if computes_all(dev) { &[1, 2, 4][..] } else { &[2, 4] }.iter().copied() {
                let label = format!("ring of {world} on {} in {compute}, {a:?} {cu:?}", dev.name());
                let whole = buf(dev, compute, &qkv);
                let case = Case::new(dev, shape, cu, &whole, cut(cu, world)).unwrap();
                let (mut out, mut sums) =
                    (buf(dev, compute, &before(o.len())), buf(dev, DType::F32, &before(lse.len())));
                case.forward(&mut out, &mut sums).unwrap_or_else(|e| panic!("{label}: {e}"));
                let rounded = |dtype, values: &[f64]| read(dev, &buf(dev, dtype, values));
                compare(&label, FORWARD, &read(dev, &out), &exact[0], &rounded(compute, &naive[0]));
                compare(&label, FORWARD, &read(dev, &sums), &exact[1], &rounded(DType::F32, &naive[1]));
                let mut dqkv = buf(dev, compute, &before(qkv.len()));
                let (o, lse, d_o) = (buf(dev, compute, &o), buf(dev, DType::F32, &lse), buf(dev, compute, &d_o));
                case.backward(&o, &lse, &d_o, &mut dqkv).unwrap_or_else(|e| panic!("{label}: {e}"));
                compare(&label, GRADIENT, &read(dev, &dqkv), &d_exact[0], &rounded(compute, &d_naive[0]));
            }
        }
    }
}

#[test]
fn merged_passes_are_attention() {
    shapes().into_iter().for_each(|(a, cu, cut)| check(a, &cu, cut));
}

/// Weights of exp(+-1000) neither overflow nor vanish; rows that attend to nothing have no weight, on either side.
#[test]
fn merge_without_overflow() {
    let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 1, scale: 1.0, window: 0, softcap: 0.0 };
    let inf = f64::NEG_INFINITY;
    for dev in every_device() {
        let f32s = |values: &[f64]| buf(&*dev, DType::F32, values);
        let (o_pass, lse_pass) = (f32s(&[1.0, 2.0, 3.0, 0.0, 0.0]), f32s(&[1000.0, -1000.0, 7.0, inf, inf]));
        let (mut o, mut lse) = (f32s(&[5.0, 6.0, 0.0, 4.0, 0.0]), f32s(&[1000.0, -2000.0, inf, 2.0, inf]));
        dev.attention_merge(AttentionMerge {
            shape,
            o_pass: o_pass.view(),
            lse_pass: lse_pass.view(),
            o: o.view_mut(),
            lse: lse.view_mut(),
        })
        .unwrap();
        let (o, lse) = (read(&*dev, &o), read(&*dev, &lse));
        assert_eq!((&o[1..], &lse[1..]), (&[2.0, 3.0, 4.0, 0.0][..], &[-1000.0, 7.0, 2.0, inf][..]), "{}", dev.name());
        assert!((o[0] - 3.0).abs() < 1e-6 && (lse[0] - 1000.0 - 2f64.ln()).abs() < 1e-4, "{}", dev.name());
    }
}

#[test]
fn ranges_cover_what_rows_attend_to() {
    let cu = [0u32, 4, 4, 11, 20];
    let (q_rows, k_rows) = ([1u32, 2, 5, 9, 10, 13, 19], [0u32, 3, 4, 8, 9, 12, 14]);
    for window in [0, 1, 3] {
        let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 1, scale: 1.0, window, softcap: 0.0 };
        let sees = |q: u32, k: u32| {
            let start = cu.iter().rfind(|&&c| c <= q).unwrap();
            k <= q && k >= *start && (window == 0 || q - k < window as u32)
        };
        for dev in every_device() {
            let u32s = |values: &[u32]| buf(&*dev, DType::U32, &values.iter().map(|&v| v.into()).collect::<Vec<f64>>());
            let (mut of_queries, mut of_keys) = (u32s(&[77; 14]), u32s(&[77; 14]));
            let (cu, q, k) = (u32s(&cu), u32s(&q_rows), u32s(&k_rows));
            let (to_q, to_k) = (of_queries.view_mut(), of_keys.view_mut());
            dev.attention_ranges(AttentionRanges {
                shape,
                cu_seqlens: cu.view(),
                q_rows: q.view(),
                k_rows: k.view(),
                of_queries: to_q,
                of_keys: to_k,
            })
            .unwrap();
            let (of_queries, of_keys) = (read(&*dev, &of_queries), read(&*dev, &of_keys));
            for (i, &q) in q_rows.iter().enumerate() {
                for (j, &k) in k_rows.iter().enumerate() {
                    let within = |range: &[f64], at: usize| (range[0] as usize..range[1] as usize).contains(&at);
                    let label = format!("query {q}, key {k}, window {window} on {}", dev.name());
                    assert_eq!(within(&of_queries[2 * i..], j), sees(q, k), "{label}");
                    assert_eq!(within(&of_keys[2 * j..], i), sees(q, k), "{label}");
                }
            }
            for of in [&of_queries, &of_keys] {
                let ends = |at: usize| of.iter().skip(at).step_by(2).copied().collect::<Vec<f64>>();
                assert!(ends(0).is_sorted() && ends(1).is_sorted(), "ranges rise: {of:?}");
            }
        }
    }
}

#[test]
fn ranges_refuse_rows_that_do_not_ascend_within_documents() {
    let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 1, scale: 1.0, window: 0, softcap: 0.0 };
    for dev in devices().into_iter().filter(|dev| is_cpu(&**dev)) {
        let u32s = |values: &[f64]| buf(&*dev, DType::U32, values);
        for (cu, q) in [([0.0, 4.0], [1.0, 1.0]), ([0.0, 4.0], [2.0, 4.0]), ([1.0, 4.0], [1.0, 2.0])] {
            let (mut of_queries, mut of_keys, cu, q) = (u32s(&[0.0; 4]), u32s(&[0.0; 4]), u32s(&cu), u32s(&q));
            let (to_q, to_k, k) = (of_queries.view_mut(), of_keys.view_mut(), u32s(&[0.0, 1.0]));
            let said = dev
                .attention_ranges(AttentionRanges {
                    shape,
                    cu_seqlens: cu.view(),
                    q_rows: q.view(),
                    k_rows: k.view(),
                    of_queries: to_q,
                    of_keys: to_k,
                })
                .unwrap_err()
                .to_string();
            assert!(said.contains("increase"), "{said}");
        }
    }
}

#[test]
fn only_selected_columns_are_copied() {
    for dev in every_device() {
        for (from, to) in [
            (DType::F32, DType::Bf16),
            (DType::Bf16, DType::F32),
            (DType::F16, DType::F16),
            (DType::F16, DType::F32),
            (DType::F32, DType::F16),
            (DType::Bf16, DType::Bf16),
        ] {
            let src = buf(&*dev, from, &(0..12).map(f64::from).collect::<Vec<_>>());
            let mut dst = buf(&*dev, to, &[-1.0; 9]);
            let copy = |src: View, dst: ViewMut| {
                dev.copy_columns(CopyColumns { rows: 3, width: 2, src_row: 4, dst_row: 3, src, dst })
            };
            copy(src.view().slice(1..12), dst.view_mut().slice(1..9)).unwrap();
            assert_eq!(read(&*dev, &dst), [-1.0, 1.0, 2.0, -1.0, 5.0, 6.0, -1.0, 9.0, 10.0], "{}", dev.name());
            let said = copy(src.view().slice(3..12), dst.view_mut()).unwrap_err().to_string();
            assert!(said.contains("cannot hold"), "{said}");
        }
    }
}
