//! What blocks compute again in backward: the settings, and how a run says it. Never computes.
use crate::base::{Error, Result};
use crate::nn::Checkpointing;
use crate::run::plan::derive::set;
use crate::run::settings::Fsdp;
use crate::run::settings::names::CheckpointName;

/// Of a model of so many blocks.
pub fn checkpointing(f: &Fsdp, blocks: usize) -> Result<Checkpointing> {
    let every = f.activation_checkpoint_every.unwrap_or(1);
    let all = match set(&f.activation_checkpoint, "fsdp.activation_checkpoint")? {
        CheckpointName::Off if f.activation_checkpoint_every.is_some() => {
            return Err(Error::input(format!(
                "--activation-checkpoint-every {every} says how many blocks are computed again, and --activation-checkpoint is \
                 off: add --activation-checkpoint full or selective"
            )));
        }
        CheckpointName::Off => Checkpointing::Off,
        CheckpointName::Selective => Checkpointing::Selective,
        CheckpointName::Full => Checkpointing::Full,
    };
    // What the last of them keeps is still there when backward comes to it.
    if every == 0 || every > 1 && blocks / every < 2 {
        return Err(Error::input(format!(
            "--activation-checkpoint-every {every}: of {blocks} blocks none would be computed again, as backward finds the last \
             {every}th one's activations still there; choose 1 to {}, or --no-activation-checkpoint",
            (blocks / 2).max(1)
        )));
    }
    Ok(all.every(every))
}

/// Behind the dtypes of activations.
pub fn told(checkpointing: Checkpointing) -> String {
    match checkpointing {
        Checkpointing::Off => String::new(),
        Checkpointing::Selective => "; activations recomputed but for attention's".into(),
        Checkpointing::Full => "; activations recomputed".into(),
        Checkpointing::SelectiveEvery(n) => format!("; activations of one block in {n} recomputed but for attention's"),
        Checkpointing::FullEvery(n) => format!("; activations of one block in {n} recomputed"),
    }
}
