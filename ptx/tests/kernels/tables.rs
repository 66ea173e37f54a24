//! Kernels that use indices: embeddings, cross entropy, and the index check before both.
use super::cases::ConcatSlots;
use super::harness::*;
use flatshard_ptx::emulate::Argument;

const COUNT: f64 = 4294967296.0;

#[test]
fn check_finds_the_first_index_outside() {
    let check = |indices: &[f64], limit: usize, before: f64| {
        let slots = vec![In(U32, indices.to_vec()), InOut(U64, vec![before]), int(indices.len()), int(limit), int(!99)];
        let bytes = job("check", 2, 64, slots).bytes();
        u64::from_le_bytes(bytes[0][..].try_into().unwrap())
    };
    let mut indices: Vec<f64> = (0..300).map(|i| (i % 7) as f64).collect();
    assert_eq!(check(&indices, 7, 0.0), 0);
    indices[17] = COUNT - 1.0 - 99.0; // the one to pass
    assert_eq!(check(&indices, 7, 0.0), 0);
    (indices[201], indices[133]) = (7.0, COUNT - 5.0);
    assert_eq!(check(&indices, 7, 0.0), (!133u32 as u64) << 32 | (u32::MAX - 4) as u64);
    assert_eq!(check(&indices[..3], 7, 5.0), 5, "an earlier fault must stay");
}

/// Rows, columns, tokens of the table, threads, skew.
const SHAPES: [(usize, usize, usize, u32, usize); 5] =
    [(1, 1, 1, 32, 0), (7, 64, 5, 32, 0), (70, 24, 9, 32, 0), (9, 77, 3, 32, 0), (6, 64, 4, 32, 1)];

/// The rows of a table that an operand holds: all, or a slice.
const PARTS: [fn(usize) -> std::ops::Range<usize>; 3] = [|n| 0..n, |n| 0..n.div_ceil(2), |n| n / 2..n];

fn tokens(rows: usize, table: usize) -> Vec<f64> {
    // One token is frequent, some do not occur.
    (0..rows).map(|i| if i % 3 == 1 { 0.0 } else { (i * i % table) as f64 }).collect()
}

#[test]
fn embeddings() {
    for (dtype, name) in DTYPES {
        for ((rows, columns, table, threads, skew), part) in SHAPES.into_iter().flat_map(|s| PARTS.map(|p| (s, p))) {
            let held = part(table);
            for adds in [false, true] {
                let (tokens, w, y) = (tokens(rows, table), normal(1, held.len() * columns), normal(2, rows * columns));
                let scale = 1.5;
                let at = |i: usize| {
                    let token = tokens[i / columns] as usize;
                    let there = held.contains(&token).then(|| w[(token - held.start) * columns + i % columns]);
                    scale * there.unwrap_or(0.0) + if adds { y[i] } else { 0.0 }
                };
                let want: Vec<f64> = (0..rows * columns).map(at).collect();
                let slots = vec![
                    In(U32, tokens),
                    In(dtype, w),
                    InOut(dtype, y),
                    no_fault(),
                    int(rows),
                    int(columns),
                    real(scale as f32),
                    int(adds as usize),
                    int(held.start),
                    int(held.len()),
                ];
                let got = job(format!("embed_{name}"), 3, threads, slots).skewed(skew).outputs();
                assert_eq!(got[0], rounded(&want, dtype), "embed {name} ({rows}, {columns}) {held:?}, adds {adds}");
            }
        }
    }
}

/// [order, sorted]
fn sort(tokens: &[f64]) -> Vec<Vec<f64>> {
    let n = tokens.len();
    let slots = vec![In(U32, tokens.to_vec()), Out(U32, n), Out(U32, n), no_fault(), int(n)];
    job("embed_sort", n.div_ceil(32) as u32, 256, slots).outputs()
}

#[test]
fn rows_are_sorted_by_token_and_stay_in_order() {
    for n in [1, 31, 32, 33, 127, 128, 129, 300] {
        let tokens: Vec<f64> = (0..n).map(|i| [7.0, (i * 37 % 11) as f64, 0.0, COUNT - 2.0][i % 4]).collect();
        let mut want: Vec<usize> = (0..n).collect();
        want.sort_by(|a, b| tokens[*a].total_cmp(&tokens[*b]));
        let got = sort(&tokens);
        assert_eq!(got[0], want.iter().map(|i| *i as f64).collect::<Vec<_>>(), "{n} rows");
        assert_eq!(got[1], want.iter().map(|i| tokens[*i]).collect::<Vec<_>>(), "{n} rows");
    }
}

