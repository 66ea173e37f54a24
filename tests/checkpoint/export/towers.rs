//! Vision-language models: their text model is loaded, and what else they have comes out byte for byte, under the names
//! of the source. `tests/golden/towers.py check` loads what is exported here into transformers.
use super::*;
use safetensors::SafeTensors;
use std::collections::BTreeMap;

const TOWERS: [&str; 12] = [
    "vl_gemma3",
    "vl_gemma4",
    "vl_mistral3",
    "vl_qwen2",
    "vl_qwen3",
    "vl_glm4v",
    "vl_llava",
    "vl_smolvlm",
    "vl_qwen3_moe",
    "vl_qwen3_5",
    "vl_gemma4_experts",
    "vl_llama4",
];

fn tower(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/towers").join(name)
}

pub type Bytes = BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>;

/// All tensors of a model in any number of files.
pub fn tensors(dir: &Path) -> Bytes {
    let files = listed(dir).into_iter().filter(|name| name.starts_with("model") && name.ends_with(".safetensors"));
    let mut all = BTreeMap::new();
    for file in files {
        let bytes = fs::read(dir.join(file)).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            all.insert(name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
        }
    }
    all
}
fn is_text(name: &str) -> bool {
    const PREFIXES: [&str; 7] = [
        "model.language_model.",
        "model.text_model.",
        "language_model.",
        "model.layers.",
        "model.embed_tokens.",
        "model.norm.",
        "lm_head.",
    ];
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// A copy of `from` whose tensors have the names of the modules.
fn later(from: &Path, to: &Path) {
    let renamed = |name: &str| match name.strip_prefix("language_model.") {
        Some(head) if head.starts_with("lm_head.") => head.to_string(),
        Some(text) => format!("model.language_model.{}", text.strip_prefix("model.").unwrap()),
        None if name.starts_with("model.language_model.") || name.starts_with("model.visual.") => name.into(),
        None if name.starts_with("lm_head.") => name.into(),
        None => match name.strip_prefix("model.") {
            Some(text) => format!("model.language_model.{text}"),
            None => format!("model.{name}"),
        },
    };
    let all = tensors(from).into_iter().map(|(name, tensor)| (renamed(&name), tensor)).collect();
    fs::create_dir_all(to).unwrap();
    write(&all, to);
    for name in ["config.json", "preprocessor_config.json"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

fn write(all: &Bytes, to: &Path) {
    let views = all.iter().map(|(name, (dtype, shape, data))| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &to.join("model.safetensors")).unwrap();
}

/// A tensor of layers that predict several tokens.
fn predictor() -> (String, (Dtype, Vec<usize>, Vec<u8>)) {
    ("mtp.fc.weight".into(), (Dtype::F32, vec![2, 3], (0..24).collect()))
}

/// The logits of transformers for the first document.
fn theirs(name: &str) -> (Vec<u32>, Vec<f32>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/families/{name}.safetensors"));
    let golden = crate::common::golden_tensors::Tensors::read(&path);
    let tokens: Vec<u32> = golden.integers["tokens"][..17].iter().map(|&t| t as u32).collect();
    (tokens, golden.floats["logits"].clone())
}

/// From a model to a checkpoint, to another number of ranks, to an export: text is the same, and the rest untouched,
/// although the source and the checkpoint are gone by then.
#[test]
fn text_is_loaded_and_the_rest_comes_out_untouched() {
    for name in TOWERS {
        // The others' files have these names, or all the first one's.
        let both = ["vl_gemma3", "vl_qwen2"].contains(&name);
        for later_names in if both { &[false, true][..] } else { &[false] } {
            let dir = tempfile::tempdir().unwrap();
            let (from, runs) = (dir.path().join("from"), dir.path().join("runs"));
            match *later_names {
                true => later(&tower(name), &from),
                false => copied(&tower(name), &from),
            }
            if name == "vl_qwen3_5" {
                write(&tensors(&from).into_iter().chain([predictor()]).collect(), &from);
            }
            let (source, spec) = (tensors(&from), hf::read(&from).unwrap());
            let suffix = if *later_names { "-later" } else { "" };
            let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("export").join(format!("{name}{suffix}"));
            let _ = fs::remove_dir_all(&to);
            ranks(2, |rank| {
                let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?;
                held.ckpt.accompany(Companions::of(&spec, Some(&from), None)?);
                held.ckpt.load_model(&from, &mut *held.store)?;
                held.ckpt.save(&runs, 1, &mut *held.store, &mut held.optimizer, &state(1))?;
                Ok(())
            });
            fs::remove_dir_all(&from).unwrap();
            let saved = runs.join("step-00000001");
            let state: Value = serde_json::from_slice(&fs::read(saved.join("trainer_state.json")).unwrap()).unwrap();
            let sums = state["checksums"]["tensors"].as_object().unwrap();
            // Of a tensor with all experts: one for each part.
            let has = |name: &String| sums.keys().any(|sum| sum.split('[').next() == Some(name));
            assert!(source.keys().all(has), "{name}: checksums");
            let max = if *later_names { SMALL } else { ckpt::layout::MAX_FILE_BYTES };
            ranks(3, |rank| {
                let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, max)?;
                held.ckpt.accompany(Companions::of(&spec, Some(&saved), None)?);
                held.ckpt.load(&saved, &mut *held.store, &mut held.optimizer)?;
                // Asynchronously, which removes the checkpoint that it was loaded from.
                held.ckpt.save_async(
                    &runs,
                    1,
                    &mut *held.store,
                    &mut held.optimizer,
                    &crate::common::known_state::state(2),
                )?;
                held.ckpt.settle()?;
                held.ckpt.save_hf(&to, Dtype::BF16, &mut *held.store)
            });
            assert!(!saved.exists(), "the first checkpoint is pruned");
            assert!(tensors(&to) == source, "{name}: all tensors and names of the source, byte for byte");
            let next = tensors(&runs.join("step-00000002"));
            assert!(next.iter().all(|(n, t)| if is_text(n) { t.0 == Dtype::F32 } else { *t == source[n] }), "{name}");
            assert_eq!(next.len(), source.len());
            for file in ["preprocessor_config.json", "config.json"] {
                let text = |dir: &Path| serde_json::from_slice::<Value>(&fs::read(dir.join(file)).unwrap()).unwrap();
                assert_eq!(text(&to), text(&tower(name)), "{name}");
            }
            assert_eq!(
                ckpt::carried(&to).unwrap().unwrap().tensors,
                source.keys().filter(|name| !is_text(name)).count()
            );

            let (tokens, logits_of) = theirs(name);
            let ours: Vec<f32> = logits(&to, 1, &tokens).into_iter().flatten().collect();
            let largest = logits_of.iter().fold(0f32, |m, x| m.max(x.abs()));
            let off = ours.iter().zip(&logits_of).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
            assert!(off < 5e-6, "{name}: logits differ by {off:.1e} of their largest");
        }
    }
}

/// Qwen 3 VL's experts were published as the transposes of what transformers saves.
#[test]
fn transposed_experts_are_read() {
    let (dir, name) = (tempfile::tempdir().unwrap(), "vl_qwen3_moe");
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    copied(&tower(name), &from);
    let source = tensors(&from);
    let mut published = source.clone();
    for (_, (dtype, shape, data)) in published.iter_mut().filter(|(name, _)| name.contains(".experts.")) {
        let &[count, rows, columns] = &shape[..] else { panic!("{shape:?}") };
        let size = dtype.bitsize() / 8;
        let data_of = data.clone();
        let element = |e: usize, i: usize| {
            let place = e * rows * columns + i % rows * columns + i / rows;
            data_of[place * size..(place + 1) * size].to_vec()
        };
        *data = (0..count)
            .flat_map(|e| (0..rows * columns).map(move |i| (e, i)))
            .flat_map(|(e, i)| element(e, i))
            .collect();
        *shape = vec![count, columns, rows];
    }
    let views = published.iter().map(|(name, (dtype, shape, data))| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &from.join("model.safetensors")).unwrap();
    let spec = hf::read(&from).unwrap();
    ranks(2, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, ckpt::layout::MAX_FILE_BYTES)?;
        held.ckpt.accompany(Companions::of(&spec, Some(&from), None)?);
        held.ckpt.load_model(&from, &mut *held.store)?;
        held.ckpt.save_hf(&to, Dtype::BF16, &mut *held.store)
    });
    assert!(tensors(&to) == source, "as transformers saves them");
}

