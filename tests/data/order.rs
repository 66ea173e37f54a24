//! Which rows each rank gets, in which order, and where a resumed loader continues. Never looks at their content.
use super::*;

// --- who gets which rows

#[test]
fn permutations_are_bijections() {
    let sizes = (0..70).chain([255, 256, 257, 1000, 1023, 1024, 1025, 4095, 4097, 65_537, 100_003]);
    for n in sizes {
        let p = Permutation::new(n, Rng::new(n, 3));
        let mut seen = vec![false; n as usize];
        for i in 0..n {
            assert!(!std::mem::replace(&mut seen[p.at(i) as usize], true), "{n}: {} twice", p.at(i));
        }
    }
    // Too large to enumerate: a sample is distinct and below n.
    let n = (1 << 40) + 7;
    let p = Permutation::new(n, Rng::new(1, 3));
    let images: BTreeSet<u64> = (0..10_000).chain(n - 10_000..n).map(|i| p.at(i)).collect();
    assert_eq!(images.len(), 20_000);
    assert!(*images.last().unwrap() < n);
}

#[test]
fn permutations_look_random() {
    // Over many seeds, each of 10 items lands on each position about equally often.
    let (n, trials) = (10u64, 20_000u64);
    let mut counts = vec![0f64; 100];
    for seed in 0..trials {
        let p = Permutation::new(n, Rng::new(seed, 0));
        (0..n).for_each(|i| counts[(i * n + p.at(i)) as usize] += 1.0);
    }
    let expected = (trials / n) as f64;
    let chi: f64 = counts.iter().map(|c| (c - expected).powi(2) / expected).sum();
    // 81 degrees of freedom: mean 81, sd 12.7.
    assert!(chi < 81.0 + 5.0 * 12.7, "chi squared {chi}");
    // Neighbors do not stay neighbors.
    let p = Permutation::new(100_000, Rng::new(5, 0));
    let close = (1..100_000).filter(|&i| p.at(i).abs_diff(p.at(i - 1)) < 100).count();
    assert!(close < 400, "{close} of 100000 neighbours are within 100: about 200 would be chance");
}

/// A data set whose row r has the token r (and a second one, so that there is loss).
fn numbered(n: u64) -> (Files, Arc<Dataset>) {
    let lines: String = (0..n).map(|r| format!("{{\"input_ids\": [{r}, 1]}}\n")).collect();
    let files = Files::with("t.jsonl", lines);
    let data = Dataset::open(&DataOptions { vocab: 1 << 20, ..files.options("t.jsonl", 2) }).unwrap();
    (files, Arc::new(data))
}

/// The rows of `steps` optimizer steps of all ranks: by step, then by micro-batch, rank, row.
fn consumed(data: &Arc<Dataset>, batch: usize, accum: usize, dp: usize, shuffle: bool, steps: usize) -> Vec<Vec<u32>> {
    let ranks = (0..dp).map(|rank| Loader::new(data.clone(), load(batch, accum, rank, dp, shuffle)).unwrap());
    let mut ranks: Vec<Loader> = ranks.collect();
    let mut all = || {
        let ranks: Vec<StepData> = ranks.iter_mut().map(step).collect();
        let batches = (0..accum).flat_map(|micro| ranks.iter().map(move |rank| &rank.batches[micro]));
        batches.flat_map(|batch| batch.tokens.iter().step_by(2).copied()).collect()
    };
    (0..steps).map(|_| all()).collect()
}

#[test]
fn without_shuffle_step_s_takes_rows_from_s_times_g_and_all_are_used() {
    let (_files, data) = numbered(64);
    let steps = consumed(&data, 2, 2, 2, false, 9);
    for (s, rows) in steps.iter().enumerate() {
        let expected: Vec<u32> = (0..8).map(|i| (s as u32 * 8 + i) % 64).collect();
        assert_eq!(*rows, expected, "step {s}");
    }
}

/// As Accelerate's samplers do. A step that can be smaller is refused.
#[test]
fn fewer_rows_than_ranks_are_repeated_within_a_step() {
    let (_files, data) = numbered(3);
    assert_eq!(consumed(&data, 1, 1, 4, false, 3), [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2]]);
    let packed = LoaderOptions { packing: true, ..load(1, 1, 3, 4, false) };
    assert_eq!(step(&mut Loader::new(data.clone(), packed).unwrap()).batches[0].tokens, [0, 1]);
    for (batch, accum) in [(2, 1), (1, 2)] {
        refused(Loader::new(data.clone(), load(batch, accum, 0, 4, false)), &["has 3 rows", "with the first two at 1"]);
    }
}

