//! A custom parameter store: every rank keeps all weights in f32 and all-reduces each layer's gradient as soon as it is
//! complete. Its losses are bitwise equal to those of the built-in replicated store (DDP).
//!
//! ```sh
//! cargo run --release --example custom_store
//! ```
use flatshard::base::{Category, DType, Result};
use flatshard::comm::{Axis, Collective, CommUse, Mesh, MeshSizes, Reduce, Tag, Ticket, run_ranks};
use flatshard::data::MicroBatch;
use flatshard::device::cpu::CpuDevice;
use flatshard::device::{Buf, Device};
use flatshard::engine::{Engine, EngineOptions, Step, Strategy};
use flatshard::nn::{Grads, Layout, ParamStore, Pass, Spec, Weights};
use flatshard::store::{Offload, ReplicatedOptions, Shard, Store};
use std::sync::Arc;

struct Layer {
    layout: Layout,
    weights: Buf,
    grads: Buf,
    sum: Option<Ticket>,
}

struct LayerByLayer {
    dev: Arc<dyn Device>,
    group: Arc<dyn Collective>,
    layers: Vec<Layer>,
    /// Whether this micro-batch is the last of the step.
    last: bool,
}

impl LayerByLayer {
    fn new(dev: Arc<dyn Device>, group: Arc<dyn Collective>, layouts: &[Layout]) -> Result<LayerByLayer> {
        let layer = |layout: &Layout| {
            let weights = dev.alloc(DType::F32, layout.len, Category::Params)?;
            let grads = group.alloc(DType::F32, layout.len, CommUse::Reduced, Category::Grads)?;
            Ok(Layer { layout: layout.clone(), weights, grads, sum: None })
        };
        let layers = layouts.iter().map(layer).collect::<Result<_>>()?;
        Ok(LayerByLayer { dev, group, layers, last: true })
    }
}

/// Called by the model.
impl ParamStore for LayerByLayer {
    fn acquire(&mut self, layer: usize, _: Pass) -> Result<Weights<'_>> {
        Ok(Weights::plain(self.layers[layer].weights.view(), &self.layers[layer].layout))
    }
    fn release(&mut self, _: usize, _: Pass) -> Result<()> {
        Ok(())
    }
    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        let Layer { layout, weights: own, grads, .. } = &mut self.layers[layer];
        Ok((Weights::plain(own.view(), layout), Grads::new(Some(grads.view_mut()), layout)))
    }
    fn grads_ready(&mut self, index: usize) -> Result<()> {
        let layer = &mut self.layers[index];
        if self.last {
            let tag = Tag::new("layer", index);
            layer.sum = Some(self.group.all_reduce(tag, layer.grads.view_mut(), Reduce::Sum)?);
        }
        Ok(())
    }
}

/// Called by the engine and the optimizer.
impl Store for LayerByLayer {
    fn units(&self) -> usize {
        self.layers.len()
    }
    fn replicated(&self) -> bool {
        true
    }
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()> {
        self.last = last;
        let mut stale = self.layers.iter_mut().filter(|_| first);
        stale.try_for_each(|layer| self.dev.zero(layer.grads.view_mut()))
    }
    fn finish_grads(&mut self) -> Result<()> {
        self.layers.iter_mut().filter_map(|layer| layer.sum.take()).try_for_each(|sum| self.group.wait(sum))
    }
    fn for_each_shard(&mut self, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()> {
        self.layers.iter_mut().enumerate().try_for_each(|(unit, Layer { layout, weights, grads, .. })| {
            let (master, grad) = (weights.view_mut(), Some(grads.view_mut()));
            f(Shard { unit, layout, start: 0, master, param: None, grad })
        })
    }
    fn weights_changed(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Creates the store for an engine.
struct ByLayer;

impl Strategy for ByLayer {
    fn name(&self) -> &'static str {
        "by_layer"
    }
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn offload(&self) -> Offload {
        Offload::Nothing
    }
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(LayerByLayer::new(dev, mesh.group(Axis::Loss).clone(), layouts)?))
    }
}

/// Ten steps of two micro-batches on three ranks.
fn train(strategy: Arc<dyn Strategy>) -> Result<Vec<f64>> {
    let spec = Spec {
        vocab: 50,
        dim: 32,
        layers: 3,
        heads: 2,
        kv_heads: 2,
        head_dim: 16,
        ff: 64,
        max_len: 16,
        ..Spec::default()
    };
    let options = EngineOptions { spec, strategy, tokens: 16, ..EngineOptions::default() };
    let losses = run_ranks(MeshSizes::sharded(3), |mesh, meter| {
        let mut engine = Engine::new(Arc::new(CpuDevice::new(meter)), &mesh, &options)?;
        let row =
            |n: u64| (0..16).map(|at| ((n * 31 + mesh.rank() as u64 * 17 + at * 3) % 50) as u32).collect::<Vec<u32>>();
        let step = |number| {
            let batches = [2 * number, 2 * number + 1].map(|n| MicroBatch::from_rows([&row(n)[..]]));
            let tokens = engine.global_count(batches.iter().map(MicroBatch::loss_tokens).sum())?;
            Ok(engine.train_step(&batches, &Step { number, lr: 1e-2, tokens })?.loss)
        };
        (1..=10).map(step).collect::<Result<Vec<f64>>>()
    })?;
    Ok(losses.into_iter().next().unwrap_or_default())
}

fn main() -> Result<()> {
    let (own, ddp) = (train(Arc::new(ByLayer))?, train(Arc::new(ReplicatedOptions::default()))?);
    for (step, (own, ddp)) in (1..).zip(own.iter().zip(&ddp)) {
        println!("step {step:2}  loss {own:.9}  of ddp {ddp:.9}");
    }
    assert_eq!(own, ddp);
    println!("bitwise equal");
    Ok(())
}
