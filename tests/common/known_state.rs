//! Checkpoint state filled with numbers that are a function of name, group and index, so that any reader can check
//! every element, whichever rank wrote it.
use super::worlds::{Rank, fsdp, mesh_ranks, ranks, sharded};
use flatshard::base::rng::Rng;
use flatshard::base::{DType, Elem, Result};
use flatshard::ckpt::{Checkpointer, TrainerState};
use flatshard::comm::MeshSizes;
use flatshard::device::{Device, View, ViewMut};
use flatshard::engine::Strategy;
use flatshard::nn::{Decoder, Layout, Segment, Slice, Spec, Tp};
use flatshard::optim::{Optimizer, Rule};
use flatshard::store::Store;
use half::bf16;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

pub struct KnownState {
    pub dev: Arc<dyn Device>,
    pub store: Box<dyn Store>,
    pub optimizer: Optimizer,
    pub ckpt: Checkpointer,
}

/// Element `index` of a tensor; `group` is "" for the model, else the moment.
pub fn value(group: &str, tensor: &str, index: usize) -> f32 {
    Rng::named(11, &format!("{group}:{tensor}")).normal(index as u64)
}

pub fn state(step: u64) -> TrainerState {
    let object = |value: serde_json::Value| value.as_object().cloned().unwrap_or_default();
    TrainerState {
        step,
        samples_consumed: 16 * step,
        trained_tokens: 16 * 11 * step,
        optimizer_steps: 0,
        seed: 3,
        rng: "philox4x32-10".into(),
        optimizer: object(serde_json::json!({"kind": "adamw", "eps": 1e-8})),
        schedule: object(serde_json::json!({"kind": "constant", "lr": 0.01})),
        scaler: None,
        world: 1,
        strategy: "any".into(),
        precision: "any".into(),
        data: object(serde_json::json!({"name": "synthetic"})),
        evaluations: None,
        rollouts: None,
        run: Some(RUN.into()),
    }
}
/// The run that all savers here are of.
pub const RUN: &str = "a test";

impl KnownState {
    /// Zeros everywhere. Files of at most `max_file_bytes`.
    pub fn new(
        rank: &Rank,
        spec: &Spec,
        strategy: &dyn Strategy,
        rule: Rule,
        max_file_bytes: u64,
    ) -> Result<KnownState> {
        let (dev, mesh) = (rank.device.clone(), &rank.mesh);
        let layouts = parted(Decoder::new(spec.clone())?.layouts(), mesh.coords.tp, mesh.sizes.tp);
        let mut store = strategy.store(dev.clone(), mesh, &layouts)?;
        let optimizer = Optimizer::new(&*dev, mesh, &layouts, &mut *store, rule, 0)?;
        let mut ckpt =
            Checkpointer::new(dev.clone(), mesh, spec, &layouts, rule.state())?.with_files_of(max_file_bytes);
        ckpt.of_run(RUN);
        Ok(KnownState { dev, store, optimizer, ckpt })
    }

    /// Masters, parameters and moments as [`value`] says.
    pub fn fill(mut self) -> Result<KnownState> {
        let dev = self.dev.clone();
        self.each(&mut |group, tensor, at, to| {
            let values: Vec<f32> = (0..to.len()).map(|i| value(group, tensor, at + i)).collect();
            dev.upload(bytemuck::cast_slice(&values), to)
        })?;
        let dev = &*self.dev;
        self.store.for_each_shard(&mut |shard| match shard.param {
            Some(param) => dev.copy(shard.master.as_view(), param),
            None => Ok(()),
        })?;
        self.store.weights_changed()?;
        Ok(self)
    }

    /// Panics where an element is not as [`value`] says, padding is not zero, or a parameter is not its master's cast.
    pub fn check(&mut self) -> Result<()> {
        let (dev, mut seen) = (self.dev.clone(), 0);
        self.each(&mut |group, tensor, at, held| {
            for (i, x) in download::<f32>(&*dev, held.as_view())?.into_iter().enumerate() {
                assert_eq!(x.to_bits(), value(group, tensor, at + i).to_bits(), "{group}:{tensor}[{}]", at + i);
                seen += 1;
            }
            Ok(())
        })?;
        let (dev, mut nonzero) = (self.dev.clone(), 0);
        self.store.for_each_shard(&mut |shard| {
            let masters = download::<f32>(&*dev, shard.master.as_view())?;
            nonzero += masters.iter().filter(|x| x.to_bits() != 0).count();
            if let Some(param) = shard.param {
                for (p, m) in download::<bf16>(&*dev, param.as_view())?.into_iter().zip(masters) {
                    assert_eq!(p.to_bits(), bf16::from_f32(m).to_bits());
                }
            }
            Ok(())
        })?;
        let groups = 1 + self.optimizer.rule().state().names.len();
        assert_eq!(seen, nonzero * groups, "padding is not zero");
        Ok(())
    }

