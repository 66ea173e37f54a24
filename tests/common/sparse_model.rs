//! The tiny models of `tests/golden/experts` as model directories: 29 token ids, no tokenizer.
use safetensors::SafeTensors;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Writes the model of a family to `dir`, which must not exist.
pub fn write(family: &str, dir: &Path) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/experts").join(family);
    let values: Value = serde_json::from_slice(&fs::read(golden.with_extension("json")).unwrap()).unwrap();
    fs::create_dir(dir).unwrap();
    fs::write(dir.join("config.json"), values["config"].to_string()).unwrap();
    let bytes = fs::read(golden.with_extension("safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let weights = tensors.iter().filter_map(|(name, tensor)| Some((name.strip_prefix("weight.")?.to_string(), tensor)));
    fs::write(dir.join("model.safetensors"), safetensors::serialize(weights, None).unwrap()).unwrap();
}
