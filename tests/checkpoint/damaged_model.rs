//! A damaged checkpoint that is read as a model or an adapter is refused by name, by whatever reads it; without the
//! checksums next to it, it is a model like any other.
use crate::common::binaries::FSDP;
use crate::common::runs::unlaunched;
use std::fs;
use std::path::Path;
use std::process::Output;

const TINY: &str = "--dataset synthetic --embed-dim 32 --num-layers 2 --num-heads 2 --vocab-size 64 --max-len 16 --batch-size 2 \
                    --lr 0.01 --no-eval --no-sample --nproc-per-node 2 --max-steps 2";

fn run(dir: &Path, args: &str) -> Output {
    unlaunched(FSDP).current_dir(dir).args(args.split_whitespace()).output().unwrap()
}
#[track_caller]
fn ends(dir: &Path, args: &str, status: i32, says: &[&str]) {
    let ended = run(dir, args);
    let said = String::from_utf8_lossy(&ended.stderr);
    let all = says.iter().all(|text| said.contains(text));
    assert!(ended.status.code() == Some(status) && all, "{args}: {}, not {says:?}: {said}", ended.status);
}
/// Flips a bit of the last byte of a file.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn whoever_reads_a_damaged_checkpoint_refuses_it() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    ends(dir.path(), &format!("{TINY} --ckpt-dir base"), 0, &[]);
    let small = "--dataset synthetic --max-len 16 --batch-size 2 --lr 0.01 --no-eval --no-sample --nproc-per-node 1";
    let lora = format!("{small} --pretrain base/step-00000002 --lora-rank 4 --max-steps 2 --ckpt-dir adapters");
    ends(dir.path(), &lora, 0, &[]);
    let merge = "--lora-merge adapters/step-00000002 --pretrain base/step-00000002 --save-hf merged --overwrite";
    let train = format!("{small} --pretrain base/step-00000002 --max-steps 1");
    let readers = [
        &train,
        "--pretrain base/step-00000002 --nproc-per-node 2 --dataset synthetic --lora-rank 4 --load-in-4bit --max-steps 1",
        "--pretrain base/step-00000002 --export --save-hf out --overwrite",
        "--ckpt-dir base --generate 1 --max-new-tokens 1",
    ];
    readers.iter().chain([&merge]).for_each(|args| ends(dir.path(), args, 0, &[]));

    damage(&at("adapters/step-00000002/adapter_model.safetensors"));
    let says = ["adapter_model.safetensors", "was changed after it was saved", "remove trainer_state.json"];
    ends(dir.path(), merge, 2, &says);
    let more = format!("{small} --pretrain base/step-00000002 --lora-adapter adapters/step-00000002 --max-steps 1");
    ends(dir.path(), &more, 2, &says);

    damage(&at("base/step-00000002/model.safetensors"));
    let says = ["model.safetensors", "was changed after it was saved", "remove trainer_state.json"];
    readers.iter().for_each(|args| ends(dir.path(), args, 2, &says));
    let state = at("base/step-00000002/trainer_state.json");
    let ours = fs::read_to_string(&state).unwrap();
    fs::write(&state, &ours[..ours.len() / 2]).unwrap();
    ends(dir.path(), &train, 2, &["trainer_state.json", "is not valid JSON"]);
    // Other trainers' files say nothing of the weights.
    for theirs in ["{\"global_step\": 2, \"log_history\": [{\"loss\": NaN}]}", "{\"epoch\": 1}", "?"] {
        fs::write(&state, theirs).unwrap();
        ends(dir.path(), &train, 0, &[]);
    }
    fs::remove_file(state).unwrap();
    ends(dir.path(), &train, 0, &[]);
}

#[test]
fn a_run_that_goes_back_says_what_it_replaces() {
    let dir = tempfile::tempdir().unwrap();
    ends(dir.path(), &format!("{TINY} --save-every 1 --ckpt-dir ck --max-steps 4"), 0, &[]);
    let back = format!("{TINY} --ckpt-dir ck --resume ck/step-00000002 --max-steps 3");
    ends(dir.path(), &back, 0, &["later checkpoints of ck, up to step 4, are replaced as this run saves"]);
    let said = run(dir.path(), &format!("{TINY} --ckpt-dir ck --resume auto --max-steps 6"));
    assert!(said.status.success() && String::from_utf8_lossy(&said.stderr).contains("after step 3"));
}
