//! A store wrapper that records its calls on a timeline, and the memory they hand out in a history. The layer loop
//! makes them in a fixed order ([`ParamStore`]), so what happens between two calls is known: forward of a layer, its
//! backward, the loss. Never changes what a call does.
use crate::base::Result;
use crate::base::history::{History, InUse};
use crate::base::timeline::{Lane, Mark, Span, Timeline};
use crate::device::Device;
use crate::nn::store::ROOT;
use crate::nn::{Grads, ParamStore, Pass, Weights};

/// The observers of an engine's steps.
#[derive(Default)]
pub(super) struct Watchers {
    pub timeline: Timeline,
    pub history: Option<History>,
    /// [`crate::nn::Workspace::saved_for`], for the history.
    pub saved: Vec<usize>,
    /// Number of blocks; the layers after them are their experts.
    pub blocks: usize,
    /// Blocks are recomputed in backward, so there is work between acquiring weights and asking for gradients.
    pub recomputes: bool,
}
impl Watchers {
    pub fn history(&self) -> Option<&History> {
        self.history.as_ref().filter(|history| history.is_detailed())
    }
    pub fn any(&self) -> bool {
        self.timeline.is_on() || self.history().is_some()
    }
}

/// Views handed out for a layer: address and bytes. Layers of one unit get the same ones.
type Handed = Vec<(usize, usize, usize)>;

fn bytes(handed: &Handed) -> usize {
    let first = |i: usize| handed[..i].iter().all(|earlier| earlier.1 != handed[i].1);
    (0..handed.len()).filter(|&i| first(i)).map(|i| handed[i].2).sum()
}

pub(super) struct Watched<'a> {
    store: &'a mut dyn ParamStore,
    dev: &'a dyn Device,
    watchers: &'a Watchers,
    /// What the loop has been doing since the last call returned: what, of which layer.
    open: Option<(&'static str, usize, Mark)>,
    /// How often the root was acquired and its gradient asked for.
    roots: usize,
    root_grads: usize,
    weights: Handed,
    grads: Handed,
    /// Blocks still to come in backward.
    ahead: usize,
}

impl<'a> Watched<'a> {
    pub fn new(store: &'a mut dyn ParamStore, dev: &'a dyn Device, watchers: &'a Watchers) -> Watched<'a> {
        let (weights, grads) = (Handed::new(), Handed::new());
        Watched { store, dev, watchers, open: None, roots: 0, root_grads: 0, weights, grads, ahead: 0 }
    }
    /// Start of a call: what was computed until now is over.
    fn enter(&mut self) -> Result<Mark> {
        let now = self.dev.mark()?;
        if let Some((what, layer, start)) = self.open.take() {
            let (lane, number) = (Lane::Compute, Some(layer as u64));
            self.watchers.timeline.record(Span { lane, what, number, start, end: now, flow: None });
        }
        Ok(now)
    }
}

/// End of a call: records it and starts the span `next`. Not a method, because the call's result borrows the store.
macro_rules! leave {
    ($self:ident, $verb:literal, $layer:ident, $start:ident, $next:expr) => {
        let now = $self.dev.mark()?;
        let (what, number) = ($verb, Some($layer as u64));
        $self.watchers.timeline.record(Span { lane: Lane::Store, what, number, start: $start, end: now, flow: None });
        let next: Option<&'static str> = $next;
        $self.open = next.map(|what| (what, $layer, now));
        if let Some(history) = $self.watchers.history() {
            let saved = $self.watchers.saved.get($self.ahead).copied().unwrap_or(0);
            let in_use = InUse { weights: bytes(&$self.weights), grads: bytes(&$self.grads), saved };
            history.used(next.unwrap_or(what), Some($layer), in_use);
        }
    };
}

impl ParamStore for Watched<'_> {
    fn acquire(&mut self, layer: usize, pass: Pass) -> Result<Weights<'_>> {
        let start = self.enter()?;
        let weights = self.store.acquire(layer, pass)?;
        if layer == ROOT {
            self.roots += 1;
        }
        if pass == Pass::Forward && layer <= self.watchers.blocks {
            self.ahead = self.ahead.max(layer);
        }
        if self.watchers.history().is_some() {
            let (address, bytes) = weights.place();
            self.weights.push((layer, address, bytes));
        }
        let next = match (layer, pass) {
            (ROOT, _) if self.roots == 1 => Some("embed"),
            (ROOT, _) => None, // the loss starts when its gradient is asked for
            (_, Pass::Backward) => self.watchers.recomputes.then_some("recompute"),
            (_, Pass::Forward | Pass::Evaluate) => Some("forward"),
        };
        leave!(self, "acquire", layer, start, next);
        Ok(weights)
    }
    fn release(&mut self, layer: usize, pass: Pass) -> Result<()> {
        let start = self.enter()?;
        self.store.release(layer, pass)?;
        self.weights.retain(|handed| handed.0 != layer);
        if pass == Pass::Backward && layer <= self.watchers.blocks {
            self.ahead = layer.saturating_sub(1);
        }
        leave!(self, "release", layer, start, None);
        Ok(())
    }
    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        let start = self.enter()?;
        let both = self.store.grads(layer)?;
        if layer == ROOT {
            self.root_grads += 1;
        }
        if let (Some(flat), Some(_)) = (&both.1.flat, self.watchers.history()) {
            self.grads.push((layer, flat.address(), flat.bytes()));
        }
        let next = match layer {
            ROOT if self.root_grads == 1 => "loss",
            ROOT => "embed backward",
            _ => "backward",
        };
        leave!(self, "grads", layer, start, Some(next));
        Ok(both)
    }
    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        let start = self.enter()?;
        self.store.grads_ready(layer)?;
        self.grads.retain(|handed| handed.0 != layer);
        leave!(self, "grads ready", layer, start, None);
        Ok(())
    }
}

/// Runs `f` as a span of the device's compute stream.
pub(super) fn timed<T>(
    dev: &dyn Device,
    timeline: &Timeline,
    (lane, what): (Lane, &'static str),
    f: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if !timeline.is_on() {
        return f();
    }
    let start = dev.mark()?;
    let result = f()?;
    timeline.record(Span { lane, what, number: None, start, end: dev.mark()?, flow: None });
    Ok(result)
}