#[test]
fn a_steps_rows_do_not_depend_on_how_it_is_split() {
    let (_files, data) = numbered(1003); // 1003 - 10 held out: an epoch is not a whole number of steps
    for shuffle in [false, true] {
        let whole = consumed(&data, 8, 1, 1, shuffle, 300);
        for (batch, accum, dp) in [(4, 1, 2), (2, 1, 4), (2, 2, 2), (1, 2, 4), (1, 8, 1)] {
            assert_eq!(consumed(&data, batch, accum, dp, shuffle, 300), whole, "{batch} x {accum} x {dp}");
        }
    }
}

#[test]
fn each_epoch_has_every_training_row_once_in_a_new_order() {
    let (_files, data) = numbered(1000);
    let stream: Vec<u32> = consumed(&data, 4, 1, 2, true, 500).concat();
    let epoch = Loader::new(data.clone(), load(4, 1, 0, 2, true)).unwrap().rows_per_epoch() as usize;
    assert_eq!(epoch, 990); // 1 % of 1000 rows is held out
    let epochs: Vec<&[u32]> = stream.chunks_exact(epoch).collect();
    assert_eq!(epochs.len(), 4);
    for epoch in &epochs {
        let rows: BTreeSet<u32> = epoch.iter().copied().collect();
        assert!(rows.into_iter().eq(0..990));
    }
    assert!(epochs.iter().collect::<BTreeSet<_>>().len() == 4, "orders repeat");
    let other = LoaderOptions { seed: 8, ..load(4, 1, 0, 2, true) };
    let mut other = Loader::new(data, other).unwrap();
    assert_ne!((0..990).map(|n| other.row(n) as u32).collect::<Vec<_>>(), epochs[0], "the seed changes nothing");
}

#[test]
fn a_loader_continues_from_any_position() {
    let (_files, data) = numbered(101);
    let mut one = Loader::new(data.clone(), load(8, 1, 0, 1, true)).unwrap();
    for n in 0..40 {
        assert_eq!(one.position(), n * 8);
        // Another world size: 2 ranks, 2 micro-batches.
        let mut ranks = [0, 1].map(|rank| Loader::new(data.clone(), load(2, 2, rank, 2, true)).unwrap());
        ranks.iter_mut().for_each(|loader| loader.seek(n * 8));
        let steps = ranks.each_mut().map(step);
        let rows: Vec<u32> = (0..4).flat_map(|i| steps[i % 2].batches[i / 2].tokens.clone()).collect();
        assert_eq!(ranks.map(|l| l.position()), [(n + 1) * 8; 2]);
        assert_eq!(steps.map(|s| (s.samples, s.tokens, s.position)), [(8, 16, (n + 1) * 8); 2]);
        assert_eq!(rows, next(&mut one).tokens, "step {n}");
    }
}

#[test]
fn held_out_and_training_rows_partition_the_data_set() {
    for (n, held) in [(1000, 10), (5000, 50), (100_000, 256), (81, 8), (79, 0)] {
        let data = Arc::new(Dataset::open(&DataOptions { max_samples: Some(n), ..synthetic(2, 1) }).unwrap());
        // For any size of a step.
        for batch in [1, 4, 7, 30] {
            let train = Loader::new(data.clone(), load(batch, 1, 0, 2, true)).unwrap();
            assert_eq!(train.rows_per_epoch(), n - held, "{n} rows");
            let Some(mut rest) = train.held_out() else {
                assert_eq!(held, 0, "{n} rows");
                continue;
            };
            assert_eq!(rest.rows_per_epoch(), held);
            assert!((0..held).map(|i| rest.row(i)).eq(n - held..n), "{n} rows");
            assert!(rest.held_out().is_none());
        }
    }
    // An evaluation on all ranks together reads each held-out row once, whether or not batches divide them: padding
    // rows have no loss, and every rank has the same number of micro-batches.
    let (_files, data) = numbered(1000);
    for (batch, accum, dp, steps) in [(2, 2, 2, 2), (5, 1, 2, 1), (3, 1, 1, 4), (4, 1, 7, 1)] {
        let (mut seen, mut samples) = (BTreeMap::<u32, u32>::new(), 0);
        for rank in 0..dp {
            let mut held = Loader::new(data.clone(), load(batch, accum, rank, dp, true)).unwrap().held_out().unwrap();
            for _ in 0..steps {
                let step = step(&mut held);
                samples += if rank == 0 { step.samples } else { 0 };
                for micro in step.batches {
                    assert_eq!(micro.tokens.len(), 2 * batch);
                    let rows = micro.tokens.chunks(2).zip(micro.targets.chunks(2));
                    let counted = rows.filter(|(_, targets)| targets[0] != IGNORE);
                    counted.for_each(|(row, _)| *seen.entry(row[0]).or_default() += 1);
                }
            }
            assert!(held.position() >= held.rows_per_epoch());
        }
        assert!(seen.into_iter().eq((990..1000).map(|row| (row, 1))), "{batch} x {accum} x {dp}");
        assert_eq!(samples, 10);
    }
}

