//! Data sets mixed by weight: the source of each sample, the order of its rows, their ranks on each mesh, and the
//! held-out rows of each source. Also the separate evaluation data set.
use super::*;

/// Three sources in one: 40 rows of 3 tokens that start with 0.., 100 that start with 1000.., and a stream.
fn mixed(weights: [f64; 3]) -> (Files, Arc<Dataset>) {
    let rows = |n: u32, from: u32| -> String {
        (from..from + n).map(|r| format!("{{\"input_ids\": [{r}, 1, 2]}}\n")).collect()
    };
    let files = Files::with("a.jsonl", rows(40, 0));
    files.put("b.jsonl", rows(100, 1000));
    files.put("c.txt", "abcdefgh".repeat(100));
    let open = |name| Dataset::open(&DataOptions { vocab: 5000, ..files.options(name, 8) }).unwrap();
    let parts = ["a.jsonl", "b.jsonl", "c.txt"].map(open).into_iter().zip(weights);
    let data = Dataset::mix(parts.collect()).unwrap();
    (files, Arc::new(data))
}
/// The source of a row, by its first token.
fn source(row: u32) -> usize {
    match row {
        97..=104 | 256 => 2,
        0..40 => 0,
        _ => 1,
    }
}
fn kept() -> LoaderOptions {
    LoaderOptions { held_out: Some(vec![0, 10, 0]), ..load(1, 1, 0, 1, true) }
}

#[test]
fn each_source_gives_its_share_of_every_prefix_and_each_row_once_per_epoch() {
    let (_files, data) = mixed([0.5, 0.3, 0.2]);
    let mut loader = Loader::new(data.clone(), kept()).unwrap();
    assert_eq!(loader.rows_per_epoch(), 40 + 90 + 100, "as many samples as rows to train on");
    let first = |row: u64| {
        let (mut tokens, mut targets) = (vec![0; data.row_len(row)], vec![0; data.row_len(row)]);
        data.fill(row, &mut tokens, &mut targets);
        tokens[0]
    };
    let mut rows: [Vec<u64>; 3] = Default::default();
    for n in 0..1000 {
        let row = loader.row(n);
        rows[source(first(row))].push(row);
        for (rows, share) in rows.iter().zip([0.5, 0.3, 0.2]) {
            assert!((rows.len() as f64 - share * (n + 1) as f64).abs() < 1.0, "after {n}");
        }
    }
    assert_eq!(rows.each_ref().map(Vec::len), [500, 300, 200]);
    for (rows, (first, own)) in rows.iter().zip([(0, 40), (40, 90), (140, 100)]) {
        let epochs: Vec<&[u64]> = rows.chunks_exact(own).collect();
        for epoch in &epochs {
            assert!(epoch.iter().collect::<BTreeSet<_>>().into_iter().copied().eq(first..first + own as u64));
        }
        assert_eq!(epochs.iter().collect::<BTreeSet<_>>().len(), epochs.len(), "orders repeat");
    }
    // File order without shuffle, and another order with another seed.
    let mut plain = Loader::new(data.clone(), LoaderOptions { shuffle: false, ..kept() }).unwrap();
    let of_first: Vec<u64> = (0..200).map(|n| plain.row(n)).filter(|&row| row < 40).collect();
    assert!(of_first.into_iter().eq((0..40).cycle().take(100)));
    let mut other = Loader::new(data, LoaderOptions { seed: 8, ..kept() }).unwrap();
    assert!((0..50).map(|n| other.row(n)).ne((0..50).map(|n| loader.row(n))));
}

/// What all ranks train on in the steps from sample `from` on: the first token of each document, sorted; and the
/// sources' counts after each step.
fn steps_of(
    data: &Arc<Dataset>,
    batch: usize,
    accum: usize,
    dp: usize,
    packing: bool,
    from: u64,
) -> Vec<(Vec<u32>, StepData)> {
    let options = |dp_rank| LoaderOptions {
        packing,
        by_length: true,
        passes: 1,
        held_out: Some(vec![0, 10, 0]),
        ..load(batch, accum, dp_rank, dp, true)
    };
    let mut ranks: Vec<Loader> = (0..dp).map(|rank| Loader::new(data.clone(), options(rank)).unwrap()).collect();
    ranks.iter_mut().for_each(|loader| loader.seek(from));
    let mut all = || {
        let datas: Vec<StepData> = ranks.iter_mut().map(step).collect();
        assert!(datas.iter().all(|d| (d.position, &d.by_source) == (datas[0].position, &datas[0].by_source)));
        let batches = datas.iter().flat_map(|data| &data.batches);
        let first = |batch: &MicroBatch| {
            let starts = batch.cu_seqlens[..batch.cu_seqlens.len() - 1].iter();
            starts.map(|&at| batch.tokens[at as usize]).collect::<Vec<u32>>()
        };
        let mut rows: Vec<u32> = batches.flat_map(first).collect();
        rows.sort_unstable();
        (rows, StepData { batches: vec![], ..datas[0].clone() })
    };
    (0..60).map(|_| all()).collect()
}

