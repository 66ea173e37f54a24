//! Every form, dtype, kernel and awkward size, compared with f64. The bound: at most twice the error of a naive product
//! in the same dtypes.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod model;

use super::*;
use crate::buf::{Buf, Place};
use crate::cpu::CpuDevice;
use crate::cpu::activation;
use crate::ops::Epilogue;
use crate::{Device, View};
use flatshard_base::dtype::Float;
use flatshard_base::rng::Rng;
use flatshard_base::{Elem, Meter};
use std::io::Write;
use std::ptr::NonNull;
use std::sync::Arc;

/// What C may be.
#[cfg(target_arch = "x86_64")]
trait Output: Float + store::StoreSums {}
#[cfg(target_arch = "x86_64")]
impl<T: Float + store::StoreSums> Output for T {}
#[cfg(not(target_arch = "x86_64"))]
trait Output: Float {}
#[cfg(not(target_arch = "x86_64"))]
impl<T: Float> Output for T {}

fn buf<T: Elem>(mut data: Vec<T>) -> Buf {
    let (at, len) = (NonNull::new(data.as_mut_ptr()).unwrap(), data.len());
    // SAFETY: the vector's memory does not move with it, and nothing else accesses it.
    unsafe { Buf::from_raw(at.cast(), T::DTYPE, len, Place::Host, Arc::new(data)) }
}
fn values<T: Elem>(buf: &Buf) -> &[T] {
    buf.view().host("test").unwrap()
}

/// `rows` x `columns` of `x(row, column)`, with poison between the rows.
fn matrix<T: Float>(rows: usize, columns: usize, ld: usize, x: impl Fn(usize, usize) -> f32) -> Buf {
    let gap = f32::NAN;
    let at = |i: usize| if i % ld < columns { x(i / ld, i % ld) } else { gap };
    // Starts one element in, so that nothing is aligned to more than an element.
    buf((0..=rows * ld).map(|i| T::from_f32(if i == 0 { gap } else { at(i - 1) })).collect::<Vec<T>>())
}

/// The implementation: a kernel of this machine, or the model of the tiles.
enum Under {
    Test(GemmScratch),
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Model(Buffers),
}

impl Under {
    fn name(&self) -> String {
        match self {
            Under::Test(scratch) => scratch.kernel_name().into(),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Under::Model(_) => "AMX model".into(),
        }
    }
    /// The model's tiles hold bf16, and parts of f32.
    fn takes(&self, dtype: DType) -> bool {
        matches!(self, Under::Test(_)) || dtype != DType::F16
    }
    fn gemm<C: Output>(&mut self, shape: &GemmShape, a: View, b: View, c: ViewMut) {
        match self {
            Under::Test(scratch) => {
                let product = if scratch.is_narrow(shape, a.dtype()) { gemm_narrow } else { gemm };
                product(scratch, Gemm { shape: *shape, a, b, c }).unwrap()
            }
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Under::Model(buffers) => {
                let (then, c) = ((Completion::Nothing, None), written::<C>(c).unwrap());
                // SAFETY: constructed only with AVX-512; the operands hold the extents.
                match a.dtype() {
                    DType::F32 => unsafe {
                        let [a, b] = [a, b].map(|x| bytemuck::cast_slice(x.host::<f32>("test").unwrap()));
                        blocked::product::<split::SplitF32, C, _>(&model::Tiles, shape, a, b, c, then, buffers)
                    },
                    _ => unsafe {
                        let [a, b] = [a, b].map(|x| x.host::<bf16>("test").unwrap());
                        blocked::product(&model::Tiles, shape, a, b, c, then, buffers)
                    },
                }
            }
        }
    }
}

/// All that can run here; prints what cannot.
fn under_test() -> Vec<Under> {
    let mut all = vec![];
    for kernel in GemmKernel::ALL {
        match GemmScratch::with_kernel(kernel) {
            Ok(scratch) => all.push(Under::Test(scratch)),
            Err(e) => _ = writeln!(std::io::stderr(), "NOT TESTED: {e}"), // not captured by the test runner
        }
    }
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    match avx512::has_bf16() {
        true => all.push(Under::Model(Buffers::default())),
        false => _ = writeln!(std::io::stderr(), "NOT TESTED: the AMX model needs AVX512-BF16 for packing"),
    }
    all
}

