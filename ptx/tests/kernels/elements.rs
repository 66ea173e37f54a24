//! Kernels over flat arrays: casts, sums, SwiGLU, GELU and their gradients, AdamW.
use crate::harness::*;
use flatshard_ptx::emulate::{Argument, Argument::*, Memory};

/// Around the width of a vector, of a warp and of a grid.
const SIZES: [usize; 7] = [1, 3, 8, 31, 257, 1003, 4101];
const GRID: (u32, u32) = (3, 256);

#[test]
fn cast_rounds_to_nearest_even() {
    for n in SIZES {
        // Ties, both ways, and the largest that does not round to infinity, in front.
        let mut values: Vec<f64> = normal(1, n).iter().map(|v| v * 1.001).collect();
        let edges = [1.00390625, 1.01171875, -0.0, f32::MAX as f64, 3.3895e38, 1e-40];
        values.iter_mut().zip(edges).for_each(|(v, edge)| *v = edge);
        let narrow = agree(|schedule| {
            let mut memory = Memory::new();
            let (x, y) = (memory.upload("x", &encode(&values, DType::F32)), memory.alloc("y", 2 * n));
            let arguments = [Pointer(x), Pointer(y), U64(n as u64)];
            program("cast_f32_bf16").run("cast", &mut memory, GRID, &arguments, schedule);
            vec![memory.download(y).unwrap().to_vec()]
        });
        assert_eq!(narrow[0], encode(&values, DType::Bf16), "n {n}");
        let wide = agree(|schedule| {
            let mut memory = Memory::new();
            let (x, y) = (memory.upload("x", &narrow[0]), memory.alloc("y", 4 * n));
            let arguments = [Pointer(x), Pointer(y), U64(n as u64)];
            program("cast_bf16_f32").run("cast", &mut memory, GRID, &arguments, schedule);
            vec![memory.download(y).unwrap().to_vec()]
        });
        assert_eq!(wide[0], encode(&decode(&narrow[0], DType::Bf16), DType::F32), "n {n}");
    }
}

/// Some inputs at which a sigmoid in f32 is 0 or 1.
fn gates(n: usize) -> Vec<f64> {
    let mut gates: Vec<f64> = normal(2, n).iter().map(|g| g * 4.0).collect();
    gates.iter_mut().zip([0.0, -120.0, 120.0, -90.0, -16.0, 16.0]).for_each(|(g, edge)| *g = edge);
    gates
}

#[test]
fn swiglu() {
    for (dtype, name) in DTYPES {
        for n in SIZES {
            let (gate, up) = (gates(n), normal(3, n));
            let y = agree(|schedule| {
                let mut memory = Memory::new();
                let inputs = [("gate", &gate), ("up", &up)].map(|(k, v)| Pointer(memory.upload(k, &encode(v, dtype))));
                let y = memory.alloc("y", encode(&gate, dtype).len());
                let arguments = [inputs[0], inputs[1], Pointer(y), U64(n as u64)];
                program(&format!("swiglu_{name}")).run("swiglu", &mut memory, GRID, &arguments, schedule);
                vec![memory.download(y).unwrap().to_vec()]
            });
            let exact: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let (g, u) = (f32s(&gate), f32s(&up));
            let naive = f64s(g.iter().zip(&u).map(|(g, u)| g / (1.0 + (-g).exp()) * u));
            compare(&format!("swiglu {name} n {n}"), FORWARD, &y[0], dtype, &exact, &naive);
        }
    }
}

