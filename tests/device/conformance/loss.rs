//! Cross entropy.
use super::harness::*;
use crate::common::reference::{self, Real};
use flatshard_base::DType;
use flatshard_device::Device;
use flatshard_device::ops::{
    CrossEntropy, CrossEntropyFinish, CrossEntropyPart, CrossEntropyShape, DistillFinish, DistillPart, DistillTerms,
    RowEntropies, VocabPart,
};

/// The factor of the gradient; last among the operands, if given.
fn with_scale(grad: bool, mut operands: Vec<Operand>) -> Vec<Operand> {
    operands.extend(grad.then(|| operand("scale", Kind::Fixed(DType::F32), Role::Scratch, [0.125])));
    operands
}

#[test]
fn cross_entropy() {
    for (vocab, targets) in
        [(1, vec![0]), (7, vec![6, -100, 0]), (256, vec![-100; 2]), (5000, vec![4999, 0, 17]), (2, vec![])]
    {
        let logits: Vec<f64> = normal(vocab as u64, vocab * targets.len()).iter().map(|x| x * 4.0).collect();
        for (grad, cap) in [(false, 0.0), (true, 0.0), (false, 3.0), (true, 3.0)] {
            let shape = CrossEntropyShape { vocab, softcap: cap as f32 };
            conform(
                "cross_entropy",
                GRADIENT,
                &with_scale(
                    grad,
                    vec![
                        operand("targets", Kind::Fixed(DType::I32), Role::Input, targets.iter().copied()),
                        y("logits", &logits),
                        operand("loss", Kind::Fixed(DType::F64), Role::Output, [2.5]),
                    ],
                ),
                reference::cross_entropy::<f64>((vocab, 0.125, grad, cap), &targets, &logits, 2.5),
                reference::cross_entropy::<f32>((vocab, 0.125, grad, cap), &targets, &logits, 2.5),
                &|dev, bufs| {
                    let [targets, logits, loss, scale @ ..] = bufs else { unreachable!() };
                    let scale = scale.first().map(|scale| scale.view());
                    dev.cross_entropy(CrossEntropy {
                        shape,
                        targets: targets.view(),
                        by_row: false,
                        scale,
                        logits: logits.view_mut(),
                        loss: loss.view_mut(),
                    })
                },
            );
        }
    }
}

/// The statistics of the rows in each part between `cuts`, in order.
fn losses(dev: &dyn Device, dtype: DType, cuts: &[usize], targets: &[i32], logits: &[f64], cap: f32) -> Vec<f64> {
    let (vocab, given) = (cuts[cuts.len() - 1], targets.iter().map(|&t| t as f64).collect::<Vec<_>>());
    let one = |part: &[usize]| {
        let (columns, shape) = columns(logits, vocab, part, cap);
        let at = VocabPart { first: part[0], of: vocab };
        let mut said = buf(dev, DType::F32, &vec![7.0; VocabPart::STATS * targets.len()]);
        let (targets, columns) = (buf(dev, DType::I32, &given), buf(dev, dtype, &columns));
        dev.cross_entropy_part(CrossEntropyPart {
            shape,
            part: at,
            targets: targets.view(),
            logits: columns.view(),
            stats: said.view_mut(),
        })
        .unwrap();
        read(dev, &said)
    };
    cuts.windows(2).flat_map(one).collect()
}
fn columns(logits: &[f64], vocab: usize, part: &[usize], softcap: f32) -> (Vec<f64>, CrossEntropyShape) {
    let columns = logits.chunks(vocab).flat_map(|row| row[part[0]..part[1]].to_vec()).collect();
    (columns, CrossEntropyShape { vocab: part[1] - part[0], softcap })
}

