//! Attention over pages: single rows, of several sequences at once, have the bits that attention over their whole
//! documents gives, whatever the heads, the window and the place of the pages.
use super::harness::*;
use flatshard::base::DType;
use flatshard::device::Device;
use flatshard::device::ops::{Attention, AttentionPaged, AttentionShape, PagedRows, documents_of_rows};

const PAGE: usize = 32;

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
fn single_rows_over_pages_have_the_bits_of_whole_documents() {
    const N: usize = 230;
    let at = [0, 1, 15, 16, 31, 32, 100, 191, 192, 229];
    let pages: Vec<u32> = (0..N.div_ceil(PAGE) as u32).map(|i| (i * 5 + 3) % 8).collect();
    for (heads, kv_heads, head_dim, window, softcap) in [
        (2, 2, 64, 0, 0.0),
        (6, 2, 32, 0, 0.0),
        (8, 1, 64, 70, 0.0),
        (4, 4, 128, 0, 5.0),
        (5, 1, 32, 200, 0.0),
        (16, 1, 32, 0, 0.0), // more heads than a panel has rows of
        (2, 1, 24, 0, 0.0),
    ] {
        let shape = AttentionShape { heads, kv_heads, head_dim, scale: 0.3, window, softcap };
        let (row, kv_row) = (shape.row(), 2 * kv_heads * head_dim);
        for (dev, dtype) in devices().iter().filter(|dev| is_cpu(&***dev)).flat_map(|d| FLOATS.map(|t| (d, t))) {
            let dev = &**dev;
            let qkv = normal(5, N * row);
            let (o, lse) = whole(dev, dtype, shape, &qkv, N);
            let mut kv = vec![0.0; 8 * PAGE * kv_row];
            for t in 0..N {
                let to = pages[t / PAGE] as usize * PAGE + t % PAGE;
                kv[to * kv_row..][..kv_row].copy_from_slice(&qkv[(t + 1) * row - kv_row..][..kv_row]);
            }
            let rows: Vec<f64> = at.iter().flat_map(|t| qkv[t * row..][..row].to_vec()).collect();
            let run = |(first, &past): (usize, &usize)| PagedRows { first, rows: 1, past, pages: &pages, slot: 0 };
            let runs: Vec<PagedRows> = at.iter().enumerate().map(run).collect();
            let (rows, kv) = (buf(dev, dtype, &rows), buf(dev, dtype, &kv));
            let mut out = buf(dev, dtype, &vec![7.0; at.len() * shape.width()]);
            let mut sums = buf(dev, DType::F32, &vec![7.0; at.len() * heads]);
            let [mut pass, mut gathered] = [0, 0].map(|len| buf(dev, DType::F32, &vec![0.0; len]));
            let mut of_queries = buf(dev, DType::U32, &[]);
            dev.attention_paged(AttentionPaged {
                shape,
                runs: &runs,
                page: PAGE,
                qkv: rows.view(),
                kv: kv.view(),
                o: out.view_mut(),
                lse: sums.view_mut(),
                o_pass: pass.view_mut(),
                of_queries: of_queries.view_mut(),
                gathered: gathered.view_mut(),
            })
            .unwrap();
            let (out, sums) = (read(dev, &out), read(dev, &sums));
            for (i, &t) in at.iter().enumerate() {
                let what = format!("{} {dtype} {shape:?} token {t}", dev.name());
                let width = shape.width();
                let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&out[i * width..][..width]), bits(&o[t * width..][..width]), "{what}");
                for head in 0..heads {
                    assert_eq!(sums[head * at.len() + i], lse[head * N + t], "{what}: head {head}");
                }
            }
        }
    }
}
