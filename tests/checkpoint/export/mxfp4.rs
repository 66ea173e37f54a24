//! gpt-oss as it is published, with the matrices of experts in 4 bits: they are loaded with the values that
//! transformers expands them to, and exported as tensors of these. The model is made by `tests/golden/mxfp4.py`, whose
//! `check` loads what is exported here into transformers.
use super::towers::tensors;
use super::*;
use safetensors::SafeTensors;

#[test]
fn experts_in_4_bits_have_the_values_of_transformers() {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/mxfp4");
    let dir = tempfile::tempdir().unwrap();
    let spec = hf::read(&from).unwrap();
    let runs = dir.path().join("runs");
    ranks(2, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?;
        held.ckpt.load_model(&from, &mut *held.store)?;
        held.ckpt.save(&runs, 1, &mut *held.store, &mut held.optimizer, &state(1))?;
        Ok(())
    });
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("export/mxfp4");
    let _ = fs::remove_dir_all(&to);
    ranks(3, |rank| {
        let mut held = KnownState::new(&rank, &spec, &*plain(), ADAMW, SMALL)?;
        held.ckpt.accompany(Companions::of(&spec, Some(&from), None)?);
        held.ckpt.load(&runs.join("step-00000001"), &mut *held.store, &mut held.optimizer)?;
        held.ckpt.save_hf(&to, Dtype::BF16, &mut *held.store)
    });
    let (source, exported) = (tensors(&from), tensors(&to));
    let bytes = fs::read(from.join("expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&bytes).unwrap();
    for (name, (dtype, shape, data)) in &exported {
        match expected.tensor(name) {
            Ok(view) => {
                assert_eq!((*dtype, &shape[..], &data[..]), (view.dtype(), view.shape(), view.data()), "{name}")
            }
            Err(_) => assert!(source[name] == (*dtype, shape.clone(), data.clone()), "{name}"),
        }
    }
    // Two tensors of the source, blocks and scales, are one of ours.
    assert_eq!(exported.len(), source.len() - expected.len());
    let config: Value = serde_json::from_slice(&fs::read(to.join("config.json")).unwrap()).unwrap();
    assert!(config.get("quantization_config").is_none(), "{config}");
    assert_eq!(hf::read(&to).unwrap(), spec);
}