/// Odd sizes and edges of panels and tiles; then, for every kernel, several stretches of k with several blocks of rows,
/// bands of rows, and blocks of columns.
const SIZES: [[usize; 3]; 15] = [
    [1, 1, 1],
    [1, 40, 3],
    [5, 1, 33],
    [12, 32, 32],
    [13, 33, 31],
    [2, 64, 47],
    [7, 37, 49],
    [32, 64, 64],
    [31, 17, 2],
    [47, 65, 97],
    [193, 96, 64],
    [3, 70, 2100],
    [400, 40, 1100],
    [1030, 33, 1100],
    [3, 2100, 1100],
];

/// With a side as narrow as a rank, in each form.
const NARROW: [[usize; 3]; 6] =
    [[100, 8, 310], [31, 16, 1100], [9, 271, 1300], [300, 4, 48], [40, 259, 5], [23, 300, 11]];

fn forms([m, n, k]: [usize; 3], gap: usize) -> impl Iterator<Item = GemmShape> {
    let pad = move |g: GemmShape| GemmShape { lda: g.lda + gap, ldb: g.ldb + gap, ldc: g.ldc + 2 * gap, ..g };
    [GemmShape::nn(m, n, k), GemmShape::nt(m, n, k), GemmShape::tn(m, n, k)].into_iter().map(pad)
}

fn agrees<T: Float, C: Output>(all: &mut [Under], shape: GemmShape) {
    let GemmShape { m, n, k, ta, tb, .. } = shape;
    let (ra, rb) = (Rng::new(1, 2), Rng::new(3, 4));
    let round = |x: f32| T::from_f32(x).to_f32();
    let a: Vec<f32> = (0..m * k).map(|i| round(ra.normal(i as u64))).collect();
    let b: Vec<f32> = (0..n * k).map(|i| round(rb.normal(i as u64))).collect(); // transposed: both run along k
    let before = |i: usize, j: usize| ((i * 7 + j * 3) % 11) as f32 - 5.0;
    let (rows_a, wide_a) = if ta { (k, m) } else { (m, k) };
    let (rows_b, wide_b) = if tb { (n, k) } else { (k, n) };
    let stored_a = matrix::<T>(rows_a, wide_a, shape.lda, |r, c| if ta { a[c * k + r] } else { a[r * k + c] });
    let stored_b = matrix::<T>(rows_b, wide_b, shape.ldb, |r, c| if tb { b[r * k + c] } else { b[c * k + r] });

    let mut exact = vec![0f64; m * n];
    let mut naive = vec![0f32; m * n];
    for i in 0..m {
        for j in 0..n {
            for (x, y) in a[i * k..][..k].iter().zip(&b[j * k..][..k]) {
                exact[i * n + j] += *x as f64 * *y as f64;
                naive[i * n + j] += x * y;
            }
        }
    }
    for accumulate in [false, true] {
        let shape = GemmShape { accumulate, ..shape };
        let old = |i: usize| if accumulate { before(i / n, i % n) } else { 0.0 };
        let error = |of: &dyn Fn(usize) -> f32| {
            (0..m * n).map(|i| (of(i) as f64 - exact[i] - old(i) as f64).abs()).fold(0.0, f64::max)
        };
        let scale = exact.iter().fold(0.0, |s: f64, x| s.max(x.abs()));
        let allowed = 2.0 * error(&|i| C::from_f32(naive[i] + old(i)).to_f32()) + f32::EPSILON as f64 * scale;
        for under in all.iter_mut() {
            // Without `accumulate`, C must not be read.
            let fill = |i, j| if accumulate { before(i, j) } else { f32::NAN };
            let mut c = matrix::<C>(m, n, shape.ldc, fill);
            let [len_a, len_b, len_c] = shape.extents().map(|extent| 1..1 + extent);
            under.gemm::<C>(
                &shape,
                stored_a.view().slice(len_a),
                stored_b.view().slice(len_b),
                c.view_mut().slice(len_c),
            );
            let c = &values::<C>(&c)[1..];
            let got = |i: usize| c[i / n * shape.ldc + i % n].to_f32();
            assert!((0..m * n).all(|i| got(i).is_finite()), "{} {shape:?}: not finite", under.name());
            let e = error(&got);
            assert!(e <= allowed, "{} {} {shape:?}: error {e:.2e}, allowed {allowed:.2e}", under.name(), C::DTYPE);
            let gaps = (0..m * shape.ldc).filter(|i| i % shape.ldc >= n);
            assert!(gaps.map(|i| c[i].to_f32()).all(f32::is_nan), "{} {shape:?}: wrote between rows", under.name());
        }
    }
}

