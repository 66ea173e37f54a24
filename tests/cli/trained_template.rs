//! The chat template that a model is trained with is the one that it is saved with: in exports, checkpoints and GGUF
//! files, next to the tokenizer's other templates. Never tests what a template renders (tests/data does).
use crate::common::runs::{FSDP, unlaunched};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

const TRAINED: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";
const OWN: &str = "{% for m in messages %}<own>{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}";
const TOOLS: &str = "{% for m in messages %}<tools>{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}";
const RAG: &str = "{% for m in messages %}<rag>{{ m.content }}{% endfor %}";

/// A directory with rows, a template and a tokenizer, whose configuration has this `chat_template`.
struct Work(tempfile::TempDir);

impl Work {
    fn new(template: Value, files: &[(&str, &str)]) -> Work {
        let work = Work(tempfile::tempdir().unwrap());
        let row = |i: usize| {
            let messages = json!([
                {"role": "user", "content": format!("Say {i}.")}, {"role": "assistant", "content": format!("{i}!")}]);
            format!("{}\n", json!({"messages": messages}))
        };
        work.write("rows.jsonl", &(0..6).map(row).collect::<String>());
        work.write("trained.jinja", TRAINED);
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/byte_level");
        work.write("tok/tokenizer.json", &fs::read_to_string(golden.join("tokenizer.json")).unwrap());
        let mut config: Value =
            serde_json::from_slice(&fs::read(golden.join("tokenizer_config.json")).unwrap()).unwrap();
        if !template.is_null() {
            config["chat_template"] = template;
        }
        work.write("tok/tokenizer_config.json", &config.to_string());
        files.iter().for_each(|(name, text)| work.write(&format!("tok/{name}"), text));
        work
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    fn write(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
    }
    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }
    /// `chat_template` of an exported tokenizer_config.json.
    fn listed(&self, dir: &str) -> Value {
        let config: Value = serde_json::from_str(&self.read(&format!("{dir}/tokenizer_config.json"))).unwrap();
        assert_eq!(config["bos_token"], "<s>", "the other keys stay");
        config["chat_template"].clone()
    }
    /// A run on the rows; its messages.
    #[track_caller]
    fn run(&self, args: &str) -> (Option<i32>, String) {
        let base = "--device cpu --nproc-per-node 1 --dataset rows.jsonl --apply-chat-template --max-len 64 \
                    --batch-size 1 --no-eval --no-sample --no-cache";
        let mut run = unlaunched(FSDP);
        run.args(base.split_whitespace()).args(args.split_whitespace()).current_dir(self.0.path());
        let out = run.output().unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    }
    #[track_caller]
    fn good(&self, args: &str) -> String {
        let (code, text) = self.run(args);
        assert_eq!(code, Some(0), "{args}: {text}");
        text
    }
}

const TINY: &str = "--tokenizer tok --embed-dim 32 --num-layers 1 --num-heads 2 --vocab-size 384 --max-steps 1";

