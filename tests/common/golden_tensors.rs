//! Tensors of a golden file written by PyTorch, as f32 or i32.
use flatshard::base::dtype::Float;
use half::bf16;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::Path;

pub struct Tensors {
    pub floats: HashMap<String, Vec<f32>>,
    pub integers: HashMap<String, Vec<i32>>,
}

impl Tensors {
    pub fn read(path: &Path) -> Tensors {
        let bytes = std::fs::read(path).unwrap();
        let (mut floats, mut integers) = (HashMap::new(), HashMap::new());
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            let words = || tensor.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
            let halves = || tensor.data().chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]));
            match tensor.dtype() {
                Dtype::BF16 => floats.insert(name.to_string(), halves().map(Float::to_f32).collect()).is_some(),
                Dtype::F32 => floats.insert(name.to_string(), words().map(f32::from_le_bytes).collect()).is_some(),
                Dtype::I32 => integers.insert(name.to_string(), words().map(i32::from_le_bytes).collect()).is_some(),
                other => panic!("{name} is {other:?}"),
            };
        }
        Tensors { floats, integers }
    }
}
