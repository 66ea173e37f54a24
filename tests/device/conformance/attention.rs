//! Rotary positions and attention.
use super::harness::*;
use crate::common::reference::{self, Heads};
use flatshard_base::{Category, DType};
use flatshard_device::ops::{
    Attention, AttentionBackward, AttentionShape, BackwardOf, QkNormRope, QkNormRopeBackward, QkNormRopeShape,
    RmsNormShape, Rope, RopeShape, RotaryPairs, documents_of_rows,
};

#[test]
fn rope() {
    use RotaryPairs::{Adjacent, Halves};
    // Whole heads; parts of heads; parts that go 16 bytes at a time, in heads that do and that do not.
    let shapes = [
        (1, 2, 2, 2, 1),
        (3, 6, 6, 24, 5),
        (16, 64, 64, 20 * 64, 7),
        (3, 10, 6, 50, 4),
        (5, 96, 48, 7 * 96, 3),
        (2, 512, 512, 1536, 3),
    ];
    let odd = [(2, 36, 32, 72, 3), (3, 40, 32, 120, 3)];
    let shapes = shapes.into_iter().chain(odd);
    for ((heads, d, part, row, n), pairs) in shapes.flat_map(|shape| [(shape, Halves), (shape, Adjacent)]) {
        let positions: Vec<u32> = (0..n as u32).map(|i| i * 3 % 8).collect();
        let angles: Vec<f64> = (0..8 * part / 2).map(|i| i as f64 * 0.7).collect();
        let table: Vec<f64> =
            angles.chunks(part / 2).flat_map(|a| a.iter().map(|a| a.cos()).chain(a.iter().map(|a| a.sin()))).collect();
        let table: Vec<f64> = table.iter().map(|&t| t as f32 as f64).collect();
        let qkv = normal(1, n * row);
        for inverse in [false, true] {
            let shape = RopeShape { heads, head_dim: d, rotated: part, pairs, row };
            let form = (part, pairs == Adjacent);
            conform(
                "rope",
                FORWARD,
                &[f32_in("table", &table), u32_in("positions", &positions), y("qkv", &qkv)],
                reference::rope_part::<f64>((heads, d, row), form, &table, &positions, &qkv, inverse),
                reference::rope_part::<f32>((heads, d, row), form, &table, &positions, &qkv, inverse),
                &|dev, bufs| {
                    let [table, positions, qkv] = bufs else { unreachable!() };
                    dev.rope(Rope {
                        shape,
                        table: table.view(),
                        positions: positions.view(),
                        qkv: qkv.view_mut(),
                        inverse,
                    })
                },
            );
        }
    }
}

#[test]
fn qk_norm_rope() {
    for ((heads, kv, d), n, offset) in [
        ((1, 1, 2), 1, 0.0),
        ((3, 1, 6), 5, 1.0),
        ((4, 2, 64), 7, 0.0),
        ((2, 2, 40), 9, 1.0),
        ((3, 1, 512), 5, 0.0),
        ((1, 1, 264), 3, 1.0),
    ] {
        let positions: Vec<u32> = (0..n as u32).map(|i| i * 3 % 8).collect();
        let table: Vec<f64> = (0..8)
            .flat_map(|p| (0..d).map(move |i| (p as f64 * 0.7 + (i % (d / 2)) as f64, i < d / 2)))
            .map(|(angle, cos)| if cos { angle.cos() as f32 as f64 } else { angle.sin() as f32 as f64 })
            .collect();
        let row = (heads + 2 * kv) * d;
        let (qkv, wq, wk) = (normal(1, n * row), normal(2, d), normal(3, d));
        let shape = QkNormRopeShape {
            heads,
            kv_heads: kv,
            head_dim: d,
            norm: RmsNormShape { eps: 1e-5, offset: offset as f32 },
        };
        let inputs =
            [f32_in("table", &table), u32_in("positions", &positions), x("wq", &wq), x("wk", &wk), x("qkv", &qkv)];
        let given = [&table[..], &wq, &wk, &qkv];
        let rotated = n * (heads + kv);
        let forward = [y("out", &before(n * row)), f32_out("rstd", &before(rotated))];
        conform(
            "qk_norm_rope",
            FORWARD,
            &[&inputs[..], &forward].concat(),
            reference::qk_norm_rope::<f64>((heads, kv, d), (1e-5, offset), given, &positions),
            reference::qk_norm_rope::<f32>((heads, kv, d), (1e-5, offset), given, &positions),
            &|dev, bufs| {
                let [table, positions, wq, wk, qkv, out, rstd] = bufs else { unreachable!() };
                let (table, positions, wq, wk, qkv) =
                    (table.view(), positions.view(), wq.view(), wk.view(), qkv.view());
                dev.qk_norm_rope(QkNormRope {
                    shape,
                    table,
                    positions,
                    wq,
                    wk,
                    qkv,
                    out: out.view_mut(),
                    rstd: rstd.view_mut(),
                })
            },
        );
        let rstd = reference::qk_norm_rope::<f32>((heads, kv, d), (1e-5, offset), given, &positions).remove(1);
        let (d_out, dwq, dwk) = (normal(4, n * row), before(d), before(d));
        let backward = [f32_in("rstd", &rstd), y("dqkv", &d_out), f32_out("dwq", &dwq), f32_out("dwk", &dwk)];
        let given = [&table[..], &wq, &wk, &qkv, &rstd, &d_out];
        conform(
            "qk_norm_rope_backward",
            GRADIENT,
            &[&inputs[..], &backward].concat(),
            reference::qk_norm_rope_backward::<f64>((heads, kv, d), offset, given, &positions, [&dwq, &dwk]),
            reference::qk_norm_rope_backward::<f32>((heads, kv, d), offset, given, &positions, [&dwq, &dwk]),
            &|dev, bufs| {
                let [table, positions, wq, wk, qkv, rstd, dqkv, dwq, dwk] = bufs else { unreachable!() };
                let (table, positions, wq, wk) = (table.view(), positions.view(), wq.view(), wk.view());
                let (qkv, rstd, dqkv) = (qkv.view(), rstd.view(), dqkv.view_mut());
                let (dwq, dwk) = (dwq.view_mut(), dwk.view_mut());
                dev.qk_norm_rope_backward(QkNormRopeBackward {
                    shape,
                    table,
                    positions,
                    wq,
                    wk,
                    qkv,
                    rstd,
                    dqkv,
                    dwq,
                    dwk,
                })
            },
        );
    }
}