/// Every part gives the loss of the whole vocabulary, and the gradient of its own columns.
#[test]
fn cross_entropy_in_parts() {
    let all: [(&[usize], Vec<i32>); 3] =
        [(&[0, 7, 12], vec![6, -100, 7, 0]), (&[0, 1, 2, 3], vec![2, 0, 1]), (&[0, 2000, 5000], vec![4999, 0, 1999])];
    for (cuts, targets) in all {
        let vocab = cuts[cuts.len() - 1];
        let logits: Vec<f64> = normal(vocab as u64, vocab * targets.len()).iter().map(|x| x * 4.0).collect();
        for (grad, cap) in [(false, 0.0), (true, 0.0), (true, 3.0)] {
            for part in cuts.windows(2) {
                let (mine, shape) = columns(&logits, vocab, part, cap as f32);
                let at = VocabPart { first: part[0], of: vocab };
                let of = |mut outputs: Outputs| {
                    outputs[0] = columns(&outputs[0], vocab, part, 0.0).0;
                    outputs
                };
                // The same for all devices: the final step is what is compared.
                let cpu = &devices()[0];
                conform(
                    "cross_entropy_finish",
                    GRADIENT,
                    &with_scale(
                        grad,
                        vec![
                            operand("targets", Kind::Fixed(DType::I32), Role::Input, targets.iter().copied()),
                            f32_in("stats", &losses(&**cpu, DType::F32, cuts, &targets, &logits, cap as f32)),
                            y("logits", &mine),
                            operand("loss", Kind::Fixed(DType::F64), Role::Output, [2.5]),
                        ],
                    ),
                    of(reference::cross_entropy::<f64>((vocab, 0.125, grad, cap), &targets, &logits, 2.5)),
                    of(reference::cross_entropy::<f32>((vocab, 0.125, grad, cap), &targets, &logits, 2.5)),
                    &|dev, bufs| {
                        let [targets, said, logits, loss, scale @ ..] = bufs else { unreachable!() };
                        let (targets, said, scale) = (targets.view(), said.view(), scale.first().map(|s| s.view()));
                        dev.cross_entropy_finish(CrossEntropyFinish {
                            shape,
                            part: at,
                            targets,
                            stats: said,
                            by_row: false,
                            scale,
                            logits: logits.view_mut(),
                            loss: loss.view_mut(),
                        })
                    },
                );
            }
        }
        for cap in [0.0f32, 3.0] {
            for part in cuts.windows(2) {
                let (mine, shape) = columns(&logits, vocab, part, cap);
                let at = VocabPart { first: part[0], of: vocab };
                let (exact, naive) = (what::<f64>(part, &targets, &mine, cap), what::<f32>(part, &targets, &mine, cap));
                conform(
                    "cross_entropy_part",
                    FORWARD,
                    &[
                        operand("targets", Kind::Fixed(DType::I32), Role::Input, targets.iter().copied()),
                        x("logits", &mine),
                        f32_out("stats", &before(VocabPart::STATS * targets.len())),
                    ],
                    exact,
                    naive,
                    &|dev, bufs| {
                        let [targets, logits, said] = bufs else { unreachable!() };
                        dev.cross_entropy_part(CrossEntropyPart {
                            shape,
                            part: at,
                            targets: targets.view(),
                            logits: logits.view(),
                            stats: said.view_mut(),
                        })
                    },
                );
            }
        }
    }
}
/// The statistics of a part, computed naively.
fn what<R: Real>(part: &[usize], targets: &[i32], logits: &[f64], cap: f32) -> Outputs {
    let width = part[1] - part[0];
    let row = |(row, &target): (&[f64], &i32)| {
        if target == -100 {
            return [0.0; 3];
        }
        let one = R::of(1.0);
        let capped =
            |&x: &f64| if cap == 0.0 { R::of(x) } else { reference::softcap(R::of(cap as f64), R::of(x), one).0 };
        let z: Vec<R> = row.iter().map(capped).collect();
        let max = z.iter().copied().reduce(R::max).unwrap();
        let total = z.iter().map(|&z| (z - max).exp()).sum::<R>();
        let here = (target as usize).checked_sub(part[0]).and_then(|column| z.get(column));
        [max.f64(), total.f64(), here.map_or(0.0, |z| z.f64())]
    };
    vec![logits.chunks(width).zip(targets).flat_map(row).collect()]
}

#[test]
fn cross_entropy_of_extreme_logits() {
    for dev in devices() {
        let (shape, one) = (CrossEntropyShape { vocab: 4, softcap: 0.0 }, buf(&*dev, DType::F32, &[1.0]));
        let rows = [[1e4, -1e4, f64::NEG_INFINITY, 0.0], [-1e30, -1e30, -1e30, -1e30]];
        let mut logits = buf(&*dev, DType::F32, rows.as_flattened());
        let (targets, mut loss) = (buf(&*dev, DType::I32, &[1.0, 2.0]), buf(&*dev, DType::F64, &[0.0]));
        dev.cross_entropy(CrossEntropy {
            shape,
            targets: targets.view(),
            by_row: false,
            scale: Some(one.view()),
            logits: logits.view_mut(),
            loss: loss.view_mut(),
        })
        .unwrap();
        assert!((read(&*dev, &loss)[0] - 2e4 - 4f64.ln()).abs() < 1e-6);
        assert_eq!(read(&*dev, &logits), [1.0, -1.0, 0.0, 0.0, 0.25, 0.25, -0.75, 0.25]);
    }
}