    /// Whether every weight and moment is still zero.
    pub fn untouched(&mut self) -> Result<bool> {
        let (dev, mut zero) = (self.dev.clone(), true);
        self.each(&mut |_, _, _, held| {
            zero &= download::<f32>(&*dev, held.as_view())?.iter().all(|x| x.to_bits() == 0);
            Ok(())
        })?;
        Ok(zero)
    }

    /// Every (group, tensor, first element in the whole tensor, elements) that this rank holds; "" is the model's
    /// group.
    pub fn each(&mut self, f: &mut dyn FnMut(&str, &str, usize, ViewMut) -> Result<()>) -> Result<()> {
        let optimizer = &mut self.optimizer;
        self.store.for_each_shard(&mut |mut shard| {
            for s in &shard.layout.segments {
                let end = shard.start + shard.master.len();
                let (from, to) = (s.range().start.max(shard.start), s.range().end.min(end));
                if from >= to {
                    continue;
                }
                for (part, at) in s.stretches(from - s.start..to - s.start) {
                    let first = s.start + part.start - shard.start;
                    let range = first..first + part.len();
                    f("", &s.name, at, shard.master.reborrow().slice(range.clone()))?;
                    let names = optimizer.rule().state().names;
                    for (moment, state) in optimizer.state(shard.part(), range) {
                        f(names[moment], &s.name, at, state.values)?;
                    }
                }
            }
            Ok(())
        })
    }
}

/// Layouts as a rank of tp has them: matrices are cut in turn by rows and by columns, in parts that differ by one, the
/// rest is whole.
pub fn parted(layouts: &[Layout], index: usize, of: usize) -> Vec<Layout> {
    let mut dims = [0, 1].into_iter().cycle();
    let mut part = |segment: &Segment| {
        let mut segment = segment.clone();
        if let Some(dim) = dims.next().filter(|_| of > 1 && segment.shape.len() == 2) {
            let (over, whole) = (Slice { index, of }, segment.shape[dim]);
            segment.shape[dim] = over.share(whole).len();
            segment.tp = Tp::Cut { dim, over, whole };
        }
        segment
    };
    let mut placed = |layout: &Layout| {
        let mut parts = Layout::default();
        for segment in &layout.segments {
            parts.place(part(segment));
        }
        parts
    };
    layouts.iter().map(&mut placed).collect()
}

fn download<T: Elem + Default>(dev: &dyn Device, view: View) -> Result<Vec<T>> {
    let mut out = vec![T::zeroed(); view.len()];
    dev.download(view, bytemuck::cast_slice_mut(&mut out))?;
    Ok(out)
}

pub const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// Small enough that the tiny models need several files.
pub const SMALL: u64 = 20_000;

pub fn plain() -> Arc<dyn Strategy> {
    fsdp(sharded())
}

pub fn saved(world: usize, spec: &Spec, strategy: &Arc<dyn Strategy>, rule: Rule, max: u64, dir: &Path, step: u64) {
    saved_on(MeshSizes::sharded(world), spec, strategy, rule, max, dir, step);
}
pub fn saved_on(
    sizes: MeshSizes,
    spec: &Spec,
    strategy: &Arc<dyn Strategy>,
    rule: Rule,
    max: u64,
    dir: &Path,
    step: u64,
) {
    mesh_ranks(sizes, |rank| {
        let mut held = KnownState::new(&rank, spec, &**strategy, rule, max)?.fill()?;
        held.optimizer.resume(step + 1000);
        held.ckpt.save(dir, 9, &mut *held.store, &mut held.optimizer, &state(step))
    });
}

/// The result of every rank of a world that loads `dir`, and whether it left the store unchanged.
pub fn load(world: usize, spec: &Spec, rule: Rule, dir: &Path) -> Vec<(Result<()>, bool)> {
    ranks(world, |rank| {
        let mut held = KnownState::new(&rank, spec, &*plain(), rule, SMALL)?;
        let result = held.ckpt.load(dir, &mut *held.store, &mut held.optimizer);
        Ok((result.map(|_| ()), held.untouched()?))
    })
}

pub fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap_or_default())).collect()
}
pub fn listed(dir: &Path) -> Vec<String> {
    contents(dir).into_keys().collect()
}