#[test]
fn rope_refuses_a_position_outside_the_table() {
    for dev in every_device() {
        let (table, positions) = (buf(&*dev, DType::F32, &[1.0; 8]), buf(&*dev, DType::U32, &[0.0, 2.0]));
        let mut qkv = buf(&*dev, DType::F32, &[1.0; 8]);
        let shape = RopeShape { heads: 1, head_dim: 4, rotated: 4, pairs: RotaryPairs::Halves, row: 4 };
        let done = dev.rope(Rope {
            shape,
            table: table.view(),
            positions: positions.view(),
            qkv: qkv.view_mut(),
            inverse: false,
        });
        let error = settled(&*dev, done, &table).unwrap_err().to_string();
        assert!(error.contains("position 2") && error.contains("2 rows"), "{error}");
    }
}

/// Heads and document boundaries: one token, empty documents, tiles split in every way, shared key/value heads.
fn shapes() -> Vec<(Heads, Vec<u32>)> {
    let heads = |q, kv, d| Heads { q, kv, d, scale: 1.0 / (d as f64).sqrt() as f32 as f64, window: 0, cap: 0.0 };
    vec![
        (heads(1, 1, 1), vec![0, 1]),
        (heads(2, 1, 3), vec![0, 1, 1, 8]),
        (heads(3, 3, 20), vec![0, 5, 69, 70]),
        (heads(4, 2, 64), vec![0, 64, 129]),
        (heads(6, 2, 40), vec![0, 63, 64, 200]),
        (heads(2, 2, 128), vec![0, 300]),
        (heads(3, 1, 320), vec![0, 40]),
        (heads(1, 1, 8), vec![0]),
        // Windows of one token, smaller and larger than a tile, at its edges, and larger than the sequence.
        (Heads { window: 1, ..heads(2, 1, 4) }, vec![0, 3, 70]),
        (Heads { window: 5, ..heads(2, 1, 20) }, vec![0, 1, 200]),
        (Heads { window: 63, ..heads(1, 1, 16) }, vec![0, 260]),
        (Heads { window: 64, ..heads(4, 2, 8) }, vec![0, 65, 270]),
        (Heads { window: 65, ..heads(1, 1, 16) }, vec![0, 129, 330]),
        (Heads { window: 100, cap: 0.7, ..heads(6, 3, 12) }, vec![0, 150, 300]),
        (Heads { window: 1000, ..heads(1, 1, 8) }, vec![0, 90]),
        (Heads { cap: 2.0, scale: 0.5, ..heads(3, 1, 24) }, vec![0, 7, 150]),
    ]
}

#[test]
fn attention() {
    for (a, cu) in shapes() {
        let (n, documents) = (*cu.last().unwrap() as usize, documents_of_rows(&cu).collect::<Vec<_>>());
        let qkv = normal(2, n * a.row());
        let shape = AttentionShape {
            heads: a.q,
            kv_heads: a.kv,
            head_dim: a.d,
            scale: a.scale as f32,
            window: a.window,
            softcap: a.cap as f32,
        };
        conform(
            "attention",
            FORWARD,
            &[
                u32_in("documents", &documents),
                x("qkv", &qkv),
                y("o", &before(n * a.q * a.d)),
                f32_out("lse", &before(a.q * n)),
            ],
            reference::attention::<f64>(a, &cu, &qkv),
            reference::attention::<f32>(a, &cu, &qkv),
            &|dev, bufs| {
                let [documents, qkv, o, lse] = bufs else { unreachable!() };
                dev.attention(Attention {
                    shape,
                    documents: documents.view(),
                    qkv: qkv.view(),
                    o: o.view_mut(),
                    lse: lse.view_mut(),
                })
            },
        );
    }
}