#[test]
fn a_nan_among_the_logits_reaches_the_loss() {
    for dev in devices() {
        for (at, softcap) in [(0, 0.0), (17, 0.0), (39, 0.0), (17, 5.0)] {
            let shape = CrossEntropyShape { vocab: 40, softcap };
            let mut row = [0.5; 40];
            row[at] = f64::NAN;
            let mut logits = buf(&*dev, DType::F32, &row);
            let (targets, mut loss) = (buf(&*dev, DType::I32, &[1.0]), buf(&*dev, DType::F64, &[0.0]));
            dev.cross_entropy(CrossEntropy {
                shape,
                targets: targets.view(),
                by_row: false,
                scale: None,
                logits: logits.view_mut(),
                loss: loss.view_mut(),
            })
            .unwrap();
            assert!(read(&*dev, &loss)[0].is_nan(), "NaN at {at}");
        }
    }
}

#[test]
fn cross_entropy_names_a_target_outside_the_vocabulary() {
    for dev in devices() {
        let (shape, one) = (CrossEntropyShape { vocab: 4, softcap: 0.0 }, buf(&*dev, DType::F32, &[1.0]));
        for wrong in [4.0, -1.0, -99.0] {
            let mut logits = buf(&*dev, DType::F32, &[0.5; 8]);
            let (targets, mut loss) = (buf(&*dev, DType::I32, &[1.0, wrong]), buf(&*dev, DType::F64, &[0.0]));
            let error = dev.cross_entropy(CrossEntropy {
                shape,
                targets: targets.view(),
                by_row: false,
                scale: Some(one.view()),
                logits: logits.view_mut(),
                loss: loss.view_mut(),
            });
            let error = settled(&*dev, error, &targets).unwrap_err().to_string();
            assert!(error.contains(&format!("target {wrong}")) && error.contains("0..4"), "{error}");
            assert_eq!(read(&*dev, &logits), [0.5; 8], "nothing is written");
        }
    }
}

/// By row, each row is bit for bit what it is alone, with its own scale: whole rows, and their last columns in two
/// parts.
#[test]
fn rows_with_scales_and_losses_of_their_own() {
    let (vocab, targets, scales) = (300, [7.0, -100.0, 299.0, 0.0], [0.5, 2.0, -1.25, 3.0]);
    let given = normal(5, vocab * targets.len());
    for (dev, softcap) in devices().iter().flat_map(|dev| [(dev, 0.0), (dev, 3.0)]) {
        let cuts = [0, 160, vocab];
        let ids: Vec<i32> = targets.iter().map(|&target| target as i32).collect();
        let stats = losses(&**dev, DType::F32, &cuts, &ids, &given, softcap);
        let run = |rows: std::ops::Range<usize>, parts: bool, by_row: bool| {
            let first = if parts { cuts[1] } else { 0 };
            let (mine, shape) = columns(&given[rows.start * vocab..rows.end * vocab], vocab, &[first, vocab], softcap);
            let buf = |dtype, values: &[f64]| buf(&**dev, dtype, values);
            let each = stats.chunks(VocabPart::STATS * targets.len());
            let own = each.flat_map(|part| &part[VocabPart::STATS * rows.start..VocabPart::STATS * rows.end]);
            let said = buf(DType::F32, &own.copied().collect::<Vec<_>>());
            let (targets, scale) = (buf(DType::I32, &targets[rows.clone()]), buf(DType::F32, &scales[rows.clone()]));
            let (mut logits, mut loss) = (buf(DType::F32, &mine), buf(DType::F64, &vec![0.0; rows.len()]));
            let (targets, scale) = (targets.view(), Some(scale.view()));
            match parts {
                false => dev.cross_entropy(CrossEntropy {
                    shape,
                    targets,
                    by_row,
                    scale,
                    logits: logits.view_mut(),
                    loss: loss.view_mut(),
                }),
                true => dev.cross_entropy_finish(CrossEntropyFinish {
                    shape,
                    part: VocabPart { first, of: vocab },
                    targets,
                    stats: said.view(),
                    by_row,
                    scale,
                    logits: logits.view_mut(),
                    loss: loss.view_mut(),
                }),
            }
            .unwrap();
            (read(&**dev, &loss), read(&**dev, &logits))
        };
        for parts in [false, true] {
            let (losses, gradients) = run(0..targets.len(), parts, true);
            let alone: (Vec<_>, Vec<_>) = (0..targets.len()).map(|row| run(row..row + 1, parts, false)).unzip();
            assert_eq!((losses, gradients), (alone.0.concat(), alone.1.concat()), "softcap {softcap}, parts {parts}");
        }
    }
}

