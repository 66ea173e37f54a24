//! Packing, length balancing and prefetching on any world size. Never trains: tests/cli/sft.rs checks that packed
//! samples do not attend to each other.
use super::*;
use flatshard::data::{Prefetch, PrefetchOptions};

/// Row r is `r`, padded with ones to length `len(r)`.
fn skewed(n: u64, max_len: usize) -> (Files, Arc<Dataset>) {
    let len = |r: u64| 2 + (Rng::new(3, 1).uniform(r).powi(3) * (max_len - 1) as f64) as usize;
    let row = |r: u64| format!("{{\"input_ids\": {:?}}}\n", [vec![r], vec![1; len(r) - 1]].concat());
    let files = Files::with("t.jsonl", (0..n).map(row).collect::<String>());
    let data = Dataset::open(&DataOptions { vocab: 1 << 20, ..files.options("t.jsonl", max_len) }).unwrap();
    (files, Arc::new(data))
}

fn packed(batch: usize, accum: usize, rank: usize, dp: usize) -> LoaderOptions {
    LoaderOptions { packing: true, ..load(batch, accum, rank, dp, true) }
}

/// The documents of a micro-batch, as row and length, after checking that positions restart.
fn documents(batch: &MicroBatch) -> Vec<(u32, usize)> {
    let borders = batch.cu_seqlens.windows(2).map(|w| w[0] as usize..w[1] as usize);
    let documents = borders.map(|range| {
        assert!(batch.positions[range.clone()].iter().copied().eq(0..range.len() as u32));
        assert_eq!(batch.targets[range.end - 1], IGNORE, "a document predicts nothing of the next");
        (batch.tokens[range.start], range.len())
    });
    let documents: Vec<_> = documents.collect();
    assert_eq!(documents.iter().map(|d| d.1).sum::<usize>(), batch.tokens.len());
    documents
}

/// The sorted rows of each step of all ranks, from sample `from` on.
fn steps_of(data: &Arc<Dataset>, batch: usize, accum: usize, dp: usize, from: u64, steps: usize) -> Vec<Vec<u32>> {
    let ranks = (0..dp).map(|rank| Loader::new(data.clone(), packed(batch, accum, rank, dp)).unwrap());
    let mut ranks: Vec<Loader> = ranks.collect();
    ranks.iter_mut().for_each(|loader| loader.seek(from));
    (0..steps)
        .map(|_| {
            let datas: Vec<StepData> = ranks.iter_mut().map(step).collect();
            let told = |d: &StepData| (d.samples, d.tokens, d.position);
            assert!(datas.iter().all(|d| told(d) == told(&datas[0])), "ranks disagree");
            let all: Vec<(u32, usize)> = datas.iter().flat_map(|d| &d.batches).flat_map(documents).collect();
            assert_eq!(all.len() as u64, datas[0].samples);
            assert_eq!(all.iter().map(|d| d.1 as u64).sum::<u64>(), datas[0].tokens);
            let mut rows: Vec<u32> = all.iter().map(|d| d.0).collect();
            rows.sort_unstable();
            rows
        })
        .collect()
}

#[test]
fn an_epoch_of_packed_samples_has_each_row_once_and_little_waste() {
    let (_files, data) = skewed(3000, 64);
    let options = packed(4, 2, 0, 1);
    let mut loader = Loader::new(data.clone(), options).unwrap();
    let epoch = loader.rows_per_epoch();
    let steps = loader.steps_until(epoch, u64::MAX);
    let counts = |steps| steps_of(&data, 4, 2, 1, 0, steps).iter().map(Vec::len).sum::<usize>() as u64;
    assert_eq!(Loader::new(data.clone(), packed(4, 2, 0, 1)).unwrap().steps_until(u64::MAX, 3), 3);
    assert!(counts(steps as usize - 1) < epoch && epoch <= counts(steps as usize));
    let mut loader = Loader::new(data.clone(), packed(4, 2, 0, 1)).unwrap();
    let (mut tokens, mut all) = (0, Vec::new());
    for _ in 1..steps {
        let data = step(&mut loader);
        tokens += data.tokens;
        all.extend(data.batches.iter().flat_map(documents).map(|d| d.0));
    }
    let distinct: BTreeSet<u32> = all.iter().copied().collect();
    assert_eq!(distinct.len(), all.len(), "a row twice within an epoch");
    let fill = tokens as f64 / ((steps - 1) * 8 * 64) as f64;
    assert!(fill > 0.97, "{fill} of the room is filled");
}