#[test]
fn swiglu_backward() {
    for (dtype, name) in DTYPES {
        for n in SIZES {
            let (gate, up, dy) = (gates(n), normal(3, n), normal(4, n));
            let got = agree(|schedule| {
                let mut memory = Memory::new();
                let inputs = [("gate", &gate), ("up", &up), ("dy", &dy)]
                    .map(|(name, values)| Pointer(memory.upload(name, &encode(values, dtype))));
                let bytes = encode(&gate, dtype).len();
                let outputs = ["dgate", "dup"].map(|name| memory.alloc(name, bytes));
                let arguments =
                    [inputs[0], inputs[1], inputs[2], Pointer(outputs[0]), Pointer(outputs[1]), U64(n as u64)];
                let program = program(&format!("swiglu_backward_{name}"));
                program.run("swiglu_backward", &mut memory, GRID, &arguments, schedule);
                outputs.map(|y| memory.download(y).unwrap().to_vec()).to_vec()
            });
            let (mut exact, mut naive) = ([vec![], vec![]], [vec![], vec![]]);
            for i in 0..n {
                let (g, u, d) = (gate[i], up[i], dy[i]);
                let s = 1.0 / (1.0 + (-g).exp());
                exact[0].push(d * u * (s + g * s * (1.0 - s)));
                exact[1].push(d * g * s);
                let (g, u, d) = (g as f32, u as f32, d as f32);
                let s = 1.0 / (1.0 + (-g).exp());
                naive[0].push((d * u * (s + g * s * (1.0 - s))) as f64);
                naive[1].push((d * g * s) as f64);
            }
            for (k, what) in ["dgate", "dup"].iter().enumerate() {
                compare(&format!("{what} {name} n {n}"), GRADIENT, &got[k], dtype, &exact[k], &naive[k]);
            }
        }
    }
}

/// Runs `entry` of its variant for the dtype: inputs, then one output that holds `before` or nothing.
fn flat(entry: &str, dtype: (DType, &str), inputs: &[&[f64]], before: Option<&[f64]>) -> Vec<u8> {
    let n = inputs[0].len();
    let outputs = agree(|schedule| {
        let mut memory = Memory::new();
        let mut pointers: Vec<u64> = inputs.iter().map(|v| memory.upload("input", &encode(v, dtype.0))).collect();
        let bytes = encode(inputs[0], dtype.0).len();
        let y = before.map(|values| memory.upload("y", &encode(values, dtype.0)));
        let y = y.unwrap_or_else(|| memory.alloc("y", bytes));
        pointers.push(y);
        let arguments: Vec<_> = pointers.into_iter().map(Pointer).chain([U64(n as u64)]).collect();
        program(&format!("{entry}_{}", dtype.1)).run(entry, &mut memory, GRID, &arguments, schedule);
        vec![memory.download(y).unwrap().to_vec()]
    });
    outputs.into_iter().next().unwrap()
}

#[test]
fn add_adds_to_what_is_there() {
    for dtype in DTYPES {
        for n in SIZES {
            let (x, y) = (normal(1, n), normal(2, n));
            let want: Vec<f64> = f64s(f32s(&x).iter().zip(f32s(&y)).map(|(x, y)| y + x));
            assert_eq!(flat("add", dtype, &[&x], Some(&y)), encode(&want, dtype.0), "{dtype:?} n {n}");
        }
    }
}

/// [gelu(x), its slope]: the tanh form as it is written.
macro_rules! gelu_of {
    ($real:ty, $x:expr) => {{
        let (c, k) = ((2.0 / std::f64::consts::PI).sqrt() as $real, 0.044715 as $real);
        let x = $x as $real;
        let t = (c * (x + k * x * x * x)).tanh();
        let slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * k * x * x);
        (0.5 * x * (1.0 + t), slope)
    }};
}

#[test]
fn gelu_and_its_gradient() {
    for dtype in DTYPES {
        for n in SIZES {
            let (x, dy) = (gates(n), normal(4, n));
            let exact: Vec<(f64, f64)> = x.iter().map(|x| gelu_of!(f64, *x)).collect();
            let naive: Vec<(f32, f32)> = x.iter().map(|x| gelu_of!(f32, *x)).collect();
            let (want, rough): (Vec<f64>, Vec<f64>) = exact.iter().zip(&naive).map(|(a, b)| (a.0, b.0 as f64)).unzip();
            let label = format!("gelu {} n {n}", dtype.1);
            compare(&label, FORWARD, &flat("gelu", dtype, &[&x], None), dtype.0, &want, &rough);
            let both = exact.iter().zip(&naive).zip(&dy);
            let (want, rough): (Vec<f64>, Vec<f64>) =
                both.map(|((a, b), dy)| (dy * a.1, (*dy as f32 * b.1) as f64)).unzip();
            let got = flat("gelu_backward", dtype, &[&x, &dy], None);
            compare(&format!("{label} backward"), GRADIENT, &got, dtype.0, &want, &rough);
        }
    }
}

