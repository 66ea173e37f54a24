//! Whole command lines of other tools start the same run as ours, and a run says how it read them. Trains one step.
use crate::common::runs::{FSDP, unlaunched};
use flatshard::run::StrategyName;
use flatshard::run::settings::args::{self, Cli, Parsed};
use flatshard::run::settings::config;
use flatshard::run::settings::help::HelpPage;
use std::fs;
use tempfile::TempDir;

struct Place(TempDir);

impl Place {
    fn output(&self, line: &str) -> (String, String) {
        let mut command = unlaunched(FSDP);
        // Quotes hold one word together.
        let parts = line.split('\'').enumerate();
        let words = parts.flat_map(|(n, part)| match n % 2 {
            0 => part.split_whitespace().map(String::from).collect(),
            _ => vec![part.to_string()],
        });
        let out = command.current_dir(self.0.path()).args(words).output().unwrap();
        let [stdout, stderr] = [out.stdout, out.stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(out.status.success(), "{line}: {stderr}");
        (stdout, stderr)
    }
    fn config(&self, line: &str) -> String {
        self.output(&format!("{line} --print-config")).0
    }
}

/// Typical commands of those tools, and the equivalent ones here.
#[test]
fn whole_commands_start_the_same_run() {
    let place = Place(tempfile::tempdir().unwrap());
    let model = "--dataset synthetic --vocab-size 320 --embed-dim 32 --num-layers 1 --num-heads 2 --max-positions 64";
    place.output(&format!(
        "{model} --max-len 16 --max-steps 1 --nproc-per-node 1 --no-eval --no-sample --save-hf llama"
    ));
    let row = "{\"question\": \"what?\", \"answer\": \"that\"}\n";
    fs::write(place.0.path().join("rows.jsonl"), row.repeat(40)).unwrap();
    let pair = "{\"question\": \"what?\", \"better\": \"that\", \"worse\": \"this\"}\n";
    fs::write(place.0.path().join("pairs.jsonl"), pair.repeat(40)).unwrap();
    let sft = "--pretrain llama --tokenizer bytes --dataset rows.jsonl --input-key question --output-key answer \
         --max-len 16 --max-samples 500 --packing-samples --train-batch-size 16 --batch-size 2 --epochs 2 --seed 42 \
         --lr 5e-6 --betas 0.9 0.95 --weight-decay 0 --lr-scheduler cosine_with_min_lr --warmup-ratio 0.03 \
         --grad-clip 1.0 --precision bf16 --activation-checkpoint --log-every 1 --save-every 0 --eval-every epoch";
    let zero = format!(
        "{sft} --zero-stage 2 --cpu-offload optimizer --keep 3 --ckpt-dir ckpt --resume auto --save-hf out --tensorboard tb"
    );
    let flat = "--pretrain llama --tokenizer bytes --dataset rows.jsonl --input_key question --output_key answer \
         --max_len 16 --max_samples 500 --packing_samples --train_batch_size 16 --micro_train_batch_size 2 \
         --max_epochs 2 --seed 42 --learning_rate 5e-6 --adam_betas 0.9 0.95 --l2 0 --lr_scheduler cosine_with_min_lr \
         --lr_warmup_ratio 0.03 --max_norm 1.0 --param_dtype bf16 --gradient_checkpointing --logging_steps 1 \
         --save_steps -1 --eval_steps -1 --zero_stage 2 --adam_offload --attn_implementation flash_attention_2 \
         --max_ckpt_num 3 --ckpt_path ckpt --load_checkpoint --save_path out --use_tensorboard tb --local_rank -1 \
         --save_hf_ckpt --ds_tensor_parallel_size 1 --ring_attn_size 1 --ring_head_stride 1 --zpg 1 --lora_rank 0 \
         --aux_loss_coef 0 --dataset_split train --use_liger_kernel --full_determinism";
    let dotted = "--model.model_name_or_path llama --tokenizer bytes --data.dataset rows.jsonl --data.input_key question \
         --data.output_key answer --data.max_len 16 --data.max_samples 500 --ds.packing_samples --train.batch_size 16 \
         --train.micro_batch_size 2 --train.max_epochs 2 --train.seed 42 --adam.lr 5e-6 --adam.betas 0.9 0.95 \
         --adam.weight_decay 0 --optim adam --lr_scheduler cosine_with_min_lr --lr_warmup_ratio 0.03 --max_norm 1.0 \
         --ds.param_dtype bf16 --model.gradient_checkpointing_enable --logger.logging_steps 1 --ckpt.save_steps -1 \
         --eval.steps -1 --ds.zero_stage 2 --ds.adam_offload --ds.attn_implementation flash_attention_2 \
         --ckpt.max_num 3 --ckpt.path ckpt --ckpt.load_enable --ckpt.output_dir out --logger.tensorboard_dir tb \
         --ds.tensor_parallel_size 1 --ds.ring_attn_size 1 --data.dataloader_num_workers 4";
    let fsdp2 = "--model_name_or_path llama --tokenizer bytes --dataset rows.jsonl --input_key question --output_key answer \
         --max_len 16 --max_samples 500 --packing_samples --train_batch_size 16 --micro_train_batch_size 2 \
         --max_epochs 2 --seed 42 --learning_rate 5e-6 --adam_betas 0.9 0.95 --l2 0 --lr_scheduler cosine_with_min_lr \
         --lr_warmup_ratio 0.03 --max_norm 1.0 --bf16 --gradient_checkpointing --logging_steps 1 --save_steps -1 \
         --eval_steps -1 --no-fsdp2_reshard_after_forward --fsdp2_tp_size 1 --fsdp2_cp_size 1 --flash_attn \
         --ckpt_save_path out --max_checkpoints_to_keep -1 --hf_max_shard_size_gb 2 --backend fsdp2";
    let ours = format!(
        "{sft} --sharding SHARD_GRAD_OP --ckpt-dir out/dcp_ckpt --save-hf out/last_hf_ckpt --keep 0 \
         --max-shard-size 2GB --backend fsdp"
    );
    let trainer = "--model_name_or_path llama --tokenizer_name bytes --train_file rows.jsonl --input_key question \
         --output_key answer --max_seq_length 16 --packing True --per_device_train_batch_size 2 \
         --gradient_accumulation_steps 4 --num_train_epochs 2.0 --max_steps -1 --seed 42 --learning_rate 5e-6 \
         --adam_beta1 0.9 --adam_beta2 0.999 --adam_epsilon 1e-6 --weight_decay 0 --lr_scheduler_type cosine \
         --warmup_ratio 0.03 --max_grad_norm 0.5 --bf16 True --fp16 False --gradient_checkpointing True \
         --logging_steps 10 --save_strategy steps --save_steps 500 --save_total_limit 2 --eval_strategy epoch \
         --output_dir out --resume_from_checkpoint True --optim adamw_torch_fused --report_to tensorboard \
         --logging_dir tb --do_train --do_eval --dataloader_num_workers 4 --remove_unused_columns False \
         --fsdp 'full_shard auto_wrap' --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --ddp_timeout 1800 --tf32 False";
    let trained = "--pretrain llama --tokenizer bytes --dataset rows.jsonl --input-key question --output-key answer \
         --max-len 16 --packing-samples --batch-size 2 --grad-accum 4 --epochs 2 --seed 42 --lr 5e-6 \
         --betas 0.9 0.999 --eps 1e-6 --weight-decay 0 --lr-scheduler cosine --warmup-ratio 0.03 --grad-clip 0.5 \
         --precision bf16 --activation-checkpoint --log-every 10 --save-every 500 --keep 2 --eval-every epoch --eval \
         --ckpt-dir out --save-hf out/model --resume auto --optimizer adamw --tensorboard tb --sharding FULL_SHARD \
         --auto-wrap transformer --comm-timeout 1800 --no-tf32";
    let torchtitan = "--checkpoint.initial_load_path llama --model.hf_assets_path bytes --training.dataset_path rows.jsonl \
         --input-key question --output-key answer --training.steps 20 --training.seq_len 16 \
         --training.local_batch_size 2 --training.global_batch_size 16 --training.max_norm 1.0 \
         --training.mixed_precision_param bfloat16 --training.mixed_precision_reduce float32 --training.seed 7 \
         --optimizer.name AdamW --optimizer.lr 8e-4 --optimizer.beta2 0.99 --lr_scheduler.warmup_steps 5 \
         --lr_scheduler.decay_type linear --parallelism.tensor_parallel_degree 1 \
         --parallelism.data_parallel_shard_degree -1 --parallelism.context_parallel_degree 1 \
         --parallelism.fsdp_reshard_after_forward always --checkpoint.enable --checkpoint.folder ckpt \
         --checkpoint.interval 10 --checkpoint.keep_latest_k 2 --checkpoint.async_mode async \
         --activation_checkpoint.mode selective --metrics.log_freq 2 --compile.no-enable";
    let titan = "--pretrain llama --tokenizer bytes --dataset rows.jsonl --input-key question --output-key answer \
         --max-steps 20 --max-len 16 --batch-size 2 --train-batch-size 16 --grad-clip 1.0 --precision bf16 \
         --reduce-dtype fp32 --seed 7 --optimizer adamw --lr 8e-4 --betas 0.9 0.99 --warmup-steps 5 \
         --lr-scheduler linear --sharding FULL_SHARD --ckpt-dir ckpt --save-every 10 --keep 2 --async-save \
         --resume auto --activation-checkpoint selective --log-every 2 --no-compile";
    let factory = "--model_name_or_path llama --tokenizer bytes --stage sft --do_train true --finetuning_type lora \
         --lora_target all --dataset rows.jsonl --input_key question --output_key answer --template empty --cutoff_len 16 \
         --max_samples 500 --preprocessing_num_workers 16 --dataloader_num_workers 4 --output_dir out --logging_steps 10 \
         --save_steps 500 --plot_loss true --overwrite_output_dir true --save_only_model false --report_to none \
         --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --learning_rate 1e-4 --num_train_epochs 3.0 \
         --lr_scheduler_type cosine --warmup_ratio 0.1 --bf16 true --ddp_timeout 180000000 --enable_liger_kernel true";
    let adapted = "--pretrain llama --tokenizer bytes --objective sft --lora-rank 8 --lora-target-modules all-linear \
         --dataset rows.jsonl --input-key question --output-key answer --max-len 16 --max-samples 500 --ckpt-dir out \
         --save-hf out/model --log-every 10 --save-every 500 --overwrite --batch-size 1 --grad-accum 8 --lr 1e-4 --epochs 3 \
         --lr-scheduler cosine --warmup-ratio 0.1 --precision bf16 --comm-timeout 180000000";
    let train_dpo = "--objective dpo --model.model_name_or_path llama --ref.model_name_or_path llama --tokenizer bytes \
         --data.dataset pairs.jsonl --data.prompt_key question --data.chosen_key better --data.rejected_key worse \
         --data.max_len 16 --model.beta 0.2 --model.label_smoothing 0.1 --model.nll_loss_coef 0.05 --model.aux_loss_coef 0 \
         --train.batch_size 16 --train.micro_batch_size 2 --train.max_epochs 1 --optim muon --muon.momentum 0.9 \
         --muon.ns_steps 6 --muon.nesterov --adam.lr 5e-7 --adam.betas 0.9 0.95 --adam.weight_decay 0 \
         --lr_scheduler cosine_with_min_lr --lr_warmup_ratio 0.03 --max_norm 1.0 --ds.param_dtype bf16 --ds.zero_stage 3 \
         --ds.packing_samples --ds.attn_implementation flash_attention_2 --ref.offload \
         --model.gradient_checkpointing_enable --logger.logging_steps 1 --ckpt.save_steps -1 --eval.steps -1 \
         --ckpt.output_dir out";
    let dpo = "--objective dpo --pretrain llama --ref-pretrain llama --tokenizer bytes --dataset pairs.jsonl \
         --prompt-key question --chosen-key better --rejected-key worse --max-len 16 --beta 0.2 --label-smoothing 0.1 \
         --nll-loss-coef 0.05 --train-batch-size 16 --batch-size 2 --epochs 1 --optimizer muon --muon-momentum 0.9 \
         --muon-ns-steps 6 --lr 5e-7 --betas 0.9 0.95 --weight-decay 0 --lr-scheduler cosine_with_min_lr \
         --warmup-ratio 0.03 --grad-clip 1.0 --precision bf16 --zero-stage 3 --packing-samples --activation-checkpoint \
         --log-every 1 --save-every 0 --eval-every epoch --save-hf out";
    let keys = "--prompt-key question --chosen-key better --rejected-key worse";
    let trl = format!(
        "--objective dpo --model_name_or_path llama --tokenizer bytes --dataset pairs.jsonl {keys} --max_length 16 \
         --loss_type sigmoid --f_divergence_type reverse_kl --beta 0.2 --precompute_ref_log_probs --use_peft --lora_r 32 \
         --lora_alpha 16 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --num_train_epochs 1 \
         --learning_rate 5e-7 --bf16 --gradient_checkpointing --padding_free False --pad_to_multiple_of 8 \
         --sync_ref_model False --logging_steps 25 --eval_strategy steps --eval_steps 50 --output_dir out \
         --no_remove_unused_columns"
    );
    let kept = format!(
        "--objective dpo --pretrain llama --tokenizer bytes --dataset pairs.jsonl {keys} --max-len 16 --beta 0.2 \
         --precompute-ref-logps --lora-rank 32 --lora-alpha 16 --lora-dropout 0.05 --batch-size 2 --grad-accum 8 --epochs 1 --lr 5e-7 \
         --precision bf16 --activation-checkpoint --log-every 25 --eval-every 50 --ckpt-dir out --save-hf out/model"
    );
    let stage = "model_name_or_path: llama\nstage: dpo\ndo_train: true\nfinetuning_type: lora\nlora_rank: 8\n\
         lora_target: all\npref_beta: 0.2\npref_loss: sigmoid\npref_ftx: 0.1\nsimpo_gamma: 0.5\nref_model_adapters: null\n\
         dataset: pairs.jsonl\ntemplate: empty\ncutoff_len: 16\noutput_dir: out\nlogging_steps: 10\nsave_steps: 500\n\
         per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 5.0e-6\nnum_train_epochs: 3.0\n\
         lr_scheduler_type: cosine\nwarmup_ratio: 0.1\nbf16: true\n";
    fs::write(place.0.path().join("dpo.yaml"), stage).unwrap();
    // The texts of messages alone.
    let empty = "{% for message in messages %}{{ message['content'] }}{% endfor %}";
    let stage = format!("--config dpo.yaml --tokenizer bytes {keys}");
    let staged = format!(
        "--objective dpo --pretrain llama --tokenizer bytes --dataset pairs.jsonl {keys} --apply-chat-template \
         --tokenizer-chat-template empty.jinja --max-len 16 --beta 0.2 --nll-loss-coef 0.1 --lora-rank 8 --lora-alpha 16 --lora-target-modules all-linear --ckpt-dir out \
         --save-hf out/model --log-every 10 --save-every 500 --batch-size 1 --grad-accum 8 --lr 5e-6 --epochs 3 \
         --lr-scheduler cosine --warmup-ratio 0.1 --precision bf16"
    );
    let commands = [(flat, &*zero), (dotted, &*zero), (fsdp2, &*ours), (trainer, trained), (torchtitan, titan)];
    let more = [(factory, adapted), (train_dpo, dpo), (&*trl, &*kept), (&*stage, &*staged)];
    fs::write(place.0.path().join("empty.jinja"), empty).unwrap();
    let as_text = format!("tokenizer_chat_template: {empty:?}");
    for (theirs, ours) in commands.into_iter().chain(more) {
        let ours = place.config(ours).replace("tokenizer_chat_template: empty.jinja", &as_text);
        assert_eq!(place.config(theirs), ours, "{theirs}");
    }
}

#[test]
fn a_run_logs_once_how_it_read_them() {
    let place = Place(tempfile::tempdir().unwrap());
    let stages = "training_stages: {a: {run: {max_steps: 1}}, b: {run: {max_steps: 1}}}\n\
                  model: {embed_dim: 32, num_layers: 1}\ndata: {dataset: synthetic, max_len: 16}\ncheckpoint: {ckpt_dir: c}\n";
    fs::write(place.0.path().join("c.yaml"), stages).unwrap();
    let (_, stderr) = place.output(
        "--config c.yaml --learning_rate 1e-3 --adam_beta2 0.99 --grad_accum 1 --devices 1 --fsdp-impl torch \
         --dataloader_num_workers 4 --no-sample",
    );
    for line in [
        "--learning_rate is read as --lr (Hugging Face Trainer, OpenRLHF)",
        "--adam_beta2 0.99 is read as --betas 0.9 0.99 (Hugging Face Trainer)",
        "--fsdp-impl torch is read as --fsdp-impl reference (PyTorch FSDP)",
        "--dataloader_num_workers 4 has no effect here: ",
    ] {
        assert_eq!(stderr.matches(line).count(), 1, "{line}: {stderr}");
    }
    assert!(!stderr.contains("grad_accum") && !stderr.contains("devices"), "{stderr}");
}

/// The objective of a command line also decides what the keys of its file mean.
#[test]
fn a_file_is_read_for_the_objective_of_the_command_line() {
    let place = Place(tempfile::tempdir().unwrap());
    let keys =
        "per_device_train_batch_size: 16\nmax_completion_length: 32\nwarmup_steps: 0.1\nuse_peft: true\nlora_r: 4\n";
    fs::write(place.0.path().join("trl.yaml"), keys).unwrap();
    let of_file = |line: &str| {
        let words = format!("{line} --config {}", place.0.path().join("trl.yaml").display());
        let words = words.split(' ').map(String::from);
        let Parsed::Run(cli) = args::parse::<Cli>(&HelpPage::training("run_fsdp", ""), words).unwrap() else {
            panic!("{line} is help")
        };
        config::resolve(&cli, None, StrategyName::Fsdp).unwrap()
    };
    let ours = of_file("--objective grpo --reward exact");
    assert_eq!((ours.batch.batch_size, ours.generate.max_new_tokens), (Some(2), Some(32)));
    assert_eq!((ours.optim.warmup_ratio, ours.optim.warmup_steps), (Some(0.1), None));
    assert_eq!((ours.lora.rank, ours.lora.alpha, ours.lora.dropout), (Some(4), Some(32.0), Some(0.05)));
    let ours = of_file("--objective grpo --rollouts r.jsonl --loss-type dr_grpo");
    assert_eq!(ours.batch.batch_size, Some(16));
}
