//! 4-bit weights: every device expands them to the same bits. `tests/engine/packed.rs` compares the CPU's with
//! bitsandbytes'.
use super::harness::*;
use flatshard_base::nf4::Nf4Shape;
use flatshard_base::rng::Rng;
use flatshard_base::{Category, DType, Result};
use flatshard_device::ops::{Expand, Nf4Matrix};
use flatshard_device::{Buf, Device};
use std::ops::Range;

/// Every code and scale, in any order; factors and mean of ordinary size.
fn bytes(shape: &Nf4Shape) -> Vec<u8> {
    let rng = Rng::new(5, shape.len as u64);
    let mut bytes: Vec<u8> = (0..shape.bytes()).map(|i| (rng.u64(i as u64) >> 40) as u8).collect();
    bytes[shape.scales()].iter_mut().zip(0..).for_each(|(to, i)| *to = (i as u8).wrapping_mul(37));
    for (at, i) in (shape.factors().start..shape.bytes()).step_by(4).zip(1..) {
        bytes[at..at + 4].copy_from_slice(&(0.013 * i as f32).to_le_bytes());
    }
    bytes
}

fn alloc(dev: &dyn Device, bytes: &[u8]) -> Buf {
    let mut buf = dev.alloc(DType::U8, bytes.len(), Category::Other).unwrap();
    dev.upload(bytes, buf.view_mut()).unwrap();
    buf
}

#[test]
fn expand() {
    // Two groups; then half of the columns, and half of the rows, of a matrix of two groups on two ranks.
    let shapes = [
        (Nf4Shape::new(320 * 64), 64),
        (Nf4Shape { len: 160 * 64, run: 64, before: 64, stride: 128, whole: 160 * 128 }, 64),
        (Nf4Shape { len: 40 * 256, run: 40 * 256, before: 40 * 256, stride: 80 * 256, whole: 80 * 256 }, 256),
    ];
    for (shape, width) in shapes {
        let (bytes, rows) = (bytes(&shape), shape.len / width);
        let parts: [(Range<usize>, Range<usize>); 3] =
            [(0..rows, 0..width), (rows - 7..rows - 1, 6..width - 4), (3..3, 0..2)];
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for (rows, columns) in &parts {
                let mut expected: Option<Vec<u8>> = None;
                for dev in devices() {
                    let buf = alloc(&*dev, &bytes);
                    let run = |width: usize, len: usize| -> Result<Vec<u8>> {
                        let mut y = dev.alloc(dtype, len, Category::Other)?;
                        let from = Nf4Matrix { bytes: buf.view(), shape, width };
                        let (rows, columns) = (rows.clone(), columns.clone());
                        dev.expand(Expand { from, rows, columns, y: y.view_mut() })?;
                        let mut found = vec![0; y.bytes()];
                        dev.download(y.view(), &mut found)?;
                        Ok(found)
                    };
                    let len = rows.len() * columns.len();
                    let found = run(width, len).unwrap();
                    let same = *expected.get_or_insert_with(|| found.clone()) == found;
                    assert!(same, "{}: {dtype} rows {rows:?} columns {columns:?} of {shape:?}", dev.name());
                    assert!(run(width, len + 2).is_err() && run(2 * width, len).is_err() == (rows.end > 3));
                }
            }
        }
    }
}
