//! A linear layer in FP8, compared with PyTorch's casts: `tests/golden/fp8.py`.
use super::*;
use crate::base::dtype::Float;
use crate::base::fp8::Fp8Shape;
use crate::base::{Category, DType, Elem, Meter};
use crate::device::Buf;
use crate::device::Device;
use crate::device::cpu::CpuDevice;
use crate::device::ops::Fp8Work;
use crate::nn::context::Batch;
use crate::nn::layout::{Init, Layout};
use crate::nn::product_buffers::Fp8Scratch;
use crate::nn::split::{Groups, Split};
use crate::nn::tensor::TensorShape;
use half::bf16;
use safetensors::SafeTensors;
use std::sync::Arc;

const SIZES: [usize; 3] = [5, 160, 200];

/// The same numbers as `hashed` in the script.
fn value(i: usize, salt: u32) -> bf16 {
    let u = (i as u32).wrapping_mul(2_654_435_761).wrapping_add(salt.wrapping_mul(40503));
    let u = (u ^ u >> 15).wrapping_mul(0x2c1b_3ac5);
    let u = u ^ u >> 12;
    let x = ((u >> 8) as f32 - 8_388_608.0) * 2f32.powi(-23);
    Float::from_f32(x * 2f32.powi(-((u % 12) as i32)))
}

fn buffer<T: Elem>(dev: &dyn Device, values: &[T]) -> Buf {
    let mut buf = dev.alloc(T::DTYPE, values.len(), Category::Other).unwrap();
    dev.upload(bytemuck::cast_slice(values), buf.view_mut()).unwrap();
    buf
}

#[test]
fn products_are_those_of_pytorchs_values() {
    let file = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/fp8.safetensors")).unwrap();
    let golden = SafeTensors::deserialize(&file).unwrap();
    let dev: Arc<dyn Device> = Arc::new(CpuDevice::new(Meter::default()));
    let (groups, [n, inputs, outputs]) = (Groups::solo(&dev), SIZES);
    let hashed = |len, salt| buffer(&*dev, &(0..len).map(|i| value(i, salt)).collect::<Vec<_>>());
    let zeros = |len| buffer(&*dev, &vec![bf16::ZERO; len]);
    let (x, w, dy) = (hashed(n * inputs, 1), hashed(outputs * inputs, 2), hashed(n * outputs, 3));
    let (mut y, mut dx, mut dw) = (zeros(n * outputs), zeros(n * inputs), buffer(&*dev, &vec![0f32; outputs * inputs]));

    let scratch = |dtype, len| TensorShape::new(Category::Scratch, dtype, 1, len).allocate("test", &*dev, &groups);
    let empty = || scratch(DType::Bf16, 0).unwrap();
    let fp8 = Fp8Scratch {
        bytes: scratch(DType::U8, outputs * inputs).unwrap(),
        scales: scratch(DType::F32, 2 * n + Fp8Work::scales(&Fp8Shape::weight(outputs, inputs))).unwrap(),
        rows: scratch(DType::Bf16, n * outputs).unwrap(),
        weight: scratch(DType::Bf16, outputs * inputs).unwrap(),
    };
    let mut work = AdapterScratch { low: empty(), kept: empty(), dlow: empty(), dropped: empty(), tile: empty(), fp8 };
    let nothing = zeros(0);
    let view = nothing.view();
    let cx = Cx {
        dev: &*dev,
        groups: &groups,
        split: Split::NONE,
        batch: Batch {
            tokens: view,
            targets: view,
            positions: view,
            cu_seqlens: view,
            documents: view,
            rows: None,
            padding: 0,
            labeled: None,
        },
        n,
        tables: [view; 3],
        ones: view,
        residual: 1.0,
        dropout: None,
        adapter_keys: None,
        layer: 0,
        attended: false,
        adapted: true,
        balance: None,
        paged: None,
        spec: &crate::nn::Spec::default(),
    };
    let mut layout = Layout::default();
    let weight = layout.push("up_proj.weight", &[outputs, inputs], true, Init::Constant(0.0));
    layout.segments[weight].fp8 = true;
    let weights = Weights::plain(w.view(), &layout);
    let mut grads = Grads::new(Some(dw.view_mut()), &layout);
    let linear = Linear::new(weight, outputs, inputs);
    linear.forward(&cx, weights, x.view(), &mut work, y.view_mut()).unwrap();
    linear.backward(&cx, weights, &mut grads, x.view(), dy.view(), &mut work, dx.view_mut(), false).unwrap();

    // The weight's gradient is a product in bf16.
    let sum = |i: usize| -> f64 {
        let (row, column) = (i / inputs, i % inputs);
        (0..n).map(|t| value(t * outputs + row, 3).to_f64() * value(t * inputs + column, 1).to_f64()).sum()
    };
    let read = |name: &str| -> Vec<f32> {
        let tensor = golden.tensor(&format!("linear:{name}")).unwrap();
        tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let in_full = (0..outputs * inputs).map(|i| sum(i) as f32).collect();
    let mut compared = 0;
    for (name, found, expected) in [("y", &y, read("y")), ("dx", &dx, read("dx")), ("dw", &dw, in_full)] {
        let found: Vec<f32> = match found.dtype() {
            DType::F32 => found.view().host::<f32>("test").unwrap().to_vec(),
            _ => found.view().host::<bf16>("test").unwrap().iter().map(|x| Float::to_f32(*x)).collect(),
        };
        assert_eq!(found.len(), expected.len(), "{name}");
        // One rounding to bf16, and sums in f32 of numbers up to 1.
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            assert!((a - b).abs() <= b.abs() / 256.0 + 1e-4, "{name}[{i}]: {a}, PyTorch {b}");
            compared += 1;
        }
    }
    assert_eq!(compared, n * outputs + n * inputs + outputs * inputs);
}
