//! The dtypes of computation and of reduction, and the loss scaler. Never casts or scales anything.
use super::names::{FloatName, PrecisionName, StateName};
use super::value::{one_or_many, set};
use crate::base::{DType, Error, Result};
use crate::optim::ScalerOptions;
use serde::{Deserialize, Serialize};

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Precision")]
pub struct PrecisionSettings {
    /// Compute dtype; gradients, and by default master weights and moments, are fp32. fp8: bf16, with products of the
    /// blocks' matrices in FP8
    #[arg(long)]
    pub precision: Option<PrecisionName>,
    /// --precision fp8: matrices whose names match these regular expressions stay in bf16, as do those of the first and
    /// the last block [default: none]
    #[arg(long, num_args = 1.., value_name = "PATTERN")]
    #[serde(deserialize_with = "one_or_many")]
    pub fp8_exclude: Option<Vec<String>>,
    /// GPU only: run fp32 matrix products on tensor cores, with a 10-bit mantissa
    #[arg(long)]
    pub tf32: Option<bool>,
    /// Dtype of gradients in communication; they are summed in fp32 (NCCL: in this dtype). fp16 turns on loss scaling
    #[arg(long)]
    pub reduce_dtype: Option<FloatName>,
    /// AdamW: dtype of both moments; bf16 is rounded stochastically
    #[arg(long)]
    pub moments_dtype: Option<StateName>,
    /// AdamW: dtype of master weights. bf16, with --precision bf16: the weights that are computed with, rounded
    /// stochastically
    #[arg(long)]
    pub master_dtype: Option<StateName>,
    /// fp16 loss scale; 0: dynamic [default: 0]
    #[arg(long, value_name = "X")]
    pub loss_scale: Option<f32>,
    /// Initial dynamic loss scale, as a power of 2 [default: 16]
    #[arg(long, value_name = "N")]
    pub initial_scale_power: Option<u32>,
    /// Steps without overflow before the loss scale doubles [default: 2000]
    #[arg(long, value_name = "STEPS")]
    pub loss_scale_window: Option<u64>,
    /// Overflows before the loss scale is halved [default: 1]
    #[arg(long, value_name = "STEPS")]
    pub hysteresis: Option<u32>,
    /// Reset the overflow count after a step without overflow [default: off]
    #[arg(long)]
    pub consecutive_hysteresis: Option<bool>,
    /// Lower bound of the dynamic loss scale [default: 1]
    #[arg(long, value_name = "X")]
    pub min_loss_scale: Option<f32>,
}

fn dtype(name: FloatName) -> DType {
    match name {
        FloatName::Fp32 => DType::F32,
        FloatName::Bf16 => DType::Bf16,
        FloatName::Fp16 => DType::F16,
    }
}

fn stored(name: StateName) -> DType {
    match name {
        StateName::Fp32 => DType::F32,
        StateName::Bf16 => DType::Bf16,
    }
}

impl PrecisionSettings {
    pub fn check(&self) -> Result<()> {
        self.scaler().map(drop)
    }
    /// Dtype of unsharded weights and activations.
    pub fn compute(&self) -> Result<DType> {
        Ok(match set(&self.precision, "precision")? {
            PrecisionName::Fp32 => DType::F32,
            PrecisionName::Bf16 | PrecisionName::Fp8 => DType::Bf16,
            PrecisionName::Fp16 => DType::F16,
        })
    }
    /// Names of matrices that stay in bf16, if the others are computed with in FP8.
    pub fn fp8(&self) -> Option<Vec<String>> {
        let exclude = self.fp8_exclude.clone().unwrap_or_default();
        (self.precision == Some(PrecisionName::Fp8)).then_some(exclude)
    }
    /// Dtype of gradients in communication.
    pub fn reduce(&self) -> Result<DType> {
        set(&self.reduce_dtype, "precision.reduce_dtype").map(dtype)
    }
    /// Dtype of AdamW's moments.
    pub fn moments(&self) -> Result<DType> {
        set(&self.moments_dtype, "precision.moments_dtype").map(stored)
    }
    /// Dtype of master weights.
    pub fn masters(&self) -> Result<DType> {
        set(&self.master_dtype, "precision.master_dtype").map(stored)
    }
    /// The loss scaler, if compute or reduction is f16.
    pub fn scaler(&self) -> Result<Option<ScalerOptions>> {
        if self.compute()? != DType::F16 && self.reduce()? != DType::F16 {
            return Ok(None);
        }
        let fixed = self.loss_scale.filter(|&scale| scale != 0.0);
        let power = self.initial_scale_power.unwrap_or(16);
        if power > 126 {
            return Err(Error::input(format!(
                "--initial-scale-power {power}: it must be at most 126, since the scale is an fp32 number"
            )));
        }
        let default = ScalerOptions::default();
        let options = ScalerOptions {
            initial: fixed.unwrap_or(2f32.powi(power as i32)),
            dynamic: fixed.is_none(),
            window: self.loss_scale_window.unwrap_or(default.window),
            hysteresis: self.hysteresis.unwrap_or(default.hysteresis),
            consecutive_hysteresis: self.consecutive_hysteresis.unwrap_or(default.consecutive_hysteresis),
            min: self.min_loss_scale.unwrap_or(default.min),
        };
        for (flag, value) in [("loss-scale", options.initial), ("min-loss-scale", options.min)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::input(format!("--{flag} {value}: it must be a number above 0")));
            }
        }
        for (flag, value) in [("loss-scale-window", options.window), ("hysteresis", options.hysteresis as u64)] {
            if value == 0 {
                return Err(Error::input(format!("--{flag} 0: it must be at least 1")));
            }
        }
        if options.dynamic && options.min > options.initial {
            return Err(Error::input(format!(
                "--min-loss-scale {} is above the first scale, 2^{power} = {}; lower it, or raise --initial-scale-power",
                options.min, options.initial
            )));
        }
        Ok(Some(options))
    }
}