#[test]
fn f32_products() {
    products::<f32, f32>();
}
#[test]
fn bf16_products() {
    products::<bf16, f32>();
    products::<bf16, bf16>();
}
#[test]
fn f16_products() {
    products::<f16, f32>();
    products::<f16, f16>();
}
fn products<T: Float, C: Output>() {
    let mut all = under_test();
    all.retain(|under| under.takes(T::DTYPE));
    for size in SIZES {
        for gap in [0, 3] {
            forms(size, gap).for_each(|shape| agrees::<T, C>(&mut all, shape));
        }
    }
    // The model of the tiles has no loops for these.
    all.retain(|under| matches!(under, Under::Test(_)));
    for size in NARROW {
        for gap in [0, 3] {
            forms(size, gap).for_each(|shape| agrees::<T, C>(&mut all, shape));
        }
    }
}

/// Threads divide products with more columns than rows by columns, and others by rows, where none may be left with few.
#[test]
fn any_number_of_threads_gives_the_bits_of_one() {
    divided::<f32>();
    divided::<bf16>();
    divided::<f16>();
}
fn divided<T: Float>() {
    let of = |seed, len: usize| {
        let rng = Rng::new(seed, 2);
        buf((0..len).map(|i| T::from_f32(rng.normal(i as u64))).collect::<Vec<T>>())
    };
    for kernel in GemmKernel::ALL.into_iter().filter(|k| k.available()) {
        let device = || CpuDevice::with_kernel(Meter::default(), kernel).unwrap();
        let [one, several] = [device(), device().with_threads(3).unwrap().with_grain(1)];
        let sizes = [0, 1, 2, 3, 7, 8, 9, 13, 20, 28, 44, 68, 200].map(|m| [m, 150, 70]);
        for size in sizes.into_iter().chain([
            [40, 150, 2100],
            [300, 310, 70],
            [90, 9, 300],
            [270, 7, 40],
            [11, 300, 40],
            [50, 270, 12],
        ]) {
            for shape in forms(size, 3) {
                let [a, b, c] = shape.extents();
                let (a, b) = (of(1, a), of(2, b));
                let product = |dev: &CpuDevice| {
                    let mut out = of(3, c);
                    dev.gemm(Gemm { shape, a: a.view(), b: b.view(), c: out.view_mut() }).unwrap();
                    values::<T>(&out).iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>()
                };
                assert_eq!(product(&one), product(&several), "{} {} {shape:?}", kernel.name(), T::DTYPE);
            }
            for (shape, then) in forms(size, 0).flat_map(|shape| [(shape, 0), (shape, 1), (shape, 2)]) {
                let [a, b, c] = shape.extents();
                let (a, b, bias, given) = (of(1, a), of(2, b), of(4, shape.n), of(5, c));
                let fused = |dev: &CpuDevice| {
                    let (mut out, mut z) = (of(3, c), of(6, c));
                    let bias = Some(bias.view());
                    let then = match then {
                        0 => Epilogue::Sum { bias, residual: Some(given.view()) },
                        1 => Epilogue::Gelu { bias, z: z.view_mut() },
                        _ => Epilogue::GeluBackward { z: given.view(), product: z.view_mut() },
                    };
                    let op = GemmThen { shape, a: a.view(), b: b.view(), c: out.view_mut(), then };
                    dev.gemm_then(op).unwrap();
                    let bits = |of: &Buf| values::<T>(of).iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>();
                    (bits(&out), bits(&z))
                };
                let same = fused(&one) == fused(&several);
                assert!(same, "{} {} {shape:?}, epilogue {then}", kernel.name(), T::DTYPE);
            }
        }
    }
}

