//! Adapters of the parameters that hold the experts of a block in transformers 5, where PEFT finds no modules: each
//! becomes products of the experts' matrices. Never reads a file.
use super::super::layout::FileTensor;
use super::config::{AdapterConfig, MERGE};
use super::low_rank::LowRank;
use crate::nn::{Spec, expert_names};

/// The two factors of a parameter, as they are found.
#[derive(Default)]
pub struct Factors {
    pub a: Option<FileTensor>,
    pub b: Option<FileTensor>,
}

/// Which factor of a parameter a tensor is: PEFT wraps the module once for each of its parameters.
pub struct FactorName<'a> {
    pub module: &'a str,
    /// The wrappers around this one.
    pub depth: usize,
    pub is_b: bool,
}

impl<'a> FactorName<'a> {
    /// The factor with this name in a file, if it is one of a module of experts.
    pub fn of(name: &'a str) -> Option<FactorName<'a>> {
        let (mut module, is_b) = match name.strip_suffix(".lora_A.weight") {
            Some(module) => (module, false),
            None => (name.strip_suffix(".lora_B.weight")?, true),
        };
        let mut depth = 0;
        while let Some(within) = module.strip_suffix(".base_layer") {
            (module, depth) = (within, depth + 1);
        }
        module.ends_with(".experts").then_some(FactorName { module, depth, is_b })
    }
}

/// An adapter of one parameter, (experts, outputs, inputs): A is (experts rank, inputs), B is (outputs, rank experts),
/// as PEFT's `ParamWrapper` has them.
pub struct Stack {
    pub a: FileTensor,
    pub b: FileTensor,
    rank: usize,
    scale: f32,
    /// The matrices of each expert that the outputs are, from the first on.
    experts: Vec<Vec<String>>,
}

impl Stack {
    /// The adapter of `module`, whose parameter the shapes tell.
    pub fn new(module: &str, factors: Factors, config: &AdapterConfig, spec: &Spec) -> Result<Stack, String> {
        let Factors { a: Some(a), b: Some(b) } = factors else {
            return Err(format!("{module} has only one of its two matrices"));
        };
        let block = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')?.0.parse().ok());
        let (Some(block), Some(kind)) = (block, &spec.experts) else {
            return Err(format!("has tensor {}, and this model has no {module}", a.name));
        };
        if config.dora {
            return Err(format!("DoRA of {module} is not supported: {MERGE}"));
        }
        let names = (0..kind.count).map(|e| expert_names(spec, block, e)).collect::<Option<Vec<_>>>();
        let names = names.ok_or_else(|| format!("adapters of {module} in this model are not supported: {MERGE}"))?;
        let shapes = || format!("{:?} and {:?} of {module}", a.shape, b.shape);
        let (&[rows, inputs], &[outputs, columns]) = (&a.shape[..], &b.shape[..]) else {
            return Err(format!("has the shapes {}: two matrices are expected", shapes()));
        };
        let (parameter, parts) = match (inputs, outputs) {
            (inputs, outputs) if (inputs, outputs) == (spec.dim, 2 * kind.ff) => ("gate_up_proj", 0..2),
            (inputs, outputs) if (inputs, outputs) == (kind.ff, spec.dim) => ("down_proj", 2..3),
            _ => return Err(format!("has the shapes {}, which no parameter of this model has", shapes())),
        };
        let (rank, scale) = config.of(&format!("{module}.{parameter}"));
        if rows != columns || rows != rank * kind.count {
            let (what, count) = (shapes(), kind.count);
            return Err(format!(
                "has the shapes {what}; for this model and rank {rank} the inner size is {rank} * {count}"
            ));
        }
        let experts = names.into_iter().map(|names| names[parts.clone()].to_vec()).collect();
        Ok(Stack { a, b, rank, scale, experts })
    }

    /// The matrices that change.
    pub fn matrices(&self) -> impl Iterator<Item = &String> {
        self.experts.iter().flatten()
    }

    /// Their products, from all values of both factors.
    pub fn products(&self, a: &[f32], b: &[f32]) -> Vec<(String, LowRank)> {
        let &Stack { rank, scale, .. } = self;
        let (count, inputs) = (self.experts.len(), self.a.shape[1]);
        let mut products = Vec::new();
        for (e, matrices) in self.experts.iter().enumerate() {
            let own = &a[e * rank * inputs..][..rank * inputs];
            // The ranks of one output follow each other, each for all experts.
            let of_expert: Vec<f32> = b.iter().copied().skip(e).step_by(count).collect();
            let parts = of_expert.chunks(of_expert.len() / matrices.len());
            for (name, b) in matrices.iter().zip(parts) {
                products.push((name.clone(), LowRank::new(own.to_vec(), b.to_vec(), [rank, inputs], scale)));
            }
        }
        products
    }
}