#[test]
fn nan_stays_nan() {
    let gate = [f64::NAN, 1.0, 1.0, 1.0];
    let up = [1.0, f64::NAN, 1.0, 1.0];
    let mut memory = Memory::new();
    let inputs = [("gate", gate), ("up", up)].map(|(k, v)| Pointer(memory.upload(k, &encode(&v, DType::F32))));
    let y = memory.alloc("y", 16);
    program("swiglu_f32").run("swiglu", &mut memory, GRID, &[inputs[0], inputs[1], Pointer(y), U64(4)], 1);
    let y = decode(memory.download(y).unwrap(), DType::F32);
    assert_eq!(y.iter().map(|y| y.is_nan()).collect::<Vec<_>>(), [true, true, false, false]);
}

/// lr, beta1, beta2, eps, decay.
const HYPER: [f32; 5] = [1e-2, 0.9, 0.95, 1e-8, 0.1];
const SCALE: f64 = 0.75;

/// [m, v, p]: torch.optim.AdamW, line by line, in f64 or f32.
macro_rules! adamw_of {
    ($real:ty, $g:expr, $m:expr, $v:expr, $p:expr, $step:expr) => {{
        let [lr, b1, b2, eps, decay] = HYPER.map(|h| h as f64);
        let (bc1, bc2) = (1.0 - b1.powi($step), 1.0 - b2.powi($step));
        let mut out = [vec![], vec![], vec![]];
        for i in 0..$g.len() {
            let g = $g[i] as $real * SCALE as $real;
            let p = $p[i] as $real * (1.0 - lr * decay) as $real;
            let m = $m[i] as $real;
            let m = m + (g - m) * (1.0 - b1) as $real;
            let v = $v[i] as $real * b2 as $real + g * g * (1.0 - b2) as $real;
            let denominator = v.sqrt() / bc2.sqrt() as $real + eps as $real;
            let p = p - (lr / bc1) as $real * m / denominator;
            for (out, value) in out.iter_mut().zip([m, v, p]) {
                out.push(value as f64);
            }
        }
        out
    }};
}

#[test]
fn adamw() {
    for (variant, copy) in [("adamw", None), ("adamw_bf16", Some(DType::Bf16)), ("adamw_f32", Some(DType::F32))] {
        for (n, step) in [(1, 1), (7, 3), (1003, 1), (4101, 1000)] {
            let (g, m, p) = (normal(1, n), normal(2, n), normal(3, n));
            let v: Vec<f64> = normal(4, n).iter().map(|v| v * v).collect();
            let [lr, b1, b2, _, decay] = HYPER.map(|h| h as f64);
            let (size, root) = (lr / (1.0 - b1.powi(step)), 1.0 / (1.0 - b2.powi(step)).sqrt());
            let scalars = [1.0 - lr * decay, 1.0 - b1, b2, 1.0 - b2, size, root].map(|s| Argument::F32(s as f32));
            let got = agree(|schedule| {
                let mut memory = Memory::new();
                let buffers = [("g", &g), ("m", &m), ("v", &v), ("p", &p)]
                    .map(|(name, values)| memory.upload(name, &encode(values, DType::F32)));
                let bytes = copy.map_or(0, |dtype| encode(&p, dtype).len());
                let out = memory.alloc("out", bytes);
                // The second element is the norm, which AdamW does not use.
                let scale = memory.upload("scale", &encode(&[SCALE, 123.0], DType::F32));
                let mut arguments: Vec<_> = buffers.iter().chain([&out, &scale]).map(|&b| Pointer(b)).collect();
                arguments.push(U64(n as u64));
                arguments.extend(scalars);
                arguments.push(Argument::F32(HYPER[3]));
                program(variant).run("adamw", &mut memory, GRID, &arguments, schedule);
                let results = buffers[1..].iter().chain([&out]);
                results.map(|&b| memory.download(b).unwrap().to_vec()).collect()
            });
            let (exact, naive) = (adamw_of!(f64, g, m, v, p, step), adamw_of!(f32, g, m, v, p, step));
            for (k, what) in ["m", "v", "p"].iter().enumerate() {
                let label = format!("{variant} {what} n {n}");
                compare(&label, FORWARD, &got[k], DType::F32, &exact[k], &naive[k]);
            }
            if let Some(dtype) = copy {
                let p = decode(&got[2], DType::F32);
                assert_eq!(got[3], encode(&p, dtype), "{variant}: the copy is p rounded");
            }
        }
    }
}