/// C is stored past the caches only where it starts on a line and is large: with the same bits as elsewhere, for every
/// column of the last block, and where sums over several stretches of k come first.
#[test]
fn stores_past_the_caches_change_no_bit() {
    fn bits<T: Float, C: Output>(all: &mut [Under]) {
        for ([m, n, k], gap) in [([1100, 2080, 33], 0), ([2100, 1070, 40], 18), ([40, 32800, 1600], 0)] {
            let shape = GemmShape::nt(m, n, k);
            let shape = GemmShape { ldc: n + gap, ..shape };
            let rng = Rng::new(7, k as u64);
            let [a, b] = shape.extents()[..2] else { panic!("three extents") };
            let [a, b] = [a, b].map(|len| buf((0..len).map(|i| T::from_f32(rng.normal(i as u64))).collect::<Vec<T>>()));
            // The `gemm-f32` crate stores C itself; the model computes its tiles number by number.
            let writes = |u: &&mut Under| match u {
                Under::Test(scratch) => scratch.kernel_name() != GemmKernel::Plain.name(),
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                Under::Model(_) => n < 32_000 && u.takes(T::DTYPE),
            };
            for under in all.iter_mut().filter(writes) {
                // Lines of 64 bytes from one in this memory on; then from one element later on.
                let mut memory = buf(vec![C::from_f32(f32::NAN); shape.extents()[2] + 65]);
                let line = (64 - memory.view().as_ptr() as usize % 64) / size_of::<C>();
                let [on, off] = [line, line + 1].map(|first| {
                    let mut c = memory.view_mut().slice(first..first + shape.extents()[2]);
                    under.gemm::<C>(&shape, a.view(), b.view(), c.reborrow());
                    c.host::<C>("test").unwrap().chunks(shape.ldc).flat_map(|row| row[..n].to_vec()).collect::<Vec<C>>()
                });
                let name = under.name();
                assert!(on.iter().all(|x| x.to_f32().is_finite()), "{name} {m}x{n}x{k}: not written");
                assert!(on.iter().zip(&off).all(|(a, b)| a == b), "{name} {m}x{n}x{k} {}", C::DTYPE);
            }
        }
    }
    let mut all = under_test();
    bits::<f32, f32>(&mut all);
    bits::<bf16, f32>(&mut all);
    bits::<bf16, bf16>(&mut all);
    bits::<f16, f16>(&mut all);
}

/// What is fused gives the bits of f32 code on the product's f32 sums, rounded where something is stored: across edges
/// of blocks, bands and stretches of k.
#[test]
fn fused_epilogues_round_once() {
    fused::<f32>();
    fused::<bf16>();
    fused::<f16>();
}
fn fused<T: Float>() {
    for [m, n, k] in [[13, 33, 31], [31, 70, 4100], [1030, 40, 2100], [2, 2100, 70]] {
        let of = |seed, len: usize| -> Vec<T> {
            let rng = Rng::new(seed, 2);
            (0..len).map(|i| T::from_f32(rng.normal(i as u64))).collect()
        };
        let shape = GemmShape::nt(m, n, k);
        let (a, b, bias, given) = (buf(of(1, m * k)), buf(of(2, n * k)), buf(of(3, n)), buf(of(4, m * n)));
        let float = |x: &Buf, i: usize| values::<T>(x)[i].to_f32();
        for kernel in GemmKernel::ALL.into_iter().filter(|k| k.available()) {
            let mut scratch = GemmScratch::with_kernel(kernel).unwrap();
            if !scratch.fuses() {
                continue;
            }
            let mut sums = buf(vec![0f32; m * n]);
            gemm(&mut scratch, Gemm { shape, a: a.view(), b: b.view(), c: sums.view_mut() }).unwrap();
            let sum = |i: usize| values::<f32>(&sums)[i];
            let mut check = |then: Epilogue, want: &dyn Fn(usize) -> f32| {
                let mut c = buf(vec![T::from_f32(f32::NAN); m * n]);
                let op = GemmThen { shape, a: a.view(), b: b.view(), c: c.view_mut(), then };
                op.check().unwrap();
                // SAFETY: checked.
                unsafe { gemm_then(&mut scratch, op) }.unwrap();
                let wrong = (0..m * n).find(|&i| float(&c, i) != T::from_f32(want(i)).to_f32());
                assert!(wrong.is_none(), "{} {} {shape:?}: element {wrong:?}", kernel.name(), T::DTYPE);
            };
            check(Epilogue::Sum { bias: None, residual: None }, &sum);
            check(Epilogue::Sum { bias: Some(bias.view()), residual: Some(given.view()) }, &|i| {
                sum(i) + float(&bias, i % n) + float(&given, i)
            });
            let mut z = buf(vec![T::from_f32(f32::NAN); m * n]);
            let kept = |i| T::from_f32(sum(i) + float(&bias, i % n)).to_f32();
            check(Epilogue::Gelu { bias: Some(bias.view()), z: z.view_mut() }, &|i| activation::gelu_at(kept(i)));
            assert!((0..m * n).all(|i| float(&z, i) == kept(i)), "{} {} {shape:?}: z", kernel.name(), T::DTYPE);
            let then = Epilogue::GeluBackward { z: given.view(), product: z.view_mut() };
            check(then, &|i| sum(i) * activation::gelu_slope_at(float(&given, i)));
        }
    }
}