#[test]
fn entropies_of_rows() {
    for (dev, vocab) in devices().iter().filter(|dev| dev.has_entropies()).flat_map(|dev| [(dev, 5), (dev, 3000)]) {
        let targets = [0.0, -100.0, 4.0];
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::Bf16, 0.05)] {
            let mut given: Vec<f64> = normal(3, 3 * vocab).iter().map(|x| x * 3.0).collect();
            given[1] = f64::NEG_INFINITY;
            let (ids, logits) = (buf(&**dev, DType::I32, &targets), buf(&**dev, dtype, &given));
            let mut entropies = buf(&**dev, DType::F32, &[7.0; 3]);
            dev.row_entropies(RowEntropies {
                shape: CrossEntropyShape { vocab, softcap: 0.0 },
                targets: ids.view(),
                logits: logits.view(),
                entropies: entropies.view_mut(),
            })
            .unwrap();
            let expected = given.chunks(vocab).zip(targets).map(|(row, target)| {
                let total: f64 = row.iter().map(|z| z.exp()).sum();
                let of = |z: &f64| if z.is_finite() { z.exp() / total * (total.ln() - z) } else { 0.0 };
                if target < 0.0 { 0.0 } else { row.iter().map(of).sum::<f64>() }
            });
            for (ours, theirs) in read(&**dev, &entropies).into_iter().zip(expected) {
                assert!((ours - theirs).abs() <= tolerance * theirs.max(1.0), "{dtype} {vocab}: {ours} and {theirs}");
            }
        }
    }
}

/// Distillation of (rows, vocab) logits against f64: the loss, then the gradient.
fn distilled(
    (alpha, t, caps, reverse): (f64, f64, [f64; 2], bool),
    targets: &[f64],
    [student, teacher]: [&[f64]; 2],
    vocab: usize,
) -> (f64, Vec<f64>) {
    let capped = |x: f64, cap: f64| if cap == 0.0 { x } else { cap * (x / cap).tanh() };
    let logs = |row: &[f64], cap: f64, t: f64| {
        let z: Vec<f64> = row.iter().map(|&x| capped(x, cap) / t).collect();
        let max = z.iter().copied().fold(f64::MIN, f64::max);
        let total = max + z.iter().map(|z| (z - max).exp()).sum::<f64>().ln();
        z.into_iter().map(|z| z - total).collect::<Vec<_>>()
    };
    let (mut loss, mut gradient) = (0.0, vec![0.0; student.len()]);
    for (row, &target) in targets.iter().enumerate().filter(|(_, target)| **target >= 0.0) {
        let own = row * vocab..(row + 1) * vocab;
        let (q1, q) = (logs(&student[own.clone()], caps[0], 1.0), logs(&student[own.clone()], caps[0], t));
        let p = logs(&teacher[own.clone()], caps[1], t);
        loss -= (1.0 - alpha) * q1[target as usize];
        // Words that a model never says add nothing to the divergence from the other.
        let reversed: f64 = q.iter().zip(&p).filter(|(q, _)| q.exp() > 0.0).map(|(q, p)| q.exp() * (q - p)).sum();
        loss += if reverse { alpha * t * t * reversed } else { 0.0 };
        for (i, at) in own.enumerate() {
            let hot = f64::from(u8::from(i == target as usize));
            if p[i].exp() > 0.0 && !reverse {
                loss += alpha * t * t * p[i].exp() * (p[i] - q[i]);
            }
            let slope = if caps[0] == 0.0 { 1.0 } else { 1.0 - (student[at] / caps[0]).tanh().powi(2) };
            let pull = match reverse {
                false => q[i].exp() - p[i].exp(),
                true if q[i].exp() > 0.0 => q[i].exp() * (q[i] - p[i] - reversed),
                true => 0.0,
            };
            let both = (1.0 - alpha) * (q1[i].exp() - hot) + alpha * t * pull;
            gradient[at] = 0.125 * slope * both;
        }
    }
    (loss, gradient)
}

/// The f64 gradient of the reverse divergence is the slope of its loss.
#[test]
fn the_reverse_divergence_has_the_slope_of_its_loss() {
    let (student, teacher) = (normal(3, 11), normal(4, 11));
    for case in [(1.0, 1.0, [0.0, 0.0], true), (0.6, 2.0, [2.0, 3.0], true)] {
        let of = |student: &[f64]| distilled(case, &[4.0], [student, &teacher], 11);
        for (i, gradient) in of(&student).1.into_iter().enumerate() {
            let [up, down] = [1e-5, -1e-5].map(|by| {
                let mut moved = student.clone();
                moved[i] += by;
                of(&moved).0
            });
            let slope = 0.125 * (up - down) / 2e-5;
            assert!((slope - gradient).abs() < 1e-8, "{case:?} {i}: {gradient}, finite difference {slope}");
        }
    }
}

