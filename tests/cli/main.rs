//! The programs from outside, as users start them: flags and files, messages, logs, traces, fine-tuning, stages; and
//! the scripts.
#[path = "../common/mod.rs"]
mod common;
mod bad_input;
mod command_line;
mod deepspeed;
mod docs;
mod examples;
mod files;
mod gate;
mod hybrid_shard;
mod idle_flags;
mod logs;
mod lora;
mod mixture;
mod nonfinite_steps;
mod sft;
mod spellings;
mod stages;
mod tensor_parallel_runs;
mod tensorboard;
mod token_rows;
mod trace;
mod troubleshooting;
mod wandb;
mod warmup;
