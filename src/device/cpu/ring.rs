//! The passes of ring attention (Liu et al. 2023): local queries over one block of keys and values, partial results in
//! f32, and their merge. Never communicates, and never asks where a block comes from: rows of the packed batch say who
//! sees whom.
//!
//! Queries and keys rise, so a query sees one range of the block's keys. Tiles of [`SIDE`] queries walk over the keys
//! that any of them sees, tiles of keys over the queries that see any of them; the arithmetic is that of
//! `attention.rs`.
use super::attention::{AttentionScratch, SIDE, load, load_transposed, online_softmax, slope};
use super::simd::Level;
use super::tile::{COLUMNS, ProductPart, Tile, TileProduct};
use crate::base::{Error, Result, dtype::Float};
use crate::device::ops::{AttentionMerge, AttentionPass, AttentionPassBackward, AttentionRanges, CopyColumns};
use std::ops::Range;

/// Rows of the packed batch, once they are known to rise within the documents.
fn check_rows(name: &str, rows: &[u32], cu_seqlens: &[u32]) -> Result<()> {
    let end = cu_seqlens.last().copied().unwrap_or(0);
    if rows.is_sorted_by(|a, b| a < b) && rows.last().is_none_or(|&last| last < end) {
        return Ok(());
    }
    Err(Error::op("attention_ranges", format!("{name} do not rise below {end}, the end of the last document")))
}

pub fn ranges(op: AttentionRanges) -> Result<()> {
    const OP: &str = AttentionRanges::OP;
    op.check()?;
    let (a, cu_seqlens) = (&op.shape, op.cu_seqlens.host::<u32>(OP)?);
    let (q_rows, k_rows) = (op.q_rows.host::<u32>(OP)?, op.k_rows.host::<u32>(OP)?);
    let (of_queries, of_keys) = (op.of_queries.host::<u32>(OP)?, op.of_keys.host::<u32>(OP)?);
    if cu_seqlens.first() != Some(&0) || !cu_seqlens.is_sorted() {
        return Err(Error::op("attention_ranges", format!("cu_seqlens {cu_seqlens:?} does not rise from 0")));
    }
    check_rows("q_rows", q_rows, cu_seqlens)?;
    check_rows("k_rows", k_rows, cu_seqlens)?;
    let window = if a.window == 0 { u32::MAX } else { a.window.min(u32::MAX as usize) as u32 };
    // The end of a row's document is the first boundary behind the row.
    let document = |row: u32| cu_seqlens.partition_point(|&c| c <= row);
    let within = |columns: &[u32], seen: Range<u32>| {
        [seen.start, seen.end].map(|end| columns.partition_point(|&c| c < end) as u32)
    };
    for (&row, range) in q_rows.iter().zip(of_queries.as_chunks_mut::<2>().0) {
        let start = cu_seqlens[document(row) - 1].max((row + 1).saturating_sub(window));
        *range = within(k_rows, start..row + 1);
    }
    for (&row, range) in k_rows.iter().zip(of_keys.as_chunks_mut::<2>().0) {
        *range = within(q_rows, row..cu_seqlens[document(row)].min(row.saturating_add(window)));
    }
    Ok(())
}

/// Columns that any of these rows sees, if they are within `limit`.
fn seen(ranges: &[[u32; 2]], limit: usize) -> Range<usize> {
    match (ranges.first(), ranges.last()) {
        (Some(first), Some(last)) => first[0] as usize..(last[1] as usize).min(limit),
        _ => 0..0,
    }
}
/// Of a row's range, what lies in the tile of columns from `at` on.
fn visible(range: [u32; 2], at: usize) -> Range<usize> {
    let [start, end] = range.map(|column| (column as usize).saturating_sub(at).min(SIDE));
    start..end
}