/// Row by row in f32, as the CPU has it.
#[test]
fn gradients_of_embeddings_have_the_bits_of_row_order() {
    for (dtype, name) in DTYPES {
        for ((rows, columns, table, threads, skew), part) in SHAPES.into_iter().flat_map(|s| PARTS.map(|p| (s, p))) {
            let held = part(table);
            let (tokens, dy, dw) = (tokens(rows, table), normal(3, rows * columns), normal(4, held.len() * columns));
            let scale = 1.1f32;
            let mut want: Vec<f32> = reals(&dw);
            for (row, token) in tokens.iter().enumerate().filter(|(_, token)| held.contains(&(**token as usize))) {
                for c in 0..columns {
                    let at = (*token as usize - held.start) * columns + c;
                    want[at] = (dy[row * columns + c] as f32).mul_add(scale, want[at]);
                }
            }
            let [order, sorted]: [Vec<f64>; 2] = sort(&tokens).try_into().unwrap();
            let slots = vec![
                In(U32, order),
                In(U32, sorted),
                In(dtype, dy),
                InOut(F32, dw),
                no_fault(),
                int(rows),
                int(columns),
                real(scale),
                int(held.start),
                int(held.len()),
            ];
            let got = job(format!("embed_backward_{name}"), 3, threads, slots).skewed(skew).outputs();
            assert_eq!(got[0], f64s(&want), "embed backward {name} ({rows}, {columns}) {held:?}");
        }
    }
}

#[test]
fn nothing_follows_an_index_that_is_at_fault() {
    let fault = || In(U64, vec![1.0]);
    let bad = || In(U32, vec![9e9]);
    let y = vec![1.0, 2.0];
    let table = || [int(0), int(1)];
    let mut slots =
        vec![bad(), In(F32, vec![1.0; 2]), InOut(F32, y.clone()), fault(), int(1), int(2), real(1.0), int(0)];
    slots.extend(table());
    assert_eq!(job("embed_f32", 1, 32, slots).outputs()[0], y);
    let mut slots =
        vec![bad(), bad(), In(F32, vec![1.0; 2]), InOut(F32, y.clone()), fault(), int(1), int(2), real(1.0)];
    slots.extend(table());
    assert_eq!(job("embed_backward_f32", 1, 32, slots).outputs()[0], y);
    let slots = vec![
        In(F32, vec![1.0; 2]),
        bad(),
        InOut(F32, y.clone()),
        fault(),
        int(1),
        int(1),
        int(2),
        int(2),
        int(2),
        real(1.0),
    ];
    assert_eq!(job("rope_f32", 1, 32, slots).outputs()[0], y);
    let (losses, one) = (InOut(F64, vec![5.0]), || In(F32, vec![1.0]));
    let slots = vec![In(I32, vec![-5.0]), InOut(F32, y.clone()), losses, fault(), one(), int(1), int(2)];
    let slots = [slots, vec![real(0.0), int(0)]].concat_slots();
    assert_eq!(job("cross_entropy_f32", 1, 32, slots).outputs(), [y.clone(), vec![5.0]]);
    let said = vec![1.0, 2.0, 3.0];
    let slots =
        vec![In(I32, vec![-5.0]), In(F32, y.clone()), InOut(F32, said.clone()), fault(), int(1), int(2), int(0)];
    let slots = [slots, vec![real(0.0)]].concat_slots();
    assert_eq!(job("cross_entropy_part_f32", 1, 32, slots).outputs(), std::slice::from_ref(&said));
    let slots = vec![In(I32, vec![-5.0]), In(F32, said), InOut(F32, y.clone()), InOut(F64, vec![5.0]), fault()];
    let sizes = vec![one(), int(1), int(1), int(2), int(0), real(0.0), int(0)];
    assert_eq!(job("cross_entropy_finish_f32", 1, 32, [slots, sizes].concat_slots()).outputs(), [y, vec![5.0]]);
}