#[test]
fn nothing_to_sum_assigns_zero_or_adds_nothing() {
    let (a, b) = (buf::<bf16>(vec![]), buf::<bf16>(vec![]));
    for mut under in under_test() {
        for (accumulate, want) in [(false, 0.0), (true, 7.0)] {
            let mut c = buf(vec![7f32; 6]);
            under.gemm::<f32>(&GemmShape { accumulate, ..GemmShape::nt(2, 3, 0) }, a.view(), b.view(), c.view_mut());
            assert_eq!(values::<f32>(&c), [want; 6], "{}", under.name());
        }
    }
    let (a, b) = (buf::<f32>(vec![]), buf::<f32>(vec![]));
    for kernel in [GemmKernel::Plain, GemmScratch::new().kernel()] {
        let mut c = buf(vec![7f32; 6]);
        let mut scratch = GemmScratch::with_kernel(kernel).unwrap();
        let shape = GemmShape::nn(2, 3, 0);
        gemm(&mut scratch, Gemm { shape, a: a.view(), b: b.view(), c: c.view_mut() }).unwrap();
        assert_eq!(values::<f32>(&c), [0.0; 6], "{}", kernel.name());
    }
    // No rows or no columns: nothing to write.
    for shape in [GemmShape::nn(0, 3, 2), GemmShape::nt(2, 0, 3)] {
        let (a, b, mut c) = (buf(vec![1f32; 6]), buf(vec![1f32; 6]), buf::<f32>(vec![]));
        gemm(&mut GemmScratch::new(), Gemm { shape, a: a.view(), b: b.view(), c: c.view_mut() }).unwrap();
    }
    let several = CpuDevice::new(Meter::default()).with_threads(3).unwrap().with_grain(1);
    for shape in [GemmShape::nn(0, 150, 70), GemmShape::nt(0, 150, 70)] {
        let (a, b, mut c) = (buf::<f32>(vec![]), buf(vec![1f32; 150 * 70]), buf::<f32>(vec![]));
        several.gemm(Gemm { shape, a: a.view(), b: b.view(), c: c.view_mut() }).unwrap();
    }
}

/// Few rows of A are multiplied without packing B, or strip by strip: with the same bits as among many rows, at every
/// edge and over several stretches of k.
#[test]
fn few_rows_have_the_bits_of_many() {
    fn bits<T: Float, C: Output>(all: &mut [Under]) {
        const MANY: usize = 300;
        let sizes = [
            ([1, 600], 2),
            ([64, 128], 0),
            ([97, 70], 3),
            ([70, 3232], 0),
            ([45, 2100], 1),
            ([31, 65], 0),
            ([33, 1040], 0),
        ];
        for (([n, k], gap), form) in sizes.into_iter().flat_map(|size| [(size, true), (size, false)]) {
            let many = if form { GemmShape::nt(MANY, n, k) } else { GemmShape::nn(MANY, n, k) };
            let many = GemmShape { lda: many.lda + gap, ldb: many.ldb + gap, ldc: n + gap, ..many };
            let [la, lb, lc] = many.extents();
            let of = |seed, len: usize| {
                let rng = Rng::new(seed, 2);
                buf((0..len).map(|i| T::from_f32(rng.normal(i as u64))).collect::<Vec<T>>())
            };
            let (a, b) = (of(1, la), of(2, lb));
            for (u, accumulate) in (0..2 * all.len()).map(|i| (i / 2, i % 2 == 1)) {
                let under = &mut all[u];
                let name = (under.name(), C::DTYPE);
                let mut product = |first: usize, m: usize| {
                    let shape = GemmShape { m, accumulate, ..many };
                    let mut c = buf(vec![C::from_f32(0.75); lc]);
                    let at = first * shape.lda..first * shape.lda + shape.extents()[0];
                    under.gemm::<C>(&shape, a.view().slice(at), b.view(), c.view_mut());
                    let c = values::<C>(&c);
                    (0..m * n).map(|i| c[i / n * shape.ldc + i % n].to_f32().to_bits()).collect::<Vec<_>>()
                };
                let whole = product(0, MANY);
                for (first, m) in
                    [(7, 1), (3, 2), (6, 3), (5, 5), (2, 8), (0, 9), (11, 16), (20, 33), (40, 64), (100, 131), (1, 256)]
                {
                    let (part, of) = (product(first, m), first * n..(first + m) * n);
                    assert!(part == whole[of], "{name:?} {m}x{n}x{k}, transposed {form}, accumulate {accumulate}");
                }
            }
        }
    }
    let mut all = under_test();
    bits::<f32, f32>(&mut all);
    bits::<bf16, f32>(&mut all);
    bits::<bf16, bf16>(&mut all);
    all.retain(|under| matches!(under, Under::Test(_))); // the model of AMX has no f16
    bits::<f16, f16>(&mut all);
}