/// Of a whole vocabulary and in parts, with and without softcaps; a word that the weighting model never says adds
/// nothing.
#[test]
fn distillation() {
    let cases = [
        (0.5, 1.0, [0.0, 0.0], false),
        (0.25, 2.5, [0.0, 0.0], false),
        (1.0, 0.5, [0.0, 0.0], false),
        (0.7, 2.0, [5.0, 9.0], false),
        (1.0, 1.0, [0.0, 0.0], true),
        (0.6, 2.0, [5.0, 9.0], true),
    ];
    let sizes: [(&[usize], &[f64]); 3] = [
        (&[0, 37], &[3.0, -100.0, 36.0]),
        (&[0, 1, 20, 37], &[0.0, 36.0, -100.0, 1.0, 20.0]),
        (&[0, 3000, 5003], &[5002.0, 17.0, 2999.0]),
    ];
    for (dev, dtype) in devices().iter().flat_map(|dev| FLOATS.map(|dtype| (dev, dtype))) {
        // GPUs refuse the reverse divergence by name.
        let cases = cases.iter().filter(|case| !case.3 || dev.has_entropies());
        for ((alpha, t, caps, reverse), (cuts, targets)) in cases.flat_map(|case| sizes.map(|size| (*case, size))) {
            let (vocab, n) = (cuts[cuts.len() - 1], targets.len());
            let given = |seed: u64| {
                let mut logits: Vec<f64> = normal(seed, vocab * n).iter().map(|x| x * 4.0).collect();
                logits[5] = if (seed == 2) != reverse { f64::NEG_INFINITY } else { logits[5] };
                read(&**dev, &buf(&**dev, dtype, &logits))
            };
            let [student, teacher] = [given(1), given(2)];
            let (loss, gradient) = distilled((alpha, t, caps, reverse), targets, [&student, &teacher], vocab);
            let terms =
                DistillTerms { alpha: alpha as f32, temperature: t as f32, teacher_cap: caps[1] as f32, reverse };
            let (softcap, scale) = (caps[0] as f32, buf(&**dev, DType::F32, &[0.125]));
            let words = buf(&**dev, DType::I32, targets);
            let of = |part: &[usize]| {
                let (logits, shape) = columns(&student, vocab, part, softcap);
                let taught = buf(&**dev, dtype, &columns(&teacher, vocab, part, 0.0).0);
                (shape, VocabPart { first: part[0], of: vocab }, taught, buf(&**dev, dtype, &logits))
            };
            let stats = |part: &[usize]| {
                let (shape, part, taught, logits) = of(part);
                let mut stats = buf(&**dev, DType::F32, &vec![7.0; DistillTerms::STATS * n]);
                let (targets, teacher, logits) = (words.view(), taught.view(), logits.view());
                dev.distill_part(DistillPart { shape, part, terms, targets, teacher, logits, stats: stats.view_mut() })
                    .unwrap();
                read(&**dev, &stats)
            };
            let stats = buf(&**dev, DType::F32, &cuts.windows(2).flat_map(stats).collect::<Vec<_>>());
            let mut sums = Vec::new();
            for cut in cuts.windows(2) {
                let ((shape, part, taught, mut logits), mut sum) = (of(cut), buf(&**dev, DType::F64, &[2.5]));
                dev.distill_finish(DistillFinish {
                    shape,
                    part,
                    terms,
                    targets: words.view(),
                    teacher: taught.view(),
                    stats: stats.view(),
                    scale: scale.view(),
                    logits: logits.view_mut(),
                    loss: sum.view_mut(),
                })
                .unwrap();
                let what =
                    format!("{} {dtype} alpha {alpha} T {t} {caps:?} reverse {reverse} columns {cut:?}", dev.name());
                let found = read(&**dev, &sum)[0] - 2.5;
                assert!((found - loss).abs() < 1e-5 * loss, "{what}: {found}, f64 {loss}");
                sums.push(found);
                let rounds = [0.0, 0.00390625, 0.00048828125][FLOATS.iter().position(|d| *d == dtype).unwrap()];
                for (ours, theirs) in read(&**dev, &logits).iter().zip(columns(&gradient, vocab, cut, 0.0).0) {
                    let allowed = 1e-6 + rounds * theirs.abs();
                    assert!((ours - theirs).abs() < allowed, "{what}: {ours}, f64 {theirs}");
                }
            }
            assert!(sums.iter().all(|sum| sum == &sums[0]), "ranks have other losses: {sums:?}");
        }
    }
}