/// Losses by row, and the gradient with its factor, if requested.
fn gradient(wanted: bool) -> Slot {
    if wanted { In(F32, vec![0.125]) } else { Value(Argument::Pointer(0)) }
}
fn cross_entropy_of<R: Real>(vocab: usize, targets: &[f64], logits: &[f64], scale: f64, cap: f64) -> [Vec<f64>; 2] {
    let (mut losses, mut grad) = (vec![], vec![]);
    for (row, target) in logits.chunks(vocab).zip(targets) {
        if *target < 0.0 {
            losses.push(0.0);
            grad.extend(vec![0.0; vocab]);
            continue;
        }
        let capped = |x: &f64| match cap {
            0.0 => (R::of(*x), R::of(1.0)),
            cap => {
                let t = (R::of(*x) / R::of(cap)).tanh();
                (R::of(cap) * t, R::of(1.0) - t * t)
            }
        };
        let z: Vec<(R, R)> = row.iter().map(capped).collect();
        let max = z.iter().fold(z[0].0, |m, (z, _)| if *z > m { *z } else { m });
        let total = z.iter().fold(zero::<R>(), |s, (z, _)| s + (*z - max).exp());
        losses.push((total.ln() + (max - z[*target as usize].0)).f64());
        grad.extend(z.iter().enumerate().map(|(i, (z, slope))| {
            let hot = R::of((i == *target as usize) as usize as f64);
            (((*z - max).exp() / total - hot) * R::of(scale) * *slope).f64()
        }));
    }
    [losses, grad]
}

/// Vocabularies close to a vector's width, beyond what fits in registers, at every alignment of a row; targets at both
/// ends.
#[test]
fn cross_entropy_in_place() {
    for (vocab, threads, targets) in [
        (1, 32, vec![0]),
        (7, 32, vec![6, -100, 0, 3]),
        (64, 32, vec![63, 0]),
        (257, 32, vec![256, 0, 1, 255, -100, 9, 130, 200, 7]),
        (5003, 32, vec![5002, 0, 17, 4999]),
        (4096, 64, vec![4095, 2111]),
    ] {
        for (dtype, name) in DTYPES {
            for cap in [0.0, 3.0] {
                let rows = targets.len();
                let targets: Vec<f64> = targets.iter().map(|t| *t as f64).collect();
                let logits: Vec<f64> = normal(vocab as u64, vocab * rows).iter().map(|x| x * 4.0).collect();
                let exact = cross_entropy_of::<f64>(vocab, &targets, &logits, 0.125, cap);
                let naive = cross_entropy_of::<f32>(vocab, &targets, &logits, 0.125, cap);
                let variant =
                    if cap > 0.0 { format!("cross_entropy_cap_{name}") } else { format!("cross_entropy_{name}") };
                for grad in [false, true] {
                    let slots = vec![
                        In(I32, targets.clone()),
                        InOut(dtype, logits.clone()),
                        Out(F64, rows),
                        no_fault(),
                        gradient(grad),
                        int(rows),
                        int(vocab),
                        real(cap as f32),
                        int(0),
                    ];
                    let got = job(&variant, 2, threads, slots).outputs();
                    let label = format!("{variant} vocab {vocab}");
                    within(&format!("{label} losses"), GRADIENT, LOG, (&got[1], F64), &exact[0], &naive[0]);
                    if grad {
                        compare(&label, GRADIENT, &got[0], dtype, &exact[1], &naive[1]);
                    } else {
                        assert_eq!(got[0], logits, "{label}: logits stay");
                    }
                }
            }
        }
    }
}

/// The columns `from..to` of rows of `vocab`.
fn columns(logits: &[f64], vocab: usize, (from, to): (usize, usize)) -> Vec<f64> {
    logits.chunks(vocab).flat_map(|row| row[from..to].to_vec()).collect()
}