#[inline(always)]
pub fn forward<T: Float>(level: Level, scratch: &mut AttentionScratch, op: AttentionPass) -> Result<()> {
    const OP: &str = AttentionPass::OP;
    let ((n, keys_n), a) = (op.check()?, &op.shape);
    let (qkv, kv) = (op.qkv.host::<T>(OP)?, op.kv.host::<T>(OP)?);
    let (o, lse) = (op.o.host::<f32>(OP)?, op.lse.host::<f32>(OP)?);
    let of_queries = op.of_queries.host::<u32>(OP)?.as_chunks::<2>().0;
    let (dim, group, row, kv_row) = (a.head_dim, a.heads / a.kv_heads, a.row(), a.kv_row());
    let (width, o_row, value) = (dim.next_multiple_of(COLUMNS), a.heads * dim, a.kv_heads * dim);
    let [query, keys, values, scores, out, max, total] =
        scratch.take([SIDE * width, SIDE * dim, SIDE * width, SIDE * SIDE, SIDE * width, SIDE, SIDE]);
    for head in 0..a.heads {
        let key = head / group * dim;
        for q0 in (0..n).step_by(SIDE) {
            let q_rows = SIDE.min(n - q0);
            let ranges = &of_queries[q0..][..q_rows];
            load(&qkv[q0 * row + head * dim..], row, q_rows, dim, query, width);
            max.fill(f32::MIN);
            total.fill(0.0);
            out.fill(0.0);
            let all = seen(ranges, keys_n);
            for k0 in all.clone().step_by(SIDE) {
                let k_rows = SIDE.min(all.end - k0);
                load_transposed(&kv[k0 * kv_row + key..], kv_row, k_rows, dim, keys);
                load(&kv[k0 * kv_row + key + value..], kv_row, k_rows, dim, values, width);
                let assign = TileProduct::new(level, [q_rows, k_rows, dim], ProductPart::All, false);
                assign.run(Tile::new(query, width), Tile::new(keys, SIDE), scores, SIDE);
                for (i, row) in scores.as_chunks_mut::<SIDE>().0.iter_mut().take(q_rows).enumerate() {
                    let factor;
                    (max[i], total[i], factor) = online_softmax(row, visible(ranges[i], k0), a, (max[i], total[i]));
                    out[i * width..][..width].iter_mut().for_each(|x| *x *= factor);
                }
                let add = TileProduct::new(level, [q_rows, dim, k_rows], ProductPart::All, true);
                add.run(Tile::new(scores, SIDE), Tile::new(values, width), out, width);
            }
            for i in 0..q_rows {
                let nothing = total[i] == 0.0;
                let share = if nothing { 0.0 } else { 1.0 / total[i] };
                lse[head * n + q0 + i] = if nothing { f32::NEG_INFINITY } else { max[i] + total[i].ln() };
                let o = &mut o[(q0 + i) * o_row + head * dim..][..dim];
                o.iter_mut().zip(&out[i * width..]).for_each(|(o, x)| *o = x * share);
            }
        }
    }
    Ok(())
}

#[inline(always)]
pub fn merge(op: AttentionMerge) -> Result<()> {
    const OP: &str = AttentionMerge::OP;
    let (n, a) = (op.check()?, &op.shape);
    let (o_pass, lse_pass) = (op.o_pass.host::<f32>(OP)?, op.lse_pass.host::<f32>(OP)?);
    let (o, lse) = (op.o.host::<f32>(OP)?, op.lse.host::<f32>(OP)?);
    let o_row = a.width();
    for head in 0..a.heads {
        for i in 0..n {
            let (new, old) = (lse_pass[head * n + i], lse[head * n + i]);
            if new == f32::NEG_INFINITY {
                continue;
            }
            let max = if new > old { new } else { old };
            let (w_new, w_old) = ((new - max).exp(), (old - max).exp());
            let share = 1.0 / (w_new + w_old);
            lse[head * n + i] = max + (w_new + w_old).ln();
            let at = i * o_row + head * a.head_dim;
            for (o, x) in o[at..][..a.head_dim].iter_mut().zip(&o_pass[at..]) {
                *o = *o * (w_old * share) + x * (w_new * share);
            }
        }
    }
    Ok(())
}

/// `dst[r][c] += tile[r][c]`.
#[inline(always)]
fn add(tile: &[f32], width: usize, dst: &mut [f32], row: usize, rows: usize, dim: usize) {
    for (tile, dst) in tile.chunks_exact(width).zip(dst.chunks_mut(row)).take(rows) {
        tile.iter().zip(&mut dst[..dim]).for_each(|(x, sum)| *sum += x);
    }
}

