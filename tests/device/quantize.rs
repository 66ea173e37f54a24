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

/// Every code after every step is that of bitsandbytes. Weights and magnitudes differ in their last bits: products and
/// sums are in another order.
#[test]
fn steps_have_the_codes_of_bitsandbytes() {
    let Tensors { floats, integers } = golden();
    let (of, codes_of) = (|key: &str| &floats[&format!("step.{key}")], |key: &str| &integers[&format!("step.{key}")]);
    let n = of("p").len() - of("g").len();
    let dev = CpuDevice::new(Meter::default());
    let floats_in = |values: &[f32]| {
        let mut buf = dev.alloc(DType::F32, values.len(), Category::Other).unwrap();
        dev.upload(bytemuck::cast_slice(values), buf.view_mut()).unwrap();
        buf
    };
    let blocks = || floats_in(&vec![0.0; n.div_ceil(BLOCK)]);
    let codes = || dev.alloc(DType::U8, n, Category::Other).unwrap();
    let (mut p, mut m, mut v) = (floats_in(&of("p")[..n]), codes(), codes());
    let (mut of_m, mut of_v, scale) = (blocks(), blocks(), floats_in(&[1.0]));
    let near = |buf: &Buf, expected: &[f32], what: &str| {
        let mut got = vec![0f32; expected.len()];
        dev.download(buf.view(), bytemuck::cast_slice_mut(&mut got)).unwrap();
        let far = got.iter().zip(expected).find(|(a, b)| (*a - *b).abs() > 1e-6 * b.abs().max(0.1));
        assert!(far.is_none(), "{what}: {far:?}");
    };
    for (i, g) in of("g").chunks(n).enumerate() {
        let step = AdamWStep { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: i as u64 + 1 };
        let (h, g) = (floats_in(bytemuck::cast_slice(&[step.scalars()])), floats_in(g));
        let absmax = Some([of_m.view_mut(), of_v.view_mut()]);
        let (m_now, v_now, p_now) = (m.view_mut(), v.view_mut(), p.view_mut());
        let (h, scale, g, at) = (h.view(), scale.view(), g.view(), TensorPart::default());
        dev.adamw(AdamW { h, scale, g, m: m_now, v: v_now, p: p_now, out: None, absmax, at }).unwrap();
        for (buf, key) in [(&m, "m"), (&v, "v")] {
            let mut got = vec![0u8; n];
            dev.download(buf.view(), &mut got).unwrap();
            let expected = codes_of(key)[i * n..(i + 1) * n].iter().map(|code| *code as u8);
            assert!(got.into_iter().eq(expected), "{key} after step {}", i + 1);
        }
        near(&p, &of("p")[(i + 1) * n..(i + 2) * n], "weights");
        let own = i * n.div_ceil(BLOCK)..(i + 1) * n.div_ceil(BLOCK);
        near(&of_m, &of("of_m")[own.clone()], "largest first moments");
        near(&of_v, &of("of_v")[own], "largest second moments");
    }
}
