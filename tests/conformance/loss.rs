//! Cross entropy.
use crate::harness::*;
use crate::reference;
use flatshard::base::DType;
use flatshard::device::CrossEntropy;

#[test]
fn cross_entropy() {
    for (vocab, targets) in
        [(1, vec![0]), (7, vec![6, -100, 0]), (256, vec![-100; 2]), (5000, vec![4999, 0, 17]), (2, vec![])]
    {
        let logits: Vec<f64> = normal(vocab as u64, vocab * targets.len()).iter().map(|x| x * 4.0).collect();
        for (grad, cap) in [(false, 0.0), (true, 0.0), (false, 3.0), (true, 3.0)] {
            let shape = CrossEntropy { vocab, scale: 0.125, grad, softcap: cap as f32 };
            conform(
                "cross_entropy",
                GRADIENT,
                &[
                    operand("targets", Kind::Fixed(DType::I32), Role::Input, targets.iter().copied()),
                    y("logits", &logits),
                    operand("loss", Kind::Fixed(DType::F64), Role::Output, [2.5]),
                ],
                reference::cross_entropy::<f64>((vocab, 0.125, grad, cap), &targets, &logits, 2.5),
                reference::cross_entropy::<f32>((vocab, 0.125, grad, cap), &targets, &logits, 2.5),
                &|dev, bufs| {
                    let [targets, logits, loss] = bufs else { unreachable!() };
                    dev.cross_entropy(&shape, targets.view(), logits.view_mut(), loss.view_mut())
                },
            );
        }
    }
}

#[test]
fn cross_entropy_of_extreme_logits() {
    for dev in devices() {
        let shape = CrossEntropy { vocab: 4, scale: 1.0, grad: true, softcap: 0.0 };
        let rows = [[1e4, -1e4, f64::NEG_INFINITY, 0.0], [-1e30, -1e30, -1e30, -1e30]];
        let mut logits = buf(&*dev, DType::F32, rows.as_flattened());
        let (targets, mut loss) = (buf(&*dev, DType::I32, &[1.0, 2.0]), buf(&*dev, DType::F64, &[0.0]));
        dev.cross_entropy(&shape, targets.view(), logits.view_mut(), loss.view_mut()).unwrap();
        assert!((read(&*dev, &loss)[0] - 2e4 - 4f64.ln()).abs() < 1e-6);
        assert_eq!(read(&*dev, &logits), [1.0, -1.0, 0.0, 0.0, 0.25, 0.25, -0.75, 0.25]);
    }
}

#[test]
fn a_nan_among_the_logits_reaches_the_loss() {
    for dev in devices() {
        for (at, softcap) in [(0, 0.0), (17, 0.0), (39, 0.0), (17, 5.0)] {
            let shape = CrossEntropy { vocab: 40, scale: 1.0, grad: false, softcap };
            let mut row = [0.5; 40];
            row[at] = f64::NAN;
            let mut logits = buf(&*dev, DType::F32, &row);
            let (targets, mut loss) = (buf(&*dev, DType::I32, &[1.0]), buf(&*dev, DType::F64, &[0.0]));
            dev.cross_entropy(&shape, targets.view(), logits.view_mut(), loss.view_mut()).unwrap();
            assert!(read(&*dev, &loss)[0].is_nan(), "NaN at {at}");
        }
    }
}

#[test]
fn cross_entropy_names_a_target_outside_the_vocabulary() {
    for dev in devices() {
        let shape = CrossEntropy { vocab: 4, scale: 1.0, grad: true, softcap: 0.0 };
        for wrong in [4.0, -1.0, -99.0] {
            let mut logits = buf(&*dev, DType::F32, &[0.5; 8]);
            let (targets, mut loss) = (buf(&*dev, DType::I32, &[1.0, wrong]), buf(&*dev, DType::F64, &[0.0]));
            let error = dev.cross_entropy(&shape, targets.view(), logits.view_mut(), loss.view_mut());
            let error = settled(&*dev, error, &targets).unwrap_err().to_string();
            assert!(error.contains(&format!("target {wrong}")) && error.contains("0..4"), "{error}");
            assert_eq!(read(&*dev, &logits), [0.5; 8], "nothing is written");
        }
    }
}