#[inline(always)]
pub fn backward<T: Float>(level: Level, scratch: &mut AttentionScratch, op: AttentionPassBackward) -> Result<()> {
    const OP: &str = AttentionPassBackward::OP;
    let ((n, keys_n), a) = (op.check()?, &op.shape);
    let (qkv, kv, d_o) = (op.qkv.host::<T>(OP)?, op.kv.host::<T>(OP)?, op.d_o.host::<T>(OP)?);
    let (lse, delta) = (op.lse.host::<f32>(OP)?, op.delta.host::<f32>(OP)?);
    let (dq, dkv) = (op.dq.host::<f32>(OP)?, op.dkv.host::<f32>(OP)?);
    let [of_queries, of_keys] = [op.of_queries.host::<u32>(OP)?, op.of_keys.host::<u32>(OP)?];
    let (dim, group, row, kv_row) = (a.head_dim, a.heads / a.kv_heads, a.row(), a.kv_row());
    let (width, o_row, value) = (dim.next_multiple_of(COLUMNS), a.heads * dim, a.kv_heads * dim);
    let (of_queries, of_keys) = (of_queries.as_chunks::<2>().0, of_keys.as_chunks::<2>().0);
    let (tile, across) = (SIDE * width, SIDE * dim);
    let [query, d_out, key, keys, values, dk, dv, back, weights, slopes] =
        scratch.take([tile, tile, tile, across, across, tile, tile, tile, SIDE * SIDE, SIDE * SIDE]);
    for kv_head in 0..a.kv_heads {
        for k0 in (0..keys_n).step_by(SIDE) {
            let k_rows = SIDE.min(keys_n - k0);
            let at = k0 * kv_row + kv_head * dim;
            load(&kv[at..], kv_row, k_rows, dim, key, width);
            load_transposed(&kv[at..], kv_row, k_rows, dim, keys);
            load_transposed(&kv[at + value..], kv_row, k_rows, dim, values);
            dk.fill(0.0);
            dv.fill(0.0);
            let all = seen(&of_keys[k0..][..k_rows], n);
            for head in kv_head * group..(kv_head + 1) * group {
                for q0 in all.clone().step_by(SIDE) {
                    let q_rows = SIDE.min(all.end - q0);
                    load(&qkv[q0 * row + head * dim..], row, q_rows, dim, query, width);
                    load(&d_o[q0 * o_row + head * dim..], o_row, q_rows, dim, d_out, width);
                    let across = TileProduct::new(level, [q_rows, k_rows, dim], ProductPart::All, false);
                    across.run(Tile::new(query, width), Tile::new(keys, SIDE), weights, SIDE);
                    across.run(Tile::new(d_out, width), Tile::new(values, SIDE), slopes, SIDE);
                    let (weight_rows, slope_rows) = (weights.as_chunks_mut().0, slopes.as_chunks_mut().0);
                    for (i, (p, ds)) in weight_rows.iter_mut().zip(slope_rows).take(q_rows).enumerate() {
                        let at = head * n + q0 + i;
                        slope(p, ds, visible(of_queries[q0 + i], k0), a, lse[at], delta[at]);
                    }
                    let down = TileProduct::new(level, [k_rows, dim, q_rows], ProductPart::All, true);
                    down.run(Tile::transposed(weights, SIDE), Tile::new(d_out, width), dv, width);
                    down.run(Tile::transposed(slopes, SIDE), Tile::new(query, width), dk, width);
                    let assign = TileProduct::new(level, [q_rows, dim, k_rows], ProductPart::All, false);
                    assign.run(Tile::new(slopes, SIDE), Tile::new(key, width), back, width);
                    add(back, width, &mut dq[q0 * o_row + head * dim..], o_row, q_rows, dim);
                }
            }
            add(dk, width, &mut dkv[at..], kv_row, k_rows, dim);
            add(dv, width, &mut dkv[at + value..], kv_row, k_rows, dim);
        }
    }
    Ok(())
}

#[inline(always)]
pub fn copy_columns<S: Float, D: Float>(op: CopyColumns) -> Result<()> {
    const OP: &str = CopyColumns::OP;
    op.check()?;
    let CopyColumns { rows, width, src_row, dst_row, src, dst } = op;
    let (src, dst) = (src.host::<S>(OP)?, dst.host::<D>(OP)?);
    for r in 0..rows {
        let (src, dst) = (&src[r * src_row..][..width], &mut dst[r * dst_row..][..width]);
        dst.iter_mut().zip(src).for_each(|(d, s)| *d = D::from_f32(s.to_f32()));
    }
    Ok(())
}