#[test]
fn packed_steps_do_not_depend_on_world_size_or_restarts() {
    let (_files, data) = skewed(5000, 64); // two windows per epoch, the second crosses its end
    let two = steps_of(&data, 1, 6, 2, 0, 400);
    assert_eq!(steps_of(&data, 2, 2, 3, 0, 400), two, "3 ranks");
    assert_eq!(steps_of(&data, 12, 1, 1, 0, 400), two, "1 rank");
    // Resumed on 3 ranks instead of 2, and with another number of micro-batches.
    let mut position = 0;
    for (n, rows) in two.iter().enumerate() {
        if n % 37 == 5 {
            assert_eq!(steps_of(&data, 2, 2, 3, position, 3), two[n..n + 3], "from step {n}");
            assert_eq!(steps_of(&data, 12, 2, 1, position, 1)[0].len(), rows.len() + two[n + 1].len());
        }
        position += rows.len() as u64;
    }
    let distinct: BTreeSet<&Vec<u32>> = two.iter().collect();
    assert!(distinct.len() > 390);
}

#[test]
fn seed_and_epoch_decide_what_is_packed_together() {
    let (_files, data) = skewed(2000, 64);
    let first = |seed: u64, at: u64| {
        let mut loader = Loader::new(data.clone(), LoaderOptions { seed, ..packed(8, 1, 0, 1) }).unwrap();
        loader.seek(at);
        next(&mut loader).tokens
    };
    let epoch = Loader::new(data.clone(), packed(8, 1, 0, 1)).unwrap().rows_per_epoch();
    assert_eq!(first(1, 0), first(1, 0));
    assert_ne!(first(1, 0), first(2, 0));
    assert_ne!(first(1, 0), first(1, epoch));
    // Without shuffle, sequences come in file order: row 0 is in the first step.
    let ordered = LoaderOptions { shuffle: false, ..packed(2, 1, 0, 1) };
    let batch = next(&mut Loader::new(data.clone(), ordered).unwrap());
    assert_eq!(documents(&batch)[0].0, 0);
}

/// Packed sequences under --compile: always one shape, and the padding has no loss and is not attended to.
#[test]
fn padded_batches_have_one_shape_and_the_same_loss() {
    let (_files, data) = skewed(1000, 64);
    let mut loader = Loader::new(data, packed(3, 1, 0, 1)).unwrap();
    for _ in 0..20 {
        let batch = next(&mut loader);
        let (n, borders) = (batch.tokens.len(), batch.cu_seqlens.len());
        let mut filled = batch.clone();
        filled.fill_up(3 * 64, 64);
        assert_eq!([filled.tokens.len(), filled.targets.len(), filled.positions.len()], [192; 3]);
        assert_eq!((filled.cu_seqlens.len(), filled.cu_seqlens.last()), (193, Some(&192)));
        assert!(filled.cu_seqlens.windows(2).all(|border| border[0] <= border[1] && border[1] - border[0] <= 64));
        assert!(filled.positions.iter().all(|&at| at < 64));
        assert_eq!(filled.loss_tokens(), batch.loss_tokens());
        let same = (&filled.tokens[..n], &filled.targets[..n], &filled.positions[..n], &filled.cu_seqlens[..borders]);
        assert_eq!(same, (&batch.tokens[..], &batch.targets[..], &batch.positions[..], &batch.cu_seqlens[..]));
    }
}