/// Where f32 is multiplied in parts, these are the whole number, from 2^-103 on; smaller ones lose their last bits.
/// What is not finite does not become finite.
#[cfg(target_arch = "x86_64")]
#[test]
fn f32_is_the_sum_of_its_parts() {
    let product = |a: Vec<f32>, b: f32| -> Vec<f32> {
        let (m, mut scratch) = (a.len(), GemmScratch::new());
        let (a, b, mut c) = (buf(a), buf(vec![b; 16]), buf(vec![0f32; m * 16]));
        gemm(&mut scratch, Gemm { shape: GemmShape::nt(m, 16, 1), a: a.view(), b: b.view(), c: c.view_mut() }).unwrap();
        values::<f32>(&c).iter().step_by(16).copied().collect()
    };
    let rng = Rng::new(5, 6);
    let random =
        |i: usize| f32::from_bits((rng.normal(i as u64).to_bits() & 0x807f_ffff) | ((24 + i as u32 % 230) << 23));
    let mut numbers: Vec<f32> = (0..4000).map(random).collect();
    numbers.extend([0.0, 1.0, -1.5, 16_777_215.0, f32::from_bits(0x7f7e_ffff), 1.0 + f32::EPSILON, 257.0, 65_537.0]);
    assert_eq!(product(numbers.clone(), 1.0), numbers);
    let none: Vec<f32> = [f32::NAN, f32::INFINITY, -f32::INFINITY].repeat(5);
    assert!(product(none, 2.0).iter().all(|x| !x.is_finite()));
}

#[test]
fn what_does_not_fit_is_refused() {
    let (f, h) = (buf(vec![0f32; 64]), buf(vec![bf16::ZERO; 64]));
    let mut scratch = GemmScratch::new();
    let mut refused = |shape: GemmShape, a: View, b: View, mut c: Buf| {
        let e = gemm(&mut scratch, Gemm { shape, a, b, c: c.view_mut() }).unwrap_err().to_string();
        assert!(e.starts_with("gemm: "), "{e}");
    };
    let c = || buf(vec![0f32; 64]);
    refused(GemmShape::nn(8, 8, 9), f.view(), f.view(), c()); // A and B too short
    refused(GemmShape::nn(9, 8, 4), f.view(), f.view(), c()); // C too short
    refused(GemmShape::nt(8, 8, 8).ldb(9), f.view(), f.view(), c());
    refused(GemmShape::nn(2, 8, 2).ldc(7), f.view(), f.view(), c()); // rows of C overlap
    refused(GemmShape::nn(8, 8, 8), f.view(), h.view(), c());
    refused(GemmShape::nn(8, 8, 8), f.view(), f.view(), buf(vec![bf16::ZERO; 64]));
}

#[test]
fn scratch_stops_growing() {
    let (a, b) = (buf(vec![bf16::ONE; 300 * 200]), buf(vec![bf16::ONE; 300 * 200]));
    for kernel in GemmKernel::ALL.into_iter().filter(|k| k.available()) {
        let mut scratch = GemmScratch::with_kernel(kernel).unwrap();
        let mut run = || {
            let mut c = buf(vec![0f32; 200 * 200]);
            for shape in [GemmShape::tn(200, 200, 300), GemmShape::nt(100, 200, 300)] {
                gemm(&mut scratch, Gemm { shape, a: a.view(), b: b.view(), c: c.view_mut() }).unwrap();
            }
            scratch.bytes()
        };
        assert_eq!(run(), run());
    }
}