fn copied(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for name in listed(from) {
        fs::copy(from.join(&name), to.join(name)).unwrap();
    }
}

/// A carried tensor that changed in a checkpoint is damage, and a model without any is refused.
#[test]
fn damaged_and_missing_vision_tensors_are_noticed() {
    let (dir, name) = (tempfile::tempdir().unwrap(), "vl_qwen3");
    let (from, runs) = (dir.path().join("from"), dir.path().join("runs"));
    copied(&tower(name), &from);
    let spec = hf::read(&from).unwrap();
    ranks(1, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, ckpt::layout::MAX_FILE_BYTES)?;
        held.ckpt.accompany(Companions::of(&spec, Some(&from), None)?);
        held.ckpt.load_model(&from, &mut *held.store)?;
        held.ckpt.save(&runs, 1, &mut *held.store, &mut held.optimizer, &state(1))
    });
    let file = runs.join("step-00000001/model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let visual = tensors(&runs.join("step-00000001")).remove("model.visual.pos_embed.weight").unwrap().2;
    let at = bytes.windows(visual.len()).position(|window| window == visual).unwrap();
    bytes[at + 5] ^= 1;
    fs::write(&file, bytes).unwrap();
    let errors = ranks(2, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?;
        let loaded = held.ckpt.load(&runs.join("step-00000001"), &mut *held.store, &mut held.optimizer);
        Ok(loaded.expect_err("a changed tensor"))
    });
    for error in errors {
        assert!(matches!(error, flatshard::base::Error::Damaged(_)), "{error}");
    }

    let text = tensors(&from).into_iter().filter(|(name, _)| is_text(name)).collect::<Bytes>();
    let views = text.iter().map(|(name, (dtype, shape, data))| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &from.join("model.safetensors")).unwrap();
    let layouts = Decoder::new(spec.clone()).unwrap().layouts().to_vec();
    let error = ckpt::inspect_model(&from, &spec, &layouts).unwrap_err().to_string();
    assert!(error.contains("no file has tensors of the vision tower"), "{error}");
}

/// Of a model without a tower too.
#[test]
fn layers_that_predict_several_tokens_come_out_untouched() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    fs::create_dir(&from).unwrap();
    let text = tensors(&tower("vl_qwen3_5")).into_iter().filter(|(name, _)| is_text(name));
    let text = text.map(|(name, tensor)| (name.replace("model.language_model.", "model."), tensor));
    let source: Bytes = text.chain([predictor()]).collect();
    write(&source, &from);
    let config: Value = serde_json::from_slice(&fs::read(tower("vl_qwen3_5").join("config.json")).unwrap()).unwrap();
    let mut config = config["text_config"].clone();
    config["architectures"] = serde_json::json!(["Qwen3_5ForCausalLM"]);
    fs::write(from.join("config.json"), config.to_string()).unwrap();
    let spec = hf::read(&from).unwrap();
    ranks(2, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?;
        held.ckpt.accompany(Companions::of(&spec, Some(&from), None)?);
        held.ckpt.load_model(&from, &mut *held.store)?;
        held.ckpt.save_hf(&to, Dtype::BF16, &mut *held.store)
    });
    assert!(tensors(&to) == source, "{:?}", tensors(&to).keys());
}