/// A resumed run holds out what it held out at first, whatever the current data would suggest.
#[test]
fn a_resumed_run_holds_out_the_same_rows() {
    let (_files, data) = numbered(1000);
    let fixed = |held_out| LoaderOptions { held_out: Some(vec![held_out]), ..load(4, 1, 0, 2, true) };
    let mut train = Loader::new(data.clone(), fixed(24)).unwrap();
    assert!((0..2 * 976).all(|n| train.row(n) < 976));
    assert_eq!(train.held_out().unwrap().rows_per_epoch(), 24);
    assert!(Loader::new(data.clone(), fixed(0)).unwrap().held_out().is_none());
    refused(Loader::new(data, fixed(1000)), &["1000 rows", "held out"]);
}

#[test]
fn max_samples_takes_the_first_rows() {
    let (files, _data) = numbered(50);
    let options = DataOptions { vocab: 1 << 20, max_samples: Some(7), ..files.options("t.jsonl", 2) };
    let data = Arc::new(Dataset::open(&options).unwrap());
    assert_eq!(consumed(&data, 7, 1, 1, false, 2), [[0, 1, 2, 3, 4, 5, 6]; 2]);
}

#[test]
fn a_micro_batch_is_filled_in_place() {
    let (_files, data) = numbered(1000);
    let mut loader = Loader::new(data, load(4, 1, 0, 2, true)).unwrap();
    let mut data = step(&mut loader);
    let place = |data: &StepData| {
        let b = &data.batches[0];
        (b.tokens.as_ptr(), b.targets.as_ptr(), b.positions.as_ptr(), b.cu_seqlens.as_ptr(), b.cu_seqlens.capacity())
    };
    let (first, tokens) = (place(&data), data.batches[0].tokens.clone());
    for _ in 0..300 {
        loader.next(&mut data);
        assert_eq!(place(&data), first);
    }
    assert_ne!(data.batches[0].tokens, tokens);
}

/// However steps and rows divide.
#[test]
fn epochs_end_in_the_step_with_their_last_row() {
    for (rows, global, passes) in
        [(30, 29, 1), (30, 20, 1), (30, 10, 1), (232, 7, 1), (12, 12, 1), (12, 4, 3), (10, 4, 2)]
    {
        let (_files, data) = numbered(rows);
        let mut loader = Loader::new(
            data,
            LoaderOptions { passes, held_out: Some(vec![0]), ..load(global as usize, 1, 0, 1, true) },
        )
        .unwrap();
        let (epochs, mut before) = (loader.epochs(), 0);
        let mut ends = [vec![], vec![]];
        for number in 1..=120 {
            let samples = before..step(&mut loader).position;
            before = samples.end;
            for (parts, ends) in [1, 4].into_iter().zip(&mut ends) {
                if epochs.end(parts, samples.clone()) {
                    ends.push(number);
                }
            }
        }
        for (parts, ends) in [1, 4].into_iter().zip(ends) {
            let last_row = |n: u64| (n * rows).div_ceil(parts);
            let expected: BTreeSet<u64> = (1..4000).map(|n| last_row(n).div_ceil(global) * passes as u64).collect();
            let expected: Vec<u64> = expected.into_iter().filter(|&step| step <= 120).collect();
            assert_eq!(ends, expected, "{rows} rows, {global} a step, {passes} passes, {parts} parts");
        }
    }
}
