//! Launches around the passes of ring attention: attention ranges, merging of passes, columns in and out of fused rows.
//! The passes themselves are in `attention.rs`. Never communicates.
use super::driver::{Arg, Kernel, LaunchShape};
use super::launch::{BLOCK, GpuDevice};
use crate::ops::{AttentionMerge, AttentionRanges, CopyColumns};
use flatshard_base::{DType, Error, Result};

/// Head rows that a CTA merges, one warp each.
const MERGED: u32 = 4;

pub fn ranges(gpu: &GpuDevice, op: AttentionRanges) -> Result<()> {
    const OP: &str = AttentionRanges::OP;
    op.check()?;
    let AttentionRanges { shape: a, cu_seqlens, q_rows, k_rows, of_queries, of_keys } = op;
    let number = |n: usize| Arg::U32(n.min(u32::MAX as usize) as u32);
    for (rows, columns, out, turned) in [(q_rows, k_rows, of_queries, 0), (k_rows, q_rows, of_keys, 1)] {
        let numbers = [cu_seqlens.len() - 1, rows.len(), columns.len(), a.window, turned].map(number);
        let [documents, n, m, window, turned] = numbers;
        let (cu, rows_, columns) = (Arg::In(cu_seqlens), Arg::In(rows), Arg::In(columns));
        let args = &mut [cu, rows_, columns, Arg::Out(out), documents, n, m, window, turned];
        gpu.launch(OP, OP, rows.len().div_ceil(BLOCK as usize), args)?;
    }
    Ok(())
}

pub fn merge(gpu: &GpuDevice, op: AttentionMerge) -> Result<()> {
    const OP: &str = AttentionMerge::OP;
    let (n, a) = (op.check()?, op.shape);
    let AttentionMerge { o_pass, lse_pass, o, lse, .. } = op;
    if n == 0 {
        return Ok(());
    }
    let [n, heads, dim] = [n, a.heads, a.head_dim].map(|n| n as u32);
    let shape = LaunchShape { grid: [n.div_ceil(MERGED), heads, 1], block: [32 * MERGED, 1, 1], shared: 0 };
    let numbers = [n, heads, dim].map(Arg::U32);
    let [n, heads, dim] = numbers;
    let args = &mut [Arg::In(o_pass), Arg::In(lse_pass), Arg::InOut(o), Arg::InOut(lse), n, heads, dim];
    gpu.driver.launch(Kernel { variant: OP, entry: OP }, shape, args)
}

pub fn copy_columns(gpu: &GpuDevice, op: CopyColumns) -> Result<()> {
    const OP: &str = CopyColumns::OP;
    op.check()?;
    let CopyColumns { rows, width, src_row, dst_row, src, dst } = op;
    let variant = match (src.dtype(), dst.dtype()) {
        (DType::F32, DType::F32) => "copy_columns_f32_f32",
        (DType::F32, DType::Bf16) => "copy_columns_f32_bf16",
        (DType::Bf16, DType::F32) => "copy_columns_bf16_f32",
        (DType::Bf16, DType::Bf16) => "copy_columns_bf16_bf16",
        (DType::F32, DType::F16) => "copy_columns_f32_f16",
        (DType::F16, DType::F32) => "copy_columns_f16_f32",
        (DType::F16, DType::F16) => "copy_columns_f16_f16",
        (from, to) => return Err(Error::op(OP, format!("cannot cast {from} to {to}"))),
    };
    let numbers = [rows, width, src_row, dst_row].map(|n| Arg::U32(n as u32));
    let [r, w, from, to] = numbers;
    let parts = (rows * width).div_ceil(BLOCK as usize);
    gpu.launch(variant, OP, parts, &mut [Arg::In(src), Arg::InOut(dst), r, w, from, to])
}
