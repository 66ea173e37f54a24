//! 8-bit optimizer state: the maps, codes, magnitudes and values of bitsandbytes, bit for bit, and its updates. The
//! file is made by `tests/golden/adamw8bit.py`.
use crate::common::golden_tensors::Tensors;
use flatshard::base::dynamic8::{BLOCK, DynamicMap, SIGNED, UNSIGNED};
use flatshard::base::{Category, DType, Meter};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::ops::{AdamW, AdamWStep, TensorPart};
use flatshard::device::{Buf, Device};
use std::path::Path;

fn golden() -> Tensors {
    Tensors::read(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/adamw8bit.safetensors")))
}

#[test]
fn blocks_have_the_bits_of_bitsandbytes() {
    let Tensors { floats, integers } = golden();
    let maps: [(&str, &DynamicMap); 2] = [("signed", &SIGNED), ("unsigned", &UNSIGNED)];
    for (name, map) in maps {
        let of = |key: &str| &floats[&format!("{name}.{key}")];
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let mut all = vec![0.0; 256];
        map.dequantize(&std::array::from_fn::<u8, 256, _>(|code| code as u8), 1.0, &mut all);
        assert_eq!(bits(&all), bits(of("map")), "{name}: the map");
        let n = of("x").len();
        let (mut codes, mut absmax, mut values) = (vec![0; n], vec![0.0; n.div_ceil(BLOCK)], vec![0.0; n]);
        map.quantize_all(of("x"), &mut codes, &mut absmax);
        map.dequantize_all(&codes, absmax.iter().copied(), &mut values);
        let expected: Vec<u8> = integers[&format!("{name}.codes")].iter().map(|code| *code as u8).collect();
        assert_eq!(codes, expected, "{name}: codes");
        assert_eq!(bits(&absmax), bits(of("absmax")), "{name}: largest magnitudes");
        assert_eq!(bits(&values), bits(of("values")), "{name}: values");
    }
}

/// One tensor with its state.
struct Trained {
    dev: CpuDevice,
    /// Weights, first moments and second moments.
    state: [Buf; 3],
    /// Largest magnitudes of the moments.
    absmax: [Buf; 2],
    steps: u64,
}

impl Trained {
    fn new(weights: &[f32]) -> Trained {
        let dev = CpuDevice::new(Meter::default());
        let codes = || dev.alloc(DType::U8, weights.len(), Category::Other).unwrap();
        let blocks = || floats(&dev, &vec![0.0; weights.len().div_ceil(BLOCK)]);
        let (state, absmax) = ([floats(&dev, weights), codes(), codes()], [blocks(), blocks()]);
        Trained { dev, state, absmax, steps: 0 }
    }
    fn step(&mut self, lr: f32, weight_decay: f32, g: &[f32]) {
        self.steps += 1;
        let Trained { dev, state: [p, m, v], absmax, steps } = self;
        let step = AdamWStep { lr, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, step: *steps };
        let h = floats(dev, bytemuck::cast_slice(&[step.scalars()]));
        let (g, scale) = (floats(dev, g), floats(dev, &[1.0]));
        let absmax = Some(absmax.each_mut().map(Buf::view_mut));
        let (m, v, p) = (m.view_mut(), v.view_mut(), p.view_mut());
        let (h, scale, g, at) = (h.view(), scale.view(), g.view(), TensorPart::default());
        dev.adamw(AdamW { h, scale, g, m, v, p, out: None, absmax, at }).unwrap();
    }
    fn download<T: bytemuck::Pod>(&self, buf: &Buf) -> Vec<T> {
        let mut got = vec![T::zeroed(); buf.len()];
        self.dev.download(buf.view(), bytemuck::cast_slice_mut(&mut got)).unwrap();
        got
    }
}

fn floats(dev: &CpuDevice, values: &[f32]) -> Buf {
    let mut buf = dev.alloc(DType::F32, values.len(), Category::Other).unwrap();
    dev.upload(bytemuck::cast_slice(values), buf.view_mut()).unwrap();
    buf
}

/// Every code after every step is that of bitsandbytes, but for positive second moments. Weights and magnitudes differ
/// in their last bits: products and sums are in another order.
#[test]
fn steps_have_the_codes_of_bitsandbytes() {
    let Tensors { floats, integers } = golden();
    let (of, codes_of) = (|key: &str| &floats[&format!("step.{key}")], |key: &str| &integers[&format!("step.{key}")]);
    let n = of("p").len() - of("g").len();
    let mut trained = Trained::new(&of("p")[..n]);
    let near = |got: Vec<f32>, expected: &[f32], what: &str| {
        let far = got.iter().zip(expected).find(|(a, b)| (*a - *b).abs() > 1e-6 * b.abs().max(0.1));
        assert!(far.is_none(), "{what}: {far:?}");
    };
    for (i, g) in of("g").chunks(n).enumerate() {
        trained.step(1e-2, 0.1, g);
        let [p, m, v] = &trained.state;
        for (buf, key) in [(m, "m"), (v, "v")] {
            let expected = codes_of(key)[i * n..(i + 1) * n].iter().map(|code| *code as u8);
            assert!(trained.download::<u8>(buf).into_iter().eq(expected), "{key} after step {}", i + 1);
        }
        near(trained.download(p), &of("p")[(i + 1) * n..(i + 2) * n], "weights");
        let own = i * n.div_ceil(BLOCK)..(i + 1) * n.div_ceil(BLOCK);
        let [of_m, of_v] = &trained.absmax;
        near(trained.download(of_m), &of("of_m")[own.clone()], "largest first moments");
        near(trained.download(of_v), &of("of_v")[own], "largest second moments");
    }
}

/// As the embeddings of a rare token next to those of common ones: a small gradient once, and none in the next steps.
#[test]
fn weights_without_a_gradient_move_by_a_few_learning_rates() {
    let lr = 1e-3;
    for rare in [1e-2, 1e-3, 1e-4, 1e-5, 1e-6] {
        let mut trained = Trained::new(&[1.0; BLOCK]);
        let mut before = vec![1.0; BLOCK];
        for step in 0..20 {
            let g: [f32; BLOCK] =
                std::array::from_fn(|i| if i % 2 == 0 { 1.0 } else { rare * (step == 0) as u8 as f32 });
            trained.step(lr, 0.0, &g);
            let now: Vec<f32> = trained.download(&trained.state[0]);
            let most = now.iter().zip(&before).map(|(now, before)| (now - before).abs() / lr).fold(0.0, f32::max);
            assert!(most < 4.0, "a gradient of {rare}: step {step} moves a weight by {most} learning rates");
            before = now;
        }
    }
}
