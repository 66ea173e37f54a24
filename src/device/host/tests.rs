//! Updates have the same bits with any number of threads.
use super::*;
use crate::cpu::CpuDevice;
use crate::ops::{AdamWStep, TensorPart};
use flatshard_base::rng::Rng;
use flatshard_base::{Category, Meter};

/// Three updates of ranges of awkward lengths: masters, moments, and weights in bf16.
fn updated(threads: Option<usize>, moments: DType) -> Vec<Vec<u8>> {
    let dev = CpuDevice::new(Meter::default());
    let lengths = [5 * CHUNK / 4 + 3, 1, 130, 40_000];
    let owned = lengths.iter().sum();
    let staged = Staged { owned, grads: true, weights: Some(DType::Bf16) };
    let mut host = threads.map(|threads| HostUpdate::new(&dev, &staged, threads).unwrap());
    let draw = |seed: u64, len: usize, to: &mut Buf| {
        let rng = Rng::new(seed, 0);
        let values: Vec<f32> = (0..len).map(|i| rng.normal(i as u64)).collect();
        dev.upload(bytemuck::cast_slice(&values), to.view_mut()).unwrap();
    };
    let mut scale = dev.alloc(DType::F32, 1, Category::Other).unwrap();
    dev.upload(bytemuck::bytes_of(&0.3f32), scale.view_mut()).unwrap();
    let mut made = Vec::new();
    let mut kept: Vec<_> = (lengths.iter().enumerate())
        .map(|(i, &len)| {
            let mut p = dev.alloc_host(DType::F32, len).unwrap();
            draw(i as u64, len, &mut p);
            let [m, v] = [0, 1].map(|_| dev.alloc_host(moments, len).unwrap());
            (p, m, v, dev.alloc(DType::Bf16, len, Category::Params).unwrap())
        })
        .collect();
    let mut grads: Vec<_> = lengths.iter().map(|&len| dev.alloc(DType::F32, len, Category::Grads).unwrap()).collect();
    for step in 1..=3 {
        let h = AdamWStep { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step }.scalars();
        let numbers: &[f32] = bytemuck::cast_slice(std::slice::from_ref(&h));
        let mut constants = dev.alloc(DType::F32, numbers.len(), Category::Other).unwrap();
        dev.upload(bytemuck::cast_slice(numbers), constants.view_mut()).unwrap();
        for (i, (g, (p, m, v, out))) in grads.iter_mut().zip(&mut kept).enumerate() {
            draw(100 * step + i as u64, lengths[i], g);
            let (g, scale, out) = (g.view(), scale.view(), Some(out.view_mut()));
            let [p, m, v] = [p, m, v].map(Buf::view_mut);
            let op = AdamW {
                h: constants.view(),
                scale,
                g,
                m,
                v,
                p,
                out,
                absmax: None,
                at: TensorPart { key: i as u64, first: 5, ..TensorPart::default() },
            };
            match &mut host {
                Some(host) => host.adamw(&dev, numbers, op).unwrap(),
                None => dev.adamw(op).unwrap(),
            }
        }
        host.iter_mut().for_each(|host| host.finish(&dev).unwrap());
    }
    for (p, m, v, out) in &kept {
        for buf in [p, m, v, out] {
            let mut bytes = vec![0; buf.bytes()];
            dev.download(buf.view(), &mut bytes).unwrap();
            made.push(bytes);
        }
    }
    made
}

#[test]
fn any_number_of_threads_makes_the_bits_of_one_pass() {
    for moments in [DType::F32, DType::Bf16] {
        let once = updated(None, moments);
        for threads in [1, 2, 3, 7, 99] {
            assert!(updated(Some(threads), moments) == once, "{threads} threads, {moments}");
        }
    }
}
