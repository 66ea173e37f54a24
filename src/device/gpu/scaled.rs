//! Products in FP8 by the driver's library: operands in the layouts that cuBLASLt takes. Always rounds as
//! [`crate::fp8`] does, which computes products that the library does not take: those are known only from the
//! number of tokens of a micro-batch, so the start cannot report them.
//!
//! From the cuBLAS documentation (13.x, "128-element 1D and 128x128 2D Block Scaling For FP8 Data Types" and
//! "cublasLtMatmul"): on sm_90, and since CUDA 12.9, both operands lie along k ("TN" by columns, A Bᵀ by rows). Scales
//! of rows (VEC128_32F) are contiguous along the rows: (k blocks, m). Those of blocks of 128 x 128 (BLK128x128_32F) are
//! contiguous along k, and rows of them start at multiples of 4. Scales and matrices are aligned to 16 bytes, and so
//! are their rows; m is a multiple of 4 there, but of 8 in Transformer Engine, which found that the library refuses the
//! others. The library's own message asks for n that are multiples of 16.
use super::driver::ScaledGemm;
use super::fp8::{quantize_apart, transpose};
use super::launch::GpuDevice;
use crate::ops::{Coded, CopyColumns, Epilogue, Fp8Gemm, Fp8Values, Fp8Weight, Fp8Work, GemmShape, Quantize};
use crate::{Device, View, ViewMut, epilogue, fp8};
use flatshard_base::Result;
use flatshard_base::fp8::BLOCK;

/// Elements of a side, and bytes of an address or a row.
const ALIGNED: usize = 16;
/// Rows of A.
const ROWS: usize = 8;

pub fn product(gpu: &GpuDevice, op: Fp8Gemm) -> Result<()> {
    op.check()?;
    if !gpu.driver.multiplies_fp8() || !takes(&op) {
        return fp8::in_bf16(gpu, op);
    }
    let (tokens, Fp8Gemm { shape, format, a: x, b, c, then, work }) = (op.tokens(), op);
    let Fp8Work { mut bytes, scales, rows, weight } = work;
    let (mut of_a, mut of_b) = scales.split_at(tokens.scales());
    let (mut codes, mut turned) = (rows.as_u8().slice(0..tokens.len()), weight.as_u8());
    let rounded = Quantize { shape: tokens, x, ld: shape.lda, bytes: codes.reborrow(), scales: of_a.reborrow() };
    quantize_apart(gpu, rounded, [1, shape.m])?;
    let a = Coded { bytes: codes.as_view(), scales: of_a.as_view() };
    let b = along_k(gpu, shape.tb, b, [&mut bytes, &mut of_b, &mut turned])?;
    let shape = GemmShape { tb: true, lda: shape.k, ldb: shape.k, ..shape };
    let op = ScaledGemm { shape, format, a, b, c, then: then.unwrap_or(Epilogue::NONE) };
    if gpu.driver.fuses_scaled(&op)? {
        return gpu.driver.scaled_gemm(op);
    }
    epilogue::after(gpu, op.c, op.then, |c| {
        gpu.driver.scaled_gemm(ScaledGemm { shape, format, a, b, c, then: Epilogue::NONE })
    })
}

/// Whether the library takes the operands.
fn takes(op: &Fp8Gemm) -> bool {
    let Fp8Gemm { shape, b, c, .. } = op;
    let codes = match &b.values {
        Fp8Values::Whole(_) => 0,
        Fp8Values::Coded(coded) => coded.bytes.address(),
    };
    let aligned = [shape.n, shape.k, codes, c.address(), shape.ldc * c.dtype().size()];
    shape.k > 0
        && shape.m > 0
        && shape.m.is_multiple_of(ROWS)
        && aligned.iter().all(|x| x.is_multiple_of(ALIGNED))
        // Otherwise its blocks are not those of the rows that are used.
        && b.rows.start.is_multiple_of(BLOCK)
}

/// The used rows of a weight as the library reads them: themselves, if a `row` lies along k, or their transpose. In the
/// given bytes, scales and bytes for a transpose, or where they are.
fn along_k<'a>(
    gpu: &GpuDevice,
    row: bool,
    b: Fp8Weight<'a>,
    [bytes, scales, turned]: [&'a mut ViewMut<'_>; 3],
) -> Result<Coded<'a>> {
    let Fp8Weight { shape, values, rows } = b;
    let ((part, blocks), (across, pitch)) = (shape.part(&rows), (shape.across(), shape.pitch()));
    let held = rows.start * shape.columns..rows.end * shape.columns;
    let quantize = |x: View, bytes: ViewMut, scales: ViewMut, pitch: usize| {
        let op = Quantize { shape, x, ld: shape.columns, bytes: bytes.slice(0..shape.len()), scales };
        quantize_apart(gpu, op, [pitch, 1])
    };
    if !row {
        let (mut to, mut from) = scales.reborrow().split_at(part.transposed().pitched());
        let coded = match values {
            Fp8Values::Coded(coded) => coded,
            Fp8Values::Whole(x) => {
                quantize(x, bytes.reborrow(), from.reborrow(), across)?;
                Coded { bytes: bytes.as_view().slice(0..shape.len()), scales: from.as_view() }
            }
        };
        let coded = Coded { bytes: coded.bytes.slice(held), scales: coded.scales.slice(blocks) };
        transpose(gpu, &part, coded, [turned.reborrow().slice(0..part.len()), to.reborrow()])?;
        let scales = scales.as_view().slice(0..part.transposed().pitched());
        return Ok(Coded { bytes: turned.as_view().slice(0..part.len()), scales });
    }
    match values {
        Fp8Values::Coded(coded) => {
            let (bytes, from) = (coded.bytes.slice(held), coded.scales.slice(blocks));
            if pitch == across && from.address().is_multiple_of(ALIGNED) {
                return Ok(Coded { bytes, scales: from });
            }
            let (bands, mut dst) = (from.len() / across, scales.reborrow().slice(0..part.pitched()));
            gpu.driver.zero(dst.reborrow())?;
            gpu.copy_columns(CopyColumns {
                rows: bands,
                width: across,
                src_row: across,
                dst_row: pitch,
                src: from,
                dst,
            })?;
            Ok(Coded { bytes, scales: scales.as_view().slice(0..part.pitched()) })
        }
        Fp8Values::Whole(x) => {
            if pitch > across {
                gpu.driver.zero(scales.reborrow().slice(0..shape.pitched()))?;
            }
            quantize(x, bytes.reborrow(), scales.reborrow(), pitch)?;
            let first = rows.start / BLOCK * pitch;
            let scales = scales.as_view().slice(first..first + part.pitched());
            Ok(Coded { bytes: bytes.as_view().slice(held), scales })
        }
    }
}
