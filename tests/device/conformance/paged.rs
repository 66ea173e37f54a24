//! Attention over pages: rows of several sequences at once have, on the CPU, the bits that attention over their whole
//! documents gives, and its values on every other device, whatever the heads, the window and the place of the pages.
//! Their keys and values are stored first.
use super::harness::*;
use flatshard_base::{DType, Meter};
use flatshard_device::Device;
use flatshard_device::cpu::CpuDevice;
use flatshard_device::ops::{
    Attention, AttentionPaged, AttentionShape, PAGE, PagedRows, documents_of_rows, paged_table,
};

/// Output and log-sums of each row of a document.
fn whole(dev: &dyn Device, dtype: DType, shape: AttentionShape, qkv: &[f64], n: usize) -> (Vec<f64>, Vec<f64>) {
    let documents: Vec<f64> = documents_of_rows(&[0, n as u32]).map(f64::from).collect();
    let (documents, qkv) = (buf(dev, DType::U32, &documents), buf(dev, dtype, qkv));
    let mut o = buf(dev, dtype, &vec![7.0; n * shape.width()]);
    let mut lse = buf(dev, DType::F32, &vec![7.0; n * shape.heads]);
    dev.attention(Attention {
        shape,
        documents: documents.view(),
        qkv: qkv.view(),
        o: o.view_mut(),
        lse: lse.view_mut(),
    })
    .unwrap();
    (read(dev, &o), read(dev, &lse))
}

#[test]
fn rows_over_pages_are_those_of_whole_documents() {
    const N: usize = 230;
    // Two texts: tokens of one alone, and a stretch of another, whose pages are others.
    let at = [0, 1, 15, 16, 31, 32, 100, 191, 192, 229];
    let (past, rows) = (62, 5);
    let pages: Vec<u32> = (0..N.div_ceil(PAGE) as u32).map(|i| (i * 5 + 3) % 8).collect();
    let others: Vec<u32> = pages.iter().map(|page| 15 - page).collect();
    for (heads, kv_heads, head_dim, window, softcap) in [
        (2, 2, 64, 0, 0.0),
        (6, 2, 32, 0, 0.0),
        (8, 1, 64, 70, 0.0),
        (4, 4, 128, 0, 5.0),
        (5, 1, 32, 200, 0.0),
        (16, 1, 32, 0, 0.0), // more heads than a panel has rows of
        (2, 1, 24, 0, 0.0),
        (3, 1, 10, 40, 2.0),
        (2, 1, 256, 0, 0.0),
        (3, 1, 512, 0, 0.0),
        (1, 1, 264, 40, 0.0),
    ] {
        let shape = AttentionShape { heads, kv_heads, head_dim, scale: 0.3, window, softcap };
        let (row, kv_row, width) = (shape.row(), shape.kv_row(), shape.width());
        let (cpu, qkv) = (CpuDevice::new(Meter::default()), normal(5, N * row));
        for (dev, dtype) in devices().iter().flat_map(|d| FLOATS.map(|t| (d, t))) {
            let dev = &**dev;
            let (o, lse) = whole(if is_cpu(dev) { dev } else { &cpu }, dtype, shape, &qkv, N);
            // Everything before the rows is there; the rows themselves are stored by the call.
            let mut kv = vec![f64::NAN; 16 * PAGE * kv_row];
            let mut put = |pages: &[u32], t: usize| {
                let to = pages[t / PAGE] as usize * PAGE + t % PAGE;
                kv[to * kv_row..][..kv_row].copy_from_slice(&qkv[(t + 1) * row - kv_row..][..kv_row]);
            };
            (0..N).filter(|t| !at.contains(t)).for_each(|t| put(&pages, t));
            (0..past).for_each(|t| put(&others, t));
            let of: Vec<usize> = at.into_iter().chain(past..past + rows).collect();
            let given: Vec<f64> = of.iter().flat_map(|t| qkv[t * row..][..row].to_vec()).collect();
            let alone = |(first, &past): (usize, &usize)| PagedRows { first, rows: 1, past, pages: &pages, slot: 0 };
            let mut runs: Vec<PagedRows> = at.iter().enumerate().map(alone).collect();
            runs.push(PagedRows { first: at.len(), rows, past, pages: &others, slot: 0 });
            let table: Vec<f64> = paged_table(&runs).into_iter().map(f64::from).collect();
            let (given, mut kv) = (buf(dev, dtype, &given), buf(dev, dtype, &kv));
            let table = buf(dev, DType::U32, &table);
            let mut out = buf(dev, dtype, &vec![7.0; of.len() * width]);
            let mut sums = buf(dev, DType::F32, &vec![7.0; of.len() * heads]);
            dev.attention_paged(AttentionPaged {
                shape,
                runs: &runs,
                table: table.view(),
                qkv: given.view(),
                kv: kv.view_mut(),
                o: out.view_mut(),
                lse: sums.view_mut(),
            })
            .unwrap();
            let (out, sums) = (read(dev, &out), read(dev, &sums));
            // The CPU's weights of values are rounded to 16 bits.
            let near = if is_cpu(dev) {
                0.0
            } else if dtype == DType::F32 {
                2e-6
            } else {
                2e-2
            };
            for (i, &t) in of.iter().enumerate() {
                let what = format!("{} {dtype} {shape:?} token {t}", dev.name());
                let same = |x: f64, y: f64| (x - y).abs() <= near * y.abs().max(1.0);
                let pairs = out[i * width..][..width].iter().zip(&o[t * width..][..width]);
                let worst = pairs.clone().find(|(x, y)| !same(**x, **y));
                assert!(worst.is_none(), "{what}: {worst:?}");
                for head in 0..heads {
                    let (x, y) = (sums[head * of.len() + i], lse[head * N + t]);
                    assert!(same(x, y), "{what}: head {head}: {x}, not {y}");
                }
            }
        }
    }
}