#[test]
fn a_mixtures_steps_do_not_depend_on_mesh_or_restarts_and_counts_are_exact() {
    let (_files, data) = mixed([0.2, 0.5, 0.3]);
    for packing in [false, true] {
        let whole = steps_of(&data, 12, 1, 1, packing, 0);
        for (batch, accum, dp) in [(2, 2, 3), (3, 1, 4), (1, 6, 2)] {
            assert_eq!(steps_of(&data, batch, accum, dp, packing, 0), whole, "{batch} x {accum} x {dp}");
        }
        let mut counts = vec![0; 3];
        for (n, (rows, now)) in whole.iter().enumerate() {
            rows.iter().for_each(|&row| counts[source(row)] += 1);
            assert_eq!((&now.by_source, now.position), (&counts, counts.iter().sum()), "step {n}");
            if n % 13 == 4 {
                let again = steps_of(&data, 2, 2, 3, packing, now.position);
                assert_eq!(again[..40 - n.min(40)], whole[n + 1..][..40 - n.min(40)], "from step {n}");
            }
        }
        let due = |share: f64| share * whole.last().unwrap().1.position as f64;
        let far = if packing { 200.0 } else { 1.0 }; // a started window may have any sequences left
        assert!(
            counts.iter().zip([0.2, 0.5, 0.3]).all(|(n, share)| (*n as f64 - due(share)).abs() < far),
            "{counts:?}"
        );
    }
}

#[test]
fn each_source_of_a_mixture_holds_out_its_own_rows() {
    let (_files, data) = mixed([1.0, 1.0, 2.0]);
    let loader = Loader::new(data.clone(), load(4, 1, 0, 1, true)).unwrap();
    // 1 %, at least 8 rows, if that is at most a tenth: of 40 rows none.
    assert_eq!(loader.rows_per_epoch(), 40 + 92 + 92);
    let mut held = loader.held_out().unwrap();
    assert!((0..16).map(|n| held.row(n)).eq((132..140).chain(232..240)));
    assert_eq!(data.report().rows, 240);
    let line = data.report().to_string();
    assert!(line.starts_with("mixture of 25 % ") && line.contains("c.txt") && line.contains("240 samples"), "{line}");
    assert_eq!(data.shares(), Some(&[1, 1, 2][..]));
    let other = mixed([1.0, 1.0, 3.0]).1;
    assert_eq!(other.fingerprint(), data.fingerprint(), "the same rows");
    refused(Loader::new(data, LoaderOptions { held_out: Some(vec![0, 0, 100]), ..kept() }), &["100 rows", "held out"]);
    // A mixture of one data set is that data set.
    let (_files, data) = mixed([1.0; 3]);
    assert!(data.shares().is_some());
    let alone = Dataset::mix(vec![(Dataset::open(&synthetic(4, 1)).unwrap(), 0.3)]).unwrap();
    assert!(alone.shares().is_none() && alone.loss_floor().is_some());
}

#[test]
fn an_evaluation_data_set_is_read_exactly_once_by_all_ranks_together() {
    let (_files, data) = mixed([1.0; 3]);
    for (batch, accum, dp) in [(7, 2, 2), (1, 1, 1), (5, 3, 4), (200, 1, 2)] {
        let (mut seen, mut samples) = (BTreeMap::<u32, u32>::new(), 0);
        for rank in 0..dp {
            let options = LoaderOptions { packing: true, by_length: true, ..load(batch, accum, rank, dp, true) };
            let mut all = Loader::evaluating(data.clone(), &options);
            for _ in 0..all.rows_per_epoch().div_ceil(options.global_batch()) {
                let step = step(&mut all);
                samples += if rank == 0 { step.samples } else { 0 };
                for micro in step.batches {
                    let documents = micro.cu_seqlens.windows(2).map(|w| w[0] as usize);
                    let counted = documents.filter(|&at| micro.targets[at] != IGNORE);
                    counted.for_each(|at| *seen.entry(micro.tokens[at]).or_default() += 1);
                }
            }
        }
        assert_eq!(samples, 240);
        let rows = seen.range(..40).chain(seen.range(1000..));
        assert!(rows.map(|(row, n)| (*row, *n)).eq((0..40).chain(1000..1100).map(|row| (row, 1))), "{seen:?}");
        assert_eq!(seen.range(97..=256).map(|(_, n)| n).sum::<u32>(), 100);
    }
}