#[test]
fn a_step_of_more_sequences_than_an_epoch_packs_into_is_refused() {
    let (_files, data) = skewed(100, 64);
    refused(
        Loader::new(data.clone(), packed(40, 1, 0, 2)),
        &["92 rows to train on", "sequences of 64", "80 =", "`packing_samples`"],
    );
    assert!(Loader::new(data, packed(4, 1, 0, 2)).is_ok());
}

#[test]
fn length_balancing_keeps_a_steps_samples_and_evens_out_the_work() {
    let (_files, data) = skewed(4000, 512);
    let run = |by_length: bool| {
        let options = |rank| LoaderOptions { by_length, ..load(4, 3, rank, 4, true) };
        let mut ranks: Vec<Loader> = (0..4).map(|r| Loader::new(data.clone(), options(r)).unwrap()).collect();
        let (mut steps, mut waited, mut total) = (Vec::new(), 0, 0);
        for _ in 0..20 {
            let datas: Vec<StepData> = ranks.iter_mut().map(step).collect();
            for micro in 0..3 {
                let tokens: Vec<usize> = datas.iter().map(|d| d.batches[micro].tokens.len()).collect();
                assert!(datas.iter().all(|d| d.batches[micro].cu_seqlens.len() == 5), "4 rows each");
                waited += 4 * tokens.iter().max().unwrap();
                total += tokens.iter().sum::<usize>();
            }
            let mut rows: Vec<u32> = datas.iter().flat_map(|d| &d.batches).flat_map(documents).map(|d| d.0).collect();
            rows.sort_unstable();
            steps.push(rows);
        }
        (steps, total as f64 / waited as f64)
    };
    let (dealt, plain) = (run(true), run(false));
    assert_eq!(dealt.0, plain.0);
    assert!(dealt.1 > 0.93 && plain.1 < 0.75, "busy: {} dealt by length, {} in order", dealt.1, plain.1);
}

#[test]
fn prefetching_gives_the_loaders_steps_in_reused_buffers() {
    let (_files, data) = skewed(1000, 64);
    let mut direct = Loader::new(data.clone(), packed(2, 2, 1, 2)).unwrap();
    let start =
        |rank| Prefetch::start(Loader::new(data.clone(), packed(2, 2, rank, 2)).unwrap(), PrefetchOptions::default());
    let mut ahead = start(1).unwrap();
    let mut buffers = BTreeSet::new();
    for n in 0..200 {
        if n % 3 == 1 {
            assert_eq!(ahead.peek().unwrap().step, n);
        }
        let got = ahead.next_step().unwrap();
        assert_eq!((got.step, &got.data), (n, &step(&mut direct)));
        buffers.insert(got.data.batches[0].tokens.as_ptr());
        ahead.give_back(got.data);
    }
    assert!(buffers.len() <= 4, "{} buffers for tokens", buffers.len());
    // An unread one ends as soon as it is dropped.
    drop(start(0).unwrap());
}

/// Windows end where epochs do, so no row of an epoch waits in a window of the next.
#[test]
fn every_epoch_of_several_windows_has_each_row_once() {
    for rows in [4096, 4097, 5000, 8192, 9001] {
        let (_files, data) = skewed(rows, 64);
        let mut loader = Loader::new(data, LoaderOptions { held_out: Some(vec![0]), ..packed(1, 1, 0, 1) }).unwrap();
        for epoch in 1..=2 {
            let mut seen = Vec::new();
            while loader.position() < epoch * rows {
                seen.extend(documents(&step(&mut loader).batches[0]).into_iter().map(|(row, _)| row));
            }
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..rows as u32), "{rows} rows, epoch {epoch}");
            // A resumed run goes on at the same place.
            let (at, next) = (loader.position(), step(&mut loader));
            loader.seek(at);
            assert_eq!(step(&mut loader), next, "{rows} rows, epoch {epoch}");
            loader.seek(at);
        }
    }
}