/// A vocabulary in slices of different lengths: each slice's gradient and losses are those of the whole.
#[test]
fn parts_of_a_vocabulary_come_to_the_loss_of_the_whole() {
    for (cuts, threads, targets) in [
        (vec![0, 1, 2], 32, vec![0, -100, 1]),
        (vec![0, 7, 64, 201], 32, vec![6, 7, 63, 64, 200, -100, 0, 100]),
        (vec![0, 2500, 5003], 64, vec![5002, 0, 2499, 2500]),
    ] {
        for (dtype, name) in DTYPES {
            for cap in [0.0, 3.0] {
                let (rows, vocab) = (targets.len(), *cuts.last().unwrap());
                let targets: Vec<f64> = targets.iter().map(|t| *t as f64).collect();
                let logits: Vec<f64> = normal(vocab as u64, vocab * rows).iter().map(|x| x * 4.0).collect();
                let exact = cross_entropy_of::<f64>(vocab, &targets, &logits, 0.125, cap);
                let naive = cross_entropy_of::<f32>(vocab, &targets, &logits, 0.125, cap);
                let suffix = if cap > 0.0 { format!("cap_{name}") } else { name.to_string() };
                let parts: Vec<(usize, usize)> = cuts.windows(2).map(|w| (w[0], w[1])).collect();
                let (given, cap) = (|| In(I32, targets.clone()), || real(cap as f32));
                let said = parts.iter().flat_map(|&(from, to)| {
                    let logits = In(dtype, columns(&logits, vocab, (from, to)));
                    let slots = vec![given(), logits, Out(F32, 3 * rows), no_fault(), int(rows), int(to - from)];
                    let slots = [slots, vec![int(from), cap()]].concat_slots();
                    job(format!("cross_entropy_part_{suffix}"), 2, threads, slots).outputs().remove(0)
                });
                let said: Vec<f64> = said.collect();
                let mut first: Option<Vec<f64>> = None;
                for (grad, &(from, to)) in [true, false].into_iter().flat_map(|g| parts.iter().map(move |p| (g, p))) {
                    let mine = columns(&logits, vocab, (from, to));
                    let slots = vec![given(), In(F32, said.clone()), InOut(dtype, mine.clone()), Out(F64, rows)];
                    let sizes = [rows, parts.len(), to - from, from].map(int).into_iter().collect();
                    let slots = [slots, vec![no_fault(), gradient(grad)], sizes, vec![cap(), int(0)]].concat_slots();
                    let got = job(format!("cross_entropy_finish_{suffix}"), 2, threads, slots).outputs();
                    let label = format!("{suffix} columns {from}..{to} of {vocab}");
                    within(&format!("{label} losses"), GRADIENT, LOG, (&got[1], F64), &exact[0], &naive[0]);
                    assert_eq!(
                        first.get_or_insert(got[1].clone()),
                        &got[1],
                        "{label}: other losses than the first part's"
                    );
                    if grad {
                        let [exact, naive] = [&exact[1], &naive[1]].map(|g| columns(g, vocab, (from, to)));
                        compare(&label, GRADIENT, &got[0], dtype, &exact, &naive);
                    } else {
                        assert_eq!(got[0], mine, "{label}: logits stay");
                    }
                }
            }
        }
    }
}

fn loss_of(logits: Vec<f64>, target: f64) -> f64 {
    let n = logits.len();
    let slots = vec![
        In(I32, vec![target]),
        InOut(F32, logits),
        Out(F64, 1),
        no_fault(),
        gradient(false),
        int(1),
        int(n),
        real(0.0),
        int(0),
    ];
    job("cross_entropy_f32", 1, 64, slots).outputs()[1][0]
}

#[test]
fn extreme_logits() {
    assert!((loss_of(vec![1e4, -1e4, f64::NEG_INFINITY, 0.0], 1.0) - 2e4).abs() < 1e-6);
    assert!((loss_of(vec![-1e30; 4], 2.0) - 4f64.ln()).abs() < 1e-6);
    for at in [0, 17, 1023] {
        let mut row = vec![0.5; 1024];
        row[at] = f64::NAN;
        assert!(loss_of(row, 1.0).is_nan(), "NaN at {at}");
    }
}

#[test]
fn losses_are_summed_in_row_order() {
    for n in [1, 255, 256, 257, 700] {
        let losses: Vec<f64> = normal(8, n).iter().enumerate().map(|(i, x)| x * 10f64.powi(i as i32 % 30)).collect();
        let want = losses.iter().fold(2.5, |sum, x| sum + x);
        let got = job("sum_losses", 1, 256, vec![In(F64, losses), InOut(F64, vec![2.5]), int(n)]).outputs();
        assert_eq!(got[0], [want], "{n} rows");
    }
}
