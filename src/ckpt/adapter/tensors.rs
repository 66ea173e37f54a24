//! Which tensors of a model an adapter's files change, and how. Never changes a weight, and never leaves a tensor of
//! the files unused.
use super::super::disk::CHUNK;
use super::super::elements::{not_finite, widen};
use super::super::layout::{ADAPTER_PREFIX, FileTensor, Tensors};
use super::super::naming::{Naming, is_visual};
use super::super::source::{OpenedFiles, TABLES, TensorSource};
use super::config::{AdapterConfig, MERGE, UNMERGEABLE, WEIGHTS, read};
use super::low_rank::LowRank;
use super::stacked::{FactorName, Factors, Stack};
use crate::base::{Error, Result};
use crate::nn::{Arch, HEAD, Layout, SCORE, Spec};
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// What PEFT calls the weights that an adapter is added to.
pub const BASE_LAYER: &str = ".base_layer.";

/// DoRA's learned norms.
const DORA: &str = ".lora_magnitude_vector";

/// The changes by the tensor's name in the model.
pub struct AdapterTensors {
    path: PathBuf,
    source: TensorSource,
    pub changes: BTreeMap<String, Change>,
    /// Products of experts, whose matrices have empty changes.
    stacks: Vec<Stack>,
}

/// What happens to one tensor: first it takes new values, then a product is added.
#[derive(Debug, Default)]
pub struct Change {
    pub whole: Option<FileTensor>,
    added: Option<ProductParts>,
    /// Single rows that take new values, and which rows of the model they are.
    pub rows: Option<FileTensor>,
    pub tokens: BTreeMap<usize, usize>,
}

/// The tensors of a product B A. The bias of B alone is a product with one input and a missing A.
#[derive(Debug, Default)]
struct ProductParts {
    a: Option<FileTensor>,
    b: Option<FileTensor>,
    /// The model stores the transpose: GPT-2's matrices and embeddings.
    transposed: bool,
    bias: bool,
    /// DoRA: the norm of each row of the merged matrix, of a transpose's columns.
    magnitude: Option<FileTensor>,
    scale: f32,
}

impl ProductParts {
    /// Two matrices, and nothing else.
    fn is_plain(&self) -> bool {
        let is_matrix = |tensor: &Option<FileTensor>| tensor.as_ref().is_some_and(|tensor| tensor.shape.len() == 2);
        is_matrix(&self.a) && is_matrix(&self.b) && self.magnitude.is_none()
    }
}

impl AdapterTensors {
    /// Reads the headers of the adapter in `dir`, and checks that every tensor belongs to the model.
    pub fn open(dir: &Path, spec: &Spec, layouts: &[Layout]) -> Result<AdapterTensors> {
        let config = read(dir)?;
        let mut opened = OpenedFiles::default();
        opened.open(dir, "adapter_model")?;
        let OpenedFiles { files, tensors, .. } = opened;
        let (files, none) = (Arc::new(files), Tensors::default());
        let source = TensorSource { files, tensors: none, twin: None, tower: None, mxfp4: Mutex::default() };
        let (path, changes, stacks) = (dir.join(WEIGHTS), BTreeMap::new(), Vec::new());
        let mut this = AdapterTensors { path, source, changes, stacks };
        // PEFT saves a module that was trained whole on a grown vocabulary under three names.
        let (mut twins, unused) = (Vec::new(), |tensor: &FileTensor| tensor.name.contains(".original_module."));
        let mut stacks: BTreeMap<(String, usize), Factors> = BTreeMap::new();
        for tensor in tensors.into_values().filter(|tensor| !unused(tensor)) {
            if !matches!(tensor.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
                let what = format!("tensor {} is {:?}; supported: F32, BF16, F16", tensor.name, tensor.dtype);
                return Err(this.error(what));
            }
            let name = Naming::text_name(tensor.name.strip_prefix(ADAPTER_PREFIX).unwrap_or(&tensor.name));
            match FactorName::of(&name) {
                Some(FactorName { module, depth, is_b }) => {
                    let factors = stacks.entry((module.to_string(), depth)).or_default();
                    let place = if is_b { &mut factors.b } else { &mut factors.a };
                    if let Some(other) = place.replace(tensor) {
                        return Err(this.error(format!("has tensor {} under two names", other.name)));
                    }
                }
                None => twins.extend(this.place(tensor, &config, spec.arch)?),
            }
        }
        for ((module, _), factors) in stacks {
            let stack = Stack::new(&module, factors, &config, spec).map_err(|what| this.error(what))?;
            for name in stack.matrices() {
                if this.changes.insert(name.clone(), Change::default()).is_some() {
                    return Err(this.error(format!("changes {name} in two ways, which is not supported: {MERGE}")));
                }
            }
            this.stacks.push(stack);
        }
        for (name, twin) in twins {
            let whole = this.changes.get(&name).and_then(|change| change.whole.as_ref());
            let same = match whole.filter(|whole| whole.shape == twin.shape) {
                Some(whole) => this.equal(whole, &twin)?,
                None => false,
            };
            if !same {
                return Err(this.error(format!("has tensor {} under two names", twin.name)));
            }
        }
        if this.changes.is_empty() {
            return Err(this.error("has no tensors"));
        }
        this.drop_idle_of_towers()?;
        if spec.tied {
            this.untie()?;
        }
        let shapes: BTreeMap<&str, Vec<usize>> =
            layouts.iter().flat_map(|l| &l.segments).map(|s| (&s.name[..], s.global_shape())).collect();
        for (name, change) in &this.changes {
            this.check(name, change, shapes.get(&name[..]), &config)?;
        }
        Ok(this)
    }

    fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::in_file(&self.path, what)
    }

    /// Finds the tensor's place by its name. Returns what was there: another one for the whole tensor of this name.
    fn place(
        &mut self,
        tensor: FileTensor,
        config: &AdapterConfig,
        arch: Arch,
    ) -> Result<Option<(String, FileTensor)>> {
        let name = tensor.name.strip_prefix(ADAPTER_PREFIX).unwrap_or(&tensor.name);
        let wrappers = [BASE_LAYER, ".modules_to_save.default.", ".modules_to_save."];
        let name = wrappers.iter().fold(name.to_string(), |name, wrapper| name.replace(wrapper, "."));
        // Transformers 5 calls every sparse branch `mlp`.
        let sparse = &arch.family().modules.sparse;
        let name =
            Naming::text_name(&name).replacen(".mlp.gate.", &format!(".{}.{}.", sparse.module, sparse.router), 1);
        const KINDS: [(&str, &str); 6] = [
            (".lora_A.weight", ".weight"),
            (".lora_B.weight", ".weight"),
            (".lora_B.bias", ".bias"),
            (".lora_embedding_A", ".weight"),
            (".lora_embedding_B", ".weight"),
            (DORA, ".weight"),
        ];
        let kind = KINDS.iter().position(|(suffix, _)| name.ends_with(suffix));
        let split = kind.and_then(|kind| Some((kind, name.strip_suffix(KINDS[kind].0)?, KINDS[kind].1)));
        let table = name.strip_suffix(".token_adapter.trainable_tokens_delta");
        let place = match split {
            None if let Some(module) = table => {
                let change = self.changes.entry(format!("{module}.weight")).or_default();
                change.tokens = config.tokens(module).iter().enumerate().map(|(row, &token)| (token, row)).collect();
                &mut change.rows
            }
            None => {
                let whole = &mut self.changes.entry(name.clone()).or_default().whole;
                return Ok(whole.replace(tensor).map(|other| (name, other)));
            }
            Some((kind, module, of)) => {
                let parts = self.changes.entry(format!("{module}{of}")).or_default().added.get_or_insert_default();
                let last = module.rsplit('.').next().unwrap_or_default();
                let conv1d = arch == Arch::Gpt && ["c_attn", "c_proj", "c_fc"].contains(&last);
                parts.transposed |= [3, 4].contains(&kind) || conv1d && kind != 2;
                parts.bias = kind == 2;
                parts.scale = config.of(module).1;
                match kind {
                    0 | 3 => &mut parts.a,
                    5 => &mut parts.magnitude,
                    _ => &mut parts.b,
                }
            }
        };
        match place.replace(tensor) {
            None => Ok(None),
            Some(other) => Err(self.error(format!("has tensor {} under two names", other.name))),
        }
    }

    /// Drops products of a vision tower that are 0: training on text gives its adapters no gradient.
    fn drop_idle_of_towers(&mut self) -> Result<()> {
        let mut idle = Vec::new();
        for (name, change) in self.changes.iter().filter(|(name, _)| is_visual(name)) {
            let alone = change.whole.is_none() && change.rows.is_none();
            let added = change.added.as_ref().filter(|added| alone && added.magnitude.is_none());
            if let Some(b) = added.and_then(|added| added.b.as_ref())
                && self.is_zero(b)?
            {
                idle.push(name.clone());
            }
        }
        idle.iter().for_each(|name| drop(self.changes.remove(name)));
        Ok(())
    }

    /// The model's head is its table of embeddings: both must change in the same way.
    fn untie(&mut self) -> Result<()> {
        let Some(table) = self.changes.keys().find(|name| is_table(name)).cloned() else {
            return match self.changes.contains_key(HEAD) {
                true => Err(self.tied(HEAD)),
                false => Ok(()),
            };
        };
        // Rows of the table are rows of the head.
        let rows = |change: &Change| change.rows.is_some() && change.whole.is_none() && change.added.is_none();
        if !self.changes.contains_key(HEAD) && self.changes.get(&table).is_some_and(rows) {
            return Ok(());
        }
        let same = match [&table[..], HEAD].map(|name| self.changes.get(name)) {
            [Some(a), Some(b)] => self.is_same_change(a, b)?,
            _ => false,
        };
        if !same {
            return Err(self.tied(&table));
        }
        self.changes.remove(HEAD);
        Ok(())
    }
    /// The same values of whole tensors, and the same factors of products: PEFT's `ensure_weight_tying` gives
    /// the head the transposed factors of the embeddings.
    fn is_same_change(&self, a: &Change, b: &Change) -> Result<bool> {
        let whole = match (&a.whole, &b.whole) {
            (Some(a), Some(b)) => a.shape == b.shape && self.equal(a, b)?,
            (one, other) => one.is_none() && other.is_none(),
        };
        let added = match (&a.added, &b.added) {
            (Some(of_a), Some(of_b)) if of_a.is_plain() && of_b.is_plain() => {
                self.product(a)?.zip(self.product(b)?).is_some_and(|(a, b)| a.has_factors_of(&b))
            }
            (one, other) => one.is_none() && other.is_none(),
        };
        Ok(whole && added && a.rows.is_none() && b.rows.is_none())
    }
    fn tied(&self, name: &str) -> Error {
        self.error(format!(
            "changes {name}, but the base model ties its head to its embeddings, and only one tensor would hold both. \
             To get a model with both, untie it first, in Python: set its config's tie_word_embeddings to False, give \
             lm_head.weight a copy of the embeddings, and merge into that (PEFT's merge into a tied model adds both to \
             one tensor)"
        ))
    }
    fn is_zero(&self, tensor: &FileTensor) -> Result<bool> {
        let mut values = vec![0.0; tensor.len()];
        self.read(tensor, 0, &mut values, &mut Vec::new())?;
        Ok(values.iter().all(|&x| x == 0.0))
    }
    /// Whether two tensors of the same shape have the same values.
    fn equal(&self, a: &FileTensor, b: &FileTensor) -> Result<bool> {
        let (mut bytes, mut values) = (Vec::new(), [vec![0.0; CHUNK / 4], vec![0.0; CHUNK / 4]]);
        for from in (0..a.len()).step_by(CHUNK / 4) {
            let n = (a.len() - from).min(CHUNK / 4);
            let [x, y] = &mut values;
            self.read(a, from, &mut x[..n], &mut bytes)?;
            self.read(b, from, &mut y[..n], &mut bytes)?;
            if x[..n] != y[..n] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn check(&self, name: &str, change: &Change, shape: Option<&Vec<usize>>, config: &AdapterConfig) -> Result<()> {
        let module = name.strip_suffix(".weight").or(name.strip_suffix(".bias")).unwrap_or(name);
        let first = [&change.whole, &change.rows]
            .into_iter()
            .chain(change.added.iter().flat_map(|p| [&p.a, &p.b, &p.magnitude]))
            .flatten()
            .next();
        let first = first.map_or(name, |tensor| &tensor.name);
        let Some(shape) = shape else {
            let instead = if name == SCORE {
                "it is the head of a reward model, which needs `objective: rm`".into()
            } else if is_visual(name) {
                format!("adapters of a vision tower are not supported: {MERGE}")
            } else if change.added.as_ref().is_some_and(|added| added.bias) {
                format!("`lora_bias` adds one, for which its class has no place: {UNMERGEABLE}")
            } else {
                "use the model the adapter was trained on".to_string()
            };
            return Err(self.error(format!("has tensor {first}, and this model has no {name}: {instead}")));
        };
        if let Some(whole) = change.whole.as_ref().filter(|whole| whole.shape != *shape) {
            let grown = shape.len() == 2 && whole.shape[1..] == shape[1..] && (name == HEAD || is_table(name));
            let instead = match grown {
                true => format!(
                    ": tokens were added to its vocabulary. Resize the base model first, in Python, with \
                     resize_token_embeddings({}) and save_pretrained",
                    whole.shape[0]
                ),
                false => ": use the model the adapter was trained on".into(),
            };
            let what =
                format!("has tensor {first} with shape {:?}, but in this model it is {shape:?}{instead}", whole.shape);
            return Err(self.error(what));
        }
        if let Some(rows) = &change.rows {
            let wanted = [config.tokens(module).len(), *shape.last().unwrap_or(&0)];
            if shape.len() != 2 || rows.shape != wanted {
                let (name, shape) = (&rows.name, &rows.shape);
                let what =
                    format!("tensor {name} has shape {shape:?}; for its trainable_token_indices it must be {wanted:?}");
                return Err(self.error(what));
            }
            if let Some(token) = change.tokens.keys().find(|token| **token >= shape[0]) {
                let what = "has an embedding of token";
                return Err(
                    self.error(format!("{what} {token}, but this model has {} tokens: resize it first", shape[0]))
                );
            }
            if change.whole.is_some() || change.added.is_some() {
                return Err(self.error(format!("changes {name} in two ways, which is not supported: {MERGE}")));
            }
        }
        let Some(parts) = &change.added else { return Ok(()) };
        let rank = config.of(module).0;
        let [outputs, inputs] = match (&shape[..], parts.transposed) {
            (&[outputs], false) if parts.bias => [outputs, 1],
            (&[outputs, inputs], false) | (&[inputs, outputs], true) => [outputs, inputs],
            _ => return Err(self.error(format!("adapts {name}, which has shape {shape:?} in this model"))),
        };
        if parts.magnitude.is_some() != config.dora {
            let has = if config.dora { "no" } else { "a" };
            return Err(self.error(format!(
                "has {has} lora_magnitude_vector for {name}, but `use_dora` is {}: save the adapter again with PEFT",
                config.dora
            )));
        }
        if config.dora && (parts.bias || is_table(name)) {
            return Err(self.error(format!("DoRA of {name} is not supported: {MERGE}")));
        }
        let mut wanted = if parts.bias { vec![vec![outputs]] } else { vec![vec![rank, inputs], vec![outputs, rank]] };
        let mut found = if parts.bias { vec![&parts.b] } else { vec![&parts.a, &parts.b] };
        if config.dora {
            wanted.push(vec![outputs]);
            found.push(&parts.magnitude);
        }
        for (found, wanted) in found.into_iter().zip(wanted) {
            let Some(found) = found else {
                return Err(self.error(format!("{name} has only one of its two matrices")));
            };
            if found.shape != wanted {
                let (name, shape) = (&found.name, &found.shape);
                return Err(self.error(format!(
                    "tensor {name} has shape {shape:?}; for this model and rank {rank} it must be {wanted:?}"
                )));
            }
        }
        Ok(())
    }

    /// All values of a tensor.
    fn values(&self, tensor: &FileTensor) -> Result<Vec<f32>> {
        let mut values = vec![0.0; tensor.len()];
        self.read(tensor, 0, &mut values, &mut Vec::new())?;
        Ok(values)
    }

    /// The values of a tensor from element `place` on. `bytes` is reused from call to call.
    pub fn read(&self, tensor: &FileTensor, place: usize, values: &mut [f32], bytes: &mut Vec<u16>) -> Result<()> {
        let bytes = self.source.elements(tensor, place, values.len(), bytes)?;
        match not_finite(bytes, tensor.dtype) {
            0 => {
                widen(bytes, tensor.dtype, values);
                Ok(())
            }
            n => Err(self.error(format!(
                "tensor {} has non-finite values (NaN or infinity): {n} of {}. Use an adapter without them",
                tensor.name,
                values.len()
            ))),
        }
    }

    /// The products of experts, by the matrix that each is added to.
    pub fn stacked(&self) -> Result<Vec<(String, LowRank)>> {
        let products = self.stacks.iter().map(|stack| {
            let (a, b) = (self.values(&stack.a)?, self.values(&stack.b)?);
            Ok(stack.products(&a, &b))
        });
        Ok(products.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// The product that is added to the tensor.
    pub fn product(&self, change: &Change) -> Result<Option<LowRank>> {
        let Some(ProductParts { a, b: Some(b), transposed, scale, magnitude, .. }) = &change.added else {
            return Ok(None);
        };
        let transposed = *transposed;
        let magnitude = magnitude.as_ref().map(|magnitude| self.values(magnitude)).transpose()?;
        let (rank, inputs) = a.as_ref().map_or((1, 1), |a| (a.shape[0], a.shape[1]));
        let (outputs, scale) = (b.shape[0], *scale);
        let (a, b) = (a.as_ref().map_or(Ok(vec![1.0]), |a| self.values(a))?, self.values(b)?);
        let mut product = match transposed {
            false => LowRank::new(a, b, [rank, inputs], scale),
            true => LowRank::new(transpose(&b, outputs, rank), transpose(&a, rank, inputs), [rank, outputs], scale),
        };
        (product.transposed, product.magnitude) = (transposed, magnitude);
        Ok(Some(product))
    }
}

fn is_table(name: &str) -> bool {
    TABLES.iter().any(|table| name.ends_with(table))
}

fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
}
