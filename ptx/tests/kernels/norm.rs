//! RMSNorm by rows.
use crate::harness::*;
use flatshard_ptx::emulate::{Argument, Argument::*, Memory};

const EPS: f32 = 1e-5;

#[test]
fn rmsnorm() {
    for (dtype, name) in DTYPES {
        // Fewer columns than a vector, whole vectors, an odd one more, more than a CTA's first pass; more rows than CTAs.
        for (rows, columns) in [(1, 1), (5, 7), (3, 64), (4, 257), (7, 1000), (2, 2056), (3, 2049)] {
            let (x, w) = (normal(1, rows * columns), normal(2, columns));
            let got = agree(|schedule| {
                let mut memory = Memory::new();
                let inputs = [("x", &x), ("w", &w)].map(|(k, v)| Pointer(memory.upload(k, &encode(v, dtype))));
                let outputs = [memory.alloc("y", encode(&x, dtype).len()), memory.alloc("rstd", 4 * rows)];
                let shape = [U32(rows as u32), U32(columns as u32), Argument::F32(EPS)];
                let pointers = [inputs[0], inputs[1], Pointer(outputs[0]), Pointer(outputs[1])];
                let arguments: Vec<_> = pointers.into_iter().chain(shape).collect();
                program(&format!("rmsnorm_{name}")).run("rmsnorm", &mut memory, (3, 256), &arguments, schedule);
                outputs.map(|b| memory.download(b).unwrap().to_vec()).to_vec()
            });
            let (mut exact, mut naive) = ([vec![], vec![]], [vec![], vec![]]);
            for row in x.chunks(columns) {
                let mean = row.iter().map(|x| x * x).sum::<f64>() / columns as f64;
                let rstd = 1.0 / (mean + EPS as f64).sqrt();
                exact[0].extend(row.iter().zip(&w).map(|(x, w)| x * rstd * w));
                exact[1].push(rstd);
                let row = f32s(row);
                let mean = row.iter().map(|x| x * x).sum::<f32>() / columns as f32;
                let rstd = 1.0 / (mean + EPS).sqrt();
                naive[0].extend(row.iter().zip(&w).map(|(x, w)| (x * rstd * *w as f32) as f64));
                naive[1].push(rstd as f64);
            }
            let label = format!("rmsnorm {name} ({rows}, {columns})");
            compare(&format!("{label} y"), FORWARD, &got[0], dtype, &exact[0], &naive[0]);
            compare(&format!("{label} rstd"), FORWARD, &got[1], DType::F32, &exact[1], &naive[1]);
        }
    }
}