#[test]
fn attention_backward() {
    for (a, cu) in shapes() {
        let (n, documents) = (*cu.last().unwrap() as usize, documents_of_rows(&cu).collect::<Vec<_>>());
        let (qkv, d_o) = (normal(3, n * a.row()), normal(4, n * a.q * a.d));
        let forward = reference::attention::<f64>(a, &cu, &qkv);
        // Inputs of backward are exact in all compute dtypes.
        let o: Vec<f64> = forward[0].iter().map(|&o| rounded(o)).collect();
        let lse: Vec<f64> = forward[1].iter().map(|&l| l as f32 as f64).collect();
        let shape = AttentionShape {
            heads: a.q,
            kv_heads: a.kv,
            head_dim: a.d,
            scale: a.scale as f32,
            window: a.window,
            softcap: a.cap as f32,
        };
        let delta = operand("delta", Kind::Fixed(DType::F32), Role::Scratch, before(a.q * n));
        conform(
            "attention_backward",
            GRADIENT,
            &[
                u32_in("documents", &documents),
                x("qkv", &qkv),
                x("o", &o),
                f32_in("lse", &lse),
                x("d_o", &d_o),
                delta,
                y("dqkv", &before(n * a.row())),
            ],
            reference::attention_backward::<f64>(a, &cu, [&qkv, &o, &lse, &d_o]),
            reference::attention_backward::<f32>(a, &cu, [&qkv, &o, &lse, &d_o]),
            &|dev, bufs| {
                let [documents, qkv, o, lse, d_o, delta, dqkv] = bufs else { unreachable!() };
                let mut sums = dev.alloc(
                    DType::F32,
                    dev.backward_scratch(&BackwardOf::Attention(shape), qkv.dtype(), n),
                    Category::Other,
                )?;
                let (delta, sums, dqkv) = (delta.view_mut(), sums.view_mut(), dqkv.view_mut());
                let (qkv, o, lse, d_o) = (qkv.view(), o.view(), lse.view(), d_o.view());
                dev.attention_backward(AttentionBackward {
                    shape,
                    documents: documents.view(),
                    qkv,
                    o,
                    lse,
                    d_o,
                    delta,
                    sums,
                    dqkv,
                })
            },
        );
    }
}

/// Scores of +-1000 do not overflow, and a document does not leak into the next.
#[test]
fn attention_with_large_scores() {
    for dev in every_device() {
        let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 2, scale: 1.0, window: 0, softcap: 0.0 };
        let rows =
            [[30.0, 0.0, 30.0, 0.0, 1.0, 2.0], [30.0, 0.0, -30.0, 0.0, 5.0, 7.0], [0.0, 0.0, 0.0, 0.0, 3.0, 4.0]];
        let qkv = buf(&*dev, DType::F32, rows.as_flattened());
        let documents = buf(&*dev, DType::U32, &[0.0, 2.0, 0.0, 2.0, 2.0, 3.0]);
        let (mut o, mut lse) = (buf(&*dev, DType::F32, &[0.0; 6]), buf(&*dev, DType::F32, &[0.0; 3]));
        dev.attention(Attention {
            shape,
            documents: documents.view(),
            qkv: qkv.view(),
            o: o.view_mut(),
            lse: lse.view_mut(),
        })
        .unwrap();
        assert_eq!(read(&*dev, &o), [1.0, 2.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(read(&*dev, &lse), [900.0, 900.0, 0.0]);
    }
}

/// Checked where the host can read the memory: a real GPU only stays within bounds.
#[test]
fn attention_refuses_documents_that_do_not_follow_one_another() {
    for dev in devices().into_iter().filter(|dev| is_cpu(&**dev)) {
        let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 2, scale: 1.0, window: 0, softcap: 0.0 };
        let qkv = buf(&*dev, DType::F32, &[0.0; 18]);
        let (mut o, mut lse) = (buf(&*dev, DType::F32, &[0.0; 6]), buf(&*dev, DType::F32, &[0.0; 3]));
        for wrong in [
            &[0.0, 3.0, 0.0, 3.0][..],
            &[1.0, 3.0, 1.0, 3.0, 1.0, 3.0],
            &[0.0, 2.0, 0.0, 2.0, 1.0, 3.0],
            &[0.0, 2.0, 0.0, 2.0, 0.0, 2.0],
            &[0.0, 3.0, 1.0, 3.0, 1.0, 3.0],
            &[0.0, 4.0, 0.0, 4.0, 0.0, 4.0],
            &[],
        ] {
            let documents = buf(&*dev, DType::U32, wrong);
            let error = dev.attention(Attention {
                shape,
                documents: documents.view(),
                qkv: qkv.view(),
                o: o.view_mut(),
                lse: lse.view_mut(),
            });
            assert!(error.unwrap_err().to_string().contains("documents"));
        }
    }
}