#[test]
fn the_template_in_use_is_the_default_one_of_what_is_saved() {
    let work = Work::new(Value::Null, &[]);
    let given = "--tokenizer-chat-template trained.jinja";
    let said = work.good(&format!("{TINY} {given} --ckpt-dir ck --save-hf out --save-gguf out.gguf"));
    assert!(said.contains("template trained.jinja, not the tokenizer's default one; saved models hold it"), "{said}");
    for dir in ["out", "ck/step-00000001"] {
        assert_eq!(work.read(&format!("{dir}/chat_template.jinja")), TRAINED, "{dir}");
        assert_eq!(work.read(&format!("{dir}/tokenizer_config.json")), work.read("tok/tokenizer_config.json"));
    }
    let gguf = fs::read(work.path("out.gguf")).unwrap();
    assert!(has(&gguf, "tokenizer.chat_template") && has(&gguf, TRAINED));
    // What is saved is trained on without the flag, and is what is saved then; a person is not told again.
    let said = work.good("--pretrain out --max-steps 1 --save-hf again");
    assert!(!said.contains("template "), "{said}");
    assert_eq!(work.read("again/chat_template.jinja"), TRAINED);
    // So is what is resumed, where the tokenizer has no template or another one.
    for own in [None, Some(OWN)] {
        own.iter().for_each(|own| work.write("tok/chat_template.jinja", own));
        let resume = "--ckpt-dir ck --resume ck/step-00000001 --overwrite";
        let said = work.good(&format!("{} {resume} --save-hf resumed", TINY.replace("steps 1", "steps 2")));
        assert!(said.contains("template that of the checkpoint, not the tokenizer's default one"), "{said}");
        assert!(!said.contains("fingerprint"), "the rows have the same tokens: {said}");
        assert_eq!(work.read("resumed/chat_template.jinja"), TRAINED);
        assert_eq!(work.read("ck/step-00000002/chat_template.jinja"), TRAINED);
        fs::remove_dir_all(work.path("resumed")).unwrap();
        fs::remove_dir_all(work.path("ck/step-00000002")).unwrap();
    }
    // Jinja text, with a template of the tokenizer's in both places; and an adapter, which its merge goes by.
    let work = Work::new(json!(OWN), &[("chat_template.jinja", OWN)]);
    let text = "{{messages|map(attribute='content')|join('|')}}";
    let said = work.good(&format!("{TINY} --tokenizer-chat-template {text} --save-hf out"));
    assert!(said.contains("template as given, not"), "{said}");
    assert_eq!((work.read("out/chat_template.jinja"), work.listed("out")), (text.into(), json!(text)));
    work.good(&format!("{TINY} --save-hf base"));
    assert_eq!((work.read("base/chat_template.jinja"), work.listed("base")), (OWN.into(), json!(OWN)));
    let saves = "--save-adapter adapter --save-hf own --save-gguf own.gguf";
    work.good(&format!("--pretrain base {given} --lora-rank 2 --max-steps 1 {saves}"));
    assert_eq!((work.read("own/chat_template.jinja"), work.listed("own")), (TRAINED.into(), json!(TRAINED)));
    assert_eq!((work.read("adapter/chat_template.jinja"), work.listed("adapter")), (TRAINED.into(), json!(TRAINED)));
    let merge =
        "--device cpu --nproc-per-node 1 --pretrain base --lora-merge adapter --save-hf merged --save-gguf m.gguf";
    let out = unlaunched(FSDP).args(merge.split(' ')).current_dir(work.0.path()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!((work.read("merged/chat_template.jinja"), work.listed("merged")), (TRAINED.into(), json!(TRAINED)));
    let gguf = fs::read(work.path("m.gguf")).unwrap();
    assert!(has(&gguf, TRAINED) && !has(&gguf, OWN));
    // An adapter that is trained on is trained with its own template, and a checkpoint's samples are shown in its own.
    work.good("--pretrain base --lora-adapter adapter --max-steps 1 --save-adapter on --ckpt-dir ad");
    assert_eq!((work.read("on/chat_template.jinja"), work.listed("on")), (TRAINED.into(), json!(TRAINED)));
    let shown = "--device cpu --dataset rows.jsonl --apply-chat-template --max-len 64 --pretrain base --lora-rank 2 \
                 --ckpt-dir ad --resume auto --print-samples 1";
    let out = unlaunched(FSDP).args(shown.split_whitespace()).current_dir(work.0.path()).output().unwrap();
    assert!(String::from_utf8_lossy(&out.stdout).contains("[user] Say 0."), "{out:?}");
    let checkpoints = merge.replace("adapter --save-hf merged --save-gguf m.gguf", "ad --save-hf newest");
    let out = unlaunched(FSDP).args(checkpoints.split(' ')).current_dir(work.0.path()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    // What a run reads is never replaced.
    for (flags, input) in [
        ("--pretrain base --lora-adapter adapter --save-adapter adapter", "--lora-adapter adapter"),
        ("--pretrain base --lora-adapter adapter --save-hf adapter", "--lora-adapter adapter"),
        ("--pretrain base --teacher own --save-hf own", "--teacher own"),
        ("--pretrain base --objective dpo --ref-pretrain own --save-hf own", "--ref-pretrain own"),
        ("--pretrain own.gguf --save-gguf own.gguf", "is the file of --pretrain"),
    ] {
        let (code, said) = work.run(&format!("{flags} --overwrite --max-steps 1"));
        assert!(code == Some(2) && said.contains(input) && said.contains("never overwritten"), "{flags}: {said}");
    }
}

#[test]
fn named_templates_are_found_and_kept() {
    let entry = |name: &str, text: &str| json!({"name": name, "template": text});
    let list = json!([entry("default", OWN), entry("tool_use", "replaced by the file"), entry("old", OWN)]);
    let files = [("additional_chat_templates/tool_use.jinja", TOOLS), ("additional_chat_templates/rag.jinja", RAG)];
    let work = Work::new(list, &[&files[..], &[("additional_chat_templates/notes.txt", "")]].concat());
    let (code, said) = work.run(&format!("{TINY} --tokenizer-chat-template toolkit"));
    let names = "--tokenizer-chat-template toolkit: is neither a file nor Jinja text, and not among the tokenizer's \
                 templates (default, tool_use, old, rag)";
    assert!(code == Some(2) && said.contains(names), "{said}");
    // Nothing is given: files are copied as they are.
    let said = work.good(&format!("{TINY} --save-hf copy --ckpt-dir ck"));
    assert!(
        said.contains("template tool_use for rows with tools, as in transformers; others: the default one"),
        "{said}"
    );
    work.write(
        "tools.jsonl",
        &json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": []})
            .to_string(),
    );
    let samples = |more: &str| {
        let args = format!(
            "--dataset tools.jsonl --apply-chat-template --tokenizer tok --max-len 64 --print-samples 1 {more}"
        );
        let out = unlaunched(FSDP).args(args.split_whitespace()).current_dir(work.0.path()).output().unwrap();
        serde_json::from_slice::<Value>(&out.stdout).unwrap()["text"].as_str().unwrap().to_string()
    };
    assert!(samples("").starts_with("<tools>user: a"));
    assert!(samples("--tokenizer-chat-template default").starts_with("<own>user: a"));
    for dir in ["copy", "ck/step-00000001"] {
        files.iter().for_each(|(name, text)| assert_eq!(work.read(&format!("{dir}/{name}")), *text));
        assert_eq!(work.read(&format!("{dir}/tokenizer_config.json")), work.read("tok/tokenizer_config.json"));
        let names = fs::read_dir(work.path(dir)).unwrap().map(|e| e.unwrap().file_name());
        assert!(names.into_iter().all(|name| name != "chat_template.jinja"));
        assert_eq!(fs::read_dir(work.path(dir).join("additional_chat_templates")).unwrap().count(), 2);
    }
    work.good(&format!(
        "{} --ckpt-dir ck --resume auto --save-hf copy --overwrite",
        TINY.replace("steps 1", "steps 2")
    ));
    // A name: its template is the default one of the copy, and all keep their names.
    let said = work
        .good(&format!("{TINY} --tokenizer-chat-template tool_use --save-hf copy --overwrite --save-gguf out.gguf"));
    assert!(said.contains("template tool_use, not the tokenizer's default one"), "{said}");
    assert_eq!(work.read("copy/chat_template.jinja"), TOOLS);
    for (name, text) in files.into_iter().chain([("additional_chat_templates/old.jinja", OWN)]) {
        assert_eq!(work.read(&format!("copy/{name}")), text);
    }
    let all = json!([entry("default", TOOLS), entry("old", OWN), entry("rag", RAG), entry("tool_use", TOOLS)]);
    assert_eq!(work.listed("copy"), all);
    let gguf = fs::read(work.path("out.gguf")).unwrap();
    for key in ["tokenizer.chat_template.old", "tokenizer.chat_template.rag", "tokenizer.chat_templates"] {
        assert!(has(&gguf, key), "{key}");
    }
    let default = gguf.windows(KEY.len() + 12).find(|w| w.starts_with(KEY) && w[KEY.len()] == 8).unwrap();
    assert_eq!(default[KEY.len() + 4..], (TOOLS.len() as u64).to_le_bytes());
    // A folder that holds anything else is not ours to replace.
    work.write("copy/additional_chat_templates/notes.txt", "");
    let (code, said) = work.run(&format!("{TINY} --save-hf copy --overwrite"));
    assert!(code == Some(2) && said.contains("contains additional_chat_templates"), "{said}");
}

/// The name and the type of the key of the default template.
const KEY: &[u8] = b"tokenizer.chat_template";

/// A model of bytes has no tokenizer's files, but a GGUF file has one.
#[test]
fn a_model_of_bytes_keeps_its_template_in_a_gguf_file() {
    let work = Work::new(Value::Null, &[]);
    let tiny = TINY.replace("--tokenizer tok", "--tokenizer bytes");
    let said = work.good(&format!("{tiny} --tokenizer-chat-template trained.jinja --save-hf out --save-gguf out.gguf"));
    assert!(!said.contains("saved models hold it") && !work.path("out/chat_template.jinja").exists(), "{said}");
    assert!(has(&fs::read(work.path("out.gguf")).unwrap(), TRAINED));
}

fn has(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}
